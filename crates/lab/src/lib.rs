//! The lab: studies of what polling, workers, notifications and copies trade against each other.
//!
//! A [`Study`](study::Study) is a matrix of cells, each measured several times; its results are a
//! folder ([`store`]) that a report is made of ([`report`]). Everything measured is a process: the
//! program itself as switch and as guests, and the tools of the kernel's network.

#![forbid(unsafe_code)]

pub mod plan;
pub mod report;
pub mod stage;
pub mod stats;
pub mod store;
pub mod studies;
pub mod study;
