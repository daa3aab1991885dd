//! What the seed claims: seeds 001, the cover letter of netback's multiple threads.

/// One of its two cases.
pub struct Claim {
    /// As it says.
    pub case: &'static str,
    /// CPUs of dom0, and threads: the fewest that the case allows.
    pub workers: u32,
    /// Throughput with the patch over that without.
    pub speed_up: f64,
}

/// Throughput itself is not told, nor the size of frames (netperf's default: full ones).
pub const CLAIMS: [Claim; 2] = [
    Claim { case: "4 vcpus, pinned", workers: 4, speed_up: 3.7 },
    Claim { case: "more than 10 vcpus, pinned", workers: 11, speed_up: 2.0 },
];

/// The claim for so many workers; none where there is none.
pub fn claim_of(workers: u32) -> Option<&'static Claim> {
    CLAIMS.iter().find(|claim| match claim.workers {
        4 => workers == 4,
        least => workers >= least,
    })
}
