//! Virtual time: everyone acts in small steps, in an order that the seed decides, and after each
//! step all must be well.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;

use switch::forward::Mode;

use crate::flawed::Mistake;
use crate::frame::To;
use crate::guest::{Guest, Kind, Link, Next, Ring};
use crate::random::Random;
use crate::switching::Switching;
use crate::worker::{Polling, Then, Token};

/// How long the applications want frames sent, in ns.
const TRAFFIC_NS: u64 = 3_000_000;
/// After healing: so many times a little traffic, and then all must drain again. Each is another
/// chance for a wake-up to be lost with nothing behind it that would hide the loss.
const WAVES: u64 = 20;
/// How long the traffic of a wave lasts, at most, in ns.
const WAVE_NS: u64 = 40_000;
/// How long after the last wish of a wave all must be done, in ns: less than the timer that saves
/// frames when a wake-up was lost.
const DRAIN_NS: u64 = 10_000_000;
/// The same where guests may still wait for others that never take anything.
const SETTLE_NS: u64 = 5_000_000_000;
/// Events after which a run that should have come to rest has not.
const EVENTS_MAX: u64 = 2_000_000;

/// What a run found wrong. The seed brings it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Someone sleeps who has something to do, and nothing is on its way to wake him.
    Asleep(String),
    /// All is quiet, and something is not done.
    Hang(String),
    /// It does not come to rest in time.
    Late(String),
    /// A frame that no guest sent, or not as it was sent, or half of one.
    Corrupt(String),
    /// A frame overtook another of its flow, or arrived twice.
    Reordered(String),
    /// A frame went back to its sender, or to a guest that it is not for.
    Misdelivered(String),
    /// What was sent, delivered and dropped does not add up.
    Lost(String),
    /// A guest that kept the protocol was stopped.
    Blamed(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asleep(what) => write!(f, "asleep: {what}"),
            Self::Hang(what) => write!(f, "all is quiet, but {what}"),
            Self::Late(what) => write!(f, "does not come to rest in time: {what}"),
            Self::Corrupt(what) => write!(f, "corrupt: {what}"),
            Self::Reordered(what) => write!(f, "reordered or duplicated: {what}"),
            Self::Misdelivered(what) => write!(f, "misdelivered: {what}"),
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
    App { from: usize, to: To, flow: u16, frames: u64 },
    /// A port is stopped, because of its guest's fault.
    Stop(usize),
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
    actors: Vec<Actor>,
    switch: Switching,
    /// Kicks under way, by port, queue and ring.
    kicks: BTreeMap<(usize, usize, Ring), u64>,
    /// Wake-ups of workers under way.
    pokes: Vec<u64>,
    /// Ports that are being stopped.
    stopping: BTreeSet<usize>,
    /// Nothing kept hostile guests from sending from the address of another.
    spoofed: bool,
    /// Frames of honest guests may have to wait for a hostile one that fell silent.
    tied: bool,
    mistake: Mistake,
    report: Report,
}

/// Runs the simulation of `seed` with a mistake in it; `polling` makes the policy of each queue.
///
/// # Errors
/// [`Finding`]: what is wrong with the switch, its ports, or the rings.
pub fn run(
    seed: u64,
    mistake: Mistake,
    polling: &dyn Fn(&mut Random) -> Box<dyn Polling>,
) -> Result<Report, Finding> {
    let mut random = Random::new(seed);
    let count = random.within(3..7) as usize;
    let kind = |i, random: &mut Random| match random.within(0..8) {
        // Two at least keep the protocol.
        0 | 1 if i >= 2 => Kind::Hostile,
        2 => Kind::Slow,
        3 => Kind::Deaf,
        _ => Kind::Honest,
    };
    let made = (0..count).map(|i| {
        let kind = kind(i, &mut random);
        Guest::new(i, kind, &mut random)
    });
    let (guests, links): (Vec<Guest>, Vec<Link>) = made.unzip();
    let mode = if random.one_in(5) { Mode::Cross } else { Mode::Switch };
    let tags = guests.iter().map(|g| g.is_honest().then_some(g.tag)).collect();
    let static_addresses = random.one_in(2);
    let hostile = guests.iter().any(|g| !g.is_honest());
    let spoofed = hostile && mode == Mode::Switch && !static_addresses;
    let tied = hostile && mode == Mode::Cross || spoofed;
    let switch =
        Switching::new(&links, tags, mode, static_addresses, mistake, &mut random, polling);
    let mut world = World {
        random,
        now_ns: 0,
        events: BinaryHeap::new(),
        made: 0,
        others: 0,
        actors: vec![Actor::default(); count],
        guests,
        kicks: BTreeMap::new(),
        pokes: vec![0; switch.workers.len()],
        switch,
        stopping: BTreeSet::new(),
        spoofed,
        tied,
        mistake,
        report: Report::default(),
    };
    world.begin();
    world.settle(SETTLE_NS)?;
    for _ in 0..WAVES {
        world.wave();
        let bound = if world.tied { SETTLE_NS } else { WAVE_NS + DRAIN_NS };
        world.settle(bound)?;
    }
    Ok(world.report())
}

