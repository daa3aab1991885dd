//! Indices of memory, and parts of words.

/// An in-memory index; `u32` fits `usize` on every machine we build for.
#[inline]
pub(crate) fn index(i: u32) -> usize {
    usize::try_from(i).expect("usize holds 32 bits")
}

/// Bits 0 to 31.
#[inline]
pub(crate) const fn lo32(word: u64) -> u32 {
    let b = word.to_le_bytes();
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}
