//! Counters for Prometheus in text format 0.0.4, made from the replies to `show` and `stats`.
//!
//! Names follow those of `stats`: `pvswitch_ingress_NAME_total`, times in seconds, drops as one
//! counter with the cause as a label. A new counter only needs its help text here.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// Content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A direction through the switch, or the workers.
struct Way {
    name: &'static str,
    /// Counters: name in `stats`, and help.
    helps: &'static [(&'static str, &'static str)],
    /// Gauges: name in `stats`, and help.
    gauges: &'static [(&'static str, &'static str)],
    drops: &'static str,
}

const INGRESS: Way = Way {
    name: "ingress",
    helps: &[
        ("frames", "Frames taken from the guest."),
        ("bytes", "Bytes of frames taken from the guest, from the destination MAC."),
        ("bursts", "Polls of the queue that found frames."),
        ("direct", "Frames read directly into the buffers of their destination."),
        ("polls", "Polls of the queue."),
        ("polls_empty", "Polls of the queue that found no frames."),
        ("sleeps", "Times the queue was armed and left the poll set."),
        ("naps", "Times the queue was not polled for a set time."),
        ("wakes", "Sleeps ended by a notification."),
        ("served_ns", "Worker time spent on the queue, including empty polls."),
        ("kicks", "Notifications from the guest."),
        ("calls", "Notifications to the guest of returned buffers."),
        ("copies", "Copies made of flooded frames, one of each not counted."),
        ("holds", "Frames held because their destination was full."),
        ("pauses", "Bursts not taken because the only destination was full."),
        ("rate_waits", "Times the queue was left until its rate-in permits more."),
        ("mac_moves", "Addresses that moved here from another port, or whose move was refused."),
        ("mac_flaps", "Times an address began to flap to this port."),
        ("mac_elsewhere", "Frames from an address that stays at another port: static or locked."),
    ],
    gauges: &[
        ("worker", "Number of the worker that serves the queue."),
        ("weight", "Share of a worker's time for the port, relative to other ports."),
    ],
    drops: "Frames from the guest dropped, by cause.",
};

const EGRESS: Way = Way {
    name: "egress",
    helps: &[
        ("frames", "Frames delivered to the guest."),
        ("bytes", "Bytes of frames delivered to the guest, from the destination MAC."),
        ("groups", "Groups of frames delivered under one lock."),
        ("calls", "Notifications to the guest of delivered frames."),
        ("calls_late", "Notifications to the guest that were delayed."),
        ("kicks", "Notifications from the guest of posted buffers."),
        ("full", "Times a frame did not fit at once."),
        ("holds", "Frames held because the queue was full."),
        ("lost_no_room", "Frames of senders lost because too many were held."),
        ("lost_aged", "Frames of senders lost because they were held for too long."),
        ("lost_slow", "Frames of senders lost because page faults in its memory are slow."),
        ("served_ns", "Worker time spent on delivering held frames."),
        ("contended", "Times the queue's lock was held by another worker."),
        ("mirrored", "Copies of other ports' frames, delivered to this mirror port."),
        ("segmented", "Frames created by segmentation in software."),
        ("gso_segmented", "Frames replaced by these."),
        ("checksummed", "Frames whose checksum was computed in software."),
    ],
    gauges: &[
        ("hold", "Maximum number of frames held for the queue."),
        ("held", "Frames held for the queue."),
    ],
    drops: "Frames to the guest dropped, by cause.",
};

const WORKER: Way = Way {
    name: "worker",
    helps: &[
        ("rounds", "Rounds over the hot queues."),
        ("sleeps", "Times the worker slept until woken, or for a long time."),
        ("naps", "Times the worker slept for a short set time."),
        ("epoll_waits", "Times the worker asked the kernel for notifications of guests."),
        ("moves", "Queues moved from the worker to other workers."),
        ("contended", "Times the worker waited for a queue locked by the control thread."),
        ("cpu_ns", "CPU time of the worker's thread."),
    ],
    gauges: &[("queues", "Queues the worker serves.")],
    drops: "",
};

/// Latency of the first frame after each sleep, exported as a summary and a maximum.
const FIRST: [&str; 3] = ["first_frame_ns", "first_frames", "first_frame_ns_max"];

