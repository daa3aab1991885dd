//! Virtual time: guests and workers act in small steps, in an order drawn from the seed. All
//! invariants are checked after each step.

mod checks;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use switch::forward::{Mode, STALLED_AFTER};
use switch::hold::{RETRY_INTERVAL, WAIT_MAX};
use switch::poll::TIMER_IDLE;
use switch::schedule::Placement;
use switch::time::{Instant, Ns};
use switch::tuning::Drain;

use crate::cast::{Cast, stalling};
use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::frame::To;
use crate::guest::{Guest, Kind, Next, Ring};
use crate::hypervisor::Hypervisor;
use crate::ledger::Addressing;
use crate::random::Random;
use crate::rules::AllRules;
use crate::seen::Seen;
use crate::settings::Operators;
use crate::switching::Switching;
use crate::worker::{Name, Then, Wake};

/// Time in which the applications send frames.
const TRAFFIC: Ns = Ns::from_ms(3);
/// Most frames of a storm: frames to an unknown address, or to a stalled receiver.
const STORM: u64 = 1000;
/// Most frames of a flood on one queue.
const FLOOD: u64 = 8000;
/// Waves of little traffic after healing; all must drain after each. In each one, a wake-up may be
/// lost without later traffic to hide the loss.
const WAVES: u64 = 14;
/// Longest time of a wave's traffic.
const WAVE: Ns = Ns::from_us(40);
/// Time from the end of a wave's traffic by which all must be drained: shorter than the timer that
/// would make up for a lost wake-up.
const DRAIN: Ns = Ns::from_ms(10);
/// The same while frames may be held for guests that take none.
const SETTLE: Ns = Ns::from_secs(5);
/// Number of the policies' longest delays that may add up to it.
const DELAYS_MAX: u64 = 200;
/// Longest time in which a worker may be busy with other work; the second one where frames are
/// expensive to forward.
const BUSY: Ns = Ns::from_ms(3);
const BUSY_EXPENSIVE: Ns = Ns::from_ms(20);
/// Most events of a run.
const EVENTS_MAX: u64 = 2_000_000;

/// What happened in a run, to check the coverage of the seeds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Honest guests: those that follow the protocol.
    pub honest: u64,
    /// Hostile guests.
    pub hostile: u64,
    /// Faults for which ports were stopped, with their number. Digits are left out.
    pub faults: BTreeMap<String, u64>,
    /// Sums of the counters of all queues, by direction and name.
    pub counters: BTreeMap<String, u64>,
    /// Frames received by honest guests.
    pub frames: u64,
    /// Kicks and calls.
    pub wakes: u64,
    /// Sleeps of workers.
    pub sleeps: u64,
    /// Sleeps of workers that had a warm queue.
    pub naps: u64,
    /// Moves of queues between workers.
    pub moves: u64,
    /// Those of them by load.
    pub by_load: u64,
    /// Moves requested to level shares over all workers.
    pub levelled: u64,
    /// Queues that were stopped, and perhaps started again, while they moved.
    pub refused: u64,
    /// Changes of the placement.
    pub placements: u64,
    /// Queues that were stopped and started again.
    pub restarts: u64,
    /// Settings changed under traffic.
    pub tunes: u64,
    /// Completed drains of queues.
    pub drains: u64,
    /// Receivers reported as stalled.
    pub stalled: u64,
    /// Results of bursts and armings.
    pub seen: Seen,
    /// Events processed.
    pub events: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A step of a worker.
    Work(usize),
    /// The timer of a worker's sleep expires.
    Timer(usize, u64),
    /// A worker is notified of commands.
    Notify(usize),
    /// A kick reaches a worker.
    Kick(usize, usize, Ring),
    /// A guest's step.
    Step(usize),
    /// A call reaches a guest, or its application wakes it.
    Call(usize),
    /// The application of a guest sends frames.
    App {
        from: usize,
        to: To,
        flow: u16,
        frames: u64,
    },
    /// A port is stopped after a fault of its guest.
    Stop(usize),
    /// A queue moves to another worker, as by load.
    Move(Name, usize),
    /// An operator changes the placement: its number.
    Place(usize),
    /// A guest stops a queue and starts it again.
    Restart(Name),
    /// A guest's address is announced, as after its migration.
    Announce(usize),
    /// An operator changes a setting of a queue.
    Tune(Name),
    /// An operator drains a queue, and ends that after the given time.
    Drain(Name),
    Undrain(Name, Ns),
    /// The end of a time without traffic.
    Idle,
    /// Slow guests become fast, stalled ones take frames again, hostile ones go idle.
    Heal,
}

