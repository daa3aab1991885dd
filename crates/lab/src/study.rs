//! What a study is.

use std::collections::BTreeMap;

use crate::error::Fail;
use crate::plan::{Cell, Plan, Scale};
use crate::report::{Part, Seed, Verdict};

/// Studies that can be run: [`crate::studies::ALL`], or those of a test.
pub type Studies = &'static [&'static dyn Study];

/// What one run of one cell measured: a number for each measure it has, by name.
pub type Figures = BTreeMap<&'static str, f64>;

/// One column of results.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// As in the file of results: lower case, words joined by `_`.
    pub name: &'static str,
    /// What it is in, as printed: `Mbit/s`, `%`, `us`; empty for a plain count.
    pub unit: &'static str,
    /// Which way is better; none where neither is.
    pub better: Better,
    /// One sentence: what it says, and of what.
    pub about: &'static str,
}

impl Measure {
    /// One of them, as its fields are named.
    pub const fn new(
        name: &'static str,
        unit: &'static str,
        better: Better,
        about: &'static str,
    ) -> Self {
        Self { name, unit, better, about }
    }
}

/// Which way a measure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The more the better.
    More,
    /// The less the better.
    Less,
    /// It says how, not how well.
    Neither,
}

/// One run of one cell.
pub struct Run<'a> {
    /// Which cell.
    pub cell: &'a Cell,
    /// Length of the window measured, in seconds; traffic runs before it, to warm up.
    pub seconds: f64,
    /// Where processes run.
    pub stage: &'a crate::stage::Stage,
}

/// A study. All of them are in [`crate::studies::ALL`].
pub trait Study: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// One line: its question.
    fn about(&self) -> &'static str;
    /// Where it comes from; none for those of our own.
    fn seed(&self) -> Option<Seed>;
    /// What it measures, in the order of the columns.
    fn measures(&self) -> &'static [Measure];
    /// The matrix. The last axis holds what is set beside each other, the base first.
    fn plan(&self, scale: Scale) -> Plan;
    /// Whether the matrix has this cell: a seed did not measure all of its own.
    fn has(&self, _cell: &Cell) -> bool {
        true
    }
    /// Whether its guests speak what the stage says. Not so where the study has an axis for it, or
    /// where one protocol is what it is about.
    fn takes_proto(&self) -> bool {
        true
    }
    /// Programs that a cell of this plan calls.
    fn tools(&self) -> &'static [&'static str] {
        &[]
    }
    /// About how long one run of a cell takes beyond its window, in seconds.
    fn overhead_s(&self, _cell: &Cell) -> f64 {
        2.0
    }
    /// Measures one cell once.
    fn run(&self, run: &Run) -> Result<Figures, Fail>;
    /// Tables and plots: the seed's own beside ours, in its layout.
    fn report(&self, results: &crate::store::Results) -> Vec<Part>;
    /// What several machines' results tell side by side, above what each tells alone.
    fn together(&self, _all: &[crate::store::Results]) -> Vec<Part> {
        Vec::new()
    }
    /// Whether the seed's main result is seen, told from counts.
    fn judge(&self, results: &crate::store::Results) -> Vec<Verdict>;
}
