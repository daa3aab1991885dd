//! A xenstore server for machines without Xen: the real wire protocol over Unix sockets.
//!
//! One thread owns the `tree`, sleeps in epoll, and serves all connections. Each connection acts
//! for a domain: domain 0 has full access, others are subject to permissions and [`Limits`], and
//! get a limited share of the thread's time (`shares`). Events caused by a domain's changes are
//! delivered in parts of limited size (`events`), and no requests are read from the domain while
//! too many are pending. No client can end the thread: an invalid message closes its connection,
//! every other one gets a reply.
//!
//! Not supported: storage on disk, and the shared ring used by kernels.

mod connection;
mod events;
mod exchange;
mod session;
mod shares;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use os::{Carries, Epoll, Listener, Permissions, StateFile};
use shm::sync::{Lock, Mutex, MutexGuard};
use switch::time::Instant;
use xen_netif::store::{Access, Perm, Store, StoreError};

pub use self::exchange::{Exchange, Usage};
pub use self::tree::TreeState;

use self::connection::Connection;
use self::events::EventQueues;
use self::session::{Fired, World};
use self::shares::Shares;
use self::tree::Tree;

/// Limits of a connection that does not act for domain 0; xenstored's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Nodes owned by a domain.
    pub nodes: usize,
    /// Watches of a connection.
    pub watches: usize,
    /// Concurrent transactions of a connection.
    pub transactions: usize,
    /// Nodes touched by a transaction.
    pub touched: usize,
    /// Length of a value, in bytes.
    pub value_len: usize,
    /// Entries of a node's permissions.
    pub perms: usize,
    /// Connections of all sockets.
    pub connections: usize,
    /// CPU time of the server for a domain, in thousandths of a CPU, after a burst of 100 ms.
    pub cpu_per_mille: u64,
}

impl Limits {
    /// Limits of xenstored for a guest, and a hundredth of a CPU.
    pub const XENSTORED: Self = Self {
        nodes: 1000,
        watches: 128,
        transactions: 10,
        touched: 1024,
        value_len: 2048,
        perms: 5,
        connections: 64,
        cpu_per_mille: shares::PER_MILLE,
    };
}

/// A store. Its sockets are removed on drop.
pub struct Server {
    shared: Arc<Shared>,
    running: Mutex<Running>,
}

/// The service, in its thread or not.
enum Running {
    Thread(JoinHandle<Box<Service>>),
    Paused(Box<Service>),
    Ended,
}

struct Shared {
    /// Readable when commands are pending.
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
}

enum Command {
    Listen(Listener, u16),
    Serve(OwnedFd, u16),
    Keep(StateFile),
    Stop,
}

fn os_error(what: &'static str) -> impl FnOnce(std::io::Error) -> StoreError {
    move |error| StoreError::Os { name: "xen-local".into(), what, error }
}

fn spawn(mut service: Box<Service>) -> Result<JoinHandle<Box<Service>>, StoreError> {
    let run = move || {
        // A request can take milliseconds (a commit of many nodes); workers that share the CPU
        // preempt it. Without the priority it runs like any other thread.
        let _ = rustix::process::nice(10);
        service.run();
        service
    };
    let thread = std::thread::Builder::new().name("xenstore".into()).spawn(run);
    thread.map_err(os_error("thread"))
}

impl Server {
    /// Starts an empty store.
    ///
    /// # Errors
    /// Out of descriptors or threads.
    pub fn start(limits: Limits) -> Result<Self, StoreError> {
        Self::with(limits, Tree::new(&[Perm::new(Access::Read, 0)]))
    }

