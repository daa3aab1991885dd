//! Guest memory as a table of regions.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::copy::{Seg, SegMut};
use crate::mapping::{Access, Mapping};

/// One region of guest memory (vhost-user memory region description).
#[derive(Clone, Debug)]
pub struct Region {
    /// First guest physical address.
    pub guest_addr: u64,
    /// First address in the front-end's address space, which ring addresses use.
    pub user_addr: u64,
    /// Size in bytes.
    pub len: u64,
    /// Offset of the region in `mapping`, in bytes.
    pub offset: u64,
    /// The mapped memory.
    pub mapping: Arc<Mapping>,
}

/// Immutable memory table. A change of the guest's memory makes a new table; mappings of the old
/// one live until its last reference is dropped.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Sorted by guest address, without overlap.
    regions: Vec<Region>,
    /// The same for translations, with all that one needs in one cache line.
    spans: Vec<Span>,
}

/// A region, for translations. Its bytes are mapped as long as the table's regions live.
#[derive(Clone, Copy, Debug)]
struct Span {
    guest_addr: u64,
    len: u64,
    host: NonNull<u8>,
}

// SAFETY: a span is an address into a mapping that its table keeps alive and that every user
// treats as concurrently written.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

/// Reason to reject a set of regions.
#[derive(Debug, PartialEq, Eq)]
pub enum TableError {
    /// A region is empty, or one of its two address ranges wraps.
    BadRegion {
        /// First guest address of the region.
        guest_addr: u64,
        /// Its size, in bytes.
        len: u64,
    },
    /// A region exceeds its mapping.
    OutsideMapping {
        /// First guest address of the region.
        guest_addr: u64,
    },
    /// A region's mapping is read-only.
    ReadOnly {
        /// First guest address of the region.
        guest_addr: u64,
    },
    /// Two regions share guest addresses.
    Overlap {
        /// First guest address of the second one.
        guest_addr: u64,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadRegion { guest_addr, len } => {
                write!(f, "memory region at {guest_addr:#x}, {len:#x} bytes: empty or wraps")
            }
            Self::OutsideMapping { guest_addr } => {
                write!(f, "memory region at {guest_addr:#x} exceeds its mapping")
            }
            Self::ReadOnly { guest_addr } => {
                write!(f, "memory region at {guest_addr:#x} is not writable")
            }
            Self::Overlap { guest_addr } => {
                write!(f, "memory region at {guest_addr:#x} overlaps the one before it")
            }
        }
    }
}

impl std::error::Error for TableError {}

