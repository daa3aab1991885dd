//! Storm control: limits of frames that a port floods, by kind.

use std::sync::atomic::Ordering;

use super::{Forwarder, Port, Source};
use crate::account::RateLimits;
use crate::flow;
use crate::frame::Frame;
use crate::offload;
use crate::time::Instant;

/// Limits of flooded frames; each kind has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StormLimits {
    /// Frames to all.
    pub broadcast: RateLimits,
    /// Frames to other groups.
    pub multicast: RateLimits,
    /// Frames to addresses that no port is known for.
    pub unknown: RateLimits,
}

impl Port {
    /// Limits what its peer floods; the buckets are full then.
    pub fn set_storm(&self, limits: StormLimits) {
        let StormLimits { broadcast, multicast, unknown } = limits;
        for (limiter, limits) in self.account.storm.iter().zip([broadcast, multicast, unknown]) {
            limiter.set(limits);
        }
        self.has_storm.store(limits != StormLimits::default(), Ordering::Relaxed);
    }
}

impl Forwarder {
    /// Charges a frame that is to be flooded to the limit of its kind. False: it is dropped, and
    /// counted. `head`: its private first bytes.
    pub(super) fn admit_flood(
        &self,
        from: &Source,
        head: &[u8],
        frame: &Frame,
        now: Instant,
    ) -> bool {
        let sender = self.port(from.port).filter(|port| port.has_storm.load(Ordering::Relaxed));
        let Some(sender) = sender else { return true };
        let [broadcast, multicast, unknown] = &sender.account.storm;
        let (limiter, drops) = match flow::dst_mac(head) {
            Some([0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) => {
                (broadcast, &from.stats.drops_storm_broadcast)
            }
            Some(dst) if flow::is_multicast(dst) => (multicast, &from.stats.drops_storm_multicast),
            _ => (unknown, &from.stats.drops_storm_unknown),
        };
        let (frames, bytes) = offload::on_wire(head, frame.len, &frame.hdr);
        let admits = limiter.admit(frames, bytes, now);
        drops.add(u64::from(!admits));
        admits
    }
}
