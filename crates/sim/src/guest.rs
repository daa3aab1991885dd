//! Guests: a driver half on each of their rings, and an application that sends.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ring::virtq::{Armed, Buf, DriverQueue, Features, IndirectPool, Layout};
use shm::{Area, GuestMemory, Mapping, Region};
use switch::frame::FRAME_LEN_MAX;
use switch::vnet::Offloads;
use vhost_user::port::Format;

use crate::finding::Finding;
use crate::frame::{FIXED_LEN, Frame, To};
use crate::random::Random;

mod hostile;

/// One of the two rings of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ring {
    /// What the guest sends.
    Tx,
    /// What it receives.
    Rx,
}

/// What the switch learns of a guest when it connects.
pub(crate) struct Link {
    pub memory: Arc<GuestMemory>,
    pub features: Features,
    pub format: Format,
    /// Of each queue pair: layout and start of the transmit ring, then of the receive ring.
    pub pairs: Vec<[(Layout, u32); 2]>,
}

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Quick, and by the book.
    Honest,
    /// By the book, but many times slower, until healed.
    Slow,
    /// By the book, but takes no frames from some moment on, until healed.
    Deaf,
    /// Writes whatever it likes into its rings, until healed.
    Hostile,
}

/// What a guest does after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Again,
    Sleep,
}

/// A kick: which pair, which of its rings.
pub(crate) type Kick = (usize, Ring);

/// Most queue pairs of a guest.
pub(crate) const PAIRS_MAX: u64 = 3;
const SIZE_MAX: u64 = 256;
/// What a buffer occupies, and what no frame with its header exceeds.
const ROOM: u64 = 4096;
const GUEST_ADDR: u64 = 0x1_0000;
const RING_LEN: u64 = 0x3000;
const POOL_LEN: u64 = SIZE_MAX * 4 * 16;
const SLOTS_LEN: u64 = SIZE_MAX * ROOM;
const POOLS: u64 = GUEST_ADDR + 2 * PAIRS_MAX * RING_LEN;
const SLOTS: u64 = POOLS + 2 * PAIRS_MAX * POOL_LEN;
const MEMORY: u64 = SLOTS - GUEST_ADDR + 2 * PAIRS_MAX * SLOTS_LEN;

/// One queue pair as its guest sees it.
pub(crate) struct Pair {
    tx: DriverQueue,
    rx: DriverQueue,
    layouts: [(Layout, u32); 2],
    /// Free transmit slots, by address.
    tx_free: Vec<u64>,
    tx_flight: BTreeMap<u16, u64>,
    rx_idle: Vec<u64>,
    rx_flight: BTreeMap<u16, u64>,
    /// A frame of which some buffers are still to come, and how many.
    partial: Option<(Vec<u8>, u16)>,
    /// Published, and not yet looked whether a kick is wanted: transmit and receive ring.
    pub kick_due: [bool; 2],
    /// What the application wants sent, oldest first.
    outbox: VecDeque<(To, u16)>,
    /// Frames sent since the world last looked.
    pub log: Vec<Frame>,
    pub sent: u64,
    pub sent_bytes: u64,
    /// Transmit buffers that came back.
    pub returned: u64,
    /// What arrived since the world last looked, in order.
    pub inbox: Vec<Vec<u8>>,
    pub received: u64,
    pub received_bytes: u64,
    /// Receive buffers made available, ever.
    pub posted: u64,
}

pub(crate) struct Guest {
    pub kind: Kind,
    /// Its secret, in each of its frames.
    pub tag: u64,
    pub pairs: Vec<Pair>,
    pub format: Format,
    pub healed: bool,
    /// Does not ask to be called when transmit buffers come back, unless it is out of them.
    pub lazy: bool,
    index: usize,
    features: Features,
    memory: Arc<GuestMemory>,
    /// Its rings and tables, for hostile hands.
    all: Area,
    number: u64,
    /// Each receive buffer is made of so many pieces.
    rx_pieces: u64,
    /// Bytes of a receive buffer.
    pub rx_len: u64,
    /// Receive buffers are given out when so many are idle, so many in one step.
    rx_batch: usize,
    rx_drip: usize,
    /// (Slow) how many times slower it is.
    slowness: u64,
    /// Most payload of its frames, but for few.
    payload_max: u64,
    /// (Deaf) frames it takes before it stops.
    hears: u64,
    arming: bool,
    /// (Hostile) its own driver half has lost track.
    confused: bool,
}

fn buf(addr: u64, len: u64, write: bool) -> Buf {
    Buf { addr, len: len as u32, write }
}

