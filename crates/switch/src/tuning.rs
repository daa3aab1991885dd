//! What an operator can set for an ingress queue while it runs, and what it is doing.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::poll::{Policy, State};

/// Whether a queue is being drained: asked for by an operator, said to be done by its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Drain {
    /// New frames are taken.
    Off,
    /// None are to be taken; its worker may not know yet.
    Asked,
    /// None are taken.
    Done,
}

impl Drain {
    /// Its name in `ctl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Asked => "draining",
            Self::Done => "drained",
        }
    }
}

/// Settings of one ingress queue, changed by anyone and read by its worker once per burst; what its
/// worker is to send for its peer; and its state, for people.
#[derive(Debug)]
pub struct Tuning {
    poll: AtomicU64,
    weight: AtomicU32,
    drain: AtomicU8,
    state: AtomicU8,
    worker: AtomicU8,
    /// The address to announce, in the lower 48 bits; [`NOTHING`]: none.
    announcement: AtomicU64,
}

/// No address: it has more than 48 bits.
const NOTHING: u64 = u64::MAX;

impl Tuning {
    /// Weight 1.
    pub fn new(poll: Policy) -> Self {
        Self {
            poll: AtomicU64::new(poll.to_bits()),
            weight: AtomicU32::new(1),
            drain: AtomicU8::new(Drain::Off as u8),
            state: AtomicU8::new(State::Cold as u8),
            worker: AtomicU8::new(0),
            announcement: AtomicU64::new(NOTHING),
        }
    }

    /// When the queue is looked at.
    #[inline]
    pub fn poll(&self) -> Policy {
        Policy::from_bits(self.poll.load(Ordering::Relaxed))
    }

    /// Sets [`poll`](Self::poll). The queue's worker is to be told if the queue may be cold.
    pub fn set_poll(&self, policy: Policy) {
        self.poll.store(policy.to_bits(), Ordering::Relaxed);
    }

    /// The port's part of a worker's time, against other ports'.
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
            1 => Drain::Asked,
            _ => Drain::Done,
        }
    }

    /// Asks for no more frames to be taken, or for frames again. The queue's worker is to be told,
    /// if it has one.
    pub fn set_drain(&self, on: bool) {
        if on {
            // One that is drained already stays so.
            let _ = self.swap_drain(Drain::Off, Drain::Asked);
        } else {
            self.drain.store(Drain::Off as u8, Ordering::Relaxed);
        }
    }

    /// Told by the queue's worker: it has taken none since it was asked.
    pub fn drained(&self) {
        // Not if it was asked for frames again meanwhile.
        let _ = self.swap_drain(Drain::Asked, Drain::Done);
    }

    fn swap_drain(&self, from: Drain, to: Drain) -> Result<u8, u8> {
        let (from, to) = (from as u8, to as u8);
        self.drain.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
    }

    /// Asks the queue's worker to announce an address for its peer, in the queue's own turn, in
    /// place of one that it was asked for and has not announced. The worker is to be notified.
    pub fn announce(&self, mac: [u8; 6]) {
        let [a, b, c, d, e, f] = mac;
        let bits = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        self.announcement.store(bits, Ordering::Relaxed);
    }

    /// The address to be announced.
    #[inline]
    pub fn announcement(&self) -> Option<[u8; 6]> {
        address(self.announcement.load(Ordering::Relaxed))
    }

    /// The same, which is not to be announced any more by anyone else.
    pub fn take_announcement(&self) -> Option<[u8; 6]> {
        address(self.announcement.swap(NOTHING, Ordering::Relaxed))
    }

    /// How the queue is served at the moment.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::Hot,
            1 => State::Warm,
            _ => State::Cold,
        }
    }

    /// Told by the queue's worker.
    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Which worker serves it.
    pub fn worker(&self) -> u8 {
        self.worker.load(Ordering::Relaxed)
    }

    /// Told by whoever gives it to a worker.
    pub fn set_worker(&self, worker: u8) {
        self.worker.store(worker, Ordering::Relaxed);
    }
}

fn address(bits: u64) -> Option<[u8; 6]> {
    let [_, _, mac @ ..] = bits.to_be_bytes();
    (bits != NOTHING).then_some(mac)
}
