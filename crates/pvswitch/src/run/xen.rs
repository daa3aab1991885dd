//! Xen ports: hypervisors, and vifs that are added and removed.
//!
//! All ports of real Xen share one [`XenBus`]: one connection to xenstore and one descriptor for
//! grants. Each directory of `xen-local` has its own.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shm::sync::Mutex;
use switch::account::defaults;
use switch::fdb::{Fdb, PortId};
use switch::forward::{Port, Source};
use switch::schedule::token;
use switch::serving::{Serving, panic_on_demand};
use switch::tuning::Tuning;
use xen_netif::back::{Bus, DomainStore, Failure, Handshake, Interface, Queues, Socket, Tree};
use xen_netif::back::{VifId, VifState};
use xen_netif::host::{self, Back, HostError};
use xen_netif::port::Pair;
use xen_netif::port::control::STATIC_GRANTS_MAX;

use super::accounts::Errors;
use super::reload::Leaving;
use super::vif_tap::{self, VifTap, Wired};
use super::vifs::XenInherited;
use super::xenstore::{REPLY_WAIT, Reconnect};
use super::{Attach, Event, PortState, RunError, System};
use vhost_user::device::KickFd;
use xen_local::BackState;

use crate::limit::PortLog;
use crate::pool::Pool;
use crate::spec::{Kind, PortSpec, Xen, XenAt};
use crate::tap::TapQueues;
use crate::worker::Served;

/// The only vif of a directory: its front end is domain 1, device 0.
const LOCAL: VifId = VifId { domid: 1, devid: 0 };
/// Interval between polls of a control ring. A guest that keeps it full or kicks in a loop must not
/// take the control thread from others (XSA-332).
const CONTROL_INTERVAL: Duration = Duration::from_millis(1);

/// Part of the control thread's time for a control ring: a static grant is several hypercalls, and
/// each page that is released a flush of all processors' TLBs.
const CONTROL_PART: u32 = 20;

/// Identifies a hypervisor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hypervisor {
    /// The one this machine runs on.
    Xen,
    /// This directory.
    Local(PathBuf),
}

/// A hypervisor and its vifs.
pub(super) struct XenBus {
    pub(super) host: Arc<dyn Back>,
    /// The host, if it is a directory.
    pub(super) local: Option<Arc<xen_local::Back>>,
    /// Whether its front end waits until a change is kept.
    pub(super) changed: bool,
    /// Its state for another process, while it is handed over.
    pub(super) exported: Option<(BackState, Vec<Arc<OwnedFd>>)>,
    pub(super) store: DomainStore,
    pub(super) bus: Bus<Socket<VifQueues>>,
    pub(super) reconnect: Reconnect,
}

impl XenBus {
    /// Has frames read into memory that can be granted to vifs.
    pub(super) fn set_tap_memory(&self, tap: &TapQueues) {
        tap.set_memory(|len| self.host.private(len));
    }
}

/// A vif as a port.
pub(super) struct XenPort {
    pub(super) of: Hypervisor,
    pub(super) id: VifId,
    /// Added by `xen:auto`, and removed with it.
    pub(super) found: bool,
    /// Taken over from another process, and not served yet.
    pub(super) adopted: bool,
    pub(super) log: Arc<PortLog>,
    /// Its interface, if it has one.
    pub(super) tap: Option<VifTap>,
    /// `None` once it is followed.
    pub(super) handshake: Option<Box<Handshake<Socket<VifQueues>>>>,
    /// State in the record for the next process, if this one is killed.
    kept: VifState,
    pub(super) errors: Errors,
    /// Last state logged.
    logged: String,
    /// Event channel of its control ring, if it has one.
    control: Option<Arc<OwnedFd>>,
    /// When its control ring is polled again; until then, its event channel is not watched.
    control_due: Option<Instant>,
    /// Whether requests remained after the last poll.
    control_more: bool,
}

/// Starts and stops a vif's queues at the workers.
pub(super) struct VifQueues {
    port: Arc<Port>,
    queues: Vec<(Pair, Arc<Tuning>)>,
    pool: Arc<Pool>,
    fdb: Arc<Fdb>,
    log: Arc<PortLog>,
    tap: Option<Wired>,
}

