//! Interfaces of the namespace, as far as bridges need them.

use std::collections::HashMap;
use std::net::IpAddr;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    /// The bridge (or bond) that it is in.
    pub(super) master: Option<u32>,
    pub(super) mtu: u32,
    pub(super) up: bool,
    /// Whether its bridge learns addresses from it.
    pub(super) learns: Option<bool>,
    pub(super) kind: Kind,
}

/// Its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bridge {
        /// Whether it filters VLANs, and its entries have one.
        is_aware: bool,
        /// VLAN of untagged frames of its interfaces, unless set otherwise.
        pvid: u16,
    },
    Vxlan {
        vni: u32,
        /// The interface that it sends on, and the address that it sends from, if set.
        underlay: Option<u32>,
        local: Option<IpAddr>,
        /// Whether it learns the senders of addresses.
        learns: bool,
    },
    Other,
}

impl Kind {
    /// A VXLAN interface about which nothing is known.
    pub(super) fn vxlan() -> Self {
        Self::Vxlan { vni: 0, underlay: None, local: None, learns: false }
    }
}

/// All interfaces.
#[derive(Default)]
pub(super) struct Links {
    all: HashMap<u32, Link>,
    by_name: HashMap<String, u32>,
    /// IP addresses, at the time of the last dump.
    ips: HashMap<IpAddr, u32>,
}

impl Links {
    /// Adds or replaces an interface; returns the earlier state.
    pub(super) fn set(&mut self, link: Link) -> Option<Link> {
        let before = self.remove(link.index);
        self.by_name.insert(link.name.clone(), link.index);
        self.all.insert(link.index, link);
        before
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Link> {
        let link = self.all.remove(&index)?;
        if self.by_name.get(&link.name) == Some(&index) {
            self.by_name.remove(&link.name);
        }
        Some(link)
    }

    pub(super) fn set_ip(&mut self, link: u32, ip: IpAddr) {
        self.ips.insert(ip, link);
    }

    pub(super) fn get(&self, index: u32) -> Option<&Link> {
        self.all.get(&index)
    }

    pub(super) fn named(&self, name: &str) -> Option<&Link> {
        self.all.get(self.by_name.get(name)?)
    }

    /// The VXLAN interfaces in a bridge.
    pub(super) fn vxlans(&self, bridge: u32) -> impl Iterator<Item = &Link> {
        let is_in = move |link: &&Link| {
            link.master == Some(bridge) && matches!(link.kind, Kind::Vxlan { .. })
        };
        self.all.values().filter(is_in)
    }

    /// The interface that a VXLAN interface sends on.
    pub(super) fn underlay(&self, vxlan: &Link) -> Option<&Link> {
        let Kind::Vxlan { underlay, local, .. } = &vxlan.kind else { return None };
        let by_ip = || self.ips.get(local.as_ref()?).copied();
        self.get(underlay.or_else(by_ip)?)
    }
}
