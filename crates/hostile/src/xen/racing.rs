//! A domain whose threads rewrite all that the switch reads, while it reads it.
//!
//! ```text
//!   port 1: driver ──▶ rings ◀──── one thread: requests, indices
//!           grant table ◀───────── one thread: revoked, granted again, another page
//!           pages of frames ◀───── two threads: headers; payload
//!   port 2: an honest receiver, which compares what arrives, and sends
//! ```
//! As with virtqueues, first only with values that cost frames, so that the rings continue; then
//! with any, which disconnects the vif; and nothing is sent to an unknown destination.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::xen::{FrontRx, RxPacket, RxRequest, tx_flag};
use shm::Area;

use super::guest::{
    CTRL, DATA, GREF, Guest, PAGES, REQ_PROD, RING_SIZE, RSP_PROD, RX, SLOTS, TX, entry,
};
use crate::race::{self, Buffers, FRAME_LEN, LEARN_MAX, Random, Seen};
use crate::{Attack, Error};

/// Requests that are published at a time.
const DEPTH: u32 = 128;
/// Pages with frames that are sent: few, so that each is rewritten often.
const SENT: u32 = 4;
/// First page of receive buffers, and their number.
const RECEIVE: u32 = DATA + SENT;
const RECEIVE_PAGES: u32 = PAGES - RECEIVE;
/// Offsets of further frames in a page of frames; only their addresses are written, and the last
/// one is longer than the page.
const OTHERS: [u16; 2] = [600, 4000];
/// Time between two checks whether the vif is still connected.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// Driver of one ring that depends on nothing its own threads rewrite, except for the back end's
/// progress.
struct Driver<'a> {
    guest: &'a Guest,
    ring: usize,
    area: Area,
    prod: u32,
}

impl<'a> Driver<'a> {
    fn new(guest: &'a Guest, ring: usize) -> Self {
        Self { guest, ring, area: guest.area(ring), prod: 0 }
    }

    /// Publishes as many requests as were answered; returns how many.
    fn drive(&mut self) -> u64 {
        let until = self.area.sync_load_u32(RSP_PROD, Ordering::Acquire).wrapping_add(DEPTH);
        let fresh = until.wrapping_sub(self.prod);
        if fresh == 0 || fresh > DEPTH {
            // The latter: its own threads rewrote the index.
            return 0;
        }
        for i in 0..fresh {
            request(&self.area, self.ring, self.prod.wrapping_add(i) % RING_SIZE);
        }
        self.prod = until;
        self.area.sync_store_u32(REQ_PROD, until, Ordering::Release);
        self.guest.channels[self.ring].notify();
        u64::from(fresh)
    }
}

/// Writes a right request into a slot.
fn request(area: &Area, ring: usize, i: u32) {
    if ring == RX {
        let at = SLOTS + 8 * i as usize;
        area.store_u32(at, i);
        area.store_u32(at + 4, GREF + RECEIVE + i % RECEIVE_PAGES);
    } else {
        let at = SLOTS + 12 * i as usize;
        area.store_u32(at, GREF + DATA + i % SENT);
        area.store_u32(at + 4, 0);
        area.store_u32(at + 8, i | FRAME_LEN << 16);
    }
}

/// Rewrites rings: with values that cost frames, or, if `wild`, with any.
fn rewrite_rings(guest: &Guest, wild: &AtomicBool, over: &AtomicBool) {
    let mut random = Random(1);
    let [tx, rx, ctrl] = [TX, RX, CTRL].map(|ring| guest.area(ring));
    let grefs = [0, u32::MAX, GREF + PAGES, GREF + DATA, GREF + DATA + 1];
    let first = u32::from(OTHERS[0]);
    let (csum, more) = (u32::from(tx_flag::CSUM_BLANK) << 16, u32::from(tx_flag::MORE_DATA) << 16);
    while !over.load(Ordering::Relaxed) {
        let i = random.next() as u32 % RING_SIZE;
        let at = SLOTS + 12 * i as usize;
        if !random.next().is_multiple_of(4) {
            // Right again, or everything would be refused soon.
            request(&tx, TX, i);
            request(&rx, RX, i);
            continue;
        }
        tx.store_u32(at, random.of(&grefs));
        tx.store_u32(at + 4, random.of(&[0, first, csum, first | csum]));
        tx.store_u32(at + 8, i | random.of(&[FRAME_LEN, 60, 13, 0, FRAME_LEN]) << 16);
        rx.store_u32(SLOTS + 8 * i as usize + 4, random.of(&grefs[..3]));
        if wild.load(Ordering::Relaxed) {
            let offset = random.of(&[0, first, OTHERS[1].into(), 0xffff]);
            let any = random.next() as u32 & 0x1f_0000;
            let flags = random.of(&[0, more, any]);
            tx.store_u32(at + 4, offset | flags);
            tx.store_u32(at + 8, i | random.of(&[FRAME_LEN, 200, 4096, 0xffff]) << 16);
            if random.next().is_multiple_of(4096) {
                let area = random.of(&[&tx, &rx, &ctrl]);
                let index = random.of(&[REQ_PROD, RSP_PROD]);
                area.sync_store_u32(index, random.next() as u32, Ordering::Release);
            }
        }
    }
}

