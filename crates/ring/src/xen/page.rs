//! The page all Xen rings share: four indices, a few spare bytes, and slots (Xen's `io/ring.h`).
//!
//! ```text
//!    0 req_prod   4 req_event   8 rsp_prod   12 rsp_event   16 smartpoll_active   64 slots...
//!
//!      published, unanswered           answered, not published
//!            │                               │
//!   rsp_published ──── rsp_prod ──── req_cons ──── req_prod          (back half)
//!      the front half may use these slots again once rsp_published has passed them
//! ```
//! All indices free-run through 32 bits. Each side writes its own producer index and the *event*
//! of the other's: "notify me when your index passes this".

use shm::Area;
use shm::sync::{Ordering, fence};

use super::wire::{ring_size, slot_at};
use super::{Armed, AttachError, Malformed};

/// Offset of `req_prod`, which the front half writes.
pub(super) const REQ_PROD: usize = 0;
/// Offset of `req_event`, which the back half writes.
pub(super) const REQ_EVENT: usize = 4;
/// Offset of `rsp_prod`, which the back half writes.
pub(super) const RSP_PROD: usize = 8;
/// Offset of `rsp_event`, which the front half writes.
pub(super) const RSP_EVENT: usize = 12;
/// Offset of `pvt.netif.smartpoll_active`, which both write.
pub(super) const SMARTPOLL_ACTIVE: usize = 16;
/// Offset of the first slot.
pub(super) const SLOTS: usize = 64;

