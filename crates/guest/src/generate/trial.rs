//! `gen --mode trial`: one trial of a throughput search, with both guests in one thread.
//!
//! ```text
//!   connect ─ announce addresses ─ warm-up ─┬─ window: frames that count ─┬─ rest: received only
//!                                           0                          window_s
//! ```
//! A frame is due at a time that only the rate decides. It has that time in its stamp, so a delay
//! before it could be sent is part of its latency. Frames of the window that were due and not
//! received are lost, whatever the cause: a switch that leaves them in the sender's ring does not
//! lose fewer than one that drops them.

mod end;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use self::end::{End, Flows, Latencies, Received};
use super::frame::Size;
use super::{hdr, latency_histogram};
use crate::connect::{Connect, connect};
use crate::error::Error;
use crate::guest::now;
use switch::time::{Instant, Ns};

/// Interval of checks of signals and of the connections.
const CHECK_EVERY: Ns = Ns::from_ms(20);
/// After the window: longest wait for frames under way (RFC 2544, section 23), and time without
/// one after which none is awaited.
const REST_MAX: Ns = Ns::from_secs(2);
const REST_QUIET: Ns = Ns::from_ms(200);
/// Time between two turns from which on the guests have had no CPU.
const PAUSE: Ns = Ns::from_us(50);
/// Longest wait for the switch to take the announcements.
const ANNOUNCE_MAX: Ns = Ns::from_secs(10);

/// Options of a trial.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The guests' connection, without the target.
    pub to: Connect,
    /// Sockets of both ports.
    pub targets: [String; 2],
    /// Sizes of frames, in turn.
    pub size: Size,
    /// Frames per second in each direction; `None`: as many as the switch takes.
    pub rate: Option<f64>,
    /// Whether the second guest sends, too.
    pub both_ways: bool,
    /// Number of addresses of each guest.
    pub addresses: u32,
    /// Number of flows (UDP source ports).
    pub flows: u16,
    /// First MAC address of the first guest.
    pub mac: [u8; 6],
    /// First MAC address of the second guest.
    pub peer: [u8; 6],
    /// CPU to run on.
    pub cpu: Option<usize>,
    /// Time with traffic before the window.
    pub warm_up: Duration,
    /// Length of the window.
    pub window: Duration,
    /// File for the histogram of latencies.
    pub hdr: Option<PathBuf>,
    /// Print totals as JSON.
    pub json: bool,
}

/// When frames are due.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    start: Instant,
    /// Start and end of the window.
    window: [Instant; 2],
    /// Time from one frame to the next in ns; `None`: unlimited.
    period: Option<f64>,
}

impl Schedule {
    fn new(start: Instant, trial: &Trial) -> Self {
        let open = start + Ns::from(trial.warm_up);
        let period = trial.rate.map(|rate| 1e9 / rate);
        Self { start, window: [open, open + Ns::from(trial.window)], period }
    }

    /// When frame `n` is due; `at` if there is no rate.
    fn due(&self, n: u64, at: Instant) -> Instant {
        self.period.map_or(at, |period| self.start + Ns::new((n as f64 * period) as u64))
    }

    /// Number of frames due before `at`; `None`: unlimited.
    fn count(&self, at: Instant) -> Option<u64> {
        let since = (at - self.start).get() as f64;
        self.period.map(|period| (since / period).ceil() as u64)
    }
}

/// Counts of the window, of all directions.
#[derive(Clone, Debug)]
struct Window {
    /// Frames due; without a rate, frames sent.
    offered: u64,
    /// Frames of these that were sent, up to the end.
    sent: u64,
    /// Frames of these that were received, up to the end of the rest.
    received: u64,
    bytes: u64,
    /// Time in turns without a frame to send or to receive.
    idle: Ns,
    /// Longest time between two turns: then the guests had no CPU.
    pause: Ns,
    latencies: Latencies,
}

