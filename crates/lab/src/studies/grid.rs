//! Tables and plots of one measure over two axes: policies down, something else across.

use crate::plan::Cell;
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::stats::Summary;
use crate::store::Results;

/// Cells of a study that have these values.
pub struct Grid<'a> {
    /// All of them.
    pub results: &'a Results,
    /// Values that all have: axis and value.
    pub fixed: &'a [(&'a str, &'a str)],
    /// The axis whose values are rows, and lines of a plot.
    pub rows: &'a str,
    /// The axis whose values are columns, and points of a line.
    pub columns: &'a str,
}

/// The plan's values of an axis.
pub fn values<'a>(results: &'a Results, axis: &str) -> &'a [String] {
    let found = results.plan.axes.iter().find(|known| known.name == axis);
    found.map_or(&[], |axis| &axis.values)
}

/// Median and spread over the cells that have all these values.
pub fn summary(results: &Results, pairs: &[(&str, &str)], measure: &str) -> Option<Summary> {
    let wanted = |cell: &Cell| pairs.iter().all(|(axis, value)| cell.get(axis) == *value);
    Summary::of(&results.values(wanted, measure))
}

/// A summary as a table shows it.
pub fn shown(found: Option<Summary>) -> Value {
    match found {
        None => Value::Missing("not measured".into()),
        Some(Summary { median, low, high, count, .. }) => {
            let digits = digits(median);
            if count > 1 {
                Value::Spread { median, low, high, digits }
            } else {
                Value::Number(median, digits)
            }
        }
    }
}

/// Three figures of a number, more or less.
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
    fn at(&self, row: &str, column: &str, measure: &str) -> Option<Summary> {
        let pairs = [self.fixed, &[(self.rows, row), (self.columns, column)]].concat();
        summary(self.results, &pairs, measure)
    }

    /// Columns with a value in any row.
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

    /// A table of a measure; none where nothing was measured.
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

    /// A plot of a measure, with its range as error bars, on a logarithmic axis; none where nothing
    /// was measured.
    pub fn plot(
        &self,
        (title, file): (&str, &str),
        x: &str,
        y: &str,
        measure: &str,
    ) -> Option<Part> {
        let columns = self.known(measure);
        let mut series = Vec::new();
        for (colour, row) in values(self.results, self.rows).iter().enumerate() {
            let points = columns.iter().enumerate().filter_map(|(i, column)| {
                let found = self.at(row, column, measure)?;
                Some(Point { x: i as f64, y: found.median, low: found.low, high: found.high })
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
