//! State and counters of the switch as JSON.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use shm::sync::{Counts, Lock};
use switch::tuning::Drain;
use uplink::evpn::{Address, Remote};
use vhost_user::connection::Connection;
use vhost_user::feature;

use super::{Attach, PortState, System, accounts, flaps, standby, tenants};
use crate::worker::Handle;

impl System {
    pub(super) fn show(&self) -> Value {
        let costs = self.pool.common.costs;
        let mut all = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "commit": env!("PVSWITCH_COMMIT"),
            "pid": std::process::id(),
            "uptime_s": self.clock().elapsed().as_secs(),
            "forward": match self.options.mode {
                switch::forward::Mode::Switch => "switch",
                switch::forward::Mode::Cross => "cross",
            },
            "poll": self.options.policy.to_string(),
            "call": self.options.call.to_string(),
            "workers": self.pool.workers().len(),
            "priority": self.options.priority.name(),
            "sandbox": self.options.sandbox.name(),
            "placement": self.pool.placement().name(),
            "costs_ns": {
                "wake": costs.wake.get(),
                "wake_late": costs.wake_late.get(),
                "nap": costs.nap.get(),
                "nap_late": costs.nap_late.get(),
                "copy": costs.copy.get(),
            },
            "http": self.http.as_ref().map(|server| server.url.as_str()),
            "taken_over": self.taken_over.map(|taken| json!({
                "from_pid": taken.from,
                "outage_us": taken.outage.as_micros() as u64,
                "killed": taken.killed,
            })),
            "keep": self.keeps(),
            "xen_auto": self.xen_auto.as_ref().map(|spec| spec.name.as_str()),
            "budgets": accounts::budgets(&self.budgets),
            "fdb": {
                "learned": self.fdb.learned(),
                "static": self.fdb.statics(),
                "capacity": self.fdb.capacity(),
            },
            "control": self.clients.show(),
        });
        // Not within `json!`, which copies what it is given.
        all["ports"] = self.show_ports();
        all
    }

    /// All ports, by number.
    fn by_number(&self) -> Vec<&PortState> {
        let mut ports: Vec<_> = self.ports.values().collect();
        ports.sort_by_key(|state| state.port.id.0);
        ports
    }

    pub(super) fn show_ports(&self) -> Value {
        self.by_number().into_iter().map(|port| self.show_port(port)).collect()
    }

    /// Returns what all ports use of their limits.
    pub(super) fn accounts(&self) -> Value {
        let ports = self.ports.iter().map(|(name, state)| (name, accounts::account(state)));
        let ports: serde_json::Map<_, _> = ports.map(|(name, of)| (name.clone(), of)).collect();
        let budgets = accounts::budgets(&self.budgets);
        Value::from_iter([("budgets", budgets), ("ports", Value::Object(ports))])
    }

    pub(super) fn workers(&self) -> Value {
        self.pool.workers().iter().map(|worker| worker_stats(worker)).collect()
    }

    /// State of a port in one word.
    fn state_of(&self, state: &PortState) -> &'static str {
        let drain = state.drain();
        match &state.attach {
            _ if state.port.active() > 0 && drain != Drain::Off => drain.name(),
            _ if !state.stalled_s(self.pool.now()).is_empty() => "stalled",
            _ if state.port.active() > 0 => "up",
            attach if attach.endpoint().is_some() && !attach.is_connected() => "unconnected",
            Attach::VhostUser(_) => "no-driver",
            _ if state.blocked && standby::works(state) => "standby",
            _ => "down",
        }
    }

    pub(super) fn show_port(&self, state: &PortState) -> Value {
        let mut value = json!({
            "name": state.spec.name,
            "id": state.port.id.0,
            "kind": state.spec.kind.to_string(),
            "up": state.port.active() > 0,
            "state": self.state_of(state),
            "addresses": self.fdb.learned_from(state.port.id),
            "addresses_limit": self.fdb.port_limit(),
            "queues": state.port.egress.len(),
            "queues_active": state.port.active(),
            "faults": state.faults,
            "drain": state.drain().name(),
            "stalled_s": state.stalled_s(self.pool.now()).iter().max(),
        });
        // Not within `json!`, which copies what it is given.
        value["rules"] = tenants::show(state);
        value["account"] = accounts::account(state);
        if let Some(end) = state.attach.endpoint() {
            value["connected"] = state.attach.is_connected().into();
            value["connections"] = end.connections.into();
        }
        if let Some(errors) = state.attach.errors() {
            errors.show(&mut value);
        }
        if matches!(state.attach, Attach::Tap(_) | Attach::Xdp(_)) {
            value["interface_losses"] = state.interface_losses.into();
        }
        if state.port.is_wired() {
            value["wired_to"] = state.wired.as_deref().into();
        }
        if let Some(failure) = state.failure.as_deref().or_else(|| self.why_idle(state)) {
            value["last_error"] = failure.into();
        }
        if let Some(standby) = self.show_standby(state) {
            value["standby"] = standby;
        }
        match &state.attach {
            Attach::VhostUser(vhost) => {
                let guest = vhost.guest.lock();
                let logs = |connection: &Connection| connection.backend().is_logging();
                value["dirty_log"] = vhost.connection.as_ref().is_some_and(logs).into();
                value["features"] = feature::names(guest.features).into();
            }
            Attach::Stream(_) => {}
            Attach::Tap(tap) => {
                if !tap.is_packet {
                    value["created"] = tap.created.into();
                }
                value["offloads"] = format!("{:?}", tap.offloads).into();
                value["evpn"] = self.show_evpn(state).into();
            }
            Attach::Xdp(xdp) => value["xdp"] = xdp.show(),
            Attach::Xen(port) => value["xen"] = self.show_xen(state, port),
            Attach::Missing(_) | Attach::Null => {}
        }
        value
    }

    pub(super) fn stats(&self) -> Value {
        self.count_losses();
        let counts = shm::sync::lock_counts();
        let contended = |wanted: Lock| {
            let found = counts.iter().find(|(lock, _)| *lock == wanted);
            found.map_or(0, |(_, counts)| counts.contended)
        };
        let mut stats = json!({
            "uptime_ns": self.clock().now().ns(),
            "workers": self.workers(),
            // For older clients: the first two locks that were counted.
            "locks": {
                "fdb": contended(Lock::Fdb),
                "assignments": contended(Lock::Assignments),
            },
            "lock_counts": lock_counts(&counts),
        });
        // Not within `json!`, which copies what it is given.
        stats["ports"] = self.by_number().into_iter().map(port_stats).collect();
        stats
    }

    pub(super) fn fdb(&self) -> Value {
        let now = u32::try_from(self.clock().elapsed().as_secs()).unwrap_or(u32::MAX);
        let (mut remotes, mut claims) = (self.remotes(), self.claims());
        let mut entries: Vec<_> = self
            .fdb
            .entries(now)
            .into_iter()
            .map(|e| {
                let address = Address { mac: e.mac, vlan: e.vlan };
                let remote = remotes.get(&address).filter(|(port, _)| *port == e.port).copied();
                let claim = claims.remove(&address);
                if remote.is_some() {
                    remotes.remove(&address);
                }
                let (state, vtep) = match remote {
                    Some((_, remote)) => (Some("remote"), remote.vtep),
                    None => (claim.map(|(_, state)| state), None),
                };
                let mut entry = in_bridge(address, &self.name_of(e.port), state, vtep);
                entry["age_s"] = e.age_s.into();
                entry["static"] = e.is_static.into();
                let flap = e.flap.map(|flap| flaps::show(flap, &self.name_of(flap.home)));
                entry["flaps"] = flap.into();
                entry
            })
            .collect();
        // Addresses of `mac=` of guests that send nothing, and what was not received from hosts.
        entries.extend(
            claims.into_iter().filter(|(address, _)| !remotes.contains_key(address)).map(
                |(address, (port, state))| {
                    in_bridge(address, &self.name_of(port), Some(state), None)
                },
            ),
        );
        entries.extend(remotes.into_values().map(|(port, Remote { address, vtep })| {
            in_bridge(address, &self.name_of(port), Some("remote"), vtep)
        }));
        json!({ "entries": entries })
    }
}

