//! Every interleaving of a device that writes and marks a page, and a front-end that takes the
//! marks and sends the page, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-ring --test loom_dirty --release`
//!
//! The last pass comes after the ring has stopped. What it has not sent must have been sent before.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::sync::atomic::AtomicU64;
use loom::thread;
use shm::sync::{Ordering, fence};
use shm::{Area, DirtyLog, LOG_PAGE, Marks};

/// One pass of the front-end: the page, if it is marked. Both loads are the front-end's own.
fn pass(log: &Area, page: &AtomicU64, sent: &mut u64) {
    if log.take_log(0, Ordering::AcqRel) & 1 << PAGE != 0 {
        // The bit is taken /before/ the page is read.
        fence(Ordering::SeqCst);
        *sent = page.load(Ordering::Relaxed);
    }
}

const PAGE: u64 = 3;

/// Two writes of the page, each followed by its mark; `mark` is the device's.
fn model(mark: fn(&mut Marks, &AtomicU64, u64)) {
    loom::model(move || {
        let area = Area::modelled_log(1);
        let page = Arc::new(AtomicU64::new(0));
        let log = Arc::new(DirtyLog::modelled(area.clone()));
        let device = {
            let (log, page) = (Arc::clone(&log), Arc::clone(&page));
            thread::spawn(move || {
                let mut marks = Marks::new(log);
                for value in 1..=2 {
                    mark(&mut marks, &page, value);
                }
            })
        };
        let mut sent = 0;
        pass(&area, &page, &mut sent);
        // The ring stops.
        device.join().unwrap();
        pass(&area, &page, &mut sent);
        assert_eq!(sent, 2);
    });
}

#[test]
fn marked_page_is_sent_with_its_bytes() {
    model(|marks, page, value| {
        page.store(value, Ordering::Relaxed);
        marks.mark(PAGE * LOG_PAGE, 8);
        marks.flush();
    });
}

#[test]
fn page_that_is_marked_before_it_is_written_is_found() {
    let found = catch_unwind(AssertUnwindSafe(|| {
        model(|marks, page, value| {
            marks.mark(PAGE * LOG_PAGE, 8);
            marks.flush();
            page.store(value, Ordering::Relaxed);
        });
    }));
    assert!(found.is_err());
}

/// A log is replaced: the front-end sends what the old one has once the device has left it, under
/// the queue's lock, and the new one's pages in the end.
fn replaced(flush: bool) {
    loom::model(move || {
        let (old, new) = (Area::modelled_log(1), Area::modelled_log(1));
        let page = Arc::new(AtomicU64::new(0));
        let of = |area: &Area| Arc::new(DirtyLog::modelled(area.clone()));
        let marks = Arc::new(loom::sync::Mutex::new(Marks::new(of(&old))));
        let device = {
            let (marks, page) = (Arc::clone(&marks), Arc::clone(&page));
            thread::spawn(move || {
                for value in 1..=2 {
                    let mut marks = marks.lock().unwrap();
                    page.store(value, Ordering::Relaxed);
                    marks.mark(PAGE * LOG_PAGE, 8);
                    if flush {
                        marks.flush();
                    }
                }
                marks.lock().unwrap().flush();
            })
        };
        let mut sent = 0;
        *marks.lock().unwrap() = Marks::new(of(&new));
        pass(&old, &page, &mut sent);
        device.join().unwrap();
        pass(&new, &page, &mut sent);
        assert_eq!(sent, 2);
    });
}

#[test]
fn replaced_log_loses_no_page() {
    replaced(true);
}

#[test]
fn marks_that_are_dropped_with_the_old_log_are_found() {
    let found = catch_unwind(AssertUnwindSafe(|| replaced(false)));
    assert!(found.is_err());
}
