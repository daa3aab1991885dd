//! TAP ports.

use std::sync::Arc;

use switch::fdb::PortId;
use switch::forward::{EgressQueue, Source};
use switch::schedule::token;
use vhost_user::device::KickFd;

use super::reload::{Leaving, Prepared};
use super::{Attach, PortState, RunError, System};
use crate::spec::{PortSpec, Tap};
use crate::tap::TapQueues;
use crate::worker::Served;

impl System {
    pub(super) fn add_tap(
        &mut self,
        spec: &PortSpec,
        conf: &Tap,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let tap = self.open_tap(spec, conf, leaving)?;
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
        port.set_active(port.egress.len() as u16);
        let state = PortState::new(spec, port, ingress, Attach::Tap(queues));
        Ok(Prepared { state, served })
    }
}
