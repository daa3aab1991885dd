//! The two directions of a virtio-net queue pair as ports of the switch (virtio 1.3, 5.1.6).
//!
//! [`VirtioIngress`] is the device half of the guest's transmit queue, [`VirtioEgress`] that of
//! its receive queue. Frames are taken where they lie in the guest's memory; the one copy is made
//! by the receiving port, straight from the sender's segments.
//!
//! Both stay in place while the guest comes and goes: they are *activated* with a ring and
//! *deactivated* again under their lock, by the control thread, between two bursts.

mod egress;
mod ingress;

pub use egress::VirtioEgress;
pub use ingress::VirtioIngress;

use std::sync::Arc;

use ring::virtq::{DeviceQueue, Malformed};
use shm::GuestMemory;
use shm::sync::{Ordering, fence};
use switch::port::Fault;
use switch::vnet::Offloads;

use crate::device::Call;

/// How frames look on the rings of one guest, from the negotiated features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Length of the virtio-net header: 12, or 10 for a legacy guest without MRG_RXBUF.
    pub hdr_len: u32,
    /// MRG_RXBUF: a frame may fill several receive buffers.
    pub mergeable: bool,
    /// What the guest may ask of us (CSUM, HOST_*).
    pub sends: Offloads,
    /// What the guest takes (GUEST_*).
    pub takes: Offloads,
    /// Longest frame the guest takes without GSO, link header and tag included.
    pub frame_len_max: u32,
}

/// Why a port stops whose memory went away.
const LOST: &str = "front end truncated its memory";

/// An activated ring.
struct Active {
    queue: DeviceQueue,
    memory: Arc<GuestMemory>,
    call: Option<Call>,
    /// How the front-end hears that the ring is broken (SET_VRING_ERR).
    err: Option<Call>,
    format: Format,
    /// The memory region that served last.
    hint: usize,
    /// Mappings lost in the whole process when none of ours was among them. 0 at first: memory may
    /// be lost before a ring is put to work in it.
    lost_seen: usize,
}

/// The place of a ring in a port: whether there is one, and whether it is enabled.
#[derive(Default)]
struct Ring {
    active: Option<Active>,
    enabled: bool,
}

impl Ring {
    fn activate(&mut self, active: Active) {
        assert!(self.active.is_none(), "a ring is activated once");
        self.active = Some(active);
    }

    /// Takes the ring away and returns where it stands (VRING_BASE).
    fn deactivate(&mut self) -> Option<u32> {
        self.active.take().map(|a| a.queue.base())
    }

    fn enable(&mut self, on: bool) {
        self.enabled = on;
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

    #[inline]
    fn is_up(&self) -> bool {
        self.enabled && self.active.is_some()
    }

    /// The ring, if it is up.
    #[inline]
    fn up(&mut self) -> Option<&mut Active> {
        self.active.as_mut().filter(|_| self.enabled)
    }

    fn disarm(&mut self) {
        if let Some(active) = &mut self.active {
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

    /// Asked before each burst of either direction: what is read of memory that went away is
    /// zeroes, and what is written reaches no one and takes memory of ours. One relaxed load
    /// unless some port lost memory since the last time.
    #[inline]
    fn check_lost(&mut self) -> Result<(), Fault> {
        let lost = shm::mappings_lost();
        if lost == self.lost_seen { Ok(()) } else { self.check_own(lost) }
    }

    #[cold]
    fn check_own(&mut self, lost: usize) -> Result<(), Fault> {
        // The mappings that were counted are known as lost.
        fence(Ordering::Acquire);
        if self.memory.is_lost() {
            // Not noted as seen: the next burst is refused as well, until the port is stopped.
            return Err(self.broken(LOST.into()));
        }
        self.lost_seen = lost;
        Ok(())
    }

    fn fault(&self, malformed: Malformed) -> Fault {
        // A ring in memory that went away reads as zeroes, which may look like anything.
        if self.memory.is_lost() {
            return self.broken(LOST.into());
        }
        self.broken(malformed.to_string())
    }

    fn broken(&self, why: String) -> Fault {
        self.err.iter().for_each(Call::signal);
        Fault(why)
    }

    /// Calls the guest if it wants that; returns how many calls were made.
    fn call(&mut self) -> u64 {
        if !self.queue.call_needed() {
            return 0;
        }
        let Some(call) = &self.call else { return 0 };
        call.signal();
        1
    }
}

#[cfg(test)]
mod tests;
