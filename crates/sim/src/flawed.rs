//! Defects injected into the product's ports, to test the oracles: each must be found.

use std::sync::Arc;

use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::vnet::{Offloads, VnetHdr};

use crate::around::Hooks;

/// An injected defect, which the simulation must find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Arms an ingress queue without a re-check.
    NeverRechecks,
    /// Sleeps without arming an ingress queue.
    NeverArms,
    /// Arms a full egress queue without a re-check.
    NeverRechecksRoom,
    /// Does not retry full destinations while busy.
    BusyForgetsHeld,
    /// Omits some calls.
    ForgetsCalls,
    /// Delivers the frames of a group in the wrong order.
    Reorders,
    /// Reports a frame as delivered that was not.
    DropsUncounted,
    /// Delivers a frame twice.
    Duplicates,
    /// Delivers a frame with one wrong byte.
    Corrupts,
    /// Delivers to the next port.
    Misdelivers,
    /// Stops the sender's port when the destination violates the protocol.
    BlamesSender,
    /// Reports work at each re-check.
    NeverSleeps,
    /// Sometimes sleeps without the timer of a warm queue.
    NapsForever,
    /// Always sleeps without the timer of a warm queue.
    ForgetsNaps,
    /// Never makes a delayed call.
    ForgetsLateCalls,
    /// Does not poll a queue received from another worker until it is kicked.
    AdoptsCold,
    /// Gives a queue away, but its kicks still go to the old worker.
    ForgetsOwner,
    /// Sometimes loses a queue that is given away.
    LosesQueues,
    /// Hands over a queue that was stopped meanwhile, and started again, in place of the new one.
    HandsOverStopped,
    /// Forgives a queue's debt of service time.
    IgnoresDebt,
    /// Takes a burst that ended at its port's rate for an empty one.
    IgnoresRateDue,
    /// Does not apply the rules of ports.
    IgnoresRules,
    /// Retries full destinations only after a sleep that timed out.
    RetriesAfterTimeoutOnly,
    /// Does not resume a queue that was paused for a full destination.
    ForgetsPaused,
    /// Retries a full destination only when it notifies.
    NeverRetries,
    /// Gives no queue away, whatever the load.
    NeverBalances,
    /// Arms the ingress queue of a TAP without a re-check, as if a short read were the last.
    TapNeverRechecks,
    /// Waits for a full TAP to notify of room, which it never does.
    TapAwaitsRoom,
    /// Does not publish frames read directly into a receiver's buffers.
    ForgetsDirectFlush,
    /// A driver half sleeps without arming its rings.
    DriverNeverArms,
    /// Sleeps without setting `req_event` of a Xen guest's tx ring.
    XenNeverArms,
    /// Sets `req_event` of a tx ring without a re-check.
    XenNeverRechecks,
    /// Sets `req_event` of a full rx ring without a re-check.
    XenNeverRechecksRoom,
    /// Never acknowledges an event: its channel stays masked.
    XenNeverAcks,
    /// Does not send events to Xen guests.
    XenDropsEvents,
    /// Accesses a guest's page after the response.
    XenUsesAfterResponse,
    /// A front half sleeps without setting `rsp_event`.
    XenForgetsRspEvent,
}

/// Hooks that inject a mistake into an ingress queue.
pub(crate) struct Flaw(pub Mistake);

impl Hooks for Flaw {
    fn arm(&mut self, queue: &mut (impl Ingress + ?Sized)) -> bool {
        if self.0 == Mistake::NeverArms {
            return true;
        }
        let nothing = queue.arm();
        match self.0 {
            Mistake::NeverRechecks => true,
            Mistake::NeverSleeps => false,
            _ => nothing,
        }
    }
}

/// An egress queue with a mistake.
pub(crate) struct Flawed<Q> {
    pub queue: Q,
    mistake: Mistake,
    /// Calls so far: some mistakes are made only in one call out of several.
    count: u64,
    /// Its buffers were lent for direct reads since the last flush.
    lent: bool,
}

impl<Q> Flawed<Q> {
    pub fn new(queue: Q, mistake: Mistake) -> Self {
        Self { queue, mistake, count: 0, lent: false }
    }

    fn makes(&mut self, mistake: Mistake) -> bool {
        self.count += 1;
        self.mistake == mistake && self.count.is_multiple_of(7)
    }
}

impl<Q: Egress> Egress for Flawed<Q> {
    fn offloads(&self) -> Offloads {
        self.queue.offloads()
    }

    fn accepts_granted(&self) -> bool {
        self.queue.accepts_granted()
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let (last, before) = picks.split_last().expect("a group has frames");
        if self.makes(Mistake::DropsUncounted) {
            let put = if before.is_empty() { 0 } else { self.queue.put(burst, before)? };
            return Ok(if put == before.len() { picks.len() } else { put });
        }
        if self.makes(Mistake::Duplicates) {
            self.queue.put(burst, &picks[..1])?;
        }
        if self.makes(Mistake::Corrupts) {
            let frame = &burst.frames[usize::from(*last)];
            let mut bytes = vec![0; frame.len as usize];
            let mut at = 0;
            for seg in burst.segs(frame) {
                at += seg.read(&mut bytes[at..]);
            }
            *bytes.last_mut().expect("a frame") ^= 1;
            let put = if before.is_empty() { 0 } else { self.queue.put(burst, before)? };
            let all = put == before.len() && self.queue.put_parts(&bytes, &[], &frame.hdr)?;
            return Ok(if all { picks.len() } else { put });
        }
        if self.mistake == Mistake::Reorders {
            let picks: Vec<u16> = picks.iter().rev().copied().collect();
            return self.queue.put(burst, &picks);
        }
        self.queue.put(burst, picks)
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        self.queue.put_parts(head, body, hdr)
    }

    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault> {
        self.queue.room(len, limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        self.lent = true;
        self.queue.direct()
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        self.queue.steer()
    }

    fn flush(&mut self) {
        let lent = std::mem::take(&mut self.lent);
        if !(lent && self.mistake == Mistake::ForgetsDirectFlush) {
            self.queue.flush();
        }
    }

    fn notify(&mut self) {
        self.queue.notify();
    }

    fn arm(&mut self) -> bool {
        let full = self.queue.arm();
        full || self.mistake == Mistake::NeverRechecksRoom
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
