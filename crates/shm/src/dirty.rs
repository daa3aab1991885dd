//! Dirty log: which pages of a guest's memory were written while it migrates.
//!
//! ```text
//!   writer: bytes of a burst ─▶ marks ─▶ flush: fence, then OR into the log
//!   front-end, each pass:       takes the bits, or the log, for a new one ─▶ sends the pages
//! ```
//! **A page is marked after it is written.** Marked before, the front-end could send the page
//! between the two, and the bytes would never arrive. Marked long after is harmless: the page is
//! sent in a later pass. So the marks of a burst are collected and flushed at its end, which must
//! come before the writer leaves the log, and before its ring stops.
//!
//! A bit that is set already is not written again: most pages are marked many times in a pass, by
//! several threads. The fence before makes that safe: if the front-end takes the bit after we saw
//! it, it sends a page with our bytes (loom test `marked_page_is_sent_with_its_bytes`).

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::area::Area;
use crate::mapping::Mapping;
use crate::memory::GuestMemory;
use crate::sync::{Ordering, fence};

/// Bytes of guest memory for each bit, fixed by the vhost protocol.
pub const LOG_PAGE: u64 = 4096;
/// Pages in a word of the log.
const WORD_PAGES: u64 = 64;
/// Words that are collected; a power of two. 64 words are 16 MiB of guest memory.
const WORDS: usize = 64;
/// Words set in a step of [`MarkAll`]: those of 2 GiB. A step takes about 0.4 ms, most of it for
/// memory that the log's file gets only now.
const STEP_WORDS: usize = 8192;

/// A bitmap in memory shared with a front-end, one bit for each page from guest address 0 on.
pub struct DirtyLog {
    words: Area,
    pages: u64,
    mapping: Option<Arc<Mapping>>,
}

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirtyLog({} pages)", self.pages)
    }
}

impl DirtyLog {
    /// Uses `len` bytes at `offset` of a mapping; `None`: not inside, or not aligned to 16.
    pub fn new(mapping: &Arc<Mapping>, offset: u64, len: u64) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        // A mapping is whole pages, so the last word may be partly beyond `len`. It is accessed as
        // a whole, but no bit beyond `len` is set.
        let bytes = usize::try_from(len.checked_next_multiple_of(8)?).ok()?;
        let words = Area::of(mapping, offset, bytes)?;
        Some(Self { words, pages: len.checked_mul(8)?, mapping: Some(Arc::clone(mapping)) })
    }

    /// A log in a loom model.
    #[cfg(loom)]
    pub fn modelled(words: Area) -> Self {
        let pages = (words.len() * 8) as u64;
        Self { words, pages, mapping: None }
    }

    /// Number of pages it has bits for.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of pages that a log for `memory` needs at least.
    pub fn pages_of(memory: &GuestMemory) -> u64 {
        let last = memory.regions().last().map(|r| r.guest_addr + (r.len - 1));
        last.map_or(0, |last| last / LOG_PAGE + 1)
    }

    /// Whether the front-end truncated the log's file: marks are lost.
    pub fn is_lost(&self) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| mapping.is_lost())
    }

    /// Sets bits of a word; those of pages beyond the log are ignored.
    #[inline]
    fn set(&self, word: u64, bits: u64) {
        let Some((offset, bits)) = self.place(word, bits) else { return };
        self.words.sync_or_u64(offset, bits, Ordering::AcqRel);
    }

    /// As [`set`](Self::set), without a write if the bits are set. A full fence came before.
    #[inline]
    fn set_missing(&self, word: u64, bits: u64) {
        let Some((offset, bits)) = self.place(word, bits) else { return };
        if self.words.load_log(offset) & bits != bits {
            self.words.sync_or_u64(offset, bits, Ordering::AcqRel);
        }
    }

    /// Offset of a word, and those of its bits that are inside the log.
    #[inline]
    fn place(&self, word: u64, bits: u64) -> Option<(usize, u64)> {
        let left = self.pages.checked_sub(word.checked_mul(WORD_PAGES)?)?;
        let bits = if left < WORD_PAGES { bits & !(u64::MAX << left) } else { bits };
        (bits != 0).then_some((word as usize * 8, bits))
    }
}

/// Marks all pages of a memory table, when it is not known which were written.
///
/// A log for 4 TiB takes a second; a thread that serves others as well makes a step at a time.
#[derive(Debug)]
pub struct MarkAll {
    log: Arc<DirtyLog>,
    /// Numbers of pages not marked yet.
    left: Vec<Range<u64>>,
}

impl MarkAll {
    /// Marks nothing yet.
    pub fn new(log: Arc<DirtyLog>, memory: &GuestMemory) -> Self {
        let pages = |addr: u64, len: u64| addr / LOG_PAGE..(addr + (len - 1)) / LOG_PAGE + 1;
        let left = memory.regions().iter().map(|r| pages(r.guest_addr, r.len)).collect();
        Self { log, left }
    }

