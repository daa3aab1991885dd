//! A queue that a worker serves: its state, and one burst of it.

use switch::fair::level::Backlog;
use switch::fair::{Pace, Share};
use switch::forward::{Forwarder, Source};
use switch::frame::{BURST_MAX, Burst};
use switch::poll::{Action, Costs, Policy, Poller, State};
use switch::tuning::Drain;

use super::handle::{Report, Served, lock};
use crate::pool::Pool;
use crate::ports::{burst_of, rarp};

/// A served queue and its state.
pub(super) struct Queue {
    pub served: Served,
    pub poller: Poller,
    /// What the operator wants; the poller follows it.
    pub policy: Policy,
    pub state: State,
    /// In the list of queues to be served in this round.
    pub listed: bool,
    /// Warm: since when, and until when it is left alone, in ns.
    pub nap: (u64, u64),
    /// Not served until the destination that it waits for has room.
    pub paused: bool,
    /// Drained: its kicks are not listened to.
    pub hushed: bool,
    pub share: Share,
    /// How many frames are taken at once.
    pub pace: Pace,
    /// Kicked since it was last polled.
    pub kicked: bool,
    /// Sent an announcement when it was last polled.
    pub announced: bool,
    /// When a kick woke it, until it is looked at: if that finds nothing, no frame was why.
    pub woke_ns: Option<u64>,
    /// Time spent on its frames in this load measurement, in ns.
    pub busy_ns: u64,
    /// Whether it was never found empty.
    pub backlog: Backlog,
}

impl Queue {
    /// Just given to a worker: cold, and not listened to.
    pub fn new(served: Served, costs: Costs, now: u64) -> Self {
        let policy = served.source.tuning.poll();
        Self {
            poller: Poller::new(effective(policy, &served), costs, now),
            served,
            policy,
            state: State::Cold,
            listed: false,
            nap: (now, now),
            paused: false,
            hushed: false,
            share: Share::default(),
            pace: Pace::default(),
            kicked: false,
            announced: false,
            woke_ns: None,
            busy_ns: 0,
            backlog: Backlog::default(),
        }
    }

    pub fn set_state(&mut self, state: State) {
        if self.state != state {
            self.state = state;
            self.served.source.tuning.set_state(state);
        }
    }

    /// It was looked at: if a kick had ended its sleep, that was how long its first frame took.
    #[inline]
    pub fn looked(&mut self, frames: usize, end: u64) {
        if let Some(woke) = self.woke_ns.take().filter(|_| frames > 0) {
            first_frame(&self.served.source, end.saturating_sub(woke));
        }
    }

    /// One burst; returns how many frames were new, and what comes next. `Arm`: it was done, and
    /// nothing is there.
    #[inline]
    pub fn serve(
        &mut self,
        forwarder: &mut Forwarder,
        scratch: &mut Burst<'static>,
        pool: &Pool,
        now: u64,
    ) -> (usize, Action) {
        let Served { source, ingress, .. } = &self.served;
        let policy = source.tuning.poll();
        if policy != self.policy {
            self.policy = policy;
            self.poller = Poller::new(effective(policy, &self.served), pool.common.costs, now);
        }
        let drains = source.tuning.drain() != Drain::Off;
        let budget = self.poller.budget().min(BURST_MAX);
        let paced = budget.min(self.pace.frames());
        let max = if drains { 0 } else { forwarder.may_take(source, paced, now) };
        self.paused = !drains && max == 0;
        let mut ingress = lock(ingress);
        if !drains && source.tuning.announcement().is_some() {
            self.announced = announce(forwarder, source, now);
        }
        let got = if max == 0 {
            Ok(0)
        } else {
            forwarder.direct(source, &mut *ingress, now);
            ingress.burst(max, now, scratch, &mut |burst| {
                forwarder.forward(source, burst, now);
            })
        };
        source.stats.polls.add(1);
        let frames = match got {
            Ok(n) => n,
            Err(fault) => {
                let epoch = forwarder.port(source.port).map_or(0, |port| port.epoch());
                pool.report(Report::Fault(source.port, epoch, fault));
                return (0, Action::Arm);
            }
        };
        if frames == 0 {
            source.stats.polls_empty.add(1);
        }
        if drains {
            source.tuning.drained();
            // Its frames are no reason to stay awake, nor for its guest to kick.
            ingress.disarm();
            return (0, Action::Arm);
        }
        // A burst that only its pace kept short was a full one: there may be more.
        let found = if frames >= paced { frames.max(budget) } else { frames };
        let action = match self.poller.next(found, now) {
            // What it waits for notifies, and there may well be more to take.
            Action::Arm if self.paused => Action::Arm,
            Action::Arm if !ingress.arm() => {
                if self.poller.disarms() {
                    ingress.disarm();
                }
                Action::Poll
            }
            Action::Arm => ingress.due().map_or(Action::Arm, Action::Until),
            action => action,
        };
        (frames, action)
    }
}

/// The policy a queue can have: one whose peer cannot notify is polled whatever was wanted.
fn effective(policy: Policy, served: &Served) -> Policy {
    if served.notifies { policy } else { Policy::Spin }
}

/// Floods what is to be announced for the queue's peer, which cannot do so itself (SEND_RARP), as a
/// frame of the peer's. False: nothing is, any more. Under the queue's lock, for its counters.
#[cold]
fn announce(forwarder: &mut Forwarder, source: &Source, now: u64) -> bool {
    let Some(mac) = source.tuning.take_announcement() else { return false };
    let frame = rarp(mac);
    source.stats.frames.add(1);
    source.stats.bytes.add(frame.len() as u64);
    forwarder.forward(source, &mut burst_of(&frame), now);
    true
}

fn first_frame(source: &Source, ns: u64) {
    source.stats.first_frames.add(1);
    source.stats.first_frame_ns.add(ns);
    source.stats.first_frame_ns_max.raise(ns);
}
