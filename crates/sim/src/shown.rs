//! Each burst of an ingress queue goes into the books.

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};

use crate::around::{Around, Forward, Hooks};
use crate::ledger::Ledger;
use crate::worker::Name;

pub(crate) struct Shown<'a> {
    name: Name,
    ledger: &'a mut Ledger,
    now_ns: u64,
    /// Frames that were shown, or went directly.
    pub frames: u64,
}

/// A queue for one burst, at `now_ns`.
pub(crate) fn shown<'a>(
    queue: &'a mut dyn Ingress,
    name: Name,
    ledger: &'a mut Ledger,
    now_ns: u64,
) -> Around<&'a mut dyn Ingress, Shown<'a>> {
    Around { queue, hooks: Shown { name, ledger, now_ns, frames: 0 } }
}

impl Hooks for Shown<'_> {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        (max, now_ns): (usize, u64),
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        let Self { name: (port, index), ledger, now_ns: at_ns, frames } = self;
        queue.burst(max, now_ns, burst, &mut |burst| {
            // What was held may have been delivered before.
            ledger.sync(None, *at_ns);
            *frames += burst.frames.len() as u64;
            let shown = ledger.before(*port, *index, burst);
            forward(burst);
            ledger.after(&shown, *at_ns);
        })
    }

    fn burst_into(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        to: &mut dyn Direct,
    ) -> Result<usize, Fault> {
        let (port, index) = self.name;
        self.ledger.sync(None, self.now_ns);
        let before = self.ledger.before_direct();
        let done = queue.burst_into(max, to);
        self.frames += self.ledger.after_direct((port, index), before, self.now_ns);
        done
    }
}
