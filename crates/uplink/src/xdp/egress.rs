//! Egress to a queue's AF_XDP socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use super::ring::{Consumer, Desc, Producer};
use super::{TX_CHUNKS, Umem, XdpShape};
use crate::stream::{Room, Socket};

/// A queue's socket as a destination of frames.
///
/// Frames are copied to chunks of their own, which is the only copy where the driver needs none.
/// In copy mode the kernel sends in the call that notifies it; what it does not take then, for
/// lack of room, stays in the ring, and is offered again when frames have been sent.
pub struct XdpEgress {
    tx: Producer,
    completion: Consumer,
    umem: Umem,
    socket: Arc<OwnedFd>,
    /// Chunks that hold no frame, by number.
    free: Vec<u32>,
    /// The longest frame.
    frame_max: u32,
    /// Notifies of room; `None` with zero-copy: the kernel then notifies of none.
    room: Option<Room>,
    /// There are frames in the ring that were not published.
    is_written: bool,
    /// The kernel does not know of frames in the ring.
    is_unnotified: bool,
    /// The kernel did not take all frames of the ring when it was last notified.
    is_blocked: bool,
    /// A worker waits for a free chunk.
    is_awaited: bool,
    link: Link,
    stats: Arc<EgressStats>,
}

/// State of the interface, by the last notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    Down,
    Removed,
}

impl XdpEgress {
    pub(super) fn new(
        tx: Producer,
        completion: Consumer,
        umem: Umem,
        socket: Arc<OwnedFd>,
        shape: &XdpShape,
        stats: Arc<EgressStats>,
    ) -> io::Result<Self> {
        let room = match shape.is_zero_copy {
            false => Some(Room::of_sender(Arc::clone(&socket) as Socket)?),
            true => None,
        };
        Ok(Self {
            tx,
            completion,
            umem,
            socket,
            free: (0..TX_CHUNKS).rev().collect(),
            frame_max: shape.frame_max.min(shape.chunk_len),
            room,
            is_written: false,
            is_unnotified: false,
            is_blocked: false,
            is_awaited: false,
            link: Link::Up,
            stats,
        })
    }

    /// The descriptor that becomes readable when there is room; `None`: nothing to wait for.
    pub fn waits_for(&self) -> Option<Socket> {
        self.room.as_ref().map(Room::waits_for)
    }

    /// Chunks that hold no frame, for another process.
    pub fn free(&self) -> &[u32] {
        &self.free
    }

    /// Continues where another process stopped, whose free chunks were these.
    pub fn resume(&mut self, free: &[u32]) {
        self.tx.resync();
        self.completion.resync();
        let mut is_known = vec![false; TX_CHUNKS as usize];
        let mut is_new = |chunk: &u32| {
            let known = is_known.get_mut(*chunk as usize);
            known.is_some_and(|known| !std::mem::replace(known, true))
        };
        self.free = free.iter().copied().filter(|chunk| is_new(chunk)).collect();
        self.is_blocked = self.tx.untaken() > 0;
        self.request_room();
    }

    /// Collects the chunks of frames that were sent.
    fn reclaim(&mut self) {
        let n = self.completion.available(TX_CHUNKS);
        for i in 0..n {
            let chunk = self.umem.tx_chunk(self.completion.address(i));
            // No more than there are, whatever the kernel says.
            if let Some(chunk) = chunk.filter(|_| self.free.len() < TX_CHUNKS as usize) {
                self.free.push(chunk);
            }
        }
        if n > 0 {
            self.completion.release(n);
        }
    }

    /// Makes at least `wanted` chunks free, as far as that is possible now.
    fn make_room(&mut self, wanted: usize) -> usize {
        if self.free.len() < wanted {
            self.reclaim();
        }
        if self.free.len() < wanted && (self.is_written || self.is_unnotified || self.is_blocked) {
            self.publish();
            self.send();
            self.reclaim();
        }
        self.free.len()
    }

    fn publish(&mut self) {
        if std::mem::take(&mut self.is_written) {
            self.tx.publish();
            self.is_unnotified = true;
        }
    }

    /// Has the kernel send what is published.
    fn send(&mut self) {
        self.is_unnotified = false;
        self.is_blocked = false;
        if self.room.is_none() {
            // The driver takes them by itself, unless it sleeps.
            if self.tx.needs_wakeup() {
                let _ = self.notify_kernel();
            }
            return;
        }
        loop {
            let before = self.tx.taken();
            let result = self.notify_kernel();
            let left = self.tx.untaken();
            match result {
                Err(Errno::INTR) => {}
                Err(Errno::NETDOWN) => return self.link = Link::Down,
                Err(Errno::NXIO) => return self.link = Link::Removed,
                // It has taken one that the interface then dropped, and stopped there.
                Err(Errno::BUSY) => self.stats.drops_no_room.add(1),
                _ if left == 0 => break,
                // It takes a limited number each time, and then says that it would block.
                _ if self.tx.taken() != before => {}
                _ => {
                    self.is_blocked = true;
                    break;
                }
            }
        }
        self.link = Link::Up;
        self.request_room();
    }

