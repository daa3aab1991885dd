//! Workers in virtual time: the program's scheduler on the product's ports and forwarder.
//!
//! Nothing is decided here. Each step carries out one effect of [`Scheduler`], or a part of one, as
//! the program's worker does; between two steps the others act. Most [`Mistake`]s are effects that
//! are dropped or altered here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use switch::fdb::PortId;
use switch::forward::{ArmedFull, Forwarder, PortEvent, Source, Table};
use switch::frame::Burst;
use switch::poll::{Costs, State};
use switch::port::{Fault, Ingress};
use switch::schedule::{self, Effect, KICK_NS, Scheduler, Took, Why};
use switch::tuning::Drain;

use crate::balance::{Balance, Burden};
use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::ledger::Ledger;
use crate::random::Random;
use crate::shares::Shares;
use crate::shown::shown;

/// Polls that find nothing after which a queue counts as quiet.
const QUIET_POLLS: u32 = 2;
/// Times in a row that arming may say there is work and a burst then do nothing.
const VAIN_MAX: u32 = 3;
/// What trying a full destination again takes, in ns.
const RETRY_TAKES_NS: u64 = 400;

/// Names an ingress queue: port and queue.
pub(crate) type Name = (usize, usize);

/// The same, for a scheduler.
pub(crate) fn token((port, queue): Name) -> u64 {
    (port as u64) << 32 | queue as u64
}

/// The name that a token stands for.
pub(crate) fn name_of(token: u64) -> Name {
    ((token >> 32) as usize, (token as u32) as usize)
}

/// What a worker's epoll set tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Token {
    /// An ingress queue was kicked.
    Ingress(usize, usize),
    /// A receiver made room.
    Egress(usize, usize),
}

/// What ends a worker's sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A descriptor.
    Kick(Token),
    /// It was sent a command.
    Command,
    /// Its time is up.
    Timer,
}

/// What a worker is asked to do between two rounds.
pub(crate) enum Command {
    Serve(Served),
    Drop(Name),
    /// Gives a queue to another worker.
    Away(Name, usize),
    /// A queue's settings changed.
    Poll(Name),
    /// A destination that frames are held for has room.
    Retry,
}

/// What an ingress queue is for a worker here.
pub(crate) struct Io {
    pub name: Name,
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// What a burst costs for each frame, in ns.
    pub frame_ns: u64,
}

/// An ingress queue to serve.
pub(crate) type Served = schedule::Served<Io>;

/// A served queue and its state.
pub(crate) type Queue = schedule::Queue<Io>;

/// What is seen of a queue.
#[derive(Default)]
struct Notes {
    /// Polls in vain since anything happened elsewhere.
    quiet: u32,
    /// Times in a row that there was work, and none was done.
    vain: u32,
    shown: u64,
    /// It came from another worker, and was not polled yet.
    is_new: bool,
}

/// What a worker wants after a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Another step.
    Go,
    /// Sleep, for so long at most.
    Sleep(Option<u64>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The scheduler's next effect.
    Go,
    /// A queue is to be armed; its burst found so many frames.
    Arm(usize, usize),
    /// About to sleep, for so long at most.
    Wait(Option<u64>),
    Asleep,
    Woken,
}

