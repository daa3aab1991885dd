//! passt: a process that translates between a guest's network and the sockets of the host, without
//! any right. The switch has it started, and again when it ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use os::Program;

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

/// The process of a port.
pub(super) enum Process {
    /// That this one has started.
    Own(Program),
    /// That an earlier one has: before an upgrade, or a kill.
    Inherited(OwnedFd),
}

impl Process {
    /// Its descriptor, for another process.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(program) => program.process.as_fd(),
            Self::Inherited(process) => process.as_fd(),
        }
    }
}

/// Has it started, connected to the socket that is returned; ends the one before. It ends with its
/// end of the connection, also after a kill of the switch, unless it hangs.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(mtu: u16, process: &mut Option<Process>) -> Result<OwnedFd, String> {
    end(process);
    find().map_err(|error| error.to_string())?;
    let failed = |error: std::io::Error| format!("cannot start {NAME}: {error}");
    let (ours, theirs) = os::socketpair().map_err(failed)?;
    // It waits for the rest of a frame.
    let theirs = UnixStream::from(theirs);
    theirs.set_nonblocking(false).map_err(failed)?;
    let program = os::start_program(NAME, &mtu.to_string(), theirs.into()).map_err(failed)?;
    *process = Some(Process::Own(program));
    Ok(ours)
}

/// The command that starts it, for the helper.
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

/// Ends it, if it has not ended; returns the status of one that this process has started.
pub(super) fn end(process: &mut Option<Process>) -> Option<String> {
    // Its connection is closed: it has ended, or is about to, or does not notice.
    match process.take()? {
        Process::Own(program) => os::end_program(program.pid),
        Process::Inherited(process) => {
            os::end_process(process.as_fd());
            None
        }
    }
}
