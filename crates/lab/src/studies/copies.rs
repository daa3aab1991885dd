//! `copies`: benefit of one copy less and fewer notifications between guests and their host.

use std::collections::BTreeMap;

use self::net::{End, Net};
use crate::claims::{Claim, Expect};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::Part;
use crate::report::{Original, Verdict};
use crate::stage::{Iperf, START_MAX_S, sleep, wait_for};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod filter;
mod net;
mod original;
mod tables;

/// Traffic before a window.
const WARM_S: f64 = 0.5;
/// Where iperf3 listens.
const PORT: u16 = 5201;
/// `KB/sec` of `ttcp` is 1024 bytes a second.
const KB: f64 = 1024.0;
/// Tolerance of copy counts: single frames take another path.
const COPIES_OFF: f64 = 0.1;

/// dom0's CPU after over before with a bridge: "reduced by about 20%".
const BRIDGE_CPU: f64 = 0.8;

/// The pairs, in the order of the original study; then those with an external machine, which it
/// measured as a bridge.
const PAIRS: [&str; 10] =
    ["a-host", "host-a", "b-host", "host-b", "a-b", "b-a", "a-box", "box-a", "b-box", "box-b"];
/// The variant `after` with receive buffers of half a page.
const HALVES: &str = "after-2048";
/// Where it is measured: guest A, whose ring lets the driver choose the size, receives.
const HALVES_PAIR: &str = "host-a";

/// The study.
pub struct Copies;

const MEASURES: [Measure; 11] = [
    Measure::new(
        "kb_per_s",
        "KB/s",
        Better::More,
        "TCP payload that arrived, in units of 1024 bytes",
    ),
    Measure::new("host_cpu", "%", Better::Less, "CPU time of the switches and of the host's tools"),
    Measure::new(
        "notifications_per_frame",
        "",
        Better::Less,
        "kicks and calls between guests and switches, for each frame between them, both ways",
    ),
    Measure::new(
        "copies",
        "",
        Better::Less,
        "how often each byte was copied on its way, except by the \
             ends' own system calls",
    ),
    Measure::new("switch_cpu", "%", Better::Less, "CPU time of the switches alone"),
    Measure::new("a_cpu", "%", Better::Less, "CPU time of guest A: NIC, kernel and tools"),
    Measure::new("b_cpu", "%", Better::Less, "CPU time of guest B"),
    Measure::new(
        "host_ns_per_kb",
        "ns",
        Better::Less,
        "host's CPU time for 1024 bytes that arrived",
    ),
    Measure::new("kicks_per_frame", "", Better::Less, "notifications from guests, for each frame"),
    Measure::new("calls_per_frame", "", Better::Less, "notifications to guests, for each frame"),
    Measure::new("drops", "1/s", Better::Less, "frames that the switches lost"),
];

const FACTS: Facts = Facts {
    name: "copies",
    about: "benefit of one copy less and batched notifications, the host as router and as bridge",
    original: Some(Original {
        source: "Manuel Bouyer, port-xen, 2005: network backend improvements; two Pentium II \
                 of 350 MHz, ttcp, NetBSD as dom0 and router",
        claim: "Fewer hypercalls, interrupts and copies give up to 37 % more throughput \
                between a guest and dom0 and up to 72 % more between guests; a packet filter, \
                even without rules, cancels most of that.",
    }),
    measures: &MEASURES,
    takes_proto: false,
    tools: &["iperf3", "ping", "ip", "ethtool", "nft", "nsenter"],
    together: None,
    // The smallest effect without a filter is 6 % more: half of that.
    margin: 1.03,
    control: &[("mode", "bridge"), ("filter", "off"), ("pair", "a-b")],
};

