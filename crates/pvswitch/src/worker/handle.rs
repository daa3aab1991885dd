//! A worker as seen by other threads: its commands, its reports and its counters.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use os::Epoll;
use shm::sync::{Lock, Mutex};
use switch::fdb::PortId;
use switch::forward::{Port, PortEvent, Source, Table};
use switch::handover::{Gate, Mailbox};
use switch::port::{Ingress, QueueId};
use switch::schedule;
use switch::tenant::Tenants;
use vhost_user::device::KickFd;

/// Epoll token of a worker's own wake-up descriptor.
pub(super) const WAKE: u64 = u64::MAX;

/// A queue to serve.
pub struct Served {
    /// Identifies the queue; unique in the process.
    pub token: u64,
    /// Origin of its frames.
    pub source: Source,
    /// The queue.
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// Becomes readable when the peer kicks.
    pub kick: Option<KickFd>,
    /// Whether the peer can kick, by `kick` or otherwise. If not, the queue is always polled.
    pub notifies: bool,
}

/// Command to a worker, carried out between two rounds.
pub(super) enum Command {
    /// About a queue or the table.
    Queue(schedule::Command<Begin, Arc<Table>>),
    /// Retries held frames: their destination has room.
    Retry,
    /// Replaces the rules of ports.
    Tenants(Option<Arc<Tenants>>),
    /// Delivers frames that another process held for an egress queue.
    Held(QueueId),
    /// Waits at a gate.
    Freeze(Arc<Gate>),
    Stop,
}

/// A queue that a worker begins to serve, or an egress queue, with its token, whose peer kicks when
/// it has posted buffers.
pub(super) enum Begin {
    Serve(Placed),
    Watch(u64, Watched),
}

pub(super) struct Watched {
    pub port: Arc<Port>,
    pub queue: u16,
    /// `None`: the peer kicks by other means.
    pub kick: Option<KickFd>,
}

/// Pending commands of a worker.
#[derive(Default)]
pub(super) struct Commands {
    queues: schedule::Commands<Begin, Arc<Table>>,
    retry: bool,
    stop: bool,
    held: Vec<QueueId>,
    gate: Option<Arc<Gate>>,
    /// The latest rules of ports. Taken before all other commands: a queue is never served under
    /// older rules than those published before it was given to this worker.
    tenants: Option<Option<Arc<Tenants>>>,
}

impl Commands {
    fn drop_queue(&mut self, token: u64) {
        if let Some(Begin::Serve(served)) = self.queues.drop_queue(token) {
            served.mark_stopped();
        }
    }

    /// Takes the next commands, in order: those of at most `queues` queues.
    pub(super) fn take(&mut self, queues: usize) -> Vec<Command> {
        let mut commands = Vec::from_iter(self.tenants.take().map(Command::Tenants));
        commands.extend(self.queues.take(queues).into_iter().map(Command::Queue));
        if self.queues.is_empty() {
            // Their ports are in the table by now.
            let held = std::mem::take(&mut self.held).into_iter();
            commands.extend(held.map(Command::Held));
        }
        commands.extend(self.gate.take().map(Command::Freeze));
        commands.extend(std::mem::take(&mut self.retry).then_some(Command::Retry));
        commands.extend(std::mem::take(&mut self.stop).then_some(Command::Stop));
        commands
    }

    /// Whether no commands of queues or tables are pending.
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.held.is_empty()
    }
}

/// A served queue's descriptors and ring, as its worker's scheduler keeps them.
pub struct Io {
    pub(super) ingress: Arc<Mutex<dyn Ingress>>,
    pub(super) kick: Option<KickFd>,
    /// [`Assignment::generation`](schedule::Assignment::generation).
    pub generation: u64,
}

/// A queue that is assigned to a worker.
pub type Placed = schedule::Served<Io>;

impl Served {
    /// The same with an assignment of this [generation](schedule::Assignment::generation).
    pub fn placed(self, generation: u64) -> Placed {
        let Self { token, source, ingress, kick, notifies } = self;
        Placed { token, source, notifies, of: Io { ingress, kick, generation } }
    }
}

/// Report of a worker to the control thread.
pub enum Report {
    /// An event of a port that forwarding found.
    Port(PortEvent),
    /// Kicks of a queue cannot be waited for: its descriptor failed.
    KickFdFailed(PortId, std::io::Error),
}

