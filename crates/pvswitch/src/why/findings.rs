//! Findings on one port: a pure function of the replies to `show`, `stats` (twice) and `fdb`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Value, json};

use super::causes::{Way, find, is_loss};
use super::finding::{Finding, Rank};
use super::vlans::Vlans;
use crate::demo::format::{percent, plural, si};

/// A reply, with its ports by name: a switch may have thousands.
struct Reply<'a> {
    value: &'a Value,
    ports: HashMap<&'a str, &'a Value>,
}

impl<'a> Reply<'a> {
    fn new(value: &'a Value) -> Self {
        let ports = list(&value["ports"]).iter().map(|port| (text(&port["name"]), port));
        Self { value, ports: ports.collect() }
    }

    fn port(&self, name: &str) -> &'a Value {
        self.ports.get(name).copied().unwrap_or(&Value::Null)
    }

    fn uptime_ns(&self) -> f64 {
        self.value["uptime_ns"].as_f64().unwrap_or(0.0)
    }
}

/// Replies of a switch.
pub struct Seen<'a> {
    show: Reply<'a>,
    before: Reply<'a>,
    now: Reply<'a>,
    fdb: &'a Value,
}

/// The part of a reply to `stats` that is compared with a later one: all counters of this port, and
/// losses of the others, as if each port had one queue.
pub fn first_sample(stats: &Value, name: &str) -> Value {
    let ports = list(&stats["ports"]).iter().map(|port| {
        let is_own = port["name"] == name;
        let sums = |queues: &Value| {
            let first = list(queues).first().and_then(Value::as_object).into_iter().flatten();
            let names = first.map(|(counter, _)| counter).filter(|c| is_own || is_loss(c));
            let sums = names.map(|counter| (counter.clone(), sum(queues, counter)));
            sums.filter(|(_, sum)| *sum > 0).collect::<BTreeMap<_, _>>()
        };
        let [ingress, egress] = ["ingress", "egress"].map(|way| [sums(&port[way])]);
        let mut kept = json!({ "name": port["name"], "ingress": ingress, "egress": egress });
        if is_own {
            kept["account"] = port["account"].clone();
        }
        kept
    });
    json!({ "uptime_ns": stats["uptime_ns"], "ports": ports.collect::<Vec<_>>() })
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn sum(queues: &Value, counter: &str) -> u64 {
    list(queues).iter().filter_map(|queue| queue[counter].as_u64()).sum()
}

impl<'a> Seen<'a> {
    /// Replies to `show`, `stats`, the same some time earlier, which may be a
    /// [`first_sample`], and `fdb`.
    pub fn new(show: &'a Value, before: &'a Value, now: &'a Value, fdb: &'a Value) -> Self {
        let [show, before, now] = [show, before, now].map(Reply::new);
        Self { show, before, now, fdb }
    }

    /// The port in `show`.
    pub fn port(&self, name: &str) -> &'a Value {
        self.show.port(name)
    }

    /// Time between the samples, in seconds; 0: the switch was restarted, or they are one.
    pub fn seconds(&self) -> f64 {
        (self.now.uptime_ns() - self.before.uptime_ns()).max(0.0) / 1e9
    }

    /// Total of a counter of a port, and its increase per second.
    fn count(&self, name: &str, way: Way, counter: &str) -> (u64, f64) {
        let of = |reply: &Reply<'_>| sum(&reply.port(name)[way.queues()], counter);
        let (total, before, secs) = (of(&self.now), of(&self.before), self.seconds());
        let more = total.checked_sub(before).filter(|_| secs > 0.0);
        (total, more.map_or(0.0, |more| more as f64 / secs))
    }

    /// Frames per second from the port's guest, and to it.
    pub fn rates(&self, name: &str) -> (f64, f64) {
        (self.count(name, Way::From, "frames").1, self.count(name, Way::To, "frames").1)
    }

    /// Counters of losses with at least one frame: name, total, per second.
    fn losses(&self, name: &str, way: Way) -> Vec<(&'a str, u64, f64)> {
        let first = list(&self.now.port(name)[way.queues()]).first();
        let counters = first.and_then(Value::as_object).into_iter().flatten();
        let names = counters.map(|(counter, _)| counter.as_str()).filter(|c| is_loss(c));
        let counts = names.map(|counter| {
            let (total, rate) = self.count(name, way, counter);
            (counter, total, rate)
        });
        counts.filter(|(_, total, _)| *total > 0).collect()
    }

    /// The other ports that are up.
    fn others(&self, name: &str) -> Vec<&'a Value> {
        let ports = list(&self.show.value["ports"]).iter();
        let is_other = |port: &&Value| port["name"] != name && port["wired_to"].is_null();
        ports.filter(|port| is_other(port) && port["up"] == true).collect()
    }
}

