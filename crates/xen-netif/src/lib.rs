//! Xen netif, both ends: connects a Xen guest's rings and grants to the switch.
//!
//! * [`store`]: xenstore's wire protocol, and a client
//! * [`host`]: grants and event channels, of real Xen or of a replacement
//! * [`back`]: the back half's handshake, one state machine per vif
//! * [`port`]: its rings as ports of the switch
//! * [`front`]: the front half, for `nic`, `gen` and tests
//!
//! Names and numbers are those of Xen's public headers `io/netif.h`, `io/ring.h`, `io/xs_wire.h`
//! and `io/xenbus.h`.
#![deny(unsafe_code)]

pub mod back;
pub mod front;
pub mod host;
pub mod port;
pub mod store;
