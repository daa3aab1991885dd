//! The studies.

mod bulk;
mod coalescing;
mod copies;
mod fairness;
mod grid;
mod hostile;
mod idle;
mod latency;
mod neighbours;
mod pair;
mod peers;
mod policies;
mod polling;
mod receivers;
mod threads;

use crate::study::Study;

/// All of them, in the order listed.
pub const ALL: &[&dyn Study] = &[
    &polling::Polling,
    &threads::Threads,
    &coalescing::Coalescing,
    &copies::Copies,
    &fairness::Fairness,
    &policies::Policies,
    &latency::Latency,
    &idle::Idle,
    &neighbours::Neighbours,
    &peers::Peers,
    &hostile::Hostile,
    &receivers::Receivers,
];
