//! A guest whose threads rewrite all that the switch reads, while it reads it.
//!
//! ```text
//!   port 1: driver ──▶ rings ◀── one thread: descriptors, available and used rings
//!           memory table ◀────── one thread: another table, or region, every 10 ms
//!           frames ◀──────────── two threads: headers; payload
//!   port 2: an honest receiver, which compares what arrives
//! ```
//! First only with values that cost frames, so that the rings continue; then with any, which ends
//! the connection, and all begins again. Whatever is sent has a known destination: a flood would
//! fill the queues of others, which is no race.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::virtq::{Buf, DriverQueue};
use shm::Area;
use vhost_user::message::{FrontendReq as R, MemRegion};

use super::wire::{
    AVAIL, BUFFERS, FEATURES, GUEST, INDIRECT, LEN, NEXT, RX, Raw, SIZE, TX, USED, USER, WRITE,
    layout, memfd, state, whole,
};
use crate::race::{self, Buffers, FRAME_LEN, LEARN_MAX, Random, Seen};
use crate::{Attack, Error, Tally};

/// Time between two changes of the memory table.
const SWAP_EVERY: Duration = Duration::from_millis(10);
/// Chains that are available at a time.
const DEPTH: u16 = 256;
/// Buffers that are sent: few, so that each is rewritten often.
const SLOTS: u64 = 4;
const SLOT_LEN: u64 = 2048;
/// A buffer begins here in its slot, so that a MAC address is within one word.
const LEAD: u64 = 4;
/// Offset of a frame in its slot: after the virtio-net header.
const FRAME: usize = LEAD as usize + 12;
/// Bytes of the first descriptor of a frame's chain.
const HEAD_LEN: u32 = 12 + 54;
/// First receive buffer, and the bytes of each.
const RECEIVE: u64 = BUFFERS + SLOTS * SLOT_LEN;
const RECEIVE_LEN: u32 = 2048;
/// A buffer across the border of two regions of one of the tables.
const BORDER: u64 = GUEST + LEN / 2 - 40;
/// Bytes of the region that is added and removed.
const EXTRA: u64 = 0x1_0000;

/// virtio-net headers, as a word of 4 bytes and one of 8: none, a valid checksum, a checksum
/// outside the frame, GSO without a size.
const HEADERS: [(u32, u64); 4] =
    [(0, 0), (1, 34 << 16 | 16 << 32), (1, 0xffff << 16), (1 | 1 << 8, 34 << 16)];

/// Driver of one ring that depends on nothing its own threads rewrite, except for the device's
/// progress: chain `k` has the descriptors from `k * parts` on.
struct Driver<'a> {
    raw: &'a Raw,
    ring: u32,
    parts: u16,
    /// Position and wrap counter of a packed ring.
    pos: u16,
    wrap: bool,
}

impl<'a> Driver<'a> {
    fn new(raw: &'a Raw, ring: u32, parts: u16) -> Self {
        let driver = Self { raw, ring, parts, pos: 0, wrap: true };
        let chains = SIZE / parts;
        let heads = raw.area(layout(ring).driver, 6 + 2 * usize::from(SIZE));
        for k in 0..SIZE {
            if !raw.packed {
                heads.store_u16(4 + 2 * usize::from(k), k % chains * parts);
                driver.describe(k / parts % chains, k % parts);
            }
        }
        // Of a packed ring only some are available at a time, as of a split one.
        (0..if raw.packed { DEPTH } else { 0 }).for_each(|k| driver.chain(k, true));
        driver
    }

    /// The right address, length and flags of a chain's part.
    fn part(&self, k: u16, part: u16) -> (u64, u32, u16) {
        if self.ring == RX {
            return (RECEIVE + u64::from(k) * u64::from(RECEIVE_LEN), RECEIVE_LEN, WRITE);
        }
        let at = slot(k) + LEAD;
        match part {
            0 => (at, HEAD_LEN, NEXT),
            _ => (at + u64::from(HEAD_LEN), 12 + FRAME_LEN - HEAD_LEN, 0),
        }
    }

