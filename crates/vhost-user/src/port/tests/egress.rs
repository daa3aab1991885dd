//! Tests of the receive queue.

use std::collections::BTreeSet;

use super::*;

pub(super) struct Rx {
    pub(super) guest: Guest,
    pub(super) egress: VirtioEgress,
    pub(super) stats: Arc<EgressStats>,
    /// Buffers of each chain in the ring, oldest first, to find a used chain's contents.
    pub(super) posted: Vec<(u16, Vec<Buf>)>,
}

/// A frame as the guest receives it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    hdr: VnetHdr,
    /// Number of its chains, and `num_buffers` of its header.
    chains: u16,
    bytes: Vec<u8>,
}

impl Rx {
    pub(super) fn with(features: Features, format: Format) -> Self {
        let (guest, device) = Guest::new(features);
        let stats = Arc::new(EgressStats::default());
        let mut egress = VirtioEgress::new(Arc::clone(&stats));
        egress.activate(device, Arc::clone(&guest.memory), guest.call(), format);
        egress.enable(true);
        Self { guest, egress, stats, posted: Vec::new() }
    }

    pub(super) fn new() -> Self {
        Self::with(Features::default(), format())
    }

    pub(super) fn post_at(&mut self, bufs: Vec<Buf>) {
        let id = self.guest.driver.add(&bufs).unwrap();
        self.guest.driver.publish();
        self.posted.push((id, bufs));
    }

    /// Posts one chain of buffers of these lengths.
    pub(super) fn post(&mut self, lens: &[u32]) {
        let buf = |len: &u32| Buf { addr: self.guest.place(*len), len: *len, write: true };
        let bufs = lens.iter().map(buf).collect();
        self.post_at(bufs);
    }

    /// Puts and publishes; returns the number handled.
    pub(super) fn put(
        &mut self,
        frames: &[(VnetHdr, Vec<u8>)],
        snapshot: bool,
    ) -> Result<usize, Fault> {
        let mut burst = Burst::default();
        for (hdr, bytes) in frames {
            let first = burst.segs.len();
            // In two segments, as a sender may have it.
            let (a, b) = bytes.split_at(bytes.len() / 3);
            burst.segs.extend([Seg::of(a), Seg::of(b)]);
            burst.push_at(first, 2, bytes.len() as u32, *hdr);
        }
        if snapshot {
            burst.snapshot();
        }
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        let done = self.egress.put(&burst, &picks);
        self.egress.flush();
        self.egress.notify();
        done
    }

    pub(super) fn one(&mut self, bytes: Vec<u8>) -> usize {
        self.put(&[(VnetHdr::NONE, bytes)], true).unwrap()
    }

    /// Frames in the used chains, whose headers have `hdr_len` bytes.
    fn take_found(&mut self, hdr_len: usize) -> Vec<Found> {
        let used = self.guest.used();
        let mut at = 0;
        let mut all = Vec::new();
        while at < used.len() {
            let first = self.bytes(used[at].0, used[at].1);
            let hdr = VnetHdr::parse(first.first_chunk().unwrap());
            let chains = if hdr_len == 12 { u16::from_le_bytes([first[10], first[11]]) } else { 1 };
            let mut bytes = first[hdr_len..].to_vec();
            for (id, len) in &used[at + 1..at + usize::from(chains)] {
                bytes.extend(self.bytes(*id, *len));
            }
            at += usize::from(chains);
            all.push(Found { hdr, chains, bytes });
        }
        all
    }

    fn bytes(&mut self, id: u16, len: u32) -> Vec<u8> {
        let at = self.posted.iter().position(|(posted, _)| *posted == id).unwrap();
        let (_, bufs) = self.posted.remove(at);
        let mut bytes = Vec::new();
        for buf in bufs {
            bytes.extend(read(&self.guest.memory, buf.addr, buf.len));
        }
        bytes.truncate(len as usize);
        assert_eq!(bytes.len(), len as usize, "no more than the chain holds");
        bytes
    }
}

