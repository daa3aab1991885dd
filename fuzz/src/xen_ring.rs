//! Arbitrary bytes as a Xen ring's page, under both halves at once.
//!
//! ```text
//!   kind  size  start  count  operations...  image...
//! ```
//! The image overlays the page when the back half attaches, and pieces of it are written again
//! between operations. Either half may find its ring malformed at any time; neither may panic,
//! return a buffer beyond its page, or hold more than the ring's size.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use ring::xen::{
    Armed, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, Extra, FrontCtrl,
    FrontRx, FrontTx, Gso, Malformed, Packet, RX_SLOT_LEN, RxPacket, RxRequest, RxResponse,
    SLOTS_MAX, TX_SLOT_LEN, TxPacket, TxRequest, gso_type, status,
};
use shm::{Area, Mapping};

use crate::Bytes;
use crate::racer::race;

const HEADER: usize = 64;

thread_local! {
    static PAGE: RefCell<Arc<Mapping>> =
        RefCell::new(Arc::new(Mapping::memfd("fuzz", 4096).expect("memory")));
}

/// Events of a run.
#[derive(Debug, Default)]
pub struct Seen {
    /// Packets and requests the back half took.
    pub taken: usize,
    /// Packets refused, by reason.
    pub refused: BTreeSet<String>,
    /// Packets and responses the front half took.
    pub collected: usize,
    /// Faults of either half, and rings that were not attached to.
    pub faults: BTreeSet<String>,
}

impl Seen {
    fn fault(&mut self, fault: Malformed) {
        self.faults.insert(name(&fault));
    }
}

/// The variant's name.
fn name(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
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
    let mut bytes = Bytes(data);
    let kind = bytes.u8();
    let size = 1_usize << (bytes.u8() % 6);
    let start = u32::from(bytes.u16()).wrapping_sub(0x8000);
    let count = bytes.u8();
    let ops = bytes.take(usize::from(count));
    let image = bytes.0;
    let slot_len = [TX_SLOT_LEN, RX_SLOT_LEN, CTRL_SLOT_LEN][usize::from(kind % 3)];
    let mapping = PAGE.with_borrow(Arc::clone);
    let area = Area::of(&mapping, 0, HEADER + size * slot_len).expect("fits a page");
    let mut page = Page { area, image, serial: 0, seen: Seen::default() };
    page.write(0, &vec![0; HEADER + size * slot_len]);
    let overlaid = kind & 16 == 0;
    let (area, copy) = (page.area.clone(), image.to_vec());
    let mut act = || match kind % 3 {
        0 => tx(&mut page, start, ops, overlaid),
        1 => rx(&mut page, start, ops, overlaid),
        _ => ctrl(&mut page, start, ops, overlaid),
    };
    let ((), passes) = match races {
        true => race(move || write(&area, 0, &copy), act),
        false => (act(), 0),
    };
    (page.seen, passes)
}

fn write(area: &Area, at: usize, bytes: &[u8]) {
    let words = bytes.as_chunks::<4>().0.iter().zip((at..area.len()).step_by(4));
    for (word, at) in words.filter(|(_, at)| at + 4 <= area.len()) {
        area.store_u32(at, u32::from_le_bytes(*word));
    }
}

struct Page<'a> {
    area: Area,
    image: &'a [u8],
    serial: usize,
    seen: Seen,
}

