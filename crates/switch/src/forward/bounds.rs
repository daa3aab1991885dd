//! Bounds on the work of a burst beyond one copy of each frame.
//!
//! One frame can become many: a flood copies it to every port, and a GSO frame is segmented for
//! each port without that offload. Both are charged to the sender, and are known before any work:
//! the segments from the checked header, the ports from the table. So a burst ends before the frame
//! that would exceed a bound; that frame and those after it are [left](Burst::leave) for the next
//! burst, and nothing is lost. Only a frame that exceeds a bound alone loses copies, counted at the
//! sender.
//!
//! Receivers pay for the copies, too, and cannot refuse them. So their number per second is charged
//! to the sender's [account](crate::account::Account::flood_copies); beyond its limit, a frame is
//! not flooded.

use super::{Flow, Forwarder, Group, Source};
use crate::account::burst::{FLOOD_BYTES_MAX, FRAME_FLOOD_BYTES_MAX, MADE_MAX};
use crate::frame::{Burst, Frame};
use crate::offload;
use crate::vnet::{GSO_NONE, Offloads};

/// Cost of the frames of a burst processed so far.
#[derive(Default)]
pub(super) struct Made {
    /// Frames that may be made: segments times ports.
    frames: usize,
    /// Bytes of flooded frames times ports.
    bytes: u64,
    /// Number of ports of a flood; computed at the first one of the burst.
    ports: Option<usize>,
    /// Whether the first frame exceeds a bound alone.
    exceeds: bool,
    /// Copies of that frame that were segmented, and their bytes.
    copied: (usize, u64),
}

/// Whether a frame is flooded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MayFlood {
    Yes,
    /// It must be left for the next burst.
    Later,
    /// It was dropped.
    No,
}

/// Largest number of frames that `frame` is segmented into.
fn segments(frame: &Frame) -> usize {
    if frame.hdr.gso_type == GSO_NONE { 1 } else { offload::segments(&frame.hdr, frame.len, 0) }
}

impl Made {
    /// Counts a frame for one port; `first`: of the burst. False: it must be left.
    #[inline]
    pub fn takes(&mut self, frame: &Frame, first: bool) -> bool {
        frame.hdr.gso_type == GSO_NONE || self.cuts(frame, first)
    }

    /// The same for a frame that may be segmented.
    #[cold]
    #[inline(never)]
    fn cuts(&mut self, frame: &Frame, first: bool) -> bool {
        self.adds(segments(frame), 0, first)
    }

    /// The same for a frame that is flooded.
    fn floods(&mut self, frame: &Frame, ports: usize, first: bool) -> bool {
        let bytes = u64::from(frame.len) * ports as u64;
        self.adds(segments(frame) * ports, bytes, first)
    }

    /// Number of ports of each flood of the burst: counted once.
    pub fn ports(&mut self, count: impl FnOnce() -> usize) -> usize {
        *self.ports.get_or_insert_with(count)
    }

    /// Whether the first frame exceeds a bound, so that not all of its copies are made.
    #[inline]
    pub fn exceeds(&self) -> bool {
        self.exceeds
    }

    fn adds(&mut self, frames: usize, bytes: u64, first: bool) -> bool {
        let exceeds = self.frames + frames > MADE_MAX || self.bytes + bytes > FLOOD_BYTES_MAX;
        if exceeds && !first {
            return false;
        }
        self.exceeds |= exceeds;
        self.frames += frames;
        self.bytes += bytes;
        true
    }
}

impl Forwarder {
    /// Counts a frame that is to be flooded to `ports`, and charges its copies to the sender.
    pub(super) fn may_flood(
        &mut self,
        from: &Source,
        frame: &Frame,
        flow: &Flow<'_>,
        first: bool,
        ports: usize,
    ) -> MayFlood {
        let now = flow.time.now;
        if !self.made.floods(frame, ports, first) {
            return MayFlood::Later;
        }
        if !self.admit_flood(from, flow.head, frame, now) {
            return MayFlood::No;
        }
        let copies = (segments(frame) * ports).min(MADE_MAX.max(ports));
        let sender = self.table.get(usize::from(from.port.0)).and_then(Option::as_ref);
        if copies > 1
            && let Some(sender) = sender
            && !sender.account.flood_copies.spend_together(copies as u64 - 1, now)
        {
            from.stats.copies.add(ports.saturating_sub(1) as u64);
            from.stats.drops_flood_limit.add(ports as u64);
            return MayFlood::No;
        }
        MayFlood::Yes
    }

    /// Drops the flooded copies beyond the bound, for a frame that exceeds it alone.
    #[cold]
    pub(super) fn limit_copies(
        &mut self,
        from: &Source,
        group: &mut Group,
        burst: &Burst<'_>,
        takes: &Offloads,
    ) {
        let (floods, all) = (group.floods, group.picks.clone());
        let copied = &mut self.made.copied;
        let mut stays = 0_u64;
        for (n, i) in all.iter().map(|pick| usize::from(*pick)).enumerate() {
            let frame = &burst.frames[i];
            let cut = frame.hdr.gso_type != GSO_NONE
                && offload::needs_work(burst.head(i), &frame.hdr, takes);
            let frames = copied.0 + if cut { segments(frame) } else { 0 };
            let bytes = copied.1 + u64::from(frame.len);
            let fits = frames <= MADE_MAX && bytes <= FRAME_FLOOD_BYTES_MAX;
            if floods & 1 << n == 0 {
                stays |= 1 << i;
            } else if fits {
                *copied = (frames, bytes);
                stays |= 1 << i;
            } else {
                from.stats.drops_made_limit.add(1);
            }
        }
        group.retain(|i| stays & 1 << i != 0);
    }
}
