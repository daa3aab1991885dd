//! Notification that a socket has room.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use os::{Epoll, Until};

use super::Socket;

/// Waits for room in a socket. Its descriptor becomes readable when there is some, or when the peer
/// has closed; only while [requested](Self::request): a peer that reads would otherwise wake the
/// worker with each frame.
pub(crate) struct Room {
    socket: Socket,
    epoll: Arc<Epoll>,
    requested: bool,
    /// The socket is in the set at all times.
    resident: bool,
}

impl Room {
    /// # Errors
    /// Out of descriptors.
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add((*socket).as_fd(), 0)?;
        epoll.change((*socket).as_fd(), 0, false, false)?;
        Ok(Self { socket, epoll: Arc::new(epoll), requested: false, resident: true })
    }

    /// The same for a socket in no other set, which is in this one only while a notification is
    /// requested: the kernel calls each set that a socket is in for every frame that it has sent,
    /// whatever events the set wants. A request may fail.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(crate) fn of_sender(socket: Socket) -> io::Result<Self> {
        Ok(Self { socket, epoll: Arc::new(Epoll::new()?), requested: false, resident: false })
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        (*self.socket).as_fd()
    }

    /// The descriptor to wait for.
    pub(crate) fn waits_for(&self) -> Socket {
        self.epoll.clone()
    }

    /// Requests a notification, or takes the request back.
    pub(crate) fn request(&mut self, on: bool) {
        if self.requested == on {
            return;
        }
        let result = match (self.resident, on) {
            (true, _) => self.epoll.change(self.socket(), 0, false, on),
            (false, true) => self.epoll.add_writable(self.socket(), 0),
            (false, false) => self.epoll.remove(self.socket()),
        };
        // To change what is in the set does not fail.
        self.requested = on && (result.is_ok() || self.resident);
    }

    /// Whether a notification is requested.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested
    }

    /// Whether there is room now, or the peer has closed.
    pub(crate) fn is_there(&self) -> bool {
        // A failure would repeat: the write then reports it.
        os::wait(self.socket(), Until::Writable, Instant::now()).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn sender_is_in_the_set_only_while_a_notification_is_requested() {
        let (ours, _theirs) = os::socketpair().unwrap();
        let mut room = Room::of_sender(Arc::new(ours)).unwrap();
        let set = room.epoll.as_fd().as_raw_fd();
        let members = || {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{set}")).unwrap();
            info.lines().filter(|line| line.starts_with("tfd:")).count()
        };
        let is_notified = |room: &Room| {
            os::poll_readable(&[(*room.waits_for()).as_fd()], Some(std::time::Duration::ZERO))[0]
        };
        for _ in 0..3 {
            assert_eq!((members(), is_notified(&room)), (0, false));
            room.request(true);
            assert!(room.is_requested());
            room.request(true);
            assert_eq!((members(), is_notified(&room)), (1, true));
            room.request(false);
            assert!(!room.is_requested());
        }
    }
}