fn layout(at: u64, packed: bool, random: &mut Random) -> (Layout, u32) {
    // Small rings mostly: they fill up and wrap often.
    let max = if random.one_in(8) { SIZE_MAX } else { 64 };
    let size = (1 + random.within(0..max) * random.within(1..65) / 64) as u16;
    let size = if packed { size } else { size.next_power_of_two() };
    let start = random.within(0..8) as u16;
    let base = if packed {
        let wrap = if random.one_in(4) { 0 } else { 0x8000 };
        let half = u32::from(size - 1 - start % size) | wrap;
        half | half << 16
    } else {
        // Some starts below the wrap, some above.
        u32::from(start.wrapping_sub(5))
    };
    (Layout { size, desc: at, driver: at + 0x1000, device: at + 0x1800 }, base)
}

/// All of a guest's memory; mostly in two regions, whose border some buffer lies across.
fn memory(random: &mut Random) -> Arc<GuestMemory> {
    let mapping = Arc::new(Mapping::memfd("sim", MEMORY).expect("memory for a guest"));
    let region = |offset: u64, len: u64| {
        let (guest_addr, mapping) = (GUEST_ADDR + offset, Arc::clone(&mapping));
        Region { guest_addr, user_addr: guest_addr, len, offset, mapping }
    };
    let slots = SLOTS - GUEST_ADDR;
    let ring = random.within(0..2 * PAIRS_MAX) * SLOTS_LEN;
    let border = slots + ring + random.within(0..8) * ROOM + random.within(1..100) * 8;
    let regions = if random.one_in(3) {
        vec![region(0, MEMORY)]
    } else {
        vec![region(0, border), region(border, MEMORY - border)]
    };
    Arc::new(GuestMemory::new(regions).expect("regions side by side"))
}

fn format(random: &mut Random) -> Format {
    let mergeable = random.one_in(2);
    Format {
        hdr_len: if mergeable || !random.one_in(4) { 12 } else { 10 },
        mergeable,
        sends: Offloads::default(),
        takes: Offloads::default(),
        frame_len_max: if random.one_in(4) { 1518 } else { FRAME_LEN_MAX },
    }
}

impl Guest {
    /// `short`: of room for what it receives.
    pub fn new(index: usize, kind: Kind, short: bool, random: &mut Random) -> (Self, Link) {
        let memory = memory(random);
        let features = Features {
            packed: random.one_in(2),
            event_idx: random.one_in(2),
            indirect: random.one_in(2),
            in_order: random.one_in(4),
        };
        let mut format = format(random);
        if short {
            (format.mergeable, format.hdr_len) = (true, 12);
        }
        let rx_pieces = if short { 1 } else { random.within(1..4) };
        let count = random.within(1..PAIRS_MAX + 1);
        let pairs: Vec<[(Layout, u32); 2]> = (0..count)
            .map(|i| {
                [2 * i, 2 * i + 1]
                    .map(|ring| layout(GUEST_ADDR + ring * RING_LEN, features.packed, random))
            })
            .collect();
        let least = pairs.iter().map(|[_, rx]| u64::from(rx.0.size)).min().expect("one at least");
        let rx_pieces = rx_pieces.min(least);
        let chains = least / rx_pieces;
        let rx_len = if format.mergeable {
            // All buffers together take any frame, or, but for descriptors that are left over, the
            // switch sees that they never will; else it would wait for ever.
            let most = [2048, 400][random.index(2)];
            let all = if rx_pieces == 1 && random.one_in(2) { 0 } else { ROOM.div_ceil(chains) };
            random
                .within(100..if short { 200 } else { most })
                .max(all)
                .next_multiple_of(rx_pieces)
                .min(ROOM)
        } else {
            [1600, ROOM, ROOM, 300][random.index(4)]
        };
        let link = Link { memory: Arc::clone(&memory), features, format, pairs: pairs.clone() };
        let pair = |(i, layouts)| Pair::new(i, layouts, &memory, features, rx_pieces);
        let pairs = (0_u64..).zip(pairs).map(pair).collect();
        let all = Area::new(&memory, GUEST_ADDR, (SLOTS - GUEST_ADDR) as usize);
        let guest = Self {
            kind,
            tag: random.bits(),
            pairs,
            format,
            healed: false,
            lazy: random.one_in(3),
            index,
            features,
            memory,
            all: all.expect("rings and tables lie in the first region"),
            number: 0,
            rx_pieces,
            rx_len,
            rx_batch: random.within(1..9) as usize,
            rx_drip: match random.within(0..4) {
                0 | 1 if !short => usize::MAX,
                n => n as usize % 2 + 1,
            },
            slowness: [10, 30, 100][random.index(3)],
            payload_max: [50, 300, 1430, 1430][random.index(4)],
            hears: random.within(0..100),
            arming: false,
            confused: false,
        };
        (guest, link)
    }

