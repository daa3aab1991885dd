//! What `ctl`, `/metrics` and the event stream name is documented, and each counter has a remedy.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use serde_json::Value;

const OBSERVABILITY: &str = include_str!("../../../docs/observability.md");
/// Documents the counters of guests.
const SETTINGS: &str = include_str!("../../../docs/settings.md");
const API: &str = include_str!("../../../docs/api.md");

/// Every key of an object and of the objects in it.
fn keys(value: &Value, found: &mut Vec<String>) {
    if let Some(object) = value.as_object() {
        found.extend(object.keys().cloned());
        object.values().for_each(|value| keys(value, found));
    }
    value.as_array().into_iter().flatten().for_each(|value| keys(value, found));
}

#[test]
fn every_name_in_the_replies_is_documented() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), "n=null".into()];
    let switch = Switch::start(&dir, &["--http", "0"], &ports);
    switch.json(&["fdb", "add", "02:00:00:00:00:07", "a"]);
    let guest = dir.text("guest");
    let _sink = Gen::start(&dir.path("a"), &["--mode", "sink", "--control", &guest]);
    switch.wait_up("a", true);
    let of_guest = || {
        let mut command = pvswitch();
        let out = command.args(["ctl", "--control", &guest, "stats", "--json"]).output().unwrap();
        serde_json::from_slice::<Value>(&out.stdout).unwrap_or_default()
    };
    wait_for("the guest", || of_guest()["connected"] == true);
    for what in ["stats", "show", "fdb", "a guest"] {
        let mut names = Vec::new();
        let answer = if what == "a guest" { of_guest() } else { switch.json(&[what]) };
        keys(&answer, &mut names);
        assert!(names.len() > 5, "{names:?}");
        for name in names {
            let known = [format!("`{name}`"), format!("\"{name}\"")];
            let explained = known.iter().any(|name| {
                OBSERVABILITY.contains(name) || what == "a guest" && SETTINGS.contains(name)
            });
            assert!(explained, "{what}: `{name}` is not in docs/observability.md");
        }
    }
}

/// Cells of the table's row in whose first cell a name is.
fn row<'a>(document: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let rows = document.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    let mut rows = rows.map(|row| row.split(" | ").map(str::trim).collect::<Vec<_>>());
    rows.find(|cells| cells[0].split(", ").any(|cell| cell == format!("`{name}`")))
}

#[test]
fn every_counter_has_a_question_and_a_remedy() {
    // Documented in a table or a sentence of their own.
    const GAUGES: [&str; 8] =
        ["state", "worker", "poll", "weight", "drain", "call", "hold", "held"];
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let stats = switch.json(&["stats"]);
    // A name may be in several tables.
    let (ingress, others) = OBSERVABILITY.split_once("## Egress").unwrap();
    let (egress, workers) = others.split_once("## Workers").unwrap();
    let port = &stats["ports"][0];
    let tables = [
        (ingress, &port["ingress"][0], 40),
        (egress, &port["egress"][0], 25),
        (workers, &stats["workers"][0], 8),
    ];
    let mut missing = Vec::new();
    for (document, counters, at_least) in tables {
        let counters = counters.as_object().unwrap();
        let names: Vec<_> =
            counters.keys().filter(|name| !GAUGES.contains(&name.as_str())).collect();
        assert!(names.len() > at_least, "{names:?}");
        for name in names {
            let cells = row(document, name).unwrap_or_default();
            if cells.len() != 3 || cells.iter().any(|cell| cell.is_empty()) {
                missing.push(format!("{name}: {cells:?}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_metric_is_documented() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "0"], &[dir.port("a", "")]);
    let url = switch.json(&["show"])["http"].as_str().unwrap().to_string();
    let address = url.strip_prefix("http://").unwrap().trim_end_matches('/');
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names: BTreeSet<_> = types.filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() > 60, "{names:?}");
    let is_documented = |name: &&str| {
        // `frames` of an ingress queue is `pvswitch_ingress_frames_total`, times are in seconds.
        let short = name.strip_prefix("pvswitch_").expect(name);
        let of = ["ingress_", "egress_", "worker_"].iter().find_map(|of| short.strip_prefix(of));
        let counter = of.unwrap_or(short).trim_end_matches("_total");
        let counter =
            counter.strip_suffix("_seconds").map_or(counter.into(), |c| format!("{c}_ns"));
        [format!("`{name}`"), format!("`{counter}`")]
            .iter()
            .any(|name| OBSERVABILITY.contains(name))
    };
    let missing: Vec<_> = names.into_iter().filter(|name| !is_documented(name)).collect();
    assert!(missing.is_empty(), "not in docs/observability.md: {missing:#?}");
}

#[test]
fn every_event_and_its_fields_are_documented() {
    let description: Value =
        serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let events = description["components"]["schemas"]["Event"]["oneOf"].as_array().unwrap();
    assert!(events.len() > 8);
    for event in events {
        let fields = event["properties"].as_object().unwrap();
        let name = fields["event"]["const"].as_str().unwrap();
        let cells = row(API, name).unwrap_or_else(|| panic!("event {name} is not in docs/api.md"));
        let common = ["event", "severity", "seq", "time_ms"];
        for field in fields.keys().filter(|field| !common.contains(&field.as_str())) {
            assert!(cells[1].contains(&format!("`{field}`")), "event {name}: {field}: {cells:?}");
        }
    }
}
