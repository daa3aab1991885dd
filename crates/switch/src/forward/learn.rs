//! Learning and look-up of addresses by a worker, and what a port may take from another.

use std::sync::atomic::Ordering;

use super::{Forwarder, Port, PortEvent, Source, Time};
use crate::fdb::{Learned, Mac, PortId, Terms, pack_key};
use crate::flow;

/// What the table said last: caches for a run of frames with the same addresses. Valid for at most
/// a second, and until the table removes or moves an entry: then dropped before the next burst.
/// However often guests make addresses move, that costs a worker a look-up of each address a burst.
#[derive(Default)]
pub(super) struct Last {
    learned: Seen,
    /// The last one of an address that stays at another port.
    elsewhere: Seen,
    found: Found,
}

impl Last {
    /// Whether nothing is learned from, or counted for, a further frame from the same address.
    #[inline]
    pub fn is_learned(&self) -> bool {
        self.learned != Seen::default()
    }
}

/// An address in its VLAN, the port it was seen at, and the second of that. Packed: they are
/// compared for each frame. The default is no address's.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    address: u64,
    at: u64,
}

impl Seen {
    #[inline]
    fn new(mac: [u8; 6], vlan: u16, port: PortId, now_s: u32) -> Self {
        let at = u64::from(port.0) << 32 | u64::from(now_s);
        Self { address: pack_key(mac, vlan), at }
    }
}

/// The port of an address in its VLAN, and the second of the look-up. The default is no address's.
#[derive(Default)]
struct Found {
    address: u64,
    now_s: u32,
    port: Option<PortId>,
}

impl Port {
    /// Refuses addresses that flap, for this number of seconds; 0: they are only reported.
    pub fn set_loop_guard(&self, seconds: u32) {
        self.loop_guard_s.store(seconds, Ordering::Relaxed);
    }

    /// How many times it came up: what is known of its peer's addresses may be out of date.
    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Relaxed)
    }

    /// Whether it refuses addresses that flap.
    pub(super) fn has_loop_guard(&self) -> bool {
        self.loop_guard_s.load(Ordering::Relaxed) > 0
    }
}

impl Forwarder {
    /// Learns a source address; false: the frame must be dropped, and was counted.
    #[inline(always)]
    pub(super) fn learn(&mut self, from: &Source, src: [u8; 6], vlan: u16, time: Time) -> bool {
        let (port, now_s) = (from.port, time.now_s);
        let seen = Seen::new(src, vlan, port, now_s);
        if self.last.learned == seen {
            return true;
        }
        if self.last.elsewhere == seen {
            from.stats.mac_elsewhere.add(1);
            return true;
        }
        if flow::is_multicast(src) || src == [0; 6] {
            from.stats.drops_bad_source.add(1);
            return false;
        }
        let terms = |at| self.terms(port, at, src);
        let learned = self.fdb.learn_on(src, vlan, port, now_s, terms);
        (self.last.learned, self.last.elsewhere) = (seen, Seen::default());
        if !matches!(learned, Learned::Known) {
            self.last.found = Found::default();
        }
        if matches!(learned, Learned::New | Learned::Moved { .. }) && self.fdb.take_report() {
            self.findings.events.push(PortEvent::Learned { port });
        }
        match learned {
            Learned::Moved { .. } => self.record_move(from, src, vlan, time),
            Learned::Stays { drop } => {
                self.record_move(from, src, vlan, time);
                if drop {
                    self.last.learned = Seen::default();
                    from.stats.drops_loop_guard.add(1);
                    return false;
                }
                self.record_elsewhere(from, seen);
            }
            Learned::Static { at } if at != port => self.record_elsewhere(from, seen),
            // Expired addresses are swept when their place is needed, at most once a second: no
            // timer runs on an idle switch.
            Learned::LimitReached | Learned::TableFull if self.aged_s != now_s => {
                self.aged_s = now_s;
                self.fdb.age(now_s);
            }
            _ => {}
        }
        true
    }

    #[inline(always)]
    pub(super) fn find(&mut self, dst: [u8; 6], vlan: u16, now_s: u32) -> Option<PortId> {
        let address = pack_key(dst, vlan);
        let found = &self.last.found;
        if found.address == address && found.now_s == now_s && found.port.is_some() {
            return found.port;
        }
        let port = self.fdb.lookup(dst, vlan, now_s);
        // A static address may be at a port that is wired since.
        let port = port.filter(|p| self.port(*p).is_some_and(|port| !port.is_wired()));
        self.last.found = Found { address, now_s, port };
        port
    }

    /// On what terms port `to` takes an address from port `at`.
    #[cold]
    fn terms(&self, to: PortId, at: PortId, mac: [u8; 6]) -> Terms {
        let owns = |port| {
            let rules = self.tenants.as_ref().and_then(|tenants| tenants.of(port));
            rules.and_then(|rules| rules.security.as_ref()).is_some_and(|s| s.locks_mac(mac))
        };
        let is_owner = owns(to);
        let block_s = self.port(to).map_or(0, |port| port.loop_guard_s.load(Ordering::Relaxed));
        Terms { is_owner, is_locked: !is_owner && owns(at), block_s }
    }

    /// Counts a frame whose source address stays at another port, and so do those that follow it.
    #[cold]
    fn record_elsewhere(&mut self, from: &Source, seen: Seen) {
        // Frames from addresses that are learned are not compared with it.
        (self.last.learned, self.last.elsewhere) = (Seen::default(), seen);
        from.stats.mac_elsewhere.add(1);
    }

    /// Counts a move of an address to the port of `from`, permitted or not, and reports it once if
    /// the address flaps.
    #[cold]
    fn record_move(&mut self, from: &Source, mac: [u8; 6], vlan: u16, time: Time) {
        let Time { now, now_s } = time;
        from.stats.mac_moves.add(1);
        let flap = self.fdb.flap(mac, vlan, now_s).filter(|(flap, _)| flap.home != from.port);
        let Some((flap, true)) = flap else { return };
        from.stats.mac_flaps.add(1);
        // What cannot be logged is not reported either: guests cause it at any rate.
        let log_lines = self.port(from.port).map(|port| &port.account.log_lines);
        if log_lines.is_some_and(|lines| lines.next(now) <= now) {
            let (port, mac) = (from.port, Mac(mac));
            self.findings.events.push(PortEvent::Flaps { port, mac, vlan, flap });
        }
    }
}