impl Study for Copies {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (pairs, filters): (&[&str], &[&str]) = match scale {
            Scale::Smallest => (&["host-a", "b-host", "a-b", "a-box"], &["off", "rewrite"]),
            Scale::Quick => (&["a-host", "a-b", "a-box"], &["off"]),
            Scale::Usual | Scale::Full => (&PAIRS, &["on", "off", "rewrite"]),
        };
        let frames: &[&str] = match scale {
            Scale::Smallest | Scale::Quick => &["mtu"],
            Scale::Usual | Scale::Full => &["mtu", "gso"],
        };
        let seconds = match scale {
            Scale::Smallest => 0.5,
            Scale::Quick => 0.8,
            Scale::Usual => 2.0,
            Scale::Full => 10.0,
        };
        Plan::new(
            FACTS.name,
            1,
            seconds,
            vec![
                Axis::new("mode", ["router", "bridge"]),
                Axis::new("frames", frames),
                Axis::new("filter", filters),
                Axis::new("pair", pairs),
                Axis::new("variant", ["before", "after", HALVES]),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        let is = |axis, value| cell.get(axis) == value;
        let (router, mtu, off) = (is("mode", "router"), is("frames", "mtu"), is("filter", "off"));
        // The original study had frames of the MTU, its filter in a router, and an external machine
        // at a bridge.
        let filter = match cell.get("filter") {
            "rewrite" => router && mtu,
            "on" => mtu,
            _ => true,
        };
        filter
            && (!is_outside(cell) || !router && mtu && off)
            && (!is("variant", HALVES) || router && mtu && off && is("pair", HALVES_PAIR))
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        1.6
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (cell, stage) = (run.cell, run.stage);
        let pair = cell.get("pair");
        let (from, to) = End::pair(pair)
            .ok_or_else(|| Fail::Cell(format!("pair {pair}: ends are a, b and host")))?;
        let net = Net::build(stage, &net::Plan::of(cell))?;
        let all_cpus = stage.all_cpus();
        let cpus = |end| if end == End::Host { &all_cpus[..] } else { &stage.guest_cpus[..] };
        let (receiver, address) = net.end(to, from);
        let _server = Iperf::server(stage, receiver, cpus(to), PORT)?;
        let (sender, _) = net.end(from, to);
        // Longer than the window; it is ended with the rest.
        let flow = Iperf::tcp(&address, PORT, run.seconds + 30.0);
        let _flow = flow.start(stage, &sender.on(cpus(from)))?;
        wait_for(&format!("traffic from {pair}"), START_MAX_S, || {
            Ok(net.watch(0.05)?.payload_per_s(from, to) > KB)
        })?;
        sleep(WARM_S);
        let counts = net.watch(run.seconds)?;
        let frames = counts.frames();
        let payload = counts.payload_per_s(from, to);
        if payload < KB {
            return Err(Fail::Cell(format!("{pair}: no traffic passed ({frames:.0} frames)")));
        }
        // Those of a guest's frames only: the host's own are not copied for it.
        let by_filter = net.copies_by_filter()?;
        let by_filter = if matches!(from, End::Guest(_)) { by_filter } else { 0.0 };
        let (kicks, calls) = (net.kicks_per_frame()?, counts.calls() / frames);
        let host_cpu = counts.switch_percent() + counts.role_percent(0);
        let mut figures = BTreeMap::from([
            ("kb_per_s", payload / KB),
            ("host_cpu", host_cpu),
            ("copies", counts.copies(from, to) + by_filter),
            ("switch_cpu", counts.switch_percent()),
            ("a_cpu", counts.role_percent(1)),
            ("b_cpu", counts.role_percent(2)),
            ("host_ns_per_kb", host_cpu * 1e7 * KB / payload),
            ("calls_per_frame", calls),
            ("drops", counts.per_second(counts.drops())),
        ]);
        if let Some(kicks) = kicks {
            figures.insert("kicks_per_frame", kicks);
            figures.insert("notifications_per_frame", kicks + calls);
        }
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        tables::parts(results)
    }

    fn claims(&self, plan: &Plan) -> Vec<Claim> {
        let mut claims = Vec::new();
        let cells = plan.cells(self);
        let ipf = ipf(plan);
        for after in cells.iter().filter(|cell| cell.get("variant") == "after") {
            let pair = [after.clone(), before(after)];
            let rows = original::TABLE.iter().filter(|row| {
                after.get("mode") == "router"
                    && after.get("frames") == "mtu"
                    && after.get("pair") == row.pair
                    && after.get("filter") == if row.filter { ipf } else { "off" }
            });
            claims.extend(rows.map(|row| {
                let filter = if row.filter { "with ipf" } else { "without ipf" };
                let what = format!("{} {filter}: throughput", row.name);
                let ratio = row.after / row.before;
                Claim::of_ratio(what, pair.clone(), "kb_per_s", ratio, FACTS.margin)
            }));
            if is_outside(after) {
                let what = "bridge, domU and an external box: dom0's CPU".to_string();
                claims.push(Claim::of_ratio(what, pair, "host_cpu", BRIDGE_CPU, FACTS.margin));
            }
            let base = after.with("variant", HALVES);
            if cells.contains(&base) {
                claims.push(Claim {
                    what: "full advantage needs buffers of a page: throughput".into(),
                    cell: after.clone(),
                    base,
                    measure: "kb_per_s",
                    original: None,
                    expect: Expect::Beyond(FACTS.margin),
                });
            }
        }
        claims
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let of = |cell: &Cell, measure| results.summary(cell, measure).map(|found| found.median);
        let mut outcome = Outcome::default();
        for after in results.cells() {
            if after.get("variant") != "after" {
                continue;
            }
            let before = before(after);
            let both = |measure| Some((of(&before, measure)?, of(after, measure)?));
            if let (Some(notifications), Some(copies)) =
                (both("notifications_per_frame"), both("copies"))
            {
                outcome.add(after, notifications, copies);
            }
            if after.get("filter") == "rewrite" && !after.get("pair").starts_with("host") {
                let cells = [after.clone(), before];
                let pairs = cells.map(|cell| {
                    Some((of(&cell, "copies")?, of(&cell.with("filter", "off"), "copies")?))
                });
                outcome.filtered.extend(pairs.into_iter().flatten());
            }
        }
        outcome.verdicts()
    }
}

/// Whether the external machine is one end.
fn is_outside(cell: &Cell) -> bool {
    cell.get("pair").split('-').any(|end| end == "box")
}

/// Our filter that results of the original study with its filter are judged by: that which copies,
/// as the original's did, unless the plan lacks it.
fn ipf(plan: &Plan) -> &'static str {
    let axis = plan.axes.iter().find(|axis| axis.name == "filter");
    let rewrites = axis.is_some_and(|axis| axis.values.iter().any(|value| value == "rewrite"));
    if rewrites { "rewrite" } else { "on" }
}

