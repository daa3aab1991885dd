//! The report except the TODO list: the original table beside ours, and settings.

use super::setting::{DEFAULT, SETTINGS, TIMEOUTS, Timed, of_row};
use super::{PACED, SET, TIMED, cell, original, unit};
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::store::Results;

/// What the rows of the original table are here.
fn about(results: &Results) -> String {
    let measured = Timed::of(&of_row(results.cells(), "1"));
    let (suppresses, us) = measured.map_or((false, unit::us()), |timed| {
        let us = timed.unit_us();
        (timed.suppresses, us)
    });
    let guest = if suppresses {
        "The guest is a network namespace whose NIC suppresses calls while it is awake, like NAPI: \
         these runs are of an earlier version, which had no other guest, and a unit of 200 us."
    } else {
        "The guest is a network namespace whose NIC never suppresses calls, --set suppress=none: \
         it is called for each frame or group that the switch publishes, awake or not, and for \
         each that the switch has taken. (On Xen rings calls have an index only, which the NIC \
         sets before it sleeps.)"
    };
    format!(
        "The host of the original study interrupted the guest at once for each packet (before), \
         when no more packets were pending (0), or after a time-out, fixed or divided by the \
         number of pending packets. Here this is the switch's call policy toward the guest. \
         before: frames of the host are taken one at a time, --poll napi:1 at its port, and the \
         guest is called at once for each, --call event. 0: all available frames are taken, then \
         one call; --poll event, --call event. 1: --call coalesce:{us},65535, a call {us} us after \
         the first frame or when the guest has no more buffers. N/pending: --call \
         coalesce:{us}N/pending.\n\n{guest} Segmentation offload and GRO are off on both sides. \
         Times are extrapolated to 1 GB, or a million pings, from the rate measured."
    )
}

/// How the unit follows from the original study's figures.
fn about_unit() -> String {
    let fit = unit::fitted();
    let pings = unit::of_pings(&original::TABLE);
    let of_pings: Vec<_> = pings
        .iter()
        .map(|row| format!("{}: {:.0} units = {:.0} us", row.timeout, row.units, row.us))
        .collect();
    format!(
        "The original study does not define its unit, and its pings do not determine it: it \
         published them for the rows {}, and no ping waits for any time-out there. The equations \
         of the unit are {}; its coefficient is zero in all, so every unit fits them alike. (The \
         6 us of the row 0 are its query for further packets.) The unit is fitted to the packets \
         for each interrupt of TCP from the guest instead, by least squares: an interrupt is for \
         one packet and all that arrive within its time-out, so with packets at the mean rate the \
         first one waited packets - 1 times their distance. Toward the guest packets arrive in \
         bursts, of 23.5 without any time-out, to which this does not apply. One unit is {:.0} us, \
         with a residual of {:.0} us (root mean square): within a factor of two, the rows do not \
         agree on one.",
        pings.iter().map(|row| row.timeout).collect::<Vec<_>>().join(" and "),
        of_pings.join(", "),
        fit.us,
        fit.residual_us,
    )
}

/// The equations of the unit, and what the fit leaves of each.
fn equations() -> Table {
    let fit = unit::fitted();
    let row = |row: &unit::Equation| {
        let fitted = fit.us * row.units;
        vec![
            Value::Text(row.timeout.into()),
            Value::Number(row.units, 2),
            Value::Number(row.us, 0),
            Value::Number(fitted, 0),
            Value::Number(row.us - fitted, 0),
        ]
    };
    Table {
        title: "The unit of time-outs".into(),
        note: about_unit(),
        columns: ["Time-out", "Units waited", "Original: us waited", "Fitted, us", "Residual, us"]
            .map(String::from)
            .into(),
        rows: fit.equations.iter().map(row).collect(),
        command: "pvswitch lab report".into(),
    }
}

const ABOUT_SETTINGS: &str = "\
Two generators with one setting changed at a time; the switch polls as adaptive unless a setting \
says otherwise. bulk: frames of 60 bytes at saturation; paced: 10,000 per second. Where the \
guests share one CPU, the receiver has a higher scheduling priority if the system permits it.";

