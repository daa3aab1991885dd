//! xenstore: the tree of small values with which the two halves of a vif find each other.
//!
//! * [`wire`]: messages, paths and permissions
//! * [`Store`]: a client, over xenstored's socket, /dev/xen/xenbus, or any socket
//!
//! A server for machines without Xen is in the crate `xen-local`.
//!
//! Paths without a leading `/` are relative to the caller's `/local/domain/DOMID`. The socket of
//! the real xenstored resolves them to an unused directory, so a back half uses absolute paths.

mod client;
mod error;
pub mod wire;

pub use client::{Store, Transaction};
pub use error::StoreError;
pub use wire::{Access, Errno, Perm};
