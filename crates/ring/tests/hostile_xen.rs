//! Peers that write invalid data into a Xen ring: each fault is reported with its own error, valid
//! packets before it are still delivered, and the ring stays stopped; a merely invalid packet is
//! refused, answered slot by slot, and the ring continues. Every variant of `Malformed`,
//! `AttachError`, `Refusal` and `RxRefusal` is produced here.
#![allow(clippy::as_conversions)]

#[path = "common/xen.rs"]
mod common;

use common::{REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, Raw, START, area};
use ring::xen::{
    Armed, AttachError, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, CtrlRequest, EXTRAS_MAX, Extra,
    FrontCtrl, FrontRx, FrontTx, Gso, Malformed, Multicast, Packet, RX_SLOT_LEN, Refusal, RxPacket,
    RxRefusal, RxRequest, RxResponse, RxSlot, SLOTS_FATAL, SLOTS_MAX, TX_SLOT_LEN, TxPacket,
    TxRequest, rx_flag, status, tx_flag,
};

const MORE: u16 = tx_flag::MORE_DATA;
const EXTRA: u16 = tx_flag::EXTRA_INFO;
const SIZE: u32 = 64;
/// A GSO extra info of 1448 bytes for TCPv4.
const GSO: [u8; 6] = [0xa8, 0x05, 1, 0, 0, 0];

fn request(id: u16, flags: u16, size: u16) -> TxRequest {
    TxRequest { gref: 1000 + u32::from(id), offset: 0, flags, id, size }
}

/// A ring with one valid packet before what `second` writes from slot 1 on; it returns the end.
fn tx(second: impl FnOnce(&Raw) -> u32) -> (Raw, BackTx) {
    let raw = Raw::tx(SIZE);
    let back = raw.back_tx();
    raw.request(0, request(500, 0, 60));
    let n = second(&raw);
    raw.requests(n);
    (raw, back)
}

fn take_good(back: &mut BackTx) {
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
    assert_eq!(packet.len, 60);
}

/// Expects the valid packet, then the fault on this and every later call.
fn assert_faults(fault: Malformed, second: impl FnOnce(&Raw) -> u32) {
    let (_raw, mut back) = tx(second);
    take_good(&mut back);
    for _ in 0..2 {
        assert_eq!(back.take(&mut TxPacket::new()), Err(fault));
        assert!(back.has_work(), "a fault counts as work: it must be reported");
        assert_eq!(back.arm(), Armed::WorkPending);
    }
    assert!(!fault.to_string().is_empty());
    // The valid packet is still answered.
    back.put(status::OKAY);
    back.publish();
}

/// Expects that the packet in slots 1 to `n - 1` is refused and the one after it is not.
fn assert_refused(refusal: Refusal, second: impl FnOnce(&Raw) -> u32) -> (Raw, BackTx, u32) {
    let mut end = 0;
    let (raw, mut back) = tx(|raw| {
        end = second(raw);
        raw.request(end, request(501, 0, 60));
        end + 1
    });
    take_good(&mut back);
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(Some(Packet::Refused(refusal))));
    assert_eq!(packet.ring_slots, end - 1);
    take_good(&mut back);
    back.put(status::OKAY);
    back.put(status::ERROR);
    back.put(status::OKAY);
    back.publish();
    assert_eq!(raw.get(RSP_PROD), START.wrapping_add(end + 1), "each slot is answered");
    (raw, back, end)
}

/// Id and status in the `n`th slot.
fn answer(raw: &Raw, n: u32) -> (u16, i16) {
    let word = raw.words(n)[0];
    (word as u16, (word >> 16) as i16)
}

// ---- attach ----

