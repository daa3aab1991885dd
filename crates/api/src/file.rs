//! The configuration file: the same settings as the command line, in TOML.
//!
//! ```toml
//! poll = "adaptive"
//! workers = 2
//! forward = "switch"
//! include = "pvswitch.d"
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
//! All errors of all files are collected, each with file, line and column.

mod json;
mod read;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::{Config, Part, Static, StaticAddress};
use crate::near::nearest;
use crate::port::{Given, PortText, check_name, kind, option};
use crate::schema::port::{KINDS, KINDS_LATER, Kind};
use crate::schema::{self, Entry, Type, Value, run};

pub(crate) use self::json::setting;
pub use crate::invalid::Invalid;

/// Most errors that are reported.
pub const PROBLEMS_MAX: usize = 20;
/// Keys that a file of the include directory may have.
const INCLUDED: [&str; 2] = ["port", "static"];

/// A parsed file, with the files that it includes. All of it is valid.
#[derive(Clone, Debug, Default)]
pub struct File {
    /// Its settings, ports and static addresses.
    pub config: Config,
    /// The include directory.
    pub include: Option<PathBuf>,
    /// Files included, in the order read.
    pub included: Vec<PathBuf>,
    /// Whether it has no key at all: perhaps it is being written.
    pub empty: bool,
    /// Where each part was found, to locate errors and duplicates.
    places: BTreeMap<Part, Place>,
}

/// A position in a file.
#[derive(Clone, Debug)]
struct Place {
    file: PathBuf,
    line: usize,
    column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", name(&self.file), self.line, self.column)
    }
}

/// An error in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Column, from 1, in characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<usize>,
    /// Description of the error.
    pub what: String,
}

impl Problem {
    /// An error without a position; `file` is for programs, the text names it itself.
    pub fn new(file: Option<&Path>, what: impl Into<String>) -> Self {
        let file = file.map(name);
        Self { file, line: None, column: None, what: clean(&what.into()) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.line, self.column) {
            (Some(file), Some(line), Some(column)) => {
                write!(f, "{file}:{line}:{column}: {}", self.what)
            }
            _ => f.write_str(&self.what),
        }
    }
}

/// One or more errors of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl std::error::Error for Problems {}

/// One per line.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
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
    /// Reads and parses `path`, and the files that it includes.
    ///
    /// # Errors
    /// A file cannot be read, or is invalid; errors in files have line and column.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        let mut room = read::BYTES_MAX;
        let text = read::text(path, &mut room).map_err(Problems::from)?;
        let (mut file, mut problems) = (Self::default(), Vec::new());
        file.parse_into(path, &text, None, &mut problems);
        if let Some(directory) = &file.include {
            match read::directory(directory) {
                Ok(paths) => file.included = paths,
                Err(problem) => problems.push(problem),
            }
        }
        for included in file.included.clone() {
            match read::text(&included, &mut room) {
                Ok(text) => file.parse_into(&included, &text, Some(path), &mut problems),
                Err(problem) => problems.push(problem),
            }
        }
        file.finish(problems)
    }

    /// Parses `text` of a file that includes none; `path` is for messages.
    ///
    /// # Errors
    /// The text is invalid; the errors have line and column.
    pub fn parse(path: &Path, text: &str) -> Result<Self, Problems> {
        let (mut file, mut problems) = (Self::default(), Vec::new());
        file.parse_into(path, text, None, &mut problems);
        file.finish(problems)
    }

    fn finish(mut self, mut problems: Vec<Problem>) -> Result<Self, Problems> {
        if problems.is_empty() {
            self.config.ports.sort_by(|a, b| a.name.cmp(&b.name));
            return Ok(self);
        }
        if problems.len() > PROBLEMS_MAX {
            let what = format!("{} more errors", problems.len() - PROBLEMS_MAX);
            problems.truncate(PROBLEMS_MAX);
            problems.push(Problem::new(None, what));
        }
        Err(Problems(problems))
    }

    /// Adds the command line's settings and ports, which take precedence, and checks that all parts
    /// are valid together.
    ///
    /// # Errors
    /// They are not; errors in files have line and column.
    pub fn with(&self, command_line: Config) -> Result<Config, Problems> {
        let Config { settings, ports, statics } = &self.config;
        let whole = Config {
            settings: command_line.settings.or(settings.clone()),
            ports: [&ports[..], &command_line.ports].concat(),
            statics: [&statics[..], &command_line.statics].concat(),
        };
        let problems = self.located(whole.conflicts());
        if problems.is_empty() { Ok(whole) } else { Err(Problems(problems)) }
    }

    /// What is valid and probably not meant, with line and column.
    pub fn warnings(&self) -> Vec<Problem> {
        self.located(self.config.warnings())
    }

    /// What was found in parts of a configuration, with line and column if they are in the file.
    pub fn located(&self, found: Vec<(Part, String)>) -> Vec<Problem> {
        let located = |(part, what): (Part, String)| match self.places.get(&part) {
            Some(Place { file, line, column }) => {
                Problem { file: Some(name(file)), line: Some(*line), column: Some(*column), what }
            }
            None => Problem::new(None, what),
        };
        found.into_iter().take(PROBLEMS_MAX).map(located).collect()
    }

    /// Parses a file; `of` is the file that includes it.
    fn parse_into(
        &mut self,
        path: &Path,
        text: &str,
        of: Option<&Path>,
        problems: &mut Vec<Problem>,
    ) {
        let lines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let lines = std::iter::once(0).chain(lines.map(|(at, _)| at + 1)).collect();
        let mut parser = Parser { path, text, lines, file: self, wrong: Vec::new() };
        let (table, errors) = Table::parse_recoverable(text);
        // Keys after an error of syntax may be in the wrong table.
        if errors.is_empty() {
            parser.table(table.get_ref(), of);
        }
        let errors = errors.into_iter().take(PROBLEMS_MAX + 1);
        parser.wrong.extend(errors.map(|e| Wrong::new(e.span().unwrap_or_default(), e.message())));
        let mut wrong = std::mem::take(&mut parser.wrong);
        wrong.sort_by_key(|wrong| wrong.at.start);
        for (i, Wrong { at, what }) in wrong.into_iter().enumerate() {
            let Place { file, line, column } = match i {
                0..=PROBLEMS_MAX => parser.place(&at),
                // Counted only.
                _ => Place { file: path.into(), line: 0, column: 0 },
            };
            let what = clean(&what);
            let (line, column) = (Some(line), Some(column));
            let file = Some(name(&file));
            problems.push(Problem { file, line, column, what });
        }
    }
}

