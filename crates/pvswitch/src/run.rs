//! `pvswitch run`: the switch, its control thread and its ports.
//!
//! The control thread owns sockets, handshakes and the port table; workers own the data path. It
//! sleeps in one epoll set and wakes only for events: an idle switch makes no system calls.

mod accounts;
mod clients;
mod cut;
#[cfg(test)]
mod cuts;
mod endpoint;
mod error;
mod events;
mod evpn;
mod flaps;
mod handover;
mod helper;
mod inherited;
mod keep;
mod manager;
mod mirrors;
mod panics;
mod passt;
mod reload;
mod requests;
mod restore;
mod rights;
mod setup;
mod show;
mod sockets;
mod stalls;
mod standby;
mod stream;
mod suspend;
mod takeover;
mod tap;
mod tenants;
mod upgrade;
mod vhost;
mod vif_tap;
mod vifs;
mod why;
mod xdp;
mod xen;
mod xenstore;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use api::near::did_you_mean;
use api::{Config, PORTS_MAX};
use os::{Epoll, Listener, Priority};
use switch::account::{Account, Budgets};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Mode, Port, PortEvent, Table};
use switch::hold::HOLD_DEFAULT;
use switch::poll::Policy;
use switch::schedule::{Placement, token};
use switch::stats::IngressStats;
use switch::tenant::Rules;
use switch::time::{self, Ns};
use switch::tuning::{Drain, Tuning};

use self::clients::Clients;
use self::endpoint::Endpoint;
pub use self::error::RunError;
use self::events::Events;
use self::evpn::Evpns;
pub use self::helper::serve as serve_helper;
use self::keep::Keep;
use self::manager::Manager;
use self::reload::{Leaving, Prepared};
pub use self::restore::Start;
use self::rights::Rights;
use self::standby::Standbys;
use self::stream::StreamPort;
pub use self::takeover::Takeover;
use self::takeover::{Inherited, TakenOver};
use self::vhost::VhostPort;
use self::xdp::XdpPort;
use self::xen::{Hypervisor, XenBus, XenPort};
use crate::clock::Clock;
use crate::config::Origin;
use crate::demo::format::plural;
use crate::limit::PortLog;
use crate::pool::{Common, Pool};
use crate::spec::{Access, Kind, PortSpec, Xen, XenAt};
use crate::tap::TapQueues;
use crate::worker::Report;
use crate::{hints, http};

/// Maximum number of entries in the FDB.
const FDB_ENTRIES: usize = 65_536;
/// How long the shutdown waits for full receivers. Frames are not held for longer.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Settings of one run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Configuration that the switch starts with; the settings below are those in it.
    pub config: Config,
    /// Origin of the configuration, for a reload.
    pub origin: Origin,
    /// The include directory of the file.
    pub include: Option<PathBuf>,
    /// Poll policy of queues without one of their own.
    pub policy: Policy,
    /// Call policy of queues without one of their own.
    pub call: Policy,
    /// Worker threads.
    pub workers: u8,
    /// Placement of queues on workers.
    pub placement: Placement,
    /// CPUs to pin workers to, in order; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Scheduling priority of workers: of `auto`, what it chose.
    pub priority: Priority,
    /// To what threads are confined.
    pub sandbox: os::Sandbox,
    /// Forwarding mode.
    pub mode: Mode,
    /// Control socket; `None`: the default path, if it is free.
    pub control: Option<PathBuf>,
    /// Who may connect to the control socket.
    pub control_access: Access,
    /// Whether members of the control socket's group may change the switch.
    pub control_write: bool,
    /// Address of the HTTP server.
    pub http: Option<api::Address>,
    /// Who may connect to the HTTP server's Unix socket.
    pub http_access: Access,
    /// Time after which the switch stops.
    pub duration: Option<Duration>,
    /// Seconds without a frame after which a learned address is removed.
    pub ageing_s: u32,
    /// Maximum number of addresses learned from one port.
    pub addresses_per_port: u32,
    /// Whether to print how to attach guests.
    pub hints: bool,
}

fn os(what: &'static str) -> impl Fn(std::io::Error) -> RunError {
    move |error| RunError::Os { what, error }
}

/// Permissions of a port's socket.
fn permissions(port: &str, access: &Access) -> Result<os::Permissions, RunError> {
    let permissions = access.permissions("socket");
    permissions.map_err(|error| RunError::Request(format!("port '{port}': {error}")))
}

