//! The rx ring of one queue, with the pages granted for it.

use ring::xen::{
    Armed, FrontRx, Gso, Malformed, RxPacket, RxRefusal, RxRequest, gso_type, rx_flag,
};
use shm::Area;
use switch::flow;
use switch::vnet::{DATA_VALID, GSO_NONE, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, Offloads, VnetHdr};

use super::TxQueue;

/// Dropped packets by cause; their pages were posted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxDrops {
    /// Error status of the back end.
    pub status: u64,
    /// Bytes that cross the end of a page.
    pub crosses_page: u64,
    /// More slots than allowed.
    pub slots: u64,
    /// An extra info of unknown type.
    pub extra: u64,
    /// Invalid GSO.
    pub gso: u64,
    /// Shorter than an Ethernet header.
    pub short: u64,
    /// A blank checksum in a packet without one, or GSO without a blank checksum.
    pub csum: u64,
}

impl RxDrops {
    /// Sum of all causes.
    pub fn total(&self) -> u64 {
        let Self { status, crosses_page, slots, extra, gso, short, csum } = self;
        status + crosses_page + slots + extra + gso + short + csum
    }
}

/// Receives into pages that are posted one by one; the id of each is its number.
pub struct RxQueue {
    ring: FrontRx,
    /// Grants of the pages.
    grefs: Vec<u32>,
    /// Pages were posted again but not published.
    reposted: bool,
    /// Dropped packets.
    pub drops: RxDrops,
}

impl RxQueue {
    /// Creates a ring in `area`, with all pages of `grefs` posted, up to its room.
    pub fn new(area: Area, grefs: Vec<u32>) -> Self {
        let mut queue =
            Self { ring: FrontRx::new(area), grefs, reposted: false, drops: RxDrops::default() };
        let room = usize::try_from(queue.ring.room()).unwrap_or(usize::MAX);
        let pages = u16::try_from(queue.grefs.len().min(room)).unwrap_or(u16::MAX);
        (0..pages).for_each(|page| queue.post(page));
        queue.ring.publish();
        queue
    }

    /// Posts page `page`, which is not on the ring. Visible at [`publish`](Self::publish).
    pub fn post(&mut self, page: u16) {
        let posted = self.ring.post(RxRequest { id: page, gref: self.grefs[usize::from(page)] });
        assert!(posted, "no more pages than slots");
    }

    /// Takes the next packet, if there is one; its pages belong to the caller until it posts them
    /// again. At most `max` invalid packets are skipped per call.
    ///
    /// # Errors
    /// [`Malformed`]: the ring must be abandoned.
    pub fn take(&mut self, packet: &mut RxPacket, max: usize) -> Result<bool, Malformed> {
        for _ in 0..max {
            let Some(verdict) = self.ring.take(packet)? else { return Ok(false) };
            for spare in packet.spare.drain(..) {
                self.reposted = true;
                let posted = self.ring.post(spare);
                assert!(posted, "its slot was just taken");
            }
            let Err(refusal) = verdict else { return Ok(true) };
            let drops = &mut self.drops;
            *match refusal {
                RxRefusal::Status(_) => &mut drops.status,
                RxRefusal::CrossesPage => &mut drops.crosses_page,
                RxRefusal::Slots => &mut drops.slots,
                RxRefusal::ExtraType(_) => &mut drops.extra,
                RxRefusal::Gso => &mut drops.gso,
                RxRefusal::Short => &mut drops.short,
            } += 1;
        }
        Ok(false)
    }

    /// Drops a taken packet with an invalid checksum: all its pages are posted again.
    pub fn reject(&mut self, packet: &RxPacket) {
        self.reposted = true;
        self.drops.csum += 1;
        packet.slots.iter().for_each(|slot| self.post(slot.request.id));
    }

    /// Whether [`take`](Self::take) or [`reject`](Self::reject) posted pages again that are not
    /// published yet: those of invalid packets, and those under extra infos.
    pub fn has_reposted(&self) -> bool {
        self.reposted
    }

    /// Publishes posted pages to the back end.
    pub fn publish(&mut self) {
        self.reposted = false;
        self.ring.publish();
    }

    /// Whether the back end must be notified of them.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Whether there are packets.
    pub fn has_used(&self) -> bool {
        self.ring.has_responses()
    }

    /// Requests an event, before sleeping. Only [`Armed::Armed`] allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm()
    }

    /// With smart poll: clears the flag and re-checks both rings of the queue, before the timer
    /// stops. Only [`Armed::Armed`] allows it to stop.
    pub fn stop_polling(&self, tx: &TxQueue) -> Armed {
        tx.stop_polling(&self.ring)
    }
}

/// The virtio-net header of a packet whose first bytes are `head`. netif only says *that* a
/// checksum is blank, not where it is. `None`: invalid, to be dropped.
pub fn vnet_hdr(packet: &RxPacket, head: &[u8]) -> Option<VnetHdr> {
    let valid = if packet.flags & rx_flag::DATA_VALIDATED != 0 { DATA_VALID } else { 0 };
    if !needs_head(packet) {
        return Some(VnetHdr { flags: valid, ..VnetHdr::NONE });
    }
    let (csum_start, csum_offset) = flow::csum_place(head)?;
    let flags = if packet.flags & rx_flag::CSUM_BLANK != 0 { NEEDS_CSUM } else { 0 };
    let (gso_type, gso_size) = match packet.gso {
        None => (GSO_NONE, 0),
        Some(Gso { kind: gso_type::TCPV4, size, .. }) => (GSO_TCPV4, size),
        Some(Gso { kind: gso_type::TCPV6, size, .. }) => (GSO_TCPV6, size),
        Some(_) => return None,
    };
    let hdr = VnetHdr { flags, gso_type, gso_size, csum_start, csum_offset, ..VnetHdr::NONE };
    hdr.check(packet.len, Offloads::ALL).ok()
}

/// Whether the head of a packet is needed for its virtio-net header.
pub fn needs_head(packet: &RxPacket) -> bool {
    packet.flags & rx_flag::CSUM_BLANK != 0 || packet.gso.is_some()
}

#[cfg(test)]
mod tests;
