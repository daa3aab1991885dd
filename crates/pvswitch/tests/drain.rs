//! `ctl drain`: no more frames are taken from a port, and none are lost.

mod common;

use std::time::Duration;

use common::{Dir, Gen, Switch, wait_for};
use rustix::process::Signal;
use serde_json::Value;

const SENDER: &str = "02:00:00:00:00:01";
const RECEIVER: &str = "02:00:00:00:00:02";

/// A switch with a sender at port `s` and a sink at port `d`.
struct World {
    switch: Switch,
    dir: Dir,
    sender: Gen,
    sink: Gen,
}

impl World {
    fn new(send: &[&str]) -> Self {
        Self::over("vhost-user", send)
    }

    /// As `new`, with the sender at a port of this kind.
    fn over(kind: &str, send: &[&str]) -> Self {
        let dir = Dir::new();
        let at = format!("{kind}:{}", dir.text("s"));
        let ports = [format!("s={at}"), dir.port("d", ""), dir.port("t", "")];
        let switch = Switch::start(&dir, &[], &ports);
        let sink = Gen::start(&dir.path("d"), &["--mode", "sink", "--mac", RECEIVER]);
        switch.wait_up("d", true);
        let to = ["--mac", SENDER, "--peer", RECEIVER];
        let sender = Gen::connect(&at, &[&to, send].concat());
        switch.wait_up("s", true);
        let world = Self { switch, dir, sender, sink };
        world.wait_taken(200);
        world
    }

    fn ingress(&self) -> Value {
        self.switch.port("stats", "s")["ingress"][0].clone()
    }

    fn taken(&self) -> u64 {
        self.switch.counter("s", "ingress", "frames")
    }

    fn delivered(&self) -> u64 {
        self.switch.counter("d", "egress", "frames")
    }

    fn drops(&self) -> u64 {
        let ingress = self.ingress();
        let drops =
            ingress.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("drops"));
        drops.map(|(_, n)| n.as_u64().unwrap()).sum()
    }

    /// Waits for this many more frames.
    fn wait_taken(&self, more: u64) {
        let before = self.taken();
        wait_for("frames", || self.taken() >= before + more);
    }

    fn drain(&self) {
        let answer = self.switch.json(&["drain", "s"]);
        assert_eq!((&answer["drain"], &answer["held"]), (&"drained".into(), &0.into()));
        assert_eq!(self.switch.port("show", "s")["drain"], "drained");
        let ingress = self.ingress();
        assert_eq!(ingress["drain"], "drained");
    }
}

/// Counters of the workers.
fn work(switch: &Switch) -> Value {
    let worker = &switch.json(&["stats"])["workers"][0];
    ["sleeps", "naps", "rounds"].map(|key| worker[key].clone()).into()
}

#[test]
fn drained_port_costs_nothing_and_resumes_without_loss() {
    for (poll, ring) in [("event", ""), ("spin", "--packed"), ("adaptive", ""), ("timer:1000", "")]
    {
        let ring: Vec<_> =
            ["--rate", "3k", ring].into_iter().filter(|arg| !arg.is_empty()).collect();
        let world = World::new(&ring);
        let switch = &world.switch;
        switch.json(&["set", "s", &format!("poll={poll}")]);
        for _ in 0..2 {
            world.drain();
            let taken = world.taken();
            assert_eq!((world.delivered(), world.drops()), (taken, 0), "{poll}");
            wait_for("the queue to be cold", || world.ingress()["state"] == "cold");
            // The sink's queue goes cold by itself, a tenth of a second after the last frame.
            std::thread::sleep(Duration::from_millis(200));
            let before = work(switch);
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(work(switch), before, "{poll}: woken up for a drained port");
            assert_eq!(world.taken(), taken, "{poll}");
            switch.json(&["drain", "s", "--off"]);
            assert_eq!(switch.port("show", "s")["drain"], "off");
            world.wait_taken(300);
        }
        let sent = world.sender.end();
        let frames = sent["sent_frames"].as_u64().unwrap();
        wait_for("the last frames", || switch.counter("d", "egress", "frames") >= frames);
        std::thread::sleep(Duration::from_millis(50));
        let got = world.sink.end();
        assert_eq!(got["received_frames"], frames, "{poll}: {got}");
        assert_eq!((&got["lost_frames"], &got["late_frames"]), (&0.into(), &0.into()), "{poll}");
    }
}

