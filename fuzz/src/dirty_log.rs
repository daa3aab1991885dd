//! Arbitrary bytes as a guest, and as its front-end, while the guest migrates.
//!
//! ```text
//!   features  format  count  operations...  image...
//! ```
//! The front-end takes marks from the log, also in the middle of a burst, sends the pages that are
//! marked, sets bits of its own, and replaces the log; pieces of the image are written into rings
//! and buffers at the same times. Whatever the ports write must arrive: after a last pass, what was
//! sent is the guest's memory, byte for byte.

use std::cell::RefCell;
use std::sync::Arc;

use ring::virtq::{Buf, DeviceQueue, DriverQueue, IndirectPool, Layout, RingLog};
use shm::{DirtyLog, GuestMemory, LOG_PAGE, Mapping, Region, Seg, SegMut};
use switch::direct::{DirectFrame, Lent};
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};
use vhost_user::port::{Format, GuestQueue, VirtioEgress, VirtioIngress};

use crate::Bytes;

const BASE: u64 = 0x1000;
/// Two regions, one after the other.
const HALF: u64 = 0x8000;
const LEN: usize = 2 * HALF as usize;
const SIZE: u16 = 16;
/// The parts of both rings that devices write lie across the end of a page.
const RX: Layout = Layout { size: SIZE, desc: 0x1f80, driver: 0x1200, device: 0x2fc0 };
const TX: Layout = Layout { size: SIZE, desc: 0x3f80, driver: 0x3200, device: 0x4fc0 };
const POOLS: [u64; 2] = [0x5100, 0x5900];
const BUFFERS: u64 = 0x6100;
const BUFFERS_LEN: u64 = BASE + 2 * HALF - BUFFERS;
/// What the guest writes itself: the areas of each ring, and the tables of its pool.
const OWN: [[(u64, usize); 4]; 2] = [
    [(RX.driver, 0x100), (RX.desc, 0x180), (RX.device, 0x100), (POOLS[0], POOL_LEN)],
    [(TX.driver, 0x100), (TX.desc, 0x180), (TX.device, 0x100), (POOLS[1], POOL_LEN)],
];
const POOL_LEN: usize = (POOLS[1] - POOLS[0]) as usize;
/// Bytes of a queue's.
const OWN_LEN: usize = 0x100 + 0x180 + 0x100 + POOL_LEN;
/// Bytes compared at once.
const PIECE: usize = 64;
/// A log for the first 128 pages: more than the guest has.
const LOG_LEN: u64 = 16;

thread_local! {
    static MEMORY_OF_THREAD: RefCell<Arc<GuestMemory>> = RefCell::new(Arc::new(memory()));
    /// Two logs, that one may replace the other. They are made once: making one takes system calls.
    static LOGS_OF_THREAD: RefCell<[Log; 2]> = RefCell::new([log(), log()]);
}

/// A log, and its memory.
type Log = (Arc<Mapping>, Arc<DirtyLog>);

fn memory() -> GuestMemory {
    let region = |n: u64| {
        let mapping = Arc::new(Mapping::memfd("fuzz", HALF).expect("memory"));
        Region { guest_addr: BASE + n * HALF, user_addr: 0, len: HALF, offset: 0, mapping }
    };
    GuestMemory::new(vec![region(0), region(1)]).expect("two regions")
}

/// Events of a run.
#[derive(Debug, Default)]
pub struct Seen {
    /// Pages sent because they were marked.
    pub sent: usize,
    /// Passes in the middle of a burst that found marks.
    pub amid: usize,
    /// Frames that the guest sent, and was sent.
    pub frames: [usize; 2],
    /// Bursts that found a ring malformed.
    pub faults: usize,
    /// Logs replaced.
    pub replaced: usize,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data, true);
}

