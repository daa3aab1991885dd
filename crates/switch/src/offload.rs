//! Software offloads, for destinations that lack them: checksums and segmentation.
//!
//! A frame whose offloads the destination accepts passes unchanged; only [`needs_work`] is called
//! for it. For other destinations [`resolve`] makes plain frames, or frames with a partial
//! checksum, and passes each to `emit`:
//!
//! ```text
//!   frame    | headers |                 payload                  |   in the sender's memory
//!   private  | headers | payload.. |                                  its head, copied once
//!   emitted  | headers'| 0 .. gso_size |
//!            | headers'| gso_size .. 2 gso_size |          ...
//!              private   ranges of the sender's segments
//! ```
//!
//! Headers are parsed, patched and emitted from private memory only. The payload is read once here
//! if its checksum is needed, and copied once, by the destination. If the sender changes it in
//! between, only its own frame has a wrong checksum.
//!
//! Not supported: UDP fragmentation (UFO), segmentation inside tunnels, of fragments, or after an
//! IPv6 routing header with segments left (the pseudo-header's address is then not the header's);
//! such frames are [`Bad`]. Frames are never merged (no GRO).

use std::fmt;

use shm::Seg;

use crate::flow::{
    ETHERTYPE_IPV4, ETHERTYPE_IPV6, Network, PROTO_TCP, PROTO_UDP, Transport, be16, be32, network,
    transport,
};
use crate::vnet::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Offloads, VnetHdr,
};

/// Longest headers supported, and largest offset of a checksum field from the frame's start.
pub const HEADERS_MAX: usize = 512;
/// Most frames made from one. A full 64 KiB frame may have segments of 64 bytes, less than any TCP
/// uses; but a hostile guest must not turn one frame into 65,000.
pub const SEGMENTS_MAX: usize = crate::account::burst::MADE_MAX;

/// Bytes of payload read at once for a checksum.
const CHUNK: usize = 2048;

/// Offset of the checksum in a TCP header, and in a UDP header.
const TCP_CSUM_OFFSET: u16 = 16;
const UDP_CSUM_OFFSET: u16 = 6;

const TCP_FIN: u8 = 1;
const TCP_PSH: u8 = 8;
const TCP_CWR: u8 = 0x80;

/// Reason why a frame cannot be converted for its destination. It is dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Head and segments do not add up to the frame's length.
    Length,
    /// The checksum field is outside the frame, too far from its start, or would overwrite a parsed
    /// field: MACs, tags, IP headers, ports.
    Checksum,
    /// The headers do not match the GSO type, or are truncated.
    Headers,
    /// A segment would be longer than an IP packet can be.
    TooLong,
    /// More than [`SEGMENTS_MAX`] segments.
    TooManySegments,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Length => "frame and segments differ in length",
            Self::Checksum => "checksum field at an invalid offset",
            Self::Headers => "headers do not match the GSO type",
            Self::TooLong => "GSO segment longer than an IP packet",
            Self::TooManySegments => "too many GSO segments",
        })
    }
}

impl std::error::Error for Bad {}

/// Callback for one made frame: private head, the rest in the sender's memory, its offload request.
/// False: the destination is full; stop.
pub type Emit<'e> = dyn FnMut(&[u8], &[Seg<'_>], &VnetHdr) -> bool + 'e;

/// Estimate of the frames that [`resolve`] will make, for
/// [`Egress::room`](crate::port::Egress::room).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Upper bound of the number of frames.
    pub frames: usize,
    /// Upper bound of their length in bytes, from the destination MAC on.
    pub len_max: u32,
}

/// Working memory of [`resolve`]; one per worker. Grows as needed and never shrinks.
pub struct Scratch {
    /// Private copy of the frame's start.
    private: [u8; HEADERS_MAX],
    /// Headers of the frame being made.
    made: [u8; HEADERS_MAX],
    chunk: [u8; CHUNK],
    /// Empty between calls, as is `segs`.
    payload: Vec<Seg<'static>>,
    segs: Vec<Seg<'static>>,
    skip: usize,
}

