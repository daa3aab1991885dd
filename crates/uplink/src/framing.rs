//! QEMU's framing of frames on a stream: four bytes of length, big-endian, then the frame, without
//! a virtio-net header (`-netdev stream`, `-netdev socket`, passt, libkrun).
//!
//! ```text
//!   bytes   │ forwarded │ frame │ frame │ a part │   room   │
//!           0         start                     end     capacity
//! ```
//! A length that no Ethernet frame has means that both sides disagree where frames begin: what
//! follows cannot be read.

use std::fmt;
use std::ops::Range;

/// Bytes of length before each frame.
pub const LENGTH_LEN: usize = 4;
/// Shortest frame: its Ethernet header.
pub const FRAME_MIN: usize = 14;
/// Longest frame: an IP packet of 65,535 bytes and its Ethernet header, with a VLAN tag.
pub const FRAME_MAX: usize = 65_535 + 18;

/// A length that no frame has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadLength(
    /// The length, in bytes.
    pub u32,
);

impl fmt::Display for BadLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "its stream announces a frame of {} bytes; frames have {FRAME_MIN} to {FRAME_MAX}",
            self.0
        )
    }
}

/// Bytes of a stream that were read and not forwarded.
pub struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Creates an inbox with room for `capacity` bytes, at least the longest frame.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity >= LENGTH_LEN + FRAME_MAX, "every frame fits");
        // Zeroed pages use memory only when they are written.
        Self { bytes: vec![0; capacity], start: 0, end: 0 }
    }

    /// Bytes that were not forwarded.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Removes all bytes.
    pub fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// Room for more bytes; empty if there is a whole frame and no room after it.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.clear();
        } else if self.bytes.len() - self.start < LENGTH_LEN + FRAME_MAX {
            // The rest of its frame may not fit where it is.
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Records that `len` bytes were written to the start of [`room`](Self::room).
    pub fn fill(&mut self, len: usize) {
        assert!(len <= self.bytes.len() - self.end, "no more than there was room for");
        self.end += len;
    }

    /// The place of the first frame.
    pub fn first(&self) -> usize {
        self.start
    }

    /// The frame whose length is at `at`: [`first`](Self::first), or the end of the frame before
    /// it. `None`: it has not arrived as a whole.
    ///
    /// # Errors
    /// [`BadLength`]: it is none.
    pub fn frame(&self, at: usize) -> Result<Option<Range<usize>>, BadLength> {
        let Some(length) = self.bytes[at..self.end].first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes(*length);
        let len = length as usize;
        if !(FRAME_MIN..=FRAME_MAX).contains(&len) {
            return Err(BadLength(length));
        }
        let begins = at + LENGTH_LEN;
        Ok((self.end - begins >= len).then(|| begins..begins + len))
    }

    /// Bytes of a frame.
    pub fn of(&self, frame: &Range<usize>) -> &[u8] {
        &self.bytes[frame.clone()]
    }

    /// Adds bytes, and shows and removes each frame that is whole by then.
    ///
    /// # Errors
    /// [`BadLength`]: the rest cannot be read.
    pub fn add(&mut self, mut bytes: &[u8], mut show: impl FnMut(&[u8])) -> Result<(), BadLength> {
        while !bytes.is_empty() {
            let room = self.room();
            let (now, later) = bytes.split_at(room.len().min(bytes.len()));
            assert!(!now.is_empty(), "there is room while no frame is whole");
            room[..now.len()].copy_from_slice(now);
            self.fill(now.len());
            bytes = later;
            while let Some(frame) = self.frame(self.start)? {
                show(self.of(&frame));
                self.remove_to(frame.end);
            }
        }
        Ok(())
    }

    /// Removes all bytes up to `end`, the end of a frame.
    pub fn remove_to(&mut self, end: usize) {
        assert!((self.start..=self.end).contains(&end), "the end of one of its frames");
        self.start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAPACITY: usize = LENGTH_LEN + FRAME_MAX + 1000;

    fn framed(frames: &[Vec<u8>]) -> Vec<u8> {
        frames.iter().flat_map(|f| [&(f.len() as u32).to_be_bytes()[..], f].concat()).collect()
    }

    /// The frames in these parts of a stream, and how it ended.
    fn read<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, Option<BadLength>, usize) {
        let (mut inbox, mut frames) = (Inbox::new(CAPACITY), Vec::new());
        for part in parts {
            if let Err(bad) = inbox.add(part, |frame| frames.push(frame.to_vec())) {
                return (frames, Some(bad), 0);
            }
        }
        (frames, None, inbox.unsent().len())
    }

    fn lengths() -> impl Strategy<Value = usize> {
        prop_oneof![4 => FRAME_MIN..100, 2 => 100..2000_usize, 1 => FRAME_MAX - 9..=FRAME_MAX]
    }

    proptest! {
        #[test]
        fn any_split_of_the_stream_has_the_same_frames(
            lengths in prop::collection::vec(lengths(), 0..20),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
            rest in 0..LENGTH_LEN + FRAME_MIN,
        ) {
            let of = |(i, len): (usize, usize)| vec![i as u8; len];
            let frames = lengths.into_iter().enumerate().map(of).collect::<Vec<_>>();
            let mut bytes = framed(&frames);
            let last = framed(&[vec![255; FRAME_MIN]]);
            bytes.extend(&last[..rest]);
            let mut cuts = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect::<Vec<_>>();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]);
            prop_assert_eq!(read(parts), (frames, None, rest));
        }

        #[test]
        fn length_that_no_frame_has_ends_the_stream(
            lengths in prop::collection::vec(lengths(), 0..4),
            length in prop_oneof![0..FRAME_MIN as u32, FRAME_MAX as u32 + 1..=u32::MAX],
            rest in prop::collection::vec(any::<u8>(), 0..100),
            piece in 1..100_usize,
        ) {
            let frames = lengths.into_iter().map(|len| vec![7; len]).collect::<Vec<_>>();
            let bytes = [framed(&frames), length.to_be_bytes().to_vec(), rest].concat();
            prop_assert_eq!(read(bytes.chunks(piece)), (frames, Some(BadLength(length)), 0));
        }
    }

    #[test]
    fn limits_are_those_of_ethernet_frames() {
        for (len, is_bad) in [(0, true), (13, true), (14, false), (65_553, false), (65_554, true)] {
            let mut inbox = Inbox::new(CAPACITY);
            inbox.room()[..LENGTH_LEN].copy_from_slice(&u32::to_be_bytes(len));
            inbox.fill(LENGTH_LEN);
            let frame = inbox.frame(inbox.first());
            assert_eq!(frame, if is_bad { Err(BadLength(len)) } else { Ok(None) }, "{len}");
        }
        let text = BadLength(u32::MAX).to_string();
        assert!(text.contains("4294967295 bytes") && text.contains("14 to 65553"), "{text}");
    }
}