#[test]
fn bytes_that_were_parsed_are_delivered_as_copied_whatever_the_sender_writes_then() {
    let cuts = [&[12][..], &[], &[12, 14, 20, 50], &[12, HEAD_LEN], &[12, HEAD_LEN - 1, 2]];
    let lens = [60, HEAD_LEN - 1, HEAD_LEN, HEAD_LEN + 1, 1000];
    let mut seen = BTreeSet::new();
    for features in kinds() {
        for (cuts, len) in cuts.iter().flat_map(|cuts| lens.map(|len| (*cuts, len))) {
            for hdr in [TSO, VnetHdr::NONE] {
                let (mut tx, mut rx) = (Tx::with(features, format()), Rx::with(features, format()));
                rx.post(&[2000]);
                let sent = frame(len, 1);
                tx.chain(&[&hdr.bytes()[..], &[0, 0], &sent[..]].concat(), cuts);
                let (memory, end) = (Arc::clone(&tx.guest.memory), tx.guest.at);
                let (mut copy, mut parsed) = (Box::default(), 0);
                let taken = tx.ingress.burst(64, NOW, &mut tx.scratch, &mut |burst| {
                    burst.snapshot_starts();
                    parsed = if burst.has_starts() { START_LEN } else { HEAD_LEN };
                    write(&memory, BUFFERS, &vec![0xff; (end - BUFFERS) as usize]);
                    copy = burst.copy_of(0);
                    assert_eq!(rx.egress.put(burst, &[0]), Ok(1));
                });
                assert!(taken.is_ok());
                rx.egress.flush();
                let mut want = sent;
                if let Some(payload) = want.get_mut(parsed..) {
                    payload.fill(0xff);
                }
                assert_eq!(*copy, want[..], "{features:?} {cuts:?} {len}");
                assert_eq!(rx.take_found(12), [Found { hdr, chains: 1, bytes: want }]);
                seen.insert((hdr == TSO, parsed));
            }
        }
    }
    // Frames without offloads that begin with a short segment have whole heads, too.
    let all = [(false, START_LEN), (false, HEAD_LEN), (true, HEAD_LEN)];
    assert_eq!(seen, all.into_iter().collect());
}

#[test]
fn frames_are_received_whole_with_their_header() {
    for features in kinds() {
        for snapshot in [true, false] {
            let mut rx = Rx::with(features, format());
            for lens in [&[2000][..], &[12, 2000], &[5, 5, 5, 1000, 500], &[1526]] {
                rx.post(lens);
            }
            let frames: Vec<_> = [60, 14, 1500, 200].map(|n| (TSO, frame(n, n as u8))).into();
            assert_eq!(rx.put(&frames, snapshot), Ok(4));
            let found = rx.take_found(12);
            let want = |(hdr, bytes): &(VnetHdr, Vec<u8>)| Found {
                hdr: *hdr,
                chains: 1,
                bytes: bytes.clone(),
            };
            assert_eq!(found, frames.iter().map(want).collect::<Vec<_>>(), "{features:?}");
            assert_eq!((rx.stats.frames.get(), rx.stats.bytes.get()), (4, 1774));
        }
    }
}

#[test]
fn long_frames_fill_many_small_buffers_and_set_num_buffers() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        for (len, buffer, chains) in
            [(9000, 256, 36), (65_550, 1100, 60), (244, 256, 1), (245, 256, 2)]
        {
            let mut left = chains + 3;
            while left > 0 {
                rx.post(&[buffer]);
                left -= 1;
            }
            let bytes = frame(len, 1);
            assert_eq!(rx.put(&[(TSO, bytes.clone())], true), Ok(1));
            assert_eq!(
                rx.take_found(12),
                [Found { hdr: TSO, chains, bytes }],
                "{len} {features:?}"
            );
            // Uses up the three left over, so that each case starts alike.
            assert_eq!(rx.put(&[(TSO, frame(buffer as usize * 2 + 1, 1))], true), Ok(1));
            assert_eq!(rx.take_found(12)[0].chains, 3);
        }
    }
}

