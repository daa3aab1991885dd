//! Word-wise access to one part of a ring in shared memory.
//!
//! Two kinds of access. *Sync words* (indices, descriptor flags, event words) order the two sides
//! and take an explicit `Ordering`. *Data* (addresses, lengths, ids) is read and written relaxed
//! and is ordered by a sync word next to it. Under `cfg(loom)` only sync words have histories,
//! which keeps the model small enough to exhaust; for data the model checks only that the two sides
//! never access it concurrently.

use std::sync::Arc;

#[cfg(loom)]
pub use modelled::Area;
#[cfg(not(loom))]
pub use plain::Area;

use crate::memory::GuestMemory;

#[cfg(not(loom))]
mod plain {
    #![allow(unsafe_code)]
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

    use super::{Arc, GuestMemory};
    use crate::mapping::{Access, Mapping};

    /// `len` bytes of shared memory, aligned to 16, that stay mapped as long as this value lives.
    /// All offsets are in bytes and must be aligned to the access; an invalid one is our bug and
    /// panics (offsets come from validated ring geometry, never from the peer). Clones are views of
    /// the same memory.
    #[derive(Clone)]
    pub struct Area {
        at: NonNull<u8>,
        len: usize,
        _mapping: Arc<Mapping>,
    }

    // SAFETY: only atomic accesses are made through the pointer, and the mapping outlives it.
    unsafe impl Send for Area {}
    // SAFETY: as above.
    unsafe impl Sync for Area {}

    /// A packed descriptor: address, length, id, and flags, which are a sync word.
    #[repr(C)]
    struct Unflagged(AtomicU64, AtomicU32, AtomicU16, AtomicU16);

