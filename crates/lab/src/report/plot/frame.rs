//! Axes with their ticks and labels, and the position of values between them.

use super::super::axis::Axis;
use super::super::scene::{Anchor, Ink, Scene, Spot};
use super::super::{Plot, Series, font};
use super::Style;

/// Length of a tick.
const TICK: f32 = 5.0;

/// Axes and their positions.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The x axis.
    pub x: Axis,
    /// The left axis.
    pub left: Axis,
    /// The right axis, if any.
    pub right: Option<Axis>,
    /// Left, upper, right and lower edge of the area between the axes.
    pub edges: [f32; 4],
    /// Distance of the ends of the x axis from the left and right edge.
    inset: [f32; 2],
    /// Labels of the x axis.
    labels: Labels,
}

/// Labels of the ticks of the x axis.
#[derive(Clone, Debug)]
enum Labels {
    /// Horizontal, in several lines.
    Lines(Vec<Vec<String>>),
    /// Slanted, each on one line.
    Slanted(Vec<String>),
}

/// Returns the values and ends of error bars of all series on the left or right axis.
fn values<'a>(plot: &'a Plot, right: bool) -> impl Iterator<Item = f64> + 'a {
    let side = plot.series.iter().filter(move |s: &&Series| s.right == right);
    side.flat_map(|s| &s.points).flat_map(|p| [p.low, p.y, p.high])
}

fn axes(plot: &Plot) -> (Axis, Option<Axis>) {
    let left: Vec<f64> = values(plot, false).chain(plot.level).collect();
    let right: Vec<f64> = values(plot, true).collect();
    let signed = left.iter().chain(&right).any(|v| *v < 0.0);
    if right.is_empty() {
        (Axis::of_values(&left, plot.log.1, true), None)
    } else if plot.log.1 || signed {
        let right = Axis::of_values(&right, false, true);
        (Axis::of_values(&left, plot.log.1, true), Some(right))
    } else {
        let (left, right) = Axis::pair(&left, &right);
        (left, Some(right))
    }
}

impl Frame {
    /// Lays out the axes of a plot, with the upper edge at `top`.
    pub fn of(plot: &Plot, style: &Style, top: f32) -> Self {
        let bars = plot.series.iter().any(|s| s.bars);
        let x_values = plot.series.iter().flat_map(|s| &s.points).map(|p| p.x);
        let x_values: Vec<f64> = x_values.collect();
        let x = match plot.categories.is_empty() {
            true => Axis::of_x(&x_values, plot.log.0, !bars),
            false => Axis::of_categories(&plot.categories),
        };
        let (left, right) = axes(plot);
        let widest = |axis: &Axis| {
            let widths = axis.ticks.iter().map(|(_, text)| font::width(text, style.font_px));
            widths.fold(0.0, f32::max) + TICK + style.gap * 0.5
        };
        let titled = |label: &str| if label.is_empty() { 0.0 } else { style.font_px * 1.6 };
        // The first and last label of the x axis may extend beyond it.
        let beyond = |tick: Option<&(f64, String)>| match plot.categories.is_empty() {
            true => tick.map_or(0.0, |(_, text)| font::width(text, style.font_px) / 2.0),
            false => 0.0,
        };
        let to_left = titled(&plot.y) + widest(&left);
        let to_right = right.as_ref().map_or(style.gap, |r| titled(&plot.right) + widest(r));
        let edges = [
            style.gap + to_left.max(beyond(x.ticks.first())),
            top,
            style.width - style.gap - to_right.max(beyond(x.ticks.last())),
            top + style.height,
        ];
        let inset = match (plot.categories.is_empty(), bars) {
            (true, true) => [(edges[2] - edges[0]) * 0.07; 2],
            (true, false) => [if x.low == 0.0 { 0.0 } else { 12.0 }, 12.0],
            (false, _) => [0.0; 2],
        };
        let room = (edges[2] - edges[0]) / plot.categories.len().max(1) as f32;
        let labels = Labels::of(&x, style, if plot.categories.is_empty() { 60.0 } else { room });
        let mut frame = Self { x, left, right, edges, inset, labels };
        frame.widen_left(style);
        frame
    }

