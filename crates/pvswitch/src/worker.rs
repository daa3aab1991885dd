//! Worker threads: each serves some ingress queues, and sleeps when none is hot.
//!
//! [`Scheduler`] decides what is done when. This module carries out its effects one at a time with
//! what the scheduler lacks: the clock, the epoll set of kicks (edge-triggered, never read),
//! commands from other threads, and the thread.

mod handle;
mod rt_throttle;

pub use self::handle::{Handle, Placed, Report, Served};

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use os::{Priority, ThreadKind};
use switch::fair::Usage;
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Events, Findings, Forwarder, PortEvent, Table};
use switch::frame::Burst;
use switch::port::QueueId;
use switch::schedule::{self, COMMANDS_MAX, Effect, Scheduler, Then};
use switch::serving::Serving;
use switch::time::{Instant, Ns};
use vhost_user::device::KickFd;

use self::handle::{Begin, Command, Io, WAKE, Watched};
use self::rt_throttle::RtThrottle;
use crate::pool::{Pool, PoolError};

/// Starts the thread of worker `index`, pinned to `cpu` if given.
///
/// # Errors
/// It cannot be started, have this priority, or be confined.
pub fn spawn(
    index: usize,
    cpu: Option<usize>,
    priority: Priority,
    pool: Arc<Pool>,
) -> Result<(), PoolError> {
    let handle = Arc::clone(&pool.workers()[index]);
    let (begun, has_begun) = std::sync::mpsc::sync_channel(1);
    let mine = Arc::clone(&handle);
    let thread = std::thread::Builder::new().name(format!("worker{index}")).spawn(move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!("worker {index} could not be pinned to CPU {cpu}: {error}");
            }
        }
        os::precise_timers();
        let scheduled =
            os::set_thread_priority(priority).map_err(|error| PoolError::Priority(priority, error));
        // The receiver waits for it.
        let _ = begun.send(scheduled.and_then(|()| Ok(os::confine(ThreadKind::Worker)?)));
        let mut worker = Worker::new(mine, pool);
        worker.throttle = (priority == Priority::Realtime).then(RtThrottle::default);
        worker.run();
    })?;
    *handle.thread.lock() = Some(thread);
    has_begun.recv().expect("the thread reports it before it serves")
}

/// What this thread has used.
fn usage() -> Usage {
    let os::ThreadCounts { faults, waits } = os::thread_counts();
    Usage { now: os::monotonic().into(), cpu: os::thread_cpu_time().into(), faults, waits }
}

struct Worker {
    handle: Arc<Handle>,
    pool: Arc<Pool>,
    scheduler: Scheduler<Io>,
    forwarder: Forwarder,
    watched: HashMap<u64, Watched>,
    scratch: Burst<'static>,
    /// Tokens of the kicks of one poll.
    kicked: Vec<u64>,
    /// Last clock reading.
    time: Instant,
    /// What it leaves of its CPU; `None`: the kernel shares it among threads.
    throttle: Option<RtThrottle>,
    stop: bool,
}

impl Worker {
    fn new(handle: Arc<Handle>, pool: Arc<Pool>) -> Self {
        let tid = u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        handle.stats.tid.store(tid, Ordering::Relaxed);
        let table = Arc::new(Table::new());
        let common = &pool.common;
        let fdb = Arc::clone(&common.fdb);
        let mut forwarder = Forwarder::new(common.mode, handle.index, fdb, table, common.flow_key);
        forwarder.set_usage(usage);
        Self {
            scheduler: Scheduler::new(handle.index, common.costs),
            forwarder,
            handle,
            pool,
            watched: HashMap::new(),
            scratch: Burst::default(),
            kicked: Vec::with_capacity(64),
            time: Instant::START,
            throttle: None,
            stop: false,
        }
    }

    fn now(&self) -> Instant {
        self.pool.now()
    }

    fn run(mut self) {
        self.time = self.now();
        while !self.stop {
            let effect = self.scheduler.next(self.time, &self.forwarder);
            self.carry_out(effect);
        }
        self.notify_due(Instant::NEVER, true);
    }

    #[inline]
    fn carry_out(&mut self, effect: Effect<Io>) {
        match effect {
            Effect::Serve { at, max } => self.serve(at, max),
            Effect::RunCommands => {
                add_one(&self.handle.stats.rounds);
                let taken = self.handle.mailbox.take(|pending| {
                    let commands = pending.take(COMMANDS_MAX);
                    (commands, !pending.is_empty())
                });
                if let Some(commands) = taken {
                    self.run_commands(commands);
                }
            }
            Effect::NotifyDue { rests } => self.notify_due(self.time, rests),
            Effect::Disarm { at } => self.scheduler.queue(at).served.of.ingress.lock().disarm(),
            Effect::Retry { all, .. } => self.retry(all),
            Effect::Wake(workers) => self.pool.wake(workers),
            Effect::PollKicks => {
                self.throttle();
                self.poll_kicks(Some(Ns::ZERO));
            }
            Effect::Pause => {
                std::hint::spin_loop();
                self.time = self.now();
            }
            Effect::ArmFull => self.scheduler.record_arm_full(self.forwarder.arm_blocked()),
            Effect::Wait { timeout, naps } => self.wait(timeout, naps),
            Effect::Measure { load, ends_period } => self.measure(load, ends_period),
            Effect::Give { queues, to } => self.give(queues, to),
            Effect::Mute { at } => self.mute(&self.scheduler.queue(at).served),
            Effect::Unmute { at } => self.unmute(&self.scheduler.queue(at).served),
        }
    }

