//! Peers that write invalid data into the ring: each fault is reported with its own error, valid
//! chains before it are still delivered, and the ring stays stopped. Every variant of `Malformed`
//! and of `LayoutError` is produced here.
#![allow(clippy::as_conversions)]

mod common;

use common::{
    AVAIL, BASE, FRESH, INDIRECT, LEN, NEXT, PACKED, Raw, SPLIT, TABLE, USED, WRITE, memory_at,
    readable, writable,
};
use ring::virtq::{
    Armed, DeviceQueue, DriverQueue, Features, Layout, LayoutError, Malformed, Taken, Used,
};

/// Size of the rings under test.
const SIZE: u16 = 8;
/// A buffer; the ring does not interpret its address and length.
const BUF: (u64, u32) = (0x77, 60);
/// Where tests start: just before the wrap of the index.
const START: u16 = 65533;

/// Expects `good` chains, then the fault on this and every later call.
fn assert_faults(raw: &Raw, device: &mut DeviceQueue, good: usize, fault: Malformed) {
    let mut taken = Taken::with_capacity(64, SIZE);
    if good > 0 {
        assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(good));
        assert_eq!(taken.chains.len(), good);
        let bufs: usize = taken.chains.iter().map(|c| usize::from(c.reads + c.writes)).sum();
        assert_eq!(taken.bufs.len(), bufs, "no buffer of the bad chain is left behind");
    }
    for _ in 0..2 {
        assert_eq!(device.take(&raw.memory, 64, &mut taken), Err(fault));
        assert!(taken.chains.is_empty() && taken.bufs.is_empty());
        assert!(device.has_work(), "a fault counts as work: it must be reported");
        assert_eq!(device.arm(), Armed::WorkPending);
    }
    assert!(!fault.to_string().is_empty());
}

// ---- split, hostile driver ----

/// A split ring with two valid chains before the third, which the test writes, with head descriptor
/// 2.
fn split(features: Features, third: impl FnOnce(&Raw)) -> (Raw, DeviceQueue) {
    let raw = Raw::new(SIZE);
    raw.used_idx(START);
    let device = raw.device(features, u32::from(START));
    raw.split_desc(BASE, 0, BUF, 0, 0);
    raw.split_desc(BASE, 1, BUF, WRITE, 0);
    third(&raw);
    raw.avail(START, &[0, 1, 2]);
    (raw, device)
}

fn assert_third_split(fault: Malformed, third: impl FnOnce(&Raw)) {
    let (raw, mut device) = split(SPLIT, third);
    assert_faults(&raw, &mut device, 2, fault);
}

#[test]
fn split_index_jumps_by_more_than_the_ring_holds() {
    for jump in [SIZE + 1, SIZE + 2, 1000, 0x8000, u16::MAX] {
        let raw = Raw::new(SIZE);
        raw.used_idx(START);
        let mut device = raw.device(SPLIT, u32::from(START));
        let seen = START.wrapping_add(jump);
        raw.avail_idx(seen);
        assert_faults(&raw, &mut device, 0, Malformed::IndexJump { seen, taken: START });
    }
}

#[test]
fn split_index_moves_while_the_device_still_holds_every_chain() {
    let raw = Raw::new(SIZE);
    raw.used_idx(START);
    let mut device = raw.device(SPLIT, u32::from(START));
    let mut taken = Taken::with_capacity(64, SIZE);
    raw.avail(START, &[0; 8]);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(8));
    // Two were put, one of them published: one slot is free, not two.
    device.put(&taken.chains[0], 0);
    device.publish();
    device.put(&taken.chains[1], 0);
    let at = START.wrapping_add(SIZE);
    raw.avail(at, &[0]);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    device.untake(&taken.chains);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    let seen = at.wrapping_add(2);
    raw.avail_idx(seen);
    let fault = Malformed::IndexJump { seen, taken: at.wrapping_add(1) };
    assert_faults(&raw, &mut device, 0, fault);
}

#[test]
fn split_head_out_of_range() {
    for head in [SIZE, SIZE + 1, 0x8000, u16::MAX] {
        let raw = Raw::new(SIZE);
        let mut device = raw.device(SPLIT, 0);
        raw.avail(0, &[0, head, 0]);
        assert_faults(&raw, &mut device, 1, Malformed::DescIndex(head));
    }
}

