//! Files of the control thread (Landlock): it reads, makes and removes sockets and directories, and
//! opens a few devices. It writes no other file: what is kept or captured is in memory of its own,
//! or written by others.

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, make_bitflags,
};

/// Rights that are restricted; a kernel that lacks the later ones restricts the others.
const RESTRICTED: ABI = ABI::V5;
/// Everywhere: configuration may be a link to anywhere, and ports have any directory.
const ANYWHERE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | ReadDir | MakeSock | MakeDir | RemoveFile | RemoveDir
});
/// In these: interfaces, grants and event channels.
const DEVICE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ WriteFile | IoctlDev });
const DEVICES: [&str; 3] = ["/dev/net", "/dev/xen", "/dev/null"];
/// Where the kernel is asked to repeat an event of a vif; a directory of all devices.
const XEN_BACKENDS: &str = "/sys/bus/xen-backend";
const XEN_EVENTS: &str = "/sys/devices";

/// Protects files from this thread, and from those that it starts.
///
/// # Errors
/// The kernel cannot, or may not for this process.
pub(super) fn protect() -> io::Result<()> {
    let enforced = restrict().map_err(io::Error::other)?;
    match enforced {
        RulesetStatus::NotEnforced => Err(io::ErrorKind::Unsupported.into()),
        _ => Ok(()),
    }
}

fn restrict() -> Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default().handle_access(AccessFs::from_all(RESTRICTED))?.create()?;
    let devices = DEVICES.map(|path| (path, DEVICE)).into_iter();
    let events =
        Path::new(XEN_BACKENDS).exists().then_some((XEN_EVENTS, AccessFs::WriteFile.into()));
    for (path, access) in [("/", ANYWHERE)].into_iter().chain(devices).chain(events) {
        // What is not there cannot be opened.
        if let Ok(at) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(at, access))?;
        }
    }
    Ok(rules.restrict_self()?.ruleset)
}
