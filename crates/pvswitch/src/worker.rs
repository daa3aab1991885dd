//! Worker threads: each serves some ingress queues, and sleeps when all are cold.
//!
//! One round is three phases, one function each: [`Worker::process`] polls the hot queues,
//! [`Worker::arm`] re-checks before sleep, [`Worker::wait`] sleeps. Queues become hot by a kick
//! (an edge on their descriptor in the worker's epoll set, never read) and cold by their policy.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use switch::fdb::{Fdb, PortId};
use switch::forward::{Forwarder, HOLD_NS_MAX, Mode, Port, Source, Table};
use switch::frame::{BURST_MAX, Burst};
use switch::poll::{Action, Policy, Poller};
use switch::port::{Fault, Ingress};

/// How often a busy worker looks for kicks of cold queues, in ns.
const LOOK_NS: u64 = 20_000;
/// Epoll token of a worker's own wake-up descriptor.
const WAKE: u64 = u64::MAX;

/// A queue to serve.
pub struct Served {
    /// Names the queue; unique among all queues of the program.
    pub token: u64,
    /// Where its frames come from.
    pub source: Source,
    /// The queue.
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// Whether the peer can notify. If not, the queue is always polled.
    pub notifies: bool,
}

/// What a worker is asked to do between two rounds.
enum Command {
    Serve(Served),
    Drop(u64),
    /// An egress queue whose peer kicks when it makes room.
    Watch(u64, Arc<Port>, u16),
    Unwatch(u64),
    Kicked(u64),
    Table(Arc<Table>),
    Stop,
}

/// Something a worker tells the control thread.
pub enum Report {
    /// A peer broke its protocol; its port is to be stopped.
    Fault(PortId, Fault),
}

/// What a worker did, for people.
#[derive(Default)]
pub struct WorkerStats {
    /// Rounds over the hot queues.
    pub rounds: AtomicU64,
    /// Times it slept.
    pub sleeps: AtomicU64,
    /// Thread id, for its CPU time.
    pub tid: AtomicU64,
}

/// Handle to a worker thread; outlives it.
pub struct Handle {
    index: u8,
    epoll: OwnedFd,
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
    has_commands: AtomicBool,
    /// Its counters.
    pub stats: WorkerStats,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    fn send(&self, command: Command) {
        lock(&self.commands).push(command);
        self.has_commands.store(true, Ordering::Release);
        self.poke();
    }

    /// Wakes the worker.
    pub fn poke(&self) {
        // A full counter means a wake-up is pending already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Starts serving a queue; `kick` notifies of it.
    pub fn serve(&self, served: Served, kick: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
        let token = served.token;
        self.send(Command::Serve(served));
        // Added after the command is queued: a kick in between finds the queue in the table.
        kick.map_or(Ok(()), |kick| self.add(kick, token))
    }

    /// Edge-triggered: a kick need not be read, so it costs the wake-up and no more.
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> std::io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Stops serving a queue. It may be served for the length of one round more.
    pub fn drop_queue(&self, token: u64, kick: Option<BorrowedFd<'_>>) {
        if let Some(kick) = kick {
            let _ = epoll::delete(&self.epoll, kick);
        }
        self.send(Command::Drop(token));
    }

    /// Watches an egress queue for its peer's kick: it made room.
    pub fn watch(
        &self,
        token: u64,
        port: Arc<Port>,
        queue: u16,
        kick: BorrowedFd<'_>,
    ) -> std::io::Result<()> {
        self.send(Command::Watch(token, port, queue));
        self.add(kick, token)
    }

    /// Undoes [`watch`](Self::watch).
    pub fn unwatch(&self, token: u64, kick: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, kick);
        self.send(Command::Unwatch(token));
    }

    /// A queue was kicked by other means than its descriptor.
    pub fn kicked(&self, token: u64) {
        self.send(Command::Kicked(token));
    }

