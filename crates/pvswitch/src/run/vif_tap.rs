//! TAPs of vifs (`tap=vif`): each vif has an interface of the host with the name that xen-netback's
//! would have, and its port is wired to the TAP's
//! ([0037](../../../../docs/design/0037-drop-in-netback.md)).
//!
//! ```text
//!   vif found ─▶ TAP, event `online` ─▶ InitWait ─▶ script ─▶ hotplug-status ─▶ carrier, Connected
//! ```
//! A TAP that cannot be created is retried; until then the vif waits, and says why.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use os::Backoff;
use shm::sync::{Lock, Mutex, MutexGuard};
use switch::fdb::PortId;
use switch::forward::Mode;
use xen_netif::back::{Interface, VifId};

use super::endpoint::jitter;
use super::handover::PortOffer;
use super::reload::Leaving;
use super::xen::{XenPort, vif_name};
use super::{Attach, PortState, RunError, System};
use crate::spec::{Kind, PortSpec, PortTuning, Tap, Xen};
use crate::tenant::Tenant;

/// End of the name of a TAP's port; the rest is the name of its interface.
const SUFFIX: &str = "-tap";
/// The kernel learns of a vif when we do: intervals at which the event `online` is tried, and for
/// how long.
const ONLINE_EVERY: Duration = Duration::from_millis(50);
const ONLINE_MAX: Duration = Duration::from_secs(5);

/// What the rings of a vif and the control thread share.
#[derive(Clone)]
pub(super) struct Wired(Arc<Mutex<State>>);

struct State {
    interface: Interface,
    /// A queue of the TAP.
    queue: Option<Arc<OwnedFd>>,
    /// The carrier, as last set.
    carrier: Option<bool>,
}