/// Cause of losses at other ports.
const ELSEWHERE: &str = "elsewhere";
/// Most names in one sentence.
const NAMES_MAX: usize = 5;

fn names(ports: &[&Value]) -> String {
    let mut all: Vec<_> = ports.iter().take(NAMES_MAX).map(|port| text(&port["name"])).collect();
    let more = format!("{} more", ports.len().saturating_sub(NAMES_MAX));
    if ports.len() > NAMES_MAX {
        all.push(&more);
    }
    all.join(", ")
}

/// All findings on the port of this name, the most significant first.
pub fn all(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    let port = seen.port(name);
    let mut all = link(port);
    if port["up"] == true {
        all.extend(reach(seen, name));
    }
    all.extend([Way::From, Way::To].into_iter().flat_map(|way| losses(seen, name, way)));
    all.extend(addresses(seen, name));
    all.extend(refusals(seen, name));
    all.extend(errors(port));
    all.extend(waiting(seen, name));
    all.extend(elsewhere(seen, name));
    all.extend(unused_directions(seen, name));
    all.sort_by(|a, b| a.rank.cmp(&b.rank).then(b.per_second.total_cmp(&a.per_second)));
    if all.iter().all(|finding| finding.rank == Rank::Note) {
        let is_elsewhere = all.iter().any(|finding| finding.cause == ELSEWHERE);
        let at = if is_elsewhere { "port" } else { "switch" };
        let what = format!("nothing at this {at} blocks frames from it or to it");
        let remedy = format!("see the frames themselves: `pvswitch capture {name} -w FILE`");
        all.push(Finding::new(Rank::Note, "none", what, remedy));
    }
    all
}

