//! Who is served next, and by whom: deficit round-robin in measured time, and moving queues
//! between workers by measured load. Pure; time is passed in.

pub mod level;

use crate::frame::BURST_MAX;

/// Time one port is served in one round at weight 1, in ns: some bursts of small frames.
pub const QUANTUM_NS: u32 = 10_000;
/// Highest weight.
pub const WEIGHT_MAX: u32 = 100;

/// A queue's credit with the worker that serves it.
///
/// In each round a queue gets its port's quantum, divided by the number of the port's queues that
/// are served, and is served while it has credit. What a burst costs beyond it is owed to the
/// other ports and paid in later rounds; what is left when the queue is empty is given up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Share {
    credit_ns: i64,
}

impl Share {
    /// A round begins. `queues`: how many queues of the port share its quantum.
    #[inline]
    pub fn grant(&mut self, weight: u32, queues: usize) {
        self.skip(1, weight, queues);
    }

    /// How many rounds it cannot be served in, from the next on.
    pub fn waits(&self, weight: u32, queues: usize) -> u64 {
        self.credit_ns.min(0).unsigned_abs() / quantum(weight, queues).unsigned_abs()
    }

    /// So many rounds pass at once: those in which no queue can be served need not be gone
    /// through. After a long burst, or when the CPU was taken from its worker, they are hundreds.
    pub fn skip(&mut self, rounds: u64, weight: u32, queues: usize) {
        let quantum = quantum(weight, queues);
        let credit = quantum.saturating_mul(i64::try_from(rounds).unwrap_or(i64::MAX));
        self.credit_ns = self.credit_ns.saturating_add(credit).min(quantum);
    }

    /// Whether it may be served (on).
    #[inline]
    pub fn may(&self) -> bool {
        self.credit_ns > 0
    }

    /// It was served for so long.
    #[inline]
    pub fn charge(&mut self, ns: u64) {
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(ns);
    }

    /// The worker spent so long on what its guest receives, which is not done in its turn. However
    /// much that is, no more is owed for it than what a port gets in a round, so that a guest can
    /// answer while frames come in.
    pub fn charge_aside(&mut self, ns: u64) {
        let least = self.credit_ns.min(-i64::from(QUANTUM_NS));
        self.credit_ns = self.credit_ns.saturating_sub_unsigned(ns).max(least);
    }

    /// Nothing waits but this queue: nothing is owed to anyone.
    #[inline]
    pub fn forgive(&mut self) {
        self.credit_ns = 0;
    }
}

/// Length of a burst from which on it is long, in ns.
const LONG_NS: u64 = 200_000;
/// After so long without a long burst, in ns, twice as many frames may be taken at once.
const GROWS_NS: u64 = 5_000_000;

/// How many frames are taken from a queue at once. What a frame costs is known only when it was
/// dealt with (pages that are not there, pieces, segments), and others wait for a burst to end: so
/// after each that was long, half as many are taken. A worker that lost its CPU in a burst makes
/// one long, too, which costs little.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    frames: usize,
    /// When it was last changed, or a burst was long, in ns.
    since_ns: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { frames: BURST_MAX, since_ns: 0 }
    }
}

impl Pace {
    /// How many frames may be taken.
    #[inline]
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// A burst of `frames` took so long, and ended now.
    #[inline]
    pub fn record(&mut self, frames: usize, took_ns: u64, now_ns: u64) {
        if took_ns > LONG_NS || self.frames < BURST_MAX {
            self.change(frames, took_ns, now_ns);
        }
    }

    #[cold]
    fn change(&mut self, frames: usize, took_ns: u64, now_ns: u64) {
        if took_ns > LONG_NS && frames > 0 {
            (self.frames, self.since_ns) = (self.frames.min(frames).div_ceil(2), now_ns);
        } else if now_ns.saturating_sub(self.since_ns) > GROWS_NS {
            (self.frames, self.since_ns) = ((2 * self.frames).min(BURST_MAX), now_ns);
        }
    }
}

/// What a queue gets in each round, in ns.
#[inline]
fn quantum(weight: u32, queues: usize) -> i64 {
    let quantum = i64::from(QUANTUM_NS) * i64::from(weight.clamp(1, WEIGHT_MAX));
    (quantum / queues.max(1) as i64).max(1)
}

/// Loads are in thousandths of a worker's time; from here on it is crowded.
const CROWDED: u32 = 700;
/// Below, it is quiet, and gives up its queues if another can take them.
const QUIET: u32 = 250;
/// What the taker of a quiet worker's queues may come to: far enough below crowded that they do
/// not come back at once.
const FOLDED_MAX: u32 = 500;
/// A queue below this is not worth moving alone, nor are several that come to no more.
const LIGHT: u32 = 20;
/// Two workers that differ by less are even: it is what measurements of a millisecond differ by,
/// and would have queues go to and fro.
const EVEN: u32 = 150;

