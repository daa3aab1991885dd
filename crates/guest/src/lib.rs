//! The driver half as a library: a NIC for a namespace ([`nic`]), a traffic generator
//! ([`generate`]), the guest that both use ([`Guest`]), and one that migrates ([`vm`]).
//!
//! A guest connects to a port of the switch by vhost-user or Xen netif ([`connect()`]), as a plain
//! struct says ([`ConnectOptions`]); the program parses command lines. Times, limits and the costs
//! of sleeping are parameters.
#![forbid(unsafe_code)]

mod connect;
mod control;
mod error;
pub mod generate;
mod guest;
pub mod nic;
mod poll_group;
mod report;
mod ring;
mod rx;
mod settings;
mod tx;
pub mod vm;
mod xen;

pub use self::connect::{Connect, ConnectError, ConnectOptions, Link, Target, connect};
pub use self::error::Error;
pub use self::guest::{Guest, Pair};
pub use self::report::Report;
pub use self::ring::{HDR_LEN, Malformed};
pub use self::settings::{Setting, Settings};
