//! Two uplinks as active and standby ([0039](../../../../docs/design/0039-standby.md)).
//!
//! ```text
//!   interfaces: RTNLGRP_LINK wakes ─▶ flags ─▶ Pair::choose ─▶ one stops ─▶ workers pass a gate
//!                                              (no clock)                      ─▶ the other starts
//! ```
//! Which port of a pair carries frames is the state of the ports themselves
//! ([`PortState::blocked`]), which is handed to other processes. The control thread compares it
//! with what it should be at the end of each round.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use api::config::STANDBY_FOR;
use api::event;
use api::schema::Change;
use serde_json::{Value, json};
use switch::fdb::{Mac, PortId};
use switch::schedule::token;
use uplink::{LinkWatch, PacketLink};

use super::evpn::{vlan, vlans};
use super::tap::{self, DOWN, REMOVED};
use super::{Event, PortState, RunError, System};
use crate::spec::{Kind, PortSpec};

/// Why a port whose interface is up is not used.
const NO_CARRIER: &str = "the interface has no carrier";
/// Longest time for workers to end their rounds.
const FREEZE_MAX: Duration = Duration::from_millis(100);
/// Time for which no port of a pair carries frames when one takes over from the other. What
/// left by the one, or came to both, has come back or is dropped by then: it would be received
/// twice, and addresses of guests would be learned at the uplink. Shorter losses of carrier pass.
const SETTLE: Duration = Duration::from_millis(20);
/// Time between two groups of announcements, of a burst each.
const ANNOUNCE_EVERY: Duration = Duration::from_millis(5);

/// A port of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Preferred,
    Standby,
}

/// What is remembered of a pair.
#[derive(Default)]
struct Pair {
    /// Name of the preferred port.
    of: String,
    /// Since when the preferred port works without a break.
    works_since: Option<Instant>,
    /// The port that carried frames last, and until when.
    last: Option<(Side, Instant)>,
    /// Whether the sockets are as the states of the ports say: those of another process may not be.
    is_set: bool,
}

impl Pair {
    /// Chooses the port that carries frames. `works`: whether the preferred one and the other do.
    fn choose(
        &mut self,
        carries: Option<Side>,
        works: [bool; 2],
        return_after: Duration,
        now: Instant,
    ) -> Option<Side> {
        self.works_since = works[0].then(|| self.works_since.unwrap_or(now));
        let has_returned = self.works_since.is_some_and(|since| now >= since + return_after);
        match works {
            [false, false] => None,
            [false, true] => Some(Side::Standby),
            [true, true] if carries == Some(Side::Standby) && !has_returned => Some(Side::Standby),
            [true, _] => Some(Side::Preferred),
        }
    }

    /// Time from which a port may take the place of the one that carried frames last.
    fn settles_at(&self, side: Side) -> Option<Instant> {
        self.last.filter(|(last, _)| *last != side).map(|(_, until)| until + SETTLE)
    }
}

/// All pairs.
#[derive(Default)]
pub(super) struct Standbys {
    /// By name of the standby port.
    pairs: BTreeMap<String, Pair>,
    /// Interfaces of ports, by network namespace.
    watches: BTreeMap<Option<String>, LinkWatch>,
    /// Addresses to announce, with their VLANs, by name of the port out of which; the next is last.
    announcements: BTreeMap<String, Vec<(Mac, u16)>>,
    /// Time of the next group of them.
    announces_at: Option<Instant>,
    /// Time at which a port is to take a place.
    next_at: Option<Instant>,
}

/// Names of the ports of a pair: the preferred one, and its standby.
type Names = [String; 2];

impl System {
    /// Pairs whose standby port exists.
    fn pairs(&self) -> Vec<Names> {
        let pair = |state: &PortState| {
            Some([state.spec.tuning.standby.of.clone()?, state.spec.name.clone()])
        };
        self.ports.values().filter_map(pair).collect()
    }

    /// The other port of its pair, and whether this is the preferred one.
    fn other(&self, name: &str) -> Option<(&str, bool)> {
        let pairs = &self.standbys.pairs;
        let preferred = pairs.iter().find(|(_, pair)| pair.of == name);
        let preferred = preferred.map(|(standby, _)| (standby.as_str(), true));
        preferred.or_else(|| Some((pairs.get(name)?.of.as_str(), false)))
    }