/// All metrics of these replies.
pub fn text(show: &Value, stats: &Value) -> String {
    let mut out = String::with_capacity(1 << 16);
    about(&mut out, show, stats);
    about_ports(&mut out, list(&show["ports"]));
    control(&mut out, &show["control"]);
    accounts(&mut out, show, stats);
    let ports = list(&stats["ports"]);
    for (way, key) in [(&INGRESS, "ingress"), (&EGRESS, "egress")] {
        let mut queues = Vec::new();
        for port in ports {
            for (i, queue) in list(&port[key]).iter().enumerate() {
                let name = escaped(port["name"].as_str().unwrap_or_default());
                let labels = format!("port=\"{name}\",queue=\"{i}\"");
                queues.extend(queue.as_object().map(|counters| (labels, counters)));
            }
        }
        way.write(&mut out, &queues);
        if way.name == INGRESS.name {
            first_frames(&mut out, &queues);
        }
        words(&mut out, way.name, &queues);
    }
    locks(&mut out, &stats["lock_counts"]);
    let workers = list(&stats["workers"]).iter().enumerate();
    let workers: Vec<_> =
        workers.filter_map(|(i, w)| Some((format!("worker=\"{i}\""), w.as_object()?))).collect();
    WORKER.write(&mut out, &workers);
    let mut load = Family::new(&mut out, "pvswitch_worker_load_ratio", "gauge", LOAD);
    for (labels, worker) in &workers {
        load.sample(labels, worker["load"].as_f64().unwrap_or(0.0) / 1000.0);
    }
    let asleep = "Whether the worker sleeps until woken.";
    let mut asleep = Family::new(&mut out, "pvswitch_worker_asleep", "gauge", asleep);
    for (labels, worker) in &workers {
        asleep.sample(labels, f64::from(u8::from(worker["asleep"] == true)));
    }
    out
}

const LOAD: &str = "Share of the worker's time spent on frames in its last millisecond awake.";

/// The switch.
fn about(out: &mut String, show: &Value, stats: &Value) {
    let version = escaped(show["version"].as_str().unwrap_or_default());
    let commit = escaped(show["commit"].as_str().unwrap_or_default());
    let help = "Always 1; version and commit are labels.";
    Family::new(out, "pvswitch_build_info", "gauge", help)
        .sample(&format!("version=\"{version}\",commit=\"{commit}\""), 1.0);
    let help = "Whether the state is kept for the next process, if this one is killed (--keep).";
    let mut keep = Family::new(out, "pvswitch_keep", "gauge", help);
    for state in ["on", "failed", "off"] {
        let is = show["keep"] == state;
        keep.sample(&format!("state=\"{state}\""), f64::from(u8::from(is)));
    }
    let fdb = &show["fdb"];
    let help = "Entries of the FDB.";
    let mut entries = Family::new(out, "pvswitch_fdb_entries", "gauge", help);
    for kind in ["learned", "static"] {
        entries.sample(&format!("kind=\"{kind}\""), fdb[kind].as_f64().unwrap_or(0.0));
    }
    Family::new(out, "pvswitch_fdb_capacity", "gauge", "Capacity of the FDB.")
        .sample("", fdb["capacity"].as_f64().unwrap_or(0.0));
    let uptime = stats["uptime_ns"].as_f64().unwrap_or(0.0) / 1e9;
    Family::new(out, "pvswitch_uptime_seconds", "gauge", "Time since the switch started.")
        .sample("", uptime);
}

/// Its ports.
fn about_ports(out: &mut String, ports: &[Value]) {
    let ports: Vec<_> = ports
        .iter()
        .map(|port| (escaped(port["name"].as_str().unwrap_or_default()), port))
        .collect();
    let mut info =
        Family::new(out, "pvswitch_port_info", "gauge", "Always 1; its kind is a label.");
    for (name, port) in &ports {
        let kind = escaped(port["kind"].as_str().unwrap_or_default());
        info.sample(&format!("port=\"{name}\",kind=\"{kind}\""), 1.0);
    }
    let help = "Whether the guest has a receive queue enabled.";
    let mut up = Family::new(out, "pvswitch_port_up", "gauge", help);
    for (name, port) in &ports {
        up.sample(&format!("port=\"{name}\""), f64::from(u8::from(port["up"] == true)));
    }
    let help = "Whether the port's peer (a front-end, passt) is connected.";
    let mut connected = Family::new(out, "pvswitch_port_connected", "gauge", help);
    for (name, port) in &ports {
        if let Some(is) = port["connected"].as_bool() {
            connected.sample(&format!("port=\"{name}\""), f64::from(u8::from(is)));
        }
    }
    let help = "Time for which the receiver has posted no buffers; 0: it is not stalled.";
    let mut stalled = Family::new(out, "pvswitch_port_stalled_seconds", "gauge", help);
    for (name, port) in &ports {
        stalled.sample(&format!("port=\"{name}\""), port["stalled_s"].as_f64().unwrap_or(0.0));
    }
    for (key, metric, help) in [
        ("addresses", "pvswitch_port_addresses", "Addresses learned from the port."),
        (
            "addresses_limit",
            "pvswitch_port_addresses_limit",
            "Maximum number of addresses learned from it.",
        ),
    ] {
        let mut family = Family::new(out, metric, "gauge", help);
        for (name, port) in &ports {
            family.sample(&format!("port=\"{name}\""), port[key].as_f64().unwrap_or(0.0));
        }
    }
    let help = "Queue pairs the guest has enabled.";
    let mut active = Family::new(out, "pvswitch_port_queues_active", "gauge", help);
    for (name, port) in &ports {
        active.sample(&format!("port=\"{name}\""), port["queues_active"].as_f64().unwrap_or(0.0));
    }
    port_events(out, &ports);
    port_evpn(out, &ports);
}

