//! A page of several reports: what each can tell, with a link and its first plot.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::html::{begin, end, statements};
use super::plot::{self, Target};
use super::words::escape;
use super::{Document, Error, PAGE, Part, replace, svg};

/// Name of the page.
pub const INDEX: &str = "index.html";

/// A report in a folder beside the page.
pub struct Entry {
    /// Its folder's name.
    pub folder: String,
    /// What is in it.
    pub document: Document,
}

/// Writes the page of reports, each of which is in a folder of its name; returns its path.
pub fn write(folder: &Path, entries: &[Entry]) -> Result<PathBuf, Error> {
    let mut html = begin("Reports");
    let _ = write!(
        html,
        "<header>\n<div class=\"bar\"><span class=\"brand\">pvswitch lab</span><button \
         type=\"button\" id=\"theme\" class=\"needs-script\">Theme: system</button></div>\n\
         <h1>Reports</h1>\n<p class=\"question\">{} folders of results, each with what its runs \
         can tell first.</p>\n</header>\n<main id=\"content\">\n",
        entries.len()
    );
    for entry in entries {
        let Entry { folder, document } = entry;
        let (name, study) = (escape(folder), escape(&document.title));
        let _ = write!(
            html,
            "<section class=\"entry\">\n<h2 id=\"{name}\"><a href=\"{name}/{PAGE}\">{name}</a>\
             </h2>\n<p class=\"question\">{study}: {}</p>\n",
            escape(&document.question)
        );
        statements(&mut html, &document.conclusions);
        let first = document.parts.iter().find_map(|part| match part {
            Part::Plot(plot) => Some(plot),
            Part::Text { .. } | Part::Table(_) => None,
        });
        if let Some(first) = first {
            // Names are unique within one report only.
            let mut plot = first.clone();
            plot.file = format!("{folder}-{}", plot.file);
            let _ = writeln!(html, "<details><summary>{}</summary>", escape(&plot.title));
            html.push_str(&svg::inline(&plot::draw(&plot, Target::Page), "plot"));
            html.push_str("</details>\n");
        }
        html.push_str("</section>\n");
    }
    end(&mut html);
    let page = folder.join(INDEX);
    std::fs::create_dir_all(folder)
        .map_err(|source| Error::Write { path: folder.into(), source })?;
    replace(&page, html.as_bytes())?;
    Ok(page)
}
