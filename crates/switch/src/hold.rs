//! Held frames of full destinations, and the pause of their senders.
//!
//! A full destination holds its frames in its own queue, in private memory, bounded in frames,
//! bytes and age, and charged to *its* account. The sender gets its buffers back at once, so a
//! receiver never holds a sender's resources. Frames beyond the bounds are dropped, and counted at
//! both ends.
//!
//! A sender is also *paused* while all its recent destinations are full ([`Backpressure`]): its
//! ring is read only as far as one of them has room, so that a fast sender and a slow receiver lose
//! no frames. It does not wait while any of them has room, nor for a destination that accepts less
//! than [`PAUSE_FRAMES_MIN`] frames in [`PAUSE_WINDOW`].
//!
//! ```text
//!   sender's ring ──burst──▶ destination's ring          it has room
//!                     └────▶ hold queue ────▶ ring       it is full: one more copy
//!                     └────▶ dropped                     the hold queue is full, too
//! ```
//!
//! Design note 0015.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::account::Account;
use crate::port::QueueId;
use crate::stats::{EgressStats, IngressStats};
use crate::time::{Instant, Ns};
use crate::vnet::VnetHdr;

/// Largest limit of frames held for one queue.
pub const HOLD_MAX: u16 = 1024;
/// Default limit of frames held for one queue: four bursts.
pub const HOLD_DEFAULT: u16 = 256;
/// Longest time that a frame is held. A TCP sender retransmits it by then (RFC 6298: 1 s,
/// Linux: 200 ms).
pub const WAIT_MAX: Ns = Ns::from_ms(200);
/// The same for a port with `rate-out=`: a GSO frame takes half a second of 1 Mbit/s.
pub const RATE_WAIT_MAX: Ns = Ns::from_secs(2);
/// Interval at which a worker re-checks full destinations that do not notify.
pub const RETRY_INTERVAL: Ns = Ns::from_us(12_500);
/// A destination for which senders are paused must take [`PAUSE_FRAMES_MIN`] frames in this time.
/// Long enough for a receiver that lost its CPU on a busy machine.
pub const PAUSE_WINDOW: Ns = Ns::from_ms(50);
/// See [`PAUSE_WINDOW`].
pub const PAUSE_FRAMES_MIN: u64 = 16;
/// Time without pauses for a destination that took fewer.
const SLOW_FOR: Ns = Ns::from_secs(1);
/// Time for which a destination counts as recent after its last frame.
const RECENT: Ns = Ns::from_secs(1);
/// Recent destinations tracked per sender. A sender to more never waits.
const RECENT_MAX: usize = 8;

/// A held frame.
pub(crate) struct HeldFrame {
    pub bytes: Box<[u8]>,
    pub hdr: VnetHdr,
    /// Segments of it that were delivered.
    pub part: usize,
    pub since: Instant,
    /// The sender's counters: losses are counted there, too. `None` for a flooded frame, of which
    /// others have a copy.
    pub from: Option<Arc<IngressStats>>,
}

/// The frames held for one egress queue, oldest first. Used under the queue's lock, except for
/// [`clear`](Self::clear).
pub(crate) struct Hold {
    frames: VecDeque<HeldFrame>,
    account: Arc<Account>,
}

impl Hold {
    pub fn new(account: Arc<Account>) -> Self {
        Self { frames: VecDeque::new(), account }
    }

