//! Opening TAP interfaces, and what can go wrong with it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use switch::vnet::Offloads;

use crate::netns::in_netns;
use crate::{VNET_LEN, netlink, sys};

/// Where the kernel hands out TAP queues.
const DEVICE: &str = "/dev/net/tun";
/// What it takes to create interfaces and to change them.
const NET_ADMIN: &str = "CAP_NET_ADMIN";
/// Longest interface name (IFNAMSIZ less the terminator).
const NAME_LEN_MAX: usize = 15;

/// What to open.
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Name of the interface.
    pub name: String,
    /// Network namespace it lives in: a name under /run/netns or a path; `None` for our own.
    pub netns: Option<String>,
    /// Queues wanted. An existing interface made without `multi_queue` gives one.
    pub queues: NonZeroU16,
    /// Whether to create it if it does not exist. What is created lives until its last queue is
    /// closed.
    pub create: bool,
    /// Whether to set it up.
    pub up: bool,
    /// MTU to set.
    pub mtu: Option<u32>,
    /// MAC address to set: the host's own on this wire, not a guest's.
    pub mac: Option<[u8; 6]>,
    /// Frames the kernel keeps for each queue before it drops (its own default: 500).
    pub queue_len: Option<u32>,
}

/// An open TAP interface.
#[derive(Debug)]
pub struct Tap {
    /// Its queues: non-blocking, each frame preceded by a virtio-net header of
    /// [`VNET_LEN`] bytes, little-endian.
    pub queues: Vec<Arc<OwnedFd>>,
    /// Whether it did not exist before.
    pub created: bool,
    /// What the kernel may leave to be done in frames read from it.
    pub offloads_read: Offloads,
    /// What the kernel takes in frames written to it.
    pub offloads_write: Offloads,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its MTU.
    pub mtu: u32,
}

/// Why a TAP interface could not be opened.
#[derive(Debug)]
pub enum TapError {
    /// The name is empty, too long or has characters the kernel refuses.
    BadName {
        /// The name.
        name: String,
    },
    /// There is no /dev/net/tun.
    NoDevice {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The system does not let us.
    NoPermission {
        /// What was refused.
        what: String,
        /// The capability that allows it.
        capability: &'static str,
    },
    /// It does not exist and was not to be created.
    NoInterface {
        /// Its name.
        name: String,
        /// The namespace looked in.
        netns: Option<String>,
    },
    /// An interface of that name exists, but is no TAP.
    NotTap {
        /// Its name.
        name: String,
    },
    /// Another process has its only queue.
    Busy {
        /// Its name.
        name: String,
    },
    /// The kernel gives no more queues.
    TooManyQueues {
        /// The interface.
        name: String,
        /// Queues wanted.
        wanted: u16,
        /// Queues given.
        given: u16,
    },
    /// The network namespace does not exist.
    NoNetns {
        /// As the operator named it.
        netns: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The path exists, but is no network namespace.
    NotNetns {
        /// The path.
        path: PathBuf,
    },
    /// The system refused something else.
    Os {
        /// What was tried.
        what: String,
        /// What it said.
        error: io::Error,
    },
}

impl fmt::Display for TapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName { name } => write!(
                f,
                "`{name}` is no interface name: 1 to {NAME_LEN_MAX} bytes, without white space, \
                 `/`, `:` and `%`; choose another"
            ),
            Self::NoDevice { path } => write!(
                f,
                "{} does not exist: load the kernel's TAP driver (modprobe tun), or give this \
                 container the device (--device {DEVICE})",
                path.display()
            ),
            Self::NoPermission { what, capability } => {
                let setcap = capability.to_ascii_lowercase();
                write!(f, "no permission to {what}: that takes {capability}; run as root")?;
                write!(f, " or grant it to the program (setcap {setcap}+ep)")?;
                if *capability == NET_ADMIN {
                    let make = "ip tuntap add dev NAME mode tap multi_queue user $USER";
                    write!(f, ", or let root make the interface for you ({make})")?;
                }
                Ok(())
            }
            Self::NoInterface { name, netns } => {
                write!(f, "interface `{name}` does not exist")?;
                let mut command = String::from("ip");
                if let Some(netns) = netns {
                    write!(f, " in network namespace `{netns}`")?;
                    command = format!("ip -n {netns}");
                }
                write!(f, ": make it ({command} tuntap add dev {name} mode tap multi_queue)")?;
                write!(f, " or correct the name")
            }
            Self::NotTap { name } => write!(
                f,
                "interface `{name}` exists but is not a TAP (a `tun` or a network card perhaps): \
                 name a TAP, or one that does not exist yet"
            ),
            Self::Busy { name } => write!(
                f,
                "interface `{name}` is in use by another process, and has one queue only: stop \
                 that process, or make the interface with `multi_queue`"
            ),
            Self::TooManyQueues { name, wanted, given } => write!(
                f,
                "interface `{name}` gave {given} of {wanted} queues: ask for {given} at most"
            ),
            Self::NoNetns { netns, path } => write!(
                f,
                "network namespace `{netns}` does not exist ({} is missing): make it (ip netns \
                 add NAME), or name one of `ip netns list` or a path such as /proc/PID/ns/net",
                path.display()
            ),
            Self::NotNetns { path } => write!(
                f,
                "{} is not a network namespace: name one of `ip netns list` or a path such as \
                 /proc/PID/ns/net",
                path.display()
            ),
            Self::Os { what, error } => write!(f, "cannot {what}: {error}"),
        }
    }
}

