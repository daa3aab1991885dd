//! Ring protocols as pure index logic over shared memory; both halves of each.
//!
//! A ring has no file descriptor, no clock and no thread: it reports new work, takes and returns
//! buffers, and says whether the peer must be notified. [`virtq`] holds the virtqueues of virtio
//! 1.3, split and packed; [`xen`] the tx, rx and control rings of Xen's netif.
//!
//! Every verb is a transaction. `take` copies descriptors out exactly once and checks the copies;
//! `put` (or `add`) prepares; nothing is visible to the peer before `publish`; `arm` includes the
//! re-check, so that no caller can sleep on a ring that has work.
#![forbid(unsafe_code)]

mod bits;
mod index;
pub mod virtq;
pub mod xen;

/// Result of `arm`: whether the caller may sleep.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Nothing to do; the peer will notify. Sleeping is safe.
    Armed,
    /// Work arrived before the event was armed. Continue; do not sleep.
    WorkPending,
}
