//! vhost-user, both ends: how a guest's memory and rings come to the switch.
//!
//! ```text
//!   front-end (QEMU, UML, DPDK, `nic`)         back-end (a port of the switch)
//!     frontend::Frontend ── socket ──▶ connection ──▶ backend::Backend
//!                                                                   │ device::Device
//!                                                                   ▼
//!                                                              the virtqueue port
//! ```
//! * [`message`]: the wire format, both directions
//! * [`backend`]: the protocol's state machine, one for each connection
//! * [`connection`]: that machine on its socket
//! * [`device`]: what that machine drives
//! * [`frontend`]: the other end, for `nic`, `gen`, fake guests and tests
//! * [`sys`]: every system call of this room
//! * [`net`] and [`port`]: the virtio-net device and its rings, as ports of the switch
//! * [`outside`]: descriptors from a peer, their kinds and where they are closed
//! * [`backoff`]: when to try a lost connection again
//!
//! Names and numbers are those of QEMU's `docs/interop/vhost-user.rst`; its sections are quoted
//! where they are obeyed. What is not here: dirty logging, post-copy, IOMMU and in-flight tracking
//! are not offered.
#![deny(unsafe_code)]

pub mod backend;
pub mod backoff;
pub mod connection;
pub mod device;
pub mod error;
#[cfg(test)]
mod fake;
pub mod feature;
pub mod frontend;
pub mod message;
pub mod net;
pub mod outside;
pub mod port;
pub mod sys;

/// What of the acknowledged `features` a ring cares about.
pub fn ring_features(features: u64) -> ring::virtq::Features {
    ring::virtq::Features {
        packed: features & feature::RING_PACKED != 0,
        event_idx: features & feature::EVENT_IDX != 0,
        indirect: features & feature::INDIRECT_DESC != 0,
        in_order: features & feature::IN_ORDER != 0,
    }
}
