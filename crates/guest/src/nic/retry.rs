//! Back-off for attempts to connect that fail for a lasting reason: the reason is logged once. If
//! the other end is only absent, [`connect`](crate::connect()) waits itself.

use std::time::Duration;

/// Wait before the second attempt.
const FIRST: Duration = Duration::from_millis(500);
/// Longest wait between two attempts.
const LONGEST: Duration = Duration::from_secs(16);
/// Interval at which a pause checks whether to continue.
const SLICE: Duration = Duration::from_millis(100);

/// State of attempts since the last successful one.
#[derive(Debug)]
pub struct Retry {
    logged: Option<String>,
    next: Duration,
}

impl Retry {
    /// State before the first attempt.
    pub fn new() -> Self {
        Self { logged: None, next: FIRST }
    }

    /// Records a failure. Returns the message, if it is new, and how long to wait.
    pub fn record_failure(&mut self, error: &str) -> (Option<String>, Duration) {
        let wait = self.next;
        self.next = (wait * 2).min(LONGEST);
        let again = self.logged.as_deref() == Some(error);
        self.logged = Some(error.into());
        let slower = LONGEST.as_secs();
        let news = format!("{error}; retrying without further messages, up to every {slower} s");
        ((!again).then_some(news), wait)
    }
}

/// Sleeps, at most until `keep_running` returns false: a signal does not end a sleep.
pub fn pause(long: Duration, keep_running: &dyn Fn() -> bool) {
    let mut left = long;
    while !left.is_zero() && keep_running() {
        let slice = left.min(SLICE);
        std::thread::sleep(slice);
        left -= slice;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Instant;

    use super::*;

    #[test]
    fn an_error_is_logged_once_and_retries_back_off() {
        let mut retry = Retry::new();
        let (news, mut before) = retry.record_failure("2 queues requested");
        assert!(news.unwrap().starts_with("2 queues requested; retrying"));
        let mut all = before;
        for _ in 0..20 {
            let (news, wait) = retry.record_failure("2 queues requested");
            assert_eq!(news, None);
            assert!(wait == LONGEST || wait == before * 2, "{wait:?}");
            (before, all) = (wait, all + wait);
        }
        assert!(all > Duration::from_secs(200), "{all:?} for 21 attempts");
        assert!(retry.record_failure("something else").0.is_some(), "a different error is logged");
        assert_eq!(Retry::new().record_failure("2 queues requested").1, FIRST);
    }

    #[test]
    fn a_pause_ends_after_its_time_or_at_shutdown() {
        let begun = Instant::now();
        pause(Duration::from_millis(120), &|| true);
        assert!(begun.elapsed() >= Duration::from_millis(120));
        let asked = Cell::new(0);
        let keep_running = || asked.replace(asked.get() + 1) < 1;
        pause(Duration::from_secs(3600), &keep_running);
        assert_eq!(asked.get(), 2);
    }
}
