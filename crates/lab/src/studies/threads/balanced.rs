//! Judges whether `balanced` uses a second worker where one helps.

use super::shares_cpus;
use crate::plan::Cell;
use crate::report::Verdict;
use crate::store::Results;

/// Minimum rate of several workers relative to one; allows for overhead and uneven placement.
const TIMES_LEAST: f64 = 1.3;
/// Load in per cent above which a worker counts as overloaded.
const SHORT_PERCENT: f64 = 90.0;
/// Loads that can be spread evenly: all clients have equal demand.
const LOADS: [&str; 2] = ["even", "replay"];
const WHAT: &str = "placement balanced exceeds the rate of one worker";

/// Judges the smallest number of several workers. If workers and guests share CPUs, or guests or
/// clients limit one worker, a second one cannot help, and the verdict is undecided.
pub(super) fn judge(results: &Results) -> Option<Verdict> {
    let own = results.machine.switch_cpus.len();
    let cells = || results.cells().into_iter().filter(|cell| cell.get("placement") == "balanced");
    let one_worker = |cell: &&Cell| cell.number("workers") == 1.0;
    let several = cells().filter(|cell| !one_worker(cell)).map(|cell| cell.number("workers"));
    let workers = several.min_by(f64::total_cmp)?;
    let not = |why: String| Some(Verdict { what: format!("{WHAT}: {why}"), holds: None });
    if shares_cpus(workers as usize, own) {
        return not(format!(
            "{workers} workers and the guests share CPUs: the switch has {own} of its own"
        ));
    }
    let mut times = Vec::new();
    for one in cells().filter(one_worker).filter(|cell| LOADS.contains(&cell.get("load"))) {
        let like = |cell: &&Cell| {
            let same = |axis: &str| cell.get(axis) == one.get(axis);
            cell.number("workers") == workers && ["pairs", "size", "load"].into_iter().all(same)
        };
        let Some(more) = cells().find(like) else { continue };
        let median = |cell: &Cell, measure: &str| Some(results.summary(cell, measure)?.median);
        let guests_percent = 100.0 * results.machine.guest_cpus.len() as f64;
        let is_short = median(one, "switch_cpu")? >= SHORT_PERCENT
            && median(one, "guests_cpu")? * TIMES_LEAST <= guests_percent;
        if is_short {
            times.push(results.ratio(more, one, "frames")?.median);
        }
    }
    let Some(least) = times.iter().copied().min_by(f64::total_cmp) else {
        return not("guests or clients already limit one worker: give them more CPUs".into());
    };
    Some(Verdict {
        what: format!(
            "{WHAT}: {workers} workers reach at least {TIMES_LEAST} times the rate where one is \
             overloaded, {} loads; minimum {least:.2} times",
            times.len()
        ),
        holds: Some(least >= TIMES_LEAST),
    })
}