impl std::error::Error for TapError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Os { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// Opens or creates a TAP interface.
///
/// # Errors
/// [`TapError`] says what was wrong, where, and what to do.
pub fn open(options: &TapOptions) -> Result<Tap, TapError> {
    open_through(Path::new(DEVICE), options)
}

fn open_through(device: &Path, options: &TapOptions) -> Result<Tap, TapError> {
    let name = &options.name;
    let bad = |b: u8| b.is_ascii_whitespace() || b.is_ascii_control() || b"/:%".contains(&b);
    let dots = name == "." || name == "..";
    if name.is_empty() || name.len() > NAME_LEN_MAX || dots || name.bytes().any(bad) {
        return Err(TapError::BadName { name: name.clone() });
    }
    match &options.netns {
        None => open_here(device, options),
        Some(netns) => in_netns(netns, || open_here(device, options))?,
    }
}

/// In the namespace of the calling thread.
fn open_here(device: &Path, options: &TapOptions) -> Result<Tap, TapError> {
    let name = &options.name;
    let os = |what: &str, error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            TapError::NoPermission { what: format!("{what} `{name}`"), capability: NET_ADMIN }
        }
        _ => TapError::Os { what: format!("{what} `{name}`"), error },
    };
    let socket = UnixDatagram::unbound().map_err(|e| os("open a socket for interface", e))?;
    let existed = sys::if_exists(&socket, name).map_err(|e| os("look for interface", e))?;
    if !existed && !options.create {
        return Err(TapError::NoInterface { name: name.clone(), netns: options.netns.clone() });
    }
    let queues = attach_all(device, options, existed)?;
    let first = &queues[0];
    let (offloads_read, offloads_write) =
        set_offloads(first).map_err(|e| os("set the offloads of interface", e))?;
    if let Some(mac) = options.mac {
        sys::if_set_mac(&socket, name, mac).map_err(|e| os("set the MAC address of", e))?;
    }
    if let Some(mtu) = options.mtu {
        let what = format!("set MTU {mtu} on interface");
        sys::if_set_mtu(&socket, name, mtu).map_err(|e| os(&what, e))?;
    }
    if let Some(frames) = options.queue_len {
        let set = netlink::set_queue_len(&socket, name, frames);
        set.map_err(|e| os("set the queue length of interface", e))?;
    }
    if options.up {
        sys::if_set_up(&socket, name).map_err(|e| os("set up interface", e))?;
    }
    let mac = sys::if_mac(&socket, name).map_err(|e| os("ask for the MAC address of", e))?;
    let mtu = sys::if_mtu(&socket, name).map_err(|e| os("ask for the MTU of", e))?;
    let queues = queues.into_iter().map(|file| Arc::new(OwnedFd::from(file))).collect();
    Ok(Tap { queues, created: !existed, offloads_read, offloads_write, mac, mtu })
}

