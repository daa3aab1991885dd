//! A TAP interface served by the driver half, for a namespace or container.
//!
//! The kernel reads and writes frames straight from and into the memory shared with the switch;
//! the TAP's virtio-net header and a virtqueue's are the same bytes, and Xen's rings are told of
//! them in another way. The interface stays when the switch goes away, and traffic resumes when it
//! is back.
//!
//! Each queue of the interface has a queue pair of its own: a flow that the kernel keeps to one
//! queue keeps its order.

mod carrier;
mod retry;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shm::Seg;
use uplink::{Batching, TapFd, TapOptions};

use self::carrier::Carrier;
use self::retry::Retry;
use crate::connect::{Connect, connect};
use crate::control::Control;
use crate::error::Error;
use crate::guest::{Also, Guest, cpu_time, now_ns, readable};
use crate::report::Report;
use crate::ring::Malformed;
use crate::rx::Rx;
use crate::tx::Tx;

/// Frames moved in one batch.
const BATCH: usize = 64;
/// Longest sleep, in ns.
const LOOK_AROUND_NS: u64 = 1_000_000_000;

/// What a NIC is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// The connection to the switch.
    pub to: Connect,
    /// The interface, with as many queues as the connection has queue pairs.
    pub tap: TapOptions,
    /// Where `ctl` reads counters and changes policies.
    pub control: Option<PathBuf>,
    /// Counters are printed as JSON.
    pub json: bool,
    /// Time between two reports while it runs.
    pub interval: Option<Duration>,
    /// How long it runs; `None`: until `running` says no.
    pub duration: Option<Duration>,
}

/// Serves an interface while `running` says so.
///
/// It reconnects when the switch comes back, and prints what was counted when a connection ends.
///
/// # Errors
/// The interface or the control socket cannot be had.
pub fn run(options: &Options, running: &dyn Fn() -> bool) -> Result<(), Error> {
    let Options { to, tap: TapOptions { name, queues, .. }, .. } = options;
    let queues = queues.get();
    let tap = uplink::open(&options.tap)?;
    if tap.queues.len() < usize::from(queues) {
        let what = format!("interface {name} was made without multi_queue and has one queue");
        let what = format!("{what}: leave out --queues, or remove it and let us make it");
        return Err(Error::Failed(what));
    }
    let fd = Arc::clone(&tap.queues[0]);
    let mut taps: Vec<_> = tap.queues.iter().map(TapQueue::new).collect();
    let sources: Vec<_> = tap.queues.iter().map(|fd| fd.as_fd()).collect();
    let end = options.duration.map(|d| Instant::now() + d);
    let go_on = || running() && end.is_none_or(|end| Instant::now() < end);
    let control = Control::listen(options.control.as_deref(), "nic", queues)?;
    let control = control.as_ref();
    let waits = || {
        control.inspect(|control| control.serve(now_ns(), true, None));
        go_on()
    };
    let (mut retry, mut carrier) = (Retry::new(), Carrier::default());
    while go_on() {
        let mut guest = match connect(to, Some(&waits)) {
            Ok(guest) => guest,
            Err(_) if !go_on() => break,
            Err(error) => {
                let (news, wait) = retry.failed(&error.to_string());
                if let Some(news) = news {
                    tracing::warn!("{}: {news}", to.target);
                }
                retry::pause(wait, &waits);
                continue;
            }
        };
        retry = Retry::new();
        // What the switch does not take the kernel does itself, from now on; frames that wait may
        // still ask for more, and are dropped.
        let takes = tap.offloads_read.and(&guest.link.takes());
        uplink::request_offloads(&*fd, &takes).map_err(|error| {
            let what = format!("its offloads cannot be set ({error}); is it there?");
            Error::Failed(format!("interface {name}: {what}"))
        })?;
        let names = guest.link.features().join(" ");
        tracing::info!("{name} connected to {}: {names}", to.target);
        if let Some(wrong) = carrier::wrong_mtu(tap.mtu, guest.link.mtu()) {
            tracing::warn!("{name}: {wrong}");
        }
        control.inspect(|control| control.apply(&mut guest));
        let mut teller = Teller::new(name, options.interval, options.json);
        let tells = (&mut teller, &mut carrier, control);
        match serve(&mut guest, &mut taps, &sources, tells, &go_on) {
            Ok(()) => {}
            Err(error) => tracing::warn!("the switch broke the ring protocol: {error}"),
        }
        teller.tell(&mut guest);
        if go_on() {
            tracing::info!("{name}: the switch is gone; waiting for it");
        }
    }
    Ok(())
}