#[test]
fn pages_that_are_no_ring_are_not_attached_to() {
    for (req_prod, rsp_prod) in [(65, 0), (0, 1), (0, 64), (0x8000_0000, 0), (63, u32::MAX - 1)] {
        let raw = Raw::tx(SIZE);
        raw.set(REQ_PROD, req_prod);
        raw.set(RSP_PROD, rsp_prod);
        let want = AttachError::Overflow { req_prod, rsp_prod, size: SIZE };
        assert_eq!(BackTx::attach(raw.area.clone()).err(), Some(want));
        assert!(want.to_string().contains("not a ring"));
    }
    let small = |len| area(0, TX_SLOT_LEN).len() + len;
    assert_eq!(small(0), 64);
    assert_eq!(BackTx::attach(area(0, TX_SLOT_LEN)).err(), Some(AttachError::TooSmall));
    assert_eq!(BackRx::attach(area(0, RX_SLOT_LEN)).err(), Some(AttachError::TooSmall));
    assert_eq!(BackCtrl::attach(area(0, CTRL_SLOT_LEN)).err(), Some(AttachError::TooSmall));
    assert!(!AttachError::TooSmall.to_string().is_empty());
}

#[test]
fn attach_to_a_full_live_ring_takes_its_unanswered_requests_again() {
    let raw = Raw::tx(SIZE);
    for n in 0..SIZE {
        raw.request(n, request(n as u16, 0, 60));
    }
    raw.requests(SIZE);
    // An earlier back half took them, answered two, and died before it notified.
    raw.set(RSP_EVENT, START.wrapping_add(1));
    raw.responses(2);
    let mut back = raw.back_tx();
    assert!(back.notify_needed(), "the front half already slept");
    let mut packet = TxPacket::new();
    for n in 2..SIZE {
        assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
        assert_eq!(packet.slots()[0].gref, 1000 + n);
    }
    assert_eq!(back.take(&mut packet), Ok(None));
    // The event was already passed before the new responses: no notification is due.
    raw.set(RSP_EVENT, START.wrapping_add(3));
    assert!(!raw.back_tx().notify_needed());
    assert!(!Raw::tx(SIZE).back_tx().notify_needed(), "fresh");
}

// ---- indices ----

#[test]
fn req_prod_jumps_by_more_than_the_ring_holds_or_back() {
    for jump in [SIZE + 1, SIZE + 2, 0x8000_0000, u32::MAX, u32::MAX - 1] {
        let raw = Raw::tx(SIZE);
        let mut back = raw.back_tx();
        let seen = START.wrapping_add(jump);
        raw.set(REQ_PROD, seen);
        let fault = Malformed::ReqProd { seen, taken: START };
        for _ in 0..2 {
            assert_eq!(back.take(&mut TxPacket::new()), Err(fault));
            assert_eq!(back.arm(), Armed::WorkPending);
        }
        let raw = Raw::rx(SIZE);
        let mut back = raw.back_rx();
        raw.set(REQ_PROD, seen);
        assert_eq!(back.available(), Err(fault));
        assert_eq!(back.take(), None);
        let raw = Raw::new(SIZE, CTRL_SLOT_LEN);
        let mut back = BackCtrl::attach(raw.area.clone()).unwrap();
        raw.set(REQ_PROD, seen);
        assert_eq!(back.take(), Err(fault));
    }
}

#[test]
fn req_prod_moves_while_the_back_half_still_holds_every_slot() {
    let raw = Raw::rx(SIZE);
    let mut back = raw.back_rx();
    raw.requests(SIZE);
    assert_eq!(back.available(), Ok(SIZE));
    while back.take().is_some() {}
    // Answered, but not published: the slot is not free.
    back.put(RxResponse::default());
    let (seen, taken) = (START.wrapping_add(SIZE + 1), START.wrapping_add(SIZE));
    raw.set(REQ_PROD, seen);
    assert_eq!(back.available(), Err(Malformed::ReqProd { seen, taken }));

    let raw = Raw::rx(SIZE);
    let mut back = raw.back_rx();
    raw.requests(SIZE);
    assert_eq!(back.available(), Ok(SIZE));
    assert!(back.take().is_some());
    back.put(RxResponse::default());
    back.publish();
    raw.requests(SIZE + 1);
    assert_eq!(back.available(), Ok(SIZE));
    // Moved back.
    raw.requests(SIZE);
    assert!(matches!(back.available(), Err(Malformed::ReqProd { .. })));
}

