use std::sync::Arc;

use ring::xen::{BackTx, Packet, TxPacket};
use shm::{GuestMemory, Mapping, Region};

use super::*;

pub const ALL: Agreed = Agreed {
    queues: 1,
    split: false,
    ctrl: false,
    smart_poll: false,
    multicast: false,
    sg: true,
    gso_tcpv4: true,
    gso_tcpv6: true,
    csum4: true,
    csum6: true,
    trusted: true,
};
const TSO: VnetHdr = VnetHdr {
    flags: NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 54,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};

const TSO6: VnetHdr = VnetHdr { gso_type: GSO_TCPV6, hdr_len: 74, csum_start: 54, ..TSO };

/// Two views of a page shared by both halves.
pub fn page() -> [Area; 2] {
    let mapping = Arc::new(Mapping::memfd("ring", 4096).unwrap());
    let region = Region { guest_addr: 0, user_addr: 0, len: 4096, offset: 0, mapping };
    let memory = GuestMemory::new(vec![region]).unwrap();
    [0; 2].map(|at| Area::new(&memory, at, 4096).unwrap())
}

fn pair(pages: u32, each: u16, agreed: &Agreed) -> (TxQueue, BackTx, [Area; 2]) {
    let [ours, theirs] = page();
    let tx = TxQueue::new(ours, (100..100 + pages).collect(), each, agreed);
    let [.., raw] = [0, 1].map(|_| theirs.clone());
    (tx, BackTx::attach(theirs.clone()).unwrap(), [theirs, raw])
}

#[test]
fn a_long_frame_takes_a_slot_per_page_and_is_free_after_all_responses() {
    let (mut tx, mut back, _) = pair(34, 17, &ALL);
    for (hdr, kind) in [(TSO, gso_type::TCPV4), (TSO6, gso_type::TCPV6)] {
        tx.send(1, 100, 60_000, &hdr).unwrap();
        tx.publish();
        let mut packet = TxPacket::new();
        assert_eq!(back.take(&mut packet), Ok(Some(Packet::Frame)));
        assert_eq!((packet.len, packet.slots().len()), (60_000, 15));
        assert_eq!(packet.gso, Some(Gso { size: 1448, kind, features: 0 }));
        assert_eq!(packet.flags & 3, tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED);
        let first = packet.slots()[0];
        assert_eq!((first.gref, first.offset, first.len), (117, 100, 3996));
        assert!(packet.slots()[1..].iter().all(|slot| slot.offset == 0));
        let mut free = Vec::new();
        assert_eq!(tx.reclaim(&mut free), Ok(0));
        back.put(status::OKAY);
        back.publish();
        assert_eq!(tx.reclaim(&mut free), Ok(1));
        assert_eq!((free, tx.free_ids.len()), (vec![1], 256));
    }
}

#[test]
fn the_ring_is_filled_and_emptied_many_times_over() {
    let (mut tx, mut back, _) = pair(256, 1, &ALL);
    let mut free: Vec<u16> = (0..256).collect();
    let (mut packet, mut sent, mut seen) = (TxPacket::new(), 0, 0);
    for round in 0..2000 {
        for _ in 0..tx.frames_free().min(1 + round % 200) {
            tx.send(free.pop().unwrap(), 0, 60, &VnetHdr::NONE).unwrap();
            sent += 1;
        }
        tx.publish();
        while back.take(&mut packet).unwrap().is_some() {
            back.put(status::OKAY);
            seen += 1;
        }
        back.publish();
        tx.reclaim(&mut free).unwrap();
        assert_eq!((free.len(), seen), (256, sent));
    }
    assert_eq!((tx.errors, tx.dropped), (0, 0));
}

