//! `pvswitch run`: the switch, its control thread and its ports.
//!
//! The control thread owns sockets, handshakes and the port table; workers own the data path. It
//! sleeps in one epoll set and wakes for events only: an idle switch makes no system call.

mod requests;
mod setup;

use std::collections::{BTreeMap, HashMap};
use std::io::BufReader;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use switch::fdb::{Fdb, Mac, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Table};
use switch::poll::Policy;
use switch::stats::{EgressStats, IngressStats};
use switch::tuning::{HOLD_MAX, Tuning};
use vhost_user::backend::{self, Backend};
use vhost_user::backoff::Backoff;
use vhost_user::connection::Connection;
use vhost_user::net::{NetDevice, NetOptions, Pair, takes};
use vhost_user::sys::{self, Listener, SocketError};

use crate::hints;
use crate::http;
use crate::limit::PortLog;
use crate::pool::{Common, Placement, Pool, token};
use crate::ports::{Guest, PortHost, burst_of, egress_of, rarp};
use crate::spec::{Kind, PortSpec, Role, Tap, VhostUser, did_you_mean};
use crate::tap::TapQueues;
use crate::worker::{Report, Served};

/// Most ports of one switch.
pub const PORTS_MAX: u16 = 4096;
/// Bit of the control thread in the masks of workers that wait for room; it never waits.
const CONTROL_WORKER: u8 = 63;
/// Most workers: one bit each in a mask, less the control thread's.
pub const WORKERS_MAX: u8 = 63;
/// Addresses the switch can know.
const FDB_ENTRIES: usize = 65_536;
/// A connection that lasted so long was a good one.
const LASTING: Duration = Duration::from_secs(2);
/// How long a listener that cannot accept is left alone.
const REST: Duration = Duration::from_secs(1);
/// Longest control request, in bytes.
const REQUEST_MAX: usize = 4096;

/// Settings of one run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ports to start with.
    pub ports: Vec<PortSpec>,
    /// Poll policy of queues that have none of their own.
    pub policy: Policy,
    /// Call policy of queues that have none of their own.
    pub call: Policy,
    /// Worker threads.
    pub workers: u8,
    /// Which worker serves which queue.
    pub placement: Placement,
    /// CPUs to pin workers to, in order; empty: not pinned.
    pub cpus: Vec<usize>,
    /// How frames find their way.
    pub mode: Mode,
    /// Control socket; `None`: the default, if it is free.
    pub control: Option<PathBuf>,
    /// Where to serve HTTP.
    pub http: Option<http::Address>,
    /// Stop after this long.
    pub duration: Option<Duration>,
    /// Seconds after which an unseen address is forgotten.
    pub ageing_s: u32,
    /// Most addresses learned from one port.
    pub addresses_per_port: u32,
    /// Static addresses: (address, port name).
    pub static_addresses: Vec<(Mac, String)>,
    /// Print how to attach guests.
    pub hints: bool,
}

/// Why a switch cannot start, or a port cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A name was used twice.
    #[error("port '{0}' exists already: give each port its own name")]
    DuplicatePort(String),
    /// No such port.
    #[error("no port '{0}'{1}")]
    NoPort(String, String),
    /// A socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The TAP cannot be opened.
    #[error("port '{name}': {error}")]
    Tap {
        /// The port.
        name: String,
        /// Why.
        error: uplink::TapError,
    },
    /// Too many.
    #[error("{0} ports are the most one switch takes")]
    TooManyPorts(u16),
    /// A system call that should not fail.
    #[error("{what}: {error}")]
    Os {
        /// Which.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// A request that makes no sense.
    #[error("{0}")]
    Request(String),
    /// HTTP cannot be served.
    #[error(transparent)]
    Http(#[from] http::HttpError),
}

fn os(what: &'static str) -> impl Fn(std::io::Error) -> RunError {
    move |error| RunError::Os { what, error }
}

/// One port and what serves it.
struct PortState {
    spec: PortSpec,
    port: Arc<Port>,
    ingress: Vec<Ingress>,
    attach: Attach,
    /// Faults of this port's guest so far.
    faults: u64,
}

/// What is known of an ingress queue from outside.
#[derive(Clone)]
struct Ingress {
    stats: Arc<IngressStats>,
    tuning: Arc<Tuning>,
}

/// What is behind a port.
enum Attach {
    VhostUser(Box<VhostPort>),
    Tap(TapQueues),
    Null,
}

/// A vhost-user port's place in the switch, its ingress queues, and itself.
type VhostRef<'a> = (&'a Arc<Port>, &'a [Ingress], &'a mut VhostPort);

