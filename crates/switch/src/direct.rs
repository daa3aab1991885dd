//! Direct reads into the receiver's buffers, when the receiver is known before the frame is read:
//! in the cross-connect.
//!
//! ```text
//!  reader (TAP)                          receiver (virtio ring), locked throughout
//!     │ ───────────── lend ─────────────▶  buffers, taken from the ring and checked
//!     │ read: header and the excess over
//!     │ the buffers go to private memory
//!     │ ──────────── accept ────────────▶  header written, chains used, not yet published
//!     │ ─────────── take_back ──────────▶  bytes of a frame that must go another way
//! ```
//!
//! A frame is never truncated: bytes beyond the lent buffers go to private memory, and such a frame
//! is taken back and sent like any other. So is one that needs offloads in software.

use shm::SegMut;

use crate::port::Fault;
use crate::vnet::{Offloads, VnetHdr};

/// Room in a receiver's memory for each frame, after its virtio-net header.
#[derive(Default)]
pub struct Lent<'m> {
    segs: Vec<SegMut<'m>>,
    /// For each frame: its number of segments and of bytes.
    frames: Vec<(usize, u32)>,
    /// Segments and bytes of the frame being described.
    open: (usize, u32),
}

impl<'m> Lent<'m> {
    /// Adds to the room of the frame being described.
    pub fn push(&mut self, seg: SegMut<'m>) {
        self.open = (self.open.0 + 1, self.open.1 + seg.len());
        self.segs.push(seg);
    }

    /// Ends the description of a frame. Returns its room in bytes.
    pub fn end_frame(&mut self) -> u32 {
        let frame = std::mem::take(&mut self.open);
        self.frames.push(frame);
        frame.1
    }

    /// Bytes of room for each frame.
    pub fn lens(&self) -> impl Iterator<Item = u32> + '_ {
        self.frames.iter().map(|(_, len)| *len)
    }

    /// Passes each frame's segments to `each`, in order; once only.
    pub fn for_each_frame(
        &mut self,
        mut each: impl FnMut(&mut dyn Iterator<Item = SegMut<'m>>, u32),
    ) {
        let mut segs = self.segs.drain(..);
        for (count, len) in &self.frames {
            each(&mut segs.by_ref().take(*count), *len);
        }
    }

    /// Returns the same allocations, empty. The segments' lifetime ends here.
    pub fn recycle<'n>(self) -> Lent<'n> {
        let (mut segs, mut frames) = (self.segs, self.frames);
        segs.clear();
        frames.clear();
        // Collecting an empty vector in place keeps its allocation.
        let segs = segs.into_iter().map(|_| SegMut::of(&mut [])).collect();
        Lent { segs, frames, open: (0, 0) }
    }
}

/// A frame read into lent room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectFrame {
    /// Its length, from the destination MAC on; at most its room.
    pub len: u32,
    /// Its checked offload request.
    pub hdr: VnetHdr,
}

/// A receiver whose buffers can be read into. Its queue stays locked from [`lend`](Self::lend) to
/// the last call about the lent room; nothing else is called in between.
pub trait Direct {
    /// Offloads that the peer accepts.
    fn takes(&self) -> Offloads;

    /// Lends room for up to `frames` frames of about `len` bytes; for fewer, or none, if there is
    /// no more. A frame may get less room than `len`.
    fn lend<'m>(&'m mut self, frames: usize, len: u32, lent: &mut Lent<'m>);

    /// Delivers frames read into the first rooms. Stops at the first that cannot be delivered in
    /// place (its offloads are not accepted, or it exceeds the MTU). Returns the number delivered.
    /// Nothing is visible before [`flush`](crate::port::Egress::flush).
    fn accept(&mut self, came: &[DirectFrame]) -> usize;

    /// Copies the room of frame `i` out, counted from the first that was not accepted. The peer may
    /// have changed it.
    fn take_back(&mut self, i: usize, out: &mut [u8]);

    /// Records that `len` bytes were read into the room of frame `i`, numbered as in `take_back`,
    /// which are no frame.
    fn discard(&mut self, i: usize, len: u32);

    /// Records that the kernel could not write into the room of frame `i`, `len` bytes, numbered as
    /// in `take_back`: the frame is lost and counted.
    ///
    /// # Errors
    /// [`Fault`]: the peer truncated its memory.
    fn record_failure(&mut self, i: usize, len: u32) -> Result<(), Fault>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_frame_gets_its_own_segments() {
        let mut memory = [0_u8; 100];
        let (a, b) = memory.split_at_mut(30);
        let (b, c) = b.split_at_mut(20);
        let mut lent = Lent::default();
        lent.push(SegMut::of(a));
        lent.push(SegMut::of(b));
        assert_eq!(lent.end_frame(), 50);
        lent.push(SegMut::of(c));
        assert_eq!(lent.end_frame(), 50);
        assert_eq!(lent.lens().collect::<Vec<_>>(), [50, 50]);
        let mut seen = Vec::new();
        lent.for_each_frame(|segs, len| {
            seen.push((segs.map(|s| s.len()).collect::<Vec<_>>(), len))
        });
        assert_eq!(seen, [(vec![30, 20], 50), (vec![50], 50)]);
        assert_eq!(lent.recycle().lens().count(), 0);
    }
}