/// Parts of the report: those of which anything was measured.
pub fn parts(results: &Results) -> Vec<Part> {
    let text = |title: &str, body: &str| Part::Text { title: title.into(), body: body.into() };
    let cells = results.cells();
    let has = |way: &str| cells.iter().any(|cell| cell.get("way") == way);
    let mut parts = Vec::new();
    if TIMED.iter().any(|way| has(way)) {
        let time = Plot {
            title: "Time for 1 GB of TCP, by time-out".into(),
            file: "seconds-1-gb".into(),
            y: "times the row before".into(),
            ..plot(results, "seconds_1_gb", true)
        };
        let frames = Plot {
            title: "Frames for each call, by time-out".into(),
            file: "frames-per-call".into(),
            y: "frames for each call".into(),
            ..plot(results, "frames_per_call", false)
        };
        parts.extend([
            text("Time-outs: how to read this", &about(results)),
            Part::Table(equations()),
            Part::Table(timeouts(results)),
            Part::Plot(time),
            Part::Plot(frames),
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
    Value::estimate(results.estimate(&cell(way, setting), measure), digits, "not measured")
}

/// The original study's layout, its figures beside ours.
fn timeouts(results: &Results) -> Table {
    let rows = original::TABLE.iter().map(|row| {
        let setting = of_row(results.cells(), row.timeout);
        let ours = |way, measure, digits| value(results, way, &setting, measure, digits);
        let pings = row.pings.map_or_else(
            || Value::Missing("not in the original study".into()),
            |seconds| Value::Original(seconds, 0),
        );
        vec![
            Value::Text(row.timeout.into()),
            Value::Original(row.from_guest[0], 1),
            ours(TIMED[0], "seconds_1_gb", 2),
            Value::Original(row.from_guest[1], 1),
            ours(TIMED[0], "frames_per_call", 1),
            Value::Original(row.to_guest[0], 1),
            ours(TIMED[1], "seconds_1_gb", 2),
            Value::Original(row.to_guest[1], 1),
            ours(TIMED[1], "frames_per_call", 1),
            pings,
            ours(TIMED[2], "seconds_1m_pings", 0),
        ]
    });
    Table {
        title: "Time-outs before a call".into(),
        note: "Original: figures as published. Pings are from its text, where 1 GB from the guest \
             takes 3.69 and 3.94 s in the same two rows. An interrupt corresponds to a call of the \
             receive ring."
            .into(),
        columns: [
            "Time-out",
            "Original: guest to host, s for 1 GB",
            "Guest to host, s for 1 GB",
            "Original: packets/irq",
            "Frames/call",
            "Original: host to guest, s for 1 GB",
            "Host to guest, s for 1 GB",
            "Original: packets/irq, to guest",
            "Frames/call, to guest",
            "Original: s for 1 M pings",
            "s for 1 M pings",
        ]
        .map(String::from)
        .into(),
        rows: rows.collect(),
        command: format!("pvswitch lab run coalescing --only way={}", TIMED.join(",")),
    }
}

/// Costs of the same runs.
fn costs(results: &Results) -> Table {
    let mut rows = Vec::new();
    for way in TIMED {
        for timeout in &TIMEOUTS {
            let setting = of_row(results.cells(), timeout.name);
            let ours = |measure, digits| value(results, way, &setting, measure, digits);
            let call = Timed::of(&setting).map_or_else(|_| String::new(), |timed| timed.call());
            rows.push(vec![
                Value::Text(way.into()),
                Value::Text(timeout.name.into()),
                Value::Text(call),
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
        note: "CPU in per cent of one CPU; kicks and calls of both rings, per 1000 frames in both \
               directions. Frames are those to the guest."
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

/// Ours and the original study's over the rows, both ways; as they are, or times the first row.
/// Without titles.
fn plot(results: &Results, measure: &str, relative: bool) -> Plot {
    let of_original = |row: &original::Row, way: usize| {
        let pair = if way == 0 { row.from_guest } else { row.to_guest };
        pair[usize::from(!relative)]
    };
    let mut series = Vec::new();
    for (colour, way) in TIMED[..2].iter().enumerate() {
        let ours = original::TABLE.iter().enumerate().filter_map(|(x, row)| {
            let named = |row| cell(way, &of_row(results.cells(), row));
            let here = named(row.timeout);
            let found = if relative {
                results.ratio(&here, &named("before"), measure)
            } else {
                results.estimate(&here, measure)
            };
            Some(Point::of(x as f64, found?))
        });
        let originals = original::TABLE.iter().enumerate().map(|(x, row)| {
            let by = if relative { of_original(&original::TABLE[0], colour) } else { 1.0 };
            let y = of_original(row, colour) / by;
            Point::at(x as f64, y)
        });
        let words = way.replace('-', " ");
        let (ours, originals) = (ours.collect(), originals.collect());
        series.push(Series { name: words.clone(), points: ours, colour, ..Series::default() });
        series.push(Series {
            name: format!("original, {words}"),
            points: originals,
            colour,
            dashed: true,
            ..Series::default()
        });
    }
    series.retain(|line| !line.points.is_empty());
    Plot {
        x: "time-out".into(),
        categories: original::TABLE.iter().map(|row| row.timeout.into()).collect(),
        log: (false, !relative),
        level: relative.then_some(1.0),
        series,
        command: format!("pvswitch lab run coalescing --only way={}", TIMED[..2].join(",")),
        ..Plot::default()
    }
}

/// One row for each setting that was measured.
fn settings(results: &Results, way: &str) -> Table {
    let ratio = |setting: &str, measure| {
        let found = results.ratio(&cell(way, setting), &cell(way, DEFAULT), measure);
        Value::estimate(found, 2, "not measured")
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
    let load =
        if way == SET[0] { "saturated".into() } else { format!("{PACED} frames per second") };
    Table {
        title: format!("Settings one at a time, {way}: {load}"),
        note: "x: ratio to the default, median of pairs. 'All comparisons' has the tests.".into(),
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
