//! Back half of the tx ring.

use std::collections::VecDeque;

use shm::Area;

use super::{Packet, Refusal, TxPacket, TxSlot};
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
    /// How to answer each slot that is held.
    answers: Box<[Answer]>,
    /// Slots of each packet that is held, oldest first.
    packets: VecDeque<u32>,
}

/// How a slot is answered.
#[derive(Clone, Copy, Default)]
enum Answer {
    /// With its id and the packet's status.
    Data(u16),
    /// With its id and OKAY, whatever becomes of the packet: it had no bytes.
    Empty(u16),
    /// With NULL.
    #[default]
    Extra,
}

/// Where a walk over a packet stands.
struct Walk {
    /// Next slot.
    at: u32,
    /// Data slots so far.
    slots: usize,
    /// What is left of the packet for its first buffer.
    left: u16,
    refused: Option<Refusal>,
}

impl BackTx {
    /// Attaches to the ring in `area` where its responses end. Whether an earlier back half owed
    /// a notification, [`notify_needed`](Self::notify_needed) tells at once.
    ///
    /// # Errors
    /// [`AttachError`]: what lies there is no ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        let ring = Back::attach(area, TX_SLOT_LEN)?;
        let size = index(ring.page.size);
        let answers = vec![Answer::default(); size].into();
        Ok(Self { ring, answers, packets: VecDeque::with_capacity(size) })
    }

    /// Slots of the ring.
    pub fn size(&self) -> u32 {
        self.ring.page.size
    }

    /// Takes the next packet, if all of it is there: one whose tail is not published yet is left
    /// alone, see [`is_partial`](Self::is_partial). Every slot is read exactly once.
    ///
    /// # Errors
    /// [`Malformed`], now and from now on: the vif is to be stopped.
    #[inline]
    pub fn take(&mut self, out: &mut TxPacket) -> Result<Option<Packet>, Malformed> {
        if self.ring.ready() == 0 || self.ring.partial.is_some() {
            // An unfinished packet is not read again before there is more of it.
            let seen = self.ring.partial;
            if self.ring.look()? == 0 || seen == Some(self.ring.req_seen) {
                return Ok(None);
            }
        }
        if let Some(fault) = self.ring.fault {
            return Err(fault);
        }
        self.ring.partial = None;
        match self.packet(out) {
            Ok(Some(packet)) => {
                self.ring.req_cons = self.ring.req_cons.wrapping_add(out.ring_slots);
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

    /// Walks over one packet; `None` when its tail is not there.
    #[inline]
    fn packet(&mut self, out: &mut TxPacket) -> Result<Option<Packet>, Malformed> {
        out.clear();
        let at = self.ring.req_cons;
        let first = self.request(at);
        self.set_answer(at, Answer::Data(first.id));
        out.flags = first.flags;
        let mut walk = Walk { at: at.wrapping_add(1), slots: 1, left: first.size, refused: None };
        if first.flags & tx_flag::EXTRA_INFO != 0 && !self.extras(&mut walk, out)? {
            return Ok(None);
        }
        // The dummy request of a multicast change ends here, whatever its flags say, as in Linux.
        if let Some(change) = out.multicast {
            out.ring_slots = walk.at.wrapping_sub(at);
            return Ok(Some(Packet::Multicast(change)));
        }
        out.push(TxSlot { gref: first.gref, offset: first.offset, len: first.size });
        if first.flags & tx_flag::MORE_DATA != 0 && !self.later(&mut walk, out)? {
            return Ok(None);
        }
        out.ring_slots = walk.at.wrapping_sub(at);
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

    /// The extra infos; whether the last of them is there.
    fn extras(&mut self, walk: &mut Walk, out: &mut TxPacket) -> Result<bool, Malformed> {
        let mut extras = 0;
        loop {
            if !self.is_there(walk)? {
                return Ok(false);
            }
            let at = self.ring.page.slot(walk.at);
            let area = &self.ring.page.area;
            let word = u64::from(area.load_u32(at)) | u64::from(area.load_u32(at + 4)) << 32;
            let (extra, more) = Extra::decode(word).map_err(Malformed::ExtraType)?;
            self.set_answer(walk.at, Answer::Extra);
            walk.at = walk.at.wrapping_add(1);
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

    /// The requests after the first; whether the last of them is there.
    fn later(&mut self, walk: &mut Walk, out: &mut TxPacket) -> Result<bool, Malformed> {
        loop {
            if walk.slots + 1 >= SLOTS_FATAL {
                return Err(Malformed::TooManySlots);
            }
            if !self.is_there(walk)? {
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
            walk.at = walk.at.wrapping_add(1);
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
    fn is_there(&self, walk: &Walk) -> Result<bool, Malformed> {
        if walk.at.wrapping_sub(self.ring.req_cons) == self.ring.page.size {
            return Err(Malformed::Endless);
        }
        Ok(walk.at != self.ring.req_seen)
    }

    #[inline]
    fn request(&self, idx: u32) -> TxRequest {
        let at = self.ring.page.slot(idx);
        let area = &self.ring.page.area;
        TxRequest::decode([area.load_u32(at), area.load_u32(at + 4), area.load_u32(at + 8)])
    }

    #[inline]
    fn set_answer(&mut self, idx: u32, answer: Answer) {
        self.answers[index(idx & (self.ring.page.size - 1))] = answer;
    }

    /// Gives back the last `packets` taken, as if they had never been: the next
    /// [`take`](Self::take) meets the same slots.
    pub fn untake(&mut self, packets: usize) {
        assert!(packets <= self.packets.len(), "untake of packets never taken");
        for slots in self.packets.drain(self.packets.len() - packets..) {
            self.ring.req_cons = self.ring.req_cons.wrapping_sub(slots);
        }
        self.ring.partial = None;
    }

    /// Packets taken and not answered.
    pub fn held(&self) -> usize {
        self.packets.len()
    }

    /// Answers the oldest packet taken with a [`status`]: each slot in its own place. Not visible
    /// before [`publish`](Self::publish).
    #[inline]
    pub fn put(&mut self, status: i16) {
        let slots = self.packets.pop_front().expect("put without a packet taken");
        for _ in 0..slots {
            let answer = self.answers[index(self.ring.rsp_prod & (self.ring.page.size - 1))];
            let response = match answer {
                Answer::Data(id) => TxResponse { id, status },
                Answer::Empty(id) => TxResponse { id, status: status::OKAY },
                Answer::Extra => TxResponse { id: 0, status: status::NULL },
            };
            let at = self.ring.answer();
            self.ring.page.area.store_u32(at, response.encode());
        }
    }

    /// Makes every answer so far visible to the front half.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the front half wants to be told of what was published since this was last asked.
    #[inline]
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Asks to be notified of the next request, and looks a last time. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Asks for no notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether there is something to take that was not there at the last look. One load.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.ring.has_work(1)
    }

    /// Whether what is next is a packet whose tail is not published. It may come; a caller that
    /// waits for it needs a limit, for nothing behind it can be taken either.
    pub fn is_partial(&self) -> bool {
        self.ring.partial.is_some()
    }
}
