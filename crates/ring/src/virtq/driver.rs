//! Driver half of a virtqueue: a NIC driver's side. Used by `nic`, `gen`, tests, fuzzers and lab.

use shm::GuestMemory;

use super::indirect::IndirectPool;
use super::packed::{self, PackedDriver};
use super::split::{self, SplitDriver};
use super::{Armed, Buf, Features, Layout, LayoutError, Malformed, Used};

/// Driver half of one virtqueue, split or packed. It does not trust the device: lengths and ids
/// from the ring are checked against private records.
pub struct DriverQueue(Kind);

enum Kind {
    Split(SplitDriver),
    Packed(PackedDriver),
}

impl DriverQueue {
    /// Initialises a ring at `layout` in our own memory, starting from `base` (the device must be
    /// given the same value, see [`DeviceQueue::new`](super::DeviceQueue::new)).
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
    /// `None` when the ring is full. Not visible before [`publish`](Self::publish).
    #[inline]
    pub fn add(&mut self, bufs: &[Buf]) -> Option<u16> {
        match &mut self.0 {
            Kind::Split(q) => q.add(bufs),
            Kind::Packed(q) => q.add(bufs),
        }
    }

    /// Makes a chain of each of `bufs`, in order, until the ring is full, and calls `added` with
    /// its id; returns how many. As [`add`](Self::add), at less cost for each.
    ///
    /// Buffers that are added again in the order in which they were used have the same descriptors
    /// as before. On a split ring these are then not written: their lines stay in the caches of
    /// both sides.
    #[inline]
    pub fn add_each(&mut self, bufs: impl Iterator<Item = Buf>, added: impl FnMut(u16)) -> usize {
        match &mut self.0 {
            Kind::Split(q) => q.add_each(bufs, added),
            Kind::Packed(q) => q.add_each(bufs, added),
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

    /// Whether the device wants a kick for what was published since the last query.
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
    /// [`Malformed`]: the device violated the protocol; the caller must stop using the ring.
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

    /// Makes as many chains available again as were used, in place of taking and re-adding them,
    /// and returns their number. Visible at [`publish`](Self::publish). Costs a load and a store:
    /// for guests that must take no CPU while a device is measured. A device that does not use
    /// chains in order gets some of them twice.
    ///
    /// # Errors
    /// [`Malformed::IndexJump`], as for [`take_used`](Self::take_used).
    ///
    /// # Panics
    /// If [`can_repeat`](Self::can_repeat) is false.
    pub fn repeat(&mut self) -> Result<u16, Malformed> {
        match &mut self.0 {
            Kind::Split(q) => q.repeat(),
            Kind::Packed(_) => panic!("a packed ring's used elements replace its chains"),
        }
    }

    /// Enables calls for the next used chain, then re-checks the ring. Only [`Armed::Armed`] allows
    /// sleep.
    pub fn arm(&mut self) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm(),
            Kind::Packed(q) => q.arm(),
        }
    }

    /// Arms as [`arm`](Self::arm) does, for a call only after `n` more of the chains in flight are
    /// used. A ring that cannot express that (no event index; packed, and IN_ORDER or some chain of
    /// several descriptors) requests one at the next, so the caller must re-check the count when
    /// woken.
    pub fn arm_after(&mut self, n: u16) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm_after(n.max(1)),
            Kind::Packed(q) => q.arm_after(n.max(1)),
        }
    }

    /// Disables the checks of used elements that only detect a faulty device: that a chain is in
    /// flight, and that no more was written to it than it holds, which the caller must then bound.
    /// A faulty device then makes the driver mix up buffers, all of which it has shared. A packed
    /// ring needs these checks to find its position and keeps them.
    pub fn trust_device(&mut self) {
        if let Kind::Split(q) = &mut self.0 {
            q.trust_device();
        }
    }

    /// Requests a call for whatever the device uses from now on, one for each chain or burst that
    /// it publishes: [`disarm`](Self::disarm) then has no effect.
    ///
    /// # Panics
    /// If EVENT_IDX is negotiated: an event index requests one call only.
    pub fn stay_armed(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.stay_armed(),
            Kind::Packed(q) => q.stay_armed(),
        }
    }

    /// Suppresses calls: the ring is being polled.
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

    /// Whether at least `n` chains are used; on a packed ring that cannot count them, whether any
    /// is.
    #[inline]
    pub fn has_used_many(&self, n: u16) -> bool {
        match &self.0 {
            Kind::Split(q) => q.used() >= n.max(1),
            Kind::Packed(q) => q.has_used_many(n.max(1)),
        }
    }
}
