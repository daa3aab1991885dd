//! A guest on virtqueues.

use std::collections::BTreeMap;
use std::sync::Arc;

use ring::virtq::{Armed, Buf, DriverQueue, Features, IndirectPool, Layout};
use shm::{Area, GuestMemory, Mapping, Region};
use switch::frame::FRAME_LEN_MAX;
use switch::vnet::Offloads;
use vhost_user::port::Format;

use super::{App, Broken, Driver, HDR_MAX, Kick, PAIRS_MAX, ROOM, Ring};
use crate::random::Random;

mod hostile;

/// The switch's view of such a guest.
pub(crate) struct Link {
    pub memory: Arc<GuestMemory>,
    pub features: Features,
    pub format: Format,
    /// For each queue pair, layout and start index of the transmit ring and of the receive ring.
    pub pairs: Vec<[(Layout, u32); 2]>,
}

const SIZE_MAX: u64 = 256;
const GUEST_ADDR: u64 = 0x1_0000;
const RING_LEN: u64 = 0x3000;
const POOL_LEN: u64 = SIZE_MAX * 4 * 16;
const SLOTS_LEN: u64 = SIZE_MAX * ROOM;
const POOLS: u64 = GUEST_ADDR + 2 * PAIRS_MAX * RING_LEN;
const SLOTS: u64 = POOLS + 2 * PAIRS_MAX * POOL_LEN;
const MEMORY: u64 = SLOTS - GUEST_ADDR + 2 * PAIRS_MAX * SLOTS_LEN;

/// The guest's side of a queue pair.
struct Pair {
    tx: DriverQueue,
    rx: DriverQueue,
    layouts: [(Layout, u32); 2],
    /// Free transmit slots, by address.
    tx_free: Vec<u64>,
    tx_flight: BTreeMap<u16, u64>,
    rx_idle: Vec<u64>,
    rx_flight: BTreeMap<u16, u64>,
    /// An incomplete frame, and the number of its missing buffers.
    partial: Option<(Vec<u8>, u16)>,
}

/// The guest's side of all queue pairs.
pub(crate) struct Virtio {
    index: usize,
    pairs: Vec<Pair>,
    format: Format,
    features: Features,
    memory: Arc<GuestMemory>,
    /// All rings and indirect tables, for violations.
    rings: Area,
    /// (Hostile) commits no violation for which its port is stopped.
    careful: bool,
    /// Descriptors of each receive buffer.
    rx_pieces: u64,
    /// Bytes of a receive buffer.
    rx_len: u64,
    /// Number of idle receive buffers from which they are posted, and most posted in one step.
    rx_batch: usize,
    rx_refill_max: usize,
}

fn buf(addr: u64, len: u64, write: bool) -> Buf {
    Buf { addr, len: len as u32, write }
}

fn layout(at: u64, packed: bool, random: &mut Random) -> (Layout, u32) {
    // Mostly small rings, which fill up and wrap often.
    let max = if random.one_in(8) { SIZE_MAX } else { 64 };
    let size = (1 + random.within(0..max) * random.within(1..65) / 64) as u16;
    let size = if packed { size } else { size.next_power_of_two() };
    let start = random.within(0..8) as u16;
    let base = if packed {
        let wrap = if random.one_in(4) { 0 } else { 0x8000 };
        let half = u32::from(size - 1 - start % size) | wrap;
        half | half << 16
    } else {
        // Starts before and after the wrap.
        u32::from(start.wrapping_sub(5))
    };
    (Layout { size, desc: at, driver: at + 0x1000, device: at + 0x1800 }, base)
}

/// Creates a guest's memory: mostly two regions, whose border may lie within a buffer.
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
    Arc::new(GuestMemory::new(regions).expect("adjacent regions"))
}

fn format(random: &mut Random) -> Format {
    let mergeable = random.one_in(2);
    Format {
        hdr_len: if mergeable || !random.one_in(4) { HDR_MAX as u32 } else { 10 },
        mergeable,
        sends: Offloads::default(),
        takes: Offloads::default(),
        frame_len_max: if random.one_in(4) { 1518 } else { FRAME_LEN_MAX },
    }
}