/// Ports in bridges to other hosts.
fn port_evpn(out: &mut String, ports: &[(String, &Value)]) {
    let bridged = ports.iter().map(|(name, port)| (name, &port["evpn"]));
    let bridged: Vec<_> = bridged.filter(|(_, evpn)| evpn.is_object()).collect();
    if bridged.is_empty() {
        return;
    }
    let help = "Addresses of the switch in the port's bridge, by state.";
    let mut addresses = Family::new(out, "pvswitch_port_evpn_addresses", "gauge", help);
    for (name, evpn) in &bridged {
        for state in ["announced", "pending", "yielded", "duplicate"] {
            let labels = format!("port=\"{name}\",state=\"{state}\"");
            addresses.sample(&labels, evpn[state].as_f64().unwrap_or(0.0));
        }
    }
    let help = "Addresses of other hosts in the port's bridge.";
    let mut remote = Family::new(out, "pvswitch_port_evpn_remote_addresses", "gauge", help);
    for (name, evpn) in &bridged {
        remote.sample(&format!("port=\"{name}\""), evpn["remote"].as_f64().unwrap_or(0.0));
    }
    let help = "What is wrong with the port's bridge; ctl show names it.";
    let mut problems = Family::new(out, "pvswitch_port_evpn_problems", "gauge", help);
    for (name, evpn) in &bridged {
        problems.sample(&format!("port=\"{name}\""), list(&evpn["problems"]).len() as f64);
    }
}

/// Faults, errors and connections of ports, each with its escaped name.
fn port_events(out: &mut String, ports: &[(String, &Value)]) {
    for (key, help) in [
        ("faults", "Times the guest violated the protocol."),
        ("interface_losses", "Times the port's interface was removed, or failed."),
    ] {
        let mut family = Family::new(out, &format!("pvswitch_port_{key}_total"), "counter", help);
        for (name, port) in ports {
            family.sample(&format!("port=\"{name}\""), port[key].as_f64().unwrap_or(0.0));
        }
    }
    let help = "Errors of peers, by cause.";
    let mut errors = Family::new(out, "pvswitch_port_errors_total", "counter", help);
    for (name, port) in ports {
        for (cause, times) in port["errors"].as_object().into_iter().flatten() {
            let labels = format!("port=\"{name}\",cause=\"{cause}\"");
            errors.sample(&labels, times.as_f64().unwrap_or(0.0));
        }
    }
    let help = "Times the port took over from the other one of its pair.";
    let pairs =
        ports.iter().filter_map(|(name, p)| Some((name, p["standby"]["failovers"].as_f64()?)));
    let pairs: Vec<_> = pairs.collect();
    if !pairs.is_empty() {
        let mut failovers = Family::new(out, "pvswitch_port_failovers_total", "counter", help);
        pairs.iter().for_each(|(name, n)| failovers.sample(&format!("port=\"{name}\""), *n));
    }
    let help = "Front-ends that connected.";
    let mut connections = Family::new(out, "pvswitch_port_connections_total", "counter", help);
    for (name, port) in ports {
        if let Some(n) = port["connections"].as_f64() {
            connections.sample(&format!("port=\"{name}\""), n);
        }
    }
}

