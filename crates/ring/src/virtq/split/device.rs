//! Device half of the split ring.

use std::ops::Range;

use shm::sync::{Ordering, fence};
use shm::{Area, GuestMemory};

use super::{FLAGS, IDX, NO_NOTIFICATION, Parts, RING, USED_ELEM_LEN, load_idx};
use crate::index::{Idx, Untrusted};
use crate::virtq::{
    Armed, Buf, Chain, DESC_INDIRECT, DESC_LEN, DESC_NEXT, DESC_WRITE, Features, Malformed,
    NextDesc, Taken, index, lo16, lo32, need_event,
};

pub(crate) struct SplitDevice {
    parts: Parts,
    features: Features,
    /// Next available index to take.
    avail_next: Idx<u16>,
    /// Next used index to fill; ahead of `used_published` between `put` and `publish`.
    used_next: Idx<u16>,
    used_published: Idx<u16>,
    /// Chains taken and not yet visibly used; together with new ones, never more than the ring
    /// holds.
    held: u16,
    /// Used index at the last call decision; `None` until the first, which always calls.
    used_called: Option<Idx<u16>>,
    /// A fault after valid chains, returned once these have been taken.
    fault: Option<Malformed>,
}

impl SplitDevice {
    /// Starts at the used index, independent of the position given.
    ///
    /// Buffers are used in order, so both are equal after a device stopped cleanly; where they
    /// differ, the used index is right. A device that crashed took buffers that it never used. A
    /// front-end that restores a machine or reconnects may send `avail.idx` (Cloud Hypervisor),
    /// with which the buffers between the two would never be used; or 0 (DPDK's virtio-user).
    /// DPDK's device resets to the used index, too.
    ///
    /// The used index is in the driver's memory. A wrong one is only a wrong position:
    /// [`take`](Self::take) rejects more available chains than the ring holds, every head and
    /// descriptor is checked, and the buffers used are the driver's own.
    pub(crate) fn new(parts: Parts, features: Features, _base: u16) -> Self {
        let used = Idx::<u16>::new(parts.used.sync_load(IDX, Ordering::Acquire));
        let avail_next = used;
        Self {
            parts,
            features,
            avail_next,
            used_next: used,
            used_published: used,
            held: 0,
            used_called: None,
            fault: None,
        }
    }

    pub(crate) fn size(&self) -> u16 {
        self.parts.size
    }

    pub(crate) fn base(&self) -> u32 {
        u32::from(self.avail_next.get())
    }

