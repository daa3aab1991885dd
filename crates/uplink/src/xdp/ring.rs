//! The rings that an AF_XDP socket shares with the kernel: index arithmetic, no system call.
//!
//! ```text
//!   fill         us ──── free chunks ───▶ kernel        entry: address
//!   RX           us ◀─── frames ───────── kernel        entry: address, length, options
//!   TX           us ──── frames ────────▶ kernel        entry: address, length, options
//!   completion   us ◀─── free chunks ──── kernel        entry: address
//!
//!   consumer ≤ producer ≤ consumer + len: both count freely, and wrap; an entry's slot is its
//!   index modulo `len`, a power of two.
//! ```
//!
//! The kernel's words have the machine's byte order, which is that of [`Area`] on all machines that
//! pvswitch supports. The kernel is trusted with the indices; that of its half is bounded all the
//! same, so that no loop exceeds the ring.

use rustix::net::xdp::{XdpRingFlags, XdpRingOffset};
use shm::Area;
use shm::sync::{Ordering, fence};

const _: () = assert!(cfg!(target_endian = "little"));

/// Bytes of an address, in the fill and completion rings.
pub(super) const ADDRESS_LEN: usize = 8;
/// Bytes of a descriptor, in the RX and TX rings.
pub(super) const DESC_LEN: usize = 16;

/// A frame in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Desc {
    /// Offset of its first byte in the UMEM.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// One ring: its memory, and where its words are.
struct Ring {
    area: Area,
    at: XdpRingOffset,
    /// Number of entries.
    len: u32,
}

impl Ring {
    fn new(area: Area, at: XdpRingOffset, len: u32) -> Self {
        assert!(len.is_power_of_two(), "the kernel accepts nothing else");
        Self { area, at, len }
    }

    /// Offset of the entry of index `idx`, of `size` bytes.
    fn entry(&self, idx: u32, size: usize) -> usize {
        self.at.desc as usize + (idx & (self.len - 1)) as usize * size
    }

    fn producer(&self) -> u32 {
        // Pairs with the release store of `Producer::publish`, of either half.
        self.area.sync_load_u32(self.at.producer as usize, Ordering::Acquire)
    }

    fn consumer(&self) -> u32 {
        // Pairs with the release store of `Consumer::release`, of either half.
        self.area.sync_load_u32(self.at.consumer as usize, Ordering::Acquire)
    }
}

/// Bytes of the memory of a ring with `len` entries of `size` bytes.
pub(super) fn bytes(at: &XdpRingOffset, len: u32, size: usize) -> u64 {
    at.desc + u64::from(len) * size as u64
}

/// The half that adds entries.
pub(super) struct Producer {
    ring: Ring,
    /// Index of the next entry; those before it are published up to the last [`publish`].
    ///
    /// [`publish`]: Self::publish
    next: u32,
    /// The other half's index, as last read.
    seen: u32,
}

impl Producer {
    /// Continues the ring of `len` entries in `area` at its published index.
    pub(super) fn new(area: Area, at: XdpRingOffset, len: u32) -> Self {
        let mut ring = Self { ring: Ring::new(area, at, len), next: 0, seen: 0 };
        ring.resync();
        ring
    }

    /// Forgets what is not published, and reads both indices again: another process has used it.
    pub(super) fn resync(&mut self) {
        self.next = self.ring.producer();
        self.seen = self.ring.consumer();
    }

    /// Number of entries that can be added; reads the other half's index if there are fewer than
    /// `wanted` by the last one.
    pub(super) fn room(&mut self, wanted: u32) -> u32 {
        let used = self.next.wrapping_sub(self.seen);
        if self.ring.len.saturating_sub(used) < wanted {
            self.seen = self.ring.consumer();
        }
        self.ring.len.saturating_sub(self.next.wrapping_sub(self.seen))
    }

