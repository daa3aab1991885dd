//! The guest's rx ring: frames out of the switch.

use std::sync::Arc;

use ring::xen::{Armed, BackRx, Extra, RxResponse, rx_flag, status};
use shm::{Copies, Failed, GRANT_LEN, Seg};
use switch::direct::Direct;
use switch::flow;
use switch::frame::{BURST_MAX, Burst};
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use super::hash::Steering;
use super::offload::to_rx;
use super::pages::Pages;
use super::{Wiring, fault};

/// Back half of a guest's rx ring: frames out of the switch.
pub struct XenEgress {
    active: Option<Active>,
    /// Responses that wait for the copies.
    responses: Vec<Response>,
    /// Kept for its allocation.
    copies: Copies<'static>,
    stats: Arc<EgressStats>,
}

struct Active {
    ring: BackRx,
    wiring: Wiring,
    pages: Pages,
    /// The guest's steering, if it configured one; it then gets the hash of each frame.
    steering: Option<Arc<Steering>>,
    /// Fewest pages missing for a frame since [`arm`](Egress::arm) last found room.
    short_of: Option<u32>,
    /// A notification may have arrived since the last one was consumed.
    armed: bool,
    /// There are responses since the front half was last notified.
    responses: bool,
}

/// Contents of one slot.
#[derive(Clone, Copy)]
enum Response {
    /// Data of the frame with this tag.
    Data(RxResponse, u16),
    /// An extra info, and whether another follows.
    Extra(Extra, bool),
}

/// A frame to be copied.
struct Job<'m> {
    head: &'m [u8],
    /// The segments after the head, once their first `skip` bytes are skipped.
    body: &'m [Seg<'m>],
    skip: u32,
    len: u32,
    hdr: VnetHdr,
    tag: u16,
}

/// Result for a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placed {
    Copied,
    Dropped,
    NoRoom,
}

impl From<Arc<EgressStats>> for XenEgress {
    fn from(stats: Arc<EgressStats>) -> Self {
        Self::new(stats)
    }
}

impl XenEgress {
    /// Creates an inactive queue.
    pub fn new(stats: Arc<EgressStats>) -> Self {
        Self { active: None, responses: Vec::new(), copies: Copies::new(), stats }
    }

    /// Activates it with a ring.
    pub fn activate(&mut self, ring: BackRx, wiring: Wiring) {
        assert!(self.active.is_none(), "a ring is activated once");
        let (pages, steering) = (Pages::new(&wiring), steering(&wiring));
        let active =
            Active { ring, wiring, pages, steering, short_of: None, armed: true, responses: false };
        self.active = Some(active);
    }

    /// Removes the ring. False: there was none.
    pub fn deactivate(&mut self) -> bool {
        let Some(mut active) = self.active.take() else { return false };
        active.ring.publish();
        let needed = active.ring.notify_needed();
        self.stats.calls.add(active.wiring.notify(active.responses, needed));
        true
    }

    /// Where another process continues with the ring; `None`: there is none.
    pub fn position(&mut self) -> Option<u32> {
        let ring = &mut self.active.as_mut()?.ring;
        ring.publish();
        Some(ring.position())
    }

    /// Notifies the guest of responses for which an earlier back half may not have done so.
    pub fn renotify(&mut self) {
        if let Some(active) = &mut self.active {
            let needed = active.ring.notify_needed();
            self.stats.calls.add(active.wiring.notify(true, needed));
        }
    }

    /// Releases static grants that the guest has removed.
    pub(super) fn release_grants(&mut self) {
        if let Some(active) = &mut self.active {
            active.refresh();
        }
    }

    /// Sets the flag of [`Wiring`] later.
    #[cfg(test)]
    pub(super) fn set_smart_poll(&mut self, flag: Arc<ring::xen::SmartPoll>) {
        self.active.as_mut().expect("active").wiring.smart_poll = Some(flag);
    }

