//! The limit: one copy of each frame by another core, and no protocol.
//!
//! ```text
//!   guests' core                                         switch's core
//!   writes every byte ─▶ slot of A ──────── one copy ──▶ slot of B
//!        ▲                                                 │
//!        └──────────────── reads every byte ◀──────────────┘
//!
//!   four indices, each on lines of its own: written, taken, copied, read
//! ```
//! No descriptors, addresses, headers or notifications: slots are used in turn, and an index is
//! published for a batch. It is what `gen --mode pass` and a switch do for a frame, without the
//! rings: the same cores touch the same bytes, by the same functions, in memory of the same kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shm::Mapping;

use crate::distance::pin;
use crate::error::Fail;
use crate::stage::sleep;

/// Slots of each ring, as a guest's queue of this size has buffers.
pub const SLOTS: u32 = 1024;
/// Distance of two slots, as of two buffers of `gen --mode pass`.
const STRIDE: usize = 2048;
/// Frames for which an index is published.
const BATCH: u32 = 32;
/// Length of the pieces in which a frame is read, as by `gen`.
const CHUNK: usize = 512;

/// Number of frames; it wraps. On lines of its own, whatever the length of a line.
#[derive(Default)]
#[repr(align(128))]
struct Index(AtomicU32);

impl Index {
    fn seen(&self) -> u32 {
        // The reader sees the frames /before/ it uses their slots; pairs with `publish`.
        self.0.load(Ordering::Acquire)
    }

    fn publish(&self, frames: u32) {
        // Slots are written, or read, /before/ the other side may use them; pairs with `seen`.
        self.0.store(frames, Ordering::Release);
    }
}

/// What both cores share.
struct Shared {
    sources: Mapping,
    targets: Mapping,
    written: Index,
    taken: Index,
    copied: Index,
    read: Index,
    /// No more frames are to be written.
    stop: AtomicBool,
    /// All frames written were read.
    over: AtomicBool,
    /// Frames read so far.
    total: AtomicU64,
}

/// Counters of the guests' core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames written.
    pub sent: u64,
    /// Frames read.
    pub received: u64,
    /// Frames whose number does not follow the one before.
    pub gaps: u64,
    /// Time in turns with no frame to read and no slot to write.
    pub idle: Duration,
    /// Time of all turns.
    pub all: Duration,
}

/// One measurement.
pub struct Copied {
    /// Frames per second.
    pub frames: f64,
    /// Counters, warm-up included.
    pub counts: Counts,
}

/// Copies frames of `size` bytes between two cores for a while; returns the rate in the window of
/// `seconds` after a warm-up.
///
/// # Errors
/// The system has no memory, or the CPUs are not permitted.
pub fn measure(
    size: u32,
    guests_cpu: usize,
    switch_cpu: usize,
    warm_s: f64,
    seconds: f64,
) -> Result<Copied, Fail> {
    let shared = Shared::new()?;
    let shared = Arc::new(shared);
    let (guests, switch) = (Arc::clone(&shared), Arc::clone(&shared));
    let guests = std::thread::spawn(move || (pin(guests_cpu), guests.write_and_read(size)));
    let switch = std::thread::spawn(move || (pin(switch_cpu), switch.copy(size)));
    sleep(warm_s);
    let (begin, before) = (Instant::now(), shared.total.load(Ordering::Relaxed));
    sleep(seconds);
    let after = shared.total.load(Ordering::Relaxed);
    let seconds = begin.elapsed().as_secs_f64();
    shared.stop.store(true, Ordering::Relaxed);
    let failed = |_| Fail::Cell("a thread that copies panicked".into());
    let (guests_pinned, counts) = guests.join().map_err(failed)?;
    let (switch_pinned, ()) = switch.join().map_err(failed)?;
    if !guests_pinned || !switch_pinned {
        let what = format!("cannot run on CPUs {guests_cpu} and {switch_cpu}");
        return Err(Fail::Missing(what));
    }
    Ok(Copied { frames: (after - before) as f64 / seconds, counts })
}

impl Shared {
    fn new() -> Result<Self, Fail> {
        let memory = |name| {
            let len = STRIDE as u64 * u64::from(SLOTS);
            Mapping::memfd(name, len).map_err(|error| Fail::Cell(format!("memory: {error}")))
        };
        Ok(Self {
            sources: memory("limit-sources")?,
            targets: memory("limit-targets")?,
            written: Index::default(),
            taken: Index::default(),
            copied: Index::default(),
            read: Index::default(),
            stop: AtomicBool::new(false),
            over: AtomicBool::new(false),
            total: AtomicU64::new(0),
        })
    }

