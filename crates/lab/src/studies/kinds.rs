//! `kinds`: the kind of worker, by counts: wake-ups, context switches, bursts and system calls of
//! each frame, at one offered load.

use std::collections::BTreeMap;

use super::grid::shown;
use super::threads::{addresses, client_name, guest_name, shares_cpus, worker_cpus};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{
    Gen, NicOptions, Place, Port, Process, START_MAX_S, Stage, Switch, SwitchOptions, Switches,
    Window, is_traced, need, sleep, switches, wait_for,
};
use crate::stats::Summary;
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

const ABOUT: &str = "\
Clients send frames of 60 bytes to guests, each to its own, at a fixed rate; what differs is who \
forwards them. one: a single worker for all ports, an ordinary thread. group: two workers, each \
for a group of ports. -high: with niceness -20. -realtime: in a real-time scheduling class \
(SCHED_RR), ahead of all ordinary processes. one-realtime is nearest to the tasklet of the \
original study: one context for all guests that no process delays; group and group-high to its \
threads. busy: beside an ordinary process on each worker's CPU that computes without pause.

All are counts for a thousand frames, so they do not depend on the speed of the machine; where the \
load differs (frames/s), they cannot be compared. A worker sleeps in epoll_wait: a voluntary \
switch is one that had nothing to do, an involuntary one lost its CPU to another thread. System \
calls of workers are counted by strace, if it is installed, in a window of its own after the \
first: it delays each, so that a burst has more frames where they come fast.";

/// A thousand frames.
const PER: f64 = 1000.0;
/// Traffic before the window.
const WARM_S: f64 = 0.3;
const BUSY: &str = "busy";

const MEASURES: [Measure; 13] = [
    Measure::new("frames", "1/s", Better::Neither, "frames that guests got, all together"),
    Measure::new("woken", "1/k", Better::Less, "sleeps and naps of workers, per 1000 frames"),
    Measure::new(
        "voluntary",
        "1/k",
        Better::Less,
        "times a worker gave up its CPU, as the kernel counts them, per 1000 frames",
    ),
    Measure::new(
        "involuntary",
        "1/k",
        Better::Less,
        "times the kernel took a worker's CPU away, per 1000 frames",
    ),
    Measure::new("slices", "1/k", Better::Less, "times a worker got a CPU, per 1000 frames"),
    Measure::new("bursts", "1/k", Better::Less, "polls that found frames, per 1000 frames"),
    Measure::new("polls", "1/k", Better::Less, "polls, empty or not, per 1000 frames"),
    Measure::new("kicks", "1/k", Better::Less, "notifications from guests, per 1000 frames"),
    Measure::new("calls", "1/k", Better::Less, "notifications to guests, per 1000 frames"),
    Measure::new(
        "epoll_waits",
        "1/k",
        Better::Less,
        "times a worker asked the kernel for kicks, per 1000 frames",
    ),
    Measure::new(
        "syscalls",
        "1/k",
        Better::Less,
        "system calls of workers in a window under strace, per 1000 frames of it",
    ),
    Measure::new("drops", "", Better::Less, "frames that the switch dropped, in the window"),
    Measure::new("used", "", Better::Neither, "workers that slept or ran in the window"),
];

/// The study.
pub struct Kinds;

const FACTS: Facts = Facts {
    name: "kinds",
    about: "the kind of worker: wake-ups, context switches and system calls of each frame",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    // As of the policies.
    margin: 1.1,
    control: &[("beside", "nothing")],
};

/// A kind of worker.
struct Kind {
    name: &'static str,
    workers: usize,
    placement: &'static str,
    priority: &'static str,
}

const fn kind(name: &'static str, workers: usize, priority: &'static str) -> Kind {
    let placement = if workers > 1 { "group" } else { "single" };
    Kind { name, workers, placement, priority }
}

const KINDS: [Kind; 6] = [
    kind("one", 1, "normal"),
    kind("one-high", 1, "high"),
    kind("one-realtime", 1, "realtime"),
    kind("group", 2, "normal"),
    kind("group-high", 2, "high"),
    kind("group-realtime", 2, "realtime"),
];

