//! Token buckets of a port's rates: shared by all workers that serve its queues.
//!
//! A bucket may go into debt: a burst is taken while there are tokens, and charged with what it
//! turned out to be. So a rate below one frame at a time is kept, too, and on average exactly.
//!
//! ```text
//!   tokens   burst ┤██████▄▖                ▗▄▟██
//!                  ┤██████████▄▖         ▗▄▟█
//!                0 ┼───────────▝█▖───▗▄▟█──────▶ time
//!             debt ┤             ▝▙▟█            a burst is charged; none is taken until `due`
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::time::{Instant, Ns};

/// Parts of a nanosecond in which buckets count: a frame at 100 Gbit/s takes 5 ns.
const PARTS: u64 = 64;
/// Parts of a second.
const SECOND: u64 = 1_000_000_000 * PARTS;
/// Longest time for which a rate waits beyond its first token, so that one wake-up serves several
/// frames of a fast rate.
const GATHER: u64 = 100_000 * PARTS;
/// Largest part of a burst for which it does.
const GATHER_PART: u64 = 4;

/// A rate, with the number that may come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Number per second, at least 1.
    pub per_second: u64,
    /// Number at once, after an idle time.
    pub burst: u64,
}

/// Rates of one direction of a port, or of one kind of its frames; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Bits of frames, from the destination MAC on, each segment of a GSO frame with its headers.
    pub bits: Option<Limit>,
    /// Frames, each segment of a GSO frame.
    pub frames: Option<Limit>,
}

/// One token bucket (GCRA, ITU-T I.371 annex A), off at first.
#[derive(Debug, Default)]
struct Bucket {
    /// Tokens per second; 0: off.
    per_second: AtomicU64,
    /// Length of a burst, in parts, at least 1.
    room: AtomicU64,
    /// Time at which it is full again, in parts.
    full: AtomicU64,
}

fn parts(time: Instant) -> u64 {
    time.ns().saturating_mul(PARTS)
}

/// `a * b + more`, divided by `by`; at most [`u64::MAX`]. With 64 bits where they are enough, as
/// for nearly each burst: a division of 128 bits is a call.
fn scaled(a: u64, b: u64, more: u64, by: u64) -> u64 {
    match a.checked_mul(b).and_then(|product| product.checked_add(more)) {
        Some(sum) => sum / by,
        None => {
            let sum = u128::from(a) * u128::from(b) + u128::from(more);
            u64::try_from(sum / u128::from(by)).unwrap_or(u64::MAX)
        }
    }
}

/// The time for `count` at `per_second`, in parts, rounded to the nearest.
fn cost(count: u64, per_second: u64) -> u64 {
    let per_second = per_second.max(1);
    scaled(count, SECOND, per_second / 2, per_second)
}

