//! The letters of plots: Roboto, as it was before it could vary, cut down to what plots say
//! (Latin, signs of arithmetic). It is under the Apache Licence 2.0, which `LICENSE-APACHE` has;
//! the file differs from Google's in that it has fewer letters and no hints. Words are measured
//! with it before they are set, and PNG is drawn with it: no machine needs fonts.

use std::sync::LazyLock;

use ttf_parser::{Face, GlyphId};

/// Its name in style sheets.
pub const NAME: &str = "Roboto";
/// The file.
pub const FILE: &[u8] = include_bytes!("roboto.ttf");

static FACE: LazyLock<Face<'static>> =
    LazyLock::new(|| Face::parse(FILE, 0).expect("our own font can be read"));

/// The letters of a text in order: glyph and width in the font's units.
fn glyphs(text: &str) -> impl Iterator<Item = (GlyphId, u16)> {
    // Words from elsewhere may hold what the font does not: a box is shown.
    text.chars().map(|c| {
        let glyph = FACE.glyph_index(c).unwrap_or(GlyphId(0));
        (glyph, FACE.glyph_hor_advance(glyph).unwrap_or_default())
    })
}

/// The text with letters that the font has: it has no arrows.
pub fn spelled(text: &str) -> String {
    text.replace('→', "->").replace('←', "<-")
}

/// How wide a text is. Where a browser takes another font it may be a little more.
pub fn width(text: &str, size: f32) -> f32 {
    let units: f32 = glyphs(text).map(|(_, width)| f32::from(width)).sum();
    units * size / f32::from(FACE.units_per_em())
}

/// The text in lines no wider than asked; a word that is wider stays whole.
pub fn wrap(text: &str, size: f32, wide: f32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(&format!("{line} {word}"), size) <= wide => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_plots_say_is_in_the_font() {
        let said = "AZaz09 .,:;%/()+-−–—×±µσ²≤≥~'\"’“”<>=_[]{}|&→←";
        assert!(glyphs(&spelled(said)).all(|(glyph, width)| glyph.0 != 0 && width > 0));
        assert_eq!(glyphs("\u{4e2d}").map(|(glyph, _)| glyph.0).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert!(width("mmm", 12.0) > 2.0 * width("iii", 12.0));
        assert!((width("ab", 24.0) - 2.0 * width("ab", 12.0)).abs() < 0.01);
        assert_eq!(wrap("one two  three", 12.0, 0.0), ["one", "two", "three"]);
        assert_eq!(wrap("one two three", 12.0, 1e3), ["one two three"]);
        assert!(wrap(" ", 12.0, 50.0).is_empty());
    }
}
