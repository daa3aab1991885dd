//! A port's end of a socket, at which its peer connects or listens.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use os::{Backoff, Carries, Listener, Until};
use switch::account::{Account, Charge};
use switch::forward::Port;
use vhost_user::foreign;

use super::accounts::Errors;
use super::reload::Leaving;
use super::{Attach, Event, PortState, RunError, System, passt};
use crate::limit::PortLog;
use crate::spec::{Access, Kind, PortSpec, Role};

/// Interval at which a new connection is retried while the end of the previous one is unread.
const END_READ: Duration = Duration::from_millis(10);
/// A connection that lasted this long resets the back-off.
const LASTING: Duration = Duration::from_secs(2);

/// Where a port meets its peer.
#[derive(Clone, Debug)]
pub(super) struct Address {
    /// What has the port's own name; `None`: it has none.
    pub(super) own: Option<PathBuf>,
    pub(super) peer: Peer,
    pub(super) access: Access,
    pub(super) carries: Carries,
}

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// The peer.
    Connects,
    /// The switch, to what has this name.
    At(PathBuf),
    /// The switch starts it.
    Passt {
        /// MTU that it assigns to guests.
        mtu: u16,
    },
}

impl Address {
    /// That of a kind of port, if it has one.
    pub(super) fn of(kind: &Kind) -> Option<Self> {
        let (socket, role, access) = match kind {
            Kind::VhostUser(conf) => (&conf.socket, conf.role, &conf.access),
            Kind::Stream(conf) => (&conf.socket, conf.role, &conf.access),
            Kind::Dgram(conf) => {
                return Some(Self {
                    own: Some(conf.socket.clone()),
                    peer: Peer::At(conf.peer.clone()),
                    access: conf.access.clone(),
                    carries: Carries::Datagrams,
                });
            }
            Kind::Passt(conf) => {
                return Some(Self {
                    own: None,
                    peer: Peer::Passt { mtu: conf.mtu },
                    access: Access::default(),
                    carries: Carries::Stream,
                });
            }
            Kind::Tap(_) | Kind::AfPacket(_) | Kind::AfXdp(_) | Kind::Xen(_) | Kind::Null => {
                return None;
            }
        };
        let (own, peer) = match role {
            Role::Server => (Some(socket.clone()), Peer::Connects),
            Role::Client => (None, Peer::At(socket.clone())),
        };
        Some(Self { own, peer, access: access.clone(), carries: Carries::Stream })
    }
}

pub(super) struct Endpoint {
    pub(super) address: Address,
    pub(super) log: Arc<PortLog>,
    pub(super) listener: Option<Listener>,
    pub(super) backoff: Backoff,
    /// Time of the connection.
    pub(super) since: Instant,
    /// When this side connects again.
    pub(super) retry: Option<Instant>,
    /// The process that was started for it.
    pub(super) passt: Option<passt::Process>,
    pub(super) connections: u64,
    pub(super) errors: Errors,
}

impl Endpoint {
    /// Whether this side connects.
    pub(super) fn connects(&self) -> bool {
        self.address.peer != Peer::Connects
    }

    /// Records that a peer is connected.
    pub(super) fn begin(&mut self) {
        self.resume();
        self.connections += 1;
    }

    /// Records that the peer of another process's port is connected.
    pub(super) fn resume(&mut self) {
        self.since = Instant::now();
        self.retry = None;
    }

    /// Records that it is not any more; in client mode a retry is scheduled.
    pub(super) fn end(&mut self) {
        // After a short connection the back-off stays: a peer that breaks its protocol would
        // otherwise be connected in a loop.
        if self.since.elapsed() > LASTING {
            self.backoff.reset();
        }
        if self.connects() {
            self.retry_later();
        }
    }

    pub(super) fn retry_later(&mut self) {
        self.retry = Some(Instant::now() + self.backoff.next(jitter()));
    }
}

