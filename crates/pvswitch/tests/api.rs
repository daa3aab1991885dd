//! The control socket as a client of any language sees it: HTTP, JSON, events.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use rustix::net::RecvFlags;
use serde_json::{Value, json};

/// Status, head and body of a reply.
struct Answer {
    status: u16,
    head: String,
    body: Value,
}

/// Sends text on a connection of its own; returns all that comes back.
fn raw(control: &str, text: &[u8]) -> String {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(text);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn ask(control: &str, method: &str, target: &str, body: &str) -> Answer {
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    answer(&raw(control, head.as_bytes()))
}

fn answer(text: &str) -> Answer {
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() };
    Answer { status, head: head.into(), body }
}

/// The configuration and the state that requests could change.
fn state(switch: &Switch) -> Value {
    let get = |path| ask(switch.control(), "GET", path, "").body;
    let mut status = get("/v1/status");
    for key in ["uptime_s", "control", "budgets"] {
        status[key] = Value::Null;
    }
    let ports = get("/v1/stats")["ports"].clone();
    let tuning: Vec<_> = ports.as_array().unwrap().iter().map(|p| p["ingress"].clone()).collect();
    json!([status, get("/v1/config"), get("/v1/fdb"), tuning])
}

/// Objects may have no other fields than those of their schema.
fn strict(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            if members.contains_key("properties") && !members.contains_key("additionalProperties") {
                members.insert("additionalProperties".into(), false.into());
            }
            members.values_mut().for_each(strict);
        }
        Value::Array(list) => list.iter_mut().for_each(strict),
        _ => {}
    }
}

#[test]
fn replies_have_exactly_the_fields_of_the_description() {
    let dir = Dir::new();
    let ports = [
        dir.port("a", ",mac=02:00:00:00:00:01,rate-in=1Gbit"),
        "n=null".into(),
        format!("x=xen-local:{}", dir.text("x")),
    ];
    let switch = Switch::start(&dir, &[], &ports);
    let sink = Gen::start(&dir.path("a"), &["--mode", "sink", "--control", &dir.text("gen")]);
    switch.wait_up("a", true);
    assert!(switch.ctl(&["fdb", "add", "02:00:00:00:00:02", "a"]).status.success());
    let mut checked = 0;
    for control in [switch.control().to_string(), dir.text("gen")] {
        let mut document = ask(&control, "GET", "/openapi.json", "").body;
        strict(&mut document["components"]["schemas"]);
        for (path, methods) in document["paths"].as_object().unwrap() {
            let reply = &methods["get"]["responses"]["200"]["content"]["application/json"];
            let Some(schema) = reply["schema"]["$ref"].as_str() else { continue };
            let got = ask(&control, "GET", &path.replace("{name}", "a"), "");
            assert_eq!(got.status, 200, "{path}");
            let mut of_reply = document.clone();
            of_reply["$ref"] = schema.into();
            let validator = jsonschema::validator_for(&of_reply).unwrap();
            let errors: Vec<_> = validator.iter_errors(&got.body).map(|e| e.to_string()).collect();
            assert_eq!(errors, Vec::<String>::new(), "{path}: {}", got.body);
            assert_eq!(ask(&control, "HEAD", &path.replace("{name}", "a"), "").body, Value::Null);
            checked += 1;
        }
    }
    assert!(checked >= 12, "{checked}");
    drop(sink);
}

