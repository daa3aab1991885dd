//! Audit of double fetches: no byte of ring memory or of an indirect table is loaded more than once
//! while one chain is taken or returned. So the values used are the values checked, whatever the
//! peer writes concurrently.
//!
//! `cargo test -p pvswitch-ring --features audit --test audit`
#![allow(clippy::as_conversions)]

mod common;

use std::collections::BTreeMap;

use common::{AVAIL, BASE, FRESH, INDIRECT, NEXT, PACKED, Raw, SPLIT, TABLE, WRITE, readable};
use proptest::prelude::*;
use ring::virtq::{Features, Taken};
use shm::audit;

const SIZE: u16 = 8;

fn assert_once(loads: &BTreeMap<usize, usize>, what: &str) {
    assert!(!loads.is_empty(), "{what}: nothing was loaded, so nothing was audited");
    let twice: Vec<_> = loads.iter().filter(|(_, n)| **n > 1).collect();
    assert!(twice.is_empty(), "{what}: bytes loaded more than once (address, times): {twice:x?}");
}

/// Takes one chain under audit; good and bad ones must both be fetched once.
fn take_one(raw: &Raw, features: Features, base: u32, what: &str) {
    let mut device = raw.device(features, base);
    let mut taken = Taken::with_capacity(64, SIZE);
    audit::begin();
    let _ = device.take(&raw.memory, 1, &mut taken);
    assert_once(&audit::end(), what);
}

#[test]
fn the_audit_sees_a_double_fetch() {
    let raw = Raw::new(SIZE);
    audit::begin();
    let _ = raw.get16(BASE + 14);
    let _ = raw.get16(BASE + 14);
    assert!(audit::end().values().all(|n| *n == 2));
    let _ = raw.get16(BASE);
    assert!(audit::end().is_empty(), "counts nothing outside an audit");
}

#[test]
fn split_chain_is_fetched_once() {
    let raw = Raw::new(SIZE);
    for i in 0..3 {
        raw.split_desc(BASE, i, (1, 2), if i < 2 { NEXT } else { WRITE }, i + 1);
    }
    raw.avail(0, &[0]);
    take_one(&raw, SPLIT, 0, "direct");
    raw.split_desc(BASE, 0, (TABLE, 48), INDIRECT, 0);
    for i in 0..3 {
        raw.split_desc(TABLE, i, (1, 2), if i < 2 { NEXT } else { WRITE }, i + 1);
    }
    take_one(&raw, SPLIT, 0, "indirect");
}

#[test]
fn packed_chain_is_fetched_once() {
    let raw = Raw::new(SIZE);
    for i in 0..3 {
        raw.packed_desc(BASE, i, (1, 2), 0, AVAIL | if i < 2 { NEXT } else { WRITE });
    }
    take_one(&raw, PACKED, FRESH, "direct");
    raw.packed_desc(BASE, 0, (TABLE, 48), 0, AVAIL | INDIRECT);
    take_one(&raw, PACKED, FRESH, "indirect");
}

#[test]
fn used_elements_are_fetched_once() {
    let raw = Raw::new(SIZE);
    for features in [SPLIT, PACKED, Features { in_order: true, ..SPLIT }] {
        let base = if features.packed { FRESH } else { 0 };
        let mut driver = raw.driver(features, base);
        let mut device = raw.device(features, base);
        driver.add(&[readable(1, 2)]).unwrap();
        driver.publish();
        let mut taken = Taken::with_capacity(64, SIZE);
        assert_eq!(device.take(&raw.memory, 1, &mut taken), Ok(1));
        audit::begin();
        device.put(&taken.chains[0], 0);
        device.publish();
        assert!(audit::end().is_empty(), "putting chains reads nothing that the driver may write");
        audit::begin();
        assert_eq!(driver.take_used(1, &mut Vec::new()), Ok(1));
        assert_once(&audit::end(), "used element");
    }
}

