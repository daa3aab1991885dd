//! `ctl upgrade`: another process takes over, and guests do not notice.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{
    Bystanders, Dir, Gen, RECEIVER, SENDER, Successor, Switch, hundred_ports, may_make_taps,
    of_interface, sender_and_sink, signal, upgrade, wait_for, wait_for_next,
};
use rustix::process::Signal;
use serde_json::Value;

fn outage_us(switch: &Switch) -> u64 {
    switch.json(&["show"])["taken_over"]["outage_us"].as_u64().unwrap()
}

/// Frames from a sender to a sink, with upgrades meanwhile: all of them arrive, in order.
fn upgrade_under_traffic(forward: &str, guest: &[&str]) {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let mut switch = Switch::start(&dir, &["--forward", forward], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, guest);
    let mut living = Vec::new();
    for _ in 0..4 {
        switch.wait_for_frames("a", 1000);
        living.push(upgrade(&switch));
        if living.len() == 1 {
            assert!(switch.process.wait().success(), "the old process ends in order");
        }
    }
    switch.wait_for_frames("a", 1000);
    let sent = sender.end();
    let frames = sent["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || switch.counter("b", "egress", "frames") == frames);
    switch.check_connected_once(&["a", "b"]);
    assert_eq!(switch.counter("a", "ingress", "frames"), frames, "counters are handed on");
    let got = sink.end();
    assert_eq!(got["received_frames"], frames, "{forward} {guest:?}: {got}");
    assert_eq!(got["received_bytes"], sent["sent_bytes"]);
    assert_eq!((&got["lost_frames"], &got["late_frames"]), (&0.into(), &0.into()), "{got}");
    switch.shut_down(&dir);
}

/// On another queue it could overtake frames that the guest has not read.
#[test]
fn flow_keeps_its_queue_over_upgrades() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", ",queues=2")];
    let switch = Switch::start(&dir, &[], &ports);
    let sink = ["--mode", "sink", "--mac", RECEIVER, "--queues", "2"];
    let sink = Gen::start(&dir.path("b"), &sink);
    switch.wait_up("b", true);
    let sender = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "20k"];
    let sender = Gen::start(&dir.path("a"), &sender);
    switch.wait_up("a", true);
    let mut living = Vec::new();
    for _ in 0..6 {
        switch.wait_for_frames("a", 200);
        living.push(upgrade(&switch));
    }
    switch.wait_for_frames("a", 200);
    sender.end();
    let stats = switch.port("stats", "b");
    let queues: Vec<_> = stats["egress"].as_array().unwrap().iter().map(|q| &q["frames"]).collect();
    assert_eq!(queues.iter().filter(|frames| **frames != 0).count(), 1, "{queues:?}");
    let got = sink.end();
    assert_eq!(got["late_frames"], 0, "{got}");
}

#[test]
fn every_frame_arrives_in_order_over_upgrades_on_split_rings() {
    upgrade_under_traffic("switch", &[]);
    upgrade_under_traffic("cross", &["--in-order"]);
}

#[test]
fn every_frame_arrives_in_order_over_upgrades_on_packed_rings() {
    upgrade_under_traffic("switch", &["--packed"]);
    upgrade_under_traffic("cross", &["--packed", "--in-order"]);
}

/// Drops that were counted of frames from one port to another.
fn drops(switch: &Switch, from: &str, to: &str) -> u64 {
    let of = |port: &str, way: &str| {
        let stats = switch.port("stats", port);
        let counters = stats[way][0].as_object().unwrap();
        let drops = counters.iter().filter(|(name, _)| name.starts_with("drops_"));
        drops.map(|(_, n)| n.as_u64().unwrap()).sum::<u64>()
    };
    of(from, "ingress") + of(to, "egress")
}

fn held(switch: &Switch, port: &str) -> u64 {
    switch.counter(port, "egress", "held")
}

