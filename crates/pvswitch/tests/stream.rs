//! Ports of peers with a socket: QEMU's framing, in order and otherwise, datagrams, passt.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::time::Duration;

use common::{Bystanders, Dir, Switch, kill_and_wait, upgrade, wait_for, wait_until_settled};

const A: u8 = 1;
const B: u8 = 2;
const C: u8 = 3;

/// A frame from one address to another with a number.
fn frame(from: u8, to: u8, number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(len, to);
    frame
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// A peer of a stream port.
struct Peer(UnixStream);

impl Peer {
    fn connect(switch: &Switch, dir: &Dir, port: &str) -> Self {
        let peer = Self(UnixStream::connect(dir.path(port)).unwrap());
        switch.wait_up(port, true);
        peer.0.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        peer
    }

    fn send(&mut self, frame: &[u8]) {
        self.0.write_all(&framed(frame)).unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        self.0.read_exact(&mut frame).unwrap();
        frame
    }

    /// Waits until the switch has closed the connection.
    fn wait_for_end(&mut self) {
        let mut rest = [0; 4096];
        loop {
            match self.0.read(&mut rest) {
                Ok(0) => return,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                result => assert!(result.unwrap() > 0),
            }
        }
    }
}

fn ports(dir: &Dir, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{name}=stream:{}", dir.text(name))).collect()
}

/// Both peers have sent to the other: addresses are learned.
fn meet(a: &mut Peer, b: &mut Peer, from: u8, to: u8) {
    a.send(&frame(from, to, 0, 60));
    while b.receive() != frame(from, to, 0, 60) {}
    b.send(&frame(to, from, 0, 60));
    while a.receive() != frame(to, from, 0, 60) {}
}

#[test]
fn frames_of_all_lengths_pass_both_ways_in_order() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &ports(&dir, &["a", "b"]));
    assert_eq!(switch.port("show", "a")["state"], "unconnected");
    let why = String::from_utf8(switch.ctl(&["why", "a"]).stdout).unwrap();
    assert!(why.contains("no peer is connected") && why.contains("-netdev stream"), "{why}");
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    let show = switch.port("show", "a");
    assert_eq!(show["kind"], format!("stream:{}", dir.text("a")));
    assert_eq!((&show["connected"], &show["connections"]), (&true.into(), &1.into()), "{show}");
    // In pieces that cut frames and lengths, to a receiver that reads meanwhile.
    let frames: Vec<_> = (0..3000).map(|n| frame(A, B, n, 60 + n as usize * 37 % 9100)).collect();
    let bytes: Vec<u8> = frames.iter().flat_map(|f| framed(f)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| bytes.chunks(7919).for_each(|piece| a.0.write_all(piece).unwrap()));
        for (n, frame) in frames.iter().enumerate() {
            assert!(b.receive() == *frame, "frame {n}");
        }
    });
    assert_eq!(switch.counter("a", "ingress", "frames"), 3001);
    assert_eq!(switch.counter("b", "egress", "frames"), 3001);
    assert_eq!(switch.counter("a", "ingress", "drops_no_room"), 0);
    switch.check_connected_once(&["a", "b"]);
}

/// A stream peer that sends lengths of 4 GiB: a clear message, and every other port keeps its
/// traffic.
#[test]
fn hostile_lengths_end_their_own_connection_only() {
    let dir = Dir::new();
    let mut all = ports(&dir, &["a", "b", "evil"]);
    all.extend([dir.port("rr", ""), dir.port("echo", "")]);
    let switch = Switch::start(&dir, &[], &all);
    let pair = Bystanders::start(&switch, &dir, "rr", "echo");
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    let bad = [u32::MAX, 0, 13, 65_554, 1 << 31];
    for (n, length) in bad.iter().enumerate() {
        let mut evil = Peer::connect(&switch, &dir, "evil");
        let bytes =
            [framed(&frame(C, A, n as u32, 60)), length.to_be_bytes().to_vec(), vec![7; 99]];
        evil.0.write_all(&bytes.concat()).unwrap();
        evil.wait_for_end();
        switch.wait_up("evil", false);
        assert_eq!(a.receive(), frame(C, A, n as u32, 60), "what came before is forwarded");
        let log = switch.log();
        let text = format!("announces a frame of {length} bytes; frames have 14 to 65553");
        assert_eq!(log.matches(&text).count(), 1, "{log}");
        a.send(&frame(A, B, n as u32, 1000));
        assert_eq!(b.receive(), frame(A, B, n as u32, 1000));
    }
    let show = switch.port("show", "evil");
    assert_eq!((&show["errors"]["bad_length"], &show["faults"]), (&5.into(), &5.into()), "{show}");
    assert!(show["last_error"].as_str().unwrap().contains("2147483648"), "{show}");
    switch.check_connected_once(&["a", "b", "rr", "echo"]);
    // An end in order is no fault; nor is a second peer, which is refused.
    let evil = Peer::connect(&switch, &dir, "evil");
    let mut second = Peer(UnixStream::connect(dir.path("evil")).unwrap());
    second.wait_for_end();
    assert!(switch.is_up("evil"));
    drop(evil);
    switch.wait_up("evil", false);
    assert_eq!(switch.port("show", "evil")["faults"], 5);
    pair.wait_for_replies(&switch);
    pair.end();
}

