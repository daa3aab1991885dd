//! Huge pages of other switches: each that uses them has them, or is not measured.
//!
//! None needs a file system of huge pages: DPDK (`--in-memory`, which Open vSwitch sets by default)
//! and VPP use `memfd_create`, and Snabb mounts its own.

use super::ends::Sockets;
use crate::error::Fail;
use crate::hugepages::{free_mib, pages, used_kib};
use crate::plan::Plan;
use crate::stage::{Stage, need as installed, wait_for};

/// Peers that use huge pages, and their programs.
const USERS: [(&str, &str); 8] = [
    ("testpmd", "dpdk-testpmd"),
    ("ovs-dpdk", super::ends::OVS_DPDK),
    ("ovs-dpdk-sleep", super::ends::OVS_DPDK),
    ("vpp", "vpp"),
    ("vpp-cross", "vpp"),
    ("snabb", "snabb"),
    ("grout", "grout"),
    ("grout-cross", "grout"),
];
/// Memory options of DPDK, in MiB.
pub(super) const DPDK: &str = "--in-memory -m 512";
/// The same for a program that sets `--in-memory` itself.
pub(super) const DPDK_IN_MEMORY: &str = "-m 512";
/// What has to be free for one of them, in MiB.
const NEEDED_MIB: u64 = 600;
/// What is reserved, in MiB: one may end while the next one starts.
const RESERVED_MIB: u64 = 1024;
/// Longest wait for the pages of one that has ended, in seconds.
const FREED_MAX_S: f64 = 10.0;

/// Returns how much to reserve for a plan, in MiB: none where no peer that uses them is installed.
pub fn wanted_mib(plan: &Plan) -> u64 {
    let has = |peer: &str| plan.axes.iter().any(|axis| axis.values.iter().any(|v| v == peer));
    let any = USERS.iter().any(|(peer, program)| has(peer) && installed(program).is_ok());
    if any { RESERVED_MIB } else { 0 }
}

/// Fails if too few huge pages are free for a peer. If it is not installed, its start says so.
pub(super) fn need(peer: &str) -> Result<(), Fail> {
    let runs = |(name, program): &(&str, &str)| *name == peer && installed(program).is_ok();
    if !USERS.iter().any(runs) {
        return Ok(());
    }
    let enough = wait_for("free huge pages", FREED_MAX_S, || Ok(free_mib() >= NEEDED_MIB));
    enough.map_err(|_| too_few(peer, free_mib()))
}

fn too_few(peer: &str, free_mib: u64) -> Fail {
    Fail::Missing(format!(
        "{peer}: {NEEDED_MIB} MiB of huge pages are needed, {free_mib} MiB are free: run as root, \
         which reserves them, or: sysctl vm.nr_hugepages={}",
        pages(RESERVED_MIB)
    ))
}

impl Sockets {
    /// Records the huge pages of a peer that uses them, once frames have arrived, since Snabb takes
    /// them for the first ones.
    ///
    /// # Errors
    /// It has none: it runs on normal pages.
    pub fn check_huge_pages(&self, stage: &Stage, peer: &str) -> Result<(), Fail> {
        if !USERS.iter().any(|(name, _)| *name == peer) {
            return Ok(());
        }
        let has = judged(peer, used_kib(self.backend))?;
        stage.record_rival(peer, &[has]);
        Ok(())
    }
}

/// What `machine.json` says of a peer with so many KiB of huge pages.
fn judged(peer: &str, kib: u64) -> Result<&'static str, Fail> {
    match kib {
        0 => Err(Fail::Cell(format!("{peer} runs without huge pages, though enough were free"))),
        _ => Ok("has huge pages"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Axis, Scale};
    use crate::study::Study;

    #[test]
    fn only_peers_that_use_huge_pages_need_them() {
        for peer in ["pvswitch", "pvswitch-cross", "bridge", "vde"] {
            assert!(need(peer).is_ok(), "{peer}");
        }
        let mut plan = super::super::Peers.plan(Scale::Usual);
        plan.axes = vec![Axis::new("peer", ["pvswitch", "bridge"])];
        assert_eq!(wanted_mib(&plan), 0);
        for (peer, program) in USERS {
            plan.axes = vec![Axis::new("switch", ["pvswitch", peer])];
            let wanted = if installed(program).is_ok() { RESERVED_MIB } else { 0 };
            assert_eq!(wanted_mib(&plan), wanted, "{peer}");
        }
    }

    #[test]
    fn a_peer_on_normal_pages_has_no_result() {
        let Err(Fail::Cell(why)) = judged("ovs-dpdk", 0) else { panic!("it has") };
        assert!(why.contains("ovs-dpdk runs without huge pages"), "{why}");
        assert_eq!(judged("ovs-dpdk", 2048).unwrap(), "has huge pages");
    }

    #[test]
    fn too_few_free_pages_skip_a_peer_with_what_to_do() {
        let Fail::Missing(why) = too_few("testpmd", 3) else { panic!("no reason to skip") };
        assert!(why.contains("600 MiB of huge pages are needed, 3 MiB are free"), "{why}");
        assert!(why.contains("sysctl vm.nr_hugepages="), "{why}");
    }
}
