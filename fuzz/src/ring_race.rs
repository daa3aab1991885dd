//! A guest's memory while another thread rewrites it: rings, indirect tables, headers and payload,
//! as the ports and the switch take and deliver its frames. Also both halves of rings alone.
//!
//! ```text
//!   kind  features  count  operations...  pattern...
//! ```
//! The thread repeats the pattern: what it writes, and where. Each frame that arrives at one of two
//! honest guests must be one that was permitted to get there by its header alone: of the copy that
//! was checked. Nothing outside the guest's memory is read or written, nothing is held at the end,
//! each buffer has one frame at most, and every frame taken was delivered or dropped by cause.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use ring::virtq::{Buf, DeviceQueue, DriverQueue, Features, IndirectPool, Layout, Used};
use shm::sync::{Lock, Mutex, MutexGuard};
use shm::{GuestMemory, Mapping, Region, Seg};
use switch::direct::Direct;
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Table};
use switch::frame::Burst;
use switch::poll::Policy;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::schedule;
use switch::stats::{EgressStats, IngressStats};
use switch::tenant::{Rules, Security, Tenants, Vlan};
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;
use switch::vnet::{Offloads, VnetHdr};
use vhost_user::port::{Format, GuestQueue, VirtioEgress, VirtioIngress};

use crate::racer::race;
use crate::{Bytes, ring_image, xen_ring};

const BASE: u64 = 0x1000;
const LEN: u64 = 0xa000;
/// Bytes before and after a guest's memory, in the same mapping.
const GUARD: u64 = 0x1000;
/// Their contents, which nothing that writes to the guest's memory has eight times in a row.
const CANARY: u8 = 0xee;
const SIZE: u16 = 16;
const RX: Layout = Layout { size: SIZE, desc: 0x1000, driver: 0x1200, device: 0x1400 };
const TX: Layout = Layout { size: SIZE, desc: 0x1800, driver: 0x1a00, device: 0x1c00 };
const POOLS: [u64; 2] = [0x2000, 0x2800];
/// Buffers of the transmit queue, then of the receive queue.
const BUFFERS: [u64; 2] = [0x7000, 0x3000];
const BUFFER: u64 = 0x400;
const BUFFERS_NUMBER: [u64; 2] = [8, 16];
const HDR: usize = 12;

const VID: u16 = 5;
/// Of the guest whose memory is rewritten, and of the honest ones.
const MACS: [[u8; 6]; 3] = [[2, 0, 0, 0, 0, 10], [2, 0, 0, 0, 0, 11], [2, 0, 0, 0, 0, 12]];
const OTHERS: [[u8; 6]; 4] =
    [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [2, 0, 0, 0, 0, 13], [1, 0x80, 0xc2, 0, 0, 2]];
/// Memory of a guest within a larger mapping.
struct Guest {
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
}

thread_local! {
    static GUESTS: RefCell<[Guest; 3]> = RefCell::new([(); 3].map(|()| Guest::new()));
}

impl Guest {
    fn new() -> Self {
        let mapping = Mapping::memfd("fuzz", LEN + 2 * GUARD).expect("memory");
        let mapping = Arc::new(mapping);
        let guard = [CANARY; GUARD as usize];
        for at in [0, GUARD + LEN] {
            mapping.seg_mut(at as usize, GUARD as u32).expect("inside").write(&guard);
        }
        let region = Region {
            guest_addr: BASE,
            user_addr: 0,
            len: LEN,
            offset: GUARD,
            mapping: Arc::clone(&mapping),
        };
        let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region"));
        Self { mapping, memory }
    }

    fn check_guards(&self) {
        let mut guard = [0; GUARD as usize];
        for at in [0, GUARD + LEN] {
            self.mapping.seg(at as usize, GUARD as u32).expect("inside").read(&mut guard);
            assert!(guard == [CANARY; GUARD as usize], "written outside the guest's memory");
        }
    }
}

/// Events of a run.
#[derive(Debug, Default)]
pub struct Seen {
    /// Frames taken from the guest, and those that it was given.
    pub frames: [usize; 2],
    /// Frames that each of the others got.
    pub delivered: [usize; 2],
    /// Causes of drops, at either end.
    pub drops: Vec<&'static str>,
    /// Bursts and deliveries that found a ring malformed.
    pub faults: usize,
    /// Chains and packets taken of a ring alone.
    pub taken: usize,
    /// Passes of the thread.
    pub passes: u64,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data, false);
}