    /// Replaces the port table.
    pub fn set_table(&self, table: Arc<Table>) {
        self.send(Command::Table(table));
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.send(Command::Stop);
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

/// What all workers share.
#[derive(Clone)]
pub struct Shared {
    /// Learned addresses.
    pub fdb: Arc<Fdb>,
    /// Forwarding mode.
    pub mode: Mode,
    /// Default policy of queues.
    pub policy: Policy,
    /// Key of the flow hash.
    pub flow_key: u64,
    /// Where reports go.
    pub reports: Sender<Report>,
    /// Wakes whoever reads them.
    pub reports_wake: Arc<OwnedFd>,
    /// Zero of the time that policies see.
    pub epoch: Instant,
    /// All workers, to wake those that wait for room.
    pub peers: Arc<Mutex<Vec<Arc<Handle>>>>,
}

/// Starts worker `index`, pinned to `cpu` if given.
pub fn spawn(index: u8, cpu: Option<usize>, shared: Shared) -> std::io::Result<Arc<Handle>> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), flags)?;
    let handle = Arc::new(Handle {
        index,
        epoll,
        wake,
        commands: Mutex::new(Vec::new()),
        has_commands: AtomicBool::new(false),
        stats: WorkerStats::default(),
        thread: Mutex::new(None),
    });
    lock(&shared.peers).push(Arc::clone(&handle));
    let mine = Arc::clone(&handle);
    let thread = std::thread::Builder::new().name(format!("worker{index}")).spawn(move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!("worker {index} could not be pinned to CPU {cpu}: {error}");
            }
        }
        Worker::new(mine, shared).run();
    })?;
    *lock(&handle.thread) = Some(thread);
    Ok(handle)
}

/// A served queue and its state.
struct Queue {
    served: Served,
    poller: Poller,
    hot: bool,
    /// Frames held when last polled.
    held: usize,
}

struct Worker {
    handle: Arc<Handle>,
    shared: Shared,
    forwarder: Forwarder,
    queues: Vec<Queue>,
    /// Indices in `queues` of the hot ones.
    hot: Vec<usize>,
    by_token: HashMap<u64, usize>,
    watched: HashMap<u64, (Arc<Port>, u16)>,
    scratch: Burst<'static>,
    events: Vec<epoll::Event>,
    /// When kicks of cold queues were last looked for.
    looked_ns: u64,
    stop: bool,
}

