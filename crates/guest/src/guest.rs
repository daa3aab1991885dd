//! A guest: the driver half of queue pairs with their buffers. `nic` and `gen` are made of it.
//!
//! One thread serves all rings, in rounds: what is due ([`Guest::begin`]), a look at the receive
//! rings when their poll policy wants one, frames to send, and [`Guest::wait`], the one place where
//! it sleeps. Pairs of one poll policy are judged together: what it is for is this thread's time
//! ([0013](../../../docs/design/0013-one-judge-a-policy.md)).

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};

use switch::poll::{Action, Costs, Policy, State};

use crate::connect::Link;
use crate::judge::{Judge, Passed};
use crate::ring::{Half, Malformed, Ring};
use crate::rx::Rx;
use crate::settings::{Settings, Suppress};
use crate::tx::{Rest, Tx};

/// Time between two looks for free buffers where smart poll says nothing of them, in ns.
const SMART_TICK_NS: u64 = 1_000_000;

/// A connected guest.
pub struct Guest {
    /// The connection.
    pub link: Link,
    /// The queue pairs, one at least, all alike.
    pub pairs: Vec<Pair>,
    /// One for each poll policy that pairs have.
    judges: Vec<Judge>,
    /// Smart poll was agreed on: events come where a flag for both rings of a pair is clear.
    smart_poll: bool,
    /// What was counted.
    pub counts: SleepCounts,
    /// `Also::control` was readable in the last sleep.
    pub asked: bool,
    /// How it works, after what was agreed on and was changed since.
    pub settings: Settings,
    /// What sleeping costs: asked for a judge of `adaptive`.
    costs: fn() -> Costs,
}

/// One queue each way.
pub struct Pair {
    /// Frames to the switch.
    pub tx: Tx,
    /// Frames from the switch.
    pub rx: Rx,
    /// There are frames to send, but no buffer is free. Said by the user in each round.
    pub blocked: bool,
    /// Frames received cannot be dealt with before a buffer is free. As above.
    pub deaf: bool,
    /// Most used buffers to take from the receive ring in this round; 0: its poll policy wants no
    /// look.
    pub look: usize,
    /// Which of the judges is its own.
    judge: usize,
    /// What was counted up to the end of the last round.
    told: Passed,
    /// The receive ring calls: for the sleep that comes.
    armed: bool,
    /// The transmit ring calls: for the sleep that comes.
    tx_calls: bool,
}

/// What a guest's thread counts of its sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct SleepCounts {
    /// Sleeps that a notification could end.
    pub sleeps: u64,
    /// Sleeps with no receive ring armed.
    pub naps: u64,
    /// Time in both, in ns.
    pub asleep_ns: u64,
}

/// What a guest waits for beside its rings.
#[derive(Default)]
pub struct Also<'a> {
    /// Readable when there are frames to send, one for each pair, or none at all. Those of pairs
    /// that are blocked are not waited for.
    pub sources: &'a [BorrowedFd<'a>],
    /// There may be frames to send at once.
    pub more: bool,
    /// When else to return, in ns.
    pub until: Option<u64>,
    /// Readable when somebody asks something: [`Guest::asked`].
    pub control: Option<BorrowedFd<'a>>,
}

impl Pair {
    fn new(tx: Ring, rx: Ring, settings: &Settings) -> Self {
        let (mut tx, mut rx) = (Tx::new(tx, settings), Rx::new(rx, settings));
        for ring in [&mut tx.ring, &mut rx.ring] {
            ring.always_tells = settings.suppress == Suppress::None;
        }
        Self {
            tx,
            rx,
            blocked: false,
            deaf: false,
            look: 0,
            judge: 0,
            told: Passed::default(),
            armed: false,
            tx_calls: false,
        }
    }

    /// What passed since this was last asked.
    fn passed(&mut self) -> Passed {
        let (rx, tx) = (&self.rx.counts, &self.tx.counts);
        let now = Passed { looks: rx.polls, received: rx.frames, sent: tx.frames };
        now.since(std::mem::replace(&mut self.told, now))
    }

