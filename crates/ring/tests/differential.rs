//! Ours against theirs: our driver half against the device queue of rust-vmm (`virtio-queue`),
//! and the driver queue of rcore-os (`virtio-drivers`) against our device half. Split rings only:
//! neither knows packed ones.
#![cfg(not(loom))]
#![allow(clippy::as_conversions)]

mod common;
#[path = "common/rcore.rs"]
mod rcore;

use std::collections::VecDeque;

use common::{BASE, LEN, Raw, SPLIT, TABLE};
use proptest::prelude::*;
use rcore::Rig;
use ring::virtq::{Armed, Buf, DeviceQueue, DriverQueue, Features, IndirectPool, Taken, Used};
use virtio_queue::{Queue, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

// ---- our driver half, rust-vmm's device queue ----

#[derive(Clone, Debug)]
enum Op {
    /// Driver adds a chain of so many readable and writable buffers.
    Add(u8, u8),
    /// Driver publishes and decides on a kick.
    Publish,
    /// Device takes up to so many chains.
    Take(u8),
    /// Device uses up to so many of those it holds, from the front or from the back.
    Use(u8, bool),
    /// Driver collects.
    Collect,
    /// Device goes to sleep if it may.
    DeviceArm,
    /// Driver goes to sleep if it may.
    DriverArm,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0_u8..4, 0_u8..4).prop_map(|(r, w)| Op::Add(r, w)),
        2 => Just(Op::Publish),
        2 => (1_u8..9).prop_map(Op::Take),
        2 => (1_u8..9, any::<bool>()).prop_map(|(n, front)| Op::Use(n, front)),
        2 => Just(Op::Collect),
        1 => Just(Op::DeviceArm),
        1 => Just(Op::DriverArm),
    ]
}

/// Their memory over our memfd.
fn their_memory(raw: &Raw) -> GuestMemoryMmap {
    let fd = raw.memory.regions()[0].mapping.fd().unwrap().try_clone_to_owned().unwrap();
    let file = FileOffset::new(fd.into(), 0);
    let range = (GuestAddress(BASE), LEN as usize, Some(file));
    GuestMemoryMmap::from_ranges_with_files([range]).unwrap()
}

fn their_device(raw: &Raw, mem: &GuestMemoryMmap, features: Features, start: u16) -> Queue {
    let mut queue = Queue::new(raw.layout.size).unwrap();
    queue.set_size(raw.layout.size);
    queue.try_set_desc_table_address(GuestAddress(raw.layout.desc)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(raw.layout.driver)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(raw.layout.device)).unwrap();
    queue.set_event_idx(features.event_idx);
    queue.set_next_avail(start);
    queue.set_next_used(start);
    queue.set_ready(true);
    assert!(queue.is_valid(mem));
    queue
}

