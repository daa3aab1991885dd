//! Virtual time, and the oracles.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use crate::frame::Frame;
use crate::guest::{Guest, Kind, Link, Next, Ring};
use crate::random::Random;
use crate::{Backend, Turn};

/// When traffic ends and everyone heals, in ns.
const HEAL_NS: u64 = 3_000_000;
/// After healing: so many times a little traffic, and then all must drain again. Each is another
/// chance for a wake-up to be lost with nothing behind it that would hide the loss.
const WAVES: u64 = 30;
/// How long the traffic of a wave lasts, at most, in ns.
const WAVE_NS: u64 = 40_000;
/// Events after which a run that should have come to rest has not.
const EVENTS_MAX: u64 = 2_000_000;

/// What a run found wrong. The seed brings it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Everyone sleeps and something is not done: a wake-up was lost.
    Hang(String),
    /// It does not come to rest.
    Livelock,
    /// A frame arrived that no guest sent, or not as it was sent, or to someone else.
    Corrupt(String),
    /// A frame overtook another of its flow, or arrived twice.
    Reordered(String),
    /// What was sent, delivered and dropped does not add up.
    Lost(String),
    /// A guest that kept the protocol was stopped.
    Blamed(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hang(what) => write!(f, "everyone sleeps, but {what}"),
            Self::Livelock => f.write_str("does not come to rest"),
            Self::Corrupt(what) => write!(f, "corrupt: {what}"),
            Self::Reordered(what) => write!(f, "reordered: {what}"),
            Self::Lost(what) => write!(f, "does not add up: {what}"),
            Self::Blamed(what) => write!(f, "stopped without cause: {what}"),
        }
    }
}

impl std::error::Error for Finding {}

/// What a run did, to see that it did something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Guests that kept the protocol.
    pub honest: usize,
    /// Guests that did not.
    pub hostile: usize,
    /// Those of them that were stopped.
    pub stopped: usize,
    /// Frames that arrived at honest guests.
    pub frames: u64,
    /// Frames dropped, and counted.
    pub drops: u64,
    /// Kicks and calls.
    pub wakes: u64,
    /// Steps of everyone.
    pub events: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The back-end's turn.
    Turn,
    /// A kick, or the back-end's own timer, reaches the back-end.
    Kick,
    /// A guest's step.
    Step(usize),
    /// A call reaches a guest, or its application wants something.
    Call(usize),
    /// The application of a guest wants frames sent to another.
    App { from: usize, to: usize, frames: u64 },
    /// Phase 2 begins.
    Heal,
}

/// Whether someone acts, and whether a wake-up waits for him.
#[derive(Clone, Copy, Default)]
struct Actor {
    awake: bool,
    latched: bool,
}

struct World<B> {
    random: Random,
    now_ns: u64,
    /// Earliest first; those at the same time in the order they were made.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
    guests: Vec<Guest>,
    actors: Vec<Actor>,
    backend: B,
    server: Actor,
    /// Next number expected, by sender and receiver.
    flows: BTreeMap<(usize, usize), u64>,
    report: Report,
}

/// Runs the simulation of `seed` on the back-end that `backend` makes of the guests' links.
///
/// # Errors
/// [`Finding`]: what is wrong with the back-end, or with the rings.
pub fn run<B: Backend>(seed: u64, backend: impl FnOnce(&[Link]) -> B) -> Result<Report, Finding> {
    let mut random = Random::new(seed);
    let count = random.within(2..9) as usize;
    let kind = |i, random: &mut Random| match random.within(0..6) {
        // Two at least keep the protocol.
        0 | 1 if i >= 2 => Kind::Hostile,
        2 => Kind::Slow,
        _ => Kind::Honest,
    };
    let made = (0..count).map(|i| {
        let kind = kind(i, &mut random);
        Guest::new(i, kind, &mut random)
    });
    let (guests, links): (Vec<Guest>, Vec<Link>) = made.unzip();
    let mut world = World {
        random,
        now_ns: 0,
        events: BinaryHeap::new(),
        made: 0,
        actors: vec![Actor::default(); count],
        guests,
        backend: backend(&links),
        server: Actor { awake: true, latched: false },
        flows: BTreeMap::new(),
        report: Report::default(),
    };
    world.begin();
    world.settle()?;
    for _ in 0..WAVES {
        world.wave();
        world.settle()?;
    }
    Ok(world.report())
}

