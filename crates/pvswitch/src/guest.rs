//! A guest of our own: the driver half of queue pairs with their buffers. `nic`, `gen` and the
//! demo's guests are made of it.
//!
//! One thread serves all rings, in rounds: what is due ([`Guest::begin`]), a look at the receive
//! rings when the poll policy wants one, frames to send, and [`Guest::wait`], the one place where
//! it sleeps. The policy judges all pairs together: what it is for is this thread's time.

mod connect;
mod report;
mod ring;
mod rx;
mod settings;
#[cfg(test)]
mod tests;
mod tx;
mod xen;

pub use self::connect::{Connect, Link, connect};
pub use self::report::Report;
pub use self::rx::Rx;
use self::settings::Suppress;
pub use self::settings::{HELP, Setting, Settings};
pub use self::tx::Tx;

use std::os::fd::{AsFd, BorrowedFd};

use switch::poll::{Action, Costs, Policy, Poller};

use self::ring::{Half, Ring};
use self::tx::Rest;

/// Header before each frame: virtio 1.x, with `num_buffers`. Buffers have it on every ring; what
/// a ring says of a frame in another way is told through it.
pub const HDR_LEN: usize = 12;

/// Time between two looks for free buffers where smart poll says nothing of them, in ns.
const SMART_TICK_NS: u64 = 1_000_000;

/// A connected guest.
pub struct Guest {
    /// The connection.
    pub link: Link,
    /// The queue pairs, one at least, all alike.
    pub pairs: Vec<Pair>,
    poller: Poller,
    /// Smart poll was agreed on: events come where a flag for both rings of a pair is clear.
    smart_poll: bool,
    /// What the poll policy said last.
    resting: Action,
    /// What was counted.
    pub counts: SleepCounts,
    /// How it works, after what was agreed on.
    pub settings: Settings,
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
}

/// The switch broke the ring protocol: the connection is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Of a virtqueue.
    #[error(transparent)]
    Virtio(#[from] ::ring::virtq::Malformed),
    /// Of a ring of Xen's.
    #[error(transparent)]
    Xen(#[from] ::ring::xen::Malformed),
}

impl Pair {
    fn new(tx: Ring, rx: Ring, settings: &Settings) -> Self {
        let (mut tx, mut rx) = (Tx::new(tx, settings), Rx::new(rx, settings));
        for ring in [&mut tx.ring, &mut rx.ring] {
            ring.always_tells = settings.suppress == Suppress::None;
        }
        Self { tx, rx, blocked: false, deaf: false, armed: false, tx_calls: false }
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
    fn new(link: Link, rings: Vec<(Ring, Ring)>, settings: &Settings) -> Self {
        let costs = match settings.poll {
            Policy::Adaptive { .. } => crate::cost::costs(),
            _ => Costs::TYPICAL,
        };
        let poller = Poller::new(settings.poll, costs, now_ns());
        let pairs = rings.into_iter().map(|(tx, rx)| Pair::new(tx, rx, settings)).collect();
        let counts = SleepCounts::default();
        let smart_poll = link.has_smart_poll();
        let (resting, settings) = (Action::Poll, *settings);
        Self { link, pairs, poller, smart_poll, resting, counts, settings }
    }

    /// Begins a round: does what is due, and says whether the poll policy wants a look at the
    /// receive rings.
    pub fn begin(&mut self, now: u64) -> Result<bool, Malformed> {
        for pair in &mut self.pairs {
            (pair.blocked, pair.deaf) = (false, false);
            pair.tx.tick(now)?;
        }
        Ok(match self.resting {
            Action::Poll => true,
            Action::Until(at) => at <= now,
            Action::Arm => self.pairs.iter().any(|pair| pair.rx.ring.has_used()),
        })
    }

    /// Most used buffers to take in one look at one ring.
    pub fn budget(&self) -> usize {
        self.poller.budget()
    }

    /// Ends a round in which so many frames passed; `looked`: the receive rings were looked at.
    ///
    /// `adaptive` serves both directions with the latency it may trade; the other policies say
    /// when the receive rings are looked at, and leave what is sent to the kick policy.
    pub fn end(&mut self, looked: bool, received: usize, sent: usize, now: u64) {
        let frames = if self.serves_both() { received + sent } else { received };
        if looked || frames > 0 {
            self.resting = self.poller.next(frames, now);
        }
    }

    fn serves_both(&self) -> bool {
        matches!(self.poller.policy(), Policy::Adaptive { .. })
    }

    /// Sleeps until there is something to do, unless there is already; false when the switch is
    /// gone.
    pub fn wait(&mut self, also: &Also<'_>) -> Result<bool, Malformed> {
        let napping = matches!(self.resting, Action::Until(_));
        let stays = also.more && !(napping && self.serves_both());
        let mut retries = false;
        for pair in &mut self.pairs {
            retries |= pair.blocked && pair.tx.stop();
        }
        if self.resting == Action::Poll || stays || retries {
            return Ok(true);
        }
        let arms = self.resting == Action::Arm;
        let mut sleeps = true;
        for pair in &mut self.pairs {
            sleeps = sleeps && pair.rest(arms, self.smart_poll)?;
        }
        let gone = sleeps && self.sleep(also);
        for pair in &mut self.pairs {
            if self.poller.disarms() {
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

    /// True when the switch is gone.
    fn sleep(&mut self, also: &Also<'_>) -> bool {
        let deaf = self.pairs.iter().all(|pair| pair.deaf);
        let nap = match self.resting {
            Action::Until(at) if !deaf => Some(at),
            _ => None,
        };
        let before = now_ns();
        // With smart poll and the flag not cleared, nobody tells of buffers that are free.
        let smart = self.smart_poll;
        let looks = smart && self.pairs.iter().any(|pair| pair.tx_calls && !pair.armed);
        let look = looks.then_some(before + SMART_TICK_NS);
        let due = self.pairs.iter().filter_map(|pair| pair.tx.deadline()).min();
        let until = [nap, look, also.until, due].into_iter().flatten().min();
        let timeout = until.map(|at| at.saturating_sub(before));
        if timeout == Some(0) {
            return false;
        }
        // What `adaptive` lets wait, waits in both directions.
        let waits_for_sources = nap.is_none() || !self.serves_both();
        let sources = if waits_for_sources { also.sources } else { &[] };
        let mut fds = Vec::with_capacity(1 + 3 * self.pairs.len());
        fds.push(self.link.as_fd());
        for (i, pair) in self.pairs.iter().enumerate() {
            fds.extend(sources.get(i).filter(|_| !pair.blocked));
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
        let (mut called, mut sent) = (false, false);
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            sent |= next(i < sources.len() && !pair.blocked);
            let (rx_called, tx_called) = (next(pair.armed), next(pair.tx_calls));
            called |= pair.wake(rx_called, tx_called, smart);
        }
        if armed && (called || sent && self.serves_both()) {
            self.poller.wake(now);
            self.resting = Action::Poll;
        }
        gone && self.link.is_gone()
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
        gone |= next() && guest.link.is_gone();
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
