//! Results: every run of every cell, and statistics. They are stored in a folder:
//!
//! | file | |
//! |---|---|
//! | `plan.toml` | the plan |
//! | `runs.csv` | a line for each run: axes, `repeat`, `again`, `distance_ns`, `others_percent`, \
//! `void`, measures |
//! | `machine.json` | CPU, kernel, settings, versions, and the command |
//! | `summary.json` | medians, comparisons, verdicts: [`summary`] |
//! | `report.html`, `report.md`, `plots/` | the report |
//!
//! The last two rows are derived from the others; [`show`](crate::show) regenerates them.
//!
//! Every run counts. None is left out for what was measured in it: neither for the distance of the
//! CPUs nor for other programs, which both depend on what runs. A run is void only if it has no
//! result, and the line says why.

use std::collections::{BTreeMap, BTreeSet};

use crate::machine::Machine;
use crate::plan::{Cell, Plan, Turn};
use crate::stats::Summary;
use crate::stats::paired::Estimate;
use crate::study::Study;

/// Least of Jain's index of what guests got, as the median of a cell, with which a speed-up counts.
const JAIN_LEAST: f64 = 0.95;
/// The measure of it.
const JAIN: &str = "jain";

mod compare;
mod csv;
mod folder;
pub mod summary;

pub use compare::{Comparison, Outcome, tested};
pub use folder::{Folder, existing_runs, has_plan, plan_of, write_summary};

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
    /// Second runs of the control in each round, see [`Plan::control`].
    pub controls: Vec<Done>,
    /// Attempts without a result.
    pub void: Vec<Void>,
}

/// An attempt of a run that has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Void {
    /// What was to be measured.
    pub turn: Turn,
    /// Why there is no result.
    pub why: String,
    /// Whether a later attempt had one.
    pub repeated: bool,
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
    /// Returns the values of a measure in all runs of the cells that `wanted` selects.
    pub fn values(&self, wanted: impl Fn(&Cell) -> bool, measure: &str) -> Vec<f64> {
        let runs = self.runs.iter().filter(|run| wanted(&run.cell));
        runs.filter_map(|run| run.figures.get(measure).copied()).collect()
    }

    /// Returns statistics of a measure in one cell; `None` if it has no run.
    pub fn summary(&self, cell: &Cell, measure: &str) -> Option<Summary> {
        Summary::of(&self.values(|other| other == cell, measure))
    }

    /// Returns the median of a measure in one cell with its interval; `None` if it has no run.
    pub fn estimate(&self, cell: &Cell, measure: &str) -> Option<Estimate> {
        Estimate::of(&self.values(|other| other == cell, measure))
    }

    /// Returns how a measure of one cell relates to that of another, from runs of the same round.
    /// Reports and documents have each of their ratios from here.
    pub fn ratio(&self, cell: &Cell, base: &Cell, measure: &str) -> Option<Estimate> {
        self.ratio_of(|other| other == cell, |_| base.clone(), measure)
    }

    /// Returns how a measure of the cells that `wanted` selects relates to that of the cell that
    /// `base` names for each.
    pub fn ratio_of(
        &self,
        wanted: impl Fn(&Cell) -> bool,
        base: impl Fn(&Cell) -> Cell,
        measure: &str,
    ) -> Option<Estimate> {
        let pairs = self.pairs(wanted, base);
        let figure = |run: &Done| run.figures.get(measure).copied();
        let figures = pairs.iter().filter_map(|(run, base)| Some((figure(run)?, figure(base)?)));
        Estimate::of_pairs(&figures.collect::<Vec<_>>())
    }

    /// Returns the runs of the cells that `wanted` selects, each with the run of the same round of
    /// the cell that `base` names for it.
    pub fn pairs(
        &self,
        wanted: impl Fn(&Cell) -> bool,
        base: impl Fn(&Cell) -> Cell,
    ) -> Vec<(&Done, &Done)> {
        let runs = self.runs.iter().filter(|run| wanted(&run.cell));
        let with = runs.filter_map(|run| Some((run, self.run(&base(&run.cell), run.repeat)?)));
        with.collect()
    }

    /// Returns the run of a cell in a round.
    fn run(&self, cell: &Cell, repeat: u32) -> Option<&Done> {
        self.runs.iter().find(|run| run.repeat == repeat && run.cell == *cell)
    }

    /// Returns the ratio of the control to itself: what equal cases differ by here. `None` without
    /// a control.
    pub fn noise(&self, measure: &str) -> Option<Estimate> {
        let figure = |run: &Done| run.figures.get(measure).copied();
        let pairs = self.controls.iter().filter_map(|again| {
            Some((figure(again)?, figure(self.run(&again.cell, again.repeat)?)?))
        });
        Estimate::of_pairs(&pairs.collect::<Vec<_>>())
    }

    /// Returns the least median of Jain's index of two cells, if the ratio of the measure is a
    /// speed-up that says nothing for it: workers that serve some guests less than others do other
    /// work. Tables, comparisons, claims and documents have the rule from here.
    pub fn uneven(
        &self,
        study: &dyn Study,
        cell: &Cell,
        base: &Cell,
        measure: &str,
    ) -> Option<f64> {
        if !study.is_speed_up(cell, base, measure) {
            return None;
        }
        let medians = [cell, base].into_iter().filter_map(|cell| self.summary(cell, JAIN));
        let least = medians.map(|found| found.median).reduce(f64::min)?;
        (least < JAIN_LEAST).then_some(least)
    }

    /// Returns the cells with at least one run, in the order measured.
    pub fn cells(&self) -> Vec<&Cell> {
        let mut seen = BTreeSet::new();
        self.runs.iter().map(|run| &run.cell).filter(|cell| seen.insert(*cell)).collect()
    }

    /// Returns statistics of the distance of the CPUs over runs, in ns; `None`: unknown.
    pub fn distances<'a>(runs: impl Iterator<Item = &'a Done>) -> Option<Summary> {
        let known = runs.map(|run| run.distance_ns).filter(|ns| *ns > 0.0);
        Summary::of(&known.collect::<Vec<_>>())
    }
}