    /// Before a sleep: asks for the calls that are to end it; `arms`: for those of frames, too.
    /// False: there is something by now.
    fn rest(&mut self, arms: bool, smart_poll: bool) -> Result<bool, Malformed> {
        self.armed = arms && !self.deaf;
        if self.armed && !self.rx.ring.arm() {
            return Ok(false);
        }
        let rest = self.tx.rest(self.blocked)?;
        // With smart poll either ring's event may be the only one.
        self.tx_calls = rest == Rest::Armed || (smart_poll && self.armed);
        Ok(rest != Rest::Awake
            && (!self.armed || !smart_poll || self.stop_polling(self.blocked)?))
    }

    /// With smart poll, clears the flag by which we ask not to be called, after the ring was armed;
    /// false: there is something by now. It is one flag for both rings, so nothing may wait on
    /// either: what was sent is taken back first.
    fn stop_polling(&mut self, blocked: bool) -> Result<bool, Malformed> {
        let before = self.tx.in_flight();
        self.tx.reclaim()?;
        let freed = blocked && self.tx.in_flight() < before;
        let armed = match (&self.tx.ring.half, &self.rx.ring.half) {
            (Half::XenTx(tx), Half::XenRx(rx)) => rx.stop_polling(tx),
            _ => true,
        };
        Ok(armed && !freed)
    }

    /// After a sleep: takes note of the calls that came. Whether frames may be why.
    fn wake(&mut self, rx_called: bool, tx_called: bool, smart_poll: bool) -> bool {
        if self.tx_calls {
            self.tx.ring.take_calls();
        }
        let called = rx_called || (smart_poll && tx_called);
        if called {
            self.rx.ring.take_calls();
        }
        called
    }
}

impl Guest {
    pub(crate) fn new(
        link: Link,
        rings: Vec<(Ring, Ring)>,
        settings: &Settings,
        costs: fn() -> Costs,
    ) -> Self {
        let pairs = rings.into_iter().map(|(tx, rx)| Pair::new(tx, rx, settings)).collect();
        let smart_poll = link.has_smart_poll();
        let mut guest = Self {
            link,
            pairs,
            judges: Vec::new(),
            smart_poll,
            counts: SleepCounts::default(),
            asked: false,
            settings: *settings,
            costs,
        };
        guest.judge_again();
        for (i, pair) in guest.pairs.iter_mut().enumerate() {
            pair.tx.follow(settings.kick_of(i));
        }
        guest
    }

    /// Changes policies, of one queue pair or of all, between two rounds: the next one looks at the
    /// receive rings and asks the new ones.
    pub fn follow(&mut self, queue: Option<usize>, poll: Option<Policy>, kick: Option<Policy>) {
        self.settings.follow(queue, poll, kick);
        if poll.is_some() {
            self.judge_again();
        }
        for (i, pair) in self.pairs.iter_mut().enumerate().filter(|_| kick.is_some()) {
            pair.tx.follow(self.settings.kick_of(i));
        }
    }