/// A receiver that does not read holds its own frames only.
#[test]
fn peer_that_does_not_read_is_full_and_others_keep_their_traffic() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--workers", "1"], &ports(&dir, &["a", "b", "c"]));
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|name| Peer::connect(&switch, &dir, name));
    meet(&mut a, &mut b, A, B);
    meet(&mut a, &mut c, A, C);
    let sent = 4000;
    let before = switch.counter("c", "egress", "frames");
    let delivered = || switch.counter("c", "egress", "frames") - before;
    for n in 0..sent {
        a.send(&frame(A, C, n, 1514));
        if n % 100 == 0 {
            a.send(&frame(A, B, n, 60));
            while b.receive() != frame(A, B, n, 60) {}
        }
    }
    assert!(switch.counter("c", "egress", "full") > 0);
    let lost = || {
        let of = |counter| switch.counter("c", "egress", counter);
        of("lost_no_room") + of("lost_aged")
    };
    // Those held are given up at last.
    wait_for("all frames", || {
        let held = switch.counter("c", "egress", "held");
        held == 0 && delivered() + lost() == u64::from(sent)
    });
    assert!(lost() > 0, "more than can be held");
    assert_eq!(switch.counter("a", "ingress", "drops_no_room"), lost());
    // What it gets when it reads is whole and in order, and the last frames follow by themselves.
    let (mut last, mut got) = (0, 0);
    while got < delivered() {
        let frame_of_a = c.receive();
        let number = u32::from_be_bytes(frame_of_a[14..18].try_into().unwrap());
        assert!(frame_of_a == frame(A, C, number, 1514) && (got == 0 || number > last), "{number}");
        (last, got) = (number, got + 1);
    }
    a.send(&frame(A, C, sent, 60));
    assert_eq!(c.receive(), frame(A, C, sent, 60));
}

#[test]
fn switch_that_connects_reconnects_to_its_peer() {
    let dir = Dir::new();
    let listener = UnixListener::bind(dir.path("peer")).unwrap();
    let mut all = ports(&dir, &["b"]);
    all.push(format!("a=stream:{},mode=client", dir.text("peer")));
    let switch = Switch::start(&dir, &[], &all);
    let mut b = Peer::connect(&switch, &dir, "b");
    for n in 0..3 {
        let mut a = Peer(listener.accept().unwrap().0);
        a.send(&frame(A, B, n, 60));
        assert_eq!(b.receive(), frame(A, B, n, 60));
        if n == 1 {
            a.0.write_all(&[255; 4]).unwrap();
        }
    }
    drop(listener);
    std::fs::remove_file(dir.path("peer")).unwrap();
    switch.wait_up("a", false);
    let why = String::from_utf8(switch.ctl(&["why", "a"]).stdout).unwrap();
    assert!(why.contains("no process listens"), "{why}");
    assert_eq!(switch.port("show", "a")["connections"], 3);
    assert_eq!(switch.port("show", "a")["errors"]["bad_length"], 1);
}

