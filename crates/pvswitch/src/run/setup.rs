//! What a run needs of the system before it starts.

use super::{RunError, os};

/// Each port takes some descriptors, and front-ends bring more: as many as we may have. What the
/// system refuses is told when they run out.
pub(super) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
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
