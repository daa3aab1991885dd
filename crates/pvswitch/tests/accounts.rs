//! Accounts of ports: resources used by a peer are charged to its port, limits hold and can be set,
//! and `ctl` shows which port was refused what, and how often.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{Bystanders, Dir, Gen, Switch, wait_for};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{FrontendReq as R, MemRegion, Message, VringAddr, VringState};

const LEN: u64 = 0x10_0000;

/// A front-end that sends arbitrary messages.
struct Front(UnixStream);

impl Front {
    /// Connects and negotiates replies.
    fn connect(dir: &Dir, name: &str) -> Self {
        let stream = UnixStream::connect(dir.path(name)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let front = Self(stream);
        front.send(R::SET_OWNER, Vec::new(), false, &[]);
        let bits = PROTOCOL_FEATURES.bits().to_ne_bytes().to_vec();
        assert_eq!(front.ask(R::SET_PROTOCOL_FEATURES, bits, &[]), 0);
        let features = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
        assert_eq!(front.ask(R::SET_FEATURES, features.to_ne_bytes().to_vec(), &[]), 0);
        front
    }

    fn send(&self, request: R, payload: Vec<u8>, ack: bool, fds: &[BorrowedFd<'_>]) {
        let message = Message::request(request, payload, ack).to_bytes();
        os::send(self.0.as_fd(), &message, fds).unwrap();
    }

    /// Sends a request and returns its acknowledgement: 0 means success.
    fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> u64 {
        self.send(request, payload, true, fds);
        let mut reply = [0; 20];
        (&self.0).read_exact(&mut reply).unwrap();
        u64::from_ne_bytes(*reply.last_chunk().unwrap())
    }

    /// Shares another region of memory. Returns the acknowledgement.
    fn share(&self, n: u64) -> u64 {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LEN).unwrap();
        let at = n * 2 * LEN;
        let region = MemRegion { guest_addr: at, size: LEN, user_addr: at, mmap_offset: 0 };
        self.ask(R::ADD_MEM_REG, region.to_single_bytes(), &[file.as_fd()])
    }
}

/// A field of a port's account.
fn entry(switch: &Switch, port: &str, name: &str, field: &str) -> u64 {
    switch.port("show", port)["account"][name][field].as_u64().unwrap()
}

/// Entries of a port's account with refusals.
fn refused(switch: &Switch, port: &str) -> Vec<String> {
    let account = switch.port("show", port)["account"].clone();
    let entries = account.as_object().unwrap().iter();
    let refused = entries.filter(|(_, e)| e["refused"].as_u64().is_some_and(|times| times > 0));
    refused.map(|(name, _)| name.clone()).collect()
}

/// Output of `ctl show`.
fn shown(switch: &Switch) -> String {
    String::from_utf8(switch.ctl(&["show"]).stdout).unwrap()
}

fn error(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

/// Issue 14, "Bad input": `ctl` shows which port, what, how often.
#[test]
fn messages_above_the_rate_are_counted_at_the_port_of_their_front_end() {
    const FLOOD: u64 = 300;
    let dir = Dir::new();
    let ports = [dir.port("x", ""), dir.port("y", ""), dir.port("bad", ",limit-messages=20")];
    let switch = Switch::start(&dir, &[], &ports);
    let others = Bystanders::start(&switch, &dir, "x", "y");
    let front = Front::connect(&dir, "bad");
    // On a slow machine a message may count as several, by its time: perhaps some of these.
    let before = entry(&switch, "bad", "messages", "refused");
    let flood = UnixStream::try_clone(&front.0).unwrap();
    // The socket may not take all of them before some are read.
    let sender = std::thread::spawn(move || {
        for _ in 0..FLOOD {
            let message = Message::request(R::SET_OWNER, Vec::new(), false).to_bytes();
            (&flood).write_all(&message).unwrap();
        }
    });
    wait_for("messages to be refused", || entry(&switch, "bad", "messages", "refused") > before);
    assert_eq!(refused(&switch, "bad"), ["messages"]);
    assert!(refused(&switch, "x").is_empty() && refused(&switch, "y").is_empty());
    let lines = shown(&switch);
    let line = lines.lines().find(|line| line.contains("refused  ")).unwrap();
    assert!(line.contains("refused  messages ") && line.contains(" (limit 20/s)"), "{line}");
    assert_eq!(lines.matches("refused  ").count(), 1, "{lines}");
    others.wait_for_replies(&switch);
    // Under a higher limit, all are read at once.
    switch.json(&["set", "bad", "limit-messages=100000"]);
    wait_for("all messages", || entry(&switch, "bad", "messages", "used") >= FLOOD + 3);
    sender.join().unwrap();
    assert_eq!(entry(&switch, "bad", "messages", "limit"), 100_000);
    assert_eq!(switch.port("stats", "bad")["account"]["messages"]["limit"], 100_000);
    others.end();
}

/// A guest that restarts connects while messages of its old connection still wait for their rate.
#[test]
fn front_end_that_connects_again_waits_for_the_end_of_its_connection_before() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",limit-messages=20")]);
    let first = Front::connect(&dir, "a");
    let before = entry(&switch, "a", "messages", "refused");
    for _ in 0..60 {
        first.send(R::SET_OWNER, Vec::new(), false, &[]);
    }
    wait_for("messages to wait", || entry(&switch, "a", "messages", "refused") > before);
    drop(first);
    let next = Front::connect(&dir, "a");
    let log = switch.log();
    assert!(!log.contains("rejected"), "{log}");
    assert_eq!(log.matches("front-end connected").count(), 2, "{log}");
    // One that is there keeps its port.
    let mut other = UnixStream::connect(dir.path("a")).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    assert!(switch.log().contains("rejected a second connection"));
    assert_eq!(next.share(0), 0);
}

