//! Fair sharing: deficit round-robin in measured time, and the move of queues between workers by
//! measured load. Pure; time is passed in.

pub mod level;

use crate::frame::BURST_MAX;
use crate::time::{Instant, Ns};

/// Time that one port is served in one round at weight 1: some bursts of small frames.
pub const QUANTUM: Ns = Ns::from_us(10);
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

    /// Charges the time for which it was served.
    #[inline]
    pub fn charge(&mut self, time: Ns) {
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(time.get());
    }

    /// Charges time spent on frames to its guest, which is outside its turn. This debt is limited
    /// to one round's quantum, so that a guest can reply while frames arrive.
    pub fn charge_outside_turn(&mut self, time: Ns) {
        let least = self.credit_ns.min(-quantum(1, 1));
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(time.get()).max(least);
    }

    /// Clears the debt: no other queue has work.
    #[inline]
    pub fn clear_debt(&mut self) {
        self.credit_ns = 0;
    }
}

/// Duration from which a burst counts as long.
const LONG: Ns = Ns::from_us(200);
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

/// What a thread has used so far.
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

/// What a thread used of the worker's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Spent {
    /// CPU time; with page faults that blocked, all time: a guest that punches a hole where its
    /// memory is being read lets the worker sleep until the hole is made.
    pub time: Ns,
    /// Page faults; one that blocked counts as many as make a frame slow.
    pub faults: u64,
}

impl Usage {
    /// What was used since `before`.
    pub fn since(self, before: Self) -> Spent {
        let faults = self.faults.saturating_sub(before.faults);
        // Without a page fault, others of our threads held a lock.
        let blocked = self.waits.saturating_sub(before.waits).min(faults);
        let time = if blocked > 0 { self.now - before.now } else { self.cpu - before.cpu };
        Spent { time, faults: faults + blocked * (SLOW_FAULTS - 1) }
    }
}