/// Length of each receive buffer, which consists of `pieces`; there are `chains` of them.
fn rx_len(
    format: &Format,
    few_buffers: bool,
    pieces: u64,
    chains: u64,
    random: &mut Random,
) -> u64 {
    if format.mergeable {
        // All buffers together hold any frame, or every descriptor is in a buffer, so that the
        // switch sees that they never will. Otherwise it would wait indefinitely for room.
        let most = [2048, 400][random.index(2)];
        let all = if pieces == 1 && random.one_in(2) { 0 } else { ROOM.div_ceil(chains) };
        random
            .within(100..if few_buffers { 200 } else { most })
            .max(all)
            .next_multiple_of(pieces)
            .min(ROOM)
    } else {
        [1600, ROOM, ROOM, 300][random.index(4)]
    }
}

/// Creates guest `index`; `few_buffers`: with little room to receive.
pub(crate) fn new(
    index: usize,
    careful: bool,
    few_buffers: bool,
    random: &mut Random,
) -> (Virtio, Link) {
    let memory = memory(random);
    let features = Features {
        packed: random.one_in(2),
        event_idx: random.one_in(2),
        indirect: random.one_in(2),
        in_order: random.one_in(4),
    };
    let mut format = format(random);
    if few_buffers {
        (format.mergeable, format.hdr_len) = (true, 12);
    }
    let rx_pieces = if few_buffers { 1 } else { random.within(1..4) };
    let count = random.within(1..PAIRS_MAX + 1);
    let pairs: Vec<[(Layout, u32); 2]> = (0..count)
        .map(|i| {
            [2 * i, 2 * i + 1]
                .map(|ring| layout(GUEST_ADDR + ring * RING_LEN, features.packed, random))
        })
        .collect();
    let least = pairs.iter().map(|[_, rx]| u64::from(rx.0.size)).min().expect("one at least");
    let rx_pieces = rx_pieces.min(least);
    let rx_len = rx_len(&format, few_buffers, rx_pieces, least / rx_pieces, random);
    let link = Link { memory: Arc::clone(&memory), features, format, pairs: pairs.clone() };
    let pair = |(i, layouts)| Pair::new(i, layouts, &memory, features, rx_pieces);
    let pairs = (0_u64..).zip(pairs).map(pair).collect();
    let rings = Area::new(&memory, GUEST_ADDR, (SLOTS - GUEST_ADDR) as usize);
    let guest = Virtio {
        index,
        pairs,
        format,
        features,
        memory,
        rings: rings.expect("rings and tables lie in the first region"),
        careful,
        rx_pieces,
        rx_len,
        rx_batch: random.within(1..9) as usize,
        rx_refill_max: match random.within(0..4) {
            0 | 1 if !few_buffers => usize::MAX,
            n => n as usize % 2 + 1,
        },
    };
    (guest, link)
}

impl Virtio {
    /// Adds a received buffer: a frame, or a part of one. Returns the frame that it completes.
    fn assemble(&mut self, q: usize, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
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
                    return Err(format!("offloads that were not negotiated: {hdr:?}"));
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
                return Err(format!("{} of {rx_len} bytes before the last buffer", bytes.len()));
            }
            pair.partial = Some((frame, left));
            return Ok(None);
        }
        Ok(Some(frame))
    }
}

impl Driver for Virtio {
    fn kick_needed(&mut self, q: usize, ring: Ring) -> bool {
        match ring {
            Ring::Tx => self.pairs[q].tx.kick_needed(),
            Ring::Rx => self.pairs[q].rx.kick_needed(),
        }
    }

    fn arm(&mut self, q: usize, ring: Ring) -> Armed {
        match ring {
            Ring::Tx => self.pairs[q].tx.arm(),
            Ring::Rx => self.pairs[q].rx.arm(),
        }
    }

    fn disarm(&mut self, q: usize) {
        self.pairs[q].rx.disarm();
        self.pairs[q].tx.disarm();
    }

