//! Every interleaving of a worker, a guest and the thread that replaces the guest's memory table,
//! with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-vhost-user --test loom --release`
//!
//! All three use the product's objects: the back-end gets SET_MEM_TABLE, the worker serves and arms
//! the queue, the guest has the driver half of the ring. When SET_MEM_TABLE is done, the old table
//! must be unmapped; each frame arrives once, from and in the memory that its buffer is in; and
//! nobody sleeps while there is something to do, which loom reports as a deadlock.
#![cfg(loom)]

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;
use ring::virtq::{Buf, DriverQueue, Features, Layout, ModelledRing};
use shm::{GuestMemory, Mapping, Region};
use switch::account::Account;
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::time::Instant;
use switch::vnet::VnetHdr;
use vhost_user::backend::{Backend, Options, PROTOCOL_FEATURES};
use vhost_user::device::Kick;
use vhost_user::feature;
use vhost_user::foreign::ForeignFd;
use vhost_user::message::{FrontendReq, MemRegion, Message, NO_FD, VringAddr, VringState};
use vhost_user::net::{Host, NetDevice, NetOptions, Pair, Side};
use vhost_user::port::GuestQueue;

const GUEST: u64 = 0x10_0000;
const LEN: u64 = 0x4000;
const SIZE: u16 = 2;
/// Guest addresses of the ring's parts, and of buffers.
const PARTS: [u64; 3] = [GUEST, GUEST + 0x100, GUEST + 0x200];
const BUFS: u64 = GUEST + 0x1000;
/// Bytes of header and frame.
const HDR: u32 = 12;
const FRAME: u32 = 60;

/// What the kernel does: an eventfd in an edge-triggered epoll set.
#[derive(Default)]
struct Wake {
    signals: Mutex<u32>,
    changed: Condvar,
}

impl Wake {
    fn signal(&self) {
        *self.signals.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    /// Sleeps until a signal that was not `seen`.
    fn wait(&self, seen: &mut u32) {
        let mut signals = self.signals.lock().unwrap();
        while *signals == *seen {
            signals = self.changed.wait(signals).unwrap();
        }
        *seen = *signals;
    }
}

/// Wakes the worker of one queue of the pair.
struct Owner {
    wake: Arc<Wake>,
    side: Option<Side>,
}

impl Host for Owner {
    fn start(&mut self, _: u16, _: Side, _: Kick) {}
    fn stop(&mut self, _: u16, _: Side) {}
    fn kick(&mut self, _: u16, side: Side) {
        if self.side == Some(side) {
            self.wake.signal();
        }
    }
    fn set_active(&mut self, _: u16) {}
    fn set_features(&mut self, _: u64) {}
    fn announce(&mut self, _: [u8; 6]) {}
}

/// Memory of a guest with a ring, as the guest maps it.
struct Memory {
    mapping: Arc<Mapping>,
    table: GuestMemory,
}

impl Memory {
    fn new(packed: bool) -> Self {
        let mapping = Arc::new(Mapping::memfd("guest", LEN).unwrap());
        let ring = ModelledRing::new(SIZE, packed);
        for (area, at) in [&ring.desc, &ring.driver, &ring.device].into_iter().zip(PARTS) {
            area.place(&mapping, (at - GUEST) as usize);
        }
        let user = Arc::clone(&mapping);
        let region =
            Region { guest_addr: GUEST, user_addr: GUEST, len: LEN, offset: 0, mapping: user };
        Self { mapping, table: GuestMemory::new(vec![region]).unwrap() }
    }

    fn driver(&self, features: Features, base: u32) -> DriverQueue {
        let [desc, driver, device] = PARTS;
        let layout = Layout { size: SIZE, desc, driver, device };
        DriverQueue::new(&self.table, &layout, features, base, None).unwrap()
    }

    /// Publishes frame `n`, or a buffer for one, and returns whether to kick.
    fn publish(&self, driver: &mut DriverQueue, n: u8, write: bool) -> bool {
        let addr = BUFS + 0x100 * u64::from(n);
        let mut to = self.table.seg_mut(addr, HDR + FRAME, &mut 0).unwrap();
        to.write(&[0; HDR as usize]);
        to.write(&[if write { 0 } else { n }; FRAME as usize]);
        driver.add(&[Buf { addr, len: HDR + FRAME, write }]).unwrap();
        driver.publish();
        driver.kick_needed()
    }

