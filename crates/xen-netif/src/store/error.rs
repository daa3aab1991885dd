//! What can go wrong with a store, and what to do about it.

use std::io;
use std::path::PathBuf;

use super::wire::Errno;
use os::SocketError;

/// Why a store could not be had, or did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Its socket.
    #[error("xenstore: {0}")]
    Socket(#[from] SocketError),
    /// Its device node is not there.
    #[error(
        "xenstore: there is neither xenstored's socket nor {0}: is this a Xen domain? In dom0 \
         start xenstored, elsewhere load the module xenfs (modprobe xenfs)"
    )]
    NoNode(PathBuf),
    /// Its device node is not for us.
    #[error(
        "xenstore: {0}: permission denied; run as root, or give this user read and write to it"
    )]
    NotAllowed(PathBuf),
    /// The system refused.
    #[error("xenstore {name}: {what} failed: {error}")]
    Os {
        /// Which store.
        name: String,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// The connection ended.
    #[error("xenstore {0}: it closed the connection; is it still running?")]
    Gone(String),
    /// No answer.
    #[error("xenstore {0}: no answer within {1} s; is it hung?")]
    Silent(String, u64),
    /// What came is not the protocol.
    #[error("xenstore {name}: {what}; is this a xenstore at all?")]
    Nonsense {
        /// Which store.
        name: String,
        /// What came.
        what: String,
    },
    /// A path that cannot be sent.
    #[error("xenstore path {0:?}: not a path; use letters, digits and -/_@, 3072 bytes at most")]
    BadPath(String),
    /// More than a message holds.
    #[error("xenstore {path}: {len} bytes do not fit a message, which holds {max}")]
    TooLong {
        /// The node.
        path: String,
        /// Path and value, in bytes.
        len: usize,
        /// Most, in bytes.
        max: usize,
    },
    /// The store does not grant it.
    #[error("xenstore {path}: {what} refused: {error}{}", advice(*error))]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// The node.
        path: String,
        /// Why not.
        error: Errno,
    },
    /// A transaction never got through.
    #[error(
        "xenstore {name}: a transaction met with others {tries} times; does someone rewrite the \
         same nodes all the time?"
    )]
    Conflict {
        /// Which store.
        name: String,
        /// How often.
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
    /// What the store answered, if it answered.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { error, .. } => Some(*error),
            _ => None,
        }
    }

    /// Whether the store is lost, so that nothing else will work either.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Os { .. } | Self::Nonsense { .. })
    }
}
