//! No policy sleeps on a frame: every interleaving of the program's scheduler with its queues'
//! peers, up to small bounds, one load or store at a time.
//!
//! ```text
//!   peer:    publish ── wanted? ── kick
//!   worker:  serve ── policy ─┬─ poll
//!                             ├─ nap until t
//!                             └─ arm: ask ── re-check ─┬─ cold
//!                                                      └─ take back, poll
//!            all cold or napping: sleep ── woken by a kick or the time-out
//! ```
//! Memory is sequentially consistent here; that the rings' fences make it so where it matters is
//! shown by `crates/ring/tests/loom.rs`. Time passes by amounts that are chosen like any step.
//! What must hold is in `World::check`. Scheduler and policies are the product's; here its effects
//! are carried out on queues that are nothing but counters. The last test carries them out wrongly:
//! each mistake must be caught.

#[path = "common/search.rs"]
mod search;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use switch::fdb::{Fdb, PortId};
use switch::forward::{Forwarder, Mode, Source, Table};
use switch::poll::{Costs, Policy, State};
use switch::schedule::{BurstResult, Effect, Scheduler, Served, Then};
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;

use self::search::Steps;

const POLICIES: [&str; 13] = [
    "event",
    "napi",
    "napi:1",
    "timer:1000",
    "timer:20000",
    "coalesce:50,32",
    "coalesce:0,1",
    "coalesce:5/pending",
    "coalesce:0/pending",
    "spin",
    "adaptive",
    "adaptive:0",
    "adaptive:200",
];

/// Times that a burst may take: none to speak of; more than a wake-up costs; more than a window of
/// `adaptive`, or than `timer` waits. Policies without a clock get the first.
fn passes(policy: Policy) -> Vec<Ns> {
    let longer = match policy {
        Policy::Event | Policy::Napi { .. } | Policy::Spin => [None, None],
        Policy::Coalesce { .. } | Policy::CoalescePending { .. } => [Some(Ns::from_us(60)), None],
        Policy::Timer { .. } => [Some(Ns::from_ms(101)), None],
        Policy::Adaptive { .. } => [Some(Ns::from_us(30)), Some(Ns::from_ms(9))],
    };
    [Ns::new(100)].into_iter().chain(longer.into_iter().flatten()).collect()
}

/// How effects are carried out wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Not,
    /// It asks for a kick and does not re-check.
    NoRecheck,
    /// It re-checks, then asks.
    ChecksBeforeAsking,
    /// It does not take back that it wants no kicks.
    StaysDisarmed,
    /// It takes its asking back after it went cold.
    DisarmsLate,
    /// It sleeps on when a nap ends.
    NapsForever,
}

/// How a peer learns whether to kick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// By a flag that stays as it is.
    Flag,
    /// By the index of the frame that is worth a kick: asking is good for one.
    Index,
}

#[derive(Clone, Debug, Hash)]
enum Peer {
    Idle,
    /// It has published up to `published`, from here.
    Published(u16),
    Kicks,
}

/// What a queue and its peer share, and what the peer is about.
#[derive(Clone, Debug, Hash)]
struct Ring {
    published: u16,
    taken: u16,
    /// [`Asking::Flag`].
    flag: bool,
    /// [`Asking::Index`].
    index: u16,
    peer: Peer,
    /// Publications to come.
    left: u8,
    /// A kick that was not seen yet.
    kicked: bool,
}

/// What the worker does next; with the index of a queue.
#[derive(Clone, Copy, Debug, Hash)]
enum Next {
    /// Whatever the scheduler says.
    Effect,
    /// A burst of so many frames at most.
    Serve(usize, usize),
    Ask(usize),
    Recheck(usize),
    /// Takes its asking back; whether the re-check found something.
    TakeBack(usize, bool),
    /// For so long at most.
    Wait(Option<Ns>),
}

#[derive(Clone, Debug)]
struct World {
    broken: Broken,
    asking: Asking,
    now: Instant,
    /// See [`passes`].
    passes: Arc<[Ns]>,
    /// Bursts to come: the bound of the search.
    bursts: u8,
    scheduler: Scheduler<()>,
    rings: Vec<Ring>,
    next: Next,
}

/// What a search came by.
#[derive(Debug, Default)]
struct Seen {
    states: usize,
    slept: u64,
    napped: u64,
    woken: u64,
    recheck_found: u64,
}

impl Ring {
    /// Of a queue that is polled, whose peer is asked for no kicks.
    fn new() -> Self {
        // An index that is not asked for lies behind.
        let (flag, index, peer) = (false, u16::MAX, Peer::Idle);
        Self { published: 0, taken: 0, flag, index, peer, left: 0, kicked: false }
    }

    fn pending(&self) -> bool {
        self.published != self.taken
    }

