//! Every system call of this room.
//!
//! `rustix` has safe forms of nearly all that is needed. Calls on a peer's descriptors never
//! block: socket calls carry MSG_DONTWAIT, eventfds are signalled by [`signal_event`], and what may
//! block whatever is done (the close of an unknown descriptor, the write to a pipe) is done on
//! threads of its own ([`outside`](crate::outside)).
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::message::FDS_MAX;

/// Most descriptors that one message of a socket carries (Linux: SCM_MAX_FD).
pub const SCM_MAX_FD: usize = 253;

/// Longest socket path, in bytes, without the final zero (`struct sockaddr_un`).
pub const PATH_MAX: usize = 107;

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
    /// Nobody connected in time.
    NobodyConnects(PathBuf),
    /// The system refused.
    Os {
        /// What was tried: `listen`, `connect` or `accept`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PathTooLong(path) => write!(
                f,
                "socket path {} has {} bytes, a socket address holds {PATH_MAX}: use a shorter one",
                path.display(),
                path.as_os_str().len()
            ),
            Self::NoDirectory(path) => write!(
                f,
                "socket {}: its directory does not exist; create it first",
                path.display()
            ),
            Self::Busy(path) => write!(
                f,
                "socket {}: another process listens there; stop it or choose another path",
                path.display()
            ),
            Self::NotASocket(path) => write!(
                f,
                "socket {}: something else has that name; remove it or choose another path",
                path.display()
            ),
            Self::NobodyListens(path) => write!(
                f,
                "socket {}: nobody listens there; start the other side first, or swap \
                 mode=client and mode=server",
                path.display()
            ),
            Self::NobodyConnects(path) => write!(
                f,
                "socket {}: nobody connected in time; is the other side in client mode?",
                path.display()
            ),
            Self::Os { what, path, error } => {
                write!(f, "socket {}: {what} failed: {error}", path.display())
            }
        }
    }
}

impl std::error::Error for SocketError {}

