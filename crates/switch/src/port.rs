//! What a port must do.
//!
//! A port has ingress queues (frames from the guest into the switch) and egress queues (frames
//! from the switch to the guest). Each is used by one worker at a time; the switch locks egress
//! queues once per group of frames. The calls are virtual, once per burst, never per frame.

use std::fmt;
use std::sync::Arc;

use crate::direct::Direct;
use crate::frame::Burst;
use crate::vnet::{Offloads, VnetHdr};

/// Receives frames from a peer.
pub trait Ingress: Send {
    /// Takes up to `max` frames, shows them to `forward`, and gives their buffers back to the
    /// sender, in order: `forward` delivers, copies or drops each of them, or leaves the last ones
    /// ([`Burst::left`]), which are shown again. Notifies the peer at most once. `burst` is
    /// scratch, given back empty. Returns how many frames were shown; at least `max` if it stopped
    /// before
    /// for their length ([`BURST_BYTES`](crate::frame::BURST_BYTES)) and there are more.
    ///
    /// # Errors
    /// [`Fault`]: the peer broke its protocol; the port is to be stopped.
    fn burst(
        &mut self,
        max: usize,
        now_ns: u64,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault>;

    /// Whether new frames can be read straight into buffers of the one port they all go to: a
    /// cross-connect then calls [`burst_into`](Self::burst_into) before each `burst`.
    fn goes_direct(&self) -> bool {
        false
    }

    /// Reads up to `max` frames straight into the buffers of `to`; returns how many it accepted.
    /// What else came is shown by the next `burst`, which reads no more if this did.
    ///
    /// # Errors
    /// [`Fault`] of `to`, not of this port: faults of this port are told by `burst`.
    fn burst_into(&mut self, _max: usize, _to: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    /// Asks the peer to notify and re-checks. True: nothing to do, sleeping is safe. False: there
    /// is work.
    fn arm(&mut self) -> bool;

    /// Once [`arm`](Self::arm) was true: when there is work that no one will tell of, such as what
    /// may not be sent yet; in the ns that bursts are given.
    fn due(&self) -> Option<u64> {
        None
    }

    /// Asks the peer for no notifications: the queue is being polled.
    fn disarm(&mut self);
}

/// Delivers frames to a peer.
pub trait Egress: Send {
    /// What the peer takes as it is; anything else must be resolved in software before.
    fn offloads(&self) -> Offloads;

    /// Whether frames may lie in granted memory (see [`shm::Copies`]). Who says so copies a burst's
    /// frames with one call, and [tells](Burst::mark_unreadable) of those it could not read; to
    /// others frames are shown in private memory.
    fn takes_granted(&self) -> bool {
        false
    }

    /// Copies the frames `picks` (indices into `burst.frames`) to the peer, in order, headers
    /// from the private copies. Stops at the first that does not fit now. Returns how many were
    /// dealt with: delivered, or dropped and counted because the peer could never take them.
    /// Nothing is visible before [`flush`](Self::flush), nor told before
    /// [`notify`](Self::notify).
    ///
    /// # Errors
    /// [`Fault`]: the peer broke its protocol; the port is to be stopped. None of `picks` was dealt
    /// with then: a fault behind frames that were is told at the next call.
    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault>;

    /// Like `put` for one frame made on the way: `head` is private, `body` follows it, and lies
    /// in the sender's memory. False when it does not fit now.
    ///
    /// # Errors
    /// [`Fault`], as for `put`.
    fn put_made(
        &mut self,
        head: &[u8],
        body: &[shm::Seg<'_>],
        hdr: &VnetHdr,
    ) -> Result<bool, Fault>;

    /// How many frames of `len` bytes certainly fit now, at most `limit`; asked before a frame is
    /// segmented, so that its segments are delivered together or not at all. `limit` also when
    /// the port already sees as much room as it ever can: to wait for more would be in vain, and
    /// what does not fit is dropped.
    ///
    /// # Errors
    /// [`Fault`], as for `put`.
    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault>;

    /// Its buffers, to be read into; `None`: frames can only be put.
    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    /// How the peer wants frames spread over its port's queues; asked after `put`, of ports with
    /// several. `None`: as the switch likes.
    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    /// Makes what was put visible to the peer: once.
    fn flush(&mut self);

    /// Notifies the peer of what was made visible since the last time, if it wants that.
    fn notify(&mut self) {}

    /// Asks the peer to notify when it has room, and looks a last time. True: still full, for all
    /// that did not fit since this last was false.
    fn arm(&mut self) -> bool;

    /// The peer notified: asks for no more, until the next [`arm`](Self::arm). Not earlier, and
    /// before those who wait are woken, or one would sleep on.
    fn disarm(&mut self) {}
}

/// How a peer wants frames spread over the egress queues of its port. One that wants something else
/// by now gives another of these.
pub trait Steer: Send + Sync {
    /// The queue, below `queues`, for a frame whose private head this is.
    fn queue(&self, head: &[u8], queues: u16) -> u16;
}

/// A peer broke its protocol, or went away. Its port stops; no one else notices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(
    /// What was wrong, for one line of the log.
    pub String,
);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}
