//! Arbitrary messages of a front-end: no panic, no descriptor left open, and the device is called
//! in the documented order. One test only, because it counts the descriptors of the whole process.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ring::virtq::{DeviceQueue, LayoutError, RingLog};
use shm::{GuestMemory, Mapping};
use vhost_user::backend::{Backend, Options, PROTOCOL_FEATURES};
use vhost_user::connection::Connection;
use vhost_user::device::{Call, Device, Refused, RingSetup};
use vhost_user::foreign;
use vhost_user::message::{FDS_MAX, MemRegion, Message, VringAddr, VringState};

const SIZE: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
/// Rings started in all cases, to know that the test gets that far.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// Checks the order of calls that [`Device`] documents.
#[derive(Default)]
struct Strict {
    memory: Arc<GuestMemory>,
    running: HashSet<u16>,
    calls: Vec<Call>,
}

impl Device for Strict {
    fn features(&self) -> u64 {
        (1 << 32) | (1 << 34) | (1 << 29) | (1 << 22) | (1 << 17)
    }
    fn queues_max(&self) -> u16 {
        4
    }
    fn set_features(&mut self, acked: u64) {
        assert_eq!(acked & !self.features(), 0);
    }
    fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.memory = memory;
    }
    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        assert!(ring < 4);
        DeviceQueue::new(&self.memory, &setup.layout, setup.features, setup.base)?;
        assert!(self.running.insert(ring), "ring {ring} started twice");
        STARTED.fetch_add(1, Ordering::Relaxed);
        self.calls.extend(setup.call);
        Ok(())
    }
    fn replace(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        assert!(self.running.contains(&ring), "ring {ring} does not run");
        DeviceQueue::new(&self.memory, &setup.layout, setup.features, 5)?;
        self.calls.extend(setup.call);
        Ok(())
    }
    fn stop(&mut self, ring: u16) -> Option<u32> {
        assert!(self.running.remove(&ring), "ring {ring} stopped twice");
        Some(5)
    }
    fn position(&mut self, ring: u16) -> Option<u32> {
        self.running.contains(&ring).then_some(5)
    }
    fn enable(&mut self, ring: u16, _: bool) {
        assert!(self.running.contains(&ring));
    }
    fn set_log(&mut self, ring: u16, _: Option<RingLog>) {
        assert!(self.running.contains(&ring));
    }
    fn set_call(&mut self, ring: u16, call: Option<Call>) {
        assert!(self.running.contains(&ring));
        call.iter().for_each(Call::signal);
    }
    fn kick(&mut self, ring: u16) {
        assert!(self.running.contains(&ring));
        self.calls.iter().for_each(Call::signal);
    }
    fn set_mtu(&mut self, _: u16) -> Result<(), Refused> {
        Ok(())
    }
    fn send_rarp(&mut self, _: [u8; 6]) {}
    fn config(&self) -> Vec<u8> {
        vec![0; 12]
    }
    fn reset(&mut self) {
        assert!(self.running.is_empty());
        self.calls.clear();
    }
}

/// One action of a front-end.
#[derive(Clone, Debug)]
enum Op {
    /// A message with so many memfds and so many eventfds.
    Message(u32, bool, Vec<u8>, usize, usize),
    /// Bytes that are not a message.
    Noise(Vec<u8>),
    /// Memory and all settings to start a ring, valid.
    Ring(u32),
}

fn number() -> BoxedStrategy<u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(2),
        Just(256),
        Just(0x1000),
        Just(SIZE),
        Just(u64::MAX),
        0..0x2_0000_u64,
        any::<u64>()
    ]
    .boxed()
}

/// Payloads that are nearly valid, so that the messages pass their first checks.
fn payload() -> impl Strategy<Value = Vec<u8>> {
    let index = prop_oneof![9 => 0..5_u32, 1 => any::<u32>()];
    let region = (0..6_u64, 0..6_u64, prop_oneof![Just(SIZE), number()], number()).prop_map(
        |(guest, user, size, offset)| MemRegion {
            guest_addr: guest * SIZE,
            user_addr: user * SIZE,
            size,
            mmap_offset: if offset % 3 == 0 { 0 } else { offset },
        },
    );
    let region = region.boxed();
    prop_oneof![
        number().prop_map(|n| n.to_ne_bytes().to_vec()),
        number().prop_map(|n| (n & 0x1e23d | 8).to_ne_bytes().to_vec()),
        (index.clone(), number())
            .prop_map(|(index, num)| { VringState { index, num: num as u32 }.to_bytes() }),
        (index, 0..7 * SIZE).prop_map(|(index, at)| {
            let at = at & !0xfff;
            let (used, avail) = (at + 0x4000, at + 0x8000);
            VringAddr { index, flags: 0, desc: at, used, avail, log: 0 }.to_bytes()
        }),
        region.clone().prop_map(MemRegion::to_single_bytes),
        prop::collection::vec(region, 0..10).prop_map(|r| MemRegion::table_to_bytes(&r)),
        prop::collection::vec(any::<u8>(), 0..80),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let request = prop_oneof![9 => 0..46_u32, 1 => any::<u32>()];
    let memfds = prop_oneof![3 => Just(0_usize), 3 => Just(1), 1 => 0..10_usize];
    let events = prop_oneof![3 => Just(0_usize), 3 => Just(1), 1 => 0..30_usize];
    prop_oneof![
        40 => (request, prop::bool::weighted(0.95), payload(), memfds, events)
            .prop_map(|(r, ack, p, m, e)| Op::Message(r, ack, p, m, e)),
        1 => prop::collection::vec(any::<u8>(), 1..40).prop_map(Op::Noise),
        4 => (0..4_u32).prop_map(Op::Ring),
    ]
}

/// What each open descriptor refers to.
fn open_fds() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    // A name that cannot be read was closed since.
    entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect()
}

