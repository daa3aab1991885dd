//! Waiting for descriptors: for one by poll, for many by epoll.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;

/// Most descriptors that one [`Epoll::wait`] reports; the others are reported by the next.
const READY_MAX: usize = 32;

/// Condition to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Readable, or closed by the peer.
    Readable,
    /// Writable.
    Writable,
    /// Closed by the peer of a socket, or closed for sending: what it sent may not be read yet.
    HungUp,
}

/// Waits for `fd`; `false` when `deadline` passed first. A deadline in the past is one check.
///
/// # Errors
/// Errors of the system call, except EINTR: the wait continues.
pub fn wait(fd: BorrowedFd<'_>, until: Until, deadline: Instant) -> io::Result<bool> {
    let flags = match until {
        Until::Readable => PollFlags::IN,
        Until::Writable => PollFlags::OUT,
        Until::HungUp => PollFlags::RDHUP,
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

/// Waits until `fd` is readable (or closed by the peer); `false` after `timeout`.
///
/// # Errors
/// As [`wait`].
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    wait(fd, Until::Readable, Instant::now() + timeout)
}

/// Waits until any of `fds` is readable, or closed by the peer, at most `limit` (`None`:
/// indefinitely); returns which are. A signal ends the wait.
pub fn poll_readable(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> Vec<bool> {
    let mut all: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let _ = rustix::event::poll(&mut all, limit.map(timespec).as_ref());
    all.iter().map(|fd| !fd.revents().is_empty()).collect()
}

fn timespec(limit: Duration) -> Timespec {
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: i64::from(limit.subsec_nanos()) }
}

/// Epoll set, level-triggered unless a descriptor is added otherwise. Time-outs have the resolution
/// of a nanosecond (epoll_pwait2, Linux 5.11).
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// Report of an [`Epoll`] on one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The tag it was added with.
    pub tag: u64,
    /// Whether it is writable, or has an error.
    pub writable: bool,
    /// Whether it is readable, closed by the peer, or has an error.
    pub readable: bool,
}

impl From<Epoll> for OwnedFd {
    fn from(epoll: Epoll) -> Self {
        epoll.0
    }
}

impl Epoll {
    /// Makes an empty set.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `fd`, to be reported as `tag` when it is readable.
    ///
    /// # Errors
    /// Errors of the system call.
    pub fn add(&self, fd: BorrowedFd<'_>, tag: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(tag);
        Ok(epoll::add(&self.0, fd, data, epoll::EventFlags::IN)?)
    }

    /// Adds `fd`, to be reported as `tag` when it is writable.
    ///
    /// # Errors
    /// Errors of the system call.
    pub fn add_writable(&self, fd: BorrowedFd<'_>, tag: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(tag);
        Ok(epoll::add(&self.0, fd, data, epoll::EventFlags::OUT)?)
    }

    /// Adds `fd`, edge-triggered: it is reported as `tag` once for each time that it becomes
    /// readable, without being read.
    ///
    /// # Errors
    /// Errors of the system call.
    pub fn add_edge(&self, fd: BorrowedFd<'_>, tag: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(tag), flags)?)
    }

