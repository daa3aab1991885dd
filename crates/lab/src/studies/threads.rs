//! `threads`: one worker compared with several, by placement, from ten clients to ten guests.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::claims::Claim;
use crate::error::Fail;
use crate::machine::allowed_cpus;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::Part;
use crate::report::{Original, Verdict};
use crate::stage::{
    Count, Gen, NicOptions, Port, REPLAY_RING, START_MAX_S, Snapshot, Stage, Switch, SwitchOptions,
    Window, cpu_ns, sleep, wait_for,
};
use crate::stats::{Summary, jain};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod balanced;
mod locks;
mod original;
mod tables;

/// Rate of low-rate clients of a skewed load, in frames per second.
const QUIET_RATE: u32 = 10_000;
/// In a skewed load, one of this number of clients floods: with 2, 4 or 8 workers, placement by
/// number puts all floods on one worker.
const FLOODS_EACH: usize = 8;
/// `gen`'s mode for a guest.
const SINK: &str = "sink";
/// Traffic before the window.
const WARM_S: f64 = 0.3;

/// Loads: all clients flood; few clients flood; all flood one guest; all replay frames that guests
/// do not read; the same of clients outside, all behind one port with a queue for each.
const LOADS: [&str; 5] = ["even", "skewed", "converging", "replay", "trunk"];

/// The study.
pub struct Threads;

const OWN: [Measure; 14] = [
    Measure::new("frames", "1/s", Better::More, "frames that guests got, all together"),
    Measure::new("throughput", "Gbit/s", Better::More, "the same in bits, headers included"),
    Measure::new("switch_cpu", "%", Better::Less, "CPU time of the switch, of one CPU"),
    Measure::new("guests_cpu", "%", Better::Less, "CPU time of clients and guests, of one CPU"),
    Measure::new(
        "frames_per_cpu_s",
        "1/s",
        Better::More,
        "frames for each second of CPU time of the switch",
    ),
    Measure::new(
        "capacity",
        "1/s",
        Better::More,
        "frames per second of CPU time of the busiest worker: the rate if it had its own CPU and \
         were the only limit",
    ),
    Measure::new("waited", "%", Better::Less, "time that the switch's threads waited for a CPU"),
    Measure::new(
        "contended",
        "1/million",
        Better::Less,
        "contended locks of egress queues, per million taken",
    ),
    Measure::new(
        "contended_others",
        "1/million",
        Better::Less,
        "contended locks of all others, per million frames",
    ),
    Measure::new(
        "jain",
        "",
        Better::More,
        "Jain's index over frames of clients with equal demand: all; skewed: the low-rate ones",
    ),
    Measure::new("used", "", Better::Neither, "workers that forwarded frames"),
    Measure::new("moves", "1/s", Better::Neither, "queues that a worker gave to another"),
    Measure::new("drops", "", Better::Less, "frames lost and counted, of the whole run"),
    Measure::new("uncounted", "", Better::Less, "frames lost without a counter, of the whole run"),
];

/// Numbers of workers to measure on this number of CPUs.
fn worker_counts(scale: Scale, cpus: usize) -> Vec<usize> {
    let counts = match scale {
        Scale::Smallest => vec![1, 2],
        Scale::Quick | Scale::Usual => vec![1, 2, 4, 8, 16, cpus],
        // The workers that a switch may have.
        Scale::Full => (1..=cpus.min(63)).collect(),
    };
    let counts: BTreeSet<usize> = counts.into_iter().filter(|count| *count <= cpus).collect();
    counts.into_iter().collect()
}

const FACTS: Facts = Facts {
    name: "threads",
    about: "speed-up of several workers over one, by placement, and its limits",
    original: Some(Original {
        source: "Dongxiao Xu, xen-devel, 5 May 2010: Netback multiple threads support (v4); 10 \
                 clients of 1 Gbit/s each, netperf, through one 10 Gbit/s card to 10 guests",
        claim: "With a thread for each CPU of dom0, each serving a group of guests, throughput \
                is 3.7 times that of one tasklet with 4 vcpus, and 2 times with more than 10.",
    }),
    measures: &locks::ALL,
    takes_proto: true,
    tools: &[],
    together: Some(tables::together),
    // What four threads lack to four times one, 3.7.
    margin: 1.08,
    control: &[("load", "even"), ("size", "60"), ("placement", "group")],
};