/// Whether the port's guest takes part at all.
fn link(port: &Value) -> Vec<Finding> {
    use Rank::Blocked;
    let (name, kind) = (text(&port["name"]), text(&port["kind"]));
    let faults = port["faults"].as_u64().unwrap_or(0);
    let error = port["last_error"].as_str().map(|e| format!("; its last error: {e}"));
    let error = error.unwrap_or_default();
    let one = |cause: &str, what: String, remedy: String| {
        vec![Finding::new(Blocked, cause, what, remedy)]
    };
    match text(&port["state"]) {
        "unconnected" if kind.ends_with("mode=client") => one(
            "unconnected",
            format!("no process listens at its socket: {kind}{error}"),
            "start what listens there, a virtual machine or passt, with this socket as the server; \
             the switch retries"
                .into(),
        ),
        "unconnected" if kind.starts_with("dgram:") => one(
            "unconnected",
            format!("its peer has no socket: {kind}{error}"),
            "start the peer, whose own socket (QEMU: `local.path`) is that of peer=; the switch \
             retries"
                .into(),
        ),
        "unconnected" if kind == "passt" => one(
            "unconnected",
            format!("passt is not running{error}"),
            "see the log of the switch for why it ended; the switch starts it again".into(),
        ),
        "unconnected" if kind.starts_with("stream:") => one(
            "unconnected",
            format!("no peer is connected to its socket: {kind}{error}"),
            "start what connects to it (QEMU: `-netdev stream,server=off`); check that its user \
             may open it (`ls -l`, socket-mode=, socket-group=)"
                .into(),
        ),
        "unconnected" => one(
            "unconnected",
            format!("no front-end is connected to its socket: {kind}{error}"),
            "start the virtual machine with this socket; check that its user may open it \
             (`ls -l`, socket-mode=, socket-group=)"
                .into(),
        ),
        "no-driver" if faults > 0 => one(
            "fault",
            format!("its guest violated the protocol, and its rings were stopped{error}"),
            "restart the guest, or load its network driver again; update the driver".into(),
        ),
        "no-driver" => one(
            "no_driver",
            format!("a front-end is connected, but its guest has no receive queue enabled{error}"),
            "wait for the guest to boot; then load its network driver, and set its interface up"
                .into(),
        ),
        state @ ("draining" | "drained") => one(
            "drained",
            format!("its queues are not polled: it is {state}"),
            format!("`pvswitch ctl drain {name} --off`"),
        ),
        "stalled" => {
            let secs = port["stalled_s"].as_u64().unwrap_or(0);
            one(
                "stalled",
                format!("its guest has posted no receive buffers for {secs} s"),
                "check whether the guest is paused, hung or without CPU time; otherwise restart \
                 its driver"
                    .into(),
            )
        }
        "standby" => {
            let other = port["standby"]["other"].as_str().unwrap_or_default();
            one(
                "standby",
                format!("port {other} carries the frames of their pair"),
                format!("nothing to do, unless port {other} passes no frames: pvswitch ctl why \
                         {other}"),
            )
        }
        "up" => some_queues(port).into_iter().collect(),
        _ if port["xen"].is_object() => one(
            "vif",
            vif(&port["xen"]),
            "see docs/xen.md, Troubleshooting: it explains each state".into(),
        ),
        "down" if !error.is_empty() => one(
            "down",
            format!("it is down{error}"),
            down_remedy(name, kind, &error),
        ),
        state => one(
            "down",
            format!("it is {state}: {kind} has no queue enabled"),
            format!("see the log of the switch, and `pvswitch ctl show {name}`"),
        ),
    }
}

/// What to do about a port whose interface, or its network namespace, is missing or down.
fn down_remedy(name: &str, kind: &str, error: &str) -> String {
    let what = if error.contains("network namespace") && error.contains("does not exist") {
        "create the network namespace (ip netns add NAME)"
    } else if kind.starts_with("af-") {
        "set the interface up, or create it if it does not exist"
    } else {
        return format!(
            "create its interface again, then `pvswitch ctl del-port {name}` and `pvswitch ctl \
             add-port`"
        );
    };
    format!(
        "{what}: the port follows within a second; if its name is wrong, correct it in the \
         configuration file, then `pvswitch ctl reload`"
    )
}

/// Fewer queues than the port has.
fn some_queues(port: &Value) -> Option<Finding> {
    let (active, queues) = (&port["queues_active"], &port["queues"]);
    let what = format!("its guest has enabled {active} of {queues} queues");
    let remedy = "for more throughput: `ethtool -L IFNAME combined N` in the guest";
    let fewer = active.as_u64() < queues.as_u64();
    fewer.then(|| Finding::new(Rank::Note, "queues", what, remedy))
}

/// State of a vif's handshake.
fn vif(xen: &Value) -> String {
    let word = |key: &str| text(&xen[key]);
    let why = [word("error"), word("xenstore")].into_iter();
    let why: String =
        why.filter(|w| !w.is_empty() && *w != "connected").map(|w| format!("; {w}")).collect();
    let (vif, state, front, back) = (word("vif"), word("state"), word("front"), word("back"));
    format!("vif {vif} is {state} (front {front}, back {back}){why}")
}

