//! `--evpn` with a bridge and a VXLAN interface of this kernel, without FRR: `bridge` writes the
//! entries that zebra makes of other hosts' routes.

mod common;

use std::fs::File;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Dir, Gen, Process, Switch, kill_and_wait, may_make_taps, pvswitch, upgrade};
use common::{wait_for, wait_until_settled};
use serde_json::Value;

/// In `mac=` of port `a`.
const OWN: &str = "02:00:00:00:00:0a";
/// Of another host, at first.
const OTHER: &str = "02:00:00:00:00:0b";
const MARK: &str = "02:00:00:00:00:ee";
const VTEP: &str = "10.9.0.2";
/// What zebra sets of a route.
const FDB: [&str; 2] = ["dev vx10 dst 10.9.0.2 self", "dev vx10 master"];

/// A host: a namespace with a bridge and its VXLAN interface.
struct Host {
    netns: String,
    dir: Dir,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.netns]).status();
    }
}

fn run(program: &str, args: &str) -> Result<String, String> {
    let out = Command::new(program).args(args.split(' ')).output();
    let out = out.map_err(|error| format!("{program}: {error}"))?;
    let error = String::from_utf8_lossy(&out.stderr);
    let error = || format!("{program} {args}: {error}");
    if out.status.success() { Ok(String::from_utf8(out.stdout).unwrap()) } else { Err(error()) }
}

impl Host {
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        if !may_make_taps() {
            return None;
        }
        let host = Self { netns: format!("pvs-evpn-{}-{n}", std::process::id()), dir: Dir::new() };
        let made = run("ip", &format!("netns add {}", host.netns)).and_then(|_| {
            host.ip("link add br10 type bridge")?;
            host.ip("link set br10 up")?;
            host.ip("link add vx10 type vxlan id 10 dstport 4789 local 10.9.0.1 nolearning")?;
            host.ip("link set vx10 mtu 1500 master br10 up")
        });
        if let Err(error) = made {
            println!("skipped: {error}");
            return None;
        }
        Some(host)
    }

    fn ip(&self, args: &str) -> Result<String, String> {
        run("ip", &format!("-n {} {args}", self.netns))
    }

    fn bridge(&self, args: &str) -> String {
        run("bridge", &format!("-n {} {args}", self.netns)).unwrap()
    }

    /// Port of the bridge, and whether FRR is to announce it.
    fn entry(&self, mac: &str) -> Option<(String, bool)> {
        let shown = self.bridge("fdb show br br10");
        let lines = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let mut lines = lines.filter(|line| line[0] == mac && line.contains(&"master"));
        lines.next().map(|line| (line[2].to_string(), line.contains(&"static")))
    }

    fn is_announced(&self, mac: &str) -> bool {
        self.entry(mac) == Some(("tap-br10".into(), true))
    }

    fn switch(&self, args: &[&str]) -> Switch {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns]).arg(pvswitch().get_program());
        command.args(["run", "--quiet", "--control", &self.dir.text("ctl"), "--evpn", "br10"]);
        for port in [self.dir.port("a", &format!(",mac={OWN}")), self.dir.port("b", "")] {
            command.args(["--port", &port]);
        }
        command.args(args).stdout(Stdio::null());
        Switch::spawn(&self.dir, command)
    }

    fn guest(&self, port: &str, args: &[&str]) -> Gen {
        Gen::start(&self.dir.path(port), args)
    }

    /// Other hosts' routes come, or go.
    fn route(&self, mac: &str, is_there: bool) {
        for at in FDB {
            let words = match is_there {
                true => format!("fdb replace {mac} {at} extern_learn"),
                false => format!("fdb del {mac} {at}"),
            };
            self.bridge(&words);
        }
    }
}

/// Where the switch says that an address is: port, state, host.
fn places(switch: &Switch, mac: &str) -> Vec<[String; 3]> {
    let fdb = switch.json(&["fdb"]);
    let entries = fdb["entries"].as_array().unwrap().iter().filter(|entry| entry["mac"] == mac);
    let text = |value: &Value| value.as_str().unwrap_or("").to_string();
    entries.map(|entry| ["port", "evpn", "vtep"].map(|key| text(&entry[key]))).collect()
}

fn is_remote(switch: &Switch) -> bool {
    places(switch, OTHER) == [["br10", "remote", VTEP].map(String::from)]
}

/// Changes of the bridge's entries, as FRR is notified of them.
struct Monitor<'a> {
    host: &'a Host,
    _bridge: Process,
    marks: usize,
}

