//! Back half of the tx ring.

use std::collections::VecDeque;

use shm::Area;

use super::{Packet, Refusal, TxPacket, TxSlot};
use crate::index::Idx;
use crate::xen::ledger::Ledger;
use crate::xen::page::Back;
use crate::xen::wire::{Extra, TX_SLOT_LEN, TxRequest, TxResponse, tx_flag};
use crate::xen::{
    Armed, AttachError, EXTRAS_MAX, Malformed, SLOTS_FATAL, SLOTS_MAX, index, status,
};

/// Bytes of an Ethernet header (`ETH_HLEN`).
const FRAME_LEN_MIN: u16 = 14;

/// Back half of a tx ring: takes the packets that a guest sends.
pub struct BackTx {
    ring: Back,
    /// How to answer each slot held.
    answers: Box<[Answer]>,
    /// Slots of each packet held, oldest first.
    packets: VecDeque<u32>,
}

/// How a slot is answered.
#[derive(Clone, Copy, Default)]
enum Answer {
    /// With its id and the packet's status.
    Data(u16),
    /// With its id and OKAY, independent of the packet's status: it had no bytes.
    Empty(u16),
    /// With NULL.
    #[default]
    Extra,
}

/// Position and sums of a walk over a packet.
struct Walk {
    /// Next slot.
    at: Idx<u32>,
    /// Data slots so far.
    slots: usize,
    /// Bytes of the packet left for its first buffer.
    left: u16,
    refused: Option<Refusal>,
}