/// A port and its attachment.
struct PortState {
    spec: PortSpec,
    port: Arc<Port>,
    /// Limits of its account before its options: name of the entry, and limit.
    limits: Vec<(&'static str, u64)>,
    ingress: Vec<Ingress>,
    attach: Attach,
    /// Name of the port with which alone it exchanges frames: a vif's, or that of its TAP.
    wired: Option<String>,
    /// Number of faults of this port's guest, and of times that its interface was lost.
    faults: u64,
    interface_losses: u64,
    /// Why the port is down and does not recover by itself.
    failure: Option<String>,
    /// Whether the other port of its pair carries the frames: it sends and receives nothing.
    blocked: bool,
    /// Times that it took over from the other.
    failovers: u64,
}

impl PortState {
    fn new(spec: &PortSpec, port: Arc<Port>, ingress: Vec<Ingress>, attach: Attach) -> Self {
        Self {
            spec: spec.clone(),
            port,
            limits: Vec::new(),
            ingress,
            attach,
            wired: None,
            faults: 0,
            interface_losses: 0,
            failure: None,
            blocked: false,
            failovers: 0,
        }
    }

    /// The rate-limited log for events that a guest causes; `None`: the port has no guest.
    fn log(&self) -> Option<&PortLog> {
        match &self.attach {
            Attach::Xen(xen) => Some(&xen.log),
            other => other.endpoint().map(|end| &*end.log),
        }
    }

    /// Number of frames held because its queues are full.
    fn held(&self) -> usize {
        self.port.egress.iter().map(EgressQueue::held_frames).sum()
    }

    /// State of the drain; done when all queues are drained.
    fn drain(&self) -> Drain {
        let queues = self.ingress.iter().map(|queue| queue.tuning.drain());
        // A port without ingress queues has nothing to drain.
        queues.max_by_key(|drain| *drain == Drain::Requested).unwrap_or(Drain::Off)
    }
}

/// An ingress queue as the control thread keeps it.
#[derive(Clone)]
struct Ingress {
    stats: Arc<IngressStats>,
    tuning: Arc<Tuning>,
}

/// What a port is attached to.
enum Attach {
    VhostUser(Box<VhostPort>),
    Stream(Box<StreamPort>),
    Tap(TapQueues),
    Xdp(Box<XdpPort>),
    Xen(Box<XenPort>),
    /// An interface that did not exist at the start, and when to check whether it does.
    Missing(Option<Instant>),
    Null,
}

/// Source of an event in the control thread's epoll set.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Signal,
    Hangup,
    Reports,
    ControlListener,
    Keeper,
    Client,
    Http,
    Listener(String),
    Connection(String),
    Xenstore(Hypervisor),
    XenControl(String),
    /// A front end without Xen whose domain changed.
    LocalGuest(Hypervisor),
    /// The listener of a port that is being added, not read yet.
    Prepared(String),
    /// The interface of a port with AF_XDP sockets went down, or was removed.
    Link(String),
    /// Changes of bridges in a network namespace.
    Neighbours(Option<String>),
    /// Changes of interfaces in a network namespace.
    Interfaces(Option<String>),
}

struct System {
    options: Options,
    /// The running configuration: the file, and changes at run time.
    config: Config,
    epoll: Epoll,
    tokens: HashMap<u64, Event>,
    next_token: u64,
    pool: Arc<Pool>,
    fdb: Arc<Fdb>,
    reports: Receiver<Report>,
    table: Table,
    /// Rules of ports, by id.
    rules: Vec<Option<Arc<Rules>>>,
    ports: BTreeMap<String, PortState>,
    xen: BTreeMap<Hypervisor, XenBus>,
    /// The `xen:auto` specification, if there is one.
    xen_auto: Option<PortSpec>,
    clients: Clients,
    events: Events,
    evpn: Evpns,
    standbys: Standbys,
    control: Option<Listener>,
    rights: Rights,
    http: Option<http::Server>,
    /// Budgets of all ports together.
    budgets: Budgets,
    /// Suspended listeners and connections, and when they are resumed.
    suspended: Vec<(Instant, Event)>,
    /// Readable on SIGHUP.
    hangups: UnixStream,
    manager: Manager,
    /// Readable on SIGTERM and SIGINT.
    signals: Option<UnixStream>,
    stop: bool,
    /// Program of this process at its start.
    program: PathBuf,
    /// Descriptors of the previous process, until they are used.
    inherited: Inherited,
    taken_over: Option<TakenOver>,
    /// State kept for the next process, if this one is killed.
    keep: Option<Keep>,
    /// The keeper's socket, to notice its end.
    keeper: Option<OwnedFd>,
    /// Another process has the switch.
    handed_over: bool,
}