/// What a burst used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BurstUsage {
    /// Until its frames were forwarded: spent on the ring and the memory of the sender alone.
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
/// its bursts are measured in CPU time and page faults. If the memory of its guest makes even a
/// burst of one frame long, by page faults, the queue is *slow*: after each such burst it
/// [waits](Self::record), which bounds what it costs others.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Pace {
    frames: usize,
    /// Time at which the share of long bursts covers those so far (theoretical arrival time, as in
    /// [`account::Rate`](crate::account::Rate), which many threads share).
    covered: Instant,
    /// Time of the last change or long burst.
    since: Instant,
    /// Time until which the queue is slow.
    slow_until: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        let start = Instant::START;
        Self { frames: BURST_MAX, covered: start, since: start, slow_until: start }
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

    /// Whether the queue's single frames make long bursts.
    #[inline]
    pub fn is_slow(&self, now: Instant) -> bool {
        self.is_watched() && now < self.slow_until
    }

    /// Records a burst of `frames` that took `took` and ended now; `used`: if it was measured.
    /// Returns the time for which slow queues of its worker are not to be served.
    #[inline]
    pub fn record(
        &mut self,
        frames: usize,
        took: Ns,
        used: Option<BurstUsage>,
        now: Instant,
    ) -> Ns {
        if took > LONG || self.is_watched() {
            let all = Spent { time: took, faults: 0 };
            let used = used.unwrap_or(BurstUsage { own: Spent::default(), all });
            return self.change(frames, used, now);
        }
        Ns::ZERO
    }

    #[cold]
    fn change(&mut self, frames: usize, used: BurstUsage, now: Instant) -> Ns {
        let (own, took) = (used.own, used.all.time);
        let is_slow = frames > 0 && own.time > LONG && own.faults >= SLOW_FAULTS;
        if is_slow && (self.frames == 1 || now < self.slow_until) {
            (self.frames, self.since) = (1, now);
            self.slow_until = now + SLOW_FOR;
            return slow_rest(own.time);
        }
        if took > LONG && frames > 0 {
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
mod tests {
    use super::*;

    /// Serves queues with backlog for `rounds`; each burst of queue `i` costs `cost[i]`.
    fn serve(cost: &[u64], weight: &[u32], rounds: usize) -> Vec<u64> {
        let mut shares = vec![Share::default(); cost.len()];
        let mut spent = vec![0; cost.len()];
        for _ in 0..rounds {
            for (i, share) in shares.iter_mut().enumerate() {
                share.grant(weight[i], 1);
                while share.has_credit() {
                    share.charge(Ns::new(cost[i]));
                    spent[i] += cost[i];
                }
            }
        }
        spent
    }

    #[test]
    fn dear_and_cheap_bursts_get_the_same_time() {
        let spent = serve(&[500, 3_000, 900_000], &[1, 1, 1], 100_000);
        let mean = spent.iter().sum::<u64>() / 3;
        for ns in spent {
            assert!(ns.abs_diff(mean) * 100 < mean, "{ns} of {mean}");
        }
    }

    #[test]
    fn weights_are_kept() {
        let spent = serve(&[700, 700], &[1, 3], 10_000);
        let ratio = spent[1] as f64 / spent[0] as f64;
        assert!((2.9..3.1).contains(&ratio), "{ratio}");
    }

    #[test]
    fn credit_is_not_hoarded_and_debt_is_forgiven_when_no_one_waits() {
        let mut share = Share::default();
        for _ in 0..100 {
            share.grant(1, 1);
        }
        share.charge(QUANTUM);
        assert!(!share.has_credit());
        share.charge(Ns::MAX);
        share.clear_debt();
        share.grant(1, 1);
        assert!(share.has_credit());
    }

    #[test]
    fn what_a_guest_receives_costs_it_one_turn_at_most() {
        let mut share = Share::default();
        share.grant(1, 1);
        share.charge_outside_turn(QUANTUM / 2);
        assert!(share.has_credit(), "half of its turn");
        for time in [2 * QUANTUM, Ns::from_secs(1), Ns::MAX] {
            share.charge_outside_turn(time);
            assert_eq!(share.rounds_in_debt(1, 1), 1, "{time:?}");
        }
        // The debt for its own bursts does not change.
        share.charge(9 * QUANTUM);
        share.charge_outside_turn(Ns::MAX);
        assert_eq!(share.rounds_in_debt(1, 1), 10);
    }

    #[test]
    fn long_bursts_are_halved_to_single_frames_and_grow_again_when_they_are_short() {
        let mut pace = Pace::default();
        assert_eq!(pace.record(64, LONG, None, Instant::START), Ns::ZERO);
        assert_eq!(pace.frames(), BURST_MAX, "not long");
        // A burst holds two expensive frames only.
        pace.record(2, Ns::from_us(2_600), None, Instant::START + Ns::from_ms(9));
        assert_eq!(pace.frames(), BURST_MAX, "the worker may have lost its CPU");
        pace.record(2, Ns::from_us(2_600), None, Instant::START + Ns::from_ms(10));
        assert_eq!(pace.frames(), 1);
        for ms in 11..100 {
            pace.record(1, Ns::from_us(1_300), None, Instant::START + Ns::from_ms(ms));
            assert_eq!(pace.frames(), 1, "while they are expensive");
        }
        let mut bursts = 0;
        let mut now = Instant::START + Ns::from_ms(100);
        while pace.frames() < BURST_MAX {
            let frames = pace.frames();
            now += Ns::from_ms(1);
            pace.record(frames, Ns::from_us(5), None, now);
            assert!(pace.frames() == frames || pace.frames() == 2 * frames);
            bursts += 1;
        }
        assert!((30..40).contains(&bursts), "{bursts} ms");
        // Long enough by itself.
        pace.record(64, Ns::from_ms(10), None, now);
        assert_eq!(pace.frames(), 32);
    }

    #[test]
    fn long_bursts_within_their_share_of_time_leave_the_limit_and_more_of_them_do_not() {
        let mut pace = Pace::default();
        let mut now = Instant::START;
        for _ in 0..500 {
            now += Ns::from_ms(10);
            pace.record(64, Ns::from_us(500), None, now);
            assert_eq!(pace.frames(), BURST_MAX, "a twentieth of the time");
        }
        for _ in 0..20 {
            now += Ns::from_us(1_000);
            pace.record(64, Ns::from_us(250), None, now);
        }
        assert!(pace.frames() < BURST_MAX, "a quarter of the time");
    }

    #[test]
    fn page_faults_that_blocked_count_by_the_clock() {
        let before = Usage { now: Ns::from_ms(10), cpu: Ns::from_ms(2), faults: 7, waits: 3 };
        let (now, cpu) = (Ns::from_ms(14), Ns::from_ms(3));
        let spent = |faults, waits| Usage { now, cpu, faults, waits }.since(before);
        assert_eq!(spent(135, 3), Spent { time: Ns::from_ms(1), faults: 128 });
        assert_eq!(spent(7, 5), Spent { time: Ns::from_ms(1), faults: 0 }, "a lock of ours");
        let slow = Spent { time: Ns::from_ms(4), faults: SLOW_FAULTS };
        assert_eq!(spent(8, 4), slow, "one fault");
        assert_eq!(spent(8, 9), slow, "and locks of ours");
        assert!(is_slow_delivery(1, 1500, slow));
    }

    /// What a burst used: time on its sender's memory and in total, and page faults.
    fn used(own: Ns, all: Ns, faults: u64) -> Option<BurstUsage> {
        Some(BurstUsage { own: Spent { time: own, faults }, all: Spent { time: all, faults } })
    }

    /// Issue 14, row 9.
    #[test]
    fn single_frames_slow_by_the_senders_memory_make_a_queue_wait() {
        let mut pace = Pace::default();
        let mut now = Instant::START + Ns::from_ms(1);
        let long = Ns::from_ms(3);
        // Not yet measured, then not yet of single frames.
        while pace.frames() > 1 {
            now += long;
            assert_eq!(pace.record(2, long, None, now), Ns::ZERO);
        }
        let other = [used(LONG, long, 128), used(long, long, SLOW_FAULTS - 1)];
        for used in other {
            assert_eq!(pace.record(1, long, used, now), Ns::ZERO, "not by its memory");
            assert!(!pace.is_slow(now));
        }
        let waits = long * (SLOW_SHARE - 1);
        assert_eq!(pace.record(1, long, used(long, long, 128), now), waits);
        assert!(pace.is_slow(now));
        // Short bursts let the limit grow, but the next long one needs no proof.
        let short = used(Ns::new(400), Ns::new(500), 0);
        for _ in 0..100 {
            now += Ns::from_ms(6);
            assert_eq!(pace.record(1, Ns::new(500), short, now), Ns::ZERO);
        }
        assert_eq!(pace.frames(), BURST_MAX / 2);
        assert!(pace.is_watched(), "the next burst is measured, too");
        assert_eq!(pace.record(32, long, used(long, long, 128), now), waits);
        assert_eq!(pace.frames(), 1);
        // Forgotten.
        now += SLOW_FOR + Ns::new(1);
        assert!(!pace.is_slow(now));
        while pace.is_watched() {
            now += Ns::from_ms(6);
            let _ = pace.record(1, Ns::new(500), short, now);
        }
    }

    #[test]
    fn a_worker_that_loses_its_cpu_makes_no_queue_slow() {
        // To another thread, or to another virtual machine, which counts as CPU time.
        for measured in [Ns::from_us(10), Ns::from_ms(3)] {
            let mut pace = Pace::default();
            let mut now = Instant::START + Ns::from_ms(1);
            let wall = Ns::from_ms(3);
            for _ in 0..1000 {
                now += wall * 2;
                let used = pace.is_watched().then(|| used(measured, measured, 0)).flatten();
                let frames = pace.frames().min(64);
                assert_eq!(pace.record(frames, wall, used, now), Ns::ZERO);
                assert!(pace.frames() >= BURST_MAX / 4 || measured == wall, "{}", pace.frames());
            }
        }
    }

    #[test]
    fn minutes_of_long_bursts_are_forgotten_within_a_tenth_of_a_second() {
        let mut pace = Pace::default();
        let mut now = Instant::START;
        for _ in 0..60_000 {
            now += Ns::from_ms(2);
            pace.record(64, Ns::from_ms(2), None, now);
        }
        assert_eq!(pace.frames(), 1);
        for _ in 0..20 {
            now += Ns::from_ms(5) + Ns::new(1);
            pace.record(1, Ns::from_us(5), None, now);
        }
        pace.record(64, Ns::from_us(500), None, now);
        assert_eq!(pace.frames(), BURST_MAX, "one after 0.1 s");
    }

    #[test]
    fn rounds_that_are_skipped_are_those_in_which_nothing_was_served() {
        for owes in [0, 1, 9_999, 10_000, 10_001, 3_000_000, u64::MAX >> 1] {
            for (weight, queues) in [(1, 1), (3, 2), (1, 7)] {
                let mut share = Share::default();
                share.charge(Ns::new(owes));
                let waits = share.rounds_in_debt(weight, queues);
                let mut skipped = share;
                skipped.skip(waits, weight, queues);
                assert_eq!(skipped.rounds_in_debt(weight, queues), 0, "{owes} {weight} {queues}");
                skipped.grant(weight, queues);
                assert!(skipped.has_credit());
                if waits > 0 {
                    share.skip(waits - 1, weight, queues);
                    share.grant(weight, queues);
                    assert!(!share.has_credit(), "{owes}: one round earlier");
                }
            }
        }
    }

    #[test]
    fn queues_of_one_port_share_its_quantum() {
        let mut share = Share::default();
        share.grant(1, 4);
        share.charge(QUANTUM / 4);
        assert!(!share.has_credit());
    }

    fn give(queues: &[usize], to: usize) -> Option<Move> {
        Some(Move::Queues(queues.to_vec(), to))
    }

    #[test]
    fn overloaded_worker_moves_the_queue_that_evens_out_most() {
        assert_eq!(balance(0, &[1000, 0], &[600, 400]), give(&[1], 1));
        assert_eq!(balance(0, &[900, 300, 100], &[500, 380, 20]), give(&[1], 2));
        // No move helps one heavy queue, or two workers that are both full.
        assert_eq!(balance(0, &[1000, 0], &[1000]), None);
        assert_eq!(balance(0, &[1000, 0], &[990, 10]), None);
        assert_eq!(balance(0, &[1000, 950], &[500, 500]), None);
    }

    #[test]
    fn nearly_idle_workers_fold_onto_the_first_and_none_folds_upward() {
        assert_eq!(balance(1, &[200, 100], &[100]), Some(Move::All(0)));
        assert_eq!(balance(2, &[450, 200, 100], &[100]), Some(Move::All(1)));
        assert_eq!(balance(0, &[0, 0], &[0]), None);
        assert_eq!(balance(1, &[450, 100], &[100]), None);
        // None of its queues was served.
        assert_eq!(balance(1, &[0, 0], &[]), Some(Move::All(0)));
    }

    #[test]
    fn overloaded_worker_moves_half_of_many_light_queues() {
        let halves: Vec<usize> = (0..50).rev().collect();
        assert_eq!(balance(0, &[1000, 0], &[10; 100]), give(&halves, 1));
        // Sixty that fill a worker: 31 times 16 is half of it.
        let half: Vec<usize> = (0..31).rev().collect();
        assert_eq!(balance(0, &[1000, 0], &[16; 60]), give(&half, 1));
        // Not heavier ones, which would take as many moves one by one.
        assert_eq!(balance(0, &[990, 0], &[33; 30]).unwrap(), give(&half[16..], 1).unwrap());
        // Those that were not served stay.
        let mut some = [0; 100];
        (some[3], some[70], some[71]) = (15, 15, 15);
        assert_eq!(balance(0, &[900, 100, 400], &some), give(&[71, 70, 3], 1));
    }

    #[test]
    fn idle_neighbours_of_a_flooder_leave_it() {
        let mut queues = [12; 9];
        queues[4] = 900;
        assert_eq!(balance(0, &[996, 0], &queues), give(&[8, 7, 6, 5, 3, 2, 1, 0], 1));
        // And they do not move back, nor does the flooder follow them.
        assert_eq!(balance(1, &[900, 96], &[12; 8]), None);
        assert_eq!(balance(0, &[1000, 96], &[1000]), None);
        // All of them together are too light, or the other worker is nearly as loaded.
        assert_eq!(balance(0, &[1000, 0], &[980, 10, 10]), None);
        assert_eq!(balance(0, &[1000, 900], &[10; 100]), None);
    }

    /// Queues on workers whose loads are measured with an error.
    struct Workers {
        wants: Vec<u32>,
        on: Vec<usize>,
        workers: usize,
        seed: u64,
    }

    impl Workers {
        fn new(wants: Vec<u32>, workers: usize) -> Self {
            Self { on: vec![0; wants.len()], wants, workers, seed: 1 }
        }

        /// Time that a worker's queues get: all they need, or each its share.
        fn served(&mut self, worker: usize) -> Vec<(usize, u32)> {
            let mine: Vec<usize> = (0..self.on.len()).filter(|q| self.on[*q] == worker).collect();
            let wanted: u32 = mine.iter().map(|q| self.wants[*q]).sum();
            let part = |n: u32| if wanted > 1000 { n * 1000 / wanted } else { n };
            let wrong = |n: u32, seed: &mut u64| {
                *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                n * (90 + (*seed >> 33) as u32 % 21) / 100
            };
            let wants = mine.iter().map(|q| (*q, part(self.wants[*q])));
            wants.map(|(q, n)| (q, wrong(n, &mut self.seed))).collect()
        }

        /// One decision of each worker; returns the number of queues moved.
        fn decide(&mut self) -> usize {
            let mut moved = 0;
            for me in 0..self.workers {
                let loads: Vec<Vec<(usize, u32)>> =
                    (0..self.workers).map(|w| self.served(w)).collect();
                let of = |queues: &Vec<(usize, u32)>| queues.iter().map(|(_, n)| n).sum::<u32>();
                let workers: Vec<u32> = loads.iter().map(|q| of(q).min(1000)).collect();
                let queues: Vec<u32> = loads[me].iter().map(|(_, n)| *n).collect();
                let (given, to) = match balance(me, &workers, &queues) {
                    Some(Move::Queues(given, to)) => (given, to),
                    Some(Move::All(to)) => ((0..queues.len()).collect(), to),
                    None => continue,
                };
                moved += given.len();
                given.into_iter().for_each(|at| self.on[loads[me][at].0] = to);
            }
            moved
        }

        fn counts(&self) -> Vec<usize> {
            (0..self.workers).map(|w| self.on.iter().filter(|on| **on == w).count()).collect()
        }
    }

    #[test]
    fn light_queues_spread_stay_and_fold() {
        // Total load of the sixty, and the fewest and most that a worker may end up with.
        for (wants, workers, least, most) in
            [(16, 2, 25, 35), (25, 2, 25, 35), (33, 3, 15, 25), (50, 4, 11, 19), (66, 4, 11, 19)]
        {
            let mut machine = Workers::new(vec![wants; 60], workers);
            for _ in 0..30 {
                machine.decide();
            }
            let counts = machine.counts();
            let used = counts.iter().filter(|n| **n > 0);
            assert!(used.clone().count() >= 2, "{wants}: {counts:?}");
            assert!(used.clone().all(|n| (least..=most).contains(n)), "{wants}: {counts:?}");
            let moved: usize = (0..1000).map(|_| machine.decide()).sum();
            assert!(moved <= 20, "{wants} on {workers}: {moved} needless moves of queues");
            // Nearly all become idle.
            machine.wants.fill(3);
            for _ in 0..10 {
                machine.decide();
            }
            assert_eq!(machine.counts()[0], 60, "{wants}: folded");
        }
    }

    #[test]
    fn a_move_is_not_undone_by_the_next_decision() {
        // After (600, 400) nothing moves; at 500 on one worker nothing is overloaded.
        assert_eq!(balance(0, &[600, 400], &[600]), None);
        assert_eq!(balance(1, &[600, 400], &[400]), None);
        assert_eq!(balance(0, &[500, 0], &[300, 200]), None);
        assert_eq!(balance(0, &[504, 496], &[16; 31]), None);
    }
}
