//! Back-off for lost connections: retries indefinitely, with delays that grow to a second.

use std::time::Duration;

/// First delay, in milliseconds.
const FIRST_MS: u64 = 10;
/// Longest delay, in milliseconds.
const CAP_MS: u64 = 1000;

/// Delay before attempt number `attempt` (from 0): 10 ms, doubled each time, at most 1 s. `jitter`
/// is any number; it reduces the delay by up to half, so that a thousand ports that lost the same
/// peer do not reconnect in the same millisecond.
pub fn delay(attempt: u32, jitter: u32) -> Duration {
    let full = FIRST_MS.checked_shl(attempt.min(16)).map_or(CAP_MS, |ms| ms.min(CAP_MS));
    let less = (full / 2 * u64::from(jitter)) >> 32;
    Duration::from_millis(full - less)
}

/// Counts attempts for [`delay`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    attempt: u32,
}

impl Backoff {
    /// Returns the delay before the next attempt; each call counts one failed attempt.
    pub fn next(&mut self, jitter: u32) -> Duration {
        let wait = delay(self.attempt, jitter);
        self.attempt = self.attempt.saturating_add(1);
        wait
    }

    /// Starts again from the shortest delay, after a successful connection.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_a_second_and_starts_over() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..9).map(|_| backoff.next(0).as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.next(0).as_millis(), 10);
        assert_eq!(delay(u32::MAX, 0).as_millis(), 1000);
    }

    #[test]
    fn jitter_takes_at_most_half() {
        for attempt in 0..20 {
            let full = delay(attempt, 0);
            let least = delay(attempt, u32::MAX);
            assert!(least >= full / 2 && least < full, "{attempt}: {least:?} of {full:?}");
        }
    }
}
