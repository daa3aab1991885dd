//! A packed ring's device half that is killed between any two of its stores: its successor
//! continues from the ledger, and the driver gets every chain back once, in order.
#![allow(clippy::as_conversions)]

mod common;

use std::sync::Arc;

use common::{BASE, FRESH, PACKED, Raw};
use proptest::prelude::*;
use ring::virtq::{Buf, DeviceQueue, DriverQueue, LayoutError, Ledger, Taken, Used};
use shm::{Area, Mapping};

const SIZE: u16 = 8;
const IN_ORDER: ring::virtq::Features = ring::virtq::Features { in_order: true, ..PACKED };

/// The last stores that were not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The last `put` wrote its ledger and not its descriptor.
    Descriptor,
    /// The last `put` wrote only its entry of the ledger.
    Word,
}

fn ledger() -> (Area, Ledger) {
    let mapping = Arc::new(Mapping::memfd("ledger", Ledger::LEN as u64).unwrap());
    let area = Area::of(&mapping, 0, Ledger::LEN).unwrap();
    (area.clone(), Ledger::new(area).unwrap())
}

/// Moves a fresh ring and its driver to slot and wrap bit `start` by using buffers one by one.
fn ring_at(start: u16, features: ring::virtq::Features) -> (Raw, ring::virtq::DriverQueue, u32) {
    let raw = Raw::new(SIZE);
    let half = (start % SIZE) | u16::from(start < SIZE) << 15;
    let base = u32::from(half) | u32::from(half) << 16;
    let driver = raw.driver(features, base);
    (raw, driver, base)
}

fn bufs(i: u16, slots: u16) -> Vec<Buf> {
    let buf =
        |n| Buf { addr: BASE + 0x4_0000 + u64::from(i * SIZE + n) * 64, len: 64, write: true };
    (0..slots).map(buf).collect()
}

fn used(driver: &mut DriverQueue) -> Vec<(u16, u32)> {
    let mut used: Vec<Used> = Vec::new();
    driver.take_used(64, &mut used).unwrap();
    used.iter().map(|used| (used.id, used.len)).collect()
}

fn take(device: &mut DeviceQueue, raw: &Raw) -> Taken {
    let mut taken = Taken::with_capacity(64, 64);
    device.take(&raw.memory, 64, &mut taken).unwrap();
    taken
}

/// Adds and publishes a chain of each number of slots; returns their ids.
fn add(driver: &mut DriverQueue, slots: &[u16]) -> Vec<u16> {
    let chains = (0..).zip(slots);
    let ids = chains.flat_map(|(i, n)| driver.add(&bufs(i, *n))).collect();
    driver.publish();
    ids
}

/// Where a descriptor's length, id and flags are.
fn tail_at(slot: u16) -> usize {
    16 * usize::from(slot) + 8
}

