//! Nanoseconds per frame through the switch, in one thread: front half, ingress, forwarder, egress,
//! front half. `cargo bench -p pvswitch-guest --bench forward [-- WORDS]` runs the cases whose
//! names contain all WORDS.
//!
//! Cases `workers-N` have N threads instead, each with a CPU and the guests of its worker; their
//! guests' work is in the time, which is that of all frames together.
//!
//! One core also does the guests' work, and no cache line moves to another core: this measures
//! instructions, not distances. `rigs/dpdk` measures a deployment. Cases run alternately, so that
//! disturbances affect all alike; output: median, and quartiles in brackets.
//!
//! With `COUNTS=N` in the environment each case has N frames, once, and workers have a clock that
//! does not depend on how long anything takes: `cargo xtask counts` counts their instructions.

mod guests;
mod rings;
mod scale;
mod worker;

use std::sync::Arc;
use std::time::{Duration, Instant};

use os::{Sandbox, ThreadKind};
use ring::virtq::Features;
use shm::sync::{Lock, Mutex};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Span, StormLimits, Table};
use switch::frame::{BURST_MAX, Burst};
use switch::tenant::{Rules, Security, Tenants, Vlan};
use uplink::NullEgress;

use guests::{FRAMES, Lane};
use rings::Rings;
use scale::Scale;
use worker::{Clock, RATES, Terms, Worker};

/// Frames, or polls, per case and turn: whole bursts.
const TURN: u64 = 100_000;
/// Turns by default.
const TURNS: usize = 30;
const NOW: switch::time::Instant = switch::time::Instant::from_ns(1);
const VLAN: u16 = 5;
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// Two guests on one switch; the first one sends.
struct Case {
    name: String,
    lanes: Vec<Lane>,
    ports: Table,
    forwarder: Forwarder,
    sources: Vec<Source>,
    scratch: Burst<'static>,
    /// Result of each turn, in ns per frame.
    results: Vec<f64>,
}

impl Case {
    fn new(name: String, mode: Mode, mut lanes: Vec<Lane>) -> Self {
        let queues = lanes.iter_mut().filter_map(|lane| lane.egress.take()).collect();
        let port = |id, queues: Vec<_>| {
            let port = Port::new(PortId(id), "p".into(), queues);
            port.set_active(port.egress.len() as u16);
            Some(Arc::new(port))
        };
        let ports = vec![port(0, Vec::new()), port(1, queues)];
        let fdb = Arc::new(Fdb::new(65536, [1, 2], 300, 4096));
        for vlan in [0, VLAN] {
            fdb.learn(MACS[1], vlan, PortId(1), 0);
        }
        let forwarder = Forwarder::new(mode, 0, fdb, Arc::new(ports.clone()), 3);
        let source = |(queue, lane): (u16, &Lane)| {
            Source::new(
                PortId(0),
                queue,
                Arc::clone(&lane.ingress_stats),
                Arc::new(switch::tuning::Tuning::new(switch::poll::Policy::Spin)),
            )
        };
        let sources = (0..).zip(&lanes).map(source).collect();
        let scratch = Burst::default();
        Self { name, lanes, ports, forwarder, sources, scratch, results: Vec::new() }
    }

    /// The same with port security and an access VLAN at the sender; the receiver has the same VLAN
    /// or, `tagged`, is a trunk.
    fn with_rules(mut self, tagged: bool) -> Self {
        // A DHCP server may be one: some flows have its ports.
        let security = Some(Security::new(&MACS[..1], Some(&[[10, 0, 0, 1].into()]), true, false));
        let of = |security, vlan| Some(Arc::new(Rules { security, vlan, isolated: false }));
        let trunk = Vlan::Trunk { vids: [VLAN].into_iter().collect(), native: None };
        let to = if tagged { trunk } else { Vlan::Access(VLAN) };
        let rules = vec![of(security, Vlan::Access(VLAN)), of(None, to)];
        self.forwarder.set_tenants(Tenants::new(rules));
        self
    }

