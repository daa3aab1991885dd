//! Both rings of a vif as ports, with correct and hostile front halves.

use std::sync::Mutex;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use ring::xen::{
    BackRx, BackTx, Extra, FrontRx, Gso, RxPacket, RxRefusal, RxRequest, TxRequest, gso_type,
    rx_flag, status, tx_flag,
};
use shm::{Area, Failed, Grants, Mapping, Piece, Private, Seg, Side};
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::time::Instant;
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, VnetHdr};

use super::*;

mod parts;
mod statics;
mod steering;
mod switched;

/// Initial index, close to the maximum: indices wrap in every long enough test.
const START: u32 = u32::MAX - 3;
const READ_ONLY: u32 = 300;
const NO_SUCH: u32 = 999;

/// Pages granted by one guest, by reference.
#[derive(Default)]
struct Host {
    pages: Mutex<BTreeMap<(u16, u32), Arc<Mapping>>>,
    calls: AtomicUsize,
}

impl Host {
    fn page(&self, id: u16, gref: u32) -> Option<Arc<Mapping>> {
        if gref == NO_SUCH {
            return None;
        }
        let mut pages = self.pages.lock().unwrap();
        let page = || Arc::new(Mapping::memfd("page", 4096).unwrap());
        Some(Arc::clone(pages.entry((id, gref)).or_insert_with(page)))
    }

    fn one(&self, piece: &mut Piece<'_>) -> Result<(), Failed> {
        let len = piece.len();
        let held;
        let from = match piece.src() {
            Side::Mapped(seg) => seg,
            Side::Granted { domain, gref, offset } => {
                held = self.page(domain.id(), gref).ok_or(Failed::Source)?;
                held.seg(offset.into(), len).ok_or(Failed::Source)?
            }
        };
        match piece.dst() {
            Side::Mapped(mut to) => to.copy_from(from),
            Side::Granted { gref: READ_ONLY, .. } => return Err(Failed::Destination),
            Side::Granted { domain, gref, offset } => {
                let page = self.page(domain.id(), gref).ok_or(Failed::Destination)?;
                page.seg_mut(offset.into(), len).ok_or(Failed::Destination)?.copy_from(from)
            }
        };
        Ok(())
    }
}

impl Grants for Host {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        for piece in pieces {
            let result = self.one(piece);
            piece.set(result);
        }
    }
}

#[derive(Default)]
struct Channel {
    notified: AtomicUsize,
    acked: AtomicUsize,
}

impl Event for Channel {
    fn notify(&self) {
        self.notified.fetch_add(1, Ordering::Relaxed);
    }
    fn ack(&self) {
        self.acked.fetch_add(1, Ordering::Relaxed);
    }
}

const ALL: Peer =
    Peer { sg: true, gso4: true, gso6: true, csum4: true, csum6: true, rx_notify: true };

/// A tx ring written directly: our front half would not send invalid requests.
struct Tx {
    page: Area,
    req_prod: u32,
    rsp_cons: u32,
}

impl Tx {
    fn new(page: Area) -> Self {
        for (at, value) in [(0, START), (4, START + 1), (8, START), (12, START + 1)] {
            page.store_u32(at, value);
        }
        Self { page, req_prod: START, rsp_cons: START }
    }

    fn slot(&mut self, words: [u32; 3]) {
        let at = 64 + 12 * (self.req_prod % 256) as usize;
        for (i, word) in words.into_iter().enumerate() {
            self.page.store_u32(at + 4 * i, word);
        }
        self.req_prod = self.req_prod.wrapping_add(1);
    }

    fn add(&mut self, mut first: TxRequest, extras: &[Extra], rest: &[TxRequest]) {
        let more = |more: bool| if more { tx_flag::MORE_DATA } else { 0 };
        let words = |r: &TxRequest, flags: u16| {
            let flags = u32::from(r.flags | flags) << 16;
            [r.gref, u32::from(r.offset) | flags, u32::from(r.id) | u32::from(r.size) << 16]
        };
        first.flags |= if extras.is_empty() { 0 } else { tx_flag::EXTRA_INFO };
        self.slot(words(&first, more(!rest.is_empty())));
        for (i, extra) in extras.iter().enumerate() {
            let (kind, [a, b, c, d, e, f]) = match *extra {
                Extra::Gso(Gso { size, kind, .. }) => {
                    let [a, b] = size.to_le_bytes();
                    (1, [a, b, kind, 0, 0, 0])
                }
                Extra::McastAdd(mac) => (2, mac),
                Extra::McastDel(mac) => (3, mac),
                Extra::Hash(_) => (4, [0; 6]),
            };
            let more = u8::from(i + 1 < extras.len());
            self.slot([
                u32::from_le_bytes([kind, more, a, b]),
                u32::from_le_bytes([c, d, e, f]),
                0,
            ]);
        }
        for (i, request) in rest.iter().enumerate() {
            self.slot(words(request, more(i + 1 < rest.len())));
        }
        self.page.sync_store_u32(0, self.req_prod, shm::sync::Ordering::Release);
    }

