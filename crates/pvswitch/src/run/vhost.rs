//! vhost-user ports: sockets, connections and guests.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use os::Backoff;
use os::{Carries, Listener};
use switch::account::Charge;
use switch::fdb::PortId;
use switch::forward::{Mode, Port};
use switch::schedule::token;
use vhost_user::backend::{self, Backend};
use vhost_user::connection::{Connection, Turn};
use vhost_user::device::Device;
use vhost_user::foreign;
use vhost_user::net::{NetDevice, NetOptions, Pair, takes};

use super::accounts::Errors;
use super::reload::{Leaving, Prepared};
use super::{Attach, Event, Ingress, PortState, RunError, System};
use crate::limit::PortLog;
use crate::pool::Pool;
use crate::ports::{Guest, PortHost};
use crate::spec::{PortSpec, Role, VhostUser};

/// A connection that lasted this long resets the back-off.
const LASTING: Duration = Duration::from_secs(2);

/// A vhost-user port, its ingress queues and its state.
type VhostRef<'a> = (&'a Arc<Port>, &'a [Ingress], &'a mut VhostPort);

pub(super) struct VhostPort {
    pub(super) conf: VhostUser,
    pub(super) pairs: Vec<Pair>,
    pub(super) guest: Arc<Mutex<Guest>>,
    pub(super) log: Arc<PortLog>,
    pub(super) listener: Option<Listener>,
    pub(super) connection: Option<Connection>,
    /// Whether its rings ran after the last message.
    pub(super) is_up: bool,
    pub(super) backoff: Backoff,
    /// Time of the connection.
    pub(super) since: Instant,
    /// Client mode: when to connect again.
    pub(super) retry: Option<Instant>,
    pub(super) connections: u64,
    pub(super) errors: Errors,
}

impl System {
    pub(super) fn add_vhost_user(
        &mut self,
        spec: &PortSpec,
        conf: &VhostUser,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let pairs: Vec<Pair> = (0..conf.queues).map(|_| Pair::new()).collect();
        let egress = pairs.iter().map(Pair::egress_queue).collect();
        let port = Arc::new(self.make_port(id, &spec.name, egress));
        let listener = match conf.role {
            // It gets the listener of a port that is being removed.
            Role::Server if leaving.sockets.contains_key(&conf.socket) => None,
            Role::Server if self.inherited.listeners.contains_key(&spec.name) => {
                let listener = self.inherited.listeners.remove(&spec.name);
                if let Some(listener) = &listener {
                    self.watch(listener.as_fd(), Event::Prepared(spec.name.clone()))?;
                }
                listener
            }
            Role::Server => {
                if let Some(by) = self.listens_at(&conf.socket) {
                    let (name, socket) = (spec.name.clone(), conf.socket.clone());
                    return Err(RunError::OwnSocket { name, socket, by });
                }
                let permissions = super::permissions(&spec.name, &conf.access)?;
                let what = format!("port '{}'", spec.name);
                let listener = self.listen(&what, &conf.socket, &permissions)?;
                self.watch(listener.as_fd(), Event::Prepared(spec.name.clone()))?;
                Some(listener)
            }
            Role::Client => None,
        };
        let ingress = pairs.iter().enumerate();
        let ingress = ingress.map(|(i, p)| self.ingress(spec, i, &p.ingress_stats)).collect();
        let vhost = VhostPort {
            conf: conf.clone(),
            pairs,
            guest: Arc::default(),
            log: Arc::new(PortLog::new(&spec.name, Arc::clone(&port.account), self.clock())),
            listener,
            connection: None,
            is_up: false,
            backoff: Backoff::default(),
            since: Instant::now(),
            retry: None,
            connections: 0,
            errors: Errors::default(),
        };
        let attach = Attach::VhostUser(Box::new(vhost));
        Ok(Prepared::new(PortState::new(spec, port, ingress, attach)))
    }

