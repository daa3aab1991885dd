//! All that a worker decides, without a clock, a descriptor or a thread: events in, effects out.
//!
//! ```text
//!   RunCommands ─▶ Serve, arm ─▶ ... ─▶ NotifyDue ─▶ Measure ─┬─▶ PollKicks, ArmFull ─┐
//!        ▲         one round over the hot queues               └─▶ ArmFull, Wait ──────┤
//!        └─────────────────────────────────────────────────────────────────────────────┘
//! ```
//! Its driver carries out one [`Effect`] at a time and records the result: the program on real
//! descriptors and the machine's clock, the simulation in virtual time, and the exhaustive model of
//! arm and sleep one load or store at a time. All three decide by the same object.
//!
//! A queue is *hot* (polled in each round), *warm* (polled at a time that is set) or *cold* (armed,
//! and out of the poll set until it is kicked). Hot queues share a worker by deficit round-robin in
//! measured time. What it does not do: it takes no lock of an ingress queue, and moves no frame;
//! [`burst()`] does, which drivers with real ports share.

mod assignments;
mod burst;
mod commands;
mod load;
mod queue;
mod round;

use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::atomic::Ordering;

pub use self::assignments::{Assignment, Assignments, GiveAway, Placement, queue_id, token};
pub use self::burst::{BurstResult, arm, burst};
pub use self::commands::{COMMANDS_MAX, Command, Commands};
use self::load::Period;
pub use self::queue::{Queue, Served};
use self::round::{Round, Turn};
use crate::fair;
use crate::forward::{ArmedFull, EgressQueue, Findings, Forwarder};
use crate::hold::RETRY_INTERVAL;
use crate::poll::{Costs, State};
use crate::time::{Instant, Ns};
use crate::tuning::Drain;

/// How often a busy worker polls for kicks of cold queues.
pub const POLL_KICKS_INTERVAL: Ns = Ns::from_us(20);
/// What a kick costs a worker apart from what it finds: charged to the port.
pub const KICK_COST: Ns = Ns::new(500);
/// Length of a load measurement.
const WINDOW: Ns = Ns::from_ms(1);
/// After a queue was added or given away, as many measurements are made before another is given.
const SETTLE: u32 = 3;

/// What the driver of a [`Scheduler`] is to do next. Indices are valid until the next call that
/// adds, removes or gives queues.
#[derive(Debug)]
pub enum Effect<Q> {
    /// Between two rounds: run the commands that wait, and report faults.
    RunCommands,
    /// Serve one burst of at most `max` frames; then [`Scheduler::record_burst`].
    Serve {
        /// The queue.
        at: usize,
        /// Most frames to take.
        max: usize,
    },
    /// Ask the queue's peer for no notifications.
    Disarm {
        /// The queue.
        at: usize,
    },
    /// Stop waiting for the queue's kicks: it is being drained.
    Mute {
        /// The queue.
        at: usize,
    },
    /// Wait for the queue's kicks again.
    Unmute {
        /// The queue.
        at: usize,
    },
    /// Notify the peers whose time has come ([`Forwarder::notify_due`]).
    NotifyDue {
        /// The worker found nothing, or has no hot queue left.
        rests: bool,
    },
    /// Deliver held frames ([`Forwarder::retry_with`]), with [`Scheduler::record_delivery`] for
    /// each destination; then [`Scheduler::record_retry`].
    Retry {
        /// For every full destination; otherwise for those that made room.
        all: bool,
        /// What it is done for.
        why: Why,
    },
    /// Wake other workers (one bit each): destinations that they wait for may have room.
    Wake(u64),
    /// A load measurement ended: publish it. If queues move by load, [`Scheduler::level`] at the
    /// end of a period, and then [`Scheduler::balance`]; otherwise [`Scheduler::skip_period`].
    Measure {
        /// Part of the time that was spent on frames, in thousandths.
        load: u32,
        /// A period ended, too.
        ends_period: bool,
    },
    /// Give queues, which are not served here any more, to another worker.
    Give {
        /// The queues.
        queues: Vec<Served<Q>>,
        /// The worker.
        to: usize,
    },
    /// Take the kicks that came, without waiting: [`Scheduler::kick`] or
    /// [`Scheduler::kick_room`] for each. Read the clock, too: a worker that only waits for a full
    /// destination that does not notify has no other occasion.
    PollKicks,
    /// Read the clock: all hot queues are left to gather frames.
    Pause,
    /// Ask full destinations to notify ([`Forwarder::arm_blocked`]); then
    /// [`Scheduler::record_arm_full`].
    ArmFull,
    /// Sleep until a kick or a command comes, or the time is up; take the kicks as in
    /// [`Effect::PollKicks`], and [`Scheduler::record_wait`]. Not at all if commands wait already.
    Wait {
        /// How long at most; `None`: indefinitely.
        timeout: Option<Ns>,
        /// The time-out is when a queue is to be polled or a peer to be notified. The worker is
        /// then as loaded as when that was last measured.
        naps: bool,
    },
}

