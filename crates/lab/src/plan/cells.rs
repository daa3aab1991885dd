//! The cells of a plan, and the order of runs.

use super::{Axis, Cell, Plan, Scale, Turn};
use crate::stats::paired::{SIGNIFICANCE, pairs_needed};
use crate::study::Study;

/// Fewest pairs of the usual and the full plan of a study, and of its quick one.
const PAIRS_MIN: u32 = 10;
const QUICK_PAIRS_MIN: u32 = 5;

impl Plan {
    /// All cells that the study has, the last axis running fastest.
    pub fn cells(&self, study: &dyn Study) -> Vec<Cell> {
        let mut cells = vec![Cell(Vec::new())];
        for Axis { name, values } in &self.axes {
            let longer = cells.iter().flat_map(|cell| {
                values.iter().map(|value| {
                    let mut pairs = cell.0.clone();
                    pairs.push((name.clone(), value.clone()));
                    Cell(pairs)
                })
            });
            cells = longer.collect();
        }
        cells.retain(|cell| study.has(cell));
        cells
    }

    /// All runs in order. Cells that are compared are measured one after the other, alternately
    /// forwards and backwards, so that a drift of the machine affects both alike. Repeats are far
    /// apart, because disturbances last for some time. The control is measured once more at the
    /// other end of its group, as far from itself as any cell is from its base.
    pub fn turns(&self, study: &dyn Study) -> Vec<Turn> {
        let cells = self.cells(study);
        let control = self.control_cell(study);
        let mut turns = Vec::new();
        for repeat in 0..self.repeats {
            for group in cells.chunk_by(|a, b| a.outer() == b.outer()) {
                let turn = |cell: &Cell| Turn { cell: cell.clone(), repeat, again: false };
                let control = control.iter().filter(|cell| group.contains(cell));
                let mut group: Vec<Turn> = group.iter().map(turn).collect();
                group.extend(control.map(|cell| Turn { again: true, ..turn(cell) }));
                if repeat % 2 == 1 {
                    group.reverse();
                }
                turns.append(&mut group);
            }
        }
        turns
    }

    /// The cell that is compared with itself: the first with the values that the study names, or
    /// the first of all; `None` if the plan has no control.
    pub fn control_cell(&self, study: &dyn Study) -> Option<Cell> {
        let cells = self.cells(study);
        let wanted = |cell: &&Cell| {
            study.facts().control.iter().all(|(axis, value)| cell.get(axis) == *value)
        };
        let cell = cells.iter().find(wanted).or(cells.first())?;
        self.control.then(|| cell.clone())
    }

    /// The number of comparisons in one table: each cell with the base of its group.
    pub fn comparisons(&self, study: &dyn Study) -> usize {
        let cells = self.cells(study);
        cells.chunk_by(|a, b| a.outer() == b.outer()).map(|group| group.len() - 1).sum()
    }

    /// The plan with as many repeats as its scale and its comparisons need: at least ten, quick
    /// ones five, and so many that one comparison can be significant after the correction for all;
    /// and with a control. The smallest is judged by counts, which one run shows: it stays so.
    #[must_use]
    pub fn with_power(self, study: &dyn Study, scale: Scale) -> Self {
        let least = match scale {
            Scale::Smallest => return self,
            Scale::Quick => QUICK_PAIRS_MIN,
            Scale::Usual | Scale::Full => PAIRS_MIN,
        };
        let needed = pairs_needed(self.comparisons(study), SIGNIFICANCE);
        let repeats = least.max(u32::try_from(needed).unwrap_or(u32::MAX));
        Self { repeats, control: true, ..self }
    }
}

impl Cell {
    /// All axes but the last: the common part of cells that are compared.
    pub fn outer(&self) -> &[(String, String)] {
        self.0.split_last().map_or(&[], |(_, outer)| outer)
    }

    /// The value of the last axis.
    pub fn last(&self) -> &str {
        self.0.last().map_or("", |(_, value)| value)
    }
}