impl Bucket {
    /// A new limit starts with a full bucket.
    fn set(&self, limit: Option<Limit>) {
        let (per_second, burst) = limit.map_or((0, 0), |limit| (limit.per_second, limit.burst));
        self.room.store(cost(burst, per_second).max(1), Ordering::Relaxed);
        self.full.store(0, Ordering::Relaxed);
        self.per_second.store(per_second, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.per_second.load(Ordering::Relaxed) != 0
    }

    /// Time by which it is to be full, and the length of its burst, in parts.
    fn state(&self, now: Instant) -> Option<(u64, u64)> {
        let missing = || self.full.load(Ordering::Relaxed).saturating_sub(parts(now));
        self.is_on().then(|| (missing(), self.room.load(Ordering::Relaxed)))
    }

    /// Tokens at `now`; 0: none, or a debt. `None`: unlimited.
    fn available(&self, now: Instant) -> Option<u64> {
        let (missing, room) = self.state(now)?;
        let per_second = self.per_second.load(Ordering::Relaxed);
        Some(scaled(room.saturating_sub(missing), per_second, SECOND - 1, SECOND))
    }

    /// Whether there are tokens for `count` at `now`, or it is unlimited.
    fn has(&self, count: u64, now: Instant) -> bool {
        let Some((missing, room)) = self.state(now) else { return true };
        cost(count, self.per_second.load(Ordering::Relaxed)) <= room.saturating_sub(missing)
    }

    /// Without tokens at `now`: when there are some.
    fn due(&self, now: Instant) -> Option<Instant> {
        let (missing, room) = self.state(now)?;
        let short = missing.checked_sub(room)?;
        let wait = short.saturating_add(GATHER.min(room / GATHER_PART)).div_ceil(PARTS);
        Some(now + Ns::new(wait.max(1)))
    }

    fn charge(&self, count: u64, now: Instant) {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return;
        }
        let (cost, now) = (cost(count, per_second), parts(now));
        let add = |full: u64| Some(full.max(now).saturating_add(cost));
        let _ = self.full.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

/// Token buckets of [`RateLimits`], off at first.
#[derive(Debug, Default)]
pub struct Limiter {
    bits: Bucket,
    frames: Bucket,
    /// Mean length of the frames of the last burst, in bits: bounds the next one.
    mean_bits: AtomicU32,
}

impl Limiter {
    /// Sets the limits; both buckets are full then.
    pub fn set(&self, limits: RateLimits) {
        self.bits.set(limits.bits);
        self.frames.set(limits.frames);
    }

    /// Whether there is any limit.
    pub fn is_on(&self) -> bool {
        self.bits.is_on() || self.frames.is_on()
    }

    /// The time from which a burst may be taken; `None`: now.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.bits.due(now).max(self.frames.due(now))
    }

    /// Number of frames, up to `max` (at least 1), that a burst may take if it is not
    /// [due](Self::due) later: those for which there are tokens, if they are as long as before.
    pub fn budget(&self, max: usize, now: Instant) -> usize {
        let mean = u64::from(self.mean_bits.load(Ordering::Relaxed)).max(1);
        let all = max as u64;
        if self.bits.has(all.saturating_mul(mean), now) && self.frames.has(all, now) {
            return max;
        }
        let by_bits = self.bits.available(now).map(|bits| bits.div_ceil(mean));
        let least = [by_bits, self.frames.available(now)].into_iter().flatten().min();
        least.map_or(max, |n| usize::try_from(n).unwrap_or(max).clamp(1, max.max(1)))
    }

    /// Whether there are tokens at `now` for all of `frames` frames with `bytes` bytes.
    pub fn has(&self, frames: u64, bytes: u64, now: Instant) -> bool {
        self.bits.has(bytes.saturating_mul(8), now) && self.frames.has(frames, now)
    }

    /// Number of frames, of those that cost so many frames and bytes in this order, for which there
    /// are tokens at `now`. The last one may put the bucket into debt.
    pub fn prefix(&self, costs: impl Iterator<Item = (u64, u64)>, now: Instant) -> usize {
        if self.due(now).is_some() {
            return 0;
        }
        let (mut bits, mut frames) = (self.bits.available(now), self.frames.available(now));
        let spend = |left: &mut Option<u64>, count: u64| {
            let has = left.is_none_or(|left| left > 0);
            *left = left.map(|left| left.saturating_sub(count));
            has
        };
        let fits = |(count, bytes): &(u64, u64)| {
            let has_bits = spend(&mut bits, bytes.saturating_mul(8));
            spend(&mut frames, *count) && has_bits
        };
        costs.take_while(fits).count()
    }

    /// Charges `frames` frames with `bytes` bytes, taken at `now`.
    pub fn charge(&self, frames: u64, bytes: u64, now: Instant) {
        let bits = bytes.saturating_mul(8);
        self.bits.charge(bits, now);
        self.frames.charge(frames, now);
        if let Some(mean) = bits.checked_div(frames) {
            let mean = u32::try_from(mean).unwrap_or(u32::MAX);
            self.mean_bits.store(mean, Ordering::Relaxed);
        }
    }

    /// Charges a frame of `frames` segments with `bytes` bytes in all, if there are tokens at
    /// `now`; otherwise it is to be dropped.
    pub fn admit(&self, frames: u64, bytes: u64, now: Instant) -> bool {
        let admits = self.due(now).is_none();
        if admits {
            self.charge(frames, bytes, now);
        }
        admits
    }
}

#[cfg(test)]
mod tests;
