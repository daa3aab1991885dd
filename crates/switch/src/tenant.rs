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
mod sender;
mod vlan;

use std::sync::Arc;

pub use self::security::{Refusal, Security};
pub(crate) use self::sender::{Admitted, Sender};
pub use self::vlan::{Tagging, Vids, Vlan};
use crate::fdb::PortId;

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

    /// Whether a frame of VLAN `vid` may pass from one port to another.
    pub(crate) fn reaches(&self, from: PortId, to: PortId, vid: u16) -> bool {
        !self.isolates(from, to) && self.vlan(to).carries(vid)
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

/// The change of tag that every frame without a tag needs, between ports with these VLANs.
pub(crate) fn untagged_tagging(from: &Vlan, to: &Vlan) -> Tagging {
    tagging(from, to, &[])
}

#[cfg(test)]
mod tests;
