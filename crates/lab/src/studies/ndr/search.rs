//! The highest load of which a switch loses at most a part: which load to try next, and when to
//! end. Without a clock or a switch: the caller makes the trials.
//!
//! The idea is that of MLRsearch: short trials narrow the range, from the highest rate forwarded
//! on; trials of the final length confirm both ends, and move them where they do not hold.
//!
//! ```text
//!   short trials:   low ──── good, bad, good ... bisect ──── high        each load once
//!   final trials:        low ─ again ─┤ width ├─ again ─ high            two of three decide
//! ```

/// A search for one loss ratio.
#[derive(Clone, Debug)]
pub struct Search {
    limits: Limits,
    /// Largest loss of a good trial, as a part of the offered load.
    loss_max: f64,
    /// Which of the lengths is in use.
    phase: usize,
    /// Highest load that is good, and lowest that is bad, in this phase.
    low: Option<f64>,
    high: Option<f64>,
    /// Loads to try first in this phase.
    guesses: [f64; 2],
    /// Distance to the next load outside, as a ratio.
    step: f64,
    /// Load under decision, and its good and bad trials.
    votes: Option<(f64, [u32; 2])>,
    /// Trials of the final length.
    finals: Vec<Tried>,
    trials: u32,
}

/// Limits of a search.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Highest load; no higher one is tried.
    pub load_max: f64,
    /// Distance of the two ends, as a part of the higher one.
    pub width: f64,
    /// Length of the first trials and of the final ones, in seconds.
    pub seconds: [f64; 2],
    /// Most trials.
    pub trials_max: u32,
}

/// A trial of the final length.
#[derive(Clone, Copy, Debug)]
struct Tried {
    load: f64,
    good: bool,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Offer this load for so many seconds, then record the loss.
    Try {
        /// In the unit of the highest load.
        load: f64,
        /// Length of the trial.
        seconds: f64,
    },
    /// The search has ended.
    End(Outcome),
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// This load is good; one that is higher by the width is not, unless this is the highest.
    Found(f64),
    /// Trials contradict each other, or were not enough.
    Unstable,
    /// The lowest load that was tried is bad.
    Nothing,
}

/// Trials of a load that decide, in the last phase.
const VOTES: u32 = 2;
/// Final trials that the result does not explain, of which one more makes it unstable: a machine
/// that other machines share may take its CPU from a trial.
const CONTRADICTIONS_MAX: usize = 2;
/// First distance outside the range, as a ratio, and the factor by which it grows.
const STEP: f64 = 1.05;
/// Lowest load, as a part of the highest.
const LOAD_MIN: f64 = 1e-4;

impl Search {
    /// Starts at `guess`, such as the highest rate forwarded. A load of which at most `loss_max` is
    /// lost is good.
    pub fn new(limits: Limits, loss_max: f64, guess: f64) -> Self {
        let guess = guess.clamp(limits.load_max * LOAD_MIN, limits.load_max);
        Self {
            limits,
            loss_max,
            phase: 0,
            low: None,
            high: None,
            guesses: [guess, (guess * STEP).min(limits.load_max)],
            step: STEP,
            votes: None,
            finals: Vec::new(),
            trials: 0,
        }
    }

    /// Number of trials so far.
    pub fn trials(&self) -> u32 {
        self.trials
    }

    /// What to do next.
    pub fn next(&self) -> Step {
        let Limits { load_max, width, seconds, trials_max } = self.limits;
        let ended = match (self.low, self.high) {
            (Some(low), Some(high)) => high - low <= width * high,
            (Some(low), None) => low >= load_max,
            (None, Some(high)) => high <= load_max * LOAD_MIN,
            (None, None) => false,
        };
        // Phases before the last one are left by `record`.
        if ended {
            return Step::End(self.outcome());
        }
        if self.trials >= trials_max {
            return Step::End(Outcome::Unstable);
        }
        let load = match (self.votes, self.low, self.high) {
            (Some((load, _)), _, _) => load,
            (None, Some(low), Some(high)) => (low * high).sqrt(),
            (None, None, None) => self.guesses[0],
            (None, Some(_), None) => self.guesses[1],
            (None, None, Some(_)) => self.guesses[0],
        };
        Step::Try { load, seconds: seconds[self.phase] }
    }

