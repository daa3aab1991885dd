//! `receivers`: effect of a slow or stalled receiver on another receiver of the same sender.

use std::net::{Ipv4Addr, SocketAddr};

use super::pair::{self, WARM_S, receiver_class, worker_percent};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{
    Datagrams, Gen, Link, NicOptions, Port, Proto, Stage, Switch, Window, Wire, sleep,
};
use crate::stats::Summary;
use crate::stats::paired::Estimate;
use crate::store::{Comparison, Results};
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// Numbers of the guests: sender, fast receiver, other receiver.
const SENDER: usize = 0;
const FAST: usize = 1;
const OTHER: usize = 2;
/// Name of the other receiver's port.
const PORT: &str = "other0";
/// Frames in a cycle of the sender if a share is 10 or 90 %.
const CYCLE: usize = 10;
/// Rate of a paced sender, in frames per second: of a guest, and of the kernel.
const PACED_RATES: (u32, u32) = (200_000, 40_000);
/// Smallest share of its rate beside another fast receiver that the fast receiver must keep.
const KEPT_MIN: f64 = 0.9;
/// Pairs of runs that a verdict needs.
const PAIRS_MIN: usize = 5;

const ABOUT: &str = "\
One sender, two receivers. The sender sends frames of 60 bytes, paced (200,000 per second, the \
kernel 40,000) or as fast as it can (flood); 10, 50 or 90 % of them (share) go to the other \
receiver. That is a guest as fast as the first (sink), a port that drops everything (null), a \
guest that posts a tenth of the buffers it needs (slow), one every 45 ms (dripping) or none \
(silent). The sender is a guest with a split or packed virtqueue or with Xen rings, like both \
receivers, or the kernel's network stack behind a TAP interface, whose datagrams go to guests \
with split virtqueues. On a machine with two CPUs all guests share one, which limits a flood: \
beside null, which uses none of it, the rate is higher than beside any guest.";

const MEASURES: [Measure; 6] = [
    Measure::new("fast", "1/s", Better::More, "frames given to the fast receiver"),
    Measure::new("to_other", "1/s", Better::Neither, "frames given to the other receiver"),
    Measure::new("taken", "1/s", Better::More, "frames taken from the sender"),
    Measure::new("other_lost", "1/s", Better::Neither, "frames lost at the other receiver"),
    Measure::new("pauses", "", Better::Less, "times that the sender was paused"),
    Measure::new("cpu", "%", Better::Less, "CPU time of the worker, of one CPU"),
];

/// The study.
pub struct Receivers;

const FACTS: Facts = Facts {
    name: "receivers",
    about: "effect of a slow receiver on another receiver of the same sender",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &["ip"],
    together: None,
    // A fast receiver keeps 90 % of its rate.
    margin: 1.11,
    control: &[("load", "paced"), ("share", "50")],
};

impl Study for Receivers {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let senders = ["split", "xen", "tap", "packed"];
        let shares = ["10", "50", "90"];
        let loads = ["paced", "flood"];
        let others = ["sink", "null", "slow", "dripping", "silent"];
        let few = ["sink", "dripping"];
        let (senders, loads, shares, others, seconds, repeats) = match scale {
            Scale::Smallest => (&senders[..1], &loads[..1], &shares[1..2], &few[..], 0.5, 1),
            Scale::Quick => (&senders[..3], &loads[..], &shares[1..2], &few[..], 1.0, 1),
            Scale::Usual => (&senders[..], &loads[..], &shares[..], &others[..], 1.0, 1),
            Scale::Full => (&senders[..], &loads[..], &shares[..], &others[..], 5.0, 1),
        };
        let axes = vec![
            Axis::new("sender", senders),
            Axis::new("load", loads),
            Axis::new("share", shares),
            Axis::new("other", others),
        ];
        Plan::new(FACTS.name, repeats, seconds, axes).with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        cell.get("load") == "flood" || cell.get("other") != "null"
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        1.5
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        measure(run)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let about = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        std::iter::once(about).chain(table(results)).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        ["paced", "flood"].into_iter().filter_map(|load| judged(results, load)).collect()
    }
}

/// Returns protocol and options of the guests of a cell.
fn guests(cell: &Cell) -> Result<(Proto, NicOptions), Fail> {
    let guest = pair::guest_options();
    match cell.get("sender") {
        "split" | "tap" => Ok((Proto::Virtio, guest)),
        "packed" => Ok((Proto::Virtio, NicOptions { more: vec!["--packed".into()], ..guest })),
        "xen" => Ok((Proto::Xen, guest)),
        sender => Err(Fail::Cell(format!("unknown sender {sender}"))),
    }
}

/// Frames of a cycle.
#[derive(Clone, Copy)]
struct Parts {
    /// To the fast receiver.
    fast: usize,
    /// To the other.
    other: usize,
}

