//! Checks that queues of a worker that never run empty get shares of its time by weight.
//!
//! While the same queues are served in each round, and each burst finds frames, the times that they
//! were served differ by at most a burst and two quanta, whatever their bursts cost.

use std::collections::BTreeMap;

use switch::fair::QUANTUM;
use switch::time::{Instant, Ns};

use crate::worker::Queue;

/// Account of a queue since the set of hot queues last changed.
struct Account {
    port: u16,
    weight: u32,
    /// Number of times that it left the hot queues.
    leaves: u64,
    /// Its quantum per round.
    quantum: Ns,
    /// Debt at the start.
    owed: Ns,
    /// Time served.
    served: Ns,
    /// Most time that it was charged apart from bursts.
    charged: Ns,
    /// Longest burst.
    burst_max: Ns,
}

/// The accounts of one worker.
#[derive(Default)]
pub(crate) struct Shares {
    accounts: BTreeMap<u64, Account>,
    /// Current burst: its queue and start.
    turn: Option<(u64, Instant)>,
    /// A burst found nothing.
    ran_empty: bool,
    /// By port, the number of its backlogged queues at other workers.
    elsewhere: BTreeMap<u32, u64>,
}

impl Shares {
    /// Records a burst of a queue, which found `frames` frames.
    pub fn begin_turn(&mut self, token: u64, frames: usize, now: Instant) {
        self.ran_empty |= frames == 0;
        self.turn = Some((token, now));
    }

    pub fn end_turn(&mut self, now: Instant) {
        let Some((token, began)) = self.turn.take() else { return };
        if let Some(account) = self.accounts.get_mut(&token) {
            let took = now - began;
            account.served += took;
            account.burst_max = account.burst_max.max(took);
        }
    }

    /// Records a charge apart from bursts.
    pub fn charge(&mut self, token: u64, time: Ns) {
        if let Some(account) = self.accounts.get_mut(&token) {
            account.charged += time;
        }
    }

    /// Begins a queue's account again: it was stopped, and is served again.
    pub fn forget(&mut self, token: u64) {
        self.accounts.remove(&token);
    }

    /// Sets the queues at other workers, which share the quantum of their port.
    pub fn set_elsewhere(&mut self, elsewhere: Vec<(u32, u32)>) {
        self.elsewhere = elsewhere.into_iter().map(|(port, n)| (port, n.into())).collect();
        self.accounts.clear();
    }

    /// Ends a round; returns a description of any unfairness.
    pub fn end_round(&mut self, queues: &[Queue]) -> Option<String> {
        let hot = || queues.iter().filter(|queue| queue.is_listed());
        let is_same = |queue: &Queue| {
            let now = Account::new(queue);
            let was = self.accounts.get(&queue.served.token);
            was.is_some_and(|was| (was.weight, was.leaves) == (now.weight, now.leaves))
        };
        let same = hot().count() == self.accounts.len() && hot().all(is_same);
        if same && !self.ran_empty {
            return self.check();
        }
        self.ran_empty = false;
        self.accounts = hot().map(|queue| (queue.served.token, Account::new(queue))).collect();
        let of_port = |port: u16| {
            let here = self.accounts.values().filter(|a| a.port == port).count() as u64;
            here + self.elsewhere.get(&port.into()).copied().unwrap_or_default()
        };
        let parts: Vec<u64> = self.accounts.values().map(|a| of_port(a.port)).collect();
        for (account, queues) in self.accounts.values_mut().zip(parts) {
            account.quantum = QUANTUM * u64::from(account.weight) / queues;
        }
        None
    }

    fn check(&self) -> Option<String> {
        // Bounds on the number of rounds, by the time that each queue was served. A queue that was
        // not served may still be paying off its debt.
        let rounds_of = |time: Ns, a: &Account| time.get() as f64 / a.quantum.get() as f64;
        let least = |a: &Account| {
            let time = a.owed + a.served - a.burst_max;
            if a.served > Ns::ZERO { rounds_of(time, a) - 2.0 } else { 0.0 }
        };
        let most = |a: &Account| rounds_of(a.owed + a.served + a.charged, a) + 2.0;
        let all = || self.accounts.iter();
        let (over, a) = all().max_by(|a, b| least(a.1).total_cmp(&least(b.1)))?;
        let (under, b) = all().min_by(|a, b| most(a.1).total_cmp(&most(b.1)))?;
        let (rounds, at_most) = (least(a), most(b));
        (rounds > at_most).then(|| {
            format!(
                "queue {over:#x} was served for at least {rounds:.1} rounds, {under:#x} for at \
                 most {at_most:.1}"
            )
        })
    }
}

impl Account {
    fn new(queue: &Queue) -> Self {
        let source = &queue.served.source;
        let leaves = source.stats.naps.get() + source.stats.sleeps.get();
        Self {
            port: source.port.0,
            weight: source.tuning.weight(),
            leaves,
            quantum: Ns::ZERO,
            owed: queue.owed(),
            served: Ns::ZERO,
            charged: Ns::ZERO,
            burst_max: Ns::ZERO,
        }
    }
}
