//! Workers on the product's ports, forwarder and policies: process, arm, wait, as the program's do,
//! in small steps of virtual time. A queue is polled when it is hot, and gets hot by a kick; warm,
//! it is looked at when its time has come. Between two rounds queues come and go.
//!
//! What is decided mirrors `crates/pvswitch/src/worker.rs`, and changes with it:
//!
//! - `begin_round`, `process`, `grant`, `after`, `leave`, `end_round`: `Worker::process`, but for
//!   `skip_rounds`, which only saves rounds, and the last `if` of `Worker::run`;
//! - `serve`, then `cool`: `Worker::serve`, the burst, then `Action::Arm` with `arm` and `disarm`;
//! - `Phase::Arm`, `Phase::Wait` and `look`: `Worker::arm`, `Worker::wait`;
//! - `heat`, `list`, `forget`, `kicked`, `retry`, `end_naps`, `retry_busy`, `retry_late`,
//!   `timeout`: the same names. What `Worker::send_held` charges is left out: here a delivery
//!   outside of a queue's turn takes no time.
//!
//! `Pace` is left out: no burst here takes as long as one that it shortens.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use switch::fair::{QUANTUM_NS, Share};
use switch::fdb::PortId;
use switch::forward::{Forwarder, Source, Table};
use switch::frame::{BURST_MAX, Burst};
use switch::hold::RETRY_NS;
use switch::poll::{Action, Costs, Policy, Poller, State};
use switch::port::{Fault, Ingress};

use crate::flawed::Mistake;
use crate::ledger::Ledger;
use crate::random::Random;
use crate::settings::delay_ns_max;
use crate::world::Finding;

/// How often a busy worker looks for kicks of cold queues, in ns.
const LOOK_NS: u64 = 20_000;
/// Looks that find nothing after which a queue that is polled counts as quiet.
const QUIET_LOOKS: u32 = 2;
/// Times in a row that arming may say there is work and a burst then do nothing.
const VAIN_MAX: u32 = 3;

/// Names an ingress queue: port and queue.
pub(crate) type Name = (usize, usize);

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
    Kicked(Name),
    /// A destination that frames are held for has room.
    Retry,
}

/// An ingress queue to serve.
pub(crate) struct Served {
    pub name: Name,
    pub source: Source,
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// What a burst costs for each frame, in ns.
    pub frame_ns: u64,
}

/// Time that a queue was served while it never ran empty, and time that was its due.
#[derive(Clone, Copy, Default)]
struct Tally {
    served_ns: u64,
    due_ns: u64,
    /// The longest quantum that its port had.
    quantum_ns: u64,
    /// The last round that is in the account.
    rounds: u64,
}

/// A served queue and its state.
pub(crate) struct Queue {
    pub served: Served,
    poller: Poller,
    /// What the operator wants; the poller follows it.
    policy: Policy,
    pub state: State,
    /// To be served in this round.
    pub listed: bool,
    /// Warm: since when, and until when it is left alone.
    pub nap: (u64, u64),
    /// Not served until the destination that it waits for has room.
    pub paused: bool,
    share: Share,
    tally: Tally,
    /// The longest burst so far, in ns.
    burst_ns_max: u64,
    /// Looks in vain since anything happened elsewhere.
    quiet: u32,
    /// Times in a row that there was work, and none was done.
    vain: u32,
    shown: u64,
}

/// What a worker wants after a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Another step.
    Go,
    /// Sleep, for so long at most.
    Sleep(Option<u64>),
}

/// A burst that was just made.
struct Turn {
    began_ns: u64,
    frames: usize,
    action: Action,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Between two rounds.
    Start,
    /// The next burst of the hot queues.
    Process,
    /// The queue just served, whose policy says sleep.
    Cool,
    /// No queue is hot: the last look before sleep.
    Arm,
    Wait,
    Asleep,
}

