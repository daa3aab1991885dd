//! The report: the seed's table beside ours, ratios, and plots over the number of guests.

use super::Polling;
use super::seed::{Row, TABLE};
use crate::plan::{Axis, Cell};
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::store::Results;

const ABOUT: &str = "\
Without the patch is the front end with events; with it is the seed's smart poll: a \
timer of 1 kHz, during which the back end does not notify. Events not asked for is the same \
timer without the feature: the front end leaves the ring's event index behind, which any back \
end heeds. The precise timer works as that one and looks 5,000 times a second, adaptive as \
it finds best. The back end is the same in all of them: one \
worker that sleeps until it is notified and notifies at once.

CPU is in per cent of one CPU. The back end's has the bridge to the uplink in it, and \
where guests send the network outside, too; they run in its context. The guests' has \
their NIC's process and the tools. A guest is a network namespace here, so neither the \
virtual machine's exits nor its interrupts cost anything, and the tools are iperf3, not \
netperf. 1500: each datagram is one full and one small frame; with TCP it is the length \
of a write.

With an uplink of 1 Gbit/s senders stay just below what it carries and send 5,000 times \
a second each, so a flow makes 5,000 events a second or fewer at best; the seed's \
network card interrupted dom0 up to 20,000 times. TCP is reno: bbr takes the delay of a \
poll timer for a longer way and sends less. Where the CPUs are too few for the sender \
(two have to do for all), throughput falls behind the seed's; CPU time per megabyte is then \
the fairer figure.";

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

/// What a variant is called beside the seed's cases.
fn case(variant: &str) -> String {
    match variant {
        "event" => "without: events".into(),
        "smart-poll" => "with: smart poll, 1 kHz".into(),
        super::NOT_ARMED => "events not asked for, 1 kHz".into(),
        "timer" => "precise timer, 5 kHz".into(),
        other => other.into(),
    }
}

fn seed_of(load: Load, guests: &str, size: &str) -> Option<&'static Row> {
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

    /// Behind a caption, where there are several sides.
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

    /// Number of guests and size of every case of this load, in the seed's order.
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
        match self.results.summary(cell, measure) {
            None => Value::Missing("not measured".into()),
            Some(found) if found.count == 1 => Value::Number(found.median, digits),
            Some(found) => {
                Value::Spread { median: found.median, low: found.low, high: found.high, digits }
            }
        }
    }

    fn command(&self, load: Load) -> String {
        format!(
            "pvswitch lab run polling --only direction={} --only traffic={} --only uplink={} \
             --only proto={}",
            load.direction, load.traffic, self.uplink, self.proto
        )
    }

    /// The seed's layout, its figures beside ours.
    fn table(&self, load: Load) -> Table {
        let mut rows = Vec::new();
        for (guests, size) in self.cases(load) {
            let seed = seed_of(load, guests, size);
            for variant in self.values("variant") {
                let cell = self.cell(load, guests, size, variant);
                let of_seed = |i: usize, digits| match (variant.as_str(), seed) {
                    ("event", Some(row)) => Value::Seed(row.without[i], digits),
                    ("smart-poll", Some(row)) => Value::Seed(row.with[i], digits),
                    _ => Value::Missing("not in the seed".into()),
                };
                let number = |text: &str| Value::Number(text.parse().unwrap_or(0.0), 0);
                rows.push(vec![
                    number(guests),
                    number(size),
                    Value::Text(case(variant)),
                    of_seed(0, 2),
                    self.value(&cell, "throughput", 2),
                    of_seed(1, 1),
                    self.value(&cell, "backend_cpu", 1),
                    of_seed(2, 1),
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
            note: "Seed: figures as printed there. Ours: median, with the range where there are \
                   several runs."
                .into(),
            columns: [
                "Guests",
                "Packet size, bytes",
                "Case",
                "Seed: throughput, Mbit/s",
                "Throughput, Mbit/s",
                "Seed: dom0 CPU, %",
                "Back end CPU, %",
                "Seed: guests' CPU, %",
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

    /// Ours with polling over ours without; none where either is missing.
    fn ratio(&self, load: Load, case: (&str, &str), variant: &str, measure: &str) -> Value {
        let of = |variant: &str| {
            let cell = self.cell(load, case.0, case.1, variant);
            self.results.summary(&cell, measure).map(|found| found.median)
        };
        match (of(variant), of("event")) {
            (Some(with), Some(without)) if without > 0.0 => Value::Number(with / without, 2),
            _ => Value::Missing("not measured".into()),
        }
    }

    fn ratios(&self, loads: &[Load]) -> Table {
        let mut rows = Vec::new();
        for load in loads {
            for case in self.cases(*load) {
                let seed = seed_of(*load, case.0, case.1);
                let of_seed = |i: usize| match seed {
                    Some(row) => Value::Seed(row.with[i] / row.without[i], 2),
                    None => Value::Missing("not in the seed".into()),
                };
                let ours = |measure| self.ratio(*load, case, "smart-poll", measure);
                rows.push(vec![
                    Value::Text(format!("{} {}", load.direction, load.traffic.to_uppercase())),
                    Value::Number(case.0.parse().unwrap_or(0.0), 0),
                    Value::Number(case.1.parse().unwrap_or(0.0), 0),
                    of_seed(0),
                    ours("throughput"),
                    of_seed(1),
                    ours("backend_cpu"),
                    of_seed(2),
                    ours("guests_cpu"),
                    ours("guest_us_per_mb"),
                    ours("events"),
                ]);
            }
        }
        Table {
            title: format!("With the patch over without{}", self.which()),
            note: "Below 1 the patch takes less. The seed's ratios are of its printed figures; \
                   ours are of medians. Per MB is the fair one where throughput differs."
                .into(),
            columns: [
                "Traffic",
                "Guests",
                "Packet size, bytes",
                "Seed: throughput",
                "Throughput",
                "Seed: dom0 CPU",
                "Back end CPU",
                "Seed: guests' CPU",
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

    /// Guests' CPU over the number of guests for each size, the seed's dashed; and events.
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
            cpu.extend(seed_lines(load, &cases));
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
                    self.results.summary(&self.cell(load, guests, size, variant), measure)?;
                let x = guests.parse().ok()?;
                Some(Point { x, y: found.median, low: found.low, high: found.high })
            });
            Series { name: case(variant), points: points.collect(), colour, ..Series::default() }
        });
        lines.filter(|line| !line.points.is_empty()).collect()
    }
}

fn seed_lines(load: Load, cases: &[(&str, &str)]) -> Vec<Series> {
    let line = |(colour, name): (usize, &str)| {
        let points = cases.iter().filter_map(|(guests, size)| {
            let row = seed_of(load, guests, size)?;
            let y = if colour == 0 { row.without[2] } else { row.with[2] };
            Some(Point { x: f64::from(row.guests), y, low: y, high: y })
        });
        let points = points.collect();
        Series { name: name.into(), points, colour, dashed: true, ..Series::default() }
    };
    let lines = ["seed, without", "seed, with"].into_iter().enumerate().map(line);
    lines.filter(|line| line.points.len() > 1).collect()
}
