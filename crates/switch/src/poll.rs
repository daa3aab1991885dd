//! When to poll a queue and when to sleep: pure policies, with time passed in.
//!
//! A queue is *hot* (polled, its peer asked for no notifications) or *cold* (armed, out of the
//! poll set; only a kick brings it back). A policy sees what each poll of a hot queue found and
//! says whether it stays hot.

use std::fmt;
use std::str::FromStr;

/// How long `adaptive` polls an empty queue before it sleeps, in ns: about the cost of the sleep
/// and wake-up it hopes to avoid, so that it never spends more than twice the best choice.
pub const ADAPTIVE_SPIN_NS: u64 = 50_000;

/// A policy, as the command line names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Sleep as soon as a poll finds nothing.
    Event,
    /// Never sleep.
    Spin,
    /// Poll for [`ADAPTIVE_SPIN_NS`] after the last frame, then sleep.
    #[default]
    Adaptive,
}

/// Names a person may have meant, for error messages.
pub const POLICIES: [&str; 3] = ["event", "spin", "adaptive"];

impl FromStr for Policy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "event" => Ok(Self::Event),
            "spin" => Ok(Self::Spin),
            "adaptive" => Ok(Self::Adaptive),
            _ => Err(format!("unknown poll policy '{s}': use one of {}", POLICIES.join(", "))),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Event => "event",
            Self::Spin => "spin",
            Self::Adaptive => "adaptive",
        })
    }
}

/// What to do with a queue after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Poll again.
    Spin,
    /// Arm, re-check, and leave the poll set.
    ArmAndSleep,
}

/// A policy at work on one queue.
#[derive(Clone, Copy, Debug)]
pub struct Poller {
    policy: Policy,
    /// When the queue last had something; the start of its empty time.
    busy_ns: u64,
}

impl Poller {
    /// For a queue that became hot at `now_ns`.
    pub fn new(policy: Policy, now_ns: u64) -> Self {
        Self { policy, busy_ns: now_ns }
    }

    /// A kick made the queue hot.
    pub fn wake(&mut self, now_ns: u64) {
        self.busy_ns = now_ns;
    }

    /// What a poll at `now_ns` found, and what to do next.
    #[inline]
    pub fn next(&mut self, frames: usize, now_ns: u64) -> Action {
        if frames > 0 {
            self.busy_ns = now_ns;
            return Action::Spin;
        }
        match self.policy {
            Policy::Spin => Action::Spin,
            Policy::Event => Action::ArmAndSleep,
            Policy::Adaptive if now_ns.saturating_sub(self.busy_ns) < ADAPTIVE_SPIN_NS => {
                Action::Spin
            }
            Policy::Adaptive => Action::ArmAndSleep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_spins_for_its_time_after_the_last_frame() {
        let mut p = Poller::new(Policy::Adaptive, 1000);
        assert_eq!(p.next(0, 1000 + ADAPTIVE_SPIN_NS - 1), Action::Spin);
        assert_eq!(p.next(3, 2 * ADAPTIVE_SPIN_NS), Action::Spin);
        assert_eq!(p.next(0, 3 * ADAPTIVE_SPIN_NS - 1), Action::Spin);
        assert_eq!(p.next(0, 3 * ADAPTIVE_SPIN_NS), Action::ArmAndSleep);
        p.wake(9 * ADAPTIVE_SPIN_NS);
        assert_eq!(p.next(0, 9 * ADAPTIVE_SPIN_NS + 1), Action::Spin);
    }

    #[test]
    fn event_sleeps_at_once_and_spin_never() {
        assert_eq!(Poller::new(Policy::Event, 0).next(0, 0), Action::ArmAndSleep);
        assert_eq!(Poller::new(Policy::Spin, 0).next(0, u64::MAX), Action::Spin);
    }

    #[test]
    fn names_round_trip_and_unknown_ones_are_told() {
        for name in POLICIES {
            assert_eq!(name.parse::<Policy>().unwrap().to_string(), name);
        }
        assert!("napi2".parse::<Policy>().unwrap_err().contains("adaptive"));
    }
}
