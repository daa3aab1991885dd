//! Driver half against device half: what one adds, the other takes, in both directions.
#![allow(clippy::as_conversions)]

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use ring::virtq::{
    Armed, Buf, DeviceQueue, DriverQueue, Features, IndirectPool, Layout, Malformed, Taken,
};
use shm::{Area, GuestMemory, Mapping, Region};

const MEMORY: u64 = 1 << 20;

fn memory() -> GuestMemory {
    let mapping = Arc::new(Mapping::memfd("halves", MEMORY).unwrap());
    let region = Region { guest_addr: 0x1000, user_addr: 0, len: MEMORY, offset: 0, mapping };
    GuestMemory::new(vec![region]).unwrap()
}

/// One step of a test on the pair.
#[derive(Clone, Debug)]
enum Op {
    /// Driver adds a chain of so many readable and writable buffers.
    Add(u8, u8),
    /// Driver adds so many chains of one buffer at once.
    AddEach(u8),
    /// Driver publishes and decides on a kick.
    Publish,
    /// Device takes up to so many chains and untakes the last few.
    Take(u8, u8),
    /// Device uses up to so many, as a burst or one by one, and publishes, and decides on a call.
    Use(u8, bool),
    /// Driver collects.
    Collect,
    /// Device goes to sleep if it may.
    DeviceArm,
    /// Driver goes to sleep if it may.
    DriverArm,
    /// Driver goes to sleep until so many are used, if it may.
    DriverArmAfter(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0_u8..4, 0_u8..4).prop_map(|(r, w)| Op::Add(r, w)),
        1 => (1_u8..9).prop_map(Op::AddEach),
        2 => Just(Op::Publish),
        2 => (1_u8..9, 0_u8..4).prop_map(|(n, back)| Op::Take(n, back)),
        2 => (1_u8..9, any::<bool>()).prop_map(|(n, burst)| Op::Use(n, burst)),
        2 => Just(Op::Collect),
        1 => Just(Op::DeviceArm),
        1 => Just(Op::DriverArm),
        1 => (1_u8..9).prop_map(Op::DriverArmAfter),
    ]
}