impl Attach {
    /// Its socket, if it has one.
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        match self {
            Self::VhostUser(vhost) => Some(&vhost.end),
            Self::Stream(stream) => Some(&stream.end),
            _ => None,
        }
    }

    pub(super) fn endpoint_mut(&mut self) -> Option<&mut Endpoint> {
        match self {
            Self::VhostUser(vhost) => Some(&mut vhost.end),
            Self::Stream(stream) => Some(&mut stream.end),
            _ => None,
        }
    }

    /// Errors of its peer, of a kind of which they are counted.
    pub(super) fn errors(&self) -> Option<&Errors> {
        match self {
            Self::Xen(port) => Some(&port.errors),
            _ => Some(&self.endpoint()?.errors),
        }
    }

    pub(super) fn errors_mut(&mut self) -> Option<&mut Errors> {
        match self {
            Self::Xen(port) => Some(&mut port.errors),
            _ => Some(&mut self.endpoint_mut()?.errors),
        }
    }

    /// Its listening socket, if it has one.
    pub(super) fn listener(&self) -> Option<&Listener> {
        self.endpoint()?.listener.as_ref()
    }

    fn connection(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::VhostUser(vhost) => vhost.connection.as_ref().map(AsFd::as_fd),
            Self::Stream(stream) => stream.connection.as_ref().map(AsFd::as_fd),
            _ => None,
        }
    }

    /// Whether a peer is connected to its socket.
    pub(super) fn is_connected(&self) -> bool {
        self.connection().is_some()
    }

    /// Whether its peer has closed the connection, and the end of that is not read yet.
    fn is_hung_up(&self) -> bool {
        let is_closed = |fd| os::wait(fd, Until::HungUp, Instant::now()).unwrap_or(false);
        self.connection().is_some_and(is_closed)
    }
}

impl System {
    /// Has the descriptor of one event cause another.
    fn rename_event(&mut self, old: &Event, new: &Event) {
        let suspended = self.suspended.iter_mut().map(|(_, what)| what);
        for what in self.tokens.values_mut().chain(suspended).filter(|what| *what == old) {
            *what = new.clone();
        }
    }

    /// Makes the socket of a new port. It does not listen if it connects, or gets the listener of a
    /// port that is being removed.
    pub(super) fn make_endpoint(
        &mut self,
        spec: &PortSpec,
        account: &Arc<Account>,
        leaving: &Leaving,
    ) -> Result<Endpoint, RunError> {
        let address = Address::of(&spec.kind).expect("this kind has a socket");
        let inherited = self.inherited.listeners.remove(&spec.name);
        let listener = match &address.own {
            Some(own) if leaving.next(own, address.carries).is_none() => match inherited {
                Some(listener) => Some(listener),
                None => Some(self.listen_at(spec, own, &address)?),
            },
            _ => None,
        };
        if let Some(listener) = &listener
            && address.carries == Carries::Stream
        {
            self.watch(listener.as_fd(), Event::Prepared(spec.name.clone()))?;
        }
        if let Peer::Passt { .. } = address.peer {
            passt::find()?;
        }
        Ok(Endpoint {
            address,
            log: Arc::new(PortLog::new(&spec.name, Arc::clone(account), self.clock())),
            listener,
            backoff: Backoff::default(),
            since: Instant::now(),
            retry: None,
            passt: None,
            connections: 0,
            errors: Errors::default(),
        })
    }

    fn listen_at(
        &self,
        spec: &PortSpec,
        own: &Path,
        address: &Address,
    ) -> Result<Listener, RunError> {
        if let Some(by) = self.listens_at(own) {
            let (name, socket) = (spec.name.clone(), own.to_path_buf());
            return Err(RunError::OwnSocket { name, socket, by });
        }
        let permissions = super::permissions(&spec.name, &address.access)?;
        if address.carries == Carries::Datagrams {
            return Ok(Listener::bind(own, address.carries, &permissions)?);
        }
        self.listen(&format!("port '{}'", spec.name), own, &permissions)
    }

    pub(super) fn endpoint(&mut self, name: &str) -> Option<(&Arc<Port>, &mut Endpoint)> {
        let PortState { port, attach, .. } = self.ports.get_mut(name)?;
        Some((port, attach.endpoint_mut()?))
    }

