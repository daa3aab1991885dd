//! Situations as tables of replies.

use serde_json::json;

use super::*;

/// A port that is up, without traffic.
fn up(name: &str, id: u64) -> Value {
    json!({ "name": name, "id": id, "kind": format!("vhost-user:/run/{name}"), "up": true,
            "state": "up", "queues": 1, "queues_active": 1, "faults": 0, "rules": null,
            "connected": true, "addresses": 1, "addresses_limit": 4096, "errors": {},
            "last_error": null })
}

struct Case {
    show: Value,
    before: Value,
    now: Value,
    fdb: Value,
}

impl Case {
    /// Ports `a` and `b` that exchange frames without any loss.
    fn healthy() -> Self {
        let stats = |secs: u64, frames: u64| {
            let port = |name: &str| {
                json!({ "name": name, "account": {},
                        "ingress": [{ "frames": frames, "drops_runt": 0, "drops_no_room": 0 }],
                        "egress": [{ "frames": frames, "lost_no_room": 0, "held": 0 }] })
            };
            json!({ "uptime_ns": secs * 1_000_000_000, "ports": [port("a"), port("b")] })
        };
        Self {
            show: json!({ "forward": "switch", "ports": [up("a", 0), up("b", 1)],
                          "fdb": { "learned": 2, "static": 0, "capacity": 65536 } }),
            before: stats(10, 1_000),
            now: stats(12, 3_000),
            fdb: json!({ "entries": [
                { "mac": "02:00:00:00:00:0a", "vlan": 0, "port": "a", "age_s": 0, "static": false },
                { "mac": "02:00:00:00:00:0b", "vlan": 0, "port": "b", "age_s": 0, "static": false },
            ] }),
        }
    }

    fn seen(&self) -> Seen<'_> {
        Seen::new(&self.show, &self.before, &self.now, &self.fdb)
    }

    /// Changes a field of a port in `show`.
    fn with(mut self, port: usize, key: &str, value: Value) -> Self {
        self.show["ports"][port][key] = value;
        self
    }

    /// Adds a counter, with its values in both samples.
    fn counter(mut self, port: usize, way: &str, name: &str, before: u64, now: u64) -> Self {
        self.before["ports"][port][way][0][name] = before.into();
        self.now["ports"][port][way][0][name] = now.into();
        self
    }

    /// Findings on `a`.
    fn all(&self) -> Vec<Finding> {
        let all = all(&self.seen(), "a");
        // The switch keeps less of the first sample.
        let before = first_sample(&self.before, "a");
        assert_eq!(super::all(&Seen::new(&self.show, &before, &self.now, &self.fdb), "a"), all);
        all
    }

    /// The first finding on `a`: rank, cause, text and remedy.
    fn first(&self) -> (Rank, String, String) {
        let first = self.all().into_iter().next().expect("always one");
        assert!(!first.remedy.is_empty());
        (first.rank, first.cause.clone(), format!("{} -> {}", first.what, first.remedy))
    }
}

#[track_caller]
fn check(case: &Case, rank: Rank, cause: &str, words: &[&str]) {
    let first = case.first();
    assert_eq!((first.0, first.1.as_str()), (rank, cause), "{}", first.2);
    for word in words {
        assert!(first.2.contains(word), "'{word}' is not in: {}", first.2);
    }
}

#[test]
fn healthy_port_has_rates_and_no_reason() {
    let case = Case::healthy();
    assert_eq!(case.seen().rates("a"), (1_000.0, 1_000.0));
    check(&case, Rank::Note, "none", &["nothing at this switch", "pvswitch capture a"]);
    assert_eq!(case.all().len(), 1);
}