    /// Adds a chunk's address. There must be [room](Self::room).
    pub(super) fn put_address(&mut self, addr: u64) {
        debug_assert!(self.next.wrapping_sub(self.seen) < self.ring.len, "there is room");
        self.ring.area.store_u64(self.ring.entry(self.next, ADDRESS_LEN), addr);
        self.next = self.next.wrapping_add(1);
    }

    /// Adds a frame. There must be [room](Self::room).
    pub(super) fn put_desc(&mut self, desc: Desc) {
        debug_assert!(self.next.wrapping_sub(self.seen) < self.ring.len, "there is room");
        let at = self.ring.entry(self.next, DESC_LEN);
        self.ring.area.store_u64(at, desc.addr);
        self.ring.area.store_u32(at + 8, desc.len);
        self.ring.area.store_u32(at + 12, 0);
        self.next = self.next.wrapping_add(1);
    }

    /// Shows all added entries to the other half.
    pub(super) fn publish(&mut self) {
        let at = self.ring.at.producer as usize;
        self.ring.area.sync_store_u32(at, self.next, Ordering::Release);
    }

    /// After [`publish`](Self::publish): whether the kernel is to be called before it takes the
    /// entries. One that has no flag for it is always called.
    pub(super) fn needs_wakeup(&self) -> bool {
        // The index is visible /before/ the flag is read: the kernel sets the flag and then checks
        // the index once more, or is called.
        fence(Ordering::SeqCst);
        self.ring.at.flags.is_none_or(|at| {
            let flags = self.ring.area.load_u32(at as usize);
            flags & XdpRingFlags::XDP_RING_NEED_WAKEUP.bits() != 0
        })
    }

    /// Index up to which the other half has taken entries.
    pub(super) fn taken(&self) -> u32 {
        self.ring.consumer()
    }

    /// Number of entries that the other half has not taken, unpublished ones included.
    pub(super) fn untaken(&mut self) -> u32 {
        self.seen = self.ring.consumer();
        self.next.wrapping_sub(self.seen).min(self.ring.len)
    }
}

/// The half that takes entries.
pub(super) struct Consumer {
    ring: Ring,
    /// Index of the first entry that was not released.
    next: u32,
    /// The other half's index, as last read.
    seen: u32,
}

impl Consumer {
    /// Continues the ring of `len` entries in `area` at its released index.
    pub(super) fn new(area: Area, at: XdpRingOffset, len: u32) -> Self {
        let mut ring = Self { ring: Ring::new(area, at, len), next: 0, seen: 0 };
        ring.resync();
        ring
    }

    /// Reads both indices again: another process has used it.
    pub(super) fn resync(&mut self) {
        self.next = self.ring.consumer();
        self.seen = self.next;
    }

    /// Number of entries to take, at most `max`; reads the other half's index if there are fewer
    /// by the last one.
    pub(super) fn available(&mut self, max: u32) -> u32 {
        if self.seen.wrapping_sub(self.next) < max {
            self.seen = self.ring.producer();
        }
        self.seen.wrapping_sub(self.next).min(self.ring.len).min(max)
    }

    /// The address in the `i`th of the [available](Self::available) entries.
    pub(super) fn address(&self, i: u32) -> u64 {
        let at = self.ring.entry(self.next.wrapping_add(i), ADDRESS_LEN);
        self.ring.area.load_u64(at)
    }

    /// The frame in the `i`th of the [available](Self::available) entries.
    pub(super) fn desc(&self, i: u32) -> Desc {
        let at = self.ring.entry(self.next.wrapping_add(i), DESC_LEN);
        let addr = self.ring.area.load_u64(at);
        Desc { addr, len: self.ring.area.load_u32(at + 8) }
    }

    /// Returns the first `n` entries to the other half, which may use their slots again.
    pub(super) fn release(&mut self, n: u32) {
        self.next = self.next.wrapping_add(n);
        let at = self.ring.at.consumer as usize;
        self.ring.area.sync_store_u32(at, self.next, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "ring/tests.rs"]
mod tests;
