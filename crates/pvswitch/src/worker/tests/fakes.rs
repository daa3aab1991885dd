//! Queues of fake guests: each defines what it does differently from a null port.

use std::sync::Arc;

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};

/// A guest's transmit queue.
pub trait Transmits: Send {
    /// As [`Ingress::burst`].
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault>;

    /// As [`Ingress::arm`].
    fn arm(&mut self) -> bool {
        true
    }

    /// As [`Ingress::due`].
    fn due(&self) -> Option<Instant> {
        None
    }
}

/// A guest's receive queue.
pub trait Receives: Send {
    /// As [`Egress::put`].
    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault>;

    /// As [`Egress::room`].
    fn room(&mut self, limit: usize) -> usize {
        limit
    }

    /// As [`Egress::arm`].
    fn arm(&mut self) -> bool {
        false
    }

    /// As [`Egress::disarm`].
    fn disarm(&mut self) {}
}

/// A port's queue of one of both.
#[derive(Default)]
pub struct Fake<T>(pub T);

impl<T: Transmits> Ingress for Fake<T> {
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        self.0.burst(max, now, burst, forward)
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        self.0.arm()
    }

    fn due(&self) -> Option<Instant> {
        self.0.due()
    }

    fn disarm(&mut self) {}
}

impl<T: Receives> Egress for Fake<T> {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.0.put(burst, picks)
    }

    fn put_parts(&mut self, _: &[u8], _: &[shm::Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        Ok(true)
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        Ok(self.0.room(limit))
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {}

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        self.0.arm()
    }

    fn disarm(&mut self) {
        self.0.disarm();
    }
}
