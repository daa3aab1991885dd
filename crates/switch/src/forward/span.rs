//! Copies of a port's frames for another port (SPAN).
//!
//! A copy is made in private memory where the frame passes, and delivered once no queue is locked:
//! the mirror port never delays the mirrored frames, and what it has no room for is dropped. It
//! gets copies only, and may send nothing: so copies of copies, and loops, do not exist.
//!
//! ```text
//!   ingress ─▶ forward ─▶ egress queue ─▶ guest
//!      └─ copy ─┐              └─ copy ─┐
//!               └──────── pending ──────┴─▶ mirror port, or dropped
//! ```

use std::sync::Arc;

use super::{Forwarder, Handled, Port, Senders};
use crate::fdb::PortId;
use crate::frame::{BURST_MAX, Burst};
use crate::time::Instant;
use crate::vnet::VnetHdr;

/// Most copies that wait during one burst: each of its frames in both directions, twice.
const COPIES_MAX: usize = 4 * BURST_MAX;
/// Most bytes of these, together.
const BYTES_MAX: usize = 1 << 20;
/// Most bytes for which memory is kept between bursts.
const BYTES_KEPT: usize = 64 << 10;

/// Picks of all frames of a burst.
const ALL: [u16; BURST_MAX] = {
    let mut all = [0; BURST_MAX];
    let mut i = 0;
    while i < all.len() {
        all[i] = i as u16;
        i += 1;
    }
    all
};

/// Mirror port of a port's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The mirror port.
    pub to: PortId,
    /// Frames from the port into the switch.
    pub ingress: bool,
    /// Frames out of the switch to the port.
    pub egress: bool,
}

/// A copy, for this port, of so many bytes.
struct Pending {
    to: PortId,
    len: usize,
    hdr: VnetHdr,
}

/// Copies that wait until no queue is locked.
#[derive(Default)]
pub(super) struct Copies {
    frames: Vec<Pending>,
    /// Their bytes, one after another.
    bytes: Vec<u8>,
    /// The burst of them for one port, empty between bursts.
    burst: Burst<'static>,
    /// Number of copies not made, as too many waited, for each mirror port.
    lost: Vec<(PortId, u64)>,
}

impl Copies {
    /// Copies `picks` of `burst` for a mirror port.
    #[cold]
    pub fn add(&mut self, to: PortId, burst: &Burst<'_>, picks: impl Iterator<Item = usize>) {
        for i in picks.filter(|i| !burst.is_excluded(*i)) {
            let (len, at) = (burst.frames[i].len as usize, self.bytes.len());
            if self.frames.len() == COPIES_MAX || at + len > BYTES_MAX {
                self.lose(to, 1);
                continue;
            }
            self.bytes.resize(at + len, 0);
            burst.copy_to(i, &mut self.bytes[at..]);
            self.frames.push(Pending { to, len, hdr: burst.frames[i].hdr });
        }
    }

    fn lose(&mut self, to: PortId, n: u64) {
        match self.lost.iter_mut().find(|(port, _)| *port == to) {
            Some((_, lost)) => *lost += n,
            None => self.lost.push((to, n)),
        }
    }

    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.lost.is_empty()
    }

    /// Forgets all, and keeps memory for the next burst.
    fn clear(&mut self) {
        self.frames.clear();
        self.lost.clear();
        self.bytes.clear();
        self.bytes.shrink_to(BYTES_KEPT);
    }
}

impl Port {
    /// Copies its frames to another port; `None`: no longer. That port must be
    /// [reserved](Self::set_reserved).
    pub fn set_span(&self, span: Option<Span>) {
        self.mirror.set_span(span);
    }

    /// Reserves it for copies: it gets no other frames, and its own are dropped.
    pub fn set_reserved(&self, reserved: bool) {
        self.mirror.set_reserved(reserved);
    }
}

impl Forwarder {
    /// Records the frames of a port for its capture and its mirror port.
    #[cold]
    pub(super) fn mirror(
        &mut self,
        port: &Port,
        burst: &Burst<'_>,
        picks: impl Iterator<Item = usize> + Clone,
        ingress: bool,
        now: Instant,
    ) {
        port.mirror.copy(burst, picks.clone(), ingress, now);
        if let Some(to) = port.mirror.span(ingress) {
            self.copies.add(to, burst, picks);
        }
    }

    /// Delivers pending copies. No queue may be locked.
    #[inline]
    pub(super) fn send_copies(&mut self, now: Instant) {
        if !self.copies.is_empty() {
            self.send_pending(now);
        }
    }

    #[cold]
    fn send_pending(&mut self, now: Instant) {
        let table = Arc::clone(&self.table);
        let mut copies = std::mem::take(&mut self.copies);
        let (mut rest, mut bytes) = (&copies.frames[..], &copies.bytes[..]);
        let mut burst = std::mem::take(&mut copies.burst).recycle();
        while let Some(Pending { to, .. }) = rest.first() {
            let same = rest.iter().take(BURST_MAX).take_while(|copy| copy.to == *to).count();
            let (now_sent, later) = rest.split_at(same);
            rest = later;
            for copy in now_sent {
                let (frame, others) = bytes.split_at(copy.len);
                bytes = others;
                burst.push_private(frame, copy.hdr);
            }
            if let Some(port) = table.get(usize::from(to.0)).and_then(Option::as_ref) {
                self.send_to_mirror(port, &mut burst, now);
            }
            burst = burst.recycle();
        }
        copies.burst = burst.recycle();
        for (to, n) in &copies.lost {
            let port = table.get(usize::from(to.0)).and_then(Option::as_ref);
            if let Some(egress) = port.and_then(|port| port.egress.first()) {
                // Counters have one writer at a time: the holder of the queue.
                let _queue = egress.lock();
                egress.stats.drops_mirror.add(*n);
            }
        }
        copies.clear();
        self.copies = copies;
    }

    /// Puts a burst of copies into the first queue of a mirror port; what does not fit is dropped.
    fn send_to_mirror(&mut self, port: &Port, burst: &mut Burst<'_>, now: Instant) {
        if port.egress.is_empty() {
            return;
        }
        burst.snapshot();
        let frames = burst.frames.len();
        let mut to = port.lock(0);
        let egress = to.egress;
        if port.active() == 0 {
            egress.stats.drops_down.add(frames as u64);
            return;
        }
        let (picks, senders) = (&ALL[..frames], [const { None }; BURST_MAX]);
        let from = Senders::Held(&senders);
        let (handled, fault) = if egress.is_slow(now) && !self.may_be_slow(now) {
            (Handled::default(), None)
        } else if self.is_measured(egress, now) {
            // One frame, if its peer's memory made deliveries long.
            let picks = if egress.is_slow(now) { &picks[..1] } else { picks };
            self.put_and_measure(to.id, egress, burst, now, |this| {
                this.put(&mut *to.queue, egress, &from, picks, burst, 0)
            })
        } else {
            self.put(&mut *to.queue, egress, &from, picks, burst, 0)
        };
        to.queue.flush();
        let (done, got) = (handled.frames, handled.begun());
        egress.stats.mirrored.add(done as u64);
        egress.stats.drops_mirror.add((frames - done) as u64);
        if got > 0
            && let Some(at) = egress.notify(&mut *to.queue, got, done < frames, now)
        {
            self.schedule_notify(at, to.id);
        }
        drop(to);
        if let Some(fault) = fault {
            self.record_fault(port, fault);
        }
    }
}