pub(crate) struct Worker {
    pub index: u8,
    scheduler: Scheduler<Io>,
    forwarder: Forwarder,
    table: Arc<Table>,
    mistake: Mistake,
    notes: BTreeMap<u64, Notes>,
    shares: Shares,
    /// Kicks that it has not seen.
    pub pending: BTreeSet<Token>,
    /// Queues whose kicks it does not wait for.
    muted: BTreeSet<Name>,
    /// Those of them that it waits for again since the last step.
    pub unmuted: Vec<Name>,
    pub commands: Vec<Command>,
    /// Someone wrote to its own descriptor since it last polled.
    signalled: bool,
    /// Ports whose guests broke the protocol.
    pub faults: Vec<(usize, Fault)>,
    /// Egress queues that take nothing for long, or (false) do again.
    pub starved: Vec<(Name, bool)>,
    /// Commands for other workers.
    pub sends: Vec<(usize, Command)>,
    /// Queues that it stopped serving, and who is to get them.
    pub given: Vec<(Served, usize)>,
    /// Which of its timers counts.
    pub timer: u64,
    phase: Phase,
    /// The clock as it last read it; whether a turn is over, and it is to be read.
    time_ns: u64,
    reads_clock: bool,
    scratch: Burst<'static>,
    /// Nothing but its timer ended the last sleep.
    timed_out: bool,
    /// A round is about to begin.
    begins: bool,
    /// When the last one began, by its clock.
    pub began_ns: u64,
    /// What the last step cost beyond what every step costs.
    extra_ns: u64,
    /// The books' progress when this round began.
    progress: u64,
    progress_ns: u64,
    /// Rounds in which nothing happened.
    idle_rounds: u32,
    pub naps: u64,
    burden: Burden,
    /// It sleeps only until a time that is set, and is as loaded as before.
    naps_now: bool,
    /// Queues that it was asked to give away.
    asked: BTreeSet<u64>,
    /// Queues that it gave away for its load.
    pub by_load: u64,
    /// What was found wrong.
    pub finding: Option<Finding>,
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("one thread")
}

impl Worker {
    pub fn new(
        index: u8,
        forwarder: Forwarder,
        table: Arc<Table>,
        costs: Costs,
        mistake: Mistake,
    ) -> Self {
        Self {
            index,
            scheduler: Scheduler::new(index, costs),
            forwarder,
            table,
            mistake,
            notes: BTreeMap::new(),
            shares: Shares::default(),
            pending: BTreeSet::new(),
            muted: BTreeSet::new(),
            unmuted: Vec::new(),
            commands: Vec::new(),
            signalled: false,
            faults: Vec::new(),
            starved: Vec::new(),
            sends: Vec::new(),
            given: Vec::new(),
            timer: 0,
            phase: Phase::Go,
            time_ns: 0,
            reads_clock: false,
            scratch: Burst::default(),
            timed_out: false,
            begins: false,
            began_ns: 0,
            extra_ns: 0,
            progress: 0,
            progress_ns: 0,
            idle_rounds: 0,
            naps: 0,
            burden: Burden::default(),
            naps_now: false,
            asked: BTreeSet::new(),
            by_load: 0,
            finding: None,
        }
    }

    pub fn queues(&self) -> &[Queue] {
        self.scheduler.queues()
    }

    /// Names of the queues that it serves, or is about to give away.
    pub fn names(&self) -> impl Iterator<Item = Name> {
        let leaving = self.scheduler.leaving().map(|served| served.of.name);
        self.queues().iter().map(|queue| queue.served.of.name).chain(leaving)
    }

    /// Whether it sleeps until something wakes it.
    pub fn rests(&self) -> bool {
        self.is_asleep() && !self.naps_now
    }

    pub fn is_asleep(&self) -> bool {
        self.phase == Phase::Asleep
    }

    /// Whether it found room for frames that worker `other` holds, and will wake it.
    pub fn will_wake(&self, other: usize) -> bool {
        self.scheduler.wakes() & 1 << other != 0
    }

    /// Whether it waits for queue `queue` of `port`.
    pub fn waits_for(&self, port: usize, queue: usize) -> bool {
        self.forwarder.is_blocked_by(PortId(port as u16), queue as u16)
    }

    /// Whether it is about to poll a queue, as someone asked it to.
    pub fn will_poll(&self, name: Name) -> bool {
        let asks = |command: &Command| matches!(command, Command::Poll(of) if *of == name);
        self.commands.iter().any(asks)
    }

