//! Primitives of a plot: shapes and text in colours by use. The destination, page or file, maps
//! them to actual colours.

use super::font;

/// Use of a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// Background.
    Paper,
    /// Text.
    Text,
    /// Less important text.
    Muted,
    /// Axes.
    Axis,
    /// Grid lines.
    Grid,
    /// Colour of a subject, by number from 0; repeats after [`SUBJECTS`].
    Subject(usize),
}

/// Colours: name, value on light background, value on dark background. They are distinguishable
/// with colour blindness (after Okabe and Ito), with a contrast of 3:1 to the background.
pub const COLOURS: [(&str, u32, u32); 13] = [
    ("paper", 0xffffff, 0x16191d),
    ("text", 0x1c2126, 0xe6e9ec),
    ("muted", 0x59636e, 0x9aa4ae),
    ("axis", 0x7b858f, 0x77818b),
    ("grid", 0xe3e7eb, 0x2b3138),
    ("c0", 0x0067a8, 0x5ab4f0),
    ("c1", 0xcf5300, 0xff8f4a),
    ("c2", 0x007f5b, 0x35c79a),
    ("c3", 0x701a6b, 0xdb4fa0),
    ("c4", 0x5f4700, 0xf2e34a),
    ("c5", 0x5a55c8, 0xa9a4ff),
    ("c6", 0x5c6670, 0xb6bfc8),
    ("c7", 0xb3202c, 0xff7f86),
];
/// Number of colours for subjects.
pub const SUBJECTS: usize = 8;

impl Ink {
    /// Its index in [`COLOURS`].
    fn index(self) -> usize {
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
        COLOURS[self.index()].0
    }
}

/// A position: right and down from the upper left corner, in pixels.
pub type Spot = (f32, f32);

/// The outline of a shape.
#[derive(Clone, Debug, PartialEq)]
pub enum Outline {
    /// An open path.
    Line(Vec<Spot>),
    /// A closed path.
    Area(Vec<Spot>),
    /// Centre and radius.
    Circle(Spot, f32),
}

/// Style of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stroke {
    /// Its colour.
    pub ink: Ink,
    /// Its width.
    pub width: f32,
    /// Whether it is dashed.
    pub dashed: bool,
}

/// Lengths of dashes and gaps of a dashed line.
pub const DASHES: [f32; 2] = [6.0, 4.0];

/// A shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Its outline.
    pub outline: Outline,
    /// Its stroke, if any.
    pub stroke: Option<Stroke>,
    /// Its fill and opacity (0 to 1), if any.
    pub fill: Option<(Ink, f32)>,
    /// Its tooltip; may be empty.
    pub hint: String,
}

/// The part of a text that is at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The left end.
    Start,
    /// The middle.
    Middle,
    /// The right end.
    End,
}

/// A line of text.
#[derive(Clone, Debug, PartialEq)]
pub struct Words {
    /// Its position, on the baseline.
    pub at: Spot,
    /// The part of the text at that position.
    pub anchor: Anchor,
    /// Clockwise rotation about the position, in degrees.
    pub turn: f32,
    /// Font size.
    pub size: f32,
    /// Its colour.
    pub ink: Ink,
    /// The text.
    pub text: String,
}

/// An item of a scene.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// A shape.
    Shape(Shape),
    /// Text.
    Words(Words),
}

/// A drawing.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// Title, for screen readers.
    pub title: String,
    /// Description, for screen readers.
    pub about: String,
    /// Identifier, unique in a page.
    pub name: String,
    /// Width and height.
    pub size: Spot,
    /// Items, from back to front.
    pub items: Vec<Item>,
}

impl Scene {
    /// Adds a line.
    pub fn line(&mut self, spots: Vec<Spot>, ink: Ink, width: f32, dashed: bool) {
        let stroke = Some(Stroke { ink, width, dashed });
        let outline = Outline::Line(spots);
        self.items.push(Item::Shape(Shape { outline, stroke, fill: None, hint: String::new() }));
    }

    /// Adds horizontal text.
    pub fn words(&mut self, text: &str, at: Spot, anchor: Anchor, size: f32, ink: Ink) {
        self.rotated_text(text, at, anchor, size, ink, 0.0);
    }

    /// Adds rotated text.
    pub fn rotated_text(
        &mut self,
        text: &str,
        at: Spot,
        anchor: Anchor,
        size: f32,
        ink: Ink,
        turn: f32,
    ) {
        let text = font::spelled(text);
        self.items.push(Item::Words(Words { at, anchor, turn, size, ink, text }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contrast ratio as defined by WCAG 2.
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
    fn colours_contrast_with_the_background() {
        let (_, light, dark) = COLOURS[Ink::Paper.index()];
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
    fn colours_of_subjects_repeat() {
        assert_eq!(Ink::Subject(0).name(), "c0");
        assert_eq!(Ink::Subject(SUBJECTS + 1), Ink::Subject(SUBJECTS + 1));
        assert_eq!(Ink::Subject(SUBJECTS + 1).name(), "c1");
    }
}
