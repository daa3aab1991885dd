//! A ring in the test's own memory, written directly, as a hostile peer would.
#![allow(dead_code, clippy::as_conversions)]

use std::sync::Arc;

use ring::virtq::{Buf, DeviceQueue, DriverQueue, Features, Layout};
use shm::{Area, GuestMemory, Mapping, Region};

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
pub const AVAIL: u16 = 1 << 7;
pub const USED: u16 = 1 << 15;

pub const SPLIT: Features =
    Features { packed: false, event_idx: false, indirect: true, in_order: false };
pub const PACKED: Features = Features { packed: true, ..SPLIT };

/// Start and length of guest memory.
pub const BASE: u64 = 0x1_0000;
pub const LEN: u64 = 1 << 20;
/// Address of a test's indirect tables.
pub const TABLE: u64 = BASE + 0x8_0000;
/// Base of a fresh packed ring: slot 0, wrap 1, on both sides.
pub const FRESH: u32 = 0x8000_8000;

/// One region of memory at `guest_addr`, which starts at `offset` of its mapping.
pub fn memory_at(guest_addr: u64, offset: u64) -> GuestMemory {
    let mapping = Arc::new(Mapping::memfd("ring", LEN + offset).unwrap());
    let region = Region { guest_addr, user_addr: guest_addr, len: LEN, offset, mapping };
    GuestMemory::new(vec![region]).unwrap()
}

/// A ring of `size` and everything a peer can reach of it.
pub struct Raw {
    pub memory: GuestMemory,
    pub layout: Layout,
    pub all: Area,
}

impl Raw {
    pub fn new(size: u16) -> Self {
        let memory = memory_at(BASE, 0);
        let layout = Layout { size, desc: BASE, driver: BASE + 0x1_0000, device: BASE + 0x2_0000 };
        let all = Area::new(&memory, BASE, LEN as usize).unwrap();
        Self { memory, layout, all }
    }

    pub fn device(&self, features: Features, base: u32) -> DeviceQueue {
        DeviceQueue::new(&self.memory, &self.layout, features, base).unwrap()
    }

    pub fn driver(&self, features: Features, base: u32) -> DriverQueue {
        DriverQueue::new(&self.memory, &self.layout, features, base, None).unwrap()
    }

    fn at(&self, addr: u64) -> usize {
        (addr - BASE) as usize
    }

    pub fn set16(&self, addr: u64, value: u16) {
        self.all.store_u16(self.at(addr), value);
    }

    pub fn set32(&self, addr: u64, value: u32) {
        self.all.store_u32(self.at(addr), value);
    }

    pub fn set64(&self, addr: u64, value: u64) {
        self.all.store_u64(self.at(addr), value);
    }

    pub fn get16(&self, addr: u64) -> u16 {
        self.all.load_u16(self.at(addr))
    }

    /// A split descriptor: entry `i` of the table at `table`.
    pub fn split_desc(&self, table: u64, i: u16, buf: (u64, u32), flags: u16, next: u16) {
        let at = table + 16 * u64::from(i);
        self.set64(at, buf.0);
        self.set32(at + 8, buf.1);
        self.set16(at + 12, flags);
        self.set16(at + 14, next);
    }

    /// A packed descriptor: entry `i` of the table at `table`.
    pub fn packed_desc(&self, table: u64, i: u16, buf: (u64, u32), id: u16, flags: u16) {
        let at = table + 16 * u64::from(i);
        self.set64(at, buf.0);
        self.set32(at + 8, buf.1);
        self.set16(at + 12, id);
        self.set16(at + 14, flags);
    }

    /// Puts `heads` into the available ring from free-running index `from` on, and publishes.
    pub fn avail(&self, from: u16, heads: &[u16]) {
        let mut idx = from;
        for head in heads {
            let slot = u64::from(idx % self.layout.size);
            self.set16(self.layout.driver + 4 + 2 * slot, *head);
            idx = idx.wrapping_add(1);
        }
        self.avail_idx(idx);
    }

    pub fn avail_idx(&self, idx: u16) {
        self.set16(self.layout.driver + 2, idx);
    }

    /// Puts an element into the used ring at free-running index `idx`, and publishes `idx + 1`.
    pub fn used(&self, idx: u16, id: u32, len: u32) {
        let at = self.layout.device + 4 + 8 * u64::from(idx % self.layout.size);
        self.set32(at, id);
        self.set32(at + 4, len);
        self.used_idx(idx.wrapping_add(1));
    }

    pub fn used_idx(&self, idx: u16) {
        self.set16(self.layout.device + 2, idx);
    }
}

pub fn readable(addr: u64, len: u32) -> Buf {
    Buf { addr, len, write: false }
}

pub fn writable(addr: u64, len: u32) -> Buf {
    Buf { addr, len, write: true }
}
