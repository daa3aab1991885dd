//! The configuration file: the same settings as the command line, in TOML.
//!
//! ```toml
//! poll = "adaptive"
//! workers = 2
//! forward = "switch"
//!
//! [port.vm1]
//! kind = "vhost-user"
//! socket = "/run/pvswitch/vm1.sock"
//! queues = 4
//! "poll/3" = "timer:2000"
//! limit-mapped-bytes = "16G"
//!
//! [port.host]
//! kind = "tap"
//! interface = "tap0"
//! ```

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::near::nearest;
use crate::port::{Given, PortText, kind, option};
use crate::schema::port::{KINDS, KINDS_LATER, Kind};
use crate::schema::{self, Entry, Type, Value, run};
use crate::{Settings, mac};

/// A parsed file. All of it is valid.
#[derive(Clone, Debug, Default)]
pub struct File {
    /// Settings of the switch as a whole.
    pub settings: Settings,
    /// Ports, in the order of their names.
    pub ports: Vec<PortText>,
    /// Static addresses and the names of their ports.
    pub statics: Vec<([u8; 6], String)>,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read configuration {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is not TOML, or has an invalid key or value.
    #[error("{path}:{line}:{column}: {what}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What is wrong there.
        what: String,
    },
}

/// An error, and its position in the text.
struct Wrong {
    at: Range<usize>,
    what: String,
}

impl Wrong {
    fn new(at: Range<usize>, what: impl Into<String>) -> Self {
        Self { at, what: what.into() }
    }
}

type Table<'a> = DeTable<'a>;
type Item<'a> = Spanned<DeValue<'a>>;

impl File {
    /// Reads and parses `path`.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid; the error has line and column.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| FileError::Read { path: path.into(), error })?;
        Self::parse(path, &text)
    }

    /// Parses `text`; `path` is for messages.
    ///
    /// # Errors
    /// The text is invalid; the error has line and column.
    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let parsed = Table::parse(text)
            .map_err(|error| Wrong::new(error.span().unwrap_or_default(), error.message()));
        parsed.and_then(|table| file(table.get_ref())).map_err(|Wrong { at, what }| {
            let before = &text[..at.start.min(text.len())];
            FileError::Parse {
                path: path.into(),
                line: before.matches('\n').count() + 1,
                column: before.len() - before.rfind('\n').map_or(0, |n| n + 1) + 1,
                what,
            }
        })
    }
}

fn file(table: &Table<'_>) -> Result<File, Wrong> {
    let mut file = File::default();
    let known = || run::TABLE.iter().filter(|e| e.given != schema::Given::CommandLine);
    for (key, item) in table {
        let name: &str = key.get_ref();
        let entry = known().find(|entry| entry.file == name).ok_or_else(|| {
            Wrong::new(key.span(), unknown(name, known().map(|entry| entry.file)))
        })?;
        match entry.name {
            "static" => file.statics = statics(item)?,
            "port" => file.ports = ports(item)?,
            _ => file.settings.set(entry, value(entry, name, item)?),
        }
    }
    Ok(file)
}

/// Message for an unknown key, with the known ones and the nearest.
fn unknown<'a>(key: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let near = nearest(key, known.clone()).map(|near| format!(" (did you mean `{near}`?)"));
    let known: Vec<_> = known.map(|key| format!("`{key}`")).collect();
    let expected = match &known[..] {
        [] => "there is none".into(),
        all => format!("expected one of {}", all.join(", ")),
    };
    format!("unknown field `{key}`, {expected}{}", near.unwrap_or_default())
}

/// Error for a value of the wrong type.
fn wrong_type(key: &str, item: &Item<'_>, wanted: &str) -> Wrong {
    let found = item.get_ref().type_str();
    Wrong::new(item.span(), format!("{key}: invalid type: {found}, expected a {wanted}"))
}

fn table<'a, 'i>(key: &str, item: &'a Item<'i>) -> Result<&'a Table<'i>, Wrong> {
    item.get_ref().as_table().ok_or_else(|| wrong_type(key, item, "table"))
}

fn string<'a>(key: &str, item: &'a Item<'_>) -> Result<&'a str, Wrong> {
    item.get_ref().as_str().ok_or_else(|| wrong_type(key, item, "string"))
}

/// The value of a setting, as text of the command line or as the matching TOML type.
fn value(entry: &Entry, key: &str, item: &Item<'_>) -> Result<Value, Wrong> {
    let text = text(&entry.value, key, item)?;
    entry.parse_as(key, &text).map_err(|what| Wrong::new(item.span(), what))
}

