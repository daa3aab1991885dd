//! `kill -9` of a switch that is kept: the next process continues, and guests stay connected.

mod common;

use std::fs::File;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{
    Bystanders, Dir, Gen, RECEIVER, Switch, hundred_ports, kill, kill_and_count, kill_and_wait,
    kill_while_connecting, lost, may_make_taps, of_interface, pvswitch, sender_and_sink, signal,
    wait_for, wait_for_next, wait_until_settled,
};
use rustix::process::Signal;
use serde_json::Value;

/// Most frames of one burst: what a kill may deliver twice.
const BURST: u64 = 64;

/// Frames from a sender to a sink, with kills meanwhile: all arrive, a burst of them perhaps twice.
fn kill_under_traffic(forward: &str, guest: &[&str]) {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", "")];
    let mut switch = Switch::start(&dir, &["--keep", "--forward", forward], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, guest);
    const KILLS: u64 = 3;
    let mut aged = 0;
    for _ in 0..KILLS {
        switch.wait_for_frames("a", 1000);
        wait_until_settled(&switch);
        aged += kill_and_count(&switch, "b");
    }
    switch.wait_for_frames("a", 1000);
    let sent = sender.end();
    let frames = sent["sent_frames"].as_u64().unwrap();
    switch.check_connected_once(&["a", "b"]);
    let got = sink.end();
    println!("{forward} {guest:?}: sent {frames}, got {got}");
    let received = got["received_frames"].as_u64().unwrap();
    aged += lost(&switch, "b");
    let may_arrive = frames - aged..=frames + KILLS * BURST;
    assert!(may_arrive.contains(&received), "{frames} sent, {aged} aged: {got}");
    assert!(got["lost_frames"].as_u64().unwrap() <= aged, "{aged} aged: {got}");
    switch.shut_down(&dir);
    assert!(switch.process.wait().success(), "the keeper ends with the switch");
}

#[test]
fn every_frame_arrives_over_kills_on_split_rings() {
    kill_under_traffic("cross", &[]);
    kill_under_traffic("cross", &["--in-order"]);
}

#[test]
fn every_frame_arrives_over_kills_on_packed_rings() {
    kill_under_traffic("cross", &["--packed"]);
    kill_under_traffic("cross", &["--packed", "--in-order"]);
}

/// Names, numbers and drains of ports; addresses; the configuration.
fn state(switch: &Switch) -> (Vec<[Value; 3]>, Value, Vec<u8>) {
    let show = switch.json(&["show"]);
    let of = |port: &Value| [port["name"].clone(), port["id"].clone(), port["drain"].clone()];
    let ports = show["ports"].as_array().unwrap().iter().map(of).collect();
    let mut fdb = switch.json(&["fdb"]);
    for entry in fdb["entries"].as_array_mut().unwrap() {
        entry["age_s"] = Value::Null;
    }
    (ports, fdb, switch.ctl(&["save", "-"]).stdout)
}

#[test]
fn settings_addresses_and_counters_come_back() {
    let dir = Dir::new();
    let file = dir.path("c.toml");
    let port = |name: &str| {
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{}\"\n", dir.text(name))
    };
    std::fs::write(&file, format!("{}{}", port("a"), port("b"))).unwrap();
    let http = format!("unix:{}", dir.text("http"));
    let args = ["--keep", "--config", file.to_str().unwrap(), "--http", &http];
    let switch = Switch::start(&dir, &args, &[]);
    assert!(switch.ctl(&["set", "a", "weight=3", "poll=timer:2000"]).status.success());
    assert!(switch.ctl(&["add-port", "n=null,hold=7"]).status.success());
    assert!(switch.ctl(&["add-port", &dir.port("c", "")]).status.success());
    assert!(switch.ctl(&["del-port", "c"]).status.success());
    assert!(switch.ctl(&["fdb", "add", RECEIVER, "b", "--vlan", "5"]).status.success());
    assert!(switch.ctl(&["drain", "a"]).status.success());
    let before = state(&switch);
    kill_and_wait(&switch);
    assert_eq!(state(&switch), before);
    assert_eq!(switch.port("stats", "a")["ingress"][0]["weight"], 3);
    let stream = std::os::unix::net::UnixStream::connect(dir.path("http"));
    assert!(stream.is_ok(), "the HTTP server listens");
    // The file is still that of the switch; and the counters of traffic are kept.
    let reload = switch.json(&["reload"]);
    assert_eq!(reload["removed"][0], "n", "{reload}");
    assert!(switch.ctl(&["drain", "a", "--off"]).status.success());
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let learned = switch.json(&["fdb"])["entries"].as_array().unwrap().len();
    wait_until_settled(&switch);
    let frames = switch.counter("a", "ingress", "frames");
    wait_for("a second of traffic", || switch.json(&["show"])["uptime_s"].as_u64().unwrap() >= 4);
    kill_and_wait(&switch);
    assert!(switch.counter("a", "ingress", "frames") >= frames);
    assert_eq!(switch.json(&["fdb"])["entries"].as_array().unwrap().len(), learned);
    pair.wait_for_replies(&switch);
    pair.end();
}

