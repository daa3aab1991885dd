//! `peers`: other switches under the same load, if they are installed.

use std::collections::BTreeMap;

use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::Verdict;
use crate::report::{Part, Table, Value};
use crate::stage::{
    Gen, Iperf, NicOptions, Ping, PingPlan, START_MAX_S, Stage, busy_ns, sleep, wait_for,
};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod built;
pub mod ends;
pub mod memory;

use self::ends::{Nets, Sockets, spent};

/// Length of the load before a window, in seconds.
const WARM_S: f64 = 0.5;
/// Length of the load after it, for the last reading of counters, in seconds.
const TAIL_S: f64 = 1.0;
/// Port of iperf3.
const PORT: u16 = 5201;
/// Interval of pings, in ms: `ping` sleeps in between, except for the last 10 ms.
const PING_MS: f64 = 20.0;
/// Peers that connect namespaces.
const NETS: [&str; 4] = ["pvswitch", "bridge", "vde", "rust-vmm"];
/// Peers that connect rings in shared memory.
const RINGS: [&str; 12] = [
    "pvswitch",
    "pvswitch-spin",
    "pvswitch-cross",
    "testpmd",
    "ovs-dpdk",
    "ovs-dpdk-sleep",
    "vpp",
    "vpp-cross",
    "snabb",
    "grout",
    "grout-cross",
    "rust-vmm",
];
/// Loads between namespaces.
const NET_LOADS: [&str; 3] = ["tcp", "ping", "idle-net"];
/// Loads between rings.
const RING_LOADS: [&str; 8] = ["replay", "replay-1514", "max", "1M", "100k", "10k", "1k", "idle"];

const ABOUT: &str = "\
Loads between two namespaces with a kernel's network stack: tcp, one stream of iperf3; ping, one \
every 20 ms; idle-net, none. Loads between two generators on virtqueues (vhost-user), frames of \
60 bytes: max, saturated; 1M, 1,000,000 per second, and so on; idle, none; replay, saturated from \
a ring that is sent repeatedly to a guest that reads no frames, so that guests use almost no CPU \
and the limit is the back end's; replay-1514, the same with the longest frames. pvswitch is a \
learning switch with the default policy (adaptive); pvswitch-spin never sleeps, like DPDK's \
programs; pvswitch-cross connects its two ports directly, like testpmd (net_vhost, io); ovs-dpdk \
is Open vSwitch with DPDK, learning (NORMAL), and ovs-dpdk-sleep the same with pmd-maxsleep=500; \
vpp is a learning bridge domain, and vpp-cross a cross-connect; snabb connects its two ports \
directly; grout is a learning bridge, and grout-cross a cross-connect. bridge is the kernel's, \
with veth: a stream crosses it in frames of up to 64 KiB that are never segmented, and there is \
no boundary of a virtual machine, so it is an upper bound rather than a competitor. vde is \
vde_switch with vde_plug2tap in each namespace.

The back end's CPU is that of its processes; a bridge has none, because the sender does its work. \
All CPUs: the total of guests and back end. Wake-ups: how often threads of the back end slept and \
were woken. Latencies are from generator to generator, or of a ping's round trip. DPDK, Open \
vSwitch, VPP, Snabb and grout have huge pages, which root reserves for the study; where too few \
are free, their cells are skipped, and one that runs without them fails. Rings that are replayed \
have 8192 descriptors, Snabb's 1024: of more it drops most frames.";

/// The study.
pub struct Peers;

const MEASURES: [Measure; 8] = [
    Measure::new("throughput", "Gbit/s", Better::More, "payload of TCP, or frames, that arrived"),
    Measure::new("frames", "1/s", Better::More, "frames that arrived"),
    Measure::new("backend_cpu", "%", Better::Less, "CPU time of the back end's processes"),
    Measure::new("all_cpu", "%", Better::Less, "CPU time of all that ran, guests included"),
    Measure::new("p50", "us", Better::Less, "latency of a frame, or round trip of a ping"),
    Measure::new("p99", "us", Better::Less, "the same, of the slowest in a hundred"),
    Measure::new("p999", "us", Better::Less, "the same, of the slowest in a thousand"),
    Measure::new("wakeups", "1/s", Better::Less, "times that threads of the back end were woken"),
];

const FACTS: Facts = Facts {
    name: "peers",
    about: "how rivals do under the same load: DPDK, Open vSwitch, VPP, Snabb, grout, Linux \
            bridge, vde",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &[
        "iperf3",
        "ping",
        "ip",
        "nsenter",
        "vde_switch",
        "vde_plug2tap",
        "dpdk-testpmd",
        "ovs-vsctl",
        "vpp",
        "snabb",
        "grout",
    ],
    together: None,
    // A twentieth is the least that a promise against a peer depends on.
    margin: 1.05,
    control: &[("load", "replay")],
};

