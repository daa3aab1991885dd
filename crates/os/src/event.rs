//! Eventfds and pipes as signals between threads and processes.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::pipe::PipeFlags;

use crate::fd::set_nonblocking;

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

/// Clears an eventfd shared with a peer, without blocking; returns whether it was set.
///
/// Unlike that of a write ([`signal_event`](crate::signal_event)), O_NONBLOCK of a read can be
/// given with the call: since Linux 5.8; before, it is set, and a peer can clear it in between.
#[inline]
pub fn drain_event(fd: BorrowedFd<'_>) -> bool {
    /// Read as by `read`.
    const NO_OFFSET: u64 = u64::MAX;
    let mut counter = [0; 8];
    let mut buf = [IoSliceMut::new(&mut counter)];
    match rustix::io::preadv2(fd, &mut buf, NO_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => {
            set_nonblocking(fd);
            drain(fd)
        }
        read => read.is_ok(),
    }
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
    fn blocking_eventfd_is_drained_and_does_not_block_its_reader() {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (done, ends) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            signal(event.as_fd());
            done.send([drain_event(event.as_fd()), drain_event(event.as_fd())]).unwrap();
        });
        assert_eq!(ends.recv_timeout(Duration::from_secs(20)), Ok([true, false]), "it blocked");
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
