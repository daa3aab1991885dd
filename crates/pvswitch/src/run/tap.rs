//! TAP ports.

use std::sync::Arc;

use api::event::Event;
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Source};
use switch::schedule::token;
use vhost_user::device::KickFd;

use super::reload::{Leaving, Prepared};
use super::{Attach, PortState, RunError, System};
use crate::spec::{PortSpec, Tap};
use crate::tap::TapQueues;
use crate::worker::Served;

/// Why the port of an interface that was removed is down.
const REMOVED: &str = "the TAP interface was removed";

impl System {
    pub(super) fn add_tap(
        &mut self,
        spec: &PortSpec,
        conf: &Tap,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let tap = self.open_tap(spec, conf, leaving)?;
        let removed = tap.removed;
        let mut egress = Vec::new();
        let mut ingress = Vec::new();
        let mut served = Vec::new();
        let queues = TapQueues::new(&tap);
        for bus in self.xen.values() {
            bus.set_tap_memory(&queues);
        }
        for (queue, pair) in tap.pairs.into_iter().enumerate() {
            egress.push(EgressQueue::new(pair.egress, pair.egress_stats));
            let known = self.ingress(spec, queue, &pair.ingress_stats);
            let tuning = Arc::clone(&known.tuning);
            ingress.push(known);
            let queue = queue as u16;
            let source = Source::new(id, queue, pair.ingress_stats, tuning);
            let token = token(id, queue, false);
            let kick = Some(pair.fd as KickFd);
            served.push(Served { token, source, ingress: pair.ingress, kick, notifies: true });
        }
        let port = Arc::new(self.make_port(id, &spec.name, egress));
        let mut state = PortState::new(spec, port, ingress, Attach::Tap(queues));
        if removed {
            // As it was in the previous process.
            state.failure = Some(REMOVED.into());
            served.clear();
        } else {
            state.port.set_active(state.port.egress.len() as u16);
        }
        Ok(Prepared { state, served })
    }

    /// Takes a port down whose interface cannot be used any more; each of its queues reports that.
    pub(super) fn fail_interface(&mut self, name: &str, why: &str) {
        let Some(state) = self.ports.get_mut(name).filter(|state| state.failure.is_none()) else {
            return;
        };
        state.failure = Some(why.into());
        state.faults += 1;
        state.port.set_active(0);
        let id = state.port.id;
        self.fdb.flush_learned(id);
        tracing::error!(
            port = name,
            "down: {why}: make it again, then remove and add the port (ctl del-port, add-port)"
        );
        self.publish(Event::Fault { port: name.into(), cause: why.into() });
        self.touch(name);
    }
}
