//! Guests: a driver half on each of two rings, and an application that sends.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ring::virtq::{Armed, Buf, DriverQueue, Features, IndirectPool, Layout};
use shm::{Area, GuestMemory, Mapping, Region};

use crate::frame::{Frame, HDR_LEN, ROOM};
use crate::random::Random;

/// One of a guest's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ring {
    /// What the guest sends.
    Tx,
    /// What it receives.
    Rx,
}

/// What the back-end learns of a guest when it connects.
#[derive(Clone)]
pub struct Link {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// What was negotiated.
    pub features: Features,
    /// Layout and start of the transmit ring.
    pub tx: (Layout, u32),
    /// Layout and start of the receive ring.
    pub rx: (Layout, u32),
}

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Quick, and by the book.
    Honest,
    /// By the book, but a hundred times slower, until healed.
    Slow,
    /// Writes whatever it likes into its rings, until healed.
    Hostile,
}

/// What a guest does after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Again,
    Sleep,
}

const MEMORY: u64 = 1 << 20;
const GUEST_ADDR: u64 = 0x1_0000;
const RINGS_LEN: u64 = 0x1_0000;
const POOLS: u64 = GUEST_ADDR + RINGS_LEN;
const TX_SLOTS: u64 = GUEST_ADDR + 0x2_0000;
const RX_SLOTS: u64 = GUEST_ADDR + 0x8_0000;
const SIZE_MAX: u64 = 64;

pub(crate) struct Guest {
    pub kind: Kind,
    /// Its secret, in each of its frames.
    pub tag: u64,
    index: usize,
    memory: Arc<GuestMemory>,
    /// All its memory, for hostile hands.
    all: Area,
    tx: DriverQueue,
    rx: DriverQueue,
    /// Free transmit slots, by address.
    tx_free: Vec<u64>,
    tx_flight: BTreeMap<u16, u64>,
    rx_idle: Vec<u64>,
    rx_flight: BTreeMap<u16, u64>,
    /// Each receive buffer is made of so many pieces.
    rx_pieces: u64,
    /// Destinations of what the application wants sent, oldest first.
    pub outbox: VecDeque<usize>,
    numbers: BTreeMap<usize, u64>,
    pub sent: u64,
    /// What arrived since the world last looked, in order.
    pub inbox: Vec<Vec<u8>>,
    pub received: u64,
    /// Does not ask to be called when transmit buffers come back, unless it is out of them.
    pub lazy: bool,
    pub healed: bool,
    arming: bool,
    /// (Hostile) its own driver half has lost track.
    confused: bool,
}

fn buf(addr: u64, len: usize, write: bool) -> Buf {
    Buf { addr, len: len as u32, write }
}

