//! The page layout of all Xen rings: four indices, a few spare bytes, and slots (Xen's
//! `io/ring.h`).
//!
//! ```text
//!    0 req_prod   4 req_event   8 rsp_prod   12 rsp_event   16 smartpoll_active   64 slots...
//!
//!      published, unanswered           answered, not published
//!            │                               │
//!   rsp_published ──── rsp_prod ──── req_cons ──── req_prod          (back half)
//!      the front half may reuse these slots once rsp_published has passed them
//! ```
//! All indices free-run through 32 bits. Each side writes its own producer index and the *event*
//! of the other's: "notify me when your index passes this".

use shm::Area;
use shm::sync::{Ordering, fence};

use super::ledger::{Ledger, Response};
use super::wire::{RX_SLOT_LEN, TX_SLOT_LEN, ring_size};
use super::{Armed, AttachError, Malformed};
use crate::bits::lo32;
use crate::index::{Idx, Slot, Untrusted};

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
const fn notify_wanted(event: Untrusted<Idx<u32>>, new: Idx<u32>, old: Idx<u32>) -> bool {
    event.hint_until(new) < new.since(old)
}

/// A ring's page and its fixed geometry.
pub(super) struct Page {
    pub(super) area: Area,
    pub(super) size: u32,
    slot_len: usize,
}

impl Page {
    /// The largest ring of slots of `slot_len` bytes that fits `area`.
    pub(super) fn new(area: Area, slot_len: usize) -> Option<Self> {
        let size = ring_size(area.len(), slot_len);
        (size > 0).then_some(Self { area, size, slot_len })
    }

    /// The slot of `idx`.
    #[inline]
    pub(super) fn slot(&self, idx: Idx<u32>) -> Slot {
        idx.slot(self.size - 1)
    }

    /// Offset of the slot of `idx` in the page.
    #[inline]
    pub(super) fn offset(&self, idx: Idx<u32>) -> usize {
        SLOTS + self.slot(idx).offset(self.slot_len)
    }

    /// Loads an index that the peer writes.
    #[inline]
    fn load(&self, at: usize, ordering: Ordering) -> Untrusted<Idx<u32>> {
        Untrusted::<Idx<u32>>::index(self.area.sync_load_u32(at, ordering))
    }

    /// Writes a response into its slot. It has 4, 8 or 12 bytes: of a tx, rx or control ring.
    #[inline]
    fn write(&self, idx: Idx<u32>, response: Response) {
        let Response { first, second } = response;
        let at = self.offset(idx);
        match self.slot_len {
            TX_SLOT_LEN => self.area.store_u32(at, lo32(first)),
            RX_SLOT_LEN => self.area.store_u64(at, first),
            _ => {
                self.area.store_u64(at, first);
                self.area.store_u32(at + 8, second);
            }
        }
    }

    /// Writes the responses that a ledger has for these slots.
    pub(super) fn write_responses(&self, ledger: &Ledger, mut from: Idx<u32>, to: Idx<u32>) {
        while from != to {
            let at = from.advance();
            self.write(at, ledger.entry(self.slot(at).get()));
        }
    }

    /// Prefetches `lines` cache lines of slots, starting at `idx`.
    #[inline]
    fn prefetch(&self, idx: Idx<u32>, lines: usize) {
        let at = self.offset(idx);
        for line in 0..lines {
            self.area.prefetch(at + 64 * line);
        }
    }
}

/// Indices of a back half.
pub(super) struct Back {
    pub(super) page: Page,
    /// Next request to take.
    pub(super) req_cons: Idx<u32>,
    /// `req_prod` as last seen and checked.
    pub(super) req_seen: Idx<u32>,
    /// Next slot to answer (`rsp_prod_pvt`).
    pub(super) rsp_prod: Idx<u32>,
    pub(super) rsp_published: Idx<u32>,
    /// `rsp_prod` at the last decision whether to notify.
    rsp_notified: Idx<u32>,
    /// End of the published part of an unfinished packet: nothing to take before there is more.
    pub(super) partial: Option<Idx<u32>>,
    pub(super) fault: Option<Malformed>,
    ledger: Option<Ledger>,
}

