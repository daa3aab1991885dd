//! Driver half of the packed ring.

use std::collections::VecDeque;

use shm::sync::{Ordering, fence};

use super::{DESC_FLAGS, EVENT_FLAGS, Parts, Pos, event_arm, event_disarm, event_wanted};
use crate::index::Untrusted;
use crate::virtq::indirect::IndirectPool;
use crate::virtq::{
    Armed, Buf, DESC_INDIRECT, DESC_LEN, DESC_NEXT, DESC_WRITE, Features, LayoutError, Malformed,
    Used, lo16,
};

/// Private record of the chain with an id; the peer cannot write it.
#[derive(Clone, Copy, Default)]
struct Shadow {
    /// Descriptors the chain occupies; 0: the id is free.
    slots: u16,
    /// Next free id.
    next: u16,
    /// Bytes the device may write.
    room: u32,
}

pub(crate) struct PackedDriver {
    parts: Parts,
    features: Features,
    shadow: Vec<Shadow>,
    free_id: u16,
    free: u16,
    /// Chains in flight.
    chains: u16,
    avail: Pos,
    used: Pos,
    /// Head of the first chain since the last publication, whose flags are written last.
    first: Option<(Pos, u16)>,
    unpublished: u16,
    /// Slots published since the last kick decision, saturating.
    moved: u16,
    /// IN_ORDER: ids in flight, oldest first.
    order: VecDeque<u16>,
    indirect: Option<IndirectPool>,
    /// Whether calls are never suppressed.
    stays_armed: bool,
}

impl PackedDriver {
    /// Starts both positions at `base` (low half: available, high half: used; they are equal).
    pub(crate) fn new(
        parts: Parts,
        features: Features,
        base: u32,
        indirect: Option<IndirectPool>,
    ) -> Result<Self, LayoutError> {
        let size = parts.size;
        let (avail, used) = (lo16(u64::from(base)), lo16(u64::from(base >> 16)));
        let pos = Pos::from_bits(avail, size).filter(|_| avail == used);
        let pos = pos.ok_or(LayoutError::Base(base))?;
        for slot in 0..size {
            // Descriptors at or after the position were used a lap ago, those before it in this
            // lap: neither appears available to the device, nor used to us.
            let lap = Pos { slot, wrap: if slot < pos.slot { pos.wrap } else { !pos.wrap } };
            let at = lap.offset() + DESC_FLAGS;
            parts.desc.sync_store(at, lap.used_bits(), Ordering::Relaxed);
        }
        parts.driver.sync_store(EVENT_FLAGS, super::EVENT_ENABLE, Ordering::Release);
        Ok(Self {
            shadow: (0..size).map(|i| Shadow { next: i + 1, ..Shadow::default() }).collect(),
            free_id: 0,
            free: size,
            chains: 0,
            avail: pos,
            used: pos,
            first: None,
            unpublished: 0,
            moved: 0,
            order: VecDeque::with_capacity(usize::from(size)),
            parts,
            features,
            indirect,
            stays_armed: false,
        })
    }

    pub(crate) fn size(&self) -> u16 {
        self.parts.size
    }

    pub(crate) fn free(&self) -> u16 {
        self.free
    }

    /// Makes one chain of `bufs`; `None` when the ring is full. Visible at `publish`.
    pub(crate) fn add(&mut self, bufs: &[Buf]) -> Option<u16> {
        assert!(!bufs.is_empty());
        let count = u16::try_from(bufs.len()).ok()?;
        let indirect = count > 1 && self.indirect.as_ref().is_some_and(|p| p.fits(bufs));
        let slots = if indirect { 1 } else { count };
        if slots > self.free {
            return None;
        }
        if let ([buf], true) = (bufs, self.first.is_some()) {
            let mut id = None;
            self.add_each(std::iter::once(*buf), |added| id = Some(added));
            return id;
        }
        let room = bufs.iter().filter(|b| b.write).fold(0_u32, |n, b| n.saturating_add(b.len));
        let id = self.reserve(slots, room);
        let head = self.avail;
        let head_flags = if indirect {
            let pool = self.indirect.as_ref().expect("checked above");
            let (addr, len) = pool.write_packed(id, bufs);
            self.write(head, addr, len, id);
            DESC_INDIRECT | head.available_bits()
        } else {
            self.direct(bufs, id)
        };
        if self.first.is_none() {
            self.first = Some((head, head_flags));
        } else {
            let at = head.offset() + DESC_FLAGS;
            // Device sees the whole chain /before/ its head; pairs with the acquire in `take`.
            self.parts.desc.sync_store(at, head_flags, Ordering::Release);
        }
        Some(self.added(id, slots))
    }