fn watch(
    epoll: &Epoll,
    tokens: &mut HashMap<u64, Event>,
    next_token: &mut u64,
    fd: BorrowedFd<'_>,
    what: Event,
) -> Result<u64, RunError> {
    let token = *next_token;
    *next_token += 1;
    epoll.add(fd, token).map_err(os("epoll"))?;
    tokens.insert(token, what);
    Ok(token)
}

/// Runs a switch until a signal, `ctl shutdown` or the end of its time: a new one, or that of
/// another process.
pub fn run(options: Options, mut start: Start) -> Result<(), RunError> {
    start.errors.iter().for_each(|error| tracing::error!("{error}"));
    let started = setup::start(options, &mut start);
    if let (Err(error), Some(takeover)) = (&started, &start.takeover) {
        takeover.fail(error);
    }
    let mut system = started?;
    if let Some(takeover) = start.takeover {
        system.take_over(takeover)?;
    } else {
        system.start_ports()?;
        system.warn_of_unused();
    }
    system.tick_standbys();
    setup::confine_control()?;
    tracing::info!(
        "switching between {} with {}, poll {}",
        plural(system.ports.len() as u64, "port"),
        plural(system.pool.workers().len() as u64, "worker"),
        system.options.policy
    );
    system.warn_of_priority();
    system.report_ready();
    system.start_keeping();
    system.accept_http(true);
    while !system.stop {
        system.round()?;
    }
    if system.handed_over {
        system.leave();
    }
    system.end_keeping();
    system.shutdown();
    Ok(())
}

impl System {
    fn new(
        options: Options,
        mut inherited: Inherited,
        keep: Option<Keep>,
    ) -> Result<Self, RunError> {
        let keep = match inherited.keep.take() {
            Some((state, keeper)) => Some(Keep::import(state, keeper).map_err(os("store"))?),
            None => keep,
        };
        let [k0, k1, flow_key] = setup::random_key()?;
        let (ageing, limit) = (options.ageing_s, options.addresses_per_port);
        let fdb = Arc::new(Fdb::new(FDB_ENTRIES, [k0, k1], ageing, limit));
        let (reports_tx, reports) = mpsc::channel();
        let wake = Arc::new(os::eventfd().map_err(os("eventfd"))?);
        let common = Common {
            fdb: Arc::clone(&fdb),
            mode: options.mode,
            flow_key: inherited.flow_key.unwrap_or(flow_key),
            costs: crate::cost::costs_on(options.cpus.first().copied()),
            reports: reports_tx,
            reports_wake: Arc::clone(&wake),
            active: keep.as_ref().map(Keep::active),
            clock: Clock::start(),
        };
        let Options { workers, placement, priority, .. } = options;
        let pool = Pool::start(workers, &options.cpus, placement, priority, common)?;
        let epoll = Epoll::new().map_err(os("epoll"))?;
        let hangups = crate::signals::readable_on(&[signal_hook::consts::SIGHUP])
            .map_err(os("signal pipe"))?;
        hangups.set_nonblocking(true).map_err(os("signal pipe"))?;
        let mut system = Self {
            config: options.config.clone(),
            options,
            epoll,
            tokens: HashMap::new(),
            next_token: 0,
            pool,
            fdb,
            reports,
            table: Table::new(),
            rules: Vec::new(),
            ports: BTreeMap::new(),
            xen: BTreeMap::new(),
            xen_auto: None,
            clients: Clients::default(),
            events: Events::default(),
            evpn: Evpns::default(),
            standbys: Standbys::default(),
            control: None,
            rights: Rights::new(None, false),
            http: None,
            budgets: setup::budgets(),
            suspended: Vec::new(),
            hangups,
            manager: Manager::from_environment(),
            signals: None,
            stop: false,
            program: upgrade::program(),
            inherited,
            taken_over: None,
            keep,
            keeper: None,
            handed_over: false,
        };
        system.watch(wake.as_fd(), Event::Reports)?;
        system.listen_control()?;
        system.start_http()?;
        Ok(system)
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, what: Event) -> Result<u64, RunError> {
        watch(&self.epoll, &mut self.tokens, &mut self.next_token, fd, what)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, what: &Event) {
        let _ = self.epoll.remove(fd);
        self.tokens.retain(|_, w| w != what);
    }

