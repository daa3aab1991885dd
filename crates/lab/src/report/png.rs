//! SVG files as PNG, drawn by resvg with the letters that plots are laid out with.

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

use super::font;

/// Pixels of the bitmap for each of the SVG, each way.
const FINE: f32 = 2.0;
/// Longest side of a bitmap, in pixels.
const SIDE_MAX: f32 = 8192.0;

/// Draws an SVG file of ours on light paper.
pub fn file(svg: &str) -> Vec<u8> {
    let mut options = Options { font_family: font::NAME.into(), ..Options::default() };
    let fonts = options.fontdb_mut();
    fonts.load_font_data(font::FILE.into());
    // A reader's other faces may have other letters; the machine's fonts are not loaded at all.
    fonts.set_sans_serif_family(font::NAME);
    let tree = Tree::from_str(svg, &options).expect("our own SVG can be read");
    // Whole pixels only: none at an edge is half covered by the paper.
    let side = |length: f32| (length * FINE).floor().clamp(1.0, SIDE_MAX) as u32;
    let (wide, high) = (side(tree.size().width()), side(tree.size().height()));
    let mut map = Pixmap::new(wide, high).expect("its sides are neither zero nor huge");
    resvg::render(&tree, Transform::from_scale(FINE, FINE), &mut map.as_mut());
    map.encode_png().expect("a bitmap in memory can be written to memory")
}
