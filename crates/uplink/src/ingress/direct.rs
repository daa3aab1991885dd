//! Direct reads into the buffers of the port that all frames go to.
//!
//! Each frame of a batch gets the buffers that the receiver lends, and a private buffer for the
//! bytes before (the virtio-net header) and after them (those the receiver has no room for):
//!
//! ```text
//!   private   │hdr│ ·  ·  ·  ·  ·  ·  ·  ·  ·  ·│ too long for the room ─▶ │
//!   receiver      │ first chain │ next chain ... │
//! ```
//!
//! So no frame is truncated. One that cannot be delivered in place is copied from the receiver's
//! buffers into the gap, and is then handled like a frame read privately; so are those after it, to
//! keep the order.
//!
//! While only small frames arrive, nothing is read this way: several pieces cost the kernel more
//! than the copy saves (example `tap_direct` of `pvswitch`).

use rustix::io::Errno;
use shm::SegMut;
use switch::direct::{Direct, DirectFrame, Lent};
use switch::frame::{BURST_MAX, FRAME_LEN_MAX, GSO_LEN_MAX};
use switch::port::Fault;

use super::{READ_LEN, Taken, TapIngress, check, start};
use crate::VNET_LEN;
use crate::fd::BATCH;

/// Longest frame for which a private read is faster.
const SMALL_LEN: u32 = 1518;

/// State for reads into another port's buffers.
pub(super) struct State {
    lent: Lent<'static>,
    /// Room of each frame of the batch.
    rooms: Vec<u32>,
    /// The leading frames that can be delivered in place.
    came: Vec<DirectFrame>,
    /// Results of the others.
    rest: Vec<Rest>,
    /// Room to request: the longest recent frame.
    expect: u32,
}

/// A frame of a batch that is not delivered in place.
enum Rest {
    /// No frame was read.
    Nothing,
    /// An invalid one, of so many bytes.
    Invalid(u32),
    /// The receiver's memory was lost.
    Failed,
    DirectFrame(DirectFrame),
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            lent: Lent::default(),
            rooms: Vec::with_capacity(BATCH),
            came: Vec::with_capacity(BATCH),
            rest: Vec::with_capacity(BATCH),
            expect: SMALL_LEN,
        }
    }

    pub(super) fn expects_small(&self) -> bool {
        self.expect <= SMALL_LEN
    }

    /// Records the longest frame of a batch. GSO frames have varying lengths.
    pub(super) fn expect(&mut self, longest: u32) {
        self.expect = if longest > FRAME_LEN_MAX.min(self.expect * 2) {
            GSO_LEN_MAX
        } else if longest >= self.expect {
            longest
        } else {
            self.expect - (self.expect - longest).div_ceil(16)
        };
    }
}

impl TapIngress {
    /// Reads up to `max` frames into buffers of `to`; no frame may be left over. Returns the number
    /// accepted.
    pub(super) fn read_direct(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        let room = max.min(self.burst_frames).min(BURST_MAX);
        let (mut came, mut accepted) = (0, 0);
        let mut more = self.more;
        let mut batches = 0_u32;
        let mut fault = Ok(());
        while came < room && self.taken.is_empty() && fault.is_ok() {
            // As for private reads: one, then about the recent number.
            let want = if batches.is_multiple_of(2) { 1 } else { more.min(room - came) };
            let batch = self.batch_into(want, to);
            came += batch.came;
            accepted += batch.accepted;
            fault = batch.fault;
            if batch.came < batch.lent || batch.lent == 0 {
                break;
            }
            if want > 1 {
                more *= 2;
            }
            batches += 1;
        }
        if came > 0 {
            self.more = (self.more + came - 1).div_ceil(2).max(1);
            self.passed = Some(came);
        } else if self.empty {
            self.passed = Some(0);
        }
        fault.map(|()| accepted)
    }

