//! Segments of memory and the copy engine.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::mapping::Mapping;

/// Readable bytes: part of a guest's memory, or private ones. Lives as long as its memory table.
#[derive(Clone, Copy)]
pub struct Seg<'m> {
    at: NonNull<u8>,
    len: u32,
    _memory: PhantomData<&'m Mapping>,
}

/// Writable bytes: part of a guest's memory, or private ones.
pub struct SegMut<'m> {
    at: NonNull<u8>,
    len: u32,
    _memory: PhantomData<&'m Mapping>,
}

// SAFETY: a segment is a bounded pointer into memory that outlives 'm and that every user treats
// as concurrently written.
unsafe impl Send for Seg<'_> {}
// SAFETY: as above.
unsafe impl Send for SegMut<'_> {}

impl<'m> Seg<'m> {
    /// No bytes.
    pub const EMPTY: Self = Self { at: NonNull::dangling(), len: 0, _memory: PhantomData };

    /// # Safety
    /// `len` bytes at `at` are readable during 'm, and no one relies on their not changing.
    #[inline]
    pub(crate) unsafe fn new(at: NonNull<u8>, len: u32) -> Self {
        Self { at, len, _memory: PhantomData }
    }

    /// Private bytes as a segment; at most 4 GiB of them.
    pub fn of(bytes: &'m [u8]) -> Self {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self { at: NonNull::from(bytes).cast(), len, _memory: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(self) -> u32 {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The segment without its first `n` bytes (all of them if it is shorter).
    #[inline]
    #[must_use]
    pub fn skip(self, n: u32) -> Self {
        let n = n.min(self.len);
        // SAFETY: `n` is at most the segment's length.
        let at = unsafe { self.at.add(n as usize) };
        Self { at, len: self.len - n, _memory: PhantomData }
    }

    /// The segment's first `n` bytes (all of them if it is shorter).
    #[inline]
    #[must_use]
    pub fn take(self, n: u32) -> Self {
        Self { len: self.len.min(n), ..self }
    }

    /// Copies the first bytes out; returns how many: the smaller of the two lengths.
    #[inline]
    pub fn read(self, out: &mut [u8]) -> usize {
        let n = out.len().min(self.len as usize);
        // SAFETY: both sides have `n` bytes, and `out` is private, so they do not overlap.
        unsafe { copy(out.as_mut_ptr(), self.at.as_ptr(), n) };
        n
    }

    /// The first `N` bytes, in registers; `None` if there are fewer.
    #[inline]
    pub fn first<const N: usize>(self) -> Option<[u8; N]> {
        // SAFETY: `N` bytes are readable; an array of bytes has no alignment.
        (self.len as usize >= N).then(|| unsafe { self.at.cast::<[u8; N]>().read() })
    }

    /// Asks the CPU to fetch the first two lines: drivers end the header at a line's end, so that
    /// the frame begins in the second.
    #[inline]
    pub fn prefetch(self) {
        prefetch(self.at.as_ptr());
        prefetch(self.at.as_ptr().wrapping_add(LINE));
    }

    /// Address and length for a system call's iovec. The kernel copes with whatever the peer does
    /// to the memory meanwhile.
    pub fn as_iovec(self) -> libc::iovec {
        libc::iovec { iov_base: self.at.as_ptr().cast(), iov_len: self.len as usize }
    }
}

impl<'m> SegMut<'m> {
    /// # Safety
    /// `len` bytes at `at` are writable during 'm, and no one relies on their not changing.
    #[inline]
    pub(crate) unsafe fn new(at: NonNull<u8>, len: u32) -> Self {
        Self { at, len, _memory: PhantomData }
    }

    /// Private bytes as a segment; at most 4 GiB of them.
    pub fn of(bytes: &'m mut [u8]) -> Self {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self { at: NonNull::from(bytes).cast(), len, _memory: PhantomData }
    }

    /// The same bytes, for reading.
    #[inline]
    pub fn as_seg(&self) -> Seg<'m> {
        Seg { at: self.at, len: self.len, _memory: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops the first `n` bytes from the segment (all of them if it is shorter).
    #[inline]
    pub fn advance(&mut self, n: u32) {
        let n = n.min(self.len);
        // SAFETY: `n` is at most the segment's length.
        self.at = unsafe { self.at.add(n as usize) };
        self.len -= n;
    }

    /// Writes private bytes at the start and advances; returns how many were written.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> u32 {
        self.copy_from(Seg::of(bytes))
    }

    /// Writes a little-endian word at the start and advances, straight from a register. Short of
    /// room, nothing is written.
    #[inline]
    pub fn write_u64(&mut self, word: u64) {
        self.write_array(word.to_le_bytes());
    }

    /// As [`write_u64`](Self::write_u64).
    #[inline]
    pub fn write_u32(&mut self, word: u32) {
        self.write_array(word.to_le_bytes());
    }

    /// As [`write_u64`](Self::write_u64).
    #[inline]
    pub fn write_u16(&mut self, word: u16) {
        self.write_array(word.to_le_bytes());
    }

