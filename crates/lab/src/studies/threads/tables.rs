//! The report: speed-up beside that of the original study, and its limits.

use super::original::{CLAIMS, claim_of};
use super::{locks, shares_cpus, worker_cpus};
use crate::plan::Cell;
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::store::{Comparison, Results};

const ABOUT: &str = "\
Clients send frames of one size to guests, each to its own, through one switch; both are \
generators, so frames are exact and no network stack is measured. Even: every client sends as \
fast as it can. Skewed: one client of eight does, the others send 10,000 frames/s each; placement \
by number puts all floods on one worker of 2, 4 or 8. Converging: all clients send to one guest, \
so that workers contend for its queue. Replay: clients send a ring of frames repeatedly and \
guests return buffers unread, so that they leave the CPUs to the workers.

Single: one worker serves all, others sleep; 'before' in the original study. Group and per-port: \
one thread for a group of ports, fixed when a port is added; 'after' in the original study. With \
one queue each and all ports present from the start, both assign ports in turn. Balanced: workers \
are a shared pool, and queues move to workers with spare time. A queue is served by one worker at \
a time, so a single flood uses one worker under every placement. Policy event on both sides: CPU \
time is spent on frames, not on polling.

Workers are on the switch's CPUs, one each, clients and guests on the others. If there are more \
workers than CPUs of the switch, workers and guests share all CPUs; if the switch has only one \
CPU, guests are on all CPUs with one worker, too, so that both have the same.";

/// All of it.
pub fn parts(results: &Results) -> Vec<Part> {
    let cpus = &results.machine;
    let own = cpus.switch_cpus.len();
    let counts = axis(results, "workers");
    let largest = counts.iter().filter_map(|count| count.parse::<usize>().ok()).max().unwrap_or(0);
    let mut words =
        format!("{} CPUs: {own} for the switch, {} for guests. ", cpus.cpus, cpus.guest_cpus.len());
    if largest > own {
        words += &format!(
            "With {} workers or more, guests have no CPU of their own: see the limits. ",
            if own < 2 { 1 } else { own + 1 }
        );
    }
    words += &format!(
        "More than {largest} workers were not measured. Results of a larger machine go into the \
         same report: measure there, then 'pvswitch lab report DIR LARGER'."
    );
    let text = |title: &str, body: String| Part::Text { title: title.into(), body };
    let mut parts = vec![text("How to read this", ABOUT.into()), text("This machine", words)];
    // The original study had an even load only.
    let claims = claims(std::slice::from_ref(results));
    parts.extend((!claims.rows.is_empty()).then_some(Part::Table(claims)));
    let loads = Load::all(results);
    for load in &loads {
        parts.extend(load.plots().into_iter().map(Part::Plot));
    }
    parts.push(Part::Table(speed_ups(&loads)));
    parts.push(Part::Table(limits(&loads)));
    parts.push(Part::Table(counts_table(&loads)));
    parts.extend(locks_table(&loads).map(Part::Table));
    parts
}

/// Several machines: claims of the original study beside all of them.
pub fn together(all: &[Results]) -> Vec<Part> {
    let mut series = Vec::new();
    for (i, results) in all.iter().enumerate() {
        for load in Load::all(results).iter().filter(|load| load.load == "even") {
            let points = load.speed_up_points("balanced");
            if points.len() > 1 {
                let cpus = results.machine.cpus;
                let name = format!("machine {}: {cpus} CPUs, {} bytes", i + 1, load.size);
                series.push(Series { name, points, colour: series.len(), ..Series::default() });
            }
        }
    }
    let mut parts = vec![Part::Table(claims(all))];
    if !series.is_empty() {
        series.push(original_points());
        parts.push(Part::Plot(Plot {
            title: "Speed-up over one worker, balanced, even load: all machines".into(),
            file: "speed-up-all".into(),
            x: "workers".into(),
            y: "frames/s over one worker's".into(),
            level: Some(1.0),
            series,
            ..Plot::default()
        }));
    }
    parts
}

fn axis<'a>(results: &'a Results, name: &str) -> &'a [String] {
    let axis = results.plan.axes.iter().find(|axis| axis.name == name);
    axis.map_or(&[], |axis| &axis.values)
}