    /// Gives each pair the judge of its policy. One that goes on keeps what it learned.
    fn judge_again(&mut self) {
        let mut before = std::mem::take(&mut self.judges);
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            let policy = self.settings.poll_of(i);
            let has = |judges: &[Judge]| judges.iter().position(|judge| judge.policy() == policy);
            pair.judge = has(&self.judges).unwrap_or_else(|| {
                let known = has(&before).map(|known| before.swap_remove(known));
                self.judges.push(known.unwrap_or_else(|| Judge::new(policy, self.costs, now_ns())));
                self.judges.len() - 1
            });
            let judge = &mut self.judges[pair.judge];
            judge.resting = Action::Poll;
            if judge.disarms() {
                // Under `event` it stayed armed.
                pair.rx.ring.disarm();
            }
        }
    }

    /// Begins a round: does what is due, and says of each pair whether its poll policy wants a
    /// [look](Pair::look) at the receive ring; true: of any.
    pub fn begin(&mut self, now: u64) -> Result<bool, Malformed> {
        for pair in &mut self.pairs {
            (pair.blocked, pair.deaf) = (false, false);
            pair.tx.tick(now)?;
        }
        let mut looks = false;
        for (i, judge) in self.judges.iter().enumerate() {
            let mine = || self.pairs.iter().filter(|pair| pair.judge == i);
            let wants = match judge.resting {
                Action::Poll => true,
                Action::Until(at) => at <= now,
                Action::Arm => mine().any(|pair| pair.rx.ring.has_used()),
            };
            let look = if wants { judge.budget() } else { 0 };
            for pair in self.pairs.iter_mut().filter(|pair| pair.judge == i) {
                pair.look = look;
            }
            looks |= wants;
        }
        Ok(looks)
    }

    /// Ends a round: what passed in it is what queues have counted.
    pub fn end(&mut self, now: u64) {
        let mut sent = 0;
        for (i, judge) in self.judges.iter_mut().enumerate() {
            let mine = self.pairs.iter_mut().filter(|pair| pair.judge == i);
            let passed: Passed = mine.map(Pair::passed).sum();
            sent += passed.sent;
            judge.judge(passed, now);
        }
        if sent == 0 {
            self.pairs.iter_mut().for_each(|pair| pair.tx.kick_gathered());
        }
    }

    /// How a pair's receive ring is served at the moment.
    pub fn state(&self, pair: &Pair) -> State {
        self.judges[pair.judge].state()
    }

    /// Sleeps until there is something to do, unless there is already; false when the switch is
    /// gone.
    pub fn wait(&mut self, also: &Also<'_>) -> Result<bool, Malformed> {
        self.asked = false;
        // What `adaptive` lets wait, waits in both directions, if it is the policy of all.
        let both = self.judges.iter().all(Judge::serves_both);
        let napping = self.judges.iter().any(|judge| judge.nap().is_some());
        let stays = also.more && !(napping && both);
        let mut retries = false;
        for pair in &mut self.pairs {
            retries |= pair.blocked && pair.tx.stop();
        }
        if self.judges.iter().any(|judge| judge.resting == Action::Poll) || stays || retries {
            return Ok(true);
        }
        let mut sleeps = true;
        for pair in &mut self.pairs {
            pair.tx.kick_gathered();
            let arms = self.judges[pair.judge].resting == Action::Arm;
            sleeps = sleeps && pair.rest(arms, self.smart_poll)?;
        }
        let gone = sleeps && self.sleep(also);
        for pair in &mut self.pairs {
            if self.judges[pair.judge].disarms() {
                pair.rx.ring.disarm();
            }
            pair.tx.ring.disarm();
        }
        Ok(!gone)
    }

    /// Before a sleep that waits for frames only: asks for calls. False: there is something.
    pub fn arm(&mut self) -> Result<bool, Malformed> {
        for pair in &mut self.pairs {
            if !pair.rx.ring.arm() || self.smart_poll && !pair.stop_polling(false)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// When a judge wants its next look, if not all its pairs are deaf, in ns.
    fn nap(&self, judge: usize) -> Option<u64> {
        let hears = self.pairs.iter().any(|pair| pair.judge == judge && !pair.deaf);
        self.judges[judge].nap().filter(|_| hears)
    }

    /// Whether a source is waited for: not by a pair that is blocked, nor by one whose policy lets
    /// both directions wait.
    fn waits_for_source(&self, pair: &Pair) -> bool {
        let judge = &self.judges[pair.judge];
        let waits = judge.serves_both() && self.nap(pair.judge).is_some();
        !pair.blocked && !waits
    }

    /// True when the switch is gone.
    fn sleep(&mut self, also: &Also<'_>) -> bool {
        let before = now_ns();
        // With smart poll and the flag not cleared, nobody tells of buffers that are free.
        let smart = self.smart_poll;
        let looks = smart && self.pairs.iter().any(|pair| pair.tx_calls && !pair.armed);
        let look = looks.then_some(before + SMART_TICK_NS);
        let due = self.pairs.iter().filter_map(|pair| pair.tx.deadline()).min();
        let nap = (0..self.judges.len()).filter_map(|judge| self.nap(judge)).min();
        let until = [nap, look, also.until, due].into_iter().flatten().min();
        let timeout = until.map(|at| at.saturating_sub(before));
        if timeout == Some(0) {
            return false;
        }
        let sources = self.pairs.iter().enumerate();
        let waits_for = |(i, pair)| i < also.sources.len() && self.waits_for_source(pair);
        let sources: Vec<bool> = sources.map(waits_for).collect();
        let mut fds = Vec::with_capacity(2 + 3 * self.pairs.len());
        fds.push(self.link.as_fd());
        fds.extend(also.control);
        for (i, pair) in self.pairs.iter().enumerate() {
            fds.extend(sources[i].then(|| also.sources[i]));
            fds.extend(pair.armed.then(|| pair.rx.ring.call()));
            fds.extend(pair.tx_calls.then(|| pair.tx.ring.call()));
        }
        let ready = readable(&fds, timeout);
        let now = now_ns();
        let armed = self.pairs.iter().any(|pair| pair.armed);
        *(if armed { &mut self.counts.sleeps } else { &mut self.counts.naps }) += 1;
        self.counts.asleep_ns += now.saturating_sub(before);
        let mut ready = ready.into_iter();
        let mut next = |was_waited_for| was_waited_for && ready.next() == Some(true);
        let gone = next(true);
        self.asked = next(also.control.is_some());
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            let sent = next(sources[i]);
            let (rx_called, tx_called) = (next(pair.armed), next(pair.tx_calls));
            let called = pair.wake(rx_called, tx_called, smart);
            let judge = &mut self.judges[pair.judge];
            let wakes = called || sent && judge.serves_both();
            if pair.armed && wakes && judge.resting == Action::Arm {
                judge.wake(now);
            }
        }
        gone && self.is_gone()
    }

    /// Whether the switch has gone. One that was restarted is told again what is told over rings.
    pub fn is_gone(&mut self) -> bool {
        let gone = self.link.is_gone();
        if !gone {
            // A ring that is broken says so again to whoever uses it.
            let _ = self.tell_groups();
        }
        gone
    }

    /// Tells the switch which multicast is wanted, if that is due.
    pub(crate) fn tell_groups(&mut self) -> Result<(), Malformed> {
        match &mut self.link {
            Link::VhostUser(_) => Ok(()),
            Link::Xen(link) => link.tell_groups(&mut self.pairs[0].tx),
        }
    }
}

