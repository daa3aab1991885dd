//! A plot laid out: title, legend above what it names, axes, and what is between them.

mod frame;
mod legend;
mod marks;

use super::scene::{Anchor, Ink, Scene};
use super::words::short;
use super::{Plot, Point, Series, font};

use frame::Frame;

/// Where a plot is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// In a file of its own, with its title.
    Alone,
    /// In the page, whose width scales it.
    Page,
}

/// Sizes, in pixels.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Of the whole.
    width: f32,
    /// Of what is between the axes.
    height: f32,
    /// Of letters.
    letters: f32,
    /// Of the letters of the title; 0 for no title.
    title: f32,
    /// About what is written.
    gap: f32,
}

impl Look {
    fn of(room: Room) -> Self {
        match room {
            Room::Alone => {
                Self { width: 880.0, height: 380.0, letters: 13.0, title: 17.0, gap: 8.0 }
            }
            Room::Page => Self { width: 860.0, height: 360.0, letters: 13.0, title: 0.0, gap: 8.0 },
        }
    }
}

/// The whole plot.
pub fn draw(plot: &Plot, room: Room) -> Scene {
    let look = Look::of(room);
    let suffix = match room {
        Room::Alone => "file",
        Room::Page => "page",
    };
    let name = format!("plot-{}-{suffix}", plot.file);
    let mut scene =
        Scene { title: plot.title.clone(), about: about(plot), name, ..Scene::default() };
    let mut top = look.gap * 1.5;
    if look.title > 0.0 {
        for line in font::wrap(&plot.title, look.title, look.width - 4.0 * look.gap) {
            top += look.title * 1.1;
            scene.words(&line, (2.0 * look.gap, top), Anchor::Start, look.title, Ink::Text);
        }
        top += look.gap;
    }
    top = legend::draw(&mut scene, plot, &look, top) + look.gap * 1.5;
    let frame = Frame::of(plot, &look, top);
    let bottom = frame.draw(&mut scene, plot, &look);
    marks::draw(&mut scene, plot, &look, &frame);
    scene.size = (look.width, footnote(&mut scene, plot, &look, bottom) + look.gap);
    scene
}

/// What cannot be seen, said below. Returns where it ends.
fn footnote(scene: &mut Scene, plot: &Plot, look: &Look, bottom: f32) -> f32 {
    let lost = plot.series.iter().map(|series| lost(plot, series)).sum::<usize>();
    let drawn = plot.series.iter().flat_map(|s| &s.points).filter(|p| p.y.is_finite()).count();
    let said = match (drawn, lost) {
        (0, _) => "Nothing was measured.".into(),
        (_, 0) => return bottom,
        (_, 1) => "One point at or below zero has no place on a logarithmic axis.".into(),
        (_, n) => format!("{n} points at or below zero have no place on a logarithmic axis."),
    };
    let mut bottom = bottom + look.gap;
    for line in font::wrap(&said, look.letters, look.width - 4.0 * look.gap) {
        bottom += look.letters * 1.2;
        scene.words(&line, (2.0 * look.gap, bottom), Anchor::Start, look.letters, Ink::Muted);
    }
    bottom
}

/// How many points have no place on a logarithmic axis.
fn lost(plot: &Plot, series: &Series) -> usize {
    let (log_x, log_y) = plot.log;
    let (log_x, log_y) = (log_x && plot.categories.is_empty(), log_y && !series.right);
    let lost = |p: &&Point| log_x && p.x <= 0.0 || log_y && p.y <= 0.0;
    series.points.iter().filter(lost).count()
}

/// The plot in words, for those who do not see it.
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

/// What is at a place of the x axis.
pub fn place(plot: &Plot, x: f64) -> String {
    let category = || plot.categories.get(x as usize).filter(|_| x >= 0.0 && x.fract() == 0.0);
    category().cloned().unwrap_or_else(|| short(x))
}

#[cfg(test)]
mod tests;
