//! Partners: in the cross-connect each port has one, and in any mode two ports can be wired to each
//! other. A wired port exchanges frames with its partner only; the learning switch does not see it.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Forwarder, Mode, Port};
use crate::fdb::PortId;

/// Not wired.
const NONE: u32 = 0;
/// Wired; the partner does not exist yet.
const OPEN: u32 = 1;

/// The port that a port is wired to: [`NONE`], [`OPEN`], or 2 + its id.
#[derive(Default)]
pub(super) struct Wire(AtomicU32);

impl Port {
    /// Wires it to one other port, which must be wired to this one; `None`: to one that does not
    /// exist yet, and its frames are dropped meanwhile. To be called before it is in a table.
    pub fn wire(&self, to: Option<PortId>) {
        let wire = to.map_or(OPEN, |to| OPEN + 1 + u32::from(to.0));
        self.wire.0.store(wire, Ordering::Release);
    }

    /// Whether it is wired to another port.
    pub fn is_wired(&self) -> bool {
        self.wire.0.load(Ordering::Acquire) != NONE
    }

    /// The port that it is wired to, if that exists.
    pub fn wired_to(&self) -> Option<PortId> {
        let wire = self.wire.0.load(Ordering::Acquire);
        wire.checked_sub(OPEN + 1).map(|id| PortId(id as u16))
    }
}

impl Forwarder {
    /// Whether frames of this port go to its partner, without look-up.
    #[inline]
    pub(super) fn has_partner(&self, from: PortId) -> bool {
        self.mode == Mode::Cross || self.port(from).is_some_and(|port| port.is_wired())
    }

    /// The partner of this port, and the number of its enabled queues, if there are any.
    #[inline]
    pub(super) fn partner(&self, from: PortId) -> Option<(PortId, u16)> {
        let own = self.port(from).filter(|port| port.is_wired());
        let to = match own {
            Some(own) => own.wired_to()?,
            None => PortId(from.0 ^ 1),
        };
        let port = self.port(to)?;
        let is_mutual = match own {
            Some(_) => port.wired_to() == Some(from),
            None => !port.is_wired(),
        };
        Some((to, port.active())).filter(|(_, active)| is_mutual && *active > 0)
    }
}
