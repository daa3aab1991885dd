//! The two directions of a virtio-net queue pair as ports of the switch (virtio 1.3, 5.1.6).
//!
//! [`VirtioIngress`] is the device half of the guest's transmit queue, [`VirtioEgress`] that of
//! its receive queue. Frames are taken where they lie in the guest's memory; the one copy is made
//! by the receiving port, straight from the sender's segments.
//!
//! Both stay in place while the guest comes and goes: they are *activated* with a ring and
//! *deactivated* again under their lock, by the control thread, between two bursts.

use std::collections::VecDeque;
use std::sync::Arc;

use ring::virtq::{Armed, Buf, Chain, DeviceQueue, Malformed, Taken};
use shm::{GuestMemory, Seg, SegMut};
use switch::frame::{BURST_MAX, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, SEGS_MAX, Verdict};
use switch::port::{Egress, Fault, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::vnet::{Offloads, VnetHdr};

use crate::device::Call;

/// Receive chains kept at hand between bursts.
const LOOK_AHEAD: usize = BURST_MAX / 4;

/// Longest virtio-net header we use: with `num_buffers`.
const HDR_MAX: usize = 12;

/// `num_buffers` of 1, behind `csum_offset` in the header's last word.
const ONE_BUFFER: u32 = 1 << 16;

/// How frames look on the rings of one guest, from the negotiated features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Length of the virtio-net header: 12, or 10 for a legacy guest without MRG_RXBUF.
    pub hdr_len: u32,
    /// MRG_RXBUF: a frame may fill several receive buffers.
    pub mergeable: bool,
    /// What the guest may ask of us (CSUM, HOST_*).
    pub sends: Offloads,
    /// What the guest takes (GUEST_*).
    pub takes: Offloads,
    /// Longest frame the guest takes without GSO, link header and tag included.
    pub frame_len_max: u32,
}

/// Why a port stops whose memory went away.
const LOST: &str = "front end truncated its memory";

/// An activated ring.
struct Active {
    queue: DeviceQueue,
    memory: Arc<GuestMemory>,
    call: Option<Call>,
    /// How the front-end hears that the ring is broken (SET_VRING_ERR).
    err: Option<Call>,
    format: Format,
    /// The memory region that served last.
    hint: usize,
    /// Mappings lost in the whole process when we last looked for one of ours.
    lost_seen: usize,
}

impl Active {
    fn new(
        queue: DeviceQueue,
        memory: Arc<GuestMemory>,
        call: Option<Call>,
        format: Format,
    ) -> Self {
        Self { queue, memory, call, err: None, format, hint: 0, lost_seen: 0 }
    }

    /// An empty ring may be one whose memory went away. One load unless some port lost memory.
    #[inline]
    fn check_lost(&mut self) -> Result<(), Fault> {
        let lost = shm::mappings_lost();
        if lost != self.lost_seen {
            self.lost_seen = lost;
            if self.memory.is_lost() {
                return Err(self.broken(LOST.into()));
            }
        }
        Ok(())
    }

    fn fault(&self, malformed: Malformed) -> Fault {
        // A ring in memory that went away reads as zeroes, which may look like anything.
        if self.memory.is_lost() {
            return self.broken(LOST.into());
        }
        self.broken(malformed.to_string())
    }

    fn broken(&self, why: String) -> Fault {
        self.err.iter().for_each(Call::signal);
        Fault(why)
    }

    /// Calls the guest if it wants that; returns how many calls were made.
    fn call(&mut self) -> u64 {
        if !self.queue.call_needed() {
            return 0;
        }
        let Some(call) = &self.call else { return 0 };
        call.signal();
        1
    }
}