impl Study for Kinds {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let rates = [2_000, 20_000];
        let (rates, beside, seconds): (&[u32], &[&str], f64) = match scale {
            Scale::Smallest => (&rates[..1], &["nothing"], 0.5),
            Scale::Quick => (&rates[..1], &["nothing", BUSY], 0.5),
            Scale::Usual => (&rates, &["nothing", BUSY], 2.0),
            Scale::Full => (&rates, &["nothing", BUSY], 10.0),
        };
        // Others need a right.
        let all = KINDS.iter().map(|kind| kind.name);
        let kinds = all.filter(|name| scale != Scale::Smallest || !name.contains('-'));
        let axes = vec![
            Axis::new("pairs", [4]),
            Axis::new("rate", rates),
            Axis::new("beside", beside),
            Axis::new("kind", kinds),
        ];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        1.2 + 0.05 * cell.number("pairs") + if need("strace").is_ok() { 0.5 } else { 0.0 }
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let wanted = run.cell.get("kind");
        let kind = KINDS.iter().find(|kind| kind.name == wanted).ok_or_else(|| {
            let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
            Fail::Cell(format!("kind={wanted}: use one of {}", names.join(", ")))
        })?;
        measure(kind, run)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let about = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        std::iter::once(about).chain(tables(results)).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        judge(results)
    }
}

fn measure(kind: &Kind, run: &Run) -> Result<Figures, Fail> {
    let (stage, cell) = (run.stage, run.cell);
    let pairs = cell.number("pairs") as usize;
    let all = stage.all_cpus();
    if kind.workers > all.len() {
        return Err(Fail::Missing(format!("{} workers need as many CPUs", kind.workers)));
    }
    let mut options = SwitchOptions::new(stage, "event");
    options.workers = kind.workers;
    options.placement = kind.placement.into();
    options.cpus = worker_cpus(kind.workers, &stage.switch_cpus, &stage.guest_cpus);
    options.more = vec!["--priority".into(), kind.priority.into()];
    let shared = shares_cpus(kind.workers, stage.switch_cpus.len());
    let cpus = if shared { all } else { stage.guest_cpus.clone() };
    let ports = |name: fn(usize) -> String| {
        let port = move |i| Port::guest(stage, &name(i), stage.proto, "");
        (0..pairs).map(port).collect::<Vec<_>>()
    };
    let (to_clients, to_guests) = (ports(client_name), ports(guest_name));
    let switch = Switch::start(stage, &options, &[&to_clients[..], &to_guests].concat());
    let switch = switch.map_err(|fail| match fail {
        Fail::Cell(why) if why.contains("--priority") => Fail::Missing(why),
        other => other,
    })?;
    let start = |i: usize, port: &Port, mode: &str| {
        Gen::start_on(stage, &cpus, i, port, &NicOptions::new("event"), mode)
    };
    let guests = to_guests.iter().enumerate().map(|(i, port)| start(i, port, "sink"));
    let mut guests = guests.collect::<Result<Vec<_>, _>>()?;
    switch.wait_up_while(pairs, || guests.iter_mut().try_for_each(Gen::check))?;
    // Guests announce their addresses: frames for an unknown address are flooded.
    wait_for("the guests' addresses", START_MAX_S, || Ok(addresses(&switch)? >= pairs))?;
    let rate = cell.get("rate");
    let clients = to_clients.iter().enumerate().map(|(i, port)| {
        let mode = format!("send --size 60 --peer {} --rate {rate}", Gen::mac(i));
        start(pairs + i, port, &mode)
    });
    let mut clients = clients.collect::<Result<Vec<_>, _>>()?;
    switch.wait_up_while(2 * pairs, || clients.iter_mut().try_for_each(Gen::check))?;
    let busy = if cell.get("beside") == BUSY { &options.cpus[..] } else { &[] };
    let _busy = busy.iter().map(|cpu| compute(stage, *cpu)).collect::<Result<Vec<_>, _>>()?;
    sleep(WARM_S);
    let tids = threads(&switch)?;
    let kernel = || tids.iter().map(|tid| switches(switch.id(), *tid)).collect::<Vec<_>>();
    let (window, before) = (Window::open(&switch, &[])?, kernel());
    sleep(run.seconds);
    let (after, count) = (kernel(), window.close()?);
    switch.check()?;
    let of_workers = after.iter().zip(&before).map(|(after, before)| *after - *before);
    let of_workers: Vec<Switches> = of_workers.collect();
    let sum = |of: fn(&Switches) -> u64| of_workers.iter().map(of).sum::<u64>() as f64;
    let worker = |name: &str| count.workers.get(name).copied().unwrap_or(0) as f64;
    let frames = count.egress("g", "frames");
    let per = |counted: f64| PER * counted / frames.max(1.0);
    let mut figures = BTreeMap::from([
        ("frames", count.per_second(frames)),
        ("woken", per(worker("sleeps") + worker("naps"))),
        ("voluntary", per(sum(|of| of.voluntary))),
        ("involuntary", per(sum(|of| of.involuntary))),
        ("slices", per(sum(|of| of.slices))),
        ("bursts", per(count.ingress("c", "bursts"))),
        ("polls", per(count.ingress("", "polls"))),
        ("kicks", per(count.kicks(""))),
        ("calls", per(count.calls(""))),
        ("epoll_waits", per(worker("epoll_waits"))),
        ("drops", count.drops("c", "g")),
        ("used", of_workers.iter().filter(|of| of.slices > 0).count() as f64),
    ]);
    let calls = traced(stage, &switch, &tids, run.seconds)?;
    figures.extend(calls.map(|calls| ("syscalls", calls)));
    Ok(figures)
}

