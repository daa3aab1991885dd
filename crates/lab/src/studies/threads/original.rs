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

/// What the case of four CPUs says of two: 3.7 is two doublings, each of which gives as much.
const OF_TWO: Claim =
    Claim { case: "4 vcpus, pinned, each doubling of them", workers: 2, speed_up: 1.92 };

/// What is judged of this number of workers, if anything: what was published, or follows from it.
pub fn judged(workers: u32) -> Option<&'static Claim> {
    if workers == OF_TWO.workers { Some(&OF_TWO) } else { claim_of(workers) }
}

/// What was published of this number of workers, if anything.
pub fn claim_of(workers: u32) -> Option<&'static Claim> {
    CLAIMS.iter().find(|claim| match claim.workers {
        4 => workers == 4,
        least => workers >= least,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_doublings_of_two_workers_are_four() {
        let [of_two, of_four] = [2, 4].map(|workers| judged(workers).unwrap().speed_up);
        assert!((of_two.powi(2) - of_four).abs() < 0.05);
        assert!(judged(1).is_none() && judged(3).is_none() && claim_of(2).is_none());
        assert!((claim_of(16).unwrap().speed_up - 2.0).abs() < f64::EPSILON);
    }
}
