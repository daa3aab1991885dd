//! From one ingress burst to the egress queues: the learning switch, and the cross-connect.
//!
//! The frames of a burst are first grouped by egress queue, then each queue is locked once and
//! given its group; a port's frames keep their order. What does not fit is held for its
//! destination, within bounds, or dropped with a cause ([`hold`](crate::hold)).

mod bounds;
mod direct;
mod full;
mod mirror;
mod queue;
mod starved;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use shm::Seg;

use self::full::Senders;
pub use self::mirror::{Captured, Mirror};
pub use self::queue::EgressQueue;
pub use self::starved::STARVED_NS;
use crate::account::Account;
use crate::fdb::{Fdb, Learned, PortId};
use crate::flow;
use crate::frame::{Burst, Frame};
use crate::hold::{Backpressure, Hold};
use crate::offload;
use crate::port::{Egress, Fault, Steer};
use crate::stats::IngressStats;
use crate::steering::Steering;
use crate::tuning::Tuning;
use crate::vnet::{GSO_NONE, Offloads, VnetHdr};

/// Addresses and type: the least that is a frame.
const ETHERNET_LEN: u32 = 14;

/// How frames find their destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Learning Ethernet switch.
    Switch,
    /// Ports 0 and 1, 2 and 3, ... are wired together; nothing is looked up.
    Cross,
}

/// A destination: the egress side of a port.
pub struct Port {
    /// Its place in the table.
    pub id: PortId,
    /// Its name, as the operator gave it.
    pub name: String,
    /// Its egress queues.
    pub egress: Vec<EgressQueue>,
    /// How many of them the peer has enabled, from the first on; 0: the port is down.
    active: AtomicU16,
    /// Which queue each flow takes.
    steering: Steering,
    /// Copies of its frames, both directions.
    pub mirror: Mirror,
    /// What its peer makes us spend.
    pub account: Arc<Account>,
    /// Names its peer's connection; see [`Port::epoch`].
    epoch: AtomicU64,
}

/// Epochs given so far.
static EPOCHS: AtomicU64 = AtomicU64::new(0);

impl Port {
    /// A port that is down.
    pub fn new(id: PortId, name: String, egress: Vec<EgressQueue>) -> Self {
        let (steering, active) = (Steering::new(egress.len()), AtomicU16::new(0));
        let port = Self {
            id,
            name,
            egress,
            active,
            steering,
            mirror: Mirror::default(),
            account: Arc::default(),
            epoch: AtomicU64::new(EPOCHS.fetch_add(1, Ordering::Relaxed)),
        };
        port.charged_to(Arc::default())
    }

    /// Names the connection of its peer among those of all ports: a report about an earlier one,
    /// or about another port that had its id, carries another epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Its peer's connection ended: what is reported about it from now on is late.
    pub fn end_epoch(&self) {
        self.epoch.store(EPOCHS.fetch_add(1, Ordering::Relaxed), Ordering::Release);
    }

    /// The same, charged to `account` in place of one of its own with the default limits.
    #[must_use]
    pub fn charged_to(mut self, account: Arc<Account>) -> Self {
        for queue in &mut self.egress {
            queue.hold = Mutex::new(Hold::new(Arc::clone(&account)));
        }
        Self { account, ..self }
    }

    /// Tells how many egress queues the peer has enabled.
    pub fn set_active(&self, queues: u16) {
        assert!(usize::from(queues) <= self.egress.len());
        self.egress.iter().for_each(EgressQueue::forget_full);
        self.active.store(queues, Ordering::Release);
        self.egress[usize::from(queues)..].iter().for_each(EgressQueue::drop_held);
    }

    /// How many egress queues are enabled.
    pub fn active(&self) -> u16 {
        self.active.load(Ordering::Acquire)
    }
}

/// All ports, by id. A change makes a new table.
pub type Table = Vec<Option<Arc<Port>>>;

/// Where a burst comes from.
pub struct Source {
    /// The port.
    pub port: PortId,
    /// Index of the ingress queue in the port.
    pub queue: u16,
    /// The queue's counters.
    pub stats: Arc<IngressStats>,
    /// Its settings.
    pub tuning: Arc<Tuning>,
    /// What it waits for.
    pub backpressure: Backpressure,
}

