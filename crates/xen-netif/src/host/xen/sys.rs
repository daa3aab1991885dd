//! Ioctls of Xen's device nodes: the only `unsafe` code of this crate.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shm::sync::RwLock;
use shm::{Access, Failed, GRANT_LEN, MapError, Mapping, Piece, Private, Side};

use self::ioctl::{CopyPtr, CopySegment, Foreign};

/// Calls an ioctl with one argument structure.
///
/// `number` is one of [`ioctl`]'s whose argument has the layout of `T` (or `T` is the head of a
/// longer array at `argument`), and pointers inside it are valid for the operation.
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

/// Consumes the events of an evtchn descriptor and unmasks its only port. Returns whether there
/// were any.
pub fn evtchn_ack(evtchn: BorrowedFd<'_>, port: u32) -> bool {
    let mut ports = [0_u8; 64];
    match rustix::io::read(evtchn, &mut ports) {
        Ok(0) => return false,
        Ok(_) => {}
        // Overflow of its ring: no events are delivered until it is reset.
        Err(Errno::FBIG) => drop(ioctl::reset(evtchn)),
        Err(_) => return false,
    }
    evtchn_unmask(evtchn, port);
    true
}

/// Unmasks a port, so that the next event is delivered.
pub fn evtchn_unmask(evtchn: BorrowedFd<'_>, port: u32) {
    let _ = rustix::io::write(evtchn, &port.to_ne_bytes());
}

/// Maximum number of copies per call.
const COPIES: usize = 64;

/// Grants of pages mapped here, by address.
///
/// The hypervisor copies by address only to and from the caller's own memory. Pages granted by
/// others are not, although mapped: between such a page and another grant, both are passed as
/// grants. Our own granted pages are passed as grants, too, because an address needs a page-table
/// walk.
#[derive(Debug, Default)]
pub struct MappedGrants {
    /// Address and pages, ordered by address.
    ranges: Vec<(usize, Granted)>,
}

/// Contiguous pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The granting domain.
    pub domid: u16,
    /// The grant reference of each page.
    pub grefs: Box<[u32]>,
}

impl MappedGrants {
    /// Registers pages mapped at `at`.
    pub fn insert(&mut self, at: usize, granted: Granted) {
        let i = self.ranges.partition_point(|(first, _)| *first < at);
        self.ranges.insert(i, (at, granted));
    }

    /// Removes pages that are about to be unmapped.
    pub fn remove(&mut self, at: usize) {
        if let Ok(i) = self.ranges.binary_search_by_key(&at, |(first, _)| *first) {
            self.ranges.remove(i);
        }
    }

    /// The grant of `len` bytes at `at`, and their offset in its page; `None` if there is none, or
    /// if they span two pages. `last` caches the index of the last range found, which is usually
    /// the next one, too.
    #[inline]
    fn find(&self, at: usize, len: u16, last: &mut usize) -> Option<Foreign> {
        // For an address below the range, the wrapped difference is beyond its last page.
        let in_range = |(first, granted): &(usize, Granted)| {
            let page = at.wrapping_sub(*first) / GRANT_LEN as usize;
            granted.grefs.get(page).map(|gref| (*gref, granted.domid))
        };
        let found = self.ranges.get(*last).and_then(in_range).or_else(|| {
            *last = self.ranges.partition_point(|(first, _)| *first <= at).checked_sub(1)?;
            in_range(&self.ranges[*last])
        });
        let (gref, domid) = found?;
        let offset = (at % GRANT_LEN as usize) as u16;
        let is_inside = u32::from(offset) + u32::from(len) <= GRANT_LEN;
        is_inside.then_some(Foreign { gref, offset, domid })
    }
}

fn change(mapped: &RwLock<MappedGrants>, change: impl FnOnce(&mut MappedGrants)) {
    change(&mut mapped.write());
}

/// Registers `mapping`'s grants as long as it is mapped.
pub fn register(mapping: Mapping, mapped: &Arc<RwLock<MappedGrants>>, granted: Granted) -> Mapping {
    let at = mapping.seg(0, GRANT_LEN).map_or(0, |page| page.as_iovec().iov_base.addr());
    change(mapped, |mapped| mapped.insert(at, granted));
    let mapped = Arc::clone(mapped);
    mapping.before_unmap(move || change(&mapped, |mapped| mapped.remove(at)))
}

