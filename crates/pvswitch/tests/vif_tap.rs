//! `tap=vif` without Xen: a vif's interface in one network namespace, and the guest's in another.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Dir, Gen, Process, Switch, kill_and_wait, pvswitch, upgrade, wait_for};
use common::{may_make_taps, wait_until_settled};
use serde_json::Value;

/// The only vif of a directory, and its TAP's port.
const IFNAME: &str = "vif1.0";
const TAP: &str = "vif1.0-tap";

/// Namespaces of the switch's host and of a guest.
struct Place {
    host: String,
    guest: String,
    dir: Dir,
}

fn ip(args: &str) -> String {
    let out = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(out.status.success(), "ip {args}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

impl Place {
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("pvs-vif-{}-{n}-{end}", std::process::id());
        let place = Self { host: name("host"), guest: name("guest"), dir: Dir::new() };
        if !may_make_taps() {
            return None;
        }
        for netns in [&place.host, &place.guest] {
            ip(&format!("netns add {netns}"));
        }
        Some(place)
    }

    fn host(&self, args: &str) -> String {
        ip(&format!("-n {} {args}", self.host))
    }

    /// The switch in the host's namespace, with port `g` and others.
    fn switch(&self, args: &[&str], ports: &[String]) -> Switch {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host]).arg(pvswitch().get_program());
        command.args(["run", "--quiet", "--control", &self.dir.text("ctl")]).args(args);
        let own = format!("g=xen-local:{},tap=vif,queues=2", self.dir.text("g"));
        command.args(["--port", &own]).args(ports.iter().flat_map(|p| ["--port", p]));
        Switch::spawn(&self.dir, {
            command.stdout(Stdio::null());
            command
        })
    }

    /// A guest at port `g`: its kernel's network stack behind our front half.
    fn start_guest(&self) -> Process {
        let connect = format!("xen-local:{}", self.dir.text("g"));
        // That of an earlier guest goes after its process.
        let links = || ip(&format!("-n {} -o link", self.guest));
        wait_for("no interface of another guest", || !links().contains("eth0"));
        let mut nic = pvswitch();
        nic.args(["nic", "--connect", &connect, "--tap", "eth0", "--netns", &self.guest]);
        let process = Process(nic.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        wait_for("the guest's interface", || links().contains("eth0"));
        ip(&format!("-n {} addr add 10.9.0.2/24 dev eth0", self.guest));
        ip(&format!("-n {} link set eth0 up", self.guest));
        process
    }

    /// What a toolstack's script for routes does.
    fn set_up(&self) {
        self.host(&format!("addr add 10.9.0.1/24 dev {IFNAME}"));
        self.host(&format!("link set {IFNAME} up"));
    }

    fn link(&self) -> String {
        self.host("-d -o link show")
    }

    /// The interface's index, and whether it has a carrier.
    fn index_and_carrier(&self) -> (String, bool) {
        let link = self.link();
        let line = link.lines().find(|line| line.contains(&format!(" {IFNAME}: "))).unwrap();
        let index = line.split(':').next().unwrap().to_string();
        (index, !line.contains("NO-CARRIER"))
    }

    fn wait_carrier(&self, on: bool) {
        wait_for(&format!("carrier {on}"), || self.index_and_carrier().1 == on);
    }

    /// A TCP connection from the host to the guest.
    fn connection(&self) -> [TcpStream; 2] {
        let within = |netns: &str, work: &(dyn Fn() -> TcpStream + Sync)| {
            uplink::in_netns(netns, work).unwrap()
        };
        let listen = || TcpListener::bind("10.9.0.2:0").unwrap();
        let listener = uplink::in_netns(&self.guest, listen).unwrap();
        let to = listener.local_addr().unwrap();
        let client = within(&self.host, &|| TcpStream::connect(to).unwrap());
        let ends = [client, listener.accept().unwrap().0];
        for end in &ends {
            end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        ends
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for netns in [&self.host, &self.guest] {
            let _ = Command::new("ip").args(["netns", "del", netns]).output();
        }
    }
}

/// Sends `len` bytes from one end to the other, which must get them unchanged.
fn transfer(from: &mut TcpStream, to: &mut TcpStream, len: usize) {
    let sent: Vec<u8> =
        (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut got = vec![0; len];
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(&sent).unwrap());
        to.read_exact(&mut got).unwrap();
    });
    assert!(sent == got, "bytes differ");
}

