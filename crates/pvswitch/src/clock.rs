//! The clock of a switch, which starts with it: of policies, accounts and captures.

use std::time::Duration;

use switch::time::{Instant, Ns};

/// A clock that all threads of the switch share.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Its start on the machine's monotonic clock.
    start: Ns,
}

impl Clock {
    /// Starts a clock.
    pub fn start() -> Self {
        Self { start: os::monotonic().into() }
    }

    /// A worker reads it after each poll, so it does without the checks of [`std::time::Instant`].
    #[inline]
    pub fn now(self) -> Instant {
        Instant::START + (Ns::from(os::monotonic()) - self.start)
    }

    /// Time since its start.
    pub fn elapsed(self) -> Duration {
        (self.now() - Instant::START).into()
    }

    /// The instant on the standard library's clock, now if it has passed.
    pub fn to_std(self, at: Instant) -> std::time::Instant {
        std::time::Instant::now() + Duration::from(at - self.now())
    }
}
