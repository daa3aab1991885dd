//! Device half of a virtqueue: serves a guest.

use std::ops::Range;
use std::sync::Arc;

use shm::{DirtyLog, GuestMemory, Marks};

use super::packed::{self, Ledger, PackedDevice};
use super::split::{self, SplitDevice};
use super::{Armed, Chain, Features, Layout, LayoutError, Malformed, Taken};

/// Device half of one virtqueue, split or packed.
///
/// Per burst: [`take`](Self::take), then [`put`](Self::put) each chain in the order taken (or
/// [`untake`](Self::untake) the last ones), [`publish`](Self::publish) once,
/// [`call_needed`](Self::call_needed) once.
pub struct DeviceQueue {
    kind: Kind,
    /// While the guest migrates.
    log: Option<Box<Logged>>,
}

/// Where writes to a ring are logged while its guest migrates.
#[derive(Clone, Debug)]
pub struct RingLog {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// Guest address of the descriptors, which the device writes in a packed ring only.
    pub desc: u64,
    /// Guest address of the device area, for logging: a split ring's used ring, a packed one's
    /// event suppression.
    pub device: u64,
}

struct Logged {
    marks: Marks,
    desc: u64,
    device: u64,
}

impl Logged {
    fn mark(&mut self, at: u64, ranges: [Range<usize>; 2]) {
        for range in ranges {
            let offset = u64::try_from(range.start).expect("in a ring");
            let len = u64::try_from(range.len()).expect("in a ring");
            self.marks.mark(at.wrapping_add(offset), len);
        }
    }
}

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
        Ok(Self { kind: Kind::Packed(PackedDevice::new(parts, features, base)?), log: None })
    }

    fn split(parts: split::Parts, features: Features, base: u32) -> Result<Self, LayoutError> {
        let next = u16::try_from(base).map_err(|_| LayoutError::Base(base))?;
        Ok(Self { kind: Kind::Split(SplitDevice::new(parts, features, next)), log: None })
    }

    /// Records the progress of a packed ring for a successor, which
    /// [recovers](Ledger::recover) its position. Call between two bursts. A split ring needs no
    /// record: its used index is in its memory.
    pub fn keep(&mut self, ledger: Ledger) {
        match &mut self.kind {
            Kind::Split(_) => {}
            Kind::Packed(q) => q.keep(ledger),
        }
    }

    /// Whether a successor publishes what is [`put`](Self::put), even if we do not: what is written
    /// to a chain must be written before.
    pub fn is_kept(&self) -> bool {
        match &self.kind {
            // Its index is written last.
            Kind::Split(_) => false,
            Kind::Packed(q) => q.is_kept(),
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.kind {
            Kind::Split(q) => q.size(),
            Kind::Packed(q) => q.size(),
        }
    }

    /// Current position in the form of VRING_BASE.
    pub fn base(&self) -> u32 {
        match &self.kind {
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
        match &mut self.kind {
            Kind::Split(q) => q.take(memory, max, out),
            Kind::Packed(q) => q.take(memory, max, out),
        }
    }

    /// Undoes `take` for the last chains taken: the next `take` returns them again. `chains` are
    /// the last ones taken, in order.
    pub fn untake(&mut self, chains: &[Chain]) {
        match &mut self.kind {
            Kind::Split(q) => {
                q.untake(u16::try_from(chains.len()).expect("at most the ring's size"));
            }
            Kind::Packed(q) => q.untake(chains.iter().map(|c| c.slots).sum()),
        }
    }

    /// Marks one chain used, with `len` bytes written to it, which are all written. Chains are used
    /// in the order taken. Not visible before [`publish`](Self::publish).
    #[inline(always)]
    pub fn put(&mut self, chain: &Chain, len: u32) {
        match &mut self.kind {
            Kind::Split(q) => q.put(chain.id, len),
            Kind::Packed(q) => q.put(chain.id, chain.slots, len, false),
        }
    }

    /// As [`put`](Self::put), for a chain of a frame that continues in the next one: unless the
    /// last one follows, a successor returns those before it empty ([`Ledger::recover`]).
    #[inline]
    pub fn put_part(&mut self, chain: &Chain, len: u32) {
        match &mut self.kind {
            Kind::Split(q) => q.put(chain.id, len),
            Kind::Packed(q) => q.put(chain.id, chain.slots, len, true),
        }
    }

    /// As [`put`](Self::put) for each of a burst of chains, with the length written to it.
    #[inline]
    pub fn put_each(&mut self, chains: &[Chain], lens: impl Iterator<Item = u32>) {
        match &mut self.kind {
            Kind::Split(q) => q.put_each(chains, lens),
            Kind::Packed(q) => q.put_each(chains, lens),
        }
    }

    /// Marks a whole burst of chains used, with nothing written, in the order taken. With IN_ORDER
    /// one used element, for the last chain, covers all (virtio 1.3, 2.7.9 and 2.8.9).
    #[inline]
    pub fn put_all(&mut self, chains: &[Chain]) {
        match &mut self.kind {
            Kind::Split(q) => q.put_all(chains),
            Kind::Packed(q) => q.put_all(chains),
        }
    }

    /// Prefetches what the next `take` will read. For queues whose chains were made available long
    /// ago, as receive buffers are; elsewhere it would fetch lines that the driver is about to
    /// write.
    #[inline]
    pub fn prefetch(&self) {
        match &self.kind {
            Kind::Split(q) => q.prefetch(),
            Kind::Packed(q) => q.prefetch(),
        }
    }

    /// Makes every chain used so far visible to the driver. Ends the burst for the
    /// [log](Self::marks), too.
    #[inline]
    pub fn publish(&mut self) {
        if self.log.is_some() {
            return self.publish_logged();
        }
        match &mut self.kind {
            Kind::Split(q) => q.publish(),
            Kind::Packed(q) => q.publish(),
        }
    }

    #[cold]
    fn publish_logged(&mut self) {
        let Some(log) = &mut self.log else { return };
        match &mut self.kind {
            Kind::Split(q) => {
                let elements = q.unpublished();
                q.publish();
                log.mark(log.device, elements);
                log.mark(log.device, [SplitDevice::INDEX, 0..0]);
            }
            Kind::Packed(q) => {
                let descs = q.unpublished();
                q.publish();
                log.mark(log.desc, descs);
            }
        }
        log.marks.flush();
    }

    /// Starts or stops logging writes. Call between two bursts: the marks of the last one are in
    /// the log that it used.
    pub fn set_log(&mut self, log: Option<RingLog>) {
        if let Some(log) = &mut self.log {
            log.marks.flush();
        }
        let logged = |RingLog { log, desc, device }| {
            Box::new(Logged { marks: Marks::new(log), desc, device })
        };
        self.log = log.map(logged);
    }

    /// Marks of this ring's log, for buffers that were written; `None`: nothing is logged. They are
    /// in the log after the next [`publish`](Self::publish).
    #[inline]
    pub fn marks(&mut self) -> Option<&mut Marks> {
        self.log.as_mut().map(|log| &mut log.marks)
    }

    /// Whether the front-end truncated the log.
    pub fn log_is_lost(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.marks.log().is_lost())
    }

    /// Whether the driver wants a call for what was published since the last query. One full fence
    /// when anything was published.
    #[inline]
    #[must_use]
    pub fn call_needed(&mut self) -> bool {
        match &mut self.kind {
            Kind::Split(q) => q.call_needed(),
            Kind::Packed(q) => q.call_needed(),
        }
    }

    /// Enables kicks for the next chain, then re-checks the ring. Only [`Armed::Armed`] allows
    /// sleep. One operation, so that no caller can omit the re-check.
    pub fn arm(&mut self) -> Armed {
        let armed = match &mut self.kind {
            Kind::Split(q) => q.arm(),
            Kind::Packed(q) => q.arm(),
        };
        self.mark_events();
        armed
    }

    /// Marks the words that `arm` and `disarm` write.
    #[inline]
    fn mark_events(&mut self) {
        if let Some(log) = &mut self.log {
            let words = match &self.kind {
                Kind::Split(q) => q.event_words(),
                Kind::Packed(_) => [PackedDevice::EVENT, 0..0],
            };
            log.mark(log.device, words);
            log.marks.flush();
        }
    }

    /// Suppresses kicks: the ring is being polled.
    pub fn disarm(&mut self) {
        match &mut self.kind {
            Kind::Split(q) => q.disarm(),
            Kind::Packed(q) => q.disarm(),
        }
        self.mark_events();
    }

    /// Whether there is a chain to take, or a fault to report. One load.
    #[inline]
    pub fn has_work(&self) -> bool {
        match &self.kind {
            Kind::Split(q) => q.has_work(),
            Kind::Packed(q) => q.has_work(),
        }
    }
}
