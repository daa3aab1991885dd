//! Workers on the product's ports and forwarder: process, arm, wait, as the program's do, in small
//! steps of virtual time. A queue is polled when it is hot, and gets hot by a kick only.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use switch::forward::{Forwarder, HOLD_NS_MAX, Source, Table};
use switch::frame::{BURST_MAX, Burst};
use switch::port::{Fault, Ingress};

use crate::flawed::Mistake;
use crate::ledger::Ledger;
use crate::random::Random;

/// How often a busy worker looks for kicks of cold queues, in ns.
const LOOK_NS: u64 = 20_000;

/// What to do with a queue after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Poll it again.
    Poll,
    /// Arm it, look again, and poll it no more.
    Sleep,
}

/// When a queue is polled, and when it sleeps. It may be as silly as it likes: that costs time, and
/// never a frame.
pub trait Polling {
    /// A kick made the queue hot.
    fn woken(&mut self, now_ns: u64);

    /// A poll found so many new frames.
    fn polled(&mut self, news: usize, now_ns: u64) -> Next;
}

/// Polls on for a while after the last frame.
#[derive(Clone, Copy, Debug)]
pub struct Linger {
    ns: u64,
    busy_ns: u64,
}

impl Linger {
    /// For so long; 0: sleeps at once, `u64::MAX`: never.
    pub fn new(ns: u64) -> Self {
        Self { ns, busy_ns: 0 }
    }
}

impl Polling for Linger {
    fn woken(&mut self, now_ns: u64) {
        self.busy_ns = now_ns;
    }

    fn polled(&mut self, news: usize, now_ns: u64) -> Next {
        if news > 0 {
            self.busy_ns = now_ns;
        }
        let lingers = now_ns - self.busy_ns < self.ns || news > 0;
        if lingers { Next::Poll } else { Next::Sleep }
    }
}

/// What wakes a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Token {
    /// An ingress queue was kicked.
    Ingress(usize, usize),
    /// A receiver made room.
    Egress(usize, usize),
    /// Another worker found that some receiver made room.
    Retry,
}

/// An ingress queue it serves.
pub(crate) struct Served {
    pub port: usize,
    pub queue: usize,
    pub source: Source,
    pub ingress: Arc<Mutex<dyn Ingress>>,
    pub polling: Box<dyn Polling>,
    pub hot: bool,
    last: Next,
    held: usize,
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
    /// One burst of the next hot queue from here on.
    Process(usize),
    /// A queue whose policy says sleep.
    Cool(usize),
    /// No queue is hot: the last look before sleep.
    Arm,
    Wait,
    Asleep,
}

pub(crate) struct Worker {
    index: u8,
    forwarder: Forwarder,
    table: Arc<Table>,
    mistake: Mistake,
    pub queues: Vec<Served>,
    /// Kicks that it has not looked at.
    pub pending: BTreeSet<Token>,
    /// Ports whose guests broke the protocol.
    pub faults: Vec<(usize, Fault)>,
    /// Other workers to wake, one bit each.
    pub pokes: u64,
    /// Which of its timers counts.
    pub timer: u64,
    phase: Phase,
    scratch: Burst<'static>,
    looked_ns: u64,
    retried_ns: u64,
    /// The books' progress when this round began.
    progress: u64,
    /// Rounds in which nothing happened.
    idle_rounds: u32,
    /// Those of them since anything happened elsewhere.
    quiet_rounds: u32,
    progress_ns: u64,
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("one thread")
}

impl Served {
    pub fn new(
        port: usize,
        queue: usize,
        source: Source,
        ingress: Arc<Mutex<dyn Ingress>>,
        polling: Box<dyn Polling>,
    ) -> Self {
        // The guest may have sent before anyone listened.
        Self { port, queue, source, ingress, polling, hot: true, last: Next::Poll, held: 0 }
    }

    fn heat(&mut self, now_ns: u64) {
        self.polling.woken(now_ns);
        if !self.hot {
            self.hot = true;
            lock(&self.ingress).disarm();
        }
    }
}

