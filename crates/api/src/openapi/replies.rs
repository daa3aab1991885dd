//! Schemas of replies. Tests check that the replies of a running switch have exactly these fields.

use serde_json::{Map, Value, json};

/// A field: name, schema, and a few words that say what it is.
type Member = (&'static str, Value, &'static str);

fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn number() -> Value {
    json!({ "type": "number" })
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn flag() -> Value {
    json!({ "type": "boolean" })
}

fn one_of(words: &[&str]) -> Value {
    json!({ "type": "string", "enum": words })
}

fn list(of: Value) -> Value {
    json!({ "type": "array", "items": of })
}

/// An object whose keys are names.
fn map(of: Value) -> Value {
    json!({ "type": "object", "additionalProperties": of })
}

fn maybe(of: Value) -> Value {
    json!({ "anyOf": [of, { "type": "null" }] })
}

fn named(name: &str) -> Value {
    super::reference(name)
}

/// An object that always has the first fields, and may have the others.
fn object(always: Vec<Member>, sometimes: Vec<Member>) -> Value {
    let required: Vec<_> = always.iter().map(|(name, ..)| *name).collect();
    let mut properties = Map::new();
    for (name, mut schema, help) in always.into_iter().chain(sometimes) {
        if !help.is_empty() {
            schema["description"] = help.into();
        }
        properties.insert(name.into(), schema);
    }
    json!({ "type": "object", "required": required, "properties": properties })
}

/// All schemas by name.
pub(super) fn schemas() -> Vec<(&'static str, Value)> {
    let switch = [
        ("Status", status()),
        ("PortStatus", port()),
        ("Ports", object(vec![("ports", list(named("PortStatus")), "")], vec![])),
        ("Account", account()),
        ("Accounts", accounts()),
        ("Budgets", budgets()),
        ("Stats", stats()),
        ("PortStats", port_stats()),
        ("Why", why()),
        ("Worker", worker()),
        ("Workers", object(vec![("workers", list(named("Worker")), "")], vec![])),
        ("Fdb", fdb()),
        ("Drain", drain()),
        ("Config", config()),
        ("SettingChange", setting_change()),
        ("PortChange", port_change()),
        ("StaticAddress", static_address()),
        ("Reload", reload()),
        ("ConfigProblem", config_problem()),
        ("Warnings", warnings()),
        ("Upgrade", upgrade()),
        ("GuestStats", guest_stats()),
        ("Document", json!({ "type": "object", "description": "An OpenAPI description" })),
        ("Problem", problem()),
        ("Event", event()),
        ("Events", object(vec![("events", list(named("Event")), "at most 100")], vec![])),
    ];
    switch.into()
}

fn status() -> Value {
    let costs = ["wake", "wake_late", "nap", "nap_late", "copy"].map(|name| (name, count(), ""));
    let fdb = [
        ("learned", count(), "learned addresses"),
        ("static", count(), "static addresses"),
        ("capacity", count(), "maximum number of addresses"),
    ];
    let taken = [
        ("from_pid", count(), "the previous process"),
        ("outage_us", count(), "time without forwarding, in microseconds"),
        ("killed", flag(), "whether the previous process was killed"),
    ];
    let control = [
        ("connections", count(), "open connections to the control socket"),
        ("streams", count(), "of those, streams of events"),
        ("requests", count(), "requests received"),
        ("refused", map(count()), "requests refused, by status"),
        ("closed_slow", count(), "connections closed because the client was too slow"),
        ("closed_for_others", count(), "connections closed to make room for others"),
        ("events", count(), "events sent, to any client"),
        ("events_lost", count(), "events lost to clients that read too slowly"),
    ];
    object(
        vec![
            ("version", text(), "of the program"),
            ("commit", text(), "of a release build, else empty"),
            ("pid", count(), "process id"),
            ("uptime_s", count(), "seconds since the start"),
            ("forward", one_of(&["switch", "cross"]), "how frames are forwarded"),
            ("poll", text(), "default poll policy"),
            ("call", text(), "default call policy"),
            ("workers", count(), "number of worker threads"),
            ("placement", text(), "how queues are placed on workers"),
            ("priority", one_of(&["normal", "high", "realtime"]), "scheduling of workers"),
            ("sandbox", one_of(&["on", "seccomp", "off"]), "what threads are confined to"),
            ("costs_ns", object(costs.into(), vec![]), "costs measured at the start, in ns"),
            ("http", maybe(text()), "address of --http"),
            ("taken_over", maybe(object(taken.into(), vec![])), "after an upgrade or a kill"),
            ("keep", one_of(&["on", "failed", "off"]), "whether its state is kept for a kill"),
            ("xen_auto", maybe(text()), "name of the port xen:auto"),
            ("budgets", named("Budgets"), ""),
            ("fdb", object(fdb.into(), vec![]), "use of the FDB"),
            ("control", object(control.into(), vec![]), "the control socket"),
            ("ports", list(named("PortStatus")), ""),
        ],
        vec![],
    )
}

const STATES: [&str; 8] =
    ["up", "down", "unconnected", "no-driver", "standby", "stalled", "draining", "drained"];
/// States of an address in a bridge.
const EVPN: [&str; 5] = ["announced", "pending", "yielded", "duplicate", "remote"];
const DRAINS: [&str; 3] = ["off", "draining", "drained"];

fn port() -> Value {
    let xen = [
        ("vif", text(), "DOMID/DEVID"),
        ("front", text(), "state of the front half in xenstore"),
        ("back", text(), "state of the back half in xenstore"),
        ("state", text(), "the state of the handshake, for display"),
        ("error", maybe(text()), "the last error"),
        ("takes", list(text()), "features of the guest"),
        ("queues", count(), "queues of the guest"),
        ("xenstore", one_of(&["connected", "lost"]), ""),
    ];
    object(
        vec![
            ("name", text(), ""),
            ("id", count(), "its number"),
            ("kind", text(), "what it attaches to"),
            ("up", flag(), "whether a queue is active"),
            ("state", one_of(&STATES), "its state in one word"),
            ("addresses", count(), "addresses learned from it"),
            ("addresses_limit", count(), "maximum number of addresses learned from it"),
            ("queues", count(), "queue pairs"),
            ("queues_active", count(), "of those, active"),
            ("faults", count(), "times its guest violated the protocol"),
            ("drain", one_of(&DRAINS), ""),
            ("stalled_s", maybe(count()), "seconds without receive buffers"),
            ("rules", maybe(map(text())), "rules that differ from the default, as options"),
            ("account", named("Account"), ""),
        ],
        vec![
            ("connected", flag(), "vhost-user, stream, dgram: whether its peer is connected"),
            ("connections", count(), "of those: connections so far"),
            (
                "interface_losses",
                count(),
                "tap, af-packet, af-xdp: times its interface was removed, or failed",
            ),
            (
                "dirty_log",
                flag(),
                "vhost-user: whether written pages are logged: the guest migrates",
            ),
            ("features", list(text()), "vhost-user: negotiated features"),
            ("errors", map(count()), "of those, and of vifs: errors of the peer by cause"),
            ("last_error", maybe(text()), "of those: the last one"),
            ("created", flag(), "tap: whether the switch created the interface"),
            ("offloads", text(), "tap: for display"),
            ("evpn", maybe(evpn()), "tap: with `evpn=`"),
            (
                "xdp",
                object(
                    vec![
                        ("zero_copy", flag(), "whether frames are not copied by the kernel"),
                        ("generic", flag(), "whether the switch's program runs behind the driver"),
                    ],
                    vec![],
                ),
                "af-xdp: how frames pass",
            ),
            (
                "wired_to",
                maybe(text()),
                "with `tap=vif`: the port of the vif or of its TAP, with which it exchanges all \
                 frames",
            ),
            (
                "standby",
                object(
                    vec![
                        ("other", text(), "the other port of the pair"),
                        (
                            "preferred",
                            flag(),
                            "whether it is the one that carries frames if it can",
                        ),
                        ("carries", flag(), "whether it carries frames now"),
                        ("failovers", count(), "times that it took over from the other"),
                    ],
                    vec![],
                ),
                "of a standby port, and of the one whose standby it is",
            ),
            ("xen", maybe(object(xen.into(), vec![])), "xen, xen-local: the vif"),
        ],
    )
}

fn account() -> Value {
    let entry = [
        ("used", count(), ""),
        ("limit", count(), ""),
        ("refused", count(), "requests beyond the limit"),
        ("per_second", flag(), "whether the limit is a rate"),
    ];
    let mut account = object(vec![("served_ns", count(), "time of workers, in ns")], vec![]);
    account["additionalProperties"] = object(entry.into(), vec![]);
    account["description"] = "What the port's peer uses, by resource".into();
    account
}

fn accounts() -> Value {
    object(
        vec![
            ("budgets", named("Budgets"), ""),
            ("ports", map(named("Account")), "by name of the port"),
        ],
        vec![],
    )
}

fn budgets() -> Value {
    let mut budgets = map(object(vec![("used", count(), ""), ("limit", count(), "")], vec![]));
    budgets["description"] = "Use of all ports together, by resource".into();
    budgets
}

fn stats() -> Value {
    let locks = vec![
        ("fdb", count(), "that for changes of the FDB"),
        ("assignments", count(), "that for the assignment of queues to workers"),
    ];
    let of_lock = vec![
        ("taken", count(), "times it was taken"),
        ("contended", count(), "of those, times another thread had it"),
        ("waited_ns", count(), "time waited, in ns"),
    ];
    let mut counts = map(object(of_lock, vec![]));
    counts["description"] = "Locks by name, of those taken so far".into();
    object(
        vec![
            ("uptime_ns", count(), "ns since the start"),
            ("ports", list(named("PortStats")), ""),
            ("workers", list(named("Worker")), ""),
            ("locks", object(locks, vec![]), "times a thread waited for a lock of all workers"),
            ("lock_counts", counts, ""),
        ],
        vec![],
    )
}

/// A queue: counters by name, with a few other fields.
fn queue(others: Vec<Member>) -> Value {
    let mut queue = object(others, vec![]);
    queue["additionalProperties"] = count();
    queue["description"] = "Counters by name, see docs/observability.md".into();
    queue
}

fn port_stats() -> Value {
    let ingress = vec![
        ("state", text(), "hot, warm or cold"),
        ("poll", text(), "poll policy"),
        ("drain", one_of(&DRAINS), ""),
    ];
    object(
        vec![
            ("name", text(), ""),
            ("up", flag(), ""),
            ("faults", count(), ""),
            ("account", named("Account"), ""),
            ("ingress", list(queue(ingress)), "from the guest, by queue"),
            ("egress", list(queue(vec![("call", text(), "call policy")])), "to the guest"),
        ],
        vec![],
    )
}

fn why() -> Value {
    let finding = vec![
        ("rank", one_of(&["blocked", "losing", "limited", "lost", "note"]), "importance"),
        ("cause", text(), "name of a counter, or a word"),
        ("frames", maybe(count()), "number of frames, of a cause that counts some"),
        ("frames_per_second", number(), "between the samples"),
        ("what", text(), "the finding, in words"),
        ("remedy", text(), "what to do"),
    ];
    object(
        vec![
            ("port", text(), ""),
            ("state", one_of(&STATES), "its state in one word"),
            ("seconds", number(), "time between the samples"),
            ("frames_per_second_from", number(), "from its guest, between the samples"),
            ("frames_per_second_to", number(), "to its guest, between the samples"),
            ("findings", list(object(finding, vec![])), "the most significant first"),
        ],
        vec![],
    )
}

fn worker() -> Value {
    let counts = [
        ("tid", "thread id"),
        ("rounds", "rounds over its hot queues"),
        ("sleeps", "times it slept until it was woken"),
        ("naps", "times it slept for a set time"),
        ("epoll_waits", "times it asked the kernel for notifications of guests"),
        ("moves", "queues moved to other workers"),
        ("contended", "times it waited for a queue that the control thread had locked"),
        ("queues", "queues that it serves"),
        ("load", "thousandths of its run time spent on frames"),
        ("cpu_ns", "CPU time, in ns"),
    ];
    let mut all: Vec<Member> = counts.map(|(name, help)| (name, count(), help)).into();
    all.push(("asleep", flag(), ""));
    object(all, vec![])
}

fn evpn() -> Value {
    let members = vec![
        ("bridge", text(), ""),
        ("vnis", list(count()), "VXLAN network identifiers of the bridge"),
        ("announced", count(), "addresses of the switch in the bridge"),
        ("pending", count(), "of those to be announced: refused, or beyond the rate"),
        ("yielded", count(), "addresses that moved to another host"),
        ("duplicate", count(), "addresses used alternately here and on another host"),
        ("remote", count(), "addresses on other hosts"),
        ("problems", list(text()), "what is wrong, each with a remedy"),
    ];
    object(members, vec![])
}

fn fdb() -> Value {
    let flap = vec![
        ("home", text(), "name of the port that it leaves"),
        ("moves", count(), "moves so far"),
        ("blocked_s", count(), "seconds for which it stays there"),
    ];
    let entry = vec![
        ("mac", text(), ""),
        ("vlan", count(), "0: untagged"),
        ("port", text(), ""),
        ("age_s", maybe(count()), "seconds since the last frame, or since it was added"),
        ("static", flag(), ""),
        ("flaps", maybe(object(flap, vec![])), "whether it moves between ports"),
        ("evpn", maybe(one_of(&EVPN)), "state in a bridge of `evpn=`"),
        ("vtep", maybe(text()), "VXLAN tunnel endpoint of its host, if that is another one"),
    ];
    object(vec![("entries", list(object(entry, vec![])), "")], vec![])
}

fn drain() -> Value {
    let held = "frames that are still held for other ports";
    object(vec![("drain", one_of(&DRAINS), ""), ("held", count(), held)], vec![])
}

fn config() -> Value {
    object(
        vec![
            ("config", text(), "the running configuration, TOML"),
            ("file", maybe(text()), "the file it was started from"),
            ("include", maybe(text()), "the include directory of that file"),
            ("command_line", list(text()), "ports of the command line"),
        ],
        vec![],
    )
}

fn setting_change() -> Value {
    object(vec![("setting", text(), ""), ("from", text(), ""), ("to", text(), "")], vec![])
}

fn port_change() -> Value {
    object(vec![("name", text(), ""), ("settings", list(named("SettingChange")), "")], vec![])
}

fn static_address() -> Value {
    object(vec![("address", text(), "MAC or MAC/VLAN"), ("port", text(), "")], vec![])
}

fn reload() -> Value {
    object(
        vec![
            ("file", text(), "the file that was read"),
            ("dry_run", flag(), "nothing was changed"),
            ("added", list(text()), "ports"),
            ("removed", list(text()), "ports"),
            ("replaced", list(named("PortChange")), "ports"),
            ("changed", list(named("PortChange")), "ports, changed at run time"),
            ("settings", list(named("SettingChange")), "of the switch"),
            ("restart", list(named("SettingChange")), "that need a restart"),
            ("static", list(named("StaticAddress")), "static addresses set"),
            ("static_removed", list(named("StaticAddress")), "static addresses removed"),
            (
                "warnings",
                list(named("ConfigProblem")),
                "warnings: valid settings that are probably mistakes",
            ),
        ],
        vec![],
    )
}

/// A problem of a configuration, with its place if it is in a file.
fn config_problem() -> Value {
    let place =
        vec![("file", text(), ""), ("line", count(), "from 1"), ("column", count(), "from 1")];
    object(vec![("what", text(), "")], place)
}

fn warnings() -> Value {
    let what = "warnings caused by this change";
    object(vec![("warnings", list(named("ConfigProblem")), what)], vec![])
}

fn upgrade() -> Value {
    let pid = ("pid", count(), "the process that now runs the switch");
    object(vec![pid, ("program", text(), "its program")], vec![])
}

fn guest_stats() -> Value {
    let texts = ["poll", "kick", "state"].map(|name| (name, text(), ""));
    let mut stats = object(
        vec![
            ("guest", one_of(&["nic", "gen"]), ""),
            ("connected", flag(), "whether it is connected to a switch"),
            ("uptime_ns", count(), "since the socket exists"),
            ("queues", list(queue(texts.into())), "empty while it is not connected"),
        ],
        vec![],
    );
    stats["additionalProperties"] = number();
    stats
}

fn problem() -> Value {
    object(
        vec![
            ("status", count(), "the HTTP status"),
            ("title", text(), "the reason phrase of the status"),
            ("detail", text(), "what is wrong, where, and what to do"),
            ("remedy", text(), "what to do"),
        ],
        vec![
            ("field", text(), "where: path.NAME, query.NAME, header.NAME, body or body.NAME"),
            ("value", json!({}), "the value there, unless it is long"),
            ("problems", list(named("ConfigProblem")), "of a file"),
        ],
    )
}

/// Events by name, with their fields besides `event`, `seq` and `time_ms`.
fn event() -> Value {
    let port = || ("port", text(), "name of the port");
    let queue = || vec![port(), ("queue", count(), "number of the queue")];
    let reload = ["added", "removed", "replaced", "changed"].map(|name| (name, count(), ""));
    let mac = vec![
        ("mac", text(), ""),
        ("vlan", count(), "0: untagged"),
        ("from", text(), "name of the port that it leaves"),
        ("to", text(), "name of the port that it moves to"),
        ("moves", count(), "moves so far"),
        ("blocked_s", count(), "seconds for which it stays where it was; 0: it does not"),
    ];
    let all: Vec<(&str, Vec<Member>)> = vec![
        ("port-added", vec![port()]),
        ("port-removed", vec![port()]),
        ("port-up", vec![port()]),
        ("port-down", vec![port()]),
        ("fault", vec![port(), ("cause", text(), "the violation")]),
        ("interface-lost", vec![port(), ("cause", text(), "what happened to it")]),
        ("stalled", queue()),
        ("recovered", queue()),
        ("mac-moved", vec![port(), ("moves", count(), "to this port, in the last second")]),
        ("mac-flaps", mac),
        (
            "failover",
            vec![
                port(),
                ("from", text(), "name of the port that it took over from"),
                ("cause", text(), "why"),
            ],
        ),
        ("rate-limited", vec![port(), ("way", one_of(&["in", "out"]), "in: from the guest")]),
        ("reload", reload.into()),
        ("upgrade", vec![("pid", count(), "the process that now runs the switch")]),
        ("shutdown", vec![]),
        ("lost", vec![("events", count(), "number of events lost to this client")]),
    ];
    let one = |(name, fields): (&str, Vec<Member>)| {
        let common = vec![
            ("event", json!({ "const": name }), ""),
            ("severity", one_of(&["info", "warning", "error"]), ""),
            ("seq", count(), "number of the event, from 1, without gaps"),
            ("time_ms", count(), "milliseconds since 1970"),
        ];
        object([common, fields].concat(), vec![])
    };
    json!({ "oneOf": all.into_iter().map(one).collect::<Vec<_>>() })
}
