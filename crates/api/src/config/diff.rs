//! The difference between the running configuration and a wanted one.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Config, Static};
use crate::port::PortText;
use crate::schema::{Entry, Given, Live, Type, Value, run};

/// The difference between two configurations.
#[derive(Clone, Debug, Default)]
pub struct Diff {
    /// Settings of the switch that can be changed at run time.
    pub settings: Vec<SettingDiff>,
    /// Settings of the switch that need a restart.
    pub restart: Vec<SettingDiff>,
    /// Ports to add.
    pub added: Vec<PortText>,
    /// Names of ports to remove.
    pub removed: Vec<String>,
    /// Ports to replace by a new one of the same name.
    pub replaced: Vec<PortDiff>,
    /// Ports of which only options differ that can be changed at run time.
    pub changed: Vec<PortDiff>,
    /// Static addresses to set.
    pub statics: Vec<Static>,
    /// Static addresses to remove.
    pub statics_removed: Vec<Static>,
}

/// A port that differs.
#[derive(Clone, Debug)]
pub struct PortDiff {
    /// The wanted port.
    pub port: PortText,
    /// Settings that differ.
    pub settings: Vec<SettingDiff>,
}

/// A setting that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SettingDiff {
    /// Its key in the file: `weight`, `poll/1`, `socket`.
    pub setting: String,
    /// The running value; if none is given, the default, a value or its description.
    pub from: String,
    /// The wanted value, likewise.
    pub to: String,
}

impl Config {
    fn by_name(&self) -> BTreeMap<&str, &PortText> {
        self.ports.iter().map(|port| (port.name.as_str(), port)).collect()
    }

    /// Compares this, the running configuration, with the wanted one.
    pub fn diff(&self, wanted: &Self) -> Diff {
        let mut diff = Diff::default();
        let settings = run::TABLE.iter();
        let settings = settings
            .filter(|e| e.given != Given::CommandLine && !matches!(e.value, Type::Table(_)));
        for entry in settings {
            let (from, to) = (self.settings.value(entry.name), wanted.settings.value(entry.name));
            let list = if entry.live == Live::No { &mut diff.restart } else { &mut diff.settings };
            list.extend(setting(entry, None, from, to));
        }
        let (old, new) = (self.by_name(), wanted.by_name());
        for port in &wanted.ports {
            match old.get(port.name.as_str()) {
                None => diff.added.push(port.clone()),
                Some(old) => diff.compare(old, port),
            }
        }
        let gone = |port: &&PortText| !new.contains_key(port.name.as_str());
        diff.removed = self.ports.iter().filter(gone).map(|port| port.name.clone()).collect();
        let missing = |from: &Self, to: &Self| {
            let missing = from.statics.iter().filter(|entry| !to.statics.contains(entry));
            missing.cloned().collect()
        };
        diff.statics = missing(wanted, self);
        diff.statics_removed = missing(self, wanted);
        diff
    }
}

impl Diff {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        let Self { settings, restart, added, removed, replaced, changed, .. } = self;
        settings.is_empty()
            && restart.is_empty()
            && added.is_empty()
            && removed.is_empty()
            && replaced.is_empty()
            && changed.is_empty()
            && self.statics.is_empty()
            && self.statics_removed.is_empty()
    }

    fn compare(&mut self, old: &PortText, new: &PortText) {
        let text = |setting: &str, from: &str, to: &str| SettingDiff {
            setting: setting.into(),
            from: from.into(),
            to: to.into(),
        };
        let port = || new.clone();
        let (from, to) = (old.kind.entry(), new.kind.entry());
        if from.kind != to.kind {
            let settings = vec![text("kind", from.name, to.name)];
            return self.replaced.push(PortDiff { port: port(), settings });
        }
        let (settings, live) = options(old, new);
        if old.arg != new.arg {
            let mut all = vec![text(to.file, &old.arg, &new.arg)];
            all.extend(settings);
            self.replaced.push(PortDiff { port: port(), settings: all });
        } else if !settings.is_empty() {
            let list = if live { &mut self.changed } else { &mut self.replaced };
            list.push(PortDiff { port: port(), settings });
        }
    }
}

/// Options of two ports of one kind that differ, and whether all can be changed at run time.
fn options(old: &PortText, new: &PortText) -> (Vec<SettingDiff>, bool) {
    let (mut found, mut live) = (Vec::new(), true);
    let is_given = |port: &PortText, entry: &Entry| {
        port.options.iter().any(|given| given.entry.name == entry.name)
    };
    for entry in new.kind.options().filter(|entry| is_given(old, entry) || is_given(new, entry)) {
        let all = |port: &PortText| {
            port.given(entry.name, None).cloned().or_else(|| entry.default_value())
        };
        let mut queues: Vec<_> = [old, new]
            .iter()
            .flat_map(|port| &port.options)
            .filter(|given| given.entry.name == entry.name)
            .filter_map(|given| given.queue)
            .collect();
        queues.sort_unstable();
        queues.dedup();
        let before = found.len();
        found.extend(setting(entry, None, all(old), all(new)));
        for queue in queues {
            let one = |port: &PortText| port.given(entry.name, Some(queue)).cloned();
            found.extend(setting(entry, Some(queue), one(old), one(new)));
        }
        live &= found.len() == before || entry.live != Live::No;
    }
    (found, live)
}

/// The difference of one setting, if there is one.
fn setting(
    entry: &Entry,
    queue: Option<usize>,
    from: Option<Value>,
    to: Option<Value>,
) -> Option<SettingDiff> {
    if from == to {
        return None;
    }
    let key = entry.file;
    let text = |value: Option<Value>| match value {
        // A default may be the description of one.
        Some(value) if entry.default_value().as_ref() == Some(&value) => {
            entry.default.replace('`', "")
        }
        Some(value) => value.to_string(),
        None if queue.is_some() => format!("as `{key}`"),
        None => format!("default ({})", entry.default.replace('`', "")),
    };
    let setting = queue.map_or(key.into(), |queue| format!("{key}/{queue}"));
    Some(SettingDiff { setting, from: text(from), to: text(to) })
}
