//! A guest of our own: the driver half of one queue pair with its buffers. `nic`, `gen` and the
//! demo's guests are made of it.
//!
//! One thread serves both rings, in rounds: what is due ([`Guest::begin`]), a look at the receive
//! ring when the poll policy wants one, frames to send, and [`Guest::wait`], the one place where
//! it sleeps.

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
    /// Frames to the switch.
    pub tx: Tx,
    /// Frames from the switch.
    pub rx: Rx,
    poller: Poller,
    /// Smart poll was agreed on: events come where a flag for both rings is clear.
    smart_poll: bool,
    /// What the poll policy said last.
    resting: Action,
    /// What was counted.
    pub counts: SleepCounts,
    /// How it works, after what was agreed on.
    pub settings: Settings,
}

/// What a guest's thread counts of its sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct SleepCounts {
    /// Sleeps that a notification could end.
    pub sleeps: u64,
    /// Sleeps with the receive ring not armed.
    pub naps: u64,
    /// Time in both, in ns.
    pub asleep_ns: u64,
}

/// What a guest waits for beside its rings.
#[derive(Default)]
pub struct Also<'a> {
    /// Readable when there are frames to send.
    pub source: Option<BorrowedFd<'a>>,
    /// There may be frames to send at once.
    pub more: bool,
    /// There are, but no buffer is free.
    pub blocked: bool,
    /// Frames received cannot be dealt with before a buffer is free.
    pub deaf: bool,
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

impl Guest {
    fn new(link: Link, tx: Ring, rx: Ring, settings: &Settings) -> Self {
        let costs = match settings.poll {
            Policy::Adaptive { .. } => crate::cost::costs(),
            _ => Costs::TYPICAL,
        };
        let poller = Poller::new(settings.poll, costs, now_ns());
        let (mut tx, mut rx) = (Tx::new(tx, settings), Rx::new(rx, settings));
        for ring in [&mut tx.ring, &mut rx.ring] {
            ring.always_tells = settings.suppress == Suppress::None;
        }
        let counts = SleepCounts::default();
        let smart_poll = link.has_smart_poll();
        let (resting, settings) = (Action::Poll, *settings);
        Self { link, tx, rx, poller, smart_poll, resting, counts, settings }
    }

    /// Begins a round: does what is due, and says whether the poll policy wants a look at the
    /// receive ring.
    pub fn begin(&mut self, now: u64) -> Result<bool, Malformed> {
        self.tx.tick(now)?;
        Ok(match self.resting {
            Action::Poll => true,
            Action::Until(at) => at <= now,
            Action::Arm => self.rx.ring.has_used(),
        })
    }

    /// Most used buffers to take in one look.
    pub fn budget(&self) -> usize {
        self.poller.budget()
    }

    /// Ends a round in which so many frames passed; `looked`: the receive ring was looked at.
    ///
    /// `adaptive` serves both directions with the latency it may trade; the other policies say
    /// when the receive ring is looked at, and leave what is sent to the kick policy.
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
        let retries = also.blocked && self.tx.stop();
        if self.resting == Action::Poll || stays || retries {
            return Ok(true);
        }
        let armed = self.resting == Action::Arm && !also.deaf;
        let ready = armed && !self.rx.ring.arm();
        let mut rest = if ready { Rest::Awake } else { self.tx.rest(also.blocked)? };
        if armed && rest != Rest::Awake && !self.stop_polling(also.blocked)? {
            rest = Rest::Awake;
        }
        let gone = rest != Rest::Awake && self.sleep(also, armed, rest == Rest::Armed);
        if self.poller.disarms() {
            self.rx.ring.disarm();
        }
        self.tx.ring.disarm();
        Ok(!gone)
    }

    /// Before a sleep that waits for frames only: asks for a call. False: there is something.
    pub fn arm(&mut self) -> Result<bool, Malformed> {
        Ok(self.rx.ring.arm() && self.stop_polling(false)?)
    }

    /// With smart poll, clears the flag by which we ask not to be called, after the ring was armed;
    /// false: there is something by now. It is one flag for both rings, so nothing may wait on
    /// either: what was sent is taken back first.
    fn stop_polling(&mut self, blocked: bool) -> Result<bool, Malformed> {
        if !self.smart_poll {
            return Ok(true);
        }
        let before = self.tx.in_flight();
        self.tx.reclaim()?;
        let freed = blocked && self.tx.in_flight() < before;
        let armed = match (&self.tx.ring.half, &self.rx.ring.half) {
            (Half::XenTx(tx), Half::XenRx(rx)) => rx.stop_polling(tx),
            _ => true,
        };
        Ok(armed && !freed)
    }

    /// True when the switch is gone.
    fn sleep(&mut self, also: &Also<'_>, armed: bool, tx_armed: bool) -> bool {
        let nap = match self.resting {
            Action::Until(at) if !also.deaf => Some(at),
            _ => None,
        };
        let before = now_ns();
        // With smart poll and the flag not cleared, nobody tells of buffers that are free.
        let smart = self.smart_poll;
        let look = (smart && tx_armed && !armed).then_some(before + SMART_TICK_NS);
        let until = [nap, look, also.until, self.tx.deadline()].into_iter().flatten().min();
        let timeout = until.map(|at| at.saturating_sub(before));
        if timeout == Some(0) {
            return false;
        }
        // What `adaptive` lets wait, waits in both directions.
        let source = also.source.filter(|_| nap.is_none() || !self.serves_both());
        // With smart poll either ring's event may be the only one.
        let tx_calls = tx_armed || (smart && armed);
        let calls = [armed.then(|| self.rx.ring.call()), tx_calls.then(|| self.tx.ring.call())];
        let [gone, sent, rx_called, tx_called] =
            readable([Some(self.link.as_fd()), source, calls[0], calls[1]], timeout);
        let now = now_ns();
        *(if armed { &mut self.counts.sleeps } else { &mut self.counts.naps }) += 1;
        self.counts.asleep_ns += now.saturating_sub(before);
        if tx_calls {
            self.tx.ring.take_calls();
        }
        let called = rx_called || (smart && tx_called);
        if called {
            self.rx.ring.take_calls();
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
    use rustix::event::{PollFd, PollFlags, poll};
    let mut all = Vec::with_capacity(2 * guests.len());
    for guest in &*guests {
        all.push(PollFd::new(&guest.link, PollFlags::IN));
        all.push(PollFd::from_borrowed_fd(guest.rx.ring.call(), PollFlags::IN));
    }
    let _ = poll(&mut all, Some(&timespec(timeout_ns)));
    let ready: Vec<_> = all.iter().map(|fd| !fd.revents().is_empty()).collect();
    for (guest, ready) in guests.iter_mut().zip(ready.chunks(2)) {
        if ready[1] {
            guest.rx.ring.take_calls();
        }
    }
    !guests.iter_mut().zip(ready.chunks(2)).any(|(guest, ready)| ready[0] && guest.link.is_gone())
}

fn timespec(ns: u64) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: (ns / 1_000_000_000).try_into().unwrap_or(i64::MAX),
        tv_nsec: (ns % 1_000_000_000) as i64,
    }
}

/// Sleeps until one of `fds` is readable, at most `timeout_ns`; says which are.
pub fn readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    timeout_ns: Option<u64>,
) -> [bool; N] {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut all: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = timeout_ns.map(timespec);
    // An interrupted sleep is a sleep that ended.
    let _ = poll(&mut all, timeout.as_ref());
    let mut polled = all.iter();
    fds.map(|fd| fd.is_some() && polled.next().is_some_and(|p| !p.revents().is_empty()))
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
