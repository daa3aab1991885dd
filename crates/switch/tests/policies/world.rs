//! One queue, its peer and its worker in virtual time.

use std::collections::VecDeque;

use switch::poll::{Action, Costs, Notifier, Notify, Policy, Poller};
use switch::time::{Instant, Ns};

use crate::load::Load;

/// Entries of the ring; frames that arrive while it is full are lost.
const RING: usize = 256;
/// Cost of a poll of the ring, in ns.
pub const POLL_NS: u64 = 100;
/// Cost of one frame, in ns.
const FRAME_NS: u64 = 60;

/// Results of a run.
#[derive(Default)]
pub struct Seen {
    pub length_ns: u64,
    pub served: u64,
    /// Time of polls, in ns.
    pub polled_ns: u64,
    /// Sleeps without a time-out.
    pub sleeps: u64,
    /// Sleeps ended by a notification.
    pub wakes: u64,
    pub naps: u64,
    /// Notifications of the next peer.
    pub calls: u64,
    /// Times from a frame's arrival until it was taken, in ns.
    pub late: Vec<u32>,
    /// Times from its forwarding until the next peer was notified, in ns.
    pub notified: Vec<u32>,
    pub left: usize,
    pub lost: u64,
    /// Changes between naps and empty polls.
    pub turns: u64,
}

impl Seen {
    /// Converts `n` in the run's length to a rate per second.
    pub fn second(&self, n: u64) -> u64 {
        n * 1_000_000 / (self.length_ns / 1000)
    }

    /// CPU time, in ns.
    pub fn cpu_ns(&self, costs: Costs) -> u64 {
        let waits = costs.wake * self.wakes + costs.nap * self.naps;
        self.polled_ns + self.served * FRAME_NS + waits.get()
    }
}

/// What a worker does after it enabled notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Re-checks before it sleeps.
    Rechecks,
    /// Sleeps at once: deliberately wrong, to show in the table.
    Sleeps,
}

struct World {
    policy: Policy,
    costs: Costs,
    armed: Armed,
    load: Load,
    now: Instant,
    /// Arrival time of each waiting frame.
    ring: VecDeque<Instant>,
    notifier: Notifier,
    /// Time at which to notify the next peer.
    due: Instant,
    /// Forwarding times of frames without a notification yet.
    unnotified: Vec<Instant>,
    napped: bool,
    seen: Seen,
}

/// Runs `policy` on both sides of a queue for `length_ns`.
pub fn run(policy: Policy, costs: Costs, armed: Armed, load: Load, length_ns: u64) -> Seen {
    let mut world = World {
        policy,
        costs,
        armed,
        load,
        now: Instant::START,
        ring: VecDeque::new(),
        notifier: Notifier::new(policy),
        due: Instant::NEVER,
        unnotified: Vec::new(),
        napped: false,
        seen: Seen { length_ns, ..Seen::default() },
    };
    let mut poller = Poller::new(policy, costs, Instant::START);
    let end = Instant::from_ns(length_ns);
    while world.now < end {
        let (frames, polled) = world.poll(poller.budget());
        match poller.next(frames, polled) {
            Action::Poll if policy == Policy::Spin => world.skip(end),
            // Draining frames of a nap counts as part of the nap.
            Action::Poll if frames == 0 => world.turn(false),
            Action::Poll => (),
            Action::Until(at) => world.nap(at.min(end)),
            Action::Arm => world.arm(&mut poller, end),
        }
    }
    world.seen.left = world.ring.len();
    world.seen
}

impl World {
    /// When the next frame arrives.
    fn next(&self) -> Instant {
        Instant::from_ns(self.load.peek())
    }

    /// Adds frames that have arrived by now.
    fn come(&mut self) {
        while self.next() <= self.now {
            if self.ring.len() < RING {
                self.ring.push_back(self.next());
            } else {
                self.seen.lost += 1;
            }
            self.load.pop();
        }
    }

    /// Takes and forwards pending frames; returns their number, and the time.
    fn poll(&mut self, budget: usize) -> (usize, Instant) {
        self.come();
        let polled = self.now;
        let frames = self.ring.len().min(budget);
        for came in self.ring.drain(..frames) {
            self.seen.late.push(u32::try_from((polled - came).get()).unwrap_or(u32::MAX));
        }
        self.seen.served += frames as u64;
        self.seen.polled_ns += POLL_NS;
        self.now += Ns::new(POLL_NS + frames as u64 * FRAME_NS);
        if frames > 0 {
            self.unnotified.extend(std::iter::repeat_n(self.now, frames));
            match self.notifier.published(frames, self.now) {
                Notify::Now => self.notify(),
                Notify::At(at) => self.due = at,
                Notify::Later => {}
            }
        }
        self.notify_if_due();
        if frames == 0 {
            self.notify_gathered();
        }
        (frames, polled)
    }

    fn notify(&mut self) {
        self.seen.calls += 1;
        for passed in self.unnotified.drain(..) {
            self.seen.notified.push(u32::try_from((self.now - passed).get()).unwrap_or(u32::MAX));
            self.load.record_reply(self.now.ns());
        }
    }

    fn notify_if_due(&mut self) {
        if self.due > self.now {
            return;
        }
        match self.notifier.due(std::mem::replace(&mut self.due, Instant::NEVER), self.now) {
            Some(Notify::Now) => self.notify(),
            Some(Notify::At(at)) => self.due = at,
            Some(Notify::Later) | None => {}
        }
    }

    /// No more frames arrive: a policy that gathers only while there is work notifies now.
    fn notify_gathered(&mut self) {
        if Notifier::gathers(self.policy) {
            self.due = Instant::NEVER;
            if self.notifier.flush() {
                self.notify();
            }
        }
    }

    /// Changes between naps and empty polls.
    fn turn(&mut self, naps: bool) {
        self.seen.turns += u64::from(self.napped != naps);
        self.napped = naps;
    }

    /// Polls an empty ring until a frame arrives.
    fn skip(&mut self, end: Instant) {
        let until = self.next().min(self.due).min(end);
        if self.ring.is_empty() && until > self.now {
            let polls = (until - self.now).get().div_ceil(POLL_NS);
            self.now += Ns::new(polls * POLL_NS);
            self.seen.polled_ns += polls * POLL_NS;
        }
    }

    fn nap(&mut self, at: Instant) {
        if at > self.now {
            self.turn(true);
            self.notify_gathered();
        }
        while at > self.now {
            self.seen.naps += 1;
            self.now = at.min(self.due).max(self.now) + self.costs.nap_late;
            self.notify_if_due();
        }
    }

    /// Arms, re-checks and sleeps until a frame arrives.
    fn arm(&mut self, poller: &mut Poller, end: Instant) {
        self.seen.polled_ns += POLL_NS;
        self.now += Ns::new(POLL_NS);
        self.come();
        // The event is the frame after the last one taken: if that one has already arrived, no
        // later frame causes a notification.
        let missed = !self.ring.is_empty();
        if missed && self.armed == Armed::Rechecks {
            return;
        }
        self.notify_gathered();
        self.seen.sleeps += 1;
        loop {
            let next = if missed { Instant::NEVER } else { self.next() };
            if self.due <= next.min(end) {
                self.seen.naps += 1;
                self.now = self.now.max(self.due) + self.costs.nap_late;
                self.notify_if_due();
                if next > self.now {
                    continue;
                }
            } else if next <= end {
                self.seen.wakes += 1;
                self.now = self.now.max(next) + self.costs.wake_late;
            } else {
                self.now = end;
                self.come();
                return;
            }
            poller.wake(self.now);
            return;
        }
    }
}