/// Frames that were handed over as held, in all upgrades so far.
fn held_at_upgrades(switch: &Switch) -> u64 {
    let log = switch.log();
    let words = log.split(" us, with ").skip(1);
    words.map(|rest| rest.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Upgrades while a receiver is stopped and frames are held for it: each frame is received, in
/// order, or was counted as dropped, as without an upgrade.
fn frames_held_over_upgrades(guest: &[&str]) {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, guest);
    let mut living = Vec::new();
    // The process may lose its CPU between the wait and the upgrade, and the frames are too old.
    while living.len() < 3 || held_at_upgrades(&switch) == 0 {
        assert!(living.len() < 10, "no frame was held at ten upgrades: {}", switch.log());
        switch.wait_for_frames("a", 1000);
        signal(&sink.0.0, Signal::STOP);
        wait_for("held frames", || held(&switch, "b") > 0);
        living.push(upgrade(&switch));
        let before = switch.counter("b", "egress", "frames");
        signal(&sink.0.0, Signal::CONT);
        wait_for("frames", || switch.counter("b", "egress", "frames") > before + 1000);
    }
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    let received = || switch.counter("b", "egress", "frames");
    wait_for("all frames", || received() + drops(&switch, "a", "b") >= sent);
    assert_eq!(received() + drops(&switch, "a", "b"), sent);
    switch.check_connected_once(&["a", "b"]);
    let received = received();
    let got = sink.end();
    println!("{guest:?}: {} held at {} upgrades", held_at_upgrades(&switch), living.len());
    assert_eq!((&got["received_frames"], &got["late_frames"]), (&received.into(), &0.into()));
}

#[test]
fn frames_held_for_a_stopped_receiver_are_handed_over() {
    frames_held_over_upgrades(&[]);
    frames_held_over_upgrades(&["--packed"]);
}

#[test]
fn hundred_ports_stay_connected() {
    let dir = Dir::new();
    let (switch, mut idle) = hundred_ports(&dir, &[]);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let learned = switch.json(&["fdb"])["entries"].as_array().unwrap().len();
    let (mut living, mut outages) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        living.push(upgrade(&switch));
        outages.push(outage_us(&switch));
    }
    println!("outage with 100 ports, us: {outages:?}");
    pair.wait_for_replies(&switch);
    let show = switch.json(&["show"]);
    for port in show["ports"].as_array().unwrap() {
        let state = (&port["up"], &port["connections"], &port["faults"]);
        assert_eq!(state, (&true.into(), &1.into(), &0.into()), "{port}");
    }
    assert_eq!(switch.json(&["fdb"])["entries"].as_array().unwrap().len(), learned);
    assert!(idle.0.lives());
    pair.end();
    drop(living);
}

/// A program that does not take over.
fn script(dir: &Dir, name: &str, text: &str) -> String {
    dir.script(name, &format!("#!/bin/sh\n{text}\n"))
}

#[test]
fn program_that_fails_leaves_the_old_one_at_work() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ""));
    let mut switch = Switch::start(&dir, &["--http", "127.0.0.1:0"], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let before = switch.pid();
    let programs = [
        (dir.text("missing"), "No such file"),
        (dir.text("log"), "Permission denied"),
        (script(&dir, "ends", "exit 3"), "it ended before it took over"),
        (script(&dir, "other", "echo hello >&0; exec sleep 20"), "not pvswitch state"),
        (script(&dir, "hangs", "exec sleep 60"), "it did not reply in time"),
    ];
    for (program, why) in programs {
        let out = switch.ctl(&["upgrade", &program]);
        let error = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.contains(&program) && error.contains(why), "{error}");
        assert!(error.contains("this switch keeps running, nothing was changed"), "{error}");
        assert_eq!(switch.pid(), before);
        pair.wait_for_replies(&switch);
    }
    assert!(switch.process.lives() && dir.path("a").exists() && dir.path("ctl").exists());
    // And a later one succeeds.
    let next = upgrade(&switch);
    pair.wait_for_replies(&switch);
    pair.end();
    drop(next);
}

