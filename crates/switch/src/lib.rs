//! The Ethernet switch: forwarding of frames between ports.
//!
//! Ports implement [`port::Ingress`] and [`port::Egress`] and do not know each other. The switch
//! handles frames as [`shm::Seg`]ments; it has no file descriptor, file or clock: time is passed
//! in.
//!
//! * [`account`]: resources charged to a port, and their limits
//! * [`frame`]: bursts of frames and their private header copies
//! * [`vnet`]: the virtio-net header, checked
//! * [`port`]: the interface of a port
//! * [`flow`]: MACs, VLAN and flow of a frame
//! * [`fdb`]: the forwarding database
//! * [`offload`]: segmentation and checksums in software, for ports that lack them
//! * [`forward`]: forwarding of an ingress burst to egress queues
//! * [`handover`]: commands and pauses for worker threads
//! * [`hold`]: frames held for a full destination
//! * [`poll`]: when to poll and when to sleep, when to notify
//! * [`fair`]: fair sharing of workers' time between ports
//! * [`schedule`]: all that a worker decides, without clock, descriptor or thread
//! * [`serving`]: which ports a thread serves, for its panic
//! * [`tenant`]: rules of ports: port security, isolation, VLANs
//! * [`tuning`]: run-time settings of a queue
//! * [`time`]: durations and instants as types
//! * [`stats`]: counters, one for each cause
#![forbid(unsafe_code)]

pub mod account;
pub mod direct;
pub mod fair;
pub mod fdb;
pub mod flow;
pub mod forward;
pub mod frame;
pub mod handover;
pub mod hold;
pub mod offload;
pub mod pair;
pub mod poll;
pub mod port;
pub mod schedule;
pub mod serving;
pub mod stats;
mod steering;
pub mod tenant;
pub mod time;
pub mod tuning;
pub mod vnet;
