//! Device start on a ring already in use: after a crash, a migration, or a restore. Issue 14, row
//! 17.
#![allow(clippy::as_conversions)]

mod common;

use common::{BASE, FRESH, PACKED, Raw, SPLIT};
use proptest::prelude::*;
use ring::virtq::{Buf, Features, Malformed, Taken};

const SIZE: u16 = 16;

/// Base that a front-end may send.
#[derive(Clone, Copy, Debug)]
enum Base {
    /// As Cloud Hypervisor after a restore.
    Avail,
    Used,
    /// As DPDK's virtio-user after its back-end died.
    Zero,
}

proptest! {
    /// From every start near the wrap, a device serves every unused buffer, in order, independent
    /// of the base that the front-end sends.
    #[test]
    fn restored_device_serves_the_buffers_that_were_posted_and_not_used(
        start in (0_u16..64).prop_map(|n| n.wrapping_sub(32)),
        posted in 1_u16..=SIZE,
        used in 0_u16..=SIZE,
        sent in prop::sample::select(vec![Base::Avail, Base::Used, Base::Zero]),
    ) {
        let used = used.min(posted);
        let raw = Raw::new(SIZE);
        let mut driver = raw.driver(SPLIT, u32::from(start));
        let buf = |i: u16| Buf { addr: BASE + 0x4_0000 + u64::from(i) * 64, len: 64, write: true };
        let ids: Vec<u16> = (0..posted).map(|i| driver.add(&[buf(i)]).unwrap()).collect();
        driver.publish();
        let mut first = raw.device(SPLIT, u32::from(start));
        let mut taken = Taken::with_capacity(64, SIZE);
        // It takes all, and stops before it uses the last of them.
        prop_assert_eq!(first.take(&raw.memory, 64, &mut taken).unwrap(), usize::from(posted));
        taken.chains[..usize::from(used)].iter().for_each(|chain| first.put(chain, 64));
        first.publish();
        let base = match sent {
            Base::Avail => start.wrapping_add(posted),
            Base::Used => start.wrapping_add(used),
            Base::Zero => 0,
        };
        let mut second = raw.device(SPLIT, u32::from(base));
        let mut taken = Taken::with_capacity(64, SIZE);
        let left = usize::from(posted - used);
        prop_assert_eq!(second.take(&raw.memory, 64, &mut taken).unwrap(), left);
        let again: Vec<u16> = taken.chains.iter().map(|chain| chain.id).collect();
        prop_assert_eq!(&again, &ids[usize::from(used)..]);
        taken.chains.iter().for_each(|chain| second.put(chain, 64));
        second.publish();
        let mut back = Vec::new();
        driver.take_used(64, &mut back).unwrap();
        let back: Vec<u16> = back.iter().map(|used| used.id).collect();
        prop_assert_eq!(back, ids, "every buffer once");
    }

    /// A used index out of reach of the available one is reported as a fault.
    #[test]
    fn used_index_out_of_reach_of_the_available_one_is_a_fault(
        avail: u16,
        off in SIZE + 1..=u16::MAX,
    ) {
        let raw = Raw::new(SIZE);
        raw.used_idx(avail.wrapping_sub(off));
        raw.avail_idx(avail);
        let mut device = raw.device(SPLIT, u32::from(avail));
        let mut taken = Taken::with_capacity(64, SIZE);
        let got = device.take(&raw.memory, 64, &mut taken);
        prop_assert!(matches!(got, Err(Malformed::IndexJump { .. })), "{:?}", got);
    }
}

proptest! {
    /// A packed ring that is drained has the same base after a restart, also where its last lap
    /// ends with the ring and slot 0 belongs to a chain, or to a batch, that began a lap before:
    /// base 0 is then not that of a ring in its first lap.
    #[test]
    fn drained_packed_ring_continues_at_its_base(
        size in 1_u16..=SIZE,
        in_order in any::<bool>(),
        bursts in prop::collection::vec((1_u16..=SIZE, 1_u16..=4), 1..60),
    ) {
        let features = Features { in_order, ..PACKED };
        let raw = Raw::new(size);
        let mut driver = raw.driver(features, FRESH);
        let mut device = raw.device(features, FRESH);
        let mut taken = Taken::with_capacity(64, size);
        let mut back = Vec::new();
        for (slots, long) in bursts {
            let (mut left, long) = (slots.min(size), long.min(size));
            while left > 0 {
                let len = long.min(left);
                left -= len;
                let buf = Buf { addr: BASE + 0x4_0000, len: 64, write: true };
                driver.add(&vec![buf; usize::from(len)]).unwrap();
            }
            driver.publish();
            taken.clear();
            device.take(&raw.memory, 64, &mut taken).unwrap();
            device.put_all(&taken.chains);
            device.publish();
            let base = device.base();
            device = raw.device(features, base);
            prop_assert_eq!(device.base(), base);
            back.clear();
            prop_assert_eq!(driver.take_used(64, &mut back), Ok(taken.chains.len()));
        }
    }
}
