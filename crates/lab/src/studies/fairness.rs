//! `fairness`: one worker for all guests against NAPI and workers for each guest.

use std::collections::BTreeMap;

use super::bulk::Bulk;
use crate::claims::{Claim, Expect};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Original, Verdict};
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::stage::{Link, NicOptions, SwitchOptions};
use crate::stats::paired::Estimate;
use crate::stats::{Summary, jain};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// Minimum share of any guest in any run, relative to an equal share: below, it is stalled.
const SHARE_LEAST: f64 = 0.01;
/// Minimum of Jain's index, as median of all runs, where there are too few for more.
const JAIN_LEAST: f64 = 0.8;
/// Minimum of Jain's index and of the least share, as medians of each cell.
const CELL_LEAST: [(&str, f64); 2] = [("jain", 0.95), ("least_share", 0.5)];
/// Maximum by which the index of a worker per port may be below that of one for all.
const JAIN_LESS: f64 = 0.05;

const ABOUT: &str = "\
As with xen-netback, each guest has an interface of its own in the host, which the switch \
cross-connects with the guest's port, and a bridge of the kernel joins these interfaces. Shared is \
one worker that serves all of them by events, like a thread of the unpatched kernel. Per-port is \
the patch: frames from a guest are polled by the policy napi, and each guest has two workers, one \
for the frames from it (the NAPI instance) and one for those to it (the kernel thread). x is the \
number of guests, the left axis the throughput of all of them together, the right axis the CPU \
time of the switch in per cent of one CPU. Points are medians with their interval, where the \
original study has means with one standard deviation.

The original study has its figures in pictures only, so there is no table of them beside ours. It \
ran on twelve cores, six of them for dom0; on a machine with fewer CPUs than guests, the workers \
of per-port share CPUs, which limits their benefit.";

/// The study.
pub struct Fairness;

const MEASURES: [Measure; 8] = [
    Measure::new(
        "throughput",
        "Gbit/s",
        Better::More,
        "TCP payload that arrived, all guests together",
    ),
    Measure::new("switch_cpu", "%", Better::Less, "CPU time of the switch, of one CPU"),
    Measure::new("guests_cpu", "%", Better::Less, "CPU time of all guests: NIC, kernel and tools"),
    Measure::new(
        "jain",
        "",
        Better::More,
        "Jain's index over guests' bytes: 1 if all have the same, 1/n if one has all",
    ),
    Measure::new(
        "least_share",
        "",
        Better::More,
        "bytes of the guest that had fewest, over the mean",
    ),
    Measure::new(
        "frames",
        "1/s",
        Better::Neither,
        "frames between guests and switch, both ways; up to 64 KiB each with TSO",
    ),
    Measure::new("retransmits", "1/s", Better::Less, "TCP segments sent again"),
    Measure::new("workers", "", Better::Neither, "workers that the switch had"),
];

const FACTS: Facts = Facts {
    name: "fairness",
    about: "whether a worker per port is fairer than one for all, and its cost",
    original: Some(Original {
        source: "Xen wiki: Xen-netback NAPI + kThread V3 performance testing; two Xeon X5650, \
                 iperf, dom0 to 1..8 guests and back, 1 to 4 streams each",
        claim: "A thread per interface hardly changes throughput: not to the guests, and from \
                them only above four guests with one or two streams, where it is lower; it \
                should be fairer.",
    }),
    measures: &MEASURES,
    takes_proto: true,
    tools: &["iperf3", "ping", "ip", "nsenter"],
    together: None,
    // Its figures are pictures; less cannot be read from them.
    margin: 1.05,
    control: &[("direction", "to-guest"), ("guests", "4"), ("streams", "1")],
};

