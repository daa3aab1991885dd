//! Virtual time: everyone acts in small steps, in an order that the seed decides, and after each
//! step all must be well.

mod checks;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use switch::forward::{Mode, STARVED_NS};
use switch::hold::{RETRY_NS, WAIT_NS_MAX};
use switch::poll::TIMER_IDLE_NS;
use switch::tuning::Drain;

use crate::cast::{Cast, starving};
use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::frame::To;
use crate::guest::{Guest, Kind, Next, Ring};
use crate::hypervisor::Hypervisor;
use crate::random::Random;
use crate::settings::Operators;
use crate::switching::Switching;
use crate::worker::{Name, Then, Wake};

/// How long the applications want frames sent, in ns.
const TRAFFIC_NS: u64 = 3_000_000;
/// Most frames of a guest that storms.
const STORM: u64 = 1000;
/// Most frames of a guest that floods.
const FLOOD: u64 = 8000;
/// After healing: so many times a little traffic, and then all must drain again. Each is another
/// chance for a wake-up to be lost with nothing behind it that would hide the loss.
const WAVES: u64 = 14;
/// How long the traffic of a wave lasts, at most, in ns.
const WAVE_NS: u64 = 40_000;
/// How long after the last wish of a wave all must be done, in ns: less than the timer that saves
/// frames when a wake-up was lost.
const DRAIN_NS: u64 = 10_000_000;
/// The same where guests may still wait for others that never take anything.
const SETTLE_NS: u64 = 5_000_000_000;
/// Times that the longest delay of the policies may add to it, one after another.
const PATIENCE: u64 = 200;
/// How long a worker may be busy with other things when something is to be done, in ns; and where
/// frames are dear.
const BUSY_NS: u64 = 3_000_000;
const FLOODED_NS: u64 = 20_000_000;
/// Events after which a run that should have come to rest has not.
const EVENTS_MAX: u64 = 2_000_000;

/// What a run did, to see that it did something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Guests that kept the protocol.
    pub honest: u64,
    /// Guests that did not.
    pub hostile: u64,
    /// Why those of them that were stopped were, and how often.
    pub faults: BTreeMap<String, u64>,
    /// Every counter of every queue, summed up by direction and name.
    pub counters: BTreeMap<String, u64>,
    /// Frames that arrived at honest guests.
    pub frames: u64,
    /// Kicks and calls.
    pub wakes: u64,
    /// Times that a worker slept.
    pub sleeps: u64,
    /// Times that a queue was left alone for a time.
    pub naps: u64,
    /// Queues that went from one worker to another.
    pub moves: u64,
    /// Those of them that went by load.
    pub by_load: u64,
    /// Queues that were to move so that shares are fair over all workers.
    pub levelled: u64,
    /// Settings changed while frames passed.
    pub tunes: u64,
    /// Queues that were drained.
    pub drains: u64,
    /// Receivers that were reported to take nothing.
    pub starved: u64,
    /// Steps of everyone.
    pub events: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A step of a worker.
    Work(usize),
    /// A worker has slept for as long as it wanted.
    Timer(usize, u64),
    /// A worker is told that a receiver made room.
    Poke(usize),
    /// A kick reaches a worker.
    Kick(usize, usize, Ring),
    /// A guest's step.
    Step(usize),
    /// A call reaches a guest, or its application wants something.
    Call(usize),
    /// The application of a guest wants frames sent.
    App {
        from: usize,
        to: To,
        flow: u16,
        frames: u64,
    },
    /// A port is stopped, because of its guest's fault.
    Stop(usize),
    /// A queue moves to another worker.
    Move(Name, usize),
    /// An operator changes settings of a queue.
    Tune(Name),
    /// An operator has a queue drained; and ends that, so long after.
    Drain(Name),
    Undrain(Name, u64),
    /// Nothing happens for a while.
    Rest,
    /// Slow guests become quick, hostile ones silent.
    Heal,
}

impl Event {
    /// Whether it is not a worker's own: these know by themselves whether they are done.
    fn is_other(&self) -> bool {
        !matches!(self, Self::Work(_) | Self::Timer(..))
    }
}