impl Page<'_> {
    fn write(&self, at: usize, bytes: &[u8]) {
        write(&self.area, at, bytes);
    }

    /// Writes the whole image over the page.
    fn overlay(&self, overlaid: bool) {
        if overlaid {
            self.write(0, self.image);
        }
    }

    /// Writes a piece of the image into the page.
    fn smash(&mut self, n: usize) {
        let len = [4, 16][n % 2];
        let at = ((self.serial * 37 + n * len) % self.area.len()) & !3;
        self.serial += 1;
        let from = at.min(self.image.len());
        self.write(at, &self.image[from..self.image.len().min(from + len)]);
    }

    /// Returns an attached half, or records why it could not be attached.
    fn record_attach<T>(&mut self, half: Result<T, ring::xen::AttachError>) -> Option<T> {
        let error = half.as_ref().err().map(|error| format!("Attach{}", name(error)));
        self.seen.faults.extend(error);
        half.ok()
    }

    /// Records a fault of the back half, which stays the same.
    fn stop(&mut self, fault: &mut Option<Malformed>, new: Malformed) {
        assert!(fault.is_none_or(|old| old == new), "a fault stays the same");
        *fault = Some(new);
        self.seen.fault(new);
    }
}

/// Checks that the back half's fault is permanent, and keeps it awake.
fn assert_stopped(fault: Option<Malformed>, armed: Armed) {
    assert!(fault.is_none() || armed == Armed::WorkPending);
}

fn tx(page: &mut Page<'_>, start: u32, ops: &[u8], overlaid: bool) {
    let mut front = FrontTx::starting_at(page.area.clone(), start);
    page.overlay(overlaid);
    let Some(mut back) = page.record_attach(BackTx::attach(page.area.clone())) else { return };
    let (mut packet, mut fault, mut lost) = (TxPacket::new(), None, false);
    let mut free: Vec<u16> = (0..u16::try_from(front.size()).expect("small")).collect();
    for op in ops {
        let n = usize::from(op >> 4);
        match op & 15 {
            0..=3 => match back.take(&mut packet) {
                Ok(Some(kind)) => {
                    assert!(fault.is_none(), "a fault stays");
                    page.seen.taken += 1;
                    check_tx(&packet, kind, back.size());
                    if let Packet::Refused(why) = kind {
                        page.seen.refused.insert(name(&why));
                    }
                    if n == 7 {
                        back.untake(1);
                    }
                }
                Ok(None) => assert!(fault.is_none()),
                Err(new) => page.stop(&mut fault, new),
            },
            4 | 5 => {
                for _ in 0..n.min(back.held()) {
                    back.put(status::OKAY);
                }
                back.publish();
                let _ = back.notify_needed();
                assert!(!back.notify_needed(), "nothing new");
            }
            6 => assert_stopped(fault, back.arm()),
            7..=9 if free.len() > n % 4 => add(&mut front, &mut free, n),
            10 => {
                front.publish();
                let _ = front.notify_needed();
            }
            11 | 12 => {
                while let Some(response) = front.take_response().unwrap_or_else(|fault| {
                    page.seen.fault(fault);
                    lost = true;
                    None
                }) {
                    page.seen.collected += 1;
                    assert!(!lost && !free.contains(&response.id), "was in flight");
                    free.push(response.id);
                }
            }
            13 => assert!(!lost || front.arm_after(n as u32) == Armed::WorkPending),
            _ => page.smash(n),
        }
        assert!(back.held() <= size_of_ring(back.size()), "more packets held than slots");
    }
}

/// Adds a packet of one to four slots, some with a GSO request.
fn add(front: &mut FrontTx, free: &mut Vec<u16>, n: usize) {
    let ids = free.split_off(free.len() - 1 - n % 4);
    let one = |id: &u16| TxRequest { gref: 1, offset: 0, flags: 0, id: *id, size: 40 };
    let rest: Vec<_> = ids[1..].iter().map(one).collect();
    let first = TxRequest { size: 40 * ids.len() as u16, ..one(&ids[0]) };
    let gso = Extra::Gso(Gso { size: 1, kind: gso_type::TCPV4, features: 0 });
    if !front.add(first, &[gso][..n / 8], &rest) {
        free.extend(ids);
    }
}

fn size_of_ring(size: u32) -> usize {
    usize::try_from(size).expect("small")
}

