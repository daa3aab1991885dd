//! The legend, in rows above the axes, so that it covers no data.

use super::super::scene::{Anchor, Ink, Scene};
use super::super::{Plot, Series, font};
use super::frame::SLACK;
use super::{Style, marks};

/// Width of the key of a line.
const LINE_KEY: f32 = 28.0;
/// Width of the key of bars or dots.
const SWATCH: f32 = 16.0;

/// Draws the legend below `top`; returns its lower end.
pub fn draw(scene: &mut Scene, plot: &Plot, style: &Style, top: f32) -> f32 {
    let two_axes = plot.series.iter().any(|s| s.right) && plot.series.iter().any(|s| !s.right);
    let named = |s: &Series| match two_axes && s.right {
        true => format!("{} (right axis)", s.name),
        false => s.name.clone(),
    };
    if plot.series.len() < 2 && plot.series.iter().all(|s| s.name.is_empty()) {
        return top;
    }
    let (left, right) = (2.0 * style.gap, style.width - 2.0 * style.gap);
    let line = style.font_px * 1.55;
    let (mut x, mut y) = (left, top + line / 2.0);
    for (n, series) in plot.series.iter().enumerate() {
        let name = named(series);
        let key = if series.bars || series.loose { SWATCH } else { LINE_KEY } + 6.0;
        let wide = key + font::width(&name, style.font_px) * SLACK;
        if x > left && x + wide > right {
            (x, y) = (left, y + line);
        }
        marks::legend_key(scene, plot, n, (x, y), key - 6.0);
        let lines = font::wrap(&name, style.font_px, (right - left - key) / SLACK);
        for (m, words) in lines.iter().enumerate() {
            y += if m == 0 { 0.0 } else { line * 0.8 };
            let at = (x + key, y + style.font_px * 0.35);
            scene.words(words, at, Anchor::Start, style.font_px, Ink::Text);
        }
        x += wide + 2.0 * style.gap;
    }
    y + line / 2.0
}
