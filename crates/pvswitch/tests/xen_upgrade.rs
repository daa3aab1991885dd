//! `ctl upgrade` with vifs: another process takes over, and front ends do not notice.

mod common;

use common::{Dir, Gen, RECEIVER, Switch, upgrade, wait_for};
use serde_json::Value;

const SENDER: &str = "02:00:00:00:00:01";

/// `NAME=KIND:DIR/NAME`, with these options.
fn port(dir: &Dir, name: &str, kind: &str, options: &str) -> String {
    format!("{name}={kind}:{}{options}", dir.text(name))
}

/// A guest at port `name` of this kind, with options of its target.
fn guest(dir: &Dir, name: &str, kind: &str, args: &[&str]) -> Gen {
    let (kind, options) = kind.split_once(',').unwrap_or((kind, ""));
    let comma = if options.is_empty() { "" } else { "," };
    Gen::connect(&format!("{kind}:{}{comma}{options}", dir.text(name)), args)
}

/// Starts a guest of port `a` that sends to one of port `b`, each of a kind with options.
fn sender_and_sink(switch: &Switch, dir: &Dir, kinds: [&str; 2], more: &[&str]) -> (Gen, Gen) {
    let args = [&["--mode", "sink", "--mac", RECEIVER], more].concat();
    let sink = guest(dir, "b", kinds[1], &args);
    switch.wait_up("b", true);
    let to = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "2k", "--size", "imix"];
    let sender = guest(dir, "a", kinds[0], &[&to, more].concat());
    switch.wait_up("a", true);
    (sender, sink)
}

/// Checks that a vif continued without a new handshake.
fn check_connected(switch: &Switch, name: &str) {
    let show = switch.port("show", name);
    if show["xen"].is_object() {
        let xen = &show["xen"];
        assert_eq!((&xen["front"], &xen["back"]), (&"Connected".into(), &"Connected".into()));
    }
    assert_eq!((&show["faults"], &show["up"]), (&0.into(), &true.into()), "{show}");
    assert!(!switch.log().contains("is set up again"), "{}", switch.log());
}

/// Waits for `more` frames of the sender at port `a`.
fn wait_for_frames(switch: &Switch, mut guests: [&mut Gen; 2], more: u64) {
    let frames = || {
        let stats = switch.port("stats", "a");
        let queues = stats["ingress"].as_array().unwrap().iter();
        queues.map(|queue| queue["frames"].as_u64().unwrap()).sum::<u64>()
    };
    let before = frames();
    wait_for("frames", || {
        assert!(guests.iter_mut().all(|guest| guest.0.lives()), "{}", switch.log());
        frames() > before + more
    });
}

/// Frames from a sender to a sink, with upgrades meanwhile: all of them arrive, in order.
fn upgrade_under_traffic(kinds: [&str; 2], options: [&str; 2], args: &[&str], more: &[&str]) {
    let dir = Dir::new();
    let kind = |i: usize| kinds[i].split(',').next().unwrap();
    let ports = [port(&dir, "a", kind(0), options[0]), port(&dir, "b", kind(1), options[1])];
    let switch = Switch::start(&dir, args, &ports);
    let (mut sender, mut sink) = sender_and_sink(&switch, &dir, kinds, more);
    let mut living = Vec::new();
    for _ in 0..3 {
        wait_for_frames(&switch, [&mut sender, &mut sink], 200);
        living.push(upgrade(&switch));
        ["a", "b"].iter().for_each(|name| check_connected(&switch, name));
    }
    wait_for_frames(&switch, [&mut sender, &mut sink], 200);
    let sent = sender.end();
    let frames = sent["sent_frames"].as_u64().unwrap();
    // A receiver without CPU time loses frames, which are counted.
    let sum = |name: &str, way: &str, is: fn(&str) -> bool| {
        let stats = switch.port("stats", name);
        let queues = stats[way].as_array().unwrap().iter();
        let counters = queues.flat_map(|queue| queue.as_object().unwrap());
        let counters = counters.filter(|(name, _)| is(name));
        counters.map(|(_, n)| n.as_u64().unwrap_or(0)).sum::<u64>()
    };
    let delivered = || sum("b", "egress", |name| name == "frames");
    let is_drop: fn(&str) -> bool = |name| name.starts_with("drops_");
    let drops = || sum("a", "ingress", is_drop) + sum("b", "egress", is_drop);
    wait_for("all frames", || delivered() + drops() >= frames);
    let (taken, delivered, drops) =
        (sum("a", "ingress", |name| name == "frames"), delivered(), drops());
    let got = sink.end();
    let what = format!("{kinds:?} {args:?}: {}\nsent {sent}, got {got}", switch.log());
    assert_eq!((taken, delivered + drops), (frames, frames), "{what}");
    assert_eq!(
        (&got["received_frames"], &got["late_frames"]),
        (&delivered.into(), &0.into()),
        "{what}"
    );
    if drops == 0 {
        assert_eq!(got["received_bytes"], sent["sent_bytes"], "{what}");
    } else {
        println!("{kinds:?} {args:?}: {drops} of {frames} dropped for a slow receiver");
    }
}

