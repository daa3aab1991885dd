//! Decides which entries the bridges get. No clock, no descriptor: messages of the kernel and
//! addresses of the switch in, requests and actions out.
//!
//! An address of the switch in a bridge is a *claim*:
//!
//! ```text
//!              ┌──────── refused, lost ────────┐
//!              ▼                               │
//!   new ──▶ Wanted ── Put ──▶ Sent ── reply ──▶ Held ── on another interface ──▶ Yielded
//!              ▲                                                                       │
//!              └───────── new evidence: a frame from it, its port came up ─────────────┘
//! ```
//! Between a request and its reply what the kernel reports of the entry is older than the request:
//! only after it another interface's entry means that the address has moved.
//!
//! Changes that the kernel reports while it is read are newer than what is read: it queues a part
//! of a dump after it has released the lock under which the part was made.

mod display;
mod set_up;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use switch::fdb::{Mac, PortId};

use super::links::{Kind, Link, Links};
use super::tap::{At, Tap};
use super::wire::{Dump, Entry, Heard, Key, Request};
use super::{Action, Address, Local, Member, Vlans};

/// Requests sent at once.
const BATCH: usize = 64;
/// Addresses compared at once: most need no request.
const COMPARES: usize = 4096;
/// Requests without a reply.
const FLIGHT_MAX: usize = 256;
/// For how long entries of an earlier process stay while its guests come back.
const GRACE: Duration = Duration::from_secs(10);
/// Time between two dumps: interfaces change in groups.
const SYNC_REST: Duration = Duration::from_millis(100);
/// After a dump, this many times what it took: the kernel's work for one grows with the square of
/// the entries, and interfaces may change again and again.
const SYNC_SHARE: u32 = 4;
/// Time without any message after which a dump that has not ended is requested again. A million
/// entries take longer in all.
const DUMP_MAX: Duration = Duration::from_secs(5);
/// After a refusal.
const RETRY: Duration = Duration::from_secs(5);
/// After an entry was deleted by another program.
const LOST_REST: Duration = Duration::from_secs(1);
/// Shortest time until a port's next announcement beyond its rate: several then share it.
const RATE_REST: Duration = Duration::from_millis(200);
/// Time from a new VXLAN interface or tunnel until entries are announced again: FRR notices it
/// first.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// FRR counts as a duplicate an address that moved five times in three minutes. Each of two hosts
/// claims it twice at most in that time.
const YIELDS_MAX: u8 = 2;
const YIELD_WINDOW: Duration = Duration::from_secs(180);
/// For how long an address is left to the other host after that.
const HOLD: Duration = Duration::from_secs(90);

type Place = u32;

/// What the kernel reported.
#[derive(Default)]
struct Table {
    links: Links,
    /// Entries of each bridge, with their interface.
    entries: HashMap<u32, HashMap<Key, (u32, Entry)>>,
    /// Where each VXLAN interface sends; all zeros: broadcasts.
    tunnels: HashMap<u32, HashMap<Mac, IpAddr>>,
}

impl Table {
    fn bridge_of(&self, link: u32) -> Option<u32> {
        self.links.get(link)?.master
    }

    fn entry(&self, bridge: u32, key: Key) -> Option<(u32, Entry)> {
        self.entries.get(&bridge)?.get(&key).copied()
    }

    /// All entries of a bridge.
    fn entries(&self, bridge: u32) -> impl Iterator<Item = (Key, u32, Entry)> {
        let all = self.entries.get(&bridge).into_iter().flatten();
        all.map(|(key, (link, entry))| (*key, *link, *entry))
    }

    fn tunnel(&self, link: u32, mac: Mac) -> Option<IpAddr> {
        self.tunnels.get(&link)?.get(&mac).copied()
    }