// ---- tx packets ----

#[test]
fn buffers_that_leave_their_page() {
    for (offset, size) in [(4096, 60), (4037, 60), (0xffff, 0xffff), (1, 4096), (0, 4097)] {
        let fault = Malformed::CrossesPage { offset, size };
        assert_faults(fault, |raw| {
            raw.request(1, TxRequest { offset, ..request(1, 0, size) });
            2
        });
        assert_faults(fault, |raw| {
            raw.request(1, request(1, MORE, 0xffff));
            raw.request(2, TxRequest { offset, ..request(2, 0, size) });
            3
        });
    }
    // The first buffer's own size counts, not the packet's.
    let (_raw, mut back) = tx(|raw| {
        raw.request(1, TxRequest { offset: 4036, ..request(1, MORE, 4000) });
        raw.request(2, request(2, 0, 3940));
        3
    });
    take_good(&mut back);
    assert_eq!(back.take(&mut TxPacket::new()), Ok(Some(Packet::Frame)));
}

/// A packet of `n` buffers; the first has the remainder.
fn many(raw: &Raw, n: u32, each: u16) -> u32 {
    raw.request(1, request(0, if n > 1 { MORE } else { 0 }, each * n as u16));
    for i in 1..n {
        let more = if i + 1 < n { MORE } else { 0 };
        raw.request(1 + i, request(i as u16, more, each));
    }
    1 + n
}

#[test]
fn slots_up_to_the_limit_are_taken_beyond_it_refused_and_then_fatal() {
    for n in [1, 18, SLOTS_MAX as u32] {
        let (_raw, mut back) = tx(|raw| many(raw, n, 20));
        take_good(&mut back);
        let mut packet = TxPacket::new();
        assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
        assert_eq!((packet.slots().len() as u32, u32::from(packet.len)), (n, 20 * n));
        assert_eq!(packet.slots().iter().map(|s| u32::from(s.len)).sum::<u32>(), 20 * n);
    }
    for n in [20, 21] {
        let (raw, _, _) = assert_refused(Refusal::Slots, |raw| many(raw, n, 20));
        for i in 0..n {
            assert_eq!(answer(&raw, 1 + i), (i as u16, status::ERROR));
        }
    }
    for n in [SLOTS_FATAL as u32, 30, 50] {
        assert_faults(Malformed::TooManySlots, |raw| many(raw, n, 20));
    }
    // Known from the 21st on: the 22nd need not be published.
    assert_faults(Malformed::TooManySlots, |raw| many(raw, 22, 20) - 1);
}

#[test]
fn tiny_slots_whose_headers_are_split_are_whole_packets() {
    let (_raw, mut back) = tx(|raw| many(raw, 18, 1));
    take_good(&mut back);
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
    assert_eq!((packet.slots().len(), packet.len), (18, 18));
}

#[test]
fn later_buffer_larger_than_what_remains_is_refused() {
    for sizes in [[100, 101, 0], [100, 50, 51]] {
        let (raw, _, _) = assert_refused(Refusal::Size, |raw| {
            raw.request(1, request(1, MORE, sizes[0]));
            raw.request(2, request(2, MORE, sizes[1]));
            raw.request(3, request(3, 0, sizes[2]));
            4
        });
        assert_eq!(answer(&raw, 1), (1, status::ERROR));
        // An empty slot is answered OKAY.
        assert_eq!(answer(&raw, 3), (3, if sizes[2] == 0 { 0 } else { status::ERROR }));
    }
}

#[test]
fn packets_shorter_than_a_header_are_refused() {
    for size in [0, 1, 13] {
        let (raw, _, _) = assert_refused(Refusal::Short, |raw| {
            raw.request(1, request(7, 0, size));
            2
        });
        assert_eq!(answer(&raw, 1), (7, status::ERROR));
    }
    let (_raw, mut back) = tx(|raw| {
        raw.request(1, request(7, 0, 14));
        2
    });
    take_good(&mut back);
    assert_eq!(back.take(&mut TxPacket::new()), Ok(Some(Packet::Frame)));
}

