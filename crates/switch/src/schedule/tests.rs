//! The scheduler driven in virtual time, on queues that are made for the test.

mod charges;
mod commands;
mod lists;
mod rate;
mod short_way;
mod sleep;
mod slow;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use shm::sync::{Lock, Mutex};

use super::*;
use crate::direct::Direct;
use crate::fair::Usage;
use crate::fdb::{Fdb, PortId};
use crate::forward::{Mode, Port, Source, Table};
use crate::frame::Burst;
use crate::poll::Policy;
use crate::port::{Egress, Fault, Ingress, QueueId, Steer};
use crate::stats::EgressStats;
use crate::tuning::Tuning;
use crate::vnet::{Offloads, VnetHdr};

const COSTS: Costs = Costs::TYPICAL;

/// Virtual time, in ns.
type Clock = Arc<AtomicU64>;

/// What a guest's transmit queue is for a worker: frames that wait.
#[derive(Default)]
struct Guest {
    waiting: AtomicUsize,
    /// How long a burst takes, in ns.
    takes_ns: AtomicU64,
    armed: AtomicBool,
    disarms: AtomicUsize,
    due_ns: AtomicU64,
}

static FRAME: [u8; 60] = [2; 60];

struct Transmit(Arc<Guest>, Clock);

impl Ingress for Transmit {
    fn burst(
        &mut self,
        max: usize,
        _: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let new = self.0.waiting.load(Ordering::Relaxed).min(max);
        self.0.waiting.fetch_sub(new, Ordering::Relaxed);
        self.1.fetch_add(self.0.takes_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        for i in 0..new {
            burst.segs.push(shm::Seg::of(&FRAME));
            burst.push_at(i, 1, FRAME.len() as u32, VnetHdr::NONE);
        }
        if new > 0 {
            forward(burst);
            *burst = std::mem::take(burst).recycle();
        }
        Ok(new)
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        self.0.armed.store(true, Ordering::Relaxed);
        self.0.waiting.load(Ordering::Relaxed) == 0
    }

    fn due(&self) -> Option<Instant> {
        Some(self.0.due_ns.load(Ordering::Relaxed)).filter(|ns| *ns > 0).map(Instant::from_ns)
    }

    fn disarm(&mut self) {
        self.0.armed.store(false, Ordering::Relaxed);
        self.0.disarms.fetch_add(1, Ordering::Relaxed);
    }
}

/// A receiver with room for so many frames, and those that it took.
#[derive(Default)]
struct Receiver {
    room: AtomicUsize,
    took: AtomicUsize,
    /// How long it takes to put a group, in ns.
    takes_ns: AtomicU64,
    /// It does not notify when it has room.
    silent: AtomicBool,
}

struct Receive(Arc<Receiver>, Clock);

impl Egress for Receive {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, _: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let done = picks.len().min(self.0.room.load(Ordering::Relaxed));
        self.0.room.fetch_sub(done, Ordering::Relaxed);
        self.0.took.fetch_add(done, Ordering::Relaxed);
        self.1.fetch_add(self.0.takes_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(done)
    }

    fn put_parts(&mut self, _: &[u8], _: &[shm::Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        Ok(true)
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit.min(self.0.room.load(Ordering::Relaxed)))
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {}

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        self.0.room.load(Ordering::Relaxed) == 0 && !self.0.silent.load(Ordering::Relaxed)
    }

