//! One queue, its peer and its worker in virtual time.

use std::collections::VecDeque;

use switch::poll::{Action, Costs, Notifier, Notify, Policy, Poller};

use crate::load::Load;

/// Entries of the ring; what comes while it is full is lost.
const RING: usize = 256;
/// One look at the ring, in ns.
pub const LOOK_NS: u64 = 100;
/// One frame's service, in ns.
const FRAME_NS: u64 = 60;

/// What was seen.
#[derive(Default)]
pub struct Seen {
    pub length_ns: u64,
    pub served: u64,
    /// Time of looks, in ns.
    pub polled_ns: u64,
    /// Sleeps without a time-out.
    pub sleeps: u64,
    /// Those of them that a notification ended.
    pub wakes: u64,
    pub naps: u64,
    /// Notifications of the peer behind.
    pub calls: u64,
    /// Times from a frame's coming until it was taken, in ns.
    pub late: Vec<u32>,
    /// Times from its being passed on until the peer behind was told, in ns.
    pub told: Vec<u32>,
    pub left: usize,
    pub lost: u64,
    /// Changes between naps and looks in vain.
    pub turns: u64,
}

impl Seen {
    /// `n` in its length as so many a second.
    pub fn second(&self, n: u64) -> u64 {
        n * 1_000_000 / (self.length_ns / 1000)
    }

    /// CPU time, in ns.
    pub fn cpu_ns(&self, costs: Costs) -> u64 {
        let waits = self.wakes * costs.wake_ns + self.naps * costs.nap_ns;
        self.polled_ns + self.served * FRAME_NS + waits
    }
}

/// What a worker does once it has asked for a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Looks again before it sleeps.
    Looks,
    /// Sleeps: broken, to see that the table tells.
    Sleeps,
}

struct World {
    policy: Policy,
    costs: Costs,
    armed: Armed,
    load: Load,
    now: u64,
    /// When each waiting frame came.
    ring: VecDeque<u64>,
    notifier: Notifier,
    /// When the peer behind is to be told.
    due: u64,
    /// When each frame was passed on that it was not told of.
    untold: Vec<u64>,
    napped: bool,
    seen: Seen,
}

/// `policy` on both sides of a queue for `length_ns`.
pub fn run(policy: Policy, costs: Costs, armed: Armed, load: Load, length_ns: u64) -> Seen {
    let mut world = World {
        policy,
        costs,
        armed,
        load,
        now: 0,
        ring: VecDeque::new(),
        notifier: Notifier::new(policy),
        due: u64::MAX,
        untold: Vec::new(),
        napped: false,
        seen: Seen { length_ns, ..Seen::default() },
    };
    let mut poller = Poller::new(policy, costs, 0);
    while world.now < length_ns {
        let (frames, look) = world.look(poller.budget());
        match poller.next(frames, look) {
            Action::Poll if policy == Policy::Spin => world.skip(length_ns),
            // Draining what a nap gathered is still napping.
            Action::Poll if frames == 0 => world.turn(false),
            Action::Poll => (),
            Action::Until(at) => world.nap(at.min(length_ns)),
            Action::Arm => world.arm(&mut poller, length_ns),
        }
    }
    world.seen.left = world.ring.len();
    world.seen
}

impl World {
    /// Frames that have come by now.
    fn come(&mut self) {
        while self.load.peek() <= self.now {
            if self.ring.len() < RING {
                self.ring.push_back(self.load.peek());
            } else {
                self.seen.lost += 1;
            }
            self.load.pop();
        }
    }

    /// Takes and passes on what there is; how many, and when that was.
    fn look(&mut self, budget: usize) -> (usize, u64) {
        self.come();
        let look = self.now;
        let frames = self.ring.len().min(budget);
        for came in self.ring.drain(..frames) {
            self.seen.late.push(u32::try_from(look - came).unwrap_or(u32::MAX));
        }
        self.seen.served += frames as u64;
        self.seen.polled_ns += LOOK_NS;
        self.now += LOOK_NS + frames as u64 * FRAME_NS;
        if frames > 0 {
            self.untold.extend(std::iter::repeat_n(self.now, frames));
            match self.notifier.published(frames, self.now) {
                Notify::Now => self.tell(),
                Notify::At(at) => self.due = at,
                Notify::Later => {}
            }
        }
        self.tell_if_due();
        if frames == 0 {
            self.tell_gathered();
        }
        (frames, look)
    }

    fn tell(&mut self) {
        self.seen.calls += 1;
        for passed in self.untold.drain(..) {
            self.seen.told.push(u32::try_from(self.now - passed).unwrap_or(u32::MAX));
            self.load.answered(self.now);
        }
    }

    fn tell_if_due(&mut self) {
        if self.due > self.now {
            return;
        }
        match self.notifier.due(std::mem::replace(&mut self.due, u64::MAX), self.now) {
            Some(Notify::Now) => self.tell(),
            Some(Notify::At(at)) => self.due = at,
            Some(Notify::Later) | None => {}
        }
    }

    /// No more comes: a policy that only gathers while there is work tells now.
    fn tell_gathered(&mut self) {
        if Notifier::gathers(self.policy) {
            self.due = u64::MAX;
            if self.notifier.flush() {
                self.tell();
            }
        }
    }

    /// Changes between naps and looks in vain.
    fn turn(&mut self, naps: bool) {
        self.seen.turns += u64::from(self.napped != naps);
        self.napped = naps;
    }

    /// Looks in vain until something comes.
    fn skip(&mut self, end: u64) {
        let until = self.load.peek().min(self.due).min(end);
        if self.ring.is_empty() && until > self.now {
            let looks = (until - self.now).div_ceil(LOOK_NS);
            self.now += looks * LOOK_NS;
            self.seen.polled_ns += looks * LOOK_NS;
        }
    }

    fn nap(&mut self, at: u64) {
        if at > self.now {
            self.turn(true);
            self.tell_gathered();
        }
        while at > self.now {
            self.seen.naps += 1;
            self.now = at.min(self.due).max(self.now) + self.costs.nap_late_ns;
            self.tell_if_due();
        }
    }

    /// Arms, looks again and sleeps until something comes.
    fn arm(&mut self, poller: &mut Poller, end: u64) {
        self.seen.polled_ns += LOOK_NS;
        self.now += LOOK_NS;
        self.come();
        // Asked for is the frame after the last that was taken: one that is there already has
        // passed unheard, and none after it is the one.
        let deaf = !self.ring.is_empty();
        if deaf && self.armed == Armed::Looks {
            return;
        }
        self.tell_gathered();
        self.seen.sleeps += 1;
        loop {
            let next = if deaf { u64::MAX } else { self.load.peek() };
            if self.due <= next.min(end) {
                self.seen.naps += 1;
                self.now = self.now.max(self.due) + self.costs.nap_late_ns;
                self.tell_if_due();
                if next > self.now {
                    continue;
                }
            } else if next <= end {
                self.seen.wakes += 1;
                self.now = self.now.max(next) + self.costs.wake_late_ns;
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