    /// Writes a part of a split ring's chain.
    fn describe(&self, k: u16, part: u16) {
        let (addr, len, flags) = self.part(k, part);
        let i = k * self.parts + part;
        self.raw.describe(self.ring, i, addr, len, flags, (i + 1) % SIZE);
    }

    /// Makes a packed ring's chain available.
    fn chain(&self, k: u16, wrap: bool) {
        let bits = if wrap { 0 } else { AVAIL | USED };
        for part in (0..self.parts).rev() {
            let (addr, len, flags) = self.part(k, part);
            self.raw.describe(self.ring, k * self.parts + part, addr, len, flags | bits, k);
        }
    }

    /// Makes as many chains available as the device used; returns how many.
    fn drive(&mut self) -> u64 {
        let raw = self.raw;
        if !raw.packed {
            let used = raw.area(layout(self.ring).device, 4).sync_load(2, Ordering::Acquire);
            let avail = raw.area(layout(self.ring).driver, 4);
            let idx = used.wrapping_add(DEPTH);
            let fresh = idx.wrapping_sub(avail.sync_load(2, Ordering::Relaxed));
            avail.sync_store(2, idx, Ordering::Release);
            // More: its own threads rewrote one of the two.
            return if fresh <= DEPTH { u64::from(fresh) } else { 0 };
        }
        let table = raw.area(layout(self.ring).desc, 16 * usize::from(SIZE));
        let chains = SIZE / self.parts;
        let mut fresh = 0;
        while fresh < u64::from(DEPTH) {
            let at = 16 * usize::from(self.pos * self.parts) + 14;
            let flags = table.sync_load(at, Ordering::Acquire);
            let used = if self.wrap { AVAIL | USED } else { 0 };
            if flags & (AVAIL | USED) != used {
                break;
            }
            let next = self.pos + DEPTH;
            self.chain(next % chains, self.wrap == (next < chains));
            self.pos = (self.pos + 1) % chains;
            self.wrap ^= self.pos == 0;
            fresh += 1;
        }
        fresh
    }
}

/// Slot of a chain.
fn slot(k: u16) -> u64 {
    BUFFERS + u64::from(k) % SLOTS * SLOT_LEN
}

/// Rewrites rings: with values that cost frames, or, if `wild`, with any.
fn rewrite_rings(raw: &Raw, wild: &AtomicBool, over: &AtomicBool) {
    let mut random = Random(1);
    let addrs = [
        BUFFERS + LEAD,
        BORDER,
        GUEST + LEN + LEAD,
        GUEST + LEN + EXTRA - 8,
        GUEST - 8,
        u64::MAX - 8,
    ];
    // The first part of a chain keeps its headers.
    let lens = [HEAD_LEN, 12 + FRAME_LEN, 70_000, u32::MAX, 0, 1, 13, 2048];
    while !over.load(Ordering::Relaxed) {
        let ring = random.of(&[TX, TX, RX]);
        let layout = layout(ring);
        let i = usize::from(random.next() as u16 % SIZE);
        let table = raw.area(layout.desc, 16 * usize::from(SIZE));
        table.store_u64(16 * i, random.of(&addrs));
        let first = ring == TX && i.is_multiple_of(2);
        table.store_u32(16 * i + 8, random.of(if first { &lens[..4] } else { &lens }));
        // Back to a right one, or everything would be refused soon.
        if random.next().is_multiple_of(2) && (first || ring == RX) {
            let right = if ring == TX { BUFFERS + LEAD } else { RECEIVE };
            table.store_u64(16 * i, right);
            table.store_u32(16 * i + 8, if ring == TX { HEAD_LEN } else { RECEIVE_LEN });
        }
        let driver = raw.area(layout.driver, 6 + 2 * usize::from(SIZE));
        let device = raw.area(layout.device, 6 + 8 * usize::from(SIZE));
        if !raw.packed {
            driver.store_u16(4 + 2 * i, (random.next() as u16) % (SIZE / 2) * 2);
            device.store_u32(4 + 8 * i, random.next() as u32);
        }
        if wild.load(Ordering::Relaxed) {
            let flags = random.of(&[0, NEXT, WRITE, INDIRECT, NEXT | INDIRECT, AVAIL | USED]);
            table.store_u16(16 * i + 12, random.next() as u16);
            // A packed descriptor mostly stays available: without, the ring would only stop.
            let bits = table.sync_load(16 * i + 14, Ordering::Relaxed) & (AVAIL | USED);
            let bits = if raw.packed && !i.is_multiple_of(64) { bits } else { 0 };
            table.sync_store(16 * i + 14, flags ^ bits, Ordering::Release);
            driver.store_u16(4 + 2 * i, random.next() as u16);
            driver.sync_store(2, random.next() as u16, Ordering::Release);
            device.sync_store(2, random.next() as u16, Ordering::Release);
        }
    }
}

