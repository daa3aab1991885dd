//! Rules of ports in forwarding: the cross-connect with rules, and frames whose tags change.

use shm::Seg;

use super::{ETHERNET_LEN, Forwarder, Group, Source};
use crate::flow;
use crate::frame::{Burst, RETAGGED_LEN};
use crate::offload;
use crate::port::QueueId;
use crate::tenant::{Admitted, Tagging, Tenants, Vlan, tagging, untagged_tagging};
use crate::time::Instant;

/// Memory for frames whose tags change, empty between groups.
#[derive(Default)]
pub(super) struct Retagged {
    burst: Burst<'static>,
    /// Heads with their new tags.
    heads: Vec<[u8; RETAGGED_LEN]>,
    group: Group,
}

impl Forwarder {
    /// Forwards as `cross` does, with rules: heads are copied and checked, nothing is learned.
    #[cold]
    pub(super) fn cross_ruled(&mut self, from: &Source, burst: &mut Burst<'_>, tenants: &Tenants) {
        let Some((to, active)) = self.partner(from.port) else {
            from.stats.drops_no_port.add(burst.admitted() as u64);
            return;
        };
        if tenants.of(from.port).is_none() && tenants.of(to).is_none() {
            return self.cross(from, burst);
        }
        burst.snapshot();
        let at = self.group_for(QueueId { port: to, queue: from.queue % active });
        let mut sender = tenants.sender(from.port);
        for i in 0..burst.frames.len() {
            if burst.loses(i) {
                continue;
            }
            let (head, frame) = (burst.head(i), &burst.frames[i]);
            if frame.len < ETHERNET_LEN {
                from.stats.drops_runt.add(1);
                continue;
            }
            if flow::src_mac(head).is_none_or(|src| flow::is_multicast(src) || src == [0; 6]) {
                from.stats.drops_bad_source.add(1);
                continue;
            }
            let admitted = sender.admit(head, frame, &from.stats);
            let Some(Admitted { vid, .. }) = admitted else { continue };
            if !sender.may_reach(to, vid, &from.stats) {
                continue;
            }
            if !self.made.takes(frame, i == 0) {
                burst.leave(i);
                break;
            }
            self.groups[at].picks.push(i as u16);
        }
        self.has_tagged = sender.has_tagged();
    }

    /// Delivers a group of which some frames need another tag: as a burst of its own, whose heads
    /// are private. False: no frame needs one, and nothing was done.
    #[inline(never)]
    pub(super) fn deliver_retagged(
        &mut self,
        from: &Source,
        group: &Group,
        burst: &mut Burst<'_>,
        now: Instant,
    ) -> bool {
        let Some(tenants) = self.tenants.clone() else { return false };
        let (own, to) = (tenants.vlan(from.port), tenants.vlan(group.to.port));
        if *own == Vlan::Transparent && *to == Vlan::Transparent {
            return false;
        }
        // The same for all frames, unless the burst has frames with tags.
        let same = (!self.has_tagged).then(|| untagged_tagging(own, to));
        let picks = || group.picks.iter().map(|pick| usize::from(*pick));
        let keeps = |i| tagging(own, to, burst.head(i)) == Tagging::Keep;
        if same.map_or_else(|| picks().all(keeps), |same| same == Tagging::Keep) {
            return false;
        }
        burst.fetch(picks());
        let mut kept = std::mem::take(&mut self.retagged);
        let Retagged { burst: spare, heads, group: new } = &mut kept;
        heads.resize(heads.len().max(group.picks.len()), [0; RETAGGED_LEN]);
        new.picks.clear();
        (new.to, new.floods) = (group.to, 0);
        let mut made = std::mem::take(spare).recycle();
        for ((n, i), out) in picks().enumerate().zip(heads) {
            if burst.loses(i) {
                continue;
            }
            let (frame, head) = (&burst.frames[i], burst.head(i));
            let tagging = same.unwrap_or_else(|| tagging(own, to, head));
            if to.exposes_tag(tagging, head) {
                from.stats.drops_vlan.add(1);
                continue;
            }
            let Some((len, hdr)) = tagging.apply(head, &frame.hdr, out) else {
                from.stats.drops_unchecked.add(1);
                continue;
            };
            let at = made.frames.len();
            new.floods |= (group.floods >> n & 1) << at;
            new.picks.push(at as u16);
            made.segs.push(Seg::of(&out[..len]));
            offload::after(burst.segs(frame), head.len(), &mut made.segs);
            made.push_parsed(out, len, tagging.grown(frame.len), hdr);
        }
        if !new.picks.is_empty() {
            self.deliver_as_is(from, new, &mut made, now);
        }
        *spare = made.recycle();
        self.retagged = kept;
        true
    }
}
