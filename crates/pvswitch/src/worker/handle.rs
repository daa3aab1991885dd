//! A worker as seen by other threads: its commands, its reports and its counters.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use os::Epoll;
use switch::fdb::PortId;
use switch::forward::{Port, PortEvent, Source, Table};
use switch::port::{Ingress, QueueId};
use switch::schedule;
use switch::tenant::Tenants;
use vhost_user::device::KickFd;

use super::gate::Gate;

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
    Serve(Placed),
    Drop(u64),
    /// Gives a queue to another worker.
    GiveAway(u64, usize),
    /// Watches an egress queue whose peer kicks when it has posted buffers.
    Watch(u64, Watched),
    Kick(u64),
    /// Polls a queue whose settings were changed.
    Poll(u64),
    /// Retries held frames: their destination has room.
    Retry,
    Table(Arc<Table>),
    /// Replaces the rules of ports.
    Tenants(Option<Arc<Tenants>>),
    /// Delivers frames that another process held for an egress queue.
    Held(QueueId),
    /// Waits at a gate.
    Freeze(Arc<Gate>),
    Stop,
}

pub(super) struct Watched {
    pub port: Arc<Port>,
    pub queue: u16,
    /// `None`: the peer kicks by other means.
    pub kick: Option<KickFd>,
}

/// Pending commands of one queue. Later commands replace earlier ones, so a peer that starts and
/// stops its queues in a loop neither lengthens the list nor keeps more descriptors in it than
/// those of its queues.
#[derive(Default)]
pub(super) struct QueueCommands {
    drop: bool,
    begin: Option<Command>,
    away: Option<usize>,
    poll: bool,
    kick: bool,
}

/// Pending commands of a worker.
#[derive(Default)]
pub(super) struct Commands {
    order: VecDeque<Next>,
    of: HashMap<u64, QueueCommands>,
    retry: bool,
    stop: bool,
    held: Vec<QueueId>,
    gate: Option<Arc<Gate>>,
    /// The latest table, and its number.
    table: Option<Arc<Table>>,
    tables: u64,
    /// The latest rules of ports. Taken before all other commands: a queue is never served under
    /// older rules than those published before it was given to this worker.
    tenants: Option<Option<Arc<Tenants>>>,
}

enum Next {
    Token(u64),
    Table(u64),
}

impl Commands {
    fn push(&mut self, command: Command) {
        let token = match &command {
            Command::Serve(served) => served.token,
            Command::Watch(token, _)
            | Command::Drop(token)
            | Command::GiveAway(token, _)
            | Command::Kick(token)
            | Command::Poll(token) => *token,
            Command::Retry => return self.retry = true,
            Command::Stop => return self.stop = true,
            Command::Held(at) => return self.held.push(*at),
            Command::Freeze(gate) => return self.gate = Some(Arc::clone(gate)),
            Command::Table(_) => {
                let Command::Table(table) = command else { return };
                self.table = Some(table);
                self.tables += 1;
                return self.order.push_back(Next::Table(self.tables));
            }
            Command::Tenants(_) => {
                let Command::Tenants(tenants) = command else { return };
                return self.tenants = Some(tenants);
            }
        };
        let order = &mut self.order;
        let pending = self.of.entry(token).or_insert_with(|| {
            order.push_back(Next::Token(token));
            QueueCommands::default()
        });
        match command {
            Command::Serve(_) | Command::Watch(..) => pending.begin = Some(command),
            Command::Drop(_) => {
                // It was not served yet: treat it as served and dropped.
                if let Some(Command::Serve(served)) = &pending.begin {
                    served.mark_stopped();
                }
                *pending = QueueCommands { drop: true, ..QueueCommands::default() };
            }
            Command::GiveAway(_, to) => pending.away = Some(to),
            Command::Poll(_) => pending.poll = true,
            _ => pending.kick = true,
        }
    }

