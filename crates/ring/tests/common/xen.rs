//! A Xen ring's page in the test's own memory, written directly, as a hostile peer would.
#![allow(dead_code, clippy::as_conversions)]

use std::sync::Arc;

use ring::xen::{BackRx, BackTx, RX_SLOT_LEN, TX_SLOT_LEN, TxRequest};
use shm::sync::Ordering;
use shm::{Area, Mapping};

pub const REQ_PROD: usize = 0;
pub const REQ_EVENT: usize = 4;
pub const RSP_PROD: usize = 8;
pub const RSP_EVENT: usize = 12;
pub const SLOTS: usize = 64;
/// Start of most tests: just before the wrap.
pub const START: u32 = u32::MAX - 2;

/// A zeroed ring of `slots` slots.
pub fn area(slots: usize, slot_len: usize) -> Area {
    let mapping = Arc::new(Mapping::memfd("ring", 8192).unwrap());
    Area::of(&mapping, 0, SLOTS + slots * slot_len).unwrap()
}

/// Direct access to a ring's page, bypassing both halves.
pub struct Raw {
    pub area: Area,
    pub size: u32,
    slot_len: usize,
}

impl Raw {
    /// A ring of `size` tx slots whose indices are all at [`START`].
    pub fn tx(size: u32) -> Self {
        Self::new(size, TX_SLOT_LEN)
    }

    /// Creates a ring of rx slots.
    pub fn rx(size: u32) -> Self {
        Self::new(size, RX_SLOT_LEN)
    }

    pub fn new(size: u32, slot_len: usize) -> Self {
        let raw = Self { area: area(size as usize, slot_len), size, slot_len };
        raw.set(REQ_PROD, START);
        raw.set(RSP_PROD, START);
        raw
    }

    pub fn back_tx(&self) -> BackTx {
        BackTx::attach(self.area.clone()).unwrap()
    }

    pub fn back_rx(&self) -> BackRx {
        BackRx::attach(self.area.clone()).unwrap()
    }

    pub fn set(&self, at: usize, value: u32) {
        self.area.sync_store_u32(at, value, Ordering::Release);
    }

    pub fn get(&self, at: usize) -> u32 {
        self.area.sync_load_u32(at, Ordering::Acquire)
    }

    /// Offset of the `n`th slot after [`START`].
    pub fn slot(&self, n: u32) -> usize {
        SLOTS + (START.wrapping_add(n) & (self.size - 1)) as usize * self.slot_len
    }

    pub fn bytes(&self, n: u32, bytes: &[u8]) {
        let at = self.slot(n);
        for (i, word) in bytes.chunks(4).enumerate() {
            self.area.store_u32(at + 4 * i, u32::from_le_bytes(word.try_into().unwrap()));
        }
    }

    /// The words of the `n`th slot.
    pub fn words(&self, n: u32) -> Vec<u32> {
        (0..self.slot_len / 4).map(|i| self.area.load_u32(self.slot(n) + 4 * i)).collect()
    }

    /// A tx request, byte for byte.
    pub fn request(&self, n: u32, r: TxRequest) {
        let mut bytes = r.gref.to_le_bytes().to_vec();
        for half in [r.offset, r.flags, r.id, r.size] {
            bytes.extend(half.to_le_bytes());
        }
        self.bytes(n, &bytes);
    }

    /// An extra info: type, flags, and what depends on the type.
    pub fn extra(&self, n: u32, kind: u8, more: bool, rest: [u8; 6]) {
        let mut bytes = vec![kind, u8::from(more)];
        bytes.extend(rest);
        self.bytes(n, &bytes);
    }

    /// Publishes requests up to the `n`th.
    pub fn requests(&self, n: u32) {
        self.set(REQ_PROD, START.wrapping_add(n));
    }

    /// Publishes responses up to the `n`th.
    pub fn responses(&self, n: u32) {
        self.set(RSP_PROD, START.wrapping_add(n));
    }
}
