//! What a report is made of. A study says what is to be seen; how it looks is settled here.

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
    /// What has to be known to read it; may be empty.
    pub note: String,
    /// Names of the columns, with units.
    pub columns: Vec<String>,
    /// As many values in each as there are columns.
    pub rows: Vec<Vec<Value>>,
    /// What repeats it: a command line.
    pub command: String,
}

/// One value of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Words.
    Text(String),
    /// A number, with so many digits behind the point.
    Number(f64, usize),
    /// A median with its range, digits as above.
    Spread {
        /// The median.
        median: f64,
        /// The least.
        low: f64,
        /// The most.
        high: f64,
        /// Digits behind the point.
        digits: usize,
    },
    /// A figure of the seed, or of another who measured it, as printed there.
    Seed(f64, usize),
    /// Not measured, and why: shown as a dash with the reason.
    Missing(String),
}

/// A plot with one x axis and one or two y axes.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// Its caption.
    pub title: String,
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
    /// What is drawn.
    pub series: Vec<Series>,
    /// What repeats it: a command line.
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
}

/// One point, with its error bar.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Where.
    pub x: f64,
    /// How much.
    pub y: f64,
    /// Lower end of the error bar; equal to `y` for none.
    pub low: f64,
    /// Upper end of it.
    pub high: f64,
}
