//! Many guests and one back-end in virtual time, all from one seed.
//!
//! ```text
//!   guests (honest, slow, hostile)              back-end under test
//!     driver halves ── kick, late ──▶ latch ──▶ turn, turn, turn, sleep
//!     asleep until  ◀── call, late ──────────── device halves
//! ```
//! Phase 1, safety: whatever the guests do, frames arrive whole and in order within their flow,
//! losses are counted, and a hostile guest costs nobody but itself. Phase 2, healing: traffic
//! ends, slow guests turn fast, hostile ones fall silent, and then everything must drain. Nobody
//! acts in that phase unless a kick or a call woke them, so a lost wake-up is a hang, and found.
//!
//! Each guest and the back-end work in small steps with random delays between them, so whatever
//! may happen between two steps does happen. Memory ordering is not simulated; loom does that
//! (`crates/ring/tests/loom.rs`).
//!
//! The back-end is whatever implements [`Backend`]; [`Mini`] is a small one, with bugs to order,
//! which show that the oracles see them.
#![forbid(unsafe_code)]

mod frame;
mod guest;
mod mini;
mod random;
mod world;

pub use guest::{Link, Ring};
pub use mini::{Bug, Mini};
pub use random::Random;
pub use world::{Finding, Report, run};

/// What is under test: the switch's side of every ring.
pub trait Backend {
    /// A kick, or the time asked for, woke it. What it does about that, it does in its turns.
    fn wake(&mut self);

    /// One small piece of work. Calls to guests (by their index) go into `calls`.
    fn turn(&mut self, now_ns: u64, calls: &mut Vec<(usize, Ring)>) -> Turn;

    /// What it counted for the port of guest `guest`.
    fn count(&self, guest: usize) -> Count;
}

/// What a back-end does after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It wants another turn.
    Again,
    /// It sleeps until a kick, or until this time.
    Sleep(
        /// In ns.
        Option<u64>,
    ),
}

/// What a back-end counted for one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Frames taken from the guest and given back to it.
    pub taken: u64,
    /// Those of them that were delivered to another guest.
    pub forwarded: u64,
    /// Those of them that were not.
    pub dropped: u64,
    /// Frames delivered to the guest.
    pub delivered: u64,
    /// Why the port was stopped.
    pub fault: Option<String>,
}
