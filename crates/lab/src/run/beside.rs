//! Results of one study from several folders, compared cell by cell: the first part of their
//! common report.
//!
//! The first folder is the base. Only cells that the base and another folder have are compared, by
//! the runs that medians are computed from; runs of different folders are not interleaved, so that
//! a difference may be one of machines or of times.

use std::collections::BTreeMap;

use crate::machine::list;
use crate::plan::Cell;
use crate::report::{Conclusion, Part, Plot, Point, Series, Table, Value};
use crate::stats::paired::{Estimate, holm};
use crate::stats::{Summary, ratio, ratio_interval};
use crate::store::{Outcome, Results, tested};
use crate::study::{Better, Measure, Study};

/// Most cells in one chart.
const CHART_CELLS: usize = 12;

/// A chart whose medians differ by more than this has a logarithmic axis.
const LINEAR_RATIO: f64 = 50.0;

/// Finite values of one measure in one cell: of each folder.
type Values = Vec<Vec<f64>>;

/// The cells that at least two folders have, and their values.
struct Common<'a> {
    names: &'a [String],
    /// Names of the axes with more than one value among the cells.
    axes: Vec<String>,
    /// Axes with a single value, as text.
    constant: String,
    /// In the order measured.
    cells: Vec<&'a Cell>,
    /// Values by measure and cell.
    values: BTreeMap<&'static str, BTreeMap<&'a Cell, Values>>,
}

/// Returns the comparison of results of `study`, named by `names`.
pub fn parts(names: &[String], all: &[Results], study: &dyn Study) -> Vec<Part> {
    let common = Common::of(names, all, study);
    let mut parts = vec![Part::Table(folders(names, all))];
    if common.cells.is_empty() {
        let body = "No cell was measured in two of these folders.".to_string();
        parts.push(Part::Text { title: "Nothing to compare".into(), body });
        return parts;
    }
    let (mut differing, mut equal) = (Vec::new(), Vec::new());
    for measure in study.facts().measures {
        let Some(values) = common.values.get(measure.name) else { continue };
        let mut figures = values.values().flatten().flatten();
        let first = figures.next();
        match figures.all(|figure| Some(figure) == first) {
            true => equal.push(measure.name),
            false => differing.push(measure),
        }
    }
    parts.push(Part::Table(common.overview(&differing, &equal)));
    for measure in differing {
        if measure.better != Better::Neither {
            parts.push(Part::Plot(common.plot(measure)));
        }
        parts.push(Part::Table(common.table(measure)));
    }
    parts
}

/// What the runs of several folders can tell about their differences.
pub fn concluded(names: &[String], all: &[Results], study: &dyn Study) -> Vec<Conclusion> {
    let common = Common::of(names, all, study);
    let of = |(n, name): (usize, &String)| {
        let measured = study.facts().measures.iter();
        let measures = measured.filter(|measure| common.values.contains_key(measure.name));
        let found: Vec<Outcome> = measures
            .flat_map(|measure| common.tested(measure, n).into_values())
            .map(|(_, outcome)| outcome)
            .collect();
        let count = |wanted: Outcome| found.iter().filter(|outcome| **outcome == wanted).count();
        let differ = count(Outcome::More) + count(Outcome::Less);
        let what = format!(
            "{name} beside {}: of {} figures of cells {differ} differ, {} cannot tell, {} have too \
             few runs; runs of folders are no pairs, so that times may differ, not programs",
            names[0],
            found.len(),
            count(Outcome::Open),
            count(Outcome::TooFew),
        );
        Conclusion { what, concludes: Some(differ > 0) }
    };
    names.iter().enumerate().skip(1).map(of).collect()
}

