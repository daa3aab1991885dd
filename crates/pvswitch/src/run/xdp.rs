//! Ports with AF_XDP sockets ([0038](../../../../docs/design/0038-af-xdp.md)).

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shm::sync::{Lock, Mutex};
use switch::fdb::PortId;
use switch::forward::EgressQueue;
use switch::port;
use switch::schedule::token;
use switch::stats::{EgressStats, IngressStats};
use uplink::{
    PacketLink, Xdp, XdpEgress, XdpError, XdpHanded, XdpIngress, XdpOptions, XdpShape,
    clear_packet_error,
};
use vhost_user::backend::{Descriptors, Exported, ImportError, export_fd};
use vhost_user::device::KickFd;

use super::reload::{Leaving, Prepared};
use super::tap::{self, CHECK_INTERVAL, DOWN, REMOVED};
use super::{Attach, Event, Ingress, PortState, RunError, System};
use crate::spec::{Kind, PortSpec};

/// The sockets of a port, as the control thread keeps them.
pub(super) struct XdpPort {
    xdp: Xdp,
    ingress: Vec<Arc<Mutex<XdpIngress>>>,
    egress: Vec<Arc<Mutex<XdpEgress>>>,
    /// Whether another process opened them.
    is_adopted: bool,
    /// Dropped frames of each queue that are in its counter already.
    counted: Vec<Cell<u64>>,
    /// When to check whether the interface, which is down, is up again.
    pub(super) check_at: Option<Instant>,
}

/// What another process needs to take the sockets over: places of descriptors, and properties.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct XdpOffer {
    sockets: Vec<u32>,
    /// None with zero-copy, and from a process that had none.
    #[serde(default)]
    senders: Vec<u32>,
    memory: u32,
    map: u32,
    link: Option<u32>,
    watcher: u32,
    chunk_len: u32,
    frame_max: u32,
    zero_copy: bool,
    generic: bool,
}

/// What another process needs to continue with a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct XdpQueueHanded {
    /// Free chunks.
    pub(super) free: Vec<u32>,
    /// Dropped frames that are in its counter already.
    pub(super) counted: u64,
}

impl XdpOffer {
    /// Takes their descriptors.
    pub(super) fn take(
        &self,
        fds: &mut Descriptors,
    ) -> Result<(XdpHanded<OwnedFd>, XdpShape), ImportError> {
        let mut take =
            |all: &[u32]| -> Result<_, _> { all.iter().map(|at| fds.take(*at)).collect() };
        let handed = XdpHanded {
            sockets: take(&self.sockets)?,
            senders: take(&self.senders)?,
            memory: fds.take(self.memory)?,
            map: fds.take(self.map)?,
            link: self.link.map(|at| fds.take(at)).transpose()?,
            watcher: fds.take(self.watcher)?,
        };
        let shape = XdpShape {
            chunk_len: self.chunk_len,
            frame_max: self.frame_max,
            is_zero_copy: self.zero_copy,
            is_generic: self.generic,
        };
        Ok((handed, shape))
    }
}

