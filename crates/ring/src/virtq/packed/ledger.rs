//! Progress of a packed ring's device half in memory that outlives its process.
//!
//! A packed ring has no index in memory, and a used descriptor overwrites the length of its chain:
//! a successor could neither find the position nor walk the ring to it. So the device half writes
//! down each chain *before* it marks it used, and the positions in one word:
//!
//! ```text
//!   word:     published position │ used position        (one store)
//!   entries:  by slot: id, slots and length of the chain that is used there, and whether its
//!             frame continues in the next chain
//!
//!   put:      entry ─▶ word (used position moves) ─▶ descriptor, the first one's flags excepted
//!   publish:  the first one's flags ─▶ word (published = used)
//! ```
//! Whatever the last store of a killed process was: if the positions differ and the descriptor at
//! the published one is still available, the burst was not published, and the successor writes it
//! again from the entries and publishes it. If it is not available, the burst was published (the
//! driver may have reused its descriptors). Either way the ring continues at the used position.
//!
//! A frame of several chains (MRG_RXBUF) may lack its last ones. Their number is in its header, and
//! the driver would take the first chains of the next frame for them. Their lengths are
//! overwritten, so that they cannot be available again: they are used with nothing written, and a
//! driver drops each of them as too short for a header. The frame is not lost, because its sender's
//! chain is not used yet.

use shm::sync::{Ordering, compiler_fence};
use shm::{Area, GuestMemory};

use super::{DESC_FLAGS, Parts, Pos};
use crate::virtq::{DESC_WRITE, Layout, LayoutError, lo16, lo32};

/// Offset of the positions, and of the ring's size, which is stored last at the start.
const WORD: usize = 0;
const SIZE: usize = 4;
/// Bytes before the entries, and of an entry.
const HEAD_LEN: usize = 16;
const ENTRY_LEN: usize = 8;
/// Entries for a ring of the largest size.
const ENTRIES: usize = 32_768;

/// Set in the length of an entry: the frame continues.
const CONTINUES: u32 = 1 << 31;

/// A chain that is about to be used.
pub(super) struct Entry {
    pub(super) id: u16,
    pub(super) slots: u16,
    pub(super) len: u32,
    /// Whether its frame continues in the next chain.
    pub(super) continues: bool,
}

impl Entry {
    fn bits(&self) -> u64 {
        debug_assert!(self.len < CONTINUES, "no chain is that long");
        let len = self.len | if self.continues { CONTINUES } else { 0 };
        u64::from(self.id) | u64::from(self.slots) << 16 | u64::from(len) << 32
    }

    fn from_bits(bits: u64) -> Self {
        let len = lo32(bits >> 32);
        let (id, slots) = (lo16(bits), lo16(bits >> 16));
        Self { id, slots, len: len & !CONTINUES, continues: len & CONTINUES != 0 }
    }
}

/// Progress of one packed ring, in memory that only its device half and its successor use.
#[derive(Clone)]
pub struct Ledger(Area);

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ledger")
    }
}

impl Ledger {
    /// Length of the memory for a ring of any size, in bytes.
    pub const LEN: usize = HEAD_LEN + ENTRIES * ENTRY_LEN;

    /// Uses an area of at least [`LEN`](Self::LEN) bytes; `None`: it is shorter.
    pub fn new(area: Area) -> Option<Self> {
        (area.len() >= Self::LEN).then_some(Self(area))
    }

    /// Writes down the position of a ring that starts or resumes.
    pub(super) fn start(&self, at: Pos, size: u16) {
        // Without a size it is not valid.
        self.0.sync_store_u32(SIZE, 0, Ordering::Release);
        self.positions(at, at);
        compiler_fence(Ordering::SeqCst);
        self.0.sync_store_u32(SIZE, size.into(), Ordering::Release);
    }

    fn positions(&self, published: Pos, used: Pos) {
        let word = u32::from(published.bits()) | u32::from(used.bits()) << 16;
        self.0.sync_store_u32(WORD, word, Ordering::Release);
    }

    /// Writes down a chain that is about to be used at `at`; `next`: the position after it.
    #[inline]
    pub(super) fn put(&self, published: Pos, at: Pos, next: Pos, entry: Entry) {
        // What was written to the chain precedes this.
        compiler_fence(Ordering::SeqCst);
        self.0.store_u64(entry_at(at), entry.bits());
        compiler_fence(Ordering::SeqCst);
        self.positions(published, next);
        // The caller's stores to the ring follow.
        compiler_fence(Ordering::SeqCst);
    }

    /// Writes down that all chains before `used` are published.
    #[inline]
    pub(super) fn publish(&self, used: Pos) {
        compiler_fence(Ordering::SeqCst);
        self.positions(used, used);
    }

    /// Ends the burst of a killed device half, and returns where the ring continues, in the form of
    /// VRING_BASE.
    ///
    /// # Errors
    /// [`LayoutError`]: of the ring; or [`Base`](LayoutError::Base) if this is not the ring's
    /// ledger.
    pub fn recover(&self, memory: &GuestMemory, layout: &Layout) -> Result<u32, LayoutError> {
        let parts = Parts::new(memory, layout)?;
        self.recover_in(&parts)
    }

    fn recover_in(&self, parts: &Parts) -> Result<u32, LayoutError> {
        let word = self.0.sync_load_u32(WORD, Ordering::Acquire);
        let foreign = LayoutError::Base(word);
        if self.0.sync_load_u32(SIZE, Ordering::Acquire) != u32::from(parts.size) {
            return Err(foreign);
        }
        let half = |bits: u32| Pos::from_bits(lo16(bits.into()), parts.size);
        let (Some(published), Some(used)) = (half(word), half(word >> 16)) else {
            return Err(foreign);
        };
        let flags = parts.desc.sync_load(published.offset() + DESC_FLAGS, Ordering::Acquire);
        if published != used && published.is_available(flags) {
            let chains = self.chains(published, used, parts.size).ok_or(foreign)?;
            let mut is_whole = false;
            // The first one last, as always.
            for (at, Entry { id, len, continues, .. }) in chains.into_iter().rev() {
                is_whole |= !continues;
                let len = if is_whole { len } else { 0 };
                let write = if len > 0 { DESC_WRITE } else { 0 };
                let flags = at.used_bits() | write;
                let order = Ordering::Release;
                parts.desc.sync_store_tail(at.offset() + 8, len, id, flags, order);
            }
        }
        self.start(used, parts.size);
        Ok(u32::from(used.bits()) | u32::from(used.bits()) << 16)
    }

    /// Chains between two positions. `None`: not as they were written.
    fn chains(&self, mut at: Pos, end: Pos, size: u16) -> Option<Vec<(Pos, Entry)>> {
        let (mut chains, mut left) = (Vec::new(), size);
        while at != end {
            let entry = Entry::from_bits(self.0.load_u64(entry_at(at)));
            let slots = entry.slots;
            left = left.checked_sub(slots).filter(|_| slots > 0)?;
            chains.push((at, entry));
            at.advance(slots, size);
        }
        Some(chains)
    }
}

fn entry_at(at: Pos) -> usize {
    HEAD_LEN + usize::from(at.slot) * ENTRY_LEN
}
