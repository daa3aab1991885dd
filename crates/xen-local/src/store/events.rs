//! Queue of watch events: changes, and the connections whose watches may match them.
//!
//! One commit of a domain can change a thousand nodes that 64 connections watch 128 times each:
//! eight million comparisons. They are made in parts of [`STEPS`], between which all connections
//! are served, and are charged to the domain that changed the nodes: while more than
//! [`PENDING_MAX`] of its changes are pending, no requests are read from it (XSA-349).

use std::collections::{BTreeMap, VecDeque};

use super::session::Fired;

/// Maximum number of comparisons of a change with a watch per part.
pub const STEPS: usize = 2048;
/// Maximum number of pending changes of a domain, times connections.
pub const PENDING_MAX: usize = 4096;

/// Changes made at once.
struct Batch {
    fired: Vec<Fired>,
    /// The domain that made them.
    by: u16,
    /// Connections still to be processed; the last one from change `at` on.
    to: Vec<u64>,
    at: usize,
}

/// All changes with pending events, in order.
#[derive(Default)]
pub struct EventQueue {
    batches: VecDeque<Batch>,
    /// By domain: pending changes times connections.
    pending: BTreeMap<u16, usize>,
}

impl EventQueue {
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Whether too many changes of a domain are pending.
    pub fn is_over_limit(&self, domid: u16) -> bool {
        self.pending.get(&domid).is_some_and(|pending| *pending > PENDING_MAX)
    }

    /// Adds changes by domain `by` for these connections.
    pub fn add(&mut self, fired: Vec<Fired>, by: u16, to: Vec<u64>) {
        if !fired.is_empty() && !to.is_empty() {
            *self.pending.entry(by).or_default() += fired.len() * to.len();
            self.batches.push_back(Batch { fired, by, to, at: 0 });
        }
    }

    /// The next change, and the connection to process.
    pub fn next(&self) -> Option<(u64, &Fired)> {
        let batch = self.batches.front()?;
        Some((*batch.to.last()?, batch.fired.get(batch.at)?))
    }

    /// Advances to the next change. Returns the connection if it has processed the whole batch.
    pub fn advance(&mut self) -> Option<u64> {
        let batch = self.batches.front_mut()?;
        batch.at += 1;
        if let Some(pending) = self.pending.get_mut(&batch.by) {
            *pending -= 1;
            if *pending == 0 {
                self.pending.remove(&batch.by);
            }
        }
        if batch.at < batch.fired.len() {
            return None;
        }
        batch.at = 0;
        let delivered = batch.to.pop();
        if batch.to.is_empty() {
            self.batches.pop_front();
        }
        delivered
    }
}