    /// Whether nothing more will come of it by itself.
    pub fn is_idle(&self, now_ns: u64) -> bool {
        // Held frames are delivered or given up at some time, or else forgotten.
        if self.forwarder.is_blocked() && now_ns.saturating_sub(self.progress_ns) < 2_000_000_000 {
            return false;
        }
        let told = self.commands.is_empty() && self.pending.is_empty();
        let naps = |q: &Queue| q.state() == State::Warm && is_soon(q.nap_until_ns(), now_ns);
        let polls = |q: &&Queue| q.is_listed() || naps(q);
        let is_quiet = |q: &Queue| self.notes[&q.served.token].quiet >= QUIET_POLLS;
        let quiet = self.queues().iter().filter(polls).all(is_quiet);
        let polling = self.queues().iter().any(|q| polls(&q));
        told && quiet && self.forwarder.late().is_none() && (self.is_asleep() || polling)
    }

    /// Something happened that it may be concerned with.
    pub fn disturb(&mut self) {
        self.notes.values_mut().for_each(|notes| notes.quiet = 0);
    }

    /// How long the last step took, in ns.
    pub fn delay(&mut self, random: &mut Random) -> u64 {
        // A round that finds nothing may as well be a long one.
        let least = random.within(100..1500) << self.idle_rounds.min(4);
        least + std::mem::take(&mut self.extra_ns)
    }

    /// Something wakes it, if it sleeps. Returns whether it does.
    pub fn wake(&mut self, wake: Wake) -> bool {
        match wake {
            Wake::Kick(Token::Ingress(port, queue)) if self.muted.contains(&(port, queue)) => {
                return false;
            }
            Wake::Kick(token) => _ = self.pending.insert(token),
            Wake::Command => self.signalled = true,
            Wake::Timer => {}
        }
        if !self.is_asleep() {
            return false;
        }
        (self.phase, self.timed_out) = (Phase::Woken, wake == Wake::Timer);
        true
    }

    /// Begins to serve a queue.
    pub fn adopt(&mut self, served: Served, now_ns: u64) {
        let notes = Notes { is_new: now_ns > 0, ..Notes::default() };
        self.notes.insert(served.token, notes);
        self.scheduler.add(served, now_ns);
    }

    // ---- steps ----

    /// One step.
    pub fn step(&mut self, now_ns: u64, ledger: &mut Ledger, balance: &mut Balance) -> Then {
        match self.phase {
            Phase::Go => {
                if std::mem::take(&mut self.reads_clock) {
                    self.shares.end_turn(now_ns);
                    self.time_ns = now_ns;
                }
                self.go_on(now_ns, ledger, balance);
            }
            Phase::Arm(at, frames) => self.arm(at, frames, ledger),
            Phase::Wait(timeout_ns) => {
                if self.pending.is_empty() && !self.signalled {
                    self.phase = Phase::Asleep;
                    self.timer += 1;
                    return Then::Sleep(timeout_ns);
                }
                self.timed_out = false;
                self.end_wait(now_ns);
            }
            Phase::Woken => self.end_wait(now_ns),
            Phase::Asleep => unreachable!("wake comes first"),
        }
        Then::Go
    }

    /// Up to the next effect that takes time or touches what others see.
    fn go_on(&mut self, now_ns: u64, ledger: &mut Ledger, balance: &mut Balance) {
        loop {
            let effect = self.scheduler.next(self.time_ns, &self.forwarder);
            if !is_asked_for(&effect) && std::mem::take(&mut self.begins) {
                self.began_ns = self.time_ns;
            }
            let commands = !self.commands.is_empty();
            let is_own = match effect {
                Effect::RunCommands => !commands,
                Effect::Measure { .. } => true,
                _ => false,
            };
            if let Effect::Measure { load, ends_period } = effect {
                self.measure(load, ends_period, balance);
            }
            self.carry_out(effect, now_ns, ledger);
            if !is_own || self.finding.is_some() {
                break;
            }
        }
    }

