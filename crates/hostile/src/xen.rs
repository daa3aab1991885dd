//! Cases of Xen's rings, of grants, and of xenstore.

pub mod control;
pub mod guest;
pub mod packets;
pub mod states;
