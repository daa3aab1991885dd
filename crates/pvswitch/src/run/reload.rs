//! `ctl reload` and SIGHUP: applies what differs between the running configuration and its file.
//!
//! ```text
//!   read, check ─▶ diff ─▶ prepare: sockets, TAPs, MTUs, addresses ─▶ commit: cannot fail
//!                             └─ on an error: undone, the switch is as before
//! ```
//! All of it happens on the control thread between two events: no request and no connection is
//! handled in between, and workers keep forwarding. Ports that do not differ are not touched
//! ([0021](../../../../docs/design/0021-reload.md)).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::config::{Diff, PortDiff, SettingDiff};
use api::file::Problems;
use api::{Config, PORTS_MAX, PortText};
use os::{Carries, Listener};
use serde_json::{Value, json};
use switch::fdb::PortId;
use switch::forward::Mode;
use switch::hold::HOLD_DEFAULT;
use switch::schedule::{Placement, token};

use super::endpoint::Address;
use super::vif_tap;
use super::xen::Hypervisor;
use super::{Attach, Event, PortState, RunError, System};
use crate::config::Reloaded;
use crate::hints;
use crate::spec::{Kind, PortSpec, PortTuning, Xen, XenAt, policy};
use crate::worker::Served;

/// A port that is not in the switch yet.
pub(super) struct Prepared {
    pub(super) state: PortState,
    /// Queues to be served from its start.
    pub(super) served: Vec<Served>,
}

impl Prepared {
    /// A port whose queues start later.
    pub(super) fn new(state: PortState) -> Self {
        Self { state, served: Vec::new() }
    }
}

/// Ports that are being removed, and what of them the ports that are being added use.
#[derive(Default)]
pub(super) struct Leaving {
    /// Their names.
    pub(super) ports: BTreeSet<String>,
    /// Paths of listeners that stay, what they carry, and the names of the ports that get them.
    sockets: BTreeMap<PathBuf, (Carries, String)>,
    /// Directories of xen-local that stay.
    pub(super) directories: BTreeSet<Hypervisor>,
}

impl Leaving {
    /// One port, of which nothing is used.
    pub(super) fn one(name: &str) -> Self {
        Self { ports: BTreeSet::from([name.into()]), ..Self::default() }
    }

    /// The port that gets the listener of this path.
    pub(super) fn next(&self, path: &Path, carries: Carries) -> Option<&String> {
        let (of, name) = self.sockets.get(path)?;
        (*of == carries).then_some(name)
    }
}

/// Changes of a reload before its commit, to undo them.
#[derive(Default)]
struct Undo {
    ports: Vec<Prepared>,
    /// Hypervisors opened.
    opened: Vec<Hypervisor>,
    /// Interfaces whose MTU was set: name, namespace, and MTU before.
    mtus: Vec<(String, Option<String>, u32)>,
    /// Interfaces whose persistence was set: a queue, name, and whether they persisted before.
    persists: Vec<(Arc<OwnedFd>, String, bool)>,
    /// Ports whose sockets got other permissions, and those before.
    permissions: Vec<(String, os::Permissions)>,
}

impl System {
    /// Reloads on SIGHUP.
    pub(super) fn reload_on_signal(&mut self) {
        // Also if nothing is reloaded: with Type=notify-reload systemd waits for both messages.
        self.manager.reloading();
        self.reload_and_log();
        self.report_ready();
    }

    fn reload_and_log(&mut self) {
        if self.options.origin.file.is_none() {
            tracing::info!("SIGHUP ignored: there is no configuration file (run --config FILE)");
            return;
        }
        match self.reload(false) {
            Ok(_) => {}
            // One line each.
            Err(RunError::Config(Problems(problems))) => {
                for problem in problems {
                    tracing::error!("SIGHUP: nothing was changed: {problem}");
                }
            }
            Err(error) => tracing::error!("SIGHUP: nothing was changed: {error}"),
        }
    }

    /// Returns the running configuration as a file.
    pub(super) fn saved(&self) -> Result<Value, RunError> {
        let names = self.config.ports.iter().map(|port| &port.name).collect::<BTreeSet<_>>();
        let mut ids = names.into_iter().map(|name| self.ports.get(name).map(|port| port.port.id.0));
        let mut at = 0..;
        if self.is_numbered() && !ids.all(|id| id == at.next()) {
            let what = "forward=cross connects the ports of a file in the order of their names, \
                        which differs from that of the running ports: give them other names";
            return Err(RunError::Conflict(what.into()));
        }
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let own = &self.options.origin.command_line.ports;
        Ok(json!({
            "command_line": own.iter().map(|port| &port.name).collect::<Vec<_>>(),
            "config": self.config.to_toml(),
            "file": path(&self.options.origin.file),
            "include": path(&self.options.include),
        }))
    }

