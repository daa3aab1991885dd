use std::collections::BTreeSet;
use std::sync::{Mutex as Plain, MutexGuard as PlainGuard};
use std::time::Duration;

use super::super::{Counts, lock_counts};
use super::*;

/// Tests of this file count locks of the whole process: one at a time.
fn alone() -> PlainGuard<'static, ()> {
    static ALONE: Plain<()> = Plain::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn counts(of: Lock) -> Counts {
    let all = lock_counts().into_iter();
    all.filter(|(lock, _)| *lock == of).map(|(_, counts)| counts).next().unwrap_or_default()
}

/// What `work` adds to the counts of a lock.
fn added(of: Lock, work: impl FnOnce()) -> Counts {
    let before = counts(of);
    work();
    let after = counts(of);
    Counts {
        taken: after.taken - before.taken,
        contended: after.contended - before.contended,
        waited_ns: after.waited_ns - before.waited_ns,
    }
}

/// Has `other` run while this thread holds a lock, until it has had to wait for it.
fn beside<G>(of: Lock, hold: impl Fn() -> G, other: impl Fn() + Sync) {
    // Longer each time: at last the other thread finds it locked.
    for ms in 1.. {
        let held = hold();
        let waits = counts(of).contended;
        std::thread::scope(|scope| {
            scope.spawn(&other);
            std::thread::sleep(Duration::from_millis(ms));
            drop(held);
        });
        if counts(of).contended > waits {
            return;
        }
    }
}

#[test]
fn every_acquisition_is_counted_and_every_wait_with_its_time() {
    let _alone = alone();
    let mutex = Mutex::new(Lock::VifTap, 0);
    let free = added(Lock::VifTap, || {
        for _ in 0..3 {
            *mutex.lock() += 1;
        }
    });
    assert_eq!(free, Counts { taken: 3, ..Counts::default() });
    let waited =
        added(Lock::VifTap, || beside(Lock::VifTap, || mutex.lock(), || *mutex.lock() += 1));
    assert_eq!(waited.contended, 1);
    assert!(waited.waited_ns > 0 && waited.taken >= 2, "{waited:?}");
    // The caller hears of it.
    let heard = std::sync::atomic::AtomicU32::new(0);
    let hear = || {
        let _guard =
            mutex.lock_with(|| _ = heard.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    };
    hear();
    assert_eq!(heard.load(std::sync::atomic::Ordering::Relaxed), 0);
    beside(Lock::VifTap, || mutex.lock(), hear);
    assert_eq!(heard.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn an_attempt_without_success_counts_as_contended_and_not_as_taken() {
    let _alone = alone();
    let mutex = Mutex::new(Lock::LocalPages, 0);
    let held = mutex.lock();
    let failed = added(Lock::LocalPages, || {
        let failed = std::thread::scope(|s| s.spawn(|| mutex.try_lock().is_none()).join());
        assert!(failed.unwrap());
    });
    assert_eq!(failed, Counts { contended: 1, ..Counts::default() });
    drop(held);
    let taken = added(Lock::LocalPages, || assert!(mutex.try_lock().is_some()));
    assert_eq!(taken, Counts { taken: 1, ..Counts::default() });
}

#[test]
fn readers_wait_for_a_writer_only() {
    let _alone = alone();
    let lock = RwLock::new(Lock::XenMapped, 0);
    let readers = added(Lock::XenMapped, || {
        let _one = lock.read();
        let _another = lock.read();
    });
    assert_eq!(readers, Counts { taken: 2, ..Counts::default() });
    for (hold_for_writing, write) in [(true, false), (true, true), (false, true)] {
        let hold = || match hold_for_writing {
            true => (Some(lock.write()), None),
            false => (None, Some(lock.read())),
        };
        let other = || match write {
            true => *lock.write() += 1,
            false => assert!(*lock.read() >= 0),
        };
        let found = added(Lock::XenMapped, || beside(Lock::XenMapped, hold, other));
        assert!(found.contended == 1 && found.waited_ns > 0, "{found:?}");
    }
}

#[test]
fn counts_of_threads_that_have_ended_stay_and_their_memory_is_used_again() {
    let _alone = alone();
    let mutex = Mutex::new(Lock::LocalSocket, 0);
    let counted = added(Lock::LocalSocket, || {
        for _ in 0..100 {
            std::thread::scope(|scope| {
                scope.spawn(|| *mutex.lock() += 1);
            });
        }
    });
    assert_eq!((*mutex.lock(), counted.taken), (100, 100));
    // Other tests' threads may have some, too.
    assert!(super::super::tally::tallies() < 50, "{}", super::super::tally::tallies());
}

#[test]
fn a_lock_is_valid_after_a_panic_under_it() {
    let mutex = Mutex::new(Lock::Gate, 7);
    let lock = RwLock::new(Lock::LocalGrants, 8);
    let panics = std::panic::AssertUnwindSafe(|| {
        let (_one, _two) = (mutex.lock(), lock.write());
        panic!("on purpose");
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    assert_eq!(*mutex.lock(), 7);
    assert_eq!(mutex.try_lock().map(|value| *value), Some(7));
    assert_eq!(*lock.read(), 8);
    *lock.write() = 9;
    assert_eq!(*lock.read(), 9);
}

#[test]
fn names_are_unique_and_words_of_json() {
    let names: BTreeSet<&str> = Lock::ALL.iter().map(|lock| lock.name()).collect();
    assert_eq!(names.len(), Lock::ALL.len());
    for lock in Lock::ALL {
        assert!(lock.name().chars().all(|c| c.is_ascii_lowercase() || c == '_'));
        assert!(!lock.what().is_empty() && !lock.what().starts_with(' '));
        assert_eq!(Lock::ALL[*lock as usize], *lock);
    }
}