/// A frame of which both processes have a part, in each direction, is whole.
#[test]
fn upgrade_in_the_middle_of_frames_loses_nothing() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &ports(&dir, &["a", "b"]));
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    let mut living = Vec::new();
    for round in 0..3 {
        // The socket of b is full, and a sent a part of a frame.
        let full = switch.counter("b", "egress", "full");
        let mut sent = 0;
        while switch.counter("b", "egress", "held") == 0
            || switch.counter("b", "egress", "full") == full
        {
            (0..16).for_each(|_| {
                a.send(&frame(A, B, sent, 1514));
                sent += 1;
            });
        }
        let whole = framed(&frame(A, B, sent, 1000));
        a.0.write_all(&whole[..round * 300 + 2]).unwrap();
        living.push(upgrade(&switch));
        a.0.write_all(&whole[round * 300 + 2..]).unwrap();
        // Some may have been held for too long, or not have been forwarded before the upgrade.
        let mut next = 0;
        while next <= sent {
            let got = b.receive();
            let number = u32::from_be_bytes(got[14..18].try_into().unwrap());
            let len = if number == sent { 1000 } else { 1514 };
            assert!(got == frame(A, B, number, len) && number >= next, "{number} after {next}");
            next = number + 1;
        }
    }
    switch.check_connected_once(&["a", "b"]);
    switch.shut_down(&dir);
    b.wait_for_end();
}

/// What a process had of a stream ends with it: peers must connect again, and can at once.
#[test]
fn killed_switch_closes_streams_and_its_successor_listens() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &ports(&dir, &["a", "b"]));
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    a.wait_for_end();
    b.wait_for_end();
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    assert_eq!(switch.port("show", "a")["connections"], 2);
}

#[test]
fn rules_of_ports_hold_for_stream_ports() {
    let dir = Dir::new();
    let options = ["mac=02:00:00:00:00:01,vlan=7,isolated=on", "trunk=7", "vlan=7,isolated=on"];
    let all = ["a", "b", "c"].iter().zip(options);
    let all: Vec<_> =
        all.map(|(name, options)| format!("{name}=stream:{},{options}", dir.text(name))).collect();
    let switch = Switch::start(&dir, &[], &all);
    let [mut a, mut b, _c] = ["a", "b", "c"].map(|name| Peer::connect(&switch, &dir, name));
    a.send(&frame(C, B, 0, 60));
    a.send(&frame(A, B, 1, 60));
    let tagged = b.receive();
    assert_eq!((&tagged[12..16], &tagged[18..22]), (&[0x81, 0, 0, 7][..], &[0, 0, 0, 1][..]));
    assert_eq!(tagged.len(), 64);
    assert_eq!(switch.counter("a", "ingress", "drops_spoofed_mac"), 1);
    assert_eq!(switch.counter("c", "egress", "frames"), 0);
}

#[test]
fn reload_keeps_the_socket_and_what_does_not_differ() {
    let dir = Dir::new();
    let file = dir.path("c.toml");
    let write = |options: &str| {
        let port = |name, options| {
            let socket = dir.text(name);
            format!("[port.{name}]\nkind = \"stream\"\nsocket = \"{socket}\"\n{options}")
        };
        std::fs::write(&file, port("a", options) + &port("b", "")).unwrap();
    };
    write("");
    let switch = Switch::start(&dir, &["--config", file.to_str().unwrap()], &[]);
    let (mut a, mut b) = (Peer::connect(&switch, &dir, "a"), Peer::connect(&switch, &dir, "b"));
    meet(&mut a, &mut b, A, B);
    write("weight = 3\n");
    assert_eq!(switch.json(&["reload"])["changed"][0]["name"], "a");
    meet(&mut a, &mut b, A, B);
    write("socket-mode = \"0666\"\n");
    assert_eq!(switch.json(&["reload"])["replaced"][0]["name"], "a");
    a.wait_for_end();
    let mut a = Peer::connect(&switch, &dir, "a");
    meet(&mut a, &mut b, A, B);
    let mode = std::fs::metadata(dir.path("a")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o666);
    assert!(switch.ctl(&["del-port", "a"]).status.success());
    a.wait_for_end();
    assert!(!dir.path("a").exists());
}

// ---- datagrams ----

/// A peer of a datagram port, at `DIR/PORT.peer`.
fn datagrams(dir: &Dir, port: &str) -> UnixDatagram {
    let _ = std::fs::remove_file(dir.path(&format!("{port}.peer")));
    let socket = UnixDatagram::bind(dir.path(&format!("{port}.peer"))).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket
}

fn send(peer: &UnixDatagram, dir: &Dir, port: &str, frame: &[u8]) {
    assert_eq!(peer.send_to(frame, dir.path(port)).unwrap(), frame.len());
}

