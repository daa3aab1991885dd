//! Atomics, fences and locks: the standard ones, or loom's under `cfg(loom)`. Locks have a name,
//! by which they are counted ([`Lock`]).

mod lock;
mod tally;

/// Keeps the compiler from moving memory accesses across it: for the order in which a killed
/// thread's stores stay behind, and so that it reads memory of a guest no second time.
pub use std::sync::atomic::compiler_fence;

#[cfg(loom)]
pub use loom::sync::{
    Condvar, MutexGuard, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub use std::sync::{
    Condvar, MutexGuard, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
};

pub use self::lock::{Lock, Mutex, RwLock, StaticGuard, StaticMutex};
pub use self::tally::{Counts, lock_counts};