    /// Marks some of the pages; returns whether others are left.
    pub fn step(&mut self) -> bool {
        for _ in 0..STEP_WORDS {
            let Some(range) = self.left.last_mut() else { return false };
            let (page, within) = (range.start, range.start % WORD_PAGES);
            let n = (WORD_PAGES - within).min(range.end - page);
            self.log.set(page / WORD_PAGES, u64::MAX >> (WORD_PAGES - n) << within);
            range.start += n;
            if range.is_empty() {
                self.left.pop();
            }
        }
        !self.left.is_empty()
    }
}

/// The marks of one queue's burst, not yet in the log.
///
/// ```text
///   page ─▶ word = page / 64 ─▶ slot = word % 64: bits of one word; another word there is flushed
/// ```
pub struct Marks {
    log: Arc<DirtyLog>,
    /// The word that each slot holds.
    words: [u64; WORDS],
    bits: [u64; WORDS],
    /// Slots in use, one bit each.
    used: u64,
    flaw: Flaw,
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Marks({:?})", self.log)
    }
}

impl Marks {
    /// Collects marks for `log`.
    pub fn new(log: Arc<DirtyLog>) -> Self {
        Self { log, words: [0; WORDS], bits: [0; WORDS], used: 0, flaw: Flaw::new() }
    }

    /// The log.
    pub fn log(&self) -> &Arc<DirtyLog> {
        &self.log
    }

    /// Marks the pages of `len` bytes at guest address `addr`, which *were* written.
    #[inline]
    pub fn mark(&mut self, addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (addr / LOG_PAGE, addr.saturating_add(len - 1) / LOG_PAGE);
        if first / WORD_PAGES == last / WORD_PAGES {
            let n = last - first + 1;
            let bits = u64::MAX >> (WORD_PAGES - n) << (first % WORD_PAGES);
            return self.add(first / WORD_PAGES, bits);
        }
        (first..=last).for_each(|page| self.add(page / WORD_PAGES, 1 << (page % WORD_PAGES)));
    }

    #[inline]
    fn add(&mut self, word: u64, bits: u64) {
        let slot = word as usize % WORDS;
        if self.used & 1 << slot != 0 {
            if self.words[slot] == word {
                self.bits[slot] |= bits;
                return;
            }
            let bits = self.flaw.spare(self.bits[slot]);
            self.log.set(self.words[slot], bits);
        }
        (self.words[slot], self.bits[slot]) = (word, bits);
        self.used |= 1 << slot;
    }

    /// Writes the marks to the log.
    pub fn flush(&mut self) {
        if self.used == 0 {
            return;
        }
        // Our bytes are visible /before/ we see that a bit is set; pairs with the front-end, which
        // takes the bit before it reads the page.
        fence(Ordering::SeqCst);
        while self.used != 0 {
            let slot = self.used.trailing_zeros() as usize;
            self.used &= self.used - 1;
            let bits = self.flaw.spare(self.bits[slot]);
            self.log.set_missing(self.words[slot], bits);
        }
    }
}

/// A fault on demand, in builds with debug assertions only: marks that are omitted, which
/// `rigs/migrate` must find.
struct Flaw {
    /// One mark in so many; 0: none.
    #[cfg(debug_assertions)]
    one_in: u64,
    #[cfg(debug_assertions)]
    marks: u64,
}

impl Flaw {
    #[cfg(debug_assertions)]
    fn new() -> Self {
        let one_in = std::env::var("PVSWITCH_OMIT_MARKS").ok().and_then(|n| n.parse().ok());
        Self { one_in: one_in.unwrap_or(0), marks: 0 }
    }

    #[cfg(not(debug_assertions))]
    fn new() -> Self {
        Self {}
    }

    /// The bits without those to omit.
    #[cfg(debug_assertions)]
    fn spare(&mut self, bits: u64) -> u64 {
        let mut spared = bits;
        for bit in (0..WORD_PAGES).map(|n| 1 << n).filter(|bit| self.one_in > 0 && bits & bit != 0)
        {
            self.marks += 1;
            if self.marks.is_multiple_of(self.one_in) {
                spared &= !bit;
            }
        }
        spared
    }

