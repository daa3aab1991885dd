//! Call policies: when to notify the peer of published frames.

use super::{Policy, tick_after};
use crate::time::{Instant, Ns};

/// Decision after a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Notify the peer now, if it wants notifications.
    Now,
    /// Call [`Notifier::due`] at this time.
    At(Instant),
    /// An earlier returned time is still valid.
    Later,
}

/// Frames per latency target from which `adaptive` delays: one notification for this many is worth
/// the delay, and request-reply traffic has fewer in flight.
const MANY: u64 = 8;
/// Most frames that `adaptive` gathers: a quarter of a ring of 256.
const GATHERED_MAX: u32 = 64;
/// Windows of the latency target without gathering, after a delay that did not pay.
const REST_WINDOWS: u8 = 16;

/// Call policy with its state for one queue, on the writer's side. `event`, `napi` and `spin`
/// notify once per publication: the event index (or flag) of a polling peer already suppresses
/// needless notifications, and frames gathered by a warm queue are one publication.
///
/// `adaptive` does so, too, at low rates; at high rates it notifies once per latency target, or per
/// 64 frames. It gathers only while more frames arrive ([`gathers`](Self::gathers)), so that the
/// delay needs no wake-up and the peer never waits for an idle writer; a delay that ended because
/// the writer became idle did not pay, and is not repeated for sixteen windows.
#[derive(Clone, Copy, Debug)]
pub struct Notifier {
    policy: Policy,
    /// Frames without a notification so far.
    pending: u32,
    /// Publication time of the first of them.
    since: Instant,
    /// The last returned time, until it is reached; [`Instant::NEVER`]: none.
    asked: Instant,
    /// Time of the last notification.
    notified: Instant,
    window: Window,
}

/// Rate measurement of `adaptive`.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// Start of the count.
    since: Instant,
    frames: u64,
    /// Whether the previous window had many frames.
    many: bool,
    /// Remaining windows without gathering.
    rest: u8,
}

impl Notifier {
    /// Creates the state with nothing pending.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            pending: 0,
            since: Instant::START,
            asked: Instant::NEVER,
            notified: Instant::START,
            window: Window::default(),
        }
    }

    /// Whether the policy ever delays notifications. If not, it needs no state.
    pub fn delays(policy: Policy) -> bool {
        match policy {
            Policy::Timer { .. } => true,
            Policy::Coalesce { usecs, frames } => usecs > 0 && frames > 1,
            Policy::CoalescePending { usecs } => usecs > 0,
            Policy::Adaptive { latency_us } => latency_us > 0,
            Policy::Event | Policy::Napi { .. } | Policy::Spin => false,
        }
    }

    /// Whether the policy delays only while more frames arrive: call [`flush`](Self::flush) when
    /// the writer has nothing to do, and before it sleeps.
    pub fn gathers(policy: Policy) -> bool {
        matches!(policy, Policy::Adaptive { .. })
    }

    /// The policy in use.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Changes the policy; pending frames stay pending.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Records a publication of `frames` at `now`.
    pub fn record_published(&mut self, frames: usize, now: Instant) -> Notify {
        if self.pending == 0 {
            self.since = now;
        }
        self.pending = self.pending.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
        if let Policy::Adaptive { latency_us } = self.policy {
            self.count(frames as u64, Ns::from_us(latency_us.into()), now);
        }
        let at = self.wanted(now);
        if at <= now {
            self.record_notified(now);
            return Notify::Now;
        }
        if at >= self.asked {
            return Notify::Later;
        }
        self.asked = at;
        Notify::At(at)
    }

    /// Decides at the returned time `at`: notify, call again later, or nothing.
    pub fn due(&mut self, at: Instant, now: Instant) -> Option<Notify> {
        if at != self.asked {
            // An earlier time was returned since.
            return None;
        }
        self.asked = Instant::NEVER;
        if self.pending == 0 {
            return None;
        }
        let at = self.wanted(now);
        if at <= now {
            self.record_notified(now);
            return Some(Notify::Now);
        }
        self.asked = at;
        Some(Notify::At(at))
    }

    /// Records that the peer was notified, independent of the policy.
    pub fn record_notified(&mut self, now: Instant) {
        self.pending = 0;
        self.notified = now;
    }

    /// Clears the returned time. True: notify the peer now. False: nothing is pending.
    pub fn flush(&mut self) -> bool {
        self.asked = Instant::NEVER;
        let pending = std::mem::take(&mut self.pending) > 0;
        if pending {
            (self.window.many, self.window.rest) = (false, REST_WINDOWS);
        }
        pending
    }

    /// Time at which the peer must be notified of the pending frames.
    fn wanted(&self, now: Instant) -> Instant {
        let after = |start: Instant, usecs: u32| start + Ns::from_us(usecs.into());
        match self.policy {
            Policy::Timer { hz } => tick_after(self.since, hz),
            Policy::Coalesce { frames, .. } if self.pending >= u32::from(frames) => now,
            Policy::Coalesce { usecs, .. } => after(self.since, usecs),
            Policy::CoalescePending { usecs } => {
                self.since + Ns::from_us(usecs.into()) / u64::from(self.pending.max(1))
            }
            Policy::Adaptive { latency_us } if self.window.many && self.pending < GATHERED_MAX => {
                after(self.notified, latency_us)
            }
            _ => now,
        }
    }

    /// Counts frames in windows of `length` or more.
    fn count(&mut self, frames: u64, length: Ns, now: Instant) {
        let window = &mut self.window;
        let took = now - window.since;
        if took >= length {
            let many = length * window.frames >= took * MANY;
            window.many = many && length > Ns::ZERO && window.rest == 0;
            window.rest = window.rest.saturating_sub(1);
            (window.since, window.frames) = (now, 0);
        }
        window.frames = window.frames.saturating_add(frames);
    }
}
