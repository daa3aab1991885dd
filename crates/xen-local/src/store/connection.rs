//! One connection: the socket of a [`Session`].

use std::os::fd::{AsFd, OwnedFd};

use super::Limits;
use super::session::{Fired, Session, World};
use os::{Epoll, Received};

/// One client's socket.
pub struct Connection {
    socket: OwnedFd,
    /// It came over a socket with a name, so another process has it.
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

    /// Whether another process has it.
    pub fn is_listened(&self) -> bool {
        self.listened
    }

    /// How many watches it has.
    pub fn watches(&self) -> usize {
        self.session.watches()
    }

    /// Whether another process acts for this domain through it.
    pub fn is_of(&self, domid: u16) -> bool {
        self.listened && self.session.domid() == domid
    }

    /// Reads, answers and writes; whether it is still alive.
    pub fn serve(&mut self, world: &mut World<'_>, readable: bool) -> bool {
        if !self.flush() || !self.answer_all(world) {
            return false;
        }
        if readable && self.session.listens() {
            let mut buf = [0; 16 * 1024];
            match os::read(self.socket.as_fd(), &mut buf) {
                Ok(Received::Bytes(n)) => self.session.push(&buf[..n]),
                Ok(Received::Nothing) => {}
                Ok(Received::Closed | Received::Truncated) | Err(_) => return false,
            }
            if !self.answer_all(world) {
                return false;
            }
        }
        self.flush()
    }

    /// Answers what has come whole, as long as the client takes answers.
    fn answer_all(&mut self, world: &mut World<'_>) -> bool {
        while self.session.listens() {
            match self.session.answer_next(world) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return false,
            }
            if !self.flush() {
                return false;
            }
        }
        true
    }

    /// Writes what there is room for; whether the client is still there.
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

    /// Notes what happened, for each watch that is to hear of it.
    pub fn fire(&mut self, fired: &Fired) {
        self.session.fire(fired);
    }

    /// Has epoll report what is of use now.
    pub fn poll_for(&self, epoll: &Epoll, tag: u64) {
        let unsent = !self.session.unsent.is_empty();
        // A descriptor of the set cannot be refused.
        let _ = epoll.change(self.socket.as_fd(), tag, self.session.listens(), unsent);
    }
}
