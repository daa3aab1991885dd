//! `idle`: cost of connected idle ports, alone and beside a busy pair.

use super::grid::{Grid, values};
use super::pair::{
    self, FEW, Idle as IdleGuests, JUDGED, MEASURES, POLICIES, Pair, WARM_IDLE_S, of_window,
};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{Switch, Window, sleep};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

const ABOUT: &str = "\
alone: a number of connected idle guests; the worker should sleep. beside-pair: the same beside \
one guest that sends to another as fast as it can; the table shows how much of its rate the pair \
keeps.";

const OWN: [Measure; 2] = [
    Measure::new(
        "switch_cpu",
        "%",
        Better::Less,
        "CPU time of the whole switch, including both reads of its counters",
    ),
    Measure::new(
        "memory",
        "KiB",
        Better::Less,
        "private memory of the switch: what it does not share with guests",
    ),
];

/// All measures: those of idle ports, then those of a pair.
const ALL: [Measure; OWN.len() + MEASURES.len()] = {
    let mut all = [OWN[0]; OWN.len() + MEASURES.len()];
    all[1] = OWN[1];
    let mut i = 0;
    while i < MEASURES.len() {
        all[OWN.len() + i] = MEASURES[i];
        i += 1;
    }
    all
};

/// The study.
pub struct Idle;

const FACTS: Facts = Facts {
    name: "idle",
    about: "cost of connected idle ports, alone and beside a busy pair",
    original: None,
    measures: &ALL,
    takes_proto: true,
    tools: &[],
    together: None,
    // A pair keeps 99 % of its rate beside idle ports.
    margin: 1.01,
    control: &[("traffic", "beside-pair"), ("ports", "100")],
};

impl Study for Idle {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (ports, policies, seconds, repeats): (&[u32], &[&str], f64, u32) = match scale {
            Scale::Smallest => (&[0, 1, 100], &JUDGED, 0.5, 1),
            Scale::Quick => (&[0, 100], &FEW, 1.0, 1),
            Scale::Usual => (&[0, 1, 10, 100, 1000], &FEW, 5.0, 1),
            Scale::Full => (&[0, 1, 10, 100, 1000], &POLICIES, 10.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![
                Axis::new("traffic", ["alone", "beside-pair"]),
                Axis::new("ports", ports),
                Axis::new("policy", policies),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        // Zero ports cost nothing; one port beside a pair makes no difference.
        match cell.get("traffic") {
            "alone" => cell.number("ports") > 0.0,
            _ => cell.number("ports") != 1.0,
        }
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        pair::OVERHEAD_S + cell.number("ports") / 300.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (policy, ports) = (run.cell.get("policy"), run.cell.number("ports") as usize);
        if run.cell.get("traffic") == "beside-pair" {
            let pair = Pair { idle: ports, ..Pair::new(policy, "") };
            return pair.run(run.stage, run.seconds);
        }
        let idle = IdleGuests::new(run.stage, ports)?;
        let options = pair::switch_options(run.stage, policy);
        let switch = Switch::start(run.stage, &options, &idle.ports)?;
        let _guests = idle.start(run.stage)?;
        switch.wait_up(ports)?;
        sleep(WARM_IDLE_S + ports as f64 / 1e3);
        let window = Window::open(&switch, &[])?;
        sleep(run.seconds);
        let count = window.close()?;
        switch.check()?;
        let mut figures = of_window(&count);
        figures.insert("switch_cpu", count.percent(count.switch_ns));
        figures.insert("memory", private_kib(switch.id()));
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
        parts.extend(kept_rate(results));
        let fixed = [("traffic", "alone")];
        let alone = Grid { results, fixed: &fixed, rows: "policy", columns: "ports" };
        for (title, measure) in [
            ("Idle ports alone: wake-ups of the worker in the window", "woken"),
            ("Idle ports alone: CPU of the worker, % of one CPU", "cpu"),
            ("Idle ports alone: CPU of the whole switch, % of one CPU", "switch_cpu"),
            ("Idle ports alone: private memory of the switch, KiB", "memory"),
        ] {
            parts.extend(alone.table(title, "Columns: connected ports.", measure));
        }
        let fixed = [("traffic", "beside-pair")];
        let beside = Grid { results, fixed: &fixed, rows: "policy", columns: "ports" };
        for (title, measure) in [
            ("Beside a busy pair: CPU time of the worker for each frame, ns", "frame_ns"),
            ("Beside a busy pair: latency, p99, us", "p99"),
            ("Beside a busy pair: time that the switch was runnable without a CPU, %", "waited"),
        ] {
            parts.extend(beside.table(title, "Columns: idle ports.", measure));
        }
        parts
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let quiet = |cell: &Cell| cell.get("traffic") == "alone";
        let ports = values(results, "ports").last().cloned().unwrap_or_default();
        let what = format!("up to {ports} idle ports");
        let all = [pair::nothing_wakes(results, &what, quiet), pair::accounted(results)];
        all.into_iter().flatten().collect()
    }
}

/// Returns the table of the rate that a pair keeps beside idle ports.
fn kept_rate(results: &Results) -> Option<Part> {
    let counts: Vec<&String> =
        values(results, "ports").iter().filter(|ports| *ports != "0" && *ports != "1").collect();
    let cell = |policy: &str, ports: &str| {
        let pairs = [("traffic", "beside-pair"), ("ports", ports), ("policy", policy)];
        Cell(pairs.map(|(axis, value)| (axis.to_string(), value.to_string())).into())
    };
    let mut rows = Vec::new();
    for policy in values(results, "policy") {
        let alone = cell(policy, "0");
        let Some(rate) = results.estimate(&alone, "delivered") else { continue };
        let mut row = vec![Value::Text(policy.clone()), Value::Spread(rate, 0)];
        row.extend(counts.iter().map(|ports| {
            let found = results.ratio(&cell(policy, ports), &alone, "delivered");
            Value::estimate(found, 3, "not measured")
        }));
        rows.push(row);
    }
    let columns = ["policy".into(), "frames/s alone".into()];
    let columns = columns.into_iter().chain(counts.iter().map(|n| format!("beside {n} ports")));
    let table = Table {
        title: "The tax of idle neighbours: what a busy pair keeps of its rate".into(),
        note:
            "Medians; ratios are of runs of one round. Where guests share CPUs, the rate depends \
               on them, too; CPU time per frame, below, depends on the worker only."
                .into(),
        columns: columns.collect(),
        rows,
        command: "pvswitch lab run idle --only traffic=beside-pair".into(),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

/// Returns the private memory of a process, in KiB; 0: unknown.
pub(super) fn private_kib(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let private = text.lines().filter(|line| line.starts_with("Private_"));
    let kib = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    kib.sum()
}
