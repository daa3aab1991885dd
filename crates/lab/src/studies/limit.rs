//! `limit`: the switch beside the limit of the machine, one copy between two cores.

use super::grid::{has, shown};
use super::pair::{self, WARM_S};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{Gen, NicOptions, Port, Proto, Stage, Switch, SwitchOptions, Window, sleep};
use crate::stats::paired::{Estimate, INTERVAL_MIN};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod copy;

/// The base: no switch.
const COPY: &str = "copy";
/// Rings of the guests, with the options of `gen`.
const RINGS: [(&str, &str); 4] = [
    ("split", ""),
    ("in-order", "--in-order"),
    ("packed", "--packed"),
    ("packed-in-order", "--packed --in-order"),
];
/// Ways to forward, as in the cells, with the argument of `--forward`.
const FORWARDS: [(&str, &str); 2] = [("cross", "cross"), ("learning", "switch")];
/// Setting of the guests: 52 bytes before a header of 12, so that the frame begins a cache line.
const HEADER_ENDS_LINE: &str = "offset=52";
/// Promises: smallest fraction of the limit, by bytes of a frame.
const PROMISES: [(&str, f64); 2] = [("64", 0.35), ("1518", 0.85)];

const ABOUT: &str = "\
How much of what the machine can do the switch does. copy: one core writes frames into slots of \
2048 bytes, another copies each once to other slots, and the first reads the copies; nothing \
else: an index is published for 32 frames. RING-cross and RING-learning: the same two cores, \
frames and memory with guests' rings in between: a thread with both guests (gen --mode pass) \
writes each frame into a buffer and reads what arrives, and the switch's worker (poll policy \
spin) forwards it, between two ports or by addresses. Rings have 1024 entries, as many as there \
are slots. In both, two cores touch every byte of a frame: the guests' core writes it and reads \
the copy, the switch's core reads it and writes the copy. In addition, a ring's frame has a \
header of 12 bytes, descriptors, and available and used entries. As with DPDK's driver, the \
header ends a cache line, and is stored only where it differs. Sizes are without FCS. A \
fraction is the median of the ratios of pairs, runs of one round. Guests idle: time in which the \
guests' core found neither a frame to read nor room to write one; where there is almost none, \
that core is the limit, not the switch.";

const MEASURES: [Measure; 8] = [
    Measure::new("frames", "1/s", Better::More, "frames of which every byte was written and read"),
    Measure::new("payload", "Gbit/s", Better::More, "their bytes"),
    Measure::new("guests_idle", "%", Better::Neither, "time of the guests' core without work"),
    Measure::new("burst", "frames", Better::Neither, "frames that the switch took at once"),
    Measure::new("sent", "", Better::Neither, "frames sent, warm-up included"),
    Measure::new("received", "", Better::Neither, "frames received, warm-up included"),
    Measure::new("unaccounted", "", Better::Less, "frames neither received nor in a drop counter"),
    Measure::new("gaps", "", Better::Less, "frames out of order, or of another length"),
];

/// The study.
pub struct Limit;

const FACTS: Facts = Facts {
    name: "limit",
    about: "how near the switch comes to one copy between two cores without any protocol",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &[],
    together: None,
    // A twentieth is the least that a promise depends on.
    margin: 1.05,
    control: &[("size", "64")],
};

