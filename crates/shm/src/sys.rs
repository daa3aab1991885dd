//! System calls of this crate (mmap, memfd), except those of the guard's handler.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use crate::guard;
use crate::mapping::{Access, MapError};

/// mmaps `len` bytes of `fd` from `offset` on, shared, and guards them.
pub(crate) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    access: Access,
) -> Result<(NonNull<u8>, guard::Watched), MapError> {
    guard::prepare()?;
    let at = map_shared(fd, offset, len, access).map_err(MapError::Os)?;
    // Guest memory must not be in our core dump. SAFETY: advice on the mapping made above.
    unsafe { libc::madvise(at.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
    Ok((at, guard::watch(at.as_ptr() as usize, round_up(len))))
}

fn map_shared(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    access: Access,
) -> io::Result<NonNull<u8>> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let write = if access == Access::Write { libc::PROT_WRITE } else { 0 };
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
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
    NonNull::new(at.cast::<u8>()).ok_or_else(io::Error::last_os_error)
}

/// Undoes [`map`].
pub(crate) fn unmap(at: NonNull<u8>, len: usize, watched: &guard::Watched) {
    if !guard::forget(at.as_ptr() as usize, round_up(len), watched) {
        // Data of one peer's port must not be visible to the next one at this address.
        return;
    }
    // SAFETY: the caller owns the mapping and releases it; no view of it is left (they borrow or
    // hold the owner).
    unsafe { libc::munmap(at.as_ptr().cast(), len) };
}

/// Advises the kernel to use large pages for our own memory.
pub(crate) fn advise_large(at: NonNull<u8>, len: usize) {
    // SAFETY: advice on a mapping of the caller's. A kernel without large pages refuses it.
    unsafe { libc::madvise(at.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
}

/// Page size in bytes. Async-signal-safe: the C library reads a value stored at the start.
pub(crate) fn page_len() -> usize {
    // SAFETY: a plain query.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(len).unwrap_or(4096)
}

fn round_up(len: usize) -> usize {
    len.next_multiple_of(page_len())
}

/// Maps `n` adjacent pages, each its own mapping.
pub(crate) fn spares(n: usize) -> io::Result<NonNull<u8>> {
    let page = page_len();
    let first = anonymous(n * page)?;
    for i in 0..n {
        let prot = if i % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
        // SAFETY: inside the mapping made above.
        let at = unsafe { first.as_ptr().add(i * page) };
        // SAFETY: our own unused page.
        if unsafe { libc::mprotect(at.cast(), page, prot) } < 0 {
            let error = io::Error::last_os_error();
            unmap_anonymous(first, n * page);
            return Err(error);
        }
    }
    Ok(first)
}

/// Frees the pages of `len` bytes at `offset` of a memfd.
pub(crate) fn punch(fd: RawFd, offset: usize, len: usize) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, len) = (offset as libc::off_t, len as libc::off_t);
    // SAFETY: plain system call; it frees pages of the caller's file.
    if unsafe { libc::fallocate(fd, mode, offset, len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes the guard's substitute: a sparse memfd of `len` bytes, sealed against resizing.
pub(crate) fn substitute_fd(len: u64) -> Result<OwnedFd, (&'static str, io::Error)> {
    // SAFETY: all-zero is a valid `rlimit` to be filled in.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: `limit` is valid for writes during the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    // A file beyond that limit raises a signal that ends the process.
    if !known || limit.rlim_cur < len {
        let what = "file sizes are limited (RLIMIT_FSIZE); run with `ulimit -f unlimited`";
        return Err((what, io::ErrorKind::FileTooLarge.into()));
    }
    let failed = |what| move |error| (what, error);
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let name = c"pvswitch-substitute";
    // With `vm.memfd_noexec` = 2 the flag is required; Linux before 6.3 does not know it.
    let fd = memfd_of(name, flags | libc::MFD_NOEXEC_SEAL).or_else(|_| memfd_of(name, flags));
    let fd = fd.map_err(failed("memfd_create"))?;
    lengthen(&fd, len).map_err(failed("ftruncate"))?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    seal(&fd, seals).map_err(failed("F_ADD_SEALS"))?;
    Ok(fd)
}

/// Maps `len` zeroed bytes, at least one, which use no pages before they are touched.
pub(crate) fn anonymous(len: usize) -> io::Result<NonNull<u8>> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
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
    // SAFETY: the caller owns the mapping and releases it; all views of it borrowed the owner.
    unsafe { libc::munmap(at.as_ptr().cast(), len) };
}

/// A new memfd of `len` bytes, sealed against shrinking.
pub(crate) fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(name).map_err(io::Error::other)?;
    let fd = memfd_of(&name, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
    lengthen(&fd, len)?;
    seal(&fd, libc::F_SEAL_SHRINK)?;
    Ok(fd)
}

pub(crate) fn memfd_of(name: &std::ffi::CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: `name` is a valid C string for the duration of the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn lengthen(fd: &OwnedFd, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: plain system call on a descriptor we own.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn seal(fd: &OwnedFd, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: plain system call on a descriptor we own.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Result of `fstat` on `fd`: (size in bytes if it is a regular file, block size).
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

/// The inode of a file of a model.
#[cfg(loom)]
pub(crate) fn inode(fd: BorrowedFd<'_>) -> u64 {
    use std::os::unix::fs::MetadataExt;

    let file = std::fs::File::from(fd.try_clone_to_owned().unwrap());
    file.metadata().unwrap().ino()
}
