//! Programs that the lab starts: their paths and Debian packages.

use std::path::PathBuf;

use rustix::fs::Access;

use crate::error::Fail;

/// Programs that may be missing, and the Debian package of each.
const PACKAGES: [(&str, &str); 21] = [
    ("iperf3", "iperf3"),
    ("ping", "iputils-ping"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ethtool", "ethtool"),
    ("nft", "nftables"),
    ("nsenter", "util-linux"),
    ("taskset", "util-linux"),
    ("chrt", "util-linux"),
    ("unshare", "util-linux"),
    ("vde_switch", "vde-switch"),
    ("vde_plug2tap", "vde2"),
    ("dpdk-testpmd", "dpdk-dev"),
    ("ovsdb-tool", "openvswitch-common"),
    ("ovsdb-server", "openvswitch-common"),
    ("ovs-vsctl", "openvswitch-switch"),
    ("/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk", "openvswitch-switch-dpdk"),
    ("linux.uml", "user-mode-linux"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("strace", "strace"),
];

/// Path of a program; `None` if it is not installed.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let runs = |path: &PathBuf| rustix::fs::access(path, Access::EXEC_OK).is_ok();
    // `join` with an absolute path yields that path.
    search_path().into_iter().map(|folder| folder.join(program)).find(runs)
}

/// Fails with the name of the package if a program is not installed.
pub fn need(program: &str) -> Result<(), Fail> {
    if find(program).is_some() {
        return Ok(());
    }
    let package = PACKAGES.iter().find(|(name, _)| *name == program).map(|(_, package)| package);
    Err(Fail::Missing(match package {
        Some(package) => format!("{program} is not installed (Debian package {package})"),
        None => format!("{program} is not installed"),
    }))
}

/// Folders to search for programs. Network tools are in `sbin`, which `PATH` may lack.
pub(super) fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect()
}