impl Back {
    /// Attaches where the responses end (`BACK_RING_ATTACH`): requests that an earlier back half
    /// took and did not answer are taken again.
    pub(super) fn attach(area: Area, slot_len: usize) -> Result<Self, AttachError> {
        let page = Page::new(area, slot_len).ok_or(AttachError::TooSmall)?;
        // Any index is as good a start as another: only its distance to req_prod matters.
        let rsp_prod = page.area.sync_load_u32(RSP_PROD, Ordering::Acquire);
        Self::start(page, Idx::<u32>::new(rsp_prod))
    }

    /// Attaches at an earlier back half's own `rsp_prod`, whatever the guest wrote over it.
    pub(super) fn attach_at(
        area: Area,
        slot_len: usize,
        rsp_prod: u32,
    ) -> Result<Self, AttachError> {
        let page = Page::new(area, slot_len).ok_or(AttachError::TooSmall)?;
        Self::start(page, Idx::<u32>::new(rsp_prod))
    }

    fn start(page: Page, rsp_prod: Idx<u32>) -> Result<Self, AttachError> {
        let size = page.size;
        if let Err(req_prod) =
            page.load(REQ_PROD, Ordering::Acquire).check_since(rsp_prod, 0..=size)
        {
            return Err(AttachError::Overflow { req_prod, rsp_prod: rsp_prod.get(), size });
        }
        // An earlier back half may have died between publishing and notifying: the first decision
        // counts all responses the ring can hold as new.
        let rsp_notified = rsp_prod.minus(page.size);
        Ok(Self {
            page,
            req_cons: rsp_prod,
            req_seen: rsp_prod,
            rsp_prod,
            rsp_published: rsp_prod,
            rsp_notified,
            partial: None,
            fault: None,
            ledger: None,
        })
    }

    /// Requests taken and not answered.
    #[inline]
    pub(super) fn held(&self) -> u32 {
        self.req_cons.since(self.rsp_prod)
    }

    /// Writes responses down before they are in the ring, for a successor. Between two bursts.
    pub(super) fn keep(&mut self, ledger: Ledger) {
        ledger.start(self.rsp_published, self.page.size);
        self.ledger = Some(ledger);
    }

    /// The published `rsp_prod`: where the next back half continues. All requests taken have been
    /// answered and published.
    pub(super) fn position(&self) -> u32 {
        debug_assert!(self.req_cons == self.rsp_published, "requests are held between bursts");
        self.rsp_published.get()
    }

    /// Requests that have been seen and not taken.
    #[inline]
    pub(super) fn ready(&self) -> u32 {
        self.req_seen.since(self.req_cons)
    }