/// As [`run`]; returns what happened. `logged`: the ports have the log; without it, nothing that
/// they write is sent, and this fails.
pub fn explore(data: &[u8], logged: bool) -> Seen {
    let memory = MEMORY_OF_THREAD.with_borrow(Arc::clone);
    let mut bytes = Bytes(data);
    let features = crate::features(bytes.u8());
    let mergeable = bytes.u8() & 1 == 0;
    let format = Format {
        hdr_len: 12,
        mergeable,
        sends: Offloads::ALL,
        takes: Offloads::ALL,
        frame_len_max: 9234,
    };
    let count = bytes.u8();
    let ops = bytes.take(usize::from(count));
    write(&memory, BASE, &[0; LEN]);
    let half = |layout: &Layout, pool: u64| {
        let base = if features.packed { 0x8000_8000 } else { 0 };
        let pool = IndirectPool::new(&memory, pool, SIZE, 8);
        let driver = DriverQueue::new(&memory, layout, features, base, pool).expect("legal");
        (driver, DeviceQueue::new(&memory, layout, features, base).expect("legal"))
    };
    let ((rx_driver, rx), (tx_driver, tx)) = (half(&RX, POOLS[0]), half(&TX, POOLS[1]));
    let (mut ingress, mut egress) =
        (VirtioIngress::new(Arc::default()), VirtioEgress::new(Arc::default()));
    ingress.activate(tx, Arc::clone(&memory), None, format);
    egress.activate(rx, Arc::clone(&memory), None, format);
    ingress.enable(true);
    egress.enable(true);
    let [log, spare] = LOGS_OF_THREAD.with_borrow(Clone::clone);
    for (memory, _) in [&log, &spare] {
        memory.seg_mut(0, LOG_LEN as u32).expect("inside").write(&[0; LOG_LEN as usize]);
    }
    let mut state = State {
        front: Front {
            sent: read(&memory),
            memory,
            log,
            spare,
            image: bytes.0,
            serial: 0,
            seen: Seen::default(),
        },
        logged,
        drivers: [rx_driver, tx_driver],
        ingress,
        egress,
    };
    state.set_log();
    for op in ops {
        state.step(*op);
    }
    // The rings stop; their last positions are in the log.
    state.ingress.deactivate();
    state.egress.deactivate();
    state.front.pass(u64::MAX);
    state.front.check();
    state.front.seen
}

fn log() -> Log {
    let mapping = Arc::new(Mapping::memfd("log", LOG_LEN).expect("memory"));
    let log = DirtyLog::new(&mapping, 0, LOG_LEN).expect("inside");
    (mapping, Arc::new(log))
}

fn marks(log: &Log) -> [u8; LOG_LEN as usize] {
    let mut words = [0; LOG_LEN as usize];
    log.0.seg(0, LOG_LEN as u32).expect("inside").read(&mut words);
    words
}

/// The front-end, and the guest's own writes.
struct Front<'a> {
    memory: Arc<GuestMemory>,
    log: Log,
    spare: Log,
    /// What the other machine has.
    sent: Vec<u8>,
    image: &'a [u8],
    serial: usize,
    seen: Seen,
}

impl Front<'_> {
    /// Takes the marks of the pages among `mask`, and sends these pages.
    fn pass(&mut self, mask: u64) -> usize {
        let mut words = marks(&self.log);
        let mut marks = 0;
        for (byte, word) in words.iter_mut().enumerate() {
            let taken = *word & (mask >> (byte % 8 * 8)) as u8;
            *word &= !taken;
            for bit in (0..8).filter(|bit| taken >> bit & 1 != 0) {
                marks += 1;
                let addr = (byte * 8 + bit) as u64 * LOG_PAGE;
                if (BASE..BASE + 2 * HALF).contains(&addr) {
                    let at = (addr - BASE) as usize;
                    let page = &mut self.sent[at..at + LOG_PAGE as usize];
                    self.memory.seg(addr, LOG_PAGE as u32, &mut 0).expect("inside").read(page);
                }
            }
        }
        self.log.0.seg_mut(0, LOG_LEN as u32).expect("inside").write(&words);
        self.seen.sent += marks;
        marks
    }

    fn check(&self) {
        let memory = read(&self.memory);
        if memory == self.sent {
            return;
        }
        let differs = memory.iter().zip(&self.sent).position(|(now, sent)| now != sent);
        if let Some(at) = differs {
            panic!("{:#x} was written and not sent", BASE + at as u64);
        }
    }

    fn swap_logs(&mut self) {
        std::mem::swap(&mut self.log, &mut self.spare);
    }

    /// Writes of the guest itself, which its hypervisor tracks: to a queue's ring and tables only.
    fn own<T>(&mut self, queue: usize, act: impl FnOnce(&GuestMemory) -> T) -> T {
        let (memory, mut before, mut after) = (&self.memory, [0; OWN_LEN], [0; OWN_LEN]);
        read_own(memory, queue, &mut before);
        let result = act(memory);
        read_own(memory, queue, &mut after);
        let (mut before, mut after) = (&before[..], &after[..]);
        for (at, len) in OWN[queue] {
            let sent = &mut self.sent[(at - BASE) as usize..][..len];
            let (old, new) = (before.split_off(..len), after.split_off(..len));
            let (Some(old), Some(new)) = (old, new) else { unreachable!("the sum of all") };
            let pieces = sent.chunks_mut(PIECE).zip(old.chunks(PIECE).zip(new.chunks(PIECE)));
            for (sent, (old, new)) in pieces.filter(|(_, (old, new))| old != new) {
                for (sent, (old, new)) in sent.iter_mut().zip(old.iter().zip(new)) {
                    if old != new {
                        *sent = *new;
                    }
                }
            }
        }
        result
    }

    /// A number from the image.
    fn pick(&mut self) -> u64 {
        self.serial += 1;
        let byte = |n: usize| self.image.get(n % self.image.len().max(1)).copied().unwrap_or(0);
        u64::from(byte(2 * self.serial)) << 8 | u64::from(byte(2 * self.serial + 1))
    }

    /// What both may do at any time, also in the middle of a burst.
    fn amid(&mut self, how: usize) {
        match how % 4 {
            0 => {}
            1 => {
                let mask = self.pick();
                let found = self.pass(if mask & 1 == 0 { u64::MAX } else { mask });
                self.seen.amid += usize::from(found > 0);
            }
            2 => {
                let (at, bits) = ((self.pick() % LOG_LEN) as usize, self.pick() as u8);
                let mut seg = self.log.0.seg_mut(at, 1).expect("inside");
                let mut byte = [0];
                self.log.0.seg(at, 1).expect("inside").read(&mut byte);
                seg.write(&[byte[0] | bits]);
            }
            _ => self.smash(8),
        }
    }

    /// Writes a piece of the image into a ring.
    fn smash(&mut self, len: usize) {
        let at = [RX.desc, RX.driver, RX.device, TX.desc, TX.driver, TX.device];
        let place = self.pick() as usize % 6;
        let queue = place / 3;
        // Descriptors, or the words and entries of an area.
        let offset = self.pick() % if place.is_multiple_of(3) { 0x100 } else { 0x28 };
        let from = self.pick() as usize % self.image.len().max(1);
        let piece = &self.image[from..self.image.len().min(from + len)];
        self.own(queue, |memory| write(memory, at[place] + (offset & !1), piece));
    }

    /// A frame's length.
    fn len(&mut self) -> usize {
        60 + self.pick() as usize % 3000
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.pick() as u8 | 1;
        (0..len).map(|n| first.wrapping_add(n as u8)).collect()
    }

    fn buf(&mut self, write: bool) -> Buf {
        let len = 40 + self.pick() % 4000;
        let addr = BUFFERS + self.pick() % (BUFFERS_LEN - len);
        Buf { addr, len: len as u32, write }
    }
}