/// Whether there is another port for its frames.
fn reach(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    use Rank::Blocked;
    let (port, others) = (seen.port(name), seen.others(name));
    let see = "`pvswitch ctl why` for the other port";
    let one =
        |cause: &str, what: String, remedy: &str| vec![Finding::new(Blocked, cause, what, remedy)];
    let show = seen.show.value;
    let wired = port["wired_to"].as_str();
    if text(&show["forward"]) == "cross" || wired.is_some() {
        let number = port["id"].as_u64().map(|id| id ^ 1);
        let is_partner = |other: &&Value| match wired {
            Some(name) => other["name"] == name,
            None => number.is_some() && other["id"].as_u64() == number,
        };
        return match list(&show["ports"]).iter().find(is_partner) {
            Some(other) if other["up"] == true => Vec::new(),
            Some(other) => {
                let what = format!("its partner {} is {}", text(&other["name"]), other["state"]);
                one("partner", what.replace('"', ""), see)
            }
            None => one(
                "partner",
                "cross mode: it has no partner".into(),
                "add a port: ports 1 and 2, 3 and 4 and so on are partners",
            ),
        };
    }
    if others.is_empty() {
        let what = "no other port is up: its frames have no destination";
        return one("alone", what.into(), see);
    }
    isolation(port, &others).into_iter().chain(vlans(port, &others)).collect()
}

/// Ports that it does not reach because both are isolated.
fn isolation(port: &Value, others: &[&Value]) -> Option<Finding> {
    let is_isolated = |port: &Value| port["rules"]["isolated"] == "on";
    let (isolated, open): (Vec<&Value>, Vec<&Value>) =
        others.iter().partition(|port| is_isolated(port));
    if !is_isolated(port) || isolated.is_empty() {
        return None;
    }
    let rank = if open.is_empty() { Rank::Blocked } else { Rank::Note };
    let what = format!("it is isolated, and so are: {}", names(&isolated));
    let name = text(&port["name"]);
    let remedy = format!("to let it reach them: `pvswitch ctl set {name} isolated=off`");
    Some(Finding::new(rank, "isolated", what, remedy))
}

/// Ports that it does not reach because of VLANs.
fn vlans(port: &Value, others: &[&Value]) -> Vec<Finding> {
    let mut all = Vec::new();
    let own = Vlans::of(port);
    let (common, apart): (Vec<&Value>, Vec<&Value>) =
        others.iter().partition(|other| own.meet(&Vlans::of(other)));
    if !apart.is_empty() {
        let of = |port: &&Value| format!("{} has {}", text(&port["name"]), Vlans::of(port).text());
        let theirs = apart.iter().take(NAMES_MAX).map(of).collect::<Vec<_>>().join(", ");
        let rank = if common.is_empty() { Rank::Blocked } else { Rank::Note };
        let what = format!("no frames between its VLANs ({}) and: {theirs}", own.text());
        let remedy = "compare vlan=, trunk= and native= of these ports: `pvswitch ctl show`";
        all.push(Finding::new(rank, "vlan", what, remedy));
    }
    let differs = |other: &&Value| (own == Vlans::Any) != (Vlans::of(other) == Vlans::Any);
    if !common.is_empty() && common.iter().all(differs) {
        let with = if own == Vlans::Any { "with VLAN options" } else { "without VLAN options" };
        let what = format!(
            "its VLANs ({}) are shared only with ports {with}: {}; these exchange frames only if \
             tags agree",
            own.text(),
            names(&common)
        );
        let remedy = "give all of them vlan= or trunk=, or send tagged frames behind the port \
                      without VLAN options";
        all.push(Finding::new(Rank::Limited, "vlan_tags", what, remedy));
    }
    all
}

