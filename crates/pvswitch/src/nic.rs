//! `pvswitch nic`: a TAP interface served by the driver half, for a namespace or container.
//!
//! The kernel reads and writes frames straight from and into the memory shared with the switch;
//! the TAP's virtio-net header and the ring's are the same bytes. The interface stays when the
//! switch goes away, and traffic resumes when it is back.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shm::Seg;
use switch::poll::{Action, Costs, Poller};
use uplink::{Batching, TapFd};
use vhost_user::feature;

use crate::cli::NicArgs;
use crate::guest::{self, Connect, Guest};
use crate::spec::Tap;
use crate::{AnyError, Usage};

/// Frames moved in one batch.
const BATCH: usize = 64;

/// The command.
pub fn command(args: NicArgs) -> Result<(), AnyError> {
    let to = Connect::try_from(&args.connect).map_err(Usage)?;
    let stop = stop_flag()?;
    let conf = Tap { ifname: args.tap.clone(), netns: args.netns, queues: 1, mtu: args.mtu };
    let mut options = crate::tap::options(&conf);
    options.mac = args.mac;
    // As deep as a ring, so that a TCP window of GSO frames waits here and is not dropped.
    options.queue_len = Some(4096);
    let tap = uplink::open(&options)?;
    let fd = Arc::clone(&tap.queues[0]);
    let mut reads = TapFd::new(Arc::clone(&fd), Batching::Auto);
    let mut writes = TapFd::new(fd, Batching::Auto);
    let end = args.duration.map(crate::seconds).transpose().map_err(Usage)?;
    let end = end.map(|d| Instant::now() + d);
    let go_on = || !stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end);
    while go_on() {
        let guest = match guest::connect(&to, Some(&go_on)) {
            Ok(guest) => guest,
            Err(_) if !go_on() => break,
            Err(error) => {
                tracing::warn!("{}: {error}; trying again", to.socket.display());
                std::thread::sleep(Duration::from_millis(500));
                continue;
            }
        };
        let names = feature::names(guest.frontend.features()).join(" ");
        tracing::info!("{} connected to {}: {names}", args.tap, to.socket.display());
        let poller = Poller::new(args.connect.poll, Costs::TYPICAL, 0);
        match serve(guest, &mut reads, &mut writes, poller, &go_on) {
            Ok(()) => {}
            Err(error) => tracing::warn!("the switch broke the ring protocol: {error}"),
        }
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

/// Moves frames until the switch is gone or `go_on` says no.
fn serve(
    mut guest: Guest,
    reads: &mut TapFd,
    writes: &mut TapFd,
    mut poller: Poller,
    go_on: &dyn Fn() -> bool,
) -> Result<(), guest::Malformed> {
    let epoch = Instant::now();
    let now = || u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut rounds = 0_u32;
    let mut sent = 1;
    loop {
        sent = send(&mut guest, reads, sent)?;
        let received = deliver(&mut guest, writes)?;
        let at = now();
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(1024) && (!go_on() || guest::is_gone(&guest.frontend)) {
            return Ok(());
        }
        if poller.next(sent + received, at) != Action::Arm {
            continue;
        }
        if !sleep(&mut guest, reads)? || !go_on() {
            return Ok(());
        }
        poller.wake(now());
    }
}

/// TAP to ring: as many frames as were there last time, and some more, in one batch. Asking for
/// many frames of an idle TAP would cost more than moving a few.
fn send(guest: &mut Guest, tap: &mut TapFd, last: usize) -> Result<usize, guest::Malformed> {
    let tx = &mut guest.tx;
    if tx.reclaim()? == 0 {
        return Ok(0);
    }
    let want = (last * 2).clamp(1, BATCH);
    let mut offered = [0_u16; BATCH];
    let mut n = 0;
    let mut batch = tap.reads();
    for (i, to) in tx.free().take(want).zip(&mut offered) {
        batch.push(tx.memory(i));
        batch.end_frame();
        *to = i;
        n += 1;
    }
    let mut lens = [0_u32; BATCH];
    for (len, read) in lens.iter_mut().zip(batch.run()) {
        // EAGAIN: nothing there at that moment; a later one may still have found a frame.
        // Anything else (the interface went down) is as good.
        *len = read.unwrap_or(0);
    }
    let mut frames = 0;
    for (i, len) in offered[..n].iter().zip(lens).filter(|(_, len)| *len > 0) {
        tx.send(*i, len);
        frames += 1;
    }
    if frames > 0 {
        tx.publish();
    }
    Ok(frames)
}

/// Ring to TAP: what is there, in one batch, from the buffers it lies in.
fn deliver(guest: &mut Guest, tap: &mut TapFd) -> Result<usize, guest::Malformed> {
    let mut batch = tap.writes();
    let frames = guest.rx.receive(BATCH, |frame: &[Seg<'_>]| {
        for seg in frame {
            batch.push(*seg);
        }
        batch.end_frame();
    })?;
    if frames > 0 {
        // A frame the kernel does not take is lost as on any wire.
        batch.run();
        guest.rx.refill();
    }
    Ok(frames)
}

/// Sleeps until there is something; false when the switch is gone.
fn sleep(guest: &mut Guest, tap: &TapFd) -> Result<bool, guest::Malformed> {
    let full = guest.tx.reclaim()? == 0;
    let armed = guest.rx.arm() && (!full || guest.tx.arm());
    if armed {
        let connection = guest.frontend.as_fd();
        let mut fds = vec![connection];
        if !full {
            fds.push(tap.as_fd());
        }
        guest::sleep(&fds, &[guest.rx.call.as_fd(), guest.tx.call.as_fd()], None);
    }
    guest.rx.disarm();
    guest.tx.disarm();
    Ok(!guest::is_gone(&guest.frontend))
}