/// Allocates pages granted to `domid`. Returns the mapping and the grants, which end with it.
pub fn fresh_pages(
    gntalloc: &Arc<OwnedFd>,
    domid: u16,
    flags: u16,
    pages: u32,
) -> Result<(Mapping, Vec<u32>), GrantError> {
    let (index, grefs) =
        ioctl::alloc_gref(gntalloc.as_fd(), domid, flags, pages).map_err(|_| GrantError::Full)?;
    let fd = Arc::clone(gntalloc);
    let release = move || {
        // The kernel keeps pages that another domain still maps (XSA-396).
        let _ = ioctl::dealloc_gref(fd.as_fd(), index, pages);
    };
    let len = u64::from(pages) * u64::from(GRANT_LEN);
    match Mapping::exact(gntalloc.as_fd(), index, len, Access::Write) {
        Ok(mapping) => Ok((mapping.on_unmap(release), grefs)),
        Err(error) => {
            release();
            Err(GrantError::Map(error))
        }
    }
}

/// Allocates private memory: `pages` pages granted to this domain, `domid`, and registered as such;
/// `None`: out of grants.
pub fn own_pages(
    gntalloc: &Arc<OwnedFd>,
    domid: u16,
    pages: u32,
    mapped: &Arc<RwLock<MappedGrants>>,
) -> Option<Private> {
    let flags = ioctl::GNTALLOC_FLAG_WRITABLE;
    let (mapping, grefs) = fresh_pages(gntalloc, domid, flags, pages).ok()?;
    let mapping = register(mapping, mapped, Granted { domid, grefs: grefs.into() });
    // SAFETY: fresh pages, mapped here only and granted to this domain only, where only this
    // process knows their references: it copies to them where its copies say so.
    unsafe { Private::mapped(mapping) }
}

/// Error of allocating pages.
pub enum GrantError {
    /// The limit of gntalloc or of the domain is reached.
    Full,
    Map(MapError),
}

/// Has the hypervisor do the copies in `pieces`, and sets each one's result.
pub fn grant_copy(gntdev: BorrowedFd<'_>, mapped: &MappedGrants, pieces: &mut [Piece<'_>]) {
    let mut last = 0;
    for pieces in pieces.chunks_mut(COPIES) {
        let mut segments = [EMPTY; COPIES];
        for (segment, piece) in segments.iter_mut().zip(pieces.iter_mut()) {
            *segment = segment_of(piece, mapped, &mut last);
        }
        let segments = &mut segments[..pieces.len()];
        // SAFETY: `segment_of` took the addresses from segments that live as long as the pieces.
        if unsafe { ioctl::grant_copy(gntdev, segments) }.is_err() {
            // One of them is invalid for the call, and later ones were not done: retry each alone.
            for segment in &mut *segments {
                segment.status = ioctl::GNTST_GENERAL_ERROR;
                let one = std::slice::from_mut(segment);
                // SAFETY: as above.
                if unsafe { ioctl::grant_copy(gntdev, one) }.is_err() {
                    one[0].status = ioctl::GNTST_GENERAL_ERROR;
                }
            }
        }
        for (segment, piece) in segments.iter().zip(pieces) {
            piece.set(verdict(gntdev, segment));
        }
    }
}

const EMPTY: CopySegment = CopySegment {
    source: CopyPtr { virt: std::ptr::null_mut() },
    dest: CopyPtr { virt: std::ptr::null_mut() },
    len: 0,
    flags: 0,
    status: ioctl::GNTST_GENERAL_ERROR,
};

