//! What the number of runs can tell, claims of the original study, and all comparisons: the parts
//! of a report that each study has.

use crate::claims::{self, Expect, Finding, State};
use crate::plan::Cell;
use crate::report::{Conclusion, Part, Table, Value};
use crate::stats::paired::SIGNIFICANCE;
use crate::stats::paired::pairs_needed;
use crate::store::{Comparison, Outcome, Results};
use crate::study::Study;

/// Measures whose noise is named at the top.
const NOISE_SHOWN: usize = 3;
/// Why a speed-up is none, see [`Results::uneven`].
const UNEVEN: &str = "Jain's index of what guests got is below 0.95 by median in one of the cells";

/// Returns what the runs can tell, the worst first.
pub fn conclusions(results: &Results, study: &dyn Study) -> Vec<Conclusion> {
    let mut conclusions = Vec::new();
    let found = findings(results, study);
    let measured = found.iter().filter(|found| found.state != State::NotMeasured);
    let measured: Vec<&Finding> = measured.collect();
    if !measured.is_empty() {
        let count = |state| measured.iter().filter(|found| found.state == state).count();
        let (confirmed, refuted) = (count(State::Confirmed), count(State::Refuted));
        let needed = pairs_needed(measured.len(), 2.0 * SIGNIFICANCE);
        let mut what = format!(
            "{}: of {} results of the original study {confirmed} confirmed, {refuted} refuted, {} \
             not confirmed, {} with too few pairs",
            pairs(measured.iter().map(|found| found.pairs)),
            measured.len(),
            count(State::NotConfirmed),
            count(State::TooFew),
        );
        if count(State::TooFew) > 0 {
            what += &format!(" ({needed} are needed)");
        }
        what += &unevenly(count(State::Uneven));
        conclusions.push(Conclusion { what, concludes: concludes(confirmed + refuted) });
    }
    let all = compared(results, study);
    if !all.is_empty() {
        let count = |wanted: &[Outcome]| {
            all.iter().filter(|comparison| wanted.contains(&comparison.outcome)).count()
        };
        let differ = count(&[Outcome::More, Outcome::Less]);
        let same = count(&[Outcome::NoChange]);
        let few = count(&[Outcome::TooFew]);
        let mut what = format!(
            "{}: of {} comparisons {differ} differ, {same} show no change ({}), {} cannot tell, \
             {few} have too few pairs",
            pairs(all.iter().map(|comparison| comparison.pairs)),
            all.len(),
            study.facts().margin_words(),
            count(&[Outcome::Open]),
        );
        if few > 0 {
            let needed = pairs_needed(results.plan.comparisons(study), SIGNIFICANCE);
            what += &format!(" (with all cells of this plan, {needed} are needed)");
        }
        what += &unevenly(count(&[Outcome::Uneven]));
        conclusions.push(Conclusion { what, concludes: concludes(differ + same) });
    }
    conclusions.push(noise(results, study));
    // What cannot be concluded comes first.
    conclusions.sort_by_key(|one| one.concludes != Some(false));
    conclusions
}

/// What is no speed-up, in words.
fn unevenly(count: usize) -> String {
    match count {
        0 => String::new(),
        n => format!("; {n} are no speed-ups: {UNEVEN}"),
    }
}

/// Why a comparison or claim has no ratio.
fn missing(is_uneven: bool) -> &'static str {
    if is_uneven { UNEVEN } else { "the base is 0, or a value is negative" }
}

fn concludes(count: usize) -> Option<bool> {
    Some(count > 0)
}

fn pairs(counts: impl Iterator<Item = usize> + Clone) -> String {
    match (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0)) {
        (1, 1) => "1 pair each".into(),
        (least, most) if least == most => format!("{most} pairs each"),
        (least, most) => format!("{least} to {most} pairs"),
    }
}

/// The noise floor, in words.
fn noise(results: &Results, study: &dyn Study) -> Conclusion {
    let measures = study.facts().measures.iter();
    let found = measures.filter_map(|measure| Some((measure.name, results.noise(measure.name)?)));
    let shown: Vec<String> = found
        .take(NOISE_SHOWN)
        .map(|(name, of)| {
            let what = if of.interval { "" } else { "range " };
            format!("{name} {:.2} ({what}{:.2}-{:.2}, n {})", of.median, of.low, of.high, of.count)
        })
        .collect();
    let what = match (&shown[..], results.controls.first()) {
        ([_, ..], Some(control)) => format!(
            "noise floor: {} over itself, {}; 'All comparisons' has the other measures",
            control.cell,
            shown.join(", ")
        ),
        _ => "no noise floor: no cell was compared with itself (A/A)".into(),
    };
    Conclusion { what, concludes: None }
}

