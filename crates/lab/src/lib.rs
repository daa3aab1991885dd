//! The lab: studies of what polling, workers, notifications and copies trade against each other.
//!
//! A [`Study`](study::Study) is a matrix of cells, each measured several times; its results are a
//! folder ([`store`]) that a report is made of ([`report`]). Everything measured is a process:
//! `pvswitch` as switch and as guests, and the tools of the kernel's network.
//!
//! The program is `pvswitch-lab`, which `pvswitch lab` runs: [`run::run`] is its `run`, [`list`]
//! and [`show`] are `list` and `report`.

#![forbid(unsafe_code)]

pub mod distance;
pub mod error;
pub mod isolate;
pub mod machine;
pub mod plan;
pub mod report;
pub mod run;
pub mod stage;
pub mod stats;
pub mod store;
pub mod studies;
pub mod study;

pub use error::Error;
pub use run::{Ask, list, print, show};
pub use study::Studies;

/// Both ends of what runs commands in guests with a kernel of their own.
pub mod guest {
    pub use crate::stage::vm::{relay, serve};
}
