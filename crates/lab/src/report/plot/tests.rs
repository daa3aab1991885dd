//! Tests that no text overlaps other text and that nothing is drawn outside, for random plots.

use std::collections::BTreeSet;

use super::super::scene::{Item, SUBJECTS, Shape, Words};
use super::*;

/// Returns the left, upper, right and lower edge of text; `None` if it is slanted.
fn extent(words: &Words) -> Option<[f32; 4]> {
    let (x, y) = words.at;
    let wide = font::width(&words.text, words.size);
    let (up, down) = (words.size * 0.75, words.size * 0.2);
    let start = match words.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -wide / 2.0,
        Anchor::End => -wide,
    };
    match words.turn as i32 {
        0 => Some([x + start, y - up, x + start + wide, y + down]),
        -90 => Some([x - up, y - start - wide, x + down, y - start]),
        90 => Some([x - down, y + start, x + up, y + start + wide]),
        _ => None,
    }
}

fn words(scene: &Scene) -> impl Iterator<Item = &Words> {
    scene.items.iter().filter_map(|item| match item {
        Item::Words(words) => Some(words),
        Item::Shape(_) => None,
    })
}

fn check(plot: &Plot, target: Target) {
    let scene = draw(plot, target);
    let shown: Vec<(&str, [f32; 4])> =
        words(&scene).filter_map(|w| Some((w.text.as_str(), extent(w)?))).collect();
    let (wide, high) = scene.size;
    for (n, (text, [left, top, right, bottom])) in shown.iter().enumerate() {
        let inside = *left >= 0.0 && *top >= 0.0 && *right <= wide && *bottom <= high;
        assert!(inside, "{target:?} {}: '{text}' goes outside", plot.file);
        for (other, [l, t, r, b]) in &shown[n + 1..] {
            let apart = right <= l || r <= left || bottom <= t || b <= top;
            assert!(apart, "{target:?} {}: '{text}' and '{other}' overlap", plot.file);
        }
    }
    for slanted in words(&scene).filter(|w| extent(w).is_none()) {
        let long = font::width(&slanted.text, slanted.size);
        let (down, back) = slanted.turn.to_radians().sin_cos();
        let (x, y) = (slanted.at.0 - long * back, slanted.at.1 - long * down);
        let inside = (0.0..=wide).contains(&x) && (0.0..=high).contains(&y);
        assert!(inside, "{target:?} {}: '{}' starts outside", plot.file, slanted.text);
    }
    for item in &scene.items {
        let Item::Shape(Shape { outline, .. }) = item else { continue };
        for (x, y) in spots(outline) {
            let inside = (0.0..=wide).contains(&x) && (0.0..=high).contains(&y);
            assert!(inside, "{target:?} {}: ({x}, {y}) is outside", plot.file);
        }
    }
}

fn spots(outline: &super::super::scene::Outline) -> Vec<(f32, f32)> {
    use super::super::scene::Outline::*;
    match outline {
        Line(spots) | Area(spots) => spots.clone(),
        Circle((x, y), r) => vec![(x - r, y - r), (x + r, y + r)],
    }
}

/// Pseudo-random numbers (a linear congruential generator).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn value(&mut self) -> f64 {
        let size = 10f64.powi(self.below(12) as i32 - 4);
        let sign = if self.below(9) == 0 { -1.0 } else { 1.0 };
        sign * size * (1.0 + self.below(900) as f64 / 100.0)
    }

    fn name(&mut self) -> String {
        const NAMES: [&str; 6] = [
            "seed",
            "ours, after",
            "one worker per port, least of a guest",
            "CPU",
            "1/pending",
            "vhost-user-backend of rust-vmm with two queues and a long name",
        ];
        NAMES[self.below(6) as usize].into()
    }
}

