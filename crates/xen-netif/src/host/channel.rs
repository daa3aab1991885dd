//! Our end of an event channel.
//!
//! Where both rings of a queue share one channel, two threads may sleep for it, and whoever takes
//! an event takes it from the other. So each has a [`SharedChannel`], which tells the other:
//!
//! ```text
//!   channel ──┬─▶ half of tx ── took one ──┐        each waits for the channel and for what
//!             └─▶ half of rx ◀─────────────┘ tells  the other half tells, and acks both
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::HostError;
use super::xen::sys as xen;
use os::Epoll;

/// The event channel of a ring, as far as its port uses it.
pub trait Event: Send + Sync {
    /// Tells the peer.
    fn notify(&self);
    /// Takes what the peer told, so that it can tell again.
    fn ack(&self);
}

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
    /// The eventfd that the other end reads.
    Eventfd(Arc<OwnedFd>),
}

impl Channel {
    /// A port of an evtchn descriptor of its own.
    pub(super) fn xen(fd: OwnedFd, port: u32) -> Self {
        Self { fd: Arc::new(fd), end: End::Xen(port), closed: None }
    }

    /// Two eventfds: the one we read, and the one that the other end reads.
    pub fn eventfds(ours: Arc<OwnedFd>, theirs: Arc<OwnedFd>) -> Self {
        Self { fd: ours, end: End::Eventfd(theirs), closed: None }
    }

    /// Has `then` called when it is closed.
    #[must_use]
    pub fn on_close(mut self, then: impl FnOnce() + Send + Sync + 'static) -> Self {
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
            End::Eventfd(peer) => os::signal(peer.as_fd()),
        }
    }

    /// Takes a pending event, so that the next one is told again; whether there was one. To be
    /// called before the look that decides to sleep, not after: an event between the two would be
    /// taken with it.
    pub fn ack(&self) -> bool {
        match &self.end {
            End::Xen(port) => xen::evtchn_ack(self.fd.as_fd(), *port),
            End::Eventfd(_) => os::drain(self.fd.as_fd()),
        }
    }
}

impl Event for Channel {
    fn notify(&self) {
        Self::notify(self);
    }

    fn ack(&self) {
        Self::ack(self);
    }
}

/// One of two ends of a channel that both rings of a queue share.
pub struct SharedChannel {
    channel: Arc<Channel>,
    /// The other half took an event.
    told: Arc<OwnedFd>,
    /// Says so to the other.
    other: Arc<OwnedFd>,
    /// The channel, and `told`.
    either: Arc<OwnedFd>,
}

impl SharedChannel {
    /// Both of them.
    ///
    /// # Errors
    /// [`HostError::Os`]: no descriptors are left.
    pub fn pair(channel: Channel) -> Result<[Self; 2], HostError> {
        let os = |error| HostError::Os { at: "channel".into(), what: "epoll", error };
        let channel = Arc::new(channel);
        let told = [Arc::new(os::eventfd().map_err(os)?), Arc::new(os::eventfd().map_err(os)?)];
        let half = |mine: usize| {
            let epoll = Epoll::new()?;
            epoll.add(channel.fd.as_fd(), 0)?;
            epoll.add(told[mine].as_fd(), 1)?;
            let other = Arc::clone(&told[1 - mine]);
            let channel = Arc::clone(&channel);
            let either = Arc::new(OwnedFd::from(epoll));
            Ok(Self { channel, told: Arc::clone(&told[mine]), other, either })
        };
        Ok([half(0).map_err(os)?, half(1).map_err(os)?])
    }

    /// The descriptor to wait for, edge-triggered.
    pub fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.either)
    }
}

impl Event for SharedChannel {
    fn notify(&self) {
        self.channel.notify();
    }

    fn ack(&self) {
        // First what the other told: it told of an event that is taken already.
        os::drain(self.told.as_fd());
        if self.channel.ack() {
            os::signal(self.other.as_fd());
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
