//! Common parts of both directions of a queue pair: ring, notifications, and buffers.

mod xen;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ::ring::virtq::{Armed, Buf, DriverQueue, Used};
use shm::{GuestMemory, Seg, SegMut};
use vhost_user::frontend::Queue;

pub use self::xen::{Channel, FRAME_MAX, XenRx, XenTx};

/// Length of the header before each frame: virtio 1.x, with `num_buffers`. Buffers have it on every
/// ring; for Xen rings it is converted to and from flags and extra infos.
pub const HDR_LEN: usize = 12;

/// The switch violated the ring protocol; the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// On a virtqueue.
    #[error(transparent)]
    Virtio(#[from] ::ring::virtq::Malformed),
    /// On a Xen ring.
    #[error(transparent)]
    Xen(#[from] ::ring::xen::Malformed),
}

/// Offset of the frame with `header=apart`: on its own cache line.
const FRAME_APART: u64 = 64;

/// Layout of the buffers of one direction in memory.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Address of the first.
    pub base: u64,
    /// Distance from one to the next, in bytes.
    pub stride: u64,
    /// Number of buffers.
    pub count: u16,
    /// Whether the header has its own descriptor.
    pub apart: bool,
    /// Bytes left unused before the header; with `apart`, before the frame.
    pub offset: u8,
}

impl Buffers {
    /// Capacity of a buffer in bytes, including the header.
    pub fn room(&self) -> u32 {
        let frame = if self.apart { FRAME_APART - HDR_LEN as u64 } else { 0 };
        (self.stride - frame - u64::from(self.offset)) as u32
    }

    /// Address of buffer `i`, which is in one piece.
    #[inline]
    fn at(&self, i: u16) -> u64 {
        self.base + u64::from(i) * self.stride + u64::from(self.offset)
    }

    /// The first `len` bytes of buffer `i`, including the header, as (address, length): one piece,
    /// or two with `apart`.
    #[inline]
    fn pieces(&self, i: u16, len: u32) -> ([(u64, u32); 2], usize) {
        if !self.apart {
            return ([(self.at(i), len), (0, 0)], 1);
        }
        let at = self.base + u64::from(i) * self.stride;
        let offset = u64::from(self.offset);
        let header = len.min(HDR_LEN as u32);
        let frame = (at + FRAME_APART + offset, len - header);
        ([(at, header), frame], if frame.1 > 0 { 2 } else { 1 })
    }

    /// The first `len` bytes of buffer `i` in `memory`, header first, in one or two segments.
    pub(super) fn read<'m>(
        &self,
        memory: &'m GuestMemory,
        i: u16,
        len: u32,
    ) -> impl Iterator<Item = Seg<'m>> + use<'m> {
        let (pieces, n) = self.pieces(i, len.min(self.room()));
        pieces.into_iter().take(n).map(|(at, len)| {
            let seg = memory.seg(at, len, &mut 0);
            seg.expect("buffers lie in our own memory")
        })
    }
}

/// One direction.
pub struct Ring {
    pub(super) half: Half,
    memory: Arc<GuestMemory>,
    buffers: Buffers,
    /// Xen rings: kick even if the switch suppresses kicks.
    always_notifies: bool,
    /// Kicks made.
    pub kicks: u64,
    /// Calls received from the switch.
    pub calls: u64,
}

/// The ring itself.
pub enum Half {
    /// A virtqueue.
    Virtio(Virtq),
    /// A Xen tx ring.
    XenTx(XenTx),
    /// A Xen rx ring.
    XenRx(XenRx),
}

/// A virtqueue's driver half, and its notifications.
pub struct Virtq {
    driver: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    /// The buffer of each chain id.
    buffer_of: Vec<u16>,
    used: Vec<Used>,
}

impl Virtq {
    /// Takes used chains; the `id` returned is the buffer's, because the chain's is free again.
    pub fn take_used(&mut self, max: usize) -> Result<&[Used], Malformed> {
        self.used.clear();
        self.driver.take_used(max, &mut self.used)?;
        for used in &mut self.used {
            used.id = self.buffer_of[usize::from(used.id)];
        }
        Ok(&self.used)
    }
}

impl Ring {
    pub(super) fn virtio(queue: Queue, memory: Arc<GuestMemory>, buffers: Buffers) -> Self {
        let mut driver = queue.driver;
        driver.disarm();
        let buffer_of = vec![0; usize::from(driver.size())];
        let used = Vec::with_capacity(usize::from(driver.size()));
        let (kick, call) = (queue.kick, queue.call);
        let half = Half::Virtio(Virtq { driver, kick, call, buffer_of, used });
        Self { half, memory, buffers, always_notifies: false, kicks: 0, calls: 0 }
    }

