//! Egress to a TAP queue, or a packet socket.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::{Burst, HEAD_LEN};
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use crate::VNET_LEN;
use crate::fd::{BATCH, TapFd};
use crate::sys::Io;

/// The virtio-net header and the private copy of the frame's first bytes, adjacent.
type Start = [u8; VNET_LEN + HEAD_LEN];

/// One TAP queue as a destination of frames.
///
/// A group of frames is written with one system call: header and first bytes from private memory,
/// the rest directly from the sender's. The kernel handles each frame inside that call, so there is
/// nothing to publish: `flush` does nothing.
///
/// Frames at the end of a group that the kernel refuses for lack of room or memory (EAGAIN,
/// ENOBUFS, ENOMEM) are returned as not fitting now. In the middle of a group they are dropped and
/// counted (`drops_no_room`): later frames have been delivered, and must not be overtaken.
pub struct TapEgress {
    fd: TapFd,
    /// Where the header begins in these: one of a packet socket is two bytes shorter.
    header_at: usize,
    starts: Vec<Start>,
    lens: Vec<u32>,
    offloads: Offloads,
    stats: Arc<EgressStats>,
}

impl TapEgress {
    /// Creates egress to `fd`, which accepts `offloads` ([`crate::Tap::offloads_write`]).
    pub fn new(fd: TapFd, offloads: Offloads, stats: Arc<EgressStats>) -> Self {
        let starts = vec![[0; VNET_LEN + HEAD_LEN]; BATCH];
        let header_at = if fd.is_packet() { VNET_LEN - VnetHdr::LEN } else { 0 };
        Self { fd, header_at, starts, lens: Vec::with_capacity(BATCH), offloads, stats }
    }

    /// Writes up to [`BATCH`] frames with one system call; returns the number handled.
    fn write(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.lens.clear();
        for (start, pick) in self.starts.iter_mut().zip(picks) {
            let frame = &burst.frames[usize::from(*pick)];
            let head = burst.head(usize::from(*pick));
            fill(&mut start[self.header_at..], &frame.hdr, frame.len);
            start[VNET_LEN..][..head.len()].copy_from_slice(head);
            self.lens.push(frame.len);
        }
        let mut batch = self.fd.writes();
        for (start, pick) in self.starts.iter().zip(picks) {
            let frame = &burst.frames[usize::from(*pick)];
            let head_len = burst.head(usize::from(*pick)).len();
            batch.push(Seg::of(&start[self.header_at..VNET_LEN + head_len]));
            let mut skip = head_len as u32;
            let mut left = frame.len - skip;
            for seg in burst.segs(frame) {
                let rest = seg.skip(skip).take(left);
                skip -= skip.min(seg.len());
                left -= rest.len();
                batch.push(rest);
            }
            batch.end_frame();
        }
        settle(batch.run(), &self.lens, &self.stats)
    }
}

/// Writes the virtio-net header of a frame of `len` bytes at the start.
fn fill(start: &mut [u8], hdr: &VnetHdr, len: u32) {
    // The kernel refuses a header length beyond the frame; the sender's value is unchecked.
    let hdr_len = hdr.hdr_len.min(u16::try_from(len).unwrap_or(u16::MAX));
    start[..VnetHdr::LEN].copy_from_slice(&VnetHdr { hdr_len, ..*hdr }.bytes());
}

fn no_room(result: Io) -> bool {
    matches!(result, Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM))
}

