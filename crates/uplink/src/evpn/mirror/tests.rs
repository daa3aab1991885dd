//! The mirror against a model of the kernel's bridge and of FRR.

mod fabric;

use std::collections::VecDeque;

use proptest::prelude::*;
use switch::tenant::{Vids, Vlan};

use super::*;
use crate::evpn::State;
use crate::evpn::links::Link;

const BRIDGE: u32 = 10;
const TAP: u32 = 11;
const VXLAN: u32 = 12;
const UNDERLAY: u32 = 13;
const PORT: PortId = PortId(3);
const STATIC: Entry = Entry { is_static: true, is_extern: false };
const EXTERN: Entry = Entry { is_static: false, is_extern: true };
const LEARNED: Entry = Entry { is_static: false, is_extern: false };

fn address(n: u8) -> Address {
    Address { mac: Mac([2, 0, 0, 0, 0, n]), vlan: 0 }
}

fn key(n: u8) -> Key {
    Key { mac: address(n).mac, vid: 0 }
}

fn link(index: u32, name: &str, kind: Kind, master: Option<u32>) -> Link {
    Link { index, name: name.into(), master, mtu: 1450, up: true, learns: Some(false), kind }
}

fn vxlan() -> Link {
    let kind = Kind::Vxlan { vni: 10, underlay: Some(UNDERLAY), local: None, learns: false };
    link(VXLAN, "vx10", kind, Some(BRIDGE))
}

/// The bridge of a kernel, and what it has to tell.
struct Kernel {
    links: Vec<Link>,
    entries: BTreeMap<Key, (u32, Entry)>,
    /// With the numbers of the requests that they answer.
    queue: VecDeque<(u32, Heard)>,
    /// An error for each Put.
    refuses: i32,
    /// How many times each address was put on the TAP since another host had it.
    puts: BTreeMap<Key, u32>,
    /// VLANs that the TAP has left.
    absent: BTreeSet<u16>,
    requests: usize,
}

impl Kernel {
    fn new() -> Self {
        let mut underlay = link(UNDERLAY, "eth0", Kind::Other, None);
        underlay.mtu = 1500;
        let mut tap = link(TAP, "tap0", Kind::Other, Some(BRIDGE));
        tap.learns = Some(true);
        let bridge = link(BRIDGE, "br10", Kind::Bridge { is_aware: false, pvid: 1 }, None);
        Self {
            links: vec![bridge, tap, vxlan(), underlay],
            entries: BTreeMap::new(),
            queue: VecDeque::new(),
            refuses: 0,
            puts: BTreeMap::new(),
            absent: BTreeSet::new(),
            requests: 0,
        }
    }

    fn event(&mut self, heard: Heard) {
        self.queue.push_back((0, heard));
    }

    /// Queues the last event as if a dump had been made before it, and was queued after it.
    fn overtake(&mut self) {
        let is_part =
            |(seq, heard): &(u32, Heard)| *seq != 0 && matches!(heard, Heard::Entry { .. });
        if let Some(part) = self.queue.iter().position(is_part)
            && let Some(event) = self.queue.pop_back()
        {
            self.queue.insert(part, event);
        }
    }

    fn put(&mut self, link: u32, key: Key, mut entry: Entry) {
        // The flag stays.
        entry.is_extern |= self.entries.get(&key).is_some_and(|(_, entry)| entry.is_extern);
        if self.entries.insert(key, (link, entry)) != Some((link, entry)) {
            self.event(Heard::Entry { link, key, entry });
        }
    }

    fn delete(&mut self, link: u32, key: Key) -> i32 {
        if self.entries.get(&key).is_none_or(|(at, _)| *at != link) {
            return libc::ENOENT;
        }
        self.entries.remove(&key);
        self.event(Heard::EntryGone { link, key });
        0
    }

