//! The transmit queue: sends frames, notifies the switch, and reclaims buffers.

use std::collections::VecDeque;
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
    /// `tx-full=queue`: frames for which the ring had no room, as (buffer, length).
    queue: VecDeque<(u16, u32)>,
    /// Buffers that the ring has room for; the others are those of `queue`.
    ring_buffers: u16,
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
    /// `queue`: frames that waited beside the ring.
    pub queued: u64,
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
        self.queued += other.queued;
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
            queue: VecDeque::with_capacity(settings.full.queue().into()),
            ring_buffers: ring.size() - settings.full.queue(),
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

    /// Buffers in flight, those of queued frames included.
    pub fn in_flight(&self) -> u16 {
        self.ring.size() - u16::try_from(self.free.len()).unwrap_or(u16::MAX)
    }

    /// Buffers on the ring.
    fn on_ring(&self) -> u16 {
        self.in_flight() - u16::try_from(self.queue.len()).unwrap_or(u16::MAX)
    }

    /// Reclaims used buffers, and moves queued frames to the room on the ring.
    pub fn reclaim(&mut self) -> Result<(), Malformed> {
        let reclaimed = self.ring.reclaim(&mut self.free)?;
        self.counts.reclaims += u64::from(reclaimed > 0);
        self.counts.reclaimed += reclaimed as u64;
        if reclaimed > 0 && !self.queue.is_empty() {
            while self.on_ring() < self.ring_buffers
                && let Some((i, len)) = self.queue.pop_front()
            {
                let sent = self.ring.add(i, len, false);
                assert!(sent, "virtqueues accept all frames");
            }
            self.ring.publish();
            // They have waited: no kick policy delays them further.
            self.kick_now();
        }
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
        // The sender may have no frame that would make it reclaim.
        if !self.queue.is_empty() && self.is_due(true) {
            self.reclaim()?;
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
        let on_ring = usize::from(self.ring_buffers - self.on_ring());
        if self.is_due(self.sendable().min(on_ring) < want || !self.queue.is_empty()) {
            self.reclaim()?;
        }
        Ok(self.sendable().min(want))
    }

    /// Whether to reclaim buffers now, outside of timer ticks. `short`: more are wanted.
    fn is_due(&self, short: bool) -> bool {
        match self.completion {
            Completion::BeforeTx => true,
            Completion::Timer { .. } => false,
            Completion::Orphan => short,
            Completion::OnEmpty | Completion::OnHalfEmpty => {
                short && self.ring.has_used_many(self.awaited())
            }
        }
    }

    /// Number of frames with a free buffer and room on the ring.
    fn sendable(&self) -> usize {
        self.free.len().min(self.ring.frames_free())
    }

    /// How many more buffers must be used before a reclaim.
    fn awaited(&self) -> u16 {
        let (half, free) = (self.ring_buffers.div_ceil(2), self.ring_buffers - self.on_ring());
        match self.completion {
            Completion::OnEmpty => self.on_ring(),
            Completion::OnHalfEmpty => half.saturating_sub(free),
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

    /// Sends free buffer `i` with `len` bytes, including the header, or queues it while the ring
    /// is full. Returns false if the frame was dropped; the buffer is then free.
    pub fn send(&mut self, i: u16, len: u32) -> bool {
        // Usually the last one: buffers are filled in the order of `free`.
        let at = self.free.iter().rposition(|free| *free == i).expect("a free buffer");
        self.free.remove(at);
        // The buffer of this frame is neither free nor queued, so it counts as one on the ring.
        if self.on_ring() > self.ring_buffers || !self.queue.is_empty() {
            self.queue.push_back((i, len));
            self.counts.queued += 1;
            return true;
        }
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
            Full::Stop | Full::Queue(_) => {
                self.counts.stops += u64::from(!self.stopped);
            }
        }
        self.stopped = true;
        self.full == Full::BusyRetry
    }

    /// Prepares a sleep; `blocked`: a frame waits for a free buffer.
    pub(super) fn prepare_sleep(&mut self, blocked: bool) -> Result<SleepMode, Malformed> {
        let awaited = self.awaited();
        let wants_call = match self.completion {
            Completion::BeforeTx | Completion::Orphan => blocked || !self.queue.is_empty(),
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
