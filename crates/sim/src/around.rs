//! An ingress queue, and someone who sees or alters what it does.

use std::ops::DerefMut;

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};

/// Where a burst goes.
pub(crate) type Forward<'f> = dyn FnMut(&mut Burst<'_>) + 'f;

/// What is done about a queue; by default what it does by itself.
pub(crate) trait Hooks: Send {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        (max, now_ns): (usize, u64),
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        queue.burst(max, now_ns, burst, forward)
    }

    fn burst_into(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        to: &mut dyn Direct,
    ) -> Result<usize, Fault> {
        queue.burst_into(max, to)
    }

    fn arm(&mut self, queue: &mut (impl Ingress + ?Sized)) -> bool {
        queue.arm()
    }

    fn due(&self, queue: &(impl Ingress + ?Sized)) -> Option<u64> {
        queue.due()
    }
}

/// A queue with hooks.
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
        now_ns: u64,
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        self.hooks.burst(&mut *self.queue, (max, now_ns), burst, forward)
    }

    fn goes_direct(&self) -> bool {
        self.queue.goes_direct()
    }

    fn burst_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        self.hooks.burst_into(&mut *self.queue, max, to)
    }

    fn arm(&mut self) -> bool {
        self.hooks.arm(&mut *self.queue)
    }

    fn due(&self) -> Option<u64> {
        self.hooks.due(&*self.queue)
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