    /// Whether a port is in a pair.
    pub(super) fn is_paired(&self, name: &str) -> bool {
        self.other(name).is_some()
    }

    /// Whether a port that is being made sends and receives nothing at first: as in the process
    /// before, or else until the state of its pair is known.
    pub(super) fn starts_blocked(&mut self, spec: &PortSpec) -> bool {
        let before = self.inherited.blocked.remove(&spec.name);
        before.unwrap_or_else(|| spec.tuning.standby.of.is_some() || self.is_paired(&spec.name))
    }

    /// Checks changes of `standby-for=` of a port.
    pub(super) fn check_standby(&self, name: &str, changes: &[Change]) -> Result<(), RunError> {
        let change = changes.iter().find(|change| change.entry.name == STANDBY_FOR);
        let Some(of) = change.and_then(|change| change.value.text()) else { return Ok(()) };
        let Some(port) = self.config.port(name).filter(|_| of != "none") else { return Ok(()) };
        let mut config = self.config.clone();
        config.set(Some(name), None, changes);
        config.standbys().check(&port.name, of).map_err(RunError::Request)?;
        match config.conflicts().into_iter().find(|found| !self.config.conflicts().contains(found))
        {
            Some((_, what)) => Err(RunError::Request(what)),
            None => Ok(()),
        }
    }

    /// Ends standing by for a port that an operator removes.
    pub(super) fn end_standbys(&mut self, active: &str) {
        for state in self.ports.values_mut() {
            let standby = &mut state.spec.tuning.standby;
            if standby.of.as_deref() == Some(active) {
                standby.of = None;
                let name = &state.spec.name;
                tracing::info!(port = name, "no longer a standby: port '{active}' was removed");
            }
        }
    }

    /// Time at which [`tick_standbys`](Self::tick_standbys) has something to do without an event.
    pub(super) fn standbys_due(&self) -> Option<Instant> {
        self.standbys.announces_at.into_iter().chain(self.standbys.next_at).min()
    }

    /// Interfaces of a namespace have changed: those that are down are checked now.
    pub(super) fn check_interfaces(&mut self, netns: &Option<String>) {
        self.standbys.watches.get(netns).iter().for_each(|watch| watch.clear());
        let now = Instant::now();
        let states = self.ports.values_mut();
        states.filter_map(|state| state.attach.check_at()).flatten().for_each(|at| *at = now);
    }

    /// Has each pair carried by the port that should.
    pub(super) fn tick_standbys(&mut self) {
        let pairs = self.pairs();
        let members: BTreeSet<_> = pairs.iter().flatten().collect();
        let blocked = self.ports.values().filter(|state| state.blocked);
        let alone = blocked.map(|state| &state.spec.name).filter(|name| !members.contains(name));
        for name in alone.cloned().collect::<Vec<_>>() {
            self.start_carrying(&name);
        }
        self.standbys.next_at = None;
        if pairs.is_empty() && self.standbys.pairs.is_empty() {
            return;
        }
        self.standbys.pairs.retain(|standby, pair| {
            pairs.iter().any(|[of, name]| name == standby && *of == pair.of)
        });
        self.watch_interfaces(&pairs);
        for names in &pairs {
            self.tick_pair(names);
        }
        self.send_announcements();
    }

    /// Watches the interfaces of the namespaces in which the ports of pairs are.
    fn watch_interfaces(&mut self, pairs: &[Names]) {
        let states = pairs.iter().flatten().filter_map(|name| self.ports.get(name));
        let netns = |state: &PortState| match &state.spec.kind {
            Kind::AfPacket(conf) => conf.netns.clone(),
            Kind::AfXdp(conf) => conf.netns.clone(),
            _ => None,
        };
        let wanted: BTreeSet<_> = states.map(netns).collect();
        let is_gone = |netns: &Option<String>, _: &mut LinkWatch| !wanted.contains(netns);
        let gone: Vec<_> = self.standbys.watches.extract_if(.., is_gone).collect();
        for (netns, watch) in gone {
            self.unwatch(watch.as_fd(), &Event::Interfaces(netns));
        }
        for netns in wanted {
            if self.standbys.watches.contains_key(&netns) {
                continue;
            }
            let opened = LinkWatch::open(netns.as_deref()).map_err(|error| error.to_string());
            let watched = opened.and_then(|watch| {
                let what = Event::Interfaces(netns.clone());
                self.watch(watch.as_fd(), what).map_err(|error| error.to_string())?;
                Ok(watch)
            });
            match watched {
                Ok(watch) => _ = self.standbys.watches.insert(netns, watch),
                Err(error) => tracing::error!(
                    "standby ports: {error}: a lost carrier is noticed only at the next event"
                ),
            }
        }
    }