    fn run(&mut self, seq: u32, request: &Request) {
        self.requests += 1;
        let error = match request {
            Request::Dump(dump) => {
                match dump {
                    Dump::Links => {
                        let all = self.links.iter().cloned();
                        self.queue.extend(all.map(|link| (seq, Heard::Link(link))));
                    }
                    Dump::Addresses => {}
                    Dump::Entries => {
                        let all = self.entries.iter();
                        self.queue.extend(all.map(|(key, (link, entry))| {
                            (seq, Heard::Entry { link: *link, key: *key, entry: *entry })
                        }));
                    }
                }
                self.queue.push_back((seq, Heard::Done { interrupted: false }));
                return;
            }
            Request::Put { .. } if self.refuses != 0 => self.refuses,
            Request::Put { link, key, fixed } => {
                let before = self.entries.get(key).copied();
                if before.is_none_or(|(at, _)| at != *link) {
                    *self.puts.entry(*key).or_default() += 1;
                }
                self.put(*link, *key, if *fixed { STATIC } else { LEARNED });
                0
            }
            Request::Delete { link, key } => {
                assert_eq!(*link, TAP, "only entries of the TAP are ours");
                if self.absent.contains(&key.vid) { libc::EINVAL } else { self.delete(*link, *key) }
            }
            Request::StopLearning { link } => {
                assert_eq!(*link, TAP, "settings of other interfaces are the operator's");
                self.links
                    .iter_mut()
                    .filter(|l| l.index == TAP)
                    .for_each(|l| l.learns = Some(false));
                self.event(Heard::Port(TAP));
                0
            }
            Request::AddVlans { vlans, .. } => {
                self.absent.retain(|vid| vlans.untagged != Some(*vid));
                0
            }
            Request::DeleteVlans { vlans, .. } => {
                self.absent.extend(vlans.untagged);
                0
            }
            Request::Join { .. } => 0,
        };
        self.queue.push_back((seq, Heard::Reply { error }));
    }

    fn on_tap(&self, n: u8) -> bool {
        self.entries.get(&key(n)).is_some_and(|(link, entry)| *link == TAP && entry.is_static)
    }

    fn is_remote(&self, n: u8) -> bool {
        self.entries.get(&key(n)) == Some(&(VXLAN, EXTERN))
    }
}

/// A switch with a mirror.
struct World {
    kernel: Kernel,
    mirror: Mirror,
    now: Instant,
    locals: BTreeMap<Address, Local>,
    duplicates: usize,
    /// Announcements that a port may make.
    permits: u32,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let mut mirror = Mirror::new(now);
        mirror.set_members(vec![member(Vlan::Transparent)]);
        let (locals, kernel) = (BTreeMap::new(), Kernel::new());
        Self { kernel, mirror, now, locals, duplicates: 0, permits: u32::MAX }
    }

    fn set_locals(&mut self) {
        self.mirror.set_locals(self.locals.iter().map(|(a, l)| (*a, *l)).collect());
    }

    fn learn(&mut self, n: u8) {
        let local = Local { port: PORT, learned: true, starts: 0 };
        self.locals.entry(address(n)).or_insert(local).learned = true;
        self.set_locals();
    }

    fn state_of(&self, n: u8) -> Option<State> {
        let mut claims = self.mirror.claims(self.now);
        claims.find(|(of, _, _)| *of == address(n)).map(|(_, _, state)| state)
    }

    fn leave(&mut self, n: u8) {
        self.locals.remove(&address(n));
        self.set_locals();
    }

    fn claim_remotely(&mut self, n: u8) {
        self.kernel.put(VXLAN, key(n), EXTERN);
    }

    /// Delivers messages, and lets the mirror act.
    fn step(&mut self, messages: usize) {
        let count = messages.min(self.kernel.queue.len());
        for (seq, heard) in self.kernel.queue.drain(..count) {
            self.mirror.hear(seq, heard, self.now);
        }
        let (mut sent, mut actions) = (Vec::new(), Vec::new());
        let (permits, now) = (&mut self.permits, self.now);
        let mut permit = |port| {
            assert_eq!(port, PORT);
            *permits = permits.checked_sub(1).ok_or(now)?;
            Ok(())
        };
        let mut send = |seq, request: &Request| sent.push((seq, request.clone()));
        self.mirror.step(self.now, &mut permit, &mut send, &mut actions);
        assert!(sent.len() <= BATCH + 4, "a batch is bounded");
        for (seq, request) in sent {
            if let Request::Put { key, .. } = &request {
                let address = Address { mac: key.mac, vlan: 0 };
                assert!(self.locals.contains_key(&address), "only addresses of the switch");
            }
            self.kernel.run(seq, &request);
        }
        for action in actions {
            match action {
                Action::Forget(address, port) => {
                    assert_eq!(port, PORT);
                    if let Some(local) = self.locals.get_mut(&address) {
                        local.learned = false;
                    }
                    self.locals.retain(|_, local| local.learned || local.starts > 0);
                    self.set_locals();
                }
                Action::Duplicate(..) => self.duplicates += 1,
            }
        }
    }

    /// Runs until nothing is left to do now.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.step(usize::MAX);
            let is_due = self.mirror.due().is_some_and(|due| due <= self.now);
            if self.kernel.queue.is_empty() && !is_due {
                return;
            }
        }
        panic!("the mirror does not come to rest");
    }

    /// Lets time pass, in steps to each time at which the mirror wants to act.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.settle();
        while let Some(due) = self.mirror.due().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.settle();
        }
        self.now = end;
        self.settle();
    }
}

