//! The ledger: accounts for each frame from its sender to its delivery or drop, at each step.
//!
//! ```text
//!   guest ── log ──▶ ingress ── shown ──▶ forwarder ─ outcomes ─▶ egress ── origins ──▶ guest
//! ```
//! An ingress queue *shows* frames when it passes them to the forwarder: these must be the next
//! ones that its guest sent, in order. Each frame shown must have one outcome (delivered, held, or
//! dropped and counted) for each of its destinations, by a model of the addresses that the switch
//! has learned. A held frame must later be delivered or dropped. A frame received by a guest must
//! be one that its sender sent: the origin of each delivery is known, so that corruption is never
//! mistaken for invalid frames of a hostile guest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, LazyLock};

use switch::flow;
use switch::forward::{Mode, Table};
use switch::frame::Burst;
use switch::poll::{Policy, tick_after};
use switch::stats::{EgressStats, IngressStats};
use switch::time::{Instant, Ns};

use crate::finding::Finding;
use crate::frame::{Frame, To, guest_of, mac};
use crate::rules::AllRules;
use crate::worker::Name;

/// Ledger entries of an ingress queue.
pub(crate) struct IngressBook {
    pub stats: Arc<IngressStats>,
    /// Frames sent by the guest and not yet shown.
    log: VecDeque<Frame>,
    /// Number of frames shown.
    pub shown: u64,
    /// Number of announcements of an address, which count as the guest's frames.
    pub announced: u64,
}

/// Ledger entries of an egress queue.
pub(crate) struct EgressBook {
    pub stats: Arc<EgressStats>,
    /// Possible source ports of each frame that was delivered and not yet received by the guest.
    origins: VecDeque<Vec<usize>>,
    /// Source port of each held frame, and since when it is held.
    held: VecDeque<(usize, Instant)>,
    /// Counters at the last sync: frames, holds, aged, dropped as the port went down, other drops.
    last: [u64; 5],
    /// Time by which the guest must be called if it sleeps; [`Instant::NEVER`]: no call is due.
    pub call_by: Instant,
}

impl EgressBook {
    /// Counters of the outcomes of frames, in the order of `last`.
    fn counters(&self) -> [u64; 5] {
        let stats = &self.stats;
        let late = stats.drops_aged.get() + stats.drops_rate_aged.get();
        let aged = stats.lost_aged.get() + late;
        let down = stats.drops_held_down.get();
        let named: u64 = stats.all().zip(&*IS_DROP).map(|((_, n), is)| n * u64::from(*is)).sum();
        let other = named - late - down - stats.drops_no_room.get();
        [stats.frames.get(), stats.holds.get(), aged, down, other]
    }

    /// Time for which the oldest held frame has been held.
    pub fn oldest_wait(&self, now: Instant) -> Option<Ns> {
        self.held.front().map(|(_, since)| now - *since)
    }
}

/// Which of the counters of an egress queue count drops. Names are compared once: all are read
/// after each burst.
static IS_DROP: LazyLock<Vec<bool>> =
    LazyLock::new(|| EgressStats::default().all().map(|(name, _)| is_drop(name)).collect());

fn is_drop(counter: &str) -> bool {
    counter.starts_with("drops")
}

