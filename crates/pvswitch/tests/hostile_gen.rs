//! `pvswitch gen` as an attacker, and as the honest pair beside it.

mod common;

use std::time::{Duration, Instant};

use common::{Dir, Gen, Switch, wait_for};

/// Runs `gen --mode hostile` and returns its JSON.
fn played(args: &[&str]) -> serde_json::Value {
    let output = common::pvswitch().arg("gen").args(args).arg("--json").output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn gen_lists_hostile_cases_and_reports_what_it_tried() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("bad", "")]);
    let at = format!("vhost-user:{}", dir.text("bad"));
    let all = played(&["--connect", &at, "--mode", "hostile=list"]);
    let all = all.as_array().unwrap();
    let has = |name: &str| all.iter().any(|case| case["case"] == name);
    assert!(has("loops") && has("garbage") && !has("wraps") && !has("commits"));
    for (case, more) in [("outside", ""), ("garbage", ""), ("wraps", "--packed")] {
        let mode = format!("hostile={case}");
        let mut args = vec!["--connect", &at, "--mode", &mode, "--duration", "0.2"];
        args.extend(Some(more).filter(|more| !more.is_empty()));
        let report = played(&args);
        let report = &report["cases"][0];
        assert_eq!(report["case"], case);
        assert!(report["attempts"].as_u64().unwrap() > 0, "{report}");
        assert!(report["connections"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(switch.json(&["show"])["ports"][0]["name"], "bad");
    }
    assert!(switch.port("show", "bad")["faults"].as_u64().unwrap() > 0);
}

#[test]
fn checked_frames_arrive_unchanged_and_frames_of_also_count_in_no_total() {
    let dir = Dir::new();
    let ports = ["a", "b", "c"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &[], &ports);
    let (mac, also) = ("02:00:00:00:00:0b", "02:00:00:00:00:0c");
    let sink = Gen::start(&dir.path("b"), &["--mode", "sink", "--check", "--mac", mac]);
    let third = Gen::start(&dir.path("c"), &["--mode", "sink", "--mac", also]);
    switch.wait_up("b", true);
    switch.wait_up("c", true);
    wait_for("both addresses", || switch.json(&["fdb"]).to_string().matches("02:00").count() >= 2);
    let args = ["--check", "--size", "700", "--rate", "1k", "--peer", mac, "--duration", "0.5"];
    let also = format!("{also},4");
    let sent = Gen::start(&dir.path("a"), &[&args[..], &["--also", &also]].concat()).report();
    let (frames, aside) = (sent["sent_frames"].as_u64().unwrap(), &sent["aside_frames"]);
    assert!(aside.as_u64().unwrap().abs_diff(frames / 4) <= 1, "{sent}");
    wait_for("all frames", || switch.counter("b", "egress", "frames") >= frames);
    let got = sink.end();
    assert_eq!(got["corrupt_frames"], 0, "{got}");
    let ours = got["received_frames"].as_u64().unwrap() - got["foreign_frames"].as_u64().unwrap();
    assert_eq!(ours, frames);
    // And the totals of the other generator.
    let (foreign, aside) = (third.end()["foreign_frames"].as_u64().unwrap(), aside.as_u64());
    assert!((aside.unwrap()..=aside.unwrap() + 2).contains(&foreign), "{foreign} of {aside:?}");
}

/// Issue 14, row 9, its twin: receive buffers on absent pages.
#[test]
fn receiver_with_absent_pages_pays_for_them_and_the_pair_beside_it_loses_nothing() {
    for packed in [&[][..], &["--packed"]] {
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &["a", "b", "bad"].map(|name| dir.port(name, "")));
        let (mac, bad) = ("02:00:00:00:00:0b", "02:00:00:00:00:0c");
        let sink = Gen::start(&dir.path("b"), &["--mode", "sink", "--check", "--mac", mac]);
        let attack = ["--mode", "hostile=punched-receive", "--mac", bad, "--duration", "60"];
        let attacker = Gen::start(&dir.path("bad"), &[&attack[..], packed].concat());
        let known = || switch.json(&["fdb"]).to_string().matches("02:00").count() >= 2;
        wait_for("both addresses", known);
        let args = ["--check", "--size", "700", "--rate", "2k", "--peer", mac, "--duration", "1"];
        let also = format!("{bad},4");
        let sent = Gen::start(&dir.path("a"), &[&args[..], &["--also", &also]].concat()).report();
        let (frames, aside) = (&sent["sent_frames"], sent["aside_frames"].as_u64().unwrap());
        let (frames, count) =
            (frames.as_u64().unwrap(), |name| switch.counter("bad", "egress", name));
        wait_for("all frames", || switch.counter("b", "egress", "frames") >= frames);
        let lost = || ["lost_slow", "lost_no_room", "lost_aged"].iter().map(|name| count(name));
        wait_for("an end of each frame", || count("frames") + lost().sum::<u64>() >= aside);
        // Where page faults are so fast that no delivery is long, all arrive.
        let (slow, got) = (count("lost_slow"), count("frames"));
        assert!(slow > 0 || got >= aside, "{slow} lost, {got} of {aside} delivered");
        assert_eq!(switch.counter("a", "ingress", "drops_no_room"), lost().sum::<u64>());
        drop(attacker);
        let got = sink.end();
        assert_eq!(got["corrupt_frames"], 0, "{got}");
        let number = |name: &str| got[name].as_u64().unwrap();
        assert_eq!(number("received_frames") - number("foreign_frames"), frames);
    }
}

