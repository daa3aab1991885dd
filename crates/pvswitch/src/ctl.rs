//! `pvswitch ctl`: queries a running switch; prints tables for people, JSON for scripts.

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use api::Request;
use api::control::{Client, ControlError, default_path};
use api::near::did_you_mean;
use api::schema::port::{LIMIT, common};
use api::schema::{Type, bytes_text};
use serde_json::{Map, Value};

use crate::cli::{CtlArgs, CtlCommand, FdbCommand};
use crate::demo::format::{plural, si, time_ns};
use crate::error::{AnyError, Usage};

/// Maximum time to wait for a port to be drained.
const DRAIN_MAX: Duration = Duration::from_secs(3);
/// Interval between queries in that time.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);

/// Runs `pvswitch ctl`.
pub fn command(args: CtlArgs) -> Result<(), AnyError> {
    let path = args.control.map_or_else(default_path, Ok)?;
    let only = match &args.what {
        CtlCommand::Show { name } | CtlCommand::Stats { name } => name.clone(),
        _ => None,
    };
    let request = match args.what {
        CtlCommand::Show { .. } => Request::Show,
        CtlCommand::Stats { .. } => Request::Stats,
        CtlCommand::AddPort { port } => Request::add_port(&port.0),
        CtlCommand::DelPort { name } => Request::DelPort { name },
        CtlCommand::Fdb { what: None } => Request::Fdb,
        CtlCommand::Fdb { what: Some(FdbCommand::Add { mac, port, vlan }) } => {
            Request::FdbAdd { mac, port, vlan }
        }
        CtlCommand::Fdb { what: Some(FdbCommand::Del { mac, vlan }) } => {
            Request::FdbDel { mac, vlan }
        }
        CtlCommand::Set { mut what } => {
            let target = (!what[0].contains('=')).then(|| what.remove(0));
            Request::set(target.as_deref(), &what).map_err(Usage)?
        }
        CtlCommand::Drain { name, off: false } => Request::Drain { name },
        CtlCommand::Drain { name, off: true } => Request::Resume { name },
        CtlCommand::Events => return events(&path, args.json),
        CtlCommand::Reload { dry_run } => Request::Reload { dry_run },
        CtlCommand::Save { file } => {
            return crate::save::command(&path, file.as_deref(), args.json);
        }
        CtlCommand::Why { name, seconds } => {
            return crate::why::command(&path, &name, seconds, args.json);
        }
        CtlCommand::Upgrade { program } => {
            Request::Upgrade { program: program.map(std::path::absolute).transpose()? }
        }
        CtlCommand::Shutdown => Request::Shutdown,
    };
    let mut client = Client::connect(&path)?;
    let mut answer = answer_to(&request, &mut client)?;
    if let Some(name) = &only {
        select(&mut answer, name)?;
    }
    if args.json {
        if answer.is_null() {
            answer = Value::Object(Map::new());
        }
        answer["ok"] = true.into();
        println!("{answer}");
    } else {
        print(&request, &answer, only.is_some());
    }
    Ok(())
}

/// Sends a request, or the requests that it takes, and returns the answer.
fn answer_to(request: &Request, client: &mut Client) -> Result<Value, ControlError> {
    match request {
        Request::Drain { name } | Request::Resume { name } => drain(client, request, name),
        Request::SetPort { name, settings } if let Ok(queue) = name.parse() => {
            set_number(client, queue, settings, request)
        }
        _ => client.call(request),
    }
}

/// Prints an answer for people; `of_one`: it is that of one port.
fn print(request: &Request, answer: &Value, of_one: bool) {
    for warning in list(answer, "warnings") {
        eprintln!("warning: {}", problem(warning));
    }
    match request {
        Request::Show => show(answer, of_one),
        Request::Stats if answer["guest"].is_string() => guest_stats(answer),
        Request::Stats => stats(answer),
        Request::Fdb => fdb(answer),
        Request::Reload { .. } => reload(answer),
        Request::Upgrade { .. } => {
            println!("handed over to {}, pid {}", text(&answer["program"]), answer["pid"]);
        }
        _ => {}
    }
}

