//! `pvswitch gen`: traffic as a guest would make it, from the driver half.
//!
//! Frames are UDP over IPv4 with 18 bytes of our own at the start of the payload: a mark, the
//! sequence number and the time of sending, so that a sink tells loss, order and latency. The time
//! is the machine's monotonic clock, the same for all processes.

use std::fmt;
use std::os::fd::AsFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde_json::{Value, json};
use shm::Seg;
use switch::poll::{Action, Costs, Poller};
use vhost_user::feature;

use crate::cli::{GenArgs, GenMode};
use crate::guest::{self, Connect, Guest, HDR_LEN, TX_BUFFER};
use crate::{AnyError, Usage};

/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
/// Mark, sequence number, time.
const STAMP: usize = 18;
/// Shortest frame that carries the stamp; also Ethernet's own minimum, without FCS.
const SIZE_MIN: u32 = (HEADERS + STAMP) as u32;
/// Longest frame: jumbo.
const SIZE_MAX: u32 = 9216;
const MARK: [u8; 2] = *b"pv";
/// Longest wait, at the end, for the switch to take the last frames.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// Frames handled at once.
const BATCH: usize = 64;

/// Frame sizes, in bytes without FCS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size(Vec<u32>);

impl FromStr for Size {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let error = || {
            format!("'{s}' is no frame size: use N, MIN-MAX ({SIZE_MIN} to {SIZE_MAX}), or imix")
        };
        let one = |s: &str| {
            let n = s.parse().map_err(|_| error())?;
            if (SIZE_MIN..=SIZE_MAX).contains(&n) { Ok(n) } else { Err(error()) }
        };
        if s == "imix" {
            // The usual simple IMIX, 7:4:1, less the FCS.
            return Ok(Self([[60; 7].as_slice(), &[566; 4], &[1514]].concat()));
        }
        match s.split_once('-') {
            None => Ok(Self(vec![one(s)?])),
            Some((min, max)) => {
                let (min, max) = (one(min)?, one(max)?);
                if min > max {
                    return Err(error());
                }
                // Spread out, not ascending: neighbours differ as they do in real traffic.
                let span = u64::from(max - min + 1);
                let step = |i: u64| min + (i * 40_503 % span) as u32;
                Ok(Self((0..span.min(1024)).map(step).collect()))
            }
        }
    }
}

/// A rate in frames a second: `1000`, `100k`, `1.5M`.
pub fn parse_rate(s: &str) -> Result<f64, String> {
    let (digits, factor) = match s.char_indices().last() {
        Some((at, 'k' | 'K')) => (&s[..at], 1e3),
        Some((at, 'm' | 'M')) => (&s[..at], 1e6),
        _ => (s, 1.0),
    };
    let rate = digits.parse::<f64>().ok().map(|n| n * factor);
    rate.filter(|n| n.is_finite() && *n > 0.0)
        .ok_or_else(|| format!("'{s}' is no rate: use frames a second, 1000, 100k or 1.5M"))
}

/// What was seen.
#[derive(Default)]
struct Totals {
    sent: u64,
    sent_bytes: u64,
    received: u64,
    received_bytes: u64,
    /// Sequence numbers skipped, less those that came late.
    lost: i64,
    late: u64,
    /// Frames that were not ours (ARP and the like).
    foreign: u64,
    next_seq: u64,
    sleeps: u64,
}

