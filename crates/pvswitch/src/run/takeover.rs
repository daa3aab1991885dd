//! `run --takeover`: the process that takes over a switch.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::Config;
use os::{HandoverError, Listener, receive_state, send_state};
use switch::fdb::PortId;
use switch::forward::HeldCopy;
use switch::poll::Costs;
use switch::port::QueueId;
use switch::stats::IngressStats;
use switch::time::Ns;
use switch::vnet::VnetHdr;
use uplink::{XdpHanded, XdpShape};
use vhost_user::backend::{Backend, Descriptors, ImportError};
use vhost_user::connection::{Connection, ConnectionState};

use super::accounts::Errors;
use super::handover::{
    Address, Frame, GO, Handed, ListenerState, Offer, PortHanded, PortOffer, Reply, VERSION,
    decode, encode, part,
};
use super::keep::StoreState;
use super::manager::BARRIER_MAX;
use super::reload::Leaving;
use super::upgrade::ACCEPT_MAX;
use super::vhost::backend_of;
use super::vifs::{XenInherited, XenOffer};
use super::{Attach, Event, RunError, System, passt};
use crate::config::Origin;
use crate::demo::format::plural;
use crate::http;
use crate::spec::PortSpec;
use crate::worker::Served;

/// Longest time for the old process to send the offer.
const OFFER_MAX: Duration = Duration::from_secs(10);
/// Longest time for it to stop its workers.
const HANDED_MAX: Duration = Duration::from_secs(10);
/// Variable of the process that takes over: its parent, which leaves it to the service manager.
pub(super) const LEFT_BY: &str = "PVSWITCH_LEFT_BY";
/// Longest time for it to send the last message, and to read a reply: longer than it takes itself.
/// Older versions wait at this point for the service manager to read, and to handle it.
const GO_MAX: Duration = ACCEPT_MAX.saturating_add(BARRIER_MAX.saturating_mul(2));

/// A switch that another process offers to this one, or left behind.
pub struct Takeover {
    pub(super) source: Source,
    pub(super) offer: Offer,
    pub(super) fds: Descriptors,
}

/// Who hands the switch to this process.
pub(super) enum Source {
    /// A process that waits for replies on a socket.
    Process(OwnedFd),
    /// A store, after a kill.
    Store(Box<Left>),
}

/// State that a killed process left besides the offer.
#[derive(Default)]
pub(super) struct Left {
    /// Counters and addresses as they were at most a second before.
    pub(super) handed: Handed,
    /// Ids of ports whose connections cannot continue, and why.
    pub(super) lost: BTreeMap<u16, &'static str>,
    /// Ids of ports that it was serving when it panicked, and for how long they are held down.
    pub(super) panicked: BTreeMap<u16, Duration>,
    /// Time at which its end was noticed, on the machine's monotonic clock, in ns.
    pub(super) ended_ns: u64,
}

/// Descriptors of an offer, by what they are for. Unless it takes over, this process leaves names
/// of sockets alone.
#[derive(Default)]
pub(super) struct Inherited {
    pub(super) control: Option<Listener>,
    pub(super) http: Option<http::Inherited>,
    /// Listeners by name of the port.
    pub(super) listeners: BTreeMap<String, Listener>,
    /// Queues of TAPs, and whether the switch created them, by name of the port.
    pub(super) taps: BTreeMap<String, (Vec<OwnedFd>, bool)>,
    /// AF_XDP sockets by name of the port.
    pub(super) xdp: BTreeMap<String, (XdpHanded<OwnedFd>, XdpShape)>,
    /// Vifs by name of the port.
    pub(super) xen: BTreeMap<String, XenInherited>,
    /// Whether each port sends and receives nothing, by its name.
    pub(super) blocked: BTreeMap<String, bool>,
    /// The store of a switch that is kept, and the keeper's socket.
    pub(super) keep: Option<(StoreState, Option<OwnedFd>)>,
    /// Key of the flow hash.
    pub(super) flow_key: Option<u64>,
    /// Descriptors by name that the parent of this process, or of the first before it, passed.
    pub(super) activated: Vec<(String, OwnedFd)>,
}