    /// The status of every response since the last call.
    fn responses(&mut self) -> Vec<i16> {
        let mut all = Vec::new();
        while self.rsp_cons != self.page.sync_load_u32(8, shm::sync::Ordering::Acquire) {
            let word = self.page.load_u32(64 + 12 * (self.rsp_cons % 256) as usize);
            all.push((word >> 16) as i16);
            self.rsp_cons = self.rsp_cons.wrapping_add(1);
        }
        all
    }
}

/// Private memory of an ingress queue.
fn arena() -> Private {
    Private::plain(XenIngress::ARENA_LEN).unwrap()
}

/// So many nanoseconds after the start.
fn at(ns: u64) -> Instant {
    Instant::from_ns(ns)
}

/// One vif: both halves of both its rings.
struct Guest {
    id: u16,
    host: Arc<Host>,
    tx: Tx,
    rx: FrontRx,
    channel: Arc<Channel>,
    vif: Arc<Vif>,
    orders: Arc<Orders>,
    pair: Pair,
    next: u16,
}

fn area() -> Area {
    Area::of(&Arc::new(Mapping::memfd("ring", 4096).unwrap()), 0, 4096).unwrap()
}

impl Guest {
    fn new(id: u16, host: &Arc<Host>, peer: Peer) -> Self {
        Self::queue(id, host, peer, Arc::new(Orders::new(1)), 0)
    }

    /// One queue of a vif with several.
    fn queue(id: u16, host: &Arc<Host>, peer: Peer, orders: Arc<Orders>, queue: usize) -> Self {
        let (tx_page, rx_page) = (area(), area());
        let tx = Tx::new(tx_page.clone());
        let rx = FrontRx::starting_at(rx_page.clone(), START);
        let pair = Pair::new();
        let channel = Arc::new(Channel::default());
        let vif = Arc::new(Vif::new());
        let wiring = Wiring {
            channel: channel.clone(),
            domain: Arc::new(Domain::new(id, host.clone())),
            peer,
            smart_poll: None,
            vif: vif.clone(),
            orders: orders.clone(),
            queue,
        };
        pair.ingress.lock().activate(BackTx::attach(tx_page).unwrap(), wiring.clone(), arena());
        pair.egress.lock().activate(BackRx::attach(rx_page).unwrap(), wiring);
        Self { id, host: host.clone(), tx, rx, channel, vif, orders, pair, next: 0 }
    }

    fn write(&self, gref: u32, at: usize, bytes: &[u8]) {
        let page = self.host.page(self.id, gref).unwrap();
        page.seg_mut(at, bytes.len() as u32).unwrap().write(bytes);
    }

    /// Sends a packet in slots of these lengths, from grant 8 on.
    fn send(&mut self, bytes: &[u8], cut: &[usize], flags: u16, extras: &[Extra]) {
        let (mut at, mut requests) = (0, Vec::new());
        for (i, n) in cut.iter().enumerate() {
            let gref = 8 + u32::from(self.next);
            self.write(gref, 16, &bytes[at..at + n]);
            let size = if i == 0 { bytes.len() } else { *n } as u16;
            requests.push(TxRequest { gref, offset: 16, flags: 0, id: self.next, size });
            self.next = (self.next + 1) % 200;
            at += n;
        }
        requests[0].flags = flags;
        self.raw(requests[0], extras, &requests[1..]);
    }

    fn raw(&mut self, first: TxRequest, extras: &[Extra], rest: &[TxRequest]) {
        self.tx.add(first, extras, rest);
    }

