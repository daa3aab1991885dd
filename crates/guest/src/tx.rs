//! The transmit queue: sends frames, notifies the switch, and reclaims buffers.

use std::ops::AddAssign;

use shm::SegMut;
use switch::poll::{Notifier, Notify, Policy, tick_after};
use switch::time::Instant;

use crate::ring::{HDR_LEN, Malformed, Ring};
use crate::settings::{Completion, Full, Settings};

/// The transmit queue and its buffers.
pub struct Tx {
    /// Its ring.
    pub ring: Ring,
    free: Vec<u16>,
    completion: Completion,
    full: Full,
    burst: usize,
    notifier: Notifier,
    /// When to make a delayed kick.
    kick_at: Option<Instant>,
    /// `tx-completion=timer`: the next tick, while anything is in flight.
    reclaim_at: Option<Instant>,
    /// No frame has been sent since one found no buffer.
    stopped: bool,
    /// Counters.
    pub counts: TxCounts,
}

/// Counters of a transmit queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct TxCounts {
    /// Frames sent.
    pub frames: u64,
    /// Polls that reclaimed buffers.
    pub reclaims: u64,
    /// Buffers reclaimed.
    pub reclaimed: u64,
    /// `stop-before-full`: times a sender stopped for lack of a buffer.
    pub stops: u64,
    /// `busy-retry`: attempts that found no buffer.
    pub busy: u64,
    /// Frames dropped because the switch does not accept them: too long, or with an offload that
    /// is not negotiated.
    pub refused: u64,
}

impl AddAssign for TxCounts {
    fn add_assign(&mut self, other: Self) {
        self.frames += other.frames;
        self.reclaims += other.reclaims;
        self.reclaimed += other.reclaimed;
        self.stops += other.stops;
        self.busy += other.busy;
        self.refused += other.refused;
    }
}

/// Sleep that a transmit queue permits the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepMode {
    /// Do not sleep.
    Awake,
    /// Sleep; only [`Tx::deadline`] of this queue ends it.
    Unarmed,
    /// Sleep; the switch calls when buffers can be reclaimed.
    Armed,
}

impl Tx {
    pub(super) fn new(ring: Ring, settings: &Settings) -> Self {
        Self {
            free: (0..ring.size()).rev().collect(),
            ring,
            completion: settings.completion,
            full: settings.full,
            burst: settings.tx_burst.into(),
            notifier: Notifier::new(settings.kick),
            kick_at: None,
            reclaim_at: None,
            stopped: false,
            counts: TxCounts::default(),
        }
    }

    /// Buffers in flight.
    pub fn in_flight(&self) -> u16 {
        self.ring.size() - u16::try_from(self.free.len()).unwrap_or(u16::MAX)
    }

    /// Reclaims used buffers.
    pub fn reclaim(&mut self) -> Result<(), Malformed> {
        let reclaimed = self.ring.reclaim(&mut self.free)?;
        self.counts.reclaims += u64::from(reclaimed > 0);
        self.counts.reclaimed += reclaimed as u64;
        Ok(())
    }

    /// Does work due at `now`: a delayed kick, a tick of the completion timer.
    pub fn tick(&mut self, now: Instant) -> Result<(), Malformed> {
        if self.kick_at.is_some_and(|at| at <= now) {
            self.kick_now();
        }
        if self.reclaim_at.is_some_and(|at| at <= now) {
            self.reclaim()?;
            self.reclaim_at = None;
            self.start_timer(now);
        }
        Ok(())
    }

    /// Starts the completion timer, if there is one and it is stopped.
    fn start_timer(&mut self, now: Instant) {
        if let (Completion::Timer { hz }, None) = (self.completion, self.reclaim_at) {
            self.reclaim_at = (self.in_flight() > 0).then(|| tick_after(now, hz));
        }
    }

    /// Time at which [`tick`](Self::tick) must be called.
    pub fn deadline(&self) -> Option<Instant> {
        [self.kick_at, self.reclaim_at].into_iter().flatten().min()
    }

    /// Returns how many of `want` frames may be sent at once now; reclaims buffers as set.
    pub fn room(&mut self, want: usize) -> Result<usize, Malformed> {
        let want = want.min(self.burst);
        let short = self.sendable() < want;
        let due = match self.completion {
            Completion::BeforeTx => true,
            Completion::Timer { .. } => false,
            Completion::Orphan => short,
            Completion::OnEmpty | Completion::OnHalfEmpty => {
                short && self.ring.has_used_many(self.awaited())
            }
        };
        if due {
            self.reclaim()?;
        }
        Ok(self.sendable().min(want))
    }

