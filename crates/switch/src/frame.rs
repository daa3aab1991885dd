//! Frames and bursts of frames in the switch.

use std::cell::Cell;

use shm::{Copies, GRANT_LEN, Seg, SegMut};

use crate::vnet::VnetHdr;

/// Bytes of each frame copied to private memory for parsing.
pub const HEAD_LEN: usize = 128;
/// Bytes of each frame that a switch without rules parses: both addresses, and the EtherType or a
/// whole VLAN tag.
pub const START_LEN: usize = 16;
/// A frame's first bytes.
pub(crate) type Start = [u8; START_LEN];
/// Longest head with a changed VLAN tag.
pub(crate) const RETAGGED_LEN: usize = HEAD_LEN + 4;
/// Most frames in a burst.
pub const BURST_MAX: usize = 64;
/// Most bytes of one burst, not counting its first frame: others wait while it is copied.
pub const BURST_BYTES: u64 = 256 * 1024;
/// Longest frame without GSO (jumbo), in bytes, with link header and tag.
pub const FRAME_LEN_MAX: u32 = 9216 + 18;
/// Longest frame with GSO, in bytes.
pub const GSO_LEN_MAX: u32 = 65_550;
/// Most segments of one frame; a longer chain is legal but no driver makes one.
pub const SEGS_MAX: usize = 256;

/// One frame of a burst: its segments, length and offload request.
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
    /// All segments; those of one frame are adjacent. The sender may change their contents.
    pub segs: Vec<Seg<'m>>,
    /// Private copy of each frame's first bytes, after [`snapshot`](Self::snapshot): it is parsed,
    /// and delivered as parsed.
    heads: Vec<[u8; HEAD_LEN]>,
    /// Memory used instead if it has room for all.
    heads_lent: &'m mut [[u8; HEAD_LEN]],
    /// Number of frames in the snapshot.
    snapshot_of: usize,
    /// Private copy of each frame's first bytes, after [`snapshot_starts`](Self::snapshot_starts),
    /// until there is a snapshot.
    starts: Vec<Start>,
    /// Whether segments may be granted.
    lent: bool,
    /// Private memory for fetched frames.
    arena: &'m mut [u8],
    /// Number of frames fetched, and unused rest of the arena.
    fetched_count: usize,
    spare: usize,
    /// Kept for its allocation.
    copies: Copies<'m>,
    /// Frames whose source could not be read, as a bit set.
    unreadable: Cell<u64>,
    /// Copies of frames that were not delivered because they could not be read.
    lost: Cell<u32>,
    /// Refused frames, as a bit set.
    refused: u64,
    /// Frames that a receiver wanted [fetched](Self::fetch), as a bit set.
    fetch_requested: u64,
    /// Number of frames at the end that were [left](Self::leave).
    left: usize,
    /// Whether a frame has offloads.
    has_offloads: bool,
}

