//! `neighbours`: request-response guests beside a flooding guest, and how equal floods share an
//! overloaded worker.

use super::grid::{Grid, values};
use super::pair::{self, FEW, POLICIES, WARM_IDLE_S, number, worker_percent};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{
    Class, Count, Gen, NicOptions, Place, Port, Process, REPLAY_RING, Stage, Switch, SwitchOptions,
    Window, sleep, waited_ns,
};
use crate::stats::paired::Estimate;
use crate::stats::{Summary, jain};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// Number of request-response guests, and requests per second of each.
const CLIENTS: usize = 8;
const REQUESTS: u32 = 200;
/// Frame sizes of the floods of load `shares`, in bytes.
const SIZES: [u32; 4] = [60, 300, 800, 1514];
/// MAC address of the port that drops all frames.
const NULL_MAC: &str = "02:00:00:00:0f:ff";
/// Numbers of equal floods on two workers.
const FLOODS: [usize; 5] = [2, 3, 5, 10, 20];
/// Smallest accepted Jain's index of equal floods by worker time, and runs that a verdict needs.
const JAIN_MIN: f64 = 0.98;
const JAIN_RUNS_MIN: usize = 5;
/// Smallest accepted share of a flood, relative to the mean.
const FLOOD_SHARE_MIN: f64 = 0.1;
/// Smallest accepted number of replies to a guest beside a flooder, relative to the mean.
const REPLY_SHARE_MIN: f64 = 0.5;
/// Largest accepted ratio of a guest's p99 beside a flooder to that without.
const P99_RATIO_MAX: f64 = 2.0;

const ABOUT: &str = "\
alone: each of eight guests sends 200 requests per second to another and waits for the echo. \
flooder: the same beside a guest that sends as fast as it can to a port that drops everything, so \
that its only cost is in the switch; where guests share a CPU, it has the lowest scheduling \
priority, and guests that answer have a higher one than those that request. shares: four guests \
flood such a port with frames of 60, 300, 800 and 1514 bytes while the worker has half a CPU: \
Jain's index of its time for each. equal-N: N guests that never access their frames (gen \
--replay) flood at once, on two workers. Placement single is one worker, per-port and balanced \
are two; on two CPUs the second worker shares its CPU with the guests.";

const MEASURES: [Measure; 14] = [
    Measure::new("p99", "us", Better::Less, "there and back, 99 % of all, the median guest"),
    Measure::new("p99_worst", "us", Better::Less, "the same of the guest that waited longest"),
    Measure::new("p50", "us", Better::Less, "there and back, half of all, the median guest"),
    Measure::new("answers", "1/s", Better::More, "answers to all low-rate guests"),
    Measure::new("lost", "", Better::Less, "requests without a reply in time"),
    Measure::new("least_share", "", Better::More, "frames of the guest with fewest, over the mean"),
    Measure::new("flood", "1/s", Better::More, "frames that floods sent"),
    Measure::new("jain_frames", "", Better::More, "Jain's index of frames taken from each flood"),
    Measure::new("jain_bytes", "", Better::More, "the same of bytes"),
    Measure::new("jain_cycles", "", Better::More, "the same of the worker's time"),
    Measure::new("cpu", "%", Better::Less, "CPU time of all workers, of one CPU"),
    Measure::new("wakeups", "1/s", Better::Less, "sleeps and naps of the workers that ended"),
    Measure::new("moves", "", Better::Neither, "queues that went to another worker in the window"),
    Measure::new("waited", "%", Better::Neither, "time that the switch was runnable without a CPU"),
];

/// The study.
pub struct Neighbours;

const FACTS: Facts = Facts {
    name: "neighbours",
    about: "effect of a flooding guest on request-response guests, and how floods share a worker",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    // As of the policies.
    margin: 1.1,
    control: &[("load", "flooder"), ("placement", "single")],
};

