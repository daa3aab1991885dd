//! Accounts of ports and budgets of the process, as shown by `ctl`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use switch::account::Budgets;

use super::PortState;

/// Each entry by name, and `served_ns`, the workers' time spent on the port: the sum of its queues'
/// counters of that name.
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

/// Each budget by name.
pub(super) fn budgets(budgets: &Budgets) -> Value {
    let entry = |(name, budget): (&str, &switch::account::Budget)| {
        (name.to_string(), json!({ "used": budget.used(), "limit": budget.limit() }))
    };
    budgets.entries().into_iter().map(entry).collect()
}

/// Errors of a front-end, over all its connections.
#[derive(Default)]
pub(super) struct Errors {
    /// Count by cause; one entry for each known cause.
    counts: BTreeMap<Cow<'static, str>, u64>,
    /// Message of the last one.
    last: Option<String>,
}

impl Errors {
    /// Counts an error.
    pub(super) fn count(&mut self, cause: &'static str, what: String) {
        *self.counts.entry(cause.into()).or_default() += 1;
        self.last = Some(what);
    }

    /// Counts and last error, for another process.
    pub(super) fn export(&self) -> (BTreeMap<String, u64>, Option<String>) {
        let counts = self.counts.iter().map(|(cause, n)| (cause.to_string(), *n));
        (counts.collect(), self.last.clone())
    }

    /// Takes over the errors of another process.
    pub(super) fn import(counts: &BTreeMap<String, u64>, last: Option<String>) -> Self {
        let counts = counts.iter().map(|(cause, n)| (cause.clone().into(), *n));
        Self { counts: counts.collect(), last }
    }

    /// Adds the errors to a port's JSON.
    pub(super) fn show(&self, port: &mut Value) {
        port["errors"] = self.counts.iter().map(|(cause, n)| (cause.clone(), *n)).collect();
        port["last_error"] = self.last.as_deref().into();
    }
}