/// Which folders, with their machines.
fn folders(names: &[String], all: &[Results]) -> Table {
    let columns = ["folder", "CPU", "CPUs", "switch on", "guests on", "kernel", "pvswitch"];
    let columns = columns.iter().chain(&["runs", "repeats", "seconds of a run"]);
    let rows = names.iter().zip(all).map(|(name, results)| {
        let machine = &results.machine;
        let version = machine.versions.get("pvswitch").cloned().unwrap_or_default();
        let version = match machine.built.commit.as_str() {
            "" => version,
            commit => format!("{version} ({commit})"),
        };
        // The build's date says nothing here.
        let kernel = machine.kernel.split(' ').next().unwrap_or_default().to_string();
        vec![
            Value::Text(name.clone()),
            Value::Text(machine.cpu.clone()),
            Value::Number(machine.cpus as f64, 0),
            Value::Text(list(&machine.switch_cpus)),
            Value::Text(list(&machine.guest_cpus)),
            Value::Text(kernel),
            Value::Text(version),
            Value::Number(results.runs.len() as f64, 0),
            Value::Number(f64::from(results.plan.repeats), 0),
            Value::Number(results.plan.seconds, 1),
        ]
    });
    let first = &all[0].machine;
    let note = match all.iter().skip(1).find_map(|results| first.differs(&results.machine)) {
        Some(difference) => format!("The machines differ: {difference}."),
        None => "CPU, number of CPUs, kernel and placement are the same.".into(),
    };
    Table {
        title: "Folders that are compared".into(),
        note: format!(
            "{note} The first folder is the base. Runs of different folders were not interleaved: \
             a difference may be one of machines or of times."
        ),
        columns: columns.map(ToString::to_string).collect(),
        rows: rows.collect(),
        command: String::new(),
    }
}

impl<'a> Common<'a> {
    fn of(names: &'a [String], all: &'a [Results], study: &dyn Study) -> Self {
        let mut values: BTreeMap<&'static str, BTreeMap<&'a Cell, Values>> = BTreeMap::new();
        for (folder, results) in all.iter().enumerate() {
            for run in &results.runs {
                for measure in study.facts().measures {
                    let figure = run.figures.get(measure.name).filter(|value| value.is_finite());
                    let Some(figure) = figure else { continue };
                    let cells = values.entry(measure.name).or_default();
                    let here =
                        cells.entry(&run.cell).or_insert_with(|| vec![Vec::new(); all.len()]);
                    here[folder].push(*figure);
                }
            }
        }
        // A comparison needs the base and one more.
        for cells in values.values_mut() {
            cells.retain(|_, of| {
                !of[0].is_empty() && of[1..].iter().any(|values| !values.is_empty())
            });
        }
        values.retain(|_, cells| !cells.is_empty());
        let is_common = |cell: &&Cell| values.values().any(|cells| cells.contains_key(*cell));
        let cells: Vec<&Cell> = all[0].cells().into_iter().filter(is_common).collect();
        let mut axes = Vec::new();
        let mut constant = String::new();
        for (axis, first) in cells.first().map_or(&[][..], |cell| &cell.0) {
            if cells.iter().any(|cell| cell.get(axis) != first) {
                axes.push(axis.clone());
            } else {
                constant +=
                    &format!("{}{axis}={first}", if constant.is_empty() { "" } else { ", " });
            }
        }
        Self { names, axes, constant, cells, values }
    }

    /// The cells of one measure, in the order measured.
    fn rows(&self, measure: &Measure) -> impl Iterator<Item = (&'a Cell, &Values)> {
        let values = &self.values[measure.name];
        self.cells.iter().filter_map(|cell| Some((*cell, values.get(cell)?)))
    }

    /// Values of the axes that differ.
    fn label(&self, cell: &Cell) -> String {
        let label = self.axes.iter().map(|axis| cell.get(axis)).collect::<Vec<_>>().join(" ");
        if label.is_empty() { "the only cell".into() } else { label }
    }

