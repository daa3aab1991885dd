//! The books: every frame from its sender to its end, checked at each step.
//!
//! ```text
//!   guest ── log ──▶ ingress ── shown ──▶ forwarder ── fates ──▶ egress ── origins ──▶ guest
//! ```
//! What an ingress queue shows must be what its guest sent next, in order. What the forwarder is
//! given must meet as many ends (a delivery, a place among the frames that wait for a full
//! destination, or a drop that some counter tells) as it has destinations, by a model of what the
//! switch has learned; and what waits, one end more. What a guest finds
//! must be what its sender sent: since each delivery's origin is known, a hostile guest's garbage
//! is never an excuse.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use switch::flow;
use switch::forward::{Mode, Table};
use switch::frame::Burst;
use switch::poll::{Policy, tick_after};
use switch::stats::{EgressStats, IngressStats};

use crate::finding::Finding;
use crate::frame::{Frame, To, guest_of};

/// One ingress queue.
pub(crate) struct IngressBook {
    pub stats: Arc<IngressStats>,
    /// Sent, and not yet shown by the ingress queue.
    log: VecDeque<Frame>,
    /// New frames shown.
    pub shown: u64,
}

/// One egress queue.
pub(crate) struct EgressBook {
    pub stats: Arc<EgressStats>,
    /// The ports that delivered frames come from, or may come from; the guest has not found these
    /// yet.
    origins: VecDeque<Vec<usize>>,
    /// The ports that frames come from which wait for room, and since when they do.
    held: VecDeque<(usize, u64)>,
    /// Counters as of the last look: frames, holds, aged, given up as it went down, other drops.
    was: [u64; 5],
    /// When the guest is to be called at the latest, if it sleeps; `u64::MAX`: need not be.
    pub call_by_ns: u64,
}

impl EgressBook {
    /// The counters that say what became of frames, as in `was`.
    fn counters(&self) -> [u64; 5] {
        let stats = &self.stats;
        let aged = stats.lost_aged.get() + stats.drops_aged.get();
        let down = stats.drops_held_down.get();
        let named = drops(&mut stats.all());
        let other = named - stats.drops_aged.get() - down - stats.drops_no_room.get();
        [stats.frames.get(), stats.holds.get(), aged, down, other]
    }

    /// How long the oldest frame has waited for room.
    pub fn waits_ns(&self, now_ns: u64) -> Option<u64> {
        self.held.front().map(|(_, since_ns)| now_ns - since_ns)
    }
}