    fn tick_pair(&mut self, names: &Names) {
        names.iter().for_each(|name| self.check_member(name));
        let carries = self.carries(names);
        let new = || Pair { of: names[0].clone(), ..Pair::default() };
        let is_set = self.standbys.pairs.entry(names[1].clone()).or_insert_with(new).is_set;
        if !is_set {
            self.set_blocked(names);
        }
        let works = [0, 1].map(|side| self.ports.get(&names[side]).is_some_and(works));
        let Some(state) = self.ports.get(&names[1]) else { return };
        let (return_after, now) = (state.spec.tuning.standby.return_after(), Instant::now());
        let Some(pair) = self.standbys.pairs.get_mut(&names[1]) else { return };
        pair.is_set = true;
        let wanted = pair.choose(carries, works, return_after, now);
        let waits = wanted.and_then(|side| pair.settles_at(side)).filter(|at| *at > now);
        let mut due = Vec::from_iter(waits);
        if wanted == Some(Side::Standby) {
            due.extend(pair.works_since.map(|since| since + return_after));
        }
        match (carries, wanted) {
            (Some(carries), Some(wanted)) if carries == wanted => {}
            (None, Some(side)) if waits.is_none() => {
                let last = pair.last.map(|(last, _)| last);
                self.take_the_place(names, last, side);
            }
            (None, _) => {}
            (Some(side), _) => {
                pair.last = Some((side, now));
                due.push(now + SETTLE);
                self.leave_the_place(names, side, wanted.is_some());
            }
        }
        self.standbys.next_at = self.standbys.next_at.into_iter().chain(due).min();
        if let Some(side) = wanted {
            self.place_statics(names, side);
        }
    }

    /// The port that carries the frames of a pair.
    fn carries(&mut self, names: &Names) -> Option<Side> {
        let carries = |name: &str| self.ports.get(name).is_some_and(|state| !state.blocked);
        match [carries(&names[0]), carries(&names[1])] {
            [true, true] => {
                // They were ports of their own until now.
                self.stop_carrying(&names[1]);
                self.wait_for_workers();
                let ids = names.each_ref().map(|name| self.ports.get(name).map(|s| s.port.id));
                if let [Some(preferred), Some(standby)] = ids {
                    self.fdb.move_learned(standby, preferred);
                }
                Some(Side::Preferred)
            }
            [true, false] => Some(Side::Preferred),
            [false, true] => Some(Side::Standby),
            [false, false] => None,
        }
    }

    /// Takes a port down whose interface is down, whether it carries frames or not.
    fn check_member(&mut self, name: &str) {
        let Some(state) = self.ports.get(name).filter(|state| state.failure.is_none()) else {
            return;
        };
        match state.attach.link() {
            Some(PacketLink::Down) => self.fail_interface(name, DOWN),
            Some(PacketLink::Removed) => self.fail_interface(name, REMOVED),
            Some(PacketLink::Up) | None => {}
        }
    }

    /// Puts sockets into the state of their ports, first those that are blocked.
    fn set_blocked(&self, names: &Names) {
        let states = names.iter().filter_map(|name| self.ports.get(name));
        let (blocked, others): (Vec<_>, Vec<_>) = states.partition(|state| state.blocked);
        blocked.iter().for_each(|state| report(state, state.attach.set_blocked(true)));
        // Frames that wait are not lost by an upgrade.
        others.iter().for_each(|state| report(state, state.attach.unblock()));
    }

    /// Has a port of a pair carry no frames any more. `is_replaced`: the other will.
    fn leave_the_place(&mut self, names: &Names, side: Side, is_replaced: bool) {
        self.stop_carrying(&names[side as usize]);
        self.wait_for_workers();
        if !is_replaced {
            let [preferred, standby] = names;
            let [why, why_standby] = names.each_ref().map(|name| self.why_not(name));
            tracing::error!(
                port = preferred,
                "down: {why}; and so is its standby port '{standby}': {why_standby}"
            );
        }
    }

