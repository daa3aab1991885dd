//! Ingress from a TAP queue, or a packet socket.

mod buffers;
mod direct;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shm::{Private, Seg, SegMut};
use switch::direct::Direct;
use switch::frame::{Burst, FRAME_LEN_MAX, GSO_LEN_MAX};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::{GSO_NONE, Offloads, VnetHdr};

use self::buffers::Buffers;
use crate::VNET_LEN;
use crate::fd::{BATCH, TapFd};

/// Number of buffers that frames are read into.
const SLOTS: usize = BATCH;
const PAGE: usize = 4096;
/// Distance between buffers: the longest frame and its header, the shift of [`start`], and a
/// remainder that keeps buffers page-aligned.
const STRIDE: usize = 18 * PAGE;
/// Bytes read into each buffer. One more than legal, to detect a truncated frame.
const READ_LEN: usize = VNET_LEN + GSO_LEN_MAX as usize + 1;
/// Bytes of a burst after which no more is read: about half of a core's private cache.
const BURST_BYTES: usize = 512 * 1024;
/// Shortest Ethernet frame accepted: its header.
const ETH_LEN: usize = 14;

const _: () = assert!(start(SLOTS - 1, false) + READ_LEN <= STRIDE);
const _: () = assert!(start(0, true) + READ_LEN <= STRIDE);

/// Offset of the virtio-net header in buffer `slot`. The frame after it is aligned to a cache line,
/// and frames in neighbouring buffers do not share cache sets. `long` frames are aligned to a page:
/// granted pages are filled from the start, and a copy from a single page of ours needs one
/// hypervisor operation in place of two.
const fn start(slot: usize, long: bool) -> usize {
    if long { PAGE - VNET_LEN } else { 64 - VNET_LEN + slot % 16 * 128 }
}

/// A frame in a staging buffer.
struct Taken {
    slot: usize,
    /// Offset in its buffer.
    at: usize,
    len: u32,
    hdr: VnetHdr,
}

/// One TAP queue as a source of frames.
///
/// Frames are read into private buffers, several per system call. The buffers use memory only up to
/// the length of their frames (small frames: a page each), and while few frames arrive the same few
/// buffers are used. An idle poll costs one plain read.
///
/// Nothing needs arming: the program keeps the descriptor ([`AsFd`]) in its epoll set. Both epoll
/// modes work; with EPOLLET it must call [`Ingress::burst`] until [`Ingress::arm`] returns true.
pub struct TapIngress {
    fd: TapFd,
    buffers: Buffers,
    /// One bit for each free buffer.
    free: u64,
    /// Frames in buffers, oldest first: between bursts those that `read_into` could not deliver.
    taken: Vec<Taken>,
    /// The number of these, at the end, that the last burst left: they count as new.
    left: usize,
    offloads: Offloads,
    /// Offloads requested from the kernel last; frames already queued may still need more.
    requested: Offloads,
    direct: direct::State,
    /// Frames that `read_into` read since the last burst; `None`: it did not run.
    passed: Option<usize>,
    stats: Arc<IngressStats>,
    /// Frames to request after the first one: the mean of the recent batches.
    more: usize,
    /// Most frames to read in one burst, so that large ones do not leave the cache.
    burst_frames: usize,
    /// Whether the last batch's frames were longer than a page on average.
    long: bool,
    /// The last read found the queue empty.
    empty: bool,
}

impl TapIngress {
    /// Creates ingress from `fd`, whose sender may request `offloads`
    /// ([`crate::Tap::offloads_read`]).
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(fd: TapFd, offloads: Offloads, stats: Arc<IngressStats>) -> io::Result<Self> {
        Ok(Self {
            fd,
            buffers: Buffers::new()?,
            free: u64::MAX,
            taken: Vec::with_capacity(SLOTS),
            left: 0,
            offloads,
            requested: offloads,
            direct: direct::State::new(),
            passed: None,
            stats,
            more: 1,
            burst_frames: BATCH,
            long: false,
            empty: false,
        })
    }

