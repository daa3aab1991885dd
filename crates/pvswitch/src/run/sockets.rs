//! Sockets of the switch itself: control and HTTP, bound or of the process before.

use std::os::fd::AsFd;
use std::path::Path;

use os::{Listener, Permissions};

use super::rights::Rights;
use super::{Event, PortState, RunError, System};
use crate::http;

impl System {
    pub(super) fn listen_control(&mut self) -> Result<(), RunError> {
        let explicit = self.options.control.clone();
        let permissions = self.options.control_access.permissions("control");
        let permissions = permissions.map_err(RunError::Request)?;
        if let Some(listener) = self.inherited.control.take() {
            return self.start_control(listener, permissions);
        }
        let path = match explicit.clone().map_or_else(api::control::listen_path, Ok) {
            Ok(path) => path,
            Err(error) => {
                tracing::warn!("no control socket: {error}");
                return Ok(());
            }
        };
        match self.listen("control", &path, &permissions) {
            Ok(listener) => self.start_control(listener, permissions),
            Err(error) if explicit.is_some() => Err(error),
            // A second switch on the machine works without a control socket.
            Err(error) => {
                tracing::warn!("no control socket: {error} (give --control PATH)");
                Ok(())
            }
        }
    }

    fn start_control(
        &mut self,
        listener: Listener,
        permissions: Permissions,
    ) -> Result<(), RunError> {
        // No request has any, and to close the last one of a file may block for as long as its
        // sender likes: this thread would close it. Connections inherit the setting.
        os::refuse_descriptors(listener.as_fd());
        self.rights = Rights::new(permissions.group, self.options.control_write);
        self.watch(listener.as_fd(), Event::ControlListener)?;
        self.control = Some(listener);
        Ok(())
    }

    /// What listens at `path` in this switch.
    pub(super) fn listens_at(&self, path: &Path) -> Option<String> {
        let is_at = |listener: Option<&Listener>| listener.is_some_and(|l| l.is_at(path));
        if is_at(self.control.as_ref()) {
            return Some("the control socket".into());
        }
        if is_at(self.http.as_ref().and_then(|http| http.socket.as_ref())) {
            return Some("--http".into());
        }
        let of = |state: &&PortState| is_at(state.attach.listener());
        self.ports.values().find(of).map(|state| format!("port '{}'", state.spec.name))
    }

    pub(super) fn listener(&self, what: &Event) -> Option<&Listener> {
        match what {
            Event::ControlListener => self.control.as_ref(),
            Event::Listener(name) => self.ports.get(name)?.attach.listener(),
            _ => None,
        }
    }

    pub(super) fn start_http(&mut self) -> Result<(), RunError> {
        let Some(address) = self.options.http.clone() else { return Ok(()) };
        let permissions = self.options.http_access.permissions("http");
        let inherited = self.take_http()?;
        let permissions = permissions.map_err(RunError::Request)?;
        let server = http::Server::start(&address, &permissions, inherited)?;
        self.watch(server.as_fd(), Event::Http)?;
        self.http = Some(server);
        Ok(())
    }

    /// Starts or stops accepting HTTP connections.
    pub(super) fn accept_http(&self, on: bool) {
        if let Some(server) = &self.http {
            server.set_accepting(on);
        }
    }
}
