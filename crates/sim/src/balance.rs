//! State that workers share to move queues by load, and the check that they do.

use std::collections::BTreeMap;

use switch::fair::level::Leveller;
use switch::time::{Instant, Ns};

use crate::worker::Queue;

/// One report in so many is skipped, as if another worker reported at the same time.
const CONTENDED_EVERY: u64 = 8;
/// Loads in thousandths. A queue must move if a worker is full, another one is idle, the heaviest
/// queue is worth a move but does not fill the idle worker alone, and another queue would stay.
const FULL: u32 = 900;
const IDLE: u32 = 100;
const HEAVIEST: std::ops::Range<u64> = 250..700;
const STAYS: u64 = 100;
/// Consecutive measurements by which a queue must have moved: three to settle, and a margin.
const MEASUREMENTS_MAX: u32 = 6;

/// State shared by the workers.
pub(crate) struct Balance {
    /// Queues move by load.
    pub is_on: bool,
    pub leveller: Leveller,
    /// Load of each worker, and whether it sleeps without a nap timer.
    pub loads: Vec<(u32, bool)>,
    /// Tokens of queues to move, and the workers to move them to.
    pub moves: Vec<(u64, usize)>,
    reports: u64,
}

impl Balance {
    pub fn new(workers: usize) -> Self {
        Self {
            is_on: false,
            leveller: Leveller::new(workers),
            loads: vec![(0, true); workers],
            moves: Vec::new(),
            reports: 0,
        }
    }

    /// Counts a report; false: another worker reports at the same time.
    pub fn may_report(&mut self) -> bool {
        self.reports += 1;
        !self.reports.is_multiple_of(CONTENDED_EVERY)
    }

    /// Load of each worker, in thousandths; 0 while it sleeps.
    pub fn loads(&self) -> impl Iterator<Item = u32> {
        self.loads.iter().map(|(load, asleep)| if *asleep { 0 } else { *load })
    }
}

/// Checks from outside that an overloaded worker gives queues away.
#[derive(Default)]
pub(crate) struct LoadCheck {
    /// Time that each queue was served until the last measurement.
    served: BTreeMap<u64, Ns>,
    measured: Instant,
    /// Consecutive measurements after which a queue could have moved, and did not.
    missed: u32,
}

impl LoadCheck {
    /// Checks a measurement; returns a description of the violation.
    pub fn check(
        &mut self,
        load: u32,
        others: u32,
        queues: &[Queue],
        now: Instant,
    ) -> Option<String> {
        let served = |queue: &Queue| {
            (queue.served.token, Ns::new(queue.served.source.stats.served_ns.get()))
        };
        let latest: BTreeMap<u64, Ns> = queues.iter().map(served).collect();
        let length = now - self.measured;
        let part = |(token, time): (&u64, &Ns)| {
            Some(((*time - *self.served.get(token)?) * 1000).times(length))
        };
        let parts: Option<Vec<u64>> = latest.iter().map(part).collect();
        let is_same = self.served.len() == latest.len();
        let worth = |mut parts: Vec<u64>| {
            parts.sort_unstable();
            matches!(parts[..], [.., second, first] if HEAVIEST.contains(&first) && second >= STAYS)
        };
        let can_move = load >= FULL && others <= IDLE && is_same && parts.is_some_and(worth);
        self.missed = if can_move { self.missed + 1 } else { 0 };
        (self.served, self.measured) = (latest, now);
        (self.missed > MEASUREMENTS_MAX).then(|| {
            format!("load {load}, of others {others}, but no queue moved for {} ms", self.missed)
        })
    }
}
