//! Each call is made by a thread of a process of its own: the test's program, started once more.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use seccompiler::{SeccompAction, SeccompFilter, TargetArch};

use super::lists::Rules;
use super::*;

/// Name of the variable with a kind and a call, for the process that makes it.
const CASE: &str = "PVSWITCH_CONFINED_CALL";
const SURVIVED: i32 = 42;

/// A system call, with its first three arguments.
struct Call(&'static str, libc::c_long, [libc::c_long; 3]);

/// Calls that no thread may make that serves peers.
const FORBIDDEN_TO_PEERS: &[Call] = &[
    Call("socket", libc::SYS_socket, [1, 1, 0]),
    Call("connect", libc::SYS_connect, [-1, 0, 0]),
    Call("bind", libc::SYS_bind, [-1, 0, 0]),
    Call("memfd_create", libc::SYS_memfd_create, [0, 0, 0]),
    Call("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0]),
    Call("ioctl of a TAP", libc::SYS_ioctl, [-1, libc::TUNSETIFF as _, 0]),
    Call("seccomp", libc::SYS_seccomp, [0, 0, 0]),
    Call("capset", libc::SYS_capset, [0, 0, 0]),
    Call("bpf to create a map", libc::SYS_bpf, [0, 0, 0]),
    Call("setns, network", libc::SYS_setns, [-1, libc::CLONE_NEWNET as _, 0]),
    Call("exit_group", libc::SYS_exit_group, [0, 0, 0]),
];

/// Calls that no kind may make.
const FORBIDDEN: &[Call] = &[
    Call("socket of another family", libc::SYS_socket, [libc::AF_VSOCK as _, 1, 0]),
    Call("execveat", libc::SYS_execveat, [-1, 0, 0]),
    Call("vfork", libc::SYS_clone, [(libc::CLONE_VM | libc::CLONE_VFORK) as _, 0, 0]),
    Call("process_vm_readv", libc::SYS_process_vm_readv, [-1, 0, 0]),
    Call("pidfd_getfd", libc::SYS_pidfd_getfd, [-1, 0, 0]),
    Call("pidfd_send_signal", libc::SYS_pidfd_send_signal, [-1, 0, 0]),
    Call("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0]),
    Call("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0]),
    Call("init_module", libc::SYS_init_module, [0, 0, 0]),
    Call("finit_module", libc::SYS_finit_module, [-1, 0, 0]),
    Call("keyctl", libc::SYS_keyctl, [-1, 0, 0]),
    Call("chroot", libc::SYS_chroot, [0, 0, 0]),
    Call("mknodat", libc::SYS_mknodat, [-1, 0, 0]),
    Call("symlinkat", libc::SYS_symlinkat, [0, -1, 0]),
    Call("execve", libc::SYS_execve, [0, 0, 0]),
    Call("clone as fork", libc::SYS_clone, [libc::SIGCHLD as libc::c_long, 0, 0]),
    Call("kill", libc::SYS_kill, [0, 0, 0]),
    Call("tgkill of another process", libc::SYS_tgkill, [1, 1, 0]),
    Call("tkill", libc::SYS_tkill, [-1, 0, 0]),
    Call("ptrace", libc::SYS_ptrace, [-1, 0, 0]),
    Call("process_vm_writev", libc::SYS_process_vm_writev, [-1, 0, 0]),
    Call("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0]),
    Call("mmap, executable", libc::SYS_mmap, [0, 4096, (libc::PROT_READ | libc::PROT_EXEC) as _]),
    Call("mprotect, executable", libc::SYS_mprotect, [0, 0, libc::PROT_EXEC as _]),
    Call("pkey_mprotect", libc::SYS_pkey_mprotect, [0, 0, 0]),
    Call("ioctl of a terminal", libc::SYS_ioctl, [-1, libc::TIOCSTI as _, 0]),
    Call("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as _, 1, 0]),
    Call("setuid", libc::SYS_setuid, [0, 0, 0]),
    Call("unshare", libc::SYS_unshare, [0, 0, 0]),
    Call("setns, any", libc::SYS_setns, [-1, 0, 0]),
    Call("mount", libc::SYS_mount, [0, 0, 0]),
    Call("bpf, unknown", libc::SYS_bpf, [-1, 0, 0]),
    Call("open_by_handle_at", libc::SYS_open_by_handle_at, [-1, 0, 0]),
    Call("openat2", libc::SYS_openat2, [-1, 0, 0]),
    Call("sched_setscheduler", libc::SYS_sched_setscheduler, [0, 0, 0]),
];

/// Calls that fail as if the kernel did not have them.
const MISSING: &[Call] = &[
    Call("openat", libc::SYS_openat, [libc::AT_FDCWD as _, 0, 0]),
    Call("readlinkat", libc::SYS_readlinkat, [-1, 0, 0]),
    Call("getcwd", libc::SYS_getcwd, [0, 0, 0]),
    Call("clone3", libc::SYS_clone3, [0, 0, 0]),
];

impl Call {
    /// Makes it, and returns its error.
    fn make(&self) -> Option<i32> {
        crate::sys::harmless_call(self.1, self.2).err().and_then(|error| error.raw_os_error())
    }
}

/// Runs this program again: a thread of this kind makes this call there.
fn made_by(kind: ThreadKind, what: &str) -> ExitStatus {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "confine::tests::confined_thread"]);
    command.env(CASE, format!("{}:{what}", kind as usize)).output().unwrap().status
}

/// What [`made_by`] starts; nothing otherwise.
#[test]
fn confined_thread() {
    let Ok(case) = std::env::var(CASE) else { return };
    let (kind, what) = case.split_once(':').unwrap();
    let kind = ThreadKind::ALL[kind.parse::<usize>().unwrap()];
    let what = what.to_string();
    enable_confinement(Sandbox::On).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let builder = Builder::new().name("confined".into());
    let thread = spawn(builder, kind, move || {
        assert_eq!(may_spawn(), kind == ThreadKind::Control);
        let found = FORBIDDEN.iter().chain(FORBIDDEN_TO_PEERS).find(|call| call.0 == what);
        match what.as_str() {
            "status" => {}
            "abort" => std::process::abort(),
            "thread" => {
                let (sender, receiver) = std::sync::mpsc::channel();
                let builder = Builder::new().name("another".into());
                let run = move || sender.send(may_spawn()).unwrap();
                let kind = if may_spawn() { ThreadKind::Worker } else { kind };
                spawn(builder, kind, run).unwrap().join().unwrap();
                assert!(!receiver.recv().unwrap());
            }
            "missing" => {
                for each in MISSING {
                    assert_eq!(each.make(), Some(libc::ENOSYS), "{}", each.0);
                }
                assert!(std::fs::File::open("/dev/null").is_err());
            }
            "usual" => usual(),
            "files" => files(),
            _ => drop(found.expect("it is in the list").make()),
        }
        sender.send(gettid()).unwrap();
        // Its status is read meanwhile, by a thread that can open files; the process then ends.
        loop {
            std::thread::park();
        }
    });
    let thread = thread.unwrap();
    let Ok(tid) = receiver.recv() else {
        thread.join().unwrap();
        unreachable!("it did not end in order");
    };
    let status =
        std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap_or_default();
    if what_is(&case, "status") {
        for line in ["Seccomp:\t2", "NoNewPrivs:\t1"] {
            assert!(status.contains(line), "{line}: {status}");
        }
        let of = status.lines().find_map(|line| line.strip_prefix("CapEff:\t")).unwrap();
        let has = u64::from_str_radix(of, 16).unwrap();
        let kept = if kind == ThreadKind::Control { KEPT.bits() } else { 0 };
        assert_eq!(has & !kept, 0, "{status}");
    }
    std::process::exit(SURVIVED);
}

/// What a control thread may do with files, and may not.
fn files() {
    use std::fs::{File, OpenOptions};
    use std::os::unix::net::UnixListener;
    let dir = std::env::temp_dir().join(format!("pvs-files-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let _socket = UnixListener::bind(dir.join("socket")).unwrap();
    std::fs::rename(dir.join("socket"), dir.join("other")).unwrap();
    std::fs::remove_file(dir.join("other")).unwrap();
    let denied = |result: io::Result<File>| {
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    };
    denied(File::create(dir.join("file")));
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    denied(OpenOptions::new().write(true).open(own));
    denied(OpenOptions::new().write(true).open("/proc/self/comm"));
    denied(File::open("/proc/1/mem"));
    File::open(own).unwrap();
    OpenOptions::new().write(true).open("/dev/null").unwrap();
    let memory = crate::memfd("t", 1).unwrap();
    crate::write(memory.as_fd(), b"x").unwrap();
    std::fs::remove_dir(dir).unwrap();
}

fn what_is(case: &str, what: &str) -> bool {
    case.split_once(':').is_some_and(|(_, of)| of == what)
}

fn gettid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// What every kind does all the time.
fn usual() {
    // Larger than what the allocator keeps, and grown in place or moved.
    let mut memory = vec![1_u8; 8 << 20];
    memory.resize(64 << 20, 2);
    drop(memory);
    let small: Vec<_> = (0..10_000).map(|i| vec![0_u8; i % 100]).collect();
    drop(small);
    std::thread::sleep(std::time::Duration::from_micros(1));
    let _ = std::collections::HashMap::<u8, u8>::new();
    let lock = std::sync::Mutex::new(0);
    let waited = std::sync::Condvar::new()
        .wait_timeout(lock.lock().unwrap(), std::time::Duration::from_micros(1));
    assert!(waited.unwrap().1.timed_out());
    eprintln!("a line of a log");
    let _ = std::panic::catch_unwind(|| panic!("a panic"));
}

#[test]
fn forbidden_calls_end_the_process() {
    for kind in ThreadKind::ALL {
        for Call(name, ..) in FORBIDDEN {
            let status = made_by(kind, name);
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{kind:?}, {name}: {status}");
        }
        for Call(name, ..) in FORBIDDEN_TO_PEERS.iter().filter(|_| kind != ThreadKind::Control) {
            let status = made_by(kind, name);
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{kind:?}, {name}: {status}");
        }
    }
}

#[test]
fn a_control_thread_makes_what_ports_need_and_no_other_process() {
    for name in ["socket", "memfd_create", "ioctl of a TAP", "setns, network", "seccomp", "files"] {
        let status = made_by(ThreadKind::Control, name);
        assert_eq!(status.code(), Some(SURVIVED), "{name}: {status}");
    }
}

#[test]
fn calls_of_libraries_fail_and_usual_ones_do_not() {
    for kind in ThreadKind::ALL {
        for what in ["missing", "usual", "status"] {
            if what == "missing" && kind == ThreadKind::Control {
                continue;
            }
            let status = made_by(kind, what);
            assert_eq!(status.code(), Some(SURVIVED), "{kind:?}, {what}: {status}");
        }
        let status = made_by(kind, "abort");
        assert_eq!(status.signal(), Some(libc::SIGABRT), "{kind:?}, abort: {status}");
    }
}

#[test]
fn only_closers_and_the_control_thread_start_threads_which_are_confined() {
    for kind in ThreadKind::ALL {
        let status = made_by(kind, "thread");
        if matches!(kind, ThreadKind::Closer | ThreadKind::Control) {
            assert_eq!(status.code(), Some(SURVIVED), "{status}");
        } else {
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{kind:?}: {status}");
        }
    }
}

/// A container's filter that refuses the calls which this needs.
#[test]
fn a_system_without_filters_is_an_error() {
    for call in [libc::SYS_seccomp, libc::SYS_capset, libc::SYS_landlock_create_ruleset] {
        let rules: Rules = [(call, Vec::new())].into_iter().collect();
        let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap();
        let filter: BpfProgram = filter.try_into().unwrap();
        let got = std::thread::spawn(move || {
            apply_filter(&filter).unwrap();
            Confinement { filters: filters().unwrap(), files: true }.enter(ThreadKind::Control)
        });
        let error = got.join().unwrap().unwrap_err();
        let files = call == libc::SYS_landlock_create_ruleset;
        assert_eq!(matches!(error, ConfineError::Files(_)), files, "{error}");
        assert!(error.to_string().contains("container"), "{error}");
    }
}
