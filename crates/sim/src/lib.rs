//! The switch among many guests in virtual time, all from one seed.
//!
//! ```text
//!   guests (honest, slow, deaf, hostile)         the product's ports, forwarder and scheduler
//!     driver halves ── kick, late ──▶ latch ──▶ workers: effects, carried out one by one
//!     asleep until  ◀── call, late ──────────── device and back halves, TAPs
//!                          ledger: every frame, from sender to end
//! ```
//! Guests have virtqueues, or Xen's rings with grants and event channels (`hypervisor.rs` is what
//! is left of Xen), or are the host behind a TAP (a pair of datagram sockets). On both sides of
//! each ring is the product's own half of it.
//!
//! Phase 1, safety: whatever the guests do, frames arrive whole and in order within their flow,
//! where they belong, losses are counted, and a hostile guest stops no port but its own. Phase 2,
//! healing: traffic ends, slow guests turn fast, deaf ones listen, hostile ones fall silent, and
//! then everything must drain, in bounded time. All the while queues move between workers, and
//! operators change policies, weights and bounds, and drain queues. After each step:
//! - no cold queue may have frames, and no worker sleep that could deliver a held one, unless a
//!   kick or a command is on its way;
//! - a warm queue has a time, and was looked at when it had come;
//! - a guest that sleeps was called by the time that the call policy gives;
//! - each queue is served by one worker, which never finds work and then does none, and takes
//!   nothing from it while it is drained;
//! - a page of a Xen guest is used only while it is granted;
//! - where queues move by load, a full worker gives one away while another is idle;
//! - a receiver that takes nothing for a minute is reported, once, and once when it does again;
//! - a queue that never runs empty had its share of the worker's time.
//!
//! Guests and workers act in small steps with random delays between them, so whatever may happen
//! between two steps does happen: between publishing and looking whether a kick is wanted, between
//! an empty poll and arming, while a kick is on its way. Memory ordering is not simulated; loom
//! does that (`crates/ring/tests/loom.rs`). Nor are threads and sockets: what a worker decides is
//! the program's own object (`switch::schedule`), and `worker.rs` only carries its effects out, in
//! virtual time.
//!
//! [`Mistake`]s can be ordered, which show that the oracles see them: effects that are dropped or
//! altered, and ports that do something wrong.
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
mod settings;
mod shares;
mod shown;
mod switching;
mod worker;
mod world;

pub use finding::Finding;
pub use flawed::Mistake;
pub use world::{Report, run};
