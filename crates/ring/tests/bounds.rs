//! Bounds on the cost of one burst, independent of the chains in the ring.
#![allow(clippy::as_conversions)]

mod common;

use common::{AVAIL, BASE, FRESH, INDIRECT, LEN, NEXT, PACKED, Raw, SPLIT, WRITE};
use proptest::prelude::*;
use ring::virtq::{Buf, DeviceQueue, Features, Malformed, Taken};

/// Chains and descriptors of one burst.
const CHAINS: usize = 16;
const DESCS: usize = 64;
/// Address of the indirect tables; each has its own.
const TABLES: u64 = BASE + 0x4_0000;
const SIZE: u16 = 256;

/// A chain as the driver makes it available.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Descriptors in the ring, the one that refers to the table included.
    direct: u16,
    /// Entries of the table, if there is one.
    table: u16,
    /// Whether the device may write it.
    write: bool,
}

/// Buffer `n` of chain `i`; all differ.
fn buf(i: usize, n: u16) -> (u64, u32) {
    (0x1000 * i as u64 + u64::from(n), u32::from(n) + 1)
}

/// Puts chains into a fresh ring; returns the buffers of each.
fn fill(raw: &Raw, packed: bool, shapes: &[Shape]) -> Vec<Vec<Buf>> {
    let (mut slot, mut table) = (0, TABLES);
    let (mut heads, mut all) = (Vec::new(), Vec::new());
    for (i, shape) in shapes.iter().enumerate() {
        let write = if shape.write { WRITE } else { 0 };
        let mut bufs = Vec::new();
        heads.push(slot);
        let mut place = |n: u16| {
            let (addr, len) = buf(i, n);
            bufs.push(Buf { addr, len, write: shape.write });
            (addr, len)
        };
        let plain = if shape.table > 0 { shape.direct - 1 } else { shape.direct };
        for n in 0..shape.direct {
            let last = n + 1 == shape.direct;
            let next = if last { 0 } else { NEXT };
            let (at, flags) = if n < plain {
                (place(n), write | next)
            } else {
                ((table, 16 * u32::from(shape.table)), INDIRECT)
            };
            if packed {
                raw.packed_desc(BASE, slot, at, i as u16, AVAIL | flags);
            } else {
                raw.split_desc(BASE, slot, at, flags, slot + 1);
            }
            slot += 1;
        }
        for n in 0..shape.table {
            let next = if n + 1 < shape.table { NEXT } else { 0 };
            let at = place(plain + n);
            if packed {
                raw.packed_desc(table, n, at, 0, write);
            } else {
                raw.split_desc(table, n, at, write | next, n + 1);
            }
        }
        table += 16 * u64::from(shape.table);
        assert!(table < BASE + LEN && slot <= raw.layout.size);
        all.push(bufs);
    }
    if !packed {
        raw.avail(0, &heads);
    }
    all
}

fn device(raw: &Raw, packed: bool) -> DeviceQueue {
    let (features, base): (Features, _) = if packed { (PACKED, FRESH) } else { (SPLIT, 0) };
    raw.device(features, base)
}

/// Issue 14, row 5.
#[test]
fn chain_of_twice_the_ring_is_refused_before_it_is_read_to_its_end() {
    let raw = Raw::new(SIZE);
    let shape = Shape { direct: SIZE, table: SIZE, write: true };
    fill(&raw, false, &[shape]);
    let mut taken = Taken::bounded(CHAINS, 4 * usize::from(SIZE));
    let mut device = device(&raw, false);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Err(Malformed::ChainTooLong));
    assert!(taken.bufs.is_empty());
    // As long as the ring it is legal (virtio 1.3, 2.7.5.3.1).
    let raw = Raw::new(SIZE);
    let shape = Shape { direct: SIZE / 2 + 1, table: SIZE / 2, write: true };
    let bufs = fill(&raw, false, &[shape]);
    let mut device = self::device(&raw, false);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    assert_eq!(taken.writes(&taken.chains[0]), &bufs[0]);
}

/// Issue 14, row 5.
#[test]
fn chain_longer_than_the_bound_is_taken_alone_and_in_part() {
    // A packed chain without a table is refused, see below.
    for (packed, table) in [(false, 0), (false, SIZE), (true, SIZE)] {
        let raw = Raw::new(SIZE);
        let long = Shape { direct: if table > 0 { 1 } else { SIZE - 2 }, table, write: true };
        let short = Shape { direct: 1, table: 0, write: true };
        let bufs = fill(&raw, packed, &[short, long, short]);
        let mut device = device(&raw, packed);
        let mut taken = Taken::bounded(CHAINS, DESCS);
        assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
        assert!(taken.is_cut(), "packed {packed} table {table}");
        assert_eq!(taken.bufs, bufs[0], "nothing of the next one stays");
        // It exceeds the bound together with the first, which is decided without reading it.
        assert_eq!(device.take_more(&raw.memory, 64, &mut taken), Ok(0));
        taken.forget_first(1);
        assert_eq!(device.take_more(&raw.memory, 1, &mut taken), Ok(1));
        assert_eq!(taken.writes(&taken.chains[0]), &bufs[1][..DESCS]);
        taken.forget_first(1);
        assert_eq!(device.take_more(&raw.memory, 64, &mut taken), Ok(1));
        assert_eq!(taken.bufs, bufs[2], "the ring continues after the long one");
    }
}

