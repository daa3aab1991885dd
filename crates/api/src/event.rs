//! Events of a switch, as server-sent events (HTML, 9.2): one object of JSON each.
//!
//! ```text
//!   id: 17
//!   event: port-up
//!   data: {"event":"port-up","port":"vm1","seq":17,"severity":"info","time_ms":1764042000000}
//! ```
//! A client that reads too slowly loses events, never the latest state of the switch: a `lost`
//! event says how many, and `GET /v1/status` how things are.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Most bytes of events that wait for one client; further events are lost to it.
pub const WAITING_MAX: usize = 65_536;
/// Number of events that a switch keeps.
pub const KEPT_MAX: usize = 100;
/// Most clients that receive events at a time.
pub const STREAMS_MAX: usize = 16;

/// A direction of a port's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// From the guest into the switch.
    In,
    /// To the guest.
    Out,
}

/// Severity of an event for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Normal operation.
    Info,
    /// A guest or a network that may need attention.
    Warning,
    /// A guest broke its protocol.
    Error,
}

/// An event: a change that operators and tools react to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A port was added.
    PortAdded {
        /// Its name.
        port: String,
    },
    /// A port was removed.
    PortRemoved {
        /// Its name.
        port: String,
    },
    /// A port has its first active queue: frames can be delivered.
    PortUp {
        /// Its name.
        port: String,
    },
    /// A port has no active queue any more.
    PortDown {
        /// Its name.
        port: String,
    },
    /// A guest broke its protocol; the port was stopped.
    Fault {
        /// Name of the port.
        port: String,
        /// The violation.
        cause: String,
    },
    /// The interface of a port was removed, or fails; the port is down.
    InterfaceLost {
        /// Name of the port.
        port: String,
        /// What happened to it.
        cause: String,
    },
    /// A receiver posts no buffers while frames arrive for it.
    Stalled {
        /// Name of the port.
        port: String,
        /// Number of the queue.
        queue: u16,
    },
    /// A stalled receiver posts buffers again.
    Recovered {
        /// Name of the port.
        port: String,
        /// Number of the queue.
        queue: u16,
    },
    /// Addresses moved to a port from others in the last second, or tried to.
    MacMoved {
        /// Name of the port.
        port: String,
        /// Number of moves.
        moves: u64,
    },
    /// An address flaps between two ports: a loop, or a forged address.
    MacFlaps {
        /// The address.
        mac: String,
        /// VLAN id, 0 for untagged.
        vlan: u16,
        /// Name of the port that it leaves.
        from: String,
        /// Name of the port that it moves to.
        to: String,
        /// Moves so far.
        moves: u64,
        /// Seconds for which it stays where it was (`loop-guard=block`); 0: it does not.
        blocked_s: u64,
    },
    /// A port took over from the other one of its pair.
    Failover {
        /// Its name.
        port: String,
        /// Name of the other one.
        from: String,
        /// Why.
        cause: String,
    },
    /// A rate began to limit a port; it is reported again after a second without a limited frame.
    RateLimited {
        /// Name of the port.
        port: String,
        /// The direction.
        way: Way,
    },
    /// The configuration file was applied.
    Reload {
        /// Number of ports added.
        added: usize,
        /// Number of ports removed.
        removed: usize,
        /// Number of ports replaced.
        replaced: usize,
        /// Number of ports whose options were changed.
        changed: usize,
    },
    /// Another process has the switch; the stream ends.
    Upgrade {
        /// The process.
        pid: u32,
    },
    /// The switch stops; the stream ends.
    Shutdown {},
    /// Events were lost, because this client reads too slowly; `seq` is that of the last one.
    Lost {
        /// Number of events.
        events: u64,
    },
}

impl Event {
    /// Its name.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["event"].as_str().unwrap_or_default().into()
    }

    /// Returns the severity for an operator.
    pub fn severity(&self) -> Severity {
        match self {
            Self::Fault { .. } => Severity::Error,
            Self::PortDown { .. }
            | Self::InterfaceLost { .. }
            | Self::Stalled { .. }
            | Self::MacFlaps { .. }
            | Self::Failover { .. }
            | Self::Lost { .. } => Severity::Warning,
            Self::PortAdded { .. }
            | Self::PortRemoved { .. }
            | Self::PortUp { .. }
            | Self::Recovered { .. }
            | Self::MacMoved { .. }
            | Self::RateLimited { .. }
            | Self::Reload { .. }
            | Self::Upgrade { .. }
            | Self::Shutdown {} => Severity::Info,
        }
    }

    /// The port whose peer causes it.
    fn port(&self) -> Option<&str> {
        match self {
            Self::PortAdded { port }
            | Self::PortRemoved { port }
            | Self::PortUp { port }
            | Self::PortDown { port }
            | Self::Fault { port, .. }
            | Self::InterfaceLost { port, .. }
            | Self::Stalled { port, .. }
            | Self::Recovered { port, .. }
            | Self::MacMoved { port, .. }
            | Self::MacFlaps { to: port, .. }
            | Self::Failover { port, .. }
            | Self::RateLimited { port, .. } => Some(port),
            Self::Reload { .. } | Self::Upgrade { .. } | Self::Shutdown {} | Self::Lost { .. } => {
                None
            }
        }
    }

    /// Returns an object. `seq`: its number, from 1, without gaps; `time_ms`: since 1970.
    pub fn json(&self, seq: u64, time_ms: u64) -> Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["severity"] = serde_json::to_value(self.severity()).unwrap_or_default();
        value["seq"] = seq.into();
        value["time_ms"] = time_ms.into();
        value
    }

    /// Returns the text of an event stream, with the same number and time.
    pub fn text(&self, seq: u64, time_ms: u64) -> String {
        let value = self.json(seq, time_ms);
        format!("id: {seq}\nevent: {}\ndata: {value}\n\n", self.name())
    }
}