impl Scratch {
    /// Creates it without an allocation.
    pub fn new() -> Self {
        Self {
            private: [0; HEADERS_MAX],
            made: [0; HEADERS_MAX],
            chunk: [0; CHUNK],
            payload: Vec::new(),
            segs: Vec::new(),
            skip: 0,
        }
    }

    /// Has the next [`resolve`] leave out the first `segments`, which the destination has.
    pub fn skip(&mut self, segments: usize) {
        self.skip = segments;
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a frame with the checked header `hdr` must go through [`resolve`] for a destination that
/// accepts `to`. `head`, the frame's private head, is read only if `hdr` does not imply the IP
/// version: for UDP segmentation, and checksums where that matters.
#[inline]
pub fn needs_work(head: &[u8], hdr: &VnetHdr, to: &Offloads) -> bool {
    // A destination without GUEST_CSUM gets neither NEEDS_CSUM nor DATA_VALID.
    let flags = hdr.flags != 0 && !takes_csum(head, to);
    flags || (hdr.gso_type != GSO_NONE && !takes_gso(head, hdr, to))
}

/// Plans the conversion of a frame for a destination that accepts `to`.
///
/// # Errors
/// [`Bad`], if that is detectable from the head alone: the frame must be dropped.
pub fn plan(head: &[u8], len: u32, hdr: &VnetHdr, to: &Offloads) -> Result<Plan, Bad> {
    if hdr.gso_type == GSO_NONE || takes_gso(head, hdr, to) {
        return Ok(Plan { frames: 1, len_max: len });
    }
    let (frames, longest) = match Headers::of(head, hdr) {
        Ok(headers) => (segments(hdr, len, headers.len), headers.len),
        // They may continue beyond the head. The count is then too high, which is not an error.
        Err(_) if head.len() < HEADERS_MAX && head.len() < len as usize => {
            (segments(hdr, len, head.len()).min(SEGMENTS_MAX), HEADERS_MAX)
        }
        Err(bad) => return Err(bad),
    };
    if frames > SEGMENTS_MAX {
        return Err(Bad::TooManySegments);
    }
    let len_max = len.min(longest as u32 + u32::from(hdr.gso_size));
    Ok(Plan { frames, len_max })
}

/// Number of segments of a GSO frame of `len` bytes with `header_len` bytes of headers; at least 1,
/// and 1 for a frame without GSO.
pub fn segments(hdr: &VnetHdr, len: u32, header_len: usize) -> usize {
    let payload = (len as usize).saturating_sub(header_len);
    if hdr.gso_size == 0 { 1 } else { payload.div_ceil(usize::from(hdr.gso_size)).max(1) }
}

/// Number of frames that a frame of `len` bytes is on a wire, and their bytes without the checksum:
/// a GSO frame has its headers in each segment. `head`: private copy of its first bytes.
pub fn on_wire(head: &[u8], len: u32, hdr: &VnetHdr) -> (u64, u64) {
    if hdr.gso_type == GSO_NONE {
        return (1, u64::from(len));
    }
    // Ethernet, IPv4 and TCP, where they cannot be parsed: such a frame is dropped.
    let headers = Headers::of(head, hdr).map_or(54, |headers| headers.len);
    let frames = segments(hdr, len, headers).min(SEGMENTS_MAX) as u64;
    (frames, u64::from(len) + (frames - 1) * headers as u64)
}

/// Converts a frame for a destination with offloads `to`, passing the results to `emit`, in order,
/// until that returns false. Returns the number emitted and accepted, those
/// [skipped](Scratch::skip) included.
///
/// `head`: private copy of the frame's first bytes, at most [`HEADERS_MAX`]. `body`: the sender's
/// segments, after the head. `len`: length of both. `hdr`: checked by [`VnetHdr::check`].
///
/// * Partial checksum, destination without: computed over everything from `csum_start` to the end
///   (virtio 1.3, 5.1.6.2) and stored at `csum_offset`.
/// * GSO, destination without this kind, or without its ECN flavour: segments of `gso_size` bytes
///   of payload each. IPv4: length, identification + 1 each, header checksum. IPv6: payload length.
///   TCP: sequence number, FIN and PSH in the last only, CWR in the first only (RFC 3168, 6.1.2).
///   UDP: length (USO). Their checksums stay partial if the destination accepts that.
/// * DATA_VALID is cleared for a destination that did not negotiate it: "if VIRTIO_NET_F_GUEST_CSUM
///   was not negotiated, the device MUST set flags to zero" (virtio 1.3, 5.1.6.4.1).
///
/// # Errors
/// [`Bad`]: the frame must be dropped; nothing was emitted.
pub fn resolve(
    head: &[u8],
    body: &[Seg<'_>],
    len: u32,
    hdr: &VnetHdr,
    to: &Offloads,
    scratch: &mut Scratch,
    emit: &mut Emit<'_>,
) -> Result<usize, Bad> {
    let skip = std::mem::take(&mut scratch.skip);
    let body_len: u64 = body.iter().map(|seg| u64::from(seg.len())).sum();
    if head.len() as u64 + body_len != u64::from(len) || head.len() > HEADERS_MAX {
        return Err(Bad::Length);
    }
    let csum = takes_csum(head, to);
    if hdr.gso_type != GSO_NONE && !takes_gso(head, hdr, to) {
        scratch.skip = skip;
        segment(head, body, hdr, csum, scratch, emit)
    } else if hdr.flags & NEEDS_CSUM != 0 && !csum {
        complete(head, body, hdr, scratch, emit)
    } else {
        let flags = if csum { hdr.flags } else { 0 };
        Ok(usize::from(emit(head, body, &VnetHdr { flags, ..*hdr })))
    }
}

/// Whether the destination accepts the frame's checksum as a partial one.
#[inline]
fn takes_csum(head: &[u8], to: &Offloads) -> bool {
    let is_v4 = || network(head).is_some_and(|net| net.ethertype == ETHERTYPE_IPV4);
    to.csum && (!to.csum_v4_only || is_v4())
}

/// Whether the destination accepts the frame's GSO type.
fn takes_gso(head: &[u8], hdr: &VnetHdr, to: &Offloads) -> bool {
    let kind = match hdr.gso_type & !GSO_ECN {
        GSO_TCPV4 => to.tso4,
        GSO_TCPV6 => to.tso6,
        GSO_UDP_L4 => match network(head) {
            Some(Network { ethertype: ETHERTYPE_IPV4, .. }) => to.uso4,
            Some(Network { ethertype: ETHERTYPE_IPV6, .. }) => to.uso6,
            _ => false,
        },
        _ => false,
    };
    kind && takes_csum(head, to) && (to.ecn || hdr.gso_type & GSO_ECN == 0)
}

/// Computes a frame's partial checksum.
fn complete(
    head: &[u8],
    body: &[Seg<'_>],
    hdr: &VnetHdr,
    scratch: &mut Scratch,
    emit: &mut Emit<'_>,
) -> Result<usize, Bad> {
    let start = usize::from(hdr.csum_start);
    let field = start + usize::from(hdr.csum_offset);
    let mut n = keep(&mut scratch.private, head);
    let mut rest = relend(std::mem::take(&mut scratch.segs));
    if field + 2 > n {
        n = extend(&mut scratch.private, n, body);
        after(body, n - head.len(), &mut rest);
    } else {
        rest.extend_from_slice(body);
    }
    let private = &mut scratch.private[..n];
    let result = check_field(private, start, field).map(|()| {
        let mut sum = Sum::default();
        sum.add(&private[start..]);
        sum.add_segs(&rest, &mut scratch.chunk);
        private[field..field + 2].copy_from_slice(&sum.finish());
        usize::from(emit(private, &rest, &VnetHdr::NONE))
    });
    scratch.segs = relend(rest);
    result
}

/// Checks that a checksum over everything from `start` on may be stored at `field`: in private
/// memory, and not over a parsed field.
fn check_field(private: &[u8], start: usize, field: usize) -> Result<(), Bad> {
    let net = network(private).ok_or(Bad::Checksum)?;
    let decided_end = match (net.ethertype, transport(private, &net)) {
        (_, Transport::At { proto: PROTO_TCP | PROTO_UDP, at }) => at + 4,
        (_, Transport::At { at, .. }) => at,
        (ETHERTYPE_IPV4, Transport::Fragment) => net.at + 20,
        (ETHERTYPE_IPV6, Transport::Fragment) => net.at + 40,
        (ETHERTYPE_IPV4 | ETHERTYPE_IPV6, Transport::Unknown) => return Err(Bad::Checksum),
        _ => net.at,
    };
    let fits = start <= field && field + 2 <= private.len();
    if fits && field >= decided_end { Ok(()) } else { Err(Bad::Checksum) }
}

/// Segments a GSO frame; `partial`: checksums stay partial.
fn segment(
    head: &[u8],
    body: &[Seg<'_>],
    hdr: &VnetHdr,
    partial: bool,
    scratch: &mut Scratch,
    emit: &mut Emit<'_>,
) -> Result<usize, Bad> {
    let Scratch { private, made, chunk, payload, segs, skip } = scratch;
    let mut n = keep(private, head);
    let mut headers = Headers::of(&private[..n], hdr);
    if headers.is_err() && n < HEADERS_MAX && !body.is_empty() {
        n = extend(private, n, body);
        headers = Headers::of(&private[..n], hdr);
    }
    let headers = headers?;
    let (template, rest) = private[..n].split_at(headers.len);
    // Payload that is private already is not fetched again.
    let mut left = relend(std::mem::take(payload));
    left.push(Seg::of(rest));
    after(body, n - head.len(), &mut left);
    let mut job = Job {
        template,
        headers,
        gso_size: u32::from(hdr.gso_size),
        payload_len: left.iter().map(|seg| seg.len()).sum(),
        partial,
        left,
        next: 0,
        segs: relend(std::mem::take(segs)),
        skip: std::mem::take(skip) as u32,
    };
    let result = job.run(made, chunk, emit);
    *payload = relend(job.left);
    *segs = relend(job.segs);
    result
}

/// State of the segmentation of a GSO frame.
struct Job<'a> {
    template: &'a [u8],
    headers: Headers,
    gso_size: u32,
    payload_len: u32,
    /// Whether checksums stay partial.
    partial: bool,
    /// Payload; its first `next` segments are used up.
    left: Vec<Seg<'a>>,
    next: usize,
    /// Payload of the frame being made.
    segs: Vec<Seg<'a>>,
    /// Segments that the destination has.
    skip: u32,
}

impl Job<'_> {
    fn run(
        &mut self,
        made: &mut [u8; HEADERS_MAX],
        chunk: &mut [u8; CHUNK],
        emit: &mut Emit<'_>,
    ) -> Result<usize, Bad> {
        let count = self.payload_len.div_ceil(self.gso_size).max(1);
        if count as usize > SEGMENTS_MAX {
            return Err(Bad::TooManySegments);
        }
        let longest = self.headers.len as u32 + self.payload_len.min(self.gso_size);
        if longest - self.headers.net_at as u32 > u32::from(u16::MAX) {
            return Err(Bad::TooLong);
        }
        let made = &mut made[..self.headers.len];
        let (start, offset) = (self.headers.l4_at as u16, self.headers.csum_offset());
        let partial =
            VnetHdr { flags: NEEDS_CSUM, csum_start: start, csum_offset: offset, ..VnetHdr::NONE };
        let hdr = if self.partial { partial } else { VnetHdr::NONE };
        for k in 0..count {
            let n = (self.payload_len - k * self.gso_size).min(self.gso_size);
            self.take(n);
            if k < self.skip {
                continue;
            }
            made.copy_from_slice(self.template);
            self.patch(made, k, n as u16, k + 1 == count);
            self.put_checksum(made, n as u16, chunk);
            if !emit(made, &self.segs, &hdr) {
                return Ok(k as usize);
            }
        }
        Ok(count as usize)
    }

    /// Moves the next `n` bytes of payload to `segs`.
    fn take(&mut self, mut n: u32) {
        self.segs.clear();
        while n > 0 && self.next < self.left.len() {
            let seg = &mut self.left[self.next];
            let part = seg.take(n);
            n -= part.len();
            *seg = seg.skip(part.len());
            if seg.is_empty() {
                self.next += 1;
            }
            if !part.is_empty() {
                self.segs.push(part);
            }
        }
        debug_assert_eq!(n, 0, "payload shorter than its length");
    }

    /// Patches the copied headers for segment `k` with `n` bytes of payload; all but the checksum
    /// of TCP or UDP.
    fn patch(&self, made: &mut [u8], k: u32, n: u16, is_last: bool) {
        let Headers { net_at, l4_at, len, v6, udp } = self.headers;
        let l4_len = (len - l4_at) as u16 + n;
        let ip = &mut made[net_at..l4_at];
        if v6 {
            let length = (ip.len() - 40) as u16 + l4_len;
            put16(ip, 4, length);
        } else {
            let length = ip.len() as u16 + l4_len;
            put16(ip, 2, length);
            let id = be16(ip, 4).unwrap_or(0).wrapping_add(k as u16);
            put16(ip, 4, id);
            put16(ip, 10, 0);
            let mut sum = Sum::default();
            sum.add(ip);
            ip[10..12].copy_from_slice(&sum.finish_zero());
        }
        let l4 = &mut made[l4_at..];
        if udp {
            put16(l4, 4, l4_len);
            return;
        }
        let seq = be32(l4, 4).unwrap_or(0).wrapping_add(k.wrapping_mul(self.gso_size));
        l4[4..8].copy_from_slice(&seq.to_be_bytes());
        if !is_last {
            l4[13] &= !(TCP_FIN | TCP_PSH);
        }
        if k > 0 {
            l4[13] &= !TCP_CWR;
        }
    }

    /// Stores the checksum of TCP or UDP, or of the pseudo-header alone if the destination
    /// completes it.
    fn put_checksum(&self, made: &mut [u8], n: u16, chunk: &mut [u8; CHUNK]) {
        let Headers { net_at, l4_at, v6, udp, .. } = self.headers;
        let field = l4_at + usize::from(self.headers.csum_offset());
        let l4_len = (made.len() - l4_at) as u16 + n;
        let proto = if udp { PROTO_UDP } else { PROTO_TCP };
        let mut sum = pseudo_sum(made, net_at, v6, proto, l4_len);
        let bytes = if self.partial {
            sum.fold()
        } else {
            put16(made, field, 0);
            sum.add(&made[l4_at..]);
            sum.add_segs(&self.segs, chunk);
            sum.finish()
        };
        made[field..field + 2].copy_from_slice(&bytes);
    }
}

/// The headers of a GSO frame, parsed in private memory; the sender's `hdr_len` is ignored.
#[derive(Clone, Copy, Debug)]
struct Headers {
    net_at: usize,
    l4_at: usize,
    /// Length of all headers, from the destination MAC on.
    len: usize,
    v6: bool,
    udp: bool,
}

impl Headers {
    fn of(head: &[u8], hdr: &VnetHdr) -> Result<Self, Bad> {
        let net = network(head).ok_or(Bad::Headers)?;
        let (v6, udp) = match (hdr.gso_type & !GSO_ECN, net.ethertype) {
            (GSO_TCPV4, ETHERTYPE_IPV4) => (false, false),
            (GSO_TCPV6, ETHERTYPE_IPV6) => (true, false),
            (GSO_UDP_L4, ETHERTYPE_IPV4) => (false, true),
            (GSO_UDP_L4, ETHERTYPE_IPV6) => (true, true),
            _ => return Err(Bad::Headers),
        };
        let want = if udp { PROTO_UDP } else { PROTO_TCP };
        let l4_at = match transport(head, &net) {
            Transport::At { proto, at } if proto == want => at,
            _ => return Err(Bad::Headers),
        };
        let l4_len = match (udp, head.get(l4_at + 12)) {
            (true, _) => 8,
            (false, Some(offset)) => usize::from(offset >> 4) * 4,
            (false, None) => return Err(Bad::Headers),
        };
        let headers = Self { net_at: net.at, l4_at, len: l4_at + l4_len, v6, udp };
        let same_csum = usize::from(hdr.csum_start) == l4_at
            && hdr.csum_offset == headers.csum_offset()
            && hdr.gso_size != 0;
        let whole = headers.len <= head.len() && (udp || l4_len >= 20);
        let routed = v6 && is_routed_on(&head[..l4_at.min(head.len())], net.at);
        if same_csum && whole && !routed { Ok(headers) } else { Err(Bad::Headers) }
    }

    fn csum_offset(&self) -> u16 {
        if self.udp { UDP_CSUM_OFFSET } else { TCP_CSUM_OFFSET }
    }
}

/// Whether the IPv6 headers, up to the end of `head`, hold a routing header with segments left.
fn is_routed_on(head: &[u8], net_at: usize) -> bool {
    const ROUTING: u8 = 43;
    let (mut proto, mut at) = (head.get(net_at + 6).copied(), net_at + 40);
    while let (Some(kind), Some(&[next, len, _, segments_left])) =
        (proto, head.get(at..).and_then(|b| b.first_chunk()))
    {
        if kind == ROUTING && segments_left != 0 {
            return true;
        }
        proto = Some(next);
        at += (usize::from(len) + 1) * 8;
    }
    false
}

/// Stores the pseudo-header's sum in the checksum field of a TCP or UDP frame of `len` bytes, for a
/// sender that left it out. False: the private head has no such field.
pub fn put_partial(head: &mut [u8], len: u32) -> bool {
    let Some(net) = network(head) else { return false };
    let (proto, at, offset) = match transport(head, &net) {
        Transport::At { proto: PROTO_TCP, at } => (PROTO_TCP, at, TCP_CSUM_OFFSET),
        Transport::At { proto: PROTO_UDP, at } => (PROTO_UDP, at, UDP_CSUM_OFFSET),
        _ => return false,
    };
    let l4_len = usize::try_from(len).ok().and_then(|len| u16::try_from(len.checked_sub(at)?).ok());
    let field = at + usize::from(offset);
    let Some(l4_len) = l4_len.filter(|_| field + 2 <= head.len()) else { return false };
    let sum = pseudo_sum(head, net.at, net.ethertype == ETHERTYPE_IPV6, proto, l4_len);
    head[field..field + 2].copy_from_slice(&sum.fold());
    true
}

/// Sum of addresses, length and protocol (RFC 9293, 3.1 and RFC 8200, 8.1).
fn pseudo_sum(head: &[u8], net_at: usize, v6: bool, proto: u8, l4_len: u16) -> Sum {
    let mut sum = Sum::default();
    sum.add(&head[if v6 { net_at + 8..net_at + 40 } else { net_at + 12..net_at + 20 }]);
    sum.add(&l4_len.to_be_bytes());
    sum.add(&[0, proto]);
    sum
}

/// Copies the head to memory where it can be patched; returns its length.
fn keep(private: &mut [u8; HEADERS_MAX], head: &[u8]) -> usize {
    private[..head.len()].copy_from_slice(head);
    head.len()
}

/// Reads more of the frame after the first `n` private bytes, up to the capacity: these bytes are
/// then parsed and delivered from here. Returns the new length.
fn extend(private: &mut [u8; HEADERS_MAX], n: usize, body: &[Seg<'_>]) -> usize {
    let mut at = n;
    for seg in body {
        at += seg.read(&mut private[at..]);
    }
    at
}

/// Appends `segs` without their first `n` bytes to `out`; for example without a copied head.
pub fn after<'m>(segs: &[Seg<'m>], n: usize, out: &mut Vec<Seg<'m>>) {
    let mut n = u32::try_from(n).unwrap_or(u32::MAX);
    for seg in segs {
        let rest = seg.skip(n);
        n -= seg.len() - rest.len();
        if !rest.is_empty() {
            out.push(rest);
        }
    }
}

/// Returns the same allocation for segments of another lifetime, empty: collecting an empty vector
/// in place keeps it.
fn relend<'n>(mut segs: Vec<Seg<'_>>) -> Vec<Seg<'n>> {
    segs.clear();
    segs.into_iter().map(|_| Seg::EMPTY).collect()
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// One's-complement sum (RFC 1071) of bytes in pieces of any length.
///
/// Words are added in native byte order, which is correct if the result is stored in the same
/// order: so results are bytes, not numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Carries accumulate in the upper half until the sum is folded.
    total: u64,
    /// Whether an odd number of bytes has been added.
    is_odd: bool,
}