    /// Creates a port with an account of its own.
    fn make_port(&self, id: PortId, name: &str, egress: Vec<EgressQueue>) -> Port {
        let account = Arc::new(Account::new(&self.budgets));
        Port::new(id, name.into(), egress).charged_to(account)
    }

    fn port(&self, name: &str) -> Result<&PortState, RunError> {
        self.ports.get(name).ok_or_else(|| {
            let hint = did_you_mean(name, self.ports.keys().map(String::as_str));
            RunError::NoPort(name.into(), hint)
        })
    }

    /// Adds a port on request of an operator.
    fn add_port(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        self.insert_port(spec)?;
        if self.options.hints {
            hints::print(spec);
        }
        Ok(())
    }

    fn insert_port(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        self.touch(&spec.name);
        let taken = self.xen_auto.as_ref().is_some_and(|auto| auto.name == spec.name);
        if taken || self.ports.contains_key(&spec.name) {
            return Err(RunError::DuplicatePort(spec.name.clone()));
        }
        if matches!(&spec.kind, Kind::Xen(Xen { at: XenAt::Auto, .. })) {
            return self.add_xen_auto(spec);
        }
        let id = self.free_id()?;
        let prepared = self.prepare_port(spec, id, &Leaving::default())?;
        self.install(vec![prepared]);
        Ok(())
    }

    fn free_id(&self) -> Result<PortId, RunError> {
        let free = self.table.iter().position(Option::is_none).unwrap_or(self.table.len());
        let id = u16::try_from(free).ok().filter(|id| *id < PORTS_MAX);
        id.map(PortId).ok_or(RunError::TooManyPorts(PORTS_MAX))
    }

    /// Makes a port, without a change of the switch or of other ports: all that can fail.
    fn prepare_port(
        &mut self,
        spec: &PortSpec,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let mut prepared = match &spec.kind {
            Kind::VhostUser(conf) => self.add_vhost_user(spec, conf, id, leaving)?,
            Kind::Stream(_) | Kind::Dgram(_) | Kind::Passt(_) => {
                self.add_stream(spec, id, leaving)?
            }
            Kind::Tap(conf) => self.add_tap(spec, conf, id, leaving)?,
            Kind::AfPacket(conf) => self.add_af_packet(spec, conf, id)?,
            Kind::AfXdp(conf) => self.add_af_xdp(spec, conf, id, leaving)?,
            Kind::Xen(conf) => Prepared::new(self.add_xen(spec, conf, id, leaving)?),
            Kind::Null => Prepared::new(setup::add_null(spec, id)),
        };
        let state = &mut prepared.state;
        for (i, queue) in state.port.egress.iter().enumerate() {
            queue.set_call(spec.tuning.call.of(i).unwrap_or(self.options.call));
            queue.set_hold_max(spec.tuning.hold.of(i).unwrap_or(HOLD_DEFAULT));
        }
        // After the defaults of its kind, and before anything from its peer is read.
        let account = &state.port.account;
        state.limits = account.entries().into_iter().map(|e| (e.name, e.limit)).collect();
        spec.tuning.limits.apply(account);
        Ok(prepared)
    }

    /// Adds prepared ports to the switch, and starts them.
    fn install(&mut self, all: Vec<Prepared>) {
        self.install_and(all, true);
    }

    /// The same; `connects`: ports in client mode connect and vifs start now, or else when their
    /// time comes.
    fn install_and(&mut self, all: Vec<Prepared>, connects: bool) {
        for Prepared { state, .. } in &all {
            let at = usize::from(state.port.id.0);
            if at >= self.table.len() {
                self.table.resize(at + 1, None);
            }
            self.table[at] = Some(Arc::clone(&state.port));
        }
        // Before anything from their peers is read.
        for Prepared { state, .. } in &all {
            self.set_rules(state.port.id, state.spec.tuning.tenant.rules());
            self.set_rates(state, &state.spec.tuning.tenant);
        }
        self.publish_table();
        let suspended = self.suspended.iter_mut().map(|(_, what)| what);
        for what in self.tokens.values_mut().chain(suspended) {
            if let Event::Prepared(name) = what {
                *what = Event::Listener(std::mem::take(name));
            }
        }
        let mut added = Vec::new();
        for Prepared { state, served } in all {
            let (name, id) = (state.spec.name.clone(), state.port.id);
            let client = state.attach.endpoint().is_some_and(Endpoint::connects);
            self.ports.insert(name.clone(), state);
            for served in served {
                self.pool.serve(served);
            }
            self.watch_xdp(&name);
            self.follow(id);
            added.push((name, client));
        }
        for (name, client) in added.iter().filter(|_| connects) {
            if *client {
                self.connect(name);
            }
            self.start_xen(name);
        }
        self.refresh_mirrors();
        self.refresh_evpn();
    }

