//! vhost-user, both ends: access to a guest's memory and rings.
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
//! * [`connection`]: the state machine on its socket
//! * [`device`]: the interface it drives
//! * [`frontend`]: the other end, for `nic`, `gen`, fake guests and tests
//! * [`net`] and [`port`]: the virtio-net device and its rings, as ports of the switch
//! * [`foreign`]: descriptors from a peer, their kinds and where they are closed
//!
//! Names and numbers are those of QEMU's `docs/interop/vhost-user.rst`; its sections are quoted
//! where they are implemented. Post-copy, IOMMU and in-flight tracking are not offered.
#![forbid(unsafe_code)]

pub mod backend;
pub mod connection;
pub mod device;
pub mod error;
#[cfg(test)]
mod fake;
pub mod feature;
pub mod foreign;
pub mod frontend;
pub mod message;
pub mod net;
pub mod port;

use os::SocketError;

/// Returns advice on a socket error that only vhost-user can give: either end can listen. To be
/// appended to the error's own text.
pub fn advice(error: &SocketError) -> &'static str {
    match error {
        // Only a side that connects gets this error.
        SocketError::NoListener(_) => {
            ", or listen here (mode=server), and connect from there (mode=client)"
        }
        SocketError::NoPeer(_) => "; is the other side in client mode?",
        _ => "",
    }
}

/// Ring features among the acknowledged `features`.
pub fn ring_features(features: u64) -> ring::virtq::Features {
    ring::virtq::Features {
        packed: features & feature::RING_PACKED != 0,
        event_idx: features & feature::EVENT_IDX != 0,
        indirect: features & feature::INDIRECT_DESC != 0,
        in_order: features & feature::IN_ORDER != 0,
    }
}
