//! Many connected but idle guests in one process.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use super::BATCH;
use crate::connect::{Connect, connect};
use crate::error::Error;
use crate::guest::{Guest, now, wait_many};
use crate::ring::Malformed;
use switch::time::Ns;

/// Descriptors of one queue of a guest, and of connecting. vhost-user: socket, memory, two kicks,
/// two calls. Xen: host, store, memory, two for each of two channels.
const FDS_EACH: u64 = 16;
/// Longest sleep.
const SLEEP_MAX: Ns = Ns::from_secs(1);

/// Options of idle guests.
#[derive(Clone, Debug)]
pub struct Idle {
    /// Their connection, without the target.
    pub to: Connect,
    /// Socket or directory of each guest, see [`targets`].
    pub targets: Vec<String>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
    /// Print totals as JSON.
    pub json: bool,
}

/// Connects all guests until `running` returns false. They drop received frames and send nothing.
///
/// # Errors
/// A connection fails, or the switch ends it.
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
    let (started, cpu_before) = (now(), os::process_cpu_time());
    let end = idle.duration.map(|d| started + Ns::from(d));
    let (mut received, mut sleeps) = (0, 0_u64);
    let result = loop {
        let now = now();
        if end.is_some_and(|end| now >= end) || !running() {
            break Ok(());
        }
        for guest in &mut guests {
            received += discard(guest)?;
        }
        let left = end.map_or(SLEEP_MAX, |end| (end - now).min(SLEEP_MAX));
        sleeps += 1;
        if !wait_many(&mut guests, left) {
            break Err(Error::Failed("the switch closed a connection".into()));
        }
    };
    let value = json!({
        "mode": "idle",
        "ports": count,
        "duration_s": (now() - started).get() as f64 / 1e9,
        "received_frames": received,
        "sleeps": sleeps,
        "cpu_s": (os::process_cpu_time() - cpu_before).as_secs_f64(),
    });
    if idle.json {
        println!("{value}");
    } else {
        println!("{count} ports idle, {received} frames discarded");
    }
    result
}

/// Discards received frames; the receive rings are armed afterwards.
fn discard(guest: &mut Guest) -> Result<usize, Malformed> {
    let mut frames = 0;
    while !guest.arm()? {
        for pair in &mut guest.pairs {
            frames += pair.rx.receive(BATCH, |_| {})?;
            pair.rx.refill();
        }
    }
    Ok(frames)
}

/// Targets of `count` guests: `{}` or `%` in the path is replaced by the guest's number.
///
/// # Errors
/// The target has no path, or neither mark although there are several guests.
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
            Err(format!("--connect {connect}: for {count} ports write {{}} for the number"))
        }
        None => Ok(vec![path.into_owned()]),
        Some(mark) => Ok((0..count).map(|i| path.replace(mark, &i.to_string())).collect()),
    }
}

/// Raises the limit of open descriptors to at least `fds`, if permitted.
pub fn raise_limit(fds: u64) {
    let now = getrlimit(Resource::Nofile);
    if now.current.is_some_and(|current| current < fds) {
        let current = Some(now.maximum.map_or(fds, |most| fds.min(most)));
        let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum: now.maximum });
    }
}
