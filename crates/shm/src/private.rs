//! Memory that is ours alone.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

use crate::mapping::{Access, Mapping};

/// Zeroed memory that no peer sees: where frames go that must be looked at, or be handed on to
/// who cannot reach a peer's memory. A [host](crate::Grants::private) may have some that it copies
/// to and from faster.
pub struct Private(Kind);

enum Kind {
    Plain(Vec<u8>),
    Mapped(Mapping),
}

impl Private {
    /// `len` bytes of the process's own.
    pub fn plain(len: usize) -> Self {
        Self(Kind::Plain(vec![0; len]))
    }

    /// All of `mapping`; `None` if it may not be written.
    ///
    /// # Safety
    /// While this lives nobody else reads or writes that memory, through another mapping or as a
    /// device, but at this process's word.
    pub unsafe fn mapped(mapping: Mapping) -> Option<Self> {
        (mapping.access() == Access::Write).then_some(Self(Kind::Mapped(mapping)))
    }
}

impl Default for Private {
    fn default() -> Self {
        Self::plain(0)
    }
}

impl Deref for Private {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Kind::Plain(bytes) => bytes,
            Kind::Mapped(mapping) => {
                let at = mapping.start();
                // SAFETY: all of a live mapping, initialised by the kernel; nobody else writes it,
                // as whoever made this promised.
                unsafe { std::slice::from_raw_parts(at.as_ptr(), mapping.len()) }
            }
        }
    }
}

impl DerefMut for Private {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kind::Plain(bytes) => bytes,
            Kind::Mapped(mapping) => {
                let at = mapping.start();
                // SAFETY: as above; it is writable, which was looked at when this was made, and
                // `&mut self` makes it the only view.
                unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), mapping.len()) }
            }
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
        // SAFETY: nobody has its descriptor.
        let mapped = unsafe { Private::mapped(mapping) }.unwrap();
        for mut memory in [Private::plain(8192), mapped] {
            assert!(memory.len() == 8192 && memory.iter().all(|byte| *byte == 0));
            assert_eq!(SegMut::of(&mut memory[4090..]).write(&[7; 10]), 10);
            let mut read = [0; 12];
            assert_eq!(Seg::of(&memory[4089..4101]).read(&mut read), 12);
            assert_eq!(read, [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
        }
        assert!(Private::default().is_empty());
    }

    #[test]
    fn what_may_only_be_read_is_none() {
        let whole = Mapping::memfd("private-read", 4096).unwrap();
        let page = Mapping::exact(whole.fd().unwrap(), 0, 4096, Access::Read).unwrap();
        // SAFETY: nobody has its descriptor but `whole`, which is not used.
        assert!(unsafe { Private::mapped(page) }.is_none());
    }
}
