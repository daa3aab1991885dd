//! Front half of the tx ring.

use shm::Area;

use crate::index::Idx;
use crate::xen::page::Front;
use crate::xen::wire::{Extra, TX_SLOT_LEN, TxRequest, TxResponse, tx_flag};
use crate::xen::{Armed, Malformed, SLOTS_PORTABLE, index, lo32, status};

/// Distance below which an index counts as behind another: more than any ring holds.
const SHOWN: u32 = 1 << 31;

/// Front half of a tx ring: sends packets.
///
/// Each slot that is not answered holds an id or an extra info, and each response ends one of them.
/// So every free slot has a free id, whatever the back half answers.
pub struct FrontTx {
    ring: Front,
    /// Index of the request of each unanswered id.
    pending: Box<[Option<Idx<u32>>]>,
    /// Unanswered extra infos.
    extras: u32,
}

impl FrontTx {
    /// Initialises a ring in `area`, a page that we own.
    pub fn new(area: Area) -> Self {
        Self::starting_at(area, 0)
    }

    /// Creates a ring with all indices at `start` (tests begin before the wrap).
    pub fn starting_at(area: Area, start: u32) -> Self {
        let ring = Front::new(area, TX_SLOT_LEN, start);
        let pending = vec![None; index(ring.page.size)].into();
        Self { ring, pending, extras: 0 }
    }

    /// Slots of the ring; ids are smaller.
    pub fn size(&self) -> u32 {
        self.ring.page.size
    }

    /// Slots free for requests.
    pub fn room(&self) -> u32 {
        self.ring.room()
    }

    /// Adds one packet of at most [`SLOTS_PORTABLE`] buffers: `first` with the size of the whole
    /// packet, extra infos, and the `rest` with their own sizes. Sets the flags that announce
    /// further slots. Returns false, without effect, when the ring is full. Not visible before
    /// [`publish`](Self::publish). Ids are smaller than the ring's size and not in flight.
    pub fn add(&mut self, first: TxRequest, extras: &[Extra], rest: &[TxRequest]) -> bool {
        assert!(rest.len() < SLOTS_PORTABLE, "a packet of too many slots");
        let slots = 1 + extras.len() + rest.len();
        if slots > index(self.ring.room()) {
            return false;
        }
        let with = |request: TxRequest, flag: u16, on: bool| {
            let flags = if on { request.flags | flag } else { request.flags & !flag };
            TxRequest { flags, ..request }
        };
        let head = with(first, tx_flag::EXTRA_INFO, !extras.is_empty());
        self.request(with(head, tx_flag::MORE_DATA, !rest.is_empty()));
        for (i, extra) in extras.iter().enumerate() {
            let word = extra.encode(i + 1 < extras.len());
            let at = self.ring.request();
            let area = &self.ring.page.area;
            area.store_u32(at, lo32(word));
            area.store_u32(at + 4, lo32(word >> 32));
            area.store_u32(at + 8, 0);
            self.extras += 1;
        }
        for (i, request) in rest.iter().enumerate() {
            self.request(with(*request, tx_flag::MORE_DATA, i + 1 < rest.len()));
        }
        true
    }

    fn request(&mut self, request: TxRequest) {
        let pending = &mut self.pending[usize::from(request.id)];
        assert!(pending.is_none(), "id {} is in flight", request.id);
        *pending = Some(self.ring.req_prod);
        let at = self.ring.request();
        for (i, word) in request.encode().into_iter().enumerate() {
            self.ring.page.area.store_u32(at + 4 * i, word);
        }
    }

    /// Makes every packet added so far visible to the back half.
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

    /// Takes the next response to a buffer; responses to extra infos are skipped.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the caller must stop using the ring.
    #[inline]
    pub fn take_response(&mut self) -> Result<Option<TxResponse>, Malformed> {
        loop {
            if self.ring.rsp_cons == self.ring.rsp_seen && self.ring.refresh()? == 0 {
                return Ok(None);
            }
            if let Some(fault) = self.ring.fault {
                return Err(fault);
            }
            let at = self.ring.page.offset(self.ring.rsp_cons);
            let response = TxResponse::decode(self.ring.page.area.load_u32(at));
            if response.status == status::NULL {
                // NULL answers extra infos only. For a buffer it would leak the buffer and its id.
                let Some(left) = self.extras.checked_sub(1) else {
                    return Err(self.ring.fail(Malformed::NullResponse));
                };
                self.extras = left;
            } else {
                let published = self.ring.req_published;
                // An unpublished request cannot have been answered.
                let is_shown = |at: Idx<u32>| published.since(at.plus(1)) < SHOWN;
                let pending = self.pending.get_mut(usize::from(response.id));
                let Some(pending) = pending.filter(|p| p.is_some_and(is_shown)) else {
                    return Err(self.ring.fail(Malformed::ResponseId(response.id)));
                };
                *pending = None;
            }
            self.ring.rsp_cons = self.ring.rsp_cons.plus(1);
            if response.status != status::NULL {
                return Ok(Some(response));
            }
        }
    }

    /// Requests an event for the next response, then re-checks the ring. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Arms as [`arm`](Self::arm) does, for the `n`th response from now (those to extra infos
    /// count), or the last outstanding one.
    pub fn arm_after(&mut self, n: u32) -> Armed {
        self.ring.arm(n)
    }

    /// Suppresses notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether there are responses. One load.
    #[inline]
    pub fn has_responses(&self) -> bool {
        self.ring.has_responses(1)
    }

    /// Whether at least `n` slots have been answered. One load.
    #[inline]
    pub fn has_responses_many(&self, n: u32) -> bool {
        self.ring.has_responses(n.max(1))
    }
}
