//! Settings of the whole switch, from the command line, the file, and defaults.

use std::time::Duration;

use crate::Address;
use crate::schema::{Entry, Value, run};

/// Valid values of settings of [`run::TABLE`].
#[derive(Clone, Debug, Default)]
pub struct Settings {
    given: Vec<(&'static Entry, Value)>,
}

impl Settings {
    /// Sets a value; it replaces an earlier one.
    pub fn set(&mut self, entry: &'static Entry, value: Value) {
        self.given.retain(|(known, _)| known.name != entry.name);
        self.given.push((entry, value));
    }

    /// These values, and for settings without one those of `fallback`.
    pub fn or(self, fallback: Self) -> Self {
        let mut all = fallback;
        for (entry, value) in self.given {
            all.set(entry, value);
        }
        all
    }

    /// Values that were given.
    pub fn given(&self) -> impl Iterator<Item = (&'static Entry, &Value)> {
        self.given.iter().map(|(entry, value)| (*entry, value))
    }

    /// A value: given, or the default if it is a value.
    pub fn value(&self, name: &str) -> Option<Value> {
        let given = self.given.iter().find(|(entry, _)| entry.name == name);
        given.map(|(_, value)| value.clone()).or_else(|| {
            let entry = run::TABLE.iter().find(|entry| entry.name == name);
            entry.expect("a setting of the table").default_value()
        })
    }

    /// A number, given or default.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.value(name)?.number()
    }

    /// The word of a choice, given or default.
    pub fn word(&self, name: &str) -> Option<&'static str> {
        self.value(name)?.word()
    }

    /// The text of a policy, given or default.
    pub fn policy(&self, name: &str) -> Option<String> {
        self.value(name)?.text().map(Into::into)
    }

    /// Text, if it was given.
    pub fn text(&self, name: &str) -> Option<&str> {
        let (_, value) = self.given.iter().find(|(entry, _)| entry.name == name)?;
        value.text()
    }

    /// Numbers of CPUs; empty unless given.
    pub fn cpus(&self, name: &str) -> Vec<usize> {
        match self.value(name) {
            Some(Value::Cpus(cpus)) => cpus,
            _ => Vec::new(),
        }
    }

    /// A duration, if it was given.
    pub fn seconds(&self, name: &str) -> Option<Duration> {
        match self.value(name)? {
            Value::Seconds(duration) => Some(duration),
            _ => None,
        }
    }

    /// An address, if it was given.
    pub fn address(&self, name: &str) -> Option<Address> {
        match self.value(name)? {
            Value::Address(address) => Some(address),
            _ => None,
        }
    }

    /// Whether an option without a value was given.
    pub fn flag(&self, name: &str) -> bool {
        self.given.iter().any(|(entry, _)| entry.name == name)
    }
}