/// The command.
pub fn command(args: GenArgs) -> Result<(), AnyError> {
    let to = Connect::try_from(&args.connect).map_err(Usage)?;
    let duration = args.duration.map(crate::seconds).transpose().map_err(Usage)?;
    let interval = args.interval.map(crate::seconds).transpose().map_err(Usage)?;
    if interval.is_some_and(|i| i.is_zero()) {
        return Err(Usage("--interval 0: use a time between reports, in seconds".into()).into());
    }
    let stop = crate::nic::stop_flag()?;
    let running = || !stop.load(std::sync::atomic::Ordering::Relaxed);
    let guest = guest::connect(&to, Some(&running))?;
    let features = guest.frontend.features();
    if !args.json {
        eprintln!(
            "connected to {}: {}",
            guest::name(&to.socket),
            feature::names(features).join(" ")
        );
    }
    let mut generator = Generator::new(guest, &args);
    if matches!(args.mode, GenMode::Sink | GenMode::Echo) {
        generator.announce();
    }
    let started = Instant::now();
    let mut report_at = interval.map(|i| started + i);
    let result = loop {
        let end = duration.is_some_and(|d| started.elapsed() >= d);
        if end || !running() {
            break Ok(());
        }
        if report_at.is_some_and(|at| Instant::now() >= at) {
            report_at = report_at.zip(interval).map(|(at, i)| at + i);
            generator.print(started.elapsed(), features, args.json);
        }
        // A slice of work between two looks at the clock and the flags.
        let deadline = [duration.map(|d| started + d), report_at].into_iter().flatten().min();
        if let Err(error) = generator.slice(deadline) {
            break Err(error);
        }
        if guest::is_gone(&generator.guest.frontend) {
            break Err("the switch closed the connection".into());
        }
    };
    let elapsed = started.elapsed();
    if result.is_ok() {
        generator.drain()?;
    }
    generator.print(elapsed, features, args.json);
    result
}

struct Generator {
    guest: Guest,
    mode: GenMode,
    sizes: Vec<u32>,
    flows: u16,
    /// Time between frames, in ns; `None`: as fast as it goes.
    gap_ns: Option<f64>,
    mac: [u8; 6],
    peer: [u8; 6],
    poller: Poller,
    epoch: Instant,
    totals: Totals,
    latency_ns: Histogram<u64>,
    /// Request/response: the answer that is awaited, and since when.
    awaiting: Option<(u64, u64)>,
    cpu_before: Duration,
}