    pub fn is_honest(&self) -> bool {
        self.kind != Kind::Hostile
    }

    /// How long a step takes, in ns.
    pub fn delay(&self, random: &mut Random) -> u64 {
        let factor = if self.kind == Kind::Slow && !self.healed { self.slowness } else { 1 };
        random.within(100..3000) * factor
    }

    /// The application wants `frames` frames sent.
    pub fn want(&mut self, to: To, flow: u16, frames: u64) {
        // A flow stays on one queue, as in any driver.
        let pairs = self.pairs.len();
        let pair = &mut self.pairs[usize::from(flow) % pairs];
        pair.outbox.extend((0..frames).map(|_| (to, flow)));
    }

    /// Something woke it.
    pub fn wake(&mut self) {
        self.arming = false;
    }

    /// One step. Kicks go into `kicks`.
    ///
    /// # Errors
    /// [`Finding`]: the switch broke a ring, or a header.
    pub fn step(&mut self, random: &mut Random, kicks: &mut Vec<Kick>) -> Result<Next, Finding> {
        if !self.is_honest() {
            if self.healed {
                return Ok(Next::Sleep);
            }
            self.misbehave(random, kicks);
            if self.confused {
                return Ok(Next::Again);
            }
        }
        // Between publishing and looking whether a kick is wanted much may happen.
        if self.kick_one(kicks) {
            return Ok(Next::Again);
        }
        if self.arming {
            self.arming = false;
            if self.arm() == Armed::Armed && self.is_honest() {
                return Ok(Next::Sleep);
            }
            if random.one_in(2) {
                for pair in &mut self.pairs {
                    pair.rx.disarm();
                    pair.tx.disarm();
                }
            }
            return Ok(Next::Again);
        }
        let mut busy = false;
        for q in 0..self.pairs.len() {
            busy |= self.collect_tx(q)?;
            if !self.is_deaf() {
                busy |= self.collect_rx(q, random)?;
                busy |= self.refill(q);
            }
            busy |= self.send(q, random);
        }
        if random.one_in(2) {
            while self.kick_one(kicks) {}
        }
        self.arming = !busy;
        Ok(Next::Again)
    }

    fn is_deaf(&self) -> bool {
        let received: u64 = self.pairs.iter().map(|p| p.received).sum();
        self.kind == Kind::Deaf && !self.healed && received >= self.hears
    }

    /// Kicks for one ring that it published something on, if that is wanted; false: for none.
    fn kick_one(&mut self, kicks: &mut Vec<Kick>) -> bool {
        for (q, pair) in self.pairs.iter_mut().enumerate() {
            let rings = [(Ring::Tx, &mut pair.tx), (Ring::Rx, &mut pair.rx)];
            for ((ring, queue), due) in rings.into_iter().zip(&mut pair.kick_due) {
                if std::mem::take(due) {
                    if queue.kick_needed() {
                        kicks.push((q, ring));
                    }
                    return true;
                }
            }
        }
        false
    }

    fn arm(&mut self) -> Armed {
        let deaf = self.is_deaf();
        let mut all = Armed::Armed;
        for pair in &mut self.pairs {
            let waits = !self.lazy || self.healed || !pair.outbox.is_empty();
            let pending = !deaf && pair.rx.arm() == Armed::WorkPending
                || waits && pair.tx.arm() == Armed::WorkPending;
            if pending {
                all = Armed::WorkPending;
            }
        }
        all
    }

    /// Its driver half says that the switch broke a ring.
    fn broken(&mut self, q: usize, ring: Ring) -> Result<bool, Finding> {
        if self.is_honest() {
            let what = format!("ring {ring:?} {q} of guest {} is broken", self.index);
            return Err(Finding::Corrupt(what));
        }
        self.confused = true;
        Ok(false)
    }

    /// Takes transmit buffers back.
    fn collect_tx(&mut self, q: usize) -> Result<bool, Finding> {
        let (pair, mut used) = (&mut self.pairs[q], Vec::new());
        if pair.tx.take_used(64, &mut used).is_err() {
            return self.broken(q, Ring::Tx);
        }
        for u in &used {
            pair.tx_free.extend(pair.tx_flight.remove(&u.id));
        }
        pair.returned += used.len() as u64;
        Ok(!used.is_empty())
    }