impl Study for Fairness {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (guests, streams, seconds, repeats): (&[u32], &[u32], f64, u32) = match scale {
            Scale::Smallest => (&[1, 3], &[1], 1.0, 2),
            Scale::Quick => (&[2, 8], &[1], 1.0, 1),
            Scale::Usual => (&[1, 2, 4, 6, 8], &[1, 2, 4], 2.0, 1),
            Scale::Full => (&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 4], 120.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![
                Axis::new("direction", ["to-guest", "from-guest"]),
                Axis::new("streams", streams),
                Axis::new("guests", guests),
                Axis::new("variant", ["shared", "per-port"]),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        1.0 + 0.2 * cell.number("guests")
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (cell, stage) = (run.cell, run.stage);
        let guests = cell.number("guests") as usize;
        let mut switch = SwitchOptions::new(stage, "event");
        switch.forward = "cross".into();
        let port = match cell.get("variant") {
            "shared" => {
                switch.placement = "single".into();
                ""
            }
            "per-port" => {
                switch.placement = "per-port".into();
                // One for each guest's frames, as its NAPI instance, and one for the frames to
                // it, which wait at its interface, as its kernel thread.
                switch.workers = 2 * guests;
                // Each has its own CPU, if there are enough.
                switch.cpus = stage.switch_cpus.clone();
                ",poll=napi"
            }
            other => return Err(Fail::Cell(format!("unknown variant {other}"))),
        };
        let workers = switch.workers as f64;
        let bulk = Bulk {
            proto: stage.proto,
            guests,
            port,
            outside: "",
            nic: NicOptions::new("event"),
            switch,
            link: Link::Interfaces(guests),
            from_guests: cell.get("direction") == "from-guest",
            udp: false,
            len: 0,
            bits_per_s: 0.0,
            streams: cell.number("streams") as u32,
            ping: false,
        };
        let done = bulk.run(stage, run.seconds)?;
        let count = &done.count;
        let each = &done.bits_per_s;
        let mean = each.iter().sum::<f64>() / each.len().max(1) as f64;
        let least = each.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0);
        let mut figures = BTreeMap::from([
            ("throughput", done.arrived_bits_per_s / 1e9),
            ("switch_cpu", count.percent(count.switch_ns)),
            ("guests_cpu", done.guests_percent()),
            (
                "frames",
                count.per_second(count.ingress("g", "frames") + count.egress("g", "frames")),
            ),
            ("retransmits", count.per_second(done.retransmits)),
            ("workers", workers),
        ]);
        if let Some(jain) = jain(each) {
            figures.extend([("jain", jain), ("least_share", least / mean)]);
        }
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let values = |name: &str| -> Vec<&str> {
            let axis = results.plan.axes.iter().find(|axis| axis.name == name);
            axis.map_or_else(Vec::new, |axis| axis.values.iter().map(String::as_str).collect())
        };
        let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
        for direction in values("direction") {
            for streams in values("streams") {
                let part = Panel { results, direction, streams };
                parts.push(Part::Plot(part.plot()));
                parts.push(Part::Table(part.table()));
            }
        }
        parts
    }

    fn claims(&self, plan: &Plan) -> Vec<Claim> {
        let cells = plan.cells(self).into_iter().filter(|cell| cell.get("variant") == "per-port");
        let mut claims = Vec::new();
        for cell in cells {
            let base = cell.with("variant", "shared");
            let (to_guest, guests) = (cell.get("direction") == "to-guest", cell.number("guests"));
            let few_streams = cell.number("streams") <= 2.0;
            let lower = !to_guest && few_streams && guests > 4.0;
            let claim = |what: &str, measure, expect| Claim {
                what: what.into(),
                cell: cell.clone(),
                base: base.clone(),
                measure,
                original: None,
                expect,
            };
            claims.push(if lower {
                let what = "from more than four guests, one or two streams: throughput drops";
                claim(what, "throughput", Expect::Beyond(1.0 / FACTS.margin))
            } else {
                let what = "no appreciable difference of throughput";
                claim(what, "throughput", Expect::Within(FACTS.margin))
            });
            if to_guest && guests > 1.0 {
                let what = "should improve fairness on the dom0-to-VM pathway";
                claims.push(claim(what, "jain", Expect::Beyond(FACTS.margin)));
            }
        }
        claims
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let several = |cell: &Cell| cell.number("guests") > 1.0;
        let mut verdicts = Vec::new();
        let mut medians = Vec::new();
        for variant in ["shared", "per-port"] {
            let of = |measure| {
                results.values(|cell| several(cell) && cell.get("variant") == variant, measure)
            };
            let (Some(shares), Some(jains)) =
                (Summary::of(&of("least_share")), Summary::of(&of("jain")))
            else {
                continue;
            };
            verdicts.push(Verdict {
                what: format!(
                    "{variant}: no guest is stalled: in each of {} runs all have at least \
                     {:.0} % of the mean, in bytes; minimum {:.0} %",
                    shares.count,
                    100.0 * SHARE_LEAST,
                    100.0 * shares.low
                ),
                holds: Some(shares.low >= SHARE_LEAST),
            });
            let hardest = hardest(results, variant).map_or_else(String::new, |(cell, jain)| {
                format!("; least even: {jain:.3}, {cell}")
            });
            verdicts.push(Verdict {
                what: format!(
                    "{variant}: bytes are shared evenly: the median of Jain's index is at least \
                     {JAIN_LEAST}; {:.3}, {:.3} to {:.3}{hardest}",
                    jains.median, jains.low, jains.high
                ),
                holds: Some(jains.median >= JAIN_LEAST),
            });
            medians.push(jains.median);
            verdicts.extend(each_cell(results, variant));
        }
        if let [shared, per_port] = medians[..] {
            verdicts.push(Verdict {
                what: format!(
                    "a worker per port is no less fair than one for all: medians of Jain's index \
                     {per_port:.3} and {shared:.3}"
                ),
                holds: Some(per_port >= shared - JAIN_LESS),
            });
        }
        verdicts
    }
}

