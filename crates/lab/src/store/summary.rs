//! `summary.json`: statistics of the runs. Fields are added, never removed or changed within a
//! format.
//!
//! ```json
//! {"format": 2, "study": "polling", "command": "pvswitch lab run polling --quick",
//!  "complete": true, "runs": 48, "void": 2, "distance_ns": {"low": 60.0, "median": 95.0,
//!  "high": 420.0}, "margin": 1.07,
//!  "cells": [{"axes": {"guests": "3", "policy": "event"}, "runs": 10,
//!             "measures": {"mbps": {"unit": "Mbit/s", "count": 10, "median": 941.0, "low": 938.0,
//!                                   "high": 944.0, "interval_low": 940.0, "interval_high": 943.0,
//!                                   "quartile_low": 940.0, "quartile_high": 942.0,
//!                                   "mean": 940.8, "deviation": 2.5}}}],
//!  "comparisons": [{"axes": {"guests": "3"}, "axis": "policy", "base": "event",
//!                   "value": "timer:1000", "measure": "guest_cpu", "pairs": 10, "ratio": 0.52,
//!                   "ratio_low": 0.49, "ratio_high": 0.55, "interval": true,
//!                   "distance_ns": 95.0, "distance_ns_base": 96.0,
//!                   "p": 0.008, "p_same": 1.0, "outcome": "less"}],
//!  "noise": [{"measure": "guest_cpu", "pairs": 10, "ratio": 1.01, "ratio_low": 0.98,
//!             "ratio_high": 1.03, "interval": true}],
//!  "verdicts": [{"what": "fewer events with timer:1000: 1,020 for 16,300", "holds": true}],
//!  "machine": {"cpu": "..."}}
//! ```
//!
//! `complete`: whether all runs of the plan have a result. `void`: attempts without one. Every run
//! counts. `ratio`: the median of the ratios of pairs, runs of one round, with its 95 % bootstrap
//! interval; of fewer than five pairs with the least and the greatest, and `interval` is false;
//! `null` if the base is 0. `p` is of Wilcoxon's signed-rank test for a difference, `p_same` of two
//! one-sided tests that the ratio is within `margin`, both corrected by Holm's method for all
//! comparisons of the measure. `outcome`, at 5 %: `more`, `less`, `no change`, `cannot tell`,
//! `too few pairs to tell`, or `uneven`: no speed-up, because guests are served unevenly. `noise`:
//! the control over itself. `holds` is `null` if this machine or
//! plan cannot decide it.

use serde_json::{Map, Value, json};

use super::Results;
use crate::plan::Cell;
use crate::stats::paired::{Estimate, median_interval};
use crate::study::Study;

/// The format of `summary.json`: 1 had runs left out, and ratios of medians.
const FORMAT: u32 = 2;

/// Returns the summary of all runs.
pub fn of(results: &Results, study: &dyn Study) -> Value {
    let margin = study.facts().margin;
    let cells = results.cells().into_iter().map(|cell| {
        let measures: Map<String, Value> = study
            .facts()
            .measures
            .iter()
            .filter_map(|measure| {
                let s = results.summary(cell, measure.name)?;
                let interval = median_interval(&results.values(|c| c == cell, measure.name));
                let figures = json!({"unit": measure.unit, "count": s.count, "median": s.median,
                    "low": s.low, "high": s.high, "interval_low": interval.map(|of| of.0),
                    "interval_high": interval.map(|of| of.1), "quartile_low": s.quartile_low,
                    "quartile_high": s.quartile_high, "mean": s.mean, "deviation": s.deviation});
                Some((measure.name.to_string(), figures))
            })
            .collect();
        let count = results.runs.iter().filter(|run| run.cell == *cell).count();
        json!({"axes": axes(cell), "runs": count, "measures": measures})
    });
    let comparisons =
        study.facts().measures.iter().flat_map(|measure| results.compare(measure.name, study));
    let comparisons = comparisons.map(|c| {
        let own = json!({"axes": axes(&c.cell), "axis": c.axis, "base": c.base, "value": c.value,
            "measure": c.measure, "pairs": c.pairs, "distance_ns": c.distance_ns.0,
            "distance_ns_base": c.distance_ns.1, "p": c.p, "p_same": c.p_same,
            "outcome": c.outcome.to_string()});
        merged(own, ratio(c.ratio.as_ref()))
    });
    let noise = study.facts().measures.iter().filter_map(|measure| {
        let found = results.noise(measure.name)?;
        let own = json!({"measure": measure.name, "pairs": found.count});
        Some(merged(own, ratio(Some(&found))))
    });
    let verdicts = study.judge(results).into_iter();
    let verdicts = verdicts.map(|verdict| json!({"what": verdict.what, "holds": verdict.holds}));
    let turns = results.plan.turns(study);
    let has = |turn: &crate::plan::Turn| {
        let runs = if turn.again { &results.controls } else { &results.runs };
        runs.iter().any(|run| run.repeat == turn.repeat && run.cell == turn.cell)
    };
    let distance = Results::distances(results.runs.iter());
    let distance = distance.map(|s| json!({"low": s.low, "median": s.median, "high": s.high}));
    json!({
        "format": FORMAT,
        "study": study.facts().name,
        "command": results.command,
        "complete": turns.iter().all(has),
        "runs": results.runs.len(),
        "void": results.void.len(),
        "distance_ns": distance,
        "margin": margin,
        "cells": cells.collect::<Vec<_>>(),
        "comparisons": comparisons.collect::<Vec<_>>(),
        "noise": noise.collect::<Vec<_>>(),
        "verdicts": verdicts.collect::<Vec<_>>(),
        "machine": results.machine,
    })
}

fn axes(cell: &Cell) -> Map<String, Value> {
    cell.0.iter().map(|(axis, value)| (axis.clone(), json!(value))).collect()
}

fn ratio(found: Option<&Estimate>) -> Value {
    json!({"ratio": found.map(|of| of.median), "ratio_low": found.map(|of| of.low),
        "ratio_high": found.map(|of| of.high), "interval": found.map(|of| of.interval)})
}

/// Returns an object with the fields of both.
fn merged(mut one: Value, other: Value) -> Value {
    if let (Value::Object(one), Value::Object(other)) = (&mut one, other) {
        one.extend(other);
    }
    one
}
