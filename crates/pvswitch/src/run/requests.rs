//! Requests of `pvswitch ctl`, run by the control thread.

use std::io::{BufReader, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use api::PortText;
use api::config::StaticAddress;
use api::control::{MALFORMED, REQUEST_MAX, Received, Request, failure, line, receive, reply};
use api::file::Problems;
use api::set::{Change, Target, changes};
use serde_json::{Value, json};
use switch::tuning::Drain;
use vhost_user::feature;

use super::{Attach, Event, PortState, RunError, System, accounts, flaps, tenants};
use crate::capture;
use crate::http::Query;
use crate::pool::{Placement, token};
use crate::spec::{PortSpec, PortTuning};
use crate::worker::Handle;

impl System {
    pub(super) fn accept_client(&mut self) {
        let Some(listener) = &self.control else { return };
        let stream = match listener.accept() {
            Ok(Some(socket)) => UnixStream::from(socket),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!("{error}");
                return self.suspend(Event::ControlListener);
            }
        };
        // Without credentials nothing is permitted.
        let Ok(peer) = os::peer(stream.as_fd()) else { return };
        if self.clients.len() >= CLIENTS_MAX
            && let Some(oldest) = self.clients.iter().min_by_key(|(_, client)| client.since)
        {
            let oldest = *oldest.0;
            self.drop_client(oldest);
        }
        if let Ok(token) = self.watch(stream.as_fd(), Event::Client) {
            let reader = BufReader::with_capacity(REQUEST_MAX, stream);
            let (out, since) = (Vec::new(), Instant::now());
            self.clients.insert(token, Client { reader, peer, out, since });
        }
    }

    fn drop_client(&mut self, token: u64) {
        if let Some(client) = self.clients.remove(&token) {
            self.close_client(token, &client);
        }
    }

    fn close_client(&mut self, token: u64, client: &Client) {
        let _ = self.epoll.remove(client.reader.get_ref().as_fd());
        self.tokens.remove(&token);
    }

    /// Disconnects clients that do not read their replies.
    pub(super) fn drop_slow_clients(&mut self) {
        let now = Instant::now();
        let late = self.clients.iter().filter(|(_, c)| c.ends().is_some_and(|end| end <= now));
        for token in late.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.drop_client(token);
        }
    }

    /// Reads the data of a client and replies to each request.
    pub(super) fn serve_client(&mut self, token: u64) {
        let Some(mut client) = self.clients.remove(&token) else { return };
        // No request is read while a reply is pending: a client holds at most one reply.
        let keep = if client.out.is_empty() {
            client.since = Instant::now();
            self.serve_request(&mut client)
        } else {
            client.flush()
        };
        let (fd, idle) = (client.reader.get_ref().as_fd(), client.out.is_empty());
        if keep && self.epoll.change(fd, token, idle, !idle).is_ok() {
            self.clients.insert(token, client);
        } else {
            self.close_client(token, &client);
        }
    }

    /// Reads and runs one request. Returns whether the client stays connected.
    fn serve_request(&mut self, client: &mut Client) -> bool {
        match receive(&mut client.reader) {
            Received::Request(request)
                if let Err(error) = self.rights.check(&client.peer, &request) =>
            {
                client.reply(&failure(&error))
            }
            Received::Request(Request::Capture { port }) => self.capture(&port, client),
            Received::Request(request) => client.reply(&self.respond(&request)),
            Received::Unknown(why) => client.reply(&failure(&why)),
            Received::Malformed => {
                client.reply(&failure(MALFORMED));
                false
            }
            Received::Nothing => true,
            Received::Closed => false,
        }
    }

    /// Runs the requests received by HTTP.
    pub(super) fn serve_http(&mut self) {
        let Some(server) = &self.http else { return };
        os::drain(server.as_fd());
        let queries: Vec<_> = server.queries.try_iter().collect();
        for Query { request, reply } in queries {
            // The client may have disconnected.
            let _ = reply.send(self.respond(&request));
        }
    }

    /// Runs a request and returns the reply.
    fn respond(&mut self, request: &Request) -> Value {
        let result = match request {
            Request::Show => Ok(self.show()),
            Request::Stats => Ok(self.stats()),
            Request::AddPort { port } => port
                .parse::<PortText>()
                .map_err(|error| RunError::Request(error.to_string()))
                .and_then(|text| {
                    self.config.check_new(&text).map_err(RunError::Request)?;
                    self.add_port(&PortSpec::from(&text))?;
                    self.config.ports.push(text);
                    Ok(json!({}))
                }),
            Request::DelPort { name } => self.del_port(name).map(|()| {
                self.config.remove_port(name);
                json!({})
            }),
            Request::Fdb => Ok(self.fdb()),
            Request::FdbAdd { mac, port, vlan } => self.fdb_add(mac, port, *vlan),
            Request::FdbDel { mac, vlan } => self.fdb_del(mac, *vlan),
            Request::Set { target, settings } => self.set(target.as_deref(), settings),
            Request::Drain { name, off } => self.drain(name, *off),
            Request::Reload { dry_run } => self.reload(*dry_run),
            Request::Upgrade { program } => self.upgrade(program.as_deref()),
            Request::Config => self.saved(),
            Request::Shutdown => {
                self.stop = true;
                Ok(json!({}))
            }
            Request::Capture { .. } => {
                Err(RunError::Request("a capture needs a separate connection".into()))
            }
        };
        let problems = match &result {
            Err(RunError::Config(Problems(problems))) => Some(json!(problems)),
            _ => None,
        };
        let mut reply = reply(result);
        if let Some(problems) = problems {
            reply["problems"] = problems;
        }
        reply
    }

    fn show(&self) -> Value {
        let mut ports: Vec<_> = self.ports.values().collect();
        ports.sort_by_key(|p| p.port.id.0);
        let costs = self.pool.common.costs;
        json!({
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
            "placement": self.pool.placement().name(),
            "costs_ns": {
                "wake": costs.wake.get(),
                "wake_late": costs.wake_late.get(),
                "nap": costs.nap.get(),
                "nap_late": costs.nap_late.get(),
            },
            "http": self.http.as_ref().map(|server| server.url.as_str()),
            "taken_over": self.taken_over.map(|taken| json!({
                "from_pid": taken.from,
                "outage_us": taken.outage.as_micros() as u64,
            })),
            "xen_auto": self.xen_auto.as_ref().map(|spec| spec.name.as_str()),
            "budgets": accounts::budgets(&self.budgets),
            "fdb": {
                "learned": self.fdb.learned(),
                "static": self.fdb.statics(),
                "capacity": self.fdb.capacity(),
            },
            "ports": ports.into_iter().map(|port| self.show_port(port)).collect::<Vec<_>>(),
        })
    }

    /// State of a port in one word.
    fn state_of(&self, state: &PortState) -> &'static str {
        let drain = state.drain();
        match &state.attach {
            _ if state.port.active() > 0 && drain != Drain::Off => drain.name(),
            _ if !state.stalled_s(self.pool.now()).is_empty() => "stalled",
            _ if state.port.active() > 0 => "up",
            Attach::VhostUser(vhost) if vhost.connection.is_none() => "unconnected",
            Attach::VhostUser(_) => "no-driver",
            _ => "down",
        }
    }

    fn show_port(&self, state: &PortState) -> Value {
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
            "rules": tenants::show(state),
            "account": accounts::account(state),
        });
        match &state.attach {
            Attach::VhostUser(vhost) => {
                let guest = vhost.guest.lock().unwrap_or_else(PoisonError::into_inner);
                value["connected"] = vhost.connection.is_some().into();
                value["connections"] = vhost.connections.into();
                value["features"] = feature::names(guest.features).into();
                vhost.errors.show(&mut value);
            }
            Attach::Tap(tap) => {
                value["created"] = tap.created.into();
                value["offloads"] = format!("{:?}", tap.offloads).into();
            }
            Attach::Xen(port) => value["xen"] = self.show_xen(state, port),
            Attach::Null => {}
        }
        value
    }

    fn stats(&self) -> Value {
        let mut ports: Vec<_> = self.ports.values().collect();
        ports.sort_by_key(|p| p.port.id.0);
        let workers: Vec<_> = self.pool.workers().iter().map(|w| worker_stats(w)).collect();
        json!({
            "uptime_ns": self.clock().now().ns(),
            "ports": ports.into_iter().map(port_stats).collect::<Vec<_>>(),
            "workers": workers,
        })
    }

    fn fdb(&self) -> Value {
        let now = u32::try_from(self.clock().elapsed().as_secs()).unwrap_or(u32::MAX);
        let entries: Vec<_> = self
            .fdb
            .entries(now)
            .into_iter()
            .map(|e| {
                json!({
                    "mac": e.mac.to_string(),
                    "vlan": e.vlan,
                    "port": self.name_of(e.port),
                    "age_s": e.age_s,
                    "static": e.is_static,
                    "flaps": e.flap.map(|flap| flaps::show(flap, &self.name_of(flap.home))),
                })
            })
            .collect();
        json!({ "entries": entries })
    }

    fn fdb_add(&mut self, mac: &str, port: &str, vlan: u16) -> Result<Value, RunError> {
        let id = self.port(port)?.port.id;
        let address = address(mac, vlan)?;
        let now = u32::try_from(self.clock().elapsed().as_secs()).unwrap_or(u32::MAX);
        let added = self.fdb.add_static(address.mac, address.vlan, id, now);
        added.map_err(|error| RunError::Request(error.to_string()))?;
        self.config.set_static(address, port);
        Ok(json!({}))
    }

    fn fdb_del(&mut self, mac: &str, vlan: u16) -> Result<Value, RunError> {
        let address = address(mac, vlan)?;
        if self.fdb.remove(address.mac, address.vlan) {
            self.config.remove_static(address);
            return Ok(json!({}));
        }
        Err(RunError::Request(format!("no entry for {mac} on VLAN {vlan}: see pvswitch ctl fdb")))
    }

    /// Changes settings: all of them or, if one is invalid, none.
    fn set(&mut self, target: Option<&str>, settings: &[String]) -> Result<Value, RunError> {
        let bad = RunError::Request;
        let (name, queue) = match target.and_then(|target| target.split_once('/')) {
            Some((name, queue)) => (Some(name), Some(queue)),
            None => (target, None),
        };
        let state = name.map(|name| self.port(name)).transpose()?;
        let queue = match (state, queue) {
            (Some(state), Some(queue)) => {
                let queues = state.port.egress.len();
                let n = queue.parse::<usize>().ok().filter(|n| *n < queues);
                let name = &state.spec.name;
                let what = format!("{name}/{queue}: it has {queues} queues, numbered from 0");
                Some(n.ok_or_else(|| bad(what))?)
            }
            _ => None,
        };
        let of = match (state, queue) {
            (None, _) => Target::Switch,
            (Some(state), None) => Target::Port(&state.spec.name, state.spec.kind.schema()),
            (Some(state), Some(_)) => Target::Queue(&state.spec.name, state.spec.kind.schema()),
        };
        let changes = changes(of, settings).map_err(bad)?;
        let mut tuning = PortTuning::default();
        changes.iter().for_each(|Change { entry, value }| tuning.set(entry, None, value));
        match state {
            Some(state) => {
                // The only change that may be refused: before the others.
                let tenant = Self::changed_tenant(state, &tuning.tenant)?;
                self.check_mirror(&state.spec.name, &tuning.tenant)?;
                self.tune(state, queue, &tuning);
                tuning.limits.apply(&state.port.account);
                if let Some(tenant) = tenant {
                    let name = state.spec.name.clone();
                    self.set_tenant(&name, tenant);
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
        self.config.set(name, queue, &changes);
        Ok(json!({}))
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
    pub(super) fn drain(&self, name: &str, off: bool) -> Result<Value, RunError> {
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

    /// Hands the connection over to a capture thread; it is no longer a client.
    fn capture(&self, name: &str, client: &mut Client) -> bool {
        let started = self.port(name).map_err(|e| e.to_string()).and_then(|state| {
            let stream = client.reader.get_ref().try_clone().map_err(|e| e.to_string())?;
            capture::start(Arc::clone(&state.port), stream, self.clock())
        });
        match started {
            Ok(()) => false,
            Err(error) => client.reply(&failure(&error)),
        }
    }
}

fn address(mac: &str, vlan: u16) -> Result<StaticAddress, RunError> {
    let mac = api::mac(mac).map_err(RunError::Request)?;
    if vlan < 4095 {
        return Ok(StaticAddress { mac, vlan });
    }
    Err(RunError::Request(format!("VLAN {vlan}: use 0 (untagged) to 4094")))
}

/// Maximum number of clients; a further one replaces the client with the oldest request.
const CLIENTS_MAX: usize = 64;
/// Maximum time for a client to read a reply.
const CLIENT_TIME: Duration = Duration::from_secs(10);

/// A client of the control socket. Never blocks the control thread.
pub(super) struct Client {
    reader: BufReader<UnixStream>,
    /// Its process, when it connected.
    peer: os::Peer,
    /// The unread part of its reply.
    out: Vec<u8>,
    /// Time of its last request.
    since: Instant,
}

impl Client {
    /// Sends a reply. Returns whether the client is connected.
    fn reply(&mut self, answer: &Value) -> bool {
        self.out = line(answer);
        self.flush()
    }

    /// Writes as much of the reply as possible. Returns whether the client is connected.
    fn flush(&mut self) -> bool {
        let mut stream = self.reader.get_ref();
        while !self.out.is_empty() {
            match stream.write(&self.out) {
                Ok(0) => return false,
                Ok(n) => drop(self.out.drain(..n)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        true
    }

    /// When it is disconnected unless it reads.
    pub(super) fn ends(&self) -> Option<Instant> {
        (!self.out.is_empty()).then(|| self.since + CLIENT_TIME)
    }
}

fn port_stats(state: &PortState) -> Value {
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
    json!({
        "name": state.spec.name,
        "up": state.port.active() > 0,
        "faults": state.faults,
        "account": accounts::account(state),
        "ingress": ingress.collect::<Vec<_>>(),
        "egress": egress.collect::<Vec<_>>(),
    })
}

fn worker_stats(worker: &Handle) -> Value {
    let stats = &worker.stats;
    let tid = stats.tid.load(Ordering::Relaxed);
    json!({
        "tid": tid,
        "rounds": stats.rounds.load(Ordering::Relaxed),
        "sleeps": stats.sleeps.load(Ordering::Relaxed),
        "naps": stats.naps.load(Ordering::Relaxed),
        "moves": stats.moves.load(Ordering::Relaxed),
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