#[test]
fn slots_of_no_bytes_are_skipped_and_answered_okay() {
    let (raw, mut back) = tx(|raw| {
        raw.request(1, request(1, MORE, 100));
        raw.request(2, request(2, MORE, 0));
        raw.request(3, request(3, MORE, 100));
        raw.request(4, request(4, 0, 0));
        5
    });
    take_good(&mut back);
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
    // The first buffer is empty too: all bytes are in the third slot.
    let slots: Vec<_> = packet.slots().iter().map(|s| (s.gref, s.len)).collect();
    assert_eq!(slots, [(1003, 100)]);
    back.put(status::OKAY);
    back.put(status::DROPPED);
    back.publish();
    let answers: Vec<_> = (1..5).map(|n| answer(&raw, n)).collect();
    assert_eq!(answers, [(1, -2), (2, 0), (3, -2), (4, 0)]);
}

#[test]
fn responses_overwrite_nothing_but_themselves() {
    let (raw, mut back) = tx(|_| 1);
    let before = raw.words(0);
    take_good(&mut back);
    back.put(status::OKAY);
    assert_eq!(raw.words(0)[1..], before[1..], "the rest of the slot is unchanged");
}

// ---- extra infos ----

#[test]
fn extra_of_a_type_that_does_not_exist() {
    for kind in [0, 5, 6, 255] {
        assert_faults(Malformed::ExtraType(kind), |raw| {
            raw.request(1, request(1, EXTRA, 60));
            raw.extra(2, kind, false, GSO);
            3
        });
    }
}

#[test]
fn gso_of_size_0_or_of_unknown_type() {
    for (gso, fault) in [
        ([0, 0, 1, 0, 0, 0], Malformed::GsoSize),
        ([1, 0, 0, 0, 0, 0], Malformed::GsoType(0)),
        ([1, 0, 3, 0, 0, 0], Malformed::GsoType(3)),
    ] {
        assert_faults(fault, |raw| {
            raw.request(1, request(1, EXTRA, 60));
            raw.extra(2, 1, false, gso);
            3
        });
    }
}

#[test]
fn more_extras_than_anyone_needs_are_refused_and_answered_null() {
    let extras = |raw: &Raw, n: u32| {
        raw.request(1, request(9, EXTRA, 60));
        for i in 0..n {
            raw.extra(2 + i, 1, i + 1 < n, GSO);
        }
        2 + n
    };
    let (raw, ..) = assert_refused(Refusal::Extras, |raw| extras(raw, EXTRAS_MAX as u32 + 1));
    assert_eq!(answer(&raw, 1), (9, status::ERROR));
    for n in 2..2 + EXTRAS_MAX as u32 + 1 {
        assert_eq!(answer(&raw, n).1, status::NULL);
    }
    let (_raw, mut back) = tx(|raw| extras(raw, EXTRAS_MAX as u32));
    take_good(&mut back);
    assert_eq!(back.take(&mut TxPacket::new()), Ok(Some(Packet::Frame)));
}

#[test]
fn extra_chain_without_end() {
    let raw = Raw::tx(SIZE);
    let mut back = raw.back_tx();
    raw.request(0, request(1, EXTRA, 60));
    for n in 1..SIZE {
        raw.extra(n, 1, true, GSO);
    }
    raw.requests(SIZE - 1);
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(None));
    assert!(back.is_partial());
    raw.requests(SIZE);
    assert_eq!(back.take(&mut packet), Err(Malformed::Endless));
    assert_eq!(back.take(&mut packet), Err(Malformed::Endless));
}

