//! Learning and look-up of addresses by a worker, and what a port may take from another.

use std::sync::atomic::Ordering;

use super::{Forwarder, Port, PortEvent, Source, Time};
use crate::fdb::{Learned, Mac, PortId, Terms};
use crate::flow;

/// An address, its VLAN, the port it was seen at, and the second of that.
pub(super) type Fact = ([u8; 6], u16, PortId, u32);

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
        let fact: Option<Fact> = Some((src, vlan, port, now_s));
        if self.last_learned == fact {
            return true;
        }
        if self.last_elsewhere == fact {
            from.stats.mac_elsewhere.add(1);
            return true;
        }
        if flow::is_multicast(src) || src == [0; 6] {
            from.stats.drops_bad_source.add(1);
            return false;
        }
        let terms = |at| self.terms(port, at, src);
        let learned = self.fdb.learn_on(src, vlan, port, now_s, terms);
        (self.last_learned, self.last_elsewhere) = (fact, None);
        if !matches!(learned, Learned::Known) {
            self.last_found = None;
        }
        if matches!(learned, Learned::New | Learned::Moved { .. }) && self.fdb.take_report() {
            self.findings.events.push(PortEvent::Learned { port });
        }
        match learned {
            Learned::Moved { .. } => self.record_move(from, src, vlan, time),
            Learned::Stays { drop } => {
                self.record_move(from, src, vlan, time);
                if drop {
                    self.last_learned = None;
                    from.stats.drops_loop_guard.add(1);
                    return false;
                }
                self.record_elsewhere(from, fact);
            }
            Learned::Static { at } if at != port => self.record_elsewhere(from, fact),
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
        // A cache for a run of frames to the same address; valid for at most a second, so a move
        // seen by another worker is noticed within a second.
        match self.last_found {
            Some((mac, tag, when, Some(port))) if (mac, tag, when) == (dst, vlan, now_s) => {
                Some(port)
            }
            _ => {
                let port = self.fdb.lookup(dst, vlan, now_s);
                // A static address may be at a port that is wired since.
                let port = port.filter(|p| self.port(*p).is_some_and(|port| !port.is_wired()));
                self.last_found = Some((dst, vlan, now_s, port));
                port
            }
        }
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
    fn record_elsewhere(&mut self, from: &Source, fact: Option<Fact>) {
        // Frames from addresses that are learned are not compared with it.
        (self.last_learned, self.last_elsewhere) = (None, fact);
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