/// A racing guest, and the causes by which each kind of rewriting is counted.
struct Racing {
    kind: &'static str,
    mode: &'static str,
    more: &'static [&'static str],
    causes: &'static [&'static str],
}

const VIRTIO: [&str; 4] = ["drops_bad_hdr", "drops_same_port", "drops_bad_addr", "drops_too_long"];

const RACING: [Racing; 3] = [
    Racing { kind: "vhost-user", mode: "hostile=racing", more: &[], causes: &VIRTIO },
    Racing { kind: "vhost-user", mode: "hostile=racing", more: &["--packed"], causes: &VIRTIO },
    Racing {
        kind: "xen-local",
        mode: "hostile=vif-racing",
        more: &[],
        causes: &["drops_bad_hdr", "drops_same_port", "drops_bad_grant", "drops_runt"],
    },
];

/// Threads rewrite rings, headers, payload and the memory table, or grants, while the switch reads
/// them. Each kind of rewriting must be seen to hit, by its own counter, at the racing port and at
/// no other; and no frame arrives with another address than the one that was looked up.
/// `PVSWITCH_RACING=SECONDS`: at least that long each.
#[test]
fn racing_guest_costs_itself_frames_and_connections_and_no_one_else() {
    let least = std::env::var("PVSWITCH_RACING").map_or(0, |s| s.parse().expect("seconds"));
    RACING.iter().for_each(|racing| race(racing, Duration::from_secs(least)));
}

fn race(racing: &Racing, least: Duration) {
    let dir = Dir::new();
    let names = ["r0", "r1", "a", "b"];
    // In a VLAN of its own: its memory holds frames that it received, and it sends any part of its
    // memory to anyone.
    let ports = names.map(|name| match name.strip_prefix('r') {
        Some(_) => format!("{name}={}:{},vlan=2", racing.kind, dir.text(name)),
        None => dir.port(name, ",vlan=1"),
    });
    let switch = Switch::start(&dir, &[], &ports);
    let (mac, bad) = ("02:00:00:00:00:0b", "02:00:00:00:00:0c");
    let sink = Gen::start(&dir.path("b"), &["--mode", "sink", "--check", "--mac", mac]);
    switch.wait_up("b", true);
    wait_for("its address", || switch.json(&["fdb"]).to_string().contains(mac));
    let args = ["--check", "--size", "700", "--rate", "1k", "--peer", mac];
    let sender = Gen::start(&dir.path("a"), &args);
    let at = format!("{}:{}", racing.kind, dir.text("r{}"));
    let args = ["--connect", &at, "--count", "2", "--mode", racing.mode, "--mac", bad];
    let args = [&args[..], &["--duration", "1.5"], racing.more].concat();
    let (mut swaps, mut torn, begun) = (0, 0, Instant::now());
    let mut round = || {
        let report = played(&args);
        let number = |name: &str| report["cases"][0][name].as_u64().unwrap();
        assert_eq!(number("mixed"), 0, "a header was read twice: {report}");
        (swaps, torn) = (swaps + number("swaps"), torn + number("torn"));
        let hit = |cause: &&str| switch.counter("r0", "ingress", cause) > 0;
        let faults = switch.port("show", "r0")["faults"].as_u64().unwrap();
        racing.causes.iter().all(hit) && swaps > 10 && torn > 0 && faults > 0
    };
    while begun.elapsed() < least {
        round();
    }
    wait_for("each kind of race to hit", round);
    let sent = sender.end();
    let sent = sent["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || switch.counter("a", "ingress", "frames") >= sent);
    let got = sink.end();
    let number = |name: &str| got[name].as_u64().unwrap();
    assert_eq!(number("corrupt_frames"), 0, "{got}");
    let stats = || [switch.port("stats", "a"), switch.port("stats", "b")];
    assert_eq!(
        (number("received_frames"), number("foreign_frames")),
        (sent, 0),
        "{got} {:?}",
        stats()
    );
    for name in &names[1..] {
        assert_eq!(switch.port("show", name)["faults"], 0, "{name}");
    }
}