    /// Reloads `req_prod`; returns the number of requests ready to be taken.
    #[inline]
    pub(super) fn refresh(&mut self) -> Result<u32, Malformed> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Back sees req_prod /before/ the slots it covers; pairs with the front's release of
        // req_prod in `publish`; loom tests `xen_*_publish_take`.
        let seen = self.page.load(REQ_PROD, Ordering::Acquire);
        let taken = self.req_cons.since(self.rsp_published);
        // Not more than the ring holds, nor less than before: the front half may reuse a slot only
        // when its response is published, and cannot withdraw a request.
        let allowed = self.ready()..=self.page.size - taken;
        let ready = match seen.check_since(self.req_cons, allowed) {
            Ok(ready) => ready,
            Err(seen) => {
                let taken = self.req_cons.get();
                return Err(self.fail(Malformed::ReqProd { seen, taken }));
            }
        };
        self.req_seen = self.req_cons.plus(ready);
        self.page.prefetch(self.req_cons, 2);
        Ok(ready)
    }

    #[cold]
    pub(super) fn fail(&mut self, fault: Malformed) -> Malformed {
        *self.fault.insert(fault)
    }

    /// Puts the next response.
    #[inline]
    pub(super) fn answer(&mut self, response: Response) {
        assert!(self.rsp_prod != self.req_cons, "answer without a request taken");
        let at = self.rsp_prod.advance();
        match &self.ledger {
            // Into the slot when all of the burst are written down.
            Some(ledger) => ledger.put(self.page.slot(at).get(), response),
            None => self.page.write(at, response),
        }
    }

    /// Makes all answers visible.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.rsp_prod != self.rsp_published {
            if let Some(ledger) = &self.ledger {
                ledger.commit(self.rsp_published, self.rsp_prod);
                self.page.write_responses(ledger, self.rsp_published, self.rsp_prod);
            }
            // Front sees the responses /before/ rsp_prod; pairs with the acquire in the front's
            // `refresh`; loom tests `xen_*_publish_take`.
            self.page.area.sync_store_u32(RSP_PROD, self.rsp_prod.get(), Ordering::Release);
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
        // rsp_prod is visible /before/ we check whether the front sleeps; pairs with the fence in
        // its `arm`; loom tests `xen_*_arm_responses`.
        fence(Ordering::SeqCst);
        notify_wanted(self.page.load(RSP_EVENT, Ordering::Relaxed), new, old)
    }

    /// Requests an event at `need` requests, beyond those of an unfinished packet.
    #[inline]
    pub(super) fn arm(&mut self, need: u32) -> Armed {
        let event = self.partial.unwrap_or(self.req_cons).plus(need);
        self.page.area.sync_store_u32(REQ_EVENT, event.get(), Ordering::Relaxed);
        // The front sees our event /before/ we re-check; pairs with the fence in its
        // `notify_needed`; loom tests `xen_*_arm_requests`.
        fence(Ordering::SeqCst);
        if self.has_work(need) { Armed::WorkPending } else { Armed::Armed }
    }

    /// Whether `need` requests are ready. A fault counts as work: it must be reported.
    #[inline]
    pub(super) fn has_work(&self, need: u32) -> bool {
        let prod = self.page.load(REQ_PROD, Ordering::Relaxed);
        let from = self.partial.unwrap_or(self.req_cons);
        self.fault.is_some() || prod.hint_since(from) >= need
    }
}

/// Indices of a front half.
pub(super) struct Front {
    pub(super) page: Page,
    /// Next slot to fill with a request (`req_prod_pvt`).
    pub(super) req_prod: Idx<u32>,
    pub(super) req_published: Idx<u32>,
    /// `req_prod` at the last decision whether to notify.
    req_notified: Idx<u32>,
    /// Next response to take.
    pub(super) rsp_cons: Idx<u32>,
    /// `rsp_prod` as last seen and checked.
    pub(super) rsp_seen: Idx<u32>,
    /// End of the published part of an unfinished packet.
    pub(super) partial: Option<Idx<u32>>,
    pub(super) fault: Option<Malformed>,
}

impl Front {
    /// Writes the header of a fresh ring (`SHARED_RING_INIT`) whose indices begin at `start`.
    pub(super) fn new(area: Area, slot_len: usize, start: u32) -> Self {
        let page = Page::new(area, slot_len).expect("our own page holds a ring");
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
        let start = Idx::<u32>::new(start);
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

    /// Slots without one of our requests (`RING_FREE_REQUESTS`).
    #[inline]
    pub(super) fn room(&self) -> u32 {
        self.page.size - self.req_prod.since(self.rsp_cons)
    }

    /// Claims the slot for the next request.
    #[inline]
    pub(super) fn request(&mut self) -> usize {
        assert!(self.room() > 0, "request without room");
        self.page.offset(self.req_prod.advance())
    }

    /// Reloads `rsp_prod`; returns the number of responses ready to be taken.
    #[inline]
    pub(super) fn refresh(&mut self) -> Result<u32, Malformed> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Front sees rsp_prod /before/ the slots it covers; pairs with the back's release of
        // rsp_prod in `publish`; loom tests `xen_*_publish_take`.
        let seen = self.page.load(RSP_PROD, Ordering::Acquire);
        // Not more than was requested, nor less than before.
        let known = self.rsp_seen.since(self.rsp_cons);
        let allowed = known..=self.req_published.since(self.rsp_cons);
        let ready = match seen.check_since(self.rsp_cons, allowed) {
            Ok(ready) => ready,
            Err(seen) => {
                let taken = self.rsp_cons.get();
                return Err(self.fail(Malformed::RspProd { seen, taken }));
            }
        };
        self.rsp_seen = self.rsp_cons.plus(ready);
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
            // `refresh`; loom tests `xen_*_publish_take`.
            self.page.area.sync_store_u32(REQ_PROD, self.req_prod.get(), Ordering::Release);
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
        // req_prod is visible /before/ we check whether the back sleeps; pairs with the fence in
        // its `arm`; loom tests `xen_*_arm_requests`.
        fence(Ordering::SeqCst);
        notify_wanted(self.page.load(REQ_EVENT, Ordering::Relaxed), new, old)
    }