    /// The same with one of [`OPTIONS`] at the sender.
    fn with_option(mut self, option: &str) -> Self {
        let sender = self.ports[0].as_ref().expect("the sender");
        match option {
            "storm" => {
                let (broadcast, multicast, unknown) = (RATES, RATES, RATES);
                sender.set_storm(StormLimits { broadcast, multicast, unknown });
            }
            "loop-guard" => sender.set_loop_guard(10),
            _ => {
                let (stats, id) = (Arc::default(), PortId(2));
                let drops = NullEgress::new(Arc::clone(&stats));
                let queue = EgressQueue::new(Arc::new(Mutex::new(Lock::Egress, drops)), stats);
                let port = Port::new(id, "m".into(), vec![queue]);
                port.set_active(1);
                port.set_reserved(true);
                sender.set_span(Some(Span { to: id, ingress: true, egress: true }));
                self.ports.push(Some(Arc::new(port)));
                self.forwarder.set_table(Arc::new(self.ports.clone()));
            }
        }
        self
    }

    fn turn(&mut self, turn: u64) {
        let (mut spent, mut frames) = (0_u128, 0);
        while frames < turn {
            let sent = self.lanes.len() * FRAMES;
            self.lanes.iter_mut().for_each(|lane| lane.guests.send());
            let start = Instant::now();
            for (lane, source) in self.lanes.iter_mut().zip(&self.sources) {
                let mut ingress = lane.ingress.lock();
                let forwarder = &mut self.forwarder;
                let each = &mut |burst: &mut Burst<'_>| _ = forwarder.forward(source, burst, NOW);
                ingress.burst(BURST_MAX, NOW, &mut self.scratch, each).expect("no fault");
            }
            spent += start.elapsed().as_nanos();
            let arrived: usize = self.lanes.iter_mut().map(|lane| lane.guests.take()).sum();
            assert_eq!(arrived, sent, "{}: every frame arrives", self.name);
            frames += sent as u64;
        }
        self.results.push(spent as f64 / frames as f64);
    }
}

/// A case in a thread of its own, which is confined as a worker is (`--sandbox on`), or is not.
struct Threaded {
    case: Case,
    confined: bool,
}

impl Threaded {
    fn turn(&mut self, turn: u64) {
        let Self { case, confined } = self;
        let run = || {
            if *confined {
                os::confine(ThreadKind::Worker).expect("it was tried before");
            }
            case.turn(turn);
        };
        std::thread::scope(|scope| scope.spawn(run).join().expect("no panic"));
    }
}

/// Cases in threads, confined and not.
fn threaded(words: &[String], features: Features) -> Vec<Threaded> {
    let mut made = Vec::new();
    for len in [60, 1514] {
        for (word, confined) in [("thread", false), ("confined", true)] {
            let name = format!("split switch {word} {len}");
            if words.iter().all(|word| name.contains(word)) {
                let lane = guests::virtio(features, false, 0, 1024, len);
                made.push(Threaded { case: Case::new(name, Mode::Switch, vec![lane]), confined });
            }
        }
    }
    if made.iter().any(|case| case.confined) {
        os::enable_confinement(Sandbox::Seccomp).expect("a kernel with seccomp");
    }
    made
}

/// Options of a port that cost each of its frames something: limits of frames that it floods, which
/// it does not; a guard against loops; a mirror port, which drops what it gets.
const OPTIONS: [&str; 3] = ["storm", "loop-guard", "mirror"];

/// Poll policies under which a worker sleeps. Only counted: nothing here would wake it in time.
const POLICIES: [&str; 6] =
    ["event", "napi", "timer:1000", "coalesce:50,32", "coalesce:50/pending", "adaptive"];
/// Unit of a worker that sleeps after each burst of its guest.
const ASLEEP: &str = "a frame, asleep between bursts";

/// A worker's loop over queues that all have frames, or none.
struct Loop {
    name: String,
    unit: &'static str,
    worker: Worker,
    results: Vec<f64>,
}

