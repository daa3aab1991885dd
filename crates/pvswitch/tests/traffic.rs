//! The program as users run it: one switch, and guests as separate processes.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Bystanders, Dir, Gen, Process, Switch, pvswitch, signal, wait_for};
use rustix::process::Signal;

const SEND: [&str; 6] = ["--rate", "2k", "--frames", "800", "--queue-size", "1024"];

/// Sends from a to b, and checks that every frame arrives in order.
fn send_all(forward: &str, poll: &str, guest: &[&str]) {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let switch = Switch::start(&dir, &["--forward", forward, "--poll", poll], &ports);
    let sink_args = [guest, &["--mode", "sink", "--queue-size", "1024"]].concat();
    let sink = Gen::start(&dir.path("b"), &sink_args);
    switch.wait_up("b", true);
    let sender = [guest, &SEND, &["--size", "imix"]].concat();
    let sent = Gen::start(&dir.path("a"), &sender).report();
    let frames = sent["sent_frames"].as_u64().unwrap();
    let taken = switch.counter("a", "ingress", "frames");
    assert_eq!(taken, frames, "{forward} {poll} {guest:?}: {}", switch.json(&["stats"]));
    let passed = || switch.counter("b", "egress", "frames") == frames;
    let end = Instant::now() + Duration::from_secs(5);
    while !passed() {
        assert!(Instant::now() < end, "{forward} {poll} {guest:?}: {}", switch.json(&["stats"]));
    }
    std::thread::sleep(Duration::from_millis(50));
    let got = sink.end();
    assert_eq!(frames, 800, "{sent}");
    assert_eq!(got["received_frames"], frames, "{forward} {poll} {guest:?}");
    assert_eq!(got["received_bytes"], sent["sent_bytes"]);
    assert_eq!((&got["lost_frames"], &got["late_frames"]), (&0.into(), &0.into()));
}

#[test]
fn every_frame_arrives_in_order_on_every_ring() {
    for guest in [&[][..], &["--packed"], &["--in-order"], &["--packed", "--in-order"]] {
        send_all("switch", "adaptive", guest);
        send_all("cross", "event", guest);
    }
}

#[test]
fn every_frame_arrives_in_order_under_every_policy() {
    send_all("switch", "event", &[]);
    send_all("switch", "spin", &["--packed"]);
    send_all("cross", "adaptive", &[]);
    send_all("cross", "spin", &[]);
}

#[test]
fn one_thread_passes_every_frame_from_port_to_port() {
    for (forward, guest) in
        [("cross", &[][..]), ("switch", &["--packed"]), ("switch", &["--in-order"])]
    {
        let dir = Dir::new();
        let ports = [dir.port("p0", ""), dir.port("p1", "")];
        let switch = Switch::start(&dir, &["--forward", forward, "--poll", "event"], &ports);
        let args = [guest, &["--mode", "pass", "--size", "100", "--frames", "5000"]].concat();
        let report = Gen::start(&dir.path("p{}"), &args).report();
        for (key, want) in
            [("sent_frames", 5000), ("received_frames", 5000), ("foreign_frames", 0), ("gaps", 0)]
        {
            assert_eq!(report[key], want, "{forward} {guest:?}: {key} in {report}");
        }
        assert_eq!(switch.counter("p1", "egress", "frames"), 5000, "{forward} {guest:?}");
    }
}

#[test]
fn each_client_behind_a_port_sends_to_its_own_guest() {
    let dir = Dir::new();
    let ports = [dir.port("up", ",queues=2"), dir.port("g0", ""), dir.port("g1", "")];
    let switch = Switch::start(&dir, &["--poll", "event"], &ports);
    let guests = ["02:00:00:00:01:00", "02:00:00:00:01:01"];
    let sinks = [("g0", guests[0]), ("g1", guests[1])].map(|(name, mac)| {
        let sink = Gen::start(&dir.path(name), &["--mode", "sink", "--mac", mac]);
        switch.wait_up(name, true);
        sink
    });
    let known = |count: usize| switch.json(&["fdb"])["entries"].as_array().unwrap().len() == count;
    wait_for("the guests' addresses", || known(2));
    // Guests were sent each other's announcements.
    let first = ["g0", "g1"].map(|name| switch.counter(name, "egress", "frames"));
    let mode = ["--mode", "send", "--rate", "5k", "--queues", "2"];
    let to = ["--mac", "02:00:00:00:02:00", "--peer", guests[0], "--addresses", "2"];
    let sender = Gen::start(&dir.path("up"), &[&mode[..], &to].concat());
    wait_for("the clients' addresses", || known(4));
    let frames = |i: usize| switch.counter(["g0", "g1"][i], "egress", "frames") - first[i];
    wait_for("frames to both", || frames(0) > 100 && frames(1) > 100);
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || frames(0) + frames(1) == sent);
    let queues = &switch.port("stats", "up")["ingress"];
    for (i, sink) in sinks.into_iter().enumerate() {
        // Each flow stays on its queue, and has a guest of its own.
        assert_eq!(queues[i]["frames"], frames(i), "queue {i}: {queues}");
        assert_eq!(sink.end()["late_frames"], 0);
    }
}