/// What follows a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Then {
    /// The turn is over: the time that is passed next is its end.
    Over,
    /// Ask the queue's peer to notify, and re-check ([`arm`]); then [`Scheduler::record_arm`].
    Arm,
}

/// Why full destinations are retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// One of them made room.
    Room,
    /// It is time to, and the worker has hot queues.
    Busy,
    /// It is time to, after a sleep.
    Late,
}

/// What [`Scheduler::next`] does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Commands,
    Begin,
    /// The next queue of the round, or the next burst of the same.
    Pick,
    /// A burst is being served.
    Serving,
    /// A queue is being armed.
    Arming,
    /// The time of a turn is known now: it is charged.
    Charge,
    Woken,
    NotifyDue,
    Measure,
    /// The next round follows, or sleep.
    AfterRound,
    RetryBusy,
    ArmingBusy,
    Recheck,
    ArmingIdle,
    /// Kicks are to be polled: a full destination that does not notify keeps the worker awake.
    Poll,
    Wait,
    AfterWait,
}

/// Something that is to be done about a queue before anything else.
#[derive(Clone, Copy, Debug, Hash)]
enum Todo {
    Disarm,
    Mute,
    Unmute,
}

/// One worker's queues, and what is done about them when. `Q` is what a queue is for the driver.
#[derive(Clone, Debug)]
pub struct Scheduler<Q> {
    /// The number of the worker.
    index: u8,
    costs: Costs,
    /// Duration from which a burst counts as long.
    long: Ns,
    queues: Vec<Queue<Q>>,
    by_token: HashMap<u64, usize>,
    /// Indices in `queues` of those to be served in the next round.
    hot: Vec<usize>,
    /// Indices of those that are left alone until a time that is set.
    warm: Vec<usize>,
    /// The earliest of those times.
    warm_at: Instant,
    /// When slow queues may be served again, one of them.
    slow_from: Instant,
    /// Hot queues of each port.
    hot_of: Vec<u16>,
    /// Indices of the queues that are paused for a full destination.
    paused: Vec<usize>,
    step: Step,
    round: Round,
    turn: Turn,
    /// When kicks of cold queues were last polled.
    polled: Instant,
    /// When all full destinations were last retried.
    retried: Instant,
    /// Whether the worker slept since the last round.
    slept: bool,
    /// All hot queues owed time in the last round: none was served.
    owing: bool,
    /// Whether one of the next three is to be carried out first.
    is_pending: bool,
    todo: VecDeque<(Todo, usize)>,
    gives: VecDeque<(Vec<Served<Q>>, usize)>,
    /// A destination that this worker waits for may have room; so may those of others.
    woken: u64,
    /// Load measurement: its start, and the time spent on frames since then.
    window: (Instant, Ns),
    /// Indices of the queues that were served in it.
    served: Vec<usize>,
    /// Those of the last measurement, and their loads in thousandths.
    measured: Vec<(usize, u32)>,
    /// Load measurements to be made before a queue is given away.
    settle: u32,
    /// What is reported for fair shares over all workers.
    period: Period,
}

