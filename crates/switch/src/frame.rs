//! Bursts of frames on their way through the switch.

use std::cell::Cell;

use shm::{Copies, GRANT_LEN, Seg, SegMut};

use crate::vnet::VnetHdr;

/// Bytes of each frame that are copied to private memory before anything is decided.
pub const HEAD_LEN: usize = 128;
/// Most frames a port hands over at once.
pub const BURST_MAX: usize = 64;
/// Most bytes of one burst, its first frame aside: others wait while it is copied.
pub const BURST_BYTES: u64 = 256 * 1024;
/// Longest frame without GSO, link header and tag included: jumbo.
pub const FRAME_LEN_MAX: u32 = 9216 + 18;
/// Longest frame with GSO.
pub const GSO_LEN_MAX: u32 = 65_550;
/// Most segments of one frame; a longer chain is legal but no driver makes one.
pub const SEGS_MAX: usize = 256;

/// One frame of a burst: where its segments are, how long it is, what it asks for.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Index of the first segment in the burst's `segs`.
    pub seg_first: u32,
    /// Number of segments.
    pub seg_count: u16,
    /// Length in bytes, from the destination MAC on.
    pub len: u32,
    /// Checked offload request.
    pub hdr: VnetHdr,
}

/// Frames taken from one ingress queue, oldest first, with their segments.
#[derive(Default)]
pub struct Burst<'m> {
    /// The frames.
    pub frames: Vec<Frame>,
    /// All segments; a frame's lie together. In the sender's memory, which it may change at will.
    pub segs: Vec<Seg<'m>>,
    /// Private copy of each frame's first bytes, once [`snapshot`](Self::snapshot) was called:
    /// what is decided is decided here, and what is decided on is what is delivered.
    heads: Vec<[u8; HEAD_LEN]>,
    /// Where they are instead if there is room for all.
    heads_lent: &'m mut [[u8; HEAD_LEN]],
    /// How many frames the snapshot covers.
    snapshot_of: usize,
    /// Whether segments may be granted.
    lent: bool,
    /// Private memory for what must be fetched.
    arena: &'m mut [u8],
    /// Frames fetched, and what of the arena all frames together leave over.
    brought: usize,
    spare: usize,
    /// Kept for its allocation.
    copies: Copies<'m>,
    /// Frames whose source could not be read, one bit each.
    unreadable: Cell<u64>,
    /// Frames that turned out to be none, one bit each.
    refused: u64,
    /// Frames that a receiver wanted [fetched](Self::fetch), one bit each.
    asked: u64,
    /// How many of the last frames were [left](Self::leave).
    left: usize,
}

/// Segments whose memory is kept between bursts: what the fullest burst of any port has.
const SEGS_KEPT: usize = 2048;

impl<'m> Burst<'m> {
    /// Adds a new frame of `len` bytes whose segments are `count` ones from `first` on.
    #[inline]
    pub fn push_at(&mut self, first: usize, count: usize, len: u32, hdr: VnetHdr) {
        let (seg_first, seg_count) = (first as u32, count as u16);
        self.frames.push(Frame { seg_first, seg_count, len, hdr });
    }

    /// The segments of `frame`.
    #[inline]
    pub fn segs(&self, frame: &Frame) -> &[Seg<'m>] {
        let first = frame.seg_first as usize;
        &self.segs[first..first + usize::from(frame.seg_count)]
    }

    /// The sender's segments may be granted: `heads` is where [`snapshot`](Self::snapshot) copies
    /// to, one for each frame, and `arena` where [`fetch`](Self::fetch) does, as long as all frames
    /// together. Who calls this does so before adding frames.
    pub fn lend(&mut self, heads: &'m mut [[u8; HEAD_LEN]], arena: &'m mut [u8]) {
        self.lent = true;
        self.heads_lent = heads;
        self.arena = arena;
    }

    /// Whether segments may be granted.
    #[inline]
    pub fn is_lent(&self) -> bool {
        self.lent
    }

