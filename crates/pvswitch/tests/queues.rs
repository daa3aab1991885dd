//! Our front halves with several queues, as separate processes: the queue that each frame takes,
//! and the order within each flow.

mod common;

use common::{Dir, Gen, Switch, wait_for};
use serde_json::Value;

const KINDS: [&str; 2] = ["vhost-user", "xen-local"];

/// Address of port `name`.
fn at(dir: &Dir, kind: &str, name: &str) -> String {
    format!("{kind}:{}", dir.text(name))
}

/// A switch with two workers and two ports of two queues.
fn switch(dir: &Dir, kind: &str) -> Switch {
    let port = |name| format!("{name}={},queues=2", at(dir, kind, name));
    Switch::start(dir, &["--workers", "2"], &[port("a"), port("b")])
}

/// Frames of each queue, as counted by the switch.
fn queues(switch: &Switch, name: &str, way: &str) -> Vec<u64> {
    let stats = switch.port("stats", name);
    stats[way].as_array().unwrap().iter().map(|q| q["frames"].as_u64().unwrap()).collect()
}

/// Frames of each queue, as counted by the guest.
fn reported(report: &Value, key: &str) -> Vec<u64> {
    let queues = report["queues"].as_array().unwrap();
    let counts: Vec<_> = queues.iter().map(|q| q[key].as_u64().unwrap()).collect();
    assert_eq!(report[key], counts.iter().sum::<u64>(), "{report}");
    counts
}

#[test]
fn frames_use_all_queues_in_both_directions_without_loss_or_reordering() {
    for kind in KINDS {
        let dir = Dir::new();
        let switch = switch(&dir, kind);
        let sink = Gen::connect(&at(&dir, kind, "b"), &["--mode", "sink", "--queues", "2"]);
        switch.wait_up("b", true);
        let send = ["--queues", "2", "--flows", "31", "--rate", "5k", "--frames", "2500"];
        let sent = Gen::connect(&at(&dir, kind, "a"), &send).report();
        let frames = sent["sent_frames"].as_u64().unwrap();
        let total = |name, way| queues(&switch, name, way).iter().sum::<u64>();
        wait_for("all frames", || total("b", "egress") >= frames);
        let (taken, given) = (queues(&switch, "a", "ingress"), queues(&switch, "b", "egress"));
        std::thread::sleep(std::time::Duration::from_millis(50));
        let got = sink.end();
        assert_eq!(frames, 2500, "{kind}: {sent}");
        assert_eq!(reported(&sent, "sent_frames"), taken, "{kind}");
        assert!(taken[0].abs_diff(taken[1]) <= 1, "{kind}: half each, {taken:?}");
        assert_eq!(reported(&got, "received_frames"), given, "{kind}");
        assert!(given.iter().all(|frames| *frames > 100), "{kind}: by flow, {given:?}");
        assert_eq!(got["received_frames"], frames, "{kind}");
        let counts = (&got["lost_frames"], &got["late_frames"]);
        assert_eq!(counts, (&0.into(), &0.into()), "{kind}: {got}");
    }
}

#[test]
fn one_flow_uses_one_queue_and_a_guest_may_use_fewer_than_offered() {
    for kind in KINDS {
        let dir = Dir::new();
        let switch = switch(&dir, kind);
        // With a single queue, all frames take that one.
        let sink = Gen::connect(&at(&dir, kind, "b"), &["--mode", "sink"]);
        switch.wait_up("b", true);
        let send = ["--queues", "2", "--rate", "2k", "--frames", "600"];
        let sent = Gen::connect(&at(&dir, kind, "a"), &send).report();
        let frames = sent["sent_frames"].as_u64().unwrap();
        assert_eq!(frames, 600, "{kind}: {sent}");
        assert_eq!(reported(&sent, "sent_frames"), [frames, 0], "{kind}");
        wait_for("all frames", || queues(&switch, "b", "egress")[0] >= frames);
        assert_eq!(queues(&switch, "a", "ingress"), [frames, 0], "{kind}");
        assert_eq!(queues(&switch, "b", "egress"), [frames, 0], "{kind}");
        std::thread::sleep(std::time::Duration::from_millis(50));
        let got = sink.end();
        assert_eq!(reported(&got, "received_frames"), [frames], "{kind}");
    }
}