    /// Consecutive packed descriptors; their bounds are checked once for all.
    pub struct Descs<'a>(&'a [Unflagged]);

    impl Descs<'_> {
        /// Loads the sync word of the `i`th descriptor.
        #[inline]
        pub fn sync_load(&self, i: usize, order: Ordering) -> u16 {
            let Unflagged(.., flags) = &self.0[i];
            #[cfg(feature = "audit")]
            crate::audit::load(flags.as_ptr().addr(), size_of::<u16>());
            u16::from_le(flags.load(order))
        }

        /// Loads (relaxed) the first 14 bytes of the `i`th descriptor: all but its flags.
        #[inline]
        pub fn load_unflagged(&self, i: usize) -> (u64, u32, u16) {
            let Unflagged(addr, len, id, _) = &self.0[i];
            #[cfg(feature = "audit")]
            crate::audit::load(addr.as_ptr().addr(), 14);
            let addr = u64::from_le(addr.load(Ordering::Relaxed));
            let len = u32::from_le(len.load(Ordering::Relaxed));
            (addr, len, u16::from_le(id.load(Ordering::Relaxed)))
        }

        /// Loads (relaxed) address and length of each of the first `n` descriptors.
        #[inline]
        pub fn bufs(&self, n: usize) -> impl Iterator<Item = (u64, u32)> {
            self.0[..n].iter().map(|Unflagged(addr, len, ..)| {
                #[cfg(feature = "audit")]
                crate::audit::load(addr.as_ptr().addr(), 12);
                let addr = u64::from_le(addr.load(Ordering::Relaxed));
                (addr, u32::from_le(len.load(Ordering::Relaxed)))
            })
        }

        /// Loads (relaxed) the id of each of the first `n` descriptors.
        #[inline]
        pub fn ids(&self, n: usize) -> impl Iterator<Item = u16> {
            self.0[..n].iter().map(|Unflagged(.., id, _)| {
                #[cfg(feature = "audit")]
                crate::audit::load(id.as_ptr().addr(), size_of::<u16>());
                u16::from_le(id.load(Ordering::Relaxed))
            })
        }
    }

    macro_rules! words {
        ($load:ident, $store:ident, $int:ty, $atomic:ty) => {
            /// Loads (relaxed) a little-endian data word.
            #[inline]
            pub fn $load(&self, offset: usize) -> $int {
                let at = self.word::<$int>(offset).cast::<$atomic>();
                #[cfg(feature = "audit")]
                crate::audit::load(at.addr().get(), size_of::<$int>());
                // SAFETY: `word` checked bounds and alignment; the mapping lives; the peer's writes
                // come from outside this program, and atomics model them best. JUSTIFICATION:
                // shared memory has no safe view; bench `ring`.
                <$int>::from_le(unsafe { at.as_ref() }.load(Ordering::Relaxed))
            }

            /// Stores (relaxed) a little-endian data word.
            #[inline]
            pub fn $store(&self, offset: usize, value: $int) {
                let at = self.word::<$int>(offset).cast::<$atomic>();
                // SAFETY: as for the load.
                unsafe { at.as_ref() }.store(value.to_le(), Ordering::Relaxed);
            }
        };
    }

    macro_rules! sync_words {
        ($load:ident, $store:ident, $int:ty, $atomic:ty) => {
            /// Loads a sync word.
            #[inline]
            pub fn $load(&self, offset: usize, order: Ordering) -> $int {
                let at = self.word::<$int>(offset).cast::<$atomic>();
                #[cfg(feature = "audit")]
                crate::audit::load(at.addr().get(), size_of::<$int>());
                // SAFETY: as for data words.
                <$int>::from_le(unsafe { at.as_ref() }.load(order))
            }

            /// Stores a sync word.
            #[inline]
            pub fn $store(&self, offset: usize, value: $int, order: Ordering) {
                let at = self.word::<$int>(offset).cast::<$atomic>();
                // SAFETY: as for data words.
                unsafe { at.as_ref() }.store(value.to_le(), order);
            }
        };
    }

    impl Area {
        /// Returns the `len` bytes at guest address `addr`, if one region holds them. The ring must
        /// check the alignment of `addr`; the memory has the same alignment, up to 16 bytes (with a
        /// misaligned region in its mapping, words would tear).
        pub fn new(memory: &GuestMemory, addr: u64, len: usize) -> Option<Self> {
            let (mapping, offset) = memory.find(addr, len as u64)?;
            let at = mapping.at(offset, len)?;
            if at.addr().get() % 16 != (addr % 16) as usize {
                return None;
            }
            Some(Self { at, len, _mapping: Arc::clone(mapping) })
        }

        /// Returns the `len` bytes at `offset` of a mapping, if it holds them, is writable, and
        /// they are aligned to 16.
        pub fn of(mapping: &Arc<Mapping>, offset: usize, len: usize) -> Option<Self> {
            let at = mapping.at(offset, len).filter(|_| mapping.access() == Access::Write)?;
            (at.addr().get() % 16 == 0).then(|| Self { at, len, _mapping: Arc::clone(mapping) })
        }

        /// Length in bytes.
        #[inline]
        pub fn len(&self) -> usize {
            self.len
        }

        /// Whether the length is 0.
        pub fn is_empty(&self) -> bool {
            self.len == 0
        }

        #[inline]
        fn word<T>(&self, offset: usize) -> NonNull<T> {
            let size = size_of::<T>();
            // One comparison: the last offset is the same for all words of an area.
            let last = self.len.checked_sub(size);
            assert!(last.is_some_and(|last| offset <= last), "offset {offset} of {}", self.len);
            // SAFETY: the offset lies inside the mapping, checked above.
            let at = unsafe { self.at.add(offset) };
            debug_assert!(at.addr().get() % align_of::<T>() == 0);
            at.cast()
        }

        words!(load_u16, store_u16, u16, AtomicU16);
        words!(load_u32, store_u32, u32, AtomicU32);
        words!(load_u64, store_u64, u64, AtomicU64);

        /// Loads (relaxed) consecutive little-endian data words, each fetched once.
        #[inline]
        pub fn load_u16s(&self, offset: usize, out: &mut [u16]) {
            let len = size_of_val(out);
            assert!(
                offset <= self.len && len <= self.len - offset,
                "{len} at {offset} of {}",
                self.len
            );
            let at = self.word::<[AtomicU16; 0]>(offset).cast::<AtomicU16>();
            // SAFETY: they lie inside the mapping, checked above, which outlives the borrow of
            // `self`; all are atomics, as for data words.
            // JUSTIFICATION: one check of bounds for a burst; bench `forward`.
            let words = unsafe { NonNull::slice_from_raw_parts(at, out.len()).as_ref() };
            for (word, out) in words.iter().zip(out) {
                #[cfg(feature = "audit")]
                crate::audit::load(word.as_ptr().addr(), size_of::<u16>());
                *out = u16::from_le(word.load(Ordering::Relaxed));
            }
        }

        /// Stores (relaxed) two consecutive little-endian data words.
        #[inline]
        pub fn store_u32s(&self, offset: usize, words: [u32; 2]) {
            let at = self.word::<[AtomicU32; 2]>(offset);
            // SAFETY: as for data words.
            let to = unsafe { at.as_ref() };
            to[0].store(words[0].to_le(), Ordering::Relaxed);
            to[1].store(words[1].to_le(), Ordering::Relaxed);
        }

        /// Loads (relaxed) 16 bytes as two little-endian words, each fetched once.
        #[inline]
        pub fn load_pair(&self, offset: usize) -> (u64, u64) {
            let at = self.word::<[AtomicU64; 2]>(offset);
            #[cfg(feature = "audit")]
            crate::audit::load(at.addr().get(), 16);
            // SAFETY: as for data words.
            let [first, second] = unsafe { at.as_ref() };
            let first = u64::from_le(first.load(Ordering::Relaxed));
            (first, u64::from_le(second.load(Ordering::Relaxed)))
        }

        /// Returns `n` packed descriptors from `offset` on.
        #[inline]
        pub fn descs(&self, offset: usize, n: usize) -> Descs<'_> {
            assert!(
                offset <= self.len && n <= (self.len - offset) / size_of::<Unflagged>(),
                "offset {offset} of {}",
                self.len
            );
            let at = self.word::<[Unflagged; 0]>(offset).cast::<Unflagged>();
            // SAFETY: they lie inside the mapping, checked above, which outlives the borrow of
            // `self`; all are atomics, as for data words.
            // JUSTIFICATION: one check of bounds for a burst; bench `forward`.
            Descs(unsafe { NonNull::slice_from_raw_parts(at, n).as_ref() })
        }

        /// Stores the last 8 bytes of a packed descriptor in one access: two data words and the
        /// sync word after them.
        #[inline]
        pub fn sync_store_tail(&self, offset: usize, len: u32, id: u16, flags: u16, o: Ordering) {
            let at = self.word::<u64>(offset).cast::<AtomicU64>();
            let word = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
            // SAFETY: as for data words.
            unsafe { at.as_ref() }.store(word.to_le(), o);
        }

        /// Loads (relaxed) a word of a dirty log.
        #[inline]
        pub fn load_log(&self, offset: usize) -> u64 {
            self.load_u64(offset)
        }

        /// Sets bits of a little-endian word; returns its bits before.
        #[inline]
        pub fn sync_or_u64(&self, offset: usize, bits: u64, order: Ordering) -> u64 {
            let at = self.word::<u64>(offset).cast::<AtomicU64>();
            // SAFETY: as for data words.
            u64::from_le(unsafe { at.as_ref() }.fetch_or(bits.to_le(), order))
        }

        sync_words!(sync_load, sync_store, u16, AtomicU16);
        sync_words!(sync_load_u32, sync_store_u32, u32, AtomicU32);
        sync_words!(sync_load_u8, sync_store_u8, u8, AtomicU8);

        /// Prefetches the cache line at `offset` for writing; out of range is ignored.
        #[inline]
        pub fn prefetch_write(&self, offset: usize) {
            if offset < self.len {
                crate::copy::prefetch_write(self.at.as_ptr().wrapping_add(offset));
            }
        }

        /// Prefetches the cache line at `offset`; out of range is ignored.
        #[inline]
        pub fn prefetch(&self, offset: usize) {
            if offset < self.len {
                crate::copy::prefetch(self.at.as_ptr().wrapping_add(offset));
            }
        }
    }
}

