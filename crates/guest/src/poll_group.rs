//! Decides when receive rings are polled: one poll policy for all pairs that use it.

use std::iter::Sum;

use switch::poll::{Action, Costs, Policy, Poller, State};
use switch::time::Instant;

/// A poll policy, and its last action.
pub(super) struct PollGroup {
    poller: Poller,
    /// The last action of the policy.
    pub(super) action: Action,
}

/// Activity of queues, as input of a policy.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Activity {
    /// Polls of receive rings.
    pub(super) polls: u64,
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Activity {
    /// The difference since `before`; counters may have been reset.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            polls: self.polls.saturating_sub(before.polls),
            received: self.received.saturating_sub(before.received),
            sent: self.sent.saturating_sub(before.sent),
        }
    }
}

impl Sum for Activity {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            polls: sum.polls + one.polls,
            received: sum.received + one.received,
            sent: sum.sent + one.sent,
        })
    }
}

impl PollGroup {
    /// For rings that are polled from `now` on.
    pub(super) fn new(policy: Policy, costs: fn() -> Costs, now: Instant) -> Self {
        let costs = match policy {
            Policy::Adaptive { .. } => costs(),
            _ => Costs::TYPICAL,
        };
        Self { poller: Poller::new(policy, costs, now), action: Action::Poll }
    }

    pub(super) fn policy(&self) -> Policy {
        self.poller.policy()
    }

    /// Most used buffers to take in one poll of a ring.
    pub(super) fn budget(&self) -> usize {
        self.poller.budget()
    }

    /// Whether calls are suppressed while rings are polled.
    pub(super) fn disarms(&self) -> bool {
        self.poller.disarms()
    }

    /// Whether the policy's latency applies to both directions, as with `adaptive`. Other policies
    /// control only polls of receive rings; the kick policy controls transmission.
    pub(super) fn serves_both(&self) -> bool {
        matches!(self.poller.policy(), Policy::Adaptive { .. })
    }

    /// Time of the next poll, if any.
    pub(super) fn nap(&self) -> Option<Instant> {
        match self.action {
            Action::Until(at) => Some(at),
            Action::Poll | Action::Arm => None,
        }
    }

    /// Passes the activity of a round to the policy.
    pub(super) fn observe(&mut self, activity: Activity, now: Instant) {
        let sent = if self.serves_both() { activity.sent } else { 0 };
        let frames = activity.received + sent;
        if activity.polls > 0 || frames > 0 {
            let frames = usize::try_from(frames).unwrap_or(usize::MAX);
            self.action = self.poller.next(frames, now);
        }
    }

    /// Records that a notification ended a sleep.
    pub(super) fn wake(&mut self, now: Instant) {
        self.poller.wake(now);
        self.action = Action::Poll;
    }

    pub(super) fn state(&self) -> State {
        match self.action {
            Action::Poll => State::Hot,
            Action::Until(_) => State::Warm,
            Action::Arm => State::Cold,
        }
    }
}