/// Record of a takeover: from which process, and how long nothing was forwarded.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenOver {
    /// The previous process.
    pub(super) from: u32,
    /// Time without forwarding; after a kill, from when it was noticed.
    pub(super) outage: Duration,
    /// Whether it was killed.
    pub(super) killed: bool,
}

fn error(what: &dyn std::fmt::Display) -> RunError {
    RunError::Request(format!("cannot take over: {what}"))
}

impl Takeover {
    /// Receives the offer on standard input.
    ///
    /// # Errors
    /// Standard input is not the socket of `ctl upgrade`, or the offer is refused; the other
    /// process is informed.
    pub fn receive() -> Result<Self, RunError> {
        let socket = std::io::stdin().as_fd().try_clone_to_owned();
        let socket = socket.map_err(|e| error(&e))?;
        if let Err(e) = leave_to_manager(&socket) {
            let e = error(&e);
            reply(&socket, &Reply::Failed(e.to_string()));
            return Err(e);
        }
        // Children and readers of standard input get an end of file.
        let null = std::fs::File::open("/dev/null").map_err(|e| error(&e))?;
        rustix::stdio::dup2_stdin(&null).map_err(|e| error(&e))?;
        let received = receive_state(socket.as_fd(), VERSION, Instant::now() + OFFER_MAX);
        let received = received.and_then(|(bytes, fds)| Ok((decode::<Offer>(&bytes)?.0, fds)));
        match received {
            Ok((offer, fds)) => {
                let (source, fds) = (Source::Process(socket), Descriptors::new(fds));
                Ok(Self { source, offer, fds })
            }
            Err(HandoverError::Os(e)) if e.raw_os_error() == Some(NOT_A_SOCKET) => {
                Err(error(&"--takeover is for `pvswitch ctl upgrade`, which starts this program"))
            }
            Err(e) => {
                let e = error(&e);
                reply(&socket, &Reply::Failed(e.to_string()));
                Err(e)
            }
        }
    }

    /// The switch's configuration, its origin, its include directory, and its remaining time.
    ///
    /// # Errors
    /// It has values that this program does not know.
    #[allow(clippy::type_complexity, reason = "named by its caller at once")]
    pub fn configuration(
        &self,
    ) -> Result<(Config, Origin, Option<PathBuf>, Option<Duration>), RunError> {
        let Offer { config, file, command_line, include, duration_left_ms, .. } = &self.offer;
        let parsed = config.parse().and_then(|c| Ok((c, command_line.parse()?)));
        let (config, command_line) = parsed.map_err(|e| error(&e))?;
        let origin = Origin { file: file.clone(), command_line };
        let since = (os::monotonic().as_nanos() as u64).saturating_sub(self.offer.made_ns);
        let left = duration_left_ms.map(Duration::from_millis);
        let left = left.map(|left| left.saturating_sub(Duration::from_nanos(since)));
        Ok((config, origin, include.clone(), left))
    }

    /// Whether the previous process was killed.
    pub fn is_after_kill(&self) -> bool {
        matches!(self.source, Source::Store(_))
    }

    /// Informs the other process that this one ends.
    pub fn fail(&self, why: &dyn std::fmt::Display) {
        if let Source::Process(socket) = &self.source {
            reply(socket, &Reply::Failed(why.to_string()));
        }
    }

    /// Takes what the previous process handed over, and adopts the costs that it measured.
    pub(super) fn take_inherited(&mut self) -> Result<Inherited, RunError> {
        // To measure sleeps again takes longer than all the rest.
        let [wake, wake_late, nap, nap_late] = self.offer.costs_ns.map(Ns::new);
        crate::cost::adopt(Costs { wake, wake_late, nap, nap_late, ..Costs::TYPICAL });
        self.import_inherited().map_err(|e| error(&e))
    }