    /// Whether there is a ring.
    pub fn is_up(&self) -> bool {
        self.active.is_some()
    }

    /// Completes the copies, then puts responses into the slots: ERROR for a failed frame. Returns
    /// the frames whose source failed, and those of them that were lost for nothing else, as bit
    /// sets.
    fn finish(&mut self, mut copies: Copies<'_>) -> [u64; 2] {
        let (mut unread, mut refused) = (0_u64, 0_u64);
        copies.finish(|tag, whose| match whose {
            Failed::Source => unread |= 1 << tag,
            Failed::Destination => refused |= 1 << tag,
        });
        self.copies = copies.recycle();
        let Some(active) = &mut self.active else { return [unread; 2] };
        let failed = unread | refused;
        active.responses |= !self.responses.is_empty();
        let (mut frames, mut bytes) = (0, 0);
        for response in self.responses.drain(..) {
            match response {
                // One of its slots has an invalid grant; a copy to another may have failed, too.
                Response::Data(response, tag) if response.status < 0 => {
                    refused |= 1 << tag;
                    active.ring.put(response);
                }
                Response::Extra(extra, more) => active.ring.put_extra(extra, more),
                Response::Data(response, tag) if failed & 1 << tag != 0 => {
                    active.ring.put(RxResponse { status: status::ERROR, ..response });
                }
                Response::Data(response, _) => {
                    frames += u64::from(response.flags & rx_flag::MORE_DATA == 0);
                    bytes += u64::from(response.status.unsigned_abs());
                    active.ring.put(response);
                }
            }
        }
        self.stats.frames.add(frames);
        self.stats.bytes.add(bytes);
        self.stats.drops_bad_grant.add(refused.count_ones().into());
        [unread, unread & !refused]
    }
}

impl Active {
    /// Reads changed settings of the guest.
    fn refresh(&mut self) {
        if self.pages.refresh(&self.wiring) {
            self.steering = steering(&self.wiring);
        }
    }

    /// Slots of a frame, including its extra infos.
    fn slots_for(len: u32, extras: usize) -> u32 {
        len.div_ceil(GRANT_LEN) + extras as u32
    }

    /// Whether the guest can receive such a frame at all.
    fn fits_ever(&self, len: u32, extras: usize, gso: bool) -> bool {
        let mtu = u32::from(self.wiring.vif.mtu());
        // An MTU does not include the link header (14) and tag (4).
        let short = gso || mtu == 0 || len <= mtu + 18;
        let one = self.wiring.peer.sg || len <= GRANT_LEN;
        short && one && Self::slots_for(len, extras) <= self.ring.size()
    }

    fn accepts(&self, head: &[u8], body: &[Seg<'_>]) -> bool {
        if !self.wiring.vif.is_filtering() {
            return true;
        }
        let mut mac = [0; 6];
        match flow::dst_mac(head) {
            Some(dst) => mac = dst,
            // No header was read on the path of a cross-connected frame.
            None => {
                if let Some(seg) = body.first() {
                    seg.read(&mut mac);
                }
            }
        }
        self.wiring.vif.accepts(mac)
    }
}

/// The guest's steering, if it configured one.
fn steering(wiring: &Wiring) -> Option<Arc<Steering>> {
    Some(wiring.orders.steering()).filter(|steering| steering.is_set())
}

/// What a call collects: slots of its frames, and copies to them.
struct Collected<'a, 'm> {
    pages: &'m Pages,
    copies: Copies<'m>,
    responses: &'a mut Vec<Response>,
    /// Slots known to be available; the ring is read when they do not suffice.
    ready: u32,
}

impl<'m> Collected<'_, 'm> {
    /// Places a frame into slots and adds its copies.
    fn place(
        &mut self,
        active: &mut Active,
        job: &Job<'m>,
        stats: &EgressStats,
    ) -> Result<Placed, Fault> {
        let accepts_csum = active.wiring.peer.offloads().csum;
        let (flags, gso) = to_rx(&job.hdr, accepts_csum);
        let hash = active.steering.as_ref().and_then(|steering| steering.hash(job.head));
        let extras = [gso.map(Extra::Gso), hash.map(Extra::Hash)];
        let extra_count = extras.iter().flatten().count();
        if !active.fits_ever(job.len, extra_count, gso.is_some()) {
            stats.drops_too_long.add(1);
            return Ok(Placed::Dropped);
        }
        if !active.accepts(job.head, job.body) {
            stats.drops_filtered.add(1);
            return Ok(Placed::Dropped);
        }
        let need = Active::slots_for(job.len, extra_count);
        if self.ready < need {
            self.ready = active.ring.available().map_err(fault)?;
        }
        if self.ready < need {
            active.short_of = Some(active.short_of.map_or(need, |n| n.min(need)));
            return Ok(Placed::NoRoom);
        }
        self.ready -= need;
        let flags = if extra_count > 0 { flags | rx_flag::EXTRA_INFO } else { flags };
        let is_whole = self.fill_slots(&mut active.ring, job, flags, extras);
        if !is_whole {
            fail(self.responses, job.tag);
        }
        Ok(if is_whole { Placed::Copied } else { Placed::Dropped })
    }

