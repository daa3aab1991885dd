//! Locks that count how often a thread had to wait for them: workers do not slow each other down if
//! that is rare.

use std::sync::{PoisonError, TryLockError};

use shm::sync::{Mutex, MutexGuard};

use crate::stats::Counter;

/// Locks a mutex; calls `waited`, with the lock held, if another thread had it. A mutex is valid
/// after a panic under it: whoever leaves something half done says so elsewhere.
#[inline]
pub fn lock_counted<T: ?Sized>(mutex: &Mutex<T>, waited: impl FnOnce()) -> MutexGuard<'_, T> {
    let contended = match mutex.try_lock() {
        Ok(guard) => return guard,
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Poisoned(_)) => false,
    };
    let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    if contended {
        waited();
    }
    guard
}

/// A mutex with its count.
#[derive(Debug, Default)]
pub struct CountedMutex<T> {
    /// Added to under the lock.
    contended: Counter,
    mutex: Mutex<T>,
}

impl<T> CountedMutex<T> {
    /// Creates one, unlocked.
    pub fn new(value: T) -> Self {
        Self { contended: Counter::default(), mutex: Mutex::new(value) }
    }

    /// Locks it.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock_counted(&self.mutex, || self.contended.add(1))
    }

    /// How often it was locked by a thread that had to wait for it.
    pub fn contended(&self) -> u64 {
        self.contended.get()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_waits_is_counted_and_no_other() {
        let mutex = CountedMutex::new(0);
        for _ in 0..3 {
            *mutex.lock() += 1;
        }
        assert_eq!(mutex.contended(), 0);
        // Longer each time: at last the other thread finds it locked.
        for ms in 1.. {
            let held = mutex.lock();
            std::thread::scope(|scope| {
                scope.spawn(|| *mutex.lock() += 1);
                std::thread::sleep(Duration::from_millis(ms));
                drop(held);
            });
            if mutex.contended() > 0 {
                break;
            }
        }
        assert_eq!(mutex.contended(), 1);
    }

    #[test]
    fn a_mutex_is_valid_after_a_panic_under_it() {
        let mutex = CountedMutex::new(7);
        let panics = std::panic::AssertUnwindSafe(|| {
            let _held = mutex.lock();
            panic!("on purpose");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!((*mutex.lock(), mutex.contended()), (7, 0));
    }
}