/// Its id is at its end, and the walk there is the cost: with a ring of 32,768, half a megabyte for
/// each chain, while the sender of a frame to that ring pays.
#[test]
fn packed_chain_without_a_table_longer_than_the_bound_is_refused() {
    let raw = Raw::new(SIZE);
    let long = Shape { direct: DESCS as u16, table: 0, write: true };
    let longer = Shape { direct: DESCS as u16 + 1, ..long };
    let bufs = fill(&raw, true, &[long, longer]);
    let mut device = device(&raw, true);
    let mut taken = Taken::bounded(CHAINS, DESCS);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), Ok(1));
    assert_eq!(taken.bufs, bufs[0], "as long as the bound, whole");
    assert!(taken.is_cut());
    taken.forget_first(1);
    let refused = Err(Malformed::DirectTooLong(DESCS as u16 + 1));
    assert_eq!(device.take(&raw.memory, 64, &mut taken), refused);
    assert_eq!(device.take(&raw.memory, 64, &mut taken), refused, "and stays so");
}

/// Issue 14, row 5.
#[test]
fn chains_at_hand_stay_when_more_are_taken() {
    for packed in [false, true] {
        let raw = Raw::new(SIZE);
        let shapes = [Shape { direct: 3, table: 0, write: true }; 9];
        let bufs = fill(&raw, packed, &shapes);
        let mut device = device(&raw, packed);
        let mut taken = Taken::bounded(CHAINS, DESCS);
        assert_eq!(device.take(&raw.memory, 4, &mut taken), Ok(4));
        // The driver's later changes to them have no effect.
        for i in 0..12 {
            raw.set32(BASE + 16 * i + 8, 9999);
        }
        device.put(&taken.chains[0], 1);
        taken.forget_first(1);
        assert_eq!(device.take_more(&raw.memory, 7, &mut taken), Ok(4));
        assert_eq!(device.take_more(&raw.memory, 7, &mut taken), Ok(0), "as many as are wanted");
        let got: Vec<_> = taken.chains.iter().map(|c| taken.writes(c).to_vec()).collect();
        assert_eq!(got, bufs[1..8]);
        taken.chains.iter().for_each(|c| device.put(c, 1));
        device.publish();
        taken.forget_first(7);
        assert_eq!(device.take_more(&raw.memory, 64, &mut taken), Ok(1));
        assert_eq!(taken.writes(&taken.chains[0]), &bufs[8]);
        assert_eq!(device.take_more(&raw.memory, 64, &mut taken), Ok(0), "the ring is empty");
    }
}

fn shape() -> impl Strategy<Value = Shape> {
    let lens = prop_oneof![8 => 1_u16..6, 1 => 1_u16..100];
    let tables = prop_oneof![3 => Just(0_u16), 2 => 1_u16..8, 1 => 1_u16..200];
    (lens, tables, any::<bool>()).prop_map(|(direct, table, write)| Shape { direct, table, write })
}

proptest! {
    /// Issue 14, row 5: for arbitrary chains, a burst takes a bounded number of buffers without
    /// reallocation, and the chains arrive whole and in order unless one exceeds the bound alone.
    #[test]
    fn burst_takes_a_bounded_number_of_descriptors(
        packed in any::<bool>(),
        more in any::<bool>(),
        mut shapes in prop::collection::vec(shape(), 1..60),
        keep in 0_usize..3,
    ) {
        let mut slots = 0;
        shapes.retain_mut(|shape| {
            // A packed chain is direct or indirect (2.8.7), and none is longer than the ring.
            if packed && shape.table > 0 {
                shape.direct = 1;
            } else if packed {
                shape.direct = shape.direct.min(DESCS as u16);
            }
            slots += shape.direct;
            slots <= SIZE
        });
        let raw = Raw::new(SIZE);
        let bufs = fill(&raw, packed, &shapes);
        let mut device = device(&raw, packed);
        let mut taken = Taken::bounded(CHAINS, DESCS);
        let room = (taken.chains.capacity(), taken.bufs.capacity());
        let mut at = 0;
        for _ in 0..1000 {
            let had = taken.chains.len();
            let new = if more {
                device.take_more(&raw.memory, CHAINS, &mut taken).unwrap()
            } else {
                device.untake(&taken.chains);
                device.take(&raw.memory, CHAINS, &mut taken).unwrap() - had
            };
            prop_assert_eq!(taken.chains.len(), had + new);
            prop_assert!(taken.bufs.len() <= DESCS + CHAINS);
            prop_assert_eq!((taken.chains.capacity(), taken.bufs.capacity()), room);
            for (i, chain) in taken.chains.iter().enumerate() {
                let got = [taken.reads(chain), taken.writes(chain)].concat();
                let want = &bufs[at + i];
                let whole = if i == 0 { want.len().min(DESCS) } else { want.len() };
                prop_assert_eq!(&got[..], &want[..whole]);
            }
            let done = taken.chains.len().saturating_sub(keep).max(taken.chains.len().min(1));
            taken.chains[..done].iter().for_each(|chain| device.put(chain, 0));
            device.publish();
            taken.forget_first(done);
            at += done;
            if at == bufs.len() {
                break;
            }
        }
        prop_assert_eq!(at, bufs.len(), "every chain arrived");
    }
}
