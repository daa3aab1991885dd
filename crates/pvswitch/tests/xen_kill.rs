//! `kill -9` of a kept switch with vifs: the next process continues, and front ends stay connected.

mod common;

use std::time::Duration;

use common::{
    Dir, Gen, RECEIVER, Switch, kill, kill_and_wait, kill_while_connecting, wait_for,
    wait_for_next, wait_until_settled,
};

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
    for _ in 0..KILLS {
        switch.wait_for_frames("a", 200);
        wait_until_settled(&switch);
        kill_and_wait(&switch);
        ["a", "b"].iter().for_each(|name| check_connected(&switch, name));
    }
    switch.wait_for_frames("a", 200);
    let sent = sender.end();
    let frames = sent["sent_frames"].as_u64().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let got = sink.end();
    println!("{kinds:?}: sent {frames}, got {}", got["received_frames"]);
    let received = got["received_frames"].as_u64().unwrap();
    // Of a sink that did not run for 200 ms.
    let aged = switch.counter("b", "egress", "lost_aged");
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
