//! What forwarding finds out, for its caller to act on.

use crate::fdb::{Flap, Mac, PortId};
use crate::port::Fault;

/// Results of forwarding that its caller must act on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Findings {
    /// Workers (one bit each) to wake: they wait for a destination that took frames, so it may have
    /// room for theirs; while disarmed, it sends no kick.
    pub wake: u64,
    /// Events of ports, in order.
    pub events: Events,
}

impl Findings {
    /// Appends later findings.
    #[inline]
    pub fn merge(&mut self, later: Self) {
        self.wake |= later.wake;
        self.events.append(later.events);
    }
}

/// Events of ports, in order: nearly always none, so none takes one word, which each burst returns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events(
    #[expect(clippy::box_collection, reason = "a Vec is three words")] Option<Box<Vec<PortEvent>>>,
);

impl Events {
    /// Appends an event.
    #[cold]
    pub fn push(&mut self, event: PortEvent) {
        self.0.get_or_insert_default().push(event);
    }

    /// Appends later events.
    #[inline]
    pub fn append(&mut self, later: Self) {
        match &mut self.0 {
            None => self.0 = later.0,
            Some(events) => events.extend(later.0.into_iter().flat_map(|events| *events)),
        }
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

impl FromIterator<PortEvent> for Events {
    fn from_iter<I: IntoIterator<Item = PortEvent>>(events: I) -> Self {
        let mut all = Self::default();
        events.into_iter().for_each(|event| all.push(event));
        all
    }
}

impl IntoIterator for Events {
    type Item = PortEvent;
    type IntoIter = std::vec::IntoIter<PortEvent>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.map_or_else(Vec::new, |events| *events).into_iter()
    }
}

/// An event of a port that the operator or the port's owner must know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortEvent {
    /// The peer broke its protocol; the port is to be stopped.
    Fault {
        /// The peer's port.
        port: PortId,
        /// The port's [epoch](super::Port::epoch) at the time of the fault.
        epoch: u64,
        /// The violation.
        fault: Fault,
    },
    /// An egress queue became [stalled](super::EgressQueue::stalled_for), or recovered.
    Stalled {
        /// The receiver's port.
        port: PortId,
        /// The queue's index.
        queue: u16,
        /// False: it recovered.
        begins: bool,
    },
    /// An address began to flap. At most as many as the port may write log lines.
    Flaps {
        /// The port that took it.
        port: PortId,
        /// The address.
        mac: Mac,
        /// Its VLAN; 0: untagged.
        vlan: u16,
        /// The port that it was taken from, and its moves.
        flap: Flap,
    },
}

impl PortEvent {
    /// The port that it is about.
    pub fn port(&self) -> PortId {
        match self {
            Self::Fault { port, .. } | Self::Stalled { port, .. } | Self::Flaps { port, .. } => {
                *port
            }
        }
    }
}
