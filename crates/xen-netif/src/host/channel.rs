//! Our end of an event channel.
//!
//! Two threads may wait on a channel shared by both rings of a queue, and an event consumed by one
//! is lost to the other. So each thread has a [`SharedChannel`], which forwards events to the
//! other:
//!
//! ```text
//!   channel ──┬─▶ half of tx ── consumed ──┐       each waits for the channel and for events
//!             └─▶ half of rx ◀──── signal ─┘       of the other half, and acks both
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::xen::sys as xen;
use super::{Bound, HostError};
use os::Epoll;

/// The event channel of a ring, as used by its port.
pub trait Event: Send + Sync {
    /// Sends an event to the peer.
    fn notify(&self);
    /// Consumes pending events, so that the next one is delivered.
    fn ack(&self);
}

/// Our end of an event channel. The peer does not see when events are consumed.
pub struct Channel {
    /// Becomes readable when an event arrives.
    fd: Arc<OwnedFd>,
    end: End,
    /// Whether it is not unbound on drop.
    lent: bool,
    /// Called on drop.
    closed: Option<Box<dyn FnOnce() + Send + Sync>>,
}

enum End {
    /// The same descriptor, and its port.
    Xen(u32),
    /// The eventfd that the other end reads.
    Eventfd(Arc<OwnedFd>),
}

impl Channel {
    /// A port on its own evtchn descriptor.
    pub(super) fn xen(fd: OwnedFd, port: u32) -> Self {
        Self { fd: Arc::new(fd), end: End::Xen(port), lent: false, closed: None }
    }

    /// A port that another process has bound, too.
    pub(super) fn lent(bound: Bound) -> Self {
        let (fd, port) = bound;
        Self { fd, end: End::Xen(port), lent: true, closed: None }
    }

    /// Two eventfds: one that we read, and one that the peer reads. The peer has both, and may make
    /// them blocking: no call here blocks then.
    pub fn eventfds(ours: Arc<OwnedFd>, theirs: Arc<OwnedFd>) -> Self {
        Self { fd: ours, end: End::Eventfd(theirs), lent: false, closed: None }
    }

    /// Has `then` called on drop.
    #[must_use]
    pub fn on_close(mut self, then: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.closed = Some(Box::new(then));
        self
    }

    /// The descriptor to wait for, edge-triggered. Only [`ack`](Self::ack) reads it.
    pub fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// How another process can use it; `None`: it has to bind it again.
    pub fn bound(&self) -> Option<Bound> {
        match self.end {
            End::Xen(port) => Some((self.fd(), port)),
            End::Eventfd(_) => None,
        }
    }

    /// Sends an event, with one system call. A lost peer is reported by the store, not here.
    #[inline]
    pub fn notify(&self) {
        match &self.end {
            End::Xen(port) => drop(xen::ioctl::notify(self.fd.as_fd(), *port)),
            End::Eventfd(peer) => os::signal_event(peer.as_fd()),
        }
    }

    /// Consumes a pending event, so that the next one is delivered. Returns whether there was one.
    /// Must be called before the ring is checked, not after: an event in between would be lost.
    pub fn ack(&self) -> bool {
        match &self.end {
            End::Xen(port) => xen::evtchn_ack(self.fd.as_fd(), *port),
            End::Eventfd(_) => os::drain_event(self.fd.as_fd()),
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
    /// Signalled when the other half consumed an event.
    signalled: Arc<OwnedFd>,
    /// Signals the other half.
    other: Arc<OwnedFd>,
    /// Waits for the channel and for `signalled`.
    either: Arc<OwnedFd>,
}

impl SharedChannel {
    /// Creates both ends.
    ///
    /// # Errors
    /// [`HostError::Os`]: out of descriptors.
    pub fn pair(channel: Channel) -> Result<[Self; 2], HostError> {
        let os = |error| HostError::Os { at: "channel".into(), what: "epoll", error };
        let channel = Arc::new(channel);
        let signalled =
            [Arc::new(os::eventfd().map_err(os)?), Arc::new(os::eventfd().map_err(os)?)];
        let half = |mine: usize| {
            let epoll = Epoll::new()?;
            epoll.add(channel.fd.as_fd(), 0)?;
            epoll.add(signalled[mine].as_fd(), 1)?;
            let other = Arc::clone(&signalled[1 - mine]);
            let channel = Arc::clone(&channel);
            let either = Arc::new(OwnedFd::from(epoll));
            Ok(Self { channel, signalled: Arc::clone(&signalled[mine]), other, either })
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
        // Signals of the other half first: their events are consumed already.
        os::drain(self.signalled.as_fd());
        if self.channel.ack() {
            os::signal(self.other.as_fd());
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let (End::Xen(port), false) = (&self.end, self.lent) {
            // Closing may not suffice: other processes may hold the descriptor. Errors cannot be
            // handled.
            let _ = xen::ioctl::unbind(self.fd.as_fd(), *port);
        }
        if let Some(closed) = self.closed.take() {
            closed();
        }
    }
}