/// Issue 14, row 10.
#[test]
fn announcements_are_frames_of_the_port_and_limited_in_rate() {
    let dir = Dir::new();
    let ports = [dir.port("moved", ""), dir.port("x", ""), dir.port("y", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let others = Bystanders::start(&switch, &dir, "x", "y");
    let front = Front::connect(&dir, "moved");
    assert_eq!(front.share(0), 0);
    let announce = |n: u8| front.ask(R::SEND_RARP, vec![2, 0, 0, 0, 0, n, 0, 0], &[]);
    // The frame is sent once its guest is served.
    assert_eq!(announce(0x71), 0);
    switch.json(&["set", "moved", "limit-announcements=0"]);
    assert_eq!((0x72..0x76).map(announce).sum::<u64>(), 0);
    assert_eq!(switch.counter("moved", "ingress", "frames"), 0);
    let kick = os::eventfd().unwrap();
    for index in 0..2 {
        let at = 0x1_0000 + u64::from(index) * 0x4000;
        let (desc, avail, used) = (at, at + 0x1000, at + 0x2000);
        let state = |num| VringState { index, num }.to_bytes();
        let addr = VringAddr { index, flags: 0, desc, used, avail, log: 0 };
        let number = u64::from(index).to_ne_bytes().to_vec();
        assert_eq!(front.ask(R::SET_VRING_NUM, state(64), &[]), 0);
        assert_eq!(front.ask(R::SET_VRING_BASE, state(0), &[]), 0);
        assert_eq!(front.ask(R::SET_VRING_ADDR, addr.to_bytes(), &[]), 0);
        assert_eq!(front.ask(R::SET_VRING_KICK, number, &[kick.as_fd()]), 0);
        assert_eq!(front.ask(R::SET_VRING_ENABLE, state(1), &[]), 0);
    }
    wait_for("the frame", || switch.counter("moved", "ingress", "frames") == 1);
    assert_eq!(switch.counter("moved", "ingress", "bytes"), 60);
    wait_for("its address", || switch.json(&["fdb"]).to_string().contains("02:00:00:00:00:71"));
    assert_eq!(entry(&switch, "moved", "announcements", "used"), 1);
    assert_eq!(entry(&switch, "moved", "announcements", "refused"), 4);
    others.wait_for_replies(&switch);
    others.end();
}

/// Issue 14, "Bad input": one counter per cause, independent of the log's limit.
#[test]
fn front_end_errors_are_counted_by_cause_and_shown_at_the_port() {
    let dir = Dir::new();
    let ports = [dir.port("bad", ",limit-log-lines=0"), dir.port("other", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let (front, other) = (Front::connect(&dir, "bad"), Front::connect(&dir, "other"));
    for _ in 0..40 {
        assert_ne!(
            front.ask(R::SET_VRING_ENABLE, [99, 1_u32].map(u32::to_ne_bytes).concat(), &[]),
            0
        );
    }
    assert_ne!(front.ask(R::SET_MEM_TABLE, Vec::new(), &[]), 0);
    assert_eq!(other.share(0), 0);
    let (bad, good) = (switch.port("show", "bad"), switch.port("show", "other"));
    let errors = serde_json::json!({ "ring_index": 40, "short_payload": 1 });
    assert_eq!((&bad["errors"], good["errors"].as_object().unwrap().len()), (&errors, 0));
    assert!(bad["last_error"].as_str().unwrap().contains("SET_MEM_TABLE"), "{bad}");
    let lines = shown(&switch);
    assert!(lines.contains("errors   ring_index 40, short_payload 1; last: "), "{lines}");
    assert_eq!(lines.matches("errors   ").count(), 1, "{lines}");
    assert!(entry(&switch, "bad", "log-lines", "refused") > 0, "{bad}");
}

/// Issue 14, "Limits with defaults, settable, shown in `ctl` with what was refused".
#[test]
fn memory_above_a_ports_limit_is_refused_until_the_limit_is_raised() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",limit-mappings=1"), dir.port("b", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let (front, other) = (Front::connect(&dir, "a"), Front::connect(&dir, "b"));
    assert_eq!((front.share(0), other.share(0), other.share(1)), (0, 0, 0));
    assert_ne!(front.share(1), 0);
    assert_eq!((refused(&switch, "a"), refused(&switch, "b").len()), (vec!["mappings".into()], 0));
    let number = |field| entry(&switch, "a", "mappings", field);
    assert_eq!(["used", "limit", "refused"].map(number), [1, 1, 1]);
    assert!(shown(&switch).contains("refused  mappings 1 (limit 1)"), "{}", shown(&switch));
    // The process's budget is shown once, and covers both ports.
    let show = switch.json(&["show"]);
    let budget = &show["budgets"]["mappings"];
    assert!(budget["used"] == 3 && budget["limit"].as_u64().unwrap() > 3, "{show}");
    // The front-end connects after the limit is raised.
    switch.json(&["set", "a", "limit-mappings=64"]);
    assert_eq!(front.share(1), 0);
    assert_eq!(["used", "limit", "refused"].map(number), [2, 64, 1]);
    drop((front, other));
    wait_for("memory to be given back", || number("used") == 0);
    switch.json(&["set", "a", "limit-mappings=0"]);
    let front = Front::connect(&dir, "a");
    assert_ne!(front.share(0), 0);
    drop(front);
    switch.json(&["set", "a", "limit-mappings=64", "limit-mapped-bytes=8G"]);
    let guest = Gen::start(&dir.path("a"), &["--mode", "sink"]);
    switch.wait_up("a", true);
    assert_eq!(entry(&switch, "a", "mapped-bytes", "limit"), 8 << 30);
    guest.end();
}

#[test]
fn operators_limits_override_those_of_the_ports_kind() {
    let dir = Dir::new();
    let at = |name: &str| format!("{name}=xen-local:{}", dir.text(name));
    let limited = format!("{},limit-mappings=4000", at("vif"));
    let file = dir.text("x.toml");
    std::fs::write(&file, "[port.nul]\nkind = \"null\"\nlimit-log-lines = 3\n").unwrap();
    let switch = Switch::start(&dir, &["--config", &file], &[limited, at("vif2")]);
    assert_eq!(entry(&switch, "vif", "mappings", "limit"), 4000);
    assert!(entry(&switch, "vif2", "mappings", "limit") >= 1018);
    assert_eq!(entry(&switch, "nul", "log-lines", "limit"), 3);
    let account: Value = switch.port("show", "nul")["account"].clone();
    assert_eq!(
        (&account["log-lines"]["per_second"], &account["served_ns"]),
        (&true.into(), &0.into())
    );
}

#[test]
fn invalid_limits_are_rejected_and_change_nothing() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), "t=null".into()]);
    for (args, want) in [
        (&["a", "limit-mapings=4"][..], "did you mean 'limit-mappings'?"),
        (&["a", "limit-mappings=4K"], "limit-mappings=4K: use 0 to 1000000000"),
        (&["a", "limit-held-bytes=4X"], "use 0 to 131072T bytes, with unit K, M, G, T or none"),
        (&["a", "limit-messages=1", "limit-mappings=x"], "limit-mappings=x: use 0 to"),
        (&["a/0", "limit-mappings=4"], "use set a limit-mappings=N"),
        (&["b", "limit-mappings=4"], "no port 'b'"),
        (&["limit-mappings=4"], "is a setting of a port: use set PORT limit-mappings=VALUE"),
    ] {
        let error = error(&switch, &[&["set"], args].concat());
        assert!(error.contains(want), "{args:?}: {error}");
    }
    for port in ["a", "t"] {
        let limits = ["mappings", "messages"].map(|name| entry(&switch, port, name, "limit"));
        assert_eq!(limits, [1018, 4000], "{port}");
    }
}
