//! Cases on Xen's rings, on grants, and on xenstore.

pub mod control;
pub mod guest;
pub mod packets;
pub mod racing;
pub mod states;