impl Sum {
    /// Adds bytes that follow those added before.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        let sum = fold(sum_words(bytes));
        self.total += u64::from(if self.is_odd { sum.swap_bytes() } else { sum });
        self.is_odd ^= !bytes.len().is_multiple_of(2);
    }

    /// Adds the bytes of segments, each read once, through `chunk`, which must not be empty.
    pub fn add_segs(&mut self, segs: &[Seg<'_>], chunk: &mut [u8]) {
        assert!(!chunk.is_empty(), "no buffer to read to");
        for seg in segs {
            let mut seg = *seg;
            while !seg.is_empty() {
                let n = seg.read(chunk);
                if n == 0 {
                    break;
                }
                self.add(&chunk[..n]);
                seg = seg.skip(n as u32);
            }
        }
    }

    /// The sum as stored in a frame: the pseudo-header's sum in a partial checksum.
    #[inline]
    pub fn fold(self) -> [u8; 2] {
        fold(self.total).to_ne_bytes()
    }

    /// The checksum as stored in a frame: the sum's complement, never zero, which means no checksum
    /// in UDP (RFC 768); the value used instead is equivalent.
    #[inline]
    pub fn finish(self) -> [u8; 2] {
        match self.finish_zero() {
            [0, 0] => [0xff, 0xff],
            sum => sum,
        }
    }

    /// The checksum, which may be zero, as in an IPv4 header.
    #[inline]
    pub fn finish_zero(self) -> [u8; 2] {
        (!fold(self.total)).to_ne_bytes()
    }
}

