//! Mirror ports of a running switch: two guests, and a third that gets copies of every frame.

mod common;

use common::{Dir, Gen, Switch, wait_for};

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

    // The mirror port is removed, and another of its name added.
    switch.json(&["del-port", "m"]);
    send(&dir, "100");
    wait_for("frames", || switch.counter("b", "egress", "frames") >= out + 200);
    assert_eq!(switch.port("show", "b")["rules"]["mirror-to"], "m");
    switch.json(&["add-port", &dir.port("m", "")]);
    let _m = sink(&switch, &dir, "m", MACS[2]);
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
        ("m", "b", "'m' is a mirror port"),
    ] {
        let error = error(&switch, &["set", port, &format!("mirror-to={to}")]);
        assert!(error.contains(hint) && error.contains(to), "{port} {to}: {error}");
        assert!(switch.port("show", port)["rules"].is_null());
    }
    assert!(error(&switch, &["set", "a", "mirror-direction=left"]).contains("both"));
}
