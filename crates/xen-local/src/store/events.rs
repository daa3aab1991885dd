//! Queues of watch events: changes, and the connections whose watches may match them.
//!
//! One commit of a domain can change a thousand nodes that 64 connections watch 128 times each:
//! eight million comparisons. They are made in parts of [`STEPS`], each for one domain in turn,
//! between which all connections are served, and are charged to the domain that changed the nodes:
//! while more than [`PENDING_MAX`] of its changes are pending, no requests are read from it
//! (XSA-349). Events of one domain's changes are delivered in order.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use super::session::Fired;

/// Maximum number of comparisons of a change with a watch per part.
pub const STEPS: usize = 2048;
/// Maximum number of pending changes of a domain, times connections.
pub const PENDING_MAX: usize = 4096;

/// Changes made at once.
struct Batch {
    fired: Vec<Fired>,
    /// Connections still to be processed; the last one from change `at` on.
    to: Vec<u64>,
    at: usize,
}

/// Changes of one domain, in order.
#[derive(Default)]
struct Queue {
    batches: VecDeque<Batch>,
    /// Pending changes times connections.
    pending: usize,
}

/// All changes with pending events, by the domain that made them.
#[derive(Default)]
pub struct EventQueues {
    /// None is empty.
    queues: BTreeMap<u16, Queue>,
    /// The domain whose turn was last.
    last: u16,
}

impl EventQueues {
    /// The domains with pending events.
    pub fn domains(&self) -> impl Iterator<Item = u16> {
        self.queues.keys().copied()
    }

    /// Whether too many changes of a domain are pending.
    pub fn is_over_limit(&self, domid: u16) -> bool {
        self.queues.get(&domid).is_some_and(|queue| queue.pending > PENDING_MAX)
    }

    /// Adds changes by domain `by` for these connections.
    pub fn add(&mut self, fired: Vec<Fired>, by: u16, to: Vec<u64>) {
        if !fired.is_empty() && !to.is_empty() {
            let queue = self.queues.entry(by).or_default();
            queue.pending += fired.len() * to.len();
            queue.batches.push_back(Batch { fired, to, at: 0 });
        }
    }

    /// The domain that has the next turn, of those with pending events that are `served`.
    pub fn turn(&mut self, served: impl Fn(u16) -> bool) -> Option<u16> {
        let later = self.queues.range((Bound::Excluded(self.last), Bound::Unbounded));
        let mut order = later.chain(self.queues.range(..=self.last)).map(|(domid, _)| *domid);
        self.last = order.find(|domid| served(*domid))?;
        Some(self.last)
    }

    /// The next change of a domain, and the connection to process.
    pub fn next(&self, by: u16) -> Option<(u64, &Fired)> {
        let batch = self.queues.get(&by)?.batches.front()?;
        Some((*batch.to.last()?, batch.fired.get(batch.at)?))
    }

    /// Advances to the next change of a domain. Returns the connection if it has processed the
    /// whole batch.
    pub fn advance(&mut self, by: u16) -> Option<u64> {
        let queue = self.queues.get_mut(&by)?;
        let batch = queue.batches.front_mut()?;
        batch.at += 1;
        queue.pending -= 1;
        if batch.at < batch.fired.len() {
            return None;
        }
        batch.at = 0;
        let delivered = batch.to.pop();
        if batch.to.is_empty() {
            queue.batches.pop_front();
        }
        if queue.batches.is_empty() {
            self.queues.remove(&by);
        }
        delivered
    }
}
