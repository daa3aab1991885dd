//! When the peer is told of what was published.

use super::{Policy, tick_after};

/// What to do after a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Tell the peer now, if it wants to be told.
    Now,
    /// Ask again ([`Notifier::due`]) at this time, in ns.
    At(u64),
    /// A time that was given before will do.
    Later,
}

/// Frames in the time that `adaptive` may trade from which on it waits: one notification for so
/// many is worth the wait, and whoever asks and waits for an answer has fewer under way.
const MANY: u64 = 8;
/// Frames that `adaptive` gathers at most: a quarter of a ring of 256.
const GATHERED_MAX: u32 = 64;
/// Windows of the traded time in which nothing is gathered, after a wait that did not pay.
const REST_WINDOWS: u8 = 16;

/// A policy at work on the writer's side of one queue. `event`, `napi` and `spin` tell the peer
/// once per publication: the event index (or flag) of a peer that polls already keeps it from being
/// told too often, and frames that a warm queue gathered make one publication.
///
/// `adaptive` does so, too, until frames come in numbers: then it tells once in the time that it
/// may trade, or for 64 frames. It gathers only while more is coming
/// ([`gathers`](Self::gathers)), so that waiting costs no wake-up and nobody waits for a writer
/// that has nothing to do; where that ended the wait it did not pay, and is not tried again for
/// sixteen such times.
#[derive(Clone, Copy, Debug)]
pub struct Notifier {
    policy: Policy,
    /// Frames the peer was not told of.
    pending: u32,
    /// When the first of them was published.
    since_ns: u64,
    /// The time that was given last, until it comes; `u64::MAX`: none.
    asked_ns: u64,
    /// When the peer was told last.
    told_ns: u64,
    window: Window,
}

/// `adaptive`: whether frames come in numbers.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// Since when frames are counted.
    since_ns: u64,
    frames: u64,
    /// In the window before there were many.
    many: bool,
    /// Windows to rest.
    rest: u8,
}

impl Notifier {
    /// With nothing pending.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            pending: 0,
            since_ns: 0,
            asked_ns: u64::MAX,
            told_ns: 0,
            window: Window::default(),
        }
    }

    /// Whether the policy ever waits. One that does not needs no state.
    pub fn waits(policy: Policy) -> bool {
        match policy {
            Policy::Timer { .. } => true,
            Policy::Coalesce { usecs, frames } => usecs > 0 && frames > 1,
            Policy::CoalescePending { usecs } => usecs > 0,
            Policy::Adaptive { latency_us } => latency_us > 0,
            Policy::Event | Policy::Napi { .. } | Policy::Spin => false,
        }
    }

    /// Whether the policy waits only while more is coming: [`flush`](Self::flush) it when the
    /// writer finds nothing to do, and before it sleeps.
    pub fn gathers(policy: Policy) -> bool {
        matches!(policy, Policy::Adaptive { .. })
    }

    /// The policy it follows.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Follows a policy from now on; what is pending stays so.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// `frames` were published at `now_ns`.
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
            self.told(now_ns);
            return Notify::Now;
        }
        if at >= self.asked_ns {
            return Notify::Later;
        }
        self.asked_ns = at;
        Notify::At(at)
    }

    /// The time `at` that was given has come: tell the peer, ask again, or nothing is to be done.
    pub fn due(&mut self, at: u64, now_ns: u64) -> Option<Notify> {
        if at != self.asked_ns {
            // A sooner one was given since.
            return None;
        }
        self.asked_ns = u64::MAX;
        if self.pending == 0 {
            return None;
        }
        let at = self.wanted(now_ns);
        if at <= now_ns {
            self.told(now_ns);
            return Some(Notify::Now);
        }
        self.asked_ns = at;
        Some(Notify::At(at))
    }

    /// The peer was told, whatever the policy.
    pub fn told(&mut self, now_ns: u64) {
        self.pending = 0;
        self.told_ns = now_ns;
    }

    /// Forgets the time that was given. True: tell the peer now. False: it was told meanwhile.
    pub fn flush(&mut self) -> bool {
        self.asked_ns = u64::MAX;
        let told = std::mem::take(&mut self.pending) > 0;
        if told {
            (self.window.many, self.window.rest) = (false, REST_WINDOWS);
        }
        told
    }

    /// When the peer is to be told of what is pending.
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
                after(self.told_ns, latency_us)
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
