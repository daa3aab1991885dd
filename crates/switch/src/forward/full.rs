//! Full destinations: what is held for them, who waits for them, and when they are tried again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::{EgressQueue, Forwarder, Group, Port, Source};
use crate::fdb::PortId;
use crate::frame::{BURST_MAX, Burst, Frame};
use crate::hold::{HeldFrame, Hold};
use crate::port::{Egress, Fault};
use crate::stats::IngressStats;

/// Whose counters a frame that cannot be segmented is counted in.
pub(super) enum Senders<'a> {
    /// All are of one burst.
    One(&'a IngressStats),
    /// They were held.
    Held(&'a [Option<Arc<IngressStats>>]),
}

impl Senders<'_> {
    pub(super) fn drops_bad_gso(&self, pick: u16) {
        let stats = match self {
            Self::One(stats) => Some(*stats),
            Self::Held(all) => all[usize::from(pick)].as_deref(),
        };
        stats.iter().for_each(|stats| stats.drops_bad_gso.add(1));
    }
}

impl EgressQueue {
    fn held(&self) -> std::sync::MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Length of the frame that has waited longest, in bytes.
    pub fn held_len(&self) -> Option<u32> {
        self.held().iter().next().map(|frame| frame.bytes.len() as u32)
    }

    /// How many frames wait for it.
    pub fn held_frames(&self) -> usize {
        self.holding.load(Ordering::Relaxed)
    }

    /// Whether frames wait for it. Certain under the queue's lock, but for a queue that goes down.
    #[inline]
    pub(super) fn is_holding(&self) -> bool {
        self.holding.load(Ordering::Relaxed) != 0
    }

    /// Its peer is gone: gives up what waits for it.
    pub(super) fn drop_held(&self) {
        let mut hold = self.held();
        hold.clear(&self.stats);
        self.holding.store(0, Ordering::Relaxed);
    }
}

impl Forwarder {
    /// How many frames a burst from `from` may take, of `max`: as many as one of the destinations
    /// that it has sent to lately has room for, once one of them was full. None while all are.
    ///
    /// A destination that is down, or for which nothing may wait, does not count; one that takes
    /// next to nothing is not waited for.
    pub fn may_take(&mut self, from: &Source, max: usize, now_ns: u64) -> usize {
        let Some((_, _, len)) = from.backpressure.waits_for() else { return max };
        self.room_for(from, len, max, now_ns)
    }

    #[cold]
    fn room_for(&mut self, from: &Source, len: u32, max: usize, now_ns: u64) -> usize {
        let table = Arc::clone(&self.table);
        let (mut most, mut least, mut waits) = (0, usize::MAX, false);
        let mut full = Vec::new();
        for at in from.backpressure.recent(now_ns).into_iter().flatten() {
            let port = table.get(usize::from(at.0.0)).and_then(Option::as_ref);
            let Some(port) = port.filter(|port| port.active() > at.1) else { continue };
            let egress = &port.egress[usize::from(at.1)];
            if egress.hold_max() == 0 {
                continue;
            }
            let mut queue = egress.lock();
            let is_free = !egress.is_holding() || self.send_held(port, at.1, &mut *queue, now_ns);
            let room = if is_free { queue.room(len, max).unwrap_or(max) } else { 0 };
            drop(queue);
            (most, least) = (most.max(room), least.min(room));
            if room == 0 {
                waits |= !egress.meter.is_slow(now_ns);
                full.push((at, egress));
            }
        }
        if least >= max {
            // All have room again, or there is none to wait for.
            from.backpressure.set_full(None);
            return max;
        }
        if most == 0 && !waits {
            return max;
        }
        if most == 0 {
            from.stats.pauses.add(1);
            for (at, egress) in full {
                egress.meter.paused(egress.stats.frames.get(), now_ns);
                self.block(at, egress);
            }
        }
        most
    }

