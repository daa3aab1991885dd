//! An ingress queue, each burst of which goes into the books.

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};

use crate::ledger::Ledger;
use crate::worker::Name;

pub(crate) struct Shown<'a> {
    queue: &'a mut dyn Ingress,
    name: Name,
    ledger: &'a mut Ledger,
    now_ns: u64,
    /// Frames that were shown.
    pub frames: u64,
}

impl<'a> Shown<'a> {
    /// For one burst, at `now_ns`.
    pub fn new(
        queue: &'a mut dyn Ingress,
        name: Name,
        ledger: &'a mut Ledger,
        now_ns: u64,
    ) -> Self {
        Self { queue, name, ledger, now_ns, frames: 0 }
    }
}

impl Ingress for Shown<'_> {
    fn burst(
        &mut self,
        max: usize,
        now_ns: u64,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Self { queue, name: (port, index), ledger, now_ns: at_ns, frames } = self;
        queue.burst(max, now_ns, burst, &mut |burst| {
            // What was held may have been delivered before.
            ledger.sync(None, *at_ns);
            *frames += burst.frames.len() as u64;
            let shown = ledger.before(*port, *index, burst);
            forward(burst);
            ledger.after(&shown, *at_ns);
        })
    }

    fn goes_direct(&self) -> bool {
        self.queue.goes_direct()
    }

    fn burst_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        self.queue.burst_into(max, to)
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
    }

    fn due(&self) -> Option<u64> {
        self.queue.due()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
