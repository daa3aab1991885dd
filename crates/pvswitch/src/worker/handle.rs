//! A worker as others see it: what it can be told, what it tells, and its counters.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use switch::fdb::PortId;
use switch::forward::{Port, PortEvent, Source, Table};
use switch::poll::State;
use switch::port::Ingress;
use switch::schedule;
use vhost_user::device::KickFd;

/// Epoll token of a worker's own wake-up descriptor.
pub(super) const WAKE: u64 = u64::MAX;

/// A queue to serve.
pub struct Served {
    /// Names the queue; unique among all queues of the program.
    pub token: u64,
    /// Where its frames come from.
    pub source: Source,
    /// The queue.
    pub ingress: Arc<Mutex<dyn Ingress>>,
    /// Becomes readable when the peer notifies.
    pub kick: Option<KickFd>,
    /// Whether the peer can notify, by `kick` or otherwise. If not, the queue is always polled.
    pub notifies: bool,
}

/// What a worker is asked to do between two rounds.
pub(super) enum Command {
    Serve(Served),
    Drop(u64),
    /// Gives a queue to another worker.
    Away(u64, usize),
    /// An egress queue whose peer kicks when it makes room.
    Watch(u64, Watched),
    Kicked(u64),
    /// Something about a queue was changed that it may have to be looked at for.
    Look(u64),
    /// A destination that frames are held for has room.
    Retry,
    Table(Arc<Table>),
    Stop,
}

pub(super) struct Watched {
    pub port: Arc<Port>,
    pub queue: u16,
    /// `None`: its peer kicks by other means.
    pub kick: Option<KickFd>,
}

/// What a worker is asked about one queue. Later requests take the place of earlier ones, so that
/// a peer that has its queues started and stopped in a loop makes no list longer, and no descriptor
/// wait in it, but those of its queues.
#[derive(Default)]
pub(super) struct Wishes {
    drop: bool,
    begin: Option<Command>,
    away: Option<usize>,
    look: bool,
    kicked: bool,
}

/// Commands between two rounds of a worker.
#[derive(Default)]
pub(super) struct Inbox {
    order: VecDeque<Next>,
    of: HashMap<u64, Wishes>,
    retry: bool,
    stop: bool,
    /// The latest table, and its number.
    table: Option<Arc<Table>>,
    tables: u64,
}

enum Next {
    Token(u64),
    Table(u64),
}

impl Inbox {
    fn push(&mut self, command: Command) {
        let token = match &command {
            Command::Serve(served) => served.token,
            Command::Watch(token, _)
            | Command::Drop(token)
            | Command::Away(token, _)
            | Command::Kicked(token)
            | Command::Look(token) => *token,
            Command::Retry => return self.retry = true,
            Command::Stop => return self.stop = true,
            Command::Table(_) => {
                let Command::Table(table) = command else { return };
                self.table = Some(table);
                self.tables += 1;
                return self.order.push_back(Next::Table(self.tables));
            }
        };
        let order = &mut self.order;
        let wishes = self.of.entry(token).or_insert_with(|| {
            order.push_back(Next::Token(token));
            Wishes::default()
        });
        match command {
            Command::Serve(_) | Command::Watch(..) => wishes.begin = Some(command),
            Command::Drop(_) => {
                // It was never served: as if it had been, and was dropped.
                if let Some(Command::Serve(served)) = &wishes.begin {
                    served.stopped();
                }
                *wishes = Wishes { drop: true, ..Wishes::default() };
            }
            Command::Away(_, to) => wishes.away = Some(to),
            Command::Look(_) => wishes.look = true,
            _ => wishes.kicked = true,
        }
    }

    /// The next few commands, in order: those of at most `tokens` queues.
    pub(super) fn take(&mut self, tokens: usize) -> Vec<Command> {
        let mut commands = Vec::new();
        for _ in 0..tokens {
            let token = match self.order.pop_front() {
                Some(Next::Token(token)) => token,
                Some(Next::Table(n)) => {
                    // Only the latest counts.
                    let table = self.table.take_if(|_| n == self.tables);
                    commands.extend(table.map(Command::Table));
                    continue;
                }
                None => break,
            };
            let Some(wishes) = self.of.remove(&token) else { continue };
            commands.extend(wishes.drop.then_some(Command::Drop(token)));
            commands.extend(wishes.begin);
            commands.extend(wishes.away.map(|to| Command::Away(token, to)));
            commands.extend(wishes.look.then_some(Command::Look(token)));
            commands.extend(wishes.kicked.then_some(Command::Kicked(token)));
        }
        commands.extend(std::mem::take(&mut self.retry).then_some(Command::Retry));
        commands.extend(std::mem::take(&mut self.stop).then_some(Command::Stop));
        commands
    }

