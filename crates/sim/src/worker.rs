//! Workers in virtual time: the program's scheduler on the product's ports and forwarder.
//!
//! Nothing is decided here. Each step carries out one effect of [`Scheduler`], or a part of one, as
//! the program's worker does; others act between two steps. Most [`Mistake`]s are effects dropped
//! or altered here.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shm::sync::Mutex;
use switch::fair::Usage;
use switch::fdb::PortId;
use switch::forward::{ArmedFull, Forwarder, PortEvent, Source, Table};
use switch::frame::Burst;
use switch::poll::{Costs, State};
use switch::port::{Fault, Ingress, QueueId};
use switch::schedule::{self, BurstResult, COMMANDS_MAX, Effect, KICK_COST, Scheduler, Why};
use switch::time::{Instant, Ns};
use switch::tuning::Drain;

use crate::balance::{Balance, LoadCheck};
use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::ledger::Ledger;
use crate::random::Random;
use crate::seen::Seen;
use crate::shares::Shares;
use crate::shown::shown;

/// Consecutive empty polls after which a queue counts as idle.
const EMPTY_POLLS_MIN: u32 = 2;
/// Most consecutive times that arming may report work when a burst does none.
const SPURIOUS_MAX: u32 = 3;
/// Duration of a retry of a full destination.
const RETRY_TAKES: Ns = Ns::new(400);

/// An ingress queue: port and index.
pub(crate) type Name = (usize, usize);

/// Token of a queue for the scheduler.
pub(crate) fn token(name: Name) -> u64 {
    let QueueId { port, queue } = queue_id(name);
    schedule::token(port, queue, false)
}

fn queue_id(name: Name) -> QueueId {
    QueueId { port: PortId(name.0 as u16), queue: name.1 as u16 }
}

/// Queue of a token.
pub(crate) fn name_of(token: u64) -> Name {
    let QueueId { port, queue } = schedule::queue_id(token);
    (port.0.into(), queue.into())
}

/// An event of a worker's epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Token {
    /// An ingress queue was kicked.
    Ingress(usize, usize),
    /// A receiver made room.
    Egress(usize, usize),
}

/// Reason for which a worker is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A descriptor.
    Kick(Token),
    /// It has commands.
    Command,
    /// Its timer expired.
    Timer,
}

/// A command about a queue, run between two rounds. All workers have the same table.
pub(crate) type Command = schedule::Command<Served, Infallible>;

/// The simulation's part of an ingress queue.
pub(crate) struct Io {
    pub name: Name,
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// Cost of a burst per frame.
    pub frame: Ns,
    /// Generation of its assignment.
    pub generation: u64,
}

/// An ingress queue to serve.
pub(crate) type Served = schedule::Served<Io>;

/// A served queue and its state.
pub(crate) type Queue = schedule::Queue<Io>;

/// Observations of a queue.
#[derive(Default)]
struct Notes {
    /// Consecutive empty polls since the last external event.
    empty_polls: u32,
    /// Consecutive times that arming reported work when the burst had done none.
    spurious: u32,
    /// Frames shown when it was last armed.
    shown: u64,
    /// Received from another worker and not polled yet.
    is_new: bool,
}

