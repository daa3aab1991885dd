//! Receivers whose memory makes deliveries long: each page of their buffers is absent, and our copy
//! into it is a page fault, and may block.
//!
//! Deliveries are measured in time and page faults of the thread while their sender's bursts
//! are measured by part ([`Pace`](crate::fair::Pace)), because some were long, and always for
//! frames that were held and for a receiver that is known to be slow. A slow receiver gets one
//! frame at a time, and then none until its part of the worker's time covers that one; frames for
//! it are dropped meanwhile, not held: the shortest of these times is as long as a frame may be
//! held. The time of a slow delivery is the receiver's, not the sender's ([`Findings::slow`]).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{EgressQueue, Findings, Forwarder, Group, Handled, LockedQueue, Senders, Source};
use crate::fair::{self, Usage};
use crate::fdb::PortId;
use crate::frame::Burst;
use crate::port::{Fault, QueueId};
use crate::time::{Instant, Ns};

/// A delivery that was long by page faults in its receiver's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowDelivery {
    /// The receiver's port.
    pub port: PortId,
    /// The index of its egress queue.
    pub queue: u16,
    /// Time that the worker spent on it.
    pub took: Ns,
}

/// Measurements of a worker's deliveries.
#[derive(Default)]
pub(super) struct Slow {
    /// What the thread has used; `None`: nothing is measured.
    usage: Option<fn() -> Usage>,
    /// Which deliveries are measured, apart from those to receivers known to be slow.
    measured: Measured,
    /// Time from which slow receivers, one of them, may get a frame again.
    from: Instant,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Measured {
    #[default]
    Nothing,
    /// Those of the burst in progress.
    Burst,
    /// Those of held frames, outside of bursts. The caller charges each to its receiver, slow or
    /// not, so that they are not reported as slow.
    Held,
}

/// Deliveries that a receiver's memory made long. Changed under the queue's lock only.
#[derive(Debug, Default)]
pub(super) struct LongDeliveries {
    /// Number, each within [`fair::SLOW_FOR`] of the one before.
    count: AtomicU32,
    /// Time from which the next one is counted as the first.
    until_ns: AtomicU64,
}

impl Slow {
    /// Whether the burst in progress is measured.
    #[inline]
    pub fn measures(&self) -> bool {
        self.measured != Measured::Nothing
    }
}

impl LongDeliveries {
    /// Counts one; whether the receiver is slow from now on.
    fn record(&self, now: Instant) -> bool {
        let is_first = now.ns() >= self.until_ns.load(Ordering::Relaxed);
        let before = if is_first { 0 } else { self.count.load(Ordering::Relaxed) };
        let count = before.saturating_add(1);
        self.count.store(count, Ordering::Relaxed);
        self.until_ns.store((now + fair::SLOW_FOR).ns(), Ordering::Relaxed);
        count >= fair::SLOW_DELIVERIES
    }
}

impl EgressQueue {
    /// Whether its peer's memory made several deliveries long in the last seconds.
    #[inline]
    pub fn is_slow(&self, now: Instant) -> bool {
        self.long.count.load(Ordering::Relaxed) >= fair::SLOW_DELIVERIES
            && now.ns() < self.long.until_ns.load(Ordering::Relaxed)
    }
}

impl Forwarder {
    /// Has deliveries measured by `usage`: what the calling thread has used.
    pub fn set_usage(&mut self, usage: fn() -> Usage) {
        self.slow.usage = Some(usage);
    }

    /// [Forwards](Self::forward) a burst whose deliveries are measured. Its frames must be in
    /// private memory: page faults in the sender's would count as the receiver's.
    #[cold]
    pub fn forward_measured(
        &mut self,
        from: &Source,
        burst: &mut Burst<'_>,
        now: Instant,
    ) -> Findings {
        self.slow.measured = Measured::Burst;
        let found = self.forward(from, burst, now);
        self.slow.measured = Measured::Nothing;
        found
    }