    /// Whether the numbers of ports follow from the file. Vifs found by xen:auto get any number.
    fn is_numbered(&self) -> bool {
        self.options.mode == Mode::Cross && self.xen_auto.is_none()
    }

    /// Reads the file again and applies what differs, or only reports it.
    ///
    /// # Errors
    /// The file is invalid, or a part cannot be applied; nothing was changed.
    pub(super) fn reload(&mut self, dry_run: bool) -> Result<Value, RunError> {
        let Some(path) = self.options.origin.file.clone() else {
            let what = "there is no configuration file to reload: the switch was started without \
                        --config FILE";
            return Err(RunError::Conflict(what.into()));
        };
        let Reloaded { config: wanted, include, warnings } = self.options.origin.reload(&path)?;
        let diff = self.config.diff(&wanted);
        let mut report = report(&diff);
        report["file"] = path.display().to_string().into();
        report["dry_run"] = dry_run.into();
        report["warnings"] = json!(warnings);
        if dry_run {
            return Ok(report);
        }
        if !diff.restart.is_empty() {
            let list: Vec<_> = diff.restart.iter().map(text).collect();
            let what = format!("a restart of the switch is needed for {}", list.join(", "));
            return Err(RunError::Conflict(what));
        }
        self.check_order(&diff, &wanted)?;
        let leaving = self.leaving(&diff);
        let mut undo = Undo::default();
        if let Err(error) = self.prepare(&diff, &leaving, &wanted, &mut undo) {
            self.undo(undo);
            return Err(error);
        }
        self.options.include = include;
        self.commit(&diff, &leaving, undo.ports, wanted);
        self.touch_all();
        self.publish(api::event::Event::Reload {
            added: diff.added.len(),
            removed: diff.removed.len(),
            replaced: diff.replaced.len(),
            changed: diff.changed.len(),
        });
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        tracing::info!("configuration reloaded from {}: {}", path.display(), summary(&diff));
        Ok(report)
    }

    /// In cross mode a port is connected by its number, which must be that of a fresh start.
    fn check_order(&self, diff: &Diff, wanted: &Config) -> Result<(), RunError> {
        if !self.is_numbered() {
            return Ok(());
        }
        let added: BTreeSet<_> = diff.added.iter().map(|port| &port.name).collect();
        for (at, port) in wanted.ports.iter().enumerate() {
            let id = self.ports.get(&port.name).map(|port| usize::from(port.port.id.0));
            if !added.contains(&port.name) && id.is_some_and(|id| id != at) {
                return Err(RunError::Request(format!(
                    "forward=cross: port '{}' would be connected to another port: restart the \
                     switch, or choose names that keep the order",
                    port.name
                )));
            }
        }
        Ok(())
    }

    /// Which ports are removed, and what stays of them.
    fn leaving(&self, diff: &Diff) -> Leaving {
        let replaced = diff.replaced.iter().map(|port| &port.port.name);
        let ports: BTreeSet<String> = diff.removed.iter().chain(replaced).cloned().collect();
        let mut leaving = Leaving { ports, ..Leaving::default() };
        let mut sockets = BTreeMap::new();
        for name in &leaving.ports {
            match self.ports.get(name).map(|port| &port.attach) {
                Some(Attach::Xen(xen)) => {
                    leaving.directories.insert(xen.of.clone());
                }
                Some(attach) => {
                    let end = attach.endpoint();
                    let own = end.and_then(|end| Some((end.listener.as_ref()?, end)));
                    let own = own.map(|(l, end)| (l.path().to_path_buf(), end.address.carries));
                    sockets.extend(own);
                }
                None => {}
            }
        }
        let mut needed = BTreeSet::new();
        for port in added(diff) {
            let kind = PortSpec::from(port).kind;
            if let Some(Address { own: Some(own), carries, .. }) = Address::of(&kind)
                && sockets.get(&own) == Some(&carries)
            {
                leaving.sockets.insert(own, (carries, port.name.clone()));
            }
            if let Kind::Xen(Xen { at: XenAt::Local(directory), .. }) = kind {
                needed.insert(Hypervisor::Local(directory));
            }
        }
        leaving.directories.retain(|of| needed.contains(of));
        leaving
    }

