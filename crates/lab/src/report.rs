//! Reports: a study supplies their contents; this module defines their appearance.
//!
//! `write` makes one self-contained page, and each plot as a separate file.
//! A plot is laid out as a `scene` of lines and words (`plot`, `axis`), which `svg` writes; `png`
//! draws that file; `table` and `html` are the page.

mod axis;
mod document;
mod font;
mod html;
mod index;
mod markdown;
mod plot;
mod png;
mod scene;
mod svg;
mod table;
mod words;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub use self::index::{Entry, INDEX, write as write_index};

pub use self::document::{
    Conclusion, Document, Original, Part, Plot, Point, Series, Table, Value, Verdict, Warning,
};

/// The page's name in its folder.
pub const PAGE: &str = "report.html";
/// Name of the report as Markdown, without plots.
pub const TEXT: &str = "report.md";
/// The folder of plots beside it.
pub const PLOTS: &str = "plots";

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
        let scene = plot::draw(plot, plot::Target::File);
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
