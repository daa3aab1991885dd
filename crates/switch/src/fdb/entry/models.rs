//! Every interleaving of readers and the lock's holder at one entry, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-switch --lib --release models`
//!
//! `refresh` is not among them. It relies on a compare-exchange being next to what it read in the
//! word's order of modification, so that a store of another thread comes before both or after both.
//! C++ guarantees that; loom lets such a store be between.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::thread;

use super::*;

/// Keys of two addresses.
const A: u64 = 1 << 60 | 0xa;
const B: u64 = 1 << 60 | 0xb;

struct Entry {
    key: AtomicU64,
    value: AtomicU64,
}

impl Entry {
    /// Of address A at port 1. Not filled by `fill`: loom remembers seven stores of a word.
    fn new() -> Self {
        Self { key: AtomicU64::new(A), value: AtomicU64::new(at_port(1).0) }
    }

    fn words(&self) -> Words<'_> {
        Words { key: &self.key, value: &self.value }
    }

    fn port(&self, key: u64) -> Option<u16> {
        self.words().read(key).map(|value| value.port().0)
    }
}

fn at_port(port: u16) -> Value {
    Value::new(PortId(port), 1)
}

/// Beside a reader of both addresses, `write` acts on an entry with address A at port 1; A is never
/// at an even port, B never at an odd one.
fn model(write: fn(Words<'_>)) {
    loom::model(move || {
        let entry = Arc::new(Entry::new());
        let reader = {
            let entry = Arc::clone(&entry);
            thread::spawn(move || [entry.port(A), entry.port(B)])
        };
        write(entry.words());
        let [a, b] = reader.join().unwrap();
        assert!(a.is_none_or(|port| port % 2 == 1), "A at {a:?}");
        assert!(b.is_none_or(|port| port % 2 == 0), "B at {b:?}");
    });
}

#[test]
fn reader_never_gets_another_addresss_port() {
    model(|words| {
        words.vacate();
        words.fill(B, at_port(2));
    });
}

#[test]
fn reader_never_gets_another_addresss_port_when_the_first_comes_back() {
    model(|words| {
        words.vacate();
        words.fill(B, at_port(2));
        words.vacate();
        words.fill(A, at_port(3));
    });
}

/// The models find it: the address is replaced before the value is vacated.
#[test]
fn canary_key_before_value_is_found() {
    let found = catch_unwind(AssertUnwindSafe(|| {
        model(|words| {
            words.key.store(B, Ordering::Relaxed);
            words.put(words.value(), at_port(2));
        });
    }));
    assert!(found.is_err());
}
