//! Back half of the rx ring.

use shm::Area;
use shm::sync::Ordering;

use crate::xen::ledger::Ledger;
use crate::xen::page::{Back, SMARTPOLL_ACTIVE};
use crate::xen::wire::{Extra, RX_SLOT_LEN, RxRequest, RxResponse};
use crate::xen::{Armed, AttachError, Malformed};

/// Back half of an rx ring: fills the pages that a guest offers.
pub struct BackRx {
    ring: Back,
}

impl BackRx {
    /// Attaches to the ring in `area` where its responses end. The first
    /// [`notify_needed`](Self::notify_needed) covers a notification that an earlier back half did
    /// not send.
    ///
    /// # Errors
    /// [`AttachError`]: `area` does not hold a valid ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach(area, RX_SLOT_LEN)? })
    }

    /// Attaches at the [`position`](Self::position) of an earlier back half; else as
    /// [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`AttachError`], as for [`attach`](Self::attach).
    pub fn attach_at(area: Area, position: u32) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach_at(area, RX_SLOT_LEN, position)? })
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

    /// Number of requests ready to be taken.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the vif must be stopped.
    #[inline]
    pub fn available(&mut self) -> Result<u32, Malformed> {
        self.ring.refresh()
    }

    /// Takes the next of the requests that [`available`](Self::available) counted.
    #[inline]
    pub fn take(&mut self) -> Option<RxRequest> {
        if self.ring.ready() == 0 {
            return None;
        }
        let at = self.ring.page.offset(self.ring.req_cons.advance());
        Some(RxRequest::decode(self.ring.page.area.load_u64(at)))
    }

    /// Undoes `take` for the last `requests` taken; they must not be answered yet.
    pub fn untake(&mut self, requests: u32) {
        assert!(requests <= self.ring.held(), "untake of requests never taken");
        self.ring.req_cons = self.ring.req_cons.minus(requests);
    }

    /// Requests taken and not answered.
    pub fn held(&self) -> u32 {
        self.ring.held()
    }

    /// Responds to the oldest request taken, in its slot. Not visible before
    /// [`publish`](Self::publish), which must be called between packets only.
    #[inline]
    pub fn put(&mut self, response: RxResponse) {
        self.ring.answer(response.encode().into());
    }

    /// Puts an extra info into the slot of the oldest request taken, whose page stays unused.
    /// `more`: another follows.
    #[inline]
    pub fn put_extra(&mut self, extra: Extra, more: bool) {
        self.ring.answer(extra.encode(more).into());
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

    /// Requests an event at `need` requests, then re-checks the ring. Only [`Armed::Armed`] allows
    /// sleep. `need` is limited to the ring's size less the requests held.
    pub fn arm(&mut self, need: u32) -> Armed {
        self.ring.arm(need.clamp(1, self.ring.page.size))
    }

    /// Suppresses notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether `need` requests are ready. One load.
    #[inline]
    pub fn has_room(&self, need: u32) -> bool {
        self.ring.has_work(need.max(1))
    }

    /// Whether the front half polls, see [`SmartPoll`](crate::xen::SmartPoll).
    pub fn smartpoll_active(&self) -> bool {
        self.ring.page.area.sync_load_u8(SMARTPOLL_ACTIVE, Ordering::Relaxed) != 0
    }

    /// The smart-poll flag of the queue, shared by both rings.
    pub fn smart_poll(&self) -> crate::xen::SmartPoll {
        crate::xen::SmartPoll::new(self.ring.page.area.clone())
    }
}
