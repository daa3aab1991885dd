//! What is made of the results: tables and verdicts.

use std::collections::{BTreeMap, BTreeSet};

use hostile::{Ring, cases_of};

use super::ALL;
use crate::plan::Cell;
use crate::report::{Table, Value, Verdict};
use crate::stats::paired::Estimate;
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

/// Priorities of the switch's worker in the results.
pub fn priorities(results: &Results) -> BTreeSet<&str> {
    results.runs.iter().map(|run| run.cell.get("priority")).collect()
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

/// What a row is about.
struct Row<'a> {
    results: &'a Results,
    ring: Ring,
    priority: &'a str,
    case: &'a str,
}

impl Row<'_> {
    fn has(&self, cell: &Cell) -> bool {
        cell.get("ring") == self.ring.name()
            && cell.get("priority") == self.priority
            && cell.get("case") == self.case
    }

    /// A measure of its runs with this attacker.
    fn values(&self, attack: &str, measure: &str) -> Vec<f64> {
        let runs = runs(self.results, self.ring, attack).filter(|run| self.has(&run.cell));
        runs.filter_map(|run| run.figures.get(measure).copied()).collect()
    }
}

/// What the attack makes of a measure, of what it is beside a control.
fn ratio(row: &Row<'_>, measure: &str, control: &str) -> Option<Estimate> {
    let wanted = |cell: &Cell| cell.get("attack") == "hostile" && row.has(cell);
    row.results.ratio_of(wanted, |cell| cell.with("attack", control), measure)
}

fn spread(found: Option<Estimate>, digits: usize) -> Value {
    Value::estimate(found, digits, "not measured, or the switch ended")
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

/// One line for each case that was measured of a ring, with this priority of the worker.
pub fn table(results: &Results, ring: Ring, priority: &str) -> Option<Table> {
    let of = |case| Row { results, ring, priority, case };
    let is_measured = |row: &Row<'_>| runs(results, ring, "hostile").any(|run| row.has(&run.cell));
    let all = std::iter::once((ALL, "all in turn", String::new()));
    let cases = cases_of(ring).map(|case| (case.name, case.what, case.source.join(", ")));
    let measured = all.chain(cases).filter(|(name, ..)| is_measured(&of(name)));
    let rows: Vec<_> = measured
        .map(|(name, what, source)| {
            let texts = [name, what, &source].map(|text| Value::Text(text.into()));
            texts.into_iter().chain(figures(&of(name))).collect()
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: format!("Beside a hostile peer: {ring}, worker at priority {priority}"),
        note: "Lost and corrupt are sums over all runs; ratios are medians of pairs, runs \
               side by side; of the rest the most of any run."
            .into(),
        columns: COLUMNS.map(String::from).into(),
        rows,
        command: format!("pvswitch lab run hostile --only ring={ring}"),
    })
}

/// Figures of a case: the columns behind its source.
fn figures(row: &Row<'_>) -> Vec<Value> {
    let sum = |attack: &str, measure: &str| row.values(attack, measure).iter().sum::<f64>();
    let most = |measure: &str| row.values("hostile", measure).into_iter().max_by(f64::total_cmp);
    let lived = row.values("hostile", "alive").iter().all(|alive| *alive == 1.0);
    let of =
        |measure: &str, control: &str| ratio(row, measure, control).filter(|_| row.case != ALL);
    let (rate, p99, p99_busy) = (of("rate", "idle"), of("p99", "idle"), of("p99", "busy"));
    let number = |found: Option<f64>, digits| match found {
        Some(n) => Value::Number(n, digits),
        None => Value::Missing("the switch ended".into()),
    };
    let counts = lived && sum("hostile", "lost") == 0.0 && sum("hostile", "corrupt") == 0.0;
    let times = rate.is_none_or(|rate| rate.median >= KEEPS)
        && p99_busy.or(p99).is_none_or(|p99| p99.median < LONGER);
    let kept = match (counts, times || row.case == ALL) {
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
