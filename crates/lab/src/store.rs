//! Results: every run of every cell, and statistics.
//!
//! They are a folder:
//!
//! | file | |
//! |---|---|
//! | `plan.toml` | what was to be measured |
//! | `runs.csv` | a line for each run: axes, `repeat`, `distance_ns`, `others_percent`, measures |
//! | `failed.csv` | a line for each run that failed: axes, `repeat`, `error` |
//! | `machine.json` | CPU, kernel, settings, versions, and the command |
//! | `summary.json` | medians, comparisons, verdicts: [`summary`] |
//! | `report.html`, `report.md`, `plots/` | the same to look at |
//!
//! The last two rows are derived from the others; [`show`](crate::show) makes them again.

use std::collections::BTreeMap;

use crate::machine::Machine;
use crate::plan::{Cell, Plan};
use crate::stats::Summary;

mod compare;
mod csv;
mod folder;
pub mod summary;

pub use compare::{Comparison, Outcome};
pub use folder::{Folder, look, plan_of, write_summary};

/// A run is far where its CPUs were so many times further from each other than in the nearest run,
const FAR: f64 = 1.5;
/// and further than this: below, both share a cache.
const NEAR_NS: f64 = 150.0;
/// A run is disturbed where other programs used more of one CPU.
const DISTURBED_PERCENT: f64 = 25.0;

/// All finished runs of one plan.
#[derive(Clone, Debug)]
pub struct Results {
    /// What was to be measured.
    pub plan: Plan,
    /// In the order measured.
    pub runs: Vec<Done>,
    /// The command line that repeats them.
    pub command: String,
    /// What they were measured on.
    pub machine: Machine,
    /// Runs that failed and were not made good since: cell and reason.
    pub failed: Vec<(Cell, String)>,
}

/// One finished run.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Which cell.
    pub cell: Cell,
    /// Which repeat, from 0.
    pub repeat: u32,
    /// A cache line's round trip between the CPUs before and after it, in ns; the longer one.
    /// 0: unknown, as on one CPU.
    pub distance_ns: f64,
    /// CPU time of other programs while it ran, in per cent of one CPU.
    pub others_percent: f64,
    /// What was measured.
    pub figures: BTreeMap<String, f64>,
}

impl Results {
    /// Values of a measure in all runs of the cells that `wanted` is true of; quiet runs only,
    /// where a cell has any.
    pub fn values(&self, wanted: impl Fn(&Cell) -> bool, measure: &str) -> Vec<f64> {
        let runs = self.used().into_iter().filter(|run| wanted(&run.cell));
        runs.filter_map(|run| run.figures.get(measure).copied()).collect()
    }

    /// Of one cell: median and spread of a measure; none if it has no run.
    pub fn summary(&self, cell: &Cell, measure: &str) -> Option<Summary> {
        Summary::of(&self.values(|other| other == cell, measure))
    }

    /// Cells with at least one run, in the order measured.
    pub fn cells(&self) -> Vec<&Cell> {
        let mut cells: Vec<&Cell> = Vec::new();
        for run in &self.runs {
            if !cells.contains(&&run.cell) {
                cells.push(&run.cell);
            }
        }
        cells
    }

    /// Whether the CPUs were far from each other in a run.
    pub fn is_far(&self, run: &Done) -> bool {
        run.distance_ns > NEAR_NS && run.distance_ns > FAR * self.nearest_ns()
    }

    /// Whether a run was quiet: near, and not disturbed by others.
    pub fn is_quiet(&self, run: &Done) -> bool {
        !is_disturbed(run) && !self.is_far(run)
    }

    /// The least distance seen in any run; 0: none is known.
    pub fn nearest_ns(&self) -> f64 {
        let known = self.runs.iter().map(|run| run.distance_ns).filter(|ns| *ns > 0.0);
        known.min_by(f64::total_cmp).unwrap_or(0.0)
    }

    /// The runs that medians are of: of each cell the quiet ones, or all where it has none.
    pub fn used(&self) -> Vec<&Done> {
        let nearest = self.nearest_ns();
        let quiet = |run: &Done| {
            let far = run.distance_ns > NEAR_NS && run.distance_ns > FAR * nearest;
            !far && !is_disturbed(run)
        };
        let mut some_quiet: BTreeMap<&Cell, bool> = BTreeMap::new();
        for run in &self.runs {
            *some_quiet.entry(&run.cell).or_default() |= quiet(run);
        }
        self.runs.iter().filter(|run| quiet(run) || !some_quiet[&run.cell]).collect()
    }
}

/// Whether other programs ran beside it.
pub fn is_disturbed(run: &Done) -> bool {
    run.others_percent > DISTURBED_PERCENT
}