struct VhostPort {
    conf: VhostUser,
    pairs: Vec<Pair>,
    guest: Arc<Mutex<Guest>>,
    log: Arc<PortLog>,
    listener: Option<Listener>,
    connection: Option<Connection>,
    backoff: Backoff,
    /// When the connection was made.
    since: Instant,
    /// Client mode: when to try again.
    retry: Option<Instant>,
    connections: u64,
}

/// What an epoll token of the control thread stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    Signal,
    Reports,
    ControlListener,
    Client,
    Http,
    Listener(String),
    Connection(String),
}

struct System {
    options: Options,
    epoll: OwnedFd,
    tokens: HashMap<u64, What>,
    next_token: u64,
    pool: Arc<Pool>,
    fdb: Arc<Fdb>,
    reports: Receiver<Report>,
    table: Table,
    ports: BTreeMap<String, PortState>,
    clients: HashMap<u64, BufReader<UnixStream>>,
    control: Option<Listener>,
    http: Option<http::Server>,
    /// The control thread's own way into the switch, for announcements.
    forwarder: Forwarder,
    /// Listeners that could not accept, and when they are looked at again.
    resting: Vec<(Instant, What)>,
    started: Instant,
    stop: bool,
}

/// Runs a switch until a signal, `ctl shutdown` or the end of its time.
pub fn run(options: Options) -> Result<(), RunError> {
    setup::raise_descriptor_limit();
    let signals = signals()?;
    let mut system = System::new(options)?;
    system.watch(signals.as_fd(), What::Signal)?;
    system.start_ports()?;
    tracing::info!(
        "switching between {} ports with {} workers, poll {}",
        system.ports.len(),
        system.pool.workers().len(),
        system.options.policy
    );
    while !system.stop {
        system.round()?;
    }
    system.shutdown();
    Ok(())
}

/// A descriptor that becomes readable on SIGTERM and SIGINT.
pub fn signals() -> Result<UnixStream, RunError> {
    let (read, write) = UnixStream::pair().map_err(os("signal pipe"))?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let write = write.try_clone().map_err(os("signal pipe"))?;
        signal_hook::low_level::pipe::register(signal, write).map_err(os("signal handler"))?;
    }
    Ok(read)
}

