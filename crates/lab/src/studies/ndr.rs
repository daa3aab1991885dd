//! `ndr`: the highest load without loss (NDR) and with at most 0.5 % (PDR), and latency below it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use api::Request;
use serde_json::Value as Json;

use self::search::{Limits, Outcome, Search, Step};
use super::grid::{has, ratio, shown};
use super::peers::ends::Sockets;
use super::peers::memory;
use super::soak::ledger::Ledger;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{Gen, NicOptions, Stage, cpu_ns, wait_for};
use crate::stats::paired::Estimate;
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod search;

/// The base: DPDK's forwarder without a look-up.
const BASE: &str = "testpmd";
const SWITCHES: [&str; 10] = [
    BASE,
    "ovs-dpdk",
    "vpp",
    "vpp-cross",
    "snabb",
    "grout",
    "grout-cross",
    "pvswitch",
    "pvswitch-spin",
    "pvswitch-cross",
];
/// Bytes with FCS, as in RFC 2544, and sizes of `gen`, which are without.
const SIZES: [(&str, &str); 3] = [("64", "60"), ("1518", "1514"), ("imix", "imix")];
/// Largest loss at PDR, as a part.
const PDR_LOSS: f64 = 0.005;
/// Distance of the two ends of a search.
const WIDTH: f64 = 0.01;
/// Length of short trials, as a part of the final ones.
const SHORT: f64 = 0.25;
/// Most trials of one search.
const TRIALS_MAX: u32 = 40;
/// Highest load, as a ratio to the highest rate forwarded.
const LOAD_MAX: f64 = 1.5;
/// Parts of the PDR, in %, at which latency is measured.
const LOADS: [u32; 3] = [10, 50, 90];
/// First address of the second guest; no address of the first one is among those from there on.
const PEER: &str = "02:01:00:09:00:00";
/// Longest time that frames are held after the last trial, in seconds, on a busy machine.
const HELD_MAX_S: f64 = 10.0;

/// Longest time of a trial beyond its length, in seconds, on a busy machine.
const TRIAL_MAX_S: f64 = 60.0;
/// Folder of the histograms, in that of the results.
const LATENCY: &str = "latency";
/// More flows than the 8192 that Open vSwitch's exact-match cache holds.
const FLOWS: &str = "10000";

const ABOUT: &str = "\
One thread is both guests (gen --mode trial): it offers frames at a rate, reads what arrives, and \
never sleeps; the switch has the other CPU. Sizes include FCS, as in RFC 2544; imix is 7 of 64, 4 \
of 594 and 1 of 1518 bytes. Addresses: each guest has so many, and the frames take them in turn, \
as they do with flows, which are UDP source ports. \
Ways 2: both guests send. Rates are of all frames, of both ways.\n\n\
A frame is lost if it was due in the window of a trial and did not arrive, up to 0.2 s without a \
frame after the window. A switch that drops frames and one that leaves them in the sender's ring \
are thereby judged alike: frames that the ring had no room for until the end of the window are \
lost. What the rings hold at the end is not: both kinds of switch have them, of 1024 frames.\n\n\
Max: the rate that arrives when as much is sent as the switch takes. NDR: the highest load of \
which nothing is lost, PDR: at most 0.5 %, as of RFC 8204. A search is that of MLRsearch in its \
idea: short trials narrow the range from max on, and final trials, of which two of three decide, \
confirm both of its ends, 1 % apart. Where more than two final trials contradict the result it is \
unstable, and there is no figure. Latency is measured at 10, 50 and 90 % of the PDR, from the time \
at which a frame was due, whether or not it could be sent then: a stall delays all frames that \
were due in it. Latency in the switch counts from the time at which a frame's descriptor was made \
available to the one at which its used element was seen by the guest, which polls: waiting for \
room in the ring is not in it, nor is a wake-up. Folder latency has an HdrHistogram log of \
each cell and part, in ns, with an interval for each run, which its tools merge. \
Guests idle: time in which the guests' CPU found nothing to send or to \
receive at 90 % of the PDR; where there is almost none, that CPU is the limit, not the switch.";

