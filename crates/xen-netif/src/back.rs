//! The back half of a vif: its handshake over xenstore.
//!
//! * `state`: the states of both ends, and the transitions between them
//! * `keys`: keys offered by a back end and requested by a front end, validated
//! * `vif`: one vif's state machine
//! * `plug`: connects its rings to the queue pairs of a port
//! * `bus`: all vifs of one back-end domain, and changes of their number
//! * `tree`, `store`: the interface to xenstore, and xenstore
//!
//! The state machine makes decisions and writes keys; rings are mapped and channels bound by a
//! [`Plug`], all of them or none.

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
    CtrlKeys, FEATURES, FrontFeatures, Offer, QUEUES_MAX, QueueKeys, Refused, Request, without,
};
pub use plug::{KeptRings, Queues, RingPositions, RingsState, Socket};
pub use state::State;
pub use store::DomainStore;
pub use tree::{Failure, Tree};
pub use vif::{Handshake, Interface, Plug, Settings, Status, VifId, VifState};

/// Maximum MTU of a vif, in bytes.
pub const MTU_MAX: u16 = 9216;