#[test]
fn split_next_out_of_range() {
    for next in [SIZE, u16::MAX] {
        assert_third_split(Malformed::DescIndex(next), |raw| {
            raw.split_desc(BASE, 2, BUF, NEXT, next);
        });
    }
}

#[test]
fn split_loops_of_every_length() {
    for length in 1..=SIZE {
        assert_third_split(Malformed::ChainTooLong, |raw| {
            let nth = |n: u16| (2 + n % length) % SIZE;
            for n in 0..length {
                raw.split_desc(BASE, nth(n), BUF, NEXT, nth(n + 1));
            }
            // The loop must not invalidate the valid chains.
            if length > SIZE - 2 {
                raw.split_desc(BASE, 0, BUF, 0, 0);
                raw.split_desc(BASE, 1, BUF, WRITE, 0);
                raw.split_desc(BASE, 7, BUF, NEXT, 2);
            }
        });
    }
}

#[test]
fn split_chain_of_exactly_the_ring_is_legal() {
    let raw = Raw::new(SIZE);
    let mut device = raw.device(SPLIT, 0);
    for i in 0..SIZE {
        let flags = if i + 1 < SIZE { NEXT } else { 0 };
        raw.split_desc(BASE, i, BUF, flags, i + 1);
    }
    raw.avail(0, &[0]);
    let mut taken = Taken::with_capacity(64, SIZE);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    assert_eq!((taken.chains[0].slots, taken.chains[0].reads), (SIZE, SIZE));
}

#[test]
fn split_read_after_write() {
    assert_third_split(Malformed::ReadAfterWrite, |raw| {
        raw.split_desc(BASE, 2, BUF, NEXT, 3);
        raw.split_desc(BASE, 3, BUF, WRITE | NEXT, 4);
        raw.split_desc(BASE, 4, BUF, 0, 0);
    });
    assert_third_split(Malformed::ReadAfterWrite, |raw| {
        raw.split_desc(BASE, 2, (TABLE, 32), INDIRECT, 0);
        raw.split_desc(TABLE, 0, BUF, WRITE | NEXT, 1);
        raw.split_desc(TABLE, 1, BUF, 0, 0);
    });
}

#[test]
fn split_indirect_not_negotiated() {
    let features = Features { indirect: false, ..SPLIT };
    let (raw, mut device) = split(features, |raw| {
        raw.split_desc(BASE, 2, (TABLE, 16), INDIRECT, 0);
    });
    assert_faults(&raw, &mut device, 2, Malformed::Indirect);
}

#[test]
fn split_indirect_with_next() {
    assert_third_split(Malformed::Indirect, |raw| {
        raw.split_desc(BASE, 2, (TABLE, 16), INDIRECT | NEXT, 3);
    });
}

#[test]
fn split_indirect_inside_indirect() {
    assert_third_split(Malformed::Indirect, |raw| {
        raw.split_desc(BASE, 2, (TABLE, 32), INDIRECT, 0);
        raw.split_desc(TABLE, 0, BUF, NEXT, 1);
        raw.split_desc(TABLE, 1, (TABLE, 32), INDIRECT, 0);
    });
}

#[test]
fn split_indirect_table_of_illegal_length() {
    for len in [0, 1, 15, 17, 24, 16 * u32::from(SIZE) + 1, 16 * u32::from(SIZE + 1), u32::MAX] {
        assert_third_split(Malformed::IndirectLen(len), |raw| {
            raw.split_desc(BASE, 2, (TABLE, len), INDIRECT, 0);
        });
    }
}

#[test]
fn split_indirect_table_outside_memory_or_unaligned() {
    for addr in [0, BASE - 16, BASE + LEN, BASE + LEN - 16, u64::MAX - 15, TABLE + 4, TABLE + 1] {
        assert_third_split(Malformed::IndirectOutside(addr), |raw| {
            raw.split_desc(BASE, 2, (addr, 32), INDIRECT, 0);
        });
    }
}