/// Frames lost from the port, to it, or by others because of it.
fn losses(seen: &Seen<'_>, name: &str, way: Way) -> Vec<Finding> {
    let finding = |(counter, total, rate): (&str, u64, f64)| {
        let cause = find(way, counter);
        let is_normal = cause.is_some_and(|cause| cause.normal);
        let rank = match (is_normal, rate > 0.0) {
            (true, _) => Rank::Note,
            (false, true) => Rank::Losing,
            (false, false) => Rank::Lost,
        };
        let mut what = format!("{} {}", plural(total, "frame"), way.name());
        what += &format!(" {}", cause.map_or("were dropped", |cause| cause.what));
        if counter == "drops_no_room" && way == Way::From {
            let others = seen.others(name);
            let full = |port: &&&Value| {
                let lost = seen.losses(text(&port["name"]), Way::To);
                lost.iter().any(|(name, ..)| name.starts_with("lost_"))
            };
            let full: Vec<_> = others.iter().filter(full).copied().collect();
            what += &format!(": {}", names(&full));
        }
        let rate_text = if rate > 0.0 { format!(", {}/s now", si(rate)) } else { String::new() };
        what += &format!(" ({counter}{rate_text})");
        let remedy = cause.map_or("see docs/observability.md", |cause| cause.remedy);
        let mut finding = Finding::new(rank, counter, what, remedy.replace("PORT", name));
        (finding.frames, finding.per_second) = (Some(total), rate);
        finding
    };
    seen.losses(name, way).into_iter().map(finding).collect()
}

/// Where the addresses of the port are.
fn addresses(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    use Rank::{Limited, Note};
    let port = seen.port(name);
    let entries = list(&seen.fdb["entries"]);
    let mut all = Vec::new();
    let own: BTreeSet<_> = text(&port["rules"]["mac"]).split('+').collect();
    let (own_entries, others): (Vec<_>, Vec<_>) =
        entries.iter().partition(|entry| entry["port"] == name);
    let here: HashMap<_, _> =
        own_entries.into_iter().map(|entry| (text(&entry["mac"]), entry)).collect();
    for entry in others {
        let (mac, at) = (text(&entry["mac"]), text(&entry["port"]));
        let how = if entry["static"] == true { "static" } else { "learned" };
        if own.contains(mac) {
            let what = format!("its address {mac} is at port {at} ({how}): frames for it go there");
            let remedy = format!(
                "find the guest that uses it; restrict its port with mac=, then `pvswitch ctl fdb \
                 del {mac}`"
            );
            all.push(Finding::new(Limited, "address_elsewhere", what, remedy));
        } else if let Some(here) = here.get(mac) {
            let (vlan, other) = (&here["vlan"], &entry["vlan"]);
            let what = format!("{mac} is here in VLAN {vlan}, and at port {at} in VLAN {other}");
            let remedy = "if that is one guest, one of its ports has the wrong VLAN";
            all.push(Finding::new(Note, "address_twice", what, remedy));
        }
    }
    all.extend(entries.iter().filter_map(|entry| flap(entry, name)));
    all.extend(foreign_sources(seen, name));
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let (used, limit) = (number(&port["addresses"]), number(&port["addresses_limit"]));
    if limit > 0 && used >= limit {
        let what = format!("{used} addresses were learned from it, which is its limit");
        let remedy = "frames for others are flooded; raise addresses_per_port if the guest is a \
                      bridge, otherwise it floods the FDB";
        all.push(Finding::new(Limited, "addresses_limit", what, remedy));
    }
    let table = &seen.show.value["fdb"];
    let (used, capacity) =
        (number(&table["learned"]) + number(&table["static"]), number(&table["capacity"]));
    if capacity > 0 && used >= capacity {
        let what = format!("the FDB is full: {used} of {capacity} entries");
        let remedy = "find the port with the most addresses: `pvswitch ctl show`";
        all.push(Finding::new(Limited, "fdb_full", what, remedy));
    }
    all
}

