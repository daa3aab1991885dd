//! Tests of direct reads into the guest's buffers.

use shm::SegMut;
use switch::direct::{DirectFrame, Lent};

use super::*;

/// Requests room for `frames` frames of `len` bytes, and writes `bytes(i)` there as a reader would.
/// Returns the room of each.
fn fill(rx: &mut Rx, frames: usize, len: u32, bytes: impl Fn(usize) -> Vec<u8>) -> Vec<u32> {
    let mut lent = Lent::default();
    let Some(direct) = rx.egress.direct() else { return Vec::new() };
    direct.lend(frames, len, &mut lent);
    let mut i = 0;
    lent.for_each_frame(|segs, _| {
        let bytes = bytes(i);
        let mut rest = &bytes[..];
        segs.for_each(|mut seg: SegMut<'_>| {
            let n = seg.write(&rest[..rest.len().min(seg.len() as usize)]);
            rest = &rest[n as usize..];
        });
        i += 1;
    });
    let rooms = lent.lens().collect();
    drop(lent);
    rooms
}

/// Number of frames there is room for.
pub(super) fn lent(rx: &mut Rx) -> usize {
    let mut lent = Lent::default();
    rx.egress.direct().unwrap().lend(8, 60, &mut lent);
    lent.lens().count()
}

fn accept(rx: &mut Rx, came: &[(u32, VnetHdr)]) -> usize {
    let came: Vec<_> = came.iter().map(|(len, hdr)| DirectFrame { len: *len, hdr: *hdr }).collect();
    let done = rx.egress.direct().unwrap().accept(&came);
    rx.egress.flush();
    done
}

#[test]
fn small_frames_get_a_chain_each() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        for lens in [&[2000][..], &[12, 2000], &[5, 5, 5, 1000, 900], &[1600], &[600]] {
            rx.post(lens);
        }
        let rooms = fill(&mut rx, 64, 1500, |i| frame(1500 - i, i as u8));
        assert_eq!(rooms, [1988, 2000, 1903, 1588], "the last is too small");
        assert_eq!(accept(&mut rx, &[(1500, TSO), (1499, VnetHdr::NONE), (1498, TSO)]), 3);
        let found = rx.take_found(12);
        let want = [(TSO, 0), (VnetHdr::NONE, 1), (TSO, 2)];
        assert_eq!(found.len(), 3);
        for (found, (hdr, i)) in found.iter().zip(want) {
            assert_eq!((found.hdr, found.chains), (hdr, 1));
            assert!(found.bytes == frame(1500 - i, i as u8), "{features:?}");
        }
        assert_eq!(
            (rx.stats.frames.get(), rx.stats.bytes.get(), rx.stats.groups.get()),
            (3, 4497, 1)
        );
        // Room that was lent and not needed is lent again.
        assert_eq!(fill(&mut rx, 2, 1500, |_| frame(60, 9)), [1588]);
        assert_eq!(accept(&mut rx, &[(60, TSO)]), 1);
        assert!(rx.take_found(12)[0].bytes == frame(60, 9));
    }
}

#[test]
fn long_frame_takes_as_many_chains_as_it_fills() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        (0..12).for_each(|_| rx.post(&[1000, 536]));
        assert_eq!(fill(&mut rx, 8, 9000, |_| frame(5000, 1)), [6 * 1536 - 12], "one at a time");
        assert_eq!(accept(&mut rx, &[(5000, TSO)]), 1);
        let found = rx.take_found(12);
        assert_eq!((found.len(), found[0].chains, found[0].hdr), (1, 4, TSO));
        assert!(found[0].bytes == frame(5000, 1));
        // More than available: all there is.
        assert_eq!(fill(&mut rx, 8, 60_000, |_| frame(60, 2)), [8 * 1536 - 12]);
        assert_eq!(accept(&mut rx, &[(60, TSO)]), 1);
        assert_eq!(rx.take_found(12)[0].chains, 1);
    }
}