#[cfg(loom)]
mod modelled {
    #![allow(unsafe_code)]
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

    use super::{Arc, GuestMemory};
    use crate::mapping::Mapping;

    /// Memory of a loom model, with the methods of the `Area` of guest memory. Sync words are
    /// loom's atomics. Data has one value at a time, but each access is reported to the model,
    /// which fails when two sides access a word without order by a sync word. Clones are views of
    /// the same memory, one for each side.
    #[derive(Clone)]
    pub struct Area {
        bank: Arc<Bank>,
        _mapping: Option<Arc<Mapping>>,
    }

    /// Areas in place of memory, by file and offset.
    static PLACED: Mutex<BTreeMap<(u64, usize), Arc<Bank>>> = Mutex::new(BTreeMap::new());

    struct Bank {
        sync: BTreeMap<usize, AtomicU16>,
        sync_u32: BTreeMap<usize, AtomicU32>,
        sync_u8: BTreeMap<usize, AtomicU8>,
        /// The words of a dirty log, which is nothing else.
        log: Vec<AtomicU64>,
        data: Mutex<Vec<u8>>,
        /// One for each two bytes of data; empty, for loom's access checks only.
        races: Vec<UnsafeCell<()>>,
    }

    // SAFETY: the cells hold no data; the model checks who enters them.
    unsafe impl Send for Bank {}
    // SAFETY: as above.
    unsafe impl Sync for Bank {}