#[test]
fn split_indirect_loop_or_next_outside_its_table() {
    assert_third_split(Malformed::ChainTooLong, |raw| {
        raw.split_desc(BASE, 2, (TABLE, 32), INDIRECT, 0);
        raw.split_desc(TABLE, 0, BUF, NEXT, 1);
        raw.split_desc(TABLE, 1, BUF, NEXT, 0);
    });
    // Inside the ring's size and inside memory, but not inside the table.
    assert_third_split(Malformed::DescIndex(2), |raw| {
        raw.split_desc(BASE, 2, (TABLE, 32), INDIRECT, 0);
        raw.split_desc(TABLE, 0, BUF, NEXT, 2);
        raw.split_desc(TABLE, 2, BUF, 0, 0);
    });
}

#[test]
fn burst_of_long_chains_is_cut_before_it_needs_memory() {
    let size = 1024;
    let raw = Raw::new(size);
    let mut device = raw.device(SPLIT, 0);
    for i in 0..size {
        raw.split_desc(BASE, i, BUF, if i + 1 < size { NEXT } else { 0 }, i + 1);
    }
    // Every head is the same chain, as long as the ring: 64 of them are 65536 buffers.
    raw.avail(0, &[0; 1024]);
    let mut taken = Taken::with_capacity(64, size);
    let room = taken.bufs.capacity();
    for _ in 0..100 {
        assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
        assert_eq!(taken.bufs.capacity(), room);
    }
    // A caller without room still gets one chain at a time.
    let mut tiny = Taken::with_capacity(0, 0);
    assert_eq!(device.take(&raw.memory, 64, &mut tiny), Ok(1));
}

// ---- packed, hostile driver ----

/// A packed ring with two valid chains before the third, which the test writes from slot 2.
fn packed(features: Features, third: impl FnOnce(&Raw)) -> (Raw, DeviceQueue) {
    let raw = Raw::new(SIZE);
    let device = raw.device(features, FRESH);
    raw.packed_desc(BASE, 0, BUF, 0, AVAIL);
    raw.packed_desc(BASE, 1, BUF, 1, AVAIL | WRITE);
    third(&raw);
    (raw, device)
}

fn assert_third_packed(fault: Malformed, third: impl FnOnce(&Raw)) {
    let (raw, mut device) = packed(PACKED, third);
    assert_faults(&raw, &mut device, 2, fault);
}

#[test]
fn packed_id_outside_the_ring_is_echoed_and_indexes_nothing() {
    let (raw, mut device) = packed(PACKED, |raw| {
        raw.packed_desc(BASE, 2, BUF, u16::MAX, AVAIL | WRITE);
    });
    let mut taken = Taken::with_capacity(64, SIZE);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(3));
    assert_eq!(taken.chains[2].id, u16::MAX);
    for chain in &taken.chains {
        device.put(chain, 7);
    }
    device.publish();
    assert_eq!(raw.get16(BASE + 2 * 16 + 12), u16::MAX);
    assert_eq!(raw.get16(BASE + 2 * 16 + 14), AVAIL | USED | WRITE);
    assert!(!device.has_work());
}

#[test]
fn packed_chain_longer_than_the_ring() {
    let raw = Raw::new(SIZE);
    let mut device = raw.device(PACKED, FRESH);
    for i in 0..SIZE {
        raw.packed_desc(BASE, i, BUF, 0, AVAIL | NEXT);
    }
    assert_faults(&raw, &mut device, 0, Malformed::ChainTooLong);
}

#[test]
fn packed_chain_of_exactly_the_ring_is_legal() {
    let raw = Raw::new(SIZE);
    let mut device = raw.device(PACKED, FRESH);
    for i in 0..SIZE {
        raw.packed_desc(BASE, i, BUF, 0, if i + 1 < SIZE { AVAIL | NEXT } else { AVAIL });
    }
    let mut taken = Taken::with_capacity(64, SIZE);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    assert_eq!((taken.chains[0].slots, taken.chains[0].reads), (SIZE, SIZE));
}

