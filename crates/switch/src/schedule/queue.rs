//! A queue that a worker serves, and its state.

use std::hash::{Hash, Hasher};

use crate::fair::level::Backlog;
use crate::fair::{Meter, Pace, Share, Usage};
use crate::forward::Source;
use crate::poll::{Costs, Gather, Policy, Poller, State};
use crate::time::{Instant, Ns};
use crate::tuning::{Drain, Standing};

use super::{Scheduler, Todo};

/// An ingress queue to serve.
#[derive(Clone, Debug)]
pub struct Served<Q> {
    /// Names the queue; unique among all queues of all workers.
    pub token: u64,
    /// Where its frames come from.
    pub source: Source,
    /// Whether the peer can notify. If not, the queue is always polled.
    pub notifies: bool,
    /// What it is for the driver.
    pub of: Q,
}

impl<Q> Served<Q> {
    /// Resets the state of a queue that is not served any more: it is cold and drained.
    pub fn mark_stopped(&self) {
        let tuning = &self.source.tuning;
        tuning.set_state(State::Cold);
        tuning.complete_drain();
    }
}

/// A served queue and its state.
#[derive(Clone, Debug)]
pub struct Queue<Q> {
    /// What is served.
    pub served: Served<Q>,
    pub(super) poller: Poller,
    /// What the operator wants; the poller follows it.
    pub(super) policy: Policy,
    /// The same as [`Tuning`](crate::tuning::Tuning) has it: cheaper to compare.
    policy_bits: u64,
    pub(super) state: State,
    /// In the list of queues to be served in this round, or the next.
    pub(super) listed: bool,
    /// Warm: since when, and until when it is left alone.
    pub(super) nap: (Instant, Instant),
    /// Not served until the destination that it waits for has room.
    pub(super) paused: bool,
    /// Warm until its port's rate permits more frames.
    pub(super) waits_rate: bool,
    /// Drained: its kicks are not waited for.
    pub(super) muted: bool,
    pub(super) share: Share,
    /// How many frames are taken at once.
    pub(super) pace: Pace,
    /// When it is polled again under `adaptive`.
    pub(super) gather: Gather,
    /// Kicked since it was last polled.
    pub(super) kicked: bool,
    /// When a kick woke it, until it is polled: if that finds nothing, no frame was why.
    pub(super) woke: Option<Instant>,
    /// Time spent on its frames in this load measurement.
    pub(super) busy: Ns,
    /// Whether it was never found empty.
    pub(super) backlog: Backlog,
}

impl<Q> Queue<Q> {
    /// Just given to a worker: cold, and armed by no one.
    pub(super) fn new(served: Served<Q>, costs: Costs, now: Instant) -> Self {
        let policy = served.source.tuning.poll();
        let Standing { share, pace } = served.source.tuning.standing();
        Self {
            poller: Poller::new(effective(policy, served.notifies), costs, now),
            served,
            policy,
            policy_bits: policy.to_bits(),
            state: State::Cold,
            listed: false,
            nap: (now, now),
            paused: false,
            waits_rate: false,
            muted: false,
            share,
            pace,
            gather: Gather::default(),
            kicked: false,
            woke: None,
            busy: Ns::ZERO,
            backlog: Backlog::default(),
        }
    }

    /// It is not served here any more, but perhaps again: its debt and its pace remain.
    pub(super) fn leave(&self) {
        let (share, pace) = (self.share.debt(), self.pace);
        self.served.source.tuning.set_standing(Standing { share, pace });
    }

    /// The policy at work on it.
    pub fn poller(&self) -> &Poller {
        &self.poller
    }

    /// How it is served at the moment.
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether it is served in this round, or in the next.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Warm: until when it is left alone.
    pub fn nap_until(&self) -> Instant {
        self.nap.1
    }

    /// Whether it waits for a destination to have room.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether it is slow, and slow queues are not served before `slow_from`.
    #[inline]
    pub(super) fn waits_slow(&self, slow_from: Instant, now: Instant) -> bool {
        self.pace.is_slow(now) && now < slow_from
    }