    fn change(&self, heard: &Heard) -> Option<Change> {
        Some(match *heard {
            Heard::Link(Link { index, .. }) | Heard::LinkGone(index) => Change::Link(index),
            Heard::Entry { link, key, .. } | Heard::EntryGone { link, key } => {
                Change::Entry(self.bridge_of(link)?, key)
            }
            Heard::Tunnel { link, mac, .. } | Heard::TunnelGone { link, mac, .. } => {
                Change::Tunnel(link, mac)
            }
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Wanted,
    Sent,
    Held,
    Yielded,
    /// Of an earlier process, which knew the address: the kernel's table says whether it is held.
    Inherited,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    phase: Phase,
    /// Not before.
    after: Option<Instant>,
    /// Evidence at the time it was yielded.
    starts: u64,
    yields: u8,
    first_yield: Option<Instant>,
}

impl Claim {
    const NEW: Self =
        Self { phase: Phase::Wanted, after: None, starts: 0, yields: 0, first_yield: None };

    fn is_due(&self, now: Instant) -> bool {
        self.after.is_none_or(|after| after <= now)
    }

    /// Whether its moves still count.
    fn is_recent(&self, now: Instant) -> bool {
        self.first_yield.is_some_and(|first| now < first + YIELD_WINDOW)
    }
}

/// What an event may change.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Change {
    Link(u32),
    /// Of a bridge.
    Entry(u32, Key),
    /// Of a VXLAN interface.
    Tunnel(u32, Mac),
}

/// A request without a reply.
enum Flight {
    Put(Place, Address),
    /// A setting of a TAP.
    Setting(Place),
    Other,
}

/// Decides what the bridges get; see the module's documentation.
pub(super) struct Mirror {
    taps: BTreeMap<Place, Tap>,
    next_place: Place,
    locals: Vec<(Address, Local)>,
    table: Table,
    /// The next table, while a dump is read.
    fresh: Option<Table>,
    /// What changed since the request for the part of it that is read.
    newer: HashSet<Change>,
    /// Its sequence number, or 0 if it is to be requested; the time of the last message.
    dump: Option<(u32, Dump, Instant)>,
    /// Time of the next dump.
    sync_at: Option<Instant>,
    /// When the last one began, and the time before which there is no other.
    sync_began: Instant,
    sync_after: Instant,
    /// Whether any dump has ended.
    is_synced: bool,
    /// Whether messages were lost since.
    is_stale: bool,
    flights: HashMap<u32, Flight>,
    seq: u32,
    /// Addresses to be compared with the kernel's table.
    changed: BTreeSet<(Place, Address)>,
    later: BTreeSet<(Instant, Place, Address)>,
    /// Entries of TAPs that are no longer members.
    left: Vec<(u32, Key)>,
    /// VXLAN interfaces known in bridges.
    vxlans: BTreeSet<(u32, u32)>,
    /// When, and in which bridges, entries are announced again.
    again_at: Option<Instant>,
    again_in: BTreeSet<u32>,
    again: BTreeSet<(Place, Address)>,
    grace_until: Instant,
    began: Instant,
    /// Whether problems may have changed.
    has_news: bool,
}

impl Mirror {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            taps: BTreeMap::new(),
            next_place: 0,
            locals: Vec::new(),
            table: Table::default(),
            fresh: None,
            newer: HashSet::new(),
            dump: None,
            sync_at: Some(now),
            sync_began: now,
            sync_after: now,
            is_synced: false,
            is_stale: true,
            flights: HashMap::new(),
            seq: 0,
            changed: BTreeSet::new(),
            later: BTreeSet::new(),
            left: Vec::new(),
            vxlans: BTreeSet::new(),
            again_at: None,
            again_in: BTreeSet::new(),
            again: BTreeSet::new(),
            grace_until: now + GRACE,
            began: now,
            has_news: false,
        }
    }

    // ---- addresses of the switch ----

