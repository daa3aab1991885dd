//! The back half of a vif: its handshake over xenstore.
//!
//! * `state`: the states of both ends, and the ways between them
//! * `keys`: what a back end offers and a front end asks for, checked
//! * `vif`: one vif's state machine
//! * `bus`: all vifs of one back-end domain, and those that come and go
//! * `tree`: what of xenstore they need
//!
//! The state machine decides and writes keys; mapping rings and binding channels is done by a
//! [`Plug`], all of it or nothing.

mod bus;
mod keys;
mod state;
mod tree;
mod vif;

#[cfg(test)]
pub(crate) mod fake;

pub use bus::Bus;
pub use keys::{
    CtrlKeys, FEATURES, Offer, QUEUES_MAX, QueueKeys, Rate, Refused, Request, Takes, without,
};
pub use state::State;
pub use tree::{Failure, Tree};
pub use vif::{Handshake, Plug, Settings, Status, VifId};

/// Largest MTU of a vif, in bytes.
pub const MTU_MAX: u16 = 9216;