    /// Delivers held frames by `deliver`, measured: the caller charges the time of each delivery.
    pub(super) fn measure_held(&mut self, deliver: impl FnOnce(&mut Self)) {
        self.slow.measured = Measured::Held;
        deliver(self);
        self.slow.measured = Measured::Nothing;
    }

    /// Whether deliveries to `egress` go through [`put_slow`](Self::put_slow) or
    /// [`put_and_measure`](Self::put_and_measure).
    #[inline]
    pub(super) fn is_measured(&self, egress: &EgressQueue, now: Instant) -> bool {
        self.slow.measures() || egress.is_slow(now)
    }

    /// Whether a slow receiver may get a frame.
    pub(super) fn may_be_slow(&self, now: Instant) -> bool {
        now >= self.slow.from
    }

    /// Puts a group to a queue whose deliveries are measured.
    #[cold]
    pub(super) fn put_measured(
        &mut self,
        from: &Source,
        to: &mut LockedQueue<'_>,
        group: &Group,
        burst: &Burst<'_>,
        now: Instant,
    ) -> (Handled, Option<Fault>) {
        let (egress, senders) = (to.egress, Senders::One(&from.stats));
        self.put_and_measure(to.id, egress, burst, now, |this| {
            this.put(&mut *to.queue, egress, &senders, &group.picks, burst, 0)
        })
    }

    /// Puts a group to a slow queue: its frames one by one, until one took long; the others are
    /// dropped, and removed from the group. Nothing is held for such a queue.
    #[cold]
    pub(super) fn put_slow(
        &mut self,
        from: &Source,
        to: &mut LockedQueue<'_>,
        group: &mut Group,
        burst: &Burst<'_>,
        now: Instant,
    ) -> (Handled, Option<Fault>) {
        let egress = to.egress;
        let (mut all, mut fault) = (Handled::default(), None);
        while let Some(pick) = group.picks.get(all.frames).filter(|_| self.may_be_slow(now)) {
            let i = usize::from(*pick);
            let bytes = burst.copy_of(i);
            let mut private = Burst::default();
            private.push_private(&bytes, burst.frames[i].hdr);
            private.snapshot();
            let senders = Senders::One(&from.stats);
            let got;
            (got, fault) = self.put_and_measure(to.id, egress, &private, now, |this| {
                this.put(&mut *to.queue, egress, &senders, &[0], &private, 0)
            });
            all = Handled { frames: all.frames + got.frames, part: got.part };
            if got.frames == 0 {
                break;
            }
        }
        if fault.is_none() {
            let done = all.frames;
            let lost = (done..group.picks.len()).filter(|n| group.floods & 1 << n == 0).count();
            let floods = group.picks.len() - done - lost;
            from.stats.drops_no_room.add(lost as u64);
            egress.stats.lost_slow.add(lost as u64);
            egress.stats.drops_slow.add(floods as u64);
            group.picks.truncate(done);
        }
        (all, fault)
    }

    /// Puts frames of `burst`, which are private, by `put`, and measures it: the queue is slow from
    /// now on if its frames were long by page faults.
    #[cold]
    pub(super) fn put_and_measure(
        &mut self,
        at: QueueId,
        egress: &EgressQueue,
        burst: &Burst<'_>,
        now: Instant,
        put: impl FnOnce(&mut Self) -> (Handled, Option<Fault>),
    ) -> (Handled, Option<Fault>) {
        let Some(usage) = self.slow.usage else { return put(self) };
        let before = usage();
        let (handled, fault) = put(self);
        let used = usage().since(before);
        let bytes = burst.frames.iter().map(|frame| u64::from(frame.len)).sum();
        if fair::is_slow_delivery(handled.frames, bytes, used) {
            if egress.long.record(now) {
                self.slow.from = now + fair::slow_rest(used.time);
            }
            if self.slow.measured != Measured::Held {
                let QueueId { port, queue } = at;
                egress.stats.served_ns.add(used.time.get());
                self.findings.slow.push(SlowDelivery { port, queue, took: used.time });
            }
        }
        (handled, fault)
    }
}
