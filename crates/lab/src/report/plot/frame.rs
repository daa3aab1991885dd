//! Axes with their marks, and where a value is between them.

use super::super::axis::Axis;
use super::super::scene::{Anchor, Ink, Scene, Spot};
use super::super::{Plot, Series, font};
use super::Look;

/// Length of a mark.
const MARK: f32 = 5.0;

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The x axis.
    pub x: Axis,
    /// The left axis.
    pub left: Axis,
    /// The right one, if there is one.
    pub right: Option<Axis>,
    /// Its left, upper, right and lower edge.
    pub edges: [f32; 4],
    /// How far inside the edges the ends of the x axis are.
    inset: [f32; 2],
    /// How the marks of x are written.
    below: Below,
}

/// How the marks of the x axis are written.
#[derive(Clone, Debug)]
enum Below {
    /// In lines.
    Lines(Vec<Vec<String>>),
    /// Slanting, each on one line.
    Slanting(Vec<String>),
}

/// All ends of what a side's series show.
fn values<'a>(plot: &'a Plot, right: bool) -> impl Iterator<Item = f64> + 'a {
    let side = plot.series.iter().filter(move |s: &&Series| s.right == right);
    side.flat_map(|s| &s.points).flat_map(|p| [p.low, p.y, p.high])
}

fn axes(plot: &Plot) -> (Axis, Option<Axis>) {
    let left: Vec<f64> = values(plot, false).collect();
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
    /// Of a plot, with its upper edge at `top`.
    pub fn of(plot: &Plot, look: &Look, top: f32) -> Self {
        let bars = plot.series.iter().any(|s| s.bars);
        let places = plot.series.iter().flat_map(|s| &s.points).map(|p| p.x);
        let places: Vec<f64> = places.collect();
        let x = match plot.categories.is_empty() {
            true => Axis::of_places(&places, plot.log.0, !bars),
            false => Axis::of_categories(&plot.categories),
        };
        let (left, right) = axes(plot);
        let widest = |axis: &Axis| {
            let widths = axis.marks.iter().map(|(_, text)| font::width(text, look.letters));
            widths.fold(0.0, f32::max) + MARK + look.gap * 0.5
        };
        let titled = |label: &str| if label.is_empty() { 0.0 } else { look.letters * 1.6 };
        // The first and the last number below may reach beyond the axis.
        let beyond = |mark: Option<&(f64, String)>| match plot.categories.is_empty() {
            true => mark.map_or(0.0, |(_, text)| font::width(text, look.letters) / 2.0),
            false => 0.0,
        };
        let to_left = titled(&plot.y) + widest(&left);
        let to_right = right.as_ref().map_or(look.gap, |r| titled(&plot.right) + widest(r));
        let edges = [
            look.gap + to_left.max(beyond(x.marks.first())),
            top,
            look.width - look.gap - to_right.max(beyond(x.marks.last())),
            top + look.height,
        ];
        let inset = match (plot.categories.is_empty(), bars) {
            (true, true) => [(edges[2] - edges[0]) * 0.07; 2],
            (true, false) => [if x.low == 0.0 { 0.0 } else { 12.0 }, 12.0],
            (false, _) => [0.0; 2],
        };
        let room = (edges[2] - edges[0]) / plot.categories.len().max(1) as f32;
        let below = Below::of(&x, look, if plot.categories.is_empty() { 60.0 } else { room });
        let mut frame = Self { x, left, right, edges, inset, below };
        frame.make_room(look);
        frame
    }

    /// Moves the left edge so that no slanting label begins outside.
    fn make_room(&mut self, look: &Look) {
        let Below::Slanting(labels) = &self.below else { return };
        let starts = self.x.marks.iter().zip(labels).filter_map(|((value, _), label)| {
            let wide = font::width(label, look.letters) * SLANT.to_radians().cos();
            Some(self.across(*value)? - wide * SLACK)
        });
        let short = look.gap - starts.fold(f32::MAX, f32::min);
        self.edges[0] += short.clamp(0.0, look.width / 4.0);
    }

    /// Where an x is.
    pub fn across(&self, x: f64) -> Option<f32> {
        let (from, to) = (self.edges[0] + self.inset[0], self.edges[2] - self.inset[1]);
        Some(from + self.x.at(x)? * (to - from))
    }

    /// Where a y is, on the left or the right axis.
    pub fn down(&self, y: f64, right: bool) -> Option<f32> {
        let axis = self.side(right);
        Some(self.edges[3] - axis.at(y)? * (self.edges[3] - self.edges[1]))
    }

    /// The left or the right axis.
    pub fn side(&self, right: bool) -> &Axis {
        self.right.as_ref().filter(|_| right).unwrap_or(&self.left)
    }

    /// Draws lines to read by, axes, marks and labels; returns how far down that goes.
    pub fn draw(&self, scene: &mut Scene, plot: &Plot, look: &Look) -> f32 {
        let [left, top, right, bottom] = self.edges;
        for (value, _) in &self.left.marks {
            let Some(y) = self.down(*value, false) else { continue };
            scene.line(vec![(left, y), (right, y)], Ink::Grid, 1.0, false);
        }
        self.draw_side(scene, look, false, left);
        if self.right.is_some() {
            self.draw_side(scene, look, true, right);
            scene.line(vec![(right, top), (right, bottom)], Ink::Axis, 1.0, false);
        }
        scene.line(vec![(left, top), (left, bottom), (right, bottom)], Ink::Axis, 1.0, false);
        let zero = self.down(0.0, false).filter(|y| *y < bottom - 1.0 && *y > top);
        if let Some(y) = zero {
            scene.line(vec![(left, y), (right, y)], Ink::Axis, 1.0, false);
        }
        self.labels(scene, plot, look);
        self.draw_below(scene, plot, look)
    }

    fn draw_side(&self, scene: &mut Scene, look: &Look, right: bool, x: f32) {
        let (away, anchor) = if right { (1.0, Anchor::Start) } else { (-1.0, Anchor::End) };
        for (value, text) in &self.side(right).marks {
            let Some(y) = self.down(*value, right) else { continue };
            scene.line(vec![(x, y), (x + away * MARK, y)], Ink::Axis, 1.0, false);
            let at = (x + away * (MARK + look.gap * 0.5), y + look.letters * 0.35);
            scene.words(text, at, anchor, look.letters, Ink::Muted);
        }
    }

    /// What the axes at the sides are; the right one in its series' colour, if that is but one.
    fn labels(&self, scene: &mut Scene, plot: &Plot, look: &Look) {
        let [_, top, _, bottom] = self.edges;
        let middle = f32::midpoint(top, bottom);
        let size = look.letters;
        let mut label = |text: &str, x: f32, turn: f32, ink: Ink| {
            let fits = font::width(text, size) <= bottom - top;
            let size = if fits { size } else { size * 0.8 };
            scene.turned(text, (x, middle), Anchor::Middle, size, ink, turn);
        };
        label(&plot.y, look.gap + size * 0.8, -90.0, Ink::Text);
        if self.right.is_some() {
            let mut colours = plot.series.iter().filter(|s| s.right).map(|s| s.colour);
            let first = colours.next().unwrap_or_default();
            let ink = if colours.all(|c| c == first) { Ink::Subject(first) } else { Ink::Text };
            label(&plot.right, look.width - look.gap - size * 0.8, 90.0, ink);
        }
    }

    fn draw_below(&self, scene: &mut Scene, plot: &Plot, look: &Look) -> f32 {
        let bottom = self.edges[3];
        let size = look.letters;
        for (value, _) in &self.x.marks {
            let Some(x) = self.across(*value) else { continue };
            scene.line(vec![(x, bottom), (x, bottom + MARK)], Ink::Axis, 1.0, false);
        }
        let spots = self.x.marks.iter().map(|(value, _)| self.across(*value).unwrap_or_default());
        let spots: Vec<f32> = spots.collect();
        let first = bottom + MARK + look.gap * 0.5 + size * 0.8;
        let mut end = match &self.below {
            Below::Lines(labels) => lines(scene, look, &spots, labels, first),
            Below::Slanting(labels) => slanting(scene, look, &spots, labels, bottom + MARK),
        };
        if !plot.x.is_empty() {
            end += look.gap * 0.5 + size;
            let middle = f32::midpoint(self.edges[0], self.edges[2]);
            scene.words(&plot.x, (middle, end), Anchor::Middle, size, Ink::Text);
        }
        end + look.gap
    }
}

