//! How loaded a worker is, and what it does about it: measured each millisecond.
//!
//! Costs nothing for queues that were not served meanwhile, however many there are.

use std::sync::atomic::Ordering;

use switch::fair::{self, Move};

use super::{SETTLE, Worker};
use crate::pool::Placement;

impl Worker {
    /// At the end of a load measurement: publishes it, and gives queues away if that is better.
    pub(super) fn measure(&mut self, now: u64) {
        let length = now.saturating_sub(self.window.0).max(1);
        let part = |ns: u64| (ns.saturating_mul(1000) / length).min(1000) as u32;
        let load = part(self.window.1);
        self.window = (now, 0);
        self.handle.stats.load.store(load, Ordering::Relaxed);
        self.settle = self.settle.saturating_sub(1);
        let served = std::mem::take(&mut self.served);
        let of = |at: &usize| part(std::mem::take(&mut self.queues[*at].busy_ns));
        let queues: Vec<u32> = served.iter().map(of).collect();
        let balances = self.settle == 0 && self.pool.placement() == Placement::Balanced;
        if balances && self.pool.workers().len() > 1 && !self.queues.is_empty() {
            self.balance(&served, &queues);
        }
        // For its memory.
        self.served = served;
        self.served.clear();
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
