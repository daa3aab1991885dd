//! Changes by `ctl set`: `KEY=VALUE...` of the switch, a port, one of its queues, or a guest
//! (`nic`, `gen`).

use crate::near::did_you_mean;
use crate::schema::port::Kind;
use crate::schema::{Entry, Live, Value, driver, port, run};

/// Target of a change.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// All ports of the switch, and the switch itself.
    Switch,
    /// A port: name and kind.
    Port(&'a str, Kind),
    /// One queue of a port: the port's name and kind.
    Queue(&'a str, Kind),
    /// The driver half, or one queue pair of it.
    Driver,
}

/// One change.
#[derive(Clone, Debug)]
pub struct Change {
    /// The setting.
    pub entry: &'static Entry,
    /// Its new value.
    pub value: Value,
}

impl Target<'_> {
    fn table(self) -> Vec<&'static Entry> {
        match self {
            Self::Switch => run::TABLE.iter().collect(),
            Self::Port(_, kind) | Self::Queue(_, kind) => kind.options().collect(),
            Self::Driver => driver::TABLE.iter().collect(),
        }
    }

    /// Settings that can be changed, of this target or of its port.
    fn known(self) -> Vec<&'static Entry> {
        self.table().into_iter().filter(|entry| entry.live != Live::No).collect()
    }
}

/// Parses a list of `KEY=VALUE`.
///
/// # Errors
/// One is invalid, or there is none; the error, of the first, says what to write.
pub fn changes(target: Target<'_>, settings: &[String]) -> Result<Vec<Change>, String> {
    if settings.is_empty() {
        let known: Vec<_> = target.known().iter().map(|entry| entry.name).collect();
        return Err(format!("no setting given: use KEY=VALUE; known here: {}", known.join(", ")));
    }
    settings.iter().map(|setting| change(target, setting)).collect()
}

fn change(target: Target<'_>, setting: &str) -> Result<Change, String> {
    let (key, value) = setting.split_once('=').ok_or(format!("'{setting}': use KEY=VALUE"))?;
    let known = target.known();
    let Some(entry) = known.iter().find(|entry| entry.name == key) else {
        return Err(unknown(target, key, value, &known));
    };
    if let (Target::Queue(port, _), Live::Whole) = (target, entry.live) {
        return Err(format!(
            "{key} is a setting of the port, not of a queue: use set {port} {key}=N"
        ));
    }
    Ok(Change { entry, value: entry.parse(value)? })
}

fn unknown(target: Target<'_>, key: &str, value: &str, known: &[&'static Entry]) -> String {
    if let Some((word, queue)) = key.split_once('/')
        && let Some(entry) = target.table().into_iter().find(|entry| entry.name == word)
        && entry.live != Live::No
    {
        let of = match target {
            Target::Port(port, _) | Target::Queue(port, _) => format!("{port}/"),
            Target::Switch => "PORT/".into(),
            Target::Driver => String::new(),
        };
        return format!("'{key}': for one queue use set {of}{queue} {word}={value}");
    }
    let hint = did_you_mean(key, known.iter().map(|entry| entry.name));
    let known: Vec<_> = known.iter().map(|entry| entry.name).collect();
    format!("unknown setting '{key}'{hint}; known here: {}", known.join(", "))
}

/// Changeable settings, for `--help`.
pub fn help() -> String {
    let names = |entries: Vec<&'static Entry>| {
        let names = entries.iter().map(|entry| entry.name);
        let mut names: Vec<_> = names.filter(|name| !name.starts_with(port::LIMIT)).collect();
        names.dedup();
        names.join(", ")
    };
    let of_port = Target::Port("", Kind::Null).known();
    let limits = of_port.iter().any(|entry| entry.name.starts_with(port::LIMIT));
    let limits = if limits { ", and without QUEUE limit-NAME" } else { "" };
    format!(
        "Change settings: [PORT[/QUEUE]] KEY=VALUE...; with PORT: {}{limits}; without: {} of every \
         port or of the switch. For a guest (nic, gen): [QUEUE] KEY=VALUE...: {}",
        names(of_port),
        names(Target::Switch.known()),
        names(Target::Driver.known()),
    )
}
