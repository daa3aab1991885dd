//! A store without a thread and without sockets: who has it carries the bytes.

use super::Limits;
use super::session::{Fired, Session, World};
use super::tree::Tree;
use xen_netif::store::wire::{Access, Perm};

/// What a client has of what [`Limits`] are for, and of what else takes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nodes its domain owns.
    pub nodes: usize,
    /// Its watches.
    pub watches: usize,
    /// Its transactions.
    pub transactions: usize,
    /// Most nodes that one of them touched.
    pub touched: usize,
    /// Most that one of them would change, or tell of.
    pub changed: usize,
    /// Events it has still to be sent.
    pub events: usize,
    /// Bytes of answers it has still to be sent.
    pub unsent: usize,
    /// Bytes of its own that make no whole message yet.
    pub unread: usize,
}

/// The store's part of the protocol alone, for tests and fuzzers.
pub struct Exchange {
    tree: Tree,
    limits: Limits,
    /// `None`: what the client said closed its connection.
    clients: Vec<Option<Session>>,
}

impl Exchange {
    /// An empty store.
    pub fn new(limits: Limits) -> Self {
        Self { tree: Tree::new(&[Perm::new(Access::Read, 0)]), limits, clients: Vec::new() }
    }

    /// A client that acts for domain `domid`; its number.
    pub fn connect(&mut self, domid: u16) -> usize {
        self.clients.push(Some(Session::new(domid, self.limits)));
        self.clients.len() - 1
    }

    /// Takes what `client` sends, unless it has too many answers to [`hear`](Self::hear) first, and
    /// answers what is whole; false: its connection is closed.
    pub fn say(&mut self, client: usize, bytes: &[u8]) -> bool {
        let Some(session) = self.clients.get_mut(client).and_then(Option::as_mut) else {
            return false;
        };
        let (mut fired, mut released) = (Vec::new(), Vec::new());
        let mut world = World { tree: &mut self.tree, fired: &mut fired, released: &mut released };
        let mut alive = answer_all(session, &mut world);
        // As from a socket: not before what came is answered.
        if alive && session.listens() {
            session.push(bytes);
            alive = answer_all(session, &mut world);
        }
        if !alive {
            self.clients[client] = None;
        }
        for domid in released {
            fired.extend(self.tree.forget(domid).into_iter().map(Fired::Node));
        }
        for session in self.clients.iter_mut().flatten() {
            fired.iter().for_each(|fired| session.fire(fired));
        }
        alive
    }

    /// All that `client` is to be sent.
    pub fn hear(&mut self, client: usize) -> Vec<u8> {
        let Some(session) = self.clients.get_mut(client).and_then(Option::as_mut) else {
            return Vec::new();
        };
        while session.next_event() {}
        std::mem::take(&mut session.unsent)
    }

    /// What `client` has.
    pub fn usage(&self, client: usize) -> Usage {
        let Some(session) = self.clients.get(client).and_then(Option::as_ref) else {
            return Usage::default();
        };
        Usage { nodes: self.tree.owned(session.domid()), ..session.usage() }
    }
}

fn answer_all(session: &mut Session, world: &mut World<'_>) -> bool {
    while session.listens() {
        match session.answer_next(world) {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) => return false,
        }
    }
    true
}
