//! Queues that move between two workers: every interleaving of the program's decisions, up to
//! small bounds, one load, store or command at a time.
//!
//! ```text
//!   control:   start, stop, other placement, move by load ──▶ commands of a worker
//!   worker:    commands, serve, arm, sleep; give ──▶ hand over ──▶ commands of the other
//!   guest:     publish ── wanted? ── kick
//! ```
//! Which worker serves a queue ([`Assignments`]), what waits for a worker ([`Commands`]) and what
//! it does when ([`Scheduler`]) are the product's objects. As in the program, assignments and
//! commands that follow from a change are under one lock, and a queue's ring is under its own.
//!
//! What must hold: a queue that was started is with exactly one worker, or on its way to one; a
//! worker that has one that was stopped is about to drop it; none sleeps on a frame. The last test
//! carries the decisions out wrongly: each mistake must be caught.

#[path = "common/search.rs"]
mod search;

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use switch::fdb::{Fdb, PortId};
use switch::forward::{Forwarder, Mode, Source, Table};
use switch::poll::{Costs, Policy, State};
use switch::schedule::{
    Assignments, BurstResult, COMMANDS_MAX, Command, Commands, Effect, GiveAway, Placement,
    Scheduler, Then, token,
};
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;

use self::search::Steps;

/// With the generation of its assignment.
type Served = switch::schedule::Served<u64>;
type Cmd = Command<Served, ()>;

/// How decisions are carried out wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Not,
    /// A queue that is handed over is taken for the one that is assigned now.
    AnyGeneration,
    /// A queue that is handed over is not begun by the other worker.
    NotBegun,
    /// A stopped queue is not dropped by its worker.
    NotDropped,
    /// A queue that starts again begins where the placement wants it, whoever served it before.
    BeginsElsewhere,
}

#[derive(Clone, Debug, Hash)]
enum Peer {
    Idle,
    /// It has published one more.
    Published,
    Kicks,
}

/// What a queue and its guest share.
#[derive(Clone, Debug, Hash)]
struct Ring {
    token: u64,
    active: bool,
    pending: u16,
    /// The guest is to kick.
    wants: bool,
    peer: Peer,
    /// Publications to come.
    left: u8,
    /// A kick that a worker who waits for them did not see yet: each has its own edge.
    kicked: [bool; 2],
    /// The worker that holds its lock.
    locked: Option<usize>,
}

/// What a worker does next.
#[derive(Clone, Debug)]
enum Next {
    Effect,
    Commands(VecDeque<Cmd>),
    Serve(usize, usize),
    Disarm(usize),
    Ask(usize),
    Recheck(usize),
    TakeBack(usize, bool),
    Give(Vec<Served>, usize),
    Wait(Option<Ns>),
}

#[derive(Clone, Debug)]
struct Worker {
    scheduler: Scheduler<u64>,
    commands: Commands<Served, ()>,
    /// What was sent and not taken, for the hash.
    sent: Vec<(u8, u64, u64)>,
    /// Where queues that it is about to give away go.
    gives: Vec<(u64, usize)>,
    next: Next,
}

#[derive(Clone, Debug)]
struct World {
    broken: Broken,
    policy: Policy,
    now: Instant,
    assignments: Assignments,
    workers: [Worker; 2],
    rings: Vec<Ring>,
    /// Bursts, and orders of the control thread, to come: the bounds of the search.
    bursts: u8,
    orders: u8,
}

#[derive(Debug, Default)]
struct Seen {
    states: usize,
    slept: u64,
    handed_over: u64,
    refused: u64,
}

fn forwarder() -> Forwarder {
    let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 16));
    Forwarder::new(Mode::Cross, 0, fdb, Arc::new(Table::new()), 1)
}

/// What a command is, for the hash.
fn words(command: &Cmd) -> (u8, u64, u64) {
    match command {
        Command::Begin(served) => (0, served.token, served.of),
        Command::Drop(token) => (1, *token, 0),
        Command::GiveAway(token, to) => (2, *token, *to as u64),
        Command::Poll(token) => (3, *token, 0),
        Command::Kick(token) => (4, *token, 0),
        Command::Table(()) => (5, 0, 0),
    }
}