    fn import_inherited(&mut self) -> Result<Inherited, ImportError> {
        let Self { offer, fds, .. } = self;
        let mut all = Inherited { flow_key: offer.flow_key, ..Inherited::default() };
        if let Some(keep) = offer.keep.take() {
            let keeper = keep.keeper.map(|at| fds.take(at)).transpose()?;
            all.keep = Some((keep, keeper));
        }
        if let Some(state) = &offer.control {
            all.control = Some(listener(state, fds)?);
        }
        if let Some(state) = &offer.http_unix {
            all.http = Some(http::Inherited::Unix(listener(state, fds)?));
        }
        if let Some(at) = offer.http_tcp {
            all.http = Some(http::Inherited::Tcp(fds.take(at)?));
        }
        for (name, at) in &offer.activated {
            all.activated.push((name.clone(), fds.take(*at)?));
        }
        for port in &offer.ports {
            if let Some(state) = &port.listener {
                all.listeners.insert(port.name.clone(), listener(state, fds)?);
            }
            if let Some((queues, created)) = &port.tap {
                let queues = queues.iter().map(|at| fds.take(*at)).collect::<Result<_, _>>()?;
                all.taps.insert(port.name.clone(), (queues, *created));
            }
            if let Some(offer) = &port.xdp {
                all.xdp.insert(port.name.clone(), offer.take(fds)?);
            }
            if let Some(offer) = &port.xen {
                all.xen.insert(port.name.clone(), offer.take(fds)?);
            }
            all.blocked.insert(port.name.clone(), port.blocked);
        }
        Ok(all)
    }
}

/// Under a service manager: starts the program once more, and ends. systemd waits only for the end
/// of its own children: it would kill another main process right after SIGTERM. A process whose
/// parent has ended is systemd's child. Returns in the second process, once the first has ended.
fn leave_to_manager(socket: &OwnedFd) -> std::io::Result<()> {
    let Some(parent) = std::env::var_os(LEFT_BY) else {
        if std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(());
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--takeover"]).env(LEFT_BY, std::process::id().to_string());
        let child = command.spawn()?;
        reply(socket, &Reply::Started(child.id()));
        std::process::exit(0);
    };
    let parent = parent.to_str().and_then(|pid| pid.parse().ok());
    let is_here = |pid: &u32| std::os::unix::process::parent_id() == *pid;
    if let Some(parent) = parent.filter(is_here)
        && let Ok(process) = crate::keeper::open_process(parent)
        && is_here(&parent)
    {
        os::wait_readable(process.as_fd(), OFFER_MAX)?;
    }
    Ok(())
}

fn listener(state: &ListenerState, fds: &mut Descriptors) -> Result<Listener, ImportError> {
    Ok(Listener::adopt(fds.take(state.fd)?, &state.path, state.made))
}

/// Receives what the other process hands over, and waits until this one may continue.
fn wait_for_handed(socket: &OwnedFd) -> Result<Vec<u8>, RunError> {
    reply(socket, &Reply::Ready);
    let receive = |limit| {
        let end = Instant::now() + limit;
        receive_state(socket.as_fd(), VERSION, end).map_err(|e| error(&e))
    };
    let (bytes, _) = receive(HANDED_MAX)?;
    reply(socket, &Reply::Ready);
    if receive(GO_MAX)?.0 != GO {
        return Err(error(&HandoverError::Foreign));
    }
    Ok(bytes)
}

/// ENOTSOCK.
const NOT_A_SOCKET: i32 = rustix::io::Errno::NOTSOCK.raw_os_error();

fn reply(socket: &OwnedFd, reply: &Reply) {
    let end = Instant::now() + GO_MAX;
    // If the other process does not read it, it continues.
    let _ = send_state(socket.as_fd(), VERSION, &encode(reply, &[]), &[], end);
}