impl<B: Backend> World<B> {
    fn at(&mut self, delay_ns: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse((self.now_ns + delay_ns, self.made, event)));
    }

    /// Everyone gets up, and the applications' wishes are laid out in time.
    fn begin(&mut self) {
        self.at(0, Event::Turn);
        self.at(HEAL_NS, Event::Heal);
        let guests = self.guests.len();
        for from in 0..guests {
            self.at(0, Event::Call(from));
            // Some runs are busy to the end, some quiet long before it.
            let until = self.random.within(1000..HEAL_NS);
            for _ in 0..self.random.within(1..40) {
                let to = (from + 1 + self.random.index(guests - 1)) % guests;
                let frames = self.random.within(1..17);
                let when = self.random.within(0..until);
                self.at(when, Event::App { from, to, frames });
            }
        }
    }

    /// A little traffic between guests that keep the protocol.
    fn wave(&mut self) {
        let honest: Vec<usize> = (0..self.guests.len()).filter(|i| self.is_honest(*i)).collect();
        for _ in 0..self.random.within(1..5) {
            let from = self.random.index(honest.len());
            let to = (from + 1 + self.random.index(honest.len() - 1)) % honest.len();
            let frames = self.random.within(1..25);
            let when = self.random.within(0..WAVE_NS);
            self.at(when, Event::App { from: honest[from], to: honest[to], frames });
        }
    }

    /// Lets everyone act until no one does; then all must be well.
    fn settle(&mut self) -> Result<(), Finding> {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now_ns = at;
            self.report.events += 1;
            if self.report.events > EVENTS_MAX {
                return Err(Finding::Livelock);
            }
            self.act(event)?;
        }
        (0..self.guests.len()).filter(|i| self.is_honest(*i)).try_for_each(|i| self.judge(i))
    }

    fn act(&mut self, event: Event) -> Result<(), Finding> {
        match event {
            Event::Turn => self.turn(),
            Event::Kick if self.server.awake => self.server.latched = true,
            Event::Kick => {
                self.server.awake = true;
                self.backend.wake();
                self.at(0, Event::Turn);
            }
            Event::Step(i) => self.step(i)?,
            Event::Call(i) if self.actors[i].awake => self.actors[i].latched = true,
            Event::Call(i) => {
                self.actors[i].awake = true;
                self.guests[i].wake();
                let delay = self.guests[i].delay(&mut self.random);
                self.at(delay, Event::Step(i));
            }
            Event::App { from, to, frames } => {
                self.guests[from].outbox.extend((0..frames).map(|_| to));
                self.at(0, Event::Call(from));
            }
            Event::Heal => {
                for i in 0..self.guests.len() {
                    self.guests[i].healed = true;
                    // Only those wake who want to be told something they did not before.
                    if self.guests[i].lazy {
                        self.at(0, Event::Call(i));
                    }
                }
            }
        }
        Ok(())
    }

    fn turn(&mut self) {
        let mut calls = Vec::new();
        let turn = self.backend.turn(self.now_ns, &mut calls);
        for (guest, _) in calls {
            self.report.wakes += 1;
            let delay = self.random.within(200..5000);
            self.at(delay, Event::Call(guest));
        }
        let delay = self.random.within(100..1500);
        match turn {
            Turn::Again => self.at(delay, Event::Turn),
            Turn::Sleep(_) if std::mem::take(&mut self.server.latched) => {
                self.backend.wake();
                self.at(delay, Event::Turn);
            }
            Turn::Sleep(until) => {
                self.server.awake = false;
                if let Some(until) = until {
                    self.at(until.saturating_sub(self.now_ns), Event::Kick);
                }
            }
        }
    }

    fn step(&mut self, i: usize) -> Result<(), Finding> {
        let mut kicks: Vec<Ring> = Vec::new();
        let next = self.guests[i].step(&mut self.random, &mut kicks);
        for _ in kicks {
            self.report.wakes += 1;
            let delay = self.random.within(200..5000);
            self.at(delay, Event::Kick);
        }
        for bytes in std::mem::take(&mut self.guests[i].inbox) {
            self.arrived(i, &bytes)?;
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

    fn is_honest(&self, i: usize) -> bool {
        self.guests[i].kind != Kind::Hostile
    }

    /// A frame arrived at guest `i`.
    fn arrived(&mut self, i: usize, bytes: &[u8]) -> Result<(), Finding> {
        if !self.is_honest(i) {
            return Ok(());
        }
        self.report.frames += 1;
        let frame = Frame::parse(bytes);
        let Some(frame) = frame.filter(|f| self.guests.get(f.from).is_some_and(|g| g.tag == f.tag))
        else {
            // A hostile guest may send what it likes, as long as the others are whole.
            if self.guests.iter().any(|g| g.kind == Kind::Hostile) {
                return Ok(());
            }
            return Err(Finding::Corrupt(format!("guest {i} got {} bytes of no one", bytes.len())));
        };
        if frame.to != i {
            return Err(Finding::Corrupt(format!("guest {i} got a frame for {}", frame.to)));
        }
        if !self.is_honest(frame.from) {
            return Ok(());
        }
        let next = self.flows.entry((frame.from, i)).or_default();
        if frame.number < *next {
            let what = format!("{} from {} to {i} after {next}", frame.number, frame.from);
            return Err(Finding::Reordered(what));
        }
        *next = frame.number + 1;
        Ok(())
    }

    /// All is quiet. Is all well with guest `i`?
    fn judge(&self, i: usize) -> Result<(), Finding> {
        let (count, guest) = (self.backend.count(i), &self.guests[i]);
        if let Some(fault) = count.fault {
            return Err(Finding::Blamed(format!("guest {i}: {fault}")));
        }
        if let Some(left) = guest.unfinished() {
            return Err(Finding::Hang(format!("guest {i} has {left}")));
        }
        if count.taken != guest.sent || count.forwarded + count.dropped != guest.sent {
            return Err(Finding::Lost(format!("guest {i} sent {}, counted {count:?}", guest.sent)));
        }
        if count.delivered != guest.received {
            let what = format!("guest {i} got {}, counted {count:?}", guest.received);
            return Err(Finding::Lost(what));
        }
        Ok(())
    }

    fn report(mut self) -> Report {
        for i in 0..self.guests.len() {
            let count = self.backend.count(i);
            let hostile = usize::from(!self.is_honest(i));
            self.report.hostile += hostile;
            self.report.honest += 1 - hostile;
            self.report.stopped += usize::from(count.fault.is_some());
            self.report.drops += count.dropped;
        }
        self.report
    }
}
