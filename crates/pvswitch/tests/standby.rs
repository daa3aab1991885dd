//! Two uplinks as active and standby: a guest's kernel, the switch, and the kernel of a network
//! whose bridge has two interfaces to the switch. If both carried frames, they would go round.

mod common;
#[path = "common/wires.rs"]
mod wires;

use std::collections::HashMap;
use std::net::UdpSocket;
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Dir, Switch, kill_and_wait, pvswitch, upgrade, wait_for, wait_until_settled};
use serde_json::{Value, json};
use wires::{Wires, connection, ip, transfer, within};

/// MAC addresses of the guest, and of one that sends nothing.
const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 1];
const SILENT: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

/// `a` is the guest, at interface `va` of the host `mid`. `b` is the network: its bridge has `v1`
/// and `v2`, the other ends of the host's `vb` and `vc`.
fn wires() -> Option<Wires> {
    let wires = Wires::new()?;
    add_uplink(&wires, "vc", "v2");
    let b = |args: &str| assert!(ip(&format!("-n {} {args}", wires.b)), "ip {args}");
    b("link add br0 address 02:00:00:00:00:02 type bridge");
    b("addr flush dev v1");
    b("link set v1 address 02:00:00:00:00:12 master br0");
    b("link set v2 master br0");
    b("link set br0 up");
    b("addr add 10.8.0.2/24 dev br0");
    // A guest that never sends.
    assert!(ip(&format!("-n {} link add vs type veth peer name vs1", wires.mid)));
    assert!(ip(&format!("-n {} link set vs up", wires.mid)));
    assert!(ip(&format!("-n {} link set vs1 up", wires.mid)));
    has_ethtool(&wires, "v1").then_some(wires)
}

fn add_uplink(wires: &Wires, ours: &str, theirs: &str) {
    let (mid, b) = (&wires.mid, &wires.b);
    assert!(ip(&format!("-n {mid} link add {ours} type veth peer name {theirs} netns {b}")));
    assert!(ip(&format!("-n {mid} link set {ours} up")));
    assert!(ip(&format!("-n {b} link set {theirs} up")));
    has_ethtool(wires, theirs);
}

/// Leaves no checksum to a veth of the network; AF_XDP computes none.
fn has_ethtool(wires: &Wires, interface: &str) -> bool {
    let off = ["-K", interface, "tx", "off", "txvlan", "off"];
    let done = within(&wires.b, || Command::new("ethtool").args(off).output());
    let has = done.is_ok_and(|out| out.status.success());
    if !has {
        println!("skipped: no ethtool here");
    }
    has
}

fn link(netns: &str, what: &str) {
    assert!(ip(&format!("-n {netns} link set {what}")), "{what}");
}

/// Ports `guest`, `silent`, `up` and its standby `spare`.
fn ports(wires: &Wires, kinds: [&str; 2], options: &str) -> Vec<String> {
    let mid = &wires.mid;
    vec![
        format!("guest=af-packet:va,netns={mid}"),
        format!("silent=af-packet:vs,netns={mid},mac=02:00:00:00:00:77"),
        format!("spare={}:vc,netns={mid},standby-for=up{options}", kinds[1]),
        format!("up={}:vb,netns={mid}", kinds[0]),
    ]
}

fn state(switch: &Switch, port: &str) -> String {
    switch.port("show", port)["state"].as_str().unwrap_or_default().into()
}

/// Waits for the states of `up` and `spare`; prints those on the way, and what was logged.
fn wait_states(switch: &Switch, up: &str, spare: &str) {
    let mut last = [String::new(), String::new()];
    wait_for(&format!("states {up}, {spare}"), || {
        let states = [state(switch, "up"), state(switch, "spare")];
        if states != last {
            println!("{states:?}, not {up}, {spare}: {}", switch.log());
        }
        last = states;
        last == [up, spare]
    });
}

fn failovers(switch: &Switch) -> [Value; 2] {
    ["up", "spare"].map(|port| switch.port("show", port)["standby"]["failovers"].clone())
}