    macro_rules! words {
        ($load:ident, $store:ident, $int:ty) => {
            /// Loads a little-endian data word.
            pub fn $load(&self, offset: usize) -> $int {
                <$int>::from_le_bytes(self.get(offset))
            }

            /// Stores a little-endian data word.
            pub fn $store(&self, offset: usize, value: $int) {
                self.set(offset, &value.to_le_bytes());
            }
        };
    }

    macro_rules! sync_words {
        ($load:ident, $store:ident, $words:ident, $int:ty) => {
            /// Loads a sync word.
            pub fn $load(&self, offset: usize, order: Ordering) -> $int {
                self.bank.$words[&offset].load(order)
            }

            /// Stores a sync word.
            pub fn $store(&self, offset: usize, value: $int, order: Ordering) {
                let end = offset + size_of::<$int>();
                self.bank.data.lock().unwrap()[offset..end].copy_from_slice(&value.to_le_bytes());
                self.bank.$words[&offset].store(value, order);
            }
        };
    }

    /// Consecutive packed descriptors of a model; bounds are not checked.
    pub struct Descs<'a>(&'a Area, usize);

    impl Descs<'_> {
        /// Loads the sync word of the `i`th descriptor.
        pub fn sync_load(&self, i: usize, order: Ordering) -> u16 {
            self.0.sync_load(self.1 + 16 * i + 14, order)
        }

        /// Loads the first 14 bytes of the `i`th descriptor: all but its flags.
        pub fn load_unflagged(&self, i: usize) -> (u64, u32, u16) {
            let at = self.1 + 16 * i;
            (self.0.load_u64(at), self.0.load_u32(at + 8), self.0.load_u16(at + 12))
        }

        /// Loads address and length of each of the first `n` descriptors.
        pub fn bufs(&self, n: usize) -> impl Iterator<Item = (u64, u32)> {
            let at = |i: usize| self.1 + 16 * i;
            (0..n).map(move |i| (self.0.load_u64(at(i)), self.0.load_u32(at(i) + 8)))
        }

        /// Loads the id of each of the first `n` descriptors.
        pub fn ids(&self, n: usize) -> impl Iterator<Item = u16> {
            (0..n).map(|i| self.0.load_u16(self.1 + 16 * i + 12))
        }
    }

    impl Area {
        /// The area that was [placed](Self::place) at guest address `addr`, which stays mapped as
        /// long as this value lives.
        pub fn new(memory: &GuestMemory, addr: u64, len: usize) -> Option<Self> {
            let (mapping, offset) = memory.find(addr, len as u64)?;
            let placed = PLACED.lock().unwrap();
            let bank = placed.get(&(mapping.file(), offset))?;
            Some(Self { bank: Arc::clone(bank), _mapping: Some(Arc::clone(mapping)) })
        }

        /// Returns `None`; use [`Area::modelled`].
        pub fn of(_: &Arc<Mapping>, _: usize, _: usize) -> Option<Self> {
            None
        }

        /// Puts this area in place of the memory at `offset` of the file of a mapping, in all
        /// mappings of it.
        pub fn place(&self, mapping: &Mapping, offset: usize) {
            PLACED.lock().unwrap().insert((mapping.file(), offset), Arc::clone(&self.bank));
        }

        fn unmapped(bank: Bank) -> Self {
            Self { bank: Arc::new(bank), _mapping: None }
        }

        /// An area of `len` zeroed bytes whose sync words, of 16 bits, are at the offsets `sync`.
        pub fn modelled(len: usize, sync: &[usize]) -> Self {
            Self::modelled_words(len, sync, &[], &[])
        }

        /// An area of `len` zeroed bytes with sync words of 16, of 32 and of 8 bits. Two of them
        /// may not lie in the same two bytes.
        pub fn modelled_words(len: usize, u16s: &[usize], u32s: &[usize], u8s: &[usize]) -> Self {
            let sync = u16s.iter().map(|o| (*o, AtomicU16::new(0))).collect();
            let sync_u32 = u32s.iter().map(|o| (*o, AtomicU32::new(0))).collect();
            let sync_u8 = u8s.iter().map(|o| (*o, AtomicU8::new(0))).collect();
            let races = (0..len.div_ceil(2)).map(|_| UnsafeCell::new(())).collect();
            let data = Mutex::new(vec![0; len]);
            let log = Vec::new();
            Self::unmapped(Bank { sync, sync_u32, sync_u8, log, data, races })
        }

        /// An area of zeroed sync words of 64 bits: a dirty log.
        pub fn modelled_log(words: usize) -> Self {
            let log = (0..words).map(|_| AtomicU64::new(0)).collect();
            let (sync, sync_u32, sync_u8) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
            let data = Mutex::new(vec![0; words * 8]);
            let races = Vec::new();
            Self::unmapped(Bank { sync, sync_u32, sync_u8, log, data, races })
        }

        /// Loads a word of a dirty log.
        pub fn load_log(&self, offset: usize) -> u64 {
            self.bank.log[offset / 8].load(Ordering::Relaxed)
        }

        /// Sets bits of a word of a dirty log; returns its bits before.
        pub fn sync_or_u64(&self, offset: usize, bits: u64, order: Ordering) -> u64 {
            self.bank.log[offset / 8].fetch_or(bits, order)
        }

        /// Takes the bits of a word of a dirty log, as the front-end does at each pass.
        pub fn take_log(&self, offset: usize, order: Ordering) -> u64 {
            self.bank.log[offset / 8].swap(0, order)
        }

        /// Length in bytes.
        pub fn len(&self) -> usize {
            self.bank.data.lock().unwrap().len()
        }

        /// Whether the length is 0.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// Whether the two bytes at `offset` are a sync word, or in one.
        fn is_sync(&self, offset: usize) -> bool {
            let Bank { sync, sync_u32, sync_u8, .. } = &*self.bank;
            sync.contains_key(&offset)
                || sync_u32.contains_key(&offset)
                || offset.checked_sub(2).is_some_and(|o| sync_u32.contains_key(&o))
                || sync_u8.contains_key(&offset)
                || sync_u8.contains_key(&(offset + 1))
        }

        /// The cells of the data words in a range; sync words order themselves.
        fn cells(&self, offset: usize, len: usize) -> impl Iterator<Item = &UnsafeCell<()>> {
            let words = (offset..offset + len).step_by(2);
            words.filter(|o| !self.is_sync(*o)).map(|o| &self.bank.races[o / 2])
        }

        fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
            self.cells(offset, N).for_each(|cell| cell.with(|_| ()));
            let data = self.bank.data.lock().unwrap();
            data[offset..offset + N].try_into().unwrap()
        }

        fn set(&self, offset: usize, bytes: &[u8]) {
            self.cells(offset, bytes.len()).for_each(|cell| cell.with_mut(|_| ()));
            self.bank.data.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }

        words!(load_u16, store_u16, u16);
        words!(load_u32, store_u32, u32);
        words!(load_u64, store_u64, u64);
        sync_words!(sync_load_u32, sync_store_u32, sync_u32, u32);
        sync_words!(sync_load_u8, sync_store_u8, sync_u8, u8);

        /// Loads a sync word of 16 bits.
        pub fn sync_load(&self, offset: usize, order: Ordering) -> u16 {
            self.bank.sync[&offset].load(order)
        }

        /// Stores a sync word of 16 bits. A sync word may also be read as data, together with its
        /// neighbours, when another sync word orders the read.
        pub fn sync_store(&self, offset: usize, value: u16, order: Ordering) {
            self.bank.data.lock().unwrap()[offset..offset + 2]
                .copy_from_slice(&value.to_le_bytes());
            self.bank.sync[&offset].store(value, order);
        }

        /// Loads consecutive words of 16 bits.
        pub fn load_u16s(&self, offset: usize, out: &mut [u16]) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = self.load_u16(offset + 2 * i);
            }
        }

        /// Stores two neighbouring words of 32 bits.
        pub fn store_u32s(&self, offset: usize, words: [u32; 2]) {
            self.store_u32(offset, words[0]);
            self.store_u32(offset + 4, words[1]);
        }

        /// Loads two neighbouring words of 64 bits.
        pub fn load_pair(&self, offset: usize) -> (u64, u64) {
            (self.load_u64(offset), self.load_u64(offset + 8))
        }
        /// Returns the packed descriptors at `offset`.
        pub fn descs(&self, offset: usize, _: usize) -> Descs<'_> {
            Descs(self, offset)
        }
        /// Stores a used descriptor, all but its address; its flags, a sync word, last.
        pub fn sync_store_tail(&self, offset: usize, len: u32, id: u16, flags: u16, o: Ordering) {
            self.store_u32(offset, len);
            self.store_u16(offset + 4, id);
            self.sync_store(offset + 6, flags, o);
        }
        /// Does nothing: a model has no cache.
        pub fn prefetch(&self, _: usize) {}
        /// Does nothing: a model has no cache.
        pub fn prefetch_write(&self, _: usize) {}
    }
}
