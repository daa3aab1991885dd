//! The lab: studies of the trade-offs of polling, workers, notifications and copies.
//!
//! A [`Study`](study::Study) is a matrix of cells, each measured several times. Its results are a
//! folder ([`store`]), from which a report is made ([`report`]). The lab measures processes:
//! `pvswitch` as switch and as guests, and network tools.
//!
//! The program is `pvswitch-lab`, which `pvswitch lab` runs: [`run::run`] is its `run`, [`list`]
//! and [`show`] are `list` and `report`, [`index`] is `index`, [`import`] is `import`.

#![forbid(unsafe_code)]

pub mod claims;
pub mod distance;
pub mod error;
pub mod hugepages;
pub mod isolate;
pub mod machine;
pub mod plan;
pub mod provenance;
pub mod report;
pub mod run;
pub mod stage;
pub mod stats;
pub mod store;
pub mod studies;
pub mod study;

pub use error::Error;
pub use run::{Ask, import, index, list, print, show};
pub use study::Studies;

/// Guests with their own kernel, and commands in them, at either end.
pub mod guest {
    pub use crate::stage::vm::{relay, serve, uml};
}