/// Judges each cell by its median, where every cell has runs enough for an interval of it.
fn each_cell(results: &Results, variant: &str) -> Option<Verdict> {
    let cells = results.cells().into_iter();
    let cells = cells.filter(|c| c.number("guests") > 1.0 && c.get("variant") == variant);
    let cells: Vec<&Cell> = cells.collect();
    let found = cells.iter().flat_map(|cell| {
        let of = |(measure, least)| Some((results.estimate(cell, measure)?, measure, least));
        CELL_LEAST.into_iter().filter_map(of).map(|found| (*cell, found)).collect::<Vec<_>>()
    });
    let found: Vec<_> = found.collect();
    let runs = found.iter().map(|(_, (of, ..))| of.count).min()?;
    if !found.iter().all(|(_, (of, ..))| of.interval) {
        return None;
    }
    // All of the interval is below what must be.
    let short = found.iter().filter(|(_, (of, _, least))| of.high < *least);
    let short: Vec<String> = short
        .map(|(cell, (of, measure, _))| {
            format!("{measure} {:.2} ({:.2}-{:.2}), {cell}", of.median, of.low, of.high)
        })
        .collect();
    Some(Verdict {
        what: format!(
            "{variant}: in each of {} cells of several guests, {runs} runs or more, the intervals \
             of Jain's index and of the least share reach {} and {}{}{}",
            cells.len(),
            CELL_LEAST[0].1,
            CELL_LEAST[1].1,
            if short.is_empty() { "" } else { "; not " },
            short.join("; "),
        ),
        holds: Some(short.is_empty()),
    })
}

/// The cell of several guests with the lowest median of Jain's index, and that median: a median of
/// all cells hides it.
fn hardest<'a>(results: &'a Results, variant: &str) -> Option<(&'a Cell, f64)> {
    let cells = results.cells().into_iter();
    let cells = cells.filter(|c| c.number("guests") > 1.0 && c.get("variant") == variant);
    let medians = cells.filter_map(|cell| {
        let median = Summary::of(&results.values(|other| *other == *cell, "jain"))?.median;
        Some((cell, median))
    });
    medians.min_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// One of the wiki's plots: a direction and a number of streams.
struct Panel<'a> {
    results: &'a Results,
    direction: &'a str,
    streams: &'a str,
}