impl Source {
    /// A queue that waits for nothing.
    pub fn new(port: PortId, queue: u16, stats: Arc<IngressStats>, tuning: Arc<Tuning>) -> Self {
        Self { port, queue, stats, tuning, backpressure: Backpressure::default() }
    }
}

/// Frames of one burst for one egress queue.
#[derive(Default)]
struct Group {
    port: PortId,
    queue: u16,
    /// Indices in the burst.
    picks: Vec<u16>,
    /// Bits of picks that are copies of a flooded frame (bit i: `picks[i]`).
    floods: u64,
}

impl Group {
    /// Drops the picks of which `keep` is false.
    #[cold]
    fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let (floods, mut i, mut kept) = (std::mem::take(&mut self.floods), 0, 0);
        self.picks.retain(|pick| {
            let stays = keep(usize::from(*pick));
            self.floods |= u64::from(stays && floods & 1 << i != 0) << kept;
            kept += u32::from(stays);
            i += 1;
            stays
        });
    }
}

/// A frame's flow, which is hashed once, and only where a port has several queues.
struct Flow<'h> {
    /// The private head of the frame.
    head: &'h [u8],
    hash: Option<u32>,
    now_s: u32,
}

impl Flow<'_> {
    #[inline]
    fn hash(&mut self, key: u64) -> u32 {
        *self.hash.get_or_insert_with(|| flow::flow_hash(self.head, key))
    }
}

/// One worker's forwarding state.
pub struct Forwarder {
    mode: Mode,
    /// Which bit of [`EgressQueue::waiters`] is ours.
    worker: u8,
    fdb: Arc<Fdb>,
    table: Arc<Table>,
    flow_key: u64,
    groups: Vec<Group>,
    groups_used: usize,
    /// Bursts so far.
    bursts: u64,
    /// For each port, the burst in which it last had a group, and which.
    group_of: Vec<(u64, usize)>,
    /// How each port's peer wants frames spread, as of the last that it was given.
    steer: Vec<Option<Arc<dyn Steer>>>,
    scratch: offload::Scratch,
    /// What the burst costs so far.
    made: bounds::Made,
    /// Full destinations that are to be tried again; whether each was asked to notify since it last
    /// was.
    blocked: BTreeMap<(PortId, u16), bool>,
    /// Workers (one bit each) that wait for a destination that took some of our frames since: it
    /// may have room for theirs, and notifies nobody once it is asked not to.
    pub woken: u64,
    /// Queues whose peers are to be notified later, and when, in ns; the earliest is not first.
    late: Vec<(u64, PortId, u16)>,
    /// The soonest of them.
    late_ns: u64,
    /// Ports whose peers broke their protocol, to be stopped by the worker's owner, and in which
    /// [epoch](Port::epoch): that of the moment, however late it is reported.
    pub faults: Vec<(PortId, u64, Fault)>,
    /// Egress queues that [starve](EgressQueue::starved_ns) from now on, or (false) no more.
    pub starved: Vec<(PortId, u16, bool)>,
    /// When the table was last swept.
    aged_s: u32,
    last_learned: Option<([u8; 6], u16, PortId, u32)>,
    last_found: Option<([u8; 6], u16, u32, Option<PortId>)>,
}

impl Forwarder {
    /// A forwarder for worker number `worker` (below 64).
    pub fn new(mode: Mode, worker: u8, fdb: Arc<Fdb>, table: Arc<Table>, flow_key: u64) -> Self {
        assert!(worker < 64);
        let group_of = vec![(0, 0); table.len()];
        Self {
            mode,
            worker,
            fdb,
            table,
            flow_key,
            groups: Vec::new(),
            groups_used: 0,
            bursts: 0,
            group_of,
            steer: Vec::new(),
            scratch: offload::Scratch::default(),
            made: bounds::Made::default(),
            blocked: BTreeMap::new(),
            woken: 0,
            late: Vec::new(),
            late_ns: u64::MAX,
            aged_s: 0,
            faults: Vec::new(),
            starved: Vec::new(),
            last_learned: None,
            last_found: None,
        }
    }

    /// The port of this id, in the table in use.
    pub fn port(&self, id: PortId) -> Option<&Arc<Port>> {
        self.table.get(usize::from(id.0))?.as_ref()
    }