    /// Whether there are more.
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// What a served queue is for its worker's scheduler.
pub(super) struct Io {
    pub ingress: Arc<Mutex<dyn Ingress>>,
    pub kick: Option<KickFd>,
}

impl From<Served> for schedule::Served<Io> {
    fn from(served: Served) -> Self {
        let Served { token, source, ingress, kick, notifies } = served;
        Self { token, source, notifies, of: Io { ingress, kick } }
    }
}

impl From<schedule::Served<Io>> for Served {
    fn from(served: schedule::Served<Io>) -> Self {
        let schedule::Served { token, source, notifies, of: Io { ingress, kick } } = served;
        Self { token, source, ingress, kick, notifies }
    }
}

impl Served {
    /// It is not served any more: nothing is held, nothing is to be drained.
    pub(super) fn stopped(&self) {
        let tuning = &self.source.tuning;
        tuning.set_state(State::Cold);
        tuning.drained();
    }
}

/// Something a worker tells the control thread.
pub enum Report {
    /// Forwarding found something about a port.
    Port(PortEvent),
    /// A queue's kicks cannot be waited for.
    Deaf(PortId, std::io::Error),
}

/// What a worker did, for people.
#[derive(Default)]
pub struct WorkerStats {
    /// Rounds over the hot queues.
    pub rounds: AtomicU64,
    /// Times it slept until it was woken, or to try held frames again.
    pub sleeps: AtomicU64,
    /// Times it slept for a time that was set.
    pub naps: AtomicU64,
    /// Queues it gave to another worker.
    pub moves: AtomicU64,
    /// Queues it serves.
    pub queues: AtomicU32,
    /// Part of its time spent on frames, in thousandths, when last measured.
    pub load: AtomicU32,
    /// Whether it sleeps, and no time is set for it to look at a queue.
    pub asleep: AtomicBool,
    /// Thread id, for its CPU time.
    pub tid: AtomicU64,
}

/// Handle to a worker thread; outlives it.
pub struct Handle {
    pub(super) index: u8,
    pub(super) epoll: OwnedFd,
    pub(super) wake: OwnedFd,
    pub(super) commands: Mutex<Inbox>,
    pub(super) has_commands: AtomicBool,
    /// Its counters.
    pub stats: WorkerStats,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    /// For worker number `index`, which does not run yet.
    pub fn new(index: u8) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
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
        // epoll_pwait2: naps are shorter than a millisecond. A kernel before Linux 5.11 is told
        // here, at start.
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut none = Vec::<epoll::Event>::with_capacity(1);
        epoll::wait(&handle.epoll, rustix::buffer::spare_capacity(&mut none), Some(&zero))?;
        Ok(handle)
    }

    fn send(&self, command: Command) {
        lock(&self.commands).push(command);
        self.has_commands.store(true, Ordering::Release);
        os::signal(self.wake.as_fd());
    }

    /// Starts serving a queue.
    pub fn serve(&self, served: Served) {
        served.source.tuning.set_worker(self.index);
        self.send(Command::Serve(served));
    }

    /// Edge-triggered: a kick need not be read, so it costs the wake-up and no more. By the worker
    /// alone, as it obeys: the descriptor of a queue that is dropped and served again is often the
    /// same, and must not be taken out after it was put in.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> std::io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Stops serving or watching a queue. It may be served for the length of one round more.
    pub fn drop_queue(&self, token: u64) {
        self.send(Command::Drop(token));
    }

    /// Gives a queue to another worker.
    pub fn send_away(&self, token: u64, to: usize) {
        self.send(Command::Away(token, to));
    }

    /// Watches an egress queue for its peer's kick.
    pub fn watch(&self, token: u64, port: Arc<Port>, queue: u16, kick: Option<KickFd>) {
        self.send(Command::Watch(token, Watched { port, queue, kick }));
    }

    /// A queue was kicked by other means than its descriptor.
    pub fn kicked(&self, token: u64) {
        self.send(Command::Kicked(token));
    }

    /// Something about a queue was changed: it is looked at, wherever its policy had it wait.
    pub fn look(&self, token: u64) {
        self.send(Command::Look(token));
    }

    /// A destination made room.
    pub fn retry(&self) {
        self.send(Command::Retry);
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

    /// Its load, in thousandths; none while it sleeps, but for naps.
    pub fn load(&self) -> u32 {
        if self.stats.asleep.load(Ordering::Relaxed) {
            return 0;
        }
        self.stats.load.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
