//! Fair sharing: deficit round-robin in measured time, and the move of queues between workers by
//! measured load. Pure; time is passed in.

pub mod level;

use crate::frame::BURST_MAX;
use crate::time::{Instant, Ns};

/// Time that one port is served in one round at weight 1: some bursts of small frames.
pub const QUANTUM: Ns = Ns::from_us(10);
/// Longest time charged for one turn. A turn's frames and bytes are limited, so that it takes
/// milliseconds; in a longer one the process was stopped or its machine suspended, which is not its
/// guest's fault, or page faults blocked, for which [`Pace`] has the guest rest.
const CHARGED_MAX: Ns = Ns::from_ms(100);
/// Highest weight.
pub const WEIGHT_MAX: u32 = 100;

/// A queue's credit with the worker that serves it.
///
/// In each round a queue gets its port's quantum, divided by the number of the port's queues that
/// are served, and is served while it has credit. The cost of a burst beyond it is a debt, deducted
/// in later rounds; the rest of the credit is dropped when the queue is empty.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub struct Share {
    credit_ns: i64,
}

impl Share {
    /// Starts a round. `queues`: number of the port's queues that share its quantum.
    #[inline]
    pub fn grant(&mut self, weight: u32, queues: usize) {
        self.skip(1, weight, queues);
    }

    /// The time that it owes.
    pub fn owed(&self) -> Ns {
        Ns::new(self.credit_ns.min(0).unsigned_abs())
    }

    /// Number of rounds, from the next on, in which it cannot be served.
    pub fn rounds_in_debt(&self, weight: u32, queues: usize) -> u64 {
        self.owed().times(Ns::new(quantum(weight, queues).unsigned_abs()))
    }

    /// Skips rounds in which no queue can be served. After a long burst, or when its worker lost
    /// the CPU, these are hundreds.
    pub fn skip(&mut self, rounds: u64, weight: u32, queues: usize) {
        let quantum = quantum(weight, queues);
        let credit = quantum.saturating_mul(i64::try_from(rounds).unwrap_or(i64::MAX));
        self.credit_ns = self.credit_ns.saturating_add(credit).min(quantum);
    }

    /// Whether it may be served.
    #[inline]
    pub fn has_credit(&self) -> bool {
        self.credit_ns > 0
    }

    /// Charges the time for which it was served, 100 ms at most.
    #[inline]
    pub fn charge(&mut self, time: Ns) {
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(time.min(CHARGED_MAX).get());
    }

    /// Charges time spent on frames to its guest, which is outside its turn. This debt is limited
    /// to one round's quantum, so that a guest can reply while frames arrive.
    pub fn charge_outside_turn(&mut self, time: Ns) {
        let least = self.credit_ns.min(-quantum(1, 1));
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(time.get()).max(least);
    }

    /// Its debt alone, without credit.
    pub(crate) fn debt(self) -> Self {
        Self { credit_ns: self.credit_ns.min(0) }
    }

    /// Clears the debt: no other queue has work.
    #[inline]
    pub fn clear_debt(&mut self) {
        self.credit_ns = 0;
    }
}

/// Duration from which a burst or a delivery counts as long.
const LONG: Ns = Ns::from_us(200);
/// Copies of a burst's bytes after which it counts as long, on machines where that takes longer.
const LONG_COPIES: u64 = 8;
/// Time without a long burst after which the limit of frames doubles.
const GROWS_AFTER: Ns = Ns::from_ms(5);

/// Part of the time that long bursts may take without effect: one in this many.
const LONG_SHARE: u64 = 16;
/// Time that long bursts may take beyond their share.
const LONG_EXCESS: Ns = Ns::from_ms(3);

/// Part of the time that guests may take whose memory makes bursts of single frames long: one in
/// this many. A frame of their neighbours waits for one of these bursts less often than a p99.9.
const SLOW_SHARE: u64 = 1024;
/// Page faults from which a long burst of one frame is due to the guest's memory: any other was
/// long because the worker lost its CPU, perhaps to another virtual machine.
const SLOW_FAULTS: u64 = 4;
/// Long deliveries, each within [`SLOW_FOR`] of the one before, from which a receiver is slow. One
/// page fault that blocked takes long wherever the worker then waits for its CPU, so on a busy
/// machine a guest that was just started may cause one.
pub(crate) const SLOW_DELIVERIES: u32 = 3;
/// Time after such a burst in which another one needs no further proof.
pub(crate) const SLOW_FOR: Ns = Ns::from_secs(10);
/// Bytes of received frames for each of which one page fault is nobody's fault: the buffers of a
/// guest that was just started are absent, two pages for 4 KiB.
const BYTES_PER_FAULT: u64 = 2048;

/// Time for which slow guests are not served after a burst of one of them.
pub(crate) fn slow_rest(took: Ns) -> Ns {
    took * (SLOW_SHARE - 1)
}

