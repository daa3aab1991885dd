//! Whether the queues of a worker that never run empty get equal shares of its time, by weight.
//!
//! As long as the same queues are served in each round, and each burst finds frames, what they were
//! served differs by no more than a burst and two quanta, whatever their bursts cost.

use std::collections::BTreeMap;

use switch::fair::QUANTUM_NS;

use crate::worker::Queue;

/// What a queue was served since the set of queues last changed.
struct Account {
    port: u16,
    weight: u32,
    /// Times that it left the hot queues.
    leaves: u64,
    /// Its part of a round, in ns.
    quantum_ns: u64,
    /// What it owed before, in ns.
    owed_ns: u64,
    /// Time served since, in ns.
    served_ns: u64,
    /// What it was charged besides at most, in ns.
    charged_ns: u64,
    /// The longest burst, in ns.
    burst_ns_max: u64,
}

/// The accounts of one worker.
#[derive(Default)]
pub(crate) struct Shares {
    accounts: BTreeMap<u64, Account>,
    /// A burst that is under way: its queue, and when it began.
    turn: Option<(u64, u64)>,
    /// A burst found nothing.
    ran_empty: bool,
    /// How many queues of a port with backlog other workers serve.
    elsewhere: BTreeMap<u32, u64>,
}

impl Shares {
    /// A burst of a queue found so many frames.
    pub fn begin_turn(&mut self, token: u64, frames: usize, now_ns: u64) {
        self.ran_empty |= frames == 0;
        self.turn = Some((token, now_ns));
    }

    pub fn end_turn(&mut self, now_ns: u64) {
        let Some((token, began_ns)) = self.turn.take() else { return };
        if let Some(account) = self.accounts.get_mut(&token) {
            let took_ns = now_ns - began_ns;
            account.served_ns += took_ns;
            account.burst_ns_max = account.burst_ns_max.max(took_ns);
        }
    }

    /// A queue is charged for something else than a burst.
    pub fn charge(&mut self, token: u64, ns: u64) {
        if let Some(account) = self.accounts.get_mut(&token) {
            account.charged_ns += ns;
        }
    }

    /// What it learned of other workers: queues of a port share its quantum with those there.
    pub fn set_elsewhere(&mut self, elsewhere: Vec<(u32, u32)>) {
        self.elsewhere = elsewhere.into_iter().map(|(port, n)| (port, n.into())).collect();
        self.accounts.clear();
    }

    /// At the end of a round: what is unfair.
    pub fn end_round(&mut self, queues: &[Queue]) -> Option<String> {
        let hot = || queues.iter().filter(|queue| queue.is_listed());
        let is_same = |queue: &Queue| {
            let now = Account::new(queue);
            let was = self.accounts.get(&queue.served.token);
            was.is_some_and(|was| (was.weight, was.leaves) == (now.weight, now.leaves))
        };
        let same = hot().count() == self.accounts.len() && hot().all(is_same);
        if same && !self.ran_empty {
            return self.judge();
        }
        self.ran_empty = false;
        self.accounts = hot().map(|queue| (queue.served.token, Account::new(queue))).collect();
        let of_port = |port: u16| {
            let here = self.accounts.values().filter(|a| a.port == port).count() as u64;
            here + self.elsewhere.get(&port.into()).copied().unwrap_or_default()
        };
        let parts: Vec<u64> = self.accounts.values().map(|a| of_port(a.port)).collect();
        for (account, queues) in self.accounts.values_mut().zip(parts) {
            account.quantum_ns = u64::from(QUANTUM_NS) * u64::from(account.weight) / queues;
        }
        None
    }

    fn judge(&self) -> Option<String> {
        // How many rounds there were at least, and at most, going by what a queue was served. One
        // that was not may still be working off what it owed.
        let least = |a: &Account| {
            let ns = (a.owed_ns + a.served_ns).saturating_sub(a.burst_ns_max);
            if a.served_ns > 0 { ns as f64 / a.quantum_ns as f64 - 2.0 } else { 0.0 }
        };
        let most = |a: &Account| {
            (a.owed_ns + a.served_ns + a.charged_ns) as f64 / a.quantum_ns as f64 + 2.0
        };
        let all = || self.accounts.iter();
        let (over, a) = all().max_by(|a, b| least(a.1).total_cmp(&least(b.1)))?;
        let (under, b) = all().min_by(|a, b| most(a.1).total_cmp(&most(b.1)))?;
        let (rounds, at_most) = (least(a), most(b));
        (rounds > at_most).then(|| {
            format!(
                "queue {over:#x} was served for {rounds:.1} rounds at least, {under:#x} for \
                 {at_most:.1} at most"
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
            quantum_ns: 0,
            owed_ns: queue.owed_ns(),
            served_ns: 0,
            charged_ns: 0,
            burst_ns_max: 0,
        }
    }
}
