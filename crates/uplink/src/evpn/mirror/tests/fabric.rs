//! Many hosts in virtual time: each has its mirror, the bridge of its kernel, and FRR, which a
//! route reflector joins to the others.
//!
//! Prints what each event costs. `FABRIC=100x100 cargo test --release -p pvswitch-uplink fabric --
//! --nocapture`: 100 hosts with 100 guests each; the last line is then what `pvswitch-lab import`
//! reads, the figures of `docs/scale.md`.

#[path = "../../../../../lab/tests/common/measured.rs"]
mod measured;

use serde_json::{Value, json};

use self::measured::{Measured, Run};
use super::*;

/// Hosts and guests on each, if the environment does not say otherwise.
const SMALL: [usize; 2] = [5, 4];
const SEEDS: u64 = 20;
/// Delay of one of the two hops of a route, in ms.
const HOP_MS: std::ops::Range<u64> = 1..40;
/// Time in which all is settled: longer than any timer of the mirror.
const LONG: Duration = Duration::from_secs(400);
/// FRR counts an address that moves more often in three minutes as a duplicate.
const DUPLICATE_MOVES: u32 = 5;

/// A route of an address: the host, and the sequence number of its mobility (RFC 7432, 7.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    host: usize,
    seq: u32,
}

impl Route {
    /// The higher number, or else the lower address, is the one that all hosts choose.
    fn wins_over(self, other: Self) -> bool {
        (self.seq, other.host) > (other.seq, self.host)
    }
}

/// A route on its way: that of `host`, or its end.
struct Update {
    at: Instant,
    key: Key,
    host: usize,
    seq: Option<u32>,
}

struct Host {
    world: World,
    /// Addresses in the bridge, apart from the VXLAN interface, and their numbers.
    announced: HashMap<Key, u32>,
    /// Routes of others.
    routes: HashMap<Key, Vec<Route>>,
    inbox: VecDeque<Update>,
    /// Messages of the kernel that its mirror read.
    heard: usize,
}

impl Host {
    fn new() -> Self {
        let world = World::new();
        let (announced, routes) = (HashMap::new(), HashMap::new());
        Self { world, announced, routes, inbox: VecDeque::new(), heard: 0 }
    }

    /// Time of its next event.
    fn due(&self) -> Option<Instant> {
        let mail = self.inbox.front().map(|update| update.at);
        mail.into_iter().chain(self.world.mirror.due()).min()
    }

    fn best(&self, key: Key) -> Option<Route> {
        let all = self.routes.get(&key)?.iter().copied();
        all.reduce(|best, route| if route.wins_over(best) { route } else { best })
    }

    fn set_route(&mut self, key: Key, route: Route, exists: bool) {
        let routes = self.routes.entry(key).or_default();
        routes.retain(|other| other.host != route.host);
        if exists {
            routes.push(route);
        } else if routes.is_empty() {
            self.routes.remove(&key);
        }
    }
}

/// What an event cost, in all.
#[derive(Debug)]
struct Cost {
    /// Routes and their ends that hosts sent.
    updates: usize,
    /// Messages that all mirrors read, and requests that they sent.
    heard: usize,
    requests: usize,
    /// Until the last change of a bridge.
    took: Duration,
}

struct Fabric {
    hosts: Vec<Host>,
    guests: Vec<Address>,
    /// The host of each guest.
    homes: Vec<usize>,
    now: Instant,
    changed: Instant,
    random: u64,
    updates: usize,
    /// Number of moves of each address, as FRR counts them.
    moves: HashMap<Key, u32>,
}

impl Fabric {
    /// No guest is up yet.
    fn new(hosts: usize, guests: usize, seed: u64) -> Self {
        let number = |n: usize| {
            let [a, b, c, d] = (n as u32).to_be_bytes();
            Address { mac: Mac([2, 1, a, b, c, d]), vlan: 0 }
        };
        let hosts: Vec<_> = (0..hosts).map(|_| Host::new()).collect();
        let now = Instant::now();
        let homes = (0..hosts.len() * guests).map(|guest| guest % hosts.len()).collect();
        let guests = (0..hosts.len() * guests).map(number).collect();
        let (moves, updates) = (HashMap::new(), 0);
        Self { hosts, guests, homes, now, changed: now, random: seed, updates, moves }
    }

    /// SplitMix64.
    fn random(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        range.start + (z ^ (z >> 31)) % (range.end - range.start)
    }

    // ---- FRR ----

