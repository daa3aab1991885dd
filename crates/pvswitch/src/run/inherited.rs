//! Listening sockets that systemd or another starter made, named `fd=NAME` in place of a path
//! ([0027](../../../../docs/design/0027-systemd.md)).

use std::path::Path;

use os::{Carries, Listener, Permissions};

use super::{RunError, System};

/// The name of an inherited descriptor in a setting, if it has one.
pub(super) fn name(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(api::INHERITED)
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
        let mut of_name = self.inherited.activated.iter().filter(|(own, _)| own == name);
        let error = |error: String| Err(RunError::Request(format!("{what}: {error}")));
        let Some((_, fd)) = of_name.next() else {
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
        };
        if of_name.next().is_some() {
            return error(format!(
                "several inherited descriptors are named '{name}': give each socket unit a \
                 FileDescriptorName= of its own"
            ));
        }
        // The original stays, for a port that is added again later.
        let fd = match fd.try_clone() {
            Ok(fd) => fd,
            Err(failed) => return error(format!("descriptor '{name}': {failed}")),
        };
        Ok(Listener::inherited(fd, path)?)
    }

    /// Warns about descriptors that nothing uses: their clients would wait.
    pub(super) fn warn_of_unused(&self) {
        for (name, _) in &self.inherited.activated {
            let path = Path::new(api::INHERITED).as_os_str().to_owned();
            let mut path = path;
            path.push(name);
            if self.listens_at(Path::new(&path)).is_none() {
                tracing::warn!("inherited descriptor '{name}' is not used by any port");
            }
        }
    }
}