    /// Makes chains of one buffer each, until the ring is full; returns how many.
    #[inline]
    pub(crate) fn add_each(
        &mut self,
        bufs: impl Iterator<Item = Buf>,
        mut added: impl FnMut(u16),
    ) -> usize {
        let mut bufs = bufs.take(usize::from(self.free));
        let mut firsts = 0;
        if self.first.is_none() {
            let Some(buf) = bufs.next() else { return 0 };
            added(self.add(&[buf]).expect("a free descriptor"));
            firsts = 1;
        }
        // In registers: a load of what was just stored, in part, waits until that store is done,
        // and all those of descriptors before it, whose lines the device has.
        let (mut at, mut id, mut count) = (self.avail, self.free_id, 0);
        for buf in bufs {
            self.write_one(at, &buf, id);
            let shadow = &mut self.shadow[usize::from(id)];
            (shadow.slots, shadow.room) = (1, if buf.write { buf.len } else { 0 });
            if self.features.in_order {
                self.order.push_back(id);
            }
            added(id);
            id = shadow.next;
            at.advance(1, self.parts.size);
            count += 1;
        }
        (self.avail, self.free_id) = (at, id);
        self.free -= count;
        self.chains += count;
        self.unpublished = self.unpublished.saturating_add(count);
        firsts + usize::from(count)
    }

    /// Writes the descriptor of a chain of one buffer, not the first since the last burst was
    /// published: its last word, flags included, is one store.
    #[inline(always)]
    fn write_one(&self, pos: Pos, buf: &Buf, id: u16) {
        let at = pos.offset();
        let flags = pos.available_bits() | if buf.write { DESC_WRITE } else { 0 };
        self.parts.desc.store_u64(at, buf.addr);
        // Device sees the address /before/ the flags; pairs with the acquire in `take`.
        self.parts.desc.sync_store_tail(at + 8, buf.len, id, flags, Ordering::Release);
    }

    /// Takes an id for a chain of so many free slots.
    #[inline(always)]
    fn reserve(&mut self, slots: u16, room: u32) -> u16 {
        let id = self.free_id;
        let shadow = &mut self.shadow[usize::from(id)];
        self.free_id = shadow.next;
        self.free -= slots;
        self.chains += 1;
        (shadow.slots, shadow.room) = (slots, room);
        id
    }

    /// Records a chain whose descriptors are written; returns its id.
    #[inline]
    fn added(&mut self, id: u16, slots: u16) -> u16 {
        self.avail.advance(slots, self.parts.size);
        self.unpublished = self.unpublished.saturating_add(slots);
        if self.features.in_order {
            self.order.push_back(id);
        }
        id
    }

    /// Writes a chain of direct descriptors, all but the head's flags, which it returns.
    fn direct(&self, bufs: &[Buf], id: u16) -> u16 {
        let mut at = self.avail;
        let mut head_flags = 0;
        for (i, buf) in bufs.iter().enumerate() {
            self.write(at, buf.addr, buf.len, id);
            let more = if i + 1 < bufs.len() { DESC_NEXT } else { 0 };
            let write = if buf.write { DESC_WRITE } else { 0 };
            let flags = more | write | at.available_bits();
            if i == 0 {
                head_flags = flags;
            } else {
                self.parts.desc.sync_store(at.offset() + DESC_FLAGS, flags, Ordering::Relaxed);
            }
            at.advance(1, self.parts.size);
        }
        head_flags
    }

    fn write(&self, at: Pos, addr: u64, len: u32, id: u16) {
        let at = DESC_LEN * usize::from(at.slot);
        self.parts.desc.store_u64(at, addr);
        self.parts.desc.store_u32(at + 8, len);
        self.parts.desc.store_u16(at + 12, id);
    }

    pub(crate) fn publish(&mut self) {
        if let Some((pos, flags)) = self.first.take() {
            // The first head is written last: the burst becomes available as a whole; pairs with
            // the acquire in the device's `take`.
            self.parts.desc.sync_store(pos.offset() + DESC_FLAGS, flags, Ordering::Release);
            self.moved = self.moved.saturating_add(std::mem::take(&mut self.unpublished));
        }
    }

    pub(crate) fn kick_needed(&mut self) -> bool {
        let moved = std::mem::take(&mut self.moved);
        if moved == 0 {
            return false;
        }
        // Available descriptors are visible /before/ we check whether the device sleeps; pairs with
        // the fence in its `arm`; loom test `packed_arm_avail`.
        fence(Ordering::SeqCst);
        event_wanted(&self.parts.device, self.avail, moved, self.parts.size)
    }

