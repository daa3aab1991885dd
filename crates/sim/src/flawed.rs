//! Mistakes made on purpose, around the product's ports: each must be found, or the oracles are
//! no good.

use std::sync::Arc;

use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::vnet::{Offloads, VnetHdr};

/// A mistake to make on purpose; the simulation must notice each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
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
}

/// A port's queue with a mistake.
pub(crate) struct Flawed<Q> {
    pub queue: Q,
    mistake: Mistake,
    /// Spaces out what would be noticed at once.
    count: u64,
}

impl<Q> Flawed<Q> {
    pub fn new(queue: Q, mistake: Mistake) -> Self {
        Self { queue, mistake, count: 0 }
    }

    fn strikes(&mut self, mistake: Mistake) -> bool {
        self.count += 1;
        self.mistake == mistake && self.count.is_multiple_of(7)
    }
}

impl<Q: Ingress> Ingress for Flawed<Q> {
    fn burst(
        &mut self,
        max: usize,
        now_ns: u64,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        self.queue.burst(max, now_ns, burst, forward)
    }

    fn goes_direct(&self) -> bool {
        self.queue.goes_direct()
    }

    fn burst_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        self.queue.burst_into(max, to)
    }

    fn arm(&mut self) -> bool {
        if self.mistake == Mistake::NeverArms {
            return true;
        }
        let nothing = self.queue.arm();
        match self.mistake {
            Mistake::NeverRechecks => true,
            Mistake::NeverSleeps => false,
            _ => nothing,
        }
    }

    fn due(&self) -> Option<u64> {
        self.queue.due()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
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
        self.queue.direct()
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        self.queue.steer()
    }

    fn flush(&mut self) {
        self.queue.flush();
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
