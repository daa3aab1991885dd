//! The traffic generator: a guest that sends, receives, echoes or measures frames.
//!
//! Frames are UDP over IPv4 with an 18-byte stamp at the start of the payload: a mark, the sequence
//! number and the time of sending, from which a sink computes loss, order and latency. The time is
//! the machine's monotonic clock, the same for all processes.
//!
//! With several queues each flow stays on one queue; one thread serves all queues.

mod frame;
mod hdr;
mod idle;
mod migrate;
mod pace;
mod pass;
mod replay;
mod trial;

use std::fmt;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};
use shm::Seg;

use self::frame::{
    HEADERS, MARK, SIZE_MIN, SOURCE_PORT, STAMP, fill, headers, is_whole, nth, stamp, touch,
};
use self::pace::Pace;
use self::replay::Replay;
use crate::connect::{Connect, connect};
use crate::control::Control;
use crate::error::Error;
use crate::guest::{Guest, Pair, WaitFor, now};
use crate::report::Report;
use crate::ring::{HDR_LEN, Malformed};
use crate::tx::Tx;
use switch::time::{Instant, Ns};

pub use self::frame::{Aside, Size, parse_also};
pub use self::idle::{Idle, raise_limit, run as run_idle, targets};
pub use self::migrate::{Migrate, run as run_migrate};
pub use self::pace::{Burst, OnOff, parse_rate};
pub use self::pass::{Pass, run as run_pass};
pub use self::trial::{Trial, run as run_trial};

/// Longest wait at the end until the switch has taken the last frames.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// Frames handled at once.
const BATCH: usize = 64;
/// Time after which an answer counts as lost.
const ANSWER_MAX: Ns = Ns::from_ms(100);
/// Longest sleep: a signal just before a sleep does not end it.
const SLEEP_MAX: Ns = Ns::from_ms(100);
/// Minimum and maximum time for which a sender spins before a frame is due.
const SPIN: (Ns, Ns) = (Ns::from_us(50), Ns::from_ms(2));

/// Totals of a run.
#[derive(Default)]
struct Totals {
    sent: u64,
    sent_bytes: u64,
    received: u64,
    received_bytes: u64,
    /// Sequence numbers skipped, minus late frames.
    lost: i64,
    /// Frames received after a later one of their flow.
    late: u64,
    /// Per flow, the number after the highest received: order between flows is not guaranteed.
    flow_next: Vec<u64>,
    /// Frames without our mark (for example ARP).
    foreign: u64,
    corrupt: u64,
    /// Frames sent to the second address (`--also`).
    aside: u64,
    first_seq: Option<u64>,
    next_seq: u64,
}

/// Mode of a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Send frames.
    Send,
    /// Count received frames.
    Sink,
    /// Return received frames with swapped addresses.
    Echo,
    /// Send one, wait for its echo, measure, repeat.
    Rr,
}

/// Options of a generator.
#[derive(Clone, Debug)]
pub struct Options {
    /// The connection to the switch.
    pub to: Connect,
    /// Mode.
    pub mode: Mode,
    /// Sizes of frames sent.
    pub size: Size,
    /// Frames per second; `None`: unlimited.
    pub rate: Option<f64>,
    /// Send the same frames repeatedly, and do not read received ones.
    pub replay: bool,
    /// Frames sent at once.
    pub burst: Option<Burst>,
    /// Alternating traffic and pauses.
    pub on_off: Option<OnOff>,
    /// Send at multiples of this time only, and sleep in between; `None`: each frame when due.
    pub tick: Option<Ns>,
    /// Number of flows.
    pub flows: u16,
    /// Number of addresses from `mac` and from `peer` upwards, in turn by flows.
    pub addresses: u32,
    /// Our MAC address.
    pub mac: [u8; 6],
    /// Destination MAC address.
    pub peer: [u8; 6],
    /// Fill frames from their number, and check received ones.
    pub check: bool,
    /// Frames to a second address in between.
    pub also: Option<Aside>,
    /// CPU to run on.
    pub cpu: Option<usize>,
    /// Frames to send, requests included, or to receive; those to a second address are not counted.
    /// `None`: unlimited.
    pub frames: Option<u64>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
    /// Interval of reports.
    pub interval: Option<Duration>,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Print totals as JSON.
    pub json: bool,
    /// File for the histogram of latencies.
    pub hdr: Option<PathBuf>,
    /// Delay after which a timed sleep ends late on this machine.
    pub nap_late: Ns,
}