#[test]
fn drained_vif_is_removed_without_loss() {
    let world = World::over("xen-local", &["--rate", "3k"]);
    for _ in 0..2 {
        world.drain();
        let taken = world.taken();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!((world.taken(), world.delivered(), world.drops()), (taken, taken, 0));
        world.switch.json(&["drain", "s", "--off"]);
        world.wait_taken(100);
    }
    world.drain();
    let taken = world.taken();
    world.switch.json(&["del-port", "s"]);
    let got = world.sink.end();
    assert_eq!((&got["received_frames"], &got["lost_frames"]), (&taken.into(), &0.into()), "{got}");
}

#[test]
fn drained_port_still_receives_and_is_removed_without_loss() {
    let world = World::new(&["--rate", "3k"]);
    let switch = &world.switch;
    world.drain();
    let taken = world.taken();
    let before = switch.counter("s", "egress", "frames");
    let args =
        ["--mac", "02:00:00:00:00:03", "--peer", SENDER, "--rate", "1k", "--duration", "0.2"];
    let sent = Gen::start(&world.dir.path("t"), &args).report();
    let sent = sent["sent_frames"].as_u64().unwrap();
    assert!(sent > 50);
    wait_for("frames to it", || switch.counter("s", "egress", "frames") >= before + sent);
    let out = switch.ctl(&["show"]);
    let out = String::from_utf8(out.stdout).unwrap();
    assert!(out.lines().any(|line| line.starts_with("s ") && line.contains("drained")), "{out}");
    assert_eq!((world.taken(), world.delivered(), world.drops()), (taken, taken, 0));
    switch.json(&["del-port", "s"]);
    // A new port with the same name is not drained.
    switch.json(&["add-port", &world.dir.port("s", "")]);
    assert_eq!(switch.port("show", "s")["drain"], "off");
    let got = world.sink.end();
    assert_eq!((&got["received_frames"], &got["lost_frames"]), (&taken.into(), &0.into()), "{got}");
}

#[test]
fn port_stays_drained_when_its_guest_restarts() {
    let mut world = World::new(&["--rate", "3k"]);
    world.drain();
    let taken = world.taken();
    world.sender.0.kill();
    world.switch.wait_up("s", false);
    assert_eq!(world.switch.port("show", "s")["drain"], "drained");
    let args = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "3k"];
    world.sender = Gen::start(&world.dir.path("s"), &args);
    world.switch.wait_up("s", true);
    world.drain();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(world.taken(), taken);
    world.switch.json(&["drain", "s", "--off"]);
    world.wait_taken(100);
}

#[test]
fn frames_held_for_a_frozen_receiver_do_not_block_a_drain() {
    let world = World::new(&["--rate", "50k"]);
    common::signal(&world.sink.0.0, Signal::STOP);
    wait_for("frames to be held", || world.ingress()["holds"] != 0);
    world.drain();
    let taken = world.taken();
    // Held frames are dropped after a time.
    wait_for("the end of each frame", || world.delivered() + world.drops() == taken);
    common::signal(&world.sink.0.0, Signal::CONT);
    world.switch.json(&["drain", "s", "--off"]);
    world.wait_taken(1000);
}

#[test]
fn drain_of_a_missing_or_idle_port_returns_at_once() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("vm1", ",queues=2"), "n=null".into()]);
    let out = switch.ctl(&["drain", "vm2"]);
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{error}");
    assert!(error.contains("no port 'vm2'") && error.contains("did you mean 'vm1'?"), "{error}");
    assert_eq!(switch.json(&["drain", "vm1"])["drain"], "drained");
    assert_eq!(switch.json(&["drain", "n"])["drain"], "off");
    assert_eq!(switch.json(&["drain", "vm1", "--off"])["drain"], "off");
}