/// Waits until only the descriptors of `before` are open: a leak stays, what a thread opens for a
/// moment does not. Returns those that are open at the end.
fn settled(before: &[PathBuf]) -> Vec<PathBuf> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = open_fds();
        if now.len() == before.len() || Instant::now() >= end {
            return now;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends the first messages of a correct front-end, so that most later ones are accepted.
fn introduce(front: &UnixStream) {
    let bits = PROTOCOL_FEATURES.bits().to_ne_bytes().to_vec();
    for (request, payload) in [(3_u32, Vec::new()), (16, bits)] {
        let message = Message::request(request, payload, false);
        assert!(send(front, &message, &[]));
    }
}

/// Sends a message; returns whether that succeeded.
fn send(front: &UnixStream, message: &Message, fds: &[BorrowedFd<'_>]) -> bool {
    os::send(front.as_fd(), &message.to_bytes(), fds).is_ok()
}

fn ring(front: &UnixStream, index: u32, memory: BorrowedFd<'_>, event: BorrowedFd<'_>) -> bool {
    let region = MemRegion { guest_addr: 0, size: SIZE, user_addr: 0, mmap_offset: 0 };
    let state = |num| VringState { index, num }.to_bytes();
    let at = u64::from(index) * 0x1_0000;
    let (used, avail) = (at + 0x4000, at + 0x8000);
    let addr = VringAddr { index, flags: 0, desc: at, used, avail, log: 0 };
    let number = u64::from(index).to_ne_bytes().to_vec();
    let messages: [(u32, Vec<u8>, &[BorrowedFd<'_>]); 7] = [
        (5, MemRegion::table_to_bytes(&[region]), &[memory]),
        (8, state(256), &[]),
        (10, state(0), &[]),
        (9, addr.to_bytes(), &[]),
        (13, number.clone(), &[event]),
        (12, number, &[event]),
        (18, state(1), &[]),
    ];
    messages
        .into_iter()
        .all(|(request, payload, fds)| send(front, &Message::request(request, payload, true), fds))
}

fn run(ops: &[Op], memory: &Mapping, event: BorrowedFd<'_>) {
    let (front, back) = UnixStream::pair().unwrap();
    let options = Options { protocol_features: PROTOCOL_FEATURES, account: Arc::default() };
    let backend = Backend::new(Box::new(Strict::default()), options);
    let mut connection = Connection::new(back, backend);
    introduce(&front);
    for op in ops {
        let sent = match op {
            Op::Message(request, ack, payload, memfds, events) => {
                let mut fds = vec![memory.fd().unwrap(); *memfds];
                fds.extend(vec![event; *events]);
                fds.truncate(32);
                let message = Message::request(*request, payload.clone(), *ack);
                send(&front, &message, &fds)
            }
            Op::Noise(bytes) => os::send(front.as_fd(), bytes, &[]).is_ok(),
            Op::Ring(index) => ring(&front, *index, memory.fd().unwrap(), event),
        };
        let over = connection.on_readable().is_err();
        let mut replies = [0; 4096];
        while let Ok(os::Received::Bytes(_)) =
            os::recv(front.as_fd(), &mut replies, &mut Vec::new(), FDS_MAX)
        {}
        if over || !sent {
            break;
        }
    }
    connection.close();
}

#[test]
fn nothing_a_front_end_sends_panics_or_leaks() {
    let memory = Mapping::memfd("hostile", SIZE).unwrap();
    let event = os::eventfd().unwrap();
    // Descriptors that a signalling thread keeps open.
    os::signal_event(event.as_fd());
    let before = open_fds();
    let config = ProptestConfig {
        failure_persistence: None,
        // After a leak, each takes all the patience.
        max_shrink_iters: 10,
        ..ProptestConfig::default()
    };
    proptest!(config, |(ops in prop::collection::vec(op(), 1..120))| {
        run(&ops, &memory, event.as_fd());
        prop_assert!(foreign::settle(PATIENCE));
        prop_assert_eq!(settled(&before), before.clone());
    });
    let started = STARTED.load(Ordering::Relaxed);
    assert!(started > 100, "only {started} rings ever started");
}
