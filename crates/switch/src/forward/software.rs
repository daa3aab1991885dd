//! Frames with offloads that their receiver lacks.

use shm::Seg;

use super::full::Senders;
use super::group::Handled;
use super::{EgressQueue, Forwarder};
use crate::frame::Burst;
use crate::offload;
use crate::port::{Egress, Fault};
use crate::vnet::{GSO_NONE, VnetHdr};

impl Forwarder {
    /// Segments or checksums one frame in software, without its first `skip` segments, which its
    /// receiver has.
    pub(super) fn put_in_software(
        &mut self,
        queue: &mut dyn Egress,
        egress: &EgressQueue,
        from: &Senders<'_>,
        pick: u16,
        burst: &Burst<'_>,
        skip: usize,
    ) -> Result<Handled, Fault> {
        let i = usize::from(pick);
        let frame = &burst.frames[i];
        let takes = queue.offloads();
        let head = burst.head(i);
        let Ok(plan) = offload::plan(head, frame.len, &frame.hdr, &takes) else {
            from.drops_bad_gso(pick, &egress.stats);
            return Ok(Handled::whole(1));
        };
        // Not all segments or none: a peer may never post buffers for all of them at once.
        if queue.room(plan.len_max, 1)? == 0 {
            egress.stats.full.add(1);
            return Ok(Handled { frames: 0, part: skip });
        }
        self.scratch.skip(skip);
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
        if cut {
            egress.stats.full.add(1);
            let part = if segments { skip + put as usize } else { 0 };
            return Ok(Handled { frames: 0, part });
        }
        Ok(Handled::whole(1))
    }
}

/// Longest frame that is put to a queue for one of `len` bytes: a segment, if its peer lacks the
/// offloads of the frame.
pub(super) fn len_of_part(queue: &dyn Egress, head: &[u8], len: u32, hdr: &VnetHdr) -> u32 {
    if hdr.gso_type == GSO_NONE {
        return len;
    }
    offload::plan(head, len, hdr, &queue.offloads()).map_or(len, |plan| plan.len_max)
}
