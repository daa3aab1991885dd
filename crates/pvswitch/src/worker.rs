//! Worker threads: each serves some ingress queues, and sleeps when none is hot.
//!
//! One round is three phases, one function each: [`Worker::process`] serves the hot queues and the
//! warm ones whose time has come, [`Worker::arm`] re-checks before sleep, [`Worker::sleep`] sleeps.
//! Queues become hot by a kick (an edge on their descriptor in the worker's epoll set, never read)
//! and warm or cold by their policy. Ports share a worker by deficit round-robin in measured time;
//! under the placement `balanced` a crowded worker gives queues away and a quiet one folds.
//!
//! Two models mirror what is decided here and change with it: `crates/sim/src/worker.rs` (process,
//! serve, arm, wait, end_naps, retry_busy, retry_late, timeout) and `crates/switch/tests/sleep.rs`
//! (serve from `poller.next` on, wait, heat).

mod handle;
mod load;
mod queue;

pub use self::handle::{Handle, Report, Served};

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{Timespec, epoll};
use switch::fdb::PortId;
use switch::forward::{Forwarder, Table};
use switch::frame::Burst;
use switch::hold::RETRY_NS;
use switch::poll::{Action, Policy, State};
use switch::tuning::Drain;
use vhost_user::device::KickFd;

use self::handle::{Command, WAKE, Watched, lock};
use self::queue::Queue;
use crate::cost;
use crate::pool::{self, Pool};

/// How often a busy worker looks for kicks of cold queues, in ns.
const LOOK_NS: u64 = 20_000;
/// Length of a load measurement, in ns.
const WINDOW_NS: u64 = 1_000_000;
/// After a queue came or went, this many measurements are made before another goes.
const SETTLE: u32 = 3;

/// Queues about which commands are carried out between two rounds: frames do not wait for a peer
/// that has its rings started and stopped in a loop.
const COMMANDS_MAX: usize = 64;
/// What a kick costs a worker apart from what it finds, in ns: charged to the port.
const KICK_NS: u64 = 500;

/// Starts the thread of worker `index`, pinned to `cpu` if given.
pub fn spawn(index: usize, cpu: Option<usize>, pool: Arc<Pool>) -> std::io::Result<()> {
    let handle = Arc::clone(&pool.workers()[index]);
    let mine = Arc::clone(&handle);
    let thread = std::thread::Builder::new().name(format!("worker{index}")).spawn(move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!("worker {index} could not be pinned to CPU {cpu}: {error}");
            }
        }
        cost::precise_timers();
        Worker::new(mine, pool).run();
    })?;
    *lock(&handle.thread) = Some(thread);
    Ok(())
}

struct Worker {
    handle: Arc<Handle>,
    pool: Arc<Pool>,
    forwarder: Forwarder,
    queues: Vec<Queue>,
    /// Indices in `queues` of those to be served in the next round.
    hot: Vec<usize>,
    /// Indices of those that are left alone until a time that is set.
    warm: Vec<usize>,
    /// The earliest of those times, in ns.
    warm_ns: u64,
    /// Hot queues of each port.
    hot_of: Vec<u16>,
    by_token: HashMap<u64, usize>,
    watched: HashMap<u64, Watched>,
    scratch: Burst<'static>,
    events: Vec<epoll::Event>,
    /// When kicks of cold queues were last looked for.
    looked_ns: u64,
    /// Indices of the queues that are paused for a full destination.
    paused: Vec<usize>,
    /// When all full destinations were last tried, in ns.
    retried_ns: u64,
    /// When it last looked at the clock for what happens outside of rounds, in ns.
    time: u64,
    /// Whether the worker slept since the last round.
    slept: bool,
    /// All hot queues owed time in the last round: none was served.
    owing: bool,
    /// Load measurement: its start, and time spent on frames since, in ns.
    window: (u64, u64),
    /// Indices of the queues that were served in it.
    served: Vec<usize>,
    /// Load measurements to be made before a queue is given away.
    settle: u32,
    /// What is reported of it for fair shares over all workers.
    period: load::Period,
    stop: bool,
}

