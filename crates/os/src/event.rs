//! Eventfds and pipes as signals between threads and processes.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

/// Most bytes that one [`drain`] takes from a pipe.
const DRAIN_BYTES: usize = 512;

/// Makes an eventfd, non-blocking, at zero.
///
/// # Errors
/// Out of descriptors.
pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes a pipe, both ends non-blocking: (read end, write end).
///
/// # Errors
/// Out of descriptors.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// Writes the eight bytes that make an eventfd (or a pipe, or a socket) readable. One system call;
/// errors are ignored.
#[inline]
pub fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Clears what [`signal`] wrote to an eventfd or a pipe; returns whether there was any. Bounded: a
/// peer that keeps writing does not delay the caller.
#[inline]
pub fn drain(fd: BorrowedFd<'_>) -> bool {
    let mut buf = [MaybeUninit::uninit(); DRAIN_BYTES];
    matches!(rustix::io::read(fd, &mut buf), Ok((bytes, _)) if !bytes.is_empty())
}

/// Writes a short message in one piece. `false`: no room now. A disconnected peer counts as
/// notified.
pub fn write_whole(fd: BorrowedFd<'_>, bytes: &[u8]) -> bool {
    !matches!(rustix::io::write(fd, bytes), Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait_readable;
    use rustix::event::{PollFd, PollFlags};
    use std::os::fd::AsFd;
    use std::time::Duration;

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
        // A process that another test is starting has that end, too, for a moment.
        let mut ended = [PollFd::new(&write, PollFlags::empty())];
        assert_eq!(rustix::event::poll(&mut ended, None), Ok(1));
        signal(write.as_fd());
        assert!(write_whole(write.as_fd(), b"x"));
    }
}