#[inline]
fn segment_of(piece: &mut Piece<'_>, mapped: &MappedGrants, last: &mut usize) -> CopySegment {
    // A piece does not cross a guest's page.
    let len = u16::try_from(piece.len()).unwrap_or(0);
    let mut memory = |at: *mut libc::c_void| match mapped.find(at.addr(), len, last) {
        Some(foreign) => Err(foreign),
        None => Ok(at),
    };
    let end = |at, gref| match at {
        Ok(virt) => (CopyPtr { virt }, 0),
        Err(foreign) => (CopyPtr { foreign }, gref),
    };
    let source = match piece.src() {
        Side::Mapped(seg) => memory(seg.as_iovec().iov_base),
        Side::Granted { domain, gref, offset } => Err(Foreign { gref, offset, domid: domain.id() }),
    };
    let dest = match piece.dst() {
        Side::Mapped(seg) => memory(seg.as_iovec().iov_base),
        Side::Granted { domain, gref, offset } => Err(Foreign { gref, offset, domid: domain.id() }),
    };
    let (source, from) = end(source, ioctl::GNTCOPY_SOURCE_GREF);
    let (dest, to) = end(dest, ioctl::GNTCOPY_DEST_GREF);
    CopySegment { source, dest, len, flags: from | to, ..EMPTY }
}

