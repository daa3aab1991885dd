//! What can be set, once: each setting is one [`Entry`], with its names, the values that it takes,
//! its default, and the sentence that explains it.
//!
//! Everything that reads or shows settings goes through these tables: the command line
//! ([`crate::Settings`]), `NAME=KIND:ARG,key=value` ([`crate::PortText`]), the TOML file
//! ([`crate::file`]), `ctl set` ([`crate::set`]), `--help` ([`crate::help`]) and the tables of
//! `docs/settings.md` ([`crate::docs`]). A new setting is a new line in one of them:
//!
//! * [`run::TABLE`]: the switch as a whole
//! * [`port::TABLE`]: ports, all or some kinds of them ([`port::KINDS`])
//! * [`driver::TABLE`]: the driver half, `--set KEY=VALUE` of `nic` and `gen`
//! * [`policy::FORMS`]: poll and call policies

pub mod driver;
pub mod policy;
pub mod port;
pub mod run;
mod value;

pub use self::value::{Choice, Type, Value, bytes_text, seconds};

use crate::near::did_you_mean;
use port::Kind;

/// Where a setting can be given when the program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// On the command line and in the file.
    Anywhere,
    /// On the command line alone.
    CommandLine,
    /// In the file alone.
    File,
}

/// Whether `ctl set` changes a setting while frames pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// No.
    No,
    /// Yes, of what the table is about as a whole.
    Whole,
    /// Yes, and of one queue, too.
    Queue,
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name: on the command line, and in the file unless `file` says otherwise.
    pub name: &'static str,
    /// Its key in the file.
    pub file: &'static str,
    /// Where it can be given.
    pub given: Given,
    /// Kinds of port that take it; empty: all of them.
    pub kinds: &'static [Kind],
    /// The values it takes.
    pub value: Type,
    /// What applies unless it is given: a value, or words.
    pub default: &'static str,
    /// Whether `NAME/QUEUE` gives one queue pair a value of its own.
    pub per_queue: bool,
    /// Whether it can be changed at run time.
    pub live: Live,
    /// One sentence that says what it does, without a full stop.
    pub help: &'static str,
    /// What only `docs/settings.md` says, in Markdown, after `help`.
    pub more: &'static str,
}

impl Entry {
    /// A setting of all kinds that can be given anywhere, and not changed at run time.
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

    /// With another key in the file.
    pub const fn file(self, file: &'static str) -> Self {
        Self { file, ..self }
    }

    /// Given only there.
    pub const fn given(self, given: Given) -> Self {
        Self { given, ..self }
    }

    /// Of these kinds of port alone.
    pub const fn of(self, kinds: &'static [Kind]) -> Self {
        Self { kinds, ..self }
    }

    /// Of single queue pairs, too.
    pub const fn per_queue(self) -> Self {
        Self { per_queue: true, ..self }
    }

    /// Changeable at run time.
    pub const fn live(self, live: Live) -> Self {
        Self { live, ..self }
    }

    /// With more in the docs.
    pub const fn more(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    /// The value that `text` stands for.
    ///
    /// # Errors
    /// The text is no such value; the error names the setting and says what is.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        self.parse_as(self.name, text)
    }

    /// The same, of a setting that messages name `key`: `poll/1`.
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

/// The entry that `KEY` or `KEY/QUEUE` is of, and the text of QUEUE. Entries that are not of single
/// queues have no `KEY/QUEUE`.
pub(crate) fn find<'a, 'k>(
    mut table: impl Iterator<Item = &'a Entry>,
    key: &'k str,
) -> Option<(&'a Entry, Option<&'k str>)> {
    let (word, queue) = key.split_once('/').map_or((key, None), |(word, n)| (word, Some(n)));
    let entry = table.find(|entry| entry.name == word && (queue.is_none() || entry.per_queue))?;
    Some((entry, queue))
}

/// What to add to the message that `key` is none of `known`.
pub(crate) fn not_known<'a>(key: &str, known: impl Iterator<Item = &'a Entry>) -> String {
    let known: Vec<_> = known.collect();
    let of_queues = match key.split_once('/') {
        Some((word, _)) if known.iter().any(|entry| entry.name == word) => {
            let single: Vec<_> = known.iter().filter(|e| e.per_queue).map(|e| e.name).collect();
            format!("; only {} are of single queues", single.join(" and "))
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
    fn defaults_are_values_or_words_that_no_one_takes_for_one() {
        for entry in tables() {
            let number = entry.default.parse::<u64>().is_ok();
            let is_value = entry.default_value().is_some();
            assert!(!number || is_value, "{}: {} is out of range", entry.name, entry.default);
            if let Type::Choice(choices) = entry.value {
                assert_eq!(choices[0].word, choices[0].form(), "{}", entry.name);
                assert!(is_value, "{}: {} is none of its words", entry.name, entry.default);
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
    fn no_kind_of_port_has_two_options_of_one_name() {
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
