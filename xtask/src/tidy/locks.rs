//! Locks of the product: all are of `shm::sync`, which counts them, but for listed ones; and each
//! is in the list of `docs/design/0048-counted-locks.md`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Rule, Violation, violation};
use crate::text::{code_of, has_word};

const LIST: &str = "docs/design/0048-counted-locks.md";
/// Where the names of counted locks are.
const NAMES: &str = "crates/shm/src/sync/lock.rs";
/// The crates of the product; the others are tests, measurements and tools.
const ROOMS: [&str; 11] = [
    "api",
    "guest",
    "os",
    "plugin",
    "pvswitch",
    "ring",
    "shm",
    "switch",
    "uplink",
    "vhost-user",
    "xen-netif",
];
/// A further room, whose name is another's beginning.
const ROOM: &str = "xen-local";
/// The types that count.
const COUNTED: &str = "crates/shm/src/sync";

/// What a module `sync` has of which one thread waits for another.
const LOCKS: [&str; 12] = [
    "Barrier",
    "Condvar",
    "LazyLock",
    "Mutex",
    "Notify",
    "Once",
    "OnceCell",
    "OnceLock",
    "ReentrantLock",
    "RwLock",
    "Semaphore",
    "mpsc",
];
/// Crates that consist of such.
const CRATES: [&str; 10] = [
    "arc_swap",
    "async_lock",
    "crossbeam",
    "crossbeam_channel",
    "dashmap",
    "flume",
    "lock_api",
    "once_cell",
    "parking_lot",
    "spin",
];
/// Waits for other threads without a lock.
const WAITS: [&str; 4] = ["park", "park_timeout", "spin_loop", "yield_now"];

/// Uncounted ones: file, and word. The list has the reasons.
const UNCOUNTED: [(&str, &str); 23] = [
    ("crates/api/src/json_schema.rs", "LazyLock"),
    ("crates/guest/src/generate/pass.rs", "spin_loop"),
    ("crates/guest/src/generate/trial.rs", "spin_loop"),
    ("crates/os/src/confine.rs", "OnceLock"),
    ("crates/os/src/helper.rs", "Mutex"),
    ("crates/pvswitch/src/capture.rs", "mpsc"),
    ("crates/pvswitch/src/cost.rs", "OnceLock"),
    ("crates/pvswitch/src/cost.rs", "spin_loop"),
    ("crates/pvswitch/src/cost.rs", "yield_now"),
    ("crates/pvswitch/src/http.rs", "Semaphore"),
    ("crates/pvswitch/src/http.rs", "mpsc"),
    ("crates/pvswitch/src/http/control.rs", "mpsc"),
    ("crates/pvswitch/src/pool.rs", "mpsc"),
    ("crates/pvswitch/src/run.rs", "mpsc"),
    ("crates/pvswitch/src/top.rs", "mpsc"),
    ("crates/pvswitch/src/worker.rs", "mpsc"),
    ("crates/pvswitch/src/worker.rs", "spin_loop"),
    ("crates/switch/src/forward/mirror.rs", "mpsc"),
    ("crates/os/src/sys.rs", "Mutex"),
    ("crates/switch/src/serving.rs", "OnceLock"),
    ("crates/vhost-user/src/foreign.rs", "park"),
    ("crates/vhost-user/src/foreign.rs", "park_timeout"),
    ("crates/xen-local/src", "OnceLock"),
];

/// Finds uncounted locks, and counted ones that are not in the list.
pub fn check(files: &BTreeMap<String, String>) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut excepted = BTreeSet::new();
    let list = files.get(LIST).map_or("", String::as_str);
    for (name, text) in files.iter().filter(|(name, _)| is_product(name)) {
        for (line, word) in uncounted(text) {
            match UNCOUNTED.iter().find(|(file, w)| name.starts_with(file) && *w == word) {
                Some(entry) => _ = excepted.insert(entry),
                None => {
                    let what = format!(
                        "{word} is not counted: use shm::sync, or list it in {LIST} and \
                         xtask/src/tidy/locks.rs"
                    );
                    found.push(violation(Rule::Locks, format!("{name}:{line}"), what));
                }
            }
        }
    }
    for entry in &UNCOUNTED {
        let (file, word) = entry;
        if !excepted.contains(entry) {
            let what = format!("has no {word}: remove it from xtask/src/tidy/locks.rs");
            found.push(violation(Rule::Locks, *file, what));
        }
        let short = file.replacen("crates/", "", 1).replacen("/src", "", 1);
        if !list.lines().any(|line| line.contains(&short) && has_word(line, word)) {
            let what = format!("no line has {word} of `{short}`, with the reason");
            found.push(violation(Rule::Locks, LIST, what));
        }
    }
    for name in names(files.get(NAMES).map_or("", String::as_str)) {
        if !list.contains(&format!("`{name}`")) {
            found.push(violation(Rule::Locks, LIST, format!("lacks the lock `{name}`")));
        }
    }
    found
}

/// Whether a file is code of the product, not of its tests.
fn is_product(name: &str) -> bool {
    let Some((room, file)) = name.strip_prefix("crates/").and_then(|rest| rest.split_once("/src/"))
    else {
        return false;
    };
    let tests = ["tests", "tests.rs", "models", "models.rs", "fake.rs"];
    let of_tests = file.split('/').any(|part| tests.contains(&part));
    let is_room = ROOMS.contains(&room) || room == ROOM;
    is_room && file.ends_with(".rs") && !of_tests && !name.starts_with(COUNTED)
}