/// Sum of 32-bit words in native byte order, the last padded with zeros. Adds 64 bits at a time
/// with their carries, in two independent accumulators: twice as fast as the compiler's code for
/// 32-bit words in the baseline's vector registers.
#[inline]
fn sum_words(bytes: &[u8]) -> u64 {
    let long = |b: &[u8; 8]| u128::from(u64::from_ne_bytes(*b));
    let word = |b: &[u8; 4]| u64::from(u32::from_ne_bytes(*b));
    let (blocks, tail) = bytes.as_chunks::<32>();
    let (mut even, mut uneven) = (0_u128, 0_u128);
    for block in blocks {
        let (longs, _) = block.as_chunks::<8>();
        even += long(&longs[0]);
        uneven += long(&longs[1]);
        even += long(&longs[2]);
        uneven += long(&longs[3]);
    }
    let (carries, sum) = (((even + uneven) >> 64) as u64, (even + uneven) as u64);
    let (words, odd) = tail.as_chunks::<4>();
    let mut total = carries + (sum >> 32) + (sum & 0xffff_ffff);
    total += words.iter().map(word).sum::<u64>();
    // Explicit bytes: a copy of unknown length would be a call.
    total += word(&match *odd {
        [a, b, c] => [a, b, c, 0],
        [a, b] => [a, b, 0, 0],
        [a] => [a, 0, 0, 0],
        _ => [0; 4],
    });
    total
}

/// Adds the carries back in.
#[inline]
fn fold(total: u64) -> u16 {
    let total = (total >> 32) + (total & 0xffff_ffff);
    let total = (total >> 32) + (total & 0xffff_ffff);
    let total = (total >> 16) + (total & 0xffff);
    let total = (total >> 16) + (total & 0xffff);
    total as u16
}

#[cfg(test)]
mod tests;