impl BackTx {
    /// Attaches to the ring in `area` where its responses end. The first
    /// [`notify_needed`](Self::notify_needed) covers a notification that an earlier back half did
    /// not send.
    ///
    /// # Errors
    /// [`AttachError`]: `area` does not hold a valid ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        Ok(Self::over(Back::attach(area, TX_SLOT_LEN)?))
    }

    /// Attaches at the [`position`](Self::position) of an earlier back half; else as
    /// [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`AttachError`], as for [`attach`](Self::attach).
    pub fn attach_at(area: Area, position: u32) -> Result<Self, AttachError> {
        Ok(Self::over(Back::attach_at(area, TX_SLOT_LEN, position)?))
    }

    fn over(ring: Back) -> Self {
        let size = index(ring.page.size);
        let answers = vec![Answer::default(); size].into();
        Self { ring, answers, packets: VecDeque::with_capacity(size) }
    }

    /// Writes responses down in `ledger` before they are in the ring: a successor of a killed
    /// process [recovers](Ledger::recover) the ring from it. Between two bursts.
    pub fn keep(&mut self, ledger: Ledger) {
        self.ring.keep(ledger);
    }

    /// Where another back half resumes. No request may be held; all responses must be published.
    pub fn position(&self) -> u32 {
        self.ring.position()
    }

    /// Slots of the ring.
    pub fn size(&self) -> u32 {
        self.ring.page.size
    }

    /// Takes the next packet if it is complete; one whose tail is not published is left in the
    /// ring, see [`is_partial`](Self::is_partial). Every slot is read exactly once.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the vif must be stopped.
    #[inline]
    pub fn take(&mut self, out: &mut TxPacket) -> Result<Option<Packet>, Malformed> {
        if self.ring.ready() == 0 || self.ring.partial.is_some() {
            // An unfinished packet is not read again before there is more of it.
            let seen = self.ring.partial;
            if self.ring.refresh()? == 0 || seen == Some(self.ring.req_seen) {
                return Ok(None);
            }
        }
        if let Some(fault) = self.ring.fault {
            return Err(fault);
        }
        self.ring.partial = None;
        match self.packet(out) {
            Ok(Some(packet)) => {
                self.ring.req_cons = self.ring.req_cons.plus(out.ring_slots);
                self.packets.push_back(out.ring_slots);
                Ok(Some(packet))
            }
            Ok(None) => {
                self.ring.partial = Some(self.ring.req_seen);
                Ok(None)
            }
            Err(fault) => Err(self.ring.fail(fault)),
        }
    }

    /// Walks over one packet; `None` if its tail is not published.
    #[inline]
    fn packet(&mut self, out: &mut TxPacket) -> Result<Option<Packet>, Malformed> {
        out.clear();
        let at = self.ring.req_cons;
        let first = self.request(at);
        self.set_answer(at, Answer::Data(first.id));
        out.flags = first.flags;
        let mut walk = Walk { at: at.plus(1), slots: 1, left: first.size, refused: None };
        if first.flags & tx_flag::EXTRA_INFO != 0 && !self.extras(&mut walk, out)? {
            return Ok(None);
        }
        // The dummy request of a multicast change ends here, regardless of its flags, as in Linux.
        if let Some(change) = out.multicast {
            out.ring_slots = walk.at.since(at);
            return Ok(Some(Packet::Multicast(change)));
        }
        out.push(TxSlot { gref: first.gref, offset: first.offset, len: first.size });
        if first.flags & tx_flag::MORE_DATA != 0 && !self.later(&mut walk, out)? {
            return Ok(None);
        }
        out.ring_slots = walk.at.since(at);
        out.len = first.size;
        if let Some(refusal) = walk.refused {
            return Ok(Some(Packet::Refused(refusal)));
        }
        if first.size < FRAME_LEN_MIN {
            return Ok(Some(Packet::Refused(Refusal::Short)));
        }
        if first.crosses_page(walk.left) {
            return Err(Malformed::CrossesPage { offset: first.offset, size: walk.left });
        }
        out.check_gso()?;
        out.slots[0].len = walk.left;
        if walk.left == 0 {
            // All bytes are in later buffers.
            out.slots.copy_within(1..out.count, 0);
            out.count -= 1;
        }
        Ok(Some(Packet::Frame))
    }

    /// Reads the extra infos; returns whether all are published.
    fn extras(&mut self, walk: &mut Walk, out: &mut TxPacket) -> Result<bool, Malformed> {
        let mut extras = 0;
        loop {
            if !self.is_published(walk)? {
                return Ok(false);
            }
            let at = self.ring.page.offset(walk.at);
            let area = &self.ring.page.area;
            let word = u64::from(area.load_u32(at)) | u64::from(area.load_u32(at + 4)) << 32;
            let (extra, more) = Extra::decode(word).map_err(Malformed::ExtraType)?;
            self.set_answer(walk.at, Answer::Extra);
            walk.at = walk.at.plus(1);
            extras += 1;
            if extras > EXTRAS_MAX {
                walk.refused = Some(Refusal::Extras);
            }
            out.extra(extra);
            if !more {
                return Ok(true);
            }
        }
    }

    /// Reads the requests after the first; returns whether all are published.
    fn later(&mut self, walk: &mut Walk, out: &mut TxPacket) -> Result<bool, Malformed> {
        loop {
            if walk.slots + 1 >= SLOTS_FATAL {
                return Err(Malformed::TooManySlots);
            }
            if !self.is_published(walk)? {
                return Ok(false);
            }
            let request = self.request(walk.at);
            if request.crosses_page(request.size) {
                let TxRequest { offset, size, .. } = request;
                return Err(Malformed::CrossesPage { offset, size });
            }
            let empty = request.size == 0;
            let answer = if empty { Answer::Empty } else { Answer::Data };
            self.set_answer(walk.at, answer(request.id));
            walk.at = walk.at.plus(1);
            walk.slots += 1;
            if walk.slots > SLOTS_MAX {
                walk.refused.get_or_insert(Refusal::Slots);
            } else if let Some(left) = walk.left.checked_sub(request.size) {
                walk.left = left;
                if !empty {
                    let TxRequest { gref, offset, size, .. } = request;
                    out.push(TxSlot { gref, offset, len: size });
                }
            } else {
                walk.refused.get_or_insert(Refusal::Size);
            }
            if request.flags & tx_flag::MORE_DATA == 0 {
                return Ok(true);
            }
        }
    }

    /// Whether the walk's next slot has been published.
    #[inline]
    fn is_published(&self, walk: &Walk) -> Result<bool, Malformed> {
        if walk.at.since(self.ring.req_cons) == self.ring.page.size {
            return Err(Malformed::Endless);
        }
        Ok(walk.at != self.ring.req_seen)
    }

    #[inline]
    fn request(&self, idx: Idx<u32>) -> TxRequest {
        let at = self.ring.page.offset(idx);
        let area = &self.ring.page.area;
        TxRequest::decode([area.load_u32(at), area.load_u32(at + 4), area.load_u32(at + 8)])
    }

    #[inline]
    fn set_answer(&mut self, idx: Idx<u32>, answer: Answer) {
        self.answers[self.ring.page.slot(idx).get()] = answer;
    }

    /// Undoes `take` for the last `packets` taken: the next [`take`](Self::take) reads the same
    /// slots.
    pub fn untake(&mut self, packets: usize) {
        assert!(packets <= self.packets.len(), "untake of packets never taken");
        for slots in self.packets.drain(self.packets.len() - packets..) {
            self.ring.req_cons = self.ring.req_cons.minus(slots);
        }
        self.ring.partial = None;
    }

    /// Packets taken and not answered.
    pub fn held(&self) -> usize {
        self.packets.len()
    }

    /// Answers the oldest packet taken with a [`status`], slot by slot. Not visible before
    /// [`publish`](Self::publish).
    #[inline]
    pub fn put(&mut self, status: i16) {
        let slots = self.packets.pop_front().expect("put without a packet taken");
        for _ in 0..slots {
            let answer = self.answers[self.ring.page.slot(self.ring.rsp_prod).get()];
            let response = match answer {
                Answer::Data(id) => TxResponse { id, status },
                Answer::Empty(id) => TxResponse { id, status: status::OKAY },
                Answer::Extra => TxResponse { id: 0, status: status::NULL },
            };
            self.ring.answer(u64::from(response.encode()).into());
        }
    }

    /// Makes every response so far visible to the front half.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the front half wants an event for what was published since the last query.
    #[inline]
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Requests an event for the next request, then re-checks the ring. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Suppresses notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether there are requests beyond those already examined. One load.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.ring.has_work(1)
    }

    /// Whether the next packet is incomplete: its tail is not published. A caller that waits for
    /// the tail needs a limit, since nothing after the packet can be taken before.
    pub fn is_partial(&self) -> bool {
        self.ring.partial.is_some()
    }
}
