//! Calls for which `rustix` has no safe function: notification of an eventfd shared with a peer,
//! without blocking, by Linux asynchronous I/O; groups by name, and those of a socket's peer, and
//! what it has not read; page
//! faults and scheduling class of a thread; descriptors that the process inherited; the allocator.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::event::signal;
use crate::fd::set_nonblocking;
use crate::inherit::{FIRST, InheritError};

/// Kernel's counters of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Page faults.
    pub faults: u64,
    /// Voluntary context switches: the thread blocked.
    pub waits: u64,
}

/// Returns the kernel's counters of this thread.
pub fn thread_counts() -> ThreadCounts {
    // SAFETY: all fields are integers, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes one `rusage` at the address, which we own. With this argument and
    // address it does not fail.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    let faults = usage.ru_minflt.saturating_add(usage.ru_majflt);
    ThreadCounts { faults: faults.unsigned_abs(), waits: usage.ru_nvcsw.unsigned_abs() }
}

/// Bytes from which an allocation is a mapping of its own. Unless set, one that is freed raises it
/// to its size, and then twice as much stays free at the end of each heap.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;

/// Has glibc's allocator make at most so many heaps, before there are threads: it makes one for
/// each thread, up to eight times the number of CPUs, and keeps what each has used at most. Others
/// have one heap. And has it map large allocations on their own, whatever was freed before.
pub fn limit_heaps(most: usize) {
    #[cfg(target_env = "gnu")]
    {
        let most = libc::c_int::try_from(most).unwrap_or(libc::c_int::MAX);
        for (number, value) in [(libc::M_ARENA_MAX, most), (libc::M_MMAP_THRESHOLD, LARGE)] {
            // SAFETY: it sets a number of the allocator, under the allocator's own lock.
            unsafe { libc::mallopt(number, value) };
        }
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = most;
}

/// Has glibc's allocator give free pages within its heaps back to the system: of its own accord it
/// gives only those at a heap's end. Takes up to a millisecond for each 10 MB or so, in which other
/// threads that allocate wait.
pub fn trim_heaps() {
    #[cfg(target_env = "gnu")]
    {
        use std::sync::Mutex;

        /// glibc initialises its allocator at the first use, without a lock. If another one has
        /// replaced it, as a sanitizer's does, this is the first use: two at a time, and it aborts.
        static FIRST_USE: Mutex<()> = Mutex::new(());
        let _guard = FIRST_USE.lock();
        // SAFETY: it changes only free memory, under the allocator's own locks; its first use is
        // under ours.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// Schedules this thread by SCHED_RR with a priority from 1 to 99, which its children do not
/// inherit.
///
/// # Errors
/// EPERM; EINVAL for another priority.
pub(crate) fn set_round_robin(priority: i32) -> io::Result<()> {
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // `struct sched_param` of the kernel; in C libraries it may have more fields.
    let param: libc::c_int = priority;
    // SAFETY: the kernel reads one int at the address, which we own. Not by the C library's
    // function: musl's always fails.
    let set = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const param) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a system call that has no effect on this process's memory: it is refused, or fails because
/// of a null pointer, a descriptor -1 or a length of 0.
#[cfg(test)]
pub(crate) fn harmless_call(number: libc::c_long, [a, b, c]: [libc::c_long; 3]) -> io::Result<()> {
    // SAFETY: the caller guarantees that nothing is read or written.
    let got = unsafe { libc::syscall(number, a, b, c, 0, 0, 0) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Duplicates a descriptor that the process inherited under a number; children do not inherit the
/// duplicate. The number itself stays open.
///
/// # Errors
/// No descriptor has this number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl takes any number, and fails for one that is no descriptor.
    let fd = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether inherited descriptors have an owner.
static INHERITED: AtomicBool = AtomicBool::new(false);

/// Takes the first `count` inherited descriptors; none from the second call on.
pub(crate) fn take_inherited(count: usize) -> Result<Vec<OwnedFd>, InheritError> {
    if INHERITED.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let take = |fd| {
        // SAFETY: the call only sets a flag of a descriptor, or fails.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(InheritError::NotOpen { fd, error: io::Error::last_os_error() });
        }
        // SAFETY: it is open, and was so when the process began, which has opened none yet; its
        // parent passed it, and nothing else in the process owns it: this happens once.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    (FIRST..).take(count).map(take).collect()
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
/// Completions removed from the queue at once.
const COMPLETIONS: usize = 128;

impl Aio {
    fn new() -> Option<Self> {
        let null = std::fs::File::open("/dev/null").ok()?;
        let mut context: libc::c_ulong = 0;
        let at = &raw mut context;
        // SAFETY: io_setup writes one word at `at`, which we own.
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
        // SAFETY: the context is this thread's; the list has one valid iocb, and its read of zero
        // bytes is complete when the call returns.
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
        // SAFETY: we own the context, and it has nothing in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

thread_local! {
    static AIO: Option<Aio> = Aio::new();
}

/// Adds one to an eventfd shared with a peer, without blocking.
///
/// An eventfd's O_NONBLOCK is shared by all processes that have it: a peer that clears it and fills
/// the counter blocks any writer, and a check before the write is a race. Linux has no per-call
/// flag for it (RWF_NOWAIT is refused). But the completion of an asynchronous read signals an
/// eventfd inside the kernel, which never blocks: so this reads zero bytes of /dev/null. It costs
/// about 0.4 µs more than a write. If the system has no such reads left (`fs.aio-max-nr`), it is a
/// write.
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

/// Largest entry of the group database, in bytes: a group with many members.
const GROUP_MAX: usize = 1 << 20;
/// Most groups of a process (Linux: NGROUPS_MAX).
const GROUPS_MAX: usize = 65_536;

/// Number of the group of this name.
pub fn group_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0_u8; 4096];
    loop {
        let mut group = std::mem::MaybeUninit::<libc::group>::uninit();
        let mut found = std::ptr::null_mut();
        let (at, len) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the name is a C string; the entry, the buffer of `len` bytes and the pointer to
        // the result are ours.
        let error =
            unsafe { libc::getgrnam_r(name.as_ptr(), group.as_mut_ptr(), at, len, &raw mut found) };
        if error == libc::ERANGE && buffer.len() < GROUP_MAX {
            buffer.resize(2 * buffer.len(), 0);
            continue;
        }
        if error != 0 || found.is_null() {
            return None;
        }
        // SAFETY: a result that is not null points to the entry, which the call has written.
        return Some(unsafe { (*found).gr_gid });
    }
}

/// Whether a descriptor is a network namespace.
pub fn is_net_namespace(fd: BorrowedFd<'_>) -> bool {
    /// `_IO(0xb7, 3)` of linux/nsfs.h.
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    // SAFETY: this request has no argument, and other files refuse it.
    unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE as libc::Ioctl) == libc::CLONE_NEWNET }
}

/// Supplementary groups of a Unix socket's peer.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut len = std::mem::size_of_val(&groups[..]) as libc::socklen_t;
        let (fd, at) = (socket.as_raw_fd(), groups.as_mut_ptr().cast());
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERGROUPS);
        // SAFETY: the kernel writes at most `len` bytes to the vector, which has as many, and the
        // length to `len`.
        let result = unsafe { libc::getsockopt(fd, level, name, at, &raw mut len) };
        let count = len as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE)
            || !(groups.len()..=GROUPS_MAX).contains(&count)
        {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// Has the kernel refuse descriptors that peers send to a Unix socket (EPERM at the peer). Returns
/// whether it does: since Linux 6.16. Otherwise they may arrive, and count and close like any.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) -> bool {
    /// Of asm-generic/socket.h, as on all machines but four.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let off: libc::c_int = 0;
    let (at, len) = ((&raw const off).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    let fd = socket.as_raw_fd();
    // SAFETY: the kernel reads one int at the address, which we own.
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, at, len) == 0 }
}

/// Whether the peer of a Unix socket has read all that was written to it, or is gone.
pub fn is_read(socket: BorrowedFd<'_>) -> bool {
    /// A buffer counts with its header, which is longer. While it is released, it counts as 1.
    const BUFFER_MIN: libc::c_int = 64;
    let mut unread: libc::c_int = 0;
    let at = &raw mut unread;
    // SAFETY: the kernel writes one int at the address, which we own.
    let known = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, at) } == 0;
    !known || unread < BUFFER_MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_refused_at_their_sender_or_arrive() {
        let (ours, theirs) = crate::socketpair().unwrap();
        let refuses = refuse_descriptors(ours.as_fd());
        let event = crate::eventfd().unwrap();
        let sent = crate::send(theirs.as_fd(), b"x", &[event.as_fd()]);
        assert_eq!(sent.is_err(), refuses, "{sent:?}");
        assert!(crate::send(theirs.as_fd(), b"x", &[]).unwrap());
    }

    #[test]
    fn socket_is_read_when_its_peer_has_read_each_byte() {
        let (ours, theirs) = crate::socketpair().unwrap();
        assert!(is_read(ours.as_fd()));
        rustix::io::write(&ours, b"abc").unwrap();
        rustix::io::read(&theirs, &mut [0_u8; 2]).unwrap();
        assert!(!is_read(ours.as_fd()));
        rustix::io::read(&theirs, &mut [0_u8; 2]).unwrap();
        assert!(is_read(ours.as_fd()));
        rustix::io::write(&ours, b"abc").unwrap();
        drop(theirs);
        assert!(is_read(ours.as_fd()));
    }

    #[test]
    fn inherited_descriptor_is_another_for_the_same_file() {
        let (read, write) = crate::pipe().unwrap();
        let again = inherited(write.as_raw_fd()).unwrap();
        assert_ne!(again.as_raw_fd(), write.as_raw_fd());
        rustix::io::write(&again, b"x").unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0_u8; 2]).unwrap(), 1);
        let error = inherited(1 << 20).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn full_blocking_eventfd_does_not_block_its_signaller() {
        use rustix::event::{EventfdFlags, eventfd};
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, ends) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // More than the queue of completions holds.
            (0..2 * COMPLETIONS).for_each(|_| signal_event(event.as_fd()));
            done.send(()).unwrap();
        });
        ends.recv_timeout(std::time::Duration::from_secs(20)).expect("it blocked");
    }
}
