//! A TAP interface served by the driver half, for a namespace or container.
//!
//! The kernel reads and writes frames directly in the memory shared with the switch. A TAP and a
//! virtqueue use the same virtio-net header; Xen rings express it by flags and extra infos. The
//! interface remains when the switch ends, and traffic resumes when the switch is back.
//!
//! Each queue of the interface has its own queue pair, so a flow that the kernel keeps on one queue
//! keeps its order.

mod carrier;
mod retry;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shm::Seg;
use uplink::{Batching, TapFd, TapOptions};

use self::carrier::Carrier;
use self::retry::Retry;
use crate::connect::{Connect, connect};
use crate::control::Control;
use crate::error::Error;
use crate::guest::{Guest, WaitFor, now};
use crate::report::Report;
use crate::ring::Malformed;
use crate::rx::Rx;
use crate::tx::Tx;
use switch::time::{Instant, Ns};

/// Frames moved in one batch.
const BATCH: usize = 64;
/// Longest sleep.
const SLEEP_MAX: Ns = Ns::from_secs(1);

/// Options of a NIC.
#[derive(Clone, Debug)]
pub struct Options {
    /// The connection to the switch.
    pub to: Connect,
    /// The interface, with as many queues as the connection has queue pairs.
    pub tap: TapOptions,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Print counters as JSON.
    pub json: bool,
    /// Interval of reports.
    pub interval: Option<Duration>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
}

/// Serves an interface while `running` returns true.
///
/// It reconnects when the switch comes back, and prints counters when a connection ends.
///
/// # Errors
/// The interface or the control socket cannot be opened.
pub fn run(options: &Options, running: &dyn Fn() -> bool) -> Result<(), Error> {
    let Options { to, tap: TapOptions { name, queues, .. }, .. } = options;
    let tap = open(&options.tap)?;
    let fd = Arc::clone(&tap.queues[0]);
    let mut taps: Vec<_> = tap.queues.iter().map(TapQueue::new).collect();
    let sources: Vec<_> = tap.queues.iter().map(|fd| fd.as_fd()).collect();
    let end = options.duration.map(|d| now() + Ns::from(d));
    let keep_running = || running() && end.is_none_or(|end| now() < end);
    let control = Control::listen(options.control.as_deref(), "nic", queues.get())?;
    let control = control.as_ref();
    let waits = || {
        control.inspect(|control| control.serve(now(), true, None));
        keep_running()
    };
    let (mut retry, mut carrier) = (Retry::new(), Carrier::default());
    while keep_running() {
        let mut guest = match connect(to, Some(&waits)) {
            Ok(guest) => guest,
            Err(_) if !keep_running() => break,
            Err(error) => {
                let (news, wait) = retry.record_failure(&error.to_string());
                if let Some(news) = news {
                    tracing::warn!("{}: {news}", to.target);
                }
                retry::pause(wait, &waits);
                continue;
            }
        };
        retry = Retry::new();
        // From now on the kernel does offloads that the switch lacks. Frames already queued may
        // still need them, and are dropped.
        let takes = tap.offloads_read.and(&guest.link.tx_offloads());
        uplink::request_offloads(&*fd, &takes).map_err(|error| {
            let what = format!("cannot set its offloads ({error}); does it exist?");
            Error::Failed(format!("interface {name}: {what}"))
        })?;
        let names = guest.link.features().join(" ");
        tracing::info!("{name} connected to {}: {names}", to.target);
        if let Some(wrong) = carrier::mtu_mismatch(tap.mtu, guest.link.mtu()) {
            tracing::warn!("{name}: {wrong}");
        }
        control.inspect(|control| control.apply(&mut guest));
        let reporter = Reporter::new(name, options.interval, options.json);
        let (taps, sources, carrier) = (&mut taps, &sources, &mut carrier);
        let mut session = Session { guest, taps, sources, reporter, carrier, control };
        match session.serve(&keep_running) {
            Ok(()) => {}
            Err(error) => tracing::warn!("the switch violated the ring protocol: {error}"),
        }
        session.reporter.report(&mut session.guest);
        if keep_running() {
            tracing::info!("{name}: the switch disconnected; waiting for it");
        }
    }
    Ok(())
}

/// Opens the interface with all queues that were asked for.
fn open(options: &TapOptions) -> Result<uplink::Tap, Error> {
    let tap = uplink::open(options)?;
    if tap.queues.len() < usize::from(options.queues.get()) {
        let name = &options.name;
        let what = format!("interface {name} has one queue, because it lacks multi_queue");
        let what = format!("{what}: leave out --queues, or remove it, so that nic creates it");
        return Err(Error::Failed(what));
    }
    Ok(tap)
}

/// One queue of the interface.
struct TapQueue {
    reads: TapFd,
    writes: TapFd,
    /// Number of frames in the last batch.
    last: usize,
}

impl TapQueue {
    fn new(fd: &Arc<OwnedFd>) -> Self {
        let tap = || TapFd::new(Arc::clone(fd), Batching::Auto);
        Self { reads: tap(), writes: tap(), last: 1 }
    }
}

/// Prints the counters of a connection: at its end, and at an interval if requested.
struct Reporter<'a> {
    tap: &'a str,
    json: bool,
    started: Instant,
    cpu_before: Duration,
    interval: Ns,
    /// Time of the next report.
    next: Instant,
}

