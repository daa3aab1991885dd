//! Packet sockets (AF_PACKET): the frames of an interface of the host
//! ([0036](../../../docs/design/0036-af-packet.md)).
//!
//! A socket is read and written as a queue of a TAP is, by [`TapIngress`](crate::TapIngress) and
//! [`TapEgress`](crate::TapEgress): a virtio-net header, then the frame, with its VLAN tag.

pub(crate) mod sys;

use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use switch::vnet::Offloads;

use self::sys::Fanout;
use crate::netns::in_netns;
use crate::tap::TapError;

const _: () = assert!(sys::FRAME_AT == crate::VNET_LEN);

/// Bytes of frames, with the kernel's own of each, that wait in a socket to be read.
const RECEIVE_BYTES: i32 = 8 << 20;
/// The same, until the interface has sent them.
const SEND_BYTES: i32 = 1 << 20;
/// Offloads that the kernel accepts in frames sent. UDP segmentation is not among them: kernels
/// before 6.2 refuse such frames, and there is no way to ask.
pub const PACKET_OFFLOADS: Offloads = Offloads { uso4: false, uso6: false, ..Offloads::ALL };

/// Options for [`open_packet`].
#[derive(Clone, Debug)]
pub struct PacketOptions {
    /// Name of the interface.
    pub name: String,
    /// Its network namespace: a name under /run/netns or a path; `None` for our own.
    pub netns: Option<String>,
    /// Number of sockets, among which the kernel spreads flows.
    pub queues: NonZeroU16,
    /// Whether they are [blocked](set_packet_blocked) from the start.
    pub blocked: bool,
}

/// State of an interface as one of its packet sockets knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketLink {
    /// Frames pass.
    Up,
    /// It is set down; its socket works again once it is up.
    Down,
    /// There is no such interface any more, and the socket never works again.
    Removed,
}

/// Opens packet sockets on an interface, promiscuous. Frames that the host itself sends there are
/// not received.
///
/// # Errors
/// [`TapError`] with what failed, where, and what to do.
pub fn open_packet(options: &PacketOptions) -> Result<Vec<Arc<OwnedFd>>, TapError> {
    match &options.netns {
        None => open_here(options),
        Some(netns) => in_netns(netns, || open_here(options))?,
    }
}

/// Opens in the namespace of the calling thread.
fn open_here(options: &PacketOptions) -> Result<Vec<Arc<OwnedFd>>, TapError> {
    let name = &options.name;
    let os =
        |what: &str, error: io::Error| TapError::Os { what: format!("{what} `{name}`"), error };
    let mut all: Vec<Arc<OwnedFd>> = Vec::new();
    for _ in 0..options.queues.get() {
        let socket = sys::socket().map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => TapError::NoPermission {
                what: format!("open a packet socket on interface `{name}`"),
                capability: "CAP_NET_RAW",
            },
            _ => os("open a packet socket on interface", error),
        })?;
        let index = sys::index(socket.as_fd(), name).map_err(|e| os("find interface", e))?;
        let Some(index) = index else {
            let (name, netns) = (name.clone(), options.netns.clone());
            return Err(TapError::NoLink { name, netns });
        };
        sys::set_up(socket.as_fd(), RECEIVE_BYTES, SEND_BYTES)
            .map_err(|error| os("set up a packet socket on interface", error))?;
        if options.blocked {
            set_packet_blocked(socket.as_fd(), true)
                .map_err(|error| os("block a packet socket on interface", error))?;
        }
        let is_ethernet = sys::bind(socket.as_fd(), index, libc::ETH_P_ALL as u16);
        if !is_ethernet.map_err(|error| os("bind a packet socket to interface", error))? {
            return Err(TapError::NotEthernet { name: name.clone() });
        }
        sys::set_promiscuous(socket.as_fd(), index)
            .map_err(|error| os("receive all frames of interface", error))?;
        all.push(Arc::new(socket));
    }
    if let [first, others @ ..] = &all[..]
        && !others.is_empty()
    {
        let spread = |error: io::Error| match error.raw_os_error() {
            // Before Linux 6.13.
            Some(libc::EINVAL) if packet_link(first.as_fd()) == PacketLink::Down => {
                TapError::LinkDown { name: name.clone() }
            }
            _ => os("spread the frames of interface", error),
        };
        let group = sys::fanout(first.as_fd(), Fanout::New).map_err(spread)?;
        for socket in others {
            sys::fanout(socket.as_fd(), Fanout::Join(group)).map_err(spread)?;
        }
    }
    Ok(all)
}

/// State of the interface of a packet socket.
pub fn packet_link(socket: BorrowedFd<'_>) -> PacketLink {
    match sys::flags(socket) {
        Ok(flags) if flags & libc::IFF_UP != 0 => PacketLink::Up,
        Ok(_) => PacketLink::Down,
        Err(_) => PacketLink::Removed,
    }
}

/// Whether the interface of a packet socket is up and has carrier.
pub fn packet_carrier(socket: BorrowedFd<'_>) -> bool {
    let wanted = libc::IFF_UP | libc::IFF_RUNNING;
    sys::flags(socket).is_ok_and(|flags| flags & wanted == wanted)
}

/// Blocks a packet socket: the kernel drops each frame for it, and wakes nobody; or unblocks it.
/// Frames that were queued before are dropped in both cases.
///
/// # Errors
/// The kernel refuses.
pub fn set_packet_blocked(socket: BorrowedFd<'_>, blocked: bool) -> io::Result<()> {
    sys::set_blocked(socket, true)?;
    // No frame is added meanwhile, so this ends.
    while sys::drop_frame(socket) {}
    if blocked { Ok(()) } else { unblock_packet(socket) }
}

/// Unblocks a packet socket. Frames that are queued stay.
///
/// # Errors
/// The kernel refuses.
pub fn unblock_packet(socket: BorrowedFd<'_>) -> io::Result<()> {
    sys::set_blocked(socket, false)
}

/// Finds an interface in a network namespace (`None`: ours).
///
/// # Errors
/// [`TapError::NoLink`], [`TapError::NoNetns`] and similar: there is none, or it cannot be known.
pub fn find_interface(name: &str, netns: Option<&str>) -> Result<(), TapError> {
    let find = || {
        let socket = sys::socket()?;
        sys::index(socket.as_fd(), name)
    };
    let found = match netns {
        None => find(),
        Some(netns) => in_netns(netns, find)?,
    };
    let os = |error| TapError::Os { what: format!("find interface `{name}`"), error };
    match found.map_err(os)? {
        Some(_) => Ok(()),
        None => Err(TapError::NoLink { name: name.into(), netns: netns.map(Into::into) }),
    }
}

/// Takes the pending error of a packet socket, whose interface went down meanwhile.
pub fn clear_packet_error(socket: BorrowedFd<'_>) {
    let _ = rustix::net::sockopt::socket_error(socket);
}

/// Number of frames that the kernel dropped since the last call, because the socket was full.
pub fn packet_losses(socket: BorrowedFd<'_>) -> u64 {
    sys::drops(socket).unwrap_or(0).into()
}