#[test]
fn last_extra_of_a_type_wins_and_additions_come_before_deletions() {
    let (_raw, mut back) = tx(|raw| {
        raw.request(1, request(1, EXTRA, 60));
        raw.extra(2, 1, true, [0, 0, 9, 0, 0, 0]);
        raw.extra(3, 1, false, GSO);
        raw.request(4, request(2, EXTRA | MORE, 0));
        raw.extra(5, 3, true, [1; 6]);
        raw.extra(6, 2, true, [2; 6]);
        raw.extra(7, 3, false, [3; 6]);
        8
    });
    take_good(&mut back);
    let mut packet = TxPacket::new();
    assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
    assert_eq!(packet.gso, Some(Gso { size: 1448, kind: 1, features: 0 }));
    let add = Packet::Multicast(Multicast::Add([2; 6]));
    assert_eq!(back.take(&mut packet), Ok(Some(add)), "ends there, regardless of its flags");
    assert_eq!(packet.ring_slots, 4);
}

// ---- packets that are not whole ----

#[test]
fn packet_whose_tail_is_not_published_is_left_and_taken_when_it_is() {
    let cuts: [fn(&Raw) -> u32; 2] = [
        |raw| {
            raw.request(1, request(1, MORE, 100));
            raw.request(2, request(2, 0, 50));
            3
        },
        |raw| {
            raw.request(1, request(1, EXTRA, 100));
            raw.extra(2, 1, false, GSO);
            3
        },
    ];
    for cut in cuts {
        let (raw, mut back) = tx(|raw| cut(raw) - 1);
        take_good(&mut back);
        let mut packet = TxPacket::new();
        for _ in 0..2 {
            assert_eq!(back.take(&mut packet), Ok(None));
            assert!(back.is_partial() && !back.has_work());
            assert_eq!(back.arm(), Armed::Armed, "sleeps until more of it is published");
            assert_eq!(raw.get(REQ_EVENT), START.wrapping_add(3), "and the event is set for it");
        }
        raw.requests(3);
        assert!(back.has_work());
        assert_eq!(back.arm(), Armed::WorkPending);
        assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
        assert!(!back.is_partial());
        assert_eq!(packet.ring_slots, 2);
        assert_eq!(back.take(&mut packet), Ok(None));
    }
}

// ---- hostile back half ----

fn front_tx() -> (Raw, FrontTx) {
    let raw = Raw::tx(8);
    let mut front = FrontTx::starting_at(raw.area.clone(), START);
    for id in 0..3 {
        assert!(front.add(request(id, 0, 60), &[], &[]));
    }
    front.publish();
    (raw, front)
}

#[test]
fn rsp_prod_jumps_by_more_than_was_asked_or_back() {
    for n in [4, 8, 0x8000_0000, u32::MAX] {
        let (raw, mut front) = front_tx();
        raw.responses(n);
        let fault = Malformed::RspProd { seen: START.wrapping_add(n), taken: START };
        assert_eq!(front.take_response(), Err(fault));
        assert_eq!(front.take_response(), Err(fault));
        assert_eq!(front.arm(), Armed::WorkPending);
        let raw = Raw::new(8, CTRL_SLOT_LEN);
        let mut front = FrontCtrl::starting_at(raw.area.clone(), START);
        for _ in 0..3 {
            assert!(front.put(CtrlRequest::default()));
        }
        front.publish();
        raw.responses(n);
        assert_eq!(front.take(), Err(fault));
        assert!(!fault.to_string().is_empty());
    }
}

#[test]
fn responses_to_ids_that_are_not_in_flight() {
    for id in [3, 7, 8, 0xffff] {
        let (raw, mut front) = front_tx();
        raw.bytes(0, &[1, 0, 0, 0]);
        raw.bytes(1, &[id as u8, (id >> 8) as u8, 0, 0]);
        raw.responses(2);
        assert_eq!(front.take_response().unwrap().unwrap().id, 1, "in any order");
        assert_eq!(front.take_response(), Err(Malformed::ResponseId(id)));
        assert_eq!(front.take_response(), Err(Malformed::ResponseId(id)));
    }
    // The same id twice.
    let (raw, mut front) = front_tx();
    raw.bytes(0, &[1, 0, 0, 0]);
    raw.bytes(1, &[1, 0, 0, 0]);
    raw.responses(2);
    assert!(front.take_response().unwrap().is_some());
    assert_eq!(front.take_response(), Err(Malformed::ResponseId(1)));
}

