//! Errors of the switch and of requests to it.

use std::path::PathBuf;

use api::file::Problems;
use os::SocketError;
use xen_netif::host::HostError;

use crate::http;

/// Error that prevents the start of the switch or the addition of a port.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The name is in use.
    #[error("port '{0}' exists already: give each port its own name")]
    DuplicatePort(String),
    /// The port does not exist.
    #[error("no port '{0}'{1}")]
    NoPort(String, String),
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The socket is one of this switch.
    #[error(
        "port '{name}': socket {} is that of {by}; give each port a path of its own",
        socket.display()
    )]
    OwnSocket {
        /// The port.
        name: String,
        /// Its socket.
        socket: PathBuf,
        /// What listens there.
        by: String,
    },
    /// The TAP cannot be opened.
    #[error("port '{name}': {error}")]
    Tap {
        /// The port.
        name: String,
        /// Why.
        error: uplink::TapError,
    },
    /// The hypervisor or its replacement is not available.
    #[error("port '{name}': {error}")]
    Xen {
        /// The port.
        name: String,
        /// Why.
        error: HostError,
    },
    /// There are too many ports.
    #[error("a switch has at most {0} ports: remove one first")]
    TooManyPorts(u16),
    /// An unexpected error of a system call.
    #[error("{what}: {error}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The system's error.
        error: std::io::Error,
    },
    /// The request is invalid.
    #[error("{0}")]
    Request(String),
    /// The configuration file is invalid.
    #[error(transparent)]
    Config(#[from] Problems),
    /// The HTTP server cannot start.
    #[error(transparent)]
    Http(#[from] http::HttpError),
}
