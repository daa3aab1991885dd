//! Workers in virtual time: they carry out the effects of the program's scheduler on queues that a
//! test makes up. Nothing is decided here; what is done wrongly on purpose is a [`Mistake`].
//!
//! ```text
//!   guest ── frames ──▶ queue ── Serve ──▶ result, and the time that it took
//!                         │
//!                         └─ kick, if armed ──▶ PollKicks, Wait
//! ```
//! What concerns several workers (commands, loads, moves) is returned to the test.
#![allow(dead_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use switch::fdb::{Fdb, PortId};
use switch::forward::{Forwarder, Mode, Source, Table};
use switch::frame::Burst;
use switch::poll::{Costs, Policy, State};
use switch::schedule::{self, BurstResult, Effect, Scheduler, Served, Then};
use switch::stats::IngressStats;
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;

/// Time of a poll of a queue, and of asking for a kick with the re-check.
pub const POLL: Ns = Ns::new(100);
/// Time of a poll of kicks: a system call.
pub const POLL_KICKS: Ns = Ns::new(300);
/// Time of a reading of the clock.
const PAUSE: Ns = Ns::new(50);

/// Time of one worker, which passes while it does something.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    pub fn now(&self) -> Instant {
        Instant::from_ns(self.0.load(Ordering::Relaxed))
    }

    pub fn pass(&self, time: Ns) {
        self.0.fetch_add(time.get(), Ordering::Relaxed);
    }
}

/// A queue and its guest.
pub trait Guest: Sized {
    /// Serves a burst of at most `max` frames of `queue`, which passes time.
    fn serve(&mut self, queue: &Queue<Self>, max: usize, hands: &mut Hands<'_>) -> BurstResult;

    /// Asks for a kick, and re-checks, which passes time: whether there is nothing to take. If
    /// there is something, a queue that `disarms` asks for no kicks again.
    fn arm(&mut self, disarms: bool, clock: &Clock) -> bool;

    /// Asks for no kicks.
    fn disarm(&mut self);

    /// When the kick comes that the worker did not see yet; [`Instant::NEVER`]: none.
    fn kick_at(&self) -> Instant;

    /// The worker sees the kick.
    fn take_kick(&mut self);
}

/// A queue as the scheduler has it.
pub type Queue<G> = schedule::Queue<Shared<G>>;
/// A guest, for the scheduler and the test.
pub type Shared<G> = Rc<RefCell<G>>;

/// What a burst is served with.
pub struct Hands<'w> {
    pub forwarder: &'w mut Forwarder,
    pub scratch: &'w mut Burst<'static>,
    pub clock: &'w Clock,
    /// The time as the scheduler has it.
    pub time: Instant,
}

/// Kicks of a queue's guest: one for the first frame after the worker asked for one.
#[derive(Clone, Debug)]
pub struct Kicks {
    armed: bool,
    sent: Instant,
}

impl Default for Kicks {
    fn default() -> Self {
        Self { armed: false, sent: Instant::NEVER }
    }
}

impl Kicks {
    pub fn arm(&mut self) {
        self.armed = true;
    }

    pub fn disarm(&mut self) {
        self.armed = false;
    }

    /// A frame came at `at`. A frame behind others that wait is not the one that was asked for.
    pub fn frame_came(&mut self, at: Instant, behind: bool) {
        if self.armed && !behind {
            (self.armed, self.sent) = (false, self.sent.min(at));
        }
    }

    /// See [`Guest::kick_at`]; `next`: when the next frame comes, `behind` others that wait.
    pub fn at(&self, next: Instant, behind: bool) -> Instant {
        if self.armed && !behind { self.sent.min(next) } else { self.sent }
    }

    pub fn take(&mut self) {
        self.sent = Instant::NEVER;
    }
}

/// How effects are carried out wrongly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    #[default]
    Not,
    /// It asks for a kick, and goes to sleep whatever the re-check finds.
    IgnoresRecheck,
    /// Each burst is charged this much, whatever it took.
    ChargesFlat(Ns),
    /// Calls that were put off are forgotten.
    ForgetsLateCalls,
    /// A nap ends by a kick only.
    NapsForever,
}

