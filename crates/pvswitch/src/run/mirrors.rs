//! Mirror ports: which ports' frames are copied to which.

use std::collections::BTreeSet;

use switch::fdb::PortId;
use switch::forward::Span;

use super::{RunError, System};
use crate::tenant::Tenant;

impl System {
    /// Sets where the frames of each port are copied, after a change of ports or of `mirror-to=`. A
    /// mirror port that does not exist gets copies once it does.
    pub(super) fn refresh_mirrors(&mut self) {
        let id = |name: &str| self.ports.get(name).map(|state| state.port.id);
        let mut reserved = BTreeSet::new();
        for state in self.ports.values() {
            let mirror = state.spec.tuning.tenant.mirror();
            let span = mirror.and_then(|(name, ingress, egress)| {
                let to = id(name).filter(|to| *to != state.port.id)?;
                Some(Span { to, ingress, egress })
            });
            reserved.extend(span.map(|span| span.to));
            state.port.set_span(span);
        }
        let mut flushed: Vec<PortId> = Vec::new();
        for port in self.ports.values().map(|state| &state.port) {
            let is_reserved = reserved.contains(&port.id);
            if is_reserved && !port.mirror.is_reserved() {
                flushed.push(port.id);
            }
            port.set_reserved(is_reserved);
        }
        // Frames for addresses behind it are flooded to the others from now on.
        flushed.into_iter().for_each(|port| _ = self.fdb.flush_learned(port));
    }

    /// Checks a change of `mirror-to=` of a port.
    pub(super) fn check_mirror(&self, name: &str, changes: &Tenant) -> Result<(), RunError> {
        let Some((to, ..)) = changes.mirror() else { return Ok(()) };
        let refuse = |why: String| Err(RunError::Request(format!("mirror-to={to}: {why}")));
        if to == name {
            return refuse("a port cannot be its own mirror port".into());
        }
        let Some(mirror) = self.ports.get(to) else {
            return refuse("no such port: add it first, see pvswitch ctl show".into());
        };
        if let Some((next, ..)) = mirror.spec.tuning.tenant.mirror() {
            return refuse(format!("it is mirrored to '{next}', and copies are not copied again"));
        }
        if self.ports.get(name).is_some_and(|state| state.port.mirror.is_reserved()) {
            return refuse(format!("'{name}' is a mirror port itself"));
        }
        Ok(())
    }
}
