//! passt: a process that translates between a guest's network and the sockets of the host, without
//! any right. The switch starts it, and again when it ends.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::RunError;

/// Its name, and that of its package.
const NAME: &str = "passt";

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

/// Starts it, connected to the socket that is returned. It ends with its end of the connection, so
/// also after a kill of the switch.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(mtu: u16, child: &mut Option<Child>) -> Result<OwnedFd, String> {
    end(child);
    let program = find().map_err(|error| error.to_string())?;
    let failed = |error: std::io::Error| format!("cannot start {NAME}: {error}");
    let (ours, theirs) = os::socketpair().map_err(failed)?;
    // It waits for the rest of a frame.
    let theirs = UnixStream::from(theirs);
    theirs.set_nonblocking(false).map_err(failed)?;
    let mut command = Command::new(program);
    command.args(["--foreground", "--quiet", "--stderr", "--fd", "0", "--mtu", &mtu.to_string()]);
    // Signals of the terminal are for the switch, which ends it in order.
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).process_group(0);
    *child = Some(command.spawn().map_err(failed)?);
    Ok(ours)
}

/// Ends it, if it has not ended; returns its status.
pub(super) fn end(child: &mut Option<Child>) -> Option<ExitStatus> {
    let mut child = child.take()?;
    // Its connection is closed: it has ended, or is about to.
    let status = child.try_wait().ok().flatten();
    status.or_else(|| {
        let _ = child.kill();
        child.wait().ok()
    })
}