impl Event {
    /// Whether it is anything but a step or timer of a worker. A run ends when no external event is
    /// left and all workers are idle.
    fn is_external(&self) -> bool {
        !matches!(self, Self::Work(_) | Self::Timer(..))
    }
}

/// Whether a guest is awake, and whether a call arrived meanwhile.
#[derive(Clone, Copy, Default)]
struct Actor {
    awake: bool,
    latched: bool,
}

/// A run: guests, the switch, and time.
pub(crate) struct World {
    random: Random,
    now: Instant,
    /// Earliest first; events of the same time in the order in which they were scheduled.
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    scheduled: u64,
    /// Number of external events scheduled ([`Event::is_external`]).
    external: u64,
    guests: Vec<Guest>,
    hypervisor: Arc<Hypervisor>,
    actors: Vec<Actor>,
    switch: Switching,
    /// Kicks in flight, by port, queue and ring.
    kicks: BTreeMap<(usize, usize, Ring), u64>,
    /// Notifications in flight, by worker.
    notifications: Vec<u64>,
    /// Ports being stopped.
    stopping: BTreeSet<usize>,
    hub: Option<usize>,
    /// Frames of honest guests may be held for a hostile one that went idle, or for a rate.
    slow_drain: bool,
    /// A sender, and a receiver that takes nothing for more than a minute.
    stalling: Option<(usize, usize)>,
    operators: Operators,
    mistake: Mistake,
    report: Report,
}

/// Runs the simulation of `seed` with an injected mistake.
///
/// # Errors
/// [`Finding`]: a violation by the switch, its ports, or the rings.
pub fn run(seed: u64, mistake: Mistake) -> Result<Report, Finding> {
    let mut random = Random::new(seed);
    let Cast { guests, links, hypervisor, hub, mode } = Cast::new(mistake, &mut random);
    let count = guests.len();
    let tags = guests.iter().map(|g| g.is_honest().then_some(g.tag)).collect();
    let is_static = random.one_in(2);
    let hostile = guests.iter().any(|g| !g.is_honest());
    let mut operators = Operators::new(&mut random);
    // Not with hostile guests: they are never idle, and this run is long.
    let stalling = stalling(&guests, mode).filter(|_| !hostile && random.one_in(5));
    if stalling.is_some() {
        operators = operators.event_only();
    }
    let rules = match stalling.is_some() || operators.is_flooded() {
        true => AllRules::none(count),
        false => {
            let honest: Vec<bool> = guests.iter().map(Guest::is_honest).collect();
            AllRules::new(&honest, &mut random)
        }
    };
    let is_locked = |i: usize| guests[i].is_honest() || rules.of(i).is_locked();
    let is_spoofed = mode == Mode::Switch && !is_static && !(0..count).all(is_locked);
    let slow_drain = hostile && mode == Mode::Cross || is_spoofed || rules.has_rates();
    let addressing = Addressing { mode, is_static, is_spoofed };
    let switch = Switching::new(&links, tags, addressing, rules, mistake, operators, &mut random);
    let mut world = World {
        random,
        now: Instant::START,
        events: BinaryHeap::new(),
        scheduled: 0,
        external: 0,
        actors: vec![Actor::default(); count],
        guests,
        hypervisor,
        kicks: BTreeMap::new(),
        notifications: vec![0; switch.workers.len()],
        switch,
        stopping: BTreeSet::new(),
        hub,
        slow_drain,
        stalling,
        operators,
        mistake,
        report: Report::default(),
    };
    world.begin();
    let stalled_for = if stalling.is_some() { 2 * STALLED_AFTER } else { Ns::ZERO };
    world.settle(SETTLE + stalled_for)?;
    for _ in 0..WAVES {
        let lasts = world.schedule_wave();
        world.settle(lasts + if world.slow_drain { SETTLE } else { DRAIN })?;
    }
    if let Some(queue) = world.switch.stalled.first() {
        return Err(Finding::Stalled(format!("queue {queue:?} is still reported, but has room")));
    }
    Ok(world.report())
}

