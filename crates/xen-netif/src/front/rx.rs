//! The rx ring of one queue, with the pages granted for it.

use ring::xen::{
    Armed, FrontRx, Gso, Malformed, RxPacket, RxRefusal, RxRequest, gso_type, rx_flag,
};
use shm::Area;
use switch::flow;
use switch::vnet::{DATA_VALID, GSO_NONE, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, Offloads, VnetHdr};

use super::TxQueue;

/// Packets that were not shown, by cause; their pages were offered again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxDrops {
    /// The back end said so.
    pub status: u64,
    /// Bytes beyond the end of a page.
    pub crosses_page: u64,
    /// More slots than a packet may have.
    pub slots: u64,
    /// An extra info of unknown type.
    pub extra: u64,
    /// GSO that makes no sense.
    pub gso: u64,
    /// Shorter than an Ethernet header.
    pub short: u64,
    /// A checksum that is blank where there is none, or GSO without one.
    pub csum: u64,
}

impl RxDrops {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { status, crosses_page, slots, extra, gso, short, csum } = self;
        status + crosses_page + slots + extra + gso + short + csum
    }
}

/// Receives into pages that are offered one by one; the id of each is its number.
pub struct RxQueue {
    ring: FrontRx,
    /// Grants of the pages.
    grefs: Vec<u32>,
    /// Pages were offered again and not published.
    reoffered: bool,
    /// What was not shown.
    pub drops: RxDrops,
}

impl RxQueue {
    /// A fresh ring in `area` that offers all pages of `grefs`, as far as it has room.
    pub fn new(area: Area, grefs: Vec<u32>) -> Self {
        let mut queue =
            Self { ring: FrontRx::new(area), grefs, reoffered: false, drops: RxDrops::default() };
        let room = usize::try_from(queue.ring.room()).unwrap_or(usize::MAX);
        let pages = u16::try_from(queue.grefs.len().min(room)).unwrap_or(u16::MAX);
        (0..pages).for_each(|page| queue.offer(page));
        queue.ring.publish();
        queue
    }

    /// Offers page `page`, which is not on the ring. Visible at [`publish`](Self::publish).
    pub fn offer(&mut self, page: u16) {
        let posted = self.ring.post(RxRequest { id: page, gref: self.grefs[usize::from(page)] });
        assert!(posted, "no more pages than slots");
    }

    /// Takes the next packet, if there is one; its pages are the caller's until it offers them
    /// again. At most `max` bad ones are passed over in one call.
    ///
    /// # Errors
    /// [`Malformed`]: the ring is to be abandoned.
    pub fn take(&mut self, packet: &mut RxPacket, max: usize) -> Result<bool, Malformed> {
        for _ in 0..max {
            let Some(verdict) = self.ring.take(packet)? else { return Ok(false) };
            for spare in packet.spare.drain(..) {
                self.reoffered = true;
                let posted = self.ring.post(spare);
                assert!(posted, "it was just taken");
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

    /// Drops a packet that was taken, for its checksum: all its pages are offered again.
    pub fn reject(&mut self, packet: &RxPacket) {
        self.reoffered = true;
        self.drops.csum += 1;
        packet.slots.iter().for_each(|slot| self.offer(slot.request.id));
    }

    /// Whether [`take`](Self::take) or [`reject`](Self::reject) offered pages again that are not
    /// yet published: those of bad packets, and those under extra infos.
    pub fn has_reoffered(&self) -> bool {
        self.reoffered
    }

    /// Shows the back end what was offered.
    pub fn publish(&mut self) {
        self.reoffered = false;
        self.ring.publish();
    }

    /// Whether the back end wants to be told of it.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Whether there are packets.
    pub fn has_used(&self) -> bool {
        self.ring.has_responses()
    }

    /// Before sleeping: asks for an event. Only [`Armed::Armed`] allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm()
    }

    /// With smart poll agreed on, before the timer stops: clears the flag and looks at both rings
    /// of the queue again. Only [`Armed::Armed`] allows to stop.
    pub fn stop_polling(&self, tx: &TxQueue) -> Armed {
        tx.stop_polling(&self.ring)
    }
}

/// What a packet whose first bytes are `head` asks for. netif says *that* a checksum is blank, and
/// not where. `None`: it makes no sense, and is to be dropped.
pub fn vnet_hdr(packet: &RxPacket, head: &[u8]) -> Option<VnetHdr> {
    let valid = if packet.flags & rx_flag::DATA_VALIDATED != 0 { DATA_VALID } else { 0 };
    if !wants_head(packet) {
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

/// Whether the head of a packet must be looked at to know what it asks for.
pub fn wants_head(packet: &RxPacket) -> bool {
    packet.flags & rx_flag::CSUM_BLANK != 0 || packet.gso.is_some()
}

#[cfg(test)]
mod tests;
