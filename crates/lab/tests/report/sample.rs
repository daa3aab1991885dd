//! A report with what the studies show, and figures of the size they have.

use pvswitch_lab::report::{
    Conclusion, Document, Part, Plot, Point, Series, Table, Value, Warning,
};
use pvswitch_lab::report::{Original, Verdict};
use pvswitch_lab::stats::paired::Estimate;

pub const COMMAND: &str = "pvswitch lab run fairness --quick --only guests=1,2 --seconds 5";

pub fn document() -> Document {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    Document {
        title: "fairness".into(),
        question: "Does one guest get less when others send, and what does it cost?".into(),
        original: Some(Original {
            source: "Xen wiki, \"Xen-netback NAPI + kThread V3 performance testing\", 2013",
            claim: "No appreciable difference when the guest receives; above four guests the \
                    unpatched kernel performs better with one or two streams.",
        }),
        command: COMMAND.into(),
        machine: vec![
            pair("CPU", "Intel(R) Xeon(R) Processor @ 2.70GHz, 2 CPUs"),
            pair("Kernel", "6.1.0-18-amd64"),
            pair("Mitigations", "spectre_v2: Mitigation: Enhanced IBRS; meltdown: Not affected"),
            pair("Switch on", "CPU 0"),
            pair("Guests on", "CPU 1"),
        ],
        method: vec![
            pair("Repeats", "3, interleaved within each cell, order reversed each time"),
            pair("Window", "2 s, after 0.5 s to warm up"),
            pair("Left out", "2 of 144 runs: CPUs far from each other (312 ns against 96 ns)"),
        ],
        conclusions: vec![
            Conclusion {
                what: "2 pairs each: of 3 comparisons 3 have too few pairs".into(),
                concludes: Some(false),
            },
            Conclusion {
                what: "10 pairs each: of 3 results 2 confirmed".into(),
                concludes: Some(true),
            },
            Conclusion { what: "noise floor: 1.00 (0.98-1.02, n 10)".into(), concludes: None },
        ],
        verdicts: vec![
            verdict(
                "polling takes fewer events from three guests on: 1,021 against 24,118/s",
                true,
            ),
            verdict("one copy: 1.00 copies per frame after, 2.00 before", true),
            verdict("calls per frame fall with the time-out: 0.61, 0.64, 0.66", false),
        ],
        warnings: warnings(),
        parts: parts(),
    }
}

fn verdict(what: &str, holds: bool) -> Verdict {
    Verdict { what: what.into(), holds: Some(holds) }
}

fn warnings() -> Vec<Warning> {
    let skipped = (1..=9).map(|guests| Warning {
        what: format!("guests={guests} proto=virtio guest=qemu"),
        why: "qemu-system-x86_64 is not installed: package qemu-system-x86".into(),
    });
    let failed = Warning {
        what: "guests=8 streams=4 direction=from-guest".into(),
        why: "iperf3 ended with 1: unable to connect to server".into(),
    };
    skipped.chain([failed]).collect()
}

fn parts() -> Vec<Part> {
    vec![
        Part::Text {
            title: "Polling in place of events".into(),
            body: "The original table beside ours.\nRatios are with over without.\n\nAt equal \
                   throughput the guests' CPU is about halved from three guests on."
                .into(),
        },
        Part::Table(polling()),
        Part::Plot(copies()),
        Part::Text { title: "Fairness".into(), body: String::new() },
        Part::Plot(fairness()),
        Part::Plot(threads()),
        Part::Table(coalescing()),
        Part::Plot(latency()),
        Part::Plot(neighbours()),
    ]
}

