//! What a figure in a document is of: a query for results, in words. `docs/results/README.md` has
//! the language.

use pvswitch_lab::claims::{self, State};
use pvswitch_lab::plan::{Axis, Cell};
use pvswitch_lab::stats::Summary;
use pvswitch_lab::stats::paired::Estimate;
use pvswitch_lab::store::Results;
use pvswitch_lab::studies;

/// Any value of an axis: runs of all its cells are taken together.
const ANY: &str = "*";

/// A query, as written after the words of a marker.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Folder below `docs/results`.
    pub folder: String,
    /// Axes with their values, in the order written; several values make several figures.
    axes: Vec<(String, Vec<String>)>,
    /// Axes of the cell that the figures are divided by.
    over: Vec<(String, String)>,
    measure: String,
    scale: f64,
    what: What,
}

/// What is taken of a measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum What {
    #[default]
    Median,
    /// Median with its 95 % interval; of fewer than five runs or pairs, with the least and the
    /// greatest.
    Spread,
    /// The ends of `Spread`.
    Interval,
    /// `Spread`, and how many runs or pairs.
    Counted,
    /// Least and greatest run.
    Range,
    Mean,
    Sum,
    /// How many runs.
    Runs,
    /// Least and greatest of the cells' medians.
    Between,
    /// Median of the cells' medians.
    Middle,
    /// Least and greatest run of all the cells.
    Extremes,
    /// Of the original study's results: how many were measured, are confirmed, refuted, and not
    /// confirmed.
    Claims,
    /// Of the cell that was compared with itself (A/A): `Spread` of its pairs' ratios.
    Noise,
}

impl What {
    fn of(word: &str) -> Option<Self> {
        Some(match word {
            "median" => Self::Median,
            "spread" => Self::Spread,
            "interval" => Self::Interval,
            "counted" => Self::Counted,
            "range" => Self::Range,
            "mean" => Self::Mean,
            "sum" => Self::Sum,
            "runs" => Self::Runs,
            "between" => Self::Between,
            "middle" => Self::Middle,
            "extremes" => Self::Extremes,
            "claims" => Self::Claims,
            "noise" => Self::Noise,
            _ => return None,
        })
    }
}

/// Whether a word is the name of a folder of results: of a study or of a rig.
fn is_folder(word: &str) -> bool {
    word.starts_with("lab-") || word.starts_with("rig-")
}

impl Query {
    /// The folder that a marker names, if it does.
    pub fn folder_in(words: &str) -> Option<&str> {
        words.split_whitespace().find(|word| is_folder(word))
    }

    /// The query that these words make of the one before; a folder begins a new one.
    pub fn next(&self, words: &str, axes: &[Axis]) -> Result<Self, String> {
        let mut query = match Self::folder_in(words) {
            Some(folder) => Self { folder: folder.into(), scale: 1.0, ..Self::default() },
            None => self.clone(),
        };
        let mut over = false;
        for word in words.split_whitespace().filter(|word| !is_folder(word)) {
            if let Some((name, list)) = word.split_once('=') {
                let Some(axis) = axes.iter().find(|axis| axis.name == name) else {
                    return Err(format!("{}: no axis '{name}'", query.folder));
                };
                query.set(name, values(axis, list)?, over)?;
            } else if let Some(what) = What::of(word) {
                query.what = what;
            } else {
                match word {
                    "over" => (over, query.over) = (true, Vec::new()),
                    "nothing" => over = false,
                    measure => query.set_measure(measure)?,
                }
            }
        }
        let has_cells = ![What::Claims, What::Noise].contains(&query.what);
        for axis in axes.iter().filter(|axis| axis.values.len() > 1 && has_cells) {
            if !query.axes.iter().any(|(name, _)| *name == axis.name) {
                return Err(format!(
                    "{}: say {}=VALUE, or {}=*",
                    query.folder, axis.name, axis.name
                ));
            }
        }
        Ok(query)
    }

    fn set(&mut self, name: &str, values: Vec<String>, over: bool) -> Result<(), String> {
        if over {
            let [value] = &values[..] else { return Err(format!("over {name}: one value")) };
            self.over.push((name.into(), value.clone()));
        } else if let Some(axis) = self.axes.iter_mut().find(|(known, _)| known == name) {
            axis.1 = values;
        } else {
            self.axes.push((name.into(), values));
        }
        Ok(())
    }

    fn set_measure(&mut self, word: &str) -> Result<(), String> {
        let (measure, scale) = word.split_once('/').unwrap_or((word, "1"));
        self.measure = measure.into();
        self.scale = scale.parse().map_err(|_| format!("{word}: '{scale}' is no number"))?;
        Ok(())
    }