impl<Q> Scheduler<Q> {
    /// For worker number `index` (below 64), without queues, at time 0.
    pub fn new(index: u8, costs: Costs) -> Self {
        assert!(index < 64);
        Self {
            index,
            costs,
            long: fair::long(costs.copy),
            queues: Vec::new(),
            by_token: HashMap::new(),
            hot: Vec::new(),
            warm: Vec::new(),
            warm_at: Instant::NEVER,
            slow_from: Instant::START,
            hot_of: Vec::new(),
            paused: Vec::new(),
            step: Step::Commands,
            round: Round::default(),
            turn: Turn::default(),
            polled: Instant::START,
            retried: Instant::START,
            slept: false,
            owing: false,
            is_pending: false,
            todo: VecDeque::new(),
            gives: VecDeque::new(),
            woken: 0,
            window: (Instant::START, Ns::ZERO),
            served: Vec::new(),
            measured: Vec::new(),
            settle: SETTLE,
            period: Period::default(),
        }
    }

    /// The effect to carry out next. `now`: any monotonic time, read after the last burst or
    /// wait.
    #[inline]
    pub fn next(&mut self, now: Instant, forwarder: &Forwarder) -> Effect<Q> {
        if self.is_pending
            && let Some(effect) = self.next_pending()
        {
            return effect;
        }
        loop {
            match self.step {
                Step::Commands => {
                    self.step = Step::Begin;
                    return Effect::RunCommands;
                }
                Step::Begin => self.begin_round(now),
                Step::Charge | Step::Pick => {
                    if let Some((at, max)) = self.next_in_round(now) {
                        return Effect::Serve { at, max };
                    }
                }
                Step::Woken => {
                    self.step = Step::NotifyDue;
                    if self.woken != 0 {
                        self.is_pending = true;
                        if let Some(effect) = self.next_pending() {
                            return effect;
                        }
                    }
                }
                Step::NotifyDue => {
                    self.step = Step::Measure;
                    let rests = !self.round.found || self.hot.is_empty();
                    if forwarder.next_notification().is_some_and(|at| rests || at <= now) {
                        return Effect::NotifyDue { rests };
                    }
                }
                Step::Measure => {
                    self.step = Step::AfterRound;
                    if now - self.window.0 >= WINDOW {
                        return self.measure(now);
                    }
                }
                Step::AfterRound if self.hot.is_empty() => self.step = Step::Recheck,
                Step::AfterRound if now - self.polled > POLL_KICKS_INTERVAL => {
                    (self.polled, self.step) = (now, Step::RetryBusy);
                    return Effect::PollKicks;
                }
                Step::AfterRound => {
                    self.step = Step::Commands;
                    if self.only_gathered() {
                        return Effect::Pause;
                    }
                }
                Step::RetryBusy => {
                    if let Some(effect) = self.retry_busy(now, forwarder) {
                        return effect;
                    }
                }
                // Queues were armed one by one as they went cold, warm ones have a time; what is
                // left are full destinations, and commands.
                Step::Recheck => {
                    self.step = Step::Wait;
                    if forwarder.is_blocked() {
                        self.step = Step::ArmingIdle;
                        return Effect::ArmFull;
                    }
                }
                Step::Poll => {
                    (self.polled, self.step) = (now, Step::AfterWait);
                    return Effect::PollKicks;
                }
                Step::Wait => return self.wait(now, forwarder),
                Step::AfterWait => {
                    self.step = Step::Commands;
                    if let Some(effect) = self.retry_late(now, forwarder) {
                        return effect;
                    }
                }
                Step::Serving | Step::Arming | Step::ArmingBusy | Step::ArmingIdle => {
                    unreachable!("the result of the effect before was not recorded")
                }
            }
        }
    }

