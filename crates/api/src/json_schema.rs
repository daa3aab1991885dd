//! The JSON Schema of the configuration file, for editors and other tools.
//!
//! It is generated from the tables of [`crate::schema`]. Every file that the program accepts is
//! valid under it. The program checks more: queues that exist, interfaces used twice.

use serde_json::{Map, Value, json};

use crate::queues::QUEUES_MAX;
use crate::schema::policy::{Args, FORMS};
use crate::schema::port::{KINDS, Kind, KindEntry};
use crate::schema::{self, Choice, Entry, Type, run};
use crate::set::Target;

/// Path of the committed copy.
pub const PATH: &str = "docs/config.schema.json";

/// Pattern of a MAC address.
const MAC: &str = "[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}";
/// Pattern of a port's name.
pub(crate) const NAME: &str = "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}$";

/// Schemas of settings that can be changed at run time, by the name of the object they are of.
pub(crate) fn changes() -> [(&'static str, Value); 4] {
    let of_port = KINDS.iter().flat_map(|kind| Target::Port("", kind.kind).known());
    let of_queue = of_port.clone().filter(|entry| entry.live == schema::Live::Queue);
    [
        ("PortSettings", object(of_port)),
        ("QueueSettings", object(of_queue)),
        ("Settings", object(Target::Switch.known().into_iter())),
        ("PairSettings", object(Target::Driver.known().into_iter())),
    ]
}

/// An object of at least one of these settings.
fn object(entries: impl Iterator<Item = &'static Entry>) -> Value {
    let mut properties = Map::new();
    for entry in entries {
        let mut value = of_type(&entry.value);
        describe(&mut value, entry);
        // A missing setting stays as it is.
        value.as_object_mut().map(|value| value.remove("default"));
        properties.insert(entry.name.into(), value);
    }
    json!({
        "type": "object", "properties": properties, "additionalProperties": false,
        "minProperties": 1,
    })
}

/// The schema.
pub fn schema() -> Value {
    let mut properties = Map::new();
    for entry in run::TABLE.iter().filter(|e| e.given != schema::Given::CommandLine) {
        let mut value = match entry.name {
            "port" => json!({
                "type": "object",
                "propertyNames": { "pattern": NAME },
                "additionalProperties": { "$ref": "#/$defs/port" },
            }),
            "static" => json!({
                "type": "object",
                "propertyNames": { "pattern": format!("^{MAC}(/[0-9]{{1,4}})?$") },
                "additionalProperties": { "type": "string", "pattern": NAME },
            }),
            _ => of_type(&entry.value),
        };
        describe(&mut value, entry);
        properties.insert(entry.file.into(), value);
    }
    let kinds = KINDS.iter().map(|kind| json!({ "$ref": format!("#/$defs/{}", kind.name) }));
    let mut defs = Map::new();
    let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
    defs.insert(
        "port".into(),
        json!({
            "type": "object",
            "required": ["kind"],
            "properties": { "kind": { "enum": names } },
            "oneOf": kinds.collect::<Vec<_>>(),
        }),
    );
    defs.extend(KINDS.iter().map(|kind| (kind.name.to_string(), port(kind))));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of pvswitch",
        "type": "object",
        "properties": properties,
        "additionalProperties": false,
        "$defs": defs,
    })
}

/// The schema as text of a file.
pub fn text() -> String {
    // A `Value` always has a text form.
    let mut text = serde_json::to_string_pretty(&schema()).unwrap_or_default();
    text.push('\n');
    text
}

/// A table `[port.NAME]` of one kind.
fn port(kind: &KindEntry) -> Value {
    let mut properties = Map::new();
    properties.insert("kind".into(), json!({ "const": kind.name }));
    let mut required = vec!["kind"];
    if !kind.args.is_empty() {
        let forms = kind.args.join(" or ");
        let mut value = json!({ "type": "string", "minLength": 1, "description": forms });
        if kind.kind == Kind::Xen {
            value["pattern"] = "^(auto|[0-9]+/[0-9]+)$".into();
        }
        properties.insert(kind.file.into(), value);
        required.push(kind.file);
    }
    let mut patterns = Map::new();
    for entry in kind.kind.options() {
        let mut value = of_type(&entry.value);
        describe(&mut value, entry);
        if entry.per_queue {
            let last = QUEUES_MAX - 1;
            assert_eq!(last, 15, "the pattern below");
            let pattern = format!("^{}/([0-9]|1[0-5])$", entry.file);
            let mut one = of_type(&entry.value);
            one["description"] = format!("`{}` of one queue pair", entry.file).into();
            patterns.insert(pattern, one);
        }
        properties.insert(entry.file.into(), value);
    }
    json!({
        "type": "object",
        "description": kind.help,
        "properties": properties,
        "patternProperties": patterns,
        "required": required,
        "additionalProperties": false,
    })
}

/// Adds the sentence and, if it is a value, the default of a setting.
fn describe(value: &mut Value, entry: &Entry) {
    let sentence = entry.help.trim_end_matches(", below");
    let default = entry.default.replace('`', "");
    value["description"] = format!("{sentence} [default: {default}]").into();
    if entry.default_value().is_some() && !matches!(entry.value, Type::Text(_) | Type::Table(_)) {
        let number = entry.default.parse::<u64>().ok().filter(|_| !entry.value.is_text());
        value["default"] = number.map_or_else(|| entry.default.into(), Value::from);
    }
}