/// The result of a copy. If both sides are grants, the status does not tell which one was bad: one
/// byte is read from the source to find out.
fn verdict(gntdev: BorrowedFd<'_>, segment: &CopySegment) -> Result<(), Failed> {
    if segment.status == ioctl::GNTST_OKAY {
        return Ok(());
    }
    match segment.flags {
        ioctl::GNTCOPY_SOURCE_GREF => return Err(Failed::Source),
        ioctl::GNTCOPY_DEST_GREF => return Err(Failed::Destination),
        _ => {}
    }
    let mut byte = 0_u8;
    let mut probe = CopySegment {
        dest: CopyPtr { virt: (&raw mut byte).cast() },
        len: 1,
        flags: ioctl::GNTCOPY_SOURCE_GREF,
        status: ioctl::GNTST_GENERAL_ERROR,
        ..*segment
    };
    // SAFETY: the one address is that of a byte of ours.
    let done = unsafe { ioctl::grant_copy(gntdev, std::slice::from_mut(&mut probe)) };
    let readable = done.is_ok() && probe.status == ioctl::GNTST_OKAY;
    Err(if readable { Failed::Destination } else { Failed::Source })
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
        /// Number of references.
        pub count: u32,
        /// Unused.
        pub pad: u32,
        /// Offset for mmap, in bytes.
        pub index: u64,
        /// The granting domain.
        pub domid: u32,
        /// The grant reference.
        pub gref: u32,
    }

    /// `struct ioctl_gntdev_unmap_grant_ref`, and `struct ioctl_gntalloc_dealloc_gref`.
    #[repr(C)]
    #[derive(Debug, Default)]
    pub struct Release {
        /// Offset returned by the first call.
        pub index: u64,
        /// Number of pages.
        pub count: u32,
        /// Unused.
        pub pad: u32,
    }

    /// One side of a copy: a local address, or an offset in a grant.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub union CopyPtr {
        /// An offset in a grant.
        pub virt: *mut libc::c_void,
        /// A place in a grant.
        pub foreign: Foreign,
    }

    /// An offset in a grant.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Foreign {
        /// The grant reference.
        pub gref: u32,
        /// Offset in its page, in bytes.
        pub offset: u16,
        /// The granting domain.
        pub domid: u16,
    }

    /// `struct ioctl_gntdev_grant_copy_segment`
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct CopySegment {
        /// Source.
        pub source: CopyPtr,
        /// Destination.
        pub dest: CopyPtr,
        /// Number of bytes.
        pub len: u16,
        /// [`GNTCOPY_SOURCE_GREF`], [`GNTCOPY_DEST_GREF`].
        pub flags: u16,
        /// Result, `GNTST_*`.
        pub status: i16,
    }

    /// The source is a grant.
    pub const GNTCOPY_SOURCE_GREF: u16 = 1;
    /// The destination is a grant.
    pub const GNTCOPY_DEST_GREF: u16 = 2;
    /// `GNTST_okay`
    pub const GNTST_OKAY: i16 = 0;
    /// `GNTST_general_error`: the initial status of a segment.
    pub const GNTST_GENERAL_ERROR: i16 = -1;

    /// `struct ioctl_gntdev_grant_copy`
    #[repr(C)]
    pub struct GrantCopy {
        /// Number of segments.
        pub count: u32,
        /// Their address.
        pub segments: *mut CopySegment,
    }

    /// `struct ioctl_gntalloc_alloc_gref` without its references, which follow.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default)]
    pub struct AllocGref {
        /// The domain that may map them.
        pub domid: u16,
        /// [`GNTALLOC_FLAG_WRITABLE`].
        pub flags: u16,
        /// Number of pages.
        pub count: u32,
        /// Offset for mmap, in bytes.
        pub index: u64,
    }

    /// The grants are writable.
    pub const GNTALLOC_FLAG_WRITABLE: u16 = 1;

    /// `struct ioctl_evtchn_bind_interdomain`
    #[repr(C)]
    #[derive(Debug)]
    pub struct BindInterdomain {
        /// The remote domain.
        pub remote_domain: u32,
        /// Its port.
        pub remote_port: u32,
    }

    /// Allocates a range of gntdev to map one grant.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn map_grant_ref(gntdev: BorrowedFd<'_>, domid: u16, gref: u32) -> io::Result<u64> {
        let mut map = MapGrantRef { count: 1, domid: domid.into(), gref, ..Default::default() };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntdev, GNTDEV_MAP_GRANT_REF, &raw mut map) }?;
        Ok(map.index)
    }

    /// Releases a range, after its munmap.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn unmap_grant_ref(gntdev: BorrowedFd<'_>, index: u64) -> io::Result<()> {
        let mut unmap = Release { index, count: 1, pad: 0 };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntdev, GNTDEV_UNMAP_GRANT_REF, &raw mut unmap) }.map(drop)
    }

    /// Copies between grants and memory; each segment has a status.
    ///
    /// # Errors
    /// The call failed: some segments may have been copied.
    ///
    /// # Safety
    /// An address in a segment is readable or writable for `len` bytes, according to its side.
    pub unsafe fn grant_copy(
        gntdev: BorrowedFd<'_>,
        segments: &mut [CopySegment],
    ) -> io::Result<()> {
        let count = u32::try_from(segments.len()).unwrap_or(u32::MAX);
        let mut copy = GrantCopy { count, segments: segments.as_mut_ptr() };
        // SAFETY: the argument is that of the number; it points to `count` segments, whose
        // addresses the caller guarantees.
        unsafe { call(gntdev, GNTDEV_GRANT_COPY, &raw mut copy) }.map(drop)
    }

    /// Grants `count` new pages. Returns the offset for mmap and the references.
    ///
    /// # Errors
    /// Any error of the device.
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
    /// Any error of the device.
    pub fn dealloc_gref(gntalloc: BorrowedFd<'_>, index: u64, count: u32) -> io::Result<()> {
        let mut release = Release { index, count, pad: 0 };
        // SAFETY: the argument is that of the number.
        unsafe { call(gntalloc, GNTALLOC_DEALLOC_GREF, &raw mut release) }.map(drop)
    }

    /// Binds a port of another domain. Returns the local port.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn bind_interdomain(evtchn: BorrowedFd<'_>, domid: u16, port: u32) -> io::Result<u32> {
        let mut bind = BindInterdomain { remote_domain: domid.into(), remote_port: port };
        // SAFETY: the argument is that of the number.
        unsafe { call(evtchn, EVTCHN_BIND_INTERDOMAIN, &raw mut bind) }
    }

    /// Allocates a port that domain `domid` may bind.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn bind_unbound_port(evtchn: BorrowedFd<'_>, domid: u16) -> io::Result<u32> {
        let mut domid = u32::from(domid);
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_BIND_UNBOUND_PORT, &raw mut domid) }
    }

    /// Releases a port.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn unbind(evtchn: BorrowedFd<'_>, port: u32) -> io::Result<()> {
        let mut port = port;
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_UNBIND, &raw mut port) }.map(drop)
    }

    /// Sends an event.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn notify(evtchn: BorrowedFd<'_>, port: u32) -> io::Result<()> {
        let mut port = port;
        // SAFETY: the argument is that of the number: one word.
        unsafe { call(evtchn, EVTCHN_NOTIFY, &raw mut port) }.map(drop)
    }

    /// Clears the overflow of an event ring.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn reset(evtchn: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: the number takes no argument.
        unsafe { call::<u8>(evtchn, EVTCHN_RESET, std::ptr::null_mut()) }.map(drop)
    }
}

#[cfg(test)]
mod tests;
