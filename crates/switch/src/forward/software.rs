//! Frames with offloads that their receiver lacks.

use shm::Seg;

use super::full::Senders;
use super::{EgressQueue, Forwarder};
use crate::frame::Burst;
use crate::offload;
use crate::port::{Egress, Fault};
use crate::vnet::{GSO_NONE, VnetHdr};

impl Forwarder {
    /// Segments or checksums one frame in software. False: it does not fit now.
    pub(super) fn put_in_software(
        &mut self,
        queue: &mut dyn Egress,
        egress: &EgressQueue,
        from: &Senders<'_>,
        pick: u16,
        burst: &Burst<'_>,
    ) -> Result<bool, Fault> {
        let i = usize::from(pick);
        let frame = &burst.frames[i];
        let takes = queue.offloads();
        let head = burst.head(i);
        let Ok(plan) = offload::plan(head, frame.len, &frame.hdr, &takes) else {
            from.drops_bad_gso(pick, &egress.stats);
            return Ok(true);
        };
        // All segments or none: a frame delivered in part would be sent again as a whole. A peer
        // that can never have room for all of them gets those that fit.
        if queue.room(plan.len_max, plan.frames)? < plan.frames {
            egress.stats.full.add(1);
            return Ok(false);
        }
        let mut body = Vec::new();
        offload::after(burst.segs(frame), head.len(), &mut body);
        let (mut fault, mut cut, mut put) = (None, false, 0);
        let mut emit = |head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr| {
            let fits = queue.put_parts(head, body, hdr).unwrap_or_else(|f| {
                fault = Some(f);
                false
            });
            cut |= !fits;
            put += u64::from(fits);
            fits
        };
        let (len, hdr) = (frame.len, &frame.hdr);
        let made = offload::resolve(head, &body, len, hdr, &takes, &mut self.scratch, &mut emit);
        let segments = frame.hdr.gso_type != GSO_NONE && plan.frames > 1;
        if segments {
            // Those before a fault as well: they were delivered.
            egress.stats.segmented.add(put);
        }
        if let Some(fault) = fault {
            return Err(fault);
        }
        match made {
            Ok(_) if segments => egress.stats.gso_segmented.add(u64::from(!cut)),
            Ok(made) => egress.stats.checksummed.add(made as u64),
            Err(_) => from.drops_bad_gso(pick, &egress.stats),
        }
        egress.stats.drops_no_room.add(u64::from(cut));
        Ok(true)
    }
}