/// Rewrites a virtio-net header.
fn rewrite_header(slot: &Area, version: u64) {
    // Most of them valid: others are not delivered.
    let valid = version % 8 < 6;
    let header = HEADERS[(version / 2 % 2) as usize + if valid { 0 } else { 2 }];
    slot.store_u32(LEAD as usize, header.0);
    slot.store_u64(LEAD as usize + 4, header.1);
}

/// Another table, or one region more or less, every 10 ms; returns how often, and how many were
/// refused.
fn swap_tables(raw: &Raw, from: [u8; 6], over: &AtomicBool) -> Result<Tally, Error> {
    let extra = memfd(EXTRA)?;
    extra.write_all_at(&[from, from].concat(), FRAME as u64)?;
    let half = |i: u64| MemRegion {
        guest_addr: GUEST + i * LEN / 2,
        size: LEN / 2,
        user_addr: USER + i * LEN / 2,
        mmap_offset: i * LEN / 2,
    };
    let more =
        MemRegion { guest_addr: GUEST + LEN, size: EXTRA, user_addr: USER + LEN, mmap_offset: 0 };
    let mut tally = Tally::default();
    for step in (0..4).cycle() {
        let until = Instant::now() + SWAP_EVERY;
        while Instant::now() < until {
            if over.load(Ordering::Relaxed) {
                return Ok(tally);
            }
            std::thread::sleep(SWAP_EVERY / 4);
        }
        let fd = raw.file.as_fd();
        let answer = match step {
            0 => {
                let table = MemRegion::table_to_bytes(&[half(0), half(1)]);
                raw.request(R::SET_MEM_TABLE, table, &[fd, fd])
            }
            1 => raw.request(R::ADD_MEM_REG, more.to_single_bytes(), &[extra.as_fd()]),
            2 => raw.request(R::REM_MEM_REG, more.to_single_bytes(), &[]),
            _ => raw.request(R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[whole()]), &[fd]),
        };
        match answer {
            Some(done) => tally.refused += u64::from(!done),
            None => return Ok(tally),
        }
        tally.swaps += 1;
    }
    Ok(tally)
}

/// Sends a frame from the second port; returns whether the switch took it, and so learned the
/// receiver's address.
fn announce(raw: &Raw, [from, to]: [[u8; 6]; 2]) -> bool {
    let Some(mut tx) = raw.driver(TX) else { return false };
    let len = raw.frame(BUFFERS, switch::vnet::VnetHdr::NONE, from, to);
    tx.add(&[Buf { addr: BUFFERS, len, write: false }]);
    tx.publish();
    raw.kick();
    let end = Instant::now() + LEARN_MAX;
    let mut used = Vec::new();
    while used.is_empty() && Instant::now() < end && tx.take_used(1, &mut used).is_ok() {
        std::thread::sleep(Duration::from_micros(100));
    }
    !used.is_empty()
}

