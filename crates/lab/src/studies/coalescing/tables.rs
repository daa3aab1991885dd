//! The report but for the TODO list: the seed's table beside ours, and settings.

use super::setting::{DEFAULT, SETTINGS, TIMEOUTS};
use super::{PACED, SET, TIMED, cell, median, seed};
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::store::Results;

const ABOUT: &str = "The seed's host told the guest of packets at once (before), when no more \
were coming (0), \
or after a time-out, fixed or divided by the packets that the guest had not been told of. Here \
that is the switch's \
call policy toward the guest. before: frames of the host are taken one at a time, --poll napi:1 \
at its port, and each \
is told of at once if the guest wants to be told, --call event. 0: as many as are there at a \
time, then one call; \
--poll event, --call event. 1: --call coalesce:200,65535, a call 200 us after the first frame or \
when the guest has no \
more buffers. N/pending: --call coalesce:200N/pending.

The seed does not say what its unit is. With an acknowledgement for every second packet of 1448 \
bytes, its interrupts \
were 74, 110, 204 and 436 us apart in the rows 1/pending, 2/pending, 5/pending and 1; multiplied \
by packets pending and \
divided by the row's number that is 140 to 440 us for one. We take 200 us.

The guest is a network namespace whose NIC asks for no calls while it is awake, as NAPI does. \
Segmentation offload is \
off on both sides, GRO too. Times are those that 1 GB, or a million pings, would take at the \
rate of the window.";

const ABOUT_SETTINGS: &str = "Two generators with one setting changed at a time, the switch \
polling as adaptive \
unless a setting says otherwise. bulk: as many frames of 60 bytes as pass; paced: 10,000 a \
second. Where the guests \
share one CPU, the receiver goes first if the system lets it.";

/// Parts of the report: those of which anything was measured.
pub fn parts(results: &Results) -> Vec<Part> {
    let text = |title: &str, body: &str| Part::Text { title: title.into(), body: body.into() };
    let cells = results.cells();
    let has = |way: &str| cells.iter().any(|cell| cell.get("way") == way);
    let mut parts = Vec::new();
    if TIMED.iter().any(|way| has(way)) {
        let time = ("Time for 1 GB of TCP, by time-out", "seconds-1-gb", "times the row before");
        let frames =
            ("Frames for each call, by time-out", "frames-per-call", "frames for each call");
        parts.extend([
            text("Time-outs: how to read this", ABOUT),
            Part::Table(timeouts(results)),
            Part::Plot(plot(results, time, "seconds_1_gb", true)),
            Part::Plot(plot(results, frames, "frames_per_call", false)),
            Part::Table(costs(results)),
        ]);
    }
    if SET.iter().any(|way| has(way)) {
        parts.push(text("Settings: how to read this", ABOUT_SETTINGS));
    }
    parts.extend(SET.iter().filter(|way| has(way)).map(|way| Part::Table(settings(results, way))));
    parts
}

fn value(results: &Results, way: &str, setting: &str, measure: &str, digits: usize) -> Value {
    match results.summary(&cell(way, setting), measure) {
        None => Value::Missing("not measured".into()),
        Some(found) if found.count == 1 => Value::Number(found.median, digits),
        Some(found) => {
            Value::Spread { median: found.median, low: found.low, high: found.high, digits }
        }
    }
}

/// The seed's layout, its figures beside ours.
fn timeouts(results: &Results) -> Table {
    let rows = seed::TABLE.iter().map(|row| {
        let ours = |way, measure, digits| value(results, way, row.timeout, measure, digits);
        let pings = row.pings.map_or_else(
            || Value::Missing("not in the seed".into()),
            |seconds| Value::Seed(seconds, 0),
        );
        vec![
            Value::Text(row.timeout.into()),
            Value::Seed(row.from_guest[0], 1),
            ours(TIMED[0], "seconds_1_gb", 2),
            Value::Seed(row.from_guest[1], 1),
            ours(TIMED[0], "frames_per_call", 1),
            Value::Seed(row.to_guest[0], 1),
            ours(TIMED[1], "seconds_1_gb", 2),
            Value::Seed(row.to_guest[1], 1),
            ours(TIMED[1], "frames_per_call", 1),
            pings,
            ours(TIMED[2], "seconds_1m_pings", 0),
        ]
    });
    Table {
        title: "Time-outs before a call".into(),
        note:
            "Seed: figures as printed there; it has pings in its text, where 1 GB from the guest \
               goes from 3.69 to 3.94 s between the same two rows. An interrupt is a call of the \
               receive ring here."
                .into(),
        columns: [
            "Time-out",
            "Seed: guest to host, s for 1 GB",
            "Guest to host, s for 1 GB",
            "Seed: packets/irq",
            "Frames/call",
            "Seed: host to guest, s for 1 GB",
            "Host to guest, s for 1 GB",
            "Seed: packets/irq, to guest",
            "Frames/call, to guest",
            "Seed: s for 1 M pings",
            "s for 1 M pings",
        ]
        .map(String::from)
        .into(),
        rows: rows.collect(),
        command: format!("pvswitch lab run coalescing --only way={}", TIMED.join(",")),
    }
}

