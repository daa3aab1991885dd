//! Arbitrary messages of a front-end, to a back-end with real rings.
//!
//! ```text
//!   mode 0: records    (request  flags  descriptors  length  payload)...  into Backend::handle
//!   mode 1: raw bytes                                                     into a Connection
//! ```
//! Records reach deep states; raw bytes reach the framing. Payload fields of records are mostly
//! small numbers, because the memory is small. The device checks the protocol's guarantees (see
//! [`vhost_user::device::Device`]), and serves its rings after every message.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use ring::virtq::{DeviceQueue, LayoutError, RingLog, Taken};
use shm::{GuestMemory, Mapping};
use switch::account::Account;
use vhost_user::backend::{Backend, Options, PROTOCOL_FEATURES};
use vhost_user::connection::Connection;
use vhost_user::device::{Call, Device, Refused, RingSetup};
use vhost_user::feature;
use vhost_user::foreign::ForeignFd;
use vhost_user::message::{Message, ProtocolFeatures};

use crate::Bytes;

/// Rings of the device: two pairs.
const RINGS: u16 = 4;
/// Size of each memory descriptor of a record.
const MEMORY: u64 = 0x1_0000;
/// Address of the seeds' guest memory in the front-end's address space.
const USER_ADDR: u64 = 0x7000_0000;

const FEATURES: u64 = feature::VERSION_1
    | feature::MQ
    | feature::MTU
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::RING_PACKED
    | feature::IN_ORDER;

/// Events of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Messages that were accepted.
    pub accepted: usize,
    /// Messages that were refused without closing the connection.
    pub refused: usize,
    /// Connections closed because of an error.
    pub closed: usize,
    /// Rings started.
    pub started: usize,
    /// Chains taken from them.
    pub taken: usize,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    let raw = bytes.u8() & 1 != 0;
    let device = Checked::default();
    let backend = Backend::new(
        Box::new(device.clone()),
        Options { protocol_features: PROTOCOL_FEATURES, account: Arc::default() },
    );
    if raw { stream(&device, backend, bytes.0) } else { records(&device, backend, bytes) }
}

fn records(device: &Checked, mut backend: Backend, mut bytes: Bytes<'_>) -> Seen {
    while !bytes.0.is_empty() {
        let (message, fds) = record(&mut bytes, backend.account());
        match backend.handle(&message, fds) {
            Ok(outcome) => {
                if let Some(reply) = outcome.reply {
                    assert!(reply.is_reply() && reply.request == message.request);
                }
                let mut state = device.0.lock().unwrap();
                state.seen.accepted += usize::from(outcome.refused.is_none());
                state.seen.refused += usize::from(outcome.refused.is_some());
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                device.0.lock().unwrap().seen.closed += 1;
                break;
            }
        }
        device.serve();
    }
    drop(backend.close());
    device.finish()
}

/// One record: a message and its descriptors.
fn record(bytes: &mut Bytes<'_>, account: &Arc<Account>) -> (Message, Vec<ForeignFd>) {
    let (request, flags, kinds, len) = (bytes.u8(), bytes.u8(), bytes.u8(), bytes.u8());
    let fds = (0..kinds & 3).map(|i| descriptor(kinds >> (2 + 2 * i) & 3));
    let fds = fds.filter_map(|fd| ForeignFd::new(fd, account).ok()).collect();
    let payload = bytes.take(usize::from(len)).to_vec();
    (Message::request(request, payload, flags & 1 != 0), fds)
}

fn descriptor(kind: u8) -> OwnedFd {
    match kind {
        0 => {
            let mapping = Mapping::memfd("fuzz", MEMORY).expect("memory");
            mapping.fd().expect("a memfd").try_clone_to_owned().expect("a descriptor")
        }
        1 => os::eventfd().expect("an eventfd"),
        2 => UnixStream::pair().expect("a pair").0.into(),
        _ => std::fs::File::open("/dev/null").expect("/dev/null").into(),
    }
}