fn any_plot(seed: u64) -> Plot {
    let mut numbers = Numbers(seed);
    let categories: Vec<String> = match numbers.below(2) {
        0 => Vec::new(),
        _ => (0..=numbers.below(11)).map(|_| numbers.name()).collect(),
    };
    let series = |numbers: &mut Numbers| {
        let places = if categories.is_empty() { numbers.below(9) } else { categories.len() as u64 };
        let whole = numbers.below(2) == 0;
        let points = (0..places).map(|n| {
            let x = if whole || !categories.is_empty() { n as f64 } else { numbers.value() };
            let (y, error) = (numbers.value(), numbers.value().abs());
            let count = numbers.below(4) as usize;
            Point { x, y, low: y - error, high: y + error, count, interval: count > 2 }
        });
        Series {
            points: points.collect(),
            name: numbers.name(),
            colour: numbers.below(12) as usize,
            dashed: numbers.below(3) == 0,
            right: numbers.below(3) == 0,
            bars: numbers.below(3) == 0,
            model: numbers.below(5) == 0,
            loose: numbers.below(5) == 0,
        }
    };
    let series: Vec<Series> = (0..numbers.below(7)).map(|_| series(&mut numbers)).collect();
    Plot {
        title: "Packets, and the CPU time that they take, by guests".into(),
        file: format!("seed {seed}"),
        x: "guests".into(),
        y: "throughput of all guests, Gbit/s".into(),
        right: "CPU, % of one".into(),
        log: (numbers.below(3) == 0, numbers.below(3) == 0),
        level: (numbers.below(2) == 0).then(|| numbers.value()),
        categories,
        series,
        ..Plot::default()
    }
}

#[test]
fn nothing_overlaps_or_goes_outside() {
    for seed in 0..3000 {
        let plot = any_plot(seed);
        for target in [Target::File, Target::Page] {
            check(&plot, target);
        }
    }
}

/// Dots of series with these colours and dashes: shape, whether hollow, ink.
fn dots(series: impl Iterator<Item = (usize, bool)>) -> Vec<(String, bool, &'static str)> {
    let series = series.enumerate().map(|(n, (colour, dashed))| Series {
        name: format!("series {n}"),
        colour,
        dashed,
        points: vec![Point::at(1.0, n as f64)],
        ..Series::default()
    });
    let scene = draw(&Plot { series: series.collect(), ..Plot::default() }, Target::File);
    let mut dots = Vec::new();
    for item in &scene.items {
        let Item::Shape(shape) = item else { continue };
        if shape.hint.is_empty() {
            continue;
        }
        // Regardless of position.
        let kind = match spots(&shape.outline).len() {
            2 => "circle".into(),
            corners => {
                let first = spots(&shape.outline)[0];
                let all = spots(&shape.outline);
                let y = all.iter().map(|s| s.1).sum::<f32>() / corners as f32;
                format!("{corners} corners, first {:.1}", first.1 - y)
            }
        };
        let hollow = shape.fill.is_some_and(|(ink, _)| ink == Ink::Paper);
        let inks = [shape.fill.map(|(ink, _)| ink), shape.stroke.as_ref().map(|s| s.ink)];
        let ink = inks.into_iter().flatten().find(|ink| *ink != Ink::Paper);
        dots.push((kind, hollow, ink.expect("an ink").name()));
    }
    dots
}

#[test]
fn every_series_has_a_distinct_symbol() {
    let dots = dots((0..8).map(|n| (n % 4, n % 2 == 1)));
    let kinds: BTreeSet<_> = dots.iter().map(|(kind, hollow, _)| (kind, hollow)).collect();
    assert_eq!((dots.len(), kinds.len()), (8, 8), "{dots:?}");
}

#[test]
fn series_beyond_the_last_colour_have_another_symbol_than_the_first_of_their_colour() {
    let dots = dots((0..2 * SUBJECTS).map(|n| (n, false)));
    let kinds: BTreeSet<_> = dots.iter().collect();
    assert_eq!((dots.len(), kinds.len()), (2 * SUBJECTS, 2 * SUBJECTS), "{dots:?}");
}