fn receive(peer: &UnixDatagram) -> Vec<u8> {
    let mut frame = vec![0; 1 << 16];
    let len = peer.recv(&mut frame).unwrap();
    frame.truncate(len);
    frame
}

fn dgram_ports(dir: &Dir) -> Vec<String> {
    let port = |name: &str| {
        let socket = dir.text(name);
        format!("{name}=dgram:{socket},peer={socket}.peer")
    };
    ["a", "b"].map(port).to_vec()
}

/// Each sends to the other, and gets the frame.
fn exchange(a: &UnixDatagram, b: &UnixDatagram, dir: &Dir, number: u32) {
    for (from, of, to, x, y) in [(a, "a", b, A, B), (b, "b", a, B, A)] {
        send(from, dir, of, &frame(x, y, number, 1000));
        while receive(to) != frame(x, y, number, 1000) {}
    }
}

#[test]
fn datagrams_are_frames_and_a_peer_may_restart() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &dgram_ports(&dir));
    assert_eq!(switch.port("show", "a")["state"], "unconnected");
    let why = String::from_utf8(switch.ctl(&["why", "a"]).stdout).unwrap();
    assert!(why.contains("its peer has no socket"), "{why}");
    let (mut a, b) = (datagrams(&dir, "a"), datagrams(&dir, "b"));
    switch.wait_up("a", true);
    switch.wait_up("b", true);
    exchange(&a, &b, &dir, 0);
    // More than a socket holds, to a receiver that reads meanwhile.
    std::thread::scope(|scope| {
        scope.spawn(|| (0..2000).for_each(|n| send(&a, &dir, "a", &frame(A, B, n, 1514))));
        (0..2000).for_each(|n| assert!(receive(&b) == frame(A, B, n, 1514), "frame {n}"));
    });
    for len in [0, 13, 9235, 60_000] {
        send(&a, &dir, "a", &vec![1; len]);
    }
    exchange(&a, &b, &dir, 1);
    assert_eq!(switch.counter("a", "ingress", "drops_runt"), 2);
    assert_eq!(switch.counter("a", "ingress", "drops_too_long"), 2);
    switch.check_connected_once(&["a", "b"]);
    for round in 2..4 {
        drop(a);
        a = datagrams(&dir, "a");
        // Its first frame arrives; what is sent to the closed socket ends the connection.
        send(&a, &dir, "a", &frame(A, B, round, 60));
        while receive(&b) != frame(A, B, round, 60) {}
        wait_for("a frame to its new socket", || {
            send(&b, &dir, "b", &frame(B, A, round, 60));
            a.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            a.recv(&mut [0; 2000]).is_ok()
        });
        a.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        switch.wait_up("a", true);
        exchange(&a, &b, &dir, round);
    }
    let show = switch.port("show", "a");
    assert_eq!((&show["connections"], &show["faults"]), (&3.into(), &0.into()), "{show}");
    switch.shut_down(&dir);
}

#[test]
fn descriptors_of_a_datagram_peer_cost_nothing() {
    /// Most that one message has.
    const MOST: usize = 253;
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &dgram_ports(&dir));
    let (a, b) = (datagrams(&dir, "a"), datagrams(&dir, "b"));
    switch.wait_up("a", true);
    switch.wait_up("b", true);
    exchange(&a, &b, &dir, 0);
    let event = os::eventfd().unwrap();
    // A socket that is connected receives from that peer only.
    let hostile = UnixDatagram::unbound().unwrap();
    hostile.connect(dir.path("a")).unwrap();
    let sent = os::send(hostile.as_fd(), &frame(A, B, 1, 60), &[event.as_fd(); MOST]);
    if sent.is_err() {
        // Linux 6.16 refuses them at their sender, and the port does not notice.
        exchange(&a, &b, &dir, 2);
        switch.check_connected_once(&["a", "b"]);
        assert_eq!(switch.port("show", "a")["faults"], 0);
        return;
    }
    wait_for("the end of the queue", || {
        switch.port("show", "a")["errors"]["unexpected_descriptors"] == 1
    });
}