fn stream(device: &Checked, backend: Backend, bytes: &[u8]) -> Seen {
    let (mut peer, ours) = UnixStream::pair().expect("a pair");
    peer.set_nonblocking(true).expect("a socket");
    ours.set_nonblocking(true).expect("a socket");
    let mut connection = Connection::new(ours, backend);
    // In two halves: a message may arrive in pieces.
    for half in [&bytes[..bytes.len() / 2], &bytes[bytes.len() / 2..]] {
        // A socket's buffer holds more than any input; a closed one is detected below.
        let _ = peer.write(half);
        // More messages than one call takes.
        for _ in 0..4 {
            if let Err(error) = connection.on_readable() {
                assert!(!error.to_string().is_empty());
                device.0.lock().unwrap().seen.closed += 1;
                drop(connection.close());
                return device.finish();
            }
            device.serve();
        }
    }
    drop(connection.close());
    device.finish()
}

/// A device with real rings that checks the protocol's guarantees. Clones share their state.
#[derive(Clone, Default)]
struct Checked(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    memory: Arc<GuestMemory>,
    acked: u64,
    rings: BTreeMap<u16, DeviceQueue>,
    /// Started, and `enable` not called yet.
    undecided: Option<u16>,
    seen: Seen,
}

impl Checked {
    /// Serves as a worker would: takes and uses chains until a ring is malformed.
    fn serve(&self) {
        let mut state = self.0.lock().unwrap();
        let State { memory, rings, seen, undecided, .. } = &mut *state;
        assert!(undecided.is_none(), "`enable` was not called after a ring's start");
        for queue in rings.values_mut() {
            let mut taken = Taken::with_capacity(8, queue.size());
            if let Ok(n) = queue.take(memory, 8, &mut taken) {
                seen.taken += n;
                taken.chains.iter().for_each(|chain| queue.put(chain, 0));
                queue.publish();
                let _ = queue.call_needed();
                let _ = queue.arm();
            }
        }
    }

    /// Checks that nothing is left after the connection.
    fn finish(&self) -> Seen {
        let state = self.0.lock().unwrap();
        assert!(state.rings.is_empty(), "a ring outlives its connection");
        state.seen.clone()
    }
}

impl Device for Checked {
    fn features(&self) -> u64 {
        FEATURES
    }

    fn queues_max(&self) -> u16 {
        RINGS
    }

    fn set_features(&mut self, acked: u64) {
        assert_eq!(acked & !FEATURES, 0, "acknowledged what was not offered");
        self.0.lock().unwrap().acked = acked;
    }

    fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.0.lock().unwrap().memory = memory;
    }

    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        assert!(ring < RINGS, "ring {ring} does not exist");
        let mut state = self.0.lock().unwrap();
        assert!(!state.rings.contains_key(&ring), "ring {ring} started twice");
        let mut queue = DeviceQueue::new(&state.memory, &setup.layout, setup.features, setup.base)?;
        queue.set_log(setup.log);
        state.rings.insert(ring, queue);
        state.undecided = Some(ring);
        state.seen.started += 1;
        Ok(())
    }

    fn replace(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        let mut state = self.0.lock().unwrap();
        let base = state.rings.get(&ring).expect("a running ring").base();
        let mut queue = DeviceQueue::new(&state.memory, &setup.layout, setup.features, base)?;
        queue.set_log(setup.log);
        state.rings.insert(ring, queue);
        Ok(())
    }

    fn stop(&mut self, ring: u16) -> Option<u32> {
        assert!(ring < RINGS, "ring {ring} does not exist");
        self.0.lock().unwrap().rings.remove(&ring).map(|queue| queue.base())
    }

    fn position(&mut self, _: u16) -> Option<u32> {
        None
    }

    fn enable(&mut self, ring: u16, _: bool) {
        assert!(ring < RINGS, "ring {ring} does not exist");
        let mut state = self.0.lock().unwrap();
        state.undecided = state.undecided.filter(|undecided| *undecided != ring);
    }

    fn set_log(&mut self, ring: u16, log: Option<RingLog>) {
        let mut state = self.0.lock().unwrap();
        state.rings.get_mut(&ring).expect("a running ring").set_log(log);
    }

    fn set_call(&mut self, ring: u16, _: Option<Call>) {
        assert!(self.0.lock().unwrap().rings.contains_key(&ring), "ring {ring} does not run");
    }

    fn kick(&mut self, ring: u16) {
        assert!(self.0.lock().unwrap().rings.contains_key(&ring), "ring {ring} does not run");
    }

    fn set_mtu(&mut self, mtu: u16) -> Result<(), Refused> {
        if mtu < 68 { Err(Refused("at least 68")) } else { Ok(()) }
    }

    fn send_rarp(&mut self, _: [u8; 6]) {}

    fn config(&self) -> Vec<u8> {
        vec![2, 0, 0, 0, 0, 1, 1, 0, 2, 0, 220, 5]
    }

    fn reset(&mut self) {
        assert!(self.0.lock().unwrap().rings.is_empty(), "reset with rings running");
    }
}