#[test]
fn packed_descriptors_made_available_while_the_device_still_holds_them() {
    let raw = Raw::new(SIZE);
    let mut device = raw.device(PACKED, FRESH);
    let mut taken = Taken::with_capacity(64, SIZE);
    for i in 0..SIZE {
        raw.packed_desc(BASE, i, BUF, i, AVAIL);
    }
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(8));
    device.put(&taken.chains[0], 0);
    device.publish();
    // One slot is free; a chain of two reaches into slots held.
    raw.packed_desc(BASE, 0, BUF, 0, USED | NEXT);
    raw.packed_desc(BASE, 1, BUF, 0, USED);
    let fault = Malformed::IndexJump { seen: 0, taken: 0x8001 };
    assert_faults(&raw, &mut device, 0, fault);
}

#[test]
fn packed_read_after_write() {
    assert_third_packed(Malformed::ReadAfterWrite, |raw| {
        raw.packed_desc(BASE, 2, BUF, 0, AVAIL | WRITE | NEXT);
        raw.packed_desc(BASE, 3, BUF, 0, AVAIL);
    });
    assert_third_packed(Malformed::ReadAfterWrite, |raw| {
        raw.packed_desc(BASE, 2, (TABLE, 32), 0, AVAIL | INDIRECT);
        raw.packed_desc(TABLE, 0, BUF, 0, WRITE);
        raw.packed_desc(TABLE, 1, BUF, 0, 0);
    });
}

#[test]
fn packed_indirect_not_negotiated_nested_or_chained() {
    let features = Features { indirect: false, ..PACKED };
    let (raw, mut device) = packed(features, |raw| {
        raw.packed_desc(BASE, 2, (TABLE, 16), 0, AVAIL | INDIRECT);
    });
    assert_faults(&raw, &mut device, 2, Malformed::Indirect);
    assert_third_packed(Malformed::Indirect, |raw| {
        raw.packed_desc(BASE, 2, (TABLE, 16), 0, AVAIL | INDIRECT | NEXT);
    });
    assert_third_packed(Malformed::Indirect, |raw| {
        raw.packed_desc(BASE, 2, BUF, 0, AVAIL | NEXT);
        raw.packed_desc(BASE, 3, (TABLE, 16), 0, AVAIL | INDIRECT);
    });
    assert_third_packed(Malformed::Indirect, |raw| {
        raw.packed_desc(BASE, 2, (TABLE, 16), 0, AVAIL | INDIRECT);
        raw.packed_desc(TABLE, 0, (TABLE, 16), 0, INDIRECT);
    });
}

#[test]
fn packed_indirect_table_of_illegal_length_or_place() {
    for len in [0, 1, 15, 17, 16 * u32::from(SIZE + 1), u32::MAX] {
        assert_third_packed(Malformed::IndirectLen(len), |raw| {
            raw.packed_desc(BASE, 2, (TABLE, len), 0, AVAIL | INDIRECT);
        });
    }
    for addr in [0, BASE - 16, BASE + LEN, BASE + LEN - 16, u64::MAX - 15, TABLE + 4, TABLE + 1] {
        assert_third_packed(Malformed::IndirectOutside(addr), |raw| {
            raw.packed_desc(BASE, 2, (addr, 32), 0, AVAIL | INDIRECT);
        });
    }
}

#[test]
fn event_words_out_of_range_cost_a_call_at_most() {
    let features = Features { event_idx: true, ..PACKED };
    for off_wrap in [SIZE, 0x7fff, 0x8000 | SIZE, u16::MAX] {
        for flags in 0..5 {
            let (raw, mut device) = packed(features, |_| ());
            raw.set16(BASE + 0x1_0000, off_wrap);
            raw.set16(BASE + 0x1_0002, flags);
            let mut taken = Taken::with_capacity(64, SIZE);
            assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(2));
            device.put(&taken.chains[0], 0);
            device.publish();
            let called = device.call_needed();
            assert!(called || matches!(flags, 1 | 2), "flags {flags}");
            assert!(!device.call_needed(), "nothing new");
        }
    }
}

// ---- layouts ----

const LAYOUT: Layout =
    Layout { size: SIZE, desc: BASE, driver: BASE + 0x1_0000, device: BASE + 0x2_0000 };

