//! Device half of the packed ring.

use std::ops::Range;

use shm::sync::{Ordering, fence};
use shm::{Area, GuestMemory};

use super::{
    AVAIL, DESC_FLAGS, EVENT_LEN, Entry, Ledger, Parts, Pos, USED, event_arm, event_disarm,
    event_wanted,
};
use crate::virtq::{
    Armed, Buf, Chain, DESC_INDIRECT, DESC_LEN, DESC_NEXT, DESC_WRITE, Features, LayoutError,
    Malformed, NextDesc, Taken, index, lo16, lo32,
};

pub(crate) struct PackedDevice {
    parts: Parts,
    features: Features,
    /// Next descriptor to take.
    avail: Pos,
    /// Next descriptor to use.
    used: Pos,
    /// First used descriptor since the last publication, whose flags are written last.
    first: Option<(Pos, u16)>,
    /// Slots used and published since the last call decision, saturating.
    moved: u16,
    /// Slots used since the last publication.
    unpublished: u16,
    /// Slots taken and not yet visibly used; never more than the ring has.
    held: u16,
    fault: Option<Malformed>,
    /// Where progress is written down, if a successor may need it.
    ledger: Option<Ledger>,
    /// Position up to which chains are published, for the ledger.
    published: Pos,
}

/// Base of an unused ring: position 0, wrap 1, for both sides.
const BASE_FRESH: u32 = 0x8000_8000;

impl PackedDevice {
    pub(crate) fn new(parts: Parts, features: Features, base: u32) -> Result<Self, LayoutError> {
        let base = match base {
            0 if parts.is_in_first_lap() => BASE_FRESH,
            // DPDK's virtio-user sends the available position only. Chains are used in order and a
            // ring that stops has none in flight, so the used position is equal.
            1..=0xffff => base | base << 16,
            _ => base,
        };
        let half =
            |bits: u64| Pos::from_bits(lo16(bits), parts.size).ok_or(LayoutError::Base(base));
        let avail = half(u64::from(base))?;
        let used = half(u64::from(base >> 16))?;
        Ok(Self {
            parts,
            features,
            avail,
            used,
            first: None,
            moved: 0,
            unpublished: 0,
            held: 0,
            fault: None,
            ledger: None,
            published: used,
        })
    }

    /// Writes progress down from here on, between two bursts.
    pub(crate) fn keep(&mut self, ledger: Ledger) {
        assert!(self.first.is_none(), "within a burst");
        self.published = self.used;
        ledger.start(self.used, self.parts.size);
        self.ledger = Some(ledger);
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.ledger.is_some()
    }

    pub(crate) fn size(&self) -> u16 {
        self.parts.size
    }

    pub(crate) fn base(&self) -> u32 {
        u32::from(self.avail.bits()) | u32::from(self.used.bits()) << 16
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
        let had = out.chains.len();
        while let Some(flags) = self.take_plain(max, out) {
            if !self.avail.is_available(flags) {
                break;
            }
            let desc = Desc::read_head(&self.parts.desc, self.avail.offset(), flags);
            let mut chain = out.begin(0);
            let walked = self.chain(memory, desc, &mut chain, out);
            if walked == Ok(NextDesc::Leave) {
                out.forget(&chain);
                break;
            }
            if let Err(fault) = walked.and_then(|_| self.check_held(&chain)) {
                out.forget(&chain);
                self.fault = Some(fault);
                break;
            }
            self.avail.advance(chain.slots, self.parts.size);
            self.held += chain.slots;
            out.chains.push(chain);
        }
        match self.fault {
            Some(fault) if out.chains.len() == had => Err(fault),
            _ => Ok(out.chains.len() - had),
        }
    }

