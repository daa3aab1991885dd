//! Direct path of the cross-connect: frames read into the buffers of their destination port.

use std::sync::Arc;

use super::{Findings, Forwarder, PortEvent, Source};
use crate::fdb::PortId;
use crate::frame::BURST_MAX;
use crate::port::{Ingress, QueueId};
use crate::serving::Serving;
use crate::time::Instant;

impl Forwarder {
    /// Reads, before a burst of `ingress`, directly into the buffers of its partner port, if
    /// possible. Otherwise (a learning switch, a partner that is down or has no buffers, rules,
    /// rates or a capture of either port, held frames) nothing is read here and the burst handles
    /// all frames.
    #[inline]
    pub fn direct(&mut self, from: &Source, ingress: &mut dyn Ingress, now: Instant) -> Findings {
        if !ingress.supports_direct() || !self.has_partner(from.port) {
            return Findings::default();
        }
        self.read_into_partner(from, ingress, now);
        std::mem::take(&mut self.findings)
    }

    fn read_into_partner(&mut self, from: &Source, ingress: &mut dyn Ingress, now: Instant) {
        let table = Arc::clone(&self.table);
        let port = |id: PortId| table.get(usize::from(id.0)).and_then(Option::as_ref);
        let Some((to, active)) = self.partner(from.port) else { return };
        let Some((own, partner)) = port(from.port).zip(port(to)) else { return };
        // Rules are applied to private heads, which such frames do not have.
        let ruled = |id| self.tenants.as_ref().is_some_and(|tenants| tenants.of(id).is_some());
        if ruled(from.port) || ruled(to) || from.tuning.has_rate() || partner.has_rate_out() {
            return;
        }
        if own.mirror.is_on() || partner.mirror.is_on() {
            return;
        }
        let at = QueueId { port: to, queue: from.queue % active };
        let egress = &partner.egress[usize::from(at.queue)];
        if egress.is_holding() || egress.is_slow(now) {
            return;
        }
        let mut queue = egress.lock();
        let _delivering = Serving::receiver(to);
        let Some(direct) = queue.direct() else { return };
        let done = ingress.read_into(BURST_MAX, direct);
        let mut late = None;
        if done != Ok(0) {
            queue.flush();
            late = egress.notify(&mut *queue, done.as_ref().map_or(1, |n| *n), false, now);
        }
        let epoch = partner.epoch();
        drop(queue);
        if let Some(late) = late {
            self.schedule_notify(late, at);
        }
        match done {
            Ok(0) => {}
            Ok(_) => self.record_progress(at, egress),
            Err(fault) => {
                let fault = PortEvent::Fault { port: to, epoch, fault };
                self.findings.events.push(fault);
            }
        }
    }
}

#[cfg(test)]
mod tests;