fn of_type(value: &Type) -> Value {
    let pattern = |pattern: &str| json!({ "type": "string", "pattern": format!("^{pattern}$") });
    match value {
        Type::Number(min, max) => json!({ "anyOf": [
            { "type": "integer", "minimum": min, "maximum": max },
            pattern("[0-9]+"),
        ]}),
        Type::Bytes(max) => json!({ "anyOf": [
            { "type": "integer", "minimum": 0, "maximum": max },
            pattern("[0-9]+[KMGTkmgt]?"),
        ]}),
        Type::Choice(words) => choice(words),
        Type::Policy => pattern(&policy()),
        Type::Macs => list(MAC),
        Type::Ips => list("([0-9A-Fa-f.:]+|locked)"),
        Type::Vlan => vlan(),
        Type::Vlans => vlans(),
        Type::Rate => amounts("[0-9.]+[kKmMgG]?(bit|frames)?"),
        Type::Burst => amounts("[0-9.]+([kKmMgG]?|[kKmMgG]?frames)"),
        // In either case, with `-` or `_`: the list is in the documentation.
        Type::Names(_) => pattern("[A-Za-z0-9_-]+(\\+[A-Za-z0-9_-]+)*"),
        Type::Cpus => json!({ "anyOf": [
            { "type": "array", "items": { "anyOf": [
                { "type": "integer", "minimum": 0 },
                pattern("[0-9]+"),
            ]}},
            { "type": "integer", "minimum": 0 },
            pattern("[0-9]*(,[0-9]+)*"),
        ]}),
        Type::Seconds => {
            json!({ "anyOf": [{ "type": "number", "minimum": 0 }, pattern("[0-9.]+")] })
        }
        Type::Address => json!({ "anyOf": [
            { "type": "integer", "minimum": 0, "maximum": u16::MAX },
            { "type": "string", "minLength": 1 },
        ]}),
        Type::Text(_) | Type::Table(_) => json!({ "type": "string" }),
        Type::Mode => pattern("0?[0-7]{3}"),
        Type::Flag => json!({ "type": "boolean" }),
    }
}

/// A list, as members joined by `+` or as an array of them.
fn list(member: &str) -> Value {
    json!({ "anyOf": [
        { "type": "array", "items": { "type": "string", "pattern": format!("^{member}$") },
          "minItems": 1 },
        { "type": "string", "pattern": format!("^({member}(\\+{member})*|none)$") },
    ]})
}

/// One or two limits, or a number of bits or bytes.
fn amounts(member: &str) -> Value {
    json!({ "anyOf": [
        { "type": "string", "pattern": format!("^({member}(\\+{member})?|none)$") },
        { "type": "integer", "minimum": 1 },
    ]})
}

/// VLANs: as `list`, or numbers.
fn vlans() -> Value {
    let number = vlan();
    let mut all = list("[0-9]+(-[0-9]+)?");
    all["anyOf"][0]["items"] = json!({ "anyOf": [all["anyOf"][0]["items"], number["anyOf"][0]] });
    json!({ "anyOf": [all["anyOf"][0], all["anyOf"][1], number["anyOf"][0]] })
}

/// One VLAN.
fn vlan() -> Value {
    json!({ "anyOf": [
        { "type": "integer", "minimum": 1, "maximum": 4094 },
        { "type": "string", "pattern": "^([0-9]+|none)$" },
    ]})
}

/// Words; `on` and `off` may be `true` and `false`.
fn choice(words: &[Choice]) -> Value {
    let plain: Vec<_> =
        words.iter().filter(|choice| choice.number.is_none()).map(|choice| choice.word).collect();
    let mut forms = vec![json!({ "enum": plain })];
    if plain.contains(&"on") {
        forms.push(json!({ "type": "boolean" }));
    }
    let numbered = words.iter().filter(|choice| choice.number.is_some());
    forms.extend(
        numbered.map(
            |choice| json!({ "type": "string", "pattern": format!("^{}:[0-9]+$", choice.word) }),
        ),
    );
    if forms.len() == 1 { forms.remove(0) } else { json!({ "anyOf": forms }) }
}

fn policy() -> String {
    let forms = FORMS.iter().map(|form| match form.args {
        Args::None => form.word.into(),
        Args::Maybe(_) => format!("{}(:[0-9]+)?", form.word),
        Args::Two(..) => format!("{}:[0-9]+,[0-9]+", form.word),
        Args::Pending(_) => format!("{}:[0-9]+/pending", form.word),
    });
    format!("({})", forms.collect::<Vec<_>>().join("|"))
}

/// Errors of a validator of others in a TOML text.
#[cfg(test)]
pub(crate) fn errors(text: &str) -> Vec<String> {
    use std::sync::LazyLock;
    static VALIDATOR: LazyLock<jsonschema::Validator> =
        LazyLock::new(|| jsonschema::validator_for(&schema()).expect("a valid schema"));
    let file: Value = toml::from_str(text).expect("TOML");
    VALIDATOR.iter_errors(&file).map(|error| error.to_string()).collect()
}

#[cfg(test)]
mod tests;