    // ---- bursts ----

    /// Serves a burst, and those that follow it in the round.
    #[inline]
    fn serve(&mut self, at: usize, max: usize) {
        let mut next = Some((at, max));
        while let Some((at, max)) = next {
            self.burst(at, max);
            next = self.scheduler.next_burst(self.time);
        }
    }

    #[inline]
    fn burst(&mut self, at: usize, max: usize) {
        let queue = self.scheduler.queue(at);
        let meter = queue.meter(&usage);
        let schedule::Served { source, of, .. } = &queue.served;
        let _serving = Serving::port(source.port);
        let (forwarder, scratch, now) = (&mut self.forwarder, &mut self.scratch, self.time);
        let mut ingress = of.ingress.lock_with(|| {
            self.handle.stats.contended.fetch_add(1, Ordering::Relaxed);
        });
        let taken = schedule::burst(source, max, &mut *ingress, forwarder, scratch, now, meter);
        drop(ingress);
        if self.scheduler.record_burst(&taken) == Then::Arm {
            let queue = self.scheduler.queue(at);
            let disarms = queue.poller().disarms();
            let (nothing, due) = schedule::arm(&mut *queue.served.of.ingress.lock(), disarms);
            self.scheduler.record_arm(nothing, due);
        }
        self.time = self.now();
        self.report(taken.findings.events);
    }

    /// Delivers frames held for destinations that may have room. The time is charged to the
    /// destinations: their queues were full.
    fn retry(&mut self, all: bool) {
        let mut found = Findings::default();
        if self.forwarder.is_blocked() {
            let began = self.now();
            let Self { forwarder, scheduler, pool, time, .. } = self;
            found = forwarder.retry_with(all, *time, charge_receivers(began, pool, scheduler));
        }
        self.scheduler.record_retry(all, &found, &self.forwarder);
        self.report(found.events);
    }

    /// Notifies peers, and delivers held frames that rates permit, which is charged like a retry.
    fn notify_due(&mut self, now: Instant, rests: bool) {
        let began = if self.forwarder.delivers_due(now) { self.now() } else { now };
        let Self { forwarder, scheduler, pool, .. } = self;
        let found = forwarder.notify_due_with(now, rests, charge_receivers(began, pool, scheduler));
        self.scheduler.record_findings(&found);
        self.report(found.events);
    }

    /// Reports faults and stalled receivers that the forwarder found.
    #[inline]
    fn report(&self, events: Events) {
        if !events.is_empty() {
            events.into_iter().for_each(|event| self.pool.report(Report::Port(event)));
        }
    }

    // ---- commands ----

    fn run_commands(&mut self, commands: Vec<Command>) {
        self.time = self.now();
        for command in commands {
            match command {
                Command::Queue(command) => self.run_queue_command(command),
                Command::Retry => self.scheduler.wake(1 << self.handle.index),
                Command::Tenants(tenants) => self.forwarder.set_tenants(tenants),
                Command::Held(at) => self.forwarder.wait_for(at),
                Command::Freeze(gate) => {
                    // Guests miss no notification, whoever serves them next.
                    self.notify_due(Instant::NEVER, true);
                    gate.pass();
                    self.time = self.now();
                }
                Command::Stop => self.stop = true,
            }
        }
        self.count_queues();
    }

    fn run_queue_command(&mut self, command: schedule::Command<Begin, Arc<Table>>) {
        use schedule::Command;
        match command {
            Command::Begin(Begin::Serve(served)) => self.adopt(served),
            Command::Begin(Begin::Watch(token, watched)) => {
                if let Some(kick) = &watched.kick {
                    self.wait_for_kicks(watched.port.id, kick, token);
                }
                self.watched.insert(token, watched);
            }
            Command::Drop(token) => self.drop_queue(token),
            Command::GiveAway(token, to) => self.scheduler.give_away(token, to),
            Command::Poll(token) => self.scheduler.poll(token),
            Command::Kick(token) => self.kick(token),
            Command::Table(table) => {
                self.scheduler.set_ports(table.len());
                self.forwarder.set_table(table);
            }
        }
    }

    fn count_queues(&self) {
        let queues = self.scheduler.queues().len();
        self.handle.stats.queues.store(queues as u32, Ordering::Relaxed);
    }

    fn adopt(&mut self, served: Placed) {
        let now = self.now();
        if let Some(kick) = &served.of.kick {
            self.wait_for_kicks(served.source.port, kick, served.token);
        }
        self.scheduler.add(served, now);
    }