    /// Number of frames with a free buffer and room on the ring.
    fn sendable(&self) -> usize {
        self.free.len().min(self.ring.frames_free())
    }

    /// How many more buffers must be used before a reclaim.
    fn awaited(&self) -> u16 {
        let half = self.ring.size().div_ceil(2);
        match self.completion {
            Completion::OnEmpty => self.in_flight(),
            Completion::OnHalfEmpty => half.saturating_sub(self.ring.size() - self.in_flight()),
            _ => 1,
        }
    }

    /// Free buffers, in order of use.
    pub fn free(&self) -> impl Iterator<Item = u16> + '_ {
        self.free.iter().rev().copied()
    }

    /// Memory of buffer `i`, header first, in one or two segments.
    pub fn memory(&self, i: u16) -> impl Iterator<Item = SegMut<'_>> {
        self.ring.to_write(i, self.ring.room())
    }

    /// Memory of buffer `i` after a zeroed header: no offloads.
    pub fn plain(&self, i: u16) -> SegMut<'_> {
        let mut segs = self.memory(i);
        let mut header = segs.next().expect("a buffer has a header");
        header.write(&[0; HDR_LEN]);
        segs.next().unwrap_or(header)
    }

    /// Sends free buffer `i` with `len` bytes, including the header. Returns false if the frame was
    /// dropped; the buffer is then free.
    pub fn send(&mut self, i: u16, len: u32) -> bool {
        // Usually the last one: buffers are filled in the order of `free`.
        let at = self.free.iter().rposition(|free| *free == i).expect("a free buffer");
        self.free.remove(at);
        let sent = self.ring.add(i, len, false);
        if !sent {
            self.free.push(i);
            self.counts.refused += 1;
        }
        sent
    }

    /// Publishes the `frames` sent, and kicks now or later, by the kick policy.
    pub fn publish(&mut self, frames: usize, now: Instant) {
        self.ring.publish();
        self.counts.frames += frames as u64;
        self.stopped = false;
        self.start_timer(now);
        match self.notifier.record_published(frames, now) {
            Notify::Now => self.kick_now(),
            Notify::At(at) => self.kick_at = Some(at),
            Notify::Later => {}
        }
    }

    /// Kicks now under a policy that only batches, because no more frames are sent for now.
    pub(super) fn kick_batched(&mut self) {
        if self.kick_at.is_some() && Notifier::gathers(self.notifier.policy()) {
            self.kick_now();
        }
    }

    /// Sets the kick policy; a kick delayed by the previous one is made at once.
    pub(super) fn set_kick_policy(&mut self, kick: Policy) {
        self.notifier.set_policy(kick);
        if self.kick_at.is_some() {
            self.kick_now();
        }
    }

    /// Makes a delayed kick at once.
    pub fn kick_now(&mut self) {
        self.kick_at = None;
        self.notifier.flush();
        self.ring.kick();
    }

    /// Records that a frame waits for a free buffer. Returns whether to retry at once.
    pub(super) fn stop(&mut self) -> bool {
        // The switch may sleep, because of a delayed kick.
        self.kick_now();
        match self.full {
            Full::BusyRetry => self.counts.busy += 1,
            Full::StopBeforeFull => self.counts.stops += u64::from(!self.stopped),
        }
        self.stopped = true;
        self.full == Full::BusyRetry
    }

    /// Prepares a sleep; `blocked`: a frame waits for a free buffer.
    pub(super) fn prepare_sleep(&mut self, blocked: bool) -> Result<SleepMode, Malformed> {
        let awaited = self.awaited();
        let wants_call = match self.completion {
            Completion::BeforeTx | Completion::Orphan => blocked,
            Completion::OnEmpty | Completion::OnHalfEmpty => awaited > 0,
            Completion::Timer { .. } => false,
        };
        if !wants_call {
            return Ok(SleepMode::Unarmed);
        }
        if !self.ring.arm_after(awaited) {
            self.ring.disarm();
            self.reclaim()?;
            return Ok(SleepMode::Awake);
        }
        Ok(SleepMode::Armed)
    }
}