#[test]
fn frames_that_the_back_end_does_not_support_are_rejected() {
    let plain = Agreed { sg: false, gso_tcpv4: false, csum6: false, ..ALL };
    let (mut tx, mut back, _) = pair(17, 17, &plain);
    let blank = VnetHdr { gso_type: GSO_NONE, gso_size: 0, ..TSO };
    assert_eq!(tx.send(0, 0, 13, &VnetHdr::NONE), Err(Refused::Short));
    assert_eq!(tx.send(0, 0, 4097, &VnetHdr::NONE), Err(Refused::Long));
    assert_eq!(tx.send(0, 1, 4096, &VnetHdr::NONE), Err(Refused::Long));
    assert_eq!(tx.send(0, 0, 65_536, &VnetHdr::NONE), Err(Refused::Long));
    assert_eq!(tx.send(0, 0, 3000, &TSO), Err(Refused::Offload));
    assert_eq!(tx.send(0, 0, 3000, &blank), Err(Refused::Offload));
    tx.publish();
    assert_eq!(back.take(&mut TxPacket::new()), Ok(None));
    assert_eq!(tx.free_ids.len(), 256, "nothing is lost");
    let (mut tx, ..) = pair(17, 17, &ALL);
    for tso in [TSO, TSO6] {
        assert_eq!(tx.send(0, 0, 3000, &VnetHdr { gso_size: 0, ..tso }), Err(Refused::Offload));
        assert_eq!(tx.send(0, 0, 3000, &VnetHdr { flags: 0, ..tso }), Err(Refused::Offload));
    }
    assert_eq!(tx.send(0, 0, 3000, &blank), Ok(()));
    // A missing feature of one protocol does not affect the other.
    for (agreed, v4) in [
        (Agreed { gso_tcpv4: false, ..ALL }, true),
        (Agreed { csum4: false, ..ALL }, true),
        (Agreed { gso_tcpv6: false, ..ALL }, false),
        (Agreed { csum6: false, ..ALL }, false),
    ] {
        let (mut tx, ..) = pair(17, 17, &agreed);
        let (refused, sent) = if v4 { (TSO, TSO6) } else { (TSO6, TSO) };
        assert_eq!(tx.send(0, 0, 3000, &refused), Err(Refused::Offload), "{agreed:?}");
        assert_eq!(tx.send(0, 0, 3000, &sent), Ok(()), "{agreed:?}");
    }
}

#[test]
fn errors_of_the_back_end_are_counted_and_cost_no_buffer() {
    let (mut tx, mut back, _) = pair(2, 1, &ALL);
    let mut free = Vec::new();
    for (buffer, answer) in [(0, status::ERROR), (1, status::DROPPED)] {
        tx.send(buffer, 0, 60, &VnetHdr::NONE).unwrap();
        tx.publish();
        back.take(&mut TxPacket::new()).unwrap();
        back.put(answer);
        back.publish();
        assert_eq!(tx.reclaim(&mut free), Ok(1));
    }
    assert_eq!((tx.errors, tx.dropped, free), (1, 1, vec![0, 1]));
}

/// Offsets of `rsp_prod` and of the first slot (`io/ring.h`), and bytes of a slot.
const RSP_PROD: usize = 8;
const SLOTS: usize = 64;
const SLOT_LEN: usize = 12;

const MDNS: [u8; 6] = [1, 0, 0x5e, 0, 0, 0xfb];

#[test]
fn a_change_of_the_multicast_list_is_a_dummy_request_and_an_extra_info() {
    let (mut tx, mut back, [raw, _]) = pair(2, 1, &ALL);
    assert!(tx.change(Multicast::Add(MDNS)) && tx.change(Multicast::Del([0x33; 6])));
    tx.publish();
    let slot = |n: usize| [0, 4, 8].map(|at| raw.load_u32(SLOTS + SLOT_LEN * n + at));
    // netif_tx_request: gref, offset and flags (NETTXF_extra_info is 1 << 3), id and size.
    assert_eq!([slot(0), slot(2)], [[0, 8 << 16, 0], [0, 8 << 16, 1]]);
    // netif_extra_info: type 2 is MCAST_ADD and 3 is MCAST_DEL, flags, the address.
    assert_eq!(slot(1), [0x0001_0002, 0xfb00_005e, 0]);
    assert_eq!(slot(3), [0x3333_0003, 0x3333_3333, 0]);
    let mut packet = TxPacket::new();
    let add = Packet::Multicast(Multicast::Add(MDNS));
    assert_eq!((back.take(&mut packet), packet.ring_slots), (Ok(Some(add)), 2));
}