impl World {
    fn schedule(&mut self, delay: Ns, event: Event) {
        self.scheduled += 1;
        self.external += u64::from(event.is_external());
        self.events.push(Reverse((self.now + delay, self.scheduled, event)));
    }

    fn busy(&self) -> Ns {
        let Self { operators, .. } = self;
        if operators.is_flooded() || operators.is_expensive() { BUSY_EXPENSIVE } else { BUSY }
    }

    /// Latency of a kick, call or notification.
    fn latency(&mut self) -> Ns {
        let max = if self.random.one_in(30) { 200_000 } else { 5000 };
        Ns::new(self.random.within(200..max))
    }

    /// Schedules the first step of each worker and guest, the traffic, and the changes of settings.
    fn begin(&mut self) {
        for worker in 0..self.switch.workers.len() {
            self.schedule(Ns::ZERO, Event::Work(worker));
        }
        // Some runs last longer than a frame may be held.
        let long = self.random.one_in(4);
        let heal = if long { 2 * WAIT_MAX } else { TRAFFIC };
        let heal = if self.stalling.is_some() { self.schedule_stall() } else { heal };
        self.schedule(heal, Event::Heal);
        let guests = self.guests.len();
        for from in 0..guests {
            self.schedule(Ns::ZERO, Event::Call(from));
            // Some guests send until the end, others stop long before it.
            let until = self.random.time(Ns::from_us(1)..TRAFFIC);
            for _ in 0..self.random.within(1..30) {
                let all: Vec<usize> = (0..guests).collect();
                let when = self.random.time(Ns::ZERO..until);
                self.schedule_frames(from, &all, 17, when);
            }
        }
        // Sparse traffic wakes the workers throughout a long run.
        for _ in 0..if long { self.random.within(0..500) } else { 0 } {
            let all: Vec<usize> = (0..guests).collect();
            let (from, when) = (self.random.index(guests), self.random.time(Ns::ZERO..heal));
            self.schedule_frames(from, &all, 3, when);
        }
        if self.operators.is_flooded() {
            self.schedule_flood();
        }
        let until = heal.min(2 * TRAFFIC);
        for _ in 0..self.random.within(0..12) {
            self.schedule_change(until);
        }
        // Frames to an unknown address are flooded: no backpressure limits their senders.
        if self.random.one_in(4) {
            for from in 0..guests {
                let frames = self.random.within(200..STORM);
                let (to, flow) = (To::One(200), self.random.within(0..4) as u16);
                self.schedule(Ns::ZERO, Event::App { from, to, flow, frames });
            }
        }
    }

    /// Schedules a flood: two guests send so much that their queues stay backlogged for many load
    /// periods, one of them on two queues, if it has that many.
    fn schedule_flood(&mut self) {
        let fast = |i: &usize| self.guests[*i].kind == Kind::Honest;
        let fast: Vec<usize> = (0..self.guests.len()).filter(fast).collect();
        let [to, first, second, ..] = fast[..] else { return };
        for (from, flow) in [(first, 0), (first, 1), (second, 0)] {
            let frames = self.random.within(FLOOD / 2..FLOOD);
            self.schedule(Ns::ZERO, Event::App { from, to: To::One(to), flow, frames });
        }
    }

    /// Schedules frames for a stalled receiver over more than a minute; returns that time.
    fn schedule_stall(&mut self) -> Ns {
        let Some((from, stalled)) = self.stalling else { return Ns::ZERO };
        let every = STALLED_AFTER / 10;
        for i in 0..12 {
            let frames = if i == 0 { STORM } else { self.random.within(1..5) };
            let app = Event::App { from, to: To::One(stalled), flow: 0, frames };
            self.schedule(i * every, app);
        }
        12 * every
    }