#[test]
fn links_that_are_down_come_first_with_their_cause() {
    let down =
        |state: &str| Case::healthy().with(0, "state", json!(state)).with(0, "up", json!(false));
    let blocked =
        |case: &Case, cause: &str, words: &[&str]| check(case, Rank::Blocked, cause, words);
    blocked(&down("unconnected"), "unconnected", &["no front-end", "/run/a", "socket-group="]);
    let case = down("unconnected").with(0, "last_error", json!("cannot map"));
    blocked(&case, "unconnected", &["its last error: cannot map"]);
    let case = down("unconnected").with(0, "kind", json!("vhost-user:/run/a,mode=client"));
    blocked(&case, "unconnected", &["no process listens"]);
    blocked(&down("no-driver"), "no_driver", &["no receive queue enabled", "driver"]);
    blocked(&down("no-driver").with(0, "faults", json!(1)), "fault", &["violated the protocol"]);
    let standby = down("standby").with(0, "standby", json!({ "other": "up" }));
    blocked(&standby, "standby", &["port up carries the frames", "ctl why up"]);
    blocked(&down("drained"), "drained", &["pvswitch ctl drain a --off"]);
    let stalled =
        Case::healthy().with(0, "state", json!("stalled")).with(0, "stalled_s", json!(75));
    blocked(&stalled, "stalled", &["no receive buffers for 75 s"]);
    blocked(&down("down").with(0, "kind", json!("tap:t0")), "down", &["tap:t0", "log"]);
    let removed = down("down").with(0, "last_error", json!("the TAP interface was removed"));
    blocked(&removed, "down", &["it is down; its last error: the TAP", "ctl del-port a"]);
    let missing = removed.with(0, "kind", json!("af-packet:eth1"));
    blocked(&missing, "down", &["set the interface up", "ctl reload"]);
    let nowhere = json!("network namespace `n` does not exist (/run/netns/n is missing): make it");
    let nowhere = missing.with(0, "last_error", nowhere);
    blocked(&nowhere, "down", &["`n` does not exist", "ip netns add", "ctl reload"]);
    let xen = json!({ "vif": "3/0", "state": "waiting for the guest", "front": "Initialising",
                      "back": "InitWait", "error": "ring-ref is missing", "xenstore": "lost" });
    let words = ["vif 3/0 is waiting for the guest", "ring-ref is missing; lost", "xen.md"];
    blocked(&down("down").with(0, "xen", xen), "vif", &words);
}

#[test]
fn frames_without_a_port_to_go_to() {
    let alone = Case::healthy().with(1, "up", json!(false));
    check(&alone, Rank::Blocked, "alone", &["no other port is up"]);
    let mut cross =
        Case::healthy().with(1, "up", json!(false)).with(1, "state", json!("no-driver"));
    cross.show["forward"] = "cross".into();
    check(&cross, Rank::Blocked, "partner", &["its partner b is no-driver"]);
    cross.show["ports"].as_array_mut().unwrap().pop();
    check(&cross, Rank::Blocked, "partner", &["has no partner"]);
}

#[test]
fn rules_that_separate_ports() {
    let rules = |a: Value, b: Value| Case::healthy().with(0, "rules", a).with(1, "rules", b);
    let isolated = || json!({ "isolated": "on" });
    let case = rules(isolated(), isolated());
    check(&case, Rank::Blocked, "isolated", &["so are: b", "pvswitch ctl set a isolated=off"]);
    check(&rules(isolated(), Value::Null), Rank::Note, "none", &[]);
    let case = rules(json!({ "vlan": "10" }), json!({ "trunk": "20-30", "native": "1" }));
    check(&case, Rank::Blocked, "vlan", &["its VLANs (10) and: b has 1+20-30"]);
    let case = rules(json!({ "vlan": "10" }), Value::Null);
    check(&case, Rank::Limited, "vlan_tags", &["without VLAN options: b"]);
    let case = rules(Value::Null, json!({ "vlan": "10" }));
    check(&case, Rank::Limited, "vlan_tags", &["with VLAN options: b"]);
    check(&rules(json!({ "vlan": "10" }), json!({ "trunk": "9-11" })), Rank::Note, "none", &[]);
}