/// What a worker did.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Time that it slept.
    pub slept: Ns,
    /// Sleeps without a time-out.
    pub sleeps: u64,
    /// Sleeps ended by a kick.
    pub wakes: u64,
    /// Sleeps ended by a time-out.
    pub naps: u64,
    /// Changes between naps and polls that find nothing.
    pub turns: u64,
}

struct Sleep {
    /// [`Instant::NEVER`]: until a kick or a command.
    until: Instant,
    /// When another worker's command came.
    commanded: Instant,
    naps: bool,
}

/// A worker without a thread.
pub struct Worker<G> {
    pub scheduler: Scheduler<Shared<G>>,
    pub clock: Clock,
    pub counts: Counts,
    pub mistake: Mistake,
    forwarder: Forwarder,
    costs: Costs,
    scratch: Burst<'static>,
    /// See [`Worker::time`].
    time: Instant,
    /// Others have commands for it.
    commanded: bool,
    sleep: Option<Sleep>,
    /// The queue just polled, if it was empty.
    found_nothing: Option<u64>,
    napped: bool,
}

/// A queue of port `port` for a scheduler.
pub fn served<G>(port: u16, queue: u16, policy: Policy, guest: G) -> Served<Shared<G>> {
    let (stats, tuning) = (Arc::<IngressStats>::default(), Arc::new(Tuning::new(policy)));
    let source = Source::new(PortId(port), queue, stats, tuning);
    let token = schedule::token(PortId(port), queue, false);
    Served { token, source, notifies: true, of: Rc::new(RefCell::new(guest)) }
}

