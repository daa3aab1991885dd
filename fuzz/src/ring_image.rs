//! Arbitrary bytes as ring memory, under both halves at once.
//!
//! ```text
//!   features  size  base  count  operations...  image...
//! ```
//! The image overlays the rings (and the indirect tables) when the halves start, and pieces of it
//! are written again between operations. Either half may find its ring malformed at any time;
//! neither may panic, return an invalid chain, or hold more than the ring's size.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::mem::Discriminant;
use std::sync::Arc;

use ring::virtq::{
    Buf, Chain, DeviceQueue, DriverQueue, IndirectPool, Layout, Malformed, Taken, Used,
};
use shm::{GuestMemory, Mapping, Region, Seg, SegMut};

use crate::Bytes;
use crate::racer::race;

const MEMORY: u64 = 0x4000;
const GUEST_ADDR: u64 = 0x1000;
const DESC: u64 = GUEST_ADDR;
const DRIVER: u64 = GUEST_ADDR + 0x400;
const DEVICE: u64 = GUEST_ADDR + 0x480;
const POOL: u64 = GUEST_ADDR + 0x600;
const SIZE_MAX: u8 = 32;
/// Rings and indirect tables; bytes of them that another thread writes at once.
const IMAGE_LEN: usize = 0x600;
const PIECE: usize = 16;

thread_local! {
    static MEMORY_OF_THREAD: RefCell<Arc<GuestMemory>> = RefCell::new(Arc::new(memory()));
}

fn memory() -> GuestMemory {
    let mapping = Arc::new(Mapping::memfd("fuzz", MEMORY).expect("memory"));
    let region = Region { guest_addr: GUEST_ADDR, user_addr: 0, len: MEMORY, offset: 0, mapping };
    GuestMemory::new(vec![region]).expect("one region")
}

/// Events of a run.
#[derive(Default)]
pub struct Seen {
    /// Chains the device half took.
    pub taken: usize,
    /// Chains returned to the driver half.
    pub used: usize,
    /// Faults of either half, by variant.
    pub faults: BTreeMap<String, Discriminant<Malformed>>,
}

impl Seen {
    fn fault(&mut self, fault: Malformed) {
        let name = format!("{fault:?}");
        let name = name.split([' ', '(']).next().unwrap_or_default().to_owned();
        self.faults.insert(name, std::mem::discriminant(&fault));
    }
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    explore_and(data, false).0
}

/// The same, while another thread writes the image again and again. Returns the number of times,
/// too.
pub fn explore_racing(data: &[u8]) -> (Seen, u64) {
    explore_and(data, true)
}

fn explore_and(data: &[u8], races: bool) -> (Seen, u64) {
    let memory = MEMORY_OF_THREAD.with_borrow(Arc::clone);
    let mut bytes = Bytes(data);
    let bits = bytes.u8();
    let features = crate::features(bits);
    let size = u16::from(bytes.u8() % SIZE_MAX) + 1;
    let size = if features.packed { size } else { size.next_power_of_two() };
    let start = bytes.u16();
    let half = (u32::from(start & 0x7fff) % u32::from(size)) | u32::from(start & 0x8000);
    let base = if features.packed { half | half << 16 } else { u32::from(start) };
    let count = bytes.u8();
    let ops = bytes.take(usize::from(count));
    let image = bytes.0;

    let layout = Layout { size, desc: DESC, driver: DRIVER, device: DEVICE };
    write(&memory, GUEST_ADDR, &[0; MEMORY as usize]);
    let pool = IndirectPool::new(&memory, POOL, size, 8);
    let driver = DriverQueue::new(&memory, &layout, features, base, pool).expect("legal");
    if bits & 16 == 0 {
        write(&memory, GUEST_ADDR, image);
    }
    let device = DeviceQueue::new(&memory, &layout, features, base).expect("legal");
    let mut state = State {
        memory: &memory,
        image,
        device,
        driver,
        taken: Taken::with_capacity(8, size),
        held: VecDeque::new(),
        flight: BTreeMap::new(),
        published: Vec::new(),
        fault: None,
        abandoned: false,
        serial: 0,
        seen: Seen::default(),
    };
    let mut steps = || ops.iter().for_each(|op| state.step(*op));
    if !races {
        steps();
        return (state.seen, 0);
    }
    let (image, memory) = (image[..image.len().min(IMAGE_LEN)].to_vec(), Arc::clone(&memory));
    let job = move || {
        for (at, piece) in (GUEST_ADDR..).step_by(PIECE).zip(image.chunks(PIECE)) {
            write(&memory, at, piece);
        }
    };
    let ((), passes) = race(job, steps);
    (state.seen, passes)
}