/// Returns how many frames per cycle go to each receiver.
fn parts(cell: &Cell) -> Result<Parts, Fail> {
    match cell.get("share") {
        "10" => Ok(Parts { fast: CYCLE - 1, other: 1 }),
        "50" => Ok(Parts { fast: 1, other: 1 }),
        "90" => Ok(Parts { fast: 1, other: CYCLE - 1 }),
        share => Err(Fail::Cell(format!("unknown share {share}: use 10, 50 or 90"))),
    }
}

/// Returns the case of `gen --mode hostile` for the other receiver; `None` if it is well-behaved.
fn case(cell: &Cell) -> Option<String> {
    let name = match cell.get("other") {
        "null" | "sink" => return None,
        name => name,
    };
    Some(format!("{}{name}", if cell.get("sender") == "xen" { "vif-" } else { "" }))
}

fn measure(run: &Run) -> Result<Figures, Fail> {
    let (stage, cell) = (run.stage, run.cell);
    let ((proto, guest), parts) = (guests(cell)?, parts(cell)?);
    let paced = cell.get("load") == "paced";
    let wire = if cell.get("sender") == "tap" { Some(Wire::new(stage, Link::Tap)?) } else { None };
    let from = match &wire {
        Some(wire) => wire.port(""),
        None => Port::guest(stage, "from", proto, ""),
    };
    let fast = Port::guest(stage, "fast", proto, "");
    let (others, target) = if cell.get("other") == "null" {
        (vec![Port::null(PORT)], None)
    } else {
        let (ports, target) = Port::many(stage, PORT.trim_end_matches('0'), proto, 1)?;
        (ports, Some(target))
    };
    let ports = [&[from.clone(), fast.clone()], &others[..]].concat();
    let switch = Switch::start(stage, &pair::switch_options(stage, "adaptive"), &ports)?;
    // A receiver that sends nothing is not learned.
    switch.add_static_mac(&Gen::mac(OTHER), PORT)?;
    switch.add_static_mac(&Gen::mac(FAST), "fast")?;
    let class = receiver_class(stage);
    let mut receivers = vec![Gen::start_as(stage, FAST, &fast, &guest, "sink", class)?];
    if let Some(case) = case(cell) {
        let mode = format!("hostile={case} --peer {}", Gen::mac(SENDER));
        let target = target.as_ref().unwrap_or(&others[0]);
        receivers.push(Gen::start_as(stage, OTHER, target, &guest, &mode, class)?);
    } else if target.is_some() {
        receivers.push(Gen::start_as(stage, OTHER, &others[0], &guest, "sink", class)?);
    }
    let up = 2 + usize::from(wire.is_some());
    switch.wait_up_while(up, || receivers.iter_mut().try_for_each(Gen::check))?;
    // Each sends until it is dropped.
    let (mut _kernel, mut _guest) = (None, None);
    if let Some(wire) = &wire {
        _kernel = Some(datagrams(stage, wire, parts, paced)?);
    } else {
        let mut sender = Gen::start(stage, SENDER, &from, &guest, &mode(parts, paced))?;
        switch.wait_up_while(3, || sender.check())?;
        _guest = Some(sender);
    }
    sleep(WARM_S);
    let window = Window::open(&switch, &[])?;
    sleep(run.seconds);
    let count = window.close()?;
    switch.check()?;
    receivers.iter_mut().try_for_each(Gen::check)?;
    Ok(Figures::from([
        ("fast", count.per_second(count.egress("fast", "frames"))),
        ("to_other", count.per_second(count.egress(PORT, "frames"))),
        ("taken", count.per_second(count.ingress(&from.name, "frames"))),
        ("other_lost", count.per_second(count.drops(PORT, PORT))),
        ("pauses", count.ingress(&from.name, "pauses")),
        ("cpu", worker_percent(&count)),
    ]))
}

/// Returns the mode of `gen` that sends `fast` frames to one receiver, then `other` to the other.
fn mode(parts: Parts, paced: bool) -> String {
    let Parts { fast, other } = parts;
    let (fast_mac, other_mac) = (Gen::mac(FAST), Gen::mac(OTHER));
    let rate = if paced { format!(" --rate {}", PACED_RATES.0) } else { String::new() };
    if fast >= other {
        format!("send --peer {fast_mac} --also {other_mac},{fast}{rate}")
    } else {
        format!("send --peer {other_mac} --also {fast_mac},{other}{rate}")
    }
}

/// Starts the same traffic from the kernel.
fn datagrams(stage: &Stage, wire: &Wire, parts: Parts, paced: bool) -> Result<Datagrams, Fail> {
    wire.up()?;
    let address = |guest: usize| Ipv4Addr::new(10, 9, 200, guest as u8);
    for guest in [FAST, OTHER] {
        let (ip, mac, device) = (address(guest), Gen::mac(guest), wire.device());
        wire.netns.ip(&format!("neigh add {ip} lladdr {mac} dev {device} nud permanent"))?;
    }
    let to = |guest: usize| SocketAddr::from((address(guest), 9));
    let turn = [vec![to(FAST); parts.fast], vec![to(OTHER); parts.other]].concat();
    Datagrams::start(&wire.netns, &stage.guest_cpus, &turn, paced.then_some(PACED_RATES.1))
}

