//! `ctl why`: real situations, and the first reason that it gives for each.

mod common;

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use serde_json::Value;

/// Address of port `n`'s own guest.
fn mac(n: u8) -> String {
    format!("02:00:00:00:00:{n:02x}")
}

/// Reply of `ctl why` for a port.
fn why(switch: &Switch, port: &str) -> Value {
    switch.json(&["why", port, "--seconds", "0.2"])
}

/// Cause and rank of the first finding.
fn first(switch: &Switch, port: &str) -> (String, String) {
    let reply = why(switch, port);
    let word = |key: &str| reply["findings"][0][key].as_str().unwrap().to_string();
    (word("cause"), word("rank"))
}

fn is_first(switch: &Switch, port: &str, cause: &str, rank: &str) -> bool {
    first(switch, port) == (cause.into(), rank.into())
}

/// A sink behind `port` that is up and has announced the address of guest `n`.
fn sink(switch: &Switch, dir: &Dir, port: &str, n: u8) -> Gen {
    let sink = Gen::start(&dir.path(port), &["--mode", "sink", "--mac", &mac(n)]);
    switch.wait_up(port, true);
    wait_for("its announcement", || switch.counter(port, "ingress", "frames") > 0);
    sink
}

/// A guest behind `port` that sends from the address of guest `from` to that of guest `to`.
fn sender(dir: &Dir, port: &str, from: u8, to: u8) -> Gen {
    let args = ["--mac", &mac(from), "--peer", &mac(to), "--rate", "500"];
    Gen::start(&dir.path(port), &args)
}

#[test]
fn reasons_follow_the_port_from_its_first_connection_to_traffic() {
    let dir = Dir::new();
    let locked = format!(",mac={}", mac(1));
    let switch = Switch::start(&dir, &[], &[dir.port("a", &locked), dir.port("b", "")]);
    assert!(is_first(&switch, "a", "unconnected", "blocked"));
    let socket = std::os::unix::net::UnixStream::connect(dir.path("a")).unwrap();
    wait_for("a front-end without a driver", || is_first(&switch, "a", "no_driver", "blocked"));
    drop(socket);
    wait_for("its end", || is_first(&switch, "a", "unconnected", "blocked"));
    let a = sender(&dir, "a", 1, 2);
    switch.wait_up("a", true);
    assert!(is_first(&switch, "a", "alone", "blocked"));
    let _b = sink(&switch, &dir, "b", 2);
    wait_for("no reason", || {
        let reply = why(&switch, "a");
        let findings = reply["findings"].as_array().unwrap();
        findings.iter().any(|f| f["cause"] == "none") && reply["frames_per_second_from"] != 0.0
    });
    a.end();
    // Another address than that of its rule.
    let _spoofer = sender(&dir, "a", 9, 2);
    wait_for("spoofed frames", || is_first(&switch, "a", "drops_spoofed_mac", "losing"));
    let text = switch.ctl(&["why", "a", "--seconds", "0.2"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("a: up, "), "{text}");
    assert!(text.contains("\nlosing   ") && text.contains("not in mac="), "{text}");
    assert!(text.contains("\n         -> the guest uses another address"), "{text}");
}

#[test]
fn rules_and_addresses_that_keep_frames_away() {
    let dir = Dir::new();
    let ports = [
        dir.port("a", ",isolated=on"),
        dir.port("b", ",isolated=on"),
        dir.port("c", ",vlan=7"),
        dir.port("d", ""),
    ];
    let switch = Switch::start(&dir, &[], &ports);
    let _a = sink(&switch, &dir, "a", 1);
    let _b = sink(&switch, &dir, "b", 2);
    assert!(is_first(&switch, "a", "isolated", "blocked"));
    switch.json(&["set", "a", "isolated=off", "vlan=5"]);
    switch.json(&["set", "b", "isolated=off", "vlan=6"]);
    let _c = sink(&switch, &dir, "c", 3);
    assert!(is_first(&switch, "a", "vlan", "blocked"));
    for port in ["a", "b", "c"] {
        switch.json(&["set", port, "vlan=none"]);
    }
    // The address of `a`, sent by `d`.
    let _d = sender(&dir, "d", 1, 2);
    wait_for("the address to move", || {
        let fdb = switch.json(&["fdb"]);
        let moved = |e: &Value| e["mac"] == mac(1) && e["port"] == "d";
        fdb["entries"].as_array().unwrap().iter().any(moved)
    });
    switch.json(&["set", "a", &format!("mac={}", mac(1))]);
    wait_for("its reason", || is_first(&switch, "a", "address_elsewhere", "limited"));
    switch.json(&["drain", "a"]);
    assert!(is_first(&switch, "a", "drained", "blocked"));
}

#[test]
fn source_address_that_is_static_at_another_port() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let _a = sink(&switch, &dir, "a", 1);
    switch.json(&["fdb", "add", &mac(2), "a"]);
    let b = sender(&dir, "b", 2, 1);
    wait_for("its reason", || is_first(&switch, "b", "mac_elsewhere", "limited"));
    b.end();
    switch.json(&["fdb", "del", &mac(2)]);
    let total = switch.counter("b", "ingress", "mac_elsewhere");
    let _b = sender(&dir, "b", 2, 1);
    switch.wait_for_frames("b", 50);
    assert_eq!(switch.counter("b", "ingress", "mac_elsewhere"), total);
}

#[test]
fn unknown_ports_times_and_guests_are_refused() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("vm1", "")]);
    let guest = dir.text("guest");
    let _sink = Gen::start(&dir.path("vm1"), &["--mode", "sink", "--control", &guest]);
    switch.wait_up("vm1", true);
    let refused = |control: &str, args: &[&str]| {
        let out = pvswitch().args(["ctl", "--control", control, "why"]).args(args).output();
        let out = out.unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, error) = refused(switch.control(), &["vm2"]);
    assert!(code == Some(1) && error.contains("no port 'vm2' (did you mean 'vm1'?)"), "{error}");
    for seconds in ["-1", "61", "nan"] {
        let (code, error) = refused(switch.control(), &["vm1", &format!("--seconds={seconds}")]);
        assert!(code == Some(2) && error.contains("use 0 to 60"), "{error}");
    }
    let (code, error) = refused(&guest, &["vm1"]);
    assert!(code == Some(1) && error.contains("'why' is for a switch"), "{error}");
}