    pub(super) fn set_members(&mut self, members: Vec<Member>) {
        let gone: Vec<_> = self
            .taps
            .iter()
            .filter(|(_, tap)| !members.contains(&tap.member))
            .map(|(place, _)| *place)
            .collect();
        let mut changed = Vec::new();
        for place in gone {
            let Some(tap) = self.taps.remove(&place) else { continue };
            if let Some(at) = tap.at {
                let all = self.table.entries(at.bridge);
                let mine = all.filter(|(_, link, entry)| at.is_of(*link, *entry));
                self.left.extend(mine.map(|(key, link, _)| (link, key)));
            }
            changed.push(tap);
        }
        for member in members {
            if self.taps.values().any(|tap| tap.member == member) {
                continue;
            }
            let before = changed.iter().find(|tap| tap.is_same_interface(&member));
            let former = before.map(Tap::carried).unwrap_or_default();
            self.taps.insert(self.next_place, Tap::new(member, former));
            self.next_place += 1;
            self.sync_at = self.sync_at.or(Some(self.began));
        }
    }

    pub(super) fn set_locals(&mut self, locals: Vec<(Address, Local)>) {
        let before = std::mem::replace(&mut self.locals, locals);
        let (mut old, mut new) = (before.iter().peekable(), self.locals.iter().peekable());
        let mut changed = Vec::new();
        loop {
            let address = match (old.peek(), new.peek()) {
                (None, None) => break,
                (Some((address, _)), None) | (None, Some((address, _))) => *address,
                (Some((a, _)), Some((b, _))) => *a.min(b),
            };
            let was = old.next_if(|(other, _)| *other == address).map(|(_, local)| local);
            let is = new.next_if(|(other, _)| *other == address).map(|(_, local)| local);
            if was != is {
                changed.push(address);
            }
        }
        for (place, tap) in &self.taps {
            let concerned = changed.iter().filter(|address| tap.concerns(**address));
            self.changed.extend(concerned.map(|address| (*place, *address)));
        }
    }

    /// The addresses are those of another process, which announced them: they are no new evidence
    /// against other hosts.
    pub(super) fn inherit(&mut self) {
        for tap in self.taps.values_mut() {
            for (address, local) in &self.locals {
                let claim = Claim { phase: Phase::Inherited, starts: local.starts, ..Claim::NEW };
                tap.claims.insert(*address, claim);
            }
        }
    }

    fn local(&self, address: Address) -> Option<Local> {
        let at = self.locals.binary_search_by_key(&address, |(of, _)| *of).ok()?;
        let (_, local) = self.locals[at];
        (local.learned || local.starts > 0).then_some(local)
    }

    /// What the switch is to forget is no evidence.
    fn forget(&mut self, address: Address) {
        if let Ok(at) = self.locals.binary_search_by_key(&address, |(of, _)| *of) {
            self.locals[at].1.learned = false;
        }
    }

    // ---- messages of the kernel ----

    /// `seq`: number of the request that it answers; 0: none, it is an event.
    pub(super) fn hear(&mut self, seq: u32, heard: Heard, now: Instant) {
        if let Some((_, _, heard_at)) = &mut self.dump {
            *heard_at = now;
        }
        if let Some(fresh) = &self.fresh
            && let Some(change) = fresh.change(&heard)
        {
            let is_event = seq == 0;
            if is_event {
                self.newer.insert(change);
            } else if self.newer.contains(&change) {
                return;
            }
        }
        let table = self.fresh.as_mut().unwrap_or(&mut self.table);
        match heard {
            Heard::Link(link) => self.hear_link(link, now),
            Heard::LinkGone(index) => {
                if let Some(link) = table.links.remove(index)
                    && self.concerns(&link)
                {
                    self.request_sync(now);
                }
            }
            Heard::Port(index) => {
                let link = self.table.links.get(index);
                if self.fresh.is_none() && link.is_some_and(|link| self.concerns(link)) {
                    self.request_sync(now);
                }
            }
            Heard::Ip(link, ip) => table.links.set_ip(link, ip),
            Heard::Entry { link, key, entry } => {
                let Some(bridge) = table.bridge_of(link) else { return };
                table.entries.entry(bridge).or_default().insert(key, (link, entry));
                self.entry_changed(bridge, key);
            }
            Heard::EntryGone { link, key } => {
                let Some(bridge) = table.bridge_of(link) else { return };
                if table.entry(bridge, key).is_some_and(|(at, _)| at == link) {
                    table.entries.entry(bridge).or_default().remove(&key);
                    self.entry_changed(bridge, key);
                }
            }
            Heard::Tunnel { link, mac, vtep } => {
                let before = table.tunnels.entry(link).or_default().insert(mac, vtep);
                if self.fresh.is_none() && mac == Mac::default() && before.is_none() {
                    // FRR serves this VNI, since now.
                    if let Some(bridge) = self.table.bridge_of(link) {
                        self.announce_again(bridge, now);
                    }
                }
            }
            Heard::TunnelGone { link, mac, vtep } => {
                let known = table.tunnel(link, mac);
                if vtep.is_none_or(|vtep| known == Some(vtep)) {
                    table.tunnels.entry(link).or_default().remove(&mac);
                }
            }
            Heard::Done { interrupted } => self.end_dump(seq, interrupted, now),
            Heard::Reply { error } => self.hear_reply(seq, error, now),
            Heard::Lost => {
                self.flights.clear();
                self.is_stale = true;
                (self.fresh, self.dump) = (None, None);
                for claim in self.taps.values_mut().flat_map(|tap| tap.claims.values_mut()) {
                    if claim.phase == Phase::Sent {
                        claim.phase = Phase::Wanted;
                    }
                }
                self.request_sync(now);
            }
        }
    }

