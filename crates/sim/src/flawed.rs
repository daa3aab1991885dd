//! Mistakes made on purpose, around the product's ports: each must be found, or the oracles are
//! no good.

use std::sync::Arc;

use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::vnet::{Offloads, VnetHdr};

use crate::around::Hooks;

/// A mistake to make on purpose; the simulation must notice each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Arms an ingress queue and does not look again.
    NeverRechecks,
    /// Goes to sleep on an ingress queue without asking for a kick.
    NeverArms,
    /// Arms a full egress queue and does not look again.
    NeverRechecksRoom,
    /// While it is busy, does not try full destinations again.
    BusyForgetsHeld,
    /// Does not call when buffers come back, now and then.
    ForgetsCalls,
    /// Delivers the frames of a group in the wrong order.
    Reorders,
    /// Says that it delivered a frame, and did not.
    DropsUncounted,
    /// Delivers a frame twice.
    Duplicates,
    /// Delivers one wrong byte.
    Corrupts,
    /// Delivers to the port next to the right one.
    Misdelivers,
    /// Stops the sender when the destination breaks the protocol.
    BlamesSender,
    /// Always finds something to do.
    NeverSleeps,
    /// Lets a queue nap without end, now and then.
    NapsForEver,
    /// Sleeps without minding the queues that nap.
    ForgetsNaps,
    /// Never makes a call that was put off.
    ForgetsLateCalls,
    /// Does not look at a queue that another worker gave it, until it is kicked.
    AdoptsCold,
    /// Gives a queue away, and lets its kicks come as before.
    ForgetsHome,
    /// Gives a queue away to no one, now and then.
    LosesQueues,
    /// Forgives what a queue was served beyond its due.
    IgnoresDebt,
    /// Tries full destinations again only after a sleep that nothing ended.
    GivesUpInSilence,
    /// Does not go on with a queue that was paused for a full destination.
    ForgetsPaused,
    /// Tries a full destination again only when it notifies.
    NeverRetries,
    /// Gives no queue away, whatever its load.
    NeverBalances,
    /// Arms the ingress queue of a TAP and does not look again: a read that came up short counts
    /// as the last.
    TapNeverRechecks,
    /// Takes a full TAP for one that says when it has room.
    TapAwaitsRoom,
    /// Reads frames directly into a receiver's buffers, and does not show them to it.
    ForgetsDirectFlush,
    /// A driver half goes to sleep without asking for calls.
    DriverNeverArms,
    /// Goes to sleep on a Xen guest's tx ring without setting `req_event`.
    XenNeverArms,
    /// Sets `req_event` of a tx ring and does not look again.
    XenNeverRechecks,
    /// The same of an rx ring that is full.
    XenNeverRechecksRoom,
    /// Never takes an event from its channel, which tells of no other then.
    XenNeverAcks,
    /// Does not send events to Xen guests.
    XenDropsEvents,
    /// Uses a guest's page after it was answered.
    XenTouchesAnswered,
    /// The front half goes to sleep without setting `rsp_event`.
    XenForgetsRspEvent,
}

/// A mistake about an ingress queue.
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
    /// Spaces out what would be noticed at once.
    count: u64,
    /// Its buffers were lent.
    lent: bool,
}

impl<Q> Flawed<Q> {
    pub fn new(queue: Q, mistake: Mistake) -> Self {
        Self { queue, mistake, count: 0, lent: false }
    }

    fn strikes(&mut self, mistake: Mistake) -> bool {
        self.count += 1;
        self.mistake == mistake && self.count.is_multiple_of(7)
    }
}

impl<Q: Egress> Egress for Flawed<Q> {
    fn offloads(&self) -> Offloads {
        self.queue.offloads()
    }

    fn takes_granted(&self) -> bool {
        self.queue.takes_granted()
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let (last, before) = picks.split_last().expect("a group has frames");
        if self.strikes(Mistake::DropsUncounted) {
            let put = if before.is_empty() { 0 } else { self.queue.put(burst, before)? };
            return Ok(if put == before.len() { picks.len() } else { put });
        }
        if self.strikes(Mistake::Duplicates) {
            self.queue.put(burst, &picks[..1])?;
        }
        if self.strikes(Mistake::Corrupts) {
            let frame = &burst.frames[usize::from(*last)];
            let mut bytes = vec![0; frame.len as usize];
            let mut at = 0;
            for seg in burst.segs(frame) {
                at += seg.read(&mut bytes[at..]);
            }
            *bytes.last_mut().expect("a frame") ^= 1;
            let put = if before.is_empty() { 0 } else { self.queue.put(burst, before)? };
            let all = put == before.len() && self.queue.put_made(&bytes, &[], &frame.hdr)?;
            return Ok(if all { picks.len() } else { put });
        }
        if self.mistake == Mistake::Reorders {
            let picks: Vec<u16> = picks.iter().rev().copied().collect();
            return self.queue.put(burst, &picks);
        }
        self.queue.put(burst, picks)
    }

    fn put_made(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        self.queue.put_made(head, body, hdr)
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
