//! Bursts of frames on their way through the switch.

use shm::Seg;

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
    /// What the switch decided; the port acts on it when the burst is over.
    pub verdict: Verdict,
    /// Length in bytes, from the destination MAC on.
    pub len: u32,
    /// Checked offload request.
    pub hdr: VnetHdr,
    /// How long the port has been holding this frame because its destination was full, in ns;
    /// 0 for a new frame.
    pub held_ns: u64,
}

/// What becomes of a frame when the burst is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Delivered or dropped: give the buffer back to the sender.
    Done,
    /// The destination is full: show it again in the next burst.
    Hold,
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
    /// How many frames the snapshot covers.
    snapshot_of: usize,
}

impl<'m> Burst<'m> {
    /// Adds a new frame of `len` bytes whose segments are `count` ones from `first` on.
    #[inline]
    pub fn push_at(&mut self, first: usize, count: usize, len: u32, hdr: VnetHdr) {
        let (seg_first, seg_count) = (first as u32, count as u16);
        let verdict = Verdict::Done;
        self.frames.push(Frame { seg_first, seg_count, verdict, len, hdr, held_ns: 0 });
    }

    /// The segments of `frame`.
    #[inline]
    pub fn segs(&self, frame: &Frame) -> &[Seg<'m>] {
        let first = frame.seg_first as usize;
        &self.segs[first..first + usize::from(frame.seg_count)]
    }

    /// Copies every frame's first bytes to private memory. Call once, before looking.
    pub fn snapshot(&mut self) {
        // Only the length changes: stale bytes beyond a short frame are never looked at.
        self.heads.resize(self.frames.len().max(self.heads.len()), [0; HEAD_LEN]);
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
        &self.heads[i][..len]
    }

    /// The same allocations for another burst, empty. The segments' lifetime ends here.
    pub fn recycle<'n>(self) -> Burst<'n> {
        let (mut frames, mut segs) = (self.frames, self.segs);
        frames.clear();
        segs.clear();
        // Collecting an empty vector in place keeps its allocation.
        let segs = segs.into_iter().map(|_| Seg::EMPTY).collect();
        Burst { frames, segs, heads: self.heads, snapshot_of: 0 }
    }
}
