//! A guest's counters, as text and JSON.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::guest::{Guest, Pair, SleepCounts};
use crate::rx::RxCounts;
use crate::tx::TxCounts;

/// The counters of a guest: sums over its queues.
pub struct Report {
    tx: TxCounts,
    rx: RxCounts,
    sleep: SleepCounts,
    kicks: [u64; 2],
    calls: [u64; 2],
    /// Frames that the switch rejected, and received frames that we rejected.
    lost: [u64; 2],
    /// Counters and state of each queue.
    queues: Vec<Value>,
    /// Pages kept mapped, and number of refused requests.
    statics: (usize, u64),
    elapsed: Duration,
}

fn per(n: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { n as f64 / of as f64 }
}

/// Counters and state of queue pair `i`.
fn queue(guest: &Guest, i: usize) -> Value {
    let pair = &guest.pairs[i];
    let Pair { tx, rx, .. } = pair;
    json!({
        "poll": guest.settings.poll_of(i).to_string(),
        "kick": guest.settings.kick_of(i).to_string(),
        "state": guest.state(pair).name(),
        "sent_frames": tx.counts.frames,
        "received_frames": rx.counts.frames,
        "polls": rx.counts.polls,
        "polls_empty": rx.counts.polls_empty,
        "kicks_tx": tx.ring.kicks,
        "kicks_rx": rx.ring.kicks,
        "calls_tx": tx.ring.calls,
        "calls_rx": rx.ring.calls,
    })
}

impl Report {
    /// Reads the counters of `guest`, which has run for `elapsed`.
    pub fn new(guest: &mut Guest, elapsed: Duration) -> Self {
        let mut report = Self {
            tx: TxCounts::default(),
            rx: RxCounts::default(),
            sleep: guest.counts,
            kicks: [0; 2],
            calls: [0; 2],
            lost: [0; 2],
            queues: Vec::new(),
            statics: guest.link.static_grants(),
            elapsed,
        };
        // Calls received while awake.
        for Pair { tx, rx, .. } in &mut guest.pairs {
            tx.ring.take_calls();
            rx.ring.take_calls();
        }
        let guest = &*guest;
        report.queues = (0..guest.pairs.len()).map(|i| queue(guest, i)).collect();
        for Pair { tx, rx, .. } in &guest.pairs {
            report.tx += tx.counts;
            report.rx += rx.counts;
            for (i, ring) in [&tx.ring, &rx.ring].into_iter().enumerate() {
                report.kicks[i] += ring.kicks;
                report.calls[i] += ring.calls;
                report.lost[i] += ring.lost();
            }
        }
        report
    }

    /// Frames sent and received, of all queues.
    pub fn frames(&self) -> [u64; 2] {
        [self.tx.frames, self.rx.frames]
    }

    /// Returns the counters as JSON.
    pub fn json(&self) -> Value {
        json!({
            "queues": self.queues,
            "polls": self.rx.polls,
            "polls_empty": self.rx.polls_empty,
            "sleeps": self.sleep.sleeps,
            "naps": self.sleep.naps,
            "asleep_s": self.sleep.asleep.get() as f64 / 1e9,
            "kicks": self.kicks[0] + self.kicks[1],
            "kicks_tx": self.kicks[0],
            "kicks_rx": self.kicks[1],
            "calls_tx": self.calls[0],
            "calls_rx": self.calls[1],
            "frames_per_kick": per(self.tx.frames, self.kicks[0]),
            "frames_per_call": per(self.rx.frames, self.calls[1]),
            "reclaims": self.tx.reclaims,
            "reclaimed_buffers": self.tx.reclaimed,
            "refills": self.rx.refills,
            "refilled_buffers": self.rx.refilled,
            "tx_stops": self.tx.stops,
            "tx_busy": self.tx.busy,
            "tx_queued": self.tx.queued,
            "tx_refused": self.tx.refused,
            "tx_errors": self.lost[0],
            "rx_errors": self.lost[1],
            "static_grants": self.statics.0,
            "static_grants_refused": self.statics.1,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tx, rx, sleep, kicks, calls, lost, elapsed, .. } = self;
        write!(
            f,
            "{:.1} s: sent {}, {} kicks ({:.1} frames each), {} calls, {} buffers in {} reclaims, \
             {} stops, {} retries; received {} in {} polls ({} empty), {} calls ({:.1} frames \
             each), {} buffers in {} refills, {} kicks; {} sleeps, {} naps, asleep {:.1} s",
            elapsed.as_secs_f64(),
            tx.frames,
            kicks[0],
            per(tx.frames, kicks[0]),
            calls[0],
            tx.reclaimed,
            tx.reclaims,
            tx.stops,
            tx.busy,
            rx.frames,
            rx.polls,
            rx.polls_empty,
            calls[1],
            per(rx.frames, calls[1]),
            rx.refilled,
            rx.refills,
            kicks[1],
            sleep.sleeps,
            sleep.naps,
            sleep.asleep.get() as f64 / 1e9,
        )?;
        if tx.refused + lost[0] + lost[1] > 0 {
            let [sent, received] = lost;
            write!(f, "; dropped: {} refused, {sent} sent, {received} received", tx.refused)?;
        }
        Ok(())
    }
}