/// Whether an index that moved from `old` to `new` passed `event`: `old < event <= new`, all
/// free-running, so the distances are compared, not the indices.
#[inline]
pub(super) const fn notify_wanted(event: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// A ring's page and its frozen geometry.
pub(super) struct Page {
    pub(super) area: Area,
    pub(super) size: u32,
    slot_len: usize,
}

impl Page {
    /// The ring of slots of `slot_len` bytes that fits `area`.
    fn new(area: Area, slot_len: usize) -> Option<Self> {
        let size = ring_size(area.len(), slot_len);
        (size > 0).then_some(Self { area, size, slot_len })
    }

    /// Where the slot of `idx` lies.
    #[inline]
    pub(super) fn slot(&self, idx: u32) -> usize {
        slot_at(idx, self.size - 1, self.slot_len)
    }

    /// Asks the CPU to fetch the slots from `idx` on, `lines` lines of them.
    #[inline]
    fn look_ahead(&self, idx: u32, lines: usize) {
        let at = self.slot(idx);
        for line in 0..lines {
            self.area.prefetch(at + 64 * line);
        }
    }
}

/// Indices of a back half.
pub(super) struct Back {
    pub(super) page: Page,
    /// Next request to take.
    pub(super) req_cons: u32,
    /// `req_prod` as last seen and checked.
    pub(super) req_seen: u32,
    /// Next slot to answer (`rsp_prod_pvt`).
    pub(super) rsp_prod: u32,
    pub(super) rsp_published: u32,
    /// `rsp_prod` at the last decision whether to notify.
    rsp_notified: u32,
    /// Requests up to here were looked at and are of no use without more: an unfinished packet.
    pub(super) partial: Option<u32>,
    pub(super) fault: Option<Malformed>,
}

impl Back {
    /// Attaches where the responses end (`BACK_RING_ATTACH`): requests that an earlier back half
    /// took and did not answer are seen again.
    pub(super) fn attach(area: Area, slot_len: usize) -> Result<Self, AttachError> {
        let page = Page::new(area, slot_len).ok_or(AttachError::TooSmall)?;
        let rsp_prod = page.area.sync_load_u32(RSP_PROD, Ordering::Acquire);
        let req_prod = page.area.sync_load_u32(REQ_PROD, Ordering::Acquire);
        if req_prod.wrapping_sub(rsp_prod) > page.size {
            return Err(AttachError::Overflow { req_prod, rsp_prod, size: page.size });
        }
        // An earlier back half may have died between publishing and notifying: the first decision
        // counts all responses the ring can hold as new.
        let rsp_notified = rsp_prod.wrapping_sub(page.size);
        Ok(Self {
            page,
            req_cons: rsp_prod,
            req_seen: rsp_prod,
            rsp_prod,
            rsp_published: rsp_prod,
            rsp_notified,
            partial: None,
            fault: None,
        })
    }

    /// Requests taken and not answered.
    #[inline]
    pub(super) fn held(&self) -> u32 {
        self.req_cons.wrapping_sub(self.rsp_prod)
    }

    /// Requests that have been seen and not taken.
    #[inline]
    pub(super) fn ready(&self) -> u32 {
        self.req_seen.wrapping_sub(self.req_cons)
    }

    /// Looks at `req_prod` again; how many requests wait to be taken.
    #[inline]
    pub(super) fn look(&mut self) -> Result<u32, Malformed> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Back sees req_prod /before/ the slots it covers; pairs with the front's release of
        // req_prod in `publish`; loom tests `xen_*_publish_take`.
        let seen = self.page.area.sync_load_u32(REQ_PROD, Ordering::Acquire);
        let taken = self.req_cons.wrapping_sub(self.rsp_published);
        let known = self.ready();
        let ready = seen.wrapping_sub(self.req_cons);
        // More than the ring holds, or less than there was: the front half may use a slot again
        // only when its answer is published, and takes nothing back.
        if ready > self.page.size - taken || ready < known {
            return Err(self.fail(Malformed::ReqProd { seen, taken: self.req_cons }));
        }
        self.req_seen = seen;
        self.page.look_ahead(self.req_cons, 2);
        Ok(ready)
    }

    #[cold]
    pub(super) fn fail(&mut self, fault: Malformed) -> Malformed {
        *self.fault.insert(fault)
    }

    /// The slot that the next answer goes into.
    #[inline]
    pub(super) fn answer(&mut self) -> usize {
        assert!(self.rsp_prod != self.req_cons, "answer without a request taken");
        let at = self.page.slot(self.rsp_prod);
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
        at
    }

    /// Makes all answers visible.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.rsp_prod != self.rsp_published {
            // Front sees the responses /before/ rsp_prod; pairs with the acquire in the front's
            // `look`; loom tests `xen_*_publish_take`.
            self.page.area.sync_store_u32(RSP_PROD, self.rsp_prod, Ordering::Release);
            self.rsp_published = self.rsp_prod;
        }
    }

    #[inline]
    pub(super) fn notify_needed(&mut self) -> bool {
        let (new, old) = (self.rsp_published, self.rsp_notified);
        if new == old {
            return false;
        }
        self.rsp_notified = new;
        // rsp_prod is visible /before/ we look whether the front sleeps; pairs with the fence in
        // its `arm`; loom tests `xen_*_arm_responses`.
        fence(Ordering::SeqCst);
        notify_wanted(self.page.area.sync_load_u32(RSP_EVENT, Ordering::Relaxed), new, old)
    }

    /// Asks for a notification when `need` requests wait, beyond those of an unfinished packet.
    #[inline]
    pub(super) fn arm(&mut self, need: u32) -> Armed {
        let event = self.partial.unwrap_or(self.req_cons).wrapping_add(need);
        self.page.area.sync_store_u32(REQ_EVENT, event, Ordering::Relaxed);
        // The front sees that we wait /before/ we look a last time; pairs with the fence in its
        // `notify_needed`; loom tests `xen_*_arm_requests`.
        fence(Ordering::SeqCst);
        if self.has_work(need) { Armed::WorkPending } else { Armed::Armed }
    }

    /// Whether `need` requests wait. A fault is work too: someone must come and see it.
    #[inline]
    pub(super) fn has_work(&self, need: u32) -> bool {
        let prod = self.page.area.sync_load_u32(REQ_PROD, Ordering::Relaxed);
        let from = self.partial.unwrap_or(self.req_cons);
        self.fault.is_some() || prod.wrapping_sub(from) >= need
    }
}

