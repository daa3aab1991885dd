//! Content of a report, without its form.

use crate::stats::paired::Estimate;

/// Contents of a report.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// The study's name.
    pub title: String,
    /// Its question, in one line.
    pub question: String,
    /// The published study that it repeats, if any.
    pub original: Option<Original>,
    /// Command line that repeats the study; empty: none.
    pub command: String,
    /// Description of the machine: names and values.
    pub machine: Vec<(String, String)>,
    /// Method: repeats, seconds, runs left out.
    pub method: Vec<(String, String)>,
    /// What the runs can tell, and what they cannot: above all else.
    pub conclusions: Vec<Conclusion>,
    /// Whether the main result of the original study is confirmed.
    pub verdicts: Vec<Verdict>,
    /// Warnings about missing or unreliable results.
    pub warnings: Vec<Warning>,
    /// Text, tables and plots.
    pub parts: Vec<Part>,
}

/// The published study that a study repeats.
#[derive(Clone, Copy, Debug)]
pub struct Original {
    /// Author, place and date, in one line.
    pub source: &'static str,
    /// Its main result, in one or two sentences.
    pub claim: &'static str,
}

/// The result of one expectation, judged by counts (events, copies, calls), never by times.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The expectation, with the measured figures.
    pub what: String,
    /// Whether it holds; `None`: undecidable on this machine or with this plan; `what` says why.
    pub holds: Option<bool>,
}

/// What the runs can tell by their number.
#[derive(Clone, Debug)]
pub struct Conclusion {
    /// The statement, beginning with the number of pairs.
    pub what: String,
    /// `Some(false)`: nothing can be concluded; `None`: neither good nor bad.
    pub concludes: Option<bool>,
}

/// A warning about a missing or unreliable result.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// Its cell; empty: all.
    pub what: String,
    /// The reason. Warnings of the same reason are shown together.
    pub why: String,
}

impl Document {
    pub(super) fn plots(&self) -> impl Iterator<Item = &Plot> {
        self.parts.iter().filter_map(|part| match part {
            Part::Plot(plot) => Some(plot),
            Part::Text { .. } | Part::Table(_) => None,
        })
    }
}

/// One part of a report, in the order shown.
#[derive(Clone, Debug)]
pub enum Part {
    /// A heading with what is to be said below it; paragraphs are separated by empty lines.
    Text {
        /// The heading.
        title: String,
        /// Plain text.
        body: String,
    },
    /// A table that can be sorted.
    Table(Table),
    /// A plot.
    Plot(Plot),
}

/// A table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Its caption.
    pub title: String,
    /// Note that a reader needs; may be empty.
    pub note: String,
    /// Names of the columns, with units.
    pub columns: Vec<String>,
    /// Rows, each with as many values as there are columns.
    pub rows: Vec<Vec<Value>>,
    /// Command line that repeats it.
    pub command: String,
}

/// One value of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Words.
    Text(String),
    /// A number, with its decimal places.
    Number(f64, usize),
    /// A median of runs or of pairs with its ends, digits as above.
    Spread(Estimate, usize),
    /// A figure of the original study, as published.
    Original(f64, usize),
    /// Not measured, with the reason; shown as a dash.
    Missing(String),
}

impl Value {
    /// An estimate, or why there is none.
    pub fn estimate(found: Option<Estimate>, digits: usize, missing: &str) -> Self {
        found.map_or_else(|| Self::Missing(missing.into()), |found| Self::Spread(found, digits))
    }
}

/// A plot with one x axis and one or two y axes.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// Its caption.
    pub title: String,
    /// Note that a reader needs; may be empty.
    pub note: String,
    /// Name of the file without its ending: lower case, words joined by `-`; unique in a report.
    pub file: String,
    /// Label of the x axis.
    pub x: String,
    /// Labels of the points of the x axis at 0, 1, ...; empty where x is a number.
    pub categories: Vec<String>,
    /// Label of the left axis.
    pub y: String,
    /// Label of the right axis; empty for none.
    pub right: String,
    /// Whether x and the left axis are logarithmic.
    pub log: (bool, bool),
    /// A line across at this value of the left axis: 1 where it has ratios.
    pub level: Option<f64>,
    /// Series that are drawn.
    pub series: Vec<Series>,
    /// Command line that repeats it.
    pub command: String,
}

/// One line, or one set of bars, of a plot.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<Point>,
    /// Which colour, counted from 0; series of one subject share it.
    pub colour: usize,
    /// Dashed: a series that is not ours, or not the point of the plot.
    pub dashed: bool,
    /// Belongs to the right axis.
    pub right: bool,
    /// Bars in place of a line.
    pub bars: bool,
    /// A line without dots: a limit, of which no point was measured.
    pub model: bool,
    /// Dots without a line: what is between them is not known.
    pub loose: bool,
}

/// One point, with its error bar.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Position on the x axis.
    pub x: f64,
    /// Value on the y axis.
    pub y: f64,
    /// Lower end of the error bar; equal to `y` for none.
    pub low: f64,
    /// Upper end of it.
    pub high: f64,
    /// Number of runs or pairs that it is the median of; 0: it is none, but published or a model.
    pub count: usize,
    /// Whether the error bar is an interval of the median, not the range of too few runs.
    pub interval: bool,
}

impl Point {
    /// One of runs or pairs.
    pub fn of(x: f64, found: Estimate) -> Self {
        let Estimate { count, median: y, low, high, interval } = found;
        Self { x, y, low, high, count, interval }
    }

    /// One that is not measured.
    pub fn at(x: f64, y: f64) -> Self {
        Self { x, y, low: y, high: y, ..Self::default() }
    }
}