fn number(text: &str) -> Value {
    Value::Number(text.parse().unwrap_or(0.0), 0)
}

fn text(words: impl Into<String>) -> Value {
    Value::Text(words.into())
}

fn columns(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

/// One set of cells that differ in placement and workers only.
struct Load<'a> {
    results: &'a Results,
    pairs: &'a str,
    size: &'a str,
    load: &'a str,
}

impl<'a> Load<'a> {
    /// All that there are runs of.
    fn all(results: &'a Results) -> Vec<Self> {
        let mut all = Vec::new();
        for pairs in axis(results, "pairs") {
            for load in axis(results, "load") {
                for size in axis(results, "size") {
                    let this = Self { results, pairs, size, load };
                    if results.runs.iter().any(|run| this.has(&run.cell)) {
                        all.push(this);
                    }
                }
            }
        }
        all
    }

    fn has(&self, cell: &Cell) -> bool {
        (cell.get("pairs"), cell.get("size"), cell.get("load"))
            == (self.pairs, self.size, self.load)
    }

    fn words(&self) -> String {
        format!("{} load, {} bytes, {} pairs", self.load, self.size, self.pairs)
    }

    fn file(&self, what: &str) -> String {
        format!("{what}-{}-{}-{}", self.load, self.size, self.pairs)
    }

    fn command(&self) -> String {
        format!(
            "pvswitch lab run threads --only pairs={} --only size={} --only load={}",
            self.pairs, self.size, self.load
        )
    }

    fn cell(&self, placement: &str, workers: &str) -> Cell {
        let pairs = [
            ("pairs", self.pairs),
            ("size", self.size),
            ("load", self.load),
            ("placement", placement),
            ("workers", workers),
        ];
        Cell(pairs.map(|(name, value)| (name.into(), value.into())).into())
    }

    /// Placement and workers of each cell with runs, and what it starts each row with.
    fn rows(&self) -> Vec<(&'a str, &'a str, Vec<Value>)> {
        let mut rows = Vec::new();
        for placement in axis(self.results, "placement") {
            for workers in axis(self.results, "workers") {
                let cell = self.cell(placement, workers);
                if self.results.runs.iter().any(|run| run.cell == cell) {
                    let begin =
                        vec![text(self.load), number(self.size), text(placement), number(workers)];
                    rows.push((placement.as_str(), workers.as_str(), begin));
                }
            }
        }
        rows
    }

    fn median(&self, placement: &str, workers: &str, measure: &str) -> Option<f64> {
        let found = self.results.summary(&self.cell(placement, workers), measure)?;
        Some(found.median)
    }

    fn value(
        &self,
        placement: &str,
        workers: &str,
        measure: &str,
        by: f64,
        digits: usize,
    ) -> Value {
        let found = self.results.estimate(&self.cell(placement, workers), measure);
        Value::estimate(found.map(|found| found.over(by)), digits, "not measured")
    }

    /// Speed-up of a number of workers over one.
    fn speed_up(&self, placement: &str, workers: &str, measure: &str) -> Option<Comparison> {
        let cell = self.cell(placement, workers);
        let mut all = self.results.compare(measure, &super::Threads).into_iter();
        all.find(|c| c.cell.0 == cell.outer() && c.value == workers && c.base == "1")
    }

    /// Why a speed-up of that cell says nothing, if so.
    fn uneven(&self, placement: &str, workers: &str) -> Option<String> {
        let [cell, one] = [workers, "1"].map(|n| self.cell(placement, n));
        let least = self.results.uneven(&super::Threads, &cell, &one, "frames")?;
        Some(format!("uneven: Jain's index {least:.2}"))
    }

    fn speed_up_points(&self, placement: &str) -> Vec<Point> {
        let one = self.median(placement, "1", "frames");
        let one = one.map(|_| Point::at(1.0, 1.0));
        let more = axis(self.results, "workers").iter().filter_map(|workers| {
            let found = self.speed_up(placement, workers, "frames")?.ratio?;
            Some(Point::of(workers.parse().ok()?, found))
        });
        one.into_iter().chain(more).collect()
    }