impl Options {
    /// Checks options before the connection is awaited.
    ///
    /// # Errors
    /// Options contradict each other.
    pub fn check(&self) -> Result<(), Error> {
        if self.replay {
            replay::check(self.mode, &self.to)?;
        }
        if self.control.is_some() && self.replay {
            let what = "--control: not supported with --replay, which uses no policies";
            return Err(Error::Usage(what.into()));
        }
        if self.frames.is_some() && self.mode == Mode::Echo {
            return Err(Error::Usage("--frames: only with --mode send, sink and rr".into()));
        }
        check_pace(self.rate, self.burst, self.on_off, self.tick)
    }

    /// The connection, with buffers for the frame sizes sent.
    fn connection(&self) -> Connect {
        let mut to = self.to.clone();
        if matches!(self.mode, Mode::Send | Mode::Rr) {
            to = to.frames_up_to(self.size.longest());
        }
        if self.replay { to.small() } else { to }
    }
}

/// Connects, and sends or receives frames while `running` returns true; prints totals.
///
/// # Errors
/// Options contradict each other, the connection fails, or the switch ends it.
pub fn run(options: &Options, running: &dyn Fn() -> bool) -> Result<(), Error> {
    options.check()?;
    if let Some(cpu) = options.cpu {
        pin(cpu)?;
    }
    let to = options.connection();
    let control = Control::listen(options.control.as_deref(), "gen", to.queues)?;
    let control = control.as_ref();
    let waits = || {
        control.inspect(|control| control.serve(now(), true, None));
        running()
    };
    let mut guest = connect(&to, Some(&waits))?;
    control.inspect(|control| control.apply(&mut guest));
    if !options.json {
        eprintln!("connected to {}: {}", to.target, guest.link.features().join(" "));
    }
    let mut generator = Generator::new(guest, options)?;
    if matches!(options.mode, Mode::Sink | Mode::Echo) {
        announce(&mut generator.guest.pairs[0].tx, options.mac);
    }
    if options.replay {
        generator.prepare_replay()?;
    }
    generator.run(options.duration.map(Ns::from), options.interval.map(Ns::from), control, running)
}

/// Checks that rate, burst and on-off times are compatible.
///
/// # Errors
/// Two are not; the error names them.
pub fn check_pace(
    rate: Option<f64>,
    burst: Option<Burst>,
    on_off: Option<OnOff>,
    tick: Option<Ns>,
) -> Result<(), Error> {
    let pace = Pace::new(Instant::START, rate, burst, on_off);
    pace.and_then(|pace| pace.with_tick(tick)).map(drop).map_err(Error::Usage)
}

/// Binds this thread to a CPU.
///
/// # Errors
/// The CPU does not exist, or its use is not permitted.
pub fn pin(cpu: usize) -> Result<(), Error> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
    }
    sched_setaffinity(None, &set)
        .map_err(|error| Error::Usage(format!("--cpu {cpu}: no such CPU ({error})")))
}

struct Generator {
    guest: Guest,
    mode: Mode,
    sizes: Vec<u32>,
    /// Flows of each queue; the last queues may have none, and are absent.
    flows: Vec<u64>,
    /// The next queue to send.
    turn: usize,
    pace: Pace,
    /// Time before a frame is due in which a sender does not sleep.
    spin: Ns,
    mac: [u8; 6],
    peer: [u8; 6],
    addresses: u32,
    totals: Totals,
    latency_ns: Histogram<u64>,
    /// Fill frames from their number, and check received ones.
    check: bool,
    also: Option<Aside>,
    /// Frames to send or, for a sink, to receive.
    frames: u64,
    /// Request/response: the awaited answer, and since when.
    awaiting: Option<(u64, Instant)>,
    replay: Option<Replay>,
    cpu_before: Duration,
    hdr: Option<PathBuf>,
    json: bool,
}

