//! `cargo xtask static`: the programs for any Linux of this architecture, linked statically with
//! musl, and a check that they are. With `--twice` also that another checkout builds the same
//! bytes; with `--check` only that they compile.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages, whose programs have the same names.
pub const PROGRAMS: [&str; 2] = ["pvswitch", "pvswitch-plugin"];
/// ELF: type of the program header that names a dynamic linker.
const PT_INTERP: u32 = 3;
/// What separates the flags in `CARGO_ENCODED_RUSTFLAGS`.
const SEPARATOR: &str = "\u{1f}";

/// Builds the programs; returns their paths. They do not depend on where the checkout and the
/// packages lie.
///
/// # Errors
/// The target is not installed, the build fails, or a program is not static or does not run.
pub fn build(root: &Path) -> Result<Vec<PathBuf>, String> {
    let directory = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
    build_in(root, &cargo_home()?, &root.join(directory))
}

/// Checks that the programs compile for musl, whose types differ, in less time than a build takes.
/// Prints counts as a step of CI: skipped where the target cannot be installed.
///
/// # Errors
/// cargo cannot be run.
pub fn check(root: &Path) -> Result<bool, String> {
    let target = target();
    let added = Command::new("rustup").args(["target", "add", &target]).output();
    if !added.is_ok_and(|out| out.status.success()) {
        println!("not checked: no {target}\n0 passed, 0 failed, 1 skipped");
        return Ok(true);
    }
    let mut command = cargo(root);
    command.args(["check", "--quiet", "--release", "--target", &target]);
    command.args(PROGRAMS.iter().flat_map(|name| ["-p", name]));
    let passed = command.status().map_err(|error| format!("cargo: {error}"))?.success();
    println!("{} passed, {} failed, 0 skipped", u8::from(passed), u8::from(!passed));
    Ok(passed)
}

/// The target of a static program for this machine.
pub fn target() -> String {
    format!("{}-unknown-linux-musl", std::env::consts::ARCH)
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// The same as [`build`], and again in a clone of the commit at another path, with copies of the
/// packages at another path.
///
/// # Errors
/// As for [`build`]; uncommitted changes, which the clone would not have; or a program differs.
pub fn build_twice(root: &Path) -> Result<Vec<PathBuf>, String> {
    if !git(root, &["status", "--porcelain"])?.is_empty() {
        return Err("uncommitted changes: a clone would not have them; commit them first".into());
    }
    let first = build(root)?;
    let folder = std::env::temp_dir().join(format!("pvswitch-twice-{}", std::process::id()));
    let second = clone_and_build(root, &folder);
    let same = second.and_then(|second| {
        first.iter().zip(&second).try_for_each(|(one, other)| same_bytes(one, other))
    });
    // The message is about the program, whatever can be removed.
    let _ = std::fs::remove_dir_all(&folder);
    same.map(|()| first)
}

fn clone_and_build(root: &Path, folder: &Path) -> Result<Vec<PathBuf>, String> {
    let error = |what: std::io::Error| format!("{}: {what}", folder.display());
    std::fs::create_dir(folder).map_err(error)?;
    let (checkout, home) = (folder.join("a checkout elsewhere"), folder.join("cargo"));
    copy_packages(&cargo_home()?, &home)?;
    let path = |path: &Path| path.to_string_lossy().into_owned();
    git(folder, &["clone", "--quiet", &path(root), &path(&checkout)])?;
    build_in(&checkout, &home, &checkout.join("target"))
}

/// Copies what cargo has downloaded. A link would not do: the compiler finds where it leads.
fn copy_packages(home: &Path, to: &Path) -> Result<(), String> {
    let registry = to.join("registry");
    std::fs::create_dir_all(&registry).map_err(|e| format!("{}: {e}", registry.display()))?;
    let from = ["index", "cache"].map(|name| home.join("registry").join(name));
    let status = Command::new("cp").arg("-r").args(from).arg(&registry).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cp: {status}")),
        Err(error) => Err(format!("cp: {error}")),
    }
}

fn build_in(root: &Path, home: &Path, directory: &Path) -> Result<Vec<PathBuf>, String> {
    let target = target();
    let mut command = cargo(root);
    command.env("CARGO_HOME", home).env("CARGO_TARGET_DIR", directory);
    command.env("CARGO_ENCODED_RUSTFLAGS", flags(root, home));
    command.args(["build", "--release", "--locked", "--target", &target]);
    command.args(PROGRAMS.iter().flat_map(|name| ["-p", name]));
    let status = command.status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("cargo build: {status}; needed: rustup target add {target}"));
    }
    let directory = directory.join(target).join("release");
    PROGRAMS.iter().map(|name| checked(directory.join(name))).collect()
}