    fn hear_link(&mut self, link: Link, now: Instant) {
        let concerns = self.concerns(&link);
        let table = self.fresh.as_mut().unwrap_or(&mut self.table);
        let before = table.links.set(link.clone());
        if self.fresh.is_some() {
            return;
        }
        let of = |link: &Link| (link.kind, link.master, link.name.clone());
        let is_same = before.as_ref().map(of) == Some(of(&link));
        if !is_same && (concerns || before.as_ref().is_some_and(|before| self.concerns(before))) {
            self.request_sync(now);
        }
        let came_up = link.up && before.is_some_and(|before| !before.up);
        if let (true, Kind::Vxlan { .. }, Some(bridge)) = (came_up, link.kind, link.master) {
            self.announce_again(bridge, now);
        }
    }

    fn concerns(&self, link: &Link) -> bool {
        link.kind != Kind::Other || self.taps.values().any(|tap| tap.member.interface == link.name)
    }

    fn entry_changed(&mut self, bridge: u32, key: Key) {
        if self.fresh.is_some() {
            return;
        }
        for (place, tap) in &self.taps {
            if let Some(at) = tap.at.filter(|at| at.bridge == bridge)
                && let Some(vlan) = tap.vlan(at, key.vid)
            {
                self.changed.insert((*place, Address { mac: key.mac, vlan }));
            }
        }
    }

    fn announce_again(&mut self, bridge: u32, now: Instant) {
        self.again_in.insert(bridge);
        self.again_at = self.again_at.or(Some(now + AGAIN_AFTER));
    }

    fn hear_reply(&mut self, seq: u32, error: i32, now: Instant) {
        if let Some((of, _, _)) = self.dump
            && of == seq
        {
            // A dump that is refused; its end is another message.
            if error != 0 {
                (self.fresh, self.dump) = (None, None);
                // After an overrun the one before may continue for a moment.
                let rest = if error == libc::EBUSY { SYNC_REST } else { RETRY };
                self.sync_at = Some(now + rest);
            }
            return;
        }
        match self.flights.remove(&seq) {
            Some(Flight::Put(place, address)) => {
                let Some(tap) = self.taps.get_mut(&place) else { return };
                self.has_news |= tap.refused.is_some() != (error != 0);
                tap.refused = (error != 0).then_some(error);
                if let Some(claim) = tap.claims.get_mut(&address)
                    && claim.phase == Phase::Sent
                {
                    claim.phase = if error == 0 { Phase::Held } else { Phase::Wanted };
                    claim.after = (error != 0).then(|| now + RETRY);
                }
                self.changed.insert((place, address));
            }
            Some(Flight::Setting(place)) => {
                let Some(tap) = self.taps.get_mut(&place) else { return };
                if error != 0 {
                    tap.refused = Some(error);
                    self.has_news = true;
                }
            }
            Some(Flight::Other) | None => {}
        }
    }