    /// Closes the socket of a port that was removed; returns its listener if a port that is being
    /// added uses it.
    pub(super) fn close_endpoint(
        &mut self,
        name: &str,
        end: Endpoint,
        leaving: &Leaving,
    ) -> Option<Listener> {
        let listener = end.listener?;
        if let Some(next) = leaving.next(listener.path(), end.address.carries) {
            let next = Event::Prepared(next.clone());
            self.rename_event(&Event::Listener(name.into()), &next);
            return Some(listener);
        }
        self.unwatch(listener.as_fd(), &Event::Listener(name.into()));
        // Connections queued at the listener close with it, with the data queued in them. An
        // inherited one is the parent process's, which may pass it again.
        if !listener.is_inherited()
            && let Ok(last) = listener.as_fd().try_clone_to_owned()
        {
            os::shutdown(last.as_fd());
            foreign::close(last, end.log.account());
        }
        None
    }

    /// Accepts the peer of a port.
    pub(super) fn accept_peer(&mut self, name: &str) {
        // A guest that restarted: messages of its old connection may still wait for their rate.
        if self.ports.get(name).is_some_and(|state| state.attach.is_hung_up()) {
            return self.suspend_until(Event::Listener(name.into()), Instant::now() + END_READ);
        }
        let now = self.pool.now();
        let Some((port, end)) = self.endpoint(name) else { return };
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
                end.log.warn(format_args!("cannot accept a connection: {over}"));
                return self.suspend(Event::Listener(name.into()));
            }
        };
        let stream = match end.listener.as_ref().map(Listener::accept) {
            Some(Ok(Some(socket))) => UnixStream::from(socket),
            Some(Err(error)) => {
                end.log.warn(format_args!("{error}"));
                self.suspend(Event::Listener(name.into()));
                return;
            }
            _ => return,
        };
        let is_taken = self.ports.get(name).is_some_and(|state| state.attach.is_connected());
        if is_taken && let Some((_, end)) = self.endpoint(name) {
            // Closed at once, so that it notices; the connected peer keeps its port.
            end.log.warn(format_args!("rejected a second connection: one is open already"));
            os::shutdown(stream.as_fd());
            foreign::close((stream, charge), &account);
            return;
        }
        self.attach_peer(name, stream, Some(charge));
    }

    fn attach_peer(&mut self, name: &str, stream: UnixStream, charge: Option<Charge>) {
        match self.ports.get(name).map(|state| &state.attach) {
            Some(Attach::VhostUser(_)) => self.attach_front_end(name, stream, charge),
            Some(Attach::Stream(_)) => self.attach_stream(name, stream.into(), charge),
            _ => {}
        }
    }

    /// Connects a port to its peer, or tries again later.
    pub(super) fn connect(&mut self, name: &str) {
        let Some((port, end)) = self.endpoint(name) else { return };
        let connected = match &end.address.peer {
            Peer::Connects => return,
            Peer::At(path) => os::connect(path, end.address.carries)
                .map_err(|error| format!("{error}{}", vhost_user::advice(&error))),
            Peer::Passt { mtu } => passt::start(*mtu, &mut end.passt),
        };
        match connected {
            Ok(socket) => {
                let charge = port.account.descriptors.charge(1).ok();
                self.attach_peer(name, socket.into(), charge);
            }
            Err(error) => {
                end.retry_later();
                match end.address.peer {
                    Peer::Passt { .. } => end.log.warn(format_args!("{error}")),
                    _ => tracing::debug!("port {name}: {error}"),
                }
            }
        }
    }

    pub(super) fn retry_due(&mut self) {
        let now = Instant::now();
        let due = |p: &PortState| p.attach.endpoint().and_then(|end| end.retry);
        let due = |p: &PortState| due(p).is_some_and(|at| at <= now);
        let names: Vec<_> =
            self.ports.iter().filter(|(_, p)| due(p)).map(|(n, _)| n.clone()).collect();
        for name in names {
            self.connect(&name);
        }
    }
}

/// Spreads the reconnects of many ports in time.
pub(super) fn jitter() -> u32 {
    Instant::now().elapsed().subsec_nanos() ^ std::process::id()
}