    /// Replaces the port table.
    pub fn set_table(&mut self, table: Arc<Table>) {
        self.group_of.resize(table.len(), (0, 0));
        self.steer.clear();
        self.table = table;
        self.last_found = None;
        self.last_learned = None;
    }

    /// Delivers, holds or drops each frame of a burst. `now_ns` is any monotonic time.
    pub fn forward(&mut self, from: &Source, burst: &mut Burst<'_>, now_ns: u64) {
        self.groups_used = 0;
        self.bursts += 1;
        self.made = bounds::Made::default();
        match self.mode {
            Mode::Switch => self.switch(from, burst, (now_ns / 1_000_000_000) as u32),
            Mode::Cross => self.cross(from, burst),
        }
        if let Some(port) = self.table.get(usize::from(from.port.0)).and_then(Option::as_ref)
            && port.mirror.is_on()
        {
            // Those that are left come again.
            let new = 0..burst.frames.len() - burst.left();
            burst.fetch(new.clone());
            port.mirror.copy(burst, new, true, now_ns);
        }
        for i in 0..self.groups_used {
            let mut group = std::mem::take(&mut self.groups[i]);
            self.deliver(from, &mut group, burst, now_ns);
            self.groups[i] = group;
        }
        if burst.is_lent() {
            from.stats.drops_bad_grant.add(u64::from(burst.unreadable()));
        }
    }

    fn cross(&mut self, from: &Source, burst: &mut Burst<'_>) {
        let to = PortId(from.port.0 ^ 1);
        let port = self.table.get(usize::from(to.0)).and_then(Option::as_ref);
        let Some(active) = port.map(|p| p.active()).filter(|n| *n > 0) else {
            from.stats.drops_no_port.add(burst.frames.len() as u64);
            return;
        };
        let queue = from.queue % active;
        let at = self.group_for(to, queue);
        let picks = &mut self.groups[at].picks;
        let (mut plain, mut left) = (true, None);
        for (i, frame) in burst.frames.iter().enumerate() {
            if frame.len < ETHERNET_LEN {
                from.stats.drops_runt.add(1);
                continue;
            }
            if !self.made.takes(frame, i == 0) {
                left = Some(i);
                break;
            }
            plain &= frame.hdr.is_plain();
            picks.push(i as u16);
        }
        if let Some(i) = left {
            burst.leave(i);
        }
        // Nothing is looked at, so nothing is copied to look at, but for frames that may have to
        // be worked on; a frame's header is then decided on and delivered from the same copy.
        if !plain {
            burst.snapshot();
        }
    }

    fn switch(&mut self, from: &Source, burst: &mut Burst<'_>, now_s: u32) {
        burst.snapshot();
        let sender = self.table.get(usize::from(from.port.0)).and_then(Option::as_ref);
        let sender = sender.filter(|port| port.active() > 1).cloned();
        let mut left = None;
        // The group of the frame before, if all frames for its port are in it.
        let mut last: Option<(PortId, usize)> = None;
        for i in 0..burst.frames.len() {
            if burst.is_out(i) {
                continue;
            }
            let head = burst.head(i);
            let (Some(dst), Some(src)) = (flow::dst_mac(head), flow::src_mac(head)) else {
                from.stats.drops_runt.add(1);
                continue;
            };
            let vlan = flow::vlan_id(head);
            self.learn(src, vlan, from.port, now_s);
            let mut flow = Flow { head, hash: None, now_s };
            if let Some(sender) = &sender {
                let _ = sender.steering.queue(flow.hash(self.flow_key), from.queue, now_s);
            }
            if flow::is_link_local(dst) {
                from.stats.drops_link_local.add(1);
                continue;
            }
            let to = if flow::is_multicast(dst) { None } else { self.find(dst, vlan, now_s) };
            match to {
                Some(to) if to == from.port => from.stats.drops_same_port.add(1),
                Some(to) => {
                    if !self.made.takes(&burst.frames[i], i == 0) {
                        left = Some(i);
                        break;
                    }
                    let at = match last {
                        Some((port, at)) if port == to => at,
                        _ => {
                            let queue = self.queue_of(to, &mut flow);
                            let at = self.group_for(to, queue);
                            last = self.has_one_queue(to).then_some((to, at));
                            at
                        }
                    };
                    self.groups[at].picks.push(i as u16);
                }
                None if self.flood(from, (i, &burst.frames[i]), &mut flow) => {}
                None => {
                    left = Some(i);
                    break;
                }
            }
        }
        if let Some(i) = left {
            burst.leave(i);
        }
    }

