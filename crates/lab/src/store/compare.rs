//! Comparison of the values of the last axis with its base, within cells that are otherwise equal.

use std::fmt;

use super::{Done, Results};
use crate::plan::Cell;
use crate::stats::{Summary, mann_whitney, mann_whitney_min};

/// Level of significance: samples differ if the p-value is lower.
pub const SIGNIFICANCE: f64 = 0.05;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More than the base.
    More,
    /// Less than the base.
    Less,
    /// No significant difference, with enough runs to detect one.
    NoDifference,
    /// Too few runs for a significant difference, whatever their values.
    TooFewRuns,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::More => "more",
            Self::Less => "less",
            Self::NoDifference => "no difference",
            Self::TooFewRuns => "too few runs to tell",
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
    /// Median divided by that of the base; `None` if the latter is 0.
    pub ratio: Option<f64>,
    /// Minimum and maximum ratio of pairs: runs of the same repeat.
    pub range: Option<(f64, f64)>,
    /// Number of runs of the value and of the base.
    pub runs: (usize, usize),
    /// p-value of the two-sided Mann-Whitney U test.
    pub p: f64,
    /// Result.
    pub outcome: Outcome,
}

impl Results {
    /// Returns all comparisons of a measure, in the order of the cells. The base is the first value
    /// of the last axis that has runs.
    pub fn compare(&self, measure: &str) -> Vec<Comparison> {
        let Some(axis) = self.plan.axes.last() else { return Vec::new() };
        self.compare_in_order(measure, &axis.name, axis.values.iter().collect())
    }

    /// Returns all comparisons of a measure with `base`, a value of the last axis: none where it
    /// has no runs.
    pub fn compare_with(&self, measure: &str, base: &str) -> Vec<Comparison> {
        let Some(axis) = self.plan.axes.last() else { return Vec::new() };
        let (first, rest): (Vec<_>, Vec<_>) = axis.values.iter().partition(|v| *v == base);
        let mut found = self.compare_in_order(measure, &axis.name, [first, rest].concat());
        found.retain(|comparison| comparison.base == base);
        found
    }

    fn compare_in_order(&self, measure: &str, axis: &str, values: Vec<&String>) -> Vec<Comparison> {
        let used = self.used();
        let mut outers: Vec<&[(String, String)]> = Vec::new();
        for run in &used {
            if !outers.contains(&run.cell.outer()) {
                outers.push(run.cell.outer());
            }
        }
        let mut found = Vec::new();
        for outer in outers {
            let of = |value: &String| -> Vec<&Done> {
                let here = used.iter().filter(|run| run.cell.outer() == outer);
                let with = here.filter(|run| run.cell.last() == value);
                with.filter(|run| run.figures.contains_key(measure)).copied().collect()
            };
            let mut sets = values.iter().map(|value| (*value, of(value)));
            let Some((base, base_runs)) = sets.find(|(_, runs)| !runs.is_empty()) else { continue };
            for (value, runs) in sets.filter(|(_, runs)| !runs.is_empty()) {
                let numbers = compare(&runs, &base_runs, measure);
                found.push(Comparison {
                    cell: Cell(outer.to_vec()),
                    axis: axis.into(),
                    base: base.clone(),
                    value: value.clone(),
                    measure: measure.into(),
                    ..numbers
                });
            }
        }
        found
    }
}

fn compare(runs: &[&Done], base: &[&Done], measure: &str) -> Comparison {
    let figures = |runs: &[&Done]| runs.iter().map(|run| run.figures[measure]).collect::<Vec<_>>();
    let (ours, theirs) = (figures(runs), figures(base));
    let median = |values: &[f64]| Summary::of(values).map_or(0.0, |summary| summary.median);
    let ratio = |a: f64, b: f64| (b != 0.0).then(|| a / b);
    let pairs = runs.iter().filter_map(|run| {
        let paired = base.iter().find(|other| other.repeat == run.repeat)?;
        ratio(run.figures[measure], paired.figures[measure])
    });
    let range = Summary::of(&pairs.collect::<Vec<_>>()).map(|ratios| (ratios.low, ratios.high));
    let (p, outcome) = tested(&ours, &theirs);
    Comparison {
        cell: Cell(Vec::new()),
        axis: String::new(),
        base: String::new(),
        value: String::new(),
        measure: String::new(),
        ratio: ratio(median(&ours), median(&theirs)),
        range,
        runs: (ours.len(), theirs.len()),
        p,
        outcome,
    }
}

/// Tests whether a sample differs from a base: the p-value of the two-sided Mann-Whitney U test,
/// and what follows at `SIGNIFICANCE`.
pub fn tested(ours: &[f64], base: &[f64]) -> (f64, Outcome) {
    let p = mann_whitney(ours, base);
    let outcome = if p < SIGNIFICANCE {
        // The direction is that of the ranks, which were tested, not of the medians.
        let above = ours.iter().flat_map(|a| base.iter().map(move |b| a.total_cmp(b) as i32));
        if above.sum::<i32>() > 0 { Outcome::More } else { Outcome::Less }
    } else if mann_whitney_min(ours.len(), base.len()) >= SIGNIFICANCE {
        Outcome::TooFewRuns
    } else {
        Outcome::NoDifference
    };
    (p, outcome)
}
