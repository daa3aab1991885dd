//! The guest's transmit queue: frames into the switch.

use std::collections::VecDeque;
use std::sync::Arc;

use ring::virtq::{Armed, Buf, Chain, DeviceQueue, Taken};
use shm::{GuestMemory, Seg};
use switch::frame::{BURST_BYTES, BURST_MAX, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, SEGS_MAX, Verdict};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::vnet::VnetHdr;

use super::{Active, Format, Ring};
use crate::device::Call;

/// Shortest buffer of header and frame that needs no second look.
const HDR_RUNT: u32 = 12 + 14;

/// Device half of a guest's transmit queue: frames into the switch.
pub struct VirtioIngress {
    ring: Ring,
    taken: Taken,
    /// Index in `taken.chains` of each frame of the current burst that is new.
    chain_of: Vec<u16>,
    /// Chains not yet given back because one before them, or they themselves, are held.
    pending: VecDeque<Pending>,
    held: usize,
    stats: Arc<IngressStats>,
}

/// A chain that waits for its turn to be used.
struct Pending {
    chain: Chain,
    /// What is needed to show the frame again; `None` when it is done.
    held: Option<Held>,
}

struct Held {
    bufs: Vec<Buf>,
    hdr: VnetHdr,
    since_ns: u64,
}

impl From<Arc<IngressStats>> for VirtioIngress {
    fn from(stats: Arc<IngressStats>) -> Self {
        Self::new(stats)
    }
}

impl VirtioIngress {
    /// An inactive queue.
    pub fn new(stats: Arc<IngressStats>) -> Self {
        Self {
            ring: Ring::default(),
            taken: Taken::with_capacity(BURST_MAX, 1024).for_reading(),
            chain_of: Vec::with_capacity(BURST_MAX),
            pending: VecDeque::new(),
            held: 0,
            stats,
        }
    }

    /// Puts a ring to work.
    pub fn activate(
        &mut self,
        queue: DeviceQueue,
        memory: Arc<GuestMemory>,
        call: Option<Call>,
        format: Format,
    ) {
        self.taken = Taken::with_capacity(BURST_MAX, queue.size()).for_reading();
        self.ring.activate(Active::new(queue, memory, call, format));
    }

    /// Takes the ring away and returns where it stands (VRING_BASE). Held frames are given back
    /// undelivered, so that the guest gets every buffer back.
    pub fn deactivate(&mut self) -> Option<u32> {
        if let Some(active) = &mut self.ring.active {
            for p in self.pending.drain(..) {
                active.queue.put(&p.chain, 0);
                if p.held.is_some() {
                    self.stats.drops_no_room.add(1);
                }
            }
            self.held = 0;
            active.queue.publish();
            self.stats.calls.add(active.call());
        }
        self.ring.deactivate()
    }

    /// SET_VRING_ENABLE. A disabled transmit ring is not looked at.
    pub fn enable(&mut self, on: bool) {
        self.ring.enable(on);
    }

    /// Replaces the call descriptor.
    pub fn set_call(&mut self, call: Option<Call>) {
        self.ring.set_call(call);
    }

    /// Where to tell that the ring is broken.
    pub fn set_err(&mut self, err: Option<Call>) {
        self.ring.set_err(err);
    }

    /// Whether the guest has a running, enabled ring here.
    pub fn is_up(&self) -> bool {
        self.ring.is_up()
    }

    /// How many chains a burst may take beside those held. Chains that wait bound how much one
    /// guest can have open; then its ring backs up.
    #[inline]
    fn room(&self, size: u16) -> usize {
        let room = usize::from(size).saturating_sub(self.pending.len() * 2);
        room.min(BURST_MAX).saturating_sub(self.held)
    }

    /// Buffers go back in order, so a few frames for one slow receiver would in the end hold up all
    /// that this guest sends to others: then they are given up.
    #[inline]
    fn is_crowded(&self, size: u16) -> bool {
        self.pending.len() >= usize::from(size) / 2 && self.held * 2 < self.pending.len()
    }
}

/// Why a chain is no frame. The chain is given back at once.
enum Bad {
    Runt,
    TooLong,
    TooManySegs,
    Hdr,
    Addr,
}

