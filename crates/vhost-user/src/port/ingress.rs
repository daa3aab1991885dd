//! The guest's transmit queue: frames into the switch.

use std::sync::Arc;

use ring::virtq::{Armed, Buf, DeviceQueue, Taken};
use shm::{GuestMemory, Seg};
use switch::frame::{BURST_BYTES, BURST_MAX, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, SEGS_MAX};
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
    stats: Arc<IngressStats>,
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

    /// Takes the ring away and returns its position (VRING_BASE): every chain taken was used.
    pub fn deactivate(&mut self) -> Option<u32> {
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
        _now_ns: u64,
        scratch: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Some(active) = self.ring.up() else { return Ok(0) };
        let mut burst: Burst<'_> = std::mem::take(scratch);
        let Active { queue, memory, format, hint, .. } = active;
        let memory: &GuestMemory = memory;
        let taken = match queue.take(memory, max.min(BURST_MAX), &mut self.taken) {
            Ok(taken) => taken,
            Err(malformed) => {
                *scratch = burst.recycle();
                return Err(active.fault(malformed));
            }
        };
        if taken == 0 {
            *scratch = burst.recycle();
            return active.check_lost().map(|()| 0);
        }
        let back = give_back(queue, &mut self.taken, BURST_BYTES);
        let taken = taken - back;

        collect(&self.taken, memory, hint, format, &mut burst, &self.stats);
        let (mut frames, mut bytes) = (0, 0);
        for frame in &burst.frames {
            frames += 1;
            bytes += u64::from(frame.len);
        }
        if frames > 0 {
            forward(&mut burst);
        }
        queue.put_all(&self.taken.chains);
        queue.publish();
        *scratch = burst.recycle();
        self.stats.frames.add(frames);
        self.stats.bytes.add(bytes);
        self.stats.bursts.add(1);
        self.stats.calls.add(self.ring.active.as_mut().map_or(0, Active::call));
        Ok(if back > 0 { max.max(taken) } else { taken })
    }

    fn arm(&mut self) -> bool {
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
            continue;
        }
        if let Err(why) = finish(burst, first as usize, count as usize, len, format) {
            why.count(stats);
        }
    }
}
