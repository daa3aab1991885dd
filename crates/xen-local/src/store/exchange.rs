//! A store without a thread and without sockets: the caller transfers the bytes.

use super::Limits;
use super::session::{Fired, Session, World};
use super::tree::Tree;
use xen_netif::store::wire::{Access, Perm};

/// Resources of a client that are subject to [`Limits`] or take memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nodes owned by its domain.
    pub nodes: usize,
    /// Its watches.
    pub watches: usize,
    /// Its transactions.
    pub transactions: usize,
    /// Nodes touched by a transaction, maximum.
    pub touched: usize,
    /// Nodes changed or reported by a transaction, maximum.
    pub changed: usize,
    /// Pending events.
    pub events: usize,
    /// Bytes of unsent replies.
    pub unsent: usize,
    /// Bytes of an incomplete message.
    pub unread: usize,
}

/// The protocol of the store alone, for tests and fuzzers.
pub struct Exchange {
    tree: Tree,
    limits: Limits,
    /// `None`: the connection was closed after invalid data.
    clients: Vec<Option<Session>>,
}

impl Exchange {
    /// Creates an empty store.
    pub fn new(limits: Limits) -> Self {
        Self { tree: Tree::new(&[Perm::new(Access::Read, 0)]), limits, clients: Vec::new() }
    }

    /// Adds a client that acts for domain `domid`. Returns its number.
    pub fn connect(&mut self, domid: u16) -> usize {
        self.clients.push(Some(Session::new(domid, self.limits)));
        self.clients.len() - 1
    }

    /// Sends bytes from `client`, unless it has too many replies to [`receive`](Self::receive), and
    /// serves complete requests; false: its connection is closed.
    pub fn send(&mut self, client: usize, bytes: &[u8]) -> bool {
        let Some(session) = self.clients.get_mut(client).and_then(Option::as_mut) else {
            return false;
        };
        let (mut fired, mut released) = (Vec::new(), Vec::new());
        let mut world = World {
            tree: &mut self.tree,
            fired: &mut fired,
            released: &mut released,
            file: None,
            saved: 0,
        };
        let mut alive = serve_all(session, &mut world);
        // As with a socket: pending requests are served first.
        if alive && session.accepts_input() {
            session.push(bytes);
            alive = serve_all(session, &mut world);
        }
        if !alive {
            self.clients[client] = None;
        }
        for domid in released {
            fired.extend(self.tree.remove_domain(domid).into_iter().map(Fired::Node));
        }
        for session in self.clients.iter_mut().flatten() {
            fired.iter().for_each(|fired| session.fire(fired, 0));
        }
        alive
    }

    /// Takes all bytes to be sent to `client`.
    pub fn receive(&mut self, client: usize) -> Vec<u8> {
        let Some(session) = self.clients.get_mut(client).and_then(Option::as_mut) else {
            return Vec::new();
        };
        while session.next_event() {}
        std::mem::take(&mut session.unsent)
    }

    /// Resources of `client`.
    pub fn usage(&self, client: usize) -> Usage {
        let Some(session) = self.clients.get(client).and_then(Option::as_ref) else {
            return Usage::default();
        };
        Usage { nodes: self.tree.owned(session.domid()), ..session.usage() }
    }
}

fn serve_all(session: &mut Session, world: &mut World<'_>) -> bool {
    while session.accepts_input() {
        match session.serve_next(world) {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) => return false,
        }
    }
    true
}