/// Device half of a guest's transmit queue: frames into the switch.
pub struct VirtioIngress {
    active: Option<Active>,
    enabled: bool,
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

impl VirtioIngress {
    /// An inactive queue.
    pub fn new(stats: Arc<IngressStats>) -> Self {
        Self {
            active: None,
            enabled: false,
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
        assert!(self.active.is_none(), "a ring is activated once");
        self.taken = Taken::with_capacity(BURST_MAX, queue.size()).for_reading();
        self.active = Some(Active::new(queue, memory, call, format));
    }

    /// Takes the ring away and returns where it stands (VRING_BASE). Held frames are given back
    /// undelivered, so that the guest gets every buffer back.
    pub fn deactivate(&mut self) -> Option<u32> {
        if let Some(active) = &mut self.active {
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
        self.active.take().map(|a| a.queue.base())
    }

    /// SET_VRING_ENABLE. A disabled transmit ring is not looked at.
    pub fn enable(&mut self, on: bool) {
        self.enabled = on;
    }

    /// Replaces the call descriptor.
    pub fn set_call(&mut self, call: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.call = call;
            // The guest may have missed calls while there was no descriptor.
            active.call.iter().for_each(Call::signal);
        }
    }

    /// Where to tell that the ring is broken.
    pub fn set_err(&mut self, err: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.err = err;
        }
    }