    /// Does all that can fail.
    fn prepare(
        &mut self,
        diff: &Diff,
        leaving: &Leaving,
        wanted: &Config,
        undo: &mut Undo,
    ) -> Result<(), RunError> {
        let mut free = self.free_ids(diff).into_iter();
        for text in added(diff) {
            let spec = PortSpec::from(text);
            let is_new = !leaving.ports.contains(&text.name);
            // A vif that xen:auto found may have the name.
            if is_new && self.ports.contains_key(&text.name) {
                return Err(RunError::DuplicatePort(text.name.clone()));
            }
            if is_auto(&spec) {
                let is_open = self.xen.contains_key(&Hypervisor::Xen);
                self.open_auto(&spec)?;
                undo.opened.extend((!is_open).then_some(Hypervisor::Xen));
                continue;
            }
            let id = self.next_id(text, wanted, &mut free)?;
            self.prepare_one(spec, PortId(id), leaving, undo)?;
        }
        self.prepare_mtus(undo)?;
        self.prepare_permissions(diff, leaving, undo)?;
        self.prepare_persistence(undo)?;
        self.prepare_statics(wanted, undo)
    }

    /// Numbers that no port will have: unused ones first, then those of ports that are removed.
    fn free_ids(&self, diff: &Diff) -> Vec<u16> {
        let is_unused = |id: &u16| self.table.get(usize::from(*id)).is_none_or(Option::is_none);
        let removed = diff.removed.iter().filter_map(|name| self.ports.get(name));
        let removed = removed.map(|port| port.port.id.0);
        (0..PORTS_MAX).filter(is_unused).chain(removed).collect()
    }

    /// The number of a port: that of the port it replaces, or a free one.
    fn next_id(
        &self,
        port: &PortText,
        wanted: &Config,
        free: &mut impl Iterator<Item = u16>,
    ) -> Result<u16, RunError> {
        if self.is_numbered() {
            let at = wanted.ports.iter().position(|other| other.name == port.name);
            return Ok(at.map_or(0, |at| at as u16));
        }
        let own = self.ports.get(&port.name).map(|port| port.port.id.0);
        own.or_else(|| free.next()).ok_or(RunError::TooManyPorts(PORTS_MAX))
    }

    fn prepare_one(
        &mut self,
        spec: PortSpec,
        id: PortId,
        leaving: &Leaving,
        undo: &mut Undo,
    ) -> Result<(), RunError> {
        let mut first = spec.clone();
        if let Kind::Tap(tap) = &mut first.kind {
            // Set when all else has succeeded.
            (tap.mtu, tap.persist) = (None, None);
        }
        let of = match &spec.kind {
            Kind::Xen(Xen { at: XenAt::Local(directory), .. }) => {
                Some(Hypervisor::Local(directory.clone()))
            }
            Kind::Xen(_) => Some(Hypervisor::Xen),
            _ => None,
        };
        let opened = of.filter(|of| !self.xen.contains_key(of));
        let prepared = self.prepare_port(&first, id, leaving);
        undo.opened.extend(opened.filter(|of| self.xen.contains_key(of)));
        let mut prepared = prepared.map_err(|error| self.explain(error, &spec, leaving))?;
        prepared.state.spec = spec;
        undo.ports.push(prepared);
        Ok(())
    }

    /// Sets mode and group of sockets that stay, where they differ.
    fn prepare_permissions(
        &self,
        diff: &Diff,
        leaving: &Leaving,
        undo: &mut Undo,
    ) -> Result<(), RunError> {
        for text in added(diff) {
            let spec = PortSpec::from(text);
            let Some(wanted) = Address::of(&spec.kind) else { continue };
            let Some(own) = &wanted.own else { continue };
            let has_socket = |name: &&String| {
                self.socket_of(name).is_some_and(|(listener, _)| listener.path() == own)
            };
            let Some(user) = leaving.ports.iter().find(has_socket) else { continue };
            let stays = leaving.next(own, wanted.carries).is_some();
            let before = self.socket_of(user).map(|(_, before)| &before.access);
            if stays && before != Some(&wanted.access) {
                let wanted = super::permissions(&spec.name, &wanted.access)?;
                undo.permissions.extend(self.permit(user, &wanted)?.map(|old| (user.clone(), old)));
            }
        }
        Ok(())
    }

