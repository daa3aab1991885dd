//! Ingress from a datagram socket.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::{Burst, FRAME_LEN_MAX};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::VnetHdr;

use super::BATCH;
use super::sys::{self, Datagram};
use crate::framing::FRAME_MIN;
use crate::stream::{End, Socket};

/// Distance between buffers: the longest frame, and a remainder that keeps them cache-aligned.
const STRIDE: usize = (FRAME_LEN_MAX as usize).next_multiple_of(64);

/// A datagram socket as a source of frames.
///
/// Datagrams are received several per system call. With EPOLLET the program must call
/// [`Ingress::burst`] until [`Ingress::arm`] returns true.
pub struct DgramIngress {
    link: Option<Link>,
    stats: Arc<IngressStats>,
}

struct Link {
    socket: Socket,
    buffers: Vec<u8>,
    /// Datagrams that were received and not forwarded: those of `all` in this range.
    all: [Datagram; BATCH],
    first: usize,
    count: usize,
    end: Option<End>,
    /// The last system call found no more.
    is_empty: bool,
}

impl From<Arc<IngressStats>> for DgramIngress {
    fn from(stats: Arc<IngressStats>) -> Self {
        Self { link: None, stats }
    }
}

impl DgramIngress {
    /// Receives from `socket` from now on.
    pub fn connect(&mut self, socket: Socket) {
        self.link = Some(Link {
            socket,
            // Zeroed pages use memory only when they are written.
            buffers: vec![0; STRIDE * BATCH],
            all: [Datagram::default(); BATCH],
            first: 0,
            count: 0,
            end: None,
            is_empty: false,
        });
    }

    /// Stops receiving; returns why the queue ended, if it did by itself.
    pub fn disconnect(&mut self) -> Option<End> {
        self.link.take()?.end
    }

    /// Frames that were received and not forwarded, for another process.
    pub fn unsent(&self) -> Vec<Vec<u8>> {
        let Some(link) = &self.link else { return Vec::new() };
        (link.first..link.count).filter_map(|i| link.frame(i)).map(<[u8]>::to_vec).collect()
    }

    /// Takes over frames that another process received, before any of our own.
    pub fn restore_unsent(&mut self, frames: &[Vec<u8>]) {
        let Some(link) = &mut self.link else { return };
        let legal = frames.iter().filter(|frame| frame.len() <= STRIDE);
        for (i, frame) in legal.take(BATCH).enumerate() {
            link.buffers[i * STRIDE..][..frame.len()].copy_from_slice(frame);
            link.all[i] = Datagram { len: frame.len(), is_cut: false };
            link.count = i + 1;
        }
    }
}

impl Link {
    fn receive(&mut self) {
        (self.first, self.count) = (0, 0);
        let mut fds: Vec<OwnedFd> = Vec::new();
        let (buffers, all) = (&mut self.buffers, &mut self.all);
        let got = sys::receive((*self.socket).as_fd(), buffers, STRIDE, all, &mut fds);
        match got {
            Ok(count) => (self.count, self.is_empty) = (count, false),
            Err(Errno::AGAIN) => self.is_empty = true,
            Err(error) => self.end = Some(End::Os(error.into())),
        }
        if !fds.is_empty() {
            self.end = Some(End::Descriptors(fds));
        }
    }

    /// A datagram that is a frame.
    fn frame(&self, i: usize) -> Option<&[u8]> {
        let Datagram { len, is_cut } = self.all[i];
        let is_frame = !is_cut && (FRAME_MIN..=FRAME_LEN_MAX as usize).contains(&len);
        is_frame.then(|| &self.buffers[i * STRIDE..][..len])
    }
}

impl Ingress for DgramIngress {
    fn burst(
        &mut self,
        max: usize,
        _now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Self { link: Some(link), stats } = self else { return Ok(0) };
        if link.first == link.count && link.end.is_none() {
            link.receive();
        }
        let range = link.first..link.count.min(link.first + max);
        if range.is_empty() {
            return match &link.end {
                Some(end) => Err(Fault(end.to_string())),
                None => Ok(0),
            };
        }
        let mut out = std::mem::take(burst).recycle();
        let mut shown = [0; BATCH];
        for i in range.clone() {
            if let Some(frame) = link.frame(i) {
                let n = out.frames.len();
                shown[n] = i;
                out.segs.push(Seg::of(frame));
                out.push_at(n, 1, frame.len() as u32, VnetHdr::NONE);
            }
        }
        let count = out.frames.len();
        if count > 0 {
            forward(&mut out);
        }
        let left = out.left();
        *burst = out.recycle();
        let done = count - left;
        let end = if left > 0 { shown[done] } else { range.end };
        for Datagram { len, is_cut } in &link.all[range.start..end] {
            if *len < FRAME_MIN {
                stats.drops_runt.add(1);
            } else if *is_cut || *len > FRAME_LEN_MAX as usize {
                stats.drops_too_long.add(1);
            } else {
                stats.bytes.add(*len as u64);
            }
        }
        stats.frames.add(done as u64);
        stats.bursts.add(1);
        link.first = end;
        Ok(if left > 0 { max.max(range.len()) } else { range.len() })
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        let Some(link) = &mut self.link else { return true };
        if link.first == link.count && link.end.is_none() && !link.is_empty {
            link.receive();
        }
        // The next notification is of what comes after the queue was empty.
        let nothing = link.first == link.count && link.end.is_none();
        link.is_empty &= !nothing;
        nothing
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}
