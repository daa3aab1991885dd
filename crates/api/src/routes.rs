//! The operations of the interface: for each one its method, path, parameters, body, replies and
//! right. The server finds the operation of a request here, the client makes requests from it, and
//! [`crate::openapi`] describes it.

mod field;
mod table;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

pub use self::field::{Field, Form, Place, SECONDS_MAX};
pub use self::table::OPERATIONS;
use crate::http::{EVENTS, Incoming, PCAPNG, Response};
use crate::near::did_you_mean;
use crate::problem::Problem;
use crate::request::Request;

/// Who may make a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Everyone who may connect.
    Read,
    /// Who may change the switch.
    Change,
    /// The switch's user and root: it runs a program with the rights of the switch.
    Own,
}

/// Kind of server that has an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// A switch.
    Switch,
    /// The driver half: `nic` and `gen`.
    Guest,
    /// Both.
    Both,
}

/// A successful reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// 200 with a document: the name of its schema.
    Json(&'static str),
    /// 201, with what is valid and probably not meant.
    Created,
    /// 204; with such warnings 200, and a document.
    Changed,
    /// 204, without a body.
    Nothing,
    /// 200, a capture, until either side closes.
    Capture,
    /// 200, events, until either side closes.
    Events,
}

/// One operation.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Its name: that of the [`Request`].
    pub name: &'static str,
    /// HTTP method.
    pub method: &'static str,
    /// Path, with `{field}` for each field in it.
    pub path: &'static str,
    /// Server that has it.
    pub server: Server,
    /// Who may use it.
    pub right: Right,
    /// One sentence that says what it does.
    pub help: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
    /// The reply.
    pub reply: Reply,
    /// Statuses of errors of its own: besides those of every operation.
    pub errors: &'static [u16],
}

/// Statuses of errors that every operation may have: malformed requests, missing rights, time.
pub const COMMON_ERRORS: [u16; 4] = [400, 403, 408, 503];

/// A request and its operation.
#[derive(Debug)]
pub struct Routed {
    /// The operation.
    pub operation: &'static Operation,
    /// The request.
    pub request: Request,
}

impl Server {
    /// Whether `self`, a switch or a guest, has an operation of `other`.
    fn has(self, other: Self) -> bool {
        other == Self::Both || other == self
    }
}

impl Operation {
    /// The operation of a request.
    pub fn of(request: &Request) -> &'static Self {
        let name = request.name();
        let found = OPERATIONS.iter().find(|operation| operation.name == name);
        found.expect("every request has an operation, tested")
    }

    /// Values of the segments of `path` that are fields; `None`: it is another path.
    fn matches<'p>(&self, path: &'p str) -> Option<Vec<(&'static str, &'p str)>> {
        let (mut own, mut given) = (self.path.split('/'), path.split('/'));
        let mut values = Vec::new();
        loop {
            match (own.next(), given.next()) {
                (None, None) => return Some(values),
                (Some(own), Some(given)) => match own.strip_prefix('{') {
                    Some(name) => values.push((name.trim_end_matches('}'), given)),
                    None if own == given => {}
                    None => return None,
                },
                _ => return None,
            }
        }
    }

    /// The field of this place and name.
    fn field(&self, place: Place, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.place == place && field.name == name)
    }

    /// The reply to a request that succeeded.
    pub fn respond(&self, value: &Value) -> Response {
        match self.reply {
            Reply::Json(_) => Response::json(200, value),
            Reply::Created => Response { status: 201, ..Response::json(200, value) },
            Reply::Changed if !value.is_null() => Response::json(200, value),
            Reply::Changed | Reply::Nothing => Response::empty(204),
            Reply::Capture => Response::stream(PCAPNG),
            Reply::Events => Response::stream(EVENTS),
        }
    }
}

