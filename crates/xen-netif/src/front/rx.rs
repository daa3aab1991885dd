//! The rx ring of one queue, with the pages granted for it.

use ring::xen::{Armed, FrontRx, Malformed, RxPacket, RxRefusal, RxRequest};
use shm::Area;

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
}

/// Receives into pages that are offered one by one; the id of each is its number.
pub struct RxQueue {
    ring: FrontRx,
    /// Grants of the pages.
    grefs: Vec<u32>,
    /// What was not shown.
    pub drops: RxDrops,
}

impl RxQueue {
    /// A fresh ring in `area` that offers all pages of `grefs`, as far as it has room.
    pub fn new(area: Area, grefs: Vec<u32>) -> Self {
        let mut queue = Self { ring: FrontRx::new(area), grefs, drops: RxDrops::default() };
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

    /// Shows the back end what was offered.
    pub fn publish(&mut self) {
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

#[cfg(test)]
mod tests;
