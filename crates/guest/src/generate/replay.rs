//! `gen --replay`: a guest that uses almost no CPU.
//!
//! Where guests and the switch share few CPUs, guests usually limit a measurement. This guest
//! touches no frame: it fills transmit rings once, and makes used buffers available again by moving
//! an index. It polls a few times per ring, and sleeps in between.

use std::os::fd::AsFd;

use serde_json::{Map, Value};

use super::{Generator, Mode, SLEEP_MAX};
use crate::connect::Connect;
use crate::error::Error;
use crate::guest::now;
use crate::ring::Malformed;
use switch::time::{Instant, Ns};

/// Target share of a ring used between two polls: low, so that a poll never finds all used.
const WANTED: f64 = 0.25;
/// Minimum and maximum time between two polls, in ns.
const NAP_NS: (f64, f64) = (10_000.0, 5_000_000.0);

/// State of a replaying guest.
pub struct Replay {
    /// Number of sending queues; they are the first.
    sending: usize,
    /// Time to the next poll, in ns.
    nap_ns: f64,
    /// Polls of single rings.
    polls: u64,
    /// Polls that found all buffers used: the switch had to wait for the guest.
    polls_exhausted: u64,
}

impl Replay {
    fn new(sending: usize) -> Self {
        Self { sending, nap_ns: NAP_NS.0, polls: 0, polls_exhausted: 0 }
    }

    fn record_poll(&mut self, used: u16, size: u16) -> f64 {
        self.polls += 1;
        self.polls_exhausted += u64::from(used == size);
        f64::from(used) / f64::from(size)
    }

    /// Approaches the time in which the busiest ring uses the target share.
    fn adapt(&mut self, share: f64) {
        let factor = (WANTED / share.max(0.01)).clamp(0.5, 1.25);
        self.nap_ns = (self.nap_ns * factor).clamp(NAP_NS.0, NAP_NS.1);
    }

    /// Removes totals that are unknown because frames were not read, and adds poll counts.
    pub fn add_to_report(&self, report: &mut Map<String, Value>) {
        for key in ["received_bytes", "received_bps", "lost_frames", "late_frames"] {
            report.insert(key.into(), Value::Null);
        }
        report.insert("ring_polls".into(), self.polls.into());
        report.insert("ring_polls_exhausted".into(), self.polls_exhausted.into());
    }
}

/// Rejects modes and targets that cannot be replayed.
pub fn check(mode: Mode, to: &Connect) -> Result<(), Error> {
    if !matches!(mode, Mode::Send | Mode::Sink) {
        return Err(Error::Usage("--replay: only with --mode send and --mode sink".into()));
    }
    if !to.is_virtio() {
        return Err(Error::Usage("--replay: only with --connect vhost-user:SOCKET".into()));
    }
    if to.settings.full.queue() > 0 {
        return Err(Error::Usage("--set tx-full=queue: not with --replay".into()));
    }
    Ok(())
}

impl Generator {
    /// Fills the transmit rings with the frames to replay.
    pub(super) fn prepare_replay(&mut self) -> Result<(), Error> {
        let sending = if self.mode == Mode::Send { self.flows.len() } else { 0 };
        for queue in 0..sending {
            // Only once: the switch may already be taking frames.
            let mut left = usize::from(self.guest.pairs[queue].tx.ring.size());
            while left > 0 {
                left -= self.send_on(queue, left, now())?;
            }
            let tx = &mut self.guest.pairs[queue].tx;
            tx.kick_now();
            // Frames count when the switch has taken them.
            tx.counts = Default::default();
        }
        (self.totals.sent, self.totals.sent_bytes) = (0, 0);
        let pairs = &self.guest.pairs;
        let can = pairs.iter().all(|pair| pair.rx.ring.can_repeat())
            && pairs[..sending].iter().all(|pair| pair.tx.ring.can_repeat());
        if !can {
            let what = "a frame must use one descriptor: no --packed, no header=apart, and \
                        tx-completion=orphan";
            return Err(Error::Usage(format!("--replay: not with these settings: {what}")));
        }
        self.replay = Some(Replay::new(sending));
        Ok(())
    }

    /// Replays until `deadline`; returns false if the switch is gone.
    pub(super) fn replay(&mut self, deadline: Option<Instant>) -> Result<bool, Malformed> {
        let Self { guest, totals, sizes, replay: Some(replay), .. } = self else {
            unreachable!("was prepared");
        };
        let deadline = deadline.unwrap_or_else(|| now() + SLEEP_MAX);
        let mean = sizes.iter().map(|size| u64::from(*size)).sum::<u64>() / sizes.len() as u64;
        loop {
            let mut share: f64 = 0.0;
            for (i, pair) in guest.pairs.iter_mut().enumerate() {
                if i < replay.sending {
                    let n = pair.tx.ring.repeat()?;
                    pair.tx.counts.frames += u64::from(n);
                    totals.sent += u64::from(n);
                    totals.sent_bytes += u64::from(n) * mean;
                    share = share.max(replay.record_poll(n, pair.tx.ring.size()));
                }
                let n = pair.rx.ring.repeat()?;
                pair.rx.counts.frames += u64::from(n);
                totals.received += u64::from(n);
                // A sender receives almost nothing; its receive ring must not slow its polls.
                share = share.max(replay.record_poll(n, pair.rx.ring.size()));
            }
            replay.adapt(share);
            let before = now();
            if before >= deadline {
                return Ok(!guest.is_gone());
            }
            guest.counts.naps += 1;
            let nap = Ns::new(replay.nap_ns as u64).min(deadline - before);
            if os::poll_readable(&[guest.link.as_fd()], Some(nap.into()))[0] && guest.is_gone() {
                return Ok(false);
            }
            guest.counts.asleep += now() - before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_ring_is_used_between_polls() {
        // Frames of a ring of 1024 that the switch uses per microsecond.
        for rate in [0.01, 0.2, 1.0, 5.0, 20.0] {
            let mut replay = Replay::new(1);
            for _ in 0..100 {
                let used = (replay.nap_ns / 1000.0 * rate).min(1024.0) as u16;
                let share = replay.record_poll(used, 1024);
                replay.adapt(share);
            }
            let share = replay.nap_ns / 1000.0 * rate / 1024.0;
            // The longest nap, if a quarter takes longer.
            let wanted = if rate < 0.05 { 0.048..0.05 } else { 0.2..0.32 };
            assert!(wanted.contains(&share), "{rate}: {share}");
            assert_eq!(replay.polls_exhausted, 0);
        }
    }
}
