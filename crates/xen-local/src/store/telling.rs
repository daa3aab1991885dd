//! Watch events still to be delivered: changes, and the connections whose watches may match them.
//!
//! One commit of a domain can change a thousand nodes that 64 connections watch 128 times each:
//! eight million comparisons. They are done in pieces of [`STEPS`], between which every connection
//! is served, and are the debt of the domain that changed the nodes: while more than [`ARREARS`]
//! changes of its wait for someone, nothing is read from its connections (XSA-349).

use std::collections::{BTreeMap, VecDeque};

use super::session::Fired;

/// Comparisons of a change with a watch, at once.
pub const STEPS: usize = 2048;
/// Changes, times connections that are to hear of them, that a domain may have waiting.
pub const ARREARS: usize = 4096;

/// What was changed at once.
struct Batch {
    fired: Vec<Fired>,
    /// Who changed it.
    by: u16,
    /// Connections that have not heard of all of it; of the last, from `at` on.
    to: Vec<u64>,
    at: usize,
}

/// All changes whose events are still to be delivered, in order.
#[derive(Default)]
pub struct Telling {
    batches: VecDeque<Batch>,
    /// By domain: changes times connections.
    debts: BTreeMap<u16, usize>,
}

impl Telling {
    pub fn is_done(&self) -> bool {
        self.batches.is_empty()
    }

    /// Whether too much of what a domain changed waits.
    pub fn is_in_arrears(&self, domid: u16) -> bool {
        self.debts.get(&domid).is_some_and(|debt| *debt > ARREARS)
    }

    /// Notes what domain `by` changed, for these connections to hear.
    pub fn add(&mut self, fired: Vec<Fired>, by: u16, to: Vec<u64>) {
        if !fired.is_empty() && !to.is_empty() {
            *self.debts.entry(by).or_default() += fired.len() * to.len();
            self.batches.push_back(Batch { fired, by, to, at: 0 });
        }
    }

    /// The next change to be delivered, and to whom.
    pub fn next(&self) -> Option<(u64, &Fired)> {
        let batch = self.batches.front()?;
        Some((*batch.to.last()?, batch.fired.get(batch.at)?))
    }

    /// It was delivered; the connection, if it has now heard all of a batch.
    pub fn advance(&mut self) -> Option<u64> {
        let batch = self.batches.front_mut()?;
        batch.at += 1;
        if let Some(debt) = self.debts.get_mut(&batch.by) {
            *debt -= 1;
            if *debt == 0 {
                self.debts.remove(&batch.by);
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
