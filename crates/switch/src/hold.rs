//! Frames that wait for a full destination, and senders that are paused for it.
//!
//! A destination that is full keeps what it was given in a queue of its own, in private memory,
//! bounded in frames, bytes and age, and charged to *its* account. The sender gets its buffers back
//! at once: whatever a receiver does, it holds nothing of a sender's. What does not fit the bounds
//! is dropped, and counted at both ends.
//!
//! A sender that has sent to nobody else lately is in addition *paused* ([`Backpressure`]): no more
//! is taken from its ring than the destination has room for, so that a fast sender and a slow
//! receiver lose nothing between them. One that also sends to others never waits. Nor does any for
//! a destination that takes less than [`PAUSE_FRAMES_MIN`] frames in [`PAUSE_NS`].
//!
//! ```text
//!   sender's ring ──burst──▶ destination's ring          it fits
//!                     └────▶ hold queue ────▶ ring       it is full: copied once more
//!                     └────▶ dropped                     the hold queue is full, too
//! ```
//!
//! Design note 0015.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::account::Account;
use crate::fdb::PortId;
use crate::stats::{EgressStats, IngressStats};
use crate::vnet::VnetHdr;

/// Most frames that may wait for one queue.
pub const HOLD_MAX: u16 = 1024;
/// Frames that may wait for one queue unless an operator says otherwise: four bursts.
pub const HOLD_DEFAULT: u16 = 256;
/// Longest time that a frame waits, in ns. A TCP sender sends it again by then (RFC 6298 has 1 s,
/// Linux 200 ms).
pub const WAIT_NS_MAX: u64 = 200_000_000;
/// How often a worker re-checks a full destination that does not notify, in ns.
pub const RETRY_NS: u64 = 12_500_000;
/// A destination for which senders are paused must take [`PAUSE_FRAMES_MIN`] frames in this time,
/// in ns. Long enough for a receiver that was scheduled away on a busy machine.
pub const PAUSE_NS: u64 = 50_000_000;
/// See [`PAUSE_NS`].
pub const PAUSE_FRAMES_MIN: u64 = 16;
/// How long nobody is paused for a destination that took fewer, in ns.
const SLOW_NS: u64 = 1_000_000_000;
/// How long a sender counts as one of several destinations after it sent to another one, in ns.
const MIXED_NS: u64 = 1_000_000_000;

/// A frame that waits.
pub(crate) struct HeldFrame {
    pub bytes: Box<[u8]>,
    pub hdr: VnetHdr,
    pub since_ns: u64,
    /// The sender's counters: what is lost is counted there, too. `None` for a flooded frame,
    /// of which others have a copy.
    pub from: Option<Arc<IngressStats>>,
}

/// The frames that wait for one egress queue, oldest first. Used under the queue's lock, but for
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

    /// Charges a frame of `len` bytes, before it is copied; false: there is no room for it.
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

    /// Adds a frame that was charged.
    pub fn push(&mut self, frame: HeldFrame) {
        self.frames.push_back(frame);
    }

    /// Removes the oldest `n` frames.
    pub fn remove(&mut self, n: usize) {
        self.frames.drain(..n).for_each(|frame| give_back(&self.account, &frame));
        self.shrink();
    }

    /// Gives up the frames that have waited for too long; how many.
    pub fn expire(&mut self, now_ns: u64, stats: &EgressStats) -> u64 {
        let mut given_up = 0;
        let late = |frame: &mut HeldFrame| now_ns.saturating_sub(frame.since_ns) > WAIT_NS_MAX;
        while let Some(frame) = self.frames.pop_front_if(late) {
            give_back(&self.account, &frame);
            given_up += 1;
            if let Some(sender) = &frame.from {
                sender.drops_no_room.add(1);
                stats.lost_aged.add(1);
            } else {
                stats.drops_aged.add(1);
            }
        }
        if given_up > 0 {
            self.shrink();
        }
        given_up
    }

    /// Gives up all frames: their destination is down.
    pub fn clear(&mut self, stats: &EgressStats) {
        stats.drops_held_down.add(self.frames.len() as u64);
        self.remove(self.frames.len());
    }

    /// A queue that is empty takes no memory.
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

/// Whether senders are paused for a destination: not if it takes too little meanwhile, however
/// steadily. One that drips does not renew its time.
#[derive(Default)]
pub(crate) struct PauseMeter {
    /// When a sender was first paused in this window, and last.
    since_ns: AtomicU64,
    last_ns: AtomicU64,
    /// Frames delivered by the start of the window.
    delivered: AtomicU64,
    slow_until_ns: AtomicU64,
}

impl PauseMeter {
    /// Whether no sender is to wait for it.
    pub fn is_slow(&self, now_ns: u64) -> bool {
        now_ns < self.slow_until_ns.load(Ordering::Relaxed)
    }

    /// A sender is paused at `now_ns`; `delivered` frames were so far.
    pub fn paused(&self, delivered: u64, now_ns: u64) {
        let last = self.last_ns.swap(now_ns, Ordering::Relaxed);
        let since = self.since_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(last) <= PAUSE_NS {
            if now_ns.saturating_sub(since) <= PAUSE_NS {
                return;
            }
            let moved = delivered.wrapping_sub(self.delivered.load(Ordering::Relaxed));
            if moved < PAUSE_FRAMES_MIN {
                self.slow_until_ns.store(now_ns.saturating_add(SLOW_NS), Ordering::Relaxed);
            }
        }
        self.since_ns.store(now_ns, Ordering::Relaxed);
        self.delivered.store(delivered, Ordering::Relaxed);
    }
}

/// What one ingress queue waits for, and whether it may be made to wait.
#[derive(Debug, Default)]
pub struct Backpressure {
    /// The destination that it sent to last, and when.
    last: Cell<Option<(PortId, u64)>>,
    /// When it last sent to another one than before.
    mixed_ns: Cell<Option<u64>>,
    /// The queue that had no room, and the length of the frame that did not fit.
    full: Cell<Option<(PortId, u16, u32)>>,
}

impl Backpressure {
    /// Notes that frames are for `port`.
    #[inline]
    pub(crate) fn sends_to(&self, port: PortId, now_ns: u64) {
        if let Some((last, when)) = self.last.get()
            && last != port
            && now_ns.saturating_sub(when) < MIXED_NS
        {
            self.mixed_ns.set(Some(now_ns));
        }
        self.last.set(Some((port, now_ns)));
    }

    /// Whether it sends to several destinations: then it waits for none.
    pub(crate) fn is_mixed(&self, now_ns: u64) -> bool {
        self.mixed_ns.get().is_some_and(|at| now_ns.saturating_sub(at) < MIXED_NS)
    }

    /// The queue that it waits for, and the length of the frame that did not fit, in bytes.
    pub fn waits_for(&self) -> Option<(PortId, u16, u32)> {
        self.full.get()
    }

    pub(crate) fn set_full(&self, full: Option<(PortId, u16, u32)>) {
        self.full.set(full);
    }
}

#[cfg(test)]
mod tests;
