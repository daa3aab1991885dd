//! Why frames do not arrive at a port, or from it, in words: `GET /v1/ports/{name}/why`, and
//! `pvswitch ctl why`, which is a client of it.
//!
//! [`reply`] takes what `show`, `stats` and `fdb` reply, the counters twice, and [`findings::all`]
//! makes sentences of them.

mod causes;
mod finding;
mod findings;
mod vlans;

use std::path::Path;

use api::Request;
use api::control::Client;
use api::routes::SECONDS_MAX;
use serde_json::{Value, json};

use crate::Usage;
use crate::demo::format::si;
use crate::error::AnyError;
use finding::Finding;
pub use findings::{Seen, first_sample};

/// The reply for a port.
pub fn reply(seen: &Seen<'_>, name: &str) -> Value {
    let (from, to) = seen.rates(name);
    json!({
        "port": name,
        "state": seen.port(name)["state"],
        "seconds": seen.seconds(),
        "frames_per_second_from": from,
        "frames_per_second_to": to,
        "findings": findings::all(seen, name).iter().map(Finding::json).collect::<Vec<_>>(),
    })
}

/// Runs `pvswitch ctl why`.
pub fn command(path: &Path, name: &str, seconds: f64, as_json: bool) -> Result<(), AnyError> {
    if !(0.0..=SECONDS_MAX).contains(&seconds) {
        return Err(Usage(format!("--seconds {seconds}: use 0 to {SECONDS_MAX}")).into());
    }
    let mut client = Client::connect(path)?;
    let mut reply = client.call(&Request::Why { name: name.into(), seconds })?;
    if as_json {
        reply["ok"] = true.into();
        println!("{reply}");
        return Ok(());
    }
    let word = |value: &Value| value.as_str().unwrap_or("?").to_string();
    let rate = |key: &str| si(reply[key].as_f64().unwrap_or_default());
    let (from, to) = (rate("frames_per_second_from"), rate("frames_per_second_to"));
    println!("{name}: {}, {from} frames/s from its guest, {to} to it", word(&reply["state"]));
    for finding in reply["findings"].as_array().into_iter().flatten() {
        println!("{:8} {}", word(&finding["rank"]), word(&finding["what"]));
        println!("{:8} -> {}", "", word(&finding["remedy"]));
    }
    Ok(())
}