    #[inline(always)]
    fn write_array<const N: usize>(&mut self, bytes: [u8; N]) {
        if self.len as usize >= N {
            // SAFETY: `N` bytes are writable; an array of bytes has no alignment.
            unsafe { self.at.cast::<[u8; N]>().write(bytes) };
            self.advance(N as u32);
        }
    }

    /// Copies from `src` and advances; returns how many bytes: the smaller of the two lengths.
    /// The one copy of a frame's payload from guest to guest.
    #[inline]
    pub fn copy_from(&mut self, src: Seg<'_>) -> u32 {
        let n = self.len.min(src.len);
        // SAFETY: both sides have `n` bytes. Two guests' segments may be the same memory only if
        // one guest maps it twice; `copy` is then still a plain byte copy (memmove semantics are
        // not needed for memory safety, see its contract).
        unsafe { copy(self.at.as_ptr(), src.at.as_ptr(), n as usize) };
        self.advance(n);
        n
    }

    /// Asks the CPU to fetch the first two lines for writing.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_write(self.at.as_ptr());
        prefetch_write(self.at.as_ptr().wrapping_add(LINE));
    }

    /// Address and length for a system call's iovec.
    pub fn as_iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.at.as_ptr().cast(), iov_len: self.len as usize }
    }
}

/// Size of a cache line, in bytes.
const LINE: usize = 64;

/// Longest copy done in line; longer ones go to the C library, which picks the widest moves the
/// CPU has.
const INLINE_MAX: usize = 128;

/// Copies `len` bytes. Frames are mostly small, so short copies stay in line: 16-byte moves, then
/// 8, 4, 2 and 1 as the length asks. Pieces never overlap: a piece that was written in parts and is
/// read as a whole soon after would wait for every store before it to reach the cache, which here
/// are stores to other guests' memory (halves the rate at 64 bytes).
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes. Contents may change meanwhile; the bytes
/// that arrive are then any mixture, which the caller must not interpret twice.
// JUSTIFICATION: a call into memcpy costs more than the copy for 64-byte frames (bench `forward`).
#[inline(always)]
unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len > INLINE_MAX {
        // SAFETY: the caller's contract. Overlap can only come from a guest that maps its memory
        // twice: `ptr::copy` is defined for it.
        unsafe { std::ptr::copy(src, dst, len) };
        return;
    }
    let mut at = 0;
    while at + 16 <= len {
        // SAFETY: `at + 16 <= len`.
        unsafe { move_one::<[u64; 2]>(dst, src, at) };
        at += 16;
    }
    if len & 8 != 0 {
        // SAFETY: 8 of the fewer than 16 bytes left.
        unsafe { move_one::<u64>(dst, src, at) };
        at += 8;
    }
    if len & 4 != 0 {
        // SAFETY: 4 of the fewer than 8 bytes left.
        unsafe { move_one::<u32>(dst, src, at) };
        at += 4;
    }
    if len & 2 != 0 {
        // SAFETY: 2 of the fewer than 4 bytes left.
        unsafe { move_one::<u16>(dst, src, at) };
        at += 2;
    }
    if len & 1 != 0 {
        // SAFETY: the last byte.
        unsafe { move_one::<u8>(dst, src, at) };
    }
}

/// Moves one `T` at byte offset `at`.
///
/// # Safety
/// `at + size_of::<T>()` bytes are readable at `src` and writable at `dst`.
#[inline(always)]
unsafe fn move_one<T: Copy>(dst: *mut u8, src: *const u8, at: usize) {
    // SAFETY: the caller's contract.
    let from = unsafe { src.add(at) }.cast::<T>();
    // SAFETY: the caller's contract.
    let to = unsafe { dst.add(at) }.cast::<T>();
    // SAFETY: readable; unaligned reads are asked for as such.
    let value = unsafe { from.read_unaligned() };
    // SAFETY: writable.
    unsafe { to.write_unaligned(value) };
}

/// Asks the CPU to fetch a line; harmless for any address.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetch has no architectural effect whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks the CPU to fetch a line that will be written; harmless for any address.
#[inline(always)]
pub(crate) fn prefetch_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as for `prefetch`. PREFETCHW is a no-op where the CPU lacks it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_length_around_the_inline_limit_is_exact() {
        let src: Vec<u8> = (0..400_u32).map(|i| (i * 7 + 1) as u8).collect();
        for len in 0..300 {
            for skew in 0..3 {
                let mut out = vec![0_u8; 320];
                let mut to = SegMut::of(&mut out[skew..skew + len]);
                assert_eq!(to.copy_from(Seg::of(&src)), len as u32);
                assert!(to.is_empty());
                assert_eq!(out[skew..skew + len], src[..len]);
                assert!(
                    out[skew + len..].iter().all(|b| *b == 0)
                        && out[..skew].iter().all(|b| *b == 0)
                );
            }
        }
    }

    proptest! {
        #[test]
        fn skip_and_take_stay_inside(len in 0_usize..64, skip in 0_u32..80, take in 0_u32..80) {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let seg = Seg::of(&bytes).skip(skip).take(take);
            let want: Vec<u8> = bytes.iter().copied().skip(skip as usize).take(take as usize).collect();
            let mut out = vec![0; 80];
            let n = seg.read(&mut out);
            prop_assert_eq!(&out[..n], &want[..]);
        }
    }
}