    /// Passes sent packets to `see` as one burst.
    fn burst(&mut self, now: Instant, mut see: impl FnMut(&mut Burst<'_>)) -> Result<usize, Fault> {
        let mut scratch = Burst::default();
        let mut ingress = self.pair.ingress.lock();
        ingress.burst(64, now, &mut scratch, &mut |burst| see(burst))
    }

    /// All packets sent, as private bytes; unreadable ones are left out.
    fn received(&mut self) -> Result<Vec<(VnetHdr, Vec<u8>)>, Fault> {
        let mut all = Vec::new();
        self.burst(at(0), |burst| {
            burst.snapshot();
            burst.fetch(0..burst.frames.len());
            for i in (0..burst.frames.len()).filter(|i| !burst.is_excluded(*i)) {
                let frame = &burst.frames[i];
                let mut bytes = vec![0; frame.len as usize];
                let mut at = 0;
                burst.segs(frame).iter().for_each(|seg| at += seg.read(&mut bytes[at..]));
                all.push((frame.hdr, bytes));
            }
        })?;
        Ok(all)
    }

    fn responses(&mut self) -> Vec<i16> {
        self.tx.responses()
    }

    fn post(&mut self, grefs: impl IntoIterator<Item = u32>) {
        for gref in grefs {
            assert!(self.rx.post(RxRequest { id: gref as u16, gref }));
        }
        self.rx.publish();
        let _ = self.rx.notify_needed();
    }

    fn take(&mut self) -> Option<Result<(RxPacket, Vec<u8>), RxRefusal>> {
        let mut packet = RxPacket::new();
        let result = self.rx.take(&mut packet).unwrap()?;
        let mut bytes = Vec::new();
        for slot in &packet.slots {
            let page = self.host.page(self.id, slot.request.gref).unwrap();
            let mut part = vec![0; slot.len.into()];
            page.seg(slot.offset.into(), slot.len.into()).unwrap().read(&mut part);
            bytes.extend(part);
        }
        Some(result.map(|()| (packet, bytes)))
    }
}

/// A TCP frame over IPv4.
fn tcp(len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i * 11 + 5) as u8).collect();
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    bytes[12..26].copy_from_slice(&[8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
    bytes[46] = 0x50;
    bytes
}

/// A TCP frame over IPv6.
fn tcp6(len: usize) -> Vec<u8> {
    let mut bytes = tcp(len);
    bytes[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64]);
    bytes[66] = 0x50;
    bytes
}

fn two() -> (Guest, Guest) {
    let host = Arc::new(Host::default());
    (Guest::new(1, &host, ALL), Guest::new(2, &host, ALL))
}

/// Delivers `a`'s packets to `b` as the forwarder does. Returns the number of frames.
fn carry(a: &mut Guest, b: &mut Guest) -> usize {
    let egress = b.pair.egress.clone();
    let mut took = 0;
    let shown = a.burst(at(1), |burst| {
        burst.snapshot();
        let picks = (0..burst.frames.len() as u16).filter(|i| !burst.is_excluded((*i).into()));
        let picks: Vec<u16> = picks.collect();
        let mut egress = egress.lock();
        took = egress.put(burst, &picks).unwrap();
        egress.flush();
        egress.notify();
    });
    shown.unwrap();
    took
}

#[test]
fn frames_are_copied_between_grants_in_two_calls_per_burst() {
    let (mut a, mut b) = two();
    b.post(100..164);
    for round in 0..5_usize {
        (0..8).for_each(|n| a.send(&tcp(60 + 100 * n + round), &[60 + 100 * n + round], 0, &[]));
        a.host.calls.store(0, Ordering::Relaxed);
        assert_eq!(carry(&mut a, &mut b), 8);
        assert_eq!(a.host.calls.load(Ordering::Relaxed), 2, "one for heads, one for the rest");
        assert_eq!(a.responses(), [status::OKAY; 8]);
        for n in 0..8 {
            assert_eq!(b.take().unwrap().unwrap().1, tcp(60 + 100 * n + round));
        }
    }
}

#[test]
fn packet_of_many_slots_with_gso_arrives_complete_with_its_flags() {
    let (mut a, mut b) = two();
    b.post(100..130);
    for (kind, bytes) in [(gso_type::TCPV4, tcp(30_000)), (gso_type::TCPV6, tcp6(30_000))] {
        let gso = Gso { size: 1448, kind, features: 0 };
        // Headers split over slots, an empty slot among them.
        let cut = [10, 20, 0, 970, 4000, 4000, 4000, 4000, 4000, 4000, 4000, 1000];
        let flags = tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED;
        a.send(&bytes, &cut, flags, &[Extra::Gso(gso)]);
        assert_eq!(carry(&mut a, &mut b), 1);
        let mut want = [status::OKAY; 13];
        want[1] = status::NULL;
        assert_eq!(a.responses(), want);
        let (packet, got) = b.take().unwrap().unwrap();
        assert!(got == bytes);
        assert_eq!(packet.gso, Some(gso));
        assert_eq!(packet.flags & 3, rx_flag::CSUM_BLANK | rx_flag::DATA_VALIDATED);
        assert_eq!(packet.slots.len(), 8, "no more than its length needs");
    }
}

