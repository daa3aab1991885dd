//! `adaptive`: polls, naps or sleeps, whichever costs least at the rate that is seen.
//!
//! Three ways to wait for the next frame, and what each costs, measured on this machine:
//! - *hot*: poll on. Costs the time until it comes; adds no latency.
//! - *cold*: arm and sleep until notified. Costs [`Costs::wake_ns`] each time.
//! - *warm*: stay un-armed and look again after a nap. Costs [`Costs::nap_ns`] each time, however
//!   many frames came meanwhile, and adds up to the latency target.
//!
//! Between hot and cold it is ski rental: poll for as long as a sleep and wake-up would cost, so
//! that at most twice the best choice is spent; and not at all while that was in vain lately.
//! Warm is tried when polling and waking cost clearly more than naps would, and given up when the
//! naps themselves slow the traffic down, as they do when each frame waits for the one before.

use super::{Action, Costs, State};
use crate::frame::BURST_MAX;

/// Length of an observation, in ns.
const WINDOW_NS: u64 = 1_000_000;
/// Frames that may gather in a nap: half a ring of 256.
const ROOM: u64 = 128;
/// Naps that must be seen before they are judged.
const TRIAL_NAPS: u32 = 8;
/// Naps pay when they cost less than this part of what is spent without, in percent.
const PAYS_PERCENT: u64 = 80;
/// First and longest time without naps after they slowed traffic down, in ns.
const BACKOFF_NS: (u64, u64) = (10_000_000, 1_000_000_000);
/// Windows after which a warm queue looks whether naps still pay.
const REVIEW_WINDOWS: u32 = 64;
/// Most that is remembered of whether polling paid.
const SCORE_MAX: u8 = 8;
/// How long a queue is polled after its last frame if sleeping cannot meet the latency target.
const LATENCY_SPIN_NS: u64 = 1_000_000;

/// What was seen since `start_ns`.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    start_ns: u64,
    frames: u64,
    /// Sleeps that a notification ended.
    wakes: u64,
    /// Time polled in vain, in ns.
    empty_ns: u64,
    /// Full bursts in a row that one nap left.
    full: u64,
}

/// The policy's memory of one queue.
#[derive(Clone, Debug)]
pub struct Adaptive {
    latency_ns: u64,
    costs: Costs,
    state: State,
    /// When the last look was.
    looked_ns: u64,
    /// When the last frame was found, or the queue woken.
    busy_ns: u64,
    /// How often polling for the next frame would have paid lately.
    score: u8,
    spins: bool,
    window: Window,
    /// Length of a nap, in ns.
    nap_ns: u64,
    naps: u32,
    windows_warm: u32,
    /// Frames, and in how many ns, before warm was tried; while it is on trial.
    before: Option<(u64, u64)>,
    /// No naps before this time.
    naps_from_ns: u64,
    backoff_ns: u64,
}

impl Adaptive {
    /// For a queue that is polled from `now_ns` on, and may be looked at `latency_ns` late.
    pub fn new(latency_ns: u64, costs: Costs, now_ns: u64) -> Self {
        Self {
            latency_ns,
            costs,
            state: State::Hot,
            looked_ns: now_ns,
            busy_ns: now_ns,
            score: SCORE_MAX,
            spins: true,
            window: Window { start_ns: now_ns, ..Window::default() },
            nap_ns: 0,
            naps: 0,
            windows_warm: 0,
            before: None,
            naps_from_ns: 0,
            backoff_ns: BACKOFF_NS.0,
        }
    }

    /// A notification ended the queue's sleep.
    pub fn wake(&mut self, now_ns: u64) {
        if self.state == State::Cold {
            self.window.wakes += 1;
            // The gap that polling would have had to bridge.
            let gap = now_ns.saturating_sub(self.busy_ns);
            self.learn(gap < self.spin_ns());
            self.state = State::Hot;
        }
        self.looked_ns = now_ns;
        self.busy_ns = now_ns;
    }

    /// What a look found, and what to do next.
    #[inline]
    pub fn next(&mut self, frames: usize, now_ns: u64) -> Action {
        let since_look = now_ns.saturating_sub(self.looked_ns);
        self.looked_ns = now_ns;
        if self.state == State::Warm {
            return self.warm(frames, now_ns);
        }
        if frames > 0 {
            // Looks were in vain since the frame before, and did not go on for too long.
            if self.state == State::Hot && now_ns.saturating_sub(self.busy_ns) > since_look {
                self.learn(true);
            }
            self.state = State::Hot;
            self.window.frames += frames as u64;
            self.busy_ns = now_ns;
        } else {
            self.window.empty_ns += since_look;
        }
        if now_ns.saturating_sub(self.window.start_ns) >= WINDOW_NS && self.try_warm(now_ns) {
            return Action::Until(now_ns + self.nap_ns);
        }
        if frames > 0 {
            return Action::Poll;
        }
        let limit = if self.spins { self.spin_ns() } else { 0 };
        if now_ns.saturating_sub(self.busy_ns) < limit {
            return Action::Poll;
        }
        if self.spins {
            self.learn(false);
        }
        self.state = State::Cold;
        Action::Arm
    }