/// Honest receiver at the second port.
fn receive(raw: &Raw, macs: [[u8; 6]; 2], seen: &Seen, over: &AtomicBool) -> Option<()> {
    let mut rx: DriverQueue = raw.driver(RX)?;
    let at = |k: u64| RECEIVE + k * u64::from(RECEIVE_LEN);
    let buf = |k: u64| Buf { addr: at(k), len: RECEIVE_LEN, write: true };
    let mut tokens = std::collections::HashMap::new();
    for k in 0..u64::from(DEPTH) {
        tokens.insert(rx.add(&[buf(k)])?, k);
    }
    rx.publish();
    raw.kick();
    let mut used = Vec::new();
    while !over.load(Ordering::Relaxed) {
        used.clear();
        rx.take_used(usize::from(DEPTH), &mut used).ok()?;
        for done in used.drain(..) {
            let k = tokens.remove(&done.id)?;
            let frame = raw.area(at(k), RECEIVE_LEN as usize);
            seen.inspect(&frame, 12, macs[0]);
            tokens.insert(rx.add(&[buf(k)])?, k);
        }
        rx.publish();
        raw.kick();
        std::thread::sleep(Duration::from_micros(200));
    }
    Some(())
}

/// Threads rewrite rings, headers, payload and the memory table while the switch reads them.
pub fn racing(attack: &mut Attack<'_>) -> Result<(), Error> {
    let from = attack.mac;
    let to = [from[0], from[1], from[2], from[3], from[4], from[5] ^ 0x80];
    while let Some(raw) = attack.connect_and_start()? {
        // The second port, if there is one; otherwise nothing compares what arrives.
        let other = attack.targets.get(1).cloned();
        let other = match other {
            Some(target) => attack.raw_at(&target)?,
            None => None,
        };
        let other = other.filter(|o| o.negotiate(FEATURES) && o.share());
        let other = other.filter(|o| o.ring(RX) && o.ring(TX));
        let other = other.filter(|o| announce(o, [from, to]));
        let macs = [from, if other.is_some() { to } else { attack.peer }];
        prepare(&raw, macs);
        let areas = (0..SLOTS).map(|k| raw.area(BUFFERS + k * SLOT_LEN, SLOT_LEN as usize));
        let buffers = Buffers { areas: areas.collect(), at: FRAME };
        let (mut tx, mut rx) = (Driver::new(&raw, TX, 2), Driver::new(&raw, RX, 1));
        let (wild, over, seen) = (AtomicBool::new(false), AtomicBool::new(false), Seen::default());
        let swaps = std::thread::scope(|scope| {
            let swaps = scope.spawn(|| swap_tables(&raw, from, &over));
            scope.spawn(|| rewrite_rings(&raw, &wild, &over));
            scope.spawn(|| buffers.rewrite_headers(macs, &over, rewrite_header));
            scope.spawn(|| buffers.rewrite_payload(&over));
            if let Some(other) = &other {
                scope.spawn(|| receive(other, macs, &seen, &over));
            }
            race::drive(attack, &wild, || {
                let made = tx.drive() + rx.drive();
                raw.kick();
                // Its replies are for the thread that changes tables: only the end is noticed.
                (!swaps.is_finished()).then_some(made)
            });
            over.store(true, Ordering::Relaxed);
            swaps.join()
        });
        attack.tally += swaps.unwrap_or_else(|_| Ok(Tally::default()))?;
        attack.tally += seen.tally();
        // Before the receiver disconnects: frames to it would be flooded.
        raw.request(R::GET_VRING_BASE, state(TX, 0), &[]);
        attack.tally.ended += u64::from(raw.is_closed(Duration::ZERO));
    }
    Ok(())
}

/// Writes the parts of the frames that stay.
fn prepare(raw: &Raw, macs: [[u8; 6]; 2]) {
    let [from, _] = macs;
    raw.write(BORDER + 12, &[from, from].concat());
    for k in 0..SLOTS {
        let mut frame = race::frame(macs);
        // Of the second part alone, this is the destination.
        frame[HEAD_LEN as usize..HEAD_LEN as usize + 6].copy_from_slice(&from);
        raw.write(BUFFERS + k * SLOT_LEN + FRAME as u64, &frame);
    }
}