impl Study for Peers {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let loads: &[&str] = match scale {
            Scale::Smallest => &["tcp", "10k", "idle"],
            Scale::Quick => &["tcp", "replay"],
            Scale::Usual | Scale::Full => &[&NET_LOADS[..], &RING_LOADS].concat(),
        };
        let peers: &[&str] = match scale {
            Scale::Smallest => &["pvswitch", "bridge", "vde", "testpmd"],
            Scale::Quick => &["pvswitch", "ovs-dpdk", "testpmd", "bridge", "vde"],
            Scale::Usual | Scale::Full => &[&RINGS[..], &["bridge", "vde"]].concat(),
        };
        let seconds = match scale {
            Scale::Smallest | Scale::Quick => 1.0,
            Scale::Usual => 2.0,
            Scale::Full => 10.0,
        };
        let axes = vec![Axis::new("load", loads), Axis::new("peer", peers)];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        let (load, peer) = (cell.get("load"), cell.get("peer"));
        NET_LOADS.contains(&load) && NETS.contains(&peer)
            || RING_LOADS.contains(&load) && RINGS.contains(&peer)
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        if cell.get("peer").starts_with("ovs") { 6.0 } else { 2.5 }
    }

    fn huge_mib(&self, plan: &Plan) -> u64 {
        memory::wanted_mib(plan)
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (load, peer) = (run.cell.get("load"), run.cell.get("peer"));
        if NET_LOADS.contains(&load) {
            over_nets(run.stage, &Nets::build(run.stage, peer)?, load, run.seconds)
        } else {
            over_rings(run, &Sockets::build(run.stage, peer)?, load, peer)
        }
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let loads = results.plan.axes.iter().find(|axis| axis.name == "load");
        let loads = loads.map_or(&[][..], |axis| &axis.values);
        let tables = loads.iter().map(|load| Part::Table(table(results, load)));
        std::iter::once(text).chain(tables).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let idle = results.values(
            |cell| {
                let peer = cell.get("peer");
                cell.get("load").starts_with("idle")
                    && peer.starts_with("pvswitch")
                    && peer != "pvswitch-spin"
            },
            "wakeups",
        );
        let Some(most) = idle.into_iter().max_by(f64::total_cmp) else { return Vec::new() };
        vec![Verdict {
            what: format!(
                "an idle pvswitch sleeps: {IDLE_WAKES_MAX} wake-ups a second or fewer; {most:.1}"
            ),
            holds: Some(most <= IDLE_WAKES_MAX),
        }]
    }
}

/// Largest accepted rate of wake-ups of an idle switch, with those of its control thread, in 1/s.
const IDLE_WAKES_MAX: f64 = 20.0;

/// A window of time: CPU time and wake-ups.
struct Window {
    busy_ns: u64,
    spent: (u64, u64),
    start: std::time::Instant,
}

impl Window {
    fn open(backends: &[u32]) -> Self {
        Self { busy_ns: busy_ns(), spent: spent(backends), start: std::time::Instant::now() }
    }

    fn close(&self, backends: &[u32]) -> Figures {
        let seconds = self.start.elapsed().as_secs_f64();
        let (cpu, switches) = spent(backends);
        let percent = |ns: u64| ns as f64 / seconds / 1e7;
        let mut figures = BTreeMap::from([
            ("backend_cpu", percent(cpu.saturating_sub(self.spent.0))),
            ("all_cpu", percent(busy_ns().saturating_sub(self.busy_ns))),
        ]);
        if !backends.is_empty() {
            let wakes = switches.saturating_sub(self.spent.1) as f64 / seconds;
            figures.insert("wakeups", wakes);
        }
        figures
    }
}

fn over_nets(stage: &Stage, nets: &Nets, load: &str, seconds: f64) -> Result<Figures, Fail> {
    let (from, to) = (nets.guest(0), nets.guest(1));
    let address = &nets.addresses[1];
    Ping::until_answered(from, address)?;
    let cpus = stage.all_cpus();
    let window = |seconds: f64| {
        let window = Window::open(&nets.backends);
        sleep(seconds);
        window.close(&nets.backends)
    };
    match load {
        "tcp" => {
            let _server = Iperf::server(stage, to, &cpus, PORT)?;
            let flow = Iperf::tcp(address, PORT, seconds + WARM_S);
            let flow = flow.start(stage, &from.on(&cpus))?;
            sleep(WARM_S);
            let mut figures = window(seconds);
            figures.insert("throughput", flow.report()?.bits_per_s / 1e9);
            Ok(figures)
        }
        "ping" => {
            let count = (seconds * 1e3 / PING_MS) as u32;
            let pings = PingPlan { interval_ms: PING_MS, count, size: 56 };
            let ping = Ping::start(stage, &from.on(&cpus), address, pings)?;
            let mut figures = window(seconds);
            let pings = ping.report()?;
            for (name, quantile) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
                figures.extend(pings.quantile_us(quantile).map(|us| (name, us)));
            }
            Ok(figures)
        }
        _ => {
            // Until the packets of the set-up have passed.
            sleep(WARM_S);
            Ok(window(seconds))
        }
    }
}

