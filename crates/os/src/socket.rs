//! Unix sockets by name, and messages with descriptors (SCM_RIGHTS).

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{self, Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most descriptors that one message of a socket carries (Linux: SCM_MAX_FD).
pub const SCM_MAX_FD: usize = 253;
/// Longest socket path, in bytes, without the final zero (`struct sockaddr_un`).
pub const PATH_MAX: usize = 107;

/// Error of a socket.
#[derive(Debug)]
pub enum SocketError {
    /// The path does not fit a socket address.
    PathTooLong(PathBuf),
    /// The directory does not exist.
    NoDirectory(PathBuf),
    /// A process listens at the path.
    Busy {
        /// The path.
        path: PathBuf,
        /// The process, if it is known.
        pid: Option<u32>,
    },
    /// Another user has the name, in a directory that anyone can write to.
    Taken {
        /// The path.
        path: PathBuf,
        /// The user.
        uid: u32,
    },
    /// The process may not give the socket to the group.
    NotOfGroup {
        /// The path.
        path: PathBuf,
        /// The group.
        group: String,
    },
    /// The path is not a socket.
    NotASocket(PathBuf),
    /// An inherited descriptor is not a Unix socket that listens.
    NotListening {
        /// The setting that names it.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Another file has the place of a socket of ours.
    Replaced(PathBuf),
    /// No process listens at the path (yet).
    NoListener(PathBuf),
    /// No peer connected in time.
    NoPeer(PathBuf),
    /// Permission denied.
    NotAllowed(PathBuf),
    /// Another system call failed.
    Os {
        /// The operation: `listen`, `connect` or `accept`.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

impl SocketError {
    /// The path that it is about.
    fn path(&self) -> path::Display<'_> {
        let (Self::PathTooLong(path)
        | Self::Os { path, .. }
        | Self::Busy { path, .. }
        | Self::Taken { path, .. }
        | Self::NotOfGroup { path, .. }
        | Self::NotListening { path, .. }
        | Self::NoDirectory(path)
        | Self::NotASocket(path)
        | Self::NoListener(path)
        | Self::NoPeer(path)
        | Self::NotAllowed(path)
        | Self::Replaced(path)) = self;
        path.display()
    }
}

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path();
        let what = match self {
            Self::PathTooLong(whole) => {
                let len = whole.as_os_str().len();
                return write!(
                    f,
                    "socket path {path} has {len} bytes, a socket address holds {PATH_MAX}: use a \
                     shorter one"
                );
            }
            Self::NotListening { what, .. } => {
                return write!(
                    f,
                    "inherited descriptor {path} {what}: pass a listening Unix stream socket \
                     (ListenStream=/run/... in a socket unit)"
                );
            }
            Self::Os { what, error, .. } => {
                return write!(f, "socket {path}: {what} failed: {error}");
            }
            Self::Taken { uid, .. } => {
                return write!(
                    f,
                    "socket {path}: a file of user {uid} has that name, in a directory that anyone \
                     can write to; choose a path in a directory of your own, such as /run/pvswitch"
                );
            }
            Self::NotOfGroup { group, .. } => {
                return write!(
                    f,
                    "socket {path}: cannot change its group to {group}: only root and members of \
                     that group may; add the switch's user to it, or choose another group"
                );
            }
            Self::Busy { pid, .. } if *pid == Some(std::process::id()) => {
                "this process listens there already; choose another path"
            }
            Self::Busy { pid, .. } => {
                let pid = pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
                return write!(
                    f,
                    "socket {path}: another process listens there{pid}; stop it or choose another \
                     path"
                );
            }
            Self::Replaced(_) => {
                "another file has the name of this socket; remove it, and add the port again"
            }
            Self::NoDirectory(_) => "its directory does not exist; create it first",
            Self::NotASocket(_) => {
                "a file or directory of that name exists, and is not a socket; choose another path"
            }
            Self::NoListener(_) => "no process listens there; start the other side first",
            Self::NoPeer(_) => "no peer connected in time",
            Self::NotAllowed(_) => {
                "permission denied; run as root, or as the owner of the socket and its directory"
            }
        };
        write!(f, "socket {path}: {what}")
    }
}

impl std::error::Error for SocketError {}

/// Type of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// Bytes without boundaries.
    Stream,
    /// Messages with boundaries (SOCK_SEQPACKET).
    Messages,
    /// Messages with boundaries, without connections (SOCK_DGRAM).
    Datagrams,
}

impl Carries {
    fn kind(self) -> SocketType {
        match self {
            Self::Stream => SocketType::STREAM,
            Self::Messages => SocketType::SEQPACKET,
            Self::Datagrams => SocketType::DGRAM,
        }
    }
}

pub(crate) fn os(what: &'static str, path: &Path, error: Errno) -> SocketError {
    SocketError::Os { what, path: path.into(), error: error.into() }
}

pub(crate) fn address(path: &Path) -> Result<SocketAddrUnix, SocketError> {
    if path.as_os_str().len() > PATH_MAX {
        return Err(SocketError::PathTooLong(path.into()));
    }
    SocketAddrUnix::new(path).map_err(|error| os("connect", path, error))
}

pub(crate) fn socket(carries: Carries) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, carries.kind(), flags, None)
}

