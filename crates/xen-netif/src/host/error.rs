//! What a host can refuse, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use shm::{MapError, TableError};
use switch::account::OverLimit;

use crate::store::StoreError;

/// Why a host did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A device node is not there.
    #[error(
        "{node} is not there: is this a Xen domain? If so, load its module (modprobe {module}); \
         without Xen use xen-local"
    )]
    NoNode {
        /// Which.
        node: PathBuf,
        /// Whose it is.
        module: &'static str,
    },
    /// There is a device node but no device.
    #[error("{0}: no such device: this machine does not run under Xen; without Xen use xen-local")]
    NoDevice(PathBuf),
    /// A device node is not for us.
    #[error("{0}: permission denied; run as root, or give this user read and write to it")]
    NotAllowed(PathBuf),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No front end is there.
    #[error("domain {0} is not there: its front end has gone")]
    NoDomain(u16),
    /// A grant that is not there, not for us, or not for writing.
    #[error("domain {domid}: grant {gref} cannot be mapped: {why}")]
    BadGrant {
        /// Whose.
        domid: u16,
        /// Which.
        gref: u32,
        /// Why not.
        why: String,
    },
    /// More pages than the guest's port may have mapped.
    #[error("domain {domid}: its pages are not mapped: {error}")]
    OverLimit {
        /// Whose.
        domid: u16,
        /// How many, and whose limit.
        error: OverLimit,
    },
    /// A port that is not there, or not for us.
    #[error("domain {domid}: event channel {port} cannot be bound: {why}")]
    BadPort {
        /// Whose.
        domid: u16,
        /// Which.
        port: u32,
        /// Why not.
        why: String,
    },
    /// No more pages to grant.
    #[error("{pages} more pages cannot be granted: {advice}")]
    NoPages {
        /// How many were asked for.
        pages: u32,
        /// What to do.
        advice: &'static str,
    },
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Pages that make no memory.
    #[error(transparent)]
    Table(TableError),
    /// What only another host than Xen can refuse.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
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

impl HostError {
    /// A device node could not be opened.
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
