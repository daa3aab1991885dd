//! Errors of a NIC or a generator.

use os::SocketError;
use uplink::TapError;

use crate::connect::ConnectError;
use crate::ring::Malformed;

/// Failure of a NIC or a generator, at start or later.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options contradict each other, or are not possible on this machine or switch.
    #[error("{0}")]
    Usage(String),
    /// There is no connection to the switch.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The control socket cannot be created.
    #[error("--control: {0}")]
    Control(SocketError),
    /// The interface cannot be opened.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The switch violated the ring protocol.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] std::io::Error),
    /// Anything else; the text says what, where, and what to do.
    #[error("{0}")]
    Failed(String),
}
