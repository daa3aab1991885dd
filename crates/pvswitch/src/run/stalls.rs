//! Receivers that stalled, in the log and in `ctl show`.

use switch::forward::STALLED_AFTER;
use switch::time::{self, Ns};

use super::PortState;

impl PortState {
    /// Logs that a queue's receiver stalled, or (false) recovered.
    pub(super) fn log_stall(&self, queue: u16, begins: bool) {
        let Some(log) = self.log() else { return };
        if begins {
            let s = STALLED_AFTER.times(Ns::from_secs(1));
            log.warn(format_args!(
                "queue {queue}: receiver stalled: its driver has posted no buffers for {s} s"
            ));
        } else {
            log.info(format_args!("queue {queue}: receiver recovered: buffers are posted again"));
        }
    }

    /// Returns how long each stalled queue has been without buffers, in seconds.
    pub(super) fn stalled_s(&self, now: time::Instant) -> Vec<u64> {
        let stalled = self.port.egress.iter().filter_map(|queue| queue.stalled_for(now));
        stalled.map(|time| time.times(Ns::from_secs(1))).collect()
    }
}
