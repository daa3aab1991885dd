//! What a burst makes the switch do beyond one copy of each frame, and its bounds.
//!
//! One frame can become many: a flood copies it to every port, and a GSO frame is cut into segments
//! for each port that takes no such frames. Both are the sender's, and are known before anything is
//! done: the segments from the checked header, the ports from the table. So a burst ends before the
//! frame that would exceed a bound; that frame and those behind it are [left](Burst::leave) for the
//! next burst, and nothing is lost. Only a frame that exceeds a bound alone loses copies, counted
//! at the sender.

use super::{Forwarder, Group, Source};
use crate::account::burst::{FLOOD_BYTES_MAX, FRAME_FLOOD_BYTES_MAX, MADE_MAX};
use crate::fdb::PortId;
use crate::frame::{Burst, Frame};
use crate::offload;
use crate::vnet::{GSO_NONE, Offloads};

/// What the frames of a burst cost, as far as they were looked at.
#[derive(Default)]
pub(super) struct Made {
    /// Frames that may be made: segments, times ports.
    frames: usize,
    /// Bytes of flooded frames, times ports.
    bytes: u64,
    /// Ports that a flood goes to; counted with the first of the burst.
    ports: Option<usize>,
    /// The first frame exceeds a bound alone.
    exceeds: bool,
    /// Of copies of that frame: those that were segmented, and bytes.
    copied: (usize, u64),
}

/// The most frames that `frame` is cut into.
fn segments(frame: &Frame) -> usize {
    if frame.hdr.gso_type == GSO_NONE { 1 } else { offload::segments(&frame.hdr, frame.len, 0) }
}

impl Made {
    /// Accounts for a frame for one port; `first`: of the burst. False: it is to be left.
    #[inline]
    pub fn takes(&mut self, frame: &Frame, first: bool) -> bool {
        frame.hdr.gso_type == GSO_NONE || self.cuts(frame, first)
    }

    /// The same for a frame that may be cut into segments.
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
    /// Accounts for frame `i` of a burst, which is to be flooded; false: it is to be left.
    pub(super) fn may_flood(&mut self, from: PortId, frame: &Frame, first: bool) -> bool {
        let table = &self.table;
        let ports = *self.made.ports.get_or_insert_with(|| {
            table.iter().flatten().filter(|port| port.id != from && port.active() > 0).count()
        });
        self.made.floods(frame, ports, first)
    }

    /// Of a frame that exceeds a bound alone: drops the flooded copies beyond it.
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