    /// Records the trial that [`next`](Self::next) asked for.
    pub fn record(&mut self, offered: u64, lost: u64) {
        let Step::Try { load, .. } = self.next() else { return };
        self.trials += 1;
        let good = lost as f64 <= self.loss_max * offered as f64;
        let last = self.phase + 1 == self.limits.seconds.len();
        if last {
            self.finals.push(Tried { load, good });
        }
        let (_, mut votes) = self.votes.unwrap_or((load, [0; 2]));
        votes[usize::from(!good)] += 1;
        if last && votes.iter().all(|votes| *votes < VOTES) {
            self.votes = Some((load, votes));
            return;
        }
        self.votes = None;
        self.decide(load, good);
        if !last && matches!(self.next(), Step::End(_)) {
            self.begin_last();
        }
    }

    /// Moves an end of the range.
    fn decide(&mut self, load: f64, good: bool) {
        let Limits { load_max, .. } = self.limits;
        if good {
            self.low = Some(load);
        } else {
            self.high = Some(load);
        }
        match (self.low, self.high) {
            (Some(low), None) if low >= self.guesses[1] => {
                self.step *= self.step;
                self.guesses[1] = (low * self.step).min(load_max);
            }
            (None, Some(high)) => {
                // The lower end of the last phase was not confirmed, or none is known yet.
                self.guesses[0] = (high / self.step).max(load_max * LOAD_MIN);
                self.step *= self.step;
            }
            _ => {}
        }
    }

    fn begin_last(&mut self) {
        let load_max = self.limits.load_max;
        let low = self.low.unwrap_or(load_max * LOAD_MIN);
        let high = self.high.unwrap_or(load_max);
        self.phase += 1;
        self.guesses = [low, high];
        (self.low, self.high) = (None, None);
        self.step = 1.0 + 2.0 * self.limits.width;
    }

