//! Our end of an event channel.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::xen::sys as xen;
use crate::sys;

/// Our end of an event channel. The other end learns nothing of when this one looks.
pub struct Channel {
    /// Becomes readable when an event came.
    fd: Arc<OwnedFd>,
    end: End,
    /// Called when it is closed.
    closed: Option<Box<dyn FnOnce() + Send + Sync>>,
}

enum End {
    /// The same descriptor, and the port on it.
    Xen(u32),
    /// What the other end reads.
    Local(Arc<OwnedFd>),
}

impl Channel {
    /// A port of an evtchn descriptor of its own.
    pub(super) fn xen(fd: OwnedFd, port: u32) -> Self {
        Self { fd: Arc::new(fd), end: End::Xen(port), closed: None }
    }

    /// Two eventfds.
    pub(super) fn local(fd: Arc<OwnedFd>, peer: Arc<OwnedFd>) -> Self {
        Self { fd, end: End::Local(peer), closed: None }
    }

    /// Has `then` called when it is closed.
    pub(super) fn on_close(mut self, then: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.closed = Some(Box::new(then));
        self
    }

    /// The descriptor to wait for, edge-triggered. Only [`ack`](Self::ack) reads it.
    pub fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// Sends an event. One system call; that the other end is gone is told by the store.
    #[inline]
    pub fn notify(&self) {
        match &self.end {
            End::Xen(port) => drop(xen::ioctl::notify(self.fd.as_fd(), *port)),
            End::Local(peer) => sys::signal(peer.as_fd()),
        }
    }

    /// Takes a pending event, so that the next one is told again; whether there was one. To be
    /// called before the look that decides to sleep, not after: an event between the two would be
    /// taken with it.
    pub fn ack(&self) -> bool {
        match &self.end {
            End::Xen(port) => xen::evtchn_ack(self.fd.as_fd(), *port),
            End::Local(_) => sys::drain(self.fd.as_fd()),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let End::Xen(port) = self.end {
            // Others may hold the descriptor, so closing it may not do. There is no other way.
            let _ = xen::ioctl::unbind(self.fd.as_fd(), port);
        }
        if let Some(closed) = self.closed.take() {
            closed();
        }
    }
}
