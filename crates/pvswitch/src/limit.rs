//! Rate limit for log lines that a guest can cause: a guest must not fill the host's disk.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use switch::account::Account;

use crate::clock::Clock;

/// Log of one port: lines that its guest causes are charged to the port's account.
pub struct PortLog {
    name: String,
    account: Arc<Account>,
    clock: Clock,
    /// Number of lines suppressed since the last line.
    suppressed: AtomicU64,
}

/// Suffix with the number of lines suppressed before this one.
struct Suppressed(u64);

impl fmt::Display for Suppressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " ({n} earlier lines of this port suppressed)"),
        }
    }
}

impl PortLog {
    /// Creates the log of the named port.
    pub fn new(name: &str, account: Arc<Account>, clock: Clock) -> Self {
        Self { name: name.into(), account, clock, suppressed: AtomicU64::new(0) }
    }

    /// The port's account.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    fn allow(&self) -> Option<Suppressed> {
        if self.account.log_lines.spend(self.clock.now()) {
            return Some(Suppressed(self.suppressed.swap(0, Ordering::Relaxed)));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Logs an ordinary event.
    pub fn info(&self, what: fmt::Arguments<'_>) {
        if let Some(suppressed) = self.allow() {
            tracing::info!(port = self.name, "{what}{suppressed}");
        }
    }

    /// Logs an unexpected event.
    pub fn warn(&self, what: fmt::Arguments<'_>) {
        if let Some(suppressed) = self.allow() {
            tracing::warn!(port = self.name, "{what}{suppressed}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_of_lines_is_suppressed_and_the_next_line_has_the_number() {
        let account = Arc::new(Account::default());
        let mut log = PortLog::new("a", Arc::clone(&account), Clock::start());
        let passed = (0..400).filter(|_| log.allow().is_some()).count();
        assert!((16..400).contains(&passed), "{passed}");
        let refused = account.log_lines.refused();
        assert_eq!(refused, 400 - passed as u64);
        // As after some time.
        log.account = Arc::default();
        assert_eq!(log.allow().map(|suppressed| suppressed.0), Some(refused));
    }

    #[test]
    fn number_of_suppressed_lines_is_logged() {
        assert_eq!(Suppressed(0).to_string(), "");
        assert_eq!(Suppressed(3).to_string(), " (3 earlier lines of this port suppressed)");
    }
}
