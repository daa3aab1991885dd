//! Guests in User-Mode Linux. Channels are terminals.
//!
//! ```text
//!   `guest uml ARGS` (host) ── exec ── linux.uml ARGS
//! ```
//!
//! Linux 6.1 has no room for the registers of AMX. It writes a process's registers back by
//! `PTRACE_SETREGSET`, which then fails, and no process runs. On a processor without extended
//! registers it uses another call; it takes a processor for one if `PTRACE_GETREGSET` fails.
//! Extended registers are then lost at each page fault: the guest's C library may not use them.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::super::installed::need;
use super::agent::Setup;
use super::plan::Plan;
use crate::error::{Error, Fail};

/// Boot time of a guest, in seconds of CPU time.
pub(super) const BOOT_S: f64 = 2.0;
const PROGRAM: &str = "linux.uml";
const MODULES_DIR: &str = "/usr/lib/uml/modules";
const MODULES: [&str; 3] =
    ["net/core/failover.ko", "drivers/net/net_failover.ko", "drivers/net/virtio_net.ko"];
/// `PTRACE_GETREGSET`: the type of `libc`'s differs with the C library.
const GETREGSET: u64 = 0x4204;
/// Has the guest's C library use no extended registers.
const TUNABLES: &str = "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,\
                        -AVX_Fast_Unaligned_Load,-RTM,-XSAVEC,-XSAVE,-ERMS,-FSRM";

/// Replaces this process by `linux.uml` with these arguments.
///
/// # Errors
/// It is not installed, or system calls cannot be filtered.
pub fn run(args: &[String]) -> Result<u8, Error> {
    need(PROGRAM).map_err(|missing| Error::failed(missing.to_string()))?;
    let mut command = Command::new(PROGRAM);
    if cpu_has("amx_tile") {
        hide_registers().map_err(|error| Error::failed(format!("seccomp: {error}")))?;
        command.arg(TUNABLES);
    }
    Err(Error::failed(format!("{PROGRAM}: {}", command.args(args).exec())))
}

/// Whether the processor has a feature, named as in `/proc/cpuinfo`.
fn cpu_has(flag: &str) -> bool {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpus.split_ascii_whitespace().any(|word| word == flag)
}

/// Has `PTRACE_GETREGSET` fail in this process and its children.
fn hide_registers() -> Result<(), seccompiler::Error> {
    let is_get = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, GETREGSET)?;
    let rules = [(libc::SYS_ptrace, vec![SeccompRule::new(vec![is_get])?])].into_iter().collect();
    let fails = SeccompAction::Errno(libc::EINVAL.unsigned_abs());
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, fails, arch)?;
    let filter: BpfProgram = filter.try_into()?;
    apply_filter(&filter)
}

/// Returns the program and its arguments.
pub(super) fn command_line(plan: &Plan) -> Result<Vec<String>, Fail> {
    need(PROGRAM)?;
    let setup = Setup { modules: modules()?, ..plan.setup.clone() };
    let lines = [
        format!("{} guest uml", plan.agent.display()),
        "mem=256M".into(),
        "root=/dev/root rootfstype=hostfs rootflags=/ ro devtmpfs.mount=0".into(),
        format!("uml_dir={}/", plan.folder.display()),
        format!("virtio_uml.device={}:1", plan.socket),
        format!("loglevel=4 con=null con0=null,fd:{}", plan.console.as_raw_fd()),
        format!("init={}", plan.agent.display()),
    ];
    let words = lines.iter().flat_map(|line| line.split(' ').map(String::from));
    let channels = plan.channels.iter().enumerate().map(|(i, [to, from])| {
        format!("con{}=fd:{},fd:{}", i + 1, to.as_raw_fd(), from.as_raw_fd())
    });
    let serve = ["--", "guest", "serve"].map(String::from);
    Ok(words.chain(channels).chain(serve).chain(setup.args()).collect())
}

/// Returns the paths of the modules of the network driver.
fn modules() -> Result<Vec<String>, Fail> {
    let kernels = std::fs::read_dir(MODULES_DIR).into_iter().flatten().flatten();
    for kernel in kernels {
        let all = MODULES.map(|module| kernel.path().join("kernel").join(module));
        if all.iter().all(|path| path.exists()) {
            return Ok(all.iter().map(|path| path.display().to_string()).collect());
        }
    }
    Err(Fail::Missing(format!(
        "{MODULES_DIR}: no module virtio_net (Debian package user-mode-linux)"
    )))
}
