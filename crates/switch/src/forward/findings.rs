//! What forwarding finds out, for its caller to act on.

use std::sync::atomic::Ordering;

use super::{EPOCHS, Port, SlowDelivery};
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
    /// Deliveries that were long by their receivers' memory: the time is the receivers'.
    pub slow: ThinVec<SlowDelivery>,
}

impl Findings {
    /// Appends later findings.
    #[inline]
    pub fn merge(&mut self, later: Self) {
        self.wake |= later.wake;
        self.events.append(later.events);
        self.slow.append(later.slow);
    }
}

/// A list that is nearly always empty: one word, which each burst returns; empty, no allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinVec<T>(
    #[expect(clippy::box_collection, reason = "a Vec is three words")] Option<Box<Vec<T>>>,
);

/// Events of ports, in order.
pub type Events = ThinVec<PortEvent>;

impl<T> Default for ThinVec<T> {
    #[inline]
    fn default() -> Self {
        Self(None)
    }
}

impl<T> ThinVec<T> {
    /// Appends an item.
    #[cold]
    pub fn push(&mut self, item: T) {
        self.0.get_or_insert_default().push(item);
    }

    /// Appends later items.
    #[inline]
    pub fn append(&mut self, later: Self) {
        match &mut self.0 {
            None => self.0 = later.0,
            Some(items) => items.extend(later.0.into_iter().flat_map(|items| *items)),
        }
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// The items, in order.
    #[inline]
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.as_ref().map_or(&[][..], |items| items).iter()
    }
}

impl<T> FromIterator<T> for ThinVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut all = Self::default();
        items.into_iter().for_each(|item| all.push(item));
        all
    }
}

impl<T> IntoIterator for ThinVec<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.map_or_else(Vec::new, |items| *items).into_iter()
    }
}

impl<'a, T> IntoIterator for &'a ThinVec<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
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
    /// An address is new at a port: once for each
    /// [`request_report`](crate::fdb::Fdb::request_report).
    Learned {
        /// The port.
        port: PortId,
    },
}

impl PortEvent {
    /// The port that it is about.
    pub fn port(&self) -> PortId {
        match self {
            Self::Fault { port, .. }
            | Self::Stalled { port, .. }
            | Self::Flaps { port, .. }
            | Self::Learned { port } => *port,
        }
    }
}

impl Port {
    /// Identifies the connection of its peer among those of all ports: a report about an earlier
    /// one, or about another port that had its id, carries another epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Ends the epoch with the peer's connection: later reports about it are stale.
    pub fn end_epoch(&self) {
        self.epoch.store(EPOCHS.fetch_add(1, Ordering::Relaxed), Ordering::Release);
    }
}
