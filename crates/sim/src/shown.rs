//! Records each burst of an ingress queue in the ledger.

use std::sync::atomic::{AtomicU64, Ordering};

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};
use switch::time::Instant;

use crate::around::{Around, Forward, Hooks};
use crate::ledger::Ledger;
use crate::worker::Name;

/// Hooks that record the frames of an ingress queue.
pub(crate) struct Shown<'a> {
    name: Name,
    ledger: &'a mut Ledger,
    now: Instant,
    /// Number of frames shown or read directly.
    frames: &'a AtomicU64,
}

/// Wraps a queue for one burst, at `now`. Adds the frames shown to `frames`.
pub(crate) fn shown<'a>(
    queue: &'a mut dyn Ingress,
    name: Name,
    ledger: &'a mut Ledger,
    now: Instant,
    frames: &'a AtomicU64,
) -> Around<&'a mut dyn Ingress, Shown<'a>> {
    Around { queue, hooks: Shown { name, ledger, now, frames } }
}

impl Hooks for Shown<'_> {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        let Self { name: (port, index), ledger, now: at, frames } = self;
        queue.burst(max, now, burst, &mut |burst| {
            ledger.sync_before(*at);
            frames.fetch_add(burst.frames.len() as u64, Ordering::Relaxed);
            let shown = ledger.begin_burst(*port, *index, burst);
            forward(burst);
            ledger.end_burst(&shown, *at);
        })
    }

    fn read_into(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        to: &mut dyn Direct,
    ) -> Result<usize, Fault> {
        self.ledger.sync_before(self.now);
        let before = self.ledger.begin_direct();
        let done = queue.read_into(max, to);
        let direct = self.ledger.end_direct(self.name, &before, self.now);
        self.frames.fetch_add(direct, Ordering::Relaxed);
        done
    }
}
