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
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::ci::Counts;
use crate::command::succeed;

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
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).args(["rustup", "run", "nightly", "cargo", "miri", "test"]);
        command.env("MIRIFLAGS", MIRI_FLAGS).env("PROPTEST_CASES", MIRI_CASES);
        tests(root, command, package, targets, "miri")
    };
    let mut list = test(&["env"]);
    list.args(["--", "--list"]).args(parts);
    let list = succeed(&mut list).map_err(|why| format!("{why}\n{USAGE}"))?;
    let names: Vec<_> = list.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let (next, counts) = (Mutex::new(names.iter()), Mutex::new(Counts::default()));
    let work = || -> Result<(), String> {
        loop {
            let Some(name) = next.lock().expect("no thread panics").next() else { return Ok(()) };
            let mut command = test(&["timeout", "--kill-after=5", LIMIT_S]);
            command.args(["--", "--exact", name]).stdin(Stdio::null());
            let ran = command.output().map_err(|e| format!("cannot run {command:?}: {e}"))?;
            let one = outcome(ran.status.code(), &String::from_utf8_lossy(&ran.stdout));
            if one.failed > 0 {
                eprintln!("{name}:\n{}", String::from_utf8_lossy(&ran.stdout));
                eprintln!("{}", String::from_utf8_lossy(&ran.stderr));
            } else if one.skipped > 0 {
                eprintln!("{package}: {name}: skipped: ignored, or longer than {LIMIT_S} s");
            }
            counts.lock().expect("no thread panics").add(one);
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cpus).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })?;
    Ok(counts.into_inner().expect("no thread panics"))
}

/// Runs the tests of a package with ThreadSanitizer.
fn thread(root: &Path, package: &str, targets: &[&str]) -> Result<Counts, String> {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "test", "-Zbuild-std"]);
    command.args(["--target", "x86_64-unknown-linux-gnu"]);
    command.env("RUSTFLAGS", "-Zsanitizer=thread").env("TSAN_OPTIONS", "halt_on_error=1");
    let mut command = tests(root, command, package, targets, "thread");
    let ran = command.stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| format!("cannot run {command:?}: {error}"))?;
    let counts = sums(&String::from_utf8_lossy(&ran.stdout));
    if !ran.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&ran.stdout));
        eprintln!("{}", String::from_utf8_lossy(&ran.stderr));
        // A race ends the process, and no line has the number of its tests.
        return Ok(Counts { failed: counts.failed.max(1), ..counts });
    }
    Ok(counts)
}

/// Arguments and environment of tests of one package.
fn tests(
    root: &Path,
    mut command: Command,
    package: &str,
    targets: &[&str],
    directory: &str,
) -> Command {
    // Those of the toolchain that runs this program.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    command.current_dir(root).arg("--target-dir").arg(root.join("target").join(directory));
    command.args(["--package", package]).args(targets);
    command
}

/// Result of a test that ran alone, by the status of its process.
fn outcome(status: Option<i32>, output: &str) -> Counts {
    match status {
        Some(0) => sums(output),
        // Of `timeout`.
        Some(124) | None => Counts { skipped: 1, ..Counts::default() },
        Some(_) => Counts { failed: 1, ..Counts::default() },
    }
}

/// Sums the result lines of Rust's test harness.
fn sums(output: &str) -> Counts {
    let mut all = Counts::default();
    for line in output.lines().filter(|line| line.starts_with("test result: ")) {
        let count = |word: &str| {
            let (before, _) = line.split_once(word)?;
            before.rsplit([' ', ';']).find(|part| !part.is_empty())?.parse::<u32>().ok()
        };
        all.passed += count(" passed").unwrap_or(0);
        all.failed += count(" failed").unwrap_or(0);
        all.skipped += count(" ignored").unwrap_or(0);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAN: &str = "running 3 tests\n\
        test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 30 filtered out\n\
        test result: FAILED. 1 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out\n";

    #[test]
    fn results_are_summed_over_programs() {
        assert_eq!(sums(RAN), Counts { passed: 3, failed: 4, skipped: 1 });
        assert_eq!(sums("error: no tests"), Counts::default());
    }

    #[test]
    fn a_test_alone_passes_fails_or_takes_too_long() {
        let passed = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured\n";
        assert_eq!(outcome(Some(0), passed), Counts { passed: 1, ..Counts::default() });
        assert_eq!(outcome(Some(101), ""), Counts { failed: 1, ..Counts::default() });
        assert_eq!(outcome(Some(124), ""), Counts { skipped: 1, ..Counts::default() });
    }

    #[test]
    fn unknown_sanitizers_are_named() {
        let error = run(Path::new("/"), &["memory".into()]).unwrap_err();
        assert!(error.contains("'memory'") && error.contains("usage"), "{error}");
    }
}