    fn carry_out(&mut self, effect: Effect<Io>, now_ns: u64, ledger: &mut Ledger) {
        match effect {
            Effect::RunCommands => {
                self.end_round(now_ns, ledger);
                self.run_commands(now_ns);
            }
            Effect::Serve { at, max } => self.serve(at, max, now_ns, ledger),
            Effect::NotifyLate { rests } => {
                if self.mistake != Mistake::ForgetsLateCalls {
                    self.forwarder.notify_late(self.time_ns, rests);
                }
            }
            Effect::Disarm { at } => lock(&self.scheduler.queue(at).served.of.ingress).disarm(),
            Effect::Mute { at } => {
                let name @ (port, queue) = self.scheduler.queue(at).served.of.name;
                self.muted.insert(name);
                self.pending.remove(&Token::Ingress(port, queue));
            }
            Effect::Unmute { at } => {
                let name = self.scheduler.queue(at).served.of.name;
                self.muted.remove(&name);
                self.unmuted.push(name);
            }
            Effect::Retry { all, why } => self.retry(all, why, now_ns, ledger),
            Effect::Wake(workers) => {
                let others = (0..64).filter(|w| workers & 1 << w != 0);
                self.sends.extend(others.map(|w| (w, Command::Retry)));
            }
            Effect::Measure { .. } => {}
            Effect::Give { queues, to } => {
                for served in queues {
                    self.forget(&served);
                    self.by_load += u64::from(!self.asked.remove(&served.token));
                    self.given.push((served, to));
                }
            }
            Effect::PollKicks => self.kicks(now_ns),
            Effect::ArmFull => {
                let busy = self.queues().iter().any(Queue::is_listed);
                let skips = busy && self.mistake == Mistake::BusyForgetsHeld;
                let armed = match skips {
                    true => ArmedFull { full: true, wake: 0 },
                    false => self.forwarder.arm_blocked(),
                };
                self.scheduler.record_arm_full(armed);
            }
            Effect::Wait { timeout_ns, naps } => {
                self.naps_now = naps;
                self.wait(timeout_ns, now_ns);
            }
        }
    }

    /// A load measurement ended.
    fn measure(&mut self, load: u32, ends_period: bool, balance: &mut Balance) {
        let Self { scheduler, shares, burden, time_ns, mistake, .. } = self;
        let me = usize::from(self.index);
        balance.loads[me].0 = load;
        if !balance.is_on {
            if ends_period {
                scheduler.skip_period(*time_ns);
            }
            return;
        }
        if ends_period && balance.may_report() {
            let Balance { leveller, loads, moves, .. } = balance;
            moves.extend(scheduler.level(leveller, *time_ns, |w| loads[w].1));
            shares.set_elsewhere(leveller.elsewhere(me));
        }
        if *mistake != Mistake::NeverBalances {
            scheduler.balance(balance.loads());
        }
        let others = balance.loads().enumerate().filter(|(w, _)| *w != me);
        let least = others.map(|(_, load)| load).min().unwrap_or(u32::MAX);
        let heavy = burden.judge((load, least), scheduler.queues(), *time_ns);
        self.found(heavy.map(Finding::Unbalanced));
    }

    fn end_round(&mut self, now_ns: u64, ledger: &Ledger) {
        self.begins = true;
        self.idle_rounds += 1;
        if self.progress != ledger.progress {
            (self.progress, self.progress_ns, self.idle_rounds) = (ledger.progress, now_ns, 0);
        }
        let unfair = self.shares.end_round(self.scheduler.queues());
        self.found(unfair.map(Finding::Unfair));
    }

    fn found(&mut self, finding: Option<Finding>) {
        if self.finding.is_none() {
            self.finding = finding;
        }
    }

    fn run_commands(&mut self, now_ns: u64) {
        if !self.commands.is_empty() {
            self.time_ns = now_ns;
        }
        for command in std::mem::take(&mut self.commands) {
            match command {
                Command::Serve(served) => self.adopt(served, now_ns),
                Command::Drop(name) => {
                    if let Some(served) = self.scheduler.remove(token(name)) {
                        self.forget(&served);
                        served.source.tuning.drained();
                    }
                }
                Command::Away(name, to) => {
                    self.asked.insert(token(name));
                    self.scheduler.give_away(token(name), to);
                }
                Command::Poll(name) => {
                    self.scheduler.poll(token(name));
                    self.note(name).quiet = 0;
                }
                Command::Retry => self.scheduler.wake(1 << self.index),
            }
        }
    }