impl Study for Threads {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (pairs, sizes, loads, seconds, repeats): (u32, &[u32], &[&str], f64, u32) = match scale
        {
            Scale::Smallest => (4, &[60], &["even", "converging"], 0.5, 1),
            Scale::Quick => (10, &[60], &["even", "replay"], 0.5, 1),
            Scale::Usual => (10, &[60, 1500], &LOADS, 2.0, 1),
            Scale::Full => (10, &[60, 1500], &LOADS, 10.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![
                Axis::new("pairs", [pairs]),
                Axis::new("size", sizes),
                Axis::new("load", loads),
                Axis::new("placement", ["single", "group", "per-port", "balanced"]),
                Axis::new("workers", worker_counts(scale, allowed_cpus().len())),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        // One size suffices: lock contention does not depend on it.
        match cell.get("load") {
            "converging" => cell.get("size") == "60",
            // Shows the gain of more workers; group and per-port place ports alike.
            "replay" => ["group", "balanced"].contains(&cell.get("placement")),
            // All queues of a port are one worker's with the others.
            "trunk" => ["per-port", "balanced"].contains(&cell.get("placement")),
            _ => true,
        }
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        0.8 + 0.05 * cell.number("pairs")
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let case = Case::of(run.cell, run.stage)?;
        case.measure(run.stage, run.seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        tables::parts(results)
    }

    fn claims(&self, plan: &Plan) -> Vec<Claim> {
        let cells = plan.cells(self);
        let claim = |cell: &Cell| {
            let workers = cell.number("workers") as u32;
            // Guests of the original had CPUs of their own. Beside two workers on two CPUs only
            // those that replay have as good as that.
            let judged = match cell.get("load") {
                "even" => workers > 2 && cell.get("placement") == "group",
                "replay" => workers == 2 && cell.get("placement") == "group",
                "trunk" => workers == 2 && cell.get("placement") == "per-port",
                _ => false,
            };
            let claim = original::judged(workers).filter(|_| judged)?;
            let what = format!("{}: {} times the throughput", claim.case, claim.speed_up);
            let pair = [cell.clone(), cell.with("workers", "1")];
            Some(Claim::of_ratio(what, pair, "frames", claim.speed_up, FACTS.margin))
        };
        cells.iter().filter_map(claim).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        judge(results)
    }

    fn is_speed_up(&self, cell: &Cell, base: &Cell, measure: &str) -> bool {
        let rates = ["frames", "throughput", "frames_per_cpu_s", "capacity"];
        cell.get("workers") != base.get("workers") && rates.contains(&measure)
    }
}

/// CPUs of this number of workers: first those of the switch, then those of guests.
pub(super) fn worker_cpus(workers: usize, switch: &[usize], guests: &[usize]) -> Vec<usize> {
    let more = guests.iter().filter(|cpu| !switch.contains(cpu));
    switch.iter().chain(more).copied().take(workers).collect()
}

/// Whether guests are on all CPUs, including workers'. If the switch has one CPU, guests are on all
/// even with one worker: otherwise a second worker would also add a second CPU for guests.
pub(super) fn shares_cpus(workers: usize, own: usize) -> bool {
    own < 2 || workers > own
}

/// Name of a client's port. No name is a prefix of another.
pub(super) fn client_name(i: usize) -> String {
    format!("c{i:02}")
}

pub(super) fn guest_name(i: usize) -> String {
    format!("g{i:02}")
}

/// The parameters of a cell.
struct Case<'a> {
    pairs: usize,
    size: u32,
    load: &'a str,
    placement: &'a str,
    workers: usize,
    worker_cpus: Vec<usize>,
    guest_cpus: Vec<usize>,
}

impl<'a> Case<'a> {
    fn of(cell: &'a Cell, stage: &Stage) -> Result<Self, Fail> {
        let number = |axis: &str, least: f64, most: f64| {
            let n = cell.number(axis);
            if (least..=most).contains(&n) && n.fract() == 0.0 {
                return Ok(n as usize);
            }
            let given = cell.get(axis);
            Err(Fail::Cell(format!("{axis}={given}: use a whole number, {least} to {most}")))
        };
        let workers = number("workers", 1.0, 63.0)?;
        let all = stage.all_cpus();
        if workers > all.len() {
            return Err(Fail::Missing(format!(
                "{workers} workers need as many CPUs, but there are {} here: measure on a larger \
                 machine, then join both folders with 'pvswitch lab report'",
                all.len()
            )));
        }
        let shared = shares_cpus(workers, stage.switch_cpus.len());
        Ok(Self {
            pairs: number("pairs", 1.0, 100.0)?,
            size: number("size", 60.0, 9000.0)? as u32,
            load: cell.get("load"),
            placement: cell.get("placement"),
            workers,
            worker_cpus: worker_cpus(workers, &stage.switch_cpus, &stage.guest_cpus),
            guest_cpus: if shared { all } else { stage.guest_cpus.clone() },
        })
    }

