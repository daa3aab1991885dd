//! The guest's tx ring: frames into the switch.

use std::sync::Arc;

use ring::xen::{Armed, BackTx, Gso, Multicast, Packet, Refusal, TxPacket, TxSlot, status};
use shm::Private;
use switch::direct::Direct;
use switch::frame::{BURST_BYTES, BURST_MAX, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, HEAD_LEN};
use switch::offload::put_partial;
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::{Instant, Ns};
use switch::vnet::VnetHdr;

use super::offload::{from_tx, lacks_partial, needs_head};
use super::pages::Pages;
use super::{Wiring, fault};

/// Maximum time to wait for the rest of a packet. Front halves publish complete packets; one
/// that does not blocks later packets, so the wait is limited.
const PARTIAL_MAX: Ns = Ns::from_secs(10);
/// After this many bursts to receivers without grants, the next one is assumed to be such, too.
const FETCH_AFTER: u8 = 4;
/// Space for the heads of a burst's frames: whole pages.
const HEADS_LEN: usize = BURST_MAX * HEAD_LEN;
/// Space for a burst's frames, which ends with the frame that exceeds `BURST_BYTES`, and a page
/// less a byte for each, to align pages with pages.
const FRAMES_LEN: usize = BURST_BYTES as usize + GSO_LEN_MAX as usize + BURST_MAX * 4095;

/// Back half of a guest's tx ring: frames into the switch.
pub struct XenIngress {
    pub(super) active: Option<Active>,
    packet: TxPacket,
    /// Packets of the current burst.
    taken: Vec<Taken>,
    /// Memory for heads, and for frames to receivers that cannot copy from the guest's pages.
    arena: Private,
    /// Number of consecutive bursts with all frames copied there; from a threshold on, this is done
    /// at once.
    fetched: u8,
    stats: Arc<IngressStats>,
}

pub(super) struct Active {
    ring: BackTx,
    pub(super) wiring: Wiring,
    pages: Pages,
    /// Time since which a packet's rest is missing.
    partial: Option<Instant>,
    /// Until this time the rate limit keeps a packet from being taken; there is no event.
    limited: Option<Instant>,
    /// A notification may have arrived since the last one was consumed.
    armed: bool,
}

/// A packet taken in this burst.
struct Taken {
    /// Status of its response, if it has no frame.
    status: i16,
    frame: Option<usize>,
    /// Why it has no frame; counted once it is certain that it stays in the burst.
    bad: Option<Bad>,
    /// Bytes charged to the rate of the vif.
    charged: u16,
    flags: u16,
    gso: Option<Gso>,
}

/// Reason that a packet has no frame.
#[derive(Clone, Copy)]
enum Bad {
    Refused(Refusal),
    Down,
    TooLong,
    /// And the frame's length, in bytes.
    Grant(u16),
}

impl From<Arc<IngressStats>> for XenIngress {
    fn from(stats: Arc<IngressStats>) -> Self {
        Self::new(stats)
    }
}

impl XenIngress {
    /// Creates an inactive queue.
    pub fn new(stats: Arc<IngressStats>) -> Self {
        Self {
            active: None,
            packet: TxPacket::new(),
            taken: Vec::with_capacity(BURST_MAX),
            arena: Private::default(),
            fetched: 0,
            stats,
        }
    }

    /// Length of the private memory that it needs, in bytes.
    pub const ARENA_LEN: usize = HEADS_LEN + FRAMES_LEN;

    /// Activates it with a ring, which may contain packets without an event. `arena`: private
    /// memory of [`ARENA_LEN`](Self::ARENA_LEN) for frames that must be parsed, or whose receivers
    /// cannot copy from the guest's pages. With less, such frames are dropped.
    pub fn activate(&mut self, ring: BackTx, wiring: Wiring, arena: Private) {
        assert!(self.active.is_none(), "a ring is activated once");
        self.arena = arena;
        let pages = Pages::new(&wiring);
        let (partial, limited) = (None, None);
        let active = Active { ring, wiring, pages, partial, limited, armed: true };
        self.active = Some(active);
    }

