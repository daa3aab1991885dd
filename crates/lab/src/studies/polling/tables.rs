//! The report: the original study's table beside ours, ratios, and plots over the number of guests.

use super::Polling;
use super::original::{Row, TABLE};
use crate::plan::{Axis, Cell};
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::store::Results;

const ABOUT: &str = "\
Without the patch, the front end uses events; with the patch, it uses smart poll: a timer of 1 \
kHz, during which the back end does not notify. Not armed is the same timer without the feature: \
the front end leaves the event index of the ring behind, which every back end honours. The \
precise timer works in the same way at 5 kHz; adaptive chooses its times. The back end is the \
same in all cases: one worker that sleeps until it is notified and notifies at once.

CPU is in per cent of one CPU. That of the back end includes the bridge to the uplink and, where \
guests send, the network outside, which run in its context. That of the guests includes the \
process of their NIC and the tools. A guest is a network namespace, so there are no costs of VM \
exits or interrupts; the tools are iperf3, not netperf. With 1500 bytes, each datagram is one \
full and one small frame; for TCP, it is the length of a write.

With an uplink of 1 Gbit/s, senders stay just below its rate and send 5,000 times per second \
each, so a flow causes at most 5,000 events per second; the network card of the original study \
interrupted dom0 up to 20,000 times. TCP uses reno, because bbr mistakes the delay of a poll \
timer for a longer path and sends less. Where the CPUs are too few for the sender (two must serve \
all), throughput is below that of the original study; then compare CPU time per megabyte.";

/// One protocol's and uplink's part of the matrix.
struct Side<'a> {
    results: &'a Results,
    uplink: &'a str,
    proto: &'a str,
    /// Whether there are several, so that captions have to say which.
    several: bool,
}

/// One kind of traffic.
#[derive(Clone, Copy)]
struct Load<'a> {
    direction: &'a str,
    traffic: &'a str,
}

/// Parts of the report.
pub fn parts(results: &Results) -> Vec<Part> {
    let values = |name: &str| -> Vec<&str> {
        let axis = results.plan.axes.iter().find(|axis| axis.name == name);
        axis.map_or_else(Vec::new, |axis| axis.values.iter().map(String::as_str).collect())
    };
    let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
    let several = values("uplink").len() * values("proto").len() > 1;
    for uplink in values("uplink") {
        for proto in values("proto") {
            let side = Side { results, uplink, proto, several };
            let loads = values("direction").into_iter().flat_map(|direction| {
                values("traffic").into_iter().map(move |traffic| Load { direction, traffic })
            });
            let loads: Vec<Load> = loads.collect();
            parts.push(Part::Table(side.ratios(&loads)));
            for load in &loads {
                parts.push(Part::Table(side.table(*load)));
                parts.extend(side.plots(*load).into_iter().map(Part::Plot));
            }
        }
    }
    parts
}

/// Name of a variant, beside the cases of the original study.
fn case(variant: &str) -> String {
    match variant {
        "event" => "without: events".into(),
        "smart-poll" => "with: smart poll, 1 kHz".into(),
        super::NOT_ARMED => "not armed, 1 kHz".into(),
        "timer" => "precise timer, 5 kHz".into(),
        other => other.into(),
    }
}

fn original_of(load: Load, guests: &str, size: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| {
        row.receive == (load.direction == "receive")
            && row.udp == (load.traffic == "udp")
            && row.guests.to_string() == guests
            && row.size.to_string() == size
    })
}

