//! Requests of operators, run by the control thread.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use api::config::{Part, StaticAddress};
use api::file::{PROBLEMS_MAX, Problem as ConfigProblem};
use api::routes::{Operation, Right, Server};
use api::set::{Change, Target, changes};
use api::{PortText, Problem, Request};
use serde_json::{Map, Value, json};
use switch::schedule::{Placement, token};
use switch::tuning::Drain;

use super::show::port_stats;
use super::{PortState, RunError, System};
use crate::http::{self, Query};
use crate::spec::{PortSpec, PortTuning};

/// Longest time that this process exists for HTTP clients after another has taken over.
const FINISH_MAX: Duration = Duration::from_secs(1);

impl System {
    /// Runs the requests received by HTTP.
    pub(super) fn serve_http(&mut self) {
        let Some(server) = &self.http else { return };
        os::drain(server.as_fd());
        let queries: Vec<_> = server.queries.try_iter().collect();
        for Query { request, reply } in queries {
            // The client may have disconnected.
            let _ = reply.send(self.respond(&request));
            self.end_reply();
        }
    }

    /// Replies to HTTP clients that were accepted before another process took over, for a limited
    /// time.
    pub(super) fn finish_http(&mut self) {
        let end = Instant::now() + FINISH_MAX;
        while self.http.as_ref().is_some_and(http::Server::has_clients) && Instant::now() < end {
            self.serve_http();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs a request and returns the content of its reply; what it changed is kept before.
    pub(super) fn respond(&mut self, request: &Request) -> Result<Value, Problem> {
        let changes = Operation::of(request).right != Right::Read;
        if changes {
            self.begin_request(request);
        }
        let result = self.run_request(request).map_err(|error| match (request, error.problem()) {
            // The only request that names a port elsewhere.
            (Request::FdbAdd { .. }, problem) if problem.status == 404 => problem.at("body.port"),
            (_, problem) => problem,
        });
        if changes {
            self.keep_changes();
        }
        result
    }

    fn run_request(&mut self, request: &Request) -> Result<Value, RunError> {
        match request {
            Request::Show => Ok(self.show()),
            Request::Stats => Ok(self.stats()),
            Request::Ports => Ok(Value::from_iter([("ports", self.show_ports())])),
            Request::Port { name } => Ok(self.show_port(self.port(name)?)),
            Request::PortStats { name } => {
                self.count_losses();
                Ok(port_stats(self.port(name)?))
            }
            Request::AddPort { name, port } => self.add_new(name, port),
            Request::DelPort { name } => {
                self.del_port(name)?;
                self.end_mirrors(name);
                self.end_standbys(name);
                self.config.remove_port(name);
                Ok(Value::Null)
            }
            Request::Workers => Ok(json!({ "workers": self.workers() })),
            Request::Accounts => Ok(self.accounts()),
            Request::Fdb => Ok(self.fdb()),
            Request::LastEvents => Ok(self.last_events()),
            Request::FdbAdd { mac, port, vlan } => self.fdb_add(mac, port, *vlan),
            Request::FdbDel { mac, vlan } => self.fdb_del(mac, *vlan),
            Request::Set { settings } => self.set(None, None, settings),
            Request::SetPort { name, settings } => self.set(Some(name), None, settings),
            Request::SetQueue { name, queue, settings } => {
                self.set(Some(name), Some(*queue), settings)
            }
            Request::Drain { name } => self.drain(name, false),
            Request::Resume { name } => self.drain(name, true),
            Request::Reload { dry_run } => self.reload(*dry_run),
            Request::Upgrade { program } => self.upgrade(program.as_deref()),
            Request::Config => self.saved(),
            Request::Shutdown => {
                self.stop = true;
                Ok(Value::Null)
            }
            Request::Openapi => Ok(api::openapi::document(Server::Switch)),
            // The operations of connections and of guests: not reached.
            Request::Capture { .. }
            | Request::Events
            | Request::SetPair { .. }
            | Request::Why { .. } => {
                Err(RunError::Request(format!("'{}' needs the control socket", request.name())))
            }
        }
    }

    /// Adds a port on request of an operator.
    fn add_new(&mut self, name: &str, port: &Map<String, Value>) -> Result<Value, RunError> {
        if self.ports.contains_key(name) {
            return Err(RunError::DuplicatePort(name.into()));
        }
        let port = PortText::from_json(name, port)?;
        self.config.check_new(&port).map_err(RunError::Conflict)?;
        self.add_port(&PortSpec::from(&port))?;
        let before = self.config.warnings().into_iter().collect();
        self.config.ports.push(port);
        Ok(json!({ "warnings": self.warn(&before) }))
    }

    /// Logs what is valid and probably not meant, besides what was so before; for the reply.
    fn warn(&self, before: &BTreeSet<(Part, String)>) -> Vec<ConfigProblem> {
        let now = self.config.warnings().into_iter();
        let new = now.filter(|warning| !before.contains(warning)).take(PROBLEMS_MAX);
        let new: Vec<_> = new.map(|(_, what)| ConfigProblem::new(None, what)).collect();
        new.iter().for_each(|warning| tracing::warn!("{warning}"));
        new
    }

    fn fdb_add(&mut self, mac: &str, port: &str, vlan: u16) -> Result<Value, RunError> {
        let state = self.port(port)?;
        if state.port.is_wired() {
            let what = format!("port '{port}' is wired to another: no address leads to it");
            return Err(RunError::Conflict(what));
        }
        let id = state.port.id;
        let address = address(mac, vlan)?;
        let now = u32::try_from(self.clock().elapsed().as_secs()).unwrap_or(u32::MAX);
        let added = self.fdb.add_static(address.mac, address.vlan, id, now);
        added.map_err(|error| RunError::Request(error.to_string()))?;
        self.config.set_static(address, port);
        Ok(Value::Null)
    }

    fn fdb_del(&mut self, mac: &str, vlan: u16) -> Result<Value, RunError> {
        let address = address(mac, vlan)?;
        if self.fdb.remove(address.mac, address.vlan) {
            self.config.remove_static(address);
            return Ok(Value::Null);
        }
        Err(RunError::NoEntry(format!("no entry for {mac} on VLAN {vlan}: see pvswitch ctl fdb")))
    }

    /// Changes settings: all of them or, if one is invalid, none.
    fn set(
        &mut self,
        name: Option<&str>,
        queue: Option<u16>,
        settings: &Map<String, Value>,
    ) -> Result<Value, RunError> {
        let state = name.map(|name| self.port(name)).transpose()?;
        let queue = match (state, queue) {
            (Some(state), Some(queue)) => {
                let queues = state.port.egress.len();
                let n = Some(usize::from(queue)).filter(|n| *n < queues);
                let name = &state.spec.name;
                let what = match queues {
                    1 => format!("{name}/{queue}: it has one queue: use {name}/0"),
                    n => format!("{name}/{queue}: use a queue from {name}/0 to {name}/{}", n - 1),
                };
                Some(n.ok_or(RunError::NoQueue(what))?)
            }
            _ => None,
        };
        let of = match (state, queue) {
            (None, _) => Target::Switch,
            (Some(state), None) => Target::Port(&state.spec.name, state.spec.kind.schema()),
            (Some(state), Some(_)) => Target::Queue(&state.spec.name, state.spec.kind.schema()),
        };
        let changes = changes(of, settings)?;
        let mut tuning = PortTuning::default();
        changes.iter().for_each(|Change { entry, value }| tuning.set(entry, None, value));
        match state {
            Some(state) => {
                // The only change that may be refused: before the others.
                let tenant = Self::changed_tenant(state, &tuning.tenant)?;
                self.check_mirror(&state.spec.name, &tuning.tenant)?;
                self.check_standby(&state.spec.name, &changes)?;
                self.tune(state, queue, &tuning);
                tuning.limits.apply(&state.port.account);
                let name = state.spec.name.clone();
                if let Some(tenant) = tenant {
                    self.set_tenant(&name, tenant);
                }
                if let Some(state) = self.ports.get_mut(&name) {
                    state.spec.tuning.standby.change(&changes);
                }
            }
            None => {
                self.ports.values().for_each(|state| self.tune(state, None, &tuning));
                self.options.policy = tuning.poll.all().unwrap_or(self.options.policy);
                self.options.call = tuning.call.all().unwrap_or(self.options.call);
                let placement = changes.iter().find(|change| change.entry.name == "placement");
                let placement = placement.and_then(|change| change.value.word());
                if let Some(placement) = placement.and_then(Placement::named) {
                    self.pool.set_placement(placement);
                }
            }
        }
        let before = self.config.warnings().into_iter().collect();
        self.config.set(name, queue, &changes);
        let warnings = self.warn(&before);
        Ok(if warnings.is_empty() { Value::Null } else { json!({ "warnings": warnings }) })
    }

    /// Applies the settings in `tuning` to one queue or to all queues of a port.
    fn tune(&self, state: &PortState, only: Option<usize>, tuning: &PortTuning) {
        let of = |queue: usize| only.is_none_or(|only| only == queue);
        for (i, queue) in state.ingress.iter().enumerate().filter(|(i, _)| of(*i)) {
            if let Some(poll) = tuning.poll.all() {
                queue.tuning.set_poll(poll);
                // Its worker polls it with the new policy; the queue may be cold.
                self.pool.poll(token(state.port.id, i as u16, false));
            }
            if let Some(weight) = tuning.weight.all() {
                queue.tuning.set_weight(weight);
            }
        }
        for (_, queue) in state.port.egress.iter().enumerate().filter(|(i, _)| of(*i)) {
            if let Some(call) = tuning.call.all() {
                queue.set_call(call);
            }
            if let Some(hold) = tuning.hold.all() {
                queue.set_hold_max(hold);
            }
        }
    }

    /// Requests the drain of a port's queues, or ends it.
    pub(super) fn drain(&mut self, name: &str, off: bool) -> Result<Value, RunError> {
        self.touch(name);
        let state = self.port(name)?;
        for (i, queue) in state.ingress.iter().enumerate() {
            let token = token(state.port.id, i as u16, false);
            queue.tuning.set_drain(!off);
            if !self.pool.serves(token) {
                // Its ring was stopped before the request arrived at its worker.
                queue.tuning.complete_drain();
            } else if queue.tuning.drain() != Drain::Done {
                self.pool.poll(token);
            }
        }
        Ok(json!({ "drain": state.drain().name(), "held": state.held() }))
    }
}

fn address(mac: &str, vlan: u16) -> Result<StaticAddress, RunError> {
    let mac = api::mac(mac).map_err(RunError::Request)?;
    if vlan < 4095 {
        return Ok(StaticAddress { mac, vlan });
    }
    Err(RunError::Request(format!("VLAN {vlan}: use 0 (untagged) to 4094")))
}