#[test]
fn ports_are_added_changed_drained_and_removed() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let call = |method: &str, target: &str, body: Value| {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let got = ask(switch.control(), method, target, &body);
        (got.status, got.body)
    };
    let port = json!({ "kind": "vhost-user", "socket": dir.text("a"), "queues": 2,
                       "poll/1": "timer:2000", "mac": ["02:00:00:00:00:01"] });
    let none = json!({ "warnings": [] });
    assert_eq!(call("PUT", "/v1/ports/a", port.clone()), (201, none));
    assert_eq!(call("PUT", "/v1/ports/a", port).0, 409);
    let (status, again) =
        call("PUT", "/v1/ports/b", json!({ "kind": "vhost-user", "socket": dir.text("a") }));
    assert!(
        status == 409 && again["detail"].as_str().unwrap().contains("is already used by port 'a'"),
        "{again}"
    );
    assert_eq!(call("PATCH", "/v1/ports/a", json!({ "weight": 3, "isolated": true })).0, 204);
    assert_eq!(call("PATCH", "/v1/ports/a/queues/0", json!({ "poll": "spin" })).0, 204);
    assert_eq!(call("PATCH", "/v1/settings", json!({ "placement": "single" })).0, 204);
    let stats = call("GET", "/v1/ports/a/stats", Value::Null).1;
    let of = |key: &str| [stats["ingress"][0][key].clone(), stats["ingress"][1][key].clone()];
    assert_eq!(of("poll"), [json!("spin"), json!("timer:2000")]);
    assert_eq!(of("weight"), [json!(3), json!(3)]);
    let show = call("GET", "/v1/ports/a", Value::Null).1;
    assert_eq!(show["rules"], json!({ "isolated": "on", "mac": "02:00:00:00:00:01" }));
    assert_eq!(call("PUT", "/v1/fdb/02:00:00:00:00:02?vlan=7", json!({ "port": "a" })).0, 204);
    assert_eq!(call("DELETE", "/v1/fdb/02:00:00:00:00:02", Value::Null).0, 404, "untagged");
    assert_eq!(call("DELETE", "/v1/fdb/02:00:00:00:00:02?vlan=7", Value::Null).0, 204);
    assert_eq!(call("PUT", "/v1/ports/a/drain", Value::Null).1["drain"], "drained");
    assert_eq!(call("DELETE", "/v1/ports/a/drain", Value::Null).1["drain"], "off");
    assert_eq!(call("DELETE", "/v1/ports/a", Value::Null), (204, Value::Null));
    assert_eq!(call("GET", "/v1/ports", Value::Null), (200, json!({ "ports": [] })));
    assert_eq!(call("POST", "/v1/shutdown", Value::Null).0, 204);
}