    /// Whether it is left alone until its port's rate permits more frames, whatever its peer does.
    #[inline]
    pub(super) fn waits_rate(&self, now: Instant) -> bool {
        self.waits_rate && now < self.nap.1
    }

    /// How its next [burst](super::burst()) is to be measured; `usage`: what the thread has used.
    #[inline]
    pub fn meter<'a>(&self, usage: &'a dyn Fn() -> Usage) -> Option<Meter<'a>> {
        self.pace.meter(usage)
    }

    /// The time that it owes to others.
    pub fn owed(&self) -> Ns {
        self.share.owed()
    }

    /// The index of its port.
    #[inline]
    pub(super) fn port(&self) -> usize {
        usize::from(self.served.source.port.0)
    }

    pub(super) fn set_state(&mut self, state: State) {
        if self.state != state {
            self.state = state;
            self.served.source.tuning.set_state(state);
        }
    }

    /// Takes over the policy that the operator wants by now.
    #[inline]
    pub(super) fn follow(&mut self, costs: Costs, now: Instant) {
        let bits = self.served.source.tuning.poll_bits();
        if bits != self.policy_bits {
            let policy = Policy::from_bits(bits);
            (self.policy, self.policy_bits) = (policy, bits);
            self.poller = Poller::new(effective(policy, self.served.notifies), costs, now);
        }
    }

    /// It was polled: if a kick had ended its sleep, the time since is that of its first frame.
    #[inline]
    pub(super) fn record_first_frame(&mut self, frames: usize, now: Instant) {
        if let Some(woke) = self.woke.take().filter(|_| frames > 0) {
            let (stats, ns) = (&self.served.source.stats, (now - woke).get());
            stats.first_frames.add(1);
            stats.first_frame_ns.add(ns);
            stats.first_frame_ns_max.raise(ns);
        }
    }
}

impl<Q> Hash for Queue<Q> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { served, poller, policy, state: now, listed, nap, paused, muted, .. } = self;
        (served.token, poller, policy, now, listed, nap, paused, muted).hash(state);
        let Self { share, pace, gather, kicked, woke, busy, backlog, waits_rate, .. } = self;
        (share, pace, gather, kicked, woke, busy, backlog, waits_rate).hash(state);
    }
}

/// The policy that a queue can have: one whose peer cannot notify is polled whatever was wanted.
fn effective(policy: Policy, notifies: bool) -> Policy {
    if notifies { policy } else { Policy::Spin }
}

impl<Q> Scheduler<Q> {
    /// Puts a queue among those to be served.
    pub(super) fn list(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        if !queue.listed {
            queue.listed = true;
            self.hot_of[queue.port()] += 1;
            self.hot.push(at);
        }
    }

    /// Makes a queue hot: it was kicked, or may have work for another reason. Only a kick says when
    /// a frame came; policies learn from nothing else.
    pub(super) fn make_hot(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        let was = queue.state;
        queue.set_state(State::Hot);
        if was == State::Cold && queue.poller.disarms() {
            self.todo(Todo::Disarm, at);
        }
        if was == State::Warm {
            self.warm.retain(|i| *i != at);
        }
        self.list(at);
        let queue = &mut self.queues[at];
        if queue.muted && queue.served.source.tuning.drain() == Drain::Off {
            queue.muted = false;
            self.todo(Todo::Unmute, at);
        }
    }

    /// A queue that is being drained needs no kicks: however often its guest kicks, it wakes no
    /// worker.
    pub(super) fn mute(&mut self, at: usize) {
        if !std::mem::replace(&mut self.queues[at].muted, true) {
            self.todo(Todo::Mute, at);
        }
    }

    pub(super) fn todo(&mut self, todo: Todo, at: usize) {
        self.todo.push_back((todo, at));
        self.is_pending = true;
    }
}