    /// All measures: how many cells differ, and by how much.
    fn overview(&self, measures: &[&Measure], equal: &[&str]) -> Table {
        let mut rows = Vec::new();
        for measure in measures {
            for (n, name) in self.names.iter().enumerate().skip(1) {
                let of = |(_, all): (&Cell, &Values)| (all[n].clone(), all[0].clone());
                let pairs: Vec<_> = self.rows_of(measure, n).map(of).collect();
                if pairs.is_empty() {
                    continue;
                }
                let ratios: Vec<f64> = pairs.iter().filter_map(|(a, b)| ratio(a, b)).collect();
                let of_ratios = |of: fn(Summary) -> f64| match Summary::of(&ratios) {
                    Some(summary) => Value::Number(of(summary), 3),
                    None => Value::Missing("no cell has a ratio: the base is 0".into()),
                };
                let outcomes = outcomes(&pairs);
                let count = |wanted: Outcome| {
                    let those = outcomes.iter().filter(|(_, outcome)| *outcome == wanted);
                    Value::Number(those.count() as f64, 0)
                };
                rows.push(vec![
                    Value::Text(measure.name.into()),
                    Value::Text(name.clone()),
                    Value::Text(direction(measure).into()),
                    of_ratios(|summary| summary.median),
                    of_ratios(|summary| summary.low),
                    of_ratios(|summary| summary.high),
                    count(Outcome::More),
                    count(Outcome::Less),
                    count(Outcome::Open),
                    count(Outcome::TooFew),
                ]);
            }
        }
        let mut note = format!(
            "Ratios of {} common cells to {}. More, less: cells with p below 0.05, corrected for \
             all cells of the measure (Holm).",
            self.cells.len(),
            self.names[0],
        );
        if !self.constant.is_empty() {
            note += &format!(" In all of them: {}.", self.constant);
        }
        if !equal.is_empty() {
            note += &format!(" One value in all runs of all folders: {}.", equal.join(", "));
        }
        let columns = ["measure", "folder", "better", "median ratio", "least", "most"];
        let columns = columns.iter().chain(&["more", "less", "cannot tell", "too few runs"]);
        Table {
            title: format!("All measures, beside {}", self.names[0]),
            note,
            columns: columns.map(ToString::to_string).collect(),
            rows,
            command: String::new(),
        }
    }

    /// The cells of a measure that folder `n` has, too.
    fn rows_of(&self, measure: &Measure, n: usize) -> impl Iterator<Item = (&'a Cell, &Values)> {
        self.rows(measure).filter(move |(_, all)| !all[n].is_empty())
    }

    /// p and result of each cell of a measure that folder `n` has, too.
    fn tested(&self, measure: &Measure, n: usize) -> BTreeMap<&'a Cell, (f64, Outcome)> {
        let cells = self.rows_of(measure, n).map(|(cell, _)| cell);
        let values = self.rows_of(measure, n).map(|(_, all)| (all[n].clone(), all[0].clone()));
        cells.zip(outcomes(&values.collect::<Vec<_>>())).collect()
    }

    /// All folders in one chart: all cells, or those that differ most.
    fn plot(&self, measure: &Measure) -> Plot {
        let mut cells: Vec<(&Cell, &Values)> = self.rows(measure).collect();
        let common = cells.len();
        let mut note = "Median of each cell.".to_string();
        if common > CHART_CELLS {
            let distance = |(_, all): &(&Cell, &Values)| {
                let ratios = all[1..].iter().filter_map(|values| ratio(values, &all[0]));
                ratios.map(|ratio| ratio.ln().abs()).fold(0.0, f64::max)
            };
            let mut far = cells.clone();
            far.sort_by(|a, b| distance(b).total_cmp(&distance(a)));
            far.truncate(CHART_CELLS);
            cells.retain(|(cell, _)| far.iter().any(|(other, _)| other == cell));
            note += &format!(
                " The {CHART_CELLS} of {common} cells that differ most; the table has all."
            );
        }
        let series = self.names.iter().enumerate().map(|(n, name)| {
            let summaries = cells
                .iter()
                .enumerate()
                .filter_map(|(x, (_, all))| Some(Point::of(x as f64, Estimate::of(&all[n])?)));
            let points = summaries.collect();
            Series { name: name.clone(), points, colour: n, bars: true, ..Series::default() }
        });
        let points =
            |series: &Series| series.points.iter().map(|point| point.y).collect::<Vec<_>>();
        let series: Vec<Series> = series.collect();
        let all = series.iter().flat_map(points);
        let (least, most) = all.fold((f64::MAX, 0.0), |(l, m), y| (f64::min(l, y), f64::max(m, y)));
        Plot {
            title: format!("{}: {}", measure.name, self.names.join(", ")),
            note,
            file: format!("beside-{}", measure.name.replace('_', "-")),
            x: self.axes.join(", "),
            categories: cells.iter().map(|(cell, _)| self.label(cell)).collect(),
            y: unit(measure),
            log: (false, least > 0.0 && most > LINEAR_RATIO * least),
            series,
            ..Plot::default()
        }
    }

    /// Each cell of a measure, with ratio, interval and p.
    fn table(&self, measure: &Measure) -> Table {
        let mut columns = self.axes.clone();
        columns.extend(self.names.iter().cloned());
        for name in &self.names[1..] {
            // With two folders it is clear which is meant.
            let of = if self.names.len() > 2 { format!(" of {name}") } else { String::new() };
            let more = ["ratio", "95 % interval", "p", "result", "runs"];
            columns.extend(more.iter().map(|column| format!("{column}{of}")));
        }
        let tested: Vec<_> = (1..self.names.len()).map(|n| self.tested(measure, n)).collect();
        let rows = self.rows(measure).map(|(cell, all)| {
            let mut row: Vec<Value> =
                self.axes.iter().map(|axis| Value::Text(cell.get(axis).into())).collect();
            let digits = digits(Summary::of(&all[0]).map_or(0.0, |summary| summary.median));
            let spread =
                |values: &Vec<f64>| Value::estimate(Estimate::of(values), digits, "not measured");
            row.extend(all.iter().map(spread));
            for (values, tested) in all[1..].iter().zip(&tested) {
                row.extend(compared(values, &all[0], tested.get(cell)));
            }
            row
        });
        Table {
            title: format!("{}, cell by cell", measure.name),
            note: format!(
                "{} ({}). Better: {}. Ratio: median of the ratios of all runs of one folder to \
                 all of the other, {} below, since no two are a pair; its interval and p by the \
                 two-sided Mann-Whitney U test (exact permutation of ranks up to 40 runs), p \
                 corrected for all cells of the measure (Holm).",
                measure.about.trim_end_matches('.'),
                unit(measure),
                direction(measure),
                self.names[0],
            ),
            columns,
            rows: rows.collect(),
            command: String::new(),
        }
    }
}

