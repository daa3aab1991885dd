//! Device half of a virtqueue: serves a guest.

use shm::GuestMemory;

use super::packed::{self, Ledger, PackedDevice};
use super::split::{self, SplitDevice};
use super::{Armed, Chain, Features, Layout, LayoutError, Malformed, Taken};

/// Device half of one virtqueue, split or packed.
///
/// Per burst: [`take`](Self::take), then [`put`](Self::put) each chain in the order taken (or
/// [`untake`](Self::untake) the last ones), [`publish`](Self::publish) once,
/// [`call_needed`](Self::call_needed) once.
pub struct DeviceQueue(Kind);

enum Kind {
    Split(SplitDevice),
    Packed(PackedDevice),
}

impl DeviceQueue {
    /// Activates a ring at `layout`, starting from `base` (the vhost-user VRING_BASE: split, the
    /// next available index; packed, both positions with their wrap bits). A split ring starts at
    /// the used index in its memory, whatever `base` says: buffers are used in order, so the two
    /// are equal unless the front-end is wrong. The geometry is fixed from here on; the areas keep
    /// their memory mapped.
    ///
    /// # Errors
    /// [`LayoutError`] when size, address, alignment or base are not legal.
    pub fn new(
        memory: &GuestMemory,
        layout: &Layout,
        features: Features,
        base: u32,
    ) -> Result<Self, LayoutError> {
        if features.packed {
            return Self::packed(packed::Parts::new(memory, layout)?, features, base);
        }
        Self::split(split::Parts::new(memory, layout, features)?, features, base)
    }

    /// The device half of a ring in a loom model.
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
            return Self::packed(packed::Parts::modelled(ring), features, base);
        }
        Self::split(split::Parts::modelled(ring), features, base)
    }

    fn packed(parts: packed::Parts, features: Features, base: u32) -> Result<Self, LayoutError> {
        Ok(Self(Kind::Packed(PackedDevice::new(parts, features, base)?)))
    }

    fn split(parts: split::Parts, features: Features, base: u32) -> Result<Self, LayoutError> {
        let next = u16::try_from(base).map_err(|_| LayoutError::Base(base))?;
        Ok(Self(Kind::Split(SplitDevice::new(parts, features, next))))
    }

    /// Writes the progress of a packed ring down for a successor, which
    /// [recovers](Ledger::recover) its position. Between two bursts. A split ring needs none: its
    /// used index is in its memory.
    pub fn keep(&mut self, ledger: Ledger) {
        match &mut self.0 {
            Kind::Split(_) => {}
            Kind::Packed(q) => q.keep(ledger),
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.0 {
            Kind::Split(q) => q.size(),
            Kind::Packed(q) => q.size(),
        }
    }

    /// Current position in the form of VRING_BASE.
    pub fn base(&self) -> u32 {
        match &self.0 {
            Kind::Split(q) => q.base(),
            Kind::Packed(q) => q.base(),
        }
    }

    /// Takes up to `max` chains into `out`, which is cleared first. Indirect tables are read from
    /// `memory`. Returns the number taken; 0 when the ring is empty.
    ///
    /// # Errors
    /// [`Malformed`]: the driver violated the protocol. Valid chains before the fault are returned
    /// first; after that every call fails, and the caller must stop the ring.
    #[inline]
    pub fn take(
        &mut self,
        memory: &GuestMemory,
        max: usize,
        out: &mut Taken,
    ) -> Result<usize, Malformed> {
        out.clear();
        self.take_more(memory, max, out)
    }

    /// Takes chains as [`take`](Self::take) does, and appends them to `out`, up to `max` in all;
    /// chains already in `out` are not read again. Returns the number added. If the ring has
    /// nothing new, or `out` [is cut](Taken::is_cut), the cost is at most one load.
    ///
    /// # Errors
    /// As [`take`](Self::take); the earlier contents of `out` are kept.
    #[inline]
    pub fn take_more(
        &mut self,
        memory: &GuestMemory,
        max: usize,
        out: &mut Taken,
    ) -> Result<usize, Malformed> {
        if out.is_cut() {
            return Ok(0);
        }
        match &mut self.0 {
            Kind::Split(q) => q.take(memory, max, out),
            Kind::Packed(q) => q.take(memory, max, out),
        }
    }

    /// Undoes `take` for the last chains taken: the next `take` returns them again. `chains` are
    /// the last ones taken, in order.
    pub fn untake(&mut self, chains: &[Chain]) {
        match &mut self.0 {
            Kind::Split(q) => {
                q.untake(u16::try_from(chains.len()).expect("at most the ring's size"));
            }
            Kind::Packed(q) => q.untake(chains.iter().map(|c| c.slots).sum()),
        }
    }

    /// Marks one chain used, with `len` bytes written to it. Chains are used in the order taken.
    /// Not visible before [`publish`](Self::publish).
    #[inline]
    pub fn put(&mut self, chain: &Chain, len: u32) {
        match &mut self.0 {
            Kind::Split(q) => q.put(chain.id, len),
            Kind::Packed(q) => q.put(chain.id, chain.slots, len),
        }
    }

    /// Marks a whole burst of chains used, with nothing written, in the order taken. With IN_ORDER
    /// one used element, for the last chain, covers all (virtio 1.3, 2.7.9 and 2.8.9).
    #[inline]
    pub fn put_all(&mut self, chains: &[Chain]) {
        match &mut self.0 {
            Kind::Split(q) => q.put_all(chains),
            Kind::Packed(q) => chains.iter().for_each(|c| q.put(c.id, c.slots, 0)),
        }
    }

    /// Prefetches what the next `take` will read. For queues whose chains were made available long
    /// ago, as receive buffers are; elsewhere it would fetch lines that the driver is about to
    /// write.
    #[inline]
    pub fn prefetch(&self) {
        match &self.0 {
            Kind::Split(q) => q.prefetch(),
            Kind::Packed(q) => q.prefetch(),
        }
    }

    /// Makes every chain used so far visible to the driver.
    #[inline]
    pub fn publish(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.publish(),
            Kind::Packed(q) => q.publish(),
        }
    }

    /// Whether the driver wants a call for what was published since the last query. One full fence
    /// when anything was published.
    #[inline]
    #[must_use]
    pub fn call_needed(&mut self) -> bool {
        match &mut self.0 {
            Kind::Split(q) => q.call_needed(),
            Kind::Packed(q) => q.call_needed(),
        }
    }

    /// Enables kicks for the next chain, then re-checks the ring. Only [`Armed::Armed`] allows
    /// sleep. One operation, so that no caller can omit the re-check.
    pub fn arm(&mut self) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm(),
            Kind::Packed(q) => q.arm(),
        }
    }

    /// Suppresses kicks: the ring is being polled.
    pub fn disarm(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.disarm(),
            Kind::Packed(q) => q.disarm(),
        }
    }

    /// Whether there is a chain to take, or a fault to report. One load.
    #[inline]
    pub fn has_work(&self) -> bool {
        match &self.0 {
            Kind::Split(q) => q.has_work(),
            Kind::Packed(q) => q.has_work(),
        }
    }
}