/// Frames that the network gets at one of its interfaces.
struct Arrivals(Arc<OwnedFd>);

impl Arrivals {
    fn at(wires: &Wires, interface: &str) -> Self {
        let sockets = uplink::open_packet(&uplink::PacketOptions {
            name: interface.into(),
            netns: Some(wires.b.clone()),
            queues: NonZeroU16::MIN,
            blocked: false,
        });
        Self(Arc::clone(&sockets.unwrap()[0]))
    }

    /// Waits for reverse ARP of these addresses.
    fn wait_announced(&self, mut macs: Vec<[u8; 6]>) {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let mut bytes = [0; 2048];
        wait_for("announcements", || {
            while let Ok((len, _)) = rustix::net::recv(&self.0, &mut bytes[..], flags) {
                let frame = &bytes[10..len.max(10)];
                if frame.len() >= 60 && frame[12..14] == [0x80, 0x35] {
                    macs.retain(|mac| frame[6..12] != *mac);
                }
            }
            macs.is_empty()
        });
    }
}

fn socket(netns: &str, address: &str) -> UdpSocket {
    let socket = within(netns, || UdpSocket::bind(address).unwrap());
    socket.set_broadcast(true).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    socket
}

/// Broadcasts of the guest and of the network to each other, and how often each arrived.
struct Broadcasts {
    from: UdpSocket,
    to: UdpSocket,
    sent: u32,
    got: HashMap<u32, u32>,
    port: u16,
}

impl Broadcasts {
    fn new(from: &str, from_address: &str, to: &str) -> Self {
        let from = socket(from, &format!("{from_address}:0"));
        let to = socket(to, "0.0.0.0:0");
        let port = to.local_addr().unwrap().port();
        Self { from, to, sent: 0, got: HashMap::new(), port }
    }

    fn send(&mut self) {
        // The interface may be down.
        let _ = self.from.send_to(&self.sent.to_be_bytes(), ("10.8.0.255", self.port));
        self.sent += 1;
    }

    fn receive(&mut self) {
        let mut bytes = [0; 4];
        while let Ok(4) = self.to.recv(&mut bytes) {
            *self.got.entry(u32::from_be_bytes(bytes)).or_default() += 1;
        }
    }

    /// Sends 50, each of which must arrive once.
    fn check(&mut self) {
        let first = self.sent;
        (0..50).for_each(|_| self.send());
        let end = self.sent;
        wait_for("broadcasts", || {
            self.receive();
            (first..end).all(|n| self.got.contains_key(&n))
        });
        // Copies would come with, or right after, later ones.
        for _ in 0..3 {
            self.send();
            self.receive();
        }
        let twice: Vec<_> = self.got.iter().filter(|(_, times)| **times > 1).collect();
        assert!(twice.is_empty(), "received twice: {twice:?}");
    }
}

const KINDS: [[&str; 2]; 3] =
    [["af-packet", "af-packet"], ["af-xdp", "af-xdp"], ["af-xdp", "af-packet"]];

