//! Who is served next, and by whom: deficit round-robin in measured time, and moving queues
//! between workers by measured load. Pure; time is passed in.

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

    /// Nothing waits but this queue: nothing is owed to anyone.
    #[inline]
    pub fn forgive(&mut self) {
        self.credit_ns = 0;
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
/// A queue below this is not worth moving.
const LIGHT: u32 = 20;

/// What a worker does about its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Gives one queue (its index) to another worker.
    Queue(usize, usize),
    /// Gives all of them to another worker, and sleeps.
    All(usize),
}

/// What worker `me` does, given the load of each worker and of each of its queues, all in
/// thousandths.
///
/// Crowded, it gives the least loaded worker that queue which brings the two nearest to each
/// other. Quiet, it folds onto the first worker before it that can take its load.
pub fn balance(me: usize, workers: &[u32], queues: &[u32]) -> Option<Move> {
    let mine = *workers.get(me)?;
    if mine >= CROWDED {
        let (to, least) = workers.iter().enumerate().min_by_key(|(i, load)| (**load, *i))?;
        let gap = mine.saturating_sub(*least);
        // A queue as heavy as the gap would only swap the two workers' places.
        let best = queues.iter().enumerate().filter(|(_, load)| **load >= LIGHT);
        let best = best.min_by_key(|(_, load)| ((gap / 2).abs_diff(**load), **load))?;
        let busy = queues.iter().filter(|load| **load >= LIGHT).count();
        return (busy > 1 && *best.1 < gap * 4 / 5).then_some(Move::Queue(best.0, to));
    }
    if mine < QUIET && !queues.is_empty() {
        let takes = |load: &u32| load + mine <= FOLDED_MAX;
        return workers[..me].iter().position(takes).map(Move::All);
    }
    None
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

    #[test]
    fn crowded_worker_gives_the_queue_that_evens_out_most() {
        assert_eq!(balance(0, &[1000, 0], &[600, 400]), Some(Move::Queue(1, 1)));
        assert_eq!(balance(0, &[900, 300, 100], &[500, 380, 20]), Some(Move::Queue(1, 2)));
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
        assert_eq!(balance(1, &[0, 0], &[]), None);
    }

    #[test]
    fn a_move_is_not_undone_by_the_next_decision() {
        // After (600, 400) nothing moves; folded at 500 nothing is crowded.
        assert_eq!(balance(0, &[600, 400], &[600]), None);
        assert_eq!(balance(1, &[600, 400], &[400]), None);
        assert_eq!(balance(0, &[500, 0], &[300, 200]), None);
    }
}