/// Indices of a front half.
pub(super) struct Front {
    pub(super) page: Page,
    /// Next slot to fill with a request (`req_prod_pvt`).
    pub(super) req_prod: u32,
    pub(super) req_published: u32,
    /// `req_prod` at the last decision whether to notify.
    req_notified: u32,
    /// Next response to take.
    pub(super) rsp_cons: u32,
    /// `rsp_prod` as last seen and checked.
    pub(super) rsp_seen: u32,
    /// Responses up to here are of no use without more.
    pub(super) partial: Option<u32>,
    pub(super) fault: Option<Malformed>,
}

impl Front {
    /// Writes the header of a fresh ring (`SHARED_RING_INIT`) whose indices begin at `start`.
    pub(super) fn new(area: Area, slot_len: usize, start: u32) -> Self {
        let page = Page::new(area, slot_len).expect("a page of ours holds a ring");
        for (at, value) in [
            (REQ_PROD, start),
            (REQ_EVENT, start.wrapping_add(1)),
            (RSP_PROD, start),
            (RSP_EVENT, start.wrapping_add(1)),
        ] {
            page.area.sync_store_u32(at, value, Ordering::Relaxed);
        }
        page.area.sync_store_u8(SMARTPOLL_ACTIVE, 0, Ordering::Relaxed);
        for at in (SMARTPOLL_ACTIVE + 4..SLOTS).step_by(4) {
            page.area.store_u32(at, 0);
        }
        Self {
            page,
            req_prod: start,
            req_published: start,
            req_notified: start,
            rsp_cons: start,
            rsp_seen: start,
            partial: None,
            fault: None,
        }
    }

    /// Slots without a request of ours (`RING_FREE_REQUESTS`).
    #[inline]
    pub(super) fn room(&self) -> u32 {
        self.page.size - self.req_prod.wrapping_sub(self.rsp_cons)
    }

    /// The slot that the next request goes into.
    #[inline]
    pub(super) fn request(&mut self) -> usize {
        assert!(self.room() > 0, "request without room");
        let at = self.page.slot(self.req_prod);
        self.req_prod = self.req_prod.wrapping_add(1);
        at
    }

    /// Looks at `rsp_prod` again; how many responses wait to be taken.
    #[inline]
    pub(super) fn look(&mut self) -> Result<u32, Malformed> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Front sees rsp_prod /before/ the slots it covers; pairs with the back's release of
        // rsp_prod in `publish`; loom tests `xen_*_publish_take`.
        let seen = self.page.area.sync_load_u32(RSP_PROD, Ordering::Acquire);
        let ready = seen.wrapping_sub(self.rsp_cons);
        let known = self.rsp_seen.wrapping_sub(self.rsp_cons);
        // More than was asked, or less than there was.
        if ready > self.req_published.wrapping_sub(self.rsp_cons) || ready < known {
            let fault = Malformed::RspProd { seen, taken: self.rsp_cons };
            return Err(self.fail(fault));
        }
        self.rsp_seen = seen;
        Ok(ready)
    }

    #[cold]
    pub(super) fn fail(&mut self, fault: Malformed) -> Malformed {
        *self.fault.insert(fault)
    }

    /// Makes all requests visible.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.req_prod != self.req_published {
            // Back sees the requests /before/ req_prod; pairs with the acquire in the back's
            // `look`; loom tests `xen_*_publish_take`.
            self.page.area.sync_store_u32(REQ_PROD, self.req_prod, Ordering::Release);
            self.req_published = self.req_prod;
        }
    }

    #[inline]
    pub(super) fn notify_needed(&mut self) -> bool {
        let (new, old) = (self.req_published, self.req_notified);
        if new == old {
            return false;
        }
        self.req_notified = new;
        // req_prod is visible /before/ we look whether the back sleeps; pairs with the fence in
        // its `arm`; loom tests `xen_*_arm_requests`.
        fence(Ordering::SeqCst);
        notify_wanted(self.page.area.sync_load_u32(REQ_EVENT, Ordering::Relaxed), new, old)
    }

    /// Asks for a notification when `n` more responses wait; never for more than can come, which
    /// would be to sleep for ever.
    #[inline]
    pub(super) fn arm(&mut self, n: u32) -> Armed {
        let from = self.partial.unwrap_or(self.rsp_cons);
        let n = n.min(self.req_published.wrapping_sub(from)).max(1);
        self.page.area.sync_store_u32(RSP_EVENT, from.wrapping_add(n), Ordering::Relaxed);
        // The back sees that we wait /before/ we look a last time; pairs with the fence in its
        // `notify_needed`; loom tests `xen_*_arm_responses`.
        fence(Ordering::SeqCst);
        if self.has_responses(n) { Armed::WorkPending } else { Armed::Armed }
    }

    /// Whether `n` responses wait, or a fault.
    #[inline]
    pub(super) fn has_responses(&self, n: u32) -> bool {
        let prod = self.page.area.sync_load_u32(RSP_PROD, Ordering::Relaxed);
        let from = self.partial.unwrap_or(self.rsp_cons);
        self.fault.is_some() || prod.wrapping_sub(from) >= n
    }
}