    /// Reads up to `n` frames with one system call.
    fn batch_into(&mut self, n: usize, to: &mut dyn Direct) -> Batch {
        let mut batch = Batch::default();
        self.empty = false;
        let mut lent = std::mem::take(&mut self.direct.lent).recycle();
        to.lend(n, self.direct.expect, &mut lent);
        self.direct.rooms.clear();
        self.direct.rooms.extend(lent.lens());
        batch.lent = self.direct.rooms.len();
        if batch.lent == 0 {
            self.direct.lent = lent.recycle();
            return batch;
        }
        let mut reads = self.fd.reads();
        let mut buffers = self.buffers.iter_mut();
        lent.for_each_frame(|segs, len| {
            let (slot, buffer) = buffers.next().expect("all are free, and more than a batch");
            let (hdr, rest) = buffer[start(slot, false)..][..READ_LEN].split_at_mut(VNET_LEN);
            reads.push(SegMut::of(hdr));
            segs.for_each(|seg| reads.push(seg));
            if let Some(tail) = rest.get_mut(len as usize..).filter(|tail| !tail.is_empty()) {
                reads.push(SegMut::of(tail));
            }
            reads.end_frame();
        });
        drop(buffers);
        let (State { rooms, came, rest, .. }, mut bytes) = (&mut self.direct, 0_usize);
        came.clear();
        rest.clear();
        let mut longest = 0;
        for ((slot, result), room) in reads.run().iter().enumerate().zip(&*rooms) {
            let what = match result {
                Ok(len) => {
                    batch.came += 1;
                    self.empty = false;
                    let head = &self.buffers.of(slot)[start(slot, false)..][..VNET_LEN];
                    let frame = check(head, *len as usize, self.offloads, &self.stats);
                    let read = len.saturating_sub(VNET_LEN as u32);
                    frame.map_or(Rest::Invalid(read), |(len, hdr)| {
                        bytes += len as usize;
                        longest = longest.max(len);
                        Rest::DirectFrame(DirectFrame { len, hdr })
                    })
                }
                Err(Errno::FAULT) => {
                    batch.came += 1;
                    Rest::Failed
                }
                Err(error) => {
                    // The next private read returns the interface's error.
                    self.empty |= *error == Errno::AGAIN;
                    Rest::Nothing
                }
            };
            match what {
                Rest::DirectFrame(frame) if rest.is_empty() && frame.len <= *room => {
                    came.push(frame)
                }
                other => rest.push(other),
            }
        }
        self.direct.lent = lent.recycle();
        self.learn(batch.came, bytes, longest);
        self.hand_over(to, &mut batch);
        batch
    }

    /// Passes the frames to the receiver, and takes back those not accepted.
    fn hand_over(&mut self, to: &mut dyn Direct, batch: &mut Batch) {
        let State { rooms, came, rest, .. } = &mut self.direct;
        let accepted = if came.is_empty() { 0 } else { to.accept(came) };
        batch.accepted = accepted;
        self.stats.frames.add(accepted as u64);
        self.stats.direct.add(accepted as u64);
        self.stats.bytes.add(came[..accepted].iter().map(|c| u64::from(c.len)).sum());
        let refused = came.drain(accepted..).map(Rest::DirectFrame).chain(rest.drain(..));
        for (i, what) in refused.enumerate() {
            let slot = accepted + i;
            match what {
                Rest::Nothing => {}
                Rest::Invalid(len) => to.discard(i, len.min(rooms[slot])),
                Rest::Failed => {
                    if let Err(fault) = to.record_failure(i, rooms[slot]) {
                        batch.fault = Err(fault);
                    }
                }
                Rest::DirectFrame(DirectFrame { len, hdr }) => {
                    let at = start(slot, false) + VNET_LEN;
                    let gap = &mut self.buffers.of_mut(slot)[at..];
                    to.take_back(i, &mut gap[..len.min(rooms[slot]) as usize]);
                    self.free &= !(1 << slot);
                    self.taken.push(Taken { slot, at, len, hdr });
                }
            }
        }
    }
}

/// Result of one system call.
struct Batch {
    /// Frames for which there was room.
    lent: usize,
    /// Frames read, invalid ones included.
    came: usize,
    accepted: usize,
    fault: Result<(), Fault>,
}

impl Default for Batch {
    fn default() -> Self {
        Self { lent: 0, came: 0, accepted: 0, fault: Ok(()) }
    }
}

#[cfg(test)]
mod tests;