/// Finds the operation of a request, and checks all its fields.
///
/// # Errors
/// There is none, or a field is invalid; nothing else is checked.
pub fn route(server: Server, incoming: &Incoming) -> Result<Routed, Problem> {
    let target = path_of(&incoming.target);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let known = OPERATIONS.iter().filter(|o| server.has(o.server));
    let here: Vec<_> = known.filter_map(|o| Some((o, o.matches(path)?))).collect();
    if here.is_empty() {
        return Err(no_path(server, path));
    }
    let method = if incoming.method == "HEAD" { "GET" } else { &incoming.method };
    let Some((operation, segments)) = here.iter().find(|(o, _)| o.method == method) else {
        let allowed = allowed(here.iter().map(|(operation, _)| *operation));
        let detail = format!("{} has no method {}: use {allowed}", path, incoming.method);
        return Err(Problem::new(405, detail, format!("use {allowed}")).at("method"));
    };
    let mut fields = Map::new();
    fields.insert("operation".into(), operation.name.into());
    for (name, text) in segments {
        let text = decoded(text).ok_or_else(|| bad_encoding("path", name, text))?;
        if let Some(field) = operation.field(Place::Path, name) {
            fields.insert((*name).into(), field.parse(&text)?);
        }
    }
    take_query(operation, query, &mut fields)?;
    take_body(operation, incoming, &mut fields)?;
    for field in operation.fields {
        if !fields.contains_key(field.name) {
            let default = field.default().ok_or_else(|| field.missing())?;
            fields.insert(field.name.into(), default);
        }
    }
    let request = serde_json::from_value(fields.into()).map_err(|error| {
        let detail = format!("invalid {}: {error}", operation.name);
        Problem::new(400, detail, "see GET /openapi.json").at("body")
    })?;
    Ok(Routed { operation, request })
}

/// Methods of a path, for `Allow`; `None`: the path does not exist.
pub fn methods(server: Server, target: &str) -> Option<String> {
    let path = path_of(target).split('?').next().unwrap_or_default();
    let known = OPERATIONS.iter().filter(|o| server.has(o.server));
    let here: Vec<_> = known.filter(|o| o.matches(path).is_some()).collect();
    (!here.is_empty()).then(|| allowed(here.into_iter()))
}

fn allowed<'a>(operations: impl Iterator<Item = &'a Operation>) -> String {
    let mut methods: Vec<_> = operations.map(|operation| operation.method).collect();
    if methods.contains(&"GET") {
        methods.push("HEAD");
    }
    methods.join(", ")
}

/// Path and query of a target, which may be a whole URL (RFC 9112, 3.2.2).
fn path_of(target: &str) -> &str {
    match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    }
}

fn no_path(server: Server, path: &str) -> Problem {
    let others = OPERATIONS.iter().filter(|o| !server.has(o.server));
    let shown = path.escape_debug();
    let detail = match others.into_iter().find(|o| o.matches(path).is_some()) {
        Some(operation) => match server {
            Server::Guest => format!(
                "'{}' is for a switch, and this is the socket of a guest (nic, gen)",
                operation.name
            ),
            _ => format!("'{}' is for a guest (nic, gen), not for a switch", operation.name),
        },
        None => {
            let paths = OPERATIONS.iter().filter(|o| server.has(o.server)).map(|o| o.path);
            format!("there is no path {shown}{}", did_you_mean(path, paths))
        }
    };
    Problem::new(404, detail, "GET /openapi.json lists all paths").at("path").of(path)
}

fn bad_encoding(place: &str, name: &str, text: &str) -> Problem {
    let detail = format!("{name}: '{}' is not valid percent-encoded UTF-8", text.escape_debug());
    Problem::new(400, detail, "encode it as in RFC 3986, section 2.1").at(format!("{place}.{name}"))
}

/// Decodes `%41`.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
        let digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(digits)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).ok()
}

/// Encodes a segment of a path, or a value of a query.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") })
        .collect()
}

