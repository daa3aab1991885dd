//! `pvswitch nic`: a TAP interface served by the driver half, for a namespace or container.
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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shm::Seg;
use uplink::{Batching, TapFd};

use self::carrier::Carrier;
use self::retry::Retry;
use crate::cli::NicArgs;
use crate::guest::{self, Also, Connect, Control, Guest, Report, Rx, Tx};
use crate::spec::Tap;
use crate::{AnyError, Usage};

/// Frames moved in one batch.
const BATCH: usize = 64;
/// Longest sleep, in ns.
const LOOK_AROUND_NS: u64 = 1_000_000_000;

/// The command.
pub fn command(args: NicArgs) -> Result<(), AnyError> {
    let to = Connect::try_from(&args.connect).map_err(Usage)?;
    crate::cost::precise_timers();
    let stop = stop_flag()?;
    let (ifname, queues) = (args.tap.clone(), args.connect.queues);
    let conf = Tap { ifname, netns: args.netns, queues, mtu: args.mtu };
    let mut options = crate::tap::options(&conf);
    options.mac = args.mac;
    // As deep as a ring, so that a TCP window of GSO frames waits here and is not dropped.
    options.queue_len = Some(4096);
    let tap = uplink::open(&options)?;
    if tap.queues.len() < usize::from(queues) {
        let name = &args.tap;
        let what = format!("interface {name} was made without multi_queue and has one queue");
        return Err(format!("{what}: leave out --queues, or remove it and let us make it").into());
    }
    let fd = Arc::clone(&tap.queues[0]);
    let mut taps: Vec<_> = tap.queues.iter().map(TapQueue::new).collect();
    let sources: Vec<_> = tap.queues.iter().map(|fd| fd.as_fd()).collect();
    let interval = args.interval.map(crate::seconds).transpose().map_err(Usage)?;
    if interval == Some(Duration::ZERO) {
        return Err(Usage("--interval 0: use a time between reports, in seconds".into()).into());
    }
    let end = args.duration.map(crate::seconds).transpose().map_err(Usage)?;
    let end = end.map(|d| Instant::now() + d);
    let go_on = || !stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end);
    let control = Control::listen(args.control.as_deref(), "nic", queues)?;
    let control = control.as_ref();
    let waits = || {
        control.inspect(|control| control.serve(guest::now_ns(), true, None));
        go_on()
    };
    let (mut retry, mut carrier) = (Retry::new(), Carrier::default());
    while go_on() {
        let mut guest = match guest::connect(&to, Some(&waits)) {
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
        uplink::ask_offloads(&*fd, &takes).map_err(|error| {
            format!("interface {}: its offloads cannot be set ({error}); is it there?", args.tap)
        })?;
        let names = guest.link.features().join(" ");
        tracing::info!("{} connected to {}: {names}", args.tap, to.target);
        if let Some(wrong) = carrier::wrong_mtu(tap.mtu, guest.link.mtu()) {
            tracing::warn!("{}: {wrong}", args.tap);
        }
        control.inspect(|control| control.apply(&mut guest));
        let mut teller = Teller::new(&args.tap, interval, args.json);
        let tells = (&mut teller, &mut carrier, control);
        match serve(&mut guest, &mut taps, &sources, tells, &go_on) {
            Ok(()) => {}
            Err(error) => tracing::warn!("the switch broke the ring protocol: {error}"),
        }
        teller.tell(&mut guest);
        if go_on() {
            tracing::info!("{}: the switch is gone; waiting for it", args.tap);
        }
    }
    Ok(())
}

/// A flag that SIGTERM and SIGINT set.
pub fn stop_flag() -> std::io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
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
        let started_ns = guest::now_ns();
        let interval_ns = interval.map_or(u64::MAX, |interval| interval.as_nanos() as u64);
        let next_ns = started_ns.saturating_add(interval_ns);
        Self { tap, json, started_ns, cpu_before: guest::cpu_time(), interval_ns, next_ns }
    }

    fn due(&mut self, now: u64) -> bool {
        let due = now >= self.next_ns;
        if due {
            self.next_ns = self.next_ns.saturating_add(self.interval_ns).max(now);
        }
        due
    }

    fn tell(&self, guest: &mut Guest) {
        let elapsed = Duration::from_nanos(guest::now_ns() - self.started_ns);
        let report = Report::new(guest, elapsed);
        if self.json {
            let mut value = json!({
                "tap": self.tap,
                "features": guest.link.features(),
                "duration_s": elapsed.as_secs_f64(),
                "sent_frames": report.frames()[0],
                "received_frames": report.frames()[1],
                "cpu_s": (guest::cpu_time() - self.cpu_before).as_secs_f64(),
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
) -> Result<(), guest::Malformed> {
    let mut rounds = 0_u32;
    loop {
        let now = guest::now_ns();
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
            pair.blocked = room == 0 && guest::readable(&[tap.reads.as_fd()], Some(0))[0];
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
fn send(tx: &mut Tx, tap: &mut TapQueue, now: u64) -> Result<usize, guest::Malformed> {
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
fn deliver(rx: &mut Rx, tap: &mut TapFd, max: usize) -> Result<(), guest::Malformed> {
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
