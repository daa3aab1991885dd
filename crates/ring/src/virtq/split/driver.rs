//! Driver half of the split ring.

use std::collections::VecDeque;

use shm::sync::{Ordering, fence};

use super::{FLAGS, IDX, NO_NOTIFICATION, Parts, load_idx};
use crate::index::{Idx, Untrusted};
use crate::virtq::indirect::IndirectPool;
use crate::virtq::{
    Armed, Buf, DESC_INDIRECT, DESC_LEN, DESC_NEXT, DESC_WRITE, Features, Malformed, Used,
    need_event,
};

/// Private record of the chain that starts at a descriptor; the peer cannot write it.
#[derive(Clone, Copy, Default)]
struct Shadow {
    /// Descriptors the chain occupies; 0: none starts here.
    slots: u16,
    /// The chain's next descriptor, or the next free one.
    next: u16,
    /// Bytes the device may write.
    room: u32,
}

pub(crate) struct SplitDriver {
    parts: Parts,
    features: Features,
    shadow: Vec<Shadow>,
    /// Free descriptors are a list, in the order in which they were used: buffers that are added
    /// again in that order keep theirs. With IN_ORDER (2.7.9) it is the order of the table.
    free_head: u16,
    free_tail: u16,
    free: u16,
    avail_next: Idx<u16>,
    avail_published: Idx<u16>,
    /// Available index at the last kick decision.
    avail_kicked: Idx<u16>,
    used_next: Idx<u16>,
    /// IN_ORDER: heads in flight, oldest first.
    order: VecDeque<u16>,
    indirect: Option<IndirectPool>,
    /// Whether used elements are checked against the shadow.
    checks: bool,
    /// Whether calls are never suppressed.
    stays_armed: bool,
}

impl SplitDriver {
    /// Starts at index `start` on both sides; the device must be given the same index.
    pub(crate) fn new(
        parts: Parts,
        features: Features,
        start: u16,
        indirect: Option<IndirectPool>,
    ) -> Self {
        let size = parts.size;
        let next = |i: u16| if i + 1 == size { 0 } else { i + 1 };
        let shadow = (0..size).map(|i| Shadow { next: next(i), ..Shadow::default() }).collect();
        parts.avail.sync_store(IDX, start, Ordering::Relaxed);
        parts.used.sync_store(IDX, start, Ordering::Release);
        let start = Idx::<u16>::new(start);
        Self {
            free_head: start.get() & parts.mask,
            free_tail: start.minus(1).get() & parts.mask,
            parts,
            features,
            shadow,
            free: size,
            avail_next: start,
            avail_published: start,
            avail_kicked: start,
            used_next: start,
            order: VecDeque::with_capacity(usize::from(size)),
            indirect,
            checks: true,
            stays_armed: false,
        }
    }

    pub(crate) fn trust_device(&mut self) {
        self.checks = false;
    }

    pub(crate) fn size(&self) -> u16 {
        self.parts.size
    }

    pub(crate) fn free(&self) -> u16 {
        self.free
    }

    /// Makes one chain of `bufs`; `None` when the table is full. Visible at `publish`.
    pub(crate) fn add(&mut self, bufs: &[Buf]) -> Option<u16> {
        assert!(!bufs.is_empty());
        if let [buf] = bufs {
            let mut head = None;
            self.add_each(std::iter::once(*buf), |added| head = Some(added));
            return head;
        }
        let count = u16::try_from(bufs.len()).ok()?;
        let indirect = self.indirect.as_ref().is_some_and(|p| p.fits(bufs));
        let slots = if indirect { 1 } else { count };
        if slots > self.free {
            return None;
        }
        let head = self.free_head;
        let mut at = head;
        if indirect {
            let pool = self.indirect.as_ref().expect("checked above");
            let (addr, len) = pool.write_split(head, bufs);
            self.write(at, addr, len, DESC_INDIRECT, 0);
            at = self.shadow[usize::from(at)].next;
        } else {
            for (i, buf) in bufs.iter().enumerate() {
                let next = self.shadow[usize::from(at)].next;
                let write = if buf.write { DESC_WRITE } else { 0 };
                if i + 1 < bufs.len() {
                    self.write(at, buf.addr, buf.len, DESC_NEXT | write, next);
                } else {
                    self.write(at, buf.addr, buf.len, write, 0);
                }
                at = next;
            }
        }
        self.free_head = at;
        self.free -= slots;
        let shadow = &mut self.shadow[usize::from(head)];
        shadow.slots = slots;
        shadow.room = bufs.iter().filter(|b| b.write).fold(0, |n, b| n.saturating_add(b.len));
        self.parts.avail.store_u16(self.parts.avail_entry(self.avail_next.advance()), head);
        if self.features.in_order {
            self.order.push_back(head);
        }
        Some(head)
    }