/// Both halves refuse the layout, for the same reason.
fn assert_refused(features: Features, layout: Layout, base: u32, error: &LayoutError) {
    let memory = memory_at(BASE, 0);
    let device = DeviceQueue::new(&memory, &layout, features, base).err();
    assert_eq!(device.as_ref(), Some(error));
    let driver = DriverQueue::new(&memory, &layout, features, base, None).err();
    assert_eq!(driver.as_ref(), Some(error));
    assert!(!error.to_string().is_empty());
}

#[test]
fn sizes_no_ring_can_have_are_refused() {
    for size in [0, 3, 12, 32769, u16::MAX] {
        assert_refused(SPLIT, Layout { size, ..LAYOUT }, 0, &LayoutError::Size(size));
    }
    for size in [0, 32769, u16::MAX] {
        assert_refused(PACKED, Layout { size, ..LAYOUT }, FRESH, &LayoutError::Size(size));
    }
}

#[test]
fn start_index_outside_the_ring_is_refused() {
    assert_refused(SPLIT, LAYOUT, 0x1_0000, &LayoutError::Base(0x1_0000));
    let size = u32::from(SIZE);
    for base in [FRESH | size, FRESH | size << 16, u32::MAX] {
        assert_refused(PACKED, LAYOUT, base, &LayoutError::Base(base));
    }
}

#[test]
fn parts_outside_memory_are_refused() {
    for features in [SPLIT, PACKED, Features { event_idx: true, ..SPLIT }] {
        let base = if features.packed { FRESH } else { 0 };
        for addr in [0, BASE - 16, BASE + LEN, u64::MAX - 15, 0x8000_0000_0000_0000] {
            let outside = |part| LayoutError::Outside { part, addr };
            let layout = Layout { desc: addr, ..LAYOUT };
            assert_refused(features, layout, base, &outside("desc"));
            let layout = Layout { driver: addr, ..LAYOUT };
            assert_refused(features, layout, base, &outside("driver"));
            let layout = Layout { device: addr, ..LAYOUT };
            assert_refused(features, layout, base, &outside("device"));
        }
    }
}

#[test]
fn part_that_reaches_beyond_memory_is_refused() {
    let addr = BASE + LEN - 16 * u64::from(SIZE);
    assert_refused(
        SPLIT,
        Layout { desc: addr + 16, ..LAYOUT },
        0,
        &LayoutError::Outside { part: "desc", addr: addr + 16 },
    );
    // Exactly to the end is valid; with the event word it is one word too long.
    let driver = BASE + LEN - 4 - 2 * u64::from(SIZE);
    let layout = Layout { desc: addr, driver, ..LAYOUT };
    assert!(DeviceQueue::new(&memory_at(BASE, 0), &layout, SPLIT, 0).is_ok());
    let event_idx = Features { event_idx: true, ..SPLIT };
    let outside = LayoutError::Outside { part: "driver", addr: driver };
    assert_refused(event_idx, layout, 0, &outside);
}

#[test]
fn unaligned_parts_are_refused() {
    let unaligned = |part, addr| LayoutError::Unaligned { part, addr };
    let desc = BASE + 8;
    assert_refused(SPLIT, Layout { desc, ..LAYOUT }, 0, &unaligned("desc", desc));
    assert_refused(PACKED, Layout { desc, ..LAYOUT }, FRESH, &unaligned("desc", desc));
    let driver = BASE + 0x1_0001;
    assert_refused(SPLIT, Layout { driver, ..LAYOUT }, 0, &unaligned("driver", driver));
    let driver = BASE + 0x1_0002;
    assert_refused(PACKED, Layout { driver, ..LAYOUT }, FRESH, &unaligned("driver", driver));
    let device = BASE + 0x2_0002;
    assert_refused(SPLIT, Layout { device, ..LAYOUT }, 0, &unaligned("device", device));
    assert_refused(PACKED, Layout { device, ..LAYOUT }, FRESH, &unaligned("device", device));
}