pub(crate) struct Worker {
    pub index: u8,
    forwarder: Forwarder,
    table: Arc<Table>,
    costs: Costs,
    mistake: Mistake,
    pub queues: Vec<Queue>,
    /// Indices of those to be served in this round, or the next.
    hot: Vec<usize>,
    warm: Vec<usize>,
    warm_ns: u64,
    /// Hot queues of each port.
    hot_of: Vec<u16>,
    /// Kicks that it has not looked at.
    pub pending: BTreeSet<Token>,
    pub commands: Vec<Command>,
    /// Someone wrote to its own descriptor since it last looked.
    signalled: bool,
    /// Ports whose guests broke the protocol.
    pub faults: Vec<(usize, Fault)>,
    /// Commands for other workers.
    pub sends: Vec<(usize, Command)>,
    /// Queues that it stopped serving, and who is to get them.
    pub given: Vec<(Served, usize)>,
    /// Which of its timers counts.
    pub timer: u64,
    phase: Phase,
    /// In the round: which of `hot` is next, whether it was granted its share, whether it stays
    /// among the hot ones, and whether it was alone when the round began.
    at: usize,
    granted: bool,
    stays: bool,
    alone: bool,
    turn: Option<Turn>,
    scratch: Burst<'static>,
    looked_ns: u64,
    retried_ns: u64,
    slept: bool,
    /// When this round began, when the last ended, and how many there were.
    pub began_ns: u64,
    ended_ns: u64,
    rounds: u64,
    /// What the last step cost beyond what every step costs.
    extra_ns: u64,
    /// The books' progress when this round began.
    progress: u64,
    progress_ns: u64,
    /// Rounds in which nothing happened.
    idle_rounds: u32,
    /// This round found frames.
    found: bool,
    pub naps: u64,
    /// What was found wrong.
    pub finding: Option<Finding>,
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("one thread")
}

