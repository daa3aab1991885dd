//! The mirror with the bridge of this kernel, in a network namespace; `bridge` takes FRR's place.

mod common;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use common::Netns;
use switch::fdb::{Mac, PortId};
use switch::tenant::Vlan;
use uplink::evpn::{Action, Address, Evpn, Local, Member, State};

const PORT: PortId = PortId(7);
const LIMIT: Duration = Duration::from_secs(20);

/// A bridge with a VXLAN interface, a TAP outside it, and a mirror.
struct World {
    netns: Netns,
    _tap: uplink::Tap,
    evpn: Evpn,
    actions: Vec<Action>,
}

fn address(n: u16) -> Address {
    let [high, low] = n.to_be_bytes();
    Address { mac: Mac([2, 0, 0, 0, high, low]), vlan: 0 }
}

fn locals(all: impl IntoIterator<Item = u16>) -> Vec<(Address, Local)> {
    let local = Local { port: PORT, learned: true, starts: 0 };
    all.into_iter().map(|n| (address(n), local)).collect()
}

impl World {
    fn new() -> Option<Self> {
        let netns = Netns::new()?;
        let tap = netns.tap(1, 1);
        netns.ip("link set t0 mtu 1450");
        netns.ip("link add br0 type bridge");
        netns.ip("link set br0 up");
        netns.ip("link add vx10 type vxlan id 10 dstport 4789 local 10.9.0.1 nolearning");
        netns.ip("link set vx10 master br0 up");
        let mut evpn = Evpn::open(Some(&netns.0), Instant::now()).unwrap();
        let vlan = Vlan::Transparent;
        evpn.set_members(vec![Member { interface: "t0".into(), bridge: "br0".into(), vlan }]);
        Some(Self { netns, _tap: tap, evpn, actions: Vec::new() })
    }

    fn bridge(&self, args: &str) -> String {
        let mut command = Command::new("bridge");
        command.args(["-n", &self.netns.0]).args(args.split(' '));
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "bridge {args}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Entries of the bridge on an interface that have a word.
    fn entries(&self, interface: &str, word: &str) -> usize {
        let shown = self.bridge(&format!("fdb show br br0 brport {interface}"));
        let lines = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let is_one = |line: &Vec<&str>| line.contains(&"master") && line.contains(&word);
        lines.filter(|line| line[0].starts_with("02:00:00:00") && is_one(line)).count()
    }

    /// Runs the mirror until a condition holds.
    fn until(&mut self, what: &str, mut is_met: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + LIMIT;
        loop {
            let (actions, more) = self.evpn.run(Instant::now(), |_| Ok(()));
            self.actions.extend(actions);
            // A condition may start a process: not once for each of thousands of messages.
            if !more && is_met(self) {
                return;
            }
            assert!(Instant::now() < end, "{what}: {:?}", self.evpn.status("t0", Instant::now()));
            if more {
                continue;
            }
            let due = self.evpn.due().unwrap_or(end).min(end);
            let wait = due.saturating_duration_since(Instant::now());
            os::wait_readable(self.evpn.as_fd(), wait).unwrap();
        }
    }

    fn state(&self, n: u16) -> Option<State> {
        let mut claims = self.evpn.claims(Instant::now());
        claims.find(|(of, _, _)| *of == address(n)).map(|(_, _, state)| state)
    }
}

#[test]
fn addresses_are_static_entries_of_the_tap_which_yield_to_other_hosts() {
    let Some(mut world) = World::new() else { return };
    world.evpn.set_locals(locals([1, 2]));
    world.until("announced", |world| world.state(1) == Some(State::Announced));
    assert_eq!(world.entries("t0", "static"), 2, "the TAP is in the bridge");
    let port = world.bridge("-d link show dev t0");
    assert!(port.contains("learning off"), "{port}");
    let status = world.evpn.status("t0", Instant::now()).unwrap();
    assert_eq!((status.vnis, status.states["announced"]), (vec![10], 2));
    // As FRR does when it has a route to it.
    let mac = address(1).mac;
    world.bridge(&format!("fdb replace {mac} dev vx10 dst 10.9.0.2 self extern_learn"));
    world.bridge(&format!("fdb replace {mac} dev vx10 master extern_learn"));
    world.until("yielded", |world| !world.actions.is_empty());
    assert_eq!(world.actions, [Action::Forget(address(1), PORT)]);
    assert_eq!(world.entries("vx10", "extern_learn"), 1);
    let found: Vec<_> =
        world.evpn.remotes().map(|(of, r)| (of.to_string(), r.address, r.vtep)).collect();
    let vtep = Some(IpAddr::from([10, 9, 0, 2]));
    assert_eq!(found, [("t0".to_string(), address(1), vtep)]);
    // It is heard here again: the kernel keeps the flag of FRR's entry.
    world.evpn.set_locals(locals([1, 2]));
    world.until("announced again", |world| world.state(1) == Some(State::Announced));
    assert_eq!((world.entries("t0", "static"), world.entries("vx10", "extern_learn")), (2, 0));
    assert_eq!(world.evpn.remotes().count(), 0);
    world.evpn.set_locals(locals([2]));
    world.until("withdrawn", |world| world.entries("t0", "static") == 1);
    world.evpn.set_members(Vec::new());
    world.until("the end", |world| world.evpn.has_left());
    assert_eq!(world.entries("t0", "static"), 0);
}

/// More messages than a socket holds: the kernel drops some, and all is read again.
#[test]
fn an_overrun_is_a_new_dump() {
    const MANY: u16 = 1024;
    let Some(mut world) = World::new() else { return };
    world.evpn.set_locals(locals(0..MANY));
    let announced = |world: &mut World| {
        world.evpn.status("t0", Instant::now()).unwrap().states.get("announced") == Some(&1024)
    };
    world.until("announced", announced);
    assert_eq!(world.entries("t0", "static"), usize::from(MANY));
    // Nothing is read meanwhile: all are deleted and put again, several times.
    let mut lines = String::new();
    for n in 0..MANY {
        let entry = format!("{} dev t0 master", address(n).mac);
        lines += &format!("fdb del {entry}\nfdb replace {entry} static\n");
    }
    let file = std::env::temp_dir().join(format!("pvswitch-evpn-{}", std::process::id()));
    std::fs::write(&file, lines.repeat(8)).unwrap();
    world.bridge(&format!("-b {}", file.display()));
    std::fs::remove_file(&file).unwrap();
    let sockets = world.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/netlink"));
    let drops = |line: &str| line.split_whitespace().nth(8).map_or(0, |n| n.parse().unwrap_or(0));
    let dropped: u64 = sockets.unwrap().lines().skip(1).map(drops).sum();
    assert!(dropped > 0, "the socket is full");
    world.bridge(&format!("fdb del {} dev t0 master", address(5).mac));
    world.until("all entries again", |world| world.entries("t0", "static") == usize::from(MANY));
    world.until("announced", announced);
    world.until("rest", |world| world.evpn.due().is_none_or(|due| due > Instant::now()));
}
