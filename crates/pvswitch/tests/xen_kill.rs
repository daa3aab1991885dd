//! `kill -9` of a kept switch with vifs: the next process continues, and front ends stay connected.

mod common;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{
    Bystanders, Dir, Gen, RECEIVER, Switch, kill, kill_and_count, kill_and_wait,
    kill_while_connecting, lost, pvswitch, wait_for, wait_for_next, wait_until_settled,
};
use serde_json::Value;

const SENDER: &str = "02:00:00:00:00:01";
/// Most frames of one burst: what a kill may deliver twice.
const BURST: u64 = 64;

fn port(dir: &Dir, name: &str, kind: &str) -> String {
    format!("{name}={kind}:{}", dir.text(name))
}

/// A guest at port `name` of this kind, with options of its target.
fn guest(dir: &Dir, name: &str, kind: &str, args: &[&str]) -> Gen {
    let (kind, options) = kind.split_once(',').unwrap_or((kind, ""));
    let comma = if options.is_empty() { "" } else { "," };
    Gen::connect(&format!("{kind}:{}{comma}{options}", dir.text(name)), args)
}

/// Checks that a vif continued without a new handshake.
fn check_connected(switch: &Switch, name: &str) {
    let show = switch.port("show", name);
    let xen = &show["xen"];
    if xen.is_object() {
        assert_eq!((&xen["front"], &xen["back"]), (&"Connected".into(), &"Connected".into()));
    }
    assert_eq!((&show["faults"], &show["up"]), (&0.into(), &true.into()), "{show}");
    assert!(!switch.log().contains("set up again"), "{}", switch.log());
}

fn sender_and_sink(switch: &Switch, dir: &Dir, kinds: [&str; 2]) -> (Gen, Gen) {
    let sink = guest(dir, "b", kinds[1], &["--mode", "sink", "--mac", RECEIVER]);
    switch.wait_up("b", true);
    // What waits after an interruption fits the receiver's 256 buffers, even twice.
    let to = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "1k", "--size", "imix"];
    let sender = guest(dir, "a", kinds[0], &[&to[..], &["--queue-size", "64"]].concat());
    switch.wait_up("a", true);
    (sender, sink)
}

/// Frames from a sender to a sink, with kills meanwhile: all arrive, a burst of them perhaps twice.
fn kill_under_traffic(kinds: [&str; 2]) {
    let dir = Dir::new();
    let kind = |i: usize| kinds[i].split(',').next().unwrap();
    let ports = [port(&dir, "a", kind(0)), port(&dir, "b", kind(1))];
    let mut switch = Switch::start(&dir, &["--keep", "--forward", "cross"], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, kinds);
    const KILLS: u64 = 3;
    let mut aged = 0;
    for _ in 0..KILLS {
        switch.wait_for_frames("a", 200);
        wait_until_settled(&switch);
        aged += kill_and_count(&switch, "b");
        ["a", "b"].iter().for_each(|name| check_connected(&switch, name));
    }
    switch.wait_for_frames("a", 200);
    let sent = sender.end();
    let frames = sent["sent_frames"].as_u64().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let got = sink.end();
    println!("{kinds:?}: sent {frames}, got {}", got["received_frames"]);
    let received = got["received_frames"].as_u64().unwrap();
    aged += lost(&switch, "b");
    let what = || format!("{frames} sent, {aged} aged: {got}\n{}", switch.log());
    assert!((frames - aged..=frames + KILLS * BURST).contains(&received), "{}", what());
    assert!(got["lost_frames"].as_u64().unwrap() <= aged, "{}", what());
    assert_eq!(got["corrupt_frames"], 0, "{}", what());
    switch.shut_down(&dir);
    assert!(switch.process.wait().success(), "the keeper ends with the switch");
}

#[test]
fn every_frame_arrives_over_kills() {
    kill_under_traffic(["xen-local"; 2]);
    kill_under_traffic(["xen-local", "vhost-user"]);
    kill_under_traffic(["vhost-user", "xen-local"]);
}

#[test]
fn every_frame_arrives_over_kills_with_static_grants_and_one_channel() {
    kill_under_traffic(["xen-local,static=on"; 2]);
    kill_under_traffic(["xen-local,split=off"; 2]);
}