impl Guest {
    pub fn new(index: usize, kind: Kind, random: &mut Random) -> (Self, Link) {
        let mapping = Arc::new(Mapping::memfd("sim", MEMORY).expect("memory for a guest"));
        let region =
            Region { guest_addr: GUEST_ADDR, user_addr: 0, len: MEMORY, offset: 0, mapping };
        let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region"));
        let features = Features {
            packed: random.one_in(2),
            event_idx: random.one_in(2),
            indirect: random.one_in(2),
            in_order: random.one_in(4),
        };
        let mut ring = |at: u64| {
            let size = random.within(4..SIZE_MAX + 1) as u16;
            let size = if features.packed { size } else { size.next_power_of_two() };
            let start = random.within(0..8) as u16;
            let base = if features.packed {
                let half = (u32::from(size - 1 - start % size)) | 0x8000;
                half | half << 16
            } else {
                // Some starts below the wrap, some above.
                u32::from(start.wrapping_sub(5))
            };
            let layout = Layout { size, desc: at, driver: at + 0x2000, device: at + 0x4000 };
            (layout, base)
        };
        let link = Link {
            memory: Arc::clone(&memory),
            features,
            tx: ring(GUEST_ADDR),
            rx: ring(GUEST_ADDR + 0x8000),
        };
        let half = |(layout, base): (Layout, u32), pool| {
            let pool = IndirectPool::new(&memory, pool, layout.size, 4);
            DriverQueue::new(&memory, &layout, features, base, pool).expect("a legal layout")
        };
        let rx_pieces = random.within(1..3);
        let rx_count = u64::from(link.rx.0.size) / rx_pieces;
        let slots = |at: u64, n: u64| (0..n).map(|i| at + i * ROOM as u64).collect();
        let guest = Self {
            kind,
            tag: random.bits(),
            index,
            all: Area::new(&memory, GUEST_ADDR, MEMORY as usize).expect("all of memory"),
            tx: half(link.tx, POOLS),
            rx: half(link.rx, POOLS + 0x4000),
            memory,
            tx_free: slots(TX_SLOTS, u64::from(link.tx.0.size)),
            tx_flight: BTreeMap::new(),
            rx_idle: slots(RX_SLOTS, rx_count),
            rx_flight: BTreeMap::new(),
            rx_pieces,
            outbox: VecDeque::new(),
            numbers: BTreeMap::new(),
            sent: 0,
            inbox: Vec::new(),
            received: 0,
            lazy: random.one_in(3),
            healed: false,
            arming: false,
            confused: false,
        };
        (guest, link)
    }

    /// How long a step takes, in ns.
    pub fn delay(&self, random: &mut Random) -> u64 {
        let factor = if self.kind == Kind::Slow && !self.healed { 100 } else { 1 };
        random.within(100..3000) * factor
    }

    /// Something woke it.
    pub fn wake(&mut self) {
        self.arming = false;
    }

    /// One step. Kicks go into `kicks`.
    pub fn step(&mut self, random: &mut Random, kicks: &mut Vec<Ring>) -> Next {
        if self.kind == Kind::Hostile {
            if self.healed {
                return Next::Sleep;
            }
            self.misbehave(random, kicks);
            if self.confused {
                return Next::Again;
            }
        }
        if self.arming {
            self.arming = false;
            if self.arm() == Armed::Armed && self.kind != Kind::Hostile {
                return Next::Sleep;
            }
            if random.one_in(2) {
                self.rx.disarm();
                self.tx.disarm();
            }
            return Next::Again;
        }
        let busy = self.collect(random) | self.refill(kicks) | self.send(random, kicks);
        self.arming = !busy;
        Next::Again
    }

    fn arm(&mut self) -> Armed {
        let rx = self.rx.arm();
        let waits = !self.lazy || self.healed || !self.outbox.is_empty();
        if waits && self.tx.arm() == Armed::WorkPending { Armed::WorkPending } else { rx }
    }

    /// Takes used buffers of both rings back.
    fn collect(&mut self, random: &mut Random) -> bool {
        let mut used = Vec::new();
        if self.tx.take_used(64, &mut used).is_err() {
            return self.confuse("tx");
        }
        let mut busy = !used.is_empty();
        for u in used.drain(..) {
            self.tx_free.extend(self.tx_flight.remove(&u.id));
        }
        let budget = random.within(1..9) as usize;
        if self.rx.take_used(budget, &mut used).is_err() {
            return self.confuse("rx");
        }
        busy |= !used.is_empty();
        for u in used {
            let Some(slot) = self.rx_flight.remove(&u.id) else {
                continue;
            };
            let mut bytes = vec![0; u.len as usize];
            let seg = self.memory.seg(slot, u.len, &mut 0).expect("checked by the driver half");
            seg.read(&mut bytes);
            self.inbox.push(bytes);
            self.received += 1;
            self.rx_idle.push(slot);
        }
        busy
    }

    fn confuse(&mut self, ring: &str) -> bool {
        assert!(self.kind == Kind::Hostile, "the back-end broke ring {ring} of {}", self.index);
        self.confused = true;
        false
    }