impl Queues for VifQueues {
    fn start(&mut self, queue: u16, tx: Arc<OwnedFd>, rx: Arc<OwnedFd>) {
        // Before the front end is connected, which then sends its first frames.
        self.tap.iter().for_each(|tap| tap.set_carrier(true));
        let (pair, tuning) = &self.queues[usize::from(queue)];
        let id = self.port.id;
        let source = Source::new(id, queue, Arc::clone(&pair.ingress_stats), Arc::clone(tuning));
        let ingress: Arc<Mutex<dyn switch::port::Ingress>> = pair.ingress.clone();
        let token_of = |egress| token(id, queue, egress);
        let served = Served {
            token: token_of(false),
            source,
            ingress,
            kick: Some(tx as KickFd),
            notifies: true,
        };
        self.pool.serve(served);
        self.pool.watch(token_of(true), Arc::clone(&self.port), queue, Some(rx as KickFd));
    }

    fn stop(&mut self, queue: u16) {
        for egress in [false, true] {
            self.pool.drop_queue(token(self.port.id, queue, egress));
        }
    }

    fn set_active(&mut self, queues: u16) {
        self.port.set_active(queues);
        if queues == 0 {
            self.fdb.flush_learned(self.port.id);
        }
        self.tap.iter().for_each(|tap| tap.set_carrier(queues > 0));
    }

    fn interface(&self) -> Interface {
        self.tap.as_ref().map_or(Interface::None, Wired::interface)
    }

    fn serving(&self) -> Option<Serving> {
        let serving = Serving::port(self.port.id);
        panic_on_demand("message", self.port.id);
        Some(serving)
    }

    fn log(&self) -> Box<dyn FnMut(HostError) + Send> {
        let log = Arc::clone(&self.log);
        Box::new(move |error| log.warn(format_args!("cannot map static grants: {error}")))
    }
}

impl XenBus {
    /// Time of its next action without an event.
    fn due(&self) -> Option<Instant> {
        // Without xenstore, vifs cannot change.
        let vifs = if self.store.is_gone() { None } else { self.bus.due() };
        self.reconnect.due().into_iter().chain(vifs).min()
    }
}

impl System {
    // ---- ports ----

    /// `xen:auto`: existing vifs are added as ports when xenstore is next read.
    pub(super) fn add_xen_auto(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        if let Some(other) = &self.xen_auto {
            let what = format!("xen:auto exists already, as port '{}': use that one", other.name);
            return Err(RunError::Request(what));
        }
        self.open_auto(spec)?;
        self.xen_auto = Some(spec.clone());
        let bus = self.xen.get_mut(&Hypervisor::Xen).expect("opened above");
        let done = bus.bus.set_auto(&mut bus.store);
        self.finish_bus(&Hypervisor::Xen, done);
        Ok(())
    }

    /// Opens what `xen:auto` needs: all of it that can fail.
    pub(super) fn open_auto(&mut self, spec: &PortSpec) -> Result<(), RunError> {
        let Kind::Xen(conf) = &spec.kind else { unreachable!("xen:auto is a Xen port") };
        vif_tap::check(spec, conf)?;
        self.open_bus(&Hypervisor::Xen, spec, conf, None)
    }

    /// Stops looking for vifs, and removes the ports of those found. Returns their number.
    pub(super) fn del_xen_auto(&mut self, name: &str) -> Option<usize> {
        self.xen_auto.take_if(|spec| spec.name == name)?;
        if let Some(bus) = self.xen.get_mut(&Hypervisor::Xen) {
            bus.bus.unset_auto(&mut bus.store);
        }
        let found = self.found();
        for name in &found {
            let _ = self.del_port(name);
        }
        Some(found.len())
    }

