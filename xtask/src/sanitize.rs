//! `cargo xtask sanitize`: tests under Miri and ThreadSanitizer, on the nightly toolchain.
//!
//! * `miri`: undefined behaviour of what has `unsafe` for shared memory and of what is built on it:
//!   bounds, initialisation, alignment, provenance of pointers, data races. A mapping is memory of
//!   the allocator (`shm`, `sys_miri.rs`). Each test runs alone, because one that Miri takes hours
//!   for is not to stop the others: it is counted as skipped after [`LIMIT_S`]. Tests that Miri
//!   cannot run say so (`cfg_attr(miri, ignore)`).
//! * `thread`: data races between threads of one process, with the standard library built for it.
//!   Both halves of a ring in threads of one process are seen; another process is not.

use std::path::Path;
use std::process::{Command, Output};

use crate::ci::Counts;
use crate::command::{cpus, in_parallel, nightly, succeed};

const USAGE: &str = "usage: cargo xtask sanitize [miri] [thread]\n\
    needed: rustup toolchain install nightly --component miri,rust-src; for thread a C compiler";
/// Longest time of a test under Miri, in seconds.
const LIMIT_S: &str = "60";
/// Both halves of a ring write words of different sizes to one descriptor, which Miri's histories
/// of atomics cannot represent; tests read settings and make files.
const MIRI_FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation";
/// Random cases of a property test: each takes Miri as long as a thousand take the processor.
const MIRI_CASES: &str = "2";
/// What Miri runs: package, targets, and parts of the tests' names.
const MIRI: [(&str, &[&str], &[&str]); 12] = [
    ("pvswitch-shm", &["--lib"], &[]),
    ("pvswitch-ring", &["--lib"], &[]),
    ("pvswitch-ring", &["--test", "halves"], &[]),
    ("pvswitch-ring", &["--test", "hostile"], &[]),
    ("pvswitch-ring", &["--test", "bounds"], &[]),
    ("pvswitch-ring", &["--test", "restore"], &[]),
    ("pvswitch-ring", &["--test", "dirty"], &[]),
    ("pvswitch-ring", &["--test", "ledger"], &[]),
    ("pvswitch-ring", &["--test", "xen"], &[]),
    ("pvswitch-ring", &["--test", "hostile_xen"], &[]),
    ("pvswitch-switch", &["--lib"], &["frame::", "offload::", "hold::"]),
    ("pvswitch-vhost-user", &["--lib"], &["port::"]),
];
/// What ThreadSanitizer runs.
const THREAD: [(&str, &[&str]); 7] = [
    // Those of the guard replace mappings under accesses by several threads, which is what they
    // test: a replaced mapping is a race in ThreadSanitizer's model.
    ("pvswitch-shm", &["--lib", "--", "--skip", "guard::"]),
    ("pvswitch-ring", &["--lib", "--test", "halves", "--test", "xen"]),
    ("pvswitch-switch", &["--lib"]),
    ("pvswitch-vhost-user", &["--lib"]),
    ("pvswitch-os", &["--lib"]),
    ("pvswitch-guest", &["--lib"]),
    ("pvswitch", &["--bin", "pvswitch"]),
];

/// Runs the sanitizers named, or both; returns whether no test failed. Prints a table; the last
/// line counts tests: `N passed, N failed, N skipped`.
///
/// # Errors
/// What is wrong with the arguments, or which program is missing.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool, String> {
    if let Some(unknown) = arguments.iter().find(|word| !["miri", "thread"].contains(&&***word)) {
        return Err(format!("no sanitizer '{unknown}'\n{USAGE}"));
    }
    let wanted = |name: &str| arguments.is_empty() || arguments.iter().any(|word| word == name);
    let mut all = Counts::default();
    println!("| sanitizer | tests of | passed | failed | skipped |");
    println!("|---|---|---|---|---|");
    let mut add = |sanitizer, package: &str, targets: &[&str], counts: Counts| {
        let Counts { passed, failed, skipped } = counts;
        let of = targets.join(" ").replace(" -- ", " ");
        println!("| {sanitizer} | `{package} {of}` | {passed} | {failed} | {skipped} |");
        all.add(counts);
    };
    if wanted("miri") {
        for (package, targets, parts) in MIRI {
            add("Miri", package, targets, miri(root, package, targets, parts)?);
        }
    }
    if wanted("thread") {
        for (package, targets) in THREAD {
            add("ThreadSanitizer", package, targets, thread(root, package, targets)?);
        }
    }
    let Counts { passed, failed, skipped } = all;
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

