//! Destinations that have had no room for so long that an operator should know.
//!
//! Nothing is dropped for it that was not dropped before; it is only reported, once when it begins
//! and once when it ends. It costs those whose frames fit nothing: it is checked where a
//! destination was full, or kicks.

use std::sync::atomic::Ordering;

use super::{EgressQueue, Forwarder};
use crate::fdb::PortId;
use crate::port::Egress;

/// As the kernel's netback has it (`rx_stall_timeout_msecs`), in ns.
pub const STARVED_NS: u64 = 60_000_000_000;

impl EgressQueue {
    /// How long no frame has found room, if that is long, and frames came all the same.
    pub fn starved_ns(&self, now_ns: u64) -> Option<u64> {
        let since = self.full_ns.load(Ordering::Relaxed);
        self.starved.load(Ordering::Relaxed).then(|| now_ns.saturating_sub(since))
    }

    /// To be asked when its peer kicks. True: it starved, and has room again.
    pub fn recovers(&self) -> bool {
        if !self.starved.load(Ordering::Relaxed) || self.lock().arm() {
            return false;
        }
        self.full_ns.store(0, Ordering::Relaxed);
        self.starved.swap(false, Ordering::Relaxed)
    }

    /// There is another peer, or none.
    pub(super) fn forget_full(&self) {
        self.full_ns.store(0, Ordering::Relaxed);
        self.starved.store(false, Ordering::Relaxed);
    }
}

impl Forwarder {
    /// A destination had no room for a frame. Under the queue's lock.
    #[cold]
    pub(super) fn found_full(
        &mut self,
        at: (PortId, u16),
        egress: &EgressQueue,
        queue: &mut dyn Egress,
        now_ns: u64,
    ) {
        let since = egress.full_ns.load(Ordering::Relaxed);
        let frames = egress.stats.frames.get();
        if since == 0 || egress.full_at.load(Ordering::Relaxed) != frames {
            egress.full_ns.store(now_ns.max(1), Ordering::Relaxed);
            egress.full_at.store(frames, Ordering::Relaxed);
            return;
        }
        if now_ns.saturating_sub(since) < STARVED_NS || egress.starved.load(Ordering::Relaxed) {
            return;
        }
        // Its kick ends it, though no frame may come by then. One that does not kick for room is
        // never full here, and does not starve.
        if queue.arm() {
            if !egress.starved.swap(true, Ordering::Relaxed) {
                self.starved.push((at.0, at.1, true));
            }
        } else {
            egress.full_ns.store(now_ns, Ordering::Relaxed);
            // Others' frames may fit, too, and no one will tell them again.
            self.woken |= egress.waiters.swap(0, Ordering::AcqRel);
        }
    }

    /// A destination that starved took a frame.
    #[cold]
    pub(super) fn took_again(&mut self, at: (PortId, u16), egress: &EgressQueue) {
        let is_fed = egress.stats.frames.get() != egress.full_at.load(Ordering::Relaxed);
        if !is_fed {
            // All it did was to refuse what it does not want at all.
            return;
        }
        if egress.starved.swap(false, Ordering::Relaxed) {
            self.starved.push((at.0, at.1, false));
        }
    }
}
