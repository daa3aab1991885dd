//! mmap, memfd and the SIGBUS guard: every system call of this crate.
//!
//! The guard: a peer may truncate the file behind a mapping at any time, and the next access then
//! raises SIGBUS. The handler finds the mapping in an append-only list, lays anonymous memory over
//! the whole of it (the whole, because hugetlbfs mappings can only be replaced in large pages) and
//! raises its `lost` flag; the interrupted access then succeeds on zeroes. Whoever serves that
//! peer checks the flag once per burst and stops the peer's port. A SIGBUS anywhere else keeps its
//! default action.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::mapping::Access;

/// One entry of the guard's list. Entries are leaked and used again, never freed: the signal
/// handler may walk the list at any time.
pub(crate) struct Guarded {
    start: AtomicUsize,
    end: AtomicUsize,
    taken: AtomicBool,
    lost: AtomicBool,
    next: AtomicPtr<Guarded>,
}

static GUARDED: AtomicPtr<Guarded> = AtomicPtr::new(std::ptr::null_mut());
static LOST: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();

impl Guarded {
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

/// How many mappings were lost so far; a worker looks for the loser only when this moved.
pub fn mappings_lost() -> usize {
    LOST.load(Ordering::Relaxed)
}

fn guard(start: usize, end: usize) -> &'static Guarded {
    INSTALL.call_once(install);
    let mut at = GUARDED.load(Ordering::Acquire);
    // SAFETY: entries come from Box::leak below and are never freed.
    while let Some(entry) = unsafe { at.as_ref() } {
        if !entry.taken.swap(true, Ordering::AcqRel) {
            entry.lost.store(false, Ordering::Relaxed);
            entry.end.store(end, Ordering::Relaxed);
            entry.start.store(start, Ordering::Release);
            return entry;
        }
        at = entry.next.load(Ordering::Acquire);
    }
    let entry: &'static Guarded = Box::leak(Box::new(Guarded {
        start: AtomicUsize::new(start),
        end: AtomicUsize::new(end),
        taken: AtomicBool::new(true),
        lost: AtomicBool::new(false),
        next: AtomicPtr::new(std::ptr::null_mut()),
    }));
    let raw = std::ptr::from_ref(entry).cast_mut();
    let mut head = GUARDED.load(Ordering::Acquire);
    loop {
        entry.next.store(head, Ordering::Relaxed);
        match GUARDED.compare_exchange_weak(head, raw, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return entry,
            Err(now) => head = now,
        }
    }
}

fn install() {
    // SAFETY: all-zero is a valid sigaction (default action, empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: `action` is initialised and the handler is async-signal-safe (atomics, mmap only).
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let info = unsafe { &*info };
    // SAFETY: SIGBUS fills si_addr.
    let addr = unsafe { info.si_addr() } as usize;
    let mut at = GUARDED.load(Ordering::Acquire);
    // SAFETY: entries are leaked, see `guard`.
    while let Some(entry) = unsafe { at.as_ref() } {
        let start = entry.start.load(Ordering::Acquire);
        let end = entry.end.load(Ordering::Relaxed);
        if start != 0 && (start..end).contains(&addr) {
            entry.lost.store(true, Ordering::Relaxed);
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the range is a live mapping of ours (its owner is being interrupted in an
            // access to it, so it has not been dropped); replacing it keeps every address valid.
            let got = unsafe {
                libc::mmap(
                    start as *mut libc::c_void,
                    end - start,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if got != libc::MAP_FAILED {
                LOST.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        at = entry.next.load(Ordering::Acquire);
    }
    // Not ours: default action, and the faulting instruction runs again into it.
    // SAFETY: SIG_DFL is always a valid disposition.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

/// mmaps `len` bytes of `fd` from `offset` on, shared, and guards them.
pub(crate) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    access: Access,
) -> io::Result<(NonNull<u8>, &'static Guarded)> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let write = if access == Access::Write { libc::PROT_WRITE } else { 0 };
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | write,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            fd.as_raw_fd(),
            offset,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = at as usize;
    let at = NonNull::new(at.cast::<u8>()).ok_or_else(io::Error::last_os_error)?;
    // Guest memory is large and touched all over: let the kernel use large pages where it may.
    // SAFETY: advice on the mapping made above.
    unsafe { libc::madvise(at.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
    // A core dump of ours has no business with guest memory.
    // SAFETY: as above.
    unsafe { libc::madvise(at.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
    Ok((at, guard(start, start + len)))
}

/// Undoes [`map`].
pub(crate) fn unmap(at: NonNull<u8>, len: usize, guarded: &'static Guarded) {
    guarded.start.store(0, Ordering::Release);
    // SAFETY: the caller owns the mapping and gives it up; no view of it is left (they borrow or
    // hold the owner).
    unsafe { libc::munmap(at.as_ptr().cast(), len) };
    guarded.taken.store(false, Ordering::Release);
}

/// `len` zeroed bytes, more than none, that take no room before they are touched.
pub(crate) fn anonymous(len: usize) -> io::Result<NonNull<u8>> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Small frames touch the start of each buffer only; large pages would fill in the rest.
    // SAFETY: advice on the mapping made above. A kernel without large pages refuses it.
    unsafe { libc::madvise(at, len, libc::MADV_NOHUGEPAGE) };
    NonNull::new(at.cast::<u8>()).ok_or_else(io::Error::last_os_error)
}

/// Undoes [`anonymous`].
pub(crate) fn unmap_anonymous(at: NonNull<u8>, len: usize) {
    // SAFETY: the caller owns the mapping and gives it up; all views of it borrowed the owner.
    unsafe { libc::munmap(at.as_ptr().cast(), len) };
}

/// A new memfd of `len` bytes, sealed against shrinking.
pub(crate) fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(name).map_err(io::Error::other)?;
    // SAFETY: `name` is a valid C string for the duration of the call.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and is owned by no one else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: plain system call on a descriptor we own.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain system call on a descriptor we own.
    let sealed = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
    if sealed < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// What `fstat` says of `fd`: (size in bytes if it is a regular file, block size).
pub(crate) fn file_size(fd: BorrowedFd<'_>) -> io::Result<(Option<u64>, u64)> {
    // SAFETY: all-zero is a valid `stat` to be filled in.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writes during the call.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let regular = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    let block = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096);
    Ok((regular.then(|| u64::try_from(stat.st_size).unwrap_or(0)), block))
}
