//! A plan: the matrix of a study, as in `plan.toml`.

use std::fmt;

mod cells;
mod file;

use serde::{Deserialize, Serialize};

use crate::study::Better;

/// The format of plans and results that this version writes and reads.
pub const FORMAT: u32 = 1;

/// Extent of a study: how much of it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// The fewest cells that show the direction of the main result; for CI. Under a minute.
    Smallest,
    /// Under five minutes on two CPUs.
    Quick,
    /// The default.
    Usual,
    /// The whole matrix and durations of the original study.
    Full,
}

/// The matrix of one study.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// [`FORMAT`].
    pub format: u32,
    /// Name of the study.
    pub study: String,
    /// Number of runs of each cell.
    pub repeats: u32,
    /// Length of the window measured, in seconds.
    pub seconds: f64,
    /// Whether one cell is also compared with itself (A/A): it is measured twice in each round.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control: bool,
    /// What it is of, if a rig has measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rig: Option<RigFacts>,
    /// Names and values; the cells are all combinations. Values of the last axis are compared with
    /// each other; the first is the base.
    pub axes: Vec<Axis>,
}

impl Plan {
    /// One of this version's format.
    pub fn new(study: &str, repeats: u32, seconds: f64, axes: Vec<Axis>) -> Self {
        Self {
            format: FORMAT,
            study: study.into(),
            repeats,
            seconds,
            control: false,
            rig: None,
            axes,
        }
    }

    /// The first difference to another plan, if any.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let change = |what: &str, then: &dyn fmt::Display, now: &dyn fmt::Display| {
            Some(format!("{what} then {then}, now {now}"))
        };
        if self.study != other.study {
            return change("study", &self.study, &other.study);
        }
        if self.repeats != other.repeats {
            return change("repeats", &self.repeats, &other.repeats);
        }
        if self.seconds.to_bits() != other.seconds.to_bits() {
            return change("seconds", &self.seconds, &other.seconds);
        }
        if self.control != other.control {
            return change("control", &self.control, &other.control);
        }
        let values = |axis: &Axis| format!("{}={}", axis.name, axis.values.join(","));
        let pairs = self.axes.iter().zip(&other.axes);
        if let Some((a, b)) = pairs.into_iter().find(|(a, b)| a != b) {
            return change("axis", &values(a), &values(b));
        }
        (self != other).then(|| "its axes".into())
    }
}

/// What a rig measures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RigFacts {
    /// One line: its question.
    pub about: String,
    /// Its measures, in the order of the columns.
    pub measures: Vec<RigMeasure>,
}

/// One of them, as a [`Measure`](crate::study::Measure).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RigMeasure {
    /// Column in the file of results.
    pub name: String,
    /// Unit, as printed; empty for a plain count.
    pub unit: String,
    /// Which direction is better.
    pub better: Better,
    /// One sentence that describes it.
    pub about: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// One axis of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Lower case, words joined by `_`; a column of the results.
    pub name: String,
    /// In the order measured.
    pub values: Vec<String>,
}

impl Axis {
    /// One of `values`, written as they print.
    pub fn new<T: fmt::Display>(name: &str, values: impl IntoIterator<Item = T>) -> Self {
        let values = values.into_iter().map(|value| value.to_string()).collect();
        Self { name: name.into(), values }
    }
}

/// One combination of the axes' values.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell(pub Vec<(String, String)>);

impl Cell {
    /// Its value of an axis; empty if it has no such axis.
    pub fn get(&self, axis: &str) -> &str {
        self.0.iter().find(|(name, _)| name == axis).map_or("", |(_, value)| value)
    }

    /// Returns the same cell with another value of one axis.
    #[must_use]
    pub fn with(&self, axis: &str, value: &str) -> Self {
        let pair = |(name, old): &(String, String)| {
            (name.clone(), if name == axis { value.to_string() } else { old.clone() })
        };
        Self(self.0.iter().map(pair).collect())
    }

    /// Returns its value of an axis as a number; 0 if it is not one.
    pub fn number(&self, axis: &str) -> f64 {
        self.get(axis).parse().unwrap_or(0.0)
    }
}

/// One run to make.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// Its cell.
    pub cell: Cell,
    /// Its repeat, from 0.
    pub repeat: u32,
    /// Whether it is the second run of the control in this round.
    pub again: bool,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (axis, value)) in self.0.iter().enumerate() {
            write!(f, "{}{axis}={value}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}
