//! Forwarding of an ingress burst to egress queues: the learning switch and the cross-connect.
//!
//! The frames of a burst are first grouped by egress queue, then each queue is locked once for its
//! group; a port's frames keep their order. Frames that do not fit are held for their destination,
//! within bounds, or dropped with a cause ([`hold`](crate::hold)).

mod announce;
mod bounds;
mod direct;
mod fetch;
mod findings;
mod flood;
mod full;
mod group;
mod late;
mod learn;
mod mirror;
mod queue;
mod rates;
mod run;
mod slow;
mod software;
mod span;
mod stalled;
mod storm;
mod tenants;
mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use shm::sync::{Lock, Mutex};

use self::fetch::fetch;
pub use self::findings::{Events, Findings, PortEvent, ThinVec};
use self::full::Senders;
pub use self::full::{ArmedFull, HeldCopy};
use self::group::{Group, Handled};
use self::learn::Last;
pub use self::mirror::{Captured, Mirror};
pub use self::queue::EgressQueue;
use self::queue::LockedQueue;
use self::rates::{Paced, Permit};
use self::run::{LastGroup, Run};
use self::slow::Slow;
pub use self::slow::SlowDelivery;
pub use self::span::Span;
pub use self::stalled::STALLED_AFTER;
pub use self::storm::StormLimits;
use self::wire::Wire;
use crate::account::Account;
use crate::fdb::{Fdb, PortId};
use crate::flow;
use crate::frame::Burst;
use crate::hold::{Backpressure, Hold};
use crate::offload;
use crate::port::{Egress, Fault, QueueId, Steer};
use crate::stats::IngressStats;
use crate::steering::Steering;
use crate::tenant::{Admitted, Sender, Tenants};
use crate::time::{Instant, Ns};
use crate::tuning::Tuning;

/// Shortest frame: addresses and type.
const ETHERNET_LEN: u32 = 14;

/// Forwarding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Learning Ethernet switch.
    Switch,
    /// Ports 0 and 1, 2 and 3, ... are connected; no lookup.
    Cross,
}

/// A destination: the egress side of a port.
pub struct Port {
    /// Its index in the table.
    pub id: PortId,
    /// Its name, given by the operator.
    pub name: String,
    /// Its egress queues.
    pub egress: Vec<EgressQueue>,
    /// Number of queues that the peer has enabled, from the first on; 0: the port is down.
    active: AtomicU16,
    /// The port that it is wired to.
    wire: Wire,
    /// How many times it came up.
    starts: AtomicU64,
    /// Whether its account limits the rate of frames to the peer.
    has_rate_out: AtomicBool,
    /// Whether its account limits what its peer floods.
    has_storm: AtomicBool,
    /// Seconds for which it does not take addresses that flap; 0: it takes them.
    loop_guard_s: AtomicU32,
    /// Queue of each flow.
    steering: Steering,
    /// Capture of its frames, both directions.
    pub mirror: Mirror,
    /// Account of its peer.
    pub account: Arc<Account>,
    /// Identifies its peer's connection; see [`Port::epoch`].
    epoch: AtomicU64,
}

/// Number of epochs assigned so far.
static EPOCHS: AtomicU64 = AtomicU64::new(0);

impl Port {
    /// Creates a port that is down.
    pub fn new(id: PortId, name: String, egress: Vec<EgressQueue>) -> Self {
        let (steering, active) = (Steering::new(egress.len()), AtomicU16::new(0));
        let port = Self {
            id,
            name,
            egress,
            active,
            wire: Wire::default(),
            starts: AtomicU64::new(0),
            has_rate_out: AtomicBool::new(false),
            has_storm: AtomicBool::new(false),
            loop_guard_s: AtomicU32::new(0),
            steering,
            mirror: Mirror::default(),
            account: Arc::default(),
            epoch: AtomicU64::new(EPOCHS.fetch_add(1, Ordering::Relaxed)),
        };
        port.charged_to(Arc::default())
    }

    /// Replaces its account, which has the default limits, by `account`.
    #[must_use]
    pub fn charged_to(mut self, account: Arc<Account>) -> Self {
        for queue in &mut self.egress {
            queue.hold = Mutex::new(Lock::Hold, Hold::new(Arc::clone(&account)));
        }
        Self { account, ..self }
    }