    /// Writes frames and reads copies until it is stopped and all copies are read.
    fn write_and_read(&self, size: u32) -> Counts {
        let frame = vec![0xa5_u8; size as usize];
        let mut chunk = [0_u8; CHUNK];
        let mut counts = Counts::default();
        let (mut written, mut read) = (0_u32, 0_u32);
        let (begin, mut idle_since) = (Instant::now(), None);
        while !self.stop.load(Ordering::Relaxed) || read != written {
            let stopped = self.stop.load(Ordering::Relaxed);
            let room = SLOTS - written.wrapping_sub(self.taken.seen());
            let writes = room >= BATCH && !stopped;
            if writes {
                for i in 0..BATCH {
                    let slot = self.sources.seg_mut(offset(written.wrapping_add(i)), size);
                    let mut slot = slot.expect("a slot");
                    slot.reborrow().write(&frame);
                    // After the copy: one of bytes just stored waits for all stores before.
                    slot.write(&counts.sent.to_le_bytes());
                    counts.sent += 1;
                }
                written = written.wrapping_add(BATCH);
                self.written.publish(written);
            }
            let copied = self.copied.seen();
            let reads = copied != read;
            if reads {
                while read != copied {
                    let first = self.touch(read, size, &mut chunk);
                    counts.gaps += u64::from(first != counts.received);
                    counts.received += 1;
                    read = read.wrapping_add(1);
                }
                self.read.publish(read);
                self.total.store(counts.received, Ordering::Relaxed);
            }
            // The clock is read where an idle time begins or ends, not in each turn.
            if !writes && !reads {
                idle_since.get_or_insert_with(Instant::now);
            } else if let Some(since) = idle_since.take() {
                counts.idle += since.elapsed();
            }
        }
        counts.all = begin.elapsed();
        self.over.store(true, Ordering::Relaxed);
        counts
    }

    /// Reads every byte of a copy; returns its number.
    fn touch(&self, read: u32, size: u32, chunk: &mut [u8; CHUNK]) -> u64 {
        let mut seg = self.targets.seg(offset(read), size).expect("a slot");
        let first = seg.first::<8>().map_or(0, u64::from_le_bytes);
        while !seg.is_empty() {
            let n = seg.read(chunk);
            std::hint::black_box(&chunk);
            seg = seg.skip(n as u32);
        }
        first
    }

    /// Copies frames until all are read.
    fn copy(&self, size: u32) {
        let (mut taken, mut copied) = (0_u32, 0_u32);
        while !self.over.load(Ordering::Relaxed) {
            if self.written.seen().wrapping_sub(taken) < BATCH
                || SLOTS - copied.wrapping_sub(self.read.seen()) < BATCH
            {
                std::hint::spin_loop();
                continue;
            }
            for i in 0..BATCH {
                let from = self.sources.seg(offset(taken.wrapping_add(i)), size);
                let mut to = self.targets.seg_mut(offset(copied.wrapping_add(i)), size);
                to.as_mut().expect("a slot").copy_from(from.expect("a slot"));
            }
            taken = taken.wrapping_add(BATCH);
            copied = copied.wrapping_add(BATCH);
            self.copied.publish(copied);
            self.taken.publish(taken);
        }
    }
}

/// Offset of the slot of a frame.
fn offset(frame: u32) -> usize {
    (frame % SLOTS) as usize * STRIDE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_is_copied_once_and_in_order() {
        for size in [64, 1518] {
            let shared = Arc::new(Shared::new().unwrap());
            let (guests, switch) = (Arc::clone(&shared), Arc::clone(&shared));
            let guests = std::thread::spawn(move || guests.write_and_read(size));
            let switch = std::thread::spawn(move || switch.copy(size));
            // Several times around.
            while shared.total.load(Ordering::Relaxed) < 3 * u64::from(SLOTS) {
                std::thread::yield_now();
            }
            shared.stop.store(true, Ordering::Relaxed);
            let counts = guests.join().unwrap();
            switch.join().unwrap();
            assert!(counts.sent >= 3 * u64::from(SLOTS));
            assert_eq!((counts.received, counts.gaps), (counts.sent, 0), "{size}");
            // The last copy is whole: its number, then the rest of the frame.
            let last = offset((counts.sent - 1) as u32);
            let mut bytes = vec![0; size as usize];
            shared.targets.seg(last, size).unwrap().read(&mut bytes);
            assert_eq!(bytes[..8], (counts.sent - 1).to_le_bytes());
            assert!(bytes[8..].iter().all(|byte| *byte == 0xa5));
        }
    }
}