#[test]
fn losses_now_precede_earlier_ones_and_name_the_rule() {
    let case = Case::healthy()
        .counter(0, "ingress", "drops_runt", 7, 7)
        .counter(0, "ingress", "drops_spoofed_mac", 100, 300)
        .counter(0, "ingress", "drops_ra", 0, 20)
        .counter(0, "egress", "drops_down", 1, 1)
        .counter(0, "ingress", "drops_link_local", 5, 6);
    let all = case.all();
    let causes: Vec<_> = all.iter().map(|f| (f.rank, f.cause.as_str())).collect();
    let want = [
        (Rank::Losing, "drops_spoofed_mac"),
        (Rank::Losing, "drops_ra"),
        (Rank::Lost, "drops_runt"),
        (Rank::Lost, "drops_down"),
        (Rank::Note, "drops_link_local"),
    ];
    assert_eq!(causes, want);
    assert_eq!((all[0].frames, all[0].per_second), (Some(300), 100.0));
    assert!(all[0].what.contains("300 frames from its guest have a source MAC"), "{:?}", all[0]);
    assert!(all[0].what.ends_with("(drops_spoofed_mac, 100/s now)"), "{:?}", all[0]);
    assert!(all[1].remedy.contains("pvswitch ctl set a ra=on"), "{:?}", all[1]);
    assert!(all[2].what.ends_with("(drops_runt)"), "{:?}", all[2]);
    let unknown = Case::healthy().counter(0, "ingress", "drops_of_a_newer_switch", 1, 2);
    check(&unknown, Rank::Losing, "drops_of_a_newer_switch", &["were dropped", "observability.md"]);
}

#[test]
fn full_receiver_is_named_at_its_sender_and_at_itself() {
    let case = Case::healthy().counter(0, "ingress", "drops_no_room", 0, 64).counter(
        1,
        "egress",
        "lost_no_room",
        0,
        64,
    );
    check(
        &case,
        Rank::Losing,
        "drops_no_room",
        &["found their receiver's queue full: b", "rx_queue_size"],
    );
    let at_b = all(&case.seen(), "b");
    assert_eq!((at_b[0].rank, at_b[0].cause.as_str()), (Rank::Losing, "lost_no_room"));
    assert!(at_b.iter().any(|f| f.cause == "elsewhere" && f.what.contains("port a drops")));
}

#[test]
fn losses_at_a_receiver_are_named_at_a_sender() {
    let case = Case::healthy().counter(1, "egress", "drops_rate", 0, 64);
    let words = ["port b drops frames to its guest, possibly from this port: drops_rate", "why b"];
    check(&case, Rank::Note, "elsewhere", &words);
    let none = case.all().into_iter().find(|finding| finding.cause == "none").unwrap();
    assert!(none.what.starts_with("nothing at this port blocks"), "{}", none.what);
    // It is counted at the sender that it concerns; or a copy.
    for counter in ["lost_no_room", "drops_mirror"] {
        let case = Case::healthy().counter(1, "egress", counter, 0, 64);
        assert!(case.all().iter().all(|finding| finding.cause != "elsewhere"), "{counter}");
    }
}

#[test]
fn addresses_elsewhere_and_full_tables() {
    let mac = |mac: &str| Case::healthy().with(0, "rules", json!({ "mac": mac }));
    let words = ["02:00:00:00:00:0b is at port b (learned)", "fdb del 02:00:00:00:00:0b"];
    let both = "02:00:00:00:00:0a+02:00:00:00:00:0b";
    check(&mac(both), Rank::Limited, "address_elsewhere", &words);
    check(&mac("02:00:00:00:00:0a"), Rank::Note, "none", &[]);
    let mut twice = Case::healthy();
    twice.fdb["entries"][1]["mac"] = "02:00:00:00:00:0a".into();
    twice.fdb["entries"][1]["vlan"] = 7.into();
    check(&twice, Rank::Note, "address_twice", &["here in VLAN 0, and at port b in VLAN 7"]);
    let limit = Case::healthy().with(0, "addresses", json!(4096));
    check(&limit, Rank::Limited, "addresses_limit", &["4096 addresses"]);
    let mut full = Case::healthy();
    full.show["fdb"]["learned"] = 65536.into();
    check(&full, Rank::Limited, "fdb_full", &["65536 of 65536"]);
}

