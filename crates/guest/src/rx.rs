//! The receive queue: takes frames, and returns buffers.

use std::collections::VecDeque;
use std::ops::AddAssign;

use ring::virtq::{self, Used};
use shm::Seg;

use crate::ring::{HDR_LEN, Half, Malformed, Ring};
use crate::settings::{Refill, Settings};

/// Most buffers of one frame.
const FRAME_BUFFERS_MAX: usize = 64;
/// Longest frame a switch sends, with its header: 64 KiB of payload.
const FRAME_MAX: u32 = 65_536 + 14 + 20 + 40 + HDR_LEN as u32;

/// The receive queue and its buffers.
pub struct Rx {
    /// Its ring.
    pub ring: Ring,
    /// Used buffers not yet passed on; `id` is the buffer's, because the chain's is free again. The
    /// rest of a frame may not have been taken yet.
    used: VecDeque<Used>,
    /// Buffers to return.
    done: Vec<u16>,
    /// Number of buffers that triggers a refill.
    refill_at: usize,
    /// Counters.
    pub counts: RxCounts,
}

/// Counters of a receive queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct RxCounts {
    /// Frames received.
    pub frames: u64,
    /// Polls for used buffers.
    pub polls: u64,
    /// Polls that found none.
    pub polls_empty: u64,
    /// Refills.
    pub refills: u64,
    /// Buffers returned.
    pub refilled: u64,
}

impl AddAssign for RxCounts {
    fn add_assign(&mut self, other: Self) {
        self.frames += other.frames;
        self.polls += other.polls;
        self.polls_empty += other.polls_empty;
        self.refills += other.refills;
        self.refilled += other.refilled;
    }
}

impl Rx {
    pub(super) fn new(ring: Ring, settings: &Settings) -> Self {
        let mut rx = Self {
            used: VecDeque::with_capacity(usize::from(ring.size())),
            done: (ring.offered()..ring.size()).collect(),
            refill_at: refill_at(settings.refill, &ring),
            ring,
            counts: RxCounts::default(),
        };
        rx.give_back();
        rx.counts = RxCounts::default();
        rx
    }

    /// Takes frames and passes each to `show` as segments, header first. [`refill`](Self::refill)
    /// returns their buffers afterwards. Returns the number of frames.
    pub fn receive<'a>(
        &'a mut self,
        max: usize,
        mut show: impl FnMut(&[Seg<'a>]),
    ) -> Result<usize, Malformed> {
        let Self { ring, used, done, counts, .. } = self;
        let (half, memory, buffers, kicks) = ring.parts();
        counts.polls += 1;
        let virtq = match half {
            Half::Virtio(virtq) => virtq,
            Half::XenRx(xen) => {
                let frames = xen.receive(max, memory, done, kicks, show)?;
                counts.polls_empty += u64::from(frames == 0);
                counts.frames += frames as u64;
                return Ok(frames);
            }
            Half::XenTx(_) => unreachable!("nothing is received from a transmit ring"),
        };
        let batch = virtq.take_used(max)?;
        counts.polls_empty += u64::from(batch.is_empty());
        used.extend(batch);
        let mut frames = 0;
        let mut segs = [Seg::EMPTY; 2 * FRAME_BUFFERS_MAX];
        while let Some(first) = used.front() {
            // Of a frame that a switch that was killed had not written, and writes again.
            if usize::try_from(first.len).is_ok_and(|len| len < HDR_LEN) {
                done.push(first.id);
                used.pop_front();
                continue;
            }
            let mut header = [0; HDR_LEN];
            if let Some(head) = buffers.read(memory, first.id, first.len).next() {
                head.read(&mut header);
            }
            let count = usize::from(u16::from_le_bytes([header[10], header[11]])).max(1);
            if count > FRAME_BUFFERS_MAX {
                return Err(virtq::Malformed::ChainTooLong.into());
            }
            if count > used.len() {
                break;
            }
            let mut n = 0;
            for used in used.drain(..count) {
                for seg in buffers.read(memory, used.id, used.len) {
                    segs[n] = seg;
                    n += 1;
                }
                done.push(used.id);
            }
            show(&segs[..n]);
            frames += 1;
        }
        counts.frames += frames as u64;
        Ok(frames)
    }

    /// Returns processed buffers to the switch, if there are enough for a refill.
    pub fn refill(&mut self) {
        if self.done.len() >= self.refill_at {
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        self.counts.refills += 1;
        self.counts.refilled += self.done.len() as u64;
        let room = self.ring.room();
        self.ring.add_all(&mut self.done, room, true);
        self.ring.publish();
        self.ring.kick();
    }
}

/// Number of buffers per refill: as set, but at most half, and always leaving the switch room for
/// the longest frame.
fn refill_at(refill: Refill, ring: &Ring) -> usize {
    let size = usize::from(ring.size());
    let wanted = match refill {
        Refill::AtOnce => 1,
        Refill::BelowHalf => size / 2 + 1,
        Refill::Batch(n) => usize::from(n).min(size / 2),
    };
    let longest = FRAME_MAX.div_ceil(ring.room()) as usize;
    wanted.min(size.saturating_sub(longest)).max(1)
}