impl Worker {
    fn new(handle: Arc<Handle>, pool: Arc<Pool>) -> Self {
        let tid = u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        handle.stats.tid.store(tid, Ordering::Relaxed);
        let table = Arc::new(Table::new());
        let common = &pool.common;
        let fdb = Arc::clone(&common.fdb);
        Self {
            forwarder: Forwarder::new(common.mode, handle.index, fdb, table, common.flow_key),
            handle,
            pool,
            queues: Vec::new(),
            hot: Vec::new(),
            warm: Vec::new(),
            warm_ns: u64::MAX,
            hot_of: Vec::new(),
            by_token: HashMap::new(),
            watched: HashMap::new(),
            scratch: Burst::default(),
            events: Vec::with_capacity(64),
            looked_ns: 0,
            paused: Vec::new(),
            retried_ns: 0,
            slept: false,
            owing: false,
            time: 0,
            window: (0, 0),
            served: Vec::new(),
            settle: SETTLE,
            period: load::Period::default(),
            stop: false,
        }
    }

    fn now(&self) -> u64 {
        self.pool.now()
    }

    fn run(mut self) {
        let mut now = self.now();
        self.time = now;
        while !self.stop {
            if self.handle.has_commands.swap(false, Ordering::Acquire) {
                self.time = self.now();
                self.obey();
                now = self.time;
                if self.stop {
                    break;
                }
            }
            now = self.process(now);
            if now.saturating_sub(self.window.0) >= WINDOW_NS {
                self.measure(now);
            }
            if self.hot.is_empty() {
                if self.arm() {
                    self.sleep(now);
                    now = self.time;
                    self.retry_late(now);
                }
            } else if now.saturating_sub(self.looked_ns) > LOOK_NS {
                self.looked_ns = now;
                self.look(Some(0));
                self.retry_busy(now);
            }
        }
        self.forwarder.notify_late(u64::MAX, true);
    }

    fn obey(&mut self) {
        let commands = {
            let mut inbox = lock(&self.handle.commands);
            let commands = inbox.take(COMMANDS_MAX);
            if !inbox.is_empty() {
                self.handle.has_commands.store(true, Ordering::Release);
            }
            commands
        };
        for command in commands {
            match command {
                Command::Serve(served) => self.adopt(served),
                Command::Drop(token) => self.drop_queue(token),
                Command::Away(token, to) => {
                    if let Some(&at) = self.by_token.get(&token) {
                        self.give(vec![at], to);
                    }
                }
                Command::Watch(token, watched) => {
                    if let Some(kick) = &watched.kick {
                        self.listen(watched.port.id, kick, token);
                    }
                    self.watched.insert(token, watched);
                }
                Command::Kicked(token) => self.kicked(token),
                Command::Look(token) => self.look_at(token),
                Command::Retry => self.retry(false, self.time),
                Command::Table(table) => {
                    self.hot_of.resize(table.len().max(self.hot_of.len()), 0);
                    self.forwarder.set_table(table);
                }
                Command::Stop => self.stop = true,
            }
        }
        self.handle.stats.queues.store(self.queues.len() as u32, Ordering::Relaxed);
    }

    // ---- the set of queues ----

    /// Waits for a kick from now on. Without it the queue is still served while it is hot.
    fn listen(&self, port: PortId, kick: &KickFd, token: u64) {
        if let Err(error) = self.handle.add(kick.as_fd(), token) {
            self.pool.report(Report::Deaf(port, error));
        }
    }

    fn adopt(&mut self, served: Served) {
        let now = self.now();
        if let Some(kick) = &served.kick {
            self.listen(served.source.port, kick, served.token);
        }
        let port = usize::from(served.source.port.0);
        self.hot_of.resize(self.hot_of.len().max(port + 1), 0);
        self.by_token.insert(served.token, self.queues.len());
        self.queues.push(Queue::new(served, self.pool.common.costs, now));
        self.settle = SETTLE;
        // The peer may have made frames available before anyone listened.
        self.heat(self.queues.len() - 1);
    }

    /// Takes a queue out of the worker's hands; [`list_again`](Self::list_again) is to follow.
    fn take_out(&mut self, at: usize) -> Served {
        let queue = self.queues.swap_remove(at);
        self.by_token.remove(&queue.served.token);
        if let Some(moved) = self.queues.get(at) {
            self.by_token.insert(moved.served.token, at);
        }
        if let Some(kick) = &queue.served.kick {
            let _ = epoll::delete(&self.handle.epoll, kick.as_fd());
        }
        queue.served
    }

