//! Writes scenes as SVG: inline in a page, whose style sheet has the colours, or as a file.

use std::fmt::Write as _;

use super::scene::{Anchor, COLOURS, DASHES, Ink, Item, Outline, Scene, Shape, Spot, Words};
use super::words::escape;

/// Fonts of about the width of the one that text was measured with.
const FONTS: &str = "Roboto,Inter,&quot;Helvetica Neue&quot;,Arial,&quot;Liberation Sans&quot;,\
                     sans-serif";

/// Returns an SVG file, light or dark by the reader's preference.
pub fn file(scene: &Scene) -> String {
    let (wide, high) = scene.size;
    let mut svg = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" \
         width=\"{wide}\" height=\"{high}\" {}<style>\n{}@media (prefers-color-scheme: dark) \
         {{\n{}}}\n</style>\n<rect width=\"100%\" height=\"100%\" class=\"f-paper\"/>\n",
        head(scene),
        classes(|n| format!("#{:06x}", COLOURS[n].1)),
        classes(|n| format!("#{:06x}", COLOURS[n].2)),
    );
    body(&mut svg, scene);
    svg
}

/// Returns inline SVG for a page with [`style`] in its style sheet.
pub fn inline(scene: &Scene, class: &str) -> String {
    let mut svg = format!("<svg class=\"{class}\" {}", head(scene));
    body(&mut svg, scene);
    svg
}

/// Returns the classes of inline SVG, with the page's colours.
pub fn style() -> String {
    classes(|n| format!("var(--{})", COLOURS[n].0))
}

/// Returns classes for fill (`f-`) and stroke (`s-`) in each colour.
fn classes(colour: impl Fn(usize) -> String) -> String {
    let mut css = String::new();
    for (n, (name, ..)) in COLOURS.iter().enumerate() {
        let colour = colour(n);
        let _ = writeln!(css, ".f-{name}{{fill:{colour}}}.s-{name}{{stroke:{colour}}}");
    }
    css
}

/// Returns attributes of the first tag, and title and description for screen readers.
fn head(scene: &Scene) -> String {
    let (name, (wide, high)) = (escape(&scene.name), scene.size);
    format!(
        "viewBox=\"0 0 {wide} {high}\" role=\"img\" aria-labelledby=\"{name}-t {name}-d\" \
         font-family=\"{FONTS}\" fill=\"none\" stroke-linejoin=\"round\" \
         stroke-linecap=\"butt\">\n<title id=\"{name}-t\">{}</title>\n<desc id=\"{name}-d\">{}\
         </desc>\n",
        escape(&scene.title),
        escape(&scene.about),
    )
}

fn body(svg: &mut String, scene: &Scene) {
    for item in &scene.items {
        match item {
            Item::Shape(it) => shape(svg, it),
            Item::Words(it) => words(svg, it),
        }
        svg.push('\n');
    }
    svg.push_str("</svg>\n");
}

fn shape(svg: &mut String, shape: &Shape) {
    let mut class = String::new();
    let mut more = String::new();
    if let Some((ink, cover)) = shape.fill {
        let _ = write!(class, "f-{} ", ink.name());
        if cover < 1.0 {
            let _ = write!(more, " fill-opacity=\"{}\"", tenths(cover));
        }
    }
    if let Some(stroke) = shape.stroke {
        let _ = write!(class, "s-{}", stroke.ink.name());
        let _ = write!(more, " stroke-width=\"{}\"", tenths(stroke.width));
        if stroke.dashed {
            let _ = write!(more, " stroke-dasharray=\"{} {}\"", DASHES[0], DASHES[1]);
        }
    }
    let class = class.trim_end();
    let tag = match &shape.outline {
        Outline::Circle((x, y), radius) => {
            let (x, y, radius) = (tenths(*x), tenths(*y), tenths(*radius));
            let _ = write!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"");
            "circle"
        }
        Outline::Line(spots) => {
            let _ = write!(svg, "<path d=\"{}\"", path(spots));
            "path"
        }
        Outline::Area(spots) => {
            let _ = write!(svg, "<path d=\"{}z\"", path(spots));
            "path"
        }
    };
    let _ = write!(svg, " class=\"{class}\"{more}");
    if shape.hint.is_empty() {
        svg.push_str("/>");
    } else {
        let _ = write!(svg, "><title>{}</title></{tag}>", escape(&shape.hint));
    }
}

fn path(spots: &[Spot]) -> String {
    let mut path = String::new();
    for (n, (x, y)) in spots.iter().enumerate() {
        let _ = write!(path, "{}{} {}", if n == 0 { 'M' } else { 'L' }, tenths(*x), tenths(*y));
    }
    path
}

fn words(svg: &mut String, words: &Words) {
    let anchor = match words.anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let (x, y, size) = (tenths(words.at.0), tenths(words.at.1), tenths(words.size));
    let ink: Ink = words.ink;
    let _ = write!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\" class=\"f-{}\"",
        ink.name()
    );
    if words.turn != 0.0 {
        let _ = write!(svg, " transform=\"rotate({} {x} {y})\"", words.turn);
    }
    let _ = write!(svg, ">{}</text>", escape(&words.text));
}

/// Rounds a length to a tenth of a pixel.
fn tenths(length: f32) -> f32 {
    (length * 10.0).round() / 10.0
}