impl World {
    fn new(policy: Policy, broken: Broken, ports: &[u16], bursts: u8, orders: u8) -> Self {
        let worker = |n| Worker {
            scheduler: Scheduler::new(n, Costs::TYPICAL),
            commands: Commands::default(),
            sent: Vec::new(),
            gives: Vec::new(),
            next: Next::Effect,
        };
        let ring = |port: &u16| Ring {
            token: token(PortId(*port), 0, false),
            active: false,
            pending: 0,
            wants: true,
            peer: Peer::Idle,
            left: 1,
            kicked: [false; 2],
            locked: None,
        };
        let mut world = Self {
            broken,
            policy,
            now: Instant::from_ns(1_000),
            assignments: Assignments::new(2, Placement::Balanced),
            workers: [worker(0), worker(1)],
            rings: ports.iter().map(ring).collect(),
            bursts,
            orders,
        };
        (0..ports.len()).for_each(|i| world.start(i));
        world
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut world = self.clone();
        change(&mut world);
        world
    }

    fn of_token(&mut self, token: u64) -> &mut Ring {
        self.rings.iter_mut().find(|ring| ring.token == token).expect("a ring")
    }

    /// The ring of a worker's queue.
    fn ring(&mut self, w: usize, at: usize) -> &mut Ring {
        let token = self.workers[w].scheduler.queue(at).served.token;
        self.of_token(token)
    }

    // ---- the control thread: each under the lock of the assignments ----

    fn start(&mut self, i: usize) {
        self.rings[i].active = true;
        self.rings[i].wants = true;
        let token = self.rings[i].token;
        let assignment = self.assignments.place(token);
        let mut follow = assignment.follow(token);
        let mut worker = assignment.worker;
        if self.broken == Broken::BeginsElsewhere
            && let Some(GiveAway { from, to, .. }) = follow.take()
        {
            worker =
                self.assignments.hand_over(token, assignment.generation, from, to).expect("placed");
        }
        let queue = switch::schedule::queue_id(token);
        let tuning = Arc::new(Tuning::new(self.policy));
        let source = Source::new(queue.port, queue.queue, Arc::default(), tuning);
        self.begin(worker, Served { token, source, notifies: true, of: assignment.generation });
        self.give_away(follow);
    }

    fn begin(&mut self, w: usize, served: Served) {
        let worker = &mut self.workers[w];
        worker.sent.push((0, served.token, served.of));
        worker.commands.begin(served.token, served);
    }

    fn stop(&mut self, i: usize) {
        let ring = &mut self.rings[i];
        (ring.active, ring.pending, ring.peer) = (false, 0, Peer::Idle);
        let token = ring.token;
        if let Some(w) = self.assignments.remove(token)
            && self.broken != Broken::NotDropped
        {
            self.workers[w].sent.push((1, token, 0));
            self.workers[w].commands.drop_queue(token);
        }
    }

    fn give_away(&mut self, moves: impl IntoIterator<Item = GiveAway>) {
        for GiveAway { token, from, to } in moves {
            self.workers[from].sent.push((2, token, to as u64));
            self.workers[from].commands.give_away(token, to);
        }
    }

    fn control(&self, steps: &mut Steps<Self>) {
        if self.orders == 0 {
            return;
        }
        let mut order = |name, change: &dyn Fn(&mut Self)| {
            steps.push((
                name,
                self.with(|w| {
                    w.orders -= 1;
                    change(w);
                }),
            ));
        };
        for i in 0..self.rings.len() {
            let ring = &self.rings[i];
            // A ring stops and starts under its lock.
            if ring.locked.is_some() {
                continue;
            }
            match ring.active {
                true => order("stops a queue", &|w| w.stop(i)),
                false => order("starts a queue", &|w| w.start(i)),
            }
            for to in 0..2 {
                if let Some(give) = self.assignments.request_move(ring.token, to) {
                    order("moves a queue", &|w| w.give_away([give]));
                }
            }
        }
        for placement in [Placement::Balanced, Placement::PerPort] {
            if placement != self.assignments.placement() {
                order("sets the placement", &|w| {
                    let moves = w.assignments.set_placement(placement);
                    w.give_away(moves);
                });
            }
        }
    }

    // ---- guests ----