impl<'a> Side<'a> {
    fn values(&self, name: &str) -> &'a [String] {
        let axis = self.results.plan.axes.iter().find(|axis| axis.name == name);
        axis.map_or(&[], |axis: &Axis| &axis.values)
    }

    /// Suffix of a caption, if there are several sides.
    fn which(&self) -> String {
        if !self.several {
            return String::new();
        }
        let uplink = if self.uplink == "1g" { "1 Gbit/s" } else { self.uplink };
        format!(" ({}, uplink {uplink})", self.proto)
    }

    /// Of files, likewise.
    fn suffix(&self) -> String {
        if self.several { format!("-{}-{}", self.proto, self.uplink) } else { String::new() }
    }

    fn cell(&self, load: Load, guests: &str, size: &str, variant: &str) -> Cell {
        let pairs = [
            ("guests", guests),
            ("size", size),
            ("traffic", load.traffic),
            ("direction", load.direction),
            ("uplink", self.uplink),
            ("proto", self.proto),
            ("variant", variant),
        ];
        Cell(pairs.map(|(name, value)| (name.into(), value.into())).into())
    }

    /// Number of guests and size of every case of this load, in the original study's order.
    fn cases(&self, load: Load) -> Vec<(&'a str, &'a str)> {
        let all = self.values("guests").iter().flat_map(|guests| {
            self.values("size").iter().map(move |size| (guests.as_str(), size.as_str()))
        });
        let mut all: Vec<_> = all.collect();
        all.retain(|(guests, size)| {
            crate::study::Study::has(&Polling, &self.cell(load, guests, size, "event"))
        });
        all.sort_by_key(|(guests, size)| (guests.parse().unwrap_or(0), size.parse().unwrap_or(0)));
        all
    }

    fn value(&self, cell: &Cell, measure: &str, digits: usize) -> Value {
        Value::estimate(self.results.estimate(cell, measure), digits, "not measured")
    }

    fn command(&self, load: Load) -> String {
        format!(
            "pvswitch lab run polling --only direction={} --only traffic={} --only uplink={} \
             --only proto={}",
            load.direction, load.traffic, self.uplink, self.proto
        )
    }

    /// The original study's layout, its figures beside ours.
    fn table(&self, load: Load) -> Table {
        let mut rows = Vec::new();
        for (guests, size) in self.cases(load) {
            let original = original_of(load, guests, size);
            for variant in self.values("variant") {
                let cell = self.cell(load, guests, size, variant);
                let of_original = |i: usize, digits| match (variant.as_str(), original) {
                    ("event", Some(row)) => Value::Original(row.without[i], digits),
                    ("smart-poll", Some(row)) => Value::Original(row.with[i], digits),
                    _ => Value::Missing("not in the original study".into()),
                };
                let number = |text: &str| Value::Number(text.parse().unwrap_or(0.0), 0);
                rows.push(vec![
                    number(guests),
                    number(size),
                    Value::Text(case(variant)),
                    of_original(0, 2),
                    self.value(&cell, "throughput", 2),
                    of_original(1, 1),
                    self.value(&cell, "backend_cpu", 1),
                    of_original(2, 1),
                    self.value(&cell, "guests_cpu", 1),
                    self.value(&cell, "guest_us_per_mb", 0),
                    self.value(&cell, "events", 0),
                    self.value(&cell, "ping_p99", 0),
                ]);
            }
        }
        let (direction, traffic) = (load.direction, load.traffic.to_uppercase());
        Table {
            title: format!("Guests {direction}, {traffic}{}", self.which()),
            note: "Original: figures as published. Ours: medians.".into(),
            columns: [
                "Guests",
                "Packet size, bytes",
                "Case",
                "Original: throughput, Mbit/s",
                "Throughput, Mbit/s",
                "Original: dom0 CPU, %",
                "Back end CPU, %",
                "Original: guests' CPU, %",
                "Guests' CPU, %",
                "Guests' CPU per MB, us",
                "Events, 1/s",
                "Ping p99, us",
            ]
            .map(String::from)
            .into(),
            rows,
            command: self.command(load),
        }
    }

    /// Ratio of our figures, with polling over without.
    fn ratio(&self, load: Load, case: (&str, &str), variant: &str, measure: &str) -> Value {
        let cell = |variant: &str| self.cell(load, case.0, case.1, variant);
        let found = self.results.ratio(&cell(variant), &cell("event"), measure);
        Value::estimate(found, 2, "not measured")
    }

    fn ratios(&self, loads: &[Load]) -> Table {
        let mut rows = Vec::new();
        for load in loads {
            for case in self.cases(*load) {
                let original = original_of(*load, case.0, case.1);
                let of_original = |i: usize| match original {
                    Some(row) => Value::Original(row.with[i] / row.without[i], 2),
                    None => Value::Missing("not in the original study".into()),
                };
                let ours = |measure| self.ratio(*load, case, "smart-poll", measure);
                rows.push(vec![
                    Value::Text(format!("{} {}", load.direction, load.traffic.to_uppercase())),
                    Value::Number(case.0.parse().unwrap_or(0.0), 0),
                    Value::Number(case.1.parse().unwrap_or(0.0), 0),
                    of_original(0),
                    ours("throughput"),
                    of_original(1),
                    ours("backend_cpu"),
                    of_original(2),
                    ours("guests_cpu"),
                    ours("guest_us_per_mb"),
                    ours("events"),
                ]);
            }
        }
        Table {
            title: format!("With the patch over without{}", self.which()),
            note: "Below 1, the patch takes less. Original: ratios of published figures. Ours: \
                   medians of the ratios of pairs. Where throughput differs, compare CPU per MB."
                .into(),
            columns: [
                "Traffic",
                "Guests",
                "Packet size, bytes",
                "Original: throughput",
                "Throughput",
                "Original: dom0 CPU",
                "Back end CPU",
                "Original: guests' CPU",
                "Guests' CPU",
                "Guests' CPU per MB",
                "Events",
            ]
            .map(String::from)
            .into(),
            rows,
            command: format!(
                "pvswitch lab run polling --only uplink={} --only proto={}",
                self.uplink, self.proto
            ),
        }
    }

    /// Guests' CPU over the number of guests for each size, the original dashed; and events.
    fn plots(&self, load: Load) -> Vec<Plot> {
        let mut plots = Vec::new();
        let Load { direction, traffic } = load;
        for size in self.values("size") {
            let cases: Vec<_> =
                self.cases(load).into_iter().filter(|case| case.1 == size).collect();
            // One number of guests is no line.
            if cases.len() < 2 {
                continue;
            }
            let caption = format!("{}, {size} bytes{}", traffic.to_uppercase(), self.which());
            let file = format!("{direction}-{traffic}-{size}{}", self.suffix());
            let mut cpu = self.lines(load, &cases, "guests_cpu");
            cpu.extend(original_lines(load, &cases));
            let plot = |title: String, file: String, y: &str, series| Plot {
                title,
                file,
                x: "guests".into(),
                y: y.into(),
                series,
                command: self.command(load),
                ..Plot::default()
            };
            let verb = if direction == "send" { "sending" } else { "receiving" };
            plots.push(plot(
                format!("CPU of {verb} guests, all together: {caption}"),
                format!("guests-cpu-{file}"),
                "guests' CPU, % of one CPU",
                cpu,
            ));
            plots.push(plot(
                format!("Events of {verb} guests: {caption}"),
                format!("events-{file}"),
                "events per second",
                self.lines(load, &cases, "events"),
            ));
        }
        plots
    }

    fn lines(&self, load: Load, cases: &[(&str, &str)], measure: &str) -> Vec<Series> {
        let lines = self.values("variant").iter().enumerate().map(|(colour, variant)| {
            let points = cases.iter().filter_map(|(guests, size)| {
                let found =
                    self.results.estimate(&self.cell(load, guests, size, variant), measure)?;
                Some(Point::of(guests.parse().ok()?, found))
            });
            Series { name: case(variant), points: points.collect(), colour, ..Series::default() }
        });
        lines.filter(|line| !line.points.is_empty()).collect()
    }
}

fn original_lines(load: Load, cases: &[(&str, &str)]) -> Vec<Series> {
    let line = |(colour, name): (usize, &str)| {
        let points = cases.iter().filter_map(|(guests, size)| {
            let row = original_of(load, guests, size)?;
            let y = if colour == 0 { row.without[2] } else { row.with[2] };
            Some(Point::at(f64::from(row.guests), y))
        });
        let points = points.collect();
        Series { name: name.into(), points, colour, dashed: true, ..Series::default() }
    };
    let lines = ["original, without", "original, with"].into_iter().enumerate().map(line);
    lines.filter(|line| line.points.len() > 1).collect()
}
