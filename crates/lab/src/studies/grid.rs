//! Tables and plots of a measure over two axes of a plan.

use crate::plan::Cell;
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::stats::Summary;
use crate::stats::paired::Estimate;
use crate::store::Results;

/// A selection of cells, arranged by two axes.
pub struct Grid<'a> {
    /// Results of the study.
    pub results: &'a Results,
    /// Values of other axes that all cells have: axis and value.
    pub fixed: &'a [(&'a str, &'a str)],
    /// Axis of the rows of a table, and of the series of a plot.
    pub rows: &'a str,
    /// Axis of the columns of a table, and of the points of a series.
    pub columns: &'a str,
}

/// Returns the plan's values of an axis.
pub fn values<'a>(results: &'a Results, axis: &str) -> &'a [String] {
    let found = results.plan.axes.iter().find(|known| known.name == axis);
    found.map_or(&[], |axis| &axis.values)
}

/// Returns statistics of a measure over the cells with all these values.
pub fn summary(results: &Results, pairs: &[(&str, &str)], measure: &str) -> Option<Summary> {
    Summary::of(&results.values(|cell| has(cell, pairs), measure))
}

/// Whether a cell has these values.
pub fn has(cell: &Cell, pairs: &[(&str, &str)]) -> bool {
    pairs.iter().all(|(axis, value)| cell.get(axis) == *value)
}

/// Returns how a measure of the cells with these values relates to that of the cells with another
/// value of one axis, in the same round.
pub fn ratio(
    results: &Results,
    pairs: &[(&str, &str)],
    measure: &str,
    axis: &str,
    base: &str,
) -> Option<Estimate> {
    results.ratio_of(|cell| has(cell, pairs), |cell| cell.with(axis, base), measure)
}

/// Returns the value of a table for an estimate.
pub fn shown(found: Option<Estimate>) -> Value {
    let digits = found.map_or(0, |found| digits(found.median));
    Value::estimate(found, digits, "not measured")
}

/// Decimal places for about three significant digits.
fn digits(value: f64) -> usize {
    match value.abs() {
        0.0 => 0,
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        n if n >= 0.1 => 2,
        n if n >= 0.001 => 4,
        _ => 6,
    }
}

impl Grid<'_> {
    fn at(&self, row: &str, column: &str, measure: &str) -> Option<Estimate> {
        let pairs = [self.fixed, &[(self.rows, row), (self.columns, column)]].concat();
        Estimate::of(&self.results.values(|cell| has(cell, &pairs), measure))
    }

    /// Returns the columns with a value in any row.
    fn known(&self, measure: &str) -> Vec<&str> {
        let rows = values(self.results, self.rows);
        let known = |column: &&String| rows.iter().any(|r| self.at(r, column, measure).is_some());
        values(self.results, self.columns).iter().filter(known).map(String::as_str).collect()
    }

    fn command(&self) -> String {
        let only = |(axis, value): &(&str, &str)| format!(" --only {axis}={value}");
        let all: String = self.fixed.iter().map(only).collect();
        format!("pvswitch lab run {}{all}", self.results.plan.study)
    }

    /// Returns a table of a measure; `None` if it has no values.
    pub fn table(&self, title: &str, note: &str, measure: &str) -> Option<Part> {
        let columns = self.known(measure);
        let rows = values(self.results, self.rows).iter().map(|row| {
            let figures = columns.iter().map(|column| shown(self.at(row, column, measure)));
            std::iter::once(Value::Text(row.clone())).chain(figures).collect()
        });
        let table = Table {
            title: title.into(),
            note: note.into(),
            columns: std::iter::once(self.rows).chain(columns.clone()).map(String::from).collect(),
            rows: rows.collect(),
            command: self.command(),
        };
        (!columns.is_empty()).then_some(Part::Table(table))
    }

    /// Returns a plot of a measure on a logarithmic axis, with ranges as error bars; `None` if it
    /// has no values.
    pub fn plot(&self, title: &str, file: &str, x: &str, y: &str, measure: &str) -> Option<Part> {
        let columns = self.known(measure);
        let mut series = Vec::new();
        for (colour, row) in values(self.results, self.rows).iter().enumerate() {
            let points = columns.iter().enumerate().filter_map(|(i, column)| {
                let found = self.at(row, column, measure)?;
                Some(Point::of(i as f64, found))
            });
            let points: Vec<Point> = points.filter(|point| point.low > 0.0).collect();
            if !points.is_empty() {
                series.push(Series { name: row.clone(), points, colour, ..Series::default() });
            }
        }
        let some = !series.is_empty();
        let plot = Plot {
            title: title.into(),
            file: file.into(),
            x: x.into(),
            categories: columns.into_iter().map(String::from).collect(),
            y: y.into(),
            log: (false, true),
            series,
            command: self.command(),
            ..Plot::default()
        };
        some.then_some(Part::Plot(plot))
    }
}
