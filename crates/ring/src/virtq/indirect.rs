//! Tables of indirect descriptors, as a driver has them for its chains.

use shm::{Area, GuestMemory};

use super::{Buf, DESC_LEN, DESC_NEXT, DESC_WRITE};

/// Memory for indirect tables: one table of `entries` descriptors for each ring descriptor.
pub struct IndirectPool {
    tables: Area,
    addr: u64,
    entries: u16,
}

impl IndirectPool {
    /// A pool at guest address `addr` for a ring of `size`; needs `size * entries * 16` bytes.
    pub fn new(memory: &GuestMemory, addr: u64, size: u16, entries: u16) -> Option<Self> {
        let len = usize::from(size) * usize::from(entries) * DESC_LEN;
        //= virtio-v1.3 2.7.5.3.1: a driver MUST NOT create a descriptor chain longer than the
        //= Queue Size of the device.
        Some(Self { tables: Area::new(memory, addr, len)?, addr, entries: entries.min(size) })
    }

    pub(super) fn fits(&self, bufs: &[Buf]) -> bool {
        bufs.len() <= usize::from(self.entries)
    }

    /// Writes the table of chain `i`; returns its guest address and its length in bytes.
    fn write(&self, i: u16, bufs: &[Buf], rest: impl Fn(u16, &Buf) -> u64) -> (u64, u32) {
        let start = usize::from(i) * usize::from(self.entries) * DESC_LEN;
        for (n, buf) in (0_u16..).zip(bufs) {
            let at = start + usize::from(n) * DESC_LEN;
            self.tables.store_u64(at, buf.addr);
            self.tables.store_u64(at + 8, u64::from(buf.len) | rest(n, buf));
        }
        let len = u32::try_from(bufs.len() * DESC_LEN).expect("at most 2^16 entries");
        (self.addr + u64::from(i) * u64::from(self.entries) * 16, len)
    }

    pub(super) fn write_split(&self, head: u16, bufs: &[Buf]) -> (u64, u32) {
        self.write(head, bufs, |n, buf| {
            let more = usize::from(n) + 1 < bufs.len();
            let flags = if more { DESC_NEXT } else { 0 } | if buf.write { DESC_WRITE } else { 0 };
            let next = if more { n + 1 } else { 0 };
            u64::from(flags) << 32 | u64::from(next) << 48
        })
    }

    pub(super) fn write_packed(&self, id: u16, bufs: &[Buf]) -> (u64, u32) {
        self.write(id, bufs, |_, buf| u64::from(if buf.write { DESC_WRITE } else { 0 }) << 48)
    }
}
