//! Execution inside another network namespace.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::tap::TapError;

/// Runs `work` inside the network namespace `netns`: a name under /run/netns (as `ip netns` makes
/// them) or a path (`/proc/PID/ns/net`). A thread is started for it, so the namespace of the rest
/// of the process does not change. Descriptors that `work` opens stay in that namespace.
///
/// # Errors
/// [`TapError::NoNetns`], [`TapError::NotNetns`], [`TapError::NoPermission`], [`TapError::Os`].
///
/// # Panics
/// If `work` panics.
pub fn in_netns<T: Send>(netns: &str, work: impl FnOnce() -> T + Send) -> Result<T, TapError> {
    let path = if netns.contains('/') {
        PathBuf::from(netns)
    } else {
        PathBuf::from("/run/netns").join(netns)
    };
    let lost = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => TapError::NoNetns { netns: netns.into(), path: path.clone() },
        io::ErrorKind::PermissionDenied => {
            let what = format!("enter network namespace `{netns}`");
            TapError::NoPermission { what, capability: "CAP_SYS_ADMIN" }
        }
        io::ErrorKind::InvalidInput => TapError::NotNetns { path: path.clone() },
        _ => TapError::Os { what: format!("enter network namespace `{netns}`"), error },
    };
    let file = os::open_net_namespace(&path).map_err(&lost)?;
    let enter = || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(work())
    };
    let done = std::thread::scope(|scope| scope.spawn(enter).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map_err(lost)
}
