//! Ring protocols as pure index logic over shared memory; both halves of each.
//!
//! A ring here has no descriptor to poll, no clock and no thread: it answers what is new, takes
//! and gives back, and says whether the peer wants to be told. [`virtq`] holds the virtqueues of
//! virtio 1.3, split and packed; [`xen`] the tx, rx and control rings of Xen's netif.
//!
//! Every verb is a transaction. `take` copies descriptors out exactly once and checks the copies;
//! `put` (or `add`) prepares; nothing is visible to the peer before `publish`; `arm` re-checks
//! by itself, so that no caller can sleep on a ring that has work.
#![forbid(unsafe_code)]

pub mod virtq;
pub mod xen;

/// What an `arm` found.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Nothing to do; the peer will notify. Sleeping is safe.
    Armed,
    /// Work arrived meanwhile. Go on; do not sleep.
    WorkPending,
}