fn lines(scene: &mut Scene, look: &Look, spots: &[f32], labels: &[Vec<String>], first: f32) -> f32 {
    let step = look.letters * 1.2;
    let mut free = f32::MIN;
    for (x, label) in spots.iter().zip(labels) {
        let widest = label.iter().map(|l| font::width(l, look.letters)).fold(0.0, f32::max);
        // A number that would run into the one before it is left out; its mark stays.
        if x - widest / 2.0 < free {
            continue;
        }
        free = x + widest / 2.0 + look.gap * 0.5;
        for (n, line) in label.iter().enumerate() {
            let at = (*x, first + n as f32 * step);
            scene.words(line, at, Anchor::Middle, look.letters, Ink::Muted);
        }
    }
    let most = labels.iter().map(Vec::len).max().unwrap_or(1).max(1);
    first + (most - 1) as f32 * step + look.letters * 0.3
}

fn slanting(scene: &mut Scene, look: &Look, spots: &[f32], labels: &[String], top: f32) -> f32 {
    let mut deepest = 0.0_f32;
    for (x, label) in spots.iter().zip(labels) {
        let at: Spot = (x + look.letters * 0.4, top + look.letters * 0.8);
        scene.turned(label, at, Anchor::End, look.letters, Ink::Muted, -SLANT);
        deepest = deepest.max(font::width(label, look.letters));
    }
    top + look.letters * 1.2 + deepest * SLANT.to_radians().sin()
}

/// Room for letters that are wider than ours.
pub const SLACK: f32 = 1.1;
/// Degrees.
const SLANT: f32 = 40.0;

impl Below {
    /// In as few lines as `room` for each allows; slanting where a word is wider than that.
    fn of(axis: &Axis, look: &Look, room: f32) -> Self {
        let room = room - look.gap;
        let size = look.letters;
        let wrapped = axis.marks.iter().map(|(_, text)| font::wrap(text, size, room));
        let wrapped: Vec<Vec<String>> = wrapped.collect();
        let fits = |lines: &Vec<String>| {
            lines.len() <= 3 && lines.iter().all(|line| font::width(line, size) <= room)
        };
        if wrapped.iter().all(fits) {
            Self::Lines(wrapped)
        } else {
            Self::Slanting(axis.marks.iter().map(|(_, text)| shorten(text)).collect())
        }
    }
}

/// No more than a label may take of a plot's height.
fn shorten(text: &str) -> String {
    const MOST: usize = 32;
    if text.chars().count() <= MOST {
        return text.into();
    }
    let kept: String = text.chars().take(MOST - 1).collect();
    kept.trim_end().to_owned() + "…"
}
