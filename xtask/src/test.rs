//! `cargo xtask test`: runs the tests of the workspace, several test programs in parallel.
//!
//! Cargo runs test programs one after the other, but most of them mostly wait. When a program ends,
//! its output is printed if a test failed, and its results alone otherwise.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::{cpus, in_parallel};

/// The longest program; it starts first.
const FIRST: &str = "seeds";

/// A test program.
struct Program {
    name: String,
    path: PathBuf,
    /// The folder of its package; its working directory.
    package: PathBuf,
}

/// Builds and runs all tests; returns whether all passed.
///
/// # Errors
/// Cargo or a program cannot be started.
pub fn run(root: &Path) -> Result<bool, String> {
    let Some(programs) = build(root)? else { return Ok(false) };
    let failed_one = |program: &Program| Ok((!program.run()?).then(|| program.name.clone()));
    // One more than CPUs, because some of the running programs wait.
    let failed = in_parallel(&programs, cpus() + 1, failed_one)?;
    let failed: Vec<String> = failed.into_iter().flatten().collect();
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

/// Builds all test programs, the longest first; `None`: the build failed.
fn build(root: &Path) -> Result<Option<Vec<Program>>, String> {
    let Some(messages) = messages(root)? else { return Ok(None) };
    let mut programs = programs(&messages);
    // A stable sort keeps the others in cargo's order.
    programs.sort_by_key(|program| program.name != FIRST);
    Ok(Some(programs))
}

/// Builds the program `name` with all tests, and thus with the features that its tests run it with:
/// building it alone would build half of all dependencies again. Returns its path.
///
/// # Errors
/// The build fails, or makes no such program.
pub fn program(root: &Path, name: &str) -> Result<PathBuf, String> {
    let messages = messages(root)?.ok_or_else(|| format!("{name} cannot be built"))?;
    executable(&messages, name).ok_or_else(|| format!("no program {name} among those built"))
}

/// The program `name` in cargo's messages.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let mut messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.find_map(|message| {
        let target = &message["target"];
        let is_it = target["kind"][0] == "bin" && target["name"] == name;
        let path = message["executable"].as_str()?;
        (is_it && message["profile"]["test"] == false).then(|| path.into())
    })
}

/// Cargo's messages of the build; `None`: it failed.
fn messages(root: &Path) -> Result<Option<String>, String> {
    let words = ["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"];
    let built = cargo(root).args(words).stderr(Stdio::inherit()).output();
    let built = built.map_err(|error| format!("cannot run cargo: {error}"))?;
    let messages = String::from_utf8_lossy(&built.stdout).into_owned();
    Ok(built.status.success().then_some(messages))
}

/// The test programs in cargo's messages.
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
    /// Runs it; returns whether all tests passed.
    fn run(&self) -> Result<bool, String> {
        let ran = Command::new(&self.path)
            .arg("--show-output")
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run {}: {error}", self.path.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (name, path, out) = (&self.name, self.path.display(), text(&ran.stdout));
        let out = if ran.status.success() { results(&out) } else { out + &text(&ran.stderr) };
        println!("     Running {name} ({path})\n{out}");
        Ok(ran.status.success())
    }
}

/// The lines of a program without failures that [`crate::ci`] reads: counts, and what was skipped.
fn results(out: &str) -> String {
    let are_read = |line: &&str| line.starts_with("test result: ") || line.starts_with("skipped: ");
    out.lines().filter(are_read).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_program_without_failures_the_results_are_printed() {
        let out = "running 1 test\ntest a ... ok\n\nsuccesses:\n\n---- a stdout ----\n\
                   skipped: no tun\nthread 'a' panicked at b.rs:1:2:\n\n\
                   test result: ok. 1 passed; 0 failed; 0 ignored\n";
        assert_eq!(
            results(out),
            "skipped: no tun\ntest result: ok. 1 passed; 0 failed; 0 ignored\n"
        );
    }

    #[test]
    fn only_executables_of_the_test_profile_are_test_programs() {
        let message = |name: &str, is_test: bool, executable: &str| {
            let target = format!(r#"{{"name":"{name}","kind":["bin"]}}"#);
            format!(r#"{{"manifest_path":"/w/a/Cargo.toml","target":{target},"#)
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
        assert_eq!(executable(&messages, "a"), Some("/t/a".into()));
        assert_eq!(executable(&messages, "halves"), None, "that is a test program");
    }
}
