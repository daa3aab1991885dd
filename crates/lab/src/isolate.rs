//! Isolation of a run: private namespaces for network, mounts and processes.
//!
//! The lab runs itself a second time inside them, as their first process. When that process ends,
//! for any reason, the kernel ends all others inside and removes the network: no process, TAP or
//! namespace remains, even after SIGKILL.
//!
//! ```text
//! lab run ──spawn──> enter ═exec═> unshare ──fork──> lab run, inside
//!    │                (dies with its parent)  (dies with unshare)   │
//!    └───────────── standard input: one byte, a signal ────────────>┘
//! ```
//!
//! Files are not isolated: the inside sees the same folders, except a `tmpfs` over `/run/netns` and
//! one for its temporary files.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::mount::MountFlags;
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::Error;

/// Identifies a process of the lab: unset outside, `enter PID MODE` in between, then [`INSIDE`].
const MARK: &str = "PVSWITCH_LAB";
const INSIDE: &str = "inside";
const UNSHARE: [&str; 5] = ["--net", "--mount", "--pid", "--fork", "--kill-child"];
/// Only for the test whether it is permitted; the inside mounts it itself.
const AND_PROC: &str = "--mount-proc";
const AS_ROOT_OF_OUR_OWN: [&str; 2] = ["--user", "--map-root-user"];
/// Candidates for the folder of temporary files: the first one not in use is covered.
const SCRATCH: [&str; 5] = ["/dev/shm", "/mnt", "/media", "/srv", "/tmp"];
const NETNS: &str = "/run/netns";

/// A request to stop, with its signal.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicI32>);

impl Stop {
    /// The signal that asked; none while nobody has.
    pub fn asked(&self) -> Option<i32> {
        Some(self.0.load(Ordering::Acquire)).filter(|signal| *signal != 0)
    }

    /// Asks.
    pub fn ask(&self, signal: i32) {
        self.0.store(signal, Ordering::Release);
    }
}

/// Role of this process.
pub enum Side {
    /// The one that was started: it has to call [`Outside::run`].
    Outside(Outside),
    /// The one that measures.
    Inside,
}

/// The process that was started.
pub struct Outside(());

/// Returns whether this process is inside the namespaces. The process between the one outside
/// and the one inside does not return: it becomes `unshare`.
pub fn side() -> Result<Side, Error> {
    let mark = std::env::var(MARK).unwrap_or_default();
    if mark == INSIDE {
        return Ok(Side::Inside);
    }
    match mark.strip_prefix("enter ") {
        Some(rest) => Err(enter(rest)),
        None => Ok(Side::Outside(Outside(()))),
    }
}

/// Becomes `unshare`, to end with the process that started it.
fn enter(rest: &str) -> Error {
    let (parent, user) = rest.split_once(' ').unwrap_or((rest, ""));
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Error::failed(format!("prctl(PR_SET_PDEATHSIG): {error}"));
    }
    // It may have ended before that call.
    if getppid().map(Pid::as_raw_pid).map(|pid| pid.to_string()).as_deref() != Some(parent) {
        return Error::failed("the process that started this one has ended");
    }
    let mut command = Command::new("unshare");
    command.args(UNSHARE).args(if user.is_empty() { &[][..] } else { &AS_ROOT_OF_OUR_OWN });
    let error = match std::env::current_exe() {
        Ok(program) => command
            .arg("--")
            .arg(program)
            .args(std::env::args_os().skip(1))
            .env(MARK, INSIDE)
            .exec(),
        Err(error) => error,
    };
    Error::failed(format!("unshare: {error}"))
}

impl Outside {
    /// Runs this program inside, with the same arguments, folder and output; its exit status.
    ///
    /// `keep` are paths that must stay in sight.
    pub fn run(self, keep: &[PathBuf]) -> Result<u8, Error> {
        let user = allowed()?;
        let scratch = scratch(keep)?;
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
            .map_err(|error| Error::failed(format!("signals: {error}")))?;
        let program = std::env::current_exe()
            .map_err(|error| Error::failed(format!("/proc/self/exe: {error}")))?;
        let mut child = Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(MARK, format!("enter {} {}", std::process::id(), if user { "user" } else { "" }))
            .env("TMPDIR", scratch)
            .stdin(Stdio::piped())
            // Ctrl-C is handled here: guests and tools inside must not receive it.
            .process_group(0)
            .spawn()
            .map_err(|error| Error::failed(format!("cannot start itself again: {error}")))?;
        let inside = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .map_err(|error| Error::failed(format!("pidfd_open: {error}")))?;
        let (stdin, handle) = (child.stdin.take(), signals.handle());
        let forward = std::thread::spawn(move || forward(&mut signals, stdin, &inside));
        let status = child.wait();
        handle.close();
        if let Ok(Some(signal)) = forward.join() {
            return Ok(128 | signal);
        }
        let status = status.map_err(|error| Error::failed(format!("wait: {error}")))?;
        Ok(match (status.code(), status.signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(1),
            (None, Some(signal)) => 128 | u8::try_from(signal).unwrap_or(0),
            (None, None) => 1,
        })
    }
}

/// Forwards signals to the inside; the second one kills it, and is returned.
fn forward(signals: &mut Signals, mut stdin: Option<ChildStdin>, inside: &OwnedFd) -> Option<u8> {
    for (i, signal) in signals.forever().enumerate() {
        let signal = u8::try_from(signal).unwrap_or(0);
        if i > 0 {
            // It fails if it has ended.
            let _ = pidfd_send_signal(inside, Signal::KILL);
            return Some(signal);
        }
        if let Some(stdin) = &mut stdin {
            let _ = stdin.write_all(&[signal]).and_then(|()| stdin.flush());
        }
    }
    None
}