#[test]
fn blank_checksum_is_found_in_headers_split_over_slots() {
    let (mut a, _) = two();
    a.send(&tcp(100), &[14, 10, 26, 50], tx_flag::CSUM_BLANK, &[]);
    let got = a.received().unwrap();
    let (hdr, bytes) = &got[0];
    assert_eq!((hdr.flags, hdr.csum_start, hdr.csum_offset), (NEEDS_CSUM, 34, 16));
    assert_eq!(bytes, &tcp(100));
}

/// XSA-423 and XSA-432: headers are assembled before they are read, from as many slots as allowed,
/// which together are shorter than the head.
#[test]
fn headers_in_eighteen_tiny_slots_arrive_complete() {
    let (mut a, mut b) = two();
    b.post(100..140);
    let tiny = [&[1; 13][..], &[0], &[3], &[0], &[10, 34]].concat();
    assert_eq!((tiny.len(), tiny.iter().sum::<usize>()), (18, 60));
    for flags in [0, tx_flag::CSUM_BLANK] {
        a.send(&tcp(60), &tiny, flags, &[]);
        assert_eq!(carry(&mut a, &mut b), 1);
        assert_eq!(a.responses(), [status::OKAY; 18]);
        let (packet, bytes) = b.take().unwrap().unwrap();
        assert_eq!((packet.slots.len(), bytes), (1, tcp(60)));
    }
}

#[test]
fn gso_without_a_partial_checksum_gets_one() {
    let (mut a, mut b) = two();
    let gso = Gso { size: 1448, kind: gso_type::TCPV4, features: 0 };
    for flags in [0, tx_flag::DATA_VALIDATED] {
        a.send(&tcp(6000), &[100, 3900, 2000], flags, &[Extra::Gso(gso)]);
        a.send(&tcp(60), &[60], 0, &[]);
        b.post(100..104);
        assert_eq!(carry(&mut a, &mut b), 2);
        let (packet, bytes) = b.take().unwrap().unwrap();
        assert_eq!((packet.gso, packet.flags & 3), (Some(gso), 3));
        let mut sum = switch::offload::Sum::default();
        sum.add(&tcp(60)[26..34]);
        sum.add(&[0, 6]);
        sum.add(&(6000_u16 - 34).to_be_bytes());
        let mut want = tcp(6000);
        want[50..52].copy_from_slice(&sum.fold());
        assert!(bytes == want);
        assert_eq!(b.take().unwrap().unwrap().1, tcp(60), "nothing else is changed");
    }
    // Headers that exceed the head, and packets that cannot have a checksum.
    let mut options = tcp(6000);
    options[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 100, 60, 64]);
    options[54..56].copy_from_slice(&[6, 9]);
    let mut arp = tcp(6000);
    arp[13] = 6;
    for bad in [options, arp] {
        a.send(&bad, &[4000, 2000], 0, &[Extra::Gso(gso)]);
    }
    assert_eq!(a.received().unwrap(), []);
    assert_eq!(a.pair.ingress_stats.drops_bad_hdr.get(), 2);
}

#[test]
fn bad_grant_fails_only_its_own_packet() {
    let (mut a, mut b) = two();
    b.post(100..110);
    a.send(&tcp(60), &[60], 0, &[]);
    a.raw(TxRequest { gref: NO_SUCH, offset: 0, flags: 0, id: 210, size: 60 }, &[], &[]);
    a.raw(TxRequest { gref: u32::MAX, offset: 0, flags: 0, id: 211, size: 60 }, &[], &[]);
    // Its first slot is valid, so its head is readable; the second is not.
    let first = TxRequest { gref: 8, offset: 16, flags: 0, id: 212, size: 500 };
    a.raw(first, &[], &[TxRequest { gref: NO_SUCH, offset: 0, flags: 0, id: 213, size: 300 }]);
    a.send(&tcp(61), &[61], 0, &[]);
    carry(&mut a, &mut b);
    let (ok, err) = (status::OKAY, status::ERROR);
    assert_eq!(a.responses(), [ok, err, err, err, err, ok]);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(60));
    assert_eq!(b.take().unwrap().unwrap_err(), RxRefusal::Status(status::ERROR));
    assert_eq!(b.take().unwrap().unwrap().1, tcp(61));
    assert_eq!(b.pair.egress_stats.frames.get(), 2);
}

