//! Memory shared with a peer that may be hostile: tables, mappings, words, copies.
//!
//! This is the only room of pvswitch with `unsafe` for shared memory. What it gives out is safe to
//! use whatever the peer writes, and at whatever moment:
//!
//! * [`Mapping`]: one mmap of a descriptor. A peer that truncates the file under it costs the
//!   mapping its contents, never the process its life (see [`Mapping::is_lost`]).
//! * [`GuestMemory`]: an immutable table of regions; translates guest addresses to segments.
//! * [`Seg`] and [`SegMut`]: bounded pieces of memory to copy from and to. There is no way to get
//!   a `&[u8]` to guest memory: a peer may change it between two looks.
//! * [`Domain`], [`Grants`] and [`Copies`]: pages that other domains granted, which are copied to
//!   and from without being mapped, many at a time.
//! * [`Private`]: memory that is ours alone, as its host reaches it best.
//! * [`Area`]: a ring's part in shared memory, read and written word by word.
//! * [`sync`]: atomics and fences, the standard ones or loom's.
//!
//! What it does not do: it knows no ring layout, no protocol and no file descriptor's meaning.
#![deny(unsafe_code)]

mod area;
#[cfg(feature = "audit")]
pub mod audit;
mod copy;
mod grant;
mod guard;
mod mapping;
mod memory;
mod private;
mod sys;

pub use area::Area;
pub use copy::{Seg, SegMut};
pub use grant::{Copies, Domain, Failed, GRANT_LEN, Grants, Piece, Side};
pub use mapping::{Access, MapError, Mapping};
pub use memory::{GuestMemory, Region, TableError};
pub use private::Private;

pub use guard::{mappings_lost, prepare};

/// Atomics and fences: the standard ones, or loom's under `cfg(loom)`.
pub mod sync {
    #[cfg(loom)]
    pub use loom::sync::atomic::{Ordering, fence};
    #[cfg(not(loom))]
    pub use std::sync::atomic::{Ordering, fence};
}