impl World {
    fn at(&mut self, delay_ns: u64, event: Event) {
        self.made += 1;
        self.others += u64::from(event.is_other());
        self.events.push(Reverse((self.now_ns + delay_ns, self.made, event)));
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
        let heal = if self.random.one_in(4) { 80_000_000 } else { TRAFFIC_NS };
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
    }

    /// Some frames of guest `from` to one of `among`, to everyone, or to no one.
    fn wish(&mut self, from: usize, among: &[usize], max: u64, when: u64) {
        let others: Vec<usize> = among.iter().copied().filter(|to| *to != from).collect();
        let to = match self.random.within(0..16) {
            0 => To::All,
            // An address that the switch never learns.
            1 if self.random.one_in(2) => To::One(200),
            _ => To::One(others[self.random.index(others.len())]),
        };
        let flow = self.random.within(0..4) as u16;
        let frames = self.random.within(1..max);
        self.at(when, Event::App { from, to, flow, frames });
    }

    /// A little traffic between guests that keep the protocol.
    fn wave(&mut self) {
        let honest: Vec<usize> =
            (0..self.guests.len()).filter(|i| self.guests[*i].is_honest()).collect();
        for _ in 0..self.random.within(1..5) {
            let from = honest[self.random.index(honest.len())];
            let when = self.random.within(0..WAVE_NS);
            self.wish(from, &honest, 20, when);
        }
    }

    /// Lets everyone act until no one does any more; then all must be well.
    fn settle(&mut self, bound_ns: u64) -> Result<(), Finding> {
        let started_ns = self.now_ns;
        while self.others > 0 || !self.switch.workers.iter().all(|w| w.is_idle(self.now_ns)) {
            let Reverse((at, _, event)) = self.events.pop().expect("someone is not idle");
            self.now_ns = at;
            self.report.events += 1;
            if event.is_other() {
                self.others -= 1;
                self.switch.workers.iter_mut().for_each(|w| w.disturb());
            }
            if self.report.events > EVENTS_MAX || at - started_ns > bound_ns {
                return Err(Finding::Late(self.state()));
            }
            self.act(event)?;
            self.calls();
            self.check_wakes()?;
        }
        (0..self.guests.len())
            .filter(|i| self.guests[*i].is_honest())
            .try_for_each(|i| self.judge(i))
    }

