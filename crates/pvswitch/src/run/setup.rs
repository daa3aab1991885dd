//! What a run needs of the system before it starts.

use switch::account::Budgets;

use super::{RunError, os};

/// Each port takes some descriptors, and front-ends bring more: as many as we may have. What the
/// system refuses is told when they run out.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Address space that peers' memory may take where the system sets no limit: three quarters of
/// what a process has (47 bits).
const MAPPED_BYTES: u64 = 96 << 40;
/// Mappings and descriptors that the process needs for itself.
const OWN_MAPPINGS: u64 = 4096;
const OWN_DESCRIPTORS: u64 = 256;
/// Mappings of a process where the system does not say (`vm.max_map_count`).
const MAPPINGS: u64 = 65_530;

/// What all ports together may hold, by the limits of the process.
pub(super) fn budgets() -> Budgets {
    use rustix::process::{Resource, getrlimit};
    let limit = |resource| getrlimit(resource).current.unwrap_or(u64::MAX);
    let mapped = limit(Resource::As) / 4 * 3;
    let mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let mappings = mappings.and_then(|n| n.trim().parse().ok()).unwrap_or(MAPPINGS);
    let descriptors = limit(Resource::Nofile);
    Budgets::new(
        mapped.min(MAPPED_BYTES),
        mappings.saturating_sub(OWN_MAPPINGS),
        descriptors.saturating_sub(OWN_DESCRIPTORS),
    )
}

/// A key no guest can know.
pub(super) fn random_key() -> Result<[u64; 3], RunError> {
    let mut bytes = [0_u8; 24];
    let file = std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut bytes));
    file.map_err(os("/dev/urandom"))?;
    let word = |i: usize| u64::from_ne_bytes(std::array::from_fn(|b| bytes[i * 8 + b]));
    Ok([word(0), word(1), word(2)])
}