#[test]
fn region_whose_mapping_is_skewed_against_its_addresses_is_refused() {
    // The guest addresses are aligned, the mapped memory is not: atomics would tear.
    for offset in [1, 2, 4, 6, 8, 12] {
        let memory = memory_at(BASE, offset);
        for features in [SPLIT, PACKED] {
            let base = if features.packed { FRESH } else { 0 };
            let error = DeviceQueue::new(&memory, &LAYOUT, features, base).err();
            assert_eq!(error, Some(LayoutError::Outside { part: "desc", addr: BASE }), "{offset}");
        }
    }
}

// ---- hostile device ----

/// A driver half with `n` chains in flight, each of a readable buffer and a writable one of 100
/// bytes; returns their ids.
fn in_flight(raw: &Raw, features: Features, base: u32, n: usize) -> (DriverQueue, Vec<u16>) {
    let mut driver = raw.driver(features, base);
    let ids = (0..n).map(|_| driver.add(&[readable(1, 12), writable(2, 100)]).unwrap()).collect();
    driver.publish();
    (driver, ids)
}

fn assert_device_fault(driver: &mut DriverQueue, good: &[Used], fault: Malformed) {
    let mut out = Vec::new();
    assert_eq!(driver.take_used(64, &mut out), Err(fault));
    assert_eq!(out, good);
    assert!(!fault.to_string().is_empty());
}

#[test]
fn split_device_uses_more_than_was_made_available() {
    for start in [0, START] {
        for jump in [4, SIZE, 0x8000, u16::MAX] {
            let raw = Raw::new(SIZE);
            let (mut driver, _) = in_flight(&raw, SPLIT, u32::from(start), 3);
            let seen = start.wrapping_add(jump);
            raw.used_idx(seen);
            let fault = Malformed::IndexJump { seen, taken: start };
            assert_device_fault(&mut driver, &[], fault);
        }
    }
}

#[test]
fn split_device_uses_a_chain_added_but_not_published() {
    let raw = Raw::new(SIZE);
    let (mut driver, _) = in_flight(&raw, SPLIT, 0, 1);
    let id = driver.add(&[readable(1, 12)]).unwrap();
    raw.used(0, 0, 0);
    raw.used(1, u32::from(id), 0);
    assert_device_fault(&mut driver, &[], Malformed::IndexJump { seen: 2, taken: 0 });
}

#[test]
fn split_device_uses_ids_that_are_not_in_flight() {
    for in_order in [false, true] {
        let features = Features { in_order, ..SPLIT };
        // Outside the ring; free; the middle of a chain.
        for id in [u32::from(SIZE), 0x1_0000, u32::MAX, 6, 1] {
            let raw = Raw::new(SIZE);
            let (mut driver, ids) = in_flight(&raw, features, 0, 3);
            assert_eq!(ids, [0, 2, 4]);
            raw.used(0, 0, 5);
            raw.used(1, id, 0);
            let mut out = Vec::new();
            assert_eq!(driver.take_used(64, &mut out), Err(Malformed::UsedId(id)));
            assert_eq!(out[0], Used { id: 0, len: 5 });
        }
    }
}

#[test]
fn split_device_uses_a_chain_twice() {
    for in_order in [false, true] {
        let raw = Raw::new(SIZE);
        let (mut driver, ids) = in_flight(&raw, Features { in_order, ..SPLIT }, 0, 2);
        raw.used(0, u32::from(ids[0]), 5);
        raw.used(1, u32::from(ids[0]), 5);
        let mut out = Vec::new();
        let fault = Malformed::UsedId(u32::from(ids[0]));
        assert_eq!(driver.take_used(64, &mut out), Err(fault));
        assert_eq!(out[0], Used { id: ids[0], len: 5 });
    }
}

#[test]
fn device_claims_more_than_the_buffer_holds() {
    for len in [101, 112, u32::MAX] {
        let raw = Raw::new(SIZE);
        let (mut driver, ids) = in_flight(&raw, SPLIT, 0, 2);
        raw.used(0, u32::from(ids[0]), 100);
        raw.used(1, u32::from(ids[1]), len);
        let good = [Used { id: ids[0], len: 100 }];
        assert_device_fault(&mut driver, &good, Malformed::UsedLen(len));

        let raw = Raw::new(SIZE);
        let (mut driver, ids) = in_flight(&raw, PACKED, FRESH, 2);
        raw.packed_desc(BASE, 0, (0, 100), ids[0], AVAIL | USED);
        raw.packed_desc(BASE, 2, (0, len), ids[1], AVAIL | USED);
        let good = [Used { id: ids[0], len: 100 }];
        assert_device_fault(&mut driver, &good, Malformed::UsedLen(len));
    }
}

