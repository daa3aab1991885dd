//! Ports and settings as JSON objects: with the keys and values of the file, read by its parser.
//!
//! A value becomes one line of TOML, so that both forms have the same rules and messages. The line
//! of an error is the key that it is about.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Map, Value as Json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{File, Parser, text};
use crate::config::quoted;
use crate::invalid::Invalid;
use crate::port::PortText;
use crate::schema::Entry;

/// Values as TOML; `None`: it has no such value, which no setting accepts.
fn toml(value: &Json) -> Option<String> {
    Some(match value {
        Json::Null | Json::Object(_) => return None,
        Json::String(text) => quoted(text),
        Json::Bool(on) => on.to_string(),
        Json::Array(list) => {
            let list: Option<Vec<_>> = list.iter().map(toml).collect();
            format!("[{}]", list?.join(", "))
        }
        Json::Number(number) => match number.as_f64() {
            _ if number.is_u64() || number.is_i64() => number.to_string(),
            // 2.0 is an integer, too (JSON Schema, 6.1.1).
            Some(n) if n.fract() == 0.0 && n.abs() < 1e15 => format!("{}", n as i64),
            n => format!("{:?}", n.unwrap_or_default()),
        },
    })
}

/// A line for each member.
fn lines(object: &Map<String, Json>) -> Result<String, Invalid> {
    let mut lines = String::new();
    for (key, value) in object {
        let Some(value) = toml(value) else {
            let key = key.escape_debug().to_string();
            let what = "use a string, a number, a boolean or a list of them";
            return Err(Invalid::new(&key, format!("{key}: invalid type: {what}")));
        };
        let _ = writeln!(lines, "{} = {value}", quoted(key));
    }
    Ok(lines)
}

/// The key of the member at this position.
fn key_at(object: &Map<String, Json>, lines: &str, at: usize) -> Option<String> {
    let line = lines.as_bytes()[..at.min(lines.len())].iter().filter(|b| **b == b'\n').count();
    object.keys().nth(line).map(|key| key.escape_debug().to_string())
}

impl PortText {
    /// Parses a port: the keys of `[port.NAME]` in a file.
    ///
    /// # Errors
    /// A key or value is invalid; the first error.
    pub fn from_json(name: &str, port: &Map<String, Json>) -> Result<Self, Invalid> {
        let text = lines(port)?;
        let table = DeTable::parse(&text).map_err(|error| {
            let key = error.span().and_then(|span| key_at(port, &text, span.start));
            Invalid { key, what: error.message().into() }
        })?;
        let whole = table.span();
        let item = Spanned::new(whole.clone(), DeValue::Table(table.into_inner()));
        let mut file = File::default();
        let path = Path::new("");
        let mut parser =
            Parser { path, text: &text, lines: vec![0], file: &mut file, wrong: Vec::new() };
        let parsed = parser.port(name, &item);
        match (parsed, parser.wrong.into_iter().next()) {
            (Some(parsed), None) => Ok(parsed),
            (_, wrong) => {
                let wrong = wrong.unwrap_or(super::Wrong::new(whole.clone(), "invalid"));
                let key = (wrong.at != whole).then(|| key_at(port, &text, wrong.at.start));
                let what = super::clean(&wrong.what);
                Err(Invalid { key: key.flatten(), what: format!("port '{name}': {what}") })
            }
        }
    }

    /// The port as [`from_json`](Self::from_json) reads it.
    pub fn to_json(&self) -> Map<String, Json> {
        let text = self.to_toml();
        // What this crate writes, it reads.
        toml::from_str(&text).unwrap_or_default()
    }
}

/// The text of a setting's value, as on a command line.
pub(crate) fn setting(entry: &Entry, key: &str, value: &Json) -> Result<String, Invalid> {
    let object = Map::from_iter([(key.to_string(), value.clone())]);
    let line = lines(&object)?;
    let invalid = |what: &str| Invalid::new(key, what);
    let table = DeTable::parse(&line).map_err(|error| invalid(error.message()))?;
    let item = table.get_ref().values().next().ok_or_else(|| invalid("it has no value"))?;
    text(&entry.value, key, item).map_err(|wrong| invalid(&wrong.what))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn port(of: Json) -> Result<PortText, Invalid> {
        PortText::from_json("a", of.as_object().unwrap())
    }

    #[test]
    fn a_port_is_read_as_it_is_written() {
        let text = "a=vhost-user:/tmp/x y,queues=2,poll/1=timer:2000,mac=02:00:00:00:00:0a,\
                    rate-in=100Mbit,limit-mapped-bytes=8G,isolated=on,trunk=1+3-5";
        let one: PortText = text.parse().unwrap();
        let json = one.to_json();
        assert_eq!(json["socket"], "/tmp/x y");
        assert_eq!((&json["queues"], &json["poll/1"]), (&json!(2), &json!("timer:2000")));
        let again = PortText::from_json("a", &json).unwrap();
        assert_eq!((again.to_json(), again.name), (json, "a".into()));
    }

    #[test]
    fn values_of_every_type_are_read_and_errors_name_their_key() {
        let good = json!({ "kind": "null", "weight": 2.0, "isolated": true, "vlan": "none",
                           "ip": ["10.0.0.1", "fd00::1"] });
        assert_eq!(port(good).unwrap().number("weight"), Some(2));
        for (bad, key, want) in [
            (json!({ "kind": "null", "weight": [1] }), Some("weight"), "weight: invalid type"),
            (json!({ "kind": "null", "weight": 0 }), Some("weight"), "weight"),
            (json!({ "kind": "null", "weight": null }), Some("weight"), "invalid type"),
            (json!({ "kind": "null", "weight": {"a": 1} }), Some("weight"), "invalid type"),
            (json!({ "kind": "null", "weight": u64::MAX }), Some("weight"), "weight"),
            (json!({ "kind": "null", "weight": 1.5e300 }), Some("weight"), "weight"),
            (json!({ "kind": "nul" }), Some("kind"), "did you mean `null`?"),
            (json!({ "kind": "null", "x\n\u{7f}": 1 }), Some("x\\n\\u{7f}"), "unknown field"),
            (json!({ "kind": "vhost-user", "socket": "a\nb" }), None, "control characters"),
            (json!({ "kind": "vhost-user" }), None, "missing field `socket`"),
            (json!({}), None, "missing field `kind`"),
        ] {
            let error = port(bad.clone()).unwrap_err();
            assert_eq!(error.key.as_deref(), key, "{bad}: {error}");
            assert!(error.what.contains(want), "{bad}: {error}");
            assert!(!error.what.contains(char::is_control), "{bad}: {error}");
        }
    }
}
