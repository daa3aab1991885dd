//! Accounts of ports, and budgets of the process, as `ctl` shows them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use switch::account::Budgets;

use super::PortState;

/// Each entry by its name, and `served_ns`, the time of workers that went into the port: the sum
/// of its queues' counters of that name.
pub(super) fn account(state: &PortState) -> Value {
    let entries = state.port.account.entries().into_iter().map(|entry| {
        let value = json!({
            "used": entry.used,
            "limit": entry.limit,
            "refused": entry.refused,
            "per_second": entry.per_second,
        });
        (entry.name.to_string(), value)
    });
    let mut all: Map<_, _> = entries.collect();
    let served: u64 = state.ingress.iter().map(|queue| queue.stats.served_ns.get()).sum();
    let held: u64 = state.port.egress.iter().map(|queue| queue.stats.served_ns.get()).sum();
    all.insert("served_ns".into(), (served + held).into());
    Value::Object(all)
}

/// Each budget by its name.
pub(super) fn budgets(budgets: &Budgets) -> Value {
    let entry = |(name, budget): (&str, &switch::account::Budget)| {
        (name.to_string(), json!({ "used": budget.used(), "limit": budget.limit() }))
    };
    budgets.entries().into_iter().map(entry).collect()
}

/// What a front-end did wrong, over all its connections.
#[derive(Default)]
pub(super) struct Mistakes {
    /// How often, by cause: as many as there are names of causes.
    counts: BTreeMap<&'static str, u64>,
    /// The last one, in words.
    last: Option<String>,
}

impl Mistakes {
    /// Counts one.
    pub(super) fn count(&mut self, cause: &'static str, what: String) {
        *self.counts.entry(cause).or_default() += 1;
        self.last = Some(what);
    }

    /// Adds what is shown of a port.
    pub(super) fn show(&self, port: &mut Value) {
        port["errors"] = self.counts.iter().map(|(cause, n)| (*cause, *n)).collect();
        port["last_error"] = self.last.as_deref().into();
    }
}