    fn disarm(&mut self) {}
}

type Io = Arc<Mutex<dyn Ingress>>;

/// A worker without a thread.
struct Worker {
    scheduler: Scheduler<Io>,
    forwarder: Forwarder,
    scratch: Burst<'static>,
    clock: Clock,
    /// Effects other than bursts, in order.
    log: Vec<Effect<Io>>,
}

fn token(port: u16) -> u64 {
    u64::from(port)
}

impl Worker {
    fn new() -> Self {
        let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 16));
        let table = Arc::new(Table::new());
        Self {
            scheduler: Scheduler::new(0, COSTS),
            forwarder: Forwarder::new(Mode::Cross, 0, fdb, table, 1),
            scratch: Burst::default(),
            clock: Clock::default(),
            log: Vec::new(),
        }
    }

    fn now(&self) -> Instant {
        Instant::from_ns(self.clock.load(Ordering::Relaxed))
    }

    fn pass(&self, time: Ns) {
        self.clock.fetch_add(time.get(), Ordering::Relaxed);
    }

    /// Serves a queue of port `port`.
    fn add(&mut self, port: u16, policy: Policy, notifies: bool) -> (Arc<Guest>, Arc<Tuning>) {
        let (guest, tuning) = (Arc::<Guest>::default(), Arc::new(Tuning::new(policy)));
        let source = Source::new(PortId(port), 0, Arc::default(), Arc::clone(&tuning));
        let of: Io = Arc::new(Mutex::new(
            Lock::Ingress,
            Transmit(Arc::clone(&guest), Arc::clone(&self.clock)),
        ));
        self.scheduler.add(Served { token: token(port), source, notifies, of }, self.now());
        (guest, tuning)
    }

    /// A table with one receiver, at port 1.
    fn receive(&mut self) -> (Arc<Receiver>, Arc<Port>) {
        let receiver = Arc::<Receiver>::default();
        let queue = Receive(Arc::clone(&receiver), Arc::clone(&self.clock));
        let queue = EgressQueue::new(
            Arc::new(Mutex::new(Lock::Egress, queue)),
            Arc::<EgressStats>::default(),
        );
        let port = Arc::new(Port::new(PortId(1), "r".into(), vec![queue]));
        port.set_active(1);
        self.forwarder.set_table(Arc::new(vec![None, Some(Arc::clone(&port))]));
        (receiver, port)
    }

    /// Carries out the next effect. False: it is a wait.
    fn step(&mut self) -> bool {
        let now = self.now();
        let effect = self.scheduler.next(now, &self.forwarder);
        match &effect {
            Effect::Serve { at, max } => {
                let queue = self.scheduler.queue(*at);
                // Each microsecond of a burst is a page fault.
                let usage = || {
                    let ns = self.clock.load(Ordering::Relaxed);
                    Usage { cpu: Ns::new(ns), faults: ns / 1_000, ..Usage::default() }
                };
                let meter = queue.meter(&usage);
                let Served { source, of, .. } = &queue.served;
                let (forwarder, scratch) = (&mut self.forwarder, &mut self.scratch);
                let took = burst(source, *max, &mut *of.lock(), forwarder, scratch, now, meter);
                if self.scheduler.record_burst(&took) == Then::Arm {
                    let queue = self.scheduler.queue(*at);
                    let disarms = queue.poller().disarms();
                    let (nothing, due) = arm(&mut *queue.served.of.lock(), disarms);
                    self.scheduler.record_arm(nothing, due);
                }
                return true;
            }
            Effect::Disarm { at } => self.scheduler.queue(*at).served.of.lock().disarm(),
            Effect::NotifyDue { rests } => {
                let Self { forwarder, scheduler, clock, .. } = self;
                let charge = charge_receivers(now, clock, scheduler);
                let found = forwarder.notify_due_with(now, *rests, charge);
                self.scheduler.record_findings(&found);
            }
            Effect::Retry { all, .. } => {
                let Self { forwarder, scheduler, clock, .. } = self;
                let found =
                    forwarder.retry_with(*all, now, charge_receivers(now, clock, scheduler));
                self.scheduler.record_retry(*all, &found, &self.forwarder);
            }
            Effect::Pause => self.pass(Ns::new(100)),
            Effect::ArmFull => {
                let armed = self.forwarder.arm_blocked();
                self.scheduler.record_arm_full(armed);
            }
            _ => {}
        }
        let waits = matches!(effect, Effect::Wait { .. });
        self.log.push(effect);
        !waits
    }

    /// One round, up to the next or to a wait.
    fn round(&mut self) {
        self.settle();
        while self.scheduler.step != Step::Begin {
            self.step();
        }
        while self.step() && self.scheduler.step != Step::Begin {}
    }

    /// Carries out what events asked for.
    fn settle(&mut self) {
        let asked = |scheduler: &Scheduler<Io>| {
            let Scheduler { todo, gives, woken, .. } = scheduler;
            !todo.is_empty() || !gives.is_empty() || *woken != 0
        };
        while asked(&self.scheduler) {
            self.step();
        }
    }

    /// The rounds that each queue is not served in, for what it owes.
    fn owed(&self) -> Vec<u64> {
        self.scheduler.queues.iter().map(|queue| queue.share.rounds_in_debt(1, 1)).collect()
    }

    fn clear_debt(&mut self) {
        self.scheduler.queues.iter_mut().for_each(|queue| queue.share = Default::default());
    }

    /// The wait that the worker ends in, after whatever it does before.
    fn until_wait(&mut self) -> (Option<Ns>, bool) {
        for _ in 0..1000 {
            if !self.step() {
                break;
            }
        }
        match self.log.last() {
            Some(Effect::Wait { timeout, naps }) => (*timeout, *naps),
            other => panic!("no wait, but {other:?}"),
        }
    }
}

/// Charges receivers of held frames for the time since `began`.
fn charge_receivers(
    mut began: Instant,
    clock: &Clock,
    scheduler: &mut Scheduler<Io>,
) -> impl FnMut(QueueId, &EgressQueue) {
    move |QueueId { port, .. }, egress| {
        let end = Instant::from_ns(clock.load(Ordering::Relaxed));
        let took = end - std::mem::replace(&mut began, end);
        egress.stats.served_ns.add(took.get());
        scheduler.record_delivery(token(port.0), took);
    }
}

impl std::fmt::Debug for dyn Ingress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ingress")
    }
}
