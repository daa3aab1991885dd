//! `adaptive`: polls, naps or sleeps, whichever costs least at the current rate.
//!
//! Three ways to wait for the next frame, with costs measured on this machine:
//! - *hot*: keep polling. Costs the time until it arrives; adds no latency.
//! - *cold*: arm and sleep until notified. Costs [`Costs::wake_ns`] each time.
//! - *warm*: stay disarmed and poll again after a nap. Costs [`Costs::nap_ns`] each time, for any
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

/// Minimum length of a window, and the length, in ns, from which it needs no minimum of frames.
const WINDOW_NS: (u64, u64) = (1_000_000, 8_000_000);
const WINDOW_FRAMES: u64 = 512;
/// Frames that may accumulate in a nap: half a ring of 256.
const ROOM: u64 = 128;
/// A peer that fills half a ring this many times in a row, always soon after it was emptied, is
/// limited by us.
const BACKLOGS: u8 = 6;
/// Bound on "soon", in ns: time for a sleeping peer to wake up and fill half a ring.
const BACKLOG_NS: u64 = 150_000;
/// Naps pay if they cost less than this part of the cost without, in percent.
const PAYS_PERCENT: u64 = 90;
/// Number of naps in a trial before its evaluation.
const TRIAL_NAPS: u64 = 8;
/// First and longest time without naps after a failed trial, in ns.
const BACKOFF_NS: (u64, u64) = (10_000_000, 1_000_000_000);
/// Interval at which a queue that naps checks whether that still pays, in ns.
const REVIEW_NS: u64 = 200_000_000;
/// Polling time after the last frame if sleeping cannot meet the latency target, in ns.
const LATENCY_SPIN_NS: u64 = 1_000_000;

/// State of the policy for one queue.
#[derive(Clone, Debug, Hash)]
pub struct Adaptive {
    latency_ns: u64,
    costs: Costs,
    state: State,
    /// Time of the last poll.
    looked_ns: u64,
    /// Time of the last frame, or wake-up.
    busy_ns: u64,
    /// Time of the last frame.
    found_ns: u64,
    /// Frames found since the last empty poll.
    run: u64,
    /// How often recently the next frame came soon after half a ring.
    backlogs: u8,
    gaps: Gaps,
    window: Window,
    /// Length of a nap, in ns; 0: no naps.
    nap_ns: u64,
    /// Full bursts in a row after one nap.
    full: u64,
    /// Start of the naps, and whether they paid in one window already.
    napping_ns: u64,
    on_trial: bool,
    /// The window before the trial of naps.
    before: Window,
    /// No naps before this time.
    naps_from_ns: u64,
    backoff_ns: u64,
}

impl Adaptive {
    /// Creates the state of a queue polled from `now_ns` on, with latency target `latency_ns`.
    pub fn new(latency_ns: u64, costs: Costs, now_ns: u64) -> Self {
        Self {
            latency_ns,
            costs: costs.bounded(),
            state: State::Hot,
            looked_ns: now_ns,
            busy_ns: now_ns,
            found_ns: now_ns,
            run: 0,
            backlogs: 0,
            gaps: Gaps::new(costs.bounded().wake_ns),
            window: Window::new(now_ns),
            nap_ns: 0,
            full: 0,
            napping_ns: 0,
            on_trial: false,
            before: Window::new(now_ns),
            naps_from_ns: 0,
            backoff_ns: BACKOFF_NS.0,
        }
    }

    /// Records that a notification ended the queue's sleep.
    pub fn wake(&mut self, now_ns: u64) {
        if self.state == State::Cold {
            self.state = State::Hot;
            let came_soon = now_ns.saturating_sub(self.found_ns) < self.backlog_ns();
            self.backlog(came_soon);
            self.run = 0;
            self.window.wakes += 1;
            let came_ns = now_ns.saturating_sub(self.costs.wake_late_ns);
            let gap_ns = came_ns.saturating_sub(self.busy_ns);
            if self.nap_ns == 0 {
                // A short gap is a guess: in traffic that does not wait for replies a late frame is
                // closer to the next one. Spinning measures it.
                let last = if gap_ns < self.costs.wake_ns { 64 } else { 16 };
                self.gaps.learn(gap_ns, self.costs.wake_ns, last);
            }
        }
        self.looked_ns = now_ns;
        self.busy_ns = now_ns;
    }