    /// Queues have other indices than before: makes every list of them anew.
    fn list_again(&mut self) {
        for list in [&mut self.hot, &mut self.warm, &mut self.paused, &mut self.served] {
            list.clear();
        }
        self.hot_of.fill(0);
        for (i, queue) in self.queues.iter().enumerate() {
            if queue.listed {
                self.hot.push(i);
                self.hot_of[usize::from(queue.served.source.port.0)] += 1;
            } else if queue.state == State::Warm {
                self.warm.push(i);
            }
            if queue.paused {
                self.paused.push(i);
            }
            if queue.busy_ns > 0 {
                self.served.push(i);
            }
        }
    }

    fn drop_queue(&mut self, token: u64) {
        if let Some(&at) = self.by_token.get(&token) {
            let served = self.take_out(at);
            self.list_again();
            served.stopped();
        } else if let Some(Watched { kick: Some(kick), .. }) = self.watched.remove(&token) {
            let _ = epoll::delete(&self.handle.epoll, kick.as_fd());
        }
    }

    /// Puts a queue among those to be served.
    fn list(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        if !queue.listed {
            queue.listed = true;
            self.hot.push(at);
            self.hot_of[usize::from(queue.served.source.port.0)] += 1;
        }
    }

    /// Makes a queue hot: it was kicked, or may have work for another reason. Only a kick says when
    /// a frame came; policies learn from nothing else.
    fn heat(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        if queue.state == State::Cold && queue.poller.disarms() {
            lock(&queue.served.ingress).disarm();
        }
        if queue.state == State::Warm {
            self.warm.retain(|i| *i != at);
        }
        queue.set_state(State::Hot);
        self.list(at);
        self.listen_again(at);
    }

    /// A queue that is being drained need not be heard: however often its guest kicks, it wakes no
    /// one.
    fn hush(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        if let Some(kick) = queue.served.kick.as_ref().filter(|_| !queue.hushed) {
            let _ = epoll::delete(&self.handle.epoll, kick.as_fd());
            queue.hushed = true;
        }
    }

    /// Ends [`hush`](Self::hush) of a queue that frames are taken from again.
    fn listen_again(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        let Served { source, kick, token, .. } = &queue.served;
        if queue.hushed && source.tuning.drain() == Drain::Off {
            queue.hushed = false;
            let (port, token, kick) = (source.port, *token, kick.clone());
            kick.iter().for_each(|kick| self.listen(port, kick, token));
        }
    }

    fn kicked(&mut self, token: u64) {
        if let Some(&at) = self.by_token.get(&token) {
            let queue = &mut self.queues[at];
            queue.share.charge(KICK_NS);
            queue.kicked = true;
            let stats = &queue.served.source.stats;
            stats.kicks.add(1);
            stats.wakes.add(u64::from(queue.state == State::Cold));
            if queue.served.source.tuning.drain() != Drain::Done {
                queue.woke_ns = (queue.state == State::Cold).then_some(self.time);
                queue.poller.wake(self.time);
            }
            self.look_at(token);
        } else if let Some(Watched { port, queue, .. }) = self.watched.get(&token) {
            let egress = &port.egress[usize::from(*queue)];
            egress.stats.kicks.add(1);
            if let Some(&at) = self.by_token.get(&pool::token(port.id, *queue, false)) {
                self.queues[at].share.charge_aside(KICK_NS);
            }
            // Without the event index the guest would kick for each buffer from now on.
            lock(&egress.queue).disarm();
            if egress.recovers() {
                self.pool.report(Report::Starved(port.id, *queue, false));
            }
            let waiters = egress.waiters.swap(0, Ordering::AcqRel);
            self.wake(waiters);
        }
    }

    /// Looks at a queue: it was kicked, or an operator changed something about it.
    fn look_at(&mut self, token: u64) {
        let Some(&at) = self.by_token.get(&token) else { return };
        let drain = self.queues[at].served.source.tuning.drain();
        if drain != Drain::Off {
            self.hush(at);
        }
        if drain != Drain::Done {
            self.heat(at);
        }
    }

    /// Wakes workers that wait for a destination, which may have room.
    fn wake(&mut self, workers: u64) {
        let mine = 1 << self.handle.index;
        if workers & mine != 0 {
            self.retry(false, self.time);
        }
        if workers & !mine != 0 {
            self.pool.wake(workers & !mine);
        }
    }

    /// A destination may have room: delivers what is held for it, and goes on with the queues that
    /// are paused for it. `all`: for every destination.
    fn retry(&mut self, all: bool, now: u64) {
        self.send_held(all, now);
        for i in 0..self.paused.len() {
            let at = self.paused[i];
            if all || self.forwarder.may_go_on(&self.queues[at].served.source) {
                self.heat(at);
            }
        }
    }