#[test]
fn hundred_ports_stay_connected() {
    let dir = Dir::new();
    let (switch, mut idle) = hundred_ports(&dir, &["--keep"]);
    let (one, two) = ("02:00:00:00:00:a1", "02:00:00:00:00:a2");
    let echo = ["--mode", "echo", "--mac", two, "--peer", one];
    let _echo = Gen::start(&dir.path("b"), &echo);
    switch.wait_up("b", true);
    let mut outages = Vec::new();
    for _ in 0..2 {
        // The longest round trip of a guest that waits for each reply spans the outage.
        let rr = ["--mode", "rr", "--mac", one, "--peer", two];
        let rr = Gen::start(&dir.path("a"), &rr);
        switch.wait_up("a", true);
        switch.wait_for_frames("a", 20);
        wait_until_settled(&switch);
        let connections = switch.port("show", "a")["connections"].as_u64();
        kill_and_wait(&switch);
        switch.wait_for_frames("a", 20);
        let show = switch.json(&["show"]);
        for port in show["ports"].as_array().unwrap() {
            let state = (&port["up"], &port["faults"]);
            assert_eq!(state, (&true.into(), &0.into()), "{port}");
            if port["name"] != "a" {
                assert_eq!(port["connections"], 1, "{port}");
            }
        }
        assert_eq!(switch.port("show", "a")["connections"].as_u64(), connections);
        let noticed = switch.json(&["show"])["taken_over"]["outage_us"].clone();
        // A request without an answer for 100 ms counts as lost, and is not in the latencies.
        let report = rr.end();
        let late = report["lost_frames"].as_u64().unwrap() * 100_000;
        outages.push((late.max(report["latency_ns_max"].as_u64().unwrap() / 1000), noticed));
        switch.wait_up("a", false);
    }
    println!("longest round trip, and time from the notice of the end, us: {outages:?}");
    assert!(idle.0.lives());
}

/// Requests that were answered have taken effect, whenever the switch is killed.
#[test]
fn answered_requests_are_kept() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &[dir.port("a", "")]);
    let weight = || switch.port("stats", "a")["ingress"][0]["weight"].as_u64().unwrap();
    for round in 0_u64..3 {
        wait_until_settled(&switch);
        let before = switch.pid();
        let (mut answered, mut tried) = (weight(), 0);
        let delay = Duration::from_micros(30_000 + 2711 * round);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            kill(before);
        });
        // Requests of the time without a process wait for the next one.
        for n in 1.. {
            let is_last = killer.is_finished();
            tried = 1 + (round * 40 + n) % 100;
            let set = format!("weight={tried}");
            if !switch.ctl(&["set", "a", &set]).status.success() {
                break;
            }
            answered = tried;
            if is_last {
                break;
            }
        }
        killer.join().unwrap();
        wait_for_next(&switch, before);
        let now = weight();
        assert!(now == answered || now == tried, "{now}: answered {answered}, tried {tried}");
    }
}

