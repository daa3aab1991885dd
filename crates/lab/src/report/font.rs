//! The letters of plots: Roboto, as it was before it could vary, cut down to what plots say
//! (Latin, signs of arithmetic). It is under the Apache Licence 2.0, which `LICENSE-APACHE` has;
//! the file differs from Google's in that it has fewer letters and no hints. With it a plot comes
//! out as PNG on a machine that has no fonts, and words are measured before they are set.

use std::sync::LazyLock;

use ttf_parser::{Face, GlyphId};

static FACE: LazyLock<Face<'static>> = LazyLock::new(|| {
    let font = include_bytes!("roboto.ttf");
    Face::parse(font, 0).expect("our own font can be read")
});

/// The font, and how many pixels one of its units is at a size.
pub fn face(size: f32) -> (&'static Face<'static>, f32) {
    (&FACE, size / f32::from(FACE.units_per_em()))
}

/// The letters of a text in order: glyph and width in the font's units.
pub fn glyphs(text: &str) -> impl Iterator<Item = (GlyphId, u16)> {
    // Words from elsewhere may hold what the font does not: a box is shown.
    text.chars().flat_map(spelled).map(|c| {
        let glyph = FACE.glyph_index(c).unwrap_or(GlyphId(0));
        (glyph, FACE.glyph_hor_advance(glyph).unwrap_or_default())
    })
}

/// Arrows are not in the font.
fn spelled(c: char) -> impl Iterator<Item = char> {
    match c {
        '→' => ['-', '>'].into_iter().take(2),
        '←' => ['<', '-'].into_iter().take(2),
        c => [c, ' '].into_iter().take(1),
    }
}

/// How wide a text is. Where a browser takes another font it may be a little more.
pub fn width(text: &str, size: f32) -> f32 {
    let units: f32 = glyphs(text).map(|(_, width)| f32::from(width)).sum();
    units * face(size).1
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
        assert!(glyphs(said).all(|(glyph, width)| glyph.0 != 0 && width > 0));
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
