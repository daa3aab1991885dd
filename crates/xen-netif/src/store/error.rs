//! Errors of a store, with advice.

use std::io;
use std::path::PathBuf;

use super::wire::Errno;
use os::SocketError;

/// Error of a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An error of its socket.
    #[error("xenstore: {0}")]
    Socket(#[from] SocketError),
    /// Its device node does not exist.
    #[error(
        "xenstore: neither xenstored's socket nor {0} exists: if this is dom0, start xenstored; in \
         another Xen domain, load the module xenfs (modprobe xenfs)"
    )]
    NoNode(PathBuf),
    /// Permission denied for its device node.
    #[error(
        "xenstore: {0}: permission denied; run as root, or give this user read and write permission"
    )]
    NotAllowed(PathBuf),
    /// An error of the system.
    #[error("xenstore {name}: {what} failed: {error}")]
    Os {
        /// Name of the store.
        name: String,
        /// The operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// The connection ended.
    #[error("xenstore {0}: connection closed; check that xenstored runs")]
    Gone(String),
    /// No reply in time.
    #[error("xenstore {0}: no reply within {1} s; check that xenstored runs")]
    Timeout(String, u64),
    /// Data that violates the protocol.
    #[error("xenstore {name}: malformed reply: {what}; is this a xenstore?")]
    Malformed {
        /// Name of the store.
        name: String,
        /// The invalid data.
        what: String,
    },
    /// A path that cannot be sent.
    #[error("xenstore path {0:?}: invalid; use letters, digits and -/_@, at most 3072 bytes")]
    BadPath(String),
    /// A message that is too long.
    #[error("xenstore {path}: {len} bytes do not fit a message, which holds {max}")]
    TooLong {
        /// The path.
        path: String,
        /// Length of path and value, in bytes.
        len: usize,
        /// Maximum, in bytes.
        max: usize,
    },
    /// A request that the store refused.
    #[error("xenstore {path}: {what} refused: {error}{}", advice(*error))]
    Refused {
        /// The operation.
        what: &'static str,
        /// The path.
        path: String,
        /// The store's error.
        error: Errno,
    },
    /// A transaction that conflicted every time.
    #[error(
        "xenstore {name}: a transaction conflicted {tries} times; are the same nodes rewritten all \
         the time?"
    )]
    Conflict {
        /// Name of the store.
        name: String,
        /// Number of attempts.
        tries: u32,
    },
}

/// What to do about it.
fn advice(error: Errno) -> &'static str {
    match error {
        Errno::Eacces | Errno::Eperm => {
            " (permission denied: the node belongs to another domain, or this is not its backend)"
        }
        Errno::Enoent => " (no such node: was the vif removed?)",
        Errno::Enospc | Errno::E2big => " (over a quota: see xenstored's --entry-nb, --watch-nb)",
        _ => "",
    }
}

impl StoreError {
    /// The store's error, if it replied with one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { error, .. } => Some(*error),
            _ => None,
        }
    }

    /// Whether the store is lost, so that all later requests fail, too.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Os { .. } | Self::Malformed { .. })
    }
}