    /// Removes the ring; all taken packets have responses. False: there was none.
    pub fn deactivate(&mut self) -> bool {
        self.arena = Private::default();
        self.active.take().is_some()
    }

    /// Where another process continues with the ring; `None`: there is none.
    pub fn position(&self) -> Option<u32> {
        Some(self.active.as_ref()?.ring.position())
    }

    /// Notifies the guest of responses for which an earlier back half may not have done so.
    pub fn renotify(&mut self) {
        if let Some(Active { ring, wiring, .. }) = &mut self.active {
            let needed = ring.notify_needed();
            self.stats.calls.add(wiring.notify(true, needed));
        }
    }

    /// Releases static grants that the guest has removed.
    pub(super) fn release_grants(&mut self) {
        if let Some(active) = &mut self.active {
            active.pages.refresh(&active.wiring);
        }
    }

    /// Whether there is a ring.
    pub fn is_up(&self) -> bool {
        self.active.is_some()
    }
}

/// The packets of a burst, and their ring.
struct Packets<'a> {
    ring: &'a mut BackTx,
    wiring: &'a Wiring,
    limited: &'a mut Option<Instant>,
    packet: &'a mut TxPacket,
    taken: &'a mut Vec<Taken>,
}

impl Packets<'_> {
    /// Takes packets and pushes their frames. Returns whether the burst is full by bytes.
    fn collect<'m>(
        &mut self,
        pages: &'m Pages,
        most: usize,
        burst: &mut Burst<'m>,
        now: Instant,
    ) -> Result<bool, Fault> {
        let Self { ring, wiring, limited, packet, taken } = self;
        let mut bytes = 0;
        while taken.len() < most {
            if bytes > BURST_BYTES {
                return Ok(true);
            }
            let Some(kind) = ring.take(packet).map_err(fault)? else { break };
            if matches!(kind, Packet::Frame)
                && let Err(due) = wiring.vif.charge(packet.len, now)
            {
                ring.untake(1);
                **limited = Some(due);
                break;
            }
            let mut new = Taken {
                status: status::OKAY,
                frame: None,
                bad: None,
                charged: if matches!(kind, Packet::Frame) { packet.len } else { 0 },
                flags: packet.flags,
                gso: packet.gso,
            };
            match kind {
                Packet::Multicast(change) => {
                    new.status = change_multicast(wiring, change);
                }
                Packet::Refused(why) => {
                    new.bad = Some(Bad::Refused(why));
                    new.status = status::ERROR;
                }
                Packet::Frame if !wiring.vif.has_link() => new.bad = Some(Bad::Down),
                Packet::Frame if packet.gso.is_none() && u32::from(packet.len) > FRAME_LEN_MAX => {
                    new.bad = Some(Bad::TooLong);
                    new.status = status::ERROR;
                }
                Packet::Frame => {
                    if push(burst, pages, packet.slots(), packet.len.into(), VnetHdr::NONE) {
                        new.frame = Some(burst.frames.len() - 1);
                        bytes += u64::from(packet.len);
                    } else {
                        new.bad = Some(Bad::Grant(packet.len));
                        new.status = status::ERROR;
                    }
                }
            }
            taken.push(new);
        }
        Ok(false)
    }

    /// Returns packets to the ring whose frames are not among the first `end`; the next burst takes
    /// them again.
    #[cold]
    fn put_back(&mut self, end: usize) {
        let is_left = |new: &Taken| new.frame.is_some_and(|i| i >= end);
        let Some(first) = self.taken.iter().position(is_left) else { return };
        self.ring.untake(self.taken.len() - first);
        // Also of those without a frame: the next burst charges them again.
        self.taken.drain(first..).for_each(|new| self.wiring.vif.refund(new.charged));
        *self.limited = None;
    }

    /// Puts the responses of the packets, in order.
    fn respond(&mut self, burst: &Burst<'_>, stats: &IngressStats) {
        let failed = |i: usize| if burst.is_excluded(i) { status::ERROR } else { status::OKAY };
        let statuses = self.taken.iter().map(|new| new.frame.map_or(new.status, failed));
        statuses.for_each(|status| self.ring.put(status));
        self.ring.publish();
        let needed = self.ring.notify_needed();
        stats.calls.add(self.wiring.notify(true, needed));
    }
}