/// Counters of a worker.
#[derive(Default)]
pub struct WorkerStats {
    /// Rounds over the hot queues.
    pub rounds: AtomicU64,
    /// Sleeps until woken or until held frames are retried.
    pub sleeps: AtomicU64,
    /// Sleeps until a set time.
    pub naps: AtomicU64,
    /// Times it asked the kernel for kicks, asleep or not: system calls.
    pub epoll_waits: AtomicU64,
    /// Queues given to other workers.
    pub moves: AtomicU64,
    /// Times it waited for a queue that the control thread had locked.
    pub contended: AtomicU64,
    /// Queues that it serves.
    pub queues: AtomicU32,
    /// Share of its time spent on frames when last measured, in thousandths.
    pub load: AtomicU32,
    /// Whether it sleeps without a set time for its next poll.
    pub asleep: AtomicBool,
    /// Thread id, for its CPU time.
    pub tid: AtomicU64,
}

/// Handle to a worker thread; outlives it. No other worker's is in one of its pairs of cache lines.
#[repr(align(128))]
pub struct Handle {
    pub(super) index: u8,
    pub(super) epoll: Epoll,
    pub(super) wake: OwnedFd,
    pub(super) mailbox: Mailbox<Commands>,
    /// Its counters.
    pub stats: WorkerStats,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Creates the handle of worker number `index`, which does not run yet.
    pub fn new(index: u8) -> std::io::Result<Self> {
        let (epoll, wake) = (Epoll::new()?, os::eventfd()?);
        let handle = Self {
            index,
            epoll,
            wake,
            mailbox: Mailbox::default(),
            stats: WorkerStats::default(),
            thread: Mutex::new(Lock::WorkerThread, None),
        };
        handle.add(handle.wake.as_fd(), WAKE)?;
        // epoll_pwait2: naps are shorter than a millisecond. A kernel before Linux 5.11 fails here,
        // at start.
        handle.epoll.wait(Some(Duration::ZERO))?;
        Ok(handle)
    }

    fn send(&self, add: impl FnOnce(&mut Commands)) {
        self.mailbox.add(add, || os::signal(self.wake.as_fd()));
    }

    /// Starts serving a queue.
    pub fn serve(&self, served: Placed) {
        served.source.tuning.set_worker(self.index);
        self.send(|pending| drop(pending.queues.begin(served.token, Begin::Serve(served))));
    }

    /// Edge-triggered: kicks are not read, so each costs only the wake-up. Called by the worker
    /// alone, in the order of its commands: a queue that is dropped and served again often has the
    /// same descriptor, which must not be removed after it was added.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> std::io::Result<()> {
        self.epoll.add_edge(fd, token)
    }

    /// Stops serving or watching a queue. It may be served for one more round.
    pub fn drop_queue(&self, token: u64) {
        self.send(|pending| pending.drop_queue(token));
    }

    /// Has a queue given to another worker.
    pub fn give_away(&self, token: u64, to: usize) {
        self.send(|pending| pending.queues.give_away(token, to));
    }

    /// Watches an egress queue for kicks of its peer.
    pub fn watch(&self, token: u64, port: Arc<Port>, queue: u16, kick: Option<KickFd>) {
        let begin = Begin::Watch(token, Watched { port, queue, kick });
        self.send(|pending| drop(pending.queues.begin(token, begin)));
    }

    /// Delivers a kick that did not arrive by the queue's descriptor.
    pub fn kick(&self, token: u64) {
        self.send(|pending| pending.queues.kick(token));
    }

    /// Has a queue polled after a change of its settings, even if its policy is waiting.
    pub fn poll(&self, token: u64) {
        self.send(|pending| pending.queues.poll(token));
    }

    /// Has held frames retried: a destination has room.
    pub fn retry(&self) {
        self.send(|pending| pending.retry = true);
    }

    /// Replaces the port table.
    pub fn set_table(&self, table: Arc<Table>) {
        self.send(|pending| pending.queues.set_table(table));
    }

    /// Replaces the rules of ports.
    pub fn set_tenants(&self, tenants: Option<Arc<Tenants>>) {
        self.send(|pending| pending.tenants = Some(tenants));
    }

    /// Has it deliver frames that another process held for an egress queue.
    pub fn deliver_held(&self, at: QueueId) {
        self.send(|pending| pending.held.push(at));
    }

    /// Has it wait at a gate after its round.
    pub fn freeze(&self, gate: Arc<Gate>) {
        self.send(|pending| pending.gate = Some(gate));
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.send(|pending| pending.stop = true);
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }

    /// Load, in thousandths; 0 while it sleeps, except for naps.
    pub fn load(&self) -> u32 {
        if self.stats.asleep.load(Ordering::Relaxed) {
            return 0;
        }
        self.stats.load.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
