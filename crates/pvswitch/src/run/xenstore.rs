//! Connections to xenstore: their events, their loss, and reconnects.
//!
//! xenstored serves this thread, which serves all guests: one that hangs must not block it.
//!
//! ```text
//!   connected ── no reply within 1 s, or closed ──> lost ── rest ──> probed ── reply ──> connected
//!   (requests block)                                           (nothing blocks)
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use os::Backoff;
use xen_netif::back::{DomainStore, Failure, Tree};
use xen_netif::store::{Store, StoreError};

use super::endpoint::jitter;
use super::xen::Hypervisor;
use super::{Event, RunError, System};

/// Maximum time that a request to a connected xenstore blocks this thread.
pub(super) const REPLY_WAIT: Duration = Duration::from_secs(1);
/// Part of this thread's time for requests that fail: a xenstored that replies to a probe and then
/// hangs costs a twentieth of it.
const FAILURES_PART: u32 = 20;
/// Shortest time between a loss and the next connection.
const RETRY_MIN: Duration = Duration::from_millis(100);
/// After this time without a reply, a probe is repeated over a new connection: /dev/xen/xenbus does
/// not report that xenstored was restarted.
const PROBE_WAIT: Duration = Duration::from_secs(30);

/// The way from a lost connection to the next one.
#[derive(Default)]
pub(super) struct Reconnect {
    /// Time of the next attempt. `None`: connected.
    at: Option<Instant>,
    /// A new connection, whose store has not replied yet.
    probe: Option<Store>,
    backoff: Backoff,
    rest: Rest,
    /// Last error, logged once.
    pub(super) trouble: Option<Failure>,
}

impl Reconnect {
    /// Time of the next attempt. `None`: connected.
    pub(super) fn due(&self) -> Option<Instant> {
        self.at
    }

    /// The connection that is watched in place of the lost one.
    pub(super) fn probe(&self) -> Option<BorrowedFd<'_>> {
        self.probe.as_ref().map(AsFd::as_fd)
    }

    /// Schedules the next attempt, after a failure that took this time.
    fn retry_after(&mut self, took: Duration, now: Instant) {
        let rest = self.rest.after(took, now);
        self.at = Some(now + self.backoff.next(jitter()).max(RETRY_MIN).max(rest));
    }
}

/// Limits the time of failures to a part of all time. A single one is not followed by a rest, nor
/// is one that took no time, such as of a xenstored that was restarted after it hung.
#[derive(Default)]
struct Rest {
    /// When all failures until now are [`FAILURES_PART`] of the time since.
    until: Option<Instant>,
}

impl Rest {
    /// Rest after a failure at `now` that took this time.
    fn after(&mut self, took: Duration, now: Instant) -> Duration {
        let earlier = self.until.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        let rest = took * FAILURES_PART;
        self.until = Some(now + earlier + rest);
        earlier.min(rest)
    }
}

