//! Issue 14, rows 4 and 5: bounds on the cost of a guest's chains, for itself and for others.

use std::collections::VecDeque;

use proptest::prelude::*;
use switch::account::burst::{DESCS_MAX, SEGS_MAX as GROUP_SEGS_MAX, TAKEN_SEGS_MAX};

use super::*;

/// Address and number of many small adjacent regions.
const MANY: u64 = BASE + 8 * HALF;
const REGIONS: u64 = 500;
const RING: u16 = 1024;
/// Addresses of a table of one-byte buffers, and of their page.
const TABLE: u64 = BASE + 0x10_0000;
const BYTES: u64 = BASE + 0x20_0000;
const INDIRECT: u16 = 4;

/// Memory with a region for rings and buffers, and [`REGIONS`] of `len` bytes.
fn regions(len: u64) -> Arc<GuestMemory> {
    let region = |guest_addr, len, offset, mapping: &Arc<Mapping>| {
        let mapping = Arc::clone(mapping);
        Region { guest_addr, user_addr: guest_addr, len, offset, mapping }
    };
    let all = Arc::new(Mapping::memfd("all", HALF).unwrap());
    let many = Arc::new(Mapping::memfd("many", (REGIONS * len).next_multiple_of(4096)).unwrap());
    let small = (0..REGIONS).map(|i| region(MANY + i * len, len, i * len, &many));
    let regions = small.chain([region(BASE, HALF, 0, &all)]).collect();
    Arc::new(GuestMemory::new(regions).unwrap())
}

fn layout() -> Layout {
    Layout { size: RING, desc: BASE, driver: BASE + 0x8000, device: BASE + 0x1_0000 }
}

fn base(features: Features) -> u32 {
    if features.packed { 0x8000_8000 } else { 0 }
}

/// A transmit queue over `memory`, and its driver's half.
fn sender(memory: &Arc<GuestMemory>, features: Features) -> (Tx, DriverQueue) {
    let mut tx = Tx::new();
    tx.ingress.deactivate();
    let device = DeviceQueue::new(memory, &layout(), features, base(features)).unwrap();
    tx.ingress.activate(device, Arc::clone(memory), None, format());
    tx.ingress.enable(true);
    (tx, DriverQueue::new(memory, &layout(), features, base(features), None).unwrap())
}

/// A receive queue over `memory`; the caller fills its ring.
fn receiver(
    memory: &Arc<GuestMemory>,
    features: Features,
    format: Format,
) -> (VirtioEgress, Arc<EgressStats>) {
    let stats = Arc::new(EgressStats::default());
    let mut egress = VirtioEgress::new(Arc::clone(&stats));
    let device = DeviceQueue::new(memory, &layout(), features, base(features)).unwrap();
    egress.activate(device, Arc::clone(memory), None, format);
    egress.enable(true);
    (egress, stats)
}

fn buf(addr: u64, len: u64, write: bool) -> Buf {
    Buf { addr, len: u32::try_from(len).unwrap(), write }
}

/// Delivers frames of `len` bytes as one group; returns the number handled.
fn put(egress: &mut VirtioEgress, frames: usize, len: usize) -> usize {
    let bytes = frame(len, 1);
    let mut burst = Burst::default();
    for i in 0..frames {
        burst.segs.push(Seg::of(&bytes));
        burst.push_at(i, 1, len as u32, VnetHdr::NONE);
    }
    burst.snapshot();
    let picks: Vec<u16> = (0..frames as u16).collect();
    let done = egress.put(&burst, &picks).unwrap();
    egress.flush();
    done
}

