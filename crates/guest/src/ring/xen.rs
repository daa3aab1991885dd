//! Front halves of Xen rings for a guest's two directions.
//!
//! On tx, the 12-byte header is converted to flags and extra infos; on rx, it is made from them in
//! private memory, because a received page holds only the frame.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ::ring::xen::{Armed, PAGE_LEN, RxPacket, RxSlot};
use shm::{GuestMemory, Seg};
use switch::frame::HEAD_LEN;
use switch::vnet::VnetHdr;
use xen_netif::front::{RxQueue, TxQueue, needs_head, vnet_hdr};
use xen_netif::host;

use super::{Buffers, HDR_LEN, Malformed};

/// Longest frame that a tx ring can describe.
pub const FRAME_MAX: u32 = 65_535;
/// Most frames per poll.
const FRAMES_MAX: usize = 64;
/// Most segments of a frame: its header, and those of a packet.
const SEGS_MAX: usize = 1 + ::ring::xen::SLOTS_MAX;

/// A ring's notifications. Two rings may share them.
pub struct Channel {
    channel: Arc<host::Channel>,
    fd: Arc<OwnedFd>,
}

impl Channel {
    pub(crate) fn new(channel: Arc<host::Channel>) -> Self {
        let fd = channel.fd();
        Self { channel, fd }
    }

    /// Readable when the switch called.
    pub fn call(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads a pending call; several count as one.
    pub fn take_call(&self) -> u64 {
        u64::from(self.channel.ack())
    }

    fn kick(&self, needed: bool) -> bool {
        if needed {
            self.channel.notify();
        }
        needed
    }
}

/// The tx ring.
pub struct XenTx {
    pub queue: TxQueue,
    pub channel: Channel,
}

impl XenTx {
    /// Length of the longest frame in one of `buffers` that the ring accepts.
    pub fn longest(&self, buffers: &Buffers) -> u32 {
        let first = u32::from(buffers.offset) + HDR_LEN as u32;
        if self.queue.has_sg() { FRAME_MAX } else { u32::from(PAGE_LEN) - first }
    }

    /// Sends the first `len` bytes of buffer `i`, which begin with the header; false: refused.
    pub fn send(&mut self, memory: &GuestMemory, buffers: &Buffers, i: u16, len: u32) -> bool {
        let mut header = [0; VnetHdr::LEN];
        for piece in buffers.read(memory, i, header.len() as u32) {
            piece.read(&mut header);
        }
        let hdr = VnetHdr::parse(&header);
        let offset = u16::from(buffers.offset) + HDR_LEN as u16;
        self.queue.send(i, offset, len.saturating_sub(HDR_LEN as u32), &hdr).is_ok()
    }

    /// Notifies the switch if it enabled events, or `always`; returns whether it did.
    pub fn kick(&mut self, always: bool) -> bool {
        self.channel.kick(self.queue.notify_needed() || always)
    }
}

/// The rx ring.
pub struct XenRx {
    pub queue: RxQueue,
    pub channel: Channel,
    packet: RxPacket,
    /// Headers of the frames being passed on.
    headers: Box<[[u8; HDR_LEN]]>,
}

impl XenRx {
    pub fn new(queue: RxQueue, channel: Channel) -> Self {
        let headers = [[0; HDR_LEN]; FRAMES_MAX].into();
        Self { queue, channel, packet: RxPacket::new(), headers }
    }

    /// Notifies the switch if it enabled events, or `always`; returns whether it did.
    pub fn kick(&mut self, always: bool) -> bool {
        self.channel.kick(self.queue.notify_needed() || always)
    }

    /// Enables events with smart poll, before a sleep. Returns false if either ring has work.
    pub fn stop_polling(&self, tx: &XenTx) -> bool {
        self.queue.stop_polling(&tx.queue) == Armed::Armed
    }

    /// Takes frames and passes each to `show`, header first; then adds their pages to `done`.
    pub fn receive<'a>(
        &'a mut self,
        max: usize,
        memory: &'a GuestMemory,
        done: &mut Vec<u16>,
        kicks: &mut u64,
        mut show: impl FnMut(&[Seg<'a>]),
    ) -> Result<usize, Malformed> {
        let Self { queue, channel, packet, headers } = self;
        let mut segs = [Seg::EMPTY; SEGS_MAX];
        let mut frames = 0;
        // Dropped frames count, too: a poll is bounded.
        for header in headers.iter_mut().take(max) {
            if !queue.take(packet, FRAMES_MAX)? {
                break;
            }
            let Some(hdr) = hdr_of(packet, memory) else {
                queue.reject(packet);
                continue;
            };
            header[..VnetHdr::LEN].copy_from_slice(&hdr.bytes());
            header[VnetHdr::LEN..].copy_from_slice(&1_u16.to_le_bytes());
            segs[0] = Seg::of(header);
            for (to, slot) in segs[1..].iter_mut().zip(&packet.slots) {
                *to = seg(memory, slot);
            }
            show(&segs[..=packet.slots.len()]);
            done.extend(packet.slots.iter().map(|slot| slot.request.id));
            frames += 1;
        }
        // No other code publishes these pages, because they belong to no frame.
        if queue.has_reposted() {
            queue.publish();
            *kicks += u64::from(channel.kick(queue.notify_needed()));
        }
        Ok(frames)
    }
}

/// The bytes of a slot; the ring has checked that they are in its page, and the page is ours.
fn seg<'m>(memory: &'m GuestMemory, slot: &RxSlot) -> Seg<'m> {
    if slot.len == 0 {
        return Seg::EMPTY;
    }
    let page = u64::from(slot.request.id) * u64::from(PAGE_LEN);
    let seg = memory.seg(page + u64::from(slot.offset), slot.len.into(), &mut 0);
    seg.expect("pages offered lie in our own memory")
}

/// The header of a packet, by a copy of its first bytes; `None`: invalid.
fn hdr_of(packet: &RxPacket, memory: &GuestMemory) -> Option<VnetHdr> {
    if !needs_head(packet) {
        return vnet_hdr(packet, &[]);
    }
    let (mut head, mut at) = ([0; HEAD_LEN], 0);
    for slot in &packet.slots {
        at += seg(memory, slot).read(&mut head[at..]);
    }
    vnet_hdr(packet, &head[..at])
}
