//! The functions of [`sys`](super::sys) under Miri, which has neither memfds nor shared mappings:
//! a mapping is memory of the allocator, whose bounds, initialisation and pointers Miri then checks
//! (docs/reliability.md, "Miri and ThreadSanitizer"). Two mappings of one descriptor share nothing.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::guard;
use crate::mapping::{Access, MapError};

const PAGE: usize = 4096;

/// Allocates `len` bytes in place of a mapping.
pub(crate) fn map(
    _: BorrowedFd<'_>,
    _: u64,
    len: usize,
    _: Access,
) -> Result<(NonNull<u8>, guard::Watched), MapError> {
    let at = anonymous(len).map_err(MapError::Os)?;
    Ok((at, guard::watch(at.addr().get(), len.next_multiple_of(PAGE))))
}

/// Undoes [`map`].
pub(crate) fn unmap(at: NonNull<u8>, len: usize, watched: &guard::Watched) {
    guard::forget(at.addr().get(), len.next_multiple_of(PAGE), watched);
    unmap_anonymous(at, len);
}

pub(crate) fn advise_large(_: NonNull<u8>, _: usize) {}

pub(crate) fn page_len() -> usize {
    PAGE
}

/// Not called: there is no handler of SIGBUS.
pub(crate) fn spares(_: usize) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(crate) fn punch(_: RawFd, _: usize, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(crate) fn substitute_fd(_: u64) -> Result<OwnedFd, (&'static str, io::Error)> {
    Err(("Miri", io::ErrorKind::Unsupported.into()))
}

/// Allocates `len` zeroed bytes, at least one.
pub(crate) fn anonymous(len: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: the layout is not empty.
    let at = unsafe { std::alloc::alloc_zeroed(layout(len)?) };
    NonNull::new(at).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Undoes [`anonymous`].
pub(crate) fn unmap_anonymous(at: NonNull<u8>, len: usize) {
    let layout = layout(len).expect("it was allocated with it");
    // SAFETY: allocated with this layout; all views of it borrowed the owner.
    unsafe { std::alloc::dealloc(at.as_ptr(), layout) };
}

/// Of whole pages. More than a terabyte is refused, as the kernel refuses tests that ask for too
/// much.
fn layout(len: usize) -> io::Result<Layout> {
    let len = len.checked_next_multiple_of(PAGE).filter(|len| *len < 1 << 40);
    Layout::from_size_align(len.ok_or(io::ErrorKind::OutOfMemory)?, PAGE).map_err(io::Error::other)
}

/// An unnamed file of `len` bytes.
pub(crate) fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("{}-{}-{next}", name.replace('/', "-"), std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(len)?;
    Ok(file.into())
}

pub(crate) fn file_size(fd: BorrowedFd<'_>) -> io::Result<(Option<u64>, u64)> {
    let metadata = File::from(fd.try_clone_to_owned()?).metadata()?;
    Ok((metadata.is_file().then(|| metadata.len()), PAGE as u64))
}
