//! Addresses of the switch in bridges of the kernel, for BGP EVPN
//! ([0035](../../../../docs/design/0035-evpn.md)).
//!
//! Nothing here runs on a worker. A worker reports that an address is new at most once until the
//! table was read; changes by the control thread are seen at the end of its round. Then all
//! addresses are read, at a bounded share of the control thread's time.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use switch::fdb::{Mac, PortId};
use switch::forward::Port;
use switch::tenant::Vlan;
use uplink::evpn::{Action, Address, Evpn, Local, Member, Remote};

use super::{Event, PortState, System};
use crate::limit::PortLog;
use crate::spec::{Kind, Tap};

/// Shortest time between two readings of all addresses. A guest that moves waits for it.
const READ_REST: Duration = Duration::from_millis(20);
/// A reading takes at most one part in so many of the time.
const READ_PART: u32 = 20;
/// For how long withdrawals are waited for at the end.
const WITHDRAW_MAX: Duration = Duration::from_secs(1);

/// All mirrors, by network namespace.
#[derive(Default)]
pub(super) struct Evpns {
    mirrors: BTreeMap<Option<String>, Evpn>,
    /// The state of addresses and of ports at the last reading.
    read: Option<(u64, u64)>,
    /// Time of the next reading, if addresses have changed.
    read_at: Option<Instant>,
    /// No reading before.
    rests_until: Option<Instant>,
    /// Time at which an address expires.
    expires_at: Option<Instant>,
    /// Changes of ports' rules so far.
    pub(super) rules: u64,
    /// Problems in the log.
    logged: BTreeSet<(String, String)>,
}

/// The settings of a port whose interface is in a bridge.
fn bridge(state: &PortState) -> Option<(&Tap, &str)> {
    match &state.spec.kind {
        Kind::Tap(tap) => Some((tap, tap.evpn.as_deref()?)),
        _ => None,
    }
}

impl System {
    /// Has the mirrors of the ports that there are now.
    pub(super) fn refresh_evpn(&mut self) {
        let mut wanted: BTreeMap<Option<String>, Vec<Member>> = BTreeMap::new();
        for state in self.ports.values() {
            let Some((tap, bridge)) = bridge(state) else { continue };
            let rules = state.spec.tuning.tenant.rules();
            let member = Member {
                interface: tap.ifname.clone(),
                bridge: bridge.into(),
                vlan: rules.map_or(Vlan::Transparent, |rules| rules.vlan),
            };
            wanted.entry(tap.netns.clone()).or_default().push(member);
        }
        self.evpn.read = None;
        for (netns, mirror) in &mut self.evpn.mirrors {
            mirror.set_members(wanted.remove(netns).unwrap_or_default());
        }
        for (netns, members) in wanted {
            match Evpn::open(netns.as_deref(), Instant::now()) {
                Ok(mut mirror) => {
                    mirror.set_members(members);
                    let what = Event::Neighbours(netns.clone());
                    if let Err(error) = self.watch(mirror.as_fd(), what) {
                        tracing::error!("evpn: {error}");
                        continue;
                    }
                    self.evpn.mirrors.insert(netns, mirror);
                }
                Err(error) => tracing::error!("evpn: {error}"),
            }
        }
    }

    /// After another process: its addresses are announced already.
    pub(super) fn inherit_evpn(&mut self) {
        if !self.evpn.mirrors.is_empty() {
            self.read_addresses();
            self.evpn.mirrors.values_mut().for_each(Evpn::inherit);
        }
    }

    /// Time at which [`tick_evpn`](Self::tick_evpn) has something to do without an event.
    pub(super) fn evpn_due(&self) -> Option<Instant> {
        let mirrors = self.evpn.mirrors.values().filter_map(Evpn::due);
        mirrors.chain(self.evpn.read_at).chain(self.evpn.expires_at).min()
    }

    /// Reads addresses that have changed, and messages of the kernel.
    pub(super) fn tick_evpn(&mut self) {
        if self.evpn.mirrors.is_empty() {
            return;
        }
        let now = Instant::now();
        if self.evpn.read != Some(self.evpn_state())
            || self.evpn.expires_at.is_some_and(|at| at <= now)
        {
            self.evpn.read_at = self.evpn.rests_until.max(Some(now));
        }
        if self.evpn.read_at.is_some_and(|at| at <= now) {
            self.read_addresses();
            let rest = (now.elapsed() * READ_PART).max(READ_REST);
            (self.evpn.read_at, self.evpn.rests_until) = (None, Some(now + rest));
        }
        self.run_mirrors(now);
        if self.evpn.read_at.is_none() && self.evpn.read != Some(self.evpn_state()) {
            self.evpn.read_at = self.evpn.rests_until;
        }
    }