impl System {
    fn new(options: Options) -> Result<Self, RunError> {
        let started = Instant::now();
        let [k0, k1, flow_key] = setup::random_key()?;
        let (ageing, limit) = (options.ageing_s, options.addresses_per_port);
        let fdb = Arc::new(Fdb::new(FDB_ENTRIES, [k0, k1], ageing, limit));
        let (reports_tx, reports) = mpsc::channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|e| os("eventfd")(e.into()))?);
        let common = Common {
            fdb: Arc::clone(&fdb),
            mode: options.mode,
            flow_key,
            costs: crate::cost::costs(),
            reports: reports_tx,
            reports_wake: Arc::clone(&wake),
            epoch: started,
        };
        let pool = Pool::start(options.workers, &options.cpus, options.placement, common)
            .map_err(os("worker thread"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| os("epoll")(e.into()))?;
        let table = Arc::new(Table::new());
        let forwarder =
            Forwarder::new(options.mode, CONTROL_WORKER, Arc::clone(&fdb), table, flow_key);
        let mut system = Self {
            options,
            epoll,
            tokens: HashMap::new(),
            next_token: 0,
            pool,
            fdb,
            reports,
            table: Table::new(),
            ports: BTreeMap::new(),
            clients: HashMap::new(),
            control: None,
            http: None,
            forwarder,
            resting: Vec::new(),
            started,
            stop: false,
        };
        system.watch(wake.as_fd(), What::Reports)?;
        system.listen_control()?;
        system.start_http()?;
        Ok(system)
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, what: What) -> Result<u64, RunError> {
        let token = self.next_token;
        self.next_token += 1;
        let data = epoll::EventData::new_u64(token);
        let added = epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN);
        added.map_err(|e| os("epoll")(e.into()))?;
        self.tokens.insert(token, what);
        Ok(token)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, what: &What) {
        let _ = epoll::delete(&self.epoll, fd);
        self.tokens.retain(|_, w| w != what);
    }

    fn listen_control(&mut self) -> Result<(), RunError> {
        let explicit = self.options.control.clone();
        let path = explicit.clone().unwrap_or_else(crate::control::default_path);
        match Listener::bind(&path) {
            Ok(listener) => {
                self.watch(listener.as_fd(), What::ControlListener)?;
                self.control = Some(listener);
                Ok(())
            }
            Err(error) if explicit.is_some() => Err(error.into()),
            // A second switch on the machine works all the same; it only cannot be asked.
            Err(error) => {
                tracing::warn!("no control socket: {error} (give --control PATH)");
                Ok(())
            }
        }
    }

    fn start_http(&mut self) -> Result<(), RunError> {
        let Some(address) = &self.options.http else { return Ok(()) };
        let server = http::Server::start(address)?;
        self.watch(server.as_fd(), What::Http)?;
        self.http = Some(server);
        Ok(())
    }

    fn start_ports(&mut self) -> Result<(), RunError> {
        for spec in std::mem::take(&mut self.options.ports) {
            self.add_port(&spec)?;
        }
        for (mac, name) in std::mem::take(&mut self.options.static_addresses) {
            let id = self.port(&name)?.port.id;
            let added = self.fdb.add_static(mac.0, 0, id, 0);
            added.map_err(|error| RunError::Request(error.to_string()))?;
        }
        Ok(())
    }

    fn port(&self, name: &str) -> Result<&PortState, RunError> {
        self.ports.get(name).ok_or_else(|| {
            let hint = did_you_mean(name, self.ports.keys().map(String::as_str));
            RunError::NoPort(name.into(), hint)
        })
    }

    fn add_port(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        if self.ports.contains_key(&spec.name) {
            return Err(RunError::DuplicatePort(spec.name.clone()));
        }
        let free = self.table.iter().position(Option::is_none).unwrap_or(self.table.len());
        let id = u16::try_from(free).ok().filter(|id| *id < PORTS_MAX);
        let id = PortId(id.ok_or(RunError::TooManyPorts(PORTS_MAX))?);
        let state = match &spec.kind {
            Kind::VhostUser(conf) => self.add_vhost_user(spec, conf, id)?,
            Kind::Tap(conf) => self.add_tap(spec, conf, id)?,
            Kind::Null => add_null(spec, id),
        };
        let call = spec.tuning.call.unwrap_or(self.options.call);
        state.port.egress.iter().for_each(|queue| queue.set_call(call));
        if free == self.table.len() {
            self.table.push(None);
        }
        self.table[free] = Some(Arc::clone(&state.port));
        self.publish_table();
        if self.options.hints {
            hints::print(spec);
        }
        let client = matches!(&spec.kind, Kind::VhostUser(c) if c.role == Role::Client);
        self.ports.insert(spec.name.clone(), state);
        self.follow(id);
        if client {
            self.connect(&spec.name);
        }
        Ok(())
    }

    fn publish_table(&mut self) {
        let table = Arc::new(self.table.clone());
        self.pool.set_table(&table);
        self.forwarder.set_table(table);
    }

    fn add_vhost_user(
        &mut self,
        spec: &PortSpec,
        conf: &VhostUser,
        id: PortId,
    ) -> Result<PortState, RunError> {
        let pairs: Vec<Pair> = (0..conf.queues).map(|_| Pair::new()).collect();
        let port = Arc::new(Port::new(id, spec.name.clone(), egress_of(&pairs)));
        let listener = match conf.role {
            Role::Server => {
                let listener = Listener::bind(&conf.socket)?;
                self.watch(listener.as_fd(), What::Listener(spec.name.clone()))?;
                Some(listener)
            }
            Role::Client => None,
        };
        let ingress = pairs.iter().map(|p| self.ingress(spec, &p.ingress_stats)).collect();
        let vhost = VhostPort {
            conf: conf.clone(),
            pairs,
            guest: Arc::default(),
            log: Arc::new(PortLog::new(&spec.name)),
            listener,
            connection: None,
            backoff: Backoff::default(),
            since: Instant::now(),
            retry: None,
            connections: 0,
        };
        let attach = Attach::VhostUser(Box::new(vhost));
        Ok(PortState { spec: spec.clone(), port, ingress, attach, faults: 0 })
    }

    fn add_tap(&mut self, spec: &PortSpec, conf: &Tap, id: PortId) -> Result<PortState, RunError> {
        let error = |error| RunError::Tap { name: spec.name.clone(), error };
        let tap = crate::tap::open(conf).map_err(error)?;
        let mut egress = Vec::new();
        let mut ingress = Vec::new();
        let mut served = Vec::new();
        let queues = TapQueues::new(&tap);
        for (queue, pair) in tap.pairs.into_iter().enumerate() {
            egress.push(EgressQueue::new(pair.egress, pair.egress_stats));
            let known = self.ingress(spec, &pair.ingress_stats);
            let tuning = Arc::clone(&known.tuning);
            ingress.push(known);
            let queue = queue as u16;
            let source = Source { port: id, queue, stats: pair.ingress_stats, tuning };
            let token = token(id, queue, false);
            let kick = Some(pair.fd);
            served.push(Served { token, source, ingress: pair.ingress, kick, notifies: true });
        }
        let port = Arc::new(Port::new(id, spec.name.clone(), egress));
        port.set_active(port.egress.len() as u16);
        for served in served {
            self.pool.serve(served);
        }
        let attach = Attach::Tap(queues);
        Ok(PortState { spec: spec.clone(), port, ingress, attach, faults: 0 })
    }

    /// An ingress queue of a new port.
    fn ingress(&self, spec: &PortSpec, stats: &Arc<IngressStats>) -> Ingress {
        let tuning = Tuning::new(spec.tuning.poll.unwrap_or(self.options.policy));
        tuning.set_weight(spec.tuning.weight.unwrap_or(1));
        tuning.set_hold(spec.tuning.hold.unwrap_or(HOLD_MAX));
        Ingress { stats: Arc::clone(stats), tuning: Arc::new(tuning) }
    }

    fn del_port(&mut self, name: &str) -> Result<(), RunError> {
        self.port(name)?;
        self.disconnect(name, "port removed");
        let state = self.ports.remove(name).expect("looked up above");
        let id = state.port.id;
        state.port.set_active(0);
        match &state.attach {
            Attach::VhostUser(vhost) => {
                if let Some(listener) = &vhost.listener {
                    self.unwatch(listener.as_fd(), &What::Listener(name.into()));
                }
            }
            Attach::Tap(_) => {
                for queue in 0..state.ingress.len() as u16 {
                    self.pool.drop_queue(token(id, queue, false));
                }
            }
            Attach::Null => {}
        }
        self.table[usize::from(id.0)] = None;
        self.publish_table();
        self.fdb.flush_port(id);
        tracing::info!("port {name}: removed");
        Ok(())
    }

    fn round(&mut self) -> Result<(), RunError> {
        let end = self.options.duration.map(|d| self.started + d);
        let retries = self.ports.values().filter_map(|p| match &p.attach {
            Attach::VhostUser(v) => v.retry,
            _ => None,
        });
        let now = Instant::now();
        let rests = self.resting.iter().map(|(at, _)| *at);
        let next =
            retries.chain(end).chain(rests).min().map(|at| at.saturating_duration_since(now));
        let timeout = next.map(|d| Timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(i64::MAX),
            // Rounded up, so as not to wake just before the time.
            tv_nsec: i64::from(d.subsec_nanos()),
        });
        let mut events = Vec::with_capacity(32);
        let buffer = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, buffer, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(os("epoll")(error.into())),
        }
        // Connections first: one that ended makes place for one that waits at the listener.
        let mut what: Vec<_> = events
            .iter()
            .filter_map(|e: &epoll::Event| {
                let token = e.data.u64();
                self.tokens.get(&token).map(|w| (token, w.clone()))
            })
            .collect();
        what.sort_by_key(|(_, w)| !matches!(w, What::Connection(_)));
        for (token, what) in what {
            self.handle(token, what);
        }
        self.retry_due();
        self.end_rests();
        self.announce();
        self.stop |= end.is_some_and(|end| Instant::now() >= end);
        Ok(())
    }

    fn listener(&self, what: &What) -> Option<&Listener> {
        match what {
            What::ControlListener => self.control.as_ref(),
            What::Listener(name) => match &self.ports.get(name)?.attach {
                Attach::VhostUser(vhost) => vhost.listener.as_ref(),
                _ => None,
            },
            _ => None,
        }
    }

    /// Looks at a listener again, or no more for now.
    fn listen(&self, what: &What, flags: epoll::EventFlags) {
        let token = self.tokens.iter().find(|(_, w)| *w == what).map(|(token, _)| *token);
        if let Some((listener, token)) = self.listener(what).zip(token) {
            let _ = epoll::modify(&self.epoll, listener, epoll::EventData::new_u64(token), flags);
        }
    }

    /// A listener that cannot accept (no descriptor is left) has a second's rest: who waits there
    /// would be tried in a loop.
    fn rest(&mut self, what: What) {
        self.listen(&what, epoll::EventFlags::empty());
        self.resting.push((Instant::now() + REST, what));
    }

    fn end_rests(&mut self) {
        let now = Instant::now();
        for (_, what) in self.resting.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
            self.listen(&what, epoll::EventFlags::IN);
        }
    }

    fn handle(&mut self, token: u64, what: What) {
        match what {
            What::Signal => self.stop = true,
            What::Reports => self.read_reports(),
            What::ControlListener => self.accept_client(),
            What::Client => self.serve_client(token),
            What::Http => self.serve_http(),
            What::Listener(name) => self.accept_guest(&name),
            What::Connection(name) => self.serve_guest(&name),
        }
    }

    // ---- guests ----

    fn vhost(&mut self, name: &str) -> Option<VhostRef<'_>> {
        let state = self.ports.get_mut(name)?;
        match &mut state.attach {
            Attach::VhostUser(vhost) => Some((&state.port, &state.ingress, vhost)),
            _ => None,
        }
    }

    fn accept_guest(&mut self, name: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let stream = match vhost.listener.as_ref().map(Listener::accept) {
            Some(Ok(Some(stream))) => stream,
            Some(Err(error)) => {
                vhost.log.warn(format_args!("{error}"));
                self.rest(What::Listener(name.into()));
                return;
            }
            _ => return,
        };
        if vhost.connection.is_some() {
            // Closed at once: the front-end sees it, and the guest that is here keeps its port.
            vhost.log.warn(format_args!("a second front-end connected; refused, one is here"));
            return;
        }
        self.attach(name, stream);
    }

    fn attach(&mut self, name: &str, stream: UnixStream) {
        let pool = Arc::clone(&self.pool);
        let Some((port, ingress, vhost)) = self.vhost(name) else { return };
        let pairs = vhost.pairs.clone();
        let guest = Arc::clone(&vhost.guest);
        let log = Arc::clone(&vhost.log);
        let tuning = ingress.iter().map(|q| Arc::clone(&q.tuning)).collect();
        let host = PortHost::new(Arc::clone(port), pairs.clone(), tuning, pool, guest, log);
        let options = NetOptions {
            pairs: vhost.conf.queues,
            mtu: vhost.conf.mtu,
            mac: vhost.conf.mac,
            without: vhost.conf.without,
        };
        let device = Box::new(NetDevice::new(options, pairs, host));
        let backend = Backend::new(
            device,
            backend::Options { protocol_features: backend::PROTOCOL_FEATURES },
        );
        let connection = Connection::new(stream, backend);
        if let Err(error) = self.watch(connection.as_fd(), What::Connection(name.into())) {
            tracing::error!("port {name}: {error}");
            return;
        }
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        vhost.log.info(format_args!("front-end connected"));
        vhost.since = Instant::now();
        vhost.retry = None;
        vhost.connections += 1;
        vhost.connection = Some(connection);
    }

    fn serve_guest(&mut self, name: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let Some(connection) = &mut vhost.connection else { return };
        let end = connection.on_readable().err();
        for refused in connection.take_refusals() {
            vhost.log.warn(format_args!("refused: {refused}"));
        }
        if let Some(end) = end {
            self.disconnect(name, &end.to_string());
        } else if let Some((port, _, _)) = self.vhost(name) {
            let id = port.id;
            self.follow(id);
        }
    }

    /// Cross-connected, a TAP has one receiver: it asks the kernel for what the guest at the
    /// other end takes.
    fn follow(&mut self, id: PortId) {
        if self.options.mode != Mode::Cross {
            return;
        }
        let wired = |p: &PortState| p.port.id.0 | 1 == id.0 | 1;
        let features = self.ports.values().filter(|p| wired(p)).find_map(|p| match &p.attach {
            Attach::VhostUser(vhost) => {
                let guest = vhost.guest.lock().unwrap_or_else(PoisonError::into_inner);
                Some(guest.features).filter(|features| *features != 0)
            }
            _ => None,
        });
        let Some(features) = features else { return };
        for state in self.ports.values_mut().filter(|p| wired(p)) {
            if let Attach::Tap(tap) = &mut state.attach
                && let Err(error) = tap.follow(&takes(features))
            {
                tracing::warn!("port {}: cannot change offloads: {error}", state.spec.name);
            }
        }
    }

    /// Ends a guest's connection, if there is one; in client mode another is tried.
    fn disconnect(&mut self, name: &str, why: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let Some(connection) = vhost.connection.take() else { return };
        // A connection that did not last is no reason to hurry: a guest whose rings are broken
        // would be tried in a loop.
        if vhost.since.elapsed() > LASTING {
            vhost.backoff.reset();
        }
        if vhost.conf.role == Role::Client {
            vhost.retry = Some(Instant::now() + vhost.backoff.next(jitter()));
        }
        if let Ok(mut guest) = vhost.guest.lock() {
            *guest = Guest::default();
        }
        vhost.log.info(format_args!("front-end left: {why}"));
        self.unwatch(connection.as_fd(), &What::Connection(name.into()));
        // Stops its rings.
        drop(connection.close());
        if let Some((port, _, _)) = self.vhost(name) {
            port.set_active(0);
            let id = port.id;
            self.fdb.flush_learned(id);
        }
    }

    fn connect(&mut self, name: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        match sys::connect(&vhost.conf.socket) {
            Ok(stream) => self.attach(name, stream),
            Err(error) => {
                let delay = vhost.backoff.next(jitter());
                vhost.retry = Some(Instant::now() + delay);
                tracing::debug!("port {name}: {error}");
            }
        }
    }

    fn retry_due(&mut self) {
        let now = Instant::now();
        let due = |p: &PortState| match &p.attach {
            Attach::VhostUser(v) => v.retry.is_some_and(|at| at <= now),
            _ => false,
        };
        let names: Vec<_> =
            self.ports.iter().filter(|(_, p)| due(p)).map(|(n, _)| n.clone()).collect();
        for name in names {
            self.connect(&name);
        }
    }

    /// Announces guests that moved here and cannot do it themselves (SEND_RARP).
    fn announce(&mut self) {
        let mut due = Vec::new();
        for state in self.ports.values() {
            let Attach::VhostUser(vhost) = &state.attach else { continue };
            let mut guest = vhost.guest.lock().unwrap_or_else(PoisonError::into_inner);
            due.extend(guest.announce.drain(..).map(|mac| (state.port.id, mac)));
        }
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        for (port, mac) in due {
            let tuning = Arc::new(Tuning::new(Policy::Event));
            let source = Source { port, queue: 0, stats: Arc::default(), tuning };
            self.forwarder.forward(&source, &mut burst_of(&rarp(mac)), now);
        }
    }

    // ---- workers ----

    fn read_reports(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.pool.common.reports_wake, &mut count);
        while let Ok(report) = self.reports.try_recv() {
            let (Report::Fault(id, _) | Report::Deaf(id, _)) = &report;
            let Some(state) = self.ports.values_mut().find(|p| p.port.id == *id) else { continue };
            let fault = match report {
                Report::Fault(_, fault) => fault,
                Report::Deaf(_, error) => {
                    match &state.attach {
                        Attach::VhostUser(vhost) => {
                            vhost.log.warn(format_args!("cannot wait for kicks: {error}"));
                        }
                        _ => tracing::warn!("port {}: cannot wait: {error}", state.spec.name),
                    }
                    continue;
                }
            };
            state.faults += 1;
            let name = state.spec.name.clone();
            // Once for each connection: reports that were on their way find it closed.
            if let Attach::VhostUser(vhost) = &state.attach
                && vhost.connection.is_some()
            {
                vhost.log.warn(format_args!("stopped, its guest broke the protocol: {fault}"));
                self.disconnect(&name, "guest fault");
            }
        }
    }

    fn shutdown(mut self) {
        tracing::info!("stopping");
        let names: Vec<_> = self.ports.keys().cloned().collect();
        for name in names {
            // Rings are given back and sockets removed; the guests keep their interfaces.
            let _ = self.del_port(&name);
        }
        self.pool.stop();
    }
}

/// Spreads reconnects of many ports apart.
fn jitter() -> u32 {
    Instant::now().elapsed().subsec_nanos() ^ std::process::id()
}

/// A port that takes and drops everything.
fn add_null(spec: &PortSpec, id: PortId) -> PortState {
    let stats = Arc::new(EgressStats::default());
    let queue = Arc::new(Mutex::new(uplink::NullEgress::new(Arc::clone(&stats))));
    let port = Port::new(id, spec.name.clone(), vec![EgressQueue::new(queue, stats)]);
    port.set_active(1);
    PortState {
        spec: spec.clone(),
        port: Arc::new(port),
        ingress: Vec::new(),
        attach: Attach::Null,
        faults: 0,
    }
}