#[test]
fn datagram_ports_continue_after_upgrade_and_kill() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &dgram_ports(&dir));
    let (a, b) = (datagrams(&dir, "a"), datagrams(&dir, "b"));
    switch.wait_up("a", true);
    switch.wait_up("b", true);
    exchange(&a, &b, &dir, 0);
    // Over the upgrade, as many on the way as the socket of `b` has room for: none waits for a
    // reader, which it may for 200 ms only, and none is lost.
    let (read, window) = std::sync::mpsc::channel();
    (0..8).for_each(|_| read.send(()).unwrap());
    let _next = std::thread::scope(|scope| {
        let (from, of) = (&a, &dir);
        scope.spawn(move || {
            for (n, ()) in (0..).zip(window) {
                send(from, of, "a", &frame(A, B, n, 60));
            }
        });
        let upgrade = scope.spawn(|| upgrade(&switch));
        // Dropped last, which ends the sender.
        let read = read;
        for n in 0.. {
            assert_eq!(receive(&b), frame(A, B, n, 60), "frame {n}");
            read.send(()).unwrap();
            if n >= 100 && upgrade.is_finished() {
                break;
            }
        }
        upgrade.join().unwrap()
    });
    exchange(&a, &b, &dir, 1);
    switch.check_connected_once(&["a", "b"]);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    switch.wait_up("a", true);
    switch.wait_up("b", true);
    exchange(&a, &b, &dir, 2);
}

// ---- passt ----

/// The passt processes that a switch has started, by its helper.
fn passts(switch: &Switch) -> Vec<u32> {
    let is_passt = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.starts_with("passt"))
    };
    let started = children(switch.pid()).into_iter().flat_map(children);
    started.filter(is_passt).collect()
}

/// The children of a process, none if it has ended.
fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn without_passt_the_error_names_its_package() {
    let mut command = common::pvswitch();
    command.args(["run", "--uplink", "passt"]).env("PATH", "/nowhere");
    let out = command.output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{error}");
    assert!(error.contains("passt is not installed: install the package passt"), "{error}");
}

#[test]
fn passt_is_started_again_and_ends_with_the_switch() {
    let dir = Dir::new();
    if std::process::Command::new("passt").arg("--version").output().is_err() {
        println!("skipped: passt is not installed");
        return;
    }
    let switch = Switch::start(&dir, &["--uplink", "passt"], &ports(&dir, &["a"]));
    switch.wait_up("uplink", true);
    let first = passts(&switch);
    assert_eq!(first.len(), 1);
    let status = std::fs::read_to_string(format!("/proc/{}/status", first[0])).unwrap();
    let users = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
    assert!(!users.split_whitespace().any(|user| user == "0"), "never as root: {users}");
    common::kill(first[0]);
    wait_for("another passt", || {
        let now = passts(&switch);
        now.len() == 1 && now != first && switch.is_up("uplink")
    });
    let log = switch.log();
    assert_eq!(log.matches("peer disconnected").count(), 1, "{log}");
    assert!(log.contains("passt: signal: 9"), "{log}");
    // Its connection continues in the next process, which ends it even if it does not notice the
    // end of its connection: here it is stopped.
    let second = passts(&switch)[0];
    let _next = upgrade(&switch);
    assert_eq!(switch.port("show", "uplink")["connections"], 2);
    assert!(switch.is_up("uplink"));
    stop(second);
    assert!(switch.ctl(&["shutdown"]).status.success());
    wait_for("passt to end", || has_ended(second));
}

/// Another program of its name never reads its connection, so does not notice its end.
#[test]
fn passt_that_hangs_ends_after_a_kill_of_the_switch() {
    let dir = Dir::new();
    dir.script("passt", "#!/bin/sh\nwhile :; do sleep 0.1; done\n");
    let path = format!("{}:{}", dir.text(""), std::env::var("PATH").unwrap());
    let mut command = common::pvswitch();
    let args = ["run", "--quiet", "--keep", "--uplink", "passt", "--control", &dir.text("ctl")];
    let switch = Switch::spawn(&dir, {
        command.args(args).env("PATH", path);
        command
    });
    switch.wait_up("uplink", true);
    let first = passts(&switch)[0];
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    wait_for("passt to end", || has_ended(first));
    switch.wait_up("uplink", true);
    let second = passts(&switch);
    assert!(second.len() == 1 && second[0] != first, "{second:?} after {first}");
    switch.shut_down(&dir);
    wait_for("the next to end", || has_ended(second[0]));
}

fn stop(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
}

fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z "))
}