struct State<'a> {
    front: Front<'a>,
    logged: bool,
    /// Of the receive queue, and of the transmit queue.
    drivers: [DriverQueue; 2],
    ingress: VirtioIngress,
    egress: VirtioEgress,
}

impl State<'_> {
    fn set_log(&mut self) {
        let of = |layout: &Layout| {
            let log = Arc::clone(&self.front.log.1);
            self.logged.then_some(RingLog { log, desc: layout.desc, device: layout.device })
        };
        self.egress.set_log(of(&RX));
        self.ingress.set_log(of(&TX));
    }

    fn step(&mut self, op: u8) {
        let n = usize::from(op >> 4);
        match op & 15 {
            0..=2 => self.add(0, n),
            3 | 4 => self.add(1, n),
            5 => {
                for (queue, driver) in self.drivers.iter_mut().enumerate() {
                    let mut used = Vec::new();
                    self.front.own(queue, |_| _ = driver.take_used(n, &mut used));
                }
            }
            6 | 7 => self.put(n),
            8 => {
                let (len, head) = (self.front.len(), 14 + n);
                let bytes = self.front.bytes(len);
                let body = [Seg::of(&bytes[head..])];
                let put = self.egress.put_parts(&bytes[..head], &body, &VnetHdr::NONE);
                self.front.seen.faults += usize::from(put.is_err());
                self.front.amid(n);
                self.egress.flush();
            }
            9 => self.direct(n),
            10 | 11 => self.burst(n),
            12 => {
                let _ = self.egress.arm();
                self.front.amid(n);
                let _ = self.ingress.arm();
            }
            13 => {
                self.egress.disarm();
                self.ingress.disarm();
            }
            14 if n & 1 == 0 => {
                // The old log is left at once, and has all earlier marks.
                self.front.swap_logs();
                let marks = marks(&self.front.log);
                assert_eq!(marks, [0; LOG_LEN as usize], "marked after it was replaced");
                self.set_log();
                self.front.swap_logs();
                self.front.pass(u64::MAX);
                self.front.swap_logs();
                self.front.seen.replaced += 1;
            }
            14 => {
                self.front.pass(u64::MAX);
                self.front.check();
            }
            _ => self.front.smash(4 + 4 * n),
        }
    }

    /// The guest makes chains available.
    fn add(&mut self, queue: usize, n: usize) {
        for _ in 0..n % 4 + 1 {
            let bufs: Vec<Buf> = (0..n / 4 + 1).map(|_| self.front.buf(queue == 0)).collect();
            let driver = &mut self.drivers[queue];
            self.front.own(queue, |_| {
                if driver.add(&bufs).is_some() {
                    driver.publish();
                }
            });
        }
    }

    fn put(&mut self, n: usize) {
        let frames: Vec<Vec<u8>> = (0..n % 4 + 1)
            .map(|_| {
                let len = self.front.len();
                self.front.bytes(len)
            })
            .collect();
        let mut burst = Burst::default();
        for bytes in &frames {
            burst.segs.push(Seg::of(bytes));
            burst.push_at(burst.segs.len() - 1, 1, bytes.len() as u32, VnetHdr::NONE);
        }
        if n & 4 != 0 {
            burst.snapshot();
        }
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        match self.egress.put(&burst, &picks) {
            Ok(done) => self.front.seen.frames[1] += done,
            Err(_) => self.front.seen.faults += 1,
        }
        self.front.amid(n);
        self.egress.flush();
        self.egress.notify();
    }

    /// As an uplink reads frames into the guest's buffers.
    fn direct(&mut self, n: usize) {
        let Some(to) = self.egress.direct() else { return };
        let front = &mut self.front;
        let mut lent = Lent::default();
        to.lend(n % 4 + 1, front.len() as u32, &mut lent);
        let mut came = Vec::new();
        lent.for_each_frame(|segs, room| {
            let len = (front.len() as u32).min(room);
            let bytes = front.bytes(len as usize);
            let mut rest = &bytes[..];
            segs.for_each(|mut seg: SegMut<'_>| {
                let n = seg.write(&rest[..rest.len().min(seg.len() as usize)]);
                rest = &rest[n as usize..];
            });
            came.push(DirectFrame { len, hdr: VnetHdr::NONE });
            front.amid(n / 4);
        });
        let done = to.accept(&came[..came.len().min(n % 3 + 1)]);
        front.seen.frames[1] += done;
        front.amid(n);
        for (i, frame) in came[done..].iter().enumerate() {
            if n & 8 == 0 {
                to.take_back(i, &mut vec![0; frame.len as usize]);
            } else {
                to.discard(i, frame.len);
            }
        }
        self.egress.flush();
    }

    /// Frames of the guest, which get back to it.
    fn burst(&mut self, n: usize) {
        let Self { front, ingress, egress, .. } = self;
        let mut scratch = Burst::default();
        let taken = ingress.burst(n + 1, Instant::from_ns(1), &mut scratch, &mut |burst| {
            front.amid(n);
            burst.snapshot();
            let picks: Vec<u16> = (0..burst.frames.len() as u16).collect();
            match egress.put(burst, &picks) {
                Ok(done) => front.seen.frames[1] += done,
                Err(_) => front.seen.faults += 1,
            }
            front.amid(n / 4);
            egress.flush();
        });
        match taken {
            Ok(taken) => front.seen.frames[0] += taken,
            Err(_) => front.seen.faults += 1,
        }
    }
}