    /// Delivers what is held for destinations that may have room, and charges the time to them:
    /// they were full.
    fn send_held(&mut self, all: bool, now: u64) {
        if !self.forwarder.is_blocked() {
            return;
        }
        let mut began = self.pool.now();
        self.forwarder.retry_each(all, now, |(port, queue), egress| {
            let end = self.pool.now();
            let took = end.saturating_sub(std::mem::replace(&mut began, end));
            egress.stats.served_ns.add(took);
            self.window.1 += took;
            if let Some(&at) = self.by_token.get(&pool::token(port, queue, false)) {
                self.queues[at].share.charge_aside(took);
            }
        });
    }

    // ---- phase 1 ----

    /// All hot queues owe time, perhaps hundreds of rounds: goes to that in which one is served.
    #[cold]
    fn skip_rounds(&mut self) {
        let terms = |queue: &Queue, hot_of: &[u16]| {
            let source = &queue.served.source;
            let port = usize::from(source.port.0);
            (source.tuning.weight(), usize::from(hot_of[port]) + self.period.elsewhere(port))
        };
        let hot = self.hot.iter().map(|at| &self.queues[*at]);
        let waits = hot.map(|queue| {
            let (weight, queues) = terms(queue, &self.hot_of);
            queue.share.waits(weight, queues)
        });
        let rounds = waits.min().unwrap_or(0);
        for at in &self.hot {
            let queue = &mut self.queues[*at];
            let (weight, queues) = terms(queue, &self.hot_of);
            queue.share.skip(rounds, weight, queues);
        }
    }

    /// Serves each hot queue while it has credit; queues whose policy says so go warm or cold.
    /// Returns the time after.
    fn process(&mut self, start: u64) -> u64 {
        self.handle.stats.rounds.fetch_add(1, Ordering::Relaxed);
        if !self.warm.is_empty() {
            self.end_naps(start);
        }
        let mut now = start;
        let alone = self.hot.len() == 1;
        if self.owing {
            self.skip_rounds();
        }
        let (mut served, mut found) = (false, false);
        let mut i = 0;
        while i < self.hot.len() {
            let at = self.hot[i];
            let queue = &mut self.queues[at];
            let port = usize::from(queue.served.source.port.0);
            if alone {
                queue.share.forgive();
            }
            let weight = queue.served.source.tuning.weight();
            let queues = usize::from(self.hot_of[port]) + self.period.elsewhere(port);
            queue.share.grant(weight, queues);
            let mut stays = true;
            while stays && queue.share.may() {
                served = true;
                let paused = queue.paused;
                let (frames, action) =
                    queue.serve(&mut self.forwarder, &mut self.scratch, &self.pool, now);
                if paused != queue.paused {
                    match self.paused.iter().position(|i| *i == at) {
                        Some(i) => _ = self.paused.remove(i),
                        None => self.paused.push(at),
                    }
                }
                let end = self.pool.now();
                let took = end.saturating_sub(now);
                now = end;
                queue.served.source.stats.served_ns.add(took);
                queue.looked(frames, end);
                queue.backlog.looked(frames > 0 && action == Action::Poll, end);
                found |= frames > 0;
                // A peer that cannot notify, did so in vain, or had an address announced, pays for
                // a poll that finds nothing.
                let kicked = std::mem::take(&mut queue.kicked);
                let announced = std::mem::take(&mut queue.announced);
                if frames == 0 && (kicked || announced || !queue.served.notifies) {
                    queue.share.charge(took);
                }
                queue.pace.record(frames, took, end);
                if frames > 0 && took > 0 {
                    if queue.busy_ns == 0 {
                        self.served.push(at);
                    }
                    self.window.1 += took;
                    queue.busy_ns += took;
                    queue.share.charge(took);
                }
                match action {
                    Action::Poll => {
                        queue.set_state(State::Hot);
                        if frames == 0 {
                            break;
                        }
                    }
                    Action::Until(at_ns) => {
                        queue.nap = (now, at_ns);
                        queue.set_state(State::Warm);
                        stays = false;
                    }
                    Action::Arm => {
                        queue.set_state(State::Cold);
                        stays = false;
                    }
                }
                if alone {
                    // Kicks and commands are looked for between bursts.
                    break;
                }
            }
            if stays {
                i += 1;
                continue;
            }
            queue.listed = false;
            let stats = &queue.served.source.stats;
            if queue.state == State::Warm {
                stats.naps.add(1);
                self.warm_ns = self.warm_ns.min(queue.nap.1);
                self.warm.push(at);
            } else {
                stats.sleeps.add(1);
            }
            self.hot_of[port] -= 1;
            self.hot.swap_remove(i);
        }
        (self.time, self.owing) = (now, !served);
        let woken = std::mem::take(&mut self.forwarder.woken);
        if woken != 0 {
            self.wake(woken);
        }
        self.forwarder.notify_late(now, !found || self.hot.is_empty());
        for (port, epoch, fault) in self.forwarder.faults.drain(..) {
            self.pool.report(Report::Fault(port, epoch, fault));
        }
        for (port, queue, begins) in self.forwarder.starved.drain(..) {
            self.pool.report(Report::Starved(port, queue, begins));
        }
        now
    }

