//! Pages that other domains granted: copied to and from without being mapped.
//!
//! Only the hypervisor can access them, with one call for many copies. A [`Seg`] or [`SegMut`] of
//! such a page is used like any other; the code that copies uses a [`Copies`], which copies between
//! mapped memory at once and batches the others until the end:
//!
//! ```text
//!   copy(to, from) ── both mapped ──▶ memcpy
//!        └─── a grant on a side ───▶ pieces ── finish ──▶ Grants::copy, once for each host
//!                                                  └────▶ failed(tag, whose grant was bad)
//! ```
//!
//! This module does not grant or map pages; the host does.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::copy::{Seg, SegMut};

/// Size of a granted page, in bytes, independent of the local page size.
pub const GRANT_LEN: u32 = 4096;

/// Copy operations between grants, and between grants and memory: by a hypervisor, or its
/// emulation.
pub trait Grants: Send + Sync {
    /// Copies every piece and [sets its result](Piece::set): an invalid grant, or one that forbids
    /// the access, fails its piece only.
    fn copy(&self, pieces: &mut [Piece<'_>]);
}

/// A domain whose grants are copied from and to. Segments refer to it.
///
/// Larger than a page and aligned to its size, so that a segment of 16 bytes can encode both the
/// domain and the offset in the page: its address is the domain's plus the offset.
#[repr(align(8192))]
pub struct Domain {
    id: u16,
    host: Arc<dyn Grants>,
}

/// Alignment of `Domain`; lower bits of a granted segment's address are the offset.
const DOMAIN_LEN: usize = 8192;

const _: () = assert!(
    size_of::<Domain>() == DOMAIN_LEN
        && align_of::<Domain>() == DOMAIN_LEN
        && DOMAIN_LEN > GRANT_LEN as usize
);

impl Domain {
    /// Domain `id` of `host`.
    pub fn new(id: u16, host: Arc<dyn Grants>) -> Self {
        Self { id, host }
    }

    /// Domain id.
    pub fn id(&self) -> u16 {
        self.id
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.id)
    }
}

/// Address and grant mark of a granted segment; `None` if it is not inside a page.
#[inline]
pub(crate) fn point(
    domain: &Domain,
    gref: u32,
    offset: u16,
    len: u16,
) -> Option<(NonNull<u8>, u32)> {
    let grant = gref.wrapping_add(1);
    if u32::from(offset) + u32::from(len) > GRANT_LEN || grant == 0 {
        return None;
    }
    // SAFETY: the offset is less than the domain's size.
    Some((unsafe { NonNull::from(domain).cast::<u8>().add(usize::from(offset)) }, grant))
}

/// The domain, grant reference and offset of a granted segment.
///
/// # Safety
/// `at` and `grant` come from [`point`], possibly advanced inside the page, and the domain lives
/// for 'm.
pub(crate) unsafe fn place<'m>(at: NonNull<u8>, grant: u32) -> (&'m Domain, u32, u16) {
    let offset = at.addr().get() % DOMAIN_LEN;
    // SAFETY: moves back to the start of the domain it was made from.
    let domain = unsafe { at.sub(offset) }.cast::<Domain>();
    // SAFETY: the caller's contract.
    (unsafe { domain.as_ref() }, grant.wrapping_sub(1), offset as u16)
}

/// Side whose grant was invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The source page.
    Source,
    /// The destination page.
    Destination,
}

/// One end of a [`Piece`].
#[derive(Clone, Copy, Debug)]
pub enum Side<'m, S> {
    /// Local memory.
    Mapped(S),
    /// A page that a domain granted.
    Granted {
        /// The granting domain.
        domain: &'m Domain,
        /// The grant reference.
        gref: u32,
        /// Offset in the page.
        offset: u16,
    },
}

/// One copy with a grant on one side or both; a granted side is inside one page.
pub struct Piece<'m> {
    from: Seg<'m>,
    to: SegMut<'m>,
    tag: u16,
    result: Result<(), Failed>,
}

impl<'m> Piece<'m> {
    /// Starts as failed until a result is set.
    fn new(to: SegMut<'m>, from: Seg<'m>, tag: u16) -> Self {
        debug_assert!(to.len() == from.len());
        let whose = if from.is_granted() { Failed::Source } else { Failed::Destination };
        Self { from, to, tag, result: Err(whose) }
    }

    /// Length in bytes.
    pub fn len(&self) -> u32 {
        self.from.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.from.is_empty()
    }

    /// Source of the bytes.
    pub fn src(&self) -> Side<'m, Seg<'m>> {
        match self.from.place() {
            None => Side::Mapped(self.from),
            Some((domain, gref, offset)) => Side::Granted { domain, gref, offset },
        }
    }

    /// Destination of the bytes.
    pub fn dst(&mut self) -> Side<'_, SegMut<'_>> {
        match self.to.place() {
            None => Side::Mapped(self.to.reborrow()),
            Some((domain, gref, offset)) => Side::Granted { domain, gref, offset },
        }
    }

    /// Sets the result. A piece without a result counts as failed.
    pub fn set(&mut self, result: Result<(), Failed>) {
        self.result = result;
    }

    /// Host that performs the copy: that of both ends, or of the only granted one.
    fn host(&self) -> Option<&'m Arc<dyn Grants>> {
        let domain = self.from.place().or_else(|| self.to.place());
        domain.map(|(domain, ..)| &domain.host)
    }
}

