//! System calls of this room: sockets, descriptors, epoll. `rustix` has safe forms of all; the
//! ioctls of Xen's device nodes are in `host/xen/sys.rs`.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Longest socket path, in bytes, without the final zero (`struct sockaddr_un`).
pub const PATH_MAX: usize = 107;
/// Most descriptors taken from one message.
pub const FDS_MAX: usize = 4;

/// Why a socket could not be had.
#[derive(Debug)]
pub enum SocketError {
    /// The path does not fit a socket address.
    PathTooLong(PathBuf),
    /// The directory does not exist.
    NoDirectory(PathBuf),
    /// Another process listens there.
    Busy(PathBuf),
    /// Something that is no socket is there.
    NotASocket(PathBuf),
    /// Nobody listens there (yet).
    NobodyListens(PathBuf),
    /// This user may not use it.
    NotAllowed(PathBuf),
    /// The system refused.
    Os {
        /// What was tried: `listen` or `connect`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
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
                (path, "another process listens there; stop it or choose another directory")
            }
            Self::NotASocket(path) => {
                (path, "something else has that name; remove it or choose another directory")
            }
            Self::NobodyListens(path) => (path, "nobody listens there; start the other side first"),
            Self::NotAllowed(path) => {
                (path, "permission denied; run as root or as the user who made it")
            }
        };
        write!(f, "socket {}: {what}", path.display())
    }
}

impl std::error::Error for SocketError {}

/// What a Unix socket carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// Bytes without boundaries.
    Stream,
    /// Messages, each whole (SOCK_SEQPACKET).
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
    /// Device and inode of the name we made, so as not to remove another's.
    made: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. A socket that a dead process left there is replaced.
    ///
    /// # Errors
    /// [`SocketError`] says what stands in the way.
    pub fn bind(path: &Path, carries: Carries) -> Result<Self, SocketError> {
        let addr = address(path)?;
        let socket = socket(carries).map_err(|error| os("listen", path, error))?;
        match rustix::net::bind(&socket, &addr) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                clear_name(path, carries)?;
                rustix::net::bind(&socket, &addr).map_err(|error| os("listen", path, error))?;
            }
            Err(Errno::NOENT) => return Err(SocketError::NoDirectory(path.into())),
            Err(Errno::ACCESS) => return Err(SocketError::NotAllowed(path.into())),
            Err(error) => return Err(os("listen", path, error)),
        }
        rustix::net::listen(&socket, 16).map_err(|error| os("listen", path, error))?;
        let made = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
        Ok(Self { socket, path: path.into(), made })
    }

    /// The next connection, non-blocking; `None` when nobody waits, or none can be had now.
    pub fn accept(&self) -> Option<OwnedFd> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()
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

/// The name is taken: by a living process, by a dead one's socket, or by something else.
fn clear_name(path: &Path, carries: Carries) -> Result<(), SocketError> {
    let kind = std::fs::symlink_metadata(path).map_err(|error| SocketError::Os {
        what: "listen",
        path: path.into(),
        error,
    })?;
    if !kind.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    match connect(path, carries) {
        Err(SocketError::NobodyListens(_)) => {}
        _ => return Err(SocketError::Busy(path.into())),
    }
    std::fs::remove_file(path).map_err(|error| SocketError::Os {
        what: "listen",
        path: path.into(),
        error,
    })
}

/// Connects to the socket at `path`, without waiting; the descriptor is non-blocking. A listener
/// that accepts no one, with as many in its queue as that takes, is one where nobody listens.
///
/// # Errors
/// [`SocketError`]; [`NobodyListens`](SocketError::NobodyListens) is the one worth another try.
pub fn connect(path: &Path, carries: Carries) -> Result<OwnedFd, SocketError> {
    let addr = address(path)?;
    let socket = socket(carries).map_err(|error| os("connect", path, error))?;
    match rustix::net::connect(&socket, &addr) {
        Ok(()) => Ok(socket),
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => {
            Err(SocketError::NobodyListens(path.into()))
        }
        Err(Errno::ACCESS) => Err(SocketError::NotAllowed(path.into())),
        Err(error) => Err(os("connect", path, error)),
    }
}

/// Two stream sockets connected to each other, non-blocking.
///
/// # Errors
/// When descriptors ran out.
pub fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// What one [`recv`] or [`read`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// The peer closed.
    Closed,
    /// More bytes or descriptors came at once than there is room for; the rest are gone.
    TooMuch,
}