#[test]
fn header_without_mergeable_buffers_has_one_and_legacy_ones_have_none() {
    let plain = Format { mergeable: false, ..format() };
    let mut rx = Rx::with(Features::default(), plain);
    rx.post(&[100]);
    assert_eq!(rx.one(frame(80, 1)), 1);
    assert_eq!(rx.take_found(12)[0].chains, 1);
    let mut rx = Rx::with(Features::default(), Format { hdr_len: 10, ..plain });
    rx.post(&[10, 100]);
    assert_eq!(rx.one(frame(100, 1)), 1);
    assert_eq!(rx.take_found(10)[0].bytes, frame(100, 1));
}

#[test]
fn frame_that_no_buffer_can_hold_is_dropped_and_the_next_one_delivered() {
    let mut rx = Rx::with(Features::default(), Format { mergeable: false, ..format() });
    rx.post(&[100]);
    let frames = [(VnetHdr::NONE, frame(89, 1)), (VnetHdr::NONE, frame(88, 2))];
    assert_eq!(rx.put(&frames, true), Ok(2));
    assert_eq!(rx.take_found(12)[0].bytes, frame(88, 2));
    assert_eq!((rx.stats.drops_too_long.get(), rx.stats.frames.get()), (1, 1));
    // Longer than the negotiated MTU, which does not limit GSO frames.
    let mut rx = Rx::with(Features::default(), Format { frame_len_max: 1518, ..format() });
    rx.post(&[9000]);
    rx.post(&[9000]);
    assert_eq!(rx.put(&[(VnetHdr::NONE, frame(1519, 1)), (TSO, frame(1519, 1))], true), Ok(2));
    assert_eq!((rx.stats.drops_too_long.get(), rx.take_found(12).len()), (1, 1));
    // Larger than the whole ring: it would never fit.
    let mut rx = Rx::new();
    (0..SIZE).for_each(|_| rx.post(&[30]));
    assert_eq!(rx.one(frame(9000, 1)), 1);
    assert_eq!(rx.stats.drops_too_long.get(), 1);
}

#[test]
fn frames_without_buffers_do_not_fit_now_and_request_a_kick() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        rx.post(&[100]);
        rx.post(&[100]);
        let frames = [60, 150, 60].map(|n| (VnetHdr::NONE, frame(n, 1)));
        assert_eq!(rx.put(&frames, true), Ok(1), "the second needs two");
        assert_eq!((rx.stats.full.get(), rx.take_found(12).len()), (1, 1));
        rx.post(&[100]);
        let _ = rx.guest.driver.kick_needed();
        assert!(!rx.egress.arm(), "there is a buffer: re-check");
        assert_eq!(rx.put(&frames[1..2], true), Ok(1));
        assert_eq!(rx.take_found(12)[0].bytes.len(), 150);
        assert!(rx.egress.arm(), "full");
        rx.post(&[100]);
        assert!(rx.guest.driver.kick_needed(), "{features:?}");
        rx.egress.disarm();
        assert_eq!(rx.put(&frames[..1], true), Ok(1));
        rx.post(&[100]);
        assert!(!rx.guest.driver.kick_needed(), "no kick requested: {features:?}");
    }
}

#[test]
fn unused_buffers_are_untaken_and_the_base_excludes_them() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        (0..5).for_each(|_| rx.post(&[100]));
        assert_eq!(rx.put(&[(VnetHdr::NONE, frame(60, 1)), (TSO, frame(160, 1))], true), Ok(2));
        let base = if features.packed { 0x8003_8003 } else { 3 };
        assert_eq!(rx.egress.deactivate(), Some(base));
        assert_eq!(rx.take_found(12).len(), 2);
        assert!(!rx.egress.is_up());
        assert_eq!(rx.one(frame(60, 1)), 1);
        assert_eq!(rx.stats.drops_down.get(), 1);
        let device = DeviceQueue::new(&rx.guest.memory, &LAYOUT, features, base).unwrap();
        rx.egress.activate(device, Arc::clone(&rx.guest.memory), None, format());
        rx.egress.enable(true);
        assert_eq!((rx.one(frame(60, 2)), rx.take_found(12).len()), (1, 1));
    }
}

