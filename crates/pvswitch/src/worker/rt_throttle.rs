//! What a real-time worker leaves of its CPU to other threads.

use switch::time::{Instant, Ns};

/// Part of its time that a worker sleeps if it always has work: one in this many. More than the
/// twentieth for which the kernel would otherwise stop it, at one go: 50 ms in each second
/// (`kernel.sched_rt_runtime_us`; since Linux 6.12 the server of fair threads).
const SHARE: u64 = 16;
/// Shortest sleep, about once in a millisecond: as long as a wake-up takes.
const SLEEP_MIN: Ns = Ns::from_us(60);
/// Longest sleep. More is not owed: a worker that did not run for a second (its virtual machine was
/// paused, or it was frozen for an upgrade) looks the same as one that did.
const SLEEP_MAX: Ns = Ns::from_us(120);

/// Sleep that a worker owes to the other threads of its CPU.
#[derive(Debug, Default)]
pub struct RtThrottle {
    /// [`SHARE`] times what it owes.
    owed: Ns,
    /// Time up to which it was counted.
    counted: Instant,
}

impl RtThrottle {
    /// Time for which the worker, awake since the last call of any function, is to sleep now.
    pub fn due(&mut self, now: Instant) -> Option<Ns> {
        self.owed = (self.owed + (now - self.counted)).min(SLEEP_MAX * SHARE);
        self.counted = now;
        let sleep = self.owed / SHARE;
        (sleep >= SLEEP_MIN).then_some(sleep)
    }

    /// Records that it slept from `began` to `now`. Nothing is saved up.
    pub fn record(&mut self, began: Instant, now: Instant) {
        self.owed += began - self.counted;
        self.owed -= (now - began) * SHARE;
        self.counted = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time slept of `rounds`, in each of which the worker works for `work` and then sleeps for
    /// `nap`; and the longest sleep.
    fn slept(rounds: u64, work: Ns, nap: Ns) -> (Ns, Ns) {
        let (mut throttle, mut now) = (RtThrottle::default(), Instant::START);
        let (mut slept, mut longest) = (Ns::ZERO, Ns::ZERO);
        for _ in 0..rounds {
            now += work;
            if let Some(time) = throttle.due(now) {
                throttle.record(now, now + time);
                (now, slept, longest) = (now + time, slept + time, longest.max(time));
            }
            if nap > Ns::ZERO {
                throttle.record(now, now + nap);
                now += nap;
            }
        }
        (slept, longest)
    }

    #[test]
    fn worker_with_work_sleeps_a_sixteenth_in_short_pieces() {
        let work = Ns::from_us(20);
        let (all, longest) = slept(50_000, work, Ns::ZERO);
        // 1 s of work.
        assert!((Ns::from_ms(60)..Ns::from_ms(63)).contains(&all), "{all:?}");
        assert!(longest < SLEEP_MIN + work, "{longest:?}");
    }

    #[test]
    fn worker_that_sleeps_anyway_is_not_throttled() {
        let (all, _) = slept(50_000, Ns::from_us(20), Ns::from_us(2));
        assert_eq!(all, Ns::ZERO);
        // Half of it.
        let (all, _) = slept(50_000, Ns::from_us(32), Ns::from_us(1));
        assert!((Ns::from_ms(45)..Ns::from_ms(52)).contains(&all), "{all:?}");
    }

    #[test]
    fn worker_that_was_paused_sleeps_as_after_a_millisecond_of_work() {
        let mut throttle = RtThrottle::default();
        let minute = Instant::START + Ns::from_secs(60);
        assert_eq!(throttle.due(minute), Some(SLEEP_MAX));
        throttle.record(minute, minute + SLEEP_MAX);
        assert_eq!(throttle.due(minute + SLEEP_MAX), None);
    }

    #[test]
    fn long_sleep_is_no_credit_for_later() {
        let (mut throttle, start) = (RtThrottle::default(), Instant::START);
        let hour = start + Ns::from_secs(3600);
        throttle.record(start, hour);
        assert_eq!(throttle.due(hour + SLEEP_MIN * SHARE), Some(SLEEP_MIN));
    }
}