/// Sets a queue pair of a guest or, if the socket is a switch's, a port whose name is a number.
fn set_number(
    client: &mut Client,
    queue: u16,
    settings: &Map<String, Value>,
    of_port: &Request,
) -> Result<Value, ControlError> {
    match client.call(&Request::SetPair { queue, settings: settings.clone() }) {
        // A switch has no such path, and has changed nothing.
        Err(ControlError::Refused(p)) if p.field.as_deref() == Some("path") => client.call(of_port),
        other => other,
    }
}

/// Fields of an event that are for programs.
const HIDDEN: [&str; 4] = ["event", "seq", "severity", "time_ms"];

/// Prints events until the switch ends.
fn events(path: &Path, json: bool) -> Result<(), AnyError> {
    let stream = Client::connect(path)?.open(&Request::Events)?;
    stream.get_ref().set_read_timeout(None)?;
    for line in stream.lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if json {
            writeln!(std::io::stdout(), "{data}")?;
            continue;
        }
        let event: Map<String, Value> = serde_json::from_str(data)?;
        let fields = event.iter().filter(|(key, _)| !HIDDEN.contains(&&***key));
        let fields = fields.map(|(key, value)| match value {
            Value::String(text) => format!(" {key}={}", text.escape_debug()),
            other => format!(" {key}={other}"),
        });
        let name = event.get("event").map_or("", text);
        writeln!(std::io::stdout(), "{name}{}", fields.collect::<String>())?;
    }
    Ok(())
}

/// A problem of a configuration, with its place if it has one.
fn problem(problem: &Value) -> String {
    let what = text(&problem["what"]);
    match problem["file"].as_str() {
        Some(file) => format!("{file}:{}:{}: {what}", problem["line"], problem["column"]),
        None => what.into(),
    }
}

/// What a reload changed, or would change.
fn reload(answer: &Value) {
    let settings = |of: &Value, key: &str| {
        let all = list(of, key).map(|setting| {
            let [name, from, to] = ["setting", "from", "to"].map(|key| text(&setting[key]));
            format!("{name} {from} -> {to}")
        });
        all.collect::<Vec<_>>().join(", ")
    };
    let mut lines = Vec::new();
    for key in ["removed", "added"] {
        lines.extend(list(answer, key).map(|name| format!("{key:9} {}", text(name))));
    }
    for key in ["replaced", "changed"] {
        let of = |port: &Value| {
            format!("{key:9} {}: {}", text(&port["name"]), settings(port, "settings"))
        };
        lines.extend(list(answer, key).map(of));
    }
    for (key, what) in [("settings", "switch"), ("restart", "restart needed:")] {
        let all = settings(answer, key);
        lines.extend((!all.is_empty()).then(|| format!("{what:9} {all}")));
    }
    for (key, sign) in [("static_removed", "removed"), ("static", "set to")] {
        let of =
            |s: &Value| format!("static    {} {sign} {}", text(&s["address"]), text(&s["port"]));
        lines.extend(list(answer, key).map(of));
    }
    let state = match (lines.is_empty(), answer["dry_run"] == true) {
        (true, _) => "no difference",
        (false, true) => "differs, nothing was changed",
        (false, false) => "reloaded",
    };
    println!("{}: {state}", text(&answer["file"]));
    lines.iter().for_each(|line| println!("{line}"));
}

/// Keeps only this port in a reply.
fn select(answer: &mut Value, name: &str) -> Result<(), ControlError> {
    let named = |port: &Value| port["name"] == name;
    if !list(answer, "ports").any(named) {
        let hint = did_you_mean(name, list(answer, "ports").map(|port| text(&port["name"])));
        let hint = if hint.is_empty() { "; ctl show lists all".into() } else { hint };
        return Err(ControlError::missing(format!("no port '{name}'{hint}")));
    }
    if let Some(ports) = answer["ports"].as_array_mut() {
        ports.retain(named);
    }
    Ok(())
}

