//! The switch among many guests in virtual time, all from one seed.
//!
//! ```text
//!   guests (honest, slow, deaf, hostile)         the product's ports and forwarder
//!     driver halves ── kick, late ──▶ latch ──▶ workers: process, arm, wait
//!     asleep until  ◀── call, late ──────────── device halves
//!                          ledger: every frame, from sender to end
//! ```
//! Phase 1, safety: whatever the guests do, frames arrive whole and in order within their flow,
//! where they belong, losses are counted, and a hostile guest stops no port but its own. Phase 2,
//! healing: traffic ends, slow guests turn fast, deaf ones listen, hostile ones fall silent, and
//! then everything must drain, in bounded time. Queues are polled only when they are hot, and only
//! a kick makes them so: after each step, no cold queue may have frames unless a kick is on its
//! way.
//!
//! Guests and workers act in small steps with random delays between them, so whatever may happen
//! between two steps does happen: between publishing and looking whether a kick is wanted, between
//! an empty poll and arming, while a kick is on its way. Memory ordering is not simulated; loom
//! does that (`crates/ring/tests/loom.rs`). Nor are threads and sockets: the worker here is a
//! model of the program's, with the same three phases. When it polls and when it sleeps is for
//! [`Polling`] to say.
//!
//! [`Mistake`]s can be ordered, which show that the oracles see them.
#![forbid(unsafe_code)]

mod flawed;
mod frame;
mod guest;
mod ledger;
mod random;
mod switching;
mod worker;
mod world;

pub use flawed::Mistake;
pub use random::Random;
pub use worker::{Linger, Next, Polling};
pub use world::{Finding, Report, run};