#[test]
fn responses_to_changes_report_refusals_and_are_not_frames() {
    let (mut tx, mut back, _) = pair(2, 1, &ALL);
    let mac = |n| [1, 0, 0x5e, 0, 0, n];
    let (mut free, mut packet) = (Vec::new(), TxPacket::new());
    assert!(!tx.is_changing());
    for (n, answer) in [(1, status::OKAY), (2, status::ERROR), (3, status::DROPPED)] {
        assert!(tx.change(Multicast::Add(mac(n))) && tx.change(Multicast::Del(mac(n))));
        tx.send(0, 0, 60, &VnetHdr::NONE).unwrap();
        tx.publish();
        for answer in [answer, status::ERROR, status::OKAY] {
            assert!(tx.is_changing() && back.take(&mut packet).unwrap().is_some());
            back.put(answer);
        }
        back.publish();
        assert_eq!(tx.reclaim(&mut free), Ok(1), "only the frame's buffer");
        assert!(!tx.is_changing());
    }
    assert_eq!((tx.errors, tx.dropped, tx.free_ids.len()), (0, 0, 256));
    assert_eq!((tx.take_refused(), tx.take_refused()), (vec![mac(2), mac(3)], vec![]));
    // NULL responses to both slots: the ring is abandoned, as with a frame.
    assert!(tx.change(Multicast::Add(MDNS)));
    tx.publish();
    assert!(back.take(&mut packet).unwrap().is_some());
    back.put(status::NULL);
    back.publish();
    assert_eq!(tx.reclaim(&mut free), Err(Malformed::NullResponse));
}

#[test]
fn changes_wait_for_room_on_the_ring() {
    let (mut tx, mut back, _) = pair(2, 1, &ALL);
    let mac = |n: u16| [1, 0, 0, 0, (n >> 8) as u8, n as u8];
    tx.send(1, 0, 60, &VnetHdr::NONE).unwrap();
    let sent = (0..500).take_while(|n| tx.change(Multicast::Add(mac(*n)))).count();
    assert_eq!((sent, tx.free_ids.len()), (127, 256 - 128), "two slots each");
    tx.publish();
    let mut packet = TxPacket::new();
    while back.take(&mut packet).unwrap().is_some() {
        back.put(status::OKAY);
    }
    back.publish();
    assert_eq!(tx.reclaim(&mut Vec::new()), Ok(1));
    assert!(tx.change(Multicast::Add(mac(999))) && tx.take_refused().is_empty());
}

#[test]
fn a_hostile_back_end_loses_the_ring() {
    for (rsp_prod, id, what) in [
        (2_u32, 255_u32, "more responses than requests"),
        (257, 255, "more responses than slots"),
        (u32::MAX, 255, "a decreasing index"),
        (1, 7, "an id that is not in flight"),
        (1, 0xffff, "an id outside the ring"),
    ] {
        let (mut tx, _, [raw, _]) = pair(2, 1, &ALL);
        tx.send(0, 0, 60, &VnetHdr::NONE).unwrap();
        tx.publish();
        raw.store_u32(SLOTS, id);
        raw.store_u32(RSP_PROD, rsp_prod);
        let mut free = Vec::new();
        assert!(tx.reclaim(&mut free).is_err(), "{what}");
        assert!(tx.reclaim(&mut free).is_err() && free.is_empty(), "{what}, permanently");
    }
}

/// There are more buffers than ids: a lost id would be noticed in the end.
#[test]
fn a_back_end_with_null_responses_loses_the_ring() {
    let (mut tx, _, [raw, _]) = pair(64 * 17, 17, &ALL);
    for buffer in 0..64_u32 {
        if tx.frames_free() == 0 {
            break;
        }
        tx.send(buffer as u16, 100, 60_000, &TSO).unwrap();
        tx.publish();
        let slots = 16 * (buffer + 1);
        (slots - 16..slots).for_each(|n| raw.store_u32(SLOTS + 12 * (n % 256) as usize, 1 << 16));
        raw.store_u32(RSP_PROD, slots);
        if let Err(fault) = tx.reclaim(&mut Vec::new()) {
            assert_eq!(fault, Malformed::NullResponse);
            return;
        }
    }
    panic!("the ring was not abandoned");
}