    /// Takes chains of one descriptor, the common case, until `max` are taken or another kind is
    /// found; returns the flags of that one, which are not fetched again.
    #[inline]
    fn take_plain(&mut self, max: usize, out: &mut Taken) -> Option<u16> {
        /// Flags that all descriptors of a run share.
        const SHARED: u16 = AVAIL | USED | DESC_NEXT | DESC_INDIRECT | DESC_WRITE;
        while out.chains.len() < max {
            let size = self.parts.size;
            let (slot, left) = (usize::from(self.avail.slot), max - out.chains.len());
            // One run: up to the end of the ring or the first slot that we hold.
            let n = left.min(usize::from(size) - slot).min(usize::from(size - self.held));
            let descs = self.parts.desc.descs(self.avail.offset(), n.max(1));
            // Device sees the descriptor /before/ it trusts its flags; pairs with the driver's
            // release in `publish`; loom test `packed_publish_take`.
            let flags_of = |i| descs.sync_load(i, Ordering::Acquire);
            let first = flags_of(0);
            if n == 0 || first & (SHARED & !DESC_WRITE) != self.avail.available_bits() {
                return Some(first);
            }
            let (mut run, mut end) = (1, None);
            self.prefetch_ahead(slot);
            while run < n {
                let flags = flags_of(run);
                if (flags ^ first) & SHARED != 0 {
                    end = Some(flags);
                    break;
                }
                // 4 descriptors to a line.
                if (slot + run).is_multiple_of(4) {
                    self.prefetch_ahead(slot + run);
                }
                run += 1;
            }
            let (start, write) = (out.bufs.len(), first & DESC_WRITE != 0);
            out.bufs.extend(descs.bufs(run).map(|(addr, len)| Buf { addr, len, write }));
            out.push_singles(descs.ids(run), start, write);
            let run = u16::try_from(run).expect("at most the ring's size");
            self.avail.advance(run, size);
            self.held += run;
            if end.is_some() {
                return end;
            }
        }
        None
    }

    /// Prefetches the descriptor four lines after `slot`, for writing: the used descriptor replaces
    /// the available one.
    #[inline]
    fn prefetch_ahead(&self, slot: usize) {
        self.parts.desc.prefetch_write((slot + 16) * DESC_LEN);
    }

    /// Rejects a chain that reaches into slots that we hold: the driver cannot own them.
    #[inline]
    fn check_held(&self, chain: &Chain) -> Result<(), Malformed> {
        if chain.slots > self.parts.size - self.held {
            let (seen, taken) = (self.avail.bits(), self.used.bits());
            return Err(Malformed::IndexJump { seen, taken });
        }
        Ok(())
    }

    /// Walks one chain from the available position. Every descriptor is read exactly once; returns
    /// how the walk ended.
    ///
    /// # Errors
    /// A chain without an indirect table that alone exceeds the bound on descriptors, too.
    fn chain(
        &self,
        memory: &GuestMemory,
        mut desc: Desc,
        chain: &mut Chain,
        out: &mut Taken,
    ) -> Result<NextDesc, Malformed> {
        let mut at = self.avail;
        loop {
            if chain.slots == self.parts.size {
                return Err(Malformed::ChainTooLong);
            }
            chain.slots += 1;
            // The last descriptor's id names the chain (2.8.6).
            chain.id = desc.id;
            if desc.flags & DESC_INDIRECT != 0 {
                return self.indirect(memory, &desc, chain, out);
            }
            match out.next_desc() {
                NextDesc::Read => out.push(chain, desc.buf())?,
                // Its id is at its end, and the walk there is the cost that is bounded.
                NextDesc::Skip => return Err(Malformed::DirectTooLong(chain.slots)),
                NextDesc::Leave => return Ok(NextDesc::Leave),
            }
            if desc.flags & DESC_NEXT == 0 {
                return Ok(NextDesc::Read);
            }
            at.advance(1, self.parts.size);
            desc = Desc::read(&self.parts.desc, at.offset());
        }
    }

