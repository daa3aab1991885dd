//! Full destinations: frames held for them, workers that wait for them, and retries.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::rates::Permit;
use super::software::len_of_part;
use super::{EgressQueue, Findings, Forwarder, Group, Handled, LockedQueue, Port, Source, Table};
use crate::frame::{BURST_MAX, Burst, HEAD_LEN};
use crate::hold::{HeldFrame, Hold, RATE_WAIT_MAX, WAIT_MAX};
use crate::port::{Egress, Fault, QueueId};
use crate::stats::{EgressStats, IngressStats};
use crate::time::Instant;
use crate::vnet::VnetHdr;

/// Senders of the frames that a queue gets: they count those that cannot be segmented.
pub(super) enum Senders<'a> {
    /// The sender of one burst.
    One(&'a IngressStats),
    /// The senders of held frames, any worker's; of a flooded frame, `None`.
    Held(&'a [Option<Arc<IngressStats>>]),
}

impl Senders<'_> {
    /// Counts a frame that cannot be segmented for a queue with the counters `to`.
    pub(super) fn drops_bad_gso(&self, pick: u16, to: &EgressStats) {
        let sender = match self {
            Self::One(stats) => Some(*stats),
            Self::Held(all) => all[usize::from(pick)].as_deref(),
        };
        match sender {
            Some(stats) => stats.drops_bad_gso.add(1),
            None => to.drops_bad_gso.add(1),
        }
    }
}

impl EgressQueue {
    fn held(&self) -> shm::sync::MutexGuard<'_, Hold> {
        self.hold.lock()
    }

    /// Length of the frame held longest, in bytes.
    pub fn held_len(&self) -> Option<u32> {
        self.held().iter().next().map(|frame| frame.bytes.len() as u32)
    }

    /// Number of frames held for it.
    pub fn held_frames(&self) -> usize {
        self.holding.load(Ordering::Relaxed)
    }

    /// Whether frames are held for it. Exact under the queue's lock, except while it goes down.
    #[inline]
    pub(super) fn is_holding(&self) -> bool {
        self.holding.load(Ordering::Relaxed) != 0
    }

    /// Copies of the frames held for it, oldest first, for another process.
    pub fn held_copies(&self) -> Vec<HeldCopy> {
        let copy = |held: &HeldFrame| HeldCopy {
            bytes: held.bytes.clone(),
            hdr: held.hdr,
            from: held.from.clone(),
        };
        self.held().iter().map(copy).collect()
    }

    /// Holds frames of another process, before the queue is used. Frames beyond the limits are
    /// dropped and counted. A worker must [wait](Forwarder::wait_for) for the queue afterwards.
    pub fn restore_held(&self, frames: Vec<HeldCopy>, now: Instant) {
        let mut hold = self.held();
        for HeldCopy { bytes, hdr, from } in frames {
            if hold.charge(bytes.len() as u32, self.hold_max()) {
                hold.push(HeldFrame { bytes, hdr, part: 0, since: now, from });
            } else if let Some(sender) = &from {
                sender.drops_no_room.add(1);
                self.stats.lost_no_room.add(1);
            } else {
                self.stats.drops_no_room.add(1);
            }
        }
        self.holding.store(hold.len(), Ordering::Relaxed);
    }

    /// Drops the frames held for it: its peer disconnected.
    pub(super) fn drop_held(&self) {
        let mut hold = self.held();
        hold.clear(&self.stats);
        self.holding.store(0, Ordering::Relaxed);
    }
}

/// The port of a queue for which frames were held. `None`: it was removed, or is down; then frames
/// that are held for it still are dropped: they came while it went down, or beyond its rate.
fn receiver(table: &Table, at: QueueId) -> Option<&Arc<Port>> {
    let port = table.get(usize::from(at.port.0))?.as_ref()?;
    if port.active() > at.queue {
        return Some(port);
    }
    port.egress.get(usize::from(at.queue))?.drop_held();
    None
}

/// A held frame as it is handed to another process, which delivers it as a whole, and segments that
/// the receiver has again.
#[derive(Clone, Debug)]
pub struct HeldCopy {
    /// The frame.
    pub bytes: Box<[u8]>,
    /// Its checked header.
    pub hdr: VnetHdr,
    /// Counters of its sender; `None` for a flooded frame.
    pub from: Option<Arc<IngressStats>>,
}

/// Result of [`Forwarder::arm_blocked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct ArmedFull {
    /// All destinations are still full. Otherwise call [`Forwarder::retry`].
    pub full: bool,
    /// Other workers (one bit each) to wake: they wait for a destination that has room now.
    pub wake: u64,
}