    fn guest(&self, i: usize, steps: &mut Steps<Self>) {
        let ring = &self.rings[i];
        if !ring.active {
            return;
        }
        let step = |change: fn(&mut Ring)| self.with(|w| change(&mut w.rings[i]));
        match ring.peer {
            Peer::Idle if ring.left > 0 => steps.push((
                "publishes",
                step(|ring| {
                    ring.pending += 1;
                    ring.left -= 1;
                    ring.peer = Peer::Published;
                }),
            )),
            Peer::Idle => {}
            Peer::Published => steps.push((
                "asks whether to kick",
                step(|ring| ring.peer = if ring.wants { Peer::Kicks } else { Peer::Idle }),
            )),
            Peer::Kicks => steps.push((
                "kicks",
                self.with(|world| {
                    let waits = |w: usize| world.workers[w].scheduler.find(ring.token).is_some();
                    let sees = [0, 1].map(waits);
                    let ring = &mut world.rings[i];
                    ring.peer = Peer::Idle;
                    (0..2).for_each(|w| ring.kicked[w] |= sees[w]);
                }),
            )),
        }
    }

    // ---- workers ----

    fn worker(&self, w: usize, forwarder: &Forwarder, seen: &mut Seen, steps: &mut Steps<Self>) {
        let free = |at: usize| {
            let token = self.workers[w].scheduler.queue(at).served.token;
            let ring = self.rings.iter().find(|ring| ring.token == token).expect("a ring");
            ring.locked.is_none_or(|holder| holder == w)
        };
        match &self.workers[w].next {
            Next::Effect => steps.push(("resumes", self.with(|world| world.resume(w, forwarder)))),
            Next::Commands(_) => steps.push(("runs a command", self.with(|world| world.run(w)))),
            Next::Serve(at, max) if self.bursts > 0 && free(*at) => {
                steps.push(("serves", self.with(|world| world.serve(w, *at, *max))));
            }
            Next::Disarm(at) if free(*at) => steps.push((
                "wants no kicks",
                self.with(|world| {
                    world.ring(w, *at).wants = false;
                    world.workers[w].next = Next::Effect;
                }),
            )),
            Next::Ask(at) if free(*at) => steps.push((
                "asks for a kick",
                self.with(|world| {
                    let ring = world.ring(w, *at);
                    (ring.wants, ring.locked) = (true, Some(w));
                    world.workers[w].next = Next::Recheck(*at);
                }),
            )),
            Next::Recheck(at) => {
                let disarms = self.workers[w].scheduler.queue(*at).poller().disarms();
                steps.push((
                    "re-checks",
                    self.with(|world| {
                        let ring = world.ring(w, *at);
                        let found = ring.active && ring.pending > 0;
                        match found && disarms {
                            true => world.workers[w].next = Next::TakeBack(*at, found),
                            false => world.armed(w, *at, !found),
                        }
                    }),
                ));
            }
            Next::TakeBack(at, found) => steps.push((
                "takes its asking back",
                self.with(|world| {
                    world.ring(w, *at).wants = false;
                    world.armed(w, *at, !found);
                }),
            )),
            Next::Give(..) => {
                steps.push(("hands queues over", self.with(|world| world.hand_over(w, seen))));
            }
            Next::Wait(timeout) => {
                let mine = |ring: &&Ring| self.workers[w].scheduler.find(ring.token).is_some();
                let kicked = self.rings.iter().filter(mine).any(|ring| ring.kicked[w]);
                let waits = self.workers[w].commands.is_empty() && !kicked;
                match timeout {
                    _ if !waits => steps.push(("wakes up", self.with(|world| world.wake(w)))),
                    Some(timeout) => steps.push((
                        "wakes up by itself",
                        self.with(|world| {
                            world.now += *timeout;
                            world.wake(w);
                        }),
                    )),
                    None => seen.slept += 1,
                }
            }
            Next::Serve(..) | Next::Disarm(_) | Next::Ask(_) => {}
        }
    }

    /// Up to the next effect that others may see, or that depends on them.
    fn resume(&mut self, w: usize, forwarder: &Forwarder) {
        loop {
            let worker = &mut self.workers[w];
            match worker.scheduler.next(self.now, forwarder) {
                Effect::RunCommands if !worker.commands.is_empty() => {
                    worker.sent.clear();
                    let commands = worker.commands.take(COMMANDS_MAX).into();
                    return worker.next = Next::Commands(commands);
                }
                Effect::RunCommands | Effect::Measure { .. } => {}
                Effect::Serve { at, max } => return worker.next = Next::Serve(at, max),
                Effect::Disarm { at } => return worker.next = Next::Disarm(at),
                Effect::PollKicks => return self.kicks(w),
                Effect::Wait { timeout, .. } => return worker.next = Next::Wait(timeout),
                Effect::Pause => self.now += Ns::new(100),
                Effect::Give { queues, to } => {
                    worker.gives.clear();
                    return worker.next = Next::Give(queues, to);
                }
                other => panic!("no reason for {other:?}"),
            }
        }
    }