/// Checks that namespaces are permitted; returns whether a user namespace is needed.
fn allowed() -> Result<bool, Error> {
    let attempt = |user: bool| -> Result<(), String> {
        let more = if user { &AS_ROOT_OF_OUR_OWN[..] } else { &[] };
        let output =
            Command::new("unshare").args(UNSHARE).arg(AND_PROC).args(more).arg("true").output();
        match output {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr)
                .lines()
                .next_back()
                .unwrap_or("")
                .into()),
            Err(error) => Err(format!("unshare: {error}; it is in the package util-linux")),
        }
    };
    if rustix::process::geteuid().is_root() && attempt(false).is_ok() {
        return Ok(false);
    }
    let setting = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_string());
    attempt(true).map(|()| true).map_err(|why| Error::failed(refusal(&why, setting)))
}

/// Error message if the kernel refuses namespaces.
fn refusal(why: &str, setting: impl Fn(&str) -> std::io::Result<String>) -> String {
    let mut text = format!(
        "no namespaces for the guests: {why}.\nThe lab starts everything in network, mount and \
         private process namespaces. "
    );
    let is = |path: &str, value: &str| setting(path).is_ok_and(|text| text == value);
    text += if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "Run it as root, or: sysctl kernel.unprivileged_userns_clone=1"
    } else if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "Run it as root, or: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    } else if is("/proc/sys/user/max_user_namespaces", "0") {
        "Run it as root, or: sysctl user.max_user_namespaces=1000"
    } else {
        "Run it as root; in a container, with the right CAP_SYS_ADMIN (docker: --privileged)"
    };
    text
}

/// A folder that can be hidden by one for short-lived files.
fn scratch(keep: &[PathBuf]) -> Result<&'static str, Error> {
    let clear = |folder: &str| keep.iter().all(|kept| !kept.starts_with(folder));
    if !clear(NETNS.trim_end_matches("/netns")) {
        let what = "/run is hidden while the lab runs: put the program and --out elsewhere";
        return Err(Error::failed(what));
    }
    let found = SCRATCH.into_iter().find(|folder| Path::new(folder).is_dir() && clear(folder));
    found.ok_or_else(|| {
        let all = SCRATCH.join(", ");
        Error::failed(format!("no folder to put short-lived files over: none of {all} is free"))
    })
}

/// Resources of the process inside.
pub struct Inside {
    /// Whether it was asked to end.
    pub stop: Stop,
    /// `/proc` as it was: with the processes of everyone.
    everyone: File,
}

impl Inside {
    /// Mounts folders for temporary files, which end with the namespaces, and starts the thread
    /// that receives signals. Called once, before anything is started.
    pub fn settle() -> Result<Self, Error> {
        let everyone = File::open("/proc").map_err(|e| Error::failed(format!("/proc: {e}")))?;
        mount("proc", Path::new("/proc"), MountFlags::NOEXEC)?;
        hide(&std::env::temp_dir())?;
        hide(Path::new(if Path::new(NETNS).is_dir() { NETNS } else { "/run" }))?;
        std::fs::create_dir_all(NETNS).map_err(|e| Error::failed(format!("{NETNS}: {e}")))?;
        let stop = Stop::default();
        listen(stop.clone())?;
        Ok(Self { stop, everyone })
    }

    /// `/proc` with the processes of all users.
    pub fn everyone(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.everyone.as_raw_fd()).into()
    }
}

/// Covers a folder with an empty private one.
fn hide(folder: &Path) -> Result<(), Error> {
    mount("tmpfs", folder, MountFlags::empty())
}

fn mount(kind: &str, folder: &Path, more: MountFlags) -> Result<(), Error> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | more;
    rustix::mount::mount(kind, folder, kind, flags, None).map_err(|error| {
        Error::failed(format!("mount -t {kind} over {}: {error}", folder.display()))
    })
}

/// Waits for signals from the outside. Standard input is reserved for that from then on.
fn listen(stop: Stop) -> Result<(), Error> {
    let io = |error: std::io::Error| Error::failed(format!("standard input: {error}"));
    let own =
        rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(|e| io(e.into()))?;
    let null = File::open("/dev/null").map_err(io)?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| io(e.into()))?;
    let mut own = File::from(own);
    std::thread::spawn(move || {
        let mut byte = [0];
        // End of input: the outside is gone, and this process is about to end.
        let signal = if own.read_exact(&mut byte).is_ok() { i32::from(byte[0]) } else { SIGTERM };
        stop.ask(signal);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_setting() {
        let only = |path: &'static str, value: &'static str| {
            refusal("unshare failed: Operation not permitted", move |asked| {
                if asked == path {
                    Ok(value.into())
                } else {
                    Err(std::io::ErrorKind::NotFound.into())
                }
            })
        };
        let clone = only("/proc/sys/kernel/unprivileged_userns_clone", "0");
        assert!(clone.contains("sysctl kernel.unprivileged_userns_clone=1"), "{clone}");
        assert!(clone.contains("Operation not permitted"), "{clone}");
        let most = only("/proc/sys/user/max_user_namespaces", "0");
        assert!(most.contains("sysctl user.max_user_namespaces="), "{most}");
        let armor = only("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1");
        assert!(armor.contains("apparmor_restrict_unprivileged_userns=0"), "{armor}");
        assert!(only("", "").contains("CAP_SYS_ADMIN"));
    }
}
