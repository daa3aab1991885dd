//! Positions in a ring, and values that the peer wrote.
//!
//! ```text
//!   Idx    ... 65534  65535  0  1  2 ...      free-running, wraps at the width of the ring's own
//!   Slot   ...     6      7  0  1  2 ...      its entry in a ring of 8 (Idx::slot)
//! ```

/// A free-running index of a ring; wraps at the width `W` that it has in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Idx<W>(W);

/// The number of an entry of a ring, below the ring's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(usize);

/// A value read from memory that the peer can write. Only a check returns it plain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Untrusted<T>(T);

macro_rules! idx {
    ($width:ty) => {
        impl Idx<$width> {
            pub const fn new(value: $width) -> Self {
                Self(value)
            }

            /// The value as it is written into the ring.
            #[inline]
            pub const fn get(self) -> $width {
                self.0
            }

            /// The index `entries` later.
            #[inline]
            pub const fn plus(self, entries: $width) -> Self {
                Self(self.0.wrapping_add(entries))
            }

            /// The index `entries` earlier.
            #[inline]
            pub const fn minus(self, entries: $width) -> Self {
                Self(self.0.wrapping_sub(entries))
            }

            /// Number of entries from `earlier` to this index.
            #[inline]
            pub const fn since(self, earlier: Self) -> $width {
                self.0.wrapping_sub(earlier.0)
            }

            /// Returns the index and moves it to the next entry.
            #[inline]
            pub const fn advance(&mut self) -> Self {
                let at = *self;
                *self = at.plus(1);
                at
            }
        }

        impl Untrusted<Idx<$width>> {
            /// An index as the peer wrote it.
            #[inline]
            pub const fn index(value: $width) -> Self {
                Self(Idx::<$width>::new(value))
            }

            /// Number of entries from `from` on, if `allowed` holds it; otherwise the index as
            /// read, for the report.
            #[inline]
            pub fn check_since(
                self,
                from: Idx<$width>,
                allowed: core::ops::RangeInclusive<$width>,
            ) -> Result<$width, $width> {
                let entries = self.0.since(from);
                if allowed.contains(&entries) { Ok(entries) } else { Err(self.0.get()) }
            }

            /// Number of entries from `from` to this index, unchecked: for decisions whether to
            /// sleep or to notify, in which a wrong value harms only the peer.
            #[inline]
            pub const fn hint_since(self, from: Idx<$width>) -> $width {
                self.0.since(from)
            }

            /// Number of entries from this index to `to`, unchecked; as
            /// [`hint_since`](Self::hint_since).
            #[inline]
            pub const fn hint_until(self, to: Idx<$width>) -> $width {
                to.since(self.0)
            }
        }
    };
}
idx!(u16);
idx!(u32);

impl Idx<u16> {
    /// The entry of this index in a ring of `mask + 1` entries.
    #[inline]
    pub fn slot(self, mask: u16) -> Slot {
        Slot(usize::from(self.0 & mask))
    }
}

impl Idx<u32> {
    /// The entry of this index in a ring of `mask + 1` entries.
    #[inline]
    pub fn slot(self, mask: u32) -> Slot {
        Slot(usize::try_from(self.0 & mask).expect("usize holds 32 bits"))
    }
}

impl Slot {
    /// Its offset in an array of entries of `len` bytes.
    #[inline]
    pub const fn offset(self, len: usize) -> usize {
        self.0 * len
    }

    /// Its index in a private array of as many entries as the ring.
    #[inline]
    pub const fn get(self) -> usize {
        self.0
    }
}

impl<T: Copy + PartialOrd> Untrusted<T> {
    /// A value as the peer wrote it.
    #[inline]
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// The value, if it is below `end`; otherwise the same value, for the report.
    #[inline]
    pub fn check_below(self, end: T) -> Result<T, T> {
        if self.0 < end { Ok(self.0) } else { Err(self.0) }
    }
}