/// Aligns cells in columns two spaces apart, numbers (all but those of `left`) to the right.
fn columns(rows: &[Vec<String>], left: &[usize]) -> Vec<String> {
    let widest = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..rows.first().map_or(0, Vec::len)).map(widest).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(i, (cell, width))| match left.contains(&i) {
            true => format!("{cell:width$}"),
            false => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// Indent of lines that belong to a port.
const INDENT: &str = "    ";

/// Repeats the request until the port is drained, up to [`DRAIN_MAX`].
fn drain(client: &mut Client, request: &Request, name: &str) -> Result<Value, ControlError> {
    let end = Instant::now() + DRAIN_MAX;
    loop {
        let answer = client.call(request)?;
        if answer["drain"] != "draining" {
            return Ok(answer);
        }
        if Instant::now() >= end {
            return Err(ControlError::missing(format!(
                "port '{name}' is still draining after {} s: its worker has not confirmed; \
                 repeat the command, or cancel it: `pvswitch ctl drain {name} --off`",
                DRAIN_MAX.as_secs()
            )));
        }
        std::thread::sleep(DRAIN_INTERVAL);
    }
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn show(answer: &Value, details: bool) {
    println!(
        "pvswitch {}, pid {}, up {} s, forward {}, poll {}, {}",
        text(&answer["version"]),
        answer["pid"],
        answer["uptime_s"],
        text(&answer["forward"]),
        text(&answer["poll"]),
        plural(answer["workers"].as_u64().unwrap_or(0), "worker"),
    );
    if let Some(name) = answer["xen_auto"].as_str() {
        println!("{name}: each vif of this domain is added as a port (xen:auto)");
    }
    if let Some(fdb) = addresses(&answer["fdb"]) {
        println!("{fdb}");
    }
    keeping(&answer["keep"]).iter().for_each(|line| println!("{line}"));
    let heads = ["PORT", "STATE", "QUEUES", "FAULTS", "KIND"].map(String::from).to_vec();
    let row = |port: &Value| {
        let fallback = if port["up"] == true { "up" } else { "down" };
        vec![
            text(&port["name"]).into(),
            port["state"].as_str().unwrap_or(fallback).into(),
            format!("{}/{}", port["queues_active"], port["queues"]),
            port["faults"].to_string(),
            text(&port["kind"]).into(),
        ]
    };
    let rows: Vec<_> = std::iter::once(heads).chain(list(answer, "ports").map(row)).collect();
    let mut lines = columns(&rows, &[0, 1, 4]).into_iter();
    lines.next().iter().for_each(|heads| println!("{heads}"));
    for (port, line) in list(answer, "ports").zip(lines) {
        println!("{line}");
        about_port(port, details).iter().for_each(|line| println!("{INDENT}{line}"));
    }
}

/// What happens to guests if the process is killed; `None`: its state is not to be kept.
fn keeping(keep: &Value) -> Option<&'static str> {
    match text(keep) {
        "on" => Some("keep on: after a kill of this process, the next one continues its ports"),
        "failed" => Some(
            "keep failed: the state is not kept, and after a kill guests must reconnect; the log \
             says why",
        ),
        _ => None,
    }
}

/// The pair of an active and a standby port that a port is in.
fn pair(standby: &Value) -> Option<String> {
    let other = standby["other"].as_str()?;
    Some(match (standby["preferred"] == true, standby["carries"] == true) {
        (true, true) => format!("port {other} is the standby"),
        (true, false) => format!("port {other}, its standby port, carries the frames"),
        (false, true) => format!("took over from port {other}"),
        (false, false) => format!("standby of port {other}"),
    })
}

/// How full the FDB is.
fn addresses(fdb: &Value) -> Option<String> {
    let capacity = fdb["capacity"].as_u64()?;
    let (learned, fixed) = (&fdb["learned"], &fdb["static"]);
    Some(format!("addresses: {learned} learned and {fixed} static, of at most {capacity}"))
}

/// What there is to say of a port beyond its row.
fn about_port(port: &Value, details: bool) -> Vec<String> {
    let mut lines = Vec::new();
    let features: Vec<_> = list(port, "features").map(text).collect();
    if !features.is_empty() {
        lines.push(features.join(" "));
    }
    match text(&port["state"]) {
        _ if !details => {}
        "unconnected" => lines.push("no peer is connected to its socket".into()),
        "no-driver" => {
            lines.push("a front-end is connected; its guest has no driver for it yet".into());
        }
        _ => {}
    }
    if port["dirty_log"] == true {
        lines.push("migrates: pages written to its memory are logged".into());
    }
    if let Some(other) = port["wired_to"].as_str() {
        lines.push(format!("wired to {other}: they exchange all frames"));
    }
    lines.extend(pair(&port["standby"]));
    if port["xen"].is_object() {
        lines.push(vif(&port["xen"]));
    } else if let Some(s) = port["stalled_s"].as_u64() {
        lines.push(format!("receiver stalled for {s} s: its driver posts no buffers"));
    }
    lines.extend(bridge(&port["evpn"]));
    lines.extend(rules(port).map(|rules| format!("rules    {rules}")));
    lines.extend(errors(port).map(|errors| format!("errors   {errors}")));
    lines.extend(refused(&port["account"]).map(|refused| format!("refused  {refused}")));
    if details {
        lines.extend(account(port));
    }
    lines
}

/// The bridge of a TAP, and what is wrong with it.
fn bridge(evpn: &Value) -> Vec<String> {
    let Some(bridge) = evpn["bridge"].as_str() else { return Vec::new() };
    let vnis: Vec<_> = list(evpn, "vnis").map(Value::to_string).collect();
    let vnis = if vnis.is_empty() { "no VNI".into() } else { format!("VNI {}", vnis.join(", ")) };
    let counts = ["announced", "pending", "yielded", "duplicate", "remote"].iter();
    let counts = counts.filter(|name| **name == "announced" || evpn[**name] != 0);
    let counts: Vec<_> = counts.map(|name| format!("{} {name}", evpn[*name])).collect();
    let state = format!("bridge   {bridge}, {vnis}; addresses: {}", counts.join(", "));
    let problems = list(evpn, "problems").map(|what| format!("problem  {}", text(what)));
    std::iter::once(state).chain(problems).collect()
}

/// What the port's peer uses, and its limits.
fn account(port: &Value) -> Vec<String> {
    let mut rows = vec![["RESOURCE", "USED", "LIMIT"].map(String::from).to_vec()];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    if let Some(limit) = port["addresses_limit"].as_u64() {
        rows.push(vec!["addresses".into(), port["addresses"].to_string(), limit.to_string()]);
    }
    for (name, entry) in port["account"].as_object().into_iter().flatten() {
        if entry.is_object() {
            let per = if entry["per_second"] == true { "/s" } else { "" };
            let limit = format!("{}{per}", limit_text(name, number(&entry["limit"])));
            rows.push(vec![name.clone(), limit_text(name, number(&entry["used"])), limit]);
        }
    }
    columns(&rows, &[0])
}

/// A port's rules, as options; `None`: it has none.
fn rules(port: &Value) -> Option<String> {
    let all = port["rules"].as_object()?.iter();
    let all: Vec<_> = all.map(|(name, value)| format!("{name}={}", text(value))).collect();
    Some(all.join(" "))
}

/// A front-end's errors, counted by cause, and the last one; `None`: no errors.
fn errors(port: &Value) -> Option<String> {
    let counts = port["errors"].as_object()?.iter();
    let counts: Vec<_> = counts.map(|(cause, times)| format!("{cause} {times}")).collect();
    let last = text(&port["last_error"]);
    (!counts.is_empty()).then(|| format!("{}; last: {last}", counts.join(", ")))
}

/// Refusals of a port's account by entry, with the limits; `None`: no refusals.
fn refused(account: &Value) -> Option<String> {
    let entries = account.as_object().into_iter().flatten();
    let refused = entries.filter_map(|(name, entry)| {
        let times = entry["refused"].as_u64().filter(|times| *times > 0)?;
        let limit = limit_text(name, entry["limit"].as_u64()?);
        let per = if entry["per_second"] == true { "/s" } else { "" };
        Some(format!("{name} {times} (limit {limit}{per})"))
    });
    Some(refused.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// A limit of an account's entry, with a suffix if in bytes.
fn limit_text(name: &str, limit: u64) -> String {
    let option = common().find(|option| option.name.strip_prefix(LIMIT) == Some(name));
    match option.map(|option| option.value) {
        Some(Type::Bytes(_)) => bytes_text(limit),
        _ => limit.to_string(),
    }
}

/// One line on a vif: the state of its handshake.
fn vif(xen: &Value) -> String {
    let (number, state) = (text(&xen["vif"]), text(&xen["state"]));
    let (front, back) = (text(&xen["front"]), text(&xen["back"]));
    let mut line = format!("vif {number}: {state} (front {front}, back {back}");
    if xen["queues"].as_u64().unwrap_or(0) > 0 {
        line += &format!(", {} queues", xen["queues"]);
    }
    line += ")";
    let accepts: Vec<_> = list(xen, "takes").map(text).collect();
    if !accepts.is_empty() {
        line += &format!(" accepts {}", accepts.join(" "));
    }
    for (what, why) in [("error", &xen["error"]), ("xenstore", &xen["xenstore"])] {
        let why = text(why);
        if !why.is_empty() && why != "connected" {
            line += &format!("; {what}: {why}");
        }
    }
    line
}

/// A count in at most [`COUNT_MAX`] columns: exact if it is short enough.
fn count(n: u64) -> String {
    let exact = n.to_string();
    if exact.len() <= COUNT_MAX { exact } else { si(n as f64).replace(' ', "") }
}

/// Most columns of a count, so that a line of `stats` has at most 100.
const COUNT_MAX: usize = 10;

/// Sums a counter over a port's queues.
fn sum(queues: &Value, counter: &str) -> u64 {
    let queues = queues.as_array().map(Vec::as_slice).unwrap_or_default();
    queues.iter().filter_map(|q| q[counter].as_u64()).sum()
}

/// The table of `stats`: heads, and a line for each port.
fn stats_table(answer: &Value) -> Vec<String> {
    const HEADS: [&str; 8] =
        ["PORT", "IN FRAMES", "IN BYTES", "OUT FRAMES", "OUT BYTES", "KICKS", "CALLS", "HELD"];
    let row = |port: &Value| {
        let (i, e) = (&port["ingress"], &port["egress"]);
        let counts = [
            sum(i, "frames"),
            sum(i, "bytes"),
            sum(e, "frames"),
            sum(e, "bytes"),
            sum(i, "kicks") + sum(e, "kicks"),
            sum(i, "calls") + sum(e, "calls"),
            sum(e, "held"),
        ];
        let counts = counts.iter().map(|n| count(*n));
        std::iter::once(text(&port["name"]).into()).chain(counts).collect::<Vec<_>>()
    };
    let heads = HEADS.map(String::from).to_vec();
    let rows: Vec<_> = std::iter::once(heads).chain(list(answer, "ports").map(row)).collect();
    columns(&rows, &[0])
}

fn stats(answer: &Value) {
    let mut lines = stats_table(answer).into_iter();
    lines.next().iter().for_each(|heads| println!("{heads}"));
    for (port, line) in list(answer, "ports").zip(lines) {
        println!("{line}");
        if port["up"] == true {
            for (n, queue) in list(port, "ingress").enumerate() {
                println!("{INDENT}{}", brief(n, queue));
            }
        }
        losses(port).iter().for_each(|line| println!("{INDENT}{line}"));
    }
    for (i, worker) in list(answer, "workers").enumerate() {
        let cpu = worker["cpu_ns"].as_u64().unwrap_or(0) as f64 / 1e9;
        let (sleeps, naps) = (&worker["sleeps"], &worker["naps"]);
        let queues = |key: &str| plural(worker[key].as_u64().unwrap_or(0), "queue");
        let (queues, moves) = (queues("queues"), queues("moves"));
        println!(
            "worker {i}: {cpu:.2} s of CPU, {queues}, {sleeps} sleeps, {naps} naps, {moves} moved \
             away"
        );
    }
}

/// Frames that the port lost, or made its senders lose, by cause.
fn losses(port: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for (way, queues) in [("from guest", &port["ingress"]), ("to guest", &port["egress"])] {
        let first = queues.as_array().and_then(|q| q.first()).and_then(Value::as_object);
        let names = first.into_iter().flat_map(|q| q.keys());
        for name in names.filter(|n| n.starts_with("drops_") || n.starts_with("lost_")) {
            let frames = sum(queues, name);
            if frames > 0 {
                let whose = if name.starts_with("lost_") { "of senders, " } else { "" };
                lines.push(format!("{name} ({whose}{way}): {frames}"));
            }
        }
    }
    lines
}

/// Prints counters of a front half (`nic` or `gen`).
fn guest_stats(answer: &Value) {
    let heads = ["SENT", "RECEIVED", "POLLS", "EMPTY", "KICKS", "CALLS"];
    let heads = heads.map(|head| format!("{head:>12}")).join(" ");
    println!("{:>5} {:5} {:18} {:18} {heads}", "QUEUE", "STATE", "POLL", "KICK");
    for (n, queue) in list(answer, "queues").enumerate() {
        let number = |key: &str| queue[key].as_u64().unwrap_or(0);
        let (kicks, calls) = (number("kicks_tx") + number("kicks_rx"), number("calls_tx"));
        let counts = [
            number("sent_frames"),
            number("received_frames"),
            number("polls"),
            number("polls_empty"),
            kicks,
            calls + number("calls_rx"),
        ];
        let counts = counts.map(|count| format!("{count:>12}")).join(" ");
        let (state, poll, kick) = (text(&queue["state"]), text(&queue["poll"]), &queue["kick"]);
        println!("{n:>5} {state:5} {poll:18} {:18} {counts}", text(kick));
    }
    let connected = if answer["connected"] == true { "connected" } else { "not connected" };
    let number = |key: &str| answer[key].as_u64().unwrap_or(0);
    let (sleeps, naps) = (number("sleeps"), number("naps"));
    println!("{connected}; {sleeps} sleeps, {naps} naps");
}

/// One line on an ingress queue: its state, and the latency of its wake-ups.
fn brief(n: usize, queue: &Value) -> String {
    let (state, poll) = (text(&queue["state"]), text(&queue["poll"]));
    let number = |key: &str| queue[key].as_f64().unwrap_or(0.0);
    let first = if number("first_frames") > 0.0 {
        let mean = time_ns(number("first_frame_ns") / number("first_frames"));
        format!(", first frame after {mean}, at most {}", time_ns(number("first_frame_ns_max")))
    } else {
        String::new()
    };
    format!("queue {n}: {state}, worker {}, {poll}{first}", queue["worker"])
}

fn fdb(answer: &Value) {
    let is_bridged = list(answer, "entries").any(|e| !e["evpn"].is_null());
    let mut heads = ["ADDRESS", "VLAN", "PORT", "AGE S", "FLAPS"].map(String::from).to_vec();
    if is_bridged {
        heads.insert(4, "EVPN".into());
    }
    let row = |e: &Value| {
        let age = match (&e["static"], e["age_s"].as_u64()) {
            (Value::Bool(true), _) => "static".into(),
            (_, age) => age.map_or_else(|| "-".into(), |age| age.to_string()),
        };
        let mut row = vec![text(&e["mac"]).into(), e["vlan"].to_string()];
        row.extend([text(&e["port"]).into(), age, flaps(&e["flaps"])]);
        if is_bridged {
            row.insert(4, evpn(e));
        }
        row
    };
    let rows: Vec<_> = std::iter::once(heads).chain(list(answer, "entries").map(row)).collect();
    columns(&rows, if is_bridged { &[0, 2, 4, 5] } else { &[0, 2, 4] })
        .iter()
        .for_each(|line| println!("{line}"));
}

/// Where an address is: `announced`, or `at 10.9.0.2`, the VTEP of another host.
fn evpn(entry: &Value) -> String {
    match (entry["evpn"].as_str(), entry["vtep"].as_str()) {
        (Some("remote"), Some(vtep)) => format!("at {vtep}"),
        (state, _) => state.unwrap_or("-").into(),
    }
}

/// Words for an address that flaps.
fn flaps(flap: &Value) -> String {
    if flap.is_null() {
        return String::new();
    }
    let blocked = match flap["blocked_s"].as_u64() {
        None | Some(0) => String::new(),
        Some(s) => format!(", stays there for {s} s"),
    };
    format!("left {} {} times{blocked}", text(&flap["home"]), flap["moves"])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(refused: u64, limit: u64, per_second: bool) -> Value {
        json!({ "used": 1, "limit": limit, "refused": refused, "per_second": per_second })
    }

    /// Issue 16, row 7: a column is as wide as its widest cell.
    #[test]
    fn columns_are_aligned() {
        let rows = [["ADDRESS", "VLAN", "PORT"], ["02:00:00:00:00:01", "4094", "vm1"]];
        let rows = rows.map(|row| row.map(String::from).to_vec());
        let lines = columns(&rows, &[0, 2]);
        assert_eq!(lines, ["ADDRESS            VLAN  PORT", "02:00:00:00:00:01  4094  vm1"]);
        assert!(columns(&[], &[]).is_empty());
    }

    #[test]
    fn a_bridge_has_a_line_and_each_of_its_problems() {
        let evpn = json!({
            "bridge": "br10", "vnis": [10, 11], "announced": 2, "pending": 0, "yielded": 0,
            "duplicate": 1, "remote": 3, "problems": ["`vx10` is down"],
        });
        let lines = bridge(&evpn);
        let want = "bridge   br10, VNI 10, 11; addresses: 2 announced, 1 duplicate, 3 remote";
        assert_eq!(lines, [want, "problem  `vx10` is down"]);
        assert!(bridge(&Value::Null).is_empty());
        let remote = json!({ "evpn": "remote", "vtep": "10.9.0.2" });
        let here = json!({ "evpn": "announced", "vtep": null });
        assert_eq!(
            [&remote, &here, &Value::Null].map(super::evpn),
            ["at 10.9.0.2", "announced", "-"]
        );
    }

    #[test]
    fn each_port_of_a_pair_says_which_one_carries_the_frames() {
        let of = |preferred: bool, carries: bool| {
            pair(&json!({ "other": "x", "preferred": preferred, "carries": carries })).unwrap()
        };
        assert_eq!(of(true, true), "port x is the standby");
        assert_eq!(of(true, false), "port x, its standby port, carries the frames");
        assert_eq!(of(false, true), "took over from port x");
        assert_eq!(of(false, false), "standby of port x");
        assert_eq!(pair(&Value::Null), None);
    }

    /// Issue 16, row 7: 100 columns, however large the counts.
    #[test]
    fn stats_fit_100_columns() {
        let large = u64::MAX / 16;
        let queue = json!({ "frames": large, "bytes": large, "kicks": large, "calls": large,
                            "held": 256 });
        let port = json!({ "name": "a-long-name-015", "ingress": [queue], "egress": [queue] });
        let lines = stats_table(&json!({ "ports": [port] }));
        assert_eq!(lines.len(), 2);
        assert!(lines.iter().all(|line| line.len() <= 100), "{lines:?}");
        assert_eq!(
            (count(9_999_999_999), count(12_345_678_901)),
            ("9999999999".into(), "12.3G".into())
        );
    }

    /// Issue 16, row 8: the receiver shows what its senders lost because of it.
    #[test]
    fn losses_name_the_cause_and_whose_frames_they_are() {
        let port = json!({
            "ingress": [{ "frames": 9, "drops_runt": 1 }, { "frames": 9, "drops_runt": 2 }],
            "egress": [{ "lost_no_room": 7, "lost_aged": 0, "drops_down": 0 }],
        });
        let want = ["drops_runt (from guest): 3", "lost_no_room (of senders, to guest): 7"];
        assert_eq!(losses(&port), want);
    }

    #[test]
    fn only_refusals_are_shown_with_their_limits() {
        let account = json!({
            "mappings": entry(3, 1018, false),
            "mapped-bytes": entry(1, 1 << 42, false),
            "descriptors": entry(0, 640, false),
            "messages": entry(120, 4000, true),
            "served_ns": 5,
        });
        let want = ["mapped-bytes 1 (limit 4T)", "mappings 3 (limit 1018)"].join(", ");
        let want = format!("{want}, messages 120 (limit 4000/s)");
        assert_eq!(refused(&account), Some(want));
        assert_eq!(refused(&json!({ "mappings": entry(0, 1, false), "served_ns": 5 })), None);
        assert_eq!(refused(&Value::Null), None, "older switches send none");
    }

    #[test]
    fn errors_are_shown_by_cause_with_the_last_message() {
        let port = json!({ "errors": { "map": 2, "value": 1 }, "last_error": "no such file" });
        assert_eq!(errors(&port).as_deref(), Some("map 2, value 1; last: no such file"));
        assert_eq!(errors(&json!({ "errors": {}, "last_error": null })), None);
        assert_eq!(errors(&json!({})), None, "not a port of a front-end");
    }
}