    /// Names of ports added by `xen:auto`.
    pub(super) fn found(&self) -> Vec<String> {
        let found = |p: &PortState| matches!(&p.attach, Attach::Xen(xen) if xen.found);
        let ports = self.ports.iter().filter(|(_, p)| found(p));
        ports.map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn add_xen(
        &mut self,
        spec: &PortSpec,
        conf: &Xen,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<PortState, RunError> {
        let (of, vif) = match &conf.at {
            XenAt::Vif(vif) => (Hypervisor::Xen, *vif),
            XenAt::Local(directory) => {
                vif_tap::check(spec, conf)?;
                (Hypervisor::Local(directory.clone()), LOCAL)
            }
            XenAt::Auto => return Err(RunError::Request("xen:auto is not a single port".into())),
        };
        if let Some(other) = self.port_of(&of, vif).filter(|other| !leaving.ports.contains(*other))
        {
            let what = format!("vif {vif} is already served by port '{other}'");
            return Err(RunError::Request(what));
        }
        let XenInherited { rings, local } =
            self.inherited.xen.remove(&spec.name).unwrap_or_default();
        self.open_bus(&of, spec, conf, local)?;
        let host = Arc::clone(&self.xen[&of].host);
        let tap = VifTap::of(conf);
        let pairs: Vec<Pair> = (0..conf.offer.queues).map(|_| Pair::new()).collect();
        let egress = pairs.iter().map(Pair::egress_queue).collect();
        let port = Arc::new(self.make_port(id, &spec.name, egress));
        if tap.is_some() {
            port.wire(None);
        }
        let ingress = pairs.iter().enumerate();
        let ingress: Vec<_> =
            ingress.map(|(i, p)| self.ingress(spec, i, &p.ingress_stats)).collect();
        let tuning = ingress.iter().map(|q| Arc::clone(&q.tuning));
        let log = Arc::new(PortLog::new(&spec.name, Arc::clone(&port.account), self.clock()));
        let queues = VifQueues {
            port: Arc::clone(&port),
            queues: pairs.iter().cloned().zip(tuning).collect(),
            pool: Arc::clone(&self.pool),
            fdb: Arc::clone(&self.fdb),
            log: Arc::clone(&log),
            tap: tap.as_ref().map(|tap| tap.wired.clone()),
        };
        // Mapped one by one: a guest's rings, and static grants of each queue.
        let most = u64::from(conf.offer.queues) * (STATIC_GRANTS_MAX as u64 + 2) + 1;
        port.account.set_limit("mappings", most.max(defaults::MAPPINGS));
        let account = Arc::clone(&port.account);
        let socket = Socket::new(host, vif, pairs, queues).charged_to(account).with_kept(rings);
        let socket = socket.keeping(self.keep.is_some());
        let handshake = Handshake::new(vif, conf.offer, socket, Instant::now());
        let xen = XenPort {
            of,
            id: vif,
            found: false,
            adopted: false,
            log,
            tap,
            handshake: Some(Box::new(handshake)),
            kept: VifState::default(),
            errors: Errors::default(),
            logged: String::new(),
            control: None,
            control_due: None,
            control_more: false,
        };
        let attach = Attach::Xen(Box::new(xen));
        Ok(PortState::new(spec, port, ingress, attach))
    }

    /// Begins the handshake of a port that has been added to the switch.
    pub(super) fn start_xen(&mut self, name: &str) {
        self.ensure_tap(name);
        let Some(xen) = self.xen_port(name) else { return };
        let (of, id) = (xen.of.clone(), xen.id);
        let Some(handshake) = xen.handshake.take() else { return };
        let Some(bus) = self.xen.get_mut(&of) else { return };
        let done = bus.bus.add(&mut bus.store, id, *handshake, Instant::now());
        self.finish_bus(&of, done);
    }

    /// Has a vif read its keys again.
    pub(super) fn poll_vif(&mut self, name: &str) {
        let Some(xen) = self.xen_port(name) else { return };
        let (of, id) = (xen.of.clone(), xen.id);
        let Some(XenBus { bus, store, .. }) = self.xen.get_mut(&of) else { return };
        let Some(vif) = bus.vif(id) else { return };
        let done = vif.poll(store, Instant::now());
        self.finish_bus(&of, done);
    }

    /// Stops serving a port's vif; its front end's state is left for the next back end.
    pub(super) fn del_xen(&mut self, name: &str, port: XenPort, leaving: &Leaving) {
        if let Some(bus) = self.xen.get_mut(&port.of) {
            bus.bus.remove(&mut bus.store, port.id);
        }
        if let Some(fd) = port.control {
            self.unwatch(fd.as_fd(), &Event::XenControl(name.into()));
        }
        // That of real Xen stays open.
        if port.of != Hypervisor::Xen && !leaving.directories.contains(&port.of) {
            self.close_bus(&port.of);
        }
    }

    /// Closes a hypervisor without ports.
    pub(super) fn close_bus(&mut self, of: &Hypervisor) {
        if let Some(bus) = self.xen.remove(of) {
            let store = bus.reconnect.probe().unwrap_or(bus.store.as_fd());
            self.unwatch(store, &Event::Xenstore(of.clone()));
            if let Some(changed) = bus.local.as_ref().and_then(|local| local.changed()) {
                self.unwatch(changed, &Event::LocalGuest(of.clone()));
            }
        }
    }

    fn xen_port(&mut self, name: &str) -> Option<&mut XenPort> {
        match &mut self.ports.get_mut(name)?.attach {
            Attach::Xen(port) => Some(port),
            _ => None,
        }
    }

    fn port_of(&self, of: &Hypervisor, id: VifId) -> Option<&str> {
        let mut ports = self.ports.iter();
        let is = |p: &PortState| matches!(&p.attach, Attach::Xen(x) if x.of == *of && x.id == id);
        ports.find(|(_, p)| is(p)).map(|(name, _)| name.as_str())
    }

    // ---- xenstore ----

    /// Opens a hypervisor; `inherited`: the directory of another process.
    fn open_bus(
        &mut self,
        of: &Hypervisor,
        spec: &PortSpec,
        conf: &Xen,
        inherited: Option<(BackState, Vec<OwnedFd>)>,
    ) -> Result<(), RunError> {
        if self.xen.contains_key(of) {
            return Ok(());
        }
        let error = |error| RunError::Xen { name: spec.name.clone(), error };
        let permissions = super::permissions(&spec.name, &conf.access)?;
        let local = match &conf.at {
            XenAt::Local(dir) => {
                let local = match inherited {
                    Some((state, fds)) => xen_local::Back::import(dir, state, fds),
                    None => xen_local::Back::open(dir, &permissions),
                };
                Some(Arc::new(local.map_err(HostError::from).map_err(error)?))
            }
            XenAt::Vif(_) | XenAt::Auto => None,
        };
        let host: Arc<dyn Back> = match &local {
            Some(local) => Arc::<xen_local::Back>::clone(local),
            None => open_host().map_err(error)?,
        };
        // This wait is longer than later ones: failing ends the start, or the operator's command.
        let store = DomainStore::new(host.store().map_err(HostError::from).map_err(error)?);
        let store = store.map_err(HostError::from).map_err(error)?;
        store.set_reply_wait(REPLY_WAIT);
        let mut bus = XenBus {
            host,
            local,
            changed: false,
            exported: None,
            store,
            bus: Bus::default(),
            reconnect: Reconnect::default(),
        };
        for port in self.ports.values() {
            if let Attach::Tap(queues) = &port.attach {
                bus.set_tap_memory(queues);
            }
        }
        let done = bus.bus.start(&mut bus.store, Instant::now());
        self.xen.insert(of.clone(), bus);
        self.watch_store(of)?;
        self.keep_local(of, spec)?;
        self.finish_bus(of, done);
        Ok(())
    }

    /// Finishes an operation on xenstore: adds and removes ports, and logs changes.
    pub(super) fn finish_bus(&mut self, of: &Hypervisor, done: Result<(), Failure>) {
        let found = match (done, self.xen.get_mut(of)) {
            (Ok(()), Some(bus)) => bus.bus.take_found(&mut bus.store, Instant::now()),
            (Err(failure), _) => Err(failure),
            (Ok(()), None) => return,
        };
        match found {
            Ok(found) => {
                if let Some(bus) = self.xen.get(of) {
                    // Only failures are followed by a rest.
                    bus.store.take_spent();
                }
                found.into_iter().for_each(|id| self.add_found(id));
            }
            Err(failure) => self.lose_xenstore(of, &failure),
        }
        self.remove_gone(of);
        self.update_vifs(of);
    }

    fn add_found(&mut self, id: VifId) {
        let Some(auto) = self.xen_auto.clone() else { return };
        let spec = found_spec(&auto, id);
        let added = api::port::check_name(&spec.name)
            .map_err(RunError::Request)
            .and_then(|()| self.insert_port(&spec));
        match added {
            Ok(()) => {
                if let Some(port) = self.xen_port(&spec.name) {
                    port.found = true;
                }
                self.touch_switch();
            }
            Err(error) => tracing::warn!("vif {id} is not served: {error}"),
        }
    }

    /// Removes ports that `xen:auto` added and whose vifs are gone.
    fn remove_gone(&mut self, of: &Hypervisor) {
        for name in self.found() {
            let Some(port) = self.xen_port(&name).filter(|port| port.of == *of) else { continue };
            let id = port.id;
            if self.xen.get_mut(of).and_then(|b| b.bus.vif(id)).is_some_and(|vif| vif.is_finished())
            {
                let _ = self.del_port(&name);
                self.touch_switch();
            }
        }
    }

    // ---- vifs ----

    /// Logs changes and watches the event channels of control rings.
    fn update_vifs(&mut self, of: &Hypervisor) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        let (mut changed, mut touched, mut followed) = (Vec::new(), Vec::new(), Vec::new());
        for (name, state) in &mut self.ports {
            let Attach::Xen(port) = &mut state.attach else { continue };
            let Some(vif) = bus.bus.vif(port.id).filter(|_| port.of == *of) else { continue };
            let status = vif.status();
            if port.logged != status.text {
                let why = status.error.map(|why| format!(": {why}")).unwrap_or_default();
                port.log.info(format_args!("vif {}: {}{why}", port.id, status.text));
                port.logged = status.text;
            }
            let is_up = state.port.active() > 0;
            if port.tap.as_mut().is_some_and(|tap| tap.follow(is_up)) {
                followed.push(state.port.id);
            }
            let now = vif.export();
            if port.kept != now {
                port.kept = now;
                touched.push(name.clone());
            }
            let control = vif.plug().control();
            let same = match (&port.control, &control) {
                (Some(old), Some(new)) => Arc::ptr_eq(old, new),
                (old, new) => old.is_none() && new.is_none(),
            };
            if !same {
                changed.push((name.clone(), std::mem::replace(&mut port.control, control)));
            }
        }
        touched.iter().for_each(|name| self.touch(name));
        followed.into_iter().for_each(|id| self.follow(id));
        for (name, old) in changed {
            let what = Event::XenControl(name.clone());
            if let Some(old) = old {
                self.unwatch(old.as_fd(), &what);
            }
            if let Some(new) = self.xen_port(&name).and_then(|port| port.control.clone()) {
                if let Err(error) = self.watch(new.as_fd(), what) {
                    tracing::error!(port = name, "{error}");
                }
                // The event for pending requests may have been consumed by an earlier owner.
                self.serve_control(&name);
            }
        }
    }

    /// Serves a vif's control ring, then suspends it.
    pub(super) fn serve_control(&mut self, name: &str) {
        // A request of which a killed process did a part costs the vif its rings, not the reply.
        self.begin_message(name);
        let _serving = self.ports.get(name).map(|state| Serving::port(state.port.id));
        let Some(port) = self.xen_port(name) else { return };
        let begin = Instant::now();
        port.control_due = Some(begin + CONTROL_INTERVAL);
        let (of, id) = (port.of.clone(), port.id);
        self.watch_control_ring(name, false);
        let Some(vif) = self.xen.get_mut(&of).and_then(|b| b.bus.vif(id)) else { return };
        let served = vif.plug().serve_control();
        let end = Instant::now();
        if let Some(port) = self.xen_port(name) {
            port.control_due = Some(end + control_rest(end - begin));
            port.control_more = served == Ok(true);
        }
        if let Err(malformed) = served {
            if let Some(state) = self.ports.get_mut(name) {
                state.faults += 1;
            }
            self.fault_vif(name, &format!("control ring: {malformed}"));
        }
    }

    /// Resumes a suspended control ring.
    fn resume_control(&mut self, name: &str) {
        let Some(port) = self.xen_port(name) else { return };
        port.control_due = None;
        if port.control_more {
            self.serve_control(name);
        } else {
            self.watch_control_ring(name, true);
        }
    }

    fn watch_control_ring(&mut self, name: &str, on: bool) {
        let what = Event::XenControl(name.into());
        let token = self.tokens.iter().find(|(_, w)| **w == what).map(|(token, _)| *token);
        let control = self.xen_port(name).and_then(|port| port.control.clone());
        if let Some((control, token)) = control.zip(token) {
            let _ = self.epoll.change(control.as_fd(), token, on, false);
        }
    }

    /// Handles a protocol violation: the guest loses its rings.
    pub(super) fn fault_vif(&mut self, name: &str, why: &str) {
        let Some(port) = self.xen_port(name) else { return };
        let (of, id, log) = (port.of.clone(), port.id, Arc::clone(&port.log));
        let Some(bus) = self.xen.get_mut(&of) else { return };
        let Some(vif) = bus.bus.vif(id) else { return };
        // Rings that turned to zeroes cause arbitrary faults; report the actual cause.
        let why = if vif.plug().is_lost() { "it revoked the memory of its rings" } else { why };
        // Logged once: later reports find it stopped.
        if vif.status().queues > 0 {
            log.warn(format_args!("stopped: its guest violated the protocol: {why}"));
        }
        let done = vif.fault(&mut bus.store, why, Instant::now());
        self.finish_bus(&of, done);
        if let Some(state) = self.ports.get(name) {
            state.port.end_epoch();
        }
    }

    /// Time of the next action without an event.
    pub(super) fn xen_due(&self) -> Option<Instant> {
        let control = self.ports.values().filter_map(|p| match &p.attach {
            Attach::Xen(port) => port.control_due,
            _ => None,
        });
        let taps = self.ports.values().filter_map(|p| match &p.attach {
            Attach::Xen(port) => port.tap.as_ref()?.due(),
            _ => None,
        });
        self.xen.values().filter_map(XenBus::due).chain(control).chain(taps).min()
    }

    /// Runs actions that are due.
    pub(super) fn xen_tick(&mut self) {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let buses: Vec<_> =
            self.xen.iter().filter(|(_, b)| due(b.due())).map(|(of, _)| of.clone()).collect();
        for of in buses {
            let Some(bus) = self.xen.get_mut(&of) else { continue };
            if due(bus.reconnect.due()) {
                self.retry_xenstore(&of);
            } else {
                let done = bus.bus.tick(&mut bus.store, now);
                self.finish_bus(&of, done);
            }
        }
        self.tick_vif_taps(now);
        let is_due = |p: &PortState| matches!(&p.attach, Attach::Xen(x) if due(x.control_due));
        let names: Vec<_> =
            self.ports.iter().filter(|(_, p)| is_due(p)).map(|(name, _)| name.clone()).collect();
        for name in names {
            self.resume_control(&name);
        }
    }

    /// A vif in `ctl show`.
    pub(super) fn show_xen(&self, state: &PortState, port: &XenPort) -> Value {
        let bus = self.xen.get(&port.of);
        let vif = bus.and_then(|b| b.bus.vifs().find(|(id, _)| *id == port.id));
        let Some((id, vif)) = vif else { return Value::Null };
        let status = vif.status();
        let is_connected = bus.is_some_and(|bus| bus.reconnect.due().is_none());
        let stalled_s = state.stalled_s(self.pool.now());
        json!({
            "vif": id.to_string(),
            "front": status.front.to_string(),
            "back": status.back.to_string(),
            "state": state_text(status.text, &stalled_s, status.queues),
            "error": status.error,
            "takes": status.features,
            "queues": status.queues,
            "xenstore": if is_connected { "connected" } else { "lost" },
        })
    }
}

/// Opens the host interface of real Xen.
fn open_host() -> Result<Arc<dyn Back>, HostError> {
    let host = host::xen::Back::open()?;
    if host.private(1).is_none() {
        tracing::info!(
            "cannot allocate grantable pages, copies are slower: \
             modprobe xen-gntalloc limit=16384"
        );
    }
    Ok(Arc::new(host))
}

/// For how long a control ring is not served after a poll that took so long.
fn control_rest(took: Duration) -> Duration {
    (took * CONTROL_PART).max(CONTROL_INTERVAL)
}

/// The state of a vif, and for how many seconds each stalled queue has had no buffers.
fn state_text(text: String, stalled_s: &[u64], queues: usize) -> String {
    let Some(s) = stalled_s.iter().max() else { return text };
    let stalled = match stalled_s.len() {
        n if n < queues => format!("{n} of {queues} queues stalled for {s} s"),
        _ => format!("receiver stalled for {s} s"),
    };
    format!("{text}, {stalled}: its driver posts no buffers")
}

/// The port name for a vif added by `xen:auto`, which is also Linux's interface name.
pub(super) fn vif_name(id: VifId) -> String {
    format!("vif{}.{}", id.domid, id.devid)
}

/// The port specification for a vif added by `xen:auto`.
pub(super) fn found_spec(auto: &PortSpec, id: VifId) -> PortSpec {
    let Kind::Xen(xen) = &auto.kind else { unreachable!("xen:auto is a Xen port") };
    let kind = Kind::Xen(Xen { at: XenAt::Vif(id), ..xen.clone() });
    PortSpec { name: vif_name(id), kind, tuning: auto.tuning.clone() }
}

#[cfg(test)]
mod tests;
