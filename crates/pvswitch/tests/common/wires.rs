//! Two kernels, each at the other end of a veth, and a switch between them.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::common::{
    Dir, Switch, kill_and_wait, pvswitch, upgrade, wait_for, wait_for_next, wait_until_settled,
};

/// Namespaces `a` and `b` with a veth each, `v1`, whose other ends `va` and `vb` are in `mid`.
pub struct Wires {
    pub mid: String,
    pub a: String,
    pub b: String,
}

pub fn ip(args: &str) -> bool {
    Command::new("ip").args(args.split(' ')).output().is_ok_and(|out| out.status.success())
}

impl Wires {
    /// `None`: this machine does not permit namespaces.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("pvs-wire-{}-{n}-{end}", std::process::id());
        let all = Self { mid: name("mid"), a: name("a"), b: name("b") };
        if ![&all.mid, &all.a, &all.b].iter().all(|netns| ip(&format!("netns add {netns}"))) {
            println!("skipped: no network namespaces here");
            return None;
        }
        for (netns, side, host) in [(&all.a, "va", 1), (&all.b, "vb", 2)] {
            let do_it = |args: &str| assert!(ip(args), "ip {args}");
            do_it(&format!("-n {} link add {side} type veth peer name v1 netns {netns}", all.mid));
            do_it(&format!("-n {} link set {side} up", all.mid));
            do_it(&format!("-n {netns} link set v1 address 02:00:00:00:00:0{host} up"));
            do_it(&format!("-n {netns} addr add 10.8.0.{host}/24 dev v1"));
        }
        Some(all)
    }

    /// Ports `a` and `b` of this kind at the ends of the wires.
    pub fn ports(&self, kind: &str, options: &str) -> [String; 2] {
        ["a", "b"].map(|port| format!("{port}={kind}:v{port},netns={}{options}", self.mid))
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for netns in [&self.mid, &self.a, &self.b] {
            ip(&format!("netns del {netns}"));
        }
    }
}

pub fn within<T: Send>(netns: &str, work: impl FnOnce() -> T + Send) -> T {
    uplink::in_netns(netns, work).unwrap()
}

/// Bytes that no other position has.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A TCP connection from `a` to `b`.
pub fn connection(wires: &Wires) -> (TcpStream, TcpStream) {
    let listener = within(&wires.b, || TcpListener::bind("10.8.0.2:5000").unwrap());
    let client = within(&wires.a, || TcpStream::connect("10.8.0.2:5000").unwrap());
    let (server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    (client, server)
}

/// Sends through the connection and checks what arrives.
pub fn transfer(from: &mut TcpStream, to: &mut TcpStream, len: usize) {
    let sent = pattern(len);
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(&sent).unwrap());
        let mut got = vec![0; len];
        to.read_exact(&mut got).unwrap();
        assert!(got == sent);
    });
}

fn state(switch: &Switch, port: &str) -> [Value; 2] {
    let port = switch.port("show", port);
    ["state", "last_error"].map(|key| port[key].clone())
}

/// A port of this kind follows its interface down and up, and stays down when it is removed; over
/// upgrades, too.
pub fn follows_its_interface(wires: &Wires, kind: &str) {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &wires.ports(kind, ""));
    let (mut client, mut server) = connection(wires);
    transfer(&mut client, &mut server, 1000);
    let down = |why: &str| ["down".into(), Value::from(why)];
    let mut next = Vec::new();
    for _ in 0..2 {
        assert!(ip(&format!("-n {} link set va down", wires.mid)));
        switch.wait_up("a", false);
        assert_eq!(state(&switch, "a"), down("the interface is down"));
        next.push(upgrade(&switch));
        assert_eq!(state(&switch, "a"), down("the interface is down"));
        assert!(ip(&format!("-n {} link set va up", wires.mid)));
        switch.wait_up("a", true);
        assert_eq!(state(&switch, "a"), ["up".into(), Value::Null]);
        transfer(&mut client, &mut server, 1000);
    }
    assert_eq!(switch.port("show", "a")["faults"], 0);
    assert!(ip(&format!("-n {} link del va", wires.mid)));
    wait_for("its end", || state(&switch, "a")[1] == "the interface was removed");
    next.push(upgrade(&switch));
    assert_eq!(state(&switch, "a"), down("the interface was removed"));
    assert!(switch.is_up("b"));
    switch.shut_down(&dir);
}