    /// Schedules a change of settings, a drain or a move of a queue, before `until`.
    fn schedule_change(&mut self, until: Ns) {
        let (port, queue) = (self.random.index(self.guests.len()), self.random.index(8));
        let name = self.switch.name(port, queue);
        let when = self.random.time(Ns::ZERO..until);
        let event = if self.random.one_in(6) {
            Event::Drain(name)
        } else if self.random.one_in(2) {
            Event::Tune(name)
        } else if self.random.one_in(5) {
            Event::Restart(name)
        } else if self.guests[port].is_honest() && self.random.one_in(6) {
            Event::Announce(port)
        } else if self.operators.is_balanced() && !self.random.one_in(4) {
            Event::Move(name, self.random.index(8))
        } else if self.operators.is_flooded() {
            return;
        } else {
            Event::Place(self.random.index(Placement::ALL.len()))
        };
        self.schedule(when, event);
        // Perhaps while the queue moves.
        if matches!(event, Event::Move(..) | Event::Place(_)) && self.random.one_in(3) {
            let after = self.random.time(Ns::ZERO..Ns::from_us(10));
            self.schedule(when + after, Event::Restart(name));
        }
    }

    /// Schedules frames of guest `from`, at `when`: to one of `among`, to all, or to an unknown
    /// address.
    fn schedule_frames(&mut self, from: usize, among: &[usize], max: u64, when: Ns) {
        let others: Vec<usize> = among.iter().copied().filter(|to| *to != from).collect();
        let to = match self.random.within(0..16) {
            0 => To::All,
            // An address that the switch never learns.
            1 if self.random.one_in(2) => To::One(200),
            _ => {
                let hub = self.hub.filter(|hub| *hub != from && self.random.one_in(2));
                To::One(hub.unwrap_or_else(|| others[self.random.index(others.len())]))
            }
        };
        let flow = self.random.within(0..4) as u16;
        let frames = self.random.within(1..max);
        self.schedule(when, Event::App { from, to, flow, frames });
    }

    /// Schedules a little traffic between honest guests; returns its duration.
    fn schedule_wave(&mut self) -> Ns {
        let honest: Vec<usize> =
            (0..self.guests.len()).filter(|i| self.guests[*i].is_honest()).collect();
        for _ in 0..self.random.within(1..5) {
            let from = honest[self.random.index(honest.len())];
            let when = self.random.time(Ns::ZERO..WAVE);
            self.schedule_frames(from, &honest, 20, when);
        }
        for _ in 0..self.random.within(0..3) {
            self.schedule_change(WAVE);
        }
        // Long enough for all queues to go cold, whatever their policy.
        if self.random.one_in(20) {
            let idle = TIMER_IDLE + TIMER_IDLE / 5;
            self.schedule(idle, Event::Idle);
            return idle;
        }
        WAVE
    }

    /// Processes events, with all checks, until all is idle; fails if that exceeds `bound`.
    fn settle(&mut self, bound: Ns) -> Result<(), Finding> {
        let started = self.now;
        while self.external > 0 || !self.switch.workers.iter().all(|w| w.is_idle(self.now)) {
            let Some(Reverse((at, _, event))) = self.events.pop() else {
                return Err(self.stuck());
            };
            self.now = at;
            self.report.events += 1;
            if event.is_external() {
                self.external -= 1;
                self.switch.workers.iter_mut().for_each(|w| w.reset_empty_polls());
            }
            // Frames for a guest that takes none are held until they age.
            let slack = DELAYS_MAX * self.switch.delay_max() + WAIT_MAX + 2 * RETRY_INTERVAL;
            if self.report.events > EVENTS_MAX || at - started > bound + slack {
                return Err(Finding::Late(self.state()));
            }
            self.act(event)?;
            self.schedule_calls();
            self.check_wakes()?;
            self.check_calls()?;
            self.check_stalls()?;
            if matches!(event, Event::Work(_) | Event::Place(_) | Event::Restart(_)) {
                self.switch.check_owners()?;
            }
        }
        (0..self.guests.len())
            .filter(|i| self.guests[*i].is_honest())
            .try_for_each(|i| self.check_drained(i))
    }

    /// Returns the violation of a run that is not idle, but has no event left.
    fn stuck(&mut self) -> Finding {
        self.now += SETTLE;
        let found = self.check_wakes().and_then(|()| self.check_calls());
        found.err().unwrap_or_else(|| Finding::Hang(self.state()))
    }