/// Sleeps until one of many guests, whose receive rings are armed, was called, or for at most
/// `timeout_ns`; false when one's switch is gone.
pub fn wait_many(guests: &mut [Guest], timeout_ns: u64) -> bool {
    let mut fds = Vec::with_capacity(2 * guests.len());
    for guest in &*guests {
        fds.push(guest.link.as_fd());
        fds.extend(guest.pairs.iter().map(|pair| pair.rx.ring.call()));
    }
    let mut ready = readable(&fds, Some(timeout_ns)).into_iter();
    let mut next = || ready.next() == Some(true);
    let mut gone = false;
    for guest in guests {
        gone |= next() && guest.is_gone();
        for pair in &mut guest.pairs {
            if next() {
                pair.rx.ring.take_calls();
            }
        }
    }
    !gone
}

fn timespec(ns: u64) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: (ns / 1_000_000_000).try_into().unwrap_or(i64::MAX),
        tv_nsec: (ns % 1_000_000_000) as i64,
    }
}

/// Sleeps until one of `fds` is readable, at most `timeout_ns`; says which are.
pub fn readable(fds: &[BorrowedFd<'_>], timeout_ns: Option<u64>) -> Vec<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut all: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = timeout_ns.map(timespec);
    // An interrupted sleep is a sleep that ended.
    let _ = poll(&mut all, timeout.as_ref());
    all.iter().map(|fd| !fd.revents().is_empty()).collect()
}

/// The machine's monotonic clock, in ns: comparable between processes.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// CPU time of this process.
pub fn cpu_time() -> std::time::Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    std::time::Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}