/// What a worker does about its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// Gives these (indices, the highest first) to another worker.
    Queues(Vec<usize>, usize),
    /// Gives all of them to another worker, and sleeps.
    All(usize),
}

/// What worker `me` does, given the load of each worker and of those of its queues that were
/// served, all in thousandths.
///
/// Crowded, it gives the least loaded worker that queue which brings the two nearest to each
/// other, or if that alone is little, several that come to half of what they differ by. Quiet, it
/// folds onto the first worker before it that can take its load.
pub fn balance(me: usize, workers: &[u32], queues: &[u32]) -> Option<Move> {
    let mine = *workers.get(me)?;
    if mine >= CROWDED {
        let (to, least) = workers.iter().enumerate().min_by_key(|(i, load)| (**load, *i))?;
        let gap = mine.saturating_sub(*least);
        if gap < EVEN {
            return None;
        }
        let given = one(queues, gap).map(|at| vec![at]).or_else(|| several(queues, gap));
        return given.map(|queues| Move::Queues(queues, to));
    }
    if mine < QUIET {
        let takes = |load: &u32| load + mine <= FOLDED_MAX;
        return workers[..me].iter().position(takes).map(Move::All);
    }
    None
}

/// The queue that evens out a gap best, if it makes a difference.
fn one(queues: &[u32], gap: u32) -> Option<usize> {
    let heavy = || queues.iter().enumerate().filter(|(_, load)| **load >= LIGHT);
    let (at, load) = heavy().min_by_key(|(_, load)| ((gap / 2).abs_diff(**load), **load))?;
    // A queue as heavy as the gap would only swap the two workers' places. One far below half of
    // it is better moved with others.
    let fits = (gap / 4..gap * 4 / 5).contains(load);
    (fits && heavy().count() > 1).then_some(at)
}