fn findings(results: &Results, study: &dyn Study) -> Vec<Finding> {
    claims::judge(results, study, study.claims(&results.plan))
}

fn compared(results: &Results, study: &dyn Study) -> Vec<Comparison> {
    let measures = study.facts().measures.iter();
    measures.flat_map(|m| results.compare(m.name, study)).collect()
}

/// Returns the table of the original study's results, judged.
pub fn claims(results: &Results, study: &dyn Study) -> Option<Part> {
    let found = findings(results, study);
    let rows = found.iter().filter(|found| found.state != State::NotMeasured).map(|found| {
        let claim = &found.claim;
        vec![
            Value::Text(found.state.to_string()),
            Value::Text(claim.what.clone()),
            match claim.original {
                Some(ratio) => Value::Original(ratio, 2),
                None => Value::Missing("published in words or pictures only".into()),
            },
            Value::Text(match claim.expect {
                Expect::Beyond(ratio) if ratio < 1.0 => format!("below {ratio:.2}"),
                Expect::Beyond(ratio) => format!("above {ratio:.2}"),
                Expect::Within(most) => format!("{:.3} to {most:.3}", 1.0 / most),
            }),
            Value::estimate(found.ratio, 2, missing(found.state == State::Uneven)),
            Value::estimate(results.noise(claim.measure), 2, "no control, or its base is 0"),
            Value::Text(claim.ours()),
        ]
    });
    let rows: Vec<Vec<Value>> = rows.collect();
    let columns = ["State", "Result", "Original", "Must be", "Ours", "A/A", "Our cells"];
    let table = Table {
        title: "The original study's results, judged".into(),
        note: "Confirmed: at least half of the published effect (of the logarithm of its ratio), \
               or no change where that is the result, is shown at 5 %; refuted: the opposite is. \
               Corrected for all rows (Holm). A/A: one cell over itself, the noise floor."
            .into(),
        columns: columns.map(String::from).into(),
        rows,
        command: format!("pvswitch lab run {}", study.facts().name),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

/// Returns the table of all comparisons, the noise floor of each measure beside them.
pub fn comparisons(results: &Results, study: &dyn Study) -> Option<Part> {
    let axis = results.plan.axes.last()?;
    let axes: Vec<&str> = results.plan.axes.iter().map(|axis| axis.name.as_str()).collect();
    let outer = &axes[..axes.len() - 1];
    let rows: Vec<Vec<Value>> = compared(results, study)
        .iter()
        .map(|comparison| {
            let mut row = vec![Value::Text(comparison.measure.clone())];
            let value = |cell: &Cell, axis: &str| Value::Text(cell.get(axis).into());
            row.extend(outer.iter().map(|axis| value(&comparison.cell, axis)));
            let Comparison { p, p_same, outcome, distance_ns: (ours, base), .. } = comparison;
            let significant =
                |p: &f64| if *p < 0.0001 { "<0.0001".into() } else { format!("{p:.4}") };
            let distance =
                if *ours > 0.0 { format!("{ours:.0} / {base:.0}") } else { String::new() };
            row.extend([
                Value::Text(comparison.value.clone()),
                Value::Text(comparison.base.clone()),
                Value::estimate(comparison.ratio, 3, missing(*outcome == Outcome::Uneven)),
                Value::estimate(
                    results.noise(&comparison.measure),
                    3,
                    "no control, or its base is 0",
                ),
                Value::Text(significant(p)),
                Value::Text(significant(p_same)),
                Value::Text(outcome.to_string()),
                Value::Text(distance),
            ]);
            row
        })
        .collect();
    let mut columns = vec!["measure".to_string()];
    columns.extend(outer.iter().map(ToString::to_string));
    columns.push(axis.name.clone());
    let more = ["over", "ratio", "A/A", "p", "p of no change", "result", "distance, ns"];
    columns.extend(more.map(String::from));
    let table = Table {
        title: "All comparisons".into(),
        note: format!(
            "Ratio: median of the ratios of pairs, two runs of one round. A/A: the same of one \
             cell over itself, the noise floor. p: Wilcoxon's signed-rank test for a difference; p \
             of no change: two one-sided tests that the ratio is within {}; both corrected for all \
             comparisons of the measure (Holm). Distance: median round trip of a cache line \
             between the CPUs, its and the base's; no run is left out for it.",
            study.facts().margin_words()
        ),
        columns,
        rows,
        command: format!("pvswitch lab run {}", study.facts().name),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}