impl XdpPort {
    pub(super) fn offer<'a>(&'a self, fds: &mut Exported<'a>) -> XdpOffer {
        let (of, shape) = (self.xdp.descriptors(), self.xdp.shape());
        XdpOffer {
            sockets: of.sockets.iter().map(|fd| export_fd(fds, fd.as_fd())).collect(),
            senders: of.senders.iter().map(|fd| export_fd(fds, fd.as_fd())).collect(),
            memory: export_fd(fds, of.memory.as_fd()),
            map: export_fd(fds, of.map.as_fd()),
            link: of.link.as_ref().map(|fd| export_fd(fds, fd.as_fd())),
            watcher: export_fd(fds, of.watcher.as_fd()),
            chunk_len: shape.chunk_len,
            frame_max: shape.frame_max,
            zero_copy: shape.is_zero_copy,
            generic: shape.is_generic,
        }
    }

    /// State of each queue for another process. Workers are frozen.
    pub(super) fn handed(&self) -> Vec<XdpQueueHanded> {
        let queues = self.egress.iter().zip(&self.counted);
        let handed = queues.map(|(egress, counted)| XdpQueueHanded {
            free: egress.lock().free().to_vec(),
            counted: counted.get(),
        });
        handed.collect()
    }

    /// Continues where another process stopped. Workers are frozen.
    pub(super) fn resume(&self, handed: &[XdpQueueHanded]) {
        // After a kill the sockets are new.
        if self.is_adopted {
            self.ingress.iter().for_each(|ingress| ingress.lock().resume());
            for ((egress, counted), handed) in self.egress.iter().zip(&self.counted).zip(handed) {
                egress.lock().resume(&handed.free);
                counted.set(handed.counted);
            }
        }
    }

    pub(super) fn link(&self) -> PacketLink {
        self.xdp.link()
    }

    pub(super) fn has_carrier(&self) -> bool {
        self.xdp.has_carrier()
    }

    /// Has the kernel drop all frames for the sockets, or no longer; those that wait are dropped.
    pub(super) fn set_blocked(&self, blocked: bool) -> io::Result<()> {
        if blocked {
            self.xdp.set_blocked(true)?;
        }
        self.ingress.iter().for_each(|ingress| ingress.lock().discard());
        if blocked { Ok(()) } else { self.xdp.set_blocked(false) }
    }

    /// Has the kernel deliver frames to the sockets; those that wait stay.
    pub(super) fn unblock(&self) -> io::Result<()> {
        self.xdp.set_blocked(false)
    }

    pub(super) fn clear_link_error(&self) {
        clear_packet_error(self.xdp.watcher());
    }

    /// An ingress queue, and its kicks.
    pub(super) fn source(&self, queue: usize) -> (Arc<Mutex<dyn port::Ingress>>, KickFd) {
        let kick = Arc::clone(&self.xdp.descriptors().sockets[queue]);
        (Arc::clone(&self.ingress[queue]) as _, kick as _)
    }

    /// Counts frames that the kernel dropped since the last call.
    pub(super) fn count_losses(&self, ingress: &[Ingress]) {
        for ((queue, known), counted) in ingress.iter().enumerate().zip(&self.counted) {
            let all = self.xdp.losses(queue).max(counted.get());
            known.stats.drops_not_read.add(all - counted.replace(all));
        }
    }

    pub(super) fn show(&self) -> Value {
        let shape = self.xdp.shape();
        json!({ "zero_copy": shape.is_zero_copy, "generic": shape.is_generic })
    }
}

impl System {
    pub(super) fn add_af_xdp(
        &mut self,
        spec: &PortSpec,
        conf: &XdpOptions,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let failed = |error| RunError::Xdp { name: spec.name.clone(), error };
        let handed = self.inherited.xdp.remove(&spec.name);
        let blocked = self.starts_blocked(spec);
        let is_adopted = handed.is_some();
        let xdp = match handed {
            Some((handed, shape)) => Xdp::adopt(handed, shape).map_err(failed)?,
            None => {
                self.check_leaving(spec, conf, leaving)?;
                let (xdp, notes) = Xdp::open(conf, blocked).map_err(failed)?;
                notes.iter().for_each(|note| tracing::warn!(port = spec.name, "{note}"));
                xdp
            }
        };
        let no_descriptor =
            |error| failed(XdpError::Os { what: format!("use interface `{}`", conf.name), error });
        let (mut ingress, mut egress) = (Vec::new(), Vec::new());
        let (mut known, mut queues) = (Vec::new(), Vec::new());
        for queue in 0..xdp.descriptors().sockets.len() {
            let (seen, sent) = <(Arc<IngressStats>, Arc<EgressStats>)>::default();
            let from = xdp.ingress(queue, Arc::clone(&seen));
            let to = xdp.egress(queue, Arc::clone(&sent)).map_err(no_descriptor)?;
            known.push(self.ingress(spec, queue, &seen));
            ingress.push(Arc::new(Mutex::new(Lock::Ingress, from)));
            let to = Arc::new(Mutex::new(Lock::Egress, to));
            queues.push(EgressQueue::new(Arc::clone(&to) as _, sent));
            egress.push(to);
        }
        let counted = egress.iter().map(|_| Cell::new(0)).collect();
        let mut port = XdpPort { xdp, ingress, egress, is_adopted, counted, check_at: None };
        let made = Arc::new(self.make_port(id, &spec.name, queues));
        let failure = match port.link() {
            PacketLink::Up => None,
            PacketLink::Removed => Some(REMOVED),
            PacketLink::Down => Some(DOWN),
        };
        port.check_at = failure.map(|_| Instant::now() + CHECK_INTERVAL);
        let mut state = PortState::new(spec, made, known, Attach::Xdp(Box::new(port)));
        state.failure = failure.map(Into::into);
        state.blocked = blocked;
        let mut served = Vec::new();
        if failure.is_none() && !blocked {
            served = tap::served(id, &state.ingress, &state.attach);
            state.port.set_active(state.port.egress.len() as u16);
        }
        Ok(Prepared { state, served })
    }