#[test]
fn responses_to_unpublished_requests() {
    let (raw, mut front) = front_tx();
    assert!(front.add(request(5, 0, 60), &[], &[]));
    raw.bytes(0, &[5, 0, 0, 0]);
    raw.responses(1);
    assert_eq!(front.take_response(), Err(Malformed::ResponseId(5)));
    // Once it is, it may be answered, in any order.
    let (raw, mut front) = front_tx();
    assert!(front.add(request(5, 0, 60), &[], &[]));
    front.publish();
    raw.bytes(0, &[5, 0, 0, 0]);
    raw.responses(1);
    assert_eq!(front.take_response().unwrap().unwrap().id, 5);
}

#[test]
fn null_responses_are_limited_to_the_extra_infos() {
    let null = [0, 0, 1, 0];
    let (raw, mut front) = front_tx();
    raw.bytes(0, &null);
    raw.responses(1);
    assert_eq!(front.take_response(), Err(Malformed::NullResponse));
    assert_eq!(front.take_response(), Err(Malformed::NullResponse));
    assert!(!Malformed::NullResponse.to_string().is_empty());
    // As many as there were extra infos, in any slot.
    let (raw, mut front) = front_tx();
    let gso = Extra::Gso(Gso { size: 1, kind: 1, features: 0 });
    assert!(front.add(request(5, 0, 60), &[gso], &[]));
    front.publish();
    for n in [0, 2] {
        raw.bytes(n, &null);
    }
    raw.bytes(1, &[5, 0, 0, 0]);
    raw.responses(3);
    assert_eq!(front.take_response().unwrap().unwrap().id, 5);
    assert_eq!(front.take_response(), Err(Malformed::NullResponse));
}

/// A front half with `n` pages posted, and its raw ring.
fn front_rx(n: u16) -> (Raw, FrontRx) {
    let raw = Raw::rx(32);
    let mut front = FrontRx::starting_at(raw.area.clone(), START);
    for id in 0..n {
        assert!(front.post(RxRequest { id, gref: 1000 + u32::from(id) }));
    }
    front.publish();
    (raw, front)
}

fn response(raw: &Raw, n: u32, offset: u16, flags: u16, status: i16) {
    let halves = [0xeeee, offset, flags, status as u16];
    let bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
    raw.bytes(n, &bytes);
}

/// Expects that the packet in the first `n` slots is dropped and each of its pages returned once.
fn assert_rx_refused(refusal: RxRefusal, n: u16, write: impl FnOnce(&Raw)) {
    let (raw, mut front) = front_rx(n + 1);
    write(&raw);
    response(&raw, n.into(), 0, 0, 60);
    raw.responses(u32::from(n) + 1);
    let mut packet = RxPacket::new();
    assert_eq!(front.take(&mut packet), Ok(Some(Err(refusal))));
    assert!(packet.slots.is_empty());
    let mut ids: Vec<_> = packet.spare.iter().map(|r| r.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..n).collect::<Vec<_>>());
    // The next packet is unaffected.
    assert_eq!(front.take(&mut packet), Ok(Some(Ok(()))));
    let request = RxRequest { id: n, gref: 1000 + u32::from(n) };
    assert_eq!(packet.slots, [RxSlot { request, offset: 0, len: 60 }]);
}

