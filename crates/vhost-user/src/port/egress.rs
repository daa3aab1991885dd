//! Egress to a guest: its receive queue.

mod direct;

use std::sync::Arc;

use ring::virtq::{Armed, Buf, Chain, DeviceQueue, Taken};
use shm::{Copies, GuestMemory, Marks, Seg, SegMut};
use switch::account::burst::{DESCS_MAX, SEGS_MAX};
use switch::direct::Direct;
use switch::frame::{BURST_MAX, Burst, HEAD_LEN, Heads};
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use super::{Active, Format, GuestQueue, Ring, mark_written};
use crate::device::Call;

/// Receive chains kept from one burst to the next.
const CHAINS_KEPT: usize = BURST_MAX / 4;

/// Longest virtio-net header we use: with `num_buffers`.
const HDR_MAX: usize = 12;

/// `num_buffers` of 1, after `csum_offset` in the header's last word.
const ONE_BUFFER: u32 = 1 << 16;

/// Device half of a guest's receive queue: frames out of the switch.
pub struct VirtioEgress {
    ring: Ring,
    /// Receive chains taken; the first `next` of them are used. None of them is read from the ring
    /// again, even if frames do not fit.
    taken: Taken,
    next: usize,
    /// Writable bytes of the chains in `taken`, computed for frames that need several.
    rooms: Vec<u64>,
    /// Remaining limits until the next [`flush`](Egress::flush): descriptors to take, and pieces of
    /// buffers across regions. Both cost time of the sender's worker.
    left: Work,
    /// The fewest available chains with which a frame did not fit, since [`arm`](Egress::arm) last
    /// found room: of several held frames, one may fit if another does not.
    short_at: usize,
    /// Kept for its allocation.
    copies: Copies<'static>,
    stats: Arc<EgressStats>,
}

/// Limits of the work on this guest's buffers while its queue is locked for a group of frames.
#[derive(Clone, Copy)]
struct Work {
    descs: usize,
    segs: usize,
}

impl Work {
    const ALL: Self = Self { descs: DESCS_MAX, segs: SEGS_MAX };
}

/// Pending copies from granted memory, done at the end of a `put`, and their destination.
struct Batch<'m> {
    burst: &'m Burst<'m>,
    memory: &'m GuestMemory,
    copies: Copies<'m>,
}

impl Batch<'_> {
    fn finish(&mut self) {
        self.copies.finish(|pick, _| self.burst.mark_unreadable(pick.into()));
    }
}

/// Rest of a frame after its head: `segs` without their first `skip` bytes.
#[derive(Clone, Copy)]
struct Body<'m> {
    segs: &'m [Seg<'m>],
    skip: u32,
    /// Index of the frame, to report a failed copy.
    pick: u16,
}

impl From<Arc<EgressStats>> for VirtioEgress {
    fn from(stats: Arc<EgressStats>) -> Self {
        Self::new(stats)
    }
}

impl GuestQueue for VirtioEgress {
    fn ring(&self) -> &Ring {
        &self.ring
    }

    fn ring_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }

    fn activate(
        &mut self,
        queue: DeviceQueue,
        memory: Arc<GuestMemory>,
        call: Option<Call>,
        format: Format,
    ) {
        self.forget_all();
        self.left = Work::ALL;
        let mut active = Active::new(queue, memory, call, format);
        // No kicks for new buffers are needed until we run out of them.
        active.queue.disarm();
        self.ring.activate(active);
    }

    fn position(&mut self) -> Option<u32> {
        let active = self.ring.active.as_mut()?;
        active.queue.untake(&self.taken.chains[self.next..]);
        active.queue.publish();
        self.stats.calls.add(active.call());
        let base = active.queue.base();
        self.forget_all();
        Some(base)
    }
}

impl VirtioEgress {
    /// Creates an inactive queue.
    pub fn new(stats: Arc<EgressStats>) -> Self {
        Self {
            ring: Ring::default(),
            taken: Taken::bounded(BURST_MAX, DESCS_MAX),
            next: 0,
            rooms: Vec::new(),
            left: Work::ALL,
            short_at: usize::MAX,
            copies: Copies::new(),
            stats,
        }
    }