/// As many queues as wanted, or one if the interface has no more.
fn attach_all(device: &Path, options: &TapOptions, existed: bool) -> Result<Vec<File>, TapError> {
    let name = &options.name;
    let wanted = options.queues.get();
    let mut queues = Vec::with_capacity(usize::from(wanted));
    for given in 0..wanted {
        let file = open_device(device)?;
        match attach(&file, name, libc::IFF_MULTI_QUEUE) {
            Ok(()) => queues.push(file),
            // An existing interface without `multi_queue` is refused like one that is no TAP.
            Err(e) if given == 0 && existed && e.raw_os_error() == Some(libc::EINVAL) => {
                attach(&file, name, 0).map_err(|e| attach_error(name, e, wanted, given))?;
                queues.push(file);
                break;
            }
            Err(e) => return Err(attach_error(name, e, wanted, given)),
        }
    }
    Ok(queues)
}

fn open_device(device: &Path) -> Result<File, TapError> {
    let opened =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(device);
    opened.map_err(|error| match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound, _) | (_, Some(libc::ENXIO | libc::ENODEV)) => {
            TapError::NoDevice { path: device.into() }
        }
        (io::ErrorKind::PermissionDenied, _) => TapError::NoPermission {
            what: format!("open {}", device.display()),
            capability: NET_ADMIN,
        },
        _ => TapError::Os { what: format!("open {}", device.display()), error },
    })
}

fn attach(file: &File, name: &str, extra: libc::c_int) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | extra;
    sys::tun_attach(file, name, flags)?;
    sys::tun_set_vnet_len(file, VNET_LEN)?;
    sys::tun_set_vnet_le(file)
}

fn attach_error(name: &str, error: io::Error, wanted: u16, given: u16) -> TapError {
    let name = name.to_string();
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => TapError::NoPermission {
            what: format!("open TAP interface `{name}`"),
            capability: NET_ADMIN,
        },
        Some(libc::EINVAL) => TapError::NotTap { name },
        Some(libc::EBUSY) => TapError::Busy { name },
        Some(libc::E2BIG) => TapError::TooManyQueues { name, wanted, given },
        _ => TapError::Os { what: format!("open TAP interface `{name}`"), error },
    }
}

/// Asks for all offloads, or for all but UDP segmentation where the kernel is older than 6.2.
/// Returns what frames read may ask for, and what frames written may ask for.
fn set_offloads(file: &File) -> io::Result<(Offloads, Offloads)> {
    let all = ask_offloads(file, &Offloads::ALL)?;
    Ok((all, all))
}

/// Has the kernel leave undone, in frames read from the interface of `queue`, what is in `want`
/// and no more, as far as it can tell them apart. Returns what it may leave undone now; frames
/// that wait to be read may ask for what was asked for before. A queue of the interface is
/// enough: they are all alike.
///
/// # Errors
/// The interface is gone.
pub fn ask_offloads(queue: impl AsFd, want: &Offloads) -> io::Result<Offloads> {
    // No segmentation without checksums, no ECN without TCP, and UDP for both IP versions.
    let tcp = want.csum && (want.tso4 || want.tso6);
    let uso = want.csum && want.uso4 && want.uso6;
    let mut asked = Offloads {
        csum: want.csum,
        csum_v4_only: false,
        tso4: want.csum && want.tso4,
        tso6: want.csum && want.tso6,
        ecn: tcp && want.ecn,
        uso4: uso,
        uso6: uso,
    };
    if uso && sys::tun_set_offload(&queue, offload_bits(&asked)).is_ok() {
        return Ok(asked);
    }
    (asked.uso4, asked.uso6) = (false, false);
    sys::tun_set_offload(&queue, offload_bits(&asked))?;
    Ok(asked)
}

/// Tells the kernel whether the interface of `queue` has a carrier: without one it stays up and
/// sends nothing, and whoever watches it (a routing daemon, a bond) goes another way.
///
/// # Errors
/// The interface is gone, or the kernel is older than 5.0.
pub fn set_carrier(queue: impl AsFd, on: bool) -> io::Result<()> {
    sys::tun_set_carrier(queue, on)
}

fn offload_bits(offloads: &Offloads) -> libc::c_uint {
    let bits = [
        (offloads.csum, libc::TUN_F_CSUM),
        (offloads.tso4, libc::TUN_F_TSO4),
        (offloads.tso6, libc::TUN_F_TSO6),
        (offloads.ecn, libc::TUN_F_TSO_ECN),
        (offloads.uso4, libc::TUN_F_USO4),
        (offloads.uso6, libc::TUN_F_USO6),
    ];
    bits.iter().filter(|(on, _)| *on).fold(0, |all, (_, bit)| all | bit)
}

#[cfg(test)]
#[path = "tap/tests.rs"]
mod tests;
