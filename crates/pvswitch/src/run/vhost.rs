//! vhost-user ports: sockets, connections and guests.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use shm::sync::{Lock, Mutex};
use switch::account::Charge;
use switch::fdb::PortId;
use switch::forward::Port;
use switch::schedule::token;
use switch::serving::{Serving, panic_on_demand};
use switch::vnet::Offloads;
use vhost_user::backend::{self, Backend};
use vhost_user::connection::{Connection, Turn};
use vhost_user::device::Device;
use vhost_user::net::{NetDevice, NetOptions, Pair, takes};

use super::endpoint::Endpoint;
use super::reload::{Leaving, Prepared};
use super::{Attach, Event, Ingress, PortState, RunError, System};
use crate::pool::Pool;
use crate::ports::{Guest, PortHost};
use crate::spec::{PortSpec, VhostUser};

/// A vhost-user port, its ingress queues and its state.
type VhostRef<'a> = (&'a Arc<Port>, &'a [Ingress], &'a mut VhostPort);

pub(super) struct VhostPort {
    pub(super) conf: VhostUser,
    pub(super) pairs: Vec<Pair>,
    pub(super) guest: Arc<Mutex<Guest>>,
    pub(super) end: Endpoint,
    pub(super) connection: Option<Connection>,
    /// Whether its rings ran after the last message.
    pub(super) is_up: bool,
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
        let end = self.make_endpoint(spec, &port.account, leaving)?;
        let ingress = pairs.iter().enumerate();
        let ingress = ingress.map(|(i, p)| self.ingress(spec, i, &p.ingress_stats)).collect();
        let vhost = VhostPort {
            conf: conf.clone(),
            pairs,
            guest: Arc::new(Mutex::new(Lock::Guest, Guest::default())),
            end,
            connection: None,
            is_up: false,
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

    pub(super) fn attach_front_end(
        &mut self,
        name: &str,
        stream: UnixStream,
        charge: Option<Charge>,
    ) {
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
        vhost.end.log.info(format_args!("front-end connected"));
        vhost.end.begin();
        vhost.connection = Some(connection);
    }

    pub(super) fn serve_guest(&mut self, name: &str) {
        let now = self.pool.now();
        self.begin_message(name);
        let Some((port, _, vhost)) = self.vhost(name) else { return };
        let _serving = Serving::port(port.id);
        panic_on_demand("message", port.id);
        let Some(connection) = &mut vhost.connection else { return };
        let turn = connection.on_readable_at(now);
        for refused in connection.take_refusals() {
            vhost.end.log.warn(format_args!("refused: {refused}"));
            vhost.end.errors.count(refused.cause(), refused.to_string());
        }
        match turn {
            Err(end) => {
                if let Some(cause) = end.cause() {
                    vhost.end.errors.count(cause, end.to_string());
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

    /// In cross mode, or wired, a TAP has a single receiver: requests from the kernel the offloads
    /// that this guest accepts.
    pub(super) fn follow(&mut self, id: PortId) {
        let Some(pair) = self.pair_of(id) else { return };
        let wired = |p: &PortState| pair.contains(&p.port.id);
        let accepted = self.ports.values().filter(|p| wired(p)).find_map(|p| match &p.attach {
            Attach::VhostUser(vhost) => {
                let guest = vhost.guest.lock();
                Some(guest.features).filter(|features| *features != 0).map(takes)
            }
            Attach::Stream(_) => Some(Offloads::default()),
            Attach::Xen(_) if p.port.is_wired() && p.port.active() > 0 => {
                Some(p.port.egress[0].queue.lock().offloads())
            }
            _ => None,
        });
        let Some(accepted) = accepted else { return };
        for state in self.ports.values_mut().filter(|p| wired(p)) {
            if let Attach::Tap(tap) = &mut state.attach
                && let Err(error) = tap.follow(&accepted)
            {
                tracing::warn!(port = state.spec.name, "cannot change offloads: {error}");
            }
        }
    }

    /// Ends a guest's connection, if there is one; in client mode a retry is scheduled.
    pub(super) fn disconnect(&mut self, name: &str, why: &str) {
        self.disconnect_stream(name, why);
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        let Some(connection) = vhost.connection.take() else { return };
        vhost.is_up = false;
        self.touch(name);
        let Some((_, _, vhost)) = self.vhost(name) else { return };
        vhost.end.end();
        *vhost.guest.lock() = Guest::default();
        vhost.end.log.info(format_args!("front-end disconnected: {why}"));
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
}

/// A connection's device, and the settings of its back-end.
pub(super) fn backend_of(
    port: &Arc<Port>,
    ingress: &[Ingress],
    vhost: &VhostPort,
    pool: Arc<Pool>,
) -> (Box<dyn Device>, backend::Options, backend::Permissions) {
    let pairs = vhost.pairs.clone();
    let (guest, log) = (Arc::clone(&vhost.guest), Arc::clone(&vhost.end.log));
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