#[test]
fn receivers_bad_page_fails_only_its_own_frame() {
    let (mut a, mut b) = two();
    b.post([READ_ONLY, 101, NO_SUCH, 103]);
    (0..4).for_each(|n| a.send(&tcp(60 + n), &[60 + n], 0, &[]));
    assert_eq!(carry(&mut a, &mut b), 4);
    assert_eq!(a.responses(), [status::OKAY; 4], "the sender is not at fault");
    let error = RxRefusal::Status(status::ERROR);
    assert_eq!(b.take().unwrap().unwrap_err(), error);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(61));
    assert_eq!(b.take().unwrap().unwrap_err(), error);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(63));
    assert_eq!(b.pair.egress_stats.drops_bad_grant.get(), 2);
}

#[test]
fn frame_with_two_bad_pages_is_counted_once() {
    let (mut a, mut b) = two();
    // A page that cannot be written, and an invalid grant.
    b.post([READ_ONLY, u32::MAX, 102]);
    a.send(&tcp(6000), &[4000, 2000], 0, &[]);
    a.send(&tcp(60), &[60], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 2);
    assert_eq!(b.take().unwrap().unwrap_err(), RxRefusal::Status(status::ERROR));
    assert_eq!(b.take().unwrap().unwrap().1, tcp(60));
    assert_eq!(b.pair.egress_stats.drops_bad_grant.get(), 1);
    assert_eq!(b.pair.egress_stats.frames.get(), 1);
}

#[test]
fn delivered_headers_are_those_checked_despite_concurrent_writes() {
    let (mut a, mut b) = two();
    b.post(100..102);
    a.send(&tcp(600), &[600], 0, &[]);
    let page = a.host.page(1, 8).unwrap();
    let egress = b.pair.egress.clone();
    a.burst(at(0), |burst| {
        burst.snapshot();
        page.seg_mut(16, 600).unwrap().write(&[0xee; 600]);
        let mut egress = egress.lock();
        assert_eq!(egress.put(burst, &[0]), Ok(1));
        egress.flush();
    })
    .unwrap();
    let (_, bytes) = b.take().unwrap().unwrap();
    assert_eq!((&bytes[..128], &bytes[128..]), (&tcp(600)[..128], &[0xee; 472][..]));
}

#[test]
fn refused_packets_get_an_error_and_others_are_delivered() {
    let (mut a, _) = two();
    let slot = |id, size| TxRequest { gref: 8, offset: 0, flags: 0, id, size };
    a.raw(slot(200, 13), &[], &[]);
    // 20 and 21 slots; a later slot longer than the packet; too long without GSO.
    for n in [19, 20] {
        let rest: Vec<_> = (0..n).map(|_| slot(201, 10)).collect();
        a.raw(slot(201, 300), &[], &rest);
    }
    a.raw(slot(202, 100), &[], &[slot(203, 101)]);
    let rest: Vec<_> = (0..3).map(|_| slot(204, 4000)).collect();
    a.raw(slot(204, 13_000), &[], &rest);
    // A blank checksum of a frame without one.
    a.write(8, 0, &[0; 100]);
    a.raw(TxRequest { flags: tx_flag::CSUM_BLANK, ..slot(205, 60) }, &[], &[]);
    a.send(&tcp(60), &[60], 0, &[]);
    assert_eq!(a.received().unwrap().len(), 1);
    let responses = a.responses();
    assert_eq!(responses.len(), 1 + 20 + 21 + 2 + 4 + 1 + 1);
    assert!(responses[..49].iter().all(|s| *s == status::ERROR) && responses[49] == 0);
    let stats = &a.pair.ingress_stats;
    assert_eq!((stats.drops_runt.get(), stats.drops_too_many_segs.get()), (1, 2));
    assert_eq!((stats.drops_too_long.get(), stats.drops_bad_hdr.get()), (2, 1));
}

#[test]
fn malformed_packets_stop_their_port_after_earlier_packets() {
    let slot = |size| TxRequest { gref: 8, offset: 0, flags: 0, id: 200, size };
    let gso = |size, kind| Extra::Gso(Gso { size, kind, features: 0 });
    let crossing = TxRequest { offset: 4000, ..slot(200) };
    let many = vec![slot(1); 21];
    let cases: [(TxRequest, Vec<Extra>, Vec<TxRequest>); 5] = [
        (crossing, vec![], vec![]),
        (slot(300), vec![], vec![TxRequest { offset: u16::MAX, ..slot(100) }]),
        (slot(300), vec![], many),
        (slot(300), vec![gso(0, gso_type::TCPV4)], vec![]),
        (slot(300), vec![gso(1000, 9)], vec![]),
    ];
    for (first, extras, rest) in cases {
        let (mut a, mut b) = two();
        b.send(&tcp(60), &[60], 0, &[]);
        a.send(&tcp(60), &[60], 0, &[]);
        a.raw(first, &extras, &rest);
        assert_eq!(a.received().unwrap().len(), 1, "{first:?}");
        assert_eq!(a.responses(), [status::OKAY]);
        a.received().unwrap_err();
        a.received().unwrap_err();
        // A second deactivation finds no ring, and the next ring is separate.
        for queue_was_there in [true, false] {
            assert_eq!(a.pair.ingress.lock().deactivate(), queue_was_there);
            assert_eq!(a.pair.egress.lock().deactivate(), queue_was_there);
        }
        assert_eq!((a.received().unwrap(), a.responses()), (vec![], vec![]));
        assert_eq!(b.received().unwrap().len(), 1, "others are not affected");
    }
}