struct State<'a> {
    memory: &'a GuestMemory,
    image: &'a [u8],
    device: DeviceQueue,
    driver: DriverQueue,
    taken: Taken,
    /// Chains the device half holds, oldest first.
    held: VecDeque<Chain>,
    /// Chains of the driver half in flight: by id, descriptors and writable bytes.
    flight: BTreeMap<u16, (u16, u32)>,
    published: Vec<Used>,
    fault: Option<Malformed>,
    abandoned: bool,
    serial: u32,
    seen: Seen,
}

impl State<'_> {
    fn step(&mut self, op: u8) {
        let n = usize::from(op >> 4);
        match op & 15 {
            0..=2 => self.take(n),
            3 | 4 => self.put(n),
            5 => {
                self.device.publish();
                let _ = self.device.call_needed();
                assert!(!self.device.call_needed(), "nothing new");
            }
            6 => {
                let armed = self.device.arm();
                assert!(self.fault.is_none() || armed == ring::virtq::Armed::WorkPending);
            }
            7 => self.device.disarm(),
            8 | 9 => self.add(n),
            10 => {
                self.driver.publish();
                let _ = self.driver.kick_needed();
                assert!(!self.driver.kick_needed(), "nothing new");
            }
            11 | 12 => self.collect(n),
            13 => {
                let _ = self.driver.arm();
            }
            14 => self.smash(n, 2),
            _ => self.smash(n, 16),
        }
    }

    fn take(&mut self, max: usize) {
        let size = self.device.size();
        match self.device.take(self.memory, max, &mut self.taken) {
            Ok(n) => {
                assert!(self.fault.is_none(), "a fault stays");
                assert!(n <= max && n == self.taken.chains.len());
            }
            Err(fault) => {
                assert!(self.fault.is_none_or(|f| f == fault), "a fault stays the same");
                assert!(self.taken.chains.is_empty() && self.taken.bufs.is_empty());
                self.fault = Some(fault);
                self.seen.fault(fault);
                return;
            }
        }
        let mut bufs = 0;
        for chain in &self.taken.chains {
            let (reads, writes) = (self.taken.reads(chain), self.taken.writes(chain));
            assert!(reads.iter().all(|b| !b.write) && writes.iter().all(|b| b.write));
            assert!((1..=size).contains(&chain.slots));
            assert!(!reads.is_empty() || !writes.is_empty());
            assert!(reads.len() + writes.len() <= usize::from(size));
            bufs += reads.len() + writes.len();
            for buf in reads.iter().chain(writes) {
                touch(self.memory, buf);
            }
        }
        assert_eq!(bufs, self.taken.bufs.len());
        self.seen.taken += self.taken.chains.len();
        // Every third burst untakes its last chain, as if it had no room for it.
        let last = usize::from(self.serial.is_multiple_of(3));
        let keep = self.taken.chains.len().saturating_sub(last);
        self.serial += 1;
        self.device.untake(&self.taken.chains[keep..]);
        self.held.extend(&self.taken.chains[..keep]);
        assert!(self.held.len() <= usize::from(size), "more chains held than the ring has");
    }

    fn put(&mut self, n: usize) {
        for _ in 0..n {
            if let Some(chain) = self.held.pop_front() {
                self.device.put(&chain, self.serial % 50);
            }
        }
    }

    fn add(&mut self, n: usize) {
        let bufs: Vec<Buf> = (0..n % 4 + 1)
            .map(|i| Buf { addr: GUEST_ADDR + 64 * i as u64, len: 40, write: i * 2 > n % 4 })
            .collect();
        if self.abandoned {
            return;
        }
        let before = self.driver.free();
        if let Some(id) = self.driver.add(&bufs) {
            assert!(id < self.driver.size());
            let room = bufs.iter().filter(|b| b.write).map(|b| b.len).sum();
            let old = self.flight.insert(id, (before - self.driver.free(), room));
            assert!(old.is_none(), "an id in flight was returned again");
        }
    }

    fn collect(&mut self, max: usize) {
        if self.abandoned {
            return;
        }
        self.published.clear();
        let result = self.driver.take_used(max, &mut self.published);
        for used in &self.published {
            let (_, room) = self.flight.remove(&used.id).expect("was in flight");
            assert!(used.len <= room);
        }
        self.seen.used += self.published.len();
        if let Err(fault) = result {
            self.seen.fault(fault);
            self.abandoned = true;
            return;
        }
        let slots: u16 = self.flight.values().map(|(slots, _)| slots).sum();
        assert_eq!(slots + self.driver.free(), self.driver.size(), "descriptors conserved");
    }

    /// Writes a piece of the image into the rings.
    fn smash(&mut self, n: usize, len: usize) {
        let at = (self.serial as usize * 37 + n * len) % 0x600;
        let at = at & !1;
        self.serial += 1;
        let from = at.min(self.image.len());
        let piece = &self.image[from..self.image.len().min(from + len)];
        write(self.memory, GUEST_ADDR + at as u64, piece);
    }
}

fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    let len = bytes.len().min((GUEST_ADDR + MEMORY - addr) as usize);
    if let Some(mut seg) = memory.seg_mut(addr, len as u32, &mut 0) {
        seg.write(&bytes[..len]);
    }
}

/// Handles a buffer as the switch does: translates it, and copies if it is valid.
fn touch(memory: &GuestMemory, buf: &Buf) {
    let mut head = [0; 64];
    if buf.write {
        let Some(seg) = memory.seg_mut(buf.addr, buf.len, &mut 0) else {
            return;
        };
        assert!(u64::from(seg.len()) <= MEMORY);
        SegMut::of(&mut head).copy_from(Seg::EMPTY);
    } else if let Some(seg) = memory.seg(buf.addr, buf.len, &mut 0) {
        assert!(seg.read(&mut head) <= 64);
    }
}

/// Valid rings as start inputs: each layout with direct and indirect chains, served and collected,
/// with and without an image.
pub fn seeds() -> Vec<Vec<u8>> {
    let serve = [0x82, 0x83, 0x05, 0x06];
    let drive =
        [0x18, 0x38, 0x28, 0x0a, 0x82, 0x23, 0x05, 0x8b, 0x0d, 0x08, 0x0a, 0x82, 0x83, 0x05];
    let mut seeds = Vec::new();
    for bits in 0..16_u8 {
        // The driver half fills the ring, and the image is written late.
        let mut ops = drive.to_vec();
        ops.extend([0x1e, 0x2e, 0x3f, 0x8b, 0x82]);
        seeds.push(input(bits | 16, 7, 0x8000, &ops, &vec![0; 0x600]));
        // The image is the ring.
        let ops = serve.repeat(3);
        seeds.push(input(bits, 7, 0x8000, &ops, &image(bits & 1 != 0)));
    }
    seeds
}

fn input(bits: u8, size: u8, start: u16, ops: &[u8], image: &[u8]) -> Vec<u8> {
    let mut bytes = vec![bits, size];
    bytes.extend(start.to_le_bytes());
    bytes.push(ops.len() as u8);
    bytes.extend(ops);
    bytes.extend(image);
    bytes
}

/// A ring of 8 from start 0x8000 with a chain of one, a chain of two, and an indirect one.
fn image(packed: bool) -> Vec<u8> {
    let mut image = vec![0; 0x600];
    let mut desc = |at: usize, addr: u64, len: u32, a: u16, b: u16| {
        image[at..at + 8].copy_from_slice(&addr.to_le_bytes());
        image[at + 8..at + 12].copy_from_slice(&len.to_le_bytes());
        image[at + 12..at + 14].copy_from_slice(&a.to_le_bytes());
        image[at + 14..at + 16].copy_from_slice(&b.to_le_bytes());
    };
    const TABLE: usize = 0x580;
    let table = GUEST_ADDR + TABLE as u64;
    if packed {
        const AVAIL: u16 = 1 << 7;
        desc(0, GUEST_ADDR, 60, 0, AVAIL);
        desc(16, GUEST_ADDR, 12, 1, AVAIL | 1);
        desc(32, GUEST_ADDR, 100, 1, AVAIL | 2);
        desc(48, table, 32, 2, AVAIL | 4);
        desc(TABLE, GUEST_ADDR, 12, 0, 0);
        desc(TABLE + 16, GUEST_ADDR, 100, 0, 2);
    } else {
        desc(0, GUEST_ADDR, 60, 0, 0);
        desc(16, GUEST_ADDR, 12, 1, 2);
        desc(32, GUEST_ADDR, 100, 2, 0);
        desc(48, table, 32, 4, 0);
        desc(TABLE, GUEST_ADDR, 12, 1, 1);
        desc(TABLE + 16, GUEST_ADDR, 100, 2, 0);
        let avail = [0, 0x8003, 0, 1, 3_u16];
        for (i, word) in avail.iter().enumerate() {
            image[0x400 + 2 * i..0x402 + 2 * i].copy_from_slice(&word.to_le_bytes());
        }
        image[0x482..0x484].copy_from_slice(&0x8000_u16.to_le_bytes());
    }
    image
}