    /// Takes the slots of a frame, `flags` for the first; false: one of them has an invalid grant.
    #[inline]
    fn fill_slots(
        &mut self,
        ring: &mut BackRx,
        job: &Job<'m>,
        flags: u16,
        extras: [Option<Extra>; 2],
    ) -> bool {
        let mut extras = extras.into_iter().flatten().peekable();
        let mut segs = std::iter::once(Seg::of(job.head)).chain(after(job.body, job.skip));
        let mut from = Seg::EMPTY;
        let mut left = job.len;
        let mut is_whole = true;
        while left > 0 {
            let flags = if left == job.len { flags } else { 0 };
            let Some(request) = ring.take() else { break };
            let n = left.min(GRANT_LEN);
            left -= n;
            let mut to = self.pages.seg_mut(request.gref, n as u16);
            while let Some(to) = to.as_mut().filter(|to| !to.is_empty()) {
                if from.is_empty() {
                    let Some(next) = segs.next() else { break };
                    from = next;
                }
                from = from.skip(self.copies.copy(to, from, job.tag));
            }
            is_whole &= to.is_some();
            let flags = if left > 0 { flags | rx_flag::MORE_DATA } else { flags };
            let response = RxResponse { id: request.id, offset: 0, flags, status: n as i16 };
            self.responses.push(Response::Data(response, job.tag));
            while let Some(extra) = extras.next() {
                if ring.take().is_some() {
                    self.responses.push(Response::Extra(extra, extras.peek().is_some()));
                }
            }
        }
        is_whole
    }
}

/// Marks all slots of a frame as failed: one of them has an invalid grant.
fn fail(responses: &mut [Response], frame: u16) {
    for slot in responses {
        if let Response::Data(response, tag) = slot
            && *tag == frame
        {
            response.status = status::ERROR;
        }
    }
}