    /// Lists the warm queues whose time has come. After a sleep, `adaptive` ones whose time has
    /// half come too: queues that nap are looked at together, so that they share their wake-ups.
    fn end_naps(&mut self, now: u64) {
        let slept = std::mem::take(&mut self.slept);
        if now < self.warm_ns && !slept {
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
            if now >= due {
                self.warm.swap_remove(i);
                self.list(at);
            } else {
                self.warm_ns = self.warm_ns.min(until);
                i += 1;
            }
        }
    }

    // ---- phase 2 ----

    /// The re-check before sleep. Queues were armed one by one as they went cold, warm ones have a
    /// time; what is left are full destinations, and commands.
    fn arm(&mut self) -> bool {
        if self.handle.has_commands.load(Ordering::Acquire) {
            return false;
        }
        if !self.forwarder.arm_blocked() {
            self.retry(false, self.time);
            return false;
        }
        true
    }

    /// A busy worker never sleeps: who waits for a full destination would wait until it did.
    fn retry_busy(&mut self, now: u64) {
        if !self.forwarder.is_blocked() {
            self.retried_ns = now;
        } else if now.saturating_sub(self.retried_ns) > RETRY_NS {
            self.retried_ns = now;
            self.retry(true, now);
        } else if !self.forwarder.arm_blocked() {
            self.retry(false, now);
        }
    }

    /// After a sleep: tries all full destinations if it is time to, whatever ended the sleep.
    fn retry_late(&mut self, now: u64) {
        if self.forwarder.is_blocked() && now.saturating_sub(self.retried_ns) >= RETRY_NS {
            self.retried_ns = now;
            self.retry(true, now);
        }
    }

    // ---- phase 3 ----

    /// Goes to sleep, and nothing else does: until a kick, a command, or the earliest of the times
    /// when a warm queue is to be polled, a peer to be notified, and full destinations to be tried.
    fn sleep(&mut self, now: u64) {
        let held = self.forwarder.is_blocked().then_some(RETRY_NS);
        let warm = (!self.warm.is_empty()).then(|| self.warm_ns.saturating_sub(now));
        let late = self.forwarder.late().map(|at| at.saturating_sub(now));
        let timeout_ns = [held, warm, late].into_iter().flatten().min();
        if timeout_ns == Some(0) {
            self.look(timeout_ns);
            return;
        }
        // However long a nap: it is a part of serving what is warm, and its worker as loaded as
        // when that was last measured.
        let naps = warm.or(late).is_some();
        let stats = &self.handle.stats;
        if naps { &stats.naps } else { &stats.sleeps }.fetch_add(1, Ordering::Relaxed);
        stats.asleep.store(!naps, Ordering::Relaxed);
        self.look(timeout_ns);
        self.handle.stats.asleep.store(false, Ordering::Relaxed);
        self.slept = true;
    }

    /// Takes what kicks there are; with a time-out other than 0, waits for one.
    fn look(&mut self, timeout_ns: Option<u64>) {
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        self.events.clear();
        let looked = epoll::wait(
            &self.handle.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            timeout.as_ref(),
        );
        // Once for all that was kicked: where the clock is a system call, each counts.
        if timeout_ns != Some(0) || !self.events.is_empty() {
            self.time = self.pool.now();
        }
        if looked.is_err() {
            return;
        }
        let events = std::mem::take(&mut self.events);
        for event in &events {
            let token = event.data.u64();
            if token != WAKE {
                self.kicked(token);
            }
        }
        self.events = events;
    }
}

#[cfg(test)]
mod tests;
