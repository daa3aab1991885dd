//! Every interleaving of readers and updates, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-shm --lib --release published`
//!
//! The test keeps all values, so that none is really freed: of one that only the test still has, it
//! writes the cell in place of that, and loom finds a reader that may read it then or later.

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;

struct Value(UnsafeCell<u32>);

fn value(n: u32) -> Arc<Value> {
    Arc::new(Value(UnsafeCell::new(n)))
}

fn read(published: &Published<Value>) -> u32 {
    published.read(|value| {
        // SAFETY: loom checks that nothing writes it meanwhile.
        value.map_or(0, |value| value.0.with(|n| unsafe { *n }))
    })
}

/// Two updates beside a reader that reads twice; `freed` says whether a value counts as freed.
fn model(freed: fn(&Arc<Value>) -> bool) {
    loom::model(move || {
        let published = Arc::new(Published::new());
        let values = [value(1), value(2), value(3)];
        published.update(|_| Some(Arc::clone(&values[0])));
        let reader = {
            let published = Arc::clone(&published);
            thread::spawn(move || [read(&published), read(&published)])
        };
        for (old, new) in values.iter().zip(&values[1..]) {
            published.update(|_| Some(Arc::clone(new)));
            if freed(old) {
                old.0.with_mut(|_| ());
            }
        }
        let [first, second] = reader.join().unwrap();
        assert!(1 <= first && first <= second && second <= 3, "{first} {second}");
    });
}

#[test]
fn value_is_freed_after_its_last_reader() {
    model(|value| Arc::strong_count(value) == 1);
}

/// The model finds it.
#[test]
fn canary_value_is_freed_beside_its_reader() {
    assert!(catch_unwind(AssertUnwindSafe(|| model(|_| true))).is_err());
}

/// Of values that were kept for a reader, the next update frees all.
#[test]
fn values_are_not_kept_for_good() {
    loom::model(|| {
        let published = Arc::new(Published::new());
        let values = [value(1), value(2)];
        published.update(|_| Some(Arc::clone(&values[0])));
        let reader = {
            let published = Arc::clone(&published);
            thread::spawn(move || read(&published))
        };
        published.update(|_| Some(Arc::clone(&values[1])));
        reader.join().unwrap();
        published.update(|_| None);
        assert!(values.iter().all(|value| Arc::strong_count(value) == 1));
    });
}
