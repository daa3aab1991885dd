//! Segments of memory and the copy engine.
//!
//! A segment is mapped memory, or *granted*: bytes of another domain's page, which only the
//! hypervisor can access. Both kinds are 16 bytes and have the same operations; see
//! [`crate::grant`].
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::grant::{self, Domain};
use crate::mapping::Mapping;
use crate::sync::{Ordering, compiler_fence};

/// Readable bytes of a guest's memory or private memory. Lives as long as its memory table.
#[derive(Clone, Copy)]
pub struct Seg<'m> {
    /// Address of the bytes. For granted bytes: the address of their [`Domain`] plus their offset
    /// in the page (which is less than the domain's size, by its alignment).
    at: NonNull<u8>,
    len: u32,
    /// 0: mapped. Otherwise granted: the grant reference plus one.
    grant: u32,
    _memory: PhantomData<&'m Mapping>,
}

/// Writable bytes of a guest's memory or private memory.
pub struct SegMut<'m> {
    /// As in [`Seg`].
    at: NonNull<u8>,
    len: u32,
    grant: u32,
    _memory: PhantomData<&'m Mapping>,
}

// SAFETY: a segment is a bounded pointer into memory that outlives 'm and that every user treats
// as concurrently written; or a reference to a domain, which any thread may use.
unsafe impl Send for Seg<'_> {}
// SAFETY: as above.
unsafe impl Send for SegMut<'_> {}

impl<'m> Seg<'m> {
    /// No bytes.
    pub const EMPTY: Self =
        Self { at: NonNull::dangling(), len: 0, grant: 0, _memory: PhantomData };

    /// # Safety
    /// `len` bytes at `at` are readable during 'm, and no code relies on their contents staying the
    /// same.
    #[inline]
    pub(crate) unsafe fn new(at: NonNull<u8>, len: u32) -> Self {
        Self { at, len, grant: 0, _memory: PhantomData }
    }

    /// Makes a segment of private bytes; at most 4 GiB.
    pub fn of(bytes: &'m [u8]) -> Self {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self { at: NonNull::from(bytes).cast(), len, grant: 0, _memory: PhantomData }
    }

    /// Makes a segment of `len` bytes from `offset` in the page that `domain` granted as `gref`;
    /// `None` if they are not inside the page, or if `gref` is `u32::MAX`, which Xen's headers
    /// reserve as invalid. Whether the grant exists is known only when the bytes are copied.
    #[inline]
    pub fn granted(domain: &'m Domain, gref: u32, offset: u16, len: u16) -> Option<Self> {
        let (at, grant) = grant::point(domain, gref, offset, len)?;
        Some(Self { at, len: u32::from(len), grant, _memory: PhantomData })
    }

    /// Whether the bytes are in another domain's memory: each copy costs a hypercall.
    #[inline]
    pub fn is_granted(self) -> bool {
        self.grant != 0
    }

    /// Domain, reference and offset of granted bytes; `None` if they are mapped.
    pub(crate) fn place(self) -> Option<(&'m Domain, u32, u16)> {
        // SAFETY: made by `granted` from a reference that lives for 'm.
        (self.grant != 0).then(|| unsafe { grant::place(self.at, self.grant) })
    }

    /// Offset of the first byte in its page of 4096 bytes.
    pub fn page_offset(self) -> u16 {
        // Domains, whose addresses granted bytes borrow, are aligned to more than a page.
        (self.at.addr().get() % grant::GRANT_LEN as usize) as u16
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
        Self { at, len: self.len - n, ..self }
    }

    /// The segment's first `n` bytes (all of them if it is shorter).
    #[inline]
    #[must_use]
    pub fn take(self, n: u32) -> Self {
        Self { len: self.len.min(n), ..self }
    }

    /// Copies the first bytes out; returns their number: the smaller of the two lengths, or 0 if
    /// granted bytes cannot be read. Granted bytes cost a hypercall; [`Copies`](crate::Copies)
    /// batches them.
    ///
    /// No later read of `out` is one of the guest's memory: the compiler may not repeat the copy's
    /// reads in place of it.
    #[inline]
    pub fn read(self, out: &mut [u8]) -> usize {
        if self.grant != 0 {
            return grant::copy_now(SegMut::of(out), self) as usize;
        }
        let n = out.len().min(self.len as usize);
        // SAFETY: both sides have `n` bytes, and `out` is private, so they do not overlap.
        unsafe { copy(out.as_mut_ptr(), self.at.as_ptr(), n) };
        compiler_fence(Ordering::SeqCst);
        n
    }

    /// Reads the first `N` bytes, once as [`read`](Self::read) does; `None` if there are fewer, or
    /// if they are granted.
    #[inline]
    pub fn first<const N: usize>(self) -> Option<[u8; N]> {
        let mapped = self.len as usize >= N && self.grant == 0;
        mapped.then(|| {
            // SAFETY: `N` bytes are readable; an array of bytes has no alignment.
            let bytes = unsafe { self.at.cast::<[u8; N]>().read() };
            compiler_fence(Ordering::SeqCst);
            bytes
        })
    }

