//! What workers share where queues move by load, and whether they do.

use std::collections::BTreeMap;

use switch::fair::level::Leveller;

use crate::worker::Queue;

/// Every so often another worker reports at the same moment, and the report is left out.
const CONTENDED_EVERY: u64 = 8;
/// Loads in thousandths: a worker is full, another has next to nothing to do, the heaviest queue is
/// worth a move and does not fill the other worker alone, and another queue would stay.
const FULL: u32 = 900;
const IDLE: u32 = 100;
const HEAVIEST: std::ops::Range<u64> = 250..700;
const STAYS: u64 = 100;
/// Measurements in a row after which a queue must have moved: three to settle, and some more.
const MEASUREMENTS_MAX: u32 = 6;

/// What the workers know of each other.
pub(crate) struct Balance {
    /// Queues move by load.
    pub is_on: bool,
    pub leveller: Leveller,
    /// Of each worker: its load, and whether it sleeps until it is woken.
    pub loads: Vec<(u32, bool)>,
    /// Queues that are to move, and where.
    pub moves: Vec<(u64, usize)>,
    reports: u64,
}

impl Balance {
    pub fn new(workers: usize, is_on: bool) -> Self {
        Self {
            is_on,
            leveller: Leveller::new(workers),
            loads: vec![(0, true); workers],
            moves: Vec::new(),
            reports: 0,
        }
    }

    /// Whether no other worker reports at this moment.
    pub fn may_report(&mut self) -> bool {
        self.reports += 1;
        !self.reports.is_multiple_of(CONTENDED_EVERY)
    }

    /// The load of each worker, in thousandths.
    pub fn loads(&self) -> impl Iterator<Item = u32> {
        self.loads.iter().map(|(load, asleep)| if *asleep { 0 } else { *load })
    }
}

/// Whether a worker that has too much to do gives some of it away, judged from outside.
#[derive(Default)]
pub(crate) struct Burden {
    /// Time each queue was served up to the last measurement, in ns.
    served_ns: BTreeMap<u64, u64>,
    measured_ns: u64,
    /// Measurements in a row after which a queue could have moved.
    waits: u32,
}

impl Burden {
    /// After a measurement: what is wrong.
    pub fn judge(
        &mut self,
        (load, others): (u32, u32),
        queues: &[Queue],
        now_ns: u64,
    ) -> Option<String> {
        let served =
            |queue: &Queue| (queue.served.token, queue.served.source.stats.served_ns.get());
        let now: BTreeMap<u64, u64> = queues.iter().map(served).collect();
        let length_ns = (now_ns - self.measured_ns).max(1);
        let part =
            |(token, ns): (&u64, &u64)| Some((ns - self.served_ns.get(token)?) * 1000 / length_ns);
        let parts: Option<Vec<u64>> = now.iter().map(part).collect();
        let is_same = self.served_ns.len() == now.len();
        let worth = |mut parts: Vec<u64>| {
            parts.sort_unstable();
            matches!(parts[..], [.., second, first] if HEAVIEST.contains(&first) && second >= STAYS)
        };
        let could = load >= FULL && others <= IDLE && is_same && parts.is_some_and(worth);
        self.waits = if could { self.waits + 1 } else { 0 };
        (self.served_ns, self.measured_ns) = (now, now_ns);
        (self.waits > MEASUREMENTS_MAX).then(|| {
            format!("load {load}, of others {others}, and no queue moves for {} ms", self.waits)
        })
    }
}
