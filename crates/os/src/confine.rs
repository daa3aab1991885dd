//! What a thread may request of the kernel: a list of system calls for each kind of thread
//! (seccomp), few capabilities or none, no new privileges, and which files (Landlock).
//!
//! A thread that makes another call ends the process with SIGSYS, and the kernel's log names thread
//! and call. Calls that libraries make where they can do without them fail with ENOSYS instead.
//!
//! A filter binds the thread that enters it, and the threads that it starts; so each kind enters at
//! its start. A thread's list holds what it does after that.

mod files;
mod lists;

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{BpfProgram, apply_filter};

use self::lists::filters;

/// Kind of a thread, by its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Forwards frames between peers.
    Worker,
    /// Closes peers' descriptors, and starts threads of its kind.
    Closer,
    /// Serves HTTP clients that the control thread's listener accepted.
    Http,
    /// Writes a port's frames to a client.
    Capture,
    /// Makes ports and sockets, serves requests, and starts threads of the other kinds.
    Control,
}

/// To what threads are confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// To lists of system calls; the control thread changes no file.
    On,
    /// To lists of system calls.
    Seccomp,
    /// To nothing.
    Off,
}

impl Sandbox {
    const ALL: [(Self, &str); 3] =
        [(Self::On, "on"), (Self::Seccomp, "seccomp"), (Self::Off, "off")];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, own)| *own == name).map(|(kind, _)| kind)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

/// Why threads cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The kernel has no filters of system calls, or a container does not permit them.
    #[error(
        "system calls cannot be filtered: {0}: the kernel needs CONFIG_SECCOMP_FILTER, and a \
         container has to permit prctl, seccomp and capset"
    )]
    Refused(io::Error),
    /// The kernel has no Landlock, or a container does not permit it.
    #[error(
        "files cannot be protected: {0}: the kernel needs Landlock (5.13, \
         CONFIG_SECURITY_LANDLOCK, `landlock` in lsm= of its command line), and a container has \
         to permit its calls"
    )]
    Files(io::Error),
    /// There is no list for this processor.
    #[error("system calls cannot be filtered: no filters for this kind of processor")]
    Processor,
}

/// Filters of a kind, in the order in which they are entered.
type Filters = [BpfProgram; 2];

/// What threads are confined to.
struct Confinement {
    filters: [Filters; 5],
    /// Whether the control thread's files are protected.
    files: bool,
}

static CONFINEMENT: OnceLock<Confinement> = OnceLock::new();

thread_local! {
    static CONFINED: Cell<Option<ThreadKind>> = const { Cell::new(None) };
}

impl ThreadKind {
    const ALL: [Self; 5] = [Self::Worker, Self::Closer, Self::Http, Self::Capture, Self::Control];
}

/// Has threads confined that enter from now on, and tries it on one.
///
/// # Errors
/// See [`ConfineError`]; nothing was changed.
pub fn enable_confinement(sandbox: Sandbox) -> Result<(), ConfineError> {
    if CONFINEMENT.get().is_none() && sandbox != Sandbox::Off {
        let to = Confinement { filters: filters()?, files: sandbox == Sandbox::On };
        let trial = std::thread::scope(|scope| {
            let thread = Builder::new().name("trial".into());
            let ended = thread.spawn_scoped(scope, || {
                // The most that there is: what enters as a control thread may enter as another.
                to.enter(ThreadKind::Control)?;
                to.enter(ThreadKind::Closer)
            });
            ended.map_err(ConfineError::Refused)?.join().expect("it does not panic")
        });
        trial?;
        let _ = CONFINEMENT.set(to);
    }
    Ok(())
}

/// Confines this thread, and those that it starts by [`spawn`], to what a thread of this kind does;
/// nothing without [`enable_confinement`] before.
///
/// # Errors
/// [`ConfineError::Refused`]
pub fn confine(kind: ThreadKind) -> Result<(), ConfineError> {
    let Some(to) = CONFINEMENT.get() else { return Ok(()) };
    to.enter(kind)?;
    CONFINED.set(Some(kind));
    Ok(())
}

/// Whether this thread may start threads of any kind.
pub fn may_spawn() -> bool {
    matches!(CONFINED.get(), None | Some(ThreadKind::Control))
}

/// Starts a thread, confined to what one of this kind does. If this thread may not start any kind,
/// the new one is confined to what this one does.
///
/// # Errors
/// It cannot be started.
pub fn spawn(
    builder: Builder,
    kind: ThreadKind,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let inherited = CONFINED.get().filter(|_| !may_spawn());
    builder.spawn(move || {
        if inherited.is_some() {
            CONFINED.set(inherited);
        } else if let Err(error) = confine(kind) {
            // It was tried when confinement was enabled.
            panic!("{error}");
        }
        run();
    })
}

/// Capabilities that ports need which are made at run time: interfaces and their queues, network
/// namespaces, groups of sockets, device nodes, locked memory, ports of TCP below 1024.
const KEPT: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE);

impl Confinement {
    fn enter(&self, kind: ThreadKind) -> Result<(), ConfineError> {
        let refused = |error: rustix::io::Errno| ConfineError::Refused(error.into());
        let kept = if kind == ThreadKind::Control { KEPT } else { CapabilitySet::empty() };
        let now = capabilities(None).map_err(refused)?;
        let (effective, permitted) = (now.effective & kept, now.permitted & kept);
        let less = CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() };
        // A filter around this process may refuse the call: it is for processes with capabilities.
        if now != less {
            set_capabilities(None, less).map_err(refused)?;
        }
        if kind == ThreadKind::Control && self.files {
            files::protect().map_err(ConfineError::Files)?;
        }
        for filter in &self.filters[kind as usize] {
            apply_filter(filter).map_err(|error| {
                ConfineError::Refused(match error {
                    seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                    other => io::Error::other(other),
                })
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