fn member(vlan: Vlan) -> Member {
    Member { interface: "tap0".into(), bridge: "br10".into(), vlan }
}

#[derive(Clone, Debug)]
enum Op {
    Learn(u8),
    Leave(u8),
    Start(u8),
    ClaimRemotely(u8),
    WithdrawRemotely(u8),
    /// An operator deletes our entry.
    Flush(u8),
    Overrun,
    VxlanLeaves,
    VxlanComes,
    Step(usize),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0_u8..4;
    prop_oneof![
        n.clone().prop_map(Op::Learn),
        n.clone().prop_map(Op::Leave),
        n.clone().prop_map(Op::Start),
        n.clone().prop_map(Op::ClaimRemotely),
        n.clone().prop_map(Op::WithdrawRemotely),
        n.prop_map(Op::Flush),
        Just(Op::Overrun),
        Just(Op::VxlanLeaves),
        Just(Op::VxlanComes),
        (0_usize..8).prop_map(Op::Step),
        (1_u64..60_000).prop_map(Op::Pass),
    ]
}

fn apply(world: &mut World, op: &Op, starts: &mut u64) {
    match op {
        Op::Learn(n) => world.learn(*n),
        Op::Leave(n) => world.leave(*n),
        Op::Start(n) => {
            *starts += 1;
            let local = Local { port: PORT, learned: false, starts: *starts };
            world.locals.entry(address(*n)).or_insert(local).starts = *starts;
            world.set_locals();
        }
        Op::ClaimRemotely(n) => {
            if world.kernel.links.contains(&vxlan()) {
                world.claim_remotely(*n);
            }
        }
        Op::WithdrawRemotely(n) => _ = world.kernel.delete(VXLAN, key(*n)),
        Op::Flush(n) => _ = world.kernel.delete(TAP, key(*n)),
        Op::Overrun => {
            world.kernel.queue.clear();
            world.mirror.hear(0, Heard::Lost, world.now);
        }
        Op::VxlanLeaves => {
            world.kernel.links.retain(|link| link.index != VXLAN);
            for n in 0..4 {
                world.kernel.delete(VXLAN, key(n));
            }
            world.kernel.event(Heard::LinkGone(VXLAN));
        }
        Op::VxlanComes => {
            if !world.kernel.links.contains(&vxlan()) {
                world.kernel.links.push(vxlan());
                world.kernel.event(Heard::Link(vxlan()));
            }
        }
        Op::Step(messages) => world.step(*messages),
        Op::Pass(ms) => world.pass(Duration::from_millis(*ms)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// After any events: an address heard here last is announced, one that another host claimed
    /// last is not, and one that left is withdrawn.
    #[test]
    fn last_evidence_decides(ops in proptest::collection::vec(op(), 0..60)) {
        let (mut world, mut starts) = (World::new(), 0);
        for op in &ops {
            apply(&mut world, op, &mut starts);
        }
        apply(&mut world, &Op::VxlanComes, &mut starts);
        world.pass(Duration::from_secs(400));
        for n in 0..4 {
            world.learn(n);
        }
        world.pass(Duration::from_secs(1));
        prop_assert!((0..4).all(|n| world.kernel.on_tap(n)), "{:?}", world.kernel.entries);
        world.claim_remotely(0);
        world.leave(1);
        world.pass(Duration::from_secs(400));
        prop_assert!(world.kernel.is_remote(0), "yielded");
        prop_assert!(!world.locals.get(&address(0)).is_some_and(|local| local.learned));
        prop_assert!(!world.kernel.entries.contains_key(&key(1)), "withdrawn");
        prop_assert!(world.kernel.on_tap(2) && world.kernel.on_tap(3));
        world.learn(0);
        world.pass(Duration::from_secs(1));
        prop_assert!(world.kernel.on_tap(0), "new evidence");
    }

    /// Whatever another host does, an address is claimed against it too seldom for FRR to count a
    /// duplicate: five moves in three minutes, of both together.
    #[test]
    fn no_flapping_into_duplicates(gaps in proptest::collection::vec(1_u64..5000, 1..200)) {
        let mut world = World::new();
        world.learn(0);
        world.pass(Duration::from_secs(1));
        let mut puts = Vec::new();
        for gap in gaps {
            let before = world.kernel.puts.get(&key(0)).copied();
            world.claim_remotely(0);
            world.settle();
            world.learn(0);
            world.pass(Duration::from_millis(gap));
            if world.kernel.puts.get(&key(0)).copied() != before {
                puts.push(world.now);
            }
        }
        for (i, at) in puts.iter().enumerate() {
            let within = puts[i..].iter().filter(|put| **put < *at + YIELD_WINDOW).count();
            prop_assert!(within <= 3, "{within} claims within three minutes");
        }
    }
}

#[test]
fn an_address_is_announced_and_withdrawn() {
    let mut world = World::new();
    world.learn(1);
    world.settle();
    assert!(world.kernel.on_tap(1));
    assert_eq!(world.state_of(1), Some(State::Announced));
    world.leave(1);
    world.settle();
    assert!(world.kernel.entries.is_empty());
    assert_eq!(world.state_of(1), None);
}

#[test]
fn an_entry_of_the_same_address_before_the_reply_is_older_than_the_request() {
    let mut world = World::new();
    world.claim_remotely(1);
    world.settle();
    // A guest moves here: its first frame is heard, and FRR's entry is still on its way.
    world.learn(1);
    world.step(usize::MAX);
    let late = Heard::Entry { link: VXLAN, key: key(1), entry: EXTERN };
    world.kernel.queue.push_front((0, late));
    world.settle();
    assert!(world.kernel.on_tap(1) && world.locals.contains_key(&address(1)));
}

#[test]
fn entries_of_an_earlier_process_stay_while_its_guests_come_back() {
    let mut world = World::new();
    world.kernel.entries.extend([1, 2].map(|n| (key(n), (TAP, STATIC))));
    world.pass(GRACE / 2);
    assert!(world.kernel.on_tap(1) && world.kernel.on_tap(2), "kept");
    world.learn(1);
    world.pass(GRACE);
    assert!(world.kernel.on_tap(1), "adopted");
    assert!(world.kernel.puts.is_empty(), "and not put again");
    assert!(!world.kernel.entries.contains_key(&key(2)), "its guest did not come back");
}

#[test]
fn addresses_of_another_process_are_no_evidence_against_other_hosts() {
    let mut world = World::new();
    // Announced by it; its guest moved meanwhile; configured, and on another host since before.
    world.kernel.entries.insert(key(1), (TAP, STATIC));
    world.kernel.entries.insert(key(2), (VXLAN, EXTERN));
    world.kernel.entries.insert(key(3), (VXLAN, EXTERN));
    (1..5).for_each(|n| world.learn(n));
    let configured = Local { port: PORT, learned: false, starts: 1 };
    world.locals.insert(address(3), configured);
    world.set_locals();
    world.mirror.inherit();
    world.pass(Duration::from_secs(1));
    let states = [1, 2, 3, 4].map(|n| world.state_of(n));
    let announced = Some(State::Announced);
    assert_eq!(states, [announced, None, Some(State::Yielded), announced]);
    assert!(world.kernel.is_remote(2) && world.kernel.is_remote(3));
    assert_eq!(world.kernel.puts.keys().collect::<Vec<_>>(), [&key(4)]);
    // Its port comes up here.
    world.locals.insert(address(3), Local { starts: 2, ..configured });
    world.set_locals();
    world.settle();
    assert!(world.kernel.on_tap(3));
}

#[test]
fn a_refusal_is_a_problem_with_a_remedy_and_is_retried() {
    let mut world = World::new();
    world.kernel.refuses = libc::EPERM;
    world.learn(1);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.state_of(1), Some(State::Pending));
    let problems = world.mirror.news().unwrap();
    assert!(problems.iter().any(|(_, what)| what.contains("CAP_NET_ADMIN")), "{problems:?}");
    world.kernel.refuses = 0;
    world.pass(RETRY);
    assert!(world.kernel.on_tap(1));
    let problems = world.mirror.news().unwrap();
    assert!(!problems.iter().any(|(_, what)| what.contains("CAP_NET_ADMIN")), "{problems:?}");
}

#[test]
fn a_port_beyond_its_rate_waits() {
    let mut world = World::new();
    world.permits = 3;
    (0..10).for_each(|n| world.learn(n));
    world.pass(Duration::from_secs(1));
    let on_tap = |world: &World| (0..10).filter(|n| world.kernel.on_tap(*n)).count();
    assert_eq!(on_tap(&world), 3);
    assert_eq!(world.mirror.status("tap0", world.now).unwrap().states["pending"], 7);
    world.permits = u32::MAX;
    world.pass(Duration::from_secs(1));
    assert_eq!(on_tap(&world), 10);
}

#[test]
fn two_hosts_with_one_address_are_reported() {
    let mut world = World::new();
    world.learn(1);
    world.settle();
    for _ in 0..2 {
        world.claim_remotely(1);
        world.pass(Duration::from_millis(500));
        world.learn(1);
        world.pass(Duration::from_millis(500));
    }
    assert_eq!(world.duplicates, 1);
    assert_eq!(world.state_of(1), Some(State::Duplicate));
    assert!(world.kernel.is_remote(1), "left to the other host");
    world.pass(HOLD);
    assert!(world.kernel.on_tap(1), "and claimed again later");
}

#[test]
fn what_frr_may_have_missed_is_announced_again() {
    let mut world = World::new();
    world.learn(1);
    world.pass(Duration::from_secs(1));
    let tunnel =
        Heard::Tunnel { link: VXLAN, mac: Mac::default(), vtep: IpAddr::from([10, 9, 0, 2]) };
    world.mirror.hear(0, tunnel.clone(), world.now);
    world.now += AGAIN_AFTER;
    world.step(0);
    let again: Vec<_> =
        world.kernel.queue.iter().filter(|(_, h)| matches!(h, Heard::Entry { .. })).collect();
    let entry = |entry| (0, Heard::Entry { link: TAP, key: key(1), entry });
    assert_eq!(again, [&entry(LEARNED), &entry(STATIC)]);
    world.settle();
    assert!(world.kernel.on_tap(1));
    // Another host of the same VNI is no reason.
    world.mirror.hear(0, tunnel, world.now);
    world.now += AGAIN_AFTER;
    world.step(0);
    assert!(world.kernel.queue.is_empty());
}

#[test]
fn entries_of_a_tap_that_is_no_longer_a_member_are_deleted() {
    let mut world = World::new();
    (0..100).for_each(|n| world.learn(n));
    world.settle();
    assert_eq!(world.kernel.entries.len(), 100);
    world.mirror.set_members(Vec::new());
    world.settle();
    assert!(world.kernel.entries.is_empty());
}

/// A change of one interface.
fn edit(index: u32, change: &dyn Fn(&mut Link)) -> impl Fn(&mut Vec<Link>) {
    move |links| links.iter_mut().filter(|link| link.index == index).for_each(change)
}

#[test]
fn bad_bridges_are_named_with_a_remedy() {
    let problems = |change: &dyn Fn(&mut Vec<Link>), vlan: Vlan| {
        let mut world = World::new();
        world.mirror.set_members(vec![member(vlan)]);
        change(&mut world.kernel.links);
        world.pass(Duration::from_secs(1));
        let status = world.mirror.status("tap0", world.now).unwrap();
        let news: Vec<_> = world.mirror.news().unwrap().into_iter().map(|(_, what)| what).collect();
        assert_eq!(news[..], status.problems[..news.len()], "the rest are notes");
        assert_eq!(world.mirror.news(), None);
        status.problems.join("\n")
    };
    let missing = |index: u32| move |links: &mut Vec<Link>| links.retain(|l| l.index != index);
    let plain = || Vlan::Transparent;
    let trunk = || Vlan::Trunk { vids: Vids::from_iter([5]), native: None };
    let learning = |link: &mut Link| {
        if let Kind::Vxlan { learns, .. } = &mut link.kind {
            *learns = true;
        }
    };
    for (found, words) in [
        (problems(&missing(BRIDGE), plain()), "there is no bridge `br10`: create it (ip link add"),
        (problems(&missing(TAP), plain()), "interface `tap0` does not exist"),
        (problems(&edit(BRIDGE, &|l| l.kind = Kind::Other), plain()), "`br10` is not a bridge"),
        (problems(&edit(TAP, &|l| l.master = Some(UNDERLAY)), plain()), "`tap0` is in `eth0`, not"),
        (problems(&|_| {}, trunk()), "is not VLAN-aware, and the port is a trunk"),
        (problems(&missing(VXLAN), plain()), "bridge `br10` has no VXLAN interface"),
        (problems(&edit(VXLAN, &|l| l.up = false), plain()), "`vx10` is down: ip link set vx10 up"),
        (problems(&edit(BRIDGE, &|l| l.up = false), plain()), "bridge `br10` is down"),
        (problems(&edit(VXLAN, &learning), plain()), "`vx10` learns addresses from frames"),
        (problems(&edit(VXLAN, &|l| l.learns = Some(true)), plain()), "learning off"),
        (problems(&edit(TAP, &|l| l.mtu = 1500), plain()), "set its MTU to 1550 or more"),
        (problems(&|_| {}, plain()), "`vx10` has no remote VTEP yet"),
    ] {
        assert!(found.contains(words), "{words}\n{found}");
        assert!(!found.contains("MTU") || words.contains("MTU"), "{found}");
    }
}

#[test]
fn a_tap_outside_any_bridge_is_put_into_its_own() {
    let mut world = World::new();
    world.kernel.links[1].master = None;
    let mut joined = Vec::new();
    for _ in 0..20 {
        let heard: Vec<_> = world.kernel.queue.drain(..).collect();
        heard.into_iter().for_each(|(seq, heard)| world.mirror.hear(seq, heard, world.now));
        let mut send = |seq, request: &Request| {
            if let Request::Join { link, bridge } = request {
                joined.push((*link, *bridge));
            }
            world.kernel.run(seq, request);
        };
        world.mirror.step(world.now, &mut |_| Ok(()), &mut send, &mut Vec::new());
        world.now += Duration::from_millis(100);
    }
    assert_eq!(joined, [(TAP, BRIDGE)], "once");
}

#[test]
fn vlans_that_are_not_those_of_its_port_are_removed_from_an_interface() {
    let mut world = World::new();
    world.kernel.links[0].kind = Kind::Bridge { is_aware: true, pvid: 20 };
    let mut sent = Vec::new();
    for vlans in [&[10][..], &[20], &[30, 40], &[]] {
        // The last two before the first of them reaches the bridge.
        for vlan in vlans {
            world.mirror.set_members(vec![member(Vlan::Access(*vlan))]);
        }
        if vlans.is_empty() {
            world.mirror.set_members(vec![member(Vlan::Transparent)]);
        }
        let at = Address { vlan: vlans.last().copied().unwrap_or(0), ..address(1) };
        let local = Local { port: PORT, learned: true, starts: 0 };
        world.mirror.set_locals(vec![(at, local)]);
        for _ in 0..20 {
            let heard: Vec<_> = world.kernel.queue.drain(..).collect();
            heard.into_iter().for_each(|(seq, heard)| world.mirror.hear(seq, heard, world.now));
            let mut send = |seq, request: &Request| {
                match request {
                    Request::AddVlans { vlans, .. } => sent.push((true, vlans.untagged)),
                    Request::DeleteVlans { vlans, .. } => sent.push((false, vlans.untagged)),
                    _ => {}
                }
                world.kernel.run(seq, request);
            };
            world.mirror.step(world.now, &mut |_| Ok(()), &mut send, &mut Vec::new());
            world.now += Duration::from_millis(100);
        }
    }
    let (ten, twenty, thirty, forty) = (Some(10), Some(20), Some(30), Some(40));
    // The bridge's default VLAN, which it has since it joined, unless it is the port's.
    let first = [(false, twenty), (true, ten), (false, ten), (true, twenty), (false, twenty)];
    let then = [(false, twenty), (false, thirty), (true, forty), (false, forty)];
    assert_eq!(sent, [&first[..], &then].concat());
    let vids: Vec<_> = world.kernel.entries.keys().map(|key| key.vid).collect();
    assert_eq!(vids, [20], "entries go before the VLAN in which they are");
}

#[test]
fn vlans_of_the_switch_are_those_of_the_bridge() {
    let tap = |vlan| Tap::new(member(vlan), Vec::new());
    let at = |is_aware| At { link: TAP, bridge: BRIDGE, is_aware, pvid: 1 };
    let trunk = || Vlan::Trunk { vids: Vids::from_iter([5, 7, 8, 9]), native: Some(7) };
    for (vlan, is_aware, of_switch, of_bridge) in [
        (Vlan::Transparent, false, 0, Some(0)),
        (Vlan::Transparent, false, 5, None),
        (Vlan::Transparent, true, 0, Some(1)),
        (Vlan::Transparent, true, 5, Some(5)),
        (Vlan::Access(5), false, 5, Some(0)),
        (Vlan::Access(5), false, 6, None),
        (Vlan::Access(5), true, 5, Some(5)),
        (trunk(), true, 5, Some(5)),
        (trunk(), true, 6, None),
        (trunk(), true, 7, Some(7)),
        (trunk(), false, 7, Some(0)),
        (trunk(), false, 5, None),
    ] {
        let tap = tap(vlan);
        let vid = tap.vid(at(is_aware), of_switch);
        assert_eq!(vid, of_bridge, "{:?} {is_aware} {of_switch}", tap.member.vlan);
        if let Some(vid) = vid {
            assert_eq!(tap.vlan(at(is_aware), vid), Some(of_switch));
        }
    }
    let want = Vlans { tagged: vec![(5, 5), (8, 9)], untagged: Some(7) };
    assert_eq!(Vlans::of(&trunk()), want);
    assert_eq!(Vlans::of(&Vlan::Access(5)), Vlans { tagged: vec![], untagged: Some(5) });
    assert_eq!(Vlans::of(&Vlan::Transparent), Vlans::default());
}

/// A large table takes longer to read than the time after which a dump without messages is lost.
#[test]
fn a_dump_may_take_long_while_messages_arrive() {
    let mut world = World::new();
    (10..250).for_each(|n| world.kernel.put(VXLAN, key(n), EXTERN));
    world.learn(1);
    let begun = world.now;
    while !world.kernel.on_tap(1) {
        world.step(1);
        world.now += Duration::from_millis(100);
        assert!(world.now < begun + Duration::from_secs(60), "read again and again");
    }
    assert!(world.now > begun + DUMP_MAX * 2);
    // One that stops is requested again.
    let mut world = World::new();
    world.kernel.put(VXLAN, key(10), EXTERN);
    world.learn(1);
    world.step(1);
    world.kernel.queue.clear();
    world.pass(DUMP_MAX + Duration::from_secs(1));
    assert!(world.kernel.on_tap(1));
}

#[test]
fn a_dump_that_is_refused_because_another_continues_is_repeated_soon() {
    for (error, rest) in [(libc::EBUSY, SYNC_REST), (libc::ENOMEM, RETRY)] {
        let mut world = World::new();
        world.learn(1);
        while world.mirror.dump.is_none() {
            world.step(usize::MAX);
        }
        world.kernel.queue.clear();
        let (seq, _, _) = world.mirror.dump.unwrap();
        world.mirror.hear(seq, Heard::Reply { error }, world.now);
        assert_eq!(world.mirror.sync_at, Some(world.now + rest));
        world.pass(rest + Duration::from_secs(1));
        assert!(world.kernel.on_tap(1));
    }
}

/// The kernel makes a part of a dump under a lock, and queues it after it has released it.
#[test]
fn an_event_during_a_dump_is_newer_than_what_is_read() {
    let mut world = World::new();
    world.claim_remotely(1);
    world.claim_remotely(2);
    while !world.kernel.queue.iter().any(|(seq, h)| *seq != 0 && matches!(h, Heard::Entry { .. })) {
        world.step(usize::MAX);
    }
    world.kernel.delete(VXLAN, key(1));
    world.kernel.overtake();
    world.settle();
    let remotes: Vec<_> = world.mirror.remotes().map(|(_, remote)| remote.address).collect();
    assert_eq!(remotes, [address(2)]);
}

/// Interfaces that change again and again cause dumps in a bounded share of the time.
#[test]
fn dumps_take_a_bounded_part_of_the_time() {
    let mut world = World::new();
    (10..20).for_each(|n| world.kernel.put(VXLAN, key(n), EXTERN));
    world.settle();
    let begun = world.now;
    let (mut reading, mut dumps, mut n) = (Duration::ZERO, 0, 0);
    while world.now < begun + Duration::from_secs(60) {
        let is_reading = world.mirror.dump.is_some();
        if !is_reading && world.kernel.queue.is_empty() {
            n += 1;
            let link = Link { name: format!("vx{n}"), ..vxlan() };
            world.kernel.event(Heard::Link(link));
        }
        world.step(1);
        // Each message of a dump takes long.
        let took = Duration::from_millis(if is_reading { 50 } else { 1 });
        world.now += took;
        reading += if is_reading { took } else { Duration::ZERO };
        dumps += u32::from(is_reading && world.mirror.dump.is_none());
    }
    assert!(dumps > 5, "{dumps}");
    assert!(reading < Duration::from_secs(60) / 4, "{reading:?} of a minute, {dumps} dumps");
}