    pub(super) fn vhost(&mut self, name: &str) -> Option<VhostRef<'_>> {
        let state = self.ports.get_mut(name)?;
        match &mut state.attach {
            Attach::VhostUser(vhost) => Some((&state.port, &state.ingress, vhost)),
            _ => None,
        }
    }

    pub(super) fn accept_guest(&mut self, name: &str) {
        let now = self.pool.now();
        let Some((port, _, vhost)) = self.vhost(name) else { return };
        let account = Arc::clone(&port.account);
        // Charged before it is accepted, so that the connections of one port leave time for
        // others'.
        if !account.connections.spend(now) {
            let at = self.instant(account.connections.next(now));
            return self.suspend_until(Event::Listener(name.into()), at);
        }
        let charge = match account.descriptors.charge(1) {
            Ok(charge) if foreign::unpaid() == 0 => charge,
            Ok(_) => return self.suspend(Event::Listener(name.into())),
            Err(over) => {
                vhost.log.warn(format_args!("cannot accept a front-end: {over}"));
                return self.suspend(Event::Listener(name.into()));
            }
        };
        let stream = match vhost.listener.as_ref().map(Listener::accept) {
            Some(Ok(Some(socket))) => UnixStream::from(socket),
            Some(Err(error)) => {
                vhost.log.warn(format_args!("{error}"));
                self.suspend(Event::Listener(name.into()));
                return;
            }
            _ => return,
        };
        if vhost.connection.is_some() {
            // Closed at once, so that the front-end notices; the connected guest keeps its port.
            vhost.log.warn(format_args!("rejected a second front-end: one is connected already"));
            os::shutdown(stream.as_fd());
            foreign::close((stream, charge), &account);
            return;
        }
        self.attach(name, stream, Some(charge));
    }

    fn attach(&mut self, name: &str, stream: UnixStream, charge: Option<Charge>) {
        let pool = Arc::clone(&self.pool);
        let Some((port, ingress, vhost)) = self.vhost(name) else { return };
        let (device, options, permissions) = backend_of(port, ingress, vhost, pool);
        let mut backend = Backend::new(device, options);
        if self.keep.is_some() {
            backend = backend.with_ledgers();
        }
        let connection = Connection::charged(stream, charge, backend.with_permissions(permissions));
        if let Err(error) = self.watch(connection.as_fd(), Event::Connection(name.into())) {
            tracing::error!(port = name, "{error}");
            return;
        }
        self.touch(name);
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        vhost.log.info(format_args!("front-end connected"));
        vhost.since = Instant::now();
        vhost.retry = None;
        vhost.connections += 1;
        vhost.connection = Some(connection);
    }

    pub(super) fn serve_guest(&mut self, name: &str) {
        let now = self.pool.now();
        self.begin_message(name);
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let Some(connection) = &mut vhost.connection else { return };
        let turn = connection.on_readable_at(now);
        for refused in connection.take_refusals() {
            vhost.log.warn(format_args!("refused: {refused}"));
            vhost.errors.count(refused.cause(), refused.to_string());
        }
        match turn {
            Err(end) => {
                if let Some(cause) = end.cause() {
                    vhost.errors.count(cause, end.to_string());
                }
                return self.disconnect(name, &end.to_string());
            }
            Ok(Turn::Rest(until)) => {
                let at = self.instant(until);
                self.suspend_until(Event::Connection(name.into()), at);
            }
            Ok(Turn::Ready) => {}
        }
        self.follow_rings(name);
        if let Some((port, _, _)) = self.vhost(name) {
            let id = port.id;
            self.follow(id);
        }
    }

    /// After messages of a front-end: a guest whose rings have stopped may run elsewhere by now,
    /// and one whose rings have started here may have come from there (docs/design/0032).
    fn follow_rings(&mut self, name: &str) {
        let now = self.pool.now();
        let Some(state) = self.ports.get_mut(name) else { return };
        let Attach::VhostUser(vhost) = &mut state.attach else { return };
        let (port, is_up) = (&state.port, state.port.active() > 0);
        let was_up = std::mem::replace(&mut vhost.is_up, is_up);
        if !is_up {
            // Also when it was down before: frames that workers still had may be learned later.
            if self.fdb.learned_from(port.id) > 0 {
                self.fdb.flush_learned(port.id);
            }
            return;
        }
        let macs = state.spec.tuning.tenant.macs();
        if !was_up && !macs.is_empty() && port.account.announcements.spend(now) {
            state.ingress[0].tuning.announce_all(macs);
            self.pool.poll(token(port.id, 0, false));
        }
    }

    /// In cross mode a TAP has a single receiver: requests from the kernel the offloads that this
    /// guest accepts.
    pub(super) fn follow(&mut self, id: PortId) {
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
                tracing::warn!(port = state.spec.name, "cannot change offloads: {error}");
            }
        }
    }

    /// Ends a guest's connection, if there is one; in client mode a retry is scheduled.
    pub(super) fn disconnect(&mut self, name: &str, why: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let Some(connection) = vhost.connection.take() else { return };
        vhost.is_up = false;
        self.touch(name);
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        // After a short connection the back-off stays: a guest with broken rings would otherwise be
        // connected in a loop.
        if vhost.since.elapsed() > LASTING {
            vhost.backoff.reset();
        }
        if vhost.conf.role == Role::Client {
            vhost.retry = Some(Instant::now() + vhost.backoff.next(jitter()));
        }
        if let Ok(mut guest) = vhost.guest.lock() {
            *guest = Guest::default();
        }
        vhost.log.info(format_args!("front-end disconnected: {why}"));
        self.unwatch(connection.as_fd(), &Event::Connection(name.into()));
        // Stops its rings.
        drop(connection.close());
        if let Some((port, ingress, _)) = self.vhost(name) {
            // The next guest has another address.
            for queue in ingress {
                queue.tuning.announce_all(&[]);
            }
            port.set_active(0);
            port.end_epoch();
            let id = port.id;
            self.fdb.flush_learned(id);
        }
    }

    pub(super) fn connect(&mut self, name: &str) {
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        match os::connect(&vhost.conf.socket, Carries::Stream) {
            Ok(socket) => {
                let charge = vhost.log.account().descriptors.charge(1).ok();
                self.attach(name, socket.into(), charge);
            }
            Err(error) => {
                let delay = vhost.backoff.next(jitter());
                vhost.retry = Some(Instant::now() + delay);
                tracing::debug!("port {name}: {error}{}", vhost_user::advice(&error));
            }
        }
    }

    pub(super) fn retry_due(&mut self) {
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
}

/// A connection's device, and the settings of its back-end.
pub(super) fn backend_of(
    port: &Arc<Port>,
    ingress: &[Ingress],
    vhost: &VhostPort,
    pool: Arc<Pool>,
) -> (Box<dyn Device>, backend::Options, backend::Permissions) {
    let pairs = vhost.pairs.clone();
    let (guest, log) = (Arc::clone(&vhost.guest), Arc::clone(&vhost.log));
    let tuning = ingress.iter().map(|q| Arc::clone(&q.tuning)).collect();
    let host = PortHost::new(Arc::clone(port), pairs.clone(), tuning, pool, guest, log);
    let options = NetOptions {
        pairs: vhost.conf.queues,
        mtu: vhost.conf.mtu,
        mac: vhost.conf.mac,
        without: vhost.conf.without,
    };
    let device = Box::new(NetDevice::new(options, pairs, host));
    let account = Arc::clone(&port.account);
    let protocol_features = backend::PROTOCOL_FEATURES;
    (device, backend::Options { protocol_features, account }, vhost.conf.permissions)
}

/// Spreads the reconnects of many ports in time.
pub(super) fn jitter() -> u32 {
    Instant::now().elapsed().subsec_nanos() ^ std::process::id()
}
