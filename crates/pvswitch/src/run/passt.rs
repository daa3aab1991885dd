//! passt: a process that translates between a guest's network and the sockets of the host, without
//! any right. The switch has it started, and again when it ends.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::RunError;

/// Its name, and that of its package.
pub(super) const NAME: &str = "passt";

/// Finds the program.
///
/// # Errors
/// It is not installed; the error names the package.
pub(super) fn find() -> Result<PathBuf, RunError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::env::split_paths(&path).map(|dir| dir.join(NAME));
    all.find(|file| file.is_file()).ok_or_else(|| {
        RunError::Request(format!(
            "{NAME} is not installed: install the package {NAME} (Debian, Fedora, Arch, openSUSE), \
             or add its directory to PATH"
        ))
    })
}

/// Has it started, connected to the socket that is returned. It ends with its end of the
/// connection, so also after a kill of the switch.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(mtu: u16, pid: &mut Option<u32>) -> Result<OwnedFd, String> {
    end(pid);
    find().map_err(|error| error.to_string())?;
    let failed = |error: std::io::Error| format!("cannot start {NAME}: {error}");
    let (ours, theirs) = os::socketpair().map_err(failed)?;
    // It waits for the rest of a frame.
    let theirs = UnixStream::from(theirs);
    theirs.set_nonblocking(false).map_err(failed)?;
    *pid = Some(os::start_program(NAME, &mtu.to_string(), theirs.into()).map_err(failed)?);
    Ok(ours)
}

/// The command that starts it, for the starter.
///
/// # Errors
/// It is not installed.
pub(super) fn command(mtu: &str) -> std::io::Result<Command> {
    let mut command = Command::new(find().map_err(std::io::Error::other)?);
    command.args(["--foreground", "--quiet", "--stderr", "--fd", "0", "--mtu", mtu]);
    // Signals of the terminal are for the switch, which ends it in order.
    command.stdout(Stdio::null()).process_group(0);
    Ok(command)
}

/// Ends it, if it has not ended; returns its status.
pub(super) fn end(pid: &mut Option<u32>) -> Option<String> {
    // Its connection is closed: it has ended, or is about to.
    os::end_program(pid.take()?)
}