    /// Takes received frames.
    fn collect_rx(&mut self, q: usize, random: &mut Random) -> Result<bool, Finding> {
        let budget = random.within(1..9) as usize;
        let (pair, mut used) = (&mut self.pairs[q], Vec::new());
        if pair.rx.take_used(budget, &mut used).is_err() {
            return self.broken(q, Ring::Rx);
        }
        let busy = !used.is_empty();
        for u in used {
            let Some(slot) = self.pairs[q].rx_flight.remove(&u.id) else { continue };
            let bytes = read(&self.memory, slot, u.len);
            self.pairs[q].rx_idle.push(slot);
            let taken = self.assemble(q, &bytes);
            if let Err(what) = taken
                && self.is_honest()
            {
                let what = format!("guest {} got {what}", self.index);
                return Err(Finding::Corrupt(what));
            }
        }
        Ok(busy)
    }

    /// One received buffer: a frame, or a part of one.
    fn assemble(&mut self, q: usize, bytes: &[u8]) -> Result<(), String> {
        let (format, rx_len, pair) = (&self.format, self.rx_len, &mut self.pairs[q]);
        let hdr_len = format.hdr_len as usize;
        let (frame, left) = match pair.partial.take() {
            Some((mut frame, left)) => {
                frame.extend(bytes);
                (frame, left - 1)
            }
            None => {
                let hdr = bytes.get(..hdr_len).ok_or("a frame without header")?;
                if hdr[..10] != [0; 10] {
                    return Err(format!("offloads it did not negotiate: {hdr:?}"));
                }
                let count = hdr.get(10..).filter(|n| !n.is_empty());
                let count = count.map_or(1, |n| u16::from_le_bytes([n[0], n[1]]));
                if count == 0 || count > 1 && !format.mergeable {
                    return Err(format!("a frame in {count} buffers"));
                }
                (bytes[hdr_len..].to_vec(), count - 1)
            }
        };
        if left > 0 {
            if bytes.len() as u64 != rx_len {
                return Err(format!("{} of {rx_len} bytes, and more elsewhere", bytes.len()));
            }
            pair.partial = Some((frame, left));
            return Ok(());
        }
        pair.received += 1;
        pair.received_bytes += frame.len() as u64;
        pair.inbox.push(frame);
        Ok(())
    }

    /// Gives receive buffers out.
    fn refill(&mut self, q: usize) -> bool {
        let (rx_len, pieces, pair) = (self.rx_len, self.rx_pieces, &mut self.pairs[q]);
        // In batches, but never with less at hand than the longest frame needs.
        let enough = pair.rx_flight.len() as u64 * rx_len >= ROOM;
        if pair.rx_idle.len() < self.rx_batch && enough {
            return false;
        }
        let before = pair.rx_idle.len();
        for _ in 0..self.rx_drip {
            let Some(slot) = pair.rx_idle.last().copied() else { break };
            let len = rx_len / pieces;
            let ends = (1..=pieces).map(|i| if i == pieces { rx_len } else { i * len });
            let bufs: Vec<Buf> = (0..pieces)
                .zip(ends)
                .map(|(i, end)| buf(slot + i * len, end - i * len, true))
                .collect();
            let Some(id) = pair.rx.add(&bufs) else { break };
            pair.rx_flight.insert(id, slot);
            pair.rx_idle.pop();
            pair.posted += 1;
        }
        if pair.rx_idle.len() == before {
            return false;
        }
        pair.rx.publish();
        pair.kick_due[1] = true;
        true
    }

    /// Sends what the application wants sent, as far as there is room.
    fn send(&mut self, q: usize, random: &mut Random) -> bool {
        let hdr_len = self.format.hdr_len as usize;
        let pair = &mut self.pairs[q];
        let mut busy = false;
        while let (Some(&(to, flow)), Some(&slot)) = (pair.outbox.front(), pair.tx_free.last()) {
            let room = ROOM as usize - hdr_len - FIXED_LEN;
            let max = if random.one_in(8) { room as u64 } else { self.payload_max };
            let payload = random.within(0..max) as usize;
            let (from, tag, number) = (self.index, self.tag, self.number);
            let frame = Frame { to, from, flow, tag, number, payload };
            let mut bytes = vec![0; hdr_len];
            bytes.extend(frame.bytes());
            let h = hdr_len as u64;
            let cuts: &[u64] = match random.within(0..5) {
                0 | 1 => &[],
                2 => &[h],
                3 => &[h - 3, h + 17],
                _ => &[4, h, h + 30],
            };
            let cuts = &cuts[..cuts.len().min(usize::from(pair.tx.size()) - 1)];
            let ends = cuts.iter().copied().chain([bytes.len() as u64]);
            let starts = [0].into_iter().chain(cuts.iter().copied());
            let pieces: Vec<Buf> =
                starts.zip(ends).map(|(a, b)| buf(slot + a, b - a, false)).collect();
            let Some(id) = pair.tx.add(&pieces) else { break };
            write(&self.memory, slot, &bytes);
            pair.tx_free.pop();
            pair.tx_flight.insert(id, slot);
            pair.outbox.pop_front();
            pair.log.push(frame);
            self.number += 1;
            pair.sent += 1;
            pair.sent_bytes += (bytes.len() - hdr_len) as u64;
            busy = true;
        }
        if busy {
            pair.tx.publish();
            pair.kick_due[0] = true;
        }
        busy
    }

