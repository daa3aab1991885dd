//! The back half of a vif: its handshake over xenstore.
//!
//! * `state`: the states of both ends, and the ways between them
//! * `keys`: what a back end offers and a front end asks for, checked
//! * `vif`: one vif's state machine
//! * `plug`: its rings, plugged into the queue pairs of a port
//! * `bus`: all vifs of one back-end domain, and those that come and go
//! * `tree`, `store`: what of xenstore they need, and xenstore
//!
//! The state machine decides and writes keys; mapping rings and binding channels is done by a
//! [`Plug`], all of it or nothing.

mod bus;
mod keys;
mod plug;
mod state;
mod store;
mod tree;
mod vif;

#[cfg(test)]
pub(crate) mod fake;

pub use bus::Bus;
pub(crate) use keys::decimal;
pub use keys::{
    CtrlKeys, FEATURES, Offer, QUEUES_MAX, QueueKeys, Refused, Request, Takes, without,
};
pub use plug::{Queues, Socket};
pub use state::State;
pub use store::Home;
pub use tree::{Failure, Tree};
pub use vif::{Handshake, Plug, Settings, Status, VifId};

/// Largest MTU of a vif, in bytes.
pub const MTU_MAX: u16 = 9216;