    /// The listener of a port, and its settings.
    fn socket_of(&self, name: &str) -> Option<(&Listener, &Address)> {
        let end = self.ports.get(name)?.attach.endpoint()?;
        Some((end.listener.as_ref()?, &end.address))
    }

    /// Changes the permissions of a port's socket; returns those before.
    fn permit(
        &self,
        name: &str,
        wanted: &os::Permissions,
    ) -> Result<Option<os::Permissions>, RunError> {
        let Some((listener, _)) = self.socket_of(name) else { return Ok(None) };
        Ok(Some(listener.permit(wanted)?))
    }

    /// Names the port of this switch that has the only queue of an interface.
    fn explain(&self, error: RunError, spec: &PortSpec, leaving: &Leaving) -> RunError {
        let RunError::Tap { error: uplink::TapError::Busy { name: interface }, .. } = &error else {
            return error;
        };
        let is_user = |name: &&String| {
            let kind = self.ports.get(*name).map(|port| &port.spec.kind);
            matches!(kind, Some(Kind::Tap(tap)) if tap.ifname == *interface)
        };
        match leaving.ports.iter().find(is_user) {
            None => error,
            Some(user) => RunError::Request(format!(
                "port '{}': interface `{interface}` has one queue only, which port '{user}' uses \
                 until the reload succeeds: remove that port first (ctl del-port {user}), or \
                 create the interface with `multi_queue`",
                spec.name
            )),
        }
    }

    fn prepare_mtus(&self, undo: &mut Undo) -> Result<(), RunError> {
        let Undo { ports, mtus, .. } = undo;
        for port in ports {
            let Kind::Tap(tap) = &port.state.spec.kind else { continue };
            let Some(mtu) = tap.mtu else { continue };
            let before = uplink::set_mtu(&tap.ifname, tap.netns.as_deref(), u32::from(mtu));
            let error = |error| RunError::Tap { name: port.state.spec.name.clone(), error };
            mtus.push((tap.ifname.clone(), tap.netns.clone(), before.map_err(error)?));
        }
        Ok(())
    }

    fn prepare_persistence(&self, undo: &mut Undo) -> Result<(), RunError> {
        let Undo { ports, persists, .. } = undo;
        for Prepared { state, .. } in ports {
            let (Kind::Tap(tap), Attach::Tap(queues)) = (&state.spec.kind, &state.attach) else {
                continue;
            };
            let Some(on) = tap.persist else { continue };
            let queue = Arc::clone(&queues.fds[0]);
            let before = crate::tap::set_persist(&queue, &tap.ifname, on);
            let before =
                before.map_err(|error| RunError::Tap { name: state.spec.name.clone(), error })?;
            persists.push((queue, tap.ifname.clone(), before));
        }
        Ok(())
    }

    /// Sets the static addresses of all ports, on their future numbers.
    fn prepare_statics(&self, wanted: &Config, undo: &Undo) -> Result<(), RunError> {
        let prepared = undo.ports.iter().map(|port| &port.state);
        let ids = self.ports.values().chain(prepared);
        let ids: BTreeMap<_, _> = ids.map(|port| (port.spec.name.as_str(), port.port.id)).collect();
        for (at, entry) in wanted.statics.iter().enumerate() {
            let Some(id) = ids.get(entry.port.as_str()) else {
                let what = format!(
                    "static address {}: port '{}' has no number, it represents several vifs",
                    entry.address, entry.port
                );
                self.restore_statics(&wanted.statics[..at]);
                return Err(RunError::Request(what));
            };
            let now = self.now_s();
            let added = self.fdb.add_static(entry.address.mac, entry.address.vlan, *id, now);
            if let Err(error) = added {
                self.restore_statics(&wanted.statics[..at]);
                return Err(RunError::Request(format!(
                    "static address {}: {error}",
                    entry.address
                )));
            }
        }
        Ok(())
    }

    /// Undoes the static addresses in `set`.
    fn restore_statics(&self, set: &[api::config::Static]) {
        for entry in set {
            self.fdb.remove(entry.address.mac, entry.address.vlan);
        }
        self.set_statics(&self.config);
    }

