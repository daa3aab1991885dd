//! Errors of AF_XDP sockets.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::tap::TapError;

/// Error while opening AF_XDP sockets.
#[derive(Debug)]
pub enum XdpError {
    /// Of the interface or its namespace.
    Interface(TapError),
    /// The kernel has no AF_XDP.
    NoKernel,
    /// The kernel hands no AF_XDP sockets to another process.
    OldKernel,
    /// This process may not open an AF_XDP socket.
    NoSocket {
        /// The interface.
        name: String,
    },
    /// This process may not load an XDP program.
    NoProgram {
        /// The interface.
        name: String,
    },
    /// The interface has an XDP program already.
    HasProgram {
        /// The interface.
        name: String,
    },
    /// Frames of the interface may be longer than a chunk.
    MtuTooLong {
        /// The interface.
        name: String,
        /// Its MTU.
        mtu: u32,
        /// The longest possible one.
        mtu_max: u32,
    },
    /// The interface has fewer queues.
    TooManyQueues {
        /// The interface.
        name: String,
        /// Queues requested.
        wanted: u16,
        /// Their number.
        given: u16,
    },
    /// Another AF_XDP socket uses the queue.
    QueueBusy {
        /// The interface.
        name: String,
        /// The queue.
        queue: u16,
    },
    /// The driver cannot do without a copy.
    NoZeroCopy {
        /// The interface.
        name: String,
    },
    /// The process may not lock the memory of frames.
    NoMemory {
        /// The interface.
        name: String,
        /// Bytes for each queue.
        bytes: u64,
    },
    /// What is pinned at the path is not a map for this port.
    BadMap {
        /// The path.
        path: PathBuf,
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

impl fmt::Display for XdpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface(error) => error.fmt(f),
            Self::NoKernel => f.write_str(
                "this kernel has no AF_XDP sockets (CONFIG_XDP_SOCKETS): use an af-packet port",
            ),
            Self::OldKernel => f.write_str(
                "before Linux 6.4 AF_XDP sockets cannot be taken over: remove its af-xdp ports \
                 before an upgrade (ctl del-port), and add them again afterwards",
            ),
            Self::NoSocket { name } => write!(
                f,
                "no permission to open an AF_XDP socket on interface `{name}`: CAP_NET_RAW is \
                 required; run as root, or grant it to the program (setcap cap_net_raw+ep; \
                 systemd: drop-in af-xdp.conf)"
            ),
            Self::NoProgram { name } => write!(
                f,
                "no permission to load an XDP program for interface `{name}`: CAP_BPF and \
                 CAP_NET_ADMIN are required; run as root, grant them to the program (setcap \
                 cap_bpf,cap_net_admin,cap_net_raw+ep; systemd: drop-in af-xdp.conf), have a \
                 process with these capabilities load and pin it (pvswitch pin-xdp) and set \
                 map=PATH, or use an af-packet port"
            ),
            Self::HasProgram { name } => write!(
                f,
                "interface `{name}` has an XDP program already: stop the process that attached it \
                 (bpftool net list), remove it (ip link set {name} xdp off), or use that program's \
                 pinned XSKMAP (map=PATH)"
            ),
            Self::MtuTooLong { name, mtu, mtu_max } => write!(
                f,
                "interface `{name}` has an MTU of {mtu}, and frames of af-xdp ports must fit one \
                 page: set it to {mtu_max} or less (ip link set {name} mtu {mtu_max}), or use an \
                 af-packet port"
            ),
            Self::TooManyQueues { name, wanted, given } => write!(
                f,
                "queues={wanted} is more than interface `{name}` has: set queues={given}, or give \
                 it more (ethtool -L {name} combined {wanted})"
            ),
            Self::QueueBusy { name, queue } => write!(
                f,
                "queue {queue} of interface `{name}` is in use by another AF_XDP socket: stop the \
                 process that has it (ss --xdp --processes)"
            ),
            Self::NoZeroCopy { name } => write!(
                f,
                "the driver of interface `{name}` has no zero-copy for this program: set \
                 mode=auto, or mode=copy (a virtio-net card has it from Linux 6.13 on, with \
                 iommu_platform=on)"
            ),
            Self::NoMemory { name, bytes } => write!(
                f,
                "cannot lock memory for the frames of interface `{name}`, {bytes} bytes for each \
                 queue: raise the limit (ulimit -l unlimited; systemd: LimitMEMLOCK=infinity, as \
                 in drop-in af-xdp.conf), or grant CAP_IPC_LOCK"
            ),
            Self::BadMap { path, what } => write!(
                f,
                "map={}: {what}: name the pinned XSKMAP of the interface's XDP program (pvswitch \
                 pin-xdp creates one)",
                path.display()
            ),
            Self::Os { what, error } => write!(f, "cannot {what}: {error}"),
        }
    }
}

impl std::error::Error for XdpError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Interface(error) => Some(error),
            Self::Os { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<TapError> for XdpError {
    fn from(error: TapError) -> Self {
        Self::Interface(error)
    }
}
