//! A TAP of the switch in a bridge: which addresses pass there, under which VLAN.

use std::collections::HashMap;

use switch::tenant::Vlan;

use super::mirror::Claim;
use super::wire::{Entry, Key};
use super::{Address, Member, Vlans};

/// A TAP, and its state.
pub(super) struct Tap {
    pub(super) member: Member,
    /// Its interface and bridge, if it is in that bridge.
    pub(super) at: Option<At>,
    /// Whether the bridge was asked to join it, or to pass its VLANs.
    pub(super) is_set_up: bool,
    /// VLANs that its interface may carry there for earlier settings of its port.
    pub(super) former: Vec<Vlans>,
    pub(super) claims: HashMap<Address, Claim>,
    /// The last refusal: an error number.
    pub(super) refused: Option<i32>,
}

/// Where a TAP is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) link: u32,
    pub(super) bridge: u32,
    pub(super) is_aware: bool,
    pub(super) pvid: u16,
}

impl At {
    /// Whether an entry of the bridge is one that the switch put on the TAP.
    pub(super) fn is_of(self, link: u32, entry: Entry) -> bool {
        link == self.link && entry.is_static
    }
}

impl Tap {
    pub(super) fn new(member: Member, former: Vec<Vlans>) -> Self {
        let (is_set_up, claims, refused) = (false, HashMap::new(), None);
        Self { member, at: None, is_set_up, former, claims, refused }
    }

    /// VLANs that its interface may carry: those of earlier settings until they are removed.
    pub(super) fn carried(&self) -> Vec<Vlans> {
        let own = Vlans::of(&self.member.vlan);
        let mut all: Vec<_> = self.former.iter().filter(|vlans| **vlans != own).cloned().collect();
        all.extend((own != Vlans::default()).then_some(own));
        all
    }

    /// Whether another member is the same interface in the same bridge.
    pub(super) fn is_same_interface(&self, other: &Member) -> bool {
        (&self.member.interface, &self.member.bridge) == (&other.interface, &other.bridge)
    }

    /// The VLAN of an entry for VLAN `vlan` of the switch; `None`: it does not pass there.
    pub(super) fn vid(&self, at: At, vlan: u16) -> Option<u16> {
        let untagged = match &self.member.vlan {
            Vlan::Transparent => vlan == 0,
            other => other.untagged() == Some(vlan),
        };
        match (at.is_aware, &self.member.vlan) {
            (false, _) => untagged.then_some(0),
            (true, Vlan::Transparent) => Some(if untagged { at.pvid } else { vlan }),
            (true, other) => other.carries(vlan).then_some(vlan),
        }
        .filter(|vid| !at.is_aware || *vid != 0)
    }

    /// The VLAN of the switch for that of an entry.
    pub(super) fn vlan(&self, at: At, vid: u16) -> Option<u16> {
        match (at.is_aware, &self.member.vlan) {
            (false, Vlan::Transparent) => Some(0),
            (false, other) => other.untagged(),
            (true, Vlan::Transparent) => Some(if vid == at.pvid { 0 } else { vid }),
            (true, other) => other.carries(vid).then_some(vid),
        }
    }

    pub(super) fn key(&self, address: Address) -> Option<(At, Key)> {
        let at = self.at?;
        Some((at, Key { mac: address.mac, vid: self.vid(at, address.vlan)? }))
    }

    /// Whether an address passes there, or did: with an interface for each of many segments, most
    /// addresses concern one.
    pub(super) fn concerns(&self, address: Address) -> bool {
        self.key(address).is_some() || self.claims.contains_key(&address)
    }
}
