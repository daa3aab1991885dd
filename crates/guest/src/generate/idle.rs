//! Many guests that are connected and stay idle, in one process.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use super::BATCH;
use crate::connect::{Connect, connect};
use crate::error::Error;
use crate::guest::{Guest, cpu_time, now_ns, wait_many};
use crate::ring::Malformed;

/// Descriptors of one queue of a guest, and what connecting needs. Of vhost-user: socket, memory,
/// two kicks, two calls. Of Xen: the host's and the store's, memory, two for each of two channels.
const FDS_EACH: u64 = 16;
/// Longest sleep, in ns.
const LOOK_AROUND_NS: u64 = 1_000_000_000;

/// Guests that stay idle.
#[derive(Clone, Debug)]
pub struct Idle {
    /// The connection of each; where, [`targets`] says.
    pub to: Connect,
    /// Sockets or directories, one for each guest.
    pub targets: Vec<String>,
    /// How long they stay; `None`: until `running` says no.
    pub duration: Option<Duration>,
    /// Totals are printed as JSON.
    pub json: bool,
}

/// Connects all of them, and keeps them until `running` says no. What reaches these guests is
/// dropped; they send nothing.
///
/// # Errors
/// No connection, or one that the switch ended.
pub fn run(idle: &Idle, running: &dyn Fn() -> bool) -> Result<(), Error> {
    let count = idle.targets.len();
    raise_limit(count as u64 * u64::from(idle.to.queues) * FDS_EACH + 64);
    let to = idle.to.clone().small();
    let mut guests = Vec::new();
    for target in &idle.targets {
        guests.push(connect(&to.at(target.into()), Some(running))?);
    }
    if !idle.json {
        eprintln!("{count} ports connected");
    }
    let (started, cpu_before) = (now_ns(), cpu_time());
    let end = idle.duration.map(|d| started + d.as_nanos() as u64);
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
        if !wait_many(&mut guests, left) {
            break Err(Error::Failed("the switch closed a connection".into()));
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
    if idle.json {
        println!("{value}");
    } else {
        println!("{count} ports idle, {received} frames thrown away");
    }
    result
}

/// Throws away what came; the receive rings are armed afterwards.
fn empty(guest: &mut Guest) -> Result<usize, Malformed> {
    let mut frames = 0;
    while !guest.arm()? {
        for pair in &mut guest.pairs {
            frames += pair.rx.receive(BATCH, |_| {})?;
            pair.rx.refill();
        }
    }
    Ok(frames)
}

/// Where each of `count` guests connects: `{}` or `%` in the path is its number.
///
/// # Errors
/// The target has no path, or one for several guests without a place for the number.
pub fn targets(connect: &str, to: &Connect, count: u32) -> Result<Vec<String>, String> {
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
pub fn raise_limit(fds: u64) {
    let now = getrlimit(Resource::Nofile);
    if now.current.is_some_and(|current| current < fds) {
        let current = Some(now.maximum.map_or(fds, |most| fds.min(most)));
        let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum: now.maximum });
    }
}