    #[inline]
    fn check_lost(&mut self) -> Result<(), Fault> {
        self.ring.active.as_mut().map_or(Ok(()), Active::check_lost)
    }

    /// Takes receive chains until `want` are available, or all there are.
    #[inline]
    fn refill(&mut self, want: usize) -> Result<(), Fault> {
        if self.taken.chains.len() - self.next >= want {
            return Ok(());
        }
        self.take().map(|_| ())
    }

    /// Takes more receive chains, if the guest added any and there is space for them, and
    /// prefetches their buffers. Returns their number; chains taken earlier are unchanged.
    fn take(&mut self) -> Result<usize, Fault> {
        let Some(active) = &mut self.ring.active else { return Ok(0) };
        let is_cut = self.next == 0 && self.taken.is_cut();
        if self.left.descs == 0 || is_cut {
            return Ok(0);
        }
        self.rooms.drain(..self.next.min(self.rooms.len()));
        self.taken.forget_first(self.next);
        self.next = 0;
        let (had, bufs) = (self.taken.chains.len(), self.taken.bufs.len());
        match active.queue.take_more(&active.memory, BURST_MAX, &mut self.taken) {
            Ok(0) => return Ok(0),
            Ok(_) => {}
            Err(malformed) => {
                active.queue.untake(&self.taken.chains);
                let fault = active.fault(malformed);
                self.forget_all();
                return Err(fault);
            }
        }
        self.left.descs = self.left.descs.saturating_sub(self.taken.bufs.len() - bufs);
        for chain in &self.taken.chains[had..] {
            if let Some(buf) = self.taken.writes(chain).first()
                && let Some(seg) = active.memory.seg_mut(buf.addr, buf.len, &mut active.hint)
            {
                seg.prefetch(active.format.hdr_len);
            }
        }
        active.queue.prefetch();
        Ok(self.taken.chains.len() - had)
    }

    /// A frame does not fit the chains at hand.
    fn record_short(&mut self) {
        self.short_at = self.short_at.min(self.taken.chains.len() - self.next);
    }

    /// Drops the chains taken and not used.
    fn forget_all(&mut self) {
        self.taken.clear();
        self.rooms.clear();
        self.next = 0;
    }

    /// Writable bytes of chain `i` of those taken, computed once.
    fn room_of(&mut self, i: usize) -> u64 {
        self.rooms.resize(self.rooms.len().max(self.next), 0);
        for chain in self.taken.chains.iter().take(i + 1).skip(self.rooms.len()) {
            self.rooms.push(direct::room(&self.taken, chain));
        }
        self.rooms[i]
    }

    /// Whether no chain can be added: the limit of chains kept, or the ring's size, is reached.
    fn has_all(&self) -> bool {
        let chains = &self.taken.chains[self.next..];
        let slots: u32 = chains.iter().map(|c| u32::from(c.slots)).sum();
        let size = self.ring.active.as_ref().map_or(0, |active| active.queue.size());
        // The next chain may have been too long only beside chains that are used by now.
        let is_cut = self.taken.is_cut() && self.next == 0;
        chains.len() == BURST_MAX || is_cut || slots >= u32::from(size)
    }

    /// Number of chains, from `next` on, for a frame of `total` bytes (header included).
    fn chains_for(&mut self, total: u32) -> Result<Fit, Fault> {
        let active = self.ring.active.as_ref().expect("callers check");
        let mergeable = active.format.mergeable;
        let mut room = 0_u64;
        let mut n = 0;
        loop {
            // A jumbo or GSO frame can need many small buffers.
            if self.next + n == self.taken.chains.len() && self.take()? == 0 {
                return Ok(if self.has_all() { Fit::Never } else { Fit::NotNow });
            }
            room += self.room_of(self.next + n);
            n += 1;
            if room >= u64::from(total) {
                return Ok(Fit::In(n));
            }
            if !mergeable || n == BURST_MAX {
                return Ok(Fit::Never);
            }
        }
    }

