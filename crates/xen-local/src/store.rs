//! A xenstore server for machines without Xen: the real wire protocol over Unix sockets.
//!
//! One thread owns the `tree`, sleeps in epoll, and serves every connection in turn. Each
//! connection acts for a domain: domain 0 may do everything, others what permissions and
//! [`Limits`] allow. What a domain's changes make of work for others' watches is done a bounded
//! piece at a time (`telling`), and the domain is not read from while too much of it waits. What a
//! client sends never ends the thread: a message that is none closes its connection, everything
//! else gets its answer.
//!
//! What it does not do: nothing is kept on disk, and there is no ring version for kernels.

mod connection;
mod exchange;
mod session;
mod telling;
mod tree;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use os::{Carries, Epoll, Listener};
use xen_netif::store::{Access, Perm, Store, StoreError};

pub use self::exchange::{Exchange, Usage};

use self::connection::Connection;
use self::session::{Fired, World};
use self::telling::Telling;
use self::tree::Tree;

/// What a connection of a domain other than 0 may have. xenstored's own defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Nodes a domain may own.
    pub nodes: usize,
    /// Watches of one connection.
    pub watches: usize,
    /// Transactions of one connection at a time.
    pub transactions: usize,
    /// Nodes one transaction may touch.
    pub touched: usize,
    /// Longest value, in bytes.
    pub value_len: usize,
    /// Entries of a node's permissions.
    pub perms: usize,
    /// Connections of all sockets together.
    pub connections: usize,
}

impl Limits {
    /// What xenstored grants a guest.
    pub const XENSTORED: Self = Self {
        nodes: 1000,
        watches: 128,
        transactions: 10,
        touched: 1024,
        value_len: 2048,
        perms: 5,
        connections: 64,
    };
}

/// A running store. It ends, and its sockets go, with this value.
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// Readable when there are commands.
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
}

enum Command {
    Listen(Listener, u16),
    Serve(OwnedFd, u16),
    Stop,
}

