//! Back half of the rx ring.

use shm::Area;
use shm::sync::Ordering;

use crate::xen::page::{Back, SMARTPOLL_ACTIVE};
use crate::xen::wire::{Extra, RX_SLOT_LEN, RxRequest, RxResponse};
use crate::xen::{Armed, AttachError, Malformed};

/// Back half of an rx ring: fills the pages that a guest offers.
pub struct BackRx {
    ring: Back,
}

impl BackRx {
    /// Attaches to the ring in `area` where its responses end. Whether an earlier back half owed
    /// a notification, [`notify_needed`](Self::notify_needed) tells at once.
    ///
    /// # Errors
    /// [`AttachError`]: what lies there is no ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach(area, RX_SLOT_LEN)? })
    }

    /// Slots of the ring.
    pub fn size(&self) -> u32 {
        self.ring.page.size
    }

    /// How many requests wait to be taken.
    ///
    /// # Errors
    /// [`Malformed`], now and from now on: the vif is to be stopped.
    #[inline]
    pub fn available(&mut self) -> Result<u32, Malformed> {
        self.ring.look()
    }

    /// The next request, of those [`available`](Self::available) told of.
    #[inline]
    pub fn take(&mut self) -> Option<RxRequest> {
        if self.ring.ready() == 0 {
            return None;
        }
        let at = self.ring.page.slot(self.ring.req_cons);
        self.ring.req_cons = self.ring.req_cons.wrapping_add(1);
        Some(RxRequest::decode(self.ring.page.area.load_u64(at)))
    }

    /// Gives back the last `requests` taken, as if they had never been; they must not be answered
    /// yet.
    pub fn untake(&mut self, requests: u32) {
        assert!(requests <= self.ring.held(), "untake of requests never taken");
        self.ring.req_cons = self.ring.req_cons.wrapping_sub(requests);
    }

    /// Requests taken and not answered.
    pub fn held(&self) -> u32 {
        self.ring.held()
    }

    /// Answers the oldest request taken, in its slot. Not visible before
    /// [`publish`](Self::publish), which is for whole packets.
    #[inline]
    pub fn put(&mut self, response: RxResponse) {
        let at = self.ring.answer();
        self.ring.page.area.store_u64(at, response.encode());
    }

    /// Puts an extra info into the slot of the oldest request taken, whose page stays unused.
    /// `more`: another follows.
    #[inline]
    pub fn put_extra(&mut self, extra: Extra, more: bool) {
        let at = self.ring.answer();
        self.ring.page.area.store_u64(at, extra.encode(more));
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

    /// Asks to be notified when `need` requests wait, and looks a last time. Only
    /// [`Armed::Armed`] allows sleep. At most what the ring has beside those held can come.
    pub fn arm(&mut self, need: u32) -> Armed {
        self.ring.arm(need.clamp(1, self.ring.page.size))
    }

    /// Asks for no notifications: the ring is being polled.
    pub fn disarm(&mut self) {}

    /// Whether `need` requests wait. One load.
    #[inline]
    pub fn has_room(&self, need: u32) -> bool {
        self.ring.has_work(need.max(1))
    }

    /// Whether the front half polls, see [`SmartPoll`](crate::xen::SmartPoll).
    pub fn smartpoll_active(&self) -> bool {
        self.ring.page.area.sync_load_u8(SMARTPOLL_ACTIVE, Ordering::Relaxed) != 0
    }

    /// The flag by which a front half says that it polls, for both rings of the queue.
    pub fn smart_poll(&self) -> crate::xen::SmartPoll {
        crate::xen::SmartPoll::new(self.ring.page.area.clone())
    }
}