    fn drop_queue(&mut self, token: u64) {
        if let Some(served) = self.scheduler.remove(token) {
            self.mute(&served);
            served.mark_stopped();
        } else if let Some(Watched { kick: Some(kick), .. }) = self.watched.remove(&token) {
            let _ = self.handle.epoll.remove(kick.as_fd());
        }
    }

    fn give(&mut self, queues: Vec<Placed>, to: usize) {
        self.handle.stats.moves.fetch_add(queues.len() as u64, Ordering::Relaxed);
        self.count_queues();
        for served in queues {
            self.mute(&served);
            self.pool.hand_over(usize::from(self.handle.index), to, served);
        }
    }

    /// Publishes a load measurement; in balanced placement, has queues given away by load.
    fn measure(&mut self, load: u32, ends_period: bool) {
        let Self { scheduler, pool, handle, time, .. } = self;
        handle.stats.load.store(load, Ordering::Relaxed);
        let moves = pool.placement().moves_by_load(pool.workers().len());
        if ends_period && moves {
            pool.level(|leveller, asleep| scheduler.level(leveller, *time, asleep));
        } else if ends_period {
            scheduler.skip_period(*time);
        }
        if moves {
            scheduler.balance(pool.workers().iter().map(|worker| worker.load()));
        }
    }

    // ---- kicks ----

    /// Adds a queue's kicks to the epoll set. On failure the queue is still served while it is hot.
    fn wait_for_kicks(&self, port: PortId, kick: &KickFd, token: u64) {
        if let Err(error) = self.handle.add(kick.as_fd(), token) {
            self.pool.report(Report::KickFdFailed(port, error));
        }
    }

    fn mute(&self, served: &Placed) {
        if let Some(kick) = &served.of.kick {
            let _ = self.handle.epoll.remove(kick.as_fd());
        }
    }

    fn unmute(&self, served: &Placed) {
        if let Some(kick) = &served.of.kick {
            self.wait_for_kicks(served.source.port, kick, served.token);
        }
    }

    fn kick(&mut self, token: u64) {
        if self.scheduler.kick(token, self.time) {
            return;
        }
        if let Some(Watched { port, queue, .. }) = self.watched.get(&token) {
            let egress = &port.egress[usize::from(*queue)];
            if self.scheduler.kick_room(egress, schedule::token(port.id, *queue, false)) {
                let (port, queue) = (port.id, *queue);
                let event = PortEvent::Stalled { port, queue, begins: false };
                self.pool.report(Report::Port(event));
            }
        }
    }

    /// Leaves the CPU to other threads, when due: whatever comes meanwhile waits, as if they had
    /// preempted the worker.
    fn throttle(&mut self) {
        if let Some(throttle) = &mut self.throttle
            && let Some(time) = throttle.due(self.time)
        {
            std::thread::sleep(time.into());
            throttle.record(self.time, self.pool.now());
        }
    }

    /// Sleeps until something comes; the only function that does.
    fn wait(&mut self, timeout: Option<Ns>, naps: bool) {
        // Remaining commands cause no further wake-up.
        let sleeps = !self.handle.mailbox.has_any();
        if sleeps {
            let stats = &self.handle.stats;
            if naps { &stats.naps } else { &stats.sleeps }.fetch_add(1, Ordering::Relaxed);
            stats.asleep.store(!naps, Ordering::Relaxed);
            let began = self.time;
            self.poll_kicks(timeout);
            if let Some(throttle) = &mut self.throttle {
                throttle.record(began, self.time);
            }
            self.handle.stats.asleep.store(false, Ordering::Relaxed);
            self.pool.common.report_activity();
        }
        self.scheduler.record_wait(sleeps);
    }

    /// Collects pending kicks; with a time-out other than 0, waits for one.
    fn poll_kicks(&mut self, timeout: Option<Ns>) {
        let mut kicked = std::mem::take(&mut self.kicked);
        kicked.clear();
        add_one(&self.handle.stats.epoll_waits);
        // On an error there is none; the next poll has it again.
        let _ = self.handle.epoll.wait_each(timeout.map(Into::into), |ready| {
            if ready.tag != WAKE {
                kicked.push(ready.tag);
            }
        });
        // Once for all kicks, and without any: a worker that a full destination without
        // notifications keeps awake reads the clock nowhere else.
        self.time = self.now();
        kicked.iter().for_each(|token| self.kick(*token));
        self.kicked = kicked;
    }
}

/// Adds to a counter that this thread alone writes.
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// Charges each receiver to which held frames were delivered since `began` for the time it took.
fn charge_receivers(
    mut began: Instant,
    pool: &Pool,
    scheduler: &mut Scheduler<Io>,
) -> impl FnMut(QueueId, &EgressQueue) {
    move |QueueId { port, queue }, egress| {
        let end = pool.now();
        let took = end - std::mem::replace(&mut began, end);
        egress.stats.served_ns.add(took.get());
        scheduler.record_delivery(schedule::token(port, queue, false), took);
    }
}

#[cfg(test)]
mod tests;
