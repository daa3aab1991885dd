//! `gen --mode idle`: many guests that are there and do nothing, in one process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use super::BATCH;
use crate::cli::GenArgs;
use crate::guest::{self, Connect, Guest, cpu_time, now_ns};
use crate::{AnyError, Usage};

/// Descriptors of one queue of a guest, and what connecting needs. Of vhost-user: socket, memory,
/// two kicks, two calls. Of Xen: the host's and the store's, memory, two for each of two channels.
const FDS_EACH: u64 = 16;
/// Longest sleep, in ns.
const LOOK_AROUND_NS: u64 = 1_000_000_000;

/// The command. What reaches these guests is thrown away; they send nothing.
pub fn command(
    args: &GenArgs,
    to: Connect,
    duration_ns: Option<u64>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    let count = args.count.unwrap_or(1);
    let sockets = sockets(&args.connect.connect, &to, count).map_err(Usage)?;
    raise_limit(u64::from(count) * u64::from(to.queues) * FDS_EACH + 64);
    let to = to.small();
    let mut guests = Vec::new();
    for socket in sockets {
        guests.push(guest::connect(&to.at(socket.into()), Some(running))?);
    }
    if !args.json {
        eprintln!("{count} ports connected");
    }
    let (started, cpu_before) = (now_ns(), cpu_time());
    let end = duration_ns.map(|d| started + d);
    let (mut received, mut sleeps) = (0, 0_u64);
    let result = loop {
        let now = now_ns();
        if end.is_some_and(|end| now >= end) || !running() {
            break Ok(());
        }
        for guest in &mut guests {
            received += empty(guest)?;
        }
        let left = end.map_or(LOOK_AROUND_NS, |end| (end - now).min(LOOK_AROUND_NS));
        sleeps += 1;
        if !guest::wait_many(&mut guests, left) {
            break Err("the switch closed a connection".into());
        }
    };
    let value = json!({
        "mode": "idle",
        "ports": count,
        "duration_s": (now_ns() - started) as f64 / 1e9,
        "received_frames": received,
        "sleeps": sleeps,
        "cpu_s": (cpu_time() - cpu_before).as_secs_f64(),
    });
    if args.json {
        println!("{value}");
    } else {
        println!("{count} ports idle, {received} frames thrown away");
    }
    result
}

/// Throws away what came; the receive rings are armed afterwards.
fn empty(guest: &mut Guest) -> Result<usize, guest::Malformed> {
    let mut frames = 0;
    while !guest.arm()? {
        for pair in &mut guest.pairs {
            frames += pair.rx.receive(BATCH, |_| {})?;
            pair.rx.refill();
        }
    }
    Ok(frames)
}

/// Where each connects: `{}` or `%` in the path is its number.
pub(super) fn sockets(connect: &str, to: &Connect, count: u32) -> Result<Vec<String>, String> {
    let Some(path) = to.target.path() else {
        return Err(format!(
            "--connect {connect}: --mode idle and hostile take a socket or a directory"
        ));
    };
    let path = path.to_string_lossy();
    let mark = ["{}", "%"].into_iter().find(|mark| path.contains(mark));
    match mark {
        None if count > 1 => {
            Err(format!("--connect {connect}: with --count {count} write {{}} for the number"))
        }
        None => Ok(vec![path.into_owned()]),
        Some(mark) => Ok((0..count).map(|i| path.replace(mark, &i.to_string())).collect()),
    }
}

/// As many descriptors as are needed, if we may.
pub(super) fn raise_limit(fds: u64) {
    let now = getrlimit(Resource::Nofile);
    if now.current.is_some_and(|current| current < fds) {
        let current = Some(now.maximum.map_or(fds, |most| fds.min(most)));
        let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum: now.maximum });
    }
}