impl System {
    /// Handles events of xenstore.
    pub(super) fn read_xenstore(&mut self, of: &Hypervisor) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        if bus.reconnect.probe.is_some() {
            return self.read_probe(of);
        }
        let done = bus.store.events().and_then(|tokens| {
            let tokens = tokens.iter().map(String::as_str);
            bus.bus.on_events(&mut bus.store, tokens, Instant::now())
        });
        self.finish_bus(of, done);
    }

    /// Schedules a reconnect. Connected vifs keep their rings and continue.
    pub(super) fn lose_xenstore(&mut self, of: &Hypervisor, failure: &Failure) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        if bus.store.is_gone() && bus.reconnect.at.is_some() {
            return;
        }
        let took = bus.store.take_spent();
        bus.reconnect.retry_after(took, Instant::now());
        if bus.reconnect.trouble.as_ref() != Some(failure) {
            tracing::warn!("{failure}; connected vifs continue, retrying");
            bus.reconnect.trouble = Some(failure.clone());
        }
        if bus.store.is_gone() {
            let Self { epoll, tokens, xen, .. } = self;
            let _ = epoll.remove(xen[of].store.as_fd());
            tokens.retain(|_, what| *what != Event::Xenstore(of.clone()));
        }
    }

    /// Begins to connect to xenstore again, or, if it is connected, reads it again.
    pub(super) fn retry_xenstore(&mut self, of: &Hypervisor) {
        self.drop_probe(of);
        let Some(bus) = self.xen.get_mut(of) else { return };
        if !bus.store.is_gone() {
            return self.restart_bus(of);
        }
        let now = Instant::now();
        let opened = bus.host.store().and_then(|store| store.probe().map(|()| store));
        match opened {
            Ok(store) => {
                bus.reconnect.at = Some(now + PROBE_WAIT);
                let store = bus.reconnect.probe.insert(store);
                let Self { epoll, tokens, next_token, .. } = self;
                let what = Event::Xenstore(of.clone());
                if let Err(error) = super::watch(epoll, tokens, next_token, store.as_fd(), what) {
                    tracing::error!("xenstore: {error}");
                }
            }
            Err(error) => {
                tracing::debug!("{error}");
                bus.reconnect.retry_after(Duration::ZERO, now);
            }
        }
    }

    /// Uses the new connection if its store has replied.
    fn read_probe(&mut self, of: &Hypervisor) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        let Some(store) = &bus.reconnect.probe else { return };
        let replied = match store.has_replied() {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        let Some(store) = self.drop_probe(of) else { return };
        let begun = Instant::now();
        let opened = replied.and_then(|()| {
            store.set_reply_wait(REPLY_WAIT);
            DomainStore::new(store)
        });
        match opened {
            Ok(store) => self.replace_store(of, store),
            Err(error) => self.fail_probe(of, &error, begun.elapsed()),
        }
    }

    fn replace_store(&mut self, of: &Hypervisor, store: DomainStore) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        bus.store = store;
        if let Err(error) = self.watch_store(of) {
            tracing::error!("xenstore: {error}");
        }
        tracing::info!("xenstore: reconnected");
        self.restart_bus(of);
    }

    fn fail_probe(&mut self, of: &Hypervisor, error: &StoreError, took: Duration) {
        tracing::debug!("{error}");
        if let Some(bus) = self.xen.get_mut(of) {
            bus.reconnect.retry_after(took, Instant::now());
        }
    }

    /// Registers all watches and reads all vifs.
    fn restart_bus(&mut self, of: &Hypervisor) {
        let Some(bus) = self.xen.get_mut(of) else { return };
        bus.reconnect.at = None;
        let done = bus.bus.start(&mut bus.store, Instant::now());
        if done.is_ok() {
            bus.reconnect.backoff.reset();
            bus.reconnect.trouble = None;
        }
        self.finish_bus(of, done);
    }

    fn drop_probe(&mut self, of: &Hypervisor) -> Option<Store> {
        let store = self.xen.get_mut(of)?.reconnect.probe.take()?;
        self.unwatch(store.as_fd(), &Event::Xenstore(of.clone()));
        Some(store)
    }

    pub(super) fn watch_store(&mut self, of: &Hypervisor) -> Result<(), RunError> {
        let Self { epoll, tokens, next_token, xen, .. } = self;
        let fd = xen[of].store.as_fd();
        super::watch(epoll, tokens, next_token, fd, Event::Xenstore(of.clone())).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_after_the_first_take_a_twentieth_of_the_time() {
        let (mut rest, second) = (Rest::default(), Duration::from_secs(1));
        let begin = Instant::now();
        let mut now = begin + second;
        assert_eq!(rest.after(second, now), Duration::ZERO);
        for failures in 2..10 {
            // The next failure begins at once, and takes a second.
            now += second;
            now += rest.after(second, now);
            assert_eq!(now - begin, second * (1 + (failures - 1) * FAILURES_PART), "{failures}");
        }
        assert_eq!(rest.after(Duration::ZERO, now), Duration::ZERO, "it took no time");
        now += second * 100;
        assert_eq!(rest.after(second, now), Duration::ZERO, "the time between counts");
    }
}