    /// After a burst: the queue and the size of the next burst of the same round, if nothing else
    /// is to be done before. It is what [`next`](Self::next) would return, at the price of a burst
    /// and not of an effect.
    #[inline]
    pub fn next_burst(&mut self, now: Instant) -> Option<(usize, usize)> {
        if self.is_pending { None } else { self.next_in_round(now) }
    }

    /// Charges the burst before, and picks the next one of the round.
    #[inline]
    fn next_in_round(&mut self, now: Instant) -> Option<(usize, usize)> {
        if self.step == Step::Charge {
            self.charge_turn(now);
        }
        let picked = self.pick(now);
        if picked.is_none() {
            self.step = Step::Woken;
        }
        picked
    }

    /// Effects that events asked for.
    #[cold]
    fn next_pending(&mut self) -> Option<Effect<Q>> {
        if let Some((todo, at)) = self.todo.pop_front() {
            return Some(match todo {
                Todo::Disarm => Effect::Disarm { at },
                Todo::Mute => Effect::Mute { at },
                Todo::Unmute => Effect::Unmute { at },
            });
        }
        if let Some((queues, to)) = self.gives.pop_front() {
            return Some(Effect::Give { queues, to });
        }
        let mine = 1 << self.index;
        if self.woken & mine != 0 {
            self.woken &= !mine;
            return Some(Effect::Retry { all: false, why: Why::Room });
        }
        self.is_pending = false;
        let others = std::mem::take(&mut self.woken);
        (others != 0).then_some(Effect::Wake(others))
    }

    // ---- the set of queues ----

    /// Its queues, in no order.
    pub fn queues(&self) -> &[Queue<Q>] {
        &self.queues
    }

    /// The queue of an effect.
    #[inline]
    pub fn queue(&self, at: usize) -> &Queue<Q> {
        &self.queues[at]
    }

    /// The queue with this token.
    pub fn find(&self, token: u64) -> Option<&Queue<Q>> {
        self.by_token.get(&token).map(|at| &self.queues[*at])
    }

    /// Queues that are about to be given away.
    pub fn leaving(&self) -> impl Iterator<Item = &Served<Q>> {
        self.gives.iter().flat_map(|(queues, _)| queues)
    }

    /// Ports have ids below `count`.
    pub fn set_ports(&mut self, count: usize) {
        self.hot_of.resize(count.max(self.hot_of.len()), 0);
    }

    /// Begins to serve a queue, whose kicks are waited for from now on.
    pub fn add(&mut self, served: Served<Q>, now: Instant) {
        let (token, at) = (served.token, self.queues.len());
        self.set_ports(usize::from(served.source.port.0) + 1);
        self.by_token.insert(token, at);
        self.queues.push(Queue::new(served, self.costs, now));
        self.settle = SETTLE;
        // The peer may have made frames available before anyone waited for its kicks.
        self.make_hot(at);
    }

    /// Stops serving a queue.
    pub fn remove(&mut self, token: u64) -> Option<Served<Q>> {
        let at = *self.by_token.get(&token)?;
        let served = self.remove_at(at);
        self.rebuild_lists();
        Some(served)
    }

    /// Gives a queue to worker `to`.
    pub fn give_away(&mut self, token: u64, to: usize) {
        if let Some(&at) = self.by_token.get(&token) {
            self.give(vec![at], to);
        }
    }

    fn give(&mut self, mut queues: Vec<usize>, to: usize) {
        // Taking one out moves but the last of them.
        queues.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        let given = queues.into_iter().map(|at| self.remove_at(at)).collect();
        self.rebuild_lists();
        self.settle = SETTLE;
        self.gives.push_back((given, to));
        self.is_pending = true;
    }