    /// Moves the left edge so that no slanted label starts outside.
    fn widen_left(&mut self, style: &Style) {
        let Labels::Slanted(labels) = &self.labels else { return };
        let starts = self.x.ticks.iter().zip(labels).filter_map(|((value, _), label)| {
            let wide = font::width(label, style.font_px) * SLANT.to_radians().cos();
            Some(self.x_px(*value)? - wide * SLACK)
        });
        let short = style.gap - starts.fold(f32::MAX, f32::min);
        self.edges[0] += short.clamp(0.0, style.width / 4.0);
    }

    /// Returns the horizontal position of a value of x.
    pub fn x_px(&self, x: f64) -> Option<f32> {
        let (from, to) = (self.edges[0] + self.inset[0], self.edges[2] - self.inset[1]);
        Some(from + self.x.at(x)? * (to - from))
    }

    /// Returns the vertical position of a value on the left or right axis.
    pub fn y_px(&self, y: f64, right: bool) -> Option<f32> {
        let axis = self.side(right);
        Some(self.edges[3] - axis.at(y)? * (self.edges[3] - self.edges[1]))
    }

    /// Returns the left or right axis.
    pub fn side(&self, right: bool) -> &Axis {
        self.right.as_ref().filter(|_| right).unwrap_or(&self.left)
    }

    /// Draws grid lines, axes, ticks and labels; returns their lower end.
    pub fn draw(&self, scene: &mut Scene, plot: &Plot, style: &Style) -> f32 {
        let [left, top, right, bottom] = self.edges;
        for (value, _) in &self.left.ticks {
            let Some(y) = self.y_px(*value, false) else { continue };
            scene.line(vec![(left, y), (right, y)], Ink::Grid, 1.0, false);
        }
        self.draw_side(scene, style, false, left);
        if self.right.is_some() {
            self.draw_side(scene, style, true, right);
            scene.line(vec![(right, top), (right, bottom)], Ink::Axis, 1.0, false);
        }
        scene.line(vec![(left, top), (left, bottom), (right, bottom)], Ink::Axis, 1.0, false);
        let zero = self.y_px(0.0, false).filter(|y| *y < bottom - 1.0 && *y > top);
        if let Some(y) = zero {
            scene.line(vec![(left, y), (right, y)], Ink::Axis, 1.0, false);
        }
        // Where a ratio is none.
        let level = plot.level.filter(|level| self.left.clamp(*level) == *level);
        if let Some(y) = level.and_then(|level| self.y_px(level, false)) {
            scene.line(vec![(left, y), (right, y)], Ink::Text, 1.4, true);
        }
        self.draw_titles(scene, plot, style);
        self.draw_below(scene, plot, style)
    }

    fn draw_side(&self, scene: &mut Scene, style: &Style, right: bool, x: f32) {
        let (away, anchor) = if right { (1.0, Anchor::Start) } else { (-1.0, Anchor::End) };
        for (value, text) in &self.side(right).ticks {
            let Some(y) = self.y_px(*value, right) else { continue };
            scene.line(vec![(x, y), (x + away * TICK, y)], Ink::Axis, 1.0, false);
            let at = (x + away * (TICK + style.gap * 0.5), y + style.font_px * 0.35);
            scene.words(text, at, anchor, style.font_px, Ink::Muted);
        }
    }

    /// Draws the titles of the left and right axis, the latter in the colour of its series if all
    /// have the same.
    fn draw_titles(&self, scene: &mut Scene, plot: &Plot, style: &Style) {
        let [_, top, _, bottom] = self.edges;
        let middle = f32::midpoint(top, bottom);
        let size = style.font_px;
        let mut label = |text: &str, x: f32, turn: f32, ink: Ink| {
            let fits = font::width(text, size) <= bottom - top;
            let size = if fits { size } else { size * 0.8 };
            scene.rotated_text(text, (x, middle), Anchor::Middle, size, ink, turn);
        };
        label(&plot.y, style.gap + size * 0.8, -90.0, Ink::Text);
        if self.right.is_some() {
            let mut colours = plot.series.iter().filter(|s| s.right).map(|s| s.colour);
            let first = colours.next().unwrap_or_default();
            let ink = if colours.all(|c| c == first) { Ink::Subject(first) } else { Ink::Text };
            label(&plot.right, style.width - style.gap - size * 0.8, 90.0, ink);
        }
    }