    /// The first byte of the frame in buffer `n`.
    fn frame(&self, n: u8) -> u8 {
        let addr = BUFS + 0x100 * u64::from(n) + u64::from(HDR);
        let [first] = self.table.seg(addr, FRAME, &mut 0).unwrap().first().unwrap();
        first
    }
}

/// A front-end's connection.
struct Connection(Backend);

impl Connection {
    fn send(&mut self, request: FrontendReq, payload: Vec<u8>, memory: Option<&Memory>) {
        let account = Arc::clone(self.0.account());
        let fd = |memory: &Memory| memory.mapping.fd().unwrap().as_fd().try_clone_to_owned();
        let fds = memory.map(|memory| ForeignFd::new(fd(memory).unwrap(), &account).unwrap());
        let message = Message::request(request, payload, false);
        let outcome = self.0.handle(&message, fds.into_iter().collect()).unwrap();
        assert!(outcome.refused.is_none(), "{:?}", outcome.refused);
    }

    /// When this returns, only this table is mapped.
    fn set_mem_table(&mut self, memory: &Memory) {
        let region = MemRegion { guest_addr: GUEST, size: LEN, user_addr: GUEST, mmap_offset: 0 };
        let payload = MemRegion::table_to_bytes(&[region]);
        self.send(FrontendReq::SET_MEM_TABLE, payload, Some(memory));
        assert_eq!(self.0.account().mappings.used(), 1, "the old table is mapped");
    }
}

/// A switch with a guest.
struct Rig {
    connection: Connection,
    pair: Pair,
    wake: Arc<Wake>,
}

impl Rig {
    /// Starts the queue of this side in `memory`.
    fn new(memory: &Memory, features: Features, side: Side, wakes: bool) -> Self {
        use FrontendReq as R;

        let (pair, wake) = (Pair::new(), Arc::new(Wake::default()));
        let net = NetOptions { pairs: 1, mtu: None, mac: None, without: 0 };
        let owner = Owner { wake: Arc::clone(&wake), side: wakes.then_some(side) };
        let device = NetDevice::new(net, vec![pair.clone()], owner);
        let account = Arc::new(Account::default());
        let options = Options { protocol_features: PROTOCOL_FEATURES, account };
        let mut connection = Connection(Backend::new(Box::new(device), options));
        let mut acked = feature::VERSION_1 | feature::MRG_RXBUF;
        for (has, bit) in
            [(features.packed, feature::RING_PACKED), (features.event_idx, feature::EVENT_IDX)]
        {
            acked |= if has { bit } else { 0 };
        }
        connection.send(R::SET_FEATURES, acked.to_ne_bytes().to_vec(), None);
        connection.set_mem_table(memory);
        let index = if side == Side::Egress { 0 } else { 1 };
        let state = |num| VringState { index, num }.to_bytes();
        connection.send(R::SET_VRING_NUM, state(SIZE.into()), None);
        connection.send(R::SET_VRING_BASE, state(base(features)), None);
        let [desc, avail, used] = PARTS;
        let addr = VringAddr { index, flags: 0, desc, used, avail, log: 0 };
        connection.send(R::SET_VRING_ADDR, addr.to_bytes(), None);
        for request in [R::SET_VRING_CALL, R::SET_VRING_KICK] {
            let none = NO_FD | u64::from(index);
            connection.send(request, none.to_ne_bytes().to_vec(), None);
        }
        assert!(pair.ingress.lock().is_up() || pair.egress.lock().is_up());
        Self { connection, pair, wake }
    }

    /// Spawns a worker that takes frames until it has `wanted`, and returns them.
    fn take(&self, wanted: usize) -> thread::JoinHandle<Vec<u8>> {
        let (pair, wake) = (self.pair.clone(), Arc::clone(&self.wake));
        thread::spawn(move || {
            let (mut seen, mut got, mut scratch) = (0, Vec::new(), Burst::default());
            loop {
                burst(&pair, &mut scratch, &mut got);
                if got.len() >= wanted {
                    return got;
                }
                if pair.ingress.lock().arm() {
                    wake.wait(&mut seen);
                }
                pair.ingress.lock().disarm();
            }
        })
    }

    /// Spawns a worker that delivers frames 1 to `frames`.
    fn deliver(&self, frames: u8) -> thread::JoinHandle<()> {
        let (pair, wake) = (self.pair.clone(), Arc::clone(&self.wake));
        thread::spawn(move || {
            let (mut seen, mut n) = (0, 1);
            while n <= frames {
                let frame = [n; FRAME as usize];
                let mut egress = pair.egress.lock();
                let is_put = egress.put_parts(&frame, &[], &VnetHdr::NONE).unwrap();
                egress.flush();
                n += u8::from(is_put);
                drop(egress);
                if !is_put {
                    if pair.egress.lock().arm() {
                        wake.wait(&mut seen);
                    }
                    pair.egress.lock().disarm();
                }
            }
        })
    }
}

/// Takes frames off the queue: the first byte of each.
fn burst(pair: &Pair, scratch: &mut Burst<'static>, got: &mut Vec<u8>) {
    let mut forward = |burst: &mut Burst<'_>| {
        for frame in &burst.frames {
            let [first] = burst.segs(frame)[0].first().unwrap();
            got.push(first);
        }
    };
    pair.ingress.lock().burst(2, Instant::from_ns(1), scratch, &mut forward).unwrap();
}