/// Makes one trial, unless `running` returns false; prints totals.
///
/// # Errors
/// A connection fails, the switch ends it, or the file cannot be written.
pub fn run(trial: &Trial, running: &dyn Fn() -> bool) -> Result<(), Error> {
    if !trial.to.is_virtio() {
        let what = "--mode trial: only with --connect vhost-user:SOCKET";
        return Err(Error::Usage(what.into()));
    }
    if trial.to.settings.apart {
        return Err(Error::Usage("--set header=apart: not with --mode trial".into()));
    }
    if trial.to.settings.full.queue() > 0 {
        return Err(Error::Usage("--set tx-full=queue: not with --mode trial".into()));
    }
    if end::overlap(trial.mac, trial.peer, trial.addresses) {
        let what = "--peer: the addresses from there on overlap those from --mac on";
        return Err(Error::Usage(what.into()));
    }
    if let Some(cpu) = trial.cpu {
        super::pin(cpu)?;
    }
    let longest = trial.size.longest();
    let to = trial.to.clone().small().frames_up_to(longest);
    let addresses = [trial.mac, trial.peer];
    let mut ends = Vec::new();
    for (i, target) in trial.targets.iter().enumerate() {
        let guest = connect(&to.at(target.into()), Some(running))?;
        let most = guest.pairs[0].tx.ring.longest();
        if longest > most {
            return Err(Error::Usage(format!("--size: {longest} bytes: {most} at most here")));
        }
        let flows = Flows {
            mac: addresses[i],
            peer: addresses[1 - i],
            addresses: trial.addresses,
            flows: trial.flows,
            sizes: trial.size.0.clone(),
        };
        ends.push(End::new(guest, flows, i == 0 || trial.both_ways));
    }
    let mut ends: [End; 2] = ends.try_into().unwrap_or_else(|_| unreachable!("two were made"));
    announce(&mut ends, running)?;
    let features = ends[0].features();
    let wall = std::time::SystemTime::now();
    let cpu_before = os::process_cpu_time();
    let window = make(trial, &mut ends, running)?;
    if let Some(path) = &trial.hdr {
        hdr::write(path, &window.latencies.of_all, wall + trial.warm_up, trial.window)?;
    }
    let seconds = trial.window.as_secs_f64();
    let sum = |of: &dyn Fn(&Received) -> u64| ends.iter().map(|end| of(&end.received)).sum::<u64>();
    let lost = window.offered.saturating_sub(window.received);
    let Latencies { of_all, added } = &window.latencies;
    let latency = |quantile| of_all.value_at_quantile(quantile);
    let report = json!({
        "mode": "trial",
        "features": features,
        "window_s": seconds,
        "offered_frames": window.offered,
        "sent_frames": window.sent,
        "received_frames": window.received,
        "received_pps": window.received as f64 / seconds.max(1e-9),
        "received_bps": window.bytes as f64 * 8.0 / seconds.max(1e-9),
        "not_sent_frames": window.offered - window.sent,
        "lost_frames": lost,
        "loss": lost as f64 / window.offered.max(1) as f64,
        "all_sent_frames": ends.iter().map(|end| end.sent).sum::<u64>(),
        "all_received_frames": sum(&|received| received.frames),
        "late_frames": sum(&|received| received.late),
        "foreign_frames": sum(&|received| received.foreign),
        "idle_s": window.idle.get() as f64 / 1e9,
        "pause_ns_max": window.pause.get(),
        "latency_ns_p50": latency(0.5),
        "latency_ns_p99": latency(0.99),
        "latency_ns_p999": latency(0.999),
        "latency_ns_max": of_all.max(),
        "latency_samples": of_all.len(),
        "added_ns_p50": added.value_at_quantile(0.5),
        "added_ns_p99": added.value_at_quantile(0.99),
        "added_ns_p999": added.value_at_quantile(0.999),
        "added_samples": added.len(),
        "cpu_s": (os::process_cpu_time() - cpu_before).as_secs_f64(),
    });
    if trial.json {
        println!("{report}");
    } else {
        let us = |quantile| latency(quantile) as f64 / 1e3;
        println!(
            "{seconds:.1} s: offered {}, received {} ({:.3} M/s), lost {lost}, of these not sent \
             {}; latency p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, of these in the switch {:.1} \
             and {:.1} us (p50, p99); {:.0} % without work",
            window.offered,
            window.received,
            window.received as f64 / seconds.max(1e-9) / 1e6,
            window.offered - window.sent,
            us(0.5),
            us(0.99),
            us(0.999),
            added.value_at_quantile(0.5) as f64 / 1e3,
            added.value_at_quantile(0.99) as f64 / 1e3,
            100.0 * window.idle.get() as f64 / 1e9 / seconds.max(1e-9),
        );
    }
    Ok(())
}

/// Sends a frame from each address of each guest, as their kernels do when interfaces come up.
fn announce(ends: &mut [End; 2], running: &dyn Fn() -> bool) -> Result<(), Error> {
    let end = now() + ANNOUNCE_MAX;
    loop {
        let mut done = true;
        for one in &mut *ends {
            done &= one.announce()?;
            // Frames for unknown addresses are flooded to the other guest.
            one.receive(now(), u64::MAX, None)?;
        }
        if done || !running() {
            return Ok(());
        }
        if now() > end || ends.iter_mut().any(End::is_gone) {
            let what = "the switch did not take the frames that announce addresses";
            return Err(Error::Failed(what.into()));
        }
    }
}

