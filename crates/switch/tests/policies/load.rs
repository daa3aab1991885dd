//! Arrival of frames: open loads, independent of service, and closed ones, in which each frame
//! waits for the reply to the one before.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A reproducible sequence (SplitMix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Exponentially distributed. Without libm: every machine must print the same table.
    fn exponential(&mut self, mean: u64) -> u64 {
        let bits = self.bits() | 1;
        let zeroes = bits.leading_zeros();
        // In [0.5, 1).
        let u = ((bits << zeroes) >> 11) as f64 / (1_u64 << 53) as f64;
        let t = (1.0 - u) / (1.0 + u);
        let square = t * t;
        let (mut term, mut atanh) = (t, 0.0);
        for k in 0..16 {
            atanh += term / f64::from(2 * k + 1);
            term *= square;
        }
        let ln = f64::from(zeroes) * std::f64::consts::LN_2 + 2.0 * atanh;
        (mean as f64 * ln) as u64
    }
}

/// Arrival process.
#[derive(Clone, Copy)]
pub enum Shape {
    None,
    /// One per interval, in ns.
    Even(u64),
    /// At random, with a mean interval in ns.
    Poisson(u64),
    /// One every `gap` for a time, then none for the same time.
    OnOff {
        gap: u64,
        half: u64,
    },
    /// Trains of frames, every `period`.
    Trains {
        frames: u64,
        period: u64,
    },
    /// Closed: this many in flight; the next one comes a think time after a reply.
    Closed(u64, Think),
}

/// The time between a reply and the next request, in ns.
#[derive(Clone, Copy)]
pub enum Think {
    For(u64),
    /// At random, with this mean.
    Mean(u64),
    /// Alternates: a number of times the first, then the second.
    Turns([(u64, u64); 2]),
}

/// Future frames of one load.
pub struct Load {
    shape: Shape,
    random: Random,
    /// Time of the next frame of an open load.
    at: u64,
    count: u64,
    /// Times of the next frames of a closed load.
    thinking: BinaryHeap<Reverse<u64>>,
}

impl Load {
    pub fn new(shape: Shape, seed: u64) -> Self {
        let mut load =
            Self { shape, random: Random(seed), at: 0, count: 0, thinking: BinaryHeap::new() };
        if let Shape::Closed(under_way, _) = shape {
            load.thinking.extend((0..under_way).map(|i| Reverse(1000 + 700 * i)));
        }
        load.advance();
        load
    }

    /// Time of the next frame; `u64::MAX`: none.
    pub fn peek(&self) -> u64 {
        match self.shape {
            Shape::Closed(..) => self.thinking.peek().map_or(u64::MAX, |at| at.0),
            _ => self.at,
        }
    }

    /// Removes the next frame.
    pub fn pop(&mut self) {
        match self.shape {
            Shape::Closed(..) => drop(self.thinking.pop()),
            _ => self.advance(),
        }
    }

    /// Records the reply to a frame.
    pub fn record_reply(&mut self, now: u64) {
        let Shape::Closed(under_way, think) = self.shape else { return };
        let time = match think {
            // Slightly random if there are several, so that they do not synchronise.
            Think::For(time) if under_way > 1 => time * 3 / 4 + self.random.bits() % (time / 2),
            Think::For(time) => time,
            Think::Mean(mean) => self.random.exponential(mean),
            Think::Turns([(n, a), (m, b)]) => {
                if self.count % (n + m) < n {
                    a
                } else {
                    b
                }
            }
        };
        self.count += 1;
        self.thinking.push(Reverse(now + time));
    }

    fn advance(&mut self) {
        self.at = match self.shape {
            Shape::None | Shape::Closed(..) => u64::MAX,
            Shape::Even(gap) => self.at + gap,
            Shape::Poisson(mean) => self.at + self.random.exponential(mean),
            Shape::OnOff { gap, half } => {
                let next = self.at + gap;
                if next % (2 * half) < half { next } else { (next / half + 1) * half }
            }
            Shape::Trains { frames, period } => {
                self.count += 1;
                if self.count % frames == 1 { self.at + period } else { self.at }
            }
        };
    }
}
