//! `adaptive`: polls, naps or sleeps, whichever costs least at the current rate.
//!
//! Three ways to wait for the next frame, with costs measured on this machine:
//! - *hot*: keep polling. Costs the time until it arrives; adds no latency.
//! - *cold*: arm and sleep until notified. Costs [`Costs::wake`] each time.
//! - *warm*: stay disarmed and poll again after a nap. Costs [`Costs::nap`] each time, for any
//!   number of frames, and adds up to the latency target.
//!
//! Two decisions. How long to poll before sleeping: [`Gaps`] estimates what each of a few limits
//! would have cost recently, and the cheapest is used. Whether to nap while frames arrive:
//! [`Window`] compares the cost without naps with the cost that naps would have had; if they would
//! have been clearly cheaper they are tried, and stopped when they slow the traffic down, as they
//! do if each frame waits for the one before. A nap that found nothing ends in a sleep, not in
//! another nap.
//!
//! Reasons and figures: `docs/design/0008-adaptive.md`.

use super::{Action, Costs, State};
use crate::frame::BURST_MAX;
use crate::time::{Instant, Ns};

/// Minimum length of a window, and the length from which it needs no minimum of frames.
const WINDOW: (Ns, Ns) = (Ns::from_ms(1), Ns::from_ms(8));
const WINDOW_FRAMES: u64 = 512;
/// Frames that may accumulate in a nap: half a ring of 256.
const ROOM: u64 = 128;
/// A peer that fills half a ring this many times in a row, always soon after it was emptied, is
/// limited by us.
const BACKLOGS: u8 = 6;
/// Bound on "soon": time for a sleeping peer to wake up and fill half a ring.
const BACKLOG: Ns = Ns::from_us(150);
/// Naps pay if they cost less than this part of the cost without, in percent.
const PAYS_PERCENT: u64 = 90;
/// Number of naps in a trial before its evaluation.
const TRIAL_NAPS: u64 = 8;
/// First and longest time without naps after a failed trial.
const BACKOFF: (Ns, Ns) = (Ns::from_ms(10), Ns::from_secs(1));
/// Interval at which a queue that naps checks whether that still pays.
const REVIEW_INTERVAL: Ns = Ns::from_ms(200);
/// Polling time after the last frame if sleeping cannot meet the latency target.
const LATENCY_SPIN: Ns = Ns::from_ms(1);

/// State of the policy for one queue.
#[derive(Clone, Debug, Hash)]
pub struct Adaptive {
    latency: Ns,
    costs: Costs,
    state: State,
    /// Time of the last poll.
    looked: Instant,
    /// Time of the last frame, or wake-up.
    busy: Instant,
    /// Time of the last frame.
    found: Instant,
    /// Frames found since the last empty poll.
    run: u64,
    /// How often recently the next frame came soon after half a ring.
    backlogs: u8,
    gaps: Gaps,
    window: Window,
    /// Length of a nap; zero: no naps.
    nap: Ns,
    /// Full bursts in a row after one nap.
    full: u64,
    /// Start of the naps, and whether they paid in one window already.
    napping: Instant,
    on_trial: bool,
    /// The window before the trial of naps.
    before: Window,
    /// No naps before this time.
    naps_from: Instant,
    backoff: Ns,
}

impl Adaptive {
    /// Creates the state of a queue polled from `now` on, with latency target `latency`.
    pub fn new(latency: Ns, costs: Costs, now: Instant) -> Self {
        Self {
            latency,
            costs: costs.bounded(),
            state: State::Hot,
            looked: now,
            busy: now,
            found: now,
            run: 0,
            backlogs: 0,
            gaps: Gaps::new(costs.bounded().wake),
            window: Window::new(now),
            nap: Ns::ZERO,
            full: 0,
            napping: Instant::START,
            on_trial: false,
            before: Window::new(now),
            naps_from: Instant::START,
            backoff: BACKOFF.0,
        }
    }

    /// Records that a notification ended the queue's sleep.
    pub fn wake(&mut self, now: Instant) {
        if self.state == State::Cold {
            self.state = State::Hot;
            let came_soon = now - self.found < self.backlog_soon();
            self.backlog(came_soon);
            self.run = 0;
            self.window.wakes += 1;
            let came = now - self.costs.wake_late;
            let gap = came - self.busy;
            if self.nap == Ns::ZERO {
                // A short gap is a guess: in traffic that does not wait for replies a late frame is
                // closer to the next one. Spinning measures it.
                let last = if gap < self.costs.wake { 64 } else { 16 };
                self.gaps.learn(gap, self.costs.wake, last);
            }
        }
        self.looked = now;
        self.busy = now;
    }