/// Makes requests, each of which is killed before its message `at` to the keeper, the reply being
/// the last. Returns how many were.
fn requests_killed_at(at: u32) -> usize {
    let dir = Dir::new();
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--keep", "--control", &dir.text("ctl")]);
    for name in ["a", "b", "old"] {
        command.args(["--port", &dir.port(name, "")]);
    }
    command.env("PVSWITCH_CUT_AT", at.to_string()).stdout(Stdio::null());
    let switch = Switch::spawn(&dir, command);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let names = |name: &str| !switch.port("show", name).is_null();
    let (new, mac) = (dir.port("new", ""), "02:00:00:00:00:77");
    let requests: [(&[&str], &dyn Fn() -> bool); 4] = [
        (&["add-port", &new], &|| names("new")),
        (&["set", "a", "weight=7"], &|| switch.port("stats", "a")["ingress"][0]["weight"] == 7),
        (&["fdb", "add", mac, "b"], &|| switch.json(&["fdb"]).to_string().contains(mac)),
        (&["del-port", "old"], &|| !names("old")),
    ];
    let mut killed = 0;
    for (request, is_done) in requests {
        wait_until_settled(&switch);
        let before = switch.pid();
        if switch.ctl(request).status.success() {
            assert!(is_done(), "{request:?} at {at}\n{}", switch.log());
        } else {
            wait_for_next(&switch, before);
            killed += 1;
            println!("{request:?} killed at {at}, done: {}", is_done());
        }
        pair.wait_for_replies(&switch);
    }
    switch.check_connected_once(&["a", "b"]);
    let log = switch.log();
    assert_eq!(log.matches("was killed while it ran the request").count(), killed, "{log}");
    assert!(!log.contains("cannot be used") && !log.contains("not restored"), "{log}");
    pair.end();
    killed
}

/// Sequences of many more, in one process: `run/cuts.rs`.
#[test]
fn requests_killed_at_each_message_are_done_or_not_and_guests_stay() {
    if !cfg!(debug_assertions) {
        println!("skipped: kills on demand need debug assertions");
        return;
    }
    let killed = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|at| scope.spawn(move || requests_killed_at(at))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    println!("killed: {killed:?}");
    assert!(killed[..3].iter().all(|n| *n == 4), "{killed:?}");
    assert_eq!(killed[7], 0, "no request has so many messages: {killed:?}");
}

/// The next process names a request that was being run, and its client does not wait.
#[test]
fn request_at_the_kill_is_named_and_its_connection_closed() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &["--keep"], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    wait_until_settled(&switch);
    let before = switch.pid();
    // An upgrade to a program that never answers: the request runs for seconds.
    let began = dir.path("began");
    let text = format!("#!/bin/sh\ntouch {}\nexec sleep 30\n", began.display());
    let program = dir.script("hangs", &text);
    let mut client = common::pvswitch();
    client.args(["ctl", "--control", switch.control(), "upgrade"]).arg(&program);
    let client = client.stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("the request to be run", || began.exists());
    kill(before);
    let out = client.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stderr));
    wait_for_next(&switch, before);
    let log = switch.log();
    assert!(
        log.contains("was killed while it ran the request {\\\"operation\\\":\\\"upgrade"),
        "{log}"
    );
    assert!(log.contains("check whether it took effect"), "{log}");
    // Named once.
    pair.wait_for_replies(&switch);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    assert_eq!(switch.log().matches("was killed while it ran").count(), 1, "{}", switch.log());
    pair.wait_for_replies(&switch);
    pair.end();
}

/// Guests that connect while the switch is killed: none is left hanging.
#[test]
fn guests_that_connect_at_the_kill_are_served_or_disconnected() {
    let dir = Dir::new();
    let names = ["a", "b", "c", "d"];
    let switch = Switch::start(&dir, &["--keep"], &names.map(|name| dir.port(name, "")));
    kill_while_connecting(&switch, names, 4, |name| {
        Gen::start(&dir.path(name), &["--mode", "idle", "--queue-size", "8"])
    });
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    pair.wait_for_replies(&switch);
    pair.end();
}

