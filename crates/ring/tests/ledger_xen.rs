//! A back half of Xen's rings that is killed between any two of its stores: its successor continues
//! from the ledger, and the front half gets each response once, to its own request.
#![allow(clippy::as_conversions)]

use std::sync::Arc;

use proptest::prelude::*;
use ring::xen::{
    BackRx, BackTx, FrontRx, FrontTx, Ledger, Packet, RX_SLOT_LEN, RxPacket, RxRequest, RxResponse,
    TX_SLOT_LEN, TxPacket, TxRequest, status,
};
use shm::{Area, Mapping};

/// Offset of `rsp_prod`, and of the first slot.
const RSP_PROD: usize = 8;
const SLOTS: usize = 64;

fn area(len: usize) -> Area {
    let mapping = Arc::new(Mapping::memfd("ring", len as u64).unwrap());
    Area::of(&mapping, 0, len).unwrap()
}

fn ledger() -> (Area, Ledger) {
    let memory = area(4096);
    (memory.clone(), Ledger::new(memory).unwrap())
}

/// A page before a burst was published, to undo the last stores.
struct Before(Vec<u32>);

impl Before {
    fn of(page: &Area) -> Self {
        Self((0..1024).map(|i| page.load_u32(i * 4)).collect())
    }

    /// Leaves of the burst only its first `slots` slots, of `len` bytes, from `first` on.
    fn undo(&self, page: &Area, first: u32, slots: u32, len: usize) {
        let written = (0..slots).map(|i| SLOTS + (first.wrapping_add(i) % 256) as usize * len);
        let written: Vec<_> = written.flat_map(|at| (at..at + len).step_by(4)).collect();
        for (i, word) in self.0.iter().enumerate() {
            if i * 4 >= RSP_PROD && !written.contains(&(i * 4)) {
                page.store_u32(i * 4, *word);
            }
        }
    }
}

fn add(front: &mut FrontTx, id: u16, slots: usize) -> bool {
    let first = TxRequest { gref: 100 + u32::from(id), id, size: 60, ..TxRequest::default() };
    let more: Vec<_> = (1..slots as u16)
        .map(|n| TxRequest { id: id + n, gref: 7, size: 8, offset: 0, flags: 0 })
        .collect();
    let first = TxRequest { size: 60 + 8 * more.len() as u16, ..first };
    front.add(first, &[], &more)
}

proptest! {
    /// `left`: slots of the last burst that were written, of those that its packets have; or none,
    /// and not even the word.
    #[test]
    fn tx_requests_are_answered_once(
        start in prop_oneof![Just(0_u32), Just(u32::MAX - 3), any::<u32>()],
        bursts in prop::collection::vec(prop::collection::vec(1_usize..4, 1..8), 1..6),
        left in prop::option::of(0_u32..24),
        published in any::<bool>(),
        scribbles in prop::option::of(any::<u32>()),
    ) {
        let page = area(4096);
        let mut front = FrontTx::starting_at(page.clone(), start);
        let mut back = BackTx::attach(page.clone()).unwrap();
        let (memory, ledger) = ledger();
        back.keep(ledger.clone());
        let (mut sent, mut answered, mut id) = (Vec::new(), Vec::new(), 0_u16);
        let mut packet = TxPacket::new();
        let last = bursts.len() - 1;
        for (n, burst) in bursts.into_iter().enumerate() {
            for slots in burst {
                prop_assert!(add(&mut front, id, slots));
                sent.extend(id..id + slots as u16);
                id += slots as u16;
            }
            front.publish();
            let (before, word) = (Before::of(&page), memory.load_u64(0));
            let first = back.position();
            let mut taken = 0;
            while let Some(kind) = back.take(&mut packet).unwrap() {
                prop_assert!(matches!(kind, Packet::Frame));
                taken += packet.ring_slots;
                back.put(status::OKAY);
            }
            back.publish();
            if n == last && !published {
                before.undo(&page, first, left.unwrap_or(0).min(taken), TX_SLOT_LEN);
                if left.is_none() {
                    memory.store_u64(0, word);
                }
            } else {
                while let Some(response) = front.take_response().unwrap() {
                    answered.push(response.id);
                }
            }
        }
        if let Some(scribbled) = scribbles.filter(|_| !published) {
            page.store_u32(RSP_PROD, scribbled);
        }
        let at = ledger.recover(page.clone(), TX_SLOT_LEN).unwrap();
        let mut back = BackTx::attach_at(page, at).unwrap();
        back.keep(ledger);
        // A burst that was not given yet is taken again, as it was requested.
        while let Some(kind) = back.take(&mut packet).unwrap() {
            prop_assert!(matches!(kind, Packet::Frame));
            prop_assert!(packet.slots()[0].gref >= 100);
            back.put(status::OKAY);
        }
        back.publish();
        if scribbles.is_some() && !published && left.is_none() {
            // The guest's own index misled it; ours did not.
            return Ok(());
        }
        while let Some(response) = front.take_response().unwrap() {
            prop_assert_eq!(response.status, status::OKAY);
            answered.push(response.id);
        }
        prop_assert_eq!(answered, sent);
    }

    #[test]
    fn rx_requests_are_answered_once(
        start in prop_oneof![Just(0_u32), Just(u32::MAX - 3), any::<u32>()],
        frames in 1_u32..9,
        left in prop::option::of(0_u32..9),
    ) {
        let page = area(4096);
        let mut front = FrontRx::starting_at(page.clone(), start);
        let mut back = BackRx::attach(page.clone()).unwrap();
        let (memory, ledger) = ledger();
        back.keep(ledger.clone());
        for id in 0..16 {
            let posted = front.post(RxRequest { id, gref: 100 + u32::from(id) });
            prop_assert!(posted);
        }
        front.publish();
        let (before, word) = (Before::of(&page), memory.load_u64(0));
        let first = back.position();
        let deliver = |back: &mut BackRx, frames: u32| {
            back.available().unwrap();
            for _ in 0..frames {
                let request = back.take().unwrap();
                assert_eq!(request.gref, 100 + u32::from(request.id), "not a response");
                back.put(RxResponse { id: request.id, offset: 0, flags: 0, status: 60 });
            }
            back.publish();
        };
        deliver(&mut back, frames);
        before.undo(&page, first, left.unwrap_or(0).min(frames), RX_SLOT_LEN);
        if left.is_none() {
            memory.store_u64(0, word);
        }
        let at = ledger.recover(page.clone(), RX_SLOT_LEN).unwrap();
        let given = if left.is_none() { 0 } else { frames };
        prop_assert_eq!(at, first.wrapping_add(given));
        let mut back = BackRx::attach_at(page, at).unwrap();
        deliver(&mut back, 16 - given);
        let (mut packet, mut got) = (RxPacket::new(), 0);
        while let Some(taken) = front.take(&mut packet).unwrap() {
            prop_assert!(taken.is_ok());
            got += 1;
        }
        prop_assert_eq!(got, 16);
    }
}

#[test]
fn ledger_of_another_ring_is_refused() {
    let page = area(4096);
    let _front = FrontTx::new(page.clone());
    let (memory, ledger) = ledger();
    assert_eq!(ledger.recover(page.clone(), TX_SLOT_LEN), None, "never started");
    let mut back = BackTx::attach(page.clone()).unwrap();
    back.keep(ledger.clone());
    assert_eq!(ledger.recover(page.clone(), TX_SLOT_LEN), Some(0));
    memory.store_u64(0, 300 << 32);
    assert_eq!(ledger.recover(page, TX_SLOT_LEN), None, "further than the ring is long");
    assert!(Ledger::new(area(256)).is_none());
}