#[test]
fn packets_get_responses_in_order() {
    let (mut a, mut b) = two();
    b.post(100..102);
    (0..5).for_each(|n| a.send(&tcp(60 + n), &[60 + n], 0, &[]));
    assert_eq!(carry(&mut a, &mut b), 2);
    assert_eq!(a.responses(), [status::OKAY; 5], "its pages are not held");
    assert!(b.pair.egress.lock().arm(), "full");
    b.post(102..104);
    assert!(!b.pair.egress.lock().arm());
    let got: Vec<_> = std::iter::from_fn(|| b.take()).map(|p| p.unwrap().1.len()).collect();
    assert_eq!(got, [60, 61]);
    assert!(a.pair.ingress.lock().deactivate());
    assert_eq!(a.responses(), []);
}

#[test]
fn front_end_without_scatter_gather_gets_at_most_one_page() {
    let host = Arc::new(Host::default());
    let mut a = Guest::new(1, &host, ALL);
    let mut b = Guest::new(2, &host, Peer { sg: false, ..ALL });
    b.post(100..110);
    a.send(&tcp(4096), &[4000, 96], 0, &[]);
    a.send(&tcp(4097), &[4000, 97], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 2);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(4096));
    assert!(b.take().is_none());
    assert_eq!(b.pair.egress_stats.drops_too_long.get(), 1);
    let takes = b.pair.egress.lock().offloads();
    assert!(takes.csum && !takes.tso4 && !takes.tso6);
}

#[test]
fn rate_is_checked_before_a_packet_is_taken() {
    let (mut a, _) = two();
    a.vif.set_rate(Some(Rate { bytes: 1000, usecs: 1000 }));
    (0..200).for_each(|_| a.send(&tcp(1000), &[1000], 0, &[]));
    let mut shown = 0;
    for _ in 0..4 {
        shown += a.burst(at(0), |burst| assert!(!burst.frames.is_empty())).unwrap();
        a.responses();
    }
    assert_eq!(shown, 131, "the bucket");
    assert_eq!(a.burst(at(0), |_| ()), Ok(0));
    let rests = |a: &Guest| {
        let mut ingress = a.pair.ingress.lock();
        (ingress.arm(), ingress.due())
    };
    // Packets are pending, but must wait, whatever events arrive.
    assert_eq!(rests(&a), (true, Some(at(928_000))), "72 bytes were left");
    a.send(&tcp(60), &[60], 0, &[]);
    assert_eq!((a.burst(at(927_999), |_| ()), rests(&a)), (Ok(0), (true, Some(at(928_000)))));
    assert_eq!(a.channel.acked.load(Ordering::Relaxed), 0, "no event is consumed");
    assert_eq!((a.burst(at(928_000), |_| ()), rests(&a).1), (Ok(1), Some(at(1_928_000))));
    assert_eq!((a.burst(at(60_928_000), |_| ()), a.responses().len()), (Ok(60), 61));
    a.vif.set_rate(None);
    assert_eq!(a.burst(at(60_928_001), |_| ()), Ok(9));
    assert_eq!(rests(&a), (true, None), "armed as usual");
    assert_eq!(a.channel.acked.load(Ordering::Relaxed), 1);
}

