//! Rates of ports: frames that a port's account permits in each direction.
//!
//! Frames from a peer wait in its ring until there are tokens: nothing is lost, and the peer's own
//! queues work as on a slow link. Frames to a peer are held for it, as for a full queue, and
//! delivered when there are tokens; those beyond its hold queue are dropped. Nobody waits for it:
//! their senders are others, who may send to other ports meanwhile.

use std::sync::atomic::Ordering;

use super::{EgressQueue, Forwarder, LockedQueue, Port, Source};
use crate::account::{Limiter, RateLimits};
use crate::frame::Burst;
use crate::offload;
use crate::port::QueueId;
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
        let (frames, bytes) = all_on_wire(burst, 0..burst.frames.len() - burst.left());
        rate.charge(frames, bytes, now);
    }

    /// Time at which the port's rate permits the next burst, if not now.
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

/// The same of all of `picks`.
fn all_on_wire(burst: &Burst<'_>, picks: impl Iterator<Item = usize>) -> (u64, u64) {
    let sum = |sum: (u64, u64), one: (u64, u64)| (sum.0 + one.0, sum.1 + one.1);
    if burst.has_offloads() {
        return picks.map(|i| on_wire(burst, i)).fold((0, 0), sum);
    }
    // Each frame is one on the wire.
    picks.map(|i| (1, u64::from(burst.frames[i].len))).fold((0, 0), sum)
}

/// What the rate to a port permits of a burst; by default it was not asked for any frame.
#[derive(Default)]
pub(super) struct Permit {
    /// Number of frames, of those asked for in this order.
    pub count: usize,
    /// Frames and bytes of as many as were asked for.
    asked: (usize, (u64, u64)),
}

impl Permit {
    /// Asks for `picks` of a burst, in order.
    #[cold]
    pub fn ask(
        port: &Port,
        burst: &Burst<'_>,
        picks: impl ExactSizeIterator<Item = usize> + Clone,
        now: Instant,
    ) -> Self {
        let rate = &port.account.rate_out;
        let all @ (frames, bytes) = all_on_wire(burst, picks.clone());
        let asked = (picks.len(), all);
        let count = if rate.has(frames, bytes, now) {
            picks.len()
        } else {
            rate.prefix(picks.map(|i| on_wire(burst, i)), now)
        };
        Self { count, asked }
    }

    /// Charges those that were delivered, `picks`: the first of those permitted.
    #[cold]
    pub fn charge(
        &self,
        port: &Port,
        burst: &Burst<'_>,
        picks: impl ExactSizeIterator<Item = usize>,
        now: Instant,
    ) {
        let is_all = picks.len() == self.asked.0;
        let (frames, bytes) = if is_all { self.asked.1 } else { all_on_wire(burst, picks) };
        port.account.rate_out.charge(frames, bytes, now);
    }
}

/// Queues that hold frames until their ports' rates permit them, each with its time.
#[derive(Default)]
pub(super) struct Paced(Vec<(Instant, QueueId)>);

impl Paced {
    /// The earliest time.
    pub fn next(&self) -> Option<Instant> {
        self.0.iter().map(|(at, ..)| *at).min()
    }

    fn set(&mut self, queue: QueueId, at: Instant) {
        self.0.retain(|(_, other)| *other != queue);
        self.0.push((at, queue));
    }
}

impl Forwarder {
    /// Time at which this worker delivers frames held for a queue because of its port's rate.
    pub fn rate_wait(&self, at: QueueId) -> Option<Instant> {
        self.paced.0.iter().find(|(_, queue)| *queue == at).map(|(at, _)| *at)
    }

    /// If the rate to a port permits no frame now, has this worker deliver those held for one of
    /// its queues when it does. Returns whether it is so.
    #[cold]
    pub(super) fn pace(&mut self, to: &LockedQueue<'_>, now: Instant) -> bool {
        let due = if to.port.has_rate_out() { to.port.account.rate_out.due(now) } else { None };
        if let Some(at) = due {
            self.paced.set(to.id, at);
        }
        due.is_some()
    }

    /// Delivers held frames that rates permit by now. `done` is called after each destination.
    #[cold]
    pub(super) fn send_paced(&mut self, now: Instant, done: impl FnMut(QueueId, &EgressQueue)) {
        let due = self.paced.0.extract_if(.., |(at, ..)| *at <= now).map(|(_, queue)| queue);
        let due = due.collect();
        self.deliver_held(due, now, done);
    }
}