impl Worker {
    fn new(handle: Arc<Handle>, shared: Shared) -> Self {
        let tid = u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        handle.stats.tid.store(tid, Ordering::Relaxed);
        let table = Arc::new(Table::new());
        let (mode, key) = (shared.mode, shared.flow_key);
        let fdb = Arc::clone(&shared.fdb);
        Self {
            forwarder: Forwarder::new(mode, handle.index, fdb, table, key),
            handle,
            shared,
            queues: Vec::new(),
            hot: Vec::new(),
            by_token: HashMap::new(),
            watched: HashMap::new(),
            scratch: Burst::default(),
            events: Vec::with_capacity(64),
            looked_ns: 0,
            stop: false,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.shared.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn run(mut self) {
        while !self.stop {
            if self.handle.has_commands.swap(false, Ordering::Acquire) {
                self.obey();
                // What was asked may be to stop, or may have made queues hot.
                continue;
            }
            let now = self.now();
            self.process(now);
            if self.hot.is_empty() {
                if self.arm() {
                    self.wait(self.timeout());
                }
            } else if now.saturating_sub(self.looked_ns) > LOOK_NS {
                self.looked_ns = now;
                self.wait(Some(0));
            }
        }
    }

    fn obey(&mut self) {
        let commands = std::mem::take(&mut *lock(&self.handle.commands));
        for command in commands {
            match command {
                Command::Serve(served) => {
                    let policy = if served.notifies { self.shared.policy } else { Policy::Spin };
                    let poller = Poller::new(policy, self.now());
                    self.by_token.insert(served.token, self.queues.len());
                    self.queues.push(Queue { served, poller, hot: false, held: 0 });
                    // The peer may have made frames available before anyone listened.
                    self.heat(self.queues.len() - 1);
                }
                Command::Drop(token) => self.forget(token),
                Command::Watch(token, port, queue) => {
                    self.watched.insert(token, (port, queue));
                }
                Command::Unwatch(token) => {
                    self.watched.remove(&token);
                }
                Command::Kicked(token) => self.kicked(token),
                Command::Table(table) => self.forwarder.set_table(table),
                Command::Stop => self.stop = true,
            }
        }
    }

    fn forget(&mut self, token: u64) {
        let Some(at) = self.by_token.remove(&token) else { return };
        self.queues.swap_remove(at);
        if let Some(moved) = self.queues.get(at) {
            self.by_token.insert(moved.served.token, at);
        }
        self.hot.clear();
        self.hot.extend(self.queues.iter().enumerate().filter(|(_, q)| q.hot).map(|(i, _)| i));
    }

    /// Puts a queue into the poll set.
    fn heat(&mut self, at: usize) {
        let now = self.now();
        let queue = &mut self.queues[at];
        queue.poller.wake(now);
        if !queue.hot {
            queue.hot = true;
            lock(&queue.served.ingress).disarm();
            self.hot.push(at);
        }
    }

    fn kicked(&mut self, token: u64) {
        if let Some(&at) = self.by_token.get(&token) {
            self.queues[at].served.source.stats.kicks.add(1);
            self.heat(at);
        } else if let Some((port, queue)) = self.watched.get(&token) {
            let egress = &port.egress[usize::from(*queue)];
            egress.stats.kicks.add(1);
            // Without the event index the guest would kick for each buffer from now on.
            lock(&egress.queue).disarm();
            let waiters = egress.waiters.swap(0, Ordering::AcqRel);
            self.wake(waiters);
        } else if token == RETRY {
            self.retry();
        }
    }

    /// Tells workers that a destination they hold frames for may have room.
    fn wake(&mut self, workers: u64) {
        if workers & 1 << self.handle.index != 0 {
            self.retry();
        }
        for peer in lock(&self.shared.peers).iter() {
            if peer.index != self.handle.index && workers & 1 << peer.index != 0 {
                peer.kicked(RETRY);
            }
        }
    }

    /// A destination made room: queues with held frames try again.
    fn retry(&mut self) {
        for at in 0..self.queues.len() {
            if self.queues[at].held > 0 {
                self.heat(at);
            }
        }
    }

    /// Phase 1: one burst from each hot queue; queues whose policy says so go cold.
    fn process(&mut self, now: u64) {
        self.handle.stats.rounds.fetch_add(1, Ordering::Relaxed);
        let mut i = 0;
        while i < self.hot.len() {
            let queue = &mut self.queues[self.hot[i]];
            if Self::serve(queue, &mut self.forwarder, &mut self.scratch, &self.shared, now) {
                i += 1;
            } else {
                queue.hot = false;
                self.hot.swap_remove(i);
            }
        }
        let woken = std::mem::take(&mut self.forwarder.woken);
        if woken != 0 {
            self.wake(woken);
        }
        for (port, fault) in self.forwarder.faults.drain(..) {
            report(&self.shared, port, fault);
        }
    }

    /// One burst; returns whether the queue stays hot.
    #[inline]
    fn serve(
        queue: &mut Queue,
        forwarder: &mut Forwarder,
        scratch: &mut Burst<'static>,
        shared: &Shared,
        now: u64,
    ) -> bool {
        let Served { source, ingress, .. } = &queue.served;
        let mut ingress = lock(ingress);
        forwarder.direct(source, &mut *ingress, now);
        let got = ingress.burst(BURST_MAX, now, scratch, &mut |burst| {
            forwarder.forward(source, burst, now);
        });
        let held = ingress.held();
        queue.held = held;
        let frames = match got {
            Ok(n) => n,
            Err(fault) => {
                report(shared, source.port, fault);
                return false;
            }
        };
        // Held frames alone are no reason to poll: the destination tells when it has room.
        let news = frames.saturating_sub(held);
        if frames == 0 {
            source.stats.polls_empty.add(1);
        }
        match queue.poller.next(news, now) {
            Action::Spin => true,
            Action::ArmAndSleep => !ingress.arm(),
        }
    }

    /// Phase 2: the last look before sleep. Queues were armed one by one as they went cold; what
    /// is left are the destinations of held frames, and commands.
    fn arm(&mut self) -> bool {
        if self.handle.has_commands.load(Ordering::Acquire) {
            return false;
        }
        if !self.forwarder.arm_blocked() {
            self.retry();
            return false;
        }
        true
    }

    /// How long to sleep at most, in ns: for ever, or until held frames must be given up.
    fn timeout(&self) -> Option<u64> {
        self.queues.iter().any(|q| q.held > 0).then_some(HOLD_NS_MAX / 4)
    }

    /// Phase 3: sleeps until a kick, a command or the time-out; 0 only looks.
    fn wait(&mut self, timeout_ns: Option<u64>) {
        let timeout = timeout_ns.map(|ns| Timespec { tv_sec: 0, tv_nsec: ns as i64 });
        self.events.clear();
        let looked = epoll::wait(
            &self.handle.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            timeout.as_ref(),
        );
        if timeout_ns != Some(0) {
            self.handle.stats.sleeps.fetch_add(1, Ordering::Relaxed);
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
        if events.is_empty() && timeout_ns.is_some_and(|ns| ns > 0) {
            self.retry();
        }
        self.events = events;
    }
}

/// Token that stands for "some destination made room".
const RETRY: u64 = u64::MAX - 1;

fn report(shared: &Shared, port: PortId, fault: Fault) {
    // The control thread is gone only when the program ends.
    let _ = shared.reports.send(Report::Fault(port, fault));
    let _ = rustix::io::write(shared.reports_wake.as_fd(), &1_u64.to_ne_bytes());
}
