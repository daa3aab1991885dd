//! Memory of this process that no peer can access.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::mapping::{Access, Mapping};
use crate::sys;

/// Zeroed memory without access by peers: for frames that must be parsed, or passed to a receiver
/// without access to a peer's memory. A host of grants may offer memory that it copies to and from
/// faster.
pub struct Private {
    at: NonNull<u8>,
    len: usize,
    /// The mapping it consists of; `None`: anonymous memory.
    mapping: Option<Mapping>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Private {}

impl Private {
    /// Allocates `len` bytes of anonymous memory, which use no pages before they are touched.
    ///
    /// # Errors
    /// Out of memory.
    pub fn plain(len: usize) -> io::Result<Self> {
        let at = if len == 0 { NonNull::dangling() } else { sys::anonymous(len)? };
        Ok(Self { at, len, mapping: None })
    }

    /// Makes it of all of `mapping`; `None` if it is not writable.
    ///
    /// # Safety
    /// While this lives, nothing else reads or writes that memory, through another mapping or as a
    /// device, except on this process's request.
    pub unsafe fn mapped(mapping: Mapping) -> Option<Self> {
        let at = mapping.at(0, mapping.len())?;
        let mapping = Some(mapping).filter(|mapping| mapping.access() == Access::Write)?;
        Some(Self { at, len: mapping.len(), mapping: Some(mapping) })
    }
}

impl Default for Private {
    /// Empty memory.
    fn default() -> Self {
        Self { at: NonNull::dangling(), len: 0, mapping: None }
    }
}

impl Deref for Private {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` readable bytes, initialised by the kernel, that live as long as `self`;
        // nothing else writes them, by the contract of `mapped`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Private {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if self.mapping.is_none() && self.len > 0 {
            sys::unmap_anonymous(self.at, self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Seg, SegMut};

    #[test]
    fn both_kinds_are_zeroed_memory_to_copy_to_and_from() {
        let mapping = Mapping::memfd("private", 8192).unwrap();
        // SAFETY: its descriptor was not shared.
        let mapped = unsafe { Private::mapped(mapping) }.unwrap();
        for mut memory in [Private::plain(8192).unwrap(), mapped] {
            assert!(memory.len() == 8192 && memory.iter().all(|byte| *byte == 0));
            assert_eq!(SegMut::of(&mut memory[4090..]).write(&[7; 10]), 10);
            let mut read = [0; 12];
            assert_eq!(Seg::of(&memory[4089..4101]).read(&mut read), 12);
            assert_eq!(read, [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
        }
        assert!(Private::default().is_empty() && Private::plain(0).unwrap().is_empty());
        assert!(Private::plain(usize::MAX / 2).is_err());
    }

    #[test]
    fn read_only_mapping_is_none() {
        let whole = Mapping::memfd("private-read", 4096).unwrap();
        let page = Mapping::exact(whole.fd().unwrap(), 0, 4096, Access::Read).unwrap();
        // SAFETY: only `whole` has its descriptor, and is not used.
        assert!(unsafe { Private::mapped(page) }.is_none());
    }
}
