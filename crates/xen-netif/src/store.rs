//! xenstore: the tree of small values by which the two halves of a vif find each other.
//!
//! * [`wire`]: messages, paths and permissions
//! * [`Store`]: a client, over xenstored's socket, /dev/xen/xenbus, or any socket
//!
//! A server for machines without Xen is in the crate `xen-local`.
//!
//! Paths that do not begin with `/` are below the caller's own `/local/domain/DOMID` (but not over
//! the socket of the real xenstored, where they are below a directory of no use: a back half uses
//! absolute paths).

mod client;
mod error;
pub mod wire;

pub use client::{Store, Transaction};
pub use error::StoreError;
pub use wire::{Access, Errno, Perm};