impl System {
    /// Takes over the switch of another process, from its offer to its end.
    ///
    /// # Errors
    /// The other process continues; this one must end. After a kill: a worker does not start.
    pub(super) fn take_over(&mut self, mut takeover: Takeover) -> Result<(), RunError> {
        let frozen = self.pool.freeze(HANDED_MAX);
        let frozen = frozen.ok_or_else(|| error(&"a worker does not start"));
        let served = self.prepare_takeover(&mut takeover);
        let (frozen, served) = match frozen.and_then(|frozen| Ok((frozen, served?))) {
            Ok(ready) => ready,
            Err(error) => {
                takeover.fail(&error);
                return Err(error);
            }
        };
        let message;
        let (handed, frames) = match &takeover.source {
            Source::Process(socket) => {
                message = wait_for_handed(socket).inspect_err(|error| takeover.fail(error))?;
                decode::<Handed>(&message).map_err(|e| error(&e))?
            }
            Source::Store(left) => (left.handed.clone(), &[][..]),
        };
        // The switch is ours now.
        let killed = takeover.is_after_kill();
        self.own_sockets();
        self.resume_local();
        served.into_iter().for_each(|served| self.pool.serve(served));
        let of_port: HashMap<_, _> = handed.ports.iter().map(|port| (&*port.name, port)).collect();
        for offer in &takeover.offer.ports {
            let none = PortHanded::default();
            let handed = of_port.get(&*offer.name).copied().unwrap_or(&none);
            self.resume_port(&offer.name, handed, frames, killed);
        }
        self.learn(&handed.addresses);
        self.inherit_evpn();
        let since = match &takeover.source {
            Source::Process(_) => handed.stopped_ns,
            Source::Store(left) => left.ended_ns,
        };
        let now = os::monotonic().as_nanos() as u64;
        let outage = Duration::from_nanos(now.saturating_sub(since));
        drop(frozen);
        self.settle_vifs();
        self.taken_over = Some(TakenOver { from: takeover.offer.pid, outage, killed });
        self.settle_ports(&takeover.offer);
        for offer in &takeover.offer.ports {
            if self.is_marking(&offer.name) {
                self.suspend_until(Event::Connection(offer.name.clone()), Instant::now());
            }
        }
        let (pid, us) = (takeover.offer.pid, outage.as_micros());
        if killed {
            self.add_missing(&takeover.offer);
            self.hold_down(&takeover.source);
            tracing::warn!("process {pid} was killed: took over its switch after {us} us");
        } else {
            let held = handed.ports.iter().flat_map(|port| &port.held).map(Vec::len);
            let held = plural(held.sum::<usize>() as u64, "frame");
            tracing::info!("took over from process {pid} in {us} us, with {held} held");
        }
        Ok(())
    }

    /// After a kill: adds ports of the configuration that were not kept.
    fn add_missing(&mut self, offer: &Offer) {
        for text in self.config.ports.clone() {
            let is_auto = self.xen_auto.as_ref().is_some_and(|auto| auto.name == text.name);
            if !is_auto
                && !offer.ports.iter().any(|port| port.name == text.name)
                && let Err(error) = self.start_port(&PortSpec::from(&text))
            {
                tracing::error!(port = text.name, "not restored: {error}");
            }
        }
    }

