//! `policies`: what each poll policy costs and gives at each load.

use super::grid::{self, Grid, summary, values};
use super::pair::{self, FEW, JUDGED, MEASURES, POLICIES, Pair};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stats::Summary;
use crate::stats::paired::Estimate;
use crate::store::Results;
use crate::study::{Facts, Figures, Run, Study};

/// Frames offered a second; `max`: as many as the sender can.
const RATES: [&str; 6] = ["0", "1k", "10k", "100k", "1M", "max"];
/// Where kicks are judged.
const BULK: &str = "100k";
/// What `timer` may still kick, of what `event` kicks in bulk.
const KICKS_LEFT: f64 = 0.05;
/// How much worse than the better of the two `adaptive` may be.
const WORSE: f64 = 1.1;

const ABOUT: &str = "\
One guest sends frames of 60 bytes to another through a dedicated worker, at each rate and with \
each policy in turn. Latency is from the publication of a frame until the receiver has read it. \
It includes the receiver's wake-up, which is the same for every policy, so spin shows the \
minimum. A guest is a process: in a virtual machine, each kick and each call would also cost an \
exit and an entry, so they are counted exactly. Where guests share one CPU, the receiver has a \
higher scheduling priority than the sender, if permitted.";

/// The study.
pub struct Policies;

const FACTS: Facts = Facts {
    name: "policies",
    about: "cost and benefit of each poll policy, from no traffic to saturation",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    // Adaptive may be so much worse than the better of two.
    margin: 1.1,
    control: &[("rate", "100k")],
};