/// Snabb writes the length of a frame that it took, as devices before virtio 1.0 did.
#[test]
fn device_claims_to_have_written_a_chain_that_it_only_reads() {
    for features in [SPLIT, PACKED] {
        let packed = features == PACKED;
        let raw = Raw::new(SIZE);
        let mut driver = raw.driver(features, if packed { FRESH } else { 0 });
        let id = driver.add(&[readable(1, 72)]).unwrap();
        driver.publish();
        if packed {
            raw.packed_desc(BASE, 0, (0, 72), id, AVAIL | USED);
        } else {
            raw.used(0, u32::from(id), 72);
        }
        let mut out = Vec::new();
        assert_eq!(driver.take_used(64, &mut out), Ok(1));
        assert_eq!((out[0], driver.free()), (Used { id, len: 0 }, SIZE));
    }
}

/// Errors that are not checked for do not fail, but ids stay within the ring, and the free count
/// stays within its size. A jump of the index is still detected.
#[test]
fn trusted_split_device_with_invalid_used_elements() {
    let raw = Raw::new(SIZE);
    let (mut driver, ids) = in_flight(&raw, SPLIT, 0, 3);
    driver.trust_device();
    for (slot, id) in [ids[0], ids[0], 1].into_iter().enumerate() {
        raw.used(u16::try_from(slot).unwrap(), u32::from(id), u32::MAX);
    }
    let mut out = Vec::new();
    assert_eq!(driver.take_used(64, &mut out), Ok(3));
    assert_eq!(out[2], Used { id: 1, len: u32::MAX });
    for lap in 3..40 {
        while let Some(id) = driver.add(&[readable(1, 12)]) {
            assert!(id < SIZE && driver.free() < SIZE);
        }
        driver.publish();
        raw.used(lap, u32::from(ids[0]), 0);
        assert_eq!(driver.take_used(64, &mut out), Ok(1));
    }
    raw.used(40, u32::from(SIZE), 0);
    assert_eq!(driver.take_used(64, &mut out), Err(Malformed::UsedId(u32::from(SIZE))));
    let raw = Raw::new(SIZE);
    let (mut driver, _) = in_flight(&raw, SPLIT, 0, 1);
    driver.trust_device();
    raw.used(1, 0, 0);
    assert_device_fault(&mut driver, &[], Malformed::IndexJump { seen: 2, taken: 0 });
}

#[test]
fn packed_device_uses_ids_that_are_not_in_flight_or_twice() {
    for in_order in [false, true] {
        // Outside the ring; free; used already.
        for id in [SIZE, u16::MAX, 5, 0] {
            let raw = Raw::new(SIZE);
            let features = Features { in_order, ..PACKED };
            let (mut driver, ids) = in_flight(&raw, features, FRESH, 3);
            assert_eq!(ids, [0, 1, 2]);
            raw.packed_desc(BASE, 0, (0, 5), 0, AVAIL | USED);
            raw.packed_desc(BASE, 2, (0, 5), id, AVAIL | USED);
            let mut out = Vec::new();
            assert_eq!(driver.take_used(64, &mut out), Err(Malformed::UsedId(u32::from(id))));
            assert_eq!(out[0], Used { id: 0, len: 5 });
        }
    }
}

#[test]
fn packed_device_marks_a_free_ring_used() {
    let raw = Raw::new(SIZE);
    let mut driver = raw.driver(PACKED, FRESH);
    for i in 0..SIZE {
        raw.packed_desc(BASE, i, (0, 0), 0, AVAIL | USED);
    }
    assert!(!driver.has_used());
    assert_device_fault_free(&mut driver);
}

fn assert_device_fault_free(driver: &mut DriverQueue) {
    let mut out = Vec::new();
    assert_eq!(driver.take_used(64, &mut out), Ok(0));
    assert!(out.is_empty());
}