    #[inline]
    fn learn(&mut self, src: [u8; 6], vlan: u16, port: PortId, now_s: u32) {
        let fact = Some((src, vlan, port, now_s));
        if self.last_learned == fact || flow::is_multicast(src) {
            return;
        }
        let learned = self.fdb.learn(src, vlan, port, now_s);
        self.last_learned = fact;
        if !matches!(learned, Learned::Known) {
            self.last_found = None;
        }
        // Silent addresses are swept out when their place is wanted, at most once a second: no
        // timer runs on an idle switch.
        if matches!(learned, Learned::LimitReached | Learned::TableFull) && self.aged_s != now_s {
            self.aged_s = now_s;
            self.fdb.age(now_s);
        }
    }

    #[inline]
    fn find(&mut self, dst: [u8; 6], vlan: u16, now_s: u32) -> Option<PortId> {
        // A memo for one burst's worth of the same flow; it lives at most a second, and a move
        // seen by another worker within that second only delays what flooding would do.
        match self.last_found {
            Some((mac, tag, when, Some(port))) if (mac, tag, when) == (dst, vlan, now_s) => {
                Some(port)
            }
            _ => {
                let port = self.fdb.lookup(dst, vlan, now_s);
                let port =
                    port.filter(|p| self.table.get(usize::from(p.0)).is_some_and(Option::is_some));
                self.last_found = Some((dst, vlan, now_s, port));
                port
            }
        }
    }

    /// The egress queue of `to` for a flow: it stays on one queue, that on which the peer sends it,
    /// or else the one of its hash.
    #[inline]
    fn queue_of(&self, to: PortId, flow: &mut Flow<'_>) -> u16 {
        let Some(Some(port)) = self.table.get(usize::from(to.0)) else { return 0 };
        match (port.active(), self.steer.get(usize::from(to.0))) {
            (0 | 1, _) => 0,
            (n, Some(Some(steer))) => steer.queue(flow.head, n) % n,
            (n, _) => {
                let hash = flow.hash(self.flow_key);
                let usual = (hash % u32::from(n)) as u16;
                let queue = port.steering.queue(hash, usual, flow.now_s).unwrap_or(usual);
                if queue < n { queue } else { usual }
            }
        }
    }

    /// Remembers how a port's peer wants frames spread, so that none need be asked per frame. What
    /// it says reaches us with the next frames; until then they go as before.
    fn learn_steer(&mut self, port: PortId, steer: Option<Arc<dyn Steer>>) {
        let at = usize::from(port.0);
        if steer.is_none() && self.steer.len() <= at {
            return;
        }
        self.steer.resize(self.steer.len().max(at + 1), None);
        self.steer[at] = steer;
    }

    /// Puts frame `i` into a group for each port but its own; false: it is to be left.
    #[cold]
    #[inline(never)]
    fn flood(&mut self, from: &Source, (i, frame): (usize, &Frame), flow: &mut Flow<'_>) -> bool {
        if !self.may_flood(from.port, frame, i == 0) {
            return false;
        }
        let table = Arc::clone(&self.table);
        for port in table.iter().flatten() {
            if port.id != from.port && port.active() > 0 {
                let queue = self.queue_of(port.id, flow);
                let at = self.group_for(port.id, queue);
                let group = &mut self.groups[at];
                group.floods |= 1 << group.picks.len();
                group.picks.push(i as u16);
            }
        }
        true
    }

    fn has_one_queue(&self, port: PortId) -> bool {
        let port = self.table.get(usize::from(port.0)).and_then(Option::as_ref);
        port.is_some_and(|port| port.active() <= 1)
    }