const MEASURES: [Measure; 30] = [
    Measure::new("ndr", "1/s", Better::More, "highest load without loss"),
    Measure::new("pdr", "1/s", Better::More, "highest load with at most 0.5 % loss"),
    Measure::new("max", "1/s", Better::More, "frames that arrive of an unlimited load"),
    Measure::new("p50_10", "us", Better::Less, "latency at 10 % of the PDR, half of all frames"),
    Measure::new("p99_10", "us", Better::Less, "the same, 99 % of all frames"),
    Measure::new("p999_10", "us", Better::Less, "the same, 99.9 % of all frames"),
    Measure::new("p50_50", "us", Better::Less, "latency at 50 % of the PDR, half of all frames"),
    Measure::new("p99_50", "us", Better::Less, "the same, 99 % of all frames"),
    Measure::new("p999_50", "us", Better::Less, "the same, 99.9 % of all frames"),
    Measure::new("p50_90", "us", Better::Less, "latency at 90 % of the PDR, half of all frames"),
    Measure::new("p99_90", "us", Better::Less, "the same, 99 % of all frames"),
    Measure::new("p999_90", "us", Better::Less, "the same, 99.9 % of all frames"),
    Measure::new(
        "added_p50_10",
        "us",
        Better::Less,
        "of that at 10 % of the PDR in the switch, half of the frames",
    ),
    Measure::new("added_p99_10", "us", Better::Less, "the same, 99 % of the frames"),
    Measure::new(
        "added_p50_50",
        "us",
        Better::Less,
        "of that at 50 % of the PDR in the switch, half of the frames",
    ),
    Measure::new("added_p99_50", "us", Better::Less, "the same, 99 % of the frames"),
    Measure::new(
        "added_p50_90",
        "us",
        Better::Less,
        "of that at 90 % of the PDR in the switch, half of the frames",
    ),
    Measure::new("added_p99_90", "us", Better::Less, "the same, 99 % of the frames"),
    Measure::new("guests_idle", "%", Better::Neither, "time of the guests' CPU without work"),
    Measure::new("backend_cpu", "%", Better::Less, "CPU of the switch at 50 % of the PDR"),
    Measure::new("unstable", "", Better::Less, "searches whose trials contradict each other"),
    Measure::new("nothing", "", Better::Less, "searches in which every load lost too much"),
    Measure::new("trials", "", Better::Neither, "trials of both searches"),
    Measure::new("pause", "us", Better::Neither, "longest time of the guests without a CPU"),
    Measure::new("sent", "", Better::Neither, "frames sent in all trials, warm-up included"),
    Measure::new("received", "", Better::Neither, "frames received in all trials"),
    Measure::new("drops", "", Better::Neither, "frames in the switch's drop counters"),
    Measure::new(
        "unaccounted",
        "",
        Better::Less,
        "frames that the switch took, neither delivered nor in a drop counter",
    ),
    Measure::new("miscounted", "", Better::Less, "trials whose counts contradict each other"),
    Measure::new("reordered", "", Better::Less, "frames after a later one of their flow"),
];

/// The study.
pub struct Ndr;

const FACTS: Facts = Facts {
    name: "ndr",
    about: "the highest load without loss, with 0.5 % of it, and latency below, beside other \
            switches",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &["dpdk-testpmd", "ovs-vsctl", "vpp", "snabb", "grout"],
    together: None,
    // A twentieth is the least that a promise against a peer depends on.
    margin: 1.05,
    control: &[("size", "64")],
};

impl Study for Ndr {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let sizes = SIZES.map(|(size, _)| size);
        let (sizes, addresses, ways, flows): (&[&str], &[u32], &[u32], &[&str]) = match scale {
            Scale::Smallest => (&["imix"], &[1000], &[2], &[FLOWS]),
            Scale::Quick => (&sizes[..1], &[1], &[1], &["1"]),
            Scale::Usual | Scale::Full => (&sizes, &[1, 1000, 100_000], &[1, 2], &["1", FLOWS]),
        };
        let switches: &[&str] = match scale {
            Scale::Smallest => &["pvswitch"],
            Scale::Quick => &[BASE, "pvswitch"],
            Scale::Usual | Scale::Full => &SWITCHES,
        };
        let seconds = match scale {
            Scale::Smallest | Scale::Quick => 0.1,
            Scale::Usual => 0.5,
            Scale::Full => 10.0,
        };
        let axes = vec![
            Axis::new("size", sizes),
            Axis::new("addresses", addresses),
            Axis::new("ways", ways),
            Axis::new("flows", flows),
            Axis::new("switch", switches),
        ];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    /// Each size, number of addresses, both ways, and many flows by itself, and all together for
    /// imix.
    fn has(&self, cell: &Cell) -> bool {
        matches!(
            (cell.get("size"), cell.get("addresses"), cell.get("ways"), cell.get("flows")),
            (_, "1", "1", "1")
                | ("64", "1", _, "1")
                | ("64", _, "1", "1")
                | ("64", "1", "1", _)
                | ("imix", "1000", "2", FLOWS)
        )
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        // Some 40 trials, with their windows, starts and rests.
        if cell.get("switch").starts_with("ovs") { 17.0 } else { 12.0 }
    }