    /// Prefetches the first two cache lines: drivers end the header at a line's end, so that the
    /// frame begins in the second.
    #[inline]
    pub fn prefetch(self) {
        prefetch(self.at.as_ptr());
        prefetch(self.at.as_ptr().wrapping_add(LINE));
    }

    /// Address and length for a system call's iovec. The kernel tolerates concurrent writes by the
    /// peer. Panics for granted bytes, which have no address.
    pub fn as_iovec(self) -> libc::iovec {
        assert!(self.grant == 0, "granted bytes have no address");
        libc::iovec { iov_base: self.at.as_ptr().cast(), iov_len: self.len as usize }
    }
}

impl<'m> SegMut<'m> {
    /// # Safety
    /// `len` bytes at `at` are writable during 'm, and no code relies on their contents staying the
    /// same.
    #[inline]
    pub(crate) unsafe fn new(at: NonNull<u8>, len: u32) -> Self {
        Self { at, len, grant: 0, _memory: PhantomData }
    }

    /// Makes a segment of private bytes; at most 4 GiB.
    pub fn of(bytes: &'m mut [u8]) -> Self {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Self { at: NonNull::from(bytes).cast(), len, grant: 0, _memory: PhantomData }
    }

    /// Domain, reference and offset of granted bytes; `None` if they are mapped.
    pub(crate) fn place(&self) -> Option<(&'m Domain, u32, u16)> {
        self.as_seg().place()
    }

    /// Returns the same bytes as a readable segment.
    #[inline]
    pub fn as_seg(&self) -> Seg<'m> {
        Seg { at: self.at, len: self.len, grant: self.grant, _memory: PhantomData }
    }

    /// Returns a segment of a granted page, as [`Seg::granted`]; the grant must allow writing.
    #[inline]
    pub fn granted(domain: &'m Domain, gref: u32, offset: u16, len: u16) -> Option<Self> {
        let (at, grant) = grant::point(domain, gref, offset, len)?;
        Some(Self { at, len: u32::from(len), grant, _memory: PhantomData })
    }

    /// Whether the bytes are in another domain's memory: each copy costs a hypercall.
    #[inline]
    pub fn is_granted(&self) -> bool {
        self.grant != 0
    }

    /// Splits off the first `n` bytes (all of them if it is shorter).
    #[inline]
    pub fn split_off(&mut self, n: u32) -> Self {
        let front = Self { len: self.len.min(n), ..*self };
        self.advance(n);
        front
    }

    /// Borrows the same bytes; `self` is unusable until the borrow ends.
    #[inline]
    pub fn reborrow(&mut self) -> SegMut<'_> {
        SegMut { ..*self }
    }

    /// Sets all bytes to zero; returns their number.
    pub fn zero(mut self) -> u32 {
        let (zeroes, mut done) = ([0; 512], 0);
        while !self.is_empty() {
            match self.write(&zeroes) {
                0 => break,
                n => done += n,
            }
        }
        done
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

    /// Writes private bytes at the start and advances; returns the number written.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> u32 {
        self.copy_from(Seg::of(bytes))
    }

    /// Writes a little-endian word at the start, unless it is there already, and advances. Writes
    /// nothing if there is no room. A line that is not written stays in the caches of the guest's
    /// CPUs, and in ours.
    #[inline]
    pub fn update_u64(&mut self, word: u64) {
        self.update(word.to_le_bytes());
    }

    /// Writes a little-endian word unless it is there already, as [`update_u64`](Self::update_u64).
    #[inline]
    pub fn update_u32(&mut self, word: u32) {
        self.update(word.to_le_bytes());
    }

    /// Writes a little-endian word unless it is there already, as [`update_u64`](Self::update_u64).
    #[inline]
    pub fn update_u16(&mut self, word: u16) {
        self.update(word.to_le_bytes());
    }

    /// The guest may write other bytes between the load and the store, or in place of both: the
    /// bytes are its own, and nothing else depends on them.
    #[inline(always)]
    fn update<const N: usize>(&mut self, bytes: [u8; N]) {
        if self.grant != 0 {
            self.write_granted(&bytes);
        } else if self.len as usize >= N {
            let at = self.at.cast::<[u8; N]>();
            // SAFETY: `N` bytes are writable, and so readable; an array of bytes has no alignment.
            if unsafe { at.read() } != bytes {
                // SAFETY: as above.
                unsafe { at.write(bytes) };
            }
            self.advance(N as u32);
        }
    }

    #[cold]
    fn write_granted(&mut self, bytes: &[u8]) {
        if self.len as usize >= bytes.len() {
            self.write(bytes);
        }
    }

    /// Copies from `src` and advances; returns the number of bytes: the smaller of the two lengths,
    /// or 0 if a grant on either side is invalid. This is the one copy of a frame's payload from
    /// guest to guest.
    #[inline]
    pub fn copy_from(&mut self, src: Seg<'_>) -> u32 {
        if self.grant | src.grant != 0 {
            let n = grant::copy_now(self.reborrow(), src);
            self.advance(n);
            return n;
        }
        let n = self.len.min(src.len);
        // SAFETY: both sides have `n` bytes. Two guests' segments may be the same memory only if
        // one guest maps it twice; `copy` is then still a plain byte copy (memmove semantics are
        // not needed for memory safety, see its contract).
        unsafe { copy(self.at.as_ptr(), src.at.as_ptr(), n as usize) };
        self.advance(n);
        n
    }

    /// Prefetches the first two cache lines for writing. A first line that ends with a header of
    /// `hdr_len` bytes, as drivers place it, is prefetched for reading: the header is
    /// [updated](Self::update_u64), and mostly unchanged.
    #[inline]
    pub fn prefetch(&self, hdr_len: u32) {
        let at = self.at.as_ptr();
        if (at.addr() + hdr_len as usize).is_multiple_of(LINE) {
            prefetch(at);
        } else {
            prefetch_write(at);
        }
        prefetch_write(at.wrapping_add(LINE));
    }

    /// Address and length for a system call's iovec; as [`Seg::as_iovec`].
    pub fn as_iovec(&self) -> libc::iovec {
        assert!(self.grant == 0, "granted bytes have no address");
        libc::iovec { iov_base: self.at.as_ptr().cast(), iov_len: self.len as usize }
    }
}

