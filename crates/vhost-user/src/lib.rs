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
pub mod frontend;
pub mod message;
pub mod sys;

/// Bits of virtio-net and vhost features that the protocol itself looks at.
pub mod feature {
    /// VIRTIO_NET_F_MTU.
    pub const MTU: u64 = 1 << 3;
    /// VIRTIO_NET_F_CTRL_VQ.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// VIRTIO_NET_F_MQ.
    pub const MQ: u64 = 1 << 22;
    /// VIRTIO_F_INDIRECT_DESC.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VHOST_USER_F_PROTOCOL_FEATURES.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// VIRTIO_F_VERSION_1.
    pub const VERSION_1: u64 = 1 << 32;
    /// VIRTIO_F_RING_PACKED.
    pub const RING_PACKED: u64 = 1 << 34;
    /// VIRTIO_F_IN_ORDER.
    pub const IN_ORDER: u64 = 1 << 35;
}

/// What of the acknowledged `features` a ring cares about.
pub fn ring_features(features: u64) -> ring::virtq::Features {
    ring::virtq::Features {
        packed: features & feature::RING_PACKED != 0,
        event_idx: features & feature::EVENT_IDX != 0,
        indirect: features & feature::INDIRECT_DESC != 0,
        in_order: features & feature::IN_ORDER != 0,
    }
}