/// Whether the other receiver is slow or stalled.
fn is_slow(comparison: &Comparison) -> bool {
    !["null", "sink"].contains(&comparison.value.as_str())
}

fn judged(results: &Results, load: &str) -> Option<Verdict> {
    let wanted = |of: &Comparison| is_slow(of) && of.cell.get("load") == load;
    let compared = results.compare("fast", &Receivers).into_iter();
    let slow: Vec<Comparison> = compared.filter(wanted).collect();
    let ratio = |of: &Comparison| of.ratio.map(|ratio| ratio.median);
    let ratios: Vec<f64> = slow.iter().filter_map(ratio).collect();
    let of = Summary::of(&ratios)?;
    let pairs = slow.iter().map(|comparison| comparison.pairs).min().unwrap_or(0);
    let bad = slow.iter().filter(|comparison| ratio(comparison).is_none_or(|is| is < KEPT_MIN));
    let bad: Vec<String> =
        bad.map(|comparison| format!("{} {}", comparison.cell, comparison.value)).collect();
    Some(Verdict {
        what: format!(
            "{load}: beside a slow receiver a fast one keeps {:.0} % or more of what it gets \
             beside another fast one: medians of {pairs} pairs in {} places, {:.2} to {:.2}{}{}{}",
            100.0 * KEPT_MIN,
            of.count,
            of.low,
            of.high,
            if bad.is_empty() { "" } else { "; failed: " },
            bad.join(", "),
            if pairs < PAIRS_MIN { "; too few pairs for a verdict" } else { "" },
        ),
        holds: (pairs >= PAIRS_MIN).then_some(bad.is_empty()),
    })
}

fn table(results: &Results) -> Option<Part> {
    let mut rows = Vec::new();
    for comparison in results.compare("fast", &Receivers) {
        let here = |cell: &Cell, other: &str| {
            cell.outer() == &comparison.cell.0[..] && cell.get("other") == other
        };
        let of = |measure: &str, other: &str| {
            let values = results.values(|cell| here(cell, other), measure);
            super::grid::shown(Estimate::of(&values))
        };
        let value = comparison.value.as_str();
        let kept = Value::estimate(comparison.ratio, 2, "nothing to compare with");
        let is_kept = comparison.ratio.is_some_and(|ratio| ratio.median >= KEPT_MIN);
        rows.push(vec![
            Value::Text(comparison.cell.get("sender").into()),
            Value::Text(comparison.cell.get("load").into()),
            Value::Text(comparison.cell.get("share").into()),
            Value::Text(value.into()),
            of("fast", &comparison.base),
            of("fast", value),
            kept,
            Value::Text(if is_kept { "yes" } else { "no" }.into()),
            of("to_other", value),
            of("pauses", value),
        ]);
    }
    let columns = [
        "sender",
        "load",
        "% to the other",
        "the other is",
        "fast, frames/s, other sink",
        "fast, frames/s",
        "ratio",
        "0.9 or more",
        "other, frames/s",
        "pauses",
    ];
    let table = Table {
        title: "Frames to a fast receiver beside another".into(),
        note: "Medians; ratios are medians of pairs, runs side by side.".into(),
        columns: columns.map(String::from).into(),
        rows,
        command: "pvswitch lab run receivers".into(),
    };
    (!table.rows.is_empty()).then_some(Part::Table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(sender: &str, share: &str, other: &str) -> Cell {
        let pairs = [("sender", sender), ("share", share), ("other", other)];
        Cell(pairs.map(|(axis, value)| (axis.to_string(), value.to_string())).into())
    }

    #[test]
    fn shares_are_fractions_of_the_sent_frames() {
        for (share, other) in [("10", 0.1), ("50", 0.5), ("90", 0.9)] {
            let parts = parts(&cell("split", share, "slow")).unwrap();
            assert!(
                (parts.other as f64 / (parts.fast + parts.other) as f64 - other).abs() < 1e-9,
                "{share}"
            );
        }
        assert!(parts(&cell("split", "100", "slow")).is_err());
        let mode = |fast, other| mode(Parts { fast, other }, false);
        assert!(mode(1, 9).ends_with(&format!("--also {},9", Gen::mac(FAST))));
        assert!(mode(9, 1).ends_with(&format!("--also {},9", Gen::mac(OTHER))));
    }

    #[test]
    fn every_slow_receiver_is_a_hostile_case_of_its_ring() {
        let plan = Receivers.plan(Scale::Full);
        for (sender, ring) in [("split", "split"), ("packed", "packed"), ("xen", "xen")] {
            let ring = ring.parse().unwrap();
            for other in &plan.axes[3].values {
                let Some(name) = case(&cell(sender, "50", other)) else { continue };
                assert!(hostile::cases_of(ring).any(|case| case.name == name), "{name}");
            }
        }
    }
}
