//! A kill on demand, at a message to whoever keeps the state: in builds with debug assertions only.

#[cfg(debug_assertions)]
use std::cell::Cell;

/// Where the process ends: before how many further messages, the last of which is the reply to the
/// request.
#[derive(Default)]
pub(super) struct Cut {
    #[cfg(debug_assertions)]
    left: Cell<Option<u32>>,
}

#[cfg(debug_assertions)]
impl Cut {
    /// Begins a request: it is killed before its message that `PVSWITCH_CUT_AT` numbers, from 0 on.
    pub(super) fn begin(&self) {
        let at = std::env::var("PVSWITCH_CUT_AT").ok().and_then(|at| at.parse().ok());
        if at.is_some() {
            self.left.set(at);
        }
    }

    /// Has the process end before this many messages more.
    #[cfg(test)]
    pub(super) fn set(&self, left: Option<u32>) {
        self.left.set(left);
    }

    /// Before a message to the keeper.
    pub(super) fn pass(&self) {
        let Some(left) = self.left.get() else { return };
        self.left.set(left.checked_sub(1));
        if left == 0 {
            end(false);
        }
    }

    /// After the last one, before the reply.
    pub(super) fn end(&self) {
        if self.left.take() == Some(0) {
            end(true);
        }
    }
}

#[cfg(not(debug_assertions))]
impl Cut {
    pub(super) fn begin(&self) {}

    #[inline(always)]
    pub(super) fn pass(&self) {}

    #[inline(always)]
    pub(super) fn end(&self) {}
}

/// What unwinds in tests in place of a kill.
#[cfg(test)]
pub(super) struct Killed {
    /// Whether all was stored.
    pub(super) stored: bool,
}

#[cfg(test)]
fn end(stored: bool) {
    std::panic::resume_unwind(Box::new(Killed { stored }));
}

#[cfg(all(debug_assertions, not(test)))]
fn end(_: bool) {
    std::process::abort();
}
