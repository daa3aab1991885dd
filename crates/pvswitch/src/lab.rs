//! `pvswitch lab`: runs `pvswitch-lab`, the program for performance studies, installed in the same
//! folder. It replaces this process, so arguments, exit status and signals are its own.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::AnyError;
use crate::cli::LabArgs;

/// Program name, in this program's folder.
const PROGRAM: &str = "pvswitch-lab";

/// Runs `pvswitch lab`. Returns only if the program cannot be run.
pub fn command(args: LabArgs) -> Result<(), AnyError> {
    let this = std::env::current_exe().map_err(|error| format!("/proc/self/exe: {error}"))?;
    let lab = this.with_file_name(PROGRAM);
    let error = Command::new(&lab).args(args.args).exec();
    Err(refusal(&lab, &error).into())
}

/// The error message, with what to do.
fn refusal(lab: &Path, error: &std::io::Error) -> String {
    let lab = lab.display();
    if error.kind() == ErrorKind::NotFound {
        return format!(
            "lab: {lab} not found: the studies are run by a separate program, {PROGRAM}, installed \
             beside pvswitch; build both: cargo build --release --bin pvswitch --bin {PROGRAM}"
        );
    }
    format!("lab: cannot run {lab}: {error}")
}