#[test]
fn standby_port_takes_the_place_of_one_without_carrier_and_gives_it_back() {
    for kinds in KINDS {
        let Some(wires) = wires() else { return };
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &ports(&wires, kinds, ",return-after=0"));
        wait_states(&switch, "up", "standby");
        let [at_up, at_spare] = ["v1", "v2"].map(|end| Arrivals::at(&wires, end));
        let (mut client, mut server) = connection(&wires);
        let mut out = Broadcasts::new(&wires.a, "10.8.0.1", &wires.b);
        let mut back = Broadcasts::new(&wires.b, "10.8.0.2", &wires.a);
        let mut pass = || {
            transfer(&mut client, &mut server, 200_000);
            transfer(&mut server, &mut client, 200_000);
            out.check();
            back.check();
        };
        pass();
        assert_eq!(switch.counter("spare", "egress", "frames"), 0);
        assert_eq!(switch.counter("spare", "ingress", "frames"), 0);
        for round in 1..3 {
            link(&wires.b, "v1 down");
            wait_states(&switch, "down", "up");
            assert_eq!(switch.port("show", "up")["last_error"], "the interface has no carrier");
            at_spare.wait_announced(vec![GUEST, SILENT]);
            pass();
            let fdb = switch.json(&["fdb"]);
            let entries = fdb["entries"].as_array().unwrap();
            let port = |mac: &str| &entries.iter().find(|e| e["mac"] == mac).unwrap()["port"];
            assert_eq!(port("02:00:00:00:00:02"), "spare");
            assert_eq!(port("02:00:00:00:00:01"), "guest", "not learned at an uplink");
            link(&wires.b, "v1 up");
            wait_states(&switch, "up", "standby");
            at_up.wait_announced(vec![GUEST, SILENT]);
            pass();
            assert_eq!(failovers(&switch), [round, round], "{kinds:?}");
        }
        let log = switch.log();
        let want = "took over from port 'up': the interface has no carrier";
        assert!(log.contains(want), "{log}");
        let mut client = api::control::Client::connect(switch.control().as_ref()).unwrap();
        let events = client.call(&api::Request::LastEvents).unwrap();
        let events = events["events"].as_array().unwrap().iter();
        let took: Vec<_> = events.filter(|event| event["event"] == "failover").collect();
        assert_eq!(took.len(), 4);
        let want = json!(["spare", "up", "the interface has no carrier", "warning"]);
        let of = ["port", "from", "cause", "severity"].map(|key| &took[0][key]);
        assert_eq!(json!(of), want);
        switch.shut_down(&dir);
    }
}

/// While broadcasts are sent without pause, no frame of the guest leaves by both.
#[test]
fn no_frame_leaves_twice_while_ports_take_each_others_place() {
    for kinds in KINDS {
        let Some(wires) = wires() else { return };
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &ports(&wires, kinds, ",return-after=0"));
        wait_states(&switch, "up", "standby");
        let stop = AtomicBool::new(false);
        let mut out = Broadcasts::new(&wires.a, "10.8.0.1", &wires.b);
        let got = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    out.send();
                    std::thread::sleep(Duration::from_micros(500));
                    if out.sent.is_multiple_of(64) {
                        out.receive();
                    }
                }
                out.receive();
                std::mem::take(&mut out.got)
            });
            for _ in 0..5 {
                link(&wires.b, "v1 down");
                wait_states(&switch, "down", "up");
                link(&wires.b, "v1 up");
                wait_states(&switch, "up", "standby");
            }
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap()
        });
        assert!(!got.is_empty());
        assert!(got.values().all(|times| *times == 1), "{kinds:?}: received twice");
        assert_eq!(failovers(&switch), [5, 5]);
        switch.shut_down(&dir);
    }
}

#[test]
fn interface_that_is_removed_is_replaced_and_preferred_again_when_it_is_made_again() {
    for kinds in KINDS {
        let Some(wires) = wires() else { return };
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &ports(&wires, kinds, ",return-after=1"));
        wait_states(&switch, "up", "standby");
        let (mut client, mut server) = connection(&wires);
        transfer(&mut client, &mut server, 100_000);
        let frames = switch.counter("up", "egress", "frames");
        assert!(ip(&format!("-n {} link del vb", wires.mid)));
        wait_states(&switch, "down", "up");
        assert_eq!(switch.port("show", "up")["last_error"], "the interface was removed");
        transfer(&mut client, &mut server, 100_000);
        add_uplink(&wires, "vb", "v1");
        link(&wires.b, "v1 master br0");
        wait_states(&switch, "up", "standby");
        transfer(&mut server, &mut client, 100_000);
        assert!(switch.counter("up", "egress", "frames") > frames, "counters stay");
        // The standby port is made again, too.
        assert!(ip(&format!("-n {} link del vc", wires.mid)));
        wait_states(&switch, "up", "down");
        add_uplink(&wires, "vc", "v2");
        link(&wires.b, "v2 master br0");
        wait_states(&switch, "up", "standby");
        link(&wires.b, "v1 down");
        wait_states(&switch, "down", "up");
        transfer(&mut server, &mut client, 100_000);
        switch.shut_down(&dir);
    }
}

