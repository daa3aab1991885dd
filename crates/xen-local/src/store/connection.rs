//! One connection: the socket of a [`Session`].

use std::os::fd::{AsFd, OwnedFd};

use super::Limits;
use super::session::{Fired, Session, World};
use os::{Epoll, Received};

/// Connection of one client.
pub struct Connection {
    socket: OwnedFd,
    /// Whether it was accepted from a listener, so that the client is another process.
    listened: bool,
    session: Session,
}

impl Connection {
    pub fn new(socket: OwnedFd, domid: u16, listened: bool, limits: Limits) -> Self {
        Self { socket, listened, session: Session::new(domid, limits) }
    }

    /// The domain it acts for.
    pub fn domid(&self) -> u16 {
        self.session.domid()
    }

    /// Whether the client is another process.
    pub fn is_listened(&self) -> bool {
        self.listened
    }

    /// Number of its watches.
    pub fn watches(&self) -> usize {
        self.session.watches()
    }

    /// Whether the client is another process that acts for this domain.
    pub fn is_of(&self, domid: u16) -> bool {
        self.listened && self.session.domid() == domid
    }

    /// Reads, runs and replies to requests. Returns whether the connection is open.
    pub fn serve(&mut self, world: &mut World<'_>, readable: bool) -> bool {
        if !self.flush() || !self.serve_all(world) {
            return false;
        }
        if readable && self.session.accepts_input() {
            let mut buf = [0; 16 * 1024];
            match os::read(self.socket.as_fd(), &mut buf) {
                Ok(Received::Bytes(n)) => self.session.push(&buf[..n]),
                Ok(Received::Nothing) => {}
                Ok(Received::Closed | Received::Truncated) | Err(_) => return false,
            }
            if !self.serve_all(world) {
                return false;
            }
        }
        self.flush()
    }

    /// Serves all complete requests, as long as the client reads replies.
    fn serve_all(&mut self, world: &mut World<'_>) -> bool {
        while self.session.accepts_input() {
            match self.session.serve_next(world) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return false,
            }
            world.save();
            if !self.flush() {
                return false;
            }
        }
        true
    }

    /// Writes as much as possible. Returns whether the connection is open.
    pub fn flush(&mut self) -> bool {
        loop {
            while !self.session.unsent.is_empty() {
                match os::write(self.socket.as_fd(), &self.session.unsent) {
                    Ok(0) => return true,
                    Ok(n) => drop(self.session.unsent.drain(..n)),
                    Err(_) => return false,
                }
            }
            if !self.session.next_event() {
                return true;
            }
        }
    }

    /// Number of its pending events.
    pub fn pending(&self) -> usize {
        self.session.pending()
    }

    /// Queues events of a change for matching watches. `elsewhere`: events pending for other
    /// clients of its domain.
    pub fn fire(&mut self, fired: &Fired, elsewhere: usize) {
        self.session.fire(fired, elsewhere);
    }

    /// Has epoll report the events that are of use now; `reads`: requests are read.
    pub fn poll_for(&self, epoll: &Epoll, tag: u64, reads: bool) {
        let unsent = !self.session.unsent.is_empty();
        let input = reads && self.session.accepts_input();
        // This cannot fail for a descriptor in the set.
        let _ = epoll.change(self.socket.as_fd(), tag, input, unsent);
    }
}