/// The last events of a switch, [`KEPT_MAX`] at most. When full, the oldest of the port that has
/// most of them goes: a guest that connects again and again displaces its own events only.
#[derive(Debug, Default)]
pub struct Kept {
    /// Number, time in ms since 1970, and event, in order.
    events: VecDeque<(u64, u64, Event)>,
}

impl Kept {
    /// Adds an event.
    pub fn add(&mut self, seq: u64, time_ms: u64, event: Event) {
        self.events.push_back((seq, time_ms, event));
        if self.events.len() > KEPT_MAX {
            let mut counts = BTreeMap::<Option<&str>, usize>::new();
            self.events.iter().for_each(|(.., e)| *counts.entry(e.port()).or_default() += 1);
            let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(port, _)| port);
            let oldest = self.events.iter().position(|(.., event)| Some(event.port()) == most);
            self.events.remove(oldest.unwrap_or(0));
        }
    }

    /// Returns the events as objects, the oldest first.
    pub fn json(&self) -> Vec<Value> {
        self.events.iter().map(|(seq, time_ms, event)| event.json(*seq, *time_ms)).collect()
    }
}

/// Events that one client has not read: bounded; those beyond are counted as lost.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Events lost since the last one that was not, and the number of the last lost one.
    lost: Option<(u64, u64)>,
}

impl Waiting {
    /// Returns the text to append to `unread` bytes for an event; empty if there is no room.
    pub fn add(&mut self, unread: usize, text: &str, seq: u64, time_ms: u64) -> String {
        let mut out = self.report(unread, time_ms);
        if self.lost.is_some() || unread + out.len() + text.len() > WAITING_MAX {
            self.lost = Some((self.lost.map_or(0, |(n, _)| n) + 1, seq));
        } else {
            out += text;
        }
        out
    }

    /// The report of lost events, once there is room for it.
    pub fn report(&mut self, unread: usize, time_ms: u64) -> String {
        // Half of the room: the next events are not lost at once.
        if unread > WAITING_MAX / 2 {
            return String::new();
        }
        let lost = self.lost.take();
        lost.map_or_else(String::new, |(events, seq)| Event::Lost { events }.text(seq, time_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_that_reconnects_again_and_again_displaces_its_own_events_only() {
        let mut kept = Kept::default();
        kept.add(1, 0, Event::Fault { port: "b".into(), cause: "x".into() });
        for seq in 2..1000 {
            kept.add(seq, 0, Event::PortUp { port: "a".into() });
        }
        kept.add(1000, 0, Event::PortUp { port: "c".into() });
        let events = kept.json();
        assert_eq!(events.len(), KEPT_MAX);
        assert_eq!((&events[0]["seq"], &events[0]["port"]), (&1.into(), &"b".into()));
        assert_eq!(events[1]["seq"], 1000 - 98);
        assert_eq!(events[KEPT_MAX - 1]["port"], "c");
        assert!(events.is_sorted_by_key(|event| event["seq"].as_u64()));
    }

    #[test]
    fn an_event_is_one_line_of_json_whatever_its_texts() {
        let event = Event::Fault { port: "a".into(), cause: "x\n\ndata: {}\r\n".into() };
        let text = event.text(7, 9);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[1], lines[3]), (4, "id: 7", "event: fault", ""));
        let data: serde_json::Value =
            serde_json::from_str(lines[2].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(
            (&data["seq"], &data["time_ms"], &data["port"]),
            (&7.into(), &9.into(), &"a".into())
        );
        assert_eq!(serde_json::from_value::<Event>(data).unwrap(), event);
    }

    #[test]
    fn a_slow_client_loses_events_and_learns_how_many() {
        let (mut waiting, mut unread) = (Waiting::default(), String::new());
        let text = |seq| Event::PortUp { port: "vm1".into() }.text(seq, 0);
        for seq in 1..=2000 {
            unread += &waiting.add(unread.len(), &text(seq), seq, 0);
            assert!(unread.len() <= WAITING_MAX);
        }
        let kept = unread.matches("event: port-up").count() as u64;
        assert!(kept > 100 && kept < 2000 && !unread.contains("lost"), "{kept}");
        assert_eq!(waiting.report(unread.len(), 0), "", "still no room");
        // It reads all of it; the next event comes after the report.
        let next = waiting.add(0, &text(2001), 2001, 0);
        let want = format!("{}{}", Event::Lost { events: 2000 - kept }.text(2000, 0), text(2001));
        assert_eq!(next, want);
        assert_eq!(waiting.report(0, 0), "");
    }
}