/// A listening socket; its name is removed with it.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the name we made, so as not to remove another's.
    made: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. A socket that a dead process left there is replaced.
    ///
    /// # Errors
    /// [`SocketError`] says what stands in the way.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        Self::bind_as(path, None)
    }

    /// As [`bind`](Self::bind), for its owner alone, whatever the umask is.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_private(path: &Path) -> Result<Self, SocketError> {
        Self::bind_as(path, Some(0o600))
    }

    fn bind_as(path: &Path, mode: Option<u32>) -> Result<Self, SocketError> {
        check_path(path)?;
        let socket = match listen(path, mode) {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => rebind(path, mode)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(SocketError::NoDirectory(path.into()));
            }
            Err(error) => return Err(os("listen", path, error)),
        };
        socket.set_nonblocking(true).map_err(|error| os("listen", path, error))?;
        let made = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
        Ok(Self { socket, path: path.into(), made })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection; `None` when nobody waits.
    ///
    /// # Errors
    /// [`SocketError::Os`], for instance when descriptors ran out.
    pub fn accept(&self) -> Result<Option<UnixStream>, SocketError> {
        match self.socket.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if transient(&error) => Ok(None),
            Err(error) => Err(os("accept", &self.path, error)),
        }
    }

    /// The next connection, waited for.
    ///
    /// # Errors
    /// [`SocketError::NobodyConnects`] after `timeout`; or as [`accept`](Self::accept).
    pub fn accept_within(&self, timeout: Duration) -> Result<UnixStream, SocketError> {
        let deadline = std::time::Instant::now() + timeout;
        loop {
            if let Some(stream) = self.accept()? {
                return Ok(stream);
            }
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let ready = wait_readable(self.socket.as_fd(), left);
            if !ready.map_err(|error| os("accept", &self.path, error))? {
                return Err(SocketError::NobodyConnects(self.path.clone()));
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

fn os(what: &'static str, path: &Path, error: io::Error) -> SocketError {
    SocketError::Os { what, path: path.into(), error }
}

fn transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

fn check_path(path: &Path) -> Result<(), SocketError> {
    if path.as_os_str().len() > PATH_MAX {
        return Err(SocketError::PathTooLong(path.into()));
    }
    Ok(())
}

/// The name is taken: by a living process, by a dead one's socket, or by something else.
fn rebind(path: &Path, mode: Option<u32>) -> Result<UnixListener, SocketError> {
    let kind = std::fs::symlink_metadata(path).map_err(|error| os("listen", path, error))?;
    if !kind.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    match try_connect(path) {
        Err(Errno::CONNREFUSED) => {}
        _ => return Err(SocketError::Busy(path.into())),
    }
    std::fs::remove_file(path).map_err(|error| os("listen", path, error))?;
    listen(path, mode).map_err(|error| os("listen", path, error))
}

/// The mode is that of the socket when it gets its name, less the umask (Linux): there is no time
/// at which the name has another.
fn listen(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    if let Some(mode) = mode {
        rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(mode))?;
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

/// Connects to the socket at `path`, without waiting: a listener that accepts no one, with as many
/// in its queue as that takes, is one where nobody listens.
///
/// # Errors
/// [`SocketError`]; [`NobodyListens`](SocketError::NobodyListens) is the one worth another try.
pub fn connect(path: &Path) -> Result<UnixStream, SocketError> {
    check_path(path)?;
    try_connect(path).map_err(|error| match error {
        Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN => SocketError::NobodyListens(path.into()),
        _ => os("connect", path, error.into()),
    })
}

fn try_connect(path: &Path) -> Result<UnixStream, Errno> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}

/// What one [`recv`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// The peer closed.
    Closed,
    /// More descriptors came at once than [`FDS_MAX`].
    TooManyFds,
}

/// Reads into `buf` without waiting; descriptors are added to `fds`.
///
/// # Errors
/// Whatever the system says, except "again" and "interrupted".
pub fn recv(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Received> {
    // As many as a message can carry: what does not fit is closed by the kernel, here.
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
    if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX {
        return Ok(Received::TooManyFds);
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

/// A new eventfd, non-blocking, at zero.
///
/// # Errors
/// When descriptors ran out.
pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A new pipe, both ends non-blocking: (read end, write end).
///
/// # Errors
/// When descriptors ran out.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pipe::PipeFlags;
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// Writes the eight bytes that make an eventfd (or a pipe, or a socket) readable. One system
/// call; errors are of no use to the caller and are dropped.
#[inline]
pub fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Writes a short message in one piece. `false`: there is no room now. A peer that is gone counts
/// as having been told.
pub fn write_whole(fd: BorrowedFd<'_>, bytes: &[u8]) -> bool {
    !matches!(rustix::io::write(fd, bytes), Err(Errno::AGAIN))
}

/// Reads away what [`signal`] wrote, from an eventfd or a pipe; whether there was any. Bounded:
/// a peer that keeps writing does not keep the caller.
pub fn drain(fd: BorrowedFd<'_>) -> bool {
    let mut buf = [0_u8; 512];
    matches!(rustix::io::read(fd, &mut buf), Ok(n) if n > 0)
}

/// Makes a received descriptor non-blocking. Failure leaves it as it is.
pub fn set_nonblocking(fd: BorrowedFd<'_>) {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    if let Ok(flags) = fcntl_getfl(fd)
        && !flags.contains(OFlags::NONBLOCK)
    {
        let _ = fcntl_setfl(fd, flags | OFlags::NONBLOCK);
    }
}

/// What a descriptor is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdKind {
    /// Shared memory of the kernel: a memfd, a file on tmpfs or hugetlbfs. Its calls do not block.
    Memory,
    /// An eventfd.
    Event,
    /// A pipe without a name. (One with a name lies on a file system.)
    Pipe,
    /// A stream socket of the Unix domain.
    UnixStream,
    /// Anything else.
    Other,
}

impl fmt::Display for FdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "shared memory",
            Self::Event => "an eventfd",
            Self::Pipe => "a pipe",
            Self::UnixStream => "a Unix stream socket",
            Self::Other => "of another kind",
        })
    }
}

/// Finds what a descriptor is without touching the file: neither `fstat` nor any call that its
/// file system or protocol answers. [`FdKind::Other`] where /proc is not mounted, except memory.
pub fn fd_kind(fd: BorrowedFd<'_>) -> FdKind {
    // Answered for shmem and hugetlbfs alone, by the type of the file (mm/memfd.c).
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return FdKind::Memory;
    }
    // The name of a file starts with a slash; these are given by the kernel (`d_dname`).
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let Ok(name) = rustix::fs::readlink(link, Vec::new()) else { return FdKind::Other };
    match name.as_bytes() {
        b"anon_inode:[eventfd]" => FdKind::Event,
        name if name.starts_with(b"pipe:[") => FdKind::Pipe,
        name if name.starts_with(b"socket:[") && is_unix_stream(fd) => FdKind::UnixStream,
        _ => FdKind::Other,
    }
}

