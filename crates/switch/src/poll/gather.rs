//! When to poll a busy queue again.

use crate::frame::BURST_MAX;
use crate::time::{Instant, Ns};

/// Longest time for which a queue is left to gather frames.
const GATHER_MAX: Ns = Ns::from_us(8);
/// Bytes of a full burst up to which its queue gathers: it then fits the nearest cache.
const GATHER_BYTES: u64 = 16 << 10;
/// Time for which a rate is measured.
const WINDOW: Ns = Ns::from_us(100);
/// First and longest time without waits after they slowed the peer down.
const REST: (Ns, Ns) = (Ns::from_us(100), Ns::from_ms(8));
/// Interval at which the rate without waits is measured again.
const REVIEW_INTERVAL: Ns = Ns::from_ms(10);

/// Leaves a busy queue alone until it is expected to have a full burst.
///
/// A poll fetches the cache line of the ring's index from the peer's CPU, and each burst publishes
/// to it: with half as many polls, both move half as often. At rates at which a burst takes longer
/// than `GATHER_MAX` nothing is waited for, so that the latency added is below that. A peer whose
/// frames wait for replies sends fewer while it is left alone: where waits lower the rate by more
/// than a tenth, there are none for a while.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Gather {
    /// Time of the next poll.
    until: Instant,
    /// Wait after a poll that finds less than a full burst; zero: none.
    wait: Ns,
    /// Time of a full burst before there were waits, and since when there are.
    before: (Ns, Instant),
    /// No waits before this time.
    from: Instant,
    /// Next time without waits.
    rest: Ns,
    /// Start of the window, and the frames found in it.
    since: Instant,
    frames: u64,
    /// Bytes that the queue's polls had found by then.
    bytes: u64,
}

impl Default for Gather {
    fn default() -> Self {
        let start = Instant::START;
        Self {
            until: start,
            wait: Ns::ZERO,
            before: (Ns::ZERO, start),
            from: start,
            rest: REST.0,
            since: start,
            frames: 0,
            bytes: 0,
        }
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
        self.frames += frames as u64;
        if now - self.since >= WINDOW {
            self.end_window(bytes, now);
        }
        // After a full burst there may be more.
        if frames < BURST_MAX && self.wait > Ns::ZERO {
            self.until = now + self.wait;
        }
    }

    fn end_window(&mut self, bytes: u64, now: Instant) {
        let length = now - std::mem::replace(&mut self.since, now);
        let frames = std::mem::take(&mut self.frames);
        let bytes = bytes.wrapping_sub(std::mem::replace(&mut self.bytes, bytes));
        let burst = length.scale(BURST_MAX as u64, frames);
        let fits = bytes.saturating_mul(BURST_MAX as u64) <= GATHER_BYTES.saturating_mul(frames);
        let wait = if burst <= GATHER_MAX && fits { burst } else { Ns::ZERO };
        let (before, began) = self.before;
        if self.wait == Ns::ZERO {
            if now >= self.from {
                (self.wait, self.before) = (wait, (burst, now));
            }
        } else if burst.scale(9, 10) > before {
            (self.wait, self.from) = (Ns::ZERO, now + self.rest);
            self.rest = (self.rest * 2).min(REST.1);
        } else {
            self.wait = if now - began < REVIEW_INTERVAL { wait } else { Ns::ZERO };
            self.rest = REST.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wait after polls that found `frames`, each of `len` bytes, every `gap` ns.
    fn after(frames: usize, len: u64, gap: u64) -> Option<Ns> {
        let mut gather = Gather::default();
        let (mut now, mut bytes) = (Instant::START + Ns::from_secs(1), 0);
        let first = now;
        // The first window began when the queue was made.
        while now < first + WINDOW + Ns::new(gap) {
            bytes += frames as u64 * len;
            gather.record(frames, bytes, now);
            if now < first + WINDOW {
                assert!(!gather.is_early(now), "no rate is known");
            }
            now += Ns::new(gap);
        }
        let polled = now - Ns::new(gap);
        let wait = gather.until - polled;
        assert_eq!(gather.is_early(polled), wait > Ns::ZERO);
        assert!(!gather.is_early(polled + wait));
        (wait > Ns::ZERO).then_some(wait)
    }

    #[test]
    fn a_queue_is_left_until_a_burst_is_expected_if_that_is_soon() {
        assert_eq!(after(32, 60, 2_000), Some(Ns::from_us(4)));
        assert_eq!(after(16, 60, 2_000), Some(GATHER_MAX));
        assert_eq!(after(15, 60, 2_000), None, "the rate is too low");
        assert_eq!(after(1, 60, 100_000), None);
        assert_eq!(after(BURST_MAX, 60, 1_000), None, "there may be more");
        assert_eq!(after(16, 256, 1_000), Some(Ns::from_us(4)));
        assert_eq!(after(16, 257, 1_000), None, "long frames");
    }

    /// Polls a peer for 20 ms, which has sent `sent` frames by a time in ns, fewer if as many as
    /// `in_flight` were not taken. Returns the frames taken, and the number of polls.
    fn poll(in_flight: usize, sent: impl Fn(u64) -> usize) -> (usize, usize) {
        let (mut gather, mut taken, mut polls, mut bytes) = (Gather::default(), 0, 0, 0);
        // Frames that were not sent, because the peer waited.
        let mut lost = 0;
        let mut ns = 0;
        while ns < 20_000_000 {
            ns += 160;
            let now = Instant::from_ns(ns);
            if gather.is_early(now) {
                continue;
            }
            let there = sent(ns) - lost - taken;
            lost += there.saturating_sub(in_flight);
            let frames = there.min(in_flight).min(BURST_MAX);
            taken += frames;
            polls += 1;
            bytes += 60 * frames as u64;
            gather.record(frames, bytes, now);
        }
        (taken, polls)
    }

    #[test]
    fn peers_that_wait_for_replies_keep_their_rate() {
        // Ten frames per us, while it may send.
        for in_flight in [4, 8, 16, 32, 48] {
            let (taken, _) = poll(in_flight, |ns| (ns / 100) as usize);
            assert!(taken > 200_000 * 95 / 100, "{in_flight}: {taken}");
        }
    }

    #[test]
    fn floods_are_polled_a_few_times_a_burst_even_in_trains() {
        let (taken, polls) = poll(usize::MAX, |ns| (ns / 100) as usize);
        // Without waits there are 125,000 polls.
        assert!(polls < 3 * 200_000 / BURST_MAX && taken > 199_000, "{taken}, {polls}");
        let (taken, polls) = poll(usize::MAX, |ns| (ns / 3_200 * 32) as usize);
        // Two trains are a burst; the third is polled for.
        assert!(polls < 125_000 / 2 && taken > 199_000, "{taken}, {polls}");
    }

    #[test]
    fn empty_polls_change_nothing() {
        let mut gather = Gather::default();
        let now = Instant::START + Ns::from_secs(1);
        gather.record(32, 1920, now);
        gather.record(0, 1920, now + WINDOW / 2);
        gather.record(992, 61_440, now + WINDOW);
        assert_eq!(gather.until, Instant::START, "after a full burst there may be more");
        gather.record(32, 63_360, now + WINDOW);
        assert_eq!(gather.until - (now + WINDOW), WINDOW.scale(64, 992));
    }
}
