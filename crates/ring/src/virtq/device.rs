//! Device half: what serves a guest.

use shm::GuestMemory;

use super::packed::{self, PackedDevice};
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
    /// the used index in its memory, whatever `base` says: buffers are used in order, so they are
    /// the same unless the front-end is wrong. The geometry is frozen from here on; the areas keep
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

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.0 {
            Kind::Split(q) => q.size(),
            Kind::Packed(q) => q.size(),
        }
    }

    /// Where the ring stands, as VRING_BASE carries it.
    pub fn base(&self) -> u32 {
        match &self.0 {
            Kind::Split(q) => q.base(),
            Kind::Packed(q) => q.base(),
        }
    }

    /// Takes up to `max` chains into `out`, which is cleared first. `memory` is where indirect
    /// tables are looked up. Returns how many were taken; 0 when there is nothing.
    ///
    /// # Errors
    /// [`Malformed`]: the driver broke the protocol. Good chains before the fault are given out
    /// first; from then on every call fails, and the ring is to be stopped.
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

    /// As [`take`](Self::take), but adds to the chains in `out`, up to `max` chains in all: those
    /// that are there are not read again. Returns how many were added. When the ring has nothing
    /// new, or `out` [is cut](Taken::is_cut), that costs at most one load.
    ///
    /// # Errors
    /// As [`take`](Self::take); what was in `out` stays there.
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

    /// Gives back the last of the chains taken, as if they had never been: the next `take` finds
    /// them again. `chains` are the last ones taken, in order.
    pub fn untake(&mut self, chains: &[Chain]) {
        match &mut self.0 {
            Kind::Split(q) => {
                q.untake(u16::try_from(chains.len()).expect("at most the ring's size"));
            }
            Kind::Packed(q) => q.untake(chains.iter().map(|c| c.slots).sum()),
        }
    }

    /// Uses one chain, having written `len` bytes of it. Chains are used in the order taken.
    /// Not visible before [`publish`](Self::publish).
    #[inline]
    pub fn put(&mut self, chain: &Chain, len: u32) {
        match &mut self.0 {
            Kind::Split(q) => q.put(chain.id, len),
            Kind::Packed(q) => q.put(chain.id, chain.slots, len),
        }
    }

    /// Uses a whole burst of chains of which nothing was written, in the order taken. With
    /// IN_ORDER the last one stands for all (virtio 1.3, 2.7.9 and 2.8.9).
    #[inline]
    pub fn put_all(&mut self, chains: &[Chain]) {
        match &mut self.0 {
            Kind::Split(q) => q.put_all(chains),
            Kind::Packed(q) => chains.iter().for_each(|c| q.put(c.id, c.slots, 0)),
        }
    }

    /// Has the CPU fetch what the next `take` will read and use: for a queue whose chains were made
    /// available long ago, as receive buffers are. (Elsewhere it would fetch lines that the driver
    /// is about to write.)
    #[inline]
    pub fn look_ahead(&self) {
        match &self.0 {
            Kind::Split(q) => q.look_ahead(),
            Kind::Packed(q) => q.look_ahead(),
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

    /// Whether the driver wants a call for what was published since this was last asked. One full
    /// fence when anything was.
    #[inline]
    #[must_use]
    pub fn call_needed(&mut self) -> bool {
        match &mut self.0 {
            Kind::Split(q) => q.call_needed(),
            Kind::Packed(q) => q.call_needed(),
        }
    }

    /// Asks for a kick at the next chain, and looks a last time. Only [`Armed::Armed`] allows
    /// sleep. Arming is one operation so that no caller can forget the second half.
    pub fn arm(&mut self) -> Armed {
        match &mut self.0 {
            Kind::Split(q) => q.arm(),
            Kind::Packed(q) => q.arm(),
        }
    }

    /// Asks for no kicks: the ring is being polled.
    pub fn disarm(&mut self) {
        match &mut self.0 {
            Kind::Split(q) => q.disarm(),
            Kind::Packed(q) => q.disarm(),
        }
    }

    /// Whether there is something to take (or a fault to report). One load.
    #[inline]
    pub fn has_work(&self) -> bool {
        match &self.0 {
            Kind::Split(q) => q.has_work(),
            Kind::Packed(q) => q.has_work(),
        }
    }
}