    pub(super) fn xen(half: Half, memory: Arc<GuestMemory>, buffers: Buffers) -> Self {
        Self { half, memory, buffers, always_notifies: false, kicks: 0, calls: 0 }
    }

    /// Frames lost on the ring: sent and answered with an error, or received and invalid.
    pub fn lost(&self) -> u64 {
        match &self.half {
            Half::Virtio(_) => 0,
            Half::XenTx(tx) => tx.queue.errors + tx.queue.dropped,
            Half::XenRx(rx) => rx.queue.drops.total(),
        }
    }

    /// Number of buffers.
    pub fn size(&self) -> u16 {
        self.buffers.count
    }

    /// Capacity of a buffer in bytes, including the header.
    pub fn room(&self) -> u32 {
        self.buffers.room()
    }

    /// Bytes of the longest frame that can be sent, without its header.
    pub fn longest(&self) -> u32 {
        let room = self.room() - HDR_LEN as u32;
        match &self.half {
            Half::XenTx(tx) => tx.longest(&self.buffers).min(room),
            Half::Virtio(_) | Half::XenRx(_) => room,
        }
    }

    /// Number of buffers that the switch has from the start.
    pub(super) fn offered(&self) -> u16 {
        match &self.half {
            Half::XenRx(_) => self.size(),
            Half::Virtio(_) | Half::XenTx(_) => 0,
        }
    }

    /// Number of frames of any length for which the ring has room.
    pub(super) fn frames_free(&self) -> usize {
        match &self.half {
            // There are as many descriptors as buffers, or a queue for the frames of others.
            Half::Virtio(_) | Half::XenRx(_) => usize::MAX,
            Half::XenTx(tx) => tx.queue.frames_free(),
        }
    }

    /// Adds the first `len` bytes of buffer `i` to the ring, for the switch to read, or with
    /// `write` to write. Returns false, without effect, if the switch does not accept such a frame.
    pub(super) fn add(&mut self, i: u16, len: u32, write: bool) -> bool {
        let (pieces, n) = self.buffers.pieces(i, len);
        match &mut self.half {
            Half::Virtio(virtq) => {
                let bufs = pieces.map(|(addr, len)| Buf { addr, len, write });
                let id = virtq.driver.add(&bufs[..n]).expect("as many descriptors as buffers");
                virtq.buffer_of[usize::from(id)] = i;
                true
            }
            Half::XenTx(tx) => tx.send(&self.memory, &self.buffers, i, len),
            Half::XenRx(rx) => {
                rx.queue.post(i);
                true
            }
        }
    }

    /// Adds the first `len` bytes of each buffer in `list`, which it empties. Panics if the switch
    /// does not accept one: it accepts all for writing, and plain frames that are not too long.
    pub(super) fn add_all(&mut self, list: &mut Vec<u16>, len: u32, write: bool) {
        match &mut self.half {
            Half::Virtio(virtq) if !self.buffers.apart => {
                let (buffers, of, mut each) = (&self.buffers, &mut virtq.buffer_of, list.iter());
                let bufs = list.iter().map(|i| Buf { addr: buffers.at(*i), len, write });
                let added = virtq.driver.add_each(bufs, |id| {
                    of[usize::from(id)] = *each.next().expect("as many as added");
                });
                assert_eq!(added, list.len(), "as many descriptors as buffers");
                list.clear();
            }
            _ => {
                for i in list.drain(..) {
                    assert!(self.add(i, len, write), "accepted by the switch");
                }
            }
        }
    }