impl Panel<'_> {
    fn estimate(&self, guests: &str, variant: &str, measure: &str) -> Option<Estimate> {
        let pairs = [
            ("direction", self.direction),
            ("streams", self.streams),
            ("guests", guests),
            ("variant", variant),
        ];
        let cell = Cell(pairs.map(|(name, value)| (name.into(), value.into())).into());
        self.results.estimate(&cell, measure)
    }

    fn values(&self, name: &str) -> &[String] {
        let axis = self.results.plan.axes.iter().find(|axis| axis.name == name);
        axis.map_or(&[], |axis| &axis.values)
    }

    fn words(&self) -> String {
        let way = if self.direction == "to-guest" { "host to guests" } else { "guests to host" };
        let streams = if self.streams == "1" { "stream" } else { "streams" };
        format!("{way}, {} TCP {streams} each", self.streams)
    }

    fn command(&self) -> String {
        let Self { direction, streams, .. } = self;
        format!("pvswitch lab run fairness --only direction={direction} --only streams={streams}")
    }

    fn line(&self, variant: &str, measure: &str) -> Vec<Point> {
        let points = self.values("guests").iter().filter_map(|guests| {
            let found = self.estimate(guests, variant, measure)?;
            Some(Point::of(guests.parse().ok()?, found))
        });
        points.collect()
    }

    /// Throughput on the left axis, CPU on the right.
    fn plot(&self) -> Plot {
        let mut series = Vec::new();
        for (colour, variant) in self.values("variant").iter().enumerate() {
            let (name, points) = (variant.clone(), self.line(variant, "throughput"));
            series.push(Series { name, points, colour, ..Series::default() });
        }
        for variant in self.values("variant") {
            let (name, points) = (format!("CPU, {variant}"), self.line(variant, "switch_cpu"));
            let (dashed, right) = (true, true);
            series.push(Series { name, points, colour: 2, dashed, right, ..Series::default() });
        }
        Plot {
            title: self.words(),
            file: format!("{}-{}", self.direction, self.streams),
            x: "number of VMs".into(),
            y: "throughput, Gbit/s".into(),
            right: "CPU of the switch, % of one CPU".into(),
            series,
            command: self.command(),
            ..Plot::default()
        }
    }

    fn table(&self) -> Table {
        let mut rows = Vec::new();
        for guests in self.values("guests") {
            for variant in self.values("variant") {
                let value = |measure, digits| {
                    let found = self.estimate(guests, variant, measure);
                    Value::estimate(found, digits, "not measured")
                };
                rows.push(vec![
                    Value::Number(guests.parse().unwrap_or(0.0), 0),
                    Value::Text(variant.clone()),
                    value("throughput", 2),
                    value("switch_cpu", 0),
                    value("guests_cpu", 0),
                    value("jain", 3),
                    value("least_share", 2),
                    value("retransmits", 0),
                ]);
            }
        }
        Table {
            title: format!("Shares: {}", self.words()),
            note: "Medians. Jain's index: 1 if all guests have the same, 1/n if \
                   one of n has all."
                .into(),
            columns: [
                "Guests",
                "Variant",
                "Throughput, Gbit/s",
                "Switch CPU, %",
                "Guests' CPU, %",
                "Jain's index",
                "Least share of the mean",
                "Retransmissions, 1/s",
            ]
            .map(String::from)
            .into(),
            rows,
            command: self.command(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::store::Done;

    fn verdicts(runs: &[(&str, f64, f64)]) -> Vec<bool> {
        let done = |(variant, jain, least): &(&str, f64, f64)| {
            let pairs = [("guests", "3"), ("variant", *variant)];
            Done {
                cell: Cell(pairs.map(|(name, value)| (name.into(), value.into())).into()),
                repeat: 0,
                distance_ns: 0.0,
                others_percent: 0.0,
                figures: [("jain".into(), *jain), ("least_share".into(), *least)].into(),
            }
        };
        let results = Results {
            plan: Fairness.plan(Scale::Smallest),
            runs: runs.iter().map(done).collect(),
            command: String::new(),
            machine: Machine::default(),
            controls: Vec::new(),
            void: Vec::new(),
        };
        Fairness.judge(&results).iter().map(|verdict| verdict.holds == Some(true)).collect()
    }

    #[test]
    fn guests_without_their_share_and_uneven_shares_are_detected() {
        let fair = ("shared", 0.99, 0.9);
        assert_eq!(verdicts(&[fair, ("per-port", 0.98, 0.8)]), [true; 5]);
        assert_eq!(verdicts(&[fair, ("per-port", 0.85, 0.0)]), [true, true, false, true, false]);
        assert_eq!(verdicts(&[fair, ("per-port", 0.5, 0.2)]), [true, true, true, false, false]);
        assert_eq!(verdicts(&[fair]), [true, true]);
    }
}
