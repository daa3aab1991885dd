//! A wrapper of ingress queues, with hooks that observe or alter them.

use std::ops::DerefMut;

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};
use switch::time::Instant;

/// Destination of a burst.
pub(crate) type Forward<'f> = dyn FnMut(&mut Burst<'_>) + 'f;

/// Hooks of an ingress queue. By default each one calls the queue's own method.
pub(crate) trait Hooks: Send {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        queue.burst(max, now, burst, forward)
    }

    fn read_into(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        to: &mut dyn Direct,
    ) -> Result<usize, Fault> {
        queue.read_into(max, to)
    }

    fn arm(&mut self, queue: &mut (impl Ingress + ?Sized)) -> bool {
        queue.arm()
    }

    fn due(&self, queue: &(impl Ingress + ?Sized)) -> Option<Instant> {
        queue.due()
    }
}

/// An ingress queue with hooks.
pub(crate) struct Around<Q, H> {
    pub queue: Q,
    pub hooks: H,
}

impl<Q, H> Ingress for Around<Q, H>
where
    Q: DerefMut<Target: Ingress> + Send,
    H: Hooks,
{
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        self.hooks.burst(&mut *self.queue, max, now, burst, forward)
    }

    fn supports_direct(&self) -> bool {
        self.queue.supports_direct()
    }

    fn read_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        self.hooks.read_into(&mut *self.queue, max, to)
    }

    fn arm(&mut self) -> bool {
        self.hooks.arm(&mut *self.queue)
    }

    fn due(&self) -> Option<Instant> {
        self.hooks.due(&*self.queue)
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