    fn run(&mut self, w: usize) {
        let now = self.now;
        let worker = &mut self.workers[w];
        let Next::Commands(commands) = &mut worker.next else { unreachable!() };
        let command = commands.pop_front();
        if commands.is_empty() {
            worker.next = Next::Effect;
        }
        match command {
            Some(Command::Begin(served)) => worker.scheduler.add(served, now),
            Some(Command::Drop(token)) => {
                worker.scheduler.remove(token);
                self.of_token(token).kicked[w] = false;
            }
            Some(Command::GiveAway(token, to)) => {
                if worker.scheduler.find(token).is_some() {
                    worker.gives.push((token, to));
                }
                worker.scheduler.give_away(token, to);
            }
            other => panic!("no reason for {other:?}"),
        }
    }

    fn serve(&mut self, w: usize, at: usize, max: usize) {
        self.bursts -= 1;
        let ring = self.ring(w, at);
        let frames = usize::from(ring.pending).min(max);
        ring.pending -= frames as u16;
        let taken = BurstResult { frames, ..BurstResult::default() };
        let worker = &mut self.workers[w];
        worker.next = match worker.scheduler.record_burst(&taken) {
            Then::Arm => Next::Ask(at),
            Then::Over => Next::Effect,
        };
        // Kicks are polled after each round.
        self.now += Ns::from_us(21);
    }

    fn armed(&mut self, w: usize, at: usize, nothing: bool) {
        self.ring(w, at).locked = None;
        self.workers[w].scheduler.record_arm(nothing, None);
        self.workers[w].next = Next::Effect;
    }

    fn hand_over(&mut self, w: usize, seen: &mut Seen) {
        let next = std::mem::replace(&mut self.workers[w].next, Next::Effect);
        let Next::Give(queues, to) = next else { unreachable!() };
        for mut served in queues {
            self.of_token(served.token).kicked[w] = false;
            let any = self.broken == Broken::AnyGeneration;
            let assignment = self.assignments.assignment(served.token).filter(|_| any);
            let generation = assignment.map_or(served.of, |assignment| assignment.generation);
            let Some(to) = self.assignments.hand_over(served.token, generation, w, to) else {
                seen.refused += 1;
                continue;
            };
            seen.handed_over += 1;
            // Debts would be shared by all worlds of the search.
            served.source.tuning = Arc::new(Tuning::new(self.policy));
            match self.broken {
                Broken::NotBegun => {}
                _ => self.begin(to, served),
            }
        }
    }

    fn kicks(&mut self, w: usize) {
        let scheduler = &mut self.workers[w].scheduler;
        for ring in &mut self.rings {
            if std::mem::take(&mut ring.kicked[w]) {
                scheduler.kick(ring.token, self.now);
            }
        }
    }

    fn wake(&mut self, w: usize) {
        self.kicks(w);
        self.workers[w].scheduler.record_wait(true);
        self.workers[w].next = Next::Effect;
    }

    // ---- the search ----

    /// Where a queue is: every worker that has it, is about to begin it, or to hand it over.
    fn holders(&self, token: u64) -> Vec<(usize, u64)> {
        let mut holders = Vec::new();
        for (w, worker) in self.workers.iter().enumerate() {
            let queues = worker.scheduler.queues().iter().map(|queue| &queue.served);
            let leaving = worker.scheduler.leaving();
            let beginning = worker.commands.beginning();
            let (mut taken, mut given): (Vec<&Served>, &[Served]) = (Vec::new(), &[]);
            match &worker.next {
                Next::Commands(commands) => taken.extend(commands.iter().filter_map(|c| match c {
                    Command::Begin(served) => Some(served),
                    _ => None,
                })),
                Next::Give(queues, _) => given = queues,
                _ => {}
            }
            let all = queues.chain(leaving).chain(beginning).chain(taken).chain(given);
            holders.extend(all.filter(|s| s.token == token).map(|s| (w, s.of)));
        }
        holders
    }

    fn steps(&self, forwarder: &Forwarder, seen: &mut Seen) -> Steps<Self> {
        let mut steps = Vec::new();
        self.control(&mut steps);
        (0..self.rings.len()).for_each(|i| self.guest(i, &mut steps));
        (0..2).for_each(|w| self.worker(w, forwarder, seen, &mut steps));
        steps
    }
}