    /// Makes chains of one buffer each, until the table is full; returns how many.
    #[inline]
    pub(crate) fn add_each(
        &mut self,
        bufs: impl Iterator<Item = Buf>,
        mut added: impl FnMut(u16),
    ) -> usize {
        // In registers: a store waits for those before it, which wait for lines of the peer's CPU.
        let (mut head, mut avail, mut count) = (self.free_head, self.avail_next, 0);
        for buf in bufs.take(usize::from(self.free)) {
            self.write(head, buf.addr, buf.len, if buf.write { DESC_WRITE } else { 0 }, 0);
            self.parts.avail.store_u16(self.parts.avail_entry(avail.advance()), head);
            if self.features.in_order {
                self.order.push_back(head);
            }
            let shadow = &mut self.shadow[usize::from(head)];
            shadow.slots = 1;
            shadow.room = if buf.write { buf.len } else { 0 };
            added(head);
            head = shadow.next;
            count += 1;
        }
        (self.free_head, self.avail_next) = (head, avail);
        self.free -= count;
        count.into()
    }

    /// Writes a descriptor, unless it is the same already: its line then stays in both sides'
    /// caches.
    #[inline]
    fn write(&self, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = DESC_LEN * usize::from(at);
        let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        for (at, word) in [(at, addr), (at + 8, rest)] {
            if self.parts.desc.load_u64(at) != word {
                self.parts.desc.store_u64(at, word);
            }
        }
    }

    pub(crate) fn publish(&mut self) {
        if self.avail_next != self.avail_published {
            // Device sees descriptors and ring entries /before/ avail.idx; pairs with the acquire
            // in the device's `take`; loom test `split_publish_take`.
            self.parts.avail.sync_store(IDX, self.avail_next.get(), Ordering::Release);
            self.avail_published = self.avail_next;
        }
    }