    /// Starts the store of another process. Its clients have to connect again.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn import(limits: Limits, tree: TreeState) -> Result<Self, StoreError> {
        Self::with(limits, Tree::import(tree))
    }

    fn with(limits: Limits, tree: Tree) -> Result<Self, StoreError> {
        let wake = os::eventfd().map_err(os_error("eventfd"))?;
        let epoll = Epoll::new().map_err(os_error("epoll"))?;
        epoll.add(wake.as_fd(), WAKE).map_err(os_error("epoll"))?;
        let shared =
            Arc::new(Shared { wake, commands: Mutex::new(Lock::LocalCommands, Vec::new()) });
        let service = Service::new(Arc::clone(&shared), epoll, limits, tree);
        let running = Mutex::new(Lock::LocalThreads, Running::Thread(spawn(Box::new(service))?));
        Ok(Self { shared, running })
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock()
    }

    /// Serves no requests until [`resume`](Self::resume); they wait.
    pub fn pause(&self) {
        let mut running = self.running();
        if !matches!(*running, Running::Thread(_)) {
            return;
        }
        self.shared.command(Command::Stop);
        // It does not panic; an error would leave nothing to resume.
        if let Running::Thread(thread) = std::mem::replace(&mut *running, Running::Ended)
            && let Ok(service) = thread.join()
        {
            *running = Running::Paused(service);
        }
    }

    /// Serves requests again.
    ///
    /// # Errors
    /// Out of threads.
    pub fn resume(&self) -> Result<(), StoreError> {
        let mut running = self.running();
        match std::mem::replace(&mut *running, Running::Ended) {
            Running::Paused(service) => *running = Running::Thread(spawn(service)?),
            other => *running = other,
        }
        // For commands that came meanwhile.
        os::signal(self.shared.wake.as_fd());
        Ok(())
    }

    /// Returns all nodes of a paused store, for another process.
    pub fn export(&self) -> Option<TreeState> {
        match &*self.running() {
            Running::Paused(service) => Some(service.tree.export()),
            _ => None,
        }
    }

    /// Listens at `path`; clients act for domain `domid`.
    ///
    /// # Errors
    /// [`StoreError::Socket`].
    pub fn listen(
        &self,
        path: &Path,
        domid: u16,
        permissions: &Permissions,
    ) -> Result<(), StoreError> {
        self.serve(Listener::bind(path, Carries::Stream, permissions)?, domid);
        Ok(())
    }

    /// Writes its nodes down in `file` whenever they change, before the reply.
    pub fn keep(&self, file: StateFile) {
        self.shared.command(Command::Keep(file));
    }

    /// Listens with this socket; clients act for domain `domid`.
    pub fn serve(&self, listener: Listener, domid: u16) {
        self.shared.command(Command::Listen(listener, domid));
    }

    /// Connects a client in this process that acts for domain `domid`.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn connect(&self, domid: u16) -> Result<Store, StoreError> {
        let name = format!("xen-local, domain {domid}");
        let (ours, theirs) = os::socketpair().map_err(|error| StoreError::Os {
            name: name.clone(),
            what: "socketpair",
            error,
        })?;
        self.shared.command(Command::Serve(theirs, domid));
        Store::over(ours, name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.pause();
    }
}

impl Shared {
    fn command(&self, command: Command) {
        self.commands.lock().push(command);
        os::signal(self.wake.as_fd());
    }
}

/// Tag of the wake-up descriptor; sockets have larger tags.
const WAKE: u64 = 0;

/// State of the thread.
struct Service {
    shared: Arc<Shared>,
    epoll: Epoll,
    limits: Limits,
    tree: Tree,
    listeners: BTreeMap<u64, (Listener, u16)>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    events: EventQueues,
    shares: Shares,
    /// Where the tree is kept for the next process, if this one is killed.
    file: Option<StateFile>,
    /// Connections whose requests are not read: their domain is in debt, or has too many pending
    /// events.
    paused: BTreeSet<u64>,
}

impl Service {
    fn new(shared: Arc<Shared>, epoll: Epoll, limits: Limits, tree: Tree) -> Self {
        Self {
            shared,
            epoll,
            limits,
            tree,
            listeners: BTreeMap::new(),
            connections: BTreeMap::new(),
            next: WAKE + 1,
            events: EventQueues::default(),
            shares: Shares::new(limits.cpu_per_mille),
            file: None,
            paused: BTreeSet::new(),
        }
    }

    fn run(&mut self) {
        // A failing epoll set is our bug; clients notice that their connections close.
        while let Ok(ready) = self.epoll.wait(self.timeout(shares::now())) {
            for ready in ready {
                if ready.tag == WAKE {
                    if !self.run_commands() {
                        return;
                    }
                } else if self.listeners.contains_key(&ready.tag) {
                    self.accept(ready.tag);
                } else {
                    self.serve(ready.tag, ready.readable);
                }
            }
            let now = shares::now();
            self.resume(now);
            self.deliver_some(now);
        }
    }

    /// Maximum time to sleep: until a domain in debt is served again, if something is pending.
    fn timeout(&self, now: Instant) -> Option<Duration> {
        let paused = self.paused.iter().filter_map(|tag| self.connections.get(tag));
        // What is over the limit of events waits for events of its own domain.
        let paused = paused.map(Connection::domid).filter(|d| !self.events.is_over_limit(*d));
        let due =
            |domid| self.shares.due(domid, now).map_or(Duration::ZERO, |at| (at - now).into());
        self.events.domains().chain(paused).map(due).min()
    }

    /// Whether nothing is to be done for a domain now.
    fn is_held(&self, domid: u16, now: Instant) -> bool {
        self.events.is_over_limit(domid) || self.shares.due(domid, now).is_some()
    }

    /// Reads requests again of connections that may be served.
    fn resume(&mut self, now: Instant) {
        let may =
            |tag: &u64| self.connections.get(tag).is_none_or(|c| !self.is_held(c.domid(), now));
        for tag in self.paused.iter().copied().filter(may).collect::<Vec<_>>() {
            self.paused.remove(&tag);
            self.serve(tag, true);
        }
    }

    /// Runs pending commands. Returns whether to continue.
    fn run_commands(&mut self) -> bool {
        os::drain(self.shared.wake.as_fd());
        loop {
            let command = {
                let mut pending = self.shared.commands.lock();
                if pending.is_empty() {
                    break;
                }
                pending.remove(0)
            };
            match command {
                Command::Stop => return false,
                Command::Serve(socket, domid) => self.add(socket, domid, false),
                Command::Keep(mut file) => {
                    self.tree.save(&mut file);
                    self.file = Some(file);
                }
                Command::Listen(listener, domid) => {
                    if self.epoll.add(listener.as_fd(), self.next).is_ok() {
                        self.listeners.insert(self.next, (listener, domid));
                        self.next += 1;
                    }
                }
            }
        }
        true
    }