    /// Delivers frames while each fits one receive buffer in one region, the common case, and
    /// `ONE_SEG`: is one segment; returns their number. The first other frame, or one without a
    /// buffer, is left to [`deliver`](Self::deliver).
    #[inline(always)]
    fn put_simple<'b, const ONE_SEG: bool>(
        &mut self,
        burst: &'b Burst<'_>,
        picks: &[u16],
        head: impl Fn(usize, u32) -> &'b [u8],
    ) -> usize {
        let Self { ring, taken, next, stats, .. } = self;
        let Some(Active { queue, memory, format, hint, .. }) = &mut ring.active else { return 0 };
        // For the compiler, a store to guest memory may alias anything: what is not a local is
        // loaded again for each frame.
        let (format, frames) = (*format, &burst.frames[..]);
        let (mut bytes, mut done) = (0, 0);
        let mut totals = [0; BURST_MAX];
        for ((pick, chain), written) in picks.iter().zip(&taken.chains[*next..]).zip(&mut totals) {
            let frame = &frames[usize::from(*pick)];
            let total = frame.len + format.hdr_len;
            let (body, [buf]) = (burst.segs(frame), taken.writes(chain)) else { break };
            if ONE_SEG && body.len() != 1 {
                break;
            }
            let fits = buf.len >= total && chain.reads == 0;
            if !fits || (frame.len > format.frame_len_max && frame.hdr.gso_size == 0) {
                break;
            }
            let Some(mut to) = memory.seg_mut(buf.addr, total, hint) else { break };
            let (word, last) = header(&frame.hdr, &format);
            to.update_u64(word);
            if format.hdr_len as usize == HDR_MAX {
                to.update_u32(u32::from(last) | ONE_BUFFER);
            } else {
                to.update_u16(last);
            }
            let mut skip = to.write(head(usize::from(*pick), frame.len));
            for seg in if ONE_SEG { &body[..1] } else { body } {
                let rest = seg.skip(skip);
                skip -= seg.len() - rest.len();
                if !rest.is_empty() {
                    to.copy_from(rest);
                }
            }
            bytes += u64::from(frame.len);
            *written = total;
            done += 1;
        }
        let chains = &taken.chains[*next..][..done];
        let lens = totals[..done].iter().copied();
        if let Some(marks) = queue.marks() {
            mark_simple(marks, taken, chains, lens.clone());
        }
        queue.put_each(chains, lens);
        *next += done;
        stats.frames.add(done as u64);
        stats.bytes.add(bytes);
        done
    }

    /// The same for frames of any number of segments: out of line, as it slowed the usual loop.
    #[inline(never)]
    fn put_segs(&mut self, burst: &Burst<'_>, picks: &[u16]) -> usize {
        self.put_simple::<false>(burst, picks, |pick, _| burst.head(pick))
    }

    /// As [`put_simple`](Self::put_simple), with a loop for each kind of heads.
    #[inline(always)]
    fn put_one_segs(&mut self, burst: &Burst<'_>, picks: &[u16]) -> usize {
        match burst.all_heads() {
            Heads::None => self.put_simple::<true>(burst, picks, |_, _| &[]),
            Heads::Starts(starts) => self.put_simple::<true>(burst, picks, |pick, _| &starts[pick]),
            Heads::Whole(heads) => self.put_simple::<true>(burst, picks, |pick, len| {
                &heads[pick][..HEAD_LEN.min(len as usize)]
            }),
        }
    }

    /// As [`put`](Egress::put), for frames of which some are in granted memory.
    #[cold]
    fn put_granted(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let Some(active) = &self.ring.active else { return Ok(picks.len()) };
        let memory = Arc::clone(&active.memory);
        let copies = std::mem::take(&mut self.copies).recycle();
        let mut batch = Batch { burst, memory: &memory, copies };
        let mut done = Ok(0);
        for (i, pick) in picks.iter().enumerate() {
            match self.put_one(burst, *pick, i == 0, Some(&mut batch)) {
                Ok(true) => done = Ok(i + 1),
                Ok(false) => break,
                Err(fault) => {
                    done = Err(fault);
                    break;
                }
            }
        }
        batch.finish();
        self.copies = batch.copies.recycle();
        done
    }

    /// Delivers a frame of a burst; false: no room now. A fault is returned for the `first` frame
    /// only; for others, the next call returns it.
    fn put_one<'m>(
        &mut self,
        burst: &'m Burst<'m>,
        pick: u16,
        first: bool,
        batch: Option<&mut Batch<'m>>,
    ) -> Result<bool, Fault> {
        let frame = &burst.frames[usize::from(pick)];
        let head = burst.head(usize::from(pick));
        let body = Body { segs: burst.segs(frame), skip: head.len() as u32, pick };
        match self.deliver(head, body, frame.len, &frame.hdr, batch) {
            Ok(false) => {
                self.stats.full.add(1);
                self.record_short();
                Ok(false)
            }
            Err(_) if !first => Ok(false),
            done => done,
        }
    }

    /// Copies one frame; granted parts are added to the `batch`.
    fn deliver<'m>(
        &mut self,
        head: &[u8],
        body: Body<'m>,
        len: u32,
        hdr: &VnetHdr,
        mut batch: Option<&mut Batch<'m>>,
    ) -> Result<bool, Fault> {
        let active = self.ring.active.as_ref().expect("callers check");
        let total = len + active.format.hdr_len;
        if hdr.gso_size == 0 && len > active.format.frame_len_max {
            self.stats.drops_too_long.add(1);
            return Ok(true);
        }
        let chains = match self.chains_for(total)? {
            Fit::In(n) => n,
            Fit::NotNow => return Ok(false),
            Fit::Never => {
                self.stats.drops_too_long.add(1);
                return Ok(true);
            }
        };
        let Some(Active { queue, memory, format, hint, .. }) = &mut self.ring.active else {
            return Ok(false);
        };
        let raw = header_bytes(hdr, format, chains);
        let chains = &self.taken.chains[self.next..self.next + chains];
        self.next += chains.len();
        let end = {
            let bufs = chains.iter().flat_map(|c| self.taken.writes(c));
            let start = [&raw[..format.hdr_len as usize], head];
            let segs = &mut self.left.segs;
            match &mut batch {
                Some(Batch { memory, copies, .. }) => {
                    Room::new(memory, hint, segs, bufs).fill(start, body, copies)
                }
                None => Room::new(memory, hint, segs, bufs).fill(start, body, &mut Copies::new()),
            }
        };
        // Written before they are marked, and before a successor may publish them.
        if queue.is_kept() || queue.marks().is_some() {
            batch.into_iter().for_each(Batch::finish);
        }
        put_frame(queue, &self.taken, chains, total.into());
        if let Some(marks) = queue.marks() {
            mark_written(marks, &self.taken, chains, total.into());
        }
        match end {
            End::Whole => {
                self.stats.frames.add(1);
                self.stats.bytes.add(u64::from(len));
            }
            End::ForeignFd => self.stats.drops_bad_addr.add(1),
            End::TooManySegs => self.stats.drops_too_many_segs.add(1),
        }
        Ok(true)
    }
}

