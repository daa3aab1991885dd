//! Coverage of the seeds: results that a run must have had.

use std::ops::AddAssign;

/// Number of results of bursts and armings, for the coverage of the seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Armed queues that are due at a time.
    pub dues: u64,
    /// Bursts that ended at a port's rate.
    pub rate_dues: u64,
    /// Bursts that a port's rate kept short.
    pub rate_cuts: u64,
    /// Held frames that a rate permitted by then.
    pub rate_deliveries: u64,
    /// Announced addresses.
    pub announcements: u64,
    /// Bursts of watched queues.
    pub watched: u64,
}

impl AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.dues += other.dues;
        self.rate_dues += other.rate_dues;
        self.rate_cuts += other.rate_cuts;
        self.rate_deliveries += other.rate_deliveries;
        self.announcements += other.announcements;
        self.watched += other.watched;
    }
}