    /// Reads the table of an INDIRECT descriptor: all its entries, in order (2.8.7).
    fn indirect(
        &self,
        memory: &GuestMemory,
        desc: &Desc,
        chain: &mut Chain,
        out: &mut Taken,
    ) -> Result<NextDesc, Malformed> {
        if !self.features.indirect || chain.slots > 1 || desc.flags & DESC_NEXT != 0 {
            return Err(Malformed::Indirect);
        }
        let len = index(desc.len);
        let entries = len / DESC_LEN;
        let whole = len.is_multiple_of(DESC_LEN) && entries > 0;
        if !whole || entries > usize::from(self.parts.size) {
            return Err(Malformed::IndirectLen(desc.len));
        }
        let table = Area::new(memory, desc.addr, len).filter(|_| desc.addr.is_multiple_of(8));
        let table = table.ok_or(Malformed::IndirectOutside(desc.addr))?;
        for at in 0..entries {
            if let end @ (NextDesc::Skip | NextDesc::Leave) = out.next_desc() {
                return Ok(end);
            }
            let desc = Desc::read(&table, at * DESC_LEN);
            if desc.flags & DESC_INDIRECT != 0 {
                return Err(Malformed::Indirect);
            }
            out.push(chain, desc.buf())?;
        }
        Ok(NextDesc::Read)
    }

    pub(crate) fn untake(&mut self, slots: u16) {
        assert!(slots <= self.held, "untake of chains never taken");
        self.avail.rewind(slots, self.parts.size);
        self.held -= slots;
    }

    #[inline(always)]
    pub(crate) fn put(&mut self, id: u16, slots: u16, len: u32, continues: bool) {
        if let Some(ledger) = &self.ledger {
            let mut next = self.used;
            next.advance(slots, self.parts.size);
            let entry = Entry { id, slots, len, continues };
            ledger.put(self.published, self.used, next, entry);
        }
        if self.first.is_none() {
            let at = self.used.offset();
            self.parts.desc.store_u32(at + 8, len);
            self.parts.desc.store_u16(at + 12, id);
            self.first = Some((self.used, used_flags(self.used, len)));
        } else {
            self.store_used(self.used, id, len);
        }
        self.used.advance(slots, self.parts.size);
        self.unpublished = self.unpublished.saturating_add(slots);
    }

    /// Writes a used descriptor that is not the first since the last publication.
    #[inline]
    fn store_used(&self, at: Pos, id: u16, len: u32) {
        let (offset, flags) = (at.offset() + 8, used_flags(at, len));
        // Driver sees id and length /before/ flags; pairs with the acquire in its `take_used`.
        self.parts.desc.sync_store_tail(offset, len, id, flags, Ordering::Release);
    }

    /// Uses a burst of chains, each with the length written to it, as [`put`](Self::put) one by
    /// one.
    #[inline]
    pub(crate) fn put_each(&mut self, chains: &[Chain], lens: impl Iterator<Item = u32>) {
        let mut burst = chains.iter().zip(lens);
        if self.ledger.is_some() {
            return burst.for_each(|(c, len)| self.put(c.id, c.slots, len, false));
        }
        let Some((first, len)) = burst.next() else { return };
        self.put(first.id, first.slots, len, false);
        let (mut at, mut slots) = (self.used, 0);
        for (chain, len) in burst {
            self.store_used(at, chain.id, len);
            at.advance(chain.slots, self.parts.size);
            slots += chain.slots;
        }
        self.used = at;
        self.unpublished = self.unpublished.saturating_add(slots);
    }

    /// Uses a burst of chains with nothing written.
    #[inline]
    pub(crate) fn put_all(&mut self, chains: &[Chain]) {
        match chains {
            [_, .., last] if self.features.in_order => {
                //= virtio-v1.3 2.8.9: the device can notify the use of a batch of buffers to the
                //= driver by only writing out a single used descriptor with the Buffer ID
                //= corresponding to the last descriptor in the batch.
                self.put(last.id, chains.iter().map(|c| c.slots).sum(), 0, false);
            }
            _ => self.put_each(chains, std::iter::repeat(0)),
        }
    }

