//! Counts of locks, by name. Each thread has its own, which it alone writes: an acquisition costs a
//! few plain instructions, and no thread waits for another to count.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Lock;

/// Counts of the locks of one name, of all threads, since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times it was taken.
    pub taken: u64,
    /// Times another thread had it, and this one waited, or did without.
    pub contended: u64,
    /// Time waited, in ns.
    pub waited_ns: u64,
}

/// Of one thread. No other's is in one of its pairs of cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Tally([Tallied; Lock::COUNT]);

#[derive(Default)]
struct Tallied {
    taken: AtomicU64,
    contended: AtomicU64,
    waited_ns: AtomicU64,
}

/// Tallies of all threads, and those whose thread has ended: for the next one, which adds to them.
struct All {
    all: Vec<&'static Tally>,
    free: Vec<&'static Tally>,
}

static ALL: Mutex<All> = Mutex::new(All { all: Vec::new(), free: Vec::new() });

thread_local! {
    static TALLY: Cell<Option<&'static Tally>> = const { Cell::new(None) };
    static OWNED: Cell<Option<Owned>> = const { Cell::new(None) };
}

/// This thread's tally, until the thread ends.
struct Owned(&'static Tally);

impl Drop for Owned {
    fn drop(&mut self) {
        TALLY.set(None);
        all().free.push(self.0);
    }
}

fn all() -> MutexGuard<'static, All> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Written by one thread: no locked instruction.
#[inline]
fn add(count: &AtomicU64, n: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Counts an acquisition.
#[inline]
pub(super) fn record_taken(lock: Lock) {
    if let Some(tally) = TALLY.get().or_else(begin) {
        add(&tally.0[lock as usize].taken, 1);
    }
}

/// Counts a wait.
pub(super) fn record_waited(lock: Lock, waited: Duration) {
    if let Some(tally) = TALLY.get().or_else(begin) {
        let counts = &tally.0[lock as usize];
        add(&counts.contended, 1);
        add(&counts.waited_ns, u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// This thread's tally, at its first lock; `None`: the thread is ending, and its last locks are not
/// counted.
#[cold]
fn begin() -> Option<&'static Tally> {
    let mut all = all();
    let tally = all.free.pop().unwrap_or_else(|| {
        let tally: &'static Tally = Box::leak(Box::default());
        all.all.push(tally);
        tally
    });
    drop(all);
    if OWNED.try_with(|owned| owned.set(Some(Owned(tally)))).is_err() {
        self::all().free.push(tally);
        return None;
    }
    TALLY.set(Some(tally));
    Some(tally)
}

/// Number of tallies, of threads that run and that have ended.
#[cfg(all(test, not(loom)))]
pub(super) fn tallies() -> usize {
    all().all.len()
}

/// Counts of all locks that were taken, or waited for, in the order of [`Lock::ALL`].
pub fn lock_counts() -> Vec<(Lock, Counts)> {
    let all = all();
    let of = |lock: &Lock| {
        let of_threads = all.all.iter().map(|tally| &tally.0[*lock as usize]);
        let counts = of_threads.fold(Counts::default(), |sum, one| Counts {
            taken: sum.taken.wrapping_add(one.taken.load(Ordering::Relaxed)),
            contended: sum.contended.wrapping_add(one.contended.load(Ordering::Relaxed)),
            waited_ns: sum.waited_ns.wrapping_add(one.waited_ns.load(Ordering::Relaxed)),
        });
        (*lock, counts)
    };
    let counts = Lock::ALL.iter().map(of);
    counts.filter(|(_, counts)| *counts != Counts::default()).collect()
}
