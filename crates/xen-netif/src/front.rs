//! The front half of a vif: its handshake over xenstore, and its queues with their pages.
//!
//! * `step`: the next step, from the states of both ends
//! * `keys`: the back end's offer, and the keys we write
//! * `vif`: one vif's handshake
//! * `tx`, `rx`: the rings of one queue, with the pages granted for them
//! * `ctrl`: the control ring, and static grants over it
//! * `rings`: creates all of them
//!
//! The handshake makes decisions and writes keys; rings and channels are created by [`Rings`].

mod ctrl;
mod keys;
mod rings;
mod rx;
mod step;
mod tx;
mod vif;

pub use ctrl::{Ctrl, Kept};
pub use keys::{Agreed, FrontOptions};
pub use rings::{FrontRings, Queue, Sizes};
pub use rx::{RxDrops, RxQueue, needs_head, vnet_hdr};
pub use step::{Step, step};
pub use tx::{Refused, TxQueue};
pub use vif::{BACK, Handshake, Named, Rings, Status};
