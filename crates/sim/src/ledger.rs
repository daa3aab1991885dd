//! The books: every frame from its sender to its end, checked at each step.
//!
//! ```text
//!   guest ── log ──▶ ingress ── shown ──▶ forwarder ── fates ──▶ egress ── origins ──▶ guest
//! ```
//! What an ingress queue shows must be what its guest sent next, or what was held, in order. What
//! the forwarder is done with must have met as many ends (a delivery, or a drop that some counter
//! tells) as it has destinations, by a model of what the switch has learned. What a guest finds
//! must be what its sender sent: since each delivery's origin is known, a hostile guest's garbage
//! is never an excuse.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use switch::flow;
use switch::forward::{Mode, Table};
use switch::frame::{BURST_MAX, Burst, Verdict};
use switch::poll::{Policy, tick_after};
use switch::stats::{EgressStats, IngressStats};

use crate::frame::{Frame, To, guest_of};
use crate::world::Finding;

/// One ingress queue.
pub(crate) struct IngressBook {
    pub stats: Arc<IngressStats>,
    /// Sent, and not yet shown by the ingress queue.
    log: VecDeque<Frame>,
    /// New frames shown.
    pub shown: u64,
    /// Held frames, oldest first, with their position among those shown.
    pub held: VecDeque<(u64, Frame)>,
}

/// One egress queue.
pub(crate) struct EgressBook {
    pub stats: Arc<EgressStats>,
    /// The ports that delivered frames come from; the guest has not found these yet.
    origins: VecDeque<usize>,
    /// When the guest is to be called at the latest, if it sleeps; `u64::MAX`: need not be.
    pub call_by_ns: u64,
}

impl IngressBook {
    /// Whether held frames keep a queue of `size` from showing new ones: what is held, and what
    /// waits behind it, may be half of the ring, and no more than a burst is shown.
    pub fn is_full(&self, size: u64) -> bool {
        let held = self.held.len() as u64;
        let open = self.held.front().map_or(0, |(at, _)| self.shown - at);
        let room = size.saturating_sub(2 * open).min(BURST_MAX as u64);
        // Few held frames that keep many others from going back are given up instead.
        let crowded = open >= size / 2 && held * 2 < open;
        held > 0 && room <= held && !crowded
    }
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
    /// How many of the frames were held before.
    held: usize,
    /// The frames and how many destinations each has; none for a hostile port.
    frames: Vec<(Frame, u64, bool)>,
    fates: u64,
    delivered: Vec<Vec<u64>>,
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
            held: VecDeque::new(),
        };
        let egress = |stats: &Arc<EgressStats>| EgressBook {
            stats: Arc::clone(stats),
            origins: VecDeque::new(),
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

    /// Ends that frames can meet within a burst of `port`'s queue, as counted.
    fn fates(&self, port: usize, queue: usize) -> u64 {
        let drops = |all: &mut dyn Iterator<Item = (&'static str, u64)>| -> u64 {
            all.filter(|(name, _)| name.starts_with("drops")).map(|(_, n)| n).sum()
        };
        let ends = |book: &EgressBook| book.stats.frames.get() + drops(&mut book.stats.all());
        let egress: u64 = self.egress.iter().flatten().map(ends).sum();
        egress + drops(&mut self.ingress[port][queue].stats.all())
    }

    fn delivered(&self) -> Vec<Vec<u64>> {
        let frames = |port: &Vec<EgressBook>| port.iter().map(|q| q.stats.frames.get()).collect();
        self.egress.iter().map(frames).collect()
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

    /// The port that a held `frame` waits for, where that is certain.
    pub fn waits_for(&self, port: usize, frame: &Frame) -> Option<usize> {
        match frame.to {
            _ if self.mode == Mode::Cross => Some(port ^ 1),
            To::One(to) => Some(to),
            To::All => None,
        }
    }

    /// Before the forwarder sees a burst.
    pub fn before(&mut self, port: usize, queue: usize, burst: &Burst<'_>) -> Shown {
        let held = burst.frames.iter().take_while(|f| f.held_ns > 0).count();
        let mut frames = Vec::new();
        for (i, shown) in burst.frames.iter().enumerate() {
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
            let expected = if i < held {
                book.held.get(i).map(|(_, frame)| *frame)
            } else {
                book.shown += 1;
                self.progress += 1;
                book.log.pop_front()
            };
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
        let (fates, delivered) = (self.fates(port, queue), self.delivered());
        Shown { port, queue, held, frames, fates, delivered }
    }

    /// After the forwarder dealt with it.
    pub fn after(&mut self, shown: &Shown, burst: &Burst<'_>, now_ns: u64) {
        let Shown { port, queue, .. } = *shown;
        for (to, was) in shown.delivered.iter().enumerate() {
            for (q, was) in was.iter().enumerate() {
                let book = &mut self.egress[to][q];
                let new = book.stats.frames.get() - was;
                book.origins.extend((0..new).map(|_| port));
                if new > 0 {
                    let policy = self.table[to].as_ref().expect("ports stay").egress[q].call();
                    book.call_by_ns = book.call_by_ns.min(call_by(policy, now_ns));
                }
            }
        }
        if self.honest[port].is_none() || self.finding.is_some() {
            return;
        }
        let fates = self.fates(port, queue) - shown.fates;
        let mut expected = 0;
        let book = &mut self.ingress[port][queue];
        let old: Vec<(u64, Frame)> = book.held.drain(..shown.held).collect();
        let mut held = Vec::new();
        let first_new = book.shown - (shown.frames.len() - shown.held) as u64;
        for (i, ((frame, destinations, flooded), now)) in
            shown.frames.iter().zip(&burst.frames).enumerate()
        {
            if now.verdict == Verdict::Hold {
                if let Some(waited) = &mut self.waited {
                    waited.insert((frame.from, frame.number));
                }
                let at = old.get(i).map_or(first_new + (i - shown.held.min(i)) as u64, |o| o.0);
                held.push((at, *frame));
                if *flooded {
                    self.finding = Some(Finding::Lost("a flooded frame is held".into()));
                }
                continue;
            }
            self.progress += 1;
            expected += destinations;
            if *flooded {
                self.flooded.insert((frame.from, frame.number));
            }
        }
        // Held frames that were not shown this time are younger than those that were.
        let new = held.iter().position(|(at, _)| *at >= first_new).unwrap_or(held.len());
        let newly = held.split_off(new);
        let rest: Vec<_> = book.held.drain(..).collect();
        book.held.extend(held.into_iter().chain(rest).chain(newly));
        if fates != expected {
            self.found(Finding::Lost(format!(
                "frames of queue {queue} of port {port} had {expected} destinations, and {fates} \
                 deliveries and counted drops"
            )));
        }
    }

    /// How many chains of a queue may be given back: those before the first that is held.
    pub fn returnable(&self, port: usize, queue: usize) -> u64 {
        let book = &self.ingress[port][queue];
        book.held.front().map_or(book.shown, |(at, _)| *at)
    }

    /// A frame arrived at guest `to`, which keeps the protocol.
    pub fn arrival(&mut self, to: usize, queue: usize, bytes: &[u8]) -> Result<(), Finding> {
        let Some(from) = self.egress[to][queue].origins.pop_front() else {
            return Err(Finding::Corrupt(format!("guest {to} got a frame that no one sent it")));
        };
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
        let (log, held, origins) = (ingress.log.len(), ingress.held.len(), egress.origins.len());
        (log + held + origins > 0)
            .then(|| format!("{log} frames not shown, {held} held, {origins} not found"))
    }
}