/// Result of a round.
#[derive(Default)]
struct Round {
    sent: usize,
    /// There are frames to send, but no buffer.
    blocked: bool,
}

impl Generator {
    /// Runs until the deadline, a signal, or the end of the switch; prints totals.
    fn run(
        &mut self,
        duration: Option<Ns>,
        interval: Option<Ns>,
        control: Option<&Control>,
        running: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let (wall, started) = (std::time::SystemTime::now(), now());
        let end = duration.map(|d| started + d);
        let mut report_at = interval.map(|i| started + i);
        let result = loop {
            let now = now();
            if end.is_some_and(|end| now >= end) || self.is_done() || !running() {
                break Ok(());
            }
            if report_at.is_some_and(|at| now >= at) {
                report_at = report_at.zip(interval).map(|(at, i)| at + i);
                self.print(now - started);
            }
            if let Some(control) = control {
                control.serve(now, self.guest.control_ready, Some(&mut self.guest));
            }
            // A slice of work, then checks of the clock and the flags.
            let deadline = [end, report_at, Some(now + SLEEP_MAX)].into_iter().flatten().min();
            match self.slice(deadline, control) {
                Ok(true) => {}
                Ok(false) => break Err(Error::Failed("the switch closed the connection".into())),
                Err(error) => break Err(error.into()),
            }
        };
        let elapsed = now() - started;
        if result.is_ok() && self.replay.is_none() {
            self.drain()?;
        }
        self.print(elapsed);
        if let Some(path) = &self.hdr {
            hdr::write(path, &self.latency_ns, wall, elapsed.into())?;
        }
        result
    }

    fn new(guest: Guest, args: &Options) -> Result<Self, Error> {
        let (longest, most) = (args.size.longest(), guest.pairs[0].tx.ring.longest());
        if longest > most {
            let what = format!("this port accepts frames of at most {most} bytes");
            return Err(Error::Usage(format!("--size: {longest} bytes: {what}")));
        }
        let pace = Pace::new(now(), args.rate, args.burst, args.on_off);
        let pace = pace.and_then(|pace| pace.with_tick(args.tick)).map_err(Error::Usage)?;
        Ok(Self {
            mode: args.mode,
            sizes: args.size.0.clone(),
            flows: flows_of(args.flows.max(1).into(), guest.pairs.len()),
            turn: 0,
            pace,
            spin: match args.tick {
                Some(_) => Ns::ZERO,
                None => (2 * args.nap_late).clamp(SPIN.0, SPIN.1),
            },
            mac: args.mac,
            peer: args.peer,
            addresses: args.addresses.max(1),
            totals: Totals::new(),
            latency_ns: latency_histogram(),
            check: args.check,
            also: args.also,
            frames: args.frames.unwrap_or(u64::MAX),
            awaiting: None,
            replay: None,
            cpu_before: os::process_cpu_time(),
            hdr: args.hdr.clone(),
            json: args.json,
            guest,
        })
    }

