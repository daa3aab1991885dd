//! `cargo xtask static`: the programs for any Linux of this architecture, linked statically with
//! musl, and a check that they are.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages, whose programs have the same names.
const PROGRAMS: [&str; 2] = ["pvswitch", "pvswitch-plugin"];
/// ELF: type of the program header that names a dynamic linker.
const PT_INTERP: u32 = 3;

/// Builds the programs; returns their paths.
///
/// # Errors
/// The target is not installed, the build fails, or a program is not static or does not run.
pub fn build(root: &Path) -> Result<Vec<PathBuf>, String> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(["build", "--release", "--target", &target]);
    command.args(PROGRAMS.iter().flat_map(|name| ["-p", name]));
    let status = command.status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("cargo build: {status}; needed: rustup target add {target}"));
    }
    let directory = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
    let directory = root.join(directory).join(target).join("release");
    PROGRAMS.iter().map(|name| checked(directory.join(name))).collect()
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
    fn other_and_truncated_files_are_none() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(interpreter(&own[..60]), None);
    }
}