    /// The queues of an interface cannot be opened while a port that is about to leave has them.
    fn check_leaving(
        &self,
        spec: &PortSpec,
        conf: &XdpOptions,
        leaving: &Leaving,
    ) -> Result<(), RunError> {
        let is_same = |kind: &Kind| match kind {
            Kind::AfXdp(of) => of.name == conf.name && of.netns == conf.netns,
            _ => false,
        };
        // Those of one that was removed are nobody's.
        let has_it = |state: &&PortState| {
            is_same(&state.spec.kind) && state.attach.link() != Some(PacketLink::Removed)
        };
        let mut others =
            self.ports.values().filter(|state| leaving.ports.contains(&state.spec.name));
        match others.find(has_it) {
            None => Ok(()),
            Some(other) => Err(RunError::Conflict(format!(
                "port '{}': interface {} is still port '{}': an af-xdp port is not changed in \
                 place; remove that one first (ctl del-port), then reload or add it again",
                spec.name, conf.name, other.spec.name
            ))),
        }
    }

    /// After a port was added: watches its interface, and the room in its sockets.
    pub(super) fn watch_xdp(&mut self, name: &str) {
        let Self { epoll, tokens, next_token, ports, pool, .. } = self;
        let Some(PortState { port, attach: Attach::Xdp(xdp), .. }) = ports.get(name) else {
            return;
        };
        for (queue, egress) in (0..).zip(&xdp.egress) {
            let room = egress.lock().waits_for();
            pool.watch(token(port.id, queue, true), Arc::clone(port), queue, room);
        }
        let what = Event::Link(name.into());
        match super::watch(epoll, tokens, next_token, xdp.xdp.watcher(), what) {
            // Its errors only.
            Ok(token) => _ = epoll.change(xdp.xdp.watcher(), token, false, false),
            Err(error) => tracing::error!(port = name, "cannot watch its interface: {error}"),
        }
    }

    /// The interface of a port went down, or was removed.
    pub(super) fn check_xdp(&mut self, name: &str) {
        let Some(Attach::Xdp(xdp)) = self.ports.get(name).map(|state| &state.attach) else {
            return;
        };
        xdp.clear_link_error();
        match xdp.link() {
            PacketLink::Up => {}
            PacketLink::Down => self.fail_interface(name, DOWN),
            PacketLink::Removed => self.fail_interface(name, REMOVED),
        }
    }

    /// Ends the service of a port that was removed from the switch.
    pub(super) fn del_xdp(&mut self, name: &str, xdp: &XdpPort, id: PortId) {
        self.unwatch(xdp.xdp.watcher(), &Event::Link(name.into()));
        for queue in 0..xdp.egress.len() as u16 {
            [false, true]
                .into_iter()
                .for_each(|egress| self.pool.drop_queue(token(id, queue, egress)));
        }
    }
}
