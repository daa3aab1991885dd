//! The control ring: questions and orders of the front half, each answered once.

use shm::Area;

use super::page::{Back, Front};
use super::wire::{CTRL_SLOT_LEN, CtrlRequest, CtrlResponse};
use super::{Armed, AttachError, Malformed};

/// Back half of a control ring. Answers go in the order of the requests.
pub struct BackCtrl {
    ring: Back,
}

impl BackCtrl {
    /// Attaches to the ring in `area` where its responses end. Whether an earlier back half owed
    /// a notification, [`notify_needed`](Self::notify_needed) tells at once.
    ///
    /// # Errors
    /// [`AttachError`]: what lies there is no ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach(area, CTRL_SLOT_LEN)? })
    }

    /// Takes the next request.
    ///
    /// # Errors
    /// [`Malformed`], now and from now on: the vif is to be stopped.
    pub fn take(&mut self) -> Result<Option<CtrlRequest>, Malformed> {
        if self.ring.ready() == 0 && self.ring.look()? == 0 {
            return Ok(None);
        }
        let at = self.ring.page.slot(self.ring.req_cons);
        self.ring.req_cons = self.ring.req_cons.wrapping_add(1);
        Ok(Some(CtrlRequest::decode(self.ring.page.area.load_pair(at))))
    }

    /// Answers the oldest request taken. Not visible before [`publish`](Self::publish).
    pub fn put(&mut self, response: CtrlResponse) {
        let at = self.ring.answer();
        let (first, data) = response.encode();
        self.ring.page.area.store_u64(at, first);
        self.ring.page.area.store_u32(at + 8, data);
    }

    /// Makes every answer so far visible to the front half.
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the front half wants to be told of what was published since this was last asked.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Asks to be notified of the next request, and looks a last time. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Whether there is something to take. One load.
    pub fn has_work(&self) -> bool {
        self.ring.has_work(1)
    }
}

/// Front half of a control ring.
pub struct FrontCtrl {
    ring: Front,
}

impl FrontCtrl {
    /// Initialises a ring in `area`, a page of ours.
    pub fn new(area: Area) -> Self {
        Self::starting_at(area, 0)
    }

    /// As [`new`](Self::new), with all indices at `start` (tests begin before the wrap).
    pub fn starting_at(area: Area, start: u32) -> Self {
        Self { ring: Front::new(area, CTRL_SLOT_LEN, start) }
    }

    /// Slots free for requests.
    pub fn room(&self) -> u32 {
        self.ring.room()
    }

    /// Adds a request; false when the ring is full. Not visible before
    /// [`publish`](Self::publish).
    pub fn put(&mut self, request: CtrlRequest) -> bool {
        if self.ring.room() == 0 {
            return false;
        }
        let at = self.ring.request();
        let (first, second) = request.encode();
        self.ring.page.area.store_u64(at, first);
        self.ring.page.area.store_u64(at + 8, second);
        true
    }

    /// Makes every request so far visible to the back half.
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the back half wants to be told of what was published since this was last asked.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Takes the next response; in any order, the id says to what.
    ///
    /// # Errors
    /// [`Malformed`], now and from now on: the ring is to be abandoned.
    pub fn take(&mut self) -> Result<Option<CtrlResponse>, Malformed> {
        if self.ring.rsp_cons == self.ring.rsp_seen && self.ring.look()? == 0 {
            return Ok(None);
        }
        let at = self.ring.page.slot(self.ring.rsp_cons);
        self.ring.rsp_cons = self.ring.rsp_cons.wrapping_add(1);
        let area = &self.ring.page.area;
        Ok(Some(CtrlResponse::decode(area.load_u64(at), area.load_u32(at + 8))))
    }

    /// Asks for a notification of the next response, and looks a last time. Only
    /// [`Armed::Armed`] allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Whether there are responses. One load.
    pub fn has_responses(&self) -> bool {
        self.ring.has_responses(1)
    }
}