    fn huge_mib(&self, plan: &Plan) -> u64 {
        memory::wanted_mib(plan)
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        Tester::start(run)?.figures(run)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        vec![
            text,
            Part::Table(rates(results)),
            Part::Table(latencies(results)),
            Part::Table(added(results)),
        ]
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let sum = |measure| results.values(|_| true, measure).iter().sum::<f64>();
        // Rivals are reported, not judged.
        let ours = |measure| results.values(is_ours, measure).iter().sum::<f64>();
        let theirs = |measure| sum(measure) - ours(measure);
        if results.runs.is_empty() {
            return Vec::new();
        }
        let accounted = results.values(|_| true, "unaccounted");
        let wrong = accounted.iter().filter(|frames| **frames > 0.0).count();
        let most = results.values(|_| true, "trials").into_iter().fold(0.0, f64::max);
        let limit = f64::from(2 * TRIALS_MAX);
        let all = [
            (
                format!(
                    "every frame that pvswitch took is delivered, or in a drop counter: {} frames \
                     sent in {} runs, {wrong} runs in which that is not so",
                    sum("sent"),
                    accounted.len()
                ),
                (!accounted.is_empty()).then_some(wrong == 0),
            ),
            (
                format!(
                    "offered frames are those received and lost, and histograms have all received \
                     ones: {} trials that differ, and {} of rivals, which may repeat frames",
                    ours("miscounted"),
                    theirs("miscounted")
                ),
                Some(ours("miscounted") == 0.0),
            ),
            (
                format!(
                    "pvswitch does not reorder flows: {} frames are late, and {} of rivals",
                    ours("reordered"),
                    theirs("reordered")
                ),
                Some(ours("reordered") == 0.0),
            ),
            (
                format!(
                    "both searches end within {limit} trials: at most {most}; unstable {}, \
                     without any good load {}",
                    sum("unstable"),
                    sum("nothing")
                ),
                Some(most > 0.0 && most <= limit),
            ),
        ];
        all.into_iter().map(|(what, holds)| Verdict { what, holds }).collect()
    }
}

fn is_ours(cell: &Cell) -> bool {
    cell.get("switch").starts_with("pvswitch")
}

/// A switch, and the trials made with it.
struct Tester<'a> {
    stage: &'a Stage,
    ends: Sockets,
    /// Arguments of `gen` that say what is sent.
    traffic: String,
    /// CPU of both guests.
    cpu: usize,
    ways: f64,
    figures: Figures,
}

impl<'a> Tester<'a> {
    fn start(run: &Run<'a>) -> Result<Self, Fail> {
        let (cell, stage) = (run.cell, run.stage);
        let cpus = stage.switch_cpus.first().zip(stage.guest_cpus.last());
        let Some((_, cpu)) = cpus.filter(|(switch, guests)| switch != guests) else {
            let what = "two CPUs are needed, one for the guests and one for the switch";
            return Err(Fail::Missing(what.into()));
        };
        let size = SIZES.iter().find(|(name, _)| *name == cell.get("size"));
        let Some((_, size)) = size else {
            return Err(Fail::Cell(format!("size {}: use 64, 1518 or imix", cell.get("size"))));
        };
        let both = if cell.get("ways") == "2" { "--both-ways" } else { "" };
        let (addresses, flows) = (cell.get("addresses"), cell.get("flows"));
        let traffic = format!(
            "trial --size {size} --addresses {addresses} --flows {flows} --peer {PEER} \
             --warm-up 0.05 {both}"
        );
        let ends = Sockets::build(stage, cell.get("switch"))?;
        let ways = cell.number("ways").max(1.0);
        Ok(Self { stage, ends, traffic, cpu: *cpu, ways, figures: Figures::new() })
    }