/// Whether a guest acts, and whether a call waits for it.
#[derive(Clone, Copy, Default)]
struct Actor {
    awake: bool,
    latched: bool,
}

/// A run: guests, the switch, and time.
pub(crate) struct World {
    random: Random,
    now_ns: u64,
    /// Earliest first; those at the same time in the order they were made.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
    /// Events under way that are not a worker's own.
    others: u64,
    guests: Vec<Guest>,
    hypervisor: Arc<Hypervisor>,
    actors: Vec<Actor>,
    switch: Switching,
    /// Kicks under way, by port, queue and ring.
    kicks: BTreeMap<(usize, usize, Ring), u64>,
    /// Wake-ups of workers under way.
    pokes: Vec<u64>,
    /// Ports that are being stopped.
    stopping: BTreeSet<usize>,
    hub: Option<usize>,
    /// Of each queue that holds frames: which is the oldest, how many its receiver took, and since
    /// when that is so.
    /// Frames of honest guests may have to wait for a hostile one that fell silent.
    tied: bool,
    /// Someone sends to someone who takes nothing for more than a minute.
    starving: Option<(usize, usize)>,
    operators: Operators,
    mistake: Mistake,
    report: Report,
}

/// Runs the simulation of `seed` with a mistake in it.
///
/// # Errors
/// [`Finding`]: what is wrong with the switch, its ports, or the rings.
pub fn run(seed: u64, mistake: Mistake) -> Result<Report, Finding> {
    let mut random = Random::new(seed);
    let Cast { guests, links, hypervisor, hub, mode } = Cast::new(mistake, &mut random);
    let count = guests.len();
    let tags = guests.iter().map(|g| g.is_honest().then_some(g.tag)).collect();
    let static_addresses = random.one_in(2);
    let hostile = guests.iter().any(|g| !g.is_honest());
    let spoofed = hostile && mode == Mode::Switch && !static_addresses;
    let tied = hostile && mode == Mode::Cross || spoofed;
    let mut operators = Operators::new(&mut random);
    // Hostile guests never rest.
    let starving = starving(&guests, mode).filter(|_| !hostile && random.one_in(5));
    if starving.is_some() {
        operators = operators.plain();
    }
    let modes = (mode, static_addresses, spoofed);
    let switch = Switching::new(&links, tags, modes, mistake, operators, &mut random);
    let mut world = World {
        random,
        now_ns: 0,
        events: BinaryHeap::new(),
        made: 0,
        others: 0,
        actors: vec![Actor::default(); count],
        guests,
        hypervisor,
        kicks: BTreeMap::new(),
        pokes: vec![0; switch.workers.len()],
        switch,
        stopping: BTreeSet::new(),
        hub,
        tied,
        starving,
        operators,
        mistake,
        report: Report::default(),
    };
    world.begin();
    let starved_ns = if starving.is_some() { 2 * STARVED_NS } else { 0 };
    world.settle(SETTLE_NS + starved_ns)?;
    for _ in 0..WAVES {
        let lasts_ns = world.wave();
        world.settle(lasts_ns + if world.tied { SETTLE_NS } else { DRAIN_NS })?;
    }
    if let Some(queue) = world.switch.starved.first() {
        return Err(Finding::Starved(format!("queue {queue:?}, which has room")));
    }
    Ok(world.report())
}

impl World {
    fn at(&mut self, delay_ns: u64, event: Event) {
        self.made += 1;
        self.others += u64::from(event.is_other());
        self.events.push(Reverse((self.now_ns + delay_ns, self.made, event)));
    }

    fn busy_ns(&self) -> u64 {
        if self.operators.is_flooded() { FLOODED_NS } else { BUSY_NS }
    }

    /// How long a kick or a call takes to arrive, in ns.
    fn latency(&mut self) -> u64 {
        let max = if self.random.one_in(30) { 200_000 } else { 5000 };
        self.random.within(200..max)
    }

