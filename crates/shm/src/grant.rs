//! Pages that other domains granted: copied to and from without being mapped.
//!
//! Only the hypervisor reaches them, one call for many copies. A [`Seg`] or [`SegMut`] of such a
//! page is cut and handed on like any other; whoever copies puts the copies into a [`Copies`],
//! which does those between mapped memory at once and the others together at the end:
//!
//! ```text
//!   copy(to, from) ── both mapped ──▶ memcpy
//!        └─── a grant on a side ───▶ pieces ── finish ──▶ Grants::copy, once for each host
//!                                                  └────▶ failed(tag, whose grant was bad)
//! ```
//!
//! What it does not do: it grants nothing and maps nothing; that is the host's.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::copy::{Seg, SegMut};
use crate::private::Private;

/// Size of a granted page, in bytes, whatever the size of ours.
pub const GRANT_LEN: u32 = 4096;

/// Who copies between grants, and between grants and memory: a hypervisor, or what stands in for
/// one.
pub trait Grants: Send + Sync {
    /// Does every piece on its own and [tells](Piece::set) how it went: a grant that is not there,
    /// or forbids it, fails its piece and no other.
    fn copy(&self, pieces: &mut [Piece<'_>]);

    /// At least `len` bytes of private memory that this copies to and from faster than other;
    /// `None` if there is none.
    fn private(&self, _len: usize) -> Option<Private> {
        None
    }
}

/// A domain whose grants are copied from and to, as its host knows it. Segments refer to it.
///
/// Larger than a page and aligned to its size, so that a segment of 16 bytes can say both which
/// domain it is of and how far into the page it is: its address is the domain's plus the offset.
#[repr(align(8192))]
pub struct Domain {
    id: u16,
    host: Arc<dyn Grants>,
}

/// The alignment above: what is not offset in a granted segment's address.
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

    /// At least `len` bytes of private memory, of the kind that its host copies to and from best.
    ///
    /// # Errors
    /// There is no memory.
    pub fn private(&self, len: usize) -> io::Result<Private> {
        self.host.private(len).map_or_else(|| Private::plain(len), Ok)
    }

    /// Its number, as the host knows it.
    pub fn id(&self) -> u16 {
        self.id
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.id)
    }
}

/// Address and mark of a granted segment; `None` if it is no part of a page.
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
/// `at` and `grant` come from [`point`], perhaps moved on inside the page, and the domain lives
/// for 'm.
pub(crate) unsafe fn place<'m>(at: NonNull<u8>, grant: u32) -> (&'m Domain, u32, u16) {
    let offset = at.addr().get() % DOMAIN_LEN;
    // SAFETY: goes back to the start of the domain it was made from.
    let domain = unsafe { at.sub(offset) }.cast::<Domain>();
    // SAFETY: the caller's contract.
    (unsafe { domain.as_ref() }, grant.wrapping_sub(1), offset as u16)
}

/// Whose grant was bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// That of the page copied from.
    Source,
    /// That of the page copied to.
    Destination,
}

/// One end of a [`Piece`].
#[derive(Clone, Copy, Debug)]
pub enum Side<'m, S> {
    /// Memory of ours.
    Mapped(S),
    /// A page that a domain granted.
    Granted {
        /// Who did.
        domain: &'m Domain,
        /// Its grant reference.
        gref: u32,
        /// Where in the page.
        offset: u16,
    },
}

/// One copy that has a grant on a side or on both; inside one page where it has.
pub struct Piece<'m> {
    from: Seg<'m>,
    to: SegMut<'m>,
    tag: u16,
    result: Result<(), Failed>,
}

impl<'m> Piece<'m> {
    /// Failed until told otherwise.
    fn new(to: SegMut<'m>, from: Seg<'m>, tag: u16) -> Self {
        debug_assert!(to.len() == from.len());
        let whose = if from.is_granted() { Failed::Source } else { Failed::Destination };
        Self { from, to, tag, result: Err(whose) }
    }

    /// How many bytes.
    pub fn len(&self) -> u32 {
        self.from.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.from.is_empty()
    }

    /// Where they come from.
    pub fn src(&self) -> Side<'m, Seg<'m>> {
        match self.from.place() {
            None => Side::Mapped(self.from),
            Some((domain, gref, offset)) => Side::Granted { domain, gref, offset },
        }
    }

    /// Where they go.
    pub fn dst(&mut self) -> Side<'_, SegMut<'_>> {
        match self.to.place() {
            None => Side::Mapped(self.to.reborrow()),
            Some((domain, gref, offset)) => Side::Granted { domain, gref, offset },
        }
    }

    /// Tells how it went. A piece that nothing is told of has failed.
    pub fn set(&mut self, result: Result<(), Failed>) {
        self.result = result;
    }

    /// Whose call does it: the host of both ends, or of the only one.
    fn host(&self) -> Option<&'m Arc<dyn Grants>> {
        let domain = self.from.place().or_else(|| self.to.place());
        domain.map(|(domain, ..)| &domain.host)
    }
}

/// Whether two hosts are one.
fn same(a: &Arc<dyn Grants>, b: &Arc<dyn Grants>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Copies the smaller of the two lengths at once; returns how much, or 0 if a grant was bad.
#[cold]
pub(crate) fn copy_now(mut to: SegMut<'_>, from: Seg<'_>) -> u32 {
    let n = to.len().min(from.len());
    match copy_piece(to.split_off(n), from.take(n)) {
        Ok(()) => n,
        Err(_) => 0,
    }
}

/// One copy of two ends of the same length.
fn copy_piece(to: SegMut<'_>, from: Seg<'_>) -> Result<(), Failed> {
    if from.is_empty() {
        return Ok(());
    }
    if let (Some((source, ..)), Some((destination, ..))) = (from.place(), to.place())
        && !same(&source.host, &destination.host)
    {
        // No one reaches both pages, and neither is longer than this.
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

/// Copies to be done together. Kept from burst to burst for its allocation.
#[derive(Default)]
pub struct Copies<'m> {
    pieces: Vec<Piece<'m>>,
}

impl<'m> Copies<'m> {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Copies from `from` to `to` and advances `to`; returns how many bytes: the smaller of the two
    /// lengths. Done at once if both are mapped, else by [`finish`](Self::finish), which tells by
    /// `tag` what failed.
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

    /// How many copies wait.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether none waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Does all copies that wait, in one call to each host, then tells of each that failed.
    /// Memory of ours that would have held what could not be read is zeroed: what was there
    /// before is no one's to see.
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

    /// The host that reaches both ends of all: nearly always there is one.
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

    /// The same allocation, empty. The segments' lifetime ends here.
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

    /// Whether no one host reaches both ends.
    fn is_between_hosts(&self) -> bool {
        match (self.from.place(), self.to.place()) {
            (Some((source, ..)), Some((destination, ..))) => !same(&source.host, &destination.host),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
