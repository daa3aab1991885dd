//! Errors of a host, with advice.

use std::io;
use std::path::{Path, PathBuf};

use shm::{MapError, TableError};
use switch::account::OverLimit;

use crate::store::StoreError;

/// Error of a host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A device node does not exist.
    #[error(
        "{node} does not exist: if this is a Xen domain, load its module (modprobe {module}); \
         without Xen, use xen-local"
    )]
    NoNode {
        /// The node.
        node: PathBuf,
        /// Its kernel module.
        module: &'static str,
    },
    /// The device node has no device.
    #[error("{0}: no such device: this machine does not run under Xen; without Xen, use xen-local")]
    NoDevice(PathBuf),
    /// Permission denied for a device node.
    #[error("{0}: permission denied; run as root, or give this user read and write permission")]
    NotAllowed(PathBuf),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The domain does not exist.
    #[error("domain {0} does not exist: its front end has disconnected")]
    NoDomain(u16),
    /// A grant that does not exist, is not for this domain, or is read-only.
    #[error("domain {domid}: grant {gref} cannot be mapped: {why}")]
    BadGrant {
        /// The granting domain.
        domid: u16,
        /// The grant reference.
        gref: u32,
        /// The reason.
        why: String,
    },
    /// The limit of the port's account.
    #[error("domain {domid}: cannot map its pages: {error}")]
    OverLimit {
        /// The granting domain.
        domid: u16,
        /// The number of pages, and the limit.
        error: OverLimit,
    },
    /// An event channel that does not exist or is not for this domain.
    #[error("domain {domid}: event channel {port} cannot be bound: {why}")]
    BadPort {
        /// The remote domain.
        domid: u16,
        /// Its port.
        port: u32,
        /// The reason.
        why: String,
    },
    /// No pages can be granted.
    #[error("cannot grant {pages} more pages: {advice}")]
    NoPages {
        /// Number of pages requested.
        pages: u32,
        /// What to do.
        advice: &'static str,
    },
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Pages that do not form a memory table.
    #[error(transparent)]
    Table(TableError),
    /// An error of another host.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// An error of the system.
    #[error("{at}: {what} failed: {error}")]
    Os {
        /// The file or device.
        at: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl HostError {
    /// Error of opening a device node.
    pub(super) fn of_node(node: &Path, module: &'static str, error: io::Error) -> Self {
        const ENODEV: i32 = libc::ENODEV;
        const ENXIO: i32 = libc::ENXIO;
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::NotFound, _) => Self::NoNode { node: node.into(), module },
            (io::ErrorKind::PermissionDenied, _) => Self::NotAllowed(node.into()),
            (_, Some(ENODEV | ENXIO)) => Self::NoDevice(node.into()),
            _ => Self::Os { at: node.into(), what: "open", error },
        }
    }
}
