//! `coalescing`: effects of time-outs before a notification, and of each idea of the TODO list.

use crate::claims::Claim;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::Part;
use crate::report::{Original, Verdict};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod original;
mod setting;
mod tables;
mod todo;
mod traffic;
mod unit;

use setting::{DEFAULT, SETTINGS, TIMEOUTS, Timed, of_row};

/// Traffic that time-outs are measured with.
const TIMED: [&str; 3] = ["guest-to-host", "host-to-guest", "pings"];
/// Traffic that settings are measured with: saturated, and [`PACED`] frames per second.
const SET: [&str; 2] = ["bulk", "paced"];
const PACED: u32 = 10_000;
/// Minimum of frames that arrive at that rate with every setting, in per cent.
const ARRIVE_LEAST: f64 = 90.0;
/// Maximum share of notifications that remains if their receiver has a timer.
const TIMER_LEAVES: f64 = 0.5;

/// The study.
pub struct Coalescing;

const MEASURES: [Measure; 17] = [
    Measure::new(
        "seconds_1_gb",
        "s",
        Better::Less,
        "time that 1 GB of TCP takes at the rate measured",
    ),
    Measure::new(
        "seconds_1m_pings",
        "s",
        Better::Less,
        "time that a million pings take, one after the other, at the rate measured",
    ),
    Measure::new("frames", "1/s", Better::More, "frames that the receiving guest got"),
    Measure::new(
        "frames_per_call",
        "",
        Better::Neither,
        "frames to a guest for each call of its ring",
    ),
    Measure::new("guests_cpu", "%", Better::Less, "CPU time of the guest: NIC, kernel and tools"),
    Measure::new("switch_cpu", "%", Better::Less, "CPU time of the switch, of one CPU"),
    Measure::new("guest_ns", "ns", Better::Less, "CPU time of both generators for each frame"),
    Measure::new("switch_ns", "ns", Better::Less, "CPU time of the switch for each frame"),
    Measure::new("kicks_per_1000", "", Better::Less, "kicks of all rings for 1000 frames"),
    Measure::new("calls_per_1000", "", Better::Less, "calls to all rings for 1000 frames"),
    Measure::new("tx_calls_per_1000", "", Better::Less, "calls to the sender for 1000 frames"),
    Measure::new("rx_kicks_per_1000", "", Better::Less, "kicks of the receiver for 1000 frames"),
    Measure::new("latency_p50", "us", Better::Less, "from a generator to the other, median"),
    Measure::new("latency_p99", "us", Better::Less, "what 99 of 100 frames stay within"),
    Measure::new("round_trip", "us", Better::Less, "mean round trip of a ping"),
    Measure::new("retransmits", "1/s", Better::Less, "TCP segments sent again"),
    Measure::new("lost", "%", Better::Less, "frames, or pings, that did not arrive"),
];

const FACTS: Facts = Facts {
    name: "coalescing",
    about: "benefit and cost of delaying notifications, and each idea of the TODO list",
    original: Some(Original {
        source: "Rusty Russell answering Michael S. Tsirkin's TODO list, qemu-devel and \
                 virtualization, June 2009; lguest, tcpblast",
        claim: "Delaying interrupts reduces their number, but TCP from the guest, whose \
                acknowledgements are delayed, takes a fifth to a half longer; TCP to the guest \
                batches well without any time-out.",
    }),
    measures: &MEASURES,
    takes_proto: true,
    tools: &["iperf3", "ping", "ip", "ethtool", "nsenter", "chrt"],
    together: None,
    // The smallest effect of a time-out on bulk is 13.4 s for 11.3: half of that.
    margin: 1.09,
    // The first cell of that traffic: `before`.
    control: &[("way", "guest-to-host")],
};