/// Runs `ops` on a ring of `size` from index `start`, checked against plain queues. With `stays`
/// the driver stays armed.
fn model(
    features: Features,
    size: u16,
    start: u16,
    ops: &[Op],
    stays: bool,
) -> Result<(), TestCaseError> {
    let memory = memory();
    let layout = Layout { size, desc: 0x1000, driver: 0x1000 + 0x20000, device: 0x1000 + 0x40000 };
    let base = if features.packed {
        let half = u32::from(start % size) | u32::from(start & 0x8000);
        half | half << 16
    } else {
        u32::from(start)
    };
    let pool = IndirectPool::new(&memory, 0x1000 + 0x80000, size, 8);
    let mut driver = DriverQueue::new(&memory, &layout, features, base, pool).unwrap();
    let mut device = DeviceQueue::new(&memory, &layout, features, base).unwrap();
    let mut taken = Taken::with_capacity(64, size);
    driver.disarm();
    if stays {
        driver.stay_armed();
    }

    let mut added: VecDeque<(u16, Vec<Buf>)> = VecDeque::new();
    let mut published = VecDeque::new();
    let mut held = VecDeque::new();
    let mut used: VecDeque<(u16, u32)> = VecDeque::new();
    let (mut serial, mut device_asleep, mut driver_asleep) = (0_u64, false, false);
    // How many used chains wake the driver, and whether the ring can count to more than one.
    let (mut wake_at, counts) = (1, !features.packed && features.event_idx);
    // Whether the ring knows the slot of the nth used chain.
    let knows_slot = |driver: &DriverQueue, n: u8, flying: usize| {
        let single = flying == usize::from(driver.size() - driver.free());
        let packed = features.event_idx && !features.in_order && single && usize::from(n) <= flying;
        !features.packed || packed
    };
    // A device that has just started calls once unconditionally.
    let mut begun = false;
    for op in ops {
        match *op {
            Op::Add(reads, writes) => {
                let n = u64::from(reads + writes);
                if n == 0 {
                    continue;
                }
                let bufs: Vec<Buf> = (0..n)
                    .map(|i| Buf {
                        addr: serial + i,
                        len: (serial % 1000) as u32 + 1,
                        write: i >= u64::from(reads),
                    })
                    .collect();
                serial += n;
                match driver.add(&bufs) {
                    Some(id) => added.push_back((id, bufs)),
                    None => prop_assert!(u64::from(driver.free()) < n),
                }
            }
            Op::AddEach(n) => {
                let buf = |i: u64| Buf {
                    addr: serial + i,
                    len: (serial % 1000) as u32 + 1,
                    write: (serial + i).is_multiple_of(2),
                };
                let bufs: Vec<Buf> = (0..u64::from(n)).map(buf).collect();
                serial += u64::from(n);
                let (room, mut ids) = (usize::from(driver.free()), Vec::new());
                let count = driver.add_each(bufs.iter().copied(), |id| ids.push(id));
                prop_assert_eq!((count, ids.len()), (room.min(bufs.len()), count));
                added.extend(ids.into_iter().zip(bufs.into_iter().map(|buf| vec![buf])));
            }
            Op::Publish => {
                let news = !added.is_empty();
                driver.publish();
                published.append(&mut added);
                let kick = driver.kick_needed();
                prop_assert!(kick || !(news && device_asleep), "lost kick");
                device_asleep &= !kick;
            }
            Op::Take(max, back) => {
                let n = device.take(&memory, usize::from(max), &mut taken).unwrap();
                prop_assert_eq!(n, published.len().min(usize::from(max)));
                let keep = n - usize::from(back).min(n);
                for (i, chain) in taken.chains.iter().enumerate() {
                    let (id, bufs): &(u16, Vec<Buf>) = &published[i];
                    prop_assert_eq!(chain.id, *id);
                    let got = [taken.reads(chain), taken.writes(chain)].concat();
                    prop_assert_eq!(&got, bufs);
                    if i < keep {
                        held.push_back((*chain, bufs.clone()));
                    }
                }
                device.untake(&taken.chains[keep..]);
                published.drain(..keep);
            }
            Op::Use(max, burst) => {
                let n = usize::from(max).min(held.len());
                let (chains, bufs): (Vec<_>, Vec<_>) = held.drain(..n).unzip();
                // A burst with nothing to write is put at once, as transmitted frames are.
                let at_once = chains.iter().all(|c: &ring::virtq::Chain| c.writes == 0);
                let written = |bufs: &Vec<Buf>| {
                    bufs.iter().filter(|b| b.write).map(|b| b.len).sum::<u32>() / 2
                };
                let lens = bufs.iter().map(written);
                if at_once && burst {
                    device.put_all(&chains);
                } else if burst {
                    device.put_each(&chains, lens.clone());
                } else {
                    let each = chains.iter().zip(lens.clone());
                    each.for_each(|(chain, len)| device.put(chain, len));
                }
                used.extend(chains.iter().map(|chain| chain.id).zip(lens));
                device.publish();
                let call = device.call_needed();
                let enough = used.len() >= wake_at;
                prop_assert!(call || !(n > 0 && driver_asleep && enough), "lost call");
                let early = call && driver_asleep && counts && !enough;
                prop_assert!(!(early && begun), "call too early");
                prop_assert!(
                    !stays || call == (n > 0 || !begun && call),
                    "suppressed, or spurious"
                );
                begun = true;
                prop_assert!(driver.has_used_many(1) != used.is_empty());
                let flying = added.len() + published.len() + held.len() + used.len();
                let enough = if knows_slot(&driver, 3, flying) { 3 } else { 1 };
                prop_assert_eq!(driver.has_used_many(3), used.len() >= enough);
                driver_asleep &= !call;
            }
            Op::Collect => {
                let mut out = Vec::new();
                driver.take_used(64, &mut out).unwrap();
                prop_assert_eq!(out.len(), used.len().min(64));
                for got in out {
                    prop_assert_eq!((got.id, got.len), used.pop_front().unwrap());
                }
                driver_asleep = false;
                // The driver polls.
                driver.disarm();
            }
            Op::DeviceArm => {
                device_asleep = device.arm() == Armed::Armed;
                prop_assert_eq!(device_asleep, published.is_empty());
                if !device_asleep {
                    device.disarm();
                }
            }
            Op::DriverArm => {
                driver_asleep = driver.arm() == Armed::Armed;
                prop_assert_eq!(driver_asleep, used.is_empty());
                wake_at = 1;
                if !driver_asleep {
                    driver.disarm();
                }
            }
            Op::DriverArmAfter(n) => {
                driver_asleep = driver.arm_after(u16::from(n)) == Armed::Armed;
                let flying = added.len() + published.len() + held.len() + used.len();
                wake_at = if knows_slot(&driver, n, flying) { usize::from(n) } else { 1 };
                prop_assert_eq!(driver_asleep, used.len() < wake_at);
                if !driver_asleep {
                    driver.disarm();
                }
            }
        }
    }
    Ok(())
}