/// The compiler's flags: the caller's, and no path of this machine in messages and debug lines.
fn flags(root: &Path, home: &Path) -> String {
    let encoded = std::env::var("CARGO_ENCODED_RUSTFLAGS").ok();
    let plain = std::env::var("RUSTFLAGS").unwrap_or_default();
    let given = encoded
        .unwrap_or_else(|| plain.split_ascii_whitespace().collect::<Vec<&str>>().join(SEPARATOR));
    let map = |from: &Path, to| format!("--remap-path-prefix={}={to}", from.display());
    let own = [map(home, "/cargo"), map(root, "/pvswitch")];
    let all = given.split(SEPARATOR).filter(|flag| !flag.is_empty());
    all.chain(own.iter().map(String::as_str)).collect::<Vec<&str>>().join(SEPARATOR)
}

fn cargo_home() -> Result<PathBuf, String> {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo"));
    let given = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    given.or_else(home).ok_or_else(|| "set CARGO_HOME or HOME: packages are there".into())
}

fn git(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let out = Command::new("git").current_dir(folder).args(arguments).output();
    let out = out.map_err(|error| format!("git: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if out.status.success() {
        Ok(text(&out.stdout))
    } else {
        Err(format!("git {}: {}", arguments[0], text(&out.stderr)))
    }
}

/// # Errors
/// Names the first byte that differs.
fn same_bytes(one: &Path, other: &Path) -> Result<(), String> {
    let read = |path: &Path| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
    let (left, right) = (read(one)?, read(other)?);
    let length = left.len().min(right.len());
    match left.iter().zip(&right).position(|(left, right)| left != right) {
        None if left.len() == right.len() => Ok(()),
        at => Err(format!(
            "{} is not reproducible: built elsewhere it differs from byte {} on ({} and {} bytes)",
            one.display(),
            at.unwrap_or(length),
            left.len(),
            right.len()
        )),
    }
}

/// Checks that a program needs no library, and runs.
fn checked(program: PathBuf) -> Result<PathBuf, String> {
    let error = |what: &str| format!("{}: {what}", program.display());
    let bytes = std::fs::read(&program).map_err(|failed| error(&failed.to_string()))?;
    match interpreter(&bytes) {
        Some(false) => {}
        Some(true) => return Err(error("is not static: it names a dynamic linker")),
        None => return Err(error("is not a 64-bit ELF program of a little-endian machine")),
    }
    // The plugin has no --version; its protocol's "info" needs no input.
    let argument = if program.ends_with("pvswitch") { "--version" } else { "info" };
    let ran = Command::new(&program).arg(argument).env_clear().output();
    match ran {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => Ok(program),
        Ok(output) => Err(error(&format!("{argument}: {}", output.status))),
        Err(failed) => Err(error(&failed.to_string())),
    }
}

/// Whether an ELF program names a dynamic linker; `None`: it is not one that we make.
fn interpreter(elf: &[u8]) -> Option<bool> {
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let offset = u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?);
    let (size, count) = (usize::from(half(54)?), usize::from(half(56)?));
    let offset = usize::try_from(offset).ok()?;
    for header in 0..count {
        let at = offset.checked_add(header * size)?;
        if u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?) == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_with_a_dynamic_linker_is_recognised() {
        // This test is one, on every platform with a libc that is not linked statically.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(interpreter(&own), Some(!cfg!(target_feature = "crt-static")));
    }

    #[test]
    fn programs_that_differ_are_refused_with_the_place() {
        let folder = std::env::temp_dir().join(format!("pvswitch-same-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let file = |name: &str, bytes: &[u8]| {
            std::fs::write(folder.join(name), bytes).unwrap();
            folder.join(name)
        };
        let (one, same) = (file("one", b"abc"), file("same", b"abc"));
        let (other, longer) = (file("other", b"abd"), file("longer", b"abcd"));
        assert_eq!(same_bytes(&one, &same), Ok(()));
        assert!(same_bytes(&one, &other).unwrap_err().contains("byte 2 on (3 and 3"));
        assert!(same_bytes(&one, &longer).unwrap_err().contains("byte 3 on (3 and 4"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn other_and_truncated_files_are_none() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(interpreter(&own[..60]), None);
    }
}