/// A file's name in messages.
fn name(file: &Path) -> String {
    clean(&file.display().to_string())
}

/// Escapes control characters: keys and values may have any.
fn clean(text: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Parses one file into a [`File`].
struct Parser<'a> {
    path: &'a Path,
    text: &'a str,
    /// Where each line begins.
    lines: Vec<usize>,
    file: &'a mut File,
    wrong: Vec<Wrong>,
}

impl Parser<'_> {
    fn place(&self, at: &Range<usize>) -> Place {
        let at = at.start.min(self.text.len());
        let line = self.lines.partition_point(|begin| *begin <= at);
        let before = &self.text.as_bytes()[self.lines[line - 1]..at];
        let column = String::from_utf8_lossy(before).chars().count() + 1;
        Place { file: self.path.into(), line, column }
    }

    /// Keeps a value, or its error.
    fn keep<T>(&mut self, result: Result<T, Wrong>) -> Option<T> {
        result.map_err(|wrong| self.wrong.push(wrong)).ok()
    }

    /// Records where a part is; if there is one already, that is an error.
    fn record(&mut self, part: Part, at: &Range<usize>, exists: &str) {
        if let Some(first) = self.file.places.get(&part) {
            let what = format!("{exists} exists already, at {first}");
            return self.wrong.push(Wrong::new(at.clone(), what));
        }
        let place = self.place(at);
        self.file.places.insert(part, place);
    }

    fn table(&mut self, table: &Table<'_>, of: Option<&Path>) {
        if of.is_none() {
            self.file.empty = table.is_empty();
        }
        let known = || run::TABLE.iter().filter(|e| e.given != schema::Given::CommandLine);
        for (key, item) in table {
            let name: &str = key.get_ref();
            let entry = known().find(|entry| entry.file == name).ok_or_else(|| {
                let names = known().map(|entry| entry.file);
                match of {
                    Some(_) => Wrong::new(key.span(), unknown(name, INCLUDED.into_iter())),
                    None => Wrong::new(key.span(), unknown(name, names)),
                }
            });
            let Some(entry) = self.keep(entry) else { continue };
            if let Some(of) = of.filter(|_| !INCLUDED.contains(&name)) {
                let what = format!(
                    "`{name}` is a setting of the switch: write it in {}; an included file has \
                     [port.NAME] and [static] only",
                    of.display()
                );
                self.wrong.push(Wrong::new(key.span(), what));
                continue;
            }
            match entry.name {
                "static" => self.statics(item),
                "port" => self.ports(item),
                "include" => {
                    let directory = string(name, item).and_then(|text| match text {
                        "" => Err(Wrong::new(item.span(), "include: use a directory's name")),
                        text => Ok(text),
                    });
                    let directory = self.keep(directory).map(PathBuf::from);
                    let beside = self.path.parent().unwrap_or(Path::new(""));
                    self.file.include = directory.map(|directory| beside.join(directory));
                }
                _ => {
                    if let Some(value) = self.keep(value(entry, name, item)) {
                        self.file.config.settings.set(entry, value);
                    }
                }
            }
        }
    }

    fn statics(&mut self, item: &Item<'_>) {
        let Some(table) = self.keep(table("static", item)) else { return };
        for (key, item) in table {
            let text: &str = key.get_ref();
            let address: Result<StaticAddress, _> = text.parse();
            let address = self.keep(address.map_err(|what| Wrong::new(key.span(), what)));
            let port = self.keep(string(text, item));
            let Some((address, port)) = address.zip(port) else { continue };
            let what = format!("static address {address}");
            self.record(Part::Static(address), &key.span(), &what);
            self.file.config.statics.push(Static { address, port: port.into() });
        }
    }

    fn ports(&mut self, item: &Item<'_>) {
        let Some(table) = self.keep(table("port", item)) else { return };
        for (key, item) in table {
            let name: &str = key.get_ref();
            let before = self.wrong.len();
            let port = self.port(name, item);
            for Wrong { what, .. } in &mut self.wrong[before..] {
                *what = format!("port '{name}': {what}");
            }
            if self.wrong.len() == before {
                let part = Part::Port(name.into());
                self.record(part, &key.span(), &format!("port '{name}'"));
                self.file.config.ports.extend(port);
            }
        }
    }

    /// Parses a port. `None`: there are errors.
    fn port(&mut self, name: &str, item: &Item<'_>) -> Option<PortText> {
        let whole = |what: String| Wrong::new(item.span(), what);
        let named = self.keep(check_name(name).map_err(whole));
        let table = self.keep(table(name, item))?;
        let missing = |field: &str| {
            let keys = table.keys().map(|key| -> &str { key.get_ref() });
            let typo = nearest(field, keys).map(|near| format!(" (is `{near}` a typo?)"));
            whole(format!("missing field `{field}`{}", typo.unwrap_or_default()))
        };
        let word = self.keep(table.get("kind").ok_or_else(|| kind_missing(table, item)))?;
        let kind = self.keep(kind_of(word))?;
        let entry = kind.entry();
        let own = ["kind", entry.file];
        let mut options = Vec::new();
        for (key, item) in table {
            let name: &str = key.get_ref();
            if !own.contains(&name) {
                let given = self.keep(port_option(kind, name, key.span(), item));
                options.extend(given.map(|given| (given, key.span())));
            }
        }
        let arg = match (entry.args, table.get(entry.file)) {
            ([], _) => "",
            (_, Some(item)) => {
                let arg = self.keep(string(entry.file, item))?;
                let at = |what| Wrong::new(item.span(), what);
                self.keep((entry.check)(arg).map_err(at))?;
                arg
            }
            (_, None) => {
                let known = |key: &&str| kind.options().any(|option| option.file == *key);
                let others = table.keys().map(|key| -> &str { key.get_ref() });
                // A key that is misspelt has been reported as unknown, with a hint.
                if nearest(entry.file, others.filter(|key| !known(key))).is_none() {
                    let missing = missing(entry.file);
                    self.wrong.push(missing);
                }
                return None;
            }
        };
        named?;
        let (options, spans): (Vec<_>, Vec<_>) = options.into_iter().unzip();
        let port = PortText { name: name.into(), kind, arg: arg.into(), options };
        let located = |Invalid { key, what }: Invalid| {
            let of = |given: &Given| match given.queue {
                Some(queue) => format!("{}/{queue}", given.entry.name),
                None => given.entry.name.into(),
            };
            let mut given = port.options.iter().zip(&spans);
            let at = given.find(|(given, _)| key.as_deref() == Some(&of(given)));
            Wrong::new(at.map_or_else(|| item.span(), |(_, at)| at.clone()), what)
        };
        self.keep(port.check().map_err(located))?;
        for (Given { entry, .. }, at) in port.options.iter().zip(&spans) {
            let place = self.place(at);
            self.file.places.entry(Part::Option(name.into(), entry.name)).or_insert(place);
        }
        Some(port)
    }
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
        DeValue::Integer(n) if matches!(wanted, Type::Mode) && n.radix() == 8 => {
            Some(n.as_str().to_string())
        }
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
            let form = match wanted {
                Type::Mode => "string in octal, such as \"0660\"",
                _ if wanted.is_text() => "string",
                _ => "number or string",
            };
            wrong_type(key, item, form)
        }),
    }
}

/// Error for a table without a kind: at the key that was probably meant.
fn kind_missing(table: &Table<'_>, whole: &Item<'_>) -> Wrong {
    const KIND: &str = "kind";
    let misspelt = table.keys().find(|key| {
        let own = KINDS.iter().any(|entry| {
            let mut options = entry.kind.options();
            entry.file == key.get_ref() || options.any(|option| option.file == key.get_ref())
        });
        !own && nearest(key.get_ref(), [KIND]).is_some()
    });
    match misspelt {
        Some(key) => {
            let what = format!("unknown field `{}` (did you mean `{KIND}`?)", key.get_ref());
            Wrong::new(key.span(), what)
        }
        None => {
            let names = KINDS.map(|entry| format!("\"{}\"", entry.name)).join(", ");
            Wrong::new(whole.span(), format!("missing field `{KIND}`: use one of {names}"))
        }
    }
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
