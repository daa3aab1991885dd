//! Mirror ports of a running switch: two guests, and a third that gets copies of every frame.

mod common;

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use serde_json::json;

const MACS: [&str; 3] = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"];

fn sink(switch: &Switch, dir: &Dir, port: &str, mac: &str) -> Gen {
    let sink = Gen::start(&dir.path(port), &["--mode", "sink", "--mac", mac]);
    switch.wait_up(port, true);
    sink
}

fn send(dir: &Dir, frames: &str) {
    let args = ["--mac", MACS[0], "--peer", MACS[1], "--frames", frames, "--rate", "5k"];
    Gen::start(&dir.path("a"), &args).report();
}

fn error(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert!(!out.status.success(), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn every_frame_of_a_guest_is_copied_to_a_third_and_changes_take_effect_at_run_time() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",mirror-to=m"), dir.port("b", ""), dir.port("m", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let _b = sink(&switch, &dir, "b", MACS[1]);
    let _m = sink(&switch, &dir, "m", MACS[2]);
    wait_for("the announcement of b", || switch.counter("b", "ingress", "frames") > 0);
    wait_for("that of m, dropped", || switch.counter("m", "ingress", "drops_mirror_port") > 0);
    let copied = || switch.counter("m", "egress", "mirrored");
    let seen = |way: &str| switch.counter("a", way, "frames");
    send(&dir, "500");
    switch.wait_up("a", false);
    let both = || seen("ingress") + seen("egress");
    wait_for("all copies", || copied() == both());
    assert!(seen("ingress") >= 500 && switch.counter("b", "egress", "frames") >= 500);
    assert_eq!(switch.counter("m", "egress", "drops_mirror"), 0);
    assert_eq!(switch.counter("m", "egress", "frames"), copied(), "and nothing else");

    // Off, then one direction.
    switch.json(&["set", "a", "mirror-to=none"]);
    let (before, got) = (copied(), switch.counter("b", "egress", "frames"));
    send(&dir, "100");
    wait_for("frames", || switch.counter("b", "egress", "frames") >= got + 100);
    assert_eq!(copied(), before);
    switch.json(&["set", "b", "mirror-to=m", "mirror-direction=out"]);
    let out = switch.counter("b", "egress", "frames");
    send(&dir, "100");
    wait_for("copies", || copied() >= before + 100);
    switch.wait_up("a", false);
    assert_eq!(copied() - before, switch.counter("b", "egress", "frames") - out);

    // The mirror port is removed, and with it the mirrors to it: what is saved is valid.
    switch.json(&["del-port", "m"]);
    send(&dir, "100");
    wait_for("frames", || switch.counter("b", "egress", "frames") >= out + 200);
    assert_eq!(switch.port("show", "b")["rules"], json!({ "mirror-direction": "out" }));
    let file = dir.text("saved.toml");
    assert!(switch.ctl(&["save", &file]).status.success());
    let saved = std::fs::read_to_string(&file).unwrap();
    assert!(!saved.contains("mirror-to = \"m\"") && check(&file).is_empty(), "{saved}");
    // Another of its name is not one.
    switch.json(&["add-port", &dir.port("m", "")]);
    let _m = sink(&switch, &dir, "m", MACS[2]);
    send(&dir, "100");
    wait_for("frames", || switch.counter("b", "egress", "frames") >= out + 300);
    assert_eq!(copied(), 0);
    switch.json(&["set", "b", "mirror-to=m"]);
    send(&dir, "100");
    wait_for("copies", || copied() >= 100);
}

#[test]
fn invalid_mirror_ports_are_refused_by_name_and_nothing_changes() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",mirror-to=m"), dir.port("b", ""), dir.port("m", "")];
    let switch = Switch::start(&dir, &[], &ports);
    for (port, to, hint) in [
        ("b", "b", "its own"),
        ("b", "x", "no such port"),
        ("b", "a", "mirrored to 'm'"),
        ("m", "b", "'m' is itself a mirror port"),
    ] {
        let error = error(&switch, &["set", port, &format!("mirror-to={to}")]);
        assert!(error.contains(hint) && error.contains(to), "{port} {to}: {error}");
        assert!(switch.port("show", port)["rules"].is_null());
    }
    assert!(error(&switch, &["set", "a", "mirror-direction=left"]).contains("both"));
    let error = error(&switch, &["add-port", &dir.port("c", ",mirror-to=mm")]);
    assert!(error.contains("port 'c': mirror-to=mm: no such port (did you mean 'm'?)"), "{error}");
    assert!(!dir.path("c").exists());
}

/// A file with these ports and options.
fn text(dir: &Dir, ports: &[(&str, &str)]) -> String {
    let port = |(name, options): &(&str, &str)| {
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{}\"\n{options}", dir.text(name))
    };
    ports.iter().map(port).collect()
}