/// An address that flaps between the port and another.
fn flap(entry: &Value, name: &str) -> Option<Finding> {
    let (mac, at, flap) = (text(&entry["mac"]), text(&entry["port"]), &entry["flaps"]);
    let home = text(&flap["home"]);
    if flap.is_null() || at != name && home != name {
        return None;
    }
    let moves = &flap["moves"];
    let blocked = match flap["blocked_s"].as_u64() {
        Some(s) if s > 0 => format!("; it stays at port {home} for {s} s"),
        _ => format!("; it is at port {at} now"),
    };
    let what = format!("address {mac} flaps: it left port {home} {moves} times{blocked}");
    let remedy = "a loop, or a guest that forges it: see which port counts mac_flaps; \
                  loop-guard=block on that port refuses it, mac= on the owner's locks it";
    Some(Finding::new(Rank::Limited, "address_flaps", what, remedy))
}

/// Frames from addresses that stay at another port.
fn foreign_sources(seen: &Seen<'_>, name: &str) -> Option<Finding> {
    const COUNTER: &str = "mac_elsewhere";
    let (total, rate) = seen.count(name, Way::From, COUNTER);
    let (rank, now) = match rate > 0.0 {
        true => (Rank::Limited, format!(", {}/s now", si(rate))),
        false => (Rank::Note, String::new()),
    };
    let what = format!(
        "{} from its guest had a source address that stays at another port (static, or in its \
         mac=): replies go to that port ({COUNTER}{now})",
        plural(total, "frame")
    );
    let remedy = "see where the guest's address is: `pvswitch ctl fdb`; remove the static entry \
                  there (`pvswitch ctl fdb del`) or correct that port's mac=, unless the guest \
                  forges it";
    let finding = Finding::new(rank, COUNTER, what, remedy);
    (total > 0).then_some(Finding { frames: Some(total), per_second: rate, ..finding })
}

/// Resources that the port was refused.
fn refusals(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    let account = seen.now.port(name)["account"].as_object().into_iter().flatten();
    let before = &seen.before.port(name)["account"];
    let finding = |(resource, entry): (&String, &Value)| {
        let times = entry["refused"].as_u64().filter(|times| *times > 0)?;
        // Those of copies are counted as drops, too.
        if resource == "flood-copies" {
            return None;
        }
        let now = times > before[resource]["refused"].as_u64().unwrap_or(0);
        let rank = if now { Rank::Limited } else { Rank::Note };
        let per = if entry["per_second"] == true { " per second" } else { "" };
        let what =
            format!("it was refused {resource} {times} times (limit {}{per})", entry["limit"]);
        let remedy = format!(
            "if its guest is trusted: `pvswitch ctl set {name} limit-{resource}=N`; see accounts \
             in docs/settings.md"
        );
        Some(Finding::new(rank, resource, what, remedy))
    };
    account.filter_map(finding).collect()
}

/// Faults of the guest, and errors of its front-end.
fn errors(port: &Value) -> Vec<Finding> {
    let mut all = Vec::new();
    let last = port["last_error"].as_str().unwrap_or("see the log");
    let faults = port["faults"].as_u64().unwrap_or(0);
    if faults > 0 && port["up"] == true {
        let times = plural(faults, "time");
        let what = format!("its guest violated the protocol {times}, and recovered; last: {last}");
        all.push(Finding::new(Rank::Lost, "faults", what, "update the guest's driver"));
    }
    let counts = port["errors"].as_object().into_iter().flatten();
    let counts: Vec<_> = counts.map(|(cause, times)| format!("{cause} {times}")).collect();
    if !counts.is_empty() {
        let what = format!("errors of its front-end: {}; last: {last}", counts.join(", "));
        let remedy = "see errors of front-ends in docs/observability.md";
        all.push(Finding::new(Rank::Note, "errors", what, remedy));
    }
    all
}