/// The control socket.
fn control(out: &mut String, control: &Value) {
    let number = |key: &str| control[key].as_f64().unwrap_or(0.0);
    for (key, help) in [
        ("connections", "Open connections to the control socket."),
        ("streams", "Clients of the control socket that receive events."),
    ] {
        Family::new(out, &format!("pvswitch_control_{key}"), "gauge", help).sample("", number(key));
    }
    for (key, help) in [
        ("requests", "Requests received on the control socket."),
        ("events", "Events sent, to any client."),
        ("events_lost", "Events lost to clients that read too slowly."),
    ] {
        let name = format!("pvswitch_control_{key}_total");
        Family::new(out, &name, "counter", help).sample("", number(key));
    }
    let help = "Requests refused on the control socket, by HTTP status.";
    let mut refused = Family::new(out, "pvswitch_control_refused_total", "counter", help);
    for (status, times) in control["refused"].as_object().into_iter().flatten() {
        refused.sample(&format!("status=\"{status}\""), times.as_f64().unwrap_or(0.0));
    }
    let help = "Connections to the control socket closed by the switch: the client was too slow, \
                or another one needed the room.";
    let mut closed = Family::new(out, "pvswitch_control_closed_total", "counter", help);
    for (key, cause) in [("closed_slow", "slow"), ("closed_for_others", "for_others")] {
        closed.sample(&format!("cause=\"{cause}\""), number(key));
    }
}

/// Locks by name.
fn locks(out: &mut String, counts: &Value) {
    for (key, help) in [
        ("taken", "Times a lock of this name was taken."),
        ("contended", "Times another thread had it."),
        ("waited_ns", "Time that threads waited for it."),
    ] {
        let (base, scale) = unit(key);
        let mut family = Family::new(out, &format!("pvswitch_lock_{base}_total"), "counter", help);
        for (lock, of) in counts.as_object().into_iter().flatten() {
            family.sample(&format!("lock=\"{lock}\""), of[key].as_f64().unwrap_or(0.0) * scale);
        }
    }
}

/// Resources used by ports, limits and refusals; and the budgets of all ports together.
fn accounts(out: &mut String, show: &Value, stats: &Value) {
    let mut entries = Vec::new();
    for port in list(&stats["ports"]) {
        let name = escaped(port["name"].as_str().unwrap_or_default());
        for (resource, entry) in port["account"].as_object().into_iter().flatten() {
            // The time of workers is a number here, and is exported per queue.
            if entry.is_object() {
                entries.push((format!("port=\"{name}\",resource=\"{resource}\""), entry));
            }
        }
    }
    let budgets = show["budgets"].as_object().into_iter().flatten();
    let budgets = budgets.map(|(resource, entry)| (format!("resource=\"{resource}\""), entry));
    let budgets: Vec<_> = budgets.collect();
    for (of, key, kind, help) in [
        (&entries, "account_used", "gauge", "Amount that the port holds; of rates, total used."),
        (&entries, "account_limit", "gauge", "Limit of the port; of rates, per second."),
        (&entries, "account_refused_total", "counter", "Times the port was refused a resource."),
        (&budgets, "budget_used", "gauge", "Amount that all ports together hold."),
        (&budgets, "budget_limit", "gauge", "Limit of all ports together."),
    ] {
        let field = key.split('_').nth(1).unwrap_or_default();
        let mut family = Family::new(out, &format!("pvswitch_{key}"), kind, help);
        for (labels, entry) in of {
            family.sample(labels, entry[field].as_f64().unwrap_or(0.0));
        }
    }
}

impl Way {
    /// Writes all counters and gauges of these queues or workers.
    fn write(&self, out: &mut String, all: &[(String, &Map<String, Value>)]) {
        let Some((_, first)) = all.first() else { return };
        let mut drops = Vec::new();
        for (key, value) in *first {
            if FIRST.contains(&key.as_str()) || !value.is_u64() {
                continue;
            }
            let help = self.helps.iter().find(|(name, _)| name == key).map(|(_, help)| *help);
            if let Some(cause) = key.strip_prefix("drops_") {
                drops.push((key, cause));
            } else if let Some(help) = help {
                let (base, scale) = unit(key);
                let name = format!("pvswitch_{}_{base}_total", self.name);
                let mut family = Family::new(out, &name, "counter", help);
                for (labels, counters) in all {
                    family.sample(labels, counters[key].as_f64().unwrap_or(0.0) * scale);
                }
            } else if let Some((_, help)) = self.gauges.iter().find(|(name, _)| name == key) {
                let name = format!("pvswitch_{}_{key}", self.name);
                let mut family = Family::new(out, &name, "gauge", help);
                for (labels, counters) in all {
                    family.sample(labels, counters[key].as_f64().unwrap_or(0.0));
                }
            }
        }
        if drops.is_empty() {
            return;
        }
        let name = format!("pvswitch_{}_drops_total", self.name);
        let mut family = Family::new(out, &name, "counter", self.drops);
        for (labels, counters) in all {
            for (key, cause) in &drops {
                let labels = format!("{labels},cause=\"{cause}\"");
                family.sample(&labels, counters[*key].as_f64().unwrap_or(0.0));
            }
        }
    }
}

