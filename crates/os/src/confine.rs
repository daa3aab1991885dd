//! What a thread may request of the kernel: a list of system calls for each kind of thread
//! (seccomp), no capability, and no new privileges.
//!
//! A thread that makes another call ends the process with SIGSYS, and the kernel's log names thread
//! and call. Calls that libraries make where they can do without them fail with ENOSYS instead.
//!
//! A filter binds the thread that enters it, and the threads that it starts; so each kind enters at
//! its start. A thread's list holds what it does after that.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

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
    /// There is no list for this processor.
    #[error("system calls cannot be filtered: no filters for this kind of processor")]
    Processor,
}

/// Filters of a kind, in the order in which they are entered.
type Filters = [BpfProgram; 2];

static FILTERS: OnceLock<[Filters; 4]> = OnceLock::new();

thread_local! {
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

impl ThreadKind {
    const ALL: [Self; 4] = [Self::Worker, Self::Closer, Self::Http, Self::Capture];
}

/// Has threads confined that enter from now on, and tries it on one.
///
/// # Errors
/// See [`ConfineError`]; nothing was changed.
pub fn enable_confinement() -> Result<(), ConfineError> {
    if FILTERS.get().is_none() {
        let filters = filters()?;
        let trial = std::thread::scope(|scope| {
            let thread = Builder::new().name("trial".into());
            let ended = thread.spawn_scoped(scope, || enter(&filters[ThreadKind::Closer as usize]));
            ended.map_err(ConfineError::Refused)?.join().expect("it does not panic")
        });
        trial?;
        let _ = FILTERS.set(filters);
    }
    Ok(())
}

/// Confines this thread, and those that it starts by [`spawn`], to what a thread of this kind does;
/// nothing without [`enable_confinement`] before.
///
/// # Errors
/// [`ConfineError::Refused`]
pub fn confine(kind: ThreadKind) -> Result<(), ConfineError> {
    let Some(filters) = FILTERS.get() else { return Ok(()) };
    enter(&filters[kind as usize])?;
    CONFINED.set(true);
    Ok(())
}

/// Whether this thread is confined.
pub fn is_confined() -> bool {
    CONFINED.get()
}

/// Starts a thread, confined to what one of this kind does. If this thread is confined, the new one
/// is to what this one does.
///
/// # Errors
/// It cannot be started.
pub fn spawn(
    builder: Builder,
    kind: ThreadKind,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let inherits = is_confined();
    builder.spawn(move || {
        if inherits {
            CONFINED.set(true);
        } else if let Err(error) = confine(kind) {
            // It was tried when confinement was enabled.
            panic!("{error}");
        }
        run();
    })
}

fn enter(filters: &Filters) -> Result<(), ConfineError> {
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let refused = |error: rustix::io::Errno| ConfineError::Refused(error.into());
    // A filter around this process may refuse the call: it is for processes with capabilities.
    if capabilities(None).map_err(refused)? != none {
        set_capabilities(None, none).map_err(refused)?;
    }
    for filter in filters {
        apply_filter(filter).map_err(|error| {
            ConfineError::Refused(match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                other => io::Error::other(other),
            })
        })?;
    }
    Ok(())
}

// ---- lists ----

/// Memory, locks, clocks, the end of a thread, and what is open already; for all kinds.
const COMMON: &[libc::c_long] = &[
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_fcntl,
    libc::SYS_epoll_ctl,
];