    // ---- dumps ----

    fn request_sync(&mut self, now: Instant) {
        let rest = if self.is_synced { SYNC_REST } else { Duration::ZERO };
        let at = (now + rest).max(self.sync_after);
        self.sync_at = Some(self.sync_at.map_or(at, |before| before.min(at)));
    }

    fn end_dump(&mut self, seq: u32, interrupted: bool, now: Instant) {
        let Some((of, what, _)) = self.dump else { return };
        if of != seq {
            return;
        }
        if interrupted {
            (self.fresh, self.dump) = (None, None);
            self.sync_at = Some(now + SYNC_REST);
            return;
        }
        self.dump = match what {
            Dump::Links => Some((0, Dump::Addresses, now)),
            Dump::Addresses => Some((0, Dump::Entries, now)),
            Dump::Entries => None,
        };
        if self.dump.is_none()
            && let Some(fresh) = self.fresh.take()
        {
            self.table = fresh;
            self.sync_after = now + (now - self.sync_began) * SYNC_SHARE;
            self.resolve(now);
        }
    }

    /// Finds the TAPs in a new table, and compares all addresses with it.
    fn resolve(&mut self, now: Instant) {
        let links = &self.table.links;
        for (place, tap) in &mut self.taps {
            let bridge = links.named(&tap.member.bridge);
            let at = bridge.and_then(|bridge| {
                let link = links.named(&tap.member.interface)?;
                let Kind::Bridge { is_aware, pvid } = bridge.kind else { return None };
                let (link, is_in) = (link.index, link.master == Some(bridge.index));
                is_in.then_some(At { link, bridge: bridge.index, is_aware, pvid })
            });
            if tap.at != at {
                (tap.at, tap.is_set_up, tap.refused) = (at, false, None);
            }
            let locals = self.locals.iter().filter(|(address, _)| tap.concerns(*address));
            self.changed.extend(locals.map(|(address, _)| (*place, *address)));
            self.changed.extend(tap.claims.keys().map(|address| (*place, *address)));
        }
        for (place, tap) in &self.taps {
            let Some(at) = tap.at else { continue };
            let ours =
                self.table.entries(at.bridge).filter(|(_, link, entry)| at.is_of(*link, *entry));
            self.changed.extend(ours.filter_map(|(key, _, _)| {
                let vlan = tap.vlan(at, key.vid)?;
                Some((*place, Address { mac: key.mac, vlan }))
            }));
        }
        let bridges: BTreeSet<u32> =
            self.taps.values().filter_map(|tap| Some(tap.at?.bridge)).collect();
        let found: BTreeSet<_> = bridges
            .iter()
            .flat_map(|bridge| self.table.links.vxlans(*bridge).map(|link| (*bridge, link.index)))
            .collect();
        if self.is_synced {
            for (bridge, _) in found.difference(&self.vxlans).copied().collect::<Vec<_>>() {
                self.announce_again(bridge, now);
            }
        }
        (self.vxlans, self.is_synced, self.is_stale) = (found, true, false);
        self.has_news = true;
    }

    // ---- decisions ----

    /// Sends up to a batch of requests, once the kernel's table is known.
    pub(super) fn step(
        &mut self,
        now: Instant,
        permit: &mut dyn FnMut(PortId) -> Result<(), Instant>,
        send: &mut dyn FnMut(u32, &Request),
        actions: &mut Vec<Action>,
    ) {
        if let Some((_, _, heard_at)) = self.dump
            && now >= heard_at + DUMP_MAX
        {
            self.hear(0, Heard::Lost, now);
        }
        if self.dump.is_none() && self.sync_at.is_some_and(|at| at <= now) {
            (self.sync_at, self.fresh) = (None, Some(Table::default()));
            self.sync_began = now;
            self.dump = Some((0, Dump::Links, now));
        }
        if let Some((0, what, heard_at)) = self.dump {
            let seq = self.next_seq();
            self.newer.clear();
            self.dump = Some((seq, what, heard_at));
            send(seq, &Request::Dump(what));
        }
        if self.dump.is_some() || self.is_stale {
            return;
        }
        let mut room = BATCH.min(FLIGHT_MAX.saturating_sub(self.flights.len()));
        while room > 0
            && let Some((link, key)) = self.left.pop()
        {
            self.request(send, &Request::Delete { link, key }, Flight::Other);
            room -= 1;
        }
        // The kernel removes no entry in a VLAN that its interface has left: EINVAL.
        if self.left.is_empty() {
            self.set_up(send);
        }
        self.wake(now);
        let mut compares = COMPARES;
        while room > 0
            && compares > 0
            && let Some((place, address)) = self.changed.pop_first()
        {
            compares -= 1;
            room -= self.compare(place, address, now, permit, send, actions);
        }
        while room > 0
            && let Some((place, address)) = self.again.pop_first()
        {
            room -= self.put_again(place, address, send).min(room);
        }
    }

