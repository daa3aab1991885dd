//! Every system call of this room, and its only `unsafe`: the ioctls of Xen's device nodes.
//!
//! Sockets, descriptors and epoll go through `rustix`, which has safe forms of them; [`ioctl`]
//! holds the layouts and numbers of Xen's public headers `sys/{gntdev,gntalloc,evtchn}.h`.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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

/// Calls an ioctl with one argument structure.
///
/// # Safety
/// `number` is one of [`ioctl`]'s whose argument is laid out as `T` (which may be the head of a
/// longer array that `argument` points to), and pointers inside it are valid for what it does.
unsafe fn call<T>(fd: BorrowedFd<'_>, number: u32, argument: *mut T) -> io::Result<u32> {
    loop {
        // SAFETY: the caller's contract.
        let got = unsafe { libc::ioctl(fd.as_raw_fd(), number as libc::Ioctl, argument) };
        match u32::try_from(got) {
            Ok(got) => return Ok(got),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

pub mod ioctl {
    //! Numbers and layouts of Xen's public headers `sys/{gntdev,gntalloc,evtchn}.h`, and calls.

    use std::io;
    use std::os::fd::BorrowedFd;

    use super::call;

    /// `IOCTL_GNTDEV_MAP_GRANT_REF`
    pub const GNTDEV_MAP_GRANT_REF: u32 = 0x18_4700;
    /// `IOCTL_GNTDEV_UNMAP_GRANT_REF`
    pub const GNTDEV_UNMAP_GRANT_REF: u32 = 0x10_4701;
    /// `IOCTL_GNTDEV_GRANT_COPY`
    pub const GNTDEV_GRANT_COPY: u32 = 0x10_4708;
    /// `IOCTL_GNTALLOC_ALLOC_GREF`
    pub const GNTALLOC_ALLOC_GREF: u32 = 0x18_4705;
    /// `IOCTL_GNTALLOC_DEALLOC_GREF`
    pub const GNTALLOC_DEALLOC_GREF: u32 = 0x10_4706;
    /// `IOCTL_EVTCHN_BIND_INTERDOMAIN`
    pub const EVTCHN_BIND_INTERDOMAIN: u32 = 0x08_4501;
    /// `IOCTL_EVTCHN_BIND_UNBOUND_PORT`
    pub const EVTCHN_BIND_UNBOUND_PORT: u32 = 0x04_4502;
    /// `IOCTL_EVTCHN_UNBIND`
    pub const EVTCHN_UNBIND: u32 = 0x04_4503;
    /// `IOCTL_EVTCHN_NOTIFY`
    pub const EVTCHN_NOTIFY: u32 = 0x04_4504;
    /// `IOCTL_EVTCHN_RESET`
    pub const EVTCHN_RESET: u32 = 0x00_4505;

    /// `struct ioctl_gntdev_map_grant_ref` with one reference.
    #[repr(C)]
    #[derive(Debug, Default)]
    pub struct MapGrantRef {
        /// How many references.
        pub count: u32,
        /// Nothing.
        pub pad: u32,
        /// Where to mmap them, in bytes.
        pub index: u64,
        /// Whose grant.
        pub domid: u32,
        /// Which grant.
        pub gref: u32,
    }

    /// `struct ioctl_gntdev_unmap_grant_ref`, and `struct ioctl_gntalloc_dealloc_gref`.
    #[repr(C)]
    #[derive(Debug, Default)]
    pub struct Release {
        /// What the other call gave out.
        pub index: u64,
        /// How many pages.
        pub count: u32,
        /// Nothing.
        pub pad: u32,
    }

    /// One side of a copy: an address of ours, or a place in a grant.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub union CopyPtr {
        /// An address of ours.
        pub virt: *mut libc::c_void,
        /// A place in a grant.
        pub foreign: Foreign,
    }

    /// A place in a grant.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Foreign {
        /// Which grant.
        pub gref: u32,
        /// Where in its page, in bytes.
        pub offset: u16,
        /// Whose grant.
        pub domid: u16,
    }

    /// `struct ioctl_gntdev_grant_copy_segment`
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct CopySegment {
        /// Where from.
        pub source: CopyPtr,
        /// Where to.
        pub dest: CopyPtr,
        /// How many bytes.
        pub len: u16,
        /// [`GNTCOPY_SOURCE_GREF`], [`GNTCOPY_DEST_GREF`].
        pub flags: u16,
        /// How it went, `GNTST_*`.
        pub status: i16,
    }

    /// The source is a grant.
    pub const GNTCOPY_SOURCE_GREF: u16 = 1;
    /// The destination is a grant.
    pub const GNTCOPY_DEST_GREF: u16 = 2;
    /// `GNTST_okay`
    pub const GNTST_OKAY: i16 = 0;
    /// `GNTST_general_error`: the status of a segment that nobody looked at.
    pub const GNTST_GENERAL_ERROR: i16 = -1;

    /// `struct ioctl_gntdev_grant_copy`
    #[repr(C)]
    pub struct GrantCopy {
        /// How many segments.
        pub count: u32,
        /// Where they are.
        pub segments: *mut CopySegment,
    }

    /// `struct ioctl_gntalloc_alloc_gref` without its references, which follow.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default)]
    pub struct AllocGref {
        /// Who may use them.
        pub domid: u16,
        /// [`GNTALLOC_FLAG_WRITABLE`].
        pub flags: u16,
        /// How many.
        pub count: u32,
        /// Where to mmap them, in bytes.
        pub index: u64,
    }

    /// They may be written.
    pub const GNTALLOC_FLAG_WRITABLE: u16 = 1;

    /// `struct ioctl_evtchn_bind_interdomain`
    #[repr(C)]
    #[derive(Debug)]
    pub struct BindInterdomain {
        /// Whose port.
        pub remote_domain: u32,
        /// Which port.
        pub remote_port: u32,
    }

    /// Asks gntdev for a range to map one grant at.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn map_grant_ref(gntdev: BorrowedFd<'_>, domid: u16, gref: u32) -> io::Result<u64> {
        let mut map = MapGrantRef { count: 1, domid: domid.into(), gref, ..Default::default() };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntdev, GNTDEV_MAP_GRANT_REF, &raw mut map) }?;
        Ok(map.index)
    }

    /// Gives a range back, after its munmap.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn unmap_grant_ref(gntdev: BorrowedFd<'_>, index: u64) -> io::Result<()> {
        let mut unmap = Release { index, count: 1, pad: 0 };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntdev, GNTDEV_UNMAP_GRANT_REF, &raw mut unmap) }.map(drop)
    }

    /// Copies between grants and memory; each segment says how it went.
    ///
    /// # Errors
    /// The call as a whole: some segments may have been copied.
    ///
    /// # Safety
    /// An address in a segment is readable or writable, as its side asks, for `len` bytes.
    pub unsafe fn grant_copy(
        gntdev: BorrowedFd<'_>,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        let count = u32::try_from(segments.len()).unwrap_or(u32::MAX);
        let mut copy = GrantCopy { count, segments: segments.as_mut_ptr() };
        // SAFETY: the argument is that of the number; it points to `count` segments, whose
        // addresses are the caller's to answer for.
        unsafe { call(gntdev, GNTDEV_GRANT_COPY, &raw mut copy) }.map(drop)
    }

    /// Grants `count` fresh pages: where to mmap them, and their references.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn alloc_gref(
        gntalloc: BorrowedFd<'_>,
        domid: u16,
        flags: u16,
        count: u32,
    ) -> io::Result<(u64, Vec<u32>)> {
        let head = size_of::<AllocGref>() / size_of::<u32>();
        let n = usize::try_from(count).map_err(io::Error::other)?;
        // Words of eight bytes for the alignment of the head.
        let mut words = vec![0_u64; (head + n).div_ceil(2)];
        let argument = words.as_mut_ptr().cast::<AllocGref>();
        // SAFETY: the vector is long enough and aligned for the head.
        unsafe { argument.write(AllocGref { domid, flags, count, index: 0 }) };
        // SAFETY: the argument is that of the number, `count` references long.
        unsafe { call(gntalloc, GNTALLOC_ALLOC_GREF, argument) }?;
        // SAFETY: it was written above.
        let index = unsafe { argument.read() }.index;
        let references = words.iter().flat_map(|w| {
            let bytes = w.to_ne_bytes();
            let half = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
            [half(0), half(4)]
        });
        Ok((index, references.skip(head).take(n).collect()))
    }

    /// Ends grants.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn dealloc_gref(gntalloc: BorrowedFd<'_>, index: u64, count: u32) -> io::Result<()> {
        let mut release = Release { index, count, pad: 0 };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntalloc, GNTALLOC_DEALLOC_GREF, &raw mut release) }.map(drop)
    }

    /// Binds a port of another domain; returns ours.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn bind_interdomain(evtchn: BorrowedFd<'_>, domid: u16, port: u32) -> io::Result<u32> {
        let mut bind = BindInterdomain { remote_domain: domid.into(), remote_port: port };
        // SAFETY: the argument is that of the number.
        unsafe { call(evtchn, EVTCHN_BIND_INTERDOMAIN, &raw mut bind) }
    }

    /// A port that domain `domid` may bind.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn bind_unbound_port(evtchn: BorrowedFd<'_>, domid: u16) -> io::Result<u32> {
        let mut domid = u32::from(domid);
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_BIND_UNBOUND_PORT, &raw mut domid) }
    }

    /// Gives a port back.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn unbind(evtchn: BorrowedFd<'_>, port: u32) -> io::Result<()> {
        let mut port = port;
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_UNBIND, &raw mut port) }.map(drop)
    }

    /// Sends an event.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn notify(evtchn: BorrowedFd<'_>, port: u32) -> io::Result<()> {
        let mut port = port;
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_NOTIFY, &raw mut port) }.map(drop)
    }

    /// Clears the overflow of a ring of events that nobody read.
    ///
    /// # Errors
    /// Whatever the device says.
    pub fn reset(evtchn: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: the number takes no argument.
        unsafe { call::<u8>(evtchn, EVTCHN_RESET, std::ptr::null_mut()) }.map(drop)
    }
}