impl Study for Limit {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let sizes = PROMISES.map(|(size, _)| size);
        let mut paths = vec![COPY.to_string()];
        for (ring, _) in RINGS {
            paths.extend(FORWARDS.map(|(forward, _)| format!("{ring}-{forward}")));
        }
        let (sizes, paths, seconds) = match scale {
            Scale::Smallest => (&sizes[..1], &paths[..3], 0.2),
            Scale::Quick => (&sizes[..], &paths[..], 0.5),
            Scale::Usual => (&sizes[..], &paths[..], 0.8),
            Scale::Full => (&sizes[..], &paths[..], 5.0),
        };
        let axes = vec![Axis::new("size", sizes), Axis::new("path", paths)];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        if cell.get("path") == COPY { WARM_S } else { pair::OVERHEAD_S }
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let cpus = run.stage.switch_cpus.first().zip(run.stage.guest_cpus.last());
        let Some((switch, guests)) = cpus.filter(|(switch, guests)| switch != guests) else {
            let what = "two CPUs are needed, one for the guests and one for the switch";
            return Err(Fail::Missing(what.into()));
        };
        let size = run.cell.get("size");
        let Ok(bytes) = size.parse::<u32>() else {
            return Err(Fail::Cell(format!("size {size}: use a number of bytes")));
        };
        let mut figures = match run.cell.get("path") {
            COPY => copied(bytes, *guests, *switch, run.seconds)?,
            path => forwarded(run.stage, path, bytes, *guests, run.seconds)?,
        };
        figures.insert("payload", figures["frames"] * f64::from(bytes) * 8.0 / 1e9);
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        vec![text, Part::Table(table(results))]
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let gaps = results.values(|_| true, "gaps");
        let most = gaps.iter().copied().max_by(f64::total_cmp);
        let whole = most.map(|most| Verdict {
            what: format!(
                "every frame arrives whole and in order: {} runs, most out of order in one: {most}",
                gaps.len()
            ),
            holds: Some(most == 0.0),
        });
        [pair::accounted(results), whole].into_iter().flatten().collect()
    }
}

/// Returns figures of one copy.
fn copied(bytes: u32, guests: usize, switch: usize, seconds: f64) -> Result<Figures, Fail> {
    let copy::Copied { frames, counts } = copy::measure(bytes, guests, switch, WARM_S, seconds)?;
    Ok(Figures::from([
        ("frames", frames),
        ("guests_idle", percent(counts.idle.as_secs_f64(), counts.all.as_secs_f64())),
        ("sent", counts.sent as f64),
        ("received", counts.received as f64),
        ("unaccounted", counts.sent as f64 - counts.received as f64),
        ("gaps", counts.gaps as f64),
    ]))
}

/// Returns figures of the switch between two guests.
fn forwarded(
    stage: &Stage,
    path: &str,
    bytes: u32,
    guests: usize,
    seconds: f64,
) -> Result<Figures, Fail> {
    let (ring, forward) = of_path(path)?;
    let (ports, pattern) = Port::many(stage, "p", Proto::Virtio, 2)?;
    let options = SwitchOptions { forward: forward.into(), ..SwitchOptions::new(stage, "spin") };
    let switch = Switch::start(stage, &options, &ports)?;
    let all = Window::open(&switch, &[])?;
    let size = copy::SLOTS.to_string();
    let more = ["--queue-size", &size].into_iter().chain(ring.split_whitespace());
    let more = more.map(String::from).collect();
    let set = vec![HEADER_ENDS_LINE.into()];
    let options = NicOptions { set, more, ..NicOptions::new("") };
    let mode = format!("pass --size {bytes} --peer {}", Gen::mac(1));
    let mut both = Gen::start_on(stage, &[guests], 0, &pattern, &options, &mode)?;
    switch.wait_up_while(2, || both.check())?;
    sleep(WARM_S);
    let window = Window::open(&switch, &[])?;
    sleep(seconds);
    let count = window.close()?;
    let report = both.end()?;
    let drops = all.close()?.drops("p0", "p1");
    switch.check()?;
    let number = |name: &str| pair::number(&report, name);
    let (sent, received) = (number("sent_frames"), number("received_frames"));
    Ok(Figures::from([
        // A frame that was written into a receive buffer is read before the buffer is used again.
        ("frames", count.per_second(count.egress("p1", "frames"))),
        ("guests_idle", percent(number("idle_s"), number("duration_s"))),
        ("burst", count.ingress("p0", "frames") / count.ingress("p0", "bursts").max(1.0)),
        ("sent", sent),
        ("received", received),
        ("unaccounted", sent - received - drops),
        ("gaps", number("gaps") + number("foreign_frames")),
    ]))
}