impl Bad {
    fn count(&self, stats: &IngressStats) {
        match self {
            Self::Runt => stats.drops_runt.add(1),
            Self::TooLong => stats.drops_too_long.add(1),
            Self::TooManySegs => stats.drops_too_many_segs.add(1),
            Self::Hdr => stats.drops_bad_hdr.add(1),
            Self::Addr => stats.drops_bad_addr.add(1),
        }
    }
}

/// Appends the segments of `bufs` to `segs`; returns their number and length together.
#[inline]
fn translate<'m>(
    memory: &'m GuestMemory,
    bufs: &[Buf],
    hint: &mut usize,
    segs: &mut Vec<Seg<'m>>,
) -> Result<(usize, u64), Bad> {
    let first = segs.len();
    let mut len = 0;
    for buf in bufs {
        len += u64::from(buf.len);
        if let Some(seg) = memory.seg(buf.addr, buf.len, hint) {
            seg.prefetch();
            segs.push(seg);
        } else {
            across(memory, buf, hint, segs)?;
        }
    }
    Ok((segs.len() - first, len))
}

/// A buffer that does not lie in one region: across several, or outside.
#[cold]
fn across<'m>(
    memory: &'m GuestMemory,
    buf: &Buf,
    hint: &mut usize,
    segs: &mut Vec<Seg<'m>>,
) -> Result<(), Bad> {
    let (mut addr, mut left) = (buf.addr, buf.len);
    while left > 0 {
        let n = memory.span(addr, left).ok_or(Bad::Addr)?;
        segs.push(memory.seg(addr, n, hint).ok_or(Bad::Addr)?);
        left -= n;
        // The last step may end exactly at the top of the address space.
        addr = addr.wrapping_add(u64::from(n));
    }
    Ok(())
}

/// Takes the virtio-net header off a chain's segments and pushes the frame.
#[inline]
fn finish(
    burst: &mut Burst<'_>,
    first: usize,
    count: usize,
    len: u64,
    format: &Format,
) -> Result<(), Bad> {
    let hdr_len = format.hdr_len;
    // 14 bytes of Ethernet header are the least there is to switch on.
    if len < u64::from(hdr_len) + 14 {
        return Err(Bad::Runt);
    }
    let len = u32::try_from(len - u64::from(hdr_len)).map_err(|_| Bad::TooLong)?;
    if count > SEGS_MAX {
        return Err(Bad::TooManySegs);
    }
    let head = &mut burst.segs[first];
    let (raw, skipped) = match head.first().filter(|_| head.len() > hdr_len) {
        Some(raw) => {
            *head = head.skip(hdr_len);
            (raw, 0)
        }
        None => scattered_header(&mut burst.segs[first..], hdr_len),
    };
    let hdr = VnetHdr::parse(&raw).check(len, format.sends).map_err(|_| Bad::Hdr)?;
    let max = if hdr.is_plain() || hdr.gso_size == 0 { FRAME_LEN_MAX } else { GSO_LEN_MAX };
    if len > max {
        return Err(Bad::TooLong);
    }
    burst.push_at(first + skipped, count - skipped, len, hdr);
    Ok(())
}