impl Loop {
    fn turn(&mut self, turn: u64) {
        let spent = match self.unit {
            "a poll" => {
                self.worker.wake();
                let start = Instant::now();
                self.worker.run_bursts(turn);
                start.elapsed()
            }
            ASLEEP => {
                for _ in 0..turn / FRAMES as u64 {
                    self.worker.guests[0].send();
                    let kicks = self.worker.guests[0].kicks();
                    self.worker.run_until_asleep(FRAMES as u64, kicks);
                    assert_eq!(self.worker.guests[0].take(), FRAMES, "{}: all arrive", self.name);
                }
                Duration::ZERO
            }
            _ => {
                let mut spent = Duration::ZERO;
                for _ in 0..turn / FRAMES as u64 {
                    self.worker.guests[0].send();
                    self.worker.wake();
                    let start = Instant::now();
                    self.worker.run_frames(FRAMES as u64);
                    spent += start.elapsed();
                    assert_eq!(self.worker.guests[0].take(), FRAMES, "{}: all arrive", self.name);
                }
                spent
            }
        };
        self.results.push(spent.as_nanos() as f64 / turn as f64);
    }
}

/// A vif's two rings without ports, of which valgrind can count instructions: it lacks a system
/// call of the ports' host.
struct XenRings {
    rings: Rings,
    results: Vec<f64>,
}

impl XenRings {
    const NAME: &str = "xen rings";

    fn turn(&mut self, turn: u64) {
        let start = Instant::now();
        self.rings.run_frames(turn, 60);
        self.results.push(start.elapsed().as_nanos() as f64 / turn as f64);
    }
}

fn loops(words: &[String], clock: Clock) -> Vec<Loop> {
    let split = Features { event_idx: true, indirect: true, ..Features::default() };
    let lane = || guests::virtio(split, false, 0, 1024, 60);
    let mut loops = Vec::new();
    for (mode_name, mode) in [("cross", Mode::Cross), ("switch", Mode::Switch)] {
        for (kind, unit, pairs) in [
            ("idle", "a poll", 1),
            ("idle", "a poll", 8),
            ("busy", "a frame", 1),
            ("rated", "a frame", 1),
        ] {
            let name = format!("worker {kind} {mode_name} {} queues", pairs * 2);
            if words.iter().all(|word| name.contains(word)) {
                let pairs = (0..pairs).map(|_| (lane(), lane())).collect();
                let terms = Terms { rated: kind == "rated", ..Terms::spin(clock) };
                let worker = Worker::new(mode, pairs, terms);
                loops.push(Loop { name, unit, worker, results: Vec::new() });
            }
        }
    }
    for name in POLICIES.iter().filter(|_| matches!(clock, Clock::Steps)) {
        let policy = name.parse().expect("a policy");
        let name = format!("worker {name} switch 2 queues");
        if words.iter().all(|word| name.contains(word)) {
            let worker = Worker::new(
                Mode::Switch,
                vec![(lane(), lane())],
                Terms { policy, ..Terms::spin(clock) },
            );
            loops.push(Loop { name, unit: ASLEEP, worker, results: Vec::new() });
        }
    }
    loops
}

fn print(name: &str, unit: &str, results: &mut [f64]) {
    results.sort_by(f64::total_cmp);
    let at = |part: usize| results[(results.len() - 1) * part / 4];
    let (low, ns, high) = (at(1), at(2), at(3));
    println!("{name:40} {ns:6.1} ns {unit} ({low:.1}-{high:.1}), {:5.2} M/s", 1e3 / ns);
}

