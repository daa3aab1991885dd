//! Interface of ports.
//!
//! A port has ingress queues (frames from the guest into the switch) and egress queues (frames
//! from the switch to the guest). Each is used by one worker at a time; the switch locks egress
//! queues once per group of frames. The calls are virtual, once per burst, never per frame.
//!
//! No method has a default: a queue that wraps another one must forward all of them.

use std::fmt;
use std::sync::Arc;

use crate::direct::Direct;
use crate::fdb::PortId;
use crate::frame::Burst;
use crate::time::Instant;
use crate::vnet::{Offloads, VnetHdr};

/// An egress queue of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueId {
    /// The port.
    pub port: PortId,
    /// The index of the queue in the port.
    pub queue: u16,
}

/// Receives frames from a peer.
pub trait Ingress: Send {
    /// Takes up to `max` frames, passes them to `forward`, and returns their buffers to the sender,
    /// in order: `forward` delivers, copies or drops each of them, or leaves the last ones
    /// ([`Burst::left`]), which are passed again. Notifies the peer at most once. `burst` is
    /// scratch, returned empty. Returns the number of frames passed; at least `max` if their length
    /// ended the burst ([`BURST_BYTES`](crate::frame::BURST_BYTES)) and there are more.
    ///
    /// # Errors
    /// [`Fault`]: the peer broke its protocol; the port must be stopped.
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault>;

    /// Whether new frames can be read directly into buffers of the one port they all go to: a
    /// cross-connect then calls [`read_into`](Self::read_into) before each `burst`.
    fn supports_direct(&self) -> bool;

    /// Reads up to `max` frames directly into the buffers of `to`; returns the number it accepted.
    /// The next `burst` passes the other frames read, and reads no more if there are any.
    ///
    /// # Errors
    /// [`Fault`] of `to`, not of this port: `burst` returns faults of this port.
    fn read_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault>;

    /// Requests notifications and re-checks. True: nothing to do, sleeping is safe. False: there is
    /// work.
    fn arm(&mut self) -> bool;

    /// After [`arm`](Self::arm) was true: the time of work without a notification, such as frames
    /// that may not be sent yet; on the clock passed to bursts.
    fn due(&self) -> Option<Instant>;

    /// Suppresses notifications: the queue is being polled.
    fn disarm(&mut self);
}

/// Delivers frames to a peer.
pub trait Egress: Send {
    /// Offloads that the peer accepts; others must be resolved in software before.
    fn offloads(&self) -> Offloads;

    /// Whether frames may be in granted memory (see [`shm::Copies`]). Such a port copies a burst's
    /// frames with one host call, and [marks](Burst::mark_unreadable) those it could not read;
    /// others get frames in private memory.
    fn accepts_granted(&self) -> bool;

    /// Whether frames' heads may be [starts](Burst::snapshot_starts): not for a port for which each
    /// part of a frame costs more than a copy does.
    fn accepts_starts(&self) -> bool {
        false
    }

    /// Copies the frames `picks` (indices into `burst.frames`) to the peer, in order, headers from
    /// the private copies. Stops at the first that does not fit now. Returns the number handled:
    /// delivered, or dropped and counted because the peer could never accept them. Nothing is
    /// visible before [`flush`](Self::flush), nor notified before [`notify`](Self::notify).
    ///
    /// # Errors
    /// [`Fault`]: the peer broke its protocol; the port must be stopped. None of `picks` was
    /// handled then: a fault after handled frames is returned by the next call.
    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault>;

    /// As `put`, for one frame made by the switch: `head` is private, `body` follows it, and is in
    /// the sender's memory. False if it does not fit now.
    ///
    /// # Errors
    /// [`Fault`], as for `put`.
    fn put_parts(
        &mut self,
        head: &[u8],
        body: &[shm::Seg<'_>],
        hdr: &VnetHdr,
    ) -> Result<bool, Fault>;

    /// Number of frames of `len` bytes that certainly fit now, at most `limit`. Also `limit` if the
    /// port already has its maximum room: frames that do not fit then never will, and are dropped.
    ///
    /// # Errors
    /// [`Fault`], as for `put`.
    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault>;

    /// Its buffers for direct reads; `None`: not supported.
    fn direct(&mut self) -> Option<&mut dyn Direct>;

    /// How the peer wants frames spread over its port's queues; queried after `put`, on ports with
    /// several. `None`: the switch decides.
    fn steer(&self) -> Option<Arc<dyn Steer>>;

    /// Makes the frames put visible to the peer, in one publication.
    fn flush(&mut self);

    /// Notifies the peer of frames made visible since the last call, if it wants that.
    fn notify(&mut self);

    /// Requests a notification of room, and re-checks. True: still full, for all frames that did
    /// not fit since this last returned false.
    fn arm(&mut self) -> bool;

    /// Suppresses notifications after the peer notified, until the next [`arm`](Self::arm). Call it
    /// before waiting workers are woken, or one could miss its wake-up.
    fn disarm(&mut self);
}

/// A peer's choice of egress queues for the frames to its port. A change is a new object.
pub trait Steer: Send + Sync {
    /// Selects the queue, below `queues`, for a frame with this private head.
    fn queue(&self, head: &[u8], queues: u16) -> u16;
}

/// A protocol violation or disconnect of a peer. Its port stops; other ports are unaffected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(
    /// The reason, for one line of the log.
    pub String,
);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}