/// Runs each test of a target alone under Miri, as many at a time as there are CPUs.
fn miri(root: &Path, package: &str, targets: &[&str], parts: &[&str]) -> Result<Counts, String> {
    let test = |program: &[&str]| {
        let mut command = nightly(root);
        command.args(program).args(["cargo", "miri", "test"]);
        command.env("MIRIFLAGS", MIRI_FLAGS).env("PROPTEST_CASES", MIRI_CASES);
        select(&mut command, root, package, targets, "miri");
        command
    };
    let mut list = test(&[]);
    list.args(["--", "--list"]).args(parts);
    let list = succeed(&mut list).map_err(|why| format!("{why}\n{USAGE}"))?;
    let names: Vec<_> = list.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let results = in_parallel(&names, cpus(), |name| {
        let mut command = test(&["timeout", "--kill-after=5", LIMIT_S]);
        let (ran, counts) = run_tests(command.args(["--", "--exact", name]))?;
        let counts = alone(ran.status.code(), counts);
        if counts.failed > 0 {
            show(&ran);
        } else if counts.skipped > 0 {
            eprintln!("{package}: {name}: skipped: ignored, or longer than {LIMIT_S} s");
        }
        Ok(counts)
    })?;
    let mut all = Counts::default();
    results.into_iter().for_each(|counts| all.add(counts));
    Ok(all)
}

/// Runs the tests of a package with ThreadSanitizer.
fn thread(root: &Path, package: &str, targets: &[&str]) -> Result<Counts, String> {
    let mut command = nightly(root);
    command.args(["cargo", "test", "-Zbuild-std", "--target", "x86_64-unknown-linux-gnu"]);
    command.env("RUSTFLAGS", "-Zsanitizer=thread").env("TSAN_OPTIONS", "halt_on_error=1");
    select(&mut command, root, package, targets, "thread");
    let (ran, mut counts) = run_tests(&mut command)?;
    if !ran.status.success() {
        show(&ran);
        // A race ends the process, and no line has the number of its tests.
        counts.failed = counts.failed.max(1);
    }
    Ok(counts)
}

/// Adds the arguments that select the tests of one package.
fn select(command: &mut Command, root: &Path, package: &str, targets: &[&str], directory: &str) {
    command.arg("--target-dir").arg(root.join("target").join(directory));
    command.args(["--package", package]).args(targets);
}

/// Runs tests; returns the output, and the sums of its results.
fn run_tests(command: &mut Command) -> Result<(Output, Counts), String> {
    let ran = command.output().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    let counts = Counts::of_tests(&String::from_utf8_lossy(&ran.stdout));
    Ok((ran, counts))
}

fn show(ran: &Output) {
    eprintln!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
}

/// Result of a test that ran alone, by the status of its process.
fn alone(status: Option<i32>, counts: Counts) -> Counts {
    match status {
        Some(0) if counts != Counts::default() => counts,
        // Of `timeout`: it ended after SIGTERM, or after SIGKILL.
        Some(124 | 137) => Counts { skipped: 1, ..Counts::default() },
        _ => Counts { failed: 1, ..Counts::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_alone_passes_fails_or_takes_too_long() {
        let (none, passed) = (Counts::default(), Counts { passed: 1, ..Counts::default() });
        let (failed, skipped) = (Counts { failed: 1, ..none }, Counts { skipped: 1, ..none });
        assert_eq!(alone(Some(0), passed), passed);
        assert_eq!(alone(Some(0), skipped), skipped, "ignored");
        assert_eq!(alone(Some(0), none), failed, "no such test");
        for status in [124, 137] {
            assert_eq!(alone(Some(status), none), skipped);
        }
        assert_eq!([alone(Some(101), none), alone(None, none)], [failed; 2]);
    }

    #[test]
    fn unknown_sanitizers_are_named() {
        let error = run(Path::new("/"), &["memory".into()]).unwrap_err();
        assert!(error.contains("'memory'") && error.contains("usage"), "{error}");
    }
}