#[test]
fn every_frame_of_a_trial_is_received_or_lost() {
    for (forward, guest) in [
        ("cross", &["--size", "100"][..]),
        ("switch", &["--size", "imix", "--both-ways", "--flows", "7"]),
        ("switch", &["--addresses", "300", "--both-ways", "--packed"]),
    ] {
        let dir = Dir::new();
        let ports = [dir.port("p0", ""), dir.port("p1", "")];
        let switch = Switch::start(&dir, &["--forward", forward, "--poll", "event"], &ports);
        let path = dir.path("latency.hlog");
        let hdr = path.display().to_string();
        let rest = ["--mode", "trial", "--rate", "20k", "--duration", "0.2", "--hdr", &hdr];
        let rest = [&rest[..], &["--peer", "02:01:00:00:00:00"]].concat();
        let report = Gen::start(&dir.path("p{}"), &[guest, &rest].concat()).report();
        let n = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"));
        // Frames are due at the rate, whether they were sent or not.
        let ways = if guest.contains(&"--both-ways") { 2 } else { 1 };
        assert_eq!(n("offered_frames"), 4000 * ways, "{report}");
        assert_eq!(n("received_frames") + n("lost_frames"), n("offered_frames"));
        assert_eq!(n("sent_frames") + n("not_sent_frames"), n("offered_frames"));
        assert_eq!(n("latency_samples"), n("received_frames"));
        // One frame in eight has its time in the switch recorded, which is part of its latency.
        let most = n("received_frames") / 8 + 2 * ways;
        assert!((1..=most).contains(&n("added_samples")), "{report}");
        assert!((1..=n("latency_ns_max")).contains(&n("added_ns_p50")), "{report}");
        assert_eq!(n("late_frames"), 0, "{report}");
        let drops = |port: &str| {
            let stats = switch.port("stats", port);
            let queues = stats["egress"].as_array().unwrap();
            let counters = queues.iter().flat_map(|queue| queue.as_object().unwrap());
            let drops = counters.filter(|(name, _)| name.starts_with("drops_"));
            drops.map(|(_, n)| n.as_u64().unwrap_or(0)).sum::<u64>()
        };
        let arrived = n("all_received_frames") + drops("p0") + drops("p1");
        assert!(arrived >= n("all_sent_frames"), "{arrived}: {report}");
        // The mark of compressed histograms.
        let log = std::fs::read_to_string(&path).unwrap();
        assert!(log.lines().any(|line| line.contains(",HISTFAAA")), "{log}");
    }
}

#[test]
fn jumbo_frames_are_echoed() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let echo = ["--mode", "echo", "--mac", "02:00:00:00:00:02", "--peer", "02:00:00:00:00:01"];
    let _echo = Gen::start(&dir.path("b"), &echo);
    switch.wait_up("b", true);
    let args = ["--mode", "rr", "--size", "9000", "--rate", "500", "--duration", "0.5"];
    let report = Gen::start(&dir.path("a"), &args).report();
    assert!(report["latency_samples"].as_u64().unwrap() > 20, "{report}");
    assert!(report["lost_frames"].as_u64().unwrap() <= 2, "{report}");
}

#[test]
fn killed_guest_affects_no_other_and_can_reconnect() {
    let dir = Dir::new();
    let ports = ["a", "b", "c", "d"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &["--workers", "2", "--placement", "per-port"], &ports);
    let others = Bystanders::start(&switch, &dir, "a", "b");
    let _sink = Gen::start(&dir.path("d"), &["--mode", "sink", "--mac", "02:00:00:00:00:02"]);
    switch.wait_up("d", true);
    for _ in 0..3 {
        let mut sender = Gen::start(&dir.path("c"), &["--rate", "20k"]);
        switch.wait_up("c", true);
        wait_for("traffic", || switch.counter("c", "ingress", "frames") > 100);
        sender.0.kill();
        switch.wait_up("c", false);
        others.wait_for_replies(&switch);
    }
    others.end();
    assert_eq!(switch.port("show", "c")["connections"], 3);
    assert_eq!(switch.port("show", "c")["faults"], 0);
}

#[test]
fn switch_in_client_mode_is_killed_and_restarted() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ",mode=client"));
    let connect = |name: &str| format!("vhost-user:{},mode=server", dir.text(name));
    for _ in 0..2 {
        // The switch is started first, and retries indefinitely.
        let mut switch = Switch::start(&dir, &[], &ports);
        let mut sink = Gen::connect(&connect("b"), &["--mode", "sink"]);
        let mut sender = Gen::connect(&connect("a"), &["--rate", "2k"]);
        switch.wait_up("a", true);
        switch.wait_up("b", true);
        wait_for("frames", || switch.counter("b", "egress", "frames") > 100);
        switch.process.kill();
        for guest in [&mut sink, &mut sender] {
            assert_eq!(guest.0.wait().code(), Some(1));
            let error = std::io::read_to_string(guest.0.0.stderr.take().unwrap()).unwrap();
            assert!(error.contains("the switch closed the connection"), "{error}");
        }
    }
}