#[cfg(kani)]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_wraps_at_its_own_width_and_slots_follow() {
        let mut idx = Idx::<u16>::new(u16::MAX - 1);
        let slots: Vec<usize> = (0..4).map(|_| idx.advance().slot(7).get()).collect();
        assert_eq!(slots, [6, 7, 0, 1]);
        assert_eq!((idx.get(), idx.since(Idx::<u16>::new(u16::MAX))), (2, 3));
        let last = Idx::<u32>::new(u32::MAX);
        assert_eq!((last.slot(255).offset(12), last.plus(1).get()), (255 * 12, 0));
        assert_eq!(last.plus(5).minus(5), last);
    }

    #[test]
    fn untrusted_index_counts_only_what_is_allowed_from_every_start_near_the_wrap() {
        for start in (0..20_u16).chain(u16::MAX - 20..=u16::MAX) {
            let from = Idx::<u16>::new(start);
            for ahead in 0..40 {
                let seen = from.plus(ahead).get();
                let counted = Untrusted::<Idx<u16>>::index(seen).check_since(from, 3..=16);
                let allowed = (3..=16).contains(&ahead);
                assert_eq!(counted, if allowed { Ok(ahead) } else { Err(seen) });
            }
        }
    }

    #[test]
    fn untrusted_number_is_plain_only_below_its_end() {
        for end in [0, 1, 2, 7, 8, 256, 0x7fff, 0x8000, u16::MAX] {
            for value in 0..=u16::MAX {
                let plain = Untrusted::new(value).check_below(end);
                assert_eq!(plain, if value < end { Ok(value) } else { Err(value) });
            }
        }
    }

    /// Of all indices, not only those near the wrap.
    #[test]
    fn every_index_steps_through_the_slots_of_every_ring() {
        for mask in (0..16).map(|bits| (1_u32 << bits) - 1) {
            let mask = u16::try_from(mask).unwrap();
            for value in 0..=u16::MAX {
                let (idx, wide) = (Idx::<u16>::new(value), Idx::<u32>::new(value.into()));
                let (slot, next) = (idx.slot(mask).get(), idx.plus(1).slot(mask).get());
                assert!(slot <= usize::from(mask));
                assert_eq!(next, if slot == usize::from(mask) { 0 } else { slot + 1 });
                assert_eq!(wide.slot(mask.into()).get(), slot);
                assert_eq!(idx.plus(1).minus(1), idx);
            }
        }
    }

    /// Each index of the peer's, from each of ours: what is allowed is a distance, with the wrap
    /// or without. The distances are all near those where something changes, and one in 251.
    #[test]
    fn every_index_of_the_peer_is_checked_by_its_distance_from_every_one_of_ours() {
        const SIZE: u16 = 256;
        let near = |at: u16| (0..6).map(move |n: u16| at.wrapping_add(n).wrapping_sub(3));
        let rest = (0..=u16::MAX).step_by(251);
        let ahead: Vec<u16> = [0, SIZE, 0x8000].into_iter().flat_map(near).chain(rest).collect();
        for from in 0..=u16::MAX {
            let (from16, high) = (Idx::<u16>::new(from), u32::from(from) << 16 | 0xfff0);
            let from32 = Idx::<u32>::new(high);
            for ahead in &ahead {
                let seen = u16::try_from((u32::from(from) + u32::from(*ahead)) % 65_536).unwrap();
                let allowed = *ahead <= SIZE;
                let counted = Untrusted::<Idx<u16>>::index(seen).check_since(from16, 0..=SIZE);
                assert_eq!(counted, if allowed { Ok(*ahead) } else { Err(seen) });
                let wide = high.wrapping_add(u32::from(*ahead));
                let counted = Untrusted::<Idx<u32>>::index(wide);
                let counted = counted.check_since(from32, 0..=SIZE.into());
                assert_eq!(counted, if allowed { Ok(u32::from(*ahead)) } else { Err(wide) });
            }
        }
    }
}
