//! Attempts to connect that fail for a reason that does not go away by itself: told once, and made
//! less and less often. Until the other end is there [`connect`](crate::connect()) waits.

use std::time::Duration;

/// Before the second attempt.
const FIRST: Duration = Duration::from_millis(500);
/// Longest wait between two attempts.
const LONGEST: Duration = Duration::from_secs(16);
/// Between two looks whether to go on.
const SLICE: Duration = Duration::from_millis(100);

/// What is known of the attempts since the last one that worked.
#[derive(Debug)]
pub struct Retry {
    told: Option<String>,
    next: Duration,
}

impl Retry {
    /// Before the first one.
    pub fn new() -> Self {
        Self { told: None, next: FIRST }
    }

    /// After one that failed: what to tell of it, if that is news, and how long to wait.
    pub fn failed(&mut self, error: &str) -> (Option<String>, Duration) {
        let wait = self.next;
        self.next = (wait * 2).min(LONGEST);
        let again = self.told.as_deref() == Some(error);
        self.told = Some(error.into());
        let slower = LONGEST.as_secs();
        let news = format!("{error}; trying again, in the end every {slower} s and quietly");
        ((!again).then_some(news), wait)
    }
}

/// Sleeps that long, or until `go_on` says no: a signal does not end a sleep.
pub fn pause(long: Duration, go_on: &dyn Fn() -> bool) {
    let mut left = long;
    while !left.is_zero() && go_on() {
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
    fn an_error_is_told_once_and_tried_ever_less_often() {
        let mut retry = Retry::new();
        let (news, mut before) = retry.failed("2 queues wanted");
        assert!(news.unwrap().starts_with("2 queues wanted; trying again"));
        let mut all = before;
        for _ in 0..20 {
            let (news, wait) = retry.failed("2 queues wanted");
            assert_eq!(news, None);
            assert!(wait == LONGEST || wait == before * 2, "{wait:?}");
            (before, all) = (wait, all + wait);
        }
        assert!(all > Duration::from_secs(200), "{all:?} for 21 attempts");
        assert!(retry.failed("something else").0.is_some(), "another one is news");
        assert_eq!(Retry::new().failed("2 queues wanted").1, FIRST);
    }

    #[test]
    fn a_pause_ends_when_it_is_over_and_when_all_is() {
        let begun = Instant::now();
        pause(Duration::from_millis(120), &|| true);
        assert!(begun.elapsed() >= Duration::from_millis(120));
        let asked = Cell::new(0);
        let go_on = || asked.replace(asked.get() + 1) < 1;
        pause(Duration::from_secs(3600), &go_on);
        assert_eq!(asked.get(), 2);
    }
}