fn features() -> impl Strategy<Value = Features> {
    (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(packed, event_idx, indirect, in_order)| Features {
            packed,
            event_idx,
            indirect,
            in_order,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn what_one_half_adds_the_other_takes(
        features in features(),
        size in prop_oneof![Just(1_u16), Just(2), Just(4), Just(8), Just(64), 1_u16..40],
        start in prop_oneof![any::<u16>(), 65530_u16..=65535, 32760_u16..32776, 0_u16..4],
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let size = if features.packed { size } else { size.next_power_of_two() };
        model(features, size, start, &ops, false)?;
    }

    #[test]
    fn a_driver_that_stays_armed_is_called_whenever_chains_are_used(
        features in features(),
        size in prop_oneof![Just(1_u16), Just(8), Just(64), 1_u16..40],
        start in prop_oneof![any::<u16>(), 65530_u16..=65535, 32760_u16..32776, 0_u16..4],
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let features = Features { event_idx: false, ..features };
        let size = if features.packed { size } else { size.next_power_of_two() };
        model(features, size, start, &ops, true)?;
    }
}

proptest! {
    /// Starts near the wrap of the index among them.
    #[test]
    fn repeat_makes_the_same_chains_available_in_the_same_order(
        bits in 0_u32..8,
        start in prop_oneof![any::<u16>(), 65_400_u16..=65_535],
        uses in prop::collection::vec(0_u16..40, 1..40),
        event_idx in any::<bool>(),
        in_order in any::<bool>(),
    ) {
        let memory = memory();
        let size = 1_u16 << bits;
        let layout = Layout { size, desc: 0x1000, driver: 0x20000, device: 0x40000 };
        let features = Features { event_idx, in_order, ..Features::default() };
        let base = u32::from(start);
        let mut driver = DriverQueue::new(&memory, &layout, features, base, None).unwrap();
        let mut device = DeviceQueue::new(&memory, &layout, features, base).unwrap();
        prop_assert!(!driver.can_repeat(), "no chain was used yet");
        let buf = |i: u16| Buf { addr: 0x60000 + 16 * u64::from(i), len: 16, write: true };
        let heads: Vec<_> = (0..size).map(|i| driver.add(&[buf(i)]).unwrap()).collect();
        driver.publish();
        prop_assert!(driver.can_repeat());
        let mut taken = Taken::with_capacity(64, size);
        let mut next = heads.iter().cycle();
        for n in uses {
            let n = device.take(&memory, usize::from(n.min(size)), &mut taken).unwrap();
            for chain in &taken.chains {
                prop_assert_eq!(Some(&chain.id), next.next());
            }
            device.put_all(&taken.chains);
            device.publish();
            prop_assert_eq!(usize::from(driver.repeat().unwrap()), n);
            prop_assert!(driver.can_repeat());
            driver.publish();
        }
        // All are available once more, and no others.
        let mut all = 0;
        while let n @ 1.. = device.take(&memory, 64, &mut taken).unwrap() {
            all += n;
        }
        prop_assert_eq!(all, usize::from(size));
    }
}

#[test]
fn burst_used_in_order_is_one_used_descriptor() {
    let memory = memory();
    let layout = Layout { size: 16, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    for in_order in [false, true] {
        let features = Features { packed: true, in_order, ..Features::default() };
        let base = 0x8000_8000;
        let mut driver = DriverQueue::new(&memory, &layout, features, base, None).unwrap();
        let mut device = DeviceQueue::new(&memory, &layout, features, base).unwrap();
        let buf = Buf { addr: 0x4000, len: 100, write: false };
        (0..8).for_each(|_| _ = driver.add(&[buf]).unwrap());
        driver.publish();
        let mut taken = Taken::with_capacity(64, 16);
        device.take(&memory, 64, &mut taken).unwrap();
        device.put_all(&taken.chains);
        device.publish();
        let descs = Area::new(&memory, layout.desc, 16 * 8).unwrap();
        let is_used = |i: &usize| descs.load_u16(16 * i + 14) & 0x8080 == 0x8080;
        let written: Vec<usize> = (0..8).filter(is_used).collect();
        assert_eq!(written, if in_order { vec![0] } else { Vec::from_iter(0..8) });
        let mut used = Vec::new();
        assert_eq!(driver.take_used(64, &mut used), Ok(8));
    }
}

#[test]
fn repeat_needs_a_full_split_ring_and_rejects_an_index_ahead_of_it() {
    let memory = memory();
    let layout = Layout { size: 4, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let buf = Buf { addr: 0x4000, len: 100, write: true };
    let full = |features, base, chain: &[Buf]| {
        let mut driver = DriverQueue::new(&memory, &layout, features, base, None).unwrap();
        while driver.add(chain).is_some() {}
        assert_eq!(driver.free(), 0);
        driver.publish();
        driver
    };
    let packed = Features { packed: true, ..Features::default() };
    assert!(!full(packed, 0x8000_8000, &[buf]).can_repeat());
    assert!(!full(Features::default(), 0, &[buf, buf]).can_repeat(), "two entries have no chain");
    let mut driver = full(Features::default(), 0, &[buf]);
    shm::Area::new(&memory, layout.device, 64).unwrap().store_u16(2, 5);
    assert_eq!(driver.repeat(), Err(Malformed::IndexJump { seen: 5, taken: 0 }));
}

/// A packed driver may not make a slot available again before the device has used it. One that does
/// would make the device walk the ring without end.
#[test]
fn packed_slots_made_available_twice_are_a_fault() {
    let memory = memory();
    let layout = Layout { size: 4, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let features = Features { packed: true, ..Features::default() };
    let mut driver = DriverQueue::new(&memory, &layout, features, 0x8000_8000, None).unwrap();
    let mut device = DeviceQueue::new(&memory, &layout, features, 0x8000_8000).unwrap();
    let mut taken = Taken::with_capacity(64, 4);
    for _ in 0..4 {
        driver.add(&[Buf { addr: 0x4000, len: 100, write: true }]).unwrap();
    }
    driver.publish();
    assert_eq!(device.take(&memory, 64, &mut taken), Ok(4));
    // The next lap's flags on slots that we still hold: USED without AVAIL.
    let desc = shm::Area::new(&memory, layout.desc, 64).unwrap();
    for slot in 0..4 {
        desc.store_u16(16 * slot + 14, 1 << 15);
    }
    let again = device.take(&memory, 64, &mut Taken::with_capacity(64, 4));
    assert!(matches!(again, Err(Malformed::IndexJump { .. })), "{again:?}");
    device.untake(&taken.chains);
    assert_eq!(device.base(), 0x8000_8000);
}

/// Chains as long as the ring end a burst early; the next bursts take the rest.
#[test]
fn burst_of_endless_chains_is_cut_short() {
    for packed in [false, true] {
        let memory = memory();
        let layout = Layout { size: 1024, desc: 0x1000, driver: 0x8000, device: 0x10000 };
        let features = Features { packed, indirect: true, ..Features::default() };
        let base = if packed { 0x8000_8000 } else { 0 };
        let mut device = DeviceQueue::new(&memory, &layout, features, base).unwrap();
        let desc = shm::Area::new(&memory, layout.desc, 16 * 1024).unwrap();
        let table = shm::Area::new(&memory, 0x20000, 16 * 1024).unwrap();
        for i in 0..1024_u16 {
            let at = 16 * usize::from(i);
            table.store_u64(at, 0x1000);
            // Length 1; split: NEXT to the following one.
            let next = if packed || i == 1023 { 0 } else { 1 << 32 | u64::from(i + 1) << 48 };
            table.store_u64(at + 8, 1 | next);
            desc.store_u64(at, 0x20000);
            // Length of the table, INDIRECT; packed: AVAIL.
            let flags = if packed { (4 | 1 << 7) << 48 } else { 4 << 32 };
            desc.store_u64(at + 8, (16 * 1024) | flags);
        }
        let avail = shm::Area::new(&memory, layout.driver, 16).unwrap();
        if !packed {
            avail.store_u16(2, 10);
        }
        let mut taken = Taken::with_capacity(64, 1024);
        for _ in 0..10 {
            let memory_taken = taken.bufs.capacity();
            assert_eq!(device.take(&memory, 64, &mut taken), Ok(1), "packed: {packed}");
            assert_eq!((taken.bufs.len(), taken.bufs.capacity()), (1024, memory_taken));
        }
    }
}

/// Buffers that are added again in the order of their use keep their descriptors.
#[test]
fn descriptors_of_buffers_added_in_the_order_of_use_stay_as_they_are() {
    const SIZE: u16 = 16;
    for in_order in [false, true] {
        let features = Features { in_order, ..Features::default() };
        let memory = memory();
        let layout = Layout { size: SIZE, desc: 0x1000, driver: 0x3000, device: 0x4000 };
        let mut driver = DriverQueue::new(&memory, &layout, features, 0, None).unwrap();
        let mut device = DeviceQueue::new(&memory, &layout, features, 0).unwrap();
        let mut taken = Taken::with_capacity(64, SIZE);
        let table = || {
            let mut table = vec![0; 16 * usize::from(SIZE)];
            memory.seg(layout.desc, table.len() as u32, &mut 0).unwrap().read(&mut table);
            table
        };
        let mut of = [0; SIZE as usize];
        let (mut list, mut first) = ((0..SIZE).collect::<Vec<u16>>(), None);
        // Bursts of other lengths than the ring's.
        for burst in [16, 3, 7, 16, 1, 5, 16, 11] {
            let mut each = list.iter().copied();
            let bufs = list.iter().map(|i| Buf { addr: u64::from(*i), len: 64, write: true });
            driver.add_each(bufs, |id| of[usize::from(id)] = each.next().unwrap());
            driver.publish();
            assert_eq!(first.get_or_insert_with(table), &table(), "{in_order}");
            device.take(&memory, burst, &mut taken).unwrap();
            device.put_each(&taken.chains, taken.chains.iter().map(|_| 64));
            device.publish();
            let mut used = Vec::new();
            driver.take_used(usize::MAX, &mut used).unwrap();
            assert_eq!(used.len(), burst);
            list = used.iter().map(|used| of[usize::from(used.id)]).collect();
        }
    }
}
