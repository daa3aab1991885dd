//! Poll and call policies: when to poll or sleep, when to notify. Pure; time is passed in.
//!
//! A queue's reader calls its [`Poller`] after each poll for the next action; a queue's writer
//! calls its [`Notifier`] after each publication to decide on a notification. Either half of a ring
//! uses both. Neither makes a system call or reads a clock, so that tests run them in virtual time.

mod adaptive;
mod notifier;
mod policy;

pub use adaptive::Adaptive;
pub use notifier::{Notifier, Notify};
pub use policy::{DEFAULT_LATENCY_US, POLICIES, Policy, TIMER_HZ_MAX};

/// Longest time that `timer` polls without traffic, in ns.
pub const TIMER_IDLE_NS: u64 = 100_000_000;

/// Cost of sleeping on this machine, measured at start: it differs a hundredfold between bare metal
/// and a nested virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Costs {
    /// CPU time of one sleep that ends by a notification, including the peer's part, in ns; 0:
    /// polling saves nothing.
    pub wake_ns: u64,
    /// Time from a notification until the sleeper runs, in ns.
    pub wake_late_ns: u64,
    /// CPU time of one sleep that ends by a timer, in ns.
    pub nap_ns: u64,
    /// Time from a timer's expiry until the sleeper runs, in ns.
    pub nap_late_ns: u64,
}

impl Costs {
    /// Costs on bare metal, for tests and until measured.
    pub const TYPICAL: Self =
        Self { wake_ns: 6_000, wake_late_ns: 5_000, nap_ns: 4_000, nap_late_ns: 5_000 };

    /// Costs with one CPU: polling there keeps the peer from running.
    pub const ONE_CPU: Self = Self { wake_ns: 0, wake_late_ns: 0, ..Self::TYPICAL };
}

/// Current state of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Polled in every round; notifications suppressed.
    Hot,
    /// Polled at set times; notifications suppressed.
    Warm,
    /// Armed and out of the poll set until a notification.
    Cold,
}

impl State {
    /// Display name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// Next action for a queue after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Poll in the next round.
    Poll,
    /// Poll at this time, in ns; notifications stay suppressed.
    Until(u64),
    /// Arm, re-check, and leave the poll set.
    Arm,
}

/// Poll policy with its state for one queue, on the reader's side.
#[derive(Clone, Debug, Hash)]
pub struct Poller {
    policy: Policy,
    /// Time at which the queue last had frames, or was woken.
    busy_ns: u64,
    adaptive: Adaptive,
}

impl Poller {
    /// Creates the state of a queue polled from `now_ns` on.
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

    /// Whether notifications are suppressed while the queue is polled. Not under `event`, which
    /// stays armed.
    pub fn disarms(&self) -> bool {
        self.policy != Policy::Event
    }

    /// Most frames to take in one poll.
    #[inline]
    pub fn budget(&self) -> usize {
        match self.policy {
            // A stored word may have any value.
            Policy::Napi { budget } => usize::from(budget).clamp(1, crate::frame::BURST_MAX),
            _ => crate::frame::BURST_MAX,
        }
    }

    /// Records that a notification ended the queue's sleep.
    pub fn wake(&mut self, now_ns: u64) {
        self.busy_ns = now_ns;
        self.adaptive.wake(now_ns);
    }

    /// Takes the result of a poll at `now_ns`; returns the next action.
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

/// The first tick after `now_ns` of a timer of `hz`; all queues of one frequency share the ticks.
pub fn tick_after(now_ns: u64, hz: u32) -> u64 {
    let period = (1_000_000_000 / u64::from(hz.max(1))).max(1);
    (now_ns / period).saturating_add(1).saturating_mul(period)
}

#[cfg(test)]
mod tests;