#[test]
fn sources_that_stay_at_another_port() {
    let case = |before, now| Case::healthy().counter(0, "ingress", "mac_elsewhere", before, now);
    let words = ["20 frames from its guest had a source", "10/s now", "pvswitch ctl fdb"];
    check(&case(0, 20), Rank::Limited, "mac_elsewhere", &words);
    check(&case(20, 20), Rank::Note, "mac_elsewhere", &["20 frames"]);
    check(&case(0, 0), Rank::Note, "none", &[]);
}

#[test]
fn refusals_faults_and_errors() {
    let mut case = Case::healthy();
    let entry =
        |refused: u64| json!({ "used": 1, "limit": 10, "refused": refused, "per_second": true });
    case.before["ports"][0]["account"]["messages"] = entry(3);
    case.now["ports"][0]["account"] =
        json!({ "messages": entry(5), "flood-copies": entry(9), "served_ns": 5 });
    let words = ["refused messages 5 times (limit 10 per second)", "limit-messages=N"];
    check(&case, Rank::Limited, "messages", &words);
    case.before["ports"][0]["account"]["messages"] = entry(5);
    check(&case, Rank::Note, "messages", &[]);
    let case = Case::healthy().with(0, "faults", json!(2)).with(0, "last_error", json!("loop"));
    check(
        &case,
        Rank::Lost,
        "faults",
        &["violated the protocol 2 times, and recovered; last: loop"],
    );
    let case = Case::healthy().with(0, "errors", json!({ "map": 2 }));
    check(&case, Rank::Note, "errors", &["map 2"]);
}

#[test]
fn waiting_frames_busy_workers_and_silence() {
    let held = Case::healthy().counter(0, "egress", "held", 0, 3);
    check(&held, Rank::Note, "held", &["3 frames held for its guest"]);
    let held = held.with(0, "rules", json!({ "rate-out": "1Mbit" }));
    check(&held, Rank::Note, "held", &["until its rate-out=1Mbit permits them"]);
    let limited = Case::healthy().with(0, "rules", json!({ "rate-in": "100Mbit" })).counter(
        0,
        "ingress",
        "rate_waits",
        5,
        9,
    );
    check(&limited, Rank::Limited, "rate_in", &["more to send than rate-in=100Mbit"]);
    let dropped = Case::healthy().counter(0, "egress", "drops_rate", 5, 9);
    check(&dropped, Rank::Losing, "drops_rate", &["beyond its rate-out="]);
    let busy = |empty: u64| {
        Case::healthy()
            .counter(0, "ingress", "served_ns", 0, 1_990_000_000)
            .counter(0, "ingress", "polls", 0, 1_000)
            .counter(0, "ingress", "polls_empty", 0, empty)
    };
    check(&busy(10), Rank::Limited, "worker_busy", &["--workers"]);
    check(&busy(900), Rank::Note, "none", &[]);
    let idle = Case::healthy()
        .counter(0, "ingress", "frames", 0, 0)
        .counter(0, "egress", "frames", 0, 0)
        .with(0, "queues", json!(4));
    let causes: Vec<_> = idle.all().into_iter().map(|finding| finding.cause).collect();
    assert_eq!(causes, ["queues", "sent_nothing", "got_nothing", "none"]);
}

#[test]
fn restarted_switch_and_empty_replies_have_no_rates() {
    let mut case = Case::healthy().counter(0, "ingress", "drops_runt", 9, 5);
    check(&case, Rank::Lost, "drops_runt", &["5 frames"]);
    case.before = json!({});
    assert!(case.all().iter().all(|finding| finding.per_second >= 0.0));
    let empty = json!({});
    let seen = Seen::new(&empty, &empty, &empty, &empty);
    assert_eq!(all(&seen, "a")[0].rank, Rank::Blocked);
}