#[test]
fn pair_whose_ports_are_both_down_is_carried_by_the_first_that_comes_back() {
    for kinds in KINDS {
        let Some(wires) = wires() else { return };
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &ports(&wires, kinds, ",return-after=3600"));
        let (mut client, mut server) = connection(&wires);
        link(&wires.mid, "vc down");
        wait_states(&switch, "up", "down");
        link(&wires.b, "v1 down");
        wait_states(&switch, "down", "down");
        let log = switch.log();
        assert!(log.contains("and so is its standby port 'spare': the interface is down"), "{log}");
        link(&wires.mid, "vc up");
        wait_states(&switch, "down", "up");
        transfer(&mut client, &mut server, 100_000);
        // The preferred one works again, not for long enough; then there is no choice.
        link(&wires.b, "v1 up");
        wait_states(&switch, "standby", "up");
        link(&wires.b, "v2 down");
        wait_states(&switch, "up", "down");
        transfer(&mut client, &mut server, 100_000);
        switch.shut_down(&dir);
    }
}

#[test]
fn pair_is_as_it_was_after_upgrades_and_a_kill() {
    for kinds in KINDS {
        let Some(wires) = wires() else { return };
        let dir = Dir::new();
        let all = ports(&wires, kinds, ",return-after=3600");
        let switch = Switch::start(&dir, &["--keep"], &all);
        let (mut client, mut server) = connection(&wires);
        let mut out = Broadcasts::new(&wires.a, "10.8.0.1", &wires.b);
        let mut next = Vec::new();
        next.push(upgrade(&switch));
        wait_states(&switch, "up", "standby");
        out.check();
        link(&wires.b, "v1 down");
        wait_states(&switch, "down", "up");
        link(&wires.b, "v1 up");
        wait_states(&switch, "standby", "up");
        for _ in 0..2 {
            next.push(upgrade(&switch));
            assert_eq!([state(&switch, "up"), state(&switch, "spare")], ["standby", "up"]);
            assert_eq!(failovers(&switch), [0, 1]);
            transfer(&mut client, &mut server, 100_000);
            out.check();
        }
        wait_until_settled(&switch);
        kill_and_wait(&switch);
        wait_states(&switch, "standby", "up");
        transfer(&mut client, &mut server, 100_000);
        out.check();
        // It still takes the place of the other.
        link(&wires.b, "v2 down");
        wait_states(&switch, "up", "down");
        transfer(&mut client, &mut server, 100_000);
    }
}

