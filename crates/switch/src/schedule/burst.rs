//! One burst of an ingress queue, as drivers with real ports serve it.

use crate::fair::{BurstUsage, Meter, Spent};
use crate::forward::{Findings, Forwarder, Source};
use crate::frame::Burst;
use crate::port::Ingress;
use crate::serving::panic_on_demand;
use crate::time::Instant;
use crate::tuning::Drain;

/// Result of a burst.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BurstResult {
    /// New frames that were shown.
    pub frames: usize,
    /// Nothing was taken: all destinations that it waits for are full.
    pub paused: bool,
    /// Nothing was taken: the queue is being drained.
    pub drained: bool,
    /// The port's rate permits no more frames before this time.
    pub rate_due: Option<Instant>,
    /// The port's rate kept the burst short: there may be more frames.
    pub rate_cut: bool,
    /// An address was announced for the queue's peer.
    pub announced: bool,
    /// The queue's peer broke its protocol: nothing was taken, and the port is to be stopped. The
    /// fault is the last of the events found.
    pub faulty: bool,
    /// What the burst used, if it was measured, without slow deliveries.
    pub used: Option<BurstUsage>,
    /// What forwarding found.
    pub findings: Findings,
}

/// Serves one burst of at most `max` frames from the locked queue `ingress` of `source`, as far as
/// the queue is not being drained and its destinations have room. `scratch` is given back empty.
/// `meter`: how it is measured, from [`Queue::meter`](super::Queue::meter).
#[inline]
pub fn burst(
    source: &Source,
    max: usize,
    ingress: &mut dyn Ingress,
    forwarder: &mut Forwarder,
    scratch: &mut Burst<'static>,
    now: Instant,
    meter: Option<Meter<'_>>,
) -> BurstResult {
    let began = meter.map(|meter| (meter, (meter.usage)()));
    let mut own = Spent::default();
    let mut took = BurstResult::default();
    let Some(max) = permit(source, max, forwarder, now, &mut took) else { return took };
    let has_rate = source.tuning.has_rate() && !took.drained && !took.paused;
    let got = if max == 0 {
        Ok(0)
    } else {
        // Direct reads are not measured by part.
        if meter.is_none_or(|meter| !meter.by_part) {
            took.findings.merge(forwarder.direct(source, ingress, now));
        }
        ingress.burst(max, now, scratch, &mut |burst| {
            panic_on_demand("from", source.port);
            let found = match began {
                Some((Meter { usage, by_part: true }, began)) if !burst.permits_granted() => {
                    forward_copies(source, burst, forwarder, now, || own = usage().since(began))
                }
                _ => forwarder.forward(source, burst, now),
            };
            if has_rate {
                forwarder.charge_rate(source, burst, now);
            }
            took.findings.merge(found);
        })
    };
    took.used = began.map(|(meter, began)| {
        let mut all = (meter.usage)().since(began);
        took.findings.slow.iter().for_each(|slow| all.time -= slow.took);
        BurstUsage { own, all }
    });
    source.stats.polls.add(1);
    match got {
        Ok(frames) => took.frames = frames,
        Err(fault) => {
            took.faulty = true;
            took.findings.events.push(forwarder.fault(source.port, fault));
            return took;
        }
    }
    if took.frames == 0 {
        source.stats.polls_empty.add(1);
    }
    if has_rate && took.frames > 0 {
        took.rate_cut &= took.frames >= max;
        took.rate_due = forwarder.rate_due(source, now);
    }
    if took.drained {
        source.tuning.complete_drain();
        // Its frames are no reason to stay awake, nor for its guest to kick.
        ingress.disarm();
    }
    took
}

/// The number of frames, up to `max`, that a burst may take: 0 while the queue is drained, or
/// paused for its destinations. `None`: its port's rate permits none. Records why in `took`.
#[inline]
fn permit(
    source: &Source,
    max: usize,
    forwarder: &mut Forwarder,
    now: Instant,
    took: &mut BurstResult,
) -> Option<usize> {
    if source.tuning.drain() != Drain::Off {
        took.drained = true;
        return Some(0);
    }
    let (max, findings) = forwarder.budget(source, max, now);
    (took.paused, took.findings) = (max == 0, findings);
    if source.tuning.announcement().is_some() {
        took.announced = announce(forwarder, source, &mut took.findings, now);
    }
    if !source.tuning.has_rate() || took.paused {
        return Some(max);
    }
    match forwarder.rate_budget(source, max, now) {
        Ok(permitted) => {
            took.rate_cut = permitted < max;
            Some(permitted)
        }
        Err(due) => {
            took.rate_due = Some(due);
            None
        }
    }
}

/// Forwards private copies of a burst's frames, so that no page fault in the sender's memory counts
/// as work on them; `copied`: called in between.
#[cold]
fn forward_copies(
    source: &Source,
    burst: &mut Burst<'_>,
    forwarder: &mut Forwarder,
    now: Instant,
    copied: impl FnOnce(),
) -> Findings {
    let copies: Vec<_> = (0..burst.frames.len()).map(|i| burst.copy_of(i)).collect();
    copied();
    let mut private = Burst::default();
    for (bytes, frame) in copies.iter().zip(&burst.frames) {
        private.push_private(bytes, frame.hdr);
    }
    let found = forwarder.forward_measured(source, &mut private, now);
    if private.left() > 0 {
        burst.leave(private.frames.len() - private.left());
    }
    found
}

/// Asks the queue's peer to notify, and re-checks: see [`Ingress::arm`]. Where there is work, a
/// queue that `disarms` is disarmed again. Returns whether there is nothing, and the time of work
/// that no kick announces.
#[inline]
pub fn arm(ingress: &mut dyn Ingress, disarms: bool) -> (bool, Option<Instant>) {
    if ingress.arm() {
        return (true, ingress.due());
    }
    if disarms {
        ingress.disarm();
    }
    (false, None)
}

/// Floods what is to be announced for the queue's peer, which cannot do so itself (SEND_RARP) or
/// started here (`mac=`), as frames of the peer's. False: nothing is, any more. Under the queue's
/// lock, for its counters.
#[cold]
fn announce(
    forwarder: &mut Forwarder,
    source: &Source,
    findings: &mut Findings,
    now: Instant,
) -> bool {
    let mut any = false;
    while let Some(mac) = source.tuning.take_announcement() {
        findings.merge(forwarder.announce(source, mac, now));
        any = true;
    }
    any
}
