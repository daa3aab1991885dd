//! Opening of TAP interfaces, and its errors.

use std::fmt;
use std::fs::File;
use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use switch::vnet::Offloads;

use crate::netns::in_netns;
use crate::{VNET_LEN, netlink, sys};

/// Device that provides TAP queues.
const DEVICE: &str = "/dev/net/tun";
/// Capability required to create and configure interfaces.
const NET_ADMIN: &str = "CAP_NET_ADMIN";
/// Longest interface name (IFNAMSIZ less the terminator).
const NAME_LEN_MAX: usize = 15;

/// When [`open`] creates an interface. One that it created is removed when its last queue is
/// closed, unless it is to persist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// Never: it must exist.
    Never,
    /// If it does not exist.
    IfMissing,
    /// Always: it must not exist.
    Always,
}

/// Options for [`open`].
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Name of the interface.
    pub name: String,
    /// Its network namespace: a name under /run/netns or a path; `None` for our own.
    pub netns: Option<String>,
    /// Queues requested. An existing interface made without `multi_queue` has one.
    pub queues: NonZeroU16,
    /// Whether to create it.
    pub create: Create,
    /// Whether to set it up.
    pub up: bool,
    /// MTU to set.
    pub mtu: Option<u32>,
    /// MAC address to set: that of the host, not of a guest.
    pub mac: Option<[u8; 6]>,
    /// Frames that the kernel queues, for each queue, before it drops (kernel default: 500).
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
    /// Offloads that frames read from it may need.
    pub offloads_read: Offloads,
    /// Offloads that the kernel accepts in frames written to it.
    pub offloads_write: Offloads,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its MTU.
    pub mtu: u32,
}

/// Error while opening a TAP interface.
#[derive(Debug)]
pub enum TapError {
    /// The name is empty, too long or has characters the kernel refuses.
    BadName {
        /// The name.
        name: String,
    },
    /// There is no /dev/net/tun.
    NoDevice {
        /// Path that was tried.
        path: PathBuf,
    },
    /// Permission denied.
    NoPermission {
        /// The refused operation.
        what: String,
        /// The required capability.
        capability: &'static str,
    },
    /// This process may not create interfaces.
    MayNotCreate,
    /// It exists, and was to be created.
    Exists {
        /// Its name.
        name: String,
    },
    /// It does not exist and was not to be created.
    NoInterface {
        /// Its name.
        name: String,
        /// The namespace searched.
        netns: Option<String>,
    },
    /// An interface of that name exists, but is not a TAP.
    NotTap {
        /// Its name.
        name: String,
    },
    /// Another process uses its only queue.
    Busy {
        /// Its name.
        name: String,
    },
    /// The kernel provides no more queues.
    TooManyQueues {
        /// The interface.
        name: String,
        /// Queues requested.
        wanted: u16,
        /// Queues provided.
        given: u16,
    },
    /// The network namespace does not exist.
    NoNetns {
        /// Name given by the operator.
        netns: String,
        /// Path that was tried.
        path: PathBuf,
    },
    /// The path exists, but is not a network namespace.
    NotNetns {
        /// The path.
        path: PathBuf,
    },
    /// There is no interface for a packet socket.
    NoLink {
        /// Its name.
        name: String,
        /// The namespace searched.
        netns: Option<String>,
    },
    /// Frames of the interface are not Ethernet's.
    NotEthernet {
        /// Its name.
        name: String,
    },
    /// It is down, and this kernel spreads only frames of one that is up.
    LinkDown {
        /// Its name.
        name: String,
    },
    /// An inherited descriptor is not a queue of a TAP as needed.
    NotQueue {
        /// What is wrong.
        what: String,
    },
    /// Another system call failed.
    Os {
        /// The operation.
        what: String,
        /// The system's error.
        error: io::Error,
    },
}