#[test]
fn every_frame_arrives_in_order_over_upgrades() {
    upgrade_under_traffic(["xen-local"; 2], ["", ""], &[], &[]);
    upgrade_under_traffic(["xen-local"; 2], ["", ""], &["--forward", "cross"], &[]);
    upgrade_under_traffic(["xen-local", "vhost-user"], ["", ""], &[], &[]);
    upgrade_under_traffic(["vhost-user", "xen-local"], ["", ""], &[], &[]);
}

#[test]
fn every_frame_arrives_with_static_grants_one_channel_or_queues() {
    upgrade_under_traffic(["xen-local,static=on"; 2], ["", ""], &[], &[]);
    upgrade_under_traffic(["xen-local,split=off"; 2], ["", ""], &["--poll", "event"], &[]);
    upgrade_under_traffic(["xen-local"; 2], [",queues=2"; 2], &[], &["--queues", "2"]);
    let smart = ["xen-local,smart-poll=on"; 2];
    upgrade_under_traffic(smart, [",smart-poll=on"; 2], &[], &[]);
}

/// A program that fails leaves the old process at work with its vifs.
#[test]
fn failed_upgrade_leaves_vifs_at_work() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| port(&dir, name, "xen-local", ""));
    let mut switch = Switch::start(&dir, &[], &ports);
    let (mut sender, mut sink) = sender_and_sink(&switch, &dir, ["xen-local"; 2], &[]);
    for _ in 0..3 {
        wait_for_frames(&switch, [&mut sender, &mut sink], 200);
        assert!(!switch.ctl(&["upgrade", "/bin/false"]).status.success());
    }
    wait_for_frames(&switch, [&mut sender, &mut sink], 200);
    assert!(switch.process.lives());
    ["a", "b"].iter().for_each(|name| check_connected(&switch, name));
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || switch.counter("b", "egress", "frames") == sent);
    let got = sink.end();
    assert_eq!((&got["received_frames"], &got["lost_frames"]), (&sent.into(), &0.into()), "{got}");
    // Another front end can connect, and leave, before and after the next upgrade.
    for upgrades in [false, true] {
        let next = upgrades.then(|| upgrade(&switch));
        let late = guest(&dir, "b", "xen-local", &["--mode", "sink"]);
        switch.wait_up("b", true);
        late.end();
        switch.wait_up("b", false);
        drop(next);
    }
}

/// Vifs without a front end wait for one in the next process.
#[test]
fn front_ends_connect_and_leave_after_an_upgrade() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| port(&dir, name, "xen-local", ""));
    let switch = Switch::start(&dir, &[], &ports);
    let sink = guest(&dir, "b", "xen-local", &["--mode", "sink", "--mac", RECEIVER]);
    switch.wait_up("b", true);
    let _next = upgrade(&switch);
    // The one that is connected leaves, and the next one comes.
    sink.end();
    switch.wait_up("b", false);
    let state = || switch.port("show", "b")["xen"]["state"].as_str().unwrap().to_string();
    wait_for("the vif to be removed", || state().starts_with("waiting for the toolstack"));
    let sink = guest(&dir, "b", "xen-local", &["--mode", "sink", "--mac", RECEIVER]);
    switch.wait_up("b", true);
    let to = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "5k", "--frames", "500"];
    assert_eq!(guest(&dir, "a", "xen-local", &to).report()["sent_frames"], 500);
    wait_for("all frames", || switch.counter("b", "egress", "frames") == 500);
    let got: Value = sink.end();
    assert_eq!(got["received_frames"], 500);
    assert!(switch.ctl(&["shutdown"]).status.success());
    wait_for("the directories to be removed", || {
        !dir.path("a").exists() && !dir.path("b").exists()
    });
}
