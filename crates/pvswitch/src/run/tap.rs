//! Ports on interfaces of the host: TAPs, and packet sockets. With AF_XDP sockets (`xdp.rs`) they
//! have in common what happens when an interface goes down.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::event::Event;
use shm::sync::{Lock, Mutex};
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Source};
use switch::port;
use switch::schedule::token;
use switch::stats::EgressStats;
use uplink::{NullEgress, PacketLink, TapError, find_interface, in_netns};
use vhost_user::device::KickFd;

use super::reload::{Leaving, Prepared};
use super::{Attach, Ingress, PortState, RunError, System};
use crate::spec::{AfPacket, Kind, PortSpec, Tap};
use crate::tap::{TapPort, TapQueues};
use crate::worker::Served;

/// Why the port of an interface that was removed is down.
pub(super) const REMOVED: &str = "the interface was removed";
pub(super) const DOWN: &str = "the interface is down";
/// What to do then, of ports that do not make their interface.
const MAKE_AGAIN: &str = "create it again, and the port reopens";
const TAP_REMOVED: &str = "the TAP interface was removed";
/// Time between checks whether an interface is up again.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl System {
    pub(super) fn add_tap(
        &mut self,
        spec: &PortSpec,
        conf: &Tap,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let tap = self.open_tap(spec, conf, leaving)?;
        Ok(self.add_interface(spec, tap, id, false))
    }

    pub(super) fn add_af_packet(
        &mut self,
        spec: &PortSpec,
        conf: &AfPacket,
        id: PortId,
    ) -> Result<Prepared, RunError> {
        let handed = self.inherited.taps.remove(&spec.name).map(|(queues, _)| queues);
        let blocked = self.starts_blocked(spec);
        let opened = crate::tap::packet(conf, handed, blocked);
        let tap = opened.map_err(|error| RunError::Tap { name: spec.name.clone(), error })?;
        Ok(self.add_interface(spec, tap, id, blocked))
    }

    /// A port that is down until its interface exists, or its network namespace.
    pub(super) fn await_interface(
        &mut self,
        spec: &PortSpec,
        id: PortId,
        missing: String,
    ) -> Prepared {
        tracing::error!(port = spec.name, "down until it exists: {missing}");
        let stats = Arc::new(EgressStats::default());
        let queue = Arc::new(Mutex::new(Lock::Egress, NullEgress::new(Arc::clone(&stats))));
        let port = self.make_port(id, &spec.name, vec![EgressQueue::new(queue, stats)]);
        let check_at = Some(Instant::now() + CHECK_INTERVAL);
        let mut state = PortState::new(spec, Arc::new(port), Vec::new(), Attach::Missing(check_at));
        state.failure = Some(missing);
        state.blocked = self.starts_blocked(spec);
        Prepared::new(state)
    }

    fn add_interface(&self, spec: &PortSpec, tap: TapPort, id: PortId, blocked: bool) -> Prepared {
        let (removed, is_packet) = (tap.removed, tap.is_packet);
        let mut egress = Vec::new();
        let mut ingress = Vec::new();
        let mut served = Vec::new();
        let mut queues = TapQueues::new(&tap);
        for bus in self.xen.values() {
            bus.set_tap_memory(&queues);
        }
        for (queue, pair) in tap.pairs.into_iter().enumerate() {
            egress.push(EgressQueue::new(pair.egress, pair.egress_stats));
            let known = self.ingress(spec, queue, &pair.ingress_stats);
            let tuning = Arc::clone(&known.tuning);
            ingress.push(known);
            let queue = queue as u16;
            let source = Source::new(id, queue, pair.ingress_stats, tuning);
            let token = token(id, queue, false);
            let kick = Some(pair.fd as KickFd);
            served.push(Served { token, source, ingress: pair.ingress, kick, notifies: true });
        }
        let port = Arc::new(self.make_port(id, &spec.name, egress));
        if matches!(&spec.kind, Kind::Tap(tap) if tap.of_vif) {
            port.wire(None);
        }
        // One taken over from another process may be down, or gone.
        let failure = match (is_packet, removed) {
            (false, true) => Some(TAP_REMOVED),
            (true, true) => Some(REMOVED),
            (true, false) if queues.link() == PacketLink::Down => Some(DOWN),
            _ => None,
        };
        let is_watched = failure.is_some() && is_packet;
        queues.check_at = is_watched.then(|| Instant::now() + CHECK_INTERVAL);
        if failure.is_some() || blocked {
            served.clear();
        } else {
            port.set_active(port.egress.len() as u16);
        }
        let mut state = PortState::new(spec, port, ingress, Attach::Tap(queues));
        (state.failure, state.blocked) = (failure.map(Into::into), blocked);
        Prepared { state, served }
    }

    /// Takes a port down whose interface cannot be used any more; each of its queues reports that.
    pub(super) fn fail_interface(&mut self, name: &str, why: &str) {
        let Some(state) = self.ports.get_mut(name).filter(|state| state.failure.is_none()) else {
            return;
        };
        let link = state.attach.link();
        let why = if link == Some(PacketLink::Removed) { REMOVED } else { why };
        let is_watched = link.is_some();
        let link = link.unwrap_or(PacketLink::Removed);
        let Some(check_at) = state.attach.check_at() else { return };
        if is_watched {
            *check_at = Some(Instant::now() + CHECK_INTERVAL);
        }
        if link != PacketLink::Removed {
            tracing::warn!(port = name, "down: {why}: set it up (ip link set IFNAME up)");
        } else {
            let remedy = match &state.wired {
                Some(_) => "detach and attach its vif (xl network-detach, network-attach)",
                None if is_watched => MAKE_AGAIN,
                None => "create it again, then remove and add the port (ctl del-port, add-port)",
            };
            tracing::error!(port = name, "down: {why}: {remedy}");
        }
        let all = state.ingress.len() as u16;
        state.failure = Some(why.into());
        // To set an interface down is an operator's decision.
        state.interface_losses += u64::from(link == PacketLink::Removed);
        state.port.set_active(0);
        let id = state.port.id;
        (0..all).for_each(|queue| self.pool.drop_queue(token(id, queue, false)));
        // Another one may take its place, with its addresses.
        if !self.is_paired(name) {
            self.fdb.flush_learned(id);
        }
        if link == PacketLink::Removed {
            self.publish(Event::InterfaceLost { port: name.into(), cause: why.into() });
        }
        self.touch(name);
    }

    /// When to check interfaces that are down.
    pub(super) fn links_due(&self) -> Option<Instant> {
        let of = |state: &PortState| match &state.attach {
            Attach::Tap(tap) => tap.check_at,
            Attach::Xdp(xdp) => xdp.check_at,
            Attach::Missing(check_at) => *check_at,
            _ => None,
        };
        self.ports.values().filter_map(of).min()
    }

    /// Serves ports again whose interface is up again, or was made again.
    pub(super) fn check_links(&mut self) {
        let now = Instant::now();
        let mut due = Vec::new();
        for (name, state) in &mut self.ports {
            let check_at = state.attach.check_at();
            let is_due = check_at.is_some_and(|at| at.take_if(|at| *at <= now).is_some());
            due.extend(is_due.then(|| name.clone()));
        }
        for name in due {
            self.check_link(&name);
            // Unless it is up.
            if let Some(state) = self.ports.get_mut(&name)
                && state.failure.is_some()
                && let Some(check_at) = state.attach.check_at()
            {
                *check_at = Some(now + CHECK_INTERVAL);
            }
        }
    }

    fn check_link(&mut self, name: &str) {
        let Some(state) = self.ports.get_mut(name) else { return };
        match state.attach.link() {
            Some(PacketLink::Down) => {}
            Some(PacketLink::Up) => {
                tracing::info!(port = name, "its interface is up again");
                state.attach.clear_link_error();
                state.failure = None;
                if state.blocked {
                    return;
                }
                for served in served(state.port.id, &state.ingress, &state.attach) {
                    self.pool.serve(served);
                }
                state.port.set_active(state.ingress.len() as u16);
            }
            None | Some(PacketLink::Removed) => {
                if state.failure.as_deref() == Some(DOWN) {
                    tracing::error!(port = name, "{REMOVED}: {MAKE_AGAIN}");
                    state.failure = Some(REMOVED.into());
                }
                let is_awaited = matches!(state.attach, Attach::Missing(_));
                match find(&state.spec.kind) {
                    Ok(()) => self.reopen(name),
                    // Of the two that it needs, another one is missing now.
                    Err(error) if is_awaited && state.failure != Some(error.to_string()) => {
                        tracing::error!(port = name, "down until it exists: {error}");
                        state.failure = Some(error.to_string());
                        self.touch(name);
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// Puts a port in the place of itself, on a new interface of the name of the removed one.
    fn reopen(&mut self, name: &str) {
        let Some(state) = self.ports.get(name) else { return };
        let text = self.config.port(name).map(PortSpec::from);
        let (spec, id) = (text.unwrap_or_else(|| state.spec.clone()), state.port.id);
        let leaving = Leaving::one(name);
        let mut prepared = match self.prepare_port(&spec, id, &leaving) {
            Ok(prepared) => prepared,
            Err(error) => {
                let (error, Some(state)) = (error.to_string(), self.ports.get_mut(name)) else {
                    return;
                };
                // Once each.
                if state.failure.as_ref() != Some(&error) {
                    tracing::error!(
                        port = name,
                        "its interface exists, but cannot be opened: {error}"
                    );
                    state.failure = Some(error);
                }
                return;
            }
        };
        if let Some(old) = self.ports.get(name) {
            let new = &mut prepared.state;
            (new.interface_losses, new.failovers) = (old.interface_losses, old.failovers);
            for (new, old) in new.ingress.iter().zip(&old.ingress) {
                old.stats.all().for_each(|(name, value)| _ = new.stats.restore(name, value));
            }
            for (new, old) in new.port.egress.iter().zip(&old.port.egress) {
                old.stats.all().for_each(|(name, value)| _ = new.stats.restore(name, value));
            }
        }
        self.take_down(name, &leaving);
        self.install(vec![prepared]);
        self.set_statics(&self.config);
        self.touch(name);
        tracing::info!(port = name, "its interface exists now: opened");
    }

    /// Counts frames that the kernel dropped since the last call, because sockets were full.
    pub(super) fn count_losses(&self) {
        for state in self.ports.values() {
            match &state.attach {
                Attach::Tap(queues) if queues.is_packet => {
                    for (fd, ingress) in queues.fds.iter().zip(&state.ingress) {
                        ingress.stats.drops_not_read.add(uplink::packet_losses(fd.as_fd()));
                    }
                }
                Attach::Xdp(xdp) => xdp.count_losses(&state.ingress),
                _ => {}
            }
        }
    }
}

impl Attach {
    /// State of an interface that may come back after it was down; `None`: there is none.
    pub(super) fn link(&self) -> Option<PacketLink> {
        match self {
            Self::Tap(queues) if queues.is_packet => Some(queues.link()),
            Self::Xdp(xdp) => Some(xdp.link()),
            Self::Missing(_) => Some(PacketLink::Removed),
            _ => None,
        }
    }

    /// Whether the interface of sockets is up and has carrier.
    pub(super) fn has_carrier(&self) -> bool {
        match self {
            Self::Tap(queues) if queues.is_packet => uplink::packet_carrier(queues.fds[0].as_fd()),
            Self::Xdp(xdp) => xdp.has_carrier(),
            _ => false,
        }
    }

    /// Has the kernel drop all frames for sockets on an interface, or no longer; those that wait
    /// are dropped.
    pub(super) fn set_blocked(&self, blocked: bool) -> std::io::Result<()> {
        match self {
            Self::Tap(queues) if queues.is_packet => queues.set_blocked(blocked),
            Self::Xdp(xdp) => xdp.set_blocked(blocked),
            _ => Ok(()),
        }
    }

    /// Has the kernel deliver frames to sockets on an interface; those that wait stay.
    pub(super) fn unblock(&self) -> std::io::Result<()> {
        match self {
            Self::Tap(queues) if queues.is_packet => queues.unblock(),
            Self::Xdp(xdp) => xdp.unblock(),
            _ => Ok(()),
        }
    }

    /// When to check whether the interface is up again; `None`: there is none.
    pub(super) fn check_at(&mut self) -> Option<&mut Option<Instant>> {
        match self {
            Self::Tap(queues) => Some(&mut queues.check_at),
            Self::Xdp(xdp) => Some(&mut xdp.check_at),
            Self::Missing(check_at) => Some(check_at),
            _ => None,
        }
    }

    /// Takes the errors of sockets whose interface was down.
    fn clear_link_error(&self) {
        match self {
            Self::Tap(queues) => {
                queues.fds.iter().for_each(|fd| uplink::clear_packet_error(fd.as_fd()));
            }
            Self::Xdp(xdp) => xdp.clear_link_error(),
            _ => {}
        }
    }

    /// An ingress queue of an interface, and its kicks.
    fn source(&self, queue: usize) -> Option<(Arc<Mutex<dyn port::Ingress>>, KickFd)> {
        match self {
            Self::Tap(queues) => {
                Some((Arc::clone(queues.ingress(queue)) as _, Arc::clone(&queues.fds[queue]) as _))
            }
            Self::Xdp(xdp) => Some(xdp.source(queue)),
            _ => None,
        }
    }
}

/// Finds the interface of a port, or, if the port makes it, its network namespace.
fn find(kind: &Kind) -> Result<(), TapError> {
    match kind {
        Kind::AfPacket(of) => find_interface(&of.ifname, of.netns.as_deref()),
        Kind::AfXdp(of) => find_interface(&of.name, of.netns.as_deref()),
        Kind::Tap(of) => of.netns.as_deref().map_or(Ok(()), |netns| in_netns(netns, || ())),
        _ => unreachable!("only these have an interface"),
    }
}

/// All queues of an interface, for workers to serve.
pub(super) fn served(id: PortId, ingress: &[Ingress], attach: &Attach) -> Vec<Served> {
    let served = |(queue, known): (u16, &Ingress)| {
        let (ingress, kick) = attach.source(usize::from(queue))?;
        let (stats, tuning) = (Arc::clone(&known.stats), Arc::clone(&known.tuning));
        let source = Source::new(id, queue, stats, tuning);
        let token = token(id, queue, false);
        Some(Served { token, source, ingress, kick: Some(kick), notifies: true })
    };
    (0..).zip(ingress).filter_map(served).collect()
}
