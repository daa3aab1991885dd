//! A guest: the driver half of queue pairs with their buffers, used by `nic` and `gen`.
//!
//! One thread serves all rings, in rounds: due work ([`Guest::begin`]), a poll of the receive rings
//! if their policy requests it, frames to send, and [`Guest::wait`], the one place where it sleeps.
//! Pairs with the same poll policy form one poll group, because they share this thread's time
//! ([0013](../../../docs/design/0013-one-poll-group-a-policy.md)).

#[cfg(test)]
pub(crate) mod tests;

use std::os::fd::{AsFd, BorrowedFd};

use switch::poll::{Action, Costs, Policy, State};
use switch::time::{Instant, Ns};

use crate::connect::Link;
use crate::poll_group::{Activity, PollGroup};
use crate::ring::{Half, Malformed, Ring};
use crate::rx::Rx;
use crate::settings::{Settings, Suppress};
use crate::tx::{SleepMode, Tx};

/// Interval of polls for free buffers where smart poll suppresses their calls.
const SMART_TICK: Ns = Ns::from_ms(1);

/// A connected guest.
pub struct Guest {
    /// The connection.
    pub link: Link,
    /// The queue pairs, at least one, with the same settings.
    pub pairs: Vec<Pair>,
    /// One for each poll policy of the pairs.
    groups: Vec<PollGroup>,
    /// Smart poll is negotiated: events are enabled by clearing one flag for both rings of a pair.
    smart_poll: bool,
    /// Counters of sleeps.
    pub counts: SleepCounts,
    /// The control socket was readable in the last sleep.
    pub control_ready: bool,
    /// Current settings, after negotiation and changes.
    pub settings: Settings,
    /// Measures the costs of sleeping; called for a group of `adaptive`.
    costs: fn() -> Costs,
}

/// One queue each way.
pub struct Pair {
    /// Frames to the switch.
    pub tx: Tx,
    /// Frames from the switch.
    pub rx: Rx,
    /// There are frames to send, but no buffer is free. Set by the caller in each round.
    pub blocked: bool,
    /// Received frames cannot be processed before a buffer is free. Set likewise.
    pub rx_blocked: bool,
    /// Most used buffers to take from the receive ring in this round; 0: do not poll it.
    pub poll_max: usize,
    /// Index of its group.
    group: usize,
    /// Counters at the end of the last round.
    reported: Activity,
    /// The receive ring is armed for the coming sleep.
    armed: bool,
    /// The transmit ring is armed for the coming sleep.
    tx_calls: bool,
}

/// Counters of a guest thread's sleeps.
#[derive(Clone, Copy, Debug, Default)]
pub struct SleepCounts {
    /// Sleeps that a notification can end.
    pub sleeps: u64,
    /// Sleeps with no receive ring armed.
    pub naps: u64,
    /// Time in both.
    pub asleep: Ns,
}

/// Events that a guest waits for, in addition to its rings.
#[derive(Default)]
pub struct WaitFor<'a> {
    /// Descriptors readable when there are frames to send: one for each pair, or none. Those of
    /// blocked pairs are ignored.
    pub sources: &'a [BorrowedFd<'a>],
    /// There may be frames to send at once.
    pub more: bool,
    /// Latest time of the return.
    pub until: Option<Instant>,
    /// Readable when the control socket needs service: [`Guest::control_ready`].
    pub control: Option<BorrowedFd<'a>>,
}

impl Pair {
    fn new(tx: Ring, rx: Ring, settings: &Settings) -> Self {
        let (mut tx, mut rx) = (tx, rx);
        if settings.suppress == Suppress::None {
            // First: the receive queue kicks for its first buffers.
            tx.never_suppress();
            rx.never_suppress();
        }
        Self {
            tx: Tx::new(tx, settings),
            rx: Rx::new(rx, settings),
            blocked: false,
            rx_blocked: false,
            poll_max: 0,
            group: 0,
            reported: Activity::default(),
            armed: false,
            tx_calls: false,
        }
    }

    /// Returns the activity since the last call.
    fn take_activity(&mut self) -> Activity {
        let (rx, tx) = (&self.rx.counts, &self.tx.counts);
        let now = Activity { polls: rx.polls, received: rx.frames, sent: tx.frames };
        now.since(std::mem::replace(&mut self.reported, now))
    }