impl Study for Neighbours {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let placements = ["single", "per-port", "balanced"];
        let (placements, policies, seconds, repeats): (&[&str], &[&str], f64, u32) = match scale {
            Scale::Smallest => (&placements[..1], &["event", "adaptive"], 0.5, 1),
            Scale::Quick => (&placements[..1], &["event", "adaptive"], 0.7, 1),
            Scale::Usual => (&placements, &FEW, 3.0, 1),
            Scale::Full => (&placements, &POLICIES, 10.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![
                Axis::new(
                    "load",
                    ["alone", "flooder", "shares"]
                        .map(String::from)
                        .into_iter()
                        .chain(FLOODS.map(load_of)),
                ),
                Axis::new("placement", placements),
                Axis::new("policy", policies),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        equal(cell).is_none()
            || (cell.get("placement") == "balanced" && cell.get("policy") == "adaptive")
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        2.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let options = options(run)?;
        if let Some(floods) = equal(run.cell) {
            return equal_floods(run, &options, floods);
        }
        match run.cell.get("load") {
            "alone" => requests(run, &options, false),
            "flooder" => requests(run, &options, true),
            "shares" => shares(run, &options),
            other => Err(Fail::Cell(format!("unknown load {other}"))),
        }
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
        parts.extend(p99_table(results));
        parts.extend(jain_table(results));
        for (load, title, measures) in [
            ("alone", "Alone", &REQUEST_TABLES[..]),
            ("flooder", "Beside a flooder", &REQUEST_TABLES[..]),
            ("shares", "Equal floods", &FLOOD_TABLES[..]),
        ] {
            let fixed = [("load", load)];
            let grid = Grid { results, fixed: &fixed, rows: "policy", columns: "placement" };
            let note = "Columns: placement of queues on workers.";
            let tables = measures.iter();
            parts.extend(tables.filter_map(|(words, measure)| {
                grid.table(&format!("{title}: {words}"), note, measure)
            }));
        }
        parts
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let judged = [
            ("flooder", REPLY_SHARE_MIN, "every requesting guest is answered beside a flooder"),
            ("shares", FLOOD_SHARE_MIN, "every one of equal floods is served"),
        ];
        let verdicts = judged.into_iter().filter_map(|(load, least, what)| {
            let wanted = |cell: &Cell| cell.get("load") == load;
            let seen = Summary::of(&results.values(wanted, "least_share"))?;
            Some(Verdict {
                what: format!(
                    "{what}: in each of {} runs all have {:.0} % or more of the mean, in frames; \
                     least {:.0} %",
                    seen.count,
                    100.0 * least,
                    100.0 * seen.low
                ),
                holds: Some(seen.low >= least),
            })
        });
        verdicts.chain(jain_verdict(results)).collect()
    }
}

/// Returns the load with that many equal floods.
fn load_of(floods: usize) -> String {
    format!("equal-{floods}")
}

/// Returns the number of equal floods of a cell; `None` for another load.
fn equal(cell: &Cell) -> Option<usize> {
    cell.get("load").strip_prefix("equal-")?.parse().ok()
}

/// Returns Jain's index by worker time for each number of equal floods.
fn jain_by_floods(results: &Results) -> Vec<(usize, Summary)> {
    let of = |floods: usize| {
        let values = results.values(|cell| equal(cell) == Some(floods), "jain_cycles");
        Some((floods, Summary::of(&values)?))
    };
    FLOODS.into_iter().filter_map(of).collect()
}

/// Judges whether equal floods are served for equal time.
fn jain_verdict(results: &Results) -> Option<Verdict> {
    let seen = jain_by_floods(results);
    let runs = seen.iter().map(|(_, jain)| jain.count).min()?;
    let each = |(floods, jain): &(usize, Summary)| {
        format!("{floods}: {:.3} ({:.3} to {:.3})", jain.median, jain.low, jain.high)
    };
    let holds = seen.iter().all(|(_, jain)| jain.median >= JAIN_MIN);
    Some(Verdict {
        what: format!(
            "equal floods on two workers get equal time: Jain's index {JAIN_MIN} or \
             more, median of {runs} runs; {}",
            seen.iter().map(each).collect::<Vec<_>>().join(", ")
        ),
        holds: (runs >= JAIN_RUNS_MIN).then_some(holds),
    })
}

/// Returns the table of equal floods.
fn jain_table(results: &Results) -> Option<Part> {
    let of = |floods: usize, measure: &str| {
        super::grid::shown(Estimate::of(
            &results.values(|cell| equal(cell) == Some(floods), measure),
        ))
    };
    let row = |(floods, _): (usize, Summary)| {
        let jain = results.values(|cell| equal(cell) == Some(floods), "jain_cycles");
        vec![
            Value::Number(floods as f64, 0),
            Value::estimate(Estimate::of(&jain), 3, "not measured"),
            of(floods, "jain_frames"),
            of(floods, "least_share"),
            of(floods, "flood"),
            of(floods, "moves"),
            of(floods, "waited"),
        ]
    };
    let rows: Vec<_> = jain_by_floods(results).into_iter().map(row).collect();
    let columns = [
        "floods",
        "Jain's index, time served",
        "Jain's index, frames",
        "least, of the mean",
        "frames/s",
        "moves",
        "workers without a CPU, %",
    ];
    let table = Table {
        title: "Equal floods on two workers".into(),
        note: "Balanced placement; medians with their range.".into(),
        columns: columns.map(String::from).into(),
        rows,
        command: format!(
            "pvswitch lab run neighbours --only load={}",
            FLOODS.map(load_of).join(",")
        ),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

/// Tables of request-response guests: title and measure.
const REQUEST_TABLES: [(&str, &str); 6] = [
    ("p99 there and back, the median guest, us", "p99"),
    ("p99 there and back, the worst guest, us", "p99_worst"),
    ("answers a second", "answers"),
    ("requests without a reply", "lost"),
    ("CPU of the workers, % of one CPU", "cpu"),
    ("frames a second of the flood", "flood"),
];
/// Tables of floods: title and measure.
const FLOOD_TABLES: [(&str, &str); 5] = [
    ("Jain's index by frames", "jain_frames"),
    ("Jain's index by bytes", "jain_bytes"),
    ("Jain's index by the worker's time", "jain_cycles"),
    ("frames a second", "flood"),
    ("CPU of the workers, % of one CPU", "cpu"),
];

/// Returns options of a switch with the policy and placement of a cell.
fn options(run: &Run) -> Result<SwitchOptions, Fail> {
    let mut options = pair::switch_options(run.stage, run.cell.get("policy"));
    let placement = run.cell.get("placement");
    options.workers = match placement {
        "single" => 1,
        "per-port" | "balanced" => 2,
        other => return Err(Fail::Cell(format!("unknown placement {other}"))),
    };
    options.placement = placement.into();
    // The second worker uses a CPU of the guests if the switch has only one.
    let all = run.stage.switch_cpus.iter().chain(&run.stage.guest_cpus);
    options.cpus = all.copied().take(options.workers).collect();
    Ok(options)
}

/// Starts a switch with ports for guests and a port that drops all frames.
fn switch(
    stage: &Stage,
    options: &SwitchOptions,
    guests: usize,
) -> Result<(Switch, Vec<Port>), Fail> {
    let port = |i| Port::guest(stage, &format!("g{i:02}"), stage.proto, "");
    let ports: Vec<Port> = (0..guests).map(port).collect();
    let all = [&ports[..], &[Port::null("null")]].concat();
    let switch = Switch::start(stage, options, &all)?;
    switch.add_static_mac(NULL_MAC, "null")?;
    Ok((switch, ports))
}

/// Counts for `seconds` after a warm-up, with the figures that all cells have.
fn measure_workers(switch: &Switch, seconds: f64) -> Result<(Count, Figures), Fail> {
    sleep(WARM_IDLE_S);
    let waited = waited_ns(switch.id());
    let window = Window::open(switch, &[])?;
    sleep(seconds);
    let count = window.close()?;
    let waited = waited_ns(switch.id()).saturating_sub(waited);
    let figures = common(&count, waited);
    Ok((count, figures))
}

/// Returns the figures of every cell.
fn common(count: &Count, waited: u64) -> Figures {
    Figures::from([
        ("cpu", worker_percent(count)),
        ("wakeups", count.per_second(pair::woken(count))),
        ("moves", count.workers.get("moves").copied().unwrap_or(0) as f64),
        ("waited", count.percent(waited)),
    ])
}

/// Returns the minimum divided by the mean; `None` if the mean is 0.
fn least_share(each: &[f64]) -> Option<f64> {
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    let least = each.iter().copied().min_by(f64::total_cmp)?;
    (mean > 0.0).then_some(least / mean)
}

/// Measures request-response guests, whose requests another guest answers.
fn requests(run: &Run, options: &SwitchOptions, flood: bool) -> Result<Figures, Fail> {
    let (stage, guest) = (run.stage, pair::guest_options());
    let (switch, ports) = switch(stage, options, 1 + CLIENTS + usize::from(flood))?;
    let class = pair::receiver_class(stage);
    let _echo = Gen::start_as(stage, 0, &ports[0], &guest, "echo", class)?;
    // One of the two is the null port, which is always up.
    switch.wait_up(2)?;
    // Without a duration: on a busy machine it may take long until all are connected.
    let mode = format!("rr --peer {} --rate {REQUESTS}", Gen::mac(0));
    let clients = (1..=CLIENTS).map(|i| Gen::start_as(stage, i, &ports[i], &guest, &mode, class));
    let mut clients: Vec<Gen> = clients.collect::<Result<_, _>>()?;
    let flooder = ports.get(1 + CLIENTS).map(|port| {
        let mode = format!("send --peer {NULL_MAC}");
        let class = if stage.guest_cpus.len() < 2 { Class::Idle } else { Class::Normal };
        Gen::start_as(stage, 1 + CLIENTS, port, &guest, &mode, class)
    });
    let mut flooder = flooder.transpose()?;
    switch.wait_up_while(1 + ports.len(), || {
        clients.iter_mut().chain(&mut flooder).try_for_each(Gen::check)
    })?;
    let (count, mut figures) = measure_workers(&switch, run.seconds)?;
    if flooder.is_some() {
        let name = &ports[1 + CLIENTS].name;
        figures.insert("flood", count.per_second(count.ingress(name, "frames")));
    }
    let reports = clients.into_iter().map(Gen::end);
    let reports: Vec<_> = reports.collect::<Result<_, _>>()?;
    switch.check()?;
    let each = |name: &str| reports.iter().map(|report| number(report, name)).collect::<Vec<_>>();
    figures.insert("answers", each("received_pps").iter().sum());
    figures.insert("lost", each("lost_frames").iter().sum());
    figures.extend(least_share(&each("received_frames")).map(|share| ("least_share", share)));
    if each("latency_samples").iter().all(|samples| *samples > 0.0) {
        let p99 = Summary::of(&each("latency_ns_p99"));
        figures.extend(p99.map(|all| ("p99", all.median / 1e3)));
        figures.extend(p99.map(|all| ("p99_worst", all.high / 1e3)));
        let p50 = Summary::of(&each("latency_ns_p50"));
        figures.extend(p50.map(|all| ("p50", all.median / 1e3)));
    }
    Ok(figures)
}

/// Measures floods of different frame sizes. CPU hogs leave each worker half a CPU: generators use
/// more time than the switch, so a worker with a whole CPU would not be overloaded.
fn shares(run: &Run, options: &SwitchOptions) -> Result<Figures, Fail> {
    let hogs = options.cpus.iter().map(|cpu| {
        let args = ["-c", "while :; do :; done"].map(String::from);
        run.stage.start("hog", "sh", &args, &Place { netns: None, cpus: &[*cpu] })
    });
    let hogs = || hogs.collect::<Result<Vec<Process>, Fail>>();
    floods(run, options, &pair::guest_options(), &SIZES, hogs)
}

/// Measures equal floods of guests that use almost no CPU, so that workers always have frames.
fn equal_floods(run: &Run, options: &SwitchOptions, count: usize) -> Result<Figures, Fail> {
    floods(run, options, &NicOptions::replay(run.stage, REPLAY_RING)?, &vec![60; count], || {
        Ok(Vec::new())
    })
}

/// Measures floods, one of each frame size; `hogs` are started once all floods are connected.
fn floods(
    run: &Run,
    options: &SwitchOptions,
    guest: &NicOptions,
    sizes: &[u32],
    hogs: impl FnOnce() -> Result<Vec<Process>, Fail>,
) -> Result<Figures, Fail> {
    let stage = run.stage;
    let (switch, ports) = switch(stage, options, sizes.len())?;
    let floods = sizes.iter().zip(&ports).enumerate().map(|(i, (size, port))| {
        let mode = format!("send --peer {NULL_MAC} --size {size}");
        Gen::start(stage, i, port, guest, &mode)
    });
    let mut floods: Vec<Gen> = floods.collect::<Result<_, _>>()?;
    switch.wait_up_while(1 + ports.len(), || floods.iter_mut().try_for_each(Gen::check))?;
    let _hogs = hogs()?;
    let (count, mut figures) = measure_workers(&switch, run.seconds)?;
    switch.check()?;
    // Counters are summed by prefix: no port's name is a prefix of another's.
    let each = |counter: &str| -> Vec<f64> {
        ports.iter().map(|port| count.ingress(&port.name, counter)).collect()
    };
    let frames = each("frames");
    figures.insert("flood", count.per_second(frames.iter().sum()));
    figures.extend(least_share(&frames).map(|share| ("least_share", share)));
    for (name, values) in
        [("jain_frames", frames), ("jain_bytes", each("bytes")), ("jain_cycles", each("served_ns"))]
    {
        figures.extend(jain(&values).map(|jain| (name, jain)));
    }
    Ok(figures)
}

/// Returns the table of p99 alone and beside a flooder.
fn p99_table(results: &Results) -> Option<Part> {
    let mut rows = Vec::new();
    for placement in values(results, "placement") {
        for policy in values(results, "policy") {
            let cell = |load: &str| {
                let pairs = [("load", load), ("placement", placement), ("policy", policy)];
                Cell(pairs.map(|(axis, value)| (axis.to_string(), value.to_string())).into())
            };
            let ratio = results.ratio(&cell("flooder"), &cell("alone"), "p99");
            let Some(ratio) = ratio else { continue };
            let p99 = |load: &str| results.estimate(&cell(load), "p99");
            let kept = if ratio.median < P99_RATIO_MAX { "yes" } else { "no" };
            rows.push(vec![
                Value::Text(policy.clone()),
                Value::Text(placement.clone()),
                super::grid::shown(p99("alone")),
                super::grid::shown(p99("flooder")),
                Value::Spread(ratio, 2),
                Value::Text(kept.into()),
            ]);
        }
    }
    let columns = ["policy", "placement", "alone", "flooder", "ratio", "less than twice"];
    let table = Table {
        title: "p99 of a low-rate guest, there and back, us, alone and beside a flooder".into(),
        note: "Of eight guests the median one.".into(),
        columns: columns.map(String::from).into(),
        rows,
        command: "pvswitch lab run neighbours --only load=alone,flooder".into(),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_share_is_relative_to_the_mean() {
        assert_eq!(least_share(&[1.0, 3.0]), Some(0.5));
        assert_eq!(least_share(&[0.0, 3.0]), Some(0.0));
        assert_eq!(least_share(&[0.0, 0.0]), None);
        assert_eq!(least_share(&[]), None);
    }
}
