//! Log lines that a guest can cause, bounded: a guest must not fill the host's disk.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use switch::account::Account;

/// The log of one port: what its guest causes goes through here, charged to its account.
pub struct PortLog {
    name: String,
    account: Arc<Account>,
    /// Zero of the account's time.
    epoch: Instant,
    /// Lines that were not logged since the last one.
    suppressed: AtomicU64,
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
    pub fn new(name: &str, account: Arc<Account>, epoch: Instant) -> Self {
        Self { name: name.into(), account, epoch, suppressed: AtomicU64::new(0) }
    }

    /// The port's account.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    fn take(&self) -> Option<Missing> {
        let now = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if self.account.log_lines.spend(now) {
            return Some(Missing(self.suppressed.swap(0, Ordering::Relaxed)));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
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
    fn flood_of_lines_is_cut_and_the_next_one_says_how_many_are_missing() {
        let account = Arc::new(Account::default());
        let mut log = PortLog::new("a", Arc::clone(&account), Instant::now());
        let passed = (0..400).filter(|_| log.take().is_some()).count();
        assert!((16..400).contains(&passed), "{passed}");
        let refused = account.log_lines.refused();
        assert_eq!(refused, 400 - passed as u64);
        // As after a while.
        log.account = Arc::default();
        assert_eq!(log.take().map(|missing| missing.0), Some(refused));
    }

    #[test]
    fn what_is_missing_is_told() {
        assert_eq!(Missing(0).to_string(), "");
        assert_eq!(Missing(3).to_string(), " (3 lines of this port suppressed before)");
    }
}