    /// Changes of addresses, and of the ports that they may be at.
    fn evpn_state(&self) -> (u64, u64) {
        let of = |state: &PortState| {
            let up = u64::from(state.port.active() > 0);
            (state.port.starts() << 1 | up).wrapping_mul(u64::from(state.port.id.0) << 1 | 1)
        };
        let ports = self.ports.values().map(of).fold(self.evpn.rules << 48, u64::wrapping_add);
        (self.fdb.changes(), ports)
    }

    /// Gives the mirrors all addresses at ports that are up, in order.
    fn read_addresses(&mut self) {
        let in_bridge: BTreeSet<PortId> =
            self.ports.values().filter(|s| bridge(s).is_some()).map(|s| s.port.id).collect();
        let up: BTreeMap<PortId, &Port> = self
            .ports
            .values()
            .filter(|s| s.port.active() > 0 && !in_bridge.contains(&s.port.id))
            .map(|s| (s.port.id, &*s.port))
            .collect();
        let now_s = self.now_s();
        // An expired address that stays in the table would not be new when it is heard again.
        self.fdb.age(now_s);
        // Before they are read: a later change is reported.
        self.fdb.request_report();
        self.evpn.read = Some(self.evpn_state());
        let mut locals: Vec<(Address, Local)> = Vec::new();
        let mut oldest = 0;
        for entry in self.fdb.entries(now_s) {
            let Some(port) = up.get(&entry.port).filter(|_| entry.mac.0[0] & 1 == 0) else {
                continue;
            };
            let address = Address { mac: entry.mac, vlan: entry.vlan };
            let starts = if entry.is_static { port.starts() } else { 0 };
            oldest = oldest.max(if entry.is_static { 0 } else { entry.age_s });
            locals.push((address, Local { port: port.id, learned: !entry.is_static, starts }));
        }
        self.add_locked(&up, &mut locals);
        locals.sort_unstable_by_key(|(address, local)| (*address, !local.learned));
        // One of each: the port that an address was learned at, and its owner's evidence.
        locals.dedup_by(|later, first| {
            let same = later.0 == first.0;
            first.1.starts = first.1.starts.max(if same { later.1.starts } else { 0 });
            same
        });
        let learned = locals.iter().any(|(_, local)| local.learned);
        let ageing_s = self.options.ageing_s;
        let rest = Duration::from_secs(u64::from(ageing_s.saturating_sub(oldest)) + 1);
        self.evpn.expires_at = (learned && ageing_s > 0).then(|| Instant::now() + rest);
        for mirror in self.evpn.mirrors.values_mut() {
            mirror.set_locals(locals.clone());
        }
    }

    /// Adds the addresses of `mac=`, which a guest that sends nothing has, too.
    fn add_locked(&self, up: &BTreeMap<PortId, &Port>, locals: &mut Vec<(Address, Local)>) {
        let bridged = self.ports.values().filter(|state| bridge(state).is_some());
        let bridged: Vec<Vlan> = bridged.map(vlan).collect();
        for state in self.ports.values().filter(|state| up.contains_key(&state.port.id)) {
            let macs = state.spec.tuning.tenant.macs();
            if macs.is_empty() {
                continue;
            }
            let vlans = vlans(&vlan(state), &bridged);
            for mac in macs {
                let local =
                    Local { port: state.port.id, learned: false, starts: state.port.starts() };
                let of = |vlan: &u16| (Address { mac: Mac(*mac), vlan: *vlan }, local);
                locals.extend(vlans.iter().map(of));
            }
        }
    }