    fn publish_table(&mut self) {
        let table = Arc::new(self.table.clone());
        self.pool.set_table(&table);
    }

    /// Creates the state of ingress queue number `queue` of a new port.
    fn ingress(&self, spec: &PortSpec, queue: usize, stats: &Arc<IngressStats>) -> Ingress {
        let tuning = Tuning::new(spec.tuning.poll.of(queue).unwrap_or(self.options.policy));
        tuning.set_weight(spec.tuning.weight.of(queue).unwrap_or(1));
        Ingress { stats: Arc::clone(stats), tuning: Arc::new(tuning) }
    }

    fn del_port(&mut self, name: &str) -> Result<(), RunError> {
        if let Some(vifs) = self.del_xen_auto(name) {
            tracing::info!(port = name, "removed, with {vifs} vifs");
            return Ok(());
        }
        self.port(name)?;
        if let Some(vif) = self.owner_of(name) {
            let what = format!("port '{name}' is the interface of port '{vif}': remove that one");
            return Err(RunError::Conflict(what));
        }
        self.take_down(name, &Leaving::default());
        tracing::info!(port = name, "removed");
        Ok(())
    }

    /// Stops a port and removes it from the switch. Its listener or xenstore is returned or kept
    /// if a port that is being added uses it.
    fn take_down(&mut self, name: &str, leaving: &Leaving) -> Option<Listener> {
        self.disconnect(name, "port removed");
        let state = self.ports.remove(name)?;
        let id = state.port.id;
        // Before another port may have its id.
        self.refresh_mirrors();
        state.port.set_active(0);
        let mut kept = None;
        let tap = state.wired.filter(|_| matches!(state.attach, Attach::Xen(_)));
        match state.attach {
            Attach::VhostUser(vhost) => kept = self.close_endpoint(name, vhost.end, leaving),
            Attach::Stream(stream) => kept = self.close_endpoint(name, stream.end, leaving),
            Attach::Tap(_) => {
                for queue in 0..state.ingress.len() as u16 {
                    self.pool.drop_queue(token(id, queue, false));
                }
            }
            Attach::Xdp(xdp) => self.del_xdp(name, &xdp, id),
            Attach::Xen(port) => self.del_xen(name, *port, leaving),
            Attach::Missing(_) | Attach::Null => {}
        }
        self.table[usize::from(id.0)] = None;
        self.publish_table();
        self.set_rules(id, None);
        self.fdb.flush_port(id);
        self.refresh_evpn();
        tap.iter().for_each(|tap| _ = self.take_down(tap, leaving));
        kept
    }

    fn clock(&self) -> Clock {
        self.pool.common.clock
    }

    fn round(&mut self) -> Result<(), RunError> {
        let end = self.options.duration.map(Ns::from);
        let end = end.map(|duration| self.clock().to_std(time::Instant::START + duration));
        let retries = self.ports.values().filter_map(|p| p.attach.endpoint()?.retry);
        let now = Instant::now();
        let resumes = self.suspended.iter().map(|(at, _)| *at);
        let next = retries
            .chain(end)
            .chain(resumes)
            .chain(self.clients.due())
            .chain(self.events.due())
            .chain(self.xen_due())
            .chain(self.manager.due())
            .chain(self.live_due())
            .chain(self.links_due())
            .chain(self.evpn_due())
            .chain(self.standbys_due())
            .min()
            .map(|at| at.saturating_duration_since(now));
        let ready = self.epoll.wait(next).map_err(os("epoll"))?;
        // Connections first: one that ended makes room for one queued at the listener.
        let what = ready.iter().map(|ready| ready.tag);
        let what = what.filter_map(|token| self.tokens.get(&token).map(|w| (token, w.clone())));
        let mut what: Vec<_> = what.collect();
        what.sort_by_key(|(_, w)| !matches!(w, Event::Connection(_)));
        for (token, what) in what {
            self.handle(token, what);
        }
        self.retry_due();
        self.resume_due();
        self.check_links();
        self.tick_standbys();
        self.drop_slow_clients();
        self.finish_whys();
        self.xen_tick();
        self.tick_manager();
        self.publish_changes();
        self.tick_evpn();
        self.keep_changes();
        self.confirm_local();
        self.tick_live();
        self.stop |= end.is_some_and(|end| Instant::now() >= end);
        Ok(())
    }

