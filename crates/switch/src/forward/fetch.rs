//! Granted frames copied to private memory, as far as their destination needs that.

use super::Group;
use crate::frame::Burst;
use crate::offload;
use crate::vnet::Offloads;

/// Copies granted frames to private memory: all if the destination does not accept grants,
/// otherwise those that need offloads in software. Unreadable frames are dropped.
#[cold]
pub(super) fn fetch(burst: &mut Burst<'_>, group: &mut Group, takes: &Offloads, as_it_is: bool) {
    let needs_work = |burst: &Burst<'_>, i: usize| {
        let hdr = burst.frames[i].hdr;
        !hdr.is_plain() && offload::needs_work(burst.head(i), &hdr, takes)
    };
    let mut wanted = 0_u64;
    for i in group.picks.iter().map(|pick| usize::from(*pick)) {
        wanted |= u64::from(!as_it_is || needs_work(burst, i)) << i;
    }
    burst.fetch((0..burst.frames.len()).filter(|i| wanted & 1 << i != 0));
    if burst.any_excluded() {
        group.retain(|i| !burst.loses(i));
    }
}