impl Server {
    /// Starts an empty store.
    ///
    /// # Errors
    /// When descriptors or threads ran out.
    pub fn start(limits: Limits) -> Result<Self, StoreError> {
        let os = |what| move |error| StoreError::Os { name: "of our own".into(), what, error };
        let wake = os::eventfd().map_err(os("eventfd"))?;
        let epoll = Epoll::new().map_err(os("epoll"))?;
        epoll.add(wake.as_fd(), WAKE).map_err(os("epoll"))?;
        let shared = Arc::new(Shared { wake, commands: Mutex::default() });
        let service = Service::new(Arc::clone(&shared), epoll, limits);
        let thread = std::thread::Builder::new().name("xenstore".into());
        let run = move || {
            // A client makes this thread work for milliseconds (a commit of many nodes); workers
            // that share its CPU preempt it. At worst it runs like any other thread.
            let _ = rustix::process::nice(10);
            service.run();
        };
        let thread = thread.spawn(run).map_err(os("thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Listens at `path`; who connects there acts for domain `domid`.
    ///
    /// # Errors
    /// [`StoreError::Socket`] says what stands in the way.
    pub fn listen(&self, path: &Path, domid: u16) -> Result<(), StoreError> {
        let listener = Listener::bind(path, Carries::Stream)?;
        self.shared.command(Command::Listen(listener, domid));
        Ok(())
    }

    /// A client in this process that acts for domain `domid`.
    ///
    /// # Errors
    /// When descriptors ran out.
    pub fn connect(&self, domid: u16) -> Result<Store, StoreError> {
        let name = format!("of our own, domain {domid}");
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
        self.shared.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, there is nothing left to stop.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        os::signal(self.wake.as_fd());
    }
}

/// Tag of the wake-up descriptor; sockets get the numbers above.
const WAKE: u64 = 0;

/// What the thread owns.
struct Service {
    shared: Arc<Shared>,
    epoll: Epoll,
    limits: Limits,
    tree: Tree,
    listeners: BTreeMap<u64, (Listener, u16)>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    telling: Telling,
}

impl Service {
    fn new(shared: Arc<Shared>, epoll: Epoll, limits: Limits) -> Self {
        Self {
            shared,
            epoll,
            limits,
            tree: Tree::new(&[Perm::new(Access::Read, 0)]),
            listeners: BTreeMap::new(),
            connections: BTreeMap::new(),
            next: WAKE + 1,
            telling: Telling::default(),
        }
    }

    fn run(mut self) {
        // The set itself failing is a bug of ours; the clients are told by their ends closing.
        while let Ok(ready) = self.epoll.wait(self.patience()) {
            for ready in ready {
                if ready.tag == WAKE {
                    if !self.commands() {
                        return;
                    }
                } else if self.listeners.contains_key(&ready.tag) {
                    self.accept(ready.tag);
                } else {
                    self.serve(ready.tag, ready.readable);
                }
            }
            self.tell_some();
        }
    }

    /// How long it may sleep: not at all while there are events to be delivered.
    fn patience(&self) -> Option<Duration> {
        (!self.telling.is_done()).then_some(Duration::ZERO)
    }

    /// Whether to go on.
    fn commands(&mut self) -> bool {
        os::drain(self.shared.wake.as_fd());
        let commands = {
            let mut waiting = self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *waiting)
        };
        for command in commands {
            match command {
                Command::Stop => return false,
                Command::Serve(socket, domid) => self.add(socket, domid, false),
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

    /// Reads, answers and writes; then tells everyone of what changed.
    fn serve(&mut self, tag: u64, readable: bool) {
        let Some(connection) = self.connections.get_mut(&tag) else { return };
        let domid = connection.domid();
        if connection.is_listened() && self.telling.is_in_arrears(domid) {
            return;
        }
        let mut fired = Vec::new();
        let mut released = Vec::new();
        let mut world = World { tree: &mut self.tree, fired: &mut fired, released: &mut released };
        let alive = connection.serve(&mut world, readable);
        for domid in released {
            fired.extend(self.tree.forget(domid).into_iter().map(Fired::Node));
            // Whoever acted for it is not to act for the next domain of that number.
            self.connections.retain(|t, c| *t == tag || !c.is_of(domid));
        }
        if !alive {
            self.connections.remove(&tag);
        }
        self.tell(fired, domid);
        if let Some(connection) = self.connections.get(&tag) {
            connection.poll_for(&self.epoll, tag);
        }
    }

    /// Tells those in this process of what domain `by` changed; others are told later, some at a
    /// time.
    fn tell(&mut self, fired: Vec<Fired>, by: u16) {
        if fired.is_empty() {
            return;
        }
        let mut later = Vec::new();
        let mut told = Vec::new();
        for (tag, connection) in &mut self.connections {
            if connection.is_listened() {
                later.push(*tag);
            } else {
                fired.iter().for_each(|fired| connection.fire(fired));
                told.push(*tag);
            }
        }
        told.into_iter().for_each(|tag| self.flush(tag));
        self.telling.add(fired, by, later);
    }

    /// Goes on with what is to be told; how many steps that were.
    fn tell_some(&mut self) -> usize {
        let mut done = 0;
        while done < telling::STEPS
            && let Some((tag, fired)) = self.telling.next()
        {
            let mut cost = 1;
            if let Some(connection) = self.connections.get_mut(&tag) {
                cost += connection.watches();
                connection.fire(fired);
            }
            done += cost;
            if let Some(tag) = self.telling.advance() {
                self.flush(tag);
            }
        }
        done
    }

    fn flush(&mut self, tag: u64) {
        let Some(connection) = self.connections.get_mut(&tag) else { return };
        if connection.flush() {
            connection.poll_for(&self.epoll, tag);
        } else {
            self.connections.remove(&tag);
        }
    }
}

#[cfg(test)]
mod tests;
