//! Lays out plots: title, legend, axes, and marks between the axes.

mod frame;
mod legend;
mod marks;

use super::scene::{Anchor, Ink, Scene};
use super::words::short;
use super::{Plot, Point, Series, font};

use frame::Frame;

/// Destination of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A separate file, with its title.
    File,
    /// The page, scaled to its width.
    Page,
}

/// Dimensions, in pixels.
#[derive(Clone, Copy, Debug)]
struct Style {
    /// Width of the plot.
    width: f32,
    /// Height of the area between the axes.
    height: f32,
    /// Font size.
    font_px: f32,
    /// Font size of the title; 0: no title.
    title_px: f32,
    /// Space around text.
    gap: f32,
}

impl Style {
    fn of(target: Target) -> Self {
        match target {
            Target::File => {
                Self { width: 880.0, height: 380.0, font_px: 13.0, title_px: 17.0, gap: 8.0 }
            }
            Target::Page => {
                Self { width: 860.0, height: 360.0, font_px: 13.0, title_px: 0.0, gap: 8.0 }
            }
        }
    }
}

/// Draws a plot.
pub fn draw(plot: &Plot, target: Target) -> Scene {
    let style = Style::of(target);
    let suffix = match target {
        Target::File => "file",
        Target::Page => "page",
    };
    let name = format!("plot-{}-{suffix}", plot.file);
    let mut scene =
        Scene { title: plot.title.clone(), about: about(plot), name, ..Scene::default() };
    let mut top = style.gap * 1.5;
    if style.title_px > 0.0 {
        for line in font::wrap(&plot.title, style.title_px, style.width - 4.0 * style.gap) {
            top += style.title_px * 1.1;
            scene.words(&line, (2.0 * style.gap, top), Anchor::Start, style.title_px, Ink::Text);
        }
        top += style.gap;
    }
    top = legend::draw(&mut scene, plot, &style, top) + style.gap * 1.5;
    // The numbers of runs are above the axes.
    if plot.series.iter().flat_map(|s| &s.points).any(|p| p.count > 0) {
        top += style.font_px * 1.5;
    }
    let frame = Frame::of(plot, &style, top);
    let bottom = frame.draw(&mut scene, plot, &style);
    marks::draw(&mut scene, plot, &style, &frame);
    scene.size = (style.width, footnote(&mut scene, plot, &style, bottom) + style.gap);
    scene
}

/// Adds a note below `bottom` if points are not shown; returns its lower end.
fn footnote(scene: &mut Scene, plot: &Plot, style: &Style, bottom: f32) -> f32 {
    let hidden = plot.series.iter().map(|series| hidden(plot, series)).sum::<usize>();
    let drawn = plot.series.iter().flat_map(|s| &s.points).filter(|p| p.y.is_finite()).count();
    let note = match (drawn, hidden) {
        (0, _) => "Nothing was measured.".into(),
        (_, 0) => return bottom,
        (_, 1) => "One point at or below zero has no place on a logarithmic axis.".into(),
        (_, n) => format!("{n} points at or below zero have no place on a logarithmic axis."),
    };
    let mut bottom = bottom + style.gap;
    for line in font::wrap(&note, style.font_px, style.width - 4.0 * style.gap) {
        bottom += style.font_px * 1.2;
        scene.words(&line, (2.0 * style.gap, bottom), Anchor::Start, style.font_px, Ink::Muted);
    }
    bottom
}

/// Number of points that have no position on a logarithmic axis.
fn hidden(plot: &Plot, series: &Series) -> usize {
    let (log_x, log_y) = plot.log;
    let (log_x, log_y) = (log_x && plot.categories.is_empty(), log_y && !series.right);
    let hidden = |p: &&Point| log_x && p.x <= 0.0 || log_y && p.y <= 0.0;
    series.points.iter().filter(hidden).count()
}

/// Describes the plot in words, for screen readers.
fn about(plot: &Plot) -> String {
    let mut about = format!("{} by {}.", plot.y, plot.x);
    if !plot.right.is_empty() {
        about.push_str(&format!(" On the right axis: {}.", plot.right));
    }
    for series in &plot.series {
        let values = series.points.iter().map(|p| p.y).filter(|y| y.is_finite());
        let (low, high) =
            values.clone().fold((f64::MAX, f64::MIN), |(l, h), y| (l.min(y), h.max(y)));
        let count = values.count();
        let what = if series.bars { "bars" } else { "points" };
        let range = match count {
            0 => "nothing measured".into(),
            1 => format!("1 of {what}, at {}", short(low)),
            n => format!("{n} {what}, from {} to {}", short(low), short(high)),
        };
        about.push_str(&format!(" {}: {range}.", series.name));
    }
    about
}

/// Returns the label of a value of x.
pub fn x_label(plot: &Plot, x: f64) -> String {
    let category = || plot.categories.get(x as usize).filter(|_| x >= 0.0 && x.fract() == 0.0);
    category().cloned().unwrap_or_else(|| short(x))
}

#[cfg(test)]
mod tests;