/// Corrected p-values and what follows, of cells with the values of a folder and of the base.
fn outcomes(pairs: &[(Vec<f64>, Vec<f64>)]) -> Vec<(f64, Outcome)> {
    let p = holm(&pairs.iter().map(|(ours, base)| tested(ours, base)).collect::<Vec<_>>());
    let outcome = |(p, (ours, base)): (f64, &(Vec<f64>, Vec<f64>))| {
        (p, Outcome::of_folders(p, ours, base, pairs.len()))
    };
    p.into_iter().zip(pairs).map(outcome).collect()
}

/// Ratio, interval, p, result and number of runs of one cell.
fn compared(ours: &[f64], base: &[f64], tested: Option<&(f64, Outcome)>) -> [Value; 5] {
    let Some((p, outcome)) = tested else {
        return std::array::from_fn(|_| Value::Missing("not measured".into()));
    };
    let ratio = match ratio(ours, base) {
        Some(ratio) => Value::Number(ratio, 3),
        None => Value::Missing("the base is 0, or a value is negative".into()),
    };
    let interval = match ratio_interval(ours, base) {
        Some((low, high)) => Value::Text(format!("{low:.3} to {high:.3}")),
        None => Value::Text("\u{2013}".into()),
    };
    // A single run has no spread: whatever its ratio is, it may be chance.
    let once = if ours.len() == 1 || base.len() == 1 { ", n = 1" } else { "" };
    let runs = format!("{} and {}{once}", ours.len(), base.len());
    [ratio, interval, Value::Number(*p, 4), Value::Text(outcome.to_string()), Value::Text(runs)]
}

/// Decimal places for about four significant digits.
fn digits(value: f64) -> usize {
    match value.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 1.0 || size == 0.0 => 3,
        _ => 5,
    }
}

fn unit(measure: &Measure) -> String {
    match measure.unit {
        "" => measure.name.into(),
        unit => format!("{}, {unit}", measure.name),
    }
}

fn direction(measure: &Measure) -> &'static str {
    match measure.better {
        Better::More => "more",
        Better::Less => "less",
        Better::Neither => "neither",
    }
}
