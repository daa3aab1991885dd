//! Stalled destinations: those without room for so long that the operator is informed.
//!
//! It drops no further frames; it is only reported, once when it begins and once when it ends. It
//! has no cost while frames fit: it is checked only when a destination was full, or kicks.

use std::sync::atomic::Ordering;

use super::{EgressQueue, Forwarder, LockedQueue, PortEvent};
use crate::port::QueueId;
use crate::time::{Instant, Ns};

/// Time without room after which a destination is stalled (netback: `rx_stall_timeout_msecs`).
pub const STALLED_AFTER: Ns = Ns::from_secs(60);

impl EgressQueue {
    /// Time since a frame last had room, if at least [`STALLED_AFTER`] and frames kept arriving.
    pub fn stalled_for(&self, now: Instant) -> Option<Ns> {
        let since = Instant::from_ns(self.full_ns.load(Ordering::Relaxed));
        self.stalled.load(Ordering::Relaxed).then(|| now - since)
    }

    /// Checks for recovery when its peer kicks. True: it was stalled, and has room again.
    pub fn end_stall(&self) -> bool {
        if !self.stalled.load(Ordering::Relaxed) || self.lock().arm() {
            return false;
        }
        self.full_ns.store(0, Ordering::Relaxed);
        self.stalled.swap(false, Ordering::Relaxed)
    }

    /// Resets the state when the peer changes or disconnects.
    pub(super) fn reset_full(&self) {
        self.full_ns.store(0, Ordering::Relaxed);
        self.stalled.store(false, Ordering::Relaxed);
    }
}

impl Forwarder {
    /// Records that a destination had no room for a frame. Under the queue's lock.
    #[cold]
    pub(super) fn record_full(&mut self, to: &mut LockedQueue<'_>, now: Instant) {
        let egress = to.egress;
        let since = egress.full_ns.load(Ordering::Relaxed);
        let frames = egress.stats.frames.get();
        if since == 0 || egress.full_at.load(Ordering::Relaxed) != frames {
            egress.full_ns.store(now.ns().max(1), Ordering::Relaxed);
            egress.full_at.store(frames, Ordering::Relaxed);
            return;
        }
        if now - Instant::from_ns(since) < STALLED_AFTER || egress.stalled.load(Ordering::Relaxed) {
            return;
        }
        // Its kick ends the stall, even if no frame arrives. A destination that does not kick
        // for room is never full here, and is not stalled.
        if to.queue.arm() {
            if !egress.stalled.swap(true, Ordering::Relaxed) {
                let QueueId { port, queue } = to.id;
                self.findings.events.push(PortEvent::Stalled { port, queue, begins: true });
            }
        } else {
            egress.full_ns.store(now.ns(), Ordering::Relaxed);
            // Frames of other workers may fit, too, and no further kick wakes these.
            self.findings.wake |= egress.waiters.swap(0, Ordering::AcqRel);
        }
    }

    /// Ends the stall of a destination that took a frame.
    #[cold]
    pub(super) fn end_stall(&mut self, at: QueueId, egress: &EgressQueue) {
        let is_fed = egress.stats.frames.get() != egress.full_at.load(Ordering::Relaxed);
        if !is_fed {
            // It only rejected a frame that it never accepts.
            return;
        }
        if egress.stalled.swap(false, Ordering::Relaxed) {
            let QueueId { port, queue } = at;
            self.findings.events.push(PortEvent::Stalled { port, queue, begins: false });
        }
    }
}