/// Both options are answered from the socket itself, without its lock.
fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Ends a socket both ways: its peer sees the end at once, also when the close comes later.
pub fn shutdown(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// A thread's queue of asynchronous reads; see [`signal_event`].
struct Aio {
    context: libc::c_ulong,
    null: std::fs::File,
}

/// `struct iocb` of linux/aio_abi.h, little-endian and big-endian alike but for `aio_key`, which
/// the kernel sets.
#[repr(C)]
struct Iocb {
    data: u64,
    key_and_rw_flags: [u32; 2],
    opcode: u16,
    reqprio: i16,
    fildes: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct IoEvent([u64; 4]);

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;
/// Completions that are taken off the queue at once.
const COMPLETIONS: usize = 128;

impl Aio {
    fn new() -> Option<Self> {
        let null = std::fs::File::open("/dev/null").ok()?;
        let mut context: libc::c_ulong = 0;
        let at = &raw mut context;
        // SAFETY: io_setup writes one word at `at`, which is ours.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, COMPLETIONS, at) };
        (made == 0).then_some(Self { context, null })
    }

    fn submit(&self, event: BorrowedFd<'_>) -> bool {
        let fd = |fd: BorrowedFd<'_>| fd.as_raw_fd().unsigned_abs();
        let mut iocb = Iocb {
            data: 0,
            key_and_rw_flags: [0; 2],
            opcode: IOCB_CMD_PREAD,
            reqprio: 0,
            fildes: fd(self.null.as_fd()),
            buf: 0,
            nbytes: 0,
            offset: 0,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            resfd: fd(event),
        };
        let list = [&raw mut iocb];
        // SAFETY: the context is this thread's; the list has one valid iocb, and its read of no
        // bytes is done when the call returns.
        unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_ptr()) == 1 }
    }

    /// Makes room for completions.
    fn reap(&self) {
        let mut events = [IoEvent([0; 4]); COMPLETIONS];
        let at = events.as_mut_ptr();
        let none = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the kernel writes at most COMPLETIONS events at `at`; with no minimum it does
        // not wait.
        unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, 0, COMPLETIONS, at, none);
        }
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is ours and has nothing in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

thread_local! {
    static AIO: Option<Aio> = Aio::new();
}

/// Adds one to an eventfd of a peer, and never blocks.
///
/// An eventfd's O_NONBLOCK belongs to all processes that have it: a peer that clears it and fills
/// the counter blocks whoever writes, and a check before the write loses a race. Linux has no
/// per-call form of it (RWF_NOWAIT is refused). But the completion of an asynchronous read signals
/// an eventfd from inside the kernel, which never blocks: so this reads no bytes of /dev/null.
/// It costs about 0.4 µs more than a write. Where the system has no such reads (`fs.aio-max-nr`),
/// it is a write.
#[inline]
pub fn signal_event(event: BorrowedFd<'_>) {
    let done = AIO.try_with(|aio| {
        aio.as_ref().is_some_and(|aio| {
            aio.submit(event) || {
                aio.reap();
                aio.submit(event)
            }
        })
    });
    if done != Ok(true) {
        set_nonblocking(event);
        signal(event);
    }
}