    /// Sets the number of egress queues that the peer has enabled.
    pub fn set_active(&self, queues: u16) {
        assert!(usize::from(queues) <= self.egress.len());
        self.egress.iter().for_each(EgressQueue::reset_full);
        let before = self.active.swap(queues, Ordering::Release);
        self.starts.fetch_add(u64::from(before == 0 && queues > 0), Ordering::Relaxed);
        self.egress[usize::from(queues)..].iter().for_each(EgressQueue::drop_held);
    }

    /// Number of enabled egress queues.
    pub fn active(&self) -> u16 {
        self.active.load(Ordering::Acquire)
    }
}

/// All ports, by id. A change creates a new table.
pub type Table = Vec<Option<Arc<Port>>>;

/// Origin of a burst: an ingress queue.
#[derive(Clone, Debug)]
pub struct Source {
    /// The port.
    pub port: PortId,
    /// Index of the ingress queue in the port.
    pub queue: u16,
    /// The queue's counters.
    pub stats: Arc<IngressStats>,
    /// The queue's settings.
    pub tuning: Arc<Tuning>,
    /// Destinations it waits for.
    pub backpressure: Backpressure,
}

impl Source {
    /// Creates the origin for a queue that waits for no destination.
    pub fn new(port: PortId, queue: u16, stats: Arc<IngressStats>, tuning: Arc<Tuning>) -> Self {
        Self { port, queue, stats, tuning, backpressure: Backpressure::default() }
    }
}

/// Time of a burst, computed once.
#[derive(Clone, Copy)]
struct Time {
    now: Instant,
    /// The same in whole seconds, as the FDB counts them.
    now_s: u32,
}

/// A frame's flow, hashed at most once, and only for ports with several queues.
struct Flow<'h> {
    /// The private head of the frame.
    head: &'h [u8],
    /// The VLAN in which its addresses are learned and looked up.
    vlan: u16,
    hash: Option<u32>,
    time: Time,
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
    /// This worker's bit in [`EgressQueue::waiters`].
    worker: u8,
    fdb: Arc<Fdb>,
    table: Arc<Table>,
    flow_key: u64,
    groups: Vec<Group>,
    groups_used: usize,
    /// Bursts so far.
    bursts: u64,
    /// For each port, the burst of its last group, and the group's index.
    group_of: Vec<(u64, usize)>,
    /// How each port's peer wants frames spread, as of its last frames.
    steer: Vec<Option<Arc<dyn Steer>>>,
    scratch: offload::Scratch,
    /// Rules of ports, if any port has some.
    tenants: Option<Arc<Tenants>>,
    /// Whether a frame of the burst has a tag, if there are rules.
    has_tagged: bool,
    /// Kept for their allocations.
    retagged: tenants::Retagged,
    /// Cost of the burst so far.
    made: bounds::Made,
    /// Copies for mirror ports.
    copies: span::Copies,
    /// Measured deliveries.
    slow: Slow,
    /// Floods of blocked addresses.
    echoes: flood::Echoes,
    /// Full destinations to retry, each with whether it was armed since the last retry.
    blocked: BTreeMap<QueueId, bool>,
    /// Findings of the call in progress.
    findings: Findings,
    /// Queues with a delayed notification, and its time; unordered.
    late: Vec<(Instant, QueueId)>,
    /// The earliest of these times.
    late_at: Instant,
    /// Queues that hold frames for their ports' rates.
    paced: Paced,
    /// Time of the table's last sweep.
    aged_s: u32,
    /// Entries that had been removed or moved in the table when these were true.
    fdb_removals: u64,
    last: Last,
}

