//! When to poll a queue and when to sleep, when to notify and when to wait: pure policies, with
//! time passed in.
//!
//! A queue's reader asks its [`Poller`] after each look what to do next; a queue's writer asks its
//! [`Notifier`] after each publication whether the peer is told now. Either half of a ring uses
//! both. Neither makes a system call or reads a clock, so that tests run them in virtual time.

mod adaptive;
mod notifier;
mod policy;

pub use adaptive::Adaptive;
pub use notifier::{Notifier, Notify};
pub use policy::{DEFAULT_LATENCY_US, POLICIES, Policy, TIMER_HZ_MAX};

/// Longest time that `timer` goes on polling without traffic, in ns.
pub const TIMER_IDLE_NS: u64 = 100_000_000;

/// What sleeping costs on this machine: measured at start, since it differs a hundredfold between
/// a bare machine and a nested virtual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// CPU time of one sleep that a notification ends, the peer's part of it included, in ns; 0:
    /// nothing is saved by polling.
    pub wake_ns: u64,
    /// Time from a notification until the sleeper runs, in ns.
    pub wake_late_ns: u64,
    /// CPU time of one sleep that a timer ends, in ns.
    pub nap_ns: u64,
    /// Time from a timer's end until the sleeper runs, in ns.
    pub nap_late_ns: u64,
}

impl Costs {
    /// Of a bare machine, for tests and until something was measured.
    pub const TYPICAL: Self =
        Self { wake_ns: 6_000, wake_late_ns: 5_000, nap_ns: 4_000, nap_late_ns: 5_000 };

    /// Of a machine with one CPU: who polls there keeps the peer from what it is waited for.
    pub const ONE_CPU: Self = Self { wake_ns: 0, wake_late_ns: 0, ..Self::TYPICAL };
}

/// How a queue is served at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Polled in every round; its peer is asked for no notification.
    Hot,
    /// Looked at now and then, at a time that is set; its peer is asked for no notification.
    Warm,
    /// Armed and out of the poll set: only a notification brings it back.
    Cold,
}

impl State {
    /// Its name, as people see it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// What to do with a queue after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look again in the next round.
    Poll,
    /// Look again at this time, in ns; the peer stays asked for no notification.
    Until(u64),
    /// Ask the peer to notify, look a last time, and leave the poll set.
    Arm,
}

/// A policy at work on the reader's side of one queue.
#[derive(Clone, Debug)]
pub struct Poller {
    policy: Policy,
    /// When the queue last had something, or was woken.
    busy_ns: u64,
    adaptive: Adaptive,
}

impl Poller {
    /// For a queue that is polled from `now_ns` on.
    pub fn new(policy: Policy, costs: Costs, now_ns: u64) -> Self {
        let latency_us = match policy {
            Policy::Adaptive { latency_us } => latency_us,
            _ => DEFAULT_LATENCY_US,
        };
        let adaptive = Adaptive::new(u64::from(latency_us) * 1000, costs, now_ns);
        Self { policy, busy_ns: now_ns, adaptive }
    }

    /// The policy it was made with.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether the peer is to be asked for no notifications while the queue is polled. Not under
    /// `event`, which stays armed.
    pub fn disarms(&self) -> bool {
        self.policy != Policy::Event
    }

    /// Most frames to take in one look.
    #[inline]
    pub fn budget(&self) -> usize {
        match self.policy {
            // A word that no command line wrote may say anything.
            Policy::Napi { budget } => usize::from(budget).clamp(1, crate::frame::BURST_MAX),
            _ => crate::frame::BURST_MAX,
        }
    }

    /// A notification ended the queue's sleep.
    pub fn wake(&mut self, now_ns: u64) {
        self.busy_ns = now_ns;
        self.adaptive.wake(now_ns);
    }

    /// What a look at `now_ns` found, and what to do next.
    #[inline]
    pub fn next(&mut self, frames: usize, now_ns: u64) -> Action {
        let empty_ns = now_ns.saturating_sub(self.busy_ns);
        if frames > 0 {
            self.busy_ns = now_ns;
        }
        match self.policy {
            Policy::Adaptive { .. } => self.adaptive.next(frames, now_ns),
            Policy::Spin => Action::Poll,
            Policy::Event => Action::Arm,
            Policy::Napi { .. } if frames >= self.budget() => Action::Poll,
            Policy::Napi { .. } => Action::Arm,
            Policy::Timer { hz } => {
                if frames == 0 && empty_ns >= TIMER_IDLE_NS {
                    return Action::Arm;
                }
                if frames >= crate::frame::BURST_MAX {
                    return Action::Poll;
                }
                Action::Until(tick_after(now_ns, hz))
            }
            Policy::Coalesce { usecs: 0, .. } | Policy::CoalescePending { usecs: 0 } => {
                if frames > 0 { Action::Poll } else { Action::Arm }
            }
            Policy::Coalesce { usecs, frames: most } => match frames {
                0 => Action::Arm,
                n if n >= usize::from(most) => Action::Poll,
                _ => Action::Until(now_ns.saturating_add(u64::from(usecs) * 1000)),
            },
            Policy::CoalescePending { usecs } => match frames {
                0 => Action::Arm,
                n => {
                    let nap_ns = u64::from(usecs) * 1000 / n as u64;
                    Action::Until(now_ns.saturating_add(nap_ns.max(1)))
                }
            },
        }
    }
}

/// The first tick after `now_ns` of a timer of `hz`: all queues of one frequency share it.
pub fn tick_after(now_ns: u64, hz: u32) -> u64 {
    let period = (1_000_000_000 / u64::from(hz.max(1))).max(1);
    (now_ns / period).saturating_add(1).saturating_mul(period)
}

#[cfg(test)]
mod tests;