#[test]
fn frames_of_a_guest_without_link_are_taken_and_dropped() {
    let (mut a, mut b) = two();
    a.vif.set_link(false);
    b.post(100..110);
    let add = TxRequest { gref: 8, offset: 0, flags: 0, id: 200, size: 0 };
    a.raw(add, &[Extra::McastAdd([1, 0, 0x5e, 0, 0, 7])], &[]);
    (0..3).for_each(|_| a.send(&tcp(60), &[60], 0, &[]));
    let seen = a.burst(at(1), |burst| panic!("{} frames", burst.frames.len()));
    assert_eq!(seen, Ok(4));
    assert!(a.responses().iter().all(|s| *s == status::OKAY || *s == status::NULL));
    let stats = &a.pair.ingress_stats;
    assert_eq!((stats.drops_down.get(), stats.frames.get()), (3, 0));
    // Its requests are run, and protocol violations are faults, as usual.
    a.vif.filter_multicast(true);
    assert!(a.vif.accepts([1, 0, 0x5e, 0, 0, 7]));
    a.vif.set_link(true);
    a.send(&tcp(61), &[61], 0, &[]);
    assert_eq!((carry(&mut a, &mut b), a.responses()), (1, vec![status::OKAY]));
    assert_eq!(b.take().unwrap().unwrap().1, tcp(61));
    assert!(b.take().is_none());
    a.vif.set_link(false);
    a.raw(TxRequest { gref: 8, offset: 4000, flags: 0, id: 1, size: 200 }, &[], &[]);
    a.burst(at(2), |_| ()).unwrap_err();
}

#[test]
fn frames_longer_than_the_mtu_do_not_reach_the_guest() {
    let host = Arc::new(Host::default());
    let mut a = Guest::new(1, &host, ALL);
    let mut b = Guest::new(2, &host, ALL);
    b.vif.set_mtu(1000);
    b.post(100..110);
    let gso = Gso { size: 900, kind: gso_type::TCPV4, features: 0 };
    // With link header and tag; one byte more; and a GSO frame.
    a.send(&tcp(1018), &[1018], 0, &[]);
    a.send(&tcp(1019), &[1019], 0, &[]);
    a.send(&tcp(4000), &[4000], tx_flag::CSUM_BLANK, &[Extra::Gso(gso)]);
    assert_eq!(carry(&mut a, &mut b), 3);
    let got: Vec<_> = std::iter::from_fn(|| b.take()).map(|p| p.unwrap().1.len()).collect();
    assert_eq!(got, [1018, 4000]);
    assert_eq!(b.pair.egress_stats.drops_too_long.get(), 1);
    b.vif.set_mtu(0);
    a.send(&tcp(1019), &[1019], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(1019), "no MTU is set");
}

#[test]
fn multicast_is_filtered_by_the_guests_list() {
    let (mut a, mut b) = two();
    b.vif.filter_multicast(true);
    b.post(100..120);
    let group = |n| [1, 0, 0x5e, 0, 0, n];
    let dummy = TxRequest { gref: 8, offset: 0, flags: 0, id: 200, size: 0 };
    (0..65).for_each(|n| b.raw(dummy, &[Extra::McastAdd(group(n))], &[]));
    b.raw(dummy, &[Extra::McastDel(group(7))], &[]);
    assert_eq!(b.received().unwrap().len() + b.received().unwrap().len(), 0, "no frames");
    let data: Vec<_> = b.responses().into_iter().filter(|s| *s != status::NULL).collect();
    assert_eq!(data.iter().filter(|s| **s == status::ERROR).count(), 1, "a list of 64");
    for mac in [group(3), group(7), [0xff; 6], [2, 0, 0, 0, 0, 2]] {
        let mut bytes = tcp(60);
        bytes[..6].copy_from_slice(&mac);
        a.send(&bytes, &[60], 0, &[]);
    }
    assert_eq!(carry(&mut a, &mut b), 4);
    assert_eq!(std::iter::from_fn(|| b.take()).count(), 3);
    assert_eq!(b.pair.egress_stats.drops_filtered.get(), 1);
}

#[test]
fn notified_once_per_burst_and_not_while_the_front_half_polls() {
    let (mut a, _) = two();
    (0..3).for_each(|_| a.send(&tcp(60), &[60], 0, &[]));
    a.received().unwrap();
    assert_eq!(a.channel.notified.load(Ordering::Relaxed), 1);
    for _ in 0..3 {
        a.send(&tcp(60), &[60], 0, &[]);
        a.received().unwrap();
    }
    assert_eq!(a.channel.notified.load(Ordering::Relaxed), 1, "not armed again");
    assert_eq!(a.responses().len(), 6);
    let mut ingress = a.pair.ingress.lock();
    assert!(ingress.arm());
    assert_eq!(a.channel.acked.load(Ordering::Relaxed), 1);
}