    fn act(&mut self, event: Event) -> Result<(), Finding> {
        match event {
            Event::Work(worker) => self.work(worker)?,
            Event::Timer(worker, timer) => {
                if self.switch.workers[worker].timer == timer {
                    self.wake(worker, Wake::Timer);
                }
            }
            Event::Notify(worker) => {
                self.notifications[worker] -= 1;
                self.wake(worker, Wake::Command);
            }
            Event::Kick(port, queue, ring) => {
                *self.kicks.get_mut(&(port, queue, ring)).expect("a kick in flight") -= 1;
                if self.switch.kick(port, queue, ring)
                    && let Some((worker, token)) = self.switch.kick_target(port, queue, ring)
                {
                    self.wake(worker, Wake::Kick(token));
                }
            }
            Event::Step(i) => self.step(i)?,
            Event::Call(i) if self.actors[i].awake => self.actors[i].latched = true,
            Event::Call(i) => {
                self.actors[i].awake = true;
                self.guests[i].wake();
                let delay = self.guests[i].delay(&mut self.random);
                self.schedule(delay, Event::Step(i));
            }
            Event::App { from, to, flow, frames } => {
                self.guests[from].enqueue(to, flow, frames);
                self.schedule(Ns::ZERO, Event::Call(from));
            }
            Event::Stop(port) => {
                let woken = self.switch.stop(port, self.now);
                self.notify(woken);
            }
            Event::Move(name, to) => {
                let woken = self.switch.request_move(name, to);
                self.notify(woken);
            }
            Event::Place(placement) => {
                self.report.placements += 1;
                let woken = self.switch.set_placement(Placement::ALL[placement]);
                self.notify(woken);
            }
            Event::Restart(name) => {
                let woken = self.switch.restart(name);
                self.report.restarts += u64::from(!woken.is_empty());
                self.notify(woken);
            }
            Event::Tune(name) => {
                self.report.tunes += 1;
                let woken = self.switch.tune(name, self.operators, &mut self.random);
                self.notify(woken);
            }
            Event::Announce(port) => {
                let woken = self.switch.announce(port);
                self.notify(woken);
            }
            Event::Drain(name) => {
                let woken = self.switch.drain(name, true);
                self.notify(woken);
                let lasts = self.random.time(Ns::new(500)..2 * self.busy());
                self.schedule(lasts, Event::Undrain(name, lasts));
            }
            Event::Undrain(name, lasted) => self.undrain(name, lasted)?,
            Event::Idle => {}
            Event::Heal => self.heal(),
        }
        Ok(())
    }

    /// Ends the draining of a queue, which must be drained if it lasted long enough.
    fn undrain(&mut self, name: Name, lasted: Ns) -> Result<(), Finding> {
        let drain = self.switch.drained(name);
        if drain == Some(Drain::Requested) && lasted > self.busy() {
            let what = format!("queue {name:?} is not drained after {lasted}");
            return Err(Finding::Late(what));
        }
        self.report.drains += u64::from(drain == Some(Drain::Done));
        let woken = self.switch.drain(name, false);
        self.notify(woken);
        Ok(())
    }

    /// Heals all guests.
    fn heal(&mut self) {
        for i in 0..self.guests.len() {
            self.guests[i].healed = true;
            // Only these arm more rings once healed.
            if self.guests[i].lazy || self.guests[i].kind == Kind::Stalled {
                self.schedule(Ns::ZERO, Event::Call(i));
            }
        }
    }

    /// Wakes a worker, if it sleeps.
    fn wake(&mut self, worker: usize, wake: Wake) {
        if self.switch.workers[worker].wake(wake) {
            let delay = self.latency();
            self.schedule(delay, Event::Work(worker));
        }
    }

    /// Notifies workers of their commands.
    fn notify(&mut self, woken: impl IntoIterator<Item = usize>) {
        for worker in woken {
            self.notifications[worker] += 1;
            let delay = self.latency();
            self.schedule(delay, Event::Notify(worker));
        }
    }

