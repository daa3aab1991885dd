//! Announcements of addresses to the network behind one port.

use super::Port;
use crate::fdb::Mac;
use crate::flow::rarp;
use crate::frame::{BURST_MAX, Burst, RETAGGED_LEN};
use crate::port::Fault;
use crate::tenant::Vlan;
use crate::vnet::VnetHdr;

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