/// Whether the receiver's memory made a delivery of `frames`, in total `bytes` long, slow: by time
/// and page faults, on average of its frames.
pub(crate) fn is_slow_delivery(frames: usize, bytes: u64, used: Spent) -> bool {
    let frames = frames.max(1) as u64;
    used.time > LONG * frames && used.faults >= SLOW_FAULTS * frames + bytes / BYTES_PER_FAULT
}

/// Duration from which a burst counts as long on a machine that copies the most bytes of a burst in
/// `copy`: [`LONG`], but on slow machines, emulated ones for instance. There a single frame of
/// 64 KiB takes longer than that, so a limit of one frame per burst would make bursts more
/// numerous, not short.
pub(crate) fn long(copy: Ns) -> Ns {
    LONG.max(copy * LONG_COPIES)
}

/// Resources that a thread has used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// Time of the machine's monotonic clock.
    pub now: Ns,
    /// CPU time.
    pub cpu: Ns,
    /// Page faults.
    pub faults: u64,
    /// Voluntary context switches: the thread blocked.
    pub waits: u64,
}

/// Time and page faults of a thread between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Spent {
    /// CPU time; with page faults that blocked, all time: a guest that punches a hole where its
    /// memory is being read lets the worker sleep until the hole is made.
    pub time: Ns,
    /// Page faults; one that blocked counts as many as make a frame slow.
    pub faults: u64,
}

impl Usage {
    /// Returns what was used since `before`.
    pub fn since(self, before: Self) -> Spent {
        let faults = self.faults.saturating_sub(before.faults);
        // Without a page fault, others of our threads held a lock.
        let blocked = self.waits.saturating_sub(before.waits).min(faults);
        let time = if blocked > 0 { self.now - before.now } else { self.cpu - before.cpu };
        Spent { time, faults: faults + blocked * (SLOW_FAULTS - 1) }
    }
}

/// A measurement of a burst.
#[derive(Clone, Copy)]
pub struct Meter<'a> {
    /// What the thread has used so far.
    pub usage: &'a dyn Fn() -> Usage,
    /// Apart: what reading its frames used, and each delivery. Its frames are copied once more, so
    /// that page faults of its sender and of its receivers are distinguished.
    pub by_part: bool,
}

/// Resources that a burst used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BurstUsage {
    /// Until its frames were forwarded: spent on the ring and the memory of the sender alone. Zero
    /// if the burst was not measured by part.
    pub own: Spent,
    /// In total.
    pub all: Spent,
}

/// Limit of frames per burst of a queue. The cost of a frame is known only after it was handled
/// (page faults, pieces, segments), and others wait for a burst to end.
///
/// Long bursts halve the limit once they exceed their share of the time. Below that they may be
/// those in which the worker lost its CPU, tens of times a second on a shared machine: halving
/// after each of them cost a DPDK guest 5 % of its rate. A queue with a lower limit is *watched*:
/// its bursts are measured in CPU time and page faults. After one that was long with page faults
/// they are measured [by part](BurstUsage::own) for `SLOW_FOR`, which copies their frames once
/// more: where frames are long and no page is absent (GSO frames on a slow machine, or through
/// Xen's grants) that cost half of the rate. If the memory of its guest makes even a burst of one
/// frame long, by page faults, the queue is *slow*: after each such burst it
/// [waits](Self::record), which bounds what it costs others.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Pace {
    frames: usize,
    /// Time at which the share of long bursts covers those so far (theoretical arrival time, as in
    /// [`account::Rate`](crate::account::Rate), which many threads share).
    covered: Instant,
    /// Time of the last change or long burst.
    since: Instant,
    /// Time until which bursts are measured by part.
    suspect_until: Instant,
    /// Whether they were at the last burst: a slow queue may rest for longer than that time.
    is_suspect: bool,
    /// Time until which the queue is slow.
    slow_until: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        let start = Instant::START;
        Self {
            frames: BURST_MAX,
            covered: start,
            since: start,
            suspect_until: start,
            is_suspect: false,
            slow_until: start,
        }
    }
}

