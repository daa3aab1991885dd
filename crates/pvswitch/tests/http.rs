//! `run --http`: replies, clients, and clients that do not follow the protocol.

mod common;

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use serde_json::Value;

const DASHBOARD: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/monitoring/grafana.json"));
const ALERTS: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/monitoring/alerts.yml"));
/// More than the maximum time of a client.
const PATIENCE: Duration = Duration::from_secs(30);

struct Answer {
    status: u16,
    head: String,
    body: String,
}

fn answer(mut stream: impl Read) -> Answer {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect(&text);
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect(&text);
    Answer { status, head: head.to_lowercase(), body: body.into() }
}

/// `host:port` of a switch's HTTP server, from `ctl show`.
fn address(switch: &Switch) -> String {
    let url = switch.json(&["show"])["http"].as_str().unwrap().to_string();
    url.strip_prefix("http://").unwrap().trim_end_matches('/').to_string()
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn ask(address: &str, method: &str, path: &str) -> Answer {
    let mut stream = connect(address);
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    answer(stream)
}

/// Parses a line that is not a comment: name, labels, value.
fn sample(line: &str) -> (String, Vec<(String, String)>, f64) {
    let (series, value) = line.rsplit_once(' ').expect(line);
    let value = value.parse().expect(line);
    let Some((name, labels)) = series.split_once('{') else {
        return (series.into(), Vec::new(), value);
    };
    let labels = labels.strip_suffix("\"}").expect(line).split("\",");
    let labels = labels.map(|label| {
        let (name, value) = label.split_once("=\"").expect(line);
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
        (name.to_string(), value.to_string())
    });
    (name.into(), labels.collect(), value)
}

/// Reads the text format as Prometheus does; returns values by name and labels.
fn parsed(text: &str) -> HashMap<String, f64> {
    let (mut kinds, mut helped) = (HashMap::new(), HashSet::new());
    let (mut values, mut current) = (HashMap::new(), String::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').expect(line);
            assert!(!help.is_empty() && helped.insert(name.to_string()), "twice: {line}");
            current = name.into();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect(line);
            assert_eq!(name, current, "HELP comes before TYPE");
            assert!(["counter", "gauge", "summary"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(kinds.insert(name.to_string(), kind.to_string()).is_none(), "{line}");
        } else {
            let (name, labels, value) = sample(line);
            let summary = kinds[&current] == "summary";
            let of = |suffix: &str| name.strip_suffix(suffix) == Some(current.as_str());
            assert!(name == current || summary && (of("_sum") || of("_count")), "{line}");
            assert!(name.starts_with("pvswitch_") && value >= 0.0, "{line}");
            let names: HashSet<_> = labels.iter().map(|(name, _)| name).collect();
            assert_eq!(names.len(), labels.len(), "{line}");
            let series = line.rsplit_once(' ').unwrap().0.to_string();
            assert!(values.insert(series, value).is_none(), "twice: {line}");
        }
    }
    values
}

#[test]
fn metrics_parse_and_agree_with_stats() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",queues=2"), dir.port("b", ""), "n=null".into()];
    let switch = Switch::start(&dir, &["--http", "0", "--workers", "2"], &ports);
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let args = ["--rate", "2k", "--duration", "0.2"];
    let sent = Gen::start(&dir.path("a"), &args).report()["sent_frames"].as_u64().unwrap();
    let answer = ask(&address(&switch), "GET", "/metrics");
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    let values = parsed(&answer.body);
    let value = |series: &str| *values.get(series).unwrap_or_else(|| panic!("{series}"));
    assert_eq!(value(r#"pvswitch_ingress_frames_total{port="a",queue="0"}"#), sent as f64);
    assert_eq!(value(r#"pvswitch_port_up{port="b"}"#), 1.0);
    assert_eq!(value(r#"pvswitch_port_up{port="a"}"#), 0.0);
    assert!(value(r#"pvswitch_worker_cpu_seconds_total{worker="0"}"#) > 0.0);
    let commands = r#"{lock="commands"}"#;
    assert!(value(&format!("pvswitch_lock_taken_total{commands}")) > 0.0, "a worker began");
    assert!(value(&format!("pvswitch_lock_waited_seconds_total{commands}")) >= 0.0);
    assert_eq!(value(r#"pvswitch_ingress_drops_total{port="a",queue="1",cause="runt"}"#), 0.0);
    // Every entry of an account is exported.
    let account = switch.port("stats", "a")["account"].clone();
    for (name, entry) in account.as_object().unwrap().iter().filter(|(_, e)| e.is_object()) {
        let series =
            |metric: &str| format!("pvswitch_account_{metric}{{port=\"a\",resource=\"{name}\"}}");
        // Resources in use may have been released in the meantime.
        assert!(["used", "refused_total"].into_iter().all(|metric| value(&series(metric)) >= 0.0));
        assert_eq!(value(&series("limit")), entry["limit"].as_f64().unwrap(), "{name}");
    }
    assert!(value(r#"pvswitch_budget_used{resource="mapped-bytes"}"#) > 0.0, "b is up");
    // And every number of the control socket.
    let control = switch.json(&["show"])["control"].clone();
    for (key, _) in control.as_object().unwrap().iter().filter(|(_, n)| n.is_number()) {
        let cause = key.strip_prefix("closed_").unwrap_or_default();
        let series = ["", "_total"].map(|end| format!("pvswitch_control_{key}{end}"));
        let closed = format!("pvswitch_control_closed_total{{cause=\"{cause}\"}}");
        let mut known = series.iter().chain([&closed]);
        assert!(known.any(|series| values.contains_key(series)), "{key}");
    }
    assert!(value("pvswitch_control_requests_total") > 0.0);
    let types = answer.body.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let types: Vec<_> = types.filter_map(|line| line.split(' ').next()).collect();
    for text in [DASHBOARD, ALERTS] {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let mut used: Vec<_> = words.filter(|word| word.starts_with("pvswitch_")).collect();
        used.retain(|name| {
            !types.iter().any(|known| {
                *name == *known
                    || ["_sum", "_count"].iter().any(|s| name.strip_suffix(s) == Some(known))
            })
        });
        assert!(used.is_empty(), "not exported: {used:?}");
    }
    // Every counter of `stats` is exported, under its name or as a cause.
    let stats = switch.json(&["stats"]);
    for way in ["ingress", "egress"] {
        for (name, counter) in stats["ports"][0][way][0].as_object().unwrap() {
            let base = name.trim_end_matches("_ns");
            let known = match name.strip_prefix("drops_") {
                Some(cause) => answer.body.contains(&format!("cause=\"{cause}\"")),
                None if name.starts_with("first_frame") => true,
                // Copies of the egress queue's values, for scripts.
                None if way == "ingress" && ["hold", "held"].contains(&name.as_str()) => true,
                None => answer.body.contains(&format!("\npvswitch_{way}_{base}")),
            };
            assert!(known, "{way} {name} {counter}");
        }
    }
}

#[test]
fn json_equals_that_of_ctl_and_the_page_has_no_external_resources() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "127.0.0.1:0"], &["n=null".into()]);
    let address = address(&switch);
    for what in ["show", "stats", "fdb"] {
        let answer = ask(&address, "GET", &format!("/{what}?x=1"));
        assert_eq!(answer.status, 200);
        assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
        let (http, ctl) =
            (serde_json::from_str::<Value>(&answer.body).unwrap(), switch.json(&[what]));
        assert_eq!(http["ports"], ctl["ports"]);
        let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&http), keys(&ctl));
    }
    let page = ask(&address, "GET", "/");
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: text/html"), "{}", page.head);
    assert!(page.body.contains("color-scheme: light dark"));
    // A name, which is not fetched.
    let page = page.body.replace("http://www.w3.org/2000/svg", "");
    for outside in ["http:", "https:", "src=", "@import", "innerHTML"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

/// Number of times that the HTTP thread gave up the CPU: it slept, or waited.
#[test]
fn last_events_are_those_of_the_control_socket_with_their_severity() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "0"], &[dir.port("a", "")]);
    let address = address(&switch);
    let events = || -> Vec<Value> {
        let answer: Value = serde_json::from_str(&ask(&address, "GET", "/events").body).unwrap();
        answer["events"].as_array().unwrap().clone()
    };
    assert_eq!(events(), Vec::<Value>::new());
    // Ports are compared while somebody looks.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let end = Instant::now() + 2 * PATIENCE;
            while !over.load(Ordering::Relaxed) && Instant::now() < end {
                events();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let guest = Gen::start(&dir.path("a"), &["--mode", "sink"]);
        switch.wait_up("a", true);
        drop(guest);
        switch.wait_up("a", false);
        over.store(true, Ordering::Relaxed);
    });
    let of = |events: &[Value], key: &str| -> Vec<String> {
        events.iter().map(|event| event[key].as_str().unwrap().into()).collect()
    };
    wait_for("both events", || events().len() == 2);
    let seen = events();
    assert_eq!(of(&seen, "event"), ["port-up", "port-down"]);
    assert_eq!(of(&seen, "severity"), ["info", "warning"]);
    assert_eq!(of(&seen, "port"), ["a", "a"]);
    assert_eq!(ask(&address, "POST", "/events").status, 405);
}

fn waits_of_http(switch: &Switch) -> u64 {
    let tasks = format!("/proc/{}/task", switch.process.0.id());
    let tasks = std::fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path());
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let http = tasks.into_iter().find(|task| read(task.join("comm")) == "http\n").unwrap();
    let status = read(http.join("status"));
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn history_is_recorded_while_a_page_is_open_and_not_otherwise() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let switch = Switch::start(&dir, &["--http", "0"], &ports);
    let address = address(&switch);
    let live = |query: &str| -> Value {
        let answer = ask(&address, "GET", &format!("/live{query}"));
        assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
        serde_json::from_str(&answer.body).unwrap()
    };
    let first = live("");
    assert_eq!((first["samples"].as_array().unwrap().len(), &first["kept_s"]), (0, &600.0.into()));
    assert_eq!(first["stats"]["ports"][0]["name"], "a");
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let sender = Gen::start(&dir.path("a"), &["--rate", "2k"]);
    let mut last = 0.0;
    common::wait_for("two samples with traffic", || {
        let reply = live("");
        let samples = reply["samples"].as_array().unwrap();
        last = samples.last().map_or(0.0, |sample| sample["at"].as_f64().unwrap());
        let traffic = |s: &&Value| s["ports"]["a"][0].as_u64().is_some_and(|rate| rate > 100);
        samples.iter().filter(traffic).count() >= 2
    });
    let after = live(&format!("?since={last}"));
    assert!(after["samples"].as_array().unwrap().len() <= 1, "only later ones: {after}");
    assert!(live("?since=x")["samples"].as_array().unwrap().len() >= 2, "all of them");
    sender.end();
    // Nobody asks any more.
    let mut seen = (waits_of_http(&switch), Instant::now());
    common::wait_for("the HTTP thread to sleep for longer than between samples", || {
        let now = waits_of_http(&switch);
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        seen.1.elapsed() > Duration::from_secs(4)
    });
    assert!(live("")["samples"].as_array().unwrap().len() >= 2, "what was recorded remains");
}

#[test]
fn unsupported_requests_are_rejected() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "0"], &["n=null".into()]);
    let address = address(&switch);
    for path in ["/nope", "/metrics/", "//", "/../show"] {
        let answer = ask(&address, "GET", path);
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.body.contains("/metrics"), "{}", answer.body);
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "SHUTDOWN"] {
        let answer = ask(&address, method, "/stats");
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("allow: get, head"), "{}", answer.head);
    }
    let [get, head] = ["GET", "HEAD"].map(|method| ask(&address, method, "/"));
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    let length = format!("content-length: {}", get.body.len());
    assert!(head.head.contains(&length), "{}", head.head);
    let mut stream = connect(&address);
    stream.write_all(b"nonsense\r\n\r\n").unwrap();
    assert_eq!(answer(stream).status, 400);
    let mut stream = connect(&address);
    let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(10_000));
    stream.write_all(long.as_bytes()).unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 431");
    assert!(switch.ctl(&["show"]).status.success());
}

