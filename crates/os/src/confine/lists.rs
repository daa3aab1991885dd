//! The lists of system calls of each kind of thread.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::{ConfineError, Filters, ThreadKind};

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

/// Older forms of calls, which newer processors do not have: permitted, absent, and
/// permitted to the control thread.
#[cfg(target_arch = "x86_64")]
const OLDER: [&[libc::c_long]; 3] = [
    &[libc::SYS_poll, libc::SYS_epoll_wait],
    &[libc::SYS_open, libc::SYS_stat, libc::SYS_readlink, libc::SYS_access],
    &[
        libc::SYS_lstat,
        libc::SYS_mkdir,
        libc::SYS_rmdir,
        libc::SYS_unlink,
        libc::SYS_link,
        libc::SYS_rename,
        libc::SYS_chmod,
        libc::SYS_chown,
        libc::SYS_lchown,
        libc::SYS_dup2,
        libc::SYS_pipe,
        libc::SYS_getrlimit,
    ],
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [&[libc::c_long]; 3] = [&[], &[], &[]];

/// Batches on peers' and uplinks' descriptors, and waits for them.
const WORKER: &[libc::c_long] = &[
    libc::SYS_readv,
    libc::SYS_preadv2,
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
    // What it served when it panicked.
    libc::SYS_pwrite64,
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

/// Files, sockets, devices and rings, all of which other threads get ready; in part: [`list`].
const CONTROL: &[libc::c_long] = &[
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_flock,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_memfd_create,
    libc::SYS_pipe2,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_io_uring_setup,
    libc::SYS_membarrier,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_sched_setaffinity,
    // A thread that is started gets less.
    libc::SYS_seccomp,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_exit_group,
];

/// Families of sockets: of guests, HTTP, links and addresses, packet sockets.
const FAMILIES: [libc::c_int; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_XDP];
/// Of bpf(2): MAP_CREATE, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, PROG_LOAD, OBJ_GET,
/// OBJ_GET_INFO_BY_FD, LINK_CREATE.
const BPF: [u64; 7] = [0, 2, 3, 5, 7, 15, 28];
/// Names of threads and memory, and what a thread does before its own list.
const PRCTL: [libc::c_int; 4] =
    [libc::PR_SET_NAME, libc::PR_SET_VMA, libc::PR_SET_NO_NEW_PRIVS, libc::PR_SET_TIMERSLACK];

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
/// Interfaces and packet sockets.
const IOCTLS_LINK: u64 = 0x8900;
/// TAPs: requests of terminals have the same kind, and lower numbers.
const IOCTLS_TUN: u64 = 0x54c0;
const IOCTL_UPPER: u64 = 0xffc0;
/// Unread bytes: TIOCOUTQ, FIONREAD.
const IOCTLS_QUEUE: [u64; 2] = [0x5411, 0x541b];
/// `FIONBIO`: whether a call may block. The type of `libc`'s differs with the C library.
const FIONBIO: u64 = 0x5421;
/// Kind of an ioctl.
const IOCTL_KIND: u64 = 0xff00;

pub(super) fn filters() -> Result<[Filters; 5], ConfineError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH);
    let arch = arch.map_err(|_| ConfineError::Processor)?;
    let compile = |rules, mismatch, matches| -> BpfProgram {
        let filter = SeccompFilter::new(rules, mismatch, matches, arch);
        filter.and_then(TryInto::try_into).expect("the lists are valid")
    };
    let enosys = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    Ok(ThreadKind::ALL.map(|kind| {
        let absent = absent(kind).map(|call| (call, Vec::new())).collect();
        let absent = compile(absent, SeccompAction::Allow, enosys.clone());
        let listed = compile(list(kind), SeccompAction::KillProcess, SeccompAction::Allow);
        [absent, listed]
    }))
}

/// Calls that a kind does not find.
fn absent(kind: ThreadKind) -> impl Iterator<Item = libc::c_long> {
    let opens_files = kind == ThreadKind::Control;
    let calls = ABSENT.iter().chain(OLDER[1]).copied();
    calls.filter(move |call| !opens_files || *call == libc::SYS_clone3)
}

pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls of a kind. No rule: with any arguments.
fn list(kind: ThreadKind) -> Rules {
    let own: &[&[libc::c_long]] = match kind {
        ThreadKind::Worker => &[WORKER],
        ThreadKind::Closer => &[CLOSER],
        ThreadKind::Http => &[HTTP],
        ThreadKind::Capture => &[CAPTURE],
        // Its threads inherit its list, and each then enters its own.
        ThreadKind::Control => &[WORKER, CLOSER, HTTP, CAPTURE, CONTROL, OLDER[2]],
    };
    // The other filter answers those that are absent.
    let calls = [COMMON, OLDER[0], ABSENT, OLDER[1]].into_iter().chain(own.iter().copied());
    let mut rules: Rules = calls.flatten().map(|call| (*call, Vec::new())).collect();
    // No memory can be executed.
    let no_exec = || vec![where_masked(2, libc::PROT_EXEC as u64, 0)];
    rules.insert(libc::SYS_mmap, no_exec());
    rules.insert(libc::SYS_mprotect, no_exec());
    // abort() and raise()
    rules.insert(libc::SYS_tgkill, vec![where_is(0, std::process::id().into())]);
    let of_kind = |kinds: &[u64]| -> Vec<_> {
        kinds.iter().map(|kind| where_masked(1, IOCTL_KIND, *kind)).collect()
    };
    let mut ioctls = match kind {
        ThreadKind::Worker | ThreadKind::Control => of_kind(&IOCTLS_XEN),
        _ => Vec::new(),
    };
    ioctls.push(where_is(1, FIONBIO));
    if matches!(kind, ThreadKind::Closer | ThreadKind::Control) {
        let thread = libc::CLONE_THREAD as u64;
        rules.insert(libc::SYS_clone, vec![where_masked(0, thread, thread)]);
        rules.insert(libc::SYS_prctl, vec![where_is(0, libc::PR_SET_NAME as u64)]);
    }
    if kind == ThreadKind::Control {
        let any = |index, of: &[libc::c_int]| -> Vec<_> {
            of.iter().map(|value| where_is(index, value.unsigned_abs().into())).collect()
        };
        rules.insert(libc::SYS_socket, any(0, &FAMILIES));
        rules.insert(libc::SYS_prctl, any(0, &PRCTL));
        // Of this thread: the store without Xen has less than others.
        // PRIO_PROCESS, whose type differs with the C library, of 0.
        let own = [(0, 0), (1, 0)];
        rules.insert(libc::SYS_getpriority, vec![where_all(&own)]);
        rules.insert(libc::SYS_setpriority, vec![where_all(&own)]);
        rules.insert(libc::SYS_setns, any(1, &[libc::CLONE_NEWNET]));
        rules.insert(libc::SYS_bpf, BPF.iter().map(|command| where_is(0, *command)).collect());
        ioctls.extend(of_kind(&[IOCTLS_LINK]));
        ioctls.push(where_masked(1, IOCTL_UPPER, IOCTLS_TUN));
        ioctls.extend(IOCTLS_QUEUE.map(|request| where_is(1, request)));
    }
    rules.insert(libc::SYS_ioctl, ioctls);
    rules
}

/// The low 32 bits of argument `index` are `value`.
fn where_is(index: u8, value: u64) -> SeccompRule {
    where_all(&[(index, value)])
}

/// The low 32 bits of each of these arguments have this value.
fn where_all(arguments: &[(u8, u64)]) -> SeccompRule {
    let all = arguments.iter().map(|(index, value)| condition(*index, u64::MAX, *value));
    SeccompRule::new(all.collect()).expect("there is a condition")
}

/// The low 32 bits of argument `index`, masked, are `value`.
fn where_masked(index: u8, mask: u64, value: u64) -> SeccompRule {
    SeccompRule::new(vec![condition(index, mask, value)]).expect("there is a condition")
}

fn condition(index: u8, mask: u64, value: u64) -> SeccompCondition {
    let mask = SeccompCmpOp::MaskedEq(mask & u64::from(u32::MAX));
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, mask, value);
    condition.expect("the index is that of an argument")
}