/// As [`run`]; returns what happened. `rereads`: a port reads headers of frames a second time, from
/// the guest's memory, and this fails if they change in between.
pub fn explore(data: &[u8], rereads: bool) -> Seen {
    let (kind, rest) = data.split_first().unwrap_or((&0, &[]));
    match kind % 4 {
        2 => {
            let (seen, passes) = ring_image::explore_racing(rest);
            Seen { taken: seen.taken, faults: seen.faults.len(), passes, ..Seen::default() }
        }
        3 => {
            let (seen, passes) = xen_ring::explore_racing(rest);
            Seen { taken: seen.taken, faults: seen.faults.len(), passes, ..Seen::default() }
        }
        _ => GUESTS.with_borrow(|guests| ports(guests, rest, rereads)),
    }
}

fn ports(guests: &[Guest; 3], data: &[u8], rereads: bool) -> Seen {
    let mut bytes = Bytes(data);
    let features = crate::features(bytes.u8());
    let count = bytes.u8();
    let ops = bytes.take(usize::from(count));
    let pattern = pattern(bytes.0);
    let memory = &guests[0].memory;
    write(memory, BASE, &[0; LEN as usize]);
    let mut state = State::new(guests, features, rereads);
    let (rewritten, mut pass) = (Arc::clone(memory), 0_u8);
    let job = move || {
        pattern.iter().for_each(|change| change.make(&rewritten, pass));
        pass = pass.wrapping_add(1);
    };
    let ((), passes) = race(job, || ops.iter().for_each(|op| state.step(*op)));
    let mut seen = state.end();
    for guest in guests {
        guest.check_guards();
        assert_eq!(Arc::strong_count(&guest.memory), 1, "memory is held");
    }
    seen.passes = passes;
    seen
}

/// What the thread writes at one place.
enum Change {
    /// Bytes.
    Bytes(u64, [u8; 2]),
    /// Eight bytes of payload.
    Payload(u64, u8),
    /// One destination address after another.
    Destination(u64, u8),
}

impl Change {
    fn make(&self, memory: &GuestMemory, pass: u8) {
        match self {
            Self::Bytes(at, bytes) => write(memory, *at, bytes),
            Self::Payload(at, byte) => write(memory, *at, &[*byte; 8]),
            Self::Destination(at, first) => {
                let pick = usize::from(first.wrapping_add(pass));
                write(memory, *at, &destination(pick));
            }
        }
    }
}

/// Most often one of the honest guests.
fn destination(pick: usize) -> [u8; 6] {
    match pick % 8 {
        7 => OTHERS[pick / 8 % OTHERS.len()],
        6 => MACS[0],
        n => MACS[1 + n % 2],
    }
}

/// Four bytes for each change: place, offset, value.
fn pattern(bytes: &[u8]) -> Vec<Change> {
    let legal = |byte: u8| if byte == CANARY { CANARY - 1 } else { byte };
    let change = |[place, offset, low, high]: &[u8; 4]| {
        let value = [legal(*low), legal(*high)];
        let (offset, slot) = (u64::from(*offset), BUFFERS[1] + u64::from(offset % 16) * BUFFER);
        let ring = if place & 0x80 == 0 { &TX } else { &RX };
        match place % 8 {
            0 => Change::Bytes(ring.driver + offset % 0x28 / 2 * 2, value),
            1 => Change::Bytes(ring.desc + offset % 0x80 * 2, value),
            2 => Change::Bytes(POOLS[usize::from(place >> 7 ^ 1)] + offset * 2, value),
            3 => Change::Bytes(slot + u64::from(high % 11), [value[0], 0]),
            4 | 5 => Change::Destination(slot + HDR as u64, *low),
            6 if place & 0x40 == 0 => {
                let at = HDR as u64 + 6 + u64::from(high % 122);
                Change::Bytes(slot + at, [value[0], legal(offset as u8)])
            }
            6 => Change::Bytes(ring.device + offset % 0x88, value),
            _ => Change::Payload(slot + HDR as u64 + 14 + u64::from(*high) * 3, value[0]),
        }
    };
    bytes.as_chunks::<4>().0.iter().map(change).collect()
}

/// An honest guest, or the receive queue of the other.
struct Receiver {
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    egress: Arc<Mutex<VirtioEgress>>,
    stats: Arc<EgressStats>,
    /// Address of each buffer that the device may write to, by id.
    posted: BTreeMap<u16, u64>,
    free: Vec<u64>,
    len: u32,
    takes: Offloads,
    mergeable: bool,
    port: Arc<Port>,
    /// Frames got, and their bytes.
    got: [u64; 2],
}