// Requests the seeds use (vhost-user.rst, "Front-end message types").
const GET_FEATURES: u8 = 1;
const SET_FEATURES: u8 = 2;
const SET_OWNER: u8 = 3;
const SET_MEM_TABLE: u8 = 5;
const SET_VRING_NUM: u8 = 8;
const SET_VRING_ADDR: u8 = 9;
const SET_VRING_BASE: u8 = 10;
const GET_VRING_BASE: u8 = 11;
const SET_VRING_KICK: u8 = 12;
const SET_VRING_CALL: u8 = 13;
const GET_PROTOCOL_FEATURES: u8 = 15;
const SET_PROTOCOL_FEATURES: u8 = 16;
const SET_VRING_ENABLE: u8 = 18;
const ADD_MEM_REG: u8 = 37;
const REM_MEM_REG: u8 = 38;

/// Whole message sequences as start inputs: memory as a table or in slots, split and packed.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for packed in [false, true] {
        for slots in [false, true] {
            let talk = conversation(packed, slots);
            let record = |(request, kinds, payload): &(u8, u8, Vec<u8>)| {
                let mut bytes = vec![*request, 1, *kinds, payload.len() as u8];
                bytes.extend(payload);
                bytes
            };
            seeds.push([0].into_iter().chain(talk.iter().flat_map(record)).collect());
            let raw = |(request, _, payload): &(u8, u8, Vec<u8>)| {
                Message::request(u32::from(*request), payload.clone(), false).to_bytes()
            };
            seeds.push([1].into_iter().chain(talk.iter().flat_map(raw)).collect());
        }
    }
    seeds
}

/// Request, descriptors, payload.
fn conversation(packed: bool, slots: bool) -> Vec<(u8, u8, Vec<u8>)> {
    let words = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
    let state = |ring: u32, value: u32| [ring.to_ne_bytes(), value.to_ne_bytes()].concat();
    let region = [0_u64, MEMORY, USER_ADDR, 0];
    let features = feature::VERSION_1
        | feature::PROTOCOL_FEATURES
        | if packed { feature::RING_PACKED } else { feature::EVENT_IDX };
    let protocol =
        ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let mut talk = vec![
        (GET_FEATURES, 0, vec![]),
        (GET_PROTOCOL_FEATURES, 0, vec![]),
        (SET_PROTOCOL_FEATURES, 0, words(&[protocol.bits()])),
        (SET_OWNER, 0, vec![]),
        (SET_FEATURES, 0, words(&[features])),
    ];
    if slots {
        talk.push((ADD_MEM_REG, 1, words(&[&[0][..], &region].concat())));
    } else {
        talk.push((SET_MEM_TABLE, 1, words(&[&[1][..], &region].concat())));
    }
    for ring in 0..2_u32 {
        let at = USER_ADDR + u64::from(ring) * 0x4000;
        let mut addr = state(ring, 0);
        addr.extend(words(&[at, at + 0x2000, at + 0x1000, 0]));
        let base = if packed { 0x8000_8000 } else { 0 };
        // Kick and call are eventfds: kind 1, in the first place.
        let event = 1 | 1 << 2;
        talk.extend([
            (SET_VRING_NUM, 0, state(ring, 8)),
            (SET_VRING_BASE, 0, state(ring, base)),
            (SET_VRING_ADDR, 0, addr),
            (SET_VRING_KICK, event, words(&[u64::from(ring)])),
            (SET_VRING_CALL, event, words(&[u64::from(ring)])),
            (SET_VRING_ENABLE, 0, state(ring, 1)),
        ]);
    }
    if slots {
        talk.push((REM_MEM_REG, 0, words(&[&[0][..], &region].concat())));
    }
    talk.push((GET_VRING_BASE, 0, state(0, 0)));
    talk
}