/// Uses the chains of a frame of `left` bytes with its header, all written.
fn put_frame(queue: &mut DeviceQueue, taken: &Taken, chains: &[Chain], mut left: u64) {
    let Some((last, parts)) = chains.split_last() else { return };
    for chain in parts {
        let n = left.min(direct::room(taken, chain));
        queue.put_part(chain, n as u32);
        left -= n;
    }
    queue.put(last, left as u32);
}

/// Marks the first `lens` bytes of the first buffer of each chain.
#[cold]
fn mark_simple(
    marks: &mut Marks,
    taken: &Taken,
    chains: &[Chain],
    lens: impl Iterator<Item = u32>,
) {
    for (chain, len) in chains.iter().zip(lens) {
        if let [buf, ..] = taken.writes(chain) {
            marks.mark(buf.addr, len.into());
        }
    }
}

/// The virtio-net header in this guest's format, without `num_buffers`, as [`VnetHdr::words`].
#[inline]
fn header(hdr: &VnetHdr, format: &Format) -> (u64, u16) {
    let (word, last) = hdr.words();
    //= virtio-v1.3 5.1.6.4.1: if GUEST_CSUM was not negotiated, the device MUST set flags to 0.
    (if format.takes.csum { word } else { word & !VnetHdr::FLAGS }, last)
}