    /// Makes everything but what workers change. Returns queues to serve from the start. After a
    /// kill, what cannot be made is left out: the rest of the switch continues.
    fn prepare_takeover(&mut self, takeover: &mut Takeover) -> Result<Vec<Served>, RunError> {
        let Takeover { source, offer, fds } = takeover;
        let left = match source {
            Source::Process(_) => None,
            Source::Store(left) => Some(&**left),
        };
        let (mut all, mut served) = (Vec::new(), Vec::new());
        match self.adopt_auto() {
            Err(error) if left.is_some() => tracing::error!("xen:auto: {error}"),
            result => result?,
        }
        for port in &offer.ports {
            let spec = match (port.xen.as_ref().and_then(XenOffer::found), &port.wired) {
                (Some(vif), _) => self.spec_of_found(vif),
                (None, Some(vif)) => self.spec_of_tap(&port.name, vif),
                (None, None) => self.config.port(&port.name).map(PortSpec::from),
            };
            let spec = spec.ok_or_else(|| error(&format!("port '{}' is unknown", port.name)));
            let prepared = spec.and_then(|spec| {
                let id = PortId(port.id);
                match self.prepare_port(&spec, id, &Leaving::default()) {
                    Err(error) if let Some(missing) = error.missing_interface() => {
                        Ok(self.await_interface(&spec, id, missing))
                    }
                    prepared => prepared,
                }
            });
            match prepared {
                Ok(mut prepared) => {
                    prepared.state.faults = port.faults;
                    prepared.state.failovers = port.failovers;
                    prepared.state.interface_losses = port.interface_losses;
                    served.append(&mut prepared.served);
                    all.push(prepared);
                }
                Err(error) if left.is_some() => {
                    tracing::error!(port = port.name, "not restored: {error}");
                }
                Err(error) => return Err(error),
            }
        }
        self.install_and(all, false);
        offer.ports.iter().for_each(|port| self.rewire(port));
        match self.add_statics() {
            Err(error) if left.is_some() => tracing::error!("static addresses: {error}"),
            result => result?,
        }
        self.learn(&offer.addresses);
        for port in &offer.ports {
            if let Some(state) = &port.connection {
                let lost = left.and_then(|left| left.lost.get(&port.id).copied());
                let imported = match lost {
                    Some(why) => Err(why.into()),
                    None => self.import_connection(&port.name, state, fds),
                };
                match imported {
                    Err(why) if left.is_some() => {
                        let what = "its front-end must reconnect";
                        tracing::warn!(port = port.name, "connection not restored: {why}; {what}");
                    }
                    result => result.map_err(|e| error(&format!("port '{}': {e}", port.name)))?,
                }
            }
            if let Some(socket) = port.stream {
                let imported = self.import_stream(&port.name, socket, fds);
                imported.map_err(|e| error(&format!("port '{}': {e}", port.name)))?;
            }
            match (&port.xen, left.and_then(|left| left.lost.get(&port.id))) {
                (Some(_), Some(why)) => {
                    tracing::warn!(port = port.name, "its vif is set up again: {why}");
                    if let Some(time) = left.and_then(|left| left.panicked.get(&port.id)) {
                        self.hold_vif(&port.name, Instant::now() + *time);
                    }
                }
                (Some(offer), None) => self.adopt_vif(&port.name, offer),
                (None, _) => {}
            }
            self.import_records(port, fds);
        }
        Ok(served)
    }

    fn import_connection(
        &mut self,
        name: &str,
        state: &ConnectionState,
        fds: &mut Descriptors,
    ) -> Result<(), String> {
        let pool = Arc::clone(&self.pool);
        let Some((port, ingress, vhost)) = self.vhost(name) else {
            return Err("it has no front-end".into());
        };
        let (device, options, permissions) = backend_of(port, ingress, vhost, pool);
        let imported = Backend::import(device, options, permissions, &state.backend, fds);
        let keeps = self.keep.is_some();
        let imported = imported.and_then(|backend| {
            let backend = if keeps { backend.with_ledgers() } else { backend };
            Connection::import(backend, state, fds)
        });
        let connection = imported.map_err(|e| e.to_string())?;
        let watched = self.watch(connection.as_fd(), Event::Connection(name.into()));
        watched.map_err(|e| e.to_string())?;
        if let Some((_, _, vhost)) = self.vhost(name) {
            vhost.end.resume();
            vhost.connection = Some(connection);
            vhost.is_up = true;
        }
        Ok(())
    }

    fn import_records(&mut self, offer: &PortOffer, fds: &mut Descriptors) {
        let state = self.ports.get_mut(&offer.name);
        let Some(attach) = state.map(|state| &mut state.attach) else { return };
        let is_connected = attach.is_connected();
        if let Some(errors) = attach.errors_mut() {
            *errors = Errors::import(&offer.errors, offer.last_error.clone());
        }
        if let Some(end) = attach.endpoint_mut() {
            if end.connects() && !is_connected {
                end.retry = Some(Instant::now());
            }
            let passt = offer.passt.and_then(|at| fds.take(at).ok());
            end.passt = passt.map(passt::Process::Inherited);
            end.connections = offer.connections;
        }
    }

    fn learn(&self, addresses: &[Address]) {
        let now = self.now_s();
        for (mac, vlan, port) in addresses {
            self.fdb.learn(*mac, *vlan, PortId(*port), now);
        }
    }

    /// Makes names of sockets this process's own.
    fn own_sockets(&mut self) {
        let http = self.http.as_mut().and_then(|http| http.socket.as_mut());
        self.control.iter_mut().chain(http).for_each(Listener::own);
        for state in self.ports.values_mut() {
            let end = state.attach.endpoint_mut();
            end.into_iter().flat_map(|end| &mut end.listener).for_each(Listener::own);
        }
    }

