//! Rx ring: pages that a guest posts, and the packets put into them.
//!
//! ```text
//!   slot:   7         8            9          10
//!           request   request      request    request       posted by the front half
//!           response  extra info   response   response      one packet of three buffers
//! ```
//! A response is in the slot of the request it answers, and an extra info in the slot of one whose
//! buffer stays unused; the front half finds buffers by slot, not by id.

mod back;
mod front;

pub use back::BackRx;
pub use front::{FrontRx, RxPacket, RxRefusal, RxSlot};
