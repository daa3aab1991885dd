//! Comparison of the values of the last axis with its base, within cells that are otherwise equal.

use std::fmt;

use super::{Done, Results};
use crate::plan::Cell;
use crate::stats::paired::{self, Estimate, SIGNIFICANCE};
use crate::stats::{mann_whitney, mann_whitney_min};
use crate::study::Study;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More than the base.
    More,
    /// Less than the base.
    Less,
    /// No change: within the study's margin.
    NoChange,
    /// Neither a difference nor its absence is shown.
    Open,
    /// Too few pairs for either, whatever their values.
    TooFew,
    /// No speed-up: guests are served unevenly, see [`Results::uneven`].
    Uneven,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::More => "more",
            Self::Less => "less",
            Self::NoChange => "no change",
            Self::Open => "cannot tell",
            Self::TooFew => "too few pairs to tell",
            Self::Uneven => "uneven",
        })
    }
}

/// Comparison of a measure at one value of the last axis with its base.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Common values: all axes but the last.
    pub cell: Cell,
    /// Name of the last axis.
    pub axis: String,
    /// Base: the first value of the axis that has runs.
    pub base: String,
    /// Value compared with the base.
    pub value: String,
    /// Name of the measure.
    pub measure: String,
    /// Median of the ratios of pairs; `None` if the base is 0, or guests are served unevenly.
    pub ratio: Option<Estimate>,
    /// Number of pairs: runs of both in one round.
    pub pairs: usize,
    /// Median distance of the CPUs in the runs of the value and of the base, in ns; 0: unknown.
    pub distance_ns: (f64, f64),
    /// p-value of Wilcoxon's two-sided signed-rank test for a difference, corrected by Holm's
    /// method for all comparisons of the measure.
    pub p: f64,
    /// p-value of two one-sided tests for no change, corrected likewise.
    pub p_same: f64,
    /// Result.
    pub outcome: Outcome,
}

impl Results {
    /// Returns all comparisons of a measure, in the order of the cells. The base is the first value
    /// of the last axis that has runs. Ratios within the study's margin are no change.
    pub fn compare(&self, measure: &str, study: &dyn Study) -> Vec<Comparison> {
        let Some(axis) = self.plan.axes.last() else { return Vec::new() };
        let mut outers: Vec<&[(String, String)]> = Vec::new();
        for run in &self.runs {
            if !outers.contains(&run.cell.outer()) {
                outers.push(run.cell.outer());
            }
        }
        let mut found = Vec::new();
        let mut effects = Vec::new();
        for outer in outers {
            let of = |value: &String| -> Vec<&Done> {
                let here = self.runs.iter().filter(|run| run.cell.outer() == outer);
                let with = here.filter(|run| run.cell.last() == value);
                with.filter(|run| run.figures.contains_key(measure)).collect()
            };
            let mut sets = axis.values.iter().map(|value| (value, of(value)));
            let Some((base, base_runs)) = sets.find(|(_, runs)| !runs.is_empty()) else { continue };
            for (value, runs) in sets.filter(|(_, runs)| !runs.is_empty()) {
                let pairs = paired_up(&runs, &base_runs, measure);
                let [ours, its_base] = [runs[0], base_runs[0]].map(|run| &run.cell);
                let uneven = self.uneven(study, ours, its_base, measure).is_some();
                let distance = |runs: &[&Done]| {
                    Self::distances(runs.iter().copied()).map_or(0.0, |summary| summary.median)
                };
                found.push(Comparison {
                    cell: Cell(outer.to_vec()),
                    axis: axis.name.clone(),
                    base: base.clone(),
                    value: value.clone(),
                    measure: measure.into(),
                    ratio: Estimate::of_pairs(&pairs).filter(|_| !uneven),
                    pairs: pairs.len(),
                    distance_ns: (distance(&runs), distance(&base_runs)),
                    p: 1.0,
                    p_same: 1.0,
                    outcome: if uneven { Outcome::Uneven } else { Outcome::TooFew },
                });
                effects.push(
                    pairs
                        .iter()
                        .map(|(ours, base)| paired::effect(*ours, *base))
                        .collect::<Vec<_>>(),
                );
            }
        }
        judge(&mut found, effects, study.facts().margin);
        found
    }
}

/// Returns the figures of runs of the same round.
fn paired_up(runs: &[&Done], base: &[&Done], measure: &str) -> Vec<(f64, f64)> {
    let pairs = runs.iter().filter_map(|run| {
        let paired = base.iter().find(|other| other.repeat == run.repeat)?;
        Some((run.figures[measure], paired.figures[measure]))
    });
    pairs.collect()
}

/// Tests all comparisons of a table together, but for those that are none.
fn judge(found: &mut [Comparison], effects: Vec<Vec<f64>>, margin: f64) {
    let tested = found.iter_mut().zip(effects).filter(|(of, _)| of.outcome != Outcome::Uneven);
    let (found, effects): (Vec<_>, Vec<_>) = tested.unzip();
    let differ: Vec<f64> = effects.iter().map(|of| paired::signed_rank(of)).collect();
    let same: Vec<f64> = effects.iter().map(|of| paired::equivalent(of, margin.ln())).collect();
    let (differ, same) = (paired::holm(&differ), paired::holm(&same));
    let tests = effects.len() as f64;
    for (n, comparison) in found.into_iter().enumerate() {
        (comparison.p, comparison.p_same) = (differ[n], same[n]);
        comparison.outcome = if differ[n] < SIGNIFICANCE {
            // The direction is that of the ranks, which were tested.
            let above = paired::signed_rank_above(&effects[n]) < 0.5;
            if above { Outcome::More } else { Outcome::Less }
        } else if same[n] < SIGNIFICANCE {
            Outcome::NoChange
        // The least p-value of either test: half of that for a difference, for no change.
        } else if paired::signed_rank_min(effects[n].len()) / 2.0 * tests >= SIGNIFICANCE {
            Outcome::TooFew
        } else {
            Outcome::Open
        };
    }
}

/// Tests whether a sample differs from that of another folder, of which no run is a pair of one
/// here: the p-value of the two-sided Mann-Whitney U test.
pub fn tested(ours: &[f64], base: &[f64]) -> f64 {
    mann_whitney(ours, base)
}

impl Outcome {
    /// What follows from a corrected p-value of [`tested`], of `tests` in a table.
    pub fn of_folders(p: f64, ours: &[f64], base: &[f64], tests: usize) -> Self {
        if p < SIGNIFICANCE {
            // The direction is that of the ranks, which were tested, not of the medians.
            let above = ours.iter().flat_map(|a| base.iter().map(move |b| a.total_cmp(b) as i32));
            return if above.sum::<i32>() > 0 { Self::More } else { Self::Less };
        }
        let least = mann_whitney_min(ours.len(), base.len()) * tests as f64;
        if least >= SIGNIFICANCE { Self::TooFew } else { Self::Open }
    }
}