    /// `gen`'s mode for a client.
    fn client(&self, i: usize) -> String {
        let to = if self.load == "converging" { 0 } else { i };
        let mut mode = format!("send --size {} --peer {}", self.size, Gen::mac(to));
        if self.load == "trunk" {
            mode += &format!(" --addresses {}", self.pairs);
        }
        if self.is_quiet(i) {
            mode += &format!(" --rate {QUIET_RATE}");
        }
        mode
    }

    fn is_quiet(&self, i: usize) -> bool {
        self.load == "skewed" && !i.is_multiple_of(FLOODS_EACH)
    }

    /// The clients' ports: one for each, or one with a queue for each.
    fn client_ports(&self, stage: &Stage) -> Vec<Port> {
        let port =
            |i: usize, options: &str| Port::guest(stage, &client_name(i), stage.proto, options);
        match self.load {
            "trunk" => vec![port(0, &format!(",queues={}", self.pairs))],
            _ => (0..self.pairs).map(|i| port(i, "")).collect(),
        }
    }

    fn start(&self, stage: &Stage, i: usize, port: &Port, mode: &str) -> Result<Gen, Fail> {
        let mut options = match self.load {
            "replay" | "trunk" => NicOptions::replay(stage, REPLAY_RING)?,
            _ => NicOptions::new("event"),
        };
        if self.load == "trunk" && mode != SINK {
            options.more.extend(["--queues".to_string(), self.pairs.to_string()]);
        }
        Gen::start_on(stage, &self.guest_cpus, i, port, &options, mode)
    }

    fn measure(&self, stage: &Stage, seconds: f64) -> Result<Figures, Fail> {
        let port = |name: String| Port::guest(stage, &name, stage.proto, "");
        let to_clients = self.client_ports(stage);
        let to_guests: Vec<Port> = (0..self.pairs).map(guest_name).map(port).collect();
        let mut options = SwitchOptions::new(stage, "event");
        options.workers = self.workers;
        options.placement = self.placement.into();
        options.cpus.clone_from(&self.worker_cpus);
        let switch = Switch::start(stage, &options, &[&to_clients[..], &to_guests].concat())?;
        let guests = to_guests.iter().enumerate();
        let guests = guests.map(|(i, port)| self.start(stage, i, port, SINK));
        let mut guests: Vec<Gen> = guests.collect::<Result<_, _>>()?;
        switch.wait_up_while(self.pairs, || guests.iter_mut().try_for_each(Gen::check))?;
        // Guests announce their addresses: frames for an unknown address are flooded.
        wait_for("the guests' addresses", START_MAX_S, || Ok(addresses(&switch)? >= self.pairs))?;
        let quiet = switch.ask(&api::Request::Stats)?;
        let clients = to_clients.iter().enumerate();
        let clients =
            clients.map(|(i, port)| self.start(stage, self.pairs + i, port, &self.client(i)));
        let mut clients: Vec<Gen> = clients.collect::<Result<_, _>>()?;
        let ports = to_clients.len() + self.pairs;
        switch.wait_up_while(ports, || clients.iter_mut().try_for_each(Gen::check))?;
        sleep(WARM_S);
        let guests_ns = || clients.iter().chain(&guests).map(|one| cpu_ns(one.id())).sum::<u64>();
        let (before, ns_before) = (switch.snapshot(&[])?, guests_ns());
        let window = Window::open(&switch, &[])?;
        sleep(seconds);
        let count = window.close()?;
        let (after, ns_after) = (switch.snapshot(&[])?, guests_ns());
        switch.check()?;
        let mut figures = self.figures(&count, ns_after.saturating_sub(ns_before));
        figures.extend(locks::figures(&count));
        figures.extend(of_workers(&count, &before, &after));
        figures.extend(losses(&switch, clients, guests, &quiet)?);
        Ok(figures)
    }