    /// The index of the group for a queue, which is made if there is none yet.
    #[inline]
    fn group_for(&mut self, port: PortId, queue: u16) -> usize {
        let used = &self.groups[..self.groups_used];
        let is_it = |g: &Group| g.port == port && g.queue == queue;
        // The last group first: most frames of a burst go where the one before went.
        let at = if used.last().is_some_and(is_it) {
            Some(used.len() - 1)
        } else {
            // Not a search: a flood has a group for each port.
            match self.group_of.get(usize::from(port.0)) {
                Some((burst, at)) if *burst == self.bursts => Some(*at)
                    .filter(|at| is_it(&used[*at]))
                    .or_else(|| used.iter().rposition(is_it)),
                _ => None,
            }
        };
        at.unwrap_or_else(|| {
            if self.groups_used == self.groups.len() {
                self.groups.push(Group::default());
            }
            let group = &mut self.groups[self.groups_used];
            group.picks.clear();
            (group.port, group.queue, group.floods) = (port, queue, 0);
            self.groups_used += 1;
            if let Some(of) = self.group_of.get_mut(usize::from(port.0)) {
                *of = (self.bursts, self.groups_used - 1);
            }
            self.groups_used - 1
        })
    }

    /// Gives a group to its queue, under one lock.
    fn deliver(&mut self, from: &Source, group: &mut Group, burst: &mut Burst<'_>, now_ns: u64) {
        let table = Arc::clone(&self.table);
        let Some(port) = table.get(usize::from(group.port.0)).and_then(Option::as_ref) else {
            from.stats.drops_no_port.add(group.picks.len() as u64);
            return;
        };
        let egress = &port.egress[usize::from(group.queue)];
        let mut queue = egress.lock();
        if self.made.exceeds() {
            self.limit_copies(from, group, burst, &queue.offloads());
        }
        if burst.is_lent() {
            let as_it_is = queue.takes_granted() && !port.mirror.is_on();
            fetch(burst, group, &queue.offloads(), as_it_is);
        }
        if group.floods.count_ones() < group.picks.len() as u32 {
            from.backpressure.sends_to((group.port, group.queue), now_ns);
        }
        // Behind those that wait.
        let is_free =
            !egress.is_holding() || self.send_held(port, group.queue, &mut *queue, now_ns);
        let (mut done, fault) = if is_free {
            self.put(&mut *queue, egress, &Senders::One(&from.stats), &group.picks, burst)
        } else {
            (0, None)
        };
        queue.flush();
        if port.active() > 1 {
            self.learn_steer(port.id, queue.steer());
        }
        let full = done < group.picks.len();
        if done > 0
            && let Some(at) = egress.notify(&mut *queue, done, full, now_ns)
        {
            self.put_off(at, group.port, group.queue);
        }
        if let Some(fault) = fault {
            self.faults.push((group.port, port.epoch(), fault));
            egress.stats.drops_down.add((group.picks.len() - done) as u64);
            done = group.picks.len();
        } else if full {
            self.refused(from, port, group, done, burst, (&mut *queue, now_ns));
        }
        drop(queue);
        if port.mirror.is_on() {
            let picks = group.picks[..done].iter().map(|i| usize::from(*i));
            port.mirror.copy(burst, picks, false, now_ns);
        }
        if done > 0 {
            self.took((group.port, group.queue), egress);
        }
    }

    /// Puts `picks` in order; frames the peer cannot take as they are go through software. Returns
    /// how many were dealt with, and the fault that ended it.
    fn put(
        &mut self,
        queue: &mut dyn Egress,
        egress: &EgressQueue,
        from: &Senders<'_>,
        picks: &[u16],
        burst: &Burst<'_>,
    ) -> (usize, Option<Fault>) {
        let takes = queue.offloads();
        let needs_work = |pick: &u16| {
            let i = usize::from(*pick);
            let hdr = &burst.frames[i].hdr;
            !hdr.is_plain() && offload::needs_work(burst.head(i), hdr, &takes)
        };
        let mut done = 0;
        while done < picks.len() {
            let plain = picks[done..].iter().position(needs_work).unwrap_or(picks.len() - done);
            let (want, got) = if plain > 0 {
                (plain, queue.put(burst, &picks[done..done + plain]))
            } else {
                let put = self.put_in_software(queue, egress, from, picks[done], burst);
                (1, put.map(usize::from))
            };
            match got {
                Ok(n) => done += n,
                Err(fault) => return (done, Some(fault)),
            }
            if got != Ok(want) {
                break;
            }
        }
        (done, None)
    }

