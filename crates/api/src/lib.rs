//! The operator interface of pvswitch: one schema of ports, options, policies and settings, and
//! the protocol of the control socket, HTTP and JSON.
//!
//! Each setting is one entry of a table ([`schema`]). The command line, the file, `ctl set`,
//! `--help` and the tables of `docs/settings.md` are derived from it. Each operation of the control
//! socket is one entry of another table ([`routes`]); server, client and `docs/openapi.json` are
//! derived from that. This crate returns valid
//! values only; the program applies them. It uses no other crate of the workspace.
#![forbid(unsafe_code)]

mod address;
pub mod config;
pub mod control;
pub mod docs;
pub mod event;
pub mod file;
pub mod help;
pub mod http;
mod inherited;
mod invalid;
pub mod json_schema;
mod mac;
pub mod near;
pub mod openapi;
pub mod port;
pub mod problem;
mod queues;
mod request;
pub mod routes;
pub mod schema;
pub mod set;
mod settings;

pub use self::address::Address;
pub use self::config::{Config, PORTS_MAX};
pub use self::inherited::{INHERITED, inherited};
pub use self::mac::mac;
pub use self::port::{PortError, PortText};
pub use self::problem::Problem;
pub use self::queues::{PerQueue, QUEUES_MAX, no_queue, queue_number};
pub use self::request::Request;
pub use self::settings::Settings;
