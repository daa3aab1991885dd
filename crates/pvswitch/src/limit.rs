//! Log lines that a guest can cause, bounded: a guest must not fill the host's disk.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines a quiet port may log at once: a guest that comes, leaves and comes back.
const LINES_MAX: u32 = 16;
/// Time after which one more may be logged.
const LINE_EVERY: Duration = Duration::from_millis(500);

/// The log of one port: what its guest causes goes through here.
pub struct PortLog {
    name: String,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    lines: u32,
    /// Up to when `lines` was filled up.
    filled: Instant,
    suppressed: u64,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { lines: LINES_MAX, filled: now, suppressed: 0 }
    }

    /// Whether a line may go out at `now`; then, how many could not since the last one.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let due = now.saturating_duration_since(self.filled).as_nanos() / LINE_EVERY.as_nanos();
        let due = u32::try_from(due).unwrap_or(u32::MAX).min(LINES_MAX);
        if due == LINES_MAX {
            self.filled = now;
        } else {
            self.filled += LINE_EVERY * due;
        }
        self.lines = (self.lines + due).min(LINES_MAX);
        if self.lines == 0 {
            self.suppressed += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Says how many lines are missing before this one.
struct Missing(u64);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " ({n} lines of this port suppressed before)"),
        }
    }
}

impl PortLog {
    /// For the port of this name.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), bucket: Mutex::new(Bucket::new(Instant::now())) }
    }

    fn take(&self) -> Option<Missing> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(Instant::now()).map(Missing)
    }

    /// Something ordinary happened.
    pub fn info(&self, what: fmt::Arguments<'_>) {
        if let Some(missing) = self.take() {
            tracing::info!("port {}: {what}{missing}", self.name);
        }
    }

    /// Something that should not have happened.
    pub fn warn(&self, what: fmt::Arguments<'_>) {
        if let Some(missing) = self.take() {
            tracing::warn!("port {}: {what}{missing}", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_and_counted_and_a_quiet_port_recovers() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        let passed = |bucket: &mut Bucket, from: u64, to: u64| {
            let at = |ms| start + Duration::from_millis(ms);
            (from..to).filter_map(|ms| bucket.take(at(ms))).collect::<Vec<_>>()
        };
        assert_eq!(passed(&mut bucket, 0, 400), [0; 16]);
        let later = passed(&mut bucket, 400, 10_400);
        assert_eq!(later.len(), 20, "two a second");
        assert_eq!((later[0], later[1]), (484, 499), "and each says what is missing");
        let at = start + Duration::from_secs(100);
        assert_eq!(bucket.take(at), Some(399));
        assert_eq!((0..20).filter_map(|_| bucket.take(at)).count(), 15);
    }

    #[test]
    fn what_is_missing_is_told() {
        assert_eq!(Missing(0).to_string(), "");
        assert_eq!(Missing(3).to_string(), " (3 lines of this port suppressed before)");
    }
}