fn write(path: &str, text: &str) {
    let new = format!("{path}.new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// What `pvswitch check` reports.
fn check(file: &str) -> String {
    let out = pvswitch().args(["check", file]).output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.success(), error.is_empty(), "{error}");
    error
}

#[test]
fn a_file_with_an_invalid_mirror_port_is_refused_at_check_start_and_reload() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    let valid = text(&dir, &[("a", "mirror-to = \"m\"\n"), ("b", ""), ("m", "")]);
    write(&file, &valid);
    let switch = Switch::start(&dir, &["--config", &file], &[]);
    let config = || switch.json(&["show"])["ports"].as_array().unwrap().len();
    for (to, of_m, want) in [
        ("mm", "", "no such port (did you mean 'm'?): add it first, or use none"),
        ("a", "", "a port cannot be its own mirror port: use another, or none"),
        ("m", "mirror-to = \"b\"\n", "port 'm' is mirrored to 'b', and mirrored frames are not"),
    ] {
        let own = format!("weight = 2\nmirror-to = \"{to}\"\n");
        write(&file, &text(&dir, &[("a", &own), ("b", ""), ("m", of_m), ("new", "")]));
        let want = format!("{file}:5:1: port 'a': mirror-to={to}: {want}");
        let out = check(&file);
        assert!(out.starts_with(&want) && out.lines().count() == 1, "{want}\n{out}");
        let out = pvswitch().args(["run", "--config", &file]).output().unwrap();
        assert_eq!(out.status.code(), Some(2));
        let out = String::from_utf8(out.stderr).unwrap();
        assert!(out.contains(&want), "{want}\n{out}");
        let out = error(&switch, &["reload"]);
        assert!(out.contains(&want), "{want}\n{out}");
        assert_eq!(config(), 3);
        assert_eq!(switch.port("show", "a")["rules"], json!({ "mirror-to": "m" }));
        assert_eq!(switch.port("stats", "a")["ingress"][0]["weight"], 1);
    }
    // Those of the command line have no place in a file.
    write(&file, &valid);
    let port = dir.port("c", ",mirror-to=mm");
    let out = pvswitch().args(["run", "--config", &file, "--port", &port]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    let out = String::from_utf8(out.stderr).unwrap();
    assert!(out.contains("port 'c': mirror-to=mm: no such port"), "{out}");
}

#[test]
fn a_reload_adds_changes_and_removes_mirrors_and_touches_no_other_port() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    let to = |to: &str| format!("mirror-to = \"{to}\"\n");
    let to_m = to("m");
    write(&file, &text(&dir, &[("a", ""), ("b", ""), ("m", "")]));
    let switch = Switch::start(&dir, &["--config", &file], &[]);
    let _b = sink(&switch, &dir, "b", MACS[1]);
    let _m = sink(&switch, &dir, "m", MACS[2]);
    let reload = |ports: &[(&str, &str)]| {
        write(&file, &text(&dir, ports));
        switch.json(&["reload"])
    };
    let copied = |port: &str| switch.counter(port, "egress", "mirrored");
    // Frames that `a` sends, all of them delivered to `b`.
    let pass = || {
        let frames = || switch.counter("b", "egress", "frames");
        let before = frames();
        send(&dir, "100");
        wait_for("frames", || frames() >= before + 100);
        switch.wait_up("a", false);
    };
    pass();
    assert_eq!(copied("m"), 0);

    // Added, to a port that exists.
    let done = reload(&[("a", &to_m), ("b", ""), ("m", "")]);
    assert_eq!((&done["changed"][0]["name"], &done["replaced"]), (&json!("a"), &json!([])));
    pass();
    wait_for("copies", || copied("m") >= 100);

    // Changed, to a port that is added with it.
    let to_n = to("n");
    let done = reload(&[("a", &to_n), ("b", ""), ("m", ""), ("n", "")]);
    assert_eq!((&done["changed"][0]["name"], &done["added"]), (&json!("a"), &json!(["n"])));
    let _n = sink(&switch, &dir, "n", "02:00:00:00:00:04");
    let before = copied("m");
    pass();
    wait_for("copies", || copied("n") >= 100);
    assert_eq!(copied("m"), before, "no longer a mirror port");

    // The mirror port is replaced: the mirror continues.
    let done = reload(&[("a", &to_n), ("b", ""), ("m", ""), ("n", "queues = 2\n")]);
    assert_eq!((&done["replaced"][0]["name"], &done["changed"]), (&json!("n"), &json!([])));
    let n = sink(&switch, &dir, "n", "02:00:00:00:00:04");
    pass();
    wait_for("copies", || copied("n") >= 100);

    // It is removed, and its name still used: refused.
    write(&file, &text(&dir, &[("a", &to_n), ("b", ""), ("m", "")]));
    assert!(error(&switch, &["reload"]).contains("x.toml:4:1: port 'a': mirror-to=n: no such"));
    let before = copied("n");
    pass();
    wait_for("copies", || copied("n") >= before + 100);

    // Removed together, and the old mirror port is an ordinary one again.
    let done = reload(&[("a", ""), ("b", ""), ("m", "")]);
    assert_eq!((&done["changed"][0]["name"], &done["removed"]), (&json!("a"), &json!(["n"])));
    drop(n);
    pass();
    assert!(switch.port("show", "a")["rules"].is_null());
    assert_eq!(switch.port("show", "b")["connections"], 1, "its connection was not touched");
    assert_eq!(switch.port("show", "m")["connections"], 1);
}