fn drive_theirs(
    features: Features,
    size: u16,
    start: u16,
    ops: &[Op],
) -> Result<(), TestCaseError> {
    let raw = Raw::new(size);
    let mem = their_memory(&raw);
    let pool = IndirectPool::new(&raw.memory, TABLE, size, 8);
    let base = u32::from(start);
    let mut driver = DriverQueue::new(&raw.memory, &raw.layout, features, base, pool).unwrap();
    let mut device = their_device(&raw, &mem, features, start);

    let mut added: VecDeque<(u16, Vec<Buf>)> = VecDeque::new();
    let mut published = VecDeque::new();
    let mut held: VecDeque<(u16, u32)> = VecDeque::new();
    let mut used: VecDeque<Used> = VecDeque::new();
    let (mut serial, mut device_asleep, mut driver_asleep) = (0_u64, false, false);
    for op in ops {
        match *op {
            Op::Add(reads, writes) => {
                let n = u64::from(reads + writes);
                let buf = |i| Buf {
                    addr: BASE + serial + i,
                    len: (serial % 1000) as u32 + 1,
                    write: i >= u64::from(reads),
                };
                let bufs: Vec<Buf> = (0..n).map(buf).collect();
                serial += n;
                if n > 0 {
                    match driver.add(&bufs) {
                        Some(id) => added.push_back((id, bufs)),
                        None => prop_assert!(u64::from(driver.free()) < n),
                    }
                }
            }
            Op::Publish => {
                let news = !added.is_empty();
                driver.publish();
                published.append(&mut added);
                let kick = driver.kick_needed();
                prop_assert!(kick || !(news && device_asleep), "lost kick");
                device_asleep &= !kick;
            }
            Op::Take(max) => {
                device.disable_notification(&mem).unwrap();
                device_asleep = false;
                for _ in 0..max {
                    let Some(chain) = device.pop_descriptor_chain(&mem) else {
                        prop_assert!(published.is_empty(), "they see fewer chains");
                        break;
                    };
                    let (id, bufs) = published.pop_front().expect("they see more chains");
                    prop_assert_eq!(chain.head_index(), id);
                    let got: Vec<Buf> = chain
                        .map(|d| Buf { addr: d.addr().0, len: d.len(), write: d.is_write_only() })
                        .collect();
                    prop_assert_eq!(&got, &bufs);
                    held.push_back((id, bufs.iter().filter(|b| b.write).map(|b| b.len).sum()));
                }
            }
            Op::Use(max, front) => {
                let n = usize::from(max).min(held.len());
                for _ in 0..n {
                    let next = if front { held.pop_front() } else { held.pop_back() };
                    let (id, room) = next.unwrap();
                    device.add_used(&mem, id, room / 2).unwrap();
                    used.push_back(Used { id, len: room / 2 });
                }
                if n > 0 {
                    let call = device.needs_notification(&mem).unwrap();
                    prop_assert!(call || !driver_asleep, "lost call");
                    driver_asleep &= !call;
                }
            }
            Op::Collect => {
                let mut out = Vec::new();
                driver.take_used(64, &mut out).unwrap();
                let want: Vec<Used> = used.drain(..used.len().min(64)).collect();
                prop_assert_eq!(out, want);
                driver_asleep = false;
            }
            Op::DeviceArm => {
                device_asleep = !device.enable_notification(&mem).unwrap();
                prop_assert_eq!(device_asleep, published.is_empty());
            }
            Op::DriverArm => {
                driver_asleep = driver.arm() == Armed::Armed;
                prop_assert_eq!(driver_asleep, used.is_empty());
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    #[test]
    fn our_driver_half_and_rust_vmm_agree(
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
        log_size in 0_u32..8,
        start in prop_oneof![any::<u16>(), 65530_u16..=65535, 32760_u16..32776, 0_u16..4],
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let features = Features { event_idx, indirect, ..SPLIT };
        drive_theirs(features, 1 << log_size, start, &ops)?;
    }
}

// ---- rcore-os's driver queue, our device half ----

/// Chains in each run: their queue always starts at 0, so a run must reach the wrap.
const CHAINS: u32 = 70_000;

/// A reproducible sequence (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// The bytes buffer `n` of a chain holds.
fn fill(serial: u32, n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (serial as usize * 7 + n * 31 + i) as u8).collect()
}

/// Serves available chains: every buffer must be as they made it. Writes half of the room.
fn serve(rig: &Rig, device: &mut DeviceQueue, max: usize, waiting: &mut VecDeque<rcore::Chain>) {
    let mut taken = Taken::with_capacity(64, device.size());
    let n = device.take(rig.memory(), max, &mut taken).unwrap();
    assert_eq!(n, waiting.len().min(max), "chains seen");
    for (chain, theirs) in taken.chains.iter().zip(waiting) {
        assert_eq!(chain.id, theirs.token);
        let reads = taken.reads(chain);
        assert_eq!(reads.len(), theirs.inputs.len());
        for (buf, want) in reads.iter().zip(&theirs.inputs) {
            let mut got = vec![0; want.len()];
            rig.memory().seg(buf.addr, buf.len, &mut 0).unwrap().read(&mut got);
            assert_eq!((buf.len as usize, &got), (want.len(), want));
        }
        let writes = taken.writes(chain);
        let lens: Vec<_> = writes.iter().map(|b| b.len as usize).collect();
        let want: Vec<_> = theirs.outputs.iter().map(Vec::len).collect();
        assert_eq!(lens, want);
        for (n, buf) in writes.iter().enumerate() {
            let bytes = fill(theirs.serial, n, buf.len as usize);
            rig.memory().seg_mut(buf.addr, buf.len, &mut 0).unwrap().write(&bytes);
        }
        device.put(chain, writes.iter().map(|b| b.len).sum());
    }
    device.publish();
    // They poll; the decision must not depend on that.
    let _ = device.call_needed();
}

fn run_their_driver(event_idx: bool, indirect: bool, seed: u64) {
    let mut random = Random(seed);
    let mut rig = Rig::new(event_idx, indirect);
    let features = Features { event_idx, indirect, ..SPLIT };
    let mut device = DeviceQueue::new(rig.memory(), &rig.layout(), features, 0).unwrap();
    // Not yet served; served and not yet collected.
    let (mut waiting, mut done) = (VecDeque::new(), VecDeque::new());
    let mut asleep = false;
    let mut serial = 0;
    while serial < CHAINS {
        match random.below(5) {
            0..=2 => {
                let mut lens = |n| (0..n).map(|_| random.below(200) as usize + 1).collect();
                let (ins, outs): (Vec<usize>, Vec<usize>) =
                    (lens(2), lens(1 + serial as usize % 3));
                let ins = ins.iter().enumerate().map(|(n, l)| fill(serial, n, *l)).collect();
                if let Some(chain) = rig.add(serial, ins, &outs) {
                    waiting.push_back(chain);
                    serial += 1;
                    let kick = rig.should_notify();
                    assert!(kick || !asleep, "lost kick at {serial}");
                    asleep &= !kick;
                }
            }
            3 => {
                let max = random.below(9) as usize + 1;
                let n = waiting.len().min(max);
                serve(&rig, &mut device, max, &mut waiting);
                done.extend(waiting.drain(..n));
                asleep = waiting.is_empty() && device.arm() == Armed::Armed;
                assert_eq!(asleep, waiting.is_empty());
                if !asleep {
                    device.disarm();
                }
            }
            _ => {
                for chain in done.drain(..) {
                    assert_eq!(rig.peek(), Some(chain.token));
                    let serial = chain.serial;
                    let (len, outputs) = rig.pop(chain);
                    let want: Vec<_> =
                        outputs.iter().enumerate().map(|(n, b)| fill(serial, n, b.len())).collect();
                    assert_eq!(outputs, want);
                    assert_eq!(len as usize, outputs.iter().map(Vec::len).sum::<usize>());
                }
                assert_eq!(rig.peek(), None);
            }
        }
    }
    // Collect what is still in flight, so that their queue owns nothing when it is dropped.
    serve(&rig, &mut device, 64, &mut waiting);
    for chain in done.into_iter().chain(waiting) {
        rig.pop(chain);
    }
}

#[test]
fn our_device_half_and_rcore_os_agree() {
    for (seed, (event_idx, indirect)) in
        (1_u64..).zip([(false, false), (true, false), (false, true), (true, true)])
    {
        run_their_driver(event_idx, indirect, seed << 32 | 0x9e37);
    }
}