/// With smart poll a notification also sets the flag, so an early one would suppress the next,
/// needed one.
#[test]
fn smart_poll_is_claimed_only_for_what_was_published() {
    let host = Arc::new(Host::default());
    let (mut a, mut b) = (Guest::new(1, &host, ALL), Guest::new(2, &host, ALL));
    let flags = [&mut a, &mut b].map(|guest| {
        let flag = Arc::new(SmartPoll::new(area()));
        guest.pair.ingress.lock().active.as_mut().unwrap().wiring.smart_poll = Some(flag.clone());
        guest.pair.egress.lock().set_smart_poll(flag.clone());
        flag
    });
    let notified = |guest: &Guest| guest.channel.notified.load(Ordering::Relaxed);
    let see = |a: &mut Guest, b: &mut Guest| {
        carry(a, b);
        [(notified(a), flags[0].is_active()), (notified(b), flags[1].is_active())]
    };
    (0..3).for_each(|_| a.send(&tcp(60), &[60], 0, &[]));
    assert_eq!(see(&mut a, &mut b), [(1, true), (0, false)], "no page to put them into");
    b.post(100..102);
    (0..2).for_each(|_| a.send(&tcp(60), &[60], 0, &[]));
    assert_eq!(see(&mut a, &mut b), [(1, true); 2]);
    b.post(102..103);
    a.send(&tcp(60), &[60], 0, &[]);
    assert_eq!(see(&mut a, &mut b), [(1, true); 2], "both poll");
    flags.iter().for_each(|flag| flag.set(false));
    assert_eq!(see(&mut a, &mut b), [(1, false); 2], "nothing new");
    assert!(a.pair.ingress.lock().deactivate());
    assert!(b.pair.egress.lock().deactivate());
    assert_eq!([notified(&a), notified(&b)], [1; 2]);
}

#[test]
fn made_frames_and_room_for_them() {
    let (_, mut b) = two();
    b.post(100..104);
    let mut egress = b.pair.egress.lock();
    assert_eq!((egress.room(1500, 10), egress.room(5000, 10)), (Ok(4), Ok(2)));
    let hdr = VnetHdr { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::NONE };
    let body = tcp(1500);
    assert_eq!(egress.put_parts(&body[..54], &[Seg::of(&body[54..])], &hdr), Ok(true));
    let gso = VnetHdr { gso_type: GSO_TCPV4, gso_size: 1000, ..hdr };
    assert_eq!(egress.put_parts(&tcp(9000), &[], &gso), Ok(false), "three pages and an extra");
    egress.flush();
    drop(egress);
    let (packet, bytes) = b.take().unwrap().unwrap();
    assert_eq!((bytes, packet.flags), (tcp(1500), 3));
    assert!(b.take().is_none());
}

#[test]
fn packet_with_a_missing_rest_stops_the_port_after_a_time() {
    let (mut a, _) = two();
    let page = area();
    let mut tx = Tx::new(page.clone());
    let slot = TxRequest { gref: 8, offset: 0, flags: 0, id: 1, size: 60 };
    tx.add(slot, &[], &[slot]);
    // Only the first of its two slots was published.
    page.sync_store_u32(0, START + 1, shm::sync::Ordering::Release);
    let mut ingress = a.pair.ingress.lock();
    let wiring = ingress.active.as_ref().unwrap().wiring.clone();
    ingress.deactivate();
    ingress.activate(BackTx::attach(page.clone()).unwrap(), wiring, arena());
    drop(ingress);
    assert_eq!(a.burst(at(1), |_| ()), Ok(0));
    let rests = |a: &Guest| {
        let mut ingress = a.pair.ingress.lock();
        (ingress.arm(), ingress.due())
    };
    // There is no event for a missing rest: the port is polled in time.
    assert_eq!(rests(&a), (true, Some(at(10_000_000_001))));
    assert_eq!(a.burst(at(9_000_000_000), |_| ()), Ok(0));
    assert_eq!(rests(&a), (true, Some(at(10_000_000_001))));
    a.burst(at(10_000_000_001), |_| ()).unwrap_err();
}

#[test]
fn missing_rest_after_a_frame_is_waited_for() {
    let (mut a, mut b) = two();
    b.post(100..110);
    let slot = TxRequest { gref: 8, offset: 0, flags: 0, id: 1, size: 120 };
    a.send(&tcp(60), &[60], 0, &[]);
    let end = a.tx.req_prod;
    a.raw(slot, &[], &[TxRequest { size: 60, ..slot }]);
    let whole = a.tx.req_prod;
    a.tx.page.sync_store_u32(0, end.wrapping_add(1), shm::sync::Ordering::Release);
    assert_eq!(carry(&mut a, &mut b), 1);
    let due = |a: &Guest| a.pair.ingress.lock().due();
    assert_eq!(due(&a), Some(at(10_000_000_001)));
    a.tx.page.sync_store_u32(0, whole, shm::sync::Ordering::Release);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert_eq!(due(&a), None, "it arrived");
}