    /// Everyone gets up, and the applications' wishes are laid out in time.
    fn begin(&mut self) {
        for worker in 0..self.switch.workers.len() {
            self.at(0, Event::Work(worker));
        }
        // Some runs last longer than frames are held.
        let long = self.random.one_in(4);
        let heal = if long { 2 * WAIT_NS_MAX } else { TRAFFIC_NS };
        let heal = if self.starving.is_some() { self.starve() } else { heal };
        self.at(heal, Event::Heal);
        let guests = self.guests.len();
        for from in 0..guests {
            self.at(0, Event::Call(from));
            // Some runs are busy to the end, some quiet long before it.
            let until = self.random.within(1000..TRAFFIC_NS);
            for _ in 0..self.random.within(1..30) {
                let all: Vec<usize> = (0..guests).collect();
                let when = self.random.within(0..until);
                self.wish(from, &all, 17, when);
            }
        }
        // Someone always wakes the workers.
        for _ in 0..if long { self.random.within(0..500) } else { 0 } {
            let all: Vec<usize> = (0..guests).collect();
            let (from, when) = (self.random.index(guests), self.random.within(0..heal));
            self.wish(from, &all, 3, when);
        }
        if self.operators.is_flooded() {
            self.flood();
        }
        let until = heal.min(2 * TRAFFIC_NS);
        for _ in 0..self.random.within(0..12) {
            self.meddle(until);
        }
        // Frames that no one waits for: nothing keeps their senders from sending more.
        if self.random.one_in(4) {
            for from in 0..guests {
                let frames = self.random.within(200..STORM);
                let (to, flow) = (To::One(200), self.random.within(0..4) as u16);
                self.at(0, Event::App { from, to, flow, frames });
            }
        }
    }

    /// Two guests send so much that their queues are never empty for many periods, one of them on
    /// two queues, if it has as many.
    fn flood(&mut self) {
        let prompt = |i: &usize| self.guests[*i].kind == Kind::Honest;
        let prompt: Vec<usize> = (0..self.guests.len()).filter(prompt).collect();
        let [to, first, second, ..] = prompt[..] else { return };
        for (from, flow) in [(first, 0), (first, 1), (second, 0)] {
            let frames = self.random.within(FLOOD / 2..FLOOD);
            self.at(0, Event::App { from, to: To::One(to), flow, frames });
        }
    }

    /// Frames for someone who takes none, now and then for more than a minute; returns when that
    /// is over.
    fn starve(&mut self) -> u64 {
        let Some((from, deaf)) = self.starving else { return 0 };
        let every_ns = STARVED_NS / 10;
        for i in 0..12 {
            let frames = if i == 0 { STORM } else { self.random.within(1..5) };
            let app = Event::App { from, to: To::One(deaf), flow: 0, frames };
            self.at(i * every_ns, app);
        }
        12 * every_ns
    }

    /// An operator changes something, or a queue moves, within `until_ns`.
    fn meddle(&mut self, until_ns: u64) {
        let (port, queue) = (self.random.index(self.guests.len()), self.random.index(8));
        let name = self.switch.name(port, queue);
        let when = self.random.within(0..until_ns);
        let event = if self.random.one_in(6) {
            Event::Drain(name)
        } else if self.random.one_in(2) {
            Event::Tune(name)
        } else {
            Event::Move(name, self.random.index(8))
        };
        self.at(when, event);
    }

    /// Some frames of guest `from` to one of `among`, to everyone, or to no one.
    fn wish(&mut self, from: usize, among: &[usize], max: u64, when: u64) {
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
        self.at(when, Event::App { from, to, flow, frames });
    }

    /// A little traffic between guests that keep the protocol. Returns how long it lasts, in ns.
    fn wave(&mut self) -> u64 {
        let honest: Vec<usize> =
            (0..self.guests.len()).filter(|i| self.guests[*i].is_honest()).collect();
        for _ in 0..self.random.within(1..5) {
            let from = honest[self.random.index(honest.len())];
            let when = self.random.within(0..WAVE_NS);
            self.wish(from, &honest, 20, when);
        }
        for _ in 0..self.random.within(0..3) {
            self.meddle(WAVE_NS);
        }
        // Time for all to fall asleep, whatever their policy.
        if self.random.one_in(20) {
            let rest_ns = TIMER_IDLE_NS + TIMER_IDLE_NS / 5;
            self.at(rest_ns, Event::Rest);
            return rest_ns;
        }
        WAVE_NS
    }