    fn figures(&self, count: &Count, guests_ns: u64) -> Figures {
        let (frames, groups) = (count.egress("g", "frames"), count.egress("g", "groups"));
        let each = (0..self.pairs).filter(|i| self.load != "skewed" || self.is_quiet(*i));
        let shares: Vec<f64> = each
            .map(|i| match self.load {
                "converging" => count.ingress(&client_name(i), "frames"),
                _ => count.egress(&guest_name(i), "frames"),
            })
            .collect();
        let mut figures = BTreeMap::from([
            ("frames", count.per_second(frames)),
            ("throughput", count.per_second(8.0 * count.egress("g", "bytes")) / 1e9),
            ("switch_cpu", count.percent(count.switch_ns)),
            ("guests_cpu", count.percent(guests_ns)),
            ("frames_per_cpu_s", frames / (count.switch_ns.max(1) as f64 / 1e9)),
            ("waited", count.percent(count.waited_ns)),
            ("contended", 1e6 * count.egress("g", "contended") / groups.max(1.0)),
            ("moves", count.per_second(count.workers["moves"] as f64)),
        ]);
        figures.extend(jain(&shares).map(|jain| ("jain", jain)));
        figures
    }
}

/// Number of learned addresses of guests.
pub(super) fn addresses(switch: &Switch) -> Result<usize, Fail> {
    let fdb = switch.ask(&api::Request::Fdb)?;
    Ok(fdb["entries"].as_array().map_or(0, Vec::len))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Figures of workers: how many forwarded frames, and the capacity of the busiest.
fn of_workers(count: &Count, before: &Snapshot, after: &Snapshot) -> Figures {
    let (before, after) = (&before.stats, &after.stats);
    let mut used = BTreeSet::new();
    for (i, port) in list(&after["ports"]).enumerate() {
        for (j, queue) in list(&port["ingress"]).enumerate() {
            let old = &before["ports"][i]["ingress"][j];
            if queue["frames"].as_u64() > old["frames"].as_u64() {
                // Workers that had the queue only in between are missed.
                used.extend([queue["worker"].as_u64(), old["worker"].as_u64()]);
            }
        }
    }
    let workers = list(&after["workers"]).zip(list(&before["workers"]));
    let ns = workers.map(|(after, before)| {
        let ns = |worker: &Value| worker["cpu_ns"].as_u64().unwrap_or(0);
        ns(after).saturating_sub(ns(before))
    });
    let busiest_s = ns.max().unwrap_or(0).max(1) as f64 / 1e9;
    let frames = count.egress("g", "frames");
    BTreeMap::from([
        ("used", used.iter().flatten().count() as f64),
        ("capacity", frames / busiest_s),
    ])
}

/// Ends clients, then guests; compares sent with received frames over the whole run.
///
/// `quiet` holds the statistics before the first frame: when a guest announced its address, others
/// may not have been connected yet.
fn losses(
    switch: &Switch,
    clients: Vec<Gen>,
    guests: Vec<Gen>,
    quiet: &Value,
) -> Result<Figures, Fail> {
    let mut sent = 0;
    for client in clients {
        sent += client.end()?["sent_frames"].as_u64().unwrap_or(0);
    }
    // Held frames are delivered, or dropped and counted, within 200 ms.
    let mut seen = None;
    let mut stats = Value::Null;
    wait_for("the switch to be empty", START_MAX_S, || {
        sleep(0.06);
        stats = switch.ask(&api::Request::Stats)?;
        let held = list(&stats["ports"]).flat_map(|port| list(&port["egress"]));
        let held: u64 = held.filter_map(|queue| queue["held"].as_u64()).sum();
        let now = total(&stats, &|name| name == "frames");
        Ok(held == 0 && seen.replace(now) == Some(now))
    })?;
    let mut came = 0;
    for guest in guests {
        let report = guest.end()?;
        let n = |name: &str| report[name].as_u64().unwrap_or(0);
        // Frames without our mark are announcements of addresses.
        came += n("received_frames").saturating_sub(n("foreign_frames"));
    }
    let drops = |stats: &Value| total(stats, &|name| name.starts_with("drops_"));
    let drops = drops(&stats).saturating_sub(drops(quiet));
    let uncounted = sent.saturating_sub(came).saturating_sub(drops);
    Ok(BTreeMap::from([("drops", drops as f64), ("uncounted", uncounted as f64)]))
}

/// All counters of these names, of all queues.
fn total(stats: &Value, wanted: &dyn Fn(&str) -> bool) -> u64 {
    let queues = list(&stats["ports"])
        .flat_map(|port| list(&port["ingress"]).chain(list(&port["egress"])))
        .filter_map(Value::as_object);
    let counters = queues.flatten().filter(|(name, _)| wanted(name));
    counters.filter_map(|(_, value)| value.as_u64()).sum()
}

fn judge(results: &Results) -> Vec<Verdict> {
    let of = |wanted: &dyn Fn(&Cell) -> bool, measure: &str| {
        Summary::of(&results.values(wanted, measure))
    };
    let several = |cell: &Cell| cell.number("workers") > 1.0;
    let mut verdicts = Vec::new();
    if let Some(lost) = of(&|_| true, "uncounted") {
        let what = format!(
            "no frame is lost without a counter: at most {:.0} in each of {} runs",
            lost.high, lost.count
        );
        verdicts.push(Verdict { what, holds: Some(lost.high == 0.0) });
    }
    if let Some(waits) = of(&|cell| !several(cell), "contended") {
        let what = format!(
            "one worker never waits for a lock of an egress queue: at most {:.0} of a million, {} \
             runs",
            waits.high, waits.count
        );
        verdicts.push(Verdict { what, holds: Some(waits.high == 0.0) });
    }
    if let Some(used) = of(&|cell| several(cell) && cell.get("placement") == "single", "used") {
        let what = format!(
            "placement single: one of several workers forwards: {:.0} to {:.0} in {} runs",
            used.low, used.high, used.count
        );
        verdicts.push(Verdict { what, holds: Some(used.low == 1.0 && used.high == 1.0) });
    }
    for placement in ["group", "per-port"] {
        let runs: Vec<(f64, f64)> = results
            .runs
            .iter()
            .filter(|run| several(&run.cell) && run.cell.get("placement") == placement)
            .filter_map(|run| {
                let asked = run.cell.number("workers").min(run.cell.number("pairs"));
                Some((*run.figures.get("used")?, asked))
            })
            .collect();
        if runs.is_empty() {
            continue;
        }
        let all = runs.iter().filter(|(used, asked)| used == asked).count();
        let what = format!(
            "placement {placement}: each worker forwards frames in {all} of {} runs with \
             several workers",
            runs.len()
        );
        verdicts.push(Verdict { what, holds: Some(all == runs.len()) });
    }
    verdicts.extend(balanced::judge(results));
    verdicts
}

#[cfg(test)]
mod tests;
