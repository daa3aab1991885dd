//! Rules of ports whose peers are tenants: port security, isolation and VLANs of a running switch.

mod common;

use common::{Bystanders, Dir, Gen, Switch, wait_for};
use serde_json::Value;

/// Address of port `n`'s own guest.
fn mac(n: u8) -> String {
    format!("02:00:00:00:00:{n:02x}")
}

/// A sink behind `port` that is up and has announced the address of guest `n`.
fn sink(switch: &Switch, dir: &Dir, port: &str, n: u8) -> Gen {
    let sink = Gen::start(&dir.path(port), &["--mode", "sink", "--mac", &mac(n)]);
    switch.wait_up(port, true);
    wait_for("its announcement", || switch.counter(port, "ingress", "frames") > 0);
    sink
}

/// A guest behind `port` that sends slowly from the address of guest `n`.
fn sender(dir: &Dir, port: &str, n: u8) -> Gen {
    Gen::start(&dir.path(port), &["--mac", &mac(n), "--peer", &mac(2), "--rate", "100"])
}

/// Frames that a port sends from the address of one guest to that of another.
struct Flow<'a> {
    port: &'a str,
    from: u8,
    to: u8,
}

/// Sends 100 frames. Returns the number of frames of the port that were dropped for `cause`, and
/// that `receiver` got, without the announcements of its locked addresses.
fn send(switch: &Switch, dir: &Dir, flow: Flow<'_>, cause: &str, receiver: &str) -> (u64, u64) {
    let Flow { port, from, to } = flow;
    let seen = || {
        let dropped = switch.counter(port, "ingress", cause);
        let taken = switch.counter(port, "ingress", "frames");
        (dropped, switch.counter(receiver, "egress", "frames"), taken)
    };
    let before = seen();
    let args = ["--mac", &mac(from), "--peer", &mac(to), "--frames", "100", "--rate", "5k"];
    let kind = switch.port("show", port)["kind"].clone();
    let sent = match kind.as_str() {
        Some(at) if at.starts_with("xen-local:") => Gen::connect(at, &args),
        _ => Gen::start(&dir.path(port), &args),
    };
    let sent = sent.report();
    assert_eq!(sent["sent_frames"], 100, "{sent}");
    switch.wait_up(port, false);
    let after = seen();
    let announced = after.2 - before.2 - 100;
    (after.0 - before.0, (after.1 - before.1).saturating_sub(announced))
}