fn over_rings(run: &Run, ends: &Sockets, load: &str, peer: &str) -> Result<Figures, Fail> {
    let (stage, seconds) = (run.stage, run.seconds);
    let replay = load.starts_with("replay");
    let options =
        if replay { NicOptions::replay(stage, ends.replay_ring)? } else { NicOptions::new("") };
    let size = if load == "replay-1514" { 1514 } else { 60 };
    let sink = Gen::start(stage, 1, &ends.ports[1], &options, "sink --interval 0.1")?;
    wait_for("the sink to be connected", START_MAX_S, || Ok(sink.latest().is_ok()))?;
    let length = WARM_S + seconds + TAIL_S;
    let to = Gen::mac(1);
    let full = replay || load == "max";
    let rate = if full { String::new() } else { format!(" --rate {load}") };
    let mode = if load == "idle" {
        "sink --interval 0.1".into()
    } else {
        format!("send --size {size}{rate} --peer {to} --duration {length} --interval 0.1")
    };
    let sender = Gen::start(stage, 0, &ends.ports[0], &options, &mode)?;
    wait_for("the other generator", START_MAX_S, || Ok(sender.latest().is_ok()))?;
    if load != "idle" {
        // Snabb processes its guests' messages twice a second.
        wait_for("a frame", START_MAX_S, || Ok(number(&sink.latest()?, "received_frames") > 0.0))?;
    }
    sleep(WARM_S);
    // Snabb has none before the first frame, and ends if it gets none then.
    if load != "idle" || peer != "snabb" {
        ends.check_huge_pages(stage, peer)?;
    }
    // Rates are by the sink's clock, which is reported with its counters.
    let before = sink.latest()?;
    let window = Window::open(&[ends.backend]);
    sleep(seconds);
    let mut figures = window.close(&[ends.backend]);
    if load == "idle" {
        return Ok(figures);
    }
    let after = sink.latest()?;
    sender.report(length + 20.0)?;
    let all = sink.end()?;
    let more = |key: &str| number(&after, key) - number(&before, key);
    let frames = more("received_frames") / more("duration_s");
    if !frames.is_finite() || frames < 1.0 {
        return Err(Fail::Cell("no frame was received".into()));
    }
    figures.insert("frames", frames);
    figures.insert("throughput", frames * f64::from(size) * 8.0 / 1e9);
    if replay {
        return Ok(figures);
    }
    figures.extend([
        ("p50", number(&all, "latency_ns_p50") / 1e3),
        ("p99", number(&all, "latency_ns_p99") / 1e3),
        ("p999", number(&all, "latency_ns_p999") / 1e3),
    ]);
    Ok(figures)
}

/// Returns a number of a generator's report; 0 if it is missing.
fn number(report: &serde_json::Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(0.0)
}

/// Returns the table of a load.
fn table(results: &Results, load: &str) -> Table {
    let peers = results.plan.axes.iter().find(|axis| axis.name == "peer");
    let peers = peers.map_or(&[][..], |axis| &axis.values);
    let cell = |peer: &str| {
        let pairs = [("load", load), ("peer", peer)];
        Cell(pairs.map(|(name, value)| (name.to_string(), value.to_string())).into())
    };
    let of = |peer: &str, measure, digits| {
        Value::estimate(results.estimate(&cell(peer), measure), digits, "not measured")
    };
    let peers: Vec<&String> = peers.iter().filter(|peer| Peers.has(&cell(peer))).collect();
    // Only measures with values; for frames of one size, throughput is redundant.
    let has_figures = |measure: &&(Measure, usize)| {
        let mut runs = peers.iter().filter_map(|peer| results.summary(&cell(peer), measure.0.name));
        runs.next().is_some() && !(measure.0.name == "throughput" && RING_LOADS.contains(&load))
    };
    let measures: Vec<(Measure, usize)> =
        MEASURES.into_iter().zip([3, 0, 1, 1, 0, 0, 0, 1]).collect();
    let measures: Vec<_> = measures.iter().filter(has_figures).collect();
    let rows = peers.iter().map(|peer| {
        let values = measures.iter().map(|(measure, digits)| of(peer, measure.name, *digits));
        std::iter::once(Value::Text((*peer).clone())).chain(values).collect()
    });
    let units = measures.iter().map(|(m, _)| format!("{}, {}", m.name.replace('_', " "), m.unit));
    Table {
        title: format!("Load {load}"),
        note: "A peer without figures is not installed; the run says which package it is in."
            .into(),
        columns: std::iter::once("peer".to_string()).chain(units).collect(),
        rows: rows.collect(),
        command: format!("pvswitch lab run peers --only load={load}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_has_at_least_four_peers() {
        let cells = Peers.plan(Scale::Usual).cells(&Peers);
        for load in NET_LOADS.into_iter().chain(RING_LOADS) {
            let of = cells.iter().filter(|cell| cell.get("load") == load);
            assert!(of.count() >= 4, "{load}");
        }
    }
}
