//! The legend: in rows above the axes, so that it never covers what was measured.

use super::super::scene::{Anchor, Ink, Scene};
use super::super::{Plot, Series, font};
use super::frame::SLACK;
use super::{Look, marks};

/// Width of a line's sample.
const SAMPLE: f32 = 28.0;
/// Width of a bar's, or a dot's.
const SWATCH: f32 = 16.0;

/// Draws it below `top`; returns where it ends.
pub fn draw(scene: &mut Scene, plot: &Plot, look: &Look, top: f32) -> f32 {
    let two_axes = plot.series.iter().any(|s| s.right) && plot.series.iter().any(|s| !s.right);
    let named = |s: &Series| match two_axes && s.right {
        true => format!("{} (right axis)", s.name),
        false => s.name.clone(),
    };
    if plot.series.len() < 2 && plot.series.iter().all(|s| s.name.is_empty()) {
        return top;
    }
    let (left, right) = (2.0 * look.gap, look.width - 2.0 * look.gap);
    let line = look.letters * 1.55;
    let (mut x, mut y) = (left, top + line / 2.0);
    for (n, series) in plot.series.iter().enumerate() {
        let name = named(series);
        let sample = if series.bars || series.loose { SWATCH } else { SAMPLE } + 6.0;
        let wide = sample + font::width(&name, look.letters) * SLACK;
        if x > left && x + wide > right {
            (x, y) = (left, y + line);
        }
        marks::sample(scene, plot, n, (x, y), sample - 6.0);
        let lines = font::wrap(&name, look.letters, (right - left - sample) / SLACK);
        for (m, words) in lines.iter().enumerate() {
            y += if m == 0 { 0.0 } else { line * 0.8 };
            let at = (x + sample, y + look.letters * 0.35);
            scene.words(words, at, Anchor::Start, look.letters, Ink::Text);
        }
        x += wide + 2.0 * look.gap;
    }
    y + line / 2.0
}
