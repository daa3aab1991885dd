//! Results: every run of every cell, and statistics. They are stored in a folder:
//!
//! | file | |
//! |---|---|
//! | `plan.toml` | the plan |
//! | `runs.csv` | a line for each run: axes, `repeat`, `distance_ns`, `others_percent`, measures |
//! | `failed.csv` | a line for each run that failed: axes, `repeat`, `error` |
//! | `machine.json` | CPU, kernel, settings, versions, and the command |
//! | `summary.json` | medians, comparisons, verdicts: [`summary`] |
//! | `report.html`, `report.md`, `plots/` | the report |
//!
//! The last two rows are derived from the others; [`show`](crate::show) regenerates them.

use std::collections::BTreeMap;

use crate::machine::Machine;
use crate::plan::{Cell, Plan};
use crate::stats::Summary;

mod compare;
mod csv;
mod folder;
pub mod summary;

pub use compare::{Comparison, Outcome, tested};
pub use folder::{Folder, existing_runs, has_plan, plan_of, write_summary};

/// A run is far if its distance exceeds [`NEAR_NS`] and this multiple of the shortest distance.
const FAR_FACTOR: f64 = 1.5;
/// Distance, in ns, below which CPUs share a cache.
const NEAR_NS: f64 = 150.0;
/// A run is disturbed if other programs used more of one CPU than this.
const DISTURBED_PERCENT: f64 = 25.0;

/// All finished runs of one plan.
#[derive(Clone, Debug)]
pub struct Results {
    /// The plan.
    pub plan: Plan,
    /// All runs, in the order measured.
    pub runs: Vec<Done>,
    /// Command line that repeats them.
    pub command: String,
    /// The machine on which they were measured.
    pub machine: Machine,
    /// Failed runs without a later success: cell and reason.
    pub failed: Vec<(Cell, String)>,
}

/// One finished run.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Its cell.
    pub cell: Cell,
    /// Its repeat, from 0.
    pub repeat: u32,
    /// Round-trip time of a cache line between the CPUs, in ns: the longer of two measurements,
    /// before and after the run. 0: unknown, for example with a single CPU.
    pub distance_ns: f64,
    /// CPU time of other programs during the run, in per cent of one CPU.
    pub others_percent: f64,
    /// Measures by name.
    pub figures: BTreeMap<String, f64>,
}

impl Results {
    /// Returns the values of a measure in the [used](Self::used) runs of the cells that `wanted`
    /// selects.
    pub fn values(&self, wanted: impl Fn(&Cell) -> bool, measure: &str) -> Vec<f64> {
        let runs = self.used().into_iter().filter(|run| wanted(&run.cell));
        runs.filter_map(|run| run.figures.get(measure).copied()).collect()
    }

    /// Returns statistics of a measure in one cell; `None` if it has no run.
    pub fn summary(&self, cell: &Cell, measure: &str) -> Option<Summary> {
        Summary::of(&self.values(|other| other == cell, measure))
    }

    /// Returns the cells with at least one run, in the order measured.
    pub fn cells(&self) -> Vec<&Cell> {
        let mut cells: Vec<&Cell> = Vec::new();
        for run in &self.runs {
            if !cells.contains(&&run.cell) {
                cells.push(&run.cell);
            }
        }
        cells
    }

    /// Whether the CPUs of a run were far from each other.
    pub fn is_far(&self, run: &Done) -> bool {
        run.distance_ns > NEAR_NS && run.distance_ns > FAR_FACTOR * self.nearest_ns()
    }

    /// Whether a run was quiet: neither far nor disturbed.
    pub fn is_quiet(&self, run: &Done) -> bool {
        !is_disturbed(run) && !self.is_far(run)
    }

    /// Returns the shortest distance of all runs, in ns; 0: unknown.
    pub fn nearest_ns(&self) -> f64 {
        let known = self.runs.iter().map(|run| run.distance_ns).filter(|ns| *ns > 0.0);
        known.min_by(f64::total_cmp).unwrap_or(0.0)
    }

    /// Returns the runs that statistics are computed from: the quiet runs of each cell, or all of
    /// its runs if none is quiet.
    pub fn used(&self) -> Vec<&Done> {
        let nearest = self.nearest_ns();
        let quiet = |run: &Done| {
            let far = run.distance_ns > NEAR_NS && run.distance_ns > FAR_FACTOR * nearest;
            !far && !is_disturbed(run)
        };
        let mut some_quiet: BTreeMap<&Cell, bool> = BTreeMap::new();
        for run in &self.runs {
            *some_quiet.entry(&run.cell).or_default() |= quiet(run);
        }
        self.runs.iter().filter(|run| quiet(run) || !some_quiet[&run.cell]).collect()
    }
}

/// Whether other programs disturbed a run.
pub fn is_disturbed(run: &Done) -> bool {
    run.others_percent > DISTURBED_PERCENT
}