#[test]
fn disabled_ring_drops_and_leaves_its_buffers() {
    let mut rx = Rx::new();
    rx.post(&[100]);
    rx.egress.enable(false);
    assert_eq!(rx.one(frame(60, 1)), 1);
    assert_eq!(rx.egress.put_parts(&frame(60, 1), &[], &VnetHdr::NONE), Ok(true));
    assert_eq!((rx.stats.drops_down.get(), rx.egress.room(60, 5)), (2, Ok(5)));
    assert!(rx.egress.arm() && rx.guest.used().is_empty());
    rx.egress.enable(true);
    assert_eq!((rx.one(frame(60, 1)), rx.take_found(12).len()), (1, 1));
}

#[test]
fn guest_without_checksums_gets_flags_zero() {
    let takes = Offloads::default();
    let mut rx = Rx::with(Features::default(), Format { takes, ..format() });
    rx.post(&[100]);
    let valid = VnetHdr { flags: switch::vnet::DATA_VALID, ..VnetHdr::NONE };
    assert_eq!(rx.put(&[(valid, frame(60, 1))], true), Ok(1));
    assert_eq!(rx.take_found(12)[0].hdr, VnetHdr::NONE);
}

/// A checksum that no one has verified is verified by the receiver.
#[test]
fn guest_cannot_tell_another_that_its_checksums_were_verified() {
    let partial = VnetHdr { gso_type: switch::vnet::GSO_NONE, gso_size: 0, hdr_len: 0, ..TSO };
    for hdr in [VnetHdr::NONE, partial, TSO] {
        let (mut tx, mut rx) = (Tx::new(), Rx::new());
        rx.post(&[100]);
        tx.send(VnetHdr { flags: hdr.flags | switch::vnet::DATA_VALID, ..hdr }, &frame(60, 1));
        let sent: Vec<_> = tx.all().into_iter().map(|seen| (seen.hdr, seen.bytes)).collect();
        assert_eq!(rx.put(&sent, true), Ok(1));
        assert_eq!(rx.take_found(12), [Found { hdr, chains: 1, bytes: frame(60, 1) }]);
    }
}

#[test]
fn buffers_across_regions_are_filled_and_those_outside_cost_their_frame() {
    for start in [EDGE - 5, EDGE - 40] {
        let mut rx = Rx::new();
        rx.post_at(vec![Buf { addr: start, len: 100, write: true }]);
        assert_eq!(rx.one(frame(80, 1)), 1);
        assert_eq!(rx.take_found(12)[0].bytes, frame(80, 1));
    }
    for addr in [0, BASE - 1, BASE + 2 * HALF - 50, u64::MAX - 50] {
        let mut rx = Rx::new();
        rx.post_at(vec![Buf { addr, len: 100, write: true }]);
        rx.post(&[100]);
        assert_eq!(rx.put(&[60, 61].map(|n| (VnetHdr::NONE, frame(n, 1))), true), Ok(2));
        assert_eq!((rx.stats.drops_bad_addr.get(), rx.stats.frames.get()), (1, 1));
        assert_eq!(rx.guest.used().len(), 2, "the chain was returned");
    }
}

#[test]
fn chain_without_writable_bytes_is_used_up_or_skipped() {
    let mut rx = Rx::new();
    rx.post_at(vec![Buf { addr: BUFFERS, len: 100, write: false }]);
    rx.post(&[100]);
    assert_eq!(rx.one(frame(60, 1)), 1);
    assert_eq!(rx.guest.used().iter().map(|u| u.1).collect::<Vec<_>>(), [0, 72]);
}