    /// Has a port of a pair carry the frames, after `last` did.
    fn take_the_place(&mut self, names: &Names, last: Option<Side>, side: Side) {
        let (port, other) = (names[side as usize].clone(), names[1 - side as usize].clone());
        let ids = names.each_ref().map(|name| self.ports.get(name).map(|state| state.port.id));
        if let (Some(left), Some(new)) = (ids[1 - side as usize], ids[side as usize]) {
            self.fdb.move_learned(left, new);
        }
        self.start_carrying(&port);
        self.announce_out_of(&port, ids);
        match last {
            // At the start, the preferred port takes over from no other one.
            None if side == Side::Preferred => return,
            Some(last) if last == side => {
                tracing::info!(port, "carries the frames again");
                return;
            }
            _ => {}
        }
        let cause = match side {
            Side::Preferred => "it works again, and is preferred".to_string(),
            Side::Standby => self.why_not(&other),
        };
        if let Some(state) = self.ports.get_mut(&port) {
            state.failovers += 1;
        }
        tracing::warn!(port, "took over from port '{other}': {cause}");
        self.publish(event::Event::Failover { port, from: other, cause });
    }

    /// Why a port does not work.
    fn why_not(&self, name: &str) -> String {
        match self.ports.get(name) {
            None => "there is no such port".into(),
            Some(state) => state.failure.clone().unwrap_or_else(|| NO_CARRIER.into()),
        }
    }

    /// Waits until no worker is in a round that it began before: it may send to a port that was
    /// active then, and a flood must not leave by both.
    fn wait_for_workers(&self) {
        if self.pool.freeze(FREEZE_MAX).is_none() {
            tracing::warn!("standby ports: a worker did not end its round in {FREEZE_MAX:?}");
        }
    }

    fn stop_carrying(&mut self, name: &str) {
        let Some(state) = self.ports.get_mut(name) else { return };
        state.blocked = true;
        state.port.set_active(0);
        let id = state.port.id;
        (0..state.ingress.len() as u16)
            .for_each(|queue| self.pool.drop_queue(token(id, queue, false)));
        report(state, state.attach.set_blocked(true));
        self.touch(name);
    }

    fn start_carrying(&mut self, name: &str) {
        let Some(state) = self.ports.get_mut(name) else { return };
        state.blocked = false;
        report(state, state.attach.set_blocked(false));
        if state.failure.is_none() {
            for served in tap::served(state.port.id, &state.ingress, &state.attach) {
                self.pool.serve(served);
            }
            state.port.set_active(state.ingress.len() as u16);
        }
        self.touch(name);
    }

    /// Has the static addresses of both ports lead to the one that carries frames.
    fn place_statics(&self, names: &Names, side: Side) {
        let Some(id) = self.ports.get(&names[side as usize]).map(|state| state.port.id) else {
            return;
        };
        let now_s = self.now_s();
        for entry in self.config.statics.iter().filter(|entry| names.contains(&entry.port)) {
            let (mac, vlan) = (entry.address.mac, entry.address.vlan);
            if self.fdb.lookup(mac, vlan, now_s) != Some(id) {
                // It had a place before.
                let _ = self.fdb.add_static(mac, vlan, id, now_s);
            }
        }
    }

    // ---- announcements ----

    /// Schedules the announcement of all addresses at other ports than the pair's.
    fn announce_out_of(&mut self, name: &str, pair: [Option<PortId>; 2]) {
        let Some(uplink) = self.ports.get(name).map(vlan) else { return };
        let others = self
            .ports
            .values()
            .filter(|state| state.port.active() > 0 && !pair.contains(&Some(state.port.id)));
        let mut all: BTreeMap<PortId, BTreeSet<(Mac, u16)>> = BTreeMap::new();
        for state in others {
            let vlans = vlans(&vlan(state), std::slice::from_ref(&uplink));
            let macs = state.spec.tuning.tenant.macs().iter().map(|mac| Mac(*mac));
            let locked = macs.flat_map(|mac| vlans.iter().map(move |vlan| (mac, *vlan)));
            all.insert(state.port.id, locked.collect());
        }
        for entry in self.fdb.entries(self.now_s()) {
            if let Some(of_port) = all.get_mut(&entry.port).filter(|_| entry.mac.0[0] & 1 == 0) {
                of_port.insert((entry.mac, entry.vlan));
            }
        }
        // One of each port in turn: a guest with many addresses delays those of others by few.
        let ranked = all.into_values().flat_map(|of_port| of_port.into_iter().enumerate());
        let mut ranked: Vec<_> = ranked.filter(|(_, (_, vlan))| uplink.carries(*vlan)).collect();
        ranked.sort_by_key(|(rank, _)| std::cmp::Reverse(*rank));
        let addresses: Vec<_> = ranked.into_iter().map(|(_, address)| address).collect();
        self.standbys.announcements.clear();
        if !addresses.is_empty() {
            self.standbys.announcements.insert(name.into(), addresses);
            self.standbys.announces_at = Some(Instant::now());
        }
    }