fn error(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert!(!out.status.success(), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

fn rules(switch: &Switch, port: &str) -> Value {
    switch.port("show", port)["rules"].clone()
}

/// Two guests, and a third that sends as the first.
#[test]
fn spoofing_third_is_dropped_until_its_rules_permit_the_address() {
    let dir = Dir::new();
    let third = format!(",mac={},ip=10.0.0.3", mac(3));
    let switch =
        Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", ""), dir.port("c", &third)]);
    let _a = sink(&switch, &dir, "a", 1);
    let _b = sink(&switch, &dir, "b", 2);
    let owner = |n: u8| {
        let fdb = switch.json(&["fdb"]);
        let entries = fdb["entries"].as_array().unwrap().clone();
        entries.into_iter().find(|e| e["mac"] == mac(n)).map(|e| e["port"].clone())
    };
    assert_eq!(owner(1), Some("a".into()));
    // Its own address; another's MAC.
    let spoofed = "drops_spoofed_mac";
    assert_eq!(send(&switch, &dir, Flow { port: "c", from: 3, to: 2 }, spoofed, "b"), (0, 100));
    let (dropped, got) = send(&switch, &dir, Flow { port: "c", from: 1, to: 2 }, spoofed, "b");
    assert!(dropped >= 100 && got == 0, "{dropped} {got}");
    assert_eq!(owner(1), Some("a".into()), "the address has not moved");
    // Both MACs, but the IP address of one.
    let both = format!("mac={}+{}", mac(3), mac(1));
    switch.json(&["set", "c", &both]);
    let (dropped, got) =
        send(&switch, &dir, Flow { port: "c", from: 1, to: 2 }, "drops_spoofed_ip", "b");
    assert!(dropped >= 100 && got == 0, "{dropped} {got}");
    switch.json(&["set", "c", "ip=10.0.0.3+10.0.0.1"]);
    assert_eq!(
        send(&switch, &dir, Flow { port: "c", from: 1, to: 2 }, "drops_spoofed_ip", "b"),
        (0, 100)
    );
    let c = sender(&dir, "c", 1);
    wait_for("the address to move", || owner(1) == Some("c".into()));
    // Learned addresses that it may not have any more are removed.
    switch.json(&["set", "c", &format!("mac={}", mac(3))]);
    assert_eq!((owner(1), owner(2)), (None, Some("b".into())));
    c.end();
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert!(shown.contains("rules    ip=10.0.0.3+10.0.0.1 mac=02:00:00:00:00:03\n"), "{shown}");
    switch.json(&["set", "c", "mac=none", "ip=none"]);
    assert_eq!((rules(&switch, "c"), rules(&switch, "a")), (Value::Null, Value::Null));
    assert_eq!(send(&switch, &dir, Flow { port: "c", from: 9, to: 2 }, spoofed, "b"), (0, 100));
}

#[test]
fn xen_guest_that_spoofs_is_dropped_too() {
    let dir = Dir::new();
    let x = format!("x=xen-local:{},mac={},ip=10.0.0.3", dir.text("x"), mac(3));
    let switch = Switch::start(&dir, &[], &[dir.port("b", ""), x]);
    let _b = sink(&switch, &dir, "b", 2);
    assert_eq!(
        send(&switch, &dir, Flow { port: "x", from: 3, to: 2 }, "drops_spoofed_mac", "b"),
        (0, 100)
    );
    let (dropped, got) =
        send(&switch, &dir, Flow { port: "x", from: 1, to: 2 }, "drops_spoofed_mac", "b");
    assert!(dropped >= 100 && got == 0, "{dropped} {got}");
    switch.json(&["set", "x", &format!("mac={}+{}", mac(3), mac(1))]);
    let (dropped, got) =
        send(&switch, &dir, Flow { port: "x", from: 1, to: 2 }, "drops_spoofed_ip", "b");
    assert!(dropped >= 100 && got == 0, "{dropped} {got}");
    switch.json(&["set", "x", "ip=none", "mac=none"]);
    assert_eq!(
        send(&switch, &dir, Flow { port: "x", from: 1, to: 2 }, "drops_spoofed_mac", "b"),
        (0, 100)
    );
}

#[test]
fn port_security_applies_to_the_cross_connect() {
    let dir = Dir::new();
    let ports = [dir.port("a", &format!(",mac={}", mac(1))), dir.port("b", "")];
    let switch = Switch::start(&dir, &["--forward", "cross"], &ports);
    let _sink = sink(&switch, &dir, "b", 2);
    assert_eq!(
        send(&switch, &dir, Flow { port: "a", from: 1, to: 2 }, "drops_spoofed_mac", "b"),
        (0, 100)
    );
    let (dropped, got) =
        send(&switch, &dir, Flow { port: "a", from: 3, to: 2 }, "drops_spoofed_mac", "b");
    assert!(dropped >= 100 && got == 0, "{dropped} {got}");
}

#[test]
fn isolated_ports_reach_only_others_and_changes_disturb_no_other_port() {
    let dir = Dir::new();
    let ports = ["a", "b", "c", "d", "e"].map(|name| {
        let options = if ["a", "b"].contains(&name) { ",isolated=on" } else { "" };
        dir.port(name, options)
    });
    let switch = Switch::start(&dir, &["--workers", "2"], &ports);
    let others = Bystanders::start(&switch, &dir, "d", "e");
    let _b = sink(&switch, &dir, "b", 2);
    let _c = sink(&switch, &dir, "c", 3);
    assert_eq!(
        send(&switch, &dir, Flow { port: "a", from: 1, to: 2 }, "drops_isolated", "b"),
        (100, 0)
    );
    assert_eq!(send(&switch, &dir, Flow { port: "a", from: 1, to: 3 }, "drops_isolated", "c").0, 0);
    for _ in 0..20 {
        switch.json(&["set", "a", "isolated=off"]);
        switch.json(&["set", "a", "isolated=on", "vlan=7"]);
        switch.json(&["set", "a", "isolated=off", "vlan=none"]);
    }
    let (dropped, got) =
        send(&switch, &dir, Flow { port: "a", from: 1, to: 2 }, "drops_isolated", "b");
    assert!(dropped == 0 && got >= 100, "{dropped} {got}");
    others.wait_for_replies(&switch);
    others.end();
}

#[test]
fn vlans_separate_access_ports_and_are_tagged_on_trunks() {
    let dir = Dir::new();
    let ports = [
        dir.port("a", ",vlan=10"),
        dir.port("b", ",vlan=10"),
        dir.port("c", ",vlan=20"),
        dir.port("t", ",trunk=10-19+30,native=20"),
    ];
    let switch = Switch::start(&dir, &[], &ports);
    let _b = sink(&switch, &dir, "b", 2);
    let _c = sink(&switch, &dir, "c", 3);
    let _t = sink(&switch, &dir, "t", 4);
    let bytes = |port: &str| switch.counter(port, "egress", "bytes");
    assert_eq!(send(&switch, &dir, Flow { port: "a", from: 1, to: 2 }, "drops_vlan", "b").0, 0);
    let vlan_of = |n: u8| {
        let fdb = switch.json(&["fdb"]);
        let entries = fdb["entries"].as_array().unwrap().clone();
        entries.into_iter().find(|e| e["mac"] == mac(n)).map(|e| e["vlan"].clone())
    };
    assert_eq!([2, 3, 4].map(vlan_of), [10, 20, 20].map(|vlan| Some(vlan.into())));
    // An address of another VLAN is unknown: the frames are flooded in their own, tagged on the
    // trunk.
    let (before, got) = (bytes("t"), switch.counter("c", "egress", "frames"));
    let (dropped, frames) =
        send(&switch, &dir, Flow { port: "a", from: 1, to: 3 }, "drops_vlan", "t");
    assert!(dropped == 0 && frames >= 100);
    assert_eq!(bytes("t") - before, frames * 64);
    assert_eq!(switch.counter("c", "egress", "frames"), got);
    // In the native VLAN there is no tag.
    let a = sender(&dir, "a", 1);
    wait_for("an address", || vlan_of(1) == Some(10.into()));
    switch.json(&["set", "a", "vlan=20"]);
    wait_for("its new VLAN", || vlan_of(1) == Some(20.into()));
    let fdb = switch.json(&["fdb"])["entries"].as_array().unwrap().clone();
    assert_eq!(fdb.iter().filter(|entry| entry["mac"] == mac(1)).count(), 1, "{fdb:?}");
    a.end();
    switch.wait_up("a", false);
    let before = bytes("t");
    let (_, frames) = send(&switch, &dir, Flow { port: "a", from: 1, to: 4 }, "drops_vlan", "t");
    assert!(frames >= 100);
    assert_eq!(bytes("t") - before, frames * 60);
}

#[test]
fn invalid_rules_are_refused_and_change_nothing() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",vlan=5,isolated=on")]);
    let before = rules(&switch, "a");
    assert_eq!(before["vlan"], "5");
    for (setting, want) in [
        ("mac=02:00:00:00:00", "is not a MAC address like"),
        ("mac=33:33:00:00:00:01", "is a multicast address, not that of one interface"),
        ("ip=10.0.0.0/24", "list single addresses, not prefixes"),
        ("vlan=4095", "vlan=4095: use 1 to 4094, or none"),
        ("trunk=5-3", "'5-3' is not a VLAN or a range like 10-20"),
        ("trunk=7", "port 'a': vlan=5 and trunk= exclude each other"),
        ("native=7", "port 'a': native=7 needs a trunk"),
        ("isolated=yes", "use off, on"),
        ("ra=1", "ra=1: use off, on"),
        ("isolted=on", "did you mean 'isolated'?"),
    ] {
        let error = error(&switch, &["set", "a", "weight=7", "isolated=off", setting]);
        assert!(error.contains(want), "{setting}: {error}");
        assert_eq!(rules(&switch, "a"), before, "{setting}");
    }
    assert_eq!(switch.port("stats", "a")["ingress"][0]["weight"], 1);
    let queue = error(&switch, &["set", "a/0", "vlan=7"]);
    assert!(queue.contains("vlan is a setting of the port, not of a queue"), "{queue}");
    let added = error(&switch, &["add-port", "b=null,trunk=5,vlan=7"]);
    assert!(added.contains("exclude each other"), "{added}");
    assert_eq!(switch.port("show", "b"), Value::Null);
}

/// A removed port leaves no rules to the next port with its number.
#[test]
fn rules_end_with_their_port() {
    let dir = Dir::new();
    let switch =
        Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", ",mac=02:00:00:00:00:09")]);
    let _sink = sink(&switch, &dir, "a", 1);
    switch.json(&["del-port", "b"]);
    switch.json(&["add-port", &dir.port("c", "")]);
    assert_eq!(switch.port("show", "c")["id"], 1);
    assert_eq!(
        send(&switch, &dir, Flow { port: "c", from: 2, to: 1 }, "drops_spoofed_mac", "a"),
        (0, 100)
    );
}
