//! One round over the hot queues: deficit round-robin in measured time.

use super::{BurstResult, Scheduler, Step, Then};
use crate::fair::BurstUsage;
use crate::forward::{SlowDelivery, Source, ThinVec};
use crate::frame::BURST_MAX;
use crate::poll::{Action, Policy, State};
use crate::time::{Instant, Ns};

/// Where a round is.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(super) struct Round {
    /// Which of the hot queues is next.
    i: usize,
    /// There is but one.
    alone: bool,
    /// It was granted its share of this round.
    granted: bool,
    /// It may be served again in this round, if it has credit.
    may_repeat: bool,
    /// It stays among the hot ones.
    stays_hot: bool,
    /// Some queue was served.
    served: bool,
    /// Some queue had frames.
    pub found: bool,
    /// Queues may be left to gather frames. Not while others owe time: rounds repay it.
    gathers: bool,
    /// Some queue was.
    gathered: bool,
    /// Some queue owed time.
    owed: bool,
}

/// A burst that is being served, or whose time is to be known.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct Turn {
    began: Instant,
    /// Most frames that the policy takes at once.
    budget: usize,
    /// Most that were asked for.
    max: usize,
    frames: usize,
    announced: bool,
    action: Action,
    /// What the burst of a watched queue used.
    used: Option<BurstUsage>,
    /// Time in slow deliveries: their receivers'.
    elsewhere: Ns,
}

impl Default for Turn {
    fn default() -> Self {
        let action = Action::Poll;
        let (began, used, elsewhere) = (Instant::START, None, Ns::ZERO);
        Self { began, budget: 0, max: 0, frames: 0, announced: false, action, used, elsewhere }
    }
}

impl<Q> Scheduler<Q> {
    #[inline]
    pub(super) fn begin_round(&mut self, now: Instant) {
        if !self.warm.is_empty() {
            self.end_naps(now);
        }
        let alone = self.hot.len() == 1;
        if self.owing {
            self.skip_rounds();
        }
        self.round = Round { alone, gathers: !self.round.owed, ..Round::default() };
        self.step = Step::Pick;
    }

    /// Lists the warm queues whose time has come. After a sleep, `adaptive` ones whose time has
    /// half come too: queues that nap are polled together, so that they share their wake-ups.
    fn end_naps(&mut self, now: Instant) {
        let slept = std::mem::take(&mut self.slept);
        if now < self.warm_at && !slept {
            return;
        }
        self.warm_at = Instant::NEVER;
        let mut i = 0;
        while i < self.warm.len() {
            let at = self.warm[i];
            let queue = &self.queues[at];
            let (since, until) = queue.nap;
            let early =
                slept && !queue.waits_rate && matches!(queue.policy, Policy::Adaptive { .. });
            let due = if early { since + (until - since) / 2 } else { until };
            if now >= due {
                self.warm.swap_remove(i);
                self.list(at);
            } else {
                self.warm_at = self.warm_at.min(until);
                i += 1;
            }
        }
    }

    /// All hot queues owe time, perhaps hundreds of rounds: goes to that in which one is served.
    #[cold]
    fn skip_rounds(&mut self) {
        let waits = self.hot.iter().map(|at| {
            let (weight, queues) = self.terms(*at);
            self.queues[*at].share.rounds_in_debt(weight, queues)
        });
        let rounds = waits.min().unwrap_or(0);
        for i in 0..self.hot.len() {
            let at = self.hot[i];
            let (weight, queues) = self.terms(at);
            self.queues[at].share.skip(rounds, weight, queues);
        }
    }

    /// The weight of a queue's port, and how many queues share its quantum.
    #[inline]
    fn terms(&self, at: usize) -> (u32, usize) {
        let queue = &self.queues[at];
        let port = queue.port();
        let queues = usize::from(self.hot_of[port]) + self.period.elsewhere(port);
        (queue.served.source.tuning.weight(), queues)
    }

    /// The next burst of the round: of the same queue while it has credit and frames, then of the
    /// next. `None`: the round is over.
    #[inline]
    pub(super) fn pick(&mut self, now: Instant) -> Option<(usize, usize)> {
        while let Some(&at) = self.hot.get(self.round.i) {
            if !self.round.granted {
                let (weight, queues) = self.terms(at);
                let queue = &mut self.queues[at];
                if self.round.alone {
                    queue.share.clear_debt();
                }
                queue.share.grant(weight, queues);
                (self.round.granted, self.round.may_repeat, self.round.stays_hot) =
                    (true, true, true);
            }
            let queue = &mut self.queues[at];
            if queue.waits_slow(self.slow_from, now) {
                queue.nap = (now, self.slow_from);
                queue.set_state(State::Warm);
                self.round.stays_hot = false;
            } else if self.round.gathers && queue.gather.is_early(now) {
                self.round.gathered = true;
            } else if !queue.share.has_credit() {
                self.round.owed = true;
            } else if self.round.may_repeat {
                queue.follow(self.costs, now);
                let budget = queue.poller.budget().min(BURST_MAX);
                let max = budget.min(queue.pace.frames());
                self.turn = Turn { began: now, budget, max, ..Turn::default() };
                (self.round.served, self.step) = (true, Step::Serving);
                return Some((at, max));
            }
            self.round.granted = false;
            if self.round.stays_hot {
                self.round.i += 1;
            } else {
                self.leave(at);
            }
        }
        self.owing = !self.round.served && !self.round.gathered;
        None
    }

