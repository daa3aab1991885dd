//! Front half of the rx ring.

use shm::Area;

use crate::index::Idx;
use crate::xen::page::{Front, SmartPoll};
use crate::xen::wire::{
    Extra, Gso, Hash, PAGE_LEN, RX_SLOT_LEN, RxRequest, RxResponse, gso_type, rx_flag,
};
use crate::xen::{Armed, FrontTx, Malformed, SLOTS_MAX, index};

/// One buffer with a part of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxSlot {
    /// The request it was posted as.
    pub request: RxRequest,
    /// Offset of the bytes in the page.
    pub offset: u16,
    /// Number of bytes; `offset + len` is within the page.
    pub len: u16,
}

/// Reason to drop a packet on an intact ring. All its buffers must be posted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxRefusal {
    /// The back end answered a buffer with an error.
    Status(i16),
    /// A buffer crosses the end of its page.
    CrossesPage,
    /// More than [`SLOTS_MAX`] buffers.
    Slots,
    /// An extra info of unknown type.
    ExtraType(u8),
    /// GSO of size 0 or of unknown type, or the deprecated GSO prefix, which we never request.
    Gso,
    /// Shorter than an Ethernet header.
    Short,
}

/// A packet, copied out and checked. Allocated once and reused by every [`FrontRx::take`].
#[derive(Clone, Debug, Default)]
pub struct RxPacket {
    /// [`rx_flag`]s of its first response.
    pub flags: u16,
    /// Bytes of all its buffers.
    pub len: u32,
    /// Segmentation, if it is a GSO packet.
    pub gso: Option<Gso>,
    /// The hash the back end calculated.
    pub hash: Option<Hash>,
    /// Buffers with its bytes.
    pub slots: Vec<RxSlot>,
    /// Buffers returned without data, to be posted again: those whose slots held extra infos, and
    /// all of a refused packet.
    pub spare: Vec<RxRequest>,
    refused: Option<RxRefusal>,
}

impl RxPacket {
    /// Creates an empty packet.
    pub fn new() -> Self {
        Self {
            slots: Vec::with_capacity(SLOTS_MAX),
            spare: Vec::with_capacity(SLOTS_MAX),
            ..Self::default()
        }
    }

    fn clear(&mut self) {
        (self.flags, self.len, self.gso, self.hash, self.refused) = (0, 0, None, None, None);
        self.slots.clear();
        self.spare.clear();
    }

    fn refuse(&mut self, why: RxRefusal) {
        self.refused.get_or_insert(why);
    }

    /// Adds one response and the request of its slot.
    fn response(&mut self, response: RxResponse, request: RxRequest) {
        let RxResponse { offset, flags, status, .. } = response;
        if flags & rx_flag::GSO_PREFIX != 0 {
            self.refuse(RxRefusal::Gso);
        }
        match u16::try_from(status) {
            Err(_) => self.refuse(RxRefusal::Status(status)),
            Ok(len) if u32::from(offset) + u32::from(len) > u32::from(PAGE_LEN) => {
                self.refuse(RxRefusal::CrossesPage);
            }
            Ok(_) if self.slots.len() == SLOTS_MAX => self.refuse(RxRefusal::Slots),
            Ok(len) => {
                self.len += u32::from(len);
                self.slots.push(RxSlot { request, offset, len });
                return;
            }
        }
        self.spare.push(request);
    }

    fn extra(&mut self, extra: Extra) {
        match extra {
            Extra::Gso(gso) => {
                let known = gso.kind == gso_type::TCPV4 || gso.kind == gso_type::TCPV6;
                if gso.size == 0 || !known {
                    self.refuse(RxRefusal::Gso);
                }
                self.gso = Some(gso);
            }
            Extra::Hash(hash) => self.hash = Some(hash),
            Extra::McastAdd(_) => self.refuse(RxRefusal::ExtraType(2)),
            Extra::McastDel(_) => self.refuse(RxRefusal::ExtraType(3)),
        }
    }

    /// Checks the whole packet; a refused packet has only spare buffers.
    fn finish(&mut self) -> Result<(), RxRefusal> {
        if self.len < 14 {
            self.refuse(RxRefusal::Short);
        }
        let Some(why) = self.refused else {
            return Ok(());
        };
        self.spare.extend(self.slots.drain(..).map(|slot| slot.request));
        Err(why)
    }
}

/// Front half of an rx ring: receives.
pub struct FrontRx {
    ring: Front,
    smart_poll: SmartPoll,
    /// The request posted in each slot.
    posted: Box<[RxRequest]>,
}

impl FrontRx {
    /// Initialises a ring in `area`, a page that we own.
    pub fn new(area: Area) -> Self {
        Self::starting_at(area, 0)
    }

    /// Creates a ring with all indices at `start` (tests begin before the wrap).
    pub fn starting_at(area: Area, start: u32) -> Self {
        let smart_poll = SmartPoll::new(area.clone());
        let ring = Front::new(area, RX_SLOT_LEN, start);
        let posted = vec![RxRequest::default(); index(ring.page.size)].into();
        Self { ring, smart_poll, posted }
    }