/// A program that relays an upgrade between the old process and a new one of this program, and
/// runs `act` of Python before it passes on what the old one sends at its workers' gate. An `act`
/// that takes long pauses the old process until the new one has replied.
fn relay(dir: &Dir, act: &str) -> String {
    let program = common::pvswitch().get_program().to_string_lossy().into_owned();
    let text = format!(
        r#"#!/usr/bin/env python3
import array, atexit, os, select, signal, socket, subprocess, sys, time
paused = False
# Our parent is the helper, and the switch its parent.
with open(f"/proc/{{os.getppid()}}/stat") as stat:
    switch = int(stat.read().rsplit(")", 1)[1].split()[1])
def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    # A thread that is in the kernel stops when it returns, after the signal was sent.
    threads = [f"/proc/{{pid}}/task/{{name}}/stat" for name in os.listdir(f"/proc/{{pid}}/task")]
    while any(open(stat).read().rsplit(")", 1)[1].split()[0] != "T" for stat in threads):
        time.sleep(0.001)
def pause():
    # Their time limits do not matter while they are stopped and we are slow: when they continue,
    # they read what they received before they check the time.
    global paused
    paused = True
    atexit.register(resume)
    stop(switch)
    stop(child.pid)
def resume():
    global paused
    if paused:
        paused = False
        os.kill(switch, signal.SIGCONT)
def overwrite(guest):
    pause()
    with open(f"/proc/{{guest}}/maps") as maps:
        inodes = {{int(line.split()[4]) for line in maps if "/memfd:" in line}}
    descriptors = f"/proc/{{switch}}/fd"
    # No two of a ring's indices are as near as its size.
    words = array.array("H", [77 * i & 0xffff for i in range(1 << 16)]).tobytes()
    for name in os.listdir(descriptors):
        if os.stat(f"{{descriptors}}/{{name}}").st_ino in inodes:
            fd = os.open(f"{{descriptors}}/{{name}}", os.O_RDWR)
            at, size = 0, os.fstat(fd).st_size
            while True:
                try:
                    at = os.lseek(fd, at, os.SEEK_DATA)
                except OSError:
                    break  # nothing but a hole
                at += os.pwrite(fd, words[at % len(words):][:size - at], at)
            print("overwritten", file=sys.stderr)
def act():
    {act}
old = socket.socket(fileno=os.dup(0))
new, theirs = socket.socketpair()
child = subprocess.Popen(["{program}", "run", "--takeover"], stdin=theirs)
theirs.close()
states = 0
while True:
    for source in select.select([old, new], [], [])[0]:
        bytes_, fds, _, _ = socket.recv_fds(source, 4, 200)
        if not bytes_:
            sys.exit(0)
        if source is old and len(bytes_) == 4:
            states += 1
            if states == 2:
                act()
        socket.send_fds(new if source is old else old, [bytes_], fds)
        if source is new:
            resume()
        elif paused:
            os.kill(child.pid, signal.SIGCONT)
        for fd in fds:
            os.close(fd)
"#
    );
    dir.script("relay", &text)
}

/// Whether this machine has `program`; if not, prints that the test is skipped.
fn has(program: &str) -> bool {
    let has = std::process::Command::new(program).arg("--version").output().is_ok();
    if !has {
        println!("skipped: {program} is not installed");
    }
    has
}

#[test]
fn failure_at_the_gate_restores_the_offloads_of_taps() {
    if !may_make_taps() || !has("python3") || !has("ethtool") {
        return;
    }
    let dir = Dir::new();
    let tap = format!("pvsoff{}", std::process::id() % 100_000);
    let ports = [dir.port("a", ",without=guest-tso4+guest-tso6"), format!("h=tap:{tap}")];
    let switch = Switch::start(&dir, &["--forward", "cross"], &ports);
    // The TAP gets the offloads that its only receiver accepts.
    let sink = Gen::start(&dir.path("a"), &["--mode", "sink"]);
    switch.wait_up("a", true);
    let offloads = || {
        let out = std::process::Command::new("ethtool").args(["-k", &tap]).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    };
    let has_none = || offloads().contains("tcp-segmentation-offload: off");
    wait_for("the guest's offloads", has_none);
    let meanwhile = dir.path("meanwhile");
    let act = format!(
        "os.system(\"ethtool -k {tap} > {}\"); child.kill(); sys.exit(1)",
        meanwhile.display()
    );
    let program = relay(&dir, &act);
    let before = offloads();
    let out = switch.ctl(&["upgrade", &program]);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(error.contains("this switch keeps running, nothing was changed"), "{error}");
    // The other process had requested all.
    let meanwhile = std::fs::read_to_string(meanwhile).unwrap();
    assert!(meanwhile.contains("tcp-segmentation-offload: on"), "{meanwhile}");
    assert_eq!(offloads(), before);
    sink.end();
}

#[test]
fn held_frames_of_a_ring_that_is_broken_after_an_upgrade_are_counted() {
    if !has("python3") {
        return;
    }
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, &[]);
    switch.wait_for_frames("a", 1000);
    signal(&sink.0.0, Signal::STOP);
    wait_for("held frames", || held(&switch, "b") > 0);
    // The guest's rings are invalid when the next process uses them.
    let act = format!("overwrite({})", sink.0.0.id());
    let program = relay(&dir, &act);
    let out = switch.ctl(&["upgrade", &program]);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{error}\n{}", switch.log());
    assert!(switch.log().contains("overwritten"), "{}", switch.log());
    wait_for("the next process", || switch.json(&["show"])["taken_over"].is_object());
    wait_for("the end of the connection", || switch.port("show", "b")["up"] == false);
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    let accounted = || switch.counter("b", "egress", "frames") + drops(&switch, "a", "b");
    wait_for("all frames", || accounted() >= sent);
    assert_eq!(accounted(), sent, "{}", switch.json(&["stats"]));
    assert!(switch.counter("b", "egress", "drops_held_down") > 0);
    switch.shut_down(&dir);
}