/// Revokes grants, gives them again, and gives them for other pages; returns how often.
fn swap_grants(guest: &Guest, over: &AtomicBool) -> u64 {
    let (mut random, mut swaps) = (Random(2), 0);
    while !over.load(Ordering::Relaxed) {
        let page = DATA + random.next() as u32 % (SENT + RECEIVE_PAGES);
        // A sent page stays one, and so its destinations known.
        let other = if page < RECEIVE {
            DATA + random.next() as u32 % SENT
        } else {
            RECEIVE + random.next() as u32 % RECEIVE_PAGES
        };
        let outside = PAGES + random.next() as u32 % PAGES;
        for bytes in [random.of(&[[0; 8], entry(outside)]), entry(other), entry(page)] {
            let at = u64::from(GREF + page) * 8;
            swaps += u64::from(rustix::io::pwrite(&guest.table, &bytes, at).is_ok());
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    swaps
}

/// Writes the parts of the frames that stay.
fn prepare(guest: &Guest, macs: [[u8; 6]; 2]) {
    for page in DATA..RECEIVE {
        let start = page as usize * 4096;
        let write = |at: u16, bytes: &[u8]| guest.write(start + usize::from(at), bytes);
        write(0, &race::frame(macs));
        // Of the frames at other offsets, this is the destination.
        OTHERS.iter().for_each(|at| write(*at, &[macs[0], macs[0]].concat()));
    }
}

/// Sends a frame from the second port to the first one; `None` if the switch does not take it, and
/// so does not learn its address.
fn announced(mut guest: Guest, [from, to]: [[u8; 6]; 2]) -> Option<Guest> {
    guest.frame(DATA, from, to);
    guest.request(GREF + DATA, 0, 0, 60);
    guest.push();
    guest.answered(LEARN_MAX).then_some(guest)
}

/// Honest receiver at the second port, which sends a little.
fn receive(guest: &mut Guest, macs: [[u8; 6]; 2], seen: &Seen, over: &AtomicBool) {
    let mut rx = FrontRx::new(guest.area(RX));
    let pages: Vec<Area> = (0..PAGES).map(|page| guest.area(page as usize)).collect();
    let mut packet = RxPacket::new();
    for page in RECEIVE..PAGES {
        rx.post(RxRequest { id: page as u16, gref: GREF + page });
    }
    while !over.load(Ordering::Relaxed) {
        while let Ok(Some(taken)) = rx.take(&mut packet) {
            if let (Ok(()), [slot, ..]) = (taken, &packet.slots[..]) {
                let page = slot.request.gref.wrapping_sub(GREF) as usize;
                if slot.len >= FRAME_LEN as u16 && slot.offset.is_multiple_of(4) {
                    seen.inspect(&pages[page], slot.offset.into(), macs[0]);
                }
            }
            let slots = packet.slots.iter().map(|slot| slot.request);
            for request in slots.chain(packet.spare.iter().copied()) {
                rx.post(request);
            }
        }
        rx.publish();
        guest.channels[RX].notify();
        if guest.answered(Duration::ZERO) {
            (0..16).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
            guest.push();
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Threads rewrite rings, grants, headers and payload while the switch reads them.
pub fn racing(attack: &mut Attack<'_>) -> Result<(), Error> {
    let from = attack.mac;
    let to = [from[0], from[1], from[2], from[3], from[4], from[5] ^ 0x80];
    while let Some(guest) = attack.vif()? {
        // The second port, if there is one; otherwise nothing compares what arrives.
        let other = attack.targets.get(1).and_then(|dir| Guest::connected(dir));
        let mut other = other.and_then(|other| announced(other, [from, to]));
        let macs = [from, if other.is_some() { to } else { attack.peer }];
        prepare(&guest, macs);
        let areas = (DATA..RECEIVE).map(|page| guest.area(page as usize)).collect();
        let buffers = Buffers { areas, at: 0 };
        let (wild, over, seen) = (AtomicBool::new(false), AtomicBool::new(false), Seen::default());
        let swaps = std::thread::scope(|scope| {
            let swaps = scope.spawn(|| swap_grants(&guest, &over));
            scope.spawn(|| rewrite_rings(&guest, &wild, &over));
            scope.spawn(|| buffers.rewrite_headers(macs, &over, |_, _| ()));
            scope.spawn(|| buffers.rewrite_payload(&over));
            if let Some(other) = &mut other {
                scope.spawn(|| receive(other, macs, &seen, &over));
            }
            let (mut tx, mut rx) = (Driver::new(&guest, TX), Driver::new(&guest, RX));
            let mut check = Instant::now();
            race::drive(attack, &wild, || {
                let now = Instant::now();
                if now >= check {
                    check = now + CHECK_EVERY;
                    if guest.is_disconnected() {
                        return None;
                    }
                }
                Some(tx.drive() + rx.drive())
            });
            over.store(true, Ordering::Relaxed);
            swaps.join().unwrap_or(0)
        });
        attack.tally.swaps += swaps;
        attack.tally += seen.tally();
        attack.tally.ended += u64::from(guest.is_disconnected());
        // Before the receiver disconnects: frames to it would be flooded.
        drop(guest);
    }
    Ok(())
}