    /// Segments or checksums one frame for a peer that cannot. False: it does not fit now.
    fn put_in_software(
        &mut self,
        queue: &mut dyn Egress,
        egress: &EgressQueue,
        from: &Senders<'_>,
        pick: u16,
        burst: &Burst<'_>,
    ) -> Result<bool, Fault> {
        let i = usize::from(pick);
        let frame = &burst.frames[i];
        let takes = queue.offloads();
        let head = burst.head(i);
        let Ok(plan) = offload::plan(head, frame.len, &frame.hdr, &takes) else {
            from.drops_bad_gso(pick);
            return Ok(true);
        };
        // All segments or none: a frame cut in the middle would be sent again as a whole. A peer
        // that can never have room for all of them says so, and gets what fits.
        if queue.room(plan.len_max, plan.frames)? < plan.frames {
            egress.stats.full.add(1);
            return Ok(false);
        }
        let mut body = Vec::new();
        offload::after(burst.segs(frame), head.len(), &mut body);
        let (mut fault, mut cut) = (None, false);
        let mut emit = |head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr| {
            let fits = queue.put_made(head, body, hdr).unwrap_or_else(|f| {
                fault = Some(f);
                false
            });
            cut |= !fits;
            fits
        };
        let (len, hdr) = (frame.len, &frame.hdr);
        let made = offload::resolve(head, &body, len, hdr, &takes, &mut self.scratch, &mut emit);
        if let Some(fault) = fault {
            return Err(fault);
        }
        match made {
            Ok(made) if frame.hdr.gso_type != GSO_NONE && plan.frames > 1 => {
                egress.stats.segmented.add(made as u64);
            }
            Ok(made) => egress.stats.checksummed.add(made as u64),
            Err(_) => from.drops_bad_gso(pick),
        }
        egress.stats.drops_no_room.add(u64::from(cut));
        Ok(true)
    }

    /// Remembers to notify a queue's peer.
    fn put_off(&mut self, at: u64, port: PortId, queue: u16) {
        self.late.push((at, port, queue));
        self.late_ns = self.late_ns.min(at);
    }

    /// When [`notify_late`](Self::notify_late) is to be called next, in ns.
    pub fn late(&self) -> Option<u64> {
        (!self.late.is_empty()).then_some(self.late_ns)
    }

    /// At the end of a round: notifies the peers whose time has come (`u64::MAX`: all of them). If
    /// the worker `rests` (found nothing, or goes to sleep), those that wait only for more as well.
    pub fn notify_late(&mut self, now_ns: u64, rests: bool) {
        if self.late.is_empty() || !rests && self.late_ns > now_ns {
            return;
        }
        let table = &self.table;
        let mut next = u64::MAX;
        self.late.retain_mut(|(at, port, queue)| {
            let port = table.get(usize::from(port.0)).and_then(Option::as_ref);
            let egress = port.and_then(|port| port.egress.get(usize::from(*queue)));
            let Some(again) = egress.and_then(|e| e.tell_late(*at, rests, now_ns)) else {
                return false;
            };
            *at = again;
            next = next.min(again);
            true
        });
        self.late_ns = next;
    }
}

/// Copies to private memory what the destination cannot use where it is: everything, unless it
/// takes the frames as they are; else what must be worked on. What cannot be read is dropped.
#[cold]
fn fetch(burst: &mut Burst<'_>, group: &mut Group, takes: &Offloads, as_it_is: bool) {
    let needs_work = |burst: &Burst<'_>, i: usize| {
        let hdr = burst.frames[i].hdr;
        !hdr.is_plain() && offload::needs_work(burst.head(i), &hdr, takes)
    };
    let mut wanted = 0_u64;
    for i in group.picks.iter().map(|pick| usize::from(*pick)) {
        wanted |= u64::from(!as_it_is || needs_work(burst, i)) << i;
    }
    burst.fetch((0..burst.frames.len()).filter(|i| wanted & 1 << i != 0));
    if burst.any_out() {
        group.retain(|i| !burst.is_out(i));
    }
}

#[cfg(test)]
mod tests;
