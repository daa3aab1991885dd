//! Addresses that flap between ports of a running switch: reported, and blocked if asked.

mod common;

use common::{Bystanders, Dir, Gen, Switch, wait_for};
use serde_json::Value;

const OWN: &str = "02:00:00:00:00:01";
const OTHER: &str = "02:00:00:00:00:02";

/// A guest behind `port` that sends slowly from `OWN`.
fn sender(dir: &Dir, port: &str) -> Gen {
    Gen::start(&dir.path(port), &["--mac", OWN, "--peer", OTHER, "--rate", "200"])
}

fn entry(switch: &Switch) -> Value {
    let fdb = switch.json(&["fdb"]);
    let entries = fdb["entries"].as_array().unwrap().clone();
    entries.into_iter().find(|entry| entry["mac"] == OWN).unwrap_or_default()
}

fn text(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert!(out.status.success(), "{args:?}: {out:?}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn forged_address_is_reported_and_with_the_guard_its_owner_keeps_it() {
    let dir = Dir::new();
    let ports = ["owner", "forger", "x", "y"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &[], &ports);
    let bystanders = Bystanders::start(&switch, &dir, "x", "y");
    let _owner = sender(&dir, "owner");
    wait_for("its address", || entry(&switch)["port"] == "owner");
    let _forger = sender(&dir, "forger");
    wait_for("a report", || switch.log().contains("flaps between ports 'owner' and 'forger'"));
    let count = |port: &str, counter: &str| switch.counter(port, "ingress", counter);
    assert!(count("forger", "mac_moves") > 5 && count("forger", "mac_flaps") > 0);
    assert_eq!((count("owner", "mac_flaps"), count("forger", "drops_loop_guard")), (0, 0));
    wait_for("the flap in ctl fdb", || entry(&switch)["flaps"]["home"] == "owner");
    assert!(text(&switch, &["fdb"]).contains("left owner"), "{}", text(&switch, &["fdb"]));
    let why = text(&switch, &["why", "owner"]);
    assert!(why.contains(&format!("address {OWN} flaps")), "{why}");

    // Both have the guard: only the port that takes the address is refused.
    for port in ["owner", "forger"] {
        switch.json(&["set", port, "loop-guard=block", "loop-guard-time=3600"]);
    }
    wait_for("the block", || entry(&switch)["flaps"]["blocked_s"].as_u64() > Some(0));
    let before = (count("owner", "frames"), count("forger", "drops_loop_guard"));
    wait_for("frames of both", || {
        assert_eq!(entry(&switch)["port"], "owner", "it never moves");
        count("owner", "frames") > before.0 + 200
            && count("forger", "drops_loop_guard") > before.1 + 200
    });
    assert_eq!(count("owner", "drops_loop_guard"), 0);
    let why = text(&switch, &["why", "forger"]);
    assert!(why.contains("loop-guard=block refuses"), "{why}");

    // Recovers when the setting is removed; others lost nothing.
    switch.json(&["set", "forger", "loop-guard=report"]);
    let dropped = count("forger", "drops_loop_guard");
    wait_for("a move", || entry(&switch)["port"] == "forger");
    assert!(count("forger", "drops_loop_guard") <= dropped + 64, "a burst at most");
    bystanders.wait_for_replies(&switch);
    bystanders.end();
}

#[test]
fn invalid_values_of_the_guard_are_refused() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",loop-guard=block")]);
    let rules = || switch.port("show", "a")["rules"].clone();
    let before = rules();
    assert_eq!(before, serde_json::json!({ "loop-guard": "block" }));
    for (bad, hint) in [
        ("loop-guard=on", "report"),
        ("loop-guard-time=0", "1 to 3600"),
        ("loop-guard-time=3601", "1 to 3600"),
    ] {
        let out = switch.ctl(&["set", "a", bad]);
        let error = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && error.contains(hint), "{bad}: {error}");
        assert_eq!(rules(), before);
    }
}