    /// Makes one trial with `load` frames per second in all; `None`: as many as possible.
    fn make(&mut self, load: Option<f64>, seconds: f64, more: &str) -> Result<Json, Fail> {
        let rate = load.map_or(String::new(), |load| format!(" --rate {:.3}", load / self.ways));
        let mode = format!("{} --duration {seconds}{rate}{more}", self.traffic);
        let size = ["--queue-size", "1024"].map(String::from);
        let options = NicOptions { more: size.into(), ..NicOptions::new("") };
        let guests = Gen::start_on(self.stage, &[self.cpu], 0, &self.ends.both, &options, &mode)?;
        let report = guests.report(seconds + TRIAL_MAX_S)?;
        let n = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
        let whole = n("received_frames") + n("lost_frames") == n("offered_frames")
            && n("latency_samples") == n("received_frames");
        for (name, more) in [
            ("sent", n("all_sent_frames")),
            ("received", n("all_received_frames")),
            ("reordered", n("late_frames")),
            ("miscounted", f64::from(u8::from(!whole))),
        ] {
            *self.figures.entry(name).or_default() += more;
        }
        let pause = self.figures.entry("pause").or_default();
        *pause = pause.max(n("pause_ns_max") / 1e3);
        Ok(report)
    }

    /// Searches the highest load with at most this loss; `name` is the figure.
    fn search(
        &mut self,
        name: &'static str,
        loss: f64,
        seconds: f64,
        guess: f64,
    ) -> Result<Option<f64>, Fail> {
        let limits = Limits {
            load_max: guess * LOAD_MAX,
            width: WIDTH,
            seconds: [seconds * SHORT, seconds],
            trials_max: TRIALS_MAX,
        };
        let mut search = Search::new(limits, loss, guess);
        let outcome = loop {
            match search.next() {
                Step::End(outcome) => break outcome,
                Step::Try { load, seconds } => {
                    let report = self.make(Some(load), seconds, "")?;
                    let n = |name: &str| report[name].as_u64().unwrap_or(0);
                    search.record(n("offered_frames"), n("lost_frames"));
                }
            }
        };
        *self.figures.entry("trials").or_default() += f64::from(search.trials());
        let of = |wanted| f64::from(u8::from(outcome == wanted));
        *self.figures.entry("unstable").or_default() += of(Outcome::Unstable);
        *self.figures.entry("nothing").or_default() += of(Outcome::Nothing);
        let Outcome::Found(load) = outcome else { return Ok(None) };
        self.figures.insert(name, load);
        Ok(Some(load))
    }

    fn figures(mut self, run: &Run) -> Result<Figures, Fail> {
        let max = self.make(None, run.seconds, "")?["received_pps"].as_f64().unwrap_or(0.0);
        if max <= 0.0 {
            return Err(Fail::Cell("no frame was received".into()));
        }
        self.ends.check_huge_pages(self.stage, run.cell.get("switch"))?;
        self.figures.insert("max", max);
        self.search("ndr", 0.0, run.seconds, max)?;
        let pdr = self.search("pdr", PDR_LOSS, run.seconds, max)?;
        // Without a PDR there is no load to take parts of.
        if let Some(pdr) = pdr {
            for percent in LOADS {
                self.latency(run, pdr, percent)?;
            }
        }
        if let Some(switch) = self.ends.ours() {
            // Of the switch's counters alone: what a guest sent or was sent as its trial ended, it
            // leaves in its rings. Counters of a port continue across its guests.
            let ledger = || Ok(Ledger::default().with(&switch.ask(&Request::Stats)?));
            let _ = wait_for("held frames", HELD_MAX_S, || Ok(ledger()?.unaccounted() == 0));
            let ledger: Ledger = ledger()?;
            let drops: u64 = ledger.drops().values().sum();
            self.figures.insert("drops", drops as f64);
            self.figures.insert("unaccounted", ledger.unaccounted().unsigned_abs() as f64);
            switch.check()?;
        }
        // Last: a run without a result leaves no histogram.
        if pdr.is_some() {
            for percent in LOADS {
                keep(self.stage, run.cell, percent, &self.histogram(percent))?;
            }
        }
        Ok(self.figures)
    }