    /// Publishes added buffers.
    pub(super) fn publish(&mut self) {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.publish(),
            Half::XenTx(tx) => tx.queue.publish(),
            Half::XenRx(rx) => rx.queue.publish(),
        }
    }

    /// Adds buffers that the switch has read to `free`; returns how many.
    pub(super) fn reclaim(&mut self, free: &mut Vec<u16>) -> Result<usize, Malformed> {
        match &mut self.half {
            Half::Virtio(virtq) => {
                let used = virtq.take_used(usize::MAX)?;
                free.extend(used.iter().map(|used| used.id));
                Ok(used.len())
            }
            Half::XenTx(tx) => Ok(tx.queue.reclaim(free)?),
            Half::XenRx(_) => unreachable!("received frames are taken with their bytes"),
        }
    }

    /// Whether the switch has every buffer, on a ring that can be replayed.
    pub fn can_repeat(&self) -> bool {
        matches!(&self.half, Half::Virtio(virtq) if virtq.driver.can_repeat())
    }

    /// Returns used buffers to the switch, unread and unchanged; returns how many.
    pub fn repeat(&mut self) -> Result<u16, Malformed> {
        let Half::Virtio(virtq) = &mut self.half else { unreachable!("see can_repeat") };
        let n = virtq.driver.repeat()?;
        self.publish();
        self.kick();
        Ok(n)
    }

    /// Writable segments of the first `len` bytes of buffer `i`, header first, one or two.
    pub(super) fn to_write(&self, i: u16, len: u32) -> impl Iterator<Item = SegMut<'_>> {
        let (pieces, n) = self.buffers.pieces(i, len);
        pieces.into_iter().take(n).map(|(at, len)| {
            let seg = self.memory.seg_mut(at, len, &mut 0);
            seg.expect("buffers lie in our own memory")
        })
    }

    /// Ring, memory, buffers and kick counter, borrowed separately.
    pub(super) fn parts(&mut self) -> (&mut Half, &GuestMemory, &Buffers, &mut u64) {
        (&mut self.half, &self.memory, &self.buffers, &mut self.kicks)
    }

    /// Kicks if the switch enabled kicks for the buffers published since the last call.
    pub(super) fn kick(&mut self) {
        let kicked = match &mut self.half {
            Half::Virtio(virtq) => {
                let needed = virtq.driver.kick_needed();
                if needed {
                    os::signal(virtq.kick.as_fd());
                }
                needed
            }
            Half::XenTx(tx) => tx.kick(self.always_notifies),
            Half::XenRx(rx) => rx.kick(self.always_notifies),
        };
        self.kicks += u64::from(kicked);
    }

    /// Whether there are used buffers. One load.
    pub fn has_used(&self) -> bool {
        match &self.half {
            Half::Virtio(virtq) => virtq.driver.has_used(),
            Half::XenTx(tx) => tx.queue.has_used_many(1),
            Half::XenRx(rx) => rx.queue.has_used(),
        }
    }

    /// Whether at least `n` buffers are used; an estimate from one load.
    pub(super) fn has_used_many(&self, n: u16) -> bool {
        match &self.half {
            Half::Virtio(virtq) => virtq.driver.has_used_many(n),
            Half::XenTx(tx) => tx.queue.has_used_many(n.into()),
            Half::XenRx(rx) => rx.queue.has_used(),
        }
    }

    /// Enables a call before a sleep. Returns false if there are used buffers already.
    pub fn arm(&mut self) -> bool {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.arm() == Armed::Armed,
            Half::XenTx(tx) => tx.queue.arm_after(1) == Armed::Armed,
            Half::XenRx(rx) => rx.queue.arm() == Armed::Armed,
        }
    }

    /// Arms, like [`arm`](Self::arm), for a call after `n` more buffers are used, or earlier if
    /// the ring cannot express that.
    pub(super) fn arm_after(&mut self, n: u16) -> bool {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.arm_after(n) == Armed::Armed,
            Half::XenTx(tx) => tx.queue.arm_after(n.into()) == Armed::Armed,
            Half::XenRx(rx) => rx.queue.arm() == Armed::Armed,
        }
    }

    /// Stops suppressing calls, for good. On a Xen ring, whose calls have an index only, kicks in
    /// addition even if the switch suppresses kicks.
    ///
    /// # Panics
    /// If the ring is a virtqueue with EVENT_IDX.
    pub(super) fn never_suppress(&mut self) {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.stay_armed(),
            Half::XenTx(_) | Half::XenRx(_) => self.always_notifies = true,
        }
    }

    /// Suppresses calls while the ring is polled.
    pub(super) fn disarm(&mut self) {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.disarm(),
            // An event index that was passed causes no more calls.
            Half::XenTx(_) | Half::XenRx(_) => {}
        }
    }

    /// Readable when the switch called.
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        match &self.half {
            Half::Virtio(virtq) => virtq.call.as_fd(),
            Half::XenTx(tx) => tx.channel.call(),
            Half::XenRx(rx) => rx.channel.call(),
        }
    }

    /// Reads and counts calls; returns whether there were any.
    pub fn take_calls(&mut self) -> bool {
        let calls = match &mut self.half {
            Half::Virtio(virtq) => {
                let mut count = [0; 8];
                match rustix::io::read(&virtq.call, &mut count) {
                    Ok(8) => u64::from_ne_bytes(count),
                    _ => 0,
                }
            }
            Half::XenTx(tx) => tx.channel.take_call(),
            Half::XenRx(rx) => rx.channel.take_call(),
        };
        self.calls += calls;
        calls > 0
    }
}