fn check_tx(packet: &TxPacket, kind: Packet, size: u32) {
    assert!((1..=size).contains(&packet.ring_slots));
    if kind == Packet::Frame {
        let slots = packet.slots();
        assert!((1..=SLOTS_MAX).contains(&slots.len()) && packet.len >= 14);
        assert!(slots.iter().all(|s| s.len > 0));
        assert!(slots.iter().all(|s| u32::from(s.offset) + u32::from(s.len) <= 4096));
        let sum: u32 = slots.iter().map(|s| u32::from(s.len)).sum();
        assert_eq!(sum, u32::from(packet.len));
        assert!(packet.gso.is_none_or(|gso| gso.size > 0 && (1..=2).contains(&gso.kind)));
    }
}

fn rx(page: &mut Page<'_>, start: u32, ops: &[u8], overlaid: bool) {
    let mut front = FrontRx::starting_at(page.area.clone(), start);
    page.overlay(overlaid);
    let Some(mut back) = page.record_attach(BackRx::attach(page.area.clone())) else { return };
    let (mut packet, mut fault, mut lost) = (RxPacket::new(), None, false);
    let mut posted = 0;
    for op in ops {
        let n = usize::from(op >> 4);
        match op & 15 {
            0..=3 => match back.available() {
                Ok(available) => {
                    assert!(fault.is_none() && available <= back.size());
                    for _ in 0..n.min(size_of_ring(available)) {
                        assert!(back.take().is_some());
                        page.seen.taken += 1;
                    }
                    if n == 7 {
                        back.untake(back.held().min(2));
                    }
                }
                Err(new) => page.stop(&mut fault, new),
            },
            4 | 5 => {
                put(&mut back, n);
                back.publish();
                let _ = back.notify_needed();
            }
            6 => assert_stopped(fault, back.arm(n as u32)),
            7..=9 => {
                for _ in 0..n {
                    posted += u32::from(front.post(RxRequest { id: 1, gref: 7 }));
                }
            }
            10 => {
                front.publish();
                let _ = front.notify_needed();
            }
            11 | 12 => match front.take(&mut packet) {
                Ok(Some(verdict)) => {
                    assert!(!lost);
                    page.seen.collected += 1;
                    page.seen.refused.extend(verdict.err().map(|why| name(&why)));
                    let back = check_rx(&packet);
                    posted = posted.checked_sub(back).expect("each page is returned once");
                }
                Ok(None) => assert!(!lost),
                Err(fault) => {
                    page.seen.fault(fault);
                    lost = true;
                }
            },
            13 => assert!(!lost || front.arm() == Armed::WorkPending),
            _ => page.smash(n),
        }
        assert_eq!(posted + front.room(), front.size(), "pages conserved");
    }
}

/// Puts a frame of up to `n` slots.
fn put(back: &mut BackRx, n: usize) {
    let slots = back.held().min(n as u32);
    for i in 0..slots {
        let flags = if i + 1 < slots { 4 } else { 0 };
        back.put(RxResponse { id: 0, offset: 0, flags, status: 100 });
    }
}

/// Checks a received packet; returns the number of its pages.
fn check_rx(packet: &RxPacket) -> u32 {
    let inside = |s: &ring::xen::RxSlot| {
        u32::from(s.offset) + u32::from(s.len) <= 4096 && s.request.gref == 7
    };
    assert!(packet.slots.len() <= SLOTS_MAX && packet.slots.iter().all(inside));
    (packet.slots.len() + packet.spare.len()) as u32
}

