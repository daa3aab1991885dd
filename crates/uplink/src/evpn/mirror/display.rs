//! What the mirror shows: states of addresses, and what is wrong.

use std::collections::BTreeMap;
use std::time::Instant;

use switch::fdb::PortId;

use super::{Claim, Mirror, Phase, Tap, YIELDS_MAX};
use crate::evpn::links::{Kind, Link};
use crate::evpn::{Address, Remote, State, Status, problem};

impl Mirror {
    fn state(claim: &Claim, now: Instant) -> State {
        match claim.phase {
            Phase::Held => State::Announced,
            Phase::Wanted | Phase::Yielded if claim.yields >= YIELDS_MAX && !claim.is_due(now) => {
                State::Duplicate
            }
            Phase::Wanted | Phase::Sent | Phase::Inherited => State::Pending,
            Phase::Yielded => State::Yielded,
        }
    }

    /// Entries of VXLAN interfaces in the bridges, by the TAP's interface.
    pub(in crate::evpn) fn remotes(&self) -> impl Iterator<Item = (&str, Remote)> {
        let of = |tap| self.remotes_of(tap).map(|remote| (&*tap.member.interface, remote));
        self.taps.values().flat_map(of)
    }

    fn remotes_of<'a>(&'a self, tap: &'a Tap) -> impl Iterator<Item = Remote> {
        tap.at.into_iter().flat_map(move |at| {
            self.table.entries(at.bridge).filter_map(move |(key, link, entry)| {
                let is_remote = entry.is_extern && self.vxlans.contains(&(at.bridge, link));
                let vlan = tap.vlan(at, key.vid).filter(|_| is_remote)?;
                let vtep = self.table.tunnel(link, key.mac);
                Some(Remote { address: Address { mac: key.mac, vlan }, vtep })
            })
        })
    }

    pub(in crate::evpn) fn status(&self, interface: &str, now: Instant) -> Option<Status> {
        let tap = self.taps.values().find(|tap| tap.member.interface == interface)?;
        let vxlans = tap.at.into_iter().flat_map(|at| self.table.links.vxlans(at.bridge));
        let mut vnis: Vec<_> = vxlans
            .filter_map(|link| match link.kind {
                Kind::Vxlan { vni, .. } => Some(vni),
                _ => None,
            })
            .collect();
        vnis.sort_unstable();
        let mut states = BTreeMap::new();
        for (address, claim) in &tap.claims {
            if self.local(*address).is_some() {
                *states.entry(Self::state(claim, now).name()).or_default() += 1;
            }
        }
        let remote = self.remotes_of(tap).count();
        let mut problems = self.problems_of(tap);
        let bridge = tap.at.into_iter().flat_map(|at| self.table.links.vxlans(at.bridge));
        let sends =
            |link: &Link| self.table.tunnels.get(&link.index).is_some_and(|to| !to.is_empty());
        let is_alone = |link: &&Link| link.up && !sends(link);
        problems.extend(bridge.filter(is_alone).map(problem::alone));
        Some(Status { vnis, states, remote, problems })
    }

    /// All addresses of the switch in each bridge.
    pub(in crate::evpn) fn claims(
        &self,
        now: Instant,
    ) -> impl Iterator<Item = (Address, PortId, State)> {
        let all = self.taps.values().flat_map(|tap| &tap.claims);
        all.filter_map(move |(address, claim)| {
            Some((*address, self.local(*address)?.port, Self::state(claim, now)))
        })
    }

    pub(in crate::evpn) fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.taps.values().map(|tap| &*tap.member.interface)
    }

    /// What is wrong, by interface, if it may have changed since the last call.
    pub(in crate::evpn) fn news(&mut self) -> Option<Vec<(String, String)>> {
        if !std::mem::take(&mut self.has_news) {
            return None;
        }
        let of = |tap: &Tap| {
            let problems = self.problems_of(tap).into_iter();
            problems.map(|what| (tap.member.interface.clone(), what)).collect::<Vec<_>>()
        };
        Some(self.taps.values().flat_map(of).collect())
    }

    fn problems_of(&self, tap: &Tap) -> Vec<String> {
        if !self.is_synced {
            return Vec::new();
        }
        problem::find(&tap.member, &self.table.links, tap.refused)
    }
}
