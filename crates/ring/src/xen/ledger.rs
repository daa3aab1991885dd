//! Progress of a back half in memory that outlives its process.
//!
//! Requests and responses share slots: a response overwrites the request. A back half that is
//! killed after it wrote responses, and before it published them, would leave slots that its
//! successor reads as requests. So responses are written down first:
//!
//! ```text
//!   word:     published position │ position after the burst        (one store)
//!   entries:  by slot: the response
//!
//!   put:      entry
//!   publish:  word ─▶ slots ─▶ rsp_prod
//! ```
//! Whatever the last store of a killed process was: if the ring's rsp_prod is not the position
//! after the burst, the successor writes the slots again from the entries and publishes them.
//! Before the word, no slot was written, and all requests of the burst are taken again. Either way
//! the ring continues at the position in the word, whatever the guest wrote into its page.

use shm::Area;
use shm::sync::{Ordering, compiler_fence};

use super::page::{Page, RSP_PROD};
use crate::bits::lo32;
use crate::index::Idx;

/// Offset of the positions, and of the ring's size, which is stored last at the start.
const WORD: usize = 0;
const SIZE: usize = 8;
/// Bytes before the entries, and of an entry.
const HEAD_LEN: usize = 16;
const ENTRY_LEN: usize = 12;
/// Entries for a ring of the largest size.
const ENTRIES: usize = 256;

/// Progress of one ring's back half, in memory that only it and its successor use.
#[derive(Clone)]
pub struct Ledger(Area);

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ledger")
    }
}

/// A response as words, of which its kind of ring has the first bytes.
#[derive(Clone, Copy)]
pub(super) struct Response {
    pub(super) first: u64,
    pub(super) second: u32,
}

impl From<u64> for Response {
    fn from(first: u64) -> Self {
        Self { first, second: 0 }
    }
}

impl Ledger {
    /// Length of the memory for one ring, in bytes.
    pub const LEN: usize = HEAD_LEN + ENTRIES * ENTRY_LEN;

    /// Uses an area of at least [`LEN`](Self::LEN) bytes; `None`: it is shorter.
    pub fn new(area: Area) -> Option<Self> {
        (area.len() >= Self::LEN).then_some(Self(area))
    }

    /// Writes down the position of a ring that starts.
    pub(super) fn start(&self, at: Idx<u32>, size: u32) {
        // Without a size it is not valid.
        self.0.sync_store_u32(SIZE, 0, Ordering::Release);
        self.commit(at, at);
        self.0.sync_store_u32(SIZE, size, Ordering::Release);
    }

    /// Writes down a response.
    #[inline]
    pub(super) fn put(&self, slot: usize, response: Response) {
        let at = HEAD_LEN + slot * ENTRY_LEN;
        self.0.store_u32(at, lo32(response.first));
        self.0.store_u32(at + 4, lo32(response.first >> 32));
        self.0.store_u32(at + 8, response.second);
    }

    /// The response written down for a slot.
    #[inline]
    pub(super) fn entry(&self, slot: usize) -> Response {
        let at = HEAD_LEN + slot * ENTRY_LEN;
        let first = u64::from(self.0.load_u32(at)) | u64::from(self.0.load_u32(at + 4)) << 32;
        Response { first, second: self.0.load_u32(at + 8) }
    }

    /// From here on, the responses up to `to` are given. The caller's stores to the ring follow.
    #[inline]
    pub(super) fn commit(&self, published: Idx<u32>, to: Idx<u32>) {
        compiler_fence(Ordering::SeqCst);
        let word = u64::from(published.get()) | u64::from(to.get()) << 32;
        self.0.store_u64(WORD, word);
        compiler_fence(Ordering::SeqCst);
    }

    /// Ends the burst of a killed back half, and returns where the ring in `page`, of slots of
    /// `slot_len` bytes, continues; `None`: this is not its ledger.
    pub fn recover(&self, page: Area, slot_len: usize) -> Option<u32> {
        let page = Page::new(page, slot_len)?;
        if self.0.sync_load_u32(SIZE, Ordering::Acquire) != page.size {
            return None;
        }
        let word = self.0.load_u64(WORD);
        let (published, to) = (Idx::<u32>::new(lo32(word)), Idx::<u32>::new(lo32(word >> 32)));
        if to.since(published) > page.size {
            return None;
        }
        if page.area.sync_load_u32(RSP_PROD, Ordering::Acquire) != to.get() {
            page.write_responses(self, published, to);
            page.area.sync_store_u32(RSP_PROD, to.get(), Ordering::Release);
        }
        Some(to.get())
    }
}