fn ctrl(page: &mut Page<'_>, start: u32, ops: &[u8], overlaid: bool) {
    let mut front = FrontCtrl::starting_at(page.area.clone(), start);
    page.overlay(overlaid);
    let Some(mut back) = page.record_attach(BackCtrl::attach(page.area.clone())) else { return };
    let (mut held, mut fault) = (0, None);
    for op in ops {
        match op & 15 {
            0..=3 => match back.take() {
                Ok(taken) => {
                    held += usize::from(taken.is_some());
                    page.seen.taken += usize::from(taken.is_some());
                }
                Err(new) => {
                    fault = Some(new);
                    page.seen.fault(new);
                }
            },
            4 | 5 => {
                (0..held).for_each(|_| back.put(CtrlResponse::default()));
                held = 0;
                back.publish();
                let _ = back.notify_needed();
            }
            6 => assert_stopped(fault, back.arm()),
            7..=9 => {
                let _ = front.put(CtrlRequest::default());
            }
            10 => {
                front.publish();
                let _ = front.notify_needed();
            }
            11 | 12 => match front.take() {
                Ok(taken) => page.seen.collected += usize::from(taken.is_some()),
                Err(fault) => page.seen.fault(fault),
            },
            13 => {
                let _ = front.arm();
            }
            _ => page.smash(usize::from(op >> 4)),
        }
    }
}

/// Valid rings as start inputs: each kind driven by its front half, and each with an image of
/// requests.
pub fn seeds() -> Vec<Vec<u8>> {
    let drive = [0x37, 0x97, 0x17, 0x0a, 0x30, 0x30, 0x30, 0x34, 0x06, 0x0b, 0x0b, 0x0d];
    let mut seeds = Vec::new();
    for kind in 0..3 {
        let mut ops = drive.repeat(3);
        ops.extend([0x1e, 0x2e, 0x3f, 0x0b, 0x00]);
        seeds.push(input(16 + (kind + 2) % 3, &ops, &[0xff; 400]));
        let serve = [0x20, 0x20, 0x20, 0x34, 0x06];
        seeds.push(input(kind, &serve.repeat(6), &image(usize::from(kind))));
    }
    // Too many slots, endless extra infos, an invalid one, and responses without a request.
    let mut image = image(0);
    for n in 0..32 {
        image[HEADER + 12 * n + 6] |= 4;
    }
    image[0] = 32;
    seeds.push(input(0, &[0x20; 6], &image));
    for n in 0..32 {
        image[HEADER + 12 * n..][..8].copy_from_slice(&[1, 1, 9, 0, 1, 0, 8, 0]);
    }
    image[HEADER + 6] = 8;
    seeds.push(input(0, &[0x20; 6], &image));
    seeds.push(null_response());
    seeds
}

/// A request that is answered as an extra info: the second piece written ends in the first word of
/// the first slot.
fn null_response() -> Vec<u8> {
    let mut image = image(0);
    image[8] = 1;
    image[HEADER..][..4].copy_from_slice(&[0, 0, 1, 0]);
    input(0, &[0x07, 0x0a, 0x0e, 0x1e, 0x0b], &image)
}

fn input(kind: u8, ops: &[u8], image: &[u8]) -> Vec<u8> {
    // 32 slots, from index 0.
    let mut bytes = vec![kind, 5];
    bytes.extend(0x8000_u16.to_le_bytes());
    bytes.push(ops.len() as u8);
    bytes.extend(ops);
    bytes.extend(image);
    bytes
}

/// A page with ten requests, of which the first tx packet has an extra info and a second buffer.
fn image(kind: usize) -> Vec<u8> {
    let slot_len = [TX_SLOT_LEN, RX_SLOT_LEN, CTRL_SLOT_LEN][kind];
    let mut image = vec![0; HEADER + 32 * slot_len];
    (image[0], image[4], image[12]) = (10, 1, 1);
    for n in 0..32 {
        let slot = &mut image[HEADER + n * slot_len..][..slot_len];
        slot[0] = n as u8;
        if kind == 0 {
            slot[8..].copy_from_slice(&[n as u8, 0, 100, 0]);
        }
    }
    if kind == 0 {
        image[HEADER + 6] = 4 | 8;
        image[HEADER + 10] = 200;
        image[HEADER + 12..][..8].copy_from_slice(&[1, 0, 9, 0, 1, 0, 0, 0]);
    }
    image
}
