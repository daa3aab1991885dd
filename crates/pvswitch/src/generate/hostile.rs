//! `gen --mode hostile`: a peer that misbehaves, for tests of the switch.

use std::time::{Duration, Instant};

use guest::Connect;
use guest::generate::{raise_limit, targets};
use hostile::{Attack, Case, Ring, Tally, cases_of};
use serde_json::{Value, json};

use crate::cli::{Cases, GenArgs};
use crate::{AnyError, Usage};

/// How long each case is played when all of them are.
const EACH: Duration = Duration::from_millis(300);
/// Of one case: until an interrupt.
const ENDLESS: Duration = Duration::from_secs(30 * 365 * 86_400);
/// Descriptors of one port, and what a case may hold beside them.
const FDS: (u64, u64) = (1024, 1024);

/// The command: plays cases one after another, each as long as `--duration` says.
pub fn command(
    args: &GenArgs,
    to: &Connect,
    which: Cases,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    let rings: &[Ring] = match (to.is_virtio(), args.connect.packed) {
        (false, _) => &[Ring::Xen],
        (true, true) => &[Ring::Packed],
        (true, false) => &[Ring::Split, Ring::Socket],
    };
    let wanted = |(ring, case): &(Ring, &Case)| match which {
        Cases::One(name) => case.name == name,
        Cases::Of(one) => *ring == one,
        Cases::All | Cases::List => true,
    };
    let wanted: Vec<(Ring, &Case)> = rings
        .iter()
        .flat_map(|ring| cases_of(*ring).map(|case| (*ring, case)))
        .filter(wanted)
        .collect();
    if which == Cases::List {
        list(&wanted, args.json);
        return Ok(());
    }
    let name = match which {
        Cases::One(name) => name,
        Cases::Of(ring) => ring.name(),
        Cases::All | Cases::List => "all",
    };
    if wanted.is_empty() {
        let rings: Vec<_> = rings.iter().map(|ring| ring.name()).collect();
        let what = format!("--mode hostile={name}: no case of {}", rings.join(" and "));
        return Err(Usage(what).into());
    }
    if args.connect.connect.contains(",mode=server") {
        let what = "--mode hostile connects; the switch's port has mode=server, the default";
        return Err(Usage(what.into()).into());
    }
    let count = args.count.unwrap_or(1);
    let targets = targets(&args.connect.connect, to, count).map_err(Usage)?;
    raise_limit(u64::from(count) * FDS.0 + FDS.1);
    let usual = if wanted.len() == 1 { ENDLESS } else { EACH };
    let each = duration.unwrap_or(usual);
    let mut played = Vec::new();
    let mut result = Ok(());
    for (ring, case) in wanted {
        if !running() {
            break;
        }
        let began = Instant::now();
        // Each case begins with another port: one that was let wait is not the next one's.
        let from = played.len() % targets.len();
        let (before, after) = targets.split_at(from);
        let its = after.iter().chain(before).map(Into::into).take(case.ports.into());
        let mut attack = Attack::new(its.collect(), ring, each, running);
        (attack.mac, attack.peer) = (args.mac, args.peer);
        let error = case.play(&mut attack).err().map(|error| error.to_string());
        let report = report_of(case, ring, &attack.tally, began.elapsed(), error.as_deref());
        if !args.json {
            print(&report);
        }
        // Of several, one that could not even begin is reported, and the others go on.
        if let (Some(error), Cases::One(_)) = (error, which) {
            result = Err(format!("{ring}/{}: {error}", case.name).into());
        }
        played.push(report);
    }
    if args.json {
        println!("{}", json!({"mode": "hostile", "cases": played}));
    }
    result
}

fn report_of(case: &Case, ring: Ring, tally: &Tally, time: Duration, error: Option<&str>) -> Value {
    json!({
        "ring": ring.name(),
        "case": case.name,
        "who": case.who.name(),
        "what": case.what,
        "source": case.source,
        "seconds": time.as_secs_f64(),
        "attempts": tally.attempts,
        "connections": tally.connections,
        "ended": tally.ended,
        "refused": tally.refused,
        "turned_away": tally.turned_away,
        "error": error,
    })
}

fn print(report: &Value) {
    let word = |key: &str| report[key].as_str().unwrap_or_default();
    println!(
        "{}/{}: {} attempts, {} connections, {} ended by the switch, {} requests refused{}{}",
        word("ring"),
        word("case"),
        report["attempts"],
        report["connections"],
        report["ended"],
        report["refused"],
        if word("error").is_empty() { "" } else { "; " },
        word("error"),
    );
}

fn list(cases: &[(Ring, &Case)], as_json: bool) {
    if as_json {
        let line = |(ring, case): &(Ring, &Case)| {
            json!({"ring": ring.name(), "case": case.name, "who": case.who.name(),
                "what": case.what, "source": case.source, "ports": case.ports,
                "receives": case.receives})
        };
        println!("{}", Value::from(cases.iter().map(line).collect::<Vec<_>>()));
        return;
    }
    for (ring, case) in cases {
        println!("{ring}/{:<22} {}", case.name, case.what);
        println!("  {}: {}", case.who.name(), case.source.join(", "));
    }
}