    /// Whether the guest has a running, enabled ring here.
    pub fn is_up(&self) -> bool {
        self.enabled && self.active.is_some()
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
        let Some(active) = self.active.as_mut().filter(|_| self.enabled) else { return Ok(0) };
        let mut burst: Burst<'_> = std::mem::take(scratch);
        let Active { queue, memory, format, hint, .. } = active;
        let memory: &GuestMemory = memory;

        if self.held > 0 {
            for held in self.pending.iter().filter_map(|p| p.held.as_ref()) {
                show_again(held, memory, hint, format, now_ns, &mut burst);
            }
        }
        let held = burst.frames.len();
        // Chains that wait bound how much one guest can have open; then its ring backs up.
        let room = usize::from(queue.size()).saturating_sub(self.pending.len() * 2);
        let max = max.min(room).saturating_sub(held).min(BURST_MAX);
        let taken = queue.take(memory, max, &mut self.taken);
        let taken = match taken {
            Ok(n) => n,
            Err(malformed) if held == 0 => {
                *scratch = burst.recycle();
                let active = self.active.as_ref().expect("active above");
                return Err(active.fault(malformed));
            }
            // Told at the next call; first what is held.
            Err(_) => 0,
        };
        if taken == 0 && held == 0 {
            *scratch = burst.recycle();
            let active = self.active.as_mut().expect("active above");
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
            for chain in &self.taken.chains {
                queue.put(chain, 0);
            }
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
        self.stats.calls.add(self.active.as_mut().map_or(0, Active::call));
        Ok(shown.max(taken))
    }

    fn held(&self) -> usize {
        self.held
    }

    fn arm(&mut self) -> bool {
        let Some(active) = self.active.as_mut().filter(|_| self.enabled) else { return true };
        active.queue.arm() == Armed::Armed
    }

    fn disarm(&mut self) {
        if let Some(active) = &mut self.active {
            active.queue.disarm();
        }
    }
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
    now_ns: u64,
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
    frame.held_ns = now_ns.saturating_sub(held.since_ns).max(1);
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
    let mut still = 0;
    let (old, new) = burst.frames.split_at(held);
    for (p, frame) in pending.iter_mut().filter(|p| p.held.is_some()).zip(old) {
        match frame.verdict {
            Verdict::Done => p.held = None,
            Verdict::Hold => still += 1,
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
        still += usize::from(held.is_some());
        pending.push_back(Pending { chain: *chain, held });
    }
    still
}

/// Device half of a guest's receive queue: frames out of the switch.
pub struct VirtioEgress {
    active: Option<Active>,
    enabled: bool,
    /// Receive chains taken and not yet used; the first `next` of them are used.
    taken: Taken,
    next: usize,
    /// How many chains were at hand when a frame last did not fit.
    short_at: usize,
    stats: Arc<EgressStats>,
}

impl VirtioEgress {
    /// An inactive queue.
    pub fn new(stats: Arc<EgressStats>) -> Self {
        Self {
            active: None,
            enabled: false,
            taken: Taken::with_capacity(BURST_MAX, 1024),
            next: 0,
            short_at: 0,
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
        assert!(self.active.is_none(), "a ring is activated once");
        self.taken = Taken::with_capacity(BURST_MAX, queue.size());
        self.next = 0;
        let mut active = Active::new(queue, memory, call, format);
        // The guest need not say when it adds buffers until we run out of them.
        active.queue.disarm();
        self.active = Some(active);
    }

    /// Takes the ring away and returns where it stands (VRING_BASE).
    pub fn deactivate(&mut self) -> Option<u32> {
        let active = self.active.as_mut()?;
        active.queue.untake(&self.taken.chains[self.next..]);
        self.taken.chains.clear();
        self.next = 0;
        active.queue.publish();
        self.stats.calls.add(active.call());
        self.active.take().map(|a| a.queue.base())
    }

    /// SET_VRING_ENABLE. Frames for a disabled receive ring are dropped and counted.
    pub fn enable(&mut self, on: bool) {
        self.enabled = on;
    }

    /// Replaces the call descriptor.
    pub fn set_call(&mut self, call: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.call = call;
            active.call.iter().for_each(Call::signal);
        }
    }

    /// Where to tell that the ring is broken.
    pub fn set_err(&mut self, err: Option<Call>) {
        if let Some(active) = &mut self.active {
            active.err = err;
        }
    }

    /// Whether the guest has a running, enabled ring here.
    pub fn is_up(&self) -> bool {
        self.enabled && self.active.is_some()
    }

    /// Has at least `want` receive chains at hand, or all there are.
    #[inline]
    fn refill(&mut self, want: usize) -> Result<(), Fault> {
        if self.taken.chains.len() - self.next >= want {
            return Ok(());
        }
        self.take()
    }

    /// Takes receive chains afresh, those at hand included, and has the CPU fetch their buffers.
    fn take(&mut self) -> Result<(), Fault> {
        let Some(active) = &mut self.active else { return Ok(()) };
        active.queue.untake(&self.taken.chains[self.next..]);
        self.next = 0;
        let got = active.queue.take(&active.memory, BURST_MAX, &mut self.taken);
        if let Err(malformed) = got {
            self.taken.chains.clear();
            return Err(active.fault(malformed));
        }
        for chain in &self.taken.chains {
            if let Some(buf) = self.taken.writes(chain).first()
                && let Some(seg) = active.memory.seg_mut(buf.addr, buf.len, &mut active.hint)
            {
                seg.prefetch();
            }
        }
        Ok(())
    }

    /// How many chains, from `next` on, a frame of `total` bytes (header included) fills.
    fn chains_for(&mut self, total: u32) -> Result<Fit, Fault> {
        let active = self.active.as_ref().expect("callers check");
        let (mergeable, size) = (active.format.mergeable, active.queue.size());
        let mut room = 0_u64;
        let mut n = 0;
        loop {
            if self.next + n == self.taken.chains.len() {
                let had = n;
                // A jumbo or GSO frame can need many small buffers.
                self.take()?;
                let chains = &self.taken.chains[self.next..];
                if chains.len() <= had {
                    let slots: u32 = chains.iter().map(|c| u32::from(c.slots)).sum();
                    let all = slots >= u32::from(size);
                    return Ok(if all { Fit::Never } else { Fit::NotNow });
                }
                // What was at hand was read again, and may have changed: it is counted again.
                (n, room) = (0, 0);
            }
            let chain = &self.taken.chains[self.next + n];
            room += self.taken.writes(chain).iter().map(|b| u64::from(b.len)).sum::<u64>();
            n += 1;
            if room >= u64::from(total) {
                return Ok(Fit::In(n));
            }
            if !mergeable {
                return Ok(Fit::Never);
            }
            if n == BURST_MAX {
                return Ok(Fit::Never);
            }
        }
    }

    /// Delivers frames as long as each lies in one segment and fits one receive buffer of one
    /// region, which nearly all do; returns how many. The first that is otherwise, or finds no
    /// buffer at hand, is left to [`deliver`](Self::deliver).
    fn put_simple(&mut self, burst: &Burst<'_>, picks: &[u16]) -> usize {
        let Self { active, taken, next, stats, .. } = self;
        let Some(Active { queue, memory, format, hint, .. }) = active else { return 0 };
        let mut bytes = 0;
        let mut done = 0;
        for (pick, chain) in picks.iter().zip(&taken.chains[*next..]) {
            let frame = &burst.frames[usize::from(*pick)];
            let total = frame.len + format.hdr_len;
            let ([body], [buf]) = (burst.segs(frame), taken.writes(chain)) else { break };
            let fits = buf.len >= total && chain.reads == 0;
            if !fits || (frame.len > format.frame_len_max && frame.hdr.gso_size == 0) {
                break;
            }
            let Some(mut to) = memory.seg_mut(buf.addr, total, hint) else { break };
            let (word, last) = header(&frame.hdr, format).words();
            to.write_u64(word);
            if format.hdr_len as usize == HDR_MAX {
                to.write_u32(u32::from(last) | ONE_BUFFER);
            } else {
                to.write_u16(last);
            }
            let head = burst.head(usize::from(*pick));
            to.write(head);
            to.copy_from(body.skip(head.len() as u32));
            queue.put(chain, total);
            bytes += u64::from(frame.len);
            done += 1;
        }
        *next += done;
        stats.frames.add(done as u64);
        stats.bytes.add(bytes);
        done
    }

    /// Copies one frame. `body` is what follows `head`, once its first `skip` bytes are skipped.
    fn deliver(
        &mut self,
        head: &[u8],
        body: &[Seg<'_>],
        skip: u32,
        len: u32,
        hdr: &VnetHdr,
    ) -> Result<bool, Fault> {
        let active = self.active.as_ref().expect("callers check");
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
        let Some(Active { queue, memory, format, hint, .. }) = &mut self.active else {
            return Ok(false);
        };
        let mut raw = [0_u8; HDR_MAX];
        raw[..VnetHdr::LEN].copy_from_slice(&header(hdr, format).bytes());
        //= virtio-v1.3 5.1.6.4.1: if MRG_RXBUF has not been negotiated, the device MUST set
        //= num_buffers to 1.
        raw[VnetHdr::LEN..].copy_from_slice(&(chains as u16).to_le_bytes());

        let chains = &self.taken.chains[self.next..self.next + chains];
        self.next += chains.len();
        let whole = {
            let bufs = chains.iter().flat_map(|c| self.taken.writes(c));
            let mut to = Room { memory, hint, bufs, seg: None, rest: None, lost: false };
            to.write(&raw[..format.hdr_len as usize]);
            to.write(head);
            let mut skip = skip;
            for seg in body {
                let n = seg.len().min(skip);
                skip -= n;
                to.copy(seg.skip(n));
            }
            !to.lost
        };
        let mut left = u64::from(total);
        for chain in chains {
            let room: u64 = self.taken.writes(chain).iter().map(|b| u64::from(b.len)).sum();
            let n = left.min(room);
            queue.put(chain, n as u32);
            left -= n;
        }
        if whole {
            self.stats.frames.add(1);
            self.stats.bytes.add(u64::from(len));
        } else {
            self.stats.drops_bad_addr.add(1);
        }
        Ok(true)
    }
}

/// The virtio-net header as this guest takes it.
#[inline]
fn header(hdr: &VnetHdr, format: &Format) -> VnetHdr {
    //= virtio-v1.3 5.1.6.4.1: if GUEST_CSUM was not negotiated, the device MUST set flags to 0.
    VnetHdr { flags: if format.takes.csum { hdr.flags } else { 0 }, ..*hdr }
}

/// Whether a frame fits the guest's receive buffers.
enum Fit {
    /// Into so many chains.
    In(usize),
    /// When the guest adds buffers.
    NotNow,
    /// Whatever the guest adds.
    Never,
}

/// The writable bytes of some chains, as a place to write to from front to back.
struct Room<'a, 'm, I> {
    memory: &'m GuestMemory,
    hint: &'a mut usize,
    bufs: I,
    /// Where the next byte goes.
    seg: Option<SegMut<'m>>,
    /// What of the current buffer lies in further regions.
    rest: Option<(u64, u32)>,
    /// A buffer lay outside memory: the frame is not whole.
    lost: bool,
}

impl<'b, 'm, I: Iterator<Item = &'b Buf>> Room<'_, 'm, I> {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.copy(Seg::of(bytes));
    }

    #[inline]
    fn copy(&mut self, mut from: Seg<'_>) {
        while !from.is_empty() {
            let Some(to) = self.seg.as_mut().filter(|to| !to.is_empty()) else {
                if !self.next_seg() {
                    return;
                }
                continue;
            };
            let n = to.copy_from(from);
            from = from.skip(n);
        }
    }

    #[inline]
    fn next_seg(&mut self) -> bool {
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

    /// A buffer that does not lie in one region: its first part now, the rest next.
    #[cold]
    fn next_across(&mut self, addr: u64, len: u32) {
        let Some(n) = self.memory.span(addr, len).filter(|n| *n < len) else {
            self.lost = true;
            return;
        };
        self.seg = self.memory.seg_mut(addr, n, self.hint);
        self.rest = Some((addr + u64::from(n), len - n));
    }
}

impl Egress for VirtioEgress {
    fn offloads(&self) -> Offloads {
        self.active.as_ref().map_or(Offloads::ALL, |a| a.format.takes)
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        if !self.is_up() {
            self.stats.drops_down.add(picks.len() as u64);
            return Ok(picks.len());
        }
        self.stats.groups.add(1);
        self.refill(picks.len())?;
        let mut done = 0;
        while done < picks.len() {
            done += self.put_simple(burst, &picks[done..]);
            let Some(pick) = picks.get(done) else { break };
            let frame = &burst.frames[usize::from(*pick)];
            let head = burst.head(usize::from(*pick));
            let body = burst.segs(frame);
            match self.deliver(head, body, head.len() as u32, frame.len, &frame.hdr) {
                Ok(true) => {}
                Ok(false) => {
                    self.stats.full.add(1);
                    self.short_at = self.taken.chains.len() - self.next;
                    return Ok(done);
                }
                // Told again at the next call; these were delivered.
                Err(_) if done > 0 => return Ok(done),
                Err(fault) => return Err(fault),
            }
            done += 1;
        }
        Ok(picks.len())
    }

    fn put_made(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        if !self.is_up() {
            self.stats.drops_down.add(1);
            return Ok(true);
        }
        let len = head.len() as u32 + body.iter().map(|s| s.len()).sum::<u32>();
        self.deliver(head, body, 0, len, hdr)
    }

    fn room(&mut self, len: u32, limit: usize) -> Result<usize, Fault> {
        if !self.is_up() {
            return Ok(limit);
        }
        self.refill(BURST_MAX)?;
        let Some(Active { queue, format, .. }) = &self.active else { return Ok(limit) };
        let total = u64::from(len) + u64::from(format.hdr_len);
        let (mut frames, mut room, mut slots) = (0, 0_u64, 0_u32);
        let chains = &self.taken.chains[self.next..];
        for chain in chains {
            room += self.taken.writes(chain).iter().map(|b| u64::from(b.len)).sum::<u64>();
            slots += u32::from(chain.slots);
            // Without MRG_RXBUF a frame lies in one chain, or nowhere.
            if room >= total || !format.mergeable {
                frames += 1;
                room = 0;
            }
        }
        // As far as we look ahead, and as much as the ring holds.
        if chains.len() == BURST_MAX || slots >= u32::from(queue.size()) {
            return Ok(limit);
        }
        self.short_at = chains.len();
        Ok(frames.min(limit))
    }

    fn flush(&mut self) {
        let Some(active) = &mut self.active else { return };
        active.queue.publish();
        self.stats.calls.add(active.call());
        // The next burst's buffers are fetched while other ports are served. A fault is told when
        // the chains are wanted: it is sticky.
        if self.taken.chains.len() - self.next < LOOK_AHEAD {
            let _ = self.take();
        }
    }

    fn arm(&mut self) -> bool {
        let Some(active) = self.active.as_mut().filter(|_| self.enabled) else { return true };
        // What was too little then is too little now; more may have come to hand since.
        self.taken.chains.len() - self.next <= self.short_at && active.queue.arm() == Armed::Armed
    }

    fn disarm(&mut self) {
        if let Some(active) = &mut self.active {
            active.queue.disarm();
        }
    }
}

#[cfg(test)]
mod tests;