    /// Waits until the switch has taken all frames sent, at most [`DRAIN_MAX`].
    fn drain(&mut self) -> Result<(), Malformed> {
        let end = now() + Ns::from(DRAIN_MAX);
        let Guest { link, pairs, .. } = &mut self.guest;
        for pair in &mut *pairs {
            pair.tx.kick_now();
        }
        while pairs.iter().any(|pair| pair.tx.in_flight() > 0) && !link.is_gone() && now() < end {
            for pair in &mut *pairs {
                pair.tx.reclaim()?;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Works for a while, or sleeps until there is work or until `deadline`. Returns false if the
    /// switch is gone.
    fn slice(
        &mut self,
        deadline: Option<Instant>,
        control: Option<&Control>,
    ) -> Result<bool, Malformed> {
        if self.replay.is_some() {
            return self.replay(deadline);
        }
        for _ in 0..256 {
            if self.is_done() {
                return Ok(true);
            }
            let now = now();
            let polls = self.guest.begin(now)?;
            if polls && self.mode != Mode::Echo {
                self.receive(now)?;
            }
            let round = match self.mode {
                Mode::Send => self.send_due(now)?,
                Mode::Rr => self.send_request(now)?,
                Mode::Echo if polls => self.echo(now)?,
                _ => Round::default(),
            };
            self.guest.end(now);
            let next = if round.blocked { None } else { self.next_due(now) };
            if next.is_some_and(|at| at > now && at < now + self.spin) {
                continue;
            }
            let until = next.map(|at| if at > now { at - self.spin } else { now });
            let also = WaitFor {
                sources: &[],
                more: next == Some(now),
                until: [until, deadline].into_iter().flatten().min(),
                control: control.map(AsFd::as_fd),
            };
            let slept = self.guest.counts.sleeps + self.guest.counts.naps;
            if !self.guest.wait(&also)? {
                return Ok(false);
            }
            if self.guest.counts.sleeps + self.guest.counts.naps > slept {
                return Ok(true);
            }
        }
        Ok(!self.guest.is_gone())
    }

    /// Whether all frames were sent, and the last request replied to, or all were received.
    fn is_done(&self) -> bool {
        let Totals { sent, received, .. } = self.totals;
        let frames = if self.mode == Mode::Sink { received } else { sent };
        frames >= self.frames && self.awaiting.is_none()
    }

    /// When to send next, `now` if at once; `None`: only after receiving a frame.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        match (self.mode, self.awaiting) {
            (Mode::Send, _) => Some(self.pace.next(now)),
            (Mode::Rr, Some((_, since))) => Some(since + ANSWER_MAX),
            (Mode::Rr, None) => Some(self.pace.next(now)),
            _ => None,
        }
    }

    fn send_due(&mut self, now: Instant) -> Result<Round, Malformed> {
        let due = usize::try_from(self.pace.due(now)).unwrap_or(BATCH).min(BATCH);
        self.send(due, now)
    }

    /// Sends up to `n` frames, spread evenly over queues with flows, limited by free buffers.
    fn send(&mut self, n: usize, now: Instant) -> Result<Round, Malformed> {
        let left = self.frames.saturating_sub(self.totals.sent);
        let n = n.min(usize::try_from(left).unwrap_or(usize::MAX));
        if n == 0 {
            return Ok(Round::default());
        }
        let queues = self.flows.len();
        let mut sent = 0;
        for left in (1..=queues).rev() {
            let share = (n - sent).div_ceil(left);
            if share > 0 {
                sent += self.send_on(self.turn, share, now)?;
                self.turn = (self.turn + 1) % queues;
            }
        }
        if sent > 0 {
            self.pace.record_sent(sent as u64, now);
        }
        let blocked = sent == 0;
        for pair in &mut self.guest.pairs[..queues] {
            pair.blocked = blocked;
        }
        Ok(Round { sent, blocked })
    }

    /// Sends up to `n` frames of a queue's flows, in turn; returns how many found buffers.
    fn send_on(&mut self, queue: usize, n: usize, now: Instant) -> Result<usize, Malformed> {
        let (queues, flows) = (self.guest.pairs.len() as u64, self.flows[queue]);
        let tx = &mut self.guest.pairs[queue].tx;
        let free = tx.room(n)?;
        for turn in (tx.counts.frames..).take(free) {
            let i = tx.free().next().expect("limited to free buffers");
            let seq = self.totals.sent;
            let size = self.sizes[(seq % self.sizes.len() as u64) as usize];
            let aside = |also: &Aside| seq >= (self.totals.aside + 1) * also.every;
            if let Some(also) = self.also.filter(aside) {
                let mut to = tx.plain(i);
                to.write(&headers(self.mac, also.mac, size, 0));
                // No mark: its receiver is not part of the measurement.
                to.write(&[0; STAMP]);
                tx.send(i, HDR_LEN as u32 + size);
                self.totals.aside += 1;
                continue;
            }
            let flow = (turn % flows * queues + queue as u64) as u16;
            let mut to = tx.plain(i);
            let [mac, peer] = [self.mac, self.peer].map(|m| nth(m, flow.into(), self.addresses));
            to.write(&headers(mac, peer, size, flow));
            to.write(&stamp(seq, now));
            // Writes the payload, as a guest would.
            let mut left = size - SIZE_MIN;
            let filled = if self.check { fill(seq) } else { [0xa5; 256] };
            while left > 0 {
                left -= to.write(&filled[..left.min(256) as usize]);
            }
            let sent = tx.send(i, HDR_LEN as u32 + size);
            assert!(sent, "a plain frame, no longer than the longest");
            self.totals.sent += 1;
            self.totals.sent_bytes += u64::from(size);
        }
        if free > 0 {
            tx.publish(free, now);
        }
        Ok(free)
    }

    /// Request/response: sends the next request after the last answer.
    fn send_request(&mut self, now: Instant) -> Result<Round, Malformed> {
        if self.awaiting.is_some_and(|(_, since)| now < since + ANSWER_MAX) {
            return Ok(Round::default());
        }
        if self.awaiting.take().is_some() {
            self.totals.lost += 1;
        }
        let seq = self.totals.sent;
        let round = self.send(self.pace.due(now).min(1) as usize, now)?;
        // The frame may have been one for the second address.
        if self.totals.sent > seq {
            self.awaiting = Some((seq, now));
        }
        Ok(round)
    }

    /// Echoes received frames on the same queue, limited by free buffers.
    fn echo(&mut self, now: Instant) -> Result<Round, Malformed> {
        let Self { guest, totals, mac, .. } = self;
        let mut round = Round::default();
        for Pair { rx, tx, blocked, rx_blocked, poll_max, .. } in &mut guest.pairs {
            if *poll_max == 0 {
                continue;
            }
            let room = tx.room(BATCH.min(*poll_max))?;
            let waits = room == 0 && rx.ring.has_used();
            (*blocked, *rx_blocked) = (waits, waits);
            round.blocked |= waits;
            if room == 0 {
                continue;
            }
            let mut echoes = 0;
            let frames = rx.receive(room, |segs| {
                totals.count(segs);
                touch(segs);
                if head_of(segs).1 {
                    echoes += usize::from(echo(tx, segs, *mac));
                } else {
                    totals.foreign += 1;
                }
            })?;
            if frames > 0 {
                rx.refill();
            }
            if echoes > 0 {
                totals.sent += echoes as u64;
                tx.publish(echoes, now);
            }
            round.sent += echoes;
        }
        Ok(round)
    }

    fn receive(&mut self, now: Instant) -> Result<(), Malformed> {
        let Self { guest, mode, totals, latency_ns, awaiting, check, .. } = self;
        for pair in guest.pairs.iter_mut().filter(|pair| pair.poll_max > 0) {
            let frames = pair.rx.receive(BATCH.min(pair.poll_max), |segs| {
                totals.count(segs);
                touch(segs);
                let (head, ours) = head_of(segs);
                if !ours {
                    totals.foreign += 1;
                    return;
                }
                let stamp = &head[HDR_LEN + HEADERS..];
                let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| stamp[i + b]));
                let (seq, sent) = (word(2), Instant::from_ns(word(10)));
                totals.corrupt += u64::from(*check && !is_whole(segs, HDR_LEN, seq));
                if *mode != Mode::Rr {
                    totals.order(flow_of(&head), seq);
                } else if awaiting.is_none_or(|(awaited, _)| awaited != seq) {
                    return;
                }
                *awaiting = None;
                let _ = latency_ns.record((now - sent).get().max(1));
            })?;
            if frames > 0 {
                pair.rx.refill();
            }
        }
        Ok(())
    }

    fn print(&mut self, elapsed: Ns) {
        let elapsed = Duration::from(elapsed);
        let report = Report::new(&mut self.guest, elapsed);
        let t = &self.totals;
        let secs = elapsed.as_secs_f64().max(1e-9);
        let q = |p: f64| self.latency_ns.value_at_quantile(p);
        let cpu = (os::process_cpu_time() - self.cpu_before).as_secs_f64();
        let settings = self.guest.settings.pairs();
        let settings: Value = settings
            .into_iter()
            .map(|(key, value)| (key.to_string(), Value::from(value)))
            .collect();
        let mut value = json!({
            "mode": format!("{:?}", self.mode).to_lowercase(),
            "features": self.guest.link.features(),
            "settings": settings,
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
            "corrupt_frames": t.corrupt,
            "aside_frames": t.aside,
            "latency_ns_p50": q(0.5),
            "latency_ns_p99": q(0.99),
            "latency_ns_p999": q(0.999),
            "latency_ns_max": self.latency_ns.max(),
            "latency_samples": self.latency_ns.len(),
            "cpu_s": cpu,
        });
        if let (Some(all), Value::Object(more)) = (value.as_object_mut(), report.json()) {
            all.extend(more);
            if let Some(replay) = &self.replay {
                replay.add_to_report(all);
            }
        }
        if self.json {
            println!("{value}");
        } else {
            println!("{}\ndriver: {report}", Summary(&value));
        }
    }
}

