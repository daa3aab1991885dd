//! The description of the interface: OpenAPI 3.1, made from the table of operations and from the
//! schema of settings.

mod replies;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

use crate::http::{EVENTS, JSON, PCAPNG};
use crate::json_schema;
use crate::problem::{MEDIA_TYPE, reason};
use crate::routes::{COMMON_ERRORS, Form, OPERATIONS, Operation, Place, Reply, Right, Server};

/// Path of the committed copy of a switch's description.
pub const PATH: &str = "docs/openapi.json";

/// Statuses that a server can give before the operation is known.
const ALWAYS: [u16; 5] = [405, 413, 414, 415, 431];

/// The description for a switch, or for a guest.
pub fn document(server: Server) -> Value {
    let mut paths = Map::new();
    let here = |other: &&Operation| other.server == Server::Both || other.server == server;
    for operation in OPERATIONS.iter().filter(here) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method.to_lowercase()] = describe(operation, server);
    }
    let (what, socket) = match server {
        Server::Guest => ("a guest of pvswitch (nic, gen)", "that of --control"),
        _ => ("pvswitch", "/run/pvswitch/control.sock, or that of --control"),
    };
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": format!("Control socket of {what}"),
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT" },
            "description": format!(
                "HTTP/1.1 on a Unix stream socket: {socket}. The socket's mode and group decide \
                 who may connect, the user and groups of the connected process who may change the \
                 switch. Fields are only added, never removed."
            ),
        },
        "servers": [{ "url": "http://localhost", "description": "on the Unix socket" }],
        "paths": paths,
        "components": {
            "responses": { "Problem": {
                "description": "The request was refused; nothing was changed",
                "content": { MEDIA_TYPE: { "schema": reference("Problem") } },
            }},
        },
    });
    document["components"]["schemas"] = used(&document, &all_schemas()).into();
    document
}

