use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use shm::Mapping;

use super::*;

const AT: XdpRingOffset = XdpRingOffset { producer: 0, consumer: 64, desc: 192, flags: Some(128) };

/// Memory of a ring whose indices are both `start`.
fn area(len: u32, start: u32) -> Area {
    let mapping = Arc::new(Mapping::memfd("ring", bytes(&AT, len, DESC_LEN)).unwrap());
    let area = Area::of(&mapping, 0, mapping.len()).unwrap();
    area.sync_store_u32(AT.producer as usize, start, Ordering::Relaxed);
    area.sync_store_u32(AT.consumer as usize, start, Ordering::Relaxed);
    area
}

#[derive(Clone, Debug)]
enum Op {
    /// Adds up to so many, as there is room.
    Put(u32),
    Publish,
    /// Takes up to so many, and releases so many of them.
    Take(u32, u32),
    /// The producer, or the consumer, is replaced by another process's.
    Resync(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1..20_u32).prop_map(Op::Put),
        3 => Just(Op::Publish),
        4 => (1..20_u32, 0..20_u32).prop_map(|(take, release)| Op::Take(take, release)),
        1 => any::<bool>().prop_map(Op::Resync),
    ]
}

/// Both halves on the same memory, beside a queue that is right.
fn model(start: u32, len: u32, is_desc: bool, ops: &[Op]) {
    let area = area(len, start);
    let mut producer = Producer::new(area.clone(), AT, len);
    let mut consumer = Consumer::new(area, AT, len);
    let (mut published, mut added) = (VecDeque::new(), Vec::new());
    let mut count = 0_u32;
    for op in ops {
        match *op {
            Op::Put(n) => {
                let room = producer.room(n);
                assert!(room as usize <= len as usize - published.len() - added.len());
                // The other half's index was read, unless the known room was enough.
                assert!(room >= n || room as usize == len as usize - published.len() - added.len());
                for _ in 0..n.min(room) {
                    let desc = Desc { addr: u64::from(count) << 33 | 5, len: count ^ 0x8000_0000 };
                    match is_desc {
                        true => producer.put_desc(desc),
                        false => producer.put_address(desc.addr),
                    }
                    added.push(desc);
                    count += 1;
                }
            }
            Op::Publish => {
                producer.publish();
                published.extend(added.drain(..));
            }
            Op::Take(take, release) => {
                let n = consumer.available(take);
                assert_eq!(n as usize, published.len().min(take as usize));
                for (i, want) in published.iter().take(n as usize).enumerate() {
                    match is_desc {
                        true => assert_eq!(consumer.desc(i as u32), *want),
                        false => assert_eq!(consumer.address(i as u32), want.addr),
                    }
                }
                consumer.release(release.min(n));
                published.drain(..release.min(n) as usize);
            }
            Op::Resync(true) => {
                producer.resync();
                added.clear();
            }
            Op::Resync(false) => consumer.resync(),
        }
        assert_eq!(producer.untaken() as usize, published.len() + added.len());
    }
}

proptest! {
    #[test]
    fn entries_arrive_in_order_and_none_is_overwritten(
        start in prop_oneof![Just(0), Just(u32::MAX - 3), any::<u32>()],
        log_len in 0..5_u32,
        is_desc in any::<bool>(),
        ops in prop::collection::vec(op(), 1..200),
    ) {
        model(start, 1 << log_len, is_desc, &ops);
    }
}

#[test]
fn index_of_the_other_half_is_bounded_by_the_ring() {
    let area = area(8, 5);
    let mut producer = Producer::new(area.clone(), AT, 8);
    let mut consumer = Consumer::new(area.clone(), AT, 8);
    area.sync_store_u32(AT.producer as usize, 5 + 100, Ordering::Relaxed);
    assert_eq!(consumer.available(64), 8);
    area.sync_store_u32(AT.consumer as usize, 5_u32.wrapping_sub(100), Ordering::Relaxed);
    assert_eq!(producer.room(9), 0);
    assert_eq!(producer.untaken(), 8);
}

#[test]
fn kernel_is_called_when_it_wants_to_be_or_has_no_flag() {
    let area = area(8, 0);
    let producer = Producer::new(area.clone(), AT, 8);
    assert!(!producer.needs_wakeup());
    area.store_u32(128, 1);
    assert!(producer.needs_wakeup());
    let old = XdpRingOffset { flags: None, ..AT };
    assert!(Producer::new(area, old, 8).needs_wakeup());
}