/// Issue 16, "Bad input": an error with field, value and remedy; the state stays as it was.
#[test]
fn bad_input_is_refused_with_field_value_and_remedy_and_changes_nothing() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",queues=2"), "n=null".into()]);
    let before = state(&switch);
    let long = "x".repeat(70_000);
    let body_of = |text: &str| format!("{{\"kind\":\"null\",\"weight\":{text}}}");
    let cases: &[(&str, &str, String, u16, &str)] = &[
        ("GET", "/v1/nothing", String::new(), 404, "path"),
        ("GET", "/v1/ports/b", String::new(), 404, "path.name"),
        ("GET", "/v1/ports/b/why", String::new(), 404, "path.name"),
        ("GET", "/v1/ports/a/why?seconds=1e9", String::new(), 400, "query.seconds"),
        ("PUT", "/v1/status", String::new(), 405, "method"),
        ("BREW", "/v1/ports", String::new(), 405, "method"),
        ("PUT", "/v1/ports/a%2f..%2fb", body_of("1"), 400, "path.name"),
        ("PUT", "/v1/ports/%0a2026", body_of("1"), 400, "path.name"),
        ("PUT", "/v1/ports/%22%7d", body_of("1"), 400, "path.name"),
        ("PUT", "/v1/ports/b", body_of("0"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("101"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("-1"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("1e400"), 400, "body"),
        ("PUT", "/v1/ports/b", body_of("18446744073709551616"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("null"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("{}"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("[[1]]"), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of("\"\\u0000\\n\""), 422, "body.weight"),
        ("PUT", "/v1/ports/b", body_of(&"[".repeat(5000)), 400, "body"),
        ("PUT", "/v1/ports/b", body_of("1").replace("null", "nul"), 422, "body.kind"),
        ("PUT", "/v1/ports/b", "{\"kind\":\"null\",\"size\":1}".into(), 422, "body.size"),
        (
            "PUT",
            "/v1/ports/b",
            "{\"kind\":\"vhost-user\",\"socket\":\"a\\nb\"}".into(),
            422,
            "body",
        ),
        ("PUT", "/v1/ports/b", long, 413, "body"),
        ("PUT", "/v1/ports/b", "{\"kind\":".into(), 400, "body"),
        ("PUT", "/v1/ports/b", "{} {}".into(), 400, "body"),
        ("PUT", "/v1/ports/b", String::new(), 400, "body"),
        ("PUT", "/v1/ports/n", body_of("1"), 409, "path.name"),
        ("PATCH", "/v1/ports/a", "{}".into(), 422, "body"),
        ("PATCH", "/v1/ports/a", "{\"weight\":3,\"hold\":99999}".into(), 422, "body.hold"),
        ("PATCH", "/v1/ports/a", "{\"weight\":3,\"vlan\":9999}".into(), 422, "body.vlan"),
        ("PATCH", "/v1/ports/a", "{\"weight\":3,\"socket\":\"/x\"}".into(), 422, "body.socket"),
        ("PATCH", "/v1/ports/a/queues/2", "{\"poll\":\"spin\"}".into(), 404, "path.queue"),
        (
            "PATCH",
            "/v1/ports/a/queues/0",
            "{\"weight\":3,\"mac\":\"none\"}".into(),
            422,
            "body.mac",
        ),
        (
            "PATCH",
            "/v1/settings",
            "{\"placement\":\"single\",\"poll\":\"x\"}".into(),
            422,
            "body.poll",
        ),
        ("PATCH", "/v1/settings", "{\"workers\":3}".into(), 422, "body.workers"),
        ("PUT", "/v1/fdb/02:00:00:00:00:02", "{\"port\":\"b\"}".into(), 404, "body.port"),
        (
            "PUT",
            "/v1/fdb/02:00:00:00:00:02?vlan=5000",
            "{\"port\":\"a\"}".into(),
            400,
            "query.vlan",
        ),
        ("DELETE", "/v1/fdb/02:00:00:00:00:09", String::new(), 404, "path.mac"),
        ("POST", "/v1/upgrade", "{\"program\":\"/no/such\"}".into(), 422, ""),
        ("POST", "/v1/upgrade", "{\"program\":\"relative\"}".into(), 400, "body.program"),
        ("POST", "/v1/reload?dry_run=maybe", String::new(), 400, "query.dry_run"),
        ("POST", "/v1/reload", String::new(), 409, ""),
        ("POST", "/v1/shutdown", "{\"now\":true}".into(), 400, "body"),
    ];
    for (method, target, body, status, field) in cases {
        let got = ask(switch.control(), method, target, body);
        let shown = format!("{method} {target} {:.60}: {}", body, got.body);
        assert_eq!(got.status, *status, "{shown}");
        assert_eq!(got.body["field"].as_str().unwrap_or_default(), *field, "{shown}");
        assert!(got.head.contains("Content-Type: application/problem+json"), "{}", got.head);
        for key in ["title", "detail", "remedy"] {
            assert!(got.body[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {shown}");
        }
        assert_eq!(got.head.contains("\r\nAllow: "), *status == 405, "{}", got.head);
    }
    assert_eq!(state(&switch), before);
    let control = ask(switch.control(), "GET", "/v1/status", "").body["control"].clone();
    let refused = control["refused"].as_object().unwrap();
    let refused: u64 = refused.values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(refused, cases.len() as u64, "{control}");
}

#[test]
fn malformed_partial_and_pipelined_requests() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["n=null".into()]);
    let before = state(&switch);
    for bytes in [&b"{\"cmd\":\"stats\"}\n"[..], b"\x16\x03\x01\x00\r\n", b"GET / HTTP/9\r\n\r\n"] {
        let got = answer(&raw(switch.control(), bytes));
        assert!([400, 505].contains(&got.status), "{bytes:?}: {}", got.body);
    }
    // Half a request is none.
    for bytes in [
        &b"DELETE /v1/ports/n HTTP/1.1\r\nHost: x\r\n"[..],
        b"PUT /v1/ports/b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
          Content-Length: 20\r\n\r\n{\"kind\":\"null\"}",
    ] {
        assert_eq!(raw(switch.control(), bytes), "");
    }
    // All of a hundred requests in one write are replied to, in order.
    let get = |n: usize| format!("GET /v1/ports/p{n} HTTP/1.1\r\nHost: x\r\n\r\n");
    let text: String = (0..100).map(get).collect();
    let replies = raw(switch.control(), text.as_bytes());
    let names: Vec<_> = replies.matches("no port 'p").collect();
    assert_eq!(names.len(), 100);
    let at = |n| replies.find(&format!("no port 'p{n}'")).unwrap();
    assert!((1..100).all(|n| at(n) > at(n - 1)));
    // Without a reply, a connection ends after its time; others are served meanwhile.
    let mut slow = UnixStream::connect(switch.control()).unwrap();
    slow.write_all(b"GET /v1/status HTTP/1.1\r\n").unwrap();
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(ask(switch.control(), "GET", "/v1/status", "").status, 200);
    }
    slow.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut reply = String::new();
    slow.read_to_string(&mut reply).unwrap();
    assert_eq!(answer(&reply).status, 408);
    assert!(began.elapsed() >= Duration::from_secs(9));
    assert_eq!(state(&switch), before);
}

#[test]
fn guest_replies_to_requests_sent_ahead_one_after_another() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let control = dir.text("gen");
    let sink = Gen::start(&dir.path("a"), &["--mode", "sink", "--control", &control]);
    switch.wait_up("a", true);
    let get = |n: usize| format!("GET /v1/none{n} HTTP/1.1\r\nHost: x\r\n\r\n");
    let text: String = (0..100).map(get).collect();
    let replies = raw(&control, text.as_bytes());
    let at = |n| {
        replies.find(&format!("no path /v1/none{n};")).unwrap_or_else(|| panic!("{n}: {replies}"))
    };
    assert!((1..100).all(|n| at(n) > at(n - 1)));
    // What is invalid ends its connection alone.
    let replies = raw(&control, format!("{}GET\r\n\r\n{}", get(1), get(2)).as_bytes());
    assert!(replies.contains("HTTP/1.1 400") && !replies.contains("none2"), "{replies}");
    assert_eq!(ask(&control, "GET", "/v1/stats", "").status, 200);
    drop(sink);
}

#[test]
fn client_that_does_not_read_its_reply_is_served_no_further() {
    const CLIENTS: u64 = 20;
    const REQUESTS: u64 = 200;
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["n=null".into()]);
    let requests = || {
        let status = ask(switch.control(), "GET", "/v1/status", "").body;
        status["control"]["requests"].as_u64().unwrap()
    };
    let before = requests();
    let text = "GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n".repeat(REQUESTS as usize);
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut stream = UnixStream::connect(switch.control()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        })
        .collect();
    for client in &clients {
        assert_eq!(rustix::net::recv(client, &mut [0; 1], RecvFlags::PEEK).unwrap().0, 1);
    }
    // One each, and this.
    assert_eq!(requests() - before, CLIENTS + 1);
    let (mut got, mut bytes) = (Vec::new(), [0; 65_536]);
    let count = |got: &[u8]| String::from_utf8_lossy(got).matches("HTTP/1.1 200 OK").count();
    while count(&got) < REQUESTS as usize {
        let n = clients[0].read(&mut bytes).unwrap();
        assert!(n > 0, "closed after {} replies", count(&got));
        got.extend_from_slice(&bytes[..n]);
    }
    assert_eq!(requests() - before, CLIENTS - 1 + REQUESTS + 2);
    // It is not behind any more, and continues.
    clients[0].write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    while !String::from_utf8_lossy(&got).contains("\"control\"") {
        let n = clients[0].read(&mut bytes).unwrap();
        got.extend_from_slice(&bytes[..n]);
    }
}

/// A stream of events.
struct Events(BufReader<UnixStream>);

impl Events {
    fn open(switch: &Switch) -> Self {
        let mut stream = UnixStream::connect(switch.control()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
        }
        assert!(head.contains("200 OK") && head.contains("text/event-stream"), "{head}");
        Self(reader)
    }

    /// The next event; `None`: the stream has ended.
    fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).unwrap());
            }
        }
    }

    /// Skips events until one with this name, about this port.
    fn wait(&mut self, event: &str, port: &str) -> Value {
        loop {
            let next = self.next().unwrap_or_else(|| panic!("the stream ended before {event}"));
            if next["event"] == event && (port.is_empty() || next["port"] == port) {
                return next;
            }
        }
    }
}