/// The description of a switch as text of a file.
pub fn text() -> String {
    let mut text = serde_json::to_string_pretty(&document(Server::Switch)).unwrap_or_default();
    text.push('\n');
    text
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// The name of a schema at this server: a guest has counters and settings of its own.
fn of_server(server: Server, name: &str) -> &str {
    match (server, name) {
        (Server::Guest, "Stats") => "GuestStats",
        (Server::Guest, "Settings") => "PairSettings",
        _ => name,
    }
}

fn describe(operation: &Operation, server: Server) -> Value {
    let at = |field: &&crate::routes::Field| matches!(field.place, Place::Path | Place::Query);
    let parameters = operation.fields.iter().filter(at).map(|field| {
        json!({
            "name": field.name,
            "in": if field.place == Place::Path { "path" } else { "query" },
            "required": field.is_required(),
            "description": field.help,
            "schema": field.schema(),
        })
    });
    let parameters: Vec<_> = parameters.collect();
    let right = match operation.right {
        Right::Read => "Allowed for everyone who may connect.",
        Right::Change => "Allowed only for users who may change the switch.",
        Right::Own => "Allowed only for root and the switch's user.",
    };
    let mut value = json!({
        "operationId": operation.name,
        "summary": operation.help,
        "description": right,
        "responses": responses(operation, server),
    });
    if !parameters.is_empty() {
        value["parameters"] = parameters.into();
    }
    if let Some(body) = body(operation, server) {
        value["requestBody"] = body;
    }
    value
}

fn body(operation: &Operation, server: Server) -> Option<Value> {
    let members: Vec<_> = operation.fields.iter().filter(|f| f.place == Place::Body).collect();
    let schema = match operation.fields.iter().find(|field| field.place == Place::Whole) {
        Some(field) => match field.form {
            Form::Object(name) => reference(of_server(server, name)),
            _ => field.schema(),
        },
        None if members.is_empty() => return None,
        None => {
            let mut schema =
                json!({ "type": "object", "properties": {}, "additionalProperties": false });
            for field in &members {
                let mut member = field.schema();
                member["description"] = field.help.into();
                schema["properties"][field.name] = member;
            }
            let required: Vec<_> = members.iter().filter(|f| f.is_required()).collect();
            if !required.is_empty() {
                schema["required"] = required.iter().map(|field| field.name).collect();
            }
            schema
        }
    };
    let required = operation
        .fields
        .iter()
        .any(|field| matches!(field.place, Place::Body | Place::Whole) && field.is_required());
    Some(json!({ "required": required, "content": { JSON: { "schema": schema } } }))
}

fn responses(operation: &Operation, server: Server) -> Value {
    let content = |kind: &str, schema: Value| json!({ kind: { "schema": schema } });
    let ok = |content: Value| json!({ "description": "Done", "content": content });
    let warnings = || content(JSON, reference("Warnings"));
    let (status, reply) = match operation.reply {
        Reply::Json(name) => (200, ok(content(JSON, reference(of_server(server, name))))),
        Reply::Created => (201, ok(warnings())),
        Reply::Changed | Reply::Nothing => (204, json!({ "description": "Done" })),
        Reply::Capture => {
            (200, ok(content(PCAPNG, json!({ "type": "string", "format": "binary" }))))
        }
        Reply::Events => {
            let mut reply = ok(content(EVENTS, json!({ "type": "string" })));
            reply["description"] =
                "Server-sent events; `data` of each is an Event, see components".into();
            (200, reply)
        }
    };
    let mut all = Map::from_iter([(status.to_string(), reply)]);
    if operation.reply == Reply::Changed {
        let mut reply = ok(warnings());
        reply["description"] = "Done, with warnings".into();
        all.insert("200".into(), reply);
    }
    let mut errors = [&COMMON_ERRORS[..], operation.errors, &ALWAYS].concat();
    errors.sort_unstable();
    errors.dedup();
    for status in errors {
        let problem = json!({
            "description": reason(status),
            "content": { MEDIA_TYPE: { "schema": reference("Problem") } },
        });
        all.insert(status.to_string(), problem);
    }
    all.into()
}

/// All schemas by name.
fn all_schemas() -> Map<String, Value> {
    let mut all = Map::new();
    let file = json_schema::schema();
    for (name, schema) in file["$defs"].as_object().into_iter().flatten() {
        let name = if name == "port" { "Port".into() } else { kind_name(name) };
        all.insert(name, renamed(schema));
    }
    all.extend(json_schema::changes().map(|(name, schema)| (name.to_string(), schema)));
    all.extend(replies::schemas().into_iter().map(|(name, schema)| (name.to_string(), schema)));
    all
}

/// The name of a kind's schema: `Port-vhost-user`.
fn kind_name(kind: &str) -> String {
    format!("Port-{kind}")
}

/// A schema of the file with references to this document.
fn renamed(schema: &Value) -> Value {
    match schema {
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| {
                let target = value.as_str().and_then(|text| text.strip_prefix("#/$defs/"));
                let value = match target {
                    Some(kind) if key == "$ref" => {
                        format!("#/components/schemas/{}", kind_name(kind)).into()
                    }
                    _ => renamed(value),
                };
                (key.clone(), value)
            };
            members.iter().map(member).collect()
        }
        Value::Array(list) => list.iter().map(renamed).collect(),
        other => other.clone(),
    }
}

/// The schemas that a document refers to, also through others.
fn used(document: &Value, all: &Map<String, Value>) -> Map<String, Value> {
    let mut found = Map::new();
    let mut names = Vec::new();
    references(document, &mut names);
    // Events are in a text, which cannot refer to their schema.
    names.extend(document["paths"].get("/v1/events").map(|_| "Event".to_string()));
    while let Some(name) = names.pop() {
        if found.contains_key(&name) {
            continue;
        }
        if let Some(schema) = all.get(&name) {
            references(schema, &mut names);
            found.insert(name, schema.clone());
        }
    }
    found
}

/// Appends the names of schemas that are referred to.
fn references(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            let target = members.get("$ref").and_then(Value::as_str);
            let name = target.and_then(|t| t.strip_prefix("#/components/schemas/"));
            names.extend(name.map(String::from));
            members.values().for_each(|member| references(member, names));
        }
        Value::Array(list) => list.iter().for_each(|member| references(member, names)),
        _ => {}
    }
}