impl fmt::Display for TapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName { name } => write!(
                f,
                "`{name}` is not an interface name: 1 to {NAME_LEN_MAX} bytes, no white space, \
                 `/`, `:` or `%`; choose another"
            ),
            Self::NoDevice { path } => write!(
                f,
                "{} does not exist: load the kernel's TAP driver (modprobe tun), or give this \
                 container the device (--device {DEVICE})",
                path.display()
            ),
            Self::NoPermission { what, capability } => {
                let setcap = capability.to_ascii_lowercase();
                write!(f, "no permission to {what}: {capability} is required; run as root")?;
                write!(f, " or grant it to the program (setcap {setcap}+ep)")?;
                if *capability == NET_ADMIN {
                    let make = "ip tuntap add dev NAME mode tap multi_queue user $USER";
                    write!(f, ", or let root create the interface for you ({make})")?;
                }
                Ok(())
            }
            Self::MayNotCreate => write!(
                f,
                "no permission to create TAP interfaces: {NET_ADMIN} is required; run as root, or \
                 grant it to the program (setcap cap_net_admin+ep; systemd: AmbientCapabilities=)"
            ),
            Self::Exists { name } => write!(
                f,
                "interface `{name}` exists already, and is not this switch's: stop the process \
                 that created it, or remove it (ip link del {name})"
            ),
            Self::NoInterface { name, netns } => {
                write!(f, "interface `{name}` does not exist")?;
                let mut command = String::from("ip");
                if let Some(netns) = netns {
                    write!(f, " in network namespace `{netns}`")?;
                    command = format!("ip -n {netns}");
                }
                write!(f, ": create it ({command} tuntap add dev {name} mode tap multi_queue)")?;
                write!(f, " or correct the name")
            }
            Self::NotTap { name } => write!(
                f,
                "interface `{name}` exists but is not a TAP (perhaps a `tun` or a network card): \
                 name a TAP, or one that does not exist yet"
            ),
            Self::Busy { name } => write!(
                f,
                "interface `{name}` is in use by another process, and has one queue only: stop \
                 that process, or create the interface with `multi_queue`"
            ),
            Self::TooManyQueues { name, wanted, given } => write!(
                f,
                "interface `{name}` has {given} queues, not {wanted}: request at most {given}"
            ),
            Self::NoNetns { netns, path } => write!(
                f,
                "network namespace `{netns}` does not exist ({} is missing): create it (ip netns \
                 add NAME), or name one of `ip netns list` or a path such as /proc/PID/ns/net",
                path.display()
            ),
            Self::NotNetns { path } => write!(
                f,
                "{} is not a network namespace: name one of `ip netns list` or a path such as \
                 /proc/PID/ns/net",
                path.display()
            ),
            Self::NoLink { name, netns } => {
                let netns = netns.as_ref().map_or_else(String::new, |netns| format!(" -n {netns}"));
                write!(f, "interface `{name}` does not exist: name one of `ip{netns} link`")
            }
            Self::NotEthernet { name } => write!(
                f,
                "interface `{name}` is not an Ethernet interface: frames need Ethernet headers"
            ),
            Self::LinkDown { name } => write!(
                f,
                "interface `{name}` is down, and before Linux 6.13 frames are spread over sockets \
                 only while it is up: set it up first (ip link set {name} up), or use queues=1"
            ),
            Self::NotQueue { what } => write!(
                f,
                "the inherited descriptor {what}: pass one that was attached by TUNSETIFF with \
                 IFF_TAP, IFF_NO_PI and IFF_VNET_HDR (pvswitch store-tap does)"
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
/// [`TapError`] with what failed, where, and what to do.
pub fn open(options: &TapOptions) -> Result<Tap, TapError> {
    open_through(Path::new(DEVICE), options)
}

/// Checks whether this process may create interfaces here, without creating one.
///
/// # Errors
/// [`TapError::NoDevice`], [`TapError::NoPermission`] of the device, [`TapError::MayNotCreate`],
/// [`TapError::Os`].
pub fn check_permission() -> Result<(), TapError> {
    check_permission_through(Path::new(DEVICE))
}

fn check_permission_through(device: &Path) -> Result<(), TapError> {
    let file = open_device(device)?;
    // The kernel checks the permission first, then refuses an interface of no type.
    match sys::tun_attach(&file, "pvswitch%d", 0) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(TapError::MayNotCreate)
        }
        Err(error) => Err(TapError::Os { what: "create TAP interfaces".into(), error }),
        Ok(()) => Ok(()),
    }
}