/// Counts the result of each frame; returns the number handled.
fn settle(results: &[Io], lens: &[u32], stats: &EgressStats) -> Result<usize, Fault> {
    // Frames after the last delivered one were not overtaken.
    let done = results.iter().rposition(|r| !no_room(*r)).map_or(0, |last| last + 1);
    if done < results.len() {
        stats.full.add(1);
    }
    let mut frames = 0;
    let mut bytes = 0;
    for (result, len) in results[..done].iter().zip(lens) {
        match result {
            Ok(_) => {
                frames += 1;
                bytes += u64::from(*len);
            }
            Err(Errno::IO | Errno::NETDOWN) => stats.drops_down.add(1),
            // The sender truncated the frame's memory.
            Err(Errno::FAULT) => stats.drops_bad_addr.add(1),
            Err(Errno::BADFD) => return Err(Fault("the TAP interface was removed".into())),
            // Of a packet socket.
            Err(Errno::NXIO) => return Err(Fault("the interface was removed".into())),
            Err(_) if no_room(*result) => stats.drops_no_room.add(1),
            // EINVAL: the frame is invalid for the kernel (offload request and headers do not
            // agree, shorter than an Ethernet header). It would never be accepted.
            Err(_) => stats.drops_too_long.add(1),
        }
    }
    stats.frames.add(frames);
    stats.bytes.add(bytes);
    Ok(done)
}

impl Egress for TapEgress {
    fn offloads(&self) -> Offloads {
        self.offloads
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.stats.groups.add(1);
        let mut done = 0;
        for part in picks.chunks(BATCH) {
            let n = self.write(burst, part)?;
            done += n;
            if n < part.len() {
                break;
            }
        }
        Ok(done)
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        let len = head.len() as u32 + body.iter().map(|seg| seg.len()).sum::<u32>();
        fill(&mut self.starts[0][self.header_at..], hdr, len);
        let mut batch = self.fd.writes();
        batch.push(Seg::of(&self.starts[0][self.header_at..VNET_LEN]));
        batch.push(Seg::of(head));
        for seg in body {
            batch.push(*seg);
        }
        batch.end_frame();
        Ok(settle(batch.run(), &[len], &self.stats)? == 1)
    }

    fn room(&mut self, _len: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {}

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

impl AsFd for TapEgress {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Io = Err(Errno::AGAIN);

    fn settled(results: &[Io]) -> (Result<usize, Fault>, EgressStats) {
        let stats = EgressStats::default();
        (settle(results, &[100; 8], &stats), stats)
    }

    #[test]
    fn frames_refused_at_the_end_of_a_group_do_not_fit_now() {
        let (done, stats) = settled(&[Ok(112), Ok(112), FULL, Err(Errno::NOBUFS)]);
        assert_eq!(done, Ok(2));
        assert_eq!((stats.frames.get(), stats.full.get(), stats.drops_no_room.get()), (2, 1, 0));
        let (done, stats) = settled(&[FULL]);
        assert_eq!((done, stats.full.get()), (Ok(0), 1));
    }

    #[test]
    fn refused_frame_before_a_delivered_one_is_dropped() {
        let (done, stats) = settled(&[Ok(112), FULL, Ok(112), Err(Errno::NOMEM)]);
        assert_eq!(done, Ok(3));
        assert_eq!((stats.frames.get(), stats.drops_no_room.get()), (2, 1));
        assert_eq!(stats.bytes.get(), 200);
    }

    #[test]
    fn every_refusal_has_its_counter() {
        let (done, stats) = settled(&[Err(Errno::IO), Err(Errno::FAULT), Err(Errno::INVAL)]);
        assert_eq!(done, Ok(3));
        let drops = [&stats.drops_down, &stats.drops_bad_addr, &stats.drops_too_long];
        assert_eq!(drops.map(|c| c.get()), [1; 3]);
        assert_eq!((stats.frames.get(), stats.full.get()), (0, 0));
        assert!(settled(&[Err(Errno::BADFD)]).0.is_err());
        assert_eq!(settled(&[]).0, Ok(0));
    }

    #[test]
    fn header_length_beyond_the_frame_is_cut() {
        let mut start = [0; VNET_LEN + HEAD_LEN];
        let hdr = VnetHdr { hdr_len: 500, ..VnetHdr::NONE };
        fill(&mut start, &hdr, 60);
        assert_eq!(VnetHdr::parse(start.first_chunk().unwrap()).hdr_len, 60);
        fill(&mut start, &hdr, 65_550);
        assert_eq!(VnetHdr::parse(start.first_chunk().unwrap()).hdr_len, 500);
    }
}