impl Forwarder {
    /// Returns the number of frames, up to `max`, that a burst from `from` may take: once a
    /// destination was full, the room of one of its recent destinations, after what they hold was
    /// delivered; 0 while all are full.
    ///
    /// A destination that is down, or without a hold queue, is ignored; one that accepts almost
    /// nothing is not waited for.
    #[inline]
    pub fn budget(&mut self, from: &Source, max: usize, now: Instant) -> (usize, Findings) {
        let Some((_, len)) = from.backpressure.blocked_on() else {
            return (max, Findings::default());
        };
        let room = self.room_for(from, len, max, now);
        self.send_copies(now);
        (room, std::mem::take(&mut self.findings))
    }

    #[cold]
    fn room_for(&mut self, from: &Source, len: u32, max: usize, now: Instant) -> usize {
        let table = Arc::clone(&self.table);
        let (mut most, mut least, mut waits) = (0, usize::MAX, false);
        let mut full = Vec::new();
        for at in from.backpressure.recent(now).into_iter().flatten() {
            let port = table.get(usize::from(at.port.0)).and_then(Option::as_ref);
            let Some(port) = port.filter(|port| port.active() > at.queue) else { continue };
            let egress = &port.egress[usize::from(at.queue)];
            // Nobody waits for the rate of another.
            if egress.hold_max() == 0 || port.has_rate_out() {
                continue;
            }
            let mut to = port.lock(at.queue);
            let is_free = !egress.is_holding() || self.send_held(&mut to, now);
            let mut room = if is_free { to.queue.room(len, max).unwrap_or(max) } else { 0 };
            if is_free && room == 0 {
                // Asked for one frame, for it notifies when it has the room it was last asked for.
                room = to.queue.room(len, 1).unwrap_or(1);
            }
            drop(to);
            (most, least) = (most.max(room), least.min(room));
            if room == 0 {
                waits |= !egress.meter.is_slow(now);
                full.push((at, egress));
            }
        }
        if least >= max {
            // All have room again, or none is left to wait for.
            from.backpressure.set_full(None);
            return max;
        }
        if most == 0 && !waits {
            return max;
        }
        if most == 0 {
            from.stats.pauses.add(1);
            for (at, egress) in full {
                egress.meter.record_pause(egress.stats.frames.get(), now);
                self.block(at, egress);
            }
        }
        most
    }

    /// Holds the frames of a group that did not fit, those after the `handled` ones, or drops them.
    /// Under the queue's lock.
    #[cold]
    pub(super) fn hold_or_drop(
        &mut self,
        from: &Source,
        to: &mut LockedQueue<'_>,
        group: &Group,
        handled: Handled,
        burst: &mut Burst<'_>,
        now: Instant,
    ) {
        let egress = to.egress;
        let Handled { frames: done, mut part } = handled;
        // Granted frames are copied with one call.
        burst.fetch_uncounted(group.picks[done..].iter().map(|pick| usize::from(*pick)));
        let mut hold = egress.held();
        let (mut kept, mut lost, mut lost_floods, mut len) = (0, 0, 0, 0);
        for (n, pick) in group.picks.iter().enumerate().skip(done) {
            let i = usize::from(*pick);
            let part = std::mem::take(&mut part);
            if burst.loses(i) {
                continue;
            }
            let frame = burst.frames[i];
            let is_flood = group.floods & 1 << n != 0;
            if hold.charge(frame.len, egress.hold_max()) {
                let bytes = burst.copy_of(i);
                let sender = (!is_flood).then(|| Arc::clone(&from.stats));
                hold.push(HeldFrame { bytes, hdr: frame.hdr, part, since: now, from: sender });
                kept += 1;
            } else if is_flood {
                lost_floods += 1;
            } else {
                lost += 1;
            }
            if !is_flood {
                len = len_of_part(&*to.queue, burst.head(i), frame.len, &frame.hdr);
            }
        }
        from.stats.holds.add(kept);
        egress.stats.holds.add(kept);
        egress.holding.store(hold.len(), Ordering::Relaxed);
        drop(hold);
        if self.pace(to, now) {
            egress.stats.drops_rate.add(lost + lost_floods);
            return;
        }
        from.stats.drops_no_room.add(lost);
        egress.stats.lost_no_room.add(lost);
        egress.stats.drops_no_room.add(lost_floods);
        if len > 0 && !to.port.has_rate_out() {
            from.backpressure.set_full(Some((to.id, len)));
        }
        self.record_full(to, now);
        if egress.is_holding() {
            self.block(to.id, egress);
        }
    }