    /// Whether the round served no queue because all gather frames.
    pub(super) fn only_gathered(&self) -> bool {
        self.round.gathered && !self.round.served
    }

    /// Records the result of [`Effect::Serve`](super::Effect::Serve).
    #[inline]
    pub fn record_burst(&mut self, took: &BurstResult) -> Then {
        assert_eq!(self.step, Step::Serving, "a burst that was not asked for");
        if !took.findings.slow.is_empty() {
            self.turn.elsewhere = self.charge_receivers(&took.findings.slow);
        }
        let at = self.hot[self.round.i];
        let queue = &mut self.queues[at];
        if took.paused != queue.paused {
            queue.paused = took.paused;
            match self.paused.iter().position(|i| *i == at) {
                Some(i) => _ = self.paused.remove(i),
                None => self.paused.push(at),
            }
        }
        self.woken |= took.findings.wake;
        let turn = &mut self.turn;
        (turn.announced, turn.used) = (took.announced, took.used);
        self.step = Step::Charge;
        if took.drained || took.faulty {
            // Not armed: the worker waits for no frame of its peer.
            turn.action = Action::Arm;
            return Then::Over;
        }
        turn.frames = took.frames;
        queue.waits_rate = took.rate_due.is_some();
        if let Some(due) = took.rate_due {
            // The policy decides nothing, and observes nothing: its peer may have more frames.
            turn.action = Action::Until(due);
            return Then::Over;
        }
        // A burst that only its pace or rate kept short was a full one: there may be more.
        let is_full = took.frames >= turn.max || took.rate_cut;
        let found = if is_full { took.frames.max(turn.budget) } else { took.frames };
        turn.action = queue.poller.next(found, turn.began);
        // What a paused queue waits for notifies, and there may well be more to take.
        if turn.action == Action::Arm && !took.paused {
            self.step = Step::Arming;
            return Then::Arm;
        }
        Then::Over
    }

    /// Records the result of [`Then::Arm`]: whether there is `nothing` to take, and the time of
    /// work that no kick announces. The time that is passed next is the end of the turn.
    #[inline]
    pub fn record_arm(&mut self, nothing: bool, due: Option<Instant>) {
        assert_eq!(self.step, Step::Arming, "an arming that was not asked for");
        self.turn.action = match due {
            _ if !nothing => Action::Poll,
            Some(at) => Action::Until(at),
            None => Action::Arm,
        };
        self.step = Step::Charge;
    }

    /// Charges the cost of a turn that is over, and applies the policy's decision.
    #[inline]
    pub(super) fn charge_turn(&mut self, now: Instant) {
        let at = self.hot[self.round.i];
        let queue = &mut self.queues[at];
        let Turn { began, frames, announced, action, used, elsewhere, .. } = self.turn;
        let took = now - began - elsewhere;
        queue.served.source.stats.served_ns.add(took.get());
        queue.record_first_frame(frames, now);
        queue.backlog.update(frames > 0 && action == Action::Poll, now);
        self.round.found |= frames > 0;
        // A peer that cannot notify, did so without effect, or had an address announced, pays for
        // a poll that finds nothing.
        let kicked = std::mem::take(&mut queue.kicked);
        if frames == 0 && (kicked || announced || !queue.served.notifies) {
            queue.share.charge(took);
        }
        if action == Action::Poll && matches!(queue.policy, Policy::Adaptive { .. }) {
            queue.gather.record(frames, queue.served.source.stats.bytes.get(), began);
        }
        let rest = queue.pace.record(frames, took, used, now, self.long);
        if rest > Ns::ZERO {
            self.slow_from = now + rest;
        }
        if frames > 0 && took > Ns::ZERO {
            if queue.busy == Ns::ZERO {
                self.served.push(at);
            }
            self.window.1 += took;
            queue.busy += took;
            queue.share.charge(took);
        }
        // Kicks and commands are polled between two bursts of a queue that is alone.
        self.round.may_repeat = frames > 0 && !self.round.alone;
        match action {
            Action::Poll => queue.set_state(State::Hot),
            Action::Until(at) => {
                queue.nap = (now, at);
                queue.set_state(State::Warm);
                (self.round.may_repeat, self.round.stays_hot) = (false, false);
            }
            Action::Arm => {
                queue.set_state(State::Cold);
                (self.round.may_repeat, self.round.stays_hot) = (false, false);
            }
        }
        self.step = Step::Pick;
    }

    /// Charges slow deliveries to the receivers' ingress queues. Returns the time of all.
    #[cold]
    pub(super) fn charge_receivers(&mut self, deliveries: &ThinVec<SlowDelivery>) -> Ns {
        let mut all = Ns::ZERO;
        for SlowDelivery { port, queue, took } in deliveries {
            self.window.1 += *took;
            all += *took;
            let is_its = |source: &Source| (source.port, source.queue) == (*port, *queue);
            if let Some(payer) = self.queues.iter_mut().find(|q| is_its(&q.served.source)) {
                payer.share.charge_outside_turn(*took);
            }
        }
        all
    }

    /// The queue just served leaves the hot ones.
    fn leave(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        queue.listed = false;
        self.hot_of[queue.port()] -= 1;
        let stats = &queue.served.source.stats;
        if queue.state == State::Warm {
            stats.naps.add(1);
            self.warm_at = self.warm_at.min(queue.nap.1);
            self.warm.push(at);
        } else {
            stats.sleeps.add(1);
        }
        self.hot.swap_remove(self.round.i);
    }
}
