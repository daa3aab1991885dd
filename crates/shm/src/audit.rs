//! Record of the bytes that a thread loads through [`Area`](crate::Area)s (feature `audit`).
//!
//! A test brackets one operation with [`begin`] and [`end`] and asserts that no byte was loaded
//! twice: a value fetched twice may be two values, and only the first one was checked.

use std::cell::RefCell;
use std::collections::BTreeMap;

thread_local! {
    static LOADS: RefCell<Option<BTreeMap<usize, usize>>> = const { RefCell::new(None) };
}

/// Starts counting on this thread, with an empty record.
pub fn begin() {
    LOADS.set(Some(BTreeMap::new()));
}

/// Stops counting. Returns every byte loaded since [`begin`], by its address in this process, and
/// how many times.
pub fn end() -> BTreeMap<usize, usize> {
    LOADS.take().unwrap_or_default()
}

/// Records a load of `len` bytes at `at`.
pub(crate) fn load(at: usize, len: usize) {
    LOADS.with_borrow_mut(|loads| {
        if let Some(loads) = loads {
            for byte in at..at + len {
                *loads.entry(byte).or_default() += 1;
            }
        }
    });
}