    /// Copies those frames among `picks` that lie in granted memory to private memory, all with
    /// one call, and refers to them there from now on: for whoever can do nothing with a grant.
    pub fn fetch(&mut self, picks: impl Iterator<Item = usize> + Clone) {
        if self.lent {
            picks.clone().for_each(|i| self.asked |= 1 << i);
            self.bring(picks);
        }
    }

    /// Fetches all frames before anyone asked, heads and all with one call: for a port whose
    /// frames were [all asked for](Self::all_asked) lately.
    pub fn fetch_ahead(&mut self) {
        self.bring(0..self.frames.len());
    }

    /// Whether every frame was wanted fetched.
    pub fn all_asked(&self) -> bool {
        self.asked.count_ones() as usize >= self.frames.len()
    }

    /// As [`fetch`](Self::fetch), for frames that no receiver asked for.
    pub(crate) fn bring(&mut self, picks: impl Iterator<Item = usize>) {
        if self.brought == 0 {
            let needed: usize = self.frames.iter().map(|frame| frame.len as usize).sum();
            self.spare = self.arena.len().saturating_sub(needed);
        }
        let mut copies = std::mem::take(&mut self.copies);
        for i in picks {
            let Frame { seg_first, seg_count, len, .. } = self.frames[i];
            let range = seg_first as usize..seg_first as usize + usize::from(seg_count);
            if !self.segs[range.clone()].iter().any(|seg| seg.is_granted()) {
                continue;
            }
            let shift = self.shift(range.clone());
            let arena = std::mem::take(&mut self.arena).split_at_mut(shift).1;
            let Some((room, rest)) = arena.split_at_mut_checked(len as usize) else {
                // Not as long as promised: the frame is given up, not the process.
                self.mark_unreadable(i);
                continue;
            };
            self.arena = rest;
            let mut to = SegMut::of(room);
            let fetched = to.as_seg();
            for seg in &self.segs[range.clone()] {
                copies.copy(&mut to, *seg, i as u16);
            }
            self.brought += 1;
            self.segs[range.start] = fetched;
            self.frames[i].seg_count = 1;
        }
        copies.finish(|tag, _| self.mark_unreadable(tag.into()));
        self.copies = copies;
    }

    /// Bytes of the arena to leave out before a frame, so that its pages come to lie on pages: a
    /// copy that crosses a page at either end is two for the hypervisor.
    fn shift(&mut self, segs: std::ops::Range<usize>) -> usize {
        let [first, second, ..] = &self.segs[segs] else { return 0 };
        let end = Seg::of(self.arena).page_offset().wrapping_add(first.len() as u16);
        let shift = usize::from(second.page_offset().wrapping_sub(end) % GRANT_LEN as u16);
        if shift > self.spare {
            return 0;
        }
        self.spare -= shift;
        shift
    }

    /// The sender's memory could not be read: what is of frame `i` here or with a receiver is not
    /// what it meant to send.
    #[inline]
    pub fn mark_unreadable(&self, i: usize) {
        debug_assert!(i < BURST_MAX);
        self.unreadable.set(self.unreadable.get() | 1 << i);
    }

    /// The port counted frame `i` and will give it back: no one is to see it. For a port that must
    /// look at a head to know.
    pub fn refuse(&mut self, i: usize) {
        self.refused |= 1 << i;
    }

    /// Leaves the frames from `i` on, `i` > 0, for the next burst: what they ask for is more than
    /// one burst may cost. Nothing was done with them; their port takes them back.
    pub fn leave(&mut self, i: usize) {
        assert!(0 < i && i <= self.frames.len(), "a burst deals with one frame at least");
        self.left = self.frames.len() - i;
        let dealt_with = u64::MAX >> (BURST_MAX - i.min(BURST_MAX));
        self.unreadable.set(self.unreadable.get() & dealt_with);
        self.refused &= dealt_with;
    }

    /// How many of the last frames were [left](Self::leave).
    #[inline]
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether frame `i` was [refused](Self::refuse).
    #[inline]
    pub fn is_refused(&self, i: usize) -> bool {
        self.refused & 1 << i != 0
    }