/// An upgrade of a kept switch, then a kill.
#[test]
fn upgraded_switch_is_kept_too() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| port(&dir, name, "xen-local"));
    let switch = Switch::start(&dir, &["--keep"], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, ["xen-local"; 2]);
    let before = switch.pid();
    switch.json(&["upgrade", env!("CARGO_BIN_EXE_pvswitch")]);
    wait_for_next(&switch, before);
    wait_until_settled(&switch);
    switch.wait_for_frames("a", 200);
    kill_and_wait(&switch);
    switch.wait_for_frames("a", 200);
    ["a", "b"].iter().for_each(|name| check_connected(&switch, name));
    let frames = sender.end()["sent_frames"].as_u64().unwrap();
    let got = sink.end();
    assert!(got["received_frames"].as_u64().unwrap() >= frames, "{frames}: {got}");
}

/// The front end ends together with the switch: the next process finds that its domain is gone.
#[test]
fn domain_that_ends_meanwhile_is_removed() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| port(&dir, name, "xen-local"));
    let switch = Switch::start(&dir, &["--keep"], &ports);
    let (mut sender, sink) = sender_and_sink(&switch, &dir, ["xen-local"; 2]);
    wait_until_settled(&switch);
    let before = switch.pid();
    kill(before);
    sender.0.kill();
    wait_for_next(&switch, before);
    switch.wait_up("a", false);
    check_connected(&switch, "b");
    let state = || switch.port("show", "a")["xen"]["state"].as_str().unwrap().to_string();
    wait_for("the vif to be removed", || state().starts_with("waiting for the toolstack"));
    let to = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "2k", "--frames", "200"];
    assert_eq!(guest(&dir, "a", "xen-local", &to).report()["sent_frames"], 200);
    sink.end();
}

/// Front ends that connect while the switch is killed: none is left hanging.
#[test]
fn front_ends_that_connect_at_the_kill_are_served_or_disconnected() {
    let dir = Dir::new();
    let names = ["a", "b", "c", "d"];
    let switch = Switch::start(&dir, &["--keep"], &names.map(|name| port(&dir, name, "xen-local")));
    kill_while_connecting(&switch, names, 15, |name| {
        guest(&dir, name, "xen-local", &["--mode", "sink"])
    });
    let (sender, sink) = sender_and_sink(&switch, &dir, ["xen-local"; 2]);
    switch.wait_for_frames("a", 200);
    drop((sender, sink));
}

/// Descriptors of the switch and of its store, and its mappings of memory; without `/dev/null`,
/// which each thread opens once.
fn holds(switch: &Switch) -> [usize; 3] {
    let (pid, keeper) = (switch.pid(), switch.process.0.id());
    let descriptors = |pid: u32| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let fds = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        fds.filter(|to| to != Path::new("/dev/null")).count()
    };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    [descriptors(pid), descriptors(keeper), maps.matches("memfd:").count()]
}

/// A switch of ports `a` and `b` for vhost-user and `c` to `f` for vifs, whose process panics at
/// this place (`PVSWITCH_PANIC_AT`).
fn panicking(dir: &Dir, at: &str) -> Switch {
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--keep", "--control", &dir.text("ctl")]);
    for name in ["a", "b", "c", "d", "e", "f"] {
        let kind = if ["a", "b"].contains(&name) { "vhost-user" } else { "xen-local" };
        command.args(["--port", &port(dir, name, kind)]);
    }
    command.env("PVSWITCH_PANIC_AT", at).stdout(Stdio::null());
    let switch = Switch::spawn(dir, command);
    // No frame is flooded: learned addresses may be lost with the process.
    for (end, port) in [("a1", "a"), ("a2", "b"), ("02", "d"), ("0f", "f")] {
        switch.json(&["fdb", "add", &format!("02:00:00:00:00:{end}"), port]);
    }
    switch
}

/// Waits for the process after `before`, and calls `meanwhile`; returns an instant before the end
/// of that one.
fn wait_for_panic(switch: &Switch, before: u32, mut meanwhile: impl FnMut()) -> Instant {
    let mut lived = Instant::now();
    wait_for("a panic", || {
        meanwhile();
        let now = Instant::now();
        let show = switch.ctl(&["show", "--json"]).stdout;
        let show: Value = serde_json::from_slice(&show).unwrap_or_default();
        if show["pid"] == before {
            lived = now;
        }
        show["pid"].is_u64() && show["pid"] != before
    });
    lived
}