/// As many queues as come to half the gap at most, the heaviest first. What is left is at least
/// as much, so that the two workers do not swap places.
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
                while share.may() {
                    share.charge(cost[i]);
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
        share.charge(u64::from(QUANTUM_NS));
        assert!(!share.may());
        share.charge(u64::MAX);
        share.forgive();
        share.grant(1, 1);
        assert!(share.may());
    }

    #[test]
    fn what_a_guest_receives_costs_it_one_turn_at_most() {
        let mut share = Share::default();
        share.grant(1, 1);
        share.charge_aside(u64::from(QUANTUM_NS) / 2);
        assert!(share.may(), "half of its turn");
        for ns in [2 * u64::from(QUANTUM_NS), 1_000_000_000, u64::MAX] {
            share.charge_aside(ns);
            assert_eq!(share.waits(1, 1), 1, "{ns}");
        }
        // What it owes for its own bursts stays as it is.
        share.charge(9 * u64::from(QUANTUM_NS));
        share.charge_aside(u64::MAX);
        assert_eq!(share.waits(1, 1), 10);
    }

    #[test]
    fn long_bursts_are_halved_to_single_frames_and_grow_again_when_they_are_short() {
        let mut pace = Pace::default();
        pace.record(64, LONG_NS, 0);
        assert_eq!(pace.frames(), BURST_MAX, "not long");
        // Two dear frames are all that a burst holds.
        pace.record(2, 2_600_000, 10_000_000);
        assert_eq!(pace.frames(), 1);
        for ms in 11..100 {
            pace.record(1, 1_300_000, ms * 1_000_000);
            assert_eq!(pace.frames(), 1, "as long as they are dear");
        }
        let mut bursts = 0;
        let mut now_ns = 100_000_000;
        while pace.frames() < BURST_MAX {
            let frames = pace.frames();
            now_ns += 1_000_000;
            pace.record(frames, 5_000, now_ns);
            assert!(pace.frames() == frames || pace.frames() == 2 * frames);
            bursts += 1;
        }
        assert!((30..40).contains(&bursts), "{bursts} ms");
        // One in which the worker lost its CPU.
        pace.record(64, 10_000_000, now_ns);
        assert_eq!(pace.frames(), 32);
    }

    #[test]
    fn rounds_that_are_skipped_are_those_in_which_nothing_was_served() {
        for owes in [0, 1, 9_999, 10_000, 10_001, 3_000_000, u64::MAX >> 1] {
            for (weight, queues) in [(1, 1), (3, 2), (1, 7)] {
                let mut share = Share::default();
                share.charge(owes);
                let waits = share.waits(weight, queues);
                let mut skipped = share;
                skipped.skip(waits, weight, queues);
                assert_eq!(skipped.waits(weight, queues), 0, "{owes} {weight} {queues}");
                skipped.grant(weight, queues);
                assert!(skipped.may());
                if waits > 0 {
                    share.skip(waits - 1, weight, queues);
                    share.grant(weight, queues);
                    assert!(!share.may(), "{owes}: one round earlier");
                }
            }
        }
    }

    #[test]
    fn queues_of_one_port_share_its_quantum() {
        let mut share = Share::default();
        share.grant(1, 4);
        share.charge(u64::from(QUANTUM_NS) / 4);
        assert!(!share.may());
    }

    fn give(queues: &[usize], to: usize) -> Option<Move> {
        Some(Move::Queues(queues.to_vec(), to))
    }

    #[test]
    fn crowded_worker_gives_the_queue_that_evens_out_most() {
        assert_eq!(balance(0, &[1000, 0], &[600, 400]), give(&[1], 1));
        assert_eq!(balance(0, &[900, 300, 100], &[500, 380, 20]), give(&[1], 2));
        // One heavy queue cannot be helped, nor can two workers that are both full.
        assert_eq!(balance(0, &[1000, 0], &[1000]), None);
        assert_eq!(balance(0, &[1000, 0], &[990, 10]), None);
        assert_eq!(balance(0, &[1000, 950], &[500, 500]), None);
    }

    #[test]
    fn quiet_workers_fold_onto_the_first_and_no_one_folds_upward() {
        assert_eq!(balance(1, &[200, 100], &[100]), Some(Move::All(0)));
        assert_eq!(balance(2, &[450, 200, 100], &[100]), Some(Move::All(1)));
        assert_eq!(balance(0, &[0, 0], &[0]), None);
        assert_eq!(balance(1, &[450, 100], &[100]), None);
        // None of its queues was served.
        assert_eq!(balance(1, &[0, 0], &[]), Some(Move::All(0)));
    }

    #[test]
    fn crowded_worker_gives_half_of_many_light_queues() {
        let halves: Vec<usize> = (0..50).rev().collect();
        assert_eq!(balance(0, &[1000, 0], &[10; 100]), give(&halves, 1));
        // Sixty that fill a worker: 31 times 16 is half of it.
        let half: Vec<usize> = (0..31).rev().collect();
        assert_eq!(balance(0, &[1000, 0], &[16; 60]), give(&half, 1));
        // No heavier ones that one by one would take as many moves.
        assert_eq!(balance(0, &[990, 0], &[33; 30]).unwrap(), give(&half[16..], 1).unwrap());
        // Those that were not served stay.
        let mut some = [0; 100];
        (some[3], some[70], some[71]) = (15, 15, 15);
        assert_eq!(balance(0, &[900, 100, 400], &some), give(&[71, 70, 3], 1));
    }

    #[test]
    fn flooders_quiet_neighbours_leave_it() {
        let mut queues = [12; 9];
        queues[4] = 900;
        assert_eq!(balance(0, &[996, 0], &queues), give(&[8, 7, 6, 5, 3, 2, 1, 0], 1));
        // And do not come back, nor does it follow them.
        assert_eq!(balance(1, &[900, 96], &[12; 8]), None);
        assert_eq!(balance(0, &[1000, 96], &[1000]), None);
        // All of them together are not worth it, or the other is nearly as crowded.
        assert_eq!(balance(0, &[1000, 0], &[980, 10, 10]), None);
        assert_eq!(balance(0, &[1000, 900], &[10; 100]), None);
    }

    /// Queues on workers, each worker as crowded as they make it, measured a little wrongly.
    struct Crowd {
        wants: Vec<u32>,
        on: Vec<usize>,
        workers: usize,
        seed: u64,
    }

    impl Crowd {
        fn new(wants: Vec<u32>, workers: usize) -> Self {
            Self { on: vec![0; wants.len()], wants, workers, seed: 1 }
        }

        /// What a worker's queues get: all they want, or each its share.
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

        /// One decision of each worker; returns how many queues moved.
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
        // What sixty of them want in all, and the fewest and most that a worker may end up with.
        for (wants, workers, least, most) in
            [(16, 2, 25, 35), (25, 2, 25, 35), (33, 3, 15, 25), (50, 4, 11, 19), (66, 4, 11, 19)]
        {
            let mut crowd = Crowd::new(vec![wants; 60], workers);
            for _ in 0..30 {
                crowd.decide();
            }
            let counts = crowd.counts();
            let used = counts.iter().filter(|n| **n > 0);
            assert!(used.clone().count() >= 2, "{wants}: {counts:?}");
            assert!(used.clone().all(|n| (least..=most).contains(n)), "{wants}: {counts:?}");
            let moved: usize = (0..1000).map(|_| crowd.decide()).sum();
            assert!(moved <= 20, "{wants} on {workers}: {moved} moves of queues for nothing");
            // Nearly all fall silent.
            crowd.wants.fill(3);
            for _ in 0..10 {
                crowd.decide();
            }
            assert_eq!(crowd.counts()[0], 60, "{wants}: folded");
        }
    }

    #[test]
    fn a_move_is_not_undone_by_the_next_decision() {
        // After (600, 400) nothing moves; folded at 500 nothing is crowded.
        assert_eq!(balance(0, &[600, 400], &[600]), None);
        assert_eq!(balance(1, &[600, 400], &[400]), None);
        assert_eq!(balance(0, &[500, 0], &[300, 200]), None);
        assert_eq!(balance(0, &[504, 496], &[16; 31]), None);
    }
}