#[test]
fn state_that_ends_the_process_again_and_again_is_not_restored() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &["--keep"], &ports);
    let mut sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    wait_until_settled(&switch);
    let refused = "connections are not restored, guests must reconnect";
    // As a guest would whose rings end every process that serves them.
    let mut deaths = 0;
    while !switch.log().contains(refused) {
        assert!(deaths < 12, "{}", switch.log());
        let before = switch.pid();
        kill(before);
        wait_for_next(&switch, before);
        deaths += 1;
    }
    assert!(deaths >= 3, "not at the first kills");
    wait_for("the guest to lose its connection", || {
        !sink.0.lives() || switch.port("show", "b")["connections"] != 1
    });
    drop(sink);
    switch.wait_up("b", false);
    // The port, its socket and its settings are there.
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    pair.wait_for_replies(&switch);
    pair.end();
}

#[test]
fn switch_continues_without_its_keeper() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ""));
    let mut switch = Switch::start(&dir, &["--keep"], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let process = switch.pid();
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert!(shown.contains("keep on: "), "{shown}");
    switch.process.kill();
    wait_for("the loss to be reported", || switch.log().contains("the keeper process has ended"));
    pair.wait_for_replies(&switch);
    assert_eq!(switch.pid(), process);
    assert_eq!(switch.json(&["show"])["keep"], "failed");
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert!(shown.contains("keep failed: "), "{shown}");
    pair.end();
    switch.shut_down(&dir);
}

#[test]
fn upgraded_switch_is_kept_too() {
    let dir = Dir::new();
    let ports = ["a", "b"].map(|name| dir.port(name, ""));
    let mut switch = Switch::start(&dir, &["--keep"], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let before = switch.pid();
    switch.json(&["upgrade", env!("CARGO_BIN_EXE_pvswitch")]);
    wait_for_next(&switch, before);
    assert_eq!(switch.json(&["show"])["taken_over"]["killed"], false);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    pair.wait_for_replies(&switch);
    switch.check_connected_once(&["a", "b"]);
    pair.end();
    // The keeper passes signals on to the process that serves now.
    assert!(switch.process.end().success());
    assert!(!dir.path("a").exists() && !dir.path("ctl").exists());
}

#[test]
fn errors_of_a_kept_switch_are_those_of_the_switch() {
    let run = |args: &[&str]| {
        let out =
            common::pvswitch().args(["run", "--control", "/nonexistent/ctl"]).args(args).output();
        let out = out.unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (status, error) = run(&["--keep"]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("/nonexistent") && !error.contains("restarting it"), "{error}");
    let (status, error) = run(&["--keep", "--config", "/nonexistent/c.toml"]);
    assert_eq!(status, Some(2), "{error}");
    let (status, error) = run(&["--kept"]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("--kept is for `run --keep`"), "{error}");
}

/// A kept switch that was killed, whose next process starts, and does not handle signals yet: it
/// waits for a line from the pipe that is returned.
fn restarting(dir: &Dir) -> (Switch, File) {
    let program = dir.install("pvswitch", env!("CARGO_BIN_EXE_pvswitch"));
    let pipe = dir.path("pipe");
    std::fs::write(dir.path("x.toml"), "[port.a]\nkind = \"null\"\n").unwrap();
    let mut command = Command::new(&program);
    command.args(["run", "--keep", "--quiet", "--control", &dir.text("ctl"), "--config"]);
    command.arg(dir.path("x.toml")).stdin(Stdio::null()).stdout(Stdio::null());
    let switch = Switch::spawn(dir, command);
    wait_until_settled(&switch);
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let real = env!("CARGO_BIN_EXE_pvswitch");
    let text = format!("#!/bin/sh\nread line < {}\nexec {real} \"$@\"\n", pipe.display());
    std::fs::rename(dir.script("script", &text), &program).unwrap();
    kill(switch.pid());
    // Returns when the script opens it.
    let pipe = File::options().write(true).open(&pipe).unwrap();
    (switch, pipe)
}

fn restarts(switch: &Switch) -> usize {
    switch.log().matches("restarting it").count()
}

#[test]
fn switch_that_is_stopped_while_it_starts_is_not_restarted() {
    for how in [Signal::TERM, Signal::INT] {
        let dir = Dir::new();
        let (mut switch, _pipe) = restarting(&dir);
        signal(&switch.process.0, how);
        assert_eq!(switch.process.wait().code(), Some(0), "{}", switch.log());
        assert_eq!(restarts(&switch), 1, "{}", switch.log());
    }
}

#[test]
fn switch_that_is_to_reload_while_it_starts_reloads_after_that() {
    let dir = Dir::new();
    let (mut switch, mut pipe) = restarting(&dir);
    signal(&switch.process.0, Signal::HUP);
    let ports = "[port.a]\nkind = \"null\"\n[port.b]\nkind = \"null\"\n";
    std::fs::write(dir.path("x.toml"), ports).unwrap();
    pipe.write_all(b"start\n").unwrap();
    wait_for("the reload", || switch.log().contains("configuration reloaded"));
    assert_eq!(restarts(&switch), 1, "{}", switch.log());
    assert_eq!(switch.process.end().code(), Some(0));
}

/// Number of times that the control thread slept.
fn waits(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn idle_switch_keeps_its_state_without_a_wake_up() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &["a", "b"].map(|name| dir.port(name, "")));
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    wait_until_settled(&switch);
    let pid = switch.pid();
    pair.end();
    switch.wait_up("a", false);
    // The last counters are written, then nothing is due: in some interval it does not wake up.
    wait_for("an interval without a wake-up", || {
        let before = waits(pid);
        std::thread::sleep(Duration::from_millis(2500));
        waits(pid) == before
    });
}

#[test]
fn tap_stays_with_its_addresses() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let tap = format!("pvski{}", std::process::id() % 100_000);
    let ports = [dir.port("a", ""), format!("h=tap:{tap}")];
    let switch = Switch::start(&dir, &["--keep", "--forward", "cross"], &ports);
    let of = |what: &str| of_interface(&tap, what);
    let (index, changes) = (of("ifindex"), of("carrier_changes"));
    let received = of("statistics/rx_packets");
    let sender = Gen::start(&dir.path("a"), &["--rate", "5k"]);
    switch.wait_up("a", true);
    switch.wait_for_frames("a", 500);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    switch.wait_for_frames("a", 500);
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || of("statistics/rx_packets") - received >= sent);
    assert_eq!((of("ifindex"), of("carrier_changes")), (index, changes), "the link stayed up");
    assert_eq!(switch.port("show", "h")["created"], true);
}

