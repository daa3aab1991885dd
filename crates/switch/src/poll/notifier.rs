//! When the peer is told of what was published.

use super::{Policy, tick_after};

/// What to do after a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Tell the peer now, if it wants to be told.
    Now,
    /// Tell it at this time, in ns.
    At(u64),
}

/// A policy at work on the writer's side of one queue. `event`, `napi`, `spin` and `adaptive` tell
/// the peer once per publication: the event index (or flag) of a peer that polls already keeps it
/// from being told too often, and frames that a warm queue gathered make one publication.
#[derive(Clone, Copy, Debug)]
pub struct Notifier {
    policy: Policy,
    /// Frames the peer was not told of.
    pending: u32,
    /// When the first of them was published.
    since_ns: u64,
}

impl Notifier {
    /// With nothing pending.
    pub fn new(policy: Policy) -> Self {
        Self { policy, pending: 0, since_ns: 0 }
    }

    /// Whether the policy ever waits. One that does not needs no state.
    pub fn waits(policy: Policy) -> bool {
        match policy {
            Policy::Timer { .. } => true,
            Policy::Coalesce { usecs, frames } => usecs > 0 && frames > 1,
            Policy::CoalescePending { usecs } => usecs > 0,
            Policy::Event | Policy::Napi { .. } | Policy::Spin | Policy::Adaptive { .. } => false,
        }
    }

    /// Follows a policy from now on; what is pending stays so.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// `frames` were published at `now_ns`.
    pub fn published(&mut self, frames: usize, now_ns: u64) -> Notify {
        if self.pending == 0 {
            self.since_ns = now_ns;
        }
        self.pending = self.pending.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
        let at = match self.policy {
            Policy::Timer { hz } => tick_after(self.since_ns, hz),
            Policy::Coalesce { frames, .. } if self.pending >= u32::from(frames) => now_ns,
            Policy::Coalesce { usecs, .. } => self.since_ns.saturating_add(u64::from(usecs) * 1000),
            Policy::CoalescePending { usecs } => {
                let wait_ns = u64::from(usecs) * 1000 / u64::from(self.pending.max(1));
                self.since_ns.saturating_add(wait_ns)
            }
            _ => now_ns,
        };
        if at <= now_ns {
            self.pending = 0;
            return Notify::Now;
        }
        Notify::At(at)
    }

    /// A time given before has come. True: tell the peer. False: it was told meanwhile.
    pub fn due(&mut self) -> bool {
        std::mem::take(&mut self.pending) > 0
    }
}