    /// Whether a peer that published up to here from `old` is to kick.
    fn wants(&self, asking: Asking, old: u16) -> bool {
        match asking {
            Asking::Flag => self.flag,
            Asking::Index => (old..self.published).contains(&self.index),
        }
    }

    fn ask(&mut self) {
        (self.flag, self.index) = (true, self.taken);
    }

    fn take(&mut self, max: usize) -> usize {
        let frames = usize::from(self.published - self.taken).min(max);
        self.taken += frames as u16;
        frames
    }

    fn kick_is_on_its_way(&self, asking: Asking) -> bool {
        self.kicked
            || match self.peer {
                Peer::Idle => false,
                Peer::Published(old) => self.wants(asking, old),
                Peer::Kicks => true,
            }
    }
}

/// Longest nap of a policy; zero: it takes none.
fn nap_max(policy: Policy) -> Ns {
    match policy {
        Policy::Event | Policy::Napi { .. } | Policy::Spin => Ns::ZERO,
        Policy::Timer { hz } => Ns::from_secs(1) / u64::from(hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            Ns::from_us(usecs.into())
        }
        Policy::Adaptive { latency_us } => Ns::from_us(latency_us.into()),
    }
}

/// Forwards nothing: no destination is ever full.
fn forwarder() -> Forwarder {
    let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 16));
    Forwarder::new(Mode::Cross, 0, fdb, Arc::new(Table::new()), 1)
}

impl World {
    /// The index of a queue's ring.
    fn ring(&self, at: usize) -> usize {
        self.scheduler.queue(at).served.token as usize
    }

    /// The states that may come next, and what leads there.
    fn steps(&self, forwarder: &Forwarder, seen: &mut Seen) -> Steps<Self> {
        let mut steps = Vec::new();
        for i in 0..self.rings.len() {
            self.peer(i, &mut steps);
        }
        self.worker(forwarder, seen, &mut steps);
        steps
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut world = self.clone();
        change(&mut world);
        world
    }

    fn peer(&self, i: usize, steps: &mut Steps<Self>) {
        let ring = &self.rings[i];
        match ring.peer {
            Peer::Idle if ring.left > 0 => {
                for (name, frames) in [("publishes 1", 1), ("publishes 64", 64)] {
                    steps.push((
                        name,
                        self.with(|w| {
                            let ring = &mut w.rings[i];
                            ring.peer = Peer::Published(ring.published);
                            ring.published += frames;
                            ring.left -= 1;
                        }),
                    ));
                }
            }
            Peer::Idle => (),
            Peer::Published(old) => {
                let wants = ring.wants(self.asking, old);
                let peer = if wants { Peer::Kicks } else { Peer::Idle };
                steps.push(("asks whether to kick", self.with(|w| w.rings[i].peer = peer)));
            }
            Peer::Kicks => steps.push((
                "kicks",
                self.with(|w| {
                    w.rings[i].peer = Peer::Idle;
                    w.rings[i].kicked = true;
                }),
            )),
        }
    }

    fn worker(&self, forwarder: &Forwarder, seen: &mut Seen, steps: &mut Steps<Self>) {
        match self.next {
            Next::Effect => steps.push(("resumes", self.with(|w| w.resume(forwarder, seen)))),
            Next::Serve(at, max) if self.bursts > 0 => {
                for pass in &*self.passes {
                    steps.push(("serves", self.with(|w| w.serve(at, max, *pass))));
                }
            }
            Next::Serve(..) => (),
            Next::Ask(at) => steps.push((
                "asks for a kick",
                self.with(|w| {
                    if self.broken != Broken::StaysDisarmed {
                        w.rings[self.ring(at)].ask();
                    }
                    match self.broken {
                        Broken::NoRecheck | Broken::ChecksBeforeAsking => w.armed(true),
                        _ => w.next = Next::Recheck(at),
                    }
                }),
            )),
            Next::Recheck(at) => {
                let found = self.rings[self.ring(at)].pending();
                let disarms = self.scheduler.queue(at).poller().disarms();
                seen.recheck_found += u64::from(found);
                let step = self.with(|w| match self.broken {
                    Broken::ChecksBeforeAsking if !found => w.next = Next::Ask(at),
                    Broken::DisarmsLate if disarms => w.next = Next::TakeBack(at, found),
                    _ if found && disarms => w.next = Next::TakeBack(at, found),
                    _ => w.armed(!found),
                });
                steps.push(("re-checks", step));
            }
            Next::TakeBack(at, found) => steps.push((
                "wants no kicks",
                self.with(|w| {
                    w.rings[self.ring(at)].flag = false;
                    w.armed(!found);
                }),
            )),
            Next::Wait(timeout) => {
                if self.rings.iter().any(|ring| ring.kicked) {
                    seen.woken += 1;
                    steps.push(("sees kicks", self.with(|w| w.wake(Ns::ZERO))));
                } else if let Some(timeout) = timeout {
                    steps.push(("wakes up by itself", self.with(|w| w.wake(timeout))));
                } else {
                    seen.slept += 1;
                }
            }
        }
    }

