//! What a plot is drawn of: lines, dots and words in colours that have a meaning. Where it ends
//! up, page or file, decides what the colours are.

use super::font;

/// Use of a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// Behind everything.
    Paper,
    /// Words.
    Text,
    /// Words that matter less.
    Muted,
    /// Axes.
    Axis,
    /// Lines to read values by.
    Grid,
    /// A subject's, counted from 0; after the last one they begin again.
    Subject(usize),
}

/// The colours: name, on light paper, on dark. They are distinguishable with colour blindness
/// (after Okabe and Ito), and have a contrast of 3:1 to either paper.
pub const COLOURS: [(&str, u32, u32); 13] = [
    ("paper", 0xffffff, 0x16191d),
    ("text", 0x1c2126, 0xe6e9ec),
    ("muted", 0x59636e, 0x9aa4ae),
    ("axis", 0x7b858f, 0x77818b),
    ("grid", 0xe3e7eb, 0x2b3138),
    ("c0", 0x0067a8, 0x5ab4f0),
    ("c1", 0xcf5300, 0xff8f4a),
    ("c2", 0x008a63, 0x35c79a),
    ("c3", 0xa8458a, 0xe391c8),
    ("c4", 0x8f6a00, 0xe6c02e),
    ("c5", 0x5a55c8, 0xa9a4ff),
    ("c6", 0x5c6670, 0xb6bfc8),
    ("c7", 0xb3202c, 0xff7f86),
];
/// How many of them are subjects'.
pub const SUBJECTS: usize = 8;

impl Ink {
    /// Its place in [`COLOURS`].
    fn place(self) -> usize {
        match self {
            Self::Paper => 0,
            Self::Text => 1,
            Self::Muted => 2,
            Self::Axis => 3,
            Self::Grid => 4,
            Self::Subject(n) => COLOURS.len() - SUBJECTS + n % SUBJECTS,
        }
    }

    /// Its name in style sheets.
    pub fn name(self) -> &'static str {
        COLOURS[self.place()].0
    }
}

/// Right and down from the upper left corner, in pixels.
pub type Spot = (f32, f32);

/// The outline of a shape.
#[derive(Clone, Debug, PartialEq)]
pub enum Outline {
    /// From spot to spot.
    Line(Vec<Spot>),
    /// The same, and back to the first.
    Area(Vec<Spot>),
    /// A centre and a radius.
    Circle(Spot, f32),
}

/// A line's looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stroke {
    /// Its colour.
    pub ink: Ink,
    /// Its width.
    pub width: f32,
    /// Whether it has gaps.
    pub dashed: bool,
}

/// Strokes and gaps of a dashed line.
pub const DASHES: [f32; 2] = [6.0, 4.0];

/// Something drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Where.
    pub outline: Outline,
    /// Its line, if it has one.
    pub stroke: Option<Stroke>,
    /// What fills it, and how much of what is behind it that hides (0 to 1).
    pub fill: Option<(Ink, f32)>,
    /// What it says when pointed at; may be empty.
    pub hint: String,
}

/// Which end of a text its spot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The left one.
    Start,
    /// The middle.
    Middle,
    /// The right one.
    End,
}

/// Words on one line.
#[derive(Clone, Debug, PartialEq)]
pub struct Words {
    /// On its base line.
    pub at: Spot,
    /// Which end of the text that is.
    pub anchor: Anchor,
    /// Degrees it is turned, clockwise, about the spot.
    pub turn: f32,
    /// Height of the letters.
    pub size: f32,
    /// Its colour.
    pub ink: Ink,
    /// What it says.
    pub text: String,
}

/// One thing in a scene.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// A line, an area or a dot.
    Shape(Shape),
    /// Text.
    Words(Words),
}

/// All that is drawn, from back to front.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// For those who do not see it: what it is.
    pub title: String,
    /// And what it shows.
    pub about: String,
    /// Name that no other scene of the page has, of letters that identifiers may have.
    pub name: String,
    /// Width and height.
    pub size: Spot,
    /// From back to front.
    pub items: Vec<Item>,
}

impl Scene {
    /// Adds a line.
    pub fn line(&mut self, spots: Vec<Spot>, ink: Ink, width: f32, dashed: bool) {
        let stroke = Some(Stroke { ink, width, dashed });
        let outline = Outline::Line(spots);
        self.items.push(Item::Shape(Shape { outline, stroke, fill: None, hint: String::new() }));
    }

    /// Adds words.
    pub fn words(&mut self, text: &str, at: Spot, anchor: Anchor, size: f32, ink: Ink) {
        self.turned(text, at, anchor, size, ink, 0.0);
    }

    /// Adds words that do not run from left to right.
    pub fn turned(&mut self, text: &str, at: Spot, anchor: Anchor, size: f32, ink: Ink, turn: f32) {
        let text = font::spelled(text);
        self.items.push(Item::Words(Words { at, anchor, turn, size, ink, text }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As WCAG 2 has it.
    fn contrast(one: u32, other: u32) -> f64 {
        let light = |rgb: u32| {
            let [_, rgb @ ..] = rgb.to_be_bytes();
            let [r, g, b] = rgb.map(|part| {
                let part = f64::from(part) / 255.0;
                if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
            });
            0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
        };
        let (one, other) = (light(one), light(other));
        (one / other).max(other / one)
    }

    #[test]
    fn colours_stand_out_from_either_paper() {
        let (_, light, dark) = COLOURS[Ink::Paper.place()];
        for (name, on_light, on_dark) in COLOURS {
            let least = match name {
                "paper" | "grid" => 1.0,
                "text" | "muted" => 4.5,
                _ => 3.0,
            };
            assert!(contrast(on_light, light) >= least, "{name} on light paper");
            assert!(contrast(on_dark, dark) >= least, "{name} on dark paper");
        }
    }

    #[test]
    fn subjects_begin_again() {
        assert_eq!(Ink::Subject(0).name(), "c0");
        assert_eq!(Ink::Subject(SUBJECTS + 1), Ink::Subject(SUBJECTS + 1));
        assert_eq!(Ink::Subject(SUBJECTS + 1).name(), "c1");
    }
}