proptest! {
    #[test]
    fn every_chain_is_used_once_wherever_the_device_is_killed(
        start in 0_u16..2 * SIZE,
        slots in prop::collection::vec(1_u16..=3, 1..=5),
        before in 0_usize..4,
        puts in 1_usize..6,
        missing in prop::sample::select(vec![Missing::Nothing, Missing::Descriptor, Missing::Word]),
        in_order: bool,
    ) {
        let features = if in_order { IN_ORDER } else { PACKED };
        let (raw, mut driver, base) = ring_at(start, features);
        let (area, ledger) = ledger();
        let ids = add(&mut driver, &slots);
        let mut device = raw.device(features, base);
        device.keep(ledger.clone());
        let taken = take(&mut device, &raw);
        prop_assert_eq!(taken.chains.len(), ids.len());
        // Some chains are published before.
        let before = before.min(ids.len() - 1);
        let puts = puts.min(ids.len() - before);
        let mut slot = start % SIZE;
        for chain in &taken.chains[..before] {
            device.put(chain, 7);
            slot = (slot + chain.slots) % SIZE;
        }
        device.publish();
        let mut expected = before;
        for (i, chain) in taken.chains[before..before + puts].iter().enumerate() {
            let (tail, word) = (raw.all.load_u64(tail_at(slot)), area.load_u32(0));
            device.put(chain, 9);
            expected += 1;
            slot = (slot + chain.slots) % SIZE;
            if i + 1 == puts && missing != Missing::Nothing {
                let at = (slot + SIZE - chain.slots) % SIZE;
                raw.all.store_u64(tail_at(at), tail);
                if missing == Missing::Word {
                    area.store_u32(0, word);
                    expected -= 1;
                }
            }
        }
        drop(device);
        let base = ledger.recover(&raw.memory, &raw.layout).unwrap();
        let mut next = raw.device(features, base);
        next.keep(ledger.clone());
        let mut back = used(&mut driver);
        let lens = back.iter().map(|(_, len)| *len).collect::<Vec<_>>();
        let expected_lens: Vec<_> = (0..expected).map(|i| if i < before { 7 } else { 9 }).collect();
        prop_assert_eq!(&lens, &expected_lens, "{:?}", missing);
        let rest = take(&mut next, &raw);
        let rest_ids: Vec<u16> = rest.chains.iter().map(|chain| chain.id).collect();
        prop_assert_eq!(&rest_ids, &ids[expected..]);
        rest.chains.iter().for_each(|chain| next.put(chain, 11));
        next.publish();
        back.extend(used(&mut driver));
        let back: Vec<u16> = back.iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(back, ids, "every chain once, in order");
    }

    /// A burst put at once: with IN_ORDER one used descriptor for all of it.
    #[test]
    fn a_burst_is_used_once_if_the_device_is_killed_before_its_publication(
        start in 0_u16..2 * SIZE,
        slots in prop::collection::vec(1_u16..=3, 1..=5),
        in_order: bool,
        nothing_written: bool,
    ) {
        let features = if in_order { IN_ORDER } else { PACKED };
        let (raw, mut driver, base) = ring_at(start, features);
        let (_area, ledger) = ledger();
        let ids = add(&mut driver, &slots);
        let mut device = raw.device(features, base);
        device.keep(ledger.clone());
        let taken = take(&mut device, &raw);
        if nothing_written {
            device.put_all(&taken.chains);
        } else {
            device.put_each(&taken.chains, std::iter::repeat(9));
        }
        drop(device);
        let base = ledger.recover(&raw.memory, &raw.layout).unwrap();
        let back = used(&mut driver);
        let len = if nothing_written { 0 } else { 9 };
        prop_assert_eq!(back, ids.iter().map(|id| (*id, len)).collect::<Vec<_>>());
        // It continues after the burst.
        let mut next = raw.device(features, base);
        prop_assert_eq!(take(&mut next, &raw).chains.len(), 0);
        let added = driver.add(&bufs(9, 1)).unwrap();
        driver.publish();
        let taken = take(&mut next, &raw);
        prop_assert_eq!(taken.chains.iter().map(|c| c.id).collect::<Vec<_>>(), vec![added]);
    }

    /// Killed after the publication and before the ledger has it, with a driver that has reused
    /// the descriptors by then: they are available, not used.
    #[test]
    fn published_burst_is_not_written_again(
        start in 0_u16..2 * SIZE,
        slots in prop::collection::vec(1_u16..=3, 1..=4),
        reuse: bool,
    ) {
        let (raw, mut driver, base) = ring_at(start, PACKED);
        let (area, ledger) = ledger();
        let slots: Vec<u16> = slots.iter().copied().scan(0, |all, n| {
            *all += n;
            (*all <= SIZE).then_some(n)
        }).collect();
        let ids: Vec<u16> =
            (0..).zip(&slots).map(|(i, n)| driver.add(&bufs(i, *n)).unwrap()).collect();
        driver.publish();
        let mut device = raw.device(PACKED, base);
        device.keep(ledger.clone());
        let taken = take(&mut device, &raw);
        taken.chains.iter().for_each(|chain| device.put(chain, 5));
        let word = area.load_u32(0);
        device.publish();
        area.store_u32(0, word);
        let mut again = 0;
        if reuse {
            prop_assert_eq!(used(&mut driver).len(), ids.len());
            again = (0..SIZE).filter(|i| driver.add(&bufs(*i, 1)).is_some()).count();
            driver.publish();
        }
        let base = ledger.recover(&raw.memory, &raw.layout).unwrap();
        let mut next = raw.device(PACKED, base);
        prop_assert_eq!(take(&mut next, &raw).chains.len(), again);
        prop_assert_eq!(used(&mut driver).len(), if reuse { 0 } else { ids.len() });
    }
}