fn first_frames(out: &mut String, queues: &[(String, &Map<String, Value>)]) {
    let number = |counters: &Map<String, Value>, key: &str| {
        counters.get(key).and_then(Value::as_f64).unwrap_or(0.0)
    };
    let help = "Time from a wake-up to the delivery of its first frame.";
    let name = "pvswitch_ingress_first_frame_seconds";
    let mut family = Family::new(out, name, "summary", help);
    for (labels, counters) in queues {
        family.part("_sum", labels, number(counters, FIRST[0]) * 1e-9);
        family.part("_count", labels, number(counters, FIRST[1]));
    }
    let help = "Maximum time from a wake-up to the delivery of its first frame.";
    let name = "pvswitch_ingress_first_frame_max_seconds";
    let mut family = Family::new(out, name, "gauge", help);
    for (labels, counters) in queues {
        family.sample(labels, number(counters, FIRST[2]) * 1e-9);
    }
}

/// Values that are words: a queue's state as one of three gauges that is 1, its policy as a label.
fn words(out: &mut String, way: &str, queues: &[(String, &Map<String, Value>)]) {
    let with = |key: &str| queues.first().is_some_and(|(_, counters)| counters.contains_key(key));
    let states = "1 for the queue's state: hot is polled, warm polled occasionally, cold armed.";
    let drains = "1 for the queue's drain state; unless off, it is not polled.";
    for (key, values, help) in [
        ("state", ["hot", "warm", "cold"], states),
        ("drain", ["off", "draining", "drained"], drains),
    ] {
        if !with(key) {
            continue;
        }
        let mut family = Family::new(out, &format!("pvswitch_{way}_{key}"), "gauge", help);
        for (labels, counters) in queues {
            for value in values {
                let labels = format!("{labels},{key}=\"{value}\"");
                family.sample(&labels, f64::from(u8::from(counters[key] == value)));
            }
        }
    }
    for (key, what) in [("poll", "when it is polled"), ("call", "when the guest is notified")] {
        if !with(key) {
            continue;
        }
        let help = format!("Always 1; the policy of the queue, {what}, is a label.");
        let mut family = Family::new(out, &format!("pvswitch_{way}_{key}_info"), "gauge", &help);
        for (labels, counters) in queues {
            let policy = escaped(counters[key].as_str().unwrap_or_default());
            family.sample(&format!("{labels},{key}=\"{policy}\""), 1.0);
        }
    }
}