/// Sends and receives until all frames of the window have arrived, or are lost.
fn make(trial: &Trial, ends: &mut [End; 2], running: &dyn Fn() -> bool) -> Result<Window, Error> {
    let schedule = Schedule::new(now(), trial);
    let [open, close] = schedule.window;
    let mut window = Window {
        offered: 0,
        sent: 0,
        received: 0,
        bytes: 0,
        idle: Ns::ZERO,
        pause: Ns::ZERO,
        latencies: Latencies { of_all: latency_histogram(), added: latency_histogram() },
    };
    let senders = ends.iter().filter(|end| end.sends).count() as u64;
    // Numbers of the first frame of the window, by sender.
    let first = schedule.count(open);
    let mut firsts = [first.unwrap_or(u64::MAX); 2];
    let (mut before, mut check_at) = (schedule.start, schedule.start + CHECK_EVERY);
    let mut stop = close;
    loop {
        let at = now();
        let since = at - before;
        if at >= stop {
            // What is due is sent late by guests that had no CPU just before the end.
            if stop > close || since < PAUSE || trial.rate.is_none() {
                break;
            }
            stop = at + since + since;
        }
        before = at;
        if at >= check_at {
            check_at = at + CHECK_EVERY;
            if !running() || ends.iter_mut().any(End::is_gone) {
                return Err(Error::Failed("ended before the end of the window".into()));
            }
        }
        let opened = at >= open;
        if opened {
            window.pause = window.pause.max(since);
        }
        let due = schedule.count(at.min(close));
        let mut worked = false;
        for (i, end) in ends.iter_mut().enumerate() {
            if opened && firsts[i] == u64::MAX {
                firsts[i] = end.sent;
            }
            worked |= end.send(due.unwrap_or(u64::MAX), |n| schedule.due(n, at))?;
        }
        worked |= receive(ends, firsts, &mut window)?;
        if opened && !worked {
            window.idle += since;
        }
    }
    for (end, first) in ends.iter().zip(firsts).filter(|(end, _)| end.sends) {
        window.sent += end.sent.saturating_sub(first);
    }
    window.offered = match schedule.count(close).zip(first) {
        Some((last, first)) => (last - first) * senders,
        None => window.sent,
    };
    let (last, mut quiet_since) = (close + REST_MAX, now());
    while window.received < window.sent {
        let at = now();
        if at >= last || at >= quiet_since + REST_QUIET {
            break;
        }
        if receive(ends, firsts, &mut window)? {
            quiet_since = at;
        }
        std::hint::spin_loop();
    }
    Ok(window)
}

/// Receives at both ends; false: there was nothing.
fn receive(ends: &mut [End; 2], firsts: [u64; 2], window: &mut Window) -> Result<bool, Error> {
    let mut some = false;
    for i in 0..ends.len() {
        let [a, b] = &mut *ends;
        let (end, other) = if i == 0 { (a, &*b) } else { (b, &*a) };
        // The other end sent them.
        let record = (&mut window.latencies, &other.published);
        let counted = end.receive(now(), firsts[1 - i], Some(record))?;
        window.received += counted.frames;
        window.bytes += counted.bytes;
        some |= counted.any;
    }
    Ok(some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(rate: Option<f64>) -> Schedule {
        let at = Instant::from_ns;
        let period = rate.map(|rate| 1e9 / rate);
        Schedule { start: at(1_000), window: [at(2_000), at(3_000)], period }
    }

    #[test]
    fn frames_due_before_a_time_are_those_that_count() {
        for rate in [1.0, 3e6, 333_333.3, 1e9 / 7.0] {
            let schedule = schedule(Some(rate));
            for at in (1_000..40_000).step_by(17).map(Instant::from_ns) {
                let count = schedule.count(at).unwrap();
                let before = (0..count + 2).filter(|n| schedule.due(*n, Instant::START) < at);
                assert_eq!(before.count() as u64, count, "{rate} {at:?}");
            }
        }
    }

    #[test]
    fn a_frame_without_a_rate_is_due_when_it_is_sent() {
        let at = Instant::from_ns(5_000);
        assert_eq!((schedule(None).due(7, at), schedule(None).count(at)), (at, None));
    }
}
