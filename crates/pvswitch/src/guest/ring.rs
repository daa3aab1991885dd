//! What both directions of a queue pair have: a ring, its two notifications, and buffers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ring::virtq::{Armed, Buf, DriverQueue};
use shm::{GuestMemory, Seg, SegMut};
use vhost_user::frontend::Queue;
use vhost_user::sys;

use super::HDR_LEN;

/// With `header=apart`, where the frame begins: on a cache line of its own.
const FRAME_APART: u64 = 64;

/// How the buffers of one direction lie in memory, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Address of the first.
    pub base: u64,
    /// Distance from one to the next, in bytes.
    pub stride: u64,
    /// How many.
    pub count: u16,
    /// Whether the header has a place, and a descriptor, of its own.
    pub apart: bool,
    /// Bytes left free before the header, or apart from it before the frame.
    pub offset: u8,
}

impl Buffers {
    /// Bytes that buffer `i` holds with its header.
    pub fn room(&self) -> u32 {
        let frame = if self.apart { FRAME_APART - HDR_LEN as u64 } else { 0 };
        (self.stride - frame - u64::from(self.offset)) as u32
    }

    /// The first `len` bytes of buffer `i`, header included, as (address, length): one piece, or
    /// with the header apart two.
    fn pieces(&self, i: u16, len: u32) -> ([(u64, u32); 2], usize) {
        let at = self.base + u64::from(i) * self.stride;
        let offset = u64::from(self.offset);
        if !self.apart {
            return ([(at + offset, len), (0, 0)], 1);
        }
        let header = len.min(HDR_LEN as u32);
        let frame = (at + FRAME_APART + offset, len - header);
        ([(at, header), frame], if frame.1 > 0 { 2 } else { 1 })
    }
}

/// One direction.
pub struct Ring {
    pub(super) driver: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    memory: Arc<GuestMemory>,
    buffers: Buffers,
    /// Which buffer is behind a chain id.
    buffer_of: Vec<u16>,
    /// Kicks made.
    pub kicks: u64,
    /// Calls the switch made, as far as we have seen them.
    pub calls: u64,
}

impl Ring {
    pub(super) fn new(queue: Queue, memory: Arc<GuestMemory>, buffers: Buffers) -> Self {
        let mut driver = queue.driver;
        driver.disarm();
        let buffer_of = vec![0; usize::from(driver.size())];
        let (kick, call) = (queue.kick, queue.call);
        Self { driver, kick, call, memory, buffers, buffer_of, kicks: 0, calls: 0 }
    }

    /// Number of buffers: as many as the ring has room for chains.
    pub fn size(&self) -> u16 {
        self.buffers.count
    }

    /// Bytes a buffer holds with its header.
    pub fn room(&self) -> u32 {
        self.buffers.room()
    }

    /// Which buffer is behind the chain of this id.
    pub(super) fn buffer(&self, id: u16) -> u16 {
        self.buffer_of[usize::from(id)]
    }

    /// Makes a chain of the first `len` bytes of buffer `i`.
    pub(super) fn add(&mut self, i: u16, len: u32, write: bool) {
        let (pieces, n) = self.buffers.pieces(i, len);
        let bufs = pieces.map(|(addr, len)| Buf { addr, len, write });
        let id = self.driver.add(&bufs[..n]).expect("as many descriptors as buffers");
        self.buffer_of[usize::from(id)] = i;
    }

    /// The first `len` bytes of buffer `i` to write to, header first, in one or two segments.
    pub(super) fn to_write(&self, i: u16, len: u32) -> impl Iterator<Item = SegMut<'_>> {
        let (pieces, n) = self.buffers.pieces(i, len);
        pieces.into_iter().take(n).map(|(at, len)| {
            let seg = self.memory.seg_mut(at, len, &mut 0);
            seg.expect("buffers lie in our own memory")
        })
    }

    /// The first `len` bytes of buffer `i`, header first, in one or two segments.
    pub(super) fn to_read(&self, i: u16, len: u32) -> impl Iterator<Item = Seg<'_>> {
        let (pieces, n) = self.buffers.pieces(i, len.min(self.room()));
        pieces.into_iter().take(n).map(|(at, len)| {
            let seg = self.memory.seg(at, len, &mut 0);
            seg.expect("buffers lie in our own memory")
        })
    }

    /// Kicks if the switch wants it for what was published since this was last asked.
    pub(super) fn kick(&mut self) {
        if self.driver.kick_needed() {
            self.kicks += 1;
            sys::signal(self.kick.as_fd());
        }
    }

    /// Whether there are used buffers. One load.
    pub fn has_used(&self) -> bool {
        self.driver.has_used()
    }

    /// Before sleeping: asks for a call. False: there is something by now.
    pub fn arm(&mut self) -> bool {
        self.driver.arm() == Armed::Armed
    }

    /// Readable when the switch called.
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Takes note of the calls made, and whether there were any.
    pub fn take_calls(&mut self) -> bool {
        let mut count = [0; 8];
        let calls = match rustix::io::read(&self.call, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        };
        self.calls += calls;
        calls > 0
    }
}