fn drops(all: &mut dyn Iterator<Item = (&'static str, u64)>) -> u64 {
    all.filter(|(name, _)| is_drop(name)).map(|(_, n)| n).sum()
}

/// Accounts of all frames, and a model of the learned addresses.
pub(crate) struct Ledger {
    mode: Mode,
    table: Arc<Table>,
    rules: AllRules,
    /// An address is being announced in the current burst.
    announcing: Option<Announcing>,
    /// Secret of each honest guest; `None`: hostile.
    honest: Vec<Option<u64>>,
    ingress: Vec<Vec<IngressBook>>,
    egress: Vec<Vec<EgressBook>>,
    /// Whether the switch has learned the address of each guest.
    learned: Vec<bool>,
    /// Flooded frames: sender and number.
    flooded: BTreeSet<(usize, u64)>,
    /// Frames (sender and number) that were held: later ones may overtake them if an address moves.
    /// `None` where addresses do not move.
    reorderable: Option<BTreeSet<(usize, u64)>>,
    /// Number of the last frame received, by sender, destination, flow and receiver.
    arrived: BTreeMap<(usize, To, u16, usize), u64>,
    /// Frames shown, delivered and dropped so far: unchanged if there was no progress.
    pub progress: u64,
    /// The first violation within a burst.
    pub finding: Option<Finding>,
}

/// A burst shown to the forwarder.
pub(crate) struct Shown {
    port: usize,
    queue: usize,
    /// Each frame, its number of destinations, and whether it is flooded. Empty for a hostile port.
    frames: Vec<(Frame, u64, bool)>,
    outcomes: u64,
    holds: u64,
}

/// Time by which a peer must be notified of frames published at `now`.
fn call_by(policy: Policy, now: Instant) -> Instant {
    match policy {
        Policy::Timer { hz } => tick_after(now, hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            now + Ns::from_us(usecs.into())
        }
        Policy::Adaptive { latency_us } => now + Ns::from_us(latency_us.into()),
        Policy::Event | Policy::Napi { .. } | Policy::Spin => now,
    }
}

/// How the switch finds the receivers of frames.
#[derive(Clone, Copy)]
pub(crate) struct Addressing {
    pub mode: Mode,
    /// The table has a static entry for each guest.
    pub is_static: bool,
    /// Hostile guests may move the addresses of others.
    pub is_spoofed: bool,
}

/// An announcement of an address.
struct Announcing {
    name: Name,
    destinations: u64,
    /// Outcomes before it.
    outcomes: u64,
}

/// Counts before direct reads.
pub(crate) struct DirectCounts {
    frames: u64,
    outcomes: u64,
}

impl Ledger {
    pub fn new(
        addressing: Addressing,
        table: Arc<Table>,
        rules: AllRules,
        honest: Vec<Option<u64>>,
        stats: Vec<Vec<(Arc<IngressStats>, Arc<EgressStats>)>>,
    ) -> Self {
        let Addressing { mode, is_static, is_spoofed } = addressing;
        let ingress = |stats: &Arc<IngressStats>| IngressBook {
            stats: Arc::clone(stats),
            log: VecDeque::new(),
            shown: 0,
            announced: 0,
        };
        let egress = |stats: &Arc<EgressStats>| EgressBook {
            stats: Arc::clone(stats),
            origins: VecDeque::new(),
            held: VecDeque::new(),
            last: [0; 5],
            call_by: Instant::NEVER,
        };
        Self {
            mode,
            table,
            rules,
            announcing: None,
            learned: vec![is_static; honest.len()],
            honest,
            ingress: stats.iter().map(|p| p.iter().map(|(i, _)| ingress(i)).collect()).collect(),
            egress: stats.iter().map(|p| p.iter().map(|(_, e)| egress(e)).collect()).collect(),
            flooded: BTreeSet::new(),
            reorderable: is_spoofed.then(BTreeSet::new),
            arrived: BTreeMap::new(),
            progress: 0,
            finding: None,
        }
    }

    /// Whether the guest at `port` is honest.
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

    /// Records that the guest sent `frames` on a queue.
    pub fn record_sent(&mut self, port: usize, queue: usize, frames: Vec<Frame>) {
        self.ingress[port][queue].log.extend(frames);
    }

    fn record_finding(&mut self, finding: Finding) {
        self.finding.get_or_insert(finding);
    }

    /// Outcomes so far: frames delivered, dropped and held.
    fn outcomes(&self) -> u64 {
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

    /// Reads the counters after the forwarder ran, for a burst of port `from` or for held frames:
    /// records which frames were held, delivered and dropped.
    pub fn sync(&mut self, from: Option<usize>, now: Instant) {
        for (to, queues) in self.egress.iter_mut().enumerate() {
            let table = self.table[to].as_ref().expect("ports stay");
            for (book, queue) in queues.iter_mut().zip(&table.egress) {
                let counters = book.counters();
                let [delivered, holds, aged, down, dropped] =
                    std::array::from_fn(|i| counters[i] - book.last[i]);
                book.last = counters;
                let left = queue.held_frames() as u64;
                let gone = (book.held.len() as u64 + holds).checked_sub(left);
                let Some(sent) = gone.and_then(|gone| gone.checked_sub(aged + down)) else {
                    self.finding.get_or_insert(Finding::Lost(format!(
                        "{left} frames are held for port {to}, more than were counted"
                    )));
                    continue;
                };
                book.held.drain(..(aged as usize).min(book.held.len()));
                let sent: Vec<usize> =
                    book.held.drain(..(sent as usize).min(book.held.len())).map(|h| h.0).collect();
                book.held.drain(..(down as usize).min(book.held.len()));
                book.held.extend((0..holds).filter_map(|_| Some((from?, now))));
                if dropped == 0 {
                    let direct = (delivered as usize).saturating_sub(sent.len());
                    let direct = (0..direct).filter_map(|_| from);
                    book.origins.extend(sent.into_iter().chain(direct).map(|port| vec![port]));
                } else {
                    // It is unknown which of them were dropped.
                    let may_be: Vec<usize> = sent.into_iter().chain(from).collect();
                    book.origins.extend((0..delivered).map(|_| may_be.clone()));
                }
                if delivered > 0 {
                    book.call_by = book.call_by.min(call_by(queue.call(), now));
                }
                self.progress += aged + down + delivered;
            }
        }
    }

    /// Number of outcomes of a frame from `port`, and whether it is flooded: one for each
    /// destination port, or the count of a frame that no port may get.
    fn destinations(&self, port: usize, to: To) -> (u64, bool) {
        match to {
            _ if self.mode == Mode::Cross => (1, false),
            To::One(to) if self.learned.get(to) == Some(&true) => (1, false),
            _ => {
                let ports = self.table.iter().flatten().filter(|p| p.active() > 0);
                let others = ports.map(|p| usize::from(p.id.0)).filter(|p| *p != port);
                let reached = others.filter(|p| !self.rules.isolates(port, *p)).count() as u64;
                (reached.max(1), true)
            }
        }
    }

    /// Records that the next burst of a queue begins with an announcement of its guest's address.
    pub fn begin_announcement(&mut self, name: Name) {
        self.ingress[name.0][name.1].announced += 1;
        self.learned[name.0] = true;
        let (destinations, _) = self.destinations(name.0, To::All);
        self.announcing = Some(Announcing { name, destinations, outcomes: self.outcomes() });
    }

    /// Reads the counters before a burst forwards frames, or where it forwarded none: held frames
    /// may have been delivered, and an address announced.
    pub fn sync_before(&mut self, now: Instant) {
        let Some(Announcing { name: (port, queue), destinations, outcomes }) =
            self.announcing.take()
        else {
            return self.sync(None, now);
        };
        self.sync(Some(port), now);
        let outcomes = self.outcomes() - outcomes;
        if outcomes != destinations {
            self.record_finding(Finding::Lost(format!(
                "queue {queue} of port {port} announced an address to {destinations} ports, with \
                 {outcomes} outcomes"
            )));
        }
    }

    /// Records the frames of a burst before it is forwarded.
    pub fn begin_burst(&mut self, port: usize, queue: usize, burst: &Burst<'_>) -> Shown {
        let mut frames = Vec::new();
        for shown in &burst.frames {
            let mut bytes = vec![0; shown.len as usize];
            let mut at = 0;
            for seg in burst.segs(shown) {
                at += seg.read(&mut bytes[at..]);
            }
            // The switch learns the address before it looks up the next frame.
            let from = guest_of(bytes.get(6..).unwrap_or_default());
            let is_learned =
                flow::vlan_id(&bytes) == 0 && self.rules.of(port).admits(&bytes, &shown.hdr);
            if let Some(learned) =
                from.filter(|_| is_learned).and_then(|from| self.learned.get_mut(from))
            {
                *learned = true;
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
                self.record_finding(Finding::Corrupt(format!(
                    "queue {queue} of port {port} shows {is:?}, but its guest sent {expected:?}"
                )));
                continue;
            };
            let (destinations, flooded) = self.destinations(port, frame.to);
            frames.push((frame, destinations, flooded));
        }
        let (outcomes, holds) = (self.outcomes(), self.holds());
        Shown { port, queue, frames, outcomes, holds }
    }

    /// Checks the outcomes of a burst after it was forwarded.
    pub fn end_burst(&mut self, shown: &Shown, now: Instant) {
        let Shown { port, queue, .. } = *shown;
        self.sync(Some(port), now);
        if self.honest[port].is_none() || self.finding.is_some() {
            return;
        }
        let outcomes = self.outcomes().checked_sub(shown.outcomes);
        let held = self.holds() > shown.holds;
        let mut expected = 0;
        for (frame, destinations, flooded) in &shown.frames {
            expected += destinations;
            if *flooded {
                self.flooded.insert((frame.from, frame.number));
            }
            if let Some(frames) = self.reorderable.as_mut().filter(|_| held) {
                frames.insert((frame.from, frame.number));
            }
        }
        if outcomes != Some(expected) {
            self.record_finding(Finding::Lost(format!(
                "frames of queue {queue} of port {port} have {outcomes:?} outcomes (delivered, \
                 held, dropped and counted), {expected} expected"
            )));
        }
    }

    /// Counters before a queue reads directly into its partner's buffers.
    pub fn begin_direct(&self) -> DirectCounts {
        DirectCounts { frames: self.direct(), outcomes: self.outcomes() }
    }

    fn direct(&self) -> u64 {
        self.ingress.iter().flatten().map(|book| book.stats.direct.get()).sum()
    }

    /// Checks the direct reads since [`begin_direct`](Self::begin_direct): each frame has one
    /// outcome, and was sent. Returns their number.
    pub fn end_direct(&mut self, name: Name, before: &DirectCounts, now: Instant) -> u64 {
        let (port, queue) = name;
        let count = self.direct() - before.frames;
        let outcomes = self.outcomes() - before.outcomes;
        self.sync(Some(port), now);
        let book = &mut self.ingress[port][queue];
        book.shown += count;
        let sent = book.log.drain(..(count as usize).min(book.log.len())).count() as u64;
        self.progress += count;
        if (sent, outcomes) != (count, count) {
            self.record_finding(Finding::Lost(format!(
                "queue {queue} of port {port} read {count} frames directly, but {sent} were sent, \
                 and {outcomes} delivered"
            )));
        }
        count
    }

    /// Number of buffers of a queue that the switch may have returned: those of frames shown.
    pub fn returnable(&self, port: usize, queue: usize) -> u64 {
        self.ingress[port][queue].shown
    }

    /// Records that the honest guest `to` received a frame.
    pub fn record_arrival(&mut self, to: usize, queue: usize, bytes: &[u8]) -> Result<(), Finding> {
        let Some(origins) = self.egress[to][queue].origins.pop_front() else {
            return Err(Finding::Corrupt(format!("guest {to} received a frame not sent to it")));
        };
        if let Some(from) = origins.iter().find(|from| self.announces(**from, bytes)) {
            if *from == to || self.rules.isolates(*from, to) {
                let what = format!("guest {to} received the announcement of {from}");
                return Err(Finding::Misdelivered(what));
            }
            return Ok(());
        }
        let of = Frame::parse(bytes).map(|frame| frame.from);
        let is_known = |port: &&usize| Some(**port) == of || self.honest[**port].is_none();
        let from = origins.iter().find(is_known).or(origins.first()).copied().unwrap_or(to);
        let Some(tag) = self.honest[from] else {
            let is_forged = bytes.get(6..12) != Some(&mac(from));
            if is_forged && self.rules.of(from).is_locked() && origins == [from] {
                let what = format!("guest {to} received a frame forged by guest {from}");
                return Err(Finding::Misdelivered(what));
            }
            return Ok(());
        };
        let corrupt = |what: &str| Err(Finding::Corrupt(format!("guest {to} got {what} {from}")));
        let Some(frame) = Frame::parse(bytes) else {
            return corrupt("an altered frame of guest");
        };
        if frame.from != from || frame.tag != tag {
            return corrupt("a frame with a wrong sender, of guest");
        }
        if from == to {
            return Err(Finding::Misdelivered(format!("guest {to} received its own {frame:?}")));
        }
        let flooded = self.flooded.contains(&(from, frame.number));
        if self.rules.isolates(from, to) {
            let what = format!("guest {to} received {frame:?}, and both are isolated");
            return Err(Finding::Misdelivered(what));
        }
        let right = match self.mode {
            Mode::Cross => to == from ^ 1,
            Mode::Switch => frame.to == To::One(to) || flooded,
        };
        if !right {
            return Err(Finding::Misdelivered(format!("guest {to} received {frame:?}")));
        }
        if self.reorderable.as_ref().is_some_and(|frames| frames.contains(&(from, frame.number))) {
            return Ok(());
        }
        let flow = (from, frame.to, frame.flow, to);
        match self.arrived.insert(flow, frame.number) {
            Some(last) if last >= frame.number => {
                let what = format!("{} of guest {from} at guest {to}, after {last}", frame.number);
                Err(Finding::Reordered(what))
            }
            _ => Ok(()),
        }
    }

    /// Whether a frame is an announcement of the address of guest `from`, which was announced.
    fn announces(&self, from: usize, bytes: &[u8]) -> bool {
        let is_announced = self.ingress[from].iter().any(|book| book.announced > 0);
        is_announced && bytes == flow::rarp(mac(from))
    }

    /// Describes the entries left for queue `queue` of `port`; `None`: all are settled.
    pub fn remaining(&self, port: usize, queue: usize) -> Option<String> {
        let (ingress, egress) = (&self.ingress[port][queue], &self.egress[port][queue]);
        let (log, held, origins) = (ingress.log.len(), egress.held.len(), egress.origins.len());
        (log + held + origins > 0)
            .then(|| format!("{log} frames not shown, {held} held, {origins} not received"))
    }
}
