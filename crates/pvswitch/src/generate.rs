//! `pvswitch gen`: maps its command line to a generator of the driver half, or a hostile peer.

mod hostile;

use std::sync::atomic::Ordering;
use std::time::Duration;

use guest::Connect;
use guest::generate::{self, Idle, Migrate, Mode, Options, Pass, Trial};
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
        GenMode::Trial => return trial(args, to, duration, &running),
        GenMode::Migrate => return migrate(args, &to, duration, interval, &running),
        GenMode::Idle | GenMode::Hostile(_) => return many(args, to, duration, &running),
    };
    if args.count.is_some() {
        return Err(Usage("--count: only with --mode idle and hostile".into()).into());
    }
    only_trial(args)?;
    if mode != Mode::Send {
        only_to_one(args)?;
    }
    let addresses = args.addresses.unwrap_or(1);
    let flows = flows(args.flows, addresses)?;
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
        flows,
        addresses,
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
        hdr: args.hdr.clone(),
        nap_late,
    };
    os::precise_timers();
    generate::run(&options, &running).map_err(guest_error)
}

/// Number of flows, of which each has one of so many addresses: as many unless others are given.
fn flows(given: u16, addresses: u32) -> Result<u16, Usage> {
    match u16::try_from(addresses) {
        Ok(addresses) if given == 1 => Ok(addresses),
        Ok(addresses) if given >= addresses => Ok(given),
        Ok(_) => Err(Usage("--flows: fewer than --addresses, which each need a flow".into())),
        Err(_) => Err(Usage(format!("--addresses: at most {} with --mode send", u16::MAX))),
    }
}

/// Both guests of two ports; it sends as fast as the switch takes frames, and has no policies.
fn pass(
    args: &GenArgs,
    to: Connect,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    only_trial(args)?;
    only_to_one(args)?;
    let also =
        [("rate", args.rate.is_some()), ("flows", args.flows != 1), ("hdr", args.hdr.is_some())];
    refuse(&[&also[..], &of_one_guest(args)].concat(), "not with --mode pass")?;
    let [size] = args.size.0[..] else {
        return Err(Usage("--size: one size with --mode pass".into()).into());
    };
    let targets = generate::targets(&args.connect.connect, &to, 2).map_err(Usage)?;
    let targets = targets.try_into().expect("two were requested");
    let GenArgs { mac, peer, cpu, frames, .. } = *args;
    let pass = Pass { to, targets, size, mac, peer, cpu, frames, duration, json: args.report.json };
    generate::run_pass(&pass, running).map_err(guest_error)
}

/// Window of a trial, and traffic before it, in seconds, unless given.
const TRIAL_S: [f64; 2] = [1.0, 0.1];

/// Both guests of two ports, at a rate.
fn trial(
    args: &GenArgs,
    to: Connect,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    let also = [("frames", args.frames.is_some())];
    refuse(&[&also[..], &of_one_guest(args)].concat(), "not with --mode trial")?;
    let targets = generate::targets(&args.connect.connect, &to, 2).map_err(Usage)?;
    let [window, warm_up] = TRIAL_S;
    let trial = Trial {
        to,
        targets: targets.try_into().expect("two were requested"),
        size: args.size.clone(),
        rate: args.rate,
        both_ways: args.both_ways,
        addresses: args.addresses.unwrap_or(1),
        flows: args.flows.max(1),
        mac: args.mac,
        peer: args.peer,
        cpu: args.cpu,
        warm_up: time(args.warm_up.unwrap_or(warm_up))?,
        window: duration.map_or_else(|| time(window), Ok)?,
        hdr: args.hdr.clone(),
        json: args.report.json,
    };
    generate::run_trial(&trial, running).map_err(guest_error)
}

/// Frames between two migrations.
const MIGRATE_EVERY: u64 = 200;

/// A receiver that migrates between two ports; its rings are split ones.
fn migrate(
    args: &GenArgs,
    to: &Connect,
    duration: Option<Duration>,
    interval: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    only_trial(args)?;
    only_to_one(args)?;
    let not_its = [
        ("rate", args.rate.is_some()),
        ("flows", args.flows != 1),
        ("hdr", args.hdr.is_some()),
        ("replay", args.replay),
        ("burst", args.burst.is_some()),
        ("on-off", args.on_off.is_some()),
        ("tick", args.tick.is_some()),
        ("also", args.also.is_some()),
        ("count", args.count.is_some()),
        ("packed", args.connect.packed),
        ("control", args.report.control.is_some()),
    ];
    refuse(&not_its, "not with --mode migrate")?;
    if !to.is_virtio() {
        return Err(Usage("--mode migrate: needs a vhost-user socket".into()).into());
    }
    let targets = generate::targets(&args.connect.connect, to, 2).map_err(Usage)?;
    let options = Migrate {
        targets: targets.try_into().expect("two were requested"),
        mac: args.mac,
        every: MIGRATE_EVERY,
        check: args.check,
        migrations: args.frames,
        duration,
        interval,
        json: args.report.json,
    };
    generate::run_migrate(&options, running).map_err(guest_error)
}

/// Whether options of a single guest are given.
fn of_one_guest(args: &GenArgs) -> [(&'static str, bool); 8] {
    [
        ("replay", args.replay),
        ("burst", args.burst.is_some()),
        ("on-off", args.on_off.is_some()),
        ("tick", args.tick.is_some()),
        ("check", args.check),
        ("also", args.also.is_some()),
        ("count", args.count.is_some()),
        ("interval or --control", args.report.interval.is_some() || args.report.control.is_some()),
    ]
}

/// Refuses options of trials in other modes.
fn only_trial(args: &GenArgs) -> Result<(), Usage> {
    let of_trials = [("both-ways", args.both_ways), ("warm-up", args.warm_up.is_some())];
    refuse(&of_trials, "only with --mode trial")
}

/// Refuses several addresses in modes that have one.
fn only_to_one(args: &GenArgs) -> Result<(), Usage> {
    refuse(&[("addresses", args.addresses.is_some())], "only with --mode send and trial")
}

/// Refuses the first option given.
fn refuse(options: &[(&str, bool)], why: &str) -> Result<(), Usage> {
    match options.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(Usage(format!("--{option}: {why}"))),
        None => Ok(()),
    }
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
    only_trial(args)?;
    only_to_one(args)?;
    refuse(&[("hdr", args.hdr.is_some())], "not with --mode idle and hostile")?;
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
