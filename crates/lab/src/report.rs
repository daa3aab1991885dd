//! Reports: a study supplies their contents; this module defines their appearance.
//!
//! `write` makes one self-contained page, and each plot as a separate file.
//! A plot is laid out as a `scene` of lines and words (`plot`, `axis`), which `svg` writes; `png`
//! draws that file; `table` and `html` are the page.

mod axis;
mod font;
mod html;
mod markdown;
mod plot;
mod png;
mod scene;
mod svg;
mod table;
mod words;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::study::{Original, Verdict};

/// The page's name in its folder.
pub const PAGE: &str = "report.html";
/// The same without plots as Markdown.
pub const TEXT: &str = "report.md";
/// The folder of plots beside it.
pub const PLOTS: &str = "plots";

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
    /// How it was measured: repeats, seconds, runs left out.
    pub method: Vec<(String, String)>,
    /// Whether the main result of the original study is confirmed.
    pub verdicts: Vec<Verdict>,
    /// Warnings about missing or unreliable results.
    pub warnings: Vec<Warning>,
    /// Text, tables and plots.
    pub parts: Vec<Part>,
}

/// A warning about a missing or unreliable result.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// Its cell; empty: all.
    pub what: String,
    /// The reason. Warnings of the same reason are shown together.
    pub why: String,
}

/// Failure to write a report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or a file of it.
    #[error("{path}: {source}: the report needs a folder that can be written")]
    Write {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A study's plot has no usable name.
    #[error("plot '{0}': a name of a-z, 0-9 and '-' is needed, another for each plot")]
    Name(String),
    /// A study's table is not rectangular.
    #[error("table '{title}', row {row}: {found} values for {wanted} columns")]
    Row {
        /// The table's caption.
        title: String,
        /// Which row, from 1.
        row: usize,
        /// How many values it has.
        found: usize,
        /// How many columns there are.
        wanted: usize,
    },
}

/// Writes [`PAGE`], [`TEXT`] and each plot as SVG and PNG into `folder`; returns the path of the
/// page. Files of an earlier report are replaced atomically.
pub fn write(folder: &Path, document: &Document) -> Result<PathBuf, Error> {
    check(document)?;
    let plots = folder.join(PLOTS);
    std::fs::create_dir_all(&plots)
        .map_err(|source| Error::Write { path: plots.clone(), source })?;
    for plot in document.plots() {
        let scene = plot::draw(plot, plot::Room::Alone);
        let file = svg::file(&scene);
        replace(&plots.join(format!("{}.svg", plot.file)), file.as_bytes())?;
        replace(&plots.join(format!("{}.png", plot.file)), &png::file(&file))?;
    }
    let page = folder.join(PAGE);
    replace(&folder.join(TEXT), markdown::text(document).as_bytes())?;
    replace(&page, html::page(document).as_bytes())?;
    Ok(page)
}

/// Checks names and shapes that a study supplies.
fn check(document: &Document) -> Result<(), Error> {
    let mut names = BTreeSet::new();
    for plot in document.plots() {
        let name = &plot.file;
        let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        if name.is_empty() || !name.bytes().all(plain) || !names.insert(name) {
            return Err(Error::Name(name.clone()));
        }
    }
    for part in &document.parts {
        let Part::Table(table) = part else { continue };
        let wanted = table.columns.len();
        for (row, values) in table.rows.iter().enumerate() {
            let (title, row, found) = (table.title.clone(), row + 1, values.len());
            if found != wanted {
                return Err(Error::Row { title, row, found, wanted });
            }
        }
    }
    Ok(())
}

/// Replaces a file atomically.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|source| Error::Write { path: path.into(), source })
}

impl Document {
    fn plots(&self) -> impl Iterator<Item = &Plot> {
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
    /// A number, with its decimal places.
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
    /// A figure of the original study, as published.
    Original(f64, usize),
    /// Not measured, with the reason; shown as a dash.
    Missing(String),
}

/// A plot with one x axis and one or two y axes.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// Its caption.
    pub title: String,
    /// What has to be known to read it; may be empty.
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
    /// A line without dots: a limit, of which no point was measured.
    pub model: bool,
    /// Dots without a line: what is between them is not known.
    pub loose: bool,
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