/// Issue 14, row 4.
#[test]
fn chain_whose_buffers_span_all_regions_costs_no_more_than_the_limit() {
    for packed in [false, true] {
        let memory = regions(4096);
        let features = Features { packed, ..Features::default() };
        let (mut tx, mut driver) = sender(&memory, features);
        let all = buf(MANY, REGIONS * 4096, false);
        driver.add(&[all; 100]).unwrap();
        driver.add(&[buf(MANY, 4096 + 60, false)]).unwrap();
        driver.publish();
        // The first is longer than a burst, too.
        assert_eq!(tx.all(), []);
        let seen = tx.all();
        assert_eq!((seen.len(), seen[0].bytes.len()), (1, 4096 + 48));
        assert_eq!(tx.stats.drops_too_many_segs.get(), 1);
        // Memory for 100 times 500 segments was never allocated.
        assert!(tx.scratch.segs.capacity() <= 2 * TAKEN_SEGS_MAX);
        let mut used = Vec::new();
        assert_eq!(driver.take_used(9, &mut used), Ok(2));
    }
}

#[test]
fn receiver_with_long_chains_costs_a_bounded_number_of_descriptors_a_group() {
    let len = 1000_u16;
    for packed in [false, true] {
        let memory = regions(8);
        let features = Features { packed, indirect: true, ..Features::default() };
        // Every chain is the same table, with more one-byte buffers than a frame needs.
        let all = Area::new(&memory, BASE, HALF as usize).unwrap();
        let desc = |at: u64, addr: u64, len: u32, id: u16, flags: u16, next: u16| {
            let at = (at - BASE) as usize;
            all.store_u64(at, addr);
            all.store_u32(at + 8, len);
            let (a, b) = if packed { (id, flags) } else { (flags, next) };
            all.store_u16(at + 12, a);
            all.store_u16(at + 14, b);
        };
        for i in 0..len {
            let next = if packed || i + 1 == len { 0 } else { 1 };
            desc(TABLE + 16 * u64::from(i), BYTES + u64::from(i), 1, 0, 2 | next, i + 1);
        }
        for i in 0..64 {
            let flags = INDIRECT | if packed { 1 << 7 } else { 0 };
            desc(BASE + 16 * u64::from(i), TABLE, 16 * u32::from(len), i, flags, 0);
            all.store_u16(0x8000 + 4 + 2 * usize::from(i), i);
        }
        if !packed {
            all.store_u16(0x8000 + 2, 64);
        }
        let (mut egress, stats) = receiver(&memory, features, format());
        let (mut done, mut groups) = (0, 0);
        while done < 64 {
            let n = put(&mut egress, 64 - done, 100);
            assert!(n > 0 && n * usize::from(len) <= 3 * DESCS_MAX, "{n} chains in one group");
            done += n;
            assert_eq!(egress.arm(), done == 64, "no sleep while there are more");
            groups += 1;
        }
        assert!(groups > 20);
        assert_eq!((stats.frames.get(), stats.drops_too_long.get()), (64, 0));
    }
}

#[test]
fn frame_that_never_fits_is_known_without_reading_the_ring_again() {
    for (packed, mergeable) in [(false, false), (false, true), (true, false), (true, true)] {
        let memory = regions(8);
        let features = Features { packed, ..Features::default() };
        let mut driver = DriverQueue::new(&memory, &layout(), features, base(features), None);
        for i in 0..64 {
            let chain = [buf(BYTES + 64 * i, 10, true); 3];
            driver.as_mut().unwrap().add(&chain).unwrap();
        }
        driver.as_mut().unwrap().publish();
        let (mut egress, stats) = receiver(&memory, features, Format { mergeable, ..format() });
        let dropped = |n: usize, egress: &mut VirtioEgress| {
            assert_eq!(put(egress, n, 4000), n);
            stats.drops_too_long.get()
        };
        assert_eq!(dropped(1, &mut egress), 1);
        // A further read of the ring would find it malformed.
        let all = Area::new(&memory, BASE, 16 * usize::from(RING)).unwrap();
        for at in (0..16 * usize::from(RING)).step_by(16) {
            all.store_u32(at + 8, 5000);
            if !packed {
                all.store_u16(at + 14, u16::MAX);
            }
        }
        assert_eq!(dropped(64, &mut egress), 65);
        assert_eq!(stats.frames.get(), 0);
    }
}