/// Connects to the socket at `path`, without waiting; the descriptor is non-blocking. A listener
/// with a full backlog counts as not listening.
///
/// # Errors
/// [`SocketError`]; retry after [`NoListener`](SocketError::NoListener).
pub fn connect(path: &Path, carries: Carries) -> Result<OwnedFd, SocketError> {
    let address = address(path)?;
    let socket = socket(carries).map_err(|error| os("connect", path, error))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => {
            Err(SocketError::NoListener(path.into()))
        }
        Err(Errno::ACCESS) => Err(SocketError::NotAllowed(path.into())),
        Err(error) => Err(os("connect", path, error)),
    }
}

/// Makes two connected stream sockets, non-blocking.
///
/// # Errors
/// Out of descriptors.
pub fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Result of one [`recv`] or [`read`](crate::read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Number of bytes, at least one.
    Bytes(usize),
    /// No data now.
    Nothing,
    /// The peer closed.
    Closed,
    /// More bytes or descriptors came at once than there is room for; the rest are lost.
    Truncated,
}

/// Reads into `buf` without waiting; descriptors are added to `fds`, which may come to hold more
/// than `fds_max` if the result is [`Truncated`](Received::Truncated).
///
/// # Errors
/// Errors of the system call, except EAGAIN and EINTR.
pub fn recv(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    fds_max: usize,
) -> io::Result<Received> {
    recv_with(socket, buf, fds, fds_max, RecvFlags::empty())
}

/// Reads as [`recv`] does, without taking the message from the socket: the descriptors are
/// duplicates.
pub(crate) fn peek(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    fds_max: usize,
) -> io::Result<Received> {
    recv_with(socket, buf, fds, fds_max, RecvFlags::PEEK)
}

fn recv_with(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    fds_max: usize,
    flags: RecvFlags,
) -> io::Result<Received> {
    // As many as a message can carry: the kernel closes descriptors without room here, and a close
    // may block.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other,
        }
    };
    let got = match got {
        Ok(got) => got,
        Err(Errno::AGAIN) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET) => return Ok(Received::Closed),
        Err(error) => return Err(error.into()),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) || fds.len() > fds_max {
        return Ok(Received::Truncated);
    }
    Ok(if got.bytes == 0 { Received::Closed } else { Received::Bytes(got.bytes) })
}

/// Sends all of `bytes` with `fds`, without waiting. Returns whether all was sent; a partial send
/// means that the peer does not read.
///
/// # Errors
/// Errors of the system call; more than [`SCM_MAX_FD`] descriptors.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(sent) => return Ok(sent == bytes.len()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Shuts a socket down in both directions: its peer sees the end at once, even if the close is
/// delayed.
pub fn shutdown(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::Carries::{Messages, Stream};
    use super::*;

    use crate::{Listener, Permissions, eventfd};

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pvswitch-os-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn errors_say_what_where_and_what_to_do() {
        let path = PathBuf::from("/run/s");
        let all = [
            SocketError::PathTooLong(path.clone()),
            SocketError::NoDirectory(path.clone()),
            SocketError::Busy { path: path.clone(), pid: None },
            SocketError::Taken { path: path.clone(), uid: 7 },
            SocketError::NotOfGroup { path: path.clone(), group: "kvm".into() },
            SocketError::NotASocket(path.clone()),
            SocketError::NoListener(path.clone()),
            SocketError::NoPeer(path.clone()),
            SocketError::NotAllowed(path.clone()),
            os("listen", &path, Errno::NOMEM),
        ];
        for error in all {
            assert!(error.to_string().contains("/run/s"), "{error}");
        }
    }

    #[test]
    fn messages_keep_their_boundaries_and_a_long_one_is_truncated() {
        let dir = dir("messages");
        let path = dir.join("s");
        let listener = Listener::bind(&path, Messages, &Permissions::OWNER).unwrap();
        assert!(matches!(connect(&path, Stream), Err(SocketError::Os { what: "connect", .. })));
        let busy = Listener::bind(&path, Stream, &Permissions::OWNER);
        assert!(matches!(busy, Err(SocketError::Busy { .. })));
        let client = connect(&path, Messages).unwrap();
        let server = listener.accept().unwrap().unwrap();
        let get = || {
            let mut buf = [0; 4];
            recv(server.as_fd(), &mut buf, &mut Vec::new(), 0).unwrap()
        };
        assert_eq!(get(), Received::Nothing);
        for message in [&b"ab"[..], b"cdef", b"ghijk"] {
            assert!(send(client.as_fd(), message, &[]).unwrap());
        }
        assert_eq!([get(), get()], [Received::Bytes(2), Received::Bytes(4)]);
        assert_eq!([get(), get()], [Received::Truncated, Received::Nothing]);
        drop(listener);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn more_descriptors_than_fit_are_refused() {
        const MAX: usize = 8;
        let (a, b) = socketpair().unwrap();
        let event = eventfd().unwrap();
        let fds = vec![event.as_fd(); MAX];
        assert!(send(a.as_fd(), b"x", &fds).unwrap());
        let mut got = Vec::new();
        assert_eq!(recv(b.as_fd(), &mut [0; 4], &mut got, MAX).unwrap(), Received::Bytes(1));
        assert_eq!(got.len(), MAX);
        assert!(send(a.as_fd(), b"x", &fds).unwrap());
        assert_eq!(recv(b.as_fd(), &mut [0; 4], &mut got, MAX).unwrap(), Received::Truncated);
        let more = vec![event.as_fd(); SCM_MAX_FD + 1];
        assert!(send(a.as_fd(), b"x", &more).is_err());
    }
}
