//! Arbitrary bytes of a stream peer, into the parser of QEMU's framing.
//!
//! ```text
//!   split   (u16)   where the input is received in two parts
//!   bytes   ...
//! ```
//! What is found does not depend on where the bytes are split: all at once, one by one, and in two
//! parts there are the same frames, the same end, and the same bytes without a whole frame. Each
//! frame has a legal length and is a part of the input; nothing is kept after it was removed.

use uplink::{BadLength, FRAME_MAX, FRAME_MIN, Inbox, LENGTH_LEN};

use crate::Bytes;

/// Events of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Frames found.
    pub frames: usize,
    /// Bytes at the end without a whole frame.
    pub rest: usize,
    /// A length that ended the stream.
    pub bad: Option<BadLength>,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    let at = usize::from(bytes.u16()).min(bytes.0.len());
    let (first, second) = bytes.0.split_at(at);
    let all = parse(std::iter::once(bytes.0));
    assert_eq!(parse([first, second].into_iter()), all, "split at {at}");
    assert_eq!(parse(bytes.0.chunks(1)), all, "byte by byte");
    let (frames, seen) = all;
    let mut left = bytes.0;
    for frame in frames {
        assert!((FRAME_MIN..=FRAME_MAX).contains(&frame.len()));
        let (length, rest) = left.split_at(LENGTH_LEN);
        assert_eq!(length, (frame.len() as u32).to_be_bytes());
        let (own, rest) = rest.split_at(frame.len());
        assert_eq!(own, frame);
        left = rest;
    }
    match seen.bad {
        Some(BadLength(length)) => assert_eq!(left[..LENGTH_LEN], length.to_be_bytes()),
        None => assert_eq!(left.len(), seen.rest),
    }
    seen
}

/// The frames in these parts of a stream.
fn parse<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, Seen) {
    let mut inbox = Inbox::new(LENGTH_LEN + FRAME_MAX);
    let (mut frames, mut seen) = (Vec::new(), Seen::default());
    for part in parts {
        if let Err(bad) = inbox.add(part, |frame| frames.push(frame.to_vec())) {
            seen = Seen { frames: frames.len(), rest: 0, bad: Some(bad) };
            return (frames, seen);
        }
    }
    (seen.frames, seen.rest) = (frames.len(), inbox.unsent().len());
    (frames, seen)
}

/// Start inputs: frames of the shortest and longest lengths, cut ones, and lengths that are none.
pub fn seeds() -> Vec<Vec<u8>> {
    let framed = |len: usize| [&(len as u32).to_be_bytes()[..], &vec![7; len]].concat();
    let of = |parts: &[Vec<u8>]| [&[9, 0][..], &parts.concat()].concat();
    vec![
        of(&[]),
        of(&[framed(FRAME_MIN), framed(60), framed(1514)]),
        of(&[framed(FRAME_MAX), framed(60)]),
        of(&[framed(60), framed(1514)[..700].to_vec()]),
        of(&[framed(60), vec![0, 0]]),
        of(&[framed(60), vec![255; 8]]),
        of(&[vec![0; 4], framed(60)]),
        of(&[(FRAME_MIN as u32 - 1).to_be_bytes().to_vec()]),
        of(&[(FRAME_MAX as u32 + 1).to_be_bytes().to_vec()]),
    ]
}