/// Lines with an uncounted lock, or a wait, before the tests of a file.
fn uncounted(text: &str) -> Vec<(usize, &'static str)> {
    let code = code_of(text);
    let end = ["#[cfg(test)]\nmod tests {", "#[cfg(loom)]\nmod modelled {"];
    let end = end.iter().filter_map(|tests| code.find(tests)).min().unwrap_or(code.len());
    let code = &code[..end];
    let line = |at: usize| code[..at].matches('\n').count() + 1;
    let mut found = Vec::new();
    for (at, _) in code.match_indices("sync::") {
        let before = &code[..at];
        let ours = ["shm::", "crate::", "super::"].iter().any(|room| before.ends_with(room));
        if before.ends_with(is_word) || ours {
            continue;
        }
        let names = imported(&code[at + "sync::".len()..]);
        let locks = LOCKS.iter().filter(|lock| has_word(names, lock));
        found.extend(locks.map(|lock| (line(at), *lock)));
    }
    for krate in CRATES {
        let path = format!("{krate}::");
        let uses = code.match_indices(path.as_str());
        let uses = uses.filter(|(at, _)| !code[..*at].ends_with(|c| is_word(c) || c == ':'));
        found.extend(uses.map(|(at, _)| (line(at), krate)));
    }
    for wait in WAITS {
        let calls = [format!("thread::{wait}"), format!("hint::{wait}")];
        let calls = calls.iter().flat_map(|call| code.match_indices(call.as_str()));
        let calls = calls.filter(|(at, call)| !code[at + call.len()..].starts_with(is_word));
        found.extend(calls.map(|(at, _)| (line(at), wait)));
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// What is named after `sync::`: one name, or those in braces.
fn imported(after: &str) -> &str {
    match after.strip_prefix('{') {
        Some(group) => group.split(';').next().unwrap_or(group),
        None => &after[..after.find(|c| !is_word(c)).unwrap_or(after.len())],
    }
}

/// Names of counted locks.
fn names(text: &str) -> Vec<&str> {
    let entries = text.lines().filter_map(|line| {
        let (lock, name) = line.trim().strip_suffix("\",")?.split_once(" = \"")?;
        lock.chars().all(char::is_alphanumeric).then_some(name)
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, text: &str) -> Vec<String> {
        let mut files = BTreeMap::new();
        for file in [LIST, NAMES] {
            files.insert(file.into(), std::fs::read_to_string(crate::root().join(file)).unwrap());
        }
        for (file, word) in UNCOUNTED {
            let file = if file.ends_with(".rs") { file.into() } else { format!("{file}/a.rs") };
            let text: &mut String = files.entry(file).or_default();
            *text += &match WAITS.contains(&word) {
                true => format!("std::thread::{word}();\n"),
                false => format!("use std::sync::{word};\n"),
            };
        }
        files.insert(name.into(), text.into());
        check(&files).into_iter().map(|violation| violation.to_string()).collect()
    }

    #[test]
    fn a_new_uncounted_lock_in_the_product_is_a_violation() {
        let at = "crates/switch/src/x.rs";
        assert_eq!(found(at, "use shm::sync::{Lock, Mutex};\n"), [""; 0]);
        for bad in [
            "use std::sync::Mutex;\n",
            "use std::sync::{Arc, RwLock};\n",
            "use std::{sync::{Arc, Mutex}, time::Duration};\n",
            "static A: std::sync::OnceLock<u8> = std::sync::OnceLock::new();\n",
            "use loom::sync::Mutex;\n",
            "use tokio::sync::Mutex;\n",
            "use std::sync::mpsc::channel;\n",
            "use parking_lot::Mutex;\n",
            "fn f() { std::hint::spin_loop() }\n",
            "fn f() { thread::park() }\n",
        ] {
            let found = found(at, bad);
            assert!(!found.is_empty(), "{bad}");
            assert!(found.iter().all(|one| one.contains("x.rs:1: ")), "{found:?}");
        }
        for good in [
            "// use std::sync::Mutex;\nuse std::sync::Arc;\n",
            "use std::sync::atomic::AtomicBool;\nfn spin() {}\nfn park() {}\n",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    use std::sync::Mutex;\n}\n",
        ] {
            assert_eq!(found(at, good), [""; 0], "{good}");
        }
        let bad = "use std::sync::Mutex;\n";
        for elsewhere in ["crates/switch/src/x/tests.rs", "crates/lab/src/x.rs", "xtask/src/x.rs"] {
            assert_eq!(found(elsewhere, bad), [""; 0], "{elsewhere}");
        }
    }

    #[test]
    fn locks_that_are_not_listed_are_violations() {
        let new = "    Ingress = \"ingress\",\n    New = \"a_new_lock\",\n";
        assert_eq!(found(NAMES, new).len(), 1);
        assert!(found(LIST, "").len() > UNCOUNTED.len(), "no list");
        let gone = found("crates/os/src/helper.rs", "fn f() {}\n");
        assert!(gone.len() == 1 && gone[0].contains("has no Mutex"), "{gone:?}");
    }
}