#[test]
fn port_of_a_removed_tap_is_down_and_handed_over_as_it_is() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let tap = format!("pvsurm{}", std::process::id() % 100_000);
    let ports = [dir.port("a", ""), dir.port("b", ""), format!("h=tap:{tap}")];
    let switch = Switch::start(&dir, &[], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    switch.wait_up("h", true);
    let status = std::process::Command::new("ip").args(["link", "del", &tap]).status().unwrap();
    assert!(status.success());
    switch.wait_up("h", false);
    let state = || {
        let port = switch.port("show", "h");
        ["state", "last_error", "faults", "interface_losses"].map(|key| port[key].clone())
    };
    let before = state();
    // A guest has no part in that.
    let want = [Value::from("down"), "the TAP interface was removed".into(), 0.into(), 1.into()];
    assert_eq!(before, want);
    let why = String::from_utf8(switch.ctl(&["why", "h"]).stdout).unwrap();
    assert!(why.contains("it is down; its last error: the TAP interface was removed"), "{why}");
    assert!(switch.log().contains("port h: down: the TAP interface was removed"));
    let _next = upgrade(&switch);
    assert_eq!(state(), before);
    pair.wait_for_replies(&switch);
    pair.end();
    // The way back that the log names.
    switch.json(&["del-port", "h"]);
    switch.json(&["add-port", &format!("h=tap:{tap}")]);
    switch.wait_up("h", true);
    switch.shut_down(&dir);
}

