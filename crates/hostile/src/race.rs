//! What racing guests of both protocols share: frames that threads rewrite while a switch copies
//! them, and what their receiver sees of it.
//!
//! Each header alternates between the address of the receiver and that of the sender. The switch
//! delivers only what it looked up, so a frame with the sender's address proves that it read a
//! header twice ([`mixed`](crate::Tally::mixed)). Parts of two versions in one frame
//! ([`torn`](crate::Tally::torn)) are legal: they prove that the threads wrote while the switch
//! copied.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shm::Area;

use crate::{Attack, Tally};

/// Longest time with values that let the rings continue, and longest with any values.
const CALM_MAX: Duration = Duration::from_millis(500);
const WILD_MAX: Duration = Duration::from_millis(100);
/// Longest wait for the receiver's address to be learned.
pub const LEARN_MAX: Duration = Duration::from_secs(2);

/// Bytes of a frame.
pub const FRAME_LEN: u32 = 1000;
/// Offsets in a frame of two words that the thread of headers writes, within the bytes that the
/// switch parses, and of two that the thread of payload writes, behind them.
const HEADER_TAGS: [usize; 2] = [24, 72];
const PAYLOAD_TAGS: [usize; 2] = [512, 800];

/// Drives the rings of a connection until it ends or its time is over: calls `drive`, which returns
/// how many requests it made, or `None` once the connection has ended. Sets `wild` once any values
/// may be written.
pub fn drive(attack: &mut Attack<'_>, wild: &AtomicBool, mut drive: impl FnMut() -> Option<u64>) {
    let left = attack.until.saturating_duration_since(Instant::now());
    let calm = Instant::now() + CALM_MAX.min(left / 2);
    loop {
        let now = Instant::now();
        wild.store(now >= calm, Ordering::Relaxed);
        let Some(made) = drive() else { return };
        attack.tally.attempts += made;
        if !attack.on() || now >= calm + WILD_MAX {
            return;
        }
        std::thread::yield_now();
    }
}

/// Numbers without a pattern.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        self.0 >> 24
    }

    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.next() as usize % values.len()]
    }
}

/// A frame without tags.
pub fn frame([from, to]: [[u8; 6]; 2]) -> Vec<u8> {
    let mut frame = [to, from].concat();
    // An EtherType for experiments: nothing behind it is parsed.
    frame.extend([0x88, 0xb5]);
    frame.resize(FRAME_LEN as usize, 0);
    frame
}

/// Buffers that are sent: few, so that each is rewritten often.
pub struct Buffers {
    /// Memory of each.
    pub areas: Vec<Area>,
    /// Offset of a frame in its memory: a multiple of 8, so that a MAC address is in one word.
    pub at: usize,
}

impl Buffers {
    /// Rewrites headers until `over`: addresses and tags; `also` the rest, by the version.
    pub fn rewrite_headers(
        &self,
        [from, to]: [[u8; 6]; 2],
        over: &AtomicBool,
        also: impl Fn(&Area, u64),
    ) {
        let mut version = 0_u64;
        while !over.load(Ordering::Relaxed) {
            version += 1;
            let [a, b, c, d, e, f] = if version.is_multiple_of(2) { to } else { from };
            let word = u64::from_le_bytes([a, b, c, d, e, f, from[0], from[1]]);
            for area in &self.areas {
                also(area, version);
                area.store_u64(self.at, word);
                HEADER_TAGS.iter().for_each(|tag| area.store_u64(self.at + tag, version));
            }
        }
    }

    /// Rewrites payload until `over`.
    pub fn rewrite_payload(&self, over: &AtomicBool) {
        let mut version = 0_u64;
        while !over.load(Ordering::Relaxed) {
            version += 1;
            for area in &self.areas {
                PAYLOAD_TAGS.iter().for_each(|tag| area.store_u64(self.at + tag, version));
            }
        }
    }
}

/// What a receiver saw.
#[derive(Default)]
pub struct Seen {
    torn: AtomicU64,
    mixed: AtomicU64,
}

impl Seen {
    /// Counts what a frame at an offset of a buffer, a multiple of 4, shows, if it is from `from`.
    pub fn inspect(&self, buffer: &Area, at: usize, from: [u8; 6]) {
        let byte = |i: usize| buffer.load_u32(at + i / 4 * 4).to_le_bytes()[i % 4];
        let mac = |i: usize| std::array::from_fn::<u8, 6, _>(|k| byte(i + k));
        if mac(6) != from {
            return;
        }
        if mac(0) == from {
            self.mixed.fetch_add(1, Ordering::Relaxed);
        }
        let tag = |i: usize| (buffer.load_u32(at + i), buffer.load_u32(at + i + 4));
        let differs = |tags: [usize; 2]| tag(tags[0]) != tag(tags[1]);
        if differs(HEADER_TAGS) || differs(PAYLOAD_TAGS) {
            self.torn.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The counters.
    pub fn tally(&self) -> Tally {
        let [torn, mixed] = [&self.torn, &self.mixed].map(|count| count.load(Ordering::Relaxed));
        Tally { torn, mixed, ..Tally::default() }
    }
}