impl Study for Policies {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (rates, policies, seconds, repeats): (&[&str], &[&str], f64, u32) = match scale {
            Scale::Smallest => (&["0", "1k", BULK, "max"], &JUDGED, 0.4, 1),
            Scale::Quick => (&["0", "10k", BULK, "max"], &FEW, 0.5, 1),
            Scale::Usual => (&RATES, &POLICIES, 2.0, 1),
            Scale::Full => (&RATES, &POLICIES, 10.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![Axis::new("rate", rates), Axis::new("policy", policies)],
        )
        .with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        pair::OVERHEAD_S
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let policy = run.cell.get("policy");
        let traffic = match run.cell.get("rate") {
            "0" => return Pair::idle(run.stage, policy, run.seconds),
            "max" => String::new(),
            rate => format!("--rate {rate}"),
        };
        Pair::new(policy, &traffic).run(run.stage, run.seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let grid = Grid { results, fixed: &[], rows: "policy", columns: "rate" };
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let mut parts = vec![text];
        let offered = "frames offered a second";
        let plots = [
            ("CPU of the worker against load", "load-cpu", "% of one CPU", "cpu"),
            ("Latency against load, 99th percentile", "load-p99", "us from guest to guest", "p99"),
        ];
        let drawn = plots.map(|(title, file, y, name)| grid.plot(title, file, offered, y, name));
        parts.extend(drawn.into_iter().flatten());
        parts.extend(against(results));
        parts.extend(tables(&grid, "Columns: frames offered a second."));
        parts
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let quiet = |cell: &Cell| cell.get("rate") == "0";
        let wakes = pair::nothing_wakes(results, "a pair without traffic", quiet);
        let all = [wakes, fewer_kicks(results), pair::accounted(results)];
        all.into_iter().flatten().collect()
    }
}

/// A table for each measure of a pair.
pub fn tables(grid: &Grid, note: &str) -> Vec<Part> {
    let titles = [
        ("CPU of the worker, % of one CPU", "cpu"),
        ("Latency, p50, us", "p50"),
        ("Latency, p99, us", "p99"),
        ("Latency, p99.9, us", "p999"),
        ("Frames delivered a second", "delivered"),
        ("Frames lost, % of those sent", "loss"),
        ("Wake-ups of the worker a second", "wakeups"),
        ("Kicks for each frame", "kicks"),
        ("Calls for each frame", "calls"),
        ("CPU time of the worker for each frame, ns", "frame_ns"),
        ("CPU of both guests, % of one CPU", "guests_cpu"),
        ("Time that the switch was runnable without a CPU, %", "waited"),
    ];
    titles.iter().filter_map(|(title, measure)| grid.table(title, note, measure)).collect()
}

/// `timer` looks by itself: in bulk its guest has nothing to kick for.
fn fewer_kicks(results: &Results) -> Option<Verdict> {
    let of = |policy| summary(results, &[("rate", BULK), ("policy", policy)], "kicks");
    let (event, timer) = (of("event")?, of("timer:1000")?);
    Some(Verdict {
        what: format!(
            "timer:1000 is kicked less than {:.0} % as often as event at {BULK} frames/s: {:.5} \
             and {:.5} kicks for each frame",
            100.0 * KICKS_LEFT,
            timer.median,
            event.median
        ),
        holds: Some(timer.high < KICKS_LEFT * event.low),
    })
}

/// `adaptive` against the better of event and spin, figure by figure.
fn against(results: &Results) -> Option<Part> {
    let mut rows = Vec::new();
    for rate in values(results, "rate") {
        let mut row = vec![Value::Text(rate.clone())];
        let mut worse = Vec::new();
        for (measure, more) in [("cpu", false), ("p99", false), ("delivered", true)] {
            let of = |policy| summary(results, &[("rate", rate), ("policy", policy)], measure);
            let ratio = |base: &str| {
                let ours = [("rate", rate.as_str()), ("policy", "adaptive")];
                grid::ratio(results, &ours, measure, "policy", base)
            };
            let outcome = against_better(of("adaptive"), of("event"), of("spin"), more, ratio);
            if outcome.as_ref().is_some_and(|outcome| outcome.worse) {
                worse.push(measure);
            }
            row.push(outcome.map_or_else(
                || Value::Missing("no such figure at this rate".into()),
                |outcome| Value::Text(outcome.words),
            ));
        }
        let all = row.iter().all(|value| matches!(value, Value::Text(_)));
        row.push(match worse[..] {
            [] if all => Value::Text("yes".into()),
            [] => Value::Text("yes, in what there is".into()),
            _ => Value::Text(format!("no: {}", worse.join(", "))),
        });
        if row[1..4].iter().any(|value| matches!(value, Value::Text(_))) {
            rows.push(row);
        }
    }
    let columns = ["rate", "CPU", "p99", "frames/s", "at most 10 % worse"];
    let table = Table {
        title: "adaptive against the better of event and spin".into(),
        note: "Median ratio of pairs, adaptive to the better of the two at this rate, figure by \
               figure: no policy can reach all of them at once. The better one is named after it. \
               The promise is 10 %."
            .into(),
        columns: columns.map(String::from).into(),
        rows,
        command: format!("pvswitch lab run policies --only policy={}", FEW.join(",")),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

/// A policy against the better of two others.
struct Outcome {
    words: String,
    worse: bool,
}

fn against_better(
    ours: Option<Summary>,
    event: Option<Summary>,
    spin: Option<Summary>,
    more_is_better: bool,
    ratio: impl Fn(&str) -> Option<Estimate>,
) -> Option<Outcome> {
    let (ours, event, spin) = (ours?.median, event?.median, spin?.median);
    let event_is_better = (event > spin) == more_is_better || event == spin;
    let (better, of) = if event_is_better { (event, "event") } else { (spin, "spin") };
    if better <= 0.0 {
        let words = format!("{ours:.3} against 0 ({of})");
        return Some(Outcome { words, worse: !more_is_better && ours > 0.0 });
    }
    let Estimate { median, low, high, count, .. } = ratio(of)?;
    let worse = if more_is_better { median < 2.0 - WORSE } else { median > WORSE };
    let words = format!("{median:.2} of {of} ({low:.2}-{high:.2}, n {count})");
    Some(Outcome { words, worse })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_compared_with_the_better_of_two() {
        let of = |value: f64| Summary::of(&[value]);
        let outcome = |ours, event, spin, more| {
            let ratio = |base: &str| {
                let base = if base == "event" { event } else { spin };
                Estimate::of_pairs(&[(ours, base)])
            };
            let outcome = against_better(of(ours), of(event), of(spin), more, ratio)?;
            let words = outcome.words.split(" (").next().unwrap_or_default().to_string();
            Some((words, outcome.worse))
        };
        assert_eq!(outcome(12.0, 10.0, 100.0, false), Some(("1.20 of event".into(), true)));
        assert_eq!(outcome(10.5, 30.0, 10.0, false), Some(("1.05 of spin".into(), false)));
        assert_eq!(outcome(85.0, 90.0, 100.0, true), Some(("0.85 of spin".into(), true)));
        assert_eq!(outcome(120.0, 100.0, 90.0, true), Some(("1.20 of event".into(), false)));
        assert_eq!(outcome(0.5, 0.0, 100.0, false), Some(("0.500 against 0".into(), true)));
        assert_eq!(outcome(0.0, 0.0, 100.0, false), Some(("0.000 against 0".into(), false)));
        assert!(against_better(of(1.0), None, of(1.0), true, |_| None).is_none());
    }
}