    /// Up to the next effect that others may see, or that depends on them.
    fn resume(&mut self, forwarder: &Forwarder, seen: &mut Seen) {
        loop {
            match self.scheduler.next(self.now, forwarder) {
                Effect::Serve { at, max } => return self.next = Next::Serve(at, max),
                Effect::Disarm { at } => {
                    let ring = self.ring(at);
                    return self.rings[ring].flag = false;
                }
                Effect::PollKicks => return self.kicks(),
                Effect::Wait { timeout, .. } => {
                    seen.napped += u64::from(timeout.is_some());
                    let broken = self.broken == Broken::NapsForever;
                    return self.next = Next::Wait(timeout.filter(|_| !broken));
                }
                Effect::Pause => self.now += Ns::new(100),
                Effect::RunCommands | Effect::Measure { .. } => {}
                other => panic!("no reason for {other:?}"),
            }
        }
    }

    fn serve(&mut self, at: usize, max: usize, pass: Ns) {
        self.bursts -= 1;
        let ring = self.ring(at);
        let frames = self.rings[ring].take(max);
        self.next = Next::Effect;
        if self.scheduler.record_burst(&BurstResult { frames, ..BurstResult::default() })
            == Then::Arm
        {
            let first = self.broken == Broken::ChecksBeforeAsking;
            self.next = if first { Next::Recheck(at) } else { Next::Ask(at) };
        }
        self.now += pass;
    }

    fn armed(&mut self, nothing: bool) {
        self.scheduler.record_arm(nothing, None);
        self.next = Next::Effect;
    }

    /// Takes the kicks that came.
    fn kicks(&mut self) {
        for (token, ring) in (0..).zip(&mut self.rings) {
            if std::mem::take(&mut ring.kicked) {
                self.scheduler.kick(token, self.now);
            }
        }
    }

    fn wake(&mut self, slept: Ns) {
        self.now += slept;
        self.kicks();
        self.scheduler.record_wait(true);
        self.next = Next::Effect;
    }
}