/// Private copies of frames' first bytes.
#[derive(Clone, Copy)]
pub enum Heads<'b> {
    /// None were made.
    None,
    /// Of [`START_LEN`] bytes.
    Starts(&'b [[u8; START_LEN]]),
    /// Of up to [`HEAD_LEN`] bytes: as many as the frame has.
    Whole(&'b [[u8; HEAD_LEN]]),
}

/// Capacity for segments kept between bursts: enough for the largest burst of any port.
const SEGS_KEPT: usize = 2048;

impl<'m> Burst<'m> {
    /// A burst of one private frame.
    pub fn of(frame: &'m [u8]) -> Self {
        let mut burst = Self::default();
        burst.push_private(frame, VnetHdr::NONE);
        burst
    }

    /// Adds a frame of `len` bytes with `count` segments from `first` on.
    #[inline]
    pub fn push_at(&mut self, first: usize, count: usize, len: u32, hdr: VnetHdr) {
        let (seg_first, seg_count) = (first as u32, count as u16);
        self.has_offloads |= !hdr.is_plain();
        self.frames.push(Frame { seg_first, seg_count, len, hdr });
    }

    /// Adds a frame of `len` bytes, whose segments are those after the last frame's, and its
    /// snapshot: the first `head_len` bytes of `head`, which is private, and what it lacks from the
    /// segments. All frames before it must have been added in this way.
    #[inline]
    pub(crate) fn push_parsed(
        &mut self,
        head: &[u8; RETAGGED_LEN],
        head_len: usize,
        len: u32,
        hdr: VnetHdr,
    ) {
        debug_assert_eq!(self.snapshot_of, self.frames.len(), "every frame has its snapshot");
        let last = self.frames.last();
        let first = last.map_or(0, |f| f.seg_first as usize + usize::from(f.seg_count));
        self.push_at(first, self.segs.len() - first, len, hdr);
        if self.heads.len() == self.snapshot_of {
            self.heads.push([0; HEAD_LEN]);
        }
        let out = &mut self.heads[self.snapshot_of];
        // Of one length, so without a call; bytes after a short frame are never read.
        out.copy_from_slice(&head[..HEAD_LEN]);
        if head_len < HEAD_LEN && len as usize > head_len {
            read_head(&self.segs[first..], out);
        }
        self.snapshot_of += 1;
    }

    /// Replaces the header of frame `i`.
    pub fn set_hdr(&mut self, i: usize, hdr: VnetHdr) {
        self.has_offloads |= !hdr.is_plain();
        self.frames[i].hdr = hdr;
    }

    /// Whether a frame may need offloads in software: its header is not plain.
    #[inline]
    pub fn has_offloads(&self) -> bool {
        self.has_offloads
    }

    /// The segments of `frame`.
    #[inline]
    pub fn segs(&self, frame: &Frame) -> &[Seg<'m>] {
        let first = frame.seg_first as usize;
        &self.segs[first..first + usize::from(frame.seg_count)]
    }

    /// Permits granted segments: [`snapshot`](Self::snapshot) copies to `heads`, one for each
    /// frame, and [`fetch`](Self::fetch) to `arena`, which must hold all frames. Call it before
    /// adding frames.
    pub fn permit_granted(&mut self, heads: &'m mut [[u8; HEAD_LEN]], arena: &'m mut [u8]) {
        self.lent = true;
        self.heads_lent = heads;
        self.arena = arena;
    }

    /// Whether segments may be granted.
    #[inline]
    pub fn permits_granted(&self) -> bool {
        self.lent
    }

    /// Copies the granted frames among `picks` to private memory, with one host call, and refers to
    /// the copies from then on: for receivers that do not accept grants.
    pub fn fetch(&mut self, picks: impl Iterator<Item = usize> + Clone) {
        if self.lent {
            picks.clone().for_each(|i| self.fetch_requested |= 1 << i);
            self.fetch_uncounted(picks);
        }
    }

    /// Fetches all frames in advance, heads included, with one host call: for a port whose frames
    /// [all needed that](Self::all_fetched) recently.
    pub fn fetch_ahead(&mut self) {
        self.fetch_uncounted(0..self.frames.len());
    }

    /// Whether a receiver requested the fetch of every frame.
    pub fn all_fetched(&self) -> bool {
        self.fetch_requested.count_ones() as usize >= self.frames.len()
    }

    /// As [`fetch`](Self::fetch), but not counted as requested by a receiver.
    pub(crate) fn fetch_uncounted(&mut self, picks: impl Iterator<Item = usize>) {
        if self.fetched_count == 0 {
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
                // Longer than the arena: the frame is dropped.
                self.mark_unreadable(i);
                continue;
            };
            self.arena = rest;
            let mut to = SegMut::of(room);
            let fetched = to.as_seg();
            for seg in &self.segs[range.clone()] {
                copies.copy(&mut to, *seg, i as u16);
            }
            self.fetched_count += 1;
            self.segs[range.start] = fetched;
            self.frames[i].seg_count = 1;
        }
        copies.finish(|tag, _| self.mark_unreadable(tag.into()));
        self.copies = copies;
    }

    /// Bytes of the arena to skip before a frame, so that its pages are page-aligned: a copy that
    /// crosses a page at either end needs two hypervisor operations.
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

    /// Records that the sender's memory could not be read: copies of frame `i` are invalid.
    #[inline]
    pub fn mark_unreadable(&self, i: usize) {
        debug_assert!(i < BURST_MAX);
        self.unreadable.set(self.unreadable.get() | 1 << i);
    }

    /// Refuses frame `i`, which the port has counted and will return: it is not delivered. For a
    /// port that must parse heads to decide.
    pub fn refuse(&mut self, i: usize) {
        self.refused |= 1 << i;
    }

    /// Leaves the frames from `i` on, `i` > 0, for the next burst, as they exceed the bounds of one
    /// burst. They are unprocessed; their port takes them back.
    pub fn leave(&mut self, i: usize) {
        assert!(0 < i && i <= self.frames.len(), "a burst handles at least one frame");
        self.left = self.frames.len() - i;
        let dealt_with = u64::MAX >> (BURST_MAX - i.min(BURST_MAX));
        self.unreadable.set(self.unreadable.get() & dealt_with);
        self.refused &= dealt_with;
    }

    /// Number of frames at the end that were [left](Self::leave).
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
    pub fn is_excluded(&self, i: usize) -> bool {
        (self.unreadable.get() | self.refused) & 1 << i != 0
    }

    /// Whether any frame [is excluded](Self::is_excluded).
    #[inline]
    pub fn any_excluded(&self) -> bool {
        self.unreadable.get() | self.refused != 0
    }

    /// Number of frames that were not refused: those taken from the peer.
    pub fn admitted(&self) -> usize {
        self.frames.len() - self.refused.count_ones() as usize
    }

    /// Counts a copy of frame `i` that is not delivered because the frame [is
    /// excluded](Self::is_excluded); a refused one was counted by its port.
    #[cold]
    pub fn lose(&self, i: usize) {
        self.lost.set(self.lost.get() + u32::from(!self.is_refused(i)));
    }

    /// Whether frame `i` [is excluded](Self::is_excluded): then a copy of it is [lost](Self::lose).
    #[inline]
    pub fn loses(&self, i: usize) -> bool {
        let is_excluded = self.is_excluded(i);
        if is_excluded {
            self.lose(i);
        }
        is_excluded
    }

    /// Returns the number of copies [lost](Self::lose), and resets it.
    pub fn take_lost(&self) -> u32 {
        self.lost.take()
    }

    /// As [`snapshot`](Self::snapshot), with one host call for all granted frames.
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

    /// Copies every frame's first bytes to private memory for parsing; later calls have no effect.
    pub fn snapshot(&mut self) {
        if self.snapshot_of == self.frames.len() {
            return;
        }
        // Only the length changes: stale bytes beyond a short frame are never read.
        self.heads.resize(self.frames.len().max(self.heads.len()), [0; HEAD_LEN]);
        if self.lent {
            self.snapshot_granted();
            self.snapshot_of = self.frames.len();
            return;
        }
        if !self.starts.is_empty() {
            return self.extend_starts();
        }
        for (frame, head) in self.frames.iter().zip(&mut self.heads) {
            let first = frame.seg_first as usize;
            match &self.segs[first..first + usize::from(frame.seg_count)] {
                [only] => _ = only.read(head),
                segs => read_head(segs, head),
            }
        }
        self.snapshot_of = self.frames.len();
    }

    /// Makes frames' heads of their starts, which were parsed and are not read again, and of what
    /// follows in their segments.
    #[cold]
    fn extend_starts(&mut self) {
        for ((frame, head), start) in self.frames.iter().zip(&mut self.heads).zip(&self.starts) {
            let (begin, mut rest) = head.split_at_mut(START_LEN);
            begin.copy_from_slice(start);
            let (first, mut skip) = (frame.seg_first as usize, START_LEN as u32);
            for seg in &self.segs[first..first + usize::from(frame.seg_count)] {
                let after = seg.skip(skip);
                skip -= seg.len() - after.len();
                let read = after.read(rest);
                rest = &mut rest[read..];
                if rest.is_empty() {
                    break;
                }
            }
        }
        self.starts.clear();
        self.snapshot_of = self.frames.len();
    }

    /// Copies every frame's first [`START_LEN`] bytes to private memory, if nothing beyond them is
    /// parsed; otherwise, or if a frame begins with a shorter segment, takes a
    /// [`snapshot`](Self::snapshot). That can also be taken later.
    #[inline]
    pub fn snapshot_starts(&mut self) {
        if self.snapshot_of == self.frames.len() {
            return;
        }
        if !self.lent && !self.has_offloads {
            let Self { frames, segs, starts, .. } = self;
            starts.clear();
            let start = |frame: &Frame| {
                (frame.seg_count > 0).then(|| segs[frame.seg_first as usize].first())
            };
            starts.extend(frames.iter().map_while(|frame| start(frame).flatten()));
            if starts.len() == frames.len() {
                return;
            }
            starts.clear();
        }
        self.snapshot();
    }

    /// Whether only starts were copied.
    #[inline]
    pub fn has_starts(&self) -> bool {
        !self.starts.is_empty()
    }

    /// Number of frames from `i` on with the start of frame `i`, if only starts were copied: then
    /// none has offloads. `None`, too, if a frame is excluded.
    #[inline]
    pub(crate) fn same_starts(&self, i: usize) -> Option<usize> {
        let start = self.starts.get(i).filter(|_| !self.any_excluded())?;
        Some(self.starts[i..].iter().take_while(|other| *other == start).count())
    }

    /// Number of frames from `i` on with the start of frame `i` that are `permitted`: by their
    /// heads, of which there is a [`snapshot`](Self::snapshot), and by their headers of offloads.
    /// 0, too, if a frame is excluded.
    #[inline]
    pub(crate) fn same_heads(
        &self,
        i: usize,
        permitted: impl Fn(&[u8], &VnetHdr) -> bool,
    ) -> usize {
        let Some(start) = self.start(i).filter(|_| !self.any_excluded()) else { return 0 };
        let heads = self.frames[i..].iter().zip(&self.heads()[i..]);
        let continues = |(frame, head): &(&Frame, &[u8; HEAD_LEN])| {
            let head = &head[..HEAD_LEN.min(frame.len as usize)];
            head.first_chunk() == Some(&start) && permitted(head, &frame.hdr)
        };
        heads.take_while(continues).count()
    }

    /// What was copied of all frames.
    #[inline]
    pub fn all_heads(&self) -> Heads<'_> {
        if self.snapshot_of > 0 {
            Heads::Whole(self.heads())
        } else if self.has_starts() {
            Heads::Starts(&self.starts)
        } else {
            Heads::None
        }
    }

    /// The private copy of frame `i`'s first bytes, if it has as many.
    #[inline]
    pub(crate) fn start(&self, i: usize) -> Option<Start> {
        self.starts.get(i).copied().or_else(|| self.head(i).first_chunk().copied())
    }

    /// Makes a private copy of frame `i`: its head as it was parsed, and the rest as it is now.
    pub fn copy_of(&self, i: usize) -> Box<[u8]> {
        let mut bytes = vec![0; self.frames[i].len as usize].into_boxed_slice();
        self.copy_to(i, &mut bytes);
        bytes
    }

    /// The same in memory of the caller, as long as the frame.
    pub fn copy_to(&self, i: usize, bytes: &mut [u8]) {
        let (frame, head) = (&self.frames[i], self.head(i));
        bytes[..head.len()].copy_from_slice(head);
        let (mut at, mut skip) = (head.len(), head.len() as u32);
        for seg in self.segs(frame) {
            let rest = seg.skip(skip);
            skip -= seg.len() - rest.len();
            at += rest.read(&mut bytes[at..]);
        }
    }

    /// Adds a frame in private memory.
    pub fn push_private(&mut self, bytes: &'m [u8], hdr: VnetHdr) {
        let first = self.segs.len();
        self.segs.push(Seg::of(bytes));
        self.push_at(first, 1, bytes.len() as u32, hdr);
    }

    /// The private copy of frame `i`'s first bytes: up to [`HEAD_LEN`], or its
    /// [start](Self::snapshot_starts); empty if neither was copied.
    #[inline]
    pub fn head(&self, i: usize) -> &[u8] {
        if i >= self.snapshot_of {
            return self.starts.get(i).map_or(&[], |start| &start[..]);
        }
        let len = (self.frames[i].len as usize).min(HEAD_LEN);
        &self.heads()[i][..len]
    }

    #[inline]
    fn heads(&self) -> &[[u8; HEAD_LEN]] {
        if self.heads_lent.len() < self.snapshot_of { &self.heads } else { self.heads_lent }
    }

    /// The same, mutable: a port may fix up the head before it is parsed.
    pub fn head_mut(&mut self, i: usize) -> &mut [u8] {
        debug_assert!(self.starts.is_empty(), "it was parsed");
        let len = self.head(i).len();
        let is_own = self.heads_lent.len() < self.snapshot_of;
        let heads = if is_own { &mut self.heads[..] } else { &mut *self.heads_lent };
        heads.get_mut(i).map_or(&mut [], |head| &mut head[..len])
    }

    /// Returns the same allocations for another burst, empty. The segments' lifetime ends here.
    pub fn recycle<'n>(self) -> Burst<'n> {
        let Self { mut frames, mut segs, mut starts, heads, copies, .. } = self;
        frames.clear();
        segs.clear();
        starts.clear();
        if segs.capacity() > SEGS_KEPT {
            segs.shrink_to(SEGS_KEPT);
        }
        // Collecting an empty vector in place keeps its allocation.
        let segs = segs.into_iter().map(|_| Seg::EMPTY).collect();
        Burst { frames, segs, heads, starts, copies: copies.recycle(), ..Burst::default() }
    }
}

/// Copies the first bytes of a frame.
fn read_head(segs: &[Seg<'_>], head: &mut [u8; HEAD_LEN]) {
    let mut rest = &mut head[..];
    for seg in segs {
        let read = seg.read(rest);
        rest = &mut rest[read..];
        if rest.is_empty() {
            break;
        }
    }
}

#[cfg(test)]
mod tests;
