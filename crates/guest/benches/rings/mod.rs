//! Both halves of a vif's two rings, without ports and copies: what a frame costs in the rings.

use std::sync::Arc;

use ring::xen::{BackRx, BackTx, RxPacket, RxResponse, TxPacket, status};
use shm::{Area, Mapping};
use switch::vnet::VnetHdr;
use xen_netif::front::{Agreed, RxQueue, TxQueue};

use super::guests::{FRAMES, SLOTS};

const PAGE: usize = 4096;

/// A guest that sends, and one that receives.
pub struct Rings {
    tx: TxQueue,
    back_tx: BackTx,
    packet: TxPacket,
    rx: RxQueue,
    back_rx: BackRx,
    received: RxPacket,
    free: Vec<u16>,
}

impl Rings {
    pub fn new(agreed: &Agreed) -> Self {
        let page = |name: &str| Arc::new(Mapping::memfd(name, PAGE as u64).expect("memory"));
        let area = |page: &Arc<Mapping>| Area::of(page, 0, PAGE).expect("a page");
        let (to, from) = (page("tx"), page("rx"));
        let grefs: Vec<u32> = (8..8 + u32::from(SLOTS)).collect();
        let tx = TxQueue::new(area(&to), grefs.clone(), 1, agreed);
        let rx = RxQueue::new(area(&from), grefs);
        Self {
            back_tx: BackTx::attach(area(&to)).expect("a fresh ring"),
            back_rx: BackRx::attach(area(&from)).expect("a fresh ring"),
            tx,
            rx,
            packet: TxPacket::new(),
            received: RxPacket::new(),
            free: (0..SLOTS).collect(),
        }
    }

    /// Passes `count` frames of `len` bytes, or a few more: whole bursts.
    #[inline(never)]
    pub fn run_frames(&mut self, count: u64, len: u16) {
        for _ in 0..count.div_ceil(FRAMES as u64) {
            for _ in 0..FRAMES {
                let buffer = self.free.pop().expect("more buffers than frames");
                self.tx.send(buffer, 0, len.into(), &VnetHdr::NONE).expect("room");
            }
            self.tx.publish();
            self.back_rx.available().expect("well formed");
            while self.back_tx.take(&mut self.packet).expect("well formed").is_some() {
                let request = self.back_rx.take().expect("a buffer");
                let status = len.cast_signed();
                let response = RxResponse { id: request.id, offset: 0, flags: 0, status };
                self.back_rx.put(response);
                self.back_tx.put(status::OKAY);
            }
            self.back_rx.publish();
            self.back_tx.publish();
            self.tx.reclaim(&mut self.free).expect("well formed");
            while self.rx.take(&mut self.received, 1).expect("well formed") {
                for slot in &self.received.slots {
                    self.rx.post(slot.request.id);
                }
            }
            self.rx.publish();
        }
    }
}