    fn forget(&mut self, served: &Served) {
        let name @ (port, queue) = served.of.name;
        self.notes.remove(&served.token);
        self.muted.remove(&name);
        self.pending.remove(&Token::Ingress(port, queue));
    }

    fn note(&mut self, name: Name) -> &mut Notes {
        self.notes.entry(token(name)).or_default()
    }

    /// One burst.
    fn serve(&mut self, at: usize, max: usize, now_ns: u64, ledger: &mut Ledger) {
        let queue = self.scheduler.queue(at);
        let schedule::Served { source, of, token, .. } = &queue.served;
        let notes = self.notes.get_mut(token).expect("it is served");
        let (token, name) = (*token, of.name);
        if std::mem::take(&mut notes.is_new) && self.mistake == Mistake::AdoptsCold {
            self.reads_clock = true;
            if self.scheduler.record_burst(&Took::default()) == schedule::Then::Arm {
                self.scheduler.record_arm(true, None);
            }
            return;
        }
        let mut ingress = lock(&of.ingress);
        let mut shown = shown(&mut *ingress, name, ledger, now_ns);
        let (forwarder, scratch) = (&mut self.forwarder, &mut self.scratch);
        let drained = source.tuning.drain() != Drain::Off;
        let mut took = schedule::burst(source, max, &mut shown, forwarder, scratch, self.time_ns);
        let shown_frames = shown.hooks.frames;
        self.extra_ns += shown_frames * of.frame_ns;
        let is_due = ingress.due().is_some_and(|at_ns| is_soon(at_ns, now_ns));
        drop(ingress);
        ledger.sync(None, now_ns);
        notes.quiet = if took.frames > 0 || is_due { 0 } else { notes.quiet + 1 };
        self.shares.begin_turn(token, took.frames, self.time_ns);
        let events = std::mem::take(&mut took.findings.events);
        self.blame(source.port, took.fault.take(), events);
        let frames = took.frames;
        if drained && (shown_frames, frames) != (0, 0) {
            self.found(Some(Finding::Drained(format!("queue {name:?}: {frames} frames"))));
        }
        if self.mistake == Mistake::IgnoresDebt {
            took.frames = 0;
        }
        match self.scheduler.record_burst(&took) {
            schedule::Then::Arm => self.phase = Phase::Arm(at, frames),
            schedule::Then::Over => self.reads_clock = true,
        }
    }

    /// Ports whose guests broke the protocol, `fault` that of the sender `from`.
    fn blame(&mut self, from: PortId, fault: Option<Fault>, mut events: Vec<PortEvent>) {
        if self.mistake == Mistake::BlamesSender {
            for event in &mut events {
                if let PortEvent::Fault { port, .. } = event {
                    *port = from;
                }
            }
        }
        self.record_events(events);
        self.faults.extend(fault.map(|fault| (usize::from(from.0), fault)));
    }

    fn record_events(&mut self, events: Vec<PortEvent>) {
        for event in events {
            match event {
                PortEvent::Fault { port, fault, .. } => {
                    self.faults.push((usize::from(port.0), fault));
                }
                PortEvent::Starved { port, queue, begins } => {
                    self.starved.push(((usize::from(port.0), usize::from(queue)), begins));
                }
            }
        }
    }

    /// Arms the queue just served; if there is work, it is polled on.
    fn arm(&mut self, at: usize, frames: usize, ledger: &Ledger) {
        (self.phase, self.reads_clock) = (Phase::Go, true);
        let queue = self.scheduler.queue(at);
        let (served, disarms) = (&queue.served, queue.poller().disarms());
        let (token, (port, index)) = (served.token, served.of.name);
        let (nothing, due) = schedule::arm(&mut *lock(&served.of.ingress), disarms);
        self.scheduler.record_arm(nothing, due);
        let notes = self.notes.get_mut(&token).expect("it is served");
        let shown = ledger.ingress(port, index).shown;
        let vain = !nothing && frames == 0 && shown == notes.shown;
        notes.vain = if vain { notes.vain + 1 } else { 0 };
        notes.shown = shown;
        if notes.vain > VAIN_MAX && ledger.is_honest(port) {
            let what = format!("queue {index} of port {port} has work, and a burst does none");
            self.found(Some(Finding::Spins(what)));
        }
    }