    pub fn len(&self) -> usize {
        self.frames.len()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &HeldFrame> {
        self.frames.iter()
    }

    /// Charges a frame of `len` bytes before it is copied; false: it exceeds a limit.
    pub fn charge(&mut self, len: u32, frames_max: u16) -> bool {
        if self.frames.len() >= usize::from(frames_max) {
            return false;
        }
        if self.account.held_frames.take(1).is_err() {
            return false;
        }
        let fits = self.account.held_bytes.take(len.into()).is_ok();
        if !fits {
            self.account.held_frames.give_back(1);
        }
        fits
    }

    /// Segments of the oldest frame that were delivered.
    pub fn part(&self) -> usize {
        self.frames.front().map_or(0, |frame| frame.part)
    }

    /// Sets [`part`](Self::part).
    pub fn set_part(&mut self, part: usize) {
        if let Some(frame) = self.frames.front_mut() {
            frame.part = part;
        }
    }

    /// Adds a frame that was charged.
    pub fn push(&mut self, frame: HeldFrame) {
        self.frames.push_back(frame);
    }

    /// Removes the oldest `n` frames.
    pub fn remove(&mut self, n: usize) {
        self.frames.drain(..n).for_each(|frame| give_back(&self.account, &frame));
        self.shrink();
    }

    /// Drops the frames held for too long; returns their number. `for_rate`: the rate of their
    /// receiver held them, not a full queue.
    pub fn expire(&mut self, now: Instant, for_rate: bool, stats: &EgressStats) -> u64 {
        let mut given_up = 0;
        let late = |frame: &mut HeldFrame| now - frame.since > WAIT_MAX;
        while let Some(frame) = self.frames.pop_front_if(late) {
            give_back(&self.account, &frame);
            given_up += 1;
            match &frame.from {
                _ if for_rate => stats.drops_rate_aged.add(1),
                Some(sender) => {
                    sender.drops_no_room.add(1);
                    stats.lost_aged.add(1);
                }
                None => stats.drops_aged.add(1),
            }
        }
        if given_up > 0 {
            self.shrink();
        }
        given_up
    }

    /// Drops all frames: their destination is down.
    pub fn clear(&mut self, stats: &EgressStats) {
        stats.drops_held_down.add(self.frames.len() as u64);
        self.remove(self.frames.len());
    }

    /// Frees the memory of an empty queue.
    fn shrink(&mut self) {
        if self.frames.is_empty() {
            self.frames = VecDeque::new();
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.remove(self.frames.len());
    }
}

fn give_back(account: &Account, frame: &HeldFrame) {
    account.held_frames.give_back(1);
    account.held_bytes.give_back(frame.bytes.len() as u64);
}

/// Decides whether senders are paused for a destination: not if it accepts too few frames in the
/// time, even at a steady rate.
#[derive(Default)]
pub(crate) struct PauseMeter {
    /// Times of the first and the last pause in this window.
    since_ns: AtomicU64,
    last_ns: AtomicU64,
    /// Frames delivered by the start of the window.
    delivered: AtomicU64,
    slow_until_ns: AtomicU64,
}

impl PauseMeter {
    /// Whether it is too slow for senders to wait for it.
    pub fn is_slow(&self, now: Instant) -> bool {
        now.ns() < self.slow_until_ns.load(Ordering::Relaxed)
    }

    /// Records a pause at `now`, with the number of frames `delivered` so far.
    pub fn record_pause(&self, delivered: u64, now: Instant) {
        let last = Instant::from_ns(self.last_ns.swap(now.ns(), Ordering::Relaxed));
        let since = Instant::from_ns(self.since_ns.load(Ordering::Relaxed));
        if now - last <= PAUSE_WINDOW {
            if now - since <= PAUSE_WINDOW {
                return;
            }
            let moved = delivered.wrapping_sub(self.delivered.load(Ordering::Relaxed));
            if moved < PAUSE_FRAMES_MIN {
                self.slow_until_ns.store((now + SLOW_FOR).ns(), Ordering::Relaxed);
            }
        }
        self.since_ns.store(now.ns(), Ordering::Relaxed);
        self.delivered.store(delivered, Ordering::Relaxed);
    }
}

/// Backpressure on one ingress queue: its recent destinations, and whether one of them was full.
#[derive(Clone, Debug, Default)]
pub struct Backpressure {
    /// Destinations of unicast frames, each with the time of the last; the latest first.
    recent: RefCell<Vec<(QueueId, Instant)>>,
    /// Time at which a recent destination was dropped from the list for lack of room.
    forgot: Cell<Option<Instant>>,
    /// The full queue, and the length of the frame that did not fit.
    full: Cell<Option<(QueueId, u32)>>,
}

impl Backpressure {
    /// Records that frames are for a queue.
    #[inline]
    pub(crate) fn record_destination(&self, to: QueueId, now: Instant) {
        let mut recent = self.recent.borrow_mut();
        match recent.first_mut() {
            Some((last, when)) if *last == to => *when = now,
            _ => self.add_destination(&mut recent, to, now),
        }
    }

    #[cold]
    fn add_destination(&self, recent: &mut Vec<(QueueId, Instant)>, to: QueueId, now: Instant) {
        recent.retain(|(other, when)| *other != to && is_recent(*when, now));
        if recent.len() == RECENT_MAX {
            recent.pop();
            self.forgot.set(Some(now));
        }
        recent.insert(0, (to, now));
    }

    /// Its recent destinations; `None`: more than are tracked.
    pub(crate) fn recent(&self, now: Instant) -> Option<Vec<QueueId>> {
        if self.forgot.get().is_some_and(|at| is_recent(at, now)) {
            return None;
        }
        let recent = self.recent.borrow();
        let recent = recent.iter().filter(|(_, when)| is_recent(*when, now));
        Some(recent.map(|(to, _)| *to).collect())
    }

    /// Whether `is` holds for any recent destination.
    pub(crate) fn any(&self, is: impl Fn(QueueId) -> bool) -> bool {
        self.recent.borrow().iter().any(|(to, _)| is(*to))
    }

    /// The full queue it waits for, and the length of the frame that did not fit, in bytes.
    pub fn blocked_on(&self) -> Option<(QueueId, u32)> {
        self.full.get()
    }

    pub(crate) fn set_full(&self, full: Option<(QueueId, u32)>) {
        self.full.set(full);
    }
}

fn is_recent(when: Instant, now: Instant) -> bool {
    now - when < RECENT
}

#[cfg(test)]
mod tests;