#[test]
fn delivered_frames_stay_in_order_within_their_flows() {
    for (kind, set) in KINDS.iter().flat_map(|kind| [(kind, "orphan"), (kind, "on-half-empty")]) {
        let dir = Dir::new();
        let switch = switch(&dir, kind);
        let sink = Gen::connect(&at(&dir, kind, "b"), &["--mode", "sink", "--queues", "2"]);
        switch.wait_up("b", true);
        let set = format!("tx-completion={set}");
        let send = ["--queues", "2", "--flows", "8", "--duration", "0.3", "--set", &set];
        let sent = Gen::connect(&at(&dir, kind, "a"), &send).report();
        let taken = queues(&switch, "a", "ingress");
        assert_eq!(reported(&sent, "sent_frames"), taken, "{kind} {set}: none remain in the ring");
        assert!(taken.iter().all(|frames| *frames > 200), "{kind} {set}: {taken:?}");
        let given = || queues(&switch, "b", "egress");
        let mut before = Vec::new();
        wait_for("the last frames", || std::mem::replace(&mut before, given()) == before);
        let got = sink.end();
        assert_eq!(reported(&got, "received_frames"), given(), "{kind} {set}");
        assert_eq!(got["late_frames"], 0, "{kind} {set}: {got}");
    }
}

#[test]
fn every_queue_is_echoed_and_wakes_its_sleeping_reader() {
    for kind in KINDS {
        let dir = Dir::new();
        let switch = switch(&dir, kind);
        let (one, two) = ("02:00:00:00:00:01", "02:00:00:00:00:02");
        let echo = ["--mode", "echo", "--queues", "2", "--mac", two, "--peer", one];
        let echo = Gen::connect(&at(&dir, kind, "b"), &echo);
        switch.wait_up("b", true);
        let ask = ["--mode", "rr", "--queues", "2", "--flows", "32", "--rate", "500"];
        let args = [&ask[..], &["--duration", "0.6"]].concat();
        let asked = Gen::connect(&at(&dir, kind, "a"), &args).report();
        assert!(asked["latency_samples"].as_u64().unwrap() > 20, "{kind}: {asked}");
        // Replies arrive on the flow's queue; on a busy machine one may be late.
        assert!(asked["lost_frames"].as_u64().unwrap() <= 2, "{kind}: {asked}");
        for key in ["sent_frames", "received_frames"] {
            assert!(reported(&asked, key).iter().all(|n| *n > 5), "{kind}: {asked}");
        }
        let echoed = echo.end();
        let came = reported(&echoed, "received_frames");
        assert!(came.iter().all(|n| *n > 5), "{kind}: {echoed}");
        assert_eq!(echoed["sent_frames"], echoed["received_frames"], "{kind}: {echoed}");
    }
}

#[test]
fn a_guest_with_its_own_hash_gets_each_address_pair_on_one_queue() {
    let dir = Dir::new();
    let kind = "xen-local";
    let switch = switch(&dir, kind);
    for (options, takes) in [("", 2), (",hash=on", 1)] {
        let to = format!("{}{options}", at(&dir, kind, "b"));
        let sink = Gen::connect(&to, &["--mode", "sink", "--queues", "2"]);
        switch.wait_up("b", true);
        let send = ["--queues", "2", "--flows", "31", "--rate", "5k", "--duration", "0.3"];
        let sent = Gen::connect(&at(&dir, kind, "a"), &send).report();
        let mut before = Vec::new();
        let given = || queues(&switch, "b", "egress");
        wait_for("the last frames", || std::mem::replace(&mut before, given()) == before);
        let got = sink.end();
        assert_eq!(got["received_frames"], sent["sent_frames"], "{options}");
        let counts = (&got["lost_frames"], &got["late_frames"]);
        assert_eq!(counts, (&0.into(), &0.into()), "{options}: {got}");
        // All flows are UDP between two addresses, and the netif hash does not cover UDP ports.
        let used = reported(&got, "received_frames").iter().filter(|frames| **frames > 50).count();
        assert_eq!(used, takes, "{options}: {got}");
        let has = got["features"].as_array().unwrap().iter().any(|name| name == "hash");
        assert_eq!(has, !options.is_empty(), "{got}");
        switch.wait_up("b", false);
    }
}
