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
}

impl Room {
    /// # Errors
    /// Out of descriptors.
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add((*socket).as_fd(), 0)?;
        epoll.change((*socket).as_fd(), 0, false, false)?;
        Ok(Self { socket, epoll: Arc::new(epoll), requested: false })
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
        if self.requested != on {
            // The socket is in the set.
            let _ = self.epoll.change((*self.socket).as_fd(), 0, false, on);
            self.requested = on;
        }
    }

    /// Whether there is room now, or the peer has closed.
    pub(crate) fn is_there(&self) -> bool {
        // A failure would repeat: the write then reports it.
        os::wait(self.socket(), Until::Writable, Instant::now()).unwrap_or(true)
    }
}
