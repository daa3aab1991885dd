//! Call policies: when to notify the peer of published frames.

use super::{Policy, tick_after};

/// Decision after a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Notify the peer now, if it wants notifications.
    Now,
    /// Call [`Notifier::due`] at this time, in ns.
    At(u64),
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
    since_ns: u64,
    /// The last returned time, until it is reached; `u64::MAX`: none.
    asked_ns: u64,
    /// Time of the last notification.
    notified_ns: u64,
    window: Window,
}

/// Rate measurement of `adaptive`.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// Start of the count.
    since_ns: u64,
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
            since_ns: 0,
            asked_ns: u64::MAX,
            notified_ns: 0,
            window: Window::default(),
        }
    }

    /// Whether the policy ever delays notifications. If not, it needs no state.
    pub fn waits(policy: Policy) -> bool {
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

    /// Records a publication of `frames` at `now_ns`.
    pub fn published(&mut self, frames: usize, now_ns: u64) -> Notify {
        if self.pending == 0 {
            self.since_ns = now_ns;
        }
        self.pending = self.pending.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
        if let Policy::Adaptive { latency_us } = self.policy {
            self.count(frames as u64, u64::from(latency_us) * 1000, now_ns);
        }
        let at = self.wanted(now_ns);
        if at <= now_ns {
            self.record_notified(now_ns);
            return Notify::Now;
        }
        if at >= self.asked_ns {
            return Notify::Later;
        }
        self.asked_ns = at;
        Notify::At(at)
    }

    /// Decides at the returned time `at`: notify, call again later, or nothing.
    pub fn due(&mut self, at: u64, now_ns: u64) -> Option<Notify> {
        if at != self.asked_ns {
            // An earlier time was returned since.
            return None;
        }
        self.asked_ns = u64::MAX;
        if self.pending == 0 {
            return None;
        }
        let at = self.wanted(now_ns);
        if at <= now_ns {
            self.record_notified(now_ns);
            return Some(Notify::Now);
        }
        self.asked_ns = at;
        Some(Notify::At(at))
    }

    /// Records that the peer was notified, independent of the policy.
    pub fn record_notified(&mut self, now_ns: u64) {
        self.pending = 0;
        self.notified_ns = now_ns;
    }

    /// Clears the returned time. True: notify the peer now. False: nothing is pending.
    pub fn flush(&mut self) -> bool {
        self.asked_ns = u64::MAX;
        let pending = std::mem::take(&mut self.pending) > 0;
        if pending {
            (self.window.many, self.window.rest) = (false, REST_WINDOWS);
        }
        pending
    }

    /// Time at which the peer must be notified of the pending frames.
    fn wanted(&self, now_ns: u64) -> u64 {
        let after = |ns: u64, usecs: u32| ns.saturating_add(u64::from(usecs) * 1000);
        match self.policy {
            Policy::Timer { hz } => tick_after(self.since_ns, hz),
            Policy::Coalesce { frames, .. } if self.pending >= u32::from(frames) => now_ns,
            Policy::Coalesce { usecs, .. } => after(self.since_ns, usecs),
            Policy::CoalescePending { usecs } => {
                let wait_ns = u64::from(usecs) * 1000 / u64::from(self.pending.max(1));
                self.since_ns.saturating_add(wait_ns)
            }
            Policy::Adaptive { latency_us } if self.window.many && self.pending < GATHERED_MAX => {
                after(self.notified_ns, latency_us)
            }
            _ => now_ns,
        }
    }

    /// Counts frames in windows of `length_ns` or more.
    fn count(&mut self, frames: u64, length_ns: u64, now_ns: u64) {
        let window = &mut self.window;
        let took_ns = now_ns.saturating_sub(window.since_ns);
        if took_ns >= length_ns {
            let many = window.frames.saturating_mul(length_ns) >= took_ns.saturating_mul(MANY);
            window.many = many && length_ns > 0 && window.rest == 0;
            window.rest = window.rest.saturating_sub(1);
            (window.since_ns, window.frames) = (now_ns, 0);
        }
        window.frames = window.frames.saturating_add(frames);
    }
}
