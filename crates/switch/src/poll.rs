//! Poll and call policies: when to poll or sleep, when to notify. Pure; time is passed in.
//!
//! A queue's reader calls its [`Poller`] after each poll for the next action; a queue's writer
//! calls its [`Notifier`] after each publication to decide on a notification. Either half of a ring
//! uses both. Neither makes a system call or reads a clock, so that tests run them in virtual time.

mod adaptive;
mod gather;
mod notifier;
mod policy;

pub use adaptive::Adaptive;
pub use gather::Gather;
pub use notifier::{Notifier, Notify};
pub use policy::{DEFAULT_LATENCY_US, POLICIES, Policy, TIMER_HZ_MAX};

use crate::time::{Instant, Ns};

/// Longest time that `timer` polls without traffic.
pub const TIMER_IDLE: Ns = Ns::from_ms(100);

/// Costs of this machine, measured at start: those of sleeping differ a hundredfold between bare
/// metal and a nested virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Costs {
    /// CPU time of one sleep that ends by a notification, including the peer's part; zero:
    /// polling saves nothing.
    pub wake: Ns,
    /// Time from a notification until the sleeper runs.
    pub wake_late: Ns,
    /// CPU time of one sleep that ends by a timer.
    pub nap: Ns,
    /// Time from a timer's expiry until the sleeper runs.
    pub nap_late: Ns,
    /// Time to copy as many bytes as a burst has at most
    /// ([`BURST_BYTES`](crate::frame::BURST_BYTES)), of memory that is in the caches.
    pub copy: Ns,
}

impl Costs {
    /// Costs on bare metal, for tests and until measured.
    pub const TYPICAL: Self = Self {
        wake: Ns::from_us(6),
        wake_late: Ns::from_us(5),
        nap: Ns::from_us(4),
        nap_late: Ns::from_us(5),
        copy: Ns::from_us(20),
    };

    /// Costs with one CPU: polling there keeps the peer from running.
    pub const ONE_CPU: Self = Self { wake: Ns::ZERO, wake_late: Ns::ZERO, ..Self::TYPICAL };
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
    /// Poll at this time; notifications stay suppressed.
    Until(Instant),
    /// Arm, re-check, and leave the poll set.
    Arm,
}

/// Poll policy with its state for one queue, on the reader's side.
#[derive(Clone, Debug, Hash)]
pub struct Poller {
    policy: Policy,
    /// Time at which the queue last had frames, or was woken.
    busy: Instant,
    adaptive: Adaptive,
}

impl Poller {
    /// Creates the state of a queue polled from `now` on.
    pub fn new(policy: Policy, costs: Costs, now: Instant) -> Self {
        let latency_us = match policy {
            Policy::Adaptive { latency_us } => latency_us,
            _ => DEFAULT_LATENCY_US,
        };
        let adaptive = Adaptive::new(Ns::from_us(latency_us.into()), costs, now);
        Self { policy, busy: now, adaptive }
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
    pub fn wake(&mut self, now: Instant) {
        self.busy = now;
        self.adaptive.wake(now);
    }

    /// Takes the result of a poll at `now`; returns the next action.
    #[inline]
    pub fn next(&mut self, frames: usize, now: Instant) -> Action {
        let empty = now - self.busy;
        if frames > 0 {
            self.busy = now;
        }
        match self.policy {
            Policy::Adaptive { .. } => self.adaptive.next(frames, now),
            Policy::Spin => Action::Poll,
            Policy::Event => Action::Arm,
            Policy::Napi { .. } if frames >= self.budget() => Action::Poll,
            Policy::Napi { .. } => Action::Arm,
            Policy::Timer { hz } => {
                if frames == 0 && empty >= TIMER_IDLE {
                    return Action::Arm;
                }
                if frames >= crate::frame::BURST_MAX {
                    return Action::Poll;
                }
                Action::Until(tick_after(now, hz))
            }
            Policy::Coalesce { usecs: 0, .. } | Policy::CoalescePending { usecs: 0 } => {
                if frames > 0 { Action::Poll } else { Action::Arm }
            }
            Policy::Coalesce { usecs, frames: most } => match frames {
                0 => Action::Arm,
                n if n >= usize::from(most) => Action::Poll,
                _ => Action::Until(now + Ns::from_us(usecs.into())),
            },
            Policy::CoalescePending { usecs } => match frames {
                0 => Action::Arm,
                n => {
                    let nap = Ns::from_us(usecs.into()) / n as u64;
                    Action::Until(now + nap.max(Ns::new(1)))
                }
            },
        }
    }
}

/// The first tick after `now` of a timer of `hz`; all queues of one frequency share the ticks.
pub fn tick_after(now: Instant, hz: u32) -> Instant {
    let period = Ns::from_secs(1) / u64::from(hz.max(1));
    let ticks = now.periods(period);
    Instant::START + period.max(Ns::new(1)) * ticks.saturating_add(1)
}

#[cfg(test)]
mod tests;
