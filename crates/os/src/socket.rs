//! Unix sockets by name, and messages with descriptors (SCM_RIGHTS).

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::poll::{Until, wait};

/// Most descriptors that one message of a socket carries (Linux: SCM_MAX_FD).
pub const SCM_MAX_FD: usize = 253;
/// Longest socket path, in bytes, without the final zero (`struct sockaddr_un`).
pub const PATH_MAX: usize = 107;
/// Limit of connections not accepted yet.
const BACKLOG: i32 = 128;

/// Error of a socket.
#[derive(Debug)]
pub enum SocketError {
    /// The path does not fit a socket address.
    PathTooLong(PathBuf),
    /// The directory does not exist.
    NoDirectory(PathBuf),
    /// Another process listens at the path.
    Busy(PathBuf),
    /// The path is not a socket.
    NotASocket(PathBuf),
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

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, what) = match self {
            Self::PathTooLong(path) => {
                let len = path.as_os_str().len();
                let path = path.display();
                return write!(
                    f,
                    "socket path {path} has {len} bytes, a socket address holds {PATH_MAX}: use a \
                     shorter one"
                );
            }
            Self::Os { what, path, error } => {
                return write!(f, "socket {}: {what} failed: {error}", path.display());
            }
            Self::NoDirectory(path) => (path, "its directory does not exist; create it first"),
            Self::Busy(path) => {
                (path, "another process listens there; stop it or choose another path")
            }
            Self::NotASocket(path) => {
                (path, "something else has that name; remove it or choose another path")
            }
            Self::NoListener(path) => {
                (path, "no process listens there; start the other side first")
            }
            Self::NoPeer(path) => (path, "no peer connected in time"),
            Self::NotAllowed(path) => {
                (path, "permission denied; run as root or as the user who made it")
            }
        };
        write!(f, "socket {}: {what}", path.display())
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
}

impl Carries {
    fn kind(self) -> SocketType {
        match self {
            Self::Stream => SocketType::STREAM,
            Self::Messages => SocketType::SEQPACKET,
        }
    }
}

/// A listening socket; its name is removed with it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of our name, so that another's is not removed.
    made: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. A socket left by a dead process is replaced.
    ///
    /// # Errors
    /// [`SocketError`] with the reason.
    pub fn bind(path: &Path, carries: Carries) -> Result<Self, SocketError> {
        Self::bind_as(path, carries, None)
    }

    /// As [`bind`](Self::bind), accessible only to its owner, independent of the umask.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_private(path: &Path, carries: Carries) -> Result<Self, SocketError> {
        Self::bind_as(path, carries, Some(0o600))
    }

    /// The name has the socket's mode, less the umask, from its creation (Linux): there is no time
    /// with another mode.
    fn bind_as(path: &Path, carries: Carries, mode: Option<u32>) -> Result<Self, SocketError> {
        let os = |error| os("listen", path, error);
        let address = address(path)?;
        let socket = socket(carries).map_err(os)?;
        if let Some(mode) = mode {
            let mode = rustix::fs::Mode::from_raw_mode(mode);
            rustix::fs::fchmod(&socket, mode).map_err(os)?;
        }
        match rustix::net::bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                clear_name(path, carries)?;
                rustix::net::bind(&socket, &address).map_err(os)?;
            }
            Err(Errno::NOENT) => return Err(SocketError::NoDirectory(path.into())),
            Err(Errno::ACCESS) => return Err(SocketError::NotAllowed(path.into())),
            Err(error) => return Err(os(error)),
        }
        rustix::net::listen(&socket, BACKLOG).map_err(os)?;
        let made = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
        Ok(Self { socket, path: path.into(), made })
    }

    /// The path it listens at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next connection, non-blocking; `None` if there is none.
    ///
    /// # Errors
    /// [`SocketError::Os`], for example out of descriptors.
    pub fn accept(&self) -> Result<Option<OwnedFd>, SocketError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(os("accept", &self.path, error)),
        }
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// [`SocketError::NoPeer`] after `timeout`; or as [`accept`](Self::accept).
    pub fn accept_within(&self, timeout: Duration) -> Result<OwnedFd, SocketError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(socket) = self.accept()? {
                return Ok(socket);
            }
            let ready = wait(self.socket.as_fd(), Until::Readable, deadline);
            let os = |error| SocketError::Os { what: "accept", path: self.path.clone(), error };
            if !ready.map_err(os)? {
                return Err(SocketError::NoPeer(self.path.clone()));
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let there = std::fs::symlink_metadata(&self.path).ok().map(|m| (m.dev(), m.ino()));
        if there.is_some() && there == self.made {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn os(what: &'static str, path: &Path, error: Errno) -> SocketError {
    SocketError::Os { what, path: path.into(), error: error.into() }
}

fn address(path: &Path) -> Result<SocketAddrUnix, SocketError> {
    if path.as_os_str().len() > PATH_MAX {
        return Err(SocketError::PathTooLong(path.into()));
    }
    SocketAddrUnix::new(path).map_err(|error| os("connect", path, error))
}

fn socket(carries: Carries) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, carries.kind(), flags, None)
}