/// Older forms of calls, which newer processors do not have: permitted, and absent.
#[cfg(target_arch = "x86_64")]
const OLDER: [&[libc::c_long]; 2] = [
    &[libc::SYS_poll, libc::SYS_epoll_wait],
    &[libc::SYS_open, libc::SYS_stat, libc::SYS_readlink, libc::SYS_access],
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [&[libc::c_long]; 2] = [&[], &[]];

/// Batches on peers' and uplinks' descriptors, and waits for them.
const WORKER: &[libc::c_long] = &[
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_getsockopt,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_getrusage,
];

/// Starts of further threads; clone and prctl in part.
const CLOSER: &[libc::c_long] = &[libc::SYS_set_robust_list, libc::SYS_rseq];

const HTTP: &[libc::c_long] = &[
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_shutdown,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
];

const CAPTURE: &[libc::c_long] = &[libc::SYS_recvfrom, libc::SYS_ppoll];

/// As if the kernel did not have them: files that libraries read for hints and backtraces, and
/// threads, which the C library starts in another way then.
const ABSENT: &[libc::c_long] = &[
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getcwd,
    libc::SYS_clone3,
];

/// Kinds of ioctls, as in `_IOC`: event channels and grants of Xen.
const IOCTLS_XEN: [u64; 2] = [(b'E' as u64) << 8, (b'G' as u64) << 8];
/// `FIONBIO`: whether a call may block. The type of `libc`'s differs with the C library.
const FIONBIO: u64 = 0x5421;
/// Kind of an ioctl.
const IOCTL_KIND: u64 = 0xff00;

fn filters() -> Result<[Filters; 4], ConfineError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH);
    let arch = arch.map_err(|_| ConfineError::Processor)?;
    let compile = |rules, mismatch, matches| -> BpfProgram {
        let filter = SeccompFilter::new(rules, mismatch, matches, arch);
        filter.and_then(TryInto::try_into).expect("the lists are valid")
    };
    let absent = ABSENT.iter().chain(OLDER[1]).map(|call| (*call, Vec::new())).collect();
    let enosys = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let absent = compile(absent, SeccompAction::Allow, enosys);
    Ok(ThreadKind::ALL.map(|kind| {
        let listed = compile(list(kind), SeccompAction::KillProcess, SeccompAction::Allow);
        [absent.clone(), listed]
    }))
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls of a kind. No rule: with any arguments.
fn list(kind: ThreadKind) -> Rules {
    let own = match kind {
        ThreadKind::Worker => WORKER,
        ThreadKind::Closer => CLOSER,
        ThreadKind::Http => HTTP,
        ThreadKind::Capture => CAPTURE,
    };
    // The other filter answers those that are absent.
    let calls = [COMMON, OLDER[0], own, ABSENT, OLDER[1]].into_iter().flatten();
    let mut rules: Rules = calls.map(|call| (*call, Vec::new())).collect();
    // No memory can be executed.
    let no_exec = || vec![where_masked(2, libc::PROT_EXEC as u64, 0)];
    rules.insert(libc::SYS_mmap, no_exec());
    rules.insert(libc::SYS_mprotect, no_exec());
    // abort() and raise()
    let own_process = vec![where_masked(0, u64::MAX, std::process::id().into())];
    rules.insert(libc::SYS_tgkill, own_process);
    let ioctls: &[u64] = match kind {
        ThreadKind::Worker => &IOCTLS_XEN,
        _ => &[],
    };
    let mut ioctls: Vec<_> = ioctls.iter().map(|kind| where_masked(1, IOCTL_KIND, *kind)).collect();
    ioctls.push(where_masked(1, u64::MAX, FIONBIO));
    rules.insert(libc::SYS_ioctl, ioctls);
    if kind == ThreadKind::Closer {
        let thread = libc::CLONE_THREAD as u64;
        rules.insert(libc::SYS_clone, vec![where_masked(0, thread, thread)]);
        let set_name = where_masked(0, u64::MAX, libc::PR_SET_NAME as u64);
        rules.insert(libc::SYS_prctl, vec![set_name]);
    }
    rules
}

/// The low 32 bits of argument `index`, masked, are `value`.
fn where_masked(index: u8, mask: u64, value: u64) -> SeccompRule {
    let mask = SeccompCmpOp::MaskedEq(mask & u64::from(u32::MAX));
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, mask, value);
    let rule = condition.and_then(|condition| SeccompRule::new(vec![condition]));
    rule.expect("the index is that of an argument")
}

#[cfg(test)]
mod tests;
