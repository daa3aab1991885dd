use jsonschema::Validator;

use super::*;
use crate::event::{Event, Way};
use crate::problem::Problem;
use crate::routes::route;

/// The committed copy is the one that a switch serves.
#[test]
fn the_committed_description_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../", "docs/openapi.json");
    assert!(path.ends_with(PATH));
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == text(), "{PATH} differs: run cargo xtask settings");
}

/// A validator of a schema of the description.
fn validator(name: &str) -> Validator {
    let mut schema = document(Server::Switch);
    schema["$ref"] = format!("#/components/schemas/{name}").into();
    jsonschema::validator_for(&schema).unwrap()
}

#[test]
fn all_references_exist() {
    for server in [Server::Switch, Server::Guest] {
        let document = document(server);
        let mut names = Vec::new();
        references(&document, &mut names);
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(names.iter().all(|name| schemas.contains_key(name)), "{names:?}");
        assert!(schemas.keys().all(|name| names.contains(name) || name == "Event"), "unused");
    }
}

#[test]
fn every_operation_is_described_with_its_fields() {
    let switch = document(Server::Switch);
    for operation in OPERATIONS.iter().filter(|o| o.server != Server::Guest) {
        let at = &switch["paths"][operation.path][operation.method.to_lowercase()];
        assert_eq!(at["operationId"], operation.name);
        let parameters = at["parameters"].as_array().map_or(0, Vec::len);
        let bodies = usize::from(at["requestBody"].is_object());
        assert_eq!(parameters + bodies, operation.fields.len(), "{}", operation.name);
        assert!(operation.errors.iter().all(|status| reason(*status) != "Unknown"));
    }
}

/// Valid fields pass the schema, invalid ones do not: it says what the server accepts.
#[test]
fn schemas_of_fields_agree_with_the_checks_of_the_server() {
    let texts = [
        "a",
        "vm-1.x_",
        "",
        "-a",
        ".a",
        "a/b",
        "a b",
        "0123456789abcdef",
        "ü",
        "02:00:00:00:00:01",
        "03:00:00:00:00:01",
        "0A:00:00:00:00:fF",
        "02:00",
        "/x",
        "/",
        "x",
        "/a\u{0}",
    ];
    let numbers = [-1, 0, 15, 16, 4094, 4095].map(Value::from);
    let others = [Value::Null, true.into(), json!([]), json!({}), json!(1.5)];
    let all: Vec<_> = texts.map(Value::from).into_iter().chain(numbers).chain(others).collect();
    let mut accepted = 0;
    for field in OPERATIONS.iter().flat_map(|operation| operation.fields) {
        if matches!(field.form, Form::Object(_)) {
            continue;
        }
        let schema = jsonschema::validator_for(&field.schema()).unwrap();
        for value in &all {
            let is_valid = field.accepts(value);
            assert_eq!(schema.is_valid(value), is_valid, "{}: {value}", field.name);
            accepted += usize::from(is_valid);
        }
    }
    assert!(accepted > 40, "{accepted}");
}

#[test]
fn events_and_problems_have_their_schemas() {
    let port = || "vm1".to_string();
    let events = [
        Event::PortAdded { port: port() },
        Event::PortRemoved { port: port() },
        Event::PortUp { port: port() },
        Event::PortDown { port: port() },
        Event::Fault { port: port(), cause: "x".into() },
        Event::Stalled { port: port(), queue: 1 },
        Event::Recovered { port: port(), queue: 1 },
        Event::MacMoved { port: port(), moves: 3 },
        Event::MacFlaps { mac: port(), vlan: 1, from: port(), to: port(), moves: 9, blocked_s: 0 },
        Event::InterfaceLost { port: port(), cause: "x".into() },
        Event::Failover { port: port(), from: port(), cause: "x".into() },
        Event::RateLimited { port: port(), way: Way::In },
        Event::Reload { added: 1, removed: 2, replaced: 3, changed: 4 },
        Event::Upgrade { pid: 1 },
        Event::Shutdown {},
        Event::Lost { events: 1 },
    ];
    let schema = document(Server::Switch)["components"]["schemas"]["Event"].clone();
    assert_eq!(schema["oneOf"].as_array().unwrap().len(), events.len());
    let validator = validator("Event");
    for event in &events {
        let text = event.text(1, 2);
        let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert!(validator.is_valid(&data), "{data}");
    }
    let problem = Problem::new(400, "x", "y").at("body").of(1);
    let problem = serde_json::to_value(problem).unwrap();
    assert!(self::validator("Problem").is_valid(&problem), "{problem}");
}

/// What the schema of a port accepts at random is a port, or refused for what the schema cannot
/// say; what it refuses is refused.
#[test]
fn ports_and_settings_that_the_schema_refuses_are_refused() {
    let ports = validator("Port");
    for (port, is_valid) in [
        (json!({ "kind": "null" }), true),
        (json!({ "kind": "vhost-user", "socket": "/x", "mac": ["02:00:00:00:00:01"] }), true),
        (json!({ "kind": "vhost-user" }), false),
        (json!({ "kind": "null", "weight": [] }), false),
        (json!({ "kind": "null", "weight": null }), false),
        (json!({ "kind": "null", "wait": 1 }), false),
        (json!({}), false),
    ] {
        assert_eq!(ports.is_valid(&port), is_valid, "{port}");
        let accepted = crate::PortText::from_json("a", port.as_object().unwrap());
        assert_eq!(accepted.is_ok(), is_valid, "{port}: {accepted:?}");
    }
    let settings = validator("Settings");
    assert!(settings.is_valid(&json!({ "poll": "spin" })) && !settings.is_valid(&json!({})));
    assert!(!settings.is_valid(&json!({ "poll": 1 })) && !settings.is_valid(&json!({ "x": 1 })));
    let incoming = crate::http::Incoming {
        method: "GET".into(),
        target: "/openapi.json".into(),
        media_type: None,
        body: Vec::new(),
        persists: true,
    };
    assert!(route(Server::Guest, &incoming).is_ok());
}
