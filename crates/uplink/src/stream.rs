//! A connected stream socket as the queues of a port, in QEMU's framing
//! ([`framing`](crate::framing)).
//!
//! Frames have no header with offload requests: those to such a port are complete, with checksums,
//! and no longer than its MTU allows. They are copied once more than others, through the socket.
//!
//! Both queues outlive connections. The program connects them, and disconnects them after a
//! [`Fault`](switch::port::Fault) of the ingress queue, which says that the connection has ended.

mod egress;
mod ingress;
mod room;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

pub use self::egress::StreamEgress;
pub(crate) use self::egress::{SEGMENTS_BYTES, append, append_parts};
pub use self::ingress::StreamIngress;
pub(crate) use self::room::Room;

use crate::framing::BadLength;

/// A socket shared by the queues of a port.
pub type Socket = Arc<dyn AsFd + Send + Sync>;

/// Why a connection ended.
#[derive(Debug)]
pub enum End {
    /// The peer closed it.
    Closed,
    /// The peer broke the framing.
    BadLength(BadLength),
    /// The peer sent descriptors. To close them may block.
    Descriptors(Vec<OwnedFd>),
    /// A system call failed.
    Os(std::io::Error),
}

impl End {
    /// Name of its counter; `None`: an end in order.
    pub fn cause(&self) -> Option<&'static str> {
        match self {
            Self::Closed => None,
            Self::BadLength(_) => Some("bad_length"),
            Self::Descriptors(_) => Some("unexpected_descriptors"),
            Self::Os(_) => Some("socket"),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("its peer closed the connection"),
            Self::BadLength(bad) => bad.fmt(f),
            Self::Descriptors(_) => {
                f.write_str("its peer sent file descriptors, which have no use")
            }
            Self::Os(error) => write!(f, "reading its socket failed: {error}"),
        }
    }
}

#[cfg(test)]
mod tests;
