//! Random numbers from a seed.

use switch::time::Ns;

/// A reproducible sequence (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number within `range`, which must not be empty.
    pub fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.bits() % (range.end - range.start)
    }

    /// A time within `range`, which must not be empty.
    pub fn time(&mut self, range: std::ops::Range<Ns>) -> Ns {
        Ns::new(self.within(range.start.get()..range.end.get()))
    }

    /// True with probability `1 / n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.bits().is_multiple_of(n)
    }

    /// An index below `len`.
    pub fn index(&mut self, len: usize) -> usize {
        (self.bits() % len as u64) as usize
    }
}