fn titles(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

pub fn polling() -> Table {
    let original = [
        (1, 1472, [950.30, 44.8, 22.4, 949.32, 46.0, 17.9]),
        (1, 1500, [915.84, 84.7, 42.4, 908.94, 88.3, 28.7]),
        (3, 1472, [963.43, 50.7, 41.1, 964.47, 51.0, 25.0]),
        (3, 1500, [859.96, 99.5, 73.4, 861.19, 97.4, 39.9]),
        (6, 1472, [978.85, 56.9, 59.2, 975.05, 53.8, 33.5]),
        (9, 1472, [987.91, 60.5, 70.0, 988.30, 56.6, 42.7]),
    ];
    let mut rows = Vec::new();
    for (guests, bytes, [mbit, host, guest, mbit2, host2, guest2]) in original {
        for (policy, [mbit, host, guest]) in
            [("event", [mbit, host, guest]), ("smart poll", [mbit2, host2, guest2])]
        {
            let spread = |median: f64| {
                let (low, high) = (median * 0.97, median * 1.02);
                Value::Spread(Estimate { count: 10, median, low, high, interval: true }, 1)
            };
            let why = "a 1 kHz poll sends no events: nothing to divide by";
            rows.push(vec![
                Value::Text(format!("UDP receive, {guests} guests, {bytes} bytes")),
                Value::Text(policy.into()),
                Value::Original(mbit, 2),
                spread(mbit * 0.99),
                Value::Original(host, 1),
                spread(host * 0.4),
                Value::Original(guest, 1),
                spread(guest * 0.7),
                if policy == "event" {
                    Value::Number(24118.4, 0)
                } else {
                    Value::Number(1021.0, 0)
                },
                if policy == "event" { Value::Missing(why.into()) } else { Value::Number(0.57, 2) },
            ]);
        }
    }
    Table {
        title: "UDP receive, uplink limited to 1 Gbit/s".into(),
        note: "CPU in per cent of one CPU; guests' is the sum of all.".into(),
        columns: titles(&[
            "case",
            "policy",
            "original, Mbit/s",
            "ours, Mbit/s",
            "original, back end %",
            "ours, back end %",
            "original, guests %",
            "ours, guests %",
            "events/s",
            "ratio",
        ]),
        rows,
        command: "pvswitch lab run polling --only guests=1,3,6,9 --only traffic=udp-receive".into(),
    }
}

pub fn coalescing() -> Table {
    let original = [
        ("before", 11.3, 1.0, 6.3, 1.0),
        ("0", 11.7, 1.0, 6.6, 23.5),
        ("1", 17.1, 8.8, 8.6, 26.0),
        ("1/pending", 13.4, 1.9, 6.6, 23.8),
        ("2/pending", 13.6, 2.8, 6.6, 24.1),
    ];
    let row = |(name, to, to_irq, from, from_irq): (&str, f64, f64, f64, f64)| {
        vec![
            Value::Text(name.into()),
            Value::Original(to, 1),
            Value::Number(to / 4.0, 2),
            Value::Original(to_irq, 1),
            Value::Number(to_irq * 3.1, 1),
            Value::Original(from, 1),
            Value::Missing("the guest has no TCP".into()),
            Value::Original(from_irq, 1),
            Value::Missing("skipped: iperf3 is not installed (package iperf3)".into()),
        ]
    };
    Table {
        title: "1 GB of TCP each way, GSO off".into(),
        note: String::new(),
        columns: titles(&[
            "time-out",
            "original, to host s",
            "ours, to host s",
            "original, frames per interrupt",
            "ours, frames per call",
            "original, to guest s",
            "ours, to guest s",
            "original, frames per interrupt",
            "ours, frames per call",
        ]),
        rows: original.map(row).into(),
        command: "pvswitch lab run coalescing".into(),
    }
}

fn points(values: &[(f64, f64, f64)]) -> Vec<Point> {
    let point = |(x, y, e): &(f64, f64, f64)| {
        let (low, high) = (y - e, y + e);
        Point { x: *x, y: *y, low, high, count: 10, interval: true }
    };
    values.iter().map(point).collect()
}

fn line(name: &str, colour: usize, values: &[(f64, f64, f64)]) -> Series {
    Series { name: name.into(), colour, points: points(values), ..Series::default() }
}

/// The wiki's layout.
pub fn fairness() -> Plot {
    let guests = |most: f64, bend: f64, error: f64| -> Vec<(f64, f64, f64)> {
        (1..=8)
            .map(f64::from)
            .map(|n| (n, most * n / (n + bend) - 0.02 * n * n, error * n / 4.0))
            .collect()
    };
    let cpu = Series {
        dashed: true,
        right: true,
        ..line("CPU of the switch", 2, &guests(420.0, 2.6, 6.0))
    };
    Plot {
        title: "From guests to host, 1 stream each".into(),
        note: "Mean of three repeats; error bars are one standard deviation.".into(),
        file: "fairness-from-guest-1".into(),
        x: "guests".into(),
        y: "throughput, Gbit/s".into(),
        right: "CPU, % of one".into(),
        series: vec![
            line("shared worker, sum", 1, &guests(11.2, 1.5, 0.3)),
            line("one worker per port, sum", 0, &guests(10.1, 1.2, 0.2)),
            line("shared worker, least of a guest", 4, &guests(2.2, 0.7, 0.1)),
            line("one worker per port, least of a guest", 3, &guests(2.9, 0.4, 0.1)),
            cpu,
        ],
        command: COMMAND.into(),
        ..Plot::default()
    }
}

pub fn copies() -> Plot {
    let pairs = ["A to host", "host to A", "B to host", "host to B", "A to B", "B to A"];
    let bars = |name: &str, colour: usize, dashed: bool, values: [f64; 6]| {
        let values: Vec<_> = values.iter().zip(0..).map(|(y, x)| (f64::from(x), *y, 0.0)).collect();
        Series { bars: true, dashed, ..line(name, colour, &values) }
    };
    let mut ours =
        bars("ours, after", 0, false, [90.1, 77.3, 112.0, 101.2, 60.6, 63.0].map(|v| v * 1e4));
    for point in &mut ours.points {
        (point.low, point.high) = (point.y * 0.93, point.y * 1.05);
    }
    Plot {
        title: "Packet filter off: before and after".into(),
        file: "copies-filter-off".into(),
        x: "pair".into(),
        categories: titles(&pairs),
        y: "KB/s".into(),
        log: (false, true),
        series: vec![
            bars(
                "original, before",
                1,
                true,
                [14357.0, 13113.0, 16239.0, 18839.0, 11122.0, 7369.0],
            ),
            bars(
                "original, after",
                0,
                true,
                [17745.0, 15175.0, 22179.0, 20005.0, 12307.0, 12647.0],
            ),
            bars("ours, before", 1, false, [52.2, 48.9, 61.0, 63.5, 41.7, 40.2].map(|v| v * 1e4)),
            ours,
        ],
        command: "pvswitch lab run copies --only filter=off".into(),
        ..Plot::default()
    }
}

pub fn threads() -> Plot {
    let limit = |n: f64| n / (1.0 + 0.05 * (n - 1.0) + 0.004 * n * (n - 1.0));
    let most: Vec<_> = (1..=12).map(f64::from).map(|n| (n, limit(n), 0.0)).collect();
    Plot {
        title: "Speed-up over one worker".into(),
        note: "The dashed line is a limit, not a measurement.".into(),
        file: "threads-speed-up".into(),
        x: "workers".into(),
        y: "times one worker".into(),
        series: vec![
            line(
                "balanced",
                0,
                &[
                    (1.0, 1.0, 0.05),
                    (2.0, 1.9, 0.1),
                    (4.0, 3.4, 0.2),
                    (8.0, 5.1, 0.3),
                    (12.0, 5.7, 0.4),
                ],
            ),
            line(
                "by group",
                1,
                &[
                    (1.0, 1.0, 0.04),
                    (2.0, 1.8, 0.2),
                    (4.0, 2.9, 0.3),
                    (8.0, 4.4, 0.2),
                    (12.0, 4.6, 0.5),
                ],
            ),
            Series { dashed: true, model: true, ..line("limit of balanced", 0, &most) },
            Series {
                dashed: true,
                loose: true,
                ..line("original", 2, &[(4.0, 3.7, 0.0), (10.0, 2.0, 0.0)])
            },
        ],
        command: "pvswitch lab run threads".into(),
        ..Plot::default()
    }
}

pub fn latency() -> Plot {
    let at = |base: f64, bend: f64| -> Vec<(f64, f64, f64)> {
        (0..8)
            .map(|n| 10f64.powf(2.0 + f64::from(n) * 0.55))
            .map(|rate| (rate, base + bend / rate, base * 0.1))
            .collect()
    };
    Plot {
        title: "Latency against rate, p99".into(),
        file: "latency-rate".into(),
        x: "frames/s offered".into(),
        y: "p99, µs".into(),
        log: (true, true),
        series: vec![
            line("always spin", 0, &at(3.1, 20.0)),
            line("always sleep", 1, &at(28.0, 4e3)),
            line("spin then sleep", 2, &at(9.0, 9e3)),
            line("adaptive", 3, &at(4.0, 6e3)),
            line("never measured", 4, &[(1e3, 0.0, 0.0)]),
        ],
        command: "pvswitch lab run latency".into(),
        ..Plot::default()
    }
}

pub fn neighbours() -> Plot {
    let names = [
        "pvswitch, adaptive",
        "pvswitch, always-sleep",
        "vhost-user-backend of rust-vmm",
        "OVS-DPDK 3.1",
        "DPDK net_vhost",
        "Linux bridge with veth",
        "vde_switch",
        "xen-netback",
    ];
    let values: Vec<_> = (0..8).map(f64::from).map(|n| (n, 4.1 / (n + 1.0), 0.1)).collect();
    let cpu: Vec<_> = (0..8).map(f64::from).map(|n| (n, 40.0 + 7.0 * n, 2.0)).collect();
    Plot {
        title: "Rivals: frames, and the CPU they take".into(),
        file: "peers".into(),
        categories: titles(&names),
        y: "million frames/s".into(),
        right: "CPU, %".into(),
        series: vec![
            Series { bars: true, ..line("64 bytes", 0, &values) },
            Series { right: true, dashed: true, ..line("CPU", 1, &cpu) },
        ],
        command: "pvswitch lab run peers".into(),
        ..Plot::default()
    }
}

/// Layouts that no seed has, and that a study may ask for.
pub fn kinds() -> Vec<Plot> {
    let steps = |count: u32, value: fn(f64) -> f64| -> Vec<(f64, f64, f64)> {
        (1..=count).map(f64::from).map(|n| (n, value(n), value(n).abs() * 0.08)).collect()
    };
    let bars = |series: Series| Series { bars: true, ..series };
    let settings: Vec<String> = (1..=14).map(|n| format!("setting-{n} off")).collect();
    let changes: Vec<_> = (0..14).map(f64::from).map(|n| (n, (n - 5.0) * (n - 9.0), 2.0)).collect();
    let plot = |title: &str, file: &str, x: &str, y: &str, series: Vec<Series>| Plot {
        title: title.into(),
        file: file.into(),
        x: x.into(),
        y: y.into(),
        series,
        command: COMMAND.into(),
        ..Plot::default()
    };
    vec![
        Plot {
            categories: settings,
            ..plot(
                "One thing changed at a time: what it does to the calls per frame, in per cent of \
                 the default's, with the frames of one guest",
                "changes",
                "setting",
                "change, %",
                vec![bars(line("calls per frame", 0, &changes))],
            )
        },
        plot(
            "Calls by workers",
            "numeric-bars",
            "workers",
            "calls/s",
            vec![
                bars(line("event", 0, &steps(6, |n| 21_000.0 / n))),
                bars(line("poll", 1, &steps(6, |_| 1000.0))),
            ],
        ),
        plot("One point", "one", "guests", "Gbit/s", vec![line("once", 0, &[(3.0, 4.2, 0.0)])]),
        plot("Nothing", "nothing", "guests", "Gbit/s", vec![line("never", 0, &[])]),
        Plot {
            right: "wake-ups/s".into(),
            log: (false, true),
            ..plot(
                "Idle ports",
                "idle",
                "ports",
                "CPU, %",
                vec![
                    line("CPU, adaptive", 0, &steps(8, |n| 0.02 * n)),
                    line("CPU, always spin", 1, &steps(8, |n| 90.0 + n)),
                    Series {
                        right: true,
                        dashed: true,
                        ..line("wake-ups", 0, &steps(8, |n| 3.0 * n))
                    },
                    Series {
                        right: true,
                        dashed: true,
                        ..line("wake-ups of spin", 1, &steps(8, |_| 0.0))
                    },
                ],
            )
        },
        plot(
            "Eight at once",
            "eight",
            "guests",
            "Mbit/s",
            (0..8)
                .map(|n| {
                    let at = move |x: f64| 900.0 / (1.0 + 0.1 * x * f64::from(n + 1));
                    let points: Vec<_> = (1..=9).map(f64::from).map(|x| (x, at(x), 0.0)).collect();
                    line(&format!("policy {}", n + 1), n as usize, &points)
                })
                .collect(),
        ),
    ]
}
