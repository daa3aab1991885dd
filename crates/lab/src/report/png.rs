//! Renders SVG files to PNG by resvg, with the font that plots are laid out with.

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

use super::font;

/// Pixels of the bitmap per pixel of the SVG, in each direction.
const SCALE: f32 = 2.0;
/// Longest side of the bitmap, in pixels.
const SIDE_MAX: f32 = 8192.0;

/// Renders an SVG file of ours in its light colours.
pub fn file(svg: &str) -> Vec<u8> {
    let mut options = Options { font_family: font::NAME.into(), ..Options::default() };
    let fonts = options.fontdb_mut();
    fonts.load_font_data(font::FILE.into());
    // Fonts of the machine are not loaded: the result is the same everywhere.
    fonts.set_sans_serif_family(font::NAME);
    let tree = Tree::from_str(svg, &options).expect("our own SVG is valid");
    // Whole pixels only, so that the background covers those at the edges.
    let side = |length: f32| (length * SCALE).floor().clamp(1.0, SIDE_MAX) as u32;
    let (wide, high) = (side(tree.size().width()), side(tree.size().height()));
    let mut map = Pixmap::new(wide, high).expect("its sides are between 1 and SIDE_MAX");
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut map.as_mut());
    map.encode_png().expect("encoding to memory cannot fail")
}