    /// Takes the result of a poll; returns the next action.
    #[inline]
    pub fn next(&mut self, frames: usize, now_ns: u64) -> Action {
        if self.costs.wake_ns == 0 {
            // Even a second poll is useless.
            self.state = State::Cold;
            return Action::Arm;
        }
        let since_look = now_ns.saturating_sub(self.looked_ns);
        let since_busy = now_ns.saturating_sub(self.busy_ns);
        // Otherwise the time since the previous poll was spent on its frames.
        let in_vain = self.state == State::Hot && self.busy_ns < self.looked_ns;
        self.looked_ns = now_ns;
        if in_vain {
            self.window.empty_ns = self.window.empty_ns.saturating_add(since_look);
        }
        if frames > 0 {
            if in_vain {
                self.backlog(true);
                self.run = 0;
            }
            self.run = self.run.saturating_add(frames as u64);
            self.window.frames = self.window.frames.saturating_add(frames as u64);
            let since_found = now_ns.saturating_sub(self.found_ns);
            self.window.pass(since_found, self.period_ns());
            self.found_ns = now_ns;
            if in_vain {
                self.gaps.learn(since_busy, self.costs.wake_ns, 16);
            }
            self.busy_ns = now_ns;
        }
        if self.nap_ns > 0 {
            return self.nap(frames, now_ns);
        }
        self.state = State::Hot;
        if frames > 0 {
            if self.window.is_over(now_ns) && self.try_naps(now_ns) {
                return self.nap(frames, now_ns);
            }
            return Action::Poll;
        }
        let in_time = self.costs.wake_late_ns <= self.latency_ns;
        // If sleeping cannot meet the target, its savings do not matter.
        let limit_ns = match in_time {
            // Both sides wait for each other: no notification is needed if we still poll.
            true if self.run >= ROOM && self.backlogs >= BACKLOGS => self.backlog_ns(),
            true => self.gaps.limit_ns,
            false => LATENCY_SPIN_NS,
        };
        if since_busy < limit_ns {
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

    fn backlog_ns(&self) -> u64 {
        self.costs.wake_ns.saturating_mul(LIMITS[2]).max(BACKLOG_NS)
    }

    /// Time from the start of one nap to the next, in ns.
    fn period_ns(&self) -> u64 {
        let nap_ns = if self.nap_ns > 0 { self.nap_ns } else { self.latency_ns };
        nap_ns.saturating_add(self.costs.nap_late_ns)
    }

    /// Decides on a trial of naps, at the end of a window without naps.
    fn try_naps(&mut self, now_ns: u64) -> bool {
        let window = std::mem::replace(&mut self.window, Window::new(now_ns));
        let nap_ns = self.longest_nap(&window);
        if nap_ns == 0 || now_ns < self.naps_from_ns || self.costs.nap_late_ns > self.latency_ns {
            return false;
        }
        // The window's estimate is for the longest naps.
        let (longest_ns, period_ns) =
            (self.period_ns(), nap_ns.saturating_add(self.costs.nap_late_ns));
        let cost = scale(window.naps_cost(self.costs), longest_ns, period_ns);
        if scale(cost, 100, PAYS_PERCENT) >= window.spent_at_most(self.costs) {
            return false;
        }
        (self.nap_ns, self.full, self.before) = (nap_ns, 0, window);
        (self.napping_ns, self.on_trial) = (now_ns, true);
        true
    }

    /// Longest nap within the latency target that does not fill the ring.
    fn longest_nap(&self, window: &Window) -> u64 {
        let room_ns = scale(window.active_ns, ROOM, window.frames);
        self.latency_ns.min(room_ns.saturating_sub(self.costs.nap_late_ns))
    }

    /// Handles a poll of a queue that naps.
    fn nap(&mut self, frames: usize, now_ns: u64) -> Action {
        if frames >= BURST_MAX {
            // There are more frames, which arrived within one nap.
            self.full += 1;
            self.state = State::Hot;
            if self.full > ROOM / BURST_MAX as u64 {
                (self.full, self.nap_ns) = (0, self.nap_ns / 2);
                // A shorter one would only add latency.
                if self.nap_ns <= self.costs.nap_late_ns / 4 {
                    return self.leave(now_ns, true);
                }
            }
            return Action::Poll;
        }
        if frames == 0 && self.full == 0 {
            // On average the traffic paused in the middle of the previous nap.
            self.window.active_ns = self.window.active_ns.saturating_sub(self.period_ns() / 2);
            self.state = State::Cold;
            return Action::Arm;
        }
        self.full = 0;
        if self.on_trial
            && self.window.naps >= TRIAL_NAPS
            && self.window.is_slower_than(&self.before)
        {
            return self.leave(now_ns, true);
        }
        if self.window.is_over(now_ns) {
            let window = std::mem::replace(&mut self.window, Window::new(now_ns));
            self.nap_ns = self.longest_nap(&window);
            // As much per frame as before, but at most the cost of constant polling.
            let spent = self.before.spent_at_most(self.costs);
            let spent = scale(spent, window.frames, self.before.frames);
            let other = spent.min(now_ns.saturating_sub(window.start_ns));
            if window.spent(self.costs) >= other || self.nap_ns == 0 {
                return self.leave(now_ns, self.on_trial);
            }
            (self.on_trial, self.backoff_ns) = (false, BACKOFF_NS.0);
            if now_ns.saturating_sub(self.napping_ns) >= REVIEW_NS {
                return self.leave(now_ns, false);
            }
        }
        self.window.naps += 1;
        self.state = State::Warm;
        Action::Until(now_ns.saturating_add(self.nap_ns))
    }

    /// Stops naps; `failed`: also delays the next trial.
    fn leave(&mut self, now_ns: u64, failed: bool) -> Action {
        self.state = State::Hot;
        self.nap_ns = 0;
        self.window = Window::new(now_ns);
        if failed {
            self.naps_from_ns = now_ns.saturating_add(self.backoff_ns);
            self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_NS.1);
        }
        Action::Poll
    }
}

impl Costs {
    /// Limits the costs to a second each, so that sums do not overflow.
    fn bounded(self) -> Self {
        let bound = |ns: u64| ns.min(1_000_000_000);
        let (wake_ns, wake_late_ns) = (bound(self.wake_ns), bound(self.wake_late_ns));
        Self {
            wake_ns,
            wake_late_ns,
            nap_ns: bound(self.nap_ns),
            nap_late_ns: bound(self.nap_late_ns),
        }
    }
}

/// Selects how long to poll before sleeping: of a few limits, the one that would have cost least
/// for recent gaps.
#[derive(Clone, Debug, Hash)]
struct Gaps {
    /// The limit in use, in ns.
    limit_ns: u64,
    /// Recent average cost of a gap with each limit, in ns.
    cost_ns: [u64; 3],
}

/// Multiples of a wake-up's cost: 0: do not poll; 1: a gap costs at most twice the minimum; 8:
/// covers the longer ones of random gaps that are short on average.
const LIMITS: [u64; 3] = [0, 1, 8];

impl Gaps {
    fn new(wake_ns: u64) -> Self {
        Self { limit_ns: wake_ns, cost_ns: [wake_ns, wake_ns / 2, wake_ns] }
    }