    /// Takes a queue out; [`rebuild_lists`](Self::rebuild_lists) is to follow.
    fn remove_at(&mut self, at: usize) -> Served<Q> {
        let queue = self.queues.swap_remove(at);
        self.by_token.remove(&queue.served.token);
        if let Some(moved) = self.queues.get(at) {
            self.by_token.insert(moved.served.token, at);
        }
        self.todo.retain(|(_, of)| *of != at);
        let last = self.queues.len();
        self.todo.iter_mut().filter(|(_, of)| *of == last).for_each(|(_, of)| *of = at);
        queue.leave();
        queue.served
    }

    /// Queues have other indices than before: rebuilds every list of them.
    fn rebuild_lists(&mut self) {
        for list in [&mut self.hot, &mut self.warm, &mut self.paused, &mut self.served] {
            list.clear();
        }
        self.measured.clear();
        self.hot_of.fill(0);
        for (i, queue) in self.queues.iter().enumerate() {
            if queue.listed {
                self.hot.push(i);
                self.hot_of[queue.port()] += 1;
            } else if queue.state == State::Warm {
                self.warm.push(i);
            }
            if queue.paused {
                self.paused.push(i);
            }
            if queue.busy > Ns::ZERO {
                self.served.push(i);
            }
        }
    }

    // ---- events ----

    /// A queue was kicked. False: it is not served here.
    pub fn kick(&mut self, token: u64, now: Instant) -> bool {
        let Some(&at) = self.by_token.get(&token) else { return false };
        let queue = &mut self.queues[at];
        queue.share.charge(KICK_COST);
        queue.kicked = true;
        let stats = &queue.served.source.stats;
        stats.kicks.add(1);
        stats.wakes.add(u64::from(queue.state == State::Cold));
        if queue.served.source.tuning.drain() != Drain::Done {
            queue.woke = (queue.state == State::Cold).then_some(now);
            queue.poller.wake(now);
        }
        let waits = queue.waits_slow(self.slow_from, now) || queue.waits_rate(now);
        if queue.state != State::Cold && queue.poller.disarms() {
            // Its ring is new, or its policy, and was not disarmed when the queue became hot.
            self.todo(Todo::Disarm, at);
        }
        if self.queues[at].state != State::Warm || !waits {
            self.poll_at(at);
        }
        true
    }

    /// Polls a queue in the next round, whatever its policy has it wait for: an operator changed
    /// something about it.
    pub fn poll(&mut self, token: u64) {
        if let Some(&at) = self.by_token.get(&token) {
            self.poll_at(at);
        }
    }

    fn poll_at(&mut self, at: usize) {
        let drain = self.queues[at].served.source.tuning.drain();
        if drain != Drain::Off {
            self.mute(at);
        }
        if drain != Drain::Done {
            self.make_hot(at);
        }
    }

    /// The peer of an egress queue kicked: it made room. `payer`: the ingress queue that is charged
    /// for it. True: the peer gave no buffers for long, and does again.
    pub fn kick_room(&mut self, egress: &EgressQueue, payer: u64) -> bool {
        egress.stats.kicks.add(1);
        self.charge_outside_turn(payer, KICK_COST);
        // Without the event index the guest would kick for each buffer from now on.
        egress.queue.lock().disarm();
        let recovers = egress.end_stall();
        self.wake(egress.waiters.swap(0, Ordering::AcqRel));
        recovers
    }

    /// Workers (one bit each) wait for a destination that may have room.
    pub fn wake(&mut self, workers: u64) {
        self.woken |= workers;
        self.is_pending |= workers != 0;
    }

    /// Other workers that are about to be woken, one bit each.
    pub fn wakes(&self) -> u64 {
        self.woken & !(1 << self.index)
    }

    /// Charges a queue for time that was spent on what its guest receives, outside of its turn.
    fn charge_outside_turn(&mut self, token: u64, time: Ns) {
        if let Some(&at) = self.by_token.get(&token) {
            self.queues[at].share.charge_outside_turn(time);
        }
    }

