//! Memory shared with a possibly hostile peer: tables, mappings, words, copies.
//!
//! This is the only crate of pvswitch with `unsafe` for shared memory. Its types are safe to use
//! whatever the peer writes, at any time:
//!
//! * [`Mapping`]: one mmap of a descriptor. If a peer truncates its file, the mapping loses its
//!   contents and the process survives (see [`Mapping::is_lost`]).
//! * [`GuestMemory`]: an immutable table of regions; translates guest addresses to segments.
//! * [`Seg`] and [`SegMut`]: bounded pieces of memory to copy from and to. There is no way to get a
//!   `&[u8]` to guest memory: a peer may change it between two reads.
//! * [`Domain`], [`Grants`] and [`Copies`]: batched copies to and from pages that other domains
//!   granted, without mapping them.
//! * [`Private`]: unshared memory, of the kind that a grant host copies fastest.
//! * [`Area`]: a ring's part in shared memory, read and written word by word.
//! * [`DirtyLog`]: pages of a guest's memory that were written, while it migrates; [`Marks`]
//!   collects those of a burst.
//! * [`sync`]: atomics, fences and locks, the standard ones or loom's.
//!
//! This crate does not know ring layouts, protocols, or the meaning of file descriptors.
#![deny(unsafe_code)]

mod area;
#[cfg(feature = "audit")]
pub mod audit;
mod copy;
mod dirty;
mod grant;
mod guard;
mod mapping;
mod memory;
mod private;
mod published;
pub mod sync;
#[cfg(not(miri))]
mod sys;
#[cfg(miri)]
mod sys_miri;
#[cfg(miri)]
use sys_miri as sys;

pub use area::Area;
pub use copy::{Seg, SegMut};
pub use dirty::{DirtyLog, LOG_PAGE, MarkAll, Marks};
pub use grant::{Copies, Domain, Failed, GRANT_LEN, Grants, Piece, Side};
pub use mapping::{Access, MapError, Mapping};
pub use memory::{GuestMemory, Region, TableError};
pub use private::Private;

pub use guard::{mappings_lost, prepare};