#[test]
fn waiting_guest_logs_it_and_exits_on_a_signal() {
    let dir = Dir::new();
    for mode in ["client", "server"] {
        let connect = format!("vhost-user:{},mode={mode}", dir.text("a"));
        let mut waiting = Gen::connect(&connect, &[]);
        let mut lines = BufReader::new(waiting.0.0.stderr.take().unwrap());
        let mut error = String::new();
        while !error.contains("waiting for the switch at") {
            assert_ne!(lines.read_line(&mut error).unwrap(), 0, "{error}");
        }
        assert_eq!(waiting.0.end().code(), Some(1));
        lines.read_to_string(&mut error).unwrap();
        assert!(error.contains("the other side"), "what to do: {error}");
    }
}

#[test]
fn control_socket_replies() {
    let dir = Dir::new();
    let mut switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let show = switch.json(&["show"]);
    assert_eq!((&show["ok"], &show["ports"][0]["name"]), (&true.into(), &"a".into()));
    let text = |args: &[&str]| String::from_utf8(switch.ctl(args).stdout).unwrap();
    assert!(text(&["show"]).contains("a     unconnected "), "{}", text(&["show"]));
    switch.json(&["add-port", &dir.port("b", ",queues=2")]);
    assert!(dir.path("b").exists());
    switch.json(&["fdb", "add", "02:00:00:00:00:07", "b", "--vlan", "5"]);
    let entry = switch.json(&["fdb"])["entries"][0].clone();
    assert_eq!(entry["mac"], "02:00:00:00:00:07");
    assert_eq!((&entry["port"], &entry["static"]), (&"b".into(), &true.into()));
    assert_eq!(entry["vlan"], 5);
    assert!(text(&["fdb"]).contains("static"));
    let stats = switch.json(&["stats"]);
    assert_eq!(stats["ports"][1]["egress"].as_array().unwrap().len(), 2);
    assert!(text(&["stats"]).contains("worker 0"));
    switch.json(&["fdb", "del", "02:00:00:00:00:07", "--vlan", "5"]);
    switch.json(&["del-port", "b"]);
    assert!(!dir.path("b").exists());
    let errors = [
        (&["del-port", "b"][..], "no port 'b'"),
        (&["add-port", "a=null"], "exists already"),
        (&["fdb", "add", "nonsense", "a"], "not a MAC address"),
        (&["fdb", "add", "02:00:00:00:00:07", "a", "--vlan", "5000"], "4094"),
        (&["fdb", "del", "02:00:00:00:00:07"], "no entry"),
    ];
    for (args, want) in errors {
        let out = switch.ctl(args);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.contains(want), "{error}");
    }
    switch.json(&["shutdown"]);
    assert_eq!(switch.process.wait().code(), Some(0));
    assert!(!dir.path("a").exists() && !dir.path("ctl").exists());
}

#[test]
fn capture_writes_frames_to_a_file_that_wireshark_reads() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let file = dir.path("b.pcapng");
    let mut command = pvswitch();
    command.args(["capture", "b", "--control", switch.control(), "-w"]).arg(&file);
    let mut capture = Process(command.spawn().unwrap());
    wait_for("the file's header", || std::fs::metadata(&file).is_ok_and(|m| m.len() > 0));
    Gen::start(&dir.path("a"), &SEND).report();
    signal(&capture.0, Signal::INT);
    assert_eq!(capture.wait().code(), Some(0));
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(bytes[..4], [0x0a, 0x0d, 0x0d, 0x0a]);
    let frames = bytes.windows(12).filter(|w| *w == [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]).count();
    assert!(frames >= 400, "{frames} frames");
    let mut command = pvswitch();
    command.args(["capture", "nobody", "--control", switch.control()]);
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8(out.stderr).unwrap().contains("no port 'nobody'"));
}

#[test]
fn terminated_switch_exits_with_success_and_removes_its_sockets() {
    for signal_sent in [Signal::TERM, Signal::INT] {
        let dir = Dir::new();
        let mut switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
        let mut guest = Gen::start(&dir.path("a"), &["--rate", "1k"]);
        switch.wait_up("a", true);
        signal(&switch.process.0, signal_sent);
        assert_eq!(switch.process.wait().code(), Some(0));
        for name in ["a", "b", "ctl"] {
            assert!(!dir.path(name).exists(), "{name} is left");
        }
        assert_eq!(guest.0.wait().code(), Some(1));
    }
    let dir = Dir::new();
    let mut switch = Switch::start(&dir, &["--duration", "1"], &[dir.port("a", "")]);
    assert_eq!(switch.process.wait().code(), Some(0));
}

#[test]
fn second_front_end_is_rejected_and_the_first_stays() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let first = Bystanders::start(&switch, &dir, "a", "b");
    let mut second = UnixStream::connect(dir.path("a")).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "closed at once");
    first.wait_for_replies(&switch);
    assert!(switch.log().contains("rejected a second connection"));
    assert_eq!(switch.port("show", "a")["connections"], 1);
    first.end();
}
