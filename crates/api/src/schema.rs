//! The schema of all settings: each is one [`Entry`], with its names, values, default, and the
//! sentence that explains it.
//!
//! All parsing and output of settings uses these tables: the command line
//! ([`crate::Settings`]), `NAME=KIND:ARG,key=value` ([`crate::PortText`]), the TOML file
//! ([`crate::file`]), `ctl set` ([`crate::set`]), `--help` ([`crate::help`]) and the tables of
//! `docs/settings.md` ([`crate::docs`]). A new setting is a new entry in one of them:
//!
//! * [`run::TABLE`]: the switch as a whole
//! * [`port::TABLE`]: ports of all or some kinds ([`port::KINDS`])
//! * [`driver::TABLE`]: the driver half, `--set KEY=VALUE` of `nic` and `gen`
//! * [`policy::FORMS`]: poll and call policies

mod check;
pub mod driver;
mod list;
pub mod policy;
pub mod port;
mod rate;
pub mod run;
mod value;

pub use self::rate::Amounts;
pub use self::value::{Choice, Type, Value, bytes_text, seconds};

use crate::near::did_you_mean;
use port::Kind;

/// Places where a setting can be given when the program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// On the command line and in the file.
    Anywhere,
    /// On the command line alone.
    CommandLine,
    /// In the file alone.
    File,
}

/// Whether `ctl set` changes a setting at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// It cannot be changed.
    No,
    /// It can be changed for the whole switch, port or guest.
    Whole,
    /// It can be changed for the whole, or for one queue.
    Queue,
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Name on the command line.
    pub name: &'static str,
    /// Key in the file; usually the same.
    pub file: &'static str,
    /// Places where it can be given.
    pub given: Given,
    /// Kinds of port that accept it; empty: all kinds.
    pub kinds: &'static [Kind],
    /// Values it accepts.
    pub value: Type,
    /// Default: a value, or a description of one.
    pub default: &'static str,
    /// Whether `NAME/QUEUE` sets the value of one queue pair.
    pub per_queue: bool,
    /// Whether it can be changed at run time.
    pub live: Live,
    /// One sentence that says what it does, without a full stop.
    pub help: &'static str,
    /// Markdown that follows `help` in `docs/settings.md` only.
    pub more: &'static str,
}

/// One change of a setting at run time.
#[derive(Clone, Debug)]
pub struct Change {
    /// The setting.
    pub entry: &'static Entry,
    /// Its new value.
    pub value: Value,
}

impl Entry {
    /// A setting of all kinds of port, given anywhere, not changed at run time.
    pub const fn new(
        name: &'static str,
        value: Type,
        default: &'static str,
        help: &'static str,
    ) -> Self {
        Self {
            name,
            file: name,
            given: Given::Anywhere,
            kinds: &[],
            value,
            default,
            per_queue: false,
            live: Live::No,
            help,
            more: "",
        }
    }

    /// Sets another key for the file.
    pub const fn file(self, file: &'static str) -> Self {
        Self { file, ..self }
    }

    /// Restricts where it can be given.
    pub const fn given(self, given: Given) -> Self {
        Self { given, ..self }
    }

    /// Restricts it to these kinds of port.
    pub const fn of(self, kinds: &'static [Kind]) -> Self {
        Self { kinds, ..self }
    }

    /// Accepts values for single queue pairs, too.
    pub const fn per_queue(self) -> Self {
        Self { per_queue: true, ..self }
    }

    /// Makes it changeable at run time.
    pub const fn live(self, live: Live) -> Self {
        Self { live, ..self }
    }

    /// Adds Markdown for the docs.
    pub const fn more(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    /// Parses a value.
    ///
    /// # Errors
    /// The text is invalid; the error names the setting and the valid values.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        self.parse_as(self.name, text)
    }

    /// Parses a value; messages call the setting `key`, for example `poll/1`.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_as(&self, key: &str, text: &str) -> Result<Value, String> {
        self.value.parse(key, text).map_err(|error| match self.value {
            Type::Choice(_) => format!("{error} ({})", self.help.trim_end_matches(", below")),
            _ => error,
        })
    }

    /// The default, if it is a value.
    pub fn default_value(&self) -> Option<Value> {
        self.parse(self.default).ok()
    }
}

/// Finds the entry of `KEY` or `KEY/QUEUE`; returns it with the text of QUEUE. Only entries with
/// `per_queue` match `KEY/QUEUE`.
pub(crate) fn find<'a, 'k>(
    mut table: impl Iterator<Item = &'a Entry>,
    key: &'k str,
) -> Option<(&'a Entry, Option<&'k str>)> {
    let (word, queue) = key.split_once('/').map_or((key, None), |(word, n)| (word, Some(n)));
    let entry = table.find(|entry| entry.name == word && (queue.is_none() || entry.per_queue))?;
    Some((entry, queue))
}

/// Hint for the message that `key` is unknown: the nearest of `known`.
pub(crate) fn unknown_hint<'a>(key: &str, known: impl Iterator<Item = &'a Entry>) -> String {
    let known: Vec<_> = known.collect();
    let of_queues = match key.split_once('/') {
        Some((word, _)) if known.iter().any(|entry| entry.name == word) => {
            let single: Vec<_> = known.iter().filter(|e| e.per_queue).map(|e| e.name).collect();
            format!("; only {} can be set for single queues", single.join(", "))
        }
        _ => String::new(),
    };
    of_queues + &did_you_mean(key, known.iter().map(|entry| entry.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> impl Iterator<Item = &'static Entry> {
        run::TABLE.iter().chain(port::TABLE).chain(driver::TABLE)
    }

    #[test]
    fn defaults_are_valid_values_or_descriptions() {
        for entry in tables() {
            let number = entry.default.parse::<u64>().is_ok();
            let is_value = entry.default_value().is_some();
            assert!(!number || is_value, "{}: {} is out of range", entry.name, entry.default);
            if let Type::Choice(choices) = entry.value {
                assert_eq!(choices[0].word, choices[0].form(), "{}", entry.name);
                assert!(is_value, "{}: {} is not one of its words", entry.name, entry.default);
            }
        }
    }

    #[test]
    fn sentences_have_no_full_stop_and_fit_a_table() {
        for entry in tables() {
            let Entry { name, help, more, .. } = *entry;
            assert!(!help.is_empty() && !help.ends_with('.'), "{name}: {help}");
            assert!(![help, more].concat().contains(['|', '\n']), "{name}");
        }
    }

    #[test]
    fn option_names_are_unique_per_kind_of_port() {
        for kind in port::KINDS {
            let names: Vec<_> = kind.kind.options().flat_map(|e| [e.name, e.file]).collect();
            for entry in kind.kind.options() {
                let own = names.iter().filter(|name| **name == entry.name).count();
                assert_eq!(own, if entry.name == entry.file { 2 } else { 1 }, "{}", entry.name);
                assert!(entry.file != "kind" && entry.file != kind.file, "{}", entry.file);
            }
        }
    }
}
