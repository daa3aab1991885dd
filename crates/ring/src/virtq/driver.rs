//! Driver half: what a NIC driver does. `nic`, `gen`, tests, fuzzers and the lab use it.

use shm::{Area, GuestMemory};

use super::packed::{self, PackedDriver};
use super::split::{self, SplitDriver};
use super::{
    Armed, Buf, DESC_LEN, DESC_NEXT, DESC_WRITE, Features, Layout, LayoutError, Malformed, Used,
};

/// Driver half of one virtqueue, split or packed. It trusts the device no further than the device
/// trusts it: lengths and ids from the ring are checked against private records.
pub struct DriverQueue(Kind);

enum Kind {
    Split(SplitDriver),
    Packed(PackedDriver),
}

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

impl DriverQueue {
    /// Initialises a ring at `layout` in memory of ours, starting from `base` (the same value the
    /// device is given, see [`DeviceQueue::new`](super::DeviceQueue::new)).
    ///
    /// # Errors
    /// [`LayoutError`] when size, address, alignment or base are not legal.
    pub fn new(
        memory: &GuestMemory,
        layout: &Layout,
        features: Features,
        base: u32,
        indirect: Option<IndirectPool>,
    ) -> Result<Self, LayoutError> {
        let indirect = indirect.filter(|_| features.indirect);
        if features.packed {
            return Self::packed(packed::Parts::new(memory, layout)?, features, base, indirect);
        }
        Self::split(split::Parts::new(memory, layout, features)?, features, base, indirect)
    }

    /// The driver half of a ring in a loom model.
    ///
    /// # Errors
    /// [`LayoutError::Base`].
    #[cfg(loom)]
    pub fn modelled(
        ring: &super::ModelledRing,
        features: Features,
        base: u32,
    ) -> Result<Self, LayoutError> {
        if features.packed {
            return Self::packed(packed::Parts::modelled(ring), features, base, None);
        }
        Self::split(split::Parts::modelled(ring), features, base, None)
    }

    fn packed(
        parts: packed::Parts,
        features: Features,
        base: u32,
        indirect: Option<IndirectPool>,
    ) -> Result<Self, LayoutError> {
        Ok(Self(Kind::Packed(PackedDriver::new(parts, features, base, indirect)?)))
    }

    fn split(
        parts: split::Parts,
        features: Features,
        base: u32,
        indirect: Option<IndirectPool>,
    ) -> Result<Self, LayoutError> {
        let start = u16::try_from(base).map_err(|_| LayoutError::Base(base))?;
        Ok(Self(Kind::Split(SplitDriver::new(parts, features, start, indirect))))
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.0 {
            Kind::Split(q) => q.size(),
            Kind::Packed(q) => q.size(),
        }
    }

    /// Descriptors not in flight.
    pub fn free(&self) -> u16 {
        match &self.0 {
            Kind::Split(q) => q.free(),
            Kind::Packed(q) => q.free(),
        }
    }

    /// Makes one chain of `bufs` (reads first) and returns its id, smaller than the ring's size;
    /// `None` when the ring lacks room. Not visible before [`publish`](Self::publish).
    #[inline]
    pub fn add(&mut self, bufs: &[Buf]) -> Option<u16> {
        match &mut self.0 {
            Kind::Split(q) => q.add(bufs),
            Kind::Packed(q) => q.add(bufs),
        }
    }

    /// Makes every chain added so far visible to the device.
    #[inline]
    pub fn publish(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.publish(),
            Kind::Packed(q) => q.publish(),
        }
    }

    /// Whether the device wants a kick for what was published since this was last asked.
    #[inline]
    #[must_use]
    pub fn kick_needed(&mut self) -> bool {
        match &mut self.0 {
            Kind::Split(q) => q.kick_needed(),
            Kind::Packed(q) => q.kick_needed(),
        }
    }

    /// Appends up to about `max` used chains to `out` (a batch of an in-order device is not cut)
    /// and returns how many.
    ///
    /// # Errors
    /// [`Malformed`]: the device broke the protocol; the ring is to be abandoned.
    #[inline]
    pub fn take_used(&mut self, max: usize, out: &mut Vec<Used>) -> Result<usize, Malformed> {
        match &mut self.0 {
            Kind::Split(q) => q.take_used(max, out),
            Kind::Packed(q) => q.take_used(max, out),
        }
    }

    /// Whether [`repeat`](Self::repeat) can be called: the ring is split, and as many chains are in
    /// flight as it has entries.
    pub fn can_repeat(&self) -> bool {
        match &self.0 {
            Kind::Split(q) => q.is_repeatable(),
            Kind::Packed(_) => false,
        }
    }

    /// In place of taking used chains and adding them again: makes all of them available as they
    /// are, without a look at which they were; how many. Visible at [`publish`](Self::publish).
    /// It costs a load and a store, for guests that are to take no CPU while a device is
    /// measured. A device that does not use chains in order is given some of them twice.
    ///
    /// # Errors
    /// [`Malformed::IndexJump`]: as of [`take_used`](Self::take_used).
    ///
    /// # Panics
    /// Unless [`can_repeat`](Self::can_repeat).
    pub fn repeat(&mut self) -> Result<u16, Malformed> {
        match &mut self.0 {
            Kind::Split(q) => q.repeat(),
            Kind::Packed(_) => panic!("a packed ring's used elements lie where its chains did"),
        }
    }

    /// Asks for a call at the next used chain, and looks a last time. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm(),
            Kind::Packed(q) => q.arm(),
        }
    }

    /// As [`arm`](Self::arm), but asks for a call only once `n` more chains are used, of those in
    /// flight. A ring that cannot say that (no event index; packed, and IN_ORDER or some chain of
    /// several descriptors) asks for one at the next, so whoever is woken looks again whether it
    /// is time.
    pub fn arm_after(&mut self, n: u16) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm_after(n.max(1)),
            Kind::Packed(q) => q.arm_after(n.max(1)),
        }
    }

    /// Does without the checks of used elements that only find a device's mistakes: that a chain
    /// is in flight, and that no more was written to it than it holds, which the caller must then
    /// bound. A device that errs makes the driver mix up buffers, all of which it has shared.
    /// A packed ring finds its position through these checks and keeps them.
    pub fn trust_device(&mut self) {
        if let Kind::Split(q) = &mut self.0 {
            q.trust_device();
        }
    }

    /// Asks for no calls: the ring is being polled.
    pub fn disarm(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.disarm(),
            Kind::Packed(q) => q.disarm(),
        }
    }

    /// Whether there are used chains. One load.
    #[inline]
    pub fn has_used(&self) -> bool {
        match &self.0 {
            Kind::Split(q) => q.has_used(),
            Kind::Packed(q) => q.has_used(),
        }
    }

    /// Whether at least `n` chains are used, or (packed, where it cannot say) any is.
    #[inline]
    pub fn has_used_many(&self, n: u16) -> bool {
        match &self.0 {
            Kind::Split(q) => q.used() >= n.max(1),
            Kind::Packed(q) => q.has_used_many(n.max(1)),
        }
    }
}
