//! Results of an original study, judged by ours.
//!
//! A result is confirmed if ours shows at least half of its effect (half of the logarithm of its
//! ratio), refuted if ours shows less than half, and otherwise not confirmed. A result that nothing
//! changes is confirmed if ours is within its margin, and refuted if it is beyond. All
//! results of a study are tested together, by pairs.

use std::fmt;

use crate::plan::Cell;
use crate::stats::paired::{
    Estimate, SIGNIFICANCE, effect, equivalent, holm, signed_rank_above, signed_rank_min,
};
use crate::store::Results;
use crate::study::Study;

/// One result of an original study.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// What it is of, in the original's words.
    pub what: String,
    /// Our cell.
    pub cell: Cell,
    /// Our base.
    pub base: Cell,
    /// Our measure.
    pub measure: &'static str,
    /// Ratio of the published figures; `None`: published in words or pictures only.
    pub original: Option<f64>,
    /// What must be seen.
    pub expect: Expect,
}

/// What confirms a claim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expect {
    /// A ratio beyond this one, on the side away from 1.
    Beyond(f64),
    /// No change: a ratio from 1 / this one to this one.
    Within(f64),
}

impl Claim {
    /// A claim by its published ratio: no change if that is within the margin, otherwise half of
    /// its effect.
    pub fn of_ratio(
        what: String,
        [cell, base]: [Cell; 2],
        measure: &'static str,
        ratio: f64,
        margin: f64,
    ) -> Self {
        let same = ratio.ln().abs() <= margin.ln();
        let expect = if same { Expect::Within(margin) } else { Expect::Beyond(ratio.sqrt()) };
        Self { what, cell, base, measure, original: Some(ratio), expect }
    }

    /// The cell that is compared, in words.
    pub fn ours(&self) -> String {
        let differ = self.base.0.iter().filter(|(axis, value)| self.cell.get(axis) != value);
        let base: Vec<String> = differ.map(|(axis, value)| format!("{axis}={value}")).collect();
        format!("{}: {} over {}", self.measure, self.cell, base.join(" "))
    }
}

/// Whether a claim is confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    Confirmed,
    /// The opposite is shown.
    Refuted,
    /// Neither is shown.
    NotConfirmed,
    /// Too few pairs to show either.
    TooFew,
    /// No speed-up: guests are served unevenly, see [`Results::uneven`].
    Uneven,
    /// There are no runs of it.
    NotMeasured,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Confirmed => "confirmed",
            Self::Refuted => "refuted",
            Self::NotConfirmed => "not confirmed",
            Self::TooFew => "too few pairs to tell",
            Self::Uneven => "uneven",
            Self::NotMeasured => "not measured",
        })
    }
}

/// A claim with what was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The claim.
    pub claim: Claim,
    /// Our ratio; `None` if the base is 0, or guests are served unevenly.
    pub ratio: Option<Estimate>,
    /// Number of pairs.
    pub pairs: usize,
    /// What follows.
    pub state: State,
}

/// Judges all claims of a study together.
pub fn judge(results: &Results, study: &dyn Study, claims: Vec<Claim>) -> Vec<Finding> {
    let uneven =
        |claim: &Claim| results.uneven(study, &claim.cell, &claim.base, claim.measure).is_some();
    // Without effects there is no test.
    let of_claim = |claim| if uneven(claim) { Vec::new() } else { effects(results, claim) };
    let effects: Vec<Vec<f64>> = claims.iter().map(of_claim).collect();
    let measured = effects.iter().filter(|of| !of.is_empty()).count();
    let tested = |test: &dyn Fn(&Claim, &[f64]) -> f64| {
        let all = claims.iter().zip(&effects).filter(|(_, of)| !of.is_empty());
        let mut corrected = holm(&all.map(|(claim, of)| test(claim, of)).collect::<Vec<_>>());
        corrected.reverse();
        let next = effects.iter().map(|of| if of.is_empty() { None } else { corrected.pop() });
        next.collect::<Vec<_>>()
    };
    let shown = tested(&shown);
    let refuted = tested(&refuted);
    let states = shown.into_iter().zip(refuted).zip(&effects).map(|((shown, refuted), of)| {
        let (Some(shown), Some(refuted)) = (shown, refuted) else { return State::NotMeasured };
        if shown < SIGNIFICANCE {
            State::Confirmed
        } else if refuted < SIGNIFICANCE {
            State::Refuted
        } else if signed_rank_min(of.len()) / 2.0 * measured as f64 >= SIGNIFICANCE {
            State::TooFew
        } else {
            State::NotConfirmed
        }
    });
    let states: Vec<State> = states.collect();
    let all = claims.into_iter().zip(&effects).zip(states);
    all.map(|((claim, of), state)| {
        let is_uneven = uneven(&claim);
        let state = if is_uneven { State::Uneven } else { state };
        let ratio = results.ratio(&claim.cell, &claim.base, claim.measure);
        let ratio = ratio.filter(|_| !is_uneven);
        Finding { claim, ratio, pairs: of.len(), state }
    })
    .collect()
}

fn effects(results: &Results, claim: &Claim) -> Vec<f64> {
    let pairs = results.pairs(|cell| *cell == claim.cell, |_| claim.base.clone());
    let figures = pairs.into_iter().filter_map(|(run, base)| {
        Some((*run.figures.get(claim.measure)?, *base.figures.get(claim.measure)?))
    });
    figures.map(|(ours, base)| effect(ours, base)).collect()
}

fn shown(claim: &Claim, effects: &[f64]) -> f64 {
    match claim.expect {
        Expect::Within(margin) => equivalent(effects, margin.ln()),
        Expect::Beyond(ratio) => beyond(effects, ratio),
    }
}

fn refuted(claim: &Claim, effects: &[f64]) -> f64 {
    match claim.expect {
        Expect::Within(margin) => {
            let either = beyond(effects, margin).min(beyond(effects, 1.0 / margin));
            f64::min(1.0, 2.0 * either)
        }
        // Short of it, whichever side it is on.
        Expect::Beyond(ratio) => {
            let sign = ratio.ln().signum();
            signed_rank_above(&effects.iter().map(|e| sign * (ratio.ln() - e)).collect::<Vec<_>>())
        }
    }
}

/// p-value of the test that effects are beyond a ratio, on its side of 1.
fn beyond(effects: &[f64], ratio: f64) -> f64 {
    let sign = ratio.ln().signum();
    signed_rank_above(&effects.iter().map(|e| sign * (e - ratio.ln())).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests;
