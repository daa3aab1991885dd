//! Messages to the service manager that started the switch: ready, reloading, stopping, status,
//! watchdog. systemd's protocol `sd_notify`; without `NOTIFY_SOCKET` nothing is sent.
//!
//! The control thread sends them between two events. The watchdog alone wakes it: an idle switch
//! without `WatchdogSec=` makes no system call
//! ([0027](../../../../docs/design/0027-systemd.md)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use super::{Attach, System};
use crate::demo::format::plural;

/// Least time between two messages with a status: a guest that reconnects causes few.
const STATUS_PAUSE: Duration = Duration::from_secs(1);
/// Longest time for the manager to handle a message.
pub(super) const BARRIER_MAX: Duration = Duration::from_secs(5);

/// The service manager, as the switch sees it.
pub(super) struct Manager {
    /// Whether there is one.
    exists: bool,
    /// Time between two pings, and when the next one is due.
    ping: Option<(Duration, Instant)>,
    /// The status sent last.
    sent: String,
    /// The status now, if it differs.
    status: Option<String>,
    /// When the next status may be sent.
    status_at: Instant,
    /// Shows when another main process is known.
    moved: Option<Barrier>,
}

impl Manager {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` from the environment.
    pub(super) fn from_environment() -> Self {
        let exists = std::env::var_os("NOTIFY_SOCKET").is_some();
        let limit = sd_notify::watchdog_enabled().filter(|limit| exists && !limit.is_zero());
        Self::new(exists, limit, Instant::now())
    }

    /// `limit`: time after which the manager ends a service that has sent no ping.
    fn new(exists: bool, limit: Option<Duration>, now: Instant) -> Self {
        // Half of it, as sd_watchdog_enabled(3) recommends.
        let ping = limit.map(|limit| (limit / 2, now));
        Self { exists, ping, sent: String::new(), status: None, status_at: now, moved: None }
    }

    /// Time at which [`tick`](Self::tick) has something to send.
    pub(super) fn due(&self) -> Option<Instant> {
        let status = self.status.as_ref().map(|_| self.status_at);
        self.ping.map(|(_, at)| at).into_iter().chain(status).min()
    }

    /// Sets the status, which is sent when it is due.
    fn set_status(&mut self, status: String) {
        self.status = (status != self.sent).then_some(status);
    }

    /// What is to be sent now; it counts as sent.
    fn take_due(&mut self, now: Instant) -> Vec<NotifyState<'_>> {
        let mut states = Vec::new();
        if let Some((pause, at)) = &mut self.ping
            && *at <= now
        {
            // From now on: after a long pause one ping suffices.
            *at = now + *pause;
            states.push(NotifyState::Watchdog);
        }
        if self.status_at <= now
            && let Some(status) = self.status.take()
        {
            self.status_at = now + STATUS_PAUSE;
            self.sent = status;
            states.push(NotifyState::Status(&self.sent));
        }
        states
    }

    /// Sends a ping and the status where they are due. A status that the manager does not read is
    /// sent again later.
    fn tick(&mut self, now: Instant) {
        if self.due().is_some_and(|at| at <= now) && !send(&self.take_due(now), Duration::ZERO) {
            self.status = Some(std::mem::take(&mut self.sent));
        }
    }

    /// Reports that ports can be used, at the start and after a reload.
    fn ready(&mut self, status: String) {
        if !self.exists {
            return;
        }
        self.status = None;
        self.sent = status;
        self.status_at = Instant::now() + STATUS_PAUSE;
        send(&[NotifyState::Ready, NotifyState::Status(&self.sent)], BARRIER_MAX);
    }

    /// Reports the begin of a reload. systemd wants its time in the same message.
    pub(super) fn reloading(&self) {
        if !self.exists {
            return;
        }
        match NotifyState::monotonic_usec_now() {
            Ok(now) => _ = send(&[NotifyState::Reloading, now], BARRIER_MAX),
            Err(error) => tracing::warn!("cannot notify the service manager: {error}"),
        }
    }

    /// Reports that another process is the service's main one from now on, and does not wait.
    ///
    /// # Errors
    /// The manager does not read. One that cannot be reached is none.
    pub(super) fn report_main_pid(&mut self, pid: u32) -> io::Result<()> {
        if !self.exists {
            return Ok(());
        }
        match notify(&format!("MAINPID={pid}\n"), &[], Duration::ZERO) {
            Ok(()) => self.moved = Barrier::send(Duration::ZERO).ok(),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
            Err(error) => tracing::warn!("cannot notify the service manager: {error}"),
        }
        Ok(())
    }

    /// Waits until the manager has handled that: it takes messages only from processes that it
    /// finds.
    pub(super) fn wait_until_moved(&self) {
        let _ = self.moved.as_ref().map(Barrier::wait);
    }

    /// Reports the begin of the shutdown.
    pub(super) fn stopping(&self) {
        if self.exists {
            send(&[NotifyState::Stopping], BARRIER_MAX);
        }
    }
}

/// Returns whether the manager was there, and read or had room within this time.
fn send(states: &[NotifyState<'_>], limit: Duration) -> bool {
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
    match notify(&text, &[], limit) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::TimedOut => false,
        Err(error) => {
            tracing::warn!("cannot notify the service manager: {error}");
            true
        }
    }
}

/// Stores a descriptor at the service manager, which must be configured for as many
/// (`FileDescriptorStoreMax=`).
///
/// # Errors
/// There is no manager, or it does not read.
pub(super) fn store(name: &str, fd: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
    // Not polled: sockets that hold others' descriptors look closed.
    notify(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}\n"), &[fd], limit)
}

/// Removes the descriptors of that name.
///
/// # Errors
/// As for [`store`].
pub(super) fn unstore(name: &str, limit: Duration) -> io::Result<()> {
    notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), &[], limit)
}

/// Waits until the manager has handled what was sent before.
///
/// # Errors
/// As for [`store`]; it does not reply in time.
pub(super) fn barrier() -> io::Result<()> {
    Barrier::send(BARRIER_MAX)?.wait()
}

/// Whether the manager takes messages now.
pub(super) fn is_reading() -> bool {
    Barrier::send(Duration::ZERO).is_ok()
}

/// A socket that the manager closes when it has handled what was sent before.
struct Barrier(OwnedFd);

impl Barrier {
    fn send(limit: Duration) -> io::Result<Self> {
        let (ours, theirs) = os::socketpair()?;
        notify("BARRIER=1\n", &[theirs.as_fd()], limit)?;
        Ok(Self(ours))
    }

    /// Waits for that.
    ///
    /// # Errors
    /// It does not happen in time.
    fn wait(&self) -> io::Result<()> {
        match os::wait_readable(self.0.as_fd(), BARRIER_MAX)? {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

fn notify(text: &str, fds: &[BorrowedFd<'_>], limit: Duration) -> io::Result<()> {
    let at = std::env::var_os("NOTIFY_SOCKET").ok_or(io::ErrorKind::NotFound)?;
    let socket = UnixDatagram::unbound()?;
    match at.as_bytes().strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(&at)?,
    }
    let end = Instant::now() + limit;
    while !os::send(socket.as_fd(), text.as_bytes(), fds)? {
        if !os::wait(socket.as_fd(), os::Until::Writable, end)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

impl System {
    /// One line for `systemctl status`.
    fn status_line(&self) -> String {
        let guest = |port: &&super::PortState| {
            matches!(port.attach, Attach::VhostUser(_) | Attach::Stream(_) | Attach::Xen(_))
                && port.port.active() > 0
        };
        let guests = self.ports.values().filter(guest).count();
        let ports = plural(self.ports.len() as u64, "port");
        format!("{ports}, {} up", plural(guests as u64, "guest"))
    }

    /// Reports that ports can be used.
    pub(super) fn report_ready(&mut self) {
        let status = self.status_line();
        self.manager.ready(status);
    }

    /// Sends what the service manager is due.
    pub(super) fn tick_manager(&mut self) {
        if self.manager.exists {
            let status = self.status_line();
            self.manager.set_status(status);
            self.manager.tick(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(states: &[NotifyState<'_>]) -> Vec<String> {
        states.iter().map(ToString::to_string).collect()
    }

    /// Invariant 17: without a watchdog nothing wakes the control thread.
    #[test]
    fn nothing_is_due_without_a_watchdog_and_a_new_status() {
        let now = Instant::now();
        let mut manager = Manager::new(true, None, now);
        assert_eq!(manager.due(), None);
        manager.set_status("1 port".into());
        assert_eq!(manager.due(), Some(now));
        assert_eq!(texts(&manager.take_due(now)), ["STATUS=1 port"]);
        manager.set_status("1 port".into());
        assert_eq!(manager.due(), None);
    }

    #[test]
    fn status_that_changes_often_is_sent_once_a_second_and_the_last_one_is_sent() {
        let now = Instant::now();
        let mut manager = Manager::new(true, None, now);
        manager.set_status("0".into());
        manager.take_due(now);
        for ms in 1..1000 {
            manager.set_status(ms.to_string());
            assert_eq!(texts(&manager.take_due(now + Duration::from_millis(ms))), [""; 0]);
        }
        assert_eq!(manager.due(), Some(now + STATUS_PAUSE));
        assert_eq!(texts(&manager.take_due(now + STATUS_PAUSE)), ["STATUS=999"]);
        // One that returned to what was sent is none.
        manager.set_status("1000".into());
        manager.set_status("999".into());
        assert_eq!(manager.due(), None);
    }

    #[test]
    fn watchdog_is_pinged_at_half_of_its_time() {
        let now = Instant::now();
        let mut manager = Manager::new(true, Some(Duration::from_secs(10)), now);
        assert_eq!(texts(&manager.take_due(now)), ["WATCHDOG=1"]);
        assert_eq!(manager.due(), Some(now + Duration::from_secs(5)));
        assert_eq!(texts(&manager.take_due(now + Duration::from_secs(4))), [""; 0]);
        // A thread that slept for long sends one ping, not those missed.
        let late = now + Duration::from_secs(60);
        assert_eq!(texts(&manager.take_due(late)), ["WATCHDOG=1"]);
        assert_eq!(manager.due(), Some(late + Duration::from_secs(5)));
    }
}
