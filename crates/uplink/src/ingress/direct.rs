//! Reading straight into the buffers of the port that all frames go to.
//!
//! Each frame of a batch gets the buffers the receiver lends it, and a private buffer for what
//! comes before (the virtio-net header) and after them (what the receiver has no room for):
//!
//! ```text
//!   private   │hdr│ ·  ·  ·  ·  ·  ·  ·  ·  ·  ·│ too long for the room ─▶ │
//!   receiver      │ first chain │ next chain ... │
//! ```
//!
//! So no frame is cut off. One that cannot be delivered as it lies is copied from the receiver's
//! buffers into the gap, and is then a frame like those that are read privately; so are those
//! behind it, for their order.
//!
//! Where only small frames come, nothing is read this way: several pieces cost the kernel more
//! than the copy saves (example `tap_direct` of `pvswitch`).

use rustix::io::Errno;
use shm::SegMut;
use switch::direct::{Came, Direct, Lent};
use switch::frame::{BURST_MAX, FRAME_LEN_MAX, GSO_LEN_MAX};
use switch::port::Fault;

use super::{READ_LEN, Taken, TapIngress, check, start};
use crate::VNET_LEN;
use crate::fd::BATCH;

/// Longest frame that is better read privately.
const SMALL_LEN: u32 = 1518;

/// What reading into another port's buffers takes.
pub(super) struct State {
    lent: Lent<'static>,
    /// Room of each frame of the batch.
    rooms: Vec<u32>,
    /// The frames from the first on that can go as they lie.
    came: Vec<Came>,
    /// What came of the others.
    rest: Vec<Rest>,
    /// Room to ask for: the longest of late.
    expect: u32,
}

/// A frame of a batch that does not go as it lies.
enum Rest {
    /// Nothing came, or nothing good.
    Nothing,
    /// The receiver's memory was not there.
    Failed,
    Came(Came),
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

    /// Notes the longest frame of a batch. Where GSO frames come, they come in all lengths.
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
    /// Reads up to `max` frames into buffers of `to`; none was left over. Returns how many were
    /// accepted.
    pub(super) fn read_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        let room = max.min(self.burst_frames).min(BURST_MAX);
        let (mut came, mut accepted) = (0, 0);
        let mut more = self.more;
        let mut batches = 0_u32;
        let mut fault = Ok(());
        while came < room && self.taken.is_empty() && fault.is_ok() {
            // As for private reads: one, then as many as came lately.
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
        lent.hand_out(|segs, len| {
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
                    frame.map_or(Rest::Nothing, |(len, hdr)| {
                        bytes += len as usize;
                        longest = longest.max(len);
                        Rest::Came(Came { len, hdr })
                    })
                }
                Err(Errno::FAULT) => {
                    batch.came += 1;
                    Rest::Failed
                }
                Err(error) => {
                    // What is wrong with the interface is told by the next private read.
                    self.empty |= *error == Errno::AGAIN;
                    Rest::Nothing
                }
            };
            match what {
                Rest::Came(frame) if rest.is_empty() && frame.len <= *room => came.push(frame),
                other => rest.push(other),
            }
        }
        self.direct.lent = lent.recycle();
        self.learn(batch.came, bytes, longest);
        self.hand_over(to, &mut batch);
        batch
    }

    /// Has what came accepted, and takes back what is not.
    fn hand_over(&mut self, to: &mut dyn Direct, batch: &mut Batch) {
        let State { rooms, came, rest, .. } = &mut self.direct;
        let accepted = if came.is_empty() { 0 } else { to.accept(came) };
        batch.accepted = accepted;
        self.stats.frames.add(accepted as u64);
        self.stats.direct.add(accepted as u64);
        self.stats.bytes.add(came[..accepted].iter().map(|c| u64::from(c.len)).sum());
        let refused = came.drain(accepted..).map(Rest::Came).chain(rest.drain(..));
        for (i, what) in refused.enumerate() {
            let slot = accepted + i;
            match what {
                Rest::Nothing => {}
                Rest::Failed => {
                    if let Err(fault) = to.failed(i, rooms[slot]) {
                        batch.fault = Err(fault);
                    }
                }
                Rest::Came(Came { len, hdr }) => {
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

/// What one system call brought.
struct Batch {
    /// Frames there was room for.
    lent: usize,
    /// Frames that came, bad ones included.
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