fn percent(part: f64, whole: f64) -> f64 {
    100.0 * part / whole.max(f64::MIN_POSITIVE)
}

/// Returns the option of `gen` and the argument of `--forward` of a path.
fn of_path(path: &str) -> Result<(&'static str, &'static str), Fail> {
    let find = |known: &[(&str, &'static str)], name| {
        known.iter().find(|(known, _)| *known == name).map(|(_, option)| *option)
    };
    let found = path
        .rsplit_once('-')
        .and_then(|(ring, forward)| Some((find(&RINGS, ring)?, find(&FORWARDS, forward)?)));
    found.ok_or_else(|| Fail::Cell(format!("unknown path {path}")))
}

/// Returns the state of a promise in the words of SPEC.md: met if the whole interval is.
fn state(fraction: &Estimate, promise: f64) -> &'static str {
    if fraction.median < promise {
        "not met"
    } else if fraction.count >= INTERVAL_MIN && fraction.low >= promise {
        "met"
    } else {
        "cannot tell"
    }
}

fn table(results: &Results) -> Table {
    let mut rows = Vec::new();
    for cell in results.cells() {
        let (size, path) = (cell.get("size"), cell.get("path"));
        let promise = PROMISES.iter().find(|(known, _)| *known == size);
        let promise = promise.map(|(_, promise)| *promise);
        let base = cell.with("path", COPY);
        let fraction = results.ratio(cell, &base, "frames").filter(|_| path != COPY);
        let of = |measure| {
            let values = results.values(|c| has(c, &[("size", size), ("path", path)]), measure);
            shown(Estimate::of(&values))
        };
        let judged = fraction.zip(promise);
        rows.push(vec![
            Value::Text(size.into()),
            Value::Text(path.into()),
            of("frames"),
            of("payload"),
            Value::estimate(fraction, 3, "the limit itself"),
            promise.map_or(Value::Missing("none".into()), |promise| Value::Number(promise, 2)),
            Value::Text(judged.map_or("", |(fraction, promise)| state(&fraction, promise)).into()),
            of("guests_idle"),
            of("burst"),
        ]);
    }
    let columns = [
        "bytes",
        "path",
        "frames/s",
        "Gbit/s",
        "of the limit",
        "promise",
        "state",
        "guests idle, %",
        "burst",
    ];
    Table {
        title: "Fraction of the limit".into(),
        note: "Met: the whole interval of five pairs or more is as promised. Not met: the median \
               is not."
            .into(),
        columns: columns.map(String::from).into(),
        rows,
        command: "pvswitch lab run limit".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_a_ring_and_a_way_to_forward() {
        let plan = Limit.plan(Scale::Full);
        let paths = &plan.axes[1].values;
        assert_eq!((paths.len(), paths[0].as_str()), (9, COPY));
        for path in &paths[1..] {
            assert!(of_path(path).is_ok(), "{path}");
        }
        assert_eq!(of_path("in-order-learning").unwrap(), ("--in-order", "switch"));
        assert_eq!(of_path("packed-in-order-cross").unwrap(), ("--packed --in-order", "cross"));
        for path in ["split", "in-order", "split-x", "x-cross", "copy"] {
            assert!(of_path(path).is_err(), "{path}");
        }
    }

    #[test]
    fn a_promise_is_met_by_a_whole_interval() {
        let of = |median, low, count| Estimate {
            count,
            median,
            low,
            high: 1.0,
            interval: count >= INTERVAL_MIN,
        };
        assert_eq!(state(&of(0.5, 0.4, 10), 0.35), "met");
        assert_eq!(state(&of(0.5, 0.3, 10), 0.35), "cannot tell");
        assert_eq!(state(&of(0.5, 0.4, 4), 0.35), "cannot tell");
        assert_eq!(state(&of(0.3, 0.2, 1), 0.35), "not met");
    }
}