/// Takes over the queues of an interface that another process opened. Its settings stay.
///
/// # Errors
/// [`TapError`]: the descriptors are not its queues.
pub fn adopt(name: &str, queues: Vec<OwnedFd>) -> Result<InheritedTap, TapError> {
    let os = |error| TapError::Os { what: format!("take over interface `{name}`"), error };
    let first = queues.first().ok_or_else(|| os(io::Error::from(io::ErrorKind::NotFound)))?;
    let (offloads, removed) = match request_offloads(first, &Offloads::ALL) {
        Ok(offloads) => (offloads, false),
        Err(error) if error.raw_os_error() == Some(libc::EBADFD) => (Offloads::default(), true),
        Err(error) => return Err(os(error)),
    };
    let queues = queues.into_iter().map(Arc::new).collect();
    Ok(InheritedTap { queues, name: name.into(), offloads, removed })
}

/// Queues of an interface that another process opened.
#[derive(Debug)]
pub struct InheritedTap {
    /// Descriptors of the queues, non-blocking, as those of [`Tap`].
    pub queues: Vec<Arc<OwnedFd>>,
    /// The interface, in whichever network namespace it is.
    pub name: String,
    /// Offloads that frames read, and written, may need.
    pub offloads: Offloads,
    /// Whether the interface was removed meanwhile: its queues only fail.
    pub removed: bool,
}

/// Uses queues of one interface that the parent process passed. Nothing here requires a
/// capability, or the interface's network namespace: whoever opened them has set it up.
///
/// # Errors
/// [`TapError::NotQueue`]: they are something else, or of several interfaces.
pub fn inherit(queues: Vec<OwnedFd>) -> Result<InheritedTap, TapError> {
    let wrong = |what: String| Err(TapError::NotQueue { what });
    let mut name: Option<String> = None;
    for queue in &queues {
        let Ok((of, flags)) = sys::tun_interface(queue) else {
            return wrong("is not a queue of a TAP interface".into());
        };
        let lacks = [
            (flags & libc::IFF_TAP == 0, "is of a TUN interface, `{}`, which has no Ethernet"),
            (flags & libc::IFF_NO_PI == 0, "of `{}` lacks the flag IFF_NO_PI"),
            (flags & libc::IFF_VNET_HDR == 0, "of `{}` lacks the flag IFF_VNET_HDR"),
        ];
        if let Some((_, what)) = lacks.iter().find(|(lacks, _)| *lacks) {
            return wrong(what.replace("{}", &of));
        }
        match &name {
            Some(name) if *name != of => {
                return wrong(format!("is of two interfaces, `{name}` and `{of}`"));
            }
            _ => name = Some(of),
        }
    }
    let Some(name) = name else { return wrong("does not exist".into()) };
    let os = |error| TapError::Os { what: format!("use the inherited interface `{name}`"), error };
    for queue in &queues {
        os::set_nonblocking(queue.as_fd());
        sys::tun_set_vnet_len(queue, VNET_LEN)
            .and_then(|()| sys::tun_set_vnet_le(queue))
            .map_err(os)?;
    }
    let offloads = request_offloads(&queues[0], &Offloads::ALL).map_err(os)?;
    let queues = queues.into_iter().map(Arc::new).collect();
    Ok(InheritedTap { queues, name, offloads, removed: false })
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

/// Opens in the namespace of the calling thread.
fn open_here(device: &Path, options: &TapOptions) -> Result<Tap, TapError> {
    let name = &options.name;
    let os = |what: &str, error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            TapError::NoPermission { what: format!("{what} `{name}`"), capability: NET_ADMIN }
        }
        _ => TapError::Os { what: format!("{what} `{name}`"), error },
    };
    let socket = UnixDatagram::unbound().map_err(|e| os("open a socket for interface", e))?;
    let existed = sys::if_exists(&socket, name).map_err(|e| os("find interface", e))?;
    if existed && options.create == Create::Always {
        return Err(TapError::Exists { name: name.clone() });
    }
    if !existed && options.create == Create::Never {
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
    let mac = sys::if_mac(&socket, name).map_err(|e| os("get the MAC address of", e))?;
    let mtu = sys::if_mtu(&socket, name).map_err(|e| os("get the MTU of", e))?;
    let queues = queues.into_iter().map(|file| Arc::new(OwnedFd::from(file))).collect();
    Ok(Tap { queues, created: !existed, offloads_read, offloads_write, mac, mtu })
}