    fn outcome(&self) -> Outcome {
        let Some(low) = self.low else { return Outcome::Nothing };
        let contradicts = |tried: &&Tried| match self.high {
            _ if tried.load <= low => !tried.good,
            Some(high) if tried.load >= high => tried.good,
            _ => false,
        };
        match self.finals.iter().filter(contradicts).count() {
            0..=CONTRADICTIONS_MAX => Outcome::Found(low),
            _ => Outcome::Unstable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seeded sequence of numbers from 0 to 1 (xorshift).
    struct Chance(u64);

    impl Chance {
        fn next(&mut self) -> f64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        }
    }

    const LIMITS: Limits =
        Limits { load_max: 1e7, width: 0.01, seconds: [0.1, 1.0], trials_max: 80 };

    /// Searches a system with this loss, as a part, at a load.
    fn search(loss_max: f64, guess: f64, mut loss: impl FnMut(f64, f64) -> f64) -> (Outcome, u32) {
        let mut search = Search::new(LIMITS, loss_max, guess);
        loop {
            match search.next() {
                Step::End(outcome) => return (outcome, search.trials()),
                Step::Try { load, seconds } => {
                    assert!(load > 0.0 && load <= LIMITS.load_max, "{load}");
                    let offered = (load * seconds) as u64;
                    search.record(offered, (loss(load, seconds) * offered as f64).ceil() as u64);
                    assert!(search.trials() <= LIMITS.trials_max);
                }
            }
        }
    }

    /// Loss of a system that forwards so much.
    fn beyond(capacity: f64) -> impl FnMut(f64, f64) -> f64 {
        move |load, _| ((load - capacity) / load).max(0.0)
    }

    #[test]
    fn a_capacity_is_found_within_the_width_from_any_guess() {
        let mut chance = Chance(7);
        for _ in 0..500 {
            let capacity = 1e7 * (0.002 + 0.98 * chance.next());
            let guess = capacity * (0.3 + chance.next());
            let (outcome, trials) = search(0.0, guess, beyond(capacity));
            let Outcome::Found(load) = outcome else { panic!("{capacity}: {outcome:?}") };
            assert!(load <= capacity && load >= capacity * (1.0 - 2.0 * LIMITS.width));
            assert!(trials <= 40, "{capacity} from {guess}: {trials} trials");
        }
    }

    #[test]
    fn a_larger_capacity_and_a_larger_loss_never_give_less() {
        let mut before = [0.0; 2];
        for capacity in (1..90).map(|n| f64::from(n) * 1e5) {
            let of = |loss_max| match search(loss_max, 3e6, beyond(capacity)).0 {
                Outcome::Found(load) => load,
                other => panic!("{capacity}: {other:?}"),
            };
            let found = [of(0.0), of(0.005)];
            // Up to the width, in which any load may be the result.
            let slack = 1.0 - LIMITS.width;
            assert!(found.iter().zip(before).all(|(now, then)| *now >= then * slack));
            assert!(found[1] >= found[0] * slack);
            before = found;
        }
    }

    #[test]
    fn a_system_beyond_the_highest_load_has_the_highest_load() {
        assert_eq!(search(0.0, 1e6, |_, _| 0.0).0, Outcome::Found(LIMITS.load_max));
        assert_eq!(search(0.0, 9e9, |_, _| 0.0).0, Outcome::Found(LIMITS.load_max));
    }

    #[test]
    fn a_system_that_always_loses_has_nothing() {
        assert_eq!(search(0.005, 1e6, |_, _| 0.5).0, Outcome::Nothing);
    }

    #[test]
    fn a_single_disturbed_trial_changes_nothing() {
        for disturbed in 0..40 {
            let mut trial = 0;
            let (outcome, _) = search(0.0, 4.2e6, |load, seconds| {
                trial += u32::from(seconds == LIMITS.seconds[1]);
                let hit = seconds == LIMITS.seconds[1] && trial == disturbed;
                if hit { 0.1 } else { beyond(4e6)(load, seconds) }
            });
            let Outcome::Found(load) = outcome else { panic!("{disturbed}: {outcome:?}") };
            let range = 4e6 * (1.0 - 2.0 * LIMITS.width)..=4e6;
            assert!(range.contains(&load), "{disturbed}: {load}");
        }
    }

    #[test]
    fn long_trials_that_lose_move_the_result_down() {
        // Losses that a short trial does not show, as of a buffer that fills.
        let (outcome, _) = search(0.0, 4e6, |load, seconds| {
            beyond(if seconds < 0.5 { 4e6 } else { 3e6 })(load, seconds)
        });
        assert!(matches!(outcome, Outcome::Found(load) if (2.9e6..=3e6).contains(&load)));
    }

    #[test]
    fn trials_that_contradict_each_other_are_no_result() {
        let mut chance = Chance(3);
        let mut unstable = 0;
        for _ in 0..200 {
            let (outcome, _) = search(0.0, 4e6, |_, _| f64::from(chance.next() < 0.5));
            unstable += u32::from(outcome == Outcome::Unstable);
        }
        // By chance, some have no contradiction that can be seen.
        assert!(unstable >= 40, "{unstable} of 200");
    }

    #[test]
    fn any_answers_end_the_search_within_the_trials() {
        let mut chance = Chance(11);
        for _ in 0..2000 {
            let share = chance.next();
            let guess = 1e7 * chance.next();
            let (_, trials) = search(0.0, guess, |_, _| f64::from(chance.next() < share));
            assert!(trials <= LIMITS.trials_max);
        }
    }
}