/// Runs all cases, or those whose names contain all words of the command line.
pub fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let number = |name| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let counts = number("COUNTS");
    let (turns, turn, clock) = match counts {
        Some(frames) => (1, frames, Clock::Steps),
        None => (number("TURNS").map_or(TURNS, |n| n as usize), TURN, Clock::Real),
    };
    let split = Features { event_idx: true, indirect: true, ..Features::default() };
    let packed = Features { packed: true, ..split };
    let in_order = Features { in_order: true, ..split };
    let mut cases = Vec::new();
    let mut case = |name: String, mode, lanes: &dyn Fn() -> Vec<Lane>| {
        if words.iter().all(|word| name.contains(word)) {
            cases.push(Case::new(name, mode, lanes()));
        }
    };
    for len in [60, 1514] {
        for (layout, features) in [("split", split), ("packed", packed), ("in-order", in_order)] {
            for (mode_name, mode) in [("cross", Mode::Cross), ("switch", Mode::Switch)] {
                for offloads in [false, true] {
                    let words = if offloads { "offloads" } else { "plain" };
                    let name = format!("{layout} {mode_name} {words} {len}");
                    case(name, mode, &|| vec![guests::virtio(features, offloads, 0, 1024, len)]);
                }
            }
        }
    }
    let mut featured = Vec::new();
    for len in [60, 1514] {
        for (kind, tagged) in [("security+vlan", false), ("security+tag", true)] {
            let name = format!("split switch {kind} {len}");
            if words.iter().all(|word| name.contains(word)) {
                let lane = guests::virtio(split, false, 0, 1024, len);
                featured.push(Case::new(name, Mode::Switch, vec![lane]).with_rules(tagged));
            }
        }
        for option in OPTIONS {
            let name = format!("split switch {option} {len}");
            if words.iter().all(|word| name.contains(word)) {
                let lane = guests::virtio(split, false, 0, 1024, len);
                featured.push(Case::new(name, Mode::Switch, vec![lane]).with_option(option));
            }
        }
    }
    for len in [60, 1514] {
        for (layout, features) in [("split", split), ("packed", packed), ("in-order", in_order)] {
            let name = format!("{layout} switch logged {len}");
            case(name, Mode::Switch, &|| vec![guests::migrating(features, 1024, len)]);
        }
    }
    // As long as a Xen ring.
    for len in [60, 1500] {
        for queues in [1, 2] {
            let name = |kind: &str| format!("vif {kind} {queues} queues {len}");
            let mode = Mode::Switch;
            let virtio = |queue| guests::virtio(split, true, queue, guests::SLOTS, len);
            case(name("virtio"), mode, &|| (0..queues).map(virtio).collect());
            case(name("grants"), mode, &|| guests::vif(queues, false, len));
            case(name("static"), mode, &|| guests::vif(queues, true, len));
        }
    }
    cases.extend(featured);
    let mut scales = Vec::new();
    for len in [60, 1514].into_iter().filter(|_| counts.is_none()) {
        for (layout, features) in [("split", split), ("packed", packed)] {
            scales.extend(Scale::all(&words, layout, features, len));
        }
    }
    let threads = counts.is_none().then(|| threaded(&words, split));
    let mut threads = threads.unwrap_or_default();
    let mut loops = loops(&words, clock);
    let xen = words.iter().all(|word| XenRings::NAME.contains(word));
    let new = || XenRings { rings: Rings::new(&guests::agreed(1, false)), results: Vec::new() };
    let mut xen = xen.then(new);
    for _ in 0..turns {
        cases.iter_mut().for_each(|case| case.turn(turn));
        loops.iter_mut().for_each(|case| case.turn(turn));
        scales.iter_mut().for_each(|case| case.turn(10 * turn));
        threads.iter_mut().for_each(|case| case.turn(turn));
        xen.iter_mut().for_each(|case| case.turn(turn));
    }
    if counts.is_some() {
        let cases = cases.iter().map(|case| case.name.as_str());
        let loops = loops.iter().map(|case| case.name.as_str());
        let names = cases.chain(loops).chain(xen.iter().map(|_| XenRings::NAME));
        names.for_each(|name| println!("{name}  {turn} counted"));
        return;
    }
    cases.iter_mut().for_each(|case| print(&case.name, "a frame", &mut case.results));
    let cases = threads.iter_mut().map(|threaded| &mut threaded.case);
    cases.for_each(|case| print(&case.name, "a frame", &mut case.results));
    scales.iter_mut().for_each(|case| print(&case.name, "a frame", &mut case.results));
    loops.iter_mut().for_each(|case| print(&case.name, case.unit, &mut case.results));
    xen.iter_mut().for_each(|case| print(XenRings::NAME, "a frame", &mut case.results));
}