    /// Slots of the ring.
    pub fn size(&self) -> u32 {
        self.ring.page.size
    }

    /// Slots free for requests.
    pub fn room(&self) -> u32 {
        self.ring.room()
    }

    /// Offers a page; false when the ring is full. Not visible before [`publish`](Self::publish).
    /// Buffers are found by slot, so any id will do (Linux's front half uses the slot's number).
    #[inline]
    pub fn post(&mut self, request: RxRequest) -> bool {
        if self.ring.room() == 0 {
            return false;
        }
        self.posted[self.ring.page.slot(self.ring.req_prod).get()] = request;
        let at = self.ring.request();
        self.ring.page.area.store_u64(at, request.encode());
        true
    }

    /// Makes every page posted so far visible to the back half.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the back half wants an event for what was published since the last query.
    #[inline]
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Takes the next packet if it is complete: `Ok(Ok(()))` if its bytes are in `out`,
    /// `Ok(Err(..))` if it must be dropped; in both cases `out` has buffers to post again. Every
    /// slot is read exactly once.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the caller must stop using the ring.
    #[inline]
    pub fn take(&mut self, out: &mut RxPacket) -> Result<Option<Result<(), RxRefusal>>, Malformed> {
        if self.ring.rsp_cons == self.ring.rsp_seen || self.ring.partial.is_some() {
            let seen = self.ring.partial;
            if self.ring.refresh()? == 0 || seen == Some(self.ring.rsp_seen) {
                return Ok(None);
            }
        }
        if let Some(fault) = self.ring.fault {
            return Err(fault);
        }
        self.ring.partial = None;
        out.clear();
        let Some(end) = self.packet(out) else {
            // A packet that fills the ring without an end cannot be completed.
            if self.ring.rsp_seen.since(self.ring.rsp_cons) == self.ring.page.size {
                return Err(self.ring.fail(Malformed::Endless));
            }
            self.ring.partial = Some(self.ring.rsp_seen);
            return Ok(None);
        };
        self.ring.rsp_cons = end;
        Ok(Some(out.finish()))
    }

    /// Walks over one packet; returns its end, or `None` if its tail is not published.
    #[inline]
    fn packet(&self, out: &mut RxPacket) -> Option<Idx<u32>> {
        let mut at = self.ring.rsp_cons;
        let first = RxResponse::decode(self.word(at));
        out.flags = first.flags;
        out.response(first, self.request(at));
        at = at.plus(1);
        let mut more = first.flags & rx_flag::EXTRA_INFO != 0;
        while more {
            if at == self.ring.rsp_seen {
                return None;
            }
            out.spare.push(self.request(at));
            more = match Extra::decode(self.word(at)) {
                Ok((extra, more)) => {
                    out.extra(extra);
                    more
                }
                // After an unknown extra info the meaning of later slots is unknown.
                Err(kind) => {
                    out.refuse(RxRefusal::ExtraType(kind));
                    false
                }
            };
            at = at.plus(1);
        }
        let mut more = first.flags & rx_flag::MORE_DATA != 0;
        while more {
            if at == self.ring.rsp_seen {
                return None;
            }
            let response = RxResponse::decode(self.word(at));
            out.response(response, self.request(at));
            at = at.plus(1);
            more = response.flags & rx_flag::MORE_DATA != 0;
        }
        Some(at)
    }

    #[inline]
    fn word(&self, idx: Idx<u32>) -> u64 {
        self.ring.page.area.load_u64(self.ring.page.offset(idx))
    }

    #[inline]
    fn request(&self, idx: Idx<u32>) -> RxRequest {
        self.posted[self.ring.page.slot(idx).get()]
    }

    /// Requests an event for the next response, then re-checks the ring. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Arms as [`arm`](Self::arm) does, for the `n`th response from now, or the last
    /// outstanding one.
    pub fn arm_after(&mut self, n: u32) -> Armed {
        self.ring.arm(n)
    }

    /// Suppresses notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether there are responses beyond those already examined. One load.
    #[inline]
    pub fn has_responses(&self) -> bool {
        self.ring.has_responses(1)
    }

    /// Whether the next packet is incomplete: its tail is not published.
    pub fn is_partial(&self) -> bool {
        self.ring.partial.is_some()
    }

    /// Whether the smart-poll flag is set, see [`SmartPoll`].
    pub fn smartpoll_active(&self) -> bool {
        self.smart_poll.is_active()
    }

    /// Ends smart polling of this ring and of `tx`: clears the flag, then re-checks both rings.
    /// Only [`Armed::Armed`] allows the caller to stop; with work pending, continue to poll. The
    /// back half then notifies at its next response anyway, which is harmless.
    pub fn stop_polling(&self, tx: &FrontTx) -> Armed {
        self.smart_poll.release();
        let work = self.has_responses() || tx.has_responses();
        if work { Armed::WorkPending } else { Armed::Armed }
    }
}