    /// Delivers frames held for a queue, and drops those held for too long. Under the queue's lock.
    /// True: no frame is held any more.
    #[cold]
    pub(super) fn send_held(&mut self, to: &mut LockedQueue<'_>, now: Instant) -> bool {
        let (port, egress) = (to.port, to.egress);
        let mut hold = egress.held();
        let is_rated = port.has_rate_out();
        // A slow queue holds nothing: it could not be served before its frames are too old.
        let expires = match (egress.is_slow(now), is_rated) {
            (true, _) => Instant::NEVER,
            (_, true) => now - (RATE_WAIT_MAX - WAIT_MAX),
            _ => now,
        };
        let len_of = |held: &HeldFrame, queue: &dyn Egress| {
            let head = &held.bytes[..held.bytes.len().min(HEAD_LEN)];
            len_of_part(queue, head, held.bytes.len() as u32, &held.hdr)
        };
        let oldest = hold.iter().next().map(|held| len_of(held, &*to.queue));
        // They waited for the rate if the queue has room, and for its guest otherwise.
        let for_rate = is_rated && oldest.is_some_and(|len| to.queue.room(len, 1) != Ok(0));
        let late = hold.expire(expires, for_rate, &egress.stats);
        let first = hold.iter().next().map(|held| len_of(held, &*to.queue));
        // Cheap if it is still full: senders that do not wait call this with each burst.
        let waits = is_rated && self.pace(to, now);
        let fits = !waits && first.is_some_and(|len| to.queue.room(len, 1) != Ok(0));
        let (mut got, mut fault) = (0, None);
        if fits {
            let before = hold.part();
            let sent;
            (sent, fault) = self.send_oldest(to, &hold, now);
            hold.remove(sent.frames);
            hold.set_part(sent.part);
            let is_same = sent.frames == 0 && sent.part <= before;
            got = if is_same { 0 } else { sent.begun() };
        }
        if let Some(fault) = fault {
            hold.clear(&egress.stats);
            self.record_fault(port, fault);
        }
        egress.holding.store(hold.len(), Ordering::Relaxed);
        let is_free = hold.is_empty();
        drop(hold);
        if !is_free && is_rated {
            self.pace(to, now);
        }
        if got > 0 {
            to.queue.flush();
            let late = egress.notify(&mut *to.queue, got, !is_free, now);
            if let Some(at) = late {
                self.schedule_notify(at, to.id);
            }
            self.record_progress(to.id, egress);
        }
        if late > 0 && !for_rate {
            self.record_full(to, now);
        }
        is_free
    }

    /// Puts the oldest frames, up to a burst of them, and the rest of the first; returns how many
    /// were handled.
    fn send_oldest(
        &mut self,
        to: &mut LockedQueue<'_>,
        hold: &Hold,
        now: Instant,
    ) -> (Handled, Option<Fault>) {
        let (port, egress) = (to.port, to.egress);
        let n = hold.len().min(BURST_MAX);
        let mut burst = Burst::default();
        let mut senders = Vec::with_capacity(n);
        let part = hold.part();
        for held in hold.iter().take(n) {
            burst.push_private(&held.bytes, held.hdr);
            senders.push(held.from.clone());
        }
        burst.snapshot();
        let permit = port.has_rate_out().then(|| Permit::ask(port, &burst, 0..n, now));
        let n = permit.as_ref().map_or(n, |permit| permit.count);
        if n == 0 {
            return (Handled { frames: 0, part }, None);
        }
        let picks: Vec<u16> = (0..n as u16).collect();
        let from = Senders::Held(&senders);
        let (handled, fault) = if self.is_measured(egress, now) {
            self.put_and_measure(to.id, egress, &burst, now, |this| {
                this.put(&mut *to.queue, egress, &from, &picks, &burst, part)
            })
        } else {
            self.put(&mut *to.queue, egress, &from, &picks, &burst, part)
        };
        let done = handled.frames;
        if let Some(permit) = permit {
            permit.charge(port, &burst, 0..done, now);
        }
        if port.mirror.is_on() {
            self.mirror(port, &burst, 0..done, false, now);
        }
        (handled, fault)
    }

    /// Records that a destination must be retried, and that this worker waits for it.
    pub(super) fn block(&mut self, at: QueueId, egress: &EgressQueue) {
        egress.waiters.fetch_or(1 << self.worker, Ordering::AcqRel);
        // It may have made room since it was armed, and will not notify of that again.
        self.blocked.insert(at, false);
    }