    fn work(&mut self, worker: usize) -> Result<(), Finding> {
        let woken = self.switch.hand_over_given(worker);
        self.notify(woken);
        let then = self.switch.step(worker, self.now)?;
        let woken = self.switch.dispatch(worker);
        self.notify(woken);
        for (port, queue, ring) in self.switch.deferred_kicks() {
            self.kick(port, queue, ring);
        }
        self.check_grants()?;
        for (port, fault) in std::mem::take(&mut self.switch.workers[worker].faults) {
            if self.guests[port].is_honest() {
                return Err(Finding::Blamed(format!("guest {port}: {fault}")));
            }
            if self.stopping.insert(port) {
                // Without digits, to count faults of the same kind together.
                let why = fault.0.replace(|c: char| c.is_ascii_digit(), "");
                *self.report.faults.entry(why).or_default() += 1;
                let delay = Ns::new(self.random.within(1000..100_000));
                self.schedule(delay, Event::Stop(port));
            }
        }
        match then {
            Then::Go => {
                let delay = self.switch.workers[worker].delay(&mut self.random);
                self.schedule(delay, Event::Work(worker));
            }
            Then::Sleep(most) => {
                self.report.sleeps += 1;
                if let Some(most) = most {
                    let timer = self.switch.workers[worker].timer;
                    self.schedule(most, Event::Timer(worker, timer));
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, i: usize) -> Result<(), Finding> {
        let mut kicks = Vec::new();
        let next = self.guests[i].step(&mut self.random, &mut kicks)?;
        for (queue, ring) in kicks {
            self.report.wakes += 1;
            self.kick(i, queue, ring);
        }
        if self.guests[i].is_honest() {
            self.record_guest(i)?;
        }
        let delay = self.guests[i].delay(&mut self.random);
        if next == Next::Again {
            self.schedule(delay, Event::Step(i));
        } else if std::mem::take(&mut self.actors[i].latched) {
            self.guests[i].wake();
            self.schedule(delay, Event::Step(i));
        } else {
            self.actors[i].awake = false;
        }
        Ok(())
    }

    /// Sends a kick.
    fn kick(&mut self, port: usize, queue: usize, ring: Ring) {
        *self.kicks.entry((port, queue, ring)).or_default() += 1;
        let delay = self.latency();
        self.schedule(delay, Event::Kick(port, queue, ring));
    }

    /// Records in the ledger what guest `i` sent, received and got back.
    fn record_guest(&mut self, i: usize) -> Result<(), Finding> {
        for (q, pair) in self.guests[i].apps.iter_mut().enumerate() {
            let ledger = &mut self.switch.ledger;
            ledger.record_sent(i, q, std::mem::take(&mut pair.log));
            for bytes in pair.inbox.drain(..) {
                self.report.frames += 1;
                ledger.record_arrival(i, q, &bytes)?;
            }
            let returnable = ledger.returnable(i, q);
            if pair.returned > returnable {
                let what = format!(
                    "queue {q} of port {i} returned {} buffers, but only {returnable} were shown",
                    pair.returned
                );
                return Err(Finding::Lost(what));
            }
        }
        Ok(())
    }

    /// Sends the calls that the switch made since the last step.
    fn schedule_calls(&mut self) {
        for port in 0..self.guests.len() {
            for _ in 0..self.switch.calls(port) {
                self.report.wakes += 1;
                if self.mistake == Mistake::ForgetsCalls && self.random.one_in(3) {
                    continue;
                }
                let delay = self.latency();
                self.schedule(delay, Event::Call(port));
            }
        }
    }

    fn report(mut self) -> Report {
        self.report.moves = self.switch.moves;
        self.report.stalled = self.switch.reported;
        self.report.levelled = self.switch.levelled;
        self.report.refused = self.switch.refused;
        self.report.by_load = self.switch.workers.iter().map(|w| w.by_load).sum();
        for worker in &self.switch.workers {
            self.report.seen += worker.seen;
        }
        self.report.naps = self.switch.workers.iter().map(|w| w.naps).sum();
        for (port, guest) in self.guests.iter().enumerate() {
            let honest = u64::from(guest.is_honest());
            self.report.honest += honest;
            self.report.hostile += 1 - honest;
            for q in 0..guest.apps.len() {
                let (ingress, egress) = self.switch.stats(port, q);
                let ingress = ingress.all().map(|(name, n)| (format!("ingress {name}"), n));
                let egress = egress.all().map(|(name, n)| (format!("egress {name}"), n));
                for (name, n) in ingress.chain(egress) {
                    *self.report.counters.entry(name).or_default() += n;
                }
            }
        }
        self.report
    }
}