/// Takes a header of `hdr_len` bytes that spans several segments (CVE-2022-2132 was one over more
/// than two) off them; returns it and how many segments it used up.
#[cold]
fn scattered_header(segs: &mut [Seg<'_>], hdr_len: u32) -> ([u8; VnetHdr::LEN], usize) {
    let mut raw = [0_u8; VnetHdr::LEN];
    let (mut read, mut left, mut used) = (0, hdr_len, 0);
    // The caller made sure that the segments are longer than a header together.
    while left > 0 {
        let seg = &mut segs[used];
        read += seg.read(&mut raw[read..]);
        let n = seg.len().min(left);
        *seg = seg.skip(n);
        left -= n;
        used += usize::from(seg.is_empty());
    }
    (raw, used)
}

impl Ingress for VirtioIngress {
    fn burst(
        &mut self,
        max: usize,
        now_ns: u64,
        scratch: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Some(active) = self.ring.up() else { return Ok(0) };
        active.check_lost()?;
        let size = active.queue.size();
        let (room, crowded) = (self.room(size), self.is_crowded(size));
        let active = self.ring.up().expect("up above");
        let mut burst: Burst<'_> = std::mem::take(scratch);
        let Active { queue, memory, format, hint, .. } = active;
        let memory: &GuestMemory = memory;

        if self.held > 0 {
            for held in self.pending.iter().filter_map(|p| p.held.as_ref()).take(BURST_MAX) {
                let held_ns = now_ns.saturating_sub(held.since_ns).max(1);
                let held_ns = if crowded { u64::MAX } else { held_ns };
                show_again(held, memory, hint, format, held_ns, &mut burst);
            }
        }
        let held = burst.frames.len();
        let most = room.min(max.saturating_sub(held));
        let taken = queue.take(memory, most, &mut self.taken);
        let taken = match taken {
            Ok(n) => n,
            Err(malformed) if held == 0 => {
                *scratch = burst.recycle();
                let active = self.ring.active.as_ref().expect("active above");
                return Err(active.fault(malformed));
            }
            // Told at the next call; first what is held.
            Err(_) => 0,
        };
        let back = if taken > 0 { give_back(queue, &mut self.taken, BURST_BYTES) } else { 0 };
        let taken = taken - back;
        if taken == 0 && held == 0 {
            *scratch = burst.recycle();
            let active = self.ring.active.as_mut().expect("active above");
            // It may be empty because its memory went away just now, and not be asked again.
            return active.check_lost().map(|()| 0);
        }

        self.chain_of.clear();
        collect(&self.taken, memory, hint, format, &mut burst, &mut self.chain_of, &self.stats);
        let (mut frames, mut bytes) = (0, 0);
        for frame in &burst.frames[held..] {
            frames += 1;
            bytes += u64::from(frame.len);
        }
        let shown = burst.frames.len();
        if shown > 0 {
            forward(&mut burst);
        }
        if self.pending.is_empty() && burst.frames.iter().all(|f| f.verdict == Verdict::Done) {
            queue.put_all(&self.taken.chains);
        } else {
            self.held =
                settle(&burst, held, now_ns, &self.taken, &self.chain_of, &mut self.pending);
            self.stats.holds.add(self.held as u64);
            while let Some(done) = self.pending.pop_front_if(|p| p.held.is_none()) {
                queue.put(&done.chain, 0);
            }
        }
        queue.publish();
        *scratch = burst.recycle();
        self.stats.frames.add(frames);
        self.stats.bytes.add(bytes);
        self.stats.bursts.add(1);
        self.stats.calls.add(self.ring.active.as_mut().map_or(0, Active::call));
        Ok(if back > 0 { max.max(shown) } else { shown.max(taken) })
    }

    fn held(&self) -> usize {
        self.held
    }

    fn arm(&mut self) -> bool {
        let Some(size) = self.ring.up().map(|active| active.queue.size()) else { return true };
        // Held frames keep more from being taken. That they go wakes us; then we look again.
        if self.held > 0 && self.room(size) == 0 && !self.is_crowded(size) {
            return true;
        }
        self.ring.up().is_none_or(|active| active.queue.arm() == Armed::Armed)
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// Leaves the chains beyond `most` bytes, but for the first, for the next burst; returns how many.
#[inline]
fn give_back(queue: &mut DeviceQueue, taken: &mut Taken, most: u64) -> usize {
    let all: u64 = taken.bufs.iter().map(|buf| u64::from(buf.len)).sum();
    if all <= most {
        return 0;
    }
    let mut bytes = 0_u64;
    let fits = taken.chains.iter().take_while(|chain| {
        bytes += taken.reads(chain).iter().map(|buf| u64::from(buf.len)).sum::<u64>();
        bytes <= most
    });
    let keep = fits.count().max(1).min(taken.chains.len());
    let back = taken.chains.len() - keep;
    queue.untake(&taken.chains[keep..]);
    taken.chains.truncate(keep);
    back
}

/// Makes frames of the chains taken. A chain that is none is counted, and has no frame.
#[inline]
fn collect<'m>(
    taken: &Taken,
    memory: &'m GuestMemory,
    hint: &mut usize,
    format: &Format,
    burst: &mut Burst<'m>,
    chain_of: &mut Vec<u16>,
    stats: &IngressStats,
) {
    // Two passes, so that the first bytes of all frames are on their way before any is read.
    let mut parts = [(0_u32, 0_u32, 0_u64); BURST_MAX];
    let mut bad = 0_u64;
    for (i, (chain, part)) in taken.chains.iter().zip(&mut parts).enumerate() {
        let first = burst.segs.len();
        let bufs = taken.reads(chain);
        // Nearly every frame lies in one buffer, of the region that served last.
        if let [buf] = bufs
            && let Some(seg) = memory.seg(buf.addr, buf.len, hint)
        {
            seg.prefetch();
            burst.segs.push(seg);
            *part = (first as u32, 1, u64::from(buf.len));
            continue;
        }
        match translate(memory, bufs, hint, &mut burst.segs) {
            Ok((count, len)) => *part = (first as u32, count as u32, len),
            Err(why) => {
                why.count(stats);
                bad |= 1 << i;
            }
        }
    }
    for (i, &(first, count, len)) in parts[..taken.chains.len()].iter().enumerate() {
        if bad & 1 << i != 0 {
            continue;
        }
        // Nearly every frame asks for nothing: a header of zeroes. (Of empty buffers outside memory
        // no segment is made.)
        if count == 1
            && let seg = &mut burst.segs[first as usize]
            && seg.first() == Some([0; VnetHdr::LEN])
            && (HDR_RUNT..=FRAME_LEN_MAX).contains(&seg.len())
        {
            *seg = seg.skip(format.hdr_len);
            let len = seg.len();
            burst.push_at(first as usize, 1, len, VnetHdr::NONE);
            chain_of.push(i as u16);
            continue;
        }
        match finish(burst, first as usize, count as usize, len, format) {
            Ok(()) => chain_of.push(i as u16),
            Err(why) => why.count(stats),
        }
    }
}

/// Shows a held frame again. Its buffers are looked up anew: the memory table may have changed.
fn show_again<'m>(
    held: &Held,
    memory: &'m GuestMemory,
    hint: &mut usize,
    format: &Format,
    held_ns: u64,
    burst: &mut Burst<'m>,
) {
    let first = burst.segs.len();
    let Ok((count, len)) = translate(memory, &held.bufs, hint, &mut burst.segs) else {
        // Memory was taken away: an empty frame keeps the order and is dropped by the switch.
        burst.push_at(first, 0, 0, VnetHdr::NONE);
        return;
    };
    let (mut skip, mut at) = (format.hdr_len, first);
    while skip > 0 {
        let n = burst.segs[at].len().min(skip);
        burst.segs[at] = burst.segs[at].skip(n);
        skip -= n;
        at += usize::from(burst.segs[at].is_empty());
    }
    // The header was checked when the frame was first seen; the guest's copy is not read again.
    burst.push_at(at, first + count - at, (len - u64::from(format.hdr_len)) as u32, held.hdr);
    let frame = burst.frames.last_mut().expect("just pushed");
    frame.held_ns = held_ns;
}

/// Books the verdicts of a burst with held frames, old or new; returns how many are held now.
fn settle(
    burst: &Burst<'_>,
    held: usize,
    now_ns: u64,
    taken: &Taken,
    chain_of: &[u16],
    pending: &mut VecDeque<Pending>,
) -> usize {
    let (old, new) = burst.frames.split_at(held);
    for (p, frame) in pending.iter_mut().filter(|p| p.held.is_some()).zip(old) {
        if frame.verdict == Verdict::Done {
            p.held = None;
        }
    }
    let mut new = new.iter().zip(chain_of).peekable();
    for (i, chain) in taken.chains.iter().enumerate() {
        let frame = new.next_if(|(_, of)| usize::from(**of) == i).map(|(frame, _)| frame);
        let held = frame.filter(|f| f.verdict == Verdict::Hold).map(|f| Held {
            bufs: taken.reads(chain).to_vec(),
            hdr: f.hdr,
            since_ns: now_ns,
        });
        pending.push_back(Pending { chain: *chain, held });
    }
    pending.iter().filter(|p| p.held.is_some()).count()
}
