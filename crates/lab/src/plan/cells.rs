//! The cells of a plan, and the order they are measured in.

use super::{Axis, Cell, Plan};
use crate::study::Study;

/// One run that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which cell.
    pub cell: Cell,
    /// Which repeat, from 0.
    pub repeat: u32,
}

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

    /// All runs in the order measured. What is set beside each other is measured one after the
    /// other, in turn forwards and backwards: a drift of the machine then hits both alike. Repeats
    /// are far from each other, for what a machine does comes in spells.
    pub fn turns(&self, study: &dyn Study) -> Vec<Turn> {
        let cells = self.cells(study);
        let mut turns = Vec::new();
        for repeat in 0..self.repeats {
            for group in cells.chunk_by(|a, b| a.outer() == b.outer()) {
                let mut group: Vec<Turn> =
                    group.iter().map(|cell| Turn { cell: cell.clone(), repeat }).collect();
                if repeat % 2 == 1 {
                    group.reverse();
                }
                turns.append(&mut group);
            }
        }
        turns
    }
}

impl Cell {
    /// All but the last axis: what is set beside each other has this in common.
    pub fn outer(&self) -> &[(String, String)] {
        self.0.split_last().map_or(&[], |(_, outer)| outer)
    }

    /// The value of the last axis.
    pub fn last(&self) -> &str {
        self.0.last().map_or("", |(_, value)| value)
    }
}