/// The name with its base unit, and the factor to that unit.
fn unit(key: &str) -> (String, f64) {
    match key.strip_suffix("_ns") {
        Some(base) => (format!("{base}_seconds"), 1e-9),
        None => (key.into(), 1.0),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A metric: its head, written once, and its samples.
struct Family<'a> {
    out: &'a mut String,
    name: String,
}

impl<'a> Family<'a> {
    fn new(out: &'a mut String, name: &str, kind: &str, help: &str) -> Self {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Self { out, name: name.into() }
    }

    fn sample(&mut self, labels: &str, value: f64) {
        self.part("", labels, value);
    }

    fn part(&mut self, suffix: &str, labels: &str, value: f64) {
        let name = &self.name;
        let _ = if labels.is_empty() {
            writeln!(self.out, "{name}{suffix} {value}")
        } else {
            writeln!(self.out, "{name}{suffix}{{{labels}}} {value}")
        };
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use switch::stats::{EgressStats, IngressStats};

    use super::*;

    #[test]
    fn every_counter_has_help() {
        let (ingress, egress) = (IngressStats::default(), EgressStats::default());
        let names = ingress.all().map(|(name, _)| (&INGRESS, name));
        for (way, name) in names.chain(egress.all().map(|(name, _)| (&EGRESS, name))) {
            let known = name.starts_with("drops_")
                || FIRST.contains(&name)
                || way.helps.iter().any(|(key, _)| *key == name);
            assert!(known, "{} {name}: add its help", way.name);
        }
    }

    #[test]
    fn labels_are_escaped_and_times_are_seconds() {
        let show = json!({"version": "1", "keep": "failed",
            "budgets": {"mappings": {"used": 9, "limit": 61434}},
            "ports": [
            {"name": "a", "kind": "tap:\"x\\y\"\n", "up": true, "faults": 3, "errors": {"map": 2},
             "connected": true, "stalled_s": 61, "addresses": 7, "addresses_limit": 4096},
            {"name": "up", "interface_losses": 1, "evpn": {"announced": 3, "pending": 0,
             "yielded": 1, "duplicate": 0, "remote": 12, "problems": ["no bridge"]}},
        ], "control": {"connections": 1, "streams": 2, "requests": 3, "refused": {"404": 4},
            "closed_slow": 5, "closed_for_others": 6, "events": 8, "events_lost": 9},
            "fdb": {"learned": 7, "static": 1, "capacity": 65536}});
        let stats = json!({"uptime_ns": 1_500_000_000_u64, "ports": [{"name": "a",
            "ingress": [{"frames": 5, "served_ns": 2_000, "drops_runt": 7, "state": "warm",
                         "first_frame_ns": 4_000, "first_frames": 2, "first_frame_ns_max": 3_000,
                         "poll": "adaptive"}],
            "egress": [],
            "account": {"served_ns": 2_000, "mappings": {"used": 4, "limit": 1018, "refused": 2,
                                                         "per_second": false}},
        }], "workers": [{"cpu_ns": 3_000_000_000_u64, "load": 250, "asleep": true}]});
        let text = text(&show, &stats);
        for line in [
            "pvswitch_uptime_seconds 1.5",
            r#"pvswitch_keep{state="failed"} 1"#,
            r#"pvswitch_keep{state="on"} 0"#,
            r#"pvswitch_port_info{port="a",kind="tap:\"x\\y\"\n"} 1"#,
            r#"pvswitch_ingress_frames_total{port="a",queue="0"} 5"#,
            r#"pvswitch_ingress_drops_total{port="a",queue="0",cause="runt"} 7"#,
            r#"pvswitch_ingress_first_frame_seconds_count{port="a",queue="0"} 2"#,
            r#"pvswitch_ingress_state{port="a",queue="0",state="warm"} 1"#,
            r#"pvswitch_ingress_state{port="a",queue="0",state="hot"} 0"#,
            r#"pvswitch_worker_cpu_seconds_total{worker="0"} 3"#,
            r#"pvswitch_worker_load_ratio{worker="0"} 0.25"#,
            "# TYPE pvswitch_ingress_first_frame_seconds summary",
            r#"pvswitch_port_errors_total{port="a",cause="map"} 2"#,
            r#"pvswitch_port_interface_losses_total{port="up"} 1"#,
            r#"pvswitch_account_used{port="a",resource="mappings"} 4"#,
            r#"pvswitch_account_limit{port="a",resource="mappings"} 1018"#,
            r#"pvswitch_account_refused_total{port="a",resource="mappings"} 2"#,
            r#"pvswitch_port_connected{port="a"} 1"#,
            r#"pvswitch_port_stalled_seconds{port="a"} 61"#,
            r#"pvswitch_port_addresses{port="a"} 7"#,
            r#"pvswitch_port_addresses_limit{port="a"} 4096"#,
            r#"pvswitch_fdb_entries{kind="learned"} 7"#,
            r#"pvswitch_fdb_entries{kind="static"} 1"#,
            r#"pvswitch_port_evpn_addresses{port="up",state="announced"} 3"#,
            r#"pvswitch_port_evpn_addresses{port="up",state="yielded"} 1"#,
            r#"pvswitch_port_evpn_remote_addresses{port="up"} 12"#,
            r#"pvswitch_port_evpn_problems{port="up"} 1"#,
            "pvswitch_fdb_capacity 65536",
            "pvswitch_control_connections 1",
            "pvswitch_control_streams 2",
            "pvswitch_control_requests_total 3",
            r#"pvswitch_control_refused_total{status="404"} 4"#,
            r#"pvswitch_control_closed_total{cause="slow"} 5"#,
            r#"pvswitch_control_closed_total{cause="for_others"} 6"#,
            "pvswitch_control_events_total 8",
            "pvswitch_control_events_lost_total 9",
            r#"pvswitch_budget_used{resource="mappings"} 9"#,
            r#"pvswitch_budget_limit{resource="mappings"} 61434"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
        }
        assert!(!text.contains("egress"), "{text}");
        assert!(!text.contains(r#"evpn_problems{port="a"}"#), "a port without a bridge");
    }
}