impl Worker {
    pub fn new(index: u8, forwarder: Forwarder, table: Arc<Table>, mistake: Mistake) -> Self {
        Self {
            index,
            forwarder,
            table,
            mistake,
            queues: Vec::new(),
            pending: BTreeSet::new(),
            faults: Vec::new(),
            pokes: 0,
            timer: 0,
            phase: Phase::Process(0),
            scratch: Burst::default(),
            looked_ns: 0,
            retried_ns: 0,
            progress: 0,
            idle_rounds: 0,
            quiet_rounds: 0,
            progress_ns: 0,
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
        let holds = self.queues.iter().any(|q| q.held > 0);
        if holds && now_ns.saturating_sub(self.progress_ns) < 2_000_000_000 {
            return false;
        }
        let wants_sleep = self.queues.iter().any(|q| q.hot && q.last == Next::Sleep);
        self.is_asleep() || self.quiet_rounds >= 4 && self.pending.is_empty() && !wants_sleep
    }

    /// Something happened that it may be concerned with.
    pub fn disturb(&mut self) {
        self.quiet_rounds = 0;
    }

    /// How long a step takes, in ns.
    pub fn delay(&self, random: &mut Random) -> u64 {
        // A round that finds nothing may as well be a long one.
        random.within(100..1500) << self.idle_rounds.min(4)
    }

    /// A kick arrived, or (`None`) its time is up. Returns whether that wakes it.
    pub fn wake(&mut self, token: Option<Token>, now_ns: u64) -> bool {
        self.pending.extend(token);
        if !self.is_asleep() {
            return false;
        }
        if token.is_none() {
            self.retry(now_ns);
        }
        self.look(now_ns);
        self.phase = Phase::Process(0);
        true
    }

    /// The port was stopped.
    pub fn forget(&mut self, port: usize) {
        for queue in self.queues.iter_mut().filter(|q| q.port == port) {
            (queue.hot, queue.held) = (false, 0);
        }
    }

    /// One step.
    pub fn step(&mut self, now_ns: u64, ledger: &mut Ledger) -> Then {
        match self.phase {
            Phase::Process(from) => {
                let at = self.queues.iter().skip(from).position(|q| q.hot).map(|i| from + i);
                let Some(at) = at else { return self.end_round(now_ns, ledger) };
                let sleepy = self.serve(at, now_ns, ledger);
                self.phase = if sleepy { Phase::Cool(at) } else { Phase::Process(at + 1) };
            }
            Phase::Cool(at) => {
                let queue = &mut self.queues[at];
                queue.hot &= !lock(&queue.ingress).arm();
                self.phase = Phase::Process(at + 1);
            }
            Phase::Arm => {
                if self.pending.remove(&Token::Retry) || !self.forwarder.arm_blocked() {
                    self.retry(now_ns);
                    self.phase = Phase::Process(0);
                } else {
                    self.phase = Phase::Wait;
                }
            }
            Phase::Wait if !self.pending.is_empty() => {
                self.look(now_ns);
                self.phase = Phase::Process(0);
            }
            Phase::Wait => {
                self.phase = Phase::Asleep;
                self.timer += 1;
                // For ever, or until held frames must be given up.
                let holds = self.queues.iter().any(|q| q.held > 0);
                return Then::Sleep(holds.then_some(HOLD_NS_MAX / 4));
            }
            Phase::Asleep => unreachable!("wake comes first"),
        }
        Then::Go
    }

    /// One burst; returns whether the policy wants sleep.
    fn serve(&mut self, at: usize, now_ns: u64, ledger: &mut Ledger) -> bool {
        let Self { queues, forwarder, scratch, .. } = self;
        let Served { port, queue, source, ingress, polling, .. } = &mut queues[at];
        let mut ingress = lock(ingress);
        let got = ingress.burst(BURST_MAX, now_ns, scratch, &mut |burst| {
            let shown = ledger.before(*port, *queue, burst);
            forwarder.forward(source, burst, now_ns);
            ledger.after(&shown, burst);
        });
        let held = ingress.held();
        drop(ingress);
        if self.mistake == Mistake::BlamesSender {
            self.forwarder.faults.iter_mut().for_each(|(port, _)| *port = source.port);
        }
        let frames = match got {
            Ok(frames) => frames,
            Err(fault) => {
                self.faults.push((*port, fault));
                queues[at].hot = false;
                return false;
            }
        };
        // Held frames alone are no reason to poll: the destination tells when it has room.
        let last = polling.polled(frames.saturating_sub(held), now_ns);
        (queues[at].last, queues[at].held) = (last, held);
        last == Next::Sleep
    }

    fn end_round(&mut self, now_ns: u64, ledger: &Ledger) -> Then {
        let woken = std::mem::take(&mut self.forwarder.woken);
        self.wake_waiters(woken, now_ns);
        let faults = self.forwarder.faults.drain(..);
        self.faults.extend(faults.map(|(port, fault)| (usize::from(port.0), fault)));
        self.idle_rounds += 1;
        self.quiet_rounds += 1;
        if self.progress != ledger.progress {
            (self.progress, self.progress_ns) = (ledger.progress, now_ns);
            (self.idle_rounds, self.quiet_rounds) = (0, 0);
        }
        self.phase = Phase::Process(0);
        if self.pending.remove(&Token::Retry) {
            self.retry(now_ns);
        } else if !self.queues.iter().any(|q| q.hot) {
            self.phase = Phase::Arm;
        } else if now_ns.saturating_sub(self.looked_ns) > LOOK_NS {
            self.looked_ns = now_ns;
            self.look(now_ns);
            self.mind_held(now_ns);
        }
        Then::Go
    }

    /// Other queues keep it busy: cold ones with held frames want to hear of room, too.
    fn mind_held(&mut self, now_ns: u64) {
        if self.mistake == Mistake::BusyForgetsHeld {
            return;
        }
        let late = now_ns.saturating_sub(self.retried_ns) > HOLD_NS_MAX / 4;
        if !self.forwarder.arm_blocked() || late {
            self.retry(now_ns);
        }
    }

    /// Looks at all kicks that arrived.
    fn look(&mut self, now_ns: u64) {
        for token in std::mem::take(&mut self.pending) {
            match token {
                Token::Ingress(port, queue) => {
                    let mut queues = self.queues.iter_mut();
                    let queue = queues.find(|q| (q.port, q.queue) == (port, queue));
                    queue.expect("its own queue").heat(now_ns);
                }
                Token::Egress(port, queue) => {
                    let table = Arc::clone(&self.table);
                    let port = table[port].as_ref().expect("ports stay");
                    let egress = &port.egress[queue];
                    // Without the event index the guest would kick for each buffer from now on.
                    lock(&egress.queue).disarm();
                    let waiters = egress.waiters.swap(0, Ordering::AcqRel);
                    self.wake_waiters(waiters, now_ns);
                }
                Token::Retry => self.retry(now_ns),
            }
        }
    }

    fn wake_waiters(&mut self, workers: u64, now_ns: u64) {
        let own = 1 << self.index;
        if workers & own != 0 {
            self.retry(now_ns);
        }
        self.pokes |= workers & !own;
    }

    /// A destination made room: queues with held frames try again.
    fn retry(&mut self, now_ns: u64) {
        self.retried_ns = now_ns;
        for queue in self.queues.iter_mut().filter(|q| q.held > 0) {
            queue.heat(now_ns);
        }
    }
}