/// Frames that are held, or left in the ring.
fn waiting(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    let mut all = Vec::new();
    let held = seen.count(name, Way::To, "held").0;
    if held > 0 {
        let rate = text(&seen.port(name)["rules"]["rate-out"]);
        let (until, remedy) = match rate {
            "" => (
                "it posts receive buffers".into(),
                "short bursts are normal; otherwise the guest needs CPU or a longer ring",
            ),
            rate => (
                format!("its rate-out={rate} permits them, or it posts receive buffers"),
                "normal at this rate; a shorter queue, with less delay: hold=",
            ),
        };
        let what = format!("{} held for its guest until {until}", plural(held, "frame"));
        all.push(Finding::new(Rank::Note, "held", what, remedy));
    }
    let waits = seen.count(name, Way::From, "rate_waits").1;
    if waits > 0.0 {
        let rate = text(&seen.port(name)["rules"]["rate-in"]);
        let what =
            format!("its guest has more to send than rate-in={rate}: frames wait in its ring");
        let remedy = format!("none is lost; for more: `pvswitch ctl set {name} rate-in=RATE`");
        all.push(Finding::new(Rank::Limited, "rate_in", what, remedy));
    }
    let served = seen.count(name, Way::From, "served_ns").1 / 1e9;
    let polls = seen.count(name, Way::From, "polls").1;
    let empty = seen.count(name, Way::From, "polls_empty").1;
    let queues = list(&seen.now.port(name)["ingress"]).len().max(1) as f64;
    if served / queues > 0.9 && empty < polls / 20.0 {
        let share = percent(served);
        let what =
            format!("its workers spend {share} of a CPU on it, and it always has more to send");
        let remedy = "add --workers and queues=; one queue pair is limited to one core";
        all.push(Finding::new(Rank::Limited, "worker_busy", what, remedy));
    }
    all
}

/// Frames that are lost now at other ports: they may be for this one, or from it.
fn elsewhere(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    let at = |other: &str, way: Way| {
        let abnormal = |(counter, _, rate): &(&str, u64, f64)| {
            let is_normal = find(way, counter).is_some_and(|cause| cause.normal);
            // Counted at the sender as well, or copies.
            let is_other = way == Way::To && !counter.starts_with("drops_");
            *rate > 0.0 && !is_normal && !is_other && *counter != "drops_mirror"
        };
        let lost: Vec<_> = seen.losses(other, way).into_iter().filter(abnormal).collect();
        let counts = lost.iter().map(|(counter, _, rate)| format!("{counter} {}/s", si(*rate)));
        let counts = counts.collect::<Vec<_>>().join(", ");
        let which = match way {
            Way::From => "frames, possibly destined for this port",
            Way::To => "frames to its guest, possibly from this port",
        };
        let what = format!("port {other} drops {which}: {counts}");
        let remedy = format!("`pvswitch ctl why {other}`");
        (!lost.is_empty()).then(|| Finding::new(Rank::Note, ELSEWHERE, what, remedy))
    };
    let others = seen.others(name).into_iter().map(|other| text(&other["name"]));
    others.flat_map(|other| [at(other, Way::From), at(other, Way::To)]).flatten().collect()
}

/// Directions without any frame since the port was added.
fn unused_directions(seen: &Seen<'_>, name: &str) -> Vec<Finding> {
    if seen.port(name)["up"] != true {
        return Vec::new();
    }
    let mut all = Vec::new();
    let has_queues = !list(&seen.now.port(name)["ingress"]).is_empty();
    let is_unused = |way| seen.count(name, way, "frames").0 == 0;
    if has_queues && is_unused(Way::From) {
        let what = "its guest has not sent a frame: no address is known, frames for it are flooded";
        let remedy = "set the interface up in the guest, give it an address, and ping from it";
        all.push(Finding::new(Rank::Note, "sent_nothing", what, remedy));
    }
    if is_unused(Way::To) {
        let what = "no frame was delivered to it";
        let remedy = "check whether anything sends to it: `pvswitch ctl stats`, `pvswitch ctl fdb`";
        all.push(Finding::new(Rank::Note, "got_nothing", what, remedy));
    }
    all
}

#[cfg(test)]
mod tests;