impl Generator {
    fn new(guest: Guest, args: &GenArgs) -> Self {
        Self {
            guest,
            mode: args.mode,
            sizes: args.size.0.clone(),
            flows: args.flows.max(1),
            gap_ns: args.rate.map(|rate| 1e9 / rate),
            mac: args.mac,
            peer: args.peer,
            poller: Poller::new(args.connect.poll, Costs::TYPICAL, 0),
            epoch: Instant::now(),
            totals: Totals::default(),
            latency_ns: Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("constant bounds"),
            awaiting: None,
            cpu_before: cpu_time(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Waits until the switch has taken what was sent, or for [`DRAIN_MAX`].
    fn drain(&mut self) -> Result<(), guest::Malformed> {
        let end = Instant::now() + DRAIN_MAX;
        let Guest { frontend, tx, .. } = &mut self.guest;
        while tx.reclaim()? < usize::from(tx.size()) && !guest::is_gone(frontend) {
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Works for a while, or sleeps until there is something to do or `deadline`.
    fn slice(&mut self, deadline: Option<Instant>) -> Result<(), AnyError> {
        for _ in 0..256 {
            let received = self.receive()?;
            let sent = match self.mode {
                GenMode::Send => self.send_due()?,
                GenMode::Rr => self.ask()?,
                GenMode::Sink | GenMode::Echo => 0,
            };
            let now = self.now_ns();
            if self.poller.next(received + sent, now) == Action::Arm {
                self.sleep(deadline)?;
                self.poller.wake(self.now_ns());
                return Ok(());
            }
        }
        Ok(())
    }

    /// Tells the switch where we are, as a guest's kernel does when its interface comes up: frames
    /// for an address never seen go to every port, and are dropped where there is no room at once.
    fn announce(&mut self) {
        let tx = &mut self.guest.tx;
        let i = tx.free().next().expect("nothing was sent yet");
        let frame = crate::ports::rarp(self.mac);
        let mut to = tx.memory(i);
        to.write(&[0; HDR_LEN]);
        to.write(&frame);
        tx.send(i, (HDR_LEN + frame.len()) as u32);
        tx.publish();
    }

    /// How many frames are due by now.
    fn due(&self) -> u64 {
        match self.gap_ns {
            None => u64::MAX,
            Some(gap) => {
                (self.now_ns() as f64 / gap) as u64 + 1 - self.totals.sent.min(u64::MAX - 1)
            }
        }
    }

    fn send_due(&mut self) -> Result<usize, guest::Malformed> {
        let due = match self.gap_ns {
            None => BATCH as u64,
            Some(gap) => ((self.now_ns() as f64 / gap) as u64 + 1).saturating_sub(self.totals.sent),
        };
        let due = usize::try_from(due).unwrap_or(BATCH).min(BATCH);
        self.send(due)
    }

    /// Sends up to `n` frames.
    fn send(&mut self, n: usize) -> Result<usize, guest::Malformed> {
        // Taking buffers back costs a cache line of the ring: only when they run low.
        let mut free = self.guest.tx.free().take(n).count();
        if free < n {
            free = self.guest.tx.reclaim()?.min(n);
        }
        let now = monotonic_ns();
        for _ in 0..free {
            let seq = self.totals.sent;
            let size = self.sizes[(seq % self.sizes.len() as u64) as usize];
            let flow = (seq % u64::from(self.flows)) as u16;
            let i = self.guest.tx.free().next().expect("counted above");
            let mut to = self.guest.tx.memory(i);
            to.write(&[0; HDR_LEN]);
            to.write(&headers(self.mac, self.peer, size, flow));
            to.write(&stamp(seq, now));
            // The payload is touched, as a guest's own would be.
            let mut left = size - SIZE_MIN;
            while left > 0 {
                left -= to.write(&[0xa5; 256][..left.min(256) as usize]);
            }
            self.guest.tx.send(i, HDR_LEN as u32 + size);
            self.totals.sent += 1;
            self.totals.sent_bytes += u64::from(size);
        }
        if free > 0 {
            self.guest.tx.publish();
        }
        Ok(free)
    }

    /// Request/response: sends the next request when the last one was answered.
    fn ask(&mut self) -> Result<usize, guest::Malformed> {
        let now = self.now_ns();
        // An answer that does not come in 100 ms was lost.
        if self.awaiting.is_some_and(|(_, since)| now.saturating_sub(since) < 100_000_000) {
            return Ok(0);
        }
        if self.awaiting.take().is_some() {
            self.totals.lost += 1;
        }
        if self.gap_ns.is_some() && self.due() == 0 {
            return Ok(0);
        }
        let seq = self.totals.sent;
        let sent = self.send(1)?;
        if sent > 0 {
            self.awaiting = Some((seq, now));
        }
        Ok(sent)
    }

    fn receive(&mut self) -> Result<usize, guest::Malformed> {
        let Self { guest, mode, totals, latency_ns, awaiting, mac, .. } = self;
        let Guest { rx, tx, .. } = guest;
        let now = monotonic_ns();
        let mut echoes = 0;
        if *mode == GenMode::Echo {
            tx.reclaim()?;
        }
        let frames = rx.receive(BATCH, |segs| {
            let len: u32 = segs.iter().map(|s| s.len()).sum::<u32>().saturating_sub(HDR_LEN as u32);
            totals.received += 1;
            totals.received_bytes += u64::from(len);
            let mut head = [0; HDR_LEN + HEADERS + STAMP];
            let mut at = 0;
            for seg in segs {
                at += seg.read(&mut head[at..]);
            }
            touch(segs);
            let stamp = &head[HDR_LEN + HEADERS..];
            if at < head.len() || stamp[..2] != MARK {
                totals.foreign += 1;
                return;
            }
            let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| stamp[i + b]));
            let (seq, sent) = (word(2), word(10));
            match mode {
                GenMode::Echo => echoes += u64::from(echo(tx, segs, *mac)),
                GenMode::Rr => {
                    if awaiting.is_some_and(|(awaited, _)| awaited == seq) {
                        *awaiting = None;
                        let _ = latency_ns.record(now.saturating_sub(sent).max(1));
                    }
                }
                GenMode::Send | GenMode::Sink => {
                    totals.order(seq);
                    let _ = latency_ns.record(now.saturating_sub(sent).max(1));
                }
            }
        })?;
        if frames > 0 {
            rx.refill();
        }
        if echoes > 0 {
            self.totals.sent += echoes;
            self.guest.tx.publish();
        }
        Ok(frames)
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<(), guest::Malformed> {
        let Guest { frontend, tx, rx } = &mut self.guest;
        let full = tx.reclaim()? == 0;
        // A sender with a rate sleeps until its next frame is due; one without only while it has
        // no buffer: one that came back since it looked last may be the only one for long.
        let until_due = match (self.mode, self.gap_ns) {
            // Nothing is due while an answer is awaited; `most` is when it counts as lost.
            (GenMode::Rr, _) if self.awaiting.is_some() => None,
            (GenMode::Send, None) if !full => return Ok(()),
            (GenMode::Send | GenMode::Rr, Some(gap)) => {
                let at = Duration::from_nanos((self.totals.sent as f64 * gap) as u64);
                Some(at.saturating_sub(self.epoch.elapsed()))
            }
            (GenMode::Rr, None) => Some(Duration::from_millis(100)),
            _ => None,
        };
        let until_end = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let most = Some(Duration::from_millis(100));
        let timeout = [until_due, until_end, most].into_iter().flatten().min();
        if rx.arm() && (!full || tx.arm()) {
            self.totals.sleeps += 1;
            guest::sleep(&[frontend.as_fd()], &[rx.call.as_fd(), tx.call.as_fd()], timeout);
        }
        rx.disarm();
        tx.disarm();
        Ok(())
    }

    fn print(&self, elapsed: Duration, features: u64, json: bool) {
        let t = &self.totals;
        let secs = elapsed.as_secs_f64().max(1e-9);
        let q = |p: f64| self.latency_ns.value_at_quantile(p);
        let cpu = (cpu_time() - self.cpu_before).as_secs_f64();
        let value = json!({
            "mode": format!("{:?}", self.mode).to_lowercase(),
            "features": feature::names(features),
            "duration_s": secs,
            "sent_frames": t.sent,
            "sent_bytes": t.sent_bytes,
            "sent_pps": t.sent as f64 / secs,
            "received_frames": t.received,
            "received_bytes": t.received_bytes,
            "received_pps": t.received as f64 / secs,
            "received_bps": t.received_bytes as f64 * 8.0 / secs,
            "lost_frames": t.lost.max(0),
            "late_frames": t.late,
            "foreign_frames": t.foreign,
            "latency_ns_p50": q(0.5),
            "latency_ns_p99": q(0.99),
            "latency_ns_p999": q(0.999),
            "latency_samples": self.latency_ns.len(),
            "cpu_s": cpu,
            "kicks": self.guest.tx.kicks + self.guest.rx.kicks,
            "sleeps": t.sleeps,
        });
        if json {
            println!("{value}");
        } else {
            println!("{}", Summary(&value));
        }
    }
}

impl Totals {
    fn order(&mut self, seq: u64) {
        if seq >= self.next_seq {
            // What was sent before we came is not lost.
            if self.received > 1 {
                self.lost += i64::try_from(seq - self.next_seq).unwrap_or(i64::MAX);
            }
            self.next_seq = seq + 1;
        } else {
            self.late += 1;
            self.lost -= 1;
        }
    }
}

/// The totals as a person reads them.
struct Summary<'a>(&'a Value);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = |key: &str| self.0[key].as_f64().unwrap_or(0.0);
        write!(
            f,
            "{:.1} s: sent {} ({:.3} M/s), received {} ({:.3} M/s, {:.2} Gbit/s), lost {}, late {}",
            n("duration_s"),
            self.0["sent_frames"],
            n("sent_pps") / 1e6,
            self.0["received_frames"],
            n("received_pps") / 1e6,
            n("received_bps") / 1e9,
            self.0["lost_frames"],
            self.0["late_frames"],
        )?;
        if n("latency_samples") > 0.0 {
            let us = |key: &str| n(key) / 1e3;
            write!(
                f,
                "; latency p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
                us("latency_ns_p50"),
                us("latency_ns_p99"),
                us("latency_ns_p999")
            )?;
        }
        write!(
            f,
            "; CPU {:.2} s, {} kicks, {} sleeps",
            n("cpu_s"),
            self.0["kicks"],
            self.0["sleeps"]
        )
    }
}

/// Ethernet, IPv4 and UDP headers of a frame of `size` bytes.
fn headers(src: [u8; 6], dst: [u8; 6], size: u32, flow: u16) -> [u8; HEADERS] {
    let mut h = [0; HEADERS];
    h[..6].copy_from_slice(&dst);
    h[6..12].copy_from_slice(&src);
    h[12..14].copy_from_slice(&[8, 0]);
    let ip_len = (size - 14) as u16;
    h[14..16].copy_from_slice(&[0x45, 0]);
    h[16..18].copy_from_slice(&ip_len.to_be_bytes());
    // Not fragmented; TTL 64; UDP.
    h[20..24].copy_from_slice(&[0x40, 0, 64, 17]);
    // 10.x.y.z from the MACs' last bytes.
    h[26..30].copy_from_slice(&[10, src[3], src[4], src[5]]);
    h[30..34].copy_from_slice(&[10, dst[3], dst[4], dst[5]]);
    let sum: u32 = h[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    h[24..26].copy_from_slice(&sum.to_be_bytes());
    h[34..36].copy_from_slice(&(10_000 + flow).to_be_bytes());
    h[36..38].copy_from_slice(&9_u16.to_be_bytes());
    // UDP over IPv4 may go without checksum: zero.
    h[38..40].copy_from_slice(&(ip_len - 20).to_be_bytes());
    h
}

fn stamp(seq: u64, now: u64) -> [u8; STAMP] {
    let mut s = [0; STAMP];
    s[..2].copy_from_slice(&MARK);
    s[2..10].copy_from_slice(&seq.to_le_bytes());
    s[10..].copy_from_slice(&now.to_le_bytes());
    s
}

/// Reads a frame's bytes, as whoever receives it would.
fn touch(segs: &[Seg<'_>]) {
    let mut chunk = [0_u8; 512];
    for seg in segs {
        let mut seg = *seg;
        while !seg.is_empty() {
            let n = seg.read(&mut chunk);
            std::hint::black_box(&chunk);
            seg = seg.skip(n as u32);
        }
    }
}

/// Sends a frame back with its addresses swapped; false when there is no buffer.
fn echo(tx: &mut guest::Tx, segs: &[Seg<'_>], mac: [u8; 6]) -> bool {
    let Some(i) = tx.free().next() else { return false };
    let len: u32 = segs.iter().map(|s| s.len()).sum();
    if u64::from(len) > TX_BUFFER {
        return false;
    }
    let mut head = [0; HDR_LEN + 14];
    let mut at = 0;
    for seg in segs {
        at += seg.read(&mut head[at..]);
    }
    let from: [u8; 6] = std::array::from_fn(|b| head[HDR_LEN + 6 + b]);
    head[..HDR_LEN].fill(0);
    head[HDR_LEN..HDR_LEN + 6].copy_from_slice(&from);
    head[HDR_LEN + 6..HDR_LEN + 12].copy_from_slice(&mac);
    let mut to = tx.memory(i);
    let mut skip = to.write(&head);
    for seg in segs {
        let n = seg.len().min(skip);
        skip -= n;
        to.copy_from(seg.skip(n));
    }
    tx.send(i, len);
    true
}

/// The machine's monotonic clock, in ns: comparable between processes.
fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!("60".parse(), Ok(Size(vec![60])));
        let spread: Size = "60-1514".parse().unwrap();
        assert!(spread.0.iter().all(|s| (60..=1514).contains(s)) && spread.0.len() == 1024);
        assert_eq!("imix".parse::<Size>().unwrap().0.len(), 12);
        for bad in ["", "59", "9217", "100-60", "x", "60-"] {
            assert!(bad.parse::<Size>().unwrap_err().contains("imix"), "{bad}");
        }
    }

    #[test]
    fn rates() {
        assert_eq!(parse_rate("1.5M"), Ok(1.5e6));
        assert_eq!(parse_rate("100k"), Ok(1e5));
        for bad in ["", "k", "-1", "0", "fast", "inf"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn order_counts_gaps_and_forgives_late_frames() {
        let mut t = Totals { received: 2, next_seq: 5, ..Totals::default() };
        t.order(8);
        assert_eq!((t.lost, t.late), (3, 0));
        t.order(6);
        assert_eq!((t.lost, t.late), (2, 1));
    }

    #[test]
    fn ip_header_checksum_verifies() {
        let h = headers([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 60, 3);
        let sum: u32 =
            h[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
}