    /// Takes the result of a poll; returns the next action.
    #[inline]
    pub fn next(&mut self, frames: usize, now: Instant) -> Action {
        if self.costs.wake == Ns::ZERO {
            // Even a second poll is useless.
            self.state = State::Cold;
            return Action::Arm;
        }
        let since_look = now - self.looked;
        let since_busy = now - self.busy;
        // Otherwise the time since the previous poll was spent on its frames.
        let was_empty = self.state == State::Hot && self.busy < self.looked;
        self.looked = now;
        if was_empty {
            self.window.empty += since_look;
        }
        if frames > 0 {
            if was_empty {
                self.backlog(true);
                self.run = 0;
            }
            self.run = self.run.saturating_add(frames as u64);
            self.window.frames = self.window.frames.saturating_add(frames as u64);
            let since_found = now - self.found;
            self.window.pass(since_found, self.period());
            self.found = now;
            if was_empty {
                self.gaps.learn(since_busy, self.costs.wake, 16);
            }
            self.busy = now;
        }
        if self.nap > Ns::ZERO {
            return self.nap(frames, now);
        }
        self.state = State::Hot;
        if frames > 0 {
            if self.window.is_over(now) && self.try_naps(now) {
                return self.nap(frames, now);
            }
            return Action::Poll;
        }
        let in_time = self.costs.wake_late <= self.latency;
        // If sleeping cannot meet the target, its savings do not matter.
        let limit = match in_time {
            // Both sides wait for each other: no notification is needed if we still poll.
            true if self.run >= ROOM && self.backlogs >= BACKLOGS => self.backlog_soon(),
            true => self.gaps.limit,
            false => LATENCY_SPIN,
        };
        if since_busy < limit {
            return Action::Poll;
        }
        self.state = State::Cold;
        Action::Arm
    }

    /// Records, after half a ring, whether the next frame came soon.
    fn backlog(&mut self, soon: bool) {
        if self.run >= ROOM {
            let more = self.backlogs.saturating_add(1).min(BACKLOGS * 2);
            self.backlogs = if soon { more } else { self.backlogs.saturating_sub(3) };
        }
    }

    fn backlog_soon(&self) -> Ns {
        (self.costs.wake * LIMITS[2]).max(BACKLOG)
    }

    /// Time from the start of one nap to the next.
    fn period(&self) -> Ns {
        let nap = if self.nap > Ns::ZERO { self.nap } else { self.latency };
        nap + self.costs.nap_late
    }

    /// Decides on a trial of naps, at the end of a window without naps.
    fn try_naps(&mut self, now: Instant) -> bool {
        let window = std::mem::replace(&mut self.window, Window::new(now));
        let nap = self.longest_nap(&window);
        if nap == Ns::ZERO || now < self.naps_from || self.costs.nap_late > self.latency {
            return false;
        }
        // The window's estimate is for the longest naps.
        let (longest, period) = (self.period(), nap + self.costs.nap_late);
        let cost = window.naps_cost(self.costs).scale(longest.get(), period.get());
        if cost.scale(100, PAYS_PERCENT) >= window.spent_at_most(self.costs) {
            return false;
        }
        (self.nap, self.full, self.before) = (nap, 0, window);
        (self.napping, self.on_trial) = (now, true);
        true
    }

    /// Longest nap within the latency target that does not fill the ring.
    fn longest_nap(&self, window: &Window) -> Ns {
        let room = window.active.scale(ROOM, window.frames);
        self.latency.min(room - self.costs.nap_late)
    }

    /// Handles a poll of a queue that naps.
    fn nap(&mut self, frames: usize, now: Instant) -> Action {
        if frames >= BURST_MAX {
            // There are more frames, which arrived within one nap.
            self.full += 1;
            self.state = State::Hot;
            if self.full > ROOM / BURST_MAX as u64 {
                (self.full, self.nap) = (0, self.nap / 2);
                // A shorter one would only add latency.
                if self.nap <= self.costs.nap_late / 4 {
                    return self.leave(now, true);
                }
            }
            return Action::Poll;
        }
        if frames == 0 && self.full == 0 {
            // On average the traffic paused in the middle of the previous nap.
            self.window.active -= self.period() / 2;
            self.state = State::Cold;
            return Action::Arm;
        }
        self.full = 0;
        if self.on_trial
            && self.window.naps >= TRIAL_NAPS
            && self.window.is_slower_than(&self.before)
        {
            return self.leave(now, true);
        }
        if self.window.is_over(now) {
            let window = std::mem::replace(&mut self.window, Window::new(now));
            self.nap = self.longest_nap(&window);
            // As much per frame as before, but at most the cost of constant polling.
            let spent = self.before.spent_at_most(self.costs);
            let spent = spent.scale(window.frames, self.before.frames);
            let other = spent.min(now - window.start);
            if window.spent(self.costs) >= other || self.nap == Ns::ZERO {
                return self.leave(now, self.on_trial);
            }
            (self.on_trial, self.backoff) = (false, BACKOFF.0);
            if now - self.napping >= REVIEW_INTERVAL {
                return self.leave(now, false);
            }
        }
        self.window.naps += 1;
        self.state = State::Warm;
        Action::Until(now + self.nap)
    }

