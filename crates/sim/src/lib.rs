//! Seeded simulation of the switch and many guests, in virtual time.
//!
//! ```text
//!   guests (fast, slow, stalled, hostile)      the product's ports, forwarder and scheduler
//!     driver halves ── kick, delayed ──▶ latch ──▶ workers: effects, one at a time
//!     sleep until   ◀── call, delayed ──────────── device and back halves, TAPs
//!                      ledger: each frame, from its sender to delivery or drop
//! ```
//! A guest has virtqueues, or Xen rings with grants and event channels (`hypervisor.rs` simulates
//! those), or is the host behind a TAP (a pair of datagram sockets). Both halves of each ring are
//! the product's own.
//!
//! Phase 1, safety: whatever the guests do, frames arrive intact, in order within their flow, and
//! only at their destinations; losses are counted; a hostile guest stops no port but its own.
//! Phase 2, healing: traffic ends, slow guests become fast, stalled ones take frames again,
//! hostile ones go idle, and everything must drain in bounded time. Meanwhile queues move between
//! workers, guests restart them, and operators change placement, policies, weights and limits, and
//! drain queues. Some ports have rules and rates. Invariants, checked after each step:
//! - unless a kick or a command is in flight, no cold queue has frames, and no worker sleeps that
//!   could deliver a held frame;
//! - a warm queue has a time at which it is polled, and was polled by then;
//! - a sleeping guest is called within the delay of the call policy;
//! - each queue is served by one worker, which does not find work without doing any, and takes
//!   no frames from the queue while it is drained;
//! - a page of a Xen guest is used only while it is granted;
//! - where queues move by load, a fully loaded worker gives one away while another is idle;
//! - a receiver that takes nothing for a minute is reported once, and so is its recovery;
//! - a queue that never runs empty gets its share of the worker's time.
//!
//! Guests and workers act in small steps with random delays in between, so that all interleavings
//! of steps occur: between publishing and the check whether to kick, between an empty poll and
//! arming, while a kick is in flight. Memory ordering is not simulated; loom covers it
//! (`crates/ring/tests/loom.rs`). Nor are threads and sockets: workers are driven by the program's
//! own scheduler (`switch::schedule`); `worker.rs` only carries out its effects in virtual time.
//!
//! A [`Mistake`] is a defect injected to show that the oracles detect it: an effect that is
//! dropped or altered, or a faulty port.
#![forbid(unsafe_code)]

mod around;
mod balance;
mod cast;
mod finding;
mod flawed;
mod frame;
mod guest;
mod hypervisor;
mod ledger;
mod paced;
mod port;
mod random;
mod rules;
mod seen;
mod settings;
mod shares;
mod shown;
mod switching;
mod worker;
mod world;

pub use finding::Finding;
pub use flawed::Mistake;
pub use seen::Seen;
pub use world::{Report, run};