impl Study for Coalescing {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let few: Option<&[&str]> = match scale {
            Scale::Smallest => {
                Some(&[DEFAULT, "before", "1", "driver-poll=timer:1000", "poll=timer:1000"])
            }
            // Those that the original study timed, and none of the ideas.
            Scale::Quick => Some(&[DEFAULT, "before", "0", "1", "1/pending"]),
            Scale::Usual | Scale::Full => None,
        };
        let is_in = |name: &str| few.is_none_or(|few| few.contains(&name));
        let settings = SETTINGS.iter().map(|setting| setting.name).filter(|name| is_in(name));
        let mut all: Vec<String> = settings.map(String::from).collect();
        // The default is the base of settings, `before` that of time-outs.
        let timeouts = TIMEOUTS.iter().filter(|timeout| is_in(timeout.name));
        all.splice(1..1, timeouts.map(|timeout| timeout.setting()));
        let seconds = match scale {
            Scale::Smallest | Scale::Quick => 0.5,
            Scale::Usual => 1.0,
            Scale::Full => 10.0,
        };
        let ways = TIMED.iter().chain(&SET);
        Plan::new(FACTS.name, 1, seconds, vec![Axis::new("way", ways), Axis::new("setting", all)])
            .with_power(self, scale)
    }

    fn earlier_values(&self, axis: &str) -> Vec<&'static str> {
        let timeouts = TIMEOUTS.iter().filter(|_| axis == "setting");
        timeouts.map(|timeout| timeout.name).collect()
    }

    fn has(&self, cell: &Cell) -> bool {
        Timed::of(cell.get("setting")).is_ok() == TIMED.contains(&cell.get("way"))
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        if TIMED.contains(&cell.get("way")) { 1.6 } else { 1.0 }
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (stage, seconds, name) = (run.stage, run.seconds, run.cell.get("setting"));
        match run.cell.get("way") {
            "guest-to-host" => traffic::tcp(stage, seconds, name, true),
            "host-to-guest" => traffic::tcp(stage, seconds, name, false),
            "pings" => traffic::pings(stage, seconds, name),
            "bulk" => traffic::frames(stage, seconds, name, None),
            "paced" => traffic::frames(stage, seconds, name, Some(PACED)),
            other => Err(Fail::Cell(format!("way {other}: there is none"))),
        }
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let mut parts = tables::parts(results);
        parts.push(Part::Table(todo::table(results)));
        parts
    }

    fn claims(&self, plan: &Plan) -> Vec<Claim> {
        let cells = plan.cells(self);
        let [base, rows @ ..] = &original::TABLE[..] else { return Vec::new() };
        let mut claims = Vec::new();
        for row in rows {
            for (n, way) in TIMED[..2].iter().enumerate() {
                let named = |row: &original::Row| cell(way, &of_row(&cells, row.timeout));
                let pair = [named(row), named(base)];
                if !cells.contains(&pair[0]) {
                    continue;
                }
                let of = |row: &original::Row| if n == 0 { row.from_guest } else { row.to_guest };
                for (at, measure) in [(0, "seconds_1_gb"), (1, "frames_per_call")] {
                    let ratio = of(row)[at] / of(base)[at];
                    let what = ["seconds for 1 GB", "packets for each interrupt"][at];
                    let what = format!("{way}, time-out {}: {what}", row.timeout);
                    let pair = pair.clone();
                    claims.push(Claim::of_ratio(what, pair, measure, ratio, FACTS.margin));
                }
            }
        }
        claims
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let mut verdicts: Vec<Verdict> = rise(results).into_iter().collect();
        for (setting, what) in [("driver-poll=timer:1000", "calls"), ("poll=timer:1000", "kicks")] {
            verdicts.extend(fall(results, setting, what));
        }
        verdicts.extend(all_arrive(results));
        verdicts
    }
}

/// Frames per call of a guest that is always awake: a full ring.
const BEHIND: f64 = 256.0;

/// The cell of a kind of traffic and a setting.
fn cell(way: &str, setting: &str) -> Cell {
    let pairs = [("way", way), ("setting", setting)];
    Cell(pairs.map(|(name, value)| (name.into(), value.into())).into())
}

/// The median of a measure, if measured.
fn median(results: &Results, way: &str, setting: &str, measure: &str) -> Option<f64> {
    results.summary(&cell(way, setting), measure).map(|found| found.median)
}

/// Judges whether a time-out coalesces frames, as in the columns of packets per interrupt of the
/// original study. Only toward the guest, where bursts are largest. Guests of earlier folders
/// suppress calls while they are awake: with less than one call per [`BEHIND`] frames, nothing is
/// left to coalesce.
fn rise(results: &Results) -> Option<Verdict> {
    let way = TIMED[1];
    let of = |row| median(results, way, &of_row(results.cells(), row), "frames_per_call");
    let (before, with) = (of("before")?, of("1")?);
    Some(Verdict {
        what: format!(
            "{way}: a time-out coalesces frames: {before:.1} per call without, {with:.1} with"
        ),
        holds: Some(with > before || before >= BEHIND),
    })
}

/// Judges whether a timer avoids the notifications of its side.
fn fall(results: &Results, setting: &str, what: &str) -> Option<Verdict> {
    let of = |setting| median(results, "paced", setting, &format!("{what}_per_1000"));
    let (base, with) = (of(DEFAULT)?, of(setting)?);
    Some(Verdict {
        what: format!(
            "{setting} avoids at least {:.0} % of the {what}: {base:.0} per 1000 frames by \
             default, {with:.1} with it",
            100.0 * (1.0 - TIMER_LEAVES)
        ),
        holds: Some(with <= TIMER_LEAVES * base),
    })
}

/// Judges whether frames arrive with every setting.
fn all_arrive(results: &Results) -> Option<Verdict> {
    let paced = results.cells().into_iter().filter(|cell| cell.get("way") == "paced");
    let arrived = paced.filter_map(|cell| {
        let lost = results.summary(cell, "lost")?.median;
        Some((100.0 - lost, cell.get("setting").to_string()))
    });
    let (least, setting) = arrived.min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(Verdict {
        what: format!(
            "at least {ARRIVE_LEAST} % of {PACED} frames per second arrive with every setting: \
             least with {setting}, {least:.1} %"
        ),
        holds: Some(least >= ARRIVE_LEAST),
    })
}

#[cfg(test)]
mod tests;