    /// How long polling for the next frame is worth it.
    fn spin_ns(&self) -> u64 {
        if self.costs.wake_late_ns > self.latency_ns {
            // Sleeping cannot meet the target, whatever it saves.
            LATENCY_SPIN_NS
        } else {
            self.costs.wake_ns
        }
    }

    /// Whether polling paid, or would have. It takes several findings to change one's mind.
    fn learn(&mut self, paid: bool) {
        if paid {
            self.score = (self.score + 1).min(SCORE_MAX);
        } else {
            self.score = self.score.saturating_sub(2);
        }
        self.spins = if self.spins { self.score > 0 } else { self.score >= SCORE_MAX / 2 };
    }

    /// At the end of a window of a queue that is not warm.
    fn try_warm(&mut self, now_ns: u64) -> bool {
        let window = std::mem::take(&mut self.window);
        self.window.start_ns = now_ns;
        let in_time = self.costs.nap_late_ns <= self.latency_ns;
        if now_ns < self.naps_from_ns || window.frames == 0 || !in_time {
            return false;
        }
        let length = now_ns - window.start_ns;
        // No nap may fill the ring.
        let room_ns = ROOM * length / window.frames;
        let nap = self.latency_ns.min(room_ns.saturating_sub(self.costs.nap_late_ns));
        let spent = window.empty_ns + window.wakes * self.costs.wake_ns;
        if nap == 0 || self.naps_cost(nap, length) * 100 >= spent * PAYS_PERCENT {
            return false;
        }
        (self.nap_ns, self.naps, self.windows_warm) = (nap, 0, 0);
        self.before = Some((window.frames, length));
        self.state = State::Warm;
        true
    }

    /// What naps of `nap_ns` cost in a time of `length`.
    fn naps_cost(&self, nap_ns: u64, length: u64) -> u64 {
        let period = nap_ns + self.costs.nap_late_ns;
        (u128::from(length) * u128::from(self.costs.nap_ns) / u128::from(period.max(1))) as u64
    }

    fn warm(&mut self, frames: usize, now_ns: u64) -> Action {
        self.window.frames += frames as u64;
        if frames > 0 {
            self.busy_ns = now_ns;
        }
        if frames >= BURST_MAX {
            // There is more, and it came within one nap.
            self.window.full += 1;
            if self.window.full > ROOM / BURST_MAX as u64 {
                return self.leave(now_ns, false);
            }
            return Action::Poll;
        }
        self.window.full = 0;
        self.naps += 1;
        let length = now_ns.saturating_sub(self.window.start_ns);
        if self.naps >= TRIAL_NAPS && length >= WINDOW_NS {
            let window = std::mem::take(&mut self.window);
            self.window.start_ns = now_ns;
            self.naps = 0;
            self.windows_warm += 1;
            if let Some((before, before_ns)) = self.before.take() {
                if slowed(before, before_ns, window.frames, length) {
                    return self.leave(now_ns, true);
                }
                self.backoff_ns = BACKOFF_NS.0;
            }
            // At most every frame would have been a wake-up.
            let spent = window.frames * self.costs.wake_ns;
            let cost = self.naps_cost(self.nap_ns, length);
            if cost * PAYS_PERCENT >= spent * 100 || self.windows_warm >= REVIEW_WINDOWS {
                return self.leave(now_ns, false);
            }
            let room_ns = ROOM * length / window.frames.max(1);
            self.nap_ns = self.latency_ns.min(room_ns.saturating_sub(self.costs.nap_late_ns));
            if self.nap_ns == 0 {
                return self.leave(now_ns, false);
            }
        }
        Action::Until(now_ns + self.nap_ns)
    }

    /// From warm to hot; `slowed`: because naps slowed the traffic down.
    fn leave(&mut self, now_ns: u64, slowed: bool) -> Action {
        self.state = State::Hot;
        self.before = None;
        self.window = Window { start_ns: now_ns, ..Window::default() };
        self.busy_ns = now_ns;
        if slowed {
            self.naps_from_ns = now_ns + self.backoff_ns;
            self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_NS.1);
        }
        Action::Poll
    }
}

/// Whether `after` frames in `after_ns` are fewer than `before` in `before_ns` by more than a tenth
/// and more than three standard deviations of what counting leaves open.
fn slowed(before: u64, before_ns: u64, after: u64, after_ns: u64) -> bool {
    let expected =
        (u128::from(before) * u128::from(after_ns) / u128::from(before_ns.max(1))) as u64;
    let less = expected.saturating_sub(after);
    let variance = expected + expected * after_ns / before_ns.max(1);
    less > expected / 10 && less.saturating_mul(less) > 9 * variance
}
