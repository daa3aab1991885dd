//! The process that starts the next version and passt: the control thread, which is confined, may
//! start no program ([0042](../../../../docs/design/0042-sandbox.md)).

use std::io;
use std::os::fd::AsFd;
use std::process::Command;

use super::{RunError, os, passt, upgrade};
use crate::AnyError;
use crate::signals::readable_on;

/// Starts it, before this process is confined.
pub(super) fn start() -> Result<(), RunError> {
    let mut command = Command::new(upgrade::program());
    command.arg("helper");
    ::os::start_helper(command).map_err(os("cannot start the helper process"))
}

/// Runs `pvswitch helper`: serves the switch at its standard input, until that one ends.
///
/// # Errors
/// It was not started by a switch.
pub fn serve() -> Result<(), AnyError> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    // They are for the switch. Programs that are started have the usual actions.
    let _signals = readable_on(&[SIGHUP, SIGINT, SIGTERM])?;
    let stdin = io::stdin();
    // Programs get a standard input of their own.
    let socket = stdin.as_fd().try_clone_to_owned()?;
    let served = ::os::serve(socket.as_fd(), |kind, argument| match kind {
        upgrade::NEXT => Ok(upgrade::command(argument)),
        passt::NAME => passt::command(argument),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    });
    served.map_err(|error| format!("helper: {error}: only a switch starts it").into())
}
