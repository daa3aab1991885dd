//! What is made of the results: tables and verdicts.

use std::collections::BTreeMap;

use hostile::{Ring, cases_of};

use super::ALL;
use crate::report::{Table, Value, Verdict};
use crate::stats::Summary;
use crate::store::{Done, Results};

/// How much of its rate the honest pair keeps at least, and how much longer its p99 may be.
const KEEPS: f64 = 0.95;
const LONGER: f64 = 2.0;

/// Runs of a ring, idle or hostile.
fn runs<'a>(results: &'a Results, ring: Ring, attack: &'a str) -> impl Iterator<Item = &'a Done> {
    results
        .runs
        .iter()
        .filter(move |run| run.cell.get("ring") == ring.name() && run.cell.get("attack") == attack)
}

/// Returns the verdict on what must hold, judged by counts.
pub fn judged(results: &Results, ring: Ring) -> Option<Verdict> {
    let of = |run: &Done, name: &str| run.figures.get(name).copied();
    let mut bad: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let (mut count, mut attempts) = (0, 0.0);
    for run in runs(results, ring, "hostile") {
        count += 1;
        attempts += of(run, "attempts").unwrap_or(0.0);
        let mut note = |what, is: bool| {
            if is {
                bad.entry(what).or_default().push(run.cell.get("case").to_string());
            }
        };
        note("the switch ended, or an honest guest did not come up", of(run, "alive") == Some(0.0));
        note("frames lost", of(run, "lost").is_some_and(|n| n != 0.0));
        note("frames changed", of(run, "corrupt").is_some_and(|n| n > 0.0));
        note("faults of honest ports", of(run, "honest_faults").is_some_and(|n| n > 0.0));
        note("cases not tried", of(run, "untried").is_some_and(|n| n > 0.0));
    }
    // Where the honest pair loses frames by itself, this machine gives no result.
    let control: f64 = runs(results, ring, "idle").filter_map(|run| of(run, "lost")).sum();
    if count == 0 {
        return None;
    }
    let failed: Vec<String> =
        bad.iter().map(|(what, cases)| format!("{what} ({})", cases.join(", "))).collect();
    let what = format!(
        "{ring}: during {attempts} attacks in {count} runs the honest pair loses no frame, \
         receives no modified frame, and the control socket answers{}{}",
        if failed.is_empty() { "" } else { "; failed: " },
        failed.join("; ")
    );
    let is_conclusive = control == 0.0 || bad.is_empty();
    Some(Verdict { what, holds: is_conclusive.then_some(bad.is_empty()) })
}

/// Median and range of what the attack makes of a measure, of what it is beside a control.
fn ratio(
    results: &Results,
    ring: Ring,
    case: &str,
    measure: &str,
    control: &str,
) -> Option<Summary> {
    let found = results.compare_with(measure, control).into_iter().find(|comparison| {
        comparison.value == "hostile"
            && comparison.cell.get("ring") == ring.name()
            && comparison.cell.get("case") == case
    })?;
    let (median, (low, high)) = (found.ratio?, found.range?);
    let count = found.runs.0;
    Some(Summary { median, low, high, count, ..Summary::of(&[median])? })
}

fn spread(found: Option<Summary>, digits: usize) -> Value {
    match found {
        None => Value::Missing("not measured, or the switch ended".into()),
        Some(Summary { median, low, high, .. }) => Value::Spread { median, low, high, digits },
    }
}

/// Columns of a table.
const COLUMNS: [&str; 15] = [
    "case",
    "what it does",
    "source",
    "lost, idle",
    "lost",
    "corrupt",
    "rate, of idle",
    "p99, of idle",
    "p99, of busy",
    "longest answer, ms",
    "memory, MiB",
    "faults",
    "attempts",
    "alive",
    "kept",
];

/// One line for each case of a ring that was measured.
pub fn table(results: &Results, ring: Ring) -> Option<Table> {
    let is_measured =
        |name: &str| runs(results, ring, "hostile").any(|run| run.cell.get("case") == name);
    let all = std::iter::once((ALL, "all in turn", String::new()));
    let cases = cases_of(ring).map(|case| (case.name, case.what, case.source.join(", ")));
    let measured = all.chain(cases).filter(|(name, ..)| is_measured(name));
    let rows: Vec<_> = measured
        .map(|(name, what, source)| {
            let texts = [name, what, &source].map(|text| Value::Text(text.into()));
            texts.into_iter().chain(figures(results, ring, name)).collect()
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: format!("Beside a hostile peer: {ring}"),
        note: "Lost and corrupt are sums over all runs; ratios are medians with the range of runs \
               side by side; of the rest the most of any run."
            .into(),
        columns: COLUMNS.map(String::from).into(),
        rows,
        command: format!("pvswitch lab run hostile --only ring={ring}"),
    })
}

/// Figures of a case: the columns behind its source.
fn figures(results: &Results, ring: Ring, name: &str) -> Vec<Value> {
    let values = |attack: &str, measure: &str| -> Vec<f64> {
        let runs = runs(results, ring, attack).filter(|run| run.cell.get("case") == name);
        runs.filter_map(|run| run.figures.get(measure).copied()).collect()
    };
    let sum = |attack: &str, measure: &str| values(attack, measure).iter().sum::<f64>();
    let most = |measure: &str| values("hostile", measure).into_iter().max_by(f64::total_cmp);
    let lived = values("hostile", "alive").iter().all(|alive| *alive == 1.0);
    let of = |measure: &str, control: &str| {
        ratio(results, ring, name, measure, control).filter(|_| name != ALL)
    };
    let (rate, p99, p99_busy) = (of("rate", "idle"), of("p99", "idle"), of("p99", "busy"));
    let number = |found: Option<f64>, digits| match found {
        Some(n) => Value::Number(n, digits),
        None => Value::Missing("the switch ended".into()),
    };
    let counts = lived && sum("hostile", "lost") == 0.0 && sum("hostile", "corrupt") == 0.0;
    let times = rate.is_none_or(|rate| rate.median >= KEEPS)
        && p99_busy.or(p99).is_none_or(|p99| p99.median < LONGER);
    let kept = match (counts, times || name == ALL) {
        (false, _) => "no",
        (true, false) => "counts only",
        (true, true) => "yes",
    };
    vec![
        Value::Number(sum("idle", "lost"), 0),
        number(lived.then(|| sum("hostile", "lost")), 0),
        number(lived.then(|| sum("hostile", "corrupt")), 0),
        spread(rate, 3),
        spread(p99, 2),
        spread(p99_busy, 2),
        number(most("show"), 1),
        number(most("memory"), 0),
        number(most("faults"), 0),
        number(most("attempts"), 0),
        Value::Text(if lived { "yes" } else { "no" }.into()),
        Value::Text(kept.into()),
    ]
}