/// Whether two hosts are the same.
fn same(a: &Arc<dyn Grants>, b: &Arc<dyn Grants>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Copies the smaller of the two lengths at once; returns it, or 0 if a grant was invalid.
#[cold]
pub(crate) fn copy_now(mut to: SegMut<'_>, from: Seg<'_>) -> u32 {
    let n = to.len().min(from.len());
    match copy_piece(to.split_off(n), from.take(n)) {
        Ok(()) => n,
        Err(_) => 0,
    }
}

/// Copies between two ends of the same length.
fn copy_piece(to: SegMut<'_>, from: Seg<'_>) -> Result<(), Failed> {
    if from.is_empty() {
        return Ok(());
    }
    if let (Some((source, ..)), Some((destination, ..))) = (from.place(), to.place())
        && !same(&source.host, &destination.host)
    {
        // No host can access both pages; neither is longer than this buffer.
        let mut between = [0; GRANT_LEN as usize];
        let between = &mut between[..from.len() as usize];
        copy_piece(SegMut::of(between), from)?;
        return copy_piece(to, Seg::of(between));
    }
    let mut piece = Piece::new(to, from, 0);
    let Some(host) = piece.host() else { return Ok(()) };
    host.copy(std::slice::from_mut(&mut piece));
    piece.result
}

/// Batch of copies. Reused from burst to burst for its allocation.
#[derive(Default)]
pub struct Copies<'m> {
    pieces: Vec<Piece<'m>>,
}

impl<'m> Copies<'m> {
    /// Creates an empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Copies from `from` to `to` and advances `to`; returns the number of bytes: the smaller of
    /// the two lengths. Copied at once if both are mapped, else by [`finish`](Self::finish), which
    /// reports failures by `tag`.
    #[inline]
    pub fn copy(&mut self, to: &mut SegMut<'m>, from: Seg<'m>, tag: u16) -> u32 {
        if !to.is_granted() && !from.is_granted() {
            return to.copy_from(from);
        }
        self.queue(to, from, tag)
    }

    #[cold]
    fn queue(&mut self, to: &mut SegMut<'m>, from: Seg<'m>, tag: u16) -> u32 {
        let n = to.len().min(from.len());
        if n == 0 {
            return 0;
        }
        self.pieces.push(Piece::new(to.split_off(n), from.take(n), tag));
        n
    }

    /// Number of pending copies.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether no copy is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Performs all pending copies, in one call to each host, then reports each failed one. Local
    /// memory whose source could not be read is zeroed, so that its old contents do not leak.
    #[inline]
    pub fn finish(&mut self, failed: impl FnMut(u16, Failed)) {
        if !self.pieces.is_empty() {
            self.finish_all(failed);
        }
    }

    #[cold]
    fn finish_all(&mut self, mut failed: impl FnMut(u16, Failed)) {
        match self.only_host() {
            Some(host) => host.copy(&mut self.pieces),
            None => self.copy_by_host(),
        }
        for piece in &mut self.pieces {
            let Err(whose) = piece.result else { continue };
            if !piece.to.is_granted() {
                piece.to.reborrow().zero();
            }
            failed(piece.tag, whose);
        }
        self.pieces.clear();
    }

    /// The host that can access both ends of all copies; usually there is one.
    fn only_host(&self) -> Option<&'m Arc<dyn Grants>> {
        let host = self.pieces.first()?.host()?;
        self.pieces.iter().all(|piece| piece.is_reached_by(host)).then_some(host)
    }

    fn copy_by_host(&mut self) {
        for piece in self.pieces.iter_mut().filter(|p| p.is_between_hosts()) {
            piece.result = copy_piece(piece.to.reborrow(), piece.from);
        }
        let key = |p: &Piece<'_>| match p.host() {
            Some(host) if !p.is_between_hosts() => Arc::as_ptr(host).cast::<()>().addr(),
            _ => 0,
        };
        self.pieces.sort_by_key(key);
        for group in self.pieces.chunk_by_mut(|a, b| key(a) == key(b)) {
            if let Some(host) = group[0].host().filter(|_| key(&group[0]) != 0) {
                host.copy(group);
            }
        }
    }

    /// Returns the same allocation, empty. The segments' lifetime ends here.
    pub fn recycle<'n>(self) -> Copies<'n> {
        let mut pieces = self.pieces;
        pieces.clear();
        // Collecting an empty vector in place keeps its allocation.
        let empty = |_| Piece::new(SegMut::of(&mut []), Seg::EMPTY, 0);
        Copies { pieces: pieces.into_iter().map(empty).collect() }
    }
}

impl Piece<'_> {
    fn is_reached_by(&self, host: &Arc<dyn Grants>) -> bool {
        let is_its = |place: Option<(&Domain, u32, u16)>| {
            place.is_none_or(|(domain, ..)| same(&domain.host, host))
        };
        is_its(self.from.place()) && is_its(self.to.place())
    }

    /// Whether no single host can access both ends.
    fn is_between_hosts(&self) -> bool {
        match (self.from.place(), self.to.place()) {
            (Some((source, ..)), Some((destination, ..))) => !same(&source.host, &destination.host),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