#[test]
fn without_mergeable_buffers_a_frame_is_in_one_chain() {
    let format = Format { mergeable: false, hdr_len: 10, ..format() };
    let mut rx = Rx::with(Features::default(), format);
    (0..3).for_each(|_| rx.post(&[10, 2000]));
    assert_eq!(fill(&mut rx, 8, 60_000, |_| frame(2000, 1)), [2000]);
    assert_eq!(accept(&mut rx, &[(2000, TSO)]), 1);
    let found = rx.take_found(10);
    assert_eq!((found.len(), found[0].hdr), (1, TSO));
    assert!(found[0].bytes == frame(2000, 1));
}

#[test]
fn frames_not_accepted_are_left_and_can_be_taken_back() {
    let takes = Offloads { tso4: false, ..Offloads::ALL };
    let mut rx = Rx::with(Features::default(), Format { takes, frame_len_max: 1518, ..format() });
    (0..4).for_each(|_| rx.post(&[7, 3000]));
    assert_eq!(fill(&mut rx, 4, 1500, |i| frame(2000, i as u8)).len(), 4);
    assert_eq!(accept(&mut rx, &[(1500, VnetHdr::NONE), (1500, TSO), (60, VnetHdr::NONE)]), 1);
    let direct = rx.egress.direct().unwrap();
    for (i, n) in [(0, 1), (1, 2)] {
        let mut out = vec![0; 2000];
        direct.take_back(i, &mut out);
        assert!(out == frame(2000, n));
    }
    assert_eq!(accept(&mut rx, &[(1519, VnetHdr::NONE)]), 0, "longer than its MTU");
    assert_eq!(rx.one(frame(100, 7)), 1, "the chains are reused");
    assert_eq!(rx.take_found(12).len(), 2);
}

#[test]
fn nothing_is_lent_by_a_queue_that_is_down_or_empty() {
    let mut rx = Rx::new();
    assert_eq!(fill(&mut rx, 8, 60, |_| unreachable!()), [0_u32; 0]);
    rx.post(&[2000]);
    rx.egress.enable(false);
    assert!(rx.egress.direct().is_none());
    rx.egress.enable(true);
    assert_eq!(fill(&mut rx, 8, 60, |_| frame(60, 1)), [1988]);
    rx.egress.deactivate();
    assert!(rx.egress.direct().is_none());
}

#[test]
fn buffers_outside_memory_are_not_lent() {
    let mut rx = Rx::new();
    rx.post(&[2000]);
    rx.post_at(vec![Buf { addr: BASE + 2 * HALF - 100, len: 2000, write: true }]);
    rx.post(&[2000]);
    assert_eq!(fill(&mut rx, 8, 1500, |i| frame(60, i as u8)), [1988]);
    assert_eq!(accept(&mut rx, &[(60, TSO)]), 1);
    assert_eq!(fill(&mut rx, 8, 1500, |_| unreachable!()), [0_u32; 0]);
    // Nor buffers across two regions, which only the copying path supports.
    let mut rx = Rx::new();
    rx.post_at(vec![Buf { addr: EDGE - 500, len: 2000, write: true }]);
    assert_eq!(fill(&mut rx, 8, 1500, |_| unreachable!()), [0_u32; 0]);
    assert_eq!(rx.one(frame(1500, 1)), 1);
    assert!(rx.take_found(12)[0].bytes == frame(1500, 1));
}

#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_truncated_under_lent_buffers_costs_the_frame_and_the_port() {
    let mut rx = Rx::new();
    rx.post_at(vec![Buf { addr: EDGE, len: 9000, write: true }]);
    assert_eq!(fill(&mut rx, 1, 1500, |_| frame(60, 1)), [8988]);
    let direct = rx.egress.direct().unwrap();
    assert_eq!(direct.record_failure(0, 8988), Ok(()), "the memory is not lost");
    rx.guest.files[1].set_len(0).unwrap();
    let direct = rx.egress.direct().unwrap();
    assert_eq!(direct.record_failure(0, 8988), Err(Fault(LOST.into())));
    assert_eq!(rx.stats.drops_bad_addr.get(), 2);
}