    fn run_mirrors(&mut self, now: Instant) {
        let clock = self.clock();
        let time = self.pool.now();
        let (table, ports) = (&self.table, &self.ports);
        let port = |id: PortId| table.get(usize::from(id.0)).and_then(Option::as_ref);
        let mut actions = Vec::new();
        for mirror in self.evpn.mirrors.values_mut() {
            let permit = |id| {
                let Some(port) = port(id) else { return Ok(()) };
                let rate = &port.account.evpn_addresses;
                if rate.spend(time) { Ok(()) } else { Err(clock.to_std(rate.next(time))) }
            };
            actions.extend(mirror.run(now, permit).0);
            let Some(news) = mirror.news() else { continue };
            let interfaces: BTreeSet<_> = mirror.interfaces().map(str::to_string).collect();
            self.evpn.logged.retain(|line| !interfaces.contains(&line.0) || news.contains(line));
            for (interface, what) in news {
                if self.evpn.logged.insert((interface.clone(), what.clone())) {
                    let of = |s: &&PortState| bridge(s).is_some_and(|(t, _)| t.ifname == interface);
                    let name = ports.values().find(of).map_or("", |state| &state.spec.name);
                    tracing::warn!(port = name, "evpn: {what}");
                }
            }
        }
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            // Frames for it go to the TAP from now on.
            Action::Forget(Address { mac, vlan }, port) => {
                self.fdb.remove_learned(mac.0, vlan, port);
            }
            Action::Duplicate(Address { mac, vlan }, port, vtep) => {
                let state = self.ports.values().find(|state| state.port.id == port);
                let Some(state) = state else { return };
                let vlan = if vlan == 0 { String::new() } else { format!(" in VLAN {vlan}") };
                let at = vtep.map_or_else(|| "another host".into(), |ip| format!("host {ip}"));
                let own =
                    || PortLog::new(&state.spec.name, state.port.account.clone(), self.clock());
                let what = format_args!(
                    "address {mac}{vlan} is used here and on {at} alternately: two guests have \
                     it, or one forges it (mac= on every guest's port prevents that); it is left \
                     to {at} for 90 s"
                );
                match state.log() {
                    Some(log) => log.warn(what),
                    None => own().warn(what),
                }
            }
        }
    }

    /// Withdraws all addresses, at the end of the switch: interfaces that stay keep their entries
    /// otherwise.
    pub(super) fn withdraw_evpn(&mut self) {
        let end = Instant::now() + WITHDRAW_MAX;
        let mut mirrors = std::mem::take(&mut self.evpn.mirrors);
        for mirror in mirrors.values_mut() {
            mirror.set_members(Vec::new());
            loop {
                let now = Instant::now();
                mirror.run(now, |_| Ok(()));
                if mirror.has_left() || now >= end {
                    break;
                }
                let wait = mirror.due().map_or(end, |due| due.clamp(now, end)) - now;
                let _ = os::wait_readable(mirror.as_fd(), wait);
            }
        }
    }

    // ---- display ----

    /// State of a port whose interface is in a bridge, for `ctl show`.
    pub(super) fn show_evpn(&self, state: &PortState) -> Option<Value> {
        let (tap, bridge) = bridge(state)?;
        let mirror = self.evpn.mirrors.get(&tap.netns);
        let status = mirror.and_then(|mirror| mirror.status(&tap.ifname, Instant::now()));
        let status = status.unwrap_or_default();
        let count = |name| status.states.get(name).copied().unwrap_or(0);
        Some(json!({
            "bridge": bridge,
            "vnis": status.vnis,
            "announced": count("announced"),
            "pending": count("pending"),
            "yielded": count("yielded"),
            "duplicate": count("duplicate"),
            "remote": status.remote,
            "problems": status.problems,
        }))
    }

    /// Addresses of the switch in the bridges: their ports and states.
    pub(super) fn claims(&self) -> BTreeMap<Address, (PortId, &'static str)> {
        let now = Instant::now();
        let all = self.evpn.mirrors.values().flat_map(|mirror| mirror.claims(now));
        all.map(|(address, port, state)| (address, (port, state.name()))).collect()
    }

    /// Addresses on other hosts, by the id of the port to them.
    pub(super) fn remotes(&self) -> BTreeMap<Address, (PortId, Remote)> {
        let mut found = BTreeMap::new();
        for state in self.ports.values() {
            let Some((tap, _)) = bridge(state) else { continue };
            let Some(mirror) = self.evpn.mirrors.get(&tap.netns) else { continue };
            let own = mirror.remotes().filter(|(of, _)| *of == tap.ifname);
            found.extend(own.map(|(_, remote)| (remote.address, (state.port.id, remote))));
        }
        found
    }
}

/// VLANs of a port.
pub(super) fn vlan(state: &PortState) -> Vlan {
    state.spec.tuning.tenant.rules().map_or(Vlan::Transparent, |rules| rules.vlan)
}

/// VLANs of a guest's port that a port to other hosts carries.
pub(super) fn vlans(of: &Vlan, bridged: &[Vlan]) -> Vec<u16> {
    match of {
        Vlan::Transparent => vec![0],
        Vlan::Access(vid) => vec![*vid],
        Vlan::Trunk { native, .. } => {
            let carried = (1..4095).filter(|vid| of.carries(*vid) || *native == Some(*vid));
            let is_bridged = |vid: &u16| bridged.iter().any(|vlan| vlan.carries(*vid));
            carried.filter(is_bridged).collect()
        }
    }
}
