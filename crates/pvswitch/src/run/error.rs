//! Errors of the switch and of requests to it.

use std::path::PathBuf;

use api::Problem;
use api::file::{Invalid, Problems};
use os::SocketError;
use uplink::{TapError, XdpError};
use xen_netif::host::HostError;

use crate::http;
use crate::pool::PoolError;

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
        "port '{name}': socket {} is already used by {by}; give each port its own path",
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
        error: TapError,
    },
    /// AF_XDP sockets cannot be opened.
    #[error("port '{name}': {error}")]
    Xdp {
        /// The port.
        name: String,
        /// Why.
        error: XdpError,
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
    /// The address is not in the table.
    #[error("{0}")]
    NoEntry(String),
    /// The queue does not exist.
    #[error("{0}")]
    NoQueue(String),
    /// Another port, or the state of the switch, does not permit it.
    #[error("{0}")]
    Conflict(String),
    /// A setting or an option of a port is invalid.
    #[error(transparent)]
    Setting(#[from] Invalid),
    /// The workers cannot start.
    #[error(transparent)]
    Pool(#[from] PoolError),
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

impl RunError {
    /// Text of the error that an interface does not exist, which a port does not make, or the
    /// network namespace of one.
    pub fn missing_interface(&self) -> Option<String> {
        match self {
            Self::Tap { error, .. } | Self::Xdp { error: XdpError::Interface(error), .. } => {
                let is_missing =
                    matches!(error, TapError::NoLink { .. } | TapError::NoNetns { .. });
                is_missing.then(|| error.to_string())
            }
            _ => None,
        }
    }

    /// Returns the reply to the request that failed.
    pub fn problem(&self) -> Problem {
        let (status, field, remedy) = match self {
            Self::DuplicatePort(_) => (409, Some("path.name"), "use another name, or remove it"),
            Self::NoPort(..) => (404, Some("path.name"), "GET /v1/ports lists all ports"),
            Self::NoEntry(_) => (404, Some("path.mac"), "GET /v1/fdb lists all addresses"),
            Self::NoQueue(_) => (404, Some("path.queue"), "GET /v1/ports/{name} shows how many"),
            Self::OwnSocket { .. } => (409, Some("body.socket"), "use another path"),
            Self::Socket(_) => (422, Some("body.socket"), "use another path"),
            Self::Tap { .. } | Self::Xdp { .. } => {
                (422, Some("body.interface"), "use another interface")
            }
            Self::Xen { .. } => (422, Some("body"), "use a vif that exists"),
            Self::TooManyPorts(_) => (409, Some("path.name"), "remove a port first"),
            Self::Conflict(_) => (409, None, "resolve the conflict named in the text first"),
            Self::Setting(_) => (422, None, "use a value listed in docs/settings.md"),
            Self::Config(_) => (422, None, "correct the file; `pvswitch check` reads it, too"),
            Self::Request(_) => (422, None, "see the text of the error"),
            Self::Os { .. } | Self::Http(_) | Self::Pool(_) => {
                (500, None, "see the log of the switch")
            }
        };
        let mut problem = Problem::new(status, self.to_string(), remedy);
        problem.field = field.map(Into::into);
        match self {
            Self::Setting(Invalid { key, .. }) => {
                let of = |key: &String| format!("body.{key}");
                problem.field = Some(key.as_ref().map_or_else(|| "body".into(), of));
            }
            Self::Config(Problems(problems)) => {
                problem.problems = serde_json::to_value(problems).ok().map(Box::new);
            }
            _ => {}
        }
        problem
    }
}
