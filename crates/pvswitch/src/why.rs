//! `pvswitch ctl why`: says in words why frames do not arrive at a port, or from it.
//!
//! It takes what `show`, `stats` and `fdb` reply, the counters twice, and [`findings::all`] makes
//! sentences of them. The switch itself has no part in it.

mod causes;
mod finding;
mod findings;
mod vlans;

use std::path::Path;
use std::time::Duration;

use api::Request;
use api::control::{Client, ControlError};
use api::near::did_you_mean;
use serde_json::{Value, json};

use crate::Usage;
use crate::demo::format::si;
use crate::error::AnyError;
use finding::Finding;
use findings::Seen;

/// Most time between the two samples, in seconds.
const SECONDS_MAX: f64 = 60.0;

/// Runs `pvswitch ctl why`.
pub fn command(path: &Path, name: &str, seconds: f64, as_json: bool) -> Result<(), AnyError> {
    if !(0.0..=SECONDS_MAX).contains(&seconds) {
        return Err(Usage(format!("--seconds {seconds}: use 0 to {SECONDS_MAX}")).into());
    }
    let mut client = Client::connect(path)?;
    let before = client.call(&Request::Stats)?;
    if before["guest"].is_string() {
        let error = format!("{} is a guest's socket: `why` is for switches", path.display());
        return Err(ControlError::missing(error).into());
    }
    exists(&before, name)?;
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let mut ask = |request| client.call(&request);
    let (now, show, fdb) = (ask(Request::Stats)?, ask(Request::Show)?, ask(Request::Fdb)?);
    let seen = Seen { show: &show, before: &before, now: &now, fdb: &fdb };
    // It may have been removed in the meantime.
    exists(&show, name)?;
    let all = findings::all(&seen, name);
    let (from, to) = seen.rates(name);
    let port = seen.port(name);
    if as_json {
        println!(
            "{}",
            json!({
                "ok": true,
                "port": name,
                "state": port["state"],
                "seconds": seen.seconds(),
                "frames_per_second_from": from,
                "frames_per_second_to": to,
                "findings": all.iter().map(Finding::json).collect::<Vec<_>>(),
            })
        );
        return Ok(());
    }
    let state = port["state"].as_str().unwrap_or("?");
    println!("{name}: {state}, {} frames/s from its guest, {} to it", si(from), si(to));
    all.iter().for_each(|finding| print!("{}", finding.text()));
    Ok(())
}

fn exists(reply: &Value, name: &str) -> Result<(), ControlError> {
    let ports = reply["ports"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = || ports.iter().filter_map(|port| port["name"].as_str());
    if names().any(|one| one == name) {
        return Ok(());
    }
    Err(ControlError::missing(format!("no port '{name}'{}", did_you_mean(name, names()))))
}
