//! A configuration as TOML, for `ctl save`.

use std::fmt::Write as _;

use ::toml::Value as Toml;

use super::{Config, Static};
use crate::port::PortText;
use crate::schema::{self, Entry, Type, Value, bytes_text, run};

impl Config {
    /// Formats it as a file; [`crate::file`] reads the same configuration from it.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let known = run::TABLE.iter().filter(|e| e.given != schema::Given::CommandLine);
        for entry in known {
            let given = self.settings.given().find(|(given, _)| given.name == entry.name);
            if let Some((_, value)) = given {
                let _ = writeln!(text, "{} = {}", entry.file, toml(entry, value));
            }
        }
        if !self.statics.is_empty() {
            text += "\n[static]\n";
        }
        let mut statics: Vec<_> = self.statics.iter().collect();
        statics.sort_by_key(|entry| entry.address);
        for Static { address, port } in statics {
            let _ = writeln!(text, "\"{address}\" = {}", quoted(port));
        }
        let mut ports: Vec<_> = self.ports.iter().collect();
        ports.sort_by(|a, b| a.name.cmp(&b.name));
        ports.into_iter().for_each(|port| write_port(&mut text, port));
        text.trim_start().into()
    }
}

fn write_port(text: &mut String, port: &PortText) {
    let _ = write!(text, "\n[port.{}]\n{}", key(&port.name), port.to_toml());
}

impl PortText {
    /// Formats its keys, without the head of its table.
    pub(crate) fn to_toml(&self) -> String {
        let mut text = String::new();
        write_keys(&mut text, self);
        text
    }
}

fn write_keys(text: &mut String, port: &PortText) {
    let kind = port.kind.entry();
    let _ = writeln!(text, "kind = \"{}\"", kind.name);
    if !kind.args.is_empty() {
        let _ = writeln!(text, "{} = {}", kind.file, quoted(&port.arg));
    }
    for given in port.effective() {
        let name = match given.queue {
            None => given.entry.file.into(),
            Some(queue) => format!("{}/{queue}", given.entry.file),
        };
        let _ = writeln!(text, "{} = {}", key(&name), toml(given.entry, &given.value));
    }
}

/// A key, quoted unless it can be bare.
fn key(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    if !name.is_empty() && name.chars().all(bare) { name.into() } else { quoted(name) }
}

/// A basic string.
pub(crate) fn quoted(text: &str) -> String {
    // Basic strings for all: the same form in every line.
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A value in the type that a person would write.
fn toml(entry: &Entry, value: &Value) -> String {
    match (entry.value, value) {
        (Type::Bytes(_), Value::Number(n)) if *n % 1024 == 0 && *n > 0 => quoted(&bytes_text(*n)),
        (_, Value::Number(n)) => n.to_string(),
        (_, Value::Cpus(cpus)) => {
            Toml::Array(cpus.iter().map(|cpu| Toml::Integer(*cpu as i64)).collect()).to_string()
        }
        (_, value) => quoted(&value.to_string()),
    }
}
