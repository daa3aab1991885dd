//! Frames of a burst, by egress queue.

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