    /// The figures, in the order they are to be written.
    pub fn figures(&self, results: &Results) -> Result<Vec<f64>, String> {
        if self.what == What::Claims {
            return self.claims(results);
        }
        if self.what == What::Noise {
            let found = results.noise(&self.measure);
            let none = || format!("{}: no A/A of '{}'", self.folder, self.measure);
            return found.map(|of| vec![of.median, of.low, of.high]).ok_or_else(none);
        }
        let mut cells: Vec<Vec<(String, String)>> = vec![Vec::new()];
        for (name, values) in &self.axes {
            let longer = cells.iter().flat_map(|cell| {
                let with = |value: &String| [&cell[..], &[(name.clone(), value.clone())]].concat();
                values.iter().map(with)
            });
            cells = longer.collect();
        }
        let mut figures = Vec::new();
        for cell in &cells {
            figures.extend(self.of_cell(results, cell)?);
        }
        let all = Summary::of(&figures).expect("there is a cell");
        Ok(match self.what {
            What::Between | What::Extremes => vec![all.low, all.high],
            What::Middle => vec![all.median],
            _ => figures,
        })
    }

    /// Whether it is of the noise floor.
    pub fn is_noise(&self) -> bool {
        self.what == What::Noise
    }

    /// The original's results, judged as in the report.
    fn claims(&self, results: &Results) -> Result<Vec<f64>, String> {
        let study = studies::of(&results.plan, studies::ALL).map_err(|error| error.to_string())?;
        let found = claims::judge(results, study, study.claims(&results.plan));
        let count = |state| found.iter().filter(|finding| finding.state == state).count() as f64;
        if found.is_empty() || count(State::TooFew) + count(State::Uneven) > 0.0 {
            let none = "no results of an original, too few pairs, or guests served unevenly";
            return Err(format!("{}: {none}", self.folder));
        }
        let states = [State::Confirmed, State::Refuted, State::NotConfirmed].map(count);
        Ok([&[states.iter().sum()], &states[..]].concat())
    }

    /// Figures of one cell: by the same functions as in reports.
    fn of_cell(&self, results: &Results, cell: &[(String, String)]) -> Result<Vec<f64>, String> {
        let values = self.values(results, cell)?;
        let of_runs = Summary::of(&values).expect("there is a value");
        let found = if self.over.is_empty() {
            Estimate::of(&values).expect("there is a value").over(self.scale)
        } else {
            self.ratio(results, cell)?
        };
        let Estimate { median, low, high, count, .. } = found;
        let plain = |figures: Vec<f64>| match &self.over[..] {
            [] => Ok(figures.iter().map(|figure| figure / self.scale).collect()),
            _ => Err(format!("{}: of ratios there are medians and intervals only", self.folder)),
        };
        match self.what {
            What::Median | What::Between | What::Middle => Ok(vec![median]),
            What::Spread => Ok(vec![median, low, high]),
            What::Interval => Ok(vec![low, high]),
            What::Counted => Ok(vec![median, low, high, count as f64]),
            What::Runs => Ok(vec![count as f64]),
            What::Range | What::Extremes => plain(vec![of_runs.low, of_runs.high]),
            What::Mean => plain(vec![of_runs.mean]),
            What::Sum => plain(vec![values.iter().sum()]),
            What::Claims | What::Noise => unreachable!("they are of no cell that is named"),
        }
    }

    fn ratio(&self, results: &Results, cell: &[(String, String)]) -> Result<Estimate, String> {
        let base = |of: &Cell| {
            self.over.iter().fold(of.clone(), |cell, (axis, value)| cell.with(axis, value))
        };
        let study = studies::of(&results.plan, studies::ALL).map_err(|error| error.to_string())?;
        for of in results.cells().into_iter().filter(|of| is_of(of, cell)) {
            if let Some(jain) = results.uneven(study, of, &base(of), &self.measure) {
                let why = format!("Jain's index {jain:.3} of what guests got");
                return Err(format!("{}: {of}: no speed-up: {why}", self.folder));
            }
        }
        let found = results.ratio_of(|of| is_of(of, cell), base, &self.measure);
        found.ok_or_else(|| format!("{}: no pairs of '{}' with that", self.folder, self.measure))
    }

    fn values(&self, results: &Results, cell: &[(String, String)]) -> Result<Vec<f64>, String> {
        let values = results.values(|of| is_of(of, cell), &self.measure);
        if values.is_empty() {
            let cell: Vec<String> = cell.iter().map(|(name, v)| format!("{name}={v}")).collect();
            return Err(format!("{}: no '{}' of {}", self.folder, self.measure, cell.join(" ")));
        }
        Ok(values)
    }
}

fn is_of(cell: &Cell, values: &[(String, String)]) -> bool {
    values.iter().all(|(name, value)| value == ANY || cell.get(name) == value)
}

/// A list of an axis's values, some of which have a comma themselves.
fn values(axis: &Axis, list: &str) -> Result<Vec<String>, String> {
    if list == ANY {
        return Ok(vec![ANY.into()]);
    }
    let (mut values, mut rest) = (Vec::new(), list);
    while !rest.is_empty() {
        let begins = |value: &&String| {
            rest.strip_prefix(value.as_str()).is_some_and(|r| r.is_empty() || r.starts_with(','))
        };
        let known = axis.values.iter().filter(begins).max_by_key(|value| value.len());
        let Some(value) = known else {
            return Err(format!("{}={rest}: it has {}", axis.name, axis.values.join(", ")));
        };
        values.push(value.clone());
        rest = rest[value.len()..].trim_start_matches(',');
    }
    Ok(values)
}