#[test]
fn frame_without_room_is_held_until_the_guest_adds_buffers() {
    let memory = regions(8);
    let mut driver = DriverQueue::new(&memory, &layout(), Features::default(), 0, None).unwrap();
    let (mut egress, stats) = receiver(&memory, Features::default(), format());
    let chain = [buf(BYTES, 500, true)];
    driver.add(&chain).unwrap();
    driver.publish();
    for _ in 0..3 {
        assert_eq!(put(&mut egress, 1, 900), 0);
        assert!(egress.arm());
    }
    driver.add(&chain).unwrap();
    driver.publish();
    assert!(!egress.arm());
    assert_eq!(put(&mut egress, 1, 900), 1);
    assert_eq!((stats.frames.get(), stats.full.get()), (1, 3));
}

#[test]
fn receive_buffers_over_many_regions_cost_a_bounded_number_of_pieces_a_group() {
    let memory = regions(8);
    let mut driver = DriverQueue::new(&memory, &layout(), Features::default(), 0, None).unwrap();
    let (mut egress, stats) = receiver(&memory, Features::default(), format());
    for group in 1..=3 {
        for _ in 0..8 {
            driver.add(&[buf(MANY, REGIONS * 8, true)]).unwrap();
        }
        driver.publish();
        // Each frame covers nearly all of them.
        assert_eq!(put(&mut egress, 8, 3900), 8);
        let fit = GROUP_SEGS_MAX as u64 / (3912 / 8);
        assert_eq!(stats.frames.get(), fit * group);
        assert_eq!(stats.drops_too_many_segs.get(), (8 - fit) * group, "the others are incomplete");
        let mut used = Vec::new();
        assert_eq!(driver.take_used(9, &mut used), Ok(8), "and are returned too");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// For chains across any regions, a burst has a bounded number of segments, and each chain is
    /// handled once, in order: as a frame, or counted.
    #[test]
    fn burst_has_a_bounded_number_of_segments(
        packed in any::<bool>(),
        // Buffers of each chain, and the regions that each spans.
        chains in prop::collection::vec((1_usize..40, 1_u64..40), 1..60),
        long in prop::collection::vec(0_usize..60, 0..4),
    ) {
        let memory = regions(64);
        let features = Features { packed, ..Features::default() };
        let (mut tx, mut driver) = sender(&memory, features);
        let mut waits = VecDeque::new();
        let (mut bad, mut slots) = (0, 0);
        for (i, (bufs, spans)) in chains.iter().enumerate() {
            let spans = if long.contains(&i) { 300 } else { *spans };
            slots += bufs;
            if slots > usize::from(RING) {
                break;
            }
            driver.add(&vec![buf(MANY, spans * 64, false); *bufs]).unwrap();
            let len = bufs * spans as usize * 64;
            if bufs * spans as usize > SEGS_MAX {
                bad += 1;
            } else if len - 12 <= FRAME_LEN_MAX as usize {
                waits.push_back(len - 12);
            }
        }
        driver.publish();
        for _ in 0..200 {
            let mut segs = 0;
            let shown = tx.ingress.burst(64, NOW, &mut tx.scratch, &mut |burst| {
                segs = burst.segs.len();
                for frame in &burst.frames {
                    assert_eq!(waits.pop_front(), Some(frame.len as usize));
                }
            });
            prop_assert!(segs <= TAKEN_SEGS_MAX, "{segs} segments in a burst");
            prop_assert!(tx.scratch.segs.capacity() <= 2 * TAKEN_SEGS_MAX);
            if shown == Ok(0) {
                break;
            }
        }
        prop_assert!(waits.is_empty());
        prop_assert_eq!(tx.stats.drops_too_many_segs.get(), bad);
    }
}