proptest! {
    /// Frames of several chains: the last one lacks some, and its chains come back empty.
    #[test]
    fn chains_of_a_frame_that_is_not_whole_come_back_empty(
        start in 0_u16..2 * SIZE,
        frames in prop::collection::vec(1_usize..=3, 1..=2),
        lacks in 0_usize..3,
        in_order: bool,
    ) {
        let features = if in_order { IN_ORDER } else { PACKED };
        let (raw, mut driver, base) = ring_at(start, features);
        let (_, ledger) = ledger();
        let ids: Vec<u16> = (0..SIZE).map(|i| driver.add(&bufs(i, 1)).unwrap()).collect();
        driver.publish();
        let mut device = raw.device(features, base);
        device.keep(ledger.clone());
        let taken = take(&mut device, &raw);
        let (mut expected, mut chains) = (Vec::new(), taken.chains.iter());
        let lacks = lacks.min(frames[frames.len() - 1] - 1);
        for (i, n) in frames.iter().enumerate() {
            let made = if i + 1 == frames.len() { n - lacks } else { *n };
            for (k, chain) in chains.by_ref().take(made).enumerate() {
                if k + 1 < *n { device.put_part(chain, 9) } else { device.put(chain, 9) }
            }
            expected.extend(vec![if made < *n { 0 } else { 9 }; made]);
        }
        drop(device);
        let base = ledger.recover(&raw.memory, &raw.layout).unwrap();
        let back = used(&mut driver);
        prop_assert_eq!(back.iter().map(|(_, len)| *len).collect::<Vec<_>>(), expected);
        let rest = take(&mut raw.device(features, base), &raw);
        let left = rest.chains.iter().map(|chain| chain.id);
        let all: Vec<u16> = back.iter().map(|(id, _)| *id).chain(left).collect();
        prop_assert_eq!(all, ids, "every chain once, in order");
    }
}

#[test]
fn ledger_of_another_ring_is_refused() {
    let raw = Raw::new(SIZE);
    let (area, ledger) = ledger();
    let refused = |ledger: &Ledger| ledger.recover(&raw.memory, &raw.layout).unwrap_err();
    assert_eq!(refused(&ledger), LayoutError::Base(0), "never started");
    raw.driver(PACKED, FRESH);
    raw.device(PACKED, FRESH).keep(ledger.clone());
    ledger.recover(&raw.memory, &raw.layout).unwrap();
    // Damaged: positions outside the ring, and a burst without entries.
    area.store_u32(0, 0x8000_8000 | u32::from(SIZE));
    assert!(matches!(refused(&ledger), LayoutError::Base(_)));
    area.store_u32(0, 0x8003_8000);
    raw.packed_desc(BASE, 0, (BASE, 64), 0, common::AVAIL);
    assert!(matches!(refused(&ledger), LayoutError::Base(_)));
    // A ring of another size.
    raw.device(PACKED, FRESH).keep(ledger.clone());
    let layout = ring::virtq::Layout { size: SIZE / 2, ..raw.layout };
    assert!(matches!(ledger.recover(&raw.memory, &layout), Err(LayoutError::Base(_))));
    let short = Area::new(&raw.memory, BASE, Ledger::LEN - 16).unwrap();
    assert!(Ledger::new(short).is_none());
}