    fn handle(&mut self, token: u64, what: Event) {
        match what {
            Event::Signal => self.stop = true,
            Event::Hangup => {
                os::drain(self.hangups.as_fd());
                self.reload_on_signal();
            }
            Event::Reports => {
                self.begin_live();
                self.read_reports();
            }
            Event::Keeper => self.lose_keeper(),
            Event::ControlListener => self.accept_client(),
            Event::Client => self.serve_client(token),
            Event::Http => self.serve_http(),
            Event::Listener(name) => self.accept_peer(&name),
            Event::Connection(name) => self.serve_guest(&name),
            Event::Xenstore(of) => self.read_xenstore(&of),
            Event::XenControl(name) => self.serve_control(&name),
            Event::LocalGuest(of) => self.read_local(&of),
            Event::Link(name) => self.check_xdp(&name),
            Event::Interfaces(netns) => self.check_interfaces(&netns),
            // Renamed before the next event is read.
            Event::Prepared(_) => {}
            // Read at the end of each round.
            Event::Neighbours(_) => {}
        }
    }

    // ---- workers ----

    fn read_reports(&mut self) {
        os::drain(self.pool.common.reports_wake.as_fd());
        while let Ok(report) = self.reports.try_recv() {
            let id = match &report {
                Report::Port(event) => event.port(),
                Report::KickFdFailed(id, _) => *id,
            };
            let Some(state) = self.ports.values_mut().find(|p| p.port.id == id) else { continue };
            let fault = match report {
                // Once per connection: its end ends the epoch. Late reports belong to an earlier
                // connection, perhaps of another port.
                Report::Port(PortEvent::Fault { epoch, .. }) if epoch != state.port.epoch() => {
                    continue;
                }
                Report::Port(PortEvent::Fault { fault, .. }) => fault,
                Report::Port(PortEvent::Stalled { queue, begins, .. }) => {
                    state.log_stall(queue, begins);
                    let name = state.spec.name.clone();
                    self.publish_stall(name, queue, begins);
                    continue;
                }
                Report::Port(PortEvent::Flaps { mac, vlan, flap, .. }) => {
                    self.log_flap(id, mac, vlan, flap);
                    self.publish_flap(id, mac, vlan, flap);
                    continue;
                }
                // All of them are read at the end of the round.
                Report::Port(PortEvent::Learned { .. }) => continue,
                Report::KickFdFailed(_, error) => {
                    match state.log() {
                        Some(log) => log.warn(format_args!("kick descriptor failed: {error}")),
                        None => tracing::warn!(port = state.spec.name, "cannot poll: {error}"),
                    }
                    continue;
                }
            };
            if matches!(state.attach, Attach::Stream(_)) {
                let name = state.spec.name.clone();
                self.end_stream(&name, &fault.to_string());
                continue;
            }
            if matches!(state.attach, Attach::Tap(_) | Attach::Xdp(_)) {
                let name = state.spec.name.clone();
                self.fail_interface(&name, &fault.to_string());
                continue;
            }
            state.faults += 1;
            let (name, cause) = (state.spec.name.clone(), fault.to_string());
            self.publish(api::event::Event::Fault { port: name.clone(), cause });
            let Some(state) = self.ports.get_mut(&name) else { continue };
            if matches!(state.attach, Attach::Xen(_)) {
                self.fault_vif(&name, &fault.to_string());
                continue;
            }
            if let Attach::VhostUser(vhost) = &mut state.attach
                && vhost.connection.is_some()
            {
                vhost.end.errors.count("broken_ring", fault.to_string());
                vhost
                    .end
                    .log
                    .warn(format_args!("stopped: its guest violated the protocol: {fault}"));
                self.disconnect(&name, "guest fault");
            }
        }
    }

    fn shutdown(mut self) {
        tracing::info!("stopping");
        self.publish(api::event::Event::Shutdown {});
        self.manager.stopping();
        let names: Vec<_> = self.ports.keys().cloned().collect();
        // Frames taken from guests are delivered; no more are taken.
        let end = Instant::now() + DRAIN_MAX;
        names.iter().for_each(|name| drop(self.drain(name, false)));
        let busy = |port: &PortState| port.drain() == Drain::Requested || port.held() > 0;
        while self.ports.values().any(busy) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.withdraw_evpn();
        for name in names {
            // Rings are returned and sockets removed; the guests keep their interfaces.
            let _ = self.del_port(&name);
        }
        self.pool.stop();
    }
}

#[cfg(test)]
mod tests;
