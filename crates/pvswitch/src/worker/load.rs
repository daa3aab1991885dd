//! How loaded a worker is, and what it does about it: measured each millisecond.
//!
//! Costs nothing for queues that were not served meanwhile, however many there are.

use std::sync::atomic::Ordering;

use switch::fair::level::{Claim, PERIOD_NS, Report};
use switch::fair::{self, Move};

use super::{SETTLE, Worker};
use crate::pool::Placement;

/// A worker's part in fair shares over all workers: what it reports at the end of each period, and
/// what it learns then.
#[derive(Default)]
pub(super) struct Period {
    /// Its number: periods of all workers end together.
    number: u64,
    began_ns: u64,
    /// Time spent on frames.
    busy_ns: u64,
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

    /// Takes note of the ports that have queues with backlog on other workers.
    fn learn(&mut self, ports: Vec<(u32, u32)>) {
        self.spread.drain(..).for_each(|port| self.elsewhere[port] = 0);
        for (port, queues) in ports {
            let port = port as usize;
            self.elsewhere.resize(self.elsewhere.len().max(port + 1), 0);
            self.elsewhere[port] = queues.try_into().unwrap_or(u16::MAX);
            self.spread.push(port);
        }
    }

    fn begin(&mut self, now: u64) {
        (self.number, self.began_ns, self.busy_ns) = (now / PERIOD_NS, now, 0);
    }
}

impl Worker {
    /// At the end of a load measurement: publishes it, and gives queues away if that is better.
    pub(super) fn measure(&mut self, now: u64) {
        let length = now.saturating_sub(self.window.0).max(1);
        let part = |ns: u64| (ns.saturating_mul(1000) / length).min(1000) as u32;
        let load = part(self.window.1);
        let (began, busy) = std::mem::replace(&mut self.window, (now, 0));
        self.period.busy_ns += busy;
        self.handle.stats.load.store(load, Ordering::Relaxed);
        self.settle = self.settle.saturating_sub(1);
        let served = std::mem::take(&mut self.served);
        let of = |at: &usize| {
            let queue = &mut self.queues[*at];
            let busy = std::mem::take(&mut queue.busy_ns);
            queue.backlog.measured(self.period.number, began, now, busy);
            part(busy)
        };
        let queues: Vec<u32> = served.iter().map(of).collect();
        let several = self.pool.workers().len() > 1;
        if several && now / PERIOD_NS != self.period.number {
            self.level(now);
        }
        let balances = several && self.pool.placement() == Placement::Balanced;
        if balances && self.settle == 0 && !self.queues.is_empty() {
            self.balance(&served, &queues);
        }
        // For its memory.
        self.served = served;
        self.served.clear();
    }

    /// At the end of a period: reports the queues that had backlog in it.
    fn level(&mut self, now: u64) {
        if self.pool.placement() != Placement::Balanced {
            self.period.learn(Vec::new());
            self.period.begin(now);
            return;
        }
        let Self { queues, hot, period, pool, handle, .. } = self;
        let elsewhere = pool.level(usize::from(handle.index), || {
            let claims = hot.iter().filter_map(|at| {
                let queue = &mut queues[*at];
                let (number, began) = (period.number, period.began_ns);
                let (served_ns, length_ns) = queue.backlog.end(number, began, now)?;
                let source = &queue.served.source;
                let (port, weight) = (u32::from(source.port.0), source.tuning.weight());
                Some(Claim { queue: queue.served.token, port, weight, served_ns, length_ns })
            });
            let claims = claims.collect();
            let length_ns = now.saturating_sub(period.began_ns);
            Report { now_ns: now, length_ns, busy_ns: period.busy_ns, claims }
        });
        // Where another worker reports at this moment, the period goes on for a measurement.
        if let Some(elsewhere) = elsewhere {
            period.learn(elsewhere);
            period.begin(now);
        }
    }

    /// `served`: the queues (indices) that were served in the measurement just ended; `loads` are
    /// theirs.
    fn balance(&mut self, served: &[usize], loads: &[u32]) {
        let workers: Vec<u32> = self.pool.workers().iter().map(|w| w.load()).collect();
        match fair::balance(usize::from(self.handle.index), &workers, loads) {
            Some(Move::Queues(given, to)) => {
                self.give(given.into_iter().map(|at| served[at]).collect(), to);
            }
            Some(Move::All(to)) => self.give((0..self.queues.len()).collect(), to),
            None => {}
        }
    }

    /// Gives queues to another worker.
    pub(super) fn give(&mut self, mut queues: Vec<usize>, to: usize) {
        // Taking one out moves but the last of them.
        queues.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        let given: Vec<_> = queues.into_iter().map(|at| self.take_out(at)).collect();
        self.list_again();
        let stats = &self.handle.stats;
        stats.moves.fetch_add(given.len() as u64, Ordering::Relaxed);
        stats.queues.store(self.queues.len() as u32, Ordering::Relaxed);
        for served in given {
            self.pool.hand_over(usize::from(self.handle.index), to, served);
        }
        self.settle = SETTLE;
    }
}