    fn plots(&self) -> Vec<Plot> {
        if axis(self.results, "workers").len() < 2 {
            return Vec::new();
        }
        let (mut rates, mut ratios) = (Vec::new(), Vec::new());
        for (colour, placement) in axis(self.results, "placement").iter().enumerate() {
            let name = placement.clone();
            let points = axis(self.results, "workers").iter().filter_map(|workers| {
                let found = self.results.estimate(&self.cell(placement, workers), "frames")?;
                Some(Point::of(workers.parse().ok()?, found.over(1e6)))
            });
            let points: Vec<Point> = points.collect();
            rates.push(Series { name: name.clone(), points, colour, ..Series::default() });
            let points = self.speed_up_points(placement);
            ratios.push(Series { name, points, colour, ..Series::default() });
        }
        ratios.push(self.limit_line(ratios.len()));
        ratios.push(original_points());
        ratios.retain(|series| !series.points.is_empty());
        rates.retain(|series| !series.points.is_empty());
        let plot = |title: String, file: &str, y: &str, note: &str, series, level| Plot {
            level,
            title,
            note: note.into(),
            file: self.file(file),
            x: "workers".into(),
            y: y.into(),
            series,
            command: self.command(),
            ..Plot::default()
        };
        let words = self.words();
        vec![
            plot(
                format!("Frames by workers: {words}"),
                "frames",
                "million frames/s",
                "",
                rates,
                None,
            ),
            plot(
                format!("Speed-up over one worker: {words}"),
                "speed-up",
                "frames/s over one worker's",
                "Limit: the maximum that CPU time of workers and guests allows with placement \
                 balanced. Original: with 4 and with more than 10 CPUs, drawn at 11.",
                ratios,
                Some(1.0),
            ),
        ]
    }

    /// The most that CPU time allows, over what one worker did.
    fn limit_line(&self, colour: usize) -> Series {
        let one = self.median("balanced", "1", "frames").filter(|frames| *frames > 0.0);
        let points = axis(self.results, "workers").iter().filter_map(|workers| {
            let y = self.limit("balanced", workers)?.frames / one?;
            Some(Point::at(workers.parse().ok()?, y))
        });
        let (name, points) = ("limit of CPU time".into(), points.collect());
        Series { name, points, colour, dashed: true, model: true, ..Series::default() }
    }

    fn limit(&self, placement: &str, workers: &str) -> Option<Limit> {
        let machine = &self.results.machine;
        let count: usize = workers.parse().ok()?;
        let all = worker_cpus(usize::MAX, &machine.switch_cpus, &machine.guest_cpus).len();
        let frames = self.median(placement, workers, "frames").filter(|frames| *frames > 0.0)?;
        let per_frame = |measure| Some(1e7 * self.median(placement, workers, measure)? / frames);
        let (switch_ns, guests_ns) = (per_frame("switch_cpu")?, per_frame("guests_cpu")?);
        let at_most = |cpus: usize, ns: f64| cpus as f64 * 1e9 / ns.max(1e-9);
        let serving = if placement == "single" { 1 } else { count };
        let of_workers = at_most(serving, switch_ns);
        let (of_rest, rest) = if shares_cpus(count, machine.switch_cpus.len()) {
            (at_most(all, switch_ns + guests_ns), "all CPUs, workers' and guests'")
        } else {
            (at_most(machine.guest_cpus.len(), guests_ns), "guests' CPUs")
        };
        let (frames, by) =
            if of_workers <= of_rest { (of_workers, "workers") } else { (of_rest, rest) };
        Some(Limit { frames, by, switch_ns, guests_ns })
    }
}

/// What CPU time allows one cell.
struct Limit {
    frames: f64,
    by: &'static str,
    switch_ns: f64,
    guests_ns: f64,
}

fn original_points() -> Series {
    let points = CLAIMS.iter().map(|claim| Point::at(f64::from(claim.workers), claim.speed_up));
    let points = points.collect();
    Series { name: "original".into(), points, colour: 7, loose: true, ..Series::default() }
}

/// A ratio with its interval.
fn ratio(found: Option<&Comparison>, missing: &str) -> Value {
    Value::estimate(found.and_then(|found| found.ratio), 2, missing)
}