    fn act(&mut self, event: Event) -> Result<(), Finding> {
        match event {
            Event::Work(worker) => self.work(worker)?,
            Event::Timer(worker, timer) => {
                if self.switch.workers[worker].timer == timer {
                    self.rouse(worker, None);
                }
            }
            Event::Poke(worker) => {
                self.pokes[worker] -= 1;
                self.rouse(worker, Some(Token::Retry));
            }
            Event::Kick(port, queue, ring) => {
                *self.kicks.get_mut(&(port, queue, ring)).expect("under way") -= 1;
                let (worker, token) = self.switch.kicked(port, queue, ring);
                self.rouse(worker, Some(token));
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
            Event::Stop(port) => self.switch.stop(port),
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
    fn rouse(&mut self, worker: usize, token: Option<Token>) {
        if self.switch.workers[worker].wake(token, self.now_ns) {
            let delay = self.latency();
            self.at(delay, Event::Work(worker));
            self.poke(worker);
        }
    }

    /// Passes on what a worker found for others.
    fn poke(&mut self, worker: usize) {
        let pokes = std::mem::take(&mut self.switch.workers[worker].pokes);
        for other in 0..self.switch.workers.len() {
            if pokes & 1 << other != 0 {
                self.pokes[other] += 1;
                let delay = self.latency();
                self.at(delay, Event::Poke(other));
            }
        }
    }

    fn work(&mut self, worker: usize) -> Result<(), Finding> {
        let then = self.switch.step(worker, self.now_ns)?;
        self.poke(worker);
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
            *self.kicks.entry((i, queue, ring)).or_default() += 1;
            let delay = self.latency();
            self.at(delay, Event::Kick(i, queue, ring));
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

    /// What guest `i` sent, found, and got back goes into the books.
    fn book(&mut self, i: usize) -> Result<(), Finding> {
        for (q, pair) in self.guests[i].pairs.iter_mut().enumerate() {
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

    /// Whether a kick of a ring is still to come, or to be looked at.
    fn is_kicked(&self, port: usize, queue: usize, ring: Ring) -> bool {
        let due = self.guests[port].pairs[queue].kick_due[usize::from(ring == Ring::Rx)];
        let (worker, token) = self.switch.kicked(port, queue, ring);
        let under_way = self.kicks.get(&(port, queue, ring)).is_some_and(|n| *n > 0);
        due || under_way || self.switch.workers[worker].pending.contains(&token)
    }

    /// No queue may be cold that has something to do, and no worker sleep that could go on, unless
    /// a kick is on its way.
    fn check_wakes(&self) -> Result<(), Finding> {
        for (w, worker) in self.switch.workers.iter().enumerate() {
            let poked = self.pokes[w] > 0
                || worker.pending.contains(&Token::Retry)
                || self.switch.workers.iter().any(|other| other.will_wake(w));
            for served in worker.queues.iter().filter(|q| self.guests[q.port].is_honest()) {
                let (port, queue) = (served.port, served.queue);
                let (sent, shown) = (
                    self.guests[port].pairs[queue].sent,
                    self.switch.ledger.ingress(port, queue).shown,
                );
                if !served.hot && sent > shown && !self.is_kicked(port, queue, Ring::Tx) {
                    let what = format!("queue {queue} of port {port}: {sent} sent, {shown} taken");
                    return Err(Finding::Asleep(what));
                }
                if worker.is_asleep()
                    && !poked
                    && let Some(to) = self.could_deliver(port, queue)
                {
                    let what = format!(
                        "queue {queue} of port {port} holds a frame for {to}, which has room"
                    );
                    return Err(Finding::Asleep(what));
                }
            }
        }
        Ok(())
    }

    /// Whether the oldest frame that a queue holds is for a guest that has room, and for which.
    fn could_deliver(&self, port: usize, queue: usize) -> Option<usize> {
        let ledger = &self.switch.ledger;
        let (_, frame) = ledger.ingress(port, queue).held.front().filter(|_| !self.spoofed)?;
        let to = ledger.waits_for(port, frame)?;
        self.has_room(to, frame.len() as u64).then_some(to)
    }

    /// Whether guest `to`, which keeps the protocol, certainly has room for a frame, on each of
    /// its queues, and has no kick on its way that says so.
    fn has_room(&self, to: usize, len: u64) -> bool {
        let Some(guest) = self.guests.get(to).filter(|g| g.is_honest()) else { return false };
        let total = len + u64::from(guest.format.hdr_len);
        let need = if guest.format.mergeable { total.div_ceil(guest.rx_len) } else { 1 };
        (0..guest.pairs.len()).all(|q| {
            guest.waiting(q).is_some_and(|n| n >= need) && !self.is_kicked(to, q, Ring::Rx)
        })
    }

    /// All is quiet. Is all well with guest `i`?
    fn judge(&self, i: usize) -> Result<(), Finding> {
        let guest = &self.guests[i];
        if let Some(left) = guest.unfinished() {
            let books = (0..guest.pairs.len()).filter_map(|q| self.switch.ledger.left(i, q));
            let books = books.collect::<Vec<_>>().join("; ");
            return Err(Finding::Hang(format!("guest {i} has {left} ({books})")));
        }
        for (q, pair) in guest.pairs.iter().enumerate() {
            if let Some(left) = self.switch.ledger.left(i, q) {
                return Err(Finding::Hang(format!("of queue {q} of port {i} {left}")));
            }
            let (ingress, egress) = self.switch.stats(i, q);
            let counted = [
                ("frames sent", pair.sent, ingress.frames.get()),
                ("bytes sent", pair.sent_bytes, ingress.bytes.get()),
                ("frames received", pair.received, egress.frames.get()),
                ("bytes received", pair.received_bytes, egress.bytes.get()),
            ];
            for (what, is, counted) in counted {
                if is != counted {
                    let what = format!("queue {q} of guest {i}: {is} {what}, {counted} counted");
                    return Err(Finding::Lost(what));
                }
            }
        }
        Ok(())
    }

    /// Who is not done, for people.
    fn state(&self) -> String {
        let guests = self.guests.iter().enumerate().filter(|(_, g)| g.is_honest());
        let left = guests.filter_map(|(i, g)| Some(format!("guest {i} has {}", g.unfinished()?)));
        let workers = self.switch.workers.iter().enumerate();
        let awake = workers.filter(|(_, w)| !w.is_idle(self.now_ns));
        let awake = awake.map(|(w, _)| format!("worker {w} is awake"));
        left.chain(awake).collect::<Vec<_>>().join("; ")
    }

    fn report(mut self) -> Report {
        for (port, guest) in self.guests.iter().enumerate() {
            let honest = u64::from(guest.is_honest());
            self.report.honest += honest;
            self.report.hostile += 1 - honest;
            for q in 0..guest.pairs.len() {
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