impl search::State for World {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let Self { now, assignments, rings, bursts, orders, .. } = self;
        (now, assignments, rings, bursts, orders).hash(&mut hasher);
        for Worker { scheduler, sent, gives, next, .. } in &self.workers {
            (scheduler, sent, gives).hash(&mut hasher);
            scheduler.queues().iter().for_each(|queue| {
                (queue.served.token, queue.served.of).hash(&mut hasher);
            });
            scheduler.leaving().for_each(|s| (s.token, s.of).hash(&mut hasher));
            std::mem::discriminant(next).hash(&mut hasher);
            match next {
                Next::Effect => {}
                Next::Commands(commands) => {
                    commands.iter().for_each(|command| words(command).hash(&mut hasher));
                }
                Next::Serve(at, max) => (at, max).hash(&mut hasher),
                Next::Disarm(at) | Next::Ask(at) | Next::Recheck(at) => at.hash(&mut hasher),
                Next::TakeBack(at, found) => (at, found).hash(&mut hasher),
                Next::Give(queues, to) => {
                    queues.iter().for_each(|s| (s.token, s.of).hash(&mut hasher));
                    to.hash(&mut hasher);
                }
                Next::Wait(timeout) => timeout.hash(&mut hasher),
            }
        }
        hasher.finish()
    }

    fn check(&self) -> Result<(), String> {
        for ring in &self.rings {
            let holders = self.holders(ring.token);
            let assignment = self.assignments.assignment(ring.token);
            if let Some(assignment) = assignment {
                let now = holders.iter().filter(|(_, of)| *of == assignment.generation).count();
                if now != 1 {
                    return Err(format!("a started queue is with {now} workers"));
                }
            }
            for (w, worker) in self.workers.iter().enumerate() {
                let Some(queue) = worker.scheduler.find(ring.token) else { continue };
                if assignment.is_none_or(|assignment| assignment.generation != queue.served.of) {
                    let taken = matches!(&worker.next, Next::Commands(commands) if commands.iter()
                        .any(|c| matches!(c, Command::Drop(token) if *token == ring.token)));
                    if !taken && !worker.commands.will_drop(ring.token) {
                        return Err(format!("worker {w} keeps a stopped queue"));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        // The search ends here, whoever has something left to do.
        if self.bursts == 0 {
            return Ok(());
        }
        for ring in self.rings.iter().filter(|ring| ring.active) {
            let worker =
                self.assignments.worker(ring.token).ok_or("a started queue is not assigned")?;
            let queue = self.workers[worker].scheduler.find(ring.token);
            let state = queue.ok_or("its worker does not serve it")?.state();
            if ring.pending > 0 {
                return Err(format!("the end, and a frame is left: {state:?}"));
            }
            if state != State::Cold {
                return Err(format!("the end, and a queue is {state:?}"));
            }
        }
        Ok(())
    }
}

fn search(
    policy: &str,
    broken: Broken,
    ports: &[u16],
    bursts: u8,
    orders: u8,
) -> Result<Seen, String> {
    let (mut seen, mut states, forwarder) = (Seen::default(), HashSet::new(), forwarder());
    let world = World::new(policy.parse().unwrap(), broken, ports, bursts, orders);
    search::search(world, &mut states, |world| world.steps(&forwarder, &mut seen))?;
    seen.states = states.len();
    println!("{policy}, {ports:?}: {} states, {} handed over", seen.states, seen.handed_over);
    Ok(seen)
}

#[test]
fn a_queue_that_moves_is_neither_lost_nor_served_twice_nor_left_asleep() {
    for policy in ["event", "napi"] {
        let seen =
            search(policy, Broken::Not, &[1], 5, 3).unwrap_or_else(|e| panic!("{policy}: {e}"));
        assert!(seen.slept > 0 && seen.handed_over > 0 && seen.refused > 0);
    }
}

#[test]
fn two_queues_that_move_between_two_workers() {
    let seen = search("napi", Broken::Not, &[0, 1], 3, 1).unwrap_or_else(|e| panic!("{e}"));
    assert!(seen.slept > 0 && seen.handed_over > 0);
}

#[test]
fn canary_every_broken_move_is_caught() {
    for broken in
        [Broken::AnyGeneration, Broken::NotBegun, Broken::NotDropped, Broken::BeginsElsewhere]
    {
        let found = search("napi", broken, &[1], 5, 3);
        assert!(found.is_err(), "{broken:?} was not caught");
    }
}
