//! What both directions of a queue pair have: a ring, its two notifications, and buffers.

mod xen;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ::ring::virtq::{Armed, Buf, DriverQueue, Used};
use shm::{GuestMemory, Seg, SegMut};
use vhost_user::frontend::Queue;

pub use self::xen::{Channel, FRAME_MAX, XenRx, XenTx};

/// Header before each frame: virtio 1.x, with `num_buffers`. Buffers have it on every ring; what
/// a ring says of a frame in another way is told through it.
pub const HDR_LEN: usize = 12;

/// The switch broke the ring protocol: the connection is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Of a virtqueue.
    #[error(transparent)]
    Virtio(#[from] ::ring::virtq::Malformed),
    /// Of a ring of Xen's.
    #[error(transparent)]
    Xen(#[from] ::ring::xen::Malformed),
}

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
    /// Xen's rings: kicks are made whether the switch wants them or not.
    pub(super) always_tells: bool,
    /// Kicks made.
    pub kicks: u64,
    /// Calls the switch made, as far as we have seen them.
    pub calls: u64,
}

/// The ring itself, told apart once for each thing done to it.
pub enum Half {
    /// A virtqueue.
    Virtio(Virtq),
    /// A tx ring of Xen's.
    XenTx(XenTx),
    /// An rx ring of Xen's.
    XenRx(XenRx),
}

/// A virtqueue's driver half, and the notifications of it.
pub struct Virtq {
    driver: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    /// Which buffer is behind a chain id.
    buffer_of: Vec<u16>,
    used: Vec<Used>,
}

impl Virtq {
    /// Takes used chains; `id` is that of the buffer by then, the chain's being free again.
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
        Self { half, memory, buffers, always_tells: false, kicks: 0, calls: 0 }
    }

    pub(super) fn xen(half: Half, memory: Arc<GuestMemory>, buffers: Buffers) -> Self {
        Self { half, memory, buffers, always_tells: false, kicks: 0, calls: 0 }
    }

    /// Frames that were lost on the ring: sent, and answered with an error; or received, and bad.
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

    /// Bytes a buffer holds with its header.
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

    /// How many buffers are with the switch from the start.
    pub(super) fn offered(&self) -> u16 {
        match &self.half {
            Half::XenRx(_) => self.size(),
            Half::Virtio(_) | Half::XenTx(_) => 0,
        }
    }

    /// How many frames the ring itself has room for, however long they are.
    pub(super) fn frames_free(&self) -> usize {
        match &self.half {
            // As many descriptors as buffers.
            Half::Virtio(_) | Half::XenRx(_) => usize::MAX,
            Half::XenTx(tx) => tx.queue.frames_free(),
        }
    }

    /// Puts the first `len` bytes of buffer `i` on the ring, to be read by the switch, or with
    /// `write` to be written. False, and nothing done: the switch does not take such a frame.
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

    /// Shows the switch what was added.
    pub(super) fn publish(&mut self) {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.publish(),
            Half::XenTx(tx) => tx.queue.publish(),
            Half::XenRx(rx) => rx.queue.publish(),
        }
    }

    /// Adds to `free` the buffers that the switch has read; how many.
    pub(super) fn reclaim(&mut self, free: &mut Vec<u16>) -> Result<usize, Malformed> {
        match &mut self.half {
            Half::Virtio(virtq) => {
                let used = virtq.take_used(usize::MAX)?;
                free.extend(used.iter().map(|used| used.id));
                Ok(used.len())
            }
            Half::XenTx(tx) => Ok(tx.queue.reclaim(free)?),
            Half::XenRx(_) => unreachable!("what is received is taken with its bytes"),
        }
    }

    /// Whether every buffer is with the switch, on a ring that can be repeated.
    pub fn can_repeat(&self) -> bool {
        matches!(&self.half, Half::Virtio(virtq) if virtq.driver.can_repeat())
    }

    /// Gives the buffers that the switch has used back to it, unread and as they are; how many.
    pub fn repeat(&mut self) -> Result<u16, Malformed> {
        let Half::Virtio(virtq) = &mut self.half else { unreachable!("asked before") };
        let n = virtq.driver.repeat()?;
        self.publish();
        self.kick();
        Ok(n)
    }

    /// The first `len` bytes of buffer `i` to write to, header first, in one or two segments.
    pub(super) fn to_write(&self, i: u16, len: u32) -> impl Iterator<Item = SegMut<'_>> {
        let (pieces, n) = self.buffers.pieces(i, len);
        pieces.into_iter().take(n).map(|(at, len)| {
            let seg = self.memory.seg_mut(at, len, &mut 0);
            seg.expect("buffers lie in our own memory")
        })
    }

    /// The ring, where its buffers lie, and the kicks made: for who reads buffers while the ring
    /// is worked on.
    pub(super) fn parts(&mut self) -> (&mut Half, &GuestMemory, &Buffers, &mut u64) {
        (&mut self.half, &self.memory, &self.buffers, &mut self.kicks)
    }

    /// Kicks if the switch wants it for what was published since this was last asked.
    pub(super) fn kick(&mut self) {
        let kicked = match &mut self.half {
            Half::Virtio(virtq) => {
                let needed = virtq.driver.kick_needed();
                if needed {
                    os::signal(virtq.kick.as_fd());
                }
                needed
            }
            Half::XenTx(tx) => tx.kick(self.always_tells),
            Half::XenRx(rx) => rx.kick(self.always_tells),
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

    /// Whether at least `n` buffers are used, as near as the ring tells with one load.
    pub(super) fn has_used_many(&self, n: u16) -> bool {
        match &self.half {
            Half::Virtio(virtq) => virtq.driver.has_used_many(n),
            Half::XenTx(tx) => tx.queue.has_used_many(n.into()),
            Half::XenRx(rx) => rx.queue.has_used(),
        }
    }

    /// Before sleeping: asks for a call. False: there is something by now.
    pub fn arm(&mut self) -> bool {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.arm() == Armed::Armed,
            Half::XenTx(tx) => tx.queue.arm_after(1) == Armed::Armed,
            Half::XenRx(rx) => rx.queue.arm() == Armed::Armed,
        }
    }

    /// As [`arm`](Self::arm), for when `n` more buffers are used, or earlier where the ring cannot
    /// say that.
    pub(super) fn arm_after(&mut self, n: u16) -> bool {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.arm_after(n) == Armed::Armed,
            Half::XenTx(tx) => tx.queue.arm_after(n.into()) == Armed::Armed,
            Half::XenRx(rx) => rx.queue.arm() == Armed::Armed,
        }
    }

    /// Asks for no calls: the ring is being polled.
    pub(super) fn disarm(&mut self) {
        match &mut self.half {
            Half::Virtio(virtq) => virtq.driver.disarm(),
            // Nobody is told of what passed the event that was asked for.
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

    /// Takes note of the calls made, and whether there were any.
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