/// Waits until `fd` is readable (or closed by the peer); `false` after `timeout`.
///
/// # Errors
/// Whatever the system says.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let limit = Timespec { tv_sec: seconds, tv_nsec: i64::from(timeout.subsec_nanos()) };
    loop {
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            // A signal says nothing of `fd`. The wait begins anew; signals are few.
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pvswitch-sys-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn socket_paths_that_cannot_be() {
        let dir = dir("paths");
        let long = dir.join("x".repeat(120));
        assert!(matches!(Listener::bind(&long), Err(SocketError::PathTooLong(_))));
        assert!(matches!(connect(&long), Err(SocketError::PathTooLong(_))));
        let nowhere = dir.join("nowhere/s");
        assert!(matches!(Listener::bind(&nowhere), Err(SocketError::NoDirectory(_))));
        assert!(matches!(connect(&nowhere), Err(SocketError::NobodyListens(_))));
        let file = dir.join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(matches!(Listener::bind(&file), Err(SocketError::NotASocket(_))));
        assert!(matches!(
            connect(&dir),
            Err(SocketError::NobodyListens(_) | SocketError::Os { .. })
        ));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn private_listener_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = dir("private");
        let path = dir.join("s");
        let listener = Listener::bind_private(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(connect(&path).unwrap());
        assert!(listener.accept().unwrap().is_some());
        drop(listener);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_living_listener_is_busy_and_a_dead_ones_socket_is_replaced() {
        let dir = dir("busy");
        let path = dir.join("s");
        let first = Listener::bind(&path).unwrap();
        assert_eq!(first.path(), path);
        assert!(matches!(Listener::bind(&path), Err(SocketError::Busy(_))));
        drop(first);
        assert!(!path.exists(), "the name goes with the listener");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead process leaves its name");
        let second = Listener::bind(&path).unwrap();
        assert!(second.accept().unwrap().is_none());
        let client = connect(&path).unwrap();
        let server = second.accept_within(Duration::from_secs(5)).unwrap();
        send(client.as_fd(), b"hello", &[]).unwrap();
        let mut buf = [0; 8];
        assert!(wait_readable(server.as_fd(), Duration::from_secs(5)).unwrap());
        let got = recv(server.as_fd(), &mut buf, &mut Vec::new()).unwrap();
        assert_eq!(got, Received::Bytes(5));
        drop(client);
        let got = recv(server.as_fd(), &mut buf, &mut Vec::new()).unwrap();
        assert_eq!(got, Received::Closed);
        drop(second);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn nobody_connecting_is_told_after_the_timeout() {
        let dir = dir("timeout");
        let listener = Listener::bind(&dir.join("s")).unwrap();
        let error = listener.accept_within(Duration::from_millis(5)).unwrap_err();
        assert!(matches!(error, SocketError::NobodyConnects(_)), "{error}");
        drop(listener);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_listener_that_accepts_no_one_does_not_keep_us() {
        let dir = dir("backlog");
        let path = dir.join("s");
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let full = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&full, 1).unwrap();
        let waiting: Vec<_> = (0..100).map_while(|_| connect(&path).ok()).collect();
        assert!(waiting.len() < 100);
        let error = connect(&path).unwrap_err();
        assert!(matches!(error, SocketError::NobodyListens(_)), "{error}");
        assert!(matches!(Listener::bind(&path), Err(SocketError::Busy(_))));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_listener_that_cannot_accept_is_an_os_error() {
        let dir = dir("accept");
        let lone = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        let socket = UnixListener::from(lone.unwrap());
        let listener = Listener { socket, path: dir.clone(), made: None };
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
            SocketError::NobodyListens(path.clone()),
            SocketError::NobodyConnects(path.clone()),
            os("listen", &path, io::Error::other("no")),
        ];
        for error in all {
            assert!(error.to_string().contains("/run/s"), "{error}");
        }
    }

    #[test]
    fn eventfds_and_pipes_are_signalled_and_drained() {
        let event = eventfd().unwrap();
        let (read, write) = pipe().unwrap();
        for (read, write) in [(&event, &event), (&read, &write)] {
            assert!(!drain(read.as_fd()));
            signal(write.as_fd());
            signal(write.as_fd());
            assert!(wait_readable(read.as_fd(), Duration::ZERO).unwrap());
            assert!(drain(read.as_fd()));
            assert!(!drain(read.as_fd()));
        }
    }

    #[test]
    fn full_pipe_does_not_block_and_closed_pipe_does_not_kill() {
        let (read, write) = pipe().unwrap();
        for _ in 0..20_000 {
            signal(write.as_fd());
        }
        assert!(!write_whole(write.as_fd(), b"x"));
        drop(read);
        signal(write.as_fd());
        assert!(write_whole(write.as_fd(), b"x"));
    }

    #[test]
    fn more_descriptors_than_fit_are_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        let event = eventfd().unwrap();
        let fds = vec![event.as_fd(); FDS_MAX];
        assert!(send(a.as_fd(), b"x", &fds).unwrap());
        let mut got = Vec::new();
        assert_eq!(recv(b.as_fd(), &mut [0; 4], &mut got).unwrap(), Received::Bytes(1));
        assert_eq!(got.len(), FDS_MAX);
        assert!(send(a.as_fd(), b"x", &fds).unwrap());
        assert_eq!(recv(b.as_fd(), &mut [0; 4], &mut got).unwrap(), Received::TooManyFds);
        let more = vec![event.as_fd(); FDS_MAX + 10];
        assert!(send(a.as_fd(), b"x", &more).is_err());
    }
}
