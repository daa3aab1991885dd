//! One egress queue as all workers see it: its lock, its counters, when its peer is notified.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::hold::{HOLD_DEFAULT, Hold, PauseMeter};
use crate::poll::{Notifier, Notify, Policy};
use crate::port::Egress;
use crate::stats::EgressStats;

/// One egress queue, shared by all workers.
pub struct EgressQueue {
    /// The queue; locked once per group of frames.
    pub queue: Arc<Mutex<dyn Egress>>,
    /// Its counters.
    pub stats: Arc<EgressStats>,
    /// Workers that wait for it, one bit each; woken when it has room.
    pub waiters: AtomicU64,
    /// Frames that wait for room. Locked after the queue.
    pub(super) hold: Mutex<Hold>,
    /// How many those are.
    pub(super) holding: AtomicUsize,
    /// How many there may be.
    hold_max: AtomicU16,
    /// Whether senders are paused for it.
    pub(super) meter: PauseMeter,
    /// When a frame first found no room, of those since the last was delivered; 0: all did.
    pub(super) full_ns: AtomicU64,
    /// How many were delivered by then.
    pub(super) full_at: AtomicU64,
    /// That was [`STARVED_NS`] ago, and the operator is told.
    pub(super) starved: AtomicBool,
    /// When its peer is notified.
    call: AtomicU64,
    notifier: Mutex<Notifier>,
}

impl EgressQueue {
    /// A queue no one waits for.
    pub fn new(queue: Arc<Mutex<dyn Egress>>, stats: Arc<EgressStats>) -> Self {
        Self {
            queue,
            stats,
            waiters: AtomicU64::new(0),
            hold: Mutex::new(Hold::new(Arc::default())),
            holding: AtomicUsize::new(0),
            hold_max: AtomicU16::new(HOLD_DEFAULT),
            meter: PauseMeter::default(),
            full_ns: AtomicU64::new(0),
            full_at: AtomicU64::new(0),
            starved: AtomicBool::new(false),
            call: AtomicU64::new(Policy::Event.to_bits()),
            notifier: Mutex::new(Notifier::new(Policy::Event)),
        }
    }

    /// How many frames may wait for room.
    pub fn hold_max(&self) -> u16 {
        self.hold_max.load(Ordering::Relaxed)
    }

    /// Sets [`hold_max`](Self::hold_max), up to [`HOLD_MAX`](crate::hold::HOLD_MAX). 0: what does
    /// not fit is dropped, and no sender waits.
    pub fn set_hold_max(&self, frames: u16) {
        self.hold_max.store(frames, Ordering::Relaxed);
    }

    /// When the peer is notified of frames.
    #[inline]
    pub fn call(&self) -> Policy {
        Policy::from_bits(self.call.load(Ordering::Relaxed))
    }

    /// Sets [`call`](Self::call). What waits to be told is told when its time comes.
    pub fn set_call(&self, policy: Policy) {
        self.call.store(policy.to_bits(), Ordering::Relaxed);
    }

    /// `frames` were made visible. A time at which [`tell_late`](Self::tell_late) is to be called,
    /// if the peer is not notified now and there is none yet; it always is if it is `full`.
    #[inline]
    pub(super) fn notify(
        &self,
        queue: &mut dyn Egress,
        frames: usize,
        full: bool,
        now_ns: u64,
    ) -> Option<u64> {
        let policy = self.call();
        if !Notifier::waits(policy) {
            queue.notify();
            return None;
        }
        let mut notifier = self.notifier.lock().unwrap_or_else(PoisonError::into_inner);
        notifier.set_policy(policy);
        if full {
            notifier.told(now_ns);
            queue.notify();
            return None;
        }
        let told = notifier.published(frames, now_ns);
        if told == Notify::Now {
            queue.notify();
            return None;
        }
        self.stats.calls_late.add(1);
        match told {
            Notify::At(at) => Some(at),
            _ => None,
        }
    }

    /// The time `at` has come, or the worker `rests`. Another time, if the peer is to be told
    /// later.
    pub(super) fn tell_late(&self, at: u64, rests: bool, now_ns: u64) -> Option<u64> {
        let rests = rests && Notifier::gathers(self.call());
        if at > now_ns && !rests {
            return Some(at);
        }
        let mut queue = self.lock();
        let mut notifier = self.notifier.lock().unwrap_or_else(PoisonError::into_inner);
        notifier.set_policy(self.call());
        let told =
            if rests { notifier.flush().then_some(Notify::Now) } else { notifier.due(at, now_ns) };
        match told {
            Some(Notify::At(at)) => return Some(at),
            Some(Notify::Now) => queue.notify(),
            Some(Notify::Later) | None => {}
        }
        None
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, dyn Egress + 'static> {
        let contended = match self.queue.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(_)) => false,
        };
        // A panic elsewhere is our bug and ends the program; the guard is as good as any.
        let guard = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if contended {
            self.stats.contended.add(1);
        }
        guard
    }
}
