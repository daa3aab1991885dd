//! Commands that must succeed, on another toolchain, and several at a time.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A command on the nightly toolchain; its program is the first argument.
pub fn nightly(root: &Path) -> Command {
    let mut command = Command::new("rustup");
    command.current_dir(root).args(["run", "nightly"]).stdin(Stdio::null());
    // Those of the toolchain that runs this program.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    command
}

/// Number of CPUs of this process.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Does the work of all items, `jobs` at a time; returns the results of all, in no order.
///
/// # Errors
/// An error of one of them; others may have been left out.
pub fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    jobs: usize,
    work: impl Fn(&T) -> Result<R, String> + Sync,
) -> Result<Vec<R>, String> {
    let next = AtomicUsize::new(0);
    let some = || -> Result<Vec<R>, String> {
        let items = std::iter::from_fn(|| items.get(next.fetch_add(1, Ordering::Relaxed)));
        items.map(&work).collect()
    };
    let results: Result<Vec<Vec<R>>, String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.min(items.len())).map(|_| scope.spawn(some)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    Ok(results?.into_iter().flatten().collect())
}

/// Runs a command; returns its standard output. Its standard error is this program's.
///
/// # Errors
/// It cannot be run, or fails.
pub fn succeed(command: &mut Command) -> Result<String, String> {
    let ran = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let ran = ran.map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if !ran.status.success() {
        return Err(format!("{command:?}: {}", ran.status));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

/// Whether this is CI: `CI` is set in the environment.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|ci| !ci.is_empty() && ci != "false")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_items_are_worked_on_once_and_an_error_is_returned() {
        for jobs in [1, 3, 20] {
            let mut done = in_parallel(&[1, 2, 3, 4, 5], jobs, |n| Ok(n * 10)).unwrap();
            done.sort_unstable();
            assert_eq!(done, [10, 20, 30, 40, 50]);
            let odd = |n: &i32| if *n == 4 { Err(format!("{n}")) } else { Ok(()) };
            assert_eq!(in_parallel(&[1, 4, 5], jobs, odd), Err("4".into()));
        }
        assert_eq!(in_parallel(&[] as &[u8], 2, |_| Ok(())), Ok(vec![]));
    }
}