impl Receiver {
    fn new(id: u16, memory: &Arc<GuestMemory>, features: Features, rereads: bool) -> Self {
        write(memory, BASE, &[0; (BUFFERS[1] - BASE) as usize]);
        let pool = IndirectPool::new(memory, POOLS[0], SIZE, 8);
        let driver = DriverQueue::new(memory, &RX, features, 0, pool).expect("legal");
        let device = DeviceQueue::new(memory, &RX, features, 0).expect("legal");
        let stats = Arc::new(EgressStats::default());
        let (takes, mergeable) =
            if id == 1 { (Offloads::ALL, false) } else { (Offloads::default(), id == 2) };
        let format = Format {
            hdr_len: HDR as u32,
            mergeable,
            sends: Offloads::ALL,
            takes,
            frame_len_max: 1518,
        };
        let mut egress = VirtioEgress::new(Arc::clone(&stats));
        egress.activate(device, Arc::clone(memory), None, format);
        egress.enable(true);
        let egress = Arc::new(Mutex::new(Lock::Egress, egress));
        let queue: Arc<Mutex<dyn Egress>> = match rereads && id == 1 {
            true => Arc::new(Mutex::new(Lock::Egress, Rereads(Arc::clone(&egress)))),
            false => egress.clone(),
        };
        let queue = EgressQueue::new(queue, Arc::clone(&stats));
        let port = Port::new(PortId(id), format!("p{id}"), vec![queue]);
        port.set_active(1);
        // Of the honest guests, all memory after the rings is for buffers.
        let (from, number, len) = match id {
            0 => (BUFFERS[0], BUFFERS_NUMBER[0], BUFFER),
            1 => (BUFFERS[1], 4, 0x1000),
            _ => (BUFFERS[1], 16, 0x200),
        };
        Self {
            memory: Arc::clone(memory),
            driver,
            egress,
            stats,
            posted: BTreeMap::new(),
            free: (0..number).map(|n| from + n * len).collect(),
            len: len as u32,
            takes,
            mergeable,
            port: Arc::new(port),
            got: [0; 2],
        }
    }

    fn post(&mut self) {
        while let Some(addr) = self.free.pop() {
            let buf = Buf { addr, len: self.len, write: true };
            let Some(id) = self.driver.add(&[buf]) else {
                self.free.push(addr);
                break;
            };
            let earlier = self.posted.insert(id, addr);
            assert!(earlier.is_none(), "an id in flight was returned again");
        }
        self.driver.publish();
    }

    /// Of an honest guest: takes what it got, and checks it.
    fn collect(&mut self) {
        let mut used = Vec::new();
        self.driver.take_used(usize::from(SIZE), &mut used).expect("the device is honest");
        let mut rest = &used[..];
        while !rest.is_empty() {
            let (mut frame, mut left) = (Vec::new(), 1);
            while left > 0 {
                let (one, next) = rest.split_first().expect("as many buffers as it says");
                rest = next;
                left -= 1;
                let is_first = frame.is_empty();
                self.take(one, &mut frame);
                if is_first && self.mergeable {
                    let buffers = u16::from_le_bytes([frame[10], frame[11]]);
                    assert!(buffers > 0, "a frame has a buffer");
                    left = buffers - 1;
                }
            }
            self.check(&frame);
            self.got[0] += 1;
            self.got[1] += (frame.len() - HDR) as u64;
        }
    }

    fn take(&mut self, used: &Used, frame: &mut Vec<u8>) {
        let addr = self.posted.remove(&used.id).expect("a buffer is used once");
        self.free.push(addr);
        let at = frame.len();
        frame.resize(at + used.len as usize, 0);
        let read =
            self.memory.seg(addr, used.len, &mut 0).expect("a buffer").read(&mut frame[at..]);
        assert_eq!(read, used.len as usize);
    }