/// Issue 14, row 5: a query of a ring with nothing new costs one load.
#[test]
fn query_of_a_ring_without_new_chains_is_one_load() {
    for (features, base) in [(SPLIT, 0), (PACKED, FRESH)] {
        let raw = Raw::new(SIZE);
        for i in 0..2 {
            raw.split_desc(BASE, i, (1, 2), WRITE, 0);
            if features.packed {
                raw.packed_desc(BASE, i, (1, 2), i, AVAIL | WRITE);
            }
        }
        raw.avail(0, &[0, 1]);
        let mut device = raw.device(features, base);
        let mut taken = Taken::bounded(8, 8);
        assert_eq!(device.take(&raw.memory, 8, &mut taken), Ok(2));
        audit::begin();
        assert_eq!(device.take_more(&raw.memory, 8, &mut taken), Ok(0));
        assert_eq!(audit::end().len(), 2, "an index, or the flags of one descriptor");
    }
}

/// Issue 14, row 5: of chains as long as the ring, a burst reads as many descriptors as its bound.
#[test]
fn burst_of_long_chains_reads_a_bounded_number_of_descriptors() {
    let (size, bound) = (1024_u16, 100_usize);
    for (features, base) in [(SPLIT, 0), (PACKED, FRESH)] {
        let raw = Raw::new(size);
        for i in 0..size {
            raw.split_desc(TABLE, i, (1, 2), if i + 1 < size { NEXT } else { 0 }, i + 1);
            if features.packed {
                raw.packed_desc(TABLE, i, (1, 2), 0, 0);
                raw.packed_desc(BASE, i, (TABLE, 16 * u32::from(size)), i, AVAIL | INDIRECT);
            } else {
                raw.split_desc(BASE, i, (TABLE, 16 * u32::from(size)), INDIRECT, 0);
            }
        }
        raw.avail(0, &(0..size).collect::<Vec<_>>());
        let mut device = raw.device(features, base);
        let mut taken = Taken::bounded(64, bound);
        audit::begin();
        assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
        let loads: usize = audit::end().values().sum();
        // Beside them: indices, heads, and the two descriptors that refer to tables.
        assert!(loads <= 16 * (bound + 2) + 2 * 65, "{loads} bytes loaded");
        audit::begin();
        assert_eq!(device.take_more(&raw.memory, 64, &mut taken), Ok(0));
        assert!(audit::end().is_empty(), "one that does not fit is not read again");
    }
}

proptest! {
    /// Arbitrary descriptors, loops included. A loop may reach a descriptor again; the ring's size
    /// bounds it, and the chain is then refused: so only accepted chains must be fetched once.
    #[test]
    fn accepted_chains_are_fetched_once(
        packed in any::<bool>(),
        descs in prop::collection::vec((0_u16..8, 0_u16..24, 0_u16..10), 16),
    ) {
        let raw = Raw::new(SIZE);
        let features = if packed { PACKED } else { SPLIT };
        for (i, (flags, len, next)) in (0..SIZE).zip(&descs) {
            let buf = (TABLE, u32::from(*len) * 8);
            if packed {
                raw.packed_desc(BASE, i, buf, *next, flags | AVAIL);
            } else {
                raw.split_desc(BASE, i, buf, *flags, *next);
            }
        }
        for (i, (flags, len, next)) in (0..SIZE).zip(&descs[8..]) {
            if packed {
                raw.packed_desc(TABLE, i, (1, u32::from(*len)), *next, *flags);
            } else {
                raw.split_desc(TABLE, i, (1, u32::from(*len)), *flags, *next);
            }
        }
        raw.avail(0, &[0]);
        if packed {
            raw.packed_desc(BASE, 0, (TABLE, u32::from(descs[0].1) * 8), 0, descs[0].0 | AVAIL);
        }
        let mut device = raw.device(features, if packed { FRESH } else { 0 });
        let mut taken = Taken::with_capacity(64, SIZE);
        audit::begin();
        let result = device.take(&raw.memory, 1, &mut taken);
        let loads = audit::end();
        if result.is_ok() {
            assert_once(&loads, "accepted");
        }
    }
}
