//! Shares of the server's CPU time, by domain.
//!
//! A request takes microseconds; a commit of a thousand nodes that 60 connections watch takes
//! seconds. Each domain is charged the CPU time of the thread that its requests, and the events of
//! its changes, have taken; in debt, nothing is done for it. Domain 0, and requests of connections
//! within the process, are not limited.

use std::collections::BTreeMap;

use switch::account::Rate;
use switch::time::{Instant, Ns};

/// Share of a CPU for the domain of a guest, in thousandths.
pub const PER_MILLE: u64 = 10;
/// CPU time at once, after an idle time: the start of hundreds of vifs.
const BURST: Ns = Ns::from_ms(100);

/// CPU time of the thread.
pub fn used() -> Ns {
    Ns::new(u64::try_from(os::thread_cpu_time().as_nanos()).unwrap_or(u64::MAX))
}

/// A monotonic clock.
pub fn now() -> Instant {
    Instant::from_ns(u64::try_from(os::monotonic().as_nanos()).unwrap_or(u64::MAX))
}

/// The share of each domain.
pub struct Shares {
    per_mille: u64,
    domains: BTreeMap<u16, Rate>,
}

impl Shares {
    /// Thousandths of a CPU for each domain.
    pub fn new(per_mille: u64) -> Self {
        Self { per_mille, domains: BTreeMap::new() }
    }

    /// Charges CPU time to a domain.
    pub fn charge(&mut self, domid: u16, spent: Ns, now: Instant) {
        if domid == 0 {
            return;
        }
        let per_second = self.per_mille * 1_000_000;
        let new = || Rate::new("xenstore", per_second, BURST.get());
        self.domains.entry(domid).or_insert_with(new).charge(spent.get(), now);
    }

    /// The time from which a domain is served again, if it is in debt.
    pub fn due(&self, domid: u16, now: Instant) -> Option<Instant> {
        let due = self.domains.get(&domid)?.next(now);
        (due > now).then_some(due)
    }
}
