//! Draws lines, bars, dots and error bars.

use super::super::scene::{Ink, Item, Outline, SUBJECTS, Scene, Shape, Spot, Stroke};
use super::super::words::{brief, short};
use super::super::{Plot, Point, Series, font};
use super::frame::{Frame, SLACK};
use super::{Anchor, Style, x_label};

/// Width over which series with error bars are spread at one x.
const APART: f32 = 14.0;
/// Radius of a dot.
const DOT: f32 = 4.2;
/// Share of the distance between x values that bars fill.
const BARS: f32 = 0.78;

/// Draws all series: bars behind lines, dots in front.
pub fn draw(scene: &mut Scene, plot: &Plot, style: &Style, frame: &Frame) {
    let bars: Vec<&Series> = plot.series.iter().filter(|s| s.bars).collect();
    let width = bar_width(plot, frame, bars.len());
    let mut tops = Vec::new();
    for (n, series) in bars.iter().enumerate() {
        let shift = (n as f32 - (bars.len() - 1) as f32 / 2.0) * width;
        tops.extend(draw_bars(scene, plot, frame, series, shift, width));
    }
    // Lines would cross the numbers.
    if bars.len() == plot.series.len() {
        label_bars(scene, style, &tops, width);
    }
    draw_counts(scene, plot, style, frame);
    // Solid series, the subjects of the plot, are drawn above dashed ones.
    let mut lines: Vec<(usize, &Series)> =
        plot.series.iter().enumerate().filter(|(_, s)| !s.bars).collect();
    lines.sort_by_key(|(_, series)| !series.dashed);
    for (n, series) in &lines {
        draw_line(scene, frame, series, apart(plot, *n));
    }
    for (n, series) in lines {
        let shift = apart(plot, n);
        for point in &series.points {
            let Some(at) = spot(frame, point, series.right) else { continue };
            let at = (at.0 + shift, at.1);
            let mut dot = dot(plot, n, at, DOT, hint(plot, series, point));
            if series.model {
                // Invisible, but with a tooltip.
                (dot.stroke, dot.fill) = (None, Some((Ink::Paper, 0.0)));
            }
            scene.items.push(Item::Shape(dot));
        }
    }
}

/// Draws below each x value how many runs the points there are of, where there is space: one number
/// if all are of as many.
fn draw_counts(scene: &mut Scene, plot: &Plot, style: &Style, frame: &Frame) {
    let size = style.font_px * 0.8;
    let points = || plot.series.iter().flat_map(|s| &s.points).filter(|p| p.count > 0);
    let mut xs: Vec<f64> = points().map(|p| p.x).filter(|x| frame.x_px(*x).is_some()).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let mut free = f32::MIN;
    for value in xs {
        let Some(x) = frame.x_px(value) else { continue };
        let counts = || points().filter(|p| p.x == value).map(|p| p.count);
        let (least, most) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
        let text = if least == most { format!("n {most}") } else { format!("n {least}-{most}") };
        let half = font::width(&text, size) * SLACK / 2.0;
        let inside = x - half >= frame.edges[0] - style.gap && x + half <= style.width - style.gap;
        if x - half < free || !inside {
            continue;
        }
        free = x + half + style.gap * 0.5;
        // Above what bars may be labelled with.
        let y = frame.edges[1] - style.font_px * 1.2;
        scene.words(&text, (x, y), Anchor::Middle, size, Ink::Muted);
    }
}

/// Draws the legend key of a series, with the middle of its left edge at `at`.
pub fn legend_key(scene: &mut Scene, plot: &Plot, n: usize, at: Spot, wide: f32) {
    let series = &plot.series[n];
    if series.bars {
        let (left, right) = (at.0, at.0 + wide);
        let area =
            [(left, at.1 - 6.0), (right, at.1 - 6.0), (right, at.1 + 6.0), (left, at.1 + 6.0)];
        scene.items.push(Item::Shape(bar(series, area.into(), String::new())));
        return;
    }
    if !series.loose {
        let ends = vec![at, (at.0 + wide, at.1)];
        scene.line(ends, Ink::Subject(series.colour), 2.0, series.dashed);
    }
    if !series.model {
        let middle = (at.0 + wide / 2.0, at.1);
        scene.items.push(Item::Shape(dot(plot, n, middle, DOT, String::new())));
    }
}

/// Returns the position of a point; `None` if an axis has none for it.
fn spot(frame: &Frame, point: &Point, right: bool) -> Option<Spot> {
    Some((frame.x_px(point.x)?, frame.y_px(point.y, right)?))
}