    /// What an honest guest gets is from the other one alone.
    fn check(&self, bytes: &[u8]) {
        let (hdr, frame) = bytes.split_at(HDR);
        let raw = hdr[..VnetHdr::LEN].try_into().expect("10 bytes");
        VnetHdr::parse(&raw).check(frame.len() as u32, self.takes).expect("a valid header");
        assert!(frame.len() >= 14, "a header of Ethernet");
        let (dst, own) = (&frame[..6], MACS[usize::from(self.port.id.0)]);
        let is_anothers = MACS.iter().any(|mac| *mac != own && mac == dst);
        assert!(!is_anothers, "to {dst:x?}, delivered to {own:x?}");
        assert!(!dst.starts_with(&OTHERS[3][..5]), "a bridge does not forward it");
        assert_eq!(frame[6..12], MACS[0], "port security permits one source");
        let tag = [0x81, 0x00, 0x00, VID as u8];
        let is_tagged = frame[12..14] == tag[..2]
            && frame.len() >= 16
            && u16::from_be_bytes([frame[14], frame[15]]) & 0xfff == VID;
        assert!(self.port.id.0 == 1 || is_tagged, "a trunk gets its VLANs");
        let is_outside = frame.windows(8).any(|bytes| bytes == [CANARY; 8]);
        assert!(!is_outside, "read outside the guest's memory");
    }
}

/// A port with a defect: what it delivers of a frame is not the copy that was looked up.
struct Rereads(Arc<Mutex<VirtioEgress>>);

impl Rereads {
    fn port(&self) -> MutexGuard<'_, VirtioEgress> {
        self.0.lock()
    }
}

impl Egress for Rereads {
    fn offloads(&self) -> Offloads {
        self.port().offloads()
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        // Without private copies of their heads.
        let mut again = Burst::default();
        for frame in picks.iter().map(|pick| &burst.frames[usize::from(*pick)]) {
            let (first, segs) = (again.segs.len(), burst.segs(frame));
            again.segs.extend_from_slice(segs);
            again.push_at(first, segs.len(), frame.len, frame.hdr);
        }
        let picks: Vec<u16> = (0..picks.len() as u16).collect();
        self.port().put(&again, &picks)
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        self.port().put_parts(head, body, hdr)
    }

    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault> {
        self.port().room(len, limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        self.port().flush();
    }

    fn notify(&mut self) {
        self.port().notify();
    }

    fn arm(&mut self) -> bool {
        self.port().arm()
    }

    fn disarm(&mut self) {
        self.port().disarm();
    }
}

struct State {
    features: Features,
    receivers: [Receiver; 3],
    driver: DriverQueue,
    /// Whether the driver half of the transmit queue is not used any more: its ring is malformed.
    abandoned: [bool; 2],
    ingress: VirtioIngress,
    /// The transmit queue is at fault: it is not served any more.
    stopped: bool,
    sources: [Source; 2],
    forwarder: Forwarder,
    now: Instant,
    serial: u32,
    seen: Seen,
}

impl State {
    fn new(guests: &[Guest; 3], features: Features, rereads: bool) -> Self {
        let memory = &guests[0].memory;
        let honest = Features { in_order: false, ..features };
        let mut receivers = [0, 1, 2].map(|id: u16| {
            let features = if id == 0 { features } else { honest };
            Receiver::new(id, &guests[usize::from(id)].memory, features, rereads)
        });
        receivers.iter_mut().for_each(Receiver::post);
        let pool = IndirectPool::new(memory, POOLS[1], SIZE, 8);
        let driver = DriverQueue::new(memory, &TX, features, 0, pool).expect("legal");
        let device = DeviceQueue::new(memory, &TX, features, 0).expect("legal");
        let stats = [(); 2].map(|()| Arc::new(IngressStats::default()));
        let format = Format {
            hdr_len: HDR as u32,
            mergeable: true,
            sends: Offloads::ALL,
            takes: Offloads::ALL,
            frame_len_max: 1518,
        };
        let mut ingress = VirtioIngress::new(Arc::clone(&stats[0]));
        ingress.activate(device, Arc::clone(memory), None, format);
        ingress.enable(true);
        let fdb = Fdb::new(64, [1, 2], 300, 64);
        for (port, mac) in (0..).zip(MACS) {
            fdb.add_static(mac, VID, PortId(port), 0).expect("a few");
        }
        let table: Table = receivers.iter().map(|of| Some(Arc::clone(&of.port))).collect();
        let mut forwarder = Forwarder::new(Mode::Switch, 0, Arc::new(fdb), Arc::new(table), 7);
        forwarder.set_tenants(Tenants::new(rules()));
        let mut port = 0;
        let sources = stats.map(|stats| {
            let tuning = Arc::new(Tuning::new(Policy::Event));
            port += 1;
            Source::new(PortId(port - 1), 0, stats, tuning)
        });
        Self {
            features,
            receivers,
            driver,
            abandoned: [false; 2],
            ingress,
            stopped: false,
            sources,
            forwarder,
            now: Instant::START + Ns::from_secs(1),
            serial: 0,
            seen: Seen::default(),
        }
    }