#[test]
fn events_report_ports_faults_rates_and_reloads() {
    let dir = Dir::new();
    let file = dir.path("x.toml");
    let port = format!("[port.a]\nkind = \"vhost-user\"\nsocket = \"{}\"\n", dir.text("a"));
    std::fs::write(&file, &port).unwrap();
    let switch = Switch::start(&dir, &["--config", file.to_str().unwrap()], &[]);
    let mut events = Events::open(&switch);
    // A second client has the same events.
    let mut second = Events::open(&switch);
    let mut sink = Gen::start(&dir.path("a"), &["--mode", "sink"]);
    let first = events.wait("port-up", "a");
    assert_eq!((&first["seq"], second.wait("port-up", "a")), (&1.into(), first.clone()));
    sink.0.kill();
    assert_eq!(events.wait("port-down", "a")["seq"], 2);
    std::fs::write(&file, port.clone() + "rate-in = \"1Mbit\"\n[port.n]\nkind = \"null\"\n")
        .unwrap();
    assert!(switch.ctl(&["reload"]).status.success());
    let reload = events.wait("reload", "");
    assert_eq!([&reload["added"], &reload["changed"], &reload["removed"]], [1, 1, 0]);
    events.wait("port-added", "n");
    events.wait("port-up", "n");
    let peer = ["--mode", "send", "--peer", "02:00:00:00:00:09", "--size", "1500", "--rate", "20k"];
    let sender = Gen::start(&dir.path("a"), &peer);
    events.wait("port-up", "a");
    assert_eq!(events.wait("rate-limited", "a")["way"], "in");
    drop(sender);
    assert!(switch.ctl(&["del-port", "n"]).status.success());
    events.wait("port-removed", "n");
    let hostile = ["--mode", "hostile=index-jumps", "--duration", "20"];
    let hostile = Gen::start(&dir.path("a"), &hostile);
    let fault = events.wait("fault", "a");
    assert!(fault["cause"].as_str().is_some_and(|cause| !cause.is_empty()), "{fault}");
    drop(hostile);
    let mut text = pvswitch();
    text.args(["ctl", "--control", switch.control(), "events"]);
    let child = text.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut ctl = common::Process(child);
    let streams =
        || ask(switch.control(), "GET", "/v1/status", "").body["control"]["streams"].clone();
    wait_for("ctl events", || streams() == 3);
    assert!(switch.ctl(&["shutdown"]).status.success());
    events.wait("shutdown", "");
    assert_eq!(events.next(), None);
    let text = std::io::read_to_string(ctl.0.stdout.take().unwrap()).unwrap();
    assert!(text.contains("shutdown\n") && ctl.wait().success(), "{text}");
}