/// Frees a name that is in use: by a live process, by a dead one's socket, or by another file.
fn clear_name(path: &Path, carries: Carries) -> Result<(), SocketError> {
    let os = |error| SocketError::Os { what: "listen", path: path.into(), error };
    let kind = std::fs::symlink_metadata(path).map_err(os)?;
    if !kind.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    let address = address(path)?;
    let probe = socket(carries).map_err(|error| os(error.into()))?;
    // AGAIN: a process listens, and its backlog is full. PROTOTYPE: a process listens with the
    // other type.
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(os),
        _ => Err(SocketError::Busy(path.into())),
    }
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
    // As many as a message can carry: the kernel closes descriptors without room here, and a close
    // may block.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
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
    use super::Carries::{Messages, Stream};
    use super::*;
    use std::os::unix::net::UnixListener;

    use crate::{eventfd, wait_readable};

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pvswitch-os-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn invalid_socket_paths() {
        let dir = dir("paths");
        let long = dir.join("x".repeat(120));
        assert!(matches!(Listener::bind(&long, Stream), Err(SocketError::PathTooLong(_))));
        assert!(matches!(connect(&long, Stream), Err(SocketError::PathTooLong(_))));
        let nowhere = dir.join("nowhere/s");
        assert!(matches!(Listener::bind(&nowhere, Stream), Err(SocketError::NoDirectory(_))));
        assert!(matches!(connect(&nowhere, Stream), Err(SocketError::NoListener(_))));
        let file = dir.join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(matches!(Listener::bind(&file, Stream), Err(SocketError::NotASocket(_))));
        assert!(matches!(
            connect(&dir, Stream),
            Err(SocketError::NoListener(_) | SocketError::Os { .. })
        ));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn private_listener_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = dir("private");
        let path = dir.join("s");
        let listener = Listener::bind_private(&path, Stream).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(connect(&path, Stream).unwrap());
        assert!(listener.accept().unwrap().is_some());
        drop(listener);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_living_listener_is_busy_and_a_dead_ones_socket_is_replaced() {
        let dir = dir("busy");
        let path = dir.join("s");
        let first = Listener::bind(&path, Stream).unwrap();
        assert_eq!(first.path(), path);
        assert!(matches!(Listener::bind(&path, Stream), Err(SocketError::Busy(_))));
        drop(first);
        assert!(!path.exists(), "the name is removed with the listener");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead process leaves its name");
        let second = Listener::bind(&path, Stream).unwrap();
        assert!(second.accept().unwrap().is_none());
        let client = connect(&path, Stream).unwrap();
        let server = second.accept_within(Duration::from_secs(5)).unwrap();
        send(client.as_fd(), b"hello", &[]).unwrap();
        let mut buf = [0; 8];
        assert!(wait_readable(server.as_fd(), Duration::from_secs(5)).unwrap());
        let got = recv(server.as_fd(), &mut buf, &mut Vec::new(), 0).unwrap();
        assert_eq!(got, Received::Bytes(5));
        drop(client);
        let got = recv(server.as_fd(), &mut buf, &mut Vec::new(), 0).unwrap();
        assert_eq!(got, Received::Closed);
        drop(second);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn no_connection_is_an_error_after_the_timeout() {
        let dir = dir("timeout");
        let listener = Listener::bind(&dir.join("s"), Stream).unwrap();
        let error = listener.accept_within(Duration::from_millis(5)).unwrap_err();
        assert!(matches!(error, SocketError::NoPeer(_)), "{error}");
        drop(listener);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_listener_with_a_full_backlog_does_not_block_us() {
        let dir = dir("backlog");
        let path = dir.join("s");
        let full = socket(Stream).unwrap();
        rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&full, 1).unwrap();
        let waiting: Vec<_> = (0..100).map_while(|_| connect(&path, Stream).ok()).collect();
        assert!(waiting.len() < 100);
        let error = connect(&path, Stream).unwrap_err();
        assert!(matches!(error, SocketError::NoListener(_)), "{error}");
        assert!(matches!(Listener::bind(&path, Stream), Err(SocketError::Busy(_))));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_listener_that_cannot_accept_is_an_os_error() {
        let dir = dir("accept");
        let listener = Listener { socket: socket(Stream).unwrap(), path: dir.clone(), made: None };
        let error = listener.accept().unwrap_err();
        assert!(matches!(error, SocketError::Os { what: "accept", .. }), "{error}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn errors_say_what_where_and_what_to_do() {
        let path = PathBuf::from("/run/s");
        let all = [
            SocketError::PathTooLong(path.clone()),
            SocketError::NoDirectory(path.clone()),
            SocketError::Busy(path.clone()),
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
        let listener = Listener::bind(&path, Messages).unwrap();
        assert!(matches!(connect(&path, Stream), Err(SocketError::Os { what: "connect", .. })));
        assert!(matches!(Listener::bind(&path, Stream), Err(SocketError::Busy(_))));
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