    /// Lets everyone act until no one does any more; then all must be well.
    fn settle(&mut self, bound_ns: u64) -> Result<(), Finding> {
        let started_ns = self.now_ns;
        while self.others > 0 || !self.switch.workers.iter().all(|w| w.is_idle(self.now_ns)) {
            let Some(Reverse((at, _, event))) = self.events.pop() else {
                return Err(self.stuck());
            };
            self.now_ns = at;
            self.report.events += 1;
            if event.is_other() {
                self.others -= 1;
                self.switch.workers.iter_mut().for_each(|w| w.disturb());
            }
            // Frames for a guest that takes none wait until they are given up.
            let patience_ns = PATIENCE * self.switch.delay_ns_max() + WAIT_NS_MAX + 2 * RETRY_NS;
            if self.report.events > EVENTS_MAX || at - started_ns > bound_ns + patience_ns {
                return Err(Finding::Late(self.state()));
            }
            self.act(event)?;
            self.calls();
            self.check_wakes()?;
            self.check_calls()?;
            self.check_stalls()?;
            if matches!(event, Event::Work(_) | Event::Move(..)) {
                self.switch.check_homes()?;
            }
        }
        (0..self.guests.len())
            .filter(|i| self.guests[*i].is_honest())
            .try_for_each(|i| self.judge(i))
    }

    /// Someone has something to do, and nothing will ever remind him.
    fn stuck(&mut self) -> Finding {
        self.now_ns += SETTLE_NS;
        let found = self.check_wakes().and_then(|()| self.check_calls());
        found.err().unwrap_or_else(|| Finding::Hang(self.state()))
    }

    fn act(&mut self, event: Event) -> Result<(), Finding> {
        match event {
            Event::Work(worker) => self.work(worker)?,
            Event::Timer(worker, timer) => {
                if self.switch.workers[worker].timer == timer {
                    self.rouse(worker, Wake::Timer);
                }
            }
            Event::Poke(worker) => {
                self.pokes[worker] -= 1;
                self.rouse(worker, Wake::Command);
            }
            Event::Kick(port, queue, ring) => {
                *self.kicks.get_mut(&(port, queue, ring)).expect("under way") -= 1;
                if self.switch.kick(port, queue, ring)
                    && let Some((worker, token)) = self.switch.kicked(port, queue, ring)
                {
                    self.rouse(worker, Wake::Kick(token));
                }
            }
            Event::Step(i) => self.step(i)?,
            Event::Call(i) if self.actors[i].awake => self.actors[i].latched = true,
            Event::Call(i) => {
                self.actors[i].awake = true;
                self.guests[i].wake();
                let delay = self.guests[i].delay(&mut self.random);
                self.at(delay, Event::Step(i));
            }
            Event::App { from, to, flow, frames } => {
                self.guests[from].want(to, flow, frames);
                self.at(0, Event::Call(from));
            }
            Event::Stop(port) => {
                let woken = self.switch.stop(port, self.now_ns);
                self.poke(woken);
            }
            Event::Move(name, to) => {
                let woken = self.switch.away(name, to);
                self.poke(woken);
            }
            Event::Tune(name) => {
                self.report.tunes += 1;
                let woken = self.switch.tune(name, self.operators, &mut self.random);
                self.poke(woken);
            }
            Event::Drain(name) => {
                let woken = self.switch.drain(name, true);
                self.poke(woken);
                let lasts_ns = self.random.within(500..2 * self.busy_ns());
                self.at(lasts_ns, Event::Undrain(name, lasts_ns));
            }
            Event::Undrain(name, lasted_ns) => {
                let drain = self.switch.drained(name);
                if drain == Some(Drain::Requested) && lasted_ns > self.busy_ns() {
                    let what = format!("queue {name:?} is not drained after {lasted_ns} ns");
                    return Err(Finding::Late(what));
                }
                self.report.drains += u64::from(drain == Some(Drain::Done));
                let woken = self.switch.drain(name, false);
                self.poke(woken);
            }
            Event::Rest => {}
            Event::Heal => {
                for i in 0..self.guests.len() {
                    self.guests[i].healed = true;
                    // Only those wake who want to be told something they did not before.
                    if self.guests[i].lazy || self.guests[i].kind == Kind::Deaf {
                        self.at(0, Event::Call(i));
                    }
                }
            }
        }
        Ok(())
    }