    fn next_seq(&mut self) -> u32 {
        // 0 is for messages without a request.
        self.seq = self.seq.checked_add(1).unwrap_or(1);
        self.seq
    }

    fn request(&mut self, send: &mut dyn FnMut(u32, &Request), what: &Request, flight: Flight) {
        let seq = self.next_seq();
        self.flights.insert(seq, flight);
        send(seq, what);
    }

    /// Moves what is due from `later`.
    fn wake(&mut self, now: Instant) {
        while let Some((at, place, address)) = self.later.first().copied()
            && at <= now
        {
            self.later.pop_first();
            self.changed.insert((place, address));
        }
        if self.again_at.is_some_and(|at| at <= now) {
            self.again_at = None;
            let bridges = std::mem::take(&mut self.again_in);
            for (place, tap) in &self.taps {
                if tap.at.is_some_and(|at| bridges.contains(&at.bridge)) {
                    let held = tap.claims.iter().filter(|(_, claim)| claim.phase == Phase::Held);
                    self.again.extend(held.map(|(address, _)| (*place, *address)));
                }
            }
        }
    }

    /// Compares an address with the kernel's table; returns the number of requests.
    fn compare(
        &mut self,
        place: Place,
        address: Address,
        now: Instant,
        permit: &mut dyn FnMut(PortId) -> Result<(), Instant>,
        send: &mut dyn FnMut(u32, &Request),
        actions: &mut Vec<Action>,
    ) -> usize {
        let local = self.local(address);
        let Some(tap) = self.taps.get_mut(&place) else { return 0 };
        let Some((at, key)) = tap.key(address) else {
            tap.claims.remove(&address);
            return 0;
        };
        let slot = self.table.entry(at.bridge, key);
        let is_ours = slot.is_some_and(|(link, entry)| link == at.link && entry.is_static);
        let claim = tap.claims.get(&address).copied();
        let Some(local) = local else {
            if claim.is_some_and(|claim| claim.phase == Phase::Sent) {
                return 0;
            }
            if claim.is_some_and(|claim| claim.is_recent(now)) {
                // Its moves count when it comes back.
                tap.claims.entry(address).and_modify(|claim| claim.phase = Phase::Yielded);
                let first = claim.and_then(|claim| claim.first_yield);
                self.later.extend(first.map(|first| (first + YIELD_WINDOW, place, address)));
            } else {
                tap.claims.remove(&address);
            }
            if !is_ours {
                return 0;
            }
            if claim.is_none() && now < self.grace_until {
                self.later.insert((self.grace_until, place, address));
                return 0;
            }
            self.request(send, &Request::Delete { link: at.link, key }, Flight::Other);
            return 1;
        };
        let mut claim = claim.unwrap_or(Claim::NEW);
        let is_inherited = claim.phase == Phase::Inherited;
        if (claim.phase == Phase::Held || is_inherited) && !is_ours {
            let moved =
                slot.filter(|(link, entry)| *link != at.link && (!is_inherited || entry.is_extern));
            claim.phase = if moved.is_some() { Phase::Yielded } else { Phase::Wanted };
            // Not at once, if its entry was deleted: whoever did so may continue.
            claim.after = (!is_inherited).then(|| now + LOST_REST);
            if let Some((link, _)) = moved {
                self.yielded(&mut claim, local, now);
                self.forget(address);
                actions.push(Action::Forget(address, local.port));
                if claim.after.is_some() {
                    let vtep = self.table.tunnel(link, address.mac);
                    actions.push(Action::Duplicate(address, local.port, vtep));
                }
                return self.keep(place, address, claim, 0);
            }
        }
        if claim.phase == Phase::Yielded && (local.learned || local.starts != claim.starts) {
            claim.phase = Phase::Wanted;
        }
        if is_ours && matches!(claim.phase, Phase::Wanted | Phase::Inherited) {
            // Of an earlier process, or the reply was lost.
            claim.phase = Phase::Held;
        }
        if claim.phase != Phase::Wanted || !claim.is_due(now) {
            return self.keep(place, address, claim, 0);
        }
        claim.after = None;
        if let Err(next) = permit(local.port) {
            claim.after = Some(next.max(now + RATE_REST));
            return self.keep(place, address, claim, 0);
        }
        claim.phase = Phase::Sent;
        let put = Request::Put { link: at.link, key, fixed: true };
        self.request(send, &put, Flight::Put(place, address));
        self.keep(place, address, claim, 1)
    }

