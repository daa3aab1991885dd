//! Errors of a directory, with advice.

use std::io;
use std::path::PathBuf;

use os::SocketError;
use shm::MapError;
use xen_netif::host::HostError;
use xen_netif::store::StoreError;

/// Error of a host in a directory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of its sockets.
    #[error("xen-local: {0}")]
    Socket(#[from] SocketError),
    /// The directory cannot be created.
    #[error("xen-local directory {dir}: cannot create: {error}; choose another")]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The other end does not reply in time.
    #[error("xen-local {0}: no reply from the back end; does it serve another front end?")]
    Timeout(PathBuf),
    /// The other end closed the connection.
    #[error("xen-local {0}: the back end closed the connection; restart it")]
    Gone(PathBuf),
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// An error of the system.
    #[error("{at}: {what} failed: {error}")]
    Os {
        /// The file or directory.
        at: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
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
