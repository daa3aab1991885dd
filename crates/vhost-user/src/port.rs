//! The two directions of a virtio-net queue pair as ports of the switch (virtio 1.3, 5.1.6).
//!
//! [`VirtioIngress`] is the device half of the guest's transmit queue, [`VirtioEgress`] that of its
//! receive queue. Frames are used in place in the guest's memory; the one copy is made by the
//! receiving port, directly from the sender's segments.
//!
//! Both persist while the guest connects and disconnects: the control thread *activates* them with
//! a ring and *deactivates* them, under their lock, between two bursts.

mod egress;
mod ingress;

pub use egress::VirtioEgress;
pub use ingress::VirtioIngress;

use std::sync::Arc;

use ring::virtq::{Chain, DeviceQueue, Malformed, RingLog, Taken};
use shm::sync::{Ordering, fence};
use shm::{GuestMemory, Marks};
use switch::port::Fault;
use switch::vnet::Offloads;

use crate::device::Call;

/// Frame format on the rings of one guest, from the negotiated features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Length of the virtio-net header: 12, or 10 for a legacy guest without MRG_RXBUF.
    pub hdr_len: u32,
    /// MRG_RXBUF: a frame may fill several receive buffers.
    pub mergeable: bool,
    /// Offloads that the guest may request of us (CSUM, HOST_*).
    pub sends: Offloads,
    /// Offloads that the guest accepts (GUEST_*).
    pub takes: Offloads,
    /// Longest frame that the guest accepts without GSO, in bytes, with link header and tag.
    pub frame_len_max: u32,
}

/// Reason to stop a port whose memory was truncated.
const LOST: &str = "front end truncated its memory";
/// The same for the dirty log.
const LOG_LOST: &str = "front end truncated its dirty log";

/// An activated ring.
struct Active {
    queue: DeviceQueue,
    memory: Arc<GuestMemory>,
    call: Option<Call>,
    /// Notification that the ring is broken (SET_VRING_ERR).
    err: Option<Call>,
    format: Format,
    /// Index of the last memory region used.
    hint: usize,
    /// Mappings lost in the process at the last check of ours. 0 at first: memory may be lost
    /// before a ring is activated in it.
    lost_seen: usize,
}

/// Slot for a ring in a port: the ring, if one is active, and whether it is enabled.
#[derive(Default)]
pub struct Ring {
    active: Option<Active>,
    enabled: bool,
}

/// A queue of either direction, as the control thread sets it up: under its lock, between two
/// bursts.
pub trait GuestQueue {
    /// The slot for its ring.
    fn ring(&self) -> &Ring;

    /// The same.
    fn ring_mut(&mut self) -> &mut Ring;

    /// Activates a ring, which is disabled until [`enable`](Self::enable).
    fn activate(
        &mut self,
        queue: DeviceQueue,
        memory: Arc<GuestMemory>,
        call: Option<Call>,
        format: Format,
    );

    /// Position of the ring (VRING_BASE). Chains that are taken and not used are returned to it:
    /// they are taken again.
    fn position(&mut self) -> Option<u32>;

    /// Removes the ring and returns its position.
    fn deactivate(&mut self) -> Option<u32> {
        let base = self.position();
        self.ring_mut().deactivate();
        base
    }

    /// SET_VRING_ENABLE. A disabled transmit ring is not read; frames for a disabled receive ring
    /// are dropped and counted.
    fn enable(&mut self, on: bool) {
        self.ring_mut().enabled = on;
    }

    /// Whether the guest has a running, enabled ring here.
    #[inline]
    fn is_up(&self) -> bool {
        self.ring().is_up()
    }

    /// Replaces the call descriptor.
    fn set_call(&mut self, call: Option<Call>) {
        self.ring_mut().set_call(call);
    }

    /// Replaces the error descriptor (SET_VRING_ERR).
    fn set_err(&mut self, err: Option<Call>) {
        self.ring_mut().set_err(err);
    }

