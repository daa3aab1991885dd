//! Floods: frames for all ports, and those that come back.
//!
//! In a loop through three ports or more, a flood comes back at the home of its source. With
//! `loop-guard=block`, the address of a sender in a loop is blocked at all ports but its home, and
//! not flooded to the port that was refused last. What is flooded to a third port of the loop comes
//! back at the home, where nothing is refused, and would circulate endlessly. So each worker
//! remembers the frames with a blocked source that it flooded from a port with the guard, for
//! [`WINDOW`], and drops those that it sees again: a loop is faster, and an honest sender repeats
//! itself less often.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::bounds::MayFlood;
use super::{Flow, Forwarder, Port, Source, Time};
use crate::fdb::PortId;
use crate::flow;
use crate::frame::Frame;
use crate::port::QueueId;
use crate::tenant::Tenants;
use crate::time::{Instant, Ns};

/// For how long a flooded frame is remembered.
const WINDOW: Ns = Ns::from_ms(100);
/// Frames remembered for a port. More in one window are dropped: one that is not remembered could
/// circulate.
pub(super) const FRAMES: usize = 256;

/// Frames that were flooded, by the port that they came from.
pub(super) struct Echoes {
    /// Hashes of frames, the oldest first; none is there twice.
    ports: BTreeMap<PortId, VecDeque<(u64, Instant)>>,
    key: u64,
}

impl Echoes {
    /// `key` prevents guests from choosing collisions.
    pub fn new(key: u64) -> Self {
        Self { ports: BTreeMap::new(), key }
    }

    /// Hash of a frame, of its head and length.
    pub fn hash(&self, head: &[u8], len: u32) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.key, len, head).hash(&mut hasher);
        hasher.finish()
    }

    /// Whether a frame from this port may be flooded: it was not within the window before `now`,
    /// and there is room to remember it.
    pub fn permit(&mut self, port: PortId, hash: u64, now: Instant) -> bool {
        let frames = self.ports.entry(port).or_default();
        while frames.front().is_some_and(|(_, at)| now - *at >= WINDOW) {
            frames.pop_front();
        }
        frames.len() < FRAMES && frames.iter().all(|(known, _)| *known != hash)
    }

    /// Records that a [permitted](Self::permit) frame is flooded.
    pub fn insert(&mut self, port: PortId, hash: u64, now: Instant) {
        self.ports.entry(port).or_default().push_back((hash, now));
    }
}

impl Forwarder {
    /// Adds frame `i` to a group of each other port, of those that rules permit for its VLAN;
    /// false: it must be left.
    #[cold]
    #[inline(never)]
    pub(super) fn flood(
        &mut self,
        from: &Source,
        i: usize,
        frame: &Frame,
        flow: &mut Flow<'_>,
        rules: Option<(&Tenants, u16)>,
    ) -> bool {
        let Time { now, now_s } = flow.time;
        let table = Arc::clone(&self.table);
        let refused =
            flow::src_mac(flow.head).and_then(|src| self.fdb.refused(src, flow.vlan, now_s));
        let has_guard = self.port(from.port).is_some_and(|port| port.has_loop_guard());
        let echo = refused.filter(|_| has_guard).map(|_| self.echoes.hash(flow.head, frame.len));
        if echo.is_some_and(|hash| !self.echoes.permit(from.port, hash, now)) {
            from.stats.drops_loop_guard.add(1);
            return true;
        }
        let reaches = |port: &Port| {
            let permits = |(rules, vid): (&Tenants, u16)| rules.reaches(from.port, port.id, vid);
            let is_other = port.id != from.port && refused != Some(port.id);
            let takes = port.active() > 0 && !port.mirror.is_reserved() && !port.is_wired();
            is_other && takes && rules.is_none_or(permits)
        };
        let ports = || table.iter().flatten().filter(|port| reaches(port)).count();
        // With rules, the number depends on the frame's VLAN; with a loop, on its source.
        let is_same = rules.is_none() && refused.is_none();
        let ports = if is_same { self.made.ports(ports) } else { ports() };
        if ports == 0 {
            from.stats.drops_no_port.add(1);
            return true;
        }
        match self.may_flood(from, frame, flow, i == 0, ports) {
            MayFlood::Yes => {}
            MayFlood::Later => return false,
            MayFlood::No => return true,
        }
        if let Some(hash) = echo {
            self.echoes.insert(from.port, hash, now);
        }
        // Ports go up and down meanwhile: what is counted is what is made.
        let mut made = 0_u64;
        for port in table.iter().flatten() {
            if reaches(port) {
                made += 1;
                let queue = self.queue_of(port.id, flow);
                let at = self.group_for(QueueId { port: port.id, queue });
                let group = &mut self.groups[at];
                group.floods |= 1 << group.picks.len();
                group.picks.push(i as u16);
            }
        }
        match made {
            0 => from.stats.drops_no_port.add(1),
            _ => from.stats.copies.add(made - 1),
        }
        true
    }
}