/// A port of this kind whose interface does not exist at the start is down until it does; over
/// an upgrade and a kill, too. The other port is served. `set_up`: for the end `v1` of a new wire.
pub fn waits_for_its_interface(wires: &Wires, kind: &str, set_up: impl Fn(&str) -> bool) {
    let dir = Dir::new();
    assert!(ip(&format!("-n {} link del va", wires.mid)));
    let mut switch = Switch::start(&dir, &["--keep"], &wires.ports(kind, ",weight=3"));
    let waits = |switch: &Switch| {
        let [state, error] = state(switch, "a");
        let error = error.as_str().unwrap_or_default().to_string();
        state == "down" && error.contains("interface `va` does not exist: name one of `ip -n")
    };
    assert!(waits(&switch) && switch.is_up("b"), "{}", switch.log());
    assert!(switch.log().contains("down until it exists"), "{}", switch.log());
    let why = String::from_utf8(switch.ctl(&["why", "a", "--seconds", "0"]).stdout).unwrap();
    assert!(why.contains("`va` does not exist"), "{why}");
    let before = switch.pid();
    switch.json(&["upgrade", env!("CARGO_BIN_EXE_pvswitch")]);
    wait_for_next(&switch, before);
    assert!(waits(&switch) && switch.is_up("b"), "{}", switch.log());
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    assert!(waits(&switch) && switch.is_up("b"), "{}", switch.log());
    let make = format!("-n {} link add va type veth peer name v1 netns {}", wires.mid, wires.a);
    assert!(ip(&make) && ip(&format!("-n {} link set va up", wires.mid)));
    assert!(set_up(&wires.a) && ip(&format!("-n {} link set v1 up", wires.a)));
    assert!(ip(&format!("-n {} addr add 10.8.0.1/24 dev v1", wires.a)));
    switch.wait_up("a", true);
    assert_eq!(switch.port("stats", "a")["ingress"][0]["weight"], 3);
    let (mut client, mut server) = connection(wires);
    transfer(&mut client, &mut server, 1000);
    assert_eq!(switch.process.end().code(), Some(0));
}

/// Ports of this kind whose network namespace does not exist at the start are down until it does
/// and has their interface; a TAP makes its own.
pub fn waits_for_its_namespace(wires: &Wires, kind: &str) {
    let dir = Dir::new();
    let netns = format!("{}-late", wires.mid);
    let [_, other] = wires.ports(kind, "");
    let ports = [format!("a={kind}:va,netns={netns}"), format!("t=tap:t0,netns={netns}"), other];
    let switch = Switch::start(&dir, &[], &ports);
    let is = |port: &str, wanted: &str| {
        let [state, error] = state(&switch, port);
        state == "down" && error.as_str().is_some_and(|error| error.contains(wanted))
    };
    let missing = format!("network namespace `{netns}` does not exist");
    assert!(is("a", &missing) && is("t", &missing) && switch.is_up("b"), "{}", switch.log());
    for port in ["a", "t"] {
        let why = String::from_utf8(switch.ctl(&["why", port, "--seconds", "0"]).stdout).unwrap();
        assert!(why.contains(&missing) && why.contains("ip netns add"), "{why}");
    }
    assert!(ip(&format!("netns add {netns}")));
    switch.wait_up("t", true);
    wait_for("the interface to be awaited", || is("a", "interface `va` does not exist"));
    assert!(ip(&format!("-n {netns} link show t0")), "{}", switch.log());
    let make = format!("-n {netns} link add va type veth peer name v2");
    assert!(ip(&make) && ip(&format!("-n {netns} link set va up")));
    switch.wait_up("a", true);
    switch.shut_down(&dir);
    assert!(ip(&format!("netns del {netns}")));
}

/// A switch with this port.
pub fn run(port: &str) -> Command {
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--port", port]);
    command
}

/// The program fails, and its error has these words.
pub fn fails(command: &mut Command, want: &str) {
    let out = command.output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success() && error.contains(want), "{error}");
}

/// Interfaces that no kind of port can use.
pub fn refuses_bad_interfaces(wires: &Wires, kind: &str) {
    let [a, b] = wires.ports(kind, "");
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[b]);
    let error = switch.ctl(&["add-port", &a.replace("va", "vx")]).stderr;
    let error = String::from_utf8(error).unwrap();
    assert!(error.contains("interface `vx` does not exist: name one of `ip -n"), "{error}");
    fails(&mut run(&format!("x={kind}:lo")), "`lo` is not an Ethernet interface");
    let twice = ["--port", &a, "--port", &a.replace("a=", "b=")];
    fails(pvswitch().arg("run").args(twice), "is already used by port 'a'");
}
