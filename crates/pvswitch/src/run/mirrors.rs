//! Mirror ports: which ports' frames are copied to which.

use std::collections::BTreeSet;

use api::config::Mirrors;
use switch::fdb::PortId;
use switch::forward::Span;

use super::{RunError, System};
use crate::tenant::Tenant;

impl System {
    /// Sets where the frames of each port are copied, after a change of ports or of `mirror-to=`. A
    /// mirror port may be a vif that `xen:auto` has not found yet, and each vif may be set to be
    /// mirrored to one of them.
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
        let mut mirrors = Mirrors::default();
        for (port, state) in &self.ports {
            let of = state.spec.tuning.tenant.mirror().map(|(to, ..)| to);
            mirrors.set(port, of.filter(|to| to != port));
        }
        if let Some(auto) = &self.xen_auto {
            mirrors.set_auto(&auto.name, auto.tuning.tenant.mirror().map(|(to, ..)| to));
        }
        mirrors.check_change(name, to).map_err(RunError::Request)
    }

    /// Ends the mirrors to a port that an operator removes.
    pub(super) fn end_mirrors(&mut self, to: &str) {
        let is_user = |tenant: &Tenant| tenant.mirror().is_some_and(|(name, ..)| name == to);
        if let Some(auto) = &mut self.xen_auto
            && is_user(&auto.tuning.tenant)
        {
            auto.tuning.tenant.end_mirror();
        }
        let users = self.ports.iter().filter(|(_, state)| is_user(&state.spec.tuning.tenant));
        let users: Vec<_> = users.map(|(name, _)| name.clone()).collect();
        for name in users {
            let Some(state) = self.ports.get(&name) else { continue };
            let mut tenant = state.spec.tuning.tenant.clone();
            tenant.end_mirror();
            self.touch(&name);
            self.set_tenant(&name, tenant);
            tracing::info!(port = name, "no longer mirrored: mirror port '{to}' was removed");
        }
    }
}
