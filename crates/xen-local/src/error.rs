//! Why a directory cannot be served, or used, and what to do about it.

use std::io;
use std::path::PathBuf;

use os::SocketError;
use shm::MapError;
use xen_netif::host::HostError;
use xen_netif::store::StoreError;

/// Why there is no host in a directory, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of its sockets.
    #[error("xen-local: {0}")]
    Socket(#[from] SocketError),
    /// The directory could not be made.
    #[error("xen-local directory {dir}: cannot be made: {error}; choose another")]
    Directory {
        /// Which.
        dir: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The other side does not answer.
    #[error("xen-local {0}: the back end does not answer; does it serve another front end?")]
    Silent(PathBuf),
    /// The other side closed.
    #[error("xen-local {0}: the back end closed the connection; start it again")]
    Gone(PathBuf),
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The system refused.
    #[error("{at}: {what} failed: {error}")]
    Os {
        /// Where.
        at: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
}

impl From<Error> for HostError {
    fn from(error: Error) -> Self {
        match error {
            Error::Store(error) => Self::Store(error),
            Error::Map(error) => Self::Map(error),
            Error::Os { at, what, error } => Self::Os { at, what, error },
            other => Self::Other(Box::new(other)),
        }
    }
}