/// What the same runs cost.
fn costs(results: &Results) -> Table {
    let mut rows = Vec::new();
    for way in TIMED {
        for timeout in &TIMEOUTS {
            let ours = |measure, digits| value(results, way, timeout.name, measure, digits);
            rows.push(vec![
                Value::Text(way.into()),
                Value::Text(timeout.name.into()),
                Value::Text(timeout.call.into()),
                ours("frames", 0),
                ours("guests_cpu", 0),
                ours("switch_cpu", 0),
                ours("kicks_per_1000", 1),
                ours("calls_per_1000", 1),
                ours("retransmits", 0),
                ours("round_trip", 0),
            ]);
        }
    }
    Table {
        title: "What time-outs cost".into(),
        note: "CPU in per cent of one CPU; kicks and calls of both rings, for 1000 frames both \
               ways. Frames are those to the guest."
            .into(),
        columns: [
            "Traffic",
            "Time-out",
            "Call policy",
            "Frames to the guest, 1/s",
            "Guest's CPU, %",
            "Switch's CPU, %",
            "Kicks/1000",
            "Calls/1000",
            "Retransmissions, 1/s",
            "Round trip of a ping, us",
        ]
        .map(String::from)
        .into(),
        rows,
        command: format!("pvswitch lab run coalescing --only way={}", TIMED.join(",")),
    }
}

/// Ours and the seed's over the rows, both ways; as they are, or times the first row.
fn plot(
    results: &Results,
    (title, file, y): (&str, &str, &str),
    measure: &str,
    relative: bool,
) -> Plot {
    let of_seed = |row: &seed::Row, way: usize| {
        let pair = if way == 0 { row.from_guest } else { row.to_guest };
        pair[usize::from(!relative)]
    };
    let mut series = Vec::new();
    for (colour, way) in TIMED[..2].iter().enumerate() {
        let base = if relative { median(results, way, "before", measure) } else { Some(1.0) };
        let ours = seed::TABLE.iter().enumerate().filter_map(|(x, row)| {
            let found = results.summary(&cell(way, row.timeout), measure)?;
            let by = |value: f64| value / base.unwrap_or(f64::NAN);
            let (y, low, high) = (by(found.median), by(found.low), by(found.high));
            y.is_finite().then_some(Point { x: x as f64, y, low, high })
        });
        let seeds = seed::TABLE.iter().enumerate().map(|(x, row)| {
            let by = if relative { of_seed(&seed::TABLE[0], colour) } else { 1.0 };
            let y = of_seed(row, colour) / by;
            Point { x: x as f64, y, low: y, high: y }
        });
        let words = way.replace('-', " ");
        let (ours, seeds) = (ours.collect(), seeds.collect());
        series.push(Series { name: words.clone(), points: ours, colour, ..Series::default() });
        series.push(Series {
            name: format!("seed, {words}"),
            points: seeds,
            colour,
            dashed: true,
            ..Series::default()
        });
    }
    series.retain(|line| !line.points.is_empty());
    Plot {
        title: title.into(),
        file: file.into(),
        x: "time-out".into(),
        categories: seed::TABLE.iter().map(|row| row.timeout.into()).collect(),
        y: y.into(),
        log: (false, !relative),
        series,
        command: format!("pvswitch lab run coalescing --only way={}", TIMED[..2].join(",")),
        ..Plot::default()
    }
}

/// One row for each setting that was measured.
fn settings(results: &Results, way: &str) -> Table {
    let ratio = |setting: &str, measure| {
        let of = |setting| median(results, way, setting, measure);
        match (of(setting), of(DEFAULT)) {
            (Some(with), Some(base)) if base > 0.0 => Value::Number(with / base, 2),
            _ => Value::Missing("not measured".into()),
        }
    };
    let cells = results.cells();
    let names = SETTINGS.iter().map(|setting| setting.name);
    let rows = names.filter(|name| cells.contains(&&cell(way, name))).map(|name| {
        let ours = |measure, digits| value(results, way, name, measure, digits);
        vec![
            Value::Text(name.into()),
            ours("frames", 0),
            ratio(name, "frames"),
            ours("guest_ns", 0),
            ratio(name, "guest_ns"),
            ours("switch_ns", 0),
            ratio(name, "switch_ns"),
            ours("kicks_per_1000", 2),
            ours("calls_per_1000", 2),
            ours("latency_p50", 0),
            ours("latency_p99", 0),
            ratio(name, "latency_p99"),
        ]
    });
    let load = if way == SET[0] {
        "as many frames as pass".into()
    } else {
        format!("{PACED} frames a second")
    };
    Table {
        title: format!("Settings one at a time, {way}: {load}"),
        note: "x: times the default. Whether a difference is more than chance is in the \
               comparisons of summary.json."
            .into(),
        columns: [
            "Setting",
            "Frames/s",
            "x",
            "Guests' CPU a frame, ns",
            "x",
            "Switch's CPU a frame, ns",
            "x",
            "Kicks/1000",
            "Calls/1000",
            "Latency p50, us",
            "p99, us",
            "x",
        ]
        .map(String::from)
        .into(),
        rows: rows.collect(),
        command: format!("pvswitch lab run coalescing --only way={way}"),
    }
}
