//! Events for clients of the control socket and for the page of `--http`. Without either, only
//! events that cost nothing to detect are kept: a switch that is idle stays asleep.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use api::event::{Event, Kept, Way};
use serde_json::{Value, json};
use switch::fdb::{Flap, Mac, PortId};
use switch::stats::EgressStats;

use super::{PortState, System};

/// Interval at which limited frames and moved addresses are counted, while there is a client.
const SAMPLE: Duration = Duration::from_secs(1);
/// For how long all events are detected after a request for the last ones.
const WATCHED: Duration = Duration::from_secs(5);

/// Milliseconds since 1970.
pub(super) fn time_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u64
}

/// What clients know of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    id: PortId,
    up: bool,
    /// Connection of its peer.
    epoch: u64,
    /// Frames that waited for a rate, and frames dropped by one.
    limited: [u64; 2],
    /// Whether the rate was limiting in the last sample.
    limits: [bool; 2],
    /// Addresses that moved to it.
    moves: u64,
}

impl Known {
    fn of(state: &PortState) -> Self {
        let (id, epoch) = (state.port.id, state.port.epoch());
        let up = state.port.active() > 0;
        Self { id, up, epoch, limited: limited(state), limits: [false; 2], moves: moves(state) }
    }
}

/// Counts of a port's limited frames, from its guest and to it.
fn limited(state: &PortState) -> [u64; 2] {
    [
        state.ingress.iter().map(|queue| queue.stats.rate_waits.get()).sum(),
        state.port.egress.iter().map(|queue| beyond_rate(&queue.stats)).sum(),
    ]
}

fn beyond_rate(stats: &EgressStats) -> u64 {
    stats.drops_rate.get() + stats.drops_rate_aged.get()
}

/// Number of addresses that moved to a port from another one.
fn moves(state: &PortState) -> u64 {
    state.ingress.iter().map(|queue| queue.stats.mac_moves.get()).sum()
}

/// State of the stream of events.
#[derive(Default)]
pub(super) struct Events {
    /// Number of the last event.
    seq: u64,
    /// What clients know; empty while there are none.
    known: BTreeMap<String, Known>,
    /// The last ones.
    last: Kept,
    /// Whether ports are compared.
    is_watched: bool,
    /// Until when they are without a client of the stream.
    watched_until: Option<Instant>,
    /// Time at which counters are compared next.
    samples_at: Option<Instant>,
}

impl Events {
    /// Time at which counters are compared next.
    pub(super) fn due(&self) -> Option<Instant> {
        self.samples_at
    }
}

impl System {
    /// Keeps an event, and sends it to all clients that receive events.
    pub(super) fn publish(&mut self, event: Event) {
        self.events.seq += 1;
        let (seq, time_ms) = (self.events.seq, time_ms());
        self.send_event(&event, seq, time_ms);
        self.events.last.add(seq, time_ms, event);
    }

    /// The last events. More kinds of them are detected for some seconds: somebody looks at them.
    pub(super) fn last_events(&mut self) -> Value {
        self.watch_ports();
        self.events.watched_until = Some(Instant::now() + WATCHED);
        json!({ "events": self.events.last.json() })
    }

    /// Sends the event of an address that flaps to port `id`.
    pub(super) fn publish_flap(&mut self, id: PortId, mac: Mac, vlan: u16, flap: Flap) {
        let (from, to) = (self.name_of(flap.home), self.name_of(id));
        let (moves, blocked_s) = (u64::from(flap.moves), u64::from(flap.blocked_s));
        self.publish(Event::MacFlaps { mac: mac.to_string(), vlan, from, to, moves, blocked_s });
    }

    /// Sends the event of a receiver that stalled, or (false) recovered.
    pub(super) fn publish_stall(&mut self, port: String, queue: u16, begins: bool) {
        self.publish(match begins {
            true => Event::Stalled { port, queue },
            false => Event::Recovered { port, queue },
        });
    }

    /// Begins to compare ports with their state now, which a new client reads itself.
    pub(super) fn watch_ports(&mut self) {
        if !self.events.is_watched {
            let ports = self.ports.iter().map(|(name, state)| (name.clone(), Known::of(state)));
            self.events.known = ports.collect();
            self.events.is_watched = true;
        }
    }

    /// Sends the events of ports that changed since the last call: added, removed, up, down.
    pub(super) fn publish_changes(&mut self) {
        let is_watched = self.clients.streams() > 0
            || self.events.watched_until.is_some_and(|until| Instant::now() < until);
        if !is_watched {
            if self.events.is_watched {
                let (seq, last) = (self.events.seq, std::mem::take(&mut self.events.last));
                self.events = Events { seq, last, ..Events::default() };
            }
            return;
        }
        let mut found = Vec::new();
        let gone = |name: &String, known: &mut Known| {
            self.ports.get(name).is_none_or(|state| state.port.id != known.id)
        };
        for (port, known) in self.events.known.extract_if(.., gone) {
            found.extend(known.up.then(|| Event::PortDown { port: port.clone() }));
            found.push(Event::PortRemoved { port });
        }
        for (name, state) in &self.ports {
            let port = || name.clone();
            let Some(known) = self.events.known.get_mut(name) else {
                found.push(Event::PortAdded { port: port() });
                found.extend((state.port.active() > 0).then(|| Event::PortUp { port: port() }));
                self.events.known.insert(port(), Known::of(state));
                continue;
            };
            let (up, epoch) = (state.port.active() > 0, state.port.epoch());
            // Another connection since: it was down in between.
            let was_down = known.up && (!up || epoch != known.epoch);
            found.extend(was_down.then(|| Event::PortDown { port: port() }));
            found.extend((up && (was_down || !known.up)).then(|| Event::PortUp { port: port() }));
            (known.up, known.epoch) = (up, epoch);
        }
        self.sample(&mut found);
        found.into_iter().for_each(|event| self.publish(event));
    }

    /// Finds ports whose rates began to limit them, and those that addresses moved to.
    fn sample(&mut self, found: &mut Vec<Event>) {
        let now = Instant::now();
        if self.events.samples_at.is_some_and(|at| now < at) {
            return;
        }
        self.events.samples_at = Some(now + SAMPLE);
        for (name, state) in &self.ports {
            let Some(known) = self.events.known.get_mut(name) else { continue };
            let counts = limited(state);
            for (i, way) in [Way::In, Way::Out].into_iter().enumerate() {
                let limits = counts[i] != known.limited[i];
                if limits && !known.limits[i] {
                    found.push(Event::RateLimited { port: name.clone(), way });
                }
                known.limits[i] = limits;
            }
            known.limited = counts;
            let all = moves(state);
            if all > known.moves {
                found.push(Event::MacMoved { port: name.clone(), moves: all - known.moves });
            }
            known.moves = all;
        }
    }
}