    /// Stops naps; `failed`: also delays the next trial.
    fn leave(&mut self, now: Instant, failed: bool) -> Action {
        self.state = State::Hot;
        self.nap = Ns::ZERO;
        self.window = Window::new(now);
        if failed {
            self.naps_from = now + self.backoff;
            self.backoff = (self.backoff * 2).min(BACKOFF.1);
        }
        Action::Poll
    }
}

impl Costs {
    /// Limits the costs to a second each, so that sums do not overflow.
    fn bounded(self) -> Self {
        let bound = |cost: Ns| cost.min(Ns::from_secs(1));
        let (wake, wake_late) = (bound(self.wake), bound(self.wake_late));
        Self { wake, wake_late, nap: bound(self.nap), nap_late: bound(self.nap_late), ..self }
    }
}

/// Selects how long to poll before sleeping: of a few limits, the one that would have cost least
/// for recent gaps.
#[derive(Clone, Debug, Hash)]
struct Gaps {
    /// The limit in use.
    limit: Ns,
    /// Recent average cost of a gap with each limit.
    cost: [Ns; 3],
}

/// Multiples of a wake-up's cost: 0: do not poll; 1: a gap costs at most twice the minimum; 8:
/// covers the longer ones of random gaps that are short on average.
const LIMITS: [u64; 3] = [0, 1, 8];

impl Gaps {
    fn new(wake: Ns) -> Self {
        Self { limit: wake, cost: [wake, wake / 2, wake] }
    }

    /// Records a gap of `gap` between two frames; averages over `last` gaps.
    fn learn(&mut self, gap: Ns, wake: Ns, last: u64) {
        let mut least = Ns::MAX;
        for (cost, times) in self.cost.iter_mut().zip(LIMITS) {
            let limit = wake * times;
            let new = if gap < limit { gap } else { limit + wake };
            *cost = (*cost * (last - 1) + new) / last;
            if *cost < least {
                (least, self.limit) = (*cost, limit);
            }
        }
    }
}

/// Statistics since `start`.
#[derive(Clone, Debug, Default, Hash)]
struct Window {
    start: Instant,
    frames: u64,
    /// Time with traffic: each gap counts up to the length of a nap.
    active: Ns,
    /// Time of empty polls.
    empty: Ns,
    /// Number of sleeps ended by a notification.
    wakes: u64,
    naps: u64,
    /// Estimated naps and wake-ups with naps.
    would: (u64, u64),
    /// Time in the estimated current nap, and whether it would have found frames.
    napped: (Ns, bool),
}

impl Window {
    fn new(start: Instant) -> Self {
        Self { start, ..Self::default() }
    }

    fn is_over(&self, now: Instant) -> bool {
        let length = now - self.start;
        length >= WINDOW.1 || length >= WINDOW.0 && self.frames >= WINDOW_FRAMES
    }

    /// Records a gap of `gap` between two frames, for naps of `period`.
    fn pass(&mut self, gap: Ns, period: Ns) {
        self.active += gap.min(period);
        let (time, found) = self.napped;
        let time = time + gap;
        if time < period {
            self.napped = (time, true);
        } else if found && time - period < period {
            self.would.0 += 1;
            self.napped = (time - period, true);
        } else {
            // A useless nap, a wake-up, and a nap.
            self.would.0 += 1 + u64::from(found);
            self.would.1 += 1;
            self.napped = (Ns::ZERO, false);
        }
    }

    /// Cost of waiting.
    fn spent(&self, costs: Costs) -> Ns {
        self.empty + costs.wake * self.wakes + costs.nap * self.naps
    }

    /// The same, at most a wake-up per frame, as [`Gaps`] corrects a higher cost.
    fn spent_at_most(&self, costs: Costs) -> Ns {
        self.spent(costs).min(costs.wake * self.frames)
    }

    /// Estimated cost with naps.
    fn naps_cost(&self, costs: Costs) -> Ns {
        costs.nap * self.would.0 + costs.wake * self.would.1
    }

    /// Whether the frame rate is lower than in `before`, by more than a tenth and two and a half
    /// standard deviations.
    fn is_slower_than(&self, before: &Self) -> bool {
        let (active, before_active) = (self.active.get(), before.active.get());
        let expected = scale(before.frames, active, before_active);
        let less = expected.saturating_sub(self.frames);
        let variance = expected.saturating_add(scale(expected, active, before_active));
        less > expected / 10 && less.saturating_mul(less) > variance.saturating_mul(6)
    }
}

/// `n * times / over`, as [`Ns::scale`].
fn scale(n: u64, times: u64, over: u64) -> u64 {
    Ns::new(n).scale(times, over).get()
}
