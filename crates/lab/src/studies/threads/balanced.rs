//! Whether `balanced` makes use of a second worker, where a second worker is of use.

use super::shares_cpus;
use crate::plan::Cell;
use crate::report::Verdict;
use crate::store::Results;

/// What several workers carry at least, of what one does: of two a half is left to what they
/// cost each other, and to queues that are not dealt out evenly.
const TIMES_LEAST: f64 = 1.3;
/// A worker is short of time that runs for so many percent of it.
const SHORT_PERCENT: f64 = 90.0;
/// Loads that can be dealt out: all clients ask for the same.
const LOADS: [&str; 2] = ["even", "replay"];
const WHAT: &str = "placement balanced carries more than one worker does";

/// By the fewest workers that are several. Where workers and guests had to share CPUs, or guests
/// or clients were what limited one worker, a second can bring nothing: then it says so.
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
            times.push(median(more, "frames")? / median(one, "frames")?.max(1.0));
        }
    }
    let Some(least) = times.iter().copied().min_by(f64::total_cmp) else {
        return not("guests, or clients, limit one worker already: give them more CPUs".into());
    };
    Some(Verdict {
        what: format!(
            "{WHAT}: {workers} workers carry {TIMES_LEAST} times as much or more wherever one is \
             short of time, {} loads; least {least:.2} times",
            times.len()
        ),
        holds: Some(least >= TIMES_LEAST),
    })
}