/// Pushes a frame from `slots`; false: one of them has an invalid grant reference.
fn push<'m>(
    burst: &mut Burst<'m>,
    pages: &'m Pages,
    slots: &[TxSlot],
    len: u32,
    hdr: VnetHdr,
) -> bool {
    let first = burst.segs.len();
    for slot in slots {
        let Some(seg) = pages.seg(slot.gref, slot.offset, slot.len) else {
            burst.segs.truncate(first);
            return false;
        };
        burst.segs.push(seg);
    }
    burst.push_at(first, slots.len(), len, hdr);
    true
}

fn change_multicast(wiring: &Wiring, change: Multicast) -> i16 {
    match change {
        Multicast::Add(mac) if !wiring.vif.add_multicast(mac) => return status::ERROR,
        Multicast::Add(_) => {}
        Multicast::Del(mac) => wiring.vif.del_multicast(mac),
    }
    status::OKAY
}

/// Counts packets without a frame, after unprocessed packets were returned to the ring.
fn count_bad(burst: &Burst<'_>, taken: &[Taken], stats: &IngressStats) {
    for bad in taken.iter().filter_map(|new| new.bad) {
        match bad {
            Bad::Refused(Refusal::Slots) => stats.drops_too_many_segs.add(1),
            Bad::Refused(Refusal::Extras) => stats.drops_bad_hdr.add(1),
            Bad::Refused(Refusal::Size) | Bad::TooLong => stats.drops_too_long.add(1),
            Bad::Refused(Refusal::Short) => stats.drops_runt.add(1),
            Bad::Down => stats.drops_down.add(1),
            // Taken, as one whose grants turn out to be invalid later.
            Bad::Grant(len) => {
                stats.frames.add(1);
                stats.bytes.add(len.into());
                stats.drops_bad_grant.add(1);
            }
        }
    }
    if burst.any_excluded() {
        let refused = (0..burst.frames.len()).filter(|i| burst.is_refused(*i));
        stats.drops_bad_hdr.add(refused.count() as u64);
    }
}

/// Sets the headers of new frames from their flags. Frames with invalid flags are refused.
fn set_headers(burst: &mut Burst<'_>, taken: &[Taken]) {
    if !taken.iter().any(|t| t.frame.is_some() && needs_head(t.flags, t.gso)) {
        for new in taken {
            if let Some(i) = new.frame
                && let Some(hdr) = from_tx(new.flags, None, &[], 0)
            {
                burst.set_hdr(i, hdr);
            }
        }
        return;
    }
    burst.snapshot();
    for new in taken {
        let Some(i) = new.frame.filter(|i| !burst.is_excluded(*i)) else { continue };
        match from_tx(new.flags, new.gso, burst.head(i), burst.frames[i].len) {
            Some(hdr) => burst.set_hdr(i, hdr),
            None => {
                burst.refuse(i);
                continue;
            }
        }
        if lacks_partial(new.flags, new.gso) {
            add_partial_csum(burst, i);
        }
    }
}

/// Adds the missing partial checksum of frame `i` to its private head, or refuses the frame.
fn add_partial_csum(burst: &mut Burst<'_>, i: usize) {
    burst.snapshot();
    let len = burst.frames[i].len;
    if !burst.is_excluded(i) && !put_partial(burst.head_mut(i), len) {
        burst.refuse(i);
    }
}