/// Returns the tooltip of a point.
fn hint(plot: &Plot, series: &Series, point: &Point) -> String {
    let mut hint = format!("{}, {}: {}", series.name, x_label(plot, point.x), short(point.y));
    if point.low < point.y || point.high > point.y {
        let what = if point.interval { "" } else { "range " };
        hint.push_str(&format!(" ({what}{} to {})", short(point.low), short(point.high)));
    }
    if point.count > 0 {
        hint.push_str(&format!(", n {}", point.count));
    }
    hint
}

/// How far the points of a series are moved sideways, so that error bars at the same x do not cover
/// each other; none where only one series was measured.
fn apart(plot: &Plot, n: usize) -> f32 {
    let measured = |s: &Series| !s.bars && s.points.iter().any(|p| p.high > p.low);
    let count = plot.series.iter().filter(|s| measured(s)).count();
    if count < 2 || !measured(&plot.series[n]) {
        return 0.0;
    }
    let before = plot.series[..n].iter().filter(|s| measured(s)).count();
    (before as f32 / (count - 1) as f32 - 0.5) * APART
}

/// Draws the line of a series, interrupted at missing points and at single runs, and its error
/// bars: a line from one run to another would show as a trend what may be chance.
fn draw_line(scene: &mut Scene, frame: &Frame, series: &Series, shift: f32) {
    let ink = Ink::Subject(series.colour);
    let mut run = Vec::new();
    for point in series.points.iter().filter(|_| !series.loose) {
        match spot(frame, point, series.right).filter(|_| point.count != 1) {
            Some(at) => run.push((at.0 + shift, at.1)),
            None => scene.line(std::mem::take(&mut run), ink, 2.0, series.dashed),
        }
    }
    scene.line(run, ink, 2.0, series.dashed);
    scene.items.retain(|item| !is_empty(item));
    for point in &series.points {
        let Some((x, _)) = spot(frame, point, series.right) else { continue };
        ErrorBar { x: x + shift, cap: 4.5, ink }.draw(scene, frame, series, point);
    }
}

/// Whether it is a line of fewer than two points.
fn is_empty(item: &Item) -> bool {
    let Item::Shape(Shape { outline: Outline::Line(spots), .. }) = item else { return false };
    spots.len() < 2
}

/// A vertical line from the low to the high end of a point.
struct ErrorBar {
    x: f32,
    /// Half the width of its caps.
    cap: f32,
    ink: Ink,
}

impl ErrorBar {
    fn draw(self, scene: &mut Scene, frame: &Frame, series: &Series, point: &Point) {
        let Self { x, cap, ink } = self;
        let axis = frame.side(series.right);
        let ends = [point.low, point.high].map(|end| frame.y_px(axis.clamp(end), series.right));
        let [Some(low), Some(high)] = ends else { return };
        if low - high < 0.5 {
            return;
        }
        scene.line(vec![(x, low), (x, high)], ink, 1.3, false);
        for (y, end) in [(low, point.low), (high, point.high)] {
            // No cap at an end beyond the axis, nor at the range of runs that make no interval.
            if axis.clamp(end) == end && (point.interval || point.count == 0) {
                scene.line(vec![(x - cap, y), (x + cap, y)], ink, 1.3, false);
            }
        }
    }
}

/// Returns a dot of a series: hollow if dashed, with a symbol by colour, and another symbol if an
/// earlier series has the same colour and dashes.
fn dot(plot: &Plot, n: usize, at: Spot, size: f32, hint: String) -> Shape {
    let series = &plot.series[n];
    // Colours repeat.
    let look = |s: &Series| (s.colour % SUBJECTS, s.dashed);
    let alike = |s: &&Series| !s.bars && look(s) == look(series);
    let before = plot.series[..n].iter().filter(alike).count();
    let ink = Ink::Subject(series.colour);
    let (line, fill) = if series.dashed { (ink, Ink::Paper) } else { (Ink::Paper, ink) };
    Shape {
        outline: symbol(series.colour + 4 * before, at, size),
        stroke: Some(Stroke {
            ink: line,
            width: if series.dashed { 1.7 } else { 1.0 },
            dashed: false,
        }),
        fill: Some((fill, 1.0)),
        hint,
    }
}