/// The cell to compare with.
fn before(after: &Cell) -> Cell {
    let mut pairs = after.outer().to_vec();
    pairs.push(("variant".into(), "before".into()));
    Cell(pairs)
}

/// Notifications and copies over all cells.
#[derive(Default)]
struct Outcome {
    cells: u32,
    /// The cell with the least reduction of notifications, with both figures.
    least: Option<(f64, f64, Cell)>,
    /// Copies of each byte between guests of a bridge: minimum before, maximum after.
    bridged: Option<(f64, f64)>,
    /// Cells with more copies after than before.
    more: u32,
    /// Copies of each byte of a guest's with the filter that rewrites packets, and without.
    filtered: Vec<(f64, f64)>,
}

impl Outcome {
    fn add(&mut self, after: &Cell, notifications: (f64, f64), copies: (f64, f64)) {
        self.cells += 1;
        let (was, is) = notifications;
        if self.least.as_ref().is_none_or(|(a, b, _)| is * a > b * was) {
            self.least = Some((was, is, after.clone()));
        }
        self.more += u32::from(copies.1 > copies.0 + COPIES_OFF);
        let among_guests = ["a-b", "b-a"].contains(&after.get("pair"));
        if after.get("mode") == "bridge" && among_guests {
            let (was, is) = self.bridged.unwrap_or(copies);
            self.bridged = Some((was.min(copies.0), is.max(copies.1)));
        }
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        if let Some((was, is, cell)) = &self.least {
            verdicts.push(Verdict {
                what: format!(
                    "fewer notifications per frame in each of {} pairs of cells; least reduction \
                     in {cell}: {was:.3} before, {is:.3} after",
                    self.cells
                ),
                holds: Some(is < was),
            });
            verdicts.push(Verdict {
                what: format!("no cell has more copies after than before ({} have)", self.more),
                holds: Some(self.more == 0),
            });
        }
        if let Some((was, is)) = self.bridged {
            verdicts.push(Verdict {
                what: format!(
                    "between guests on one bridge, each byte is copied at least twice before, by \
                     the kernel's bridge, and once after: {was:.2} before, {is:.2} after"
                ),
                holds: Some(was >= 2.0 - COPIES_OFF && (is - 1.0).abs() <= COPIES_OFF),
            });
        }
        let more = self.filtered.iter().map(|(with, without)| with - without);
        if let Some(least) = more.clone().min_by(f64::total_cmp) {
            let most = more.fold(least, f64::max);
            verdicts.push(Verdict {
                what: format!(
                    "a filter that rewrites packets from guests costs one copy more: {least:.2} \
                     to {most:.2} more"
                ),
                holds: Some(least >= 1.0 - COPIES_OFF && most <= 1.0 + COPIES_OFF),
            });
        }
        verdicts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_of_the_original_study_has_its_cells() {
        let plan = Copies.plan(Scale::Usual);
        let claims = Copies.claims(&plan);
        for row in &original::TABLE {
            let filter = if row.filter { "rewrite" } else { "off" };
            let is = |claim: &&Claim| {
                let cell = &claim.cell;
                claim.original == Some(row.after / row.before)
                    && cell.get("pair") == row.pair
                    && cell.get("filter") == filter
            };
            assert_eq!(claims.iter().filter(is).count(), 1, "{}", row.name);
        }
        // The table, an external machine in both directions of both guests, and buffers.
        assert_eq!(claims.len(), 12 + 4 + 1);
        let of = |measure: &str| claims.iter().filter(|c| c.measure == measure).count();
        assert_eq!((of("host_cpu"), of("kb_per_s")), (4, 13));
        let outside = claims.iter().filter(|claim| claim.measure == "host_cpu");
        assert!(outside.into_iter().all(|claim| is_outside(&claim.cell)));
        // Both modes, frames and variants of six pairs; then filters with frames of the MTU.
        assert_eq!(plan.cells(&Copies).len(), 48 + 24 + 12 + 8 + 1);
    }

    #[test]
    fn without_a_filter_that_copies_the_other_one_is_judged() {
        let mut plan = Copies.plan(Scale::Usual);
        for only in ["mode=router", "filter=on,off", "pair=a-host"] {
            plan.restrict(&Copies, only).unwrap();
        }
        let claims = Copies.claims(&plan);
        let filters = claims.iter().map(|claim| claim.cell.get("filter")).collect::<Vec<_>>();
        assert_eq!(filters, ["on", "off"]);
    }

    #[test]
    fn a_filter_that_copies_nothing_is_detected() {
        let holds = |filtered| {
            let outcome = Outcome { filtered, ..Outcome::default() };
            outcome.verdicts().iter().map(|verdict| verdict.holds).collect::<Vec<_>>()
        };
        assert_eq!(holds(vec![(2.0, 1.0), (4.0, 3.0)]), [Some(true)]);
        assert_eq!(holds(vec![(2.0, 1.0), (3.0, 3.0)]), [Some(false)]);
        assert_eq!(holds(vec![]), []);
    }

    #[test]
    fn notifications_that_do_not_fall_are_detected() {
        let cell = |mode: &str| {
            let pairs = [("mode", mode), ("pair", "a-b"), ("variant", "after")];
            Cell(pairs.map(|(name, value)| (name.into(), value.into())).into())
        };
        let holds = |notifications, copies| {
            let mut outcome = Outcome::default();
            outcome.add(&cell("router"), (1.0, 0.1), (3.0, 3.0));
            outcome.add(&cell("bridge"), notifications, copies);
            outcome.verdicts().iter().map(|verdict| verdict.holds == Some(true)).collect::<Vec<_>>()
        };
        assert_eq!(holds((1.0, 0.2), (3.0, 1.0)), [true, true, true]);
        assert_eq!(holds((1.0, 1.0), (3.0, 1.0)), [false, true, true]);
        assert_eq!(holds((1.0, 0.2), (3.0, 2.0)), [true, true, false]);
        assert_eq!(holds((1.0, 0.2), (2.0, 3.0)), [true, false, false]);
        assert!(Outcome::default().verdicts().is_empty());
    }
}