fn read(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    let (low, high) = bytes.split_at_mut(HALF as usize);
    read_into(memory, BASE, low);
    read_into(memory, BASE + HALF, high);
    bytes
}

/// Reads what the guest writes of a queue's, one after the other.
fn read_own(memory: &GuestMemory, queue: usize, bytes: &mut [u8; OWN_LEN]) {
    let mut at = 0;
    for (addr, len) in OWN[queue] {
        read_into(memory, addr, &mut bytes[at..at + len]);
        at += len;
    }
}

/// Reads memory of one region.
fn read_into(memory: &GuestMemory, addr: u64, bytes: &mut [u8]) {
    memory.seg(addr, bytes.len() as u32, &mut 0).expect("a region").read(bytes);
}

fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    let Some(n) = memory.span(addr, bytes.len() as u32).filter(|n| *n > 0) else { return };
    let (now, rest) = bytes.split_at(n as usize);
    memory.seg_mut(addr, n, &mut 0).expect("a span").write(now);
    write(memory, addr + u64::from(n), rest);
}

/// Start inputs: each kind of ring, with every way to the guest, and passes in the middle of each.
pub fn seeds() -> Vec<Vec<u8>> {
    let ways = [0x46, 0x16, 0x18, 0x08, 0x59, 0x09, 0x1a, 0x4a, 0x1c, 0x0d];
    let mut seeds = Vec::new();
    for bits in 0..16_u8 {
        for format in [0, 1] {
            let mut ops = vec![0x32, 0x32, 0x34];
            for way in ways {
                ops.extend([way, 0x1e, 0xf5, 0x02, 0x03]);
            }
            ops.extend([0x0e, 0x16, 0x3f, 0x1a, 0x0e, 0x06, 0x1e]);
            // Rings full of anything.
            ops.extend([0xff, 0xff, 0x16, 0x1a].repeat(8));
            let mut seed = vec![bits, format, ops.len() as u8];
            seed.extend(&ops);
            seed.extend((0..200_u32).map(|n| (n * n * 7 + u32::from(bits)) as u8));
            seeds.push(seed);
        }
    }
    seeds
}
