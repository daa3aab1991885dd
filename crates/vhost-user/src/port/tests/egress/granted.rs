//! Tests with frames in pages that another guest granted.

use std::collections::HashMap;
use std::sync::Mutex;

use shm::{Domain, Failed, Grants, Piece, Side};

use super::*;

/// Pages in memory, by reference; counts its calls.
#[derive(Default)]
struct Pages {
    pages: HashMap<u32, Vec<u8>>,
    calls: Mutex<usize>,
}

impl Grants for Pages {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        *self.calls.lock().unwrap() += 1;
        for piece in pieces {
            let len = piece.len() as usize;
            let Side::Granted { gref, offset, .. } = piece.src() else { continue };
            let page = self.pages.get(&gref).and_then(|page| page.get(offset.into()..)?.get(..len));
            if let (Some(page), Side::Mapped(mut to)) = (page, piece.dst()) {
                to.write(page);
                piece.set(Ok(()));
            } else {
                piece.set(Err(Failed::Source));
            }
        }
    }
}

const LEN: u16 = 1500;
/// Length of a frame's first slot: all that is parsed, and some more.
const FIRST: u16 = 200;
const REST: u16 = LEN - FIRST;

fn bytes(gref: u32) -> Vec<u8> {
    (0..LEN).map(|i| (i as u32 * 7 + gref) as u8 | 1).collect()
}

/// Puts a frame for each of `frames`: references of its first bytes and of the others. Pages below
/// 100 exist. Returns the frames received, which ones were unreadable, and the calls to the host.
pub(in super::super) fn put(rx: &mut Rx, frames: &[(u32, u32)]) -> (Vec<Found>, Vec<bool>, usize) {
    let pages = frames.iter().flat_map(|(a, b)| [*a, *b]).filter(|gref| *gref < 100);
    let host = Arc::new(Pages {
        pages: pages.map(|gref| (gref, bytes(gref))).collect(),
        ..Pages::default()
    });
    let domain = Domain::new(1, host.clone());
    let mut arena = [];
    let mut burst = Burst::default();
    burst.permit_granted(&mut [], &mut arena);
    for (first, rest) in frames {
        burst.segs.push(Seg::granted(&domain, *first, 0, FIRST).unwrap());
        burst.segs.push(Seg::granted(&domain, *rest, FIRST, REST).unwrap());
        burst.push_at(burst.segs.len() - 2, 2, LEN.into(), VnetHdr::NONE);
    }
    burst.snapshot();
    let picks: Vec<u16> = (0..frames.len() as u16).collect();
    assert!(rx.egress.accepts_granted());
    assert_eq!(rx.egress.put(&burst, &picks), Ok(frames.len()));
    let bad = (0..frames.len()).map(|i| burst.is_excluded(i)).collect();
    rx.egress.flush();
    let calls = *host.calls.lock().unwrap();
    (rx.take_found(12), bad, calls)
}

#[test]
fn a_burst_from_grants_is_copied_with_one_call_into_any_chains() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        for lens in [&[2000][..], &[12, 2000], &[5, 5, 5, 1000, 500], &[700], &[700], &[700]] {
            rx.post(lens);
        }
        let (found, bad, calls) = put(&mut rx, &[(1, 1), (2, 2), (3, 3), (4, 4)]);
        // One for the heads, one for all the rest.
        assert_eq!(calls, 2);
        assert_eq!(bad, [false; 4]);
        assert_eq!(found.iter().map(|f| f.chains).collect::<Vec<_>>(), [1, 1, 1, 3]);
        for (i, frame) in found.into_iter().enumerate() {
            assert_eq!(frame.bytes, bytes(i as u32 + 1));
        }
    }
}

#[test]
fn invalid_grants_read_as_zero_and_other_frames_are_unaffected() {
    let mut rx = Rx::new();
    for _ in 0..3 {
        rx.post(&[2000]);
    }
    // Old contents of the receiver's buffer and data of others do not leak.
    for buf in rx.posted.iter().flat_map(|(_, bufs)| bufs) {
        let seg = rx.guest.memory.seg_mut(buf.addr, buf.len, &mut 0);
        seg.unwrap().write(&[0xee; 2000]);
    }
    let (found, bad, _) = put(&mut rx, &[(1, 1), (2, 100), (3, 3)]);
    assert_eq!(bad, [false, true, false]);
    assert_eq!([&found[0].bytes, &found[2].bytes], [&bytes(1), &bytes(3)]);
    let (first, rest) = found[1].bytes.split_at(FIRST.into());
    assert_eq!(first, &bytes(2)[..FIRST.into()]);
    assert_eq!(rest, [0; REST as usize]);
}