    fn notify_kernel(&self) -> Result<usize, Errno> {
        rustix::net::send(&self.socket, &[], SendFlags::DONTWAIT)
    }

    /// Has the worker notified when the kernel may take what is left of the ring, or has sent a
    /// frame whose chunk is needed; or takes that back.
    fn request_room(&mut self) {
        self.is_awaited &= self.free.is_empty();
        let is_needed = self.is_blocked || self.is_awaited;
        // A frame that the kernel has causes a notification when it is sent. If it has none, an
        // interface is busy for others, and reports to nobody: this has the worker retry at once.
        let unsent = self.tx.untaken() as usize;
        let is_alone = self.free.len() + unsent >= TX_CHUNKS as usize;
        let Some(room) = &mut self.room else { return };
        if is_needed && is_alone {
            room.request(false);
        }
        room.request(is_needed);
    }

    /// Copies a frame into a free chunk and adds it to the ring. False: there is no chunk.
    fn write(&mut self, head: &[u8], body: &[Seg<'_>], mut skip: u32, len: u32) -> bool {
        let Some(chunk) = self.free.pop() else { return false };
        let mut to = self.umem.tx(chunk);
        to.write(head);
        let mut left = len - head.len() as u32;
        for seg in body {
            let rest = seg.skip(skip).take(left);
            skip -= skip.min(seg.len());
            left -= to.copy_from(rest);
        }
        self.tx.put_desc(Desc { addr: self.umem.tx_addr(chunk), len });
        self.is_written = true;
        self.stats.frames.add(1);
        self.stats.bytes.add(len.into());
        true
    }

    /// Whether frames pass; what the interface does not take, because it is down, is dropped.
    fn is_up(&mut self) -> Result<bool, Fault> {
        if self.link == Link::Down {
            self.send();
        }
        match self.link {
            Link::Up => Ok(true),
            Link::Down => Ok(false),
            Link::Removed => Err(Fault("the interface was removed".into())),
        }
    }
}

impl Egress for XdpEgress {
    fn offloads(&self) -> Offloads {
        Offloads::default()
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.stats.groups.add(1);
        if !self.is_up()? {
            self.stats.drops_down.add(picks.len() as u64);
            return Ok(picks.len());
        }
        self.make_room(picks.len());
        for (done, pick) in picks.iter().enumerate() {
            let at = usize::from(*pick);
            let frame = &burst.frames[at];
            let head = burst.head(at);
            if frame.len > self.frame_max {
                self.stats.drops_too_long.add(1);
            } else if !self.write(head, burst.segs(frame), head.len() as u32, frame.len) {
                self.stats.full.add(1);
                return Ok(done);
            }
        }
        Ok(picks.len())
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        if !self.is_up()? {
            self.stats.drops_down.add(1);
            return Ok(true);
        }
        let len = head.len() as u32 + body.iter().map(|seg| seg.len()).sum::<u32>();
        if len > self.frame_max {
            self.stats.drops_too_long.add(1);
            return Ok(true);
        }
        let fits = self.make_room(1) > 0 && self.write(head, body, 0, len);
        self.stats.full.add(u64::from(!fits));
        Ok(fits)
    }

    fn room(&mut self, _len: u32, limit: usize) -> Result<usize, Fault> {
        let free = self.make_room(limit);
        Ok(if free == TX_CHUNKS as usize { limit } else { free.min(limit) })
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        self.publish();
    }

    fn notify(&mut self) {
        if self.is_unnotified {
            self.send();
        }
    }

    fn arm(&mut self) -> bool {
        if self.make_room(1) > 0 || self.room.is_none() {
            return false;
        }
        self.is_awaited = true;
        self.request_room();
        self.reclaim();
        // If nothing will notify of room, the worker polls.
        self.free.is_empty() && self.room.as_ref().is_some_and(Room::is_requested)
    }

    fn disarm(&mut self) {
        self.reclaim();
        if self.is_blocked {
            self.send();
        }
        // While nothing has changed the request stays: to make it again would notify at once.
        self.request_room();
    }
}

impl AsFd for XdpEgress {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