/// A worker's next action after a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Takes another step.
    Go,
    /// Sleeps, at most for the given time.
    Sleep(Option<Ns>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Carries out the scheduler's next effect.
    Go,
    /// Arms a queue, given its index and the number of frames of its burst.
    Arm(usize, usize),
    /// About to sleep, at most for the given time.
    Wait(Option<Ns>),
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
    /// Kicks not handled yet.
    pub pending: BTreeSet<Token>,
    /// Queues whose kicks are muted.
    muted: BTreeSet<Name>,
    /// Queues unmuted since the last step.
    pub unmuted: Vec<Name>,
    pub commands: schedule::Commands<Served, Infallible>,
    /// It retries destinations for which it holds frames: one of them has room.
    pub retries: bool,
    /// It was notified of commands since it last polled.
    signalled: bool,
    /// Ports whose guests violated the protocol.
    pub faults: Vec<(usize, Fault)>,
    /// Egress queues whose stall began, or (false) ended.
    pub stalled: Vec<(Name, bool)>,
    /// Workers for whose held frames it found room.
    pub wakes: Vec<usize>,
    /// Queues given away, and their new workers.
    pub given: Vec<(Served, usize)>,
    /// Number of its current sleep: timers of earlier sleeps are ignored.
    pub timer: u64,
    phase: Phase,
    /// Time when it last read the clock.
    time: Instant,
    /// A turn is over: it reads the clock next.
    reads_clock: bool,
    scratch: Burst<'static>,
    /// The last sleep was ended by its timer.
    timed_out: bool,
    /// A round is about to begin.
    begins: bool,
    /// Start of the last round, by its clock.
    pub began: Instant,
    /// Duration of the last step beyond that of every step.
    extra: Ns,
    /// The ledger's progress when this round began.
    progress: u64,
    /// Time of the last progress.
    progressed: Instant,
    /// Consecutive rounds without progress.
    idle_rounds: u32,
    /// Sleeps with a warm queue.
    pub naps: u64,
    load_check: LoadCheck,
    /// Its sleep ends at a set time, so it counts as loaded as before.
    naps_now: bool,
    /// Queues that it gives away by command.
    requested: BTreeSet<u64>,
    /// Number of queues given away by load.
    pub by_load: u64,
    pub seen: Seen,
    /// The first violation in a step.
    pub finding: Option<Finding>,
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
            commands: schedule::Commands::default(),
            retries: false,
            signalled: false,
            faults: Vec::new(),
            stalled: Vec::new(),
            wakes: Vec::new(),
            given: Vec::new(),
            timer: 0,
            phase: Phase::Go,
            time: Instant::START,
            reads_clock: false,
            scratch: Burst::default(),
            timed_out: false,
            begins: false,
            began: Instant::START,
            extra: Ns::ZERO,
            progress: 0,
            progressed: Instant::START,
            idle_rounds: 0,
            naps: 0,
            load_check: LoadCheck::default(),
            naps_now: false,
            requested: BTreeSet::new(),
            by_load: 0,
            seen: Seen::default(),
            finding: None,
        }
    }

    pub fn queues(&self) -> &[Queue] {
        self.scheduler.queues()
    }

    /// Queues that it serves or is about to serve. One that it is to drop may be served for one
    /// more round.
    pub fn names(&self) -> impl Iterator<Item = Name> {
        let coming = self.commands.beginning().map(|served| served.of.name);
        let here = self.queues().iter().map(|queue| queue.served.of.name);
        here.filter(|name| !self.will_drop(*name)).chain(coming)
    }

    /// Queues that it gives away, and that were not handed over yet.
    pub fn leaving(&self) -> impl Iterator<Item = Name> {
        let given = self.given.iter().map(|(served, _)| served);
        self.scheduler.leaving().chain(given).map(|served| served.of.name)
    }

    /// Whether it sleeps without a nap timer.
    pub fn sleeps_until_woken(&self) -> bool {
        self.is_asleep() && !self.naps_now
    }

    pub fn is_asleep(&self) -> bool {
        self.phase == Phase::Asleep
    }

    /// Whether it found room for frames held by worker `other`, and will wake that one.
    pub fn will_wake(&self, other: usize) -> bool {
        self.scheduler.wakes() & 1 << other != 0
    }

    /// Whether it retries a queue, for which it holds frames or paused queues.
    pub fn waits_for(&self, name: Name) -> bool {
        self.forwarder.is_blocked_by(queue_id(name))
    }

    /// Time at which it delivers frames that the rate of a queue's port delays.
    pub fn rate_wait(&self, name: Name) -> Option<Instant> {
        self.forwarder.rate_wait(queue_id(name))
    }

    /// Whether it has a command to poll a queue.
    pub fn will_poll(&self, name: Name) -> bool {
        self.commands.will_poll(token(name))
    }

    /// Whether it has a command to stop serving a queue.
    pub fn will_drop(&self, name: Name) -> bool {
        self.commands.will_drop(token(name))
    }

    /// Whether it has commands.
    pub fn has_commands(&self) -> bool {
        !self.commands.is_empty() || self.retries
    }

    /// Whether it does nothing more without an external event.
    pub fn is_idle(&self, now: Instant) -> bool {
        // Held frames are delivered or age; without progress for long, they were forgotten.
        if self.forwarder.is_blocked() && now - self.progressed < Ns::from_secs(2) {
            return false;
        }
        let no_input = !self.has_commands() && self.pending.is_empty() && self.given.is_empty();
        let naps = |q: &Queue| q.state() == State::Warm && is_soon(q.nap_until(), now);
        let is_polled = |q: &&Queue| q.is_listed() || naps(q);
        let is_empty = |q: &Queue| self.notes[&q.served.token].empty_polls >= EMPTY_POLLS_MIN;
        let all_empty = self.queues().iter().filter(is_polled).all(is_empty);
        let polling = self.queues().iter().any(|q| is_polled(&q));
        no_input
            && all_empty
            && self.forwarder.next_notification().is_none()
            && (self.is_asleep() || polling)
    }

    /// Resets the counts of empty polls after an external event.
    pub fn reset_empty_polls(&mut self) {
        self.notes.values_mut().for_each(|notes| notes.empty_polls = 0);
    }

    /// Random duration of the last step.
    pub fn delay(&mut self, random: &mut Random) -> Ns {
        // Longer steps in idle rounds save events.
        let least = random.within(100..1500) << self.idle_rounds.min(4);
        Ns::new(least) + std::mem::take(&mut self.extra)
    }

    /// Delivers a kick, notification or timer. Returns whether it ends a sleep.
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
    pub fn adopt(&mut self, served: Served, now: Instant) {
        let notes = Notes { is_new: now > Instant::START, ..Notes::default() };
        self.notes.insert(served.token, notes);
        self.shares.forget(served.token);
        self.scheduler.add(served, now);
    }

    // ---- steps ----

    /// Takes one step.
    pub fn step(&mut self, now: Instant, ledger: &mut Ledger, balance: &mut Balance) -> Then {
        match self.phase {
            Phase::Go => {
                if std::mem::take(&mut self.reads_clock) {
                    self.shares.end_turn(now);
                    self.time = now;
                }
                self.run_effects(now, ledger, balance);
            }
            Phase::Arm(at, frames) => self.arm(at, frames, ledger),
            Phase::Wait(timeout) => {
                if self.pending.is_empty() && !self.signalled {
                    self.phase = Phase::Asleep;
                    self.timer += 1;
                    return Then::Sleep(timeout);
                }
                self.timed_out = false;
                self.end_wait(now);
            }
            Phase::Woken => self.end_wait(now),
            Phase::Asleep => unreachable!("it is woken before its next step"),
        }
        Then::Go
    }

    /// Carries out effects up to the next one that takes time or is visible to others.
    fn run_effects(&mut self, now: Instant, ledger: &mut Ledger, balance: &mut Balance) {
        loop {
            let effect = self.scheduler.next(self.time, &self.forwarder);
            if !follows_event(&effect) && std::mem::take(&mut self.begins) {
                self.began = self.time;
            }
            let commands = self.has_commands();
            let is_private = match effect {
                Effect::RunCommands => !commands,
                Effect::Measure { .. } => true,
                _ => false,
            };
            if let Effect::Measure { load, ends_period } = effect {
                self.measure(load, ends_period, balance);
            }
            self.carry_out(effect, now, ledger);
            if !is_private || self.finding.is_some() {
                break;
            }
        }
    }

    fn carry_out(&mut self, effect: Effect<Io>, now: Instant, ledger: &mut Ledger) {
        match effect {
            Effect::RunCommands => {
                self.end_round(now, ledger);
                self.run_commands(now);
            }
            Effect::Serve { at, max } => self.serve(at, max, now, ledger),
            Effect::NotifyDue { rests } => {
                if self.mistake != Mistake::ForgetsLateCalls {
                    self.notify_due(rests, now, ledger);
                }
            }
            Effect::Disarm { at } => self.scheduler.queue(at).served.of.ingress.lock().disarm(),
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
            Effect::Retry { all, why } => self.retry(all, why, now, ledger),
            Effect::Wake(workers) => {
                let others = (0..64).filter(|w| workers & 1 << w != 0);
                self.wakes.extend(others);
            }
            Effect::Measure { .. } => {}
            Effect::Give { queues, to } => {
                for served in queues {
                    self.forget(&served);
                    self.by_load += u64::from(!self.requested.remove(&served.token));
                    self.given.push((served, to));
                }
            }
            Effect::PollKicks => self.take_kicks(now),
            Effect::Pause => self.time += Ns::new(100),
            Effect::ArmFull => {
                let busy = self.queues().iter().any(Queue::is_listed);
                let skips = busy && self.mistake == Mistake::BusyForgetsHeld;
                let armed = match skips {
                    true => ArmedFull { full: true, wake: 0 },
                    false => self.forwarder.arm_blocked(),
                };
                self.scheduler.record_arm_full(armed);
            }
            Effect::Wait { timeout, naps } => {
                self.naps_now = naps;
                self.wait(timeout, now);
            }
        }
    }

    /// Publishes a load measurement, and moves queues by load.
    fn measure(&mut self, load: u32, ends_period: bool, balance: &mut Balance) {
        let Self { scheduler, shares, load_check, time, mistake, .. } = self;
        let me = usize::from(self.index);
        balance.loads[me].0 = load;
        if !balance.is_on {
            if ends_period {
                scheduler.skip_period(*time);
            }
            return;
        }
        if ends_period && balance.may_report() {
            let Balance { leveller, loads, moves, .. } = balance;
            moves.extend(scheduler.level(leveller, *time, |w| loads[w].1));
            shares.set_elsewhere(leveller.elsewhere(me));
        }
        if *mistake != Mistake::NeverBalances {
            scheduler.balance(balance.loads());
        }
        let others = balance.loads().enumerate().filter(|(w, _)| *w != me);
        let least = others.map(|(_, load)| load).min().unwrap_or(u32::MAX);
        let overload = load_check.check(load, least, scheduler.queues(), *time);
        self.record_finding(overload.map(Finding::Unbalanced));
    }

    fn end_round(&mut self, now: Instant, ledger: &Ledger) {
        self.begins = true;
        self.idle_rounds += 1;
        if self.progress != ledger.progress {
            (self.progress, self.progressed, self.idle_rounds) = (ledger.progress, now, 0);
        }
        let unfair = self.shares.end_round(self.scheduler.queues());
        self.record_finding(unfair.map(Finding::Unfair));
    }

    fn record_finding(&mut self, finding: Option<Finding>) {
        if self.finding.is_none() {
            self.finding = finding;
        }
    }

    fn run_commands(&mut self, now: Instant) {
        if self.has_commands() {
            self.time = now;
        }
        for command in self.commands.take(COMMANDS_MAX) {
            match command {
                Command::Begin(served) => self.adopt(served, now),
                Command::Drop(token) => {
                    if let Some(served) = self.scheduler.remove(token) {
                        self.forget(&served);
                        served.mark_stopped();
                    }
                }
                Command::GiveAway(token, to) => {
                    self.requested.insert(token);
                    self.scheduler.give_away(token, to);
                }
                Command::Poll(token) => {
                    self.scheduler.poll(token);
                    self.note(name_of(token)).empty_polls = 0;
                }
                // Kicks are descriptors here.
                Command::Kick(_) => {}
                Command::Table(never) => match never {},
            }
        }
        if std::mem::take(&mut self.retries) {
            self.scheduler.wake(1 << self.index);
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

    /// Serves one burst.
    fn serve(&mut self, at: usize, max: usize, now: Instant, ledger: &mut Ledger) {
        let queue = self.scheduler.queue(at);
        let schedule::Served { source, of, token, .. } = &queue.served;
        let notes = self.notes.get_mut(token).expect("it is served");
        let (token, name) = (*token, of.name);
        if std::mem::take(&mut notes.is_new) && self.mistake == Mistake::AdoptsCold {
            self.reads_clock = true;
            if self.scheduler.record_burst(&BurstResult::default()) == schedule::Then::Arm {
                self.scheduler.record_arm(true, None);
            }
            return;
        }
        let drained = source.tuning.drain() != Drain::Off;
        if !drained && source.tuning.announcement().is_some() {
            ledger.begin_announcement(name);
        }
        let mut ingress = of.ingress.lock();
        let (time, shown_frames) = (self.time, AtomicU64::new(0));
        let mut shown = shown(&mut *ingress, name, ledger, now, &shown_frames);
        // Frames take CPU time, and no page is absent.
        let usage = || {
            let at = Ns::new(time.ns()) + of.frame * shown_frames.load(Ordering::Relaxed);
            Usage { now: at, cpu: at, ..Usage::default() }
        };
        let meter = queue.meter(&usage);
        let (forwarder, scratch) = (&mut self.forwarder, &mut self.scratch);
        let mut took = schedule::burst(source, max, &mut shown, forwarder, scratch, time, meter);
        let shown_frames = shown_frames.into_inner();
        self.extra += of.frame * shown_frames;
        let is_due = ingress.due().is_some_and(|at| is_soon(at, now)) || took.rate_due.is_some();
        drop(ingress);
        ledger.sync_before(now);
        self.seen.rate_dues += u64::from(took.rate_due.is_some());
        self.seen.rate_cuts += u64::from(took.rate_cut && took.frames > 0);
        self.seen.announcements += u64::from(took.announced);
        self.seen.watched += u64::from(took.used.is_some());
        notes.empty_polls = if took.frames > 0 || is_due { 0 } else { notes.empty_polls + 1 };
        self.shares.begin_turn(token, took.frames, self.time);
        let events = std::mem::take(&mut took.findings.events);
        self.blame(source.port, events.into_iter().collect());
        let frames = took.frames;
        if drained && (shown_frames, frames) != (0, 0) {
            self.record_finding(Some(Finding::Drained(format!("queue {name:?}: {frames} frames"))));
        }
        match self.mistake {
            Mistake::IgnoresDebt => took.frames = 0,
            Mistake::IgnoresRateDue => took.rate_due = None,
            _ => {}
        }
        match self.scheduler.record_burst(&took) {
            schedule::Then::Arm => self.phase = Phase::Arm(at, frames),
            schedule::Then::Over => self.reads_clock = true,
        }
    }

    /// Records the events of a burst from `from`.
    fn blame(&mut self, from: PortId, mut events: Vec<PortEvent>) {
        if self.mistake == Mistake::BlamesSender {
            for event in &mut events {
                if let PortEvent::Fault { port, .. } = event {
                    *port = from;
                }
            }
        }
        self.record_events(events);
    }

    fn record_events(&mut self, events: impl IntoIterator<Item = PortEvent>) {
        for event in events {
            match event {
                PortEvent::Fault { port, fault, .. } => {
                    self.faults.push((usize::from(port.0), fault));
                }
                PortEvent::Stalled { port, queue, begins } => {
                    self.stalled.push(((usize::from(port.0), usize::from(queue)), begins));
                }
                // A hostile guest forged an address; its frames are judged by the ledger.
                PortEvent::Flaps { .. } | PortEvent::Learned { .. } => {}
            }
        }
    }

    /// Arms the queue just served; it stays hot if there is work.
    fn arm(&mut self, at: usize, frames: usize, ledger: &Ledger) {
        (self.phase, self.reads_clock) = (Phase::Go, true);
        let queue = self.scheduler.queue(at);
        let (served, disarms) = (&queue.served, queue.poller().disarms());
        let (token, (port, index)) = (served.token, served.of.name);
        let (nothing, due) = schedule::arm(&mut *served.of.ingress.lock(), disarms);
        self.scheduler.record_arm(nothing, due);
        self.seen.dues += u64::from(nothing && due.is_some());
        let notes = self.notes.get_mut(&token).expect("it is served");
        let shown = ledger.ingress(port, index).shown;
        let spurious = !nothing && frames == 0 && shown == notes.shown;
        notes.spurious = if spurious { notes.spurious + 1 } else { 0 };
        notes.shown = shown;
        if notes.spurious > SPURIOUS_MAX && ledger.is_honest(port) {
            let what = format!("queue {index} of port {port} has work, but bursts do none");
            self.record_finding(Some(Finding::Spins(what)));
        }
    }

    /// Notifies peers, and delivers held frames that rates permit.
    fn notify_due(&mut self, rests: bool, now: Instant, ledger: &mut Ledger) {
        let Self { forwarder, scheduler, shares, extra, seen, time, .. } = self;
        let found = forwarder.notify_due_with(*time, rests, |QueueId { port, queue }, _| {
            let payer = token((port.0.into(), queue.into()));
            scheduler.record_delivery(payer, RETRY_TAKES);
            shares.charge(payer, RETRY_TAKES);
            *extra += RETRY_TAKES;
            seen.rate_deliveries += 1;
        });
        ledger.sync(None, now);
        self.scheduler.record_findings(&found);
        self.record_events(found.events);
    }

    /// Retries destinations that may have room.
    fn retry(&mut self, all: bool, why: Why, now: Instant, ledger: &mut Ledger) {
        let skips = match self.mistake {
            Mistake::NeverRetries => all,
            Mistake::BusyForgetsHeld => why == Why::Busy,
            Mistake::RetriesAfterTimeoutOnly => why == Why::Late && !self.timed_out,
            _ => false,
        };
        if skips {
            return;
        }
        let Self { forwarder, scheduler, shares, extra, .. } = self;
        let findings = forwarder.retry_with(all, self.time, |QueueId { port, queue }, _| {
            let payer = token((port.0.into(), queue.into()));
            scheduler.record_delivery(payer, RETRY_TAKES);
            shares.charge(payer, RETRY_TAKES);
            *extra += RETRY_TAKES;
        });
        ledger.sync(None, now);
        if self.mistake != Mistake::ForgetsPaused {
            self.reset_empty_polls();
            self.scheduler.record_retry(all, &findings, &self.forwarder);
        } else {
            self.scheduler.record_findings(&findings);
        }
        // These faults are of destinations, whoever the senders are.
        self.record_events(findings.events);
    }

    // ---- kicks and sleep ----

    /// Handles all kicks that arrived.
    fn take_kicks(&mut self, now: Instant) {
        self.signalled = false;
        let kicks = std::mem::take(&mut self.pending);
        self.time = now;
        for kick in kicks {
            match kick {
                Token::Ingress(port, queue) => {
                    // The queue may have moved to another worker.
                    let token = token((port, queue));
                    if self.scheduler.kick(token, now) {
                        self.shares.charge(token, KICK_COST);
                        self.note((port, queue)).empty_polls = 0;
                    }
                }
                Token::Egress(port, queue) => {
                    let egress = &self.table[port].as_ref().expect("ports stay").egress[queue];
                    let payer = token((port, queue));
                    if self.scheduler.kick_room(egress, payer) {
                        self.stalled.push(((port, queue), false));
                    }
                    self.shares.charge(payer, KICK_COST);
                }
            }
        }
    }

    fn wait(&mut self, timeout: Option<Ns>, now: Instant) {
        if self.has_commands() {
            self.scheduler.record_wait(false);
            return;
        }
        let naps = self.queues().iter().any(|queue| queue.state() == State::Warm);
        let forgets = match self.mistake {
            Mistake::ForgetsNaps => naps,
            Mistake::NapsForever => naps && now.ns().is_multiple_of(3),
            _ => false,
        };
        self.naps += u64::from(naps);
        self.phase = Phase::Wait(timeout.filter(|_| !forgets));
    }

    fn end_wait(&mut self, now: Instant) {
        self.phase = Phase::Go;
        self.take_kicks(now);
        self.scheduler.record_wait(true);
    }
}

/// Whether a time is near. The timeout of an incomplete packet is not.
fn is_soon(at: Instant, now: Instant) -> bool {
    at < now + Ns::from_secs(1)
}

/// Whether an effect follows from an event, and so precedes all others.
fn follows_event(effect: &Effect<Io>) -> bool {
    use Effect::{Disarm, Give, Mute, Retry, Unmute, Wake};
    let room = matches!(effect, Retry { why: Why::Room, .. });
    room || matches!(effect, Disarm { .. } | Mute { .. } | Unmute { .. } | Give { .. } | Wake(_))
}

/// Describes an ingress queue for the scheduler.
pub(crate) fn served(
    name: Name,
    source: Source,
    ingress: Arc<Mutex<dyn Ingress>>,
    frame: Ns,
    generation: u64,
) -> Served {
    let of = Io { name, ingress, frame, generation };
    Served { token: token(name), source, notifies: true, of }
}
