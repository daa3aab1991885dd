//! One mmap of a descriptor, owned.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::copy::{Seg, SegMut};
use crate::{guard, sys};

/// Permitted access to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only: no [`SegMut`] and no [`Area`](crate::Area) can be made of it.
    Read,
    /// Read and write.
    Write,
}

/// A shared mapping of a memfd, a hugetlbfs file, a plain file, or a device. Unmapped on drop.
pub struct Mapping {
    at: NonNull<u8>,
    len: usize,
    access: Access,
    watched: guard::Watched,
    fd: Option<OwnedFd>,
    /// Called before and after it is unmapped.
    ending: [Option<Box<dyn FnOnce() + Send + Sync>>; 2],
    /// Its file, by which a model finds the words in it.
    #[cfg(loom)]
    file: u64,
}

// SAFETY: the mapping is plain memory; every access to it goes through atomics or raw copies that
// assume concurrent writers, and the pointer and length never change.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Reason why a descriptor could not be mapped.
#[derive(Debug)]
pub enum MapError {
    /// The range is empty or its end does not fit the address space.
    BadRange {
        /// Requested offset, in bytes.
        offset: u64,
        /// Requested length, in bytes.
        len: u64,
    },
    /// The file holds fewer bytes than the range claims.
    Short {
        /// End of the claimed range, in bytes.
        claimed: u64,
        /// Size of the file, in bytes.
        held: u64,
    },
    /// The system call failed.
    Os(io::Error),
    /// The process would not survive the peer's truncation of the memory.
    Unguarded {
        /// The missing resource.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadRange { offset, len } => {
                write!(f, "memory range of {len:#x} bytes at offset {offset:#x} is empty or wraps")
            }
            Self::Short { claimed, held } => {
                write!(f, "memory range ends at {claimed:#x} but its file holds {held:#x} bytes")
            }
            Self::Os(error) => write!(f, "mmap failed: {error}"),
            Self::Unguarded { what, error } => write!(
                f,
                "cannot map memory of peers: its truncation would end the process: {what}: {error}"
            ),
        }
    }
}

impl std::error::Error for MapError {}