impl Forwarder {
    /// Creates a forwarder for worker `worker` (below 64).
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
            tenants: None,
            has_tagged: false,
            retagged: tenants::Retagged::default(),
            made: bounds::Made::default(),
            copies: span::Copies::default(),
            slow: Slow::default(),
            echoes: flood::Echoes::new(flow_key),
            blocked: BTreeMap::new(),
            findings: Findings::default(),
            late: Vec::new(),
            late_at: Instant::NEVER,
            paced: Paced::default(),
            aged_s: 0,
            fdb_removals: 0,
            last: Last::default(),
        }
    }

    /// The port with this id, in the current table.
    pub fn port(&self, id: PortId) -> Option<&Arc<Port>> {
        self.table.get(usize::from(id.0))?.as_ref()
    }

    /// Replaces the port table.
    pub fn set_table(&mut self, table: Arc<Table>) {
        self.group_of.resize(table.len(), (0, 0));
        self.steer.clear();
        self.table = table;
        self.last = Last::default();
    }

    /// Replaces the rules of ports; `None`: no port has any.
    pub fn set_tenants(&mut self, tenants: Option<Arc<Tenants>>) {
        self.tenants = tenants;
        self.last = Last::default();
    }

    /// Delivers, holds or drops each frame of a burst. `now` is any monotonic time.
    pub fn forward(&mut self, from: &Source, burst: &mut Burst<'_>, now: Instant) -> Findings {
        debug_assert_eq!(self.findings, Findings::default(), "the call before returned its own");
        self.groups_used = 0;
        self.bursts += 1;
        self.made = bounds::Made::default();
        // A guest that reconnects is learned again, within the same second, too.
        let removals = self.fdb.removals();
        if removals != self.fdb_removals {
            (self.fdb_removals, self.last) = (removals, Last::default());
        }
        let mirrored = self.table.get(usize::from(from.port.0)).and_then(Option::as_ref);
        let mirrored = mirrored.filter(|port| port.mirror.is_on()).cloned();
        if mirrored.as_ref().is_some_and(|port| port.mirror.is_reserved()) {
            from.stats.drops_mirror_port.add(burst.admitted() as u64);
            return Findings::default();
        }
        match (self.has_partner(from.port), self.tenants.clone()) {
            (false, None) => self.switch::<false>(from, burst, None, now),
            (false, Some(tenants)) => self.switch_ruled(from, burst, &tenants, now),
            (true, None) => self.cross(from, burst),
            (true, Some(tenants)) => self.cross_ruled(from, burst, &tenants),
        }
        if let Some(port) = mirrored {
            // Frames left are shown again.
            let new = 0..burst.frames.len() - burst.left();
            burst.fetch(new.clone());
            self.mirror(&port, burst, new, true, now);
        }
        for i in 0..self.groups_used {
            let mut group = std::mem::take(&mut self.groups[i]);
            self.deliver(from, &mut group, burst, now);
            self.groups[i] = group;
        }
        self.send_copies(now);
        if burst.permits_granted() {
            from.stats.drops_bad_grant.add(u64::from(burst.take_lost()));
        }
        std::mem::take(&mut self.findings)
    }

    fn record_fault(&mut self, port: &Port, fault: Fault) {
        let fault = PortEvent::Fault { port: port.id, epoch: port.epoch(), fault };
        self.findings.events.push(fault);
    }

    /// The fault of a port as it is now.
    #[cold]
    pub(crate) fn fault(&self, port: PortId, fault: Fault) -> PortEvent {
        PortEvent::Fault { port, epoch: self.port(port).map_or(0, |port| port.epoch()), fault }
    }

    fn cross(&mut self, from: &Source, burst: &mut Burst<'_>) {
        let Some((to, active)) = self.partner(from.port) else {
            from.stats.drops_no_port.add(burst.admitted() as u64);
            return;
        };
        let queue = from.queue % active;
        let at = self.group_for(QueueId { port: to, queue });
        let picks = &mut self.groups[at].picks;
        if !burst.has_offloads() && burst.frames.iter().all(|frame| frame.len >= ETHERNET_LEN) {
            picks.extend(0..burst.frames.len() as u16);
            return;
        }
        let mut left = None;
        for (i, frame) in burst.frames.iter().enumerate() {
            if frame.len < ETHERNET_LEN {
                from.stats.drops_runt.add(1);
                continue;
            }
            if !self.made.takes(frame, i == 0) {
                left = Some(i);
                break;
            }
            picks.push(i as u16);
        }
        if let Some(i) = left {
            burst.leave(i);
        }
        // Nothing is parsed, so no head is copied, except of frames that may need offloads in
        // software; such a frame's header is then checked in and delivered from the same copy.
        if burst.has_offloads() {
            burst.snapshot();
        }
    }

    /// The loop with rules, out of line: the one without stays as it would be alone.
    #[inline(never)]
    fn switch_ruled(
        &mut self,
        from: &Source,
        burst: &mut Burst<'_>,
        tenants: &Tenants,
        now: Instant,
    ) {
        let mut rules = tenants.sender(from.port);
        self.switch::<true>(from, burst, Some(&mut rules), now);
        self.has_tagged = rules.has_tagged();
    }

    /// `RULED`: there are `rules`. Without them, the loop has no trace of rules.
    #[inline(always)]
    fn switch<const RULED: bool>(
        &mut self,
        from: &Source,
        burst: &mut Burst<'_>,
        rules: Option<&mut Sender<'_>>,
        now: Instant,
    ) {
        let mut rules = if RULED { rules } else { None };
        let time = Time { now, now_s: now.periods(Ns::from_secs(1)) as u32 };
        let sender = self.table.get(usize::from(from.port.0)).and_then(Option::as_ref);
        let sender = sender.filter(|port| port.active() > 1).cloned();
        // Rules and flows need whole heads.
        if RULED || sender.is_some() {
            burst.snapshot()
        } else {
            burst.snapshot_starts()
        }
        let mut left = None;
        let mut last = LastGroup::default();
        let mut run = Run::default();
        let mut next = 0;
        while next < burst.frames.len() {
            let i = next;
            next += 1;
            if burst.loses(i) {
                continue;
            }
            let start = if RULED { burst.head(i).first_chunk().copied() } else { burst.start(i) };
            if let Some(at) = run.group_of(start) {
                let same = match &rules {
                    None => burst.same_starts(i).unwrap_or_default(),
                    Some(rules) => burst.same_heads(i, |head, hdr| rules.is_usual(head, hdr)),
                };
                if same > 0 {
                    next = i + same;
                    self.groups[at].picks.extend(i as u16..next as u16);
                    continue;
                }
                // Its addresses and its tag are permitted; the rest of it may not be.
                if let Some(rules) = &mut rules
                    && rules.admit(burst.head(i), &burst.frames[i], &from.stats).is_none()
                {
                    continue;
                }
                if !self.made.takes(&burst.frames[i], i == 0) {
                    left = Some(i);
                    break;
                }
                self.groups[at].picks.push(i as u16);
                continue;
            }
            run = Run::default();
            let head = burst.head(i);
            let (Some(dst), Some(src)) = (flow::dst_mac(head), flow::src_mac(head)) else {
                from.stats.drops_runt.add(1);
                continue;
            };
            let (vlan, vid) = match &mut rules {
                None => (flow::vlan_id(head), 0),
                Some(rules) => match rules.admit(head, &burst.frames[i], &from.stats) {
                    Some(Admitted { key, vid }) => (key, vid),
                    None => continue,
                },
            };
            if !self.learn(from, src, vlan, time) {
                continue;
            }
            let mut flow = Flow { head, vlan, hash: None, time };
            if let Some(sender) = &sender {
                let _ = sender.steering.queue(flow.hash(self.flow_key), from.queue, time.now_s);
            }
            if flow::is_link_local(dst) {
                from.stats.drops_link_local.add(1);
                continue;
            }
            let to = if flow::is_multicast(dst) { None } else { self.find(dst, vlan, time.now_s) };
            // A flow is hashed from more than a start.
            if burst.has_starts() && to.is_none_or(|to| !self.has_one_queue(to)) {
                burst.snapshot();
                flow = Flow { head: burst.head(i), vlan, hash: None, time };
            }
            match to {
                Some(to) if to == from.port => from.stats.drops_same_port.add(1),
                Some(to) if rules.as_mut().is_some_and(|r| !r.may_reach(to, vid, &from.stats)) => {}
                Some(to) => {
                    if !self.made.takes(&burst.frames[i], i == 0) {
                        left = Some(i);
                        break;
                    }
                    let at = self.group_of_flow(to, &mut flow, &mut last);
                    self.groups[at].picks.push(i as u16);
                    let steered = sender.is_some() || !last.is_all_of(to);
                    if !steered && self.last.is_learned() {
                        run = Run::new(start, at);
                    }
                }
                None => {
                    let rules = rules.as_ref().map(|rules| (rules.tenants(), vid));
                    if !self.flood(from, i, &burst.frames[i], &mut flow, rules) {
                        left = Some(i);
                        break;
                    }
                }
            }
        }
        if let Some(i) = left {
            burst.leave(i);
        }
    }

    /// Index of the group for a frame of a flow to a port.
    #[inline(always)]
    fn group_of_flow(&mut self, to: PortId, flow: &mut Flow<'_>, last: &mut LastGroup) -> usize {
        match last.0 {
            Some((port, Some(at))) if port == to => at,
            _ => {
                let queue = self.queue_of(to, flow);
                let at = self.group_for(QueueId { port: to, queue });
                if last.0.is_none_or(|(port, _)| port != to) {
                    last.0 = Some((to, self.has_one_queue(to).then_some(at)));
                }
                at
            }
        }
    }

    /// The egress queue of `to` for a flow: the queue on which the peer sends that flow, otherwise
    /// that of its hash.
    #[inline]
    fn queue_of(&self, to: PortId, flow: &mut Flow<'_>) -> u16 {
        let Some(Some(port)) = self.table.get(usize::from(to.0)) else { return 0 };
        match (port.active(), self.steer.get(usize::from(to.0))) {
            (0 | 1, _) => 0,
            (n, Some(Some(steer))) => steer.queue(flow.head, n) % n,
            (n, _) => {
                let hash = flow.hash(self.flow_key);
                let usual = (hash % u32::from(n)) as u16;
                let queue = port.steering.queue(hash, usual, flow.time.now_s).unwrap_or(usual);
                if queue < n { queue } else { usual }
            }
        }
    }

    /// Stores how a port's peer wants frames spread, so that no query per frame is needed. A change
    /// takes effect after the peer's next group of frames.
    fn set_steer(&mut self, port: PortId, steer: Option<Arc<dyn Steer>>) {
        let at = usize::from(port.0);
        if steer.is_none() && self.steer.len() <= at {
            return;
        }
        self.steer.resize(self.steer.len().max(at + 1), None);
        self.steer[at] = steer;
    }

    fn has_one_queue(&self, port: PortId) -> bool {
        let port = self.table.get(usize::from(port.0)).and_then(Option::as_ref);
        port.is_some_and(|port| port.active() <= 1)
    }

    /// Index of the group for a queue, created if necessary.
    #[inline]
    fn group_for(&mut self, to: QueueId) -> usize {
        let used = &self.groups[..self.groups_used];
        let is_it = |g: &Group| g.to == to;
        // The last group first: most frames have the destination of the previous one.
        let at = if used.last().is_some_and(is_it) {
            Some(used.len() - 1)
        } else {
            // Not a search: a flood has a group for each port.
            match self.group_of.get(usize::from(to.port.0)) {
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
            (group.to, group.floods) = (to, 0);
            self.groups_used += 1;
            if let Some(of) = self.group_of.get_mut(usize::from(to.port.0)) {
                *of = (self.bursts, self.groups_used - 1);
            }
            self.groups_used - 1
        })
    }

    /// Delivers a group, with the tags that its port wants.
    #[inline]
    fn deliver(&mut self, from: &Source, group: &mut Group, burst: &mut Burst<'_>, now: Instant) {
        if self.tenants.as_ref().is_some_and(|tenants| tenants.has_vlans())
            && self.deliver_retagged(from, group, burst, now)
        {
            return;
        }
        self.deliver_as_is(from, group, burst, now);
    }

    /// Delivers a group to its queue, under one lock.
    #[inline(always)]
    fn deliver_as_is(
        &mut self,
        from: &Source,
        group: &mut Group,
        burst: &mut Burst<'_>,
        now: Instant,
    ) {
        let table = Arc::clone(&self.table);
        let Some(port) = table.get(usize::from(group.to.port.0)).and_then(Option::as_ref) else {
            from.stats.drops_no_port.add(group.picks.len() as u64);
            return;
        };
        let is_mirrored = port.mirror.is_on();
        if is_mirrored && port.mirror.is_reserved() {
            from.stats.drops_mirror_port.add(group.picks.len() as u64);
            return;
        }
        let mut to = port.lock(group.to.queue);
        let egress = to.egress;
        if burst.has_starts() && !to.queue.accepts_starts() {
            burst.snapshot();
        }
        if self.made.exceeds() {
            self.limit_copies(from, group, burst, &to.queue.offloads());
        }
        if burst.permits_granted() {
            let as_it_is = to.queue.accepts_granted() && !is_mirrored;
            fetch(burst, group, &to.queue.offloads(), as_it_is);
        }
        if group.floods.count_ones() < group.picks.len() as u32 {
            from.backpressure.record_destination(group.to, now);
        }
        let (handled, fault) = self.put_group(from, &mut to, group, burst, now);
        let mut done = handled.frames;
        if port.active() > 1 {
            self.set_steer(port.id, to.queue.steer());
        }
        let full = done < group.picks.len();
        let got = handled.begun();
        if got > 0
            && let Some(at) = egress.notify(&mut *to.queue, got, full, now)
        {
            self.schedule_notify(at, group.to);
        }
        if let Some(fault) = fault {
            self.record_fault(port, fault);
            egress.stats.drops_down.add((group.picks.len() - done) as u64);
            done = group.picks.len();
        } else if full {
            self.hold_or_drop(from, &mut to, group, handled, burst, now);
        }
        drop(to);
        if is_mirrored {
            let picks = group.picks[..done].iter().map(|i| usize::from(*i));
            self.mirror(port, burst, picks, false, now);
        }
        if got > 0 {
            self.record_progress(group.to, egress);
        }
    }

    /// Puts a group after the frames held for its queue, as far as its port's rate permits; makes
    /// the frames put visible. Returns how many were handled, and the fault that ended it.
    #[inline(always)]
    fn put_group(
        &mut self,
        from: &Source,
        to: &mut LockedQueue<'_>,
        group: &mut Group,
        burst: &Burst<'_>,
        now: Instant,
    ) -> (Handled, Option<Fault>) {
        let (port, egress) = (to.port, to.egress);
        let is_free = !egress.is_holding() || self.send_held(to, now);
        // Those beyond the port's rate are held.
        let is_rated = port.has_rate_out();
        let (mut permit, mut later) = (Permit::default(), Vec::new());
        if is_rated && is_free {
            let picks = group.picks.iter().map(|i| usize::from(*i));
            permit = Permit::ask(port, burst, picks, now);
            later = group.picks.split_off(permit.count);
        }
        let (handled, fault) = if egress.is_slow(now) {
            self.put_slow(from, to, group, burst, now)
        } else if !is_free {
            (Handled::default(), None)
        } else if self.slow.measures() {
            self.put_measured(from, to, group, burst, now)
        } else {
            self.put(&mut *to.queue, egress, &Senders::One(&from.stats), &group.picks, burst, 0)
        };
        to.queue.flush();
        if is_rated {
            let picks = group.picks[..handled.frames].iter().map(|i| usize::from(*i));
            permit.charge(port, burst, picks, now);
            if egress.is_slow(now) {
                egress.stats.drops_rate.add(later.drain(..).len() as u64);
            }
            group.picks.append(&mut later);
        }
        (handled, fault)
    }

    /// Puts `picks` in order, the first one without the `skip` segments that the peer has; frames
    /// with offloads that the peer lacks go through software. Returns how many were handled, and
    /// the fault that ended it.
    fn put(
        &mut self,
        queue: &mut dyn Egress,
        egress: &EgressQueue,
        from: &Senders<'_>,
        picks: &[u16],
        burst: &Burst<'_>,
        mut skip: usize,
    ) -> (Handled, Option<Fault>) {
        let takes = queue.offloads();
        let needs_work = |pick: &u16| {
            let i = usize::from(*pick);
            let hdr = &burst.frames[i].hdr;
            !hdr.is_plain() && offload::needs_work(burst.head(i), hdr, &takes)
        };
        if !burst.has_offloads() && !picks.is_empty() {
            return match queue.put(burst, picks) {
                Ok(done) => (Handled::whole(done), None),
                Err(fault) => (Handled::default(), Some(fault)),
            };
        }
        let mut all = Handled::default();
        while all.frames < picks.len() {
            let left = &picks[all.frames..];
            let plain = left.iter().position(needs_work).unwrap_or(left.len());
            let (want, got) = if plain > 0 {
                (plain, queue.put(burst, &left[..plain]).map(Handled::whole))
            } else {
                (1, self.put_in_software(queue, egress, from, left[0], burst, skip))
            };
            skip = 0;
            let got = match got {
                Ok(got) => got,
                Err(fault) => return (all, Some(fault)),
            };
            all = Handled { frames: all.frames + got.frames, part: got.part };
            if got.frames < want {
                break;
            }
        }
        (all, None)
    }
}

#[cfg(test)]
mod tests;