/// Size of a cache line, in bytes.
const LINE: usize = 64;

/// Longest copy done inline, in bytes; longer ones use memcpy, which selects the CPU's widest
/// moves.
const INLINE_MAX: usize = 128;

/// Copies `len` bytes. Frames are mostly small, so short copies are inline: blocks of 64 bytes,
/// then 32, 16, 8, 4, 2 and 1 as needed. Pieces never overlap: a load that spans several recent
/// stores waits until all earlier stores have reached the cache, which here are stores to other
/// guests' memory (halves the rate at 64 bytes).
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes. Contents may change during the copy; the
/// result is then any mixture, and the caller must not fetch the source again to interpret it. Nor
/// may the compiler: a caller that interprets the result has a [`compiler_fence`] after the copy.
// JUSTIFICATION: a call into memcpy costs more than the copy for 64-byte frames (bench `forward`).
#[inline(always)]
unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len > INLINE_MAX {
        // SAFETY: the caller's contract. Overlap can only come from a guest that maps its memory
        // twice: `ptr::copy` is defined for it.
        unsafe { std::ptr::copy(src, dst, len) };
        return;
    }
    let mut at = len & !63;
    for block in 0..len >> 6 {
        // SAFETY: whole blocks of 64 bytes.
        unsafe { move_one::<[u64; 8]>(dst, src, block << 6) };
    }
    if len & 32 != 0 {
        // SAFETY: 32 of the fewer than 64 bytes left.
        unsafe { move_one::<[u64; 4]>(dst, src, at) };
        at += 32;
    }
    if len & 16 != 0 {
        // SAFETY: 16 of the fewer than 32 bytes left.
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
    // SAFETY: readable; the read is an unaligned one.
    let value = unsafe { from.read_unaligned() };
    // SAFETY: writable.
    unsafe { to.write_unaligned(value) };
}

/// Prefetches a cache line; harmless for any address.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, kani))))]
    // SAFETY: prefetch has no architectural effect whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    };
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, kani)))))]
    let _ = at;
}

/// Prefetches a cache line for writing; harmless for any address.
#[inline(always)]
pub(crate) fn prefetch_write(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, kani))))]
    // SAFETY: as for `prefetch`. PREFETCHW is a no-op where the CPU lacks it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    };
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, kani)))))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;
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

    #[test]
    #[cfg_attr(miri, ignore = "needs mprotect")]
    fn a_word_that_is_there_is_not_written() {
        let page = sys::anonymous(4096).unwrap();
        // SAFETY: the page is this test's, for as long as the process lives.
        let words = || unsafe { SegMut::new(page, 14) };
        let mut to = words();
        to.update_u64(0x0102_0304_0506_0708);
        to.update_u32(0x1_0000);
        // SAFETY: a page of this test.
        assert_eq!(unsafe { libc::mprotect(page.as_ptr().cast(), 4096, libc::PROT_READ) }, 0);
        // A store would end the process.
        let mut to = words();
        to.update_u64(0x0102_0304_0506_0708);
        to.update_u32(0x1_0000);
        assert_eq!(to.len(), 2, "advanced");
        to.update_u64(1);
        assert_eq!(to.len(), 2, "no room: nothing is written");
    }

    proptest! {
        #[test]
        fn an_update_is_a_write(
            was in any::<[u8; 20]>(),
            word in any::<u64>(),
            is_there in any::<bool>(),
            len in 0_usize..20,
        ) {
            let mut bytes = was;
            if is_there {
                bytes[..8].copy_from_slice(&word.to_le_bytes());
            }
            let mut want = bytes;
            let mut to = SegMut::of(&mut bytes[..len]);
            to.update_u64(word);
            let left = to.len();
            let mut to = SegMut::of(&mut want[..len]);
            let written = if len < 8 { 0 } else { to.write(&word.to_le_bytes()) };
            prop_assert_eq!(left, len as u32 - written);
            prop_assert_eq!(bytes, want);
        }

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