impl Wired {
    fn new() -> Self {
        let interface = Interface::Missing("its interface is not created yet".into());
        Self(Arc::new(Mutex::new(Lock::VifTap, State { interface, queue: None, carrier: None })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// The interface, as the handshake sees it.
    pub(super) fn interface(&self) -> Interface {
        self.state().interface.clone()
    }

    /// Sets the carrier: that of the vif.
    pub(super) fn set_carrier(&self, on: bool) {
        let mut state = self.state();
        let Some(queue) = state.queue.as_ref().filter(|_| state.carrier != Some(on)) else {
            return;
        };
        if let Err(error) = uplink::set_carrier(&**queue, on) {
            tracing::debug!("cannot set the carrier: {error}");
        }
        state.carrier = Some(on);
    }
}

/// The TAP of a vif, as its port keeps it.
pub(super) struct VifTap {
    pub(super) wired: Wired,
    /// Whether it has the offloads of the connected front end.
    follows: bool,
    /// When to create it again.
    retry: Option<Instant>,
    backoff: Backoff,
    /// When to send the event `online` again, and until when.
    online: Option<(Instant, Instant)>,
}

impl VifTap {
    /// Of a port with this setting, if it has one.
    pub(super) fn of(conf: &Xen) -> Option<Self> {
        conf.tap.then(|| Self {
            wired: Wired::new(),
            follows: false,
            retry: None,
            backoff: Backoff::default(),
            online: None,
        })
    }

    /// Sets the carrier of a vif that is or is not connected. Returns whether its front end is new:
    /// the TAP must follow its offloads.
    pub(super) fn follow(&mut self, is_up: bool) -> bool {
        self.wired.set_carrier(is_up);
        let followed = std::mem::replace(&mut self.follows, is_up);
        is_up && !followed
    }

    /// Time of its next action without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        self.retry.into_iter().chain(self.online.map(|(at, _)| at)).min()
    }
}

/// Checks that TAPs can be created, if the port needs some: better now than at the first guest.
pub(super) fn check(spec: &PortSpec, conf: &Xen) -> Result<(), RunError> {
    let checked = if conf.tap { uplink::check_permission() } else { Ok(()) };
    checked.map_err(|error| RunError::Tap { name: spec.name.clone(), error })
}

/// Settings of a TAP's port: those of its vif's port, whose rules are about the guest.
pub(super) fn tuning(of: &PortTuning) -> PortTuning {
    PortTuning { tenant: Tenant::default(), ..of.clone() }
}

impl System {
    /// Specification of the TAP's port of a vif's port.
    fn tap_spec(&self, vif: &PortSpec, ifname: String) -> PortSpec {
        let offered = match &vif.kind {
            Kind::Xen(conf) => conf.offer.queues,
            _ => 1,
        };
        // More are not served at once.
        let workers = u16::try_from(self.pool.workers().len()).unwrap_or(u16::MAX);
        let tap = Tap {
            queues: offered.min(workers).max(1),
            netns: None,
            mtu: None,
            persist: None,
            evpn: None,
            of_vif: true,
            ifname: ifname.clone(),
        };
        let name = format!("{ifname}{SUFFIX}");
        PortSpec { name, kind: Kind::Tap(tap), tuning: tuning(&vif.tuning) }
    }

    /// Specification of the port `name`, the TAP of a vif's port, in another process.
    pub(super) fn spec_of_tap(&self, name: &str, vif: &str) -> Option<PortSpec> {
        let vif = self.config.port(vif).map(PortSpec::from).or_else(|| self.xen_auto.clone())?;
        Some(self.tap_spec(&vif, name.strip_suffix(SUFFIX)?.into()))
    }

    fn vif_tap(&mut self, vif: &str) -> Option<(VifId, &mut VifTap)> {
        match &mut self.ports.get_mut(vif)?.attach {
            Attach::Xen(port) => Some((port.id, port.tap.as_mut()?)),
            _ => None,
        }
    }

    /// Creates the TAP of a vif's port, if it is to have one and has none; later, if that fails.
    /// Returns whether it was created.
    pub(super) fn ensure_tap(&mut self, vif: &str) -> bool {
        let Some(state) = self.ports.get(vif).filter(|state| state.wired.is_none()) else {
            return false;
        };
        let Attach::Xen(port) = &state.attach else { return false };
        let (spec, id) = (state.spec.clone(), port.id);
        let bus = self.xen.get(&port.of).filter(|_| port.tap.is_some());
        let Some(bus) = bus else { return false };
        // One that xen-netback serves may have its interface under another name.
        let added = match bus.host.claimed_by(id.domid, id.devid) {
            Some(who) => Err(RunError::Conflict(who)),
            None => self.add_tap_of(&self.tap_spec(&spec, vif_name(id)), vif),
        };
        let Some((_, own)) = self.vif_tap(vif) else { return false };
        own.retry = None;
        if let Err(error) = added {
            own.retry = Some(Instant::now() + own.backoff.next(jitter()));
            let why = Interface::Missing(error.to_string());
            if std::mem::replace(&mut own.wired.state().interface, why.clone()) != why {
                tracing::warn!(port = vif, "vif {id} waits for its interface: {error}");
            }
            return false;
        }
        own.backoff.reset();
        own.online = Some((Instant::now(), Instant::now() + ONLINE_MAX));
        self.send_online(vif);
        true
    }

    fn add_tap_of(&mut self, spec: &PortSpec, vif: &str) -> Result<(), RunError> {
        api::port::check_name(&spec.name).map_err(RunError::Request)?;
        let taken = self.xen_auto.as_ref().is_some_and(|auto| auto.name == spec.name);
        if taken || self.ports.contains_key(&spec.name) {
            return Err(RunError::DuplicatePort(spec.name.clone()));
        }
        let id = self.free_id()?;
        let prepared = self.prepare_port(spec, id, &Leaving::default())?;
        self.install(vec![prepared]);
        self.wire(&spec.name, vif);
        self.touch(&spec.name);
        self.touch_switch();
        Ok(())
    }

    /// Wires a TAP's port to that of its vif. Both are kept from others already.
    fn wire(&mut self, tap: &str, vif: &str) {
        let ids = [tap, vif].map(|name| self.ports.get(name).map(|state| state.port.id));
        let [Some(tap_id), Some(vif_id)] = ids else { return };
        let mut queue = None;
        for (name, other, to) in [(tap, vif, vif_id), (vif, tap, tap_id)] {
            let Some(state) = self.ports.get_mut(name) else { continue };
            state.port.wire(Some(to));
            state.wired = Some(other.into());
            if let Attach::Tap(tap) = &state.attach {
                queue = tap.fds.first().cloned();
            }
        }
        if let Some((_, own)) = self.vif_tap(vif) {
            let mut state = own.wired.state();
            (state.interface, state.queue) = (Interface::Exists, queue);
        }
    }

    /// Wires a port that another process had wired, once both are there.
    pub(super) fn rewire(&mut self, offer: &PortOffer) {
        let Some(vif) = offer.wired.as_deref().filter(|_| self.ports.contains_key(&offer.name))
        else {
            return;
        };
        if self.vif_tap(vif).is_some() {
            self.wire(&offer.name, vif);
        } else {
            self.take_down(&offer.name, &Leaving::default());
        }
    }

    /// The vif's port of a TAP that belongs to it.
    pub(super) fn owner_of(&self, tap: &str) -> Option<&str> {
        let state = self.ports.get(tap)?;
        state.wired.as_deref().filter(|_| matches!(state.attach, Attach::Tap(_)))
    }

    /// Has the kernel send the event `online`, for toolstacks that use udev.
    fn send_online(&mut self, vif: &str) {
        let Some(state) = self.ports.get(vif) else { return };
        let Attach::Xen(port) = &state.attach else { return };
        let XenPort { id, of, .. } = &**port;
        let sent = self.xen.get(of).map(|bus| bus.host.send_online(id.domid, id.devid));
        if let Some(Err(error)) = &sent {
            tracing::debug!(port = vif, "cannot send the event online: {error}");
        }
        let Some((_, own)) = self.vif_tap(vif) else { return };
        let again = Instant::now() + ONLINE_EVERY;
        let waits = matches!(sent, Some(Ok(false)));
        own.online =
            own.online.filter(|(_, end)| waits && again < *end).map(|(_, end)| (again, end));
    }

    /// Runs what is due for TAPs of vifs.
    pub(super) fn tick_vif_taps(&mut self, now: Instant) {
        let is_due = |tap: &VifTap| tap.due().is_some_and(|at| at <= now);
        let is_due = |attach: &Attach| match attach {
            Attach::Xen(port) => port.tap.as_ref().is_some_and(is_due),
            _ => false,
        };
        let due = self.ports.iter().filter(|(_, state)| is_due(&state.attach));
        for vif in due.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            let Some((_, own)) = self.vif_tap(&vif) else { continue };
            let (retries, announces) = (own.retry, own.online);
            if announces.is_some_and(|(at, _)| at <= now) {
                self.send_online(&vif);
            }
            if retries.is_some_and(|at| at <= now) && self.ensure_tap(&vif) {
                self.poll_vif(&vif);
            }
        }
    }

    /// Ports between which all frames pass, if this is one of them: two that are wired, or partners
    /// of a cross-connect.
    pub(super) fn pair_of(&self, id: PortId) -> Option<[PortId; 2]> {
        let state = self.ports.values().find(|state| state.port.id == id);
        if let Some(state) = state.filter(|state| state.port.is_wired()) {
            return Some([id, state.port.wired_to()?]);
        }
        let other = PortId(id.0 ^ 1);
        let is_wired = |state: &PortState| state.port.id == other && state.port.is_wired();
        let is_free = self.options.mode == Mode::Cross && !self.ports.values().any(is_wired);
        is_free.then_some([id, other])
    }
}