    pub(crate) fn prefetch(&self) {
        let mut at = self.avail;
        // 4 descriptors to a line; at most once around.
        for _ in 0..16.min(self.parts.size / 4) {
            self.parts.desc.prefetch_write(at.offset());
            at.advance(4, self.parts.size);
        }
    }

    /// Bytes of the device area that `arm` and `disarm` write.
    pub(crate) const EVENT: Range<usize> = 0..EVENT_LEN;

    /// Bytes of the descriptor ring from the first used descriptor that is not published to the
    /// position: in two parts, if they wrap.
    pub(crate) fn unpublished(&self) -> [Range<usize>; 2] {
        let Some((first, _)) = self.first else { return [0..0, 0..0] };
        let (start, end) = (first.offset(), self.used.offset());
        if first.wrap == self.used.wrap {
            [start..end, 0..0]
        } else {
            [start..DESC_LEN * usize::from(self.parts.size), 0..end]
        }
    }

    pub(crate) fn publish(&mut self) {
        if let Some((pos, flags)) = self.first.take() {
            // The first used descriptor is written last, so that the driver sees the burst as a
            // whole; pairs with the acquire in its `take_used`.
            self.parts.desc.sync_store(pos.offset() + DESC_FLAGS, flags, Ordering::Release);
            if let Some(ledger) = &self.ledger {
                ledger.publish(self.used);
                self.published = self.used;
            }
            let used = std::mem::take(&mut self.unpublished);
            assert!(used <= self.held, "more chains used than taken");
            self.held -= used;
            self.moved = self.moved.saturating_add(used);
        }
    }

    pub(crate) fn call_needed(&mut self) -> bool {
        let moved = std::mem::take(&mut self.moved);
        if moved == 0 {
            return false;
        }
        // Used descriptors are visible /before/ we check whether the driver sleeps; pairs with the
        // fence in its `arm`; loom test `packed_arm_used`.
        fence(Ordering::SeqCst);
        event_wanted(&self.parts.driver, self.used, moved, self.parts.size)
    }

    pub(crate) fn arm(&mut self) -> Armed {
        event_arm(&self.parts.device, self.features, self.avail);
        // The driver sees our event /before/ we re-check; pairs with the fence in its
        // `kick_needed`; loom test `packed_arm_avail`.
        fence(Ordering::SeqCst);
        if self.has_work() { Armed::WorkPending } else { Armed::Armed }
    }

    pub(crate) fn disarm(&mut self) {
        event_disarm(&self.parts.device);
    }

    pub(crate) fn has_work(&self) -> bool {
        let at = self.avail.offset() + DESC_FLAGS;
        self.fault.is_some()
            || self.avail.is_available(self.parts.desc.sync_load(at, Ordering::Relaxed))
    }
}

/// Flags of a used descriptor at `at`, with `len` bytes written.
#[inline]
fn used_flags(at: Pos, len: u32) -> u16 {
    at.used_bits() | if len > 0 { DESC_WRITE } else { 0 }
}

/// A descriptor, copied out.
struct Desc {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

impl Desc {
    #[inline]
    fn read(table: &Area, at: usize) -> Self {
        let (addr, rest) = table.load_pair(at);
        Self { addr, len: lo32(rest), id: lo16(rest >> 32), flags: lo16(rest >> 48) }
    }

    /// The rest of a descriptor whose flags were fetched already, and are not fetched again.
    #[inline]
    fn read_head(table: &Area, at: usize, flags: u16) -> Self {
        let (addr, len, id) = table.descs(at, 1).load_unflagged(0);
        Self { addr, len, id, flags }
    }

    #[inline]
    fn buf(&self) -> Buf {
        Buf { addr: self.addr, len: self.len, write: self.flags & DESC_WRITE != 0 }
    }
}