/// System calls of threads of the switch for a thousand frames, in a window of their own; `None`:
/// nothing can count them.
fn traced(stage: &Stage, switch: &Switch, tids: &[u32], seconds: f64) -> Result<Option<f64>, Fail> {
    if need("strace").is_err() {
        return Ok(None);
    }
    let of_tids = tids.iter().flat_map(|tid| ["-p".into(), tid.to_string()]);
    let args: Vec<String> = ["-q", "-c"].map(String::from).into_iter().chain(of_tids).collect();
    let mut strace = stage.start("strace", "strace", &args, &Place::default())?;
    let mut refused = false;
    wait_for("strace to attach", START_MAX_S, || {
        refused = strace.check().is_err();
        Ok(refused || tids.iter().all(|tid| is_traced(switch.id(), *tid)))
    })?;
    if refused {
        return Ok(None);
    }
    let window = Window::open(switch, &[])?;
    sleep(seconds);
    strace.end()?;
    let frames = window.close()?.egress("g", "frames");
    let calls = total(&strace.logged()).ok_or_else(|| strace.fail("printed no total"))?;
    Ok(Some(PER * calls / frames.max(1.0)))
}

/// The number of calls in a summary of `strace -c`.
fn total(summary: &str) -> Option<f64> {
    let line = summary.lines().find(|line| line.trim_end().ends_with(" total"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

/// Starts a process that computes without pause.
fn compute(stage: &Stage, cpu: usize) -> Result<Process, Fail> {
    let args = ["-c", "while :; do :; done"].map(String::from);
    stage.start("busy", "sh", &args, &Place { netns: None, cpus: &[cpu] })
}

/// Thread ids of the workers.
fn threads(switch: &Switch) -> Result<Vec<u32>, Fail> {
    let stats = switch.ask(&api::Request::Stats)?;
    let workers = stats["workers"].as_array().into_iter().flatten();
    let tids = workers.filter_map(|worker| u32::try_from(worker["tid"].as_u64()?).ok());
    Ok(tids.collect())
}

fn tables(results: &Results) -> Vec<Part> {
    const COLUMNS: [(&str, &str); 11] = [
        ("frames", "frames/s"),
        ("woken", "wake-ups"),
        ("voluntary", "voluntary switches"),
        ("involuntary", "involuntary switches"),
        ("slices", "time slices"),
        ("bursts", "bursts"),
        ("kicks", "kicks"),
        ("calls", "calls"),
        ("epoll_waits", "epoll_waits"),
        ("syscalls", "system calls"),
        ("drops", "drops"),
    ];
    let mut groups: Vec<Cell> = Vec::new();
    for cell in results.cells() {
        let group = cell.with("kind", "one").with("beside", "nothing");
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let table = |group: Cell| {
        let here = |cell: &&Cell| cell.with("kind", "one").with("beside", "nothing") == group;
        let row = |cell: &Cell| {
            let words = ["beside", "kind"].map(|axis| Value::Text(cell.get(axis).into()));
            let figures = COLUMNS.iter().map(|(name, _)| shown(results.estimate(cell, name)));
            words.into_iter().chain(figures).collect()
        };
        let names = ["beside", "kind"].into_iter().chain(COLUMNS.map(|(_, title)| title));
        let (pairs, rate) = (group.get("pairs"), group.get("rate"));
        Part::Table(Table {
            title: format!("Counts for 1000 frames: {pairs} pairs, {rate} frames/s each"),
            note: "Medians. Rows can be compared where frames/s are the same.".into(),
            columns: names.map(Into::into).collect(),
            rows: results.cells().into_iter().filter(here).map(row).collect(),
            command: format!("pvswitch lab run kinds --only rate={rate}"),
        })
    };
    groups.into_iter().map(table).collect()
}

/// A worker that the kernel takes off its CPU, or that waits elsewhere than in `epoll_wait`, or
/// more workers than there should be: counts that do not depend on the machine's load.
fn judge(results: &Results) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let figures = |run: &crate::store::Done, name: &str| run.figures.get(name).copied();
    let pairs = |a: &str, b: &str| -> Vec<(f64, f64)> {
        let runs = results.runs.iter().filter(|run| !run.cell.get("kind").ends_with("realtime"));
        runs.filter_map(|run| Some((figures(run, a)?, figures(run, b)?))).collect()
    };
    let sleeps = pairs("voluntary", "woken");
    if !sleeps.is_empty() {
        // The kernel's counts are read a little apart from ours.
        let all = sleeps.iter().filter(|(voluntary, woken)| *voluntary <= 1.05 * woken + 5.0);
        let all = all.count();
        let what = format!(
            "a worker gives up its CPU only where it sleeps for lack of work: {all} of {} runs",
            sleeps.len()
        );
        verdicts.push(Verdict { what, holds: Some(all == sleeps.len()) });
    }
    let waits = pairs("woken", "epoll_waits");
    if !waits.is_empty() {
        let all = waits.iter().filter(|(woken, waits)| *woken <= waits + 1.0).count();
        let what = format!("each sleep is an epoll_wait: {all} of {} runs", waits.len());
        verdicts.push(Verdict { what, holds: Some(all == waits.len()) });
    }
    let preempted = results.values(|cell| cell.get("kind").ends_with("realtime"), "involuntary");
    if let Some(most) = Summary::of(&preempted) {
        let what = format!(
            "a real-time worker is not preempted: at most {:.2} times in 1000 frames, {} runs",
            most.high, most.count
        );
        verdicts.push(Verdict { what, holds: Some(most.high < 1.0) });
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::store::Done;

    fn results(kinds: &[&str], figures: &dyn Fn(&str) -> Figures) -> Results {
        let plan = Kinds.plan(Scale::Quick);
        let mut results = Results {
            plan,
            runs: Vec::new(),
            command: String::new(),
            machine: Machine::default(),
            controls: Vec::new(),
            void: Vec::new(),
        };
        for kind in kinds {
            let turns = Kinds.plan(Scale::Quick).turns(&Kinds);
            let turn = turns.into_iter().find(|turn| turn.cell.get("kind") == *kind).unwrap();
            let figures = figures(kind).into_iter().map(|(k, v)| (k.to_string(), v)).collect();
            let (cell, repeat) = (turn.cell, turn.repeat);
            results.runs.push(Done {
                cell,
                repeat,
                distance_ns: 0.0,
                others_percent: 0.0,
                figures,
            });
        }
        results
    }

    fn good(kind: &str) -> Figures {
        let involuntary = if kind.ends_with("realtime") { 0.0 } else { 40.0 };
        BTreeMap::from([
            ("frames", 8000.0),
            ("woken", 500.0),
            ("voluntary", 500.0),
            ("involuntary", involuntary),
            ("epoll_waits", 900.0),
        ])
    }

    #[test]
    fn judged_by_counts() {
        let holds = |kind: &str, name: &'static str, value: f64| {
            let changed = |this: &str| {
                let mut figures = good(this);
                if this == kind {
                    figures.insert(name, value);
                }
                figures
            };
            let verdicts = judge(&results(&["one", "group", "one-realtime"], &changed));
            verdicts.iter().map(|verdict| verdict.holds.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(holds("one", "woken", 500.0), [true; 3]);
        assert_eq!(holds("group", "voluntary", 600.0), [false, true, true]);
        assert_eq!(holds("group", "epoll_waits", 400.0), [true, false, true]);
        assert_eq!(holds("one-realtime", "involuntary", 2.0), [true, true, false]);
        assert!(judge(&results(&[], &good)).is_empty());
    }

    #[test]
    fn a_summary_of_strace_has_its_total() {
        let summary = "% time     seconds  usecs/call     calls    errors syscall\n\
                       ------ ----------- ----------- --------- --------- -----------\n \
                       45.43    0.026995           5      5250           epoll_pwait2\n\
                       ------ ----------- ----------- --------- --------- -----------\n\
                       100.00    0.059424           3     16450         7 total\n";
        assert_eq!(total(summary), Some(16450.0));
        assert_eq!(total("strace: attach: Operation not permitted\n"), None);
    }

    #[test]
    fn each_load_has_a_table_with_a_row_for_each_kind() {
        let made = results(&["one", "group-high"], &good);
        let [Part::Table(table)] = &tables(&made)[..] else { panic!("not one table") };
        assert_eq!(table.rows.len(), 2);
        assert_eq!(table.rows[1][1], Value::Text("group-high".into()));
        assert_eq!(table.columns.len(), table.rows[0].len());
    }

    #[test]
    fn kinds_are_one_worker_for_all_and_one_for_each_group_at_each_priority() {
        for priority in ["normal", "high", "realtime"] {
            let of = KINDS.iter().filter(|kind| kind.priority == priority);
            let of: Vec<_> = of.map(|kind| (kind.workers, kind.placement)).collect();
            assert_eq!(of, [(1, "single"), (2, "group")]);
        }
        let smallest = Kinds.plan(Scale::Smallest).cells(&Kinds);
        let kinds: Vec<_> = smallest.iter().map(|cell| cell.get("kind")).collect();
        assert_eq!(kinds, ["one", "group"]);
    }
}
