//! A value that signal handlers read while threads replace it.
//!
//! A reader takes no lock: it is counted, and then reads whatever is current. Replaced values are
//! freed by the next update that finds no reader counted. Both sides have a fence between their
//! two steps, so of a reader and an update at the same time at least one notices the other: the
//! update the reader, and keeps what it replaced, or the reader the new value.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use crate::sync::{AtomicPtr, AtomicUsize, Lock, Mutex, Ordering, fence};

/// A value, or none, for readers that may not wait.
pub(crate) struct Published<T> {
    /// Points into `values.current`; null: none.
    current: AtomicPtr<T>,
    /// Number of readers at work.
    readers: AtomicUsize,
    values: Mutex<Values<T>>,
}

struct Values<T> {
    current: Option<Arc<T>>,
    /// Values that a reader may still read.
    replaced: Vec<Option<Arc<T>>>,
}

/// `loom` has no constant atomics.
macro_rules! new {
    ($($qualifier:tt)*) => {
        /// Without a value.
        pub $($qualifier)* new() -> Self {
            Self {
                current: AtomicPtr::new(ptr::null_mut()),
                readers: AtomicUsize::new(0),
                values: Mutex::new(
                    Lock::Mappings,
                    Values { current: None, replaced: Vec::new() },
                ),
            }
        }
    };
}

impl<T> Published<T> {
    #[cfg(loom)]
    new!(fn);
    #[cfg(not(loom))]
    new!(const fn);

    /// Calls `read` with the current value. Async-signal-safe if `read` is.
    pub fn read<R>(&self, read: impl FnOnce(Option<&T>) -> R) -> R {
        self.readers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `update`; loom test `value_is_freed_after_its_last_reader`.
        fence(Ordering::SeqCst);
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: null, or a value that an update published, which is in `values`. This reader is
        // counted before the load: an update that does not count it has its fence before the one
        // above, so the load had the value of that update or a later one. And an update that counts
        // it frees nothing.
        let result = read(unsafe { current.as_ref() });
        // Pairs with the load in `update`: a value is freed after it was read.
        self.readers.fetch_sub(1, Ordering::Release);
        result
    }

    /// Replaces the value by what `make` makes of it. Waits for other updates, not for readers.
    pub fn update(&self, make: impl FnOnce(&Option<Arc<T>>) -> Option<Arc<T>>) {
        let mut values = self.values.lock();
        let new = make(&values.current);
        let pointer = new.as_ref().map_or(ptr::null_mut(), |new| Arc::as_ptr(new).cast_mut());
        // Pairs with the load in `read`: a value is whole before it is read.
        self.current.store(pointer, Ordering::Release);
        let old = std::mem::replace(&mut values.current, new);
        values.replaced.push(old);
        // Pairs with the fence in `read`.
        fence(Ordering::SeqCst);
        // Pairs with the end of each reader.
        if self.readers.load(Ordering::Acquire) == 0 {
            values.replaced.clear();
        }
    }
}

#[cfg(all(test, loom))]
mod models;