/// Converts a value to its form on the command line.
fn text(wanted: &Type, key: &str, item: &Item<'_>) -> Result<String, Wrong> {
    let plain = |item: &Item<'_>| match item.get_ref() {
        DeValue::String(text) => Some(text.to_string()),
        _ if wanted.is_text() => None,
        DeValue::Integer(n) => {
            let number = i128::from_str_radix(n.as_str(), n.radix());
            Some(number.map_or_else(|_| n.to_string(), |n| n.to_string()))
        }
        DeValue::Float(n) => Some(n.to_string()),
        DeValue::Boolean(on) if matches!(wanted, Type::Choice(_)) => {
            Some(if *on { "on" } else { "off" }.into())
        }
        DeValue::Boolean(on) => Some(on.to_string()),
        _ => None,
    };
    match item.get_ref() {
        DeValue::Array(list) if matches!(wanted, Type::Cpus) => {
            let parts = list.iter().map(|item| plain(item).ok_or(item));
            let parts = parts.collect::<Result<Vec<_>, _>>();
            parts.map(|parts| parts.join(",")).map_err(|item| wrong_type(key, item, "number"))
        }
        DeValue::Array(list) if matches!(wanted, Type::Macs | Type::Ips | Type::Vlans) => {
            let parts = list.iter().map(|item| plain(item).ok_or(item));
            let parts = parts.collect::<Result<Vec<_>, _>>();
            parts.map(|parts| parts.join("+")).map_err(|item| wrong_type(key, item, "string"))
        }
        _ => plain(item).ok_or_else(|| {
            wrong_type(key, item, if wanted.is_text() { "string" } else { "number or string" })
        }),
    }
}

fn statics(item: &Item<'_>) -> Result<Vec<([u8; 6], String)>, Wrong> {
    let entries = table("static", item)?.iter().map(|(key, item)| {
        let mac = mac(key.get_ref()).map_err(|what| Wrong::new(key.span(), what))?;
        Ok((mac, string(key.get_ref(), item)?.to_string()))
    });
    entries.collect()
}

fn ports(item: &Item<'_>) -> Result<Vec<PortText>, Wrong> {
    let tables = table("port", item)?.iter().map(|(name, item)| {
        let name: &str = name.get_ref();
        port(name, item)
            .map_err(|Wrong { at, what }| Wrong::new(at, format!("port '{name}': {what}")))
    });
    let mut ports = tables.collect::<Result<Vec<_>, _>>()?;
    ports.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(ports)
}

fn port(name: &str, item: &Item<'_>) -> Result<PortText, Wrong> {
    let table = table(name, item)?;
    let whole = |what: String| Wrong::new(item.span(), what);
    let word = table.get("kind").ok_or_else(|| whole("missing field `kind`".into()))?;
    let kind = kind_of(word)?;
    let entry = kind.entry();
    let own = ["kind", entry.file];
    let mut options = Vec::new();
    for (key, item) in table {
        let name: &str = key.get_ref();
        if !own.contains(&name) {
            options.push(port_option(kind, name, key.span(), item)?);
        }
    }
    // After the options: a key that is misspelt is both unknown and missing.
    let arg = match (entry.args, table.get(entry.file)) {
        ([], _) => "",
        (_, Some(item)) => string(entry.file, item)?,
        (_, None) => return Err(whole(format!("missing field `{}`", entry.file))),
    };
    let port = PortText { name: name.into(), kind, arg: arg.into(), options };
    port.check().map_err(whole)?;
    Ok(port)
}

fn kind_of(item: &Item<'_>) -> Result<Kind, Wrong> {
    let name = string("kind", item)?;
    if !KINDS_LATER.contains(&name) && !KINDS.iter().any(|entry| entry.name == name) {
        let names = KINDS.iter().map(|entry| entry.name);
        let what = unknown(name, names).replace("unknown field", "unknown kind");
        return Err(Wrong::new(item.span(), what));
    }
    kind(name).map_err(|what| Wrong::new(item.span(), what))
}

fn port_option(kind: Kind, key: &str, at: Range<usize>, item: &Item<'_>) -> Result<Given, Wrong> {
    let (word, queue) = key.split_once('/').map_or((key, None), |(word, n)| (word, Some(n)));
    let taken = kind.options().find(|e| e.file == word && (queue.is_none() || e.per_queue));
    let Some(entry) = taken else {
        let own = ["kind", kind.entry().file].into_iter().filter(|key| !key.is_empty());
        let known: Vec<_> = own.chain(kind.options().map(|entry| entry.file)).collect();
        return Err(Wrong::new(at, unknown(key, known.into_iter())));
    };
    let text = text(&entry.value, key, item)?;
    let key = queue.map_or(entry.name.into(), |queue| format!("{}/{queue}", entry.name));
    option(kind, &key, &text).map_err(|what| Wrong::new(item.span(), what))
}

#[cfg(test)]
mod tests;