    fn step(&mut self, op: u8) {
        let n = usize::from(op >> 4);
        match op & 15 {
            0..=3 => self.send(n),
            4..=7 => self.burst(n),
            8 => self.reclaim(),
            9 => self.receivers[1..].iter_mut().for_each(Receiver::post),
            10 => self.receivers[1..].iter_mut().for_each(Receiver::collect),
            11 if !self.abandoned[0] => self.receivers[0].post(),
            12 => self.reply(n),
            13 => {
                let findings = self.forwarder.retry(n & 1 == 0, self.now);
                self.seen.faults += findings.events.iter().count();
            }
            14 => {
                self.ingress.arm();
                let mut egress = self.receivers[0].egress.lock();
                egress.arm();
                egress.disarm();
                self.ingress.disarm();
            }
            _ => self.now += Ns::from_ms(20 * n as u64),
        }
    }

    /// The guest makes frames available.
    fn send(&mut self, n: usize) {
        for i in 0..n % 4 + 1 {
            if self.abandoned[1] {
                return;
            }
            self.serial += 1;
            let at = BUFFERS[1] + u64::from(self.serial) % BUFFERS_NUMBER[1] * BUFFER;
            let len = 60 + (self.serial * 97 + n as u32 * 31) % 900;
            let mut frame = vec![self.serial as u8 & 0x7f; HDR + len as usize];
            frame[..HDR].fill(0);
            frame[HDR..][..6].copy_from_slice(&destination(n + i + self.serial as usize));
            frame[HDR + 6..][..6].copy_from_slice(&MACS[0]);
            frame[HDR + 12..][..2].copy_from_slice(&[8, 1]);
            write(&self.receivers[0].memory, at, &frame);
            let split = if n & 4 == 0 { HDR as u32 } else { HDR as u32 + 40 };
            let all = HDR as u32 + len;
            let whole = [Buf { addr: at, len: all, write: false }];
            let parts = [
                Buf { addr: at, len: split, write: false },
                Buf { addr: at + u64::from(split), len: all - split, write: false },
            ];
            let added = self.driver.add(if n & 8 == 0 { &whole[..] } else { &parts[..] });
            if added.is_none() {
                break;
            }
        }
        self.driver.publish();
    }

    fn burst(&mut self, n: usize) {
        if self.stopped {
            return;
        }
        self.now += Ns::new(1000);
        let mut scratch = Burst::default();
        let taken = schedule::burst(
            &self.sources[0],
            4 * n + 1,
            &mut self.ingress,
            &mut self.forwarder,
            &mut scratch,
            self.now,
            None,
        );
        assert!(scratch.frames.is_empty() && scratch.segs.is_empty(), "given back empty");
        self.seen.frames[0] += taken.frames;
        self.seen.faults += taken.findings.events.iter().count();
        self.stopped = taken.faulty;
    }

    /// The guest takes what is used of either queue, as far as it can.
    fn reclaim(&mut self) {
        let mut used = Vec::new();
        let size = usize::from(SIZE);
        if !self.abandoned[1] {
            self.abandoned[1] = self.driver.take_used(size, &mut used).is_err();
        }
        let rx = &mut self.receivers[0];
        used.clear();
        if !self.abandoned[0] {
            self.abandoned[0] = rx.driver.take_used(size, &mut used).is_err();
        }
        for used in &used {
            rx.free.extend(rx.posted.remove(&used.id));
        }
        self.seen.frames[1] += used.len();
    }

    /// Frames of an honest guest to the other one.
    fn reply(&mut self, n: usize) {
        let frames: Vec<Vec<u8>> = (0..n % 4 + 1)
            .map(|i| {
                let mut frame = vec![n as u8; 60 + 90 * n + i];
                frame[..6].copy_from_slice(&MACS[0]);
                frame[6..12].copy_from_slice(&MACS[1]);
                frame
            })
            .collect();
        let mut burst = Burst::default();
        frames.iter().for_each(|frame| burst.push_private(frame, VnetHdr::NONE));
        let source = &self.sources[1];
        let findings = self.forwarder.forward(source, &mut burst, self.now);
        source.stats.frames.add((frames.len() - burst.left()) as u64);
        self.seen.faults += findings.events.iter().count();
    }