#[test]
fn pairs_are_made_and_ended_at_run_time() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let all = ports(&wires, KINDS[0], "");
    let switch = Switch::start(&dir, &[], &all);
    let ctl = |args: &[&str]| {
        let out = switch.ctl(args);
        (
            out.status.success(),
            String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned(),
        )
    };
    wait_states(&switch, "up", "standby");
    let (_, text) = ctl(&["show"]);
    assert!(
        text.contains("standby of port up") && text.contains("port spare is the standby"),
        "{text}"
    );
    let (_, why) = ctl(&["why", "spare", "--seconds", "0"]);
    assert!(why.contains("port up carries the frames of their pair"), "{why}");
    // Refused, and nothing has changed.
    for (change, want) in [
        ("spare standby-for=spare", "cannot be its own standby"),
        ("spare standby-for=u", "no such port"),
        ("up standby-for=spare", "'spare' is itself the standby of 'up'"),
        ("guest standby-for=up", "'up' has a standby port, 'spare'"),
        ("spare return-after=3601", "return-after"),
    ] {
        let args: Vec<_> = std::iter::once("set").chain(change.split(' ')).collect();
        let (done, text) = ctl(&args);
        assert!(!done && text.contains(want), "{change}: {text}");
    }
    let (done, text) = ctl(&["add-port", "x=null,standby-for=up"]);
    assert!(!done && text.contains("standby-for"), "{text}");
    assert_eq!([state(&switch, "up"), state(&switch, "spare")], ["up", "standby"]);
    // A static address of the pair leads to the one that carries.
    assert!(ctl(&["fdb", "add", "02:00:00:00:00:55", "up"]).0);
    let port_of = |mac: &str| {
        let fdb = switch.json(&["fdb"]);
        let entry = fdb["entries"].as_array().unwrap().iter().find(|e| e["mac"] == mac).cloned();
        entry.unwrap_or_default()["port"].clone()
    };
    link(&wires.b, "v1 down");
    wait_states(&switch, "down", "up");
    wait_for("the static address", || port_of("02:00:00:00:00:55") == "spare");
    assert_eq!(
        switch.port("show", "spare")["standby"],
        json!({ "other": "up", "preferred": false, "carries": true, "failovers": 1 })
    );
    // The preferred port is removed: the other is a port of its own, and saved as such.
    assert!(ctl(&["del-port", "up"]).0);
    wait_for("a port of its own", || switch.port("show", "spare")["standby"] == Value::Null);
    assert_eq!(state(&switch, "spare"), "up");
    assert!(ctl(&["save", &dir.text("saved")]).0);
    let saved = std::fs::read_to_string(dir.path("saved")).unwrap();
    assert!(saved.contains("[port.spare]") && !saved.contains("standby-for"), "{saved}");
    // The former one comes back as its standby.
    link(&wires.b, "v1 up");
    let again = all[3].clone() + ",standby-for=spare";
    assert!(ctl(&["add-port", &again]).0);
    wait_states(&switch, "standby", "up");
    assert!(ctl(&["set", "up", "standby-for=none"]).0);
    link(&wires.b, "v2 nomaster");
    wait_states(&switch, "up", "up");
    assert!(ctl(&["set", "up", "standby-for=spare"]).0);
    wait_states(&switch, "standby", "up");
    assert!(ctl(&["del-port", "spare"]).0);
    wait_for("a port of its own", || state(&switch, "up") == "up");
    switch.shut_down(&dir);
}

#[test]
fn reload_makes_changes_and_ends_pairs() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let mid = &wires.mid;
    let write = |spare: &str, up: &str| {
        let text = format!(
            "control = \"{}\"\n[port.up]\nkind = \"af-packet\"\ninterface = \"vb\"\nnetns = \
             \"{mid}\"\n{up}\n[port.spare]\nkind = \"af-packet\"\ninterface = \"vc\"\nnetns = \
             \"{mid}\"\n{spare}\n",
            dir.text("ctl")
        );
        std::fs::write(dir.path("file.toml"), text).unwrap();
    };
    let pair = "standby-for = \"up\"\nreturn-after = 0";
    write(pair, "");
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--config", &dir.text("file.toml")]);
    let switch = Switch::spawn(&dir, command);
    wait_states(&switch, "up", "standby");
    // The preferred port is replaced while the other carries frames, and takes over from it.
    link(&wires.b, "v1 down");
    wait_states(&switch, "down", "up");
    write(pair, "queues = 2");
    let report = switch.json(&["reload"]);
    assert_eq!(report["replaced"][0]["name"], "up", "{report}");
    link(&wires.b, "v1 up");
    wait_states(&switch, "up", "standby");
    write("standby-for = \"u\"", "queues = 2");
    let out = switch.ctl(&["reload"]);
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(error.contains("spare") && error.contains("no such port"), "{error}");
    link(&wires.b, "v2 nomaster");
    write("", "queues = 2");
    let report = switch.json(&["reload"]);
    assert_eq!(report["changed"][0]["name"], "spare", "{report}");
    wait_states(&switch, "up", "up");
    write(pair, "queues = 2");
    switch.json(&["reload"]);
    wait_states(&switch, "up", "standby");
    switch.shut_down(&dir);
}