impl Pace {
    /// Limit of frames per burst.
    #[inline]
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Whether bursts are to be measured in CPU time.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.frames < BURST_MAX
    }

    /// How its next burst is to be measured, by `usage`: what the thread has used.
    #[inline]
    pub fn meter<'a>(&self, usage: &'a dyn Fn() -> Usage) -> Option<Meter<'a>> {
        self.is_watched().then_some(Meter { usage, by_part: self.is_suspect })
    }

    /// Whether the queue's single frames make long bursts.
    #[inline]
    pub fn is_slow(&self, now: Instant) -> bool {
        self.is_watched() && now < self.slow_until
    }

    /// Records a burst of `frames` that took `took` and ended now; `used`: if it was measured;
    /// `long`: duration from which a burst counts as long here. Returns the time for which slow
    /// queues of its worker are not to be served.
    #[inline]
    pub fn record(
        &mut self,
        frames: usize,
        took: Ns,
        used: Option<BurstUsage>,
        now: Instant,
        long: Ns,
    ) -> Ns {
        if took > long || self.is_watched() {
            let all = Spent { time: took, faults: 0 };
            let used = used.unwrap_or(BurstUsage { own: Spent::default(), all });
            return self.change(frames, used, now, long);
        }
        Ns::ZERO
    }

    #[cold]
    fn change(&mut self, frames: usize, used: BurstUsage, now: Instant, long: Ns) -> Ns {
        let (own, took) = (used.own, used.all.time);
        if took > long && used.all.faults >= SLOW_FAULTS {
            self.suspect_until = now + SLOW_FOR;
        }
        self.is_suspect = now < self.suspect_until;
        let is_slow = frames > 0 && own.time > long && own.faults >= SLOW_FAULTS;
        if is_slow && (self.frames == 1 || now < self.slow_until) {
            (self.frames, self.since) = (1, now);
            self.slow_until = now + SLOW_FOR;
            return slow_rest(own.time);
        }
        if took > long && frames > 0 {
            let excess = LONG_EXCESS * LONG_SHARE;
            let covered = self.covered.max(now) + took * LONG_SHARE;
            if covered - now > excess {
                self.frames = self.frames.min(frames).div_ceil(2);
            }
            // Minutes of long bursts must not count for longer than 0.1 s.
            self.covered = covered.min(now + excess * 2);
            self.since = now;
        } else if now - self.since > GROWS_AFTER {
            // While slow it stays watched: otherwise its next long burst would not be measured.
            let most = if now < self.slow_until { BURST_MAX / 2 } else { BURST_MAX };
            (self.frames, self.since) = ((2 * self.frames).min(most), now);
        }
        Ns::ZERO
    }
}

/// Time of a queue in each round, in ns.
#[inline]
fn quantum(weight: u32, queues: usize) -> i64 {
    let quantum = QUANTUM.get() as u32 * weight.clamp(1, WEIGHT_MAX);
    // A division costs as much as a tenth of an empty poll.
    let share = if queues > 1 { quantum / queues.min(1 << 16) as u32 } else { quantum };
    i64::from(share.max(1))
}

/// Load, in thousandths of a worker's time, from which it is overloaded.
const OVERLOADED: u32 = 700;
/// Load below which a worker is nearly idle and moves its queues away if another can take them.
const NEARLY_IDLE: u32 = 250;
/// Highest load of the worker that takes these queues: far enough below overload that they do not
/// move back at once.
const FOLDED_MAX: u32 = 500;
/// Load of queues below which a move does not pay, for one or several together.
const LIGHT: u32 = 20;
/// Difference of two workers' loads that counts as even: measurements of a millisecond differ by as
/// much, and queues would move back and forth.
const EVEN: u32 = 150;

/// Decision of a worker about its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// Move these (indices, the highest first) to another worker.
    Queues(Vec<usize>, usize),
    /// Move all to another worker, and sleep.
    All(usize),
}

/// Decides for worker `me`, given the load of each worker and of its served queues, all in
/// thousandths.
///
/// If overloaded, it moves to the least loaded worker the queue that evens out the two best, or, if
/// that alone is little, several that add up to half of the difference. If nearly idle, it moves
/// all queues to the first worker before it that can take its load.
pub fn balance(me: usize, workers: &[u32], queues: &[u32]) -> Option<Move> {
    let mine = *workers.get(me)?;
    if mine >= OVERLOADED {
        let (to, least) = workers.iter().enumerate().min_by_key(|(i, load)| (**load, *i))?;
        let gap = mine.saturating_sub(*least);
        if gap < EVEN {
            return None;
        }
        let given = one(queues, gap).map(|at| vec![at]).or_else(|| several(queues, gap));
        return given.map(|queues| Move::Queues(queues, to));
    }
    if mine < NEARLY_IDLE {
        let takes = |load: &u32| load + mine <= FOLDED_MAX;
        return workers[..me].iter().position(takes).map(Move::All);
    }
    None
}

/// The queue that evens out a gap best, if the effect is large enough.
fn one(queues: &[u32], gap: u32) -> Option<usize> {
    let heavy = || queues.iter().enumerate().filter(|(_, load)| **load >= LIGHT);
    let (at, load) = heavy().min_by_key(|(_, load)| ((gap / 2).abs_diff(**load), **load))?;
    // A queue as heavy as the gap would only swap the two workers' loads. One far below half of it
    // is better moved with others.
    let fits = (gap / 4..gap * 4 / 5).contains(load);
    (fits && heavy().count() > 1).then_some(at)
}

/// Queues that add up to at most half the gap, the heaviest first. At least as much stays, so that
/// the two workers do not swap loads.
fn several(queues: &[u32], gap: u32) -> Option<Vec<usize>> {
    let mut by_load: Vec<usize> = (0..queues.len()).filter(|at| queues[*at] > 0).collect();
    by_load.sort_by_key(|at| std::cmp::Reverse(queues[*at]));
    let mut room = gap / 2;
    by_load.retain(|at| {
        let fits = queues[*at] <= room;
        room -= if fits { queues[*at] } else { 0 };
        fits
    });
    by_load.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
    (gap / 2 - room > LIGHT).then_some(by_load)
}

#[cfg(test)]
mod tests;
