//! Commands that must succeed.

use std::process::{Command, Stdio};

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