#[test]
fn events_report_addresses_that_move_and_flap() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["a", "b"].map(|name| dir.port(name, "")));
    let (mut moves, mut flaps) = (Events::open(&switch), Events::open(&switch));
    let address = "02:00:00:00:00:07";
    let guest = ["--mac", address, "--peer", "02:00:00:00:00:09", "--rate", "1k"];
    let _guests = ["a", "b"].map(|name| Gen::start(&dir.path(name), &guest));
    for port in ["a", "b"] {
        let moved = moves.wait("mac-moved", port);
        assert!(moved["moves"].as_u64().is_some_and(|moves| moves > 0), "{moved}");
    }
    let flap = flaps.wait("mac-flaps", "");
    assert_eq!((&flap["mac"], &flap["vlan"]), (&address.into(), &0.into()), "{flap}");
    let mut between = [&flap["from"], &flap["to"]].map(|port| port.as_str().unwrap());
    between.sort_unstable();
    assert_eq!(between, ["a", "b"], "{flap}");
    assert!(flap["moves"].as_u64().is_some_and(|moves| moves > 0), "{flap}");
}

/// A reader that is too slow loses events, receives their number, and costs nobody else anything.
#[test]
fn a_slow_reader_of_events_loses_some_and_a_further_reader_is_refused() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let (mut slow, mut fast) = (Events::open(&switch), Events::open(&switch));
    let mut client = api::control::Client::connect(switch.control().as_ref()).unwrap();
    let control = |client: &mut api::control::Client| {
        client.call(&api::Request::Show).unwrap()["control"].clone()
    };
    let port = "n=null".parse().unwrap();
    let mut rounds = 0;
    while control(&mut client)["events_lost"] == 0 {
        for _ in 0..50 {
            client.call(&api::Request::add_port(&port)).unwrap();
            client.call(&api::Request::DelPort { name: "n".into() }).unwrap();
            // Added, up, down, removed.
            for event in ["port-added", "port-up", "port-down", "port-removed"] {
                assert_eq!(fast.next().unwrap()["event"], event);
            }
            rounds += 1;
        }
        assert!(rounds < 20_000, "nothing is ever lost");
    }
    let lost = slow.wait("lost", "");
    let (count, seq) = (lost["events"].as_u64().unwrap(), lost["seq"].as_u64().unwrap());
    assert!(count > 0 && seq > count, "{lost}");
    client.call(&api::Request::add_port(&port)).unwrap();
    let next = slow.wait("port-added", "n");
    assert!(next["seq"].as_u64().unwrap() > seq, "{next}");
    let more: Vec<_> = (2..16).map(|_| Events::open(&switch)).collect();
    let refused = ask(switch.control(), "GET", "/v1/events", "");
    assert_eq!((refused.status, more.len()), (503, 14), "{}", refused.body);
    drop((more, slow));
    wait_for("room", || control(&mut client)["streams"] == 1);
}