/// Sum of a counter over all queues of a port.
fn sum(switch: &Switch, port: &str, way: &str, counter: &str) -> u64 {
    let stats = switch.port("stats", port);
    let queues = stats[way].as_array().unwrap().iter();
    queues.map(|queue| queue[counter].as_u64().unwrap()).sum()
}

fn error_of(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert!(!out.status.success(), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn vif_has_an_interface_as_from_xen_netback_and_large_frames_pass_whole() {
    let Some(place) = Place::new() else { return };
    let switch = place.switch(&["--workers", "2"], &[]);
    // As scripts expect it: down, without carrier, with the address that no bridge takes.
    let link = place.link();
    assert!(link.contains("fe:ff:ff:ff:ff:ff") && link.contains("state DOWN"), "{link}");
    assert_eq!(switch.port("show", "g")["wired_to"], TAP);
    assert_eq!(switch.port("show", TAP)["wired_to"], "g");
    place.set_up();
    place.wait_carrier(false);
    let guest = place.start_guest();
    switch.wait_up("g", true);
    place.wait_carrier(true);
    let [mut client, mut server] = place.connection();
    let len = 8 << 20;
    transfer(&mut client, &mut server, len);
    transfer(&mut server, &mut client, len);
    for (port, other) in [("g", TAP), (TAP, "g")] {
        let (frames, bytes) =
            (sum(&switch, port, "ingress", "frames"), sum(&switch, port, "ingress", "bytes"));
        // Acknowledgements included, longer than a frame of the wire.
        assert!(bytes > len as u64 && bytes / frames > 2000, "{port}: {bytes} in {frames}");
        assert_eq!(sum(&switch, other, "egress", "segmented"), 0, "{port}");
        assert_eq!(sum(&switch, other, "egress", "checksummed"), 0, "{port}");
        assert_eq!(switch.port("show", port)["addresses"], 0, "{port}: no address is learned");
    }
    // A guest that goes: the link is down, and the interface stays with the vif.
    let (index, _) = place.index_and_carrier();
    drop(guest);
    place.wait_carrier(false);
    let _guest = place.start_guest();
    place.wait_carrier(true);
    assert_eq!(place.index_and_carrier().0, index);
    place.connection();
    let why = switch.json(&["why", "g"]);
    assert!(!why.to_string().contains("blocked"), "{why}");
    assert!(error_of(&switch, &["del-port", TAP]).contains("is the interface of port 'g'"));
    let added = error_of(&switch, &["fdb", "add", "02:00:00:00:00:09", "g"]);
    assert!(added.contains("port 'g' is wired to another"), "{added}");
    assert!(switch.ctl(&["del-port", "g"]).status.success());
    wait_for("the interface to be removed", || !place.link().contains(IFNAME));
    assert_eq!(switch.port("show", TAP), Value::Null);
}

#[test]
fn wired_ports_are_apart_from_the_switch() {
    let Some(place) = Place::new() else { return };
    let ports = [place.dir.port("a", ""), place.dir.port("b", "")];
    let switch = place.switch(&[], &ports);
    place.set_up();
    let _guest = place.start_guest();
    switch.wait_up("g", true);
    place.wait_carrier(true);
    place.connection();
    let before = sum(&switch, TAP, "egress", "frames");
    // Floods of others do not come to them, nor theirs to others.
    let _sink = Gen::start(&place.dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let args = ["--peer", "02:00:00:00:00:99", "--rate", "5k", "--frames", "200"];
    Gen::start(&place.dir.path("a"), &args).report();
    wait_for("floods", || sum(&switch, "b", "egress", "frames") == 200);
    assert!(sum(&switch, "g", "egress", "frames") < 200);
    assert!(sum(&switch, TAP, "egress", "frames") < before + 200);
    let show = switch.ctl(&["show"]);
    let show = String::from_utf8_lossy(&show.stdout).into_owned();
    assert!(show.contains("wired to g: they exchange all frames"), "{show}");
}

#[test]
fn vif_waits_for_a_name_that_is_taken_and_others_continue() {
    let Some(place) = Place::new() else { return };
    place.host(&format!("link add {IFNAME} type bridge"));
    let switch = place.switch(&[], &[place.dir.port("a", ""), place.dir.port("b", "")]);
    let error = || switch.port("show", "g")["xen"]["error"].as_str().map(String::from);
    let others = common::Bystanders::start(&switch, &place.dir, "a", "b");
    let connect = format!("xen-local:{}", place.dir.text("g"));
    let sink = Gen::connect(&connect, &["--mode", "sink"]);
    wait_for("the reason", || error().is_some_and(|e| e.contains("`vif1.0` exists already")));
    let log = switch.log();
    assert!(log.contains("vif 1/0 waits for its interface") && log.contains("ip link del vif1.0"));
    others.wait_for_replies(&switch);
    assert!(!switch.is_up("g"));
    place.host(&format!("link del {IFNAME}"));
    switch.wait_up("g", true);
    assert!(place.link().contains("fe:ff:ff:ff:ff:ff"));
    assert_eq!(error(), None);
    assert_eq!(switch.log().matches("waits for its interface").count(), 1, "{}", switch.log());
    sink.end();
    others.end();
}

#[test]
fn interface_that_is_removed_takes_its_port_down_alone() {
    let Some(place) = Place::new() else { return };
    let switch = place.switch(&[], &[]);
    place.set_up();
    let _guest = place.start_guest();
    switch.wait_up("g", true);
    place.host(&format!("link del {IFNAME}"));
    switch.wait_up(TAP, false);
    assert!(switch.log().contains("detach and attach its vif"), "{}", switch.log());
    assert!(switch.is_up("g"));
    let why = switch.json(&["why", "g"]);
    assert!(why.to_string().contains("its partner vif1.0-tap is down"), "{why}");
}

/// The same interface, with what scripts did to it, before and after; a connection continues.
fn continues(args: &[&str], replace: impl Fn(&Switch) -> Option<common::Successor>) {
    let Some(place) = Place::new() else { return };
    let switch = place.switch(args, &[]);
    place.set_up();
    let _guest = place.start_guest();
    switch.wait_up("g", true);
    place.wait_carrier(true);
    let [mut client, mut server] = place.connection();
    let before = place.index_and_carrier();
    let mut living = Vec::new();
    for round in 0..2 {
        transfer(&mut client, &mut server, 1 << 20);
        if !args.is_empty() {
            wait_until_settled(&switch);
        }
        living.extend(replace(&switch));
        assert_eq!(place.index_and_carrier(), before, "round {round}: {}", switch.log());
        for (port, other) in [("g", TAP), (TAP, "g")] {
            let show = switch.port("show", port);
            assert_eq!((&show["wired_to"], &show["up"]), (&other.into(), &true.into()), "{show}");
        }
        transfer(&mut server, &mut client, 1 << 20);
    }
    assert!(!switch.log().contains("is set up again"), "{}", switch.log());
    assert!(!switch.log().contains("its interface is new"), "{}", switch.log());
    assert!(switch.ctl(&["del-port", "g"]).status.success());
    wait_for("the interface to be removed", || !place.link().contains(IFNAME));
}

#[test]
fn interface_and_connections_stay_over_upgrades() {
    continues(&[], |switch| Some(upgrade(switch)));
}

#[test]
fn interface_and_connections_stay_when_a_kept_switch_is_killed() {
    continues(&["--keep"], |switch| {
        kill_and_wait(switch);
        None
    });
}
