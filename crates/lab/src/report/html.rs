//! The page: everything in one file, nothing from elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::plot::{self, Target};
use super::scene::COLOURS;
use super::words::escape;
use super::{Conclusion, Document, PLOTS, Part, Plot, Table, Warning, svg, table};

/// Longest table that is not folded.
const ROWS_OPEN: usize = 120;
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// A browser that enforces this policy loads nothing from elsewhere.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      base-uri 'none'; form-action 'none'";

/// The beginning of a page.
pub fn begin(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title} \u{2013} pvswitch lab</title>\n<style>\n{}{STYLE}{}</style>\n</head>\n\
         <body>\n<a class=\"skip\" href=\"#content\">Skip to the results</a>\n",
        colours(),
        svg::style(),
    )
}

/// The end of a page.
pub fn end(html: &mut String) {
    let _ = write!(html, "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
}

/// The whole page.
pub fn page(document: &Document) -> String {
    let mut html = begin(&document.title);
    header(&mut html, document);
    conclusions(&mut html, document);
    contents(&mut html, document);
    html.push_str("<main id=\"content\">\n");
    verdicts(&mut html, document);
    warnings(&mut html, &document.warnings);
    for (n, part) in document.parts.iter().enumerate() {
        let name = format!("part-{}", n + 1);
        match part {
            Part::Text { title, body } => text(&mut html, &name, title, body),
            Part::Table(it) => table_part(&mut html, &name, it),
            Part::Plot(it) => plot_part(&mut html, &name, it),
        }
    }
    about(&mut html, document);
    end(&mut html);
    html
}

/// The palette: light, and dark where the reader's system or the reader says so; paper is light.
fn colours() -> String {
    let list = |dark: bool| {
        COLOURS.iter().fold(String::new(), |mut list, (name, light, night)| {
            let colour = if dark { night } else { light };
            let _ = write!(list, "--{name}:#{colour:06x};");
            list
        })
    };
    let (light, dark) = (list(false), list(true));
    format!(
        ":root{{color-scheme:light;{light}}}\n@media screen and (prefers-color-scheme:dark){{\
         :root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n\
         @media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
    )
}

fn header(html: &mut String, document: &Document) {
    let _ = write!(
        html,
        "<header>\n<div class=\"bar\"><span class=\"brand\">pvswitch lab</span>\
         <button type=\"button\" id=\"theme\" class=\"needs-script\">Theme: system</button></div>\n\
         <h1>{}</h1>\n<p class=\"question\">{}</p>\n",
        escape(&document.title),
        escape(&document.question),
    );
    if let Some(original) = &document.original {
        let _ = write!(
            html,
            "<blockquote class=\"origin\"><p>{}</p>\n<footer>{}</footer></blockquote>\n",
            escape(original.claim),
            escape(original.source),
        );
    }
    command(html, &document.command, "All of it again, in this folder");
    html.push_str("</header>\n");
}

fn contents(html: &mut String, document: &Document) {
    if document.parts.len() < 2 {
        return;
    }
    html.push_str("<nav aria-label=\"Contents\">\n<h2>Contents</h2>\n<ul>\n");
    for (n, part) in document.parts.iter().enumerate() {
        let (title, class) = match part {
            Part::Text { title, .. } => (title, "chapter"),
            Part::Table(it) => (&it.title, "leaf"),
            Part::Plot(it) => (&it.title, "leaf"),
        };
        let title = escape(title);
        let _ =
            writeln!(html, "<li class=\"{class}\"><a href=\"#part-{}\">{title}</a></li>", n + 1);
    }
    html.push_str("<li class=\"chapter\"><a href=\"#measured\">How it was measured</a></li>\n");
    html.push_str("</ul>\n</nav>\n");
}

/// What can be concluded, or that nothing can: before any figure.
fn conclusions(html: &mut String, document: &Document) {
    if document.conclusions.is_empty() {
        return;
    }
    html.push_str("<section class=\"conclusions\">\n<h2>What these runs can tell</h2>\n");
    statements(html, &document.conclusions);
    html.push_str("</section>\n");
}

/// The list of what runs can tell.
pub fn statements(html: &mut String, conclusions: &[Conclusion]) {
    html.push_str("<ul class=\"statements\">\n");
    for one in conclusions {
        let (class, said) = match one.concludes {
            Some(true) => ("yes", "\u{2713} concludes"),
            Some(false) => ("no", "\u{2717} cannot tell"),
            None => ("open", "\u{2013}"),
        };
        let what = escape(&one.what);
        let _ = writeln!(html, "<li><b class=\"{class}\">{said}</b> <span>{what}</span></li>");
    }
    html.push_str("</ul>\n");
}

fn verdicts(html: &mut String, document: &Document) {
    if document.verdicts.is_empty() {
        return;
    }
    html.push_str("<section class=\"verdicts\">\n<h2>What was expected</h2>\n<ul>\n");
    for verdict in &document.verdicts {
        let (class, said) = match verdict.holds {
            Some(true) => ("yes", "\u{2713} seen"),
            Some(false) => ("no", "\u{2717} not seen"),
            None => ("open", "\u{2013} not judged"),
        };
        let what = escape(&verdict.what);
        let _ = writeln!(html, "<li><b class=\"{class}\">{said}</b> <span>{what}</span></li>");
    }
    html.push_str(
        "</ul>\n<p class=\"note\">Judged on counts (events, copies, calls), which one run shows.",
    );
    html.push_str("</p>\n</section>\n");
}

/// Warnings by reason, each with what it is about.
fn warnings(html: &mut String, warnings: &[Warning]) {
    /// So many are listed before they are folded away.
    const OPEN: usize = 6;
    if warnings.is_empty() {
        return;
    }
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for warning in warnings {
        let about = reasons.entry(&warning.why).or_default();
        if !warning.what.is_empty() {
            about.push(&warning.what);
        }
    }
    html.push_str(
        "<section class=\"warnings\" role=\"note\">\n<h2>To be read with care</h2>\n<ul>\n",
    );
    for (why, about) in reasons {
        let _ = write!(html, "<li><p>{}</p>", escape(why));
        let listed = about.iter().fold(String::new(), |mut list, what| {
            let _ = write!(list, "<li><code>{}</code></li>", escape(what));
            list
        });
        let count = about.len();
        let _ = match count {
            0 => Ok(()),
            1..=OPEN => write!(html, "<ul class=\"cells\">{listed}</ul>"),
            _ => write!(
                html,
                "<details><summary>{count} cells</summary><ul class=\"cells\">{listed}</ul>\
                 </details>"
            ),
        };
        html.push_str("</li>\n");
    }
    html.push_str("</ul>\n</section>\n");
}

fn text(html: &mut String, name: &str, title: &str, body: &str) {
    let _ = writeln!(html, "<section class=\"text\">\n<h2 id=\"{name}\">{}</h2>", escape(title));
    paragraphs(html, body, "");
    html.push_str("</section>\n");
}

/// Paragraphs are separated by empty lines.
fn paragraphs(html: &mut String, body: &str, class: &str) {
    let mut paragraph: Vec<&str> = Vec::new();
    for line in body.lines().chain([""]) {
        if !line.trim().is_empty() {
            paragraph.push(line.trim());
        } else if !paragraph.is_empty() {
            let _ = writeln!(html, "<p{class}>{}</p>", escape(&paragraph.join(" ")));
            paragraph.clear();
        }
    }
}

fn table_part(html: &mut String, name: &str, it: &Table) {
    let title = escape(&it.title);
    let _ = writeln!(html, "<section class=\"table\">\n<h3 id=\"{name}\">{title}</h3>");
    paragraphs(html, &it.note, " class=\"note\"");
    let rows = it.rows.len();
    // Long ones are for reference: what they come to is above.
    if rows > ROWS_OPEN {
        let _ = writeln!(html, "<details class=\"rows\"><summary>{rows} rows</summary>");
    }
    html.push_str(&table::html(it, name, "95 % interval of the median"));
    if rows > ROWS_OPEN {
        html.push_str("</details>\n");
    }
    command(html, &it.command, "Repeat, in this folder");
    html.push_str("</section>\n");
}

fn plot_part(html: &mut String, name: &str, it: &Plot) {
    let (title, file) = (escape(&it.title), escape(&it.file));
    let _ = writeln!(
        html,
        "<figure>\n<div class=\"whole\">\n<figcaption><h3 id=\"{name}\">{title}</h3>\
         </figcaption>"
    );
    paragraphs(html, &it.note, " class=\"note\"");
    html.push_str(&svg::inline(&plot::draw(it, Target::Page), "plot"));
    let _ = write!(
        html,
        "</div>\n<details class=\"figures\"><summary>The figures of this plot</summary>\n{}\
         </details>\n<p class=\"files\">Files: <a href=\"{PLOTS}/{file}.svg\">SVG</a> \
         <a href=\"{PLOTS}/{file}.png\">PNG</a></p>\n",
        table::html(&table::of_plot(it), name, "95 % interval of the median, the error bar"),
    );
    command(html, &it.command, "Repeat, in this folder");
    html.push_str("</figure>\n");
}

/// A command line that can be copied.
fn command(html: &mut String, line: &str, what: &str) {
    if line.is_empty() {
        return;
    }
    let line = escape(line);
    let _ = writeln!(
        html,
        "<div class=\"command\"><span>{what}:</span> <code>{line}</code> <button type=\"button\" \
         class=\"copy needs-script\" aria-label=\"Copy the command: {line}\">Copy</button></div>"
    );
}

/// Machine and method, at the end.
fn about(html: &mut String, document: &Document) {
    html.push_str("<section class=\"about\">\n<h2 id=\"measured\">How it was measured</h2>\n");
    html.push_str("<div class=\"two\">\n");
    for (title, list) in [("Method", &document.method), ("Machine", &document.machine)] {
        if list.is_empty() {
            continue;
        }
        let _ = writeln!(html, "<div>\n<h3>{title}</h3>\n<dl>");
        for (name, value) in list {
            let _ = writeln!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
        }
        html.push_str("</dl>\n</div>\n");
    }
    html.push_str("</div>\n</section>\n");
}
