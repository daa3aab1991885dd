//! No policy sleeps on a frame: every interleaving of a worker with its queues' peers, up to small
//! bounds, one load or store at a time.
//!
//! ```text
//!   peer:    publish ── wanted? ── kick
//!   worker:  look ── policy ─┬─ poll
//!                            ├─ nap until t
//!                            └─ arm: ask ── look again ─┬─ cold
//!                                                       └─ take back, poll
//!            all cold or napping: sleep ── woken by a kick or the time-out
//! ```
//! Memory is sequentially consistent here; that the rings' fences make it so where it matters is
//! shown by `crates/ring/tests/loom.rs`. Time passes by amounts that are chosen like any step.
//! What must hold is in `World::check`. The last tests break the worker: each must be caught.
//!
//! The policies are the product's; the worker mirrors `crates/pvswitch/src/worker.rs` and changes
//! with it: `Next::Look` and what follows it `Worker::serve`, from `poller.next` on, whose
//! `ingress.arm()` is `Next::Ask` and `Next::LookAgain`; `Next::Wait` is `Worker::wait` with
//! `Worker::heat`.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

use switch::poll::{Action, Costs, Policy, Poller};

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

/// Time that may pass before a look: none to speak of; more than a wake-up costs; more than a
/// window of `adaptive`, or than `timer` waits. Those that do not look at the time get the first.
fn passes_ns(policy: Policy) -> &'static [u64] {
    match policy {
        Policy::Event | Policy::Napi { .. } | Policy::Spin => &[100],
        Policy::Coalesce { .. } | Policy::CoalescePending { .. } => &[100, 60_000],
        Policy::Timer { .. } => &[100, 101_000_000],
        Policy::Adaptive { .. } => &[100, 30_000, 9_000_000],
    }
}

/// How the worker is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Not,
    /// It asks for a kick and does not look again.
    NoSecondLook,
    /// It looks again, then asks.
    LooksBeforeAsking,
    /// It does not take back that it wants no kicks.
    StaysDisarmed,
    /// It takes its asking back after it went cold.
    DisarmsLate,
    /// It forgets when a nap ends.
    NapsForEver,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Status {
    Hot,
    Naps(u64),
    Cold,
}

#[derive(Clone, Debug)]
struct Queue {
    poller: Poller,
    /// Hash of what `poller` shows of itself.
    print: u64,
    status: Status,
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
#[derive(Clone, Debug, Hash)]
enum Next {
    Round(usize),
    Look(usize),
    Ask(usize),
    LookAgain(usize),
    Disarm(usize),
    Wait,
}

#[derive(Clone, Debug)]
struct World {
    broken: Broken,
    asking: Asking,
    now: u64,
    /// See [`passes_ns`].
    passes_ns: &'static [u64],
    /// Looks to come: the bound of the search.
    looks: u8,
    queues: Vec<Queue>,
    next: Next,
}

/// What a search came by.
#[derive(Debug, Default)]
struct Seen {
    states: HashSet<u64>,
    slept: u64,
    napped: u64,
    woken: u64,
    second_look_found: u64,
}

impl Queue {
    fn new(poller: Poller, status: Status, asking: Asking, left: u8) -> Self {
        let flag = !poller.disarms();
        // An index that is not asked for lies behind.
        let index = if flag && asking == Asking::Index { 0 } else { u16::MAX };
        let (peer, kicked) = (Peer::Idle, false);
        let print = print_of(&poller);
        Self { poller, print, status, published: 0, taken: 0, flag, index, peer, left, kicked }
    }

    /// What tells two states apart.
    fn key(&self) -> impl Hash + '_ {
        let Self { print, status, published, taken, flag, index, peer, left, kicked, .. } = self;
        (print, status, published, taken, flag, index, peer, left, kicked)
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