    /// Logs writes to the ring and to buffers in another log, or no longer.
    fn set_log(&mut self, log: Option<RingLog>) {
        self.ring_mut().set_log(log);
    }
}

impl Ring {
    fn activate(&mut self, active: Active) {
        assert!(self.active.is_none(), "a ring is activated once");
        self.active = Some(active);
    }

    /// Removes the ring. The next one is disabled until it is enabled.
    fn deactivate(&mut self) {
        self.enabled = false;
        if let Some(mut active) = self.active.take() {
            // The front-end reads the log now.
            active.queue.set_log(None);
        }
    }

    fn set_call(&mut self, call: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.call = call;
            // The guest may have missed calls while there was no descriptor.
            active.call.iter().for_each(Call::signal);
        }
    }

    fn set_err(&mut self, err: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.err = err;
        }
    }

    fn set_log(&mut self, log: Option<RingLog>) {
        if let Some(active) = &mut self.active {
            active.queue.set_log(log);
        }
    }

    #[inline]
    fn is_up(&self) -> bool {
        self.enabled && self.active.is_some()
    }

    /// The ring, if it is up.
    #[inline]
    fn up(&mut self) -> Option<&mut Active> {
        self.active.as_mut().filter(|_| self.enabled)
    }

    /// Not while it is disabled: that writes to the guest's memory.
    fn disarm(&mut self) {
        if let Some(active) = self.up() {
            active.queue.disarm();
        }
    }
}

impl Active {
    fn new(
        queue: DeviceQueue,
        memory: Arc<GuestMemory>,
        call: Option<Call>,
        format: Format,
    ) -> Self {
        Self { queue, memory, call, err: None, format, hint: 0, lost_seen: 0 }
    }

    /// Checks, before each burst in either direction, that memory is not lost, nor the dirty log of
    /// a guest that migrates: reads of lost memory return zeroes, and writes are lost and use our
    /// memory. One relaxed load unless some port lost memory since the last check.
    #[inline]
    fn check_lost(&mut self) -> Result<(), Fault> {
        let lost = shm::mappings_lost();
        if lost == self.lost_seen { Ok(()) } else { self.check_own(lost) }
    }

    #[cold]
    fn check_own(&mut self, lost: usize) -> Result<(), Fault> {
        // The counted mappings are marked lost.
        fence(Ordering::Acquire);
        if let Some(why) = self.lost() {
            // `lost` is not stored: the next bursts fail as well, until the port is stopped.
            return Err(self.broken(why.into()));
        }
        self.lost_seen = lost;
        Ok(())
    }

    /// Which memory was lost, if any.
    fn lost(&self) -> Option<&'static str> {
        if self.memory.is_lost() {
            return Some(LOST);
        }
        self.queue.log_is_lost().then_some(LOG_LOST)
    }

    fn fault(&self, malformed: Malformed) -> Fault {
        // A ring in lost memory reads as zeroes, which may be reported as any fault.
        match self.lost() {
            Some(why) => self.broken(why.into()),
            None => self.broken(malformed.to_string()),
        }
    }

    fn broken(&self, why: String) -> Fault {
        self.err.iter().for_each(Call::signal);
        Fault(why)
    }

    /// Calls the guest if it wants that; returns the number of calls made.
    fn call(&mut self) -> u64 {
        if !self.queue.call_needed() {
            return 0;
        }
        let Some(call) = &self.call else { return 0 };
        call.signal();
        1
    }
}

/// Marks the first `bytes` of these chains, which were written. The addresses are the guest's:
/// marks outside its memory harm only itself.
fn mark_written(marks: &mut Marks, taken: &Taken, chains: &[Chain], bytes: u64) {
    let mut left = bytes;
    for buf in chains.iter().flat_map(|chain| taken.writes(chain)) {
        let n = left.min(buf.len.into());
        marks.mark(buf.addr, n);
        left -= n;
    }
}

#[cfg(test)]
mod tests;