/// An empty histogram of latencies, up to a minute.
fn latency_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("constant bounds")
}

/// Announces an address, as a guest's kernel does when its interface comes up: frames for an
/// unknown address are flooded to every port, and dropped where there is no room at once.
fn announce(tx: &mut Tx, mac: [u8; 6]) {
    let i = tx.free().next().expect("nothing was sent yet");
    let frame = switch::flow::rarp(mac);
    tx.plain(i).write(&frame);
    let sent = tx.send(i, (HDR_LEN + frame.len()) as u32);
    tx.publish(usize::from(sent), now());
    tx.kick_now();
}

/// The first bytes of a frame with its header, and whether it has our mark.
fn head_of(segs: &[Seg<'_>]) -> ([u8; HDR_LEN + HEADERS + STAMP], bool) {
    let mut head = [0; HDR_LEN + HEADERS + STAMP];
    let mut at = 0;
    for seg in segs {
        at += seg.read(&mut head[at..]);
    }
    let ours = at == head.len() && head[HDR_LEN + HEADERS..][..2] == MARK;
    (head, ours)
}

/// The flow of a frame with our mark: its source port.
fn flow_of(head: &[u8; HDR_LEN + HEADERS + STAMP]) -> u16 {
    u16::from_be_bytes([head[HDR_LEN + SOURCE_PORT], head[HDR_LEN + SOURCE_PORT + 1]])
}

/// Number of flows of each queue; queues without flows are left out.
fn flows_of(flows: u64, queues: usize) -> Vec<u64> {
    let n = queues as u64;
    (0..n.min(flows)).map(|queue| (flows - queue).div_ceil(n)).collect()
}

impl Totals {
    fn new() -> Self {
        // Pages of unused flows are never touched.
        Self { flow_next: vec![0; 1 + usize::from(u16::MAX)], ..Self::default() }
    }

    fn count(&mut self, segs: &[Seg<'_>]) {
        let len: u32 = segs.iter().map(|s| s.len()).sum();
        self.received += 1;
        self.received_bytes += u64::from(len.saturating_sub(HDR_LEN as u32));
    }

    fn order(&mut self, flow: u16, seq: u64) {
        let after = seq.saturating_add(1);
        let flow_next = &mut self.flow_next[usize::from(flow)];
        self.late += u64::from(seq < *flow_next);
        *flow_next = after.max(*flow_next);
        let skipped = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        match self.first_seq {
            // Frames sent before the first one received are not lost.
            None => (self.first_seq, self.next_seq) = (Some(seq), after),
            Some(_) if seq >= self.next_seq => {
                self.lost += skipped(seq - self.next_seq);
                self.next_seq = after;
            }
            // The queue of the first frame was polled after another queue.
            Some(first) if seq < first => {
                self.lost += skipped(first - seq - 1);
                self.first_seq = Some(seq);
            }
            Some(_) => self.lost -= 1,
        }
    }
}

/// The totals as text.
struct Summary<'a>(&'a Value);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = |key: &str| self.0[key].as_f64().unwrap_or(0.0);
        write!(
            f,
            "{:.1} s: sent {} ({:.3} M/s), received {} ({:.3} M/s",
            n("duration_s"),
            self.0["sent_frames"],
            n("sent_pps") / 1e6,
            self.0["received_frames"],
            n("received_pps") / 1e6,
        )?;
        if let Some(all) = self.0.get("ring_polls_exhausted") {
            write!(f, "), unread; {all} of {} polls found all used", self.0["ring_polls"])?;
        } else {
            let (lost, late) = (&self.0["lost_frames"], &self.0["late_frames"]);
            write!(f, ", {:.2} Gbit/s), lost {lost}, late {late}", n("received_bps") / 1e9)?;
        }
        if n("latency_samples") > 0.0 {
            let us = |key: &str| n(key) / 1e3;
            write!(
                f,
                "; latency p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} us",
                us("latency_ns_p50"),
                us("latency_ns_p99"),
                us("latency_ns_p999"),
                us("latency_ns_max")
            )?;
        }
        write!(f, "; CPU {:.2} s", n("cpu_s"))
    }
}