/// The segments without their first `skip` bytes.
fn after<'m>(body: &'m [Seg<'m>], mut skip: u32) -> impl Iterator<Item = Seg<'m>> {
    body.iter().map(move |seg| {
        let rest = seg.skip(skip);
        skip -= seg.len() - rest.len();
        rest
    })
}

impl Egress for XenEgress {
    fn offloads(&self) -> Offloads {
        self.active.as_ref().map_or(Offloads::ALL, |a| a.wiring.peer.offloads())
    }

    fn accepts_granted(&self) -> bool {
        true
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let Some(active) = &mut self.active else {
            self.stats.drops_down.add(picks.len() as u64);
            return Ok(picks.len());
        };
        self.stats.groups.add(1);
        active.refresh();
        // The destination segments borrow from it.
        let pages = active.pages.clone();
        let copies = std::mem::take(&mut self.copies).recycle();
        let responses = &mut self.responses;
        let mut collected = Collected { pages: &pages, copies, responses, ready: 0 };
        let mut done = Ok(picks.len());
        for (i, pick) in picks.iter().enumerate() {
            let frame = &burst.frames[usize::from(*pick)];
            let head = burst.head(usize::from(*pick));
            let job = Job {
                head,
                body: burst.segs(frame),
                skip: head.len() as u32,
                len: frame.len,
                hdr: frame.hdr,
                tag: *pick,
            };
            match collected.place(active, &job, &self.stats) {
                Ok(Placed::NoRoom) => {
                    self.stats.full.add(1);
                    done = Ok(i);
                    break;
                }
                Ok(_) => {}
                // Reported again at the next call; earlier frames were delivered.
                Err(_) if i > 0 => {
                    done = Ok(i);
                    break;
                }
                Err(fault) => {
                    done = Err(fault);
                    break;
                }
            }
        }
        let copies = collected.copies;
        let [unread, lost] = self.finish(copies);
        if unread != 0 {
            let of = |frames: u64| (0..BURST_MAX).filter(move |i| frames & 1 << i != 0);
            of(unread).for_each(|i| burst.mark_unreadable(i));
            of(lost).for_each(|i| burst.lose(i));
        }
        done
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        let Some(active) = &mut self.active else {
            self.stats.drops_down.add(1);
            return Ok(true);
        };
        active.refresh();
        // The destination segments borrow from it.
        let pages = active.pages.clone();
        let copies = std::mem::take(&mut self.copies).recycle();
        let len = head.len() as u32 + body.iter().map(|s| s.len()).sum::<u32>();
        let job = Job { head, body, skip: 0, len, hdr: *hdr, tag: 0 };
        let responses = &mut self.responses;
        let mut collected = Collected { pages: &pages, copies, responses, ready: 0 };
        let placed = collected.place(active, &job, &self.stats);
        let copies = collected.copies;
        self.finish(copies);
        placed.map(|placed| placed != Placed::NoRoom)
    }

    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault> {
        let Some(active) = &mut self.active else { return Ok(limit) };
        let available = active.ring.available().map_err(fault)?;
        let extras = usize::from(active.steering.is_some());
        let need = Active::slots_for(len, extras).max(1);
        if available >= active.ring.size() || !active.fits_ever(len, extras, false) {
            return Ok(limit);
        }
        let frames = usize::try_from(available / need).unwrap_or(usize::MAX);
        if frames < limit {
            // At most the size of the ring.
            let wanted = u32::try_from(limit).unwrap_or(u32::MAX).saturating_mul(need);
            let wanted = wanted.min(active.ring.size());
            active.short_of = Some(active.short_of.map_or(wanted, |n| n.min(wanted)));
        }
        Ok(frames.min(limit))
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        let steering = self.active.as_ref()?.steering.as_ref()?;
        Some(Arc::<Steering>::clone(steering))
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn flush(&mut self) {
        if let Some(active) = &mut self.active {
            active.ring.publish();
        }
    }

    fn notify(&mut self) {
        let Some(active) = &mut self.active else { return };
        let needed = active.ring.notify_needed();
        let responses = std::mem::take(&mut active.responses);
        self.stats.calls.add(active.wiring.notify(responses, needed));
    }

    fn arm(&mut self) -> bool {
        let Some(active) = &mut self.active else { return true };
        let need = active.short_of.unwrap_or(1);
        // A guest that does not send events for posted pages is polled until the frames are too
        // old.
        let notifies = active.wiring.peer.rx_notify;
        let full = notifies && !active.ring.has_room(need) && {
            if std::mem::take(&mut active.armed) {
                active.wiring.channel.ack();
            }
            active.armed = true;
            active.ring.arm(need) == Armed::Armed
        };
        if !full {
            active.short_of = None;
        }
        full
    }

    fn disarm(&mut self) {
        if let Some(active) = &mut self.active {
            active.ring.disarm();
        }
    }
}
