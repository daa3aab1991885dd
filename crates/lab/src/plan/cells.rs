//! The cells of a plan, and the order of runs.

use super::{Axis, Cell, Plan};
use crate::study::Study;

/// One run to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its cell.
    pub cell: Cell,
    /// Its repeat, from 0.
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

    /// All runs in order. Cells that are compared are measured one after the other, alternately
    /// forwards and backwards, so that a drift of the machine affects both alike. Repeats are far
    /// apart, because disturbances last for some time.
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
    /// All axes but the last: the common part of cells that are compared.
    pub fn outer(&self) -> &[(String, String)] {
        self.0.split_last().map_or(&[], |(_, outer)| outer)
    }

    /// The value of the last axis.
    pub fn last(&self) -> &str {
        self.0.last().map_or("", |(_, value)| value)
    }
}
