//! `cargo xtask test`: the tests of the workspace, some programs of tests side by side.
//!
//! Cargo runs one after the other, and most of them wait most of the time. Each program's output
//! is printed in one piece when the program ends, in the form that cargo prints.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// The program that takes longest: it begins first.
const FIRST: &str = "seeds";

/// A program of tests.
struct Program {
    name: String,
    path: PathBuf,
    /// The folder of its package, in which it runs.
    package: PathBuf,
}

/// Builds and runs all tests; whether none failed.
///
/// # Errors
/// Cargo or a program cannot be started.
pub fn run(root: &Path) -> Result<bool, String> {
    let Some(programs) = build(root)? else { return Ok(false) };
    let queue = Mutex::new(programs);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || -> Result<Vec<String>, String> {
        let mut failed = Vec::new();
        while let Some(program) = next() {
            if !program.run()? {
                failed.push(program.name);
            }
        }
        Ok(failed)
    };
    // One more than CPUs: of those that run, some wait.
    let jobs = std::thread::available_parallelism().map_or(2, usize::from) + 1;
    let failed: Result<Vec<Vec<String>>, String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let failed = failed?.concat();
    let docs = cargo(root).args(["test", "--workspace", "--doc", "--no-fail-fast"]).status();
    let docs = docs.map_err(|error| format!("cannot run cargo: {error}"))?;
    failed.iter().for_each(|name| println!("failed: {name}"));
    Ok(failed.is_empty() && docs.success())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(crate::tidy::cargo());
    command.current_dir(root).stdin(Stdio::null());
    command
}

/// Builds all programs of tests, the longest first; none if that failed.
fn build(root: &Path) -> Result<Option<VecDeque<Program>>, String> {
    let words = ["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"];
    let built = cargo(root).args(words).stderr(Stdio::inherit()).output();
    let built = built.map_err(|error| format!("cannot run cargo: {error}"))?;
    if !built.status.success() {
        return Ok(None);
    }
    let mut programs = programs(&String::from_utf8_lossy(&built.stdout));
    // Stable: the others stay in cargo's order.
    programs.sort_by_key(|program| program.name != FIRST);
    Ok(Some(programs.into()))
}

/// The programs of tests that cargo's messages name.
fn programs(messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = messages.filter(|message| message["profile"]["test"] == true);
    let program = |message: Value| {
        let manifest = Path::new(message["manifest_path"].as_str()?);
        Some(Program {
            name: message["target"]["name"].as_str()?.into(),
            path: message["executable"].as_str()?.into(),
            package: manifest.parent()?.into(),
        })
    };
    tests.filter_map(program).collect()
}

impl Program {
    /// Runs it; whether no test failed.
    fn run(&self) -> Result<bool, String> {
        let ran = Command::new(&self.path)
            .arg("--show-output")
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run {}: {error}", self.path.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (name, path) = (&self.name, self.path.display());
        println!("     Running {name} ({path})\n{}{}", text(&ran.stdout), text(&ran.stderr));
        Ok(ran.status.success())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_tests_are_those_that_cargo_built_for_testing() {
        let message = |name: &str, is_test: bool, executable: &str| {
            format!(r#"{{"manifest_path":"/w/a/Cargo.toml","target":{{"name":"{name}"}},"#)
                + &format!(r#""profile":{{"test":{is_test}}},"executable":{executable}}}"#)
        };
        let messages = [
            message("halves", true, r#""/t/halves-1""#),
            message("a", false, r#""/t/a""#),
            message("lib", true, "null"),
            r#"{"reason":"build-finished","success":true}"#.into(),
        ]
        .join("\n");
        let found = programs(&messages);
        let [one] = &found[..] else { panic!("{} programs", found.len()) };
        assert_eq!((one.name.as_str(), one.package.as_path()), ("halves", Path::new("/w/a")));
    }
}