    /// Draws ticks, labels and title of the x axis; returns their lower end.
    fn draw_below(&self, scene: &mut Scene, plot: &Plot, style: &Style) -> f32 {
        let bottom = self.edges[3];
        let size = style.font_px;
        for (value, _) in &self.x.ticks {
            let Some(x) = self.x_px(*value) else { continue };
            scene.line(vec![(x, bottom), (x, bottom + TICK)], Ink::Axis, 1.0, false);
        }
        let spots = self.x.ticks.iter().map(|(value, _)| self.x_px(*value).unwrap_or_default());
        let spots: Vec<f32> = spots.collect();
        let first = bottom + TICK + style.gap * 0.5 + size * 0.8;
        let mut end = match &self.labels {
            Labels::Lines(labels) => draw_lines(scene, style, &spots, labels, first),
            Labels::Slanted(labels) => draw_slanted(scene, style, &spots, labels, bottom + TICK),
        };
        if !plot.x.is_empty() {
            end += style.gap * 0.5 + size;
            let middle = f32::midpoint(self.edges[0], self.edges[2]);
            scene.words(&plot.x, (middle, end), Anchor::Middle, size, Ink::Text);
        }
        end + style.gap
    }
}

/// Draws horizontal labels, the first line at `first`; returns their lower end.
fn draw_lines(
    scene: &mut Scene,
    style: &Style,
    spots: &[f32],
    labels: &[Vec<String>],
    first: f32,
) -> f32 {
    let step = style.font_px * 1.2;
    let mut free = f32::MIN;
    for (x, label) in spots.iter().zip(labels) {
        let widest = label.iter().map(|l| font::width(l, style.font_px)).fold(0.0, f32::max);
        // A label that would overlap the previous one is omitted; its tick is not.
        if x - widest / 2.0 < free {
            continue;
        }
        free = x + widest / 2.0 + style.gap * 0.5;
        for (n, line) in label.iter().enumerate() {
            let at = (*x, first + n as f32 * step);
            scene.words(line, at, Anchor::Middle, style.font_px, Ink::Muted);
        }
    }
    let most = labels.iter().map(Vec::len).max().unwrap_or(1).max(1);
    first + (most - 1) as f32 * step + style.font_px * 0.3
}

/// Draws slanted labels below `top`; returns their lower end.
fn draw_slanted(
    scene: &mut Scene,
    style: &Style,
    spots: &[f32],
    labels: &[String],
    top: f32,
) -> f32 {
    let mut deepest = 0.0_f32;
    for (x, label) in spots.iter().zip(labels) {
        let at: Spot = (x + style.font_px * 0.4, top + style.font_px * 0.8);
        scene.rotated_text(label, at, Anchor::End, style.font_px, Ink::Muted, -SLANT);
        deepest = deepest.max(font::width(label, style.font_px));
    }
    top + style.font_px * 1.2 + deepest * SLANT.to_radians().sin()
}

/// Factor for the width of text, for fonts that are wider than ours.
pub const SLACK: f32 = 1.1;
/// Angle of slanted labels, in degrees.
const SLANT: f32 = 40.0;

impl Labels {
    /// Wraps labels to lines of width `room`; slants them if a word is wider or there are more than
    /// three lines.
    fn of(axis: &Axis, style: &Style, room: f32) -> Self {
        let room = room - style.gap;
        let size = style.font_px;
        let wrapped = axis.ticks.iter().map(|(_, text)| font::wrap(text, size, room));
        let wrapped: Vec<Vec<String>> = wrapped.collect();
        let fits = |lines: &Vec<String>| {
            lines.len() <= 3 && lines.iter().all(|line| font::width(line, size) <= room)
        };
        if wrapped.iter().all(fits) {
            Self::Lines(wrapped)
        } else {
            Self::Slanted(axis.ticks.iter().map(|(_, text)| shorten(text)).collect())
        }
    }
}

/// Shortens a slanted label, with an ellipsis.
fn shorten(text: &str) -> String {
    const CHARS_MAX: usize = 32;
    if text.chars().count() <= CHARS_MAX {
        return text.into();
    }
    let kept: String = text.chars().take(CHARS_MAX - 1).collect();
    kept.trim_end().to_owned() + "…"
}
