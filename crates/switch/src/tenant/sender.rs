//! Rules of the port that sent a burst, for each of its frames.
//!
//! What depends on the port alone is found once per burst. Most frames then need one comparison:
//! untagged, without offloads and, with port security, of the [usual form](Security::is_usual).
//! Others are parsed.

use super::vlan::{end_of_tag, tci};
use super::{Rules, Security, Tenants, Vlan};
use crate::fdb::PortId;
use crate::flow::{ETHERTYPE_QINQ, ETHERTYPE_VLAN, be16, vlan_id};
use crate::frame::Frame;
use crate::stats::IngressStats;
use crate::vnet::VnetHdr;

/// VLAN of a frame that its port may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// VLAN in which its destination is looked up.
    pub key: u16,
    /// VLAN that its destinations must carry.
    pub vid: u16,
}

/// The rules of a sender, during one burst.
pub(crate) struct Sender<'t> {
    tenants: &'t Tenants,
    port: PortId,
    vlan: &'t Vlan,
    security: Option<&'t Security>,
    /// VLAN of a frame without a tag; `None`: it is dropped.
    untagged: Option<Admitted>,
    /// Destination and VLAN of the last frame that may reach its destination.
    reached: Option<(PortId, u16)>,
    has_tagged: bool,
}

impl Tenants {
    /// The rules of the port that sent a burst.
    pub(crate) fn sender(&self, port: PortId) -> Sender<'_> {
        let (vlan, security) = match self.of(port) {
            Some(Rules { vlan, security, .. }) => (vlan, security.as_ref()),
            None => (&Vlan::Transparent, None),
        };
        let untagged = match vlan {
            Vlan::Transparent => Some(0),
            _ => vlan.untagged(),
        };
        let untagged = untagged.map(|vid| Admitted { key: vid, vid });
        Sender { tenants: self, port, vlan, security, untagged, reached: None, has_tagged: false }
    }
}

impl<'t> Sender<'t> {
    /// The rules of all ports.
    pub fn tenants(&self) -> &'t Tenants {
        self.tenants
    }

    /// Whether a frame is of the kind that most are, and permitted: in the VLAN of frames without a
    /// tag.
    #[inline(always)]
    pub fn is_usual(&self, head: &[u8], hdr: &VnetHdr) -> bool {
        let is_usual = match self.security {
            None => {
                let is_tagged = matches!(be16(head, 12), Some(ETHERTYPE_VLAN | ETHERTYPE_QINQ));
                !is_tagged && hdr.is_plain()
            }
            // An IPv4 frame is untagged.
            Some(security) => security.is_usual(head, hdr),
        };
        is_usual && self.untagged.is_some()
    }

    /// Applies the rules to a frame; `None`: it is dropped and counted.
    #[inline(always)]
    pub fn admit(&mut self, head: &[u8], frame: &Frame, stats: &IngressStats) -> Option<Admitted> {
        match self.is_usual(head, &frame.hdr) {
            true => self.untagged,
            false => self.admit_any(head, frame, stats),
        }
    }

    #[inline(never)]
    fn admit_any(&mut self, head: &[u8], frame: &Frame, stats: &IngressStats) -> Option<Admitted> {
        let Some(vid) = self.vlan.classify(head) else {
            stats.drops_vlan.add(1);
            return None;
        };
        if let Some(security) = self.security
            && let Err(refusal) = security.check(head, frame.len, &frame.hdr)
        {
            refusal.counter(stats).add(1);
            return None;
        }
        // The receiver would store the checksum over the tag, or as one: any VLAN.
        if !frame.hdr.is_plain() && usize::from(frame.hdr.csum_start) < end_of_tag(head) {
            stats.drops_unchecked.add(1);
            return None;
        }
        self.has_tagged |= tci(head).is_some();
        let key = if *self.vlan == Vlan::Transparent { vlan_id(head) } else { vid };
        Some(Admitted { key, vid })
    }

    /// Whether a frame of VLAN `vid` may pass to a port: if not, it is counted as dropped.
    #[inline]
    pub fn may_reach(&mut self, to: PortId, vid: u16, stats: &IngressStats) -> bool {
        // Rules do not change during a burst.
        self.reached == Some((to, vid)) || self.may_newly_reach(to, vid, stats)
    }

    #[inline(never)]
    fn may_newly_reach(&mut self, to: PortId, vid: u16, stats: &IngressStats) -> bool {
        if self.tenants.isolates(self.port, to) {
            stats.drops_isolated.add(1);
            return false;
        }
        if !self.tenants.vlan(to).carries(vid) {
            stats.drops_vlan.add(1);
            return false;
        }
        self.reached = Some((to, vid));
        true
    }

    /// Whether any admitted frame has a tag.
    #[inline]
    pub fn has_tagged(&self) -> bool {
        self.has_tagged
    }
}

#[cfg(test)]
mod tests;