    /// Delivers what is held for destinations that may have room.
    fn retry(&mut self, all: bool, why: Why, now_ns: u64, ledger: &mut Ledger) {
        let skips = match self.mistake {
            Mistake::NeverRetries => all,
            Mistake::BusyForgetsHeld => why == Why::Busy,
            Mistake::GivesUpInSilence => why == Why::Late && !self.timed_out,
            _ => false,
        };
        if skips {
            return;
        }
        let Self { forwarder, scheduler, shares, extra_ns, .. } = self;
        let findings = forwarder.retry_each(all, self.time_ns, |(port, queue), _| {
            let payer = token((port.0.into(), queue.into()));
            scheduler.record_delivery(payer, RETRY_TAKES_NS);
            shares.charge(payer, RETRY_TAKES_NS);
            *extra_ns += RETRY_TAKES_NS;
        });
        ledger.sync(None, now_ns);
        // Whose fault it is has nothing to do with who sends.
        self.record_events(findings.events);
        if self.mistake != Mistake::ForgetsPaused {
            self.disturb();
            self.scheduler.record_retry(all, findings.wake, &self.forwarder);
        } else {
            self.scheduler.wake(findings.wake);
        }
    }

    // ---- kicks and sleep ----

    /// Sees all kicks that arrived.
    fn kicks(&mut self, now_ns: u64) {
        self.signalled = false;
        let kicks = std::mem::take(&mut self.pending);
        self.time_ns = now_ns;
        for kick in kicks {
            match kick {
                Token::Ingress(port, queue) => {
                    // It may have moved on.
                    let token = token((port, queue));
                    if self.scheduler.kick(token, now_ns) {
                        self.shares.charge(token, KICK_NS);
                        self.note((port, queue)).quiet = 0;
                    }
                }
                Token::Egress(port, queue) => {
                    let egress = &self.table[port].as_ref().expect("ports stay").egress[queue];
                    let payer = token((port, queue));
                    if self.scheduler.kick_room(egress, payer) {
                        self.starved.push(((port, queue), false));
                    }
                    self.shares.charge(payer, KICK_NS);
                }
            }
        }
    }

    fn wait(&mut self, timeout_ns: Option<u64>, now_ns: u64) {
        if !self.commands.is_empty() {
            self.scheduler.record_wait(false);
            return;
        }
        let naps = self.queues().iter().any(|queue| queue.state() == State::Warm);
        let forgets = match self.mistake {
            Mistake::ForgetsNaps => naps,
            Mistake::NapsForEver => naps && now_ns.is_multiple_of(3),
            _ => false,
        };
        self.naps += u64::from(naps);
        self.phase = Phase::Wait(timeout_ns.filter(|_| !forgets));
    }

    fn end_wait(&mut self, now_ns: u64) {
        self.phase = Phase::Go;
        self.kicks(now_ns);
        self.scheduler.record_wait(true);
    }
}

/// Whether a time is near enough to wait for it. The rest of a packet that never comes is not.
fn is_soon(at_ns: u64, now_ns: u64) -> bool {
    at_ns < now_ns + 1_000_000_000
}

/// Whether an event asked for an effect, which comes before all others.
fn is_asked_for(effect: &Effect<Io>) -> bool {
    use Effect::{Disarm, Give, Mute, Retry, Unmute, Wake};
    let room = matches!(effect, Retry { why: Why::Room, .. });
    room || matches!(effect, Disarm { .. } | Mute { .. } | Unmute { .. } | Give { .. } | Wake(_))
}

/// Where a queue's frames come from.
pub(crate) fn served(
    name: Name,
    source: Source,
    ingress: Arc<Mutex<dyn Ingress>>,
    frame_ns: u64,
) -> Served {
    Served { token: token(name), source, notifies: true, of: Io { name, ingress, frame_ns } }
}
