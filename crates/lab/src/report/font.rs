//! The font of plots: the static (not variable) Roboto, a subset of Latin letters and arithmetic
//! signs without hints. It is under the Apache Licence 2.0, see `LICENSE-APACHE`. Text is measured
//! and PNG is rendered with it, so that no font has to be installed.

use std::sync::LazyLock;

use ttf_parser::{Face, GlyphId};

/// Its name in style sheets.
pub const NAME: &str = "Roboto";
/// Contents of the font file.
pub const FILE: &[u8] = include_bytes!("roboto.ttf");

static FACE: LazyLock<Face<'static>> =
    LazyLock::new(|| Face::parse(FILE, 0).expect("our own font is valid"));

/// Returns glyph and advance width, in font units, of each character.
fn glyphs(text: &str) -> impl Iterator<Item = (GlyphId, u16)> {
    // Characters that the font lacks are shown as a box.
    text.chars().map(|c| {
        let glyph = FACE.glyph_index(c).unwrap_or(GlyphId(0));
        (glyph, FACE.glyph_hor_advance(glyph).unwrap_or_default())
    })
}

/// Replaces characters that the font lacks: arrows.
pub fn spelled(text: &str) -> String {
    text.replace('→', "->").replace('←', "<-")
}

/// Returns the width of a text; a browser that uses another font may need slightly more.
pub fn width(text: &str, size: f32) -> f32 {
    let units: f32 = glyphs(text).map(|(_, width)| f32::from(width)).sum();
    units * size / f32::from(FACE.units_per_em())
}

/// Wraps a text to lines of at most `wide`; a longer word is not broken.
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
    fn the_font_has_all_characters_of_plots() {
        let text = "AZaz09 .,:;%/()+-−–—×±µσ²≤≥~'\"’“”<>=_[]{}|&→←";
        assert!(glyphs(&spelled(text)).all(|(glyph, width)| glyph.0 != 0 && width > 0));
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
