//! Run-time settings of an ingress queue, and its state.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use shm::sync::{Lock, Mutex, MutexGuard};

use crate::fair::{Pace, Share};
use crate::poll::{Policy, State};

/// Drain state of a queue: requested by an operator, completed by its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Drain {
    /// Not draining: new frames are taken.
    Off,
    /// A drain was requested; its worker may not have seen that yet.
    Requested,
    /// Drained: no frames are taken.
    Done,
}

impl Drain {
    /// Its name in `ctl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Requested => "draining",
            Self::Done => "drained",
        }
    }
}

/// What a queue owes, and how long its bursts are. It outlives the ring and the connection of its
/// peer, which would otherwise be rid of both by a restart of the ring.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    pub share: Share,
    pub pace: Pace,
}

/// Settings of one ingress queue, changed by any thread and read by its worker once per burst; the
/// announcement to send for its peer; and its state, for display. No other queue's is in one of its
/// pairs of cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub struct Tuning {
    poll: AtomicU64,
    weight: AtomicU32,
    drain: AtomicU8,
    state: AtomicU8,
    worker: AtomicU8,
    has_rate: AtomicBool,
    /// The address to announce, in the lower 48 bits; [`NOTHING`]: none.
    announcement: AtomicU64,
    /// Addresses to announce after that one.
    further: Mutex<VecDeque<[u8; 6]>>,
    /// What its worker knew of the queue when it stopped serving it.
    standing: Mutex<Standing>,
}

/// No address: it has more than 48 bits.
const NOTHING: u64 = u64::MAX;

impl Tuning {
    /// Creates settings with this poll policy and weight 1.
    pub fn new(poll: Policy) -> Self {
        Self {
            poll: AtomicU64::new(poll.to_bits()),
            weight: AtomicU32::new(1),
            drain: AtomicU8::new(Drain::Off as u8),
            state: AtomicU8::new(State::Cold as u8),
            worker: AtomicU8::new(0),
            has_rate: AtomicBool::new(false),
            announcement: AtomicU64::new(NOTHING),
            further: Mutex::new(Lock::Announcements, VecDeque::new()),
            standing: Mutex::new(Lock::Standing, Standing::default()),
        }
    }

    /// What the queue's previous worker [left](Self::set_standing).
    pub(crate) fn standing(&self) -> Standing {
        *self.standing.lock()
    }

    /// Sets [`standing`](Self::standing), when the queue is not served any more.
    pub(crate) fn set_standing(&self, standing: Standing) {
        *self.standing.lock() = standing;
    }

    /// Poll policy.
    #[inline]
    pub fn poll(&self) -> Policy {
        Policy::from_bits(self.poll_bits())
    }

    /// [`poll`](Self::poll) as [`Policy::to_bits`] has it.
    #[inline]
    pub(crate) fn poll_bits(&self) -> u64 {
        self.poll.load(Ordering::Relaxed)
    }

    /// Sets [`poll`](Self::poll). Notify the queue's worker if the queue may be cold.
    pub fn set_poll(&self, policy: Policy) {
        self.poll.store(policy.to_bits(), Ordering::Relaxed);
    }

    /// The port's weight in the sharing of a worker's time.
    #[inline]
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Sets [`weight`](Self::weight), from 1 to [`WEIGHT_MAX`](crate::fair::WEIGHT_MAX).
    pub fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Ordering::Relaxed);
    }

    /// Whether the queue is being drained.
    #[inline]
    pub fn drain(&self) -> Drain {
        match self.drain.load(Ordering::Relaxed) {
            0 => Drain::Off,
            1 => Drain::Requested,
            _ => Drain::Done,
        }
    }

    /// Requests a drain, or its end. Notify the queue's worker, if it has one.
    pub fn set_drain(&self, on: bool) {
        if on {
            // A drained queue stays drained.
            let _ = self.swap_drain(Drain::Off, Drain::Requested);
        } else {
            self.drain.store(Drain::Off as u8, Ordering::Relaxed);
        }
    }

    /// Set by the queue's worker: it has taken no frames since the request.
    pub fn complete_drain(&self) {
        // Not if the drain was ended in between.
        let _ = self.swap_drain(Drain::Requested, Drain::Done);
    }

    fn swap_drain(&self, from: Drain, to: Drain) -> Result<u8, u8> {
        let (from, to) = (from as u8, to as u8);
        self.drain.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
    }

    /// Whether the port's account limits the rate of frames from the peer.
    #[inline]
    pub fn has_rate(&self) -> bool {
        self.has_rate.load(Ordering::Relaxed)
    }

    /// Sets [`has_rate`](Self::has_rate). Notify the queue's worker: it may wait for the rate.
    pub fn set_has_rate(&self, on: bool) {
        self.has_rate.store(on, Ordering::Relaxed);
    }

    /// Requests that the queue's worker announce an address for its peer, in the queue's own turn.
    /// Replaces an earlier request that was not served yet. Notify the worker afterwards.
    pub fn announce(&self, mac: [u8; 6]) {
        self.announcement.store(bits(mac), Ordering::Relaxed);
    }

    /// Requests the announcement of several addresses in one turn of the queue. Replaces earlier
    /// requests.
    pub fn announce_all(&self, macs: &[[u8; 6]]) {
        let mut further = self.further();
        further.clear();
        further.extend(macs.iter().skip(1));
        let first = macs.first().map_or(NOTHING, |mac| bits(*mac));
        self.announcement.store(first, Ordering::Relaxed);
    }

    fn further(&self) -> MutexGuard<'_, VecDeque<[u8; 6]>> {
        self.further.lock()
    }

    /// The address to be announced.
    #[inline]
    pub fn announcement(&self) -> Option<[u8; 6]> {
        address(self.announcement.load(Ordering::Relaxed))
    }

    /// Takes the address to be announced, so that it is announced once.
    pub fn take_announcement(&self) -> Option<[u8; 6]> {
        let next = self.further().pop_front().map_or(NOTHING, bits);
        address(self.announcement.swap(next, Ordering::Relaxed))
    }

    /// Current state of the queue.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::Hot,
            1 => State::Warm,
            _ => State::Cold,
        }
    }

    /// Set by the queue's worker.
    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Which worker serves it.
    pub fn worker(&self) -> u8 {
        self.worker.load(Ordering::Relaxed)
    }

    /// Set when the queue is assigned to a worker.
    pub fn set_worker(&self, worker: u8) {
        self.worker.store(worker, Ordering::Relaxed);
    }
}

fn bits(mac: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

fn address(bits: u64) -> Option<[u8; 6]> {
    let [_, _, mac @ ..] = bits.to_be_bytes();
    (bits != NOTHING).then_some(mac)
}