fn drops(all: &mut dyn Iterator<Item = (&'static str, u64)>) -> u64 {
    all.filter(|(name, _)| name.starts_with("drops")).map(|(_, n)| n).sum()
}

/// What the switch must know to be right.
pub(crate) struct Ledger {
    mode: Mode,
    table: Arc<Table>,
    /// The guests that keep the protocol, and their secrets.
    honest: Vec<Option<u64>>,
    ingress: Vec<Vec<IngressBook>>,
    egress: Vec<Vec<EgressBook>>,
    /// Guests whose addresses the switch has learned.
    known: Vec<bool>,
    /// Frames (sender and number) that were shown to everyone.
    flooded: BTreeSet<(usize, u64)>,
    /// Frames that were held, where addresses may move: others may have gone another way since.
    /// `None` where they stay.
    waited: Option<BTreeSet<(usize, u64)>>,
    /// Number of the last frame that arrived, by sender, destination, flow and receiver.
    arrived: BTreeMap<(usize, To, u16, usize), u64>,
    /// Counts new frames, and those done with.
    pub progress: u64,
    /// What was found wrong within a burst.
    pub finding: Option<Finding>,
}

/// A burst on its way through the forwarder.
pub(crate) struct Shown {
    port: usize,
    queue: usize,
    /// The frames and how many destinations each has; none for a hostile port.
    frames: Vec<(Frame, u64, bool)>,
    fates: u64,
    holds: u64,
}

/// When a peer is to be told at the latest of what was published at `now_ns`.
fn call_by(policy: Policy, now_ns: u64) -> u64 {
    match policy {
        Policy::Timer { hz } => tick_after(now_ns, hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            now_ns + u64::from(usecs) * 1000
        }
        Policy::Adaptive { latency_us } => now_ns + u64::from(latency_us) * 1000,
        Policy::Event | Policy::Napi { .. } | Policy::Spin => now_ns,
    }
}

impl Ledger {
    pub fn new(
        mode: Mode,
        table: Arc<Table>,
        honest: Vec<Option<u64>>,
        stats: Vec<Vec<(Arc<IngressStats>, Arc<EgressStats>)>>,
        static_addresses: bool,
        spoofed: bool,
    ) -> Self {
        let ingress = |stats: &Arc<IngressStats>| IngressBook {
            stats: Arc::clone(stats),
            log: VecDeque::new(),
            shown: 0,
        };
        let egress = |stats: &Arc<EgressStats>| EgressBook {
            stats: Arc::clone(stats),
            origins: VecDeque::new(),
            held: VecDeque::new(),
            was: [0; 5],
            call_by_ns: u64::MAX,
        };
        Self {
            mode,
            table,
            known: vec![static_addresses; honest.len()],
            honest,
            ingress: stats.iter().map(|p| p.iter().map(|(i, _)| ingress(i)).collect()).collect(),
            egress: stats.iter().map(|p| p.iter().map(|(_, e)| egress(e)).collect()).collect(),
            flooded: BTreeSet::new(),
            waited: spoofed.then(BTreeSet::new),
            arrived: BTreeMap::new(),
            progress: 0,
            finding: None,
        }
    }

    /// Whether the guest at `port` keeps the protocol.
    pub fn is_honest(&self, port: usize) -> bool {
        self.honest[port].is_some()
    }

    pub fn egress(&mut self, port: usize, queue: usize) -> &mut EgressBook {
        &mut self.egress[port][queue]
    }

    pub fn egress_book(&self, port: usize, queue: usize) -> &EgressBook {
        &self.egress[port][queue]
    }

    pub fn ingress(&self, port: usize, queue: usize) -> &IngressBook {
        &self.ingress[port][queue]
    }

    /// A guest sent `frames` on a queue.
    pub fn sent(&mut self, port: usize, queue: usize, frames: Vec<Frame>) {
        self.ingress[port][queue].log.extend(frames);
    }

    fn found(&mut self, finding: Finding) {
        self.finding.get_or_insert(finding);
    }

    /// Ends that frames have met so far, as counted, and places where they wait.
    fn fates(&self) -> u64 {
        let ends = |book: &EgressBook| book.stats.frames.get() + drops(&mut book.stats.all());
        let egress: u64 = self.egress.iter().flatten().map(ends).sum();
        let ingress = self.ingress.iter().flatten();
        let ingress: u64 = ingress.map(|book| drops(&mut book.stats.all())).sum();
        let queues = self.table.iter().flatten().flat_map(|port| &port.egress);
        egress + ingress + queues.map(|queue| queue.held_frames() as u64).sum::<u64>()
    }

    fn holds(&self) -> u64 {
        self.egress.iter().flatten().map(|book| book.stats.holds.get()).sum()
    }

    /// After the forwarder did something, for a burst of port `from` or for what waits: which
    /// frames left those that wait, and which were delivered.
    pub fn sync(&mut self, from: Option<usize>, now_ns: u64) {
        for (to, queues) in self.egress.iter_mut().enumerate() {
            let table = self.table[to].as_ref().expect("ports stay");
            for (book, queue) in queues.iter_mut().zip(&table.egress) {
                let now = book.counters();
                let [delivered, holds, aged, down, dropped] =
                    std::array::from_fn(|i| now[i] - book.was[i]);
                book.was = now;
                let left = queue.held_frames() as u64;
                let gone = (book.held.len() as u64 + holds).checked_sub(left);
                let Some(sent) = gone.and_then(|gone| gone.checked_sub(aged + down)) else {
                    self.finding.get_or_insert(Finding::Lost(format!(
                        "{left} frames wait for port {to}, more than were held"
                    )));
                    continue;
                };
                book.held.drain(..(aged as usize).min(book.held.len()));
                let sent: Vec<usize> =
                    book.held.drain(..(sent as usize).min(book.held.len())).map(|h| h.0).collect();
                book.held.drain(..(down as usize).min(book.held.len()));
                book.held.extend((0..holds).filter_map(|_| Some((from?, now_ns))));
                if dropped == 0 {
                    let direct = (delivered as usize).saturating_sub(sent.len());
                    let direct = (0..direct).filter_map(|_| from);
                    book.origins.extend(sent.into_iter().chain(direct).map(|port| vec![port]));
                } else {
                    // Which of them were dropped is not known.
                    let may_be: Vec<usize> = sent.into_iter().chain(from).collect();
                    book.origins.extend((0..delivered).map(|_| may_be.clone()));
                }
                if delivered > 0 {
                    book.call_by_ns = book.call_by_ns.min(call_by(queue.call(), now_ns));
                }
                self.progress += aged + down + delivered;
            }
        }
    }

    /// How many ports `frame` is for, and whether it is flooded.
    fn destinations(&self, port: usize, frame: &Frame) -> (u64, bool) {
        match frame.to {
            _ if self.mode == Mode::Cross => (1, false),
            To::One(to) if self.known.get(to) == Some(&true) => (1, false),
            _ => {
                let others = self.table.iter().flatten().filter(|p| usize::from(p.id.0) != port);
                (others.filter(|p| p.active() > 0).count() as u64, true)
            }
        }
    }

    /// Before the forwarder sees a burst.
    pub fn before(&mut self, port: usize, queue: usize, burst: &Burst<'_>) -> Shown {
        let mut frames = Vec::new();
        for shown in &burst.frames {
            let mut bytes = vec![0; shown.len as usize];
            let mut at = 0;
            for seg in burst.segs(shown) {
                at += seg.read(&mut bytes[at..]);
            }
            // Learned before the next is looked up.
            let from = guest_of(bytes.get(6..).unwrap_or_default());
            let plain = flow::vlan_id(&bytes) == 0;
            if let Some(known) = from.filter(|_| plain).and_then(|from| self.known.get_mut(from)) {
                *known = true;
            }
            if self.honest[port].is_none() {
                continue;
            }
            let book = &mut self.ingress[port][queue];
            book.shown += 1;
            self.progress += 1;
            let expected = book.log.pop_front();
            let is = Frame::parse(&bytes);
            let Some(frame) = is.filter(|_| is == expected) else {
                self.found(Finding::Corrupt(format!(
                    "queue {queue} of port {port} shows {is:?}, its guest sent {expected:?}"
                )));
                continue;
            };
            let (destinations, flooded) = self.destinations(port, &frame);
            frames.push((frame, destinations, flooded));
        }
        let (fates, holds) = (self.fates(), self.holds());
        Shown { port, queue, frames, fates, holds }
    }

    /// After the forwarder dealt with it.
    pub fn after(&mut self, shown: &Shown, now_ns: u64) {
        let Shown { port, queue, .. } = *shown;
        self.sync(Some(port), now_ns);
        if self.honest[port].is_none() || self.finding.is_some() {
            return;
        }
        let fates = self.fates().checked_sub(shown.fates);
        let held = self.holds() > shown.holds;
        let mut expected = 0;
        for (frame, destinations, flooded) in &shown.frames {
            expected += destinations;
            if *flooded {
                self.flooded.insert((frame.from, frame.number));
            }
            if let Some(waited) = self.waited.as_mut().filter(|_| held) {
                waited.insert((frame.from, frame.number));
            }
        }
        if fates != Some(expected) {
            self.found(Finding::Lost(format!(
                "frames of queue {queue} of port {port} had {expected} destinations, and {fates:?} \
                 deliveries, counted drops, and places to wait at"
            )));
        }
    }

    /// Before a queue reads directly into the buffers of its partner.
    pub fn before_direct(&self) -> (u64, u64) {
        (self.direct(), self.fates())
    }

    fn direct(&self) -> u64 {
        self.ingress.iter().flatten().map(|book| book.stats.direct.get()).sum()
    }

    /// After that: as many frames as it says met their one end, and were the next ones sent.
    /// Returns how many.
    pub fn after_direct(
        &mut self,
        (port, queue): (usize, usize),
        (direct, fates): (u64, u64),
        now_ns: u64,
    ) -> u64 {
        let count = self.direct() - direct;
        let fates = self.fates() - fates;
        self.sync(Some(port), now_ns);
        let book = &mut self.ingress[port][queue];
        book.shown += count;
        let sent = book.log.drain(..(count as usize).min(book.log.len())).count() as u64;
        self.progress += count;
        if (sent, fates) != (count, count) {
            self.found(Finding::Lost(format!(
                "queue {queue} of port {port} read {count} frames directly, of {sent} sent, and \
                 {fates} were delivered"
            )));
        }
        count
    }

    /// How many chains of a queue may be given back: those shown.
    pub fn returnable(&self, port: usize, queue: usize) -> u64 {
        self.ingress[port][queue].shown
    }

    /// A frame arrived at guest `to`, which keeps the protocol.
    pub fn arrival(&mut self, to: usize, queue: usize, bytes: &[u8]) -> Result<(), Finding> {
        let Some(origins) = self.egress[to][queue].origins.pop_front() else {
            return Err(Finding::Corrupt(format!("guest {to} got a frame that no one sent it")));
        };
        let of = Frame::parse(bytes).map(|frame| frame.from);
        let is_known = |port: &&usize| Some(**port) == of || self.honest[**port].is_none();
        let from = origins.iter().find(is_known).or(origins.first()).copied().unwrap_or(to);
        let Some(tag) = self.honest[from] else { return Ok(()) };
        let corrupt = |what: &str| Err(Finding::Corrupt(format!("guest {to} got {what} {from}")));
        let Some(frame) = Frame::parse(bytes) else {
            return corrupt("something else than was sent by");
        };
        if frame.from != from || frame.tag != tag {
            return corrupt("a frame of another than its sender");
        }
        if from == to {
            return Err(Finding::Misdelivered(format!("guest {to} got its own {frame:?}")));
        }
        let flooded = self.flooded.contains(&(from, frame.number));
        let right = match self.mode {
            Mode::Cross => to == from ^ 1,
            Mode::Switch => frame.to == To::One(to) || flooded,
        };
        if !right {
            return Err(Finding::Misdelivered(format!("guest {to} got {frame:?}")));
        }
        if self.waited.as_ref().is_some_and(|waited| waited.contains(&(from, frame.number))) {
            return Ok(());
        }
        let flow = (from, frame.to, frame.flow, to);
        match self.arrived.insert(flow, frame.number) {
            Some(last) if last >= frame.number => {
                let what = format!("{} from {from} at {to} after {last}", frame.number);
                Err(Finding::Reordered(what))
            }
            _ => Ok(()),
        }
    }

    /// What is left of queue `queue` of `port` in the books, when all should be over.
    pub fn left(&self, port: usize, queue: usize) -> Option<String> {
        let (ingress, egress) = (&self.ingress[port][queue], &self.egress[port][queue]);
        let (log, held, origins) = (ingress.log.len(), egress.held.len(), egress.origins.len());
        (log + held + origins > 0)
            .then(|| format!("{log} frames not shown, {held} held, {origins} not found"))
    }
}