/// The two cases of the original study, ours beside them.
fn claims(all: &[Results]) -> Table {
    let mut rows = Vec::new();
    for claim in &CLAIMS {
        for (i, results) in all.iter().enumerate() {
            let fits = |count: &&String| {
                let n = count.parse().unwrap_or(0);
                claim_of(n).is_some_and(|found| found.workers == claim.workers)
            };
            let workers = axis(results, "workers").iter().find(fits);
            let machine = format!("{}: {} CPUs", i + 1, results.machine.cpus);
            let loads = Load::all(results);
            let even = loads.iter().filter(|load| load.load == "even");
            for load in even {
                let ours = |placement: &str, measure: &str| {
                    let missing = format!(
                        "not measured with so many workers: this machine has {} CPUs",
                        results.machine.cpus
                    );
                    if let Some(why) = workers.and_then(|n| load.uneven(placement, n)) {
                        return Value::Missing(why);
                    }
                    let found = workers.and_then(|n| load.speed_up(placement, n, measure));
                    ratio(found.as_ref(), &missing)
                };
                rows.push(vec![
                    text(claim.case),
                    Value::Original(claim.speed_up, 1),
                    text(&machine),
                    workers.map_or(Value::Missing("none of so many".into()), |n| number(n)),
                    number(load.size),
                    ours("group", "frames"),
                    ours("balanced", "frames"),
                    ours("balanced", "capacity"),
                ]);
            }
        }
    }
    Table {
        title: "The original study's speed-up, and ours with as many workers".into(),
        note: "Throughput of many threads over that of one. Group corresponds to the patch. Ours: \
               even load; medians of the ratios of pairs. By \
               workers' own cost: see the limits below."
            .into(),
        columns: columns(&[
            "Original's case",
            "Original: speed-up",
            "Machine",
            "Workers",
            "Frame, bytes",
            "Group",
            "Balanced",
            "Balanced, by workers' own cost",
        ]),
        rows,
        command: "pvswitch lab run threads --full --only load=even".into(),
    }
}

fn speed_ups(loads: &[Load]) -> Table {
    let mut rows = Vec::new();
    for load in loads {
        for (placement, workers, mut row) in load.rows() {
            if workers == "1" {
                continue;
            }
            let frames = load.speed_up(placement, workers, "frames");
            let own = load.speed_up(placement, workers, "capacity");
            row.push(match claim_of(workers.parse().unwrap_or(0)) {
                Some(claim) => Value::Original(claim.speed_up, 1),
                None => Value::Missing("the original study has 4 and more than 10".into()),
            });
            if let Some(why) = load.uneven(placement, workers) {
                row.extend([(); 3].map(|()| Value::Missing(why.clone())));
                rows.push(row);
                continue;
            }
            row.push(ratio(frames.as_ref(), "one worker was not measured"));
            row.push(match &frames {
                Some(found) => text(found.outcome.to_string()),
                None => Value::Missing("one worker was not measured".into()),
            });
            row.push(ratio(own.as_ref(), "one worker was not measured"));
            rows.push(row);
        }
    }
    Table {
        title: "Speed-up over one worker".into(),
        note: "Measured frames/s, and whether the difference is significant; then frames per CPU \
             time of the busiest worker, which shows scaling even where guests use the workers' \
             CPUs. Skewed: limited by the number of flooding clients. Uneven: Jain's index of what \
               guests got is below 0.95 by median with one worker or with several, so that the \
               two do not do the same work."
            .into(),
        columns: columns(&[
            "Load",
            "Frame, bytes",
            "Placement",
            "Workers",
            "Original: speed-up",
            "Speed-up",
            "Frames/s are",
            "Speed-up by workers' own cost",
        ]),
        rows,
        command: "pvswitch lab run threads".into(),
    }
}