    pub(crate) fn kick_needed(&mut self) -> bool {
        let new = self.avail_published;
        let old = std::mem::replace(&mut self.avail_kicked, new);
        if old == new {
            return false;
        }
        // avail.idx is visible /before/ we check whether the device sleeps; pairs with the fence in
        // the device's `arm`; loom test `split_arm_avail`.
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = load_idx(&self.parts.used, self.parts.avail_event(), Ordering::Relaxed);
            need_event(event, new, old)
        } else {
            self.parts.used.sync_load(FLAGS, Ordering::Relaxed) & NO_NOTIFICATION == 0
        }
    }

    pub(crate) fn take_used(
        &mut self,
        max: usize,
        out: &mut Vec<Used>,
    ) -> Result<usize, Malformed> {
        let used = self.used_index()?;
        let start = out.len();
        out.reserve(usize::from(used.since(self.used_next)).min(max));
        while self.used_next != used && out.len() - start < max {
            let at = self.parts.used_element(self.used_next);
            let id = Untrusted::new(self.parts.used.load_u32(at));
            let mut len = self.parts.used.load_u32(at + 4);
            let id = id.check_below(u32::from(self.parts.size)).map_err(Malformed::UsedId)?;
            let head = u16::try_from(id).expect("below the ring's size");
            if self.features.in_order {
                self.batch(head, used, out)?;
            } else {
                self.release(head)?;
                self.used_next = self.used_next.plus(1);
            }
            let room = self.shadow[usize::from(head)].room;
            if self.checks && len > room {
                if room > 0 {
                    return Err(Malformed::UsedLen(len));
                }
                // Devices also write the length of a buffer that they only read (virtio 1.3,
                // 2.7.8.1).
                len = 0;
            }
            out.push(Used { id: head, len });
        }
        Ok(out.len() - start)
    }

    /// The device's used index, checked against what was published.
    fn used_index(&self) -> Result<Idx<u16>, Malformed> {
        // Driver sees used.idx /before/ the elements it covers; pairs with the release in the
        // device's `publish`; loom test `split_publish_take`.
        let used = load_idx(&self.parts.used, IDX, Ordering::Acquire);
        let in_flight = self.avail_published.since(self.used_next);
        let ready = used.check_since(self.used_next, 0..=in_flight);
        let taken = self.used_next.get();
        let ready = ready.map_err(|seen| Malformed::IndexJump { seen, taken })?;
        Ok(self.used_next.plus(ready))
    }

    /// Whether every entry of the available ring names a chain in flight.
    pub(crate) fn is_repeatable(&self) -> bool {
        self.avail_next.since(self.used_next) == self.parts.size
    }

    /// Makes as many chains available again as were used: the available ring holds the same heads
    /// as one lap before, so not even they are written.
    pub(crate) fn repeat(&mut self) -> Result<u16, Malformed> {
        assert!(self.is_repeatable(), "every entry of the ring names a chain");
        let used = self.used_index()?;
        let n = used.since(self.used_next);
        self.used_next = used;
        self.avail_next = self.avail_next.plus(n);
        Ok(n)
    }

    /// Takes an IN_ORDER batch: the element names its last chain; all older ones are used too.
    fn batch(&mut self, last: u16, used: Idx<u16>, out: &mut Vec<Used>) -> Result<(), Malformed> {
        loop {
            let head = self.order.pop_front().filter(|_| self.used_next != used);
            let head = head.ok_or(Malformed::UsedId(u32::from(last)))?;
            self.release(head)?;
            self.used_next = self.used_next.plus(1);
            if head == last {
                return Ok(());
            }
            out.push(Used { id: head, len: 0 });
        }
    }

    /// Frees the descriptors of the chain at `head`.
    #[inline(always)]
    fn release(&mut self, head: u16) -> Result<(), Malformed> {
        let shadow = &mut self.shadow[usize::from(head)];
        let slots = shadow.slots;
        if self.checks {
            shadow.slots = 0;
            if slots == 0 {
                return Err(Malformed::UsedId(u32::from(head)));
            }
        }
        let mut last = head;
        for _ in 1..slots {
            last = self.shadow[usize::from(last)].next;
        }
        if self.free == 0 {
            self.free_head = head;
        } else {
            self.shadow[usize::from(self.free_tail)].next = head;
        }
        self.free_tail = last;
        // Without the checks, a chain used twice would count twice.
        self.free = self.free.saturating_add(slots).min(self.parts.size);
        Ok(())
    }

    pub(crate) fn arm(&mut self) -> Armed {
        self.arm_after(1)
    }

    /// Requests a call at the `n`th used element from here; without event index, at each.
    pub(crate) fn arm_after(&mut self, n: u16) -> Armed {
        if self.features.event_idx {
            let at = self.parts.used_event();
            let event = self.used_next.plus(n).minus(1);
            self.parts.avail.sync_store(at, event.get(), Ordering::Relaxed);
        } else {
            self.parts.avail.sync_store(FLAGS, 0, Ordering::Relaxed);
        }
        // The device sees our event /before/ we re-check; pairs with the fence in its
        // `call_needed`; loom test `split_arm_used`.
        fence(Ordering::SeqCst);
        if self.used() >= n { Armed::WorkPending } else { Armed::Armed }
    }

    pub(crate) fn stay_armed(&mut self) {
        assert!(!self.features.event_idx, "an event index requests one call only");
        self.stays_armed = true;
        self.parts.avail.sync_store(FLAGS, 0, Ordering::Relaxed);
    }

    pub(crate) fn disarm(&mut self) {
        if !self.features.event_idx && !self.stays_armed {
            self.parts.avail.sync_store(FLAGS, NO_NOTIFICATION, Ordering::Relaxed);
        }
    }

    pub(crate) fn has_used(&self) -> bool {
        self.used() > 0
    }

    /// Used elements not taken yet. One load.
    pub(crate) fn used(&self) -> u16 {
        let used = load_idx(&self.parts.used, IDX, Ordering::Relaxed);
        used.hint_since(self.used_next)
    }
}
