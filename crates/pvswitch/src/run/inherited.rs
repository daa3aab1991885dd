//! Descriptors that systemd or another parent process passed, named `fd=NAME` in place of a path or
//! an interface: listening sockets, queues of a TAP
//! ([0027](../../../../docs/design/0027-systemd.md)).

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use os::{Carries, Listener, Permissions};

use super::{Leaving, RunError, System};
use crate::http;
use crate::spec::{Kind, PortSpec, Tap};
use crate::tap::TapPort;

/// The name of an inherited descriptor in a setting, if it has one.
pub(super) fn name(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(api::INHERITED)
}

/// What a setting with this name has.
fn setting(name: &str) -> String {
    format!("{}{name}", api::INHERITED)
}

impl System {
    /// Listens at a path, or takes the descriptor of that name. `what` names the setting in
    /// errors.
    pub(super) fn listen(
        &self,
        what: &str,
        path: &Path,
        permissions: &Permissions,
    ) -> Result<Listener, RunError> {
        let Some(name) = name(path) else {
            return Ok(Listener::bind(path, Carries::Stream, permissions)?);
        };
        Ok(Listener::inherited(self.activated_one(what, name)?, path)?)
    }

    /// Takes the listener of `--http`, if it was inherited: from the previous process, or the
    /// parent process.
    pub(super) fn take_http(&mut self) -> Result<Option<http::Inherited>, RunError> {
        let name = match (self.inherited.http.take(), &self.options.http) {
            (None, Some(api::Address::Inherited(name))) => name,
            (taken_over, _) => return Ok(taken_over),
        };
        let fd = self.activated_one("http", name)?;
        if os::is_tcp_listener(fd.as_fd()) {
            return Ok(Some(http::Inherited::Tcp(fd)));
        }
        let listener = Listener::inherited(fd, &PathBuf::from(setting(name)));
        let listener = listener.map_err(|_| {
            RunError::Request(format!(
                "http: inherited descriptor '{name}' is neither a listening TCP socket nor a \
                 listening Unix stream socket: pass one with ListenStream= in a socket unit"
            ))
        })?;
        Ok(Some(http::Inherited::Unix(listener)))
    }

    /// Opens or creates the TAP of a port, or uses that of the previous process or of the parent
    /// process.
    pub(super) fn open_tap(
        &mut self,
        spec: &PortSpec,
        conf: &Tap,
        leaving: &Leaving,
    ) -> Result<TapPort, RunError> {
        let handed = self.inherited.taps.remove(&spec.name);
        if let Some(tap) = self.inherited_tap(spec, conf, leaving)? {
            return Ok(tap);
        }
        let tap = match handed {
            Some((queues, created)) => crate::tap::adopt(conf, queues, created),
            None => crate::tap::open(conf),
        };
        tap.map_err(|error| RunError::Tap { name: spec.name.clone(), error })
    }

    /// The queues of a TAP that the parent process passed; `None`: the port names an interface.
    fn inherited_tap(
        &self,
        spec: &PortSpec,
        conf: &Tap,
        leaving: &Leaving,
    ) -> Result<Option<TapPort>, RunError> {
        let Some(name) = name(Path::new(&conf.ifname)) else { return Ok(None) };
        let what = format!("port '{}'", spec.name);
        let request = |error| Err(RunError::Request(format!("{what}: {error}")));
        let is_same = |other: &Kind| matches!(other, Kind::Tap(tap) if tap.ifname == conf.ifname);
        let mut others = self.ports.values().map(|state| &state.spec);
        if let Some(by) =
            others.find(|other| is_same(&other.kind) && !leaving.ports.contains(&other.name))
        {
            return request(format!(
                "port '{}' uses the descriptor '{name}': give each TAP a name of its own",
                by.name
            ));
        }
        let queues = self.activated(&what, name)?;
        if queues.len() != usize::from(conf.queues) {
            return request(format!(
                "{} descriptors are named '{name}', the port has queues={}: set queues={}, or \
                 pass another number of queues",
                queues.len(),
                conf.queues,
                queues.len()
            ));
        }
        let tap = crate::tap::inherit(queues);
        tap.map(Some).map_err(|error| RunError::Tap { name: spec.name.clone(), error })
    }

    /// The only descriptor of this name.
    fn activated_one(&self, what: &str, name: &str) -> Result<OwnedFd, RunError> {
        let mut fds = self.activated(what, name)?;
        if fds.len() > 1 {
            return Err(RunError::Request(format!(
                "{what}: several inherited descriptors are named '{name}': give each socket unit a \
                 FileDescriptorName= of its own"
            )));
        }
        Ok(fds.remove(0))
    }

    /// All descriptors of this name, at least one. `what` names the setting in errors.
    fn activated(&self, what: &str, name: &str) -> Result<Vec<OwnedFd>, RunError> {
        let error = |error: String| Err(RunError::Request(format!("{what}: {error}")));
        let of_name = self.inherited.activated.iter().filter(|(own, _)| own == name);
        // The originals stay, for a port that is added again later.
        let fds: Result<Vec<_>, _> = of_name.map(|(_, fd)| fd.try_clone()).collect();
        let fds = match fds {
            Ok(fds) => fds,
            Err(failed) => return error(format!("descriptor '{name}': {failed}")),
        };
        if fds.is_empty() {
            let known: Vec<_> =
                self.inherited.activated.iter().map(|(name, _)| name.as_str()).collect();
            let known = match known.join(", ") {
                none if none.is_empty() => "none was passed to this process".into(),
                known => format!("there are: {known}"),
            };
            return error(format!(
                "no inherited descriptor is named '{name}' ({known}): set \
                 FileDescriptorName={name} in its socket unit, and restart the service"
            ));
        }
        Ok(fds)
    }

    /// Warns about descriptors that nothing uses: their clients would wait.
    pub(super) fn warn_of_unused(&self) {
        for (name, _) in &self.inherited.activated {
            if !self.uses_inherited(name) {
                tracing::warn!("inherited descriptor '{name}' is not used by any port");
            }
        }
    }

    fn uses_inherited(&self, name: &str) -> bool {
        let is_http = |at: &api::Address| matches!(at, api::Address::Inherited(of) if of == name);
        let own = setting(name);
        let is_own = |kind: &Kind| matches!(kind, Kind::Tap(tap) if tap.ifname == own);
        self.listens_at(Path::new(&own)).is_some()
            || self.options.http.as_ref().is_some_and(is_http)
            || self.ports.values().any(|state| is_own(&state.spec.kind))
    }
}
