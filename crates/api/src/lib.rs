//! The operator interface of pvswitch: one schema of ports, options, policies and settings, and
//! the protocol of the control socket.
//!
//! Each setting is one entry of a table ([`schema`]). The command line, the file, `ctl set`,
//! `--help` and the tables of `docs/settings.md` are derived from it. This crate returns valid
//! values only; the program applies them. It uses no other crate of the workspace.
#![forbid(unsafe_code)]

mod address;
pub mod config;
pub mod control;
pub mod docs;
pub mod file;
pub mod help;
mod inherited;
pub mod json_schema;
mod mac;
pub mod near;
pub mod port;
mod queues;
pub mod schema;
pub mod set;
mod settings;

pub use self::address::Address;
pub use self::config::{Config, PORTS_MAX};
pub use self::inherited::{INHERITED, inherited};
pub use self::mac::mac;
pub use self::port::{PortError, PortText};
pub use self::queues::{PerQueue, QUEUES_MAX, no_queue, queue_number};
pub use self::settings::Settings;
