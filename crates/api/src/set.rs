//! Changes by `ctl set`: settings of the switch, a port, one of its queues, or a guest (`nic`,
//! `gen`).

use serde_json::{Map, Value as Json};

use crate::file::setting;
use crate::invalid::Invalid;
use crate::near::did_you_mean;
pub use crate::schema::Change;
use crate::schema::port::Kind;
use crate::schema::{Entry, Live, driver, port, run};

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

impl Target<'_> {
    fn table(self) -> Vec<&'static Entry> {
        match self {
            Self::Switch => run::TABLE.iter().collect(),
            Self::Port(_, kind) | Self::Queue(_, kind) => kind.options().collect(),
            Self::Driver => driver::TABLE.iter().collect(),
        }
    }

    /// Settings that can be changed, of this target or of its port.
    pub(crate) fn known(self) -> Vec<&'static Entry> {
        self.table().into_iter().filter(|entry| entry.live != Live::No).collect()
    }
}

/// Parses settings by name.
///
/// # Errors
/// One is invalid, or there is none; the error says what to write.
pub fn changes(target: Target<'_>, settings: &Map<String, Json>) -> Result<Vec<Change>, Invalid> {
    if settings.is_empty() {
        let known: Vec<_> = target.known().iter().map(|entry| entry.name).collect();
        let what = format!("no setting given: use KEY=VALUE; known here: {}", known.join(", "));
        return Err(Invalid::whole(what));
    }
    settings.iter().map(|(key, value)| change(target, key, value)).collect()
}

fn change(target: Target<'_>, key: &str, value: &Json) -> Result<Change, Invalid> {
    let known = target.known();
    let Some(entry) = known.iter().find(|entry| entry.name == key) else {
        return Err(Invalid::new(key, unknown(target, key, value, &known)));
    };
    if let (Target::Queue(port, _), Live::Whole) = (target, entry.live) {
        let what =
            format!("{key} is a setting of the port, not of a queue: use set {port} {key}=N");
        return Err(Invalid::new(key, what));
    }
    let value = entry.parse(&setting(entry, key, value)?);
    Ok(Change { entry, value: value.map_err(|what| Invalid::new(key, what))? })
}

fn unknown(target: Target<'_>, key: &str, value: &Json, known: &[&'static Entry]) -> String {
    if let Some((word, queue)) = key.split_once('/')
        && let Some(entry) = target.table().into_iter().find(|entry| entry.name == word)
        && entry.live != Live::No
    {
        let of = match target {
            Target::Port(port, _) | Target::Queue(port, _) => format!("{port}/"),
            Target::Switch => "PORT/".into(),
            Target::Driver => String::new(),
        };
        let value = value.as_str().map_or_else(|| value.to_string(), Into::into);
        return format!("'{key}': for one queue use set {of}{queue} {word}={value}");
    }
    if let Some(entry) = target.table().into_iter().find(|entry| entry.name == key) {
        let what = match target {
            Target::Switch if entry.name == "port" => "use ctl add-port".into(),
            Target::Switch => "change the file or the command line of run, and restart".into(),
            Target::Port(name, _) | Target::Queue(name, _) => format!(
                "change it in the file and use ctl reload, or use ctl del-port {name} and ctl \
                 add-port: its guest connects again"
            ),
            Target::Driver => "start it with another value".into(),
        };
        return format!("'{key}' cannot be changed at run time: {what}");
    }
    if matches!(target, Target::Switch) && port::common().any(|entry| entry.name == key) {
        return format!("'{key}' is a setting of a port: use set PORT {key}=VALUE");
    }
    let hint = did_you_mean(key, known.iter().map(|entry| entry.name));
    let known: Vec<_> = known.iter().map(|entry| entry.name).collect();
    let key = key.escape_debug();
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
