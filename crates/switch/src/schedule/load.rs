//! How loaded a worker is, and what it does about it: measured each millisecond.
//!
//! Costs nothing for queues that were not served meanwhile, however many there are.

use super::{Effect, Scheduler};
use crate::fair::level::{Claim, Leveller, PERIOD, Report};
use crate::fair::{self, Move};
use crate::time::{Instant, Ns};

/// A worker's part in fair shares over all workers: what it reports at the end of each period, and
/// what it learns then.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Period {
    /// Its number: periods of all workers end together.
    number: u64,
    began: Instant,
    /// Time spent on frames.
    busy: Ns,
    /// Of each port the queues with backlog that other workers serve.
    elsewhere: Vec<u16>,
    /// The ports that have any.
    spread: Vec<usize>,
}

impl Period {
    /// How many queues with backlog of a port other workers serve: they share its quantum, too.
    #[inline]
    pub fn elsewhere(&self, port: usize) -> usize {
        self.elsewhere.get(port).copied().map_or(0, usize::from)
    }
}

impl<Q> Scheduler<Q> {
    /// At the end of a load measurement.
    #[cold]
    pub(super) fn measure(&mut self, now: Instant) -> Effect<Q> {
        let length = now - self.window.0;
        let part = |time: Ns| (time * 1000).times(length).min(1000) as u32;
        let load = part(self.window.1);
        let (began, busy) = std::mem::replace(&mut self.window, (now, Ns::ZERO));
        self.period.busy += busy;
        self.settle = self.settle.saturating_sub(1);
        self.measured.clear();
        for at in self.served.drain(..) {
            let queue = &mut self.queues[at];
            let busy = std::mem::take(&mut queue.busy);
            queue.backlog.add_measurement(self.period.number, began, now, busy);
            self.measured.push((at, part(busy)));
        }
        Effect::Measure { load, ends_period: now.periods(PERIOD) != self.period.number }
    }

    /// At the end of a period: reports it to `leveller`, and learns which other workers serve
    /// queues of the same ports. Returns the queues to move so that shares are fair over all
    /// workers, each with its new worker; others may serve them. `asleep`: workers that sleep until
    /// woken.
    pub fn level(
        &mut self,
        leveller: &mut Leveller,
        now: Instant,
        asleep: impl Fn(usize) -> bool,
    ) -> Vec<(u64, usize)> {
        let report = self.end_period(now);
        let me = usize::from(self.index);
        let moves = leveller.report(me, report, asleep);
        self.begin_period(leveller.elsewhere(me), now);
        moves
    }

    /// The same where queues do not move by load.
    pub fn skip_period(&mut self, now: Instant) {
        self.begin_period(Vec::new(), now);
    }

    /// The queues that had backlog in the period that ends now.
    fn end_period(&mut self, now: Instant) -> Report {
        let Self { queues, hot, period, .. } = self;
        let claims = hot.iter().filter_map(|at| {
            let queue = &mut queues[*at];
            let (served, length) = queue.backlog.end(period.number, period.began, now)?;
            let source = &queue.served.source;
            let (port, weight) = (u32::from(source.port.0), source.tuning.weight());
            Some(Claim { queue: queue.served.token, port, weight, served, length })
        });
        let claims = claims.collect();
        let length = now - period.began;
        Report { now, length, busy: period.busy, claims }
    }

    /// Begins another period. `elsewhere`: the ports that have queues with backlog on other
    /// workers, and how many.
    fn begin_period(&mut self, elsewhere: Vec<(u32, u32)>, now: Instant) {
        let period = &mut self.period;
        period.spread.drain(..).for_each(|port| period.elsewhere[port] = 0);
        for (port, queues) in elsewhere {
            let port = port as usize;
            period.elsewhere.resize(period.elsewhere.len().max(port + 1), 0);
            period.elsewhere[port] = queues.try_into().unwrap_or(u16::MAX);
            period.spread.push(port);
        }
        (period.number, period.began, period.busy) = (now.periods(PERIOD), now, Ns::ZERO);
    }

    /// After a measurement: gives queues to another worker if that is better. `workers`: the loads
    /// of all workers, in thousandths.
    pub fn balance(&mut self, workers: impl Iterator<Item = u32>) {
        if self.settle > 0 || self.queues.is_empty() {
            return;
        }
        let workers: Vec<u32> = workers.collect();
        let loads: Vec<u32> = self.measured.iter().map(|(_, load)| *load).collect();
        match fair::balance(usize::from(self.index), &workers, &loads) {
            Some(Move::Queues(given, to)) => {
                self.give(given.into_iter().map(|i| self.measured[i].0).collect(), to);
            }
            Some(Move::All(to)) => self.give((0..self.queues.len()).collect(), to),
            None => {}
        }
    }
}
