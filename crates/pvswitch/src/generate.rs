//! `pvswitch gen`: maps its command line to a generator of the driver half, or a hostile peer.

mod hostile;

use std::sync::atomic::Ordering;
use std::time::Duration;

use guest::Connect;
use guest::generate::{self, Idle, Mode, Options, Pass};
use switch::time::Ns;

use crate::cli::{GenArgs, GenMode};
use crate::error::{AnyError, Usage, guest_error, interval, time};
use crate::{cost, signals};

/// Runs `pvswitch gen`.
pub fn command(args: &GenArgs) -> Result<(), AnyError> {
    let to = Connect::try_from(&args.connect.options()).map_err(Usage)?;
    let duration = args.report.duration.map(time).transpose()?;
    let interval = args.report.interval.map(interval).transpose()?;
    let stop = signals::flag()?;
    let running = || !stop.load(Ordering::Relaxed);
    let mode = match args.mode {
        GenMode::Send => Mode::Send,
        GenMode::Sink => Mode::Sink,
        GenMode::Echo => Mode::Echo,
        GenMode::Rr => Mode::Rr,
        GenMode::Pass => return pass(args, to, duration, &running),
        GenMode::Idle | GenMode::Hostile(_) => return many(args, to, duration, &running),
    };
    if args.count.is_some() {
        return Err(Usage("--count: only with --mode idle and hostile".into()).into());
    }
    // Measured on the CPUs of this process, before it is pinned to one.
    let nap_late = cost::costs().nap_late;
    let options = Options {
        to,
        mode,
        size: args.size.clone(),
        rate: args.rate,
        replay: args.replay,
        burst: args.burst,
        on_off: args.on_off,
        tick: args.tick.map(Ns::from_us),
        flows: args.flows,
        mac: args.mac,
        peer: args.peer,
        check: args.check,
        also: args.also,
        cpu: args.cpu,
        frames: args.frames,
        duration,
        interval,
        control: args.report.control.clone(),
        json: args.report.json,
        nap_late,
    };
    os::precise_timers();
    generate::run(&options, &running).map_err(guest_error)
}

/// Both guests of two ports; it sends as fast as the switch takes frames, and has no policies.
fn pass(
    args: &GenArgs,
    to: Connect,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    for (option, given) in [
        ("rate", args.rate.is_some()),
        ("replay", args.replay),
        ("burst", args.burst.is_some()),
        ("on-off", args.on_off.is_some()),
        ("tick", args.tick.is_some()),
        ("flows", args.flows != 1),
        ("check", args.check),
        ("also", args.also.is_some()),
        ("count", args.count.is_some()),
        ("interval", args.report.interval.is_some()),
        ("control", args.report.control.is_some()),
    ] {
        if given {
            return Err(Usage(format!("--{option}: not with --mode pass")).into());
        }
    }
    let [size] = args.size.0[..] else {
        return Err(Usage("--size: one size with --mode pass".into()).into());
    };
    let targets = generate::targets(&args.connect.connect, &to, 2).map_err(Usage)?;
    let targets = targets.try_into().expect("two were requested");
    let GenArgs { mac, peer, cpu, frames, .. } = *args;
    let pass = Pass { to, targets, size, mac, peer, cpu, frames, duration, json: args.report.json };
    generate::run_pass(&pass, running).map_err(guest_error)
}

/// Idle guests or hostile peers, several at once; they have no policies.
fn many(
    args: &GenArgs,
    to: Connect,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    if args.replay {
        return Err(Usage("--replay: only with --mode send and --mode sink".into()).into());
    }
    if args.frames.is_some() {
        return Err(Usage("--frames: only with --mode send, sink and rr".into()).into());
    }
    if args.report.control.is_some() {
        let what = "--control: not supported with --mode idle and hostile, which have no policies";
        return Err(Usage(what.into()).into());
    }
    let tick = args.tick.map(Ns::from_us);
    generate::check_pace(args.rate, args.burst, args.on_off, tick).map_err(guest_error)?;
    os::precise_timers();
    if let Some(cpu) = args.cpu {
        generate::pin(cpu).map_err(guest_error)?;
    }
    if let GenMode::Hostile(which) = args.mode {
        return hostile::command(args, &to, which, duration, running);
    }
    let count = args.count.unwrap_or(1);
    let targets = generate::targets(&args.connect.connect, &to, count).map_err(Usage)?;
    let idle = Idle { to, targets, duration, json: args.report.json };
    generate::run_idle(&idle, running).map_err(guest_error)
}
