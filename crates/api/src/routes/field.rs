//! Fields of requests: where each is, and which values it accepts.

use serde_json::{Value, json};

use crate::QUEUES_MAX;
use crate::json_schema;
use crate::port::check_name;
use crate::problem::Problem;

/// Part of a request that holds a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A segment of the path.
    Path,
    /// A parameter of the query.
    Query,
    /// A member of the body.
    Body,
    /// The body itself.
    Whole,
}

/// Values of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Name of a port.
    Port,
    /// Number of a queue pair.
    Queue,
    /// A MAC address.
    Mac,
    /// VLAN id, 0 for untagged; the default.
    Vlan,
    /// `true`, or `false`, the default.
    Flag,
    /// Seconds, 0 to [`SECONDS_MAX`]; 1 is the default.
    Seconds,
    /// Absolute path of a program, or null, the default.
    Program,
    /// An object of the schema of this name.
    Object(&'static str),
}

/// A field.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name, that of the field of the request.
    pub name: &'static str,
    /// Part of the request that holds it.
    pub place: Place,
    /// Its values.
    pub form: Form,
    /// A few words that say what it is.
    pub help: &'static str,
}

/// Longest time between two samples, in seconds.
pub const SECONDS_MAX: f64 = 60.0;
/// Highest VLAN id of an address.
const VLAN_MAX: u16 = 4094;
/// Longest path of a program, in bytes (`PATH_MAX`).
const PATH_MAX: usize = 4096;

impl Field {
    /// Parses the text of a path or query.
    ///
    /// # Errors
    /// It is invalid; the error says what to write.
    pub(super) fn parse(&self, text: &str) -> Result<Value, Problem> {
        let value = match self.form {
            Form::Queue | Form::Vlan => text.parse::<u64>().ok().map(Value::from),
            Form::Flag => text.parse::<bool>().ok().map(Value::from),
            Form::Seconds => text.parse::<f64>().ok().filter(|s| s.is_finite()).map(Value::from),
            _ => None,
        };
        self.check(value.unwrap_or_else(|| text.into()))
    }

    /// Checks a value.
    ///
    /// # Errors
    /// It is invalid; the error says what to write.
    pub(super) fn check(&self, value: Value) -> Result<Value, Problem> {
        if self.accepts(&value) {
            return Ok(value);
        }
        let (what, remedy) = (self.error(&value), self.remedy());
        Err(Problem::new(400, what, remedy).at(self.at()).of(value))
    }

    /// Whether a value is valid.
    pub fn accepts(&self, value: &Value) -> bool {
        let numbered = |max: u16| value.as_u64().is_some_and(|n| n <= u64::from(max));
        match self.form {
            Form::Port => value.as_str().is_some_and(|name| check_name(name).is_ok()),
            Form::Mac => value.as_str().is_some_and(|mac| crate::mac(mac).is_ok()),
            Form::Queue => numbered(QUEUES_MAX - 1),
            Form::Vlan => numbered(VLAN_MAX),
            Form::Flag => value.is_boolean(),
            Form::Seconds => value.as_f64().is_some_and(|s| (0.0..=SECONDS_MAX).contains(&s)),
            Form::Program => {
                let is_path = |path: &str| {
                    path.starts_with('/') && path.len() < PATH_MAX && !path.contains('\0')
                };
                value.is_null() || value.as_str().is_some_and(is_path)
            }
            Form::Object(_) => value.is_object(),
        }
    }

    fn error(&self, value: &Value) -> String {
        let text = value.as_str();
        let error = match self.form {
            Form::Port => text.and_then(|name| check_name(name).err()),
            Form::Mac => text.and_then(|mac| crate::mac(mac).err()),
            _ => None,
        };
        error.unwrap_or_else(|| {
            let given: String = value.to_string().chars().take(80).collect();
            format!("{} {given}: {}", self.name, self.remedy())
        })
    }

    /// The valid values, in words.
    fn remedy(&self) -> String {
        match self.form {
            Form::Port => "use a port's name, as GET /v1/ports lists them".into(),
            Form::Queue => format!("use 0 to {}", QUEUES_MAX - 1),
            Form::Mac => "use the address of one interface, like 02:00:00:00:00:01".into(),
            Form::Vlan => format!("use 0 (untagged) to {VLAN_MAX}"),
            Form::Flag => "use true or false".into(),
            Form::Seconds => format!("use 0 to {SECONDS_MAX}"),
            Form::Program => "use the absolute path of a program".into(),
            Form::Object(name) => format!("use an object, see {name} of GET /openapi.json"),
        }
    }

    /// Its place and name.
    fn at(&self) -> String {
        match self.place {
            Place::Path => format!("path.{}", self.name),
            Place::Query => format!("query.{}", self.name),
            Place::Body => format!("body.{}", self.name),
            Place::Whole => "body".into(),
        }
    }

    /// The error for a field that is not given.
    pub(super) fn missing(&self) -> Problem {
        let (at, remedy) = (self.at(), self.remedy());
        let detail = format!("{at} is missing ({}): {remedy}", self.help);
        Problem::new(400, detail, remedy).at(at)
    }

    /// Its value if it is not given; `None`: it must be.
    pub fn default(&self) -> Option<Value> {
        match self.form {
            Form::Vlan => Some(0.into()),
            Form::Flag => Some(false.into()),
            Form::Seconds => Some(1.0.into()),
            Form::Program => Some(Value::Null),
            _ => None,
        }
    }

    /// Whether it must be given.
    pub fn is_required(&self) -> bool {
        self.default().is_none()
    }

    /// Its JSON Schema.
    pub fn schema(&self) -> Value {
        match self.form {
            Form::Port => json!({ "type": "string", "pattern": json_schema::NAME }),
            Form::Queue => json!({ "type": "integer", "minimum": 0, "maximum": QUEUES_MAX - 1 }),
            Form::Mac => json!({
                "type": "string",
                "pattern": "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$",
            }),
            Form::Vlan => {
                json!({ "type": "integer", "minimum": 0, "maximum": VLAN_MAX, "default": 0 })
            }
            Form::Flag => json!({ "type": "boolean", "default": false }),
            Form::Seconds => {
                json!({ "type": "number", "minimum": 0, "maximum": SECONDS_MAX, "default": 1 })
            }
            Form::Program => json!({
                "type": ["string", "null"], "pattern": "^/[^\\u0000]*$", "maxLength": PATH_MAX - 1,
            }),
            Form::Object(name) => json!({ "$ref": format!("#/components/schemas/{name}") }),
        }
    }
}