#[test]
fn rx_packets_with_errors_are_dropped_and_their_pages_come_back() {
    let more = rx_flag::MORE_DATA;
    for status in [-1, -2, i16::MIN] {
        assert_rx_refused(RxRefusal::Status(status), 2, |raw| {
            response(raw, 0, 0, more, 100);
            response(raw, 1, 0, 0, status);
        });
    }
    for (offset, len) in [(0, 4097), (4096, 1), (0xffff, i16::MAX), (4000, 97)] {
        assert_rx_refused(RxRefusal::CrossesPage, 1, |raw| response(raw, 0, offset, 0, len));
    }
    assert_rx_refused(RxRefusal::Short, 1, |raw| response(raw, 0, 0, 0, 13));
    assert_rx_refused(RxRefusal::Slots, 20, |raw| {
        for n in 0..20 {
            response(raw, n, 0, if n < 19 { more } else { 0 }, 100);
        }
    });
    assert_rx_refused(RxRefusal::Gso, 1, |raw| response(raw, 0, 0, rx_flag::GSO_PREFIX, 60));
    for gso in [[0, 0, 1, 0, 0, 0], [1, 0, 3, 0, 0, 0]] {
        assert_rx_refused(RxRefusal::Gso, 2, |raw| {
            response(raw, 0, 0, rx_flag::EXTRA_INFO, 60);
            raw.extra(1, 1, false, gso);
        });
    }
    for kind in [0, 2, 3, 5, 255] {
        assert_rx_refused(RxRefusal::ExtraType(kind), 2, |raw| {
            response(raw, 0, 0, rx_flag::EXTRA_INFO, 60);
            raw.extra(1, kind, false, GSO);
        });
    }
}

#[test]
fn rx_packet_without_end_and_one_without_its_tail() {
    let (raw, mut front) = front_rx(32);
    for n in 0..32 {
        response(&raw, n, 0, rx_flag::MORE_DATA, 100);
    }
    raw.responses(31);
    let mut packet = RxPacket::new();
    assert_eq!(front.take(&mut packet), Ok(None));
    assert!(front.is_partial() && !front.has_responses());
    assert_eq!(front.arm(), Armed::Armed);
    assert_eq!(raw.get(RSP_EVENT), START.wrapping_add(32), "the event is set after the part");
    raw.responses(32);
    assert!(front.has_responses());
    assert_eq!(front.take(&mut packet), Err(Malformed::Endless));

    let (raw, mut front) = front_rx(8);
    response(&raw, 0, 0, rx_flag::MORE_DATA, 100);
    raw.responses(1);
    assert_eq!(front.take(&mut packet), Ok(None));
    response(&raw, 1, 0, 0, 100);
    raw.responses(2);
    assert_eq!(front.take(&mut packet), Ok(Some(Ok(()))));
    assert_eq!((packet.len, packet.slots.len()), (200, 2));
    raw.responses(1);
    assert!(matches!(front.take(&mut packet), Err(Malformed::RspProd { .. })), "back");
}

// ---- smart poll ----

#[test]
fn smart_poll_flag_may_be_anything() {
    let (raw, front) = front_rx(4);
    let tx = FrontTx::new(area(8, TX_SLOT_LEN));
    let back = raw.back_rx();
    let flag = back.smart_poll();
    assert!(!back.smartpoll_active() && flag.claim() && !flag.claim());
    assert!(front.smartpoll_active());
    assert_eq!(front.stop_polling(&tx), Armed::Armed);
    raw.area.store_u32(16, 0xffff_ff00);
    assert!(!back.smartpoll_active(), "only the one byte counts");
    raw.area.store_u32(16, 0x80);
    assert!(back.smartpoll_active() && !flag.claim());
    raw.responses(1);
    assert_eq!(front.stop_polling(&tx), Armed::WorkPending);
    assert_eq!(raw.area.load_u32(16), 0);
}

#[test]
fn packets_of_our_front_half_fit_the_ring_or_are_not_added() {
    let mut front = FrontTx::new(area(4, TX_SLOT_LEN));
    let gso = Extra::Gso(Gso { size: 1, kind: 1, features: 0 });
    assert!(!front.add(request(0, 0, 60), &[gso; 2], &[request(1, 0, 9), request(2, 0, 9)]));
    assert_eq!(front.room(), 4);
    assert!(front.add(request(0, 0, 60), &[gso; 2], &[request(1, 0, 9)]));
    assert!(!front.add(request(2, 0, 60), &[], &[]));
}
