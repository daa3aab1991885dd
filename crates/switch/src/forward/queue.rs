//! An egress queue shared by all workers: its lock, counters, and call policy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};

use shm::sync::{Lock, Mutex, MutexGuard};

use super::Port;
use super::slow::LongDeliveries;
use crate::hold::{HOLD_DEFAULT, Hold, PauseMeter};
use crate::poll::{Notifier, Notify, Policy};
use crate::port::{Egress, QueueId};
use crate::serving::{Serving, panic_on_demand};
use crate::stats::EgressStats;
use crate::time::Instant;

/// One egress queue, shared by all workers. Its neighbours in a port's list are other workers':
/// none is in one of its pairs of cache lines, which some processors fetch together.
#[repr(align(128))]
pub struct EgressQueue {
    /// The queue; locked once per group of frames.
    pub queue: Arc<Mutex<dyn Egress>>,
    /// Its counters.
    pub stats: Arc<EgressStats>,
    /// Workers that wait for room, one bit each; woken when it has room.
    pub waiters: AtomicU64,
    /// Frames held for room. Locked after the queue.
    pub(super) hold: Mutex<Hold>,
    /// Number of held frames.
    pub(super) holding: AtomicUsize,
    /// Limit of held frames.
    hold_max: AtomicU16,
    /// Whether senders are paused for it.
    pub(super) meter: PauseMeter,
    /// Time of the first frame without room since the last delivery; 0: none.
    pub(super) full_ns: AtomicU64,
    /// Number of frames delivered by then.
    pub(super) full_at: AtomicU64,
    /// Whether that was `STALLED_AFTER` ago and was reported to the operator.
    pub(super) stalled: AtomicBool,
    /// Long deliveries so far, for [`is_slow`](Self::is_slow).
    pub(super) long: LongDeliveries,
    /// Call policy and pending notification.
    call: AtomicU64,
    notifier: Mutex<Notifier>,
}

/// An egress queue of a port, locked.
pub(super) struct LockedQueue<'p> {
    pub port: &'p Port,
    pub id: QueueId,
    pub egress: &'p EgressQueue,
    pub queue: MutexGuard<'p, dyn Egress + 'static>,
    _delivering: Serving,
}

impl Port {
    /// The queues of its flows, for [`import_flows`](Self::import_flows) of a port of another
    /// process, which must have the same `flow_key`: a flow that changed its queue could be
    /// received out of order.
    pub fn export_flows(&self, now_s: u32) -> Vec<u8> {
        self.steering.export(now_s)
    }

    /// Takes over flows from [`export_flows`](Self::export_flows). What is no flow is left out.
    pub fn import_flows(&self, flows: &[u8], now_s: u32) {
        self.steering.import(flows, now_s);
    }

    /// Locks one of its egress queues.
    #[inline]
    pub(super) fn lock(&self, queue: u16) -> LockedQueue<'_> {
        let egress = &self.egress[usize::from(queue)];
        let id = QueueId { port: self.id, queue };
        let queue = egress.lock();
        let _delivering = Serving::receiver(self.id);
        panic_on_demand("to", self.id);
        LockedQueue { port: self, id, egress, queue, _delivering }
    }
}

impl EgressQueue {
    /// Creates a queue without waiting workers.
    pub fn new(queue: Arc<Mutex<dyn Egress>>, stats: Arc<EgressStats>) -> Self {
        Self {
            queue,
            stats,
            waiters: AtomicU64::new(0),
            hold: Mutex::new(Lock::Hold, Hold::new(Arc::default())),
            holding: AtomicUsize::new(0),
            hold_max: AtomicU16::new(HOLD_DEFAULT),
            meter: PauseMeter::default(),
            full_ns: AtomicU64::new(0),
            full_at: AtomicU64::new(0),
            stalled: AtomicBool::new(false),
            long: LongDeliveries::default(),
            call: AtomicU64::new(Policy::Event.to_bits()),
            notifier: Mutex::new(Lock::Notifier, Notifier::new(Policy::Event)),
        }
    }

    /// Limit of frames held.
    pub fn hold_max(&self) -> u16 {
        self.hold_max.load(Ordering::Relaxed)
    }

    /// Sets [`hold_max`](Self::hold_max), up to [`HOLD_MAX`](crate::hold::HOLD_MAX). 0: frames that
    /// do not fit are dropped, and no sender waits.
    pub fn set_hold_max(&self, frames: u16) {
        self.hold_max.store(frames, Ordering::Relaxed);
    }

    /// Call policy: when the peer is notified of frames.
    #[inline]
    pub fn call(&self) -> Policy {
        Policy::from_bits(self.call.load(Ordering::Relaxed))
    }

    /// Sets [`call`](Self::call). Notifications already delayed keep their time.
    pub fn set_call(&self, policy: Policy) {
        self.call.store(policy.to_bits(), Ordering::Relaxed);
    }

    /// Notifies the peer of `frames` made visible, or returns the time at which to call
    /// [`notify_if_due`](Self::notify_if_due); `None` if that is set already. A `full` queue's peer
    /// is always notified now.
    #[inline]
    pub(super) fn notify(
        &self,
        queue: &mut dyn Egress,
        frames: usize,
        full: bool,
        now: Instant,
    ) -> Option<Instant> {
        let policy = self.call();
        if !Notifier::delays(policy) {
            queue.notify();
            return None;
        }
        let mut notifier = self.notifier.lock();
        notifier.set_policy(policy);
        if full {
            notifier.record_notified(now);
            queue.notify();
            return None;
        }
        let decision = notifier.record_published(frames, now);
        if decision == Notify::Now {
            queue.notify();
            return None;
        }
        self.stats.calls_late.add(1);
        match decision {
            Notify::At(at) => Some(at),
            _ => None,
        }
    }

    /// Notifies the peer if the time `at` has come, or the worker `rests`. Returns the new time, if
    /// it is to be notified later.
    pub(super) fn notify_if_due(&self, at: Instant, rests: bool, now: Instant) -> Option<Instant> {
        let rests = rests && Notifier::gathers(self.call());
        if at > now && !rests {
            return Some(at);
        }
        let mut queue = self.lock();
        let mut notifier = self.notifier.lock();
        notifier.set_policy(self.call());
        let decision =
            if rests { notifier.flush().then_some(Notify::Now) } else { notifier.due(at, now) };
        match decision {
            Some(Notify::At(at)) => return Some(at),
            Some(Notify::Now) => queue.notify(),
            Some(Notify::Later) | None => {}
        }
        None
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, dyn Egress + 'static> {
        self.queue.lock_with(|| self.stats.contended.add(1))
    }
}