fn take_query(
    operation: &Operation,
    query: &str,
    fields: &mut Map<String, Value>,
) -> Result<(), Problem> {
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decoded = |text: &str| decoded(&text.replace('+', " "));
        let name = decoded(name).ok_or_else(|| bad_encoding("query", "name", name))?;
        let value = decoded(value).ok_or_else(|| bad_encoding("query", &name, value))?;
        let at = format!("query.{}", name.escape_debug());
        let Some(field) = operation.field(Place::Query, &name) else {
            let known = operation.fields.iter().filter(|field| field.place == Place::Query);
            let known: Vec<_> = known.map(|field| field.name).collect();
            let hint = did_you_mean(&name, known.iter().copied());
            let remedy = match &known[..] {
                [] => "omit it: there are no parameters".into(),
                known => format!("use {}", known.join(", ")),
            };
            let detail = format!("unknown parameter '{}'{hint}: {remedy}", name.escape_debug());
            return Err(Problem::new(400, detail, remedy).at(at));
        };
        if fields.contains_key(field.name) {
            let detail = format!("parameter '{name}' is given twice");
            return Err(Problem::new(400, detail, "give it once").at(at));
        }
        fields.insert(field.name.into(), field.parse(&value)?);
    }
    Ok(())
}

fn take_body(
    operation: &Operation,
    incoming: &Incoming,
    fields: &mut Map<String, Value>,
) -> Result<(), Problem> {
    let own = operation.fields.iter().filter(|f| matches!(f.place, Place::Body | Place::Whole));
    let own: Vec<_> = own.collect();
    if incoming.body.is_empty() {
        return match own.iter().find(|field| field.is_required()) {
            None => Ok(()),
            Some(_) => {
                let what = format!("{} needs a body, a JSON object", operation.name);
                Err(Problem::new(400, what, "send one; see GET /openapi.json").at("body"))
            }
        };
    }
    if own.is_empty() {
        let what = format!("{} has no body", operation.name);
        return Err(Problem::new(400, what, "send none").at("body"));
    }
    let given = incoming.media_type.as_deref().unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case(crate::http::JSON) {
        let detail = format!(
            "a body of type '{}' is not supported: send Content-Type: application/json",
            given.escape_debug()
        );
        let remedy = "send Content-Type: application/json";
        return Err(Problem::new(415, detail, remedy).at("header.content-type").of(given));
    }
    let body = serde_json::from_slice::<Value>(&incoming.body).map_err(|error| {
        Problem::new(400, format!("the body is not JSON: {error}"), "send a JSON object").at("body")
    })?;
    let Value::Object(body) = body else {
        let what = "the body is not a JSON object";
        return Err(Problem::new(400, what, "send an object: {...}").at("body"));
    };
    if let Some(whole) = own.iter().find(|field| field.place == Place::Whole) {
        fields.insert(whole.name.into(), body.into());
        return Ok(());
    }
    for (name, value) in body {
        let Some(field) = operation.field(Place::Body, &name) else {
            let known: Vec<_> = own.iter().map(|field| field.name).collect();
            let hint = did_you_mean(&name, known.iter().copied());
            let (name, known) = (name.escape_debug().to_string(), known.join(", "));
            let detail = format!("unknown field '{name}'{hint}: use {known}");
            let remedy = format!("use {known}");
            return Err(Problem::new(400, detail, remedy).at(format!("body.{name}")));
        };
        fields.insert(name, field.check(value)?);
    }
    Ok(())
}

/// A request as HTTP: method, target and body.
pub fn to_http(request: &Request) -> (&'static str, String, Option<Value>) {
    let operation = Operation::of(request);
    let fields = serde_json::to_value(request).unwrap_or_default();
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut target = operation.path.to_string();
    let (mut query, mut body) = (Vec::new(), None);
    for field in operation.fields {
        let value = &fields[field.name];
        match field.place {
            Place::Path => {
                let segment = format!("{{{}}}", field.name);
                target = target.replace(&segment, &encoded(&text(value)));
            }
            _ if field.default().as_ref() == Some(value) => {}
            Place::Query => query.push(format!("{}={}", field.name, encoded(&text(value)))),
            Place::Body => {
                let body = body.get_or_insert_with(|| Value::Object(Map::new()));
                body[field.name] = value.clone();
            }
            Place::Whole => body = Some(value.clone()),
        }
    }
    if !query.is_empty() {
        target += &format!("?{}", query.join("&"));
    }
    (operation.method, target, body)
}