/// A socket that holds another, which holds another: as deep as the kernel permits.
fn nested() -> std::os::fd::OwnedFd {
    use std::os::fd::AsFd;
    let (mut held, mut other) = os::socketpair().unwrap();
    for _ in 0..8 {
        let (next, sends) = os::socketpair().unwrap();
        if !matches!(os::send(sends.as_fd(), b"x", &[held.as_fd()]), Ok(true)) {
            break;
        }
        (held, other) = (next, sends);
    }
    drop(other);
    held
}

/// A guest whose request channel cannot be passed on is not kept; the others are.
#[test]
fn guest_with_nested_sockets_costs_others_nothing() {
    use std::os::fd::AsFd;
    let dir = Dir::new();
    let ports = ["a", "b", "c"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &["--keep"], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let hostile = std::os::unix::net::UnixStream::connect(dir.path("c")).unwrap();
    let request = |number: u32, payload: &[u8]| {
        let head = [number, 1, u32::try_from(payload.len()).unwrap()];
        [&head.map(u32::to_ne_bytes).concat(), payload].concat()
    };
    // SET_PROTOCOL_FEATURES: BACKEND_REQ; SET_BACKEND_REQ_FD.
    let features = request(16, &(1_u64 << 5).to_ne_bytes());
    assert!(os::send(hostile.as_fd(), &features, &[]).unwrap());
    assert!(os::send(hostile.as_fd(), &request(21, &[]), &[nested().as_fd()]).unwrap());
    switch.ctl(&["show"]);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    pair.wait_for_replies(&switch);
    assert_eq!(switch.port("show", "a")["connections"], 1);
    assert!(!switch.log().contains("cannot keep the switch's state"), "{}", switch.log());
    pair.end();
}