    fn disarm(&mut self) {
        if self.poller.disarms() {
            self.flag = false;
        }
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

/// Longest nap of a policy, in ns; 0: it takes none.
fn nap_ns_max(policy: Policy) -> u64 {
    match policy {
        Policy::Event | Policy::Napi { .. } | Policy::Spin => 0,
        Policy::Timer { hz } => 1_000_000_000 / u64::from(hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            u64::from(usecs) * 1000
        }
        Policy::Adaptive { latency_us } => u64::from(latency_us) * 1000,
    }
}

impl World {
    /// What must hold in every state.
    fn check(&self) -> Result<(), String> {
        for queue in &self.queues {
            let frames = queue.pending();
            match queue.status {
                Status::Cold if frames && !queue.kick_is_on_its_way(self.asking) => {
                    return Err("cold with a frame, and no kick is on its way".into());
                }
                Status::Naps(until) if until > self.now + nap_ns_max(queue.poller.policy()) => {
                    return Err(format!("naps from {} to {until}", self.now));
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// Whether the worker sleeps, and until when at most.
    fn sleeps(&self) -> Option<Option<u64>> {
        let hot = self.queues.iter().any(|q| q.status == Status::Hot);
        let until = |q: &Queue| if let Status::Naps(t) = q.status { Some(t) } else { None };
        (!hot).then(|| self.queues.iter().filter_map(until).min())
    }

    /// The states that may come next, and what leads there.
    fn steps(&self, seen: &mut Seen) -> Vec<(&'static str, Self)> {
        let mut steps = Vec::new();
        for i in 0..self.queues.len() {
            self.peer(i, &mut steps);
        }
        self.worker(seen, &mut steps);
        steps
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut world = self.clone();
        change(&mut world);
        world
    }

    fn peer(&self, i: usize, steps: &mut Vec<(&'static str, Self)>) {
        let queue = &self.queues[i];
        match queue.peer {
            Peer::Idle if queue.left > 0 => {
                for (name, frames) in [("publishes 1", 1), ("publishes 64", 64)] {
                    steps.push((
                        name,
                        self.with(|w| {
                            let queue = &mut w.queues[i];
                            queue.peer = Peer::Published(queue.published);
                            queue.published += frames;
                            queue.left -= 1;
                        }),
                    ));
                }
            }
            Peer::Idle => (),
            Peer::Published(old) => {
                let wants = queue.wants(self.asking, old);
                let peer = if wants { Peer::Kicks } else { Peer::Idle };
                steps.push(("asks whether to kick", self.with(|w| w.queues[i].peer = peer)));
            }
            Peer::Kicks => steps.push((
                "kicks",
                self.with(|w| {
                    w.queues[i].peer = Peer::Idle;
                    w.queues[i].kicked = true;
                }),
            )),
        }
    }

    fn worker(&self, seen: &mut Seen, steps: &mut Vec<(&'static str, Self)>) {
        match self.next {
            Next::Round(i) => {
                let next = match self.queues.get(i).map(|q| &q.status) {
                    None => Next::Wait,
                    Some(Status::Hot) => Next::Look(i),
                    Some(Status::Naps(until)) if *until <= self.now => Next::Look(i),
                    Some(_) => Next::Round(i + 1),
                };
                steps.push(("goes on", self.with(|w| w.next = next)));
            }
            Next::Look(i) if self.looks > 0 => {
                for pass in self.passes_ns {
                    steps.push(("looks", self.with(|w| w.look(i, *pass, seen))));
                }
            }
            Next::Look(_) => (),
            Next::Ask(i) => steps.push((
                "asks for a kick",
                self.with(|w| {
                    if self.broken != Broken::StaysDisarmed {
                        w.queues[i].ask();
                    }
                    w.next = Next::LookAgain(i);
                    if matches!(self.broken, Broken::NoSecondLook | Broken::LooksBeforeAsking) {
                        w.queues[i].status = Status::Cold;
                        w.next = Next::Round(i + 1);
                    }
                }),
            )),
            Next::LookAgain(i) => {
                let found = self.queues[i].pending();
                seen.second_look_found += u64::from(found);
                let step = self.with(|w| {
                    w.queues[i].status = if found { Status::Hot } else { Status::Cold };
                    w.next = match self.broken {
                        _ if found => Next::Disarm(i),
                        Broken::LooksBeforeAsking => Next::Ask(i),
                        Broken::DisarmsLate => Next::Disarm(i),
                        _ => Next::Round(i + 1),
                    };
                });
                steps.push(("looks again", step));
            }
            Next::Disarm(i) => steps.push((
                "wants no kicks",
                self.with(|w| {
                    w.queues[i].disarm();
                    w.next = Next::Round(i + 1);
                }),
            )),
            Next::Wait => self.wait(seen, steps),
        }
    }

    fn look(&mut self, i: usize, pass: u64, seen: &mut Seen) {
        self.looks -= 1;
        self.now += pass;
        let queue = &mut self.queues[i];
        let frames = usize::from(queue.published - queue.taken).min(queue.poller.budget());
        queue.taken += frames as u16;
        queue.status = Status::Hot;
        self.next = Next::Round(i + 1);
        let action = queue.poller.next(frames, self.now);
        queue.print = print_of(&queue.poller);
        match action {
            Action::Poll => (),
            Action::Until(until) => {
                assert!(until > self.now, "a nap that is over");
                seen.napped += 1;
                queue.status = Status::Naps(until);
                if self.broken == Broken::NapsForEver {
                    queue.status = Status::Naps(u64::MAX);
                }
            }
            Action::Arm if self.broken == Broken::LooksBeforeAsking => {
                self.next = Next::LookAgain(i);
            }
            Action::Arm => self.next = Next::Ask(i),
        }
    }

    /// Sleeps, or looks for kicks between two rounds.
    fn wait(&self, seen: &mut Seen, steps: &mut Vec<(&'static str, Self)>) {
        let sleeps = self.sleeps();
        for i in (0..self.queues.len()).filter(|i| self.queues[*i].kicked) {
            seen.woken += 1;
            steps.push((
                "sees a kick",
                self.with(|w| {
                    let queue = &mut w.queues[i];
                    queue.kicked = false;
                    queue.poller.wake(self.now);
                    queue.print = print_of(&queue.poller);
                    w.next = Next::Wait;
                    if queue.status != Status::Hot {
                        queue.status = Status::Hot;
                        queue.disarm();
                    }
                }),
            ));
        }
        match sleeps {
            None => steps.push(("goes round", self.with(|w| w.next = Next::Round(0)))),
            Some(None) => seen.slept += 1,
            Some(Some(until)) => {
                let step = self.with(|w| {
                    w.now = w.now.max(until);
                    w.next = Next::Round(0);
                });
                steps.push(("wakes up by itself", step));
            }
        }
    }

    /// All states from here, depth first; the way to the first in which something does not hold.
    fn search(self, seen: &mut Seen) -> Result<(), String> {
        let mut way: Vec<(&'static str, Vec<(&'static str, Self)>)> = vec![("", vec![("", self)])];
        while let Some((_, steps)) = way.last_mut() {
            let Some((name, world)) = steps.pop() else {
                way.pop();
                continue;
            };
            if !seen.states.insert(world.hash()) {
                continue;
            }
            let next = world.steps(seen);
            // Nobody has anything left to do: then nothing may be left over.
            let stuck = next.is_empty() && world.looks > 0;
            let left = stuck && world.queues.iter().any(Queue::pending);
            let held = world.check();
            if let Err(what) = if left { Err("the end, and frames are left".into()) } else { held }
            {
                let names: Vec<_> = way.iter().map(|(name, _)| *name).chain([name]).collect();
                return Err(format!("{what}: {}: {world:?}", names.join(", ")));
            }
            way.push((name, next));
        }
        Ok(())
    }

    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let bits = self.queues[0].poller.policy().to_bits();
        (bits, self.now, self.looks, &self.next).hash(&mut hasher);
        (self.asking == Asking::Flag).hash(&mut hasher);
        for queue in &self.queues {
            queue.key().hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Hash of what a poller shows of itself.
fn print_of(poller: &Poller) -> u64 {
    struct Words(DefaultHasher);
    impl std::fmt::Write for Words {
        fn write_str(&mut self, s: &str) -> std::fmt::Result {
            self.0.write(s.as_bytes());
            Ok(())
        }
    }
    let mut words = Words(DefaultHasher::new());
    let _ = write!(words, "{poller:?}");
    words.0.finish()
}

/// Pollers of a policy at a time, after what made them different: fresh, after lone frames, after
/// quick ones, after a steady stream, and after a stream that turned into questions and answers.
fn pollers(policy: Policy) -> Vec<(Poller, Status, u64)> {
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
    let fresh = |costs| Poller::new(policy, costs, 1_000);
    let adaptive = matches!(policy, Policy::Adaptive { .. });
    let one_cpu = adaptive.then(|| live(fresh(Costs::ONE_CPU), &[]));
    lives.iter().map(|life| live(fresh(Costs::TYPICAL), life)).chain(one_cpu).collect()
}

/// So many frames, each so many ns after the one before; 0: 3 us after that was served. Ends with
/// the look that finds the last.
fn live(mut poller: Poller, life: &[(u64, u64)]) -> (Poller, Status, u64) {
    let (mut now, mut came, mut status) = (1_000, 1_000, Status::Hot);
    for (gap, count) in life {
        let mut left = *count;
        came = if *gap > 0 { came.max(now) } else { now };
        while left > 0 {
            let found = came <= now;
            if found {
                left -= 1;
                came = if *gap > 0 { came + gap } else { now + 3_000 };
            }
            match poller.next(usize::from(found), now) {
                Action::Poll => (now, status) = (now + 100, Status::Hot),
                Action::Until(until) if left > 0 => now = until + 5_000,
                Action::Until(until) => status = Status::Naps(until),
                Action::Arm => {
                    now = now.max(came) + 5_000;
                    poller.wake(now);
                }
            }
        }
    }
    (poller, status, now)
}

/// Searches everything from one queue of `policy`, and from two.
fn search(policy: &str, broken: Broken, queues: usize) -> Result<Seen, String> {
    let policy: Policy = policy.parse().unwrap();
    let mut seen = Seen::default();
    for asking in [Asking::Flag, Asking::Index] {
        for (poller, status, now) in pollers(policy) {
            let adaptive = matches!(policy, Policy::Adaptive { .. });
            let looks = if queues == 1 && !adaptive { 5 } else { 4 };
            let (left, times) = if queues == 1 { (2, 3) } else { (1, 2) };
            let passes_ns = passes_ns(policy);
            let passes_ns = &passes_ns[..passes_ns.len().min(times)];
            let hot = Queue::new(poller.clone(), status, asking, left);
            let mut cold = Queue::new(poller, Status::Cold, asking, 1);
            cold.ask();
            let queues = [hot, cold].into_iter().take(queues).collect();
            let next = Next::Round(0);
            let world = World { broken, asking, now, passes_ns, looks, queues, next };
            world.search(&mut seen)?;
        }
    }
    Ok(seen)
}

#[test]
fn no_policy_sleeps_on_a_frame() {
    for policy in POLICIES {
        let seen = search(policy, Broken::Not, 1).unwrap_or_else(|e| panic!("{policy}: {e}"));
        let Seen { states, slept, napped, woken, second_look_found } = &seen;
        let states = states.len();
        println!("{policy}: {states} states, {slept} sleeps, {napped} naps, {woken} wake-ups");
        let policy: Policy = policy.parse().unwrap();
        assert_eq!(*slept > 0, policy != Policy::Spin);
        assert_eq!(*second_look_found > 0, policy != Policy::Spin);
        assert_eq!(*napped > 0, nap_ns_max(policy) > 0 && policy.to_string() != "adaptive:0");
    }
}

#[test]
fn nor_beside_a_queue_that_is_hot() {
    for policy in POLICIES {
        let seen = search(policy, Broken::Not, 2).unwrap_or_else(|e| panic!("{policy}: {e}"));
        println!("{policy}: {} states", seen.states.len());
        assert!(seen.woken > 0);
    }
}

#[test]
fn canary_every_broken_worker_is_caught() {
    let sleeps = ["event", "napi", "timer:1000", "coalesce:50,32", "adaptive"];
    let naps = ["timer:1000", "coalesce:50,32", "adaptive"];
    for (broken, policies) in [
        (Broken::NoSecondLook, &sleeps[..]),
        (Broken::LooksBeforeAsking, &sleeps[1..]),
        (Broken::StaysDisarmed, &sleeps[1..]),
        (Broken::DisarmsLate, &sleeps[1..]),
        (Broken::NapsForEver, &naps[..]),
    ] {
        for policy in policies {
            let found = search(policy, broken, 1);
            assert!(found.is_err(), "{policy} with {broken:?} was not caught");
        }
    }
}