/// Returns a frame with its addresses swapped; false: there is no room.
fn echo(tx: &mut Tx, segs: &[Seg<'_>], mac: [u8; 6]) -> bool {
    let len: u32 = segs.iter().map(|s| s.len()).sum();
    if len > tx.ring.longest() + HDR_LEN as u32 || len < HDR_LEN as u32 + 14 {
        return false;
    }
    let Some(i) = tx.free().next() else { return false };
    let mut head = [0; HDR_LEN + 14];
    let mut at = 0;
    for seg in segs {
        at += seg.read(&mut head[at..]);
    }
    let from: [u8; 6] = std::array::from_fn(|b| head[HDR_LEN + 6 + b]);
    head[HDR_LEN..HDR_LEN + 6].copy_from_slice(&from);
    head[HDR_LEN + 6..HDR_LEN + 12].copy_from_slice(&mac);
    let mut to = tx.plain(i);
    let mut skip = HDR_LEN as u32 + to.write(&head[HDR_LEN..]);
    for seg in segs {
        let n = seg.len().min(skip);
        skip -= n;
        to.copy_from(seg.skip(n));
    }
    tx.send(i, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_count_as_lost_until_late_frames_fill_them() {
        let mut t = Totals::new();
        // Frames before the first are not lost.
        t.order(1, 4);
        t.order(1, 8);
        assert_eq!((t.lost, t.late), (3, 0));
        t.order(1, 6);
        assert_eq!((t.lost, t.late), (2, 1));
    }

    #[test]
    fn order_between_flows_is_not_checked() {
        let mut t = Totals::new();
        for (flow, seq) in [(2, 5), (2, 7), (1, 4), (1, 6), (2, 9), (1, 2)] {
            t.order(flow, seq);
        }
        // 3 and 8 are missing; 2 is late after 6, which is of the same flow.
        assert_eq!((t.lost, t.late), (2, 1));
    }

    #[test]
    fn each_flow_uses_one_queue() {
        assert_eq!(flows_of(5, 1), [5]);
        assert_eq!(flows_of(1, 4), [1]);
        assert_eq!(flows_of(3, 3), [1, 1, 1]);
        assert_eq!(flows_of(65_535, 2), [32_768, 32_767]);
    }
}