    /// Frames of a group that did not fit, from `done` on: held by their destination, or dropped.
    /// Under the queue's lock.
    #[cold]
    pub(super) fn refused(
        &mut self,
        from: &Source,
        port: &Port,
        group: &Group,
        done: usize,
        burst: &mut Burst<'_>,
        (queue, now_ns): (&mut dyn Egress, u64),
    ) {
        let egress = &port.egress[usize::from(group.queue)];
        // What lies in granted memory is copied with one call.
        burst.bring(group.picks[done..].iter().map(|pick| usize::from(*pick)));
        let mut hold = egress.held();
        let (mut kept, mut lost, mut lost_floods, mut len) = (0, 0, 0, 0);
        for (n, pick) in group.picks.iter().enumerate().skip(done) {
            let i = usize::from(*pick);
            if burst.is_out(i) {
                continue;
            }
            let frame = burst.frames[i];
            let is_flood = group.floods & 1 << n != 0;
            if hold.charge(frame.len, egress.hold_max()) {
                let bytes = copy_of(burst, i, &frame);
                let sender = (!is_flood).then(|| Arc::clone(&from.stats));
                hold.push(HeldFrame { bytes, hdr: frame.hdr, since_ns: now_ns, from: sender });
                kept += 1;
            } else if is_flood {
                lost_floods += 1;
            } else {
                lost += 1;
            }
            if !is_flood {
                len = frame.len;
            }
        }
        from.stats.holds.add(kept);
        egress.stats.holds.add(kept);
        from.stats.drops_no_room.add(lost);
        egress.stats.lost_no_room.add(lost);
        egress.stats.drops_no_room.add(lost_floods);
        egress.holding.store(hold.len(), Ordering::Relaxed);
        drop(hold);
        if len > 0 {
            from.backpressure.set_full(Some((group.port, group.queue, len)));
        }
        self.found_full((group.port, group.queue), egress, queue, now_ns);
        if egress.is_holding() {
            self.block((group.port, group.queue), egress);
        }
    }

    /// Delivers what waits for a queue, and gives up what has waited for too long. Under the
    /// queue's lock. True: nothing waits any more.
    #[cold]
    pub(super) fn send_held(
        &mut self,
        port: &Port,
        queue: u16,
        to: &mut dyn Egress,
        now_ns: u64,
    ) -> bool {
        let egress = &port.egress[usize::from(queue)];
        let mut hold = egress.held();
        let late = hold.expire(now_ns, &egress.stats);
        let first = hold.iter().next().map(|held| held.bytes.len() as u32);
        // Cheap where it is still full: senders that do not wait come here with each burst.
        let fits = first.is_some_and(|len| to.room(len, 1) != Ok(0));
        let (mut sent, mut fault) = (0, None);
        if fits {
            (sent, fault) = self.send_oldest(port, egress, &hold, to, now_ns);
            hold.remove(sent);
        }
        if let Some(fault) = fault {
            hold.clear(&egress.stats);
            self.faults.push((port.id, port.epoch(), fault));
        }
        egress.holding.store(hold.len(), Ordering::Relaxed);
        let is_free = hold.is_empty();
        drop(hold);
        if sent > 0 {
            to.flush();
            let late = egress.notify(to, sent, !is_free, now_ns);
            if let Some(at) = late {
                self.put_off(at, port.id, queue);
            }
            self.took((port.id, queue), egress);
        }
        if late > 0 {
            self.found_full((port.id, queue), egress, to, now_ns);
        }
        is_free
    }

    /// Puts the oldest frames, up to a burst of them; returns how many were dealt with.
    fn send_oldest(
        &mut self,
        port: &Port,
        egress: &EgressQueue,
        hold: &Hold,
        to: &mut dyn Egress,
        now_ns: u64,
    ) -> (usize, Option<Fault>) {
        let n = hold.len().min(BURST_MAX);
        let mut burst = Burst::default();
        let mut senders = Vec::with_capacity(n);
        for (i, held) in hold.iter().take(n).enumerate() {
            burst.segs.push(shm::Seg::of(&held.bytes));
            burst.push_at(i, 1, held.bytes.len() as u32, held.hdr);
            senders.push(held.from.clone());
        }
        burst.snapshot();
        let picks: Vec<u16> = (0..n as u16).collect();
        let (done, fault) = self.put(to, egress, &Senders::Held(&senders), &picks, &burst);
        if port.mirror.is_on() {
            port.mirror.copy(&burst, 0..done, false, now_ns);
        }
        (done, fault)
    }

    /// Remembers that a destination is to be tried again, and that this worker waits for it.
    fn block(&mut self, at: (PortId, u16), egress: &EgressQueue) {
        egress.waiters.fetch_or(1 << self.worker, Ordering::AcqRel);
        // It has moved since it was armed, if it was: that may be what it would notify of.
        self.blocked.insert(at, false);
    }