/// Reads a message into `buf` without waiting; descriptors are added to `fds`.
///
/// # Errors
/// Whatever the system says, except "again" and "interrupted".
pub fn recv(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
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
    if got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) || fds.len() > FDS_MAX {
        return Ok(Received::TooMuch);
    }
    Ok(if got.bytes == 0 { Received::Closed } else { Received::Bytes(got.bytes) })
}

/// Sends all of `bytes` with `fds` beside them, without waiting. Whether all of it went; a
/// socket that takes only a part has a peer that does not read.
///
/// # Errors
/// Whatever the system says.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
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

/// Reads what there is from a non-blocking descriptor: a socket, or /dev/xen/xenbus.
///
/// # Errors
/// Whatever the system says, except "again" and "interrupted".
pub fn read(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<Received> {
    loop {
        match rustix::io::read(fd, &mut *buf) {
            Ok(0) | Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Ok(n) => return Ok(Received::Bytes(n)),
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes as many of `bytes` as a non-blocking descriptor takes now.
///
/// # Errors
/// Whatever the system says, except "again" (nothing taken) and "interrupted".
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        // A socket gets MSG_NOSIGNAL: a client that is gone is no reason for a signal.
        let wrote = match rustix::net::send(fd, bytes, SendFlags::NOSIGNAL) {
            Err(Errno::NOTSOCK) => rustix::io::write(fd, bytes),
            other => other,
        };
        match wrote {
            Ok(n) => return Ok(n),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Opens a device node for reading and writing, non-blocking.
///
/// # Errors
/// Whatever the system says.
pub fn open_device(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Whether `fd` is memory of the kernel's own (memfd, shmem, hugetlbfs): such a file cannot make
/// us wait for another process when we touch it, as one of a user's file system could.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// A new eventfd, non-blocking, at zero.
///
/// # Errors
/// When descriptors ran out.
pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an eventfd readable. One system call; errors are of no use to the caller.
#[inline]
pub fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Takes what [`signal`] wrote; whether there was any.
#[inline]
pub fn drain(fd: BorrowedFd<'_>) -> bool {
    let mut buf = [0_u8; 8];
    matches!(rustix::io::read(fd, &mut buf), Ok(n) if n > 0)
}

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Something to read, or the peer closed.
    Readable,
    /// Room to write.
    Writable,
}

/// Waits for `fd`; `false` when `deadline` came first.
///
/// # Errors
/// Whatever the system says.
pub fn wait(fd: BorrowedFd<'_>, until: Until, deadline: Instant) -> io::Result<bool> {
    let flags = match until {
        Until::Readable => PollFlags::IN,
        Until::Writable => PollFlags::OUT,
    };
    loop {
        let limit = timespec(deadline.saturating_duration_since(Instant::now()));
        match rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn timespec(limit: Duration) -> Timespec {
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: i64::from(limit.subsec_nanos()) }
}

/// One epoll set, level-triggered.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// What an [`Epoll`] reports of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The tag it was added with.
    pub tag: u64,
    /// It can be written, or is broken.
    pub writable: bool,
    /// It can be read, or the peer closed, or it is broken.
    pub readable: bool,
}

impl From<Epoll> for OwnedFd {
    fn from(epoll: Epoll) -> Self {
        epoll.0
    }
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// When descriptors ran out.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `fd`, to be reported as `tag` when it is readable.
    ///
    /// # Errors
    /// Whatever the system says.
    pub fn add(&self, fd: BorrowedFd<'_>, tag: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(tag);
        Ok(epoll::add(&self.0, fd, data, epoll::EventFlags::IN)?)
    }

    /// Says what `fd` is reported for from now on. A descriptor of the set cannot refuse.
    pub fn change(&self, fd: BorrowedFd<'_>, tag: u64, readable: bool, writable: bool) {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, readable);
        flags.set(epoll::EventFlags::OUT, writable);
        let _ = epoll::modify(&self.0, fd, epoll::EventData::new_u64(tag), flags);
    }

    /// Waits for any, `limit` at most (`None`: for ever).
    ///
    /// # Errors
    /// Whatever the system says, except "interrupted", which is nothing ready.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<Vec<Ready>> {
        let limit = limit.map(timespec);
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 32];
        let events = match epoll::wait(&self.0, &mut events, limit.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let ready = events.iter().map(|event| {
            let flags = event.flags;
            let broken = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
            Ready {
                tag: event.data.u64(),
                readable: flags.intersects(epoll::EventFlags::IN | broken),
                writable: flags.intersects(epoll::EventFlags::OUT | broken),
            }
        });
        Ok(ready.collect())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
