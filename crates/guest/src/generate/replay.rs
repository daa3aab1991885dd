//! `gen --replay`: a guest that takes next to no CPU.
//!
//! Where guests and the switch share a few CPUs, the guests are what a measurement finds the limit
//! of. These do not touch a frame: transmit rings are filled once, and what the switch has used is
//! made available again by moving an index. They look a few times in the time of a ring, and sleep
//! between.

use std::os::fd::AsFd;

use serde_json::{Map, Value};

use super::{Generator, LOOK_AROUND_NS, Mode};
use crate::connect::Connect;
use crate::error::Error;
use crate::guest::{now_ns, readable};
use crate::ring::Malformed;

/// What a ring is to have used from look to look: so that neither of two looks finds it all used.
const WANTED: f64 = 0.25;
/// Least and most time from look to look, in ns.
const NAP_NS: (f64, f64) = (10_000.0, 5_000_000.0);

/// State of a guest that repeats.
pub struct Replay {
    /// How many queues send; they are the first.
    sending: usize,
    /// Time to the next look, in ns.
    nap_ns: f64,
    /// Looks at one ring.
    looks: u64,
    /// Those that found it all used: the guest was what the switch waited for.
    dry: u64,
}

impl Replay {
    fn new(sending: usize) -> Self {
        Self { sending, nap_ns: NAP_NS.0, looks: 0, dry: 0 }
    }

    fn looked(&mut self, used: u16, size: u16) -> f64 {
        self.looks += 1;
        self.dry += u64::from(used == size);
        f64::from(used) / f64::from(size)
    }

    /// Nears the time in which the ring that is used most gets as far as is wanted.
    fn adapt(&mut self, share: f64) {
        let factor = (WANTED / share.max(0.01)).clamp(0.5, 1.25);
        self.nap_ns = (self.nap_ns * factor).clamp(NAP_NS.0, NAP_NS.1);
    }

    /// What is told of frames that were not read is that they came.
    pub fn amend(&self, report: &mut Map<String, Value>) {
        for key in ["received_bytes", "received_bps", "lost_frames", "late_frames"] {
            report.insert(key.into(), Value::Null);
        }
        report.insert("looks".into(), self.looks.into());
        report.insert("dry_looks".into(), self.dry.into());
    }
}

/// Refuses what cannot be repeated.
pub fn check(mode: Mode, to: &Connect) -> Result<(), Error> {
    if !matches!(mode, Mode::Send | Mode::Sink) {
        return Err(Error::Usage("--replay: only with --mode send and --mode sink".into()));
    }
    if !to.is_virtio() {
        return Err(Error::Usage("--replay: only with --connect vhost-user:SOCKET".into()));
    }
    Ok(())
}

impl Generator {
    /// Fills the transmit rings with what is sent from then on.
    pub(super) fn prepare_replay(&mut self) -> Result<(), Error> {
        let sending = if self.mode == Mode::Send { self.flows.len() } else { 0 };
        for queue in 0..sending {
            // No more than that: the switch may be taking them already.
            let mut left = usize::from(self.guest.pairs[queue].tx.ring.size());
            while left > 0 {
                left -= self.send_on(queue, left, now_ns())?;
            }
            let tx = &mut self.guest.pairs[queue].tx;
            tx.kick_now();
            // Counted when the switch has taken them.
            tx.counts = Default::default();
        }
        (self.totals.sent, self.totals.sent_bytes) = (0, 0);
        let pairs = &self.guest.pairs;
        let can = pairs.iter().all(|pair| pair.rx.ring.can_repeat())
            && pairs[..sending].iter().all(|pair| pair.tx.ring.can_repeat());
        if !can {
            let what = "a frame must take one descriptor, so neither packed nor header=apart, and \
                        tx-completion=orphan";
            return Err(Error::Usage(format!("--replay: not with these settings: {what}")));
        }
        self.replay = Some(Replay::new(sending));
        Ok(())
    }

    /// Repeats until `deadline`; false: the switch is gone.
    pub(super) fn replay(&mut self, deadline: Option<u64>) -> Result<bool, Malformed> {
        let Self { guest, totals, sizes, replay: Some(replay), .. } = self else {
            unreachable!("was prepared");
        };
        let deadline = deadline.unwrap_or_else(|| now_ns() + LOOK_AROUND_NS);
        let mean = sizes.iter().map(|size| u64::from(*size)).sum::<u64>() / sizes.len() as u64;
        loop {
            let mut share: f64 = 0.0;
            for (i, pair) in guest.pairs.iter_mut().enumerate() {
                if i < replay.sending {
                    let n = pair.tx.ring.repeat()?;
                    pair.tx.counts.frames += u64::from(n);
                    totals.sent += u64::from(n);
                    totals.sent_bytes += u64::from(n) * mean;
                    share = share.max(replay.looked(n, pair.tx.ring.size()));
                }
                let n = pair.rx.ring.repeat()?;
                pair.rx.counts.frames += u64::from(n);
                totals.received += u64::from(n);
                // A sender is sent next to nothing; that must not make it look less often.
                share = share.max(replay.looked(n, pair.rx.ring.size()));
            }
            replay.adapt(share);
            let now = now_ns();
            if now >= deadline {
                return Ok(!guest.is_gone());
            }
            guest.counts.naps += 1;
            let nap = (replay.nap_ns as u64).min(deadline - now);
            if readable(&[guest.link.as_fd()], Some(nap))[0] && guest.is_gone() {
                return Ok(false);
            }
            guest.counts.asleep_ns += now_ns() - now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_come_so_often_that_a_quarter_of_the_ring_is_used_between() {
        // A switch that uses so many frames of a ring of 1024 in a microsecond.
        for rate in [0.01, 0.2, 1.0, 5.0, 20.0] {
            let mut replay = Replay::new(1);
            for _ in 0..100 {
                let used = (replay.nap_ns / 1000.0 * rate).min(1024.0) as u16;
                let share = replay.looked(used, 1024);
                replay.adapt(share);
            }
            let share = replay.nap_ns / 1000.0 * rate / 1024.0;
            // The longest nap, where a quarter takes longer.
            let wanted = if rate < 0.05 { 0.048..0.05 } else { 0.2..0.32 };
            assert!(wanted.contains(&share), "{rate}: {share}");
            assert_eq!(replay.dry, 0);
        }
    }
}