    /// Ends it, and checks that nothing is held or missing.
    fn end(mut self) -> Seen {
        for _ in 0..2 {
            self.receivers[1..].iter_mut().for_each(Receiver::collect);
            self.receivers[1..].iter_mut().for_each(Receiver::post);
            self.now += Ns::from_secs(1);
            let findings = self.forwarder.retry(true, self.now);
            self.seen.faults += findings.events.iter().count();
        }
        for receiver in &mut self.receivers {
            receiver.port.set_active(0);
            assert_eq!(receiver.port.egress[0].held_frames(), 0, "frames are held");
            receiver.egress.lock().deactivate();
        }
        self.ingress.deactivate();
        self.receivers[1..].iter_mut().for_each(Receiver::collect);
        let Self { mut seen, receivers, sources, features, .. } = self;
        let (mut sent, mut got) = (0, 0);
        for (name, n) in sources.iter().flat_map(|source| source.stats.all()) {
            match name {
                "frames" | "copies" => sent += n,
                // Counted by the receiver, as `lost_`.
                "drops_no_room" => {}
                _ if IngressStats::NOT_TAKEN.contains(&name) => {}
                _ if name.starts_with("drops_") => got += n,
                _ => {}
            }
            if name.starts_with("drops_") && n > 0 {
                seen.drops.push(name);
            }
        }
        for (name, n) in receivers.iter().flat_map(|receiver| receiver.stats.all()) {
            match name {
                "segmented" => sent += n,
                "frames" | "gso_segmented" => got += n,
                _ if name.starts_with("drops_") || name.starts_with("lost_") => got += n,
                _ => {}
            }
        }
        assert_eq!(sent, got, "frames in, and out or dropped, {features:?}");
        for (i, receiver) in receivers[1..].iter().enumerate() {
            let stats = &receiver.stats;
            assert_eq!(receiver.got, [stats.frames.get(), stats.bytes.get()], "as counted");
            seen.delivered[i] = receiver.got[0] as usize;
        }
        seen
    }
}

fn rules() -> Vec<Option<Arc<Rules>>> {
    let locked = Security::new(&MACS[..1], None, true, true);
    let access = Vlan::Access(VID);
    let trunk = Vlan::Trunk { vids: [VID].into_iter().collect(), native: None };
    let rules = [(Some(locked), access.clone()), (None, access), (None, trunk)];
    let rules = rules.map(|(security, vlan)| Rules { security, vlan, isolated: false });
    rules.into_iter().map(|rules| Some(Arc::new(rules))).collect()
}

fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    memory.seg_mut(addr, bytes.len() as u32, &mut 0).expect("inside").write(bytes);
}

/// Start inputs: each kind of ring, with frames while headers, descriptors, indices or all of them
/// are rewritten; and those of rings alone.
pub fn seeds() -> Vec<Vec<u8>> {
    let headers = [[4, 0, 0, 0], [4, 1, 1, 0], [12, 2, 0, 0], [6, 3, 9, 5], [3, 4, 1, 0]];
    let payload = [[7, 0, 0x33, 5], [7, 1, 0x44, 9], [4, 2, 3, 0], [4, 5, 0, 0]];
    let descs = [[1, 4, 20, 0], [1, 4, 200, 0], [1, 6, 1, 0], [1, 6, 0, 0], [1, 12, 0, 0x90]];
    let indices = [[0, 2, 1, 0], [0, 2, 3, 0], [0x80, 2, 9, 0], [2, 0, 0, 0x30], [0x46, 2, 7, 0]];
    let patterns = [&headers[..], &payload, &descs, &indices, &[]];
    let serve = [0x31, 0xb2, 0xf4, 0x0a, 0x09, 0x3c, 0x0b, 0x7d, 0x08, 0x0e];
    let mut seeds = Vec::new();
    for bits in 0..16_u8 {
        let pattern = patterns[usize::from(bits) % 5].iter().chain(patterns[0]);
        let ops = serve.repeat(6);
        let mut seed = vec![0, bits, ops.len() as u8];
        seed.extend(ops);
        seed.extend(pattern.flatten());
        seeds.push(seed);
    }
    for (kind, alone) in [(2, ring_image::seeds()), (3, xen_ring::seeds())] {
        seeds.extend(alone.into_iter().step_by(3).map(|seed| [vec![kind], seed].concat()));
    }
    seeds
}
