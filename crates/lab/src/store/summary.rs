//! `summary.json`: statistics of the runs. Fields are added, never removed or changed.
//!
//! ```json
//! {"format": 1, "study": "polling", "command": "pvswitch lab run polling --quick",
//!  "complete": true, "runs": 40, "runs_left_out": 2, "nearest_ns": 60,
//!  "cells": [{"axes": {"guests": "3", "policy": "event"}, "runs": 5, "used": 4,
//!             "measures": {"mbps": {"unit": "Mbit/s", "count": 4, "median": 941.0, "low": 938.0,
//!                                   "high": 944.0, "quartile_low": 940.0, "quartile_high": 942.0,
//!                                   "mean": 940.8, "deviation": 2.5}}}],
//!  "comparisons": [{"axes": {"guests": "3"}, "axis": "policy", "base": "event",
//!                   "value": "timer:1000", "measure": "guest_cpu", "ratio": 0.52,
//!                   "ratio_low": 0.49, "ratio_high": 0.55, "runs": 4, "runs_base": 4,
//!                   "p": 0.028, "outcome": "less"}],
//!  "verdicts": [{"what": "fewer events with timer:1000: 1,020 for 16,300", "holds": true}],
//!  "machine": {"cpu": "..."}}
//! ```
//!
//! `complete`: whether all runs of the plan are present. `used`: number of runs that statistics are
//! computed from, see [`Results::used`]. `ratio` and its range are `null` if the base is 0.
//! `outcome`: `more`, `less`, `no difference` or `too few runs to tell`, by a two-sided
//! Mann-Whitney U test at 5 %, without correction for multiple comparisons. `holds` is `null` if
//! this machine or plan cannot decide it.

use serde_json::{Map, Value, json};

use super::Results;
use crate::plan::{Cell, FORMAT};
use crate::study::Study;

/// Returns the summary of all runs.
pub fn of(results: &Results, study: &dyn Study) -> Value {
    let used = results.used();
    let cells = results.cells().into_iter().map(|cell| {
        let measures: Map<String, Value> = study
            .facts()
            .measures
            .iter()
            .filter_map(|measure| {
                let s = results.summary(cell, measure.name)?;
                let figures = json!({"unit": measure.unit, "count": s.count, "median": s.median,
                    "low": s.low, "high": s.high, "quartile_low": s.quartile_low,
                    "quartile_high": s.quartile_high, "mean": s.mean, "deviation": s.deviation});
                Some((measure.name.to_string(), figures))
            })
            .collect();
        let count = results.runs.iter().filter(|run| run.cell == *cell).count();
        let kept = used.iter().filter(|run| run.cell == *cell).count();
        json!({"axes": axes(cell), "runs": count, "used": kept, "measures": measures})
    });
    let comparisons =
        study.facts().measures.iter().flat_map(|measure| results.compare(measure.name));
    let comparisons = comparisons.map(|c| {
        json!({"axes": axes(&c.cell), "axis": c.axis, "base": c.base, "value": c.value,
            "measure": c.measure, "ratio": c.ratio, "ratio_low": c.range.map(|range| range.0),
            "ratio_high": c.range.map(|range| range.1), "runs": c.runs.0, "runs_base": c.runs.1,
            "p": c.p, "outcome": c.outcome.to_string()})
    });
    let verdicts = study.judge(results).into_iter();
    let verdicts = verdicts.map(|verdict| json!({"what": verdict.what, "holds": verdict.holds}));
    let turns = results.plan.turns(study);
    let has = |turn: &crate::plan::Turn| {
        results.runs.iter().any(|run| run.repeat == turn.repeat && run.cell == turn.cell)
    };
    json!({
        "format": FORMAT,
        "study": study.facts().name,
        "command": results.command,
        "complete": turns.iter().all(has),
        "runs": results.runs.len(),
        "runs_left_out": results.runs.len() - used.len(),
        "nearest_ns": results.nearest_ns(),
        "cells": cells.collect::<Vec<_>>(),
        "comparisons": comparisons.collect::<Vec<_>>(),
        "verdicts": verdicts.collect::<Vec<_>>(),
        "machine": results.machine,
    })
}

fn axes(cell: &Cell) -> Map<String, Value> {
    cell.0.iter().map(|(axis, value)| (axis.clone(), json!(value))).collect()
}