#[test]
fn slow_clients_are_disconnected_and_others_are_served() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "0"], &["n=null".into()]);
    let address = address(&switch);
    // As many as the maximum, each with half a request.
    let slow: Vec<_> = (0..16)
        .map(|_| {
            let mut stream = connect(&address);
            stream.write_all(b"GET /stats HTTP/1.1\r\nHo").unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    assert_eq!(ask(&address, "GET", "/stats").status, 200);
    assert!(began.elapsed() > Duration::from_secs(1), "clients were not limited");
    for mut stream in slow {
        let mut rest = Vec::new();
        // Disconnected: end of file or a reset.
        let _ = stream.read_to_end(&mut rest);
        assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
    }
    assert!(began.elapsed() < PATIENCE);
    assert!(switch.ctl(&["show"]).status.success());
}

#[test]
fn unix_socket_is_served_and_removed() {
    let dir = Dir::new();
    let http = format!("unix:{}", dir.text("http"));
    let mut switch = Switch::start(&dir, &["--http", &http], &["n=null".into()]);
    assert_eq!(switch.json(&["show"])["http"], http.as_str());
    let mut stream = UnixStream::connect(dir.path("http")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /show HTTP/1.0\r\n\r\n").unwrap();
    assert!(answer(stream).body.contains("\"ok\":true"));
    assert_eq!(switch.process.end().code(), Some(0));
    assert!(!dir.path("http").exists());
}

#[test]
fn invalid_addresses() {
    let dir = Dir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let missing = format!("unix:{}", dir.text("no/such/dir"));
    let bad = [
        (taken.as_str(), 1, "another process listens there: choose another port"),
        ("192.0.2.1:9999", 1, "use an address of this machine"),
        (missing.as_str(), 1, "directory does not exist"),
        ("localhost", 2, "use HOST:PORT, PORT alone for 127.0.0.1, unix:PATH, or fd=NAME"),
        ("unix:", 2, "invalid listening address"),
        ("127.0.0.1:99999", 2, "invalid listening address"),
    ];
    let run = |args: &[&str]| {
        let control = dir.text("ctl");
        let mut command = pvswitch();
        command.args(["run", "--control", &control, "--duration", "5"]).args(args);
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    for (address, status, want) in bad {
        let (code, error) = run(&["--http", address]);
        assert_eq!(code, Some(status), "{address}: {error}");
        assert!(error.contains(want) && !error.contains("panicked"), "{address}: {error}");
    }
    let file = dir.text("x.toml");
    std::fs::write(&file, "http = \"host\"\n").unwrap();
    let (code, error) = run(&["--config", &file]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("x.toml:1:8:") && error.contains("use HOST:PORT"), "{error}");
}

#[test]
fn remote_access_is_warned_of() {
    const WARNING: &str = "can be reached from other machines";
    let dir = Dir::new();
    let file = dir.text("x.toml");
    std::fs::write(&file, "http = \"0.0.0.0:0\"\n").unwrap();
    let open = Switch::start(&dir, &["--config", &file], &["n=null".into()]);
    assert!(open.log().contains(WARNING), "{}", open.log());
    let dir = Dir::new();
    let closed = Switch::start(&dir, &["--http", ":0"], &["n=null".into()]);
    assert!(!closed.log().contains(WARNING), "{}", closed.log());
}