    /// Takes the next commands, in order: those of at most `tokens` queues.
    pub(super) fn take(&mut self, tokens: usize) -> Vec<Command> {
        let mut commands = Vec::from_iter(self.tenants.take().map(Command::Tenants));
        for _ in 0..tokens {
            let token = match self.order.pop_front() {
                Some(Next::Token(token)) => token,
                Some(Next::Table(n)) => {
                    // Only the latest table counts.
                    let table = self.table.take_if(|_| n == self.tables);
                    commands.extend(table.map(Command::Table));
                    continue;
                }
                None => break,
            };
            let Some(pending) = self.of.remove(&token) else { continue };
            commands.extend(pending.drop.then_some(Command::Drop(token)));
            commands.extend(pending.begin);
            commands.extend(pending.away.map(|to| Command::GiveAway(token, to)));
            commands.extend(pending.poll.then_some(Command::Poll(token)));
            commands.extend(pending.kick.then_some(Command::Kick(token)));
        }
        if self.order.is_empty() {
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
        self.order.is_empty() && self.held.is_empty()
    }
}

/// A served queue's descriptors and ring, as its worker's scheduler keeps them.
pub struct Io {
    pub(super) ingress: Arc<Mutex<dyn Ingress>>,
    pub(super) kick: Option<KickFd>,
    /// [`Home::generation`](schedule::Home::generation).
    pub generation: u64,
}

/// A queue that has a home.
pub type Placed = schedule::Served<Io>;

impl Served {
    /// The same with a home of this [generation](schedule::Home::generation).
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
    /// Queues given to other workers.
    pub moves: AtomicU64,
    /// Queues that it serves.
    pub queues: AtomicU32,
    /// Share of its time spent on frames when last measured, in thousandths.
    pub load: AtomicU32,
    /// Whether it sleeps without a set time for its next poll.
    pub asleep: AtomicBool,
    /// Thread id, for its CPU time.
    pub tid: AtomicU64,
}

/// Handle to a worker thread; outlives it.
pub struct Handle {
    pub(super) index: u8,
    pub(super) epoll: Epoll,
    pub(super) wake: OwnedFd,
    pub(super) commands: Mutex<Commands>,
    pub(super) has_commands: AtomicBool,
    /// Its counters.
    pub stats: WorkerStats,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    /// Creates the handle of worker number `index`, which does not run yet.
    pub fn new(index: u8) -> std::io::Result<Self> {
        let (epoll, wake) = (Epoll::new()?, os::eventfd()?);
        let handle = Self {
            index,
            epoll,
            wake,
            commands: Mutex::default(),
            has_commands: AtomicBool::new(false),
            stats: WorkerStats::default(),
            thread: Mutex::new(None),
        };
        handle.add(handle.wake.as_fd(), WAKE)?;
        // epoll_pwait2: naps are shorter than a millisecond. A kernel before Linux 5.11 fails here,
        // at start.
        handle.epoll.wait(Some(Duration::ZERO))?;
        Ok(handle)
    }

    fn send(&self, command: Command) {
        lock(&self.commands).push(command);
        self.has_commands.store(true, Ordering::Release);
        os::signal(self.wake.as_fd());
    }

    /// Starts serving a queue.
    pub fn serve(&self, served: Placed) {
        served.source.tuning.set_worker(self.index);
        self.send(Command::Serve(served));
    }

    /// Edge-triggered: kicks are not read, so each costs only the wake-up. Called by the worker
    /// alone, in the order of its commands: a queue that is dropped and served again often has the
    /// same descriptor, which must not be removed after it was added.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> std::io::Result<()> {
        self.epoll.add_edge(fd, token)
    }

    /// Stops serving or watching a queue. It may be served for one more round.
    pub fn drop_queue(&self, token: u64) {
        self.send(Command::Drop(token));
    }

    /// Has a queue given to another worker.
    pub fn give_away(&self, token: u64, to: usize) {
        self.send(Command::GiveAway(token, to));
    }

    /// Watches an egress queue for kicks of its peer.
    pub fn watch(&self, token: u64, port: Arc<Port>, queue: u16, kick: Option<KickFd>) {
        self.send(Command::Watch(token, Watched { port, queue, kick }));
    }

    /// Delivers a kick that did not arrive by the queue's descriptor.
    pub fn kick(&self, token: u64) {
        self.send(Command::Kick(token));
    }

    /// Has a queue polled after a change of its settings, even if its policy is waiting.
    pub fn poll(&self, token: u64) {
        self.send(Command::Poll(token));
    }

    /// Has held frames retried: a destination has room.
    pub fn retry(&self) {
        self.send(Command::Retry);
    }

    /// Replaces the port table.
    pub fn set_table(&self, table: Arc<Table>) {
        self.send(Command::Table(table));
    }

    /// Replaces the rules of ports.
    pub fn set_tenants(&self, tenants: Option<Arc<Tenants>>) {
        self.send(Command::Tenants(tenants));
    }

    /// Has it deliver frames that another process held for an egress queue.
    pub fn deliver_held(&self, at: QueueId) {
        self.send(Command::Held(at));
    }

    /// Has it wait at a gate after its round.
    pub fn freeze(&self, gate: Arc<Gate>) {
        self.send(Command::Freeze(gate));
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.send(Command::Stop);
        if let Some(thread) = lock(&self.thread).take() {
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