    /// Sets the `offloads` requested from the kernel ([`crate::request_offloads`]). Frames are read
    /// directly into a receiver's buffers only if it accepts all of these.
    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.requested = offloads;
    }

    /// Reads into `memory` from now on, as far as it suffices: the first few buffers, used while
    /// few frames arrive, take [`TapIngress::BUFFER_LEN`] bytes of it each.
    pub fn set_memory(&mut self, memory: Private) {
        self.buffers.set_memory(memory);
    }

    /// Copies of the frames that were read and not delivered yet, for another process.
    pub fn unsent(&self) -> Vec<(VnetHdr, Vec<u8>)> {
        let copy = |taken: &Taken| {
            let frame = &self.buffers.of(taken.slot)[taken.at..][..taken.len as usize];
            (taken.hdr, frame.to_vec())
        };
        self.taken.iter().map(copy).collect()
    }

    /// Takes over frames that another process read, before any of our own. Returns the number
    /// accepted: as many as there are buffers, and none longer than legal.
    pub fn restore_unsent(&mut self, frames: &[(VnetHdr, Vec<u8>)]) -> usize {
        let slots = (0..SLOTS).filter(|slot| self.free >> slot & 1 != 0).collect::<Vec<_>>();
        let legal = |(_, frame): &&(VnetHdr, Vec<u8>)| {
            (ETH_LEN..=GSO_LEN_MAX as usize).contains(&frame.len())
        };
        for (slot, (hdr, frame)) in slots.into_iter().zip(frames.iter().filter(legal)) {
            let at = start(slot, false) + VNET_LEN;
            self.buffers.of_mut(slot)[at..][..frame.len()].copy_from_slice(frame);
            self.free &= !(1 << slot);
            self.taken.push(Taken { slot, at, len: frame.len() as u32, hdr: *hdr });
        }
        self.left = self.taken.len();
        self.left
    }

    /// Drops the frames that were read and not delivered.
    pub fn discard(&mut self) {
        for taken in self.taken.drain(..) {
            self.free |= 1 << taken.slot;
        }
        (self.left, self.passed) = (0, None);
    }

    /// Bytes of one buffer.
    pub const BUFFER_LEN: usize = STRIDE;

    /// Reads up to `room` frames. Returns the number read, invalid ones included.
    ///
    /// An empty read costs half of a successful one, so a batch is read only after one frame, of
    /// about the recent number.
    fn read(&mut self, room: usize) -> Result<usize, Fault> {
        let room = room.min(self.burst_frames);
        let mut came = 0;
        let mut more = self.more;
        if self.taken.is_empty() {
            self.buffers.settle();
        }
        while came < room && self.free != 0 {
            if self.read_batch(1)? == 0 {
                break;
            }
            came += 1;
            let n = more.min(room - came).min(self.free.count_ones() as usize);
            let got = if n > 0 { self.read_batch(n)? } else { 0 };
            came += got;
            let bytes: usize = self.taken.iter().map(|taken| taken.len as usize).sum();
            if got < n || bytes > BURST_BYTES {
                break;
            }
            more = n * 2;
        }
        if came > 0 {
            self.more = (self.more + came - 1).div_ceil(2).max(1);
        }
        Ok(came)
    }

    /// Reads up to `n` frames, `n` > 0, with one system call, into the first free buffers.
    fn read_batch(&mut self, n: usize) -> Result<usize, Fault> {
        let (free, long, is_packet) = (self.free, self.long, self.fd.is_packet());
        let is_free = |slot: &usize| free >> slot & 1 != 0;
        let mut batch = self.fd.reads();
        let slots = self.buffers.iter_mut();
        for (slot, buffer) in slots.filter(|(slot, _)| is_free(slot)).take(n) {
            batch.push(SegMut::of(&mut buffer[start(slot, long)..][..READ_LEN]));
            batch.end_frame();
        }
        let mut got = 0;
        let (mut bytes, mut longest) = (0, 0);
        for (slot, result) in (0..SLOTS).filter(is_free).zip(batch.run()) {
            let len = match result {
                Ok(len) => *len as usize,
                Err(Errno::AGAIN) => {
                    // The queue may not be empty: a frame may have arrived during the batch.
                    self.empty = true;
                    continue;
                }
                Err(Errno::BADFD) => return Err(Fault("the TAP interface was removed".into())),
                // A GSO type that the kernel has no virtio-net header for, as of SCTP: it drops the
                // frame in place of delivering it. The others of the batch were not tried.
                Err(Errno::INVAL) if is_packet => {
                    self.stats.drops_bad_hdr.add(1);
                    got += 1;
                    self.empty = false;
                    break;
                }
                // Of a packet socket.
                Err(Errno::NETDOWN) => return Err(Fault("the interface is down".into())),
                Err(error) => return Err(Fault(format!("reading the interface: {error}"))),
            };
            got += 1;
            self.empty = false;
            let at = start(slot, long);
            let head = &self.buffers.of(slot)[at..][..VNET_LEN];
            if let Some((len, hdr)) = check(head, len, self.offloads, &self.stats) {
                bytes += len as usize;
                longest = longest.max(len);
                self.free &= !(1 << slot);
                let at = at + VNET_LEN;
                self.taken.push(Taken { slot, at, len, hdr });
            }
        }
        self.learn(got, bytes, longest);
        Ok(got)
    }

    /// Updates the averages after a batch of `got` frames with `bytes` bytes in total.
    fn learn(&mut self, got: usize, bytes: usize, longest: u32) {
        if let Some(mean) = bytes.checked_div(got) {
            self.long = mean > PAGE;
            self.burst_frames = (BURST_BYTES / mean.max(1)).clamp(4, BATCH);
            self.direct.expect(longest);
        }
    }
}