    #[cfg(not(debug_assertions))]
    #[inline(always)]
    fn spare(&mut self, bits: u64) -> u64 {
        bits
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::Region;

    fn log(offset: u64, len: u64) -> (Arc<Mapping>, Arc<DirtyLog>) {
        let mapping = Arc::new(Mapping::memfd("log", offset + len).unwrap());
        let log = DirtyLog::new(&mapping, offset, len).unwrap();
        (mapping, Arc::new(log))
    }

    /// Pages whose bit is set, found bytewise: bit `page % 8` of byte `page / 8`.
    fn marked(mapping: &Mapping, offset: u64, len: u64) -> BTreeSet<u64> {
        let mut bytes = vec![0; len as usize];
        mapping.seg(offset as usize, len as u32).unwrap().read(&mut bytes);
        let set = |page: &u64| bytes[(page / 8) as usize] >> (page % 8) & 1 != 0;
        (0..len * 8).filter(set).collect()
    }

    proptest! {
        #[test]
        fn exactly_the_pages_written_are_marked(
            len in 1_u64..3000,
            offset in (0_u64..4).prop_map(|n| n * 16),
            writes in prop::collection::vec(
                (0_u64..100_000_000, 0_u64..70_000, any::<bool>()),
                0..200,
            ),
        ) {
            let (mapping, log) = log(offset, len);
            let mut marks = Marks::new(Arc::clone(&log));
            let mut want = BTreeSet::new();
            for (addr, n, flush) in writes {
                marks.mark(addr, n);
                if n > 0 {
                    want.extend((addr / 4096..=(addr + n - 1) / 4096).filter(|p| *p < len * 8));
                }
                if flush {
                    marks.flush();
                    prop_assert_eq!(&marked(&mapping, offset, len), &want);
                }
            }
            marks.flush();
            prop_assert_eq!(marked(&mapping, offset, len), want);
            // Nothing beyond it.
            let end = mapping.len() - (offset + len) as usize;
            let mut rest = vec![0; end];
            mapping.seg((offset + len) as usize, end as u32).unwrap().read(&mut rest);
            prop_assert!(rest.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn bits_that_the_front_end_took_are_set_again() {
        let (mapping, log) = log(0, 8);
        let mut marks = Marks::new(log);
        for _ in 0..3 {
            marks.mark(5 * LOG_PAGE, 1);
            marks.flush();
            assert_eq!(marked(&mapping, 0, 8), BTreeSet::from([5]));
            mapping.seg_mut(0, 8).unwrap().zero();
        }
    }

    #[test]
    fn addresses_at_the_end_of_the_address_space_are_ignored() {
        let (mapping, log) = log(0, 8);
        let mut marks = Marks::new(log);
        marks.mark(u64::MAX, 1);
        marks.mark(u64::MAX - 10, 100);
        marks.mark(64 * LOG_PAGE, 1);
        marks.flush();
        assert!(marked(&mapping, 0, 8).is_empty());
    }

    #[test]
    fn all_pages_of_a_table_are_marked_and_counted() {
        let region = |guest_addr, len| {
            let mapping = Arc::new(Mapping::memfd("t", len).unwrap());
            Region { guest_addr, user_addr: guest_addr, len, offset: 0, mapping }
        };
        let memory = GuestMemory::new(vec![region(0x1000, 0x3000), region(0x10_0000, 0x5_0000)]);
        let memory = memory.unwrap();
        assert_eq!(DirtyLog::pages_of(&memory), 0x150);
        assert_eq!(DirtyLog::pages_of(&GuestMemory::default()), 0);
        let (mapping, log) = log(0, 0x150 / 8);
        assert!(!MarkAll::new(log, &memory).step());
        assert_eq!(marked(&mapping, 0, 0x150 / 8), (1..4).chain(0x100..0x150).collect());
    }

    /// Steps do not depend on the size of memory: a front-end that shares much of it, sparsely,
    /// keeps its thread no longer than others.
    #[test]
    #[cfg_attr(miri, ignore = "gigabytes of memory")]
    fn all_pages_of_large_memory_are_marked_in_steps() {
        const STEP_PAGES: u64 = STEP_WORDS as u64 * WORD_PAGES;
        let len = (3 * STEP_PAGES + 5) * LOG_PAGE;
        let mapping = Arc::new(Mapping::memfd("t", len).unwrap());
        let region = Region { guest_addr: 0x1000, user_addr: 0, len, offset: 0, mapping };
        let memory = GuestMemory::new(vec![region]).unwrap();
        let bytes = (3 * STEP_PAGES + 64) / 8;
        let (mapping, log) = log(0, bytes);
        let mut all = MarkAll::new(log, &memory);
        let mut count = 0;
        for step in 1..=4 {
            assert_eq!(all.step(), step < 4);
            let now = marked(&mapping, 0, bytes).len() as u64;
            assert!(now > count && now - count <= STEP_PAGES, "{count} {now}");
            count = now;
        }
        assert_eq!(marked(&mapping, 0, bytes), (1..3 * STEP_PAGES + 6).collect());
        assert!(!all.step());
    }

    #[test]
    fn log_outside_its_mapping_or_unaligned_is_none() {
        let mapping = Arc::new(Mapping::memfd("log", 4096).unwrap());
        for (offset, len) in [(8, 8), (4096, 8), (0, 4097), (u64::MAX - 15, 8), (0, u64::MAX)] {
            assert!(DirtyLog::new(&mapping, offset, len).is_none(), "{offset} {len}");
        }
        assert!(DirtyLog::new(&mapping, 4080, 16).is_some());
        assert!(DirtyLog::new(&mapping, 0, 4093).is_some());
    }
}
