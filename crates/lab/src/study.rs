//! The trait of studies, and its types.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::error::Fail;
use crate::plan::{Cell, Plan, Scale};
use crate::report::{Original, Part, Verdict};
use crate::store::Results;

/// Studies that can be run: [`crate::studies::ALL`], or those of a test.
pub type Studies = &'static [&'static dyn Study];

/// Results of one run of one cell: a number for each measure, by name.
pub type Figures = BTreeMap<&'static str, f64>;

/// One column of results.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// Column in the file of results: lower case, words joined by `_`.
    pub name: &'static str,
    /// Unit, as printed: `Mbit/s`, `%`, `us`; empty for a plain count.
    pub unit: &'static str,
    /// Which direction is better.
    pub better: Better,
    /// One sentence that describes it.
    pub about: &'static str,
}

impl Measure {
    /// A measure of these fields.
    pub const fn new(
        name: &'static str,
        unit: &'static str,
        better: Better,
        about: &'static str,
    ) -> Self {
        Self { name, unit, better, about }
    }
}

/// Which direction of a measure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// More is better.
    More,
    /// Less is better.
    Less,
    /// Neither is better.
    Neither,
}

/// One run of one cell.
pub struct Run<'a> {
    /// The cell.
    pub cell: &'a Cell,
    /// Length of the measured window, in seconds; traffic runs before it, to warm up.
    pub seconds: f64,
    /// Environment of its processes.
    pub stage: &'a crate::stage::Stage,
}

/// Makes tables and plots of the results of several machines.
pub type Together = fn(&[Results]) -> Vec<Part>;

/// Constants of a study.
pub struct Facts {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line: its question.
    pub about: &'static str,
    /// The published study that it repeats, if any.
    pub original: Option<Original>,
    /// Measures, in the order of the columns.
    pub measures: &'static [Measure],
    /// Whether its guests speak what the stage says. Not so where the study has an axis for it, or
    /// where one protocol is what it is about.
    pub takes_proto: bool,
    /// Programs that a cell of its plan calls.
    pub tools: &'static [&'static str],
    /// Tables and plots of results of several machines, above those of each; `None`: none.
    pub together: Option<Together>,
    /// Ratios from 1 / `margin` to `margin` do not matter: half, as a ratio, of the smallest effect
    /// that the original study reports; of our own studies, what their promises tolerate.
    pub margin: f64,
    /// Values of the cell that is compared with itself, see [`Plan::control`]: one under load.
    pub control: &'static [(&'static str, &'static str)],
}

impl Facts {
    /// Returns the margin in words.
    pub fn margin_words(&self) -> String {
        format!("{:.3} to {:.3}", 1.0 / self.margin, self.margin)
    }
}

/// A study. All of them are in [`crate::studies::ALL`].
pub trait Study: Sync {
    /// Its constants.
    fn facts(&self) -> &'static Facts;
    /// The matrix. The last axis holds what is set beside each other, the base first.
    fn plan(&self, scale: Scale) -> Plan;
    /// Further values of an axis, of folders of earlier versions: they can be read, and measured
    /// with `--only`.
    fn earlier_values(&self, _axis: &str) -> Vec<&'static str> {
        Vec::new()
    }
    /// Whether the matrix has this cell: an original study may not have measured all combinations.
    fn has(&self, cell: &Cell) -> bool;
    /// About how long one run of a cell takes beyond its window, in seconds.
    fn overhead_s(&self, cell: &Cell) -> f64;
    /// Measures one cell once.
    fn run(&self, run: &Run) -> Result<Figures, Fail>;
    /// Tables and plots: those of the original study beside ours, in its layout.
    fn report(&self, results: &Results) -> Vec<Part>;
    /// Judges by counts whether the main result of the original study is confirmed.
    fn judge(&self, results: &Results) -> Vec<Verdict>;
    /// Whether the ratio of a measure of two cells is a speed-up, which needs guests that are
    /// served evenly: [`Results::uneven`].
    fn is_speed_up(&self, _cell: &Cell, _base: &Cell, _measure: &str) -> bool {
        false
    }
    /// Huge pages that the switches of a plan need, in MiB: reserved while it runs.
    fn huge_mib(&self, _plan: &Plan) -> u64 {
        0
    }
    /// The original study's results, for the cells of a plan; none of our own studies.
    fn claims(&self, _plan: &Plan) -> Vec<Claim> {
        Vec::new()
    }
}