    /// Whether frame `i` cannot be read or was refused: it is not delivered.
    #[inline]
    pub fn is_out(&self, i: usize) -> bool {
        (self.unreadable.get() | self.refused) & 1 << i != 0
    }

    /// Whether any frame [is out](Self::is_out).
    #[inline]
    pub fn any_out(&self) -> bool {
        self.unreadable.get() | self.refused != 0
    }

    /// How many frames could not be read, those refused aside.
    #[inline]
    pub fn unreadable(&self) -> u32 {
        (self.unreadable.get() & !self.refused).count_ones()
    }

    /// The same as [`snapshot`](Self::snapshot), with one call for all that is granted.
    fn snapshot_granted(&mut self) {
        let mut copies = std::mem::take(&mut self.copies).recycle();
        let is_room = self.heads_lent.len() >= self.frames.len();
        let heads = if is_room { &mut *self.heads_lent } else { &mut self.heads[..] };
        for (i, (frame, head)) in self.frames.iter().zip(heads).enumerate() {
            let first = frame.seg_first as usize;
            let mut to = SegMut::of(head);
            for seg in &self.segs[first..first + usize::from(frame.seg_count)] {
                copies.copy(&mut to, *seg, i as u16);
            }
        }
        let unreadable = &self.unreadable;
        copies.finish(|tag, _| unreadable.set(unreadable.get() | 1 << tag));
        self.copies = copies.recycle();
    }

    /// Copies every frame's first bytes to private memory, before anyone looks; once, whoever of
    /// port and switch asks first.
    pub fn snapshot(&mut self) {
        if self.snapshot_of == self.frames.len() {
            return;
        }
        // Only the length changes: stale bytes beyond a short frame are never looked at.
        self.heads.resize(self.frames.len().max(self.heads.len()), [0; HEAD_LEN]);
        if self.lent {
            self.snapshot_granted();
            self.snapshot_of = self.frames.len();
            return;
        }
        for (frame, head) in self.frames.iter().zip(&mut self.heads) {
            let first = frame.seg_first as usize;
            let mut at = 0;
            for seg in &self.segs[first..first + usize::from(frame.seg_count)] {
                at += seg.read(&mut head[at..]);
                if at == HEAD_LEN {
                    break;
                }
            }
        }
        self.snapshot_of = self.frames.len();
    }

    /// The private copy of frame `i`'s first bytes; empty if no snapshot was taken.
    #[inline]
    pub fn head(&self, i: usize) -> &[u8] {
        if i >= self.snapshot_of {
            return &[];
        }
        let len = (self.frames[i].len as usize).min(HEAD_LEN);
        &self.heads()[i][..len]
    }

    #[inline]
    fn heads(&self) -> &[[u8; HEAD_LEN]] {
        if self.heads_lent.len() < self.snapshot_of { &self.heads } else { self.heads_lent }
    }

    /// The same, for a port to mend before anyone else looks.
    pub fn head_mut(&mut self, i: usize) -> &mut [u8] {
        let len = self.head(i).len();
        let is_own = self.heads_lent.len() < self.snapshot_of;
        let heads = if is_own { &mut self.heads[..] } else { &mut *self.heads_lent };
        heads.get_mut(i).map_or(&mut [], |head| &mut head[..len])
    }

    /// The same allocations for another burst, empty. The segments' lifetime ends here.
    pub fn recycle<'n>(self) -> Burst<'n> {
        let Self { mut frames, mut segs, heads, copies, .. } = self;
        frames.clear();
        segs.clear();
        if segs.capacity() > SEGS_KEPT {
            segs.shrink_to(SEGS_KEPT);
        }
        // Collecting an empty vector in place keeps its allocation.
        let segs = segs.into_iter().map(|_| Seg::EMPTY).collect();
        Burst { frames, segs, heads, copies: copies.recycle(), ..Burst::default() }
    }
}

#[cfg(test)]
mod tests;