    /// Sends a route, or its end, to all other hosts; each session keeps the order.
    fn announce(&mut self, host: usize, key: Key, seq: Option<u32>) {
        self.updates += 1;
        let reflected = self.now + Duration::from_millis(self.random(HOP_MS));
        for to in (0..self.hosts.len()).filter(|to| *to != host) {
            let at = reflected + Duration::from_millis(self.random(HOP_MS));
            let inbox = &mut self.hosts[to].inbox;
            let at = inbox.back().map_or(at, |last| at.max(last.at));
            inbox.push_back(Update { at, key, host, seq });
        }
    }

    /// Handles a route of another host.
    fn receive(&mut self, me: usize, update: &Update) {
        let host = &mut self.hosts[me];
        let route = Route { host: update.host, seq: update.seq.unwrap_or_default() };
        host.set_route(update.key, route, update.seq.is_some());
        let own = host.announced.get(&update.key).map(|seq| Route { host: me, seq: *seq });
        match (host.best(update.key), own) {
            (Some(best), Some(own)) if best.wins_over(own) => {
                host.announced.remove(&update.key);
                host.world.kernel.put(VXLAN, update.key, EXTERN);
                self.announce(me, update.key, None);
            }
            (_, Some(_)) => return,
            (Some(_), None) => host.world.kernel.put(VXLAN, update.key, EXTERN),
            (None, None) => _ = host.world.kernel.delete(VXLAN, update.key),
        }
        self.changed = self.now;
    }

    /// Handles what the kernel reports of entries that are not FRR's.
    fn observe(&mut self, me: usize) {
        let host = &self.hosts[me];
        let of_tap: Vec<_> = host.world.kernel.queue.iter().filter(|(seq, _)| *seq == 0).collect();
        let of_tap: Vec<_> = of_tap
            .into_iter()
            .filter_map(|(_, heard)| match heard {
                Heard::Entry { link: TAP, key, .. } => Some((*key, true)),
                Heard::EntryGone { link: TAP, key } => Some((*key, false)),
                _ => None,
            })
            .collect();
        for (key, exists) in of_tap {
            self.changed = self.now;
            let host = &mut self.hosts[me];
            if !exists {
                if host.announced.remove(&key).is_some() {
                    self.announce(me, key, None);
                    if self.hosts[me].best(key).is_some() {
                        self.hosts[me].world.kernel.put(VXLAN, key, EXTERN);
                    }
                }
            } else if !host.announced.contains_key(&key) {
                let seq = host.best(key).map_or(0, |best| best.seq + 1);
                host.announced.insert(key, seq);
                *self.moves.entry(key).or_default() += u32::from(seq > 0);
                self.announce(me, key, Some(seq));
            }
        }
    }

    // ---- time ----

