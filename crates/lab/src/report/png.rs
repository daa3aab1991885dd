//! Scenes as PNG: drawn here with our own letters, so that no machine needs fonts for it.

use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Stroke, StrokeDash,
    Transform,
};
use ttf_parser::OutlineBuilder;

use super::font;
use super::scene::{Anchor, DASHES, Ink, Item, Outline, Scene, Shape, Words};

/// Pixels of the bitmap for each of the scene, each way.
const FINE: f32 = 2.0;

/// On light paper, as a file.
pub fn file(scene: &Scene) -> Vec<u8> {
    draw(scene).encode_png().expect("a bitmap in memory can be written to memory")
}

fn draw(scene: &Scene) -> Pixmap {
    let side = |length: f32| (length * FINE).ceil().clamp(1.0, 8192.0) as u32;
    let (wide, high) = (side(scene.size.0), side(scene.size.1));
    let mut map = Pixmap::new(wide, high).expect("its sides are neither none nor huge");
    let [r, g, b] = Ink::Paper.light();
    map.fill(Color::from_rgba8(r, g, b, 255));
    for item in &scene.items {
        match item {
            Item::Shape(it) => shape(&mut map, it),
            Item::Words(it) => words(&mut map, it),
        }
    }
    map
}

fn paint(ink: Ink, cover: f32) -> Paint<'static> {
    let [r, g, b] = ink.light();
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(r, g, b, (cover.clamp(0.0, 1.0) * 255.0).round() as u8);
    paint
}

fn shape(map: &mut Pixmap, shape: &Shape) {
    let Some(path) = outline(&shape.outline) else { return };
    let place = Transform::from_scale(FINE, FINE);
    if let Some((ink, cover)) = shape.fill {
        map.fill_path(&path, &paint(ink, cover), FillRule::Winding, place, None);
    }
    if let Some(line) = shape.stroke {
        let stroke = Stroke {
            width: line.width,
            line_cap: LineCap::Butt,
            line_join: LineJoin::Round,
            dash: if line.dashed { StrokeDash::new(DASHES.into(), 0.0) } else { None },
            ..Stroke::default()
        };
        map.stroke_path(&path, &paint(line.ink, 1.0), &stroke, place, None);
    }
}

/// None of what has no length.
fn outline(outline: &Outline) -> Option<Path> {
    let mut path = PathBuilder::new();
    match outline {
        Outline::Circle((x, y), radius) => path.push_circle(*x, *y, *radius),
        Outline::Line(spots) | Outline::Area(spots) => {
            for (n, (x, y)) in spots.iter().enumerate() {
                if n == 0 { path.move_to(*x, *y) } else { path.line_to(*x, *y) }
            }
            if matches!(outline, Outline::Area(_)) {
                path.close();
            }
        }
    }
    path.finish()
}

fn words(map: &mut Pixmap, words: &Words) {
    let (face, scale) = font::face(words.size);
    let wide = font::width(&words.text, words.size);
    let start = match words.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -wide / 2.0,
        Anchor::End => -wide,
    };
    let mut letters = Letters { path: PathBuilder::new(), at: start, scale };
    for (glyph, width) in font::glyphs(&words.text) {
        face.outline_glyph(glyph, &mut letters);
        letters.at += f32::from(width) * scale;
    }
    let Some(path) = letters.path.finish() else { return };
    let place = Transform::from_rotate(words.turn)
        .post_translate(words.at.0, words.at.1)
        .post_scale(FINE, FINE);
    map.fill_path(&path, &paint(words.ink, 1.0), FillRule::Winding, place, None);
}

/// Outlines of letters one after the other; fonts count upwards, bitmaps downwards.
struct Letters {
    path: PathBuilder,
    at: f32,
    scale: f32,
}

impl Letters {
    fn spot(&self, x: f32, y: f32) -> (f32, f32) {
        (self.at + x * self.scale, -y * self.scale)
    }
}

impl OutlineBuilder for Letters {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.spot(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.spot(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.spot(x1, y1), self.spot(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (one, two, end) = (self.spot(x1, y1), self.spot(x2, y2), self.spot(x, y));
        self.path.cubic_to(one.0, one.1, two.0, two.1, end.0, end.1);
    }

    fn close(&mut self) {
        self.path.close();
    }
}
