//! Rules of ports whose peers are tenants: publication, changes and display.

use std::sync::Arc;

use serde_json::{Value, json};
use switch::account::RateLimits;
use switch::fdb::PortId;
use switch::schedule::token;
use switch::tenant::{Rules, Tenants, Vlan};

use super::{Attach, PortState, RunError, System};
use crate::spec::Kind;
use crate::tenant::Tenant;

impl System {
    /// Replaces the rules of a port, at all workers.
    pub(super) fn set_rules(&mut self, id: PortId, rules: Option<Rules>) {
        let at = usize::from(id.0);
        if self.rules.get(at).is_none_or(Option::is_none) && rules.is_none() {
            return;
        }
        self.rules.resize(self.rules.len().max(at + 1), None);
        self.rules[at] = rules.map(Arc::new);
        self.pool.set_tenants(&Tenants::new(self.rules.clone()));
    }

    /// Sets the rates of a port, and its limits of floods and of flapping addresses; its queues are
    /// polled, for they may wait for the old ones.
    pub(super) fn set_rates(&self, state: &PortState, tenant: &Tenant) {
        let (from_peer, to_peer) = tenant.rates();
        state.port.set_rates(from_peer, to_peer);
        state.port.set_storm(tenant.storm());
        state.port.set_loop_guard(tenant.loop_guard_s());
        for (i, queue) in state.ingress.iter().enumerate() {
            queue.tuning.set_has_rate(from_peer != RateLimits::default());
            self.pool.poll(token(state.port.id, i as u16, false));
        }
    }

    /// The rules of a port as they would be after `changes`.
    pub(super) fn changed_tenant(
        state: &PortState,
        changes: &Tenant,
    ) -> Result<Option<Tenant>, RunError> {
        let old = &state.spec.tuning.tenant;
        let new = old
            .changed(changes)
            .map_err(|error| RunError::Request(format!("port '{}': {error}", state.spec.name)))?;
        Ok((new != *old).then_some(new))
    }

    /// Replaces the rules of a port at run time. Addresses that it learned and may not have any
    /// more are removed.
    pub(super) fn set_tenant(&mut self, name: &str, tenant: Tenant) {
        let Some(state) = self.ports.get_mut(name) else { return };
        let (id, rules) = (state.port.id, tenant.rules());
        if let Kind::VhostUser(conf) = &mut state.spec.kind {
            conf.mac = tenant.mac();
        }
        if let Attach::VhostUser(vhost) = &mut state.attach {
            vhost.conf.mac = tenant.mac();
        }
        let rates = |t: &Tenant| (t.rates(), t.storm(), t.loop_guard_s());
        let has_other_rates = rates(&state.spec.tuning.tenant) != rates(&tenant);
        state.spec.tuning.tenant = tenant;
        let of =
            |rules: Option<&Rules>| rules.map_or(Vlan::Transparent, |rules| rules.vlan.clone());
        let old = of(self.rules.get(usize::from(id.0)).and_then(Option::as_deref));
        let moved = old != of(rules.as_ref());
        self.set_rules(id, rules.clone());
        self.evpn.rules += 1;
        self.refresh_mirrors();
        if moved {
            self.refresh_evpn();
        }
        if let Some(state) = self.ports.get(name).filter(|_| has_other_rates) {
            self.set_rates(state, &state.spec.tuning.tenant);
        }
        let keeps = |mac, vlan| !moved && rules.as_ref().is_none_or(|r| r.may_own(mac, vlan));
        self.fdb.retain_learned(id, keeps);
    }
}

/// The rules of a port for `ctl show`: options that differ from the default.
pub(super) fn show(state: &PortState) -> Value {
    let tenant = &state.spec.tuning.tenant;
    let all: serde_json::Map<_, _> =
        tenant.all().map(|(name, value)| (name.into(), json!(value))).collect();
    if all.is_empty() { Value::Null } else { all.into() }
}