    /// Enables the calls that end the coming sleep; with `arms` also those for received frames.
    /// Returns false if there is work already.
    fn prepare_sleep(&mut self, arms: bool, smart_poll: bool) -> Result<bool, Malformed> {
        self.armed = arms && !self.rx_blocked;
        if self.armed && !self.rx.ring.arm() {
            return Ok(false);
        }
        let mode = self.tx.prepare_sleep(self.blocked)?;
        // With smart poll either ring's event may be the only one.
        self.tx_calls = mode == SleepMode::Armed || (smart_poll && self.armed);
        Ok(mode != SleepMode::Awake
            && (!self.armed || !smart_poll || self.stop_polling(self.blocked)?))
    }

    /// With smart poll, clears the flag that suppresses calls, after the ring was armed. Returns
    /// false if there is work already. The flag is common to both rings, so neither may have
    /// pending work: transmitted buffers are reclaimed first.
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

    /// Records the calls that ended a sleep. Returns whether frames may have arrived.
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
            groups: Vec::new(),
            smart_poll,
            counts: SleepCounts::default(),
            control_ready: false,
            settings: *settings,
            costs,
        };
        guest.assign_groups();
        for (i, pair) in guest.pairs.iter_mut().enumerate() {
            pair.tx.set_kick_policy(settings.kick_of(i));
        }
        guest
    }

    /// Changes policies of one or all queue pairs, between two rounds; the next round polls the
    /// receive rings.
    pub fn set_policies(
        &mut self,
        queue: Option<usize>,
        poll: Option<Policy>,
        kick: Option<Policy>,
    ) {
        self.settings.set_policies(queue, poll, kick);
        if poll.is_some() {
            self.assign_groups();
        }
        for (i, pair) in self.pairs.iter_mut().enumerate().filter(|_| kick.is_some()) {
            pair.tx.set_kick_policy(self.settings.kick_of(i));
        }
    }

    /// Assigns the group of its policy to each pair. Groups still in use keep their state.
    fn assign_groups(&mut self) {
        let mut before = std::mem::take(&mut self.groups);
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            let policy = self.settings.poll_of(i);
            let has =
                |groups: &[PollGroup]| groups.iter().position(|group| group.policy() == policy);
            pair.group = has(&self.groups).unwrap_or_else(|| {
                let known = has(&before).map(|known| before.swap_remove(known));
                self.groups
                    .push(known.unwrap_or_else(|| PollGroup::new(policy, self.costs, now())));
                self.groups.len() - 1
            });
            let group = &mut self.groups[pair.group];
            group.action = Action::Poll;
            if group.disarms() {
                // Under `event` the ring stayed armed.
                pair.rx.ring.disarm();
            }
        }
    }

    /// Begins a round: does due work, and sets [`poll_max`](Pair::poll_max) of each pair by its
    /// poll policy. Returns whether any receive ring is to be polled.
    pub fn begin(&mut self, now: Instant) -> Result<bool, Malformed> {
        for pair in &mut self.pairs {
            (pair.blocked, pair.rx_blocked) = (false, false);
            pair.tx.tick(now)?;
        }
        let mut polls = false;
        for (i, group) in self.groups.iter().enumerate() {
            let mine = || self.pairs.iter().filter(|pair| pair.group == i);
            let wants = match group.action {
                Action::Poll => true,
                Action::Until(at) => at <= now,
                Action::Arm => mine().any(|pair| pair.rx.ring.has_used()),
            };
            let poll_max = if wants { group.budget() } else { 0 };
            for pair in self.pairs.iter_mut().filter(|pair| pair.group == i) {
                pair.poll_max = poll_max;
            }
            polls |= wants;
        }
        Ok(polls)
    }

    /// Ends a round: reports the activity of its queues to the groups.
    pub fn end(&mut self, now: Instant) {
        let mut sent = 0;
        for (i, group) in self.groups.iter_mut().enumerate() {
            let mine = self.pairs.iter_mut().filter(|pair| pair.group == i);
            let activity: Activity = mine.map(Pair::take_activity).sum();
            sent += activity.sent;
            group.observe(activity, now);
        }
        if sent == 0 {
            self.pairs.iter_mut().for_each(|pair| pair.tx.kick_batched());
        }
    }

    /// Current polling state of a pair's receive ring.
    pub fn state(&self, pair: &Pair) -> State {
        self.groups[pair.group].state()
    }

    /// Sleeps until there is work, unless there is already. Returns false if the switch is gone.
    pub fn wait(&mut self, also: &WaitFor<'_>) -> Result<bool, Malformed> {
        self.control_ready = false;
        // If all pairs use `adaptive`, its latency applies to both directions.
        let both = self.groups.iter().all(PollGroup::serves_both);
        let napping = self.groups.iter().any(|group| group.nap().is_some());
        let stays = also.more && !(napping && both);
        let mut retries = false;
        for pair in &mut self.pairs {
            retries |= pair.blocked && pair.tx.stop();
        }
        if self.groups.iter().any(|group| group.action == Action::Poll) || stays || retries {
            return Ok(true);
        }
        let mut sleeps = true;
        for pair in &mut self.pairs {
            pair.tx.kick_batched();
            let arms = self.groups[pair.group].action == Action::Arm;
            sleeps = sleeps && pair.prepare_sleep(arms, self.smart_poll)?;
        }
        let gone = sleeps && self.sleep(also);
        for pair in &mut self.pairs {
            if self.groups[pair.group].disarms() {
                pair.rx.ring.disarm();
            }
            pair.tx.ring.disarm();
        }
        Ok(!gone)
    }

    /// Enables calls for received frames before a sleep. Returns false if there is work already.
    pub fn arm(&mut self) -> Result<bool, Malformed> {
        for pair in &mut self.pairs {
            if !pair.rx.ring.arm() || self.smart_poll && !pair.stop_polling(false)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Time of a group's next poll, unless all its pairs are `rx_blocked`.
    fn nap(&self, group: usize) -> Option<Instant> {
        let can_receive = self.pairs.iter().any(|pair| pair.group == group && !pair.rx_blocked);
        self.groups[group].nap().filter(|_| can_receive)
    }

    /// Whether a pair waits for its source: not if it is blocked, nor if its policy delays both
    /// directions.
    fn waits_for_source(&self, pair: &Pair) -> bool {
        let group = &self.groups[pair.group];
        let waits = group.serves_both() && self.nap(pair.group).is_some();
        !pair.blocked && !waits
    }

    /// Sleeps; returns whether the switch is gone.
    fn sleep(&mut self, also: &WaitFor<'_>) -> bool {
        let before = now();
        // With smart poll and its flag set, there are no calls for free buffers.
        let smart = self.smart_poll;
        let ticks = smart && self.pairs.iter().any(|pair| pair.tx_calls && !pair.armed);
        let tick = ticks.then_some(before + SMART_TICK);
        let due = self.pairs.iter().filter_map(|pair| pair.tx.deadline()).min();
        let nap = (0..self.groups.len()).filter_map(|group| self.nap(group)).min();
        let until = [nap, tick, also.until, due].into_iter().flatten().min();
        let timeout = until.map(|at| at - before);
        if timeout == Some(Ns::ZERO) {
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
        let ready = os::poll_readable(&fds, timeout.map(Into::into));
        let now = now();
        let armed = self.pairs.iter().any(|pair| pair.armed);
        *(if armed { &mut self.counts.sleeps } else { &mut self.counts.naps }) += 1;
        self.counts.asleep += now - before;
        let mut ready = ready.into_iter();
        let mut next = |was_waited_for| was_waited_for && ready.next() == Some(true);
        let gone = next(true);
        self.control_ready = next(also.control.is_some());
        for (i, pair) in self.pairs.iter_mut().enumerate() {
            let sent = next(sources[i]);
            let (rx_called, tx_called) = (next(pair.armed), next(pair.tx_calls));
            let called = pair.wake(rx_called, tx_called, smart);
            let group = &mut self.groups[pair.group];
            let wakes = called || sent && group.serves_both();
            if pair.armed && wakes && group.action == Action::Arm {
                group.wake(now);
            }
        }
        gone && self.is_gone()
    }

    /// Whether the switch is gone. A restarted switch gets requests over rings again.
    pub fn is_gone(&mut self) -> bool {
        let gone = self.link.is_gone();
        if !gone {
            // A malformed ring returns its error again at the next use.
            let _ = self.send_groups();
        }
        gone
    }

    /// Sends the list of multicast groups to the switch, if due.
    pub(crate) fn send_groups(&mut self) -> Result<(), Malformed> {
        match &mut self.link {
            Link::VhostUser(_) => Ok(()),
            Link::Xen(link) => link.send_groups(&mut self.pairs[0].tx),
        }
    }
}

/// Sleeps until a call to one of many guests with armed receive rings, at most `timeout`.
/// Returns false if a switch is gone.
pub fn wait_many(guests: &mut [Guest], timeout: Ns) -> bool {
    let mut fds = Vec::with_capacity(2 * guests.len());
    for guest in &*guests {
        fds.push(guest.link.as_fd());
        fds.extend(guest.pairs.iter().map(|pair| pair.rx.ring.call()));
    }
    let mut ready = os::poll_readable(&fds, Some(timeout.into())).into_iter();
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

/// The machine's monotonic clock: comparable between processes.
pub fn now() -> Instant {
    Instant::START + Ns::from(os::monotonic())
}