    /// Records a gap of `gap_ns` between two frames; averages over `last` gaps.
    fn learn(&mut self, gap_ns: u64, wake_ns: u64, last: u64) {
        let mut least = u64::MAX;
        for (cost_ns, times) in self.cost_ns.iter_mut().zip(LIMITS) {
            let limit_ns = wake_ns * times;
            let cost = if gap_ns < limit_ns { gap_ns } else { limit_ns + wake_ns };
            *cost_ns = (*cost_ns * (last - 1) + cost) / last;
            if *cost_ns < least {
                (least, self.limit_ns) = (*cost_ns, limit_ns);
            }
        }
    }
}

/// Statistics since `start_ns`.
#[derive(Clone, Debug, Default, Hash)]
struct Window {
    start_ns: u64,
    frames: u64,
    /// Time with traffic, in ns: each gap counts up to the length of a nap.
    active_ns: u64,
    /// Time of empty polls, in ns.
    empty_ns: u64,
    /// Number of sleeps ended by a notification.
    wakes: u64,
    naps: u64,
    /// Estimated naps and wake-ups with naps.
    would: (u64, u64),
    /// Time in the estimated current nap, and whether it would have found frames.
    napped: (u64, bool),
}

impl Window {
    fn new(start_ns: u64) -> Self {
        Self { start_ns, ..Self::default() }
    }

    fn is_over(&self, now_ns: u64) -> bool {
        let length = now_ns.saturating_sub(self.start_ns);
        length >= WINDOW_NS.1 || length >= WINDOW_NS.0 && self.frames >= WINDOW_FRAMES
    }

    /// Records a gap of `gap_ns` between two frames, for naps of `period_ns`.
    fn pass(&mut self, gap_ns: u64, period_ns: u64) {
        self.active_ns = self.active_ns.saturating_add(gap_ns.min(period_ns));
        let (time, found) = self.napped;
        let time = time.saturating_add(gap_ns);
        if time < period_ns {
            self.napped = (time, true);
        } else if found && time - period_ns < period_ns {
            self.would.0 += 1;
            self.napped = (time - period_ns, true);
        } else {
            // A useless nap, a wake-up, and a nap.
            self.would.0 += 1 + u64::from(found);
            self.would.1 += 1;
            self.napped = (0, false);
        }
    }

    /// Cost of waiting, in ns.
    fn spent(&self, costs: Costs) -> u64 {
        let (wakes, naps) = (self.wakes * costs.wake_ns, self.naps * costs.nap_ns);
        self.empty_ns.saturating_add(wakes + naps)
    }

    /// The same, at most a wake-up per frame, as [`Gaps`] corrects a higher cost.
    fn spent_at_most(&self, costs: Costs) -> u64 {
        self.spent(costs).min(self.frames.saturating_mul(costs.wake_ns))
    }

    /// Estimated cost with naps, in ns.
    fn naps_cost(&self, costs: Costs) -> u64 {
        self.would.0 * costs.nap_ns + self.would.1 * costs.wake_ns
    }

    /// Whether the frame rate is lower than in `before`, by more than a tenth and two and a half
    /// standard deviations.
    fn is_slower_than(&self, before: &Self) -> bool {
        let expected = scale(before.frames, self.active_ns, before.active_ns);
        let less = expected.saturating_sub(self.frames);
        let variance = expected.saturating_add(scale(expected, self.active_ns, before.active_ns));
        less > expected / 10 && less.saturating_mul(less) > variance.saturating_mul(6)
    }
}

/// `n * times / over`.
fn scale(n: u64, times: u64, over: u64) -> u64 {
    let scaled = u128::from(n) * u128::from(times) / u128::from(over.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
