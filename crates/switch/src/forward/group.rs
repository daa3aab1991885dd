//! Frames of a burst, by egress queue, and how many of them were put there.

use crate::port::QueueId;

/// Frames of one burst for one egress queue.
#[derive(Default)]
pub(super) struct Group {
    pub to: QueueId,
    /// Indices in the burst.
    pub picks: Vec<u16>,
    /// Bits of picks that are copies of a flooded frame (bit i: `picks[i]`).
    pub floods: u64,
}

/// Frames of a group that were put to its queue, from the first on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Handled {
    /// Frames delivered, or dropped and counted.
    pub frames: usize,
    /// Segments of the next frame that its receiver has: the others did not fit.
    pub part: usize,
}

impl Handled {
    /// No part of the next one.
    pub fn whole(frames: usize) -> Self {
        Self { frames, part: 0 }
    }

    /// Number of frames, that of which only a part was delivered included.
    pub fn begun(self) -> usize {
        self.frames + usize::from(self.part > 0)
    }
}

impl Group {
    /// Drops the picks of which `keep` is false.
    #[cold]
    pub fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let (floods, mut i, mut kept) = (std::mem::take(&mut self.floods), 0, 0);
        self.picks.retain(|pick| {
            let stays = keep(usize::from(*pick));
            self.floods |= u64::from(stays && floods & 1 << i != 0) << kept;
            kept += u32::from(stays);
            i += 1;
            stays
        });
    }
}