impl GuestMemory {
    /// Makes a table of `regions`, given in any order.
    ///
    /// # Errors
    /// [`TableError`] with the address of the rejected region.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, TableError> {
        regions.sort_by_key(|r| r.guest_addr);
        let mut end = 0;
        let mut spans = Vec::with_capacity(regions.len());
        for r in &regions {
            let bad = TableError::BadRegion { guest_addr: r.guest_addr, len: r.len };
            let ends = (r.guest_addr.checked_add(r.len), r.user_addr.checked_add(r.len));
            let (Some(next), Some(_), true) = (ends.0, ends.1, r.len > 0) else {
                return Err(bad);
            };
            let start = usize::try_from(r.offset).ok();
            let len = usize::try_from(r.len).ok();
            let host = start.zip(len).and_then(|(s, l)| r.mapping.at(s, l));
            let host = host.ok_or(TableError::OutsideMapping { guest_addr: r.guest_addr })?;
            if r.mapping.access() != Access::Write {
                return Err(TableError::ReadOnly { guest_addr: r.guest_addr });
            }
            spans.push(Span { guest_addr: r.guest_addr, len: r.len, host });
            if r.guest_addr < end {
                return Err(TableError::Overlap { guest_addr: r.guest_addr });
            }
            end = next;
        }
        Ok(Self { regions, spans })
    }

    /// The regions, sorted by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Whether the peer truncated the file of any region.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_lost())
    }

    /// Returns `len` readable bytes at guest address `addr`, if one region holds them. `hint` is
    /// the index of the last region used, and is updated; any value is valid.
    #[inline]
    pub fn seg(&self, addr: u64, len: u32, hint: &mut usize) -> Option<Seg<'_>> {
        // SAFETY: `host` found all `len` bytes inside a region of this table, which outlives '_.
        Some(unsafe { Seg::new(self.host(addr, len, hint)?, len) })
    }

    /// Returns `len` writable bytes at guest address `addr`, if one region holds them.
    #[inline]
    pub fn seg_mut(&self, addr: u64, len: u32, hint: &mut usize) -> Option<SegMut<'_>> {
        // SAFETY: as for `seg`; all memory of a guest is writable, and shared.
        Some(unsafe { SegMut::new(self.host(addr, len, hint)?, len) })
    }

    /// Host address of the `len` bytes at `addr`, if one region holds them.
    #[inline]
    fn host(&self, addr: u64, len: u32, hint: &mut usize) -> Option<NonNull<u8>> {
        let inside = |span: &Span| {
            let off = addr.wrapping_sub(span.guest_addr);
            (off < span.len && u64::from(len) <= span.len - off).then_some(off)
        };
        let (span, off) = match self.spans.get(*hint).and_then(|s| Some((s, inside(s)?))) {
            Some(found) => found,
            None => {
                *hint = self.index_of(addr)?;
                let span = &self.spans[*hint];
                (span, inside(span)?)
            }
        };
        // SAFETY: the offset is inside the span, whose length was checked against its mapping.
        Some(unsafe { span.host.add(off as usize) })
    }

    /// The region at or before `addr`.
    #[cold]
    fn index_of(&self, addr: u64) -> Option<usize> {
        self.spans.partition_point(|s| s.guest_addr <= addr).checked_sub(1)
    }

    /// Number of the `len` bytes from guest address `addr` that are in the region of `addr`; `None`
    /// if no region holds it. For walking a range that crosses regions.
    pub fn span(&self, addr: u64, len: u32) -> Option<u32> {
        let i = self.regions.partition_point(|r| r.guest_addr <= addr).checked_sub(1)?;
        let r = &self.regions[i];
        let left = r.len.checked_sub(addr - r.guest_addr).filter(|left| *left > 0)?;
        Some(u32::try_from(left).map_or(len, |left| left.min(len)))
    }

    /// Translates an address of the front-end's address space (ring addresses of SET_VRING_ADDR) to
    /// a guest address.
    pub fn user_to_guest(&self, user_addr: u64) -> Option<u64> {
        let inside = |r: &&Region| user_addr.checked_sub(r.user_addr).is_some_and(|o| o < r.len);
        let r = self.regions.iter().find(inside)?;
        Some(r.guest_addr + (user_addr - r.user_addr))
    }

    /// The mapping that holds `len` bytes at `addr`, and their offset in it.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<(&Arc<Mapping>, usize)> {
        let r = &self.regions[self.index_of(addr)?];
        let off = addr - r.guest_addr;
        (off < r.len && len <= r.len - off).then_some((&r.mapping, (r.offset + off) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(guest_addr: u64, user_addr: u64, len: u64) -> Region {
        let mapping = Arc::new(Mapping::memfd("t", len).unwrap());
        Region { guest_addr, user_addr, len, offset: 0, mapping }
    }

    #[test]
    fn addresses_at_the_edges_of_regions() {
        let m = GuestMemory::new(vec![
            region(0x8000, 0x100_0000, 0x1000),
            region(0, 0x200_0000, 0x1000),
        ]);
        let m = m.unwrap();
        let mut hint = 7;
        assert!(m.seg(0, 0x1000, &mut hint).is_some());
        assert!(m.seg(0xfff, 1, &mut hint).is_some());
        assert!(m.seg(0xfff, 2, &mut hint).is_none());
        assert!(m.seg(0x1000, 1, &mut hint).is_none());
        assert!(m.seg(0x8fff, 1, &mut hint).is_some());
        assert_eq!(hint, 1);
        assert!(m.seg(u64::MAX, 1, &mut hint).is_none());
        assert_eq!(m.user_to_guest(0x100_0010), Some(0x8010));
        assert_eq!(m.user_to_guest(0x200_1000), None);
    }

    #[test]
    fn range_that_crosses_adjacent_regions_is_walked() {
        let m =
            GuestMemory::new(vec![region(0, 0, 0x1000), region(0x1000, 0x9000, 0x1000)]).unwrap();
        assert!(m.seg(0xf00, 0x200, &mut 0).is_none());
        assert_eq!(m.span(0xf00, 0x200), Some(0x100));
        assert_eq!(m.span(0x1000, 0x100), Some(0x100));
        assert_eq!(m.span(0x2000, 1), None);
    }

    #[test]
    fn invalid_tables_are_refused() {
        let bad = |r| GuestMemory::new(r).unwrap_err();
        assert_eq!(
            bad(vec![region(0, 0, 0x2000), region(0x1000, 0, 0x1000)]),
            TableError::Overlap { guest_addr: 0x1000 }
        );
        let wraps = Region { guest_addr: u64::MAX - 5, ..region(0, 0, 0x1000) };
        assert!(matches!(bad(vec![wraps]), TableError::BadRegion { .. }));
        let long = Region { len: 0x10_0000, ..region(0, 0, 0x1000) };
        assert_eq!(bad(vec![long]), TableError::OutsideMapping { guest_addr: 0 });
    }

    #[test]
    fn five_hundred_and_nine_regions() {
        let all = (0..509).map(|i| region(i * 0x2000, i * 0x2000, 0x1000)).collect();
        let m = GuestMemory::new(all).unwrap();
        let mut hint = 0;
        for i in (0..509).rev() {
            assert!(m.seg(i * 0x2000 + 5, 100, &mut hint).is_some());
            assert!(m.seg(i * 0x2000 + 0x1000, 1, &mut hint).is_none());
        }
    }
}