    /// Whether frames are held by this worker, or senders paused: it is to [`retry`](Self::retry)
    /// every [`RETRY_NS`](crate::hold::RETRY_NS) then, whatever wakes it.
    pub fn is_blocked(&self) -> bool {
        !self.blocked.is_empty()
    }

    /// Whether this worker waits for a queue of a port.
    pub fn is_blocked_by(&self, port: PortId, queue: u16) -> bool {
        self.blocked.contains_key(&(port, queue))
    }

    /// Whether `from` may take frames again, as far as is known: one of its destinations has made
    /// room, or it waits for none.
    pub fn may_go_on(&self, from: &Source) -> bool {
        from.backpressure.waits_for().is_none() || from.backpressure.any(|at| self.has_news(at))
    }

    /// Whether a destination was woken for since this worker last tried it, or is gone.
    fn has_news(&self, (port, queue): (PortId, u16)) -> bool {
        let port = self.table.get(usize::from(port.0)).and_then(Option::as_ref);
        let port = port.filter(|port| port.active() > queue);
        port.is_none_or(|port| {
            let waiters = port.egress[usize::from(queue)].waiters.load(Ordering::Acquire);
            waiters & 1 << self.worker == 0
        })
    }

    /// Delivers what is held for destinations that have made room. `all`: and for the others; to be
    /// done every [`RETRY_NS`](crate::hold::RETRY_NS), for those that do not notify, and for frames
    /// that have waited for too long.
    pub fn retry(&mut self, all: bool, now_ns: u64) {
        self.retry_each(all, now_ns, |_, _| {});
    }

    /// The same. `done`: a destination was tried, for whoever charges the time to it.
    pub fn retry_each(
        &mut self,
        all: bool,
        now_ns: u64,
        mut done: impl FnMut((PortId, u16), &EgressQueue),
    ) {
        let table = Arc::clone(&self.table);
        let news = |at: &(PortId, u16)| all || self.has_news(*at);
        let due: Vec<_> = self.blocked.keys().copied().filter(news).collect();
        for at in due {
            self.blocked.remove(&at);
            let port = table.get(usize::from(at.0.0)).and_then(Option::as_ref);
            let Some(port) = port.filter(|port| port.active() > at.1) else { continue };
            let egress = &port.egress[usize::from(at.1)];
            let mut queue = egress.lock();
            if egress.is_holding() && !self.send_held(port, at.1, &mut *queue, now_ns) {
                self.block(at, egress);
            }
            drop(queue);
            done(at, egress);
        }
    }

    /// Before sleeping: asks each full destination to notify when it has room. False: one has room
    /// by now; [`retry`](Self::retry).
    pub fn arm_blocked(&mut self) -> bool {
        let mut full = true;
        let table = Arc::clone(&self.table);
        for ((port, queue), armed) in self.blocked.iter_mut().filter(|(_, armed)| !**armed) {
            let port = table.get(usize::from(port.0)).and_then(Option::as_ref);
            let Some(port) = port.filter(|port| port.active() > *queue) else {
                full = false;
                continue;
            };
            let egress = &port.egress[usize::from(*queue)];
            *armed = egress.lock().arm();
            if !*armed {
                full = false;
                // Others that wait for it are not notified again.
                self.woken |= egress.waiters.swap(0, Ordering::AcqRel) & !(1 << self.worker);
            }
        }
        full
    }

    /// Notes that a destination took a frame: those that wait for it may try again.
    pub(super) fn took(&mut self, at: (PortId, u16), egress: &EgressQueue) {
        if egress.waiters.load(Ordering::Relaxed) != 0 {
            self.woken |= egress.waiters.swap(0, Ordering::AcqRel);
        }
        if egress.starved.load(Ordering::Relaxed) {
            self.took_again(at, egress);
        }
    }
}

/// A private copy of a frame: its head as it was decided on, and the rest as it is now.
fn copy_of(burst: &Burst<'_>, i: usize, frame: &Frame) -> Box<[u8]> {
    let mut bytes = vec![0; frame.len as usize].into_boxed_slice();
    let head = burst.head(i);
    bytes[..head.len()].copy_from_slice(head);
    let (mut at, mut skip) = (head.len(), head.len() as u32);
    for seg in burst.segs(frame) {
        let rest = seg.skip(skip);
        skip -= seg.len() - rest.len();
        at += rest.read(&mut bytes[at..]);
    }
    bytes
}
