//! The studies.

mod bulk;
mod coalescing;
mod fairness;
mod grid;
mod idle;
mod latency;
mod neighbours;
mod pair;
mod policies;
mod polling;
mod threads;

use crate::study::Study;

/// All of them, in the order listed.
pub const ALL: &[&dyn Study] = &[
    &polling::Polling,
    &threads::Threads,
    &coalescing::Coalescing,
    &fairness::Fairness,
    &policies::Policies,
    &latency::Latency,
    &idle::Idle,
    &neighbours::Neighbours,
];
