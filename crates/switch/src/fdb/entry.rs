//! One entry of the table: two words, written under the lock and read without.
//!
//! **A reader never gets another address's port**, which would be an isolation fault. Each entry is
//! a seqlock whose sequence number is the *generation* in the value word. To reuse an entry for
//! another address the writer (one at a time, under the mutex) does, in this order:
//! 1. value: not valid, generation + 1;
//! 2. release fence, then key: the new one;
//! 3. value, with release: valid, the new port.
//!
//! A reader loads value (acquire), key, and after an acquire fence value again. If the first load
//! is valid and of generation g, g's key was written before it (3 pairs with the acquire load). If
//! the key it then loads is a later one, the fences pair (2 with the reader's) and its last load
//! sees at least step 1: the generations differ and the entry is ignored. So the key, the
//! generation and the port belong together, unless the entry is reused exactly 2^14 times between a
//! reader's two loads. Port and time share one word, so a move and a refresh need no such protocol.
//! A reader concurrent with a replacement misses the entry: the frame is flooded, as for any
//! unknown address.
//!
//! The models in `models` check this, but for the reuse of generations.

use shm::sync::{AtomicU64, Ordering, fence};

use super::PortId;

/// The words of an entry.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    /// Packed address and VLAN; 0 where there is none.
    pub key: &'a AtomicU64,
    /// A [`Value`].
    pub value: &'a AtomicU64,
}

impl Words<'_> {
    /// Reads the value if it belongs to `key`: the reader's side.
    #[inline]
    pub fn read(self, key: u64) -> Option<Value> {
        // Pairs with the release store in `fill`: a valid value comes with its key.
        let before = Value(self.value.load(Ordering::Acquire));
        let same_key = self.key.load(Ordering::Relaxed) == key;
        // Pairs with the fence in `fill`: if that load saw a later key, the next load sees that the
        // earlier value was vacated.
        fence(Ordering::Acquire);
        let after = Value(self.value.load(Ordering::Relaxed));
        let same_entry = before.generation() == after.generation();
        (same_key && same_entry && before.is_valid() && after.is_valid()).then_some(after)
    }

    /// Step 1: invalidates the entry for its readers. Returns what it was.
    pub fn vacate(self) -> Value {
        let old = self.value();
        self.value.store(old.next_generation().0, Ordering::Relaxed);
        // Pairs with the fence in `read`: a reader that sees the key change sees the value vacated.
        fence(Ordering::Release);
        self.key.store(0, Ordering::Relaxed);
        old
    }

    /// Steps 2 and 3, of a vacated entry.
    pub fn fill(self, key: u64, value: Value) {
        let generation = self.value();
        // Pairs with the fence in `read`, as in `vacate`, which came before.
        fence(Ordering::Release);
        self.key.store(key, Ordering::Relaxed);
        // Pairs with the acquire load in `read`: a valid value comes with its key.
        self.value.store(value.with_generation_of(generation).0, Ordering::Release);
    }

    /// Replaces the value of an entry that keeps its address: one word, so no protocol is needed.
    pub fn put(self, old: Value, new: Value) {
        self.value.store(new.with_generation_of(old).0, Ordering::Release);
    }

    /// Refreshes the value. If another worker, or the lock's holder, changed it first, that one is
    /// kept.
    #[inline]
    pub fn refresh(self, value: Value, now_s: u32) {
        let seen = value.with_seen(now_s).0;
        let order = Ordering::Relaxed;
        let _ = self.value.compare_exchange(value.0, seen, order, order);
    }

    /// The value as the holder of the lock has it, and for others a hint.
    #[inline]
    pub fn value(self) -> Value {
        Value(self.value.load(Ordering::Relaxed))
    }
}

/// Value word; its layout is in the documentation of the table.
#[derive(Clone, Copy)]
pub(super) struct Value(pub u64);

impl Value {
    pub const VALID: u64 = 1 << 63;
    const STATIC: u64 = 1 << 62;
    const GENERATION_ONE: u64 = 1 << 48;
    pub const GENERATION: u64 = 0x3fff << 48;

    pub fn new(port: PortId, seen_s: u32) -> Self {
        Self(Self::VALID | u64::from(port.0) << 32 | u64::from(seen_s))
    }

    #[inline]
    pub fn is_valid(self) -> bool {
        self.0 & Self::VALID != 0
    }

    #[inline]
    pub fn is_static(self) -> bool {
        self.0 & Self::STATIC != 0
    }

    #[inline]
    pub fn generation(self) -> u64 {
        self.0 & Self::GENERATION
    }

    #[inline]
    pub fn port(self) -> PortId {
        PortId((self.0 >> 32) as u16)
    }

    #[inline]
    pub fn seen_s(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub fn with_seen(self, seen_s: u32) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | u64::from(seen_s))
    }

    pub fn with_static(self) -> Self {
        Self(self.0 | Self::STATIC)
    }

    pub fn with_generation_of(self, other: Self) -> Self {
        Self(self.0 & !Self::GENERATION | other.generation())
    }

    /// The invalid value of the next generation, which wraps.
    pub fn next_generation(self) -> Self {
        Self(self.0.wrapping_add(Self::GENERATION_ONE) & Self::GENERATION)
    }
}

#[cfg(all(test, loom))]
mod models;