    /// Sets the counters of a port, starts its rings and restores its frames. Workers are frozen.
    fn resume_port(&mut self, name: &str, handed: &PortHanded, frames: &[u8], killed: bool) {
        let now_s = self.now_s();
        let Some(state) = self.ports.get_mut(name) else { return };
        // Counters that this version does not know are dropped.
        for (queue, counters) in state.ingress.iter().zip(&handed.ingress) {
            for (name, value) in counters {
                let _ = queue.stats.restore(name, *value);
            }
        }
        for (queue, counters) in state.port.egress.iter().zip(&handed.egress) {
            for (name, value) in counters {
                let _ = queue.stats.restore(name, *value);
            }
        }
        state.port.import_flows(part(handed.flows, frames).unwrap_or_default(), now_s);
        let mut failed = None;
        if matches!(state.attach, Attach::Xen(_)) {
            self.resume_vif(name, handed.vif.as_ref());
        } else if matches!(state.attach, Attach::Stream(_)) {
            self.resume_stream(name, &handed.stream, frames);
        } else if let Attach::VhostUser(vhost) = &mut state.attach
            && let Some(connection) = &mut vhost.connection
        {
            connection.own();
            let backend = connection.backend_mut();
            let resumed = match killed {
                true => backend.resume_killed(),
                false => backend.resume(&handed.positions),
            };
            failed = resumed.err();
        }
        let unsent = handed.unsent.iter().map(|queue| {
            let frames = queue.iter().filter_map(|frame| bytes_of(frame, frames));
            frames.map(|(hdr, bytes)| (hdr, bytes.to_vec())).collect()
        });
        let unsent: Vec<Vec<(VnetHdr, Vec<u8>)>> = unsent.collect();
        match self.ports.get(name).map(|state| &state.attach) {
            Some(Attach::Tap(tap)) => tap.restore_unsent(&unsent),
            Some(Attach::Xdp(xdp)) => xdp.resume(&handed.xdp),
            Some(Attach::Stream(stream)) => {
                let frames = unsent.into_iter().flatten().map(|(_, frame)| frame);
                stream.restore_unsent(&frames.collect::<Vec<_>>());
            }
            _ => {}
        }
        self.restore_held(name, handed, frames);
        if let Some(error) = failed {
            // Its front-end connects again. Frames held for it are counted.
            self.disconnect(name, &error.to_string());
        }
    }

    fn restore_held(&self, name: &str, handed: &PortHanded, frames: &[u8]) {
        let Some(state) = self.ports.get(name) else { return };
        for (queue, held) in (0_u16..).zip(&handed.held).filter(|(_, held)| !held.is_empty()) {
            let Some(egress) = state.port.egress.get(usize::from(queue)) else { continue };
            let copies = held.iter().filter_map(|frame| {
                let (hdr, bytes) = bytes_of(frame, frames)?;
                let from = frame.from.and_then(|(port, queue)| self.sender(port, queue));
                Some(HeldCopy { bytes: bytes.into(), hdr, from })
            });
            egress.restore_held(copies.collect(), self.pool.now());
            if let Some(worker) = self.pool.workers().first() {
                worker.deliver_held(QueueId { port: state.port.id, queue });
            }
        }
    }

    fn sender(&self, port: u16, queue: u16) -> Option<Arc<IngressStats>> {
        let state = self.ports.values().find(|state| state.port.id.0 == port)?;
        Some(Arc::clone(&state.ingress.get(usize::from(queue))?.stats))
    }

    /// What can wait until frames are forwarded again.
    fn settle_ports(&mut self, offer: &Offer) {
        for port in &offer.ports {
            self.follow(PortId(port.id));
            if port.drain {
                let _ = self.drain(&port.name, false);
            }
        }
    }
}

/// A frame's header and bytes; `None`: it is not one.
fn bytes_of<'a>(frame: &Frame, bytes: &'a [u8]) -> Option<(VnetHdr, &'a [u8])> {
    Some((VnetHdr::parse(&frame.hdr), part((frame.at, frame.len), bytes)?))
}
