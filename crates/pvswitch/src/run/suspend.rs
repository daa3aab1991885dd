//! Listeners and connections that are not read for a while.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use switch::time::{self, Ns};

use super::{Attach, Event, System};

/// How long a listener that failed to accept is suspended.
const SUSPEND: Duration = Duration::from_secs(1);

impl System {
    /// Resumes or suspends a listener or a connection. When suspended, it leaves the epoll set: a
    /// hang-up of the peer would be reported whatever events are requested.
    pub(super) fn set_watched(&self, what: &Event, on: bool) {
        let token = self.tokens.iter().find(|(_, w)| *w == what).map(|(token, _)| *token);
        let connection = match what {
            Event::Connection(name) => match self.ports.get(name).map(|p| &p.attach) {
                Some(Attach::VhostUser(vhost)) => vhost.connection.as_ref().map(AsFd::as_fd),
                _ => None,
            },
            _ => None,
        };
        let fd = connection.or(self.listener(what).map(AsFd::as_fd));
        let Some((fd, token)) = fd.zip(token) else { return };
        let _ = if on { self.epoll.add(fd, token) } else { self.epoll.remove(fd) };
    }

    /// Suspends a listener that failed to accept (no descriptor is free): its queued connections
    /// would cause retries in a loop.
    pub(super) fn suspend(&mut self, what: Event) {
        self.suspend_until(what, Instant::now() + SUSPEND);
    }

    /// Suspends a listener or connection whose peer exceeded a limit.
    pub(super) fn suspend_until(&mut self, what: Event, at: Instant) {
        self.set_watched(&what, false);
        self.suspended.push((at, what));
    }

    /// Converts a time of the accounts to an instant at most a second from now.
    pub(super) fn instant(&self, at: time::Instant) -> Instant {
        let at = at.min(self.pool.now() + Ns::from_secs(1));
        self.clock().to_std(at)
    }

    pub(super) fn resume_due(&mut self) {
        let now = Instant::now();
        for (_, what) in self.suspended.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
            self.set_watched(&what, true);
            if let Event::Connection(name) = what
                && self.is_marking(&name)
            {
                self.serve_guest(&name);
            }
        }
    }

    /// Whether pages of a guest that migrates are left to be marked, whatever it sends.
    pub(super) fn is_marking(&self, name: &str) -> bool {
        match self.ports.get(name).map(|port| &port.attach) {
            Some(Attach::VhostUser(vhost)) => {
                vhost.connection.as_ref().is_some_and(|c| c.backend().is_marking())
            }
            _ => false,
        }
    }
}
