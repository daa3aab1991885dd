//! Audit of double fetches on Xen rings: no byte of a slot or index is loaded more than once while
//! one packet, valid or not, is taken (XSA-155); returning it reads nothing.
//!
//! `cargo test -p pvswitch-ring --features audit --test audit_xen`
#![allow(clippy::as_conversions)]

#[path = "common/xen.rs"]
mod common;

use std::collections::BTreeMap;

use common::{RSP_PROD, Raw, START};
use proptest::prelude::*;
use ring::xen::{
    BackCtrl, BackTx, CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, FrontCtrl, FrontRx, FrontTx,
    RxPacket, RxRequest, RxResponse, TxPacket, TxRequest, status,
};
use shm::audit;

fn assert_once(loads: &BTreeMap<usize, usize>, what: &str) {
    assert!(!loads.is_empty(), "{what}: nothing was loaded, so nothing was audited");
    let twice: Vec<_> = loads.iter().filter(|(_, n)| **n > 1).collect();
    assert!(twice.is_empty(), "{what}: bytes loaded more than once (address, times): {twice:x?}");
}

#[test]
fn the_audit_sees_a_double_fetch() {
    let raw = Raw::tx(8);
    audit::begin();
    let _ = (raw.words(0), raw.words(0));
    assert!(audit::end().values().all(|n| *n == 2));
}

#[test]
fn packet_with_extras_and_later_buffers_is_fetched_once() {
    let raw = Raw::tx(16);
    let mut back = raw.back_tx();
    let request = |flags, size| TxRequest { gref: 1, offset: 0, flags, id: 1, size };
    raw.request(0, request(4 | 8, 900));
    raw.extra(1, 1, true, [0xb8, 5, 1, 0, 0, 0]);
    raw.extra(2, 4, false, [0; 6]);
    raw.request(3, request(4, 300));
    raw.request(4, request(0, 300));
    raw.requests(5);
    let mut packet = TxPacket::new();
    audit::begin();
    let taken = back.take(&mut packet);
    let loads = audit::end();
    assert!(taken.unwrap().is_some());
    assert_once(&loads, "packet");
    // 8 bytes of an extra info are read; `req_prod` is 4 more.
    assert_eq!(loads.len(), 3 * 12 + 2 * 8 + 4);
    audit::begin();
    back.put(status::OKAY);
    back.publish();
    assert!(audit::end().is_empty(), "responding reads nothing that the front half may write");
}

#[test]
fn rx_and_ctrl_requests_are_fetched_once() {
    let raw = Raw::rx(8);
    let mut front = FrontRx::starting_at(raw.area.clone(), START);
    let mut back = raw.back_rx();
    assert!(front.post(RxRequest { id: 1, gref: 2 }));
    front.publish();
    audit::begin();
    assert_eq!(back.available(), Ok(1));
    assert!(back.take().is_some());
    assert_once(&audit::end(), "rx request");
    audit::begin();
    back.put(RxResponse { id: 1, offset: 0, flags: 0, status: 60 });
    back.publish();
    assert!(audit::end().is_empty());
    audit::begin();
    assert_eq!(front.take(&mut RxPacket::new()), Ok(Some(Ok(()))));
    assert_once(&audit::end(), "rx response");

    let raw = Raw::new(8, CTRL_SLOT_LEN);
    let mut front = FrontCtrl::starting_at(raw.area.clone(), START);
    let mut back = BackCtrl::attach(raw.area.clone()).unwrap();
    assert!(front.put(CtrlRequest::default()));
    front.publish();
    audit::begin();
    assert!(back.take().unwrap().is_some());
    assert_once(&audit::end(), "ctrl request");
    audit::begin();
    back.put(CtrlResponse::default());
    back.publish();
    assert!(audit::end().is_empty());
    audit::begin();
    assert!(front.take().unwrap().is_some());
    assert_once(&audit::end(), "ctrl response");
}

#[test]
fn tx_responses_are_fetched_once() {
    let raw = Raw::tx(8);
    let mut front = FrontTx::starting_at(raw.area.clone(), START);
    let mut back = BackTx::attach(raw.area.clone()).unwrap();
    assert!(front.add(TxRequest { size: 60, ..TxRequest::default() }, &[], &[]));
    front.publish();
    assert!(back.take(&mut TxPacket::new()).unwrap().is_some());
    back.put(status::OKAY);
    back.publish();
    audit::begin();
    assert!(front.take_response().unwrap().is_some());
    assert_once(&audit::end(), "tx response");
}

proptest! {
    /// Any slots at all, of either ring.
    #[test]
    fn whatever_lies_in_the_slots_is_fetched_once(
        slots in prop::collection::vec((any::<[u16; 2]>(), 0..16_u16, 0..5000_u16), 32),
        n in 1..=32_u32,
    ) {
        let raw = Raw::tx(32);
        let mut back = raw.back_tx();
        for (i, ([gref, offset], flags, size)) in (0..).zip(&slots) {
            let (gref, offset, id) = (u32::from(gref & 0x305), offset % 100, i as u16);
            raw.request(i, TxRequest { gref, offset, flags: *flags, id, size: *size });
        }
        raw.requests(n);
        audit::begin();
        let _ = back.take(&mut TxPacket::new());
        assert_once(&audit::end(), "tx");

        let raw = Raw::rx(32);
        let mut front = FrontRx::starting_at(raw.area.clone(), START);
        for i in 0..32 {
            let posted = front.post(RxRequest { id: i, gref: 0 });
            prop_assert!(posted);
        }
        front.publish();
        for (i, ([a, _], flags, size)) in (0..).zip(&slots) {
            let words = [a & 0x305, *size % 64, *flags, *size];
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            raw.bytes(i, &bytes);
        }
        raw.set(RSP_PROD, START.wrapping_add(n));
        audit::begin();
        let _ = front.take(&mut RxPacket::new());
        assert_once(&audit::end(), "rx");
    }
}