/// The reply to `why` is that of `ctl why`, and arrives after the time that was requested; nobody
/// else waits for it.
#[test]
fn why_replies_after_two_samples_and_delays_no_other_client() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), "n=null".into()]);
    let control = switch.control();
    let get = |target: &str| {
        let got = ask(control, "GET", target, "");
        (got.status, got.body)
    };
    // Without traffic, all but the time between the samples is the same.
    let (status, mut own) = get("/v1/ports/a/why?seconds=0.3");
    let mut of_ctl = switch.json(&["why", "a", "--seconds", "0.3"]);
    for reply in [&mut own, &mut of_ctl] {
        let seconds = reply["seconds"].take().as_f64().unwrap();
        assert!((0.3..30.0).contains(&seconds), "{seconds}");
    }
    assert_eq!(of_ctl.as_object_mut().unwrap().remove("ok"), Some(true.into()));
    assert_eq!((status, &own), (200, &of_ctl));
    assert_eq!(own["findings"][0]["cause"], "unconnected");

    // Requests sent ahead are replied to after it.
    let text = ["why?seconds=0.2", "why?seconds=0", "stats"]
        .map(|what| format!("GET /v1/ports/n/{what} HTTP/1.1\r\nHost: x\r\n\r\n"));
    let replies = raw(control, text.concat().as_bytes());
    let statuses: Vec<_> = replies.matches("HTTP/1.1 200 OK").collect();
    assert!(statuses.len() == 3 && replies.trim_end().ends_with('}'), "{replies}");
    let at = |word| replies.find(word).unwrap();
    assert!(at("\"findings\"") < at("\"egress\""), "{replies}");

    let connections = || get("/v1/status").1["control"]["connections"].clone();
    let ask_long = |target: &str| {
        let mut stream = UnixStream::connect(control).unwrap();
        let text = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    wait_for("the others to end", || connections() == 0);
    let waiting: Vec<_> = (0..16).map(|_| ask_long("/v1/ports/a/why?seconds=60")).collect();
    // Also what they send meanwhile costs nothing.
    for mut stream in &waiting {
        stream.write_all(b"GET /v1/status HTTP/1.1\r\n").unwrap();
    }
    wait_for("a refusal", || get("/v1/ports/a/why?seconds=0").0 == 503);
    drop(waiting);
    wait_for("room", || connections() == 0);
    assert_eq!(get("/v1/ports/a/why?seconds=0").0, 200);

    // The port may be removed while the client waits.
    wait_for("a removal between the samples", || {
        let requests = || get("/v1/status").1["control"]["requests"].as_u64().unwrap();
        let before = requests();
        let mut stream = ask_long("/v1/ports/n/why?seconds=1");
        let mut own = 1;
        while requests() < before + own + 1 {
            own += 1;
        }
        assert_eq!(ask(control, "DELETE", "/v1/ports/n", "").status, 204);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let body = "{\"kind\":\"null\"}";
        assert_eq!(ask(control, "PUT", "/v1/ports/n", body).status, 201);
        answer(&reply).status == 404
    });
    assert_eq!(get("/v1/ports/b/why").0, 404);
}

/// Connections that send nothing do not keep others out, whoever opened them.
#[test]
fn idle_connections_make_room_for_others() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let idle: Vec<_> = (0..80).map(|_| UnixStream::connect(switch.control()).unwrap()).collect();
    let mut events = Events::open(&switch);
    let _more: Vec<_> = (0..80).map(|_| UnixStream::connect(switch.control()).unwrap()).collect();
    let control = ask(switch.control(), "GET", "/v1/status", "").body["control"].clone();
    assert!(control["connections"].as_u64().unwrap() <= 64, "{control}");
    assert!(control["closed_for_others"].as_u64().unwrap() > 80, "{control}");
    assert!(switch.ctl(&["add-port", "n=null"]).status.success());
    events.wait("port-added", "n");
    drop(idle);
}

#[test]
fn the_example_in_python_runs() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/api.py");
    let out = match std::process::Command::new("python3").args([example, switch.control()]).output()
    {
        Ok(out) => out,
        Err(error) => return println!("skipped: python3: {error}"),
    };
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for want in
        ["with 0 ports", "state: unconnected", "refused, 422: weight", "port-removed example"]
    {
        assert!(text.contains(want), "{want}: {text}");
    }
}