    /// Changes the events for which `fd` is reported. A hang-up is always reported.
    ///
    /// # Errors
    /// Errors of the system call: `fd` is not in the set.
    pub fn change(
        &self,
        fd: BorrowedFd<'_>,
        tag: u64,
        readable: bool,
        writable: bool,
    ) -> io::Result<()> {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, readable);
        flags.set(epoll::EventFlags::OUT, writable);
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(tag), flags)?)
    }

    /// Changes `fd` to be reported once now, and once for each time that its peer reads from it.
    ///
    /// # Errors
    /// Errors of the system call: `fd` is not in the set.
    pub fn change_to_reads(&self, fd: BorrowedFd<'_>, tag: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::OUT | epoll::EventFlags::ET;
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(tag), flags)?)
    }

    /// Removes `fd` from the set.
    ///
    /// # Errors
    /// Errors of the system call: `fd` is not in the set.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits for any descriptor, at most `limit` (`None`: indefinitely).
    ///
    /// # Errors
    /// Errors of the system call, except EINTR, which returns an empty list.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<Vec<Ready>> {
        let mut ready = Vec::new();
        self.wait_each(limit, |event| ready.push(event))?;
        Ok(ready)
    }

    /// Waits as [`wait`](Self::wait) does, and calls `each` for every descriptor.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); EINTR ends the wait.
    pub fn wait_each(
        &self,
        limit: Option<Duration>,
        mut each: impl FnMut(Ready),
    ) -> io::Result<()> {
        let limit = limit.map(timespec);
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; READY_MAX];
        let events = match epoll::wait(&self.0, &mut events, limit.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for event in events {
            let flags = event.flags;
            let broken = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
            each(Ready {
                tag: event.data.u64(),
                readable: flags.intersects(epoll::EventFlags::IN | broken),
                writable: flags.intersects(epoll::EventFlags::OUT | broken),
            });
        }
        Ok(())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{drain, eventfd, signal, socketpair};

    #[test]
    fn descriptor_is_reported_for_its_events_until_it_is_removed() {
        let epoll = Epoll::new().unwrap();
        let ready = || epoll.wait(Some(Duration::ZERO)).unwrap();
        let (ours, theirs) = socketpair().unwrap();
        epoll.add(ours.as_fd(), 7).unwrap();
        assert!(epoll.add(ours.as_fd(), 8).is_err() && ready().is_empty());
        epoll.change(ours.as_fd(), 9, true, true).unwrap();
        assert_eq!(ready(), [Ready { tag: 9, readable: false, writable: true }]);
        epoll.change_to_reads(ours.as_fd(), 9).unwrap();
        assert_eq!((ready().len(), ready().len()), (1, 0));
        signal(ours.as_fd());
        assert!(ready().is_empty());
        drain(theirs.as_fd());
        assert_eq!((ready().len(), ready().len()), (1, 0));
        epoll.change(ours.as_fd(), 9, false, false).unwrap();
        signal(theirs.as_fd());
        assert!(ready().is_empty());
        epoll.change(ours.as_fd(), 9, true, false).unwrap();
        assert_eq!(ready(), [Ready { tag: 9, readable: true, writable: false }]);
        drop(theirs);
        epoll.remove(ours.as_fd()).unwrap();
        assert!(ready().is_empty() && epoll.remove(ours.as_fd()).is_err());
        assert!(epoll.change(ours.as_fd(), 9, true, false).is_err());
    }

    #[test]
    fn edge_is_reported_once_and_again_after_the_next_signal() {
        let epoll = Epoll::new().unwrap();
        let ready = || epoll.wait(Some(Duration::ZERO)).unwrap().len();
        let event = eventfd().unwrap();
        epoll.add_edge(event.as_fd(), 7).unwrap();
        assert_eq!(ready(), 0);
        for _ in 0..2 {
            signal(event.as_fd());
            assert_eq!((ready(), ready()), (1, 0), "without being read");
        }
        assert_eq!(poll_readable(&[event.as_fd()], None), [true]);
        assert!(drain(event.as_fd()));
        assert_eq!(poll_readable(&[event.as_fd()], Some(Duration::ZERO)), [false]);
    }

    #[test]
    fn time_outs_are_shorter_than_a_millisecond() {
        let (epoll, mut best) = (Epoll::new().unwrap(), Duration::MAX);
        crate::precise_timers();
        for _ in 0..1000 {
            let before = Instant::now();
            assert!(epoll.wait(Some(Duration::from_micros(20))).unwrap().is_empty());
            best = best.min(before.elapsed());
        }
        assert!(best >= Duration::from_micros(20) && best < Duration::from_millis(1), "{best:?}");
    }

    #[test]
    fn wait_ends_at_its_deadline_or_with_the_event() {
        let event = eventfd().unwrap();
        let before = Instant::now();
        let soon = Duration::from_millis(5);
        assert!(!wait(event.as_fd(), Until::Readable, before + soon).unwrap());
        assert!(before.elapsed() >= soon);
        assert!(wait(event.as_fd(), Until::Writable, before).unwrap());
        signal(event.as_fd());
        assert!(wait_readable(event.as_fd(), Duration::from_secs(20)).unwrap());
        assert!(drain(event.as_fd()) && !wait_readable(event.as_fd(), Duration::ZERO).unwrap());
    }
}