/// The same with `num_buffers`, of which a guest without MRG_RXBUF has the first
/// [`hdr_len`](Format::hdr_len) bytes.
fn header_bytes(hdr: &VnetHdr, format: &Format, buffers: usize) -> [u8; HDR_MAX] {
    let (word, last) = header(hdr, format);
    let mut raw = [0_u8; HDR_MAX];
    raw[..VnetHdr::LEN].copy_from_slice(&VnetHdr::bytes_of(word, last));
    //= virtio-v1.3 5.1.6.4.1: if MRG_RXBUF has not been negotiated, the device MUST set
    //= num_buffers to 1.
    raw[VnetHdr::LEN..].copy_from_slice(&(buffers as u16).to_le_bytes());
    raw
}

/// Result of writing a frame.
#[derive(Clone, Copy)]
enum End {
    Whole,
    /// A buffer was outside memory.
    ForeignFd,
    /// Buffers were in too many regions.
    TooManySegs,
}

/// Whether a frame fits the guest's receive buffers.
enum Fit {
    /// Yes, in so many chains.
    In(usize),
    /// Not before the guest adds buffers.
    NotNow,
    /// Not with any buffers that the guest can add.
    Never,
}

/// Sequential writer to the writable bytes of some chains.
struct Room<'a, 'm, I> {
    memory: &'m GuestMemory,
    hint: &'a mut usize,
    /// Remaining limit of pieces of buffers that cross regions.
    segs: &'a mut usize,
    bufs: I,
    /// Destination of the next byte.
    seg: Option<SegMut<'m>>,
    /// Rest of the current buffer in further regions.
    rest: Option<(u64, u32)>,
    /// Reason why the frame is incomplete, if it is.
    end: End,
}

impl<'a, 'b, 'm, I: Iterator<Item = &'b Buf>> Room<'a, 'm, I> {
    #[inline]
    fn new(memory: &'m GuestMemory, hint: &'a mut usize, segs: &'a mut usize, bufs: I) -> Self {
        Self { memory, hint, segs, bufs, seg: None, rest: None, end: End::Whole }
    }

    /// Writes a frame; `start` is private memory.
    #[inline]
    fn fill(mut self, start: [&[u8]; 2], body: Body<'m>, copies: &mut Copies<'m>) -> End {
        start.iter().for_each(|bytes| self.write(bytes));
        let mut skip = body.skip;
        for seg in body.segs {
            let n = seg.len().min(skip);
            skip -= n;
            self.copy(seg.skip(n), |to, from| copies.copy(to, from, body.pick));
        }
        self.end
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.copy(Seg::of(bytes), |to, from| to.copy_from(from));
    }

