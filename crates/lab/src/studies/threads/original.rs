//! Claims of the original study: the cover letter of netback's multiple threads.

/// One of its two cases.
pub struct Claim {
    /// The case, as published.
    pub case: &'static str,
    /// Minimum of CPUs of dom0, and of threads, of the case.
    pub workers: u32,
    /// Ratio of throughput with to without the patch.
    pub speed_up: f64,
}

/// Throughput itself is not published, nor the size of frames (netperf's default: full ones).
pub const CLAIMS: [Claim; 2] = [
    Claim { case: "4 vcpus, pinned", workers: 4, speed_up: 3.7 },
    Claim { case: "more than 10 vcpus, pinned", workers: 11, speed_up: 2.0 },
];

/// The claim for this number of workers, if any.
pub fn claim_of(workers: u32) -> Option<&'static Claim> {
    CLAIMS.iter().find(|claim| match claim.workers {
        4 => workers == 4,
        least => workers >= least,
    })
}