/// Length and checked header of a frame of which `read` bytes were read, the virtio-net header
/// `hdr` included; `None`: dropped and counted.
fn check(hdr: &[u8], read: usize, may: Offloads, stats: &IngressStats) -> Option<(u32, VnetHdr)> {
    if read < VNET_LEN + ETH_LEN {
        stats.drops_runt.add(1);
        return None;
    }
    let len = (read - VNET_LEN) as u32;
    let raw = VnetHdr::parse(hdr.first_chunk().expect("VNET_LEN bytes"));
    let Ok(hdr) = raw.check(len, may) else {
        stats.drops_bad_hdr.add(1);
        return None;
    };
    let len_max = if hdr.gso_type == GSO_NONE { FRAME_LEN_MAX } else { GSO_LEN_MAX };
    if len > len_max {
        stats.drops_too_long.add(1);
        return None;
    }
    Some((len, hdr))
}

impl Ingress for TapIngress {
    fn burst(
        &mut self,
        max: usize,
        _now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let came = match self.passed.take() {
            Some(passed) => passed,
            None => self.read(max.saturating_sub(self.left))?,
        };
        let shown = self.taken.len();
        if shown == 0 {
            self.stats.bursts.add(u64::from(came > 0));
            return Ok(came);
        }
        let mut out = std::mem::take(burst).recycle();
        let mut bytes = 0;
        for (i, taken) in self.taken.iter().enumerate() {
            let buffer = self.buffers.of(taken.slot);
            out.segs.push(Seg::of(&buffer[taken.at..][..taken.len as usize]));
            out.push_at(i, 1, taken.len, taken.hdr);
        }
        forward(&mut out);
        self.left = out.left();
        let end = shown - self.left;
        *burst = out.recycle();
        for taken in self.taken.drain(..end) {
            self.free |= 1 << taken.slot;
            bytes += u64::from(taken.len);
        }
        self.stats.frames.add(end as u64);
        self.stats.bytes.add(bytes);
        self.stats.bursts.add(1);
        Ok(if self.left > 0 { max.max(shown) } else { shown.max(came) })
    }

    fn supports_direct(&self) -> bool {
        // The tag of a frame from a packet socket is inserted, which needs its bytes.
        self.taken.is_empty() && !self.direct.expects_small() && !self.fd.is_packet()
    }

    fn read_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        if !to.takes().cover(&self.requested) {
            return Ok(0);
        }
        self.read_direct(max, to)
    }

    fn arm(&mut self) -> bool {
        self.empty && self.left == 0
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}

impl AsFd for TapIngress {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switch::vnet::{GSO_TCPV4, NEEDS_CSUM};

    pub(super) const TSO: VnetHdr = VnetHdr {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };

    fn checked(hdr: VnetHdr, frame_len: usize) -> (Option<u32>, IngressStats) {
        let mut buffer = hdr.bytes().to_vec();
        buffer.resize(VNET_LEN + frame_len, 0);
        let stats = IngressStats::default();
        let read = buffer.len();
        (check(&buffer[..VNET_LEN], read, Offloads::ALL, &stats).map(|(len, _)| len), stats)
    }

    #[test]
    fn frame_shorter_than_its_headers_is_a_runt() {
        let (len, stats) = checked(VnetHdr::NONE, 13);
        assert_eq!((len, stats.drops_runt.get()), (None, 1));
        let stats = IngressStats::default();
        assert!(check(&[0; VNET_LEN], 11, Offloads::ALL, &stats).is_none());
        assert_eq!(stats.drops_runt.get(), 1);
        assert_eq!(checked(VnetHdr::NONE, 14).0, Some(14));
    }

    #[test]
    fn frame_longer_than_any_link_allows_is_dropped_unless_it_is_gso() {
        let jumbo = FRAME_LEN_MAX as usize;
        assert_eq!(checked(VnetHdr::NONE, jumbo).0, Some(FRAME_LEN_MAX));
        let (len, stats) = checked(VnetHdr::NONE, jumbo + 1);
        assert_eq!((len, stats.drops_too_long.get()), (None, 1));
        assert_eq!(checked(TSO, GSO_LEN_MAX as usize).0, Some(GSO_LEN_MAX));
        let (len, stats) = checked(TSO, READ_LEN - VNET_LEN);
        assert_eq!((len, stats.drops_too_long.get()), (None, 1));
    }

    #[test]
    fn invalid_header_is_dropped() {
        let (len, stats) = checked(VnetHdr { gso_size: 0, ..TSO }, 3000);
        assert_eq!((len, stats.drops_bad_hdr.get()), (None, 1));
        let (len, stats) = checked(VnetHdr { csum_start: 2990, ..TSO }, 3000);
        assert_eq!((len, stats.drops_bad_hdr.get()), (None, 1));
    }
}