impl<G: Guest> Worker<G> {
    pub fn new(index: u8, costs: Costs, table: Table, clock: Clock) -> Self {
        let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 16));
        Self {
            scheduler: Scheduler::new(index, costs),
            clock,
            counts: Counts::default(),
            mistake: Mistake::Not,
            forwarder: Forwarder::new(Mode::Cross, index, fdb, Arc::new(table), 1),
            costs,
            scratch: Burst::default(),
            time: Instant::START,
            commanded: false,
            sleep: None,
            found_nothing: None,
            napped: false,
        }
    }

    /// When it acts next; [`Instant::NEVER`]: it sleeps, and nothing is to wake it.
    pub fn acts_at(&self) -> Instant {
        match &self.sleep {
            None => self.clock.now(),
            Some(sleep) => self.woken(sleep).0,
        }
    }

    /// Whether it sleeps, and not for the time of a nap.
    pub fn is_asleep(&self) -> bool {
        self.sleep.as_ref().is_some_and(|sleep| !sleep.naps)
    }

    /// Another worker has a command for it at `now`.
    pub fn command(&mut self, now: Instant) {
        self.commanded = true;
        if let Some(sleep) = &mut self.sleep {
            sleep.commanded = sleep.commanded.min(now);
        }
    }

    /// Runs until `end`, as the only worker.
    pub fn run_until(&mut self, end: Instant) {
        while self.acts_at() < end {
            self.step();
        }
        if self.sleep.is_some() {
            let rest = end - self.clock.now();
            self.counts.slept += rest;
            self.pass(rest);
        }
    }

    /// Carries out its next effect, or wakes up. Returns what is the test's to carry out: commands,
    /// measurements, and queues that are given away.
    pub fn step(&mut self) -> Option<Effect<Shared<G>>> {
        if let Some(sleep) = self.sleep.take() {
            self.wake_up(&sleep);
            return None;
        }
        let effect = self.scheduler.next(self.time, &self.forwarder);
        // What its policy decided is known now.
        let polled = self.found_nothing.take().and_then(|token| self.scheduler.find(token));
        if polled.is_some_and(|queue| queue.state() == State::Hot) {
            self.turn(false);
        }
        match effect {
            Effect::Serve { at, max } => self.serve(at, max),
            Effect::Disarm { at } => self.scheduler.queue(at).served.of.borrow_mut().disarm(),
            Effect::NotifyDue { rests } => {
                if self.mistake != Mistake::ForgetsLateCalls {
                    let found = self.forwarder.notify_due(self.time, rests);
                    self.scheduler.record_findings(&found);
                }
            }
            Effect::PollKicks => {
                self.pass(POLL_KICKS);
                self.take_kicks();
            }
            Effect::Pause => self.pass(PAUSE),
            Effect::Wait { timeout, naps } => self.wait(timeout, naps),
            Effect::RunCommands => {
                self.commanded = false;
                return Some(effect);
            }
            Effect::Measure { .. } | Effect::Give { .. } => return Some(effect),
            Effect::Retry { .. } | Effect::ArmFull | Effect::Wake(_) => {
                panic!("no destination is ever full")
            }
            Effect::Mute { .. } | Effect::Unmute { .. } => panic!("no queue is drained"),
        }
        None
    }

    /// The time as the scheduler has it: that of the clock, unless bursts are charged wrongly.
    pub fn time(&self) -> Instant {
        self.time
    }

    fn pass(&mut self, time: Ns) {
        self.clock.pass(time);
        self.time += time;
    }

    fn serve(&mut self, at: usize, max: usize) {
        let began = self.clock.now();
        let Self { scheduler, forwarder, scratch, clock, time, .. } = self;
        let queue = scheduler.queue(at);
        let guest = Rc::clone(&queue.served.of);
        let mut hands = Hands { forwarder, scratch, clock, time: *time };
        let took = guest.borrow_mut().serve(queue, max, &mut hands);
        if scheduler.record_burst(&took) == Then::Arm {
            let disarms = scheduler.queue(at).poller().disarms();
            let nothing = guest.borrow_mut().arm(disarms, clock);
            scheduler.record_arm(nothing || self.mistake == Mistake::IgnoresRecheck, None);
        } else if took.frames == 0 {
            self.found_nothing = Some(scheduler.queue(at).served.token);
        }
        let passed = self.clock.now() - began;
        self.time += match self.mistake {
            Mistake::ChargesFlat(time) => time,
            _ => passed,
        };
    }

    /// Changes between naps and empty polls.
    fn turn(&mut self, naps: bool) {
        self.counts.turns += u64::from(self.napped != naps);
        self.napped = naps;
    }

    fn wait(&mut self, timeout: Option<Ns>, naps: bool) {
        if self.commanded {
            return self.scheduler.record_wait(false);
        }
        let now = self.clock.now();
        if self.kick_at() <= now {
            self.pass(POLL_KICKS);
            self.take_kicks();
            return self.scheduler.record_wait(true);
        }
        if self.scheduler.queues().iter().any(|queue| queue.state() == State::Warm) {
            self.turn(true);
        }
        self.counts.sleeps += u64::from(timeout.is_none());
        let timeout = timeout.filter(|_| self.mistake != Mistake::NapsForever);
        let until = timeout.map_or(Instant::NEVER, |time| now + time);
        self.sleep = Some(Sleep { until, commanded: Instant::NEVER, naps });
    }

    fn kick_at(&self) -> Instant {
        let queues = self.scheduler.queues().iter();
        queues.map(|queue| queue.served.of.borrow().kick_at()).min().unwrap_or(Instant::NEVER)
    }

    /// When it is woken, and whether by its timer.
    fn woken(&self, sleep: &Sleep) -> (Instant, bool) {
        let by_kick = self.kick_at().min(sleep.commanded) + self.costs.wake_late;
        let by_timer = sleep.until + self.costs.nap_late;
        (by_kick.min(by_timer), by_timer < by_kick)
    }

    fn wake_up(&mut self, sleep: &Sleep) {
        let (at, timed_out) = self.woken(sleep);
        assert_ne!(at, Instant::NEVER, "nothing is to wake it");
        let slept = at - self.clock.now();
        self.pass(slept);
        self.counts.slept += slept;
        *if timed_out { &mut self.counts.naps } else { &mut self.counts.wakes } += 1;
        self.take_kicks();
        self.scheduler.record_wait(true);
    }

    /// All kicks that came by now.
    fn take_kicks(&mut self) {
        let now = self.clock.now();
        let kicked = |queue: &Queue<G>| {
            let mut guest = queue.served.of.borrow_mut();
            let came = guest.kick_at() <= now;
            if came {
                guest.take_kick();
            }
            came.then_some(queue.served.token)
        };
        let kicked: Vec<u64> = self.scheduler.queues().iter().filter_map(kicked).collect();
        for token in kicked {
            self.scheduler.kick(token, self.time);
        }
    }
}