    #[inline]
    fn copy<'s>(
        &mut self,
        mut from: Seg<'s>,
        mut copy: impl FnMut(&mut SegMut<'m>, Seg<'s>) -> u32,
    ) {
        while !from.is_empty() {
            let Some(to) = self.seg.as_mut().filter(|to| !to.is_empty()) else {
                if !self.next_seg() {
                    return;
                }
                continue;
            };
            let n = copy(to, from);
            from = from.skip(n);
        }
    }

    #[inline]
    fn next_seg(&mut self) -> bool {
        if !matches!(self.end, End::Whole) {
            // Bytes in a later buffer would be beyond those that are used and marked.
            return false;
        }
        let buf = match self.rest.take() {
            Some(rest) => Some(rest),
            None => self.bufs.next().map(|buf| (buf.addr, buf.len)),
        };
        let Some((addr, len)) = buf else { return false };
        self.seg = self.memory.seg_mut(addr, len, self.hint);
        if self.seg.is_none() {
            self.next_across(addr, len);
        }
        true
    }

    /// Splits a buffer across regions: its first part now, the rest next.
    #[cold]
    fn next_across(&mut self, addr: u64, len: u32) {
        let Some(left) = self.segs.checked_sub(1) else {
            self.end = End::TooManySegs;
            return;
        };
        *self.segs = left;
        let Some(n) = self.memory.span(addr, len).filter(|n| *n < len) else {
            self.end = End::ForeignFd;
            return;
        };
        self.seg = self.memory.seg_mut(addr, n, self.hint);
        self.rest = Some((addr + u64::from(n), len - n));
    }
}

impl Egress for VirtioEgress {
    fn offloads(&self) -> Offloads {
        self.ring.active.as_ref().map_or(Offloads::ALL, |a| a.format.takes)
    }

    fn accepts_granted(&self) -> bool {
        true
    }

    fn accepts_starts(&self) -> bool {
        true
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        if !self.is_up() {
            self.stats.drops_down.add(picks.len() as u64);
            return Ok(picks.len());
        }
        self.stats.groups.add(1);
        self.check_lost()?;
        self.refill(picks.len())?;
        if burst.permits_granted() {
            return self.put_granted(burst, picks);
        }
        let mut done = 0;
        while done < picks.len() {
            done += self.put_one_segs(burst, &picks[done..]);
            done += self.put_segs(burst, &picks[done..]);
            let Some(pick) = picks.get(done) else { break };
            if !self.put_one(burst, *pick, done == 0, None)? {
                return Ok(done);
            }
            done += 1;
        }
        Ok(picks.len())
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        if !self.is_up() {
            self.stats.drops_down.add(1);
            return Ok(true);
        }
        let len = head.len() as u32 + body.iter().map(|s| s.len()).sum::<u32>();
        let fits = self.deliver(head, Body { segs: body, skip: 0, pick: 0 }, len, hdr, None)?;
        if !fits {
            self.record_short();
        }
        Ok(fits)
    }

    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault> {
        if !self.is_up() {
            return Ok(limit);
        }
        self.check_lost()?;
        self.refill(BURST_MAX)?;
        let Some(Active { format, .. }) = &self.ring.active else { return Ok(limit) };
        let (hdr_len, mergeable) = (format.hdr_len, format.mergeable);
        let total = u64::from(len) + u64::from(hdr_len);
        let (mut frames, mut room) = (0, 0_u64);
        for i in self.next..self.taken.chains.len() {
            room += self.room_of(i);
            // Without MRG_RXBUF a frame must fit one chain.
            if room >= total || !mergeable {
                frames += 1;
                room = 0;
            }
        }
        if self.has_all() {
            return Ok(limit);
        }
        self.record_short();
        Ok(frames.min(limit))
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        if self.is_up() { Some(self) } else { None }
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        let Some(active) = self.ring.up() else { return };
        active.queue.publish();
        // The next burst's buffers are prefetched while other ports are served. A fault is sticky,
        // and returned when the chains are needed.
        if self.taken.chains.len() - self.next < CHAINS_KEPT {
            let _ = self.take();
        }
        self.left = Work::ALL;
    }

    fn notify(&mut self) {
        let Some(active) = &mut self.ring.active else { return };
        self.stats.calls.add(active.call());
    }

    fn arm(&mut self) -> bool {
        let Some(active) = self.ring.up() else { return true };
        // Frames that did not fit then still do not fit, unless chains were taken since.
        let at_hand = self.taken.chains.len() - self.next;
        let full = at_hand <= self.short_at && active.queue.arm() == Armed::Armed;
        if !full {
            self.short_at = usize::MAX;
        }
        full
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}