/// The guest of `c` sends to that of `d`, and the process panics at `at` each time: only the vifs
/// of `costs` lose their rings, each time for longer, and are set up again with the same guests.
fn panics_cost(at: &str, costs: &[&str]) {
    if !cfg!(debug_assertions) {
        println!("skipped: panics on demand need debug assertions");
        return;
    }
    let dir = Dir::new();
    let switch = panicking(&dir, at);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let vif = |name, args: &[&str]| guest(&dir, name, "xen-local", args);
    let (other, rate) = ("02:00:00:00:00:0f", ["--rate", "1k"]);
    let other_sink = vif("f", &["--mode", "sink", "--mac", other]);
    switch.wait_up("f", true);
    // A second's frames fit its ring: what a panicking process has lost is not known to the next.
    let other_sender = vif("e", &["--rate", "200", "--peer", other]);
    switch.wait_up("e", true);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    let before = holds(&switch);

    let mut sink = vif("d", &["--mode", "sink", "--mac", RECEIVER]);
    switch.wait_up("d", true);
    let mut pid = switch.pid();
    let to_d = [&rate[..], &["--peer", RECEIVER]].concat();
    let mut sender = vif("c", &to_d);
    let mut lived = None;
    for n in 0..3 {
        // A guest waits for some seconds until it is connected, and indefinitely once it was.
        let earlier = lived.replace(wait_for_panic(&switch, pid, || {
            if !sender.0.lives() {
                assert!(at.starts_with("message"), "{}", switch.log());
                sender = vif("c", &to_d);
            }
        }));
        pid = switch.pid();
        if let Some(held) = earlier.map(|earlier| earlier.elapsed()) {
            assert!(held >= Duration::from_secs(1 << n), "{held:?}\n{}", switch.log());
        }
        pair.wait_for_replies(&switch);
        switch.wait_for_frames("e", 50);
    }
    // Its grants and channels are given back; what the guest itself holds is not.
    let mut held = Value::Null;
    wait_for("a vif that is held down", || {
        held = switch.port("show", "c");
        held["xen"]["state"] == "held down after a panic of the switch"
    });
    let used = |of: &str| held["account"][of]["used"].as_u64();
    assert_eq!((&held["up"], &held["xen"]["queues"]), (&false.into(), &0.into()), "{held}");
    assert_eq!((used("mappings"), used("mapped-bytes")), (Some(0), Some(0)), "{held}");
    sender.0.kill();
    let state = |name: &str| switch.port("show", name)["xen"]["state"].clone();
    let is_gone = |name: &str| state(name).as_str().unwrap().starts_with("waiting for the tool");
    wait_for("the guest to be gone", || is_gone("c"));
    // The receiver is as it was, or is connected again.
    switch.wait_up("d", true);
    assert!(sink.0.lives());
    sink.0.kill();
    wait_for("the receiver to be gone", || is_gone("d"));
    wait_for("what they had to be given back", || {
        holds(&switch).iter().zip(before).all(|(now, before)| *now <= before)
    });
    for name in ["a", "b", "c", "d", "e", "f"] {
        let lines = switch.log();
        let lines = lines.lines().filter(|line| line.contains(&format!("port {name}: ")));
        let [panics, again] = ["the switch panicked while it served this port", "set up again"]
            .map(|what| lines.clone().filter(|line| line.contains(what)).count());
        let shown = switch.port("show", name)["errors"]["panic"].as_u64();
        match costs.contains(&name) {
            true => assert!(panics >= 3 && shown == Some(panics as u64), "{}", switch.log()),
            false => assert_eq!((panics, again, shown), (0, 0, None), "{name}\n{}", switch.log()),
        }
    }
    // The next guest is served; with the others, this would be a panic.
    if at.starts_with("to") {
        let _next = vif("c", &["--mode", "sink"]);
        switch.wait_up("c", true);
    }
    assert!(!switch.log().contains("connections are not restored"), "{}", switch.log());
    let sent = other_sender.end()["sent_frames"].as_u64().unwrap();
    let aged = lost(&switch, "f");
    let got = other_sink.end();
    assert!(got["received_frames"].as_u64().unwrap() + aged >= sent, "{sent}, {aged}: {got}");
    switch.check_connected_once(&["a", "b"]);
    pair.end();
}

#[test]
fn panic_amid_a_burst_costs_its_vif_only() {
    panics_cost("from:2", &["c"]);
}

#[test]
fn panic_during_a_delivery_costs_the_vifs_of_sender_and_receiver_only() {
    panics_cost("to:3", &["c", "d"]);
}

#[test]
fn panic_at_keys_of_a_front_end_costs_its_vif_only() {
    panics_cost("message:2", &["c"]);
}