/// Attaches all queues requested, or one if the interface has no more.
fn attach_all(device: &Path, options: &TapOptions, existed: bool) -> Result<Vec<File>, TapError> {
    let name = &options.name;
    let wanted = options.queues.get();
    let mut queues = Vec::with_capacity(usize::from(wanted));
    for given in 0..wanted {
        let file = open_device(device)?;
        let is_new = given == 0 && options.create == Create::Always;
        let exclusive = if is_new { libc::IFF_TUN_EXCL } else { 0 };
        match attach(&file, name, libc::IFF_MULTI_QUEUE | exclusive) {
            Ok(()) => queues.push(file),
            // Another program was faster.
            Err(e) if is_new && e.raw_os_error() == Some(libc::EBUSY) => {
                return Err(TapError::Exists { name: name.clone() });
            }
            // An existing interface without `multi_queue` fails like one that is not a TAP.
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
    os::open_device(device).map(File::from).map_err(|error| {
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::NotFound, _) | (_, Some(libc::ENXIO | libc::ENODEV)) => {
                TapError::NoDevice { path: device.into() }
            }
            (io::ErrorKind::PermissionDenied, _) => TapError::NoPermission {
                what: format!("open {}", device.display()),
                capability: NET_ADMIN,
            },
            _ => TapError::Os { what: format!("open {}", device.display()), error },
        }
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

/// Requests all offloads, or all but UDP segmentation from kernels before 6.2. Returns the offloads
/// that frames read may need, and those that frames written may need.
fn set_offloads(file: &File) -> io::Result<(Offloads, Offloads)> {
    let all = request_offloads(file, &Offloads::ALL)?;
    Ok((all, all))
}

/// Requests that frames read from the interface of `queue` need the offloads in `want` and no
/// others, as far as the kernel distinguishes them. Returns the offloads now possible; frames
/// already queued may still need earlier ones. The setting applies to all queues of the interface.
///
/// # Errors
/// The interface was removed.
pub fn request_offloads(queue: impl AsFd, want: &Offloads) -> io::Result<Offloads> {
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

/// Sets the carrier of the interface of `queue`: without one it stays up and transmits nothing, and
/// programs that watch it (a routing daemon, a bond) use another path.
///
/// # Errors
/// The interface was removed, or the kernel is older than 5.0.
pub fn set_carrier(queue: impl AsFd, on: bool) -> io::Result<()> {
    sys::tun_set_carrier(queue, on)
}

/// Sets whether an interface stays, with its addresses, when its last queue is closed. Returns
/// whether it did before.
///
/// # Errors
/// The interface was removed.
pub fn set_persist(queue: impl AsFd, on: bool) -> io::Result<bool> {
    let (_, flags) = sys::tun_interface(&queue)?;
    sys::tun_set_persist(&queue, on)?;
    Ok(flags & libc::IFF_PERSIST != 0)
}

/// Sets the MTU of an interface; returns the earlier one.
///
/// # Errors
/// [`TapError`] with what failed, where, and what to do.
pub fn set_mtu(name: &str, netns: Option<&str>, mtu: u32) -> Result<u32, TapError> {
    let set = || {
        let os = |error: io::Error| {
            let what = format!("set MTU {mtu} on interface `{name}`");
            match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    TapError::NoPermission { what, capability: NET_ADMIN }
                }
                _ => TapError::Os { what, error },
            }
        };
        let socket = UnixDatagram::unbound().map_err(os)?;
        let before = sys::if_mtu(&socket, name).map_err(os)?;
        if before != mtu {
            sys::if_set_mtu(&socket, name, mtu).map_err(os)?;
        }
        Ok(before)
    };
    match netns {
        None => set(),
        Some(netns) => in_netns(netns, set)?,
    }
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
