//! Cases on virtqueues and on the vhost-user socket.

pub mod descriptors;
pub mod flood;
pub mod memory;
pub mod messages;
pub mod racing;
pub mod receive;
pub mod rings;
pub mod wire;