    /// Sets static addresses that had a place before.
    pub(super) fn set_statics(&self, config: &Config) {
        for entry in &config.statics {
            let Some(port) = self.ports.get(&entry.port) else { continue };
            let (address, now) = (entry.address, self.now_s());
            let set = self.fdb.add_static(address.mac, address.vlan, port.port.id, now);
            if let Err(error) = set {
                tracing::warn!("static address {address}: {error}");
            }
        }
    }

    pub(super) fn now_s(&self) -> u32 {
        u32::try_from(self.clock().elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Undoes a reload that failed.
    fn undo(&mut self, undo: Undo) {
        for (port, before) in undo.permissions {
            if let Err(error) = self.permit(&port, &before) {
                tracing::warn!(port, "cannot restore the permissions of its socket: {error}");
            }
        }
        // Before their queues are closed.
        for (queue, interface, before) in undo.persists.iter().rev() {
            if let Err(error) = crate::tap::set_persist(queue, interface, *before) {
                tracing::warn!("{error}");
            }
        }
        for (interface, netns, mtu) in undo.mtus {
            if let Err(error) = uplink::set_mtu(&interface, netns.as_deref(), mtu) {
                tracing::warn!("interface {interface}: {error}");
            }
        }
        for Prepared { state, .. } in undo.ports {
            if let Some(listener) = state.attach.listener() {
                self.unwatch(listener.as_fd(), &Event::Prepared(state.spec.name.clone()));
            }
        }
        undo.opened.iter().for_each(|of| self.close_bus(of));
        // Opening a second queue has requested all offloads from the kernel.
        self.restore_offloads();
    }

    /// Requests from the kernel the offloads that each TAP had: what failed has changed them.
    pub(super) fn restore_offloads(&self) {
        for state in self.ports.values() {
            if let Attach::Tap(tap) = &state.attach
                && let Err(error) = tap.restore_offloads()
            {
                tracing::warn!(port = state.spec.name, "cannot restore offloads: {error}");
            }
        }
    }

    /// Applies a difference that has been prepared.
    fn commit(&mut self, diff: &Diff, leaving: &Leaving, mut ports: Vec<Prepared>, wanted: Config) {
        let mut listeners = BTreeMap::new();
        for name in &leaving.ports {
            if self.del_xen_auto(name).is_none()
                && let Some(listener) = self.take_down(name, leaving)
            {
                listeners.insert(listener.path().to_path_buf(), listener);
            }
        }
        let addresses = || wanted.statics.iter().map(|entry| entry.address);
        for gone in diff.statics_removed.iter().filter(|e| addresses().all(|a| a != e.address)) {
            self.fdb.remove(gone.address.mac, gone.address.vlan);
        }
        for prepared in &mut ports {
            give_listener(&mut prepared.state, &mut listeners);
        }
        if !ports.is_empty() {
            self.install(ports);
        }
        if self.options.hints {
            diff.added.iter().for_each(|port| hints::print(&PortSpec::from(port)));
        }
        for spec in added(diff).map(PortSpec::from).filter(is_auto) {
            // What can fail has been opened.
            if let Err(error) = self.add_xen_auto(&spec) {
                tracing::warn!(port = spec.name, "{error}");
            }
        }
        self.apply_settings(diff, &wanted);
        for PortDiff { port, .. } in &diff.changed {
            self.apply_tuning(port);
        }
        // Also those of ports that were replaced.
        self.set_statics(&wanted);
        self.config = wanted;
    }

    fn apply_settings(&mut self, diff: &Diff, wanted: &Config) {
        for SettingDiff { setting, .. } in &diff.settings {
            match (setting.as_str(), wanted.settings.policy(setting)) {
                ("poll", Some(text)) => self.options.policy = policy(&text),
                ("call", Some(text)) => self.options.call = policy(&text),
                ("placement", _) => {
                    let word = wanted.settings.word("placement").and_then(Placement::named);
                    word.into_iter().for_each(|placement| self.pool.set_placement(placement));
                }
                _ => {}
            }
        }
        if diff.settings.iter().any(|s| ["poll", "call"].contains(&s.setting.as_str())) {
            for state in self.ports.values() {
                let text = wanted.port(&state.spec.name);
                let own = || state.spec.tuning.clone();
                let tuning = text.map_or_else(own, |text| PortSpec::from(text).tuning);
                self.retune(state, &tuning);
            }
        }
    }

    /// Applies the options of a port that can be changed at run time.
    fn apply_tuning(&mut self, port: &PortText) {
        let spec = PortSpec::from(port);
        let mut names = vec![spec.name.clone()];
        if self.xen_auto.as_ref().is_some_and(|auto| auto.name == spec.name) {
            names = self.found();
            self.xen_auto = Some(spec.clone());
        }
        for name in names {
            let wired = self.ports.get(&name).and_then(|state| state.wired.clone());
            if let Some(tap) = wired {
                let tuning = vif_tap::tuning(&spec.tuning);
                self.ports.get(&tap).iter().for_each(|state| self.retune(state, &tuning));
                self.ports
                    .get_mut(&tap)
                    .into_iter()
                    .for_each(|state| state.spec.tuning = tuning.clone());
            }
            let Some(state) = self.ports.get_mut(&name) else { continue };
            // Its rules and rates stay the old ones until `set_tenant` compares and replaces them.
            let tenant = state.spec.tuning.tenant.clone();
            state.spec.tuning = PortTuning { tenant: tenant.clone(), ..spec.tuning.clone() };
            if let Some(state) = self.ports.get(&name) {
                self.retune(state, &spec.tuning);
            }
            if tenant != spec.tuning.tenant {
                self.set_tenant(&name, spec.tuning.tenant.clone());
            }
        }
    }

    /// Sets all options in `tuning`, and the defaults of others, where they differ.
    fn retune(&self, state: &PortState, tuning: &PortTuning) {
        for (i, queue) in state.ingress.iter().enumerate() {
            let poll = tuning.poll.of(i).unwrap_or(self.options.policy);
            if queue.tuning.poll() != poll {
                queue.tuning.set_poll(poll);
                self.pool.poll(token(state.port.id, i as u16, false));
            }
            queue.tuning.set_weight(tuning.weight.of(i).unwrap_or(1));
        }
        for (i, queue) in state.port.egress.iter().enumerate() {
            let call = tuning.call.of(i).unwrap_or(self.options.call);
            if queue.call() != call {
                queue.set_call(call);
            }
            queue.set_hold_max(tuning.hold.of(i).unwrap_or(HOLD_DEFAULT));
        }
        for (name, default) in &state.limits {
            let own = tuning.limits.all().find(|(own, _)| own == name);
            state.port.account.set_limit(name, own.map_or(*default, |(_, limit)| limit));
        }
    }
}

/// Gives a port the listener of its path, if a port that was removed had it.
fn give_listener(state: &mut PortState, listeners: &mut BTreeMap<PathBuf, Listener>) {
    if let Some(end) = state.attach.endpoint_mut()
        && end.listener.is_none()
        && let Some(own) = &end.address.own
    {
        end.listener = listeners.remove(own);
    }
}

fn is_auto(spec: &PortSpec) -> bool {
    matches!(&spec.kind, Kind::Xen(Xen { at: XenAt::Auto, .. }))
}

/// Ports to add, also in place of others.
fn added(diff: &Diff) -> impl Iterator<Item = &PortText> {
    diff.replaced.iter().map(|port| &port.port).chain(&diff.added)
}

fn text(setting: &SettingDiff) -> String {
    let SettingDiff { setting, from, to } = setting;
    format!("{setting} ({from} -> {to})")
}

/// One line for the log.
fn summary(diff: &Diff) -> String {
    if diff.is_empty() {
        return "no difference".into();
    }
    let counts = [
        ("ports added", diff.added.len()),
        ("removed", diff.removed.len()),
        ("replaced", diff.replaced.len()),
        ("changed", diff.changed.len()),
        ("settings of the switch", diff.settings.len()),
        ("static addresses", diff.statics.len() + diff.statics_removed.len()),
    ];
    let counts = counts.into_iter().filter(|(_, n)| *n > 0);
    counts.map(|(what, n)| format!("{what}: {n}")).collect::<Vec<_>>().join(", ")
}

fn report(diff: &Diff) -> Value {
    let ports = |ports: &[PortDiff]| {
        let ports = ports
            .iter()
            .map(|PortDiff { port, settings }| json!({ "name": port.name, "settings": settings }));
        ports.collect::<Value>()
    };
    json!({
        "added": diff.added.iter().map(|port| &port.name).collect::<Vec<_>>(),
        "removed": diff.removed,
        "replaced": ports(&diff.replaced),
        "changed": ports(&diff.changed),
        "settings": diff.settings,
        "restart": diff.restart,
        "static": diff.statics,
        "static_removed": diff.statics_removed,
    })
}