    /// Gives receive buffers out.
    fn refill(&mut self, kicks: &mut Vec<Ring>) -> bool {
        let before = self.rx_idle.len();
        while let Some(slot) = self.rx_idle.last().copied() {
            let len = ROOM / self.rx_pieces as usize;
            let pieces: Vec<Buf> =
                (0..self.rx_pieces).map(|i| buf(slot + i * len as u64, len, true)).collect();
            let Some(id) = self.rx.add(&pieces) else {
                break;
            };
            self.rx_flight.insert(id, slot);
            self.rx_idle.pop();
        }
        if self.rx_idle.len() == before {
            return false;
        }
        self.rx.publish();
        if self.rx.kick_needed() {
            kicks.push(Ring::Rx);
        }
        true
    }

    /// Sends what the application wants sent, as far as there is room.
    fn send(&mut self, random: &mut Random, kicks: &mut Vec<Ring>) -> bool {
        let mut busy = false;
        while let (Some(&to), Some(&slot)) = (self.outbox.front(), self.tx_free.last()) {
            let number = self.numbers.get(&to).copied().unwrap_or(0);
            let payload = random.within(30..1480) as usize;
            let frame = Frame { to, from: self.index, tag: self.tag, number, payload };
            let bytes = frame.bytes();
            let cuts: &[usize] = match random.within(0..3) {
                0 => &[],
                1 => &[HDR_LEN],
                _ => &[HDR_LEN, HDR_LEN + 17],
            };
            let ends = cuts.iter().copied().chain([bytes.len()]);
            let starts = [0].into_iter().chain(cuts.iter().copied());
            let pieces: Vec<Buf> =
                starts.zip(ends).map(|(a, b)| buf(slot + a as u64, b - a, false)).collect();
            let Some(id) = self.tx.add(&pieces) else {
                break;
            };
            let mut seg = self.memory.seg_mut(slot, ROOM as u32, &mut 0).expect("our slot");
            seg.write(&bytes);
            self.tx_free.pop();
            self.tx_flight.insert(id, slot);
            self.outbox.pop_front();
            self.numbers.insert(to, number + 1);
            self.sent += 1;
            busy = true;
        }
        if busy {
            self.tx.publish();
            if self.tx.kick_needed() {
                kicks.push(Ring::Tx);
            }
        }
        busy
    }

    /// Writes into the rings what should not be there, now and then.
    fn misbehave(&mut self, random: &mut Random, kicks: &mut Vec<Ring>) {
        if random.one_in(4) {
            let at = random.within(0..RINGS_LEN / 8) as usize * 8;
            // Mostly near the start of a part, where small rings live.
            let at = if random.one_in(8) { at } else { at & !0x1fff | at & 0xf8 };
            match random.within(0..4) {
                0 => self.all.store_u64(at, random.bits()),
                1 => self.all.store_u16(at + 6, random.bits() as u16),
                2 => self.all.store_u16(at + 2, random.within(0..200) as u16),
                _ => self.all.store_u32(at, random.within(0..0x2_0000) as u32),
            }
        }
        if random.one_in(4) {
            kicks.push(if random.one_in(2) { Ring::Rx } else { Ring::Tx });
        }
    }

    /// What an honest guest still waits for; `None` when it has everything back.
    pub fn unfinished(&self) -> Option<String> {
        let mut left = Vec::new();
        if !self.outbox.is_empty() {
            left.push(format!("{} frames not sent", self.outbox.len()));
        }
        if !self.tx_flight.is_empty() {
            left.push(format!("{} transmit buffers not back", self.tx_flight.len()));
        }
        if self.tx.has_used() {
            left.push("used transmit buffers not collected".to_owned());
        }
        if self.rx.has_used() {
            left.push("received frames not collected".to_owned());
        }
        if self.tx.free() != self.tx.size() {
            left.push(format!("{} of {} descriptors free", self.tx.free(), self.tx.size()));
        }
        (!left.is_empty()).then(|| left.join(", "))
    }
}