/// Returns one of eight symbols of similar size.
fn symbol(kind: usize, at: Spot, size: f32) -> Outline {
    let (x, y) = at;
    let polygon = |corners: usize, first: f32, radius: f32| {
        let corner = |n: usize| {
            let angle = (first + 360.0 * n as f32 / corners as f32).to_radians();
            (x + radius * angle.sin(), y - radius * angle.cos())
        };
        Outline::Area((0..corners).map(corner).collect())
    };
    match kind % 8 {
        0 => Outline::Circle(at, size),
        1 => polygon(4, 45.0, size * 1.3),
        2 => polygon(3, 0.0, size * 1.45),
        3 => polygon(4, 0.0, size * 1.35),
        4 => polygon(3, 180.0, size * 1.45),
        5 => cross(at, size * 1.15),
        6 => polygon(6, 0.0, size * 1.2),
        _ => polygon(5, 0.0, size * 1.25),
    }
}

/// Returns a plus sign.
fn cross(at: Spot, size: f32) -> Outline {
    let (x, y) = at;
    let third = size / 2.6;
    let corners = [
        (-third, -size),
        (third, -size),
        (third, -third),
        (size, -third),
        (size, third),
        (third, third),
        (third, size),
        (-third, size),
        (-third, third),
        (-size, third),
        (-size, -third),
        (-third, -third),
    ];
    Outline::Area(corners.map(|(right, down)| (x + right, y + down)).into())
}

/// Returns the width of each of `count` bars at the same x value.
fn bar_width(plot: &Plot, frame: &Frame, count: usize) -> f32 {
    let mut xs: Vec<f32> = plot
        .series
        .iter()
        .filter(|s| s.bars)
        .flat_map(|s| &s.points)
        .filter_map(|p| frame.x_px(p.x))
        .collect();
    xs.sort_by(f32::total_cmp);
    let wide = frame.edges[2] - frame.edges[0];
    let most = match plot.categories.len() {
        0 => wide * 0.12,
        n => wide / n as f32,
    };
    let gaps = xs.windows(2).map(|two| two[1] - two[0]).filter(|gap| *gap > 0.5);
    let gap = gaps.fold(most, f32::min);
    (gap * BARS / count.max(1) as f32).min(72.0)
}

/// Returns a bar of a series.
fn bar(series: &Series, area: Vec<Spot>, hint: String) -> Shape {
    let ink = Ink::Subject(series.colour);
    let (line, cover) = if series.dashed { (1.5, 0.15) } else { (1.0, 0.85) };
    Shape {
        outline: Outline::Area(area),
        stroke: Some(Stroke { ink, width: line, dashed: series.dashed }),
        fill: Some((ink, cover)),
        hint,
    }
}

/// Draws the bars of a series, moved by `shift`; returns the upper end (of bar and error bar) and
/// the value of each.
fn draw_bars(
    scene: &mut Scene,
    plot: &Plot,
    frame: &Frame,
    series: &Series,
    shift: f32,
    width: f32,
) -> Vec<(Spot, f64)> {
    let mut tops = Vec::new();
    let axis = frame.side(series.right);
    let base = frame.y_px(axis.clamp(0.0), series.right).unwrap_or(frame.edges[3]);
    let inner = (width * 0.92).max(1.0);
    for point in &series.points {
        let Some((x, y)) = spot(frame, point, series.right) else { continue };
        let x = x + shift;
        let (left, right) = (x - inner / 2.0, x + inner / 2.0);
        let area = vec![(left, base), (left, y), (right, y), (right, base)];
        scene.items.push(Item::Shape(bar(series, area, hint(plot, series, point))));
        let cap = (inner / 4.0).min(5.0);
        ErrorBar { x, cap, ink: Ink::Text }.draw(scene, frame, series, point);
        let top = frame.y_px(axis.clamp(point.high.max(point.y)), series.right).unwrap_or(y);
        tops.push(((x, top.min(base)), point.y));
    }
    tops
}

/// Draws the value of each bar above it, if there is space for all of them.
fn label_bars(scene: &mut Scene, style: &Style, tops: &[(Spot, f64)], width: f32) {
    let size = style.font_px * 0.85;
    let wide = |value: f64| font::width(&brief(value), size) * SLACK;
    if tops.iter().any(|(_, value)| wide(*value) > width) {
        return;
    }
    let mut taken: Vec<Spot> = Vec::new();
    for ((x, top), value) in tops {
        let at = (*x, top - 4.0);
        // A number at nearly the same position: points with the same x.
        let near = |t: &Spot| (t.0 - at.0).abs() < width - 0.5 && (t.1 - at.1).abs() < size * 1.1;
        if taken.iter().any(near) {
            continue;
        }
        taken.push(at);
        scene.words(&brief(*value), at, Anchor::Middle, size, Ink::Text);
    }
}