impl Queue {
    fn set_state(&mut self, state: State) {
        if self.state != state {
            self.state = state;
            self.served.source.tuning.set_state(state);
        }
    }
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
            forwarder,
            hot_of: vec![0; table.len()],
            table,
            costs,
            mistake,
            queues: Vec::new(),
            hot: Vec::new(),
            warm: Vec::new(),
            warm_ns: u64::MAX,
            pending: BTreeSet::new(),
            commands: Vec::new(),
            signalled: false,
            faults: Vec::new(),
            sends: Vec::new(),
            given: Vec::new(),
            timer: 0,
            phase: Phase::Start,
            at: 0,
            granted: false,
            stays: true,
            alone: false,
            turn: None,
            scratch: Burst::default(),
            looked_ns: 0,
            retried_ns: 0,
            slept: false,
            began_ns: 0,
            ended_ns: 0,
            rounds: 0,
            extra_ns: 0,
            progress: 0,
            progress_ns: 0,
            idle_rounds: 0,
            found: false,
            naps: 0,
            finding: None,
        }
    }

    pub fn is_asleep(&self) -> bool {
        self.phase == Phase::Asleep
    }

    /// Whether it found room for frames that worker `other` holds, and will tell it.
    pub fn will_wake(&self, other: usize) -> bool {
        self.forwarder.woken & 1 << other != 0
    }

    /// Whether nothing more will come of it by itself.
    pub fn is_idle(&self, now_ns: u64) -> bool {
        // Held frames are delivered or given up at some time, or else forgotten.
        if self.forwarder.is_blocked() && now_ns.saturating_sub(self.progress_ns) < 2_000_000_000 {
            return false;
        }
        let told = self.commands.is_empty() && self.pending.is_empty();
        let polls = |q: &&Queue| q.listed || q.state == State::Warm;
        let quiet = self.queues.iter().filter(polls).all(|q| q.quiet >= QUIET_LOOKS);
        let polling = self.queues.iter().any(|q| polls(&q));
        told && quiet && self.forwarder.late().is_none() && (self.is_asleep() || polling)
    }

    /// Something happened that it may be concerned with.
    pub fn disturb(&mut self) {
        self.queues.iter_mut().for_each(|q| q.quiet = 0);
    }

    /// How long the last step took, in ns.
    pub fn delay(&mut self, random: &mut Random) -> u64 {
        // A round that finds nothing may as well be a long one.
        let least = random.within(100..1500) << self.idle_rounds.min(4);
        least + std::mem::take(&mut self.extra_ns)
    }

    /// Something woke it, if it slept. Returns whether it did.
    pub fn wake(&mut self, wake: Wake, now_ns: u64, ledger: &mut Ledger) -> bool {
        match wake {
            Wake::Kick(token) => _ = self.pending.insert(token),
            Wake::Command => self.signalled = true,
            Wake::Timer => {}
        }
        if !self.is_asleep() {
            return false;
        }
        (self.slept, self.phase) = (true, Phase::Start);
        self.look(now_ns, ledger);
        if wake == Wake::Timer || self.mistake != Mistake::GivesUpInSilence {
            self.retry_late(now_ns, ledger);
        }
        true
    }

    /// One step.
    pub fn step(&mut self, now_ns: u64, ledger: &mut Ledger) -> Then {
        match self.phase {
            Phase::Start if !self.commands.is_empty() => self.obey(now_ns, ledger),
            Phase::Start => self.begin_round(now_ns),
            Phase::Process => self.process(now_ns, ledger),
            Phase::Cool => {
                self.cool(ledger);
                self.phase = Phase::Process;
            }
            Phase::Arm if !self.commands.is_empty() => self.phase = Phase::Start,
            Phase::Arm => {
                self.phase = Phase::Wait;
                if !self.forwarder.arm_blocked() {
                    self.retry(false, now_ns, ledger);
                    self.phase = Phase::Start;
                }
            }
            Phase::Wait => {
                let timeout = self.timeout();
                if self.pending.is_empty() && !self.signalled && timeout != Some(0) {
                    self.phase = Phase::Asleep;
                    self.timer += 1;
                    return Then::Sleep(timeout);
                }
                self.slept |= timeout != Some(0);
                self.phase = Phase::Start;
                self.look(now_ns, ledger);
                if self.mistake != Mistake::GivesUpInSilence {
                    self.retry_late(now_ns, ledger);
                }
            }
            Phase::Asleep => unreachable!("wake comes first"),
        }
        Then::Go
    }

    /// How long to sleep at most: indefinitely, or until full destinations are to be tried again, a
    /// warm queue is to be polled, or a peer to be notified.
    fn timeout(&self) -> Option<u64> {
        let now_ns = self.ended_ns;
        let held = self.is_blocked().then_some(RETRY_NS);
        let naps = !self.warm.is_empty() && self.mistake != Mistake::ForgetsNaps;
        let warm = naps.then(|| self.warm_ns.saturating_sub(now_ns));
        let late = self.late().map(|at| at.saturating_sub(now_ns));
        [held, warm, late].into_iter().flatten().min()
    }

    fn late(&self) -> Option<u64> {
        self.forwarder.late().filter(|_| self.mistake != Mistake::ForgetsLateCalls)
    }

    // ---- the set of queues ----

    fn obey(&mut self, now_ns: u64, ledger: &mut Ledger) {
        for command in std::mem::take(&mut self.commands) {
            match command {
                Command::Serve(served) => self.adopt(served, now_ns),
                Command::Drop(name) => {
                    if let Some(at) = self.find(name) {
                        self.forget(at);
                    }
                }
                Command::Away(name, to) => {
                    if let Some(at) = self.find(name) {
                        let served = self.forget(at);
                        self.given.push((served, to));
                    }
                }
                Command::Kicked((port, queue)) => {
                    self.kicked(Token::Ingress(port, queue), now_ns, ledger);
                }
                Command::Retry => self.retry(false, now_ns, ledger),
            }
        }
    }

    fn find(&self, name: Name) -> Option<usize> {
        self.queues.iter().position(|q| q.served.name == name)
    }

    /// Begins to serve a queue.
    pub fn adopt(&mut self, served: Served, now_ns: u64) {
        let policy = served.source.tuning.poll();
        self.queues.push(Queue {
            poller: Poller::new(policy, self.costs, now_ns),
            served,
            policy,
            state: State::Cold,
            listed: false,
            nap: (now_ns, now_ns),
            paused: false,
            share: Share::default(),
            tally: Tally::default(),
            burst_ns_max: 0,
            quiet: 0,
            vain: 0,
            shown: 0,
        });
        // The peer may have made frames available before anyone listened.
        if self.mistake != Mistake::AdoptsCold || now_ns == 0 {
            self.heat(self.queues.len() - 1);
        }
    }

    /// Takes a queue out of the worker's hands.
    fn forget(&mut self, at: usize) -> Served {
        let queue = self.queues.swap_remove(at);
        self.hot.clear();
        self.warm.clear();
        self.hot_of.fill(0);
        for (i, queue) in self.queues.iter().enumerate() {
            if queue.listed {
                self.hot.push(i);
                self.hot_of[queue.served.name.0] += 1;
            } else if queue.state == State::Warm {
                self.warm.push(i);
            }
        }
        queue.served
    }

    /// Puts a queue among those to be served.
    fn list(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        if !queue.listed {
            (queue.listed, queue.tally) = (true, Tally::default());
            self.hot.push(at);
            self.hot_of[queue.served.name.0] += 1;
        }
    }

    fn heat(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        queue.quiet = 0;
        if queue.state == State::Cold && queue.poller.disarms() {
            lock(&queue.served.ingress).disarm();
        }
        if queue.state == State::Warm {
            self.warm.retain(|i| *i != at);
        }
        queue.set_state(State::Hot);
        self.list(at);
    }

    fn kicked(&mut self, token: Token, now_ns: u64, ledger: &mut Ledger) {
        match token {
            Token::Ingress(port, queue) => {
                // It may have moved on.
                if let Some(at) = self.find((port, queue)) {
                    self.queues[at].poller.wake(now_ns);
                    self.heat(at);
                }
            }
            Token::Egress(port, queue) => {
                let table = Arc::clone(&self.table);
                let port = table[port].as_ref().expect("ports stay");
                let egress = &port.egress[queue];
                // Without the event index the guest would kick for each buffer from now on.
                lock(&egress.queue).disarm();
                let waiters = egress.waiters.swap(0, Ordering::AcqRel);
                self.wake_waiters(waiters, now_ns, ledger);
            }
        }
    }

    /// Looks at all kicks that arrived.
    fn look(&mut self, now_ns: u64, ledger: &mut Ledger) {
        self.signalled = false;
        for token in std::mem::take(&mut self.pending) {
            self.kicked(token, now_ns, ledger);
        }
    }

    fn wake_waiters(&mut self, workers: u64, now_ns: u64, ledger: &mut Ledger) {
        if workers & 1 << self.index != 0 {
            self.retry(false, now_ns, ledger);
        }
        for other in (0..64).filter(|w| *w != self.index && workers & 1 << w != 0) {
            self.sends.push((usize::from(other), Command::Retry));
        }
    }

    /// A destination may have room: delivers what is held for it, and goes on with the queues that
    /// are paused for it. `all`: for every destination.
    fn retry(&mut self, all: bool, now_ns: u64, ledger: &mut Ledger) {
        self.forwarder.retry(all, now_ns);
        ledger.sync(None, now_ns);
        for at in 0..self.queues.len() {
            let queue = &self.queues[at];
            let news = all || self.forwarder.may_go_on(&queue.served.source);
            if queue.paused && news && self.mistake != Mistake::ForgetsPaused {
                self.heat(at);
            }
        }
    }

    fn is_blocked(&self) -> bool {
        self.forwarder.is_blocked() && self.mistake != Mistake::NeverRetries
    }

    /// Whether it waits for queue `queue` of `port`.
    pub fn waits_for(&self, port: usize, queue: usize) -> bool {
        self.forwarder.is_blocked_by(PortId(port as u16), queue as u16)
    }

    // ---- phase 1 ----

    fn begin_round(&mut self, now_ns: u64) {
        (self.began_ns, self.at, self.granted) = (now_ns, 0, false);
        self.end_naps(now_ns);
        self.alone = self.hot.len() == 1;
        self.phase = Phase::Process;
    }

    /// Lists the warm queues whose time has come; after a sleep, `adaptive` ones whose time has
    /// half come, too.
    fn end_naps(&mut self, now_ns: u64) {
        let slept = std::mem::take(&mut self.slept);
        if self.warm.is_empty() || now_ns < self.warm_ns && !slept {
            return;
        }
        self.warm_ns = u64::MAX;
        let mut i = 0;
        while i < self.warm.len() {
            let at = self.warm[i];
            let queue = &self.queues[at];
            let (since, until) = queue.nap;
            let early = slept && matches!(queue.policy, Policy::Adaptive { .. });
            let due = if early { since.midpoint(until) } else { until };
            if now_ns >= due {
                self.warm.swap_remove(i);
                self.list(at);
            } else {
                self.warm_ns = self.warm_ns.min(until);
                i += 1;
            }
        }
    }

    /// The burst before this step is over; on to the next one of the round.
    fn process(&mut self, now_ns: u64, ledger: &mut Ledger) {
        let mut more = true;
        if let Some(turn) = self.turn.take() {
            more = self.after(turn, now_ns);
        }
        while let Some(&at) = self.hot.get(self.at) {
            if !self.granted {
                self.grant(at);
                more = true;
            }
            if more && self.queues[at].share.may() {
                self.serve(at, now_ns, ledger);
                return;
            }
            self.granted = false;
            self.leave(at);
        }
        self.end_round(now_ns, ledger);
    }

    fn grant(&mut self, at: usize) {
        let (rounds, alone) = (self.rounds, self.alone);
        let queue = &mut self.queues[at];
        if alone || self.mistake == Mistake::IgnoresDebt {
            queue.share.forgive();
        }
        let weight = queue.served.source.tuning.weight();
        let queues = u64::from(self.hot_of[queue.served.name.0]);
        queue.share.grant(weight, queues as usize);
        // A new account for a queue that is alone, or was.
        if alone || queue.tally.rounds + 1 != rounds {
            queue.tally = Tally::default();
        }
        queue.tally.rounds = rounds;
        let quantum_ns = u64::from(QUANTUM_NS) * u64::from(weight);
        queue.tally.quantum_ns = queue.tally.quantum_ns.max(quantum_ns);
        queue.tally.due_ns += quantum_ns / queues.max(1);
        (self.granted, self.stays) = (true, true);
    }

    /// Books what a burst cost, and goes by what the policy said. Returns whether the queue may be
    /// served on in this round.
    fn after(&mut self, turn: Turn, now_ns: u64) -> bool {
        let queue = &mut self.queues[self.hot[self.at]];
        let Turn { began_ns, frames, action } = turn;
        let took = now_ns - began_ns;
        if frames > 0 {
            self.found = true;
            queue.share.charge(took);
            queue.tally.served_ns += took;
            queue.burst_ns_max = queue.burst_ns_max.max(took);
            queue.quiet = 0;
        } else {
            queue.quiet += 1;
            queue.tally = Tally::default();
        }
        match action {
            Action::Poll => {
                queue.set_state(State::Hot);
                frames > 0 && !self.alone
            }
            Action::Until(at_ns) => {
                let forgets = self.mistake == Mistake::NapsForEver && now_ns.is_multiple_of(3);
                let at_ns = if forgets { u64::MAX } else { at_ns };
                queue.nap = (began_ns, at_ns);
                queue.set_state(State::Warm);
                if at_ns - began_ns > delay_ns_max(queue.policy) {
                    let name = queue.served.name;
                    let what = format!("queue {name:?} naps until {at_ns} under {}", queue.policy);
                    self.finding.get_or_insert(Finding::Overslept(what));
                }
                self.stays = false;
                false
            }
            Action::Arm => {
                queue.set_state(State::Cold);
                self.stays = false;
                false
            }
        }
    }

    /// Done with a queue in this round: it stays among the hot ones, or leaves.
    fn leave(&mut self, at: usize) {
        if self.stays {
            self.at += 1;
            self.judge_share(at);
            return;
        }
        let queue = &mut self.queues[at];
        queue.listed = false;
        if queue.state == State::Warm {
            self.naps += 1;
            self.warm_ns = self.warm_ns.min(queue.nap.1);
            self.warm.push(at);
        }
        self.hot_of[queue.served.name.0] -= 1;
        self.hot.swap_remove(self.at);
    }

    /// A queue that never ran empty has had its due, give or take a burst and a quantum.
    fn judge_share(&mut self, at: usize) {
        let queue = &self.queues[at];
        let Tally { served_ns, due_ns, quantum_ns, .. } = queue.tally;
        if served_ns.abs_diff(due_ns) > queue.burst_ns_max + quantum_ns {
            let name = queue.served.name;
            let what = format!(
                "queue {name:?} was served for {served_ns} ns, and {due_ns} were due, at bursts of \
                 at most {}",
                queue.burst_ns_max
            );
            self.finding.get_or_insert(Finding::Unfair(what));
        }
    }

    /// One burst.
    fn serve(&mut self, at: usize, now_ns: u64, ledger: &mut Ledger) {
        let Self { queues, forwarder, scratch, .. } = self;
        let queue = &mut queues[at];
        let Served { source, ingress, name: (port, index), frame_ns } = &queue.served;
        let policy = source.tuning.poll();
        if policy != queue.policy {
            queue.policy = policy;
            queue.poller = Poller::new(policy, self.costs, now_ns);
        }
        let max = forwarder.may_take(source, queue.poller.budget().min(BURST_MAX), now_ns);
        ledger.sync(None, now_ns);
        queue.paused = max == 0;
        let mut ingress = lock(ingress);
        let mut extra = 0;
        let mut got = Ok(0);
        if max > 0 {
            got = ingress.burst(max, now_ns, scratch, &mut |burst| {
                extra = burst.frames.len() as u64 * frame_ns;
                let shown = ledger.before(*port, *index, burst);
                forwarder.forward(source, burst, now_ns);
                ledger.after(&shown, now_ns);
            });
        }
        self.extra_ns = extra;
        drop(ingress);
        if self.mistake == Mistake::BlamesSender {
            self.forwarder.faults.iter_mut().for_each(|(port, ..)| *port = source.port);
        }
        let (frames, action, phase) = match got {
            Ok(frames) => {
                let action = queue.poller.next(frames, now_ns);
                // What a paused queue waits for notifies; it is not armed itself.
                let arms = action == Action::Arm && !queue.paused;
                (frames, action, if arms { Phase::Cool } else { Phase::Process })
            }
            Err(fault) => {
                self.faults.push((*port, fault));
                (0, Action::Arm, Phase::Process)
            }
        };
        self.turn = Some(Turn { began_ns: now_ns, frames, action });
        self.phase = phase;
    }

    /// Arms the queue just served; if there is work, it is polled on.
    fn cool(&mut self, ledger: &Ledger) {
        let queue = &mut self.queues[self.hot[self.at]];
        let (port, index) = queue.served.name;
        let mut ingress = lock(&queue.served.ingress);
        if ingress.arm() {
            queue.vain = 0;
            return;
        }
        if queue.poller.disarms() {
            ingress.disarm();
        }
        let turn = self.turn.as_mut().expect("served before");
        turn.action = Action::Poll;
        let shown = ledger.ingress(port, index).shown;
        let vain = turn.frames == 0 && shown == queue.shown;
        queue.vain = if vain { queue.vain + 1 } else { 0 };
        queue.shown = shown;
        if queue.vain > VAIN_MAX && ledger.is_honest(port) {
            let what = format!("queue {index} of port {port} has work, and a burst does none");
            self.finding.get_or_insert(Finding::Spins(what));
        }
    }

    fn end_round(&mut self, now_ns: u64, ledger: &mut Ledger) {
        let woken = std::mem::take(&mut self.forwarder.woken);
        self.wake_waiters(woken, now_ns, ledger);
        let found = std::mem::take(&mut self.found);
        if self.mistake != Mistake::ForgetsLateCalls {
            self.forwarder.notify_late(now_ns, !found || self.hot.is_empty());
        }
        let faults = self.forwarder.faults.drain(..);
        self.faults.extend(faults.map(|(port, _, fault)| (usize::from(port.0), fault)));
        self.idle_rounds += 1;
        self.rounds += 1;
        self.ended_ns = now_ns;
        if self.progress != ledger.progress {
            (self.progress, self.progress_ns, self.idle_rounds) = (ledger.progress, now_ns, 0);
        }
        self.phase = Phase::Start;
        if self.hot.is_empty() {
            self.phase = Phase::Arm;
        } else if now_ns.saturating_sub(self.looked_ns) > LOOK_NS {
            self.looked_ns = now_ns;
            self.look(now_ns, ledger);
            self.retry_busy(now_ns, ledger);
        }
    }

    /// Other queues keep it busy: who waits for a full destination would wait until it slept.
    fn retry_busy(&mut self, now_ns: u64, ledger: &mut Ledger) {
        if self.mistake == Mistake::BusyForgetsHeld {
            return;
        }
        if !self.forwarder.is_blocked() {
            self.retried_ns = now_ns;
        } else if self.is_blocked() && now_ns.saturating_sub(self.retried_ns) > RETRY_NS {
            self.retried_ns = now_ns;
            self.retry(true, now_ns, ledger);
        } else if !self.forwarder.arm_blocked() {
            self.retry(false, now_ns, ledger);
        }
    }

    /// After a sleep: tries all full destinations if it is time to, whatever ended the sleep.
    fn retry_late(&mut self, now_ns: u64, ledger: &mut Ledger) {
        if self.is_blocked() && now_ns.saturating_sub(self.retried_ns) >= RETRY_NS {
            self.retried_ns = now_ns;
            self.retry(true, now_ns, ledger);
        }
    }
}
