//! Control ring: queries and commands of the front half, each answered once.

use shm::Area;

use super::ledger::{Ledger, Response};
use super::page::{Back, Front};
use super::wire::{CTRL_SLOT_LEN, CtrlRequest, CtrlResponse};
use super::{Armed, AttachError, Malformed};

/// Back half of a control ring. Responses keep the order of the requests.
pub struct BackCtrl {
    ring: Back,
}

impl BackCtrl {
    /// Attaches to the ring in `area` where its responses end. The first
    /// [`notify_needed`](Self::notify_needed) covers a notification that an earlier back half did
    /// not send.
    ///
    /// # Errors
    /// [`AttachError`]: `area` does not hold a valid ring.
    pub fn attach(area: Area) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach(area, CTRL_SLOT_LEN)? })
    }

    /// Attaches at the [`position`](Self::position) of an earlier back half; else as
    /// [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`AttachError`], as for [`attach`](Self::attach).
    pub fn attach_at(area: Area, position: u32) -> Result<Self, AttachError> {
        Ok(Self { ring: Back::attach_at(area, CTRL_SLOT_LEN, position)? })
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

    /// Takes the next request.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the vif must be stopped.
    pub fn take(&mut self) -> Result<Option<CtrlRequest>, Malformed> {
        if self.ring.ready() == 0 && self.ring.refresh()? == 0 {
            return Ok(None);
        }
        let at = self.ring.page.offset(self.ring.req_cons.advance());
        let (first, second) = self.ring.page.area.load_pair(at);
        Ok(Some(CtrlRequest::decode(first, second)))
    }

    /// Responds to the oldest request taken. Not visible before [`publish`](Self::publish).
    pub fn put(&mut self, response: CtrlResponse) {
        let (first, second) = response.encode();
        self.ring.answer(Response { first, second });
    }

    /// Makes every response so far visible to the front half.
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the front half wants an event for what was published since the last query.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Requests an event for the next request, then re-checks the ring. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Whether there is a request to take. One load.
    pub fn has_work(&self) -> bool {
        self.ring.has_work(1)
    }
}

/// Front half of a control ring.
pub struct FrontCtrl {
    ring: Front,
}

impl FrontCtrl {
    /// Initialises a ring in `area`, a page that we own.
    pub fn new(area: Area) -> Self {
        Self::starting_at(area, 0)
    }

    /// Creates a ring with all indices at `start` (tests start before the wrap).
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

    /// Whether the back half wants an event for what was published since the last query.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Takes the next response; responses come in any order, identified by id.
    ///
    /// # Errors
    /// [`Malformed`], on this and every later call: the caller must stop using the ring.
    pub fn take(&mut self) -> Result<Option<CtrlResponse>, Malformed> {
        if self.ring.rsp_cons == self.ring.rsp_seen && self.ring.refresh()? == 0 {
            return Ok(None);
        }
        let at = self.ring.page.offset(self.ring.rsp_cons.advance());
        let area = &self.ring.page.area;
        Ok(Some(CtrlResponse::decode(area.load_u64(at), area.load_u32(at + 8))))
    }

    /// Requests an event for the next response, then re-checks the ring. Only [`Armed::Armed`]
    /// allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm(1)
    }

    /// Whether there are responses. One load.
    pub fn has_responses(&self) -> bool {
        self.ring.has_responses(1)
    }
}