    pub(crate) fn take(
        &mut self,
        memory: &GuestMemory,
        max: usize,
        out: &mut Taken,
    ) -> Result<usize, Malformed> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Device sees avail.idx /before/ the ring entries and descriptors it covers; pairs with
        // the driver's release of avail.idx in `publish`; loom test `split_publish_take`.
        let avail = load_idx(&self.parts.avail, IDX, Ordering::Acquire);
        let ready = match avail.check_since(self.avail_next, 0..=self.parts.size - self.held) {
            Ok(ready) => ready,
            Err(seen) => {
                let taken = self.avail_next.get();
                return Err(self.fail(Malformed::IndexJump { seen, taken }));
            }
        };
        let had = out.chains.len();
        let n = max.saturating_sub(had).min(usize::from(ready)).min(HEADS_MAX);
        if n == 0 {
            return Ok(0);
        }
        let mut heads = [0; HEADS_MAX];
        self.fetch_heads(&mut heads[..n]);
        let mut left = &heads[..n];
        while let Some((head, desc)) = self.take_plain(&mut left, out) {
            if !self.take_several(memory, head, desc, out) {
                break;
            }
        }
        let done = u16::try_from(out.chains.len() - had).expect("at most HEADS_MAX");
        self.avail_next = self.avail_next.plus(done);
        self.held += done;
        match self.fault {
            Some(fault) if done == 0 => Err(fault),
            _ => Ok(usize::from(done)),
        }
    }

    /// Takes chains of one descriptor, the common case, until all `heads` are taken or another kind
    /// is found; returns that one, which is not read again. `heads` keeps those after it.
    #[inline]
    fn take_plain(&mut self, heads: &mut &[u16], out: &mut Taken) -> Option<(u16, Desc)> {
        let start = out.bufs.len();
        let (mut run, mut shared, mut end) = (0, 0, None);
        for head in heads.iter().copied() {
            let head = match Untrusted::new(head).check_below(self.parts.size) {
                Ok(head) => head,
                Err(seen) => {
                    self.fault = Some(Malformed::DescIndex(seen));
                    break;
                }
            };
            let desc = Desc::read(&self.parts.desc, head);
            if run == 0 {
                shared = desc.flags & DESC_WRITE;
            }
            if (desc.flags ^ shared) & (DESC_NEXT | DESC_INDIRECT | DESC_WRITE) != 0 {
                end = Some((head, desc));
                break;
            }
            out.bufs.push(desc.buf());
            run += 1;
        }
        let (taken, rest) = heads.split_at(run);
        out.push_singles(taken.iter().copied(), start, shared != 0);
        *heads = rest.get(1..).unwrap_or_default();
        end
    }

    /// Takes a chain of another kind; false: it is not taken. Out of line: the loop over single
    /// descriptors then keeps its state in registers.
    #[inline(never)]
    fn take_several(
        &mut self,
        memory: &GuestMemory,
        head: u16,
        first: Desc,
        out: &mut Taken,
    ) -> bool {
        let mut chain = out.begin(head);
        let walked = self.chain(memory, first, &mut chain, out);
        self.fault = walked.as_ref().err().copied();
        let is_taken = walked.is_ok_and(|end| end != NextDesc::Leave);
        if is_taken {
            out.chains.push(chain);
        } else {
            out.forget(&chain);
        }
        is_taken
    }

    /// Fetches the next heads, and prefetches their descriptors. Into the place where they are
    /// read: a copy of the array, by loads wider than the stores, would wait for all stores before.
    #[inline]
    fn fetch_heads(&self, heads: &mut [u16]) {
        let slot = self.avail_next.slot(self.parts.mask).get();
        let to_end = heads.len().min(usize::from(self.parts.size) - slot);
        let (first, wrapped) = heads.split_at_mut(to_end);
        self.parts.avail.load_u16s(RING + 2 * slot, first);
        self.parts.avail.load_u16s(RING, wrapped);
        for head in heads.iter() {
            self.parts.desc.prefetch(DESC_LEN * usize::from(*head));
        }
    }

    fn fail(&mut self, fault: Malformed) -> Malformed {
        *self.fault.insert(fault)
    }

    /// Walks one chain from its first descriptor. Every descriptor is read exactly once; returns
    /// how the walk ended.
    fn chain(
        &self,
        memory: &GuestMemory,
        mut desc: Desc,
        chain: &mut Chain,
        out: &mut Taken,
    ) -> Result<NextDesc, Malformed> {
        loop {
            if chain.slots == self.parts.size {
                return Err(Malformed::ChainTooLong);
            }
            chain.slots += 1;
            if desc.flags & DESC_INDIRECT != 0 {
                return self.indirect(memory, &desc, chain, out);
            }
            if chain.slots == 1 && out.next_desc() == NextDesc::Leave {
                return Ok(NextDesc::Leave);
            }
            out.push(chain, desc.buf())?;
            if desc.flags & DESC_NEXT == 0 {
                return Ok(NextDesc::Read);
            }
            let next = desc.next.check_below(self.parts.size).map_err(Malformed::DescIndex)?;
            if chain.slots < self.parts.size
                && let end @ (NextDesc::Skip | NextDesc::Leave) = out.next_desc()
            {
                return Ok(end);
            }
            desc = Desc::read(&self.parts.desc, next);
        }
    }

    #[cold]
    fn no_indirect(&self) -> Malformed {
        Malformed::Indirect
    }

    /// Reads the table of an INDIRECT descriptor. It ends the chain (2.7.5.3.1: no NEXT beside
    /// INDIRECT), and may not hold another.
    fn indirect(
        &self,
        memory: &GuestMemory,
        desc: &Desc,
        chain: &mut Chain,
        out: &mut Taken,
    ) -> Result<NextDesc, Malformed> {
        if !self.features.indirect || desc.flags & DESC_NEXT != 0 {
            return Err(self.no_indirect());
        }
        let len = index(desc.len);
        let entries = len / DESC_LEN;
        let whole = len.is_multiple_of(DESC_LEN) && entries > 0;
        if !whole || entries > usize::from(self.parts.size) {
            return Err(Malformed::IndirectLen(desc.len));
        }
        let table = Area::new(memory, desc.addr, len).filter(|_| desc.addr.is_multiple_of(8));
        let table = table.ok_or(Malformed::IndirectOutside(desc.addr))?;
        let end = u16::try_from(entries).expect("at most the ring's size");
        let mut at = 0_u16;
        // Descriptors before the table count: a chain is not longer than the ring.
        let entries = entries.min(usize::from(self.parts.size - (chain.slots - 1)));
        for _ in 0..entries {
            if let end @ (NextDesc::Skip | NextDesc::Leave) = out.next_desc() {
                return Ok(end);
            }
            let desc = Desc::read(&table, at);
            if desc.flags & DESC_INDIRECT != 0 {
                return Err(Malformed::Indirect);
            }
            out.push(chain, desc.buf())?;
            if desc.flags & DESC_NEXT == 0 {
                return Ok(NextDesc::Read);
            }
            at = desc.next.check_below(end).map_err(Malformed::DescIndex)?;
        }
        Err(Malformed::ChainTooLong)
    }

    pub(crate) fn untake(&mut self, chains: u16) {
        assert!(chains <= self.held, "untake of chains never taken");
        self.avail_next = self.avail_next.minus(chains);
        self.held -= chains;
    }

    #[inline]
    pub(crate) fn put(&mut self, id: u16, len: u32) {
        let at = self.parts.used_element(self.used_next.advance());
        self.parts.used.store_u32s(at, [u32::from(id), len]);
    }

    /// Uses a burst of chains, each with the length written to it.
    #[inline]
    pub(crate) fn put_each(&mut self, chains: &[Chain], lens: impl Iterator<Item = u32>) {
        chains.iter().zip(lens).for_each(|(chain, len)| self.put(chain.id, len));
    }

    pub(crate) fn put_all(&mut self, chains: &[Chain]) {
        match chains {
            [_, .., last] if self.features.in_order => {
                //= virtio-v1.3 2.7.9: the device can notify the use of a batch of buffers to the
                //= driver by only writing out a single used ring entry with the id corresponding
                //= to the head entry of the descriptor chain describing the last buffer.
                self.put(last.id, 0);
                let skipped = u16::try_from(chains.len() - 1).expect("a burst");
                self.used_next = self.used_next.plus(skipped);
            }
            _ => self.put_each(chains, std::iter::repeat(0)),
        }
    }

    pub(crate) fn prefetch(&self) {
        // 32 entries to a line; descriptors, 4 to a line, are mostly in ring order.
        for entry in [0, 32] {
            self.parts.avail.prefetch(self.parts.avail_entry(self.avail_next.plus(entry)));
        }
        for line in 0..16 {
            let slot = self.avail_next.plus(4 * line).slot(self.parts.mask);
            self.parts.desc.prefetch(slot.offset(DESC_LEN));
        }
    }

    /// Bytes of the index in the used ring.
    pub(crate) const INDEX: Range<usize> = IDX..IDX + 2;

    /// Bytes of the used ring that hold the elements that are not published: in two parts, if they
    /// wrap.
    pub(crate) fn unpublished(&self) -> [Range<usize>; 2] {
        let moved = self.used_next.since(self.used_published);
        let first = self.parts.used_element(self.used_published);
        let end = self.parts.avail_event();
        let bytes = USED_ELEM_LEN * usize::from(moved);
        let before_end = bytes.min(end - first);
        [first..first + before_end, RING..RING + (bytes - before_end)]
    }

    /// Bytes of the used ring that `arm` and `disarm` write.
    pub(crate) fn event_words(&self) -> [Range<usize>; 2] {
        let at = if self.features.event_idx { self.parts.avail_event() } else { FLAGS };
        [at..at + 2, 0..0]
    }

    pub(crate) fn publish(&mut self) {
        let moved = self.used_next.since(self.used_published);
        assert!(moved <= self.held, "more chains used than taken");
        if self.used_next != self.used_published {
            // Driver sees used elements /before/ used.idx; pairs with the acquire in the driver's
            // `take_used`; loom test `split_publish_take`.
            self.parts.used.sync_store(IDX, self.used_next.get(), Ordering::Release);
            self.used_published = self.used_next;
            // The next burst's elements, 8 to a line: the driver has read these lines last.
            for line in 0..8 {
                let at = self.parts.used_element(self.used_next.plus(8 * line));
                self.parts.used.prefetch_write(at);
            }
            self.held -= moved;
        }
    }

    pub(crate) fn call_needed(&mut self) -> bool {
        let new = self.used_published;
        let old = self.used_called.replace(new);
        if old == Some(new) {
            return false;
        }
        // used.idx is visible /before/ we check whether the driver sleeps; pairs with the fence in
        // the driver's `arm`; loom test `split_arm_used`.
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = load_idx(&self.parts.avail, self.parts.used_event(), Ordering::Relaxed);
            old.is_none_or(|old| need_event(event, new, old))
        } else {
            //= virtio-v1.3 2.7.7.1: the device MUST ignore the used_event value and send no
            //= notification if flags is 1.
            self.parts.avail.sync_load(FLAGS, Ordering::Relaxed) & NO_NOTIFICATION == 0
        }
    }

    pub(crate) fn arm(&mut self) -> Armed {
        if self.features.event_idx {
            let at = self.parts.avail_event();
            self.parts.used.sync_store(at, self.avail_next.get(), Ordering::Relaxed);
        } else {
            self.parts.used.sync_store(FLAGS, 0, Ordering::Relaxed);
        }
        // The driver sees our event /before/ we re-check; pairs with the fence in its
        // `kick_needed`; loom test `split_arm_avail`.
        fence(Ordering::SeqCst);
        if self.has_work() { Armed::WorkPending } else { Armed::Armed }
    }

    pub(crate) fn disarm(&mut self) {
        // With the event index nothing is written: the driver passes a stale avail_event once in
        // 65536 buffers, which costs less than updating it.
        if !self.features.event_idx {
            self.parts.used.sync_store(FLAGS, NO_NOTIFICATION, Ordering::Relaxed);
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        let avail = load_idx(&self.parts.avail, IDX, Ordering::Relaxed);
        self.fault.is_some() || avail.hint_since(self.avail_next) != 0
    }
}

/// Most chains one `take` reads; longer bursts gain nothing and cost cache.
const HEADS_MAX: usize = 64;

/// A descriptor, copied out.
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: Untrusted<u16>,
}

impl Desc {
    #[inline]
    fn read(table: &Area, at: u16) -> Self {
        let at = DESC_LEN * usize::from(at);
        let (addr, rest) = table.load_pair(at);
        Self {
            addr,
            len: lo32(rest),
            flags: lo16(rest >> 32),
            next: Untrusted::new(lo16(rest >> 48)),
        }
    }

    #[inline]
    fn buf(&self) -> Buf {
        Buf { addr: self.addr, len: self.len, write: self.flags & DESC_WRITE != 0 }
    }
}