    /// A full destination was retried, which took so long: charged to the ingress queue `payer` of
    /// the same guest.
    pub fn record_delivery(&mut self, payer: u64, took: Ns) {
        self.window.1 += took;
        self.charge_outside_turn(payer, took);
    }

    /// Records what forwarding outside of bursts found: workers to wake, and slow deliveries.
    pub fn record_findings(&mut self, found: &Findings) {
        self.wake(found.wake);
        if !found.slow.is_empty() {
            self.charge_receivers(&found.slow);
        }
    }

    /// Held frames were delivered: continues with the queues that are paused for a destination that
    /// may have room now.
    pub fn record_retry(&mut self, all: bool, found: &Findings, forwarder: &Forwarder) {
        self.record_findings(found);
        for i in 0..self.paused.len() {
            let at = self.paused[i];
            if all || forwarder.may_resume(&self.queues[at].served.source) {
                self.make_hot(at);
            }
        }
    }

    /// Records the result of [`Effect::ArmFull`].
    pub fn record_arm_full(&mut self, armed: ArmedFull) {
        let ArmedFull { full, wake } = armed;
        self.wake(wake);
        self.step = match self.step {
            Step::ArmingIdle if full => Step::Wait,
            // Not to be left out: the next round may come here again, until the frames are dropped.
            Step::ArmingIdle => Step::Poll,
            _ => Step::Commands,
        };
        if !full {
            self.wake(1 << self.index);
        }
    }

    /// The wait is over; `slept`: there was one.
    pub fn record_wait(&mut self, slept: bool) {
        self.slept |= slept;
    }

    // ---- before sleep, and after ----

    /// A busy worker never sleeps: who waits for a full destination would wait until it did.
    fn retry_busy(&mut self, now: Instant, forwarder: &Forwarder) -> Option<Effect<Q>> {
        self.step = Step::Commands;
        if !forwarder.is_blocked() {
            self.retried = now;
            return None;
        }
        if now - self.retried > RETRY_INTERVAL {
            self.retried = now;
            return Some(Effect::Retry { all: true, why: Why::Busy });
        }
        self.step = Step::ArmingBusy;
        Some(Effect::ArmFull)
    }

    /// After a sleep, or where one was not allowed: retries all full destinations if it is time to.
    fn retry_late(&mut self, now: Instant, forwarder: &Forwarder) -> Option<Effect<Q>> {
        let due = now - self.retried >= RETRY_INTERVAL;
        (forwarder.is_blocked() && due).then(|| {
            self.retried = now;
            Effect::Retry { all: true, why: Why::Late }
        })
    }

    /// Until a kick, a command, or the earliest of the times when a warm queue is to be polled, a
    /// peer to be notified, and full destinations to be retried.
    fn wait(&mut self, now: Instant, forwarder: &Forwarder) -> Effect<Q> {
        let held = forwarder.is_blocked().then_some(RETRY_INTERVAL);
        let warm = (!self.warm.is_empty()).then(|| self.warm_at - now);
        let late = forwarder.next_notification().map(|at| at - now);
        let timeout = [held, warm, late].into_iter().flatten().min();
        self.step = Step::AfterWait;
        if timeout == Some(Ns::ZERO) {
            return Effect::PollKicks;
        }
        Effect::Wait { timeout, naps: warm.or(late).is_some() }
    }
}

/// Everything but what the queues are for the driver, their settings and their counters: states of
/// a search that differ in nothing of this have the same future.
impl<Q> Hash for Scheduler<Q> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { queues, hot, warm, warm_at, slow_from, paused, step, round, turn, .. } = self;
        (queues, hot, warm, warm_at, slow_from, paused, step, round, turn).hash(state);
        let Self { polled, retried, slept, owing, todo, woken, .. } = self;
        (polled, retried, slept, owing, todo, woken).hash(state);
        let Self { window, served, measured, settle, period, .. } = self;
        (window, served, measured, settle, period).hash(state);
    }
}

#[cfg(test)]
mod tests;