    /// File of this run's latencies at so many per cent of the PDR.
    fn histogram(&self, percent: u32) -> PathBuf {
        self.stage.folder().join(format!("{percent}.hlog"))
    }

    /// Measures latency at so many per cent of a load.
    fn latency(&mut self, run: &Run, load: f64, percent: u32) -> Result<(), Fail> {
        let file = self.histogram(percent);
        let before = cpu_ns(self.ends.backend);
        let begun = std::time::Instant::now();
        let load = load * f64::from(percent) / 100.0;
        let report = self.make(Some(load), run.seconds, &format!(" --hdr {}", file.display()))?;
        let spent = cpu_ns(self.ends.backend).saturating_sub(before) as f64;
        let n = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
        let names = MEASURES.iter().map(|measure| measure.name);
        for name in names.filter(|name| name.ends_with(&format!("_{percent}"))) {
            let (what, rest) =
                name.strip_prefix("added_").map_or(("latency", name), |rest| ("added", rest));
            let quantile = rest.split('_').next().unwrap_or_default();
            self.figures.insert(name, n(&format!("{what}_ns_{quantile}")) / 1e3);
        }
        match percent {
            50 => {
                // Of a whole trial, its warm-up and rest included.
                let percent = spent / begun.elapsed().as_nanos() as f64 * 100.0;
                self.figures.insert("backend_cpu", percent);
            }
            90 => {
                let idle = 100.0 * n("idle_s") / n("window_s");
                self.figures.insert("guests_idle", idle);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Adds the interval of a log to that of its cell, in the folder of the results.
fn keep(stage: &Stage, cell: &Cell, percent: u32, log: &Path) -> Result<(), Fail> {
    let values: Vec<&str> = cell.0.iter().map(|(_, value)| value.as_str()).collect();
    let folder = stage.results.join(LATENCY);
    let path = folder.join(format!("{}-{percent}.hlog", values.join("-")));
    let added = std::fs::create_dir_all(&folder).and_then(|()| {
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        let is_new = file.metadata()?.len() == 0;
        // Comments and the names of the columns are at the start.
        let is_head = |line: &str| line.starts_with(['#', '"']);
        let text = std::fs::read_to_string(log)?;
        let lines = text.split_inclusive('\n').filter(|line| is_new || !is_head(line));
        file.write_all(lines.collect::<String>().as_bytes())
    });
    added.map_err(|error| Fail::Over(format!("{}: {error}", path.display())))
}

/// The traffic of a cell, in words.
fn traffic(cell: &Cell) -> String {
    let ways = if cell.get("ways") == "2" { "both ways" } else { "one way" };
    let addresses = match cell.get("addresses") {
        "1" => "one address".to_string(),
        many => format!("{many} addresses"),
    };
    let flows = match cell.get("flows") {
        "1" => String::new(),
        many => format!("{many} flows, "),
    };
    format!("{}, {addresses}, {flows}{ways}", cell.get("size"))
}

fn estimate(results: &Results, cell: &Cell, measure: &str) -> Option<Estimate> {
    let pairs = pairs(cell);
    Estimate::of(&results.values(|other| has(other, &pairs), measure))
}

fn pairs(cell: &Cell) -> Vec<(&str, &str)> {
    cell.0.iter().map(|(axis, value)| (axis.as_str(), value.as_str())).collect()
}

fn rates(results: &Results) -> Table {
    let mut rows = Vec::new();
    for cell in results.cells() {
        let of = |measure| shown(estimate(results, cell, measure));
        let over = |measure, base: &str| {
            let found = ratio(results, &pairs(cell), measure, "switch", base);
            let missing = format!("no run of {base} with a result");
            Value::estimate(found.filter(|_| cell.get("switch") != base), 2, &missing)
        };
        let total = |measure| results.values(|other| other == cell, measure).iter().sum::<f64>();
        rows.push(vec![
            Value::Text(traffic(cell)),
            Value::Text(cell.get("switch").into()),
            of("ndr"),
            over("ndr", BASE),
            over("ndr", "ovs-dpdk"),
            of("pdr"),
            over("pdr", BASE),
            over("pdr", "ovs-dpdk"),
            of("max"),
            Value::Number(total("unstable") + total("nothing"), 0),
            of("guests_idle"),
        ]);
    }
    let columns = [
        "traffic",
        "switch",
        "NDR, frames/s",
        "over testpmd",
        "over ovs-dpdk",
        "PDR, frames/s",
        "over testpmd",
        "over ovs-dpdk",
        "max, frames/s",
        "no result",
        "guests idle, %",
    ];
    Table {
        title: "Throughput".into(),
        note: "No result: searches of either that are unstable, or in which every load lost too \
               much; they are in no median."
            .into(),
        columns: columns.map(String::from).into(),
        rows,
        command: "pvswitch lab run ndr".into(),
    }
}

fn latencies(results: &Results) -> Table {
    let mut rows = Vec::new();
    for cell in results.cells() {
        let mut row = vec![Value::Text(traffic(cell)), Value::Text(cell.get("switch").into())];
        let quantiles = LOADS.map(|load| ["p50", "p99", "p999"].map(|p| format!("{p}_{load}")));
        row.extend(quantiles.as_flattened().iter().map(|m| shown(estimate(results, cell, m))));
        row.push(shown(estimate(results, cell, "backend_cpu")));
        rows.push(row);
    }
    let head = ["traffic", "switch"].map(String::from).into_iter();
    let names = LOADS
        .map(|load| ["p50", "p99", "p99.9"].map(|quantile| format!("{quantile} at {load} %, us")));
    let names: Vec<String> = names.as_flattened().to_vec();
    Table {
        title: "Latency at parts of the PDR".into(),
        note: "From the time at which a frame was due.".into(),
        columns: head.chain(names).chain(["switch's CPU at 50 %".to_string()]).collect(),
        rows,
        command: "pvswitch lab run ndr".into(),
    }
}

/// What the switch added to latency.
fn added(results: &Results) -> Table {
    let names = LOADS.map(|load| ["p50", "p99"].map(|quantile| (quantile, load)));
    let names = names.as_flattened();
    let rows = results.cells().into_iter().map(|cell| {
        let mut row = vec![Value::Text(traffic(cell)), Value::Text(cell.get("switch").into())];
        let of = |(quantile, load): &(&str, u32)| {
            shown(estimate(results, cell, &format!("added_{quantile}_{load}")))
        };
        row.extend(names.iter().map(of));
        row
    });
    let rows = rows.collect();
    let columns = names.iter().map(|(quantile, load)| format!("{quantile} at {load} %, us"));
    Table {
        title: "Latency in the switch at parts of the PDR".into(),
        note: "From available to used, as guests that poll see it.".into(),
        columns: ["traffic", "switch"].map(String::from).into_iter().chain(columns).collect(),
        rows,
        command: "pvswitch lab run ndr".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_traffic_is_measured_by_itself() {
        let cells = Ndr.plan(Scale::Usual).cells(&Ndr);
        let count = |pairs: &[(&str, &str)]| cells.iter().filter(|cell| has(cell, pairs)).count();
        assert_eq!(cells.len(), 8 * SWITCHES.len());
        for size in SIZES {
            assert!(count(&[("size", size.0), ("switch", "pvswitch")]) > 0, "{size:?}");
        }
        let alone =
            [("addresses", "1000"), ("addresses", "100000"), ("ways", "2"), ("flows", FLOWS)];
        for (axis, value) in alone {
            assert!(
                count(&[("size", "64"), (axis, value), ("switch", BASE)]) == 1,
                "{axis} {value}"
            );
        }
    }

    #[test]
    fn histograms_of_a_cell_are_intervals_of_one_log() {
        let program = Path::new("/bin/true");
        let stage = Stage::new(program, &[0], &[1], crate::stage::Proto::Virtio).unwrap();
        let cell = Cell(vec![("size".into(), "64".into()), ("switch".into(), "pvswitch".into())]);
        let log = stage.folder().join("log");
        for run in 1..=2 {
            std::fs::write(&log, format!("#[a]\n\"Start\"\n{run},2,3,HISTF\n")).unwrap();
            keep(&stage, &cell, 10, &log).unwrap();
        }
        let kept = stage.results.join("latency/64-pvswitch-10.hlog");
        let kept = std::fs::read_to_string(kept).unwrap();
        assert_eq!(kept, "#[a]\n\"Start\"\n1,2,3,HISTF\n2,2,3,HISTF\n");
    }
}
