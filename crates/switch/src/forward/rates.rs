//! Rates of ports: frames that a port's account permits in each direction.
//!
//! Frames from a peer wait in its ring until there are tokens: nothing is lost, and the peer's own
//! queues work as on a slow link. Frames to a peer are dropped: their senders are others, who may
//! send to other ports meanwhile.

use std::sync::atomic::Ordering;

use super::{EgressQueue, Forwarder, Group, Port, Source};
use crate::account::{Limiter, RateLimits};
use crate::frame::Burst;
use crate::offload;
use crate::time::Instant;

impl Port {
    /// Limits the rates of frames from its peer and to it, for all queues together; the buckets are
    /// full then. For those from the peer also set [`Tuning::set_has_rate`] of each queue.
    ///
    /// [`Tuning::set_has_rate`]: crate::tuning::Tuning::set_has_rate
    pub fn set_rates(&self, from_peer: RateLimits, to_peer: RateLimits) {
        self.account.rate_in.set(from_peer);
        self.account.rate_out.set(to_peer);
        self.has_rate_out.store(self.account.rate_out.is_on(), Ordering::Relaxed);
    }

    /// Whether the rate of frames to its peer is limited.
    #[inline]
    pub(super) fn has_rate_out(&self) -> bool {
        self.has_rate_out.load(Ordering::Relaxed)
    }
}

impl Forwarder {
    fn rate_in(&self, from: &Source) -> Option<&Limiter> {
        self.port(from.port).map(|port| &port.account.rate_in)
    }

    /// Number of frames, up to `max`, that the port's rate permits a burst to take.
    ///
    /// # Errors
    /// It permits none before this time.
    #[cold]
    pub(crate) fn rate_budget(
        &self,
        from: &Source,
        max: usize,
        now: Instant,
    ) -> Result<usize, Instant> {
        let Some(rate) = self.rate_in(from) else { return Ok(max) };
        self.rate_due(from, now).map_or_else(|| Ok(rate.budget(max, now)), Err)
    }

    /// Charges the frames of a burst to the port's rate, except those left for the next one.
    #[cold]
    pub(crate) fn charge_rate(&self, from: &Source, burst: &Burst<'_>, now: Instant) {
        let Some(rate) = self.rate_in(from) else { return };
        let (mut frames, mut bytes) = (0, 0);
        for i in 0..burst.frames.len() - burst.left() {
            let wire = on_wire(burst, i);
            (frames, bytes) = (frames + wire.0, bytes + wire.1);
        }
        rate.charge(frames, bytes, now);
    }

    /// When the port's rate permits the next burst, if not now.
    #[cold]
    pub(crate) fn rate_due(&self, from: &Source, now: Instant) -> Option<Instant> {
        let due = self.rate_in(from)?.due(now);
        from.stats.rate_waits.add(u64::from(due.is_some()));
        due
    }
}

fn on_wire(burst: &Burst<'_>, i: usize) -> (u64, u64) {
    let frame = &burst.frames[i];
    offload::on_wire(burst.head(i), frame.len, &frame.hdr)
}

/// Drops the frames of a group beyond the rate of its port. Under the queue's lock.
#[cold]
pub(super) fn police(
    port: &Port,
    egress: &EgressQueue,
    group: &mut Group,
    burst: &Burst<'_>,
    now: Instant,
) {
    let mut stays = 0_u64;
    for i in group.picks.iter().map(|pick| usize::from(*pick)) {
        let (frames, bytes) = on_wire(burst, i);
        stays |= u64::from(port.account.rate_out.admit(frames, bytes, now)) << i;
    }
    let all = group.picks.len();
    group.retain(|i| stays & 1 << i != 0);
    egress.stats.drops_rate.add((all - group.picks.len()) as u64);
}
