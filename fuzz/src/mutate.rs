//! Inputs without coverage guidance: random ones, and seeds with a few changes.

/// A reproducible sequence of inputs.
pub struct Mutator {
    state: u64,
    seeds: Vec<Vec<u8>>,
}

/// Longest random input.
const LEN_MAX: u64 = 2048;

impl Mutator {
    /// Creates sequence number `number`, from `seeds`.
    pub fn new(number: u64, seeds: Vec<Vec<u8>>) -> Self {
        Self { state: number, seeds }
    }

    /// SplitMix64.
    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// The next input.
    pub fn input(&mut self) -> Vec<u8> {
        let pick = self.below(self.seeds.len() + 1);
        let Some(seed) = self.seeds.get(pick) else {
            let len = self.bits() % LEN_MAX;
            return (0..len).map(|_| self.bits() as u8).collect();
        };
        let mut input = seed.clone();
        for _ in 0..self.below(6) {
            self.change(&mut input);
        }
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len());
        // Fields start at aligned offsets.
        let at = if self.below(2) == 0 { at & !1 } else { at };
        let Some(byte) = input.get_mut(at) else {
            return;
        };
        match self.bits() % 8 {
            0 => *byte ^= 1 << (self.bits() % 8),
            1 => *byte = self.bits() as u8,
            2 => *byte = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
            3 => *byte = byte.wrapping_add(1),
            4 => *byte = byte.wrapping_sub(1),
            5 => input.truncate(at),
            6 => input.insert(at, self.state as u8),
            _ => {
                let from = self.below(input.len());
                let len = self.below(16).min(input.len() - from).min(input.len() - at);
                input.copy_within(from..from + len, at);
            }
        }
    }
}