/// The flag in the rx ring's page by which a polling front half asks to be left alone (smart
/// poll). The back half sets it, the front half clears it, and each looks again where the other
/// could have missed it. Only good when both sides announced `feature-smart-poll`.
///
/// ```text
///   back:   publish, fence, was it clear? then set, fence, notify
///   front:  clear, fence, look at both rings once more: asleep only if both are empty
/// ```
/// It lies in memory that the peer writes at will: it decides who is woken, nothing else.
pub struct SmartPoll {
    area: Area,
}

impl SmartPoll {
    /// The flag of the rx ring in `area`. One for both rings of a queue, wherever they are served.
    pub fn new(area: Area) -> Self {
        Self { area }
    }

    /// Back half, after publishing on either ring: whether to notify the front half. When it does
    /// not poll, it will from now on. Takes the place of `notify_needed`.
    #[must_use]
    pub fn claim(&self) -> bool {
        // What we published is visible /before/ we look whether the front polls; pairs with the
        // fence in `release`; loom test `smart_poll_*`.
        fence(Ordering::SeqCst);
        if self.is_active() {
            return false;
        }
        self.set(true);
        // The flag is set /before/ the notification: set after it, it could hide that the front
        // half has long stopped; loom test `canary_smart_poll_flag_set_after_notifying_is_found`.
        fence(Ordering::SeqCst);
        true
    }

    /// Front half, about to stop polling: asks to be notified again. It must then look at both
    /// rings once more: see [`FrontRx::stop_polling`](super::FrontRx::stop_polling).
    pub(super) fn release(&self) {
        self.set(false);
        // The back sees the flag cleared /before/ we look a last time; pairs with the fence in
        // `claim`; loom test `smart_poll_*`.
        fence(Ordering::SeqCst);
    }

    /// Whether the flag is set.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.area.sync_load_u8(SMARTPOLL_ACTIVE, Ordering::Relaxed) != 0
    }

    /// Writes the flag and does nothing else.
    #[inline]
    pub fn set(&self, active: bool) {
        self.area.sync_store_u8(SMARTPOLL_ACTIVE, u8::from(active), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule a second time, by walking: was `event` among the published indices?
    fn notify_wanted_by_walking(event: u32, new: u32, old: u32) -> bool {
        let mut at = old;
        while at != new {
            at = at.wrapping_add(1);
            if at == event {
                return true;
            }
        }
        false
    }

    #[test]
    fn notify_rule_equals_the_walked_rule_from_every_start_near_the_wrap() {
        for old in (0..40_u32).chain(u32::MAX - 80..=u32::MAX).chain(0x7fff_ffd0..0x8000_0030) {
            for moved in 0..70_u32 {
                let new = old.wrapping_add(moved);
                for event in 0..140_u32 {
                    let event = old.wrapping_add(event).wrapping_sub(70);
                    assert_eq!(
                        notify_wanted(event, new, old),
                        notify_wanted_by_walking(event, new, old),
                        "event {event} new {new} old {old}"
                    );
                }
            }
        }
    }
}
