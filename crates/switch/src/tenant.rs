//! Rules of ports whose peers are tenants: port security, isolation, VLANs.
//!
//! A port without rules has no [`Rules`], and a switch without any has no [`Tenants`]: forwarding
//! checks for that once per burst. Rules are immutable; a change publishes a new [`Tenants`] to
//! each worker, as for the port table. Every decision reads the private head of a frame, never the
//! sender's memory ([0020](../../../docs/design/0020-ports-as-tenants.md)).
//!
//! ```text
//!   frame ─▶ VLAN, port security ─▶ learn, look up ─▶ isolation, VLAN ─▶ tag or untag
//!            of the ingress port                      of both ports      for each egress port
//! ```

mod security;
mod vlan;

use std::sync::Arc;

pub use self::security::{Refusal, Security};
pub(crate) use self::vlan::RETAGGED_LEN;
pub use self::vlan::{Tagging, Vids, Vlan};
use crate::fdb::PortId;
use crate::flow;
use crate::frame::Frame;
use crate::stats::IngressStats;

/// Rules of one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Addresses that its peer may use; `None`: any.
    pub security: Option<Security>,
    /// Its VLANs.
    pub vlan: Vlan,
    /// Whether it reaches only ports that are not isolated.
    pub isolated: bool,
}

impl Rules {
    /// Whether the port may have `mac` in the VLAN with key `vlan` of the FDB.
    pub fn may_own(&self, mac: [u8; 6], vlan: u16) -> bool {
        let locked = self.security.as_ref();
        locked.is_none_or(|security| security.permits_mac(mac)) && self.vlan.carries(vlan)
    }
}

/// Rules of all ports that have any, by port.
#[derive(Debug)]
pub struct Tenants {
    ports: Vec<Option<Arc<Rules>>>,
    /// Whether any port has VLANs.
    vlans: bool,
}

/// VLAN of a frame that its port may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// VLAN in which its destination is looked up.
    pub key: u16,
    /// VLAN that its destinations must carry.
    pub vid: u16,
}

impl Tenants {
    /// Collects rules by port id; `None` if no port has any.
    pub fn new(ports: Vec<Option<Arc<Rules>>>) -> Option<Arc<Self>> {
        let vlans = ports.iter().flatten().any(|rules| rules.vlan != Vlan::Transparent);
        ports.iter().any(Option::is_some).then(|| Arc::new(Self { ports, vlans }))
    }

    /// The rules of a port.
    #[inline]
    pub fn of(&self, port: PortId) -> Option<&Rules> {
        self.ports.get(usize::from(port.0))?.as_deref()
    }

    /// Applies the rules of the ingress port to a frame; `None`: it is dropped and counted.
    pub(crate) fn admit(
        &self,
        from: PortId,
        head: &[u8],
        frame: &Frame,
        stats: &IngressStats,
    ) -> Option<Admitted> {
        let Some(rules) = self.of(from) else {
            let vid = Vlan::Transparent.classify(head)?;
            return Some(Admitted { key: flow::vlan_id(head), vid });
        };
        let Some(vid) = rules.vlan.classify(head) else {
            stats.drops_vlan.add(1);
            return None;
        };
        if let Some(security) = &rules.security
            && let Err(refusal) = security.check(head, frame.len, &frame.hdr)
        {
            refusal.counter(stats).add(1);
            return None;
        }
        let key = if rules.vlan == Vlan::Transparent { flow::vlan_id(head) } else { vid };
        Some(Admitted { key, vid })
    }

    /// Whether a frame of VLAN `vid` may pass from one port to another.
    pub(crate) fn reaches(&self, from: PortId, to: PortId, vid: u16) -> bool {
        !self.isolates(from, to) && self.vlan(to).carries(vid)
    }

    /// The same for a frame to one port: if not, it is counted as dropped.
    pub(crate) fn may_reach(
        &self,
        from: PortId,
        to: PortId,
        vid: u16,
        stats: &IngressStats,
    ) -> bool {
        if self.isolates(from, to) {
            stats.drops_isolated.add(1);
            return false;
        }
        let carries = self.vlan(to).carries(vid);
        stats.drops_vlan.add(u64::from(!carries));
        carries
    }

    /// Whether both ports are isolated.
    fn isolates(&self, from: PortId, to: PortId) -> bool {
        let isolated = |port| self.of(port).is_some_and(|rules| rules.isolated);
        isolated(from) && isolated(to)
    }

    /// Whether frames may need another tag on their way.
    #[inline]
    pub(crate) fn has_vlans(&self) -> bool {
        self.vlans
    }

    /// VLANs of a port.
    pub(crate) fn vlan(&self, port: PortId) -> &Vlan {
        self.of(port).map_or(&Vlan::Transparent, |rules| &rules.vlan)
    }
}

/// The change of tag that a frame needs, which a port with VLANs `from` was permitted to send to
/// one with VLANs `to`.
#[inline]
pub(crate) fn tagging(from: &Vlan, to: &Vlan, head: &[u8]) -> Tagging {
    from.classify(head).map_or(Tagging::Keep, |vid| to.tagging(vid, head))
}

#[cfg(test)]
mod tests;
