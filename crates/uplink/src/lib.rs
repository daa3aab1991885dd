//! Ports to the host: TAP interfaces, stream sockets, packet capture files, and a port that drops.
//!
//! * [`open`] opens or creates a TAP interface, in any network namespace, and returns its queues.
//! * [`inherit`] uses queues that the parent process opened.
//! * [`TapFd`] moves batches of frames through one queue, many per system call, directly from and
//!   into the caller's memory. All frames to and from a TAP use it.
//! * [`TapIngress`] and [`TapEgress`] make a switch port of a queue.
//! * [`Xdp`] opens AF_XDP sockets on an interface; [`XdpIngress`] and [`XdpEgress`] make a switch
//!   port of a queue.
//! * [`StreamIngress`] and [`StreamEgress`]: a stream socket in QEMU's framing ([`Inbox`]).
//! * [`DgramIngress`] and [`DgramEgress`]: datagram sockets, one frame a datagram.
//! * [`evpn`] announces addresses in a Linux bridge, for BGP EVPN.
//! * [`PcapWriter`] writes captured frames as pcapng; [`PcapCount`] counts those of a stream.
//! * [`NullIngress`] and [`NullEgress`]: receive nothing, drop everything.
//!
//! This crate has no thread, timer or epoll set; the program waits on the descriptors (of
//! [`TapFd`]) and calls when they are readable.
#![deny(unsafe_code)]

mod dgram;
mod egress;
pub mod evpn;
mod fd;
mod framing;
mod ingress;
mod link_watch;
mod netlink;
mod netns;
mod null;
mod packet;
mod pcap;
mod stream;
mod sys;
mod tap;
mod xdp;

pub use dgram::{DgramEgress, DgramIngress};
pub use egress::TapEgress;
pub use fd::{Batching, TapFd};
pub use framing::{BadLength, FRAME_MAX, FRAME_MIN, Inbox, LENGTH_LEN};
pub use ingress::TapIngress;
pub use link_watch::LinkWatch;
pub use netns::in_netns;
pub use null::{NullEgress, NullIngress};
pub use packet::{
    PACKET_OFFLOADS, PacketLink, PacketOptions, clear_packet_error, find_interface, open_packet,
    packet_carrier, packet_link, packet_losses, set_packet_blocked, unblock_packet,
};
pub use pcap::{Direction, PcapCount, PcapWriter};
pub use stream::{End, Socket, StreamEgress, StreamIngress};
pub use sys::{Io, ReadBatch, WriteBatch};
pub use tap::{Create, InheritedTap, Tap, TapError, TapOptions};
pub use tap::{adopt, check_permission, inherit, open, request_offloads};
pub use tap::{set_carrier, set_mtu, set_persist};
pub use xdp::{
    Xdp, XdpEgress, XdpError, XdpHanded, XdpIngress, XdpMode, XdpOptions, XdpShape, pin_xdp,
};

/// Length of the virtio-net header before each frame on a TAP queue, in bytes (virtio 1.3, with
/// `num_buffers`, which a TAP ignores).
pub const VNET_LEN: usize = 12;