impl Mapping {
    /// Maps the first `offset + len` bytes of `fd`, rounded up to its block size (hugetlbfs maps
    /// in large pages only).
    ///
    /// # Errors
    /// [`MapError`]; in particular a file shorter than the range, which would fault on access.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        let len = Self::len_for(fd, offset, len)?;
        let (at, watched) = sys::map(fd, 0, len, Access::Write)?;
        Ok(Self {
            at,
            len,
            access: Access::Write,
            watched,
            fd: None,
            ending: [None, None],
            #[cfg(loom)]
            file: sys::inode(fd),
        })
    }

    /// Number of bytes that [`new`](Self::new) maps for the same range, for accounting before the
    /// call.
    ///
    /// # Errors
    /// As `new`, except for errors of `mmap` itself.
    pub fn len_for(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<usize, MapError> {
        let bad = || MapError::BadRange { offset, len };
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or_else(bad)?;
        let (size, block) = sys::file_size(fd).map_err(MapError::Os)?;
        if let Some(held) = size.filter(|held| *held < end) {
            return Err(MapError::Short { claimed: end, held });
        }
        let end = end.checked_next_multiple_of(block).ok_or_else(bad)?;
        let len = usize::try_from(end).ok().filter(|l| isize::try_from(*l).is_ok());
        len.ok_or_else(bad)
    }

    /// Maps exactly `len` bytes at `offset` of a device, whose size is unknown and which may refuse
    /// any other range (gntdev and gntalloc do).
    ///
    /// # Errors
    /// [`MapError`]: a range that is empty or wraps, or the device's error.
    pub fn exact(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Self, MapError> {
        let bad = || MapError::BadRange { offset, len };
        let end = offset.checked_add(len).filter(|_| len > 0);
        end.filter(|end| i64::try_from(*end).is_ok()).ok_or_else(bad)?;
        let bytes = usize::try_from(len).ok().filter(|l| isize::try_from(*l).is_ok());
        let bytes = bytes.ok_or_else(bad)?;
        let (at, watched) = sys::map(fd, offset, bytes, access)?;
        Ok(Self {
            at,
            len: bytes,
            access,
            watched,
            fd: None,
            ending: [None, None],
            #[cfg(loom)]
            file: sys::inode(fd),
        })
    }

    /// The inode of its file.
    #[cfg(loom)]
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    /// Calls `then` after the memory is unmapped, when its last owner drops it.
    #[must_use]
    pub fn on_unmap(mut self, then: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.ending[1] = Some(Box::new(then));
        self
    }

    /// Calls `first` before the memory is unmapped, when it has no more owners: records of its
    /// address must be removed before the address can be reused.
    #[must_use]
    pub fn before_unmap(mut self, first: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.ending[0] = Some(Box::new(first));
        self
    }

    /// Permitted access.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns `len` readable bytes at `offset`, if they are inside.
    pub fn seg(&self, offset: usize, len: u32) -> Option<Seg<'_>> {
        let at = self.at(offset, len as usize)?;
        // SAFETY: `at` found all `len` bytes inside this mapping, which outlives '_.
        Some(unsafe { Seg::new(at, len) })
    }

    /// Returns `len` writable bytes at `offset`, if they are inside and writable.
    pub fn seg_mut(&self, offset: usize, len: u32) -> Option<SegMut<'_>> {
        let at = self.at(offset, len as usize).filter(|_| self.access == Access::Write)?;
        // SAFETY: as for `seg`; it is mapped writable, and shared.
        Some(unsafe { SegMut::new(at, len) })
    }

    /// Makes a memfd of `len` bytes, zeroed and mapped; a driver half's "guest memory".
    ///
    /// # Errors
    /// [`MapError`] if the system has no memory.
    pub fn memfd(name: &str, len: u64) -> Result<Self, MapError> {
        let fd = sys::memfd(name, len).map_err(MapError::Os)?;
        let mut mapping = Self::new(fd.as_fd(), 0, len)?;
        // Not for a peer's memory: its holes would be filled with large pages, charged to us.
        sys::advise_large(mapping.at, mapping.len);
        mapping.fd = Some(fd);
        Ok(mapping)
    }

    /// The descriptor of a mapping made by [`Mapping::memfd`], to send to the peer.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Length in bytes, block rounding included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty range is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the peer truncated the mapped file. Reads then return zeroes and writes are lost;
    /// the port must be stopped.
    pub fn is_lost(&self) -> bool {
        self.watched.is_lost()
    }

    /// Start of `len` bytes at `offset`, or `None` if they are not inside.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: `offset` is at most the mapping's length, which fits isize (checked in `new`).
        Some(unsafe { self.at.add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let [first, then] = &mut self.ending;
        first.take().into_iter().for_each(|first| first());
        sys::unmap(self.at, self.len, &self.watched);
        then.take().into_iter().for_each(|then| then());
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({:?}+{:#x})", self.at, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Area, GuestMemory, Region};
    use std::sync::Arc;

    #[test]
    fn file_shorter_than_claimed_is_refused() {
        let fd = sys::memfd("short", 8192).unwrap();
        let error = Mapping::new(fd.as_fd(), 4096, 8192).unwrap_err();
        assert!(matches!(error, MapError::Short { claimed: 12288, held: 8192 }), "{error}");
    }

    #[test]
    fn empty_and_wrapping_ranges_are_refused() {
        let fd = sys::memfd("bad", 8192).unwrap();
        assert!(matches!(Mapping::new(fd.as_fd(), 0, 0), Err(MapError::BadRange { .. })));
        assert!(matches!(Mapping::new(fd.as_fd(), u64::MAX, 2), Err(MapError::BadRange { .. })));
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs files in memory")]
    fn descriptor_that_cannot_be_mapped_is_an_os_error() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(Mapping::new(null.as_fd(), 0, 4096), Err(MapError::Os(_))));
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs files in memory")]
    fn exact_range_of_a_file_is_mapped_and_its_unmap_reported() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let whole = Mapping::memfd("exact", 12288).unwrap();
        let fd = whole.fd().unwrap();
        assert_eq!(whole.seg_mut(4096, 4).unwrap().write(&[1, 2, 3, 4]), 4);
        let gone = Arc::new(AtomicBool::new(false));
        let unmapped = Arc::clone(&gone);
        let page = Mapping::exact(fd, 4096, 4096, Access::Write).unwrap();
        let page = Arc::new(page.on_unmap(move || unmapped.store(true, Ordering::Relaxed)));
        assert_eq!((page.len(), page.seg(0, 4).unwrap().first()), (4096, Some([1, 2, 3, 4])));
        assert!(page.seg(4093, 4).is_none() && page.seg_mut(usize::MAX, 1).is_none());
        let area = Area::of(&page, 0, 4096).unwrap();
        assert!(Area::of(&page, 0, 4097).is_none() && Area::of(&page, 8, 16).is_none());
        drop(page);
        area.sync_store_u32(0, 7, Ordering::Release);
        assert_eq!(
            (whole.seg(4096, 1).unwrap().first(), gone.load(Ordering::Relaxed)),
            (Some([7]), false)
        );
        drop(area);
        assert!(gone.load(Ordering::Relaxed));
    }

    #[test]
    fn read_only_mapping_yields_nothing_writable() {
        let whole = Mapping::memfd("read", 4096).unwrap();
        let page = Arc::new(Mapping::exact(whole.fd().unwrap(), 0, 4096, Access::Read).unwrap());
        assert_eq!(page.seg(0, 4096).unwrap().read(&mut [1; 4096]), 4096);
        assert!(page.seg_mut(0, 1).is_none() && Area::of(&page, 0, 64).is_none());
        let region = Region { guest_addr: 0, user_addr: 0, len: 4096, offset: 0, mapping: page };
        assert_eq!(
            GuestMemory::new(vec![region]).unwrap_err(),
            crate::TableError::ReadOnly { guest_addr: 0 }
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs files in memory")]
    fn truncated_file_is_survived_and_reported() {
        let path = std::env::temp_dir().join(format!("pvswitch-shm-{}", std::process::id()));
        let options =
            std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = options.unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(65536).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, 65536).unwrap());
        let region =
            Region { guest_addr: 0, user_addr: 0, len: 65536, offset: 0, mapping: mapping.clone() };
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let area = Area::new(&memory, 32768, 64).unwrap();
        area.store_u32(0, 7);
        assert_eq!(area.load_u32(0), 7);
        assert!(!mapping.is_lost());
        file.set_len(0).unwrap();
        assert_eq!(area.load_u32(0), 0);
        assert!(mapping.is_lost() && memory.is_lost());
        area.store_u32(0, 9);
        assert_eq!(area.load_u32(0), 9);
    }
}
