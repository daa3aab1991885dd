//! `gen --mode hostile`: a peer that violates the protocol, for tests of the switch.

use std::time::{Duration, Instant};

use guest::Connect;
use guest::generate::{raise_limit, targets};
use hostile::{Attack, Case, Ring, Tally, cases_of};
use serde_json::{Value, json};

use crate::cli::{Cases, GenArgs};
use crate::{AnyError, Usage};

/// Duration of each case if several are run.
const EACH: Duration = Duration::from_millis(300);
/// Duration of a single case: until interrupted.
const ENDLESS: Duration = Duration::from_secs(30 * 365 * 86_400);
/// Descriptors per port, and those that a case may hold in addition.
const FDS: (u64, u64) = (1024, 1024);

/// Runs cases one after another, each for `--duration`.
pub fn command(
    args: &GenArgs,
    to: &Connect,
    which: Cases,
    duration: Option<Duration>,
    running: &dyn Fn() -> bool,
) -> Result<(), AnyError> {
    let selected = selected(args, to, which);
    if which == Cases::List {
        list(&selected, args.report.json);
        return Ok(());
    }
    check(args, to, which, &selected)?;
    let count = args.count.unwrap_or(1);
    let targets = targets(&args.connect.connect, to, count).map_err(Usage)?;
    raise_limit(u64::from(count) * FDS.0 + FDS.1);
    let default = if selected.len() == 1 { ENDLESS } else { EACH };
    let each = duration.unwrap_or(default);
    let mut played = Vec::new();
    let mut result = Ok(());
    for (ring, case) in selected {
        if !running() {
            break;
        }
        let began = Instant::now();
        // Each case begins at another port, so a port that is suspended does not delay the next
        // case.
        let from = played.len() % targets.len();
        let (before, after) = targets.split_at(from);
        let ports = after.iter().chain(before).map(Into::into).take(case.ports.into());
        let mut attack = Attack::new(ports.collect(), ring, each, running);
        (attack.mac, attack.peer) = (args.mac, args.peer);
        let error = case.play(&mut attack).err().map(|error| error.to_string());
        let report = report_of(case, ring, &attack.tally, began.elapsed(), error.as_deref());
        if !args.report.json {
            print(&report);
        }
        // If several are run, an error of one is only reported.
        if let (Some(error), Cases::One(_)) = (error, which) {
            result = Err(format!("{ring}/{}: {error}", case.name).into());
        }
        played.push(report);
    }
    if args.report.json {
        println!("{}", json!({"mode": "hostile", "cases": played}));
    }
    result
}

/// Rings of a target.
fn rings(args: &GenArgs, to: &Connect) -> &'static [Ring] {
    match (to.is_virtio(), args.connect.packed) {
        (false, _) => &[Ring::Xen],
        (true, true) => &[Ring::Packed],
        (true, false) => &[Ring::Split, Ring::Socket],
    }
}

/// The cases asked for, with their rings.
fn selected(args: &GenArgs, to: &Connect, which: Cases) -> Vec<(Ring, &'static Case)> {
    let all = rings(args, to).iter();
    let all = all.flat_map(|ring| cases_of(*ring).map(|case| (*ring, case)));
    let is_selected = |(ring, case): &(Ring, &Case)| match which {
        Cases::One(name) => case.name == name,
        Cases::Of(one) => *ring == one,
        Cases::All | Cases::List => true,
    };
    all.filter(is_selected).collect()
}

/// Checks that there are cases, and that they can be played.
fn check(
    args: &GenArgs,
    to: &Connect,
    which: Cases,
    selected: &[(Ring, &Case)],
) -> Result<(), Usage> {
    let name = match which {
        Cases::One(name) => name,
        Cases::Of(ring) => ring.name(),
        Cases::All | Cases::List => "all",
    };
    if selected.is_empty() {
        let rings: Vec<_> = rings(args, to).iter().map(|ring| ring.name()).collect();
        return Err(Usage(format!(
            "--mode hostile={name}: no such case for {}; --mode hostile=list lists the cases",
            rings.join(" and ")
        )));
    }
    if args.connect.connect.contains(",mode=server") {
        let what = "--mode hostile only connects: the switch's port needs mode=server (default)";
        return Err(Usage(what.into()));
    }
    Ok(())
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
        "swaps": tally.swaps,
        "torn": tally.torn,
        "mixed": tally.mixed,
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