#[test]
fn takeover_without_a_switch_is_refused() {
    let out = common::pvswitch().args(["run", "--takeover"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(error.contains("--takeover is for `pvswitch ctl upgrade`"), "{error}");
}

#[test]
fn settings_of_the_file_and_of_run_time_are_handed_on() {
    let dir = Dir::new();
    let file = dir.path("c.toml");
    let port = |name: &str| {
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{}\"\n", dir.text(name))
    };
    std::fs::write(&file, format!("{}{}", port("a"), port("b"))).unwrap();
    let http = format!("unix:{}", dir.text("http"));
    let args = ["--config", file.to_str().unwrap(), "--http", &http];
    let switch = Switch::start(&dir, &args, &[]);
    assert!(switch.ctl(&["set", "a", "weight=3", "poll=timer:2000"]).status.success());
    assert!(switch.ctl(&["add-port", "n=null,hold=7"]).status.success());
    assert!(switch.ctl(&["fdb", "add", RECEIVER, "b", "--vlan", "5"]).status.success());
    assert!(switch.ctl(&["drain", "a"]).status.success());
    let state = || {
        let show = switch.json(&["show"]);
        let of = |port: &Value| [port["name"].clone(), port["id"].clone(), port["drain"].clone()];
        let ports: Vec<_> = show["ports"].as_array().unwrap().iter().map(of).collect();
        (ports, switch.json(&["fdb"]), saved(&switch), show["http"].clone())
    };
    let before = state();
    let next = upgrade(&switch);
    assert_eq!(state(), before);
    assert_eq!(switch.port("stats", "a")["ingress"][0]["weight"], 3);
    assert!(metrics(&dir.path("http")).unwrap().starts_with("HTTP/1.1 200"));
    // The file is still that of the switch.
    let reload = switch.json(&["reload"]);
    assert_eq!(reload["removed"][0], "n", "{reload}");
    drop(next);
}

/// The reply to GET /metrics.
fn metrics(socket: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn every_http_request_is_answered_over_upgrades() {
    let dir = Dir::new();
    let socket = dir.path("http");
    let http = format!("unix:{}", socket.display());
    let switch = Switch::start(&dir, &["--http", &http], &["n=null".into()]);
    let (ends, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let ask = || {
        while !ends.load(Ordering::Relaxed) {
            let reply = metrics(&socket).unwrap();
            assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
            answered.fetch_add(1, Ordering::Relaxed);
        }
    };
    let mut living = Vec::new();
    std::thread::scope(|scope| {
        let clients = [scope.spawn(ask), scope.spawn(ask)];
        for i in 0..5 {
            let before = answered.load(Ordering::Relaxed);
            // A program that fails: this process accepts connections again.
            if i == 2 {
                assert!(!switch.ctl(&["upgrade", "/bin/false"]).status.success());
            } else {
                living.push(upgrade(&switch));
            }
            wait_for("replies", || {
                answered.load(Ordering::Relaxed) > before + 20
                    || clients.iter().any(std::thread::ScopedJoinHandle::is_finished)
            });
        }
        ends.store(true, Ordering::Relaxed);
    });
}

fn saved(switch: &Switch) -> String {
    String::from_utf8(switch.ctl(&["save", "-"]).stdout).unwrap()
}

#[test]
fn frames_held_for_the_rate_of_a_tap_are_handed_over() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let tap = format!("pvsuh{}", std::process::id() % 100_000);
    let host = format!("h=tap:{tap},rate-out=1kframes,burst-out=10frames");
    let switch = Switch::start(&dir, &["--forward", "cross"], &[dir.port("a", ""), host]);
    let received = || of_interface(&tap, "statistics/rx_packets");
    let before = received();
    let sender = Gen::start(&dir.path("a"), &["--rate", "2k"]);
    switch.wait_up("a", true);
    let mut living = Vec::new();
    while living.len() < 3 || held_at_upgrades(&switch) == 0 {
        assert!(living.len() < 10, "no frame was held at ten upgrades: {}", switch.log());
        switch.wait_for_frames("a", 200);
        wait_for("held frames", || held(&switch, "h") > 0);
        living.push(upgrade(&switch));
    }
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    let accounted = || received() - before + drops(&switch, "a", "h");
    wait_for("all frames", || held(&switch, "h") == 0 && accounted() >= sent);
    assert_eq!(accounted(), sent, "{}", switch.json(&["stats"]));
}

#[test]
fn tap_stays_with_its_addresses_and_loses_no_frame() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let tap = format!("pvsup{}", std::process::id() % 100_000);
    let ports = [dir.port("a", ""), format!("h=tap:{tap}")];
    let switch = Switch::start(&dir, &["--forward", "cross"], &ports);
    let of = |what: &str| of_interface(&tap, what);
    let (index, changes) = (of("ifindex"), of("carrier_changes"));
    let received = of("statistics/rx_packets");
    let sender = Gen::start(&dir.path("a"), &["--rate", "5k"]);
    switch.wait_up("a", true);
    let mut living = Vec::new();
    for _ in 0..3 {
        let before = switch.counter("a", "ingress", "frames");
        wait_for("frames", || switch.counter("a", "ingress", "frames") > before + 500);
        living.push(upgrade(&switch));
    }
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    let arrived = || of("statistics/rx_packets") - received;
    wait_for("all frames", || arrived() >= sent);
    assert_eq!((of("ifindex"), of("carrier_changes")), (index, changes), "the link stayed up");
    assert_eq!(switch.port("show", "h")["created"], true);
    drop(living);
}

/// A guest that restarts while the switch is busy connects before its old connection's end is read.
#[test]
fn guest_that_restarts_during_an_upgrade_is_served() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["a", "b"].map(|name| dir.port(name, "")));
    let first = ["a", "b"].map(|name| {
        let guest = Gen::start(&dir.path(name), &["--mode", "sink"]);
        switch.wait_up(name, true);
        guest
    });
    let (begun, may) = (dir.path("begun"), dir.path("may"));
    let text = format!(
        "touch {}; while [ ! -e {} ]; do sleep 0.05; done; exec {} \"$@\"",
        begun.display(),
        may.display(),
        env!("CARGO_BIN_EXE_pvswitch"),
    );
    let program = script(&dir, "slow", &text);
    let before = switch.pid();
    let next = std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| switch.ctl(&["upgrade", &program]));
        wait_for("the next process", || begun.exists());
        drop(first);
        let next = ["a", "b"].map(|name| UnixStream::connect(dir.path(name)).unwrap());
        std::fs::write(&may, "").unwrap();
        let upgrade = upgrade.join().unwrap();
        assert!(upgrade.status.success(), "{}", String::from_utf8_lossy(&upgrade.stderr));
        next
    });
    let _living = Successor(wait_for_next(&switch, before));
    wait_for("both connections", || {
        assert!(!switch.log().contains("rejected"), "{}", switch.log());
        ["a", "b"].iter().all(|name| switch.port("show", name)["connections"] == 2)
    });
    drop(next);
}
