//! Ingress from a queue's AF_XDP socket.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::RecvFlags;
use switch::direct::Direct;
use switch::frame::{BURST_MAX, Burst};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::VnetHdr;

use super::Umem;
use super::ring::{Consumer, Producer};
use crate::framing::FRAME_MIN;

/// A queue's socket as a source of frames.
///
/// Frames are forwarded from where the kernel, or the network card, put them; their chunks then go
/// back to it. A burst makes no system call, except towards a driver that asks for one. With
/// EPOLLET the program must call [`Ingress::burst`] until [`Ingress::arm`] returns true.
pub struct XdpIngress {
    rx: Consumer,
    fill: Producer,
    umem: Umem,
    socket: Arc<OwnedFd>,
    stats: Arc<IngressStats>,
}

impl XdpIngress {
    pub(super) fn new(
        rx: Consumer,
        fill: Producer,
        umem: Umem,
        socket: Arc<OwnedFd>,
        stats: Arc<IngressStats>,
    ) -> Self {
        Self { rx, fill, umem, socket, stats }
    }

    /// Continues where another process stopped.
    pub fn resume(&mut self) {
        self.rx.resync();
        self.fill.resync();
    }

    /// Drops the frames that were received and not delivered.
    pub fn discard(&mut self) {
        loop {
            match self.rx.available(BURST_MAX as u32) {
                0 => break,
                n => self.give_back(n),
            }
        }
    }

    /// Returns the chunks of the first `n` received frames to the kernel.
    fn give_back(&mut self, n: u32) {
        let room = self.fill.room(n);
        assert!(room >= n, "the fill ring has two entries for each chunk");
        for i in 0..n {
            if let Some(chunk) = self.umem.rx_chunk(self.rx.desc(i).addr) {
                self.fill.put_address(chunk);
            }
        }
        self.rx.release(n);
        self.fill.publish();
        if self.fill.needs_wakeup() {
            // The driver had no chunk left and waits for this. An error repeats with the next.
            let _ = rustix::net::recv(&self.socket, &mut [0_u8; 0][..], RecvFlags::DONTWAIT);
        }
    }
}

impl Ingress for XdpIngress {
    fn burst(
        &mut self,
        max: usize,
        _now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let n = self.rx.available(max.min(BURST_MAX) as u32);
        if n == 0 {
            return Ok(0);
        }
        let mut out = std::mem::take(burst).recycle();
        let mut shown = [0; BURST_MAX];
        for i in 0..n {
            let desc = self.rx.desc(i);
            let frame = self.umem.rx(desc.addr, desc.len);
            if let Some(frame) = frame.filter(|frame| frame.len() as usize >= FRAME_MIN) {
                let at = out.frames.len();
                shown[at] = i;
                out.segs.push(frame);
                out.push_at(at, 1, desc.len, VnetHdr::NONE);
            }
        }
        let count = out.frames.len();
        if count > 0 {
            forward(&mut out);
        }
        let left = out.left();
        let done = count - left;
        *burst = out.recycle();
        let end = if left > 0 { shown[done] } else { n };
        for i in 0..end {
            let desc = self.rx.desc(i);
            if self.umem.rx(desc.addr, desc.len).is_none() {
                self.stats.drops_bad_addr.add(1);
            } else if (desc.len as usize) < FRAME_MIN {
                self.stats.drops_runt.add(1);
            } else {
                self.stats.bytes.add(desc.len.into());
            }
        }
        self.stats.frames.add(done as u64);
        self.stats.bursts.add(1);
        self.give_back(end);
        Ok(if left > 0 { max.max(n as usize) } else { n as usize })
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        // The kernel notifies of each frame: nothing is requested.
        self.rx.available(1) == 0
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}
