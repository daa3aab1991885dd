//! Ingress from a guest: its transmit queue.

use std::sync::Arc;

use ring::virtq::{Armed, Buf, DeviceQueue, Taken};
use shm::{GuestMemory, Seg};
use switch::account::burst::{DESCS_MAX, TAKEN_SEGS_MAX};
use switch::direct::Direct;
use switch::frame::{BURST_BYTES, BURST_MAX, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, SEGS_MAX};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::{DATA_VALID, VnetHdr};

use super::{Active, Format, GuestQueue, Ring};
use crate::device::Call;

/// Shortest buffer of header and frame that is surely long enough.
const HDR_RUNT: u32 = 12 + 14;

/// Device half of a guest's transmit queue: frames into the switch.
pub struct VirtioIngress {
    ring: Ring,
    taken: Taken,
    scattered: Vec<Scattered>,
    stats: Arc<IngressStats>,
}

impl From<Arc<IngressStats>> for VirtioIngress {
    fn from(stats: Arc<IngressStats>) -> Self {
        Self::new(stats)
    }
}

impl VirtioIngress {
    /// Creates an inactive queue.
    pub fn new(stats: Arc<IngressStats>) -> Self {
        Self {
            ring: Ring::default(),
            taken: Taken::bounded(BURST_MAX, DESCS_MAX).for_reading(),
            scattered: Vec::with_capacity(BURST_MAX),
            stats,
        }
    }
}

impl GuestQueue for VirtioIngress {
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
        self.taken.clear();
        self.ring.activate(Active::new(queue, memory, call, format));
    }

    /// Between two bursts every chain taken was used.
    fn position(&mut self) -> Option<u32> {
        self.ring.active.as_ref().map(|active| active.queue.base())
    }
}

/// A chain of a burst that is not one segment: the first segment, their number, and their length in
/// bytes.
type Scattered = (usize, usize, u64);

/// Reason why a chain is not a valid frame. The chain is returned at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bad {
    Runt,
    TooLong,
    TooManySegs,
    Hdr,
    Addr,
}

impl Bad {
    fn count(self, stats: &IngressStats) {
        match self {
            Self::Runt => stats.drops_runt.add(1),
            Self::TooLong => stats.drops_too_long.add(1),
            Self::TooManySegs => stats.drops_too_many_segs.add(1),
            Self::Hdr => stats.drops_bad_hdr.add(1),
            Self::Addr => stats.drops_bad_addr.add(1),
        }
    }
}

/// The chains of a burst that are not valid frames. They are counted when it is known which chains
/// stay in the burst: the others are taken again.
struct Refused {
    /// One bit each.
    bits: u64,
    why: [Bad; BURST_MAX],
}

impl Refused {
    fn add(&mut self, i: usize, why: Bad) {
        self.bits |= 1 << i;
        self.why[i] = why;
    }

    /// Index of the chain of a burst's `frame`: each chain that is not refused is one.
    fn chain_of(&self, frame: usize) -> Option<usize> {
        (0..BURST_MAX).filter(|i| self.bits & 1 << i == 0).nth(frame)
    }

    /// Counts those of the first `chains` chains.
    #[inline]
    fn count(&self, chains: usize, stats: &IngressStats) {
        if self.bits != 0 {
            let why = self.why.iter().take(chains).enumerate();
            why.filter(|(i, _)| self.bits & 1 << i != 0).for_each(|(_, why)| why.count(stats));
        }
    }
}

/// Appends at most `most` segments of `bufs` to `segs`, independent of the regions that the buffers
/// span; returns their number and total length.
#[inline]
fn translate<'m>(
    memory: &'m GuestMemory,
    bufs: &[Buf],
    most: usize,
    hint: &mut usize,
    segs: &mut Vec<Seg<'m>>,
) -> Result<(usize, u64), Bad> {
    if bufs.len() > most {
        return Err(Bad::TooManySegs);
    }
    let (first, most) = (segs.len(), segs.len() + most);
    let mut len = 0;
    for buf in bufs {
        len += u64::from(buf.len);
        if segs.len() < most
            && let Some(seg) = memory.seg(buf.addr, buf.len, hint)
        {
            seg.prefetch();
            segs.push(seg);
        } else {
            across(memory, buf, most, hint, segs)?;
        }
    }
    Ok((segs.len() - first, len))
}