    /// Requests an event at `n` more responses, limited to the number outstanding: an event for
    /// more would never come.
    #[inline]
    pub(super) fn arm(&mut self, n: u32) -> Armed {
        let from = self.partial.unwrap_or(self.rsp_cons);
        let n = n.min(self.req_published.since(from)).max(1);
        self.page.area.sync_store_u32(RSP_EVENT, from.plus(n).get(), Ordering::Relaxed);
        // The back sees our event /before/ we re-check; pairs with the fence in its
        // `notify_needed`; loom tests `xen_*_arm_responses`.
        fence(Ordering::SeqCst);
        if self.has_responses(n) { Armed::WorkPending } else { Armed::Armed }
    }

    /// Whether `n` responses are ready, or a fault.
    #[inline]
    pub(super) fn has_responses(&self, n: u32) -> bool {
        let prod = self.page.load(RSP_PROD, Ordering::Relaxed);
        let from = self.partial.unwrap_or(self.rsp_cons);
        self.fault.is_some() || prod.hint_since(from) >= n
    }
}

/// The smart-poll flag in the rx ring's page: while it is set, the front half polls and needs no
/// events. The back half sets it, the front half clears it, and each re-checks where the other
/// could have missed the change. Only valid when both sides advertised `feature-smart-poll`.
///
/// ```text
///   back:   publish, fence, was it clear? then set, fence, notify
///   front:  clear, fence, re-check both rings: sleep only if both are empty
/// ```
/// The peer can write it at any time: it decides who is notified, nothing else.
pub struct SmartPoll {
    area: Area,
}

impl SmartPoll {
    /// The flag of the rx ring in `area`. One flag serves both rings of a queue.
    pub fn new(area: Area) -> Self {
        Self { area }
    }

    /// Back half, after publishing on either ring: whether to notify the front half. If it does not
    /// poll, it is marked as polling. Replaces `notify_needed`.
    #[must_use]
    pub fn claim(&self) -> bool {
        // What we published is visible /before/ we check whether the front polls; pairs with the
        // fence in `release`; loom test `smart_poll_*`.
        fence(Ordering::SeqCst);
        if self.is_active() {
            return false;
        }
        self.set(true);
        // The flag is set /before/ the notification: set after it, it could hide that the front
        // half has stopped; loom test `canary_smart_poll_flag_set_after_notifying_is_found`.
        fence(Ordering::SeqCst);
        true
    }

    /// Front half, before it stops polling: re-enables notifications. The caller must then re-check
    /// both rings: see [`FrontRx::stop_polling`](super::FrontRx::stop_polling).
    pub(super) fn release(&self) {
        self.set(false);
        // The back sees the flag cleared /before/ we re-check; pairs with the fence in `claim`;
        // loom test `smart_poll_*`.
        fence(Ordering::SeqCst);
    }

    /// Whether the flag is set.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.area.sync_load_u8(SMARTPOLL_ACTIVE, Ordering::Relaxed) != 0
    }

    /// Writes the flag, without fence or re-check.
    #[inline]
    pub fn set(&self, active: bool) {
        self.area.sync_store_u8(SMARTPOLL_ACTIVE, u8::from(active), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same rule by iteration: was `event` among the published indices?
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
                    let (from, to) = (Idx::<u32>::new(old), Idx::<u32>::new(new));
                    assert_eq!(
                        notify_wanted(Untrusted::<Idx<u32>>::index(event), to, from),
                        notify_wanted_by_walking(event, new, old),
                        "event {event} new {new} old {old}"
                    );
                }
            }
        }
    }
}
