//! Each value of the last axis against the base, within each other cell.

use std::fmt;

use super::{Done, Results};
use crate::plan::Cell;
use crate::stats::{Summary, mann_whitney, mann_whitney_least};

/// Two sets of runs are different where chance alone gives such a difference less often.
pub const CHANCE: f64 = 0.05;

/// What became of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More than the base.
    More,
    /// Less than the base.
    Less,
    /// There are enough runs, and no significant difference.
    NoDifference,
    /// Whatever they measured, so few runs cannot tell.
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

/// One measure of one value of the last axis against its base.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What both have in common: all axes but the last.
    pub cell: Cell,
    /// The last axis.
    pub axis: String,
    /// Its first value.
    pub base: String,
    /// The value compared with it.
    pub value: String,
    /// Of what.
    pub measure: String,
    /// Median of the value by that of the base; none where the latter is 0.
    pub ratio: Option<f64>,
    /// The least and the greatest ratio of two runs that were measured side by side.
    pub range: Option<(f64, f64)>,
    /// How many runs of the value, and of the base.
    pub runs: (usize, usize),
    /// How often chance alone gives such a difference, by Mann and Whitney's test of two sides.
    pub p: f64,
    /// What that says.
    pub outcome: Outcome,
}

impl Results {
    /// All comparisons of a measure, in the order of the cells. The base of a cell is the first
    /// value of the last axis that it has runs of.
    pub fn compare(&self, measure: &str) -> Vec<Comparison> {
        let Some(axis) = self.plan.axes.last() else { return Vec::new() };
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
            let mut sets = axis.values.iter().map(|value| (value, of(value)));
            let Some((base, base_runs)) = sets.find(|(_, runs)| !runs.is_empty()) else { continue };
            for (value, runs) in sets.filter(|(_, runs)| !runs.is_empty()) {
                let numbers = compare(&runs, &base_runs, measure);
                found.push(Comparison {
                    cell: Cell(outer.to_vec()),
                    axis: axis.name.clone(),
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
    let by = |a: f64, b: f64| (b != 0.0).then(|| a / b);
    let pairs = runs.iter().filter_map(|run| {
        let beside = base.iter().find(|other| other.repeat == run.repeat)?;
        by(run.figures[measure], beside.figures[measure])
    });
    let range = Summary::of(&pairs.collect::<Vec<_>>()).map(|ratios| (ratios.low, ratios.high));
    let p = mann_whitney(&ours, &theirs);
    let outcome = if p < CHANCE {
        // By ranks, not by medians: it is the ranks that differ.
        let above = ours.iter().flat_map(|a| theirs.iter().map(move |b| a.total_cmp(b) as i32));
        if above.sum::<i32>() > 0 { Outcome::More } else { Outcome::Less }
    } else if mann_whitney_least(ours.len(), theirs.len()) >= CHANCE {
        Outcome::TooFewRuns
    } else {
        Outcome::NoDifference
    };
    Comparison {
        cell: Cell(Vec::new()),
        axis: String::new(),
        base: String::new(),
        value: String::new(),
        measure: String::new(),
        ratio: by(median(&ours), median(&theirs)),
        range,
        runs: (ours.len(), theirs.len()),
        p,
        outcome,
    }
}
