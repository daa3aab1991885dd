//! Vifs handed to another process, and taken over from one.
//!
//! ```text
//!   offer     state of the handshake, keys of the rings; event channels; a directory's sockets
//!   adopt     reads xenstore, maps rings: the other process still serves them
//!   handed    positions of rings
//!   resume    serves them
//!   settle    restarts vifs that could not be adopted: the first writes to xenstore
//! ```

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use vhost_user::backend::{Descriptors, Exported, ImportError, export_fd};
use xen_local::BackState;
use xen_netif::back::{KeptRings, RingPositions, RingsState, VifId, VifState};

use super::xen::{Hypervisor, XenBus, XenPort, found_spec};
use super::{Attach, Event, PortState, RunError, System};
use crate::spec::{Kind, PortSpec, Xen, XenAt};

/// State of a Xen port for another process. Descriptors are indices into the list that goes with
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct XenOffer {
    /// The vif, if `xen:auto` found it.
    found: Option<(u16, u32)>,
    vif: VifState,
    rings: Option<(RingsState, Vec<u32>)>,
    /// The directory of a vif without Xen.
    local: Option<(BackState, Vec<u32>)>,
}

/// Descriptors of an offer, and what they are for.
#[derive(Default)]
pub(super) struct XenInherited {
    pub(super) rings: Option<KeptRings>,
    pub(super) local: Option<(BackState, Vec<OwnedFd>)>,
}

impl XenOffer {
    /// The vif, if `xen:auto` found it.
    pub(super) fn found(&self) -> Option<VifId> {
        self.found.map(|(domid, devid)| VifId { domid, devid })
    }

    /// Takes its descriptors.
    pub(super) fn take(&self, fds: &mut Descriptors) -> Result<XenInherited, ImportError> {
        let mut take =
            |at: &[u32]| at.iter().map(|at| fds.take(*at)).collect::<Result<Vec<_>, _>>();
        let mut all = XenInherited::default();
        if let Some((state, at)) = &self.rings {
            let fds = take(at)?.into_iter().map(Arc::new).collect();
            all.rings = Some(KeptRings { state: state.clone(), fds });
        }
        if let Some((state, at)) = &self.local {
            all.local = Some((state.clone(), take(at)?));
        }
        Ok(all)
    }
}

/// Whether a port is one that `xen:auto` found.
pub(super) fn is_found(attach: &Attach) -> bool {
    matches!(attach, Attach::Xen(xen) if xen.found)
}

/// The offer of a port.
pub(super) fn offer<'a>(
    xen: &'a BTreeMap<Hypervisor, XenBus>,
    port: &'a XenPort,
    fds: &mut Exported<'a>,
) -> Option<XenOffer> {
    let bus = xen.get(&port.of)?;
    let mut export = |fd: &'a Arc<OwnedFd>| export_fd(fds, fd.as_fd());
    let vif = bus.bus.get(port.id)?;
    let rings = vif.rings().export();
    let rings = rings.map(|(state, all)| (state, all.into_iter().map(&mut export).collect()));
    let local = bus.exported.as_ref();
    let local = local.map(|(state, all)| (state.clone(), all.iter().map(&mut export).collect()));
    let found = port.found.then_some((port.id.domid, port.id.devid));
    Some(XenOffer { found, vif: vif.export(), rings, local })
}

/// Where another process continues with a port's rings.
pub(super) fn positions(
    xen: &BTreeMap<Hypervisor, XenBus>,
    port: &XenPort,
) -> Option<RingPositions> {
    xen.get(&port.of)?.bus.get(port.id)?.rings().positions()
}

impl System {
    /// Stops serving guests without Xen, and their stores, while they are handed over.
    pub(super) fn pause_local(&mut self) {
        for bus in self.xen.values_mut() {
            if let Some(local) = &bus.local {
                local.pause();
                bus.exported = Some(local.export());
            }
        }
    }

    /// Serves them again, or those of another process.
    pub(super) fn resume_local(&mut self) {
        for (of, bus) in &mut self.xen {
            bus.exported = None;
            if let Some(Err(error)) = bus.local.as_ref().map(|local| local.resume()) {
                tracing::error!("{of:?}: {error}");
            }
        }
    }

    /// Has the state of a directory kept, if the switch is.
    pub(super) fn keep_local(&mut self, of: &Hypervisor, spec: &PortSpec) -> Result<(), RunError> {
        let Some(local) = self.xen.get(of).and_then(|bus| bus.local.clone()) else {
            return Ok(());
        };
        if self.keep.is_none() {
            return Ok(());
        }
        let error = |error: xen_local::Error| RunError::Xen {
            name: spec.name.clone(),
            error: error.into(),
        };
        local.keep().map_err(error)?;
        if let Some(changed) = local.changed() {
            self.watch(changed, Event::LocalGuest(of.clone()))?;
        }
        Ok(())
    }