impl<'a> Monitor<'a> {
    fn start(host: &'a Host) -> Self {
        let file = File::create(host.dir.path("monitor")).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &host.netns, "bridge", "monitor", "fdb"]);
        let bridge = Process(command.stdout(file).spawn().unwrap());
        let mut monitor = Self { host, _bridge: bridge, marks: 0 };
        monitor.mark();
        monitor
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.host.dir.path("monitor")).unwrap()
    }

    /// Waits until it has read all changes up to now.
    fn mark(&mut self) {
        let count = |text: String| text.lines().filter(|line| line.contains(MARK)).count();
        wait_for("the monitor", || {
            self.host.bridge(&format!("fdb replace {MARK} dev vx10 master static"));
            self.host.bridge(&format!("fdb del {MARK} dev vx10 master"));
            count(self.text()) > self.marks
        });
        self.marks = count(self.text());
    }

    /// Whether an address was withdrawn since the start.
    fn withdrawn(&mut self, mac: &str) -> bool {
        // The last mark may be one of before.
        (0..2).for_each(|_| self.mark());
        self.text().lines().any(|line| line.starts_with("Deleted") && line.contains(mac))
    }
}

#[test]
fn addresses_follow_guests_between_this_host_and_others() {
    let Some(host) = Host::new() else { return };
    let switch = host.switch(&[]);
    assert_eq!(host.entry(OWN), None, "its port is down");
    let sink = host.guest("a", &["--mode", "sink", "--mac", OWN]);
    wait_for("mac= of a port that is up", || host.is_announced(OWN));
    wait_for("the switch to know it", || places(&switch, OWN)[0][1] == "announced");
    // A guest of another host: frames for it leave by the bridge.
    host.route(OTHER, true);
    wait_for("the other host's address", || is_remote(&switch));
    let to = |peer, mac| ["--mac", mac, "--peer", peer, "--rate", "1000"];
    let sender = host.guest("b", &to(OTHER, "02:00:00:00:00:0c"));
    wait_for("frames to it", || switch.counter("br10", "egress", "frames") > 100);
    wait_for("a learned address", || host.is_announced("02:00:00:00:00:0c"));
    drop(sender.end());
    switch.wait_up("b", false);
    wait_for("its withdrawal", || host.entry("02:00:00:00:00:0c").is_none());
    // It moves here: its first frame takes it over from the other host's route.
    let moved = host.guest("b", &to(OWN, OTHER));
    wait_for("its announcement", || host.is_announced(OTHER));
    assert_eq!(places(&switch, OTHER), [["b", "announced", ""].map(String::from)]);
    wait_for("frames of it", || switch.counter("a", "egress", "frames") > 100);
    // And leaves: the other host has heard it later.
    drop(moved.end());
    switch.wait_up("b", false);
    host.route(OTHER, true);
    wait_for("the other host's address again", || is_remote(&switch));
    host.route(OTHER, false);
    wait_for("the end of its route", || places(&switch, OTHER).is_empty());
    assert!(host.is_announced(OWN));
    assert!(switch.ctl(&["shutdown"]).status.success());
    wait_for("the withdrawal of all", || host.entry(OWN).is_none());
    drop(sink);
}

/// FRR withdraws a route when the kernel deletes its entry, and other hosts lose the guest.
#[test]
fn kill_of_a_kept_switch_and_an_upgrade_withdraw_nothing() {
    let Some(host) = Host::new() else { return };
    let switch = host.switch(&["--keep"]);
    let _sink = host.guest("a", &["--mode", "sink", "--mac", OWN]);
    let _sender = host.guest("b", &["--mac", "02:00:00:00:00:0c", "--peer", OWN, "--rate", "1000"]);
    host.route(OTHER, true);
    let all = |switch: &Switch| {
        host.is_announced(OWN) && host.is_announced("02:00:00:00:00:0c") && is_remote(switch)
    };
    wait_for("all addresses", || all(&switch));
    let mut monitor = Monitor::start(&host);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    // The next process has read the bridge when it says so.
    let announced = |mac| places(&switch, mac).iter().any(|place| place[1] == "announced");
    let again = || is_remote(&switch) && announced(OWN) && announced("02:00:00:00:00:0c");
    wait_for("all addresses at the next process", again);
    assert!(all(&switch));
    let next = upgrade(&switch);
    wait_for("all addresses after the upgrade", again);
    for mac in [OWN, "02:00:00:00:00:0c", OTHER] {
        assert!(!monitor.withdrawn(mac), "{mac}: {}", monitor.text());
    }
    switch.check_connected_once(&["a", "b"]);
    assert!(switch.ctl(&["shutdown"]).status.success());
    wait_for("the withdrawal of all", || host.entry(OWN).is_none());
    assert!(monitor.withdrawn(OWN), "the monitor sees withdrawals");
    drop(next);
}