    /// Something wakes a worker, if it sleeps.
    fn rouse(&mut self, worker: usize, wake: Wake) {
        if self.switch.workers[worker].wake(wake) {
            let delay = self.latency();
            self.at(delay, Event::Work(worker));
        }
    }

    /// Workers were sent commands.
    fn poke(&mut self, woken: impl IntoIterator<Item = usize>) {
        for worker in woken {
            self.pokes[worker] += 1;
            let delay = self.latency();
            self.at(delay, Event::Poke(worker));
        }
    }

    fn work(&mut self, worker: usize) -> Result<(), Finding> {
        let then = self.switch.step(worker, self.now_ns)?;
        let woken = self.switch.pass(worker);
        self.poke(woken);
        for (port, queue, ring) in self.switch.kicks_again() {
            self.kick(port, queue, ring);
        }
        self.check_grants()?;
        for (port, fault) in std::mem::take(&mut self.switch.workers[worker].faults) {
            if self.guests[port].is_honest() {
                return Err(Finding::Blamed(format!("guest {port}: {fault}")));
            }
            if self.stopping.insert(port) {
                // Numbers aside, to see what kinds there were.
                let why = fault.0.replace(|c: char| c.is_ascii_digit(), "");
                *self.report.faults.entry(why).or_default() += 1;
                let delay = self.random.within(1000..100_000);
                self.at(delay, Event::Stop(port));
            }
        }
        match then {
            Then::Go => {
                let delay = self.switch.workers[worker].delay(&mut self.random);
                self.at(delay, Event::Work(worker));
            }
            Then::Sleep(most) => {
                self.report.sleeps += 1;
                if let Some(most) = most {
                    let timer = self.switch.workers[worker].timer;
                    self.at(most, Event::Timer(worker, timer));
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
            self.book(i)?;
        }
        let delay = self.guests[i].delay(&mut self.random);
        if next == Next::Again {
            self.at(delay, Event::Step(i));
        } else if std::mem::take(&mut self.actors[i].latched) {
            self.guests[i].wake();
            self.at(delay, Event::Step(i));
        } else {
            self.actors[i].awake = false;
        }
        Ok(())
    }

    /// A kick is on its way.
    fn kick(&mut self, port: usize, queue: usize, ring: Ring) {
        *self.kicks.entry((port, queue, ring)).or_default() += 1;
        let delay = self.latency();
        self.at(delay, Event::Kick(port, queue, ring));
    }

    /// What guest `i` sent, found, and got back goes into the books.
    fn book(&mut self, i: usize) -> Result<(), Finding> {
        for (q, pair) in self.guests[i].apps.iter_mut().enumerate() {
            let ledger = &mut self.switch.ledger;
            ledger.sent(i, q, std::mem::take(&mut pair.log));
            for bytes in pair.inbox.drain(..) {
                self.report.frames += 1;
                ledger.arrival(i, q, &bytes)?;
            }
            let returnable = ledger.returnable(i, q);
            if pair.returned > returnable {
                let what = format!(
                    "queue {q} of port {i} gave {} buffers back, and was done with {returnable}",
                    pair.returned
                );
                return Err(Finding::Lost(what));
            }
        }
        Ok(())
    }

    /// Calls that the switch made since the last look are on their way.
    fn calls(&mut self) {
        for port in 0..self.guests.len() {
            for _ in 0..self.switch.calls(port) {
                self.report.wakes += 1;
                if self.mistake == Mistake::ForgetsCalls && self.random.one_in(3) {
                    continue;
                }
                let delay = self.latency();
                self.at(delay, Event::Call(port));
            }
        }
    }

    fn report(mut self) -> Report {
        self.report.moves = self.switch.moves;
        self.report.starved = self.switch.reported;
        self.report.levelled = self.switch.levelled;
        self.report.by_load = self.switch.workers.iter().map(|w| w.by_load).sum();
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