    /// A front end without Xen waits until a change of its domain is kept.
    pub(super) fn read_local(&mut self, of: &Hypervisor) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        if let Some(changed) = bus.local.as_ref().and_then(|local| local.changed()) {
            os::drain(changed);
            bus.changed = true;
        }
        let is_of = |state: &PortState| matches!(&state.attach, Attach::Xen(x) if x.of == *of);
        let ports = self.ports.iter().filter(|(_, state)| is_of(state));
        for name in ports.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.touch(&name);
        }
    }

    /// Has front ends continue whose changes are kept.
    pub(super) fn confirm_local(&mut self) {
        for bus in self.xen.values_mut() {
            if std::mem::take(&mut bus.changed) {
                bus.local.iter().for_each(|local| local.confirm());
            }
        }
    }

    /// Reads the state of a port's directory for its record, or forgets it.
    pub(super) fn export_local(&mut self, name: &str, on: bool) {
        let Some(Attach::Xen(port)) = self.ports.get(name).map(|state| &state.attach) else {
            return;
        };
        if let Some(bus) = self.xen.get_mut(&port.of) {
            let local = bus.local.as_ref().filter(|_| on);
            bus.exported = local.map(|local| local.export());
        }
    }

    /// Prepares `xen:auto` of another process, before its ports.
    pub(super) fn adopt_auto(&mut self) -> Result<(), RunError> {
        let all = self.config.ports.iter().map(PortSpec::from);
        let is_auto =
            |spec: &PortSpec| matches!(&spec.kind, Kind::Xen(Xen { at: XenAt::Auto, .. }));
        let Some(spec) = all.into_iter().find(is_auto) else { return Ok(()) };
        self.open_auto(&spec)?;
        self.xen_auto = Some(spec);
        Ok(())
    }

    /// Specification of a port that `xen:auto` found.
    pub(super) fn spec_of_found(&self, vif: VifId) -> Option<PortSpec> {
        self.xen_auto.as_ref().map(|auto| found_spec(auto, vif))
    }

    /// Follows a vif from the state of another process. One that cannot is set up again later.
    pub(super) fn adopt_vif(&mut self, name: &str, offer: &XenOffer) {
        let Some(port) = self.ports.get_mut(name) else { return };
        let Attach::Xen(port) = &mut port.attach else { return };
        port.found = offer.found.is_some();
        let Some(bus) = self.xen.get_mut(&port.of) else { return };
        let Some(handshake) = &mut port.handshake else { return };
        match handshake.adopt(&mut bus.store, &offer.vif) {
            Ok(()) => port.adopted = true,
            Err(why) => tracing::warn!(port = name, "vif {} is set up again: {why}", port.id),
        }
    }

    /// Gives up the rings of a vif that another process served when it panicked, and does not serve
    /// it before `until`.
    pub(super) fn hold_vif(&mut self, name: &str, until: Instant) {
        let Some(Attach::Xen(port)) = self.ports.get_mut(name).map(|port| &mut port.attach) else {
            return;
        };
        if let Some(handshake) = &mut port.handshake {
            handshake.hold_down(until);
        }
    }

    /// Serves the rings of an adopted vif.
    pub(super) fn resume_vif(&mut self, name: &str, at: Option<&RingPositions>) {
        let Some(port) = self.ports.get_mut(name) else { return };
        let Attach::Xen(port) = &mut port.attach else { return };
        if !port.adopted {
            return;
        }
        let Some(bus) = self.xen.get_mut(&port.of) else { return };
        let Some(mut handshake) = port.handshake.take() else { return };
        if let Err(why) = handshake.resume(at) {
            tracing::warn!(port = name, "vif {} is set up again: {why}", port.id);
            port.handshake = Some(handshake);
            return;
        }
        // Changes since it was adopted are events, except of a domain that was destroyed.
        handshake.poll_soon(Instant::now());
        bus.bus.insert(port.id, *handshake);
    }

    /// Starts vifs that were not adopted, and the search for new ones.
    pub(super) fn settle_vifs(&mut self) {
        let is_xen = |state: &PortState| matches!(state.attach, Attach::Xen(_));
        let ports = self.ports.iter().filter(|(_, state)| is_xen(state));
        let names: Vec<_> = ports.map(|(name, _)| name.clone()).collect();
        for name in &names {
            // Those of adopted vifs are there, unless a killed process could not keep them.
            if self.ensure_tap(name) {
                tracing::warn!(port = name, "its interface is new: run its hotplug script again");
            }
            self.start_xen(name);
        }
        for of in self.xen.keys().cloned().collect::<Vec<_>>() {
            let Some(bus) = self.xen.get_mut(&of) else { continue };
            let done = match self.xen_auto.is_some() && of == Hypervisor::Xen {
                true => bus.bus.set_auto(&mut bus.store),
                false => Ok(()),
            };
            self.finish_bus(&of, done);
        }
    }
}
