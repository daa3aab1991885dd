//! When receive rings are looked at: a poll policy at work for all pairs that have it.

use std::iter::Sum;

use switch::poll::{Action, Costs, Policy, Poller, State};

/// A poll policy, and what it said last.
pub(super) struct Judge {
    poller: Poller,
    /// What the policy said last.
    pub(super) resting: Action,
}

/// What queues count that a policy asks for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Passed {
    /// Looks at receive rings.
    pub(super) looks: u64,
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Passed {
    /// What came since `before`; counters may begin anew.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            looks: self.looks.saturating_sub(before.looks),
            received: self.received.saturating_sub(before.received),
            sent: self.sent.saturating_sub(before.sent),
        }
    }
}

impl Sum for Passed {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            looks: sum.looks + one.looks,
            received: sum.received + one.received,
            sent: sum.sent + one.sent,
        })
    }
}

impl Judge {
    /// For rings that are looked at from `now` on, in ns.
    pub(super) fn new(policy: Policy, costs: fn() -> Costs, now: u64) -> Self {
        let costs = match policy {
            Policy::Adaptive { .. } => costs(),
            _ => Costs::TYPICAL,
        };
        Self { poller: Poller::new(policy, costs, now), resting: Action::Poll }
    }

    pub(super) fn policy(&self) -> Policy {
        self.poller.policy()
    }

    /// Most used buffers to take in one look at one ring.
    pub(super) fn budget(&self) -> usize {
        self.poller.budget()
    }

    /// Whether rings are asked for no calls while they are looked at.
    pub(super) fn disarms(&self) -> bool {
        self.poller.disarms()
    }

    /// `adaptive` serves both directions with the latency it may trade; the other policies say
    /// when receive rings are looked at, and leave what is sent to the kick policy.
    pub(super) fn serves_both(&self) -> bool {
        matches!(self.poller.policy(), Policy::Adaptive { .. })
    }

    /// When the next look is, if there is a time for it, in ns.
    pub(super) fn nap(&self) -> Option<u64> {
        match self.resting {
            Action::Until(at) => Some(at),
            Action::Poll | Action::Arm => None,
        }
    }

    /// After a round in which this passed.
    pub(super) fn judge(&mut self, passed: Passed, now: u64) {
        let sent = if self.serves_both() { passed.sent } else { 0 };
        let frames = passed.received + sent;
        if passed.looks > 0 || frames > 0 {
            let frames = usize::try_from(frames).unwrap_or(usize::MAX);
            self.resting = self.poller.next(frames, now);
        }
    }

    /// A notification ended a sleep.
    pub(super) fn wake(&mut self, now: u64) {
        self.poller.wake(now);
        self.resting = Action::Poll;
    }

    pub(super) fn state(&self) -> State {
        match self.resting {
            Action::Poll => State::Hot,
            Action::Until(_) => State::Warm,
            Action::Arm => State::Cold,
        }
    }
}
