//! Announcements of addresses: to the network behind one port, and of one port's peer to all.

use super::{Findings, Forwarder, Port, Source};
use crate::fdb::Mac;
use crate::flow::rarp;
use crate::frame::{BURST_MAX, Burst, RETAGGED_LEN};
use crate::port::Fault;
use crate::tenant::Vlan;
use crate::time::Instant;
use crate::vnet::VnetHdr;

/// VLANs of a trunk in which an address is announced, at most: each is a flood, and an entry of
/// the FDB.
const VLANS_MAX: usize = 64;

impl Forwarder {
    /// Floods an announcement of an address for the peer of `from`, as frames of the peer's: on a
    /// trunk, one for each of its VLANs, the native one first, at most 64. Counts them as the
    /// peer's.
    pub fn announce(&mut self, from: &Source, mac: [u8; 6], now: Instant) -> Findings {
        let vlan = self.tenants.as_ref().map(|tenants| tenants.vlan(from.port).clone());
        let vlan = vlan.unwrap_or_default();
        let plain = rarp(mac);
        let mut findings = Findings::default();
        for vid in announced_in(&vlan) {
            let mut tagged = [0; RETAGGED_LEN];
            let made = vlan.tagging(vid, &plain).apply(&plain, &VnetHdr::NONE, &mut tagged);
            let Some((len, _)) = made else { continue };
            let frame = &tagged[..len];
            from.stats.frames.add(1);
            from.stats.bytes.add(frame.len() as u64);
            findings.merge(self.forward(from, &mut Burst::of(frame), now));
        }
        findings
    }
}

/// VLANs of a port in which its peer's addresses are announced; 0: none.
fn announced_in(vlan: &Vlan) -> Vec<u16> {
    let Vlan::Trunk { vids, native } = vlan else { return vec![vlan.untagged().unwrap_or(0)] };
    let tagged = (1..4095).filter(|vid| vids.contains(*vid) && *native != Some(*vid));
    native.iter().copied().chain(tagged).take(VLANS_MAX).collect()
}

impl Port {
    /// Announces addresses in VLANs (0: none) out of this port alone, so that the network behind
    /// it learns that they are here. `carries`: the VLANs of the port; addresses in others are
    /// skipped. At most a burst; frames that do not fit are not held. Returns how many addresses,
    /// from the first on, are done.
    ///
    /// # Errors
    /// The peer broke its protocol, or the interface is gone.
    pub fn announce(&self, addresses: &[(Mac, u16)], carries: &Vlan) -> Result<usize, Fault> {
        if self.active() == 0 {
            return Ok(0);
        }
        let (mut frames, mut at) = (Vec::new(), Vec::new());
        for (i, (mac, vlan)) in addresses.iter().take(BURST_MAX).enumerate() {
            let (plain, mut tagged) = (rarp(mac.0), [0; RETAGGED_LEN]);
            let change = carries.tagging(*vlan, &plain);
            let made = change.apply(&plain, &VnetHdr::NONE, &mut tagged);
            if let Some((len, _)) = made.filter(|_| carries.carries(*vlan)) {
                frames.push(tagged[..len].to_vec());
                at.push(i);
            }
        }
        let mut burst = Burst::default();
        frames.iter().for_each(|frame| burst.push_private(frame, VnetHdr::NONE));
        burst.snapshot();
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        if picks.is_empty() {
            return Ok(addresses.len().min(BURST_MAX));
        }
        let mut queue = self.egress[0].lock();
        let sent = queue.put(&burst, &picks)?;
        queue.flush();
        queue.notify();
        Ok(at.get(sent).copied().unwrap_or(addresses.len().min(BURST_MAX)))
    }
}