/// One queue of the interface.
struct TapQueue {
    reads: TapFd,
    writes: TapFd,
    /// How many frames were there last time.
    last: usize,
}

impl TapQueue {
    fn new(fd: &Arc<OwnedFd>) -> Self {
        let tap = || TapFd::new(Arc::clone(fd), Batching::Auto);
        Self { reads: tap(), writes: tap(), last: 1 }
    }
}

/// Tells what was counted over one connection: at its end, and now and then if asked to.
struct Teller<'a> {
    tap: &'a str,
    json: bool,
    started_ns: u64,
    cpu_before: Duration,
    interval_ns: u64,
    /// When to tell next; never at its greatest.
    next_ns: u64,
}

impl<'a> Teller<'a> {
    fn new(tap: &'a str, interval: Option<Duration>, json: bool) -> Self {
        let started_ns = now_ns();
        let interval_ns = interval.map_or(u64::MAX, |interval| interval.as_nanos() as u64);
        let next_ns = started_ns.saturating_add(interval_ns);
        Self { tap, json, started_ns, cpu_before: cpu_time(), interval_ns, next_ns }
    }

    fn due(&mut self, now: u64) -> bool {
        let due = now >= self.next_ns;
        if due {
            self.next_ns = self.next_ns.saturating_add(self.interval_ns).max(now);
        }
        due
    }

    fn tell(&self, guest: &mut Guest) {
        let elapsed = Duration::from_nanos(now_ns() - self.started_ns);
        let report = Report::new(guest, elapsed);
        if self.json {
            let mut value = json!({
                "tap": self.tap,
                "features": guest.link.features(),
                "duration_s": elapsed.as_secs_f64(),
                "sent_frames": report.frames()[0],
                "received_frames": report.frames()[1],
                "cpu_s": (cpu_time() - self.cpu_before).as_secs_f64(),
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

/// Moves frames until the switch is gone or `go_on` says no.
fn serve(
    guest: &mut Guest,
    taps: &mut [TapQueue],
    sources: &[BorrowedFd<'_>],
    (teller, carrier, control): (&mut Teller<'_>, &mut Carrier, Option<&Control>),
    go_on: &dyn Fn() -> bool,
) -> Result<(), Malformed> {
    let mut rounds = 0_u32;
    loop {
        let now = now_ns();
        if teller.due(now) {
            teller.tell(guest);
        }
        carrier.follow(teller.tap, sources[0], &guest.link);
        if let Some(control) = control {
            control.serve(now, guest.asked, Some(guest));
        }
        guest.begin(now)?;
        let mut sent = 0;
        for (pair, tap) in guest.pairs.iter_mut().zip(&mut *taps) {
            let room = send(&mut pair.tx, tap, now)?;
            sent += tap.last;
            if pair.look > 0 {
                deliver(&mut pair.rx, &mut tap.writes, pair.look.min(BATCH))?;
            }
            // Without a buffer it matters whether a frame waits for one.
            pair.blocked = room == 0 && readable(&[tap.reads.as_fd()], Some(0))[0];
        }
        guest.end(now);
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(1024) && (!go_on() || guest.is_gone()) {
            return Ok(());
        }
        // A signal that comes just before a sleep does not end it.
        let until = Some(teller.next_ns.min(now + LOOK_AROUND_NS));
        let control = control.map(AsFd::as_fd);
        let also = Also { sources, more: sent > 0, until, control };
        let slept = guest.counts.sleeps + guest.counts.naps;
        if !guest.wait(&also)? {
            return Ok(());
        }
        if guest.counts.sleeps + guest.counts.naps > slept && !go_on() {
            return Ok(());
        }
    }
}

/// TAP to ring: as many frames as were there last time, and some more, in one batch. Asking for
/// many frames of an idle TAP would cost more than moving a few. Returns how many there was room
/// for.
fn send(tx: &mut Tx, tap: &mut TapQueue, now: u64) -> Result<usize, Malformed> {
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
        // EAGAIN: nothing there at that moment; a later one may still have found a frame.
        // Anything else (the interface went down) is as good.
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

/// Ring to TAP: what is there, in one batch, from the buffers it lies in.
fn deliver(rx: &mut Rx, tap: &mut TapFd, max: usize) -> Result<(), Malformed> {
    let mut batch = tap.writes();
    let frames = rx.receive(max, |frame: &[Seg<'_>]| {
        for seg in frame {
            batch.push(*seg);
        }
        batch.end_frame();
    })?;
    if frames > 0 {
        // A frame the kernel does not take is lost as on any wire.
        batch.run();
        rx.refill();
    }
    Ok(())
}