/// An entry of `ctl fdb` that is not in the table of the switch.
fn in_bridge(address: Address, port: &str, state: Option<&str>, vtep: Option<IpAddr>) -> Value {
    json!({
        "mac": address.mac.to_string(),
        "vlan": address.vlan,
        "port": port,
        "age_s": null,
        "static": false,
        "flaps": null,
        "evpn": state,
        "vtep": vtep.map(|ip| ip.to_string()),
    })
}

/// Counts of locks by name, of those that were taken.
fn lock_counts(counts: &[(Lock, Counts)]) -> Value {
    let of = |(lock, counts): &(Lock, Counts)| {
        let Counts { taken, contended, waited_ns } = counts;
        let counts = json!({"taken": taken, "contended": contended, "waited_ns": waited_ns});
        (lock.name().to_string(), counts)
    };
    Value::Object(counts.iter().map(of).collect())
}

pub(super) fn port_stats(state: &PortState) -> Value {
    let counters = |all: &mut dyn Iterator<Item = (&'static str, u64)>| {
        all.map(|(name, value)| (name.to_string(), Value::from(value))).collect::<Value>()
    };
    let ingress = state.ingress.iter().enumerate().map(|(i, queue)| {
        let mut value = counters(&mut queue.stats.all());
        value["state"] = queue.tuning.state().name().into();
        value["worker"] = queue.tuning.worker().into();
        value["poll"] = queue.tuning.poll().to_string().into();
        value["weight"] = queue.tuning.weight().into();
        value["drain"] = queue.tuning.drain().name().into();
        // Also here, for older clients: once, frames were held at the ingress queue.
        if let Some(twin) = state.port.egress.get(i) {
            value["hold"] = twin.hold_max().into();
            value["held"] = twin.held_frames().into();
        }
        value
    });
    let egress = state.port.egress.iter().map(|queue| {
        let mut value = counters(&mut queue.stats.all());
        value["call"] = queue.call().to_string().into();
        value["hold"] = queue.hold_max().into();
        value["held"] = queue.held_frames().into();
        value
    });
    let mut stats = json!({
        "name": state.spec.name,
        "up": state.port.active() > 0,
        "faults": state.faults,
    });
    // Not within `json!`, which copies what it is given.
    stats["account"] = accounts::account(state);
    stats["ingress"] = ingress.collect();
    stats["egress"] = egress.collect();
    stats
}

fn worker_stats(worker: &Handle) -> Value {
    let stats = &worker.stats;
    let tid = stats.tid.load(Ordering::Relaxed);
    json!({
        "tid": tid,
        "rounds": stats.rounds.load(Ordering::Relaxed),
        "sleeps": stats.sleeps.load(Ordering::Relaxed),
        "naps": stats.naps.load(Ordering::Relaxed),
        "epoll_waits": stats.epoll_waits.load(Ordering::Relaxed),
        "moves": stats.moves.load(Ordering::Relaxed),
        "contended": stats.contended.load(Ordering::Relaxed),
        "queues": stats.queues.load(Ordering::Relaxed),
        "load": worker.load(),
        "asleep": stats.asleep.load(Ordering::Relaxed),
        "cpu_ns": thread_cpu_ns(tid).unwrap_or(0),
    })
}

/// CPU time of a thread of this process, in ns (the first field of its schedstat).
fn thread_cpu_ns(tid: u64) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}