    /// Lets one host do all that is due.
    fn settle(&mut self, me: usize) {
        let host = &mut self.hosts[me];
        host.world.now = self.now;
        let due = host.inbox.iter().take_while(|update| update.at <= self.now).count();
        let mail: Vec<_> = host.inbox.drain(..due).collect();
        mail.iter().for_each(|update| self.receive(me, update));
        loop {
            let host = &mut self.hosts[me];
            host.heard += host.world.kernel.queue.len();
            host.world.step(usize::MAX);
            self.observe(me);
            let world = &self.hosts[me].world;
            let is_due = world.mirror.due().is_some_and(|due| due <= self.now);
            if world.kernel.queue.is_empty() && !is_due {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        (0..self.hosts.len()).for_each(|host| self.settle(host));
        loop {
            let next = self.hosts.iter().enumerate().filter_map(|(n, host)| Some((host.due()?, n)));
            let Some((at, host)) = next.min().filter(|(at, _)| *at <= end) else { break };
            self.now = self.now.max(at);
            self.settle(host);
        }
        self.now = end;
    }

    /// What an event costs until nothing happens any more.
    fn cost(&mut self, event: impl FnOnce(&mut Self)) -> Cost {
        let sums = |fabric: &Self| {
            let heard: usize = fabric.hosts.iter().map(|host| host.heard).sum();
            let requests: usize = fabric.hosts.iter().map(|host| host.world.kernel.requests).sum();
            (fabric.updates, heard, requests)
        };
        let (before, began) = (sums(self), self.now);
        self.moves.clear();
        event(self);
        self.pass(LONG);
        let (after, took) = (sums(self), self.changed.saturating_duration_since(began));
        for (key, moves) in &self.moves {
            assert!(*moves < DUPLICATE_MOVES, "{key:?} moved {moves} times: FRR blocks it");
        }
        let (updates, heard, requests) =
            (after.0 - before.0, after.1 - before.1, after.2 - before.2);
        Cost { updates, heard, requests, took }
    }

    // ---- events ----

    /// Guests are heard at a host.
    fn learn(&mut self, host: usize, guests: impl IntoIterator<Item = usize>) {
        let world = &mut self.hosts[host].world;
        for guest in guests {
            let local = Local { port: PORT, learned: true, starts: 0 };
            world.locals.entry(self.guests[guest]).or_insert(local).learned = true;
        }
        world.set_locals();
    }

    /// Their ports go down.
    fn leave(&mut self, host: usize, guests: impl IntoIterator<Item = usize>) {
        let world = &mut self.hosts[host].world;
        for guest in guests {
            world.locals.remove(&self.guests[guest]);
        }
        world.set_locals();
    }

    fn at_home(&self, host: usize) -> Vec<usize> {
        (0..self.guests.len()).filter(|guest| self.homes[*guest] == host).collect()
    }

    /// Each address is in the bridge of its host by the TAP, and in all others by the VXLAN
    /// interface. `absent`: hosts that are gone.
    fn check(&self, what: &str, absent: &[usize]) {
        for (me, host) in self.hosts.iter().enumerate().filter(|(me, _)| !absent.contains(me)) {
            let entries = &host.world.kernel.entries;
            for (guest, home) in self.homes.iter().enumerate() {
                let key = Key { mac: self.guests[guest].mac, vid: 0 };
                let expected = match absent.contains(home) {
                    true => None,
                    false if *home == me => Some((TAP, true)),
                    false => Some((VXLAN, false)),
                };
                let found = entries.get(&key).map(|(link, entry)| (*link, entry.is_static));
                assert_eq!(found, expected, "{what}: guest {guest} of host {home} at host {me}");
            }
            assert!(entries.len() <= self.guests.len());
            let remotes = host.world.mirror.remotes().count();
            let elsewhere = |home: &&usize| **home != me && !absent.contains(home);
            assert_eq!(remotes, self.homes.iter().filter(elsewhere).count(), "{what}: host {me}");
        }
    }
}

/// Every event, each after the last has settled: name and cost.
fn run(hosts: usize, guests: usize, seed: u64) -> Vec<(&'static str, Cost)> {
    let mut fabric = Fabric::new(hosts, guests, seed);
    let (hosts, all) = (fabric.hosts.len(), fabric.guests.len());
    // About one of each host.
    let few: Vec<usize> = (0..all).step_by(if all > 1000 { 101 } else { 3 }).collect();
    let mut costs = Vec::new();

    costs.push((
        "all hosts start, their guests send",
        fabric.cost(|fabric| {
            for host in 0..hosts {
                let guests = fabric.at_home(host);
                fabric.learn(host, guests);
            }
        }),
    ));
    fabric.check("start", &[]);
    assert_eq!(costs[0].1.updates, all, "each address is announced once");

    costs.push((
        "1 in 100 guests moves, its old port goes down",
        fabric.cost(|fabric| {
            for guest in few.iter().copied() {
                let (from, to) = (fabric.homes[guest], (fabric.homes[guest] + 1) % hosts);
                fabric.leave(from, [guest]);
                fabric.learn(to, [guest]);
                fabric.homes[guest] = to;
            }
        }),
    ));
    fabric.check("moves", &[]);

    costs.push((
        "1 in 100 moves, its old host does not notice",
        fabric.cost(|fabric| {
            for guest in few.iter().copied() {
                let to = (fabric.homes[guest] + 1) % hosts;
                fabric.learn(to, [guest]);
                fabric.homes[guest] = to;
            }
        }),
    ));
    fabric.check("unnoticed moves", &[]);
    assert!(costs[2].1.updates <= 2 * few.len(), "a route, and the end of the old one");

    costs.push((
        "every mirror loses messages",
        fabric.cost(|fabric| {
            for host in &mut fabric.hosts {
                host.world.mirror.hear(0, Heard::Lost, fabric.now);
            }
        }),
    ));
    fabric.check("lost messages", &[]);
    assert_eq!(costs[3].1.updates, 0, "nobody else notices");

    costs.push((
        "a host is cut off, until the hold time of BGP",
        fabric.cost(|fabric| {
            for guest in fabric.at_home(0) {
                let key = Key { mac: fabric.guests[guest].mac, vid: 0 };
                fabric.announce(0, key, None);
            }
        }),
    ));
    fabric.check("cut off", &[0]);

    costs.push((
        "it is back",
        fabric.cost(|fabric| {
            let routes: Vec<_> = fabric.hosts[0].announced.iter().map(|(k, s)| (*k, *s)).collect();
            routes.into_iter().for_each(|(key, seq)| fabric.announce(0, key, Some(seq)));
        }),
    ));
    fabric.check("back", &[]);
    assert_eq!(costs[5].1.requests, 0, "mirrors have nothing to do");

    costs.push((
        "the route reflector restarts",
        fabric.cost(|fabric| {
            let routes: Vec<_> = fabric
                .hosts
                .iter()
                .enumerate()
                .flat_map(|(n, host)| host.announced.iter().map(move |(key, seq)| (n, *key, *seq)))
                .collect();
            routes.iter().for_each(|(host, key, _)| fabric.announce(*host, *key, None));
            routes.iter().for_each(|(host, key, seq)| fabric.announce(*host, *key, Some(*seq)));
        }),
    ));
    fabric.check("reflector", &[]);
    assert_eq!(costs[6].1.requests, 0, "mirrors have nothing to do");

    costs.push((
        "1 in 100 addresses is used at a second host, which speaks in turn with the first",
        fabric.cost(|fabric| {
            for _ in 0..10 {
                for guest in few.iter().copied() {
                    let home = fabric.homes[guest];
                    fabric.learn((home + 1) % hosts, [guest]);
                    fabric.learn(home, [guest]);
                }
                fabric.pass(Duration::from_secs(2));
            }
            // The second one is found and removed.
            for guest in few.iter().copied() {
                let home = fabric.homes[guest];
                fabric.leave((home + 1) % hosts, [guest]);
            }
            fabric.pass(LONG);
            for guest in few.iter().copied() {
                let home = fabric.homes[guest];
                fabric.learn(home, [guest]);
            }
        }),
    ));
    fabric.check("duplicates", &[]);
    costs
}

#[test]
fn a_fabric_of_hosts_agrees_where_each_address_is() {
    let size = std::env::var("FABRIC").ok().map(|size| {
        let parts: Vec<_> = size.split('x').map(|n| n.parse().ok().filter(|n| *n > 1)).collect();
        match parts[..] {
            [Some(hosts), Some(guests)] => [hosts, guests],
            _ => panic!("FABRIC={size}: not HOSTSxGUESTS, two of each at least"),
        }
    });
    let mut figures = Vec::new();
    for seed in 0..if size.is_some() { 1 } else { SEEDS } {
        let [hosts, guests] = size.unwrap_or(SMALL);
        for (what, cost) in run(hosts, guests, seed) {
            let Cost { updates, heard, requests, took } = &cost;
            println!("{what}: {updates} updates, {heard} messages, {requests} requests, {took:?}");
            figures.push((what, cost));
        }
    }
    if let Some([hosts, guests]) = size {
        println!("{}", results(hosts, guests, &figures));
    }
}

/// The costs of the events of a fabric, as `pvswitch-lab import` reads them.
fn results(hosts: usize, guests: usize, costs: &[(&str, Cost)]) -> Value {
    // An event's number, from 1, is its value on the axis: some have a comma in their names.
    let events: Vec<String> = (1..=costs.len()).map(|n| n.to_string()).collect();
    let runs = costs.iter().zip(&events).map(|((_, cost), event)| {
        let figures = json!({
            "updates": cost.updates,
            "heard": cost.heard as f64 / hosts as f64,
            "requests": cost.requests,
            "took_s": cost.took.as_secs_f64(),
        });
        Run { cell: vec![event.clone()], repeat: 0, again: false, figures }
    });
    let names: Vec<String> =
        costs.iter().zip(&events).map(|((what, _), n)| format!("{n} {what}")).collect();
    let size = format!("FABRIC={hosts}x{guests}");
    let measured = Measured {
        rig: "fabric",
        command: size + " cargo test --release -p pvswitch-uplink fabric -- --nocapture",
        seconds: LONG.as_secs_f64(),
        program: &std::env::current_exe().unwrap_or_default(),
        cpus: Vec::new(),
        about: format!("{hosts} hosts, {guests} guests each, virtual time: {}", names.join("; ")),
        measures: &[
            ("updates", "", "routes and their ends that hosts sent"),
            ("heard", "", "messages that the mirror of a host read"),
            ("requests", "", "requests of all mirrors"),
            ("took_s", "s", "until the last change of a bridge"),
        ],
        runs: runs.collect(),
        axes: vec![("event", events.clone())],
    };
    measured.json()
}