    fn collect_tx(&mut self, q: usize) -> Result<(u64, bool), Broken> {
        let (pair, mut used) = (&mut self.pairs[q], Vec::new());
        if pair.tx.take_used(64, &mut used).is_err() {
            return Err(Broken::Ring(Ring::Tx));
        }
        for u in &used {
            pair.tx_free.extend(pair.tx_flight.remove(&u.id));
        }
        Ok((used.len() as u64, !used.is_empty()))
    }

    fn collect_rx(
        &mut self,
        q: usize,
        budget: usize,
        inbox: &mut Vec<Vec<u8>>,
    ) -> Result<bool, Broken> {
        let (pair, mut used) = (&mut self.pairs[q], Vec::new());
        if pair.rx.take_used(budget, &mut used).is_err() {
            return Err(Broken::Ring(Ring::Rx));
        }
        let mut bad = None;
        for u in &used {
            let Some(slot) = self.pairs[q].rx_flight.remove(&u.id) else { continue };
            let bytes = read(&self.memory, slot, u.len);
            self.pairs[q].rx_idle.push(slot);
            match self.assemble(q, &bytes) {
                Ok(frame) => inbox.extend(frame),
                Err(what) => bad = Some(Broken::Frame(what)),
            }
        }
        bad.map_or(Ok(!used.is_empty()), Err)
    }

    fn refill(&mut self, q: usize) -> bool {
        let (rx_len, pieces, pair) = (self.rx_len, self.rx_pieces, &mut self.pairs[q]);
        // In batches, unless the longest frame would not fit into the buffers posted.
        let enough = pair.rx_flight.len() as u64 * rx_len >= ROOM;
        if pair.rx_idle.len() < self.rx_batch && enough {
            return false;
        }
        let before = pair.rx_idle.len();
        for _ in 0..self.rx_refill_max {
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
        }
        if pair.rx_idle.len() == before {
            return false;
        }
        pair.rx.publish();
        true
    }

    fn send(&mut self, q: usize, frame: &[u8], random: &mut Random) -> bool {
        let hdr_len = self.format.hdr_len as usize;
        let pair = &mut self.pairs[q];
        let Some(&slot) = pair.tx_free.last() else { return false };
        let mut bytes = vec![0; hdr_len];
        bytes.extend(frame);
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
        let pieces: Vec<Buf> = starts.zip(ends).map(|(a, b)| buf(slot + a, b - a, false)).collect();
        let Some(id) = pair.tx.add(&pieces) else { return false };
        write(&self.memory, slot, &bytes);
        pair.tx_free.pop();
        pair.tx_flight.insert(id, slot);
        true
    }

    fn publish(&mut self, q: usize) {
        self.pairs[q].tx.publish();
    }

    fn has_received(&self, q: usize) -> bool {
        self.pairs[q].rx.has_used()
    }

    fn unfinished(&self, q: usize, note: &mut dyn FnMut(bool, String)) {
        let pair = &self.pairs[q];
        let flight = pair.tx_flight.len();
        note(flight > 0, format!("{flight} transmit buffers not returned"));
        note(pair.tx.has_used(), "used transmit buffers not taken".into());
        note(pair.rx.has_used(), "received frames not taken".into());
        note(pair.partial.is_some(), "an incomplete frame".into());
        let (free, size) = (pair.tx.free(), pair.tx.size());
        note(free != size, format!("{free} of {size} descriptors free"));
    }

    fn has_room(&self, q: usize, len: u64) -> bool {
        let pair = &self.pairs[q];
        let total = len + u64::from(self.format.hdr_len);
        let need = if self.format.mergeable { total.div_ceil(self.rx_len) } else { 1 };
        // Used buffers that it has not taken make that uncertain.
        !pair.rx.has_used() && pair.rx_flight.len() as u64 >= need
    }

    fn misbehave(&mut self, apps: &mut [App], random: &mut Random, kicks: &mut Vec<Kick>) {
        self.inject_violation(apps, random, kicks);
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
            DriverQueue::new(memory, &layout, features, base, pool).expect("a valid layout")
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