impl search::State for World {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.asking == Asking::Flag).hash(&mut hasher);
        let Self { now, bursts, scheduler, rings, next, .. } = self;
        (now, bursts, scheduler, rings, next).hash(&mut hasher);
        hasher.finish()
    }

    fn check(&self) -> Result<(), String> {
        for queue in self.scheduler.queues() {
            let ring = &self.rings[queue.served.token as usize];
            let until = queue.nap_until();
            match queue.state() {
                State::Cold if ring.pending() && !ring.kick_is_on_its_way(self.asking) => {
                    return Err("cold with a frame, and no kick is on its way".into());
                }
                State::Warm if until > self.now + nap_max(queue.poller().policy()) => {
                    return Err(format!("naps from {:?} to {until:?}", self.now));
                }
                _ => (),
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        // The search ends here, whoever has something left to do.
        if self.bursts == 0 {
            return Ok(());
        }
        match self.rings.iter().any(Ring::pending) {
            true => Err("the end, and frames are left".into()),
            false => Ok(()),
        }
    }
}

/// Workers with queues of a policy, after what made them different: fresh, after lone frames,
/// after quick ones, after a steady stream, and after a stream that turned into questions and
/// answers. Beside that queue there may be one that is cold, unless it never is.
fn worlds(policy: Policy, broken: Broken, asking: Asking, queues: usize) -> Vec<World> {
    let adaptive = matches!(policy, Policy::Adaptive { .. });
    let lives: &[&[(u64, u64)]] = match policy {
        Policy::Adaptive { .. } => &[
            &[],
            &[(1_000_000, 20)],
            &[(2_000, 2_000)],
            &[(10_000, 4_000)],
            &[(10_000, 4_000), (0, 100)],
        ],
        _ => &[&[]],
    };
    let mut passes = passes(policy);
    passes.truncate(if queues == 1 { 3 } else { 2 });
    let passes: Arc<[Ns]> = passes.into();
    let world = |costs, life: &[(u64, u64)]| {
        let mut world = World {
            broken,
            asking,
            now: Instant::from_ns(1_000),
            passes: passes.clone(),
            bursts: if queues == 1 && !adaptive { 5 } else { 4 },
            scheduler: Scheduler::new(0, costs),
            rings: vec![Ring::new(); queues],
            next: Next::Effect,
        };
        for token in (0..queues as u64).rev() {
            let tuning = Arc::new(Tuning::new(policy));
            let source = Source::new(PortId(token as u16), 0, Arc::default(), tuning);
            world.scheduler.add(Served { token, source, notifies: true, of: () }, world.now);
            world.live(if token == 0 { life } else { &[(0, 0)] }, token);
        }
        world.rings[0].left = if queues == 1 { 2 } else { 1 };
        world.rings[queues - 1].left = if queues == 1 { 2 } else { 1 };
        world
    };
    let one_cpu = adaptive.then(|| world(Costs::ONE_CPU, &[]));
    lives.iter().map(|life| world(Costs::TYPICAL, life)).chain(one_cpu).collect()
}

impl World {
    /// Goes through a life of queue `token`: so many frames, each so many ns after the one before;
    /// 0: 3 us after that was served. Ends with the burst that finds the last; without any, when
    /// the queue is cold, or after a while.
    fn live(&mut self, life: &[(u64, u64)], token: u64) {
        let forwarder = forwarder();
        let mut came = self.now;
        for (gap, count) in life {
            came = if *gap > 0 { came.max(self.now) } else { self.now + Ns::from_us(3) };
            let (mut left, mut polls) = (*count, 0);
            while left > 0 || *count == 0 && polls < 10_000 {
                match self.scheduler.next(self.now, &forwarder) {
                    Effect::Serve { at, .. } => {
                        polls += 1;
                        let found = left > 0 && self.ring(at) as u64 == token && came <= self.now;
                        if found {
                            left -= 1;
                            came = if *gap > 0 {
                                came + Ns::new(*gap)
                            } else {
                                self.now + Ns::from_us(3)
                            };
                        }
                        let took =
                            BurstResult { frames: usize::from(found), ..BurstResult::default() };
                        self.now += Ns::new(100);
                        if self.scheduler.record_burst(&took) == Then::Arm {
                            let ring = self.ring(at);
                            self.rings[ring].ask();
                            self.scheduler.record_arm(true, None);
                        }
                    }
                    Effect::Disarm { at } => {
                        let ring = self.ring(at);
                        self.rings[ring].flag = false;
                    }
                    Effect::Wait { timeout: Some(length), .. } => {
                        self.now += length + Ns::from_us(5);
                        self.scheduler.record_wait(true);
                    }
                    Effect::Wait { timeout: None, .. } if left == 0 => return,
                    Effect::Wait { timeout: None, .. } => {
                        self.now = self.now.max(came) + Ns::from_us(5);
                        self.scheduler.kick(token, self.now);
                        self.scheduler.record_wait(true);
                    }
                    Effect::Pause => self.now += Ns::new(100),
                    _ => {}
                }
            }
        }
    }
}

/// Searches everything from one queue of `policy`, and from two.
fn search(policy: &str, broken: Broken, queues: usize) -> Result<Seen, String> {
    let policy: Policy = policy.parse().unwrap();
    let (mut seen, mut states, forwarder) = (Seen::default(), HashSet::new(), forwarder());
    for asking in [Asking::Flag, Asking::Index] {
        for world in worlds(policy, broken, asking, queues) {
            search::search(world, &mut states, |world| world.steps(&forwarder, &mut seen))?;
        }
    }
    seen.states = states.len();
    Ok(seen)
}

#[test]
fn no_policy_sleeps_on_a_frame() {
    for policy in POLICIES {
        let seen = search(policy, Broken::Not, 1).unwrap_or_else(|e| panic!("{policy}: {e}"));
        let Seen { states, slept, napped, woken, recheck_found } = &seen;
        println!("{policy}: {states} states, {slept} sleeps, {napped} naps, {woken} wake-ups");
        let policy: Policy = policy.parse().unwrap();
        assert_eq!(*slept > 0, policy != Policy::Spin);
        assert_eq!(*recheck_found > 0, policy != Policy::Spin);
        assert_eq!(*napped > 0, nap_max(policy) > Ns::ZERO && policy.to_string() != "adaptive:0");
    }
}

#[test]
fn nor_beside_a_queue_that_is_hot() {
    for policy in POLICIES {
        let seen = search(policy, Broken::Not, 2).unwrap_or_else(|e| panic!("{policy}: {e}"));
        println!("{policy}: {} states", seen.states);
        assert!(seen.woken > 0 || policy == "spin");
    }
}

#[test]
fn canary_every_broken_worker_is_caught() {
    let sleeps = ["event", "napi", "timer:1000", "coalesce:50,32", "adaptive"];
    let naps = ["timer:1000", "coalesce:50,32", "adaptive"];
    for (broken, policies) in [
        (Broken::NoRecheck, &sleeps[..]),
        (Broken::ChecksBeforeAsking, &sleeps[1..]),
        (Broken::StaysDisarmed, &sleeps[1..]),
        (Broken::DisarmsLate, &sleeps[1..]),
        (Broken::NapsForever, &naps[..]),
    ] {
        for policy in policies {
            let found = search(policy, broken, 1);
            assert!(found.is_err(), "{policy} with {broken:?} was not caught");
        }
    }
}
