//! The Ethernet switch: what happens to a frame between two ports.
//!
//! Ports implement [`port::Ingress`] and [`port::Egress`] and never see each other. The switch
//! knows frames as [`shm::Seg`]ments, never a descriptor, a file or a clock: time is passed in.
//!
//! * [`account`]: what a port makes us spend, and its limits
//! * [`frame`]: bursts of frames and their private header copies
//! * [`vnet`]: the virtio-net header, checked
//! * [`port`]: what a port must do
//! * [`flow`]: MACs, VLAN and flow of a frame
//! * [`fdb`]: which MAC is behind which port
//! * [`offload`]: segmentation and checksums in software, for ports that lack them
//! * [`forward`]: from an ingress burst to egress queues
//! * [`hold`]: frames that wait for a full destination
//! * [`poll`]: when to poll and when to sleep, when to notify
//! * [`fair`]: who is served next, and by which worker
//! * [`tuning`]: what an operator can set for a queue while it runs
//! * [`stats`]: counters, one for each cause
#![forbid(unsafe_code)]

pub mod account;
pub mod direct;
pub mod fair;
pub mod fdb;
pub mod flow;
pub mod forward;
pub mod frame;
pub mod hold;
pub mod offload;
pub mod pair;
pub mod poll;
pub mod port;
pub mod stats;
mod steering;
pub mod tuning;
pub mod vnet;