fn limits(loads: &[Load]) -> Table {
    let mut rows = Vec::new();
    for load in loads {
        for (placement, workers, mut row) in load.rows() {
            let value = |measure, by, digits| load.value(placement, workers, measure, by, digits);
            row.push(value("frames", 1e6, 3));
            match load.limit(placement, workers) {
                Some(limit) => {
                    let seen = load.median(placement, workers, "frames").unwrap_or(0.0);
                    row.extend([
                        Value::Number(limit.switch_ns, 0),
                        Value::Number(limit.guests_ns, 0),
                        Value::Number(limit.frames / 1e6, 3),
                        text(limit.by),
                        Value::Number(100.0 * seen / limit.frames, 0),
                    ]);
                }
                None => row.extend((0..5).map(|_| Value::Missing("no frames".into()))),
            }
            row.push(value("capacity", 1e6, 3));
            row.push(value("waited", 1.0, 0));
            rows.push(row);
        }
    }
    Table {
        title: "Limits".into(),
        note: "A frame costs its worker and its two guests CPU time. The limit is the minimum of \
               workers' CPUs divided by the switch's time per frame, and guests' CPUs divided by \
               theirs; or, where both share all CPUs, all CPUs divided by the sum. If the sum is \
               the limit, another worker adds no CPU time. Capacity is frames per CPU second of \
               the busiest worker: the rate if it were the only limit."
            .into(),
        columns: columns(&[
            "Load",
            "Frame, bytes",
            "Placement",
            "Workers",
            "Million frames/s",
            "Switch CPU for a frame, ns",
            "Guests' CPU for a frame, ns",
            "Limit, million frames/s",
            "Limit is of",
            "Reached, %",
            "Capacity of workers, million frames/s",
            "Switch waited for a CPU, %",
        ]),
        rows,
        command: "pvswitch lab run threads".into(),
    }
}

fn counts_table(loads: &[Load]) -> Table {
    const MEASURES: [(&str, &str, usize); 10] = [
        ("throughput", "Gbit/s", 2),
        ("switch_cpu", "Switch CPU, %", 0),
        ("guests_cpu", "Guests' CPU, %", 0),
        ("frames_per_cpu_s", "Frames per CPU second of the switch", 0),
        ("contended", "Locks waited for, of a million", 1),
        ("contended_others", "Other locks, of a million frames", 1),
        ("used", "Workers that forwarded", 0),
        ("moves", "Queues moved, 1/s", 1),
        ("jain", "Jain's index", 3),
        ("drops", "Frames lost, counted", 0),
    ];
    let mut rows = Vec::new();
    for load in loads {
        for (placement, workers, mut row) in load.rows() {
            let values = MEASURES.iter();
            row.extend(values.map(|m| load.value(placement, workers, m.0, 1.0, m.2)));
            rows.push(row);
        }
    }
    let mut names = vec!["Load", "Frame, bytes", "Placement", "Workers"];
    names.extend(MEASURES.iter().map(|measure| measure.1));
    Table {
        title: "Costs, contention and fairness".into(),
        note: "Locks: each group of frames locks its guest's egress queue once; two workers \
               contend only if they send to one guest. Other locks: all \
               others, see the table of locks. Jain's index: 1 if \
               equal demand gets equal service; of guests, converging: of clients. Lost: \
               converging clients send more than one guest accepts. Workers that forwarded: \
               those that had a queue with frames at the start or end of the window."
            .into(),
        columns: columns(&names),
        rows,
        command: "pvswitch lab run threads".into(),
    }
}

/// A row for each lock that was taken in a cell; `None`: results of a version that did not count
/// them.
fn locks_table(loads: &[Load]) -> Option<Table> {
    let mut rows = Vec::new();
    for load in loads {
        for (placement, workers, row) in load.rows() {
            for (lock, [taken, contended, waited]) in locks::rows() {
                let value = |measure| load.value(placement, workers, measure, 1.0, 2);
                if load.median(placement, workers, taken).is_some_and(|taken| taken > 0.0) {
                    let of_lock = [text(lock), value(taken), value(contended), value(waited)];
                    rows.push(row.iter().cloned().chain(of_lock).collect());
                }
            }
        }
    }
    let names = [
        "Load",
        "Frame, bytes",
        "Placement",
        "Workers",
        "Lock",
        "Taken, of 1000 frames",
        "Contended, of a million frames",
        "Waited, ns of 1000 frames",
    ];
    (!rows.is_empty()).then(|| Table {
        title: "Locks".into(),
        note: "All locks of the switch, by name (docs/design/0048-counted-locks.md); those that \
               workers rarely take together as others. Contended: another thread had it."
            .into(),
        columns: columns(&names),
        rows,
        command: "pvswitch lab run threads".into(),
    })
}