impl Ingress for XenIngress {
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        scratch: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Self { active, packet, taken, arena, fetched, stats, .. } = self;
        let Some(active) = active else { return Ok(0) };
        let Active { ring, wiring, pages, limited, partial, .. } = &mut *active;
        pages.refresh(wiring);
        let mut burst: Burst<'_> = std::mem::take(scratch);
        let heads = HEADS_LEN.min(arena.len());
        let (heads, arena) = arena.split_at_mut(heads);
        burst.permit_granted(heads.as_chunks_mut().0, arena);

        taken.clear();
        *limited = None;
        let mut packets = Packets { ring, wiring, limited, packet, taken };
        let mut more = match packets.collect(pages, max.min(BURST_MAX), &mut burst, now) {
            Ok(cut) => cut,
            Err(fault) if packets.taken.is_empty() => {
                *scratch = burst.recycle();
                return Err(fault);
            }
            // Reported at the next call, after earlier packets.
            Err(_) => false,
        };
        if packets.taken.is_empty() {
            *scratch = burst.recycle();
            return active.check_partial(now).map(|()| 0);
        }
        // Progress was made: an incomplete packet now is a later one.
        *partial = None;

        // One hypercall instead of two if the heads alone are not enough. Wrong for one burst when
        // the guest switches to another receiver: that burst is copied twice.
        if *fetched >= FETCH_AFTER {
            burst.fetch_ahead();
        }
        set_headers(&mut burst, packets.taken);
        if !burst.frames.is_empty() {
            forward(&mut burst);
            *fetched = if burst.all_fetched() { fetched.saturating_add(1) } else { 0 };
        }
        let end = burst.frames.len() - burst.left();
        if burst.left() > 0 {
            packets.put_back(end);
            more = true;
        }
        count_bad(&burst, packets.taken, stats);
        packets.respond(&burst, stats);
        // Refused ones are no frames taken, as they were not for a ring that refuses them earlier.
        let taken = burst.frames[..end].iter().enumerate().filter(|(i, _)| !burst.is_refused(*i));
        let (mut frames, mut bytes) = (0, 0);
        for (_, frame) in taken {
            frames += 1;
            bytes += u64::from(frame.len);
        }
        stats.frames.add(frames);
        stats.bytes.add(bytes);
        stats.bursts.add(1);
        *scratch = burst.recycle();
        let taken = packets.taken.len();
        // There may be no empty burst: the ring is armed beyond an incomplete packet.
        self.active.as_mut().map_or(Ok(()), |active| active.check_partial(now))?;
        Ok(if more { max.max(taken) } else { taken })
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        self.active.as_mut().is_none_or(Active::arm)
    }

    fn due(&self) -> Option<Instant> {
        let active = self.active.as_ref()?;
        // There is no event for a missing rest: it is checked after its time.
        let late = active.partial.map(|since| since + PARTIAL_MAX);
        active.limited.into_iter().chain(late).min()
    }

    fn disarm(&mut self) {
        if let Some(active) = &mut self.active {
            active.ring.disarm();
        }
    }
}

impl Active {
    fn arm(&mut self) -> bool {
        // Packets are not taken until then.
        if self.limited.is_some() {
            return true;
        }
        // Before the re-check: later events are delivered again.
        if std::mem::take(&mut self.armed) {
            self.wiring.channel.ack();
        }
        self.armed = true;
        self.ring.arm() == Armed::Armed
    }

    /// Returns an error if a packet's rest has been missing for too long.
    fn check_partial(&mut self, now: Instant) -> Result<(), Fault> {
        if !self.ring.is_partial() {
            self.partial = None;
            return Ok(());
        }
        let since = *self.partial.get_or_insert(now);
        if now - since >= PARTIAL_MAX {
            return Err(Fault("a packet's last slots were not published in time".into()));
        }
        Ok(())
    }
}
