//! When to poll a busy queue again.

use crate::frame::BURST_MAX;
use crate::time::{Instant, Ns};

/// Longest time for which a queue is left to gather frames.
const GATHER_MAX: Ns = Ns::from_us(8);
/// Bytes of a burst up to which its queue gathers: a full burst then fits the nearest cache.
const GATHER_BYTES: u64 = 16 << 10;

/// Leaves a busy queue alone until it is expected to have a full burst.
///
/// A poll fetches the cache line of the ring's index from the peer's CPU, and each burst publishes
/// to it: with half as many polls, both move half as often. At rates at which a burst takes longer
/// than `GATHER_MAX` nothing is waited for, so that the latency added is below that.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Gather {
    /// Time of the last poll that found frames.
    found: Instant,
    /// Time of the next poll.
    until: Instant,
    /// Bytes that the queue's polls found so far.
    bytes: u64,
}

impl Default for Gather {
    fn default() -> Self {
        Self { found: Instant::START, until: Instant::START, bytes: 0 }
    }
}

impl Gather {
    /// Whether the queue is still to gather frames.
    #[inline]
    pub fn is_early(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Records that a poll at `now` found `frames`; `bytes`: of all polls so far.
    #[inline]
    pub fn record(&mut self, frames: usize, bytes: u64, now: Instant) {
        if frames == 0 {
            return;
        }
        let since = now - std::mem::replace(&mut self.found, now);
        let bytes = bytes.wrapping_sub(std::mem::replace(&mut self.bytes, bytes));
        if frames < BURST_MAX && since < GATHER_MAX && bytes <= GATHER_BYTES {
            let burst = since * BURST_MAX as u64 / frames as u64;
            if burst <= GATHER_MAX {
                self.until = now + burst;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(frames: usize, gap: Ns) -> Option<Ns> {
        after_bytes(frames, 60 * frames as u64, gap)
    }

    fn after_bytes(frames: usize, bytes: u64, gap: Ns) -> Option<Ns> {
        let mut gather = Gather::default();
        let now = Instant::START + Ns::from_secs(1);
        gather.record(frames, bytes, now);
        assert!(!gather.is_early(now), "no rate is known");
        gather.record(frames, 2 * bytes, now + gap);
        let waits = gather.until - (now + gap);
        assert_eq!(gather.is_early(now + gap), waits > Ns::ZERO);
        assert!(!gather.is_early(now + gap + waits));
        (waits > Ns::ZERO).then_some(waits)
    }

    #[test]
    fn a_queue_is_left_until_a_burst_is_expected_if_that_is_soon() {
        assert_eq!(after(32, Ns::from_us(2)), Some(Ns::from_us(4)));
        assert_eq!(after(16, Ns::from_us(2)), Some(GATHER_MAX));
        assert_eq!(after(15, Ns::from_us(2)), None, "the rate is too low");
        assert_eq!(after(1, Ns::from_us(100)), None);
        assert_eq!(after(BURST_MAX, Ns::from_us(1)), None, "there may be more");
        assert_eq!(after_bytes(16, 16 << 10, Ns::from_us(1)), Some(Ns::from_us(4)));
        assert_eq!(after_bytes(16, (16 << 10) + 1, Ns::from_us(1)), None, "long frames");
    }

    #[test]
    fn empty_polls_change_nothing() {
        let mut gather = Gather::default();
        let now = Instant::START + Ns::from_secs(1);
        gather.record(32, 1920, now);
        gather.record(0, 1920, now + Ns::from_us(1));
        gather.record(32, 3840, now + Ns::from_us(2));
        assert_eq!(gather.until, now + Ns::from_us(6));
    }
}
