//! Which ports this thread is serving: what a panic may be due to.
//!
//! A panic ends the process. The next one closes the connections of these ports and of no others
//! ([0044](../../../docs/design/0044-panics.md)), so a port is noted before memory of its peer is
//! read or written.

use std::cell::Cell;
use std::thread::LocalKey;

use crate::fdb::PortId;

thread_local! {
    static SERVED: Cell<Option<PortId>> = const { Cell::new(None) };
    static RECEIVER: Cell<Option<PortId>> = const { Cell::new(None) };
}

/// A port that this thread serves, until dropped.
pub struct Serving(&'static LocalKey<Cell<Option<PortId>>>);

impl Serving {
    /// The port whose frames are being taken, or whose peer's message is handled.
    #[inline]
    pub fn port(port: PortId) -> Self {
        SERVED.set(Some(port));
        Self(&SERVED)
    }

    /// The port to which frames are being delivered.
    #[inline]
    pub(crate) fn receiver(port: PortId) -> Self {
        RECEIVER.set(Some(port));
        Self(&RECEIVER)
    }
}

impl Drop for Serving {
    #[inline]
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// The ports that this thread is serving: the sender, and the receiver.
pub fn ports() -> impl Iterator<Item = PortId> {
    [SERVED.get(), RECEIVER.get()].into_iter().flatten()
}

/// A fault on demand, in builds with debug assertions only: a panic where `what` happens to the
/// port that `PVSWITCH_PANIC_AT=WHAT:ID` names.
#[cfg(debug_assertions)]
pub fn panic_on_demand(what: &str, port: PortId) {
    static AT: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let at = AT.get_or_init(|| std::env::var("PVSWITCH_PANIC_AT").ok());
    let at = at.as_deref().and_then(|at| at.strip_prefix(what)?.strip_prefix(':'));
    assert!(at.is_none_or(|id| id != port.0.to_string()), "on demand: {what} port {}", port.0);
}

/// No fault.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn panic_on_demand(_: &str, _: PortId) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_served_until_dropped_and_by_their_thread_alone() {
        let now = || ports().map(|port| port.0).collect::<Vec<_>>();
        let serving = Serving::port(PortId(3));
        let delivering = Serving::receiver(PortId(5));
        assert_eq!(now(), [3, 5]);
        std::thread::scope(|scope| assert_eq!(scope.spawn(now).join().unwrap(), []));
        drop(delivering);
        assert_eq!(now(), [3]);
        drop(serving);
        assert_eq!(now(), []);
    }
}