#[test]
fn room_counts_whole_frames_and_reports_ones_that_never_fit() {
    let mut rx = Rx::new();
    for _ in 0..5 {
        rx.post(&[50]);
    }
    assert_eq!((rx.egress.room(60, 9), rx.egress.room(38, 9)), (Ok(2), Ok(5)));
    assert_eq!(rx.egress.room(38, 3), Ok(3));
    assert_eq!(rx.egress.room(1000, 9), Ok(0));
    (5..SIZE).for_each(|_| rx.post(&[50]));
    assert_eq!(rx.egress.room(38, 500), Ok(500), "no more chains are taken ahead");
    rx.egress.flush();
    rx.egress.notify();
    assert_eq!(rx.one(frame(30, 1)), 1);
}

#[test]
fn made_frames_are_copied_from_after_their_head() {
    let mut rx = Rx::new();
    rx.post(&[200]);
    let bytes = frame(100, 5);
    let body = [Seg::of(&bytes[40..60]), Seg::of(&bytes[60..])];
    assert_eq!(rx.egress.put_parts(&bytes[..40], &body, &TSO), Ok(true));
    assert_eq!(rx.egress.put_parts(&bytes[..40], &body, &TSO), Ok(false));
    assert!(rx.guest.used().is_empty(), "nothing is visible before the flush");
    assert!(rx.egress.arm(), "full");
    rx.post(&[200]);
    assert!(rx.guest.driver.kick_needed(), "for one buffer");
    rx.egress.flush();
    rx.egress.notify();
    assert_eq!(rx.take_found(12), [Found { hdr: TSO, chains: 1, bytes }]);
}

#[test]
fn one_call_for_a_group_and_none_while_the_driver_polls() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        rx.guest.driver.disarm();
        rx.post(&[100]);
        rx.one(frame(60, 1));
        rx.take_found(12);
        let before = rx.stats.calls.get();
        let ten: Vec<_> = (0..10).map(|n| (VnetHdr::NONE, frame(60, n))).collect();
        (0..10).for_each(|_| rx.post(&[100]));
        assert_eq!((rx.put(&ten, true), rx.take_found(12).len()), (Ok(10), 10));
        assert_eq!(rx.stats.calls.get(), before, "{features:?}");
        let _ = rx.guest.driver.arm();
        (0..10).for_each(|_| rx.post(&[100]));
        assert_eq!((rx.put(&ten, true), rx.stats.calls.get()), (Ok(10), before + 1));
    }
}

#[test]
fn malformed_ring_is_a_fault_once_the_valid_buffers_are_used() {
    let mut rx = Rx::new();
    rx.post(&[100]);
    rx.post(&[50, 50]);
    let desc = Area::new(&rx.guest.memory, BASE, 16 * usize::from(SIZE)).unwrap();
    desc.store_u16(16 + 14, SIZE);
    let frames = [60, 61].map(|n| (VnetHdr::NONE, frame(n, 1)));
    assert_eq!(rx.put(&frames, true), Ok(1), "the next call returns the fault");
    assert_eq!(rx.take_found(12).len(), 1);
    assert!(rx.put(&frames[1..], true).unwrap_err().0.contains("outside the table"));
    assert!(rx.egress.room(60, 1).is_err());
    assert!(rx.egress.put_parts(&frame(60, 1), &[], &VnetHdr::NONE).is_err());
    assert_eq!(rx.egress.deactivate(), Some(1));
}

#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_truncated_under_buffers_harms_no_other_port() {
    let mut rx = Rx::new();
    rx.post(&[100]);
    rx.one(frame(60, 1));
    rx.take_found(12);
    rx.post(&[100]);
    rx.guest.files[0].set_len(0).unwrap();
    assert_eq!(rx.put(&[(VnetHdr::NONE, frame(60, 1))], true), Err(Fault(LOST.into())));
}