    /// Sends the next group of announcements, if its time has come.
    fn send_announcements(&mut self) {
        let now = Instant::now();
        if self.standbys.announces_at.is_none_or(|at| at > now) {
            return;
        }
        for (name, left) in &mut self.standbys.announcements {
            let Some(state) = self.ports.get(name).filter(|state| !state.blocked) else {
                left.clear();
                continue;
            };
            let next: Vec<_> = left.iter().rev().take(switch::frame::BURST_MAX).copied().collect();
            match state.port.announce(&next, &vlan(state)) {
                Ok(done) => left.truncate(left.len() - done),
                // Reported by the worker that reads or writes next.
                Err(_) => left.clear(),
            }
        }
        self.standbys.announcements.retain(|_, left| !left.is_empty());
        let more = !self.standbys.announcements.is_empty();
        self.standbys.announces_at = more.then(|| now + ANNOUNCE_EVERY);
    }

    // ---- display ----

    /// State of a port's pair, for `ctl show`.
    pub(super) fn show_standby(&self, state: &PortState) -> Option<Value> {
        let (other, preferred) = self.other(&state.spec.name)?;
        Some(json!({
            "other": other,
            "preferred": preferred,
            "carries": !state.blocked,
            "failovers": state.failovers,
        }))
    }

    /// Why a port of a pair is down, if nothing else is known.
    pub(super) fn why_idle(&self, state: &PortState) -> Option<&'static str> {
        (state.blocked && !works(state)).then_some(NO_CARRIER)
    }
}

/// Whether frames could pass a port if it carried those of its pair.
pub(super) fn works(state: &PortState) -> bool {
    state.failure.is_none() && state.attach.has_carrier()
}

fn report(state: &PortState, done: std::io::Result<()>) {
    if let Err(error) = done
        && state.failure.as_deref() != Some(REMOVED)
    {
        let port = &state.spec.name;
        tracing::error!(port, "standby: cannot block or unblock its sockets: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETURN: Duration = Duration::from_secs(2);

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn preferred_port_carries_unless_it_does_not_work() {
        let (mut pair, start) = (Pair::default(), Instant::now());
        let mut choose = |carries, works| pair.choose(carries, works, RETURN, start);
        let (preferred, standby) = (Some(Side::Preferred), Some(Side::Standby));
        assert_eq!(choose(None, [true, true]), preferred, "at once");
        assert_eq!(choose(preferred, [true, false]), preferred);
        assert_eq!(choose(preferred, [false, true]), standby);
        assert_eq!(choose(standby, [false, false]), None);
        assert_eq!(choose(None, [false, true]), standby);
        assert_eq!(choose(standby, [true, false]), preferred, "there is nothing to wait for");
    }

    #[test]
    fn preferred_port_that_flaps_is_left_alone_until_it_has_worked_for_long_enough() {
        let (mut pair, start) = (Pair::default(), Instant::now());
        let mut carries = Some(Side::Preferred);
        let mut changes = 0;
        for ms in (0..60_000).step_by(100) {
            // It loses carrier for 100 ms every second.
            let works = [ms % 1000 != 0, true];
            let next = pair.choose(carries, works, RETURN, after(start, ms));
            changes += usize::from(next != carries);
            carries = next;
        }
        assert_eq!((changes, carries), (1, Some(Side::Standby)));
        let mut choose = |ms| pair.choose(carries, [true, true], RETURN, after(start, ms));
        assert_eq!(choose(61_000), Some(Side::Standby));
        assert_eq!(choose(62_200), Some(Side::Preferred));
        // The other waits for a moment, the same does not.
        pair.last = Some((Side::Standby, start));
        assert_eq!(pair.settles_at(Side::Preferred), Some(start + SETTLE));
        assert_eq!(pair.settles_at(Side::Standby), None);
    }
}