    pub(crate) fn take_used(
        &mut self,
        max: usize,
        out: &mut Vec<Used>,
    ) -> Result<usize, Malformed> {
        let start = out.len();
        out.reserve(usize::from(self.chains).min(max));
        while out.len() - start < max && self.has_used_acquire() {
            let at = self.used.offset();
            let mut len = self.parts.desc.load_u32(at + 8);
            let id = Untrusted::new(self.parts.desc.load_u16(at + 12));
            let id = id.check_below(self.parts.size);
            let id = id.map_err(|id| Malformed::UsedId(u32::from(id)))?;
            while self.features.in_order {
                let oldest = self.order.pop_front().ok_or(Malformed::UsedId(u32::from(id)))?;
                if oldest == id {
                    break;
                }
                self.release(oldest)?;
                out.push(Used { id: oldest, len: 0 });
            }
            self.release(id)?;
            let room = self.shadow[usize::from(id)].room;
            if len > room {
                if room > 0 {
                    return Err(Malformed::UsedLen(len));
                }
                // The length of a buffer that the device only reads is ignored (virtio 1.3, 2.8.5).
                len = 0;
            }
            out.push(Used { id, len });
        }
        Ok(out.len() - start)
    }

    #[inline(always)]
    fn release(&mut self, id: u16) -> Result<(), Malformed> {
        let shadow = &mut self.shadow[usize::from(id)];
        let slots = std::mem::take(&mut shadow.slots);
        if slots == 0 {
            return Err(Malformed::UsedId(u32::from(id)));
        }
        shadow.next = self.free_id;
        self.free_id = id;
        self.free += slots;
        self.chains -= 1;
        self.used.advance(slots, self.parts.size);
        Ok(())
    }

    pub(crate) fn arm(&mut self) -> Armed {
        self.arm_after(1)
    }

    /// Requests a call at the `n`th used chain from here if its slot is known; otherwise at the
    /// next.
    pub(crate) fn arm_after(&mut self, n: u16) -> Armed {
        let at = self.nth_used(n).unwrap_or(self.used);
        event_arm(&self.parts.driver, self.features, at);
        // The device sees our event /before/ we re-check; pairs with the fence in its
        // `call_needed`; loom test `packed_arm_used`.
        fence(Ordering::SeqCst);
        if self.has_used_at(at) { Armed::WorkPending } else { Armed::Armed }
    }

    /// Position where the device will write the `n`th used chain from here. Chains of several
    /// descriptors move it on by their length, in whatever order they are used, and for a batch
    /// that is used in order only the first slot is written.
    fn nth_used(&self, n: u16) -> Option<Pos> {
        let single = self.chains == self.parts.size - self.free;
        let known = self.features.event_idx && single && !self.features.in_order;
        (known && (1..=self.chains).contains(&n)).then(|| {
            let mut at = self.used;
            at.advance(n - 1, self.parts.size);
            at
        })
    }

    pub(crate) fn stay_armed(&mut self) {
        assert!(!self.features.event_idx, "an event index requests one call only");
        self.stays_armed = true;
        event_arm(&self.parts.driver, self.features, self.used);
    }

    pub(crate) fn disarm(&mut self) {
        if !self.stays_armed {
            event_disarm(&self.parts.driver);
        }
    }

    pub(crate) fn has_used(&self) -> bool {
        self.has_used_at(self.used)
    }

    /// Whether `n` chains are used, or any if the slot of the `n`th is not known.
    pub(crate) fn has_used_many(&self, n: u16) -> bool {
        self.has_used_at(self.nth_used(n).unwrap_or(self.used))
    }

    /// Whether the slot at `at` is used, and the next one, which must be taken first.
    fn has_used_at(&self, at: Pos) -> bool {
        let is_used = |at: Pos| {
            at.is_used(self.parts.desc.sync_load(at.offset() + DESC_FLAGS, Ordering::Relaxed))
        };
        // A whole ring in flight appears "used a lap ago" only with the other wrap bit; a ring with
        // nothing in flight has nothing to return.
        self.free < self.parts.size && is_used(self.used) && (at == self.used || is_used(at))
    }

    fn has_used_acquire(&self) -> bool {
        let at = self.used.offset() + DESC_FLAGS;
        // Driver sees id and length /before/ it trusts the flags; pairs with the releases in the
        // device's `put` and `publish`; loom test `packed_publish_take`.
        self.free < self.parts.size
            && self.used.is_used(self.parts.desc.sync_load(at, Ordering::Acquire))
    }
}