/// Translates a buffer that is not in one region: across several, or outside. `most`: limit on the
/// length of `segs`.
#[cold]
fn across<'m>(
    memory: &'m GuestMemory,
    buf: &Buf,
    most: usize,
    hint: &mut usize,
    segs: &mut Vec<Seg<'m>>,
) -> Result<(), Bad> {
    let (mut addr, mut left) = (buf.addr, buf.len);
    while left > 0 {
        if segs.len() == most {
            return Err(Bad::TooManySegs);
        }
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
    // The switch needs at least the 14 bytes of the Ethernet header.
    if len < u64::from(hdr_len) + 14 {
        return Err(Bad::Runt);
    }
    let len = u32::try_from(len - u64::from(hdr_len)).map_err(|_| Bad::TooLong)?;
    let head = &mut burst.segs[first];
    let (raw, skipped) = match head.first().filter(|_| head.len() > hdr_len) {
        Some(raw) => {
            *head = head.skip(hdr_len);
            (raw, 0)
        }
        None => scattered_header(&mut burst.segs[first..], hdr_len),
    };
    let mut hdr = VnetHdr::parse(&raw);
    //= virtio-v1.3 5.1.6.2.1: the driver MUST NOT set the VIRTIO_NET_HDR_F_DATA_VALID bit in flags.
    // Another guest would believe that somebody it trusts has verified the checksum.
    hdr.flags &= !DATA_VALID;
    let hdr = hdr.check(len, format.sends).map_err(|_| Bad::Hdr)?;
    let max = if hdr.is_plain() || hdr.gso_size == 0 { FRAME_LEN_MAX } else { GSO_LEN_MAX };
    if len > max {
        return Err(Bad::TooLong);
    }
    burst.push_at(first + skipped, count - skipped, len, hdr);
    Ok(())
}

/// Takes a header of `hdr_len` bytes off several segments (CVE-2022-2132: a header over more than
/// two); returns it and the number of segments it used up.
#[cold]
fn scattered_header(segs: &mut [Seg<'_>], hdr_len: u32) -> ([u8; VnetHdr::LEN], usize) {
    let mut raw = [0_u8; VnetHdr::LEN];
    let (mut read, mut left, mut used) = (0, hdr_len, 0);
    // The caller checked that the segments in total are longer than a header.
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
        _now: Instant,
        scratch: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Some(active) = self.ring.up() else { return Ok(0) };
        active.check_lost()?;
        let Active { queue, memory, format, hint, .. } = active;
        let memory: &GuestMemory = memory;
        let taken = match queue.take(memory, max.min(BURST_MAX), &mut self.taken) {
            Ok(taken) => taken,
            Err(malformed) => return Err(active.fault(malformed)),
        };
        if taken == 0 {
            // It may be empty because its memory was lost just now, and not be polled again.
            return active.check_lost().map(|()| 0);
        }
        let mut burst: Burst<'_> = std::mem::take(scratch);
        let (kept, refused) =
            collect(&self.taken, memory, hint, format, &mut burst, &mut self.scattered);
        let mut more = kept < taken;
        keep(queue, &mut self.taken, kept);
        let (mut frames, mut bytes) = (0, 0);
        for frame in &burst.frames {
            frames += 1;
            bytes += u64::from(frame.len);
        }
        if frames > 0 {
            forward(&mut burst);
        }
        if burst.left() > 0 {
            let dealt_with = burst.frames.len() - burst.left();
            for frame in burst.frames.drain(dealt_with..) {
                frames -= 1;
                bytes -= u64::from(frame.len);
            }
            let kept = refused.chain_of(dealt_with);
            keep(queue, &mut self.taken, kept.unwrap_or(usize::MAX));
            more = true;
        }
        refused.count(self.taken.chains.len(), &self.stats);
        queue.put_all(&self.taken.chains);
        queue.publish();
        *scratch = burst.recycle();
        self.stats.frames.add(frames);
        self.stats.bytes.add(bytes);
        self.stats.bursts.add(1);
        self.stats.calls.add(self.ring.active.as_mut().map_or(0, Active::call));
        Ok(if more { max.max(taken) } else { taken })
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        self.ring.up().is_none_or(|active| active.queue.arm() == Armed::Armed)
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// Untakes all chains but the first `n`.
#[inline]
fn keep(queue: &mut DeviceQueue, taken: &mut Taken, n: usize) {
    if n < taken.chains.len() {
        queue.untake(&taken.chains[n..]);
        taken.chains.truncate(n);
    }
}

/// Makes frames of the chains taken, up to the limits of segments and bytes in a burst, the latter
/// without the first chain; returns the number of chains processed, and those without a frame.
#[inline]
fn collect<'m>(
    taken: &Taken,
    memory: &'m GuestMemory,
    hint: &mut usize,
    format: &Format,
    burst: &mut Burst<'m>,
    scattered: &mut Vec<Scattered>,
) -> (usize, Refused) {
    scattered.clear();
    let mut refused = Refused { bits: 0, why: [Bad::Runt; BURST_MAX] };
    // Two passes, so that the first bytes of all frames are prefetched before any is read.
    let segs = &mut burst.segs;
    let gathered = gather(taken, memory, hint, segs, scattered, &mut refused);
    push_frames(&gathered, format, burst, scattered, &mut refused);
    (gathered.chains, refused)
}

/// Chains whose buffers are segments.
struct Gathered {
    /// Their number, including those refused.
    chains: usize,
    /// Those that are not one segment, one bit each.
    unusual: u64,
}

/// The first pass: translates the chains' buffers to segments, and prefetches them.
#[inline]
fn gather<'m>(
    taken: &Taken,
    memory: &'m GuestMemory,
    hint: &mut usize,
    segs: &mut Vec<Seg<'m>>,
    scattered: &mut Vec<Scattered>,
    refused: &mut Refused,
) -> Gathered {
    let mut unusual = 0_u64;
    let (mut kept, mut wasted, mut bytes) = (0, 0, 0_u64);
    for chain in &taken.chains {
        let first = segs.len();
        let bufs = taken.reads(chain);
        // Nearly every frame is in one buffer, in the last region used.
        if let [buf] = bufs
            && first + wasted < TAKEN_SEGS_MAX
            && let Some(seg) = memory.seg(buf.addr, buf.len, hint)
        {
            bytes += u64::from(buf.len);
            if bytes > BURST_BYTES && kept > 0 {
                break;
            }
            seg.prefetch();
            segs.push(seg);
            kept += 1;
            continue;
        }
        bytes += bufs.iter().map(|buf| u64::from(buf.len)).sum::<u64>();
        if bytes > BURST_BYTES && kept > 0 {
            break;
        }
        // Segments of invalid chains count as work, too.
        let most = TAKEN_SEGS_MAX.saturating_sub(first + wasted).min(SEGS_MAX);
        match translate(memory, bufs, most, hint, segs) {
            Ok((count, len)) => scattered.push((first, count, len)),
            Err(Bad::TooManySegs) if most < SEGS_MAX => {
                segs.truncate(first);
                break;
            }
            Err(why) => {
                wasted += segs.len() - first;
                segs.truncate(first);
                refused.add(kept, why);
            }
        }
        unusual |= 1 << kept;
        kept += 1;
    }
    Gathered { chains: kept, unusual }
}

/// The second pass: pushes the frames of the chains that are not refused.
#[inline]
fn push_frames(
    gathered: &Gathered,
    format: &Format,
    burst: &mut Burst<'_>,
    scattered: &[Scattered],
    refused: &mut Refused,
) {
    let (mut at, mut parts) = (0, scattered.iter().copied());
    for i in 0..gathered.chains {
        let (first, count, len) = if gathered.unusual & 1 << i == 0 {
            let (first, seg) = (at, &mut burst.segs[at]);
            at += 1;
            let len = seg.len();
            // Nearly every frame has no offload: a header of zeroes. (Empty buffers outside memory
            // get no segment.)
            if seg.first() == Some([0; VnetHdr::LEN]) && (HDR_RUNT..=FRAME_LEN_MAX).contains(&len) {
                *seg = seg.skip(format.hdr_len);
                burst.push_at(first, 1, len - format.hdr_len, VnetHdr::NONE);
                continue;
            }
            (first, 1, u64::from(len))
        } else if refused.bits & 1 << i == 0
            && let Some(part) = parts.next()
        {
            at = part.0 + part.1;
            part
        } else {
            continue;
        };
        if let Err(why) = finish(burst, first, count, len, format) {
            refused.add(i, why);
        }
    }
}
