//! Xen netif, both ends: how a Xen guest's rings and grants come to the switch.
//!
//! * [`store`]: xenstore's wire protocol, a client, and a server of our own
//! * [`host`]: grants and event channels, of real Xen or of this machine's own making
//! * [`back`]: the back half's handshake, one state machine for each vif
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