impl<'a> Reporter<'a> {
    fn new(tap: &'a str, interval: Option<Duration>, json: bool) -> Self {
        let started = now();
        let interval = interval.map_or(Ns::MAX, Ns::from);
        let next = started + interval;
        Self { tap, json, started, cpu_before: os::process_cpu_time(), interval, next }
    }

    fn due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = (self.next + self.interval).max(now);
        }
        due
    }

    fn report(&self, guest: &mut Guest) {
        let elapsed = Duration::from(now() - self.started);
        let report = Report::new(guest, elapsed);
        if self.json {
            let mut value = json!({
                "tap": self.tap,
                "features": guest.link.features(),
                "duration_s": elapsed.as_secs_f64(),
                "sent_frames": report.frames()[0],
                "received_frames": report.frames()[1],
                "cpu_s": (os::process_cpu_time() - self.cpu_before).as_secs_f64(),
            });
            if let (Some(all), Value::Object(more)) = (value.as_object_mut(), report.json()) {
                all.extend(more);
            }
            println!("{value}");
        } else {
            tracing::info!("{}: {report}", self.tap);
        }
    }
}

/// A connection to the switch, and what is served beside it.
struct Session<'a> {
    guest: Guest,
    taps: &'a mut [TapQueue],
    /// The queues of the interface, to wait for frames.
    sources: &'a [BorrowedFd<'a>],
    reporter: Reporter<'a>,
    carrier: &'a mut Carrier,
    control: Option<&'a Control>,
}

impl Session<'_> {
    /// Moves frames until the switch is gone or `keep_running` returns false.
    fn serve(&mut self, keep_running: &dyn Fn() -> bool) -> Result<(), Malformed> {
        let Self { guest, taps, sources, reporter, carrier, control } = self;
        let mut rounds = 0_u32;
        loop {
            let now = now();
            if reporter.due(now) {
                reporter.report(guest);
            }
            carrier.update(reporter.tap, sources[0], &guest.link);
            if let Some(control) = control {
                control.serve(now, guest.control_ready, Some(guest));
            }
            guest.begin(now)?;
            let mut sent = 0;
            for (pair, tap) in guest.pairs.iter_mut().zip(taps.iter_mut()) {
                let room = send(&mut pair.tx, tap, now)?;
                sent += tap.last;
                if pair.poll_max > 0 {
                    deliver(&mut pair.rx, &mut tap.writes, pair.poll_max.min(BATCH))?;
                }
                // Without a buffer, whether a frame waits decides how to sleep.
                pair.blocked =
                    room == 0 && os::poll_readable(&[tap.reads.as_fd()], Some(Duration::ZERO))[0];
            }
            guest.end(now);
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(1024) && (!keep_running() || guest.is_gone()) {
                return Ok(());
            }
            // A signal just before a sleep does not end it.
            let until = Some(reporter.next.min(now + SLEEP_MAX));
            let control = control.map(AsFd::as_fd);
            let also = WaitFor { sources, more: sent > 0, until, control };
            let slept = guest.counts.sleeps + guest.counts.naps;
            if !guest.wait(&also)? {
                return Ok(());
            }
            if guest.counts.sleeps + guest.counts.naps > slept && !keep_running() {
                return Ok(());
            }
        }
    }
}

/// TAP to ring: one batch, slightly larger than the number of frames found last time. On an idle
/// TAP, a large batch would cost more than moving a few frames. Returns how many there was room
/// for.
fn send(tx: &mut Tx, tap: &mut TapQueue, now: Instant) -> Result<usize, Malformed> {
    let want = (tap.last * 2).clamp(1, BATCH);
    tap.last = 0;
    let room = tx.room(want)?;
    if room == 0 {
        return Ok(0);
    }
    let mut offered = [0_u16; BATCH];
    let mut batch = tap.reads.reads();
    for (i, to) in tx.free().take(room).zip(&mut offered) {
        for seg in tx.memory(i) {
            batch.push(seg);
        }
        batch.end_frame();
        *to = i;
    }
    let mut lens = [0_u32; BATCH];
    for (len, read) in lens.iter_mut().zip(batch.run()) {
        // EAGAIN: no frame at that moment; a later read may still have found one. Other errors
        // (the interface is down) are treated alike.
        *len = read.unwrap_or(0);
    }
    let mut frames = 0;
    for (i, len) in offered[..room].iter().zip(lens).filter(|(_, len)| *len > 0) {
        frames += usize::from(tx.send(*i, len));
    }
    if frames > 0 {
        tx.publish(frames, now);
    }
    tap.last = frames;
    Ok(room)
}

/// Ring to TAP: available frames in one batch, directly from their buffers.
fn deliver(rx: &mut Rx, tap: &mut TapFd, max: usize) -> Result<(), Malformed> {
    let mut batch = tap.writes();
    let frames = rx.receive(max, |frame: &[Seg<'_>]| {
        for seg in frame {
            batch.push(*seg);
        }
        batch.end_frame();
    })?;
    if frames > 0 {
        // A frame that the kernel rejects is lost, as on a wire.
        batch.run();
        rx.refill();
    }
    Ok(())
}