const SPLIT: Features =
    Features { packed: false, event_idx: false, indirect: false, in_order: false };
const LAYOUTS: [Features; 4] = [
    SPLIT,
    Features { event_idx: true, ..SPLIT },
    Features { packed: true, ..SPLIT },
    Features { packed: true, event_idx: true, ..SPLIT },
];

/// Split: just before the wrap. Packed: the second slot of the ring, so that the next chain wraps.
fn base(features: Features) -> u32 {
    if features.packed { 0x8001_8001 } else { 65535 }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(2);
    bounded.check(model);
}

/// Publishes frames 1 to 2, or buffers for them, while the memory is mapped at another address;
/// returns what the worker does.
fn same_memory<T: 'static>(
    features: Features,
    side: Side,
    wakes: bool,
    serve: fn(&Rig) -> thread::JoinHandle<T>,
    judge: fn(&Memory, &mut DriverQueue, T),
) {
    check(move || {
        let memory = Arc::new(Memory::new(features.packed));
        let mut driver = memory.driver(features, base(features));
        let mut rig = Rig::new(&memory, features, side, wakes);
        let worker = serve(&rig);
        let guest = {
            let (memory, wake) = (Arc::clone(&memory), Arc::clone(&rig.wake));
            thread::spawn(move || {
                for n in 1..=2 {
                    if memory.publish(&mut driver, n, side == Side::Egress) {
                        wake.signal();
                    }
                }
                driver
            })
        };
        rig.connection.set_mem_table(&memory);
        let mut driver = guest.join().unwrap();
        judge(&memory, &mut driver, worker.join().unwrap());
    });
}

fn frames_arrive(features: Features) {
    let judge = |_: &Memory, _: &mut DriverQueue, got: Vec<u8>| assert_eq!(got, [1, 2]);
    same_memory(features, Side::Ingress, true, |rig| rig.take(2), judge);
}

fn frames_are_delivered(features: Features, wakes: bool) {
    let judge = |memory: &Memory, driver: &mut DriverQueue, ()| {
        let mut used = Vec::new();
        driver.take_used(2, &mut used).unwrap();
        let lens: Vec<_> = used.iter().map(|used| used.len).collect();
        assert_eq!((lens, [1, 2].map(|n| memory.frame(n))), (vec![HDR + FRAME; 2], [1, 2]));
    };
    same_memory(features, Side::Egress, wakes, |rig| rig.deliver(2), judge);
}

/// The ring continues in another file, where it has a frame for which the guest does not kick: it
/// does not know where the device armed. Then the guest sends up to frame `last`.
fn other_memory(features: Features, wakes: bool, last: u8) {
    check(move || {
        let memory = [(); 2].map(|()| Memory::new(features.packed));
        let mut driver = memory[0].driver(features, base(features));
        let mut rig = Rig::new(&memory[0], features, Side::Ingress, wakes);
        let (mut scratch, mut got) = (Burst::default(), Vec::new());
        let _ = memory[0].publish(&mut driver, 0, false);
        burst(&rig.pair, &mut scratch, &mut got);
        assert_eq!(got, [0]);
        // The position after one chain.
        let mut driver = memory[1].driver(features, 0);
        let _ = memory[1].publish(&mut driver, 1, false);
        let worker = rig.take(last.into());
        rig.connection.set_mem_table(&memory[1]);
        for n in 2..=last {
            if memory[1].publish(&mut driver, n, false) {
                rig.wake.signal();
            }
        }
        assert_eq!(worker.join().unwrap(), Vec::from_iter(1..=last));
    });
}

#[test]
fn no_frame_is_lost_while_its_memory_is_mapped_elsewhere() {
    LAYOUTS.into_iter().for_each(frames_arrive);
}

#[test]
fn no_frame_is_lost_while_its_receivers_memory_is_mapped_elsewhere() {
    LAYOUTS.into_iter().for_each(|features| frames_are_delivered(features, true));
}

#[test]
fn ring_in_another_file_is_served_from_there() {
    for features in LAYOUTS {
        other_memory(features, true, 1);
        other_memory(features, true, 2);
    }
}

/// The models find it. With event indices, one that is not armed again leaves the driver's kick.
#[test]
fn canary_worker_that_is_not_woken_for_its_new_table_is_found() {
    for features in LAYOUTS {
        let taken = AssertUnwindSafe(|| other_memory(features, false, 1));
        assert!(catch_unwind(taken).is_err(), "{features:?}");
        if !features.event_idx {
            let delivered = AssertUnwindSafe(|| frames_are_delivered(features, false));
            assert!(catch_unwind(delivered).is_err(), "{features:?}");
        }
    }
}