/// Issue 14, row 6. The ring itself stays mapped, so it is not malformed; on every path of frames,
/// substitute memory is written for one burst at most.
#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn buffers_truncated_under_an_intact_ring_stop_the_port_after_one_burst() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        rx.guest.at = EDGE;
        (0..16).for_each(|_| rx.post(&[2000]));
        rx.one(frame(60, 1));
        rx.guest.files[1].set_len(0).unwrap();
        assert_eq!(rx.put(&[(VnetHdr::NONE, frame(1500, 1))], true), Ok(1), "it is detected now");
        let lost = Fault(LOST.into());
        // Until the port is stopped.
        for _ in 0..2 {
            let frames = [(VnetHdr::NONE, frame(60, 1))];
            assert_eq!(rx.put(&frames, true), Err(lost.clone()), "{features:?}");
            assert_eq!(rx.put(&frames, false), Err(lost.clone()));
            assert_eq!(rx.egress.room(60, 1), Err(lost.clone()));
            assert_eq!(direct::lent(&mut rx), 0);
        }
        assert_eq!(rx.stats.frames.get(), 2);
        rx.egress.deactivate();
    }
}

/// Issue 14, row 6: a front-end shares memory that is already lost.
#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_that_was_lost_before_the_ring_was_started_stops_the_port() {
    let mut first = Rx::new();
    first.guest.at = EDGE;
    first.post(&[2000]);
    first.guest.files[1].set_len(0).unwrap();
    first.one(frame(60, 1));
    first.egress.deactivate();
    // Another port's memory is lost in between.
    let mut other = Rx::new();
    other.post(&[2000]);
    assert_eq!(other.one(frame(60, 1)), 1);
    let queue = DeviceQueue::new(&first.guest.memory, &LAYOUT, Features::default(), 1).unwrap();
    first.egress.activate(queue, Arc::clone(&first.guest.memory), None, format());
    first.egress.enable(true);
    let put = first.put(&[(VnetHdr::NONE, frame(60, 1))], true);
    assert_eq!(put, Err(Fault(LOST.into())));
}

/// The guest shrinks buffers that were taken: the values read first count.
#[test]
fn taken_buffers_are_not_read_again() {
    let mut rx = Rx::new();
    rx.post(&[1000]);
    let burst = Burst::default();
    assert_eq!(rx.egress.put(&burst, &[]), Ok(0));
    assert_eq!(rx.egress.room(988, 1), Ok(1), "one chain is taken");
    let desc = Area::new(&rx.guest.memory, BASE, 16 * usize::from(SIZE)).unwrap();
    desc.store_u32(8, 100);
    let bytes = frame(1500, 1);
    assert_eq!(rx.egress.put_parts(&bytes, &[], &VnetHdr::NONE), Ok(false));
    rx.post(&[1000]);
    assert_eq!(rx.egress.put_parts(&bytes, &[], &VnetHdr::NONE), Ok(true));
    rx.egress.flush();
    rx.egress.notify();
    assert_eq!(rx.guest.used().iter().map(|u| u.1).collect::<Vec<_>>(), [1000, 512]);
}

#[test]
fn room_for_the_shorter_of_two_held_frames_is_reported_before_sleep() {
    let mut rx = Rx::new();
    rx.post(&[100]);
    rx.post(&[100]);
    assert_eq!(rx.one(vec![1; 250]), 0, "three buffers are needed");
    rx.post(&[100]);
    assert_eq!(rx.one(vec![2; 450]), 0, "five are needed");
    assert!(!rx.egress.arm(), "the first frame fits now");
    assert_eq!(rx.one(vec![1; 250]), 1);
}

/// The rest of a frame in segments: its buffers came while those before were published.
#[test]
fn room_for_the_next_segment_is_reported_before_sleep() {
    for features in kinds() {
        let mut rx = Rx::with(features, format());
        (0..2).for_each(|_| rx.post(&[100]));
        assert_eq!(rx.egress.room(60, 1), Ok(1));
        let mut put = || rx.egress.put_parts(&frame(60, 1), &[], &VnetHdr::NONE);
        assert_eq!([put(), put(), put()], [Ok(true), Ok(true), Ok(false)]);
        (0..2).for_each(|_| rx.post(&[100]));
        rx.egress.flush();
        assert!(!rx.egress.arm(), "it fits now: {features:?}");
    }
}

mod direct;
pub(super) mod granted;