    /// Records a claim, and when it is compared again.
    fn keep(&mut self, place: Place, address: Address, claim: Claim, requests: usize) -> usize {
        let waits = claim.phase == Phase::Wanted;
        self.later.extend(claim.after.filter(|_| waits).map(|after| (after, place, address)));
        if let Some(tap) = self.taps.get_mut(&place) {
            tap.claims.insert(address, claim);
        }
        requests
    }

    /// Counts a move to another host; beyond a number the address is left to it for some time.
    fn yielded(&self, claim: &mut Claim, local: Local, now: Instant) {
        if !claim.is_recent(now) {
            (claim.yields, claim.first_yield) = (0, Some(now));
        }
        claim.yields = claim.yields.saturating_add(1);
        claim.starts = local.starts;
        claim.after = (claim.yields >= YIELDS_MAX).then(|| now + HOLD);
    }

    /// Has the kernel report an entry again that did not change. In between it ages, as a learned
    /// one; FRR does not withdraw it.
    fn put_again(
        &mut self,
        place: Place,
        address: Address,
        send: &mut dyn FnMut(u32, &Request),
    ) -> usize {
        let Some(tap) = self.taps.get(&place) else { return 0 };
        let Some((at, key)) = tap.key(address) else { return 0 };
        let is_held = tap.claims.get(&address).is_some_and(|claim| claim.phase == Phase::Held);
        let slot = self.table.entry(at.bridge, key);
        if !is_held || slot.is_none_or(|(link, _)| link != at.link) {
            return 0;
        }
        if let Some(claim) = self.taps.get_mut(&place).and_then(|t| t.claims.get_mut(&address)) {
            claim.phase = Phase::Sent;
        }
        let link = at.link;
        self.request(send, &Request::Put { link, key, fixed: false }, Flight::Other);
        let put = Request::Put { link, key, fixed: true };
        self.request(send, &put, Flight::Put(place, address));
        2
    }

    /// Time of the next [`step`](Self::step) without a message.
    pub(super) fn due(&self) -> Option<Instant> {
        if let Some((_, _, heard_at)) = self.dump {
            return Some(heard_at + DUMP_MAX);
        }
        let has_work = !self.is_stale
            && self.flights.len() < FLIGHT_MAX
            && !(self.changed.is_empty() && self.left.is_empty() && self.again.is_empty());
        let work = has_work.then_some(self.began);
        let later = self.later.first().map(|(at, _, _)| *at).into_iter().chain(self.again_at);
        let later = later.filter(|_| !self.is_stale);
        work.into_iter().chain(self.sync_at).chain(later).min()
    }

    /// Whether no entry of a former member is left, and all requests have their reply.
    pub(super) fn has_left(&self) -> bool {
        self.left.is_empty() && self.flights.is_empty()
    }
}

#[cfg(test)]
mod tests;
