//! Descriptors: their kind, and non-blocking reads and writes.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::socket::Received;

/// Makes a received descriptor non-blocking. A failure is ignored.
pub fn set_nonblocking(fd: BorrowedFd<'_>) {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    if let Ok(flags) = fcntl_getfl(fd)
        && !flags.contains(OFlags::NONBLOCK)
    {
        let _ = fcntl_setfl(fd, flags | OFlags::NONBLOCK);
    }
}

/// Kind of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdKind {
    /// Shared memory of the kernel: a memfd, a file on tmpfs or hugetlbfs. Its calls do not block.
    Memory,
    /// An eventfd.
    Event,
    /// A pipe without a name. (A named one is on a file system.)
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

/// Finds what a descriptor is without touching the file: neither `fstat` nor any call that its file
/// system or protocol answers. [`FdKind::Other`] if /proc is not mounted, except for memory.
pub fn fd_kind(fd: BorrowedFd<'_>) -> FdKind {
    if is_memory(fd) {
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

/// Makes a file of `len` bytes in memory.
///
/// # Errors
/// Out of descriptors or memory.
pub fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, len)?;
    Ok(fd)
}

/// Whether `fd` is the kernel's shared memory (memfd, shmem, hugetlbfs): unlike a file on a user's
/// file system, access to it cannot wait for another process.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // Answered for shmem and hugetlbfs alone, by the type of the file (mm/memfd.c).
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Opens a device node for reading and writing, non-blocking.
///
/// # Errors
/// Errors of the system call.
pub fn open_device(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Reads available bytes from a non-blocking descriptor: a socket, or a device node.
///
/// # Errors
/// Errors of the system call, except EAGAIN and EINTR.
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

/// Writes as many of `bytes` as a non-blocking descriptor accepts now.
///
/// # Errors
/// Errors of the system call, except EAGAIN (returns 0) and EINTR.
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        // A socket gets MSG_NOSIGNAL: a disconnected client must not cause a signal.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{eventfd, pipe, socketpair};
    use std::os::fd::AsFd;

    #[test]
    fn kinds_are_found_and_only_memory_is_memory() {
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (read, _write) = pipe().unwrap();
        let (socket, _other) = socketpair().unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for (fd, kind) in [
            (memory, FdKind::Memory),
            (eventfd().unwrap(), FdKind::Event),
            (read, FdKind::Pipe),
            (socket, FdKind::UnixStream),
            (file, FdKind::Other),
        ] {
            assert_eq!(fd_kind(fd.as_fd()), kind);
            assert_eq!(is_memory(fd.as_fd()), kind == FdKind::Memory, "{kind}");
        }
    }

    #[test]
    fn reads_and_writes_do_not_block_and_say_when_the_peer_closed() {
        let (ours, theirs) = socketpair().unwrap();
        let mut buf = [0; 8];
        assert_eq!(read(ours.as_fd(), &mut buf).unwrap(), Received::Nothing);
        while write(theirs.as_fd(), &[1; 4096]).unwrap() > 0 {}
        assert_eq!(read(ours.as_fd(), &mut buf).unwrap(), Received::Bytes(8));
        drop(theirs);
        assert!(write(ours.as_fd(), &buf).is_err(), "and no signal");
        while let Received::Bytes(_) = read(ours.as_fd(), &mut buf).unwrap() {}
        assert_eq!(read(ours.as_fd(), &mut buf).unwrap(), Received::Closed);
        let (pipe, end) = pipe().unwrap();
        assert_eq!(write(end.as_fd(), b"abc").unwrap(), 3);
        assert_eq!(read(pipe.as_fd(), &mut buf).unwrap(), Received::Bytes(3));
    }
}
