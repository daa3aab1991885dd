//! The front half of a vif: its handshake over xenstore, and its queues with their pages.
//!
//! * `step`: what to do next, by the states of both ends
//! * `keys`: what a back end offers, and what we write for it
//! * `vif`: one vif's handshake
//! * `tx`, `rx`: the rings of one queue, with the pages granted for them
//! * `ctrl`: the control ring, and static grants over it
//! * `rings`: what makes all of them
//!
//! The handshake decides and writes keys; making rings and channels is done by a [`Rings`].

mod ctrl;
mod keys;
mod rings;
mod rx;
mod step;
mod tx;
mod vif;

pub use ctrl::{Ctrl, Kept};
pub use keys::{Agreed, Wishes};
pub use rings::{FrontRings, Queue, Sizes};
pub use rx::{RxDrops, RxQueue, vnet_hdr, wants_head};
pub use step::{Step, step};
pub use tx::{Refused, TxQueue};
pub use vif::{BACK, Handshake, Named, Rings, Status};