    /// Has this worker deliver the frames held for a queue, which it did not put there.
    pub fn wait_for(&mut self, at: QueueId) {
        let table = Arc::clone(&self.table);
        let of = table.get(usize::from(at.port.0)).and_then(Option::as_ref);
        if let Some(egress) = of.and_then(|port| port.egress.get(usize::from(at.queue))) {
            self.block(at, egress);
        }
    }

    /// Whether frames are held by this worker, or senders paused: it must then
    /// [`retry`](Self::retry) every [`RETRY_INTERVAL`](crate::hold::RETRY_INTERVAL).
    pub fn is_blocked(&self) -> bool {
        !self.blocked.is_empty()
    }

    /// Whether this worker waits for a queue.
    pub fn is_blocked_by(&self, at: QueueId) -> bool {
        self.blocked.contains_key(&at)
    }

    /// Whether `from` may take frames again: one of its destinations has signalled room, or it
    /// waits for none.
    pub fn may_resume(&self, from: &Source) -> bool {
        from.backpressure.blocked_on().is_none() || from.backpressure.any(|at| self.has_news(at))
    }

    /// Whether a destination signalled room since this worker's last retry, or was removed.
    fn has_news(&self, at: QueueId) -> bool {
        let port = self.table.get(usize::from(at.port.0)).and_then(Option::as_ref);
        let port = port.filter(|port| port.active() > at.queue);
        port.is_none_or(|port| {
            let waiters = port.egress[usize::from(at.queue)].waiters.load(Ordering::Acquire);
            waiters & 1 << self.worker == 0
        })
    }

    /// Delivers frames held for destinations that have signalled room. `all`: also for the others,
    /// every [`RETRY_INTERVAL`](crate::hold::RETRY_INTERVAL): for those that do not notify, and to
    /// drop frames held for too long.
    pub fn retry(&mut self, all: bool, now: Instant) -> Findings {
        self.retry_with(all, now, |_, _| {})
    }

    /// Delivers as [`retry`](Self::retry) does, and calls `done` after each destination, so that
    /// the caller can charge its time.
    pub fn retry_with(
        &mut self,
        all: bool,
        now: Instant,
        done: impl FnMut(QueueId, &EgressQueue),
    ) -> Findings {
        let news = |at: &QueueId| all || self.has_news(*at);
        let due: Vec<_> = self.blocked.keys().copied().filter(news).collect();
        for at in &due {
            self.blocked.remove(at);
        }
        self.deliver_held(due, now, done);
        std::mem::take(&mut self.findings)
    }

    /// Delivers frames held for queues, as far as each has room and its port's rate permits. `done`
    /// is called after each queue.
    #[cold]
    pub(super) fn deliver_held(
        &mut self,
        due: Vec<QueueId>,
        now: Instant,
        mut done: impl FnMut(QueueId, &EgressQueue),
    ) {
        let table = Arc::clone(&self.table);
        self.measure_held(|this| {
            for at in due {
                let Some(port) = receiver(&table, at) else { continue };
                let mut to = port.lock(at.queue);
                let egress = to.egress;
                let is_free = !egress.is_holding() || this.send_held(&mut to, now);
                if !is_free && !this.pace(&to, now) {
                    this.block(at, egress);
                }
                drop(to);
                done(at, egress);
            }
        });
        self.send_copies(now);
    }

    /// Arms each full destination, before sleep, to notify when it has room.
    pub fn arm_blocked(&mut self) -> ArmedFull {
        let (mut full, mut wake) = (true, 0);
        let table = Arc::clone(&self.table);
        for (QueueId { port, queue }, armed) in
            self.blocked.iter_mut().filter(|(_, armed)| !**armed)
        {
            let port = table.get(usize::from(port.0)).and_then(Option::as_ref);
            let Some(port) = port.filter(|port| port.active() > *queue) else {
                full = false;
                continue;
            };
            let egress = &port.egress[usize::from(*queue)];
            *armed = egress.lock().arm();
            if !*armed {
                full = false;
                // Other workers that wait for it get no further notification.
                wake |= egress.waiters.swap(0, Ordering::AcqRel) & !(1 << self.worker);
            }
        }
        ArmedFull { full, wake }
    }

    /// Records that a destination took a frame: workers that wait for it may retry.
    pub(super) fn record_progress(&mut self, at: QueueId, egress: &EgressQueue) {
        if egress.waiters.load(Ordering::Relaxed) != 0 {
            self.findings.wake |= egress.waiters.swap(0, Ordering::AcqRel);
        }
        if egress.stalled.load(Ordering::Relaxed) {
            self.end_stall(at, egress);
        }
    }
}