    /// Whether received frames wait that it has not looked at, and that it asked to be told of.
    pub fn waits_for_call(&self, q: usize) -> bool {
        !self.is_deaf() && self.pairs[q].rx.has_used()
    }

    /// What it still waits for; `None` when it has everything back.
    pub fn unfinished(&self) -> Option<String> {
        let mut left = Vec::new();
        for (q, pair) in self.pairs.iter().enumerate() {
            let mut note = |some: bool, what: String| {
                if some {
                    left.push(format!("{what} on queue {q}"));
                }
            };
            let (outbox, flight) = (pair.outbox.len(), pair.tx_flight.len());
            note(outbox > 0, format!("{outbox} frames not sent"));
            note(flight > 0, format!("{flight} transmit buffers not back"));
            note(pair.tx.has_used(), "used transmit buffers not collected".into());
            note(pair.rx.has_used(), "received frames not collected".into());
            note(pair.partial.is_some(), "half a frame".into());
            let (free, size) = (pair.tx.free(), pair.tx.size());
            note(free != size, format!("{free} of {size} descriptors free"));
        }
        (!left.is_empty()).then(|| left.join(", "))
    }

    /// How many receive buffers of pair `q` certainly wait in the ring; `None` when there are used
    /// ones it has not looked at.
    pub fn waiting(&self, q: usize) -> Option<u64> {
        let pair = &self.pairs[q];
        (!pair.rx.has_used()).then_some(pair.rx_flight.len() as u64)
    }
}

impl Pair {
    fn new(
        i: u64,
        layouts: [(Layout, u32); 2],
        memory: &Arc<GuestMemory>,
        features: Features,
        rx_pieces: u64,
    ) -> Self {
        let half = |(layout, base): (Layout, u32), ring: u64| {
            let pool = IndirectPool::new(memory, POOLS + ring * POOL_LEN, layout.size, 4);
            DriverQueue::new(memory, &layout, features, base, pool).expect("a legal layout")
        };
        let slots =
            |ring: u64, n: u64| (0..n).map(|i| SLOTS + ring * SLOTS_LEN + i * ROOM).collect();
        let [tx, rx] = layouts;
        Self {
            tx: half(tx, 2 * i),
            rx: half(rx, 2 * i + 1),
            layouts,
            tx_free: slots(2 * i, u64::from(tx.0.size)),
            tx_flight: BTreeMap::new(),
            rx_idle: slots(2 * i + 1, u64::from(rx.0.size) / rx_pieces),
            rx_flight: BTreeMap::new(),
            partial: None,
            kick_due: [false; 2],
            outbox: VecDeque::new(),
            log: Vec::new(),
            sent: 0,
            sent_bytes: 0,
            returned: 0,
            inbox: Vec::new(),
            received: 0,
            received_bytes: 0,
            posted: 0,
        }
    }
}

/// Writes `bytes` at a guest address, across regions.
fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    let n = memory.span(addr, bytes.len() as u32).expect("a slot");
    let (now, rest) = bytes.split_at(n as usize);
    memory.seg_mut(addr, n, &mut 0).expect("a slot").write(now);
    if !rest.is_empty() {
        write(memory, addr + u64::from(n), rest);
    }
}

/// Reads `len` bytes from a guest address, across regions.
fn read(memory: &GuestMemory, addr: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < len as usize {
        let (at, done) = (addr + bytes.len() as u64, bytes.len());
        let n = memory.span(at, len - done as u32).expect("a slot");
        bytes.resize(done + n as usize, 0);
        memory.seg(at, n, &mut 0).expect("a slot").read(&mut bytes[done..]);
    }
    bytes
}