    fn accept(&mut self, tag: u64) {
        let Some((listener, domid)) = self.listeners.get(&tag) else { return };
        let domid = *domid;
        if let Ok(Some(socket)) = listener.accept()
            && self.connections.len() < self.limits.connections
        {
            self.add(socket, domid, true);
        }
    }

    fn add(&mut self, socket: OwnedFd, domid: u16, listened: bool) {
        if self.epoll.add(socket.as_fd(), self.next).is_ok() {
            let connection = Connection::new(socket, domid, listened, self.limits);
            self.connections.insert(self.next, connection);
            self.next += 1;
        }
    }

    /// Reads, runs and replies to requests; then delivers events of their changes.
    fn serve(&mut self, tag: u64, readable: bool) {
        let now = shares::now();
        let Some(connection) = self.connections.get(&tag) else { return };
        let (domid, is_limited) = (connection.domid(), connection.is_listened());
        if is_limited && self.is_held(domid, now) {
            // Without an interest in input, this is a hang-up.
            if readable && !self.paused.insert(tag) {
                self.remove(tag);
            } else {
                self.flush(tag);
            }
            return;
        }
        let before = shares::used();
        let Some(connection) = self.connections.get_mut(&tag) else { return };
        let mut fired = Vec::new();
        let mut released = Vec::new();
        let mut world = World {
            tree: &mut self.tree,
            fired: &mut fired,
            released: &mut released,
            file: self.file.as_mut(),
            saved: 0,
        };
        let alive = connection.serve(&mut world, readable);
        let removes = !released.is_empty();
        for domid in released {
            fired.extend(self.tree.remove_domain(domid).into_iter().map(Fired::Node));
            // Their connections must not act for the next domain with that number.
            self.connections.retain(|t, c| *t == tag || !c.is_of(domid));
            self.paused.retain(|tag| self.connections.contains_key(tag));
            // What its watches, events and nodes took is in pieces between those of others.
            os::trim_heaps();
        }
        if let Some(file) = self.file.as_mut().filter(|_| removes) {
            self.tree.save(file);
        }
        if !alive {
            self.remove(tag);
        }
        self.deliver(fired, domid);
        if let Some(connection) = self.connections.get(&tag) {
            connection.poll_for(&self.epoll, tag, true);
        }
        if is_limited {
            self.shares.charge(domid, shares::used() - before, now);
        }
    }

    fn remove(&mut self, tag: u64) {
        self.connections.remove(&tag);
        self.paused.remove(&tag);
    }

    /// Delivers events of changes by domain `by` to clients in this process at once, and queues
    /// them for others.
    fn deliver(&mut self, fired: Vec<Fired>, by: u16) {
        if fired.is_empty() {
            return;
        }
        let mut later = Vec::new();
        let mut flushed = Vec::new();
        for (tag, connection) in &mut self.connections {
            if connection.is_listened() {
                later.push(*tag);
            } else {
                fired.iter().for_each(|fired| connection.fire(fired, 0));
                flushed.push(*tag);
            }
        }
        flushed.into_iter().for_each(|tag| self.flush(tag));
        self.events.add(fired, by, later);
    }

    /// Delivers some of the queued events of one domain. Returns the number of steps.
    fn deliver_some(&mut self, now: Instant) -> usize {
        let Some(by) = self.events.turn(|domid| self.shares.due(domid, now).is_none()) else {
            return 0;
        };
        let (before, mut done) = (shares::used(), 0);
        while done < events::STEPS
            && let Some((tag, fired)) = self.events.next(by)
        {
            let mut cost = 1;
            let elsewhere = pending_elsewhere(&self.connections, tag);
            if let Some(connection) = self.connections.get_mut(&tag) {
                cost += connection.watches();
                connection.fire(fired, elsewhere);
            }
            done += cost;
            if let Some(tag) = self.events.advance(by) {
                self.flush(tag);
            }
        }
        self.shares.charge(by, shares::used() - before, now);
        done
    }

    fn flush(&mut self, tag: u64) {
        let Some(connection) = self.connections.get_mut(&tag) else { return };
        if connection.flush() {
            connection.poll_for(&self.epoll, tag, !self.paused.contains(&tag));
        } else {
            self.remove(tag);
        }
    }
}

/// Number of events pending for other clients of a connection's domain.
fn pending_elsewhere(connections: &BTreeMap<u64, Connection>, tag: u64) -> usize {
    let Some(domid) = connections.get(&tag).map(Connection::domid) else { return 0 };
    let others = connections.iter().filter(|(other, client)| **other != tag && client.is_of(domid));
    others.map(|(_, client)| client.pending()).sum()
}

#[cfg(test)]
mod tests;
