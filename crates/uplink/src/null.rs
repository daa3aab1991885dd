//! Null port: no frames come from it, and all frames to it are dropped.

use std::sync::Arc;

use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::stats::EgressStats;
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};

/// A source without frames.
pub struct NullIngress;

/// A destination that counts frames and drops them.
pub struct NullEgress {
    stats: Arc<EgressStats>,
}

impl NullEgress {
    /// Creates egress that counts in `stats`.
    pub fn new(stats: Arc<EgressStats>) -> Self {
        Self { stats }
    }
}

impl Ingress for NullIngress {
    fn burst(
        &mut self,
        _max: usize,
        _now: Instant,
        _burst: &mut Burst<'static>,
        _forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        Ok(0)
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}

impl Egress for NullEgress {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn accepts_starts(&self) -> bool {
        true
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let len = |pick: &u16| u64::from(burst.frames[usize::from(*pick)].len);
        self.stats.groups.add(1);
        self.stats.frames.add(picks.len() as u64);
        self.stats.bytes.add(picks.iter().map(len).sum());
        Ok(picks.len())
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        let body: u64 = body.iter().map(|seg| u64::from(seg.len())).sum();
        self.stats.frames.add(1);
        self.stats.bytes.add(head.len() as u64 + body);
        Ok(true)
    }

    fn room(&mut self, _len: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {}

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_frames_are_accepted_and_counted() {
        let stats = Arc::new(EgressStats::default());
        let mut egress = NullEgress::new(Arc::clone(&stats));
        let mut burst = Burst::default();
        for len in [60, 1500] {
            burst.push_at(0, 0, len, VnetHdr::NONE);
        }
        assert_eq!(egress.put(&burst, &[0, 1]), Ok(2));
        assert_eq!(egress.room(1500, 9), Ok(9));
        assert_eq!(egress.put_parts(&[0; 54], &[Seg::of(&[0; 46])], &VnetHdr::NONE), Ok(true));
        assert_eq!((stats.frames.get(), stats.bytes.get()), (3, 1660));
        assert!(NullIngress.arm());
    }
}
